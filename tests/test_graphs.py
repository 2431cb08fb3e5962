"""Steps as graphs, by the stand-in of capturing.py: the tokens, drafts and numbers of steps that run eagerly."""

import logging
import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.capturing import captures  # noqa: F401  (a fixture)
from helpers.fitting import fit
from helpers.oracle import planted
from helpers.trees import nodes_of, random_tree, running, walk_of
from helpers.zoo import ZOO, build, ragged_batch
from transformers import DynamicCache, StaticCache

from hf_clover import CloverHeads, Eagle3Heads, speculations
from hf_clover.decoding import graphs
from hf_clover.decoding.cache import by_row, static
from hf_clover.decoding.draft import drafter as drafter_module
from hf_clover.decoding.draft import in_graphs
from hf_clover.decoding.draft.in_graphs import IN_GRAPHS
from hf_clover.decoding.target import graph_rules
from hf_clover.decoding.target.memory import memory_of
from hf_clover.targets.private_api import cache_name

pytestmark = pytest.mark.usefixtures("captures")
VOCABULARY, NEW = 16, 40
ONE_ROW = ragged_batch(VOCABULARY, (7,))
SHORT = ("clover-x", "eagle-3")  # kinds of heads
DECODING = pytest.mark.long("hf_clover/decoding", "hf_clover/network")  # one kind of each is in the short set
TREES = [name for name, case in ZOO.items() if case.route == "tree" and case.available]
KINDS = {
    "clover-x": {},
    "clover-x, deeper than its heads": {"num_heads": 2, "draft_depth": 6},
    "clover-2": {"variant": "clover-2"},
    "clover": {"variant": "clover"},
    "medusa": {"variant": "medusa"},
    "levels": {"variant": "clover-2", "draft_tree": "levels"},
    "draft vocabulary": {"variant": "clover-2", "draft_vocab_size": 9},
    "eagle-3": {},
    "eagle-3 in levels": {"draft_tree": "levels", "num_hidden_layers": 2, "draft_vocab_size": 9},
}


@pytest.fixture
def target():
    return build("llama", vocab_size=VOCABULARY)


@pytest.fixture
def heads(target):
    return CloverHeads.from_target(target)


@pytest.fixture
def fitted(heads, target):
    return fit(heads, target)


@pytest.fixture(params=[(7,), (5, 9, 3, 4)], ids=["one row", "four rows"])
def inputs(request):
    return ragged_batch(VOCABULARY, request.param)


@pytest.fixture
def said(caplog, monkeypatch):
    """What was warned of until it is called."""
    monkeypatch.setattr(logging.getLogger("hf_clover"), "propagate", True)
    graph_rules.logger.warning_once.cache_clear()
    caplog.set_level("WARNING")
    return lambda: [record.message for record in caplog.records]


def told(target, seed=4, **options):
    torch.manual_seed(seed)
    with speculations() as records:
        tokens = target.generate(**options)
    return tokens, records[-1] if records else None


def same_in_graphs(target, heads, inputs, more_than=0, **options):
    """Plain generate's tokens. In graphs and eagerly they are the same, and as many drafts are accepted; the plain
    tokens are planted in them."""
    common = {**inputs, "max_new_tokens": NEW, **options}
    plain = target.generate(**common, disable_compile=True)
    records = []
    for is_eager in (False, True):
        with planted(heads, plain, inputs["input_ids"].shape[1], 1):
            drafting = {"assistant_model": heads, "num_assistant_tokens": 9, "disable_compile": is_eager}
            tokens, record = told(target, **common, **drafting)
        assert torch.equal(tokens, plain)
        records.append(record)
    assert records[0].accepted_by_depth == records[1].accepted_by_depth
    assert records[0].accepted_tokens > more_than
    return plain


# ---------------------------------------------------------------------- the target


