"""How large should the tree be, and how should it grow? Tokens per forward and speedup by nodes and builder.

More nodes give more tokens per forward and make every forward dearer, so the speedup has a peak. All trees and plain
generate take turns on the same prompts. A chain has no more nodes than the heads draft levels.

    python examples/experiments/tree_size.py
    python examples/experiments/tree_size.py --target org/target --heads org/heads --prompts mt_bench.jsonl
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

DEFAULTS = {**GENERATION, "nodes": (2, 4, 8, 16, 32, 64), "trees": ("global", "levels", "chain")}
TOY = {**TOY_GENERATION, "nodes": (2, 4, 8)}


def trees_of(nodes: Sequence[int], tree: str, depth: int) -> list[int]:
    """The sizes that differ: a chain of `depth` nodes is the longest."""
    return list(dict.fromkeys(min(n, depth) if tree == "chain" else n for n in nodes))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(__doc__, argv, DEFAULTS, TOY)
    target, tokenizer = load_target(args)
    heads = load_heads(args, target)
    methods = [plain()] + [
        with_heads(heads, f"{tree} {nodes}", nodes, tree)
        for tree in args.trees
        for nodes in trees_of(args.nodes, tree, heads.config.draft_depth)
    ]
    rows = measure(
        target,
        tokenizer,
        methods,
        load_prompts(args.prompts, tokenizer, args.num_prompts),
        max_new_tokens=args.max_new_tokens,
        repeats=args.repeats,
        seed=args.seed,
    )
    of_tree = {tree: [row for row in rows if row["tree"] == tree] for tree in args.trees}
    per_forward = [
        line(tree, [(row["nodes"], row.get("tokens_per_forward")) for row in mine]) for tree, mine in of_tree.items()
    ]
    speedups = [line(tree, [(r["nodes"], with_range(r, "speedup")) for r in mine]) for tree, mine in of_tree.items()]
    panels = [
        panel("lines", "Tokens per forward", "nodes of a tree", "tokens per target forward", per_forward, "log2"),
        panel("lines", "Speedup", "nodes of a tree", "× plain generate", speedups, "log2", reference=PLAIN),
    ]
    columns = ("method", "tokens_per_second", "tokens_per_forward", "speedup", "efficiency", "identical")
    table = [{name: row.get(name) for name in columns} for row in rows]
    return finish(args, target, __doc__, rows, "Tree size and how trees grow", panels, table, script=__file__)


if __name__ == "__main__":
    main()
