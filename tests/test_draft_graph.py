"""The draft as one graph, with a stand-in for CUDA's capture: calls are recorded and replayed into the same memory.

What a graph cannot do the stand-in refuses (reading the host, copying from it), and what is at another address when it
is replayed it does not see, so that its trees would be others.
"""

import logging

import pytest
import torch
from fitting import fit
from test_compiled_drafting import DRAFTING, KINDS, VOCABULARY, assert_same_tree, settled
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache
from zoo import build, ragged_batch

from hf_clover import CloverHeads, speculations
from hf_clover.decoding import draft_graph, drafting, static_drafting, tree
from hf_clover.decoding.draft_graph import graphed_drafter
from hf_clover.decoding.drafting import CloverDrafter
from hf_clover.decoding.private_api import cache_name

REFUSED = {"_local_scalar_dense", "nonzero", "equal"}
# The first two make a tensor of the host's numbers, which is a copy that waits.
REFUSED_CALLS = {torch.tensor, torch.as_tensor, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy}


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        indices = args[1] if name.startswith("index") and isinstance(args[1], list | tuple) else ()
        if name in REFUSED or any(i is not None and i.dtype == torch.bool for i in indices):
            raise RuntimeError(f"`{name}` waits for the host, which no graph does")
        found = function(*args, **kwargs)
        self.calls.append((function, args, kwargs, found))
        return found

    def replay(self):
        for function, args, kwargs, found in self.calls:
            if function.is_view:
                continue
            again = function(*args, **kwargs)
            pairs = [(found, again)] if isinstance(found, torch.Tensor) else list(zip(found, again, strict=True))
            for old, new in pairs:
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    assert old.shape == new.shape
                    old.copy_(new)


