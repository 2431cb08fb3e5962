"""A slice of `soak.py`, and that it can fail, stop and go on."""

import json

import pytest
import soak
import torch
from helpers.capturing import captures  # noqa: F401  (a fixture)

from hf_clover.decoding import route as route_module
from hf_clover.decoding.cache.by_row import TreeCache

pytestmark = pytest.mark.long("hf_clover/decoding")


@pytest.mark.automatic
def test_random_cases_find_no_fault(request):
    """As many as twelve seconds hold, or a minute with `--all`: `python tests/soak.py` runs for longer."""
    state = soak.State(seed=500_000)
    for case, outcome in soak.soak(state, minutes=1 if request.config.option.all else 0.2, count=400):
        assert outcome.error is None, f"`python tests/soak.py --case {case.seed}` repeats {case}"
    assert state.accepted_tokens > state.cases / 2, "a test that accepts nothing proves nothing"
    assert state.methods["tree"] > state.cases / 2


@pytest.mark.automatic
def test_random_cases_in_graphs_find_no_fault(captures, request):  # noqa: F811
    state = soak.State(seed=600_000)
    for case, outcome in soak.soak(state, minutes=0.5, count=40 if request.config.option.all else 20):
        assert outcome.error is None, f"`python tests/soak.py --graphs --case {case.seed}` repeats {case}"
    assert state.accepted_tokens > state.cases / 2
    assert captures.replayed > captures.made > 0


def some(monkeypatch, count=24):
    """Cases of one target, greedy or sampled, with planted drafts."""
    monkeypatch.setattr(soak, "TARGETS", [("llama", "sdpa")])
    state = soak.State(seed=70)
    outcomes = list(soak.soak(state, count=count))
    return state, outcomes


def test_a_mistake_in_the_decoding_is_found(monkeypatch):
    sound, _ = some(monkeypatch)
    assert sound.failures == []
    assert sound.accepted_tokens > 10
    monkeypatch.setattr(TreeCache, "_move", lambda self, moves: None)
    monkeypatch.setattr(route_module, "_why_no_tree", lambda *args: None)  # a trial tree would notice, and fall back
    broken, outcomes = some(monkeypatch)
    assert len(broken.failures) > 2
    failed = next(case for case, outcome in outcomes if outcome.error)
    assert broken.failures[0]["repeat"] == f"python tests/soak.py --case {failed.seed}"
    assert "instead of" in soak.run(soak.draw(failed.seed)).error, "the same case, from its number alone"


def test_a_call_that_uses_more_random_numbers_is_found(monkeypatch):
    """Greedy tokens would hide it."""
    generate = soak.target_of("llama", "sdpa", "float64", None).generate

    def one_more(*args, **kwargs):
        result = generate(*args, **kwargs)
        if "assistant_model" in kwargs:
            torch.rand(1)
        return result

    monkeypatch.setattr(soak.target_of("llama", "sdpa", "float64", None), "generate", one_more)
    state, _ = some(monkeypatch)
    assert any("other random numbers" in failure["error"] for failure in state.failures)


def test_a_case_follows_from_its_number_and_every_kind_occurs():
    assert [soak.draw(seed) for seed in range(50)] == [soak.draw(seed) for seed in range(50)]
    kinds = {kind for seed in range(2000) for kind in soak.draw(seed).kinds}
    usual = ("dtype float16", "cache users static", "rows 5", "tree levels", "turns 3", "streamer", "sampled")
    around = ("token types", "own inputs column", "default dtype bfloat16", "autocast float16", "heads dtype float16")
    caches = ("cache users without config", "records", "rows repeated", "rows selected", "poison", "variant eagle-3")
    assert kinds.issuperset((*usual, *around, *caches))


def test_the_soak_goes_on_where_it_was(monkeypatch, tmp_path):
    path = tmp_path / "soak.json"
    first, _ = some(monkeypatch, count=2)
    first.write(path)
    again = soak.State.read(path, seed=0)
    assert again == first
    list(soak.soak(again, count=1))
    assert (again.seed, again.cases) == (73, 3)
    assert again.new_tokens > first.new_tokens
    assert json.loads(path.read_text())["cases"] == 2
    assert soak.State.read(None, seed=5) == soak.State(seed=5)
