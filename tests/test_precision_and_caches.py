"""Every dtype, attention and cache: plain generate's tokens where arithmetic is exact enough, else its rounding.

What cannot hold a tree says so and is decoded plainly, with the same tokens.
"""

import pytest
import torch
from helpers.both_ways import NEW, both, same_tokens
from helpers.zoo import build, ragged_batch
from transformers import DynamicCache, GenerationConfig, StaticCache

from hf_clover import CloverHeads
from hf_clover.decoding.route import CloverWarning, choose_route
from hf_clover.measure.losslessness import NUMERICS, explain
from hf_clover.targets.private_api import cache_name

pytestmark = pytest.mark.filterwarnings("error::hf_clover.decoding.route.CloverWarning")
VOCABULARY = 24
SHAPES = pytest.mark.parametrize("lengths", [(7,), (5, 9, 3)], ids=["one", "ragged"])


def rounded(target, inputs, more_than, heads=None, seed=0):
    """How many rows differ from plain generate's, each where rounding decided; with accepted drafts."""
    plain, ours = both(target, heads or CloverHeads.from_target(target), inputs, seed, num_assistant_tokens=6)
    assert ours.speculation.accepted_tokens > more_than
    options = {"max_new_tokens": NEW, "pad_token_id": 0}
    found = explain(target, inputs, plain.sequences, ours.sequences, options)
    assert all(difference.verdict == NUMERICS for difference in found), found
    return len(found)


# ---------------------------------------------------------------------- dtypes and attention


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_tokens_in_half_precision_equal_plain_except_for_rounding(name, attention, dtype):
    """Whatever differs was decided by rounding, and most is the same."""
    target = build(name, attention, vocab_size=VOCABULARY, dtype=dtype)
    heads, differences = CloverHeads.from_target(target), 0
    # Eager attention in half precision gives NaN for rows with padding, in plain generate too.
    lengths = (5, 9, 3) if attention == "sdpa" else (6, 6, 6)
    for seed in range(3):
        differences += rounded(target, ragged_batch(VOCABULARY, lengths, seed), NEW // 2, heads, seed)
    assert differences < 9 / 2, "of 9 rows"


@SHAPES
@pytest.mark.parametrize("name", ["llama", "llama_bias"])
def test_tokens_equal_plain_with_flex_attention(name, lengths):
    """The prompt is read with it, trees without."""
    target = build(name, vocab_size=VOCABULARY)
    target.set_attn_implementation("flex_attention")
    with torch.compiler.set_stance("force_eager"):  # compiling it takes a minute
        ours = same_tokens(target, CloverHeads.from_target(target), ragged_batch(VOCABULARY, lengths), NEW // 2)
    assert ours.speculation.method == "tree"
    assert target.config._attn_implementation == "flex_attention"


def test_tokens_with_weights_of_two_dtypes_equal_plain_except_for_rounding():
    """The output layer in float32 over a target in bfloat16."""
    target = build("llama", vocab_size=VOCABULARY, dtype=torch.bfloat16)
    target.lm_head.float()
    target.lm_head.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    rounded(target, ragged_batch(VOCABULARY, (5, 9, 3)), more_than=NEW)


# ---------------------------------------------------------------------- caches


@SHAPES
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "qwen2_window"])
@pytest.mark.parametrize("cache", ["dynamic", "static", "a static one"])
def test_tokens_equal_plain_in_caches_that_hold_a_tree(name, cache, lengths):
    """Windows of 6 tokens, longer texts. A user's dynamic cache is in test_users_caches.py."""
    target = build(name, vocab_size=VOCABULARY)
    if cache == "a static one":
        config = target.config.get_text_config()
        of_each = [{cache_name(): StaticCache(config=config, max_cache_len=64)} for _ in range(2)]
    else:
        of_each = [{"cache_implementation": cache}] * 2
    heads, inputs = CloverHeads.from_target(target), ragged_batch(VOCABULARY, lengths)
    same_tokens(target, heads, inputs, NEW // 2, of_each=of_each, num_assistant_tokens=6)


class Theirs(DynamicCache):
    """Somebody's own: nobody knows what it keeps."""


QUANTIZED = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}  # it needs no other package


@SHAPES
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (QUANTIZED, "a tree cannot be kept in a `QuantizedCache`"),
        ({cache_name(): Theirs}, "a tree cannot be kept in a `Theirs`"),
        ({"use_cache": False}, "`use_cache=False` leaves nothing to draft from"),
    ],
)
def test_caches_that_hold_no_tree_give_plain_tokens_with_one_warning(options, reason, lengths):
    target, inputs = build("llama", vocab_size=VOCABULARY), ragged_batch(VOCABULARY, lengths)
    of_each = [{name: value() if callable(value) else value for name, value in options.items()} for _ in range(2)]
    with pytest.warns(CloverWarning, match=reason) as caught:
        plain, ours = both(target, CloverHeads.from_target(target), inputs, of_each=of_each)
    assert len([w for w in caught if issubclass(w.category, CloverWarning)]) == 1
    assert torch.equal(ours.sequences, plain.sequences)
    assert (ours.speculation.method, ours.speculation.accepted_tokens) == ("plain", 0)
    assert ours.speculation.reason == reason


def test_chains_are_not_kept_in_a_cache_of_fixed_size():
    """There GPT-Neo's local attention looks at other columns, so that plain generate gives another text."""
    target, inputs = build("gpt_neo", vocab_size=VOCABULARY), ragged_batch(VOCABULARY, (3,))
    growing = target.generate(**inputs, max_new_tokens=NEW)
    with pytest.warns(CloverWarning, match="chains are drafted only in a cache that grows, `generate`'s default"):
        plain, ours = both(target, CloverHeads.from_target(target), inputs, cache_implementation="static")
    assert not torch.equal(plain.sequences, growing), "else there is nothing to see here"
    assert torch.equal(ours.sequences, plain.sequences)
    assert (ours.speculation.method, ours.speculation.accepted_tokens) == ("plain", 0)


def test_a_users_cache_that_the_target_does_not_read_stays_empty():
    """RWKV keeps a state of its own, and leaves a user's cache as it came."""
    target, inputs = build("rwkv", vocab_size=VOCABULARY), ragged_batch(VOCABULARY, (5,))
    cache = DynamicCache(config=target.config)
    with pytest.warns(CloverWarning, match="chains are drafted instead"):
        ours = same_tokens(target, CloverHeads.from_target(target), inputs, NEW // 2, **{cache_name(): cache})
    assert ours[cache_name()] is cache
    assert cache.get_seq_length() == 0
    assert ours.speculation.method == "replayed chain"


@pytest.mark.parametrize(("kind", "options"), [(DynamicCache, {}), (StaticCache, {"max_cache_len": 64})])
def test_a_target_with_an_offloaded_cache_is_decoded_plainly(kind, options):
    """Offloading needs an accelerator, so that only the choice of the route is tested here."""
    target = build("llama", vocab_size=VOCABULARY)
    cache = kind(config=target.config, **options)
    cache.offloading = True
    route = choose_route(target, torch.ones(1, 3), 20, GenerationConfig(), {cache_name(): cache})
    assert (route.method, route.reason) == ("plain", "a tree cannot be kept in an offloaded cache")
