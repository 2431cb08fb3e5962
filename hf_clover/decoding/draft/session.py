"""The heads' side of one call: what they read of the text, and what they draft.

Contract: a `DraftSession` lasts one call and knows the target's `Run`, the text and the budget. It passes every
position that the target has settled to the heads. For a draft it asks the budget for a size and the heads for a tree,
and adds what is copied from the text. It drops rows that have ended, from the target and from the heads. When the text
is over, it returns the cache.

Shapes: B batch, T prompt columns, m walked nodes at most, d hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache

from ...network.modeling_heads import DraftHeads
from ...targets.hidden_states import BEFORE_NORM, read_by
from ..budget.fixed import Budget
from ..call import Text
from ..record import Listener
from ..route import warn
from ..target.base import Run
from ..target.memory import memory_of
from ..tree import Tree, with_chain
from .copies import Copies, Path, path_tensors
from .cpu_copy import drafting_copy
from .drafter import CloverDrafter, drafter_of_conversation
from .foresight import Unwalked, foresee
from .in_graphs import IN_GRAPHS, drafts_in_graphs
from .obeying import Obedience, must_obey

DROP_BELOW = 0.75  # share of a batch's rows that still run
WATCHED = 200  # places at which the first draft is compared with the text
HOPELESS = 0.05  # share of right first drafts, below which there is a warning


def layers_read(heads: DraftHeads) -> tuple[int, ...]:
    """The target's layers whose states are captured, as `capture_states` takes them."""
    layers = heads.feature_layers
    return (*layers, BEFORE_NORM) if layers and heads.learner is not None else layers


