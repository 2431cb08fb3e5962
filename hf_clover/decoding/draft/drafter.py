"""The heads' side of a step: take in what the target has settled, then grow a tree.

Contract: `CloverDrafter` takes in what the target has just settled (hidden states and the tokens after them) and
drafts a tree from there. It never looks at the target's logits and draws no random numbers. It may get those that
plain generate is about to use (`foresight.py`). For heads of another kind, `new_drafter` returns a subclass.

Shapes: B batch, T new positions, m of them at most, d hidden size, W beams, V vocabulary.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.utils import logging

from ...network.blocks import followed, last_place, searched_text, stretches
from ...network.modeling_clover import CloverHeads
from ...network.modeling_heads import DraftHeads
from ..cache.by_row import Slots, TreeCache
from ..tree import Expand, Tree, grow_chain, grow_global, grow_levels, root_only, with_path
from .foresight import Foresight

logger = logging.get_logger(__name__)

BLOCK = 512  # positions that the heads take in at once where they need a mask
MOST_WAITING = 256  # settled steps that may wait, beside the prompt, until a tree is drafted


# The drafter of each conversation, kept as long as the user keeps the conversation's cache.
_remembered: WeakKeyDictionary[Cache, tuple["CloverDrafter", int]] = WeakKeyDictionary()


def drafter_of_conversation(kind: type, network: DraftHeads, cache: Cache | None, rows: int, columns: int) -> Any:
    """The drafter of this kind that was remembered with `cache` at `columns` columns. None where there is none, or
    where the caller may have changed the cache's columns or rows since; a new drafter then knows only the new
    prompt."""
    kept, known = _remembered.pop(cache, (None, 0)) if cache is not None else (None, 0)
    if kept is None or type(kept) is not kind or kept.heads is not network or kept.rows != rows or known != columns:
        return None
    return kept


@dataclass
class Settled:
    """Positions that the target has settled and the heads have not seen."""

    hidden: torch.Tensor  # [B, m, d] before the final norm
    next_tokens: torch.Tensor  # [B, m] the tokens after them
    positions: torch.Tensor  # [B, m]
    counts: list[int]  # per row, how many of the m positions are real; the rest is filling

    @classmethod
    def joined(cls, parts: list["Settled"]) -> "Settled":
        if len(parts) == 1:
            return parts[0]
        tensors = (tuple(getattr(part, name) for part in parts) for name in ("hidden", "next_tokens", "positions"))
        hidden, next_tokens, positions = (torch.cat(tensor, dim=1) for tensor in tensors)
        counts = [sum(of_row) for of_row in zip(*(part.counts for part in parts), strict=True)]
        if min(counts) < hidden.shape[1]:  # move each row's real positions to the front
            starts = list(itertools.accumulate((part.hidden.shape[1] for part in parts), initial=0))[:-1]
            places = [
                [start + i for start, part in zip(starts, parts, strict=True) for i in range(part.counts[row])]
                for row in range(len(counts))
            ]
            width = max(counts)
            index = torch.tensor([row + [0] * (width - len(row)) for row in places], device=hidden.device)  # [B, m]
            hidden = hidden.gather(1, index[..., None].expand(-1, -1, hidden.shape[2]))
            next_tokens, positions = next_tokens.gather(1, index), positions.gather(1, index)
        return cls(hidden, next_tokens, positions, counts)

    def part(self, start: int, end: int) -> "Settled":
        counts = [min(max(count - start, 0), end - start) for count in self.counts]
        return Settled(self.hidden[:, start:end], self.next_tokens[:, start:end], self.positions[:, start:end], counts)

    def of_rows(self, index: torch.Tensor, rows: Sequence[int]) -> "Settled":
        counts = [self.counts[row] for row in rows]
        return Settled(self.hidden[index], self.next_tokens[index], self.positions[index], counts)

    def at_last(self, values: torch.Tensor) -> torch.Tensor:
        """[B, m, ...] -> [B, ...] at each row's last position."""
        if len(set(self.counts)) == 1:
            return values[:, max(self.counts[0] - 1, 0)]
        last = torch.tensor([max(count - 1, 0) for count in self.counts], device=values.device)  # [B]
        return values[torch.arange(len(self.counts), device=values.device), last]


def given(value: torch.Tensor | None) -> torch.Tensor:
    """A drafter's state or last tokens. They exist once `extend` has been called."""
    if value is None:
        raise RuntimeError("there is no text to draft for: call `extend` before `draft`.")
    return value


