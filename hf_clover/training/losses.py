"""The masks, losses and hits of training, as functions of tensors.

Contract: `head_losses` computes the loss of each head over the positions of a batch. It never holds more than a chunk
of `[positions, vocabulary]` in memory, whatever the vocabulary. The target's distribution of a chunk is made once for
all heads. A chunk's gradient is computed while its logits are in memory, which works because lm_head is frozen. Target
and heads score only ids that may be drafted. `tests/training/test_losses.py` has the same loss in a few plain lines
and compares the two in value and gradient.

Alignment, everywhere: the batch has tokens x[0..T]; the heads see positions t = 0..T-1 (the target's state at t and
the token x[t+1]). Head i at t predicts x[t+2+i], so it is compared with the target's distribution at position t+1+i.

This module does not know models, trainers, datasets or devices: the scoring function is passed in.

Shapes: B batch, T positions, d hidden size, K heads, V vocabulary, D ids that may be drafted (V if all may), C
positions of a chunk.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

TOP_K = 5  # hits are counted from top-1 to top-5
CHUNK_ELEMENTS = 1 << 25  # logits in one chunk: 128 MiB of float32, five times that at the peak
MISSED = TOP_K  # rank of a token that is not among the top-5

Score = Callable[[torch.Tensor], torch.Tensor]


# ------------------------------------------------------------------------------------------------ token losses
# Each takes a head's log-probabilities [..., D] and the target's probabilities of the same ids [..., D].


def soft_cross_entropy(log_q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return -(p * log_q).sum(-1)


def kl_divergence(log_q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Soft cross-entropy minus its smallest possible value: the same gradient, and zero for perfect heads."""
    return (torch.xlogy(p, p) - p * log_q).sum(-1)


def acceptance(log_q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """The negative log of the overlap, sum(min(p, q)): the probability that a token sampled from q is accepted.

    The log turns the product of a chain's probabilities into a sum, and keeps the gradient large if the overlap is
    small.
    """
    return -torch.minimum(log_q.exp(), p).sum(-1).clamp(min=torch.finfo(p.dtype).tiny).log()


TOKEN_LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "clover-2": soft_cross_entropy,
    "clover": soft_cross_entropy,
    "kl": kl_divergence,
    "acceptance": acceptance,
}
OF_THE_PAPERS = ("clover-2", "clover")  # count every position; the other losses only those that a draft would reach


# ------------------------------------------------------------------------------------------------ masks


def prediction_mask(labels: torch.Tensor, position_ids: torch.Tensor | None, num_heads: int) -> torch.Tensor:
    """labels [B, T+1], -100 at tokens that do not count -> [K, B, T]: which predictions of each head count.

    With `position_ids` [B, T+1] that restart at every packed document, nothing is predicted across a boundary.
    """
    batch, length = labels.shape
    mask = labels.new_zeros((num_heads, batch, max(length - 1, 0)), dtype=torch.bool)
    for head in range(num_heads):
        distance = head + 2
        counted = labels[:, distance:] != -100  # [B, T + 1 - distance]
        if position_ids is not None:
            counted = counted & (position_ids[:, distance:] - position_ids[:, :-distance] == distance)
        mask[head, :, : counted.shape[1]] = counted
    return mask


