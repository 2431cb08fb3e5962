"""The walk against plain generate: random trees over a table of logits, step by step until the text ends.

The target here is a table: the logits of the next token for any row and prefix. `plain` is transformers' sampling
loop in a few lines over that table; the walk must give the same tokens, the same events and, at batch 1, the same
random numbers, whatever the trees.
"""

import contextlib
import itertools
import math
import random
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hf_clover.decoding import call as call_module
from hf_clover.decoding.call import Text
from hf_clover.decoding.target.masks import ancestors_of
from hf_clover.decoding.tree import Tree, chain_of, root_only, with_chain
from hf_clover.decoding.walk import greedy_walk, read_walk, replay, walk_in_tensors

steady = settings(derandomize=True, deadline=None, max_examples=100)
seeds = st.integers(0, 2**32 - 1)
PAD = 3


class Table:
    """A target as a table of logits: each row goes on from a random prompt. Padding has no chance; 1 and 2, which
    end texts, are a little rarer than the others."""

    def __init__(self, seed, batch=1, vocabulary=5, prompt=2):
        self.seed, self.vocabulary = seed, vocabulary
        rng = random.Random(seed)
        self.prompt = torch.tensor([[rng.randrange(PAD) for _ in range(prompt)] for _ in range(batch)])

    def __call__(self, row, prefix):
        rng = random.Random(f"{self.seed} {row} {tuple(prefix)}")
        means = {1: -2.0, 2: -2.0, PAD: -50.0}
        return torch.tensor([rng.gauss(means.get(token, 0.0), 2) for token in range(self.vocabulary)])


class Streamer(list):
    put = list.append


class Counting(LogitsProcessor):
    """Stateful: what it does depends on how often it was called; it remembers what it was shown."""

    def __init__(self):
        self.shown = []

    def __call__(self, input_ids, scores):
        self.shown.append(input_ids.clone())
        scores = scores.clone()
        scores[:, 1 + len(self.shown) % (scores.shape[1] - 1)] += 2.0
        return scores


class OnceInTheBatch(StoppingCriteria):
    """Looks at the whole batch: every row ends once any row has emitted `token` `times` times."""

    def __init__(self, token, times):
        self.token, self.times, self.shown = token, times, []

    def __call__(self, input_ids, scores, **kwargs):
        self.shown.append((input_ids.clone(), None if scores is None else len(scores)))
        ended = bool(((input_ids == self.token).sum(1) >= self.times).any())
        return torch.full((input_ids.shape[0],), ended)


class EndsByLength(MaxLengthCriteria):
    """A criterion of the user's own class, so that rows are kept together."""


def config_of(eos=(), do_sample=False, pad=PAD, records=False):
    return GenerationConfig(
        do_sample=do_sample,
        pad_token_id=pad,
        eos_token_id=list(eos) or None,
        return_dict_in_generate=records,
        output_scores=records,
        output_logits=records,
    )


def criteria_of(max_length, eos=(), *more):
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length=max_length)])
    if eos:
        criteria.append(EosTokenCriteria(eos_token_id=list(eos)))
    criteria.extend(more)
    return criteria


def plain(table, criteria, config, processors=(), streamer=None):
    """transformers' `_sample`, over the table. `ended_at`: the length at which each row was finished."""
    torch.manual_seed(table.seed)
    processors = LogitsProcessorList(processors)
    input_ids, batch = table.prompt, table.prompt.shape[0]
    has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    unfinished = torch.ones(batch, dtype=torch.long)
    scores, logits, ended_at = (), (), input_ids.shape[1]
    while unfinished.max() > 0:
        raw = torch.stack([table(row, ids) for row, ids in enumerate(input_ids.tolist())])
        processed = processors(input_ids, raw.clone())
        scores, logits = (*scores, processed), (*logits, raw)
        if config.do_sample:
            tokens = torch.multinomial(torch.softmax(processed, dim=-1), num_samples=1).squeeze(1)
        else:
            tokens = processed.argmax(dim=-1)
        if has_eos:
            tokens = tokens * unfinished + PAD * (1 - unfinished)
        input_ids = torch.cat((input_ids, tokens[:, None]), dim=1)
        if streamer is not None:
            streamer.put(tokens)
        ended_at = ended_at + unfinished
        unfinished = unfinished & ~criteria(input_ids, scores if config.output_scores else None)
    is_ragged = len(set(ended_at.tolist())) > 1
    return SimpleNamespace(
        sequences=input_ids, ended_at=ended_at.tolist(), is_ragged=is_ragged, scores=scores, logits=logits
    )


