"""`CloverHeads` alone: the forward's contract, the cache, ablations, initialisation, saving, compiling."""

import copy
import itertools
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.tiny_llama import stir, tiny_llama
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

import hf_clover
from hf_clover import CloverHeads, TreeCache
from hf_clover.network.blocks import followed, last_place, searched_text, stretches
from hf_clover.network.configuration_clover import VARIANTS
from hf_clover.network.modeling_clover import CloverOutput

SIZE, VOCABULARY, LENGTH = 16, 24, 9
PACKAGE = Path(hf_clover.__file__).parent


def make_target() -> LlamaForCausalLM:
    return tiny_llama(vocab_size=VOCABULARY, hidden_size=SIZE, intermediate_size=20)


def make_heads(target=None, **fields) -> CloverHeads:
    return stir(CloverHeads.from_target(target or make_target(), **fields), 0.3).eval()


def inputs(batch: int = 2, length: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Few different tokens, so that pairs of them come again and heads that recall have something to find."""
    return torch.randn(batch, length, SIZE), torch.randint(3, (batch, length))


# ---------------------------------------------------------------------- the forward's contract


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("length", [1, 2, LENGTH])
def test_outputs_have_their_shapes_and_zeros_at_invalid_positions(variant, length):
    """A text of 1 or 2 tokens ends before most heads begin."""
    heads = make_heads(variant=variant)
    hidden, ids = inputs(length=length)
    out = heads(hidden, ids)
    count = heads.config.num_heads
    assert isinstance(out, CloverOutput)
    assert out.head_outputs.shape == (count, 2, length, SIZE)
    assert out.state.shape == (2, length, SIZE)
    for i, head in enumerate(out.head_outputs):
        last = max(length - i, 0)
        assert head[:, :last].norm(dim=-1).gt(0).all()
        assert head[:, last:].eq(0).all()
    assert heads.score(out.head_outputs).shape == (count, 2, length, VOCABULARY)
    as_tuple = heads(hidden, ids, return_dict=False)
    assert torch.equal(as_tuple[0], out.head_outputs)
    assert torch.equal(as_tuple[1], out.state)


@pytest.mark.parametrize(
    "fields", [*(dict(variant=variant) for variant in VARIANTS), dict(variant="clover-2", regressive=False)], ids=str
)
def test_teacher_forced_heads_see_the_past_and_nothing_else(fields):
    """Head i at position t sees hidden states to t and tokens to input_ids[t + i], which is x[t + i + 1]; without the
    Regressive Connection only those to input_ids[t]."""
    heads = make_heads(**fields)
    hidden, ids = inputs(batch=1)
    before = heads(hidden, ids).head_outputs
    for j in range(LENGTH):
        other_ids, other_hidden = ids.clone(), hidden.clone()
        other_ids[:, j] = (ids[:, j] + 1) % VOCABULARY
        other_hidden[:, j] += 1.0
        new_token, new_hidden = heads(hidden, other_ids).head_outputs, heads(other_hidden, ids).head_outputs
        for i in range(heads.config.num_heads):
            valid = LENGTH - i
            first = max(j - i, 0) if heads.config.regressive else j  # the first position whose head i may see token j
            assert torch.equal(new_token[i, :, :first], before[i, :, :first])
            assert torch.equal(new_hidden[i, :, :j], before[i, :, :j])
            if j < valid:
                assert not torch.allclose(new_hidden[i, :, j], before[i, :, j], atol=1e-4)
            if heads.config.variant != "medusa" and first < valid:
                assert not torch.allclose(new_token[i, :, first], before[i, :, first], atol=1e-5)
        if heads.config.variant == "medusa":
            assert torch.equal(new_token, before)


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_on_the_left_changes_nothing(variant):
    heads = make_heads(variant=variant)
    hidden, ids = inputs(batch=1)
    padding = 3
    padded = torch.cat((torch.randn(1, padding, SIZE), hidden), 1), torch.cat((ids[:, :padding], ids), 1)
    mask = torch.tensor([[0] * padding + [1] * LENGTH])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    alone = heads(hidden, ids).head_outputs
    together = heads(*padded, attention_mask=mask, position_ids=positions).head_outputs
    for i in range(heads.config.num_heads):
        valid = LENGTH - i
        torch.testing.assert_close(
            together[i, :, padding : padding + valid], alone[i, :, :valid], atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_do_not_depend_on_the_memory_layout_of_attention(variant, monkeypatch):
    """CUDA's kernels hand a batch back position by position and not head by head."""
    heads = make_heads(variant=variant)
    mask = torch.tensor([[0] * 3 + [1] * (LENGTH - 3), [1] * LENGTH])
    given = inputs()
    expected = heads(*given, attention_mask=mask).head_outputs
    attend, calls = nn.functional.scaled_dot_product_attention, []

    def by_position(*args, **kwargs):
        calls.append(attend(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2))
        return calls[-1]

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", by_position)
    torch.testing.assert_close(heads(*given, attention_mask=mask).head_outputs, expected)
    assert not any(result.is_contiguous() for result in calls)
    assert bool(calls) == (variant != "medusa")


def test_states_and_tokens_of_different_lengths_are_refused():
    heads = make_heads()
    hidden, ids = inputs()
    with pytest.raises(ValueError, match=r"`input_ids` \(2, 8\) must have one token per position of `hidden_states`"):
        heads(hidden, ids[:, 1:])


# ---------------------------------------------------------------------- one at a time, with the cache


def chain_of(
    heads: CloverHeads, state: torch.Tensor, tokens: torch.Tensor, cache: TreeCache, text: torch.Tensor
) -> torch.Tensor:
    """All heads from what `encode` gave last [B, ...] with the data's own tokens [B, K] -> [K, B, d]. `text` [B, C]:
    the tokens of the cache's columns."""
    count, outputs = heads.config.num_heads, []
    first_state, searched = state, None
    if heads.config.recall:
        values = cache.export(-1, cache.lengths[0])[1]
        searched, runs = searched_text(text, *stretches(None, text, 1))
    for level in range(count):
        told = ()
        if searched is not None:
            runs = followed(searched, runs, tokens[:, level, None])
            told = (heads.recall(values, last_place(runs))[:, 0],)
        out, state = heads.step(level, state, tokens[:, level if heads.config.regressive else 0], *told)
        outputs.append(out)
        assert heads.config.regressive or torch.equal(state, first_state)
    return torch.stack(outputs)


@pytest.mark.parametrize("prefix", [1, 4])
@pytest.mark.parametrize(
    "fields",
    [
        *(dict(variant=variant) for variant in VARIANTS),
        dict(variant="clover-2", regressive=False),
        dict(decoder_position="after"),
        dict(variant="clover", augmenting_block="mlp"),
        dict(qk_norm=True, use_rope=False),
        dict(variant="clover-x", recall=False),
        dict(variant="clover-x", num_key_value_heads=2, num_augmenting_layers=2, num_heads=8, decoder_width=5),
    ],
    ids=str,
)
def test_step_by_step_equals_one_pass(fields, prefix):
    heads = make_heads(**fields)
    count, total = heads.config.num_heads, LENGTH + heads.config.num_heads
    hidden, ids = inputs(length=total)
    with torch.no_grad():
        whole = heads(hidden, ids)
        cache = TreeCache(max(heads.config.num_cache_layers, 1))
        states = heads.encode(hidden[:, :prefix], ids[:, :prefix], past_key_values=cache)
        cache.finish_filling(2)
        for t in range(prefix - 1, LENGTH):
            if t >= prefix:
                with cache.staged(1):
                    states = heads.encode(hidden[:, t : t + 1], ids[:, t : t + 1], past_key_values=cache)
                cache.commit([[0], [0]])
            torch.testing.assert_close(states[:, -1], whole.state[:, t], atol=1e-5, rtol=1e-5)
            chain = chain_of(heads, states[:, -1], ids[:, t : t + count], cache, ids[:, : t + 1])
            torch.testing.assert_close(chain, whole.head_outputs[:, :, t], atol=1e-5, rtol=1e-5)


def test_rejected_entries_of_a_staged_forward_leave_no_trace():
    """Several positions at once, of which a row keeps some: what is dropped is as if it had never been there."""
    heads = make_heads()
    hidden, ids = inputs(batch=1, length=LENGTH)
    with torch.no_grad():
        whole = heads(hidden, ids).state
        cache = TreeCache(heads.config.num_cache_layers)
        heads.encode(hidden[:, :3], ids[:, :3], past_key_values=cache)
        cache.finish_filling(1)
        wrong = (ids[:, 4:6] + 1) % VOCABULARY
        visible = torch.ones(3, 6, dtype=torch.bool).tril(3)[None, None]  # [1, 1, 3 new, 3 + 3]
        with cache.staged(3):
            mixed = torch.cat((ids[:, 3:4], wrong), 1)
            positions = torch.arange(3, 6)[None]
            states = heads.encode(hidden[:, 3:6], mixed, visible, positions, cache)
        cache.commit([[0]])
        torch.testing.assert_close(states[:, 0], whole[:, 3], atol=1e-5, rtol=1e-5)
        assert not torch.allclose(states[:, 1], whole[:, 4], atol=1e-3)
        with cache.staged(1):
            states = heads.encode(hidden[:, 4:5], ids[:, 4:5], past_key_values=cache)
        torch.testing.assert_close(states[:, 0], whole[:, 4], atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------- ablations

SWITCHES = {
    "decoder": ("attention", "mlp", "none"),
    "decoder_position": ("before", "after"),
    "augmenting_block": ("full", "attention", "mlp", "none"),
    "regressive": (True, False),
    "output_projector": ("fc", "residual"),
}
ABLATIONS = [dict(zip(SWITCHES, row), num_heads=3) for row in itertools.product(*SWITCHES.values())]
OTHERS = [
    *(dict(variant=variant) for variant in VARIANTS),
    *(dict(variant=variant, num_heads=1) for variant in VARIANTS),
    dict(num_augmenting_layers=0),
    dict(num_augmenting_layers=3, qk_norm=True, attention_bias=True, attention_output_bias=True, mlp_bias=True),
    dict(use_rope=False),
    dict(variant="clover", normalize_embeddings=False, decoder_bias=True, decoder_activation=None),
    dict(normalize_embeddings=True, decoder_bias=False, decoder_activation="silu", decoder_num_heads=2),
    dict(variant="clover-2", num_heads=1, regressive=False),
    dict(variant="clover-2", num_heads=2, regressive=False),
    dict(variant="clover-2", decoder="gated"),
    dict(variant="clover-2", entry="fc"),
    dict(variant="clover-2", decoder_position="both"),
    dict(variant="clover-2", output_projector="none"),
    dict(variant="clover", decoder="gated", regressive=False),
    dict(variant="medusa", normalize_hidden_states=True),
    dict(decoder="attention"),
    dict(decoder="mlp"),
    dict(decoder_bias=True, decoder_width=5),
    dict(decoder_position="before"),
    dict(decoder_position="after", augmenting_block="none"),
    dict(entry="decoder"),
    dict(recall=False),
    dict(augmenting_block="attention", num_key_value_heads=2),
    dict(output_projector="fc"),
    dict(output_projector="residual"),
]


@pytest.mark.parametrize("fields", [*ABLATIONS, *OTHERS], ids=lambda fields: "-".join(map(str, fields.values())))
def test_every_ablation_runs_and_learns(fields):
    heads = make_heads(**fields)
    hidden, ids = inputs()
    out = heads(hidden, ids).head_outputs
    assert out.isfinite().all()
    logits = heads.score(out)
    (logits * torch.randn_like(logits)).sum().backward()
    for name, parameter in heads.named_parameters():
        assert parameter.requires_grad, name
        assert parameter.grad is not None, f"{name} takes no part"
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 1e-9, f"{name} gets no gradient"
    config = heads.config
    has_decoder, place = config.decoder != "none", config.decoder_position
    assert hasattr(heads, "decoder") == (has_decoder and (config.num_heads > 1 or place != "before"))
    assert hasattr(heads, "entry_decoder") == (has_decoder and place in ("before", "both"))
    assert hasattr(heads, "layers") == (config.augmenting_block != "none" and config.num_augmenting_layers > 0)


# ---------------------------------------------------------------------- initialisation


def test_clover_starts_as_in_the_paper():
    target = make_target()
    heads = CloverHeads.from_target(target, variant="clover")
    for linear in (heads.decoder.q, heads.decoder.k):
        noise = linear.weight - torch.eye(SIZE)
        assert noise.std().item() == pytest.approx(0.01, rel=0.2)
        assert abs(noise.mean()) < 0.003
    assert heads.decoder.v.weight.eq(0).all()
    assert len(heads.residual_blocks) == 3
    assert all(p.eq(0).all() for p in heads.residual_blocks.parameters())
    assert torch.equal(heads.norm.weight, target.model.norm.weight)
    assert len(heads.layers) == 1
    hidden, ids = inputs()
    out = heads(hidden, ids)  # at the start, every head says what the Augmenting Block says
    for i, head in enumerate(out.head_outputs):
        torch.testing.assert_close(head[:, : LENGTH - i], out.state[:, : LENGTH - i])


def make_gpt2() -> GPT2LMHeadModel:
    """Another target: a LayerNorm with a bias before the lm_head."""
    return stir(GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=SIZE, n_layer=2, n_head=4))).eval()


