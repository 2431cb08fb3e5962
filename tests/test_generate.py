"""Everything `generate` takes, with heads as without: the same tokens, the same events, in the same order."""

from contextlib import nullcontext

import pytest
import torch
from helpers.fitting import fit
from helpers.noticed import Events
from helpers.oracle import planted
from helpers.zoo import build, ragged_batch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)

import hf_clover
from hf_clover import CloverHeads, Speculation
from hf_clover.decoding.route import CloverWarning
from hf_clover.targets.private_api import cache_name

VOCABULARY, NEW = 16, 30
WATERMARK = {"bias": 2.5, "greenlist_ratio": 0.5}
SYNTHID = {"keys": [1, 7, 9], "ngram_len": 3, "context_history_size": 8}


@pytest.fixture(scope="module")
def model():
    return build("llama", vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def heads(model):
    return CloverHeads.from_target(model)


@pytest.fixture(scope="module")
def trained_heads(model):
    """Trained on what the target goes on with after this prompt; nothing that a call learns stays with them."""
    return fit(CloverHeads.from_target(model), model, prompt=torch.tensor([[1, 4, 2, 5, 3]]))


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = {letter: i for i, letter in enumerate("_abcdefghijklmno")}
    backend = Tokenizer(models.WordLevel(letters, unk_token="_"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="_", unk_token="_")


def both(model, heads, inputs, seed=0, plant=True, **kwargs):
    """Plain generate and ours from the same seed, with the plain text planted in the trees unless told otherwise.

    What keeps state is made anew for each by a callable.
    """
    made = [{k: v() if callable(v) and k in FRESH else v for k, v in kwargs.items()} for _ in range(2)]
    common = {"max_new_tokens": NEW, "return_dict_in_generate": True}
    torch.manual_seed(seed)
    plain = model.generate(**inputs, **{**common, **made[0]})
    width = inputs["input_ids"].shape[1] if "input_ids" in inputs else 0
    with planted(heads, plain.sequences, width, seed) if plant else nullcontext():
        torch.manual_seed(seed)
        ours = model.generate(**inputs, **{**common, "num_assistant_tokens": 10, **made[1]}, assistant_model=heads)
    return plain, ours


FRESH = ("logits_processor", "stopping_criteria", "streamer")


class Recorder(LogitsProcessor):
    """Stateful: pushes down what it has seen itself pick, and remembers every call."""

    def __init__(self):
        self.calls, self.counts = [], None

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids.clone())
        self.counts = torch.zeros_like(scores) if self.counts is None else self.counts
        self.counts[torch.arange(len(scores)), input_ids[:, -1]] += 1.0
        return scores - 0.8 * self.counts


PROCESSING = {
    "repetition": {"repetition_penalty": 1.4},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[3], [4, 5]]},
    "sequence_bias": {"sequence_bias": [[[2], 1.5], [[3, 4], -3.0]]},
    "min_length": {"min_length": 25, "eos_token_id": 3},
    "min_new_tokens": {"min_new_tokens": 20, "eos_token_id": [3, 5]},
    "forced_bos_eos": {"forced_eos_token_id": 6, "forced_bos_token_id": 2},
    "exponential_decay": {"exponential_decay_length_penalty": (5, 1.3), "eos_token_id": 3},
    "suppress": {"suppress_tokens": [1, 2], "begin_suppress_tokens": [3]},
    "encoder_repetition": {"encoder_repetition_penalty": 1.5},
    "encoder_ngram": {"encoder_no_repeat_ngram_size": 2},
    "remove_invalid": {"remove_invalid_values": True},
    "renormalize": {"renormalize_logits": True},
    "guidance": {"guidance_scale": 1.5},
    "prefix": {"prefix_allowed_tokens_fn": lambda row, ids: [(int(ids[-1]) + row + k) % 15 + 1 for k in range(6)]},
}
SAMPLING = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "typical": {"typical_p": 0.8},
    "epsilon": {"epsilon_cutoff": 0.05},
    "eta": {"eta_cutoff": 0.05},
    "top_h": {"top_h": 0.5},
    "all": {"temperature": 0.8, "top_k": 10, "top_p": 0.9, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
    "watermark": {"watermarking_config": WATERMARK},
}
SHAPES = {"one": (7,), "ragged": (5, 9, 3)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", PROCESSING)
def test_tokens_equal_plain_with_every_processor(model, heads, name, do_sample, shape):
    inputs = ragged_batch(VOCABULARY, SHAPES[shape])
    plain, ours = both(model, heads, inputs, do_sample=do_sample, pad_token_id=0, **PROCESSING[name])
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.speculation.accepted_tokens > 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SAMPLING)
def test_sampled_tokens_equal_plain_with_every_warper(model, heads, name, shape):
    inputs = ragged_batch(VOCABULARY, SHAPES[shape])
    plain, ours = both(model, heads, inputs, do_sample=True, seed=3, **SAMPLING[name])
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.speculation.accepted_tokens > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_equal_plain_with_the_stateful_synthid_watermark(model, heads, shape):
    from transformers import SynthIDTextWatermarkingConfig

    inputs = ragged_batch(VOCABULARY, SHAPES[shape])
    config = SynthIDTextWatermarkingConfig(**SYNTHID)
    plain, ours = both(model, heads, inputs, do_sample=True, watermarking_config=config)
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.speculation.accepted_tokens > 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_stateful_processor_sees_the_same_calls_as_in_plain_generate(model, heads, do_sample, shape):
    inputs, recorders = ragged_batch(VOCABULARY, SHAPES[shape]), []

    def make():
        recorders.append(Recorder())
        return LogitsProcessorList([recorders[-1]])

    plain, ours = both(model, heads, inputs, do_sample=do_sample, logits_processor=make)
    assert torch.equal(ours.sequences, plain.sequences)
    theirs, mine = (recorder.calls for recorder in recorders)
    assert len(theirs) == len(mine) == NEW
    assert all(torch.equal(a, b) for a, b in zip(theirs, mine, strict=True))
    assert ours.speculation.accepted_tokens > 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("eos", [3, [3, 5, 11]])
