"""Committed heads inside vLLM: run with the environment that `make_environment.sh` makes.

OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest tests/in_vllm
"""

import re
import shutil

import pytest
import torch
from engines import CLOVER, CLOVER_2, LENGTH, SMOLLM2, STAND_IN, Example, count, texts, vllm
from transformers import AutoModelForCausalLM

import hf_clover


@pytest.fixture(
    scope="module",
    params=[STAND_IN, CLOVER_2, CLOVER, SMOLLM2],
    ids=["stand-in", "stand-in-clover-2", "stand-in-clover", "smollm2"],
)
def example(request):
    if not request.param.target.exists():
        pytest.skip(f"{request.param.target} is not there: examples/smollm2/make_target.py makes it")
    return request.param


@pytest.fixture(scope="module")
def prompts(example):
    return example.prompts()


@pytest.fixture(scope="module")
def plain(example, prompts):
    return texts(example.engine(drafts=False), prompts)


@pytest.fixture(scope="module")
def drafting(example, plain):
    return example.engine()


def our_own_chain(example, prompts) -> tuple[list[list[int]], int]:
    """The same in transformers' `generate`: texts, and how many drafts were verified."""
    target = AutoModelForCausalLM.from_pretrained(example.target, dtype=torch.float32)
    target.generation_config.eos_token_id = None
    heads = hf_clover.CloverHeads.from_pretrained(example.heads, dtype=torch.float32)
    heads.config.draft_tree, heads.generation_config.num_assistant_tokens = "chain", example.drafted
    out, drafts = [], 0
    for prompt in prompts:
        ids = torch.tensor([prompt])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}  # a chat holds tokens that also pad
        with hf_clover.speculations() as records:
            ids = target.generate(**inputs, assistant_model=heads, max_new_tokens=LENGTH, do_sample=False)
        out.append(ids[0, len(prompt) :].tolist())
        drafts += records[0].target_forwards - 1
    return out, drafts


def test_greedy_texts_equal_plain_vllm_and_drafts_equal_our_own_chains(example, plain, drafting, prompts):
    assert texts(drafting, prompts) == plain
    drafts, accepted = count(drafting, "spec_decode_num_drafts"), count(drafting, "spec_decode_num_accepted_tokens")
    ours, our_drafts = our_own_chain(example, prompts)
    assert ours == plain
    assert drafts == our_drafts
    # What a last draft holds beyond the length asked for is counted by vLLM, too.
    assert 0 <= accepted - (len(prompts) * (LENGTH - 1) - drafts) <= example.drafted * len(prompts)


def test_prompts_one_at_a_time_with_shared_prefixes_equal_plain(plain, drafting, prompts):
    before = count(drafting, "prefix_cache_hits")
    assert [texts(drafting, [prompt])[0] for prompt in prompts] == plain
    assert count(drafting, "prefix_cache_hits") > before


def test_sampling_is_refused_where_vllm_does_it_wrongly(drafting, prompts):
    with pytest.raises(vllm.exceptions.VLLMValidationError, match=r"temperature=1.0: on a CPU this vLLM"):
        texts(drafting, prompts, temperature=1.0)


def test_texts_equal_plain_when_requests_are_preempted(example, plain, prompts):
    llm = example.engine(max_num_batched_tokens=48, max_num_seqs=8, num_gpu_blocks_override=24)
    assert texts(llm, prompts) == plain
    assert count(llm, "num_preemptions") > 0


@pytest.mark.parametrize("is_divided", [False, True], ids=["one", "several"])
def test_texts_equal_plain_with_the_engine_in_other_processes(example, plain, prompts, is_divided, monkeypatch):
    """As `vllm serve` runs it: the engine is another process, which finds the plug-in by itself; or several ones, by
    tensor parallelism."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    llm = example.engine(**({"tensor_parallel_size": example.processes} if is_divided else {}))
    assert texts(llm, prompts) == plain
    assert count(llm, "spec_decode_num_accepted_tokens") > 0
    llm.llm_engine.engine_core.shutdown()


def test_more_drafts_than_the_heads_make_are_refused():
    with pytest.raises(ValueError, match="num_speculative_tokens=20 is more than these heads draft: 8"):
        STAND_IN.engine(nodes=20)


@pytest.mark.parametrize(
    ("heads", "method", "wanted"),
    [("clover-2", None, "eagle3"), ("heads", "eagle3", "mtp")],
)
def test_a_method_that_hands_over_other_states_is_refused(heads, method, wanted):
    """vLLM chooses `draft_model` itself where nothing is said."""
    example = Example(STAND_IN.folder, STAND_IN.max_model_len, heads, method=method)
    with pytest.raises(ValueError, match=f'method="{method or "draft_model"}": .* Put "method": "{wanted}"'):
        example.engine()


def test_heads_for_another_target_are_refused(tmp_path):
    shutil.copytree(STAND_IN.heads, tmp_path / "heads")
    config = tmp_path / "heads/config.json"
    config.write_text(re.sub(r'("target_fingerprint": ")\w+', r"\g<1>" + "27" * 16, config.read_text()))
    llm = STAND_IN.engine(heads=tmp_path / "heads")
    with pytest.raises(ValueError, match="These heads were made for another target"):
        texts(llm, STAND_IN.prompts()[:1])
