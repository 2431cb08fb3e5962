"""What stood in the text before, as drafts beside the heads': found, merged into the tree, and no token changed."""

import copy
import math
import warnings

import pytest
import torch
from helpers.both_ways import same_tokens
from helpers.oracle import drafting_by
from helpers.trees import nodes_of
from helpers.zoo import build, ragged_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_clover import CloverConfig, CloverHeads, TextMemory
from hf_clover.decoding.budget.automatic import AutomaticBudget
from hf_clover.decoding.budget.rest import State
from hf_clover.decoding.draft import drafter as drafter_module
from hf_clover.decoding.draft.copies import RUNS, RUNS_ELSEWHERE, STEADY, Copies
from hf_clover.decoding.draft.drafter import CloverDrafter
from hf_clover.decoding.route import CloverWarning
from hf_clover.decoding.tree import grow_levels, with_path

VOCABULARY = 16
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 4}
GREEDY_AND_SAMPLED = pytest.mark.parametrize("kwargs", [{}, SAMPLED], ids=["greedy", "sampled"])
SHAPES = pytest.mark.parametrize("lengths", [(40,), (40, 25, 12)], ids=["one", "ragged"])


# ---------------------------------------------------------------------- the texts


def followed(text, most):
    """The slow twin: what followed the longest run where it stood last, then what follows that; and the run."""
    for run in sorted(RUNS, reverse=True):
        for end in range(len(text) - 1, run - 1, -1):
            if text[end - run : end] == text[-run:]:
                longer = list(text)
                for place in range(end, end + most):
                    longer.append(longer[place])
                return longer[len(text) :], run
    return [], 0


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=8), st.integers(1, 6))
def test_copies_are_what_followed_the_longest_run_that_came_before(parts, most):
    text = list(parts[0])
    copies = Copies([text], most)
    for part in parts[1:]:
        text += part
        copies.extend()
    guess, run = followed(text, most)
    assert copies.guesses[0] == guess
    assert copies.hopes[0] == [RUNS[max(known for known in RUNS if known <= run + i)] for i in range(len(guess))]


def test_the_chance_of_a_copy_depends_on_its_run_and_on_earlier_copies():
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    copies = Copies([text], most=3)
    [(tokens, joint)], two, three, five = copies.paths([0]), *RUNS.values()
    assert tokens == [4, 5, 6], "behind three tokens, four and five"
    assert [math.exp(each) for each in joint] == pytest.approx([three, three**2, three**2 * five])
    text += [4, 9]  # one right, one wrong
    copies.extend()
    assert copies.chance(two) == pytest.approx(two * (1 + STEADY) / (2 * three + STEADY))
    copies.extend()
    assert copies.guesses[0] == []


# ---------------------------------------------------------------------- the tree


def merged(paths, copied, log_probs, nodes):
    """The slow twin: the best values, and the value of every path."""
    paths = dict(paths)
    for place, log_prob in enumerate(log_probs):
        if log_prob > -math.inf:
            path = tuple(copied[: place + 1])
            paths[path] = max(paths.get(path, -math.inf), log_prob)
    return sorted(paths.values(), reverse=True)[:nodes], paths


def random_tree(generator, nodes):
    """Of three rows, some not filled."""

    def expand(level, chosen, tokens):
        return torch.randn(3, tokens.shape[1], 4, generator=generator)

    return grow_levels(expand, torch.zeros(3, dtype=torch.long), nodes, depth=2, top_p=0.6, min_p=0.5)


