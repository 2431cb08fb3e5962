"""Which drafts does clover-x miss that an EAGLE-1 head gets: those that earlier text would have told?

The heads are those that `learning.py` has trained. Each draft after the first is put under what a look at the text
before it could have found, places where the same two tokens stood in a row:

- at all places like the draft's root, the text went on as the drafts did;
- at some of them: it takes the drafted tokens to tell which;
- at none, but the tokens drafted last have stood somewhere: it takes a new look;
- nowhere: there is nothing to look up.

Only places count at which both have been right up to there, so that both are asked the same.

    python examples/experiments/learning.py --seeds 0 --drafters clover-x eagle-1
    python examples/experiments/lookups.py
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import Any

from common import finish, line, panel
from drafters import DRAFTERS, right_drafts
from learning import DEPTH, EVERY, Course, parse, settings_of
from ledger import Ledger

PAIR = ("clover-x", "eagle-1")
FOUND = ("at all places", "at some places", "elsewhere", "nowhere")


def found(ids: Sequence[int], place: int, right: int) -> str:
    """Which of `FOUND`, for the draft that follows `right` right ones after the settled token at `place`. What is
    found must have a token behind it."""
    drafted = ids[place + 1 : place + 1 + right]
    pair, last = ids[place - 1 : place + 1], ids[place + right - 1 : place + right + 1]
    before = [ids[q + 1 : q + 1 + right] for q in range(1, place - right) if ids[q - 1 : q + 1] == pair]
    same = before.count(drafted)
    if same:
        return "at all places" if same == len(before) else "at some places"
    seen = any(ids[q - 1 : q + 1] == last for q in range(1, place + right))
    return "elsewhere" if seen else "nowhere"


def rows_of(course: Course, tokens: int, seed: int) -> list[dict[str, Any]]:
    rows = course.to_measure_on
    hits = {}  # [N, P, DEPTH] of each
    for name in PAIR:
        folder = course.folder_of(name, tokens, seed)
        if not (folder / "model.safetensors").exists():
            raise ValueError(
                f"`--work`: there is no {name} that was trained on {tokens:,} tokens with seed {seed} for "
                f"{course.name}. `learning.py --seeds {seed} --drafters {' '.join(PAIR)}` trains it."
            )
        heads = DRAFTERS[name].load(folder, course.target)
        hits[name] = right_drafts(heads, course.target, rows, course.start, DEPTH, EVERY).tolist()
    counts, right = Counter(), Counter()
    for n, ids in enumerate(rows.tolist()):
        for p, place in enumerate(course.places):
            for level in range(1, DEPTH):
                if all(hits[name][n][p][level - 1] for name in PAIR):
                    where = found(ids, place, level)
                    counts[where] += 1
                    right.update((where, name) for name in PAIR if hits[name][n][p][level])
    of = {"target": course.name, "tokens": tokens, "seed": seed}
    return [
        {**of, "found": where, "drafts": counts[where], "right": {name: right[where, name] for name in PAIR}}
        for where in FOUND
    ]


def panels_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    drawn = []
    for target in dict.fromkeys(row["target"] for row in rows):
        mine = {where: [r for r in rows if (r["target"], r["found"]) == (target, where)] for where in FOUND}
        drafts = {where: sum(row["drafts"] for row in of) for where, of in mine.items()}
        series = [
            line(
                name,
                [
                    (f"{where} ({drafts[where]:,})", sum(row["right"][name] for row in of) / max(drafts[where], 1))
                    for where, of in mine.items()
                ],
            )
            for name in PAIR
        ]
        drawn.append(panel("bars", f"{target}: what the text went on with", "", "next draft right", series))
    return drawn


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(argv, __doc__)
    ledger, rows = Ledger(args.output / "learning.json"), []
    ledger.check(args)
    for folder in args.targets:
        course = Course(args, folder, ledger)
        course.read_data()
        for seed in args.seeds:
            rows += rows_of(course, max(args.budgets), seed)
    table = [
        {
            "target": row["target"],
            "seed": row["seed"],
            "found": row["found"],
            "drafts": row["drafts"],
            **{name: row["right"][name] / row["drafts"] if row["drafts"] else None for name in PAIR},
        }
        for row in rows
    ]
    settings = argparse.Namespace(**settings_of(args), output=args.output, work=args.work)
    title = "Where drafts come true"
    return finish(settings, course.target, __doc__, rows, title, panels_of(rows), table, script=__file__)


if __name__ == "__main__":
    main()
