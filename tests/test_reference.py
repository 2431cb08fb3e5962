"""Checkpoints of the public reference compute what the reference computes; everything else is refused.

`reference_vectors/` holds two cases computed by the reference in float32: plain attention, and grouped-query attention
with a rope base of 500000 in the target, of which the reference's own layers take no notice.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, LlamaForCausalLM

from hf_clover import CloverHeads, TreeCache

VECTORS = Path(__file__).parent / "reference_vectors"
HEADS = 5


class Case:
    def __init__(self, name: str) -> None:
        self.name, self.folder = name, VECTORS / name
        self.target = LlamaForCausalLM.from_pretrained(self.folder / "target").eval()
        self.heads = CloverHeads.from_reference_checkpoint(self.folder / "reference", self.target)
        for key, tensor in load_file(self.folder / "vectors.safetensors").items():
            setattr(self, key, tensor)
        self.length = self.next_tokens.shape[1]


@pytest.fixture(scope="module", params=["mha", "gqa_rope"])
def case(request) -> Case:
    return Case(request.param)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A copy of a reference checkpoint, to be spoiled."""
    return Path(shutil.copytree(VECTORS / "mha" / "reference", tmp_path / "checkpoint"))


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(VECTORS / "mha" / "target").eval()


def rewrite(checkpoint: Path, change) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors")


# ---------------------------------------------------------------------- the same numbers


def test_the_target_gives_the_logits_of_the_reference_vectors(case):
    with torch.no_grad():
        close(case.target(case.input_ids).logits, case.target_logits)
    expected_base = {"mha": 10000.0, "gqa_rope": 500000.0}[case.name]
    assert case.target.config.rope_parameters["rope_theta"] == expected_base


def test_the_config_of_imported_heads_is_that_of_the_reference(case):
    config = case.heads.config
    assert (config.variant, config.num_heads, config.num_augmenting_layers) == ("clover-2", HEADS, 2)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert config.loss_decay == 0.7
    assert config.target_name_or_path == str(case.folder / "target")
    assert case.heads.borrowed.lm_head is case.target.lm_head


@torch.no_grad()
def test_outputs_of_one_pass_equal_those_of_the_reference(case):
    outputs = case.heads(case.pre_norm_hidden, case.next_tokens).head_outputs
    assert outputs.shape == case.head_outputs.shape == (HEADS, 2, case.length, 64)
    for i in range(HEADS):
        valid = case.length - i
        assert case.head_outputs[i, :, :valid].norm(dim=-1).min() > 1
        assert case.head_outputs[i, :, valid:].eq(0).all()
        close(outputs[i], case.head_outputs[i])
        close(case.heads.score(outputs[i, :, :valid]), case.head_logits[i, :, :valid])


@torch.no_grad()
@pytest.mark.parametrize("first", [5, 1, 3])
def test_outputs_through_the_cache_equal_those_of_the_reference(case, first):
    """The reference takes 5 positions at once, then one by one; any other split must give the same."""
    heads, hidden, ids = case.heads, case.pre_norm_hidden, case.input_ids
    cache = TreeCache(heads.config.num_cache_layers)
    state = heads.encode(hidden[:, :first], ids[:, 1 : first + 1], past_key_values=cache)[:, -1]
    cache.finish_filling(2)
    cuts = 0
    for t in range(first - 1, case.length):
        if t >= first:
            with cache.staged(1):
                state = heads.encode(hidden[:, t : t + 1], ids[:, t + 1 : t + 2], past_key_values=cache)[:, -1]
            cache.commit([[0], [0]])
        if t < 4:
            continue
        chained, logits = state, []
        for i in range(HEADS):
            out, chained = heads.step(i, chained, ids[:, t + 1 + i])
            logits.append(heads.score(out))
        close(torch.stack(logits, dim=1), case.cached_logits[:, t - 4])  # [B, K, V]
        cuts += 1
    assert cuts == case.cached_logits.shape[1] == 13


