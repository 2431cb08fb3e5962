"""Drafting with a layer that attends over the tree: EAGLE's side of a step.

Contract: `EagleHeads.advance` runs one decoder layer over (feature, token) pairs; `EagleGenerator` drafts with it, one
forward a level. Keys and values of drafted nodes stand in the cache behind those of the text while a tree grows, and
are forgotten when it is done; a node attends to the text and to its own ancestors. Keeping up with the text is the
library's `CloverDrafter`, in the same blocks as for our heads.

Shapes: B batch, T positions, d hidden size, W beams, n nodes drafted so far, C cache columns.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from transformers.cache_utils import Cache

from hf_clover.decoding.drafting import CloverDrafter, Settled, grow_in_shape
from hf_clover.decoding.foresight import Foresight
from hf_clover.decoding.tree import Tree, root_only

from .base import RivalHeads

Rope = tuple[torch.Tensor, torch.Tensor]  # cosines and sines


class _Path:
    """A tree that is being grown: the features of its last level, and who descends from whom."""

    def __init__(self, generator: "EagleGenerator") -> None:
        self.heads, self.cache = generator.heads, generator.cache
        self.prompt_mask, self.settled = generator.prompt_mask, list(generator.cache.lengths)
        self.features = generator.state[:, None]  # [B, W, d]
        batch, device = len(self.settled), self.features.device
        self.ancestors = torch.ones(batch, 1, 0, dtype=torch.bool, device=device)  # [B, W, n] with the node itself
        ahead = generator.last[:, None] + torch.arange(self.heads.config.draft_depth, device=device)  # [B, depth]
        self.rope = self.heads.rotary_emb(self.features, ahead)  # [B, depth, head_dim] each

    def expand(self, level: int, chosen: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
        """As `tree.Expand`: logits [B, W, V] of what follows `tokens` [B, W]."""
        if chosen is not None:
            self._descend(level, chosen, tokens)
        return self.heads.score(self.heads.output(self.features))

    def _descend(self, level: int, chosen: torch.Tensor, tokens: torch.Tensor) -> None:
        width = tokens.shape[1]
        features = self.features.gather(1, chosen[..., None].expand(-1, -1, self.features.shape[2]))  # [B, W, d]
        ancestors = self.ancestors.gather(1, chosen[..., None].expand(-1, -1, self.ancestors.shape[2]))  # [B, W, n]
        itself = torch.eye(width, dtype=torch.bool, device=chosen.device).expand(len(chosen), -1, -1)
        self.ancestors = torch.cat((ancestors, itself), dim=2)  # [B, W, n + W]
        rope = tuple(part[:, level : level + 1] for part in self.rope)  # [B, 1, head_dim]
        with self.cache.staged(width):
            self.features = self.heads.advance(features, tokens, rope, self._mask(level), self.cache)  # [B, W, d]
        self.cache.slots.lengths = [length + width for length in self.cache.lengths]

    def _mask(self, level: int) -> torch.Tensor | None:
        """[B, 1, W, C], to be added to the attention's scores."""
        nodes = self.ancestors.shape[2]
        is_even = self.cache.slots.is_even and self.prompt_mask is None
        if is_even and nodes == level:
            return None  # a chain sees everything
        columns, dtype = max(self.settled) + nodes, self.features.dtype
        hidden = torch.finfo(dtype).min
        if is_even:
            mask = self.features.new_zeros(*self.ancestors.shape[:2], columns)  # [B, W, C]
            mask[..., -nodes:].masked_fill_(~self.ancestors, hidden)
            return mask[:, None]
        device = self.features.device
        starts = torch.tensor(self.settled, device=device)[:, None]  # [B, 1]
        visible = torch.arange(columns, device=device) < starts  # [B, C]
        if self.prompt_mask is not None:
            visible[:, : self.prompt_mask.shape[1]] &= self.prompt_mask.to(device)
        slots = (starts + torch.arange(nodes, device=device))[:, None].expand_as(self.ancestors)  # [B, W, n]
        visible = visible[:, None].repeat(1, self.ancestors.shape[1], 1).scatter(2, slots, self.ancestors)  # [B, W, C]
        return torch.full(visible.shape, hidden, dtype=dtype, device=device).masked_fill_(visible, 0)[:, None]


class EagleGenerator(CloverDrafter):
    """The state kept for the root is the layer's output at the last position: the feature drafted for the next one."""

    heads: "EagleHeads"
    path: ClassVar[type] = _Path

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.last: torch.Tensor | None = None  # [B] the position of the last settled token's hidden state

    def extend(
        self, hidden: torch.Tensor, next_tokens: torch.Tensor, positions: torch.Tensor, counts: Sequence[int]
    ) -> None:
        last = Settled(hidden, next_tokens, positions, list(counts)).at_last(positions).to(self.heads.device)
        if min(counts) == 0 and self.last is not None:
            last = torch.where(torch.tensor(counts, device=last.device) > 0, last, self.last)
        self.last = last
        super().extend(hidden, next_tokens, positions, counts)

    def keep_rows(self, rows: Sequence[int]) -> None:
        super().keep_rows(rows)
        self.last = self.last[torch.tensor(rows, device=self.last.device)]

    @torch.no_grad()
    def draft(self, nodes: int, shape: str | None = None, foresight: Foresight | None = None) -> Tree:
        if nodes == 0 or self.is_broken:
            return root_only(self.roots)
        self._catch_up()
        shape, settled = shape or self.config.draft_tree, list(self.cache.lengths)
        try:
            return grow_in_shape(self.heads, self.path(self).expand, self.roots, nodes, shape, foresight)
        finally:
            self.cache.slots.lengths = settled


class EagleHeads(RivalHeads):
    generator = EagleGenerator

    def features(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What `generate` and the trainer hand over -> [B, T, d], the layer's first input."""
        raise NotImplementedError

    def advance(
        self,
        features: torch.Tensor,
        input_ids: torch.Tensor,
        rope: Rope,
        mask: torch.Tensor | None,
        cache: Cache | None,
    ) -> torch.Tensor:
        """Features [B, T, d] and the tokens after them [B, T] -> the features drafted for the tokens' positions."""
        raise NotImplementedError

    def output(self, features: torch.Tensor) -> torch.Tensor:
        """[..., d] -> [..., d]: what goes into lm_head."""
        raise NotImplementedError

    def _encode(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        past_key_values: Cache | None,
    ) -> tuple[torch.Tensor, None]:
        features = self.features(hidden_states.to(self.dtype))  # [B, T, d]
        rope, attention_mask = self.rope_and_mask(features, attention_mask, position_ids, past_key_values)
        return self.advance(features, input_ids, rope, attention_mask, past_key_values), None

    def step(self, level: int, state: torch.Tensor, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if level > 0:
            raise NotImplementedError(
                "EAGLE attends over the drafted path: generate inside `with rivals.admitted():`."
            )
        return self.output(state), state