def test_rows_that_end_are_padded_as_by_plain_generate(model, heads, eos, shape):
    inputs = ragged_batch(VOCABULARY, SHAPES[shape])
    lengths = set()
    for seed in range(6):
        plain, ours = both(model, heads, inputs, seed, do_sample=seed > 0, eos_token_id=eos, pad_token_id=0)
        assert torch.equal(ours.sequences, plain.sequences)
        lengths.add(ours.sequences.shape[1])
    assert len(lengths) > 1, "generations must have ended at different lengths"


@pytest.mark.parametrize("new", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_max_length_cuts_a_walk_in_the_middle(model, heads, new, shape):
    inputs = ragged_batch(VOCABULARY, SHAPES[shape])
    plain = model.generate(**inputs, max_new_tokens=NEW)
    width = inputs["input_ids"].shape[1]
    with planted(heads, plain, width):
        ours = model.generate(**inputs, max_new_tokens=new, assistant_model=heads, num_assistant_tokens=8)
    assert torch.equal(ours, plain[:, : width + new])


@pytest.mark.parametrize("shape", SHAPES)
def test_stop_strings_end_the_text_as_in_plain_generate(model, heads, tokenizer, shape):
    inputs = ragged_batch(VOCABULARY, SHAPES[shape])
    stopped = 0
    for seed in range(5):
        kwargs = {"stop_strings": ["ab", "f", "cd"], "tokenizer": tokenizer, "do_sample": True}
        for pads in ({}, {"eos_token_id": 9, "pad_token_id": 0}):
            plain, ours = both(model, heads, inputs, seed, **kwargs, **pads)
            assert torch.equal(ours.sequences, plain.sequences)
            stopped += ours.sequences.shape[1] < inputs["input_ids"].shape[1] + NEW
    assert stopped > 0


class StopAt(StoppingCriteria):
    """A user's own: asked once per token, it remembers and stops a row at a given sum."""

    def __init__(self):
        self.lengths = []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        return input_ids[:, -4:].sum(1) > 40


@pytest.mark.parametrize("shape", SHAPES)
def test_a_users_criterion_is_asked_once_per_token(model, heads, shape):
    inputs, criteria = ragged_batch(VOCABULARY, SHAPES[shape]), []

    def make():
        criteria.append(StopAt())
        return StoppingCriteriaList([criteria[-1]])

    plain, ours = both(model, heads, inputs, stopping_criteria=make)
    assert torch.equal(ours.sequences, plain.sequences)
    assert criteria[0].lengths == criteria[1].lengths


def test_max_time_zero_stops_after_one_token(model, heads):
    inputs = ragged_batch(VOCABULARY, (7,))
    out = model.generate(**inputs, max_new_tokens=240, max_time=0.0, assistant_model=heads)
    assert out.shape[1] == inputs["input_ids"].shape[1] + 1, (
        "plain generate emits one token and then looks at the clock"
    )


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_streamers_see_the_same_events(model, heads, do_sample, shape):
    inputs, streamers = ragged_batch(VOCABULARY, SHAPES[shape]), []

    def make():
        streamers.append(Events())
        return streamers[-1]

    both(model, heads, inputs, streamer=make, do_sample=do_sample)
    assert streamers[0].seen == streamers[1].seen
    assert len(streamers[0].seen) == NEW + 2


def test_text_streamers_give_the_decoded_text(model, heads, tokenizer, capsys):
    inputs = ragged_batch(VOCABULARY, (7,))
    out = model.generate(
        **inputs, max_new_tokens=12, assistant_model=heads, streamer=TextStreamer(tokenizer, skip_prompt=True)
    )
    text = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
    assert capsys.readouterr().out.strip() == text
    iterator = TextIteratorStreamer(tokenizer, skip_prompt=True)
    model.generate(**inputs, max_new_tokens=12, assistant_model=heads, streamer=iterator)
    assert "".join(iterator) == text


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_and_logits_have_plain_generates_entry_for_every_token(model, heads, do_sample, shape):
    inputs = ragged_batch(VOCABULARY, SHAPES[shape])
    wanted = {"output_scores": True, "output_logits": True, "eos_token_id": 3, "pad_token_id": 0, "temperature": 0.7}
    plain, ours = both(model, heads, inputs, 5, do_sample=do_sample, **wanted)
    assert torch.equal(ours.sequences, plain.sequences)
    for theirs, mine in ((plain.scores, ours.scores), (plain.logits, ours.logits)):
        assert len(theirs) == len(mine) == ours.sequences.shape[1] - inputs["input_ids"].shape[1]
        for a, b in zip(theirs, mine, strict=True):
            # In this lively model, rounding alone sets plain cached and uncached fp32 logits 2e-4 apart.
            torch.testing.assert_close(a, b, atol=1e-3, rtol=0)
    a, b = (model.compute_transition_scores(o.sequences, o.scores, normalize_logits=True) for o in (plain, ours))
    torch.testing.assert_close(a, b, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_output_hidden_states_and_output_attentions_are_refused(heads, name):
    model = build("llama", "eager", vocab_size=VOCABULARY)
    with pytest.raises(ValueError, match=f"`{name}=True` is not supported"):
        model.generate(
            **ragged_batch(VOCABULARY, (4,)), assistant_model=heads, return_dict_in_generate=True, **{name: True}
        )


def test_num_return_sequences_gives_plain_tokens(model, heads):
    inputs = ragged_batch(VOCABULARY, (5, 9))
    plain, ours = both(model, heads, inputs, do_sample=True, num_return_sequences=3)
    assert ours.sequences.shape[0] == 6
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.speculation.accepted_tokens > 0


@pytest.mark.parametrize("width", [1, 6])
def test_inputs_embeds_give_plain_tokens(model, heads, width):
    ids = ragged_batch(VOCABULARY, (width,))["input_ids"]
    embeds = model.get_input_embeddings()(ids)
    for inputs in ({"inputs_embeds": embeds}, {"inputs_embeds": embeds, "input_ids": ids}):
        plain, ours = both(model, heads, inputs, do_sample=True)
        assert torch.equal(ours.sequences, plain.sequences)
        assert ours.speculation.accepted_tokens > 0


@pytest.mark.parametrize("chunk", [2, 4, 64])
def test_chunked_prefill_gives_plain_tokens(model, heads, chunk):
    inputs = ragged_batch(VOCABULARY, (5, 9, 3))
    plain, ours = both(model, heads, inputs, prefill_chunk_size=chunk)
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.speculation.accepted_tokens > 0


@pytest.mark.parametrize("implementation", ["static", "dynamic"])
def test_static_and_dynamic_cache_implementations_give_plain_tokens(model, heads, implementation):
    inputs = ragged_batch(VOCABULARY, (5, 9, 3))
    plain, ours = both(model, heads, inputs, cache_implementation=implementation)
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.speculation.accepted_tokens > 0


# ---------------------------------------------------------------------- conversations


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2_window", "gemma3"])
@pytest.mark.parametrize("who", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("shape", SHAPES)
def test_turns_with_and_without_heads_share_one_cache(name, who, shape):
    """Three turns, each spoken with heads or without, on one cache: as if plain generate had spoken all of them."""
    target = build(name, vocab_size=VOCABULARY)
    heads = CloverHeads.from_target(target)
    inputs = ragged_batch(VOCABULARY, SHAPES[shape])
    batch, accepted = len(SHAPES[shape]), 0

    def talk(speakers, truth=None):
        nonlocal accepted
        ids, mask, cache, said = inputs["input_ids"], inputs["attention_mask"], DynamicCache(config=target.config), []
        for turn, with_heads in enumerate(speakers):
            assistant = {"assistant_model": heads, "num_assistant_tokens": 6} if with_heads else {}
            with planted(heads, truth[turn], ids.shape[1], turn) if truth else nullcontext():
                out = target.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    **{cache_name(): cache},
                    max_new_tokens=12,
                    eos_token_id=3,
                    pad_token_id=0,
                    return_dict_in_generate=True,
                    **assistant,
                )
            if with_heads:
                accepted += out.speculation.accepted_tokens
                assert out[cache_name()] is cache, "the user's own cache goes on"
            assert cache.get_seq_length() == out.sequences.shape[1] - 1
            said.append(out.sequences)
            follow_up = torch.full((batch, 3), turn + 4)
            ids = torch.cat((out.sequences, follow_up), dim=1)
            mask = torch.cat((mask, mask.new_ones(batch, ids.shape[1] - mask.shape[1])), dim=1)
        return said

    plain = talk((False,) * 3)
    mixed = talk((*who, who[0]), truth=plain)
    assert all(torch.equal(a, b) for a, b in zip(plain, mixed, strict=True))
    assert accepted > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_heads_draft_a_second_turn_as_if_the_conversation_were_one_prompt(model, trained_heads, shape):
    """In a second turn on one cache the same drafts are accepted as if the whole conversation were one prompt."""
    inputs, cache = ragged_batch(VOCABULARY, SHAPES[shape]), DynamicCache(config=model.config)
    common = {"max_new_tokens": 25, "assistant_model": trained_heads, "return_dict_in_generate": True}
    first = model.generate(**inputs, **{cache_name(): cache}, **common).sequences
    ids = torch.cat((first, first[:, -4:-1]), dim=1)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, ids.shape[1] - inputs["input_ids"].shape[1]), value=1)
    on_cache = model.generate(input_ids=ids, attention_mask=mask, **{cache_name(): cache}, **common)
    as_one = model.generate(input_ids=ids, attention_mask=mask, **common)
    assert torch.equal(on_cache.sequences, as_one.sequences)
    assert on_cache.speculation.accepted_tokens == as_one.speculation.accepted_tokens > 0
    assert on_cache.speculation.target_forwards == as_one.speculation.target_forwards


