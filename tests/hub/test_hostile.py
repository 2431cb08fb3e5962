"""Heads from a stranger: what cannot be is refused by name, before memory is taken for it and before code runs."""

import json
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.zoo import build
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

from hf_clover import CloverConfig, CloverHeads
from hf_clover.network.checkpoint_checks import check_draft_ids

pytestmark = pytest.mark.long("hf_clover/hub", "hub_cards")

TINY = dict(vocab_size=24, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24)
GIGABYTE = 1 << 30


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    heads = CloverHeads(CloverConfig(**TINY, draft_vocab_size=8))
    heads.save_pretrained(folder / "heads")
    adapted = get_peft_model(heads, LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False))
    adapted.save_pretrained(folder / "adapter", save_embedding_layers=False)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved / "heads", tmp_path / "heads"))


def change_config(folder: Path, name: str = "config.json", /, **fields) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def little_memory():
    """Whatever is large is refused here by the machine too, and then not with the error that is asked for."""
    if not Path("/proc/self/statm").exists():
        yield
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + GIGABYTE, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


# ---------------------------------------------------------------------- configs

ROPE = {"rope_theta": 10000.0}
IMPOSSIBLE = [
    (dict(hidden_size=1 << 17), "hidden_size=131072"),
    (dict(num_augmenting_layers=64, intermediate_size=1 << 20, hidden_size=1 << 12), "hidden_size=4096.*parameters"),
    (dict(num_heads=64, hidden_size=1 << 15), "hidden_size=32768.*parameters"),
    (dict(vocab_size=1 << 40), "vocab_size="),
    (dict(hidden_size=[16]), r"hidden_size=\[16\]"),
    (dict(draft_vocab_size=25), "draft_vocab_size=25"),
    (dict(target_name_or_path="org/target\n---\nlicense: none"), "target_name_or_path=.*printable"),
    (dict(target_name_or_path="\x1b[31mred"), "target_name_or_path=.*printable"),
    (dict(target_revision="a" * 100_000), "target_revision=.*printable"),
    (dict(target_name_or_path=["org/target"]), "target_name_or_path="),
    (dict(rope_parameters={"rope_type": "linear", **ROPE}), "rope_parameters=.*factor"),
    (dict(rope_parameters={"rope_type": "linear", "factor": "2", **ROPE}), "rope_parameters="),
    (dict(rope_parameters={"rope_type": "linear", "factor": 0, **ROPE}), "rope_parameters="),
    (
        dict(rope_parameters={"rope_type": "longrope", "short_factor": [1] * 3, "long_factor": [1], **ROPE}),
        "rope_param",
    ),
    (dict(rope_parameters={"rope_type": ["default"]}), "rope_parameters="),
    (dict(dtype="load"), "dtype='load'"),
    (dict(dtype="int64"), "dtype='int64'"),
    (dict(dtype=3), "dtype=3"),
    (dict(attn_implementation="somebody/kernel"), "attn_implementation='somebody/kernel'"),
    (dict(_attn_implementation="somebody/kernel"), "_attn_implementation='somebody/kernel'"),
    (dict(attn_implementation={"": "somebody/kernel"}), "attn_implementation="),
    (dict(per_layer_config={"0": {"hidden_size": 8}}), "per_layer_config="),
    (dict(to_dict="x"), "`to_dict` is impossible"),
    (dict(__class__="x"), "`__class__` is impossible"),
    (dict(id2label=3), "`id2label=3` is impossible"),
]


@pytest.mark.parametrize(("fields", "message"), IMPOSSIBLE, ids=[str(fields)[:60] for fields, _ in IMPOSSIBLE])
def test_an_impossible_config_is_refused(fields, message, folder, little_memory):
    change_config(folder, **fields)
    for load in (AutoConfig.from_pretrained, AutoModel.from_pretrained):
        with pytest.raises(ValueError, match=f"(?s)CloverConfig: .*{message}") as caught:
            load(folder)
        assert len(str(caught.value)) < 3000


def test_an_impossible_config_is_refused_without_files_too(little_memory):
    with pytest.raises(ValueError, match=r"hidden_size=131072.*parameters"):
        CloverHeads(CloverConfig(**TINY | dict(hidden_size=1 << 17)))


def test_a_huge_number_of_labels_takes_no_memory(folder, little_memory):
    change_config(folder, num_labels=1 << 30)
    assert AutoModel.from_pretrained(folder).config.num_labels == 2


def test_sizes_of_large_real_targets_are_accepted():
    for size, inner, attention in ((16384, 53248, 128), (7168, 18432, 128), (5120, 27648, 40)):
        sizes = dict(hidden_size=size, intermediate_size=inner, num_attention_heads=attention)
        assert CloverConfig(**sizes, vocab_size=1 << 18).has_augmenting_block


# ---------------------------------------------------------------------- checkpoints


def renamed(tensors):
    tensors["layers.0.mlp.up.weight"] = tensors.pop("layers.0.mlp.up_proj.weight")


