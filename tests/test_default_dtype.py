"""`torch.set_default_dtype` of the caller's changes nothing: what is made has the dtype that it needs."""

import ast
from pathlib import Path

import pytest
import torch
from helpers import fitting
from helpers.fitting import fit
from helpers.oracle import planted
from helpers.zoo import build, ragged_batch
from transformers import AutoModel

import hf_clover
from hf_clover import CloverHeads
from hf_clover.decoding.call import Dice, picks_by_a_race
from hf_clover.network.target_parts import fingerprint

VOCABULARY, NEW = 24, 24
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=DTYPES, ids=str)
def default(request):
    """From here on this is torch's default; targets are made before."""
    picks_by_a_race.cache_clear()

    def use():
        torch.set_default_dtype(request.param)

    yield use
    torch.set_default_dtype(torch.float32)
    picks_by_a_race.cache_clear()


def made(target):
    torch.manual_seed(1)
    return CloverHeads.from_target(target)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("lengths", [(7,), (5, 9, 3)])
def test_tokens_equal_plain_under_any_default_dtype(default, lengths, do_sample):
    target, inputs = build("llama", vocab_size=VOCABULARY), ragged_batch(VOCABULARY, lengths)
    default()
    heads, accepted, own = made(target), 0, 0
    for seed in range(6 if do_sample else 1):
        common = {**inputs, "max_new_tokens": NEW, "do_sample": do_sample, "return_dict_in_generate": True}
        torch.manual_seed(seed)
        plain = target.generate(**common)
        after = torch.get_rng_state()
        for plant in (True, False):
            torch.manual_seed(seed)
            options = {"assistant_model": heads, "num_assistant_tokens": 6}
            if plant:
                with planted(heads, plain.sequences, inputs["input_ids"].shape[1], seed):
                    ours = target.generate(**common, **options)
                accepted += ours.speculation.accepted_tokens
            else:
                ours = target.generate(**common, **options)
                own += ours.speculation.accepted_tokens
            assert torch.equal(ours.sequences, plain.sequences)
            assert torch.equal(torch.get_rng_state(), after)
            assert ours.speculation.method == "tree"
    assert accepted > NEW // 3
    assert own > 0 or not do_sample


def test_dice_draw_what_multinomial_draws(default):
    default()
    dice, probs = Dice(2), torch.randn(3000, 2, VOCABULARY, dtype=torch.float32).softmax(-1)
    torch.manual_seed(3)
    plain = [torch.multinomial(each, num_samples=1)[:, 0].tolist() for each in probs]
    torch.manual_seed(3)
    assert [dice.throw([0, 1], [length] * 2, each).tolist() for length, each in enumerate(probs)] == plain


@pytest.mark.parametrize("variant", ["clover-x", "clover-2"])
def test_new_heads_have_the_same_float32_weights_under_any_default_dtype(default, tmp_path, variant):
    target = build("llama", vocab_size=VOCABULARY)
    torch.manual_seed(1)
    usual = CloverHeads.from_target(target, variant=variant)
    wide = torch.nn.Linear(8, 2000).weight
    mark = fingerprint(wide)
    default()
    torch.manual_seed(1)
    heads = CloverHeads.from_target(target, variant=variant)
    assert fingerprint(wide) == mark
    assert heads.config.target_fingerprint == usual.config.target_fingerprint
    for name, weight in heads.state_dict().items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, usual.state_dict()[name]), name
    heads.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float32
    inputs = ragged_batch(VOCABULARY, (7,))
    plain = target.generate(**inputs, max_new_tokens=NEW)
    with planted(loaded, plain, 7), hf_clover.speculations() as records:
        ours = target.generate(**inputs, max_new_tokens=NEW, assistant_model=loaded, num_assistant_tokens=6)
    assert torch.equal(ours, plain)
    assert records[0].accepted_tokens > NEW // 3


def test_training_gives_the_same_weights_under_any_default_dtype(default):
    target = build("llama", vocab_size=VOCABULARY)
    prompt = torch.tensor([[1, 4, 2, 5, 3]])
    usual = fit(made(target), target, prompt=prompt, steps=2).state_dict()
    default()
    fitting._fitted.clear()
    trained = fit(made(target), target, prompt=prompt, steps=2).state_dict()
    assert all(torch.equal(weight, usual[name]) for name, weight in trained.items())


def test_every_torch_call_that_makes_floats_names_a_dtype():
    makers = {"linspace", "logspace", "rand", "randn", "empty", "zeros", "ones", "full", "eye"}
    silent = []
    for file in Path(hf_clover.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            is_torchs = isinstance(node, ast.Call) and ast.unparse(node.func).partition(".")[0] == "torch"
            makes = is_torchs and ast.unparse(node.func).removeprefix("torch.") in makers
            if makes and "dtype" not in {keyword.arg for keyword in node.keywords}:
                silent.append(f"{file.name}:{node.lineno}: {ast.unparse(node)}")
    assert silent == []
