"""EAGLE-3 heads as others publish them: read in every format, and refused where something is not known."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM, LogitsProcessorList

from hf_clover import CloverHeads, Eagle3Heads, load_heads
from hf_clover.decoding.route import CloverWarning
from hf_clover.decoding.target.memory import memory_of
from hf_clover.hub.push import write_card
from hf_clover.targets.hidden_states import capture_states

VECTORS = Path(__file__).parent / "reference_vectors" / "eagle3"
CASES = ("llama_reduced", "qwen3_full")
LAYERS = {"llama_reduced": (2, 4, 5), "qwen3_full": (1, 4, 6)}
IDS = "eagle_aux_hidden_state_layer_ids"


def a_target(**fields) -> LlamaForCausalLM:
    sizes = dict(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4)
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(**{**sizes, **fields})).eval()
    for weight in target.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return target


def speculators(case: str, folder: Path) -> None:
    """As they come."""


def specforge(case: str, folder: Path) -> None:
    rename(folder, "midlayer.")
    flat(folder, ["LlamaForCausalLMEagle3"], eagle_config={IDS: list(LAYERS[case]), **flags(folder)}, norm_output=True)


def authors(case: str, folder: Path) -> None:
    """Theirs say nothing of layers, and know no flags, which qwen3_full has."""
    rename(folder, "midlayer.", without=("embed_tokens.weight",))
    flat(folder, ["LlamaForCausalLM"])


def deepspec(case: str, folder: Path) -> None:
    """Counted as layers, from whose outputs they read."""
    outputs = [layer - 1 for layer in LAYERS[case]]
    flat(folder, ["Qwen3Eagle3Model"], target_layer_ids=outputs, **flags(folder))


FORMATS = {"speculators": speculators, "specforge": specforge, "authors": authors, "deepspec": deepspec}


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def write(folder: Path, config: dict) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def flags(folder: Path) -> dict:
    return {name: config_of(folder)[name] for name in ("norm_before_fc", "norm_before_residual")}


def flat(folder: Path, architectures: list[str], **more) -> None:
    config = config_of(folder)
    common = {"architectures": architectures, "draft_vocab_size": config["draft_vocab_size"]}
    write(folder, {**config["transformer_layer_config"], **common, **more})


def rename(folder: Path, prefix: str, without: tuple[str, ...] = ()) -> None:
    file = folder / "model.safetensors"
    kept = {name: value for name, value in load_file(file).items() if name not in without}
    save_file({name.replace("layers.0.", prefix): value for name, value in kept.items()}, file)


@pytest.fixture
def folder(tmp_path, request) -> Path:
    case = getattr(request, "param", "llama_reduced")
    return Path(shutil.copytree(VECTORS / case / "heads", tmp_path / "heads"))


@torch.no_grad()
def furthest(case: str, heads: Eagle3Heads) -> float:
    """How far the logits of any step at any place are from those of the reference."""
    vectors = load_file(VECTORS / case / "vectors.safetensors")
    ids, features, logits = vectors["input_ids"], vectors["features"], vectors["logits"]
    heads.config.num_heads = len(logits)
    mine = heads.score(heads(features[:, :-1], ids[:, 1:]).head_outputs)[:, 0]  # [K, T - 1, D]
    length = ids.shape[1]
    there = torch.tensor([[t + 1 + k < length for t in range(length - 1)] for k in range(len(logits))])
    assert there.sum() > 30
    return float((mine - logits).abs().amax(-1)[there].max())


@pytest.mark.parametrize(
    ("form", "case", "folder"),
    [(form, case, case) for form in FORMATS for case in CASES if (form, case) != ("authors", "qwen3_full")],
    indirect=["folder"],
)
def test_every_format_computes_what_the_reference_does(case, form, folder):
    target, options = a_target(), {}
    own = load_file(folder / "model.safetensors")["embed_tokens.weight"]
    FORMATS[form](case, folder)
    if form == "authors":
        target.get_input_embeddings().weight.data = own  # which their heads borrow
        options = {"layer_ids": LAYERS[case]}  # their rule takes others
    heads = load_heads(folder, target, **options)
    assert isinstance(heads, Eagle3Heads)
    assert heads.feature_layers == LAYERS[case]
    assert heads.config.own_embedding == (form != "authors")
    assert furthest(case, heads) < 1e-5


def test_imported_heads_are_the_same_after_saving_and_any_way_of_loading(folder, tmp_path):
    target = a_target()
    heads = load_heads(folder, target)
    heads.save_pretrained(tmp_path / "ours")
    for loaded in (
        AutoModel.from_pretrained(tmp_path / "ours"),
        Eagle3Heads.from_pretrained(tmp_path / "ours"),
        load_heads(tmp_path / "ours", target),
        Eagle3Heads.from_pretrained(folder, target=target),
    ):
        assert type(loaded) is Eagle3Heads
        assert furthest("llama_reduced", loaded.bind(target)) < 1e-5
    clover = CloverHeads.from_target(target)
    clover.save_pretrained(tmp_path / "clover")
    assert type(load_heads(tmp_path / "clover", target)) is CloverHeads


def test_a_pickle_is_read_only_with_allow_pickle(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"pickle \(pytorch_model.bin\).*`allow_pickle=True`"):
        load_heads(folder, a_target())
    assert furthest("llama_reduced", load_heads(folder, a_target(), allow_pickle=True)) < 1e-5


def test_an_embedding_equal_to_the_targets_is_borrowed(folder):
    target = a_target()
    target.get_input_embeddings().weight.data = load_file(folder / "model.safetensors")["embed_tokens.weight"]
    heads = load_heads(folder, target)
    assert not heads.config.own_embedding
    assert "embed_tokens.weight" not in heads.state_dict()
    assert furthest("llama_reduced", heads) < 1e-5


def test_layers_of_the_authors_format_follow_the_authors_rule(folder):
    authors("llama_reduced", folder)
    assert load_heads(folder, a_target()).feature_layers == (2, 4, 5)
    assert load_heads(folder, a_target(num_hidden_layers=12)).feature_layers == (2, 6, 9)
    with pytest.raises(ValueError, match="pass `target=` too"):
        load_heads(folder)


# ---------------------------------------------------------------------- what cannot be known


def changed(folder: Path, form=speculators, **config) -> None:
    form("llama_reduced", folder)
    found = {**config_of(folder), **config}
    write(folder, {name: value for name, value in found.items() if value is not None})


def with_tensors(folder: Path, **changes) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, change in changes.items():
        name = name.replace("__", ".")
        tensors[name] = change(tensors.get(name))
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / "model.safetensors")


NO_OFFSETS = "`d2t` that is not a list of offsets"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: changed(f, **{IDS: None}), r"does not state which layers.*`layer_ids=`.*\(2, 4, 5\)"),
        (lambda f: changed(f, specforge, eagle_config={}), r"does not state which layers.*verify"),
        (lambda f: changed(f, specforge, **{IDS: [1, 2, 3]}), r"says twice which layers.*\[1, 2, 3\].*\[2, 4, 5\]"),
        (lambda f: changed(f, **{IDS: [2, 4]}), r"`fc.weight`.*96 numbers|fuses 96 numbers.*\[2, 4\]"),
        (lambda f: changed(f, speculators_model_type="peagle"), r"no heads that are known.*'peagle'"),
        (lambda f: changed(f, specforge, architectures=["DFlashDraftModel"]), r"no heads.*'DFlashDraftModel'"),
        (lambda f: changed(f, authors, rope_parameters={"rope_type": "mrope", "rope_theta": 1e4}), "rope_type"),
        (lambda f: with_tensors(f, d2t=lambda d: d + torch.arange(len(d))), rf"{NO_OFFSETS}.*arange"),
        (lambda f: with_tensors(f, d2t=lambda d: d + 70, t2d=lambda _: None), rf"{NO_OFFSETS}.*99"),
        (lambda f: with_tensors(f, t2d=lambda t: t.roll(1)), rf"{NO_OFFSETS}.*`t2d`"),
        (lambda f: with_tensors(f, norm__weight=lambda _: None), r"lacks 1 tensors, such as 'norm.weight'"),
        (lambda f: with_tensors(f, extra__weight=lambda _: torch.ones(2)), r"has, beside.*'extra.weight'"),
        (lambda f: with_tensors(f, norm__weight=lambda w: w[:8].clone()), r"another shape.*'norm.weight' as \(8,\)"),
        (lambda f: (f / "config.json").unlink(), r"no config.json"),
        (lambda f: (f / "model.safetensors").unlink(), r"no weights"),
        (lambda f: (f / "model.safetensors").write_bytes(b"12345678"), r"damaged file, model.safetensors"),
    ],
)
def test_heads_with_missing_or_contradictory_facts_are_refused(folder, change, says):
    change(folder)
    with pytest.raises(ValueError, match=says):
        load_heads(folder, a_target())


@pytest.mark.parametrize(("field", "size"), [("vocab_size", 90), ("hidden_size", 64)])
def test_another_target_is_refused(folder, field, size):
    with pytest.raises(ValueError, match=rf"made for another target: its (target_)?{field} is .* is {size}"):
        load_heads(folder, a_target(**{field: size}))


def test_missing_rope_parameters_are_not_taken_from_the_target(folder):
    changed(folder, authors, rope_parameters=None)
    heads = load_heads(folder, a_target(rope_parameters={"rope_type": "default", "rope_theta": 500000.0}))
    assert heads.config.rope_parameters["rope_theta"] == 10000.0


def test_layers_that_the_target_lacks_are_refused(folder):
    changed(folder, **{IDS: [2, 4, 9]})
    heads = load_heads(folder, a_target())
    with pytest.raises(ValueError, match=r"layers \[2, 4, 9\].*8 layers.*`load_heads\(layer_ids=...\)`"):
        a_target().generate(torch.tensor([[1, 2]]), assistant_model=heads, max_new_tokens=4)


# ---------------------------------------------------------------------- what they read, what they draft


@pytest.mark.parametrize("layers", [(2, 4, 5), (0, 8), (3,), (8, 1, 7, 1)])
def test_captured_states_equal_the_hidden_states_of_transformers(layers):
    target, ids = a_target(), torch.tensor([[5, 6, 7, 8]])
    states = target(ids, output_hidden_states=True).hidden_states
    captured: list[torch.Tensor] = []
    with torch.no_grad(), capture_states(target, captured, layers):
        target(ids)
    assert torch.equal(captured[0], torch.cat([states[layer] for layer in layers], dim=-1))
    target(ids)
    assert len(captured) == 1, "no hook stays"


@pytest.mark.parametrize(("case", "folder"), [(case, case) for case in CASES], indirect=["folder"])
def test_a_drafted_chain_equals_that_of_the_reference(case, folder):
    """Compared by ids, from every place of the text (reference_vectors/eagle3/README.md)."""
    heads, vectors = load_heads(folder, a_target()), load_file(VECTORS / case / "vectors.safetensors")
    chains = json.loads((VECTORS / case / "chains.json").read_text())
    heads.config.draft_depth = 6
    assert len(chains) == vectors["input_ids"].shape[1] - 1
    assert len({tuple(chain) for chain in chains.values()}) > 10
    for place, chain in chains.items():
        known = int(place) + 1
        drafter = heads.new_drafter(heads)
        features, ids = vectors["features"][:, :known], vectors["input_ids"][:, 1 : known + 1]
        drafter.extend(features, ids, torch.arange(known)[None], [known])
        assert drafter.draft(6, "chain").tokens[0, 1:].tolist() == chain, place


def test_heads_whose_drafts_are_nearly_always_wrong_give_one_warning(folder):
    target, heads = a_target(), load_heads(folder, a_target(), layer_ids=(1, 3, 7))
    heads.config.draft_copies = 0
    options = {"max_new_tokens": 230, "pad_token_id": 0, "eos_token_id": None, "num_assistant_tokens": 3}

    def dictate(input_ids, scores):
        """No draft knows what comes next."""
        scores[:, input_ids.shape[1] * 7 % 100] = torch.inf
        return scores

    def generate(heads):
        ids = torch.tensor([[3, 14, 15, 9, 26, 5, 35]])
        return target.generate(ids, assistant_model=heads, logits_processor=LogitsProcessorList([dictate]), **options)

    with pytest.warns(CloverWarning, match=r"right in \d of 20\d places.*layer_ids=.*chat template.*fine-tune"):
        generate(heads)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CloverWarning)
        generate(heads)
    assert memory_of(target).first_drafts[heads][0] == 200


def test_the_card_says_where_the_heads_were_published(folder, tmp_path):
    heads = load_heads(folder, a_target())
    heads.save_pretrained(tmp_path / "mine")
    text = write_card(tmp_path / "mine", repo_id="me/mine").text
    eagle3 = "[eagle-3](https://huggingface.co/papers/2503.01840)"
    assert f"the kind {eagle3}. Others trained them and published them as `heads`. The Python package" in text
    assert "the heads' own weights, which include an output layer and an embedding." in text
    heads.config.source_name_or_path = "org/eagle3"
    heads.save_pretrained(tmp_path / "mine")
    text = write_card(tmp_path / "mine", repo_id="me/mine").text
    origin = "[org/eagle3](https://huggingface.co/org/eagle3)"
    assert f"published them as {origin}. The Python package `hf_clover` reads and runs them." in text
