"""Heads made from something else: from a target, or from a checkpoint of the papers' public reference.

Contract: both functions return bound `CloverHeads` on the target's device and in its dtype. A part of the target's
last layer is copied where it corresponds to a part of the Augmenting Block; what does not correspond keeps its fresh
initialisation and is named in one log line.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from .configuration_clover import CloverConfig
from .modeling_clover import AugmentingLayer, CloverHeads
from .target_parts import find_decoder, fingerprint, readable_rows, unwrap

logger = logging.get_logger(__name__)

# The reference's layers always use this rotary base, whatever the target's rope settings are.
REFERENCE_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_REFERENCE_PREFIXES = {
    "clover_head_mlp_rnn.": "entry_decoder.",
    "clover_head_mlp_rnn2.": "decoder.",
    "clover_norm.": "norm.",
    "clover_head_norm.": "head_norm.",
    "clover_head_mlp.": "first_fc.",
    "clover_head_mlp2.": "fc.0.",
    "layers.": "layers.",
}
_REFERENCE_COPIES_OF_THE_TARGET = ("lm_head.weight", "clover_embed_tokens.weight")


def heads_from_target(
    cls: type[CloverHeads], target: PreTrainedModel, variant: str, fields: dict[str, Any]
) -> CloverHeads:
    model = unwrap(target)
    if model.config.is_encoder_decoder:
        raise ValueError(f"`target` is the encoder-decoder `{type(model).__name__}`: heads need a decoder-only model.")
    _, layers, norm = find_decoder(model)
    source = _LastLayer(layers[-1] if layers is not None else nn.Module(), model.config.get_text_config(decoder=True))
    config = CloverConfig(**{**source.block_fields(), "variant": variant, **_identity(model), **fields})
    heads = cls(config)
    fresh = source.copy_into(heads)
    _copy_final_norm(norm, heads)
    if fresh and config.has_augmenting_block:
        logger.info(
            f"Clover heads for `{type(model).__name__}`: the Augmenting Block copies the target's last layer, except "
            f"for what does not correspond and starts fresh: {'; '.join(fresh)}."
        )
    reference = model.get_output_embeddings()
    weight = getattr(reference, "weight", None)
    anchor = weight if weight is not None and weight.is_floating_point() else next(model.parameters())
    heads.to(device=anchor.device, dtype=anchor.dtype if anchor.is_floating_point() else model.dtype)
    return heads.bind(model)


def _identity(model: PreTrainedModel) -> dict[str, Any]:
    """The fields that say which target this is."""
    text_config = model.config.get_text_config(decoder=True)
    sizes = CloverConfig(vocab_size=text_config.vocab_size, hidden_size=text_config.hidden_size, num_attention_heads=1)
    rows = readable_rows(model.get_output_embeddings(), sizes)
    name = getattr(model.config, "name_or_path", None) or getattr(model, "name_or_path", None)
    return {
        "vocab_size": text_config.vocab_size,
        "hidden_size": text_config.hidden_size,
        "target_name_or_path": name or None,
        "target_revision": getattr(model.config, "_commit_hash", None),
        "target_fingerprint": None if rows is None else fingerprint(rows) or None,
    }


class _LastLayer:
    """The target's last decoder layer, read as a Llama-style layer as far as it is one."""

    def __init__(self, layer: nn.Module, config: Any) -> None:
        self.config, self.hidden_size = config, config.hidden_size
        children = dict(layer.named_children())
        self.attention = children.get("self_attn")
        self.mlp = children.get("mlp") or children.get("feed_forward")
        self.attention_norm = children.get("input_layernorm")
        self.mlp_norm = children.get("post_attention_layernorm")
        self.num_heads = getattr(config, "num_attention_heads", None) or _head_count(self.hidden_size)
        self.num_kv_heads = getattr(config, "num_key_value_heads", None) or self.num_heads
        self.head_dim = getattr(config, "head_dim", None) or self.hidden_size // self.num_heads
        # Two norms around each half (Gemma 2, OLMo 2) or a shared one (Phi, Cohere) mean another residual stream.
        extra_norms = any("feedforward" in name for name in children)
        self.is_sequential = self.attention_norm is not None and self.mlp_norm is not None and not extra_norms
        self.qkv = self._read_attention()
        self.gate_up_down = self._read_mlp()

    def _read_attention(self) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]] | None:
        """{q_proj, k_proj, v_proj, o_proj: (weight, bias)}, fused projections split; None where it is another kind."""
        module = self.attention
        rope = getattr(self.config, "rope_parameters", None) or {}
        if (
            module is None
            or not self.is_sequential
            or getattr(self.config, "partial_rotary_factor", 1.0) not in (None, 1.0)
        ):
            return None
        if not isinstance(rope.get("rope_theta", 1.0), int | float) or rope.get("partial_rotary_factor", 1.0) != 1.0:
            return None
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        if hasattr(module, "qkv_proj"):
            parts = _split(module.qkv_proj, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size})
        else:
            parts = {name: _linear(getattr(module, name, None)) for name in ("q_proj", "k_proj", "v_proj")}
        if parts is None:
            return None
        parts["o_proj"] = _linear(getattr(module, "o_proj", None) or getattr(module, "dense", None))
        wanted = {
            "q_proj": (q_size, self.hidden_size),
            "k_proj": (kv_size, self.hidden_size),
            "v_proj": (kv_size, self.hidden_size),
            "o_proj": (self.hidden_size, q_size),
        }
        return parts if _shapes_match(parts, wanted) else None

    def _read_mlp(self) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]] | None:
        module = self.mlp
        if module is None or not self.is_sequential:
            return None
        if hasattr(module, "gate_up_proj") and _linear(module.gate_up_proj) is not None:
            half = module.gate_up_proj.weight.shape[0] // 2
            parts = _split(module.gate_up_proj, {"gate_proj": half, "up_proj": half})
        else:
            parts = {name: _linear(getattr(module, name, None)) for name in ("gate_proj", "up_proj")}
        if parts is None or parts["gate_proj"] is None:
            return None
        parts["down_proj"] = _linear(getattr(module, "down_proj", None))
        size = parts["gate_proj"][0].shape[0]
        wide, narrow = (size, self.hidden_size), (self.hidden_size, size)
        return parts if _shapes_match(parts, {"gate_proj": wide, "up_proj": wide, "down_proj": narrow}) else None

    @property
    def qk_norms(self) -> tuple[nn.Module | None, nn.Module | None]:
        """Norms of q and k where they are one per head dimension, as in Qwen 3."""
        norms = tuple(getattr(self.attention, name, None) for name in ("q_norm", "k_norm"))
        sizes = [getattr(getattr(norm, "weight", None), "shape", None) for norm in norms]
        return norms if all(size == (self.head_dim,) for size in sizes) else (None, None)

    def block_fields(self) -> dict[str, Any]:
        """The config fields that give the Augmenting Block this layer's shape."""
        config, rope = self.config, dict(getattr(self.config, "rope_parameters", None) or {})
        if "rope_type" not in rope or "rope_theta" not in rope or self.qkv is None:
            rope = dict(REFERENCE_ROPE)
        eps = [getattr(config, n, None) for n in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")]
        width = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None) or 4 * self.hidden_size
        activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None) or "silu"
        heads_divide = self.hidden_size % self.num_heads == 0
        fields: dict[str, Any] = {
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads if self.num_heads % self.num_kv_heads == 0 else self.num_heads,
            "decoder_num_heads": self.num_heads if heads_divide else 1,
            "head_dim": self.head_dim,
            "intermediate_size": width if isinstance(width, int) else 4 * self.hidden_size,
            "hidden_act": activation,
            "rope_parameters": rope,
            "max_position_embeddings": getattr(config, "max_position_embeddings", None) or 2048,
            "rms_norm_eps": next((float(e) for e in eps if e), 1e-5),
        }
        if self.qkv is not None:
            fields["attention_bias"] = self.qkv["q_proj"][1] is not None
            fields["attention_output_bias"] = self.qkv["o_proj"][1] is not None
            fields["qk_norm"] = self.qk_norms[0] is not None
        elif self.num_heads * self.head_dim != self.hidden_size and heads_divide:
            fields["head_dim"] = self.hidden_size // self.num_heads
        if fields["head_dim"] % 2:
            fields["head_dim"] += 1  # rotary embeddings turn pairs
        if self.gate_up_down is not None:
            fields["intermediate_size"] = self.gate_up_down["gate_proj"][0].shape[0]
            fields["mlp_bias"] = self.gate_up_down["gate_proj"][1] is not None
        return fields

    @torch.no_grad()
    def copy_into(self, heads: CloverHeads) -> list[str]:
        """Copy into every layer of the block; returns what had to start fresh, in words."""
        fresh: list[str] = []
        for layer in getattr(heads, "layers", ()):
            fresh = self._copy_layer(layer)
        return fresh

    def _copy_layer(self, layer: AugmentingLayer) -> list[str]:
        fresh = []
        if layer.self_attn is not None:
            if self.qkv is not None and _copy_linears(self.qkv, layer.self_attn):
                _copy_norm(self.attention_norm, layer.input_layernorm)
                for norm, name in zip(self.qk_norms, ("q_norm", "k_norm"), strict=True):
                    if norm is not None:
                        _copy_norm(norm, getattr(layer.self_attn, name))
            else:
                fresh.append(f"attention ({_why(self.attention, self.is_sequential)})")
        if layer.mlp is not None:
            if self.gate_up_down is not None and _copy_linears(self.gate_up_down, layer.mlp):
                _copy_norm(self.mlp_norm, layer.post_attention_layernorm)
            else:
                fresh.append(f"MLP ({_why(self.mlp, self.is_sequential)})")
        return fresh


