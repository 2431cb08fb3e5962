"""Two processes give what one gives on the same global batch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from two_processes import answer, train

pytestmark = pytest.mark.long("hf_clover/training", "hf_clover/network")

HERE = Path(__file__).parent


def launch(folder: Path, batch_size: int) -> dict[str, Any]:
    # With `--cpu` accelerate starts one process (or needs MPI). `--multi_gpu` starts them as torchrun does, and the
    # trainer's `use_cpu` then gives them gloo.
    options = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    options += ["--dynamo_backend", "no", "--num_cpu_threads_per_process", "1", "--main_process_port", "0"]
    paths = [str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    script = [str(HERE / "two_processes.py"), str(folder), str(batch_size)]
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *options, *script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((folder / "result.json").read_text())


def test_two_processes_train_and_answer_as_one_process_does(tmp_path: Path) -> None:
    one = train(tmp_path / "one", batch_size=4)
    two = launch(tmp_path, batch_size=2)
    assert one["processes"] == 1
    assert all(two[mode]["processes"] == 2 for mode in ("online", "precompute", "fsdp"))
    for mode in ("online", "fsdp"):
        assert two[mode]["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert two[mode]["first"] == pytest.approx(one["first"], rel=1e-5)
        assert two[mode]["weights"].keys() == one["weights"].keys()
        for name, values in one["weights"].items():
            assert two[mode]["weights"][name] == pytest.approx(values, rel=1e-3, abs=1e-5), name
    assert two["precompute"]["losses"] == pytest.approx(one["losses"], rel=5e-3)  # bfloat16 states
    assert two["answers"] == answer(tmp_path / "answers of one")

    assert two["fsdp"]["sharded"]
    unbroken = train(tmp_path / "one", batch_size=4, steps=4)
    assert two["fsdp resumed"]["losses"][-2:] == pytest.approx(unbroken["losses"][-2:], rel=1e-4)
