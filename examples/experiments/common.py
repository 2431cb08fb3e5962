"""What the experiments share: arguments, the target and its heads, a quiet training run, and the result on disk.

Contract: an experiment is a script with a `main(argv)` that gets rows of figures and hands them to `finish`, which
writes `NAME.json` (settings, machine, command and the figure's data in it), draws `NAME.png` and `NAME-dark.png` from
it, and shows a table. `--toy` changes sizes and nothing else. What is compared with what, is the scripts' business.
"""

import argparse
import datetime
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_clover import CloverHeads, CloverTrainingConfig
from hf_clover.measure.benchmark import write
from hf_clover.measure.plots import plot
from hf_clover.measure.provenance import provenance

HERE = Path(__file__).resolve().parent
STAND_IN = HERE.parent / "stand_in"

# ---------------------------------------------------------------------- arguments

HELP = {
    "heads": "trained heads of the target: an id or a folder",
    "prompts": "'stand-in', a .txt or .jsonl file, or a dataset with questions",
    "num_prompts": "how many of them",
    "max_new_tokens": "to generate from each",
    "temperature": "that they are sampled at; 0 is greedy",
    "repeats": "of every measurement",
    "tokens": "to train on",
    "batch_size": "samples in a training step",
    "learning_rate": "of every training run",
    "nodes": "drafted per step",
    "questions": "to be measured on: a .jsonl file of `turns` with a `category`",
    "contexts": "tokens of text before the steps that are timed",
    "per_category": "questions of each category",
    "rows": "of a batch",
    "share": "of the time, for learning",
    "steps": "of training",
    "window": "prompts whose figures are taken together",
    "read": "answers to learn from, a .jsonl file with `messages`",
}


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
    for name in ("target", "heads", "prompts", "questions", "read"):
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


def training_config(folder: Path, target: PreTrainedModel, **own: Any) -> CloverTrainingConfig:
    """For a run on the target's device that says nothing and saves nothing, but for what `own` arguments ask for."""
    on_gpu = target.device.type == "cuda"
    quiet = dict(logging_strategy="no", save_strategy="no", report_to="none")
    return CloverTrainingConfig(
        output_dir=str(folder), use_cpu=not on_gpu, dataloader_pin_memory=on_gpu, **{**quiet, **own}
    )


# ---------------------------------------------------------------------- the result


def line(label: str, points: Iterable[tuple[Any, Any]], **more: Any) -> dict[str, Any]:
    """A series of a figure from (x, y) or (x, (y, low, high)); a point without a value is left out."""
    kept = [(x, y) for x, y in points if y is not None]
    if kept and isinstance(kept[0][1], tuple):
        y, low, high = ([value[i] for _, value in kept] for i in range(3))
        return {"label": label, "x": [x for x, _ in kept], "y": y, "low": low, "high": high, **more}
    return {"label": label, "x": [x for x, _ in kept], "y": [y for _, y in kept], **more}


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
