"""Heads made from a target: what is borrowed is the target's, what is copied computes what the target's layer does."""

import copy
import logging
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import transformers
from helpers.quantised import Float8, FourBit, quantise
from helpers.tiny_llama import SIZES, stir, tiny_llama
from helpers.zoo import ZOO, build
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from hf_clover import CloverHeads
from hf_clover.network.configuration_clover import VARIANTS
from hf_clover.network.modeling_clover import CloverRMSNorm
from hf_clover.network.target_parts import find_decoder, fingerprint, unwrap
from hf_clover.origins.last_layer import copy_norm
from hf_clover.targets.hidden_states import capture_states

VOCABULARY = 32
TREE_TARGETS = [name for name, case in ZOO.items() if case.route == "tree"]

# Which halves of the last layer are Llama's; every other target of the zoo starts fresh in both.
COPIED = {
    **dict.fromkeys(("llama", "llama_bias", "llama_tied", "qwen2", "qwen2_window", "qwen3"), ("attention", "MLP")),
    **dict.fromkeys(("smollm3", "mistral", "phi3", "granite"), ("attention", "MLP")),
    **dict.fromkeys(("mixtral", "qwen3_moe", "llama4"), ("attention",)),
}

LONGCAT = dict(
    **dict(vocab_size=VOCABULARY, hidden_size=32, ffn_hidden_size=40, num_layers=1, num_attention_heads=2),
    **dict(kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16, head_dim=8),
    **dict(n_routed_experts=2, zero_expert_num=1, moe_topk=2, expert_ffn_hidden_size=16),
)


@pytest.fixture
def log(caplog):
    """The log lines of the package, those said once per process among them."""
    transformers_logging.warning_once.cache_clear()
    caplog.set_level(logging.INFO, logger="hf_clover")
    return caplog


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, shape)


def make_llama(**fields) -> LlamaForCausalLM:
    return tiny_llama(vocab_size=VOCABULARY, **fields)


def said(log, words: str = "") -> list[str]:
    return [record.getMessage() for record in log.records if words in record.getMessage()]


def has_hooks(model: nn.Module) -> bool:
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# ---------------------------------------------------------------------- what is borrowed


