"""A budget that asks for the same trees on every machine."""

from collections.abc import Sequence

import pytest
import torch

from hf_clover.decoding import loop
from hf_clover.decoding.budget.fixed import Budget


class PinnedBudget(Budget):
    """In the automatic budget's place: what that chooses depends on the time that steps take."""

    def ask(self, lengths: Sequence[int], replayed: int = 0, copies: torch.Tensor | None = None) -> tuple[int, int]:
        return min(max(4, 24 // len(lengths)), self.nodes), 0


def pin(monkeypatch: pytest.MonkeyPatch) -> None:
    make_budget = loop.make_budget

    def pinned(asked, is_ceiling, target, heads, mode=None, picking=None, room=None, in_graphs=False):
        if asked is None:
            return PinnedBudget(24 if room is None else max(0, min(24, room)))
        if is_ceiling:
            return PinnedBudget(min(24, asked))
        return make_budget(asked, is_ceiling, target, heads, mode, picking, room, in_graphs)

    monkeypatch.setattr(loop, "make_budget", pinned)
