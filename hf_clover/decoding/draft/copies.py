"""Drafts copied from the text: the tokens that followed an earlier occurrence of the last few tokens.

Contract: `Copies` reads the rows' texts on the host, to which every walk adds its tokens. If the last tokens of a row,
two or more, occurred before, the tokens that followed them are a path of drafts. The path is added to the heads' tree,
with the probability that its tokens are right. That probability depends on how many tokens match, and on how often
copies were right so far in this call. The best nodes of both are verified, as many as the tree was to have. Where the
heads are not needed, the path is verified alone. A copy costs the heads nothing and may be longer than their drafts.
If the last tokens are new to their own text, they are looked up in a `TextMemory`, if the heads have one.

Shapes: B batch, k copied tokens at most.
"""

import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, cycle, islice

import torch

RUNS = {2: 0.45, 3: 0.6, 5: 0.8}  # matching tokens in the row's own text -> chance that the next copied one is right
RUNS_ELSEWHERE = {2: 0.24, 4: 0.44}  # the same for another text
STEADY = 4.0  # weight of these chances, in tokens, beside the tokens that were right or wrong
KEEP = 0.95  # factor per step on the counts of right and expected tokens
SURE = 0.98  # highest chance of a copied token


Run = tuple[int, ...]
Path = tuple[list[int], list[float]]  # tokens that may follow a text, and their joint log-probabilities


def agreeing(guess: Sequence[int], tokens: Sequence[int]) -> int:
    """How many tokens at their beginnings are the same in both."""
    shorter = min(len(guess), len(tokens))
    return next((place for place in range(shorter) if guess[place] != tokens[place]), shorter)


class TextMemory:
    """
    The last texts that heads drafted for, prompts and all, to copy from in later calls.

    All users of the heads share these texts. They are used for drafts only, so no token depends on what others wrote.
    The time that a call takes may depend on it.

    Args:
        most_tokens (`int`):
            Tokens of all texts together. The oldest texts make room for a new one.

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
    """Each run that a memory can find, and the place after it. Runs at the text's end are left out: nothing follows
    them."""
    for length in RUNS_ELSEWHERE:
        for end in range(length, len(text)):
            yield tuple(text[end - length : end]), end


class Copies:
    def __init__(self, texts: Sequence[Sequence[int]], most: int, memory: TextMemory | None = None) -> None:
        """`texts`: lists that their owner appends to; `most`: tokens copied at once; `memory`: holds other texts."""
        self.texts, self.most, self.memory = texts, most, memory
        self.seen = [0] * len(texts)  # tokens
        self.ends: list[dict[Run, int]] = [{} for _ in texts]  # a run -> where the last one ended
        self.guesses: list[list[int]] = [[] for _ in texts]
        self.hopes: list[list[float]] = [[] for _ in texts]  # the chance of each guessed token, as in most texts
        lengths = range(min(RUNS), max(RUNS) + most)
        self.chances = [RUNS[max(run for run in RUNS if run <= behind)] for behind in lengths]  # from 2 tokens on
        self.right = self.promised = 0.0
        for row in range(len(texts)):
            self._guess(row)

    def chance(self, hope: float) -> float:
        """The chance of a copied token if those before it are right: `hope`, times how copies did in this call
        compared with what was hoped."""
        return min(hope * (self.right + STEADY) / (self.promised + STEADY), SURE)

    def extend(self) -> None:
        """Take in the tokens that each row got since the last call."""
        self.right, self.promised = KEEP * self.right, KEEP * self.promised
        for row, text in enumerate(self.texts):
            tokens, guess = text[self.seen[row] :], self.guesses[row]
            if tokens:
                right = agreeing(guess, tokens)
                was_wrong = right < min(len(guess), len(tokens))
                self.right += right
                self.promised += sum(self.hopes[row][: right + was_wrong])
                self._guess(row)

    def _guess(self, row: int) -> None:
        text, ends = self.texts[row], self.ends[row]
        start, self.seen[row] = max(self.seen[row], min(RUNS)), len(text)
        for end in range(start, len(text)):
            for run in RUNS:
                ends[tuple(text[max(end - run, 0) : end])] = end
        for run in sorted(RUNS, reverse=True):
            known = ends.get(tuple(text[-run:]))
            if known is not None:
                self.guesses[row] = list(islice(cycle(text[known : known + self.most]), self.most))  # may repeat
                self.hopes[row] = self.chances[run - min(RUNS) :][: self.most]
                return
        guess, hope = ([], 0.0) if self.memory is None else self.memory.after(text, self.most)
        self.guesses[row], self.hopes[row] = guess, [hope] * len(guess)

    def remember(self) -> None:
        """The texts are over: add them to the memory."""
        if self.memory is not None:
            for text in self.texts:
                self.memory.add(text)

    def paths(self, rows: Sequence[int]) -> list[Path]:
        """The copied path of each of `rows`."""
        joint = [list(accumulate(math.log(self.chance(hope)) for hope in self.hopes[row])) for row in rows]
        return list(zip((self.guesses[row] for row in rows), joint, strict=True))


def path_tensors(paths: Sequence[Path]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and joint log-probabilities, [B, k] each, with -inf behind a path's end."""
    longest = max(len(tokens) for tokens, _ in paths)
    tokens = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens, _ in paths])
    joint = [[*joint, *[-math.inf] * (longest - len(joint))] for _, joint in paths]
    return tokens, torch.tensor(joint, dtype=torch.float32)
