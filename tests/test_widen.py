"""Widened models compute what the small ones compute: logits, heads, trees and tokens."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from hf_clover import CloverHeads
from hf_clover.measure.prompts import function_starts

pytestmark = pytest.mark.long("examples/experiments")

ROOT = Path(__file__).resolve().parent.parent
STAND_IN = ROOT / "examples" / "stand_in"
SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size", "vocab_size"),
)
WIDER = {
    "double": dict(zip(SIZES, (64, 4, 8, 4, 8, 96, 128))),
    # Longer heads, more queries for a key, a width that is no power of 4 times the old one.
    "crooked": dict(zip(SIZES, (88, 3, 12, 3, 16, 50, 65))),
}


@pytest.fixture
def widen(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "experiments"))
    return importlib.import_module("widen")


@pytest.fixture
def small() -> torch.nn.Module:
    """Two key heads with two queries each; weights large enough that rounding decides nothing."""
    config = LlamaConfig(
        **dict(zip(SIZES, (32, 2, 4, 2, 8, 48, 64))),
        max_position_embeddings=128,
        rms_norm_eps=1e-3,  # large enough to be seen
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=1,
        initializer_range=0.2,
    )
    target = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in target.named_parameters():
        if "norm" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    target.lm_head.weight.data *= 3
    return target


def heads_of(target: torch.nn.Module, variant: str, **fields: object) -> CloverHeads:
    """With every weight random: those that start as zero or as an identity would hide what is put in a wrong place."""
    heads = CloverHeads.from_target(target, variant, **fields)
    for parameter in heads.parameters():
        parameter.data = 0.2 * torch.randn_like(parameter) + (parameter.ndim == 1)
    return heads.eval()


@torch.no_grad()
def states_of(target: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """[B, T, d] before the final norm."""
    captured = []
    handle = target.model.norm.register_forward_pre_hook(lambda _, args: captured.append(args[0]))
    target(ids)
    handle.remove()
    return captured[0]


@pytest.mark.parametrize("sizes", WIDER)
@torch.no_grad()
def test_a_widened_target_gives_the_same_logits_and_tokens(widen, small, sizes):
    wide = widen.widen_target(small, widen.Shape(**WIDER[sizes], max_position_embeddings=256))
    assert widen.Shape.of(wide.config) == widen.Shape(**WIDER[sizes], max_position_embeddings=256)
    ids = torch.randint(2, 64, (3, 20))
    its, ours = small(ids).logits, wide(ids).logits
    torch.testing.assert_close(ours[..., :64], its, rtol=1e-4, atol=1e-4)
    assert bool((ours[..., 64:].amax(-1) < its.amax(-1)).all())  # an extra id is never chosen
    assert not states_of(wide, ids)[..., 32:].any()
    options = dict(max_new_tokens=24, do_sample=False, pad_token_id=1)
    assert wide.generate(ids, **options).tolist() == small.generate(ids, **options).tolist()


@torch.no_grad()
def test_new_weights_of_a_widened_target_are_not_zero(widen, small):
    """They are random where they may be: a model of zeros would run as fast, but be unlike a large model."""
    wide = widen.widen_target(small, widen.Shape(**WIDER["double"]))
    for layer in wide.model.layers:
        for name in ("q_proj", "v_proj"):
            assert float((getattr(layer.self_attn, name).weight == 0).float().mean()) == 0
        assert float((layer.mlp.gate_proj.weight == 0).float().mean()) == 0
    assert len(wide.lm_head.weight[64:].unique(dim=0)) == 64


@pytest.mark.parametrize("sizes", WIDER)
@pytest.mark.parametrize(
    ("variant", "fields"),
    [
        ("clover-x", {}),
        ("clover-x", dict(decoder_width=48)),
        ("clover-2", {}),
        ("clover", {}),
        ("medusa", {}),
        ("clover-2", dict(regressive=False)),
        ("clover", dict(augmenting_block="attention")),
    ],
)
@torch.no_grad()
def test_widened_heads_give_the_same_outputs_and_scores(widen, small, sizes, variant, fields):
    heads = heads_of(small, variant, **fields)
    wide = widen.widen_target(small, widen.Shape(**WIDER[sizes]))
    wide_heads = widen.widen_heads(heads, wide)
    ids = torch.randint(2, 64, (2, 12))
    its = heads(states_of(small, ids)[:, :-1], ids[:, 1:]).head_outputs
    ours = wide_heads(states_of(wide, ids)[:, :-1], ids[:, 1:]).head_outputs
    assert float(its.std()) > 0.1
    torch.testing.assert_close(ours[..., :32], its, rtol=1e-4, atol=1e-4)
    assert not ours[..., 32:].any()
    scores = heads.score(its)
    torch.testing.assert_close(wide_heads.score(ours)[..., :64], scores, rtol=1e-3, atol=1e-3)
    partial = widen.widen_heads(heads, wide, draft_vocab_size=65)
    torch.testing.assert_close(partial.score(ours)[..., :64], scores, rtol=1e-3, atol=1e-3)
    assert partial.score(ours).shape[-1] == 65


@pytest.mark.parametrize("variant", ["heads", "clover-2", "clover", "medusa"])
def test_the_widened_stand_in_drafts_as_well_as_the_small_one(widen, variant):
    """As many tokens per forward as before: the trees are the same ones."""
    target = AutoModelForCausalLM.from_pretrained(STAND_IN / "target", dtype=torch.float32).eval()
    heads = CloverHeads.from_pretrained(STAND_IN / variant, dtype=torch.float32).eval()
    sizes = dict(hidden_size=384, num_hidden_layers=13, num_key_value_heads=3, num_attention_heads=6, vocab_size=1500)
    wide = widen.widen_target(target, widen.Shape.of(target.config, **sizes))
    wide_heads = widen.widen_heads(heads, wide)
    ids = AutoTokenizer.from_pretrained(STAND_IN / "target")(next(function_starts()), return_tensors="pt")
    options = dict(max_new_tokens=20, do_sample=False, num_assistant_tokens=8, return_dict_in_generate=True)
    its = target.generate(**ids, assistant_model=heads, **options)
    ours = wide.generate(**ids, assistant_model=wide_heads, **options)
    assert ours.sequences.tolist() == its.sequences.tolist()
    assert ours.speculation.target_forwards == its.speculation.target_forwards
    assert ours.speculation.tokens_per_forward > 1.2


def test_shapes_and_models_that_cannot_be_widened_are_refused(widen, small):
    def shape(**changes: int) -> object:
        return widen.Shape.of(small.config, **changes)

    for changes, message in (
        (dict(num_hidden_layers=1), "fewer layers"),
        (dict(hidden_size=24), "`hidden_size=24` of the shape is less than 32"),
        (dict(head_dim=12), "`head_dim=12` of the shape must be a multiple of 8"),
        (dict(num_key_value_heads=4), "at least 2 key heads, each with at least 2 query heads"),
    ):
        with pytest.raises(ValueError, match=message):
            widen.widen_target(small, shape(**changes))
    for drafts, changes, options, message in (
        ({}, dict(hidden_size=36), {}, "does not divide into gates of 8"),
        ({}, {}, dict(draft_vocab_size=63), "`draft_vocab_size=63` leaves out some of the 64 real ids"),
        (dict(draft_vocab_size=40), {}, {}, "have a draft vocabulary"),
        (dict(decoder="mlp"), {}, {}, "an MLP as the decoder"),
    ):
        wide = widen.widen_target(small, shape(**changes))
        with pytest.raises(ValueError, match=message):
            widen.widen_heads(heads_of(small, "clover-2", **drafts), wide, **options)
    small.config.tie_word_embeddings = True
    with pytest.raises(ValueError, match="no Llama without biases and with an lm_head of its own"):
        widen.widen_target(small, shape())
