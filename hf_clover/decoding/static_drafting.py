"""Drafting as one compiled step: the heads take in what is new, and grow a tree from it.

Contract: `CompiledDrafter` gives the trees of `CloverDrafter`, its slow twin, where the target's forward is
compiled too. Shapes are static: up to `width` new positions a row in every step, a cache of fixed capacity, and one
graph for each number of nodes. The prompt, and what gathers while drafting rests, is taken in eagerly before.

Shapes: B batch, T prompt columns, m new positions (`width` of them in a step), C capacity, d hidden size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import CompileConfig
from transformers.cache_utils import Cache

from ..network.modeling_clover import CloverHeads
from .cache import TreeCache
from .drafting import CloverDrafter, Settled, given, grow
from .foresight import Foresight
from .masks import additive, visible_columns
from .static_target import StaticTreeCache, compiled_function, lent_cache
from .tree import Tree, root_only


@contextmanager
def compiled_drafter(
    heads: CloverHeads,
    batch_size: int,
    capacity: int,
    config: CompileConfig | None,
    prompt_mask: torch.Tensor | None,
    block: int | None,
) -> Iterator["CompiledDrafter"]:
    """A drafter for texts of up to `capacity` tokens, with a cache that is nobody else's inside the block."""
    if not heads.config.has_augmenting_block:
        yield CompiledDrafter(heads, None, config, prompt_mask, block)
        return
    with lent_cache(heads, heads.config.num_cache_layers, batch_size, capacity) as cache:
        if prompt_mask is not None:
            cache.slots.text[:, : prompt_mask.shape[1]] = prompt_mask
        yield CompiledDrafter(heads, cache, config, prompt_mask, block)


class CompiledDrafter(CloverDrafter):
    cache: StaticTreeCache | None

    def __init__(
        self,
        heads: CloverHeads,
        cache: StaticTreeCache | None,
        config: CompileConfig | None,
        prompt_mask: torch.Tensor | None,
        block: int | None,
    ) -> None:
        super().__init__(heads, prompt_mask, block)
        self.cache, self.compile_config = cache, config
        self.width = self.config.draft_depth + 1  # what a walk settles at most

    def remember(self, cache: Cache, columns: int) -> None:
        """Not from turn to turn: the heads' own cache is lent for one call."""

    @torch.no_grad()
    def draft(self, nodes: int, shape: str | None = None, foresight: Foresight | None = None) -> Tree:
        roots = given(self.roots)
        if nodes == 0 or self.is_broken:
            return root_only(roots)
        if self.state is None:
            self._take_in_prompt()
        new = self._last_settled()
        counts = torch.tensor(new.counts).to(roots.device, non_blocking=True)  # [B], taken before this returns
        values = (new.hidden, new.next_tokens, new.positions, counts, given(self.state), roots)
        if foresight is not None:
            foresight = foresight.whole()
        with self._staged(new):
            found = self._step(nodes, shape or self.config.draft_tree, values, foresight)
        self.state, tokens, parents, depths, log_probs, valid = found
        return Tree(tokens, parents, depths, log_probs, valid, max_depth=min(self.config.draft_depth, nodes))

    def _step(
        self, nodes: int, shape: str, values: Sequence[torch.Tensor], foresight: Foresight | None
    ) -> tuple[torch.Tensor, ...]:
        """`draft_step` compiled; `values` are its tensors."""
        capacity = None if self.cache is None else self.cache.capacity
        temperature = None if foresight is None else foresight.temperature
        sizes = (len(given(self.roots)), capacity, nodes, shape, temperature)
        run = compiled_function(draft_step, self.compile_config, self.heads, sizes)
        # Copies of one layout each: another stride, or two that are one tensor, would make another graph.
        values = [value.clone(memory_format=torch.contiguous_format) for value in values]
        found = run(self.heads, self.cache, nodes, shape, *values, foresight)
        # The next replay of the graph writes over these.
        return tuple(value.clone() for value in found) if found[0].is_cuda else found

    def _catch_up(self) -> None:
        if self.state is None:
            self._take_in_prompt()
        self._waiting = [self._last_settled()]

    def _take_in_prompt(self) -> None:
        prompt, *self._waiting = self._waiting
        if self.cache is not None:
            self.cache.slots.lengths = [0] * len(prompt.counts)
        self.state = prompt.at_last(self._states_of(prompt))

    def _encoded(self, new: Settled, cache: TreeCache) -> torch.Tensor:
        """Of the prompt all columns as they are, padding too, which is masked."""
        mask = self._mask(new.hidden.shape[1], cache.lengths, new.hidden.device)
        states = self.heads.encode(new.hidden, new.next_tokens, mask, new.positions, cache)  # [B, m, d]
        cache.finish_filling(len(new.counts))
        return states

    def _last_settled(self) -> Settled:
        """Takes in what waits, up to its last `width` positions or fewer: these, filled up to `width`."""
        roots, width = given(self.roots), self.width
        batch, device = len(roots), roots.device
        new = Settled.joined(self._waiting) if self._waiting else None
        self._waiting = []
        while new is not None and new.hidden.shape[1] > width:
            part, new = new.part(0, width), new.part(width, new.hidden.shape[1])
            counts = torch.tensor(part.counts, device=device)
            with self._staged(part):
                values = (part.hidden, part.next_tokens, part.positions, counts, given(self.state))
                self.state = take_in(self.heads, self.cache, *values)
        if new is None:
            hidden = torch.zeros(batch, width, self.config.hidden_size, dtype=self.heads.dtype, device=device)
            empty = torch.zeros(batch, width, dtype=torch.long, device=device)
            return Settled(hidden, empty, empty, [0] * batch)
        missing = width - new.hidden.shape[1]
        pad = torch.nn.functional.pad
        hidden = pad(new.hidden, (0, 0, 0, missing))
        return Settled(hidden, pad(new.next_tokens, (0, missing)), pad(new.positions, (0, missing)), new.counts)

    @contextmanager
    def _staged(self, new: Settled) -> Iterator[None]:
        """Within, the cache takes the new positions, and keeps those that there are."""
        if self.cache is None:
            yield
            return
        with self.cache.staged(self.width):
            yield
        self.cache.commit([range(count) for count in new.counts])


