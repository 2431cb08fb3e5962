"""Answers to many prompts at once: plain generate's, whatever the batch and the order, and rows that leave."""

from typing import Any

import pytest
import torch
from tiny import make_target, make_tokenizer
from transformers import LlamaForCausalLM

from hf_clover import CloverHeads
from hf_clover.training import TargetAnswers
from hf_clover.training.row_by_row import decode, own_random_numbers, pick

pytestmark = pytest.mark.long("hf_clover/network")

PROMPTS = ["w1 w2 w3", "w4", "w5 w6", "w7 w8 w9 w10 w11 w12", "w11", "w3 w3", "w30 w2 w1 w5"]
NEW = 24


@pytest.fixture
def target() -> LlamaForCausalLM:
    """Every answer ends somewhere: several tokens end it."""
    target = make_target()
    target.generation_config.eos_token_id = [2, 5, 9, 14, 21, 28, 33]
    return target


def count_rows(target: LlamaForCausalLM) -> list[int]:
    counts: list[int] = []
    target.register_forward_pre_hook(lambda _, args, kwargs: counts.append(len(kwargs["input_ids"])), with_kwargs=True)
    return counts


def answered(target: LlamaForCausalLM, prompts: list[str] = PROMPTS, **options: Any) -> list[str | Exception]:
    got = dict(TargetAnswers(target, make_tokenizer(), **{"max_new_tokens": NEW, **options})(prompts))
    return [got[place] for place in range(len(prompts))]


def test_greedy_answers_are_plain_generates_and_rows_leave_when_they_end(target):
    tokenizer, lengths, alone = make_tokenizer(), [], []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        new = target.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :]
        alone.append(tokenizer.decode(new, skip_special_tokens=True))
        lengths.append(len(new))
    assert len(set(lengths)) > 3, "the test is one of rows that end at different times"
    rows = count_rows(target)
    assert answered(target, do_sample=False) == alone
    assert sum(rows) == sum(lengths), "no row is run after its end"
    assert rows[0] == len(PROMPTS)


def test_answers_with_a_processor_of_the_text_do_not_depend_on_the_batch(target):
    rows = count_rows(target)
    assert answered(target, do_sample=False, no_repeat_ngram_size=2, batch_size=3) == [
        answered(target, [prompt], do_sample=False, no_repeat_ngram_size=2)[0] for prompt in PROMPTS
    ]
    assert rows[0] == 3


def test_samples_depend_on_prompt_and_seed_alone(target):
    """Not on the batch, the order, or the other prompts."""
    options = {"do_sample": True, "temperature": 1.5}
    first = answered(target, **options)
    assert first == answered(target, batch_size=2, **options)
    assert first == answered(target, PROMPTS[::-1], batch_size=3, **options)[::-1]
    assert first[2:] == answered(target, PROMPTS[2:], **options)
    assert len(set(first)) == len(PROMPTS)
    other = answered(target, seed=1, **options)
    assert sum(one != two for one, two in zip(first, other, strict=True)) > 3


def test_samples_with_heads_are_reproducible(target):
    heads = CloverHeads.from_target(target, num_heads=2)
    options = {"do_sample": True, "assistant_model": heads, "batch_size": 3}
    assert answered(target, **options) == answered(target, **options)


def test_a_sampled_token_is_as_likely_as_the_target_says():
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.2, 0.3, 0.0]])
    numbers = own_random_numbers([1, 2], 0, 4000)
    counts = pick(probs.expand(4000, -1), numbers).bincount(minlength=6) / 4000
    torch.testing.assert_close(counts[None], probs, atol=0.03, rtol=0)
    assert pick(probs, torch.tensor([0.0])) == 1, "not the first, which is impossible"
    assert pick(probs, torch.tensor([1 - 2**-24])) == 4, "not the last"


def test_other_ways_to_generate_are_left_to_transformers(target, monkeypatch):
    monkeypatch.setattr("hf_clover.training.answers.decode", lambda *_, **__: pytest.fail("beams are not rows"))
    assert all(isinstance(answer, str) for answer in answered(target, num_beams=2, do_sample=False))


def test_a_batch_that_fails_is_asked_in_halves(target, monkeypatch):
    asked, generate = [], target.generate

    def small(**inputs: Any) -> Any:
        asked.append(len(inputs["input_ids"]))
        if asked[-1] > 2:
            raise RuntimeError("no memory")
        return generate(**inputs)

    monkeypatch.setattr(target, "generate", small)
    assert all(isinstance(answer, str) for answer in answered(target, do_sample=False))
    assert asked == [7, 3, 1, 2, 4, 2, 2]


def test_decode_pads_as_generate_does(target):
    batch = make_tokenizer()(PROMPTS, return_tensors="pt", padding=True, padding_side="left")
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
    assert torch.equal(
        target.generate(**batch, **options), target.generate(**batch, custom_generate=decode, **options)
    )


def test_prompts_of_one_length_go_together_the_longest_first(target, monkeypatch):
    """So that little padding is read, and what is too much for the memory shows at once."""
    shapes, generate = [], target.generate
    monkeypatch.setattr(
        target, "generate", lambda **inputs: shapes.append(tuple(inputs["input_ids"].shape)) or generate(**inputs)
    )
    answered(target, ["w1", "w2 " * 200, "w3 w4", "w5 " * 190], do_sample=False)
    assert shapes == [(2, 200), (2, 2)]
