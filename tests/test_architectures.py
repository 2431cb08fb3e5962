"""Every family of the zoo, every attention it runs with: the tokens are plain generate's, and drafts were accepted."""

import copy
import warnings

import pytest
import torch
from helpers.oracle import planted
from helpers.zoo import ZOO, build, ragged_batch
from transformers import DynamicCache, StoppingCriteriaList

from hf_clover import CloverHeads
from hf_clover.decoding.route import CloverWarning, _why_no_tree
from hf_clover.targets.private_api import cache_name

VOCABULARY, NEW = 32, 30
RUNS = [(name, attention) for name, case in ZOO.items() if case.available for attention in case.attn]
TREE_RUNS = [run for run in RUNS if ZOO[run[0]].route == "tree"]
CHAIN_RUNS = [run for run in RUNS if "chain" in ZOO[run[0]].route]
PLAIN_RUNS = [run for run in RUNS if ZOO[run[0]].route == "plain"]
FAMILIES = [name for name, attention in TREE_RUNS if attention == ZOO[name].attn[0]]
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 8}
SHAPES = {"one": (7,), "ragged": (5, 9, 3)}
VARIANTS = ("clover-x", "clover-2", "clover", "medusa")

# In the short set every family has its first attention with planted drafts, and every fourth one has real heads: the
# next of them has the next variant.
OF_TARGETS = pytest.mark.long(
    "hf_clover/network",
    "hf_clover/decoding/target/attention.py",
    "hf_clover/decoding/target/masks.py",
    "hf_clover/decoding/target/chains.py",
    "hf_clover/decoding/target/one_by_one.py",
)
OF_HEADS = pytest.mark.long(
    "hf_clover/network",
    "hf_clover/origins",
    "hf_clover/decoding/draft/drafter.py",
    "hf_clover/decoding/target/attention.py",
    "hf_clover/decoding/target/masks.py",
)


def planted_runs(runs):
    return [pytest.param(*run, marks=() if run[1] == ZOO[run[0]].attn[0] else OF_TARGETS) for run in runs]


REAL_HEADS = [
    pytest.param(name, variant, marks=() if place % 16 == 4 * VARIANTS.index(variant) else OF_HEADS)
    for place, name in enumerate(FAMILIES)
    for variant in VARIANTS
]


def test_the_short_set_has_every_family_and_every_variant():
    short = [parameters.values for parameters in REAL_HEADS if not parameters.marks]
    assert [name for name, _ in short] == FAMILIES[::4]
    assert {variant for _, variant in short} == set(VARIANTS)
    for runs in (TREE_RUNS, CHAIN_RUNS):
        short = {parameters.values[0] for parameters in planted_runs(runs) if not parameters.marks}
        assert short == {name for name, _ in runs}


def generate(model, inputs, heads=None, **kwargs):
    kwargs = {"max_new_tokens": NEW, "return_dict_in_generate": True, **kwargs}
    if heads is not None:
        kwargs["assistant_model"] = heads
    return model.generate(**inputs, **kwargs)


@pytest.mark.parametrize(("name", "attention"), planted_runs(TREE_RUNS))
def test_greedy_tokens_equal_plain_with_planted_trees_for_every_target(name, attention):
    model = build(name, attention, vocab_size=VOCABULARY)
    heads = CloverHeads.from_target(model)
    depths = set()
    for shape, lengths in SHAPES.items():
        inputs = ragged_batch(VOCABULARY, lengths)
        plain = generate(model, inputs).sequences
        for seed in range(2):
            with planted(heads, plain, inputs["input_ids"].shape[1], seed), warnings.catch_warnings():
                warnings.simplefilter("error", CloverWarning)  # no fallback
                out = generate(model, inputs, heads, num_assistant_tokens=6)
            assert torch.equal(out.sequences, plain), f"{name} {attention} {shape}"
            assert out.speculation.method == "tree"
            assert out.speculation.accepted_tokens > 10 * len(lengths), "a test that accepts nothing proves nothing"
            depths.add(out.speculation.tokens_per_forward)
    assert min(depths) < 6, "some drafts must have been rejected"


@pytest.mark.parametrize(("name", "variant"), REAL_HEADS)
def test_greedy_and_seeded_tokens_equal_plain_with_untrained_heads(name, variant):
    """Untrained heads with wide trees over a small vocabulary: some guesses are right by chance."""
    model = build(name, ZOO[name].attn[0], vocab_size=16)
    heads = CloverHeads.from_target(model, variant=variant)
    for lengths in SHAPES.values():
        inputs, accepted = ragged_batch(16, lengths), 0
        for seed, kwargs in enumerate(({}, SAMPLED)):
            torch.manual_seed(seed)
            plain = generate(model, inputs, **kwargs).sequences
            after_plain = torch.rand(1)
            torch.manual_seed(seed)
            out = generate(model, inputs, heads, num_assistant_tokens=30, **kwargs)
            assert torch.equal(out.sequences, plain), f"{lengths} {kwargs}"
            assert torch.equal(torch.rand(1), after_plain), "as many random numbers must be used, no more and no less"
            accepted += out.speculation.accepted_tokens
        assert accepted > 0


