"""The launch files of examples/accelerate, and training with DeepSpeed as they configure it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from two_processes import train

pytestmark = pytest.mark.long("hf_clover/training", "hf_clover/network")

HERE = Path(__file__).parent
WORKER = "deepspeed_processes.py"
LAUNCH_FILES = HERE.parents[1] / "examples" / "accelerate"
needs_deepspeed = pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="DeepSpeed is not installed")


@pytest.mark.parametrize("file", sorted(LAUNCH_FILES.glob("*.yaml")), ids=lambda file: file.stem)
def test_accelerate_understands_the_launch_files(file: Path) -> None:
    loaded = load_config_from_file(str(file))
    expected = "DEEPSPEED" if "deepspeed" in file.stem else "MULTI_GPU" if file.stem == "multi_gpu" else "FSDP"
    assert loaded.distributed_type == expected
    assert loaded.num_processes == 8 * loaded.num_machines
    if expected == "FSDP":
        assert loaded.fsdp_config["fsdp_version"] == 2
        assert loaded.fsdp_config["fsdp_cpu_ram_efficient_loading"] is False
    if expected == "DEEPSPEED":
        assert loaded.deepspeed_config["zero_stage"] == int(file.stem[-1])
        assert loaded.deepspeed_config["zero3_init_flag"] is False
    if loaded.num_machines > 1:
        assert loaded.main_process_ip


def launch(folder: Path, stage: int) -> dict[str, Any]:
    options = ["--config_file", str(LAUNCH_FILES / f"deepspeed_zero{stage}.yaml"), "--num_processes", "2"]
    options += ["--mixed_precision", "no", "--main_process_port", "0"]
    paths = [str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *options, str(HERE / WORKER), str(folder), "2"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((folder / "result.json").read_text())


@needs_deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_two_processes_under_deepspeed_equal_one(stage: int, tmp_path: Path) -> None:
    one = train(tmp_path / "one", batch_size=4, optim="adamw_torch")
    results = launch(tmp_path, stage)
    for name in ("trained", "loaded"):
        two = results[name]
        assert two["processes"] == 2
        assert two["sharded"] is (stage == 3)
        assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert two["first"] == pytest.approx(one["first"], rel=1e-5)
        assert two["weights"].keys() == one["weights"].keys()
        for parameter, values in one["weights"].items():
            assert two["weights"][parameter] == pytest.approx(values, rel=1e-3, abs=1e-5), parameter
    for generated in results["generated"]:
        assert generated["same"]
        assert generated["divided"]
        assert generated["method"] == "tree"
    assert results["generated"][0]["steps"] > results["generated"][1]["steps"]
    unbroken = train(tmp_path / "one", batch_size=4, steps=4, optim="adamw_torch")
    assert results["resumed"]["losses"][-2:] == pytest.approx(unbroken["losses"][-2:], rel=1e-4)
