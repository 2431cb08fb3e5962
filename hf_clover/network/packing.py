"""Linear layers whose weights are rearranged once, for fast products of a few rows on a CPU.

Contract: `pack_for_cpu(model)` puts the weight of every large linear layer into oneDNN's own order, in place.
`unpack(model)` restores the same numbers bit for bit. Verifying a tree multiplies a few rows. torch uses MKL for
float32, and MKL takes about twice as long for two rows as for one; the time of oneDNN over packed weights hardly grows
with the rows. The public ways do not help: `torch.compile` with freezing still uses MKL for so few rows, and
`torch.utils.mkldnn` converts weights at every call. So this file, and no other, calls private operators of torch.

A packed weight is still the layer's `weight`, with its shape and dtype, but it cannot be read in part: `plain_weight`
reads it. State dicts, copies and pickles are plain. No weight is held twice, except one that is also an embedding:
rows are looked up in the plain copy. A model that may differ by a rounding can have its weights in float16 instead
(`halve_weights`), which halves the bytes to read. This file is pushed to the Hub beside `modeling_clover.py`.
"""

from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn import functional as F

LEAST_WEIGHTS = 2**18  # weights of a layer, at least: a smaller product takes no longer than the call of the operator
ROWS = 8  # rows that the packed order is chosen for; it was the fastest order for 1 to 24 rows
_OPERATORS = ("_reorder_linear_weight", "_linear_pointwise")
_HALVING_OPERATORS = ("linear_prepack_fp16", "linear_dynamic_fp16")