@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=DECODING) for n in TREES if n != "llama")])
def test_logits_and_states_of_replayed_graphs_equal_eager_ones(name, captures):  # noqa: F811
    """A graph is replayed with other trees, other lengths and other rows than it was captured with."""
    target, inputs = build(name, vocab_size=24), ragged_batch(24, (5, 9))
    with running(target, inputs, disable_compile=True) as eager, running(target, inputs) as graphed:
        for seed in range(6):
            tree = random_tree(2, 8, seed)
            ours, its = graphed.verify(tree), eager.verify(tree)
            assert float((ours - its).abs().max() / its.std()) < 1e-3
            assert float((graphed.hidden - eager.hidden).abs().max() / eager.hidden.std()) < 1e-3
            for run in (graphed, eager):
                run.commit([walk_of(tree, row, 8) for row in range(2)])
            assert torch.equal(graphed.next_position, eager.next_position)
    assert (captures.made, captures.replayed) == (1, 5)


def test_tree_sizes_share_a_few_graphs(captures):  # noqa: F811
    target, inputs = build("llama", vocab_size=24), ragged_batch(24, (5, 9, 3))
    with running(target, inputs, disable_compile=True) as eager, running(target, inputs) as graphed:
        for seed, size in enumerate((8, 1, 3, 5, 1, 16, 12, 2, 1, 64, 40, 70)):  # 70 runs eagerly
            tree = random_tree(3, size, seed)
            torch.testing.assert_close(graphed.verify(tree), eager.verify(tree), rtol=1e-4, atol=1e-4)
            for run in (graphed, eager):
                run.commit([walk_of(tree, row, size) for row in range(3)])
    assert captures.made == 4, "of 1, 8, 16 and 64 nodes"


@pytest.mark.parametrize("do_sample", [False, True])
def test_tokens_and_drafts_in_graphs_equal_those_of_an_eager_call(target, fitted, inputs, do_sample, captures):  # noqa: F811
    """With `disable_compile` nothing is captured. Later calls have the graphs already."""
    common = {**inputs, "max_new_tokens": NEW, "do_sample": do_sample}
    plain, _ = told(target, **common)
    eager, its = told(target, **common, assistant_model=fitted, disable_compile=True)
    assert captures.made == 0
    assert memory_of(target).idle_cache is None
    made = []
    for _ in range(3):
        tokens, mine = told(target, **common, assistant_model=fitted)
        assert tokens.tolist() == eager.tolist() == plain.tolist()
        assert (mine.accepted_tokens, mine.tree_sizes) == (its.accepted_tokens, its.tree_sizes)
        made.append(captures.made)
    assert mine.accepted_tokens > 0
    assert 0 < made[1] < captures.replayed
    assert made[2] == made[1]


def test_eagle3_heads_in_graphs_draft_as_they_do_eagerly(target, inputs, captures):  # noqa: F811
    heads, common = Eagle3Heads.from_target(target), {**inputs, "max_new_tokens": NEW}
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    plain, drafting = target.generate(**common), {"assistant_model": heads, "num_assistant_tokens": 12}
    eager, its = told(target, **common, **drafting, disable_compile=True)
    assert captures.made == 0
    tokens, mine = told(target, **common, **drafting)
    assert tokens.tolist() == eager.tolist() == plain.tolist()
    assert mine.accepted_by_depth == its.accepted_by_depth
    assert mine.accepted_tokens > 0
    assert memory_of(heads).idle_cache.graphs.made, "of drafts"


def test_a_text_that_outgrows_its_graphs_keeps_tokens_and_drafts(target, heads, inputs, captures, monkeypatch):  # noqa: F811
    monkeypatch.setattr(static, "LEAST_COLUMNS", 16)
    monkeypatch.setattr(static, "ROOM", 8)
    same_in_graphs(target, heads, inputs, more_than=50, max_new_tokens=120)
    assert captures.made >= 4, "of 64, 128 and 256 columns, and of drafts"