def test_an_imported_checkpoint_is_the_same_after_saving_and_loading(case, tmp_path):
    case.heads.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path).bind(case.target)
    with torch.no_grad():
        close(loaded(case.pre_norm_hidden, case.next_tokens).head_outputs, case.head_outputs)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")


def test_heads_from_the_target_start_as_the_references_do(case):
    """Exactly where the reference copies, and from the same distribution where it draws."""
    heads = CloverHeads.from_target(case.target, "clover-2")
    drawn = {"q.weight", "k.weight", "v.weight", "clover_head_mlp.weight", "clover_head_mlp2.weight"}
    prefixes = {"clover_head_mlp_rnn.": "entry_decoder.", "clover_head_mlp_rnn2.": "decoder."}
    prefixes |= {"clover_norm.": "norm.", "clover_head_norm.": "head_norm."}
    prefixes |= {"clover_head_mlp.": "first_fc.", "clover_head_mlp2.": "fc.0."}
    ours = heads.state_dict()
    theirs = load_file(case.folder / "initialised.safetensors")
    assert len(ours) == len(theirs)
    exact = 0
    for name, tensor in theirs.items():
        prefix = name[: name.index(".") + 1]
        mine = ours[name.replace(prefix, prefixes.get(prefix, prefix)).replace("r.input_layernorm", "r.norm")]
        assert mine.shape == tensor.shape, name
        if name.endswith(tuple(drawn)):
            eye = torch.zeros_like(tensor) if name.endswith("v.weight") else torch.eye(*tensor.shape)
            for noise in (mine - eye, tensor - eye):
                assert 0 <= noise.min() < 1e-4 < 0.0099 < noise.max() <= 0.0100001, name
                assert noise.mean().item() == pytest.approx(0.005, abs=3e-4), name
        else:
            assert torch.equal(mine, tensor), name
            exact += 1
    assert exact == 2 * 9 + 2 + 2 * 4 + 2  # layers, two norms, decoders' norms and biases, biases of the two FC
    assert not torch.equal(heads.entry_decoder.q.weight, heads.decoder.q.weight), "each is drawn by itself"


# ---------------------------------------------------------------------- reading


@pytest.mark.parametrize("name", ["pytorch_model.bin", "clover.pt", "heads.pth"])
def test_a_pickle_is_read_only_when_allowed(checkpoint, target, name):
    torch.save(load_file(checkpoint / "model.safetensors"), checkpoint / name)
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=rf"pickle \({name}\).*allow_pickle=True"):
        CloverHeads.from_reference_checkpoint(checkpoint, target)
    heads = CloverHeads.from_reference_checkpoint(checkpoint, target, allow_pickle=True)
    case = load_file(VECTORS / "mha" / "vectors.safetensors")
    with torch.no_grad():
        close(heads(case["pre_norm_hidden"], case["next_tokens"]).head_outputs, case["head_outputs"])


class Trap:
    """What a pickle may do."""

    def __reduce__(self):
        return (exec, ("raise SystemError('a pickle ran code')",))


def test_code_in_a_pickle_is_never_run(checkpoint, target):
    (checkpoint / "model.safetensors").unlink()
    torch.save({"fc": Trap()}, checkpoint / "pytorch_model.bin")
    with pytest.raises(Exception, match="Weights only load failed"):
        CloverHeads.from_reference_checkpoint(checkpoint, target, allow_pickle=True)


def test_safetensors_are_preferred_to_a_pickle_beside_them(checkpoint, target):
    torch.save({"fc": Trap()}, checkpoint / "pytorch_model.bin")
    CloverHeads.from_reference_checkpoint(checkpoint, target, allow_pickle=True)


def test_a_sharded_checkpoint_is_read_from_a_path_given_as_text(checkpoint, target):
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    names = sorted(tensors)
    for i, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, checkpoint / f"model-0000{i + 1}-of-00002.safetensors")
    heads = CloverHeads.from_reference_checkpoint(str(checkpoint), target)
    assert torch.equal(heads.fc[0].weight, tensors["clover_head_mlp2.weight"])


