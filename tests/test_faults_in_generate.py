"""What goes wrong, or happens beside, while text is generated: memory, threads, interruptions, NaN.

What is refused before a token is generated is in test_bad_input.py; threads that all speculate are in
test_neighbours.py and test_graphs.py.
"""

import gc
import itertools
import math
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from helpers.both_ways import same_tokens
from helpers.breaking_off import Breaks, state_of
from helpers.capturing import captures  # noqa: F401  (a fixture)
from helpers.oracle import planted
from helpers.zoo import build, ragged_batch
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, LogitsProcessorList
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask

from hf_clover import CloverHeads
from hf_clover.decoding.budget.automatic import make_budget
from hf_clover.decoding.budget.costs import ON_CPU, cost_by_size
from hf_clover.decoding.draft.drafter import CloverDrafter
from hf_clover.decoding.draft.session import DraftSession
from hf_clover.decoding.route import CloverWarning
from hf_clover.decoding.target.attention import attention_for_trees
from hf_clover.decoding.target.memory import memory_of
from hf_clover.decoding.tree import root_only
from hf_clover.targets.private_api import cache_name

VOCABULARY, NEW = 16, 20
CHAINS = [("bloom", "chain"), ("lfm2", "chain"), ("qwen3_next", "replayed chain"), ("jamba", "replayed chain")]


@pytest.fixture
def model():
    return build("llama", vocab_size=VOCABULARY)


@pytest.fixture
def heads(model):
    return CloverHeads.from_target(model)


# ---------------------------------------------------------------------- memory


OF_CHAINS = pytest.mark.long("hf_clover/decoding/target/chains.py", "hf_clover/decoding/target/one_by_one.py")


@pytest.mark.filterwarnings("ignore::hf_clover.decoding.route.CloverWarning")
@pytest.mark.automatic
@pytest.mark.parametrize(
    "target",
    [
        pytest.param("llama", marks=pytest.mark.long("hf_clover/decoding")),
        *(pytest.param(name, marks=OF_CHAINS) for name in ("bloom", "lfm2", "qwen3_next")),
    ],
)
def test_memory_does_not_grow_over_500_generations(target):
    """500 generations of many kinds; what is found out at the first is kept, and nothing after that."""
    model = build(target, vocab_size=VOCABULARY)
    heads, other = CloverHeads.from_target(model), CloverHeads.from_target(model, variant="medusa")

    def some(count):
        for i in range(count):
            options = {"max_new_tokens": 3 + i % 4, "pad_token_id": 0, "assistant_model": (heads, other)[i % 2]}
            options |= {"do_sample": True, "temperature": 0.5 + 0.001 * (i % 500)} if i % 3 else {}
            options |= {"return_dict_in_generate": True, "output_scores": True} if i % 5 == 0 else {}
            options |= {"num_assistant_tokens": 6} if i % 7 < 3 else {}
            options |= {"cache_implementation": "static"} if i % 11 == 0 else {}
            model.generate(**ragged_batch(VOCABULARY, ((5,), (4, 7), (5, 9, 3))[i % 3]), **options)
        experience = memory_of(model).experience
        kinds = sum(len(learned.steps) for learned in experience.values())
        experience.clear()  # what steps of each kind took: `Costs` keeps the last of them and no more
        gc.collect()
        things = gc.get_objects()
        # By their type: to be asked for its class makes many a stand-in import what it stands for.
        return len(things), sum(issubclass(type(thing), torch.Tensor) for thing in things), kinds

    before, grown = some(60), []
    for _ in range(2):
        held = sys.getallocatedblocks()
        after = some(220)
        grown.append(sys.getallocatedblocks() - held)
    assert after[1] - before[1] < 30, "tensors"
    assert after[0] - before[0] < 300, "objects, of 440 generations"
    # What leaks does so in both halves; what Python reads once, such as a source file for a message, in one.
    assert min(grown) < 110, f"blocks of memory: {grown}, of 220 generations each"
    assert after[2] <= 2 * 3 * 2 * 3, "kinds of steps: heads, rows, caches, and doublings of the text"


# ---------------------------------------------------------------------- threads