def test_two_turns_on_the_users_static_cache_equal_plain(model, heads):
    inputs = ragged_batch(VOCABULARY, (7,))

    def talk(assistant):
        cache, ids, said = StaticCache(config=model.config, max_cache_len=64), inputs["input_ids"], []
        for _ in range(2):
            ids = model.generate(ids, **{cache_name(): cache}, max_new_tokens=10, **assistant)
            said.append(ids)
            ids = torch.cat((ids, ids[:, :2]), dim=1)
        return said

    assert all(torch.equal(a, b) for a, b in zip(talk({}), talk({"assistant_model": heads}), strict=True))


# ---------------------------------------------------------------------- settings, doors, neighbours


def test_the_record_of_a_call_counts_tokens_forwards_and_tree_sizes(model, heads):
    inputs = ragged_batch(VOCABULARY, (7,))
    _, ours = both(model, heads, inputs, num_assistant_tokens=9)
    said = ours.speculation
    assert isinstance(said, Speculation)
    assert said.new_tokens == NEW
    assert said.new_tokens == said.target_forwards + said.accepted_tokens
    assert said.tokens_per_forward == pytest.approx(NEW / said.target_forwards)
    assert said.tree_sizes == [9] * (said.target_forwards - 1)
    assert min(said.draft_seconds, said.verify_seconds, said.walk_seconds) > 0


