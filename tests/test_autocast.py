"""`generate` inside `torch.autocast`: plain generate's tokens there, whatever the dtype of heads and target."""

import warnings

import pytest
import torch
from helpers.oracle import planted
from helpers.zoo import build, ragged_batch
from transformers import DynamicCache

from hf_clover import CloverHeads, speculations
from hf_clover.decoding.draft import cpu_copy
from hf_clover.decoding.route import CloverWarning
from hf_clover.measure.losslessness import NUMERICS, explain
from hf_clover.targets.private_api import cache_name

VOCABULARY, NEW = 24, 20
SINGLE, HALF, OTHER = torch.float32, torch.bfloat16, torch.float16
SHAPES = {"one": (7,), "ragged": (5, 9, 3)}


def check(target, heads, inputs, options):
    """Tokens that differ were decided by rounding; returns how many rows, and how many drafts were accepted."""
    common = {"max_new_tokens": NEW, "pad_token_id": 0, **options}
    plain = target.generate(**inputs, **common)
    drafts = {"assistant_model": heads, "num_assistant_tokens": 6, "return_dict_in_generate": True}
    with planted(heads, plain, inputs["input_ids"].shape[1]), warnings.catch_warnings():
        warnings.simplefilter("error", CloverWarning)
        ours = target.generate(**inputs, **common, **drafts)
    assert ours.speculation.method == "tree"
    found = explain(target, inputs, plain, ours.sequences, common)
    assert all(difference.verdict == NUMERICS for difference in found), found
    return len(found), ours.speculation.accepted_tokens


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("cast", "of_heads", "of_target"),
    [
        *[(HALF, of_heads, SINGLE) for of_heads in (SINGLE, HALF, OTHER)],
        *[(OTHER, of_heads, SINGLE) for of_heads in (SINGLE, HALF)],
        *[(HALF, of_heads, HALF) for of_heads in (SINGLE, OTHER)],
    ],
)
@pytest.mark.parametrize("variant", ["clover-x", "medusa"])
def test_tokens_under_autocast_equal_plain_except_for_rounding(variant, cast, of_heads, of_target, shape):
    target = build("llama", vocab_size=VOCABULARY, dtype=of_target)
    heads = CloverHeads.from_target(target, variant=variant).to(of_heads)
    with torch.autocast("cpu", cast):
        rows, accepted = check(target, heads, ragged_batch(VOCABULARY, SHAPES[shape]), {})
    assert accepted > NEW // 3
    assert heads.dtype == of_heads
    # A trial under autocast says nothing about calls outside it.
    rows, accepted = check(target, heads, ragged_batch(VOCABULARY, SHAPES[shape]), {})
    assert accepted > NEW // 3
    assert rows == 0 or of_target != SINGLE


@pytest.mark.parametrize("of_heads", [SINGLE, OTHER])
def test_drafts_of_a_cpu_copy_change_no_token_under_autocast(of_heads, monkeypatch):
    monkeypatch.setattr(cpu_copy, "LEAST_WEIGHTS", 1)
    target = build("llama", vocab_size=VOCABULARY)
    heads = CloverHeads.from_target(target).to(of_heads)
    inputs = ragged_batch(VOCABULARY, (7,))
    with torch.autocast("cpu", HALF), speculations() as records:
        plain = target.generate(**inputs, max_new_tokens=NEW)
        ours = target.generate(**inputs, max_new_tokens=NEW, assistant_model=heads, num_assistant_tokens=30)
    assert torch.equal(ours, plain)
    assert records[-1].accepted_tokens > 0
    assert len(cpu_copy.memory_of(target).drafting_copies) == 1


@pytest.mark.parametrize(
    ("name", "method"), [("gemma3", "tree"), ("gpt2", "tree"), ("bloom", "chain"), ("qwen3_next", "replayed chain")]
)
def test_other_target_families_equal_plain_under_autocast_except_for_rounding(name, method):
    """Some of these targets have keys and values of two dtypes under autocast."""
    target = build(name, vocab_size=VOCABULARY)
    heads = CloverHeads.from_target(target)
    inputs = ragged_batch(VOCABULARY, (7,))
    common = {**inputs, "max_new_tokens": NEW, "pad_token_id": 0}
    with torch.autocast("cpu", HALF), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = target.generate(**common)
        with planted(heads, plain, 7):
            drafts = {"assistant_model": heads, "num_assistant_tokens": 6, "return_dict_in_generate": True}
            ours = target.generate(**common, **drafts)
        found = explain(target, inputs, plain, ours.sequences, {"max_new_tokens": NEW, "pad_token_id": 0})
    assert all(difference.verdict == NUMERICS for difference in found), found
    assert ours.speculation.method == method
    assert ours.speculation.accepted_tokens > 0


def test_a_conversation_may_enter_and_leave_autocast_between_turns():
    """The cache takes the wider dtype, as plain generate's cache does."""
    target = build("llama", vocab_size=VOCABULARY)
    heads, ids = CloverHeads.from_target(target), ragged_batch(VOCABULARY, (7,))["input_ids"]
    caches, accepted = [DynamicCache(), DynamicCache()], 0
    for inside in (True, False, True, False):
        common = {"max_new_tokens": 8, "pad_token_id": 0, "return_dict_in_generate": True}
        common["attention_mask"] = torch.ones_like(ids)
        with torch.autocast("cpu", HALF, enabled=inside):
            plain = target.generate(ids, **common, **{cache_name(): caches[0]})
            with planted(heads, plain.sequences, ids.shape[1]):
                drafts = {"assistant_model": heads, "num_assistant_tokens": 4}
                ours = target.generate(ids, **common, **drafts, **{cache_name(): caches[1]})
        assert torch.equal(ours.sequences, plain.sequences)
        assert [layer.values.dtype for layer in caches[1].layers] == [layer.values.dtype for layer in caches[0].layers]
        accepted += ours.speculation.accepted_tokens
        ids = torch.cat((plain.sequences, ids[:, :3]), dim=1)
    assert accepted > 4
