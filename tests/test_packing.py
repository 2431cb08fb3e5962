"""Packed linear layers: the same numbers back, the same tokens with drafts, and no way into training."""

import copy
import gc
import json
import pickle
import weakref
from types import SimpleNamespace

import pytest
import torch
from oracle import planted
from tiny_text import save_folders
from torch import nn
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner
from zoo import build, ragged_batch

from hf_clover import CloverHeads, cli, pack_for_cpu, unpack
from hf_clover.decoding import drafting_copy, heads_run
from hf_clover.decoding.record import speculations
from hf_clover.measure.benchmark import benchmark, plain
from hf_clover.measure.figures import figure_of
from hf_clover.measure.tables import setting_of
from hf_clover.network import packing

pytestmark = [
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"),
    pytest.mark.long("hf_clover/network", "hf_clover/decoding/target_run.py"),
]
VOCABULARY = 61


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


def test_layers_that_share_a_weight_share_it_again():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    model[1].weight = model[0].weight
    pack_for_cpu(model)
    assert model[1].weight is model[0].weight
    unpack(model)
    assert model[1].weight is model[0].weight


def test_small_layers_are_left_alone(target, monkeypatch):
    monkeypatch.setattr(packing, "LEAST_WEIGHTS", target.lm_head.weight.numel() + 1)
    pack_for_cpu(target)
    assert target.lm_head not in packed_layers(target)
    assert all(layer.weight.numel() > target.lm_head.weight.numel() for layer in packed_layers(target))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dicts_copies_and_pickles_are_plain(target, dtype, tmp_path):
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
def test_heads_give_the_packed_targets_tokens(target, cache):
    batch = ragged_batch(VOCABULARY)
    options = {**batch, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    options |= {} if cache == "dynamic" else {"cache_implementation": cache}
    heads = CloverHeads.from_target(target).eval()
    assert pack_for_cpu(target)
    assert pack_for_cpu(heads)
    expected = target.generate(**options)
    with planted(expected, batch["input_ids"].shape[1]), speculations() as records:
        actual = target.generate(**options, assistant_model=heads, num_assistant_tokens=6)
    assert torch.equal(actual, expected)
    assert records[0].method == "tree"
    assert records[0].accepted_tokens >= 8


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


def test_heads_for_a_packed_target_are_those_for_a_plain_one(target):
    torch.manual_seed(1)
    expected = CloverHeads.from_target(target)
    pack_for_cpu(target)
    torch.manual_seed(1)
    actual = CloverHeads.from_target(target)
    assert actual.config.target_fingerprint == expected.config.target_fingerprint
    for name, weight in expected.state_dict().items():
        assert torch.equal(actual.state_dict()[name], weight)


# ---------------------------------------------------------------------- refusals


def test_training_is_refused(target):
    with pytest.raises(ValueError, match=r"`model` is in training mode.*call `model\.eval\(\)`"):
        pack_for_cpu(target.train())
    pack_for_cpu(target.eval())
    with pytest.raises(RuntimeError, match=r"requires a gradient.*`torch\.no_grad\(\)`, or .*`hf_clover\.unpack"):
        target(torch.tensor([[1, 2]]))


def test_what_cannot_be_packed_is_refused_and_left_as_it_was(target, monkeypatch):
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


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = save_folders(tmp_path_factory.mktemp("packed"))
    (folder / "prompts.txt").write_text("def f(x):\nabc(x)\n")
    return ["--target", str(folder / "target"), "--heads", str(folder / "heads"), "--pack"], folder / "prompts.txt"


def test_benchmark_measures_packed_and_not(words):
    models, prompts = words
    few = ["--prompts", str(prompts), "--num-prompts", "2", "--repeats", "1", "--max-new-tokens", "12", "--nodes", "4"]
    said = CliRunner().invoke(cli.app, ["benchmark", *models, *few, "--against", "prompt-lookup", "--json"])
    assert said.exit_code == 0, said.output
    result = json.loads(said.stdout)
    assert result["packed"] is False, "the target itself, of which a copy was packed"
    rows = {row["method"]: row for row in result["rows"]}
    names = ["plain", "clover-x", "prompt-lookup"]
    assert list(rows) == [*names, *(f"{name}, packed" for name in names)]
    speed = {name: row["tokens_per_second"] for name, row in rows.items()}
    assert all(row["identical"] for row in rows.values())
    for name in names[1:]:
        assert rows[name]["speedup"] == pytest.approx(speed[name] / speed["plain"])
        assert rows[f"{name}, packed"]["speedup"] == pytest.approx(speed[f"{name}, packed"] / speed["plain, packed"])
    assert rows["plain, packed"]["speedup"] == pytest.approx(speed["plain, packed"] / speed["plain"])
    assert rows["plain, packed"]["tokens_per_forward"] == 1


def test_a_benchmark_of_a_packed_target_says_so(target):
    pack_for_cpu(target)
    result = benchmark(target, SimpleNamespace(pad_token_id=0), [plain()], [[3, 4]], max_new_tokens=2, repeats=1)
    assert result["packed"] is True
    assert "packed weights" in setting_of(result)
    assert "float32; packed weights" in figure_of(result)["note"]


@pytest.mark.parametrize("command", ["generate", "verify"])
def test_commands_pack_the_target_and_packed_heads_draft(words, command, monkeypatch):
    models, prompts = words
    counts, drafting = [], []
    monkeypatch.setattr(packing, "pack_for_cpu", lambda model: counts.append(pack_for_cpu(model)))
    monkeypatch.setattr(drafting_copy, "LEAST_WEIGHTS", 0)
    made = heads_run.drafting_copy
    monkeypatch.setattr(heads_run, "drafting_copy", lambda *args: drafting.append(made(*args)) or drafting[-1])
    few = {"generate": ["abc"], "verify": ["--prompts", str(prompts), "--num-prompts", "2", "--batch-size", "1"]}
    said = CliRunner().invoke(cli.app, [command, *models, *few[command], "--max-new-tokens", "8"])
    assert said.exit_code == 0, said.output
    assert len(counts) == 1
    assert counts[0] > 0
    assert drafting
    kinds = (packing.PackedLinear, packing.HalvedLinear)
    assert all(any(isinstance(layer, kinds) for layer in heads.modules()) for heads in drafting)