def test_the_tree_size_comes_from_the_call_or_its_config_before_the_heads(model):
    heads = CloverHeads.from_target(model)
    inputs = ragged_batch(VOCABULARY, (7,))

    def sizes(**kwargs):
        return both(model, heads, inputs, plant=False, **kwargs)[1].speculation.tree_sizes

    assert set(sizes(num_assistant_tokens=None)) == {24}
    heads.generation_config.num_assistant_tokens = 5
    assert set(sizes(num_assistant_tokens=None)) == {5}
    assert set(sizes(num_assistant_tokens=20)) == {20}, "transformers' own default is a size like any other"
    config = model.generation_config.__class__(num_assistant_tokens=7, max_new_tokens=10)
    out = model.generate(**inputs, generation_config=config, assistant_model=heads, return_dict_in_generate=True)
    assert set(out.speculation.tree_sizes) == {7}


@pytest.mark.parametrize("tree", ["global", "levels", "chain"])
@pytest.mark.parametrize("variant", ["clover-x", "clover-2", "clover", "medusa"])
def test_tokens_equal_plain_for_every_variant_and_tree_shape(model, variant, tree):
    heads = CloverHeads.from_target(model, variant=variant, draft_tree=tree)
    for lengths in SHAPES.values():
        plain, ours = both(model, heads, ragged_batch(VOCABULARY, lengths), plant=False, num_assistant_tokens=12)
        assert torch.equal(ours.sequences, plain.sequences)
        assert ours.speculation.accepted_tokens > 0


