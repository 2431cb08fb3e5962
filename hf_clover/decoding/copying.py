"""What followed the last few tokens where they stood in the text before, as drafts beside the heads'.

Contract: `Copies` knows the rows' texts on the host, since every walk brings its tokens there. Where the last `RUN`
tokens of a row stood before, what followed them is a path of drafts, which goes into the heads' tree with the
probability that such tokens were right so far in this call: the best nodes of both are verified, as many as there were
to be. What is copied costs the heads nothing and may go on for longer than they draft.

Shapes: B batch, k copied tokens at most.
"""

import math
from collections.abc import Sequence

import torch

from .tree import Tree, with_path

RUN = 3  # tokens that must stand in the same order
FORGET = 0.9  # of what was right, from step to step
SURE = 0.98  # at most, of the next copied token


class Copies:
    def __init__(self, texts: Sequence[Sequence[int]], most: int) -> None:
        """`most`: tokens copied at once."""
        self.most = most
        self.texts: list[list[int]] = [[] for _ in texts]
        self.ends: list[dict[tuple[int, ...], int]] = [{} for _ in texts]  # a run -> where the last one ended
        self.guesses: list[list[int]] = [[] for _ in texts]
        self.right = self.tried = 0.0
        for row, text in enumerate(texts):
            self._append(row, text)

    @property
    def chance(self) -> float:
        """Of a copied token, where those before it were right."""
        return min((self.right + 1) / (self.tried + 2), SURE)

    def take_in(self, new: Sequence[Sequence[int]]) -> None:
        """The tokens that each row was given since."""
        self.right, self.tried = FORGET * self.right, FORGET * self.tried
        for row, tokens in enumerate(new):
            if tokens:
                guess = self.guesses[row]
                right = next((i for i, pair in enumerate(zip(guess, tokens)) if pair[0] != pair[1]), None)
                was_wrong = right is not None
                right = min(len(guess), len(tokens)) if right is None else right
                self.right, self.tried = self.right + right, self.tried + right + was_wrong
                self._append(row, tokens)

    def _append(self, row: int, tokens: Sequence[int]) -> None:
        text, ends = self.texts[row], self.ends[row]
        start = max(len(text), RUN)
        text.extend(tokens)
        for end in range(start, len(text)):
            ends[tuple(text[end - RUN : end])] = end
        found = ends.get(tuple(text[-RUN:]))
        self.guesses[row] = [] if found is None else text[found : found + self.most]

    def added_to(self, tree: Tree, rows: Sequence[int]) -> Tree:
        """The best nodes of `tree`, whose rows are these, and of what is copied; as many as it had."""
        guesses = [self.guesses[row] for row in rows]
        longest = max(map(len, guesses))
        if longest == 0 or tree.size == 1:
            return tree
        step = math.log(self.chance)
        tokens = [[*guess, *[-1] * (longest - len(guess))] for guess in guesses]
        joint = [[(i + 1) * step if i < len(guess) else -math.inf for i in range(longest)] for guess in guesses]
        device = tree.tokens.device
        return with_path(tree, torch.tensor(tokens, device=device), torch.tensor(joint, device=device))
