"""Heads made from something else: from a target, or from a checkpoint of the papers' public reference.

Contract: both functions return bound `CloverHeads` on the target's device and in its dtype. For the papers' variants,
a part of the target's last layer is copied where it corresponds to a part of the Augmenting Block; what does not
correspond keeps its fresh initialisation and is named in one log line. Heads that read states from behind the final
norm (clover-x) start fresh, and what they read is brought to one size.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from .configuration_clover import CloverConfig
from .last_layer import REFERENCE_ROPE, LastLayer, copy_norm
from .modeling_clover import CloverHeads
from .scales import embedding_scale, hidden_state_scale
from .target_parts import find_decoder, fingerprint, is_plain, readable_rows, special_tokens_of, token_table, unwrap

logger = logging.get_logger(__name__)

_REFERENCE_PREFIXES = {
    "clover_head_mlp_rnn.": "entry_decoder.",
    "clover_head_mlp_rnn2.": "decoder.",
    "clover_norm.": "norm.",
    "clover_head_norm.": "head_norm.",
    "clover_head_mlp.": "first_fc.",
    "clover_head_mlp2.": "fc.0.",
    "layers.": "layers.",
}
_REFERENCE_COPIES_OF_THE_TARGET = ("lm_head.weight", "clover_embed_tokens.weight")


def heads_from_target(
    cls: type[CloverHeads], target: PreTrainedModel, variant: str, fields: dict[str, Any]
) -> CloverHeads:
    model = unwrap(target)
    if model.config.is_encoder_decoder:
        raise ValueError(f"`target` is the encoder-decoder `{type(model).__name__}`: heads need a decoder-only model.")
    if any(hasattr(weight, "full_tensor") or hasattr(weight, "ds_id") for weight in model.parameters()):
        raise ValueError(
            f"`target`, a `{type(model).__name__}`, is divided among processes (tensor parallel, FSDP or ZeRO), and "
            "heads are made from its weights: make them from the whole target in one process, with "
            "`device_map='auto'` where one device is too small, and load them with `AutoModel.from_pretrained`."
        )
    _, _, norm = find_decoder(model)
    source = LastLayer(model)
    config = CloverConfig(**{**source.block_fields(), "variant": variant, **_identity(model), **fields})
    if config.normalize_hidden_states:
        _balance(config, model, fields)
    heads = cls(config)
    fresh = [] if config.normalize_hidden_states else source.copy_into(heads)
    _start_norms(norm, heads)
    if fresh and config.has_augmenting_block:
        logger.warning(
            f"Clover heads for `{type(model).__name__}`: the Augmenting Block copies the target's last layer, except "
            f"for what does not correspond and starts fresh: {'; '.join(fresh)}."
        )
    weight = getattr(model.get_output_embeddings(), "weight", None)
    anchor = weight if isinstance(weight, torch.Tensor) else next(model.parameters())
    heads.to(device=anchor.device, dtype=anchor.dtype if is_plain(anchor) else model.dtype)
    return heads.bind(model)


def _identity(model: PreTrainedModel) -> dict[str, Any]:
    """The fields that say which target this is."""
    text_config = model.config.get_text_config(decoder=True)
    rows = readable_rows(model.get_output_embeddings(), text_config)
    name = getattr(model.config, "name_or_path", None) or getattr(model, "name_or_path", None)
    return {
        "vocab_size": text_config.vocab_size,
        "hidden_size": text_config.hidden_size,
        **special_tokens_of(model),
        "target_name_or_path": name or None,
        "target_revision": getattr(model.config, "_commit_hash", None),
        "target_fingerprint": None if rows is None else fingerprint(rows) or None,
    }


def _balance(config: CloverConfig, model: PreTrainedModel, fields: dict[str, Any]) -> None:
    """States and embeddings of size 1, where nobody said otherwise; the papers' variants take both as they are."""
    rows = token_table(config, model, model.get_output_embeddings())
    if "embedding_scale" not in fields and not config.normalize_embeddings and rows is not None:
        config.embedding_scale = embedding_scale(rows)
    if "hidden_state_scale" not in fields and config.output_projector != "residual":  # which no norm follows
        config.hidden_state_scale = hidden_state_scale(model)


@torch.no_grad()
def _start_norms(source: nn.Module | None, heads: CloverHeads) -> None:
    """The closing norm and the norm before lm_head start as the target's final norm (its scale, for a LayerNorm).
    States that come from behind it have its shape already, and start with its size alone."""
    for name in ("norm", "head_norm"):
        if hasattr(heads, name) and heads.config.normalize_hidden_states:
            getattr(heads, name).weight.fill_(1 / heads.config.hidden_state_scale)
        elif hasattr(heads, name) and source is not None:
            copy_norm(source, getattr(heads, name))


# ---------------------------------------------------------------------- the public reference's checkpoints


def heads_from_reference_checkpoint(
    cls: type[CloverHeads], folder: str | os.PathLike, target: PreTrainedModel, allow_pickle: bool
) -> CloverHeads:
    folder, model = Path(folder), unwrap(target)
    written = json.loads((folder / "config.json").read_text())
    if "clover" not in written:
        raise ValueError(f'`{folder}` is no reference checkpoint: its config.json has no "clover" section.')
    state, ignored, tensors = {}, [], _read_tensors(folder, allow_pickle)
    for name, tensor in tensors.items():
        new_name = _translate(name)
        if new_name is None:
            ignored.append(name)
        else:
            state[new_name] = tensor
    unknown = sorted(set(ignored) - set(_REFERENCE_COPIES_OF_THE_TARGET))
    if unknown:
        raise ValueError(f"`{folder}` holds tensors that the reference does not have: {unknown[:5]}.")
    hidden_size, heads_count = written["hidden_size"], written["num_attention_heads"]
    identity, made_for = _identity(model), written.get("_name_or_path")
    if "lm_head.weight" in tensors:  # the checkpoint shows itself whose heads these are
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
    heads = cls(config)
    problems = heads.load_state_dict(state, strict=False)
    missing = sorted(problems.missing_keys)
    if missing or problems.unexpected_keys:
        raise ValueError(
            f"`{folder}` does not fit: missing {missing[:5]}, unexpected {sorted(problems.unexpected_keys)[:5]}."
        )
    anchor = next(model.parameters())
    heads.to(device=anchor.device, dtype=next(iter(state.values())).dtype).bind(model)
    config.target_name_or_path = made_for or identity["target_name_or_path"]
    return heads


def _translate(name: str) -> str | None:
    for theirs, ours in _REFERENCE_PREFIXES.items():
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


__all__ = ["heads_from_reference_checkpoint", "heads_from_target"]