def check_the_logits(model: nn.Module, heads: CloverHeads, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is borrowed gives the target's own logits from captured states -> normed states and logits."""
    captured = []
    with torch.no_grad(), capture_states(unwrap(model), captured):
        logits = model(input_ids=ids).logits
    assert len(captured) == 1
    normed = heads.borrowed.norm(captured[0])
    torch.testing.assert_close(heads.score(normed), logits, atol=1e-5, rtol=1e-5)
    return normed, logits


@pytest.mark.parametrize("name", TREE_TARGETS)
def test_borrowed_parts_give_the_targets_own_logits(name):
    """Final norm, lm_head, logit scale and soft cap, and the place where hidden states are taken from."""
    model = build(name, vocab_size=VOCABULARY)
    normed, logits = check_the_logits(model, CloverHeads.from_target(model), random_ids(2, 9))
    config = model.config
    has_scale = getattr(config, "logit_scale", 1.0) != 1.0 or getattr(config, "logits_scaling", 1.0) != 1.0
    has_cap = getattr(config, "final_logit_softcapping", None) is not None
    assert torch.allclose(model.get_output_embeddings()(normed), logits, atol=1e-4) != (has_scale or has_cap)
    assert (has_scale or has_cap) == (name in ("granite", "gemma2"))


@pytest.mark.parametrize("name", TREE_TARGETS)
def test_every_variant_can_be_made_for_every_target_and_changes_nothing_in_it(name):
    model = build(name, vocab_size=VOCABULARY)
    before = copy.deepcopy(model.state_dict())
    for variant in VARIANTS:
        heads = CloverHeads.from_target(model, variant=variant)
        config = heads.config
        assert (config.variant, config.vocab_size, config.hidden_size) == (variant, VOCABULARY, 64)
        assert config.target_fingerprint == fingerprint(model.get_output_embeddings().weight)
        out = heads(torch.randn(1, 7, 64), random_ids(1, 7)).head_outputs
        assert out.isfinite().all()
        assert heads.score(out).shape == (config.num_heads, 1, 7, VOCABULARY)
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert not has_hooks(model)


@pytest.mark.parametrize("ids", [(1, 2, 3), (None, [4, 5], None), (None, None, None)])
def test_special_tokens_are_the_targets(ids, tmp_path):
    fields = dict(zip(("bos_token_id", "eos_token_id", "pad_token_id"), ids, strict=True))
    heads = CloverHeads.from_target(make_llama(**fields))
    heads.save_pretrained(tmp_path)
    for config in (heads.config, CloverHeads.from_pretrained(tmp_path).config):
        assert {name: getattr(config, name) for name in fields} == fields
    older = CloverHeads.config_class()
    assert (older.bos_token_id, older.eos_token_id, older.pad_token_id) == (None, None, None)


def test_config_fields_are_keywords_of_from_target():
    heads = CloverHeads.from_target(make_llama(), num_heads=2, output_projector="residual", draft_tree="levels")
    assert (heads.config.num_heads, heads.config.draft_tree) == (2, "levels")
    assert len(heads.residual_blocks) == 2
    with pytest.raises(ValueError, match="variant='clover-9'"):
        CloverHeads.from_target(make_llama(), variant="clover-9")


def test_the_config_names_the_target_and_its_revision(tmp_path):
    make_llama().save_pretrained(tmp_path / "target")
    target = LlamaForCausalLM.from_pretrained(tmp_path / "target")
    target.config._commit_hash = "abc"
    config = CloverHeads.from_target(target).config
    assert config.target_name_or_path == str(tmp_path / "target")
    assert config.target_revision == "abc"


def test_heads_of_a_target_with_tied_embeddings_survive_saving(tmp_path):
    target = make_llama(tie_word_embeddings=True)
    assert target.lm_head.weight is target.model.embed_tokens.weight
    heads = CloverHeads.from_target(target)
    assert torch.equal(heads.borrowed.embedding, target.model.embed_tokens.weight)
    heads.save_pretrained(tmp_path)
    again = CloverHeads.from_pretrained(tmp_path).bind(target)
    ids = random_ids(1, 5)
    assert torch.equal(again.embed(ids), target.lm_head.weight[ids] * heads.config.embedding_scale)
    assert again.score(torch.eye(32)).equal(target.lm_head(torch.eye(32)))


def test_heads_of_vision_language_targets_give_the_targets_logits():
    text = dict(SIZES, vocab_size=VOCABULARY, head_dim=8)
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    vision |= dict(image_size=8, patch_size=4)
    parts = dict(text_config=transformers.Gemma3TextConfig(**text), vision_config=vision, image_token_id=31)
    gemma = transformers.Gemma3Config(**parts, mm_tokens_per_image=4)
    parts |= dict(
        text_config=transformers.LlamaConfig(**text), vision_config=dict(vision, model_type="clip_vision_model")
    )
    for config in (gemma, transformers.LlavaConfig(**parts)):
        target = transformers.AutoModelForImageTextToText.from_config(config).eval()
        check_the_logits(target, CloverHeads.from_target(target), random_ids(1, 5) % 30)


# ---------------------------------------------------------------------- what is copied


def last_layer(model: nn.Module) -> nn.Module:
    return find_decoder(unwrap(model))[1][-1]


def what_the_last_layer_does(model: nn.Module, ids: torch.Tensor) -> SimpleNamespace:
    """Its input, what stands between attention and MLP, its output."""
    layer, seen = last_layer(model), SimpleNamespace()
    with (
        torch.no_grad(),
        layer.register_forward_pre_hook(lambda _, args: setattr(seen, "before", args[0])),
        layer.post_attention_layernorm.register_forward_pre_hook(lambda _, args: setattr(seen, "between", args[0])),
        layer.register_forward_hook(lambda _, __, out: setattr(seen, "after", out[0] if type(out) is tuple else out)),
    ):
        model(input_ids=ids, use_cache=False)
    return seen


def check_the_copies(model: nn.Module, heads: CloverHeads, copied: tuple[str, ...], length: int = 6) -> None:
    """Each half that is copied computes, from the same input, what the target's does: alone and with the other."""
    seen = what_the_last_layer_does(model, random_ids(2, length))
    rope = heads.rotary_emb(seen.before, torch.arange(length)[None])
    for layer in heads.layers:
        with torch.no_grad():
            between = seen.before + layer.self_attn(layer.input_layernorm(seen.before), rope, None, None)[0]
            after = seen.between + layer.mlp(layer.post_attention_layernorm(seen.between))
            whole = layer(seen.before, rope, None, None)[0]
        for half, actual, expected, before in (
            ("attention", between, seen.between, seen.before),
            ("MLP", after, seen.after, seen.between),
        ):
            added = (expected - before).norm()
            assert added > 0.1, "the half must do something"
            if half in copied:
                assert (actual - expected).norm() < 1e-5 * added
            else:
                assert (actual - expected).norm() > 0.3 * added
        if copied == ("attention", "MLP"):
            assert (whole - seen.after).norm() < 1e-5 * (seen.after - seen.before).norm()


def check_that_the_final_norm_is_copied(model: nn.Module, heads: CloverHeads) -> None:
    """In scale: what is left out of a LayerNorm is its mean and its bias."""
    norm = find_decoder(model)[2]
    for ours in (heads.norm, heads.head_norm):
        x = torch.randn(5, 64)
        x = (x - x.mean(-1, keepdim=True)) / x.var(-1, keepdim=True, correction=0).sqrt()
        with torch.no_grad():
            torch.testing.assert_close(ours(x), (norm(x) - norm(-x)) / 2, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", COPIED)
def test_copied_halves_of_a_layer_and_the_final_norm_compute_what_the_targets_do(name, log):
    model = build(name, vocab_size=VOCABULARY)
    heads = CloverHeads.from_target(model, "clover-2")
    check_the_copies(model, heads, COPIED[name])
    check_that_the_final_norm_is_copied(model, heads)
    fresh = {"attention", "MLP"} - set(COPIED[name])
    lines = said(log, "starts fresh")
    assert len(lines) == bool(fresh)
    for half in fresh:
        assert f"{half} (" in lines[0]
        assert type(model).__name__ in lines[0]


@pytest.mark.parametrize("name", [name for name in TREE_TARGETS if name not in COPIED])
def test_a_layer_that_does_not_correspond_starts_fresh_and_is_named(name, log):
    """Parallel blocks, MLA, sinks, other norms or rotary embeddings: a random start, and one line that says so."""
    model = build(name, vocab_size=VOCABULARY)
    heads = CloverHeads.from_target(model, "clover-2", num_augmenting_layers=2)
    (line,) = said(log, "starts fresh")
    assert "attention (" in line
    assert "MLP (" in line
    assert len(heads.layers) == 2
    for layer in heads.layers:
        for linear in layer.modules():
            if isinstance(linear, nn.Linear):
                assert linear.weight.std().item() == pytest.approx(0.02, rel=0.1)
        assert layer.input_layernorm.weight.eq(1).all()
        assert layer.post_attention_layernorm.weight.eq(1).all()
    check_that_the_final_norm_is_copied(model, heads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "llama_bias", "llama_tied", "qwen2", "qwen3", "mistral", "smollm3"])
def test_copied_weights_equal_those_of_the_last_layer(name, dtype):
    model = build(name, vocab_size=VOCABULARY, dtype=dtype)
    heads = CloverHeads.from_target(model, "clover-2")
    assert heads.dtype == dtype
    theirs = last_layer(model).state_dict()
    for layer in heads.layers:
        ours = layer.state_dict()
        assert theirs.keys() <= ours.keys()
        assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items())
        extra = ours.keys() - theirs.keys()
        assert extra == ({"self_attn.o_proj.bias"} if name == "qwen2" else set()) & extra
        assert all(ours[key].eq(0).all() for key in extra)
    config = heads.config
    assert config.attention_bias == ("self_attn.q_proj.bias" in theirs) == (name in ("llama_bias", "qwen2"))
    assert config.mlp_bias == ("mlp.up_proj.bias" in theirs) == (name == "llama_bias")
    assert config.qk_norm == ("self_attn.q_norm.weight" in theirs) == (name == "qwen3")
    assert config.use_rope == (name != "smollm3")
    assert config.num_key_value_heads == model.config.num_key_value_heads == 2