def test_tokens_and_drafts_in_graphs_stay_the_same_as_rows_leave(target, heads, monkeypatch):
    """Four rows, then two, then one; the last ones stand in the first places."""
    inputs = ragged_batch(VOCABULARY, (5, 9, 3, 4))
    ending = int(target.generate(**inputs, max_new_tokens=13)[0, -1])
    seen, look_at = [], static.StaticTreeCache.look_at
    monkeypatch.setattr(static.StaticTreeCache, "look_at", lambda *a: seen.append(look_at(*a)) or seen[-1])
    same_in_graphs(target, heads, inputs, max_new_tokens=60, eos_token_id=ending, pad_token_id=0)
    rows = {rows for rows, _ in seen}
    assert 4 in rows
    assert min(rows) < 4


OF_CACHES = pytest.mark.long("hf_clover/decoding/cache", "hf_clover/decoding/draft", "hf_clover/decoding/target")


@pytest.mark.parametrize("kind", ["dynamic", pytest.param("static", marks=OF_CACHES)])
def test_turns_in_graphs_and_eager_turns_share_one_cache(target, fitted, inputs, kind, captures):  # noqa: F811
    """Turns in graphs and turns without, on one cache of the user's, with another text between them. Plain generate
    goes on with it. Turns that are all in graphs have the drafts of turns that are all without."""
    found, other = [], torch.arange(1, 13).expand(len(inputs["input_ids"]), -1)
    for are_eager in ((True,) * 3, (False,) * 3, (False, True, False)):
        cache, ids, mask = DynamicCache(config=target.config), inputs["input_ids"], inputs["attention_mask"]
        drafts = []
        if kind == "static":
            cache = StaticCache(config=target.config, max_cache_len=200)
        for is_eager in are_eager:
            options = {"attention_mask": mask, cache_name(): cache, "disable_compile": is_eager, "max_new_tokens": 24}
            before = captures.replayed
            out = target.generate(ids, assistant_model=fitted, return_dict_in_generate=True, **options)
            assert (captures.replayed > before) == (not is_eager)
            assert out[cache_name()] is cache
            assert cache.get_seq_length() == out.sequences.shape[1] - 1
            assert out.speculation.accepted_tokens > 0
            drafts.append((out.speculation.accepted_by_depth, out.speculation.tree_sizes))
            target.generate(other, assistant_model=fitted, max_new_tokens=8)
            ids = torch.cat((out.sequences, torch.tensor([[7, 2]] * len(ids))), dim=1)
            mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
        plain = target.generate(ids, attention_mask=mask, max_new_tokens=8, disable_compile=True)
        again = {"attention_mask": mask, cache_name(): cache, "disable_compile": True}
        assert torch.equal(target.generate(ids, max_new_tokens=8, **again), plain)
        found.append((plain.tolist(), drafts))
    assert found[0] == found[1]
    assert found[0][0] == found[2][0]


def test_two_threads_with_one_target_get_plain_tokens(target):
    inputs = ragged_batch(VOCABULARY, (5, 9, 3))
    heads = [CloverHeads.from_target(target) for _ in range(2)]
    prompts = [inputs, {k: v.flip(0) for k, v in inputs.items()}]
    truth = [target.generate(**prompt, max_new_tokens=NEW) for prompt in prompts]
    target.generate(**inputs, max_new_tokens=2, assistant_model=heads[0])  # the trial of a new target
    meet = threading.Barrier(2)

    def speak(who):
        meet.wait()
        drafting = {"assistant_model": heads[who], "num_assistant_tokens": 5}
        return [target.generate(**prompts[who], max_new_tokens=NEW, **drafting) for _ in range(3)]

    with ThreadPoolExecutor(2) as threads:
        for texts, plain in zip(threads.map(speak, range(2)), truth, strict=True):
            assert all(torch.equal(text, plain) for text in texts)


def test_calls_inside_and_outside_inference_mode_share_graphs(target, fitted, captures):  # noqa: F811
    """What a call leaves to the next can be written to in both modes."""
    inputs = ragged_batch(VOCABULARY, (5, 9))
    plain = target.generate(**inputs, max_new_tokens=NEW)
    for is_inference in (True, False, True, False):
        with torch.inference_mode(is_inference):
            tokens, mine = told(target, **inputs, max_new_tokens=NEW, assistant_model=fitted, num_assistant_tokens=7)
        assert torch.equal(tokens, plain)
        assert mine.accepted_tokens > 0
    assert captures.replayed > captures.made