def test_trees_deeper_than_the_heads_change_no_token(model):
    heads = CloverHeads.from_target(model, num_heads=2, draft_depth=6)
    plain, ours = both(model, heads, ragged_batch(VOCABULARY, (7,)), plant=False, num_assistant_tokens=40)
    assert torch.equal(ours.sequences, plain.sequences)


def test_a_draft_vocabulary_changes_no_token(model):
    heads = CloverHeads.from_target(model, draft_vocab_size=6)
    heads.draft_ids.copy_(torch.tensor([1, 3, 5, 7, 9, 11]))
    for lengths in SHAPES.values():
        inputs, accepted = ragged_batch(VOCABULARY, lengths), 0
        for seed in range(4):
            plain, ours = both(model, heads, inputs, seed, plant=False, do_sample=True, num_assistant_tokens=30)
            assert torch.equal(ours.sequences, plain.sequences)
            accepted += ours.speculation.accepted_tokens
        assert accepted > 0


def test_custom_generate_drafts_without_the_hook(model, heads):
    inputs = ragged_batch(VOCABULARY, (5, 9, 3))
    plain, _ = both(model, heads, inputs, max_new_tokens=60)
    hf_clover.uninstall_hook()
    try:
        out = model.generate(
            **inputs,
            custom_generate=heads.generate_with,
            max_new_tokens=60,
            return_dict_in_generate=True,
            num_assistant_tokens=11,
        )
    finally:
        hf_clover.install_hook()
    assert torch.equal(out.sequences, plain.sequences)
    assert set(out.speculation.tree_sizes) == {11}
    assert out.speculation.accepted_tokens > 0


