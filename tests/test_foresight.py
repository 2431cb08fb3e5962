"""Drafts that know the dice: the same text, and more of it accepted."""

import random
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from helpers.both_ways import same_tokens
from helpers.capturing import captures  # noqa: F401  (a fixture)
from helpers.fitting import fit
from helpers.oracle import PlantingDrafter, drafting_by
from helpers.zoo import build, ragged_batch
from transformers import GenerationConfig, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

from hf_clover import CloverHeads
from hf_clover.decoding import call as call_module
from hf_clover.decoding.call import Text
from hf_clover.decoding.draft import session
from hf_clover.decoding.draft.drafter import grow_in_shape
from hf_clover.decoding.draft.foresight import Foresight, Unwalked, foresee

VOCABULARY = 16
NEW = 60
SHAPES = pytest.mark.parametrize("lengths", [(7,), (7, 4, 5)], ids=["one", "ragged"])


@pytest.fixture
def bigrams():
    """A target whose logits depend on the last token alone, and heads that say exactly what it will say."""
    target = build("llama", vocab_size=VOCABULARY)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    heads = CloverHeads.from_target(target)

    def step(level, states, tokens, *recalled):
        return target.model.norm(target.model.embed_tokens(tokens)), states

    with mock.patch.object(heads, "step", step):
        yield target, heads


def text_of(batch, rowwise=False, **settings):
    criteria = StoppingCriteriaList([MaxLengthCriteria(99)])
    streamer = None if rowwise or batch == 1 else object()  # which keeps the rows at one token
    config = GenerationConfig(max_length=99, **settings)
    return Text.start(torch.zeros(batch, 3, dtype=torch.long), LogitsProcessorList(), criteria, config, streamer)


def thrown(text, length):
    """A token for each row, which all stand at `length`."""
    probs = torch.full((text.dice.batch_size, VOCABULARY), 1 / VOCABULARY)
    tokens = text.dice.throw(range(len(probs)), [length] * len(probs), probs)  # [B]
    width = 1 if text.in_lockstep else 0
    new = tokens[:, None].split(len(tokens) if width else 1)
    text.input_ids = [torch.cat(both, dim=1) for both in zip(text.input_ids, new, strict=True)]
    return tokens


def sampled(batch, rowwise=False):
    """A text that has got its first token."""
    torch.manual_seed(5)
    torch.rand(3)  # somewhere in the sequence
    text = text_of(batch, rowwise, do_sample=True)
    thrown(text, 3)
    return text


@pytest.mark.parametrize(("batch", "rowwise"), [(1, False), (3, False), (3, True)])
def test_foresight_knows_the_numbers_that_multinomial_draws_next(batch, rowwise):
    probs = torch.softmax(torch.randn(4, batch, VOCABULARY, generator=torch.Generator().manual_seed(0)), dim=-1)
    ahead = foresee(sampled(batch, rowwise), 4, VOCABULARY).whole().log_noise  # [B, 4, V]
    for level, here in enumerate(probs):
        drawn = torch.multinomial(here, num_samples=1).squeeze(1)
        assert torch.equal((here.log() - ahead[:, level]).argmax(-1), drawn)


def test_rows_of_different_lengths_foresee_their_own_numbers():
    """A row that has come further has used up numbers that the others still wait for."""
    together, apart = sampled(3), sampled(3, rowwise=True)
    ahead = foresee(together, 6, VOCABULARY).whole().log_noise  # [B, 6, V] from the fourth token on
    apart.dice.throw([1], [4], torch.ones(1, VOCABULARY))
    apart.input_ids[1] = torch.cat((apart.input_ids[1], torch.zeros(1, 1, dtype=torch.long)), dim=1)
    seen = foresee(apart, 4, VOCABULARY).whole().log_noise
    for row, start in enumerate((0, 1, 0)):
        assert torch.equal(seen[row], ahead[row, start : start + 4])


@pytest.mark.parametrize("vocabulary", [None, torch.tensor([9, 2, 4])])
def test_the_numbers_of_a_level_are_drawn_once_and_only_when_needed(vocabulary):
    logits = torch.randn(2, 2, VOCABULARY if vocabulary is None else 3)
    text = sampled(2)
    foresight = foresee(text, 8, VOCABULARY)
    weighed = [foresight.weigh(level, logits, vocabulary) for level in (0, 2, 1)]
    assert list(text.dice.numbers) == [3, 4, 5, 6]
    numbers = dict(text.dice.numbers)
    whole = foresight.whole()
    for level, mine in zip((0, 2, 1), weighed, strict=True):
        assert torch.equal(whole.weigh(level, logits, vocabulary), mine)
    thrown(text, 4)
    assert all(text.dice.numbers[length] is numbers[length] for length in numbers)