@pytest.mark.parametrize("make", [make_target, make_gpt2])
def test_medusa_starts_as_the_target_itself(make: Callable):
    target = make()
    heads = CloverHeads.from_target(target, variant="medusa")
    assert [p.abs().max().item() for p in heads.parameters()] == [0.0] * 10
    hidden, ids = inputs()
    norm = target.model.norm if make is make_target else target.transformer.ln_f
    expected = target.lm_head(norm(hidden))
    for i, logits in enumerate(heads.score(heads(hidden, ids).head_outputs)):
        torch.testing.assert_close(logits[:, : LENGTH - i], expected[:, : LENGTH - i])


def test_a_seed_gives_the_same_heads():
    target = make_target()
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made.append(CloverHeads.from_target(target, "clover-2").state_dict())
    assert all(torch.equal(tensor, made[1][name]) for name, tensor in made[0].items())
    assert not torch.equal(made[0]["decoder.v.weight"], made[2]["decoder.v.weight"])


# ---------------------------------------------------------------------- saving and loading


def assert_same_heads(loaded: CloverHeads, heads: CloverHeads, target: nn.Module) -> None:
    assert {k: v.dtype for k, v in loaded.state_dict().items()} == {k: v.dtype for k, v in heads.state_dict().items()}
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in heads.state_dict().items())
    hidden, ids = inputs()
    with torch.no_grad():
        assert torch.equal(loaded.bind(target)(hidden, ids).head_outputs, heads(hidden, ids).head_outputs)


