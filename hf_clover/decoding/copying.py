"""What followed the last few tokens where they stood in the text before, as drafts beside the heads'.

Contract: `Copies` knows the rows' texts on the host, since every walk brings its tokens there. Where the last `RUN`
tokens of a row stood before, what followed them is a path of drafts, which goes into the heads' tree with the
probability that such tokens were right so far in this call: the best nodes of both are verified, as many as there were
to be. Where the heads are not needed, the path is verified by itself. What is copied costs the heads nothing and may
go on for longer than they draft. Where the run is new to its own text, it is looked up in a `TextMemory`, if the heads
have one.

Shapes: B batch, k copied tokens at most.
"""

import math
import threading
from collections import deque
from collections.abc import Sequence
from itertools import cycle, islice

import torch

RUN = 2  # tokens that must stand in the same order in the row's own text
RUN_ELSEWHERE = 3  # likewise in another text, where what followed two says less
HOPE, STEADY = 0.6, 4.0  # chance of the first copied token, and how many tokens that counts for
KEEP = 0.95  # of what was right, from step to step
SURE = 0.98  # at most, of the next copied token


Run = tuple[int, ...]


def agreeing(guess: Sequence[int], tokens: Sequence[int]) -> int:
    """How many tokens the two begin with alike."""
    shorter = min(len(guess), len(tokens))
    return next((place for place in range(shorter) if guess[place] != tokens[place]), shorter)


class TextMemory:
    """The last texts that heads drafted for, prompts and all, to copy from in later calls.

    `heads.text_memory = TextMemory(100_000)`: whoever shares the heads shares these texts. Only drafts come from them,
    so no token depends on what others wrote; how long a call takes may.

    Args:
        most_tokens: of all texts together. The oldest make room for a new one.
    """

    def __init__(self, most_tokens: int) -> None:
        if isinstance(most_tokens, bool) or not isinstance(most_tokens, int) or most_tokens < 1:
            raise ValueError(f"`most_tokens={most_tokens!r}` must be a positive integer: the tokens to remember.")
        self.most_tokens = most_tokens
        self._texts: deque[list[int]] = deque()
        self._ends: dict[Run, tuple[list[int], int]] = {}  # a run -> the last text that has it, and where it ends
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """The tokens that are remembered."""
        return sum(map(len, self._texts))

    def add(self, text: Sequence[int]) -> None:
        text = list(text[-self.most_tokens :])
        with self._lock:
            for known in [known for known in self._texts if text[: len(known)] == known]:  # a turn before this one
                self._forget(known)
            self._texts.append(text)
            for end in range(RUN_ELSEWHERE, len(text)):  # what ends the text is followed by nothing
                self._ends[tuple(text[end - RUN_ELSEWHERE : end])] = text, end
            while len(self) > self.most_tokens:
                self._forget(self._texts[0])

    def _forget(self, text: list[int]) -> None:
        self._texts = deque(known for known in self._texts if known is not text)
        for end in range(RUN_ELSEWHERE, len(text)):
            run = tuple(text[end - RUN_ELSEWHERE : end])
            if self._ends.get(run, (None, 0))[0] is text:
                del self._ends[run]

    def after(self, run: Run, most: int) -> list[int]:
        """What followed `run` where it stood last, `most` tokens of it."""
        text, end = self._ends.get(run, ((), 0))
        return list(text[end : end + most])


class Copies:
    def __init__(self, texts: Sequence[Sequence[int]], most: int, memory: TextMemory | None = None) -> None:
        """`most`: tokens copied at once. `memory`: of other texts."""
        self.most, self.memory = most, memory
        self.texts: list[list[int]] = [[] for _ in texts]
        self.ends: list[dict[Run, int]] = [{} for _ in texts]  # a run -> where the last one ended
        self.guesses: list[list[int]] = [[] for _ in texts]
        self.right = self.tried = 0.0
        for row, text in enumerate(texts):
            self._append(row, text)

    @property
    def chance(self) -> float:
        """Of a copied token, where those before it were right."""
        return min((self.right + HOPE * STEADY) / (self.tried + STEADY), SURE)

    def take_in(self, new: Sequence[Sequence[int]]) -> None:
        """The tokens that each row was given since."""
        self.right, self.tried = KEEP * self.right, KEEP * self.tried
        for row, tokens in enumerate(new):
            if tokens:
                guess = self.guesses[row]
                right = agreeing(guess, tokens)
                was_wrong = right < min(len(guess), len(tokens))
                self.right, self.tried = self.right + right, self.tried + right + was_wrong
                self._append(row, tokens)

    def _append(self, row: int, tokens: Sequence[int]) -> None:
        text, ends = self.texts[row], self.ends[row]
        start = max(len(text), RUN)
        text.extend(tokens)
        for end in range(start, len(text)):
            ends[tuple(text[end - RUN : end])] = end
        end = ends.get(tuple(text[-RUN:]))
        if end is not None:
            self.guesses[row] = list(islice(cycle(text[end : end + self.most]), self.most))  # on into the copy itself
        elif self.memory is not None:
            self.guesses[row] = self.memory.after(tuple(text[-RUN_ELSEWHERE:]), self.most)
        else:
            self.guesses[row] = []

    def remember(self) -> None:
        """The texts are over: they go into the memory."""
        if self.memory is not None:
            for text in self.texts:
                self.memory.add(text)

    def paths(self, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """What is copied for `rows`: tokens and joint log-probabilities, [B, k] each, -inf from where a path ends."""
        guesses = [self.guesses[row] for row in rows]
        longest, step = max(map(len, guesses)), math.log(self.chance)
        tokens = [[*guess, *[0] * (longest - len(guess))] for guess in guesses]
        joint = [[(i + 1) * step if i < len(guess) else -math.inf for i in range(longest)] for guess in guesses]
        return torch.tensor(tokens), torch.tensor(joint)
