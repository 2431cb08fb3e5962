"""Packed linear layers: the same numbers back, the same tokens with drafts, and no way into training."""

import copy
import gc
import io
import json
import pickle
import re
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import command_line
from helpers.both_ways import same_tokens
from helpers.measured import benchmark_of, row_of
from helpers.zoo import build, ragged_batch
from rich.console import Console
from torch import nn
from transformers import AutoModelForCausalLM

from hf_clover import CloverHeads, pack_for_cpu, unpack
from hf_clover.cli import inputs
from hf_clover.decoding.draft import cpu_copy
from hf_clover.measure.benchmark import benchmark, plain
from hf_clover.measure.figures import figure_of
from hf_clover.measure.tables import category_tables_of, setting_of, tables_of
from hf_clover.network import packing

pytestmark = [
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"),
    pytest.mark.long("hf_clover/decoding/target/trees.py"),
]
VOCABULARY = 61

folder, models, run = command_line.folder, command_line.models, command_line.run  # fixtures


@pytest.fixture(autouse=True)
def _everything_is_worth_packing(monkeypatch):
    monkeypatch.setattr(packing, "LEAST_WEIGHTS", 0)


@pytest.fixture(params=["llama", "llama_tied", "llama_bias"])
def target(request):
    return build(request.param, vocab_size=VOCABULARY).eval()


def packed_layers(model):
    return [module for module in model.modules() if packing.is_packed(module)]


def test_unpacking_gives_the_same_weights_back(target):
    before = {name: (type(weight), weight.detach().clone()) for name, weight in target.named_parameters()}
    linears = [module for module in target.modules() if type(module) is nn.Linear]
    plain = [weakref.ref(layer.weight) for layer in linears]
    embedding = target.get_input_embeddings().weight
    ids = ragged_batch(VOCABULARY)["input_ids"]
    with torch.no_grad():
        expected = target(ids).logits
        assert pack_for_cpu(target) == len(linears) == len(packed_layers(target))
        gc.collect()
        assert all(weight() is None or weight() is embedding for weight in plain)  # nothing is held twice
        actual = target(ids).logits
        assert all(layer.weight.is_mkldnn for layer in linears)
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
        assert pack_for_cpu(target) == 0  # already
    unpack(target)
    assert not packed_layers(target)
    after = dict(target.named_parameters())
    assert list(after) == list(before)
    assert all(type(after[name]) is kind and torch.equal(after[name], was) for name, (kind, was) in before.items())
    assert all(weight.requires_grad for weight in after.values())
    assert (target.lm_head.weight is embedding) == target.config.tie_word_embeddings
    assert torch.equal(target(ids).logits, expected)


def test_layers_that_share_a_weight_share_it_packed_and_unpacked():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    model[1].weight = model[0].weight
    pack_for_cpu(model)
    assert model[1].weight is model[0].weight
    unpack(model)
    assert model[1].weight is model[0].weight


def test_small_layers_are_not_packed(target, monkeypatch):
    monkeypatch.setattr(packing, "LEAST_WEIGHTS", target.lm_head.weight.numel() + 1)
    pack_for_cpu(target)
    assert target.lm_head not in packed_layers(target)
    assert all(layer.weight.numel() > target.lm_head.weight.numel() for layer in packed_layers(target))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dicts_copies_and_pickles_hold_plain_weights(target, dtype, tmp_path):
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no bfloat16")
    target.to(dtype)
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    pack_for_cpu(target)
    target.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for model in (target, loaded, copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        assert bool(packed_layers(model)) == (model is target)
        states = model.state_dict()
        assert list(states) == list(before)
        assert all(torch.equal(states[name], weight) for name, weight in before.items())
    with pytest.raises(RuntimeError, match=r"call `hf_clover\.unpack\(model\)` before loading any"):
        target.load_state_dict(before)


@pytest.mark.skipif(not packing.can_halve(), reason="this processor or torch does not widen float16")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 7), (2, 3, 7)], ids=str)
def test_a_halved_layer_is_off_by_the_rounding_of_its_weight(bias, shape):
    layer, x = nn.Linear(7, 5, bias=bias), torch.randn(shape)
    with torch.no_grad():
        layer.weight[0, 0] = 1e6  # more than float16 holds
        halved = packing.HalvedLinear(layer.weight, layer.bias)
        layer.weight[0, 0] = torch.finfo(torch.float16).max
        expected = layer(x)
    torch.testing.assert_close(packing.linear(x, halved), expected, atol=1e-3, rtol=1e-3)
    assert not any(weight.requires_grad for weight in halved.parameters())


