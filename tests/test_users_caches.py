"""A cache of the caller's comes back as plain generate would have left it, and is taken as it comes."""

import copy

import pytest
import torch
from helpers.both_ways import both
from helpers.noticed import kept_of
from helpers.zoo import build, ragged_batch
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, StaticCache

from hf_clover import CloverHeads
from hf_clover.targets.private_api import cache_name

pytestmark = pytest.mark.filterwarnings("ignore::hf_clover.decoding.route.CloverWarning")
VOCABULARY, NEW = 24, 14
SHAPES = pytest.mark.parametrize("lengths", [(11,), (5, 11, 3)], ids=["one", "ragged"])


def grown(said, mask):
    """A next turn: what was said, and three tokens more."""
    ids = torch.cat((said, said[:, :3] % 7 + 4), dim=1)
    return {
        "input_ids": ids,
        "attention_mask": torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1),
    }


def turn(target, heads, inputs, caches, **how):
    """A turn on each of two caches, spoken by plain generate and by ours -> our output, and the next turn's inputs."""
    of_each = [{cache_name(): cache} for cache in caches]
    options = {"max_new_tokens": NEW, "num_assistant_tokens": 5, "of_each": of_each, **how}
    plain, ours = both(target, heads, inputs, plant=heads is not None, **options)
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours[cache_name()] is caches[1], "the user's own cache goes on"
    return ours, grown(ours.sequences, inputs["attention_mask"])


def shapes_of(cache):
    """Of keys, values and states."""
    names = ("keys", "values", "conv_states")
    parts = tree_leaves([getattr(layer, name, None) for layer in cache.layers for name in names])
    return [part.shape for part in parts if isinstance(part, torch.Tensor)]


def assert_same(mine, theirs):
    assert mine.get_seq_length() == theirs.get_seq_length()
    assert kept_of(mine) == kept_of(theirs)
    assert shapes_of(mine) == shapes_of(theirs)


MADE = {
    "with a config": lambda target: DynamicCache(config=target.config),
    "without": lambda target: DynamicCache(),
}


@SHAPES
@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "llama4", "bloom", "gpt_neo", "lfm2", "llama4_tuned"])
def test_a_users_cache_comes_back_as_plain_generate_leaves_it(name, made, records, lengths):
    if name == "lfm2" and made == "without":
        pytest.skip("plain generate needs a config for its states")
    target = build(name, vocab_size=VOCABULARY)
    heads, inputs = CloverHeads.from_target(target), ragged_batch(VOCABULARY, lengths)
    caches = [MADE[made](target) for _ in range(2)]
    first, inputs = turn(target, heads, inputs, caches)
    assert_same(caches[1], caches[0])
    if records:
        for cache in caches:
            cache.activate_past_recording()
        try:
            target.generate(**inputs, max_new_tokens=2, **{cache_name(): copy.deepcopy(caches[0])})
        except RuntimeError:
            pytest.skip("plain generate of this version, 5.17, cannot go on in a window that records")
    second, inputs = turn(target, heads, inputs, caches)
    assert_same(caches[1], caches[0])
    assert first.speculation.accepted_tokens + second.speculation.accepted_tokens > NEW // 3
    if made == "without" or (records and name != "lfm2"):  # what was said can be taken back
        for cache in caches:
            cache.crop(-8)
        turn(target, heads, {name: value[:, :-10] for name, value in inputs.items()}, caches)


@SHAPES
@pytest.mark.parametrize("who", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2_window", "gemma3"])
def test_turns_with_and_without_heads_share_one_cache(name, who, lengths):
    """Three turns, each spoken with heads or without, on one cache: as if plain generate had spoken all of them."""
    target = build(name, vocab_size=VOCABULARY)
    heads, inputs = CloverHeads.from_target(target), ragged_batch(VOCABULARY, lengths)
    caches, accepted = [DynamicCache(config=target.config) for _ in range(2)], 0
    for with_heads in (*who, who[0]):
        out, inputs = turn(target, heads if with_heads else None, inputs, caches, eos_token_id=3)
        assert caches[1].get_seq_length() == inputs["input_ids"].shape[1] - 4
        accepted += out.speculation.accepted_tokens if with_heads else 0
    assert accepted > 0


def test_two_turns_on_the_users_static_cache_equal_plain():
    target = build("llama", vocab_size=VOCABULARY)
    heads, inputs = CloverHeads.from_target(target), ragged_batch(VOCABULARY, (11,))
    caches = [StaticCache(config=target.config, max_cache_len=64) for _ in range(2)]
    for _ in range(2):
        out, inputs = turn(target, heads, inputs, caches)
        assert out.speculation.accepted_tokens > 0


@pytest.mark.parametrize("name", ["llama", "gemma3", "bloom"])
@pytest.mark.parametrize("change", ["repeat", "select"])
def test_rows_may_be_repeated_or_selected_between_turns(name, change):
    target = build(name, vocab_size=VOCABULARY)
    heads, inputs = CloverHeads.from_target(target), ragged_batch(VOCABULARY, (5, 11, 3))
    caches = [DynamicCache(config=target.config) for _ in range(2)]
    _, inputs = turn(target, heads, inputs, caches)
    rows = torch.tensor([0, 0, 1, 1, 2, 2] if change == "repeat" else [2, 0])
    for cache in caches:
        if change == "repeat":
            cache.batch_repeat_interleave(2)
        else:
            cache.batch_select_indices(rows)
    out, _ = turn(target, heads, {name: value[rows] for name, value in inputs.items()}, caches)
    assert out.speculation.accepted_tokens > NEW // 3


@pytest.mark.parametrize("name", ["recurrent_gemma", "llama"])
def test_the_first_call_with_heads_may_come_in_the_middle_of_a_conversation(name):
    """The first call tries the target out, and RecurrentGemma keeps the text in its own modules."""
    said = []
    for with_heads in (False, True):
        target = build(name, vocab_size=VOCABULARY)  # of which nothing is known yet
        heads, inputs = CloverHeads.from_target(target), ragged_batch(VOCABULARY, (7,))
        options = {"max_new_tokens": NEW, cache_name(): DynamicCache(config=target.config)}
        first = target.generate(**inputs, **options)
        assistant = {"assistant_model": heads} if with_heads else {}
        said.append(target.generate(**grown(first, inputs["attention_mask"]), **options, **assistant))
    assert torch.equal(*said)
