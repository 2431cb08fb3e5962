"""The first weights of new heads that learn while they are used, by least squares.

Contract: a `FirstFit` receives the texts that heads learn from. It fits the first layer of clover-x heads, which is
linear, so that the layer predicts the target's next state from the last state and the next token. It writes the
fitted weights into the heads. A fit of 2,000 tokens is worth more than learning steps over 10,000 tokens; after those
the steps are better. This module knows no optimizer and no thread.

Shapes: N positions of a document, d hidden size.
"""

from collections.abc import Iterable

import torch

from ..network.blocks import EntryProjector, GatedDecoder
from ..network.modeling_clover import CloverHeads
from ..network.modeling_heads import DraftHeads
from .lessons import Document

FIRST = 1000  # tokens of the first fit
GROWTH = 1.3  # factor by which the number of tokens grows from one fit to the next
LAST = 10_000  # tokens after which the layer is learned in steps, as all others are
DAMPING = 200  # weight of the pull of all weights towards zero, in tokens of average size


class FirstFit:
    @classmethod
    def of(cls, heads: DraftHeads) -> "FirstFit | None":
        """The fit of new heads; None if they were trained, or if their first layer is not linear."""
        entry, decoder = getattr(heads, "entry_decoder", None), getattr(heads, "decoder", None)
        is_new = isinstance(decoder, GatedDecoder) and not decoder.down.weight.any()  # where new heads have zeros
        if isinstance(heads, CloverHeads) and isinstance(entry, EntryProjector) and is_new:
            return cls(heads, entry)
        return None

    def __init__(self, heads: CloverHeads, entry: EntryProjector) -> None:
        self.heads, self.layer = heads, entry.fc
        size, inputs = heads.config.hidden_size, 2 * heads.config.hidden_size + 1
        device = heads.device
        self.squares = torch.zeros(inputs, inputs, dtype=torch.float32, device=device)  # [2 d + 1, 2 d + 1]
        self.products = torch.zeros(inputs, size, dtype=torch.float32, device=device)  # [2 d + 1, d]
        self.tokens = 0
        self.next_fit = FIRST

    @property
    def has_fitted(self) -> bool:
        return self.next_fit > FIRST

    @property
    def is_over(self) -> bool:
        return self.tokens >= LAST

    @torch.no_grad()
    def add(self, documents: Iterable[Document]) -> None:
        for document in documents:
            start, device = max(document.known - 1, 0), self.squares.device
            states = self.heads.scaled_states(document.states[start:].to(device)).float()  # [N, d]
            embeddings = self.heads.embed(document.next_tokens[start:].to(device)).float()  # [N, d]
            ones = states.new_ones(len(states), 1)
            inputs = torch.cat((states, embeddings, ones), dim=-1)[:-1]  # [N - 1, 2 d + 1]
            self.squares.addmm_(inputs.T, inputs)
            self.products.addmm_(inputs.T, states[1:])
            self.tokens += len(inputs)

    @torch.no_grad()
    def fit(self) -> bool:
        """Write fitted weights into the heads, if there are enough tokens for the next fit. Return whether it did."""
        if self.tokens < self.next_fit:
            return False
        self.next_fit = round(GROWTH * self.tokens)
        damping = DAMPING / self.tokens * self.squares.diagonal().mean()
        damped = self.squares + damping * torch.eye(len(self.squares), dtype=torch.float32, device=self.squares.device)
        found = torch.linalg.solve(damped, self.products).T  # [d, 2 d + 1]
        if not torch.isfinite(found).all():
            return False
        self.layer.weight.copy_(found[:, :-1])
        self.layer.bias.copy_(found[:, -1])
        return True


__all__ = ["FirstFit"]
