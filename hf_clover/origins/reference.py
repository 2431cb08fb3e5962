"""Heads from a checkpoint of the papers' public reference.

Contract: returns bound `CloverHeads` on the target's device, in the checkpoint's dtype. Unknown tensors, missing
tensors, and a pickle without `allow_pickle` are refused.
"""

import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.modeling_utils import local_torch_dtype

from ..network.configuration_clover import CloverConfig
from ..network.modeling_clover import CloverHeads
from ..network.target_parts import fingerprint, unwrap
from .from_target import identity_of
from .last_layer import REFERENCE_ROPE

_PREFIXES = {
    "clover_head_mlp_rnn.": "entry_decoder.",
    "clover_head_mlp_rnn2.": "decoder.",
    "clover_norm.": "norm.",
    "clover_head_norm.": "head_norm.",
    "clover_head_mlp.": "first_fc.",
    "clover_head_mlp2.": "fc.0.",
    "layers.": "layers.",
}
_COPIES_OF_THE_TARGET = ("lm_head.weight", "clover_embed_tokens.weight")


def heads_from_reference_checkpoint(
    cls: type[CloverHeads], folder: str | os.PathLike, target: PreTrainedModel, allow_pickle: bool
) -> CloverHeads:
    folder, model = Path(folder), unwrap(target)
    written = json.loads((folder / "config.json").read_text())
    if "clover" not in written:
        raise ValueError(f'`{folder}` is no reference checkpoint: its config.json has no "clover" section.')
    tensors = _read_tensors(folder, allow_pickle)
    unknown = sorted(name for name in tensors.keys() - set(_COPIES_OF_THE_TARGET) if _translate(name) is None)
    if unknown:
        raise ValueError(f"`{folder}` holds tensors that the reference does not have: {unknown[:5]}.")
    state = {ours: tensor for name, tensor in tensors.items() if (ours := _translate(name)) is not None}
    hidden_size, heads_count = written["hidden_size"], written["num_attention_heads"]
    identity, made_for = identity_of(model), written.get("_name_or_path")
    if "lm_head.weight" in tensors:  # the checkpoint itself identifies its target
        identity["target_fingerprint"] = fingerprint(tensors["lm_head.weight"])
    config = CloverConfig(
        **{
            **identity,
            "variant": "clover-2",
            "target_name_or_path": made_for,
            "hidden_size": hidden_size,
            "vocab_size": written["vocab_size"],
            "num_heads": written["clover"]["num_heads"],
            "num_augmenting_layers": written["clover"]["num_layers"],
            "loss_decay": written["clover"].get("decay_coefficient", 0.7),
            "num_attention_heads": heads_count,
            "num_key_value_heads": written.get("num_key_value_heads", heads_count),
            "head_dim": written.get("head_dim") or hidden_size // heads_count,
            "intermediate_size": written["intermediate_size"],
            "hidden_act": written.get("hidden_act", "silu"),
            "rms_norm_eps": written.get("rms_norm_eps", 1e-6),
            "max_position_embeddings": written.get("max_position_embeddings", 2048),
            "rope_parameters": dict(REFERENCE_ROPE),
        }
    )
    with local_torch_dtype(torch.float32):  # whatever the caller's default is
        heads = cls(config)
    problems = heads.load_state_dict(state, strict=False)
    missing = sorted(problems.missing_keys)
    if missing or problems.unexpected_keys:
        raise ValueError(
            f"`{folder}` does not fit: missing {missing[:5]}, unexpected {sorted(problems.unexpected_keys)[:5]}."
        )
    anchor = next(model.parameters())
    dtype = next(iter(state.values())).dtype
    heads.to(device=anchor.device, dtype=dtype)  # type: ignore[call-arg]  # transformers' wrapper counts `self` too
    heads.bind(model)
    config.target_name_or_path = made_for or identity["target_name_or_path"]
    return heads


def _translate(name: str) -> str | None:
    for theirs, ours in _PREFIXES.items():
        if name.startswith(theirs):
            rest = name.removeprefix(theirs)
            is_decoder = ours in ("entry_decoder.", "decoder.")
            return ours + (rest.replace("input_layernorm.", "norm.") if is_decoder else rest)
    return None


def _read_tensors(folder: Path, allow_pickle: bool) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    if safe := sorted(folder.glob("*.safetensors")):
        for file in safe:
            tensors.update(load_file(file))
        return tensors
    pickled = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    if not pickled:
        raise FileNotFoundError(f"`{folder}` holds no weights: neither *.safetensors nor *.bin, *.pt or *.pth.")
    if not allow_pickle:
        raise ValueError(
            f"`{folder}` holds its weights as a pickle ({pickled[0].name}). Convert it to safetensors, or pass "
            "`allow_pickle=True` to read it with torch's `weights_only=True`."
        )
    for file in pickled:
        tensors.update(torch.load(file, map_location="cpu", weights_only=True))
    return tensors


__all__ = ["heads_from_reference_checkpoint"]