@pytest.mark.parametrize("load", [CloverHeads.from_pretrained, AutoModel.from_pretrained], ids=["class", "auto"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_heads_are_the_same_after_saving_and_loading(load, variant, tmp_path):
    target = make_target()
    heads = make_heads(target, variant=variant, draft_vocab_size=10)
    heads.draft_ids.copy_(torch.arange(20, 0, -2))
    heads.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert type(loaded) is CloverHeads
    assert not loaded.training
    assert_same_heads(loaded, heads, target)
    with_info, info = load(tmp_path, output_loading_info=True)
    assert type(with_info) is CloverHeads
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))


def test_a_checkpoint_holds_head_weights_only(tmp_path):
    target = make_target()
    heads = make_heads(target)
    heads(*inputs())  # used, bound
    assert not {p.data_ptr() for p in target.parameters()} & {p.data_ptr() for p in heads.parameters()}
    heads.save_pretrained(tmp_path)
    borrowed = [p for name, p in target.named_parameters() if name.split(".")[0] == "lm_head" or "embed" in name]
    assert len(borrowed) == 2
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == dict(heads.named_parameters()).keys()
    assert not any(t.shape == p.shape for t in tensors.values() for p in borrowed)
    files = {file.name for file in tmp_path.iterdir() if file.suffix not in (".py", ".md")}
    assert files == {"config.json", "generation_config.json", "model.safetensors", "custom_generate"}
    for file in tmp_path.glob("*.py"):  # the code that travels with the weights
        assert file.read_text() == (PACKAGE / "network" / file.name).read_text()
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert auto_map == {"AutoConfig": "configuration_clover.CloverConfig", "AutoModel": "modeling_clover.CloverHeads"}


