"""What vLLM samples, counted: tokens that drafts were verified for, against the exact distribution.

On a CPU, vLLM 0.32.0 samples wrongly as soon as anything drafts (docs/vllm.md); the plug-in refuses it there. These
tests show that it is the engine's fault and no other: with n-grams from the prompt the counts are wrong, and with a
kernel that returns what it computes they are right, for n-grams and for heads.
"""

import pytest
import torch
from engines import count, texts, vllm
from helpers.fitting import fit
from helpers.tiny_llama import SIZES
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.v1.sample import rejection_sampler

from hf_clover import CloverHeads

VOCABULARY, SAMPLES = 16, 20_000
PROMPT = [1, 4, 2, 5, 3, 1, 4, 2, 5, 3, 1]
NGRAMS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
BY_CHANCE = 5.0  # standard deviations of chi-squared


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target of sixteen tokens, and heads that were fitted to it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("sixteen")
    sizes = dict(SIZES, hidden_size=64, intermediate_size=64, num_attention_heads=2, max_position_embeddings=128)
    tokens = dict(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=None, pad_token_id=None)
    config = LlamaConfig(**sizes, **tokens, tie_word_embeddings=False)
    target = LlamaForCausalLM(config).eval()
    target.lm_head.weight.data.normal_(0, 0.25)
    target.save_pretrained(folder / "target")
    fit(CloverHeads.from_target(target), target, prompt=torch.tensor([PROMPT])).save_pretrained(folder / "heads")
    return folder


@pytest.fixture(scope="module")
def exact(folder):
    """[V, V]: of the second and the third token after the prompt."""
    target = LlamaForCausalLM.from_pretrained(folder / "target")
    pairs = torch.cartesian_prod(torch.arange(VOCABULARY), torch.arange(VOCABULARY))  # [V V, 2]
    ids = torch.cat((torch.tensor(PROMPT).expand(len(pairs), -1), pairs), dim=1)  # [V V, L + 2]
    with torch.no_grad():
        probs = target(ids).logits[:, -3:].double().softmax(-1)  # [V V, 3, V]
    probs = probs.view(VOCABULARY, VOCABULARY, 3, VOCABULARY)
    first, second, third = probs[0, 0, 0], probs[:, 0, 1], probs[:, :, 2]  # [V], [V, V], [V, V, V]
    return torch.einsum("a,ab,abc->bc", first, second, third)


@pytest.fixture
def mended(monkeypatch):
    """The kernel returns what it computes, and the plug-in refuses nothing."""

    def expand(x, ends, count, replace_from=0, replace_to=0):
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()  # [B]
        out = x.repeat_interleave(counts)  # [N]
        return out.masked_fill(out == replace_from, replace_to) if replace_from != replace_to else out

    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", expand)
    unchecked = getattr(vllm.SamplingParams._validate_spec_decode, "__wrapped__", None)
    if unchecked is not None:
        monkeypatch.setattr(vllm.SamplingParams, "_validate_spec_decode", unchecked)


def engine(folder, speculative_config=None):
    return vllm.LLM(
        model=str(folder / "target"),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=256,
        kv_cache_memory_bytes=1 << 27,
        block_size=32,
        disable_log_stats=False,
        speculative_config=speculative_config,
    )


def off_by(llm, exact) -> float:
    """Chi-squared of the counted pairs, in standard deviations."""
    found = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.double)
    for _ in range(SAMPLES // 1000):
        for _, second, third, *_ in texts(llm, [PROMPT], temperature=1.0, max_tokens=4, n=1000, detokenize=False):
            found[second, third] += 1
    wanted = exact * found.sum()
    chi2, cells = ((found - wanted) ** 2 / wanted).sum(), VOCABULARY**2 - 1
    print(f"chi-squared {chi2:.0f}, degrees of freedom {cells}")
    return float((chi2 - cells) / (2 * cells) ** 0.5)


def test_plain_vllm_samples_from_the_exact_distribution(folder, exact):
    assert abs(off_by(engine(folder), exact)) < BY_CHANCE


def test_heads_sample_right_with_a_mended_kernel(folder, exact, mended):
    llm = engine(folder, {"model": str(folder / "heads"), "num_speculative_tokens": 2})
    assert abs(off_by(llm, exact)) < BY_CHANCE
    assert count(llm, "spec_decode_num_accepted_tokens") > SAMPLES / 20


@pytest.fixture(scope="module")
def with_n_grams(folder):
    """One engine, and the last: they import numba, which no further one survives."""
    return engine(folder, NGRAMS)


def test_n_grams_sample_wrongly_with_vllms_own_kernel(with_n_grams, exact):
    """Where this fails, vLLM has mended its kernel: then the plug-in refuses nothing either."""
    assert off_by(with_n_grams, exact) > 10 * BY_CHANCE


def test_n_grams_sample_right_with_a_mended_kernel(with_n_grams, exact, mended):
    before = count(with_n_grams, "spec_decode_num_accepted_tokens")
    assert abs(off_by(with_n_grams, exact)) < BY_CHANCE
    assert count(with_n_grams, "spec_decode_num_accepted_tokens") - before > SAMPLES / 20
