"""The same model, wider and deeper: what a small model says at the cost of a large one.

Contract: `widen_target` and `widen_heads` give new models of a larger `Shape` that compute what the small ones do.
Extra width and layers write zero into the residual stream, extra pairs of a key's channels are zero, and all other
new weights are ordinary random numbers: every byte is moved and every product computed, while greedy tokens, and which
drafts are accepted, stay those of the small models. Exact up to rounding, for these reasons:

- A norm divides by the root of the *mean* square, and the extra channels are zeros that lower the mean. Its weight is
  scaled by sqrt(d / D) and eps by d / D, which gives the old quotient.
- With heads of m times the channels, rotary pair i turns as fast as the old one when it stands at place m * i; scores
  are divided by sqrt(m) more than before, so queries are scaled by sqrt(m).
- An extra id's row of lm_head is a weighted mean of the padding token's row and of another one, so its logit lies
  between theirs and never is the largest. For a trained model, whose padding token is never likely, these ids together
  also have next to no probability. Sampling is exact only as far as that goes; greedy decoding is exact.
- The gate of the papers' Attention Decoder is a cosine within each of its heads, so these keep their size, and there
  are more of them. (eps, which there only keeps a division by zero away, is scaled too.)

Shapes: d the old hidden size and D the new one, V the old vocabulary.
"""

import math
from copy import deepcopy
from dataclasses import asdict, dataclass

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hf_clover import CloverHeads
from hf_clover.network.target_parts import fingerprint

