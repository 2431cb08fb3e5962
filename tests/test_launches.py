"""Kernels and waits of a step, counted: what a GPU with an eager target is bound by."""

import importlib
from pathlib import Path

import pytest
import torch

from hf_clover import CloverHeads, Eagle3Heads

LAYERS, ONE_WAIT = 36, {"walk": 1}


@pytest.fixture
def launches(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "examples" / "experiments"))
    return importlib.import_module("launches")


def test_operators_and_waits_of_a_forward_are_counted(launches, monkeypatch):
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


OF_HEADS = pytest.mark.long("hf_clover/network", "hf_clover/decoding/draft")


@pytest.mark.parametrize(
    "variant", ["clover-x", pytest.param("clover-2", marks=OF_HEADS), pytest.param("medusa", marks=OF_HEADS)]
)
def test_an_eager_step_launches_little_beside_the_draft_and_waits_once(launches, variant):
    target = launches.toy_target(LAYERS)
    plain = launches.launches_of(target)
    found = launches.launches_of(target, CloverHeads.from_target(target, variant).eval(), eager=True)
    assert found["waits"] == ONE_WAIT
    assert plain["all_waits"] == 1
    beside = found["all_kernels"] - found["kernels"]["draft"]
    assert plain["all_kernels"] < beside <= 1.12 * plain["all_kernels"]
    assert found["kernels"]["masks"] <= 20


@pytest.mark.automatic
@pytest.mark.parametrize(
    ("cache", "batch_size", "nodes", "kind"),
    [
        ("dynamic", 1, 24, CloverHeads),
        ("dynamic", 4, None, CloverHeads),
        ("static", 1, None, CloverHeads),
        ("dynamic", 1, 24, Eagle3Heads),
    ],
)
def test_a_step_in_graphs_launches_two_graphs_and_little_else(launches, batch_size, cache, nodes, kind, monkeypatch):
    """With the automatic budget too, which chooses the size of a tree before it is drafted."""
    if nodes is None:
        monkeypatch.setattr(launches, "COUNTED", range(60, 64))  # when it has tried the sizes there are
    target = launches.toy_target(4)
    heads = kind.from_target(target).eval()
    found = launches.launches_of(target, heads, batch_size, cache, nodes=nodes)
    assert {part: waits for part, waits in found["waits"].items() if part != "budget"} == ONE_WAIT
    if nodes is not None:
        assert found["operators"]["verify graph"] == found["operators"]["draft graph"] == 1
    assert found["all_kernels"] <= (45 if batch_size == 1 else 60), found["kernels"]
    plain = launches.launches_of(target, None, batch_size, "static")
    assert plain["operators"]["other graph"] == 1
