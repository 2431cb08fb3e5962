"""Draft trees: every grower against a plain-python reference, and what holds for any tree from any scores."""

import copy
import functools
import math
import random
from collections import Counter

import pytest
import torch
from helpers.trees import nodes_of
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopPLogitsWarper

from hf_clover.decoding.tree import Tree, chain_of, grow_chain, grow_global, grow_levels, root_only, with_chain

steady = settings(derandomize=True, deadline=None, max_examples=100)
seeds = st.integers(0, 2**32 - 1)
ODD = (0.0, 1.0, -1.0, 50.0, -1e30, -math.inf, math.inf, math.nan)
WIDE = 10_000
SHAPE = ("tokens", "parents", "depths", "valid")


class Table:
    """An `expand` over a table of logits keyed by row and path; it also checks how it is called.

    `odd`: scores are drawn from few values, so that ties, impossible tokens and broken numbers are common.
    """

    def __init__(self, seed, vocabulary, rows, odd=False):
        self.seed, self.vocabulary, self.rows, self.odd = seed, vocabulary, rows, odd
        self.root = torch.tensor([random.Random(f"{seed} {row}").randrange(vocabulary) for row in rows])
        self.paths = None
        self.logits = functools.cache(self.logits)

    def logits(self, row, path):
        rng = random.Random(f"{self.seed} {row} {path}")
        if not self.odd:
            return torch.tensor([rng.gauss(0, 1.5) for _ in range(self.vocabulary)])
        values = ODD if rng.random() < 0.3 else ODD[: rng.choice((1, 2, 4, 6))]
        return torch.tensor([rng.choice(values) for _ in range(self.vocabulary)])

    def log_probs(self, row, path):
        """What each next token adds to a path; nothing is possible after broken scores."""
        return torch.log_softmax(self.logits(row, path), dim=0).nan_to_num(nan=-math.inf, neginf=-math.inf)

    def __call__(self, level, chosen, tokens):
        if level == 0:
            assert chosen is None
            assert torch.equal(tokens, self.root[:, None])
            self.paths = [[()] for _ in self.rows]
        else:
            assert chosen.shape == tokens.shape == (len(self.rows), chosen.shape[1])
            self.paths = [
                [(*old[beam], token) for beam, token in zip(beams, new)]
                for old, beams, new in zip(self.paths, chosen.tolist(), tokens.tolist())
            ]
        assert all(len(path) == level for paths in self.paths for path in paths)
        return torch.stack(
            [torch.stack([self.logits(row, path) for path in paths]) for row, paths in zip(self.rows, self.paths)]
        )


def assert_is_tree(tree: Tree, table: Table, budget: int) -> None:
    """Everything that the module's contract says of a tree."""
    assert tree.size - 1 <= budget
    every = (tree.tokens, tree.parents, tree.depths, tree.log_probs, tree.valid)
    assert {values.shape for values in every} == {(len(table.rows), tree.size)}
    for row, name in enumerate(table.rows):
        tokens, parents, depths, joint, valid = (values[row].tolist() for values in every)
        assert (tokens[0], parents[0], depths[0], joint[0], valid[0]) == (table.root[row], 0, 0, 0.0, True)
        assert valid == sorted(valid, reverse=True), "the nodes that could not be filled come last"
        paths = [()]
        for node in range(1, tree.size):
            parent = parents[node]
            paths.append((*paths[parent], tokens[node]))
            if not valid[node]:
                assert (parent, depths[node], joint[node]) == (0, 0, -math.inf)
                continue
            assert parent < node
            assert valid[parent]
            assert depths[node] == depths[parent] + 1 <= tree.max_depth
            assert -math.inf < joint[node] <= joint[parent] <= 0.0
            step = float(table.log_probs(name, paths[parent])[tokens[node]])
            # Single precision: scores of any size are normalised by subtracting a number of their own size.
            rounding = 1e-5 + 2e-7 * abs(float(table.logits(name, paths[parent]).logsumexp(0)))
            assert joint[node] == pytest.approx(joint[parent] + step, abs=rounding)
        siblings = [(parents[node], tokens[node]) for node in range(1, tree.size) if valid[node]]
        assert len(set(siblings)) == len(siblings)


def best_of(paths: dict[tuple[int, ...], float], count: int) -> dict[tuple[int, ...], float]:
    return dict(sorted(paths.items(), key=lambda item: -item[1])[:count])


