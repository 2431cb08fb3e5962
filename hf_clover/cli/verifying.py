"""A check that heads change no token: `verify`."""

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from ..apps.lines import print_line
from ..measure import losslessness
from ..measure.prompts import default_prompts, load_prompts
from .inputs import load
from .options import (
    TREES,
    BatchSizes,
    Caches,
    Device,
    Dtype,
    GgufFile,
    Heads,
    NodeCounts,
    NumPrompts,
    Pack,
    Prompts,
    Target,
    TrustRemoteCode,
    checked,
)


def verify(
    target: Target = None,
    gguf_file: GgufFile = None,
    heads: Heads = None,
    prompts: Prompts = None,
    num_prompts: NumPrompts = 8,
    batch_size: BatchSizes = [1, 3],  # noqa: B006
    nodes: NodeCounts = ["auto", "4", "24"],  # noqa: B006
    tree: Annotated[list[str], typer.Option(help="How trees grow: global, levels or chain.")] = list(TREES),  # noqa: B006
    cache: Caches = ["dynamic"],  # noqa: B006
    max_new_tokens: Annotated[int, typer.Option(min=1, help="New tokens per prompt.")] = 64,
    dtype: Dtype = "auto",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    pack: Pack = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout in place of the table.")] = False,
) -> None:
    """Check that heads change no token; if one is changed, say why.

    Every prompt is continued greedily without and with heads, at every combination of the settings. The verdict is
    "numerics" if tokens differ only where the target's two best tokens were closer than its rounding in this dtype. It
    is "BUG" if one differs elsewhere; then the exit code is 1.

    Example: hf-clover verify --target Qwen/Qwen3-0.6B --heads my-heads --dtype bfloat16
    """
    counts = checked(nodes, tree, cache)
    model, tokenizer, assistant = load(target, heads, dtype, device, trust_remote_code, gguf_file, pack)
    if assistant is None:
        raise ValueError("there are no heads to verify: pass `--heads`, an id or a folder.")
    prompts = prompts or default_prompts(tokenizer)
    result = losslessness.verify(
        model,
        tokenizer,
        assistant,
        load_prompts(prompts, tokenizer, num_prompts),
        prompt_set=prompts,
        batch_sizes=batch_size,
        nodes=counts,
        trees=tree,
        cache_implementations=cache,
        max_new_tokens=max_new_tokens,
        progress=sys.stderr.isatty(),
    )
    if as_json:
        typer.echo(json.dumps(result))
    else:
        console = Console()
        for line in losslessness.report_of(result):
            print_line(console, line)
    raise typer.Exit(int(result["verdict"] == losslessness.BUG))