def test_foresight_leaves_the_random_generator_as_it_was():
    text = sampled(1)
    before = torch.get_rng_state()
    foresee(text, 2, VOCABULARY).whole()
    assert torch.equal(torch.get_rng_state(), before)


def test_foreseen_numbers_are_dropped_after_a_foreign_draw():
    text, probs = sampled(1), torch.full((1, VOCABULARY), 1 / VOCABULARY)
    foresee(text, 4, VOCABULARY).whole()
    torch.rand(1)
    before = torch.get_rng_state()
    picks = [thrown(text, length).item() for length in (4, 5, 6)]
    torch.set_rng_state(before)
    assert [torch.multinomial(probs, num_samples=1).item() for _ in range(3)] == picks


def test_numbers_beyond_the_memory_limit_are_drawn_again(monkeypatch):
    monkeypatch.setattr(call_module, "MOST_BYTES", 4 * VOCABULARY)
    text = sampled(1)
    seen = foresee(text, 4, VOCABULARY).whole().log_noise
    assert len(text.dice.numbers) == 1
    assert torch.equal(foresee(text, 4, VOCABULARY).whole().log_noise, seen)


@SHAPES
def test_no_more_numbers_are_kept_than_drafts_can_use(bigrams, monkeypatch, lengths):
    target, heads = bigrams
    throw, kept = call_module.Dice.throw, []

    def watched(dice, *args):
        kept.append(max(len(dice.numbers), len(dice.states)))
        return throw(dice, *args)

    monkeypatch.setattr(call_module.Dice, "throw", watched)
    common = {**ragged_batch(VOCABULARY, lengths), "max_new_tokens": NEW, "do_sample": True, "top_k": 0}
    target.generate(**common, assistant_model=heads, num_assistant_tokens=4)
    assert len(kept) >= NEW
    assert max(kept) <= 2 * (heads.config.draft_depth + 1)


def test_tokens_equal_plain_where_torch_samples_in_another_way(bigrams, monkeypatch):
    """`torch.multinomial` itself picks the tokens, and all rows stay at one length."""
    assert call_module.picks_by_a_race(torch.device("cpu"))
    multinomial = torch.multinomial
    with monkeypatch.context() as patch:
        patch.setattr(
            torch, "multinomial", lambda probs, num_samples, **how: multinomial(probs.flip(-1), num_samples, **how)
        )
        assert not call_module.picks_by_a_race.__wrapped__(torch.device("cpu"))
    monkeypatch.setattr(call_module, "picks_by_a_race", lambda device: False)
    assert text_of(2, rowwise=True, do_sample=True).in_lockstep
    options = {"seed": 3, "plant": False, "do_sample": True, "top_k": 0, "num_assistant_tokens": 4}
    same_tokens(*bigrams, ragged_batch(VOCABULARY, (7, 4)), **options)


def test_greedy_calls_and_first_tokens_have_no_foresight():
    assert foresee(text_of(1, do_sample=False), 2, VOCABULARY) is None
    assert foresee(text_of(1, do_sample=True), 2, VOCABULARY) is None, "before the first token"


def test_foresight_uses_the_numbers_of_the_draft_vocabularys_ids():
    noise = torch.randn(1, 1, VOCABULARY)
    ids = torch.tensor([9, 2, 4])
    logits = torch.randn(1, 2, 3)
    weighed = Foresight(noise, 0.5).weigh(0, logits, ids)  # [1, 2, 3]
    torch.testing.assert_close(weighed, torch.log_softmax(logits / 0.5, -1) - noise[0, 0, ids])


def test_a_lucky_number_does_not_revive_a_nearly_impossible_token():
    logits = torch.tensor([[[5.0, 4.0, -20.0]]])
    lucky = torch.tensor([[[0.0, 0.0, -99.0]]])
    assert Foresight(lucky, 1.0).weigh(0, logits, None)[0, 0, 2] == -torch.inf


