"""Static and compiled: plain generate's tokens, few graphs, and nothing that one call leaves to another.

Graphs are made by a backend that counts them and runs them as they are, so that this takes no C++ compiler. Whatever
breaks a graph is an error (`fullgraph`).
"""

import gc
import threading
import weakref
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import planted
from test_cache import Model, assert_holds, fill, states, target_of
from transformers import CompileConfig, GenerationConfig, StaticCache
from zoo import build, ragged_batch

from hf_clover import CloverHeads
from hf_clover.decoding.masks import additive, ancestors_of, plain_mask, visible_columns
from hf_clover.decoding.private_api import cache_name
from hf_clover.decoding.static_target import MOVES, NODE_COUNTS, StaticTreeCache, lent_cache
from hf_clover.decoding.target_memory import memory_of
from hf_clover.decoding.target_run import TargetRun
from hf_clover.decoding.tree import Tree, root_only

NEW, WIDTH, LONGEST = 22, 9, 400


class Graphs:
    """A torch.compile backend that runs each graph as it is."""

    def __init__(self):
        self.count = 0
        self.config = CompileConfig(backend=self, mode="default", fullgraph=True)
        self.config._compile_all_devices = True

    def __call__(self, graph, example_inputs):
        self.count += 1
        return graph

    def __deepcopy__(self, memo):
        return self

    @property
    def options(self):
        return {"cache_implementation": "static", "compile_config": self.config}


@pytest.fixture
def graphs():
    torch._dynamo.reset()
    return Graphs()


def batch_of(vocabulary):
    return ragged_batch(vocabulary, (5, WIDTH, 3))


def both(target, heads, inputs, seed=0, plain=None, **options):
    """(plain's sequences, ours) for the same random numbers, with drafts that are right for a while."""
    common = {"max_new_tokens": NEW, **options}
    sampling = {k: v for k, v in common.items() if k not in ("cache_implementation", "compile_config")}
    torch.manual_seed(seed)
    plain = target.generate(**inputs, **{k: v for k, v in sampling.items() if k != "num_assistant_tokens"})
    torch.manual_seed(seed)
    with planted(heads, plain, inputs["input_ids"].shape[1], seed):
        ours = target.generate(**inputs, **common, assistant_model=heads, return_dict_in_generate=True)
    assert ours.speculation.accepted_tokens > 0
    return plain, ours


# ---------------------------------------------------------------------- tokens and graphs


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_the_tokens_of_plain_generate_from_few_graphs(name, graphs):
    """Left padding, windows, masks that differ from layer to layer; greedy, sampled, and another tree size."""
    target = build(name, vocab_size=24) if name == "gemma3" else target_of(name)
    heads, inputs = CloverHeads.from_target(target), batch_of(24)
    before = set(vars(target))
    plain, ours = both(target, heads, inputs, num_assistant_tokens=6, **graphs.options)
    assert torch.equal(ours.sequences, plain)
    assert isinstance(ours[cache_name()], StaticCache)
    first = graphs.count
    assert first in (1, 2), "a tree, and a root alone if there was one"
    for seed in (1, 2):
        plain, ours = both(target, heads, inputs, seed, num_assistant_tokens=6, do_sample=True, **graphs.options)
        assert torch.equal(ours.sequences, plain)
    plain, ours = both(target, heads, inputs, 3, num_assistant_tokens=11, **graphs.options)
    assert torch.equal(ours.sequences, plain)
    assert graphs.count == first, "a call of the same shape compiles nothing, whatever the size of its trees"
    assert set(vars(target)) - before <= {"_previous_max_cache_length"}, "that one is transformers' own"
    plain_graphs = graphs.count
    assert torch.equal(target.generate(**inputs, max_new_tokens=NEW), plain)
    assert graphs.count == plain_graphs