def test_switching_adapters_between_calls_gives_plain_tokens(captures):  # noqa: F811
    from peft import LoraConfig, get_peft_model

    target = build("llama", vocab_size=VOCABULARY)
    wrapped = get_peft_model(target, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    wrapped.add_adapter("other", LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    heads, texts = CloverHeads.from_target(wrapped), set()
    for name in ("default", "other", "default"):
        wrapped.set_adapter(name)
        texts.add(str(same_in_graphs(wrapped.eval(), heads, ONE_ROW)))
    for layer in wrapped.modules():
        if isinstance(getattr(layer, "scaling", None), dict):
            layer.scaling["default"] *= 3
    texts.add(str(same_in_graphs(wrapped, heads, ONE_ROW)))
    assert len(texts) == 3, "adapters and their scale must matter"
    assert captures.replayed > 0


def test_weights_that_move_in_memory_are_captured_anew(target, heads, captures):  # noqa: F811
    same_in_graphs(target, heads, ONE_ROW)
    made = captures.made
    for parameter in (*target.parameters(), *heads.parameters()):
        parameter.data = parameter.data.flip(0)
    same_in_graphs(target, heads, ONE_ROW)
    assert captures.made > made


# ---------------------------------------------------------------------- where nothing is captured


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda target: target.train(), r"it is in training mode; call `.eval\(\)` on it"),
        (lambda target: setattr(target, "is_loaded_in_8bit", True), "its 8-bit layers look for outliers on the host"),
        (
            lambda target: setattr(target.model.layers[1], "_hf_hook", object()),
            "its weights are on several devices, or are moved for every forward",
        ),
        (lambda target: target.compile(backend="eager"), "its forward is compiled"),
    ],
    ids=["training mode", "8 bit", "several devices", "compiled"],
)
def test_targets_that_no_graph_may_hold_run_eagerly(target, heads, change, match, said):
    change(target)
    with torch.compiler.set_stance("force_eager"):  # compiling takes half a minute
        same_in_graphs(target, heads, ONE_ROW)
    assert any(re.search(match, message) for message in said())
    assert sum("without CUDA graphs" in message for message in said()) == 1
    assert not memory_of(target).idle_cache


def test_the_hooks_of_a_target_run_at_every_forward(target, heads, said):
    calls = []
    target.model.layers[1].register_forward_hook(lambda *args: calls.append(1))
    same_in_graphs(target, heads, ONE_ROW)
    assert any("it has hooks, which a graph would leave out" in message for message in said())
    assert sum("without CUDA graphs" in message for message in said()) == 1
    assert not memory_of(target).idle_cache
    assert len(calls) > NEW


def test_experts_that_run_one_by_one_keep_the_target_eager(captures, said):  # noqa: F811
    target = build("mixtral", vocab_size=VOCABULARY)
    heads = CloverHeads.from_target(target)
    target.set_experts_implementation("eager")
    same_in_graphs(target, heads, ONE_ROW)
    assert sum("its experts run one by one" in message for message in said()) == 1
    target.set_experts_implementation("grouped_mm")
    assert captures.made == 0
    same_in_graphs(target, heads, ONE_ROW)
    assert captures.made > 0


@pytest.mark.parametrize(
    "wait",
    [lambda state: bool(state.sum() > 0), lambda state: state + torch.tensor([0.0]), lambda state: state.tolist()],
    ids=["reads the host", "copies from the host", "calls the host"],
)
def test_drafts_run_eagerly_after_their_capture_has_failed(target, fitted, wait, monkeypatch, said):
    grow = in_graphs.grow

    def waiting(heads, state, *more):
        wait(state)
        return grow(heads, state, *more)

    monkeypatch.setattr(in_graphs, "grow", waiting)
    common = {**ONE_ROW, "max_new_tokens": NEW, "do_sample": False, "assistant_model": fitted}
    eager, its = told(target, **common, disable_compile=True)
    for _ in range(2):
        tokens, mine = told(target, **common)
        assert torch.equal(tokens, eager)
        assert mine.accepted_tokens == its.accepted_tokens > 0
    assert sum(message.startswith("Drafts run eagerly from here on") for message in said()) == 1
    assert "Forwards over trees run eagerly" not in str(said())
    assert "`disable_compile=True` leaves graphs out from the beginning" in said()[0]


