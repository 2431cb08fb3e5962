"""The cache against a list of lists, and the target's run over it against plain forwards and plain generate."""

import random
from collections import Counter
from unittest import mock

import pytest
import torch
from helpers.cached_rows import Model, assert_holds, assert_rows, commit, fill, stage, states
from helpers.llama_and_mistral import VOCABULARY, WINDOW, target_of
from helpers.paths import path_of
from helpers.trees import running
from helpers.zoo import ragged_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, GenerationConfig, StaticCache

from hf_clover.decoding.cache import by_row as cache_module
from hf_clover.decoding.cache.by_row import BLOCK, TreeCache
from hf_clover.decoding.target.trees import TargetRun
from hf_clover.decoding.tree import Tree, chain_of, grow_global
from hf_clover.targets.private_api import cache_name

steady = settings(derandomize=True, deadline=None, max_examples=100)


# ---------------------------------------------------------------------- a list of lists


def test_the_cache_holds_what_a_list_of_lists_holds():
    """Fills, staged writes, commits and abandoned writes in any order that the loop could ask for."""
    seen = Counter()

    @settings(steady, max_examples=150)
    @given(st.data())
    def check(data):
        batch, layers = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
        block = data.draw(st.sampled_from((1, 4, 7, 256)))
        with mock.patch.object(cache_module, "BLOCK", block):
            cache, model = TreeCache(layers), Model(batch)
            for length in data.draw(st.lists(st.integers(1, 6), max_size=3)):  # a prefill in chunks, or none
                fill(cache, model, length)
            cache.finish_filling(batch)
            assert cache.lengths == [len(row) for row in model.rows]
            for entries in data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=6)):
                new = stage(cache, model, entries)
                if data.draw(st.integers(0, 4)) == 0:
                    seen["abandoned"] += 1
                    continue  # what is staged and not committed is as if it had not been
                subset = st.sets(st.integers(0, entries - 1)).map(sorted)
                paths = [data.draw(subset) for _ in range(batch)]
                seen["ragged"] += len(set(map(len, paths))) > 1
                seen["moved"] += any(path != list(range(len(path))) for path in paths)
                seen["nothing"] += any(not path for path in paths)
                commit(cache, model, new, paths)
                if cache.layers[0].is_initialized:
                    assert_holds(cache, model)
                seen["uneven start"] += len(set(cache.lengths)) > 1

    check()
    assert min(seen[kind] for kind in ("abandoned", "ragged", "moved", "nothing", "uneven start")) > 20, seen


@pytest.mark.parametrize("start", [BLOCK - 3, BLOCK - 1, BLOCK, BLOCK + 1])
def test_entries_survive_growth_across_a_block(start):
    """Entries survive every reallocation, even and ragged; buffers grow in whole blocks and not at every step."""
    cache, model = TreeCache(2), Model(2)
    fill(cache, model, start)
    cache.finish_filling(2)
    places = {cache.layers[0].keys.data_ptr()}
    for step in range(60):
        new = stage(cache, model, 6)
        commit(cache, model, new, [[0, 2, 5], [0, 1, 3, 4, 5]] if step % 2 else [[1, 2, 3, 4], [0]])
        places.add(cache.layers[0].keys.data_ptr())
    assert_holds(cache, model)
    assert max(cache.lengths) > BLOCK
    capacity = cache.layers[0].keys.shape[2]
    assert capacity % BLOCK == 0
    assert capacity - max(cache.lengths) <= BLOCK
    assert len(places) <= 3