def test_every_width_shares_two_graphs(graphs):
    """A root alone and trees of all sizes, with logits and hidden states as from a cache that grows."""
    target, inputs = target_of("llama"), batch_of(24)
    with two_runs(target, inputs, graphs) as (static, growing):
        for step, size in enumerate((9, 1, 2, 3, 30, 64, 1, 17, 5)):
            tree = random_tree(3, size, seed=step)
            assert_same_step(static, growing, tree)
            commit(static, growing, [walk_of(tree, row, size) for row in range(3)])
    assert graphs.count == 2
    assert NODE_COUNTS[0] == 1, "a plain step pays for one node"


def test_fixed_sizes_where_the_user_says_so(graphs):
    target, inputs = target_of("llama"), batch_of(24)
    graphs.config.dynamic = False
    with two_runs(target, inputs, graphs) as (static, growing):
        for step, size in enumerate((3, 4, 7, 8, 3)):
            tree = random_tree(3, size, seed=step)
            assert_same_step(static, growing, tree)
            commit(static, growing, [[0]] * 3)
    assert graphs.count == 2, "3 nodes are padded to 4, 7 to 8"


def test_one_target_does_not_count_against_another(graphs):
    """torch.compile gives up on a function that it has compiled a number of times."""
    inputs = ragged_batch(24, (4,))
    for seed in range(3):
        target = target_of("llama")
        limited = torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True)
        with limited, two_runs(target, inputs, graphs) as (static, growing):
            assert_same_step(static, growing, random_tree(1, 5, seed))
    assert graphs.count == 3


@pytest.mark.parametrize("why", ["disable_compile", "on a CPU", "dynamic"])
def test_where_plain_generate_would_not_compile(why, graphs):
    target, inputs = target_of("llama"), batch_of(24)
    heads, options = CloverHeads.from_target(target), graphs.options
    if why == "disable_compile":
        options["disable_compile"] = True
    elif why == "on a CPU":
        graphs.config._compile_all_devices = None
    else:
        options["cache_implementation"] = "dynamic"
    plain, ours = both(target, heads, inputs, **options)
    assert torch.equal(ours.sequences, plain)
    assert graphs.count == 0
    assert memory_of(target).idle_cache is None


def test_settings_of_the_target_and_a_cache_of_the_users(graphs):
    target, inputs = target_of("llama"), batch_of(24)
    heads = CloverHeads.from_target(target)
    target.generation_config.cache_implementation = "static"
    target.generation_config.compile_config = graphs.config
    plain, ours = both(target, heads, inputs, disable_compile=False)
    assert torch.equal(ours.sequences, plain)
    count = graphs.count
    assert count > 0
    target.generation_config.cache_implementation = None
    cache, said = StaticCache(config=target.config, max_cache_len=200), inputs
    for turn in range(2):
        ids, mask = said["input_ids"], said["attention_mask"]
        truth = target.generate(**said, max_new_tokens=8, disable_compile=True)
        with planted(heads, truth, ids.shape[1], turn):
            out = target.generate(**said, max_new_tokens=8, **{cache_name(): cache}, assistant_model=heads)
        assert torch.equal(out, truth)
        width = out.shape[1] - ids.shape[1]
        said = {"input_ids": out, "attention_mask": torch.nn.functional.pad(mask, (0, width), value=1)}
    assert graphs.count > count, "another capacity"


# ---------------------------------------------------------------------- what calls share


def test_a_cache_is_lent_to_one_call_at_a_time(graphs):
    target = target_of("llama")
    with lent_cache(target, 2, 3, 200) as first, lent_cache(target, 2, 3, 200) as second:
        assert first is not second
    with lent_cache(target, 2, 3, 150) as again:
        assert again is first, "the last one given back, which is large enough and not much too large"
        assert again.capacity == 256
    for rows, slots in ((2, 150), (3, 300), (3, 100)):  # other rows, too small, much too large
        with lent_cache(target, 2, 3, 256) as kept:
            pass
        with lent_cache(target, 2, rows, slots) as other:
            assert other is not kept
    gone = weakref.ref(other)
    del first, second, again, kept, other, target
    gc.collect()
    assert gone() is None, "nothing outlives the target"


