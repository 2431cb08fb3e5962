"""Heads made from a target.

Contract: returns bound heads on the target's device and in its dtype. For the papers' variants, each part of the
target's last layer that matches a part of the Augmenting Block is copied; other parts keep new random weights and are
named in one log line. Heads that read states after the final norm (clover-x) start with new weights, and the states
and embeddings that they read are scaled to one size.
"""

from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import local_torch_dtype
from transformers.utils import logging

from ..network.configuration_clover import CloverConfig
from ..network.configuration_eagle3 import Eagle3Config
from ..network.modeling_clover import CloverHeads
from ..network.modeling_eagle3 import Eagle3Heads
from ..network.modeling_heads import DraftHeads
from ..network.target_parts import (
    are_divided,
    find_decoder,
    fingerprint,
    is_plain,
    readable_rows,
    special_tokens_of,
    token_table,
    unwrap,
)
from .last_layer import LastLayer, copy_norm
from .scales import embedding_scale, hidden_state_scale

logger = logging.get_logger(__name__)

Heads = TypeVar("Heads", bound=DraftHeads)

COPIES = 15  # `draft_copies` of new heads with recall: most tokens that a draft copies from earlier text


def heads_from_target(cls: type[CloverHeads], target: nn.Module, variant: str, fields: dict[str, Any]) -> CloverHeads:
    model = checked_target(target)
    _, _, norm = find_decoder(model)
    source = LastLayer(model)
    config = CloverConfig(**{**source.block_fields(), "variant": variant, **identity_of(model), **fields})
    if config.recall:
        config.draft_copies = fields.get("draft_copies", COPIES)
    if config.normalize_hidden_states:
        _balance(config, model, fields)
    with local_torch_dtype(torch.float32):  # whatever the caller's default is
        heads = cls(config)
    fresh = [] if config.normalize_hidden_states else source.copy_into(heads)
    _start_norms(norm, heads)
    if fresh and config.has_augmenting_block:
        logger.warning(
            f"Clover heads for `{type(model).__name__}`: the Augmenting Block copies the target's last layer, except "
            f"for what does not correspond and starts fresh: {'; '.join(fresh)}."
        )
    return placed(heads, model)


def eagle3_from_target(cls: type[Eagle3Heads], target: nn.Module, fields: dict[str, Any]) -> Eagle3Heads:
    """New heads that read the layers which the paper reads, and borrow lm_head and embedding."""
    model = checked_target(target)
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    source = LastLayer(model)
    shape = {name: value for name, value in source.block_fields().items() if name in Eagle3Config.__dataclass_fields__}
    start = (3 * model.config.get_text_config(decoder=True).hidden_size) ** -0.5  # torch's own for a linear layer
    layers = {"layer_ids": paper_layers(depth), "initializer_range": start, "draft_copies": COPIES}
    with local_torch_dtype(torch.float32):  # whatever the caller's default is
        heads = cls(Eagle3Config(**{**shape, **layers, **identity_of(model), **fields}))
    _, _, norm = find_decoder(model)
    if norm is not None and heads.config.hidden_size == heads.config.target_width:
        copy_norm(norm, heads.norm)
    return placed(heads, model)


def paper_layers(depth: int) -> list[int]:
    """A low, a middle and a high one of `depth` layers, by EAGLE-3's rule."""
    return [min(2, depth), depth // 2, max(depth - 3, 0)]


def checked_target(target: nn.Module) -> PreTrainedModel:
    """The model inside `target`, if heads can be made from it; otherwise raises."""
    model = unwrap(target)
    if model.config.is_encoder_decoder:
        raise ValueError(f"`target` is the encoder-decoder `{type(model).__name__}`: heads need a decoder-only model.")
    if are_divided(model.parameters()):
        raise ValueError(
            f"`target`, a `{type(model).__name__}`, is divided among processes (tensor parallel, FSDP or ZeRO), and "
            "heads are made from its weights: make them from the whole target in one process, with "
            "`device_map='auto'` where one device is too small, and load them with `AutoModel.from_pretrained`."
        )
    return model


def placed(heads: Heads, model: PreTrainedModel) -> Heads:
    """The heads, moved to the target's device and dtype and bound to it."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    anchor = weight if isinstance(weight, torch.Tensor) else next(model.parameters())
    dtype = anchor.dtype if is_plain(anchor) else model.dtype
    heads.to(device=anchor.device, dtype=dtype)  # type: ignore[call-arg]  # transformers' wrapper counts `self` too
    return heads.bind(model)


def identity_of(model: PreTrainedModel) -> dict[str, Any]:
    """The fields of a configuration that identify the target."""
    text_config = model.config.get_text_config(decoder=True)
    rows = readable_rows(model.get_output_embeddings(), text_config.vocab_size, text_config.hidden_size)
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
    """Set the scales that give states and embeddings size 1, unless `fields` has them. Called only for heads that read
    states after the final norm; the papers' variants scale neither."""
    rows = token_table(config, model, model.get_output_embeddings())
    if "embedding_scale" not in fields and not config.normalize_embeddings and rows is not None:
        config.embedding_scale = embedding_scale(rows)
    if "hidden_state_scale" not in fields and config.output_projector != "residual":  # no norm follows that one
        config.hidden_state_scale = hidden_state_scale(model)


@torch.no_grad()
def _start_norms(source: nn.Module | None, heads: CloverHeads) -> None:
    """Start the block's last norm and the norm before lm_head as the target's final norm (its scale, for a LayerNorm).

    States read after the final norm already have its scale per dimension, so their norms start as one number."""
    for name in ("norm", "head_norm"):
        if hasattr(heads, name) and heads.config.normalize_hidden_states:
            getattr(heads, name).weight.fill_(1 / heads.config.hidden_state_scale)
        elif hasattr(heads, name) and source is not None:
            copy_norm(source, getattr(heads, name))


__all__ = ["eagle3_from_target", "heads_from_target", "identity_of", "paper_layers"]
