"""How much do learning rate and training length matter?

One run for each learning rate, measured on held-out continuations at each of `--tokens`. The rate is constant after
the warm-up, so that what is measured on the way is what a run of that length would have given; a run that ends with a
decay, as the other experiments' do, comes out somewhat better.

    python examples/experiments/sensitivity.py
    python examples/experiments/sensitivity.py --target org/target --data org/dataset --tokens 1000000 10000000
"""

from collections.abc import Sequence
from typing import Any

from common import TOY_TRAINING, TRAINING, finish, line, load_target, panel, parse, train
from continuations import load_data

DEFAULTS = {**TRAINING, "learning_rates": (3e-4, 1e-3, 3e-3, 1e-2), "tokens": (75_000, 150_000, 300_000)}
TOY = {**TOY_TRAINING, "learning_rates": (1e-3, 1e-2), "tokens": (60, 240)}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(__doc__, argv, DEFAULTS, TOY)
    target, tokenizer = load_target(args)
    data = load_data(args, target, tokenizer)
    rows: list[dict[str, Any]] = []
    for rate in args.learning_rates:
        print(f"learning rate {rate:g}")
        nothing = {"top": None, "acceptance_length": None}
        try:
            run = train(args, target, tokenizer, data, args.tokens, rate, schedule="constant_with_warmup")
            rows += [{"learning_rate": rate, **measured, "failed": None} for measured in run.measured]
        except FloatingPointError as error:  # a result too
            rows += [{"learning_rate": rate, "tokens": n, **nothing, "failed": str(error)} for n in args.tokens]

    by_length: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_length.setdefault(row["tokens"], []).append(row)
    lengths = [
        line(f"{count:,} tokens", [(r["learning_rate"], r["top"] and r["acceptance_length"]["top1"]) for r in mine])
        for count, mine in by_length.items()
    ]
    accuracies = [
        line(f"{count:,} tokens", [(r["learning_rate"], r["top"] and r["top"][0][0]) for r in mine])
        for count, mine in by_length.items()
    ]
    panels = [
        panel("lines", "Head 0", "learning rate", "top-1 accuracy", accuracies, "log10"),
        panel("lines", "All heads", "learning rate", "tokens per forward, as a chain", lengths, "log10"),
    ]
    table = [
        {
            "learning rate": f"{row['learning_rate']:g}",
            "tokens": f"{row['tokens']:,}",
            **({f"head {i} top-1": top[0] for i, top in enumerate(row["top"])} if row["top"] else {}),
            "accepted (chain)": row["top"] and row["acceptance_length"]["top1"],
            **({"failed": row["failed"]} if row["failed"] else {}),
        }
        for row in rows
    ]
    title = "Learning rate and training tokens"
    return finish(args, target, __doc__, rows, title, panels, table, script=__file__, data=data.about)


if __name__ == "__main__":
    main()
