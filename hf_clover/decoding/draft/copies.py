"""What followed the last few tokens where they stood in the text before, as drafts beside the heads'.

Contract: `Copies` knows the rows' texts on the host, since every walk brings its tokens there. Where the last tokens
of a row, two or more, stood before, what followed them is a path of drafts, which goes into the heads' tree with the
probability that such tokens are right, by how many stood before and by how copies did so far in this call: the best
nodes of both are verified, as many as there were to be. Where the heads are not needed, the path is verified by
itself. What is copied costs the heads nothing and may go on for longer than they draft. Where the last tokens are new
to their own text, they are looked up in a `TextMemory`, if the heads have one.

Shapes: B batch, k copied tokens at most.
"""

import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, cycle, islice

import torch

RUNS = {2: 0.45, 3: 0.6, 5: 0.8}  # tokens in the same order in the row's own text -> chance of the one copied next
RUNS_ELSEWHERE = {2: 0.24, 4: 0.44}  # likewise in another text
STEADY = 4.0  # tokens that these chances count for, beside those that were right or wrong
KEEP = 0.95  # of what was right, from step to step
SURE = 0.98  # at most, of the next copied token


Run = tuple[int, ...]


def agreeing(guess: Sequence[int], tokens: Sequence[int]) -> int:
    """How many tokens the two begin with alike."""
    shorter = min(len(guess), len(tokens))
    return next((place for place in range(shorter) if guess[place] != tokens[place]), shorter)


class TextMemory:
    """
    The last texts that heads drafted for, prompts and all, to copy from in later calls.

    Whoever shares the heads shares these texts. Only drafts come from them, so no token depends on what others wrote;
    how long a call takes may.

    Args:
        most_tokens (`int`):
            Of all texts together. The oldest make room for a new one.

    Example:

    ```python
    >>> from hf_clover import TextMemory
    >>> from transformers import AutoModel

    >>> heads = AutoModel.from_pretrained("org/clover-heads")
    >>> heads.text_memory = TextMemory(100_000)
    >>> len(heads.text_memory)  # tokens that are remembered
    0
    ```
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
        """Remember a text; `generate` does it by itself.

        Args:
            text (`Sequence[int]`):
                Its tokens.
        """
        text = list(text[-self.most_tokens :])
        with self._lock:
            for known in [known for known in self._texts if text[: len(known)] == known]:  # a turn before this one
                self._forget(known)
            self._texts.append(text)
            for run, end in _runs_of(text):
                self._ends[run] = text, end
            while len(self) > self.most_tokens:
                self._forget(self._texts[0])

    def _forget(self, text: list[int]) -> None:
        self._texts = deque(known for known in self._texts if known is not text)
        for run, _ in _runs_of(text):
            if self._ends.get(run, (None, 0))[0] is text:
                del self._ends[run]

    def after(self, text: Sequence[int], most: int) -> tuple[list[int], float]:
        """Up to `most` tokens that followed the last tokens of `text` in another text, and the chance of each."""
        for length, chance in sorted(RUNS_ELSEWHERE.items(), reverse=True):
            known = self._ends.get(tuple(text[-length:]))
            if known is not None:
                other, end = known
                return other[end : end + most], chance
        return [], 0.0


def _runs_of(text: Sequence[int]) -> Iterator[tuple[Run, int]]:
    """Each run that a memory finds again, and where it ends. What ends the text is followed by nothing."""
    for length in RUNS_ELSEWHERE:
        for end in range(length, len(text)):
            yield tuple(text[end - length : end]), end


class Copies:
    def __init__(self, texts: Sequence[Sequence[int]], most: int, memory: TextMemory | None = None) -> None:
        """`most`: tokens copied at once. `memory`: of other texts."""
        self.most, self.memory = most, memory
        self.texts: list[list[int]] = [[] for _ in texts]
        self.ends: list[dict[Run, int]] = [{} for _ in texts]  # a run -> where the last one ended
        self.guesses: list[list[int]] = [[] for _ in texts]
        self.hopes: list[list[float]] = [[] for _ in texts]  # the chance of each of them, as it is in most texts
        lengths = range(min(RUNS), max(RUNS) + most)
        self.chances = [RUNS[max(run for run in RUNS if run <= behind)] for behind in lengths]  # from 2 tokens on
        self.right = self.promised = 0.0
        for row, text in enumerate(texts):
            self._append(row, text)

    def chance(self, hope: float) -> float:
        """Of a copied token, where those before it were right: as copies did in this call beside what was hoped."""
        return min(hope * (self.right + STEADY) / (self.promised + STEADY), SURE)

    def extend(self, new: Sequence[Sequence[int]]) -> None:
        """The tokens that each row was given since."""
        self.right, self.promised = KEEP * self.right, KEEP * self.promised
        for row, tokens in enumerate(new):
            if tokens:
                guess = self.guesses[row]
                right = agreeing(guess, tokens)
                was_wrong = right < min(len(guess), len(tokens))
                self.right += right
                self.promised += sum(self.hopes[row][: right + was_wrong])
                self._append(row, tokens)

    def _append(self, row: int, tokens: Sequence[int]) -> None:
        text, ends = self.texts[row], self.ends[row]
        start = max(len(text), min(RUNS))
        text.extend(tokens)
        for end in range(start, len(text)):
            for run in RUNS:
                ends[tuple(text[max(end - run, 0) : end])] = end
        for run in sorted(RUNS, reverse=True):
            known = ends.get(tuple(text[-run:]))
            if known is not None:
                self.guesses[row] = list(islice(cycle(text[known : known + self.most]), self.most))  # on into the copy
                self.hopes[row] = self.chances[run - min(RUNS) :][: self.most]
                return
        guess, hope = ([], 0.0) if self.memory is None else self.memory.after(text, self.most)
        self.guesses[row], self.hopes[row] = guess, [hope] * len(guess)

    def remember(self) -> None:
        """The texts are over: they go into the memory."""
        if self.memory is not None:
            for text in self.texts:
                self.memory.add(text)

    def paths(self, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """What is copied for `rows`: tokens and joint log-probabilities, [B, k] each, -inf from where a path ends."""
        guesses = [self.guesses[row] for row in rows]
        longest = max(map(len, guesses))
        joint = [list(accumulate(math.log(self.chance(hope)) for hope in self.hopes[row])) for row in rows]
        tokens = [[*guess, *[0] * (longest - len(guess))] for guess in guesses]
        joint = [[*each, *[-math.inf] * (longest - len(each))] for each in joint]
        return torch.tensor(tokens), torch.tensor(joint, dtype=torch.float32)