LLAMA_3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)


@pytest.mark.parametrize("rope", [{}, {"rope_type": "linear", "factor": 4.0}, {"rope_type": "llama3", **LLAMA_3}])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_rotary_embeddings_and_grouped_query_attention_are_the_targets(rope, kv_heads):
    rope = {"rope_type": "default", "rope_theta": 500000.0, **rope}
    model = make_llama(rope_parameters=rope, num_key_value_heads=kv_heads, head_dim=6, hidden_size=64)
    heads = CloverHeads.from_target(model, "clover-2")
    assert (heads.config.num_key_value_heads, heads.config.head_dim) == (kv_heads, 6)
    check_the_copies(model, heads, ("attention", "MLP"), length=40)


def test_the_decoder_is_found_where_a_layer_counts_as_two():
    """Only the lists inside such a layer are as long as the config's number of layers."""
    target = transformers.LongcatFlashForCausalLM(transformers.LongcatFlashConfig(**LONGCAT)).eval()
    decoder, layers, norm = find_decoder(target)
    assert (decoder, layers, norm) == (target.model, target.model.layers, target.model.norm)
    heads = CloverHeads.from_target(target)
    out = target.generate(random_ids(1, 4), max_new_tokens=8, assistant_model=heads, return_dict_in_generate=True)
    assert out.speculation.method == "tree"