BROKEN = {
    "renamed": (renamed, r"lacks 1 .*'layers.0.mlp.up_proj.weight'.*holds others.*'layers.0.mlp.up.weight'"),
    "missing": (lambda t: t.pop("norm.weight"), r"lacks 1 of the tensors.*'norm.weight'"),
    "no draft ids": (lambda t: t.pop("draft_ids"), "lacks 1 of the tensors.*'draft_ids'"),
    "reshaped": (lambda t: t.update({"norm.weight": torch.ones(15)}), r"`norm.weight` in the shape \(15,\).*\(16,\)"),
    "longer draft ids": (lambda t: t.update(draft_ids=torch.arange(9)), r"`draft_ids` in the shape \(9,\)"),
    "draft ids out of range": (lambda t: t["draft_ids"].fill_(24), "draft_ids` go from 24 to 24, .* to 23"),
    "negative draft ids": (lambda t: t["draft_ids"].sub_(1), "draft_ids` go from -1"),
    "draft ids twice": (lambda t: t["draft_ids"].fill_(3), "draft_ids` hold only 1 different tokens in 8 places"),
    "draft ids that are no ids": (lambda t: t.update(draft_ids=torch.rand(8)), "draft_ids` are torch.float32"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_checkpoint_that_does_not_fit_its_config_is_refused(case, folder):
    change, message = BROKEN[case]
    change_tensors(folder, change)
    with pytest.raises(ValueError, match=message):
        AutoModel.from_pretrained(folder)


@pytest.mark.parametrize("fields", [dict(intermediate_size=1 << 20), dict(num_heads=64, output_projector="residual")])
def test_a_config_larger_than_its_checkpoint_takes_no_memory(fields, folder, little_memory):
    change_config(folder, **fields, hidden_act="gelu")
    with pytest.raises(ValueError, match="its config asks for"):
        AutoModel.from_pretrained(folder)


@pytest.mark.parametrize("size", [-10, 100, 4, 0])
def test_a_checkpoint_that_was_cut_short_is_refused(size, folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"heads` holds a safetensors file that is damaged or cut short"):
        AutoModel.from_pretrained(folder)


def test_shards_are_checked_together(saved, tmp_path):
    heads = AutoModel.from_pretrained(saved / "heads")
    heads.save_pretrained(tmp_path, max_shard_size="4KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    again = AutoModel.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), heads.state_dict().values()))
    save_file({}, shards[-1], metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks \d+ of the tensors"):
        AutoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("is_absolute", [False, True])
def test_weights_outside_the_folder_are_not_read(is_absolute, folder):
    outside = Path(shutil.move(folder / "model.safetensors", folder.parent / "outside.safetensors"))
    name = str(outside) if is_absolute else "../outside.safetensors"
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(outside), name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"names the weights '.*outside.safetensors', which lie outside.*save or d"):
        AutoModel.from_pretrained(folder)


def test_a_path_with_dots_to_the_folder_is_accepted(folder, monkeypatch):
    monkeypatch.chdir(folder)
    AutoModel.from_pretrained(Path("..") / folder.name)


def test_a_pickle_is_read_only_on_request(folder):
    expected = AutoModel.from_pretrained(folder).state_dict()
    torch.save(expected, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    for options in ({}, {"use_safetensors": None}, {"use_safetensors": True}):
        with pytest.raises(OSError, match=r"model\.safetensors"):
            AutoModel.from_pretrained(folder, **options)
    heads = AutoModel.from_pretrained(folder, use_safetensors=False)
    assert all(torch.equal(a, b) for a, b in zip(heads.state_dict().values(), expected.values()))


def test_a_config_cannot_ask_for_a_pickle(folder):
    torch.save({}, folder / "adapter_model.bin")
    change_config(folder, transformers_weights="adapter_model.bin")
    with pytest.raises(ValueError, match=r"keeps its weights in 'adapter_model.bin', and only safetensors is read"):
        AutoModel.from_pretrained(folder)


def test_fields_and_dtype_may_be_changed_when_loading(folder):
    heads = AutoModel.from_pretrained(folder, draft_tree="chain", draft_top_k=3, dtype=torch.bfloat16)
    assert (heads.config.draft_tree, heads.config.draft_top_k, heads.dtype) == ("chain", 3, torch.bfloat16)
    assert not hasattr(AutoModel.from_pretrained(folder, draft_vocab_size=None), "draft_ids")
    heads = AutoModel.from_pretrained(folder, draft_vocab_size=6, ignore_mismatched_sizes=True)
    assert heads.draft_ids.tolist() == list(range(6))
    with pytest.raises(ValueError, match="draft_depth=0"):
        AutoModel.from_pretrained(folder, draft_depth=0)


def test_adapters_load_alike_by_peft_and_by_automodel(saved):
    heads = PeftModel.from_pretrained(AutoModel.from_pretrained(saved / "heads"), saved / "adapter")
    change_config(saved / "adapter", "adapter_config.json", base_model_name_or_path=str(saved / "heads"))
    other = AutoModel.from_pretrained(saved / "adapter")
    assert type(other) is CloverHeads
    x, ids = torch.rand(1, 3, 16), torch.tensor([[1, 2, 3]])
    lent = SimpleNamespace(embedding=torch.arange(24 * 16).reshape(24, 16) / 100.0)
    for each in (heads.get_base_model(), other):
        object.__setattr__(each, "_borrowed", lent)
    ours, theirs = heads(hidden_states=x, input_ids=ids), other(hidden_states=x, input_ids=ids)
    assert torch.allclose(ours.head_outputs, theirs.head_outputs, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_valid_draft_ids_pass_the_check(dtype):
    check_draft_ids(torch.tensor([5, 0, 23], dtype=dtype), 24, "heads")


@pytest.mark.parametrize("value", [0, -1, "6", 2.5, 10**9])
def test_an_impossible_tree_size_in_a_loaded_config_is_refused(value, saved, folder):
    (folder / "generation_config.json").write_text(json.dumps({"num_assistant_tokens": value}))
    target = build("llama", vocab_size=24)
    heads = CloverHeads.from_target(target, num_heads=2)
    heads.generation_config = AutoModel.from_pretrained(folder).generation_config
    with pytest.raises(ValueError, match=rf"num_assistant_tokens={value!r}` is no tree size"):
        target.generate(torch.tensor([[1, 2]]), assistant_model=heads, max_new_tokens=4)