MOST_OF_ANOTHER_ROW = 0.1  # in an extra id's row of lm_head, beside the padding token's


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama, by the names of its config. Those of Llama 3 8B unless said otherwise."""

    hidden_size: int = 4096
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    intermediate_size: int = 14336
    vocab_size: int = 128256
    max_position_embeddings: int = 8192

    @classmethod
    def of(cls, config: PreTrainedConfig, **changes: int) -> "Shape":
        """The shape of a model, with changes."""
        return cls(**{name: getattr(config, name) for name in asdict(cls())} | changes)


@torch.no_grad()
def widen_target(
    target: PreTrainedModel, shape: Shape, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> PreTrainedModel:
    """A Llama of `shape` that says what `target` says. Made on its device, in its dtype: nothing larger exists."""
    old = target.config
    if old.model_type != "llama" or old.attention_bias or old.mlp_bias or old.tie_word_embeddings:
        raise ValueError(
            f"`target` is a `{type(target).__name__}` that is no Llama without biases and with an lm_head of its own: "
            "no other model can be widened here."
        )
    if old.num_hidden_layers > shape.num_hidden_layers:
        raise ValueError(f"`shape` has fewer layers than `target`, which has {old.num_hidden_layers}.")
    config = deepcopy(old)
    config.update({**asdict(shape), "rms_norm_eps": old.rms_norm_eps * old.hidden_size / shape.hidden_size})
    config.name_or_path = f"{old.name_or_path}-{shape.hidden_size}x{shape.num_hidden_layers}"
    with torch.device(device or target.device):
        wide = AutoModelForCausalLM.from_config(config, dtype=dtype or target.dtype)
    wide.generation_config = deepcopy(target.generation_config)
    places = _Places(old, shape)
    for layer_idx, layer in enumerate(wide.model.layers):
        if layer_idx < old.num_hidden_layers:
            _fill_layer(layer, target.model.layers[layer_idx], places)
        else:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    _fill_norm(wide.model.norm, target.model.norm, places)
    for new, its in ((wide.model.embed_tokens, target.model.embed_tokens), (wide.lm_head, target.lm_head)):
        new.weight[: old.vocab_size] = 0
        _put(new.weight, its.weight, torch.arange(old.vocab_size), places.residual)
    pad = target.generation_config.pad_token_id
    _fill_unlikely_rows(wide.lm_head.weight, old.vocab_size, 0 if pad is None else pad)
    return wide.eval()


@torch.no_grad()
def widen_heads(
    heads: CloverHeads, wide: PreTrainedModel, draft_vocab_size: int | None = None, **fields: int
) -> CloverHeads:
    """Heads for the widened target `wide` that draft what `heads` draft, on its device and in its dtype.

    Their blocks have the width of the target's layers. With `draft_vocab_size` they score the first ids only, which
    include all that the small model has. `fields` are further fields of their config.
    """
    old, shape = heads.config, Shape.of(wide.config)
    if old.attention_bias or old.attention_output_bias or old.mlp_bias or old.qk_norm or old.decoder == "mlp":
        raise ValueError(
            "`heads` have biases, norms of queries or an MLP as the decoder: these cannot be widened here."
        )
    if old.draft_vocab_size is not None:
        raise ValueError(f"`heads` have a draft vocabulary ({old.draft_vocab_size} ids): widen those that have none.")
    if draft_vocab_size is not None and draft_vocab_size < old.vocab_size:
        raise ValueError(f"`draft_vocab_size={draft_vocab_size}` leaves out some of the {old.vocab_size} real ids.")
    per_decoder_head = old.hidden_size // old.decoder_num_heads
    if shape.hidden_size % per_decoder_head:
        raise ValueError(f"`hidden_size={shape.hidden_size}` does not divide into gates of {per_decoder_head}.")
    sizes = {name: value for name, value in asdict(shape).items() if hasattr(old, name)}
    config = type(old)(
        **{
            **{name: value for name, value in old.to_dict().items() if name not in ("model_type", "dtype")},
            **sizes,
            "rms_norm_eps": old.rms_norm_eps * old.hidden_size / shape.hidden_size,
            "decoder_num_heads": shape.hidden_size // per_decoder_head,
            "decoder_width": math.ceil(old.decoder_width * shape.hidden_size / old.hidden_size),
            "draft_vocab_size": draft_vocab_size,
            "target_fingerprint": fingerprint(wide.lm_head.weight),
            "target_name_or_path": wide.config.name_or_path,
            **fields,
        }
    )
    with torch.device(wide.device):
        new = AutoModel.from_config(config, dtype=wide.dtype)
    new.generation_config = deepcopy(heads.generation_config)
    places = _Places(old, shape)
    for name, module in new.named_children():
        its = getattr(heads, name)
        if name == "layers":
            for layer, its_layer in zip(module, its, strict=True):
                _fill_layer(layer, its_layer, places)
        elif name == "decoder" and old.decoder == "gated":
            _fill_gated(module, its, places)
        elif name == "recalled":
            rows = _gate_and_up(heads.decoder, new.decoder)
            _fill_linear(module, its, rows, places.keys, rest_is_zero=True)
        elif name in ("entry_decoder", "decoder") and hasattr(its, "q"):
            _fill_norm(module.norm, its.norm, places)
            for part in ("q", "k"):
                _fill_linear(getattr(module, part), getattr(its, part), places.residual, places.residual)
            _fill_linear(module.v, its.v, places.residual, places.residual, rest_is_zero=True)
        elif name in ("norm", "head_norm"):
            _fill_norm(module, its, places)
        elif name in ("entry_decoder", "fc", "first_fc", "residual_blocks"):
            for linear, its_linear in zip(_linears(module), _linears(its), strict=True):
                has_token = its_linear.in_features == 2 * old.hidden_size
                columns = places.state_and_token if has_token else places.residual
                _fill_linear(linear, its_linear, places.residual, columns, rest_is_zero=True)
        elif name != "rotary_emb":
            raise ValueError(f"`heads` have a part `{name}` that cannot be widened here.")
    return new.eval().bind(wide)


# ---------------------------------------------------------------------- where the old channels are


class _Places:
    """For each kind of channel, the new index of every old one. `old` is the config of the target or of the heads."""

    def __init__(self, old: PreTrainedConfig, shape: Shape) -> None:
        for name in ("hidden_size", "intermediate_size", "vocab_size"):
            if getattr(old, name) > getattr(shape, name):
                raise ValueError(f"`{name}={getattr(shape, name)}` of the shape is less than {getattr(old, name)}.")
        kind = old.rope_parameters.get("rope_type", "default")
        if kind != "default":
            raise ValueError(f"rotary embeddings of type {kind!r} cannot be widened here: 'default' can.")
        self.stretch, rest = divmod(shape.head_dim, old.head_dim)
        if rest:
            raise ValueError(f"`head_dim={shape.head_dim}` of the shape must be a multiple of {old.head_dim}.")
        old_group = old.num_attention_heads // old.num_key_value_heads
        group = shape.num_attention_heads // shape.num_key_value_heads
        if group < old_group or shape.num_key_value_heads < old.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads={shape.num_attention_heads}` and `num_key_value_heads="
                f"{shape.num_key_value_heads}` of the shape must give at least {old.num_key_value_heads} key heads, "
                f"each with at least {old_group} query heads."
            )
        half = old.head_dim // 2
        pairs = torch.arange(half) * self.stretch
        channels = torch.cat((pairs, pairs + shape.head_dim // 2))  # [head_dim], within a head
        kv_heads = torch.arange(old.num_key_value_heads)
        heads = (kv_heads[:, None] * group + torch.arange(old_group)).flatten()  # a query head stays with its keys
        self.queries = (heads[:, None] * shape.head_dim + channels).flatten()
        self.keys = (kv_heads[:, None] * shape.head_dim + channels).flatten()
        self.old_key_heads = old.num_key_value_heads * shape.head_dim  # new channels of the heads that were there
        self.residual, self.inner = torch.arange(old.hidden_size), torch.arange(old.intermediate_size)
        self.state_and_token = torch.cat((self.residual, self.residual + shape.hidden_size))
        self.norm_scale = math.sqrt(old.hidden_size / shape.hidden_size)


def _fill_layer(new: nn.Module, old: nn.Module, places: _Places) -> None:
    """A layer of Llama or of the Augmenting Block, whose parts have the same names."""
    residual, inner = places.residual, places.inner
    if getattr(old, "self_attn", None) is not None:
        _fill_norm(new.input_layernorm, old.input_layernorm, places)
        its, attention = old.self_attn, new.self_attn
        _fill_linear(attention.q_proj, its.q_proj, places.queries, residual, scale=math.sqrt(places.stretch))
        attention.k_proj.weight[: places.old_key_heads] = 0
        _fill_linear(attention.k_proj, its.k_proj, places.keys, residual)
        _fill_linear(attention.v_proj, its.v_proj, places.keys, residual)
        _fill_linear(attention.o_proj, its.o_proj, residual, places.queries, rest_is_zero=True)
    if getattr(old, "mlp", None) is not None:
        _fill_norm(new.post_attention_layernorm, old.post_attention_layernorm, places)
        _fill_linear(new.mlp.gate_proj, old.mlp.gate_proj, inner, residual)
        _fill_linear(new.mlp.up_proj, old.mlp.up_proj, inner, residual)
        _fill_linear(new.mlp.down_proj, old.mlp.down_proj, residual, inner, rest_is_zero=True)


def _fill_gated(new: nn.Module, old: nn.Module, places: _Places) -> None:
    width = torch.arange(old.down.in_features)
    _fill_norm(new.norm, old.norm, places)
    _fill_linear(new.gate_up, old.gate_up, _gate_and_up(old, new), places.state_and_token)
    _fill_linear(new.down, old.down, places.residual, width, rest_is_zero=True)


def _gate_and_up(old: nn.Module, new: nn.Module) -> torch.Tensor:
    width = torch.arange(old.down.in_features)
    return torch.cat((width, width + new.down.in_features))


def _fill_linear(
    new: nn.Linear,
    old: nn.Linear,
    rows: torch.Tensor,
    columns: torch.Tensor,
    scale: float = 1.0,
    rest_is_zero: bool = False,
) -> None:
    if rest_is_zero:
        new.weight.zero_()
    _put(new.weight, old.weight * scale, rows, columns)
    if old.bias is not None:
        new.bias.zero_()
        new.bias[rows.to(new.bias.device)] = old.bias.to(new.bias)


def _fill_norm(new: nn.Module, old: nn.Module, places: _Places) -> None:
    new.weight[: len(old.weight)] = (old.weight.float() * places.norm_scale).to(new.weight)


def _put(new: torch.Tensor, old: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
    new[rows.to(new.device)[:, None], columns.to(new.device)] = old.to(new)


def _fill_unlikely_rows(weight: torch.Tensor, real: int, pad: int, block: int = 4096) -> None:
    """Rows from `real` on: mostly the padding token's, and a little of one of the others each."""
    for first in range(real, len(weight), block):
        rows = weight[first : first + block]
        share = torch.rand(len(rows), 1, device=weight.device, dtype=torch.float32) * MOST_OF_ANOTHER_ROW
        others = weight[torch.randint(real, (len(rows),), device=weight.device)].float()
        rows.copy_((1 - share) * weight[pad].float() + share * others)


def _linears(module: nn.Module) -> list[nn.Linear]:
    return [part for part in module.modules() if isinstance(part, nn.Linear)]