@pytest.mark.parametrize("seed", range(30))
def test_merging_a_path_keeps_the_best_nodes_of_tree_and_path(seed):
    generator = torch.Generator().manual_seed(seed)
    nodes, count = int(torch.randint(1, 9, (), generator=generator)), int(torch.randint(1, 6, (), generator=generator))
    tree = random_tree(generator, nodes)
    tokens = torch.randint(0, 4, (3, count), generator=generator)
    log_probs = -torch.rand(3, count, generator=generator).cumsum(1)
    log_probs[0, count // 2 :] = -torch.inf  # a row whose path is shorter
    new = with_path(tree, tokens, log_probs, nodes)
    assert new.size == tree.size
    assert torch.equal(new.tokens[:, 0], tree.tokens[:, 0])
    for row in range(3):
        best, every = merged(nodes_of(tree, row), tokens[row].tolist(), log_probs[row].tolist(), nodes)
        found = nodes_of(new, row)
        assert sorted(found.values(), reverse=True) == pytest.approx(best)
        for path, log_prob in found.items():
            assert every[path] == pytest.approx(log_prob)
        assert max(map(len, found), default=0) <= new.max_depth


# ---------------------------------------------------------------------- generate


def that_repeats_itself(name, context=0.0):
    """A model whose next token depends on the last one alone, or little on those before, so that its greedy text soon
    runs in a circle."""
    model = build(name, vocab_size=VOCABULARY)
    for part, weight in model.named_parameters():
        if any(output in part for output in ("o_proj", "out_proj", "down_proj")):
            weight.data.mul_(context)
    return model


@pytest.fixture(scope="module")
def model():
    return that_repeats_itself("llama")


@pytest.mark.parametrize("variant", ["clover-x", "clover-2", "medusa"])
@GREEDY_AND_SAMPLED
@SHAPES
def test_tokens_equal_plain_and_copies_are_accepted(model, variant, kwargs, lengths):
    """Untrained heads guess little; a text that repeats itself is copied from."""
    accepted = {}
    for most in (0, 6):
        heads = CloverHeads.from_target(model, variant=variant, draft_copies=most)
        options = {"plant": False, "max_new_tokens": 60, "num_assistant_tokens": 6, **kwargs}
        ours = same_tokens(model, heads, ragged_batch(VOCABULARY, lengths), -1, **options)
        accepted[most] = ours.speculation.accepted_tokens
    assert accepted[6] > 0
    if not kwargs:
        assert accepted[6] > accepted[0] + 10 * len(lengths)


def test_copies_are_merged_into_the_tree_in_the_order_of_their_chances(model, monkeypatch):
    """Before the budget cuts it."""
    heads = CloverHeads.from_target(model, draft_copies=6)
    cut = []

    def watched(tree, tokens, log_probs, nodes):
        cut.append((tree.size, with_path(tree, tokens, log_probs, nodes)))
        return cut[-1][1]

    monkeypatch.setattr(drafter_module, "with_path", watched)
    model.generate(**ragged_batch(VOCABULARY, (40,)), max_new_tokens=40, assistant_model=heads, num_assistant_tokens=5)
    assert cut
    for size, tree in cut:
        assert tree.size == size
        assert (tree.log_probs[0].diff() <= 0).all()


class Resting(AutomaticBudget):
    """On a machine where a step takes as long with ten nodes as with none, with heads that are always at rest."""

    def learn(self, tree, paths, draft_seconds, forward_seconds):
        super().learn(tree, paths, 0.0, 1.0)

    def ask(self, lengths, replayed=0, copies=None):
        rest = self._look_up(len(lengths), max(lengths)).rest
        rest.state, rest.steps_left = State.RESTING, 9
        return super().ask(lengths, replayed, copies)


@pytest.fixture
def resting(monkeypatch):
    monkeypatch.setattr("hf_clover.decoding.budget.automatic.AutomaticBudget", Resting)


@pytest.mark.automatic
@pytest.mark.parametrize("variant", ["clover-x", "clover-2"])
@GREEDY_AND_SAMPLED
@SHAPES
def test_copies_are_drafted_while_the_heads_rest(model, resting, variant, kwargs, lengths):
    """The heads draft nothing, not even for rows without a copy; the tokens stay plain generate's."""
    asked = []

    class Watched(CloverDrafter):
        def draft(self, nodes, *rest):
            asked.append(nodes)
            return super().draft(nodes, *rest)

    heads = CloverHeads.from_target(model, variant=variant, draft_copies=6)
    options = {"plant": False, "max_new_tokens": 60, "num_assistant_tokens": None, **kwargs}
    with drafting_by(heads, Watched):
        more_than = 2 if kwargs else 15 * len(lengths)
        same_tokens(model, heads, ragged_batch(VOCABULARY, lengths), more_than, **options)
    assert asked
    assert not any(asked)


@pytest.mark.automatic
@GREEDY_AND_SAMPLED
@pytest.mark.parametrize(("context", "method"), [(0.01, "replayed chain"), (0.0, "chain")])
def test_targets_that_verify_chains_accept_copies_while_the_heads_rest(resting, context, method, kwargs):
    """A copy is a chain. Rows of a batch wait for each other here, and get no copies."""
    target = that_repeats_itself("qwen3_next", context)
    heads = CloverHeads.from_target(target, draft_copies=6)
    options = {"plant": False, "max_new_tokens": 60, "num_assistant_tokens": None, **kwargs}
    alone = same_tokens(target, heads, ragged_batch(VOCABULARY, (40,)), 2 if kwargs else 20, **options)
    together = same_tokens(target, heads, ragged_batch(VOCABULARY, (40, 25)), -1, **options)
    assert alone.speculation.method == together.speculation.method == method
    assert together.speculation.accepted_tokens == 0


@pytest.mark.automatic
def test_heads_that_give_nan_are_noticed_although_copies_are_drafted(model, resting):
    """A row without a copy is no sign of NaN."""
    heads = CloverHeads.from_target(model, draft_copies=6)
    options = {**ragged_batch(VOCABULARY, (40, 25, 12)), "max_new_tokens": 60, "assistant_model": heads}
    with warnings.catch_warnings():
        warnings.simplefilter("error", CloverWarning)
        model.generate(**options)
    for parameter in heads.parameters():
        parameter.data.fill_(math.nan)
    with pytest.warns(CloverWarning, match="the heads gave NaN"):
        model.generate(**options, num_assistant_tokens=3)


def test_a_negative_number_of_copies_is_refused():
    with pytest.raises(ValueError, match="`draft_copies=-1` is impossible: it must be an integer from 0 to 1024"):
        CloverConfig(draft_copies=-1)


# ---------------------------------------------------------------------- texts of earlier calls


def remembered(texts, most_tokens):
    """The slow twin: the texts that are left, oldest first."""
    kept = []
    for text in texts:
        text = text[-most_tokens:]
        kept = [known for known in kept if text[: len(known)] != known] + [text]
        while sum(map(len, kept)) > most_tokens:
            kept = kept[1:]
    return kept


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.lists(st.lists(st.integers(0, 1), max_size=9), min_size=1, max_size=8),
    st.integers(1, 30),
    st.lists(st.integers(0, 1), min_size=max(RUNS_ELSEWHERE), max_size=6),
    st.integers(1, 5),
)
def test_a_memory_finds_what_followed_the_longest_run_in_the_last_text_with_it(texts, most_tokens, now, most):
    memory = TextMemory(most_tokens)
    for text in texts:
        memory.add(text)
    kept = remembered(texts, most_tokens)
    assert len(memory) == sum(map(len, kept)) <= most_tokens
    followed_by = {
        length: [
            text[end : end + most]
            for text in kept
            for end in range(length, len(text))
            if text[end - length : end] == now[-length:]
        ]
        for length in RUNS_ELSEWHERE
    }
    found, chance = memory.after(now, most)
    if texts == kept:  # none was forgotten, which may leave a run without its place in an older text
        longest = max((length for length, places in followed_by.items() if places), default=None)
        assert found == ([] if longest is None else followed_by[longest][-1])
        assert chance == RUNS_ELSEWHERE.get(longest, 0.0)
    assert found == [] or found in followed_by[next(n for n, hope in RUNS_ELSEWHERE.items() if hope == chance)]


