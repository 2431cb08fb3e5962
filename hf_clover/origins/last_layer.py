"""The target's last decoder layer, as far as it is a Llama-style layer: the Augmenting Block starts as its copy.

Contract: `LastLayer(target)` returns the config fields that give the block this layer's shape (`block_fields`) and
copies its parts (`copy_into`). Names and shapes as in Llama do not prove that a part computes as in Llama. So each
half of the layer, attention and MLP, is tried, and is copied only if the copy computes what the target computes.
Attention sinks, other rotary embeddings, norms or residual streams therefore start with new weights, in unknown
architectures too. Nothing in the target is changed.

Shapes: T positions of the trial, d hidden size.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..network.configuration_clover import CloverConfig
from ..network.modeling_clover import AugmentingLayer, CloverHeads
from ..network.packing import is_packed, plain_weight
from ..network.target_parts import find_decoder, is_plain

# The public reference's layers always use this rotary base, whatever the target's rope settings are.
REFERENCE_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
TRIAL_LENGTH = 6  # tokens of the trial; fewer than any sliding window, which the Augmenting Block does not have
# Largest error, as a share of what a half adds to the residual stream. The rounding of quantised targets is a few
# percent; another kind of layer differs by a quarter or more, in every architecture seen.
TOLERANCE = 0.1

Linear = tuple[torch.Tensor, torch.Tensor | None]  # weight and bias


class LastLayer:
    @torch.no_grad()
    def __init__(self, target: PreTrainedModel) -> None:
        config = target.config.get_text_config(decoder=True)
        # If layers differ in more than their weights, each has its own config.
        self.config = config.per_layer_config[-1] if getattr(config, "is_heterogeneous", False) else config
        self.hidden_size = config.hidden_size
        _, layers, _ = find_decoder(target)
        layer = layers[-1] if layers is not None else nn.Module()
        children = dict(layer.named_children())
        self.attention = children.get("self_attn")
        self.mlp = children.get("mlp") or children.get("feed_forward")
        self.attention_norm = children.get("input_layernorm")
        self.mlp_norm = children.get("post_attention_layernorm")
        self.num_heads = getattr(self.config, "num_attention_heads", None) or _head_count(self.hidden_size)
        self.num_kv_heads = getattr(self.config, "num_key_value_heads", None) or self.num_heads
        self.head_dim = getattr(self.config, "head_dim", None) or self.hidden_size // self.num_heads
        # Two norms around each half (Gemma 2, OLMo 2) or a shared one (Phi, Cohere) mean another residual stream.
        extra_norms = any("feedforward" in name for name in children)
        self.is_sequential = self.attention_norm is not None and self.mlp_norm is not None and not extra_norms
        self.residual_factor = getattr(layer, "residual_multiplier", 1.0)  # Granite has one
        self.use_rope = bool(getattr(self.attention, "use_rope", True))
        self.qkvo: dict[str, Linear] | None = None
        self.gate_up_down: dict[str, Linear] | None = None
        if self.is_sequential and self.mlp_norm is not None:
            with evaluating(target):
                self.qkvo, self.gate_up_down = self._read_attention(), self._read_mlp()
                self._keep_what_computes_the_same(target, layer, self.mlp_norm)

    # ------------------------------------------------------------------ reading

    def _read_attention(self) -> dict[str, Linear] | None:
        """q_proj, k_proj, v_proj and o_proj, with fused projections split; None for another kind of attention."""
        module, rope = self.attention, self._rope()
        if module is None or not isinstance(rope.get("rope_theta", 1.0), int | float):
            return None
        if {getattr(self.config, "partial_rotary_factor", None), rope.get("partial_rotary_factor")} - {None, 1.0}:
            return None
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sizes = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        if hasattr(module, "qkv_proj"):
            parts = self._split(module.qkv_proj, sizes)
        else:
            parts = {name: self._linear(getattr(module, name, None)) for name in sizes}
        parts["o_proj"] = self._linear(getattr(module, "o_proj", None) or getattr(module, "dense", None))
        wanted = {name: (size, self.hidden_size) for name, size in sizes.items()}
        if not _shapes_match(parts, {**wanted, "o_proj": (self.hidden_size, q_size)}):
            return None
        scaling = getattr(module, "scaling", None)
        if isinstance(scaling, float):
            parts["q_proj"] = _times(scaling * self.head_dim**0.5, parts["q_proj"])
        parts["o_proj"] = _times(self.residual_factor, parts["o_proj"])
        return parts

    def _read_mlp(self) -> dict[str, Linear] | None:
        module = self.mlp
        together = getattr(module, "gate_up_proj", None)
        fused = self._linear(together)
        if fused is not None:
            half = fused[0].shape[0] // 2
            parts = self._split(together, {"gate_proj": half, "up_proj": half})
        else:
            parts = {name: self._linear(getattr(module, name, None)) for name in ("gate_proj", "up_proj")}
        parts["down_proj"] = self._linear(getattr(module, "down_proj", None))
        size = parts["gate_proj"][0].shape[0] if parts["gate_proj"] is not None else 0
        wide, narrow = (size, self.hidden_size), (self.hidden_size, size)
        if not _shapes_match(parts, {"gate_proj": wide, "up_proj": wide, "down_proj": narrow}):
            return None
        parts["down_proj"] = _times(self.residual_factor, parts["down_proj"])
        return parts

    def _linear(self, module: Any) -> Linear | None:
        """Weight and bias of a linear layer. For a quantised or LoRA-wrapped layer, they are computed from its
        outputs."""
        weight, bias = plain_weight(module), getattr(module, "bias", None)
        if (type(module) is nn.Linear or is_packed(module)) and is_plain(weight):
            return weight.detach(), None if bias is None else bias.detach()
        inputs, device = getattr(module, "in_features", None), getattr(weight, "device", None)
        if not isinstance(inputs, int) or device is None:
            return None
        basis = torch.eye(inputs, device=device, dtype=plain_weight(self.attention_norm).dtype)
        at_zero = module(torch.zeros_like(basis[:1]))  # [1, outputs]
        return (module(basis) - at_zero).T.contiguous(), None if bias is None else at_zero[0]

    def _split(self, module: Any, sizes: dict[str, int]) -> dict[str, Linear | None]:
        weight, bias = self._linear(module) or (torch.empty(0, dtype=torch.float32), None)
        if weight.shape[0] != sum(sizes.values()):
            return dict.fromkeys(sizes)
        weights = weight.split(list(sizes.values()))
        biases = [None] * len(sizes) if bias is None else bias.split(list(sizes.values()))
        return dict(zip(sizes, zip(weights, biases, strict=True), strict=True))

    @property
    def qk_norms(self) -> tuple[nn.Module | None, nn.Module | None]:
        """Norms of q and k, if each has one weight per dimension of a head, as in Qwen 3; otherwise two None."""
        q_norm, k_norm = getattr(self.attention, "q_norm", None), getattr(self.attention, "k_norm", None)
        sizes = [getattr(getattr(norm, "weight", None), "shape", None) for norm in (q_norm, k_norm)]
        return (q_norm, k_norm) if all(size == (self.head_dim,) for size in sizes) else (None, None)

    def _rope(self) -> dict[str, Any]:
        """Parameters of the layer's rotary embedding; some targets have one per kind of layer."""
        rope = getattr(self.config, "rope_parameters", None) or {}
        kinds = getattr(self.config, "layer_types", None) or [None]
        return dict(rope.get(kinds[-1]) or rope)

    # ------------------------------------------------------------------ trying

    def _keep_what_computes_the_same(self, target: PreTrainedModel, layer: nn.Module, middle: nn.Module) -> None:
        try:
            before, between, after = _watch(target, layer, middle)  # [1, T, d] each
        except Exception:  # for example, the target needs more than tokens: then keep the parts untried
            return
        if self.qkvo is not None and not self._computes("attention", before, between):
            self.qkvo = None
        if self.gate_up_down is not None and not self._computes("mlp", between, after):
            self.gate_up_down = None

    def _computes(self, half: str, x: torch.Tensor, expected: torch.Tensor) -> bool:
        if x.ndim != 3 or x.shape != expected.shape:  # several streams between the layers
            return False
        sizes = {"vocab_size": 2, "hidden_size": self.hidden_size}
        config = CloverConfig(**{**self.block_fields(), **sizes, "augmenting_block": half, "draft_depth": 1})
        layer = AugmentingLayer(config, 0)
        self._copy_into_layer(layer)
        embedding = LlamaRotaryEmbedding(config).to(x.device)  # type: ignore[arg-type]  # it reads what any config has
        rope = embedding(x, torch.arange(x.shape[1], device=x.device)[None])
        actual, _ = layer.to(x.device, x.dtype)(x, rope, None, None)
        # The first token is left out: its state is so large in some targets that rounding hides the rest.
        error, change = (actual - expected)[:, 1:].float().norm(), (expected - x)[:, 1:].float().norm()
        rounding = 4 * torch.finfo(x.dtype).eps * expected[:, 1:].float().norm()
        return bool(error <= TOLERANCE * change + rounding)

    # ------------------------------------------------------------------ giving

    def block_fields(self) -> dict[str, Any]:
        """The config fields that give the Augmenting Block this layer's shape."""
        config = self.config
        rope = self._rope() if self.qkvo is not None else {}
        eps = [getattr(config, n, None) for n in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")]
        width = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None)
        length = getattr(config, "max_position_embeddings", None)
        activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
        heads_divide = self.hidden_size % self.num_heads == 0
        fields: dict[str, Any] = {
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads if self.num_heads % self.num_kv_heads == 0 else self.num_heads,
            "decoder_num_heads": self.num_heads if heads_divide else 1,
            "head_dim": self.head_dim,
            "intermediate_size": width if isinstance(width, int) else 4 * self.hidden_size,
            "hidden_act": activation if isinstance(activation, str) and activation in ACT2FN else "silu",
            "rope_parameters": rope if {"rope_type", "rope_theta"} <= set(rope) else dict(REFERENCE_ROPE),
            "max_position_embeddings": length if isinstance(length, int) and length > 0 else 2048,
            "rms_norm_eps": next((float(e) for e in eps if e), 1e-5),
        }
        if self.qkvo is not None:
            fields["attention_bias"] = self.qkvo["q_proj"][1] is not None
            fields["attention_output_bias"] = self.qkvo["o_proj"][1] is not None
            fields["qk_norm"] = self.qk_norms[0] is not None
            fields["use_rope"] = self.use_rope
        elif self.num_heads * self.head_dim != self.hidden_size and heads_divide:
            fields["head_dim"] = self.hidden_size // self.num_heads
        if fields["head_dim"] % 2:
            fields["head_dim"] += 1  # rotary embeddings need pairs
        if self.gate_up_down is not None:
            fields["intermediate_size"] = self.gate_up_down["gate_proj"][0].shape[0]
            fields["mlp_bias"] = self.gate_up_down["gate_proj"][1] is not None
        return fields

    @torch.no_grad()
    def copy_into(self, heads: CloverHeads) -> list[str]:
        """Copy the layer into every layer of the block. Returns the parts that start with new weights, in words."""
        fresh: list[str] = []
        for layer in getattr(heads, "layers", ()):
            fresh = self._copy_into_layer(layer)
        return fresh

    def _copy_into_layer(self, layer: AugmentingLayer) -> list[str]:
        fresh = []
        if layer.self_attn is not None:
            norms = (layer.self_attn.q_norm, layer.self_attn.k_norm)
            has_norms = not isinstance(norms[0], nn.Identity)
            fits = has_norms == (self.qk_norms[0] is not None)
            if self.qkvo is not None and fits and _copy_linears(self.qkvo, layer.self_attn):
                for source, norm in zip((self.attention_norm, *self.qk_norms), (layer.input_layernorm, *norms)):
                    copy_norm(source, norm)
            else:
                fresh.append(f"attention ({self._why(self.attention)})")
        if layer.mlp is not None:
            if self.gate_up_down is not None and _copy_linears(self.gate_up_down, layer.mlp):
                copy_norm(self.mlp_norm, layer.post_attention_layernorm)
            else:
                fresh.append(f"MLP ({self._why(self.mlp)})")
        return fresh

    def _why(self, module: nn.Module | None) -> str:
        if module is None or not self.is_sequential:
            return "the target's layer is not norm, attention, norm, MLP in sequence"
        return f"{type(module).__name__} computes something else"


