"""The losses against their eager reference, the masks against their words, the memory against the vocabulary."""

import pytest
import torch
from torch.nn import functional as F
from transformers import TopKLogitsWarper, TopPLogitsWarper

from hf_clover.training.losses import (
    MISSED,
    TOKEN_LOSSES,
    LossTerms,
    count_hits,
    fed_tokens_mask,
    head_losses,
    prediction_mask,
    tokens_inside_nucleus,
    weighted_loss,
)

HEADS, BATCH, LENGTH, SIZE, VOCAB = 3, 2, 9, 8, 21
DRAFT_VOCAB = 7


def eager_head_losses(
    head_outputs: torch.Tensor,
    target_states: torch.Tensor,
    mask: torch.Tensor,
    terms: LossTerms,
    draftable: torch.Tensor | None,
) -> torch.Tensor:
    """`head_losses`' sums, with every logit in memory at once."""
    length, sums = head_outputs.shape[2], []
    reached = torch.ones(BATCH, length, dtype=torch.bool)  # whether a draft comes so far
    target = terms.score(target_states).float()  # [B, T + 1, D]
    for head, outputs in enumerate(head_outputs):
        x, n = outputs[:, : length - head], target_states[:, head + 1 :]  # [B, T - head, d] both
        logits, theirs = terms.score(x).float(), target[:, head + 1 :]  # [B, T - head, D] both
        log_q, p = F.log_softmax(logits, dim=-1), F.softmax(theirs, dim=-1)
        if terms.token_loss == "kl":
            loss = F.kl_div(log_q, p, reduction="none").sum(-1)
        elif terms.token_loss == "acceptance":
            loss = -torch.minimum(log_q.exp(), p).sum(-1).log()
        else:
            loss = -torch.einsum("btd,btd->bt", p, log_q)
        hidden = F.smooth_l1_loss(x.float(), n.float(), reduction="none").mean(-1)  # [B, T - head]
        loss = terms.token_weight * loss + terms.hidden_weight * hidden
        counted = mask[head, :, : length - head]  # [B, T - head]
        asked = counted if draftable is None else counted & F.pad(draftable[:, head + 2 :], (0, 1))
        if terms.token_loss in ("kl", "acceptance"):
            asked = asked & reached[:, : length - head]
        sums.append(loss[asked].sum())
        among_five = (logits.topk(5).indices == theirs.argmax(-1, keepdim=True)).any(-1)  # [B, T - head]
        reached[:, : length - head] &= ~counted | (asked & among_five)
    return torch.stack(sums)


def labels_without(*masked: tuple[int, int]) -> torch.Tensor:
    labels = torch.randint(0, VOCAB, (BATCH, LENGTH + 1))
    for row, place in masked:
        labels[row, place] = -100
    return labels


MASKS = {
    "all": lambda: prediction_mask(labels_without(), None, HEADS),
    "labels": lambda: prediction_mask(labels_without((0, 0), (0, 5), (1, 9)), None, HEADS),
    "packed": lambda: prediction_mask(labels_without(), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2]] * 2), HEADS),
    "empty": lambda: torch.zeros(HEADS, BATCH, LENGTH, dtype=torch.bool),
}


def make_case(
    token_loss: str, draft: bool = False, dtype: torch.dtype = torch.float32, cap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor, LossTerms]:
    """Outputs, states and terms: over all ids, or over so few of them as a draft vocabulary has."""
    weight = torch.randn(DRAFT_VOCAB if draft else VOCAB, SIZE).to(dtype)

    def score(x: torch.Tensor) -> torch.Tensor:
        logits = x @ weight.T
        return logits if cap is None else cap * torch.tanh(logits / cap)

    terms = LossTerms(score, len(weight), token_loss, *((10.0, 0.5) if token_loss == "clover-2" else (0.0, 1.0)))
    outputs = torch.randn(HEADS, BATCH, LENGTH, SIZE).to(dtype).requires_grad_()
    return outputs, torch.randn(BATCH, LENGTH + 1, SIZE).to(dtype), terms


