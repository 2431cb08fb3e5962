"""A level of drafting with everything that depends on the token alone looked up instead of computed.

Contract: `stepper(heads)` gives a function that computes what `heads.step` does, its slow twin. For heads with an
Attention Decoder it reads the token's normalised key, its value and its share of the output projector from one table
over the vocabulary, made when it is first needed and again when a weight has changed. A table larger than the heads
themselves is not worth its memory: then, for heads of other kinds, and where an adapter or a hook sits in the way, it
is `heads.step` itself.

Shapes: V vocabulary, d hidden size, `...` any leading dimensions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional as F

from ..modeling_clover import CloverHeads

Step = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

_tables: WeakKeyDictionary[CloverHeads, tuple[tuple[Any, ...], "TokenTables"]] = WeakKeyDictionary()


def stepper(heads: CloverHeads) -> Step:
    config = heads.config
    has_fc = config.output_projector == "fc"
    if config.decoder != "attention" or config.num_later_heads == 0 or (has_fc and not config.can_draft_beyond_heads):
        return heads.step
    looked_through = (heads.decoder, heads.decoder.k, heads.decoder.v, *(heads.fc if has_fc else ()))
    if (has_fc and type(heads.fc[0]) is not nn.Linear) or any(map(_is_watched, looked_through)):
        return heads.step
    size = config.vocab_size * config.hidden_size * (2 + has_fc)
    if size > sum(parameter.numel() for parameter in heads.parameters()):
        return heads.step
    used = [heads.borrowed.embedding, *heads.decoder.parameters(), *(heads.fc.parameters() if has_fc else ())]
    version = (*((tensor.data_ptr(), tensor._version, tensor.dtype) for tensor in used), *_norms(used))
    kept = _tables.get(heads)
    if kept is None or kept[0] != version:
        kept = version, TokenTables.of(heads)
        _tables[heads] = kept
    tables = kept[1]
    return lambda level, state, tokens: tables.step(heads, level, state, tokens)


@torch.no_grad()
def _norms(tensors: list[torch.Tensor]) -> list[float]:
    """Fused optimizers change a weight without a new version, and a step of training changes its norm."""
    norms = [
        torch.linalg.vector_norm(tensor.detach(), dtype=torch.promote_types(tensor.dtype, torch.float32))
        for tensor in tensors
    ]
    return torch.stack([norm.to(norms[0]) for norm in norms]).tolist()


def _is_watched(module: nn.Module) -> bool:
    """Whether somebody's hooks want to see every call."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


@dataclass
class TokenTables:
    rows: torch.Tensor  # [V, 2 d or 3 d]: normalised key, value and, with a projector, its bias and embedding half
    state_half: torch.Tensor | None  # [d, d] what the projector does to the state

    @classmethod
    @torch.no_grad()
    def of(cls, heads: CloverHeads) -> "TokenTables":
        decoder, size = heads.decoder, heads.config.hidden_size
        tokens = torch.arange(heads.config.vocab_size, device=heads.device)
        embedding = heads.embed(tokens)  # [V, d]
        keys = decoder.k(embedding).unflatten(-1, (decoder.num_heads, -1))  # [V, heads, d / heads]
        parts = [F.normalize(keys, dim=-1, eps=decoder.eps).flatten(1), decoder.v(embedding)]
        if heads.config.output_projector != "fc":
            return cls(torch.cat(parts, dim=1), None)
        fc = heads.fc[0]
        parts.append(F.linear(embedding, fc.weight[:, size:], fc.bias))
        return cls(torch.cat(parts, dim=1), fc.weight[:, :size].detach().clone())

    def step(
        self, heads: CloverHeads, level: int, state: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if level == 0 and heads.config.decoder_position == "before":
            return heads.step(level, state, tokens)
        decoder, size = heads.decoder, heads.config.hidden_size
        looked_up = F.embedding(tokens, self.rows)  # [..., 2 d or 3 d]
        key, value, *token_half = looked_up.split(size, dim=-1)  # [..., d] each
        per_head = (decoder.num_heads, -1)
        query = decoder.q(decoder.norm(state)).unflatten(-1, per_head)  # [..., heads, d / heads]
        length = torch.linalg.vector_norm(query, dim=-1, keepdim=True).clamp(min=decoder.eps)  # [..., heads, 1]
        gate = (query * key.unflatten(-1, per_head)).sum(-1, keepdim=True) / length  # [..., heads, 1]
        added = decoder.activation(gate * value.unflatten(-1, per_head))  # [..., heads, d / heads]
        decoded = state + added.flatten(-2)  # [..., d]
        if token_half:
            out = heads.head_norm(F.linear(decoded, self.state_half) + token_half[0])
        else:
            out = heads.residual_blocks[level](decoded)
        return out, decoded if heads.config.regressive else state
