"""What the experiments share: arguments, the target and its heads, data, one training run, and the result on disk.

Contract: an experiment is a script with a `main(argv)` that gets rows of figures and hands them to `finish`, which
writes `NAME.json` (settings, machine, command and the figure's data in it), draws `NAME.png` and `NAME-dark.png` from
it, and shows a table. `--toy` changes sizes and nothing else. What is compared with what, is the scripts' business.
"""

import argparse
import datetime
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from continuations import Data
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProgressCallback,
    TrainerCallback,
)

from hf_clover import CloverHeads, CloverTrainer, CloverTrainingConfig
from hf_clover.measure.benchmark import write
from hf_clover.measure.plots import plot
from hf_clover.measure.provenance import provenance

HERE = Path(__file__).resolve().parent
STAND_IN = HERE.parent / "stand_in"
TOP_K = 5

# ---------------------------------------------------------------------- arguments

HELP = {
    "heads": "trained heads of the target: an id or a folder",
    "prompts": "'stand-in', a .txt or .jsonl file, or a dataset with questions",
    "num_prompts": "how many of them",
    "max_new_tokens": "to generate from each",
    "temperature": "that they are sampled at; 0 is greedy",
    "repeats": "of every measurement",
    "data": "to train on: a .parquet or .jsonl file or a dataset, with `input_ids`, `text`, `messages`, or `prompt` "
    "and `completion`; without it, the target continues pieces of Python's standard library",
    "samples": "continuations to make where there is no --data",
    "test_samples": "held-out samples to measure accuracy on",
    "length": "tokens in a sample",
    "tokens": "to train on",
    "batch_size": "samples in a training step",
    "learning_rate": "of every training run",
    "num_heads": "draft heads of every variant, so that rows differ in nothing else",
    "batch_sizes": "rows generated at once",
    "nodes": "drafted per step",
    "trees": "how trees are grown",
    "learning_rates": "to try",
    "fit": "text to train the target further on, a .jsonl file; without it, Python's language reference",
    "questions": "to be measured on: a .jsonl file of `turns` with a `category`",
    "fit_tokens": "that the target is trained further on",
    "contexts": "tokens of text before the steps that are timed",
    "per_category": "questions of each category",
    "rows": "of the table",
    "banned": "words",
    "share": "of the time, for learning",
    "steps": "of training",
    "window": "prompts whose figures are taken together",
    "read": "answers to learn from, a .jsonl file with `messages`",
    "draft_vocab_size": "ids that all heads score, the data's most frequent; 0 is all of them",
}
GENERATION = dict(heads=str(STAND_IN / "heads"), prompts="stand-in", num_prompts=8, max_new_tokens=64, repeats=3)
TRAINING = dict(data=None, samples=1500, test_samples=96, length=256, batch_size=2)
TOY_GENERATION = dict(num_prompts=2, max_new_tokens=8, repeats=1)
TOY_TRAINING = dict(samples=8, test_samples=4, length=32)


def parse(doc: str, argv: Sequence[str] | None, defaults: dict[str, Any], toy: dict[str, Any]) -> argparse.Namespace:
    """`defaults` are the script's own options; a tuple takes several values. `toy` are its sizes under `--toy`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(STAND_IN / "target"), help="an id or a folder")
    for name, default in defaults.items():
        several = isinstance(default, tuple)
        kind = str if default is None else type(default[0] if several else default)
        option = f"--{name.replace('_', '-')}"
        text = f"{HELP[name]} ({' '.join(map(str, default))})" if several else f"{HELP[name]} (%(default)s)"
        parser.add_argument(option, default=default, type=kind, nargs="+" if several else None, help=text)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=HERE / "results", help="where JSON and plots go")
    parser.add_argument("--work", type=Path, default=Path("runs/experiments"), help="where data is kept between runs")
    parser.add_argument("--toy", action="store_true", help="sizes that take seconds, to see that everything runs")
    if parser.parse_args(argv).toy:
        parser.set_defaults(**toy)
    return parser.parse_args(argv)


def settings_of(args: argparse.Namespace, target: PreTrainedModel) -> dict[str, Any]:
    """All arguments that figures depend on; of a folder its name, since where it lay is nobody's business."""
    settings = {name: value for name, value in vars(args).items() if name not in ("output", "work")}
    for name in ("target", "heads", "data", "prompts", "fit", "questions", "read"):
        if settings.get(name) and Path(settings[name]).exists():
            settings[name] = "/".join(Path(settings[name]).parts[-2:])
    return settings | {"dtype": str(target.dtype).removeprefix("torch."), "device": target.device.type}


# ---------------------------------------------------------------------- target, heads


def load_target(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "auto" if device == "cuda" else torch.float32  # half precision is slow on most CPUs
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).to(device).eval()
    return target, AutoTokenizer.from_pretrained(args.target)


def load_heads(args: argparse.Namespace, target: PreTrainedModel) -> CloverHeads:
    return CloverHeads.from_pretrained(args.heads, dtype=target.dtype).to(target.device).eval()


# ---------------------------------------------------------------------- training


@dataclass
class Training:
    heads: CloverHeads
    seconds: float  # of training alone, without what was measured in between
    measured: list[dict[str, Any]]  # one for each of the tokens asked for: tokens, top, acceptance_length


class _QuietProgress(ProgressCallback):
    """The bar without the lines between."""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        pass


class _EvaluateAt(TrainerCallback):
    def __init__(self, steps: set[int]) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_evaluate = state.global_step in self.steps


