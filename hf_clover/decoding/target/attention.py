"""Attention over a tree: an implementation that takes a tree's mask, and a faster one for shared heads.

Contract: inside `attention_for_trees(target)` the target's attention takes a mask of any shape. Where query heads
share a key head, `packed_attention` is used. It computes what transformers' sdpa attention does, its slow twin. With a
mask, sdpa copies keys and values for every query head, in every layer and over the whole text. `packed_attention`
makes the query heads that share a key head rows of one head, as transformers does for one token. The rows of its masks
are repeated for each of these heads (`shared_heads`), once for all layers. In half precision on CUDA it calls the
memory-efficient kernel by name: torch would choose cuDNN's, which plans anew for every length of a text and takes tens
of milliseconds for it. Over a long text in a graph it attends in two parts (`long_texts`).

Other threads may run the same target at the same time, with drafts or without, and may begin before and end after. The
implementation is named in the target's config, which all threads share. So the implementation that is put there
behaves, for every other forward, as the target's own. Trees are recognized by their masks, which no other forward has.

Shapes: B batch, H query heads, K key heads, G = H / K, n tree nodes, C cache columns, D size of a head.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...network.target_parts import device_of
from ...targets.private_api import (
    attention_by_name,
    attention_of,
    has_attention_by_name,
    looks_up_attention,
    set_attention,
)
from .long_texts import parts_of
from .memory import memory_of

PACKED = "clover_packed_sdpa"
TREE_ATTENTION = ("sdpa", "eager")  # transformers' implementations that take a mask of any shape


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, H, n, D], key and value [B, K, C, D], mask [B, 1, G n, C] -> [B, n, H, D]"""
    batch, heads, nodes, size = query.shape
    groups = heads // key.shape[1]
    rows = groups * nodes
    by_name = has_attention_by_name(query)
    is_packed = attention_mask is not None and attention_mask.shape[1:3] == (1, rows) and (groups > 1 or by_name)
    if not is_packed or any(kwargs.get(name) is not None for name in ("softcap", "position_bias", "cache")):
        mask = None if attention_mask is None else attention_mask[:, :, :nodes]
        return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **kwargs)
    packed = query.reshape(batch, key.shape[1], rows, size)  # [B, K, G n, D]
    parts = parts_of(attention_mask, packed, key, value)
    if parts is not None:
        out = parts.attend(packed, key, value, scaling)  # [B, K, G n, D]
    else:
        attend: Any = attention_by_name if by_name else F.scaled_dot_product_attention
        out = attend(packed, key, value, attn_mask=attention_mask, scale=scaling)  # [B, K, G n, D]
    return out.reshape(batch, heads, nodes, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)

_besides: dict[str, str] = {}  # name of an implementation -> name of the one that adds trees to it


def _with_trees(implementation: str) -> str:
    """The name of an implementation that calls `packed_attention` for trees, and `implementation` for everything
    else."""
    if implementation == "sdpa":
        return PACKED
    if implementation not in _besides:
        masks = ALL_MASK_ATTENTION_FUNCTIONS

        def attention(
            module: nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: Any,
            *args: Any,
            **kwargs: Any,
        ) -> tuple[torch.Tensor, Any]:
            is_tree = isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 4
            chosen = packed_attention if is_tree else ALL_ATTENTION_FUNCTIONS[implementation]
            return chosen(module, query, key, value, attention_mask, *args, **kwargs)

        # The name must not contain that of flash attention, which transformers treats specially.
        name = _besides[implementation] = f"{PACKED}_or_another_{len(_besides)}"
        AttentionInterface.register(name, attention)
        if implementation in masks:
            AttentionMaskInterface.register(name, masks[implementation])
    return _besides[implementation]


def shared_heads(target: PreTrainedModel) -> int:
    """How many query heads share a key head where `packed_attention` is used for this target, else 1."""
    if memory_of(target).is_never_packed:
        return 1
    config = target.config.get_text_config(decoder=True)
    heads, keys = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if not (isinstance(heads, int) and isinstance(keys, int)):
        return 1
    return heads // keys if looks_up_attention(target) and attention_of(target.config) != "eager" else 1


@contextmanager
def attention_for_trees(target: PreTrainedModel) -> Iterator[str]:
    """Inside the block the target takes trees' masks. Yields "sdpa" or "eager", the kind of masks that it takes.

    Several threads may be inside at once: the last one to leave restores the target's own implementation.
    """
    memory = memory_of(target)
    with memory.lock:
        inside, before = memory.switched
        if not inside:
            before = [(config, attention_of(config)) for config in _configs_of(target)]
            own, groups = attention_of(target.config), shared_heads(target)
            gains = groups > 1 or device_of(target).type == "cuda"
            is_to_be_replaced = own not in TREE_ATTENTION or (own == "sdpa" and gains)
            if is_to_be_replaced and own is not None and _is_looked_up(target, own):
                for config, implementation in before:
                    if implementation == own:
                        set_attention(config, _with_trees(own))
            elif is_to_be_replaced:
                target.set_attn_implementation("sdpa")
        memory.switched = (inside + 1, before)
    try:
        yield "eager" if attention_of(target.config) == "eager" else "sdpa"
    finally:
        with memory.lock:
            inside, before = memory.switched
            memory.switched = (inside - 1, before) if inside > 1 else (0, [])
            if inside == 1:
                for config, implementation in before:
                    set_attention(config, implementation)


def _is_looked_up(target: PreTrainedModel, implementation: str) -> bool:
    """Whether the target's layers look `implementation` up at every forward; older models are built for one."""
    return looks_up_attention(target) and implementation in ALL_ATTENTION_FUNCTIONS


def _configs_of(target: nn.Module) -> list[Any]:
    """Every config in the target that names an attention implementation."""
    found: dict[int, Any] = {}

    def visit(config: Any) -> None:
        if id(config) not in found:
            found[id(config)] = config
            for name in config.sub_configs:
                if getattr(config, name, None) is not None:
                    visit(getattr(config, name))

    for module in target.modules():
        if isinstance(module, PreTrainedModel):
            visit(module.config)
    return list(found.values())
