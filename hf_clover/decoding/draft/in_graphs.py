"""Drafting as one graph: the heads take in the new positions and grow a tree.

Contract: `GraphDrafter` drafts the trees of `CloverDrafter`, its slow twin, and `GraphPathDrafter` those of
`PathDrafter`. They are used where the device has graphs, whatever cache the target has. A draft reads and writes
tensors of fixed shapes at fixed addresses: up to `width` new positions per row, the heads' own cache, the tree. The
prompt, and the positions that collect while nothing is drafted, are taken in eagerly before.

Shapes: B batch, m new positions (`width` of them in a step), C columns, D levels, d hidden size, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache

from ...network.modeling_clover import CloverHeads
from ...network.modeling_heads import DraftHeads
from ...network.target_parts import come_and_go
from ..cache.by_row import TreeCache
from ..cache.static import StaticTreeCache, first_capacity, give_back_cache, take_cache
from ..graphs import CAPTURES, Graphs, Outputs, filled
from ..target.masks import additive, visible_columns
from ..tree import Tree, with_path
from .drafter import CloverDrafter, Settled, given, grow, grow_in_shape
from .foresight import Foresight
from .path_drafter import Levels, PathDrafter


def drafts_in_graphs(heads: DraftHeads, config: GenerationConfig) -> bool:
    has_graphs = heads.device.type in CAPTURES and not config.disable_compile
    return has_graphs and not come_and_go([heads.borrowed.lm_head])


class GraphDrafter(CloverDrafter):
    cache: StaticTreeCache  # empty where the heads have no block over the sequence

    def __init__(self, heads: CloverHeads, prompt_mask: torch.Tensor | None, block: int | None, *sizes: int) -> None:
        """`sizes`: the number of rows, the length of their prompts, and the largest length of their texts."""
        rows, prompt, longest = sizes
        super().__init__(heads, prompt_mask, block)
        self.has_block = self.config.has_augmenting_block
        self.width = self.config.draft_depth + 1  # most positions that a walk settles
        self.is_remembered = False
        self.features = 0  # size of a hidden state as the heads read it, known from the prompt on
        layers = self.config.num_cache_layers if self.has_block else 1  # without a block it stays empty
        graphs = Graphs(heads.device, "Drafts", what_drafts_read(heads))
        self.cache = take_cache(heads, layers, rows, first_capacity(prompt, longest), graphs)
        if prompt_mask is not None:
            self.cache.slots.text[:, : prompt_mask.shape[1]] = prompt_mask

    def release(self) -> None:
        """Another call may use this drafter's cache, unless a conversation keeps it."""
        if not self.is_remembered:
            give_back_cache(self.heads, self.cache)

    def remember(self, cache: Cache, columns: int) -> None:
        super().remember(cache, columns)
        self.is_remembered = True

    def _tree(self, roots: torch.Tensor, nodes: int, shape: str, foresight: Foresight | None) -> Tree:
        new = self._waiting.pop()  # the one entry that `_catch_up` leaves
        counts = torch.tensor(new.counts).to(roots.device, non_blocking=True)  # [B], read before this returns
        ends = torch.stack((counts, roots, given(self.last)), dim=1)  # [B, 3]
        inputs = [new.hidden, new.next_tokens, new.positions, ends, given(self.state)]
        if foresight is not None:
            foresight = foresight.whole()
            inputs.append(foresight.log_noise)
        rows, columns = self.cache.look_at(self.width + self._entries(nodes, shape))
        sizes = (nodes, shape, None if foresight is None else foresight.temperature)
        with self._staged(new):
            found = self.cache.graphs.run(
                (rows, columns, *sizes),
                partial(self._drafted, *sizes),
                [filled(value, rows) for value in inputs],
            )
        self.is_warm = self.cache.graphs.has_replayed
        state, tree, log_probs = found
        self.state, depth = state[: len(roots)], min(self.config.draft_depth, nodes)
        return Tree.unpacked(tree[:, : len(roots)], log_probs[: len(roots)], depth)

    def with_path(self, tree: Tree, tokens: torch.Tensor, log_probs: torch.Tensor, nodes: int) -> Tree:
        rows, batch, width = self.cache.slots.seen_rows, len(tree.tokens), self.config.draft_copies
        lacking = log_probs.new_full((batch, max(width - log_probs.shape[1], 0)), -torch.inf)
        path = (filled(tokens, width, 1), torch.cat((log_probs, lacking), dim=1))
        if rows < batch or path[0].shape[1] != width:
            return super().with_path(tree, tokens, log_probs, nodes)
        depth = tree.max_depth

        def joined(packed: torch.Tensor, joint: torch.Tensor, copied: torch.Tensor, chances: torch.Tensor) -> Outputs:
            made = with_path(Tree.unpacked(packed, joint, depth), copied, chances, nodes)
            return made.packed(), made.log_probs

        key = ("with a path", rows, tree.size, depth, nodes)
        inputs = [filled(tree.packed(), rows, 1), *(filled(part, rows) for part in (tree.log_probs, *path))]
        packed, joint = self.cache.graphs.run(key, joined, inputs)
        self.is_warm = self.is_warm and self.cache.graphs.has_replayed
        return Tree.unpacked(packed[:, :batch], joint[:batch], min(max(depth, width), nodes))

    def _drafted(self, nodes: int, shape: str, temperature: float | None, *inputs: torch.Tensor) -> Outputs:
        """The state [B, d], and the tree as `Tree.packed` [4, B, n] and log-probabilities [B, n]. `inputs`: those of
        `_tree`; the log noise [B, D, V] comes last, if there is a temperature."""
        hidden, next_tokens, positions, ends, state, *log_noise = inputs
        foresight = None if temperature is None else Foresight(log_noise[0], temperature)
        counts, roots, last = ends.unbind(1)
        state = self._state_after(hidden, next_tokens, positions, counts, state)
        tree = self._grown(state, roots, last, counts, nodes, shape, foresight)
        return state, tree.packed(), tree.log_probs

    def _entries(self, nodes: int, shape: str) -> int:
        """Cache entries behind the text that a tree uses while it grows."""
        return 0

    def _grown(
        self, state: torch.Tensor, roots: torch.Tensor, last: torch.Tensor, counts: torch.Tensor, *how: Any
    ) -> Tree:
        """`last`: the positions before the roots; `how`: nodes, shape and foresight."""
        to_recall, slots = None, self.cache.slots
        if self.has_block and self.config.recall:
            values = self.cache.layers[-1].values[: slots.seen_rows, :, : slots.seen_columns]
            tokens = slots.tokens[: slots.seen_rows, : slots.seen_columns]
            visible = slots.visible_text & (
                torch.arange(slots.seen_columns, device=roots.device) < slots.starts + counts[:, None]
            )  # [B, C]
            to_recall = tokens, values, visible[:, None, None]
        return grow(self.heads, state, to_recall, roots, *how)

    def _state_after(
        self,
        hidden: torch.Tensor,
        next_tokens: torch.Tensor,
        positions: torch.Tensor,
        counts: torch.Tensor,
        state: torch.Tensor,
    ) -> torch.Tensor:
        """The state [B, d] after each row's first `counts` [B] of m positions; a row with none keeps `state`."""
        if not self.has_block:
            states = self.heads.encode(hidden, next_tokens)  # [B, m, d]
        else:
            slots, (rows, width), device = self.cache.slots, next_tokens.shape, hidden.device
            slots.index = slots.starts + torch.arange(width, device=device)  # [B, m]
            slots.tokens[:rows].scatter_(1, slots.index, next_tokens)
            causal = torch.ones(width, width, dtype=torch.bool, device=device).tril().expand(rows, -1, -1)
            visible = visible_columns(causal, slots.starts, slots.seen_columns, slots.visible_text)  # [B, m, C]
            mask = additive(visible, self.heads.dtype)
            states = self.heads.encode(hidden, next_tokens, mask, positions, self.cache)  # [B, m, d]
            slots.index = None
        last = (counts - 1).clamp(min=0)[:, None, None].expand(-1, -1, states.shape[2])  # [B, 1, d]
        return torch.where(counts[:, None] > 0, states.gather(1, last)[:, 0], state)

    # ------------------------------------------------------------------ taking in the text

    @torch.no_grad()
    def _catch_up(self) -> None:
        if self.state is None:
            self._encode_prompt()
        self._waiting = [self._last_settled()]

    def _encode_prompt(self) -> None:
        prompt, *self._waiting = self._waiting
        self.features = prompt.hidden.shape[2]
        self.cache.slots.lengths = [0] * len(prompt.counts)
        self.state = prompt.at_last(self._states_of(prompt))
        if not self.has_block:
            self.cache.finish_filling(len(prompt.counts))

    def _encoded(self, new: Settled, cache: TreeCache) -> torch.Tensor:
        """Take in all columns of the prompt; its padding is masked."""
        mask = self._mask(new.hidden.shape[1], cache.lengths, new.hidden.device)
        states = self.heads.encode(new.hidden, new.next_tokens, mask, new.positions, cache)  # [B, m, d]
        cache.finish_filling(len(new.counts))
        self.cache.slots.tokens[: len(new.counts), : new.next_tokens.shape[1]] = new.next_tokens
        return states

    def _states_of(self, new: Settled) -> torch.Tensor:
        return super()._states_of(new) if self.has_block else self.heads.encode(new.hidden, new.next_tokens)

    def _last_settled(self) -> Settled:
        """Take in all waiting positions but the last `width` or fewer, and return these, filled up to `width`."""
        roots, width = given(self.roots), self.width
        batch, device = len(roots), roots.device
        new = Settled.joined(self._waiting) if self._waiting else None
        self._waiting = []
        while new is not None and new.hidden.shape[1] > width:
            part, new = new.part(0, width), new.part(width, new.hidden.shape[1])
            counts = torch.tensor(part.counts, device=device)
            self.cache.look_at(width)
            self.cache.slots.seen_rows = batch  # all rows and no filling: this forward is no graph
            with self._staged(part):
                values = (part.hidden, part.next_tokens, part.positions, counts, given(self.state))
                self.state = self._state_after(*values)
        if new is None:
            hidden = torch.zeros(batch, width, self.features, dtype=self.heads.dtype, device=device)
            empty = torch.zeros(batch, width, dtype=torch.long, device=device)
            return Settled(hidden, empty, empty, [0] * batch)
        hidden, tokens, positions = (filled(part, width, 1) for part in (new.hidden, new.next_tokens, new.positions))
        return Settled(hidden, tokens, positions, new.counts)

    @contextmanager
    def _staged(self, new: Settled) -> Iterator[None]:
        """Inside the block, the cache takes the new positions; after it, the cache keeps those that are real."""
        if not self.has_block:
            yield
            return
        with self.cache.staged(self.width):
            yield
        self.cache.commit([range(count) for count in new.counts])


