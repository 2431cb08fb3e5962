"""Checks the trainer's arguments, and turns them into the form that it works with.

Contract: functions of the trainer's arguments; an argument that cannot be used is refused by name. This module does
not know datasets, losses or training.
"""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..network.modeling_clover import CloverHeads
from ..network.modeling_heads import DraftHeads
from ..network.target_parts import unwrap
from ..origins.published import load_heads
from .config import CloverTrainingConfig
from .optimizers import HAS_MUON, MUON_DECAY, MUON_RATE, WITH_MUON, MuonAndAdamW
from .teacher import loading_whole

logger = logging.get_logger(__name__)

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


def checked_teacher(teacher_model: "nn.Module | str | None", model: Any) -> "nn.Module | str":
    """`teacher_model`; raises if it is None."""
    if teacher_model is not None:
        return teacher_model
    required = "`teacher_model` is required: the target that the heads are for, or its name or path."
    if isinstance(model, str):
        required += f" `model={model!r}` names heads to go on with: if it is the target, pass it as `teacher_model`."
    elif model is not None and not _are_heads(model):
        required += f" Here the target was passed as `model`, a `{type(model).__name__}`: pass it as `teacher_model`."
    raise ValueError(required)


def _are_heads(model: Any) -> bool:
    return isinstance(unwrap(model), DraftHeads)


def name_of(model: "nn.Module | str") -> str:
    return model if isinstance(model, str) else getattr(unwrap(model).config, "name_or_path", "") or "target"


def make_heads(model: Any, teacher_model: nn.Module, args: CloverTrainingConfig) -> PreTrainedModel:
    """The heads to train, or the PEFT model that wraps them."""
    given: Any = args.model_init_kwargs or {}  # text is parsed by now
    options = dict(given)
    if model is None:
        model = CloverHeads.from_target(teacher_model, **options)
    elif isinstance(model, str):
        with loading_whole(args):
            model = load_heads(model, teacher_model, **{"dtype": torch.float32, **options})
    elif not _are_heads(model):
        raise TypeError(
            f"`model` must be Clover heads, their path, or None, not a `{type(unwrap(model)).__name__}`. The target "
            "goes to `teacher_model`."
        )
    return model.float()  # a bfloat16 weight would lose updates of 1e-3 and less


def follow_recipe(args: CloverTrainingConfig, heads: DraftHeads, peft_config: Any, optimizer: Any) -> Any:
    """Fill in arguments that the user left open, with the recipe of the heads' variant.

    Returns the class of the optimizer and its arguments, or None for the user's `optimizer` or transformers' own. The
    learning rate of Muon stays open until the number of steps is known."""
    config = heads.config
    if args.loss_type is None:
        args.loss_type = config.loss_type
        if args.hidden_loss_weight is None:
            args.hidden_loss_weight = config.hidden_loss_weight
    elif args.loss_type != "clover-2" and args.hidden_loss_weight is None:
        args.hidden_loss_weight = 0.0  # the weight in the heads' config belongs to another loss
    has_own = optimizer is not None or args.optim != type(args).__dataclass_fields__["optim"].default
    is_sharded = bool(args.fsdp or args.deepspeed_plugin or os.environ.get("ACCELERATE_USE_FSDP") == "true")
    reasons = {
        "needs torch 2.9 or later": not HAS_MUON,
        "cannot go with another optimizer": has_own,
        "cannot work on matrices in shards (FSDP, DeepSpeed)": is_sharded,
    }
    against = [reason for reason, applies in reasons.items() if applies]
    if args.muon_learning_rate and against:
        raise ValueError(f"`muon_learning_rate={args.muon_learning_rate}` {against[0]}: leave it out, or set it to 0.")
    if args.muon_learning_rate is None and (against or peft_config is not None or not WITH_MUON[config.variant]):
        args.muon_learning_rate = 0.0
    with_muon = args.muon_learning_rate != 0
    if args.weight_decay is None:
        args.weight_decay = MUON_DECAY if with_muon else 0.0
    if not with_muon:
        return None
    rate = args.muon_learning_rate
    if rate is None:
        rate = MUON_RATE
        if heads.name_or_path:
            logger.warning(
                f"The heads from `{heads.name_or_path}` learn at the rates for new heads, at which trained heads "
                "forget at first. If they are trained already, pass small rates: `muon_learning_rate=0.003` and "
                "`learning_rate=2e-4`."
            )
    options = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    return MuonAndAdamW, {"lr": args.learning_rate, "muon_lr": rate, **options}


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
    """A copy of the adapter's configuration that suits heads: they are not a causal language model, and PEFT has no
    default modules for them."""
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
    """Within this block `args` hides `loss_type` and `model_init_kwargs` from SFTTrainer's constructor.

    The constructor accepts only its own losses, and would warn that the heads' arguments are ignored. SFTTrainer reads
    `loss_type` only in `compute_loss`, which our trainer replaces."""
    own = args.loss_type, args.model_init_kwargs
    args.loss_type, args.model_init_kwargs = "nll", None
    try:
        yield
    finally:
        args.loss_type, args.model_init_kwargs = own


__all__ = [
    "as_sft",
    "check_optimizer",
    "check_parallelism",
    "checked_teacher",
    "follow_recipe",
    "for_heads",
    "make_heads",
    "name_of",
    "refuse_arguments",
]