def training_config(folder: Path, target: PreTrainedModel, **own: Any) -> CloverTrainingConfig:
    """For a run on the target's device that says nothing and saves nothing, but for what `own` arguments ask for."""
    on_gpu = target.device.type == "cuda"
    quiet = dict(logging_strategy="no", save_strategy="no", report_to="none")
    return CloverTrainingConfig(
        output_dir=str(folder), use_cpu=not on_gpu, dataloader_pin_memory=on_gpu, **{**quiet, **own}
    )


def train(
    args: argparse.Namespace,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Data,
    tokens: Sequence[int],
    learning_rate: float,
    variant: str = "clover-2",
    precompute: bool = True,
    schedule: str = "linear",
    **fields: Any,
) -> Training:
    """One run over the largest of `tokens`, measured on the held-out samples at each of them.

    With `precompute` the target's states come from a folder that all runs over the same data share; the first run
    fills it. Without, the target's pass is part of the run, and so of its seconds, and nothing is measured.
    """
    per_step = args.batch_size * data.mean_length
    steps = {math.ceil(count / per_step): count for count in tokens}
    last = max(steps)
    needed = data.train.select(range(min(len(data.train), last * args.batch_size)))  # the states of others cost a pass
    config = training_config(
        args.work / "trainer",
        target,
        max_steps=last,
        learning_rate=learning_rate,
        lr_scheduler_type=schedule,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=8,
        max_length=args.length,
        bf16=target.device.type == "cuda",
        precompute_targets=precompute,
        precompute_dir=str(data.folder / f"states-{len(needed)}"),
        model_init_kwargs={"variant": variant, **fields},
        seed=args.seed,
    )
    trainer = CloverTrainer(
        teacher_model=target,
        args=config,
        train_dataset=needed,
        eval_dataset=data.test,
        processing_class=tokenizer,
        callbacks=[_EvaluateAt(set(steps) if precompute else set())],
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(_QuietProgress())
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    lines = [line for line in trainer.state.log_history if "eval_loss" in line]
    seconds -= sum(line["eval_runtime"] for line in lines)
    return Training(trainer.heads.eval(), seconds, [_measured(steps[line["step"]], line) for line in lines])


def _measured(tokens: int, line: dict[str, float]) -> dict[str, Any]:
    num_heads = sum(name.endswith("/top1") and name.startswith("eval_head_") for name in line)
    names = [[f"eval_head_{head}/top{k}" for k in range(1, TOP_K + 1)] for head in range(num_heads)]
    return {
        "tokens": tokens,
        "top": [[line[name] for name in of_head] for of_head in names],  # [head][k - 1]
        "acceptance_length": {f"top{k}": line[f"eval_acceptance_length/top{k}"] for k in range(1, TOP_K + 1)},
    }


# ---------------------------------------------------------------------- the result


def line(label: str, points: Iterable[tuple[Any, Any]], **more: Any) -> dict[str, Any]:
    """A series of a figure from (x, y) or (x, (y, low, high)); a point without a value is left out."""
    kept = [(x, y) for x, y in points if y is not None]
    if kept and isinstance(kept[0][1], tuple):
        y, low, high = ([value[i] for _, value in kept] for i in range(3))
        return {"label": label, "x": [x for x, _ in kept], "y": y, "low": low, "high": high, **more}
    return {"label": label, "x": [x for x, _ in kept], "y": [y for _, y in kept], **more}


def with_range(row: dict[str, Any], name: str) -> tuple[float, float, float] | None:
    """A figure of the benchmark with its lowest and highest; None where the method did not run."""
    return None if row["skipped"] else (row[name], *row[f"{name}_range"])


def panel(
    kind: str, title: str, xlabel: str, ylabel: str, series: list[dict[str, Any]], xscale: str = "linear", **more: Any
) -> dict[str, Any]:
    axes = {"title": title, "xlabel": xlabel, "ylabel": ylabel, "xscale": xscale}
    return {"kind": kind, **axes, "series": [one for one in series if one["x"]], **more}


PLAIN = {"y": 1.0, "label": "plain generate"}


def finish(
    args: argparse.Namespace,
    target: PreTrainedModel,
    doc: str,
    rows: list[dict[str, Any]],
    title: str,
    panels: list[dict[str, Any]],
    table: list[dict[str, Any]],
    script: str,
    **more: Any,
) -> dict[str, Any]:
    """Write, draw and show. `table` is what the screen shows of the rows; `more` are further fields of the JSON."""
    name, origin = Path(script).stem, provenance()
    figure = {
        "title": title,
        "note": f"{origin['machine']}; {origin['command']}",
        "panels": [p for p in panels if p["series"]],
    }
    result = {
        "kind": "experiment",
        "name": name,
        "question": " ".join(doc.split("\n\n")[0].split()),
        "settings": settings_of(args, target),
        **origin,
        "date": datetime.date.today().isoformat(),
        **more,
        "rows": rows,
        "figure": figure,
    }
    path = write(result, args.output / f"{name}.json")
    console = Console()
    columns = list(dict.fromkeys(column for row in table for column in row))
    shown = Table(*(column.replace("_", " ") for column in columns), title=title)
    for row in table:
        shown.add_row(*(_cell(row.get(column)) for column in columns))
    console.print(shown)
    for file in (path, *plot(path)):
        console.print(file, style="dim", highlight=False)
    return result


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
