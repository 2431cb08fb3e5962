"""The heads' side of a step: keep up with the target, then grow a tree.

Contract: `CloverCandidateGenerator` is fed what the target has just settled (hidden states and the tokens after
them) and drafts from there. `draft()` gives a tree; `get_candidates()` gives a chain, for transformers' own assisted
loop. It never looks at the target's logits or random numbers, which is what makes the loop lossless, and uses no
random numbers of its own.

Shapes: B batch, T new positions, m of them at most, d hidden size, W beams, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.cache_utils import Cache
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.utils import logging

from ..modeling_clover import CloverHeads
from .cache import TreeCache
from .tree import Tree, grow_chain, grow_global, grow_levels, root_only

logger = logging.get_logger(__name__)


# What a conversation's drafter knows of it, kept as long as the user keeps the conversation's cache.
_remembered: WeakKeyDictionary[Cache, tuple["CloverCandidateGenerator", int]] = WeakKeyDictionary()


class CloverCandidateGenerator(CandidateGenerator):
    requires_model_outputs = True
    model_kwargs_overrides: dict[str, Any] = {}

    def __init__(self, heads: CloverHeads, prompt_mask: torch.Tensor | None = None) -> None:
        self.heads, self.config = heads, heads.config
        self.cache = TreeCache(self.config.num_augmenting_layers) if self.config.has_augmenting_block else None
        self.prompt_mask = prompt_mask  # [B, T] bool, False where the prompt is padding
        self.state: torch.Tensor | None = None  # [B, d] what head 0 starts from
        self.roots: torch.Tensor | None = None  # [B] the last emitted tokens
        self.forwards = 0  # of the target, in transformers' own assisted loop
        self.is_broken = False  # the heads gave NaN: nothing is drafted any more

    @classmethod
    def for_conversation(
        cls, heads: CloverHeads, cache: Cache | None, columns: int, prompt_mask: torch.Tensor | None
    ) -> "CloverCandidateGenerator":
        """The drafter that was there when `cache` reached `columns`, or a new one that knows the new prompt only."""
        kept, known = _remembered.pop(cache, (None, 0)) if cache is not None else (None, 0)
        return kept if kept is not None and kept.heads is heads and known == columns else cls(heads, prompt_mask)

    def remember(self, cache: Cache, columns: int) -> None:
        _remembered[cache] = (self, columns)

    # ------------------------------------------------------------------ keeping up

    @torch.no_grad()
    def extend(
        self, hidden: torch.Tensor, next_tokens: torch.Tensor, positions: torch.Tensor, counts: Sequence[int]
    ) -> None:
        """Take in, per row, the first `counts[row]` of the new positions: hidden [B, m, d], the tokens after them
        [B, m] and the positions [B, m] of the hidden states."""
        device = self.heads.device
        hidden, next_tokens, positions = hidden.to(device), next_tokens.to(device), positions.to(device)
        if self.cache is None:
            states = self.heads.encode(hidden, next_tokens)  # [B, m, d]
        else:
            if not self.cache.lengths:
                self.cache.finish_filling(hidden.shape[0])
            new = hidden.shape[1]
            mask = self._mask(new, device)
            with self.cache.staged(new):
                states = self.heads.encode(hidden, next_tokens, mask, positions, self.cache)
            self.cache.commit([range(count) for count in counts])
        last = torch.tensor([max(count - 1, 0) for count in counts], device=device)  # [B]
        rows = torch.arange(len(counts), device=device)
        state, roots = states[rows, last], next_tokens[rows, last]  # [B, d], [B]
        if self.state is not None and min(counts) == 0:  # a row with nothing new stays where it was
            moved = torch.tensor([count > 0 for count in counts], device=device)
            state = torch.where(moved[:, None], state, self.state)
            roots = torch.where(moved, roots, self.roots)
        self.state, self.roots = state, roots

    def _mask(self, new: int, device: torch.device) -> torch.Tensor | None:
        """[B, 1, m, columns] for the Augmenting Block: causal from each row's own length, without the padding."""
        lengths = self.cache.lengths
        is_prefill = max(lengths) == 0
        if is_prefill and self.prompt_mask is None:
            return None  # plain causal attention needs no mask
        columns = max(lengths) + new
        last_visible = torch.tensor(lengths)[:, None] + torch.arange(new)  # [B, m]
        visible = torch.arange(columns) <= last_visible[..., None]  # [B, m, columns]
        if self.prompt_mask is not None:
            width = min(self.prompt_mask.shape[1], columns)
            visible[:, :, :width] &= self.prompt_mask.cpu()[:, None, :width]
            # A padding column sees itself, so that no row of the attention is empty.
            visible |= torch.arange(columns) == last_visible[..., None]
        return visible[:, None].to(device)

    # ------------------------------------------------------------------ drafting

    @torch.no_grad()
    def draft(self, nodes: int, shape: str | None = None) -> Tree:
        """A tree of `nodes` nodes below the last emitted tokens (none if `nodes` is 0), of the config's shape."""
        if nodes == 0 or self.is_broken:
            return root_only(self.roots)
        heads, config = self.heads, self.config
        vocabulary = heads.draft_ids if config.draft_vocab_size is not None else None
        states = self.state[:, None]  # [B, W, d] of the beams of the level before

        def expand(level: int, chosen: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
            nonlocal states
            if chosen is not None and config.regressive:
                states = states.gather(1, chosen[..., None].expand(-1, -1, states.shape[2]))  # [B, W, d]
            elif chosen is not None:  # no head sees a drafted token
                tokens = self.roots[:, None].expand_as(chosen)
                states = self.state[:, None].expand(-1, chosen.shape[1], -1)
            out, states = heads.step(level, states, tokens)
            return heads.score(out)  # [B, W, V]

        shape, depth = shape or config.draft_tree, config.draft_depth
        if shape == "levels":
            return grow_levels(expand, self.roots, nodes, depth, config.draft_top_p, config.draft_min_p, vocabulary)
        if shape == "chain":
            return grow_chain(expand, self.roots, nodes, depth, vocabulary)
        return grow_global(expand, self.roots, nodes, depth, config.draft_beam_width, config.draft_top_k, vocabulary)

    # ------------------------------------------------------------------ transformers' own assisted loop

    def drive_chain(self, captured: list[torch.Tensor], nodes: int, max_length: int, eos: torch.Tensor | None) -> None:
        """Settings for `get_candidates`; `captured` collects the target's hidden states of each forward."""
        self._captured, self._nodes, self._max_length, self._eos = captured, nodes, max_length, eos

    @torch.no_grad()
    def get_candidates(
        self, input_ids: torch.Tensor, is_first_iteration: bool = False, n_last_matches: int = 0, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """The text with a drafted chain behind it; no logits, so that the target's own choice decides."""
        self.forwards += 1  # the loop is about to run the target
        if is_first_iteration:
            return input_ids, None
        hidden = torch.cat(self._captured, dim=1)  # [1, T, d]
        self._captured.clear()
        is_prompt = self.state is None
        new = hidden.shape[1] if is_prompt else n_last_matches + 1
        length = input_ids.shape[1]
        positions = torch.arange(length - 1 - new, length - 1, device=hidden.device)[None]
        self.extend(hidden[:, :new], input_ids[:, -new:], positions, [new])
        room = self._max_length - length - 1
        if room <= 0:
            return input_ids, None
        tree = self.draft(min(self._nodes, room), shape="chain")
        chain = tree.tokens[:, 1:][:, : int(tree.valid[0, 1:].sum())]
        if self._eos is not None:  # nothing after an end of sequence, which the stock loop would keep
            ends = torch.isin(chain[0], self._eos.to(chain.device)).nonzero()
            chain = chain[:, : int(ends[0])] if len(ends) else chain
        return torch.cat((input_ids, chain.to(input_ids.device)), dim=1), None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing to learn from it (older versions of transformers ask for the method)."""
