"""Where does every millisecond of a step go, and does a step grow with the text?

The parts of a step (verify, draft, walk, commit) by the clock, for trees of several sizes and for the automatic one,
beside the step of plain generate; the operators that take longest; then the time of a step and of a token after texts
of several lengths, without the time that reading them takes. Greedy. Efficiency is plain generate's step over this
one: the speedup is that times the tokens that a step brings to the row that ends last.

    python examples/experiments/step.py
    python examples/experiments/step.py --target org/target --heads org/heads --prompts mt_bench.jsonl
"""

import statistics
from collections.abc import Sequence
from itertools import product
from typing import Any

from common import GENERATION, TOY_GENERATION, finish, line, load_heads, load_target, panel, parse
from step_parts import PARTS, contexts_of, kernels_of, long_prompt, parts_of
from tqdm.auto import tqdm

from hf_clover.measure.benchmark import batch_of, plain, with_heads
from hf_clover.measure.prompts import load_prompts

DEFAULTS = {**GENERATION, "nodes": (2, 4, 8, 16, 24), "batch_sizes": (1, 4, 8), "contexts": (256, 1024, 2048, 4096)}
TOY = {**TOY_GENERATION, "nodes": (2, 4), "batch_sizes": (1, 2), "contexts": (16, 32)}
PROFILED = ("plain", "automatic")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(__doc__, argv, DEFAULTS, TOY)
    target, tokenizer = load_target(args)
    heads = load_heads(args, target)
    prompts = load_prompts(args.prompts, tokenizer, args.num_prompts)
    automatic = with_heads(heads, "automatic")
    methods = [plain(), *(with_heads(heads, f"{n} nodes", n) for n in args.nodes), automatic]
    pad = next((p for p in (tokenizer.pad_token_id, tokenizer.eos_token_id) if p is not None), 0)
    common = {"do_sample": False, "pad_token_id": pad}

    steps, kernels, contexts = [], [], []
    sizes = [size for size in args.batch_sizes if size <= len(prompts)]
    for size, method in tqdm(list(product(sizes, methods)), "parts of a step"):
        groups = [prompts[first : first + size] for first in range(0, len(prompts), size)]
        batches = [batch_of(group, pad, target.device) for group in groups if len(group) == size]
        with method.applied() as keywords:
            options = {"max_new_tokens": args.max_new_tokens, **common, **keywords}
            found = mean([parts_of(target, batch, options) for batch in batches])
            longest = kernels_of(target, batches[0], options) if size == 1 and method.name in PROFILED else []
        steps.append({"batch_size": size, "method": method.name, "nodes": method.nodes, **found})
        kernels += [{"method": method.name, **kernel} for kernel in longest]
    for row in steps:
        plain_row = next(r for r in steps if r["batch_size"] == row["batch_size"])
        row["efficiency"] = plain_row["step_ms"] / row["step_ms"]
    for length in tqdm(args.contexts, "length of the text"):
        inputs = batch_of([long_prompt(tokenizer, length)], pad, target.device)
        for method in (plain(), automatic):
            few_and_many = (args.max_new_tokens // 8, args.max_new_tokens * 5 // 8)
            found = contexts_of(target, inputs, few_and_many, {"pad_token_id": pad, **method.options})
            contexts.append({"method": method.name, "context": length, **found})

    panels = []
    for size in sizes:
        mine = [row for row in steps if row["batch_size"] == size]
        fixed = [row for row in mine if row["nodes"]]
        parts = [
            line(part, [(row["nodes"], row["parts_ms"].get(part)) for row in fixed]) for part in (*PARTS, "other")
        ]
        level = {"y": mine[0]["step_ms"], "label": "a step of plain generate"}
        title = f"Parts of a step, batch {size}"
        panels.append(panel("lines", title, "nodes of a tree", "milliseconds", parts, "log2", reference=level))
    names = dict.fromkeys(row["method"] for row in contexts)
    of_method = {name: [row for row in contexts if row["method"] == name] for name in names}
    growth = [line(name, [(r["context"], r["token_ms"]) for r in rows]) for name, rows in of_method.items()]
    title = "A token, by the length of the text"
    panels.append(panel("lines", title, "tokens before it", "milliseconds", growth, "log2"))
    columns = ("batch_size", "method", "context", "tokens_per_forward", "step_ms", "efficiency")
    flat = [{**row, **row.get("parts_ms", {})} for row in (*steps, *contexts)]
    table = [{name: row.get(name) for name in (*columns, *PARTS, "other", "token_ms")} for row in flat]
    more = {"kernels": kernels, "contexts": contexts}
    return finish(args, target, __doc__, steps, "Where a step goes", panels, table, script=__file__, **more)


def mean(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over prompts, of every number, also of those within."""
    return {
        name: mean([each[name] for each in found])
        if isinstance(value, dict)
        else statistics.fmean(each[name] for each in found)
        for name, value in found[0].items()
    }


if __name__ == "__main__":
    main()
