"""Drafts obey the caller's logits processors, grammars among them, and the text stays plain generate's.

The tests with xgrammar run where somebody has installed it. It is in no extra, since its requirements bring triton,
some 200 MB that nothing else needs without a GPU: `pip install --no-deps xgrammar apache-tvm-ffi` is enough.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from helpers.both_ways import NEW, same_tokens
from helpers.fitting import fit
from helpers.zoo import build, ragged_batch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_clover import CloverHeads, DraftLogitsProcessor, Eagle3Heads
from hf_clover.decoding.draft import session

VOCABULARY = 24
KINDS = {"clover-x": CloverHeads, "eagle-3": Eagle3Heads}
WORDS = [[3, 7, 5], [4, 9], [4, 11, 12, 6]]  # that a grammar lets the text be made of
SHAPES = pytest.mark.parametrize("lengths", [(7,), (5, 9, 3)], ids=["one", "ragged"])


def grammar(_: int, ids: torch.Tensor) -> list[int]:
    """Words, one after the other, behind a prompt of any tokens."""
    open_words: list[list[int]] = []
    for token in ids[-12:].tolist():
        going = [rest for rest in open_words if rest[0] == token] or [word for word in WORDS if word[0] == token]
        open_words = [rest[1:] for rest in going if rest[1:]]
    return sorted({rest[0] for rest in open_words or WORDS})


class Matcher:
    """As xgrammar's: it reads tokens, says what may follow, and can be forked."""

    def __init__(self, read: tuple[int, ...] = ()) -> None:
        self.read = read

    def fork(self) -> "Matcher":
        return Matcher(self.read)

    def accept_token(self, token: int) -> bool:
        assert token in grammar(0, torch.tensor(self.read)), "xgrammar's says on stderr that it was asked for nothing"
        self.read += (token,)
        return True

    def is_terminated(self) -> bool:
        return False

    def fill_next_token_bitmask(self, words: torch.Tensor, row: int) -> None:
        words[row] = 0
        for token in grammar(0, torch.tensor(self.read)):
            words[row, token // 32] |= 1 << token % 32


class Matching(LogitsProcessor):
    """As xgrammar's for transformers: told a token when it is asked for the next one."""

    full_vocab_size = VOCABULARY

    def __init__(self) -> None:
        self.matchers, self.calls = [], 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.matchers:
            for matcher, ids in zip(self.matchers, input_ids):
                assert matcher.accept_token(int(ids[-1]))
        else:
            self.matchers = [Matcher() for _ in input_ids]
        self.calls += 1
        for row, matcher in enumerate(self.matchers):
            words = torch.zeros(1, 1, dtype=torch.int32)
            matcher.fill_next_token_bitmask(words, 0)
            bits = (words[0] >> torch.arange(32, dtype=torch.int32)) & 1
            scores[row] = scores[row].masked_fill(~bits[:VOCABULARY].bool(), -torch.inf)
        return scores


class Counts(LogitsProcessor):
    """It has a state of its own: asked for a draft, it would go wrong."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores[:, self.calls % VOCABULARY] += 3.0
        return scores


@pytest.fixture(scope="module", params=KINDS)
def fitted(request):
    target = build("llama", vocab_size=VOCABULARY)
    torch.manual_seed(0)
    return target, fit(KINDS[request.param].from_target(target), target, temperature=0.05, count=16).eval()


def drafted(target, heads, lengths=(7,), **options):
    """Our output, with trees of 12 nodes that the heads themselves draft. The tokens are plain generate's."""
    how = {"seed": 1, "plant": False, "num_assistant_tokens": 12, **options}
    return same_tokens(target, heads, ragged_batch(VOCABULARY, lengths), **how)


def of_two(kind):
    """Two processors of this kind, and the options of plain generate and of ours that have them."""
    made = kind(), kind()
    return made, [{"logits_processor": LogitsProcessorList([each])} for each in made]


@contextmanager
def in_trees(target) -> Iterator[set[int]]:
    """Tokens of the trees of 12 nodes that the target is given."""
    seen: set[int] = set()

    def watch(_, inputs):
        seen.update(inputs[0].flatten().tolist() if inputs[0].shape[1] == 13 else ())

    hook = target.get_input_embeddings().register_forward_pre_hook(watch)
    yield seen
    hook.remove()


@pytest.mark.parametrize(
    "options",
    [
        {"suppress_tokens": [3, 5, 9, 10]},
        {"bad_words_ids": [[3], [5], [9], [10], [4, 6]]},
        {"suppress_tokens": [3, 5, 9, 10], "do_sample": True, "temperature": 0.5},
    ],
    ids=["suppressed", "bad words", "sampled"],
)
@SHAPES
def test_suppressed_tokens_are_never_in_a_drafted_tree(fitted, options, lengths):
    """Nor is the target given one of them with a tree."""
    with in_trees(fitted[0]) as seen:
        out = drafted(*fitted, lengths, **options)
    assert 12 in out.speculation.tree_sizes
    assert len(seen) > 8
    assert not seen & {3, 5, 9, 10}


def test_drafts_that_obey_a_bias_are_accepted_more_often(fitted, monkeypatch):
    options = {"sequence_bias": [[[2], -9.0], [[11], -9.0], [[17], 9.0], [[8, 17], -9.0]], "no_repeat_ngram_size": 3}
    out = drafted(*fitted, **options)
    monkeypatch.setattr(session, "must_obey", lambda _: False)
    deaf = drafted(*fitted, more_than=-1, **options)
    assert out.speculation.accepted_tokens > deaf.speculation.accepted_tokens


@SHAPES
@pytest.mark.parametrize("do_sample", [False, True])
def test_tokens_that_a_grammar_forces_are_drafted_and_accepted(fitted, lengths, do_sample):
    out, width = drafted(*fitted, lengths, prefix_allowed_tokens_fn=grammar, do_sample=do_sample), max(lengths)
    forced = sum(len(grammar(0, row[:end])) == 1 for row in out.sequences for end in range(width + 1, width + NEW))
    assert forced > 5 * len(lengths)
    assert out.speculation.accepted_tokens >= forced / len(lengths)


def test_a_forced_token_that_another_processor_forbids_is_not_drafted(fitted):
    with in_trees(fitted[0]) as seen:
        drafted(*fitted, prefix_allowed_tokens_fn=grammar, suppress_tokens=[12])
    assert 11 in seen, "which forces 12"
    assert 12 not in seen


def test_matchers_are_forked_for_drafts_and_asked_once_per_token(fitted):
    (_, ours), of_each = of_two(Matching)
    drafted(*fitted, more_than=NEW / 2, of_each=of_each)
    assert ours.calls == NEW, "once a token, as in plain generate"


PIECES = ["<pad>", "</s>", *'{}[]":,abcd12 ', "ab", '"a', 'd"', '":', ", ", "cd", '": ', '"}']
ONE_OF = [1, 2, 12, 22]
SCHEMA = {
    "type": "object",
    "properties": {
        "abc": {"type": "array", "items": {"enum": ["ab", "cd", "abcd"]}, "minItems": 2, "maxItems": 3},
        "cd": {"enum": ONE_OF},
        "dab": {"enum": ONE_OF},
    },
    "required": ["abc", "cd", "dab"],
    "additionalProperties": False,
}


@SHAPES
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_json_by_xgrammar_equals_plain_and_drafts_are_accepted(fitted, lengths, do_sample, capfd):
    xgrammar = pytest.importorskip("xgrammar")
    processor = pytest.importorskip("xgrammar.contrib.hf").LogitsProcessor
    assert len(PIECES) == VOCABULARY
    info = xgrammar.TokenizerInfo(PIECES, xgrammar.VocabType.RAW, vocab_size=VOCABULARY, stop_token_ids=[1])
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)

    class Counted(processor):
        calls = 0

        def __init__(self):
            super().__init__(compiled)

        def __call__(self, input_ids, scores):
            self.calls += 1
            return super().__call__(input_ids, scores)

    (theirs, ours), of_each = of_two(Counted)
    out = drafted(*fitted, lengths, of_each=of_each, max_new_tokens=64, eos_token_id=1, do_sample=do_sample)
    said = out.sequences[:, max(lengths) :]
    for row in said.tolist():
        written = json.loads("".join(PIECES[token] for token in row if token > 1))
        assert list(written) == ["abc", "cd", "dab"]
    assert theirs.calls == ours.calls == said.shape[1], "once a token, as in plain generate"
    assert out.speculation.accepted_tokens > out.speculation.new_tokens / 4
    assert "cannot accept" not in capfd.readouterr().err


