"""Commands that measure speed and draw the results: `benchmark` and `plot`."""

import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..apps.lines import print_line
from ..measure import benchmark as bench
from ..measure import plots
from ..measure.prompts import default_prompts, load_questions
from ..measure.tables import category_tables_of, notes_of, tables_of
from .inputs import load
from .options import (
    BatchSizes,
    Caches,
    Device,
    Dtype,
    GgufFile,
    Heads,
    NodeCounts,
    Pack,
    Prompts,
    Target,
    TrustRemoteCode,
    checked,
)


def benchmark(
    target: Target = None,
    gguf_file: GgufFile = None,
    heads: Heads = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="What to compare with: prompt-lookup, assistant:MODEL (a smaller model) or NAME:HEADS (other heads). "
            "NAME@8:HEADS drafts 8 nodes per step, NAME@7-chain:HEADS a chain of 7. In place of NAME:HEADS, heads "
            "means those of --heads, as in heads@7-chain.",
            show_default=False,
        ),
    ] = None,
    prompts: Prompts = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of prompts. If they have categories, one is taken from each in turn. Default: 8.",
            show_default=False,
        ),
    ] = None,
    per_category: Annotated[
        int | None,
        typer.Option(min=1, help="Prompts of each category, in place of --num-prompts.", show_default=False),
    ] = None,
    batch_size: BatchSizes = [1],  # noqa: B006
    nodes: NodeCounts = ["auto"],  # noqa: B006
    tree: Annotated[
        list[str] | None,
        typer.Option(help="How trees grow: global, levels or chain. Default: the heads' own.", show_default=False),
    ] = None,
    temperature: Annotated[list[float], typer.Option(min=0.0, help="0 for greedy.")] = [0.0],  # noqa: B006
    cache: Caches = ["dynamic"],  # noqa: B006
    max_new_tokens: Annotated[int, typer.Option(min=1, help="New tokens per prompt.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed for samples.")] = 0,
    dtype: Dtype = "auto",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    pack: Pack = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A JSON file, for `hf-clover plot`.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout in place of the table.")] = False,
) -> None:
    """Measure heads, plain generate and other ways to speed it up, side by side.

    All methods take turns in one run, prompt by prompt. With --pack, all methods are also measured with packed
    weights, and a second table compares them with plain generate with packed weights. Options that are lists take
    several values after one flag, and every combination is measured. A question of several turns is one conversation.
    Questions with categories (Spec-Bench's, MT-bench's) get a table by category too. After Ctrl-C, the measurements so
    far are shown; --output always holds them.

    Example: hf-clover benchmark --against prompt-lookup --batch-size 1 4 --nodes auto 8 -o result.json
    """
    if num_prompts is not None and per_category is not None:
        raise ValueError("`--num-prompts` and `--per-category` exclude each other: pass one of them.")
    counts = checked(nodes, tree or [], cache)
    trees: Sequence[str | None] = tree or [None]
    model, tokenizer, assistant = load(target, heads, dtype, device, trust_remote_code, gguf_file)
    prompts = prompts or default_prompts(tokenizer)
    methods = [bench.plain()]
    if assistant is not None:
        methods += [bench.with_heads(assistant, nodes=count, tree=shape) for shape, count in product(trees, counts)]
    loaded = {} if assistant is None else {"heads": assistant, heads or "heads": assistant}
    methods += [bench.parse_method(text, model, loaded) for text in against or []]
    if pack:
        methods += bench.packed(model, methods)
    if len(methods) == 1:
        raise ValueError("there is nothing to compare with plain generate: pass `--heads`, `--against` or `--pack`.")
    limit = (num_prompts or 8) if per_category is None else None
    latest: dict[str, Any] = {}

    def keep(result: dict[str, Any]) -> None:
        latest.update(result)
        if output is not None:
            bench.write(result, output)

    try:
        keep(
            bench.benchmark(
                model,
                tokenizer,
                methods,
                load_questions(prompts, tokenizer, limit, per_category),
                prompt_set=prompts,
                batch_sizes=batch_size,
                temperatures=temperature,
                cache_implementations=cache,
                max_new_tokens=max_new_tokens,
                repeats=repeats,
                seed=seed,
                progress=sys.stderr.isatty(),
                report=keep,
            )
        )
    finally:  # after Ctrl-C too
        if latest:
            _show(latest, output, as_json)


def _show(result: dict[str, Any], output: Path | None, as_json: bool) -> None:
    if output is not None:
        typer.echo(f"Written to {output}; `hf-clover plot {output}` draws it.", err=True)
    if as_json:
        typer.echo(json.dumps(result))
        return
    console = Console()
    for table in [*tables_of(result), *category_tables_of(result)]:
        console.print(table)
    for note in notes_of(result):
        print_line(console, note)


def plot(
    results: Annotated[
        list[Path],
        typer.Argument(help="JSON of benchmark or an experiment, trainer_state.json, or the folder of --learn."),
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A folder. Default: beside each JSON.")] = None,
) -> None:
    """Draw results: NAME.png and NAME-dark.png from each NAME.json.

    The names of the pictures are printed, one per line.

    Example: hf-clover plot result.json --out pictures
    """
    for path in results:
        for picture in plots.plot(path, out):
            typer.echo(str(picture))