@pytest.mark.parametrize("load", [CloverHeads.from_pretrained, AutoModel.from_pretrained], ids=["class", "auto"])
def test_heads_load_with_dtype_and_device_map(load, tmp_path):
    target = make_target()
    heads = make_heads(target)
    heads.save_pretrained(tmp_path)
    assert_same_heads(load(tmp_path, device_map="cpu"), heads, target)
    for dtype in (torch.bfloat16, "bfloat16"):
        loaded = load(tmp_path, dtype=dtype)
        assert_same_heads(loaded, copy.deepcopy(heads).to(torch.bfloat16).bind(target), target)
    loaded.save_pretrained(tmp_path / "half")
    assert load(tmp_path / "half").dtype == torch.bfloat16
    assert load(tmp_path / "half", dtype=torch.float32, device_map={"": "cpu"}).dtype == torch.float32


def test_the_generation_config_survives_saving_and_loading(tmp_path):
    heads = make_heads()
    heads.save_pretrained(tmp_path / "default")
    assert AutoModel.from_pretrained(tmp_path / "default").generation_config.num_assistant_tokens is None
    heads.generation_config.num_assistant_tokens = 13
    heads.generation_config.num_assistant_tokens_schedule = "constant"
    heads.save_pretrained(tmp_path / "fixed")
    loaded = AutoModel.from_pretrained(tmp_path / "fixed").generation_config
    assert (loaded.num_assistant_tokens, loaded.num_assistant_tokens_schedule) == (13, "constant")
    (tmp_path / "fixed" / "generation_config.json").unlink()
    assert AutoModel.from_pretrained(tmp_path / "fixed").generation_config.num_assistant_tokens is None