# ---------------------------------------------------------------------- drafting


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_tokens_with_heads_equal_those_of_the_packed_target(target, cache):
    heads = CloverHeads.from_target(target).eval()
    assert pack_for_cpu(target)
    assert pack_for_cpu(heads)
    options = {"cache_implementation": cache, "num_assistant_tokens": 6}
    ours = same_tokens(target, heads, ragged_batch(VOCABULARY), more_than=7, **options)
    assert ours.speculation.method == "tree"


@pytest.mark.parametrize("variant", ["clover-x", "clover-2"])
def test_packed_heads_draft_what_plain_ones_do(target, variant):
    heads = CloverHeads.from_target(target, variant, draft_vocab_size=40).bind(target).eval()
    state, tokens = torch.randn(1, 3, heads.config.hidden_size), torch.randint(VOCABULARY, (1, 3))

    def drafted():
        out, after = heads.step(1, state, tokens)
        return heads.score(out), after

    with torch.no_grad():
        expected = drafted()
        pack_for_cpu(target)
        pack_for_cpu(heads)
        heads.bind(target)
        rows = heads.borrowed.draft_rows[0]
        assert rows.is_mkldnn
        for mine, its in zip(drafted(), expected, strict=True):
            torch.testing.assert_close(mine, its, atol=1e-4, rtol=1e-4)
        heads.bind(target)
        assert heads.borrowed.draft_rows[0] is rows  # not packed at every call
        heads.draft_ids.add_(1)
        assert heads.bind(target).borrowed.draft_rows[0] is not rows
        heads.draft_ids.sub_(1)
        unpack(target)
        unpack(heads)
        heads.bind(target)
        assert not heads.borrowed.draft_rows[0].is_mkldnn
        for mine, its in zip(drafted(), expected, strict=True):
            assert torch.equal(mine, its)


def test_heads_for_a_packed_target_equal_those_for_a_plain_one(target):
    torch.manual_seed(1)
    expected = CloverHeads.from_target(target)
    pack_for_cpu(target)
    torch.manual_seed(1)
    actual = CloverHeads.from_target(target)
    assert actual.config.target_fingerprint == expected.config.target_fingerprint
    for name, weight in expected.state_dict().items():
        assert torch.equal(actual.state_dict()[name], weight)


# ---------------------------------------------------------------------- refusals


def test_training_a_packed_model_is_refused(target):
    with pytest.raises(ValueError, match=r"`model` is in training mode.*call `model\.eval\(\)`"):
        pack_for_cpu(target.train())
    pack_for_cpu(target.eval())
    with pytest.raises(RuntimeError, match=r"requires a gradient.*`torch\.no_grad\(\)`, or .*`hf_clover\.unpack"):
        target(torch.tensor([[1, 2]]))


def test_a_model_that_cannot_be_packed_is_refused_and_left_as_it_was(target, monkeypatch):
    with pytest.raises(ValueError, match="weights on meta, and packing is for a CPU"):
        pack_for_cpu(copy.deepcopy(target).to("meta"))
    with pytest.raises(ValueError, match=r"`model` is in torch\.float64, which cannot be packed"):
        pack_for_cpu(copy.deepcopy(target).double())
    target.is_quantized = True
    with pytest.raises(ValueError, match="`model` is quantised"):
        pack_for_cpu(target)
    del target.is_quantized
    monkeypatch.setattr(packing, "_OPERATORS", ("_reorder_linear_weight", "_gone"))
    with pytest.raises(RuntimeError, match=r"this build of torch lacks torch\.ops\.mkldnn\._gone"):
        pack_for_cpu(target)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(packing, "_OPERATORS", ())
    with pytest.raises(RuntimeError, match="lacks oneDNN"):
        pack_for_cpu(target)
    assert not packed_layers(target)


# ---------------------------------------------------------------------- the commands


@pytest.fixture
def prompts(tmp_path):
    (tmp_path / "prompts.txt").write_text("def f(x):\nabc(x)\n")
    return ["--prompts", str(tmp_path / "prompts.txt"), "--num-prompts", "2"]


def test_benchmark_measures_the_target_packed_and_unpacked(run, models, prompts):
    few = [*prompts, "--repeats", "1", "--max-new-tokens", "12", "--nodes", "4"]
    said = run("benchmark", *models, "--pack", *few, "--against", "prompt-lookup", "--json")
    assert said.code == 0, said.err
    result = json.loads(said.out)
    assert result["packed"] is False, "the target itself, of which a copy was packed"
    rows = {row["method"]: row for row in result["rows"]}
    names = ["plain", "clover-x", "prompt-lookup"]
    assert list(rows) == [*names, *(f"{name}, packed" for name in names)]
    speed = {name: row["tokens_per_second"] for name, row in rows.items()}
    assert all(row["identical"] for row in rows.values())
    for name, row in rows.items():
        is_packed = name.endswith(", packed")
        assert row["speedup"] == pytest.approx(speed[name] / speed["plain, packed" if is_packed else "plain"])
        assert not is_packed or row["speedup_over_unpacked"] == pytest.approx(speed[name] / speed["plain"])
    assert rows["plain, packed"]["efficiency"] == 1.0
    assert rows["plain, packed"]["tokens_per_forward"] == 1


