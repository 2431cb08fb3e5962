"""What cannot work says so by name before a token is generated, and numbers that mean nothing are noticed."""

import math
import re

import pytest
import torch
from helpers.both_ways import same_tokens
from helpers.zoo import build, ragged_batch
from transformers import LogitsProcessor, LogitsProcessorList, T5Config, T5ForConditionalGeneration

from hf_clover import CloverConfig, CloverHeads
from hf_clover.decoding.route import CloverWarning

VOCABULARY, NEW = 16, 20
SHAPES = pytest.mark.parametrize("lengths", [(4,), (5, 9, 3)])


@pytest.fixture
def model():
    return build("llama", vocab_size=VOCABULARY)


@pytest.fixture
def heads(model):
    return CloverHeads.from_target(model)


@pytest.fixture
def inputs():
    return ragged_batch(VOCABULARY, (5, 9, 3))


# ---------------------------------------------------------------------- the wrong pair


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"name": "gemma3"}, r"hidden_size is 64, that of .* is 48.*from_target"),
        ({"name": "llama", "vocab_size": VOCABULARY + 1}, r"vocab_size is 16, that of .* is 17.*from_target"),
        ({"name": "llama", "seed": 1}, r"fingerprint of its lm_head .*from_target"),
    ],
    ids=["hidden size", "vocabulary", "weights"],
)
def test_heads_for_another_target_are_refused(heads, inputs, other, message):
    target = build(**{"vocab_size": VOCABULARY, **other})
    if "hidden_size" in message:
        target.config.get_text_config().hidden_size = 48
    with pytest.raises(ValueError, match=message):
        target.generate(**inputs, assistant_model=heads)


def test_an_encoder_decoder_target_is_refused(heads):
    sizes = dict(vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=2)
    target = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    with pytest.raises(ValueError, match=r"`assistant_model`: .*encoder-decoder.*without `assistant_model`"):
        target.generate(torch.tensor([[1, 2, 3]]), assistant_model=heads)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("num_beams", 3), ("prompt_lookup_num_tokens", 3), ("assistant_early_exit", 1), ("penalty_alpha", 0.5)],
)
def test_other_decoding_methods_are_refused_by_name(model, heads, inputs, setting, value):
    """The error names each of them; none is ignored in silence."""
    message = f"`{setting}={value}`: Clover heads work with greedy decoding and sampling. Leave `{setting}` out"
    for door in ({"assistant_model": heads}, {"custom_generate": heads.generate_with}):
        with pytest.raises(ValueError, match=re.escape(message)):
            model.generate(**inputs, **door, **{setting: value})


def test_a_name_in_place_of_loaded_heads_is_refused(model, inputs, tmp_path):
    for name in ("org/my-heads", tmp_path):
        with pytest.raises(TypeError, match=r"`assistant_model='.*'` is a name.*AutoModel\.from_pretrained\('"):
            model.generate(**inputs, assistant_model=name)


# ---------------------------------------------------------------------- prompts, budgets, devices


def test_a_batch_row_without_a_prompt_is_refused(model, heads, inputs):
    inputs["attention_mask"][1] = 0
    with pytest.raises(ValueError, match=r"`attention_mask` leaves batch row 1 without a prompt"):
        model.generate(**inputs, assistant_model=heads)


def test_an_empty_prompt_is_refused(model, heads):
    with pytest.raises(ValueError, match=r"`input_ids` of shape \(1, 0\) is empty"):
        model.generate(torch.zeros(1, 0, dtype=torch.long), assistant_model=heads, max_new_tokens=3)


@pytest.mark.parametrize("budget", [0, -3, 2.5, True, "many"])
def test_a_value_that_is_no_tree_size_is_refused(model, heads, inputs, budget):
    with pytest.raises((ValueError, TypeError), match=r"num_assistant_tokens"):
        model.generate(**inputs, assistant_model=heads, num_assistant_tokens=budget)
    heads.generation_config.num_assistant_tokens = budget
    with pytest.raises(ValueError, match=f"`num_assistant_tokens={budget!r}` is no tree size.*None to let hf_clover"):
        model.generate(**inputs, assistant_model=heads)


