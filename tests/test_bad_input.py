"""What cannot work says so by name before a token is generated, and nothing is left behind when something breaks."""

import math
import re

import pytest
import torch
from helpers.breaking_off import Breaks, state_of
from helpers.oracle import planted
from helpers.zoo import build, ragged_batch
from torch import nn
from transformers import AttentionInterface, AutoModelForSeq2SeqLM, LogitsProcessor, LogitsProcessorList, T5Config

from hf_clover import CloverConfig, CloverHeads
from hf_clover.decoding.route import CloverWarning

VOCABULARY, NEW = 16, 20


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


def test_heads_with_another_hidden_size_are_refused(heads, inputs):
    other = build("gemma3", vocab_size=VOCABULARY)
    other.config.get_text_config().hidden_size = 48
    with pytest.raises(ValueError, match=r"hidden_size is 64, that of .* is 48.*from_target"):
        other.generate(**inputs, assistant_model=heads)


def test_heads_with_another_vocabulary_size_are_refused(heads):
    other = build("llama", vocab_size=VOCABULARY + 1)
    with pytest.raises(ValueError, match=r"vocab_size is 16, that of .* is 17.*from_target"):
        other.generate(**ragged_batch(VOCABULARY, (4,)), assistant_model=heads)


def test_heads_for_another_target_of_the_same_shape_are_refused(heads, inputs):
    other = build("llama", vocab_size=VOCABULARY, seed=1)
    with pytest.raises(ValueError, match=r"fingerprint of its lm_head .*from_target"):
        other.generate(**inputs, assistant_model=heads)


def test_a_target_with_unreadable_embeddings_is_refused(model, heads, inputs):
    class Opaque(nn.Module):
        """An lm_head and an embedding whose numbers cannot be read, as after some quantisations."""

        def __init__(self, module):
            super().__init__()
            self.inner = module

        def forward(self, x):
            return self.inner(x)

    model.lm_head, model.model.embed_tokens = Opaque(model.lm_head), Opaque(model.model.embed_tokens)
    fresh = CloverHeads(heads.config)
    with pytest.raises(ValueError, match=r"lends no token embeddings.*lm_head \(Opaque\)"):
        model.generate(**inputs, assistant_model=fresh)


def test_an_encoder_decoder_target_is_refused(heads):
    config = T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    target = AutoModelForSeq2SeqLM.from_config(config)
    with pytest.raises(ValueError, match=r"`assistant_model`: .*encoder-decoder.*without `assistant_model`"):
        target.generate(torch.tensor([[1, 2, 3]]), assistant_model=heads)
    with pytest.raises(ValueError, match=r"`target` is the encoder-decoder"):
        CloverHeads.from_target(target)


def test_beam_search_with_heads_is_refused(model, heads, inputs):
    with pytest.raises(ValueError, match=r"`num_beams=3`: Clover heads work with greedy decoding and sampling"):
        model.generate(**inputs, assistant_model=heads, num_beams=3)
    with pytest.raises(ValueError, match=r"`num_beams=3`"):
        model.generate(**inputs, custom_generate=heads.generate_with, num_beams=3)


@pytest.mark.parametrize(
    ("setting", "value"), [("prompt_lookup_num_tokens", 3), ("assistant_early_exit", 1), ("penalty_alpha", 0.5)]
)
def test_other_decoding_methods_are_refused_by_name(model, heads, inputs, setting, value):
    """The error names each of them; none is ignored in silence."""
    message = rf"`{setting}={re.escape(str(value))}`: Clover heads work with .*Leave `{setting}` out"
    for door in ({"assistant_model": heads}, {"custom_generate": heads.generate_with}):
        with pytest.raises(ValueError, match=message):
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


class Poison(LogitsProcessor):
    def __init__(self, after):
        self.calls, self.after = 0, after

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores * math.nan if self.calls > self.after else scores


def test_nan_from_a_processor_is_an_error_when_sampling(model, heads, inputs):
    """Nothing can be sampled from it: plain generate says so too, in other words."""
    before = state_of(model)
    with pytest.raises(ValueError, match=r"`logits` of the target contain NaN.*remove_invalid_values"):
        model.generate(
            **inputs,
            assistant_model=heads,
            max_new_tokens=NEW,
            do_sample=True,
            logits_processor=LogitsProcessorList([Poison(4)]),
        )
    assert state_of(model) == before


