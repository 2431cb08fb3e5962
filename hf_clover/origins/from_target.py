"""Heads made from a target.

Contract: bound `CloverHeads` on the target's device and in its dtype. For the papers' variants, a part of the target's
last layer is copied where it corresponds to a part of the Augmenting Block; what does not correspond keeps its fresh
initialisation and is named in one log line. Heads that read states from behind the final norm (clover-x) start fresh,
and what they read is brought to one size.
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

COPIES = 15  # tokens of the text that new heads with recall put into their drafts where it repeats itself


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
    """Fresh ones, which read the layers that the paper reads and borrow lm_head and embedding."""
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
    """A low, a middle and a high one of so many layers, as EAGLE-3 takes them."""
    return [min(2, depth), depth // 2, max(depth - 3, 0)]


def checked_target(target: nn.Module) -> PreTrainedModel:
    """The model that heads can be made from."""
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
    """On the target's device, in its dtype, bound to it."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    anchor = weight if isinstance(weight, torch.Tensor) else next(model.parameters())
    dtype = anchor.dtype if is_plain(anchor) else model.dtype
    heads.to(device=anchor.device, dtype=dtype)  # type: ignore[call-arg]  # transformers' wrapper counts `self` too
    return heads.bind(model)


def identity_of(model: PreTrainedModel) -> dict[str, Any]:
    """The fields that say which target this is."""
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


__all__ = ["eagle3_from_target", "heads_from_target", "identity_of", "paper_layers"]
