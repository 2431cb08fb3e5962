"""Everything `generate` takes, with heads as without: the same tokens, the same events, in the same order."""

import contextlib

import pytest
import torch
from helpers.both_ways import NEW, both, same_tokens
from helpers.fitting import fit
from helpers.noticed import Events
from helpers.oracle import planted
from helpers.zoo import build, ragged_batch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)

import hf_clover
from hf_clover import CloverHeads, Speculation
from hf_clover.targets.private_api import cache_name

VOCABULARY = 16


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


@contextlib.contextmanager
def no_hook():
    hf_clover.uninstall_hook()
    try:
        yield
    finally:
        hf_clover.install_hook()


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
    "watermark": {"watermarking_config": {"bias": 2.5, "greenlist_ratio": 0.5}},
    "synthid": {
        "watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 7, 9], ngram_len=3, context_history_size=8)
    },
}
EVERY = [(kwargs, sampled) for kwargs in PROCESSING.values() for sampled in (False, True)]
EVERY += [(kwargs, True) for kwargs in SAMPLING.values()]
IDS = [f"{name}-{how}" for name in PROCESSING for how in ("greedy", "sampled")] + list(SAMPLING)
SHAPES = pytest.mark.parametrize("lengths", [(7,), (5, 9, 3)], ids=["one", "ragged"])


@SHAPES
@pytest.mark.parametrize(("kwargs", "do_sample"), EVERY, ids=IDS)
def test_tokens_equal_plain_with_every_processor_and_warper(model, heads, kwargs, do_sample, lengths):
    same_tokens(model, heads, ragged_batch(VOCABULARY, lengths), do_sample=do_sample, **kwargs)


@SHAPES
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_stateful_processor_sees_the_same_calls_as_in_plain_generate(model, heads, do_sample, lengths):
    theirs, ours = Recorder(), Recorder()
    of_each = [{"logits_processor": LogitsProcessorList([each])} for each in (theirs, ours)]
    same_tokens(model, heads, ragged_batch(VOCABULARY, lengths), do_sample=do_sample, of_each=of_each)
    assert len(theirs.calls) == len(ours.calls) == NEW
    assert all(torch.equal(a, b) for a, b in zip(theirs.calls, ours.calls, strict=True))


@SHAPES
@pytest.mark.parametrize("eos", [3, [3, 5, 11]])
def test_rows_that_end_are_padded_as_by_plain_generate(model, heads, eos, lengths):
    ends, accepted = set(), 0
    for seed in range(6):
        plain, ours = both(model, heads, ragged_batch(VOCABULARY, lengths), seed, do_sample=seed > 0, eos_token_id=eos)
        assert torch.equal(ours.sequences, plain.sequences)
        ends.add(ours.sequences.shape[1])
        accepted += ours.speculation.accepted_tokens
    assert len(ends) > 1, "generations must have ended at different lengths"
    assert accepted > 0


@SHAPES
@pytest.mark.parametrize("new", [1, 2, 3, 7, 8])
def test_max_length_cuts_a_walk_in_the_middle(model, heads, new, lengths):
    inputs, width = ragged_batch(VOCABULARY, lengths), max(lengths)
    plain = model.generate(**inputs, max_new_tokens=NEW)
    with planted(heads, plain, width):
        ours = model.generate(**inputs, max_new_tokens=new, assistant_model=heads, num_assistant_tokens=8)
    assert torch.equal(ours, plain[:, : width + new])


class StopAt(StoppingCriteria):
    """A user's own: asked once per token, it remembers and stops a row at a given sum."""

    def __init__(self):
        self.lengths = []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        return input_ids[:, -4:].sum(1) > 48


@SHAPES
def test_a_users_criterion_is_asked_once_per_token(model, heads, lengths):
    theirs, ours = StopAt(), StopAt()
    of_each = [{"stopping_criteria": StoppingCriteriaList([each])} for each in (theirs, ours)]
    same_tokens(model, heads, ragged_batch(VOCABULARY, lengths), of_each=of_each)
    assert theirs.lengths == ours.lengths


def test_max_time_zero_stops_after_one_token(model, heads):
    """Plain generate emits one token and then looks at the clock."""
    out = model.generate(**ragged_batch(VOCABULARY, (7,)), max_new_tokens=240, max_time=0.0, assistant_model=heads)
    assert out.shape[1] == 7 + 1


