"""The ablation of clover-x at toy sizes: every row is other heads, and what was measured is not measured again."""

import pytest
from test_experiments import experiment, folder, run  # noqa: F401  (fixtures)

from hf_clover.training.optimizers import muon_rate

pytestmark = pytest.mark.long("examples/experiments", "hf_clover/measure")


def test_every_row_is_measured_once(experiment, folder, monkeypatch):  # noqa: F811
    module = experiment("ablation")
    kept = ("clover-2, paper", "+ embeddings of size 1", "+ recall = clover-x", "clover-x: two layers")
    changed = {"clover-x: cell of width 2 d": module.ROWS["clover-x: cell of width 2 d"]}
    rows = {label: module.ROWS[label] for label in kept if label in module.ROWS} | changed
    monkeypatch.setattr(module, "ROWS", rows)
    monkeypatch.setattr(module, "STEPS", {label: row for label, row in rows.items() if label in module.STEPS})
    monkeypatch.setattr(module, "ALONE", {label: row for label, row in rows.items() if label in module.ALONE})
    result = run(module, folder)
    assert [row["heads"] for row in result["rows"]] == list(rows)
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
    again = run(module, folder)["rows"]
    assert [row["chain"] for row in again] == [row["chain"] for row in result["rows"]]


def test_the_rows_go_from_the_paper_to_the_default(experiment):  # noqa: F811
    module = experiment("ablation")
    assert next(iter(module.STEPS.values()))[:2] == ("clover-2", {})
    assert list(module.STEPS.values())[-1] == ("clover-x", {}, {})
    assert len({str(row) for row in module.ROWS.values()}) == len(module.ROWS)