@SHAPES
@pytest.mark.parametrize("temperature", [0.7, 3.0])
def test_sampled_drafts_of_heads_that_agree_are_always_accepted(bigrams, monkeypatch, temperature, lengths):
    """As for greedy text: a chain is accepted whole. Two samples of one distribution would differ."""
    target, heads = bigrams
    heads.config.draft_tree, heads.config.draft_depth = "chain", 4
    options = {"plant": False, "max_new_tokens": NEW, "do_sample": True, "temperature": temperature, "top_k": 0}
    options |= {"seed": 3, "num_assistant_tokens": 4}
    foreseen = same_tokens(target, heads, ragged_batch(VOCABULARY, lengths), **options).speculation
    monkeypatch.setattr(session, "foresee", lambda *_: None)
    blind = same_tokens(target, heads, ragged_batch(VOCABULARY, lengths), **options).speculation
    # All but the prompt's own token and what is cut off at the end comes in whole chains, each with a token more.
    assert foreseen.target_forwards == 1 + -(-(NEW - 1) // 5)
    assert blind.accepted_tokens < foreseen.accepted_tokens


@pytest.mark.parametrize("fields", [{}, {"draft_tree": "levels"}, {"draft_vocab_size": 9}])
def test_foresight_in_graphs_gives_the_same_text_and_drafts(fields, captures):  # noqa: F811
    target = build("llama", vocab_size=VOCABULARY)
    heads = CloverHeads.from_target(target, **fields)
    if "draft_vocab_size" not in fields:
        fit(heads, target)
    options = {"seed": 1, "plant": False, "do_sample": True, "temperature": 0.8, "num_assistant_tokens": 5}
    eager, graphed = (
        same_tokens(target, heads, ragged_batch(VOCABULARY, (7,)), max_new_tokens=NEW, **options, **more)
        for more in ({"disable_compile": True}, {})
    )
    assert eager.speculation.accepted_tokens == graphed.speculation.accepted_tokens
    assert captures.replayed > 0


def test_rows_in_lockstep_equal_plain_in_fewer_forwards(bigrams):
    """A batch that goes in lockstep, because its scores are asked for."""
    options = {"max_new_tokens": 20, "do_sample": True, "output_scores": True, "num_assistant_tokens": 4}
    ours = same_tokens(*bigrams, ragged_batch(VOCABULARY, (7, 7)), seed=3, plant=False, **options)
    assert ours.speculation.target_forwards < 8


# ---------------------------------------------------------------------- rows that wait for each other


def test_a_row_that_did_not_walk_drafts_what_the_target_has_said():
    """Over the chain 1 2 3 the target says 2, then 5. A row whose last token is 1 knows both, any other neither."""
    logits = torch.zeros(2, 3, VOCABULARY)
    logits[:, 0, 2] = logits[:, 1, 5] = logits[:, 2, 7] = 9.0
    noise = torch.zeros(2, 4, VOCABULARY)
    unwalked = Unwalked(torch.tensor([[1, 2, 3]] * 2), logits)
    unwalked.mark(noise, torch.tensor([1, 4]), temperature=1.0)
    assert noise.nonzero().tolist() == [[0, 0, 2], [0, 1, 5]]
    drafted = Foresight(noise, 1.0).weigh(1, torch.linspace(9, -9, VOCABULARY)[None, None].expand(2, 1, -1), None)
    assert drafted.argmax(-1).tolist() == [[5], [0]]  # however little the heads think of it
    assert drafted[0].softmax(-1).max() > 0.999


class UnsureDrafter(PlantingDrafter):
    """Of every drafted token, the right one in two of three cases."""

    def draft(self, nodes, shape=None, foresight=None):
        def expand(level, chosen, tokens):
            logits = torch.zeros(len(self.place), 1, VOCABULARY)
            for row, place in enumerate(self.place):
                if place + level < self.truth.shape[1] and self.rng.random() < 2 / 3:
                    logits[row, 0, self.truth[row, place + level]] = 5.0
            return logits

        return grow_in_shape(self.heads, expand, self.roots, nodes, shape, foresight) if nodes else super().draft(0)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", ["bloom", "lfm2", "qwen3_next"])
def test_rows_that_wait_save_forwards_by_keeping_what_the_target_said(name, sampled):
    """Four rows that are right at different places: the same text, in fewer forwards."""
    target = build(name, vocab_size=VOCABULARY).float()
    heads = CloverHeads.from_target(target)
    common = {**ragged_batch(VOCABULARY, (7, 5, 7, 6)), "max_new_tokens": NEW, "do_sample": sampled}
    speculative = {"assistant_model": heads, "num_assistant_tokens": 4, "return_dict_in_generate": True}
    torch.manual_seed(1)
    truth = target.generate(**common)
    forwards = []
    for forget in (nullcontext(), mock.patch.object(Unwalked, "mark")):
        drafter = type("Unsure", (UnsureDrafter,), {"truth": truth, "rng": random.Random(0), "start": 7})
        torch.manual_seed(1)
        with forget, drafting_by(heads, drafter):
            out = target.generate(**common, **speculative)
        assert torch.equal(out.sequences, truth)
        forwards.append(out.speculation.target_forwards)
    keeping, forgetting = forwards
    assert keeping < 0.9 * forgetting
