"""clover-x: what it computes, how it starts in balance whatever the target's sizes, and that it changes no token."""

import pytest
import torch
from fitting import fit
from oracle import planted
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from zoo import build, ragged_batch

from hf_clover import CloverConfig, CloverHeads
from hf_clover.cards import render
from hf_clover.configuration_clover import VARIANTS
from hf_clover.decoding.verify import capture_before_final_norm
from hf_clover.last_layer import LastLayer
from hf_clover.scales import embedding_scale, final_norm_ratio
from hf_clover.target_parts import find_decoder

SIZE, VOCABULARY = 32, 24


@torch.no_grad()
def make_target(embedding_rms: float = 0.5, state_rms: float = 1.0, **fields) -> LlamaForCausalLM:
    """A target whose lm_head has rows of one size and whose residual stream is of another."""
    sizes = dict(vocab_size=VOCABULARY, hidden_size=SIZE, intermediate_size=40, num_hidden_layers=2)
    config = LlamaConfig(**{**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, **fields})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = LlamaForCausalLM(config).eval()
        for layer in target.model.layers:
            for parameter in layer.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
            for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
                last.weight.mul_(state_rms)
        target.model.embed_tokens.weight.normal_(0.0, state_rms)
        target.model.norm.weight.uniform_(0.5, 1.5)
        target.lm_head.weight.normal_(0.0, embedding_rms)
    return target


@torch.no_grad()
def stirred(heads: CloverHeads, noise: float = 0.1) -> CloverHeads:
    generator = torch.Generator().manual_seed(1)
    for parameter in heads.parameters():
        parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return heads.eval()


def rms(x: torch.Tensor) -> float:
    return x.float().pow(2).mean().sqrt().item()


