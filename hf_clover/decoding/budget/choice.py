"""Which size gives the most tokens per second.

Contract: pure functions. They know chances and costs, and nothing of where these come from.

Shapes: rows, N draft nodes.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

from .settings import SETTINGS


def choose(gains: Sequence[float], costs: Sequence[float]) -> int:
    """The place of the size with the most tokens per plain step; the first of those that are about as good."""
    rates = [gain / cost for gain, cost in zip(gains, costs, strict=True)]
    return next(place for place, rate in enumerate(rates) if rate >= SETTINGS.about_as_good * max(rates))


def gains_of(chances: torch.Tensor, lengths: Sequence[int]) -> list[float]:
    """Tokens of a step over the first 0, 1, ... nodes, which are accepted with these `chances` [rows, N].

    A batch is over with its last row, and every row that ends makes the steps of the others cheaper. So the rows
    furthest behind count as much as all rows do."""
    shortest = min(lengths)
    last = [place for place, length in enumerate(lengths) if length == shortest]
    gains = (chances.mean(0) + chances[last].mean(0)) / 2  # [N]
    gains *= 1 - SETTINGS.uneven * (1 - 1 / len(lengths))
    return list(accumulate(gains.tolist(), initial=1.0))
