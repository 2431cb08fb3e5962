"""Levels of drafting by look-up, against the heads' own `step`."""

import copy
import gc

import pytest
import torch
from zoo import build

from hf_clover import CloverHeads
from hf_clover.decoding import token_tables
from hf_clover.decoding.token_tables import stepper

VOCABULARY = 16
LOOKED_UP = {
    "clover-2": ("clover-2", {}),
    "clover": ("clover", {}),
    "clover-x": ("clover-x", {}),
    "gated decoder with a projector": ("clover-x", {"output_projector": "fc", "decoder_width": 5}),
    "gated decoder with biases and residual blocks": (
        "clover-x",
        {"output_projector": "residual", "decoder_bias": True, "decoder_position": "before"},
    ),
    "attention without a projector": ("clover-x", {"decoder": "attention", "decoder_num_heads": 4}),
    "residual blocks": ("clover-2", {"output_projector": "residual"}),
    "first decoder after the block": ("clover-2", {"decoder_position": "after"}),
    "one decoder head": ("clover-2", {"decoder_num_heads": 1}),
    "normalised embeddings": ("clover-2", {"normalize_embeddings": True}),
}
COMPUTED = {
    "medusa": ("medusa", {}),
    "MLP decoder": ("clover", {"decoder": "mlp"}),
    "no connection between heads": ("clover", {"decoder": "none", "regressive": False}),
}


@pytest.fixture(scope="module")
def target():
    return build("llama", vocab_size=VOCABULARY)


def lively_heads(target, variant, fields):
    heads = CloverHeads.from_target(target, variant, **fields).bind(target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return heads


def assert_same(fast, slow, heads, states=None):
    state = torch.randn(2, 3, heads.config.hidden_size) if states is None else states
    for level in range(heads.config.num_heads):
        tokens = torch.randint(VOCABULARY, (2, 3))
        for mine, its in zip(fast(level, state, tokens), slow(level, state, tokens), strict=True):
            torch.testing.assert_close(mine, its, atol=2e-5, rtol=2e-5)  # the order of float32 sums
        state = slow(level, state, tokens)[1]


@pytest.mark.parametrize("kind", LOOKED_UP)
@torch.no_grad()
def test_what_is_looked_up_is_what_would_be_computed(target, kind):
    heads = lively_heads(target, *LOOKED_UP[kind])
    fast = stepper(heads)
    assert fast != heads.step
    assert_same(fast, heads.step, heads)
    zeros = torch.zeros(2, 3, heads.config.hidden_size)
    assert_same(fast, heads.step, heads, zeros)


@pytest.mark.parametrize("kind", COMPUTED)
def test_other_heads_compute(target, kind):
    heads = lively_heads(target, *COMPUTED[kind])
    assert stepper(heads) == heads.step


def test_a_table_is_made_once_and_again_after_training(target):
    heads = lively_heads(target, "clover-2", {})
    stepper(heads)
    first = token_tables._tables[heads][1]
    stepper(heads)
    assert token_tables._tables[heads][1] is first
    with torch.no_grad():
        heads.decoder.v.weight.mul_(2)  # what an optimizer does
        assert_same(stepper(heads), heads.step, heads)
        second = token_tables._tables[heads][1]
        heads.fc[0].weight.data = heads.fc[0].weight.data * 2  # what loading may do
        assert_same(stepper(heads), heads.step, heads)
    assert token_tables._tables[heads][1] is not second is not first


@pytest.mark.parametrize("how", [{}, {"fused": True}, {"foreach": True}])
def test_every_kind_of_optimizer_is_noticed(target, how):
    """A fused one changes weights without a new version."""
    heads = lively_heads(target, "clover-2", {})
    optimizer = torch.optim.AdamW(heads.parameters(), lr=1e-4, **how)
    for _ in range(3):
        stepper(heads)
        loss = sum(parameter.square().sum() for parameter in heads.parameters())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            assert_same(stepper(heads), heads.step, heads)


def test_a_table_larger_than_the_heads_is_not_made():
    target = build("llama", vocab_size=4096)
    heads = lively_heads(target, "clover-2", {})
    assert stepper(heads) == heads.step
    assert heads not in token_tables._tables


def test_adapters_and_hooks_are_not_passed_by(target):
    peft = pytest.importorskip("peft")
    heads = lively_heads(target, "clover-2", {})
    adapted = peft.get_peft_model(
        copy.deepcopy(heads), peft.LoraConfig(target_modules=["fc.0"], init_lora_weights=False)
    ).base_model.model.bind(target)
    assert stepper(adapted) == adapted.step
    calls = []
    handle = heads.fc[0].register_forward_hook(lambda *_: calls.append(1))
    assert stepper(heads) == heads.step
    handle.remove()
    assert stepper(heads) != heads.step


def test_adapters_and_hooks_on_a_gated_decoder(target):
    peft = pytest.importorskip("peft")
    heads = lively_heads(target, "clover-x", {})
    calls = []
    handle = heads.decoder.gate_up.register_forward_hook(lambda *_: calls.append(1))
    assert stepper(heads) == heads.step
    handle.remove()
    assert stepper(heads) != heads.step
    for module, is_looked_up in (("decoder.gate_up", False), ("decoder.down", True)):
        adapted = peft.get_peft_model(
            copy.deepcopy(heads), peft.LoraConfig(target_modules=[module], init_lora_weights=False)
        ).base_model.model.bind(target)
        fast = stepper(adapted)
        assert (fast != adapted.step) == is_looked_up
        with torch.no_grad():
            assert_same(fast, adapted.step, adapted)


def test_a_table_goes_with_its_heads(target):
    heads = lively_heads(target, "clover-2", {})
    stepper(heads)
    before = len(token_tables._tables)
    del heads
    gc.collect()
    assert len(token_tables._tables) < before