def grow(
    heads: CloverHeads,
    state: torch.Tensor,
    to_recall: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None,
    roots: torch.Tensor,
    nodes: int,
    shape: str,
    foresight: Foresight | None = None,
) -> Tree:
    """The tree below `roots` [B], drafted from `state` [B, d], the last output of `encode`. `to_recall`, for heads
    that recall: tokens, values and mask of the text so far."""
    config, states = heads.config, state[:, None]  # [B, W, d] of the beams of the level before
    searched = runs = values = None
    if to_recall is not None:
        text, values, mask = to_recall
        searched, runs = searched_text(text, *stretches(mask, text, 1))  # runs [B, W, C] that end at each beam

    def expand(level: int, chosen: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
        nonlocal states, runs
        if chosen is not None and config.regressive:
            states = states.gather(1, chosen[..., None].expand(-1, -1, states.shape[2]))  # [B, W, d]
            if runs is not None:
                runs = runs.gather(1, chosen[..., None].expand(-1, -1, runs.shape[2]))
        elif chosen is not None:  # no head sees a drafted token
            tokens = roots[:, None].expand_as(chosen)
            states = state[:, None].expand(-1, chosen.shape[1], -1)
        recalled: tuple[torch.Tensor, ...] = ()
        if searched is not None and runs is not None and values is not None:
            runs = followed(searched, runs, tokens)
            recalled = (heads.recall(values, last_place(runs)),)  # [B, W, 2 w]
        out, states = heads.step(level, states, tokens, *recalled)
        return heads.score(out)  # [B, W, V]

    return grow_in_shape(heads, expand, roots, nodes, shape, foresight)


def grow_in_shape(
    heads: DraftHeads, expand: Expand, roots: torch.Tensor, nodes: int, shape: str, foresight: Foresight | None = None
) -> Tree:
    """The tree below `roots` [B], in this shape; `expand` returns the logits of a level."""
    config = heads.config
    vocabulary = heads.draft_ids if config.draft_vocab_size is not None else None

    def foreseen(level: int, chosen: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
        logits = expand(level, chosen, tokens)
        return logits if foresight is None else foresight.weigh(level, logits, vocabulary, chosen, tokens)

    score, depth = expand if foresight is None else foreseen, config.draft_depth
    if shape == "levels":
        return grow_levels(score, roots, nodes, depth, config.draft_top_p, config.draft_min_p, vocabulary)
    if shape == "chain":
        return grow_chain(score, roots, nodes, depth, vocabulary)
    return grow_global(score, roots, nodes, depth, config.draft_beam_width, config.draft_top_k, vocabulary)


class CloverDrafter:
    is_warm = True  # whether the last draft took the time that the next one of its size will take

    def __init__(self, heads: CloverHeads, prompt_mask: torch.Tensor | None = None, block: int | None = None) -> None:
        self.heads, self.config, self.block = heads, heads.config, block
        self.cache = TreeCache(self.config.num_cache_layers) if self.config.has_augmenting_block else None
        self.prompt_mask = prompt_mask  # [B, T] bool, False where the prompt is padding
        self.state: torch.Tensor | None = None  # [B, ...] the output of `encode` at the text's end
        self.roots: torch.Tensor | None = None  # [B] the last emitted tokens
        self.last: torch.Tensor | None = None  # [B] the position before that of each root
        self.text: torch.Tensor | None = None  # [B, C] the token after each column of the cache, for heads that recall
        self.is_broken = False  # the heads gave NaN: nothing more is drafted
        self._waiting: list[Settled] = []

    @property
    def rows(self) -> int:
        """The number of rows that it drafts for; 0 before it has taken in a text."""
        return 0 if self.roots is None else len(self.roots)

    def remember(self, cache: Cache, columns: int) -> None:
        """The text is over: the next turn may continue from here, if it passes this cache with `columns` columns."""
        _remembered[cache] = self, columns

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows only, in this order."""
        index = torch.tensor(rows, device=self.heads.device)
        if self.cache is not None and self.cache.lengths:
            self.cache.keep_rows(rows)
        for name in ("prompt_mask", "state", "roots", "last", "text"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, value[index.to(value.device)])
        self._waiting = [each.of_rows(index, rows) for each in self._waiting]

    def with_path(self, tree: Tree, tokens: torch.Tensor, log_probs: torch.Tensor, nodes: int) -> Tree:
        """`tree.with_path`; in a graph, if this drafter uses graphs."""
        return with_path(tree, tokens, log_probs, nodes)

    # ------------------------------------------------------------------ taking in the text

    def extend(
        self, hidden: torch.Tensor, next_tokens: torch.Tensor, positions: torch.Tensor, counts: Sequence[int]
    ) -> None:
        """Take in, per row, the first `counts[row]` of the new positions: hidden [B, m, f], the tokens after them
        [B, m] and the positions [B, m] of the hidden states. The heads read them when the next tree is drafted."""
        device = self.heads.device
        new = Settled(hidden.to(device), next_tokens.to(device), positions.to(device), list(counts))
        roots, last = new.at_last(new.next_tokens), new.at_last(new.positions)  # [B] each
        if min(counts) == 0 and self.roots is not None and self.last is not None:  # a row with nothing new keeps both
            is_new = torch.tensor(counts, device=device) > 0
            roots, last = torch.where(is_new, roots, self.roots), torch.where(is_new, last, self.last)
        self.roots, self.last = roots, last
        self._waiting.append(new)
        if len(self._waiting) > MOST_WAITING:
            self._catch_up()

    @torch.no_grad()
    def _catch_up(self) -> None:
        """Run the heads over all positions that wait."""
        if not self._waiting:
            return
        new, self._waiting = Settled.joined(self._waiting), []
        if self.cache is not None and not self.cache.lengths:
            self.cache.finish_filling(new.hidden.shape[0])
        if self.cache is not None and self.config.recall:
            self.text = self._text_with(new.next_tokens, self.cache.slots)
        states = self._states_of(new)  # [B, m, d]
        state = new.at_last(states)  # [B, d]
        if min(new.counts) == 0 and self.state is not None:
            state = torch.where(torch.tensor(new.counts, device=state.device)[:, None] > 0, state, self.state)
        self.state = state

    def _text_with(self, tokens: torch.Tensor, slots: Slots) -> torch.Tensor:
        """The text with `tokens` [B, m] behind each row's own."""
        text = tokens[:, :0] if self.text is None else self.text
        if slots.is_even:
            return torch.cat((text[:, : slots.lengths[0]], tokens), dim=1)
        index = slots.starts_on(tokens.device) + torch.arange(tokens.shape[1], device=tokens.device)  # [B, m]
        more = max(slots.lengths) + tokens.shape[1] - text.shape[1]
        return F.pad(text, (0, more)).scatter(1, index, tokens)

    def _states_of(self, new: "Settled") -> torch.Tensor:
        """The heads' states [B, m, d], computed in blocks of as many positions as the caller sets, or a mask
        allows."""
        cache = self.cache
        if cache is None:
            return self.heads.encode(new.hidden, new.next_tokens)
        width, block = new.hidden.shape[1], self.block
        if block is None:  # plain causal attention needs no mask, and so no blocks
            block = width if max(cache.lengths) == 0 and self.prompt_mask is None else BLOCK
        parts = [self._encoded(new.part(start, start + block), cache) for start in range(0, width, block)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _encoded(self, new: "Settled", cache: TreeCache) -> torch.Tensor:
        width = new.hidden.shape[1]
        mask = self._mask(width, cache.lengths, new.hidden.device)
        with cache.staged(width):
            states = self.heads.encode(new.hidden, new.next_tokens, mask, new.positions, cache)  # [B, m, d]
        cache.commit([range(count) for count in new.counts])
        return states

    def _mask(self, new: int, lengths: list[int], device: torch.device) -> torch.Tensor | None:
        """The mask [B, 1, m, columns] of the Augmenting Block: causal from each row's own length, without the
        padding."""
        if self.prompt_mask is None and (max(lengths) == 0 or (new == 1 and len(set(lengths)) == 1)):
            return None  # neither plain causal attention nor one token that sees everything needs a mask
        columns = max(lengths) + new
        last_visible = torch.tensor(lengths)[:, None] + torch.arange(new)  # [B, m]
        visible = self._without_padding(torch.arange(columns) <= last_visible[..., None])  # [B, m, columns]
        if self.prompt_mask is not None:
            # A padding column sees itself, so that no row of the attention is empty.
            visible |= torch.arange(columns) == last_visible[..., None]
        return visible[:, None].to(device)

    def _without_padding(self, visible: torch.Tensor) -> torch.Tensor:
        """Set `visible` [B, m, columns] to False, in place, in the prompt's padding."""
        if self.prompt_mask is not None:
            width = min(self.prompt_mask.shape[1], visible.shape[-1])
            visible[..., :width] &= self.prompt_mask[:, None, :width].to(visible.device)
        return visible

    # ------------------------------------------------------------------ drafting

    @torch.no_grad()
    def draft(self, nodes: int, shape: str | None = None, foresight: Foresight | None = None) -> Tree:
        """A tree of `nodes` nodes below the last tokens; only the root if `nodes` is 0. `shape`: None for the
        config's. `foresight`: what is known about the next tokens."""
        roots, self.is_warm = given(self.roots), True
        if nodes == 0 or self.is_broken:
            return root_only(roots)
        self._catch_up()
        return self._tree(roots, nodes, shape or self.config.draft_tree, foresight)

    def _tree(self, roots: torch.Tensor, nodes: int, shape: str, foresight: Foresight | None) -> Tree:
        return grow(self.heads, given(self.state), self._to_recall(), roots, nodes, shape, foresight)

    def _to_recall(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
        """The text so far, for heads that recall: its tokens [B, C], the last layer's values
        [B, kv_heads, C, head_dim], and which columns belong to each row [B, 1, 1, C] (None for all)."""
        cache = self.cache
        if cache is None or not self.config.recall:
            return None
        columns = max(cache.lengths)
        kept = cache.export(-1, columns)
        if kept is None or self.text is None:  # nothing has been taken in
            return None
        tokens, values = self.text[:, :columns], kept[1]  # [B, C] and [B, kv_heads, C, head_dim]
        if self.prompt_mask is None and cache.slots.is_even:
            return tokens, values, None
        starts = cache.slots.starts_on(tokens.device)[..., None]  # [B, 1, 1]
        visible = self._without_padding(torch.arange(columns, device=tokens.device) < starts)  # [B, 1, C]
        return tokens, values, visible[:, None]