# ---------------------------------------------------------------------- helpers


def _head_count(hidden_size: int) -> int:
    """Number of attention heads for a target without attention: heads of size 64 if that divides, otherwise one."""
    return hidden_size // 64 if hidden_size % 64 == 0 else 1


def _times(factor: float, part: Linear) -> Linear:
    """A linear layer with `factor` times the output: targets may multiply after it, the Augmenting Block does not."""
    if math.isclose(factor, 1.0, rel_tol=1e-6):
        return part
    weight, bias = part
    return weight * factor, None if bias is None else bias * factor


def _shapes_match(parts: dict[str, Linear | None], wanted: dict[str, tuple[int, int]]) -> TypeGuard[dict[str, Linear]]:
    """Whether none of `parts` is None and each has the shape in `wanted`."""
    found = {name: None if part is None else tuple(part[0].shape) for name, part in parts.items()}
    return found == wanted


def _copy_linears(parts: dict[str, Linear], module: nn.Module) -> bool:
    """Copy all `parts` into `module`, or none if one does not fit: half a layer computes nothing useful."""
    for name, (weight, bias) in parts.items():
        ours = getattr(module, name)
        if ours.weight.shape != weight.shape or (ours.bias is None and bias is not None):
            return False
    for name, (weight, bias) in parts.items():
        ours = getattr(module, name)
        ours.weight.copy_(weight)
        if ours.bias is not None:
            ours.bias.copy_(torch.zeros_like(ours.bias) if bias is None else bias)
    return True


