"""Recurrent layers that take the tokens of one forward one by one.

Contract: inside `one_by_one(target)`, in the thread that entered it, a layer that continues from a state is called
once for each token, with the kernels of plain steps. Some targets need this: their kernels over several tokens begin
without a state (Mamba 1) or round in another way. Their other layers still take all tokens at once. Other threads see
no difference.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from .memory import memory_of

_inside = threading.local()


@contextmanager
def one_by_one(target: PreTrainedModel) -> Iterator[None]:
    layers = [module for module in target.modules() if _is_recurrent(module)]
    memory = memory_of(target)
    with memory.lock:
        for layer in layers if not memory.one_by_one else ():
            layer.forward = _stepwise(layer.forward, "forward" in vars(layer))
        memory.one_by_one += 1
    depth, _inside.depth = getattr(_inside, "depth", 0), getattr(_inside, "depth", 0) + 1
    try:
        yield
    finally:
        _inside.depth = depth
        with memory.lock:
            memory.one_by_one -= 1
            for layer in layers if not memory.one_by_one else ():
                stepwise: Any = layer.forward
                before, was_its_own = stepwise.before
                if was_its_own:
                    layer.forward = before
                else:
                    del layer.forward


def _is_recurrent(module: nn.Module) -> bool:
    """transformers' recurrent layers contain a short convolution and have a `layer_idx`, their place in the cache."""
    has_convolution = any(isinstance(child, nn.Conv1d) for child in module.children())
    return has_convolution and isinstance(getattr(module, "layer_idx", None), int)


def _stepwise(forward: Callable, was_its_own: bool) -> Callable:
    def run(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        tokens = hidden_states.shape[1]
        has_state = any(isinstance(v, Cache) and _holds_text(v) for v in (*args, *kwargs.values()))
        if not getattr(_inside, "depth", 0) or tokens == 1 or not has_state:
            return forward(hidden_states, *args, **kwargs)
        kwargs |= {"attention_mask": None} if "attention_mask" in kwargs else {}  # no token behind a prompt is padding
        outputs = [forward(token, *args, **kwargs) for token in hidden_states.split(1, dim=1)]  # [B, 1, d] each
        if isinstance(outputs[0], torch.Tensor):
            return torch.cat(outputs, dim=1)
        return torch.cat([output[0] for output in outputs], dim=1), *outputs[-1][1:]

    stepwise: Any = run  # a function can have attributes
    stepwise.before = forward, was_its_own
    return stepwise


def _holds_text(cache: Cache) -> bool:
    states = (getattr(layer, "has_previous_state", None) for layer in cache.layers)
    return any(any(state.values()) for state in states if state)