def same_row(tree: Tree, row: int, other: Tree, other_row: int) -> None:
    for name in SHAPE:
        assert torch.equal(getattr(tree, name)[row], getattr(other, name)[other_row]), name
    torch.testing.assert_close(tree.log_probs[row], other.log_probs[other_row], rtol=0, atol=1e-5)


@st.composite
def growers(draw):
    """A grower with settings of its own -> `grow(expand, root, nodes, depth, vocabulary=...)`."""
    kind = draw(st.sampled_from(("global", "levels", "chain")))
    if kind == "global":
        return functools.partial(grow_global, beam_width=draw(st.integers(1, 6)), top_k=draw(st.integers(1, 6)))
    if kind == "levels":
        top_p, min_p = draw(st.sampled_from((0.3, 0.8, 1.0))), draw(st.sampled_from((0.0, 0.25, 0.9)))
        return functools.partial(grow_levels, top_p=top_p, min_p=min_p)
    return grow_chain


GROWERS = {
    "global": functools.partial(grow_global, beam_width=3, top_k=3),
    "levels": functools.partial(grow_levels, top_p=0.99, min_p=0.0),
    "chain": grow_chain,
}


# ---------------------------------------------------------------------- the paper's example


def test_levels_give_the_tree_of_the_papers_example():
    """PAPERS.md: budget 4; a .5 and b .3 stay, then a1 (joint .40) and b1 (.09), and the budget is used up."""
    vocabulary = 40
    a, b, one, two = 0, 1, 7, 9

    def expand(level, chosen, tokens):
        probs = torch.zeros(1, tokens.shape[1], vocabulary)
        for beam, token in enumerate(tokens[0].tolist()):
            if level == 0:
                probs[0, beam, :5] = torch.tensor([0.5, 0.3, 0.1, 0.05, 0.05])
                continue
            first = {a: (0.8, 0.1), b: (0.3, 0.1)}.get(token, (0.5, 0.4)) if level == 1 else (0.9, 0.05)
            probs[0, beam] = (1 - sum(first)) / (vocabulary - 2)
            probs[0, beam, one], probs[0, beam, two] = first
        return probs.log()

    tree = grow_levels(expand, torch.tensor([33]), nodes=4, depth=5, top_p=0.8, min_p=0.25)
    assert tree.tokens.tolist() == [[33, a, one, b, one]]
    assert tree.parents.tolist() == [[0, 0, 1, 0, 3]]
    assert tree.depths.tolist() == [[0, 1, 2, 1, 2]]
    assert tree.valid.all()
    expected = torch.tensor([[1.0, 0.5, 0.4, 0.3, 0.09]])
    torch.testing.assert_close(tree.log_probs.exp(), expected, rtol=0, atol=1e-6)


# ---------------------------------------------------------------------- each grower against a reference


@settings(steady, max_examples=200)
@given(
    seeds,
    st.integers(2, 6),
    st.integers(1, 4),
    st.integers(1, 60),
    st.integers(1, 2),
    st.sampled_from((1, 2, 3, 4, WIDE)),
    st.sampled_from((1, 2, 3, 4, WIDE)),
)
def test_a_global_tree_holds_the_best_of_a_beam_search(seed, vocabulary, depth, nodes, batch, beam_width, top_k):
    """In plain python: k best children of the W best nodes of a level, then the best of all. Wide is all paths."""
    table = Table(seed, vocabulary, range(batch))
    tree = grow_global(table, table.root, nodes, depth, beam_width, top_k)
    assert_is_tree(tree, table, nodes)
    for row in range(batch):
        beam, candidates = {(): 0.0}, {}
        for _ in range(depth):
            level = {}
            for path, joint in beam.items():
                values = table.log_probs(row, path).tolist()
                for token in sorted(range(vocabulary), key=lambda t: -values[t])[:top_k]:
                    level[(*path, token)] = joint + values[token]
            candidates |= level
            beam = best_of(level, beam_width)
        assert nodes_of(tree, row) == pytest.approx(best_of(candidates, nodes), abs=1e-5)