# ---------------------------------------------------------------------- trees and their logits


def plant(rng, table, text, nodes, truth, skill):
    """A random tree of `nodes` nodes under each row's last token. With chance `skill` a node carries on the path that
    the truth takes. A child that exists already becomes a node that is not valid."""
    batch, n = len(text.finished), nodes + 1
    tokens, parents, depths = (torch.zeros(batch, n, dtype=torch.long) for _ in range(3))
    valid = torch.zeros(batch, n, dtype=torch.bool)
    for row, ids in enumerate(text.rows()):
        paths, children, ahead = [()], {()}, tuple(truth[row, len(ids) :].tolist())
        tokens[row, 0], valid[row, 0] = ids[-1], True
        for node in range(1, n):
            places = [place for place in range(node) if valid[row, place]]
            parent, token = rng.choice(places), rng.randrange(table.vocabulary)
            if rng.random() < skill:
                tip = max((p for p in places if paths[p] == ahead[: len(paths[p])]), key=lambda p: len(paths[p]))
                if len(paths[tip]) < len(ahead):
                    parent, token = tip, ahead[len(paths[tip])]
            path = (*paths[parent], token)
            paths.append(path)
            tokens[row, node] = token
            if path not in children:
                children.add(path)
                parents[row, node], depths[row, node], valid[row, node] = parent, len(path), True
    return Tree(tokens, parents, depths, torch.zeros(batch, n), valid, int(depths.max()) + rng.randrange(2))


def score(table, tree, text, skip_finished):
    """Logits [B, n, V] of every node; NaN wherever no walk may look."""
    logits = torch.full((*tree.tokens.shape, table.vocabulary), math.nan)
    for row, ids in enumerate(text.rows()):
        if skip_finished and text.finished[row]:
            continue
        prefixes = [ids.tolist()]
        for node in range(tree.size):
            if node > 0:
                prefixes.append([*prefixes[tree.parents[row, node]], int(tree.tokens[row, node])])
            if tree.valid[row, node]:
                logits[row, node] = table(row, prefixes[node])
    return logits


def speculate(walk, table, truth, text, nodes, skill, seen=None):
    """The decode loop over the table, which gives the plain text -> the paths of each step."""
    torch.manual_seed(table.seed)
    rng, steps, first = random.Random(table.seed), [], True
    while not text.done:
        tree = root_only(text.sequences()[:, -1]) if first else plant(rng, table, text, nodes, truth.sequences, skill)
        if text.in_lockstep and text.pad is not None and any(text.finished):
            tree = with_chain(tree, torch.tensor(text.finished), text.pad)
        before, lengths = list(text.finished), [len(row) for row in text.rows()]
        logits = score(table, tree, text, skip_finished=not text.in_lockstep)
        paths = walk(tree, logits, text)
        steps.append(paths)
        for row, path in enumerate(paths):
            assert len(text.rows()[row]) - lengths[row] == len(path), "one node per emitted token"
            if before[row] and not text.in_lockstep:
                assert path == []
                continue
            assert path[0] == 0
            assert all(tree.parents[row, low] == high for high, low in itertools.pairwise(path))
            assert tree.valid[row, path].all()
            emitted = text.rows()[row][lengths[row] :].tolist()
            assert emitted[:-1] == tree.tokens[row, path[1:]].tolist(), "every token but the last is the next node's"
            if not text.finished[row] and (len(paths) == 1 or not text.in_lockstep):
                below = tree.valid[row] & (tree.parents[row] == path[-1]) & (tree.tokens[row] == emitted[-1])
                assert not below[1:].any(), "a walk ends where the tree does"
            if seen is not None and not before[row] and not first:
                seen[len(path) - 1] += 1
        first = False
    assert torch.equal(text.sequences(), truth.sequences)
    assert text.emitted == sum(truth.ended_at) - table.prompt.numel()
    return steps


