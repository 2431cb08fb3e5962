"""EAGLE-3 (arXiv 2503.01840): features of three depths, no feature to imitate, and training as in drafting.

The hidden states of a low, a middle and a high layer are fused by a linear layer. A decoder layer takes the fused
feature beside the embedding of the next token, each normalised, as an input of twice the width; beyond the text, its
own output stands in for the fused feature. Training unrolls that as often as drafting would: at step j every position
goes on from its own output of step j - 1, attends to the text up to where it started and to its own drafted path, and
is charged soft cross-entropy, 0.8^j of it. The lm_head is the target's, frozen; the authors' code trains one of its
own over a part of the vocabulary, which needs more text than there is here.

Shapes: B batch, T positions, d hidden size, H query heads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hf_clover import CloverConfig
from hf_clover.decoding.target_run import TargetRun
from hf_clover.network.modeling_clover import CloverAttention, CloverMLP, CloverOutput, CloverRMSNorm
from hf_clover.network.target_parts import find_decoder, unwrap
from hf_clover.training.teacher import Teacher

from .drafting import EagleHeads, Rope

UNROLLED = 7  # steps, as in the authors' code


# ---------------------------------------------------------------------- what it reads of the target


@contextmanager
def layer_inputs(target: PreTrainedModel) -> Iterator[list[list[torch.Tensor]]]:
    """Within, each forward appends the hidden states [B, T, d] that enter a low, a middle and a high layer."""
    _, layers, _ = find_decoder(unwrap(target))
    depth = len(layers)
    captured: list[list[torch.Tensor]] = [[], [], []]
    places = (min(2, depth - 1), depth // 2, max(depth - 3, 0))

    def keep(place: list[torch.Tensor]) -> Any:
        return lambda _, args, kwargs: place.append(args[0] if args else kwargs["hidden_states"])

    hooks = [
        layers[layer].register_forward_pre_hook(keep(place), with_kwargs=True)
        for layer, place in zip(places, captured, strict=True)
    ]
    try:
        yield captured
    finally:
        for hook in hooks:
            hook.remove()


class FeatureRun(TargetRun):
    """`hidden` [B, n, 4 d]: low, middle, high, and what enters the final norm."""

    @contextmanager
    def open(self) -> Iterator["FeatureRun"]:
        with layer_inputs(self.target) as self._of_layers, super().open():
            yield self

    def _take_hidden(self) -> torch.Tensor:
        parts = [torch.cat(place, dim=1) for place in self._of_layers]
        for place in self._of_layers:
            place.clear()
        return torch.cat((*parts, super()._take_hidden()), dim=-1)


class FeatureTeacher(Teacher):
    """The same in training."""

    @property
    def state_size(self) -> int:
        return 4 * super().state_size

    def hidden_states(self, inputs: Any) -> torch.Tensor:
        with layer_inputs(self.model) as captured:
            last = super().hidden_states(inputs)  # [B, T, d]
        return torch.cat((*(place[0].to(last.device) for place in captured), last), dim=-1)  # [B, T, 4 d]

    def final_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().final_states(hidden_states[..., -self.heads.config.hidden_size :])


# ---------------------------------------------------------------------- the network


class PairAttention(CloverAttention):
    """Attention whose input is twice as wide as its output."""

    def __init__(self, config: CloverConfig) -> None:
        super().__init__(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self, name)
            setattr(self, name, nn.Linear(2 * narrow.in_features, narrow.out_features, bias=narrow.bias is not None))

    def unrolled(
        self, x: torch.Tensor, rope: Rope, keys: list[torch.Tensor], values: list[torch.Tensor]
    ) -> torch.Tensor:
        """Step j of training: position t sees the text up to t (step 0) and, of each later step, itself.

        `keys` and `values` [B, H, T, head_dim] of the steps before; those of this step are appended.
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
        later = torch.ones(text.shape[2:], dtype=torch.bool, device=x.device).triu(1)
        own = [(q * key[:, :, :length]).sum(-1, keepdim=True) for key in keys[1:]]  # [B, H, T, 1] each
        scores = torch.cat((text.masked_fill(later, -torch.inf), *own), dim=-1) * self.head_dim**-0.5
        shares = scores.softmax(-1)
        out = shares[..., : text.shape[3]] @ values[0]  # [B, H, T, head_dim]
        for step, value in enumerate(values[1:]):
            place = text.shape[3] + step
            out = out + shares[..., place : place + 1] * value[:, :, :length]
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class Eagle3(EagleHeads):
    name = "eagle-3"
    fields = dict(num_heads=UNROLLED, draft_depth=8, num_augmenting_layers=1, decoder="none", decoder_position="after")
    training_arguments = dict(hidden_loss_weight=0.0, loss_decay=0.8)
    run, teacher = FeatureRun, FeatureTeacher

    def build(self, config: CloverConfig) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fuse = nn.Linear(3 * size, size, bias=False)
        self.token_norm, self.feature_norm = CloverRMSNorm(size, eps), CloverRMSNorm(size, eps)
        self.attention = PairAttention(config)
        self.mlp_norm, self.mlp = CloverRMSNorm(size, eps), CloverMLP(config)
        self.norm = CloverRMSNorm(size, eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def features(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.fuse(hidden_states[..., : 3 * self.config.hidden_size])

    def pairs(self, features: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        """[B, T, 2 d]"""
        return torch.cat((self.token_norm(self.embed(input_ids)), self.feature_norm(features)), dim=-1)

    def advance(
        self,
        features: torch.Tensor,
        input_ids: torch.Tensor,
        rope: Rope,
        mask: torch.Tensor | None,
        cache: Cache | None,
    ) -> torch.Tensor:
        attended, _ = self.attention(self.pairs(features, input_ids), rope, mask, cache)
        x = features + attended
        return x + self.mlp(self.mlp_norm(x))

    def output(self, features: torch.Tensor) -> torch.Tensor:
        return self.norm(features)

    def forward(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> CloverOutput | tuple[torch.Tensor, ...]:
        """Teacher-forced, as our heads: output i of position t guesses the token at t + 2 + i."""
        if position_ids is not None:
            raise ValueError("`packing=True`: this rival is trained on samples apart, padded on the right.")
        length, device = input_ids.shape[1], input_ids.device
        rope = self.rotary_emb(hidden_states, torch.arange(length, device=device)[None])  # [1, T, head_dim]
        features, outputs = self.features(hidden_states.to(self.dtype)), []
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for step in range(min(self.config.num_heads, length)):
            rows, there = length - step, tuple(part[:, step:] for part in rope)
            features = features[:, :rows]  # [B, T - step, d]
            pairs = self.pairs(features, input_ids[:, step:])
            x = features + self.attention.unrolled(pairs, there, keys, values)
            features = x + self.mlp(self.mlp_norm(x))
            outputs.append(F.pad(self.output(features), (0, 0, 0, step)))
        missing = self.config.num_heads - len(outputs)
        outputs += [torch.zeros_like(outputs[0])] * missing
        output = CloverOutput(head_outputs=torch.stack(outputs), state=None)
        return output if return_dict else output.to_tuple()