@pytest.mark.parametrize("fails", [False, True])
def test_a_target_whose_replays_are_wrong_runs_eagerly(target, heads, fails, monkeypatch, said):
    """A graph may hold a number that has to change: the trial notices, as it replays with other tokens at other
    places. Or the target's forward cannot run over such a cache."""
    rotary = target.model.rotary_emb
    forward = type(rotary).forward

    def remembering(self, x, position_ids):
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:  # while it is captured
            position_ids = position_ids.clone().fill_(3)
        if fails and position_ids.shape[-1] == 8:  # filled up
            raise TypeError("takes no such positions")
        return forward(self, x, position_ids)

    monkeypatch.setattr(type(rotary), "forward", remembering)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same_in_graphs(target, heads, ONE_ROW)
    reason = "a trial of them failed (TypeError: takes no such" if fails else "their replays give other logits"
    assert sum(reason in message for message in said()) == 1


def test_the_least_recently_used_graph_makes_room_for_a_new_one(monkeypatch, captures):  # noqa: F811
    """Beyond the limit, the graph that was not used for longest goes."""
    monkeypatch.setattr(graphs, "MOST", 2)
    several = graphs.Graphs(torch.device("cpu"), "Sums")
    value = torch.arange(3)
    for key in (1, 2, 1, 2, 1, 3, 3, 1):
        assert several.run(key, lambda x, key=key: (x + key,), [value])[0].tolist() == [key, key + 1, key + 2]
    assert list(several.made) == [3, 1]
    assert captures.made == 3


# ---------------------------------------------------------------------- without memory


def out_of_memory(*args):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_a_capture_that_finds_no_memory_is_tried_again_without_the_others(captures, said):  # noqa: F811
    several, value, failing = graphs.Graphs(torch.device("cpu"), "Sums"), torch.arange(3), []

    def capture(function, pool):
        if failing:
            failing.pop()
            out_of_memory()
        return captures(function, pool)

    def run(key, failures=0):
        failing[:] = [True] * failures
        assert several.run(key, lambda x: (x + key,), [value])[0].tolist() == [key, key + 1, key + 2]

    several.capture = capture
    for key, failures in ((1, 0), (1, 0), (2, 0), (2, 1), (2, 0)):
        run(key, failures)
    assert list(several.made) == [2]
    assert several.has_replayed
    assert said() == []
    for failures in (0, 2, 0):
        run(3, failures)
    assert (several.made, several.is_short, several.has_replayed) == ({}, True, False)
    assert len(said()) == 1
    assert said()[0].startswith("Sums run eagerly from here on: there is no memory for a graph.")


@pytest.mark.parametrize(
    "where", ["captures", "the first buffer", "a later layer", "the text grows", "its later layer"]
)
def test_a_call_without_memory_goes_on_eagerly(target, heads, inputs, where, captures, said, monkeypatch):  # noqa: F811
    """With the same tokens and drafts, one warning for the target and one for the heads; the next call has graphs."""
    monkeypatch.setattr(static, "LEAST_COLUMNS", 16)
    monkeypatch.setattr(static, "ROOM", 8)
    monkeypatch.setattr(by_row, "BLOCK", 24)  # of which no multiple is a power of two, as what doubles is
    told(target, **inputs, max_new_tokens=4, assistant_model=heads)  # the trial of a new target
    memory_of(target).idle_cache = memory_of(heads).idle_cache = None
    resized, layers = by_row.TreeLayer._resized, 0
    beyond = 128 if where in ("the text grows", "its later layer") else 0

    def short(old, capacity):
        nonlocal layers
        if capacity > beyond and capacity.bit_count() == 1:
            layers += 1
            if layers > ("later" in where):
                out_of_memory()
        return resized(old, capacity)

    with monkeypatch.context() as patch:
        if where == "captures":
            patch.setitem(graphs.CAPTURES, "cpu", out_of_memory)
        else:
            patch.setattr(by_row.TreeLayer, "_resized", staticmethod(short))
        before = captures.made
        same_in_graphs(target, heads, inputs, more_than=50, max_new_tokens=120)
        assert (captures.made > before) == (beyond > 0)
    assert all("eagerly from here on: there is no memory for" in message for message in said())
    assert 1 <= sum(message.startswith("Forwards over trees") for message in said()) <= len(said()) <= 2
    assert memory_of(target).idle_cache is None, "its memory goes to whoever needs it"
    before = captures.replayed
    same_in_graphs(target, heads, inputs)
    assert captures.replayed > before