def accepted(seen, least=1):
    """How many walks accepted so many drafts."""
    return sum(count for depth, count in seen.items() if depth >= least)


def assert_depths(seen):
    """What was accepted over a whole test: nothing, something and much."""
    assert seen[0] > 15, seen
    assert seen[1] + seen[2] > 15, seen
    assert accepted(seen, 4) > 15, seen


cases = dict(
    seed=seeds,
    batch=st.integers(1, 3),
    vocabulary=st.integers(4, 7),
    nodes=st.integers(1, 12),
    skill=st.sampled_from((0.0, 0.5, 0.9, 1.0)),
    new=st.integers(1, 14),
    endings=st.integers(0, 2),
)


def start(prompt, criteria, config, processors=(), streamer=None):
    return Text.start(prompt.clone(), LogitsProcessorList(processors), criteria, config, streamer)


def certain(*tokens, rows=1, vocabulary=4):
    """Logits [rows, n, V] of nodes of which each knows its next token."""
    return torch.nn.functional.one_hot(torch.tensor([tokens] * rows), vocabulary).float()


def chain(*tokens, rows=1):
    return chain_of(torch.tensor([tokens] * rows))


# ---------------------------------------------------------------------- greedy


def walk_of_a_graph(tree, logits, text):
    """Within a graph, where trees and rows are filled up to sizes that there are."""
    batch, size = tree.tokens.shape
    packed = torch.nn.functional.pad(tree.packed(), (0, 3, 0, 1))
    logits, full = torch.nn.functional.pad(logits, (0, 0, 0, 3, 0, 1)), size + 3
    limits = torch.nn.functional.pad(text.limits(), (0, 0, 0, 1))
    walked = walk_in_tensors(packed, ancestors_of(packed[1], full.bit_length()), logits, limits)
    assert walked.shape == (batch + 1, 3, full)
    assert (walked[batch, 0] == -1).all()
    return read_walk(walked[:batch], tree, logits[:batch], text)


WALKS = greedy_walk, replay, walk_of_a_graph
EVERY_WALK = pytest.mark.parametrize("walk", WALKS)


def test_every_greedy_walk_gives_the_tokens_of_plain_generate():
    seen, kinds = Counter(), Counter()

    @settings(steady, max_examples=200)
    @given(**cases)
    def check(seed, batch, vocabulary, nodes, skill, new, endings):
        table, eos = Table(seed, batch, vocabulary), list(range(1, 1 + endings))
        max_length, config = table.prompt.shape[1] + new, config_of(eos)
        truth = plain(table, criteria_of(max_length, eos), config)
        texts, steps = [], []
        for walk in WALKS:
            streamer = Streamer() if batch == 1 and seed % 2 else None
            text = start(table.prompt, criteria_of(max_length, eos), config, streamer=streamer)
            assert text.is_plain_greedy
            assert text.in_lockstep == (batch == 1)
            steps.append(speculate(walk, table, truth, text, nodes, skill, seen if walk is replay else None))
            texts.append(text)
            if streamer is not None:  # one vector per token, in order
                assert all(piece.shape == (1,) and piece.dtype == torch.long for piece in streamer)
                assert torch.cat(streamer).tolist() == truth.sequences[0, table.prompt.shape[1] :].tolist()
                kinds["streamed drafts"] += any(len(path) > 2 for (path,) in steps[-1])
        assert steps[0] == steps[1] == steps[2]
        for text in texts:
            assert all(text.finished)
            assert [len(row) for row in text.rows()] == truth.ended_at
            assert text.tokens == [row.tolist() for row in text.rows()]
            assert text.found_no_drafts == texts[1].found_no_drafts
        longest = max(truth.ended_at)
        kinds["ragged"] += truth.is_ragged
        kinds["early"] += longest < max_length
        kinds["full"] += longest == max_length
        kinds["fewer steps"] += len(steps[0]) < longest - table.prompt.shape[1]

    check()
    assert_depths(seen)
    assert len(kinds) == 5
    assert min(kinds.values()) > 10, kinds