@torch.no_grad()
def copy_norm(source: nn.Module | None, norm: nn.Module) -> None:
    """Copy the scale of `source` to `norm`. A trial shows whether the source multiplies by its weight or, like
    Gemma's norms, by 1 + weight."""
    weight = getattr(source, "weight", None)
    if source is None or weight is None or weight.is_meta or weight.shape != norm.weight.shape:
        return
    probe = torch.linspace(-1.0, 1.0, weight.shape[0], dtype=torch.float32, device=weight.device).to(weight.dtype)
    unscaled = probe / probe.float().pow(2).mean().sqrt()
    actual = (source(probe[None]) - source(-probe[None]))[0].float() / 2  # without the bias of a LayerNorm
    one_plus = (actual - unscaled * (1 + weight)).abs().max() < (actual - unscaled * weight).abs().max()
    norm.get_parameter("weight").copy_(1 + weight if one_plus else weight)


def _watch(target: PreTrainedModel, layer: nn.Module, middle: nn.Module) -> list[torch.Tensor]:
    """For a short text, the input of `layer`, the input of its part `middle`, and its output: [1, T, d] each."""
    seen: dict[str, torch.Tensor] = {}

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        seen["before" if module is layer else "between"] = args[0] if args else kwargs["hidden_states"]

    def after(_: nn.Module, __: tuple, output: Any) -> None:
        seen["after"] = output[0] if isinstance(output, tuple) else output

    hooks = [module.register_forward_pre_hook(before, with_kwargs=True) for module in (layer, middle)]
    hooks.append(layer.register_forward_hook(after))
    vocabulary = target.config.get_text_config(decoder=True).vocab_size
    text = torch.arange(1, 1 + 7 * TRIAL_LENGTH, 7, device=target.device)[None] % vocabulary  # [1, T]
    try:
        target(input_ids=text, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [seen[name] for name in ("before", "between", "after")]


@contextmanager
def evaluating(target: nn.Module) -> Iterator[None]:
    """Within this block the target is in evaluation mode, without dropout."""
    modes = [(module, module.training) for module in target.modules()]
    target.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


__all__ = ["REFERENCE_ROPE", "LastLayer", "copy_norm", "evaluating"]
