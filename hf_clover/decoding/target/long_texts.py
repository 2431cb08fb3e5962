"""Attention of a tree over a long text in two parts: of every node over the text, and of the nodes among themselves.

Contract: `hang_parts` attaches `Parts` to a forward's mask of full attention, and `parts_of` finds them in each layer
that gets this very mask. `Parts.attend` returns what attention by the mask returns. The mask stays correct: a layer
that cannot attend in parts uses it. If a target has changed a mask, the changed one is another tensor, without parts.

Why: attention by a mask makes few blocks of work, each over all columns, for a device that has room for many. The
flash kernel takes no mask. It divides the text among blocks if all rows of a key head are heads of one query token,
and it reads the text's length on the device. The parts are merged by their log-sum-exps. On each device a trial
compares the result with attention by a mask in float64. Where they differ, or a kernel fails, attention uses the mask.

Shapes: B batch, K key heads, R rows (the nodes of each query head of a key head, n each), C cache columns, D size of a
head; S = B K sequences, each of which begins at its own place among T tokens.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils import logging

from ...targets.private_api import efficient_attention, flash_attention_of_sequences, has_attention_by_name
from ..cache.static import StaticSlots
from .masks import FULL, MaskRules, additive, visible_columns

logger = logging.get_logger(__name__)

LONG = 2048  # up to so many columns attention uses the mask
LARGEST_HEAD = 256  # that the flash kernel takes
CLOSE = 0.02  # greatest error of outputs in half precision, relative to their size


@dataclass(eq=False)
class Parts:
    """What attention in parts needs in one forward, the same for all its layers."""

    bias: Tensor  # [B, 1, R, n] which nodes see which
    columns: Tensor  # [B, n] the columns of the nodes
    padding: Tensor  # [B, 1] columns before the text
    lengths: Tensor  # [B, 1] columns of the text
    known: dict[Any, tuple[Tensor, ...]] = field(default_factory=dict)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """query [B, K, R, D], key and value [B, K, C, D] -> [B, K, R, D]"""
        heads, rows, size = query.shape[1:]
        scale = size**-0.5 if scale is None else scale
        tokens = query.reshape(-1, rows, size), _as_tokens(key), _as_tokens(value)
        # [S, R, D] and [S, R]
        text, text_sums = flash_attention_of_sequences(*tokens, self._sequences(key), key.shape[2], scale)
        index = self.columns[:, None, :, None].expand(-1, heads, -1, size)  # [B, K, n, D]
        own, own_sums = efficient_attention(query, key.gather(2, index), value.gather(2, index), self.bias, scale)
        weight = torch.sigmoid(text_sums.reshape(own_sums.shape) - own_sums)[..., None]  # [B, K, R, 1]
        both = torch.lerp(own.to(weight.dtype), text.reshape(own.shape).to(weight.dtype), weight)
        return both.to(query.dtype)

    def _sequences(self, key: Tensor) -> tuple[Tensor, ...]:
        """Three tensors: 0, 1, ... S; the first token of each sequence's text [S + 1]; the text's length [S]."""
        where = (*key.shape, *key.stride())
        if where not in self.known:
            row, head = (torch.arange(count, device=key.device) for count in key.shape[:2])
            starts = (row[:, None] * key.stride(0) + head * key.stride(1)) // key.stride(2) + self.padding  # [B, K]
            order, lengths = torch.arange(starts.numel() + 1, device=key.device), self.lengths.expand_as(starts)
            self.known[where] = order.int(), F.pad(starts.flatten(), (0, 1)).int(), lengths.flatten().int()
        return self.known[where]


def _as_tokens(states: Tensor) -> Tensor:
    """[B, K, C, D], which may be part of a cache -> the cache's memory from its first to its last entry, as
    [T, 1, D]"""
    step = states.stride(2)
    last = sum((size - 1) * stride for size, stride in zip(states.shape[:3], states.stride()[:3], strict=True))
    return states.as_strided((last // step + 1, 1, states.shape[3]), (step, step, 1))


def has_gaps(mask: Tensor) -> bool:
    """Whether a row of a prompt's mask [B, T] is anything but padding and then text."""
    width = mask.shape[1]
    padding = (~mask).sum(1, keepdim=True).clamp(max=width - 1)
    return not torch.equal(mask, torch.arange(width, device=mask.device) >= padding)


def is_for_parts(slots: StaticSlots) -> bool:
    return slots.seen_columns > LONG and not slots.has_gaps


def hang_parts(masks: Any, rules: MaskRules, ancestors: Tensor, slots: StaticSlots, dtype: torch.dtype) -> None:
    """Attach `Parts` to the mask of full attention, if there is one. `ancestors`: [B, n, n]."""
    if FULL in rules.kinds:
        mask = masks[FULL] if rules.per_kind else masks
        starts, padding = slots.starts, (~slots.visible_text).sum(1, keepdim=True)  # [B, 1]
        columns = starts + torch.arange(ancestors.shape[1], device=starts.device)  # [B, n]
        lengths = (starts - padding).clamp(min=1)  # a row that only fills up a graph may have no text
        bias: Any = rules.packed(additive(ancestors, dtype))
        mask.clover_parts = Parts(bias, columns, padding, lengths)


def parts_of(mask: Any, query: Tensor, key: Tensor, value: Tensor) -> Parts | None:
    """What attends in parts, with `mask`'s result; None if attention must use the mask. query [B, K, R, D]"""
    parts: Parts | None = getattr(mask, "clover_parts", None)
    rows, size = query.shape[2:]
    if parts is None or not has_attention_by_name(query) or size > LARGEST_HEAD:
        return None
    are_alike = (key.shape, key.stride(), key.dtype) == (value.shape, value.stride(), query.dtype)
    if not are_alike or (key.shape[2], size) != (mask.shape[3], key.shape[3]):
        return None
    is_in_one_piece = key.stride(3) == 1 and not any(key.stride(dim) % key.stride(2) for dim in (0, 1))
    return parts if is_in_one_piece and _are_right_on(query.device, query.dtype, rows, size) else None


@functools.cache
def _are_right_on(device: torch.device, dtype: torch.dtype, rows: int, size: int) -> bool:
    """First called in an eager forward, since one comes before every graph."""
    reason = why_wrong(device, dtype, rows, size)
    if reason is not None:
        logger.debug(f"Trees over long texts are attended to by their masks on {device}, in {dtype}: {reason}.")
    return reason is None


@torch.no_grad()
def why_wrong(device: torch.device, dtype: torch.dtype, rows: int, size: int) -> str | None:
    """None if attention in parts is exact for few texts, which are divided among blocks, and for many."""
    draw = functools.partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device, dtype=dtype)
    try:
        for batch, columns in ((2, 4096), (128, 128)):
            row, place = torch.arange(batch, device=device)[:, None], torch.arange(columns, device=device)
            padding, lengths = row % 7, columns - 25 - row * 31 % (columns // 2)  # [B, 1] each
            starts, own = padding + lengths, torch.ones(batch, rows, 16, dtype=torch.bool, device=device).tril()
            visible = visible_columns(own, starts, columns, place >= padding)  # [B, R, C]
            query, key, value = (draw(batch, 2, count, size) for count in (rows, columns, columns))
            out = Parts(additive(own, dtype), starts + place[:16], padding, lengths).attend(query, key, value, None)
            exact = query.double(), key.double(), value.double(), visible[:, None]
            wanted = F.scaled_dot_product_attention(*exact)
            error = float((out - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt())
            if not error <= CLOSE:  # also true for NaN
                return f"outputs are off by {error:.1e} of their size"
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return None
