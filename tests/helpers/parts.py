"""Exact twins, on any device, of the two kernels that attention in parts calls.

Shapes: B batch, K key heads, R rows, n nodes, C columns, D size of a head; S sequences among T tokens.
"""

import pytest
import torch

from hf_clover.decoding.target import long_texts


def among_nodes(query, key, value, bias, scale):
    """Of `efficient_attention`: outputs [..., R, D], and log-sum-exps [..., R]."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = query.to(wide) @ key.to(wide).mT * scale + bias  # [..., R, C]
    sums = scores.logsumexp(-1)
    return ((scores - sums[..., None]).exp() @ value.to(wide)).to(query.dtype), sums


def over_text(query, key, value, where, longest, scale):
    """Of `flash_attention_of_sequences`: outputs [S, R, D], and log-sum-exps [S, R]."""
    _, starts, lengths = where
    place = torch.arange(longest, device=query.device)  # [C]
    is_beyond = place >= lengths[:, None]  # [S, C]
    index = (starts[:-1, None] + place).masked_fill(is_beyond, 0)
    keys, values = (tokens[:, 0][index].masked_fill(is_beyond[..., None], 0) for tokens in (key, value))  # [S, C, D]
    bias = torch.zeros_like(is_beyond, dtype=query.dtype).masked_fill(is_beyond, -torch.inf)
    return among_nodes(query, keys, values, bias[:, None], scale)


@pytest.fixture
def kernels(monkeypatch):
    """Attention in parts with the twins, in every dtype. Call it to put other kernels there."""

    forget = long_texts._are_right_on.cache_clear

    def use(text=over_text, nodes=among_nodes):
        monkeypatch.setattr(long_texts, "flash_attention_of_sequences", text)
        monkeypatch.setattr(long_texts, "efficient_attention", nodes)
        forget()

    monkeypatch.setattr(long_texts, "has_attention_by_name", lambda query: True)
    use()
    yield use
    forget()