def test_an_exception_in_a_staged_forward_leaves_the_cache_as_it_was():
    cache, model = TreeCache(1), Model(2)
    fill(cache, model, 4)
    cache.finish_filling(2)
    commit(cache, model, stage(cache, model, 2), [[0], [0, 1]])
    new = model.new(3)

    def interrupted():
        with cache.staged(3):
            cache.update(*states(new, 0), 0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert cache.lengths == [5, 6]
    assert_holds(cache, model)
    commit(cache, model, stage(cache, model, 2), [[1], [0]])
    assert_holds(cache, model)


def test_load_puts_the_entries_of_a_sliding_window_at_the_end():
    """A full layer, one that kept its last three entries, and one that holds nothing."""
    cache, entries = TreeCache(3), [[1, 2, 3, 4, 5], [11, 12, 13, 14, 15]]
    full = states(entries, 0)
    window = states([row[-3:] for row in entries], 1)
    cache.load([full, window, None], 5)
    cache.finish_filling(2)
    assert cache.lengths == [5, 5]
    assert_rows(cache.export(0, 5), entries, 0)
    kept = tuple(states_[:, :, 2:] for states_ in cache.export(1, 5))
    assert_rows(kept, [row[-3:] for row in entries], 1)
    assert not cache.export(1, 5)[0][:, :, :2].any(), "the mask hides these, so they need be no more than finite"
    assert cache.export(2, 5) is None
    cache.layers[0].keys.zero_()
    assert full[0].all(), "the states given are copied"


# ---------------------------------------------------------------------- a target's run


SHAPES = {"one": (9,), "ragged": (9, 4, 7), "within the window": (2, 1)}
NEW = 24


@pytest.fixture(scope="module", params=["llama", "mistral"])
def target(request):
    return target_of(request.param)


def prompt_of(shape):
    """A left-padded batch -> input_ids, attention_mask."""
    return ragged_batch(VOCABULARY, SHAPES[shape]).values()


def positions_of(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


def widened(mask, length):
    """The mask of a text of `length` columns that begins with the prompt."""
    return torch.nn.functional.pad(mask, (0, length - mask.shape[1]), value=1)


def after_prompt(target, ids, mask):
    return running(target, {"input_ids": ids, "attention_mask": mask})


def generate(target, ids, mask, new, **kwargs):
    kwargs |= dict(max_new_tokens=new, do_sample=False, return_dict_in_generate=True)
    return target.generate(input_ids=ids, attention_mask=widened(mask, ids.shape[1]), **kwargs)


@torch.no_grad()
def plain_forward(target, tokens):
    """A forward over one text without padding -> its last logits [V], and all layers' keys and values, whole."""
    cache = DynamicCache()  # without the config no layer forgets what its window does not show
    logits = target(input_ids=torch.tensor([tokens]), **{cache_name(): cache}, use_cache=True).logits
    return logits[0, -1], [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def random_tree(roots: torch.Tensor, truth: torch.Tensor, nodes: int, seed: int) -> tuple[Tree, list[list[int]]]:
    """A random tree in which the truth's next tokens [B, m] are likely -> the tree, and the truth's path per row."""
    generator = torch.Generator().manual_seed(seed)

    def expand(level, chosen, tokens):
        logits = torch.randn(*tokens.shape, VOCABULARY, generator=generator)
        if level < truth.shape[1]:
            likely = torch.nn.functional.one_hot(truth[:, level], VOCABULARY)[:, None]  # [B, 1, V]
            logits += 2.5 * likely
        return logits

    tree = grow_global(expand, roots, nodes, depth=4, beam_width=3, top_k=3)
    paths = []
    for row, tokens in enumerate(truth.tolist()):
        path = [0]
        for token in tokens:
            below = (tree.parents[row] == path[-1]) & (tree.tokens[row] == token) & tree.valid[row]
            if not below[1:].any():
                break
            path.append(1 + int(below[1:].nonzero()[0]))
        paths.append(path)
    return tree, paths


def advance(run, truth, until, seed, check=None, seen=None):
    """Verify random trees and commit parts of the path that the truth [B, L] takes, until every row stands at column
    `until`; rows that are there already commit nothing."""
    rng = random.Random(seed)
    order = torch.arange(5)
    while min(run.cache.lengths) < until:
        lengths = list(run.cache.lengths)
        ahead = truth.gather(1, (torch.tensor(lengths)[:, None] + order).clamp(max=truth.shape[1] - 1))  # [B, 5]
        tree, paths = random_tree(ahead[:, 0], ahead[:, 1:], nodes=7, seed=rng.randrange(2**31))
        with torch.no_grad():
            logits = run.verify(tree)
        if check is not None:
            check(tree, logits, lengths)
        paths = [path[: min(rng.randint(1, 5), until - length)] for path, length in zip(paths, lengths)]
        run.commit(paths)
        if seen is not None:
            seen.update(len(path) for path in paths)
            seen["moved"] += any(path != list(range(len(path))) for path in paths)
    assert run.cache.lengths == [until] * len(lengths)


def assert_nodes(target, tree, logits, texts):
    """Every valid node's logits are those of a plain forward over its row's text and its path -> their number."""
    for row, text in enumerate(texts):
        for node in tree.valid[row].nonzero().flatten().tolist():
            expected, _ = plain_forward(target, [*text, *path_of(tree, row, node)])
            torch.testing.assert_close(logits[row, node], expected, rtol=1e-4, atol=1e-4)  # fp32, another order
    return int(tree.valid.sum())


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_of_trees_and_committed_entries_equal_plain_forwards(target, shape):
    """Every node's logits are those of its path alone, and the entries kept are those of the text alone."""
    ids, mask = prompt_of(shape)
    truth = generate(target, ids, mask, NEW).sequences
    padding = (mask == 0).sum(1).tolist()
    seen, checked, until = Counter(), 0, ids.shape[1] + 15

    def text(row, length):
        return truth[row, padding[row] : length].tolist()

    def check(tree, logits, lengths):
        nonlocal checked
        checked += assert_nodes(target, tree, logits, [text(row, length + 1) for row, length in enumerate(lengths)])

    with after_prompt(target, ids, mask) as run:
        advance(run, truth, until, seed=1, check=check, seen=seen)
    assert checked > 20
    assert seen["moved"] > 0, seen
    assert seen[1] + seen[2] > 0, seen
    assert seen[3] + seen[4] + seen[5] > 0, seen
    for row in range(len(ids)):
        _, expected = plain_forward(target, text(row, until))
        for layer, pair in enumerate(expected):
            ours = tuple(states[row, :, padding[row] :] for states in run.cache.export(layer, until))
            torch.testing.assert_close(ours, pair, rtol=1e-4, atol=1e-4)


def test_a_sliding_window_counts_depth_in_the_tree_and_not_nodes(target):
    """A path deeper than the window whose nodes do not stand next to each other: shallow ones before and between."""
    ids, mask = prompt_of("ragged")
    parents = [0, 0, 0, 0, 3, 1, 4, 6, 6, 8, 9, 2, 10, 12]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    assert max(depths) > WINDOW + 2
    tokens = 1 + (torch.arange(len(parents)) * 5 + torch.arange(3)[:, None]) % (VOCABULARY - 1)  # [B, n]
    parents, depths = (torch.tensor(values).expand(3, -1) for values in (parents, depths))
    ones = torch.ones_like(tokens)
    tree = Tree(tokens, parents, depths, -ones.float(), ones.bool(), max_depth=int(depths.max()))
    with after_prompt(target, ids, mask) as run:
        logits = run.verify(tree)
        texts = [[*row[seen.bool()].tolist(), int(root)] for row, seen, root in zip(ids, mask, tokens[:, 0])]
        assert assert_nodes(target, tree, logits, texts) == tokens.numel()
        path = [0, 3, 4, 6, 8, 9, 10, 12, 13]
        run.commit([path, path[:2], path[:5]])
        again = run.verify(tree)
        texts = [
            [*text[:-1], *row[path[:count]].tolist(), int(row[0])]
            for text, row, count in zip(texts, tokens, (len(path), 2, 5))
        ]
        assert_nodes(target, tree, again, texts)


def assert_same_cache(ours, theirs, mask, until):
    """Layer by layer what plain generate's own cache holds; entries of padding are not compared."""
    assert ours.get_seq_length() == theirs.get_seq_length() == until
    assert len(ours.layers) == len(theirs.layers)
    for mine, its in zip(ours.layers, theirs.layers):
        assert type(mine) is type(its)
        assert mine.keys.shape == its.keys.shape
        assert mine.get_seq_length() == its.get_seq_length()
        held = its.keys.shape[2] if its.get_max_length() == -1 else min(its.keys.shape[2], until)
        visible = widened(mask, until)[:, until - held :].bool()[:, None, :, None]
        for name in ("keys", "values"):
            pair = (getattr(cache, name)[:, :, :held] * visible for cache in (mine, its))
            torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("new", [2, 4, 17])
def test_plain_generate_continues_from_a_cache_handed_back(target, shape, new):
    """A new cache: shorter or longer than the window, the same tokens as plain generate all along."""
    ids, mask = prompt_of(shape)
    until = ids.shape[1] + new
    truth = generate(target, ids, mask, NEW).sequences
    assert len(set(truth[0, ids.shape[1] :].tolist())) > 6, "a text that wanders"
    with after_prompt(target, ids, mask) as run:
        advance(run, truth, until, seed=until)
    cache = run.hand_back(until)
    reference = DynamicCache(config=target.config)
    seen = widened(mask, until)
    with torch.no_grad():
        target(truth[:, :until], attention_mask=seen, position_ids=positions_of(seen), **{cache_name(): reference})
    assert_same_cache(cache, reference, mask, until)
    left = truth.shape[1] - until - 1
    more = generate(target, truth[:, : until + 1], mask, left, **{cache_name(): cache})
    assert torch.equal(more.sequences, truth)


def test_a_cache_of_another_text_gives_other_tokens(target):
    """The comparison above is not blind: entries of another text give other tokens."""
    ids, mask = prompt_of("ragged")
    truth = generate(target, ids, mask, NEW).sequences
    with after_prompt(target, ids, mask) as run:
        advance(run, truth.roll(1, dims=0), 20, seed=3)
    more = generate(target, truth[:, :21], mask, 10, **{cache_name(): run.hand_back(20)})
    assert not torch.equal(more.sequences, truth[:, :31])


CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=64),
    "without config": lambda config: DynamicCache(),
}


@pytest.mark.parametrize(("kind", "turn"), [("dynamic", 0), *((kind, turn) for kind in CACHES for turn in (3, 16))])
@pytest.mark.parametrize("shape", SHAPES)
def test_turns_with_and_without_drafts_share_the_users_cache(target, kind, shape, turn):
    """Plain generate, then ours from its cache, then plain generate from ours: the user's own object all the way."""
    ids, mask = prompt_of(shape)
    cache = CACHES[kind](target.config)
    said = generate(target, ids, mask, turn, **{cache_name(): cache}).sequences if turn else ids
    question = torch.tensor([[3, 17, 8]]).expand(len(ids), -1) + torch.arange(len(ids))[:, None]
    asked = torch.cat((said, question), dim=1)
    asked_mask = widened(mask, asked.shape[1])
    truth = generate(target, asked, mask, NEW).sequences  # without any cache from before

    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers if layer.is_initialized]
    kwargs = dict(attention_mask=asked_mask, position_ids=positions_of(asked_mask), use_cache=True)
    run = TargetRun(target, GenerationConfig(max_length=100, pad_token_id=0), {**kwargs, cache_name(): cache})
    until = asked.shape[1] + 11
    with run.open(), torch.no_grad():
        first = run.prefill(asked)
        assert torch.equal(first.argmax(-1)[:, 0], truth[:, asked.shape[1]])
        new = asked.shape[1] - (said.shape[1] - 1 if turn else 0)
        assert run.hidden.shape[1] == new, "only what the cache does not hold is computed"
        advance(run, truth, until, seed=turn)
    for layer, (keys, values) in zip(cache.layers, before):
        assert torch.equal(layer.keys, keys), "the user's cache is as it was until it is handed back"
        assert torch.equal(layer.values, values)
    assert run.hand_back(until) is cache
    assert int(cache.get_seq_length()) == until
    more = generate(target, truth[:, : until + 1], mask, truth.shape[1] - until - 1, **{cache_name(): cache})
    assert torch.equal(more.sequences, truth)
    assert more[cache_name()] is cache


def test_a_chain_brings_rows_of_different_lengths_to_one_length(target):
    """`chain_of`, rows with different numbers of entries kept: how rows are brought to one length at the end."""
    ids, mask = prompt_of("ragged")
    truth = generate(target, ids, mask, NEW).sequences
    width, gaps = ids.shape[1], [6, 0, 3]
    with after_prompt(target, ids, mask) as run:
        run.verify(chain_of(truth[:, width : width + 6]))
        run.commit([range(6 - gap) for gap in gaps])
        starts = torch.tensor(run.cache.lengths)[:, None]
        logits = run.verify(chain_of(truth.gather(1, starts + torch.arange(6))))
        assert torch.equal(logits.argmax(-1), truth.gather(1, starts + 1 + torch.arange(6)))
        run.commit([range(gap) for gap in gaps])
    cache = run.hand_back(width + 6)
    more = generate(target, truth[:, : width + 7], mask, NEW - 7, **{cache_name(): cache})
    assert torch.equal(more.sequences, truth)
