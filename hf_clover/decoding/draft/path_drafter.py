"""Drafting with layers that attend over the drafted path: EAGLE's side of a step.

Contract: `PathDrafter` takes in the text as `CloverDrafter` does, and drafts with one forward of the heads' layers per
level. While a tree grows, keys and values of drafted nodes are in the cache, after those of the text. They are dropped
when the tree is complete: accepted tokens are taken in anew, from the target's own states. A node attends to the text
and to its own ancestors. The heads must have `encode`, `recycled`, `advance`, `output` and `score`.

Shapes: B batch, d hidden size, W beams of a level, n nodes drafted so far, C cache columns.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..cache.by_row import TreeCache
from ..target.masks import additive, visible_columns
from ..tree import Tree
from .drafter import CloverDrafter, given, grow_in_shape
from .foresight import Foresight


class PathDrafter(CloverDrafter):
    """The state kept for the root is the layers' output at the last position."""

    heads: Any  # heads with these methods
    cache: TreeCache

    def _tree(self, roots: torch.Tensor, nodes: int, shape: str, foresight: Foresight | None) -> Tree:
        settled = list(self.cache.lengths)
        try:
            return grow_in_shape(self.heads, self.levels().expand, roots, nodes, shape, foresight)
        finally:
            self.cache.slots.lengths = settled

    def levels(self) -> Any:
        """An object whose `expand` grows one tree."""
        return Levels(self)


class Levels:
    """A growing tree: the states of its last level, and the ancestors of each node."""

    def __init__(self, drafter: PathDrafter) -> None:
        self._begin(drafter, given(drafter.state), given(drafter.last))
        self.prompt_mask, self.settled = drafter.prompt_mask, list(drafter.cache.lengths)

    def _begin(self, drafter: PathDrafter, state: torch.Tensor, last: torch.Tensor) -> None:
        self.heads, self.cache = drafter.heads, drafter.cache
        self.states = state[:, None]  # [B, W, d]
        self.ancestors = torch.ones(
            len(state), 1, 0, dtype=torch.bool, device=state.device
        )  # [B, W, n], the node itself included
        ahead = last[:, None] + torch.arange(drafter.config.draft_depth, device=state.device)  # [B, depth]
        self.rope = self.heads.rotary_emb(self.states, ahead)  # [B, depth, head_dim] each

    def expand(self, level: int, chosen: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
        """As `tree.Expand`: logits [B, W, V] of the tokens after `tokens` [B, W]."""
        if chosen is not None:
            self._descend(level, chosen, tokens)
        return self.heads.score(self.heads.output(self.states))

    def _descend(self, level: int, chosen: torch.Tensor, tokens: torch.Tensor) -> None:
        width = tokens.shape[1]
        states = self.states.gather(1, chosen[..., None].expand(-1, -1, self.states.shape[2]))  # [B, W, d]
        ancestors = self.ancestors.gather(1, chosen[..., None].expand(-1, -1, self.ancestors.shape[2]))  # [B, W, n]
        itself = torch.eye(width, dtype=torch.bool, device=chosen.device).expand(len(chosen), -1, -1)
        self.ancestors = torch.cat((ancestors, itself), dim=2)  # [B, W, n + W]
        rope = tuple(part[:, level : level + 1] for part in self.rope)  # [B, 1, head_dim]
        with self._written(width):
            features = self.heads.recycled(states)
            self.states = self.heads.advance(features, tokens, rope, self._mask(level), self.cache)  # [B, W, d]

    @contextmanager
    def _written(self, width: int) -> Iterator[None]:
        """Inside the block, keys and values of a level are written after those of the levels before."""
        with self.cache.staged(width):
            yield
        self.cache.slots.lengths = [length + width for length in self.cache.lengths]

    def _mask(self, level: int) -> torch.Tensor | None:
        """[B, 1, W, C], to be added to the attention's scores."""
        nodes, is_even = self.ancestors.shape[2], self.cache.slots.is_even and self.prompt_mask is None
        if is_even and nodes == level:
            return None  # a chain sees everything
        device = self.states.device
        starts = torch.tensor(self.settled, device=device)[:, None]  # [B, 1]
        prompt = None if self.prompt_mask is None else self.prompt_mask.to(device)
        visible = visible_columns(self.ancestors, starts, max(self.settled) + nodes, prompt)  # [B, W, C]
        return additive(visible, self.states.dtype)
