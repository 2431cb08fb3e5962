"""On a CPU a packed copy of the heads drafts: for whom, from what, and that it drafts what they would."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.fitting import fit
from helpers.oracle import drafting_by
from helpers.zoo import build, ragged_batch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from hf_clover import CloverHeads, pack_for_cpu, unpack
from hf_clover.decoding.draft import cpu_copy as module
from hf_clover.decoding.draft.cpu_copy import drafting_copy
from hf_clover.decoding.draft.drafter import CloverDrafter
from hf_clover.decoding.record import speculations
from hf_clover.network import packing
from hf_clover.network.variants import VARIANTS
from hf_clover.targets.private_api import cache_name

pytestmark = pytest.mark.skipif(not packing.can_pack(torch.float32), reason="this torch packs nothing")
VOCABULARY = 61
LONG = pytest.mark.long("hf_clover/decoding/draft/cpu_copy.py", "hf_clover/network")  # the default is in the short set
OTHERS = [variant for variant in VARIANTS if variant != "clover-x"]
WEIGHTS = [  # of the copy; what it computes in is float32, or bfloat16 with weights in that
    torch.float32,
    pytest.param(
        torch.float16,
        marks=pytest.mark.skipif(not packing.can_halve(), reason="this processor or torch does not widen float16"),
    ),
    pytest.param(
        torch.bfloat16,
        marks=pytest.mark.skipif(not packing.can_pack(torch.bfloat16), reason="this processor has no bfloat16"),
    ),
]


@pytest.fixture(autouse=True)
def _small_layers_count(monkeypatch):
    monkeypatch.setattr(module, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(packing, "LEAST_WEIGHTS", 1)


@pytest.fixture(params=WEIGHTS, ids=str)
def weights(request, monkeypatch):
    """What this processor can: multiply bfloat16 fast, widen float16 as it reads it, or neither."""
    monkeypatch.setattr(module, "multiplies_bfloat16_fast", lambda device: request.param == torch.bfloat16)
    monkeypatch.setattr(module, "can_halve", lambda: request.param == torch.float16)
    return request.param


@pytest.fixture
def target():
    return build("llama_bias", vocab_size=VOCABULARY).eval()


def heads_of(target, variant="clover-x", **fields):
    return CloverHeads.from_target(target, variant=variant, **fields).eval()


@pytest.mark.parametrize("draft_vocab_size", [pytest.param(None, marks=LONG), 40])
@pytest.mark.parametrize("variant", ["clover-x", *(pytest.param(other, marks=LONG) for other in OTHERS)])
def test_a_cpu_copy_drafts_as_well_as_the_heads(target, variant, draft_vocab_size, weights):
    """As many drafts are accepted, within a few, and the tokens are plain generate's."""
    batch = ragged_batch(VOCABULARY)
    options = {**batch, "max_new_tokens": 32, "do_sample": False, "pad_token_id": 0}
    expected = target.generate(**options)
    heads = fit(heads_of(target, variant), target, prompt=batch["input_ids"][:1])
    if draft_vocab_size is not None:
        fewer = heads_of(target, variant, draft_vocab_size=draft_vocab_size)
        fewer.load_state_dict(heads.state_dict(), strict=False)
        heads = fewer
    before = {name: weight.clone() for name, weight in heads.state_dict().items()}
    drafted_by, accepted = [], []
    for is_copied in (True, False):

        def new_drafter(network, *how, is_copied=is_copied):
            drafted_by.append(network if is_copied else heads)
            return CloverDrafter(drafted_by[-1], *how)

        with drafting_by(heads, new_drafter), speculations() as records:
            actual = target.generate(**options, assistant_model=heads, num_assistant_tokens=8)
        assert torch.equal(actual, expected)
        accepted.append(records[0].accepted_tokens)
    made, original = drafted_by
    assert original is heads
    assert made is not heads
    computes_in = torch.bfloat16 if weights == torch.bfloat16 else torch.float32
    assert made.dtype == computes_in
    rows, bias = made.borrowed.draft_rows
    assert rows.dtype == computes_in
    if weights == torch.float16:
        assert not any(isinstance(layer, nn.Linear) for layer in made.modules())
        assert any(isinstance(layer, packing.HalvedLinear) for layer in made.modules())
        assert isinstance(rows, packing.HalvedLinear)
        assert rows.out_features == (draft_vocab_size or VOCABULARY)
    else:
        assert all(packing.is_packed(layer) for layer in made.modules() if isinstance(layer, nn.Linear))
        assert rows.is_mkldnn
        assert len(rows) == (draft_vocab_size or VOCABULARY)
        assert bias is None or bias.dtype == computes_in
    assert min(accepted) >= 8
    assert abs(accepted[0] - accepted[1]) <= 0.1 * accepted[1]
    # What is the user's is as it was.
    assert not any(packing.is_packed(layer) for layer in [*heads.modules(), *target.modules()])
    assert all(torch.equal(weight, before[name]) for name, weight in heads.state_dict().items())


