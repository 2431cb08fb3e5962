"""The losses against their eager reference, the masks against their words, the memory against the vocabulary."""

import pytest
import torch
from torch.nn import functional as F
from transformers import TopKLogitsWarper, TopPLogitsWarper

from hf_clover.training.losses import (
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
DRAFT_IDS = torch.tensor([0, 3, 4, 7, 8, 11, 20])


def eager_head_losses(
    head_outputs: torch.Tensor, target_states: torch.Tensor, mask: torch.Tensor, terms: LossTerms
) -> torch.Tensor:
    """`head_losses`' sums, with every logit in memory at once."""
    length, sums = head_outputs.shape[2], []
    target = terms.target_score(target_states).float().softmax(-1)  # [B, T + 1, V]
    for head, outputs in enumerate(head_outputs):
        x, n = outputs[:, : length - head], target_states[:, head + 1 :]  # [B, T - head, d] both
        log_q = F.log_softmax(terms.draft_score(x).float(), dim=-1)  # [B, T - head, D]
        p = terms.draftable(target[:, head + 1 :])  # [B, T - head, D]
        reachable = p.sum(-1, keepdim=True)  # [B, T - head, 1]
        if terms.token_loss == "kl":
            loss = reachable[..., 0] * F.kl_div(log_q, p / reachable, reduction="none").sum(-1)
        elif terms.token_loss == "acceptance":
            loss = -reachable[..., 0] * (torch.minimum(log_q.exp(), p) / reachable).sum(-1).log()
        else:
            loss = -torch.einsum("btd,btd->bt", p, log_q)
        hidden = F.smooth_l1_loss(x.float(), n.float(), reduction="none").mean(-1)  # [B, T - head]
        loss = terms.token_weight * loss + terms.hidden_weight * hidden
        sums.append(loss[mask[head, :, : length - head]].sum())
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
    token_loss: str, draft: bool, dtype: torch.dtype, cap: float | None
) -> tuple[torch.Tensor, torch.Tensor, LossTerms]:
    weight = torch.randn(VOCAB, SIZE).to(dtype)
    draft_weight = weight[DRAFT_IDS] if draft else weight

    def capped(logits: torch.Tensor) -> torch.Tensor:
        return logits if cap is None else cap * torch.tanh(logits / cap)

    terms = LossTerms(
        draft_score=lambda x: capped(x @ draft_weight.T),
        target_score=lambda x: capped(x @ weight.T),
        vocab_size=VOCAB,
        token_loss=token_loss,
        hidden_weight=10.0 if token_loss == "clover-2" else 0.0,
        draft_ids=DRAFT_IDS if draft else None,
    )
    outputs = torch.randn(HEADS, BATCH, LENGTH, SIZE).to(dtype).requires_grad_()
    return outputs, torch.randn(BATCH, LENGTH + 1, SIZE).to(dtype), terms


