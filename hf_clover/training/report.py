"""A training run's figures, for the results file and the model card beside the heads.

Contract: makes dictionaries in the form that `hf_clover.hub.cards` describes, from the trainer's state and arguments.
A figure that was not measured is left out. This module does not know models or training.
"""

from typing import Any

from transformers import SchedulerType, TrainerState

from ..measure.provenance import provenance
from .config import CloverTrainingConfig
from .losses import TOP_K

_SETTINGS = (
    "loss_type",
    "learning_rate",
    "muon_learning_rate",
    "weight_decay",
    "lr_scheduler_type",
    "num_train_epochs",
    "max_length",
    "packing",
    "seed",
)


def results_of(
    args: CloverTrainingConfig, state: TrainerState, num_tokens: int, dataset_name: str | None
) -> dict[str, Any]:
    """The sections `training` and, after an evaluation, `acceptance`."""
    settings = {name: getattr(args, name) for name in _SETTINGS}
    settings["lr_scheduler_type"] = str(SchedulerType(args.lr_scheduler_type).value)
    settings["batch_size"] = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    settings["precision"] = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    source = provenance()
    training: dict[str, Any] = {"steps": state.global_step, "tokens": num_tokens, "settings": settings, **source}
    if dataset_name is not None:
        training["datasets"] = [dataset_name]
    runtime = next((line["train_runtime"] for line in reversed(state.log_history) if "train_runtime" in line), None)
    if runtime is not None:
        training["seconds"] = runtime
    evaluated = next((line for line in reversed(state.log_history) if "eval_head_0/top1" in line), None)
    if evaluated is None:
        return {"training": training}
    shares = [f"top{k}{given}" for given in ("", "_given_earlier") for k in range(1, TOP_K + 1)]
    num_heads = sum(name.startswith("eval_head_") and name.endswith("/loss") for name in evaluated)
    by_head = [{share: evaluated[f"eval_head_{head}/{share}"] for share in shares} for head in range(num_heads)]
    prompts = "the evaluation set" if dataset_name is None else f"the evaluation split of {dataset_name}"
    return {
        "training": training,
        "acceptance": {"by_head": by_head, "prompts": prompts, "command": source["command"]},
    }


__all__ = ["results_of"]