@GREEDY_AND_SAMPLED
@pytest.mark.parametrize("lengths", [(12,), (12, 7, 5)], ids=["one", "ragged"])
def test_a_second_call_copies_from_the_first(lengths, kwargs):
    """A request that comes again is answered in a few steps; the tokens stay plain generate's."""
    model = build("llama", vocab_size=61)
    heads = CloverHeads.from_target(model)
    heads.text_memory = TextMemory(1000)
    accepted = []
    for _ in range(2):
        options = {"plant": False, "max_new_tokens": 40, "num_assistant_tokens": 6, **kwargs}
        ours = same_tokens(model, heads, ragged_batch(61, lengths), -1, **options)
        accepted.append(ours.speculation.accepted_tokens)
    assert accepted[1] > accepted[0] + 15 * len(lengths)
    assert 40 <= len(heads.text_memory) <= 1000


def test_copied_and_saved_heads_hold_no_remembered_texts(model, tmp_path):
    heads = CloverHeads.from_target(model)
    heads.text_memory = TextMemory(1000)
    model.generate(**ragged_batch(VOCABULARY), max_new_tokens=20, assistant_model=heads)
    assert len(heads.text_memory) > 0
    assert copy.deepcopy(heads).text_memory is None
    heads.save_pretrained(tmp_path)
    assert CloverHeads.from_pretrained(tmp_path).text_memory is None
    assert CloverHeads.from_target(model).text_memory is None


@pytest.mark.parametrize("most", [0, -1, 2.5, True, None])
def test_a_text_memory_without_a_positive_size_is_refused(most):
    with pytest.raises(ValueError, match=r"`most_tokens=.*` must be a positive integer"):
        TextMemory(most)


def test_a_text_memory_for_heads_that_copy_nothing_is_refused(model):
    heads = CloverHeads.from_target(model, draft_copies=0)
    heads.text_memory = TextMemory(1000)
    with pytest.raises(ValueError, match=r"`heads\.text_memory` is set, and `heads\.config\.draft_copies=0`"):
        model.generate(**ragged_batch(VOCABULARY), max_new_tokens=4, assistant_model=heads)