def multiplies_bfloat16_fast(device: torch.device) -> bool:
    """Whether `device` has instructions for bfloat16. A CPU without them emulates bfloat16, twenty to fifty times
    slower than float32."""
    if device.type != "cpu":
        return True
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(known.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


class HalvedLinear(nn.Module):
    """A linear layer with its weight in float16, in FBGEMM's own order. Input and output are float32; only the weight
    is rounded. The layer cannot be trained, and its weight cannot be read back."""

    dtype = torch.float32

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else nn.Parameter(bias.detach().float(), requires_grad=False)
        range_ = torch.finfo(torch.float16)
        weight = weight.detach().float().clamp(range_.min, range_.max).contiguous()
        self.halved = torch.ops.quantized.linear_prepack_fp16(weight, self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x, self.halved)


def linear(x: torch.Tensor, weight: torch.Tensor | HalvedLinear, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `F.linear`, for plain, packed and halved weights. A halved weight holds its own bias."""
    if isinstance(weight, HalvedLinear):
        return weight(x)
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError(
            "the input of a packed linear layer requires a gradient, and packed layers compute none: run it under "
            "`torch.no_grad()`, or undo the packing with `hf_clover.unpack(model)`."
        )
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def packed(weight: torch.Tensor) -> torch.Tensor:
    """`weight` in the form that `linear` multiplies fastest: packed, or unchanged if it is small."""
    if weight.numel() < LEAST_WEIGHTS:
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS)


class PackedLinear(nn.Linear):
    """A linear layer whose `weight` is packed."""

    tied: nn.Parameter | None  # the plain weight, if an embedding shares it
    required_grad: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)

    def plain(self) -> nn.Parameter:
        return self.tied if self.tied is not None else nn.Parameter(self.weight.to_dense(), self.required_grad)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.plain() if keep_vars else self.plain().detach()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("packed layers take no other weights: call `hf_clover.unpack(model)` before loading any.")

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """Copies and pickles are plain linear layers."""
        state = {name: value for name, value in vars(self).items() if name not in PackedLinear.__annotations__}
        state["_parameters"] = self._parameters | {"weight": self.plain()}
        return object.__new__, (nn.Linear,), state


def is_packed(module: nn.Module | None) -> TypeGuard[PackedLinear]:
    return isinstance(module, PackedLinear)


def plain_weight(module: nn.Module | None) -> Any:
    """`module.weight` in readable form: a copy if it is packed, None if there is none."""
    return module.plain() if is_packed(module) else getattr(module, "weight", None)


def pack_for_cpu(model: nn.Module) -> int:
    """Pack the linear layers of a target or of heads for inference on a CPU, in place.

    Generated tokens are those of the packed model, whose logits differ from the plain model's in the last bits. A
    model may be packed in float32, and in bfloat16 if the processor has instructions for it. Other kinds of layers,
    such as quantised ones, stay as they are. Pack heads only if their target is packed too.
    `hf_clover.unpack(model)` undoes the packing.

    Args:
        model (`torch.nn.Module`):
            The target or the heads, in evaluation mode, on the CPU.

    Returns:
        `int`: how many layers were packed

    Example:

    ```python
    >>> import hf_clover
    >>> from transformers import AutoModelForCausalLM

    >>> model = AutoModelForCausalLM.from_pretrained("org/target")
    >>> hf_clover.pack_for_cpu(model)  # a tiny model, whose layers are too small to gain
    0
    ```
    """
    if model.training:
        raise ValueError(
            "`model` is in training mode, and packed weights cannot learn: call `model.eval()` before `pack_for_cpu`."
        )
    if getattr(model, "is_quantized", False):
        raise ValueError("`model` is quantised, and packing needs plain weights: load it without quantisation.")
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), []).append(module)
    layers = [module for module in model.modules() if type(module) is nn.Linear and "weight" in module._parameters]
    layers = [layer for layer in layers if layer.weight.numel() >= LEAST_WEIGHTS]
    for layer in layers:
        _check(layer.weight)
    done: dict[int, nn.Parameter] = {}  # layers may share a weight
    for layer in layers:
        weight = layer.weight
        is_tied = any(type(owner) is not nn.Linear for owner in owners[id(weight)])
        if id(weight) not in done:
            done[id(weight)] = nn.Parameter(packed(weight), requires_grad=False)
        vars(layer).update(tied=weight if is_tied else None, required_grad=weight.requires_grad)
        layer._parameters["weight"] = done[id(weight)]
        layer.__class__ = PackedLinear
    return len(layers)


def unpack(model: nn.Module) -> None:
    """Undo `pack_for_cpu`. A model that is not packed stays as it is.

    Args:
        model (`torch.nn.Module`):
            The model that was packed.

    Example:

    ```python
    >>> import hf_clover
    >>> import torch

    >>> layer = torch.nn.Linear(512, 512).eval()
    >>> weight = layer.weight.detach().clone()
    >>> hf_clover.pack_for_cpu(layer)
    1
    >>> hf_clover.unpack(layer)
    >>> torch.equal(layer.weight, weight)
    True
    ```
    """
    done: dict[int, nn.Parameter] = {}
    for layer in filter(is_packed, model.modules()):
        key = id(layer.weight)
        done[key] = layer._parameters["weight"] = done[key] if key in done else layer.plain()
        for name in PackedLinear.__annotations__:
            del vars(layer)[name]
        layer.__class__ = nn.Linear  # type: ignore[assignment]


def halve_weights(model: nn.Module) -> None:
    """Replace every large linear layer of `model` by one with weights in float16. This cannot be undone."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and layer.weight.numel() >= LEAST_WEIGHTS:
            model.set_submodule(name, HalvedLinear(plain_weight(layer), layer.bias))


def can_halve() -> bool:
    """Whether this torch and this processor multiply float32 by weights in float16."""
    is_there = all(hasattr(torch.ops.quantized, name) for name in _HALVING_OPERATORS)
    return is_there and torch.backends.quantized.engine in ("x86", "fbgemm")


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch and this processor pack weights of `dtype`."""
    is_there = not _absent() and torch.backends.mkldnn.is_available()
    return is_there and (dtype == torch.float32 or (dtype == torch.bfloat16 and _packs_bfloat16()))


def _absent() -> list[str]:
    return [f"torch.ops.mkldnn.{name}" for name in _OPERATORS if not hasattr(torch.ops.mkldnn, name)]


def _packs_bfloat16() -> bool:
    return getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", bool)()


def _check(weight: torch.Tensor) -> None:
    if weight.device.type != "cpu":
        raise ValueError(
            f"`model` has weights on {weight.device}, and packing is for a CPU: leave it out, or move the model with "
            '`model.to("cpu")`.'
        )
    absent = _absent()
    if absent or not torch.backends.mkldnn.is_available():
        what = " and ".join(absent) or "oneDNN (`torch.backends.mkldnn.is_available()` is False)"
        raise RuntimeError(f"`pack_for_cpu`: this build of torch lacks {what}. Leave packing out.")
    if not can_pack(weight.dtype):
        raise ValueError(
            f"`model` is in {weight.dtype}, which cannot be packed on this processor: load it in float32"
            f"{' or bfloat16' if _packs_bfloat16() else ''}."
        )


__all__ = [
    "HalvedLinear",
    "PackedLinear",
    "can_halve",
    "can_pack",
    "halve_weights",
    "is_packed",
    "linear",
    "multiplies_bfloat16_fast",
    "pack_for_cpu",
    "packed",
    "plain_weight",
    "unpack",
]