def row(*figures) -> dict:
    """Of questions of one category."""
    whole = {**row_of(*figures), "questions": 1}
    return {**whole, "categories": {"math": whole}}


MEASURED = [row("plain", 100, 1, 1), row("clover-x", 140, 2, 1.4), row("plain, packed", 148, 1, 1.48)]
MEASURED += [row("clover-x, packed", 241, 2.1, 1.63), row("prompt-lookup, packed", 178, 1.4, 1.2)]
NEW = MEASURED[:2] + [
    {**row, "speedup_over_unpacked": row["tokens_per_second"] / 100, "speedup_over_unpacked_range": [1.1, 2.5]}
    | ({"speedup": 1.0, "efficiency": 1.0} if row["method"] == "plain, packed" else {})
    for row in MEASURED[2:]
]


@pytest.mark.parametrize("rows", [MEASURED, NEW], ids=["an older result", "a new one"])
def test_every_table_has_one_baseline_and_names_it(rows):
    result = benchmark_of(rows)
    tables, texts = [*tables_of(result), *category_tables_of(result)], []
    for table in tables:
        console = Console(file=io.StringIO(), width=160)
        console.print(table)
        texts.append(console.file.getvalue())
    every, packed, by_category, packed_by_category = texts
    baselines = [re.search(r"speedup over ([\w ]+?)( and |$)", table.title)[1] for table in tables]
    assert baselines == ["plain generate", "plain generate with packed weights"] * 2
    figures = re.compile(r"^ (\S+(?: packed)?) .* (\d\.\d\d)x +(\d\.\d\d )?", re.MULTILINE)
    assert figures.findall(every) == [
        ("plain", "1.00", ""),  # without an efficiency, as packed ones over plain
        ("clover-x", "1.40", "0.70 "),
        ("plain, packed", "1.48", ""),
        ("clover-x, packed", "2.41", ""),
        ("prompt-lookup, packed", "1.78", ""),
    ]
    assert figures.findall(packed) == [
        ("plain, packed", "1.00", ""),
        ("clover-x, packed", "1.63", "0.78 "),
        ("prompt-lookup, packed", "1.20", "0.86 "),
    ]
    assert "1.40x 2.00 2.41x 2.10 1.78x 1.40" in " ".join(by_category.split())
    assert "1.63x 2.10 1.20x 1.40" in " ".join(packed_by_category.split())
    panels = {(panel["title"], panel["ylabel"]): panel for panel in figure_of(result)["panels"]}
    bars = panels["Speedup", "times plain generate"]
    assert [series["y"] for series in bars["series"]] == [[1], [1.4], [1.48], [2.41], [1.78]]
    efficient = panels["Efficiency", "speedup / tokens per forward"]["series"]
    assert [series["label"] for series in efficient] == ["clover-x", "clover-x, packed", "prompt-lookup, packed"]
    dots = panels["Speedup by category", "times plain generate with packed weights"]
    assert [series["y"] for series in dots["series"]] == [[1.63, 1.63], [1.2, 1.2]]
    assert dots["reference"]["label"] == "plain generate with packed weights"


def test_a_benchmark_of_a_packed_target_says_so(target):
    pack_for_cpu(target)
    result = benchmark(target, SimpleNamespace(pad_token_id=0), [plain()], [[3, 4]], max_new_tokens=2, repeats=1)
    assert result["packed"] is True
    assert "packed weights" in setting_of(result)
    assert "float32; packed weights" in figure_of(result)["note"]


@pytest.mark.parametrize("command", ["generate", "verify"])
def test_commands_pack_the_target_and_packed_heads_draft(run, models, prompts, command, monkeypatch):
    counts, new_drafter = [], mock.Mock(wraps=CloverHeads.new_drafter)
    monkeypatch.setattr(inputs, "pack_for_cpu", lambda model: counts.append(pack_for_cpu(model)))
    monkeypatch.setattr(cpu_copy, "LEAST_WEIGHTS", 0)
    monkeypatch.setattr(CloverHeads, "new_drafter", lambda *made: new_drafter(*made))
    few = {"generate": ["abc"], "verify": [*prompts, "--batch-size", "1"]}[command]
    said = run(command, *models, "--pack", *few, "--max-new-tokens", "8")
    assert said.code == 0, said.err
    (count,) = counts
    assert count > 0
    assert new_drafter.called
    drafting = [call.args[1] for call in new_drafter.call_args_list]
    kinds = (packing.PackedLinear, packing.HalvedLinear)
    assert all(any(isinstance(layer, kinds) for layer in heads.modules()) for heads in drafting)