@EVERY_WALK
@pytest.mark.parametrize("room", [1, 2, 4, 6, 7, 20])
def test_max_length_ends_a_walk_in_the_middle(walk, room):
    """A chain of six right tokens, and room for fewer: the walk stops there, and the text is finished."""
    text = start(torch.tensor([[3, 3, 1]]), criteria_of(3 + room), config_of())
    count = min(room, 7)
    assert walk(chain(1, 2, 3, 1, 2, 3, 1), certain(2, 3, 1, 2, 3, 1, 2), text) == [list(range(count))]
    assert text.rows()[0].tolist() == [3, 3, 1, *[2, 3, 1, 2, 3, 1, 2][:count]]
    assert text.finished == [room <= 7]
    assert text.emitted == count


@EVERY_WALK
@pytest.mark.parametrize(("eos", "length"), [([3], 3), ([4, 3], 3), ([4], 5), ([2, 4, 3], 1), ([9, 8], 7), ([2], 1)])
def test_the_first_of_several_end_tokens_ends_the_walk(walk, eos, length):
    """The end tokens are in one criterion or in several. The one that ends the walk is emitted, too."""
    several = criteria_of(50, eos[:1], *(EosTokenCriteria(eos_token_id=token) for token in eos[1:]))
    for criteria in (criteria_of(50, eos), several):
        text = start(torch.tensor([[3, 1]]), criteria, config_of(eos))
        assert text.is_plain_greedy
        logits = certain(2, 1, 3, 1, 4, 1, 2, vocabulary=10)
        assert walk(chain(1, 2, 1, 3, 1, 4, 1), logits, text) == [list(range(length))]
        assert text.rows()[0].tolist() == [3, 1, *[2, 1, 3, 1, 4, 1, 2][:length]]
        assert text.finished == [eos != [9, 8]]


# ---------------------------------------------------------------------- sampling


@pytest.mark.parametrize("rows", ["one", "free", "lockstep"])
def test_the_same_seed_gives_the_same_text(rows):
    """The walk draws plain sampling's random numbers, in its order, and no others, however uneven the rows are."""
    seen, kinds = Counter(), Counter()
    batches = st.just(1) if rows == "one" else st.integers(2, 3)
    long = {"new": st.integers(6, 20), "skill": st.sampled_from((0.5, 0.9, 1.0))}

    @steady
    @given(**{**cases, **long, "batch": batches})
    def check(seed, batch, vocabulary, nodes, skill, new, endings):
        table, eos = Table(seed, batch, vocabulary), list(range(1, 1 + endings))
        max_length, config = table.prompt.shape[1] + new, config_of(eos, do_sample=True)
        more = [EndsByLength(max_length)] if rows == "lockstep" else []
        truth = plain(table, criteria_of(max_length, eos), config)
        after = torch.rand(3)
        text = start(table.prompt, criteria_of(max_length, eos, *more), config)
        assert not text.is_plain_greedy
        assert text.in_lockstep == (rows != "free")
        speculate(replay, table, truth, text, nodes, skill, seen)
        assert torch.equal(torch.rand(3), after), "not one random number more or less"
        greedy = plain(table, criteria_of(max_length, eos), config_of(eos))
        kinds["unlike greedy"] += not torch.equal(greedy.sequences, truth.sequences)
        kinds["ragged"] += truth.is_ragged

    check()
    assert_depths(seen)
    assert kinds["unlike greedy"] > 0
    assert rows == "one" or kinds["ragged"] > 10


# ---------------------------------------------------------------------- lockstep and free rows


