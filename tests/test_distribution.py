"""Sampled continuations against the exact distribution, for every way to grow a tree.

Two ways. One draws thousands of texts and tests their counts, so that the random numbers are looked at as well. The
other has no chance in it: where `generate` would throw dice, `Explorer` takes every token that has a chance, one after
the other, so that the probability of every text is summed up exactly, with heads as without.
"""

import math
from collections import defaultdict

import pytest
import torch
from helpers.fitting import fit
from helpers.zoo import build, ragged_batch

from hf_clover import CloverHeads
from hf_clover.decoding import loop
from hf_clover.decoding.call import Dice, picks_by_a_race

VOCABULARY, STEPS, ROWS, ROUNDS = 6, 3, 500, 44  # 22,000 continuations of 3 tokens
PROMPT = torch.tensor([[1, 4, 2, 5, 3]])
SAMPLING = {"do_sample": True, "temperature": 1.3, "top_k": 4}
TREES = ("global", "levels", "chain")

# A walk of rows that part, and counts of thousands of texts: where random numbers may have changed.
OF_SAMPLING = pytest.mark.long(
    "hf_clover/decoding/call.py", "hf_clover/decoding/tree.py", "hf_clover/decoding/walk.py"
)


@pytest.fixture(scope="module")
def model():
    return build("llama", vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def exact(model):
    """Probability of every continuation, as `counts` counts them, from the target's logits and the same warping."""
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
    return torch.tensor(list(prefixes.values()), dtype=torch.float64)


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


@OF_SAMPLING
@pytest.mark.parametrize("tree", TREES)
def test_sampled_texts_follow_the_targets_distribution(model, exact, tree):
    heads = fit(CloverHeads.from_target(model, draft_tree=tree), model, temperature=SAMPLING["temperature"])
    assert abs(float(exact.sum()) - 1) < 1e-9
    assert int((exact > 0).sum()) == SAMPLING["top_k"] ** STEPS, "every kept continuation must be possible"

    observed, accepted = torch.zeros_like(exact), 0
    prompts = PROMPT.repeat(ROWS, 1)
    options = {"max_new_tokens": STEPS, "num_assistant_tokens": 6, "return_dict_in_generate": True, **SAMPLING}
    torch.manual_seed(0)
    for _ in range(ROUNDS):
        out = model.generate(prompts, attention_mask=torch.ones_like(prompts), assistant_model=heads, **options)
        observed += counts(out.sequences)
        accepted += out.speculation.accepted_tokens
    total = int(observed.sum())
    assert total >= 20_000
    assert accepted > total / 5, "a test that accepts nothing proves nothing"
    assert chi_square_p(observed, exact * total) > 0.001


def test_samples_of_another_temperature_fail_the_chi_square_test(exact):
    """The same statistic, on samples of another temperature."""
    torch.manual_seed(0)
    observed = torch.bincount(torch.multinomial(exact**0.8, 20_000, replacement=True), minlength=len(exact))
    assert chi_square_p(observed.double(), exact * 20_000) < 1e-6


# ---------------------------------------------------------------------- every text there is


class Explorer:
    """The choices of one row: `choose` follows a path of them, and `next_path` goes to the next."""

    def __init__(self, ends):
        self.ends, self.done = ends, False
        self.path = []  # [which of the possible tokens, how many there are] for each step
        self.restart()

    def restart(self):
        self.step, self.probability, self.has_ended = 0, 1.0, False

    def choose(self, probs):
        possible = probs.nonzero().flatten().tolist()
        if self.has_ended:  # plain generate throws dice for the whole batch, whoever still needs them
            return possible[0]
        if self.step == len(self.path):
            self.path.append([0, len(possible)])
        token = possible[self.path[self.step][0]]
        self.step += 1
        self.probability *= float(probs[token] / probs.sum())
        self.has_ended = token in self.ends
        return token

    def next_path(self):
        while self.path and self.path[-1][0] + 1 == self.path[-1][1]:
            self.path.pop()
        self.done = self.done or not self.path
        if self.path:
            self.path[-1][0] += 1


def every_text(model, inputs, monkeypatch, **options):
    """Per row the probability of every text that `generate` may write, and how many drafts were accepted."""
    width = inputs["input_ids"].shape[1]
    rows = [Explorer(options.get("eos_token_id", ())) for _ in inputs["input_ids"]]
    options = {"do_sample": True, "max_new_tokens": STEPS, "return_dict_in_generate": True, **options}

    def throw(_, those, lengths, probs):
        return torch.tensor([rows[row].choose(p) for row, p in zip(those, probs, strict=True)])

    def multinomial(probs, num_samples):
        return throw(None, range(len(rows)), None, probs)[:, None]

    texts, accepted = [defaultdict(float) for _ in rows], 0
    assert picks_by_a_race(torch.device("cpu")), "asked once, before anything is replaced"
    with monkeypatch.context() as patch:
        patch.setattr(torch, "multinomial", multinomial)
        patch.setattr(Dice, "throw", throw)
        while not all(row.done for row in rows):
            out = model.generate(**inputs, **options)
            accepted += out.speculation.accepted_tokens if "assistant_model" in options else 0
            for row, text, sequence in zip(rows, texts, out.sequences.tolist(), strict=True):
                if not row.done:
                    text[tuple(sequence[width:] + [0] * (width + STEPS - len(sequence)))] += row.probability
                row.restart()
                row.next_path()
    assert all(sum(text.values()) == pytest.approx(1, abs=1e-4) for text in texts), "all texts, each once"
    return texts, accepted


PROCESSING = {
    "temperature and top-k": {"temperature": 1.3, "top_k": 3},
    "top-p": {"top_p": 0.8, "temperature": 2.0},
    "min-p": {"min_p": 0.1, "temperature": 2.0},
    "repetition penalty": {"repetition_penalty": 1.5, "top_k": 3},
    "n-grams": {"no_repeat_ngram_size": 2, "top_k": 3},
    "bad words": {"bad_words_ids": [[2], [3, 4]], "top_k": 3},
    "min length": {"min_new_tokens": 2, "eos_token_id": [1, 4], "top_k": 3},
    "ends": {"eos_token_id": [2, 5], "temperature": 2.0, "typical_p": 0.9},
    "all": {"temperature": 2.0, "top_k": 5, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.2}
    | {"no_repeat_ngram_size": 2, "bad_words_ids": [[5, 5]], "sequence_bias": [[[3], 0.7]]},
}
SHAPES = {"one": (5,), "ragged": (5, 2, 3)}


@pytest.fixture(scope="module")
def fitted(model):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        heads = CloverHeads.from_target(model)
    prompt = ragged_batch(VOCABULARY, SHAPES["one"], seed=1)["input_ids"]  # one of those it is tried on
    return fit(heads, model, temperature=2.0, prompt=prompt)


def assert_same(texts, expected):
    for mine, its in zip(texts, expected, strict=True):
        assert mine.keys() == its.keys()
        assert all(mine[text] == pytest.approx(its[text], abs=1e-4) for text in its)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(name, shape, marks=OF_SAMPLING if shape == "ragged" and name != "all" else ())
        for name in PROCESSING
        for shape in SHAPES
    ],
)
def test_every_text_has_the_probability_that_plain_generate_gives_it(model, fitted, monkeypatch, name, shape):
    inputs = ragged_batch(VOCABULARY, SHAPES[shape], seed=1)
    expected, _ = every_text(model, inputs, monkeypatch, **PROCESSING[name])
    assert max(map(len, expected)) > 3
    accepted = 0
    for tree in TREES:
        monkeypatch.setattr(fitted.config, "draft_tree", tree)
        options = {"assistant_model": fitted, "num_assistant_tokens": 40}
        texts, of_tree = every_text(model, inputs, monkeypatch, **options, **PROCESSING[name])
        assert_same(texts, expected)
        accepted += of_tree
    assert accepted > 0, "a test that accepts nothing proves nothing"


