"""EAGLE-3 heads (arXiv 2503.01840): the network alone.

The states of several of the target's layers are fused into one feature. A decoder layer reads the feature beside the
embedding of the token after it. For drafted tokens, the layer's own output replaces the feature.

Contract: that of `modeling_clover`, with the states of `config.layer_ids` side by side [B, T, a d'] as hidden states.
`forward` feeds the text's tokens at every step: step k at position t has seen the target's states up to t, and
continues from its own output of step k - 1. Drafting calls the parts one at a time: `features` and `advance` for
tokens of the text, `recycled` and `advance` for drafted tokens, `output` for the input of lm_head. This file is pushed
to the Hub beside `modeling_heads.py`.

Shapes: B batch, T positions, a layers that are read, d' the target's hidden size, d the heads', H query heads.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from .blocks import CloverAttention, CloverMLP, CloverRMSNorm
from .configuration_eagle3 import Eagle3Config
from .modeling_heads import CloverOutput, PathHeads, Rope, package


class UnrolledAttention(CloverAttention):
    """Attention over a text, and over the tokens that were drafted from each of its positions."""

    def unrolled(
        self, x: torch.Tensor, rope: Rope, visible: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
    ) -> torch.Tensor:
        """Step k of `forward`: position t sees the columns of the text (step 0) that are `visible` [1 or B, 1, T, T]
        and, in each later step, only itself.

        `keys` and `values` [B, H, T, head_dim] are those of the steps before; this step appends its own.
        """
        length, groups = x.shape[1], self.q_proj.out_features // self.k_proj.out_features
        per_head = (-1, self.head_dim)
        q = self.q_norm(self.q_proj(x).unflatten(-1, per_head)).transpose(1, 2)  # [B, H, T, head_dim]
        k = self.k_norm(self.k_proj(x).unflatten(-1, per_head)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, per_head).transpose(1, 2)
        if self.use_rope:
            q, k = apply_rotary_pos_emb(q, k, *rope)
        keys.append(k.repeat_interleave(groups, dim=1))
        values.append(v.repeat_interleave(groups, dim=1))
        text = q @ keys[0].transpose(2, 3)  # [B, H, T, T of the text]
        text = text.masked_fill(~visible[:, :, :length], torch.finfo(text.dtype).min)
        own = [(q * key[:, :, :length]).sum(-1, keepdim=True) for key in keys[1:]]  # [B, H, T, 1] each
        shares = (torch.cat((text, *own), dim=-1) * self.head_dim**-0.5).softmax(-1)
        out = shares[..., : text.shape[3]] @ values[0]  # [B, H, T, head_dim]
        for step, value in enumerate(values[1:], text.shape[3]):
            out = out + shares[..., step : step + 1] * value[:, :, :length]
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class Eagle3Layer(nn.Module):
    """A Llama-style decoder layer. The first layer reads pairs of token and feature."""

    def __init__(self, config: Eagle3Config, layer_idx: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.is_first, self.norm_before_residual = layer_idx == 0, config.norm_before_residual
        self.input_layernorm = CloverRMSNorm(size, eps)
        if self.is_first:
            self.hidden_norm = CloverRMSNorm(size, eps)
        self.self_attn = UnrolledAttention(config, layer_idx, inputs=2 * size if self.is_first else size)
        self.post_attention_layernorm = CloverRMSNorm(size, eps)
        self.mlp = CloverMLP(config)

    def forward(
        self, x: torch.Tensor, embedding: torch.Tensor, rope: Rope, mask: torch.Tensor | None, cache: Cache | None
    ) -> torch.Tensor:
        read, residual = self.before(x, embedding)
        return self.after(self.self_attn(read, rope, mask, cache)[0], residual)

    def unrolled(self, x: torch.Tensor, embedding: torch.Tensor, rope: Rope, *rest: Any) -> torch.Tensor:
        """`rest` as in `UnrolledAttention.unrolled`."""
        read, residual = self.before(x, embedding)
        return self.after(self.self_attn.unrolled(read, rope, *rest), residual)

    def before(self, x: torch.Tensor, embedding: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The input of attention, [B, T, 2 d] in the first layer, and the residual [B, T, d]."""
        if not self.is_first:
            return self.input_layernorm(x), x
        normed = self.hidden_norm(x)
        pair = torch.cat((self.input_layernorm(embedding), normed), dim=-1)
        return pair, normed if self.norm_before_residual else x

    def after(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        x = residual + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Heads(PathHeads):
    """
    EAGLE-3 heads for one target, made by `hf_clover.load_heads`, `from_pretrained` or `from_target`.

    Use them as [`CloverHeads`]: pass them to `generate` as `assistant_model`, train them with [`CloverTrainer`], save
    and push them. Further training does not change their own embedding and lm_head, if they have these.

    Args:
        config ([`Eagle3Config`]):
            The configuration of the heads.

    Example:

    ```python
    >>> from hf_clover import Eagle3Heads
    >>> from transformers import AutoModelForCausalLM

    >>> target = AutoModelForCausalLM.from_pretrained("org/target")
    >>> heads = Eagle3Heads.from_target(target, num_heads=4)  # new heads, not yet trained
    >>> len(heads.feature_layers)
    3
    ```
    """

    config: Eagle3Config
    config_class = Eagle3Config
    _no_split_modules = ["Eagle3Layer"]

    def build(self, config: Eagle3Config) -> None:
        size, eps, parts = config.hidden_size, config.rms_norm_eps, len(config.layer_ids)
        if config.norm_before_fc:
            self.input_norm = CloverRMSNorm(parts * config.target_hidden_size, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(CloverRMSNorm(config.target_hidden_size, eps) for _ in range(parts))
        self.fc = nn.Linear(parts * config.target_hidden_size, size, bias=False)
        self.layers = nn.ModuleList(Eagle3Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = CloverRMSNorm(size, eps)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        if config.own_lm_head:
            self.lm_head = nn.Linear(size, config.draft_vocab_size or config.vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)  # type: ignore[arg-type]  # it reads what any config has

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return tuple(self.config.layer_ids)

    # ------------------------------------------------------------------ the parts of a step

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids) if self.config.own_embedding else super().embed(input_ids)

    def features(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[B, T, a d'] -> [B, T, d]: the features, which are read beside the text's tokens."""
        x = hidden_states.to(self.dtype)
        if self.config.norm_before_fc:
            x = self.input_norm(x)
        if self.config.fc_norm:
            chunks = x.chunk(len(self.fc_norm), dim=-1)
            x = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(x)

    def advance(
        self,
        features: torch.Tensor,
        input_ids: torch.Tensor,
        rope: Rope,
        mask: torch.Tensor | None,
        cache: Cache | None,
    ) -> torch.Tensor:
        """Features [B, T, d] and the tokens after them [B, T] -> the states [B, T, d] that predict the next token."""
        x, embedding = features, self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, embedding, rope, mask, cache)
        return x

    def recycled(self, states: torch.Tensor) -> torch.Tensor:
        """[..., d] -> [..., d]: states as they replace features beside drafted tokens."""
        return self.norm(states) if self.config.norm_output else states

    def output(self, states: torch.Tensor) -> torch.Tensor:
        """[..., d] -> [..., d]: the input of lm_head."""
        return self.norm(states)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(x) if self.config.own_lm_head else super().score(x)

    # ------------------------------------------------------------------ training

    def forward(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> CloverOutput | tuple[torch.Tensor, ...]:
        """Teacher-forced: `head_outputs[k]` at position t guesses the token at t + 2 + k. `attention_mask` [B, T] is
        0 at padding; `position_ids` [B, T] start from 0 at each packed document."""
        if hidden_states.shape[:2] != input_ids.shape:
            raise ValueError(
                f"`input_ids` {tuple(input_ids.shape)} must have one token per position of `hidden_states` "
                f"{tuple(hidden_states.shape)}: input_ids[:, t] is the token that follows hidden_states[:, t]."
            )
        length, device = input_ids.shape[1], input_ids.device
        order = torch.arange(length, device=device)
        visible = (order <= order[:, None])[None, None]  # [1, 1, T, T]
        if position_ids is None:
            position_ids = order[None]  # [1, T]
        else:
            documents = (position_ids == 0).cumsum(1)  # [B, T]
            visible = visible & (documents[:, None, :, None] == documents[:, None, None, :])
        if attention_mask is not None:  # padding sees itself, so that no row is empty
            itself = (order == order[:, None])[None, None]
            visible = visible & (attention_mask.bool()[:, None, None, :] | itself)
        states, outputs = self.features(hidden_states), []
        steps: list[list[list[torch.Tensor]]] = [[[], []] for _ in self.layers]
        for step in range(min(self.config.num_heads, length)):
            rows = length - step
            rope = self.rotary_emb(states, position_ids[:, :rows] + step)  # [1 or B, T - step, head_dim] each
            x, embedding = states[:, :rows], self.embed(input_ids[:, step:])  # [B, T - step, d]
            for layer, kept in zip(self.layers, steps, strict=True):
                x = layer.unrolled(x, embedding, rope, visible, *kept)  # type: ignore[operator]
            outputs.append(F.pad(self.output(x), (0, 0, 0, step)))
            states = self.recycled(x)
        outputs += [torch.zeros_like(outputs[0])] * (self.config.num_heads - len(outputs))
        output = CloverOutput(head_outputs=torch.stack(outputs), state=None)
        return output if return_dict else output.to_tuple()

    # ------------------------------------------------------------------ making, generating

    @classmethod
    def from_target(cls, target: nn.Module, **fields: Any) -> "Eagle3Heads":
        """Make new heads, on the target's device and in its dtype. They read a low, a middle and a high layer.

        Args:
            target (`PreTrainedModel`):
                A complete decoder-only model.
            fields:
                Any field of `Eagle3Config`.

        Returns:
            `Eagle3Heads`: heads that change no token and guess few of them, until they are trained
        """
        return package("origins.from_target").eagle3_from_target(cls, target, fields)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *args: Any,
        target: nn.Module | None = None,
        layer_ids: Sequence[int] | None = None,
        allow_pickle: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As `PreTrainedModel.from_pretrained`. It also reads the formats that `hf_clover.load_heads` reads; `target`,
        `layer_ids` and `allow_pickle` are arguments of that function."""
        reading = (target, layer_ids, allow_pickle)
        with contextlib.suppress(ImportError):  # remote code may run without the package, which reads these formats
            published = package("origins.published")
            if "config" not in kwargs and published.is_of_others(pretrained_model_name_or_path, kwargs):
                return published.load_heads(pretrained_model_name_or_path, *reading, **kwargs)
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)


Eagle3Heads.register_for_auto_class("AutoModel")

__all__ = ["Eagle3Heads"]