def test_other_ways_to_generate_are_the_same_with_and_without_the_hook(model):
    inputs, assistant = ragged_batch(VOCABULARY, (7,)), build("llama", vocab_size=VOCABULARY, seed=1)
    calls = [
        {},
        {"do_sample": True},
        {"num_beams": 3},
        {"assistant_model": assistant},
        {"assistant_model": assistant, "do_sample": True},
        {"assistant_model": assistant, "num_assistant_tokens": 3},
        {"prompt_lookup_num_tokens": 3},
    ]
    for kwargs in calls:
        with_hook = _seeded(model, inputs, kwargs)
        hf_clover.uninstall_hook()
        try:
            without = _seeded(model, inputs, kwargs)
        finally:
            hf_clover.install_hook()
        assert torch.equal(with_hook, without), kwargs


def _seeded(model, inputs, kwargs):
    torch.manual_seed(0)
    return model.generate(**inputs, max_new_tokens=20, **kwargs)


def test_heads_of_another_dtype_give_plain_tokens(model):
    heads = CloverHeads.from_target(model).to(torch.bfloat16)
    plain, ours = both(model, heads, ragged_batch(VOCABULARY, (7,)), plant=False, num_assistant_tokens=30)
    assert torch.equal(ours.sequences, plain.sequences)
    assert heads.dtype == torch.bfloat16
    assert ours.speculation.accepted_tokens > 0


def test_use_cache_false_gives_plain_tokens_with_a_warning(model, heads):
    inputs = ragged_batch(VOCABULARY, (7,))
    plain, _ = both(model, heads, inputs)
    with pytest.warns(CloverWarning, match="use_cache=False"):
        out = model.generate(**inputs, assistant_model=heads, use_cache=False, max_new_tokens=NEW)
    assert torch.equal(out, plain.sequences)


# ---------------------------------------------------------------------- rows that end


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("automatic", [pytest.param(True, marks=pytest.mark.automatic), False])
def test_rows_that_have_ended_leave_the_batch(model, trained_heads, sampled, automatic):
    """The target runs fewer and fewer rows, and every row has the tokens of plain generate all the same."""
    inputs = ragged_batch(VOCABULARY, (5, 9, 3, 7, 6, 2))
    common = {**inputs, "max_new_tokens": 60, "do_sample": sampled, "eos_token_id": [5, 9], "pad_token_id": 0}
    rows = []
    handle = model.get_input_embeddings().register_forward_hook(lambda *seen: rows.append(len(seen[2])))
    try:
        with hf_clover.speculations() as records:
            torch.manual_seed(4)
            sequences = model.generate(**common, assistant_model=trained_heads)
    finally:
        handle.remove()
    torch.manual_seed(4)
    plain = model.generate(**common)
    assert torch.equal(sequences, plain)
    assert rows[0] == 6
    assert rows[-1] <= 2, "most rows had ended"
    assert rows == sorted(rows, reverse=True)
    assert records[0].accepted_tokens > 0 or automatic


def test_a_returned_cache_keeps_rows_that_have_ended(model, heads):
    inputs = ragged_batch(VOCABULARY, (5, 9, 3))
    common = {**inputs, "max_new_tokens": 40, "do_sample": False, "eos_token_id": [5, 9], "pad_token_id": 0}
    out = model.generate(**common, assistant_model=heads, return_dict_in_generate=True)
    assert out[cache_name()].get_seq_length() == out.sequences.shape[1] - 1
    assert out[cache_name()].layers[0].keys.shape[0] == 3
    assert torch.equal(out.sequences, model.generate(**common))