def lossy(tree, logits, text):
    """A walk that likes what was drafted a little better than the target does."""
    for row, node in tree.valid[:, 1:].nonzero().tolist():
        logits[row, tree.parents[row, node + 1], tree.tokens[row, node + 1]] += 0.05
    return replay(tree, logits, text)


replay = loop.replay


@pytest.mark.parametrize("shape", SHAPES)
def test_a_lossy_walk_fails_the_comparison_of_probabilities(model, fitted, monkeypatch, shape):
    inputs = ragged_batch(VOCABULARY, SHAPES[shape], seed=1)
    expected, _ = every_text(model, inputs, monkeypatch, top_k=3)
    options = {"assistant_model": fitted, "num_assistant_tokens": 7, "top_k": 3}
    assert_same(every_text(model, inputs, monkeypatch, **options)[0], expected)
    monkeypatch.setattr(loop, "replay", lossy)
    with pytest.raises(AssertionError):
        assert_same(every_text(model, inputs, monkeypatch, **options)[0], expected)


@pytest.mark.parametrize("tree", TREES)
def test_the_same_seed_gives_the_text_of_plain_generate(model, fitted, monkeypatch, tree):
    monkeypatch.setattr(fitted.config, "draft_tree", tree)
    accepted = 0
    for seed in range(5):
        options = {"do_sample": True, "temperature": 1.3, "max_new_tokens": 30}
        torch.manual_seed(seed)
        plain, after = model.generate(PROMPT, **options), torch.rand(1)
        torch.manual_seed(seed)
        ours = model.generate(PROMPT, **options, assistant_model=fitted, return_dict_in_generate=True)
        assert torch.equal(ours.sequences, plain)
        assert torch.equal(torch.rand(1), after)
        accepted += ours.speculation.accepted_tokens
    assert accepted > 20