@pytest.mark.parametrize("cap", [None, 3.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("draft", [False, True], ids=["all ids", "draft ids"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("token_loss", TOKEN_LOSSES)
def test_the_chunked_loss_and_its_gradient_equal_the_eager_ones(
    token_loss: str, mask: str, draft: bool, dtype: torch.dtype, cap: float | None
) -> None:
    outputs, states, terms = make_case(token_loss, draft, dtype, cap)
    counted, draftable = MASKS[mask](), torch.rand(BATCH, LENGTH + 1) < 0.7 if draft else None

    sums, _ = head_losses(outputs, states, counted, terms, draftable, chunk_elements=3 * terms.vocab_size)
    (grad,) = torch.autograd.grad(weighted_loss(sums, counted.sum((1, 2)), 0.7), outputs)
    reference = eager_head_losses(outputs, states, counted, terms, draftable)
    (reference_grad,) = torch.autograd.grad(weighted_loss(reference, counted.sum((1, 2)), 0.7), outputs)

    # Both compute the loss in float32 from the same logits; only the order of additions differs.
    torch.testing.assert_close(sums, reference, rtol=1e-5, atol=1e-4)
    # A gradient is rounded to the outputs' dtype once in each: half a unit in the last place, 2^-8 in bfloat16.
    tolerance = dict(rtol=2e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=2**-6, atol=2**-9)
    torch.testing.assert_close(grad, reference_grad, **tolerance)
    assert torch.isfinite(grad).all()
    is_empty = mask == "empty"
    assert (sums.abs().sum() == 0) == (grad.abs().sum() == 0) == is_empty


@pytest.mark.parametrize("token_loss", ["kl", "acceptance"])
def test_a_perfect_head_has_no_loss(token_loss: str) -> None:
    _, states, terms = make_case(token_loss)
    perfect = torch.zeros(HEADS, BATCH, LENGTH, SIZE)
    for head in range(HEADS):
        perfect[head, :, : LENGTH - head] = states[:, head + 1 :]
    sums, ranks = head_losses(perfect, states, MASKS["all"](), terms)
    assert sums.abs().max() < 1e-4
    assert (ranks == 0).all()


@pytest.mark.parametrize("token_loss", TOKEN_LOSSES)
def test_places_whose_token_cannot_be_drafted_give_no_gradient(token_loss: str) -> None:
    outputs, states, terms = make_case(token_loss, draft=True)
    draftable = torch.ones(BATCH, LENGTH + 1, dtype=torch.bool)
    draftable[:, 4] = False
    sums, ranks = head_losses(outputs, states, MASKS["all"](), terms, draftable)
    (grad,) = torch.autograd.grad(sums.sum(), outputs)
    for head in range(HEADS):  # of which head i at t says x[t + 2 + i]
        place = 4 - 2 - head
        assert (ranks[head, :, place] == MISSED).all()
        assert grad[head, :, place].abs().sum() == 0
    assert grad[0, :, 3].abs().sum() > 0


@pytest.mark.parametrize("token_loss", TOKEN_LOSSES)
def test_our_losses_train_a_head_only_where_a_draft_would_reach_it(token_loss: str) -> None:
    outputs, states, terms = make_case(token_loss)
    with torch.no_grad():
        outputs[0, :, :5] = states[:, 1:6]  # head 0 is right there,
        outputs[0, :, 5:] = -states[:, 6:]  # and has the target's choice last from there on;
        outputs[1, :, :8] = states[:, 2:] / 2  # head 1 is right everywhere, and not sure enough
    mask = MASKS["all"]()
    sums, ranks = head_losses(outputs, states, mask, terms)
    (grad,) = torch.autograd.grad(sums.sum(), outputs)
    assert grad[1, :, :5].abs().sum(-1).gt(0).all()
    is_everywhere = token_loss.startswith("clover")
    assert (grad[1, :, 5:].abs().sum() > 0) == is_everywhere
    evaluated, found = head_losses(outputs.detach(), states, mask, terms)
    torch.testing.assert_close(evaluated, sums.detach())
    assert torch.equal(found[1, :, :5], ranks[1, :, :5])
    assert is_everywhere or (ranks[1, :, 5:][mask[1, :, 5:]] == MISSED).all()
    assert (found[1] == 0).all()  # what a head knows by itself is measured everywhere


def test_the_acceptance_loss_is_minus_the_log_of_the_overlap() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2]])
    q = torch.tensor([[0.2, 0.3, 0.5]])
    assert TOKEN_LOSSES["acceptance"](q.log(), p).exp().reciprocal().item() == pytest.approx(0.7)


# ------------------------------------------------------------------------------------------------ masks


def test_the_prediction_mask_leaves_out_masked_labels() -> None:
    labels = torch.tensor([[5, 5, 5, -100, 5, 5]])
    mask = prediction_mask(labels, None, 3)  # head i at t predicts token t + 2 + i, of 6
    assert mask[:, 0].int().tolist() == [[1, 0, 1, 1, 0], [0, 1, 1, 0, 0], [1, 1, 0, 0, 0]]


def test_the_prediction_mask_stops_at_the_end_of_a_document() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    mask = prediction_mask(torch.zeros_like(positions), positions, 2)
    assert mask[:, 0].int().tolist() == [[1, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_masks_of_texts_shorter_than_the_heads_have_their_shape(length: int) -> None:
    mask = prediction_mask(torch.zeros(1, length, dtype=torch.long), None, 5)
    assert mask.shape == (5, 1, length - 1)
    assert mask.sum() == max(length - 2, 0)
    assert fed_tokens_mask(torch.ones(1, max(length - 1, 0), dtype=torch.bool), 5).shape == mask.shape


def test_the_nucleus_is_what_warpers_of_transformers_keep() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(2, 40, VOCAB, generator=generator)
    tokens = torch.randint(0, VOCAB, (2, 40), generator=generator)
    inside = tokens_inside_nucleus(logits, tokens, lambda x: x, VOCAB, top_k=4, top_p=0.8, chunk_elements=7 * VOCAB)
    flat = logits[:, :-1].reshape(-1, VOCAB)
    kept = TopPLogitsWarper(0.8)(None, flat).isfinite() & TopKLogitsWarper(4)(None, flat).isfinite()
    assert inside.flatten().tolist() == kept.gather(-1, tokens[:, 1:].reshape(-1, 1))[:, 0].tolist()
    assert 0 < inside.sum() < inside.numel()


def test_the_label_mask_needs_every_token_that_is_fed() -> None:
    inside = torch.tensor([[True, True, False, True, True]])
    assert fed_tokens_mask(inside, 3)[:, 0].int().tolist() == [[1, 1, 0, 1, 1], [1, 0, 0, 1, 0], [0, 0, 0, 0, 0]]


# ------------------------------------------------------------------------------------------------ hits


def test_hits_are_counted_alone_and_given_earlier_hits() -> None:
    ranks = torch.tensor([[[0, 1, 5, 0]], [[0, 0, 0, 2]]])  # two heads, four positions
    mask = torch.tensor([[[1, 1, 1, 1]], [[1, 1, 1, 0]]]).bool()
    counts = count_hits(ranks, mask)
    assert counts.total.tolist() == [4, 3]
    assert counts.hits[:, :2].tolist() == [[2, 3], [3, 3]]
    assert counts.total_given_earlier[:, :2].tolist() == [[4, 4], [1, 2]]
    assert counts.hits_given_earlier[:, 0].tolist() == [2, 1]


# ------------------------------------------------------------------------------------------------ memory


def peak_bytes(vocab_size: int, positions: int = 300, size: int = 16, chunk_elements: int = 1 << 18) -> int:
    """The most that one loss and its gradient hold at a time, beyond what they are given."""
    weight = torch.randn(vocab_size, size)
    outputs = torch.randn(HEADS, 1, positions, size, requires_grad=True)
    states = torch.randn(1, positions + 1, size)
    mask = torch.ones(HEADS, 1, positions, dtype=torch.bool)
    terms = LossTerms(lambda x: x @ weight.T, vocab_size)
    with torch.profiler.profile(profile_memory=True) as profile:
        sums, _ = head_losses(outputs, states, mask, terms, chunk_elements=chunk_elements)
        sums.sum().backward()
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def test_peak_memory_does_not_grow_with_the_vocabulary() -> None:
    small, large = peak_bytes(8 * 1024), peak_bytes(128 * 1024)
    whole = 4 * 300 * 128 * 1024  # one float32 [positions, vocabulary]
    assert large < 1.5 * small
    assert large < whole / 10