@pytest.mark.parametrize(("name", "attention"), planted_runs(CHAIN_RUNS))
def test_tokens_equal_plain_where_a_target_verifies_planted_chains(name, attention):
    """Greedy and sampled, alone and in a batch; some drafts are accepted and some rejected."""
    model = build(name, attention, vocab_size=VOCABULARY)
    heads = CloverHeads.from_target(model, variant=VARIANTS[CHAIN_RUNS.index((name, attention)) % len(VARIANTS)])
    for lengths in SHAPES.values():
        for kwargs in ({}, SAMPLED):
            inputs = ragged_batch(VOCABULARY, lengths)
            torch.manual_seed(0)
            plain = generate(model, inputs, **kwargs)
            after_plain = torch.rand(1)
            torch.manual_seed(0)
            with (
                planted(heads, plain.sequences, inputs["input_ids"].shape[1]),
                warnings.catch_warnings(record=True) as caught,
            ):
                warnings.simplefilter("always", CloverWarning)
                out = generate(model, inputs, heads, num_assistant_tokens=6, **kwargs)
            assert torch.equal(out.sequences, plain.sequences), f"{lengths} {kwargs}"
            assert torch.equal(torch.rand(1), after_plain), "no more random numbers and no fewer"
            assert out.speculation.reason in str(caught[0].message)
            if (name, len(lengths)) == ("rwkv", 3):  # whose rows are not alone in a batch
                assert out.speculation.method == "plain"
                continue
            assert out.speculation.method == ZOO[name].route
            forwards = out.speculation.target_forwards
            assert NEW / 7 <= forwards < 0.8 * NEW, "drafts are accepted, and some are not"


@pytest.mark.parametrize(
    "settings", [{}, SAMPLED, {"eos_token_id": 5, "pad_token_id": 0}], ids=["greedy", "seed", "eos"]
)
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "bamba", "bloom"])
def test_three_turns_on_the_users_cache_equal_plain_with_chains(name, settings):
    """Three turns on the user's cache, two of them with drafts, the last one by plain generate."""
    model = build(name, ZOO[name].attn[0], vocab_size=VOCABULARY)
    heads, said = CloverHeads.from_target(model), []
    for drafts in ({}, {"assistant_model": heads, "num_assistant_tokens": 4}):
        torch.manual_seed(0)
        inputs = ragged_batch(VOCABULARY, (6, 6))
        cache, said = DynamicCache(config=model.config), [*said, []]
        for turn in range(3):
            options = {**settings, **(drafts if turn < 2 else {}), cache_name(): cache}
            text = model.generate(**inputs, max_new_tokens=7, **options)
            said[-1].append(text.tolist())
            inputs = {"input_ids": torch.cat((text, text[:, :2] % (VOCABULARY - 1) + 1), dim=1)}
        said[-1].append(float(torch.rand(1)))
    assert said[0] == said[1]


def test_an_interrupted_chain_leaves_the_users_cache_as_it_was():
    model = build("qwen3_next", "sdpa", vocab_size=VOCABULARY)
    heads, cache = CloverHeads.from_target(model), DynamicCache(config=model.config)
    inputs = ragged_batch(VOCABULARY, (6,))
    text = model.generate(**inputs, max_new_tokens=4, **{cache_name(): cache})

    def stop(input_ids, scores, **kwargs):
        if input_ids.shape[1] > text.shape[1] + 3:
            raise KeyboardInterrupt
        return torch.zeros(len(input_ids), dtype=torch.bool)

    plain = model.generate(text, max_new_tokens=8, **{cache_name(): copy.deepcopy(cache)})
    settings = {"assistant_model": heads, "stopping_criteria": StoppingCriteriaList([stop])}
    with pytest.raises(KeyboardInterrupt):
        model.generate(text, max_new_tokens=8, **{cache_name(): cache}, **settings)
    assert torch.equal(model.generate(text, max_new_tokens=8, **{cache_name(): cache}), plain)


@pytest.mark.parametrize(("name", "attention"), PLAIN_RUNS)
def test_targets_that_cannot_verify_drafts_fall_back(name, attention):
    model = build(name, attention, vocab_size=VOCABULARY)
    heads = CloverHeads.from_target(model)
    for lengths in SHAPES.values():
        inputs = ragged_batch(VOCABULARY, lengths)
        plain = generate(model, inputs).sequences
        with pytest.warns(CloverWarning, match="cannot verify") as caught:
            out = generate(model, inputs, heads)
        assert len([w for w in caught if issubclass(w.category, CloverWarning)]) == 1
        assert torch.equal(out.sequences, plain)
        assert out.speculation.method == "plain"
        assert out.speculation.reason
        assert out.speculation.reason in str(caught[0].message)


@pytest.mark.parametrize("node", [None, *range(7)])
def test_a_trial_sees_a_fault_at_any_node(node):
    """Before the first tree, a trial tree's logits are compared with those of its paths: 6 forwards in all."""
    target, forwards = build("llama"), []

    def faulty(module, args, kwargs, output):
        forwards.append(kwargs["input_ids"].shape[1])
        if node is not None and len(kwargs["input_ids"]) == 2 and forwards[-1] == 7:  # a tree, for two rows
            output.logits[0, node] += torch.randn(output.logits.shape[-1])

    target.register_forward_hook(faulty, with_kwargs=True)
    why_not = _why_no_tree(target, {}, in_graphs=False)
    if node is None:
        assert why_not is None
        assert len(forwards) == 6
    else:
        assert "its logits for a trial tree differ from those of plain forwards" in why_not
