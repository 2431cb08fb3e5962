"""examples/experiments/gpu.py at its toy size on the CPU: every stage runs, and what must hold of the result holds."""

import importlib
import json
import signal
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.parts import kernels  # noqa: F401  (a fixture)

pytestmark = pytest.mark.long("examples/experiments", "hf_clover/measure")

pytest.importorskip("matplotlib")
EXPERIMENTS = Path(__file__).resolve().parent.parent / "examples" / "experiments"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    return importlib.import_module("gpu")


def run(gpu: ModuleType, folder: Path, *more: str) -> dict[str, Any]:
    """The JSON it leaves, also where it ends with an error."""
    try:
        gpu.main(["--toy", "--output", str(folder), *more])
    finally:
        result = json.loads((folder / "gpu.json").read_text(encoding="utf-8"))
    return result


def test_every_stage_runs_and_leaves_its_figures(gpu, kernels, tmp_path):  # noqa: F811
    result = run(gpu, tmp_path)
    assert (result["kind"], result["name"], result["settings"]["toy"]) == ("experiment", "gpu", True)
    assert all(result[field] for field in ("question", "command", "machine", "versions", "date"))
    assert str(tmp_path) not in json.dumps(result)
    assert list(result["stages"]) == [stage[0] for stage in gpu.Bench(gpu._parse(["--toy"])).stages()]
    assert result["left_out"] == result["failed"] == {}

    assert [row["call"] for row in result["first_calls"]] == [1, 2]
    assert all(row["seconds"] > 0 for row in result["first_calls"])
    assert [(check["cache"], check["method"]) for check in result["checks"]] == [
        (cache, variant) for cache in ("dynamic", "static") for variant in ("clover-x", "clover-2", "clover", "medusa")
    ]
    assert all(check["passed"] for check in result["checks"])

    heads = {"clover-x", "clover-x, 1100 ids", "clover-2", "clover", "medusa"}
    found = {(row["cache"], row["batch_size"], row["method"]) for row in result["rows"]}
    assert found == {
        *((cache, size, method) for cache in ("dynamic", "static") for size in (1, 2) for method in {*heads, "plain"}),
        *(("dynamic", 1, method) for method in ("prompt-lookup", "assistant")),
    }
    assert [(row["has_cudnn"], row["method"]) for row in result["attention"]] == [
        (has_cudnn, method) for has_cudnn in (True, False) for method in ("plain", "clover-x, 1100 ids")
    ]
    for row in [*result["attention"], *result["rows"], *result["budgets"]]:
        assert row["skipped"] is None
        assert row["identical"] is True
        assert row["tokens_per_second"] > 0
    assert {row["method"] for row in result["budgets"]} == {"plain", "4 nodes", "8 nodes", "automatic"}

    assert [(step["cache"], step["method"]) for step in result["steps"]] == [
        (cache, name) for cache in ("dynamic", "static") for name in ("plain", "clover-x", "clover-x, 1100 ids")
    ]
    for step in result["steps"]:
        parts = {"plain step"} if step["method"] == "plain" else {"verify", "draft", "walk", "commit"}
        assert set(step["parts_ms"]) == {*parts, "other"}
        assert step["step_ms"] > 0
    assert [row["draft_vocab_size"] for row in result["training"]] == [None, 1100]
    assert all(row["tokens_per_second"] > 0 and row["loss"] > 0 for row in result["training"])
    for kernels in ([k for k in result["kernels"] if k["method"] == name] for name in ("plain", "clover-x, 1100 ids")):
        assert kernels[0]["kernel"] == "all"
        assert kernels[0]["ms"] >= kernels[1]["ms"] > 0
    assert len(result["learning"]) == 1
    assert all(value > 0 for value in result["learning"][0].values())
    assert [(row["context"], row["nodes"], row["method"]) for row in result["long_texts"]] == [
        (length, 3, method) for length in (16, 64) for method in ("by the mask", "in parts")
    ]
    for row in result["long_texts"]:
        assert row["wrong"] is None
        assert row["ms"] > 0
        assert (0 < row["off_by"] < 1e-5) == (row["method"] == "in parts"), "another way to the same numbers"
    contexts = [(row["cache"], row["method"], row["context"]) for row in result["contexts"]]
    assert contexts == [
        (cache, name, length)
        for cache in ("dynamic", "static")
        for length in (16, 64)
        for name in ("plain", "clover-x, 1100 ids")
    ]

    titles = " ".join(panel["title"] for panel in result["figure"]["panels"])
    of_speed = ("Speedup, dynamic", "Efficiency, static", "context, static", "Budgets")
    for part in (*of_speed, "Where a step goes", "Attention of a step"):
        assert part in titles
    for panel in result["figure"]["panels"]:
        assert all(len(series["x"]) == len(series["y"]) > 0 for series in panel["series"])
    for picture in ("gpu.png", "gpu-dark.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_no_stage_begins_without_time(gpu, tmp_path):
    result = run(gpu, tmp_path, "--minutes", "0")
    assert list(result["left_out"]) == [stage[0] for stage in gpu.Bench(gpu._parse(["--toy"])).stages()]
    assert set(result["left_out"].values()) >= {"0 seconds were left, and it needs at least 10"}
    assert result["rows"] == result["figure"]["panels"] == []
    assert not (tmp_path / "gpu.png").exists()


def test_a_stage_that_outlasts_its_time_is_stopped(gpu, tmp_path, monkeypatch):
    def stages(self: Any) -> Any:
        yield "endless", 0, 0.1, endless
        yield "next", 0, 10, lambda: self.lists["checks"].append({"passed": True})

    def endless() -> None:
        while True:
            try:
                time.sleep(0.01)
            except Exception:
                raise AssertionError("taken for an ordinary failure") from None

    monkeypatch.setattr(gpu.Bench, "stages", stages)
    result = run(gpu, tmp_path)
    assert result["left_out"] == {"endless": "stopped after 0 seconds, which was all it was given"}
    assert set(result["stages"]) == {"endless", "next"}
    assert result["checks"] == [{"passed": True}]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_stage_that_fails_does_not_end_the_run(gpu, tmp_path, monkeypatch):
    def fail(self: Any, cache: str) -> None:
        raise RuntimeError(f"CUDA out of memory, {cache}")

    monkeypatch.setattr(gpu.Bench, "exact", fail)
    with pytest.raises(SystemExit, match="CUDA out of memory, dynamic"):
        run(gpu, tmp_path, "--only", "exact")
    failed = json.loads((tmp_path / "gpu.json").read_text())["failed"]
    assert list(failed) == ["exact dynamic", "exact static"]


def test_other_tokens_than_plain_generates_are_an_error(gpu, tmp_path, monkeypatch):
    wrong = {"method": "clover", "passed": False}
    monkeypatch.setattr(gpu.Bench, "exact", lambda self, cache: self.lists["checks"].append(wrong))
    with pytest.raises(SystemExit, match=r"other tokens .*clover"):
        run(gpu, tmp_path, "--only", "exact dynamic")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_error_without_a_gpu_names_the_toy_option(gpu, capsys):
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "`--toy` runs the same stages on the CPU" in capsys.readouterr().err


def test_time_of_a_part_within_another_counts_once(gpu, monkeypatch):
    """draft takes 5 in all, of which extend, called by it, takes 2; then extend alone takes 1."""
    step_parts = importlib.import_module("step_parts")
    clock, time_is = step_parts.Clock(torch.device("cpu")), [0.0]
    monkeypatch.setattr(clock, "now", lambda: time_is[0])

    def take(seconds: float) -> str:
        time_is[0] += seconds
        return "taken"

    extend = clock.around("extend", take)

    def draft() -> None:
        take(1)
        assert extend(2) == "taken"
        take(2)

    clock.around("draft", draft)()
    extend(1)
    assert clock.calls == {"extend": [2, 1], "draft": [3]}
