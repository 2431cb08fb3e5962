"""The texts that heads learn from in use: recorded from calls of `generate`, and kept in memory.

Contract: a `CallListener` records one call. At its end it makes a `Document` for each row: the target's states and the
token after each. `Lessons` holds new documents until a step takes them. Of older documents it keeps a random sample
within a limit of bytes; each had the same chance to stay (reservoir sampling), whatever kind of text came later.
Nothing is written to disk. This module does not know losses, optimizers or threads.

Shapes: N positions of a document, f numbers of a state, B batch, k positions of one row in one part of a call.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from transformers import Cache

if TYPE_CHECKING:
    from ..decoding.record import Speculation
    from ..decoding.target.base import Run

SHORTEST = 4  # new positions of a piece, at least: three give one prediction, with nothing before it
LONGEST = 2048  # positions of a piece, at most, as in training
SHARE_OF_OLD = 0.25  # share of a step's tokens that comes from old documents


@dataclass(frozen=True)
class Document:
    """One text, up to the end of its last turn."""

    states: torch.Tensor  # [N, f] bfloat16
    next_tokens: torch.Tensor  # [N]
    known: int = 0  # how many of its first positions belong to earlier turns, and were learned from then

    def __len__(self) -> int:
        return len(self.next_tokens)

    @property
    def new(self) -> int:
        """Number of positions to learn from."""
        return len(self) - self.known

    @property
    def nbytes(self) -> int:
        return self.states.nbytes + self.next_tokens.nbytes

    def continued(self, later: "Document") -> "Document":
        """This text, followed by its next turn."""
        states, tokens = (self.states, later.states), (self.next_tokens, later.next_tokens)
        return Document(torch.cat(states), torch.cat(tokens), known=len(self))

    def pieces(self) -> list["Document"]:
        """The new positions, in pieces of at most `LONGEST`. The first piece begins with as many known positions as
        fit into it."""
        start = max(self.known - max(LONGEST - self.new, 0), 0)
        parts = []
        for begin in range(start, len(self), LONGEST):
            end = min(begin + LONGEST, len(self))
            part = Document(self.states[begin:end], self.next_tokens[begin:end], max(self.known - begin, 0))
            if part.new >= SHORTEST:
                parts.append(part)
        return parts

    def part_of(self, length: int, chance: random.Random) -> "Document":
        """`length` positions in a row, from a random place."""
        begin = chance.randrange(max(len(self) - length, 0) + 1)
        return Document(self.states[begin : begin + length], self.next_tokens[begin : begin + length])

    def kept(self) -> "Document":
        """A copy on the CPU, with no position known, so that all of it can be learned from again."""
        return Document(self.states.to("cpu", copy=True), self.next_tokens.to("cpu", copy=True))


class CallListener:
    """Records one call of `generate`: copies states and tokens as they are accepted, and never waits for a device."""

    def __init__(
        self,
        run: "Run",
        turns: "WeakKeyDictionary[Cache, tuple[int, list[Document]]]",
        at_end: Callable[[list[Document], "Speculation"], None],
    ) -> None:
        """`turns`: the texts of conversations by their cache, which the next turn is called with. `at_end` gets the
        documents of the call."""
        known = turns.get(run.theirs) if run.known_columns else None
        # An earlier turn may not have been recorded, and the user may have cut the cache since.
        self._before = [] if known is None or known[0] != run.known_columns else known[1]
        self._turns, self._at_end = turns, at_end
        self._kind = run.hidden.device.type
        self._prompt_mask = run.prompt_mask  # [B, T] bool
        self._parts: list[tuple[torch.Tensor, torch.Tensor, Sequence[int], Sequence[int]]] = []
        self._documents: list[Document] | None = None

    def hear(
        self, hidden: torch.Tensor, next_tokens: torch.Tensor, counts: Sequence[int], rows: Sequence[int]
    ) -> None:
        # Copies, because the next step of a CUDA graph overwrites both.
        self._parts.append((hidden.to(torch.bfloat16, copy=True), next_tokens.clone(), list(counts), list(rows)))

    def documents(self) -> list[Document]:
        """One document for each row of the call."""
        if self._documents is None:
            of_rows: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
            for hidden, tokens, counts, rows in self._parts:
                tokens = tokens.to(hidden.device)
                for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
                    states, following = hidden[place, :count], tokens[place, :count]  # [k, f] and [k]
                    if row not in of_rows and self._prompt_mask is not None:
                        shown = self._prompt_mask[row, -count:].to(hidden.device)  # [k]
                        states, following = states[shown], following[shown]
                    of_rows.setdefault(row, []).append((states, following))
            joined = ([torch.cat(parts) for parts in zip(*of_rows[row], strict=True)] for row in sorted(of_rows))
            with torch.autocast(self._kind, enabled=False):  # a caller's float16 refuses to join bfloat16
                made = [Document(states, tokens) for states, tokens in joined]
                if len(self._before) == len(made):
                    made = [earlier.continued(later) for earlier, later in zip(self._before, made, strict=True)]
            self._documents, self._parts = made, []
        return self._documents

    def remember(self, cache: Cache, columns: int) -> None:
        self._turns[cache] = columns, self.documents()

    def end(self, stats: "Speculation") -> None:
        self._at_end(self.documents(), stats)


class Lessons:
    """Documents to learn from: new ones, and a random sample of old ones."""

    def __init__(self, most_bytes: int, most_new: int) -> None:
        """`most_bytes`: limit of the old documents in bytes; `most_new`: limit of the new ones in tokens."""
        self.most_bytes, self.most_new = most_bytes, most_new
        self.new: deque[Document] = deque()
        self.old: list[Document] = []
        self.nbytes = 0  # of the old documents
        self._came = 0  # documents that were ever offered as old ones, kept or not
        self._random = random.Random(0)  # a generator of its own, so that learning does not change sampled tokens

    @property
    def waiting(self) -> int:
        """Number of tokens in the new documents."""
        return sum(document.new for document in self.new)

    def add(self, documents: Iterable[Document]) -> None:
        self.new.extend(piece for document in documents for piece in document.pieces())
        while len(self.new) > 1 and self.waiting > self.most_new:  # more arrives than is learned
            self._keep(self.new.popleft())

    def take(self, tokens: int) -> tuple[list[Document], list[Document]]:
        """New documents, and parts of old ones, for a step of about `tokens` tokens. The old ones are a fixed share,
        and more if there is little new text."""
        part = round(SHARE_OF_OLD * tokens)
        room = tokens - (part if self.old else 0)
        new: list[Document] = []
        while self.new and room > 0:
            new.append(self.new.popleft())
            room -= new[-1].new
        missing = max(room, 0) + part
        old = [self._random.choice(self.old).part_of(part, self._random) for _ in range(missing // part) if self.old]
        for document in new:
            self._keep(document)
        return new, old

    def _keep(self, document: Document) -> None:
        """Offer a document to the old ones. Without room for it, one of them all is dropped at random, maybe this one:
        of documents of one size, each has the same chance to stay."""
        self._came += 1
        has_room = self.nbytes + document.nbytes <= self.most_bytes
        if has_room or self._random.random() < (len(self.old) + 1) / self._came:
            self.old.append(document.kept())
            self.nbytes += document.nbytes
            while self.nbytes > self.most_bytes:
                self.nbytes -= self.old.pop(self._random.randrange(len(self.old))).nbytes

    def forget(self) -> None:
        """Drop all documents: the target has changed, so its earlier states are wrong."""
        self.new.clear()
        self.old.clear()
        self._came = self.nbytes = 0


__all__ = ["CallListener", "Document", "Lessons"]
