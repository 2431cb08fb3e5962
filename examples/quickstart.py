"""Clover in a minute: a small real model writes Python, alone and with its heads; the same tokens, sooner.

Everything is in the repository: the stand-in, a language model of a few million parameters that was trained on
Python's standard library, and clover-x heads for it (how they were made: `examples/train_stand_in.py`). The three
functions it completes here are from modules that neither of them has seen. They are sampled, from one seed: what so
small a model finds most likely runs in circles, which is easy to draft and of no use. Every figure below the texts is
of these texts. `examples/smollm2` has a model that answers questions.
"""

import argparse
import os
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import hf_clover  # noqa: F401  (from here on, `generate` takes Clover heads as the assistant)
from hf_clover.apps.live import generate_live
from hf_clover.measure import plots
from hf_clover.measure.benchmark import benchmark, parse_method, plain, with_heads
from hf_clover.measure.prompts import STAND_IN, load_prompts

HERE = Path(__file__).resolve().parent
TEMPERATURE, SEED = 0.7, 12


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(HERE / "stand_in" / "target"))
    parser.add_argument("--heads", default=str(HERE / "stand_in" / "heads"))
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart.png"))
    args = parser.parse_args(argv)
    disable_progress_bar()
    console, load = Console(), os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    heads = AutoModel.from_pretrained(args.heads, dtype=torch.float32)
    size = sum(p.numel() for p in target.parameters()) / 1e6
    console.print(f"A target of {size:.1f} M parameters, {heads.config.variant} heads, on {target.device}.\n")

    prompts = load_prompts(STAND_IN, tokenizer, limit=3)
    console.print("Three functions, live. In colour: tokens that came free, drafted and confirmed.\n")
    sampling = {"do_sample": True, "temperature": TEMPERATURE}
    for number, prompt in enumerate(prompts):
        inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}
        torch.manual_seed(SEED + number)  # as in the benchmark
        generate_live(target, tokenizer, inputs, heads, console, max_new_tokens=args.max_new_tokens, **sampling)
        console.print()

    methods = [plain(), with_heads(heads), parse_method("prompt-lookup", target)]
    options = {"max_new_tokens": args.max_new_tokens, "temperatures": [TEMPERATURE], "seed": SEED}
    result = benchmark(target, tokenizer, methods, prompts, repeats=3, **options)
    console.print(table_of(result["rows"]))
    console.print(doubts(result["rows"], load, os.cpu_count() or 1), end="")
    console.print("prompt-lookup, transformers' own, drafts for nothing by copying; it samples another text.\n")
    picture = plots.draw(plots.figure_of(result), args.output)
    console.print(f"A picture of it: {picture}\n")
    console.print("For your own model, in three commands:", style="bold")
    console.print(
        "  hf-clover train --teacher_model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/Capybara --packing "
        "--output_dir my-heads\n"
        "  hf-clover benchmark --target Qwen/Qwen3-0.6B --heads my-heads --prompts trl-lib/Capybara\n"
        "  hf-clover chat --target Qwen/Qwen3-0.6B --heads my-heads",
        highlight=False,
        soft_wrap=True,
    )
    return result


def table_of(rows: list[dict]) -> Table:
    table = Table("", "tokens per forward", "speedup (of 3 runs)", "same tokens", title="These three functions")
    for row in rows:
        low, high = row["speedup_range"]
        table.add_row(
            row["method"],
            f"{row['tokens_per_forward']:.2f}",
            f"{row['speedup']:.2f}" + (f" ({low:.2f} to {high:.2f})" if low < high else ""),
            {None: "", True: "yes", False: "NO"}[row["identical"]],
        )
    return table


def doubts(rows: list[dict], load: float, cores: int) -> str:
    """Why the figures may say little, where they do: runs that differ, or other work on the machine."""
    apart = [
        f"{row['method']} {low:.2f} to {high:.2f}"
        for row in rows
        for low, high in [row["speedup_range"]]
        if high - low > 0.2 * row["speedup"]
    ]
    reasons = [f"The runs are far apart ({', '.join(apart)})"] if apart else []
    if load > cores / 2:
        reasons.append(f"Other programs ran here when this began (load average {load:.1f} on {cores} cores)")
    return ". ".join(reasons) + (": run it again on an idle machine before you believe it.\n" if reasons else "")


if __name__ == "__main__":
    main()
