"""Runs that end early: killed, interrupted, or both, and what resuming makes of them."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from resumed_runs import SignalAt, assert_equal_runs, make_run
from tiny import make_target
from transformers import TrainerCallback

from hf_clover import CloverHeads

pytestmark = pytest.mark.long("hf_clover/training", "hf_clover/network")


def test_resume_after_a_kill_equals_an_unbroken_run(tmp_path: Path) -> None:
    unbroken = make_run(tmp_path / "unbroken", draft_vocab_size=30)
    unbroken.train()
    child = os.fork()
    if child == 0:
        make_run(tmp_path / "killed", SignalAt(5, signal.SIGKILL), draft_vocab_size=30).train()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (tmp_path / "killed" / "checkpoint-3").exists()
    resumed = make_run(tmp_path / "killed", draft_vocab_size=30)
    resumed.train(resume_from_checkpoint=True)
    assert_equal_runs(resumed, unbroken)


def test_resume_after_ctrl_c_equals_an_unbroken_run(
    tmp_path: Path, transformers_log: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    unbroken = make_run(tmp_path / "unbroken")
    unbroken.train()
    stopped = make_run(tmp_path / "stopped", SignalAt(5, signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    stopped.train()
    assert signal.getsignal(signal.SIGINT) is before
    assert stopped.was_interrupted
    assert stopped.state.global_step == 5
    assert "Ctrl-C: training ends after this step, with a checkpoint. Once more ends it now." in capfd.readouterr().err
    assert "Interrupted: training ends after step 5" in transformers_log.text
    assert (tmp_path / "stopped" / "checkpoint-5" / "model.safetensors").exists()
    resumed = make_run(tmp_path / "stopped")
    resumed.train(resume_from_checkpoint=True)
    assert not resumed.was_interrupted
    assert_equal_runs(resumed, unbroken)


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    class TwiceInOneStep(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGINT)

        on_pre_optimizer_step = on_step_begin

    trainer = make_run(tmp_path, TwiceInOneStep())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_resume_with_an_adapter_equals_an_unbroken_run(tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        torch.manual_seed(0)
        heads = CloverHeads.from_target(make_target(), num_heads=2)
        return {"model": heads, "peft_config": LoraConfig(r=4)}

    unbroken = make_run(tmp_path / "unbroken", options=options(), model_init_kwargs=None)
    unbroken.train()
    stopped = make_run(tmp_path / "stopped", SignalAt(5, signal.SIGINT), options=options(), model_init_kwargs=None)
    stopped.train()
    resumed = make_run(tmp_path / "stopped", options=options(), model_init_kwargs=None)
    resumed.train(resume_from_checkpoint=True)
    assert_equal_runs(resumed, unbroken)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("fields", [{}, {"max_steps": -1, "num_train_epochs": 2}], ids=["steps", "epochs"])
def test_resuming_a_finished_run_changes_nothing(
    fields: dict[str, Any], tmp_path: Path, transformers_log: pytest.LogCaptureFixture
) -> None:
    """With a constant rate, a step beyond the last would change the weights."""
    fields = {"lr_scheduler_type": "constant", **fields}
    finished = make_run(tmp_path, **fields)
    finished.train()
    steps, files = finished.state.global_step, files_of(tmp_path)
    assert not finished.is_over
    resumed = make_run(tmp_path, **fields)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.is_over
    assert f"The run is over: checkpoint-{steps} has all {steps} steps" in transformers_log.text
    assert "Nothing is trained; for more, raise `max_steps` or `num_train_epochs`" in transformers_log.text
    assert resumed.state.global_step == steps
    assert_equal_runs(resumed, finished)
    assert files_of(tmp_path) == files
    assert "train_runtime" not in resumed.state.log_history[-1], "no time of no steps"
    assert resumed._total_train_tokens == finished._total_train_tokens, "for the card"
    longer = make_run(tmp_path, **{**fields, "max_steps": steps + 2})
    longer.train(resume_from_checkpoint=True)
    assert (longer.state.global_step, longer.is_over) == (steps + 2, False)
