"""clover-x heads for SmolLM2, by the default recipe, from its own answers.

ANSWERS is a file of `messages`, as `hf-clover regenerate` writes it; the last 2 % of its questions are used for the
evaluation. A second run continues where the first was stopped. `--output` then holds the files for the Hub: heads in
bfloat16, and a card with the measured figures. `--benchmark` adds the figures of `hf-clover benchmark` to the card.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset

from hf_clover import CloverHeads, CloverTrainer, CloverTrainingConfig
from hf_clover.hub.code import remove_code
from hf_clover.hub.push import write_card, write_results

HERE = Path(__file__).resolve().parent
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
HELD_OUT = 0.02


def train(args: argparse.Namespace) -> CloverTrainer:
    answers = load_dataset("json", data_files=str(args.answers), split="train")
    parts = answers.train_test_split(max(int(HELD_OUT * len(answers)), 1), shuffle=False)
    trainer = CloverTrainer(
        teacher_model=str(args.target),
        args=CloverTrainingConfig(
            output_dir=str(args.work),
            teacher_model_init_kwargs={"dtype": args.dtype},
            packing=True,
            max_length=args.max_length,
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
            draft_vocab_size=args.draft_vocab_size,
            num_train_epochs=args.epochs,
            logging_steps=10,
            save_steps=100,
            save_total_limit=2,
            report_to="none",
        ),
        train_dataset=parts["train"],
        eval_dataset=parts["test"],
    )
    trainer.train(resume_from_checkpoint=any(args.work.glob("checkpoint-*")))
    return trainer


def finish(args: argparse.Namespace, trainer: CloverTrainer) -> None:
    """Evaluate, and save in bfloat16 under the target's name on the Hub."""
    trainer.evaluate()
    trainer.create_model_card(dataset_name=args.answers.name)
    results = json.loads((args.work / "clover_results.json").read_text())
    args.output.mkdir(parents=True, exist_ok=True)
    trainer.heads.config.target_name_or_path = NAME
    trainer.heads.to(torch.bfloat16).save_pretrained(args.output)
    remove_code(args.output)
    write_results(args.output, **results)


def benchmarks_of(files: list[Path]) -> list[dict[str, Any]]:
    """The figures that `hf-clover benchmark` measured with clover-x heads, overall and by category, for a card."""
    found = []
    for file in files:
        result = json.loads(file.read_text())
        source = {key: result[key] for key in ("machine", "command", "versions")}
        for row in result["rows"]:
            if not row["method"].startswith("clover-x") or row["skipped"]:
                continue
            tree = "automatic trees" if row["nodes"] is None else f"trees of {row['nodes']} nodes"
            picks = "greedy" if row["temperature"] == 0 else f"temperature {row['temperature']:g}"
            how = f"{result['max_new_tokens']} new tokens, {picks}, {tree}"
            baseline = "plain generate"
            if result.get("packed") or "packed" in row["method"]:
                how, baseline = f"{how}, packed weights", f"{baseline} with packed weights"
            parts = [({}, row), *(({"category": name}, part) for name, part in row.get("categories", {}).items())]
            benchmark = {"prompts": f"{result['prompts']}, {how}", "precision": result["dtype"]}
            benchmark |= {"baseline": baseline, **source, "rows": []}
            for category, part in parts:
                figures = {key: part[key] for key in ("tokens_per_forward", "speedup", "efficiency")}
                benchmark["rows"].append({**category, "batch_size": row["batch_size"], **figures})
            found.append(benchmark)
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path, help="a JSON lines file of `messages`")
    parser.add_argument("--target", type=Path, default=HERE / "target", help="made by make_target.py")
    parser.add_argument("--output", type=Path, default=HERE / "heads")
    parser.add_argument("--work", type=Path, default=Path("runs/smollm2"), help="state of a run, to resume it")
    parser.add_argument("--dtype", default="auto", help="the target's; bfloat16 if the processor is fast with it")
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--draft-vocab-size", type=int, default=8192)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--benchmark", type=Path, nargs="+", default=[], help="only put these figures on the card")
    args = parser.parse_args(argv)
    if not args.benchmark:
        trainer = train(args)
        if trainer.was_interrupted:
            raise SystemExit(130)
        finish(args, trainer)
    else:
        write_results(args.output, benchmarks=benchmarks_of(args.benchmark))
    heads = CloverHeads.from_pretrained(args.output)
    write_card(args.output, heads, repo_id=args.output.name, license="apache-2.0", language="en")


if __name__ == "__main__":
    main()