class Refusing(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in REFUSED_CALLS:
            raise RuntimeError(f"`{function.__name__}` waits for the host, which no graph does")
        return function(*args, **(kwargs or {}))


class Captures:
    """In the place of CUDA's."""

    def __init__(self):
        self.made = self.replayed = 0

    def __call__(self, function, pool):
        recorder = Recorder()
        with Refusing(), recorder:
            outputs = function()
        self.made += 1

        def replay():
            self.replayed += 1
            recorder.replay()

        return replay, outputs


@pytest.fixture
def captures(monkeypatch):
    stand_in = Captures()
    monkeypatch.setitem(draft_graph.CAPTURES, "cpu", stand_in)
    monkeypatch.setattr(tree, "LOOKS_ON", ())  # as on a GPU
    return stand_in


@pytest.fixture(scope="module")
def target():
    return build("llama", vocab_size=VOCABULARY)


@pytest.mark.parametrize("kind", ["clover-x", *(pytest.param(k, marks=DRAFTING) for k in KINDS if k != "clover-x")])
@pytest.mark.parametrize("padded", [False, True])
def test_the_trees_of_the_slow_twin(target, kind, padded, captures, monkeypatch):
    """After a prompt, walks, a row that stood still, a rest that left more than may wait, and rows that left."""
    monkeypatch.setattr(drafting, "MOST_WAITING", 12)
    variant, fields = KINDS[kind]
    heads = CloverHeads.from_target(target, variant, **fields).bind(target)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    batch, length, size = 3, 11, heads.config.hidden_size
    mask = torch.arange(length) >= torch.tensor([0, 4, 2])[:, None] if padded else None
    slow = CloverDrafter(heads, mask)
    with graphed_drafter(CloverDrafter(heads, mask), batch, 128) as fast:
        at = [length] * batch
        prompt = settled(batch, length, size, [0] * batch, generator)
        for drafter in (slow, fast):
            drafter.extend(*prompt, [length] * batch)

        def walk(counts):
            new = settled(len(counts), max(counts), size, at, generator)
            for drafter in (slow, fast):
                drafter.extend(*new, counts)
            return [position + count for position, count in zip(at, counts, strict=True)]

        for walks in ([], [[1, 3, 2]], [[6, 1, 4]], [[0, 2, 1]], [[1, 1, 1]] * 15 + [[3, 2, 6]], [[2, 2, 2]]):
            for counts in walks:
                at = walk(counts)
            assert_same_tree(fast.draft(7), slow.draft(7))
        assert (captures.made, captures.replayed) == (1, 5)  # at the second use, and replayed from then on
        for drafter in (slow, fast):
            drafter.keep_rows([2, 0])
        at = [at[2], at[0]]
        for _ in range(3):
            at = walk([1, 2])
            assert_same_tree(fast.draft(7), slow.draft(7))
        assert (captures.made, captures.replayed) == (2, 7)
        if fast.cache is not None:
            assert fast.cache.lengths == slow.cache.lengths == at


def told(target, **options):
    with speculations() as records:
        tokens = target.generate(**options)
    return tokens, records[0]


@pytest.mark.parametrize("shape", [(7,), (5, 9, 3, 4)])
@pytest.mark.parametrize("do_sample", [False, True])
def test_in_generate(target, shape, do_sample, captures):
    """The tokens and the drafts of an eager call; the next call has the graphs already."""
    heads = fit(CloverHeads.from_target(target), target)
    inputs = ragged_batch(VOCABULARY, shape)
    common = {**inputs, "max_new_tokens": 30, "do_sample": do_sample, "assistant_model": heads}
    torch.manual_seed(4)
    eager, its = told(target, **common, disable_compile=True)
    assert captures.made == 0
    made = []
    for _ in range(2):
        torch.manual_seed(4)
        tokens, mine = told(target, **common)
        assert torch.equal(tokens, eager)
        assert (mine.accepted_tokens, mine.tree_sizes) == (its.accepted_tokens, its.tree_sizes)
        made.append(captures.made)
    assert mine.accepted_tokens > 0
    assert 0 < made[0] < captures.replayed
    if len(shape) == 1:
        assert made[1] == made[0]


@pytest.mark.parametrize("how", ["reads the host", "copies from the host", "calls the host"])
def test_where_a_capture_fails_drafts_stay_eager(target, how, captures, monkeypatch, caplog):
    heads = fit(CloverHeads.from_target(target), target)
    grow = static_drafting.grow

    def waiting(heads, state, *more):
        if how == "reads the host":
            bool(state.sum() > 0)
        elif how == "copies from the host":
            state = state + torch.tensor([0.0])
        else:
            state.tolist()
        return grow(heads, state, *more)

    monkeypatch.setattr(static_drafting, "grow", waiting)
    monkeypatch.setattr(logging.getLogger("hf_clover"), "propagate", True)
    common = {**ragged_batch(VOCABULARY, (7,)), "max_new_tokens": 30, "do_sample": False, "assistant_model": heads}
    eager, its = told(target, **common, disable_compile=True)
    with caplog.at_level("WARNING"):
        tokens, mine = told(target, **common)
    assert torch.equal(tokens, eager)
    assert mine.accepted_tokens == its.accepted_tokens > 0
    assert captures.replayed == 0
    assert [record.message[:31] for record in caplog.records] == ["Drafting goes on without a graph"[:31]]


@pytest.mark.parametrize("shape", [(7,), (5, 9, 3, 4)])
def test_a_conversation(target, shape, captures):
    """The drafter knows all turns, whether it had graphs or not."""
    heads = fit(CloverHeads.from_target(target), target)
    inputs = ragged_batch(VOCABULARY, shape)
    settings = {"max_new_tokens": 24, "do_sample": False, "assistant_model": heads}
    found = []
    for are_eager in ((True, True), (False, False), (False, True), (True, False)):
        cache, ids, mask = DynamicCache(config=target.config), inputs["input_ids"], inputs["attention_mask"]
        drafts = []
        for is_eager in are_eager:
            of_turn = {"attention_mask": mask, cache_name(): cache, "disable_compile": is_eager}
            out = target.generate(ids, **settings, **of_turn, return_dict_in_generate=True)
            drafts.append((out.speculation.accepted_by_depth, out.speculation.tree_sizes))
            ids = torch.cat((out.sequences, torch.tensor([[7, 2]] * len(shape))), dim=1)
            mask = torch.cat((mask, torch.ones(len(shape), ids.shape[1] - mask.shape[1], dtype=torch.long)), dim=1)
        found.append((ids.tolist(), drafts))
    assert captures.replayed > 0
    assert all(one == found[0] for one in found[1:])


def test_long_texts_stay_eager(target, captures, monkeypatch):
    heads = fit(CloverHeads.from_target(target), target)
    common = {**ragged_batch(VOCABULARY, (7,)), "max_new_tokens": 12, "do_sample": False, "assistant_model": heads}
    monkeypatch.setattr(draft_graph, "MOST_ENTRIES", 100)
    told(target, **common)
    assert captures.made == 0


@pytest.mark.parametrize("what", ["weights at another place", "another shape of trees"])
def test_what_is_written_down_in_a_graph_is_captured_anew(target, what, captures):
    heads = fit(CloverHeads.from_target(target), target)
    common = {**ragged_batch(VOCABULARY, (7,)), "max_new_tokens": 30, "do_sample": False, "assistant_model": heads}
    told(target, **common)
    made = captures.made
    for parameter in heads.parameters():
        if what == "weights at another place":
            parameter.data = parameter.data.flip(0)
    if what == "another shape of trees":
        heads.config.draft_top_k = 2
    _, mine = told(target, **common)
    _, its = told(target, **common, disable_compile=True)
    assert captures.made > made
    assert mine.accepted_by_depth == its.accepted_by_depth


def test_no_more_graphs_than_that(target, captures, monkeypatch):
    monkeypatch.setattr(draft_graph, "MOST", 2)
    heads = CloverHeads.from_target(target).bind(target)
    generator = torch.Generator().manual_seed(2)
    with graphed_drafter(CloverDrafter(heads), 1, 128) as drafter:
        drafter.extend(*settled(1, 5, heads.config.hidden_size, [0], generator), [5])
        for nodes in (3, 4, 5, 6) * 3:
            assert drafter.draft(nodes).size == nodes + 1
    assert captures.made == 2
