"""Heads beside a target they were not made for: said before a token is generated."""

import logging

import pytest
import torch
from helpers.zoo import build
from transformers.utils import logging as transformers_logging

from hf_clover import CloverHeads

IDS = torch.tensor([[1, 4, 2, 5, 3]])


@pytest.fixture
def log(caplog):
    transformers_logging.warning_once.cache_clear()
    caplog.set_level(logging.WARNING, logger="hf_clover")
    return caplog


@pytest.fixture
def target():
    target = build("llama")
    target.name_or_path = target.config._name_or_path = "org/target"
    return target


def loaded(target, tmp_path, **fields) -> CloverHeads:
    CloverHeads.from_target(target, num_heads=2, **fields).save_pretrained(tmp_path)
    return CloverHeads.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: build("llama", seed=1),
            r"made for another target \(org/target\): the fingerprint .*\d+% of its bits",
        ),
        (lambda: build("llama", vocab_size=48), "made for another target: their vocab_size is 32, that of .* is 48"),
    ],
)
def test_heads_for_another_target_are_an_error_before_any_forward(other, message, target, tmp_path):
    heads, other = loaded(target, tmp_path), other()
    forwards = []
    other.register_forward_pre_hook(lambda *_: forwards.append(1))
    with pytest.raises(ValueError, match=message):
        other.generate(IDS, assistant_model=heads, max_new_tokens=8)
    assert forwards == []


def test_a_fine_tuned_target_gives_one_warning(target, tmp_path, log):
    heads = loaded(target, tmp_path)
    with torch.no_grad():
        rows = target.get_output_embeddings().weight
        rows += 0.05 * torch.randn(rows.shape) * rows.std()
    for _ in range(2):
        out = target.generate(IDS, assistant_model=heads.bind(target), max_new_tokens=8)
        heads = CloverHeads.from_pretrained(tmp_path)
    assert torch.equal(out, target.generate(IDS, max_new_tokens=8))
    assert [record for record in log.messages if "differs a little from it (a fine-tune?)" in record] == log.messages
    assert len(log.messages) == 1


@pytest.mark.parametrize(
    ("name", "warnings"),
    [("org/target", 0), ("/a/copy/of/Target", 0), ("", 0), ("org/other", 1)],
)
def test_without_a_fingerprint_another_name_gives_one_warning(name, warnings, target, tmp_path, log):
    heads = loaded(target, tmp_path, target_fingerprint=None)
    target.name_or_path = target.config._name_or_path = name
    target.generate(IDS, assistant_model=heads, max_new_tokens=4)
    assert len(log.messages) == warnings
    assert all("made for org/target, and this target is called org/other" in message for message in log.messages)


def test_the_same_target_gives_no_warning(target, tmp_path, log):
    target.generate(IDS, assistant_model=loaded(target, tmp_path), max_new_tokens=4)
    assert log.messages == []
