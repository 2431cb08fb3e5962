"""Runs of training that end early, by a signal, and whether a run that was resumed equals an unbroken one."""

import os
from pathlib import Path
from typing import Any

import torch
from tiny import losses, make_target, make_trainer, random_ids
from transformers import TrainerCallback

from hf_clover import CloverTrainer

STEPS = 8


class SignalAt(TrainerCallback):
    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), self.number)


def make_run(folder: Path, callback: TrainerCallback | None = None, **fields: Any) -> CloverTrainer:
    return make_trainer(
        folder,
        make_target(),
        random_ids([12, 9, 16, 7, 12, 10, 14, 8, 9, 11]),
        options={"callbacks": [callback] if callback else None, **fields.pop("options", {})},
        **{
            "max_steps": STEPS,
            "save_strategy": "steps",
            "save_steps": 3,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            **fields,
        },
    )


def assert_equal_runs(resumed: CloverTrainer, unbroken: CloverTrainer) -> None:
    expected = unbroken.model.state_dict()
    for name, tensor in resumed.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert losses(resumed)[-2:] == losses(unbroken)[-2:]
    counted = [
        [line["num_tokens"] for line in run.state.log_history if "num_tokens" in line] for run in (resumed, unbroken)
    ]
    assert counted[0] == counted[1]
