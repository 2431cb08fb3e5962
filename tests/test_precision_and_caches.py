"""Every dtype, attention and cache: plain generate's tokens where arithmetic is exact enough, else its rounding.

What cannot hold a tree says so and is decoded plainly, with the same tokens.
"""

import warnings

import pytest
import torch
from helpers.oracle import planted
from helpers.zoo import build, ragged_batch
from transformers import DynamicCache, GenerationConfig, StaticCache

from hf_clover import CloverHeads
from hf_clover.decoding.route import CloverWarning, choose_route
from hf_clover.measure.losslessness import NUMERICS, explain
from hf_clover.targets.private_api import cache_name

VOCABULARY, NEW = 24, 24
SHAPES = {"one": (7,), "ragged": (5, 9, 3)}
HALF = (torch.bfloat16, torch.float16)


def both(target, inputs, fallback=False, seed=0, heads=None, **options):
    """(plain's sequences, ours), with drafts that are right for a while."""
    heads = heads or CloverHeads.from_target(target)
    options = {"max_new_tokens": NEW, "pad_token_id": 0, **options}
    plain = target.generate(**inputs, **made_anew(options))
    with planted(heads, plain, inputs["input_ids"].shape[1], seed), warnings.catch_warnings():
        if not fallback:
            warnings.simplefilter("error", CloverWarning)
        drafts = {"assistant_model": heads, "num_assistant_tokens": 6, "return_dict_in_generate": True}
        return plain, target.generate(**inputs, **made_anew(options), **drafts)


def made_anew(options):
    return {name: value() if callable(value) else value for name, value in options.items()}


# ---------------------------------------------------------------------- dtypes and attention


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_tokens_in_half_precision_equal_plain_except_for_rounding(name, attention, dtype):
    """Whatever differs was decided by rounding, and most is the same."""
    target = build(name, attention, vocab_size=VOCABULARY, dtype=dtype)
    heads = CloverHeads.from_target(target)
    rows = differences = 0
    for seed in range(3):
        # Eager attention in half precision gives NaN for rows with padding, in plain generate too.
        lengths = (5, 9, 3) if attention == "sdpa" else (6, 6, 6)
        inputs = ragged_batch(VOCABULARY, lengths, seed)
        plain, ours = both(target, inputs, seed=seed, heads=heads)
        assert ours.speculation.accepted_tokens > NEW // 2
        found = explain(target, inputs, plain, ours.sequences, {"max_new_tokens": NEW, "pad_token_id": 0})
        assert all(difference.verdict == NUMERICS for difference in found), found
        rows, differences = rows + 3, differences + len(found)
    assert differences < rows / 2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["llama", "llama_bias"])
def test_tokens_equal_plain_with_flex_attention(name, shape):
    """The prompt is read with it, trees without."""
    target = build(name, vocab_size=VOCABULARY)
    target.set_attn_implementation("flex_attention")
    with torch.compiler.set_stance("force_eager"):  # compiling it takes a minute
        plain, ours = both(target, ragged_batch(VOCABULARY, SHAPES[shape]))
    assert torch.equal(ours.sequences, plain)
    assert (ours.speculation.method, ours.speculation.accepted_tokens > NEW // 2) == ("tree", True)
    assert target.config._attn_implementation == "flex_attention"


def test_tokens_with_weights_of_two_dtypes_equal_plain_except_for_rounding():
    """The output layer in float32 over a target in bfloat16."""
    target = build("llama", vocab_size=VOCABULARY, dtype=torch.bfloat16)
    target.lm_head.float()
    target.lm_head.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    inputs = ragged_batch(VOCABULARY, SHAPES["ragged"])
    plain, ours = both(target, inputs)
    found = explain(target, inputs, plain, ours.sequences, {"max_new_tokens": NEW, "pad_token_id": 0})
    assert all(difference.verdict == NUMERICS for difference in found), found
    assert ours.speculation.accepted_tokens > NEW


# ---------------------------------------------------------------------- caches


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "qwen2_window"])
@pytest.mark.parametrize("cache", ["dynamic", "static", "a dynamic one", "a static one"])
def test_tokens_equal_plain_in_caches_that_hold_a_tree(name, cache, shape):
    """Windows of 6 tokens, longer texts."""
    target = build(name, vocab_size=VOCABULARY)
    config = target.config.get_text_config()
    options = {
        "dynamic": {"cache_implementation": "dynamic"},
        "static": {"cache_implementation": "static"},
        "a dynamic one": {cache_name(): lambda: DynamicCache(config=config)},
        "a static one": {cache_name(): lambda: StaticCache(config=config, max_cache_len=64)},
    }[cache]
    plain, ours = both(target, ragged_batch(VOCABULARY, SHAPES[shape]), **options)
    assert torch.equal(ours.sequences, plain)
    assert ours.speculation.accepted_tokens > NEW // 2


