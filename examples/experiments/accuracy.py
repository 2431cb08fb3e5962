"""What is each part of Clover and Clover-2 worth? Per-head top-1 to top-5 accuracy, with parts taken away.

Every variant learns from the same hidden states of the target, for the same number of tokens, with the same seed and
the same number of heads, and is measured on the target's continuations of text that none has seen. The first paper's
parts are taken away one after another, as in its table, and its Augmenting Block is varied by itself; of Clover-2's
four changes each is taken back by itself.

    python examples/experiments/accuracy.py
    python examples/experiments/accuracy.py --target org/target --data org/dataset --tokens 20000000 --batch-size 16
"""

from collections.abc import Sequence
from typing import Any

from common import TOY_TRAINING, TRAINING, finish, line, load_target, panel, parse, train
from continuations import load_data

DEFAULTS = {**TRAINING, "tokens": 300_000, "learning_rate": 1e-3, "num_heads": 5}
TOY = {**TOY_TRAINING, "tokens": 120, "num_heads": 3}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # label: variant, what differs from it
    "Clover": ("clover", {}),
    "Clover: MLP for Attention Decoder": ("clover", {"decoder": "mlp"}),
    "Clover: no Regressive Connection either": ("clover", {"decoder": "none", "regressive": False}),
    "Medusa": ("medusa", {}),
    "Clover: block of attention only": ("clover", {"augmenting_block": "attention"}),
    "Clover: block of MLP only": ("clover", {"augmenting_block": "mlp"}),
    "Clover: no block": ("clover", {"augmenting_block": "none"}),
    "Clover-2": ("clover-2", {}),
    "Clover-2: first decoder after the block": ("clover-2", {"decoder_position": "after"}),
    "Clover-2: residual block per head": ("clover-2", {"output_projector": "residual"}),
    "Clover-2: one layer": ("clover-2", {"num_augmenting_layers": 1}),
    "Clover-2: no hidden-state loss": ("clover-2", {"hidden_loss_weight": 0.0}),
}
PANELS = {
    "The first paper's parts, one after another": list(VARIANTS)[:4],
    "The Augmenting Block of Clover": ["Clover", *list(VARIANTS)[4:7]],
    "Clover-2's changes, each taken back": list(VARIANTS)[7:],
}
# Points of top-5 accuracy of heads 0, 1, 2 between two variants, and what the first paper found on a 7B model.
STEPS: dict[str, tuple[str, str, tuple[float, float, float]]] = {
    "Attention Decoder": ("Clover", "Clover: MLP for Attention Decoder", (4.8, 9.0, 11.5)),
    "Regressive Connection": (
        "Clover: MLP for Attention Decoder",
        "Clover: no Regressive Connection either",
        (2.6, 4.6, 6.0),
    ),
    "block (Medusa's)": ("Clover: no Regressive Connection either", "Medusa", (4.3, 8.1, 8.9)),
    "block (Clover's)": ("Clover", "Clover: no block", (4.9, 9.0, 9.4)),
    "its attention": ("Clover: block of attention only", "Clover: no block", (1.9, 4.4, 5.1)),
    "its MLP": ("Clover: block of MLP only", "Clover: no block", (1.0, 1.2, 0.7)),
    "all": ("Clover", "Medusa", (11.7, 21.7, 26.4)),
}


def compare_with_paper(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    top5 = {row["variant"]: [of_head[4] for of_head in row["top"]] for row in rows}
    return [
        {
            "part": part,
            "points": [100 * (a - b) for a, b in zip(top5[more][:3], top5[less][:3])],
            "paper": list(paper),
        }
        for part, (more, less, paper) in STEPS.items()
    ]


def top5_by_head(row: dict[str, Any]) -> list[tuple[int, float]]:
    return [(head, top[4]) for head, top in enumerate(row["top"])]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(__doc__, argv, DEFAULTS, TOY)
    target, tokenizer = load_target(args)
    data = load_data(args, target, tokenizer)
    rows = []
    for number, (label, (variant, changed)) in enumerate(VARIANTS.items(), 1):
        print(f"{number}/{len(VARIANTS)} {label}")
        fields = {"num_heads": args.num_heads, **changed}
        run = train(args, target, tokenizer, data, [args.tokens], args.learning_rate, variant, **fields)
        size = sum(parameter.numel() for parameter in run.heads.parameters())
        rows.append({"variant": label, "base": variant, "changed": changed, "parameters": size, **run.measured[-1]})
        rows[-1]["seconds"] = run.seconds
    parts = compare_with_paper(rows)
    by_label = {row["variant"]: row for row in rows}
    panels = [
        panel(
            "lines",
            title,
            "head",
            "top-5 accuracy",
            [line(label, top5_by_head(by_label[label])) for label in labels],
        )
        for title, labels in PANELS.items()
    ]
    mean = [(part["part"], sum(part["points"]) / len(part["points"]), sum(part["paper"]) / 3) for part in parts]
    ours = line("here", [(part, round(points, 1)) for part, points, _ in mean])
    theirs = line("first paper, 7B", [(part, round(points, 1)) for part, _, points in mean])
    ylabel = "points of top-5, mean of heads 0–2"
    panels.append(panel("bars", "What each part is worth", "", ylabel, [ours, theirs]))
    table = [
        {"variant": row["variant"]}
        | {f"head {head} top-1/5": f"{100 * top[0]:.1f} / {100 * top[4]:.1f}" for head, top in enumerate(row["top"])}
        | {"accepted (chain)": row["acceptance_length"]["top1"]}
        for row in rows
    ]
    table += [
        {"variant": f"points: {part['part']} (paper)"}
        | {
            f"head {head} top-1/5": f"{mine:.1f} ({its:.1f})"
            for head, (mine, its) in enumerate(zip(part["points"], part["paper"]))
        }
        for part in parts
    ]
    title = "Per-head accuracy by ablation"
    return finish(args, target, __doc__, rows, title, panels, table, script=__file__, parts=parts, data=data.about)


if __name__ == "__main__":
    main()
