"""Drafting compiled, against drafting as it is: the same trees from the same text, and one graph for them.

The graphs run as they are (see test_static.py), so this takes no C++ compiler.
"""

import pytest
import torch
from fitting import fit
from test_static import Graphs, graphs  # noqa: F401  (a fixture)
from transformers import StaticCache
from zoo import build, ragged_batch

from hf_clover import CloverHeads
from hf_clover.decoding.drafting import CloverDrafter
from hf_clover.decoding.private_api import cache_name
from hf_clover.decoding.static_drafting import compiled_drafter

VOCABULARY = 16
DRAFTING = pytest.mark.long(  # one kind of heads is in the short set
    "hf_clover/decoding/cache.py",
    "hf_clover/decoding/draft_graph.py",
    "hf_clover/decoding/drafting.py",
    "hf_clover/decoding/heads_run.py",
    "hf_clover/decoding/masks.py",
    "hf_clover/decoding/static_drafting.py",
    "hf_clover/decoding/tree.py",
    "hf_clover/network",
)
KINDS = {
    "clover-x": ("clover-x", {}),
    "clover-x, deeper than its heads": ("clover-x", {"num_heads": 2, "draft_depth": 6}),
    "clover-2": ("clover-2", {}),
    "clover": ("clover", {}),
    "medusa": ("medusa", {}),
    "levels": ("clover-2", {"draft_tree": "levels"}),
    "draft vocabulary": ("clover-2", {"draft_vocab_size": 9}),
}


@pytest.fixture(scope="module")
def target():
    return build("llama", vocab_size=VOCABULARY)


def settled(batch, width, size, start, generator):
    """Hidden states, tokens and positions as after a walk, a different number of them for each row. Few different
    tokens: pairs of them come again, for heads that recall."""
    hidden = torch.randn(batch, width, size, generator=generator)
    tokens = torch.randint(4, (batch, width), generator=generator)
    positions = torch.tensor(start)[:, None] + torch.arange(width)
    return hidden, tokens, positions


def assert_same_tree(mine, its):
    for row in range(len(mine.tokens)):
        paths = []
        for tree in (mine, its):
            found = {}
            for node in range(1, tree.size):
                if tree.valid[row, node]:
                    parent = int(tree.parents[row, node])
                    path = (*found.get(parent, ((), 0))[0], int(tree.tokens[row, node]))
                    found[node] = (path, float(tree.log_probs[row, node]))
            paths.append(dict(found.values()))
        assert paths[0].keys() == paths[1].keys()
        for path, log_prob in paths[0].items():
            assert log_prob == pytest.approx(paths[1][path], abs=1e-4)


@pytest.mark.parametrize("kind", ["clover-x", *(pytest.param(k, marks=DRAFTING) for k in KINDS if k != "clover-x")])
@pytest.mark.parametrize("padded", [False, True])
def test_the_trees_of_the_slow_twin(target, kind, padded, graphs):  # noqa: F811
    """After a prompt, after walks, after one row stood still, and after a rest that left more than a step takes."""
    variant, fields = KINDS[kind]
    heads = CloverHeads.from_target(target, variant, **fields).bind(target)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    batch, length, size = 3, 11, heads.config.hidden_size
    mask = torch.arange(length) >= torch.tensor([0, 4, 2])[:, None] if padded else None
    slow = CloverDrafter(heads, mask)
    with compiled_drafter(heads, batch, 128, graphs.config, mask, None) as fast:
        at = [length] * batch
        prompt = settled(batch, length, size, [0] * batch, generator)
        for drafter in (slow, fast):
            drafter.extend(*prompt, [length] * batch)
        assert_same_tree(fast.draft(7), slow.draft(7))
        made = graphs.count
        for walks in ([[1, 3, 2]], [[6, 1, 4]], [[0, 2, 1]], [[1, 1, 1]] * 15 + [[3, 2, 6]], [[2, 2, 2]]):
            for counts in walks:
                new = settled(batch, max(counts), size, at, generator)
                for drafter in (slow, fast):
                    drafter.extend(*new, counts)
                at = [position + count for position, count in zip(at, counts, strict=True)]
            assert_same_tree(fast.draft(7), slow.draft(7))
            assert torch.equal(fast.roots, slow.roots)
        assert made == graphs.count == 1
        if fast.cache is not None:
            assert fast.cache.lengths == slow.cache.lengths == at


@pytest.mark.parametrize("shape", [(7,), (5, 9, 3)])
def test_in_generate(target, shape, graphs):  # noqa: F811
    """As many drafts are accepted as without compiling, call after call, and only the first call compiles."""
    heads = fit(CloverHeads.from_target(target, draft_depth=3), target)
    inputs = ragged_batch(VOCABULARY, shape)
    common = {**inputs, "max_new_tokens": 30, "do_sample": False, "assistant_model": heads}
    eager = target.generate(**common, return_dict_in_generate=True)
    counts = []
    for _ in range(2):
        out = target.generate(**common, return_dict_in_generate=True, **graphs.options)
        assert torch.equal(out.sequences, eager.sequences)
        assert out.speculation.accepted_tokens == eager.speculation.accepted_tokens > 0
        assert out.speculation.tree_sizes == eager.speculation.tree_sizes
        counts.append(graphs.count)
    of_heads = len(set(eager.speculation.tree_sizes) - {0})  # a graph for each size
    assert of_heads + 1 <= counts[0] == counts[1] <= of_heads + 2, "and the target's one or two"


def test_a_second_turn(target, graphs):  # noqa: F811
    """On a static cache of the user's, and after another call has borrowed the heads' own."""
    heads = fit(CloverHeads.from_target(target, draft_depth=3), target)
    ids = torch.tensor([[1, 4, 2, 5, 3]])
    common = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 20}
    drafting = {"assistant_model": heads, "return_dict_in_generate": True, "compile_config": graphs.config}
    cache = StaticCache(config=target.config, max_cache_len=128)
    first = target.generate(ids, **common, **drafting, **{cache_name(): cache})
    target.generate(ids.flip(1), **common, **drafting, cache_implementation="static")
    longer = torch.cat((first.sequences, torch.tensor([[7, 2]])), dim=1)
    second = target.generate(longer, **common, **drafting, **{cache_name(): cache})
    assert torch.equal(second.sequences, target.generate(longer, **common))
    assert first.speculation.accepted_tokens > 0
    assert second.speculation.accepted_tokens > 0


@pytest.mark.automatic
def test_the_automatic_budget_compiles_one_draft(target, graphs):  # noqa: F811
    heads = fit(CloverHeads.from_target(target, draft_depth=3), target)
    ids = torch.tensor([[1, 4, 2, 5, 3]])
    common = {"input_ids": ids, "max_new_tokens": 60, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(**common)
    out = target.generate(**common, assistant_model=heads, return_dict_in_generate=True, **graphs.options)
    assert torch.equal(out.sequences, plain)
    assert sum(out.speculation.tree_sizes) > 0
    assert graphs.count == 3, "a tree of any size, a root alone, and a draft"