@torch.no_grad()
def tokens_inside_nucleus(
    target_states: torch.Tensor,
    input_ids: torch.Tensor,
    target_score: Score,
    vocab_size: int,
    top_k: int = 64,
    top_p: float = 0.8,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> torch.Tensor:
    """[B, T+1, d], [B, T+1] -> [B, T]: whether x[t+1] is inside the target's top-k and top-p at position t."""
    tokens = input_ids[:, 1:]  # [B, T]
    states = target_states[:, :-1].reshape(tokens.numel(), -1)  # [B * T, d]
    inside = torch.empty(tokens.numel(), dtype=torch.bool, device=tokens.device)
    for rows in _chunks(torch.arange(tokens.numel(), device=tokens.device), vocab_size, chunk_elements):
        probabilities = target_score(states[rows]).float().softmax(-1)  # [C, V]
        own = probabilities.gather(-1, tokens.reshape(-1, 1)[rows])  # [C, 1]
        above = probabilities > own  # [C, V]
        mass_above = torch.where(above, probabilities, 0).sum(-1)  # [C]
        inside[rows] = (above.sum(-1) < top_k) & (mass_above < top_p)
    return inside.view(tokens.shape)


def fed_tokens_mask(inside: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The paper's label mask. inside [B, T] -> [K, B, T]: whether every token fed to head i at t was inside."""
    mask = inside.new_zeros((num_heads, *inside.shape))
    length, kept = inside.shape[1], inside
    for head in range(num_heads):
        mask[head, :, : kept.shape[1]] = kept
        kept = kept[:, :-1] & inside[:, min(head + 1, length) :]  # [B, T - head - 1]
    return mask


# ------------------------------------------------------------------------------------------------ losses


@dataclass(frozen=True)
class LossTerms:
    """The loss of one position of one head: `hidden_weight * SmoothL1 + token_weight * TOKEN_LOSSES[token_loss]`.

    `score` returns the logits [..., D] of the `vocab_size` ids that may be drafted. It scores the heads, and also the
    target unless there is a `target_score`. The target's probabilities are normalised over these ids.
    """

    score: Score
    vocab_size: int
    token_loss: str = "clover-2"
    hidden_weight: float = 10.0
    token_weight: float = 1.0
    target_score: Score | None = None  # scores the target, if the heads have an lm_head of their own


def head_losses(
    head_outputs: torch.Tensor,
    target_states: torch.Tensor,
    mask: torch.Tensor,
    terms: LossTerms,
    draftable: torch.Tensor | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each head's loss summed over its positions, and the ranks of the target's choices.

    The loss of a position is 0 if the text's next token cannot be drafted. With `kl` and `acceptance`, head i has a
    loss only where each head before it had the target's choice among its five best. Elsewhere no draft reaches head i,
    so there is nothing to learn; in training, nothing is computed there.

    Args:
        head_outputs: [K, B, T, d], what each head feeds into lm_head.
        target_states: [B, T+1, d], what the target feeds into lm_head (its hidden states after the final norm).
        mask: [K, B, T], from `prediction_mask`.
        terms: the loss of a position.
        draftable: [B, T+1], whether x[t] may be drafted; None: every token may.
        chunk_elements: number of logits in one chunk.

    Returns:
        sums [K], differentiable in `head_outputs`, and ranks [K, B, T]: the place of the target's choice in the head's
        order, from 0 for a hit. The rank is `MISSED` from place 5 on, if the text's token cannot be drafted, and in
        training where nothing was computed.
    """
    return _HeadLosses.apply(head_outputs, target_states, mask, terms, draftable, chunk_elements)


class _HeadLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head_outputs: torch.Tensor,
        target_states: torch.Tensor,
        mask: torch.Tensor,
        terms: LossTerms,
        draftable: torch.Tensor | None,
        chunk_elements: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_heads, batch, length, size = head_outputs.shape
        outputs = head_outputs.detach().reshape(num_heads, batch * length, size)  # [K, B * T, d]
        states = target_states.detach().reshape(batch * (length + 1), size)  # [B * (T + 1), d]
        weights = head_outputs.new_zeros((num_heads, batch, length + 1), dtype=torch.bool)  # mask, by target position
        for head in range(num_heads):
            weights[head, :, head + 1 :] = mask[head, :, : max(length - head, 0)]
        weights = weights.flatten(1)  # [K, B * (T + 1)]
        needs_grad = ctx.needs_input_grad[0]
        sums = torch.zeros(num_heads, dtype=torch.float32, device=outputs.device)
        ranks = torch.zeros((num_heads, batch * length), dtype=torch.int32, device=outputs.device)
        grads = torch.zeros_like(outputs) if needs_grad else None

        for rows in _chunks(weights.any(0).nonzero().squeeze(-1), terms.vocab_size, chunk_elements):  # [C] each
            p, choice = _target_side(states[rows], terms)  # [C, D], [C]
            can_be_drafted = rows >= 0 if draftable is None else draftable.flatten()[rows + 1]  # [C]
            for head in range(num_heads):
                counted = weights[head, rows].nonzero().squeeze(-1)  # [N] of [C]
                position = rows[counted] % (length + 1) - 1 - head  # [N], t
                source = rows[counted] // (length + 1) * length + position  # [N]
                asked = can_be_drafted[counted]  # [N]
                if terms.token_loss not in OF_THE_PAPERS:
                    asked = asked & (ranks[:head, source] < MISSED).all(0)
                ranks[head, source] = MISSED
                if needs_grad:  # in training, compute only the positions that have a loss
                    counted, source, asked = counted[asked], source[asked], asked[asked]
                with torch.set_grad_enabled(needs_grad):
                    x = outputs[head, source].requires_grad_(needs_grad)  # [N, d]
                    logits = terms.score(x).float()  # [N, D]
                    losses = _row_losses(x, logits, states[rows[counted]], p[counted], terms)  # [N]
                    total = torch.where(asked, losses, 0).sum()
                if grads is not None:
                    (grads[head, source],) = torch.autograd.grad(total, x)
                sums[head] += total.detach()
                rank = _rank(logits.detach(), choice[counted])  # [N]
                ranks[head, source] = torch.where(can_be_drafted[counted], rank, MISSED)

        ctx.save_for_backward(grads)
        ctx.shape = head_outputs.shape
        ranks = ranks.view(num_heads, batch, length)
        ctx.mark_non_differentiable(ranks)
        return sums, ranks

    @staticmethod
    def backward(ctx: Any, grad_sums: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grads,) = ctx.saved_tensors
        return (grads * grad_sums.to(grads.dtype)[:, None, None]).view(ctx.shape), None, None, None, None, None


def _chunks(rows: torch.Tensor, vocab_size: int, chunk_elements: int) -> Iterator[torch.Tensor]:
    yield from rows.split(max(chunk_elements // vocab_size, 1)) if rows.numel() else ()


def _target_side(states: torch.Tensor, terms: LossTerms) -> tuple[torch.Tensor, torch.Tensor]:
    """[C, d] -> the target's probabilities of the ids that may be drafted [C, D], and its choice among them [C]."""
    logits = (terms.target_score or terms.score)(states)  # [C, D]
    return logits.softmax(-1, dtype=torch.float32), logits.argmax(-1)


def _row_losses(
    x: torch.Tensor, logits: torch.Tensor, states: torch.Tensor, p: torch.Tensor, terms: LossTerms
) -> torch.Tensor:
    loss = terms.token_weight * TOKEN_LOSSES[terms.token_loss](logits.log_softmax(-1), p)  # [C]
    if terms.hidden_weight:
        loss = loss + terms.hidden_weight * F.smooth_l1_loss(x.float(), states.float(), reduction="none").mean(-1)
    return loss


def _rank(logits: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    """logits [N, D], choice [N] -> [N]: how many ids the head prefers to the target's choice, at most `MISSED`."""
    own = logits.gather(-1, choice[:, None])  # [N, 1]
    return (logits > own).sum(-1).clamp(max=MISSED).to(torch.int32)


def weighted_loss(sums: torch.Tensor, counts: torch.Tensor, decay: float) -> torch.Tensor:
    """sums [K], counts [K] -> the sum over heads of decay^i times the mean; a head without positions adds 0."""
    weights = decay ** torch.arange(sums.shape[0], device=sums.device, dtype=sums.dtype)  # [K]
    return (weights * sums / counts.clamp(min=1)).sum()


# ------------------------------------------------------------------------------------------------ hits


@dataclass
class HitCounts:
    """How often the target's choice was in a head's top-k, by head and k. `*_given_earlier` count only positions where
    all earlier heads had it in their top-k too, as a draft needs."""

    hits: torch.Tensor  # [K, TOP_K]
    total: torch.Tensor  # [K]
    hits_given_earlier: torch.Tensor  # [K, TOP_K]
    total_given_earlier: torch.Tensor  # [K, TOP_K]


def count_hits(ranks: torch.Tensor, mask: torch.Tensor) -> HitCounts:
    """ranks and mask [K, B, T] -> counts."""
    hit = (ranks[..., None] < torch.arange(1, TOP_K + 1, device=ranks.device)) & mask[..., None]  # [K, B, T, TOP_K]
    all_right = hit.int().cumprod(0).bool()  # [K, B, T, TOP_K]
    earlier_right = torch.cat((torch.ones_like(all_right[:1]), all_right[:-1])) & mask[..., None]
    return HitCounts(
        hits=hit.sum((1, 2)),
        total=mask.sum((1, 2)),
        hits_given_earlier=(hit & earlier_right).sum((1, 2)),
        total_given_earlier=earlier_right.sum((1, 2)),
    )


__all__ = [
    "MISSED",
    "TOKEN_LOSSES",
    "TOP_K",
    "HitCounts",
    "LossTerms",
    "count_hits",
    "fed_tokens_mask",
    "head_losses",
    "prediction_mask",
    "tokens_inside_nucleus",
    "weighted_loss",
]
