"""Kernels and waits of a step, counted: what a GPU with an eager target is bound by."""

import importlib
from pathlib import Path

import pytest
import torch

from hf_clover import CloverHeads

LAYERS, ONE_WAIT = 36, {"walk": 1}


@pytest.fixture
def launches(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "examples" / "experiments"))
    return importlib.import_module("launches")


def test_what_is_counted(launches, monkeypatch):
    monkeypatch.setattr(launches, "COUNTED", range(1))
    module = torch.nn.Linear(2, 2)
    with launches.counting(module) as seen:
        numbers = torch.ones(3)  # before the first step
        module(numbers[:2])
        numbers.view(3, 1)
        found = [numbers.tolist(), numbers.cpu(), numbers.to("cpu"), numbers.to(torch.device("cpu")), bool(numbers[0])]
    assert len(found) == 5
    assert seen.operators == {("other", "addmm"): 1, ("other", "read back"): 3, ("other", "_local_scalar_dense"): 1}
    assert seen.waits["other"] == 4


@pytest.mark.parametrize("variant", ["clover-x", "clover-2", "medusa"])
def test_a_step_launches_little_beside_the_draft_and_waits_once(launches, variant):
    target = launches.toy_target(LAYERS)
    plain = launches.launches_of(target)
    found = launches.launches_of(target, CloverHeads.from_target(target, variant).eval())
    assert found["waits"] == ONE_WAIT
    assert plain["all_waits"] == 1
    beside = found["all_kernels"] - found["kernels"]["draft"]
    assert plain["all_kernels"] < beside <= 1.12 * plain["all_kernels"]
    assert found["kernels"]["masks"] <= 20


@pytest.mark.parametrize("variant", ["clover-x", "medusa"])
def test_a_draft_in_a_graph_is_few_launches(launches, variant):
    target = launches.toy_target(2)
    heads = CloverHeads.from_target(target, variant).eval()
    eager = launches.launches_of(target, heads)
    found = launches.launches_of(target, heads, in_a_graph=True)
    assert found["waits"] == ONE_WAIT
    assert found["operators"]["draft graph"] == 1
    assert found["kernels"]["draft"] <= 30 < eager["kernels"]["draft"] / 3


@pytest.mark.parametrize("batch_size", [1, 4])
def test_beside_a_static_cache_a_step_is_two_graphs_and_little_else(launches, batch_size):
    target = launches.toy_target(2)
    heads = CloverHeads.from_target(target).eval()
    found = launches.launches_of(target, heads, batch_size, "static")
    assert found["operators"]["verify graph"] == found["operators"]["draft graph"] == 1
    assert found["waits"] == ONE_WAIT
    assert found["all_kernels"] < 100, found["kernels"]
    plain = launches.launches_of(target, None, batch_size, "static")
    assert plain["operators"]["other graph"] == 1