@pytest.mark.parametrize("keeper", ["streamer", "processor", "criterion", "records", "own class", "none"])
def test_lockstep_and_free_rows_give_the_same_text(keeper):
    """Whatever looks at the whole batch sees plain generate's events; without it the rows go on their own."""
    seen, kinds = Counter(), Counter()

    @steady
    @given(**{**cases, "endings": st.integers(1, 2)}, do_sample=st.booleans())
    def check(seed, batch, vocabulary, nodes, skill, new, endings, do_sample):
        table, eos = Table(seed, batch, vocabulary), list(range(1, 1 + endings))
        max_length = table.prompt.shape[1] + new
        config = config_of(eos, do_sample, records=keeper == "records")

        def parts():
            more = {"criterion": [OnceInTheBatch(0, 4)], "own class": [EndsByLength(max_length)]}
            criteria = criteria_of(max_length, eos, *more.get(keeper, []))
            processors = [Counting()] if keeper in ("processor", "records") else []
            return criteria, processors, Streamer() if keeper == "streamer" else None

        criteria, processors, streamer = parts()
        truth = plain(table, criteria, config, processors, streamer)
        our_criteria, our_processors, our_streamer = parts()
        text = start(table.prompt, our_criteria, config, our_processors, our_streamer)
        assert text.in_lockstep == (keeper != "none" or batch == 1)
        speculate(replay, table, truth, text, nodes, skill, seen)
        kinds["ragged"] += truth.is_ragged
        length = truth.sequences.shape[1]
        steps = length - table.prompt.shape[1]
        assert [len(row) for row in text.rows()] == ([length] * batch if text.in_lockstep else truth.ended_at)
        if keeper == "streamer":
            assert all(piece.shape == (batch,) for piece in our_streamer)
            assert torch.equal(torch.stack(our_streamer, 1), torch.stack(streamer, 1))
        if keeper == "processor":
            assert len(our_processors[0].shown) == steps
            assert_same(our_processors[0].shown, processors[0].shown)
        if keeper == "criterion":
            kinds["kept going"] += len(our_criteria[-1].shown)
            assert {count for _, count in our_criteria[-1].shown} == {None}
            assert_same(*([ids for ids, _ in each[-1].shown] for each in (our_criteria, criteria)))
        if keeper == "records":
            assert len(text.scores) == steps
            assert_same(text.scores, truth.scores)
            assert_same(text.logits, truth.logits)
            assert not torch.equal(text.scores[0], text.logits[0])
        else:
            assert text.scores is text.logits is None

    check()
    assert accepted(seen) > 20, seen
    assert seen[0] > 0
    assert kinds["ragged"] > 5
    assert keeper != "criterion" or kinds["kept going"] > 50


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