def test_threads_may_share_measured_costs(model, heads):
    """What a step costs is kept for a target and its heads, for all threads: one thread adds while another reads."""
    before = sys.getswitchinterval()
    budgets = [make_budget(None, False, model, heads) for _ in range(2)]
    stop, tree = threading.Event(), root_only(torch.zeros(1, dtype=torch.long))

    def add():
        for context in itertools.cycle(range(1, 2000)):
            if stop.is_set():
                return
            budgets[1].ask([context])
            budgets[1].learned.costs.learn_tree(0, 0.0, 1 + context % 9, 0.1)
            budgets[1].learn(tree, [[0]], 0.0, 0.1)

    budgets[1].ask([1])
    budgets[1].learned.costs.learn_plain(0.1)
    budgets[1].learned.costs.learn_tree(0, 0.0, 1, 0.1)
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=add)
    thread.start()
    try:
        for step in range(300):
            budgets[0].ask([3 << step % 7] * (1 + step % 5))
            costs = budgets[1].learned.costs
            cost_by_size(costs.in_plain_steps(costs.forwards), [1], *ON_CPU.of(1))
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)


@pytest.mark.filterwarnings("ignore::hf_clover.decoding.route.CloverWarning")
@pytest.mark.parametrize(("target", "method"), CHAINS)
def test_threads_that_draft_chains_in_one_target_get_plain_tokens(target, method):
    """Caches that are cropped, copied and replayed belong to their call."""
    model = build(target, vocab_size=VOCABULARY)
    heads, inputs = CloverHeads.from_target(model), ragged_batch(VOCABULARY, (6,))
    plain, meet = model.generate(**inputs, max_new_tokens=NEW), threading.Barrier(4)

    def speak(nodes):
        meet.wait()
        options = {"assistant_model": heads, "num_assistant_tokens": nodes, "return_dict_in_generate": True}
        return model.generate(**inputs, max_new_tokens=NEW, **options)

    with planted(heads, plain, 6), ThreadPoolExecutor(4) as threads:
        said = [*threads.map(speak, range(2, 6))]
    assert all(torch.equal(out.sequences, plain) for out in said)
    assert {out.speculation.method for out in said} == {method}
    assert all(out.speculation.accepted_tokens > 2 for out in said)


def like_flash(module, query, key, value, attention_mask, **kwargs):
    """Takes, as flash attention does, no mask or which columns are text."""
    assert attention_mask is None or attention_mask.ndim == 2, "a mask made for another implementation"
    new, columns = query.shape[2], key.shape[2]
    visible = torch.ones(new, columns, dtype=torch.bool).tril(columns - new)[None, None]  # [1, 1, n, C]
    if attention_mask is not None:
        visible = visible & attention_mask[:, None, None, :columns].bool()
        visible = visible | torch.eye(new, columns, dtype=torch.bool).roll(columns - new, 1)
    kwargs.pop("is_causal", None)
    return sdpa_attention_forward(module, query, key, value, visible, is_causal=False, **kwargs)


@pytest.fixture
def columns_only(model):
    AttentionInterface.register("columns_only", like_flash)
    AttentionMaskInterface.register("columns_only", flash_attention_mask)
    model.set_attn_implementation("columns_only")
    return model


@pytest.mark.parametrize("implementation", ["sdpa", "columns_only", "flex_attention"])
@pytest.mark.parametrize("layer", [1, 2])
def test_plain_generate_is_unchanged_while_another_thread_has_trees(model, columns_only, implementation, layer):
    """In the middle of every forward, after its masks are made, the attention changes to that of trees, or back."""
    model.set_attn_implementation(implementation)
    inputs, forwards = ragged_batch(VOCABULARY, (5, 9, 3)), []
    trees = [attention_for_trees(model)]

    def switch(*_):
        forwards.append(model.config._attn_implementation)
        if len(forwards) % 2:
            trees[0].__enter__()
        else:
            trees[0].__exit__(None, None, None)
            trees[0] = attention_for_trees(model)

    with torch.compiler.set_stance("force_eager"):  # compiling flex attention takes a minute
        truth = model.generate(**inputs, max_new_tokens=6)
        with model.model.layers[layer].register_forward_pre_hook(switch):
            assert torch.equal(model.generate(**inputs, max_new_tokens=6), truth)
    assert len(forwards) == 6
    assert len(set(forwards)) == 2, "it was switched"
    assert model.config._attn_implementation == implementation