def test_two_threads_with_one_target(graphs):
    target, inputs = target_of("llama"), batch_of(24)
    heads = [CloverHeads.from_target(target) for _ in range(2)]
    prompts = [inputs, {k: v.flip(0) for k, v in inputs.items()}]
    truth = [target.generate(**prompt, max_new_tokens=NEW) for prompt in prompts]
    got, meet = [None, None], threading.Barrier(2)

    def speak(who):
        meet.wait()
        options = {**graphs.options, "num_assistant_tokens": 5}
        got[who] = target.generate(**prompts[who], max_new_tokens=NEW, assistant_model=heads[who], **options)

    threads = [threading.Thread(target=speak, args=(who,)) for who in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(got, truth, strict=True))


def test_an_aborted_call_leaves_nothing_to_the_next(graphs):
    target, inputs = target_of("llama"), batch_of(24)
    heads = CloverHeads.from_target(target)
    plain, _ = both(target, heads, inputs, **graphs.options)
    kept = memory_of(target).idle_cache
    for layer in kept.layers:
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    kept.slots.text.fill_(False)
    _, ours = both(target, heads, inputs, **graphs.options)
    assert torch.equal(ours.sequences, plain)
    assert memory_of(target).idle_cache is kept


# ---------------------------------------------------------------------- the cache, against a list of lists


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.data())
def test_the_static_cache_is_a_list_of_lists(data):
    """As `test_cache.py` has it for the growing one; what a commit moves is there after a forward or in an export."""
    batch = data.draw(st.integers(1, 3))
    cache, model = StaticTreeCache(2, batch, 128, torch.device("cpu")), Model(batch)
    fill(cache, model, data.draw(st.integers(1, 6)))
    cache.finish_filling(batch)
    places = [layer.keys.data_ptr() for layer in cache.layers]
    for entries in data.draw(st.lists(st.integers(1, MOVES + 4), min_size=1, max_size=5)):
        new = model.new(entries)
        with cache.staged(entries):
            cache.slots.index = cache.slots.starts + torch.arange(entries)
            for layer in range(2):
                got = cache.update(*states(new, layer), layer)
                for row, (old, staged) in enumerate(zip(model.rows, new, strict=True)):
                    wanted = states([old + staged], layer)
                    assert all(torch.equal(g[row, :, : w.shape[2]], w[0]) for g, w in zip(got, wanted, strict=True))
            cache.slots.index = None
        if data.draw(st.integers(0, 3)) == 0:
            continue  # never committed
        paths = [data.draw(st.sets(st.integers(0, entries - 1)).map(sorted)) for _ in range(batch)]
        cache.commit(paths)
        for row, path in enumerate(paths):
            model.rows[row] += [new[row][place] for place in path]
        if data.draw(st.booleans()):
            assert_holds(cache, model)
    assert_holds(cache, model)
    assert places == [layer.keys.data_ptr() for layer in cache.layers]


# ---------------------------------------------------------------------- masks


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(1, 3), st.integers(1, 20), st.integers(0, 9), st.integers(0, 99))
def test_the_short_ways_to_a_mask(batch, size, length, seed):
    tree = random_tree(batch, size, seed)
    ancestors = ancestors_of(tree.parents, max(size - 1, 1).bit_length())
    for row in range(batch):
        for node in range(size):
            assert ancestors[row, node].nonzero().flatten().tolist() == path_to(tree.parents[row].tolist(), node)
    assert torch.equal(ancestors, tree.ancestors())
    starts = torch.full((batch, 1), length)
    long_way = additive(visible_columns(ancestors, starts, length + size, None), torch.float32)
    assert torch.equal(plain_mask(ancestors, length, torch.float32), long_way)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_root_alone_needs_no_mask(name):
    """Nor does anything else of a plain step wait for one, until a window begins to slide."""
    target, inputs, seen = target_of(name), ragged_batch(24, (2,)), []
    with running(target, inputs) as run, torch.no_grad():
        for _ in range(4):
            run.verify(root_only(torch.tensor([5])))
            with run.cache.staged(1):
                seen.append(run._masks(root_only(torch.tensor([5]))) is None)
            run.commit([[0]])
    assert seen == ([True] * 4 if name == "llama" else [True, True, False, False])


