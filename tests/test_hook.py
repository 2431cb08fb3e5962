"""What the wrapper around `generate` brings to the decoding loop, which transformers hands to no `custom_generate`."""

import copy
import inspect
import itertools
from unittest import mock

import pytest
import torch
from helpers import tiny_text
from helpers.both_ways import NEW, both
from helpers.noticed import Events
from helpers.oracle import planted
from helpers.zoo import build, ragged_batch
from transformers import (
    CsmConfig,
    CsmForConditionalGeneration,
    GenerationConfig,
    GenerationMixin,
    StoppingCriteriaList,
    TextStreamer,
)
from transformers.models.csm.generation_csm import CsmGenerateOutput
from transformers.models.moshi.modeling_moshi import MoshiConditionalGenerationGenerateOutput
from transformers.utils import logging

from hf_clover import CloverHeads, speculations

VOCABULARY = 16


@pytest.fixture(scope="module")
def model():
    return build("llama", vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def heads(model):
    return CloverHeads.from_target(model)


@pytest.fixture(scope="module")
def words():
    """A target with a tokenizer, and heads."""
    target = tiny_text.make_target()
    return target, tiny_text.make_tokenizer(), CloverHeads.from_target(target)


def door(name, heads):
    return {"assistant_model": heads} if name == "assistant_model" else {"custom_generate": heads.generate_with}


DOORS = pytest.mark.parametrize("way", ["assistant_model", "custom_generate"])


def drafted(target, heads, plain, *args, **options):
    """The call on a prompt of 7 tokens, with the plain text planted in the drafts -> our record. Tokens must be the
    plain ones, and drafts must be accepted."""
    with planted(heads, plain, 7):
        out = target.generate(*args, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, plain)
    assert out.speculation.accepted_tokens > 0
    return out.speculation


@pytest.fixture
def inputs():
    return ragged_batch(VOCABULARY, (7,))


@DOORS
def test_assistant_model_and_custom_generate_both_stream(model, heads, inputs, way):
    theirs, ours = Events(), Events()
    plain = model.generate(**inputs, max_new_tokens=NEW, streamer=theirs)
    drafted(model, heads, plain, **inputs, max_new_tokens=NEW, streamer=ours, **door(way, heads))
    assert ours.seen == theirs.seen
    assert len(ours.seen) == NEW + 2
    assert ours.seen[-1] == "end"


@DOORS
def test_assistant_model_and_custom_generate_both_take_the_tree_size(model, heads, inputs, way, monkeypatch):
    """From the call, else from its generation config, else from the heads."""
    plain = model.generate(**inputs, max_new_tokens=NEW)
    config = GenerationConfig(max_new_tokens=NEW, num_assistant_tokens=5)

    def sizes(**options):
        return set(drafted(model, heads, plain, **inputs, **options, **door(way, heads)).tree_sizes)

    assert sizes(max_new_tokens=NEW) == {24}
    monkeypatch.setattr(heads.generation_config, "num_assistant_tokens", 4)
    assert sizes(max_new_tokens=NEW) == {4}
    assert sizes(generation_config=config) == {5}
    assert sizes(generation_config=config, num_assistant_tokens=3) == {3}
    assert sizes(max_new_tokens=NEW, num_assistant_tokens=20) == {20}, "transformers' default is a size like any other"
    assert config.num_assistant_tokens == 5


def test_positional_arguments_of_generate_are_understood(model, heads, inputs):
    streamer, plain = Events(), model.generate(**inputs, max_new_tokens=NEW)
    arguments = (GenerationConfig(max_new_tokens=NEW), None, StoppingCriteriaList(), None, None, heads, streamer)
    drafted(model, heads, plain, inputs["input_ids"], *arguments, attention_mask=inputs["attention_mask"])
    assert streamer.seen[-1] == "end"


STOPPED = {  # stop strings of the call, of its config, of the target's config
    "by the call": (["e", "t"], None, None),
    "by the call's config": (None, {"stop_strings": ["e", "t"]}, None),
    "by the target's config": (None, None, ["e", "t"]),
    "by the call alone": ("e", None, ["x"]),
    "by both configs": (None, {"top_k": 0}, ["x"]),
}


@DOORS
@pytest.mark.parametrize("setting", STOPPED)
def test_stop_strings_from_any_setting_end_the_text_as_in_plain_generate(words, way, setting, monkeypatch):
    """transformers hands no tokenizer to a custom loop."""
    target, tokenizer, heads = words
    of_call, of_config, of_target = STOPPED[setting]
    config = GenerationConfig.from_dict({**target.generation_config.to_dict(), "stop_strings": of_target})
    monkeypatch.setattr(target, "generation_config", config)
    inputs = tokenizer(tiny_text.PROMPT, return_tensors="pt")
    options = {"tokenizer": tokenizer, "max_new_tokens": NEW} | ({"stop_strings": of_call} if of_call else {})
    if of_config:
        options["generation_config"] = GenerationConfig(max_new_tokens=options.pop("max_new_tokens"), **of_config)
    before = options.get("generation_config", config).to_dict()
    plain = target.generate(**inputs, **options)
    with planted(heads, plain, inputs.input_ids.shape[1]):
        ours = target.generate(**inputs, **options, **door(way, heads))
    assert torch.equal(ours, plain)
    assert options.get("generation_config", config).to_dict() == before


@pytest.mark.parametrize("lengths", [(7,), (5, 9, 3)], ids=["one", "ragged"])
def test_stop_strings_end_sampled_rows_as_in_plain_generate(words, lengths):
    target, tokenizer, heads = words
    options = {"stop_strings": ["ab", "e", "f", "t"], "tokenizer": tokenizer, "do_sample": True}
    accepted, ends = 0, set()
    for seed, eos in itertools.product(range(5), (None, 9)):
        inputs = ragged_batch(len(tokenizer), lengths)
        plain, ours = both(target, heads, inputs, seed, eos_token_id=eos, **options)
        assert torch.equal(ours.sequences, plain.sequences)
        ends.add(ours.sequences.shape[1])
        accepted += ours.speculation.accepted_tokens
    assert len(ends) > 1
    assert accepted > 0


def test_stop_strings_without_a_tokenizer_are_an_error(words):
    target, tokenizer, heads = words
    inputs = tokenizer(tiny_text.PROMPT, return_tensors="pt")
    with pytest.raises(ValueError, match="you must pass the model's tokenizer"):
        target.generate(**inputs, stop_strings=["e"], assistant_model=heads)


@DOORS
def test_token_healing_gives_plain_tokens(words, way):
    target, tokenizer, heads = words
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.bos_token = tokenizer.eos_token  # which healing needs
    inputs = tokenizer(tiny_text.PROMPT, return_tensors="pt")
    options = {"token_healing": True, "tokenizer": tokenizer, "max_new_tokens": NEW}
    plain = target.generate(**inputs, **options)
    assert torch.equal(target.generate(**inputs, **options, **door(way, heads)), plain)
    assert torch.equal(target.generate(inputs.input_ids, **options, **door(way, heads)), plain)


def test_text_is_streamed_as_plain_generate_streams_it(words, capsys):
    target, tokenizer, heads = words
    inputs, said = tokenizer(tiny_text.PROMPT, return_tensors="pt"), []
    for way in ({}, {"assistant_model": heads}, {"custom_generate": heads.generate_with}):
        target.generate(**inputs, max_new_tokens=NEW, streamer=TextStreamer(tokenizer), **way)
        said.append(capsys.readouterr().out)
    assert said[0]
    assert said == [said[0]] * 3


def overriding(model, wrapped):
    """The target, with a `generate` of its own: `wrapped` around the mixin's."""

    class Own(type(model)):
        def generate(self, *args, **kwargs):
            return wrapped(super().generate, *args, **kwargs)

    target = Own(model.config).eval()
    target.load_state_dict(model.state_dict())
    return target


def test_a_target_that_overrides_generate_gives_plain_tokens(model, heads, inputs):
    """Its `generate` calls the mixin's, as some speech models and others' wrappers do."""
    own = mock.Mock(side_effect=lambda generate, *args, **kwargs: generate(*args, **kwargs))
    target = overriding(model, own)
    plain = target.generate(**inputs, max_new_tokens=NEW)
    drafted(target, heads, plain, **inputs, max_new_tokens=NEW, assistant_model=heads)
    assert "assistant_model" in own.call_args.kwargs


@pytest.mark.parametrize("output", [CsmGenerateOutput, MoshiConditionalGenerationGenerateOutput])
def test_a_target_may_return_an_output_class_of_its_own(model, heads, inputs, output):
    """That class is made from the items that ours returns. The record is none of them; `speculations` has it."""
    target = overriding(model, lambda generate, *args, **kwargs: output(**generate(*args, **kwargs)))
    options = dict(max_new_tokens=NEW, return_dict_in_generate=True, output_scores=True)
    plain = target.generate(**inputs, **options)
    with planted(heads, plain.sequences, 7), speculations() as records:
        out = target.generate(**inputs, **options, assistant_model=heads)
    assert type(out) is output
    assert list(out) == list(plain)
    assert torch.equal(out.sequences, plain.sequences)
    assert [record.method for record in records] == ["tree"]
    assert records[0].accepted_tokens > 0


@pytest.mark.filterwarnings("ignore::hf_clover.decoding.route.CloverWarning")
def test_speech_of_csm_is_generated_plainly():
    """Each place of such a text is as many numbers as there are codebooks. That is left to plain `generate`."""
    small = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_codebooks=4)
    small |= dict(num_key_value_heads=2, head_dim=16, vocab_size=8)
    codec = dict(model_type="mimi", hidden_size=32, num_hidden_layers=1, num_filters=4, upsample_groups=8)
    depth = dict(small, backbone_hidden_size=32)
    config = CsmConfig(**small, depth_decoder_config=depth, codec_config=codec, text_vocab_size=32, pad_token_id=2)
    target = CsmForConditionalGeneration(config).eval()
    options = dict(max_new_tokens=6, do_sample=False, depth_decoder_do_sample=False, return_dict_in_generate=True)
    ids = torch.randint(4, 8, (2, 5, 4))
    plain = target.generate(ids, **options)
    with speculations() as records:
        out = target.generate(ids, **options, assistant_model=CloverHeads.from_target(target))
    assert type(out) is type(plain)
    assert torch.equal(out.sequences, plain.sequences)
    assert [(record.method, record.new_tokens) for record in records] == [("plain", 12)]