FRESH_PROCESS = """
import sys

sys.modules["hf_clover"] = None  # to import it is an error
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

folder = sys.argv[1]
heads = AutoModel.from_pretrained(f"{folder}/heads", trust_remote_code=True)
target = AutoModelForCausalLM.from_pretrained(f"{folder}/target")
given = load_file(f"{folder}/given.safetensors")
with torch.no_grad():
    out = heads.bind(target)(given["hidden"], given["ids"]).head_outputs
assert [name for name in sys.modules if name.partition(".")[0] == "hf_clover"] == ["hf_clover"]
assert type(heads).__module__.startswith("transformers_modules"), type(heads)
assert heads.config.model_type == "clover" and heads.config.variant == "clover-x"
assert heads.generation_config.num_assistant_tokens == 7
torch.testing.assert_close(out, given["out"], atol=1e-6, rtol=1e-6)
assert AutoConfig.from_pretrained(f"{folder}/heads", trust_remote_code=True).num_heads == 5
with pytest.raises(ImportError, match="pip install hf-clover"):
    type(heads).from_target(target)
with pytest.raises(ValueError, match="trust_remote_code"):  # code of a repository must be trusted first
    AutoModel.from_pretrained(f"{folder}/heads", trust_remote_code=False)
heads.save_pretrained(f"{folder}/again")
again = AutoModel.from_pretrained(f"{folder}/again", trust_remote_code=True)
assert all(torch.equal(t, again.state_dict()[n]) for n, t in heads.state_dict().items())
print("all of it")
"""


@pytest.mark.long("hf_clover/network", "hf_clover/hub", "hf_clover/__init__.py")
def test_remote_code_works_in_a_process_without_the_package(tmp_path):
    target = make_target()
    heads = make_heads(target)
    heads.generation_config.num_assistant_tokens = 7
    heads.save_pretrained(tmp_path / "heads")
    target.save_pretrained(tmp_path / "target")
    hidden, ids = inputs()
    with torch.no_grad():
        given = {"hidden": hidden, "ids": ids, "out": heads(hidden, ids).head_outputs.contiguous()}
    save_file(given, tmp_path / "given.safetensors")
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-I", "-c", FRESH_PROCESS, str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    assert process.stdout.strip().endswith("all of it"), process.stderr


