"""After how many generated tokens has training the heads paid for itself?

Heads are trained for several lengths, the target's pass included in the seconds; then all of them and plain generate
take turns on the same prompts. Training's seconds over the seconds saved per token is the break-even. Where the target
wrote the training data here, its seconds are reported too, in a figure of their own: a user who has text to train on
does not pay for them. Training and generation run on the same machine.

    python examples/experiments/break_even.py
    python examples/experiments/break_even.py --target org/target --data org/dataset --tokens 1000000 --batch-size 16
"""

from collections.abc import Sequence
from typing import Any

from common import (
    GENERATION,
    PLAIN,
    TOY_GENERATION,
    TOY_TRAINING,
    TRAINING,
    finish,
    line,
    load_target,
    panel,
    parse,
    train,
    with_range,
)
from continuations import load_data

from hf_clover.measure.benchmark import measure, plain, with_heads
from hf_clover.measure.prompts import load_prompts

OF_GENERATION = {name: value for name, value in GENERATION.items() if name != "heads"}  # they are made here
# The rate is the best that `sensitivity.py` found: heads that learn slowly do not pay for themselves here.
DEFAULTS = {**OF_GENERATION, **TRAINING, "tokens": (50_000, 100_000, 200_000, 400_000), "learning_rate": 1e-2}
TOY = {**TOY_GENERATION, **TOY_TRAINING, "tokens": (60, 120)}


def break_even(training_seconds: float, plain_speed: float, speedup: float) -> float | None:
    """Generated tokens that repay `training_seconds`; None where nothing is saved."""
    saved_per_token = (1 - 1 / speedup) / plain_speed
    return training_seconds / saved_per_token if saved_per_token > 0 else None


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(__doc__, argv, DEFAULTS, TOY)
    target, tokenizer = load_target(args)
    data = load_data(args, target, tokenizer)
    runs = {}
    for tokens in args.tokens:
        print(f"{tokens:,} tokens")
        runs[tokens] = train(args, target, tokenizer, data, [tokens], args.learning_rate, precompute=False)
    measured = measure(
        target,
        tokenizer,
        [plain(), *(with_heads(run.heads.to(target.dtype), f"{tokens:,} tokens") for tokens, run in runs.items())],
        load_prompts(args.prompts, tokenizer, args.num_prompts),
        max_new_tokens=args.max_new_tokens,
        repeats=args.repeats,
        seed=args.seed,
    )
    speed = measured[0]["tokens_per_second"]
    written = data.about["train_tokens"]
    rows = []
    for (tokens, run), row in zip(runs.items(), measured[1:]):
        to_write = data.seconds and data.seconds * min(1.0, tokens / written)
        rows.append(
            {
                "tokens": tokens,
                "training_seconds": run.seconds,
                "data_seconds": to_write,
                "plain_seconds_per_token": 1 / speed,
                "seconds_saved_per_token": (1 - 1 / row["speedup"]) / speed,
                "break_even_tokens": break_even(run.seconds, speed, row["speedup"]),
                "break_even_tokens_with_data": to_write and break_even(run.seconds + to_write, speed, row["speedup"]),
                **row,
            }
        )
    counted = {"training": "break_even_tokens", "training and writing the data": "break_even_tokens_with_data"}
    paid = [line(label, [(row["tokens"], row[name]) for row in rows]) for label, name in counted.items()]
    speedups = [line("clover-2", [(row["tokens"], with_range(row, "speedup")) for row in rows])]
    panels = [
        panel("lines", "Break-even", "training tokens", "generated tokens until it has paid", paid, "log2"),
        panel("lines", "What it buys", "training tokens", "× plain generate", speedups, "log2", reference=PLAIN),
    ]
    columns = ("training_seconds", "data_seconds", "tokens_per_forward", "speedup", "break_even_tokens", "identical")
    table = [{"training tokens": f"{row['tokens']:,}", **{name: row[name] for name in columns}} for row in rows]
    title = "When training has paid for itself"
    more = {"plain": measured[0], "data": data.about}
    return finish(args, target, __doc__, rows, title, panels, table, script=__file__, **more)


if __name__ == "__main__":
    main()
