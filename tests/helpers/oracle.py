"""Drafters that know the answer, so that the loop is tested at every depth of acceptance.

Contract: inside `planted(heads, truth)`, every drafter of `heads` drafts the target's own continuation `truth` [B, L]
up to a random depth, then wrong tokens, with random siblings. So full, partial and no acceptance all occur. The heads
still run and take in the text as always; only the tree is replaced. The trees are random, but the same for the same
seed.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_clover.decoding.draft.drafter import CloverDrafter
from hf_clover.decoding.tree import Tree, root_only
from hf_clover.network.modeling_heads import DraftHeads


class PlantingDrafter(CloverDrafter):
    truth: torch.Tensor
    rng: random.Random
    start: int  # how many of the truth's columns are the prompt

    def extend(self, hidden, next_tokens, positions, counts):
        first = self.roots is None
        super().extend(hidden, next_tokens, positions, counts)
        if first:  # the prompt, and the first emitted token
            self.place = [self.start + 1] * len(counts)
        else:
            self.place = [place + count for place, count in zip(self.place, counts, strict=True)]

    def keep_rows(self, rows):
        super().keep_rows(rows)
        self.place, self.truth = [self.place[row] for row in rows], self.truth[rows]

    def draft(self, nodes: int, shape: str | None = None, foresight: Any = None) -> Tree:
        if nodes == 0:
            return root_only(self.roots)
        plant = self._chain if shape == "chain" else self._row
        rows = [plant(row, nodes) for row in range(len(self.place))]
        tokens, parents, depths = (torch.tensor(values) for values in zip(*rows, strict=True))
        tokens[:, 0] = self.roots
        ones = torch.ones_like(tokens)
        return Tree(tokens, parents, depths, -ones.float(), ones.bool(), max_depth=nodes)

    def _chain(self, row: int, nodes: int) -> tuple[list[int], list[int], list[int]]:
        """A chain of the truth's next tokens up to a random depth, followed by wrong tokens."""
        ahead = self.truth[row, self.place[row] :].tolist()
        known, vocabulary = self.rng.randint(0, nodes), self.heads.config.vocab_size
        drafts = [token if at < known else (token + 1) % vocabulary for at, token in enumerate(ahead[:nodes])]
        drafts += [1] * (nodes - len(drafts))
        return [0, *drafts], [0, *range(nodes)], list(range(nodes + 1))

    def _row(self, row: int, nodes: int) -> tuple[list[int], list[int], list[int]]:
        """A random tree in which one path has the truth's next tokens up to a random depth."""
        ahead = self.truth[row, self.place[row] :].tolist()[: self.rng.randint(0, nodes)]
        tokens, parents, depths, children = [0], [0], [0], {0: set()}

        def add(parent: int, token: int) -> int:
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            children[parent].add(token)
            children[len(tokens) - 1] = set()
            return len(tokens) - 1

        tip = 0
        while len(tokens) <= nodes:
            if ahead and self.rng.random() < 0.6:
                tip = add(tip, ahead.pop(0))
            else:
                parent = self.rng.randrange(len(tokens))
                free = [t for t in range(self.heads.config.vocab_size) if t not in children[parent]]
                if parent == tip and ahead:
                    free = [t for t in free if t != ahead[0]]
                if free:
                    add(parent, self.rng.choice(free))
        return tokens, parents, depths


@contextmanager
def planted(heads: DraftHeads, truth: torch.Tensor, start: int, seed: int = 0) -> Iterator[None]:
    """`truth` [B, L] begins with the `start` columns of the prompt."""
    fields = {"truth": truth, "rng": random.Random(seed), "start": start}
    drafter = type("Planted", (PlantingDrafter,), fields)
    with drafting_by(heads, drafter):
        yield


@contextmanager
def drafting_by(heads: DraftHeads, drafter: type) -> Iterator[None]:
    """Inside the block, `heads` draft with another kind of drafter."""
    heads.new_drafter = drafter
    try:
        yield
    finally:
        del heads.new_drafter