def test_levels_follow_the_papers_three_rules():
    """PAPERS.md's three rules in plain python, with transformers' own warpers at each node."""
    kept_sizes, unspent = Counter(), 0

    @steady
    @given(
        seeds,
        st.integers(2, 8),
        st.integers(1, 4),
        st.one_of(st.integers(1, 12), st.integers(13, 100)),
        st.sampled_from((0.2, 0.5, 0.8, 0.95, 1.0)),
        st.sampled_from((0.0, 0.1, 0.25, 0.6)),
        st.integers(1, 3),
    )
    def check(seed, vocabulary, depth, nodes, top_p, min_p, batch):
        nonlocal unspent
        table = Table(seed, vocabulary, range(batch))
        tree = grow_levels(table, table.root, nodes, depth, top_p, min_p)
        assert_is_tree(tree, table, nodes)
        for row in range(batch):
            kept, budget, level = {}, nodes, {(): 0.0}
            for _ in range(depth):
                candidates = {}
                for path, joint in level.items():
                    logits = table.logits(row, path)[None]
                    warped = TopPLogitsWarper(top_p)(None, logits) if top_p < 1.0 else logits
                    warped = MinPLogitsWarper(min_p)(None, warped)[0]
                    for token in range(vocabulary):
                        if warped[token] > -math.inf:
                            candidates[(*path, token)] = joint + float(table.log_probs(row, path)[token])
                level = best_of(candidates, budget)
                kept |= level
                budget -= len(level)
                if budget == 0:
                    break
            assert budget >= 0
            assert nodes_of(tree, row) == pytest.approx(kept, abs=1e-5)
            kept_sizes[len(kept)] += 1
            unspent += budget > 0

    check()
    assert unspent > 20, "trees that the rules end before the budget does"
    assert sum(count for size, count in kept_sizes.items() if size > 4) > 20, kept_sizes


def test_levels_stop_when_the_budget_is_used_up():
    """A first level that takes the whole budget leaves nothing for a second, however probable it is."""

    def expand(level, chosen, tokens):
        logits = torch.linspace(0, 1, 8).expand(1, tokens.shape[1], 8).clone()
        if level > 0:
            logits[..., 3] = 20.0
        return logits

    flat = grow_levels(expand, torch.tensor([0]), nodes=8, depth=4, top_p=1.0, min_p=0.25)
    assert flat.depths.tolist() == [[0] + [1] * 8]
    assert sorted(flat.tokens[0, 1:].tolist()) == list(range(8))
    more = grow_levels(expand, torch.tensor([0]), nodes=10, depth=4, top_p=1.0, min_p=0.25)
    assert sorted(more.depths[0].tolist()) == [0] + [1] * 8 + [2] * 2
    by_joint = grow_global(expand, torch.tensor([0]), nodes=8, depth=4, beam_width=8, top_k=8)
    assert int(by_joint.depths.max()) == 4, "the same scores give another tree where the rule is another"


@steady
@given(seeds, st.integers(2, 8), st.integers(1, 6), st.integers(1, 8), st.integers(1, 3))
def test_a_chain_is_the_greedy_path(seed, vocabulary, depth, nodes, batch):
    table = Table(seed, vocabulary, range(batch))
    tree = grow_chain(table, table.root, nodes, depth)
    assert_is_tree(tree, table, nodes)
    assert tree.size == min(depth, nodes) + 1
    order = list(range(tree.size))
    for row in range(batch):
        path = ()
        while len(path) < tree.size - 1:
            path = (*path, int(table.logits(row, path).argmax()))
        assert tuple(tree.tokens[row, 1:].tolist()) == path
        assert tree.depths[row].tolist() == order
        assert tree.parents[row].tolist() == [0, *order[:-1]]


# ---------------------------------------------------------------------- what holds for any scores


def test_any_scores_give_a_valid_tree():
    """Ties, impossible tokens, infinities and NaN: still a tree, of nodes that are possible."""
    found = Counter()

    @settings(steady, max_examples=400)
    @given(growers(), seeds, st.integers(2, 5), st.integers(1, 4), st.integers(1, 30), st.integers(1, 2))
    def check(grow, seed, vocabulary, depth, nodes, batch):
        table = Table(seed, vocabulary, range(batch), odd=True)
        tree = grow(table, table.root, nodes, depth)
        assert_is_tree(tree, table, nodes)
        for row in range(batch):
            values = tree.log_probs[row, tree.valid[row]].tolist()
            found["ties"] += len(set(values)) < len(values)
            found["unfilled"] += not tree.valid[row].all()
            found["empty"] += len(values) == 1
            found["deep"] += int(tree.depths[row].max()) > 2
            found["certain"] += 0.0 in values[1:]  # a child exactly as probable as its parent

    check()
    assert min(found[kind] for kind in ("ties", "unfilled", "empty", "deep", "certain")) > 10, found