class Theirs(DynamicCache):
    """Somebody's own: nobody knows what it keeps."""


QUANTIZED = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}  # it needs no other package


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (QUANTIZED, "a tree cannot be kept in a `QuantizedCache`"),
        ({cache_name(): Theirs}, "a tree cannot be kept in a `Theirs`"),
        ({"use_cache": False}, "`use_cache=False` leaves nothing to draft from"),
    ],
)
def test_caches_that_hold_no_tree_give_plain_tokens_with_one_warning(options, reason, shape):
    target, inputs = build("llama", vocab_size=VOCABULARY), ragged_batch(VOCABULARY, SHAPES[shape])
    with pytest.warns(CloverWarning, match=reason) as caught:
        plain, ours = both(target, inputs, fallback=True, **options)
    assert len([w for w in caught if issubclass(w.category, CloverWarning)]) == 1
    assert torch.equal(ours.sequences, plain)
    assert (ours.speculation.method, ours.speculation.accepted_tokens) == ("plain", 0)
    assert ours.speculation.reason == reason


def test_chains_are_not_kept_in_a_cache_of_fixed_size():
    """There GPT-Neo's local attention looks at other columns, so that plain generate gives another text."""
    target, inputs = build("gpt_neo", vocab_size=VOCABULARY), ragged_batch(VOCABULARY, (3,))
    growing = target.generate(**inputs, max_new_tokens=NEW)
    with pytest.warns(CloverWarning, match="chains are drafted only in a cache that grows, `generate`'s default"):
        plain, ours = both(target, inputs, fallback=True, cache_implementation="static")
    assert not torch.equal(plain, growing), "else there is nothing to see here"
    assert torch.equal(ours.sequences, plain)
    assert (ours.speculation.method, ours.speculation.accepted_tokens) == ("plain", 0)


def test_a_users_cache_that_the_target_does_not_read_stays_empty():
    """RWKV keeps a state of its own, and leaves a user's cache as it came."""
    target, inputs = build("rwkv", vocab_size=VOCABULARY), ragged_batch(VOCABULARY, (5,))
    cache = DynamicCache(config=target.config)
    with pytest.warns(CloverWarning, match="chains are drafted instead"):
        plain, ours = both(target, inputs, fallback=True, **{cache_name(): lambda: cache})
    assert torch.equal(ours.sequences, plain)
    assert ours[cache_name()] is cache
    assert cache.get_seq_length() == 0
    assert ours.speculation.method == "replayed chain"
    assert ours.speculation.accepted_tokens > NEW // 2


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_a_target_with_an_offloaded_cache_is_decoded_plainly(kind):
    """Offloading needs an accelerator, so that only the choice of the route is tested here."""
    target = build("llama", vocab_size=VOCABULARY)
    cache = kind(config=target.config, **({"max_cache_len": 64} if kind is StaticCache else {}))
    cache.offloading = True
    route = choose_route(target, torch.ones(1, 3), 20, GenerationConfig(), {cache_name(): cache})
    assert (route.method, route.reason) == ("plain", "a tree cannot be kept in an offloaded cache")