class PoisonsSome(LogitsProcessor):
    """NaN at every third token, for an id that depends on the text."""

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] % 3 == 0:
            scores[torch.arange(len(scores)), input_ids[:, -1] // 2 + 3] = math.nan
        return scores


@pytest.mark.parametrize("make", [lambda: Poison(4), PoisonsSome])
@pytest.mark.parametrize("lengths", [(4,), (5, 9, 3)])
def test_nan_from_a_processor_is_the_largest_number_in_greedy_decoding(model, heads, lengths, make):
    """As for plain generate's `argmax`."""
    inputs = ragged_batch(VOCABULARY, lengths)
    plain = model.generate(**inputs, max_new_tokens=NEW, logits_processor=LogitsProcessorList([make()]))
    drafts = {"assistant_model": heads, "num_assistant_tokens": 6, "return_dict_in_generate": True}
    with planted(heads, plain, inputs["input_ids"].shape[1]):
        ours = model.generate(**inputs, max_new_tokens=NEW, logits_processor=LogitsProcessorList([make()]), **drafts)
    assert torch.equal(ours.sequences, plain)
    assert ours.speculation.accepted_tokens > 0


@pytest.mark.parametrize("kwargs", [{}, {"do_sample": True}, {"repetition_penalty": 1.2}])
@pytest.mark.parametrize("lengths", [(4,), (5, 9, 3)])
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


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_heads_that_give_nan_stop_drafting(model, heads, inputs, broken):
    with torch.no_grad():
        heads.head_norm.weight.fill_(broken)
    plain = model.generate(**inputs, max_new_tokens=NEW)
    with pytest.warns(CloverWarning, match=r"heads gave NaN: drafting is off") as caught:
        out = model.generate(**inputs, max_new_tokens=NEW, assistant_model=heads, return_dict_in_generate=True)
    assert len(caught) == 1
    assert torch.equal(out.sequences, plain)
    assert sum(out.speculation.tree_sizes[1:]) == 0, "the walk of the first tree saw it"
    assert out.speculation.accepted_tokens == 0


# ---------------------------------------------------------------------- calls that are interrupted


@pytest.mark.parametrize("error", [RuntimeError("cancelled"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["processor", "streamer", "target", "heads"])
def test_an_interrupted_call_leaves_target_and_heads_as_they_were(model, heads, where, error):
    inputs = ragged_batch(VOCABULARY, (7,))
    plain = model.generate(**inputs, max_new_tokens=NEW)
    model.generate(**inputs, max_new_tokens=2, assistant_model=heads)  # so that the target has been measured
    before, weights = state_of(model), {k: v.clone() for k, v in heads.state_dict().items()}
    breaks, kwargs, handle = Breaks(error), {}, None
    if where == "processor":
        kwargs["logits_processor"] = LogitsProcessorList([breaks])
    elif where == "streamer":
        kwargs["streamer"] = breaks
    else:
        module = model.model.layers[1] if where == "target" else heads.head_norm
        handle = module.register_forward_hook(lambda *_: breaks.count())
    with pytest.raises(type(error)):
        model.generate(**inputs, max_new_tokens=60, assistant_model=heads, **kwargs)
    if handle is not None:
        handle.remove()
    assert state_of(model) == before
    assert all(torch.equal(weights[k], v) for k, v in heads.state_dict().items())
    with planted(heads, plain, inputs["input_ids"].shape[1]):
        again = model.generate(**inputs, max_new_tokens=NEW, assistant_model=heads, return_dict_in_generate=True)
    assert torch.equal(again.sequences, plain)
    assert again.speculation.accepted_tokens > 0


# ---------------------------------------------------------------------- attention that takes no tree mask


def counting_sdpa(calls):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attention(*args, **kwargs):
        calls.append(1)
        return sdpa_attention_forward(*args, **kwargs)

    return attention


def test_another_attention_is_switched_for_the_tree_and_put_back(model, heads, inputs):
    """As for flash attention, which this machine cannot load: an implementation that is neither sdpa nor eager."""
    calls = []
    AttentionInterface.register("counting", counting_sdpa(calls))
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionMaskInterface.register("counting", sdpa_mask)
    model.set_attn_implementation("counting")
    before = state_of(model)
    plain = model.generate(**inputs, max_new_tokens=NEW)
    with planted(heads, plain, inputs["input_ids"].shape[1]):
        calls.clear()
        out = model.generate(**inputs, max_new_tokens=NEW, assistant_model=heads, return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain)
    assert out.speculation.method == "tree"
    assert out.speculation.accepted_tokens > 0
    assert len(calls) > 0, "the prompt keeps the implementation the user chose"
    assert state_of(model) == before


def test_an_attention_that_cannot_be_switched_falls_back(model, heads):
    inputs = ragged_batch(VOCABULARY, (7,))
    AttentionInterface.register("unmasked", counting_sdpa([]))
    plain = model.generate(**inputs, max_new_tokens=NEW)
    model.config._attn_implementation = "unmasked"
    model.__class__ = type("NoSdpa", (type(model),), {"_supports_sdpa": False})
    with pytest.warns(CloverWarning, match=r"its logits for a trial tree differ from those of plain forwards"):
        out = model.generate(**inputs, max_new_tokens=NEW, assistant_model=heads, return_dict_in_generate=True)
    assert out.speculation.method in ("chain", "plain")
    assert out.sequences.shape == plain.shape
