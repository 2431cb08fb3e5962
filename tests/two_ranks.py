"""What two processes give that share one target: for `test_several_processes.py`, and under torchrun by it.

Contract: `python two_ranks.py FOLDER` reads `FOLDER`/target and `FOLDER`/heads (of `tiny_text`) and writes
`FOLDER`/rank0.json and rank1.json, the results of every case by name. One process alone gives the same by `one_rank`.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from helpers.tiny_text import END, PAD, make_tokenizer
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_clover import CloverHeads
from hf_clover.decoding import loop
from hf_clover.targets.private_api import cache_name

TEXTS = ("def f(x):", "for x in")
GREEDY = {"do_sample": False, "max_new_tokens": 24}
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 8, "max_new_tokens": 24}
FIXED = {"num_assistant_tokens": 8}


def prompts(*texts: str) -> dict[str, torch.Tensor]:
    tokenizer = make_tokenizer()
    tokenizer.padding_side = "left"
    return dict(tokenizer(list(texts), return_tensors="pt", padding=True))


def said(target: Any, heads: Any, inputs: dict[str, torch.Tensor], seed: int = 3, **options: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    options, forwards = {"pad_token_id": PAD, "eos_token_id": END, **options}, []
    counting = target.register_forward_pre_hook(lambda *_: forwards.append(1))
    out = target.generate(**inputs, assistant_model=heads, return_dict_in_generate=True, **options)
    counting.remove()
    stats = getattr(out, "speculation", None)
    return {
        "tokens": out.sequences.tolist(),
        "cached": out[cache_name()].get_seq_length(),
        "accepted": stats.accepted_tokens if stats else 0,
        "sizes": stats.tree_sizes if stats else [],
        "forwards": len(forwards),
        "method": stats.method if stats else "plain",
        "after": torch.rand(1).item(),  # where the random numbers stand
    }


# Under tensor parallelism: name -> a call of `said`. Both processes get the same prompts.
SHARED: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "greedy": lambda target, heads: said(target, heads, prompts(TEXTS[0]), **GREEDY, **FIXED),
    "sampled": lambda target, heads: said(target, heads, prompts(TEXTS[0]), **SAMPLED, **FIXED),
    "batch": lambda target, heads: said(target, heads, prompts(*TEXTS, "if"), **SAMPLED, **FIXED),
    "padded": lambda target, heads: said(target, heads, prompts("a", "def f(x):"), **GREEDY, **FIXED),
}


def on_a_clock_of_its_own(rank: int) -> SimpleNamespace:
    """A clock on which every step takes another time, in every process."""
    ticks, state = torch.Generator().manual_seed(rank), {"now": 0.0}

    def perf_counter() -> float:
        state["now"] += torch.rand(1, generator=ticks).item()
        return state["now"]

    return SimpleNamespace(perf_counter=perf_counter)


def tensor_parallel(folder: Path) -> dict[str, Any]:
    target = AutoModelForCausalLM.from_pretrained(folder / "target", tp_plan="auto")
    heads = CloverHeads.from_pretrained(folder / "heads")
    rank = torch.distributed.get_rank()
    results: dict[str, Any] = {name: case(target, heads) for name, case in SHARED.items()}
    results["local heads"] = target.model.layers[0].self_attn.k_proj.weight.to_local().shape[0]
    loop.time = on_a_clock_of_its_own(rank)
    results["automatic"] = said(target, heads, prompts(TEXTS[0]), **{**SAMPLED, "max_new_tokens": 60})
    # Plain generate would ask for one seed; here the first process's counts.
    results["other seed"] = said(target, heads, prompts(TEXTS[0]), seed=3 + rank, **SAMPLED, **FIXED)
    try:
        CloverHeads.from_target(target)
    except ValueError as error:
        results["from target"] = str(error)
    return results


# Under FSDP: each process has prompts of its own, and they need different numbers of steps.
OWN = (
    (prompts(TEXTS[0]), {**GREEDY, "max_new_tokens": 40}),
    (prompts("a", "def f(x):"), {**GREEDY, "max_new_tokens": 9}),
)
UNEVEN = (  # the rows of the first end at their 19th and 3rd token
    (prompts(TEXTS[0], "x"), {**GREEDY, "eos_token_id": make_tokenizer()("s").input_ids[0]}),
    (prompts(TEXTS[1]), {**SAMPLED, "max_new_tokens": 4}),  # sooner, whatever is accepted
)


def sharded(folder: Path) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    for layer in target.model.layers:
        fully_shard(layer)
    fully_shard(target)
    heads = CloverHeads.from_pretrained(folder / "heads")
    results = {}
    for name, cases in (("own", OWN), ("uneven", UNEVEN), ("turned", UNEVEN[::-1])):
        inputs, options = cases[torch.distributed.get_rank()]
        results[name] = said(target, heads, inputs, synced_gpus=True, **options, **FIXED)

    # transformers' own way to shard, which groups lm_head with the final norm and sets `synced_gpus` by itself.
    target = AutoModelForCausalLM.from_pretrained(folder / "target", distributed_config=DistributedConfig(fsdp_size=2))
    heads = CloverHeads.from_pretrained(folder / "heads")
    inputs, options = UNEVEN[torch.distributed.get_rank()]
    said(target, None, inputs, **options)  # leaves some weights in one piece, for a while
    results["by transformers"] = said(target, heads, inputs, **options, **FIXED)
    return results


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    results = {"tensor parallel": tensor_parallel(folder), "sharded": sharded(folder)}
    rank = torch.distributed.get_rank()
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
