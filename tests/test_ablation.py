"""The ablation of clover-x at toy sizes: every row is other heads, and what was measured is not measured again."""

import json

import pytest
from test_experiments import experiment, folder, run  # noqa: F401  (fixtures)

from hf_clover.training.optimizers import muon_rate

pytestmark = pytest.mark.long("examples/experiments", "hf_clover/measure")


def test_every_row_is_measured_once(experiment, folder, monkeypatch):  # noqa: F811
    module = experiment("ablation")
    rows = ["clover-2, paper", "+ embeddings of size 1", "+ recall = clover-x", "clover-x: two layers"]
    rows.append("clover-x: cell of width 2 d")
    result = run(module, folder, "--rows", *rows)
    assert [row["heads"] for row in result["rows"]] == rows
    for row in result["rows"]:
        assert len(row["chain"]) == (module.DEPTH if row["variant"] == "clover-x" else 5)  # as deep as each drafts
        assert (row["chain_of_8"] is None) == (row["variant"] != "clover-x")
        assert row["chain"] == sorted(row["chain"], reverse=True)  # a longer chain comes true less often
        assert row["chain_of_5"] == pytest.approx(sum(row["chain"][:5]))
        assert row["tokens_per_forward"] >= 1
        assert row["draft_ms"] > 0
    paper, scaled, ours = (row for row in result["rows"] if "clover-x:" not in row["heads"])
    assert paper["recipe"] == {"learning_rate": 1e-3, "muon_learning_rate": 0.0, "loss_type": "clover-2"}
    assert ours["recipe"] == {"learning_rate": 1e-3, "muon_learning_rate": muon_rate(ours["steps"]), "loss_type": "kl"}
    assert scaled["changed"] == {"embedding_scale": "measured"}
    assert len({row["parameters"] for row in result["rows"]}) > 2

    def refuse(*args):
        raise AssertionError("measured again")

    monkeypatch.setattr(module, "train_row", refuse)
    again = run(module, folder, "--rows", *rows)["rows"]
    assert [row["chain"] for row in again] == [row["chain"] for row in result["rows"]]


def test_answers_and_questions_of_ones_own(experiment, folder, tmp_path, monkeypatch):  # noqa: F811
    module = experiment("ablation")
    answers = [{"text": f"answer {i} of many, some longer " * 3} for i in range(60)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    questions = [{"category": category, "turns": ["And then?"]} for category in ("math", "qa", "qa")]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    asked, ids = [], set()

    def note(target, questions, *args, assistant_model, **options):
        asked.append([category for category, _ in questions])
        ids.add(len(assistant_model.draft_ids))
        assert assistant_model.config.draft_copies == 0
        return ask(target, questions, *args, assistant_model=assistant_model, **options)

    ask = module.ask
    monkeypatch.setattr(module, "ask", note)
    given = [f"--data={tmp_path / 'answers.jsonl'}", f"--questions={tmp_path / 'questions.jsonl'}"]
    labels = ["clover-2, paper", "+ recall = clover-x"]
    result = run(module, folder, *given, "--draft-vocab-size", "40", "--work", str(tmp_path), "--rows", *labels)
    assert asked == [["math", "qa"]] * len(labels)
    assert ids == {40}
    assert [row["heads"] for row in result["rows"]] == labels
    assert all(row["tokens_per_forward"] >= 1 for row in result["rows"])
    run(module, folder, *given, "--draft-vocab-size", "30", "--work", str(tmp_path), "--rows", labels[1])
    assert ids == {40, 30}, "rows of another vocabulary are others"


def test_the_rows_go_from_the_paper_to_the_default(experiment):  # noqa: F811
    module = experiment("ablation")
    assert next(iter(module.STEPS.values()))[:2] == ("clover-2", {})
    assert list(module.STEPS.values())[-1] == ("clover-x", {}, {})
    assert len({str(row) for row in module.ROWS.values()}) == len(module.ROWS)
