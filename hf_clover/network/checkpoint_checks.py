"""Whether a checkpoint holds what its config asks for.

Contract: `check_checkpoint` reads the headers of safetensors files and the draft vocabulary, never a weight. Heads
whose tensors are missing, renamed or of another shape are refused before memory is taken for them; transformers alone
would fill missing tensors with random numbers. This file is pushed to the Hub beside `modeling_clover.py`.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel


def check_checkpoint(model: PreTrainedModel, files: Sequence[str], source: Any) -> None:
    """Raise unless `files` hold the tensors of `model`, which may be on the meta device. `source` is the checkpoint's
    name as the user wrote it."""
    homes, found = {}, {}
    folder = os.path.join(os.path.abspath(source), "") if os.path.isdir(source) else ""
    for file in files:
        if not os.path.abspath(file).startswith(folder):  # links, as in the Hub's cache, may lead anywhere
            raise ValueError(
                f"`{source}` names the weights {file!r}, which lie outside of it. Its model.safetensors.index.json "
                "may name files of its own folder only: save or download it again."
            )
        if not file.endswith(".safetensors"):
            raise ValueError(
                f"`{source}` keeps its weights in {os.path.basename(file)!r}, and only safetensors is read. Convert "
                "it, or pass `use_safetensors=False` if you trust it."
            )
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a dictionary)
                homes[name], found[name] = file, tuple(opened.get_slice(name).get_shape())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wanted = {name: tensors[name] for name in model.state_dict()}
    shapes = {name: tuple(getattr(tensor, "ds_shape", tensor.shape)) for name, tensor in wanted.items()}
    missing, unknown = sorted(shapes.keys() - found.keys()), sorted(found.keys() - shapes.keys())
    if missing:
        others = f", and holds others, such as {unknown[:3]}" if unknown else ""
        raise ValueError(
            f"`{source}` lacks {len(missing)} of the tensors that its config asks for, such as {missing[:3]}{others}. "
            "It is incomplete, or its config.json belongs to other heads: save or download both again."
        )
    differing = sorted(name for name, shape in shapes.items() if found[name] != shape)
    if differing:
        raise ValueError(
            f"`{source}` holds `{differing[0]}` in the shape {found[differing[0]]}, and its config asks for "
            f"{shapes[differing[0]]} (so with {len(differing)} tensors). Its config.json belongs to other heads: save "
            "or download both again."
        )
    if "draft_ids" in shapes:
        with safe_open(homes["draft_ids"], framework="pt") as opened:
            check_draft_ids(opened.get_tensor("draft_ids"), model.config.vocab_size, source)


def check_draft_ids(ids: torch.Tensor, vocab_size: int, source: Any) -> None:
    """Raise unless the draft vocabulary [draft V] holds ids of the target's tokens, each once."""
    if ids.dtype not in (torch.int64, torch.int32):
        problem = f"are {ids.dtype}, not integers"
    elif int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        problem = f"go from {int(ids.min())} to {int(ids.max())}, the target's from 0 to {vocab_size - 1}"
    elif len(ids.unique()) < len(ids):
        problem = f"hold only {len(ids.unique())} different tokens in {len(ids)} places"
    else:
        return
    raise ValueError(f"`{source}` has an impossible draft vocabulary: its `draft_ids` {problem}.")


__all__ = ["check_checkpoint", "check_draft_ids"]