# ---------------------------------------------------------------------- drafts


def settled(batch, width, size, start, generator):
    """Hidden states, tokens and positions as after a walk, a different number of them for each row. Few different
    tokens: pairs of them come again, for heads that recall."""
    hidden = torch.randn(batch, width, size, generator=generator)
    tokens = torch.randint(4, (batch, width), generator=generator)
    positions = torch.tensor(start)[:, None] + torch.arange(width)
    return hidden, tokens, positions


def assert_same_tree(mine, its):
    for row in range(len(mine.tokens)):
        assert nodes_of(mine, row) == pytest.approx(nodes_of(its, row), abs=1e-4)


@pytest.mark.parametrize("kind", [k if k in SHORT else pytest.param(k, marks=DECODING) for k in KINDS])
@pytest.mark.parametrize("padded", [False, True])
def test_drafts_in_graphs_equal_those_of_the_eager_drafter(target, kind, padded, captures, monkeypatch):  # noqa: F811
    """After a prompt, walks, a row that stood still, a rest that left more than may wait, and rows that left."""
    monkeypatch.setattr(drafter_module, "MOST_WAITING", 12)
    heads_class = Eagle3Heads if kind.startswith("eagle-3") else CloverHeads
    heads = heads_class.from_target(target, **KINDS[kind]).bind(target)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    batch, length, size = 3, 11, heads.config.hidden_size * max(len(heads.feature_layers), 1)
    mask = torch.arange(length) >= torch.tensor([0, 4, 2])[:, None] if padded else None
    slow = heads.new_drafter(heads, mask)
    fast = IN_GRAPHS[type(slow)](heads, mask, None, batch, length, 128)
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
    if fast.has_block:
        assert fast.cache.lengths == slow.cache.lengths == at


def test_another_shape_of_trees_is_captured_anew(target, fitted, captures):  # noqa: F811
    common = {**ONE_ROW, "max_new_tokens": 30, "assistant_model": fitted, "num_assistant_tokens": 7}
    told(target, **common)
    made = captures.made
    fitted.config.draft_top_k = 2
    _, mine = told(target, **common)
    _, its = told(target, **common, disable_compile=True)
    assert captures.made > made
    assert mine.accepted_by_depth == its.accepted_by_depth


# ---------------------------------------------------------------------- the budget


@pytest.mark.automatic
def test_the_automatic_budget_asks_graphs_for_few_sizes(target, captures):  # noqa: F811
    """It learns costs of graphs apart from costs of eager steps, and none while a graph is captured."""
    heads = fit(CloverHeads.from_target(target, draft_depth=3), target)
    common = {"input_ids": torch.tensor([[1, 4, 2, 5, 3]]), "max_new_tokens": 90, "pad_token_id": 0}
    plain = target.generate(**common)
    for is_eager in (False, True):
        tokens, mine = told(target, **common, assistant_model=heads, disable_compile=is_eager)
        assert torch.equal(tokens, plain)
        assert is_eager or set(mine.tree_sizes) <= {0, 7, 15, 31, 63}
    known = memory_of(target).experience[heads].steps
    modes = {in_graphs for (_, in_graphs), _, _ in known}
    assert modes == {False, True}
    learned = sum(len(its.costs.forwards) for (key, _, _), its in known.items() if key[1])
    assert 0 < learned < 90 - captures.made
