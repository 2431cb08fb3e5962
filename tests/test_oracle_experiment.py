"""examples/experiments/oracle.py: the drafts are as good as they say, and the experiment runs at its toy size."""

import importlib.util
import json
import math
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hf_clover import CloverHeads

pytestmark = pytest.mark.long("examples/experiments", "hf_clover/measure")

pytest.importorskip("matplotlib")
pytest.importorskip("trl")  # which the experiments' common parts need
EXPERIMENTS = Path(__file__).resolve().parent.parent / "examples" / "experiments"


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """By its place: the tests have a module of this name."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    spec = importlib.util.spec_from_file_location("oracle_experiment", EXPERIMENTS / "oracle.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_toy_run_leaves_consistent_figures(experiment, tmp_path):
    experiment.main(["--toy", "--output", str(tmp_path)])
    result = json.loads((tmp_path / "oracle.json").read_text(encoding="utf-8"))
    assert (result["name"], result["settings"]["toy"], result["settings"]["device"]) == ("oracle", True, "cpu")
    assert str(tmp_path) not in json.dumps(result)
    found = [(row["acceptance"], row["method"]) for row in result["rows"]]
    methods = ("plain", "2 nodes", "8 nodes", "automatic")
    assert found == [(acceptance, method) for acceptance in (0.3, 0.9) for method in methods]
    assert all(row["identical"] for row in result["rows"])
    per_forward = {(row["acceptance"], row["method"]): row["tokens_per_forward"] for row in result["rows"]}
    assert per_forward[0.9, "8 nodes"] > per_forward[0.9, "2 nodes"] > per_forward[0.3, "2 nodes"] > 1
    assert [row["acceptance"] for row in result["compared"]] == [0.3, 0.9]
    for row in result["compared"]:
        assert row["best_nodes"] in (0, 2, 8)
        assert row["automatic_over_best_speedup"] == pytest.approx(row["automatic_speedup"] / row["best_speedup"])
        assert row["best_tree_nodes"] in (2, 8)
    assert len(result["figure"]["panels"]) == 2
    assert (tmp_path / "oracle.png").read_bytes().startswith(b"\x89PNG")


def test_candidates_are_right_as_often_as_their_probabilities_say(experiment):
    text = [7] * 20000
    oracle = experiment.Oracle(text, vocab_size=50, acceptance=0.6, seed=0)
    said = [math.exp(log_prob) for log_prob in oracle.log_probs[:-1]]
    assert said[:3] == pytest.approx([0.6, 0.12, 0.024])
    for place in range(3):
        assert oracle.places.count(place) / len(text) == pytest.approx(said[place], abs=0.012)


def test_scores_rank_the_right_token_as_drawn_while_a_path_follows_the_text(experiment):
    text = [3, 5, 8, 13]
    oracle = experiment.Oracle(text, vocab_size=40, acceptance=0.6, seed=0)
    oracle.places = [10, 1, 0, 10]
    logits = oracle.score(torch.randn(1, 2, 40), torch.tensor([[5, 20]]), index=1)
    torch.testing.assert_close(logits.logsumexp(-1), torch.zeros(1, 2))  # probabilities already
    on, off = logits[0].exp()
    assert (int(on.argmax()), float(on[8])) == (8, pytest.approx(0.6))
    assert int(off.argmax()) not in text  # its path has left the text, so no candidate can be right
    assert float(off.max()) == pytest.approx(0.6)
    on = oracle.score(torch.randn(1, 1, 40), torch.tensor([[3]]), index=0)[0, 0].exp()
    assert float(on[5]) == pytest.approx(0.12)  # second among the candidates
    on = oracle.score(torch.randn(1, 1, 40), torch.tensor([[8]]), index=2)[0, 0].exp()
    assert float(on[13]) < 0.01  # not among them
    oracle.score(torch.randn(1, 1, 40), torch.tensor([[13]]), index=3)  # the text's end


def test_the_number_of_forwards_follows_from_the_drawn_ranks(experiment):
    """One drafted node: a forward gives two tokens where the first candidate is right, else one."""
    target = experiment.random_llama("toy", seed=0)
    heads = CloverHeads.from_target(target).eval()
    prompt = torch.randint(512, (1, 6))
    options = dict(max_new_tokens=30, do_sample=False)
    text = target.generate(prompt, **options)[0].tolist()
    oracle = experiment.Oracle(text, 512, acceptance=0.6, seed=3)
    heads.new_drafter = partial(experiment.OracleDrafter, oracle)
    out = target.generate(
        prompt, **options, assistant_model=heads, num_assistant_tokens=1, return_dict_in_generate=True
    )
    assert out.sequences[0].tolist() == text
    index, forwards = 6, 1  # the prompt's forward gave the token there
    while index < len(text) - 1:
        right = oracle.places[index + 1] == 0
        index, forwards = index + 1 + right, forwards + 1
    assert out.speculation.target_forwards == forwards
    assert 1.3 < out.speculation.tokens_per_forward < 2
