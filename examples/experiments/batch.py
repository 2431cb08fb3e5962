"""How does the speedup change with the batch size, for a small, a large and an automatic tree?

The first paper's throughput falls below plain decoding at batch 32 on a 7B model, which is why its tree has four
nodes. Plain generate and the trees take turns on the same batches; greedy decoding.

    python examples/experiments/batch.py
    python examples/experiments/batch.py --target org/target --heads org/heads --prompts mt_bench.jsonl
"""

from collections.abc import Sequence
from typing import Any

from common import (
    GENERATION,
    PLAIN,
    TOY_GENERATION,
    finish,
    line,
    load_heads,
    load_target,
    panel,
    parse,
    with_range,
)

from hf_clover.measure.benchmark import measure, plain, with_heads
from hf_clover.measure.prompts import load_prompts

DEFAULTS = {**GENERATION, "batch_sizes": (1, 2, 4, 8, 16, 24, 32, 48), "nodes": ("4", "24", "auto")}
TOY = {**TOY_GENERATION, "batch_sizes": (1, 2), "nodes": ("4", "auto")}
PAPER = {4: 1.91, 8: 1.76, 16: 1.57, 24: 1.67, 32: 0.95, 48: 0.79}  # Clover, 7B, four nodes, "Math"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(__doc__, argv, DEFAULTS, TOY)
    target, tokenizer = load_target(args)
    heads = load_heads(args, target)
    needed = max(args.num_prompts, *args.batch_sizes)
    prompts = sorted(
        load_prompts(args.prompts, tokenizer, 4 * needed), key=len
    )  # short ones: decoding is the question
    methods = [plain()] + [
        with_heads(heads, f"{nodes} nodes", None if nodes == "auto" else int(nodes)) for nodes in args.nodes
    ]
    rows = []
    for size in args.batch_sizes:
        rows += measure(
            target,
            tokenizer,
            methods,
            prompts[: max(args.num_prompts, size)],
            batch_size=size,
            max_new_tokens=args.max_new_tokens,
            repeats=args.repeats,
            seed=args.seed,
        )

    def lines_of(name: str, methods: Sequence[Any]) -> list[dict[str, Any]]:
        of_method = {method.name: [row for row in rows if row["method"] == method.name] for method in methods}
        return [
            line(label, [(row["batch_size"], with_range(row, name)) for row in mine])
            for label, mine in of_method.items()
        ]

    its = line("first paper, 7B, 4 nodes", [(b, s) for b, s in PAPER.items() if b in args.batch_sizes], dashed=True)
    panels = [
        panel(
            "lines", "Throughput", "batch size", "tokens per second", lines_of("tokens_per_second", methods), "log2"
        ),
        panel(
            "lines",
            "Speedup",
            "batch size",
            "× plain generate",
            [*lines_of("speedup", methods[1:]), its],
            "log2",
            reference=PLAIN,
        ),
    ]
    columns = ("batch_size", "method", "tokens_per_second", "tokens_per_forward", "speedup", "identical")
    table = [{name: row.get(name) for name in columns} for row in rows]
    paper = {"batch_sizes": list(PAPER), "speedup": list(PAPER.values())}
    title = "Speedup by batch size"
    return finish(args, target, __doc__, rows, title, panels, table, script=__file__, paper=paper)


if __name__ == "__main__":
    main()
