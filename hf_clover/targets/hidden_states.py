"""Hooks that capture the hidden states of a target's forwards, for heads to read.

Contract: within `capture_states`, each forward of this thread appends one tensor. Nothing else in the target changes,
and its hooks are removed with the last block that needs them.

Shapes: B batch, T positions, d hidden size.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from ..network.modeling_heads import DraftHeads
from ..network.target_parts import find_decoder

BEFORE_NORM = -1  # as a layer's number: the input of the decoder's final norm

# For each target, the hooks on each tuple of layers, while some thread captures.
_hooks: "WeakKeyDictionary[PreTrainedModel, dict[tuple[int, ...], Hooks]]" = WeakKeyDictionary()
_changing = threading.Lock()


@contextmanager
def capture_states(
    target: PreTrainedModel, captured: list[torch.Tensor], layers: Sequence[int] = ()
) -> Iterator[None]:
    """Appends to `captured` the input of the decoder's final norm [B, T, d], or its output if it has no final norm.
    With `layers`, appends the states of these layers side by side [B, T, len(layers) d]. Layers are numbered as in
    transformers' `hidden_states`: 0 is the embeddings, k the output of the k-th layer, and the last number the output
    of the final norm; `BEFORE_NORM` is the input of that norm.

    Other threads may run the same target meanwhile: only this thread's forwards are captured. All threads share one
    set of hooks, which is removed when the last thread has finished. Adding or removing a hook while `torch.compile`
    traces another thread's forward would break the guards that it writes.
    """
    wanted = tuple(layers)
    with _changing:
        of_layers = _hooks.setdefault(target, {})
        if wanted not in of_layers:
            of_layers[wanted] = Hooks(target, wanted)
        hooks = of_layers[wanted]
        key = hooks.add(captured)
    try:
        yield
    finally:
        with _changing:
            if hooks.remove(key):
                del of_layers[wanted]


def read_by(heads: DraftHeads, states: torch.Tensor) -> torch.Tensor:
    """The part of `states` [..., a d] that `heads` read, which is its first; more layers may follow."""
    return states[..., : len(heads.feature_layers) * heads.config.target_width or None]


class Hooks:
    """The hooks on a target's decoder, and the list and thread of each listener."""

    def __init__(self, target: PreTrainedModel, wanted: tuple[int, ...]) -> None:
        decoder, layers, norm = find_decoder(target)
        self._listeners: dict[object, tuple[int, list[torch.Tensor]]] = {}
        self._seen = threading.local()  # last input at each place: some decoders run their norm more than once
        self._wanted, self._has_norm = wanted, norm is not None
        self._depth = depth = 0 if layers is None else len(layers)
        numbered = set(wanted) - {BEFORE_NORM}
        if numbered and (layers is None or not 0 <= min(numbered) <= max(numbered) <= depth):
            found = "no list of layers is found in it" if layers is None else f"it has {depth} layers"
            raise ValueError(
                f"These heads read the states of layers {sorted(numbered)} of `{type(target).__name__}`, and {found}: "
                "use them with the target that they were made for, or name the layers: `load_heads(layer_ids=...)`."
            )
        self._handles = [decoder.register_forward_hook(self._after_decoder)]
        for layer in numbered - {depth}:
            assert layers is not None
            self._handles.append(
                layers[layer].register_forward_pre_hook(partial(self._note, str(layer)), with_kwargs=True)
            )
        if norm is not None and (not wanted or BEFORE_NORM in wanted):
            self._handles.append(norm.register_forward_pre_hook(partial(self._note, "norm"), with_kwargs=True))

    def add(self, captured: list[torch.Tensor]) -> object:
        key = object()
        self._listeners[key] = (threading.get_ident(), captured)
        return key

    def remove(self, key: object) -> bool:
        """Remove a listener. True if it was the last one, and the hooks were removed too."""
        del self._listeners[key]
        if not self._listeners:
            for handle in self._handles:
                handle.remove()
        return not self._listeners

    def _note(self, place: str, _: nn.Module, args: tuple, kwargs: dict) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values())))
        self._seen.__dict__[place] = hidden

    def _after_decoder(self, _: nn.Module, __: tuple, output: Any) -> None:
        seen = dict(self._seen.__dict__)
        self._seen.__dict__.clear()
        seen |= {str(BEFORE_NORM): seen.get("norm", output[0]), str(self._depth): output[0]}
        parts = [seen[str(layer)] for layer in self._wanted or (BEFORE_NORM,)]  # [B, T, d] each
        found = parts[0] if len(parts) == 1 else torch.cat([part.to(output[0].device) for part in parts], dim=-1)
        for thread, captured in tuple(self._listeners.values()):
            if thread == threading.get_ident():
                captured.append(found)


def has_hooks_of_others(target: nn.Module) -> bool:
    """Whether the target has hooks that are not ours. A CUDA graph would not run them."""
    for module in target.modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if not isinstance(getattr(getattr(hook, "func", hook), "__self__", None), Hooks):
                return True
    return False


__all__ = ["BEFORE_NORM", "Hooks", "capture_states", "has_hooks_of_others", "read_by"]
