"""
Count the messages between tensor-parallel processes, and the bytes that each process puts into them: for one plain
step, and for one forward over a tree with its draft. Nothing is timed. Without arguments the stand-in is the target.

    torchrun --nproc-per-node 2 examples/scaling/communication.py [--target ... --heads ...] [--nodes 24]
"""

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from hf_clover import CloverHeads

STAND_IN = Path(__file__).parents[1] / "stand_in"
PROMPT = "def fibonacci(n):"


class Messages(TorchDispatchMode):
    """Counts collectives, and the bytes that go into them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = str(func)
        is_message = name.startswith(("c10d.", "_c10d_functional.")) and "wait" not in name
        if is_message:
            self.count += 1
            self.bytes += sum(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(messages: dict[str, list[float]], name: str) -> Iterator[None]:
    with Messages() as seen:
        yield
    messages[name] = [seen.count, seen.bytes]


def difference(target: PreTrainedModel, inputs: Any, options: dict[str, Any]) -> tuple[list[float], int]:
    """Messages and bytes per step: those of a long answer minus those of a short one with the same beginning."""
    messages: dict[str, list[float]] = {}
    steps = {}
    for length in (8, 40):
        torch.manual_seed(0)
        with counted(messages, str(length)):
            out = target.generate(
                **inputs, max_new_tokens=length, min_new_tokens=length, do_sample=False, pad_token_id=0, **options
            )
        speculation = getattr(out, "speculation", None)
        steps[str(length)] = speculation.target_forwards if speculation else length
    more = steps["40"] - steps["8"]
    return [(a - b) / more for a, b in zip(messages["40"], messages["8"], strict=True)], steps["40"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(STAND_IN / "target"))
    parser.add_argument("--heads", default=str(STAND_IN / "heads"))
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 24])
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    target = AutoModelForCausalLM.from_pretrained(arguments.target, tp_plan="auto", dtype="float32")
    heads = CloverHeads.from_pretrained(arguments.heads)
    inputs = AutoTokenizer.from_pretrained(arguments.target)(PROMPT, return_tensors="pt").to(target.device)
    target.generate(**inputs, assistant_model=heads, max_new_tokens=4, num_assistant_tokens=8)  # one-time work
    rows = [("plain", *difference(target, inputs, {}))]
    for nodes in arguments.nodes:
        options = {"assistant_model": heads, "num_assistant_tokens": nodes, "return_dict_in_generate": True}
        rows.append((f"{nodes} nodes", *difference(target, inputs, options)))
    if int(os.environ["RANK"]) == 0:
        print(f"{os.environ['WORLD_SIZE']} processes, per forward of the target, each process:")
        for name, (count, size), steps in rows:
            print(json.dumps({"step": name, "messages": count, "KiB": size / 1024, "forwards for 40 tokens": steps}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