@SHAPES
@pytest.mark.parametrize("do_sample", [False, True])
def test_streamers_see_the_same_events(model, heads, do_sample, lengths):
    theirs, ours = Events(), Events()
    of_each = [{"streamer": each} for each in (theirs, ours)]
    same_tokens(model, heads, ragged_batch(VOCABULARY, lengths), of_each=of_each, do_sample=do_sample)
    assert theirs.seen == ours.seen
    assert len(ours.seen) == NEW + 2


@SHAPES
@pytest.mark.parametrize("do_sample", [False, True])
def test_scores_and_logits_have_plain_generates_entry_for_every_token(model, heads, do_sample, lengths):
    wanted = {"output_scores": True, "output_logits": True, "eos_token_id": 3, "temperature": 0.7}
    plain, ours = both(model, heads, ragged_batch(VOCABULARY, lengths), 5, do_sample=do_sample, **wanted)
    assert torch.equal(ours.sequences, plain.sequences)
    for theirs, mine in ((plain.scores, ours.scores), (plain.logits, ours.logits)):
        assert len(theirs) == len(mine) == ours.sequences.shape[1] - max(lengths)
        for a, b in zip(theirs, mine, strict=True):
            # In this lively model, rounding alone sets plain cached and uncached fp32 logits 2e-4 apart.
            torch.testing.assert_close(a, b, atol=1e-3, rtol=0)
    a, b = (model.compute_transition_scores(o.sequences, o.scores, normalize_logits=True) for o in (plain, ours))
    torch.testing.assert_close(a, b, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_output_hidden_states_and_output_attentions_are_refused(heads, name):
    options = {"assistant_model": heads, "return_dict_in_generate": True, name: True}
    with pytest.raises(ValueError, match=f"`{name}=True` is not supported"):
        build("llama", "eager", vocab_size=VOCABULARY).generate(**ragged_batch(VOCABULARY, (4,)), **options)


def test_num_return_sequences_gives_plain_tokens(model, heads):
    ours = same_tokens(model, heads, ragged_batch(VOCABULARY, (5, 9)), do_sample=True, num_return_sequences=3)
    assert ours.sequences.shape[0] == 6


@pytest.mark.parametrize("width", [1, 6])
def test_inputs_embeds_give_plain_tokens(model, heads, width):
    ids = ragged_batch(VOCABULARY, (width,))["input_ids"]
    embeds = model.get_input_embeddings()(ids)
    for inputs in ({"inputs_embeds": embeds}, {"inputs_embeds": embeds, "input_ids": ids}):
        same_tokens(model, heads, inputs, do_sample=True)


@pytest.mark.parametrize("chunk", [2, 64])
def test_chunked_prefill_gives_plain_tokens(model, heads, chunk):
    same_tokens(model, heads, ragged_batch(VOCABULARY, (5, 9, 3)), prefill_chunk_size=chunk)


@SHAPES
def test_heads_draft_a_second_turn_as_if_the_conversation_were_one_prompt(model, trained_heads, lengths):
    """In a second turn on one cache the same drafts are accepted as if the whole conversation were one prompt."""
    inputs, cache = ragged_batch(VOCABULARY, lengths), DynamicCache(config=model.config)
    common = {"max_new_tokens": 25, "assistant_model": trained_heads, "return_dict_in_generate": True}
    first = model.generate(**inputs, **{cache_name(): cache}, **common).sequences
    ids = torch.cat((first, first[:, -4:-1]), dim=1)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, ids.shape[1] - max(lengths)), value=1)
    on_cache = model.generate(ids, attention_mask=mask, **{cache_name(): cache}, **common)
    as_one = model.generate(ids, attention_mask=mask, **common)
    assert torch.equal(on_cache.sequences, as_one.sequences)
    assert on_cache.speculation.accepted_tokens == as_one.speculation.accepted_tokens > 0
    assert on_cache.speculation.target_forwards == as_one.speculation.target_forwards


# ---------------------------------------------------------------------- settings and kinds of heads


