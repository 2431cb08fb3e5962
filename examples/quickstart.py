"""Clover in a minute: a small real model writes Python, alone and with its heads; the same tokens, sooner.

Everything is in the repository: the stand-in, a language model of a few million parameters that was trained on
Python's standard library, and Clover-2 heads for it (how they were made: `examples/train_stand_in.py`). The three
functions it completes here are from modules that neither of them has seen.
"""

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import hf_clover  # noqa: F401  (from here on, `generate` takes Clover heads as the assistant)
from hf_clover import plots
from hf_clover.benchmark import benchmark, plain, with_heads
from hf_clover.live import generate_live
from hf_clover.prompts import STAND_IN, load_prompts

HERE = Path(__file__).resolve().parent


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(HERE / "stand_in" / "target"))
    parser.add_argument("--heads", default=str(HERE / "stand_in" / "heads"))
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart.png"))
    args = parser.parse_args(argv)
    disable_progress_bar()
    console = Console()

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    heads = AutoModel.from_pretrained(args.heads, dtype=torch.float32)
    size = sum(p.numel() for p in target.parameters()) / 1e6
    console.print(f"A target of {size:.1f} M parameters, {heads.config.variant} heads, on {target.device}.\n")

    prompts = load_prompts(STAND_IN, tokenizer, limit=3)
    result = benchmark(
        target, tokenizer, [plain(), with_heads(heads)], prompts, max_new_tokens=args.max_new_tokens, repeats=2
    )

    console.print("The second one once more, live. In colour: tokens that came free, drafted and confirmed:\n")
    inputs = {
        "input_ids": torch.tensor([prompts[1]]),
        "attention_mask": torch.ones(1, len(prompts[1]), dtype=torch.long),
    }
    generate_live(target, tokenizer, inputs, heads, console=console, max_new_tokens=args.max_new_tokens)

    table = Table("", "tokens/s", "tokens per forward", "speedup", "same tokens", title="\nThree functions")
    for row in result["rows"]:
        table.add_row(
            row["method"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['tokens_per_forward']:.2f}",
            f"{row['speedup']:.2f}",
            "" if row["method"] == "plain" else "yes" if row["identical"] else "NO",
        )
    console.print(table)
    picture = plots.draw(plots.figure_of(result), args.output)
    console.print(f"\nA picture of it: {picture}\n")
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


if __name__ == "__main__":
    main()
