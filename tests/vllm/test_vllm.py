"""The stand-in's heads inside vLLM: run with the environment that `make_environment.sh` makes.

OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest tests/vllm
"""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_clover

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
pytest.importorskip("vllm.config", reason="vLLM is not installed")  # this folder is called vllm, too
vllm = sys.modules["vllm"]


ROOT = Path(__file__).resolve().parents[2]
STAND_IN = ROOT / "examples/stand_in"
LENGTH, DRAFTED = 96, 4


@pytest.fixture(scope="module")
def prompts():
    tokenizer = AutoTokenizer.from_pretrained(STAND_IN / "target")
    ids = tokenizer((ROOT / "examples/one_step.py").read_text())["input_ids"]
    return [ids[i * 150 : i * 150 + 40 + i * 9] for i in range(8)]


def engine(heads: Path | None, **settings):
    speculative = {"speculative_config": {"model": str(heads), "num_speculative_tokens": DRAFTED}} if heads else {}
    return vllm.LLM(
        **{
            "model": str(STAND_IN / "target"),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 256,
            "kv_cache_memory_bytes": 1 << 28,
            "block_size": 32,
            "disable_log_stats": False,
            **speculative,
            **settings,
        }
    )


def texts(llm, prompts, temperature=0.0):
    asked = vllm.SamplingParams(temperature=temperature, max_tokens=LENGTH, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def count(llm, name):
    return next(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}")


@pytest.fixture(scope="module")
def plain(prompts):
    return texts(engine(None), prompts)


@pytest.fixture(scope="module")
def drafting():
    return engine(STAND_IN / "heads")


def our_own_chain(prompts) -> tuple[list[list[int]], int]:
    """The same in transformers' `generate`: texts, and how many drafts were verified."""
    target = AutoModelForCausalLM.from_pretrained(STAND_IN / "target", dtype=torch.float32)
    target.generation_config.eos_token_id = None
    heads = hf_clover.CloverHeads.from_pretrained(STAND_IN / "heads", dtype=torch.float32)
    heads.config.draft_tree, heads.generation_config.num_assistant_tokens = "chain", DRAFTED
    out, drafts = [], 0
    for prompt in prompts:
        with hf_clover.speculations() as records:
            ids = target.generate(torch.tensor([prompt]), assistant_model=heads, max_new_tokens=LENGTH)
        out.append(ids[0, len(prompt) :].tolist())
        drafts += records[0].target_forwards - 1
    return out, drafts


def test_greedy_texts_are_plain_vllms_and_drafts_are_our_own(plain, drafting, prompts):
    assert texts(drafting, prompts) == plain
    drafts, accepted = count(drafting, "spec_decode_num_drafts"), count(drafting, "spec_decode_num_accepted_tokens")
    ours, our_drafts = our_own_chain(prompts)
    assert ours == plain
    assert drafts == our_drafts
    # What a last draft holds beyond the length asked for is counted by vLLM, too.
    assert 0 <= accepted - (len(prompts) * (LENGTH - 1) - drafts) <= DRAFTED * len(prompts)


def test_one_at_a_time_and_from_shared_prefixes(plain, drafting, prompts):
    before = count(drafting, "prefix_cache_hits")
    assert [texts(drafting, [prompt])[0] for prompt in prompts] == plain
    assert count(drafting, "prefix_cache_hits") > before


def test_sampling_is_refused_where_vllm_does_it_wrongly(drafting, prompts):
    with pytest.raises(ValueError, match=r"temperature=1.0: on a CPU this vLLM samples wrongly"):
        texts(drafting, prompts, temperature=1.0)


def test_a_small_budget_and_preemption(plain, prompts):
    llm = engine(STAND_IN / "heads", max_num_batched_tokens=48, max_num_seqs=8, num_gpu_blocks_override=24)
    assert texts(llm, prompts) == plain
    assert count(llm, "num_preemptions") > 0


def test_more_drafts_than_the_heads_make_are_refused():
    with pytest.raises(ValueError, match="num_speculative_tokens=20 is more than these heads draft: 8"):
        engine(None, speculative_config={"model": str(STAND_IN / "heads"), "num_speculative_tokens": 20})


def test_heads_for_another_target_are_refused(prompts, tmp_path):
    shutil.copytree(STAND_IN / "heads", tmp_path / "heads")
    config = tmp_path / "heads/config.json"
    config.write_text(re.sub(r'("target_fingerprint": ")\w+', r"\g<1>" + "27" * 16, config.read_text()))
    llm = engine(tmp_path / "heads")
    with pytest.raises(ValueError, match="These heads were made for another target"):
        texts(llm, prompts[:1])