def states_of(target: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    captured: list[torch.Tensor] = []
    with torch.no_grad(), capture_before_final_norm(target, captured):
        target(input_ids=ids, use_cache=False)
    return captured[0]


# ---------------------------------------------------------------------- what it computes


@torch.no_grad()
def test_the_network_in_plain_tensor_operations():
    """Norm, projector, block, and for every head one gated layer of state and token, all heads with one set of
    weights."""
    target = make_target()
    heads = stirred(CloverHeads.from_target(target, "clover-x", num_heads=4))
    hidden, ids = torch.randn(2, 9, SIZE), torch.randint(VOCABULARY, (2, 9))
    out = heads(hidden, ids)

    embedded = F.embedding(ids, target.lm_head.weight * heads.config.embedding_scale)  # [B, T, d]
    fc, cell = heads.entry_decoder.fc, heads.decoder
    x = fc.weight @ torch.cat((target.model.norm(hidden), embedded), -1)[..., None]  # [B, T, d, 1]
    x = x[..., 0] + fc.bias
    rope = heads.rotary_emb(x, torch.arange(9)[None])
    for layer in heads.layers:
        x = layer(x, rope, None, None)
    state = heads.norm(x)  # [B, T, d]
    torch.testing.assert_close(out.state, state, atol=1e-5, rtol=1e-5)
    width = heads.config.decoder_width
    gate, up = cell.gate_up.weight[:width], cell.gate_up.weight[width:]
    for level in range(4):
        seen = torch.cat((cell.norm(state), embedded[:, level:]), -1)  # [B, T - level, 2 d]
        state = state + (F.silu(seen @ gate.T) * (seen @ up.T)) @ cell.down.weight.T
        expected = heads.head_norm(state)
        torch.testing.assert_close(out.head_outputs[level, :, : 9 - level], expected, atol=1e-5, rtol=1e-5)
        state = state[:, :-1]


@torch.no_grad()
def test_head_0_is_given_the_token_as_the_others_are():
    heads = stirred(CloverHeads.from_target(make_target(), "clover-x"))
    state = torch.randn(1, SIZE).expand(2, SIZE)
    tokens = torch.tensor([3, 7])
    for level in range(2):
        out, following = heads.step(level, state, tokens)
        assert not torch.allclose(out[0], out[1], atol=1e-3)
        assert not torch.allclose(following[0], following[1], atol=1e-3)


def test_the_cell_starts_as_nothing():
    """So that the heads start from what the block says, and a badly scaled start cannot drown it."""
    heads = CloverHeads.from_target(make_target(), "clover-x")
    state = torch.randn(3, SIZE)
    out, following = heads.step(0, state, torch.tensor([1, 2, 3]))
    assert torch.equal(following, state)
    assert torch.equal(out, heads.head_norm(state))
    # What goes into the cell is of size 1, and so is what its first product gives.
    seen = torch.cat((heads.decoder.norm(state), heads.embed(torch.tensor([1, 2, 3]))), -1)
    assert rms(heads.decoder.gate_up(seen)) == pytest.approx(1.0, rel=0.3)


def test_trees_grow_deeper_than_the_heads_that_were_trained():
    config = CloverConfig(variant="clover-x", vocab_size=VOCABULARY, hidden_size=SIZE, num_attention_heads=4)
    assert config.can_draft_beyond_heads
    target = make_target()
    heads = stirred(CloverHeads.from_target(target, "clover-x", num_heads=3, draft_depth=6))
    ids = torch.tensor([[1, 2, 3]])
    plain = target.generate(ids, max_new_tokens=20, do_sample=False)
    with planted(plain, ids.shape[1]):
        out = target.generate(
            ids, assistant_model=heads, max_new_tokens=20, do_sample=False, num_assistant_tokens=6,
            num_assistant_tokens_schedule="constant", return_dict_in_generate=True,
        )  # fmt: skip
    assert torch.equal(out.sequences, plain)
    assert len(out.speculation.accepted_by_depth) > heads.config.num_heads


# ---------------------------------------------------------------------- in balance


@pytest.mark.parametrize("state_rms", [0.05, 1.0, 30.0])
@pytest.mark.parametrize("embedding_rms", [0.002, 0.02, 5.0])
@torch.no_grad()
def test_every_target_gives_inputs_of_the_same_size(embedding_rms, state_rms):
    """The states' size is that of the target's final norm, the embeddings' is 1, and what the copied layers add to
    the stream stands in the same proportion to it as in the target."""
    target = make_target(embedding_rms, state_rms)
    heads = CloverHeads.from_target(target, "clover-x")
    ids = torch.randint(VOCABULARY, (4, 12))
    assert rms(heads.embed(ids)) == pytest.approx(1.0, rel=0.2)
    hidden = states_of(target, ids)
    entered = heads.entry_decoder(target.model.norm(hidden), torch.zeros(4, 12, SIZE))
    torch.testing.assert_close(entered, target.model.norm(hidden))

    ratio = rms(target.model.norm(hidden)) / rms(hidden)
    assert final_norm_ratio(target) == pytest.approx(ratio, rel=0.3)
    theirs, ours = target.model.layers[-1], heads.layers[0]
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        change = ours.get_submodule(name).weight / theirs.get_submodule(name).weight
        torch.testing.assert_close(change, torch.full_like(change, final_norm_ratio(target)))
    torch.testing.assert_close(ours.self_attn.q_proj.weight, theirs.self_attn.q_proj.weight)


def test_scales_are_in_the_config_and_come_back(tmp_path):
    target = make_target(embedding_rms=0.02)
    heads = CloverHeads.from_target(target, "clover-x")
    assert heads.config.embedding_scale == pytest.approx(50, rel=0.2)
    heads.save_pretrained(tmp_path)
    again = CloverHeads.from_pretrained(tmp_path).bind(target)
    ids = torch.arange(VOCABULARY)
    assert torch.equal(again.embed(ids), heads.embed(ids))
    assert CloverHeads.from_target(target, "clover-x", embedding_scale=2.0).config.embedding_scale == 2.0


@pytest.mark.parametrize("variant", ["clover-2", "clover", "medusa"])
def test_the_papers_take_everything_as_it_is(variant):
    target = make_target(embedding_rms=0.02, state_rms=30.0)
    heads = CloverHeads.from_target(target, variant)
    assert (heads.config.embedding_scale, heads.config.normalize_hidden_states) == (1.0, False)
    for layer in getattr(heads, "layers", ()):
        assert torch.equal(layer.mlp.down_proj.weight, target.model.layers[-1].mlp.down_proj.weight)


def test_rows_that_no_token_uses_do_not_count():
    rows = torch.randn(100, SIZE) * 0.02
    rows[60:] = 0
    assert embedding_scale(rows) == pytest.approx(50, rel=0.1)
    assert embedding_scale(torch.zeros(4, SIZE)) == 1.0


@torch.no_grad()
def test_a_first_token_that_drowns_all_else_does_not_count():
    """As in many large targets, whose first position holds values of hundreds."""
    target = make_target()
    expected = final_norm_ratio(target)

    def swell(_, __, output):
        output[:, 0] *= 1000
        return output

    target.model.layers[-1].register_forward_hook(swell)
    assert final_norm_ratio(target) == pytest.approx(expected, rel=0.2)


def test_a_target_that_cannot_be_measured_starts_as_it_is(monkeypatch):
    target = make_target()

    def broken(*args, **kwargs):
        raise RuntimeError("wants pictures")

    monkeypatch.setattr(LlamaForCausalLM, "forward", broken)
    target.train().lm_head.eval()
    assert final_norm_ratio(target) == 1.0
    assert (target.training, target.lm_head.training) == (True, False)
    assert not target.model.norm._forward_hooks
    monkeypatch.undo()
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=SIZE, n_layer=1, n_head=2))
    gpt2.transformer.ln_f = nn.Identity()
    assert final_norm_ratio(gpt2) == pytest.approx(1.0)


