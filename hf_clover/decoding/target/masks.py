"""Which cache columns the nodes of a tree see.

Contract: functions of tensors without a host sync, so that they run both eagerly and inside a graph. A node sees the
committed columns of its row, without padding, and its own ancestors, which are stored after them. In a layer that sees
only a part of the text, a node counts as being where its token would be.

Shapes: B batch, n tree nodes, C cache columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
ALIGNMENT = 16  # CUDA's kernels copy a mask in every layer whose rows do not begin at a multiple of so many entries


@dataclass(frozen=True)
class MaskRules:
    """Which part of the text a target's layers see."""

    kinds: tuple[str, ...]
    per_kind: bool  # the target takes a dictionary of masks, one for each kind of layer
    window: int | None
    chunk: int | None
    shared_heads: int  # query heads that are rows of one head; each row of a mask is repeated as often

    @classmethod
    def of(cls, text_config: Any, shared_heads: int = 1) -> "MaskRules":
        window, chunk = (getattr(text_config, name, None) for name in ("sliding_window", "attention_chunk_size"))
        layer_types = getattr(text_config, "layer_types", None)
        if layer_types is not None:
            return cls(tuple(sorted(set(layer_types))), True, window, chunk, shared_heads)
        kind = SLIDING if window is not None else CHUNKED if chunk is not None else FULL
        return cls((kind,), False, window, chunk, shared_heads)

    def are_full_for(self, columns: int) -> bool:
        """Whether every layer sees the whole of a text of `columns` columns."""
        spans = {FULL: None, SLIDING: self.window, CHUNKED: self.chunk}
        return all((span := spans.get(kind, 0)) is None or columns <= span for kind in self.kinds)

    def arrange(self, masks: Mapping[str, torch.Tensor | None]) -> Any:
        """The masks in the form that the target takes."""
        packed: dict[str, torch.Tensor | None] = {}
        for kind, mask in masks.items():
            same = [other for other in packed if masks[other] is mask]
            packed[kind] = packed[same[0]] if same else self.packed(mask)
        return packed if self.per_kind else packed[self.kinds[0]]

    def masks(
        self,
        visible: torch.Tensor,
        starts: torch.Tensor,
        depths: torch.Tensor,
        text: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> Any:
        """The masks for layers of each kind, made from `visible` [B, n, C], in the form that the target takes. `text`
        [B, .]: False where a column is padding."""
        padding = (~text).sum(1, keepdim=True) if text is not None and CHUNKED in self.kinds else 0  # [B, 1]
        left = {kind: narrowed(visible, starts, depths, kind, self, padding) for kind in self.kinds}
        return self.arrange({kind: additive(mask, dtype) for kind, mask in left.items()})

    def packed(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Each row repeated for the query heads that share a key head: [B, 1, n, C] -> [B, 1, G n, C]"""
        if mask is None or self.shared_heads == 1:
            return mask
        batch, _, size, columns = mask.shape
        packed = blank(batch, self.shared_heads * size, columns, mask.dtype, mask.device)
        packed.unflatten(2, (self.shared_heads, size)).copy_(mask[:, :, None])
        return packed


def ancestors_of(parents: torch.Tensor, rounds: int) -> torch.Tensor:
    """[B, n, n]: whether the column's node is the row's node or its ancestor, in a tree less than 2 ** `rounds` deep.
    parents [B, n]."""
    batch, size = parents.shape
    above = torch.eye(size, dtype=torch.bool, device=parents.device).expand(batch, -1, -1)
    for step in range(rounds):  # finds nodes up to 1, 3, 7, ... steps above; `parents` is 1, 2, 4, ... steps above
        parents = parents.gather(1, parents) if step else parents
        above = above | above.gather(1, parents[..., None].expand(-1, -1, size))
    return above


def visible_columns(
    ancestors: torch.Tensor, starts: torch.Tensor, columns: int, prompt: torch.Tensor | None
) -> torch.Tensor:
    """[B, m, C]: the columns that m nodes see, from their ancestors [B, m, n] and the rows' lengths `starts` [B, 1].
    `prompt` [B, .]: which of the first columns are text."""
    (_, some, size), device = ancestors.shape, ancestors.device
    committed = torch.arange(columns, device=device) < starts  # [B, C]
    if prompt is not None:
        committed[:, : prompt.shape[1]] &= prompt
    slots = starts + torch.arange(size, device=device)  # [B, n]
    visible = committed[:, None].expand(-1, some, -1)  # [B, m, C]
    return visible.scatter(2, slots[:, None].expand(-1, some, -1), ancestors)


def narrowed(
    visible: torch.Tensor, starts: torch.Tensor, depths: torch.Tensor, kind: str, rules: MaskRules, padding: Any
) -> torch.Tensor:
    """The part of `visible` that a layer of this kind sees. A window counts columns and a chunk counts tokens, as in
    transformers.

    `padding` [B, 1] (or 0) is the number of columns in each row that are no text.
    """
    if kind == FULL:
        return visible
    nodes = starts + depths  # [B, n] the column each node's token would have
    slot = torch.arange(visible.shape[2], device=visible.device) - starts  # [B, C]
    staged = nodes.gather(1, slot.clamp(0, depths.shape[1] - 1))  # [B, C]
    column = torch.where(slot < 0, slot + starts, staged)  # [B, C] the same for columns; committed ones are unchanged
    if kind == SLIDING and rules.window is not None:
        return visible & (nodes[:, :, None] - column[:, None] < rules.window)
    if kind == CHUNKED:
        node_chunk, column_chunk = (nodes - padding) // rules.chunk, (column - padding) // rules.chunk
        return visible & (node_chunk[:, :, None] == column_chunk[:, None])
    raise NotImplementedError(f"no tree mask for layers of type {kind!r}")


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask [B, 1, n, C] to add to attention scores. From a bool mask, sdpa would make it again in every layer."""
    batch, size, columns = visible.shape
    mask = blank(batch, size, columns, dtype, visible.device, torch.finfo(dtype).min)
    return mask.masked_fill_(visible[:, None], 0)


def blank(
    batch: int, size: int, columns: int, dtype: torch.dtype, device: torch.device, value: float = 0.0
) -> torch.Tensor:
    """A tensor [B, 1, n, C] of one value, whose rows are aligned."""
    width = -(-columns // ALIGNMENT) * ALIGNMENT
    return torch.full((batch, 1, size, width), value, dtype=dtype, device=device)[..., :columns]


def plain_mask(ancestors: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """`additive` of `visible_columns` where all rows have one length and no padding, in four operations."""
    batch, size, _ = ancestors.shape
    mask = blank(batch, size, length + size, dtype, ancestors.device)
    mask[..., length:].masked_fill_(~ancestors[:, None], torch.finfo(dtype).min)
    return mask