def test_a_checkpoint_without_the_targets_embeddings_is_read(checkpoint, target):
    names = ("lm_head.weight", "clover_embed_tokens.weight")
    rewrite(checkpoint, lambda tensors: [tensors.pop(name) for name in names])
    heads = CloverHeads.from_reference_checkpoint(checkpoint, target)
    assert heads.config.target_fingerprint is not None
    assert not {*names} & heads.state_dict().keys()


def test_the_checkpoints_dtype_is_kept(checkpoint, target):
    rewrite(checkpoint, lambda tensors: tensors.update({k: v.bfloat16() for k, v in tensors.items()}))
    assert CloverHeads.from_reference_checkpoint(checkpoint, target).dtype == torch.bfloat16


UP = "layers.0.mlp.up"


@pytest.mark.parametrize(
    ("without", "more", "said"),
    [
        ("clover_norm.weight", None, r"does not fit: missing \['norm.weight'\], unexpected \[\]"),
        ("clover_head_mlp_rnn2.v.bias", None, r"does not fit: missing \['decoder.v.bias'\], unexpected \[\]"),
        (f"{UP}_proj.weight", f"{UP}.weight", rf"missing \['{UP}_proj.weight'\], unexpected \['{UP}\."),
        (None, "layers.2.input_layernorm.weight", r"missing \[\], unexpected \['layers.2.input_layernorm.weight'\]"),
        (None, "medusa_head.0.weight", r"tensors that the reference does not have: \['medusa_head.0.weight'\]"),
    ],
)
def test_missing_renamed_and_unknown_tensors_are_refused(checkpoint, target, without, more, said):
    def change(tensors):
        taken = tensors.pop(without) if without else torch.ones(64)
        tensors.update({more: taken} if more else {})

    rewrite(checkpoint, change)
    with pytest.raises(ValueError, match=said):
        CloverHeads.from_reference_checkpoint(checkpoint, target)


def test_a_tensor_of_another_shape_is_refused(checkpoint, target):
    rewrite(checkpoint, lambda tensors: tensors.update({"clover_norm.weight": torch.zeros(3)}))
    with pytest.raises((ValueError, RuntimeError), match=r"norm\.weight"):
        CloverHeads.from_reference_checkpoint(checkpoint, target)


@pytest.mark.parametrize(
    ("name", "said"),
    [("model.safetensors", r"holds no weights: neither \*.safetensors nor"), ("config.json", "config.json")],
)
def test_a_folder_without_weights_or_config_is_refused(checkpoint, target, name, said):
    (checkpoint / name).unlink()
    with pytest.raises(FileNotFoundError, match=said):
        CloverHeads.from_reference_checkpoint(checkpoint, target, allow_pickle=True)


def test_a_config_without_a_clover_section_is_refused(target):
    with pytest.raises(ValueError, match=r'no reference checkpoint: its config\.json has no "clover" section'):
        CloverHeads.from_reference_checkpoint(VECTORS / "mha" / "target", target)


def test_impossible_numbers_in_the_config_are_refused(checkpoint, target):
    config = json.loads((checkpoint / "config.json").read_text())
    config["clover"]["num_heads"] = 10**9
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="num_heads=1000000000"):
        CloverHeads.from_reference_checkpoint(checkpoint, target)


def test_a_checkpoint_for_another_target_is_refused(checkpoint, target):
    other = LlamaForCausalLM.from_pretrained(VECTORS / "gqa_rope" / "target")
    with pytest.raises(ValueError, match=r"made for another target: their vocab_size is 96, that of .* is 80"):
        CloverHeads.from_reference_checkpoint(checkpoint, other)
    same_sizes = LlamaForCausalLM(target.config)
    with pytest.raises(ValueError, match=r"an unnamed target.*fingerprint of its lm_head"):
        CloverHeads.from_reference_checkpoint(checkpoint, same_sizes)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "_name_or_path": "org/its-target"}))
    with pytest.raises(ValueError, match=r"org/its-target.*fingerprint of its lm_head"):
        CloverHeads.from_reference_checkpoint(checkpoint, same_sizes)
    assert CloverHeads.from_reference_checkpoint(checkpoint, target).config.target_name_or_path == "org/its-target"