class GraphPathDrafter(GraphDrafter, PathDrafter):
    cache: StaticTreeCache

    def _entries(self, nodes: int, shape: str) -> int:
        beams = nodes if shape == "levels" else min(self.config.draft_beam_width, nodes)
        return beams * (self.config.draft_depth - 1)

    def _grown(
        self, state: torch.Tensor, roots: torch.Tensor, last: torch.Tensor, counts: torch.Tensor, *how: Any
    ) -> Tree:
        levels = StaticLevels(self, state, last, self.cache.slots.starts + counts[:, None])
        return grow_in_shape(self.heads, levels.expand, roots, *how)


class StaticLevels(Levels):
    """`Levels` without the host, so that a graph can hold it."""

    def __init__(
        self, drafter: GraphPathDrafter, state: torch.Tensor, last: torch.Tensor, starts: torch.Tensor
    ) -> None:
        self._begin(drafter, state, last)
        self.slots, self.starts = drafter.cache.slots, starts  # [B, 1] the end of each row's text

    @contextmanager
    def _written(self, width: int) -> Iterator[None]:
        before = self.ancestors.shape[2] - width
        self.slots.index = self.starts + torch.arange(before, before + width, device=self.starts.device)  # [B, W]
        yield
        self.slots.index = None

    def _mask(self, level: int) -> torch.Tensor:
        slots = self.slots
        visible = visible_columns(self.ancestors, self.starts, slots.seen_columns, slots.visible_text)  # [B, W, C]
        return additive(visible, self.states.dtype)


IN_GRAPHS: dict[type, type[GraphDrafter]] = {CloverDrafter: GraphDrafter, PathDrafter: GraphPathDrafter}


def what_drafts_read(heads: DraftHeads) -> tuple:
    """What a draft reads beside the cache: sizes from the config, and the addresses of all tensors."""
    borrowed = heads.borrowed
    tensors = [*heads.parameters(), *heads.buffers(), borrowed.embedding, *borrowed.lm_head.parameters()]
    tensors += borrowed.norm.parameters()
    tensors += (part for part in borrowed.draft_rows or () if isinstance(part, torch.Tensor))
    names = ("draft_depth", "draft_beam_width", "draft_top_k", "draft_top_p", "draft_min_p")
    return tuple(getattr(heads.config, name) for name in names), tuple(tensor.data_ptr() for tensor in tensors)
