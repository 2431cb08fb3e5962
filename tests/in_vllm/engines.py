"""What the tests of this folder share: targets with their committed heads, and engines of vLLM that run them."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
pytest.importorskip("vllm.config", reason="vLLM is not installed")  # this folder is called vllm, too
vllm = sys.modules["vllm"]

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 96
SYSTEM = """You answer questions of people who are in a hurry. Say first what they need to know, then why it is so, and
leave out everything that they could have guessed. Where a question can be read in two ways, say which one you take.
Give numbers with their units, and name what you are not sure of."""  # longer than two blocks of vLLM's cache
QUESTIONS = (
    "Why is the sky blue?",
    "Write a short letter to a friend about a walk in the rain.",
    "A train goes 60 miles in 45 minutes. How fast is it? Show your steps.",
    "Write a Python function that says whether a number is prime.",
    "List three differences between a frog and a toad.",
    "Put into other words: The early bird catches the worm.",
    "Explain to a child what a shadow is.",
    "What should be packed for three days in the mountains?",
)


@dataclass
class Example:
    """A target in this repository, heads for it, how long a text may be, and how vLLM is told to run them."""

    folder: Path
    max_model_len: int
    name: str = "heads"
    drafted: int = 4
    method: str | None = None  # None: the plug-in says it
    processes: int = 2  # among which the target's attention heads can be divided

    @property
    def target(self) -> Path:
        return self.folder / "target"

    @property
    def heads(self) -> Path:
        return self.folder / self.name

    def prompts(self) -> list[list[int]]:
        tokenizer = AutoTokenizer.from_pretrained(self.target)
        if tokenizer.chat_template:
            system = {"role": "system", "content": SYSTEM}
            chats = [[system, {"role": "user", "content": question}] for question in QUESTIONS]
            return [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
        ids = tokenizer((ROOT / "examples/one_step.py").read_text())["input_ids"]
        return [ids[i * 150 : i * 150 + 40 + i * 9] for i in range(8)]

    def engine(self, drafts: bool = True, heads: Path | None = None, nodes: int | None = None, **settings: Any):
        """With `heads`, or this target's own, where it `drafts`."""
        speculative = {"model": str(heads or self.heads), "num_speculative_tokens": nodes or self.drafted}
        if self.method is not None:
            speculative["method"] = self.method
        defaults = {
            "model": str(self.target),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": self.max_model_len,
            "kv_cache_memory_bytes": 1 << 28,
            "block_size": 32,
            "disable_log_stats": False,
            **({"speculative_config": speculative} if drafts else {}),
        }
        return vllm.LLM(**{**defaults, **settings})


STAND_IN = Example(ROOT / "examples/stand_in", 256)
CLOVER = Example(ROOT / "examples/stand_in", 256, "clover", drafted=3, method="eagle3")
CLOVER_2 = Example(ROOT / "examples/stand_in", 256, "clover-2", method="eagle3")
SMOLLM2 = Example(ROOT / "examples/smollm2", 512, processes=3)


def texts(llm: Any, prompts: list[list[int]], **asked: Any) -> list[list[int]]:
    asked = vllm.SamplingParams(**{"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True, **asked})
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
    return [list(sample.token_ids) for answer in answers for sample in answer.outputs]


def count(llm: Any, name: str) -> float:
    return next(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}")
