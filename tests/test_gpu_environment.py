"""The scripts for a GPU under the versions that such a machine comes with, which are others than here.

By hand: `HF_CLOVER_GPU_PYTHON` names the Python of an environment with torch 2.11.0, transformers 5.17.0, accelerate
1.15.0, peft, matplotlib, rich and typer, and neither trl nor datasets. Each test takes minutes
on a CPU.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYTHON = os.environ.get("HF_CLOVER_GPU_PYTHON")
pytestmark = [
    pytest.mark.long("examples/experiments", "examples/smollm2"),
    pytest.mark.skipif(not PYTHON, reason="HF_CLOVER_GPU_PYTHON names no Python"),
]


def run(*words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([PYTHON, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_environment_has_the_versions_of_a_gpu_machine():
    names = ("torch", "transformers", "accelerate", "peft", "matplotlib", "rich", "typer", "trl", "datasets")
    code = f"import importlib.util as u, json; print(json.dumps([u.find_spec(n) is not None for n in {names}]))"
    assert json.loads(run("-c", code)) == [True] * 7 + [False] * 2
    versions = run(
        "-c", "import torch, transformers; print(torch.__version__.split('+')[0], transformers.__version__)"
    )
    assert versions.split() == ["2.11.0", "5.17.0"]


def test_every_stage_of_the_gpu_script_passes(tmp_path):
    run("examples/experiments/gpu.py", "--toy", "--output", str(tmp_path))
    result = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert result["left_out"] == result["failed"] == {}
    assert all(check["passed"] for check in result["checks"])
    assert all(row["skipped"] is None and row["identical"] for row in [*result["rows"], *result["budgets"]])
    assert len(result["training"]) == 2


def test_the_smollm2_script_measures_identical_tokens(tmp_path):
    stand_in = ROOT / "examples" / "stand_in" / "target"
    prompts = [{"prompt": [{"role": "user", "content": text}]} for text in ("def add(a, b):", "import os", "class A:")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (tmp_path / "questions.jsonl").write_text(json.dumps({"category": "coding", "turns": ["def f(x):"]}) + "\n")
    where = ["--questions", str(tmp_path / "questions.jsonl"), "--output", str(tmp_path / "out")]
    sizes = ["--max-new-tokens", "12", "--max-length", "64", "--draft-vocab-size", "256", "--answer-tokens", "8"]
    words = [str(tmp_path / "prompts.jsonl"), *where, "--target", str(stand_in), "--work", str(tmp_path), *sizes]
    run("examples/smollm2/on_a_gpu.py", *words)
    result = json.loads((tmp_path / "out" / "on_a_gpu.json").read_text(encoding="utf-8"))
    assert result["answers"]["answers"] == 3
    assert all(row["identical"] for stage in result["measured"].values() for row in stage["rows"])
