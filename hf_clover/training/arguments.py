"""What the trainer is given, brought into the form it works with, or refused by name.

Contract: functions of the trainer's arguments. This module does not know datasets, losses or how training goes.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from ..modeling_clover import CloverHeads
from ..target_parts import unwrap
from .config import CloverTrainingConfig

_NO_LOGITS = "heads give no logits to compute it from; accuracies and acceptance lengths are logged by themselves"
_REFUSED_ARGUMENTS = {
    "compute_loss_func": "choose the loss with `args.loss_type`",
    "compute_metrics": _NO_LOGITS,
    "preprocess_logits_for_metrics": _NO_LOGITS,
    "quantization_config": "quantised heads cannot be trained; to quantise the target, put it into "
    "`args.teacher_model_init_kwargs`",
}


def refuse_arguments(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if name not in _REFUSED_ARGUMENTS:
            raise TypeError(f"CloverTrainer.__init__() got an unexpected keyword argument {name!r}")
        if value is not None:
            raise ValueError(f"`{name}` is SFTTrainer's and does not apply here: {_REFUSED_ARGUMENTS[name]}.")


def name_of(model: "nn.Module | str") -> str:
    return model if isinstance(model, str) else getattr(unwrap(model).config, "name_or_path", "") or "target"


def make_heads(model: Any, teacher_model: nn.Module, args: CloverTrainingConfig) -> nn.Module:
    options = dict(args.model_init_kwargs or {})
    if model is None:
        model = CloverHeads.from_target(teacher_model, **options)
    elif isinstance(model, str):
        model = CloverHeads.from_pretrained(model, **{"dtype": torch.float32, **options})
    elif getattr(getattr(unwrap(model), "config", None), "model_type", None) != "clover":
        raise TypeError(
            f"`model` must be Clover heads, their path, or None, not a `{type(unwrap(model)).__name__}`. The target "
            "goes to `teacher_model`."
        )
    return model.float()  # an update of 1e-3 and less is lost on a bfloat16 weight


def check_optimizer(optimizer: torch.optim.Optimizer | None, teacher_model: nn.Module) -> None:
    if optimizer is None:
        return
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    taken = [name for name, parameter in teacher_model.named_parameters() if id(parameter) in trained]
    if taken:
        raise ValueError(
            f"`optimizers` would train {len(taken)} parameters of the target ({taken[0]}, ...), which must stay as it "
            "is: make the optimizer from `heads.parameters()`."
        )


def check_parallelism(accelerator: Accelerator) -> None:
    if accelerator.distributed_type == DistributedType.FSDP:
        plugin = accelerator.state.fsdp_plugin
        if plugin.fsdp_version != 2:
            raise ValueError(
                f"`fsdp_version: {plugin.fsdp_version}` flattens the target's lm_head, which the heads borrow: "
                "set `fsdp_version: 2` in accelerate's configuration."
            )
        if plugin.cpu_ram_efficient_loading:
            raise ValueError(
                "`fsdp_cpu_ram_efficient_loading: true` leaves the target empty on all processes but the first: "
                "set it to false in accelerate's configuration."
            )
    parallelism = accelerator.parallelism_config
    if parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled):
        raise ValueError(
            "`cp_size` or `sp_size` above 1 splits sequences over processes, and heads look ahead in theirs: "
            "leave both at 1 in accelerate's configuration."
        )


def for_heads(peft_config: Any, args: CloverTrainingConfig) -> Any:
    """The adapter's configuration for a model that is no causal language model and that PEFT has no defaults for."""
    if args.draft_vocab_size is not None:
        raise ValueError(
            f"`draft_vocab_size={args.draft_vocab_size}` cannot go with `peft_config`: an adapter does not carry the "
            "ids. Choose the draft vocabulary when the heads themselves are trained."
        )
    peft_config = copy.copy(peft_config)
    if getattr(peft_config, "task_type", None) == "CAUSAL_LM":
        peft_config.task_type = None
    if hasattr(peft_config, "target_modules") and peft_config.target_modules is None:
        peft_config.target_modules = "all-linear"
    return peft_config


@contextmanager
def as_sft(args: CloverTrainingConfig) -> Iterator[None]:
    """What SFTTrainer's constructor must not see: it accepts its own losses only, and looks at them nowhere but in the
    `compute_loss` that is replaced here; and it would say that the heads' arguments are ignored."""
    own = args.loss_type, args.model_init_kwargs
    args.loss_type, args.model_init_kwargs = "nll", None
    try:
        yield
    finally:
        args.loss_type, args.model_init_kwargs = own


__all__ = ["as_sft", "check_optimizer", "check_parallelism", "for_heads", "make_heads", "name_of", "refuse_arguments"]
