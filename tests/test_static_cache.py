"""The cache whose entries stay in their places: against a list of lists, and what calls share of it."""

import gc
import weakref

import pytest
import torch
from helpers.cached_rows import Model, assert_holds, fill, states
from helpers.llama_and_mistral import target_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_clover.decoding.cache import static
from hf_clover.decoding.cache.static import MOVES, StaticTreeCache, first_capacity, give_back_cache, take_cache
from hf_clover.decoding.graphs import Graphs

CPU = torch.device("cpu")


def stage(cache, model, entries):
    """Write `entries` per row, and as many for rows that fill a graph up -> their numbers."""
    rows = len(model.rows)
    new = model.new(entries)[:rows]
    seen, columns = cache.look_at(entries)
    assert rows <= seen
    assert columns >= max(cache.lengths) + entries
    with cache.staged(entries):
        cache.slots.index = cache.slots.starts + torch.arange(entries)
        for layer in range(2):
            got = cache.update(*states(new + new[:1] * (seen - rows), layer), layer)
            for row, (old, staged) in enumerate(zip(model.rows, new, strict=True)):
                wanted = states([old + staged], layer)
                assert all(torch.equal(g[row, :, : w.shape[2]], w[0]) for g, w in zip(got, wanted, strict=True))
    return new


def commit(data, cache, model, new):
    paths = [data.draw(st.sets(st.integers(0, len(entries) - 1)).map(sorted)) for entries in new]
    cache.commit(paths)
    for row, path in enumerate(paths):
        model.rows[row] += [new[row][place] for place in path]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.data())
def test_the_static_cache_holds_what_a_list_of_lists_holds(data):
    """As in `test_cache.py` for the growing cache. What a commit moves is in place after a forward or in an export."""
    batch = data.draw(st.integers(1, 3))
    cache, model = StaticTreeCache(2, batch, 512, Graphs(CPU, "Forwards")), Model(batch)
    fill(cache, model, data.draw(st.integers(1, 6)))
    cache.finish_filling(batch)
    places = [layer.keys.data_ptr() for layer in cache.layers]
    for entries in data.draw(st.lists(st.integers(1, MOVES + 4), min_size=1, max_size=5)):
        new = stage(cache, model, entries)
        if data.draw(st.integers(0, 3)) == 0:
            continue  # never committed
        commit(data, cache, model, new)
        if data.draw(st.booleans()):
            assert_holds(cache, model)
    assert_holds(cache, model)
    assert places == [layer.keys.data_ptr() for layer in cache.layers]


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.data())
def test_the_static_cache_is_right_after_rows_leave_and_texts_outgrow_it(data):
    batch = data.draw(st.integers(2, 5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(static, "LEAST_COLUMNS", 8)
        cache, model = StaticTreeCache(2, batch, 8, Graphs(CPU, "Forwards")), Model(batch)
        fill(cache, model, 4)
        cache.finish_filling(batch)
        for entries in data.draw(st.lists(st.integers(1, 5), min_size=3, max_size=7)):
            if len(model.rows) > 1 and data.draw(st.booleans()):
                kept = sorted(data.draw(st.sets(st.integers(0, len(model.rows) - 1), min_size=1)))
                cache.keep_rows(kept)
                model.rows = [model.rows[row] for row in kept]
            commit(data, cache, model, stage(cache, model, entries))
        assert_holds(cache, model)


def test_the_first_capacity_follows_from_prompt_and_longest_text():
    """Room for as much again as the prompt, or for a thousand tokens; never more than the text can have."""
    assert first_capacity(100, 132) == 512, "a short answer pays for no long one"
    assert first_capacity(100, 32_000) == 2048
    assert first_capacity(5_000, 32_000) == 16_384
    assert first_capacity(5_000, 5_100) == 8192


def test_a_cache_is_lent_to_one_call_at_a_time():
    target = target_of("llama")

    def take(rows=3, capacity=512, written_down="weights", target=target):
        return take_cache(target, 2, rows, capacity, Graphs(CPU, "Forwards", written_down))

    first, second = take(), take()
    assert first is not second
    give_back_cache(target, first)
    again = take()
    assert again is first
    give_back_cache(target, again)
    assert take(rows=2) is not first
    give_back_cache(target, first)
    assert take(capacity=1024) is not first
    give_back_cache(target, first)
    graphs = first.graphs
    assert take(written_down="other weights") is first
    assert first.graphs is not graphs, "the addresses of the cache are not all that is in a graph"
    gone = weakref.ref(first)
    del first, second, again, target
    gc.collect()
    assert gone() is None, "nothing outlives the target"


def test_an_aborted_call_leaves_no_nan_in_the_cache():
    target = target_of("llama")
    cache, model = take_cache(target, 2, 1, 512, Graphs(CPU, "Forwards")), Model(1)
    fill(cache, model, 3)
    for layer in cache.layers:
        layer.keys.fill_(torch.nan)
    give_back_cache(target, cache)
    again = take_cache(target, 2, 1, 512, Graphs(CPU, "Forwards"))
    assert again is cache
    assert not any(buffer.isnan().any() for layer in again.layers for buffer in layer.buffers)
