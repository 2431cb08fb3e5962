"""What heads can learn from a call of `generate`, kept for a while.

Contract: a `CallListener` hears one call, and gives at its end a `Document` for each row: the target's states and the
token after each. `Lessons` holds the newest documents until they are learned from, and of all that came before a
random part within a limit of bytes, drawn so that each of them had the same chance to stay (a reservoir), whatever
kind of text came later. Nothing here reaches a disk. This module does not know losses, optimizers or threads.

Shapes: N positions of a document, f numbers of a state, B batch, m new positions at most.
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

SHORTEST = 4  # positions: of three there is one prediction, and nothing before it
LONGEST = 2048  # positions that heads look at together, as in training
SHARE_OF_OLD = 0.25  # of the tokens of a step


@dataclass(frozen=True)
class Document:
    """One text, as far as it has come."""

    states: torch.Tensor  # [N, f] bfloat16
    next_tokens: torch.Tensor  # [N]
    known: int = 0  # of its first positions: they were learned from in an earlier turn

    def __len__(self) -> int:
        return len(self.next_tokens)

    @property
    def new(self) -> int:
        """Positions to learn from."""
        return len(self) - self.known

    @property
    def nbytes(self) -> int:
        return self.states.nbytes + self.next_tokens.nbytes

    def continued(self, later: "Document") -> "Document":
        """This one with its next turn behind it."""
        states, tokens = (self.states, later.states), (self.next_tokens, later.next_tokens)
        return Document(torch.cat(states), torch.cat(tokens), known=len(self))

    def pieces(self) -> list["Document"]:
        """What is to be learned, in pieces of at most `LONGEST` positions; before the first new one stands what fits
        of the known ones."""
        start = max(self.known - max(LONGEST - self.new, 0), 0)
        parts = []
        for begin in range(start, len(self), LONGEST):
            end = min(begin + LONGEST, len(self))
            part = Document(self.states[begin:end], self.next_tokens[begin:end], max(self.known - begin, 0))
            if part.new >= SHORTEST:
                parts.append(part)
        return parts

    def part_of(self, length: int, chance: random.Random) -> "Document":
        """So many positions in a row, from anywhere."""
        begin = chance.randrange(max(len(self) - length, 0) + 1)
        return Document(self.states[begin : begin + length], self.next_tokens[begin : begin + length])

    def kept(self) -> "Document":
        """In memory of its own, on the CPU, all of it to be learned again."""
        return Document(self.states.to("cpu", copy=True), self.next_tokens.to("cpu", copy=True))


class CallListener:
    """Hears one call of `generate`: copies of what is walked, and nothing that waits for a device."""

    def __init__(
        self,
        run: "Run",
        turns: "WeakKeyDictionary[Cache, tuple[int, list[Document]]]",
        at_end: Callable[[list[Document], "Speculation"], None],
    ) -> None:
        """`turns`: the texts of conversations, by the cache that their next turn comes with; `at_end` gets the
        documents of the call."""
        known = turns.get(run.theirs) if run.known_columns else None
        # An earlier turn may not have been heard, and the user may have cut the cache since.
        self._before = [] if known is None or known[0] != run.known_columns else known[1]
        self._turns, self._at_end = turns, at_end
        self._prompt_mask = run.prompt_mask  # [B, T] bool
        self._parts: list[tuple[torch.Tensor, torch.Tensor, Sequence[int], Sequence[int]]] = []
        self._documents: list[Document] | None = None

    def hear(
        self, hidden: torch.Tensor, next_tokens: torch.Tensor, counts: Sequence[int], rows: Sequence[int]
    ) -> None:
        # Copies: in a graph the next step writes over both.
        self._parts.append((hidden.to(torch.bfloat16, copy=True), next_tokens.clone(), list(counts), list(rows)))

    def documents(self) -> list[Document]:
        """Of each row of the call."""
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
    """Documents to learn from: new ones, and a random part of the old ones again."""

    def __init__(self, most_bytes: int, most_new: int) -> None:
        """`most_bytes`: of the old ones; `most_new`: tokens of the new ones that wait to be learned from."""
        self.most_bytes, self.most_new = most_bytes, most_new
        self.new: deque[Document] = deque()
        self.old: list[Document] = []
        self._came = 0  # documents that were to become old ones, whether or not they are still there
        self._random = random.Random(0)  # of its own: sampling goes on as if nobody learned

    @property
    def nbytes(self) -> int:
        """Of the old documents."""
        return sum(document.nbytes for document in self.old)

    @property
    def waiting(self) -> int:
        """Tokens of the new documents."""
        return sum(document.new for document in self.new)

    def add(self, documents: Iterable[Document]) -> None:
        self.new.extend(piece for document in documents for piece in document.pieces())
        while len(self.new) > 1 and self.waiting > self.most_new:  # more comes than is learned
            self._keep(self.new.popleft())

    def take(self, tokens: int) -> tuple[list[Document], list[Document]]:
        """For a step of about so many tokens, new documents and parts of old ones: a share at least, and more where
        there is little new."""
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
        """One more for the old ones."""
        self._came += 1
        if self.nbytes + document.nbytes <= self.most_bytes:
            self.old.append(document.kept())
        elif self._random.random() < len(self.old) / self._came:
            self.old[self._random.randrange(len(self.old))] = document.kept()
            while self.nbytes > self.most_bytes:
                self.old.pop(self._random.randrange(len(self.old)))

    def forget(self) -> None:
        """The target is another now, and what it said before is wrong."""
        self.new.clear()
        self.old.clear()
        self._came = 0


__all__ = ["CallListener", "Document", "Lessons"]