def test_a_tree_size_beyond_the_room_of_the_cache_is_refused(model, heads, inputs):
    if not hasattr(model.generation_config, "max_cache_len"):
        pytest.skip("this transformers has no max_cache_len")
    fixed = {"cache_implementation": "static", "max_cache_len": 40, "max_new_tokens": 20}
    with pytest.raises(ValueError, match=r"`num_assistant_tokens=50` is more than the cache can hold: .* room for 11"):
        model.generate(**inputs, assistant_model=heads, num_assistant_tokens=50, **fixed)
    plain = model.generate(**inputs, **fixed)
    assert torch.equal(model.generate(**inputs, assistant_model=heads, num_assistant_tokens=11, **fixed), plain)
    assert torch.equal(model.generate(**inputs, assistant_model=heads, **fixed), plain)


def test_heads_on_the_meta_device_are_refused(model, inputs):
    with torch.device("meta"):
        heads = CloverHeads(CloverConfig(hidden_size=64, vocab_size=VOCABULARY, num_attention_heads=4))
    with pytest.raises(ValueError, match=r"`assistant_model` is on the meta device.*from_pretrained"):
        model.generate(**inputs, assistant_model=heads)


def test_heads_spread_over_several_devices_are_refused(model, heads, inputs):
    heads.hf_device_map = {"layers": "cpu", "norm": 1}
    heads.__class__ = type("Elsewhere", (CloverHeads,), {"device": torch.device("meta")})
    with pytest.raises(ValueError, match=r"spread over several devices \(1, cpu\).*device_map"):
        model.generate(**inputs, assistant_model=heads)


# ---------------------------------------------------------------------- NaN and infinity


class PoisonsSome(LogitsProcessor):
    """NaN at every third token, for an id that depends on the text."""

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] % 3 == 0:
            scores[torch.arange(len(scores)), input_ids[:, -1] // 2 + 3] = math.nan
        return scores


@SHAPES
def test_nan_from_a_processor_is_the_largest_number_in_greedy_decoding(model, heads, lengths):
    """As for plain generate's `argmax`."""
    processors = LogitsProcessorList([PoisonsSome()])
    same_tokens(model, heads, ragged_batch(VOCABULARY, lengths), logits_processor=processors)


@pytest.mark.parametrize("kwargs", [{}, {"do_sample": True}, {"repetition_penalty": 1.2}])
@SHAPES
def test_nan_in_the_logits_of_the_target_is_an_error(model, heads, lengths, kwargs):
    with torch.no_grad():
        model.model.norm.weight[3] = math.nan
    with pytest.raises(ValueError, match=r"`logits` of the target contain NaN.*bfloat16"):
        model.generate(**ragged_batch(VOCABULARY, lengths), assistant_model=heads, max_new_tokens=NEW, **kwargs)


def test_remove_invalid_values_lets_a_target_with_nan_generate_as_plain(model, heads, inputs):
    with torch.no_grad():
        model.lm_head.weight[3] = math.nan
    kwargs = {"max_new_tokens": NEW, "remove_invalid_values": True}
    heads.config.target_fingerprint = None
    with pytest.warns(CloverWarning):  # a trial tree cannot be compared with NaN, or the heads cannot draft with it
        ours = model.generate(**inputs, assistant_model=heads, **kwargs)
    assert torch.equal(ours, model.generate(**inputs, **kwargs))


@pytest.mark.parametrize("rows", [1, 2])
def test_infinite_scores_are_refused_as_plain_generate_refuses_them(model, heads, rows):
    """There is no NaN, but there are no probabilities either: `torch.multinomial` says so."""
    ids = torch.tensor([[1, 4, 2, 5, 3]]).repeat(rows, 1)
    bias = {"sequence_bias": [[[3], math.inf]], "do_sample": True, "max_new_tokens": 6}
    messages = []
    for options in ({}, {"assistant_model": heads}):
        with pytest.raises(RuntimeError, match="probability tensor contains") as error:
            model.generate(ids, attention_mask=torch.ones_like(ids), **bias, **options)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