def test_ties_break_toward_the_parent():
    """A chain of certain tokens: parent and child are equally probable at every level."""

    def expand(level, chosen, tokens):
        return torch.full((1, tokens.shape[1], 4), -math.inf).index_fill_(2, torch.tensor([2]), 0.0)

    for nodes in range(1, 6):
        tree = grow_global(expand, torch.tensor([0]), nodes, depth=8, beam_width=4, top_k=4)
        chain = tree.valid[0].sum()
        assert chain == nodes + 1
        assert tree.parents[0].tolist() == [0, *range(nodes)]
        assert tree.tokens[0].tolist() == [0] + [2] * nodes


@pytest.mark.parametrize("grow", GROWERS.values(), ids=GROWERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_a_row_with_nothing_but_broken_scores_has_its_root_alone(grow, dtype, value):
    """The other row is filled."""

    def expand(level, chosen, tokens):
        logits = torch.randn(2, tokens.shape[1], 6).to(dtype)
        logits[1] = value
        return logits

    tree = grow(expand, torch.tensor([0, 1]), 6, 3)
    assert int(tree.valid[0].sum()) > 3
    assert not tree.valid[1, 1:].any()
    assert tree.valid[1, 0]
    assert not tree.log_probs[0].isnan().any()


@pytest.mark.parametrize("grow", GROWERS.values(), ids=GROWERS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_whose_deeper_heads_give_no_numbers_has_no_valid_node(grow, value):
    """Such heads are not trusted at the first level either; the walk notices them and turns drafting off."""

    def expand(level, chosen, tokens):
        logits = torch.randn(2, tokens.shape[1], 9, generator=torch.Generator().manual_seed(level))
        if level == 2:
            logits[1, 0, 4] = value
        return logits

    tree = grow(expand, torch.zeros(2, dtype=torch.long), 12, 4)
    assert tree.valid[0, 1:].any()
    assert not tree.valid[1, 1:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("peak", [0.0, 4.0, 17.3])
def test_joint_probabilities_of_half_precision_scores_are_in_float32(dtype, peak):
    """Joint probabilities are in single precision, and a nearly certain child is not above its parent."""
    logits = torch.randn(50) * 0.5
    logits[3] += peak
    logits = logits.to(dtype)

    def expand(level, chosen, tokens):
        return logits.expand(1, tokens.shape[1], 50)

    for nodes in (1, 2, 5, 30):
        tree = grow_global(expand, torch.tensor([0]), nodes, depth=4, beam_width=8, top_k=8)
        assert tree.log_probs.dtype == torch.float32
        assert (tree.log_probs <= tree.log_probs.gather(1, tree.parents)).all()
        assert (tree.parents[0, 1:] < torch.arange(1, tree.size)).all()
        first = tree.depths[0] == 1
        expected = logits.float().log_softmax(0)[tree.tokens[0, first]]
        torch.testing.assert_close(tree.log_probs[0, first], expected, rtol=0, atol=1e-5)


@steady
@given(growers(), seeds, st.integers(2, 5), st.integers(1, 3), st.integers(1, 20), st.integers(2, 4))
def test_the_tree_of_a_row_does_not_depend_on_other_rows(grow, seed, vocabulary, depth, nodes, batch):
    """A row's tree is the same alone, in a batch, and at another place of the batch."""
    table = Table(seed, vocabulary, list(range(batch)))
    together = grow(table, table.root, nodes, depth)
    backwards = Table(seed, vocabulary, list(reversed(range(batch))))
    reversed_tree = grow(backwards, backwards.root, nodes, depth)
    for row in range(batch):
        table = Table(seed, vocabulary, [row])
        alone = grow(table, table.root, nodes, depth)
        same_row(together, row, alone, 0)
        same_row(together, row, reversed_tree, batch - 1 - row)
        # On a CPU a batch is looked at as deep as its deepest row needs: `max_depth` is a bound for all rows.
        assert alone.depths.max() <= alone.max_depth <= together.max_depth == reversed_tree.max_depth


@steady
@given(growers(), seeds, st.integers(2, 5), st.integers(1, 3), st.integers(1, 20))
def test_a_draft_vocabulary_only_renames(grow, seed, size, depth, nodes):
    """Tokens of the tree, and those shown to `expand`, are the vocabulary's; nothing else changes."""
    names = random.Random(seed).sample(range(1000), size)
    plain = Table(seed, size, [0, 1])

    def expand(level, chosen, tokens):  # the table speaks in places, the caller in names
        assert level == 0 or set(tokens.flatten().tolist()) <= set(names)
        return plain(level, chosen, tokens if level == 0 else tokens.clone().apply_(names.index))

    without = grow(plain, plain.root, nodes, depth)
    renamed = grow(expand, plain.root, nodes, depth, vocabulary=torch.tensor(names))
    assert without.size == renamed.size
    for row in (0, 1):
        expected = {tuple(names[token] for token in path): value for path, value in nodes_of(without, row).items()}
        assert nodes_of(renamed, row) == pytest.approx(expected, abs=1e-6)
    for name in SHAPE[1:]:
        assert torch.equal(getattr(without, name), getattr(renamed, name))


# ---------------------------------------------------------------------- small things


@settings(steady, max_examples=200)
@given(growers(), seeds, st.integers(2, 4), st.integers(1, 5), st.integers(1, 25), st.booleans())
def test_ancestors_are_all_nodes_up_to_the_root(grow, seed, vocabulary, depth, nodes, odd):
    table = Table(seed, vocabulary, [0, 1, 2], odd=odd)
    tree = grow(table, table.root, nodes, depth)
    expected = torch.zeros(3, tree.size, tree.size, dtype=torch.bool)
    for row in range(3):
        for node in range(tree.size):
            above = node
            expected[row, node, node] = True
            while above != 0:
                above = int(tree.parents[row, above])
                expected[row, node, above] = True
    assert torch.equal(tree.ancestors(), expected)


def test_chain_of_and_root_only_make_chains_of_their_tokens():
    tokens = torch.tensor([[5, 3, 3, 1], [2, 0, 7, 7]])
    tree = chain_of(tokens)
    assert torch.equal(tree.tokens, tokens)
    assert tree.parents.tolist() == [[0, 0, 1, 2]] * 2
    assert tree.depths.tolist() == [[0, 1, 2, 3]] * 2
    assert (tree.size, tree.max_depth) == (4, 3)
    assert tree.valid.all()
    assert torch.equal(tree.ancestors(), torch.ones(2, 4, 4, dtype=torch.bool).tril())
    root = root_only(tokens[:, 0])
    assert (root.size, root.max_depth, root.tokens.tolist()) == (1, 0, [[5], [2]])
    assert root.parents.tolist() == root.depths.tolist() == [[0], [0]]
    assert root.ancestors().tolist() == [[[True]]] * 2
    for name, value in vars(chain_of(tokens[:, :1])).items():
        torch.testing.assert_close(getattr(root, name), value, rtol=0, atol=0)


@steady
@given(growers(), seeds, st.integers(1, 10), st.lists(st.booleans(), min_size=3, max_size=3))
def test_with_chain_replaces_the_chosen_rows_by_chains(grow, seed, nodes, chosen):
    """The chosen rows are a chain of the padding token under their own root; the others are as they were."""
    table = Table(seed, 4, [0, 1, 2], odd=True)
    tree = grow(table, table.root, nodes, 3)
    before = copy.deepcopy(tree)
    mixed = with_chain(tree, torch.tensor(chosen), token=9)
    paths = chain_of(torch.cat((table.root[:, None], torch.full((3, tree.size - 1), 9)), dim=1))
    for row, is_chain in enumerate(chosen):
        expected = paths if is_chain else before
        for name in SHAPE if is_chain else (*SHAPE, "log_probs"):
            assert torch.equal(getattr(mixed, name)[row], getattr(expected, name)[row]), name
        assert torch.equal(mixed.ancestors()[row], expected.ancestors()[row])
        same_row(tree, row, before, row)


def test_a_tree_moves_to_another_device_with_its_tensors():
    tree = chain_of(torch.tensor([[1, 2]]))
    assert tree.to(torch.device("cpu")) is tree
    moved = tree.to(torch.device("meta"))
    assert {moved.tokens.device.type, moved.valid.device.type, moved.log_probs.device.type} == {"meta"}
    assert (moved.max_depth, moved.size) == (1, 2)
