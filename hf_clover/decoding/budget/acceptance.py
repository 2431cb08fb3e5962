"""What drafts are worth, as verified trees show it.

Shapes: B rows, N draft nodes.
"""

import math
from collections.abc import Sequence

import torch

from .settings import SETTINGS


class Acceptance:
    """What a joint probability is worth: by halves (1 to 1/2, 1/2 to 1/4, ...), how many nodes the target accepted
    against how many were promised, forgetting slowly. And all of it together: heads that know nothing may be as sure
    of themselves as others, and a few first drafts tell one from the other before each half has been seen."""

    BINS = 12

    def __init__(self) -> None:
        self.promised, self.kept = torch.zeros(2, self.BINS, dtype=torch.float32)
        self.tokens: dict[int, float] = {}  # that a row's step over so many nodes gives, on average
        self.trees: dict[int, int] = {}  # that the average is of
        self.odds = SETTINGS.first_odds

    def bins(self, log_probs: torch.Tensor) -> torch.Tensor:
        return (log_probs * -1.4427).clamp(0, self.BINS - 1).long()  # of base 2

    def expected(self, log_probs: torch.Tensor) -> torch.Tensor:
        """[B, N] -> the probability that each node is accepted."""
        factor = (self.kept + 1) / (self.promised + 1)  # [bins]
        factor *= min((1 + math.exp(-SETTINGS.first_odds)) / (1 + math.exp(-self.odds)), 1.0)
        return (log_probs.exp() * factor[self.bins(log_probs)]).clamp(max=1.0)

    def forget(self) -> None:
        """A part of the doubt in the heads: what is not verified teaches nothing, so they get another chance."""
        self.odds += max(SETTINGS.first_odds - self.odds, 0.0) / 4

    def learn(self, log_probs: torch.Tensor, paths: Sequence[Sequence[int]]) -> None:
        """log_probs [B, N] of the rows that walked `paths`."""
        bins = self.bins(log_probs)
        rows = [row for row, path in enumerate(paths) for _ in path[1:]]
        nodes = [node - 1 for path in paths for node in path[1:]]
        self.promised = SETTINGS.forgetting * self.promised
        self.promised += torch.bincount(bins.flatten(), log_probs.exp().flatten(), self.BINS)
        self.kept = SETTINGS.forgetting * self.kept + torch.bincount(bins[rows, nodes], minlength=self.BINS)
        for promise, path in zip(log_probs[:, 0].exp().clamp(max=0.6).tolist(), paths, strict=True):
            if promise > SETTINGS.luck:  # of the likeliest first draft; nobody is believed to be surer than 0.6
                is_right = len(path) > 1 and path[1] == 1
                self.odds += math.log(promise / SETTINGS.luck if is_right else (1 - promise) / (1 - SETTINGS.luck))
        self.odds = min(max(self.odds, -SETTINGS.most_odds), SETTINGS.most_odds)

    def learn_sizes(self, sizes: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """What the first `sizes` nodes of a tree would have given, of which rows walked `paths`."""
        for size in sizes:
            seen = sum(1 + sum(node <= size for node in path[1:]) for path in paths) / len(paths)
            count = self.trees[size] = self.trees.get(size, 0) + 1
            known = self.tokens.get(size, 1.0)
            self.tokens[size] = known + max(SETTINGS.newest_tree, 1 / count) * (seen - known)

    def given_by(self, sizes: Sequence[int]) -> list[float]:
        """Tokens of a step over each of `sizes` nodes, 0 first; larger trees than were seen gain no more."""
        known, best = [], 1.0
        for size in sizes:
            best = max(best, self.tokens.get(size, best))
            known.append(best)
        return known