class DraftSession:
    def __init__(self, heads: DraftHeads, budget: Budget, run: Run, text: Text) -> None:
        self.heads, self.run, self.text, self.budget = heads, run, text, budget
        self.is_needed = not text.done or run.keeps_cache  # in a conversation the heads read the text to its end
        self.obeys = must_obey([processor for those in text.processors for processor in those])
        self.drafter = self._drafter_of_conversation(heads)
        waits = run.shape == "chain" and len(text.finished) > 1  # rows wait for each other
        most = 0 if waits or heads.config.draft_tree == "chain" else heads.config.draft_copies
        self.copies = Copies(text.tokens, most, heads.text_memory) if most else None
        self.drafted = 0  # nodes that the heads draft in this step
        self.obedience: Obedience | None = None  # in this step
        self.unwalked: Unwalked | None = None  # of the last chain, where rows wait for each other
        self.listener: Listener | None = None if heads.learner is None else heads.learner.listen(run)

    def _drafter_of_conversation(self, heads: DraftHeads) -> CloverDrafter:
        """The drafter of the turn before, or a new one; in graphs where the device has them."""
        run, config, mask = self.run, self.run.generation_config, self.run.prompt_mask
        (rows, columns), block = run.hidden.shape[:2], config.prefill_chunk_size
        mask = None if mask is None else mask[:, -columns:]
        network = drafting_copy(heads, run.target)
        eager = heads.new_drafter(network, mask, block)
        kind = None if self.obeys or not drafts_in_graphs(network, config) else IN_GRAPHS.get(type(eager))
        known = drafter_of_conversation(kind or type(eager), network, run.theirs, rows, run.known_columns)
        if kind is None:
            return known or eager
        longest = run.known_columns + columns + self.text.max_length - self.text.rows()[0].shape[0]
        drafter = known or kind(eager.heads, mask, block, rows, columns, longest)
        drafter.is_remembered = False  # unless this call ends with a cache for the next turn
        run.at_end(drafter.release)
        return drafter

    # ------------------------------------------------------------------ what the heads take in

    def extend_by_prompt(self) -> None:
        """Pass the prompt's positions that the target has just computed to the heads, each with the token after it."""
        if not self.is_needed and self.listener is None:
            return
        hidden, rows = self.run.hidden, self.text.rows()  # [B, T, d]
        known = min(hidden.shape[1], rows[0].shape[0])  # for a prompt of embeddings only the new token is known
        if known < hidden.shape[1]:
            self.drafter.prompt_mask = None
        tokens = torch.stack([row[-known:] for row in rows])  # [B, T]
        positions = self.run.model_kwargs["position_ids"]
        positions = positions.reshape(-1, *positions.shape[-2:])[0][:, -known:].expand(len(rows), -1)  # [B, T]
        self._pass_on(hidden[:, -known:], tokens, positions, [known] * len(rows))

    def _pass_on(
        self, hidden: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, counts: Sequence[int]
    ) -> None:
        if self.listener is not None:
            self.listener.hear(hidden, tokens, counts, self.text.running)
            hidden = read_by(self.heads, hidden)
        with torch.autocast(self.heads.device.type, enabled=False):  # the heads cast their inputs to their own dtype
            self.drafter.extend(hidden, tokens, positions, counts)

    def extend(self, paths: Sequence[Sequence[int]], tree: Tree, logits: torch.Tensor) -> None:
        """Pass every walked node of `tree` to the heads, each with the token emitted at it. `logits` [B, n, V]: of all
        nodes."""
        text, run = self.text, self.run
        found_no_drafts, text.found_no_drafts = text.found_no_drafts, False  # found by the walk at no cost
        forbidden = self.obedience is not None and self.obedience.left_nothing
        if found_no_drafts and self.drafted and not forbidden and not self.drafter.is_broken:
            self.drafter.is_broken = True
            warn("the heads gave NaN: drafting is off for the rest of this call; the tokens are the target's own")
        if self.heads.feature_layers and self.drafted and not found_no_drafts:
            self._watch(paths)
        if text.done and not run.keeps_cache and self.listener is None:
            return
        counts = [len(path) for path in paths]
        waited = run.shape == "chain" and len(paths) > 1 and counts[0] < tree.size
        self.unwalked = Unwalked.behind(tree, logits, counts[0]) if waited else None
        longest = max(counts)
        if run.walked is not None:
            tokens = run.walked[:, 1, :longest]  # [B, m]
        else:
            rows = zip(text.running_rows(), counts, strict=True)
            tokens = pad_sequence([row[len(row) - count :] for row, count in rows], batch_first=True)  # [B, m]
        positions = run.root_position + torch.arange(longest, device=run.root_position.device)  # [B, m]
        self._pass_on(run.hidden[:, :longest], tokens, positions, counts)

    def _watch(self, paths: Sequence[Sequence[int]]) -> None:
        """Warn once if first drafts are nearly always wrong. Heads that read the wrong layers raise no error."""
        known = memory_of(self.run.target).first_drafts
        places, right = known.get(self.heads, (0, 0))
        if places >= WATCHED:
            return
        for row, path in zip(self.text.running, paths, strict=True):
            if not self.text.finished[row]:  # its walk could have reached the first draft
                places, right = places + 1, right + (path[1:2] == [1])
        known[self.heads] = places, right
        if places >= WATCHED and right < HOPELESS * places:
            warn(
                f"the first token that these heads draft was right in {right} of {places} places, so they slow "
                "`generate` down; the tokens are the target's own. The usual causes: other layers of the target than "
                "they were trained on (`load_heads(..., layer_ids=...)`), another chat template or thinking mode, or "
                "another fine-tune of the target"
            )

    # ------------------------------------------------------------------ what they draft

    def draft(self, vocab_size: int) -> Tree:
        """A tree of as many nodes as the budget asks for, below the last tokens."""
        text, unfinished = self.text, self.text.unfinished
        self.obedience = obedience = Obedience(text, vocab_size) if self.obeys else None
        known, joint = path_tensors(self._known_paths(obedience))  # [B, k]
        lengths = [self.run.cache.lengths[place] for place in unfinished]
        nodes, copied = self.budget.ask(lengths, self.run.replayed, joint[unfinished] if joint.shape[1] else None)
        self.drafted = 0 if self.run.must_settle else nodes
        levels = min(self.drafted, self.drafter.config.draft_depth)
        foresight = foresee(text, levels, vocab_size, self.unwalked) if levels else None
        if obedience is not None:
            obedience.foresight, foresight = foresight, obedience
        with torch.autocast(self.heads.device.type, enabled=False):
            tree = self.drafter.draft(self.drafted, self.run.shape, foresight)
        if copied or (joint.shape[1] and tree.size > 1 and self.run.shape != "chain"):
            device = tree.tokens.device
            tree = self.drafter.with_path(tree, known.to(device), joint.to(device), copied or tree.size - 1)
        tree = self.budget.cut(tree, unfinished, lengths)
        if text.in_lockstep and text.pad is not None and len(unfinished) < len(text.finished):
            finished = torch.tensor(text.finished, device=tree.tokens.device)
            tree = with_chain(tree, finished, text.pad)
        return tree

    def _known_paths(self, obedience: Obedience | None) -> list[Path]:
        """Drafts that do not come from the heads: in each running row the tokens that must follow, or else copies."""
        copied: list[Path] = [([], [])] * len(self.text.running)
        if self.run.must_settle:
            return copied
        if self.copies is not None and not self.drafter.is_broken:
            self.copies.extend()
            copied = self.copies.paths(self.text.running)
        if obedience is None:
            return copied
        pairs = zip(obedience.forced(), obedience.cut(copied), strict=True)
        return [forced if forced[0] else copy for forced, copy in pairs]

    # ------------------------------------------------------------------ rows and texts that end

    def drop_finished_rows(self) -> None:
        """Drop finished rows from the batch, once they are so many that copying the other rows' cache pays."""
        text, going = self.text, self.text.unfinished
        if not going or text.in_lockstep or not self.run.can_drop_rows or len(going) > DROP_BELOW * len(text.running):
            return
        self.run.keep_rows(going)
        self.drafter.keep_rows(going)
        text.running = [text.running[place] for place in going]

    def hand_back(self, sequences: torch.Tensor, synced_gpus: bool) -> Any:
        """The text is over: return its cache, with which the caller or plain generate can continue. None if nobody
        gets it."""
        if self.copies is not None:
            self.copies.extend()
            self.copies.remember()
        if not self.run.keeps_cache:
            return None
        cache = self.run.hand_back(self.run.bring_rows_to_one_length(sequences, synced_gpus))
        if isinstance(cache, Cache):
            for each in (self.drafter, self.listener):
                if each is not None:
                    each.remember(cache, max(self.run.cache.lengths))
        return cache
