"""Which forwards over trees may be CUDA graphs, and what a graph holds beside its inputs and its cache.

Contract: the rules here name cases in which a capture would be silently wrong, or would fail midway. `trial` measures
the other cases, and after a failed capture everything runs eagerly (`graphs.py`). Each reason is logged once.
"""

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from ...network.target_parts import are_divided, come_and_go, device_of
from ...targets.hidden_states import has_hooks_of_others
from ...targets.private_api import attention_of, experts_of, is_compiled
from ..graphs import CAPTURES
from .memory import memory_of

logger = logging.get_logger(__name__)


def why_no_graphs(target: PreTrainedModel, config: GenerationConfig) -> str | None:
    """None where forwards over trees are captured, and "" where no reason is logged: nobody expects graphs there."""
    if device_of(target).type not in CAPTURES or config.disable_compile:
        return ""
    return memory_of(target).why_no_graphs or _why_no_graphs(target)


def tell_why_no_graphs(target: PreTrainedModel, reason: str) -> None:
    if reason:
        logger.warning_once(f"`{type(target).__name__}` verifies drafts without CUDA graphs: {reason}.")


def _why_no_graphs(target: PreTrainedModel) -> str | None:
    weights = list(target.parameters())
    if len({weight.device for weight in weights}) > 1 or come_and_go(target.modules()):
        return "its weights are on several devices, or are moved for every forward"
    if are_divided(weights):
        return "its weights are divided among processes"
    if target.training:
        return "it is in training mode; call `.eval()` on it"
    if getattr(target, "is_loaded_in_8bit", False):
        return "its 8-bit layers look for outliers on the host"
    if has_hooks_of_others(target):
        return "it has hooks, which a graph would leave out"
    if is_compiled(target):
        return "its forward is compiled"
    if experts_of(target) == "eager":
        return 'its experts run one by one; load it with `experts_implementation="grouped_mm"`'
    return None


def what_forwards_read(target: PreTrainedModel) -> tuple:
    """What a forward reads beside its inputs: addresses of weights, the active adapters, and torch's switches."""
    tensors = [*target.parameters(), *target.buffers()]
    kind = device_of(target).type
    switches = (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
        attention_of(target.config),
        experts_of(target),
    )
    return tuple(tensor.data_ptr() for tensor in tensors), adapters_on(target), switches


def adapters_on(target: PreTrainedModel) -> tuple:
    """For each layer with adapters: the active ones, and the scale of each."""
    layers: list[Any] = [module for module in target.modules() if hasattr(module, "active_adapters")]
    return tuple(
        (tuple(layer.active_adapters), layer.disable_adapters, tuple(sorted(layer.scaling.items())))
        for layer in layers
        if isinstance(getattr(layer, "scaling", None), dict)
    )