def _head_count(hidden_size: int) -> int:
    """Attention heads for a target that has none of its own: of size 64 where that divides."""
    return hidden_size // 64 if hidden_size % 64 == 0 else 1


def _why(module: nn.Module | None, is_sequential: bool) -> str:
    if module is None or not is_sequential:
        return "the target's layer is not attention, norm, MLP, norm in sequence"
    return f"{type(module).__name__} has other parts"


def _linear(module: Any) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """(weight, bias) of a linear layer whose numbers can be read; a LoRA wrapper gives its base layer's."""
    module = getattr(module, "base_layer", module)
    weight = getattr(module, "weight", None)
    if not isinstance(module, nn.Linear) or not weight.is_floating_point() or weight.ndim != 2:
        return None
    return weight.detach(), None if module.bias is None else module.bias.detach()


def _split(module: nn.Module, sizes: dict[str, int]) -> dict[str, Any] | None:
    fused = _linear(module)
    if fused is None or fused[0].shape[0] != sum(sizes.values()):
        return None
    weights = fused[0].split(list(sizes.values()))
    biases = [None] * len(sizes) if fused[1] is None else fused[1].split(list(sizes.values()))
    return dict(zip(sizes, zip(weights, biases, strict=True), strict=True))


def _shapes_match(parts: dict[str, Any], wanted: dict[str, tuple[int, int]]) -> bool:
    return all(parts[name] is not None and tuple(parts[name][0].shape) == shape for name, shape in wanted.items())