def test_a_processor_with_a_state_is_not_asked_for_drafts(fitted):
    (theirs, ours), of_each = of_two(Counts)
    out = drafted(*fitted, of_each=of_each, more_than=-1, suppress_tokens=[3])
    assert theirs.calls == ours.calls == NEW
    assert sum(out.speculation.tree_sizes) > 20


@pytest.mark.filterwarnings("error::hf_clover.decoding.route.CloverWarning")
def test_drafting_goes_on_after_places_where_no_draft_id_is_allowed(fitted):
    """Nothing is drafted at such a place. That is not taken for NaN, which would end all drafting."""
    target, _ = fitted
    torch.manual_seed(0)
    heads = CloverHeads.from_target(target, draft_vocab_size=8, draft_copies=0).eval()  # ids 0 to 7
    out = drafted(target, heads, more_than=-1, prefix_allowed_tokens_fn=lambda _, ids: [9, 10, 11])
    assert out.speculation.accepted_tokens == 0
    allowed = [[9, 10, 11], [1, 2], [3, 4]]
    out = drafted(target, heads, prefix_allowed_tokens_fn=lambda _, ids: allowed[len(ids) % 3])
    assert out.speculation.accepted_tokens == 2 * NEW // 3 - 1, "both behind each that is in no draft vocabulary"


def test_forced_text_is_drafted_with_the_tokens_that_a_matcher_names():
    """Several tokens could begin the text: those that the matcher names are taken."""

    class Jumps(Matcher):
        def fork(self) -> "Jumps":
            return Jumps(self.read)

        def find_jump_forward_tokens(self) -> list[int]:
            return [4, 9] if self.read == (3, 7, 5) else []

    processor = Matching()
    processor.matchers = [Jumps((3, 7))]  # before the text's last token
    obeys = DraftLogitsProcessor(LogitsProcessorList([processor]), settled=4)
    assert obeys.forced(torch.tensor([1, 3, 7, 5])) == [4, 9]
    processor.matchers = [Jumps((3,))]
    obeys = DraftLogitsProcessor(LogitsProcessorList([processor]), settled=3)
    assert obeys.forced(torch.tensor([1, 3, 7])) == [5, 4, 9], "behind the one token that 7 leaves"


def test_without_processors_nothing_is_forced_or_changed():
    obeys = DraftLogitsProcessor(LogitsProcessorList(), settled=2)
    assert obeys.forced(torch.tensor([1, 2])) == []
    assert torch.equal(obeys(torch.tensor([[1, 2]]), torch.ones(1, 3)), torch.ones(1, 3))