@torch.no_grad()
def test_targets_with_other_norms():
    """LayerNorm, which takes the mean away too."""
    target = build("gpt2", vocab_size=VOCABULARY)
    heads = CloverHeads.from_target(target, "clover-x").eval()
    _, _, norm = find_decoder(target)
    hidden, ids = torch.randn(1, 5, 64), torch.randint(1, VOCABULARY, (1, 5))
    x = heads.entry_decoder(norm(hidden), heads.embed(ids))
    rope = heads.rotary_emb(x, torch.arange(5)[None])
    for layer in heads.layers:
        x = layer(x, rope, None, None)
    torch.testing.assert_close(heads.encode(hidden, ids), heads.norm(x))


def test_what_the_layers_add_is_scaled_and_what_they_read_is_not():
    """The factor is in the copy alone: the target's own layer, and what was read of it, stay as they were."""
    target = make_target()
    source, before = LastLayer(target), target.model.layers[-1].mlp.down_proj.weight.clone()
    heads = CloverHeads.from_target(target, "clover-2")
    source.copy_into(heads, 0.5)
    torch.testing.assert_close(heads.layers[1].mlp.down_proj.weight, 0.5 * before)
    source.copy_into(heads)
    assert torch.equal(heads.layers[1].mlp.down_proj.weight, before)
    assert torch.equal(target.model.layers[-1].mlp.down_proj.weight, before)


# ---------------------------------------------------------------------- no token is changed


@pytest.fixture(scope="module")
def target():
    return build("llama", vocab_size=16)


@pytest.fixture(scope="module")
def heads(target):
    return fit(CloverHeads.from_target(target, "clover-x"), target)


@pytest.mark.parametrize("tree", ["global", "levels", "chain"])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("lengths", [(7,), (5, 9, 3)], ids=["one", "ragged"])
def test_the_tokens_are_plain_generates(target, heads, lengths, do_sample, tree):
    inputs, options = ragged_batch(16, lengths), dict(max_new_tokens=20, do_sample=do_sample, pad_token_id=0)
    torch.manual_seed(3)
    plain = target.generate(**inputs, **options)
    heads.config.draft_tree = tree
    for plant in (True, False):
        torch.manual_seed(3)
        with planted(plain, inputs["input_ids"].shape[1]) if plant else torch.no_grad():
            ours = target.generate(
                **inputs, **options, assistant_model=heads, num_assistant_tokens=8, return_dict_in_generate=True,
                num_assistant_tokens_schedule="constant",
            )  # fmt: skip
        assert torch.equal(ours.sequences, plain)
        assert ours.speculation.accepted_tokens > 0 or (do_sample and not plant)


def test_the_automatic_budget_and_a_draft_vocabulary(target):
    heads = CloverHeads.from_target(target, "clover-x", draft_vocab_size=9)
    inputs = ragged_batch(16, (7,))
    plain = target.generate(**inputs, max_new_tokens=24, do_sample=False)
    for options in ({}, {"num_assistant_tokens": 6, "num_assistant_tokens_schedule": "constant"}):
        with planted(plain, inputs["input_ids"].shape[1]):
            ours = target.generate(
                **inputs, max_new_tokens=24, do_sample=False, assistant_model=heads, return_dict_in_generate=True,
                **options,
            )  # fmt: skip
        assert torch.equal(ours.sequences, plain)
        assert ours.speculation.accepted_tokens > 0


# ---------------------------------------------------------------------- what is said of it


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_card_says_where_the_heads_come_from(variant):
    text = str(render("heads", "org/name", config={"variant": variant, "num_heads": 3}))
    kind = text.split("They are heads of the kind ")[1].split(", made")[0]
    assert variant in kind
    assert "https://huggingface.co/papers/2" in kind
    assert ("of the family of" in kind) == (variant == "clover-x")