@pytest.mark.parametrize("eps", [1e-12, 1.0])
def test_the_epsilon_of_the_norms_is_taken_from_the_target(eps):
    """1.0 is what targets in transformers' own tests have."""
    assert CloverHeads.from_target(make_llama(rms_norm_eps=eps)).config.rms_norm_eps == eps


def test_norms_that_multiply_by_one_plus_their_weight_are_copied():
    sizes = dict(SIZES, hidden_size=64, num_key_value_heads=1, head_dim=8)
    model = stir(transformers.GemmaForCausalLM(transformers.GemmaConfig(vocab_size=VOCABULARY, **sizes))).eval()
    heads = CloverHeads.from_target(model, "clover-2")
    check_the_copies(model, heads, ("attention", "MLP"))
    assert torch.equal(heads.norm.weight, 1 + model.model.norm.weight)
    check_that_the_final_norm_is_copied(model, heads)


def test_the_scale_of_a_layer_norm_is_copied_despite_outliers_in_its_bias():
    norm = stir(nn.LayerNorm(64))
    norm.bias.data[60] = 10.0
    ours = CloverRMSNorm(64, 1e-5)
    copy_norm(norm, ours)
    assert torch.equal(ours.weight, norm.weight)


@pytest.mark.parametrize(
    ("name", "fields", "fresh"),
    [
        ("qwen3", dict(qk_norm=False), "attention"),
        ("llama_bias", dict(attention_bias=False), "attention"),
        ("llama", dict(num_attention_heads=8), "attention"),
        ("llama", dict(intermediate_size=50), "MLP"),
        ("llama_bias", dict(mlp_bias=False), "MLP"),
    ],
)
def test_a_half_of_another_shape_starts_fresh_and_the_other_is_copied(name, fields, fresh, log):
    model = build(name, vocab_size=VOCABULARY)
    heads = CloverHeads.from_target(model, "clover-2", **fields)
    (line,) = said(log, "starts fresh")
    assert f"{fresh} (" in line
    other = "MLP" if fresh == "attention" else "attention"
    assert f"{other} (" not in line
    check_the_copies(model, heads, (other,))


@pytest.mark.parametrize("fields", [dict(variant="medusa"), dict(augmenting_block="none")])
def test_heads_without_a_block_log_nothing(fields, log):
    CloverHeads.from_target(build("gpt2", vocab_size=VOCABULARY), **{"variant": "clover-2", **fields})
    assert not log.records


@pytest.mark.parametrize("half", ["attention", "mlp"])
def test_a_block_of_one_half_is_copied(half, log):
    model = build("llama", vocab_size=VOCABULARY)
    layer = CloverHeads.from_target(model, "clover-2", augmenting_block=half).layers[0].state_dict()
    theirs = last_layer(model).state_dict()
    assert layer.keys() < theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in layer.items())
    assert not log.records


