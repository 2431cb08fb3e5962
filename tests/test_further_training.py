"""The experiment on targets that are trained further, at toy sizes: what changed, what did not, and who drafted."""

import json

import pytest
import torch
from test_experiments import experiment, folder, run  # noqa: F401  (fixtures)

pytestmark = pytest.mark.long("examples/experiments", "hf_clover/measure")

pytest.importorskip("peft")


def test_old_heads_adapters_and_new_heads(experiment, folder, monkeypatch):  # noqa: F811
    module = experiment("further_training")
    targets, learned = [], []
    greedy, learn = module.greedy, module.learn

    def recording(target, prompts, *args, **options):
        targets.append(target)
        return greedy(target, prompts, *args, **options)

    def learning(args, target, tokenizer, data, tokens, old):
        heads, seconds = learn(args, target, tokenizer, data, tokens, old)
        learned.append((target, old, heads, len(data)))
        return heads, seconds

    monkeypatch.setattr(module, "greedy", recording)
    monkeypatch.setattr(module, "learn", learning)
    result = run(module, folder)
    kinds = [module.FITTED, "code", "docstrings"]
    expected = [("old", fitted, 0) for fitted in (0, 64, 128)]
    expected += [(heads, 128, tokens) for tokens in (64, 128) for heads in ("adapter", "new")]
    found = [(row["heads"], row["fit_tokens"], row["tokens"], row["kind"]) for row in result["rows"]]
    assert found == [(*about, kind) for about in expected for kind in kinds]
    assert all(row["identical"] and row["tokens_per_forward"] >= 1 for row in result["rows"])

    first, then, last = list(dict.fromkeys(targets))  # a target of its own for each length, and the user's unchanged
    name = "model.layers.0.self_attn.q_proj.weight"
    weights = [target.get_parameter(name) for target in (first, then, last)]
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    assert torch.equal(first.lm_head.weight, last.lm_head.weight)  # what the heads borrow
    assert all(target is last for target, *_ in learned)
    old = next(start for _, start, *_ in learned if start is not None)
    for _, start, heads, samples in learned:
        assert samples == 6
        assert any("lora" in name for name, _ in heads.named_parameters()) == (start is not None)
    assert not any("lora" in name for name, _ in old.named_parameters())  # a copy was adapted
    assert [panel["title"] for panel in result["figure"]["panels"]][1] == f"{module.FITTED} (fitted to)"
    assert (folder / "out" / "further_training-dark.png").exists()


def test_a_kind_of_text_and_questions_of_ones_own(experiment, folder, tmp_path):  # noqa: F811
    module = experiment("further_training")
    texts = [{"text": f"number {i} " * 12} for i in range(12)]
    (tmp_path / "numbers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    questions = [{"category": c, "turns": [f"{c} {i}?"]} for i in range(3) for c in ("math", "qa")]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    given = ("--fit", str(tmp_path / "numbers.jsonl"), "--questions", str(tmp_path / "questions.jsonl"))
    result = run(module, folder, *given, "--fit-tokens", "32", "--tokens", "32")
    assert {row["kind"] for row in result["rows"]} == {"numbers", "math", "qa"}
    assert str(tmp_path.parent) not in json.dumps(result["settings"])