@pytest.mark.parametrize("cap", [None, 3.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("draft", [False, True], ids=["all ids", "draft ids"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("token_loss", TOKEN_LOSSES)
def test_chunked_equals_eager(token_loss: str, mask: str, draft: bool, dtype: torch.dtype, cap: float | None) -> None:
    outputs, states, terms = make_case(token_loss, draft, dtype, cap)
    counted = MASKS[mask]()

    sums, _ = head_losses(outputs, states, counted, terms, chunk_elements=3 * VOCAB)
    (grad,) = torch.autograd.grad(weighted_loss(sums, counted.sum((1, 2)), 0.7), outputs)
    reference = eager_head_losses(outputs, states, counted, terms)
    (reference_grad,) = torch.autograd.grad(weighted_loss(reference, counted.sum((1, 2)), 0.7), outputs)

    # Both compute the loss in float32 from the same logits; only the order of additions differs.
    torch.testing.assert_close(sums, reference, rtol=1e-5, atol=1e-4)
    # A gradient is rounded to the outputs' dtype once in each: half a unit in the last place, 2^-8 in bfloat16.
    tolerance = dict(rtol=2e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=2**-6, atol=2**-9)
    torch.testing.assert_close(grad, reference_grad, **tolerance)
    assert torch.isfinite(grad).all()
    if mask == "empty":
        assert sums.abs().sum() == 0
        assert grad.abs().sum() == 0
    else:
        assert grad.abs().sum() > 0


@pytest.mark.parametrize("token_loss", ["kl", "acceptance"])
@pytest.mark.parametrize("draft", [False, True], ids=["all ids", "draft ids"])
def test_a_perfect_head_has_no_loss_left(token_loss: str, draft: bool) -> None:
    _, states, terms = make_case(token_loss, draft, torch.float32, None)
    perfect = torch.zeros(HEADS, BATCH, LENGTH, SIZE)
    for head in range(HEADS):
        perfect[head, :, : LENGTH - head] = states[:, head + 1 :]
    sums, ranks = head_losses(perfect, states, MASKS["all"](), terms)
    assert sums.abs().max() < 1e-4
    in_draft = torch.isin(terms.target_score(states).argmax(-1), DRAFT_IDS) if draft else torch.ones(BATCH, LENGTH + 1)
    for head in range(HEADS):
        counted = MASKS["all"]()[head]
        choice_is_there = in_draft[:, head + 1 :].bool()
        hit = ranks[head, :, : LENGTH - head] == 0
        assert (hit == choice_is_there)[counted[:, : LENGTH - head]].all()


def test_draft_vocabulary_counts_a_position_by_the_mass_it_can_reach() -> None:
    """Where the target's mass lies outside, nothing can be accepted, so nothing should be learned."""
    weight = torch.zeros(VOCAB, SIZE)
    weight[1, 0] = 50.0  # id 1 is outside the draft vocabulary
    states = torch.zeros(1, 3, SIZE)
    states[:, 1, 0] = 1.0  # all mass on id 1
    states[:, 2, 0] = -1.0  # spread over the others
    terms = LossTerms(
        draft_score=lambda x: x @ torch.ones(SIZE, len(DRAFT_IDS)),
        target_score=lambda x: x @ weight.T,
        vocab_size=VOCAB,
        token_loss="clover",
        hidden_weight=0.0,
        draft_ids=DRAFT_IDS,
    )
    outputs = torch.randn(1, 1, 2, SIZE)
    outside, _ = head_losses(outputs, states, torch.tensor([[[True, False]]]), terms)
    inside, _ = head_losses(outputs, states, torch.tensor([[[False, True]]]), terms)
    assert outside.item() < 1e-12
    assert inside.item() > 0.1


def test_acceptance_is_the_overlap() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2]])
    q = torch.tensor([[0.2, 0.3, 0.5]])
    assert TOKEN_LOSSES["acceptance"](q.log(), p).exp().reciprocal().item() == pytest.approx(0.7)


def test_hidden_term_is_smooth_l1() -> None:
    outputs, states, terms = make_case("clover-2", False, torch.float32, None)
    terms = LossTerms(**{**vars(terms), "token_weight": 0.0})
    mask = MASKS["all"]()
    sums, _ = head_losses(outputs, states, mask, terms)
    expected = F.smooth_l1_loss(outputs[1, :, : LENGTH - 1], states[:, 2:], reduction="none")
    assert sums[1].item() == pytest.approx(10.0 * expected.mean(-1)[mask[1, :, : LENGTH - 1]].sum().item(), rel=1e-5)


# ------------------------------------------------------------------------------------------------ masks


def test_prediction_mask_in_words() -> None:
    labels = torch.tensor([[5, 5, 5, -100, 5, 5]])
    mask = prediction_mask(labels, None, 3)  # head i at t predicts token t + 2 + i, of 6
    assert mask[0].tolist() == [[True, False, True, True, False]]
    assert mask[1].tolist() == [[False, True, True, False, False]]
    assert mask[2].tolist() == [[True, True, False, False, False]]


def test_prediction_mask_stops_at_documents() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    mask = prediction_mask(torch.zeros_like(positions), positions, 2)
    assert mask[0].tolist() == [[True, True, False, False, True, False]]
    assert mask[1].tolist() == [[True, False, False, False, False, False]]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_masks_of_texts_shorter_than_the_heads(length: int) -> None:
    mask = prediction_mask(torch.zeros(1, length, dtype=torch.long), None, 5)
    assert mask.shape == (5, 1, length - 1)
    assert mask.sum() == max(length - 2, 0)
    assert fed_tokens_mask(torch.ones(1, max(length - 1, 0), dtype=torch.bool), 5).shape == mask.shape


def test_nucleus_is_what_transformers_keeps() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(2, 40, VOCAB, generator=generator)
    tokens = torch.randint(0, VOCAB, (2, 40), generator=generator)
    inside = tokens_inside_nucleus(logits, tokens, lambda x: x, VOCAB, top_k=4, top_p=0.8, chunk_elements=7 * VOCAB)
    flat = logits[:, :-1].reshape(-1, VOCAB)
    kept = TopPLogitsWarper(0.8)(None, flat).isfinite() & TopKLogitsWarper(4)(None, flat).isfinite()
    assert inside.flatten().tolist() == kept.gather(-1, tokens[:, 1:].reshape(-1, 1))[:, 0].tolist()
    assert 0 < inside.sum() < inside.numel()


def test_label_mask_needs_every_fed_token() -> None:
    inside = torch.tensor([[True, True, False, True, True]])
    mask = fed_tokens_mask(inside, 3)
    assert mask[0].tolist() == [[True, True, False, True, True]]
    assert mask[1].tolist() == [[True, False, False, True, False]]
    assert mask[2].tolist() == [[False, False, False, False, False]]


# ------------------------------------------------------------------------------------------------ hits


def test_hits_and_hits_given_earlier() -> None:
    ranks = torch.tensor([[[0, 1, 5, 0]], [[0, 0, 0, 2]]])  # two heads, four positions
    mask = torch.tensor([[[1, 1, 1, 1]], [[1, 1, 1, 0]]]).bool()
    counts = count_hits(ranks, mask)
    assert counts.total.tolist() == [4, 3]
    assert counts.hits[:, 0].tolist() == [2, 3]
    assert counts.hits[:, 1].tolist() == [3, 3]
    assert counts.total_given_earlier[:, 0].tolist() == [4, 1]
    assert counts.hits_given_earlier[:, 0].tolist() == [2, 1]
    assert counts.total_given_earlier[:, 1].tolist() == [4, 2]


# ------------------------------------------------------------------------------------------------ memory


def peak_bytes(vocab_size: int, positions: int = 300, size: int = 16, chunk_elements: int = 1 << 18) -> int:
    """The most that one loss and its gradient hold at a time, beyond what they are given."""
    weight = torch.randn(vocab_size, size)
    outputs = torch.randn(HEADS, 1, positions, size, requires_grad=True)
    states = torch.randn(1, positions + 1, size)
    mask = torch.ones(HEADS, 1, positions, dtype=torch.bool)
    terms = LossTerms(lambda x: x @ weight.T, lambda x: x @ weight.T, vocab_size)
    with torch.profiler.profile(profile_memory=True) as profile:
        sums, _ = head_losses(outputs, states, mask, terms, chunk_elements)
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