def take_in(
    heads: CloverHeads,
    cache: StaticTreeCache | None,
    hidden: torch.Tensor,
    next_tokens: torch.Tensor,
    positions: torch.Tensor,
    counts: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """The state [B, d] after each row's first `counts` [B] of m positions; a row with none keeps `state`."""
    if cache is None:
        states = heads.encode(hidden, next_tokens)  # [B, m, d]
    else:
        slots, width = cache.slots, hidden.shape[1]
        slots.index = slots.starts + torch.arange(width, device=hidden.device)  # [B, m]
        causal = torch.ones(width, width, dtype=torch.bool, device=hidden.device).tril().expand(len(hidden), -1, -1)
        visible = visible_columns(causal, slots.starts, slots.text.shape[1], slots.text)  # [B, m, C]
        states = heads.encode(hidden, next_tokens, additive(visible, heads.dtype), positions, cache)  # [B, m, d]
        slots.index = None
    last = (counts - 1).clamp(min=0)[:, None, None].expand(-1, -1, states.shape[2])  # [B, 1, d]
    return torch.where(counts[:, None] > 0, states.gather(1, last)[:, 0], state)


def draft_step(
    heads: CloverHeads,
    cache: StaticTreeCache | None,
    nodes: int,
    shape: str,
    hidden: torch.Tensor,
    next_tokens: torch.Tensor,
    positions: torch.Tensor,
    counts: torch.Tensor,
    state: torch.Tensor,
    roots: torch.Tensor,
    foresight: Foresight | None,
) -> tuple[torch.Tensor, ...]:
    """`take_in`, then the tree's tensors."""
    state = take_in(heads, cache, hidden, next_tokens, positions, counts, state)
    to_recall = None
    if cache is not None and heads.config.recall:
        text, (layer, tokens) = cache.slots.text, cache.layers[-2:]
        ends = cache.slots.starts + counts[:, None]  # [B, 1]
        visible = text & (torch.arange(text.shape[1], device=text.device) < ends)  # [B, C]
        to_recall = tokens.keys[:, 0, :, 0], layer.values, visible[:, None, None]
    tree = grow(heads, state, to_recall, roots, nodes, shape, foresight)
    return state, tree.tokens, tree.parents, tree.depths, tree.log_probs, tree.valid