def test_a_target_in_training_mode_is_read_without_dropout_and_left_as_it_was():
    model = make_llama(attention_dropout=0.9, hidden_size=64).train()
    model.model.norm.eval()
    modes = [module.training for module in model.modules()]
    heads = CloverHeads.from_target(model, "clover-2")
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(heads.layers[0].self_attn.q_proj.weight, last_layer(model).self_attn.q_proj.weight)


def test_a_target_whose_forward_fails_is_copied_unchecked(monkeypatch):
    model = make_llama()
    with monkeypatch.context() as patched:
        patched.setattr(model, "forward", Mock(side_effect=RuntimeError("more than tokens is wanted")))
        heads = CloverHeads.from_target(model, "clover-2")
    assert torch.equal(heads.layers[-1].mlp.up_proj.weight, last_layer(model).mlp.up_proj.weight)
    assert not has_hooks(model)
    monkeypatch.setattr(last_layer(model), "forward", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        CloverHeads.from_target(model)
    assert not has_hooks(model)


# ---------------------------------------------------------------------- wrapped and quantised targets


@pytest.mark.parametrize("kind", [FourBit, Float8])
@pytest.mark.parametrize("name", ["llama", "llama_bias", "phi3", "qwen3"])
def test_a_quantised_targets_last_layer_is_copied_by_what_it_computes(name, kind, log):
    """Its last layer is copied by what it does; its input embedding serves as E, said once."""
    model = quantise(build(name, vocab_size=VOCABULARY), kind)
    heads = CloverHeads.from_target(model, "clover-2")
    check_the_copies(model, heads, ("attention", "MLP"))
    assert heads.dtype == torch.float32
    ids = random_ids(2, 6)
    assert torch.equal(heads.embed(ids), model.get_input_embeddings().weight[ids])
    x = torch.randn(3, 64)
    assert torch.equal(heads.score(x), model.lm_head(x))
    assert heads(torch.randn(2, 6, 64), ids).head_outputs.isfinite().all()
    assert heads.config.target_fingerprint is None
    CloverHeads.from_target(model, "clover-2")
    (line,) = said(log)
    assert "input embedding serve as the heads' token embedding" in line


class Opaque(nn.Module):
    """A head that only maps hidden states to logits."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.forward = linear.forward


def test_an_opaque_lm_head_keeps_the_heads_usable(log):
    """Trained for the full target, used with one whose lm_head shows no rows."""
    model = make_llama()
    heads = CloverHeads.from_target(model, "clover-2", draft_vocab_size=6)
    x, plain = torch.randn(2, 32), model.lm_head
    expected = heads.score(x)
    model.lm_head = Opaque(plain)
    heads.bind(model)
    assert heads.borrowed.draft_rows is None
    torch.testing.assert_close(heads.score(x), expected)
    assert heads.borrowed.embedding is model.model.embed_tokens.weight
    assert [record.levelname for record in log.records] == ["WARNING"]


def test_an_opaque_input_embedding_is_replaced_by_the_rows_of_the_lm_head(log):
    model = make_llama()
    model.set_input_embeddings(Opaque(model.lm_head))
    heads = CloverHeads.from_target(model, "clover-x", embedding_scale=1.0)
    assert heads.borrowed.embedding is model.lm_head.weight
    (line,) = said(log)
    assert "target's input embedding cannot be read" in line


def test_a_target_without_any_readable_rows_is_refused():
    model = make_llama()
    heads = CloverHeads.from_target(model)
    model.lm_head = Opaque(model.lm_head)
    model.set_input_embeddings(Opaque(model.lm_head))
    with pytest.raises(ValueError, match=r"`LlamaForCausalLM` lends no token embeddings.*\(Opaque\).*\[32, 32\]"):
        heads.bind(model)
    with pytest.raises(ValueError, match="lends no token embeddings"):
        CloverHeads.from_target(model)


def test_a_target_without_an_lm_head_is_refused():
    with pytest.raises(ValueError, match="`LlamaModel` has no output embeddings"):
        CloverHeads.from_target(make_llama()).bind(make_llama().model)


def test_an_encoder_decoder_is_refused():
    config = transformers.T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match="encoder-decoder `T5ForConditionalGeneration`"):
        CloverHeads.from_target(transformers.T5ForConditionalGeneration(config))


@pytest.mark.parametrize("wraps_lm_head", [False, True])
def test_an_adapter_of_the_target_is_in_logits_and_copied_layer(wraps_lm_head):
    model = build("llama", vocab_size=VOCABULARY)
    base_logits = model.lm_head(torch.eye(64))
    modules = ["q_proj", "down_proj", *(["lm_head"] if wraps_lm_head else [])]
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=modules, init_lora_weights=False)).eval()
    heads = CloverHeads.from_target(wrapped, "clover-2")
    check_the_copies(wrapped, heads, ("attention", "MLP"))
    q_proj = last_layer(wrapped).self_attn.q_proj
    assert not torch.allclose(heads.layers[0].self_attn.q_proj.weight, q_proj.base_layer.weight, atol=1e-2)
    check_the_logits(wrapped, heads, random_ids(1, 6))
    assert torch.allclose(heads.score(torch.eye(64)), base_logits, atol=1e-4) != wraps_lm_head
    assert heads.bind(wrapped) is heads.bind(model)


def test_heads_bind_to_the_model_inside_a_wrapper():
    model = make_llama()
    for wrapped in (nn.DataParallel(model), torch.compile(model, backend="eager")):
        assert unwrap(wrapped) is model
        assert CloverHeads.from_target(wrapped).borrowed.lm_head is model.lm_head


# ---------------------------------------------------------------------- heads for another target


def test_heads_for_a_target_of_another_size_are_refused():
    heads = CloverHeads.from_target(make_llama())
    heads.config.target_name_or_path = "org/its-target"
    for field, value in (("hidden_size", 64), ("vocab_size", 48)):
        message = rf"their {field} is 32, that of `LlamaForCausalLM` is {value}. They belong to org/its-target"
        with pytest.raises(ValueError, match=message):
            heads.bind(tiny_llama(**{"vocab_size": VOCABULARY, field: value}))


def test_heads_for_a_target_with_another_lm_head_are_refused():
    heads = CloverHeads.from_target(make_llama())
    other = make_llama()
    with pytest.raises(ValueError, match=r"fingerprint of its lm_head is .* \(\d\d% of its bits differ\)"):
        heads.bind(other)
    assert heads._borrowed.lm_head is not other.lm_head
    heads.config.target_fingerprint = None  # the way out that the message names
    assert heads.bind(other).borrowed.lm_head is other.lm_head


def test_a_fine_tuned_target_gives_a_warning(log):
    model = make_llama()
    heads = CloverHeads.from_target(model)
    stir(model.lm_head, 0.1 * model.lm_head.weight.std())
    tuned = fingerprint(model.lm_head.weight)
    differing = (int(tuned, 16) ^ int(heads.config.target_fingerprint, 16)).bit_count()
    assert 0 < differing < 0.2 * 128
    object.__setattr__(heads, "_borrowed", None)
    heads.bind(model)
    assert ["differs a little" in record.getMessage() for record in log.records] == [True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_fingerprint_does_not_depend_on_the_dtype(dtype, log):
    model = make_llama()
    heads = CloverHeads.from_target(model)
    assert len(heads.config.target_fingerprint) == 32
    assert fingerprint(model.lm_head.weight.to(dtype)) == heads.config.target_fingerprint
    object.__setattr__(heads, "_borrowed", None)
    heads.bind(model.to(dtype))
    assert not log.records


def test_fingerprints_tell_models_apart():
    rows = [0.02 * torch.randn(100, 40) for _ in range(20)]
    assert len({fingerprint(r) for r in rows}) == 20
    changed = rows[0].clone()
    changed[[0, -1]] = -changed[[0, -1]]  # the first and the last row are in the sample
    differing = int(fingerprint(changed), 16) ^ int(fingerprint(rows[0]), 16)
    assert differing.bit_count() == 16