def test_transformers_refuses_an_assistant_with_continuous_batching(model, heads):
    with pytest.raises(NotImplementedError, match="assistant_model is not supported for continuous batching"):
        model.generate(torch.tensor([[1, 2, 3]]), assistant_model=heads, cache_implementation="paged")


def test_a_users_custom_generate_runs_without_the_assistant(model, heads):
    """With somebody else's `custom_generate`, the call is not ours, whatever the assistant is."""
    theirs = mock.Mock(side_effect=lambda model, input_ids, **kwargs: input_ids)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(model.generate(ids, assistant_model=heads, custom_generate=theirs), ids)
    assert "assistant_model" not in theirs.call_args.kwargs


def test_the_hook_keeps_the_signature_of_generate():
    names = {*inspect.signature(GenerationMixin.generate).parameters}
    assert {"inputs", "assistant_model", "custom_generate", "streamer"} <= names


@DOORS
def test_a_call_with_heads_causes_no_deprecation_warning(model, heads, way, caplog):
    logging.enable_propagation()
    options = {**ragged_batch(VOCABULARY, (7, 3)), "max_new_tokens": NEW, "return_dict_in_generate": True}
    try:
        with caplog.at_level("WARNING"):
            out = model.generate(**options, **door(way, heads))
    finally:
        logging.disable_propagation()
    assert out.speculation.method == "tree"
    assert "deprecated" not in caplog.text
