"""Trains for two steps and says what came out: for `test_distributed.py`, and under `accelerate launch` by it."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from safetensors.torch import load_file
from tiny import losses, make_target, make_tokenizer, make_trainer, random_ids

from hf_clover.training import AcceptanceCallback, TargetAnswers, regenerate


def train(
    folder: Path, batch_size: int, precompute: bool = False, steps: int = 2, target: Any = None, **fields: Any
) -> dict[str, Any]:
    trainer = make_trainer(
        folder,
        target or make_target(),
        random_ids([12, 9, 16, 7, 12, 10, 14, 8]),
        per_device_train_batch_size=batch_size,
        train_sampling_strategy="sequential",
        precompute_targets=precompute,
        max_steps=steps,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        warmup_steps=0,
        muon_learning_rate=0.0,  # its bfloat16 would round differently where sums come in another order
        save_strategy="steps",
        save_steps=2,
        **fields,
    )
    if not trainer.teacher.is_sharded:
        trainer.add_callback(AcceptanceCallback(trainer, [[8, 9, 10]], max_new_tokens=6, freq=2))
    trainer.train(resume_from_checkpoint=steps > 2)
    trainer.save_model(folder / "final")
    return {
        "processes": trainer.accelerator.num_processes,
        "sharded": trainer.teacher.is_sharded,
        "losses": losses(trainer),
        "first": {name: value for name, value in trainer.state.log_history[0].items() if "/" in name},
        "weights": {name: tensor.flatten()[:4].tolist() for name, tensor in saved_weights(folder / "final").items()},
    }


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    PartialState().wait_for_everyone()
    return load_file(folder / "model.safetensors")


@contextmanager
def fsdp_on_cpu() -> Iterator[None]:
    """accelerate has FSDP for accelerators only: tell it that these processes are some."""
    settings = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
    }
    device = torch.device("cpu")
    with (
        patch.dict(os.environ, settings),
        patch.object(PartialState, "_prepare_backend", lambda *_: ("gloo", DistributedType.MULTI_GPU)),
        patch.object(PartialState, "set_device", lambda state: setattr(state, "device", device)),
    ):
        yield


def answer(folder: Path) -> list[dict[str, Any]]:
    dataset = Dataset.from_dict({"prompt": ["w1 w2", "w3", "w4 w5"]})
    return regenerate(dataset, TargetAnswers(make_target(), make_tokenizer(), max_new_tokens=4), folder).to_list()


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, size = Path(sys.argv[1]), int(sys.argv[2])
    results: dict[str, Any] = {"online": train(out / "online", size)}
    results["precompute"] = train(out / "precompute", size, precompute=True)
    results["answers"] = answer(out / "answers")
    with fsdp_on_cpu():
        results["fsdp"] = train(out / "fsdp", size)
        results["fsdp resumed"] = train(out / "fsdp", size, steps=4)
    if int(os.environ["RANK"]) == 0:
        (out / "result.json").write_text(json.dumps(results))
