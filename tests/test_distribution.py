"""Sampled continuations against the exact distribution, for every way to grow a tree."""

import itertools
import math

import pytest
import torch
from fitting import fit
from zoo import build

from hf_clover import CloverHeads

VOCABULARY, STEPS, ROWS, ROUNDS = 6, 3, 500, 44  # 22,000 continuations of 3 tokens
PROMPT = torch.tensor([[1, 4, 2, 5, 3]])
SAMPLING = {"do_sample": True, "temperature": 1.3, "top_k": 4}


@pytest.fixture(scope="module")
def model():
    return build("llama", vocab_size=VOCABULARY)


def exact_distribution(model):
    """Probability of every continuation, from the target's own logits and the same warping."""
    prefixes = {(): 1.0}
    for _ in range(STEPS):
        texts = torch.cat((PROMPT.repeat(len(prefixes), 1), torch.tensor(list(prefixes)).view(len(prefixes), -1)), 1)
        with torch.no_grad():
            logits = model(texts.long()).logits[:, -1].double() / SAMPLING["temperature"]
        kept = logits >= logits.topk(SAMPLING["top_k"], dim=-1).values[:, -1:]
        probs = logits.masked_fill(~kept, -math.inf).softmax(-1)
        prefixes = {
            (*prefix, token): weight * float(probs[i, token])
            for i, (prefix, weight) in enumerate(prefixes.items())
            for token in range(VOCABULARY)
        }
    return prefixes


def chi_square_p(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Upper tail of the chi-square distribution, cells expected fewer than 5 times pooled."""
    rare = expected < 5
    observed = torch.cat((observed[~rare], observed[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic.double() / 2))


def counts(sequences: torch.Tensor) -> torch.Tensor:
    powers = VOCABULARY ** torch.arange(STEPS - 1, -1, -1)
    return torch.bincount((sequences[:, -STEPS:] * powers).sum(1), minlength=VOCABULARY**STEPS)


@pytest.mark.parametrize("tree", ["global", "levels", "chain"])
def test_the_distribution_is_the_targets(model, tree):
    heads = fit(CloverHeads.from_target(model, draft_tree=tree), model, temperature=SAMPLING["temperature"])
    cells = list(itertools.product(range(VOCABULARY), repeat=STEPS))
    exact = exact_distribution(model)
    expected = torch.tensor([exact[cell] for cell in cells], dtype=torch.float64)
    assert abs(float(expected.sum()) - 1) < 1e-9
    assert int((expected > 0).sum()) == SAMPLING["top_k"] ** STEPS, "every kept continuation must be possible"

    observed, accepted = torch.zeros(len(cells), dtype=torch.float64), 0
    torch.manual_seed(0)
    for _ in range(ROUNDS):
        out = model.generate(
            PROMPT.repeat(ROWS, 1),
            attention_mask=torch.ones(ROWS, PROMPT.shape[1], dtype=torch.long),
            assistant_model=heads,
            num_assistant_tokens=6,
            max_new_tokens=STEPS,
            return_dict_in_generate=True,
            **SAMPLING,
        )
        observed += counts(out.sequences)
        accepted += out.speculation.accepted_tokens
    total = int(observed.sum())
    assert total >= 20_000
    assert accepted > total / 5, "a test that accepts nothing proves nothing"
    assert chi_square_p(observed, expected * total) > 0.001


def test_the_test_can_fail(model):
    """The same statistic, on samples of another temperature."""
    exact = exact_distribution(model)
    expected = torch.tensor(list(exact.values()), dtype=torch.float64)
    torch.manual_seed(0)
    warmer = (expected**0.8) / (expected**0.8).sum()
    observed = torch.bincount(torch.multinomial(warmer, 20_000, replacement=True), minlength=len(expected))
    assert chi_square_p(observed.double(), expected * 20_000) < 1e-6