# ---------------------------------------------------------------------- copies, dtypes, compilation


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copied_and_pickled_heads_hold_nothing_of_the_target(clone):
    target = make_target()
    heads = make_heads(target)
    other = clone(heads)
    assert other._borrowed is None
    assert heads.borrowed.lm_head is target.lm_head
    assert not {p.data_ptr() for p in other.parameters()} & {p.data_ptr() for p in heads.parameters()}
    with pytest.raises(RuntimeError, match=r"not bound to a target: call `heads.bind\(target\)` first"):
        other(*inputs())
    assert_same_heads(other, heads, target)
    target.lm_head.huge = torch.zeros(1 << 20)
    assert len(pickle.dumps(heads)) < 1 << 20


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("make", [make_target, make_gpt2])
def test_heads_in_another_dtype_differ_by_rounding_only_and_new_ones_have_the_targets(make, variant):
    target = make()
    heads = make_heads(target, variant=variant)
    hidden, ids = inputs()
    exact = heads(hidden, ids).head_outputs
    assert heads.to(torch.float64)(hidden, ids).head_outputs.dtype == torch.float64
    torch.testing.assert_close(heads(hidden, ids).head_outputs.float(), exact, atol=1e-4, rtol=1e-4)
    half = heads.to(torch.bfloat16)(hidden.to(torch.bfloat16), ids).head_outputs
    assert half.dtype == torch.bfloat16
    assert (half - exact).norm() < 0.05 * exact.norm()
    assert heads.score(half).dtype == torch.float32  # the target's
    made = CloverHeads.from_target(target.to(torch.bfloat16), variant=variant)
    out = made(hidden.to(torch.bfloat16), ids).head_outputs
    assert made.dtype == out.dtype == made.score(out).dtype == torch.bfloat16


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_compiled_forward_equals_eager_in_values_and_gradients(variant):
    """One graph without breaks. It is in float64, in which another order of sums, as on another processor, changes
    less than a mistake does."""
    heads = make_heads(variant=variant, num_heads=2).double()
    hidden, ids = inputs()
    hidden = hidden.double()
    torch._dynamo.reset()
    compiled = torch.compile(heads, backend="eager", fullgraph=True)
    gradients = []
    for model in (heads, compiled):
        heads.zero_grad()
        out = model(hidden, ids).head_outputs
        out.sum().backward()
        gradients.append((out.detach(), {name: p.grad.clone() for name, p in heads.named_parameters()}))
    (eager_out, eager), (out, actual) = gradients
    torch.testing.assert_close(out, eager_out)
    for name, gradient in eager.items():
        torch.testing.assert_close(actual[name], gradient)


# ---------------------------------------------------------------------- the draft vocabulary


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_draft_vocabulary_scores_only_its_ids(variant):
    target = make_target()
    heads = make_heads(target, variant=variant, draft_vocab_size=5)
    hidden, ids = inputs()
    assert heads.draft_ids.tolist() == [0, 1, 2, 3, 4]
    chosen = torch.tensor([23, 2, 7, 11, 0])
    heads.draft_ids.copy_(chosen)
    heads.bind(target)
    assert torch.equal(heads.borrowed.draft_rows[0], target.lm_head.weight[chosen])  # the others cost nothing
    x = heads(hidden, ids).head_outputs
    full = target.lm_head(x)
    assert heads.score(x).shape == (heads.config.num_heads, 2, LENGTH, 5)
    torch.testing.assert_close(heads.score(x), full[..., chosen])
    heads.borrowed.draft_rows = None  # an lm_head without readable rows
    torch.testing.assert_close(heads.score(x), full[..., chosen])


def test_a_draft_vocabulary_keeps_bias_scale_and_soft_cap_of_the_lm_head():
    target = make_target()
    target.lm_head = stir(nn.Linear(SIZE, VOCABULARY, bias=True), 0.3)
    heads = make_heads(target, draft_vocab_size=4)
    heads.borrowed.logit_scale, heads.borrowed.logit_softcap = 0.5, 2.0
    x = torch.randn(3, SIZE)
    expected = 2.0 * torch.tanh(0.5 * target.lm_head(x) / 2.0)
    torch.testing.assert_close(heads.score(x), expected[:, :4])


def test_embeddings_are_normalised_or_scaled_as_configured():
    target = make_target()
    ids = torch.arange(VOCABULARY)
    rows = make_heads(target, variant="clover-2").embed(ids)
    assert torch.equal(rows, target.lm_head.weight)
    torch.testing.assert_close(make_heads(target, variant="clover-2", embedding_scale=3.0).embed(ids), 3 * rows)
    normalised = make_heads(target, variant="clover-2", normalize_embeddings=True).embed(ids)
    torch.testing.assert_close(normalised, rows / rows.norm(dim=-1, keepdim=True))
