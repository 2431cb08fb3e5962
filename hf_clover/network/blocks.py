"""The parts of Clover heads: decoders that mix a token into the state, and the layers of the Augmenting Block.

Contract: modules built from a `CloverConfig`; they know nothing of targets, heads or drafting. This file is pushed to
the Hub beside `modeling_clover.py`. The attribute `start` of a linear layer names its first weights, if they are not
transformers' usual ones; `modeling_clover` reads it when it makes weights.

Shapes: B batch, T positions, C columns of keys, d hidden size, w width of a gated decoder, `...` any leading
dimensions.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from .configuration_clover import CloverConfig
from .configuration_heads import HeadsConfig

LONGEST_RUN = 4  # R: most tokens that are compared to find a place again
MOST_COMPARED = 1 << 24  # most pairs of a state and a column of its text that are compared at once


def started_linear(inputs: int, outputs: int, bias: bool, start: str | None) -> nn.Linear:
    """A linear layer whose first weights `start` names.

    "zero"; "noise"; "identity": [I ; 0] plus noise; "beside": [I ; R], where R is a random matrix that keeps the size
    of its input; "even": random, with outputs as large as the inputs; None: transformers' usual start."""
    linear = nn.Linear(inputs, outputs, bias=bias)
    linear.start = start  # type: ignore[assignment]  # read by `CloverHeads._init_weights`
    return linear


def layer_starts(config: HeadsConfig) -> tuple[str | None, str | None]:
    """`start` of a block layer's reading matrices and of its adding ones, unless it copies a layer of the target."""
    return ("even", "zero") if config.starts_at_nothing else (None, None)


class CloverRMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.get_default_dtype()))  # as torch's own layers do
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class AttentionDecoder(nn.Module):
    """Brings one token into the state: attention over a single key, so the gate is a cosine, not a softmax."""

    def __init__(self, config: CloverConfig) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.decoder_bias
        self.num_heads, self.eps = config.decoder_num_heads, config.rms_norm_eps
        self.norm = CloverRMSNorm(size, config.rms_norm_eps)
        first_paper = config.variant == "clover"
        self.q = started_linear(size, size, bias, "gaussian identity" if first_paper else "identity")
        self.k = started_linear(size, size, bias, "gaussian identity" if first_paper else "identity")
        self.v = started_linear(size, size, bias, "zero" if first_paper else "noise")
        self.activation = nn.SiLU() if config.decoder_activation == "silu" else nn.Identity()

    def forward(self, state: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        per_head = (self.num_heads, -1)
        q = self.q(self.norm(state)).unflatten(-1, per_head)  # [..., heads, d / heads]
        k = self.k(embedding).unflatten(-1, per_head)  # [..., heads, d / heads]
        v = self.v(embedding).unflatten(-1, per_head)  # [..., heads, d / heads]
        gate = F.cosine_similarity(q, k, dim=-1, eps=self.eps)  # [..., heads]
        return state + self.activation(gate[..., None] * v).flatten(-2)


class MLPDecoder(nn.Module):
    """An ablation that replaces the Attention Decoder: one gated layer reads state and token together."""

    def __init__(self, config: CloverConfig) -> None:
        super().__init__()
        self.norm = CloverRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.up = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.decoder_bias)
        self.down = started_linear(config.hidden_size, config.hidden_size, config.decoder_bias, "zero")

    def forward(self, state: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        return state + self.down(F.silu(self.up(torch.cat((self.norm(state), embedding), dim=-1))))


class GatedDecoder(nn.Module):
    """The cell of clover-x: one gated layer of [normalised state; token], plus what is recalled if that is given; its
    output is added to the state."""

    def __init__(self, config: CloverConfig) -> None:
        super().__init__()
        size, width, bias = config.hidden_size, config.decoder_width, config.decoder_bias
        self.norm = CloverRMSNorm(size, config.rms_norm_eps)
        self.gate_up = started_linear(2 * size, 2 * width, bias, "even")
        self.down = started_linear(width, size, bias, "zero")

    def forward(
        self, state: torch.Tensor, embedding: torch.Tensor, recalled: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`recalled` [..., 2 w] is added to the output of the first product."""
        gate_up = self.gate_up(torch.cat((self.norm(state), embedding), dim=-1))  # [..., 2 w]
        gate, up = (gate_up if recalled is None else gate_up + recalled).chunk(2, dim=-1)  # [..., w] each
        return state + self.down(F.silu(gate) * up)


class EntryProjector(nn.Module):
    """One linear layer of state and token, which may precede the Augmenting Block in place of a decoder.

    A random matrix turns the token's embedding at the start. Without it, an embedding that the target's lm_head shares
    would make every head guess the token that it was just given."""

    def __init__(self, config: CloverConfig) -> None:
        super().__init__()
        self.fc = started_linear(2 * config.hidden_size, config.hidden_size, True, "beside")

    def forward(self, state: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.cat((state, embedding), dim=-1))


class ResidualBlock(nn.Module):
    """Medusa's block: x + SiLU(Wx + b), where W starts at zero."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = started_linear(size, size, True, "zero")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.silu(self.linear(x))


class Searched(NamedTuple):
    """A text, prepared for drafts that look for earlier passages. Each of T states sees an unbroken stretch of its
    columns."""

    behind: torch.Tensor  # [B, 1, C] the token before each column, -1 for the first
    seen: torch.Tensor  # [1 or B, T, C] True at the columns that a state sees, except the first of them


def stretches(mask: torch.Tensor | None, tokens: torch.Tensor, states: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the last column [1 or B, T] that each of T `states` sees of the text `tokens` [B, C].

    `mask` [1 or B, 1, T, C]; None: the states are those of the last T columns, under a causal mask."""
    if mask is None:
        last = torch.arange(tokens.shape[1], device=tokens.device)[None, -states:]  # [1, T]
        return torch.zeros_like(last), last
    visible = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0  # [1 or B, T, C]; or else additive
    first = visible.byte().argmax(-1)  # [1 or B, T]
    return first, first + visible.sum(-1) - 1


def searched_text(tokens: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> tuple[Searched, torch.Tensor]:
    """The text for `followed`, and the runs [B, T, C] as `followed` counts them.

    `tokens` [B, C]: each was given with the state of its column and follows it. The runs end one token before the
    token that was given with a state's last column."""
    columns = torch.arange(tokens.shape[1], device=tokens.device)  # [C]
    seen = (columns > first[..., None]) & (columns <= last[..., None])  # [1 or B, T, C]
    searched = Searched(F.pad(tokens[:, None, :-1], (1, 0), value=-1), seen)
    runs = torch.zeros(len(tokens), *seen.shape[1:], dtype=torch.int32, device=tokens.device)
    for back in range(LONGEST_RUN - 1, 0, -1):
        place = last - back  # [1 or B, T]
        token = tokens.gather(1, place.clamp(min=0).expand(len(tokens), -1))
        runs = followed(searched, runs, torch.where(place < first, -2, token))
    return searched, runs


def followed(searched: Searched, runs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Length [B, T, C] of the run that ends with `tokens` [B, T] and is repeated right before each column, R at most.
    `runs` are the lengths without `tokens`."""
    same = (searched.behind == tokens[..., None]) & searched.seen
    return ((F.pad(runs[..., :-1], (1, 0)) + 1) * same).clamp_(max=LONGEST_RUN)


def last_place(runs: torch.Tensor) -> torch.Tensor:
    """The last column [B, T] behind the longest of `runs` [B, T, C], or -1."""
    count = runs.shape[2]
    columns = torch.arange(count, dtype=torch.int32, device=runs.device)
    best = torch.add(columns, runs, alpha=count).amax(-1)
    return torch.where(best < count, -1, best % count).long()


def places_along(
    text: torch.Tensor, mask: torch.Tensor | None, tokens: torch.Tensor, levels: int
) -> list[torch.Tensor]:
    """`last_place` [B, T] at each level of drafts that repeat the text itself, one from each of its last T columns.

    `tokens` [B, T] were given with these columns. Where a draft would reach beyond the text it finds nothing."""
    first, last = stretches(mask, text, tokens.shape[1])
    ahead = F.pad(tokens, (0, levels), value=-2)
    at_once = max(MOST_COMPARED // max(text.numel(), 1), 1)  # no [T, C] of a long text in memory
    found: list[list[torch.Tensor]] = [[] for _ in range(levels)]
    for start in range(0, tokens.shape[1], at_once):
        part = slice(start, start + at_once)
        searched, runs = searched_text(text, first[:, part], last[:, part])
        for level in range(levels):
            runs = followed(searched, runs, ahead[:, start + level :][:, : runs.shape[1]])
            found[level].append(last_place(runs))
    return [torch.cat(places, dim=1) for places in found]


def values_at(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """values [B, kv_heads, C, head_dim] of the columns `places` [B, T] -> [B, T, kv_heads head_dim]; zeros for -1."""
    _, heads, _, size = values.shape
    index = places[:, None, :, None]  # [B, 1, T, 1]
    found = values.gather(2, index.clamp(min=0).expand(-1, heads, -1, size))
    return torch.where(index < 0, 0, found).transpose(1, 2).flatten(-2)


class CloverAttention(nn.Module):
    def __init__(self, config: HeadsConfig, layer_idx: int, inputs: int | None = None) -> None:
        """`inputs`: width of the input, if that is not the hidden size."""
        super().__init__()
        self.layer_idx, self.head_dim, self.use_rope = layer_idx, config.head_dim, config.use_rope
        size, bias = config.hidden_size, config.attention_bias
        inputs = size if inputs is None else inputs
        read, add = layer_starts(config)
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = started_linear(inputs, queries, bias, read)
        self.k_proj = started_linear(inputs, keys, bias, read)
        self.v_proj = started_linear(inputs, keys, bias, read)
        self.o_proj = started_linear(queries, size, config.attention_output_bias, add)
        self.q_norm = CloverRMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = CloverRMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(
        self,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        cache: Cache | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output [B, T, d] and the values [B, kv_heads, C, head_dim]."""
        per_head = (-1, self.head_dim)
        q = self.q_norm(self.q_proj(x).unflatten(-1, per_head)).transpose(1, 2)  # [B, heads, T, head_dim]
        k = self.k_norm(self.k_proj(x).unflatten(-1, per_head)).transpose(1, 2)  # [B, kv_heads, T, head_dim]
        v = self.v_proj(x).unflatten(-1, per_head).transpose(1, 2)  # [B, kv_heads, T, head_dim]
        if self.use_rope:
            q, k = apply_rotary_pos_emb(q, k, *rope)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)  # [B, kv_heads, slots, head_dim]
        if mask is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)
        else:  # no fast kernel takes a mask and shared key heads: query heads of one key head become its rows
            groups = q.shape[1] // k.shape[1]
            rows = q.reshape(q.shape[0], k.shape[1], -1, self.head_dim)  # [B, kv_heads, groups T, head_dim]
            out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask.repeat(1, 1, groups, 1)).reshape(q.shape)
        return self.o_proj(out.transpose(1, 2).flatten(-2)), v


class CloverMLP(nn.Module):
    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        read, add = layer_starts(config)
        size, width, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = started_linear(size, width, bias, read)
        self.up_proj = started_linear(size, width, bias, read)
        self.down_proj = started_linear(width, size, bias, add)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class AugmentingLayer(nn.Module):
    """A Llama-style decoder layer, or one half of it where an ablation asks for that."""

    def __init__(self, config: CloverConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = self.mlp = None
        if config.augmenting_block in ("full", "attention"):
            self.input_layernorm = CloverRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.self_attn = CloverAttention(config, layer_idx)
        if config.augmenting_block in ("full", "mlp"):
            self.post_attention_layernorm = CloverRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.mlp = CloverMLP(config)

    def forward(
        self,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        cache: Cache | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output [B, T, d] and the attention's values [B, kv_heads, C, head_dim]."""
        values = None
        if self.self_attn is not None:
            attended, values = self.self_attn(self.input_layernorm(x), rope, mask, cache)
            x = x + attended
        if self.mlp is not None:
            x = x + self.mlp(self.post_attention_layernorm(x))
        return x, values


__all__ = [
    "AttentionDecoder",
    "AugmentingLayer",
    "CloverAttention",
    "CloverMLP",
    "CloverRMSNorm",
    "EntryProjector",
    "GatedDecoder",
    "MLPDecoder",
    "ResidualBlock",
    "Searched",
    "followed",
    "last_place",
    "places_along",
    "searched_text",
    "started_linear",
    "stretches",
    "values_at",
]