def _copy_linears(parts: dict[str, Any], module: nn.Module) -> bool:
    """All of them or none: half a layer of the target is no layer."""
    linears = {name: getattr(module, name) for name in parts}
    if any(linears[name].weight.shape != weight.shape for name, (weight, _) in parts.items()):
        return False
    for name, (weight, bias) in parts.items():
        linears[name].weight.copy_(weight)
        if linears[name].bias is not None:
            linears[name].bias.copy_(torch.zeros_like(linears[name].bias) if bias is None else bias)
    return True


@torch.no_grad()
def _copy_norm(source: nn.Module | None, norm: nn.Module) -> None:
    """The source's scale, read by what the module does: Gemma's norms multiply by 1 + weight."""
    weight = getattr(source, "weight", None)
    if weight is None or weight.is_meta or weight.shape != norm.weight.shape:
        return
    probe = torch.linspace(-1.0, 1.0, weight.shape[0], device=weight.device).to(weight.dtype)
    unscaled = probe / probe.float().pow(2).mean().sqrt()
    actual = source(probe[None])[0].float()
    one_plus = (actual - unscaled * (1 + weight)).abs().max() < (actual - unscaled * weight).abs().max()
    norm.weight.copy_(1 + weight if one_plus else weight)


def _copy_final_norm(source: nn.Module | None, heads: CloverHeads) -> None:
    """The closing norm and the norm before lm_head start as the target's final norm (its scale, for a LayerNorm)."""
    for name in ("norm", "head_norm"):
        if source is not None and hasattr(heads, name):
            _copy_norm(source, getattr(heads, name))