def test_another_attention_is_switched_for_the_tree_and_put_back(columns_only, heads):
    """The prompt keeps the implementation that the user chose."""
    read, before = mock.Mock(side_effect=like_flash), state_of(columns_only)
    AttentionInterface.register("columns_only", read)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CloverWarning)
        ours = same_tokens(columns_only, heads, ragged_batch(VOCABULARY, (5, 9, 3)), more_than=24)
    assert ours.speculation.method == "tree"
    of_plain = ours.sequences.shape[1] - 9
    assert read.call_count > of_plain * columns_only.config.num_hidden_layers
    assert state_of(columns_only) == before


def test_an_attention_that_cannot_be_switched_falls_back(model, heads):
    AttentionInterface.register("unmasked", sdpa_attention_forward)
    model.config._attn_implementation = "unmasked"
    model.__class__ = type("NoSdpa", (type(model),), {"_supports_sdpa": False})
    with pytest.warns(CloverWarning, match=r"its logits for a trial tree differ from those of plain forwards"):
        ours = same_tokens(model, heads, ragged_batch(VOCABULARY, (7,)), -1)
    assert ours.speculation.method in ("chain", "plain")


# ---------------------------------------------------------------------- NaN and infinity


OPTIONS = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "processors": {"repetition_penalty": 1.2},
    "static": {"cache_implementation": "static"},
    "automatic": {"num_assistant_tokens": None},
}