def test_without_padding_finished_rows_go_on_as_in_plain_generate():
    """A criterion of the user's own and no end of sequence: plain generate pads nobody, so rows stay together."""

    class RowEnds(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids[:, -1] == 1

    seen, ragged = Counter(), []

    @settings(steady, max_examples=40)
    @given(seeds, st.sampled_from((None, PAD)))
    def check(seed, pad):
        table, config = Table(seed, 2, 4), config_of(pad=pad)
        truth = plain(table, criteria_of(12, (), RowEnds()), config)
        text = start(table.prompt, criteria_of(12, (), RowEnds()), config)
        assert text.in_lockstep
        assert text.pad is None
        speculate(replay, table, truth, text, 6, 0.9, seen)
        ragged.append(truth.is_ragged)

    check()
    assert sum(ragged) > 10
    assert accepted(seen) > 20, seen


def test_rows_stay_together_where_something_looks_at_the_whole_batch():
    """A single row is its own batch."""
    table, single, time = Table(0, batch=2).prompt, Table(0).prompt, MaxTimeCriteria(100.0)
    plain, ends = config_of([1]), criteria_of(9, [1])
    free = start(table, ends, plain)
    assert (free.in_lockstep, free.is_plain_greedy, free.pad, len(free.input_ids)) == (False, True, PAD, 2)
    timed = start(table, criteria_of(9, [1], time), plain)
    assert (timed.in_lockstep, timed.is_plain_greedy) == (False, False)
    timed_only = start(table, criteria_of(9, (), time), config_of())  # nobody is padded
    assert (timed_only.in_lockstep, timed_only.pad) == (True, None)
    known = start(table, ends, plain, [transformers.TopKLogitsWarper(2)])
    assert (known.in_lockstep, known.is_plain_greedy) == (False, False)
    unknown = start(table, ends, plain, [Counting()])
    assert (unknown.in_lockstep, unknown.is_plain_greedy, len(unknown.input_ids)) == (True, False, 1)
    alone = start(single, ends, plain, streamer=Streamer())
    assert (alone.in_lockstep, alone.is_plain_greedy) == (True, True)
    recorded = start(single, ends, config_of([1], records=True))
    assert (recorded.is_plain_greedy, recorded.scores, recorded.logits) == (False, (), ())
    assert not start(single, ends, config_of([1], do_sample=True)).is_plain_greedy


# ---------------------------------------------------------------------- what the caller sees


@EVERY_WALK
def test_an_exception_of_a_streamer_ends_the_walk(walk):
    """transformers' server cancels by raising from `put`: the caller gets the exception."""
    streamer = mock.Mock()
    streamer.put.side_effect = [None, ZeroDivisionError]
    text = start(torch.tensor([[1]]), criteria_of(9), config_of(), streamer=streamer)
    with pytest.raises(ZeroDivisionError):
        walk(chain(1, 2, 3), certain(2, 3, 1), text)
    assert [call.args[0].tolist() for call in streamer.put.call_args_list] == [[2], [3]]


def test_max_time_ends_the_walk_after_one_token():
    """However much is drafted, plain generate would have emitted one token."""
    criteria = criteria_of(9, [0], MaxTimeCriteria(0.0, initial_timestamp=1.0))
    text = start(torch.tensor([[1], [1]]), criteria, config_of([0]))
    assert replay(chain(1, 2, 3, rows=2), certain(2, 3, 1, rows=2), text) == [[0], [0]]
    assert text.done
    assert text.sequences().tolist() == [[1, 2], [1, 2]]


# ---------------------------------------------------------------------- processors, row by row


def repetition_penalty():
    """Another length of prompt for each row, where transformers takes that (5.17 does not)."""
    with contextlib.suppress(ValueError):
        return transformers.RepetitionPenaltyLogitsProcessor(1.8, prompt_ignore_length=torch.tensor([0, 3, 1]))
    return transformers.RepetitionPenaltyLogitsProcessor(1.8, prompt_ignore_length=2)


def some_of_every_kind():
    """A processor of every class that walks may call on one row at a time."""
    t, eos = transformers, torch.tensor([1])
    every = [
        t.MinLengthLogitsProcessor(6, eos),
        t.MinNewTokensLengthLogitsProcessor(4, 3, eos),
        t.TemperatureLogitsWarper(0.7),
        repetition_penalty(),
        t.TopPLogitsWarper(0.6),
        t.TopKLogitsWarper(3),
        t.TopHLogitsWarper(0.5),
        t.MinPLogitsWarper(0.3),
        t.TypicalLogitsWarper(0.5),
        t.EpsilonLogitsWarper(0.1),
        t.EtaLogitsWarper(0.1),
        t.NoRepeatNGramLogitsProcessor(2),
        t.SequenceBiasLogitsProcessor({(2,): 3.0, (3, 4): -5.0}),
        t.NoBadWordsLogitsProcessor([[2], [3, 5]]),
        t.ForcedBOSTokenLogitsProcessor(2),
        t.ForcedEOSTokenLogitsProcessor(6, eos),
        t.InfNanRemoveLogitsProcessor(),
        t.ExponentialDecayLengthPenalty((1, 1.5), eos, 3),
        t.LogitNormalization(),
        t.SuppressTokensLogitsProcessor([4]),
        t.SuppressTokensAtBeginLogitsProcessor([2, 4], 3),
    ]
    return {type(processor).__name__: processor for processor in every}


def test_every_row_wise_processor_is_named_here():
    assert {kind.__name__ for kind in call_module.ROWWISE_PROCESSORS} == set(some_of_every_kind())


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", some_of_every_kind())
def test_row_wise_processors_give_plain_tokens_row_by_row(name, do_sample):
    """Free rows, each with its own processors, give the text that plain generate gives with the whole batch."""
    changed, seen = 0, Counter()
    for seed in range(10):
        table, config, criteria = Table(seed, 3, 7, prompt=3), config_of([1], do_sample), criteria_of(9, [1])
        truth = plain(table, criteria, config, [some_of_every_kind()[name]])
        changed += not torch.equal(truth.sequences, plain(table, criteria, config).sequences)
        text = start(table.prompt, criteria, config, [some_of_every_kind()[name]])
        assert not text.in_lockstep
        assert not text.is_plain_greedy
        speculate(replay, table, truth, text, 5, 0.8, seen)
    # Argmax is blind to most warpers, sampling only to what does nothing here.
    blind = ("InfNan", "LogitNormalization", "ForcedBOS", *(() if do_sample else ("Warper",)))
    is_blind = any(part in name for part in blind) and name != "TypicalLogitsWarper"
    assert (changed > 0) != is_blind, changed
    assert accepted(seen) > 10, seen


# ---------------------------------------------------------------------- NaN


@EVERY_WALK
@pytest.mark.parametrize("node", [0, 1, 2])
def test_nan_on_the_path_of_the_walk_is_an_error(walk, node):
    logits = certain(2, 3, 1, rows=2)
    logits[1, node, 0] = math.nan
    for batch in (2, 1):
        text = start(torch.ones(batch, 1).long(), criteria_of(9), config_of())
        with pytest.raises(ValueError, match=r"`logits` of the target contain NaN \(1 of \d+ values\)"):
            walk(chain(1, 2, 3, rows=batch), logits[-batch:], text)


@EVERY_WALK
def test_nan_off_the_path_of_the_walk_is_ignored(walk):
    """At a node off the path, at a node that is not valid, after the end, and in a finished row."""
    tree = chain_of(torch.tensor([[1, 2, 3, 1], [1, 3, 3, 1], [1, 2, 3, 1]]))
    tree.valid[0, 3] = False
    logits = certain(2, 3, 1, 2, rows=3)
    logits[0, 2:] = logits[1, 1:] = logits[2] = math.nan
    text = start(torch.ones(3, 1).long(), criteria_of(9, [3]), config_of([3]))
    text.finished[2] = True
    assert walk(tree, logits, text) == [[0, 1], [0], []]
    assert [row.tolist() for row in text.rows()] == [[1, 2, 3], [1, 2], [1]]
    assert text.finished == [True, False, True]


class Broken(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores * math.nan


def test_sampling_from_a_processors_nan_is_an_error():
    text = start(Table(0).prompt, criteria_of(9), config_of(do_sample=True), [Broken()])
    with pytest.raises(ValueError, match=r"NaN .*a logits processor.*remove_invalid_values=True"):
        replay(root_only(torch.tensor([1])), torch.randn(1, 1, 5), text)


def test_greedy_decoding_picks_a_processors_nan_as_plain_generate_does():
    """Its argmax takes the first NaN. NaN in the target's own logits is an error."""
    text = start(Table(0).prompt, criteria_of(9), config_of(), [Broken()])
    assert replay(root_only(torch.tensor([1])), torch.randn(1, 1, 5), text) == [[0]]
    assert text.rows()[0][-1] == int(torch.full((5,), math.nan).argmax())
    text = start(Table(0).prompt, criteria_of(9), config_of(), [Broken()])
    with pytest.raises(ValueError, match="NaN"):
        replay(root_only(torch.tensor([1])), torch.full((1, 1, 5), math.nan), text)


def test_remove_invalid_values_lets_the_walk_go_on_after_nan():
    """The way out that the error names."""
    text = start(Table(0).prompt, criteria_of(9), config_of(), [transformers.InfNanRemoveLogitsProcessor()])
    logits = torch.tensor([[[math.nan, 1.0, 3.0, 2.0]]])
    assert replay(root_only(torch.tensor([1])), logits, text) == [[0]]
    assert text.rows()[0][-1] == 2
