"""Offline, on the CPU, deterministic: every test sees the same machine."""

import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch

import hf_clover  # noqa: F401  (installs the hook)
from hf_clover.decoding import loop
from hf_clover.decoding.budget import FixedBudget, check_nodes

# A shell starts what runs in its background with Ctrl-C ignored, and programs started here would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _deterministic():
    torch.set_num_threads(1)
    torch.manual_seed(0)


class PinnedBudget(FixedBudget):
    """In the automatic budget's place: what that chooses depends on the time that steps take."""

    def ask(self, rows: int, context: int) -> int:
        return min(max(4, 24 // rows), self.nodes)


@pytest.fixture(autouse=True, scope="module")
def _seeded_module():
    """What a module shares begins with random weights, too: the same ones whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _pinned_budget(request, monkeypatch):
    """Every test sees the same trees, unless it is marked `automatic`."""
    if request.node.get_closest_marker("automatic"):
        return
    make_budget = loop.make_budget

    def pinned(asked, is_ceiling, target, heads, mode=None, picking=None, room=None):
        if asked is None:
            return PinnedBudget(24 if room is None else max(0, min(24, room)))
        if is_ceiling:
            return PinnedBudget(min(24, check_nodes(asked, room)))
        return make_budget(asked, is_ceiling, target, heads, mode, picking, room)

    monkeypatch.setattr(loop, "make_budget", pinned)