@pytest.mark.automatic
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("after", [0, 6], ids=["at once", "later"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("lengths", [(7,), (5, 9, 3)])
def test_nan_or_infinity_of_heads_stops_drafting_with_one_warning(model, heads, lengths, name, after, value):
    calls = itertools.count()
    heads.head_norm.register_forward_hook(lambda _, args, out: out + value if next(calls) >= after else out)
    options = {"num_assistant_tokens": 8, **OPTIONS[name]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = same_tokens(model, heads, ragged_batch(VOCABULARY, lengths), -1, seed=1, plant=False, **options)
    said = [w for w in caught if issubclass(w.category, CloverWarning)]
    if name == "automatic" and after:
        assert len(said) <= 1, "drafting may have come to a rest before"
        return
    assert len(said) == 1
    assert "the heads gave NaN: drafting is off for the rest of this call" in str(said[0].message)
    sizes = ours.speculation.tree_sizes
    last = max(step for step, size in enumerate(sizes) if size)
    assert not any(sizes[last + 1 :])
    assert len(sizes) - last > 5, "most steps were plain"
    if not after:
        assert ours.speculation.accepted_tokens == 0
        assert last == 0 or name == "automatic", "the walk of the first tree saw it"


def test_nan_of_heads_in_graphs_stops_drafting_with_one_warning(model, heads, captures):  # noqa: F811
    heads.head_norm.weight.data.fill_(math.nan)
    with pytest.warns(CloverWarning, match="heads gave NaN: drafting is off") as caught:
        ours = same_tokens(model, heads, ragged_batch(VOCABULARY, (5, 9, 3)), -1, plant=False, num_assistant_tokens=5)
    assert len([w for w in caught if issubclass(w.category, CloverWarning)]) == 1
    assert ours.speculation.tree_sizes == [5] + [0] * (len(ours.speculation.tree_sizes) - 1)


def test_looking_for_nan_does_not_wait_for_the_device(model, heads, monkeypatch):
    """All that the walk needs of a tree comes to the host in one transfer; a step of fixed size asks for no more."""
    asked, draft, drafting = [], DraftSession.draft, CloverDrafter.draft

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function in (torch.Tensor.__bool__, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__int__):
                asked.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    def watched_drafting(self, *args, **kwargs):
        tree = drafting(self, *args, **kwargs)
        tree.valid, tree.tokens = tree.valid.as_subclass(Watched), tree.tokens.as_subclass(Watched)
        return tree

    def watched(self, vocab_size):
        tree = draft(self, vocab_size)
        assert isinstance(tree.tokens, Watched)
        assert asked == [], "between the draft and the target's forward the host waits for nothing"
        for name, values in vars(tree).items():  # also what was made of the two, where something was copied
            if isinstance(values, torch.Tensor):
                setattr(tree, name, values.as_subclass(torch.Tensor))
        return tree

    monkeypatch.setattr(CloverDrafter, "draft", watched_drafting)
    monkeypatch.setattr(DraftSession, "draft", watched)
    out = model.generate(**ragged_batch(VOCABULARY, (7,)), max_new_tokens=NEW, assistant_model=heads)
    assert out.shape[1] == 7 + NEW


# ---------------------------------------------------------------------- calls that are interrupted


PLACES = [*itertools.product(("dynamic", "static", "captures", "columns_only"), ("processor", "streamer"))]
PLACES += [("dynamic", "target"), ("dynamic", "heads")]


@pytest.mark.parametrize("error", [RuntimeError("cancelled"), KeyboardInterrupt()])
@pytest.mark.parametrize(("kind", "where"), PLACES)
def test_an_interrupted_call_leaves_target_and_heads_as_they_were(model, heads, request, kind, where, error):
    """Nothing of the call stays, and the next one is right."""
    options = {"max_new_tokens": NEW, "num_assistant_tokens": 5}
    options |= {"cache_implementation": "static"} if kind == "static" else {}
    if kind in ("captures", "columns_only"):
        request.getfixturevalue(kind)
    inputs = ragged_batch(VOCABULARY, (7,))
    model.generate(**inputs, assistant_model=heads, **options)  # so that the target has been measured
    before, settings, breaks = state_of(model), heads.generation_config.to_dict(), Breaks(error)
    weights = {name: weight.clone() for name, weight in heads.state_dict().items()}
    broken = {"streamer": {"streamer": breaks}, "processor": {"logits_processor": LogitsProcessorList([breaks])}}
    module = {"target": model.model.layers[1], "heads": heads.head_norm}.get(where)
    with (
        module.register_forward_hook(lambda *_: breaks.count()) if module else nullcontext(),
        pytest.raises(type(error)),
    ):
        model.generate(**inputs, assistant_model=heads, **{**options, "max_new_tokens": 60}, **broken.get(where, {}))
    assert state_of(model) == before
    assert heads.generation_config.to_dict() == settings
    assert all(torch.equal(weights[name], weight) for name, weight in heads.state_dict().items())
    same_tokens(model, heads, inputs, **options)


@pytest.mark.filterwarnings("ignore::hf_clover.decoding.route.CloverWarning")
@pytest.mark.parametrize("error", [RuntimeError("cancelled"), KeyboardInterrupt()])
@pytest.mark.parametrize(("target", "method"), CHAINS)
def test_an_interrupted_chain_leaves_the_callers_cache_as_it_was(target, method, error):
    """The caller's cache is as it was before the call that broke off, and carries on."""
    model = build(target, vocab_size=VOCABULARY)
    heads, inputs = CloverHeads.from_target(model), ragged_batch(VOCABULARY, (7,))
    options = {"max_new_tokens": NEW, "num_assistant_tokens": 4, "return_dict_in_generate": True}
    plain = model.generate(**inputs, max_new_tokens=2 * NEW)
    cache = DynamicCache(config=model.config)
    first = model.generate(**inputs, **{cache_name(): cache}, assistant_model=heads, **options)
    more = {"input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences)}
    assert torch.equal(first.sequences, plain[:, : 7 + NEW])
    before, held = state_of(model), _held(cache)
    breaks = LogitsProcessorList([Breaks(error)])
    with planted(heads, plain, 7 + NEW), pytest.raises(type(error)):
        model.generate(**more, **{cache_name(): cache}, assistant_model=heads, logits_processor=breaks, **options)
    assert state_of(model) == before
    assert len(held) > 0
    assert all(torch.equal(was, now) for was, now in zip(held, _held(cache), strict=True))
    with planted(heads, plain, 7 + NEW):
        again = model.generate(**more, **{cache_name(): cache}, assistant_model=heads, **options)
    assert torch.equal(again.sequences, plain)
    assert again.speculation.method == method
    assert again.speculation.accepted_tokens > 2


def _held(cache):
    """Copies of all tensors in a cache, whatever its layers are."""
    return [part.clone() for part in tree_leaves([vars(layer) for layer in cache.layers]) if torch.is_tensor(part)]
