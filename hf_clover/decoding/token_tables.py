"""A level of drafting with everything that depends on the token alone looked up instead of computed.

Contract: `stepper(heads)` gives a function that computes what `heads.step` does, its slow twin. It reads from a table
over the vocabulary what a token is to the decoder (its normalised key and its value for an Attention Decoder, its half
of the first product for a gated one) and its share of the output projector. The table is made when it is needed first,
and again when a weight has changed. A table larger than the heads themselves is not worth its memory: then, for heads
of other kinds, and where an adapter or a hook sits in the way, the function is `heads.step` itself.

Shapes: V vocabulary, d hidden size, w width of a gated decoder, `...` any leading dimensions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional as F

from ..modeling_clover import AttentionDecoder, CloverHeads
from ..packing import is_packed, linear, packed, plain_weight

Step = Callable[..., tuple[torch.Tensor, torch.Tensor]]  # with the arguments of `CloverHeads.step`

_tables: WeakKeyDictionary[CloverHeads, tuple[tuple[Any, ...], "TokenTables"]] = WeakKeyDictionary()


def stepper(heads: CloverHeads) -> Step:
    config = heads.config
    has_fc = config.output_projector == "fc"
    is_known = config.decoder in ("attention", "gated") and config.num_later_heads > 0
    if not is_known or (has_fc and not config.can_draft_beyond_heads):
        return heads.step
    decoder, projectors = heads.decoder, list(heads.fc) if has_fc else []
    is_gated = config.decoder == "gated"
    halved = [decoder.gate_up, *projectors] if is_gated else projectors
    looked_through = [decoder, *halved] if is_gated else [decoder, decoder.k, decoder.v, *halved]
    are_known = all(type(layer) is nn.Linear or is_packed(layer) for layer in halved)
    if not are_known or any(map(_is_watched, looked_through)):
        return heads.step
    width = 2 * (config.decoder_width if is_gated else config.hidden_size)
    size = config.vocab_size * (width + has_fc * config.hidden_size)
    if size > sum(parameter.numel() for parameter in heads.parameters()):
        return heads.step
    used = [heads.borrowed.embedding, *decoder.parameters(), *(p for fc in projectors for p in fc.parameters())]
    layers = [module for each in (decoder, *projectors) for module in each.modules()]
    orders = [module.order if is_packed(module) else None for module in layers]  # packed weights do not learn
    used = [tensor for tensor in used if not tensor.is_mkldnn]
    version = (*((tensor.data_ptr(), tensor._version, tensor.dtype) for tensor in used), *_norms(used), *orders)
    kept = _tables.get(heads)
    if kept is None or kept[0] != version:
        kept = version, TokenTables.of(heads)
        _tables[heads] = kept
    tables = kept[1]
    return lambda level, state, tokens, recalled=None: tables.step(heads, level, state, tokens, recalled)


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
    rows: torch.Tensor  # [V, 2 d] normalised key and value, or [V, 2 w]; with a projector d more: bias, embedding half
    decoder_half: torch.Tensor | None  # [2 w, d] what a gated decoder's first product does to the state
    state_half: torch.Tensor | None  # [d, d] what the projector does to the state

    @classmethod
    @torch.no_grad()
    def of(cls, heads: CloverHeads) -> "TokenTables":
        decoder, size = heads.decoder, heads.config.hidden_size
        tokens = torch.arange(heads.config.vocab_size, device=heads.device)
        embedding = heads.embed(tokens)  # [V, d]
        decoder_half = state_half = None
        if heads.config.decoder == "gated":
            decoder_half, rows = _halves(decoder.gate_up, embedding, size)
            parts = [rows]
        else:
            keys = decoder.k(embedding).unflatten(-1, (decoder.num_heads, -1))  # [V, heads, d / heads]
            parts = [F.normalize(keys, dim=-1, eps=decoder.eps).flatten(1), decoder.v(embedding)]
        if heads.config.output_projector == "fc":
            state_half, rows = _halves(heads.fc[0], embedding, size)
            parts.append(rows)
        return cls(torch.cat(parts, dim=1), decoder_half, state_half)

    def step(
        self,
        heads: CloverHeads,
        level: int,
        state: torch.Tensor,
        tokens: torch.Tensor,
        recalled: "torch.Tensor | None" = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if level == 0 and heads.config.decoder_position == "before":
            return heads.step(level, state, tokens)
        looked_up = F.embedding(tokens, self.rows)  # [..., 2 d or 2 w, and d more]
        if self.state_half is not None:
            looked_up, token_half = looked_up.split((looked_up.shape[-1] - state.shape[-1], state.shape[-1]), dim=-1)
        if self.decoder_half is not None:
            product = linear(heads.decoder.norm(state), self.decoder_half) + looked_up  # [..., 2 w]
            decoded = heads.decoder.add(state, product if recalled is None else product + recalled)  # [..., d]
        else:
            decoded = _attended(heads.decoder, state, *looked_up.chunk(2, dim=-1))  # [..., d]
        if self.state_half is not None:
            out = heads.head_norm(linear(decoded, self.state_half) + token_half)
        elif heads.config.output_projector == "none":
            out = heads.head_norm(decoded)
        else:
            out = heads.residual_blocks[level](decoded)
        return out, decoded if heads.config.regressive else state


def _attended(decoder: AttentionDecoder, state: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`AttentionDecoder.forward` from a normalised key and a value, [..., d] each."""
    per_head = (decoder.num_heads, -1)
    query = decoder.q(decoder.norm(state)).unflatten(-1, per_head)  # [..., heads, d / heads]
    length = torch.linalg.vector_norm(query, dim=-1, keepdim=True).clamp(min=decoder.eps)  # [..., heads, 1]
    gate = (query * key.unflatten(-1, per_head)).sum(-1, keepdim=True) / length  # [..., heads, 1]
    return state + decoder.activation(gate * value.unflatten(-1, per_head)).flatten(-2)


def _halves(layer: nn.Linear, embedding: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A linear layer of [state; token], as what it does to the state, and a table of what it adds for each token."""
    weight = plain_weight(layer)
    of_state = weight[:, :size].detach().clone()
    return packed(of_state) if is_packed(layer) else of_state, F.linear(embedding, weight[:, size:], layer.bias)