# ---------------------------------------------------------------------- prefill


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("is_static", [False, True])
def test_a_long_prompt_costs_no_mask_and_no_logits(name, chunk, is_static, graphs):
    target, inputs, seen = target_of(name), ragged_batch(24, (60,)), []
    target.config.sliding_window = 100
    if chunk is not None:
        inputs["prefill_chunk_size"] = chunk
    heads = CloverHeads.from_target(target)
    target.generate(**ragged_batch(24, (3,)), max_new_tokens=2, assistant_model=heads)  # the trial of a new target
    layer, lm_head = target.model.layers[0], target.lm_head
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, a, k: seen.append((a[0].shape[1], k["attention_mask"])), with_kwargs=True
        ),
        lm_head.register_forward_pre_hook(lambda _, a: seen.append(a[0].shape[1])),
    ]
    options = graphs.options | {"disable_compile": False} if is_static else {}
    try:
        target.generate(**inputs, max_new_tokens=1, assistant_model=heads, **options)
    finally:
        for hook in hooks:
            hook.remove()
    widths, logits = [entry for entry in seen if isinstance(entry, tuple)], [e for e in seen if isinstance(e, int)]
    assert [width for width, _ in widths] == ([60] if chunk is None else [16, 16, 16, 12])
    assert widths[0][1] is None
    assert set(logits) == {1}


# ---------------------------------------------------------------------- helpers


def random_tree(batch, size, seed):
    random = torch.Generator().manual_seed(seed)
    parents = torch.zeros(batch, size, dtype=torch.long)
    for node in range(1, size):
        parents[:, node] = torch.randint(max(0, node - 4), node, (batch,), generator=random)
    depths = torch.zeros_like(parents)
    for node in range(1, size):
        depths[:, node] = depths.gather(1, parents[:, node : node + 1])[:, 0] + 1
    tokens = torch.randint(1, 24, (batch, size), generator=random)
    ones = torch.ones_like(tokens)
    return Tree(tokens, parents, depths, -ones.float(), ones.bool(), max_depth=int(depths.max()))


def path_to(parents, node):
    return [0] if node == 0 else [*path_to(parents, parents[node]), node]


def walk_of(tree, row, size):
    return path_to(tree.parents[row].tolist(), (row * 7) % size)


@contextmanager
def running(target, inputs, graphs=None):
    """A run that has taken in the prompt: compiled with `graphs`, growing without."""
    mask = inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    kwargs = {"attention_mask": mask, "position_ids": positions, "use_cache": True, "logits_to_keep": 1}
    config = GenerationConfig(max_length=LONGEST)
    if graphs is not None:
        config.compile_config = graphs.config
        kwargs[cache_name()] = StaticCache(config=target.config, max_cache_len=LONGEST)
    run = TargetRun(target, config, kwargs)
    with run.open(), torch.no_grad():
        run.prefill(inputs["input_ids"], limit=LONGEST)
        assert isinstance(run.cache, StaticTreeCache) == (graphs is not None)
        yield run


@contextmanager
def two_runs(target, inputs, graphs):
    with running(target, inputs, graphs) as static, running(target, inputs) as growing:
        yield static, growing


def assert_same_step(static, growing, tree):
    torch.testing.assert_close(static.verify(tree), growing.verify(tree), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(static.hidden[:, : tree.size], growing.hidden, rtol=1e-4, atol=1e-4)


def commit(static, growing, paths):
    for run in (static, growing):
        run.commit(paths)
    assert static.cache.lengths == growing.cache.lengths
    assert torch.equal(static.next_position, growing.next_position)