# ---------------------------------------------------------------------- the public reference's checkpoints


def heads_from_reference_checkpoint(
    cls: type[CloverHeads], folder: str | os.PathLike, target: PreTrainedModel, allow_pickle: bool
) -> CloverHeads:
    folder, model = Path(folder), unwrap(target)
    written = json.loads((folder / "config.json").read_text())
    if "clover" not in written:
        raise ValueError(f'`{folder}` is no reference checkpoint: its config.json has no "clover" section.')
    state, ignored = {}, []
    for name, tensor in _read_tensors(folder, allow_pickle).items():
        new_name = _translate(name)
        if new_name is None:
            ignored.append(name)
        else:
            state[new_name] = tensor
    unknown = sorted(set(ignored) - set(_REFERENCE_COPIES_OF_THE_TARGET))
    if unknown:
        raise ValueError(f"`{folder}` holds tensors that the reference does not have: {unknown[:5]}.")
    hidden_size, heads_count = written["hidden_size"], written["num_attention_heads"]
    config = CloverConfig(
        **{
            **_identity(model),
            "variant": "clover-2",
            "hidden_size": hidden_size,
            "vocab_size": written["vocab_size"],
            "num_heads": written["clover"]["num_heads"],
            "num_augmenting_layers": written["clover"]["num_layers"],
            "loss_decay": written["clover"].get("decay_coefficient", 0.7),
            "num_attention_heads": heads_count,
            "num_key_value_heads": written.get("num_key_value_heads", heads_count),
            "head_dim": written.get("head_dim") or hidden_size // heads_count,
            "intermediate_size": written["intermediate_size"],
            "hidden_act": written.get("hidden_act", "silu"),
            "rms_norm_eps": written.get("rms_norm_eps", 1e-6),
            "max_position_embeddings": written.get("max_position_embeddings", 2048),
            "rope_parameters": dict(REFERENCE_ROPE),
        }
    )
    heads = cls(config)
    problems = heads.load_state_dict(state, strict=False)
    missing = sorted(problems.missing_keys)
    if missing or problems.unexpected_keys:
        raise ValueError(
            f"`{folder}` does not fit: missing {missing[:5]}, unexpected {sorted(problems.unexpected_keys)[:5]}."
        )
    anchor = next(model.parameters())
    return heads.to(device=anchor.device, dtype=next(iter(state.values())).dtype).bind(model)


def _translate(name: str) -> str | None:
    for theirs, ours in _REFERENCE_PREFIXES.items():
        if name.startswith(theirs):
            rest = name.removeprefix(theirs)
            is_decoder = ours in ("entry_decoder.", "decoder.")
            return ours + (rest.replace("input_layernorm.", "norm.") if is_decoder else rest)
    return None


def _read_tensors(folder: Path, allow_pickle: bool) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    if safe := sorted(folder.glob("*.safetensors")):
        for file in safe:
            tensors.update(load_file(file))
        return tensors
    pickled = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    if not pickled:
        raise FileNotFoundError(f"`{folder}` holds no weights: neither *.safetensors nor *.bin, *.pt or *.pth.")
    if not allow_pickle:
        raise ValueError(
            f"`{folder}` holds its weights as a pickle ({pickled[0].name}). Convert it to safetensors, or pass "
            "`allow_pickle=True` to read it with torch's `weights_only=True`."
        )
    for file in pickled:
        tensors.update(torch.load(file, map_location="cpu", weights_only=True))
    return tensors


__all__ = ["heads_from_reference_checkpoint", "heads_from_target"]