def test_a_copy_keeps_rotary_frequencies_in_float32(target, weights):
    heads = heads_of(target)
    made = drafting_copy(heads, target)
    assert torch.equal(made.rotary_emb.inv_freq, heads.rotary_emb.inv_freq)
    assert made.rotary_emb.inv_freq.dtype == torch.float32


def test_a_copy_is_made_once_and_again_after_weights_change(target, weights):
    heads = heads_of(target, draft_vocab_size=40)
    made = drafting_copy(heads, target)
    assert drafting_copy(heads, target) is made
    with torch.no_grad():
        heads.decoder.down.weight.add_(1.0)
    second = drafting_copy(heads, target)
    assert second is not made
    unit = torch.eye(second.decoder.down.in_features, dtype=second.dtype)
    learned = second.decoder.down(unit).T.float()  # the weight, whatever holds it
    torch.testing.assert_close(learned, heads.decoder.down.weight, atol=1e-2, rtol=1e-2)
    heads.draft_ids.copy_(heads.draft_ids.flip(0))
    heads.bind(target)
    third = drafting_copy(heads, target)
    assert third is not second
    with torch.no_grad():
        target.lm_head.weight.mul_(2.0)
    assert drafting_copy(heads.bind(target), target) is not third
    assert third.config is heads.config


def test_packed_heads_get_a_copy_too(target):
    heads = heads_of(target)
    pack_for_cpu(target)
    pack_for_cpu(heads)
    made = drafting_copy(heads.bind(target), target)
    assert made is not heads
    assert drafting_copy(heads, target) is made
    unpack(heads)
    unpack(target)
    assert drafting_copy(heads.bind(target), target) is not made


def with_adapter(heads):
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"]), heads)


def on_no_device(heads):
    heads.to("meta")


def offloaded(heads):
    heads.decoder._hf_hook = object()


def too_small(heads):
    for layer in heads.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(layer.weight[:0])


@pytest.mark.parametrize("change", [with_adapter, on_no_device, offloaded, too_small])
def test_heads_that_do_not_suit_a_copy_draft_themselves(target, change):
    heads = heads_of(target)
    assert drafting_copy(heads, target) is not heads
    change(heads)
    assert drafting_copy(heads, target) is heads


def test_heads_draft_themselves_where_torch_cannot_pack(target, monkeypatch):
    heads = heads_of(target)
    monkeypatch.setattr(packing, "_OPERATORS", ("no_such_operator",))
    assert drafting_copy(heads, target) is heads


def test_the_copy_is_packed_where_torch_cannot_halve_weights(target, monkeypatch):
    monkeypatch.setattr(module, "multiplies_bfloat16_fast", lambda device: False)
    monkeypatch.setattr(packing, "_HALVING_OPERATORS", ("no_such_operator",))
    made = drafting_copy(heads_of(target), target)
    assert all(packing.is_packed(layer) for layer in made.modules() if isinstance(layer, nn.Linear))


def test_a_copy_is_freed_with_its_heads(target):
    heads = heads_of(target)
    copies = module.memory_of(target).drafting_copies
    drafting_copy(heads, target)
    assert len(copies) == 1
    copy.deepcopy(heads)
    del heads
    assert len(copies) == 0


def test_a_second_turn_equals_plain_with_a_copy(target):
    """The heads' keys and values of the first turn serve the second."""
    heads = heads_of(target)
    ids = ragged_batch(VOCABULARY)["input_ids"][:1]
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
    first = target.generate(ids, **options, assistant_model=heads)
    plain = target.generate(ids, **options)
    assert torch.equal(first.sequences, plain.sequences)
    more = torch.cat((first.sequences, ids), dim=1)
    second = target.generate(more, **options, assistant_model=heads, **{cache_name(): first[cache_name()]})
    expected = target.generate(more, **options, **{cache_name(): plain[cache_name()]})
    assert torch.equal(second.sequences, expected.sequences)


def test_a_copy_serves_calls_inside_and_outside_inference_mode(target):
    heads, ids = heads_of(target), ragged_batch(VOCABULARY)["input_ids"][:1]
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    expected = target.generate(ids, **options)
    with torch.inference_mode():
        assert torch.equal(target.generate(ids, **options, assistant_model=heads), expected)
        made = drafting_copy(heads, target)
    assert made is not heads
    assert drafting_copy(heads, target) is made
    assert torch.equal(target.generate(ids, **options, assistant_model=heads), expected)
    with torch.inference_mode():
        loaded = heads_of(build("llama_bias", vocab_size=VOCABULARY).eval())  # whose weights have no versions
        assert drafting_copy(loaded.bind(target), target) is not loaded


def test_threads_that_start_together_get_plain_tokens_with_a_copy(target):
    heads, ids = heads_of(target), ragged_batch(VOCABULARY)["input_ids"][:1]
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    expected = target.generate(ids, **options)
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(target.generate, ids, **options, assistant_model=heads) for _ in range(6)]
        assert all(torch.equal(call.result(), expected) for call in calls)