def test_the_record_of_a_call_counts_tokens_forwards_and_tree_sizes(model, heads):
    said = same_tokens(model, heads, ragged_batch(VOCABULARY, (7,)), num_assistant_tokens=9).speculation
    assert isinstance(said, Speculation)
    assert said.new_tokens == NEW == said.target_forwards + said.accepted_tokens
    assert said.tokens_per_forward == pytest.approx(NEW / said.target_forwards)
    assert said.tree_sizes == [9] * (said.target_forwards - 1)
    assert min(said.draft_seconds, said.verify_seconds, said.walk_seconds) > 0


@pytest.mark.parametrize("tree", ["global", "levels", "chain"])
@pytest.mark.parametrize("variant", ["clover-x", "clover-2", "clover", "medusa"])
def test_tokens_equal_plain_for_every_variant_and_tree_shape(model, variant, tree):
    heads = CloverHeads.from_target(model, variant=variant, draft_tree=tree)
    for lengths in ((7,), (5, 9, 3)):
        same_tokens(model, heads, ragged_batch(VOCABULARY, lengths), plant=False, max_new_tokens=30)


def test_trees_deeper_than_the_heads_change_no_token(model):
    heads = CloverHeads.from_target(model, num_heads=2, draft_depth=6)
    same_tokens(model, heads, ragged_batch(VOCABULARY, (7,)), plant=False, num_assistant_tokens=40)


@SHAPES
def test_a_draft_vocabulary_changes_no_token(model, lengths):
    heads = CloverHeads.from_target(model, draft_vocab_size=6)
    heads.draft_ids.copy_(torch.tensor([1, 3, 5, 7, 9, 11]))
    options = {"plant": False, "do_sample": True, "max_new_tokens": 100, "num_assistant_tokens": 30}
    same_tokens(model, heads, ragged_batch(VOCABULARY, lengths), **options)


def test_heads_of_another_dtype_give_plain_tokens(model):
    heads = CloverHeads.from_target(model).to(torch.bfloat16)
    same_tokens(model, heads, ragged_batch(VOCABULARY, (7,)), plant=False, num_assistant_tokens=30)
    assert heads.dtype == torch.bfloat16


# ---------------------------------------------------------------------- without the hook


def test_custom_generate_drafts_without_the_hook(model, heads):
    common = {**ragged_batch(VOCABULARY, (5, 9, 3)), "max_new_tokens": 60}
    plain = model.generate(**common)
    drafting = {"num_assistant_tokens": 11, "return_dict_in_generate": True}
    with no_hook():
        out = model.generate(**common, custom_generate=heads.generate_with, **drafting)
    assert torch.equal(out.sequences, plain)
    assert set(out.speculation.tree_sizes) == {11}
    assert out.speculation.accepted_tokens > 0


def test_other_ways_to_generate_are_the_same_with_and_without_the_hook(model):
    assistant = build("llama", vocab_size=VOCABULARY, seed=1)

    def generate(kwargs):
        torch.manual_seed(0)
        return model.generate(**ragged_batch(VOCABULARY, (7,)), max_new_tokens=20, **kwargs)

    for kwargs in (
        {},
        {"do_sample": True},
        {"num_beams": 3},
        {"assistant_model": assistant},
        {"assistant_model": assistant, "do_sample": True},
        {"assistant_model": assistant, "num_assistant_tokens": 3},
        {"prompt_lookup_num_tokens": 3},
    ):
        with no_hook():
            without = generate(kwargs)
        assert torch.equal(generate(kwargs), without), kwargs


# ---------------------------------------------------------------------- rows that end


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("automatic", [pytest.param(True, marks=pytest.mark.automatic), False])
def test_rows_that_have_ended_leave_the_batch(model, trained_heads, sampled, automatic):
    """The target runs fewer and fewer rows, and every row has the tokens of plain generate all the same."""
    inputs = ragged_batch(VOCABULARY, (5, 9, 3, 7, 6, 2))
    common = {**inputs, "max_new_tokens": 60, "do_sample": sampled, "eos_token_id": [5, 9], "pad_token_id": 0}
    rows = []
    count = model.get_input_embeddings().register_forward_hook(lambda *seen: rows.append(len(seen[2])))
    with count, hf_clover.speculations() as records:
        torch.manual_seed(4)
        sequences = model.generate(**common, assistant_model=trained_heads)
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
