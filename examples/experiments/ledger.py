"""What `learning.py` writes down, and how it is drawn and shown.

Contract: a `Ledger` is `learning.json` on disk, whole after every addition. It knows rows of figures, and neither
heads nor targets.
"""

import argparse
import datetime
import json
import statistics
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

from common import line, panel
from drafters import DRAFTERS
from rich.console import Console
from rich.table import Table

from hf_clover.measure.benchmark import write
from hf_clover.measure.provenance import provenance

QUESTION = (
    "How fast do draft heads learn, and what are they worth in tokens per forward, ours beside those of other papers?"
)
ALIKE = ("toy", "samples", "test_samples", "length", "batch_size", "num_prompts", "max_new_tokens")


class Ledger:
    """`learning.json`: what is finished, on disk after every addition, so that two processes may share the work."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts: dict[str, list[dict[str, Any]]] = {}
        self.settings: dict[str, Any] = {}  # with which it was written
        self.read()

    def read(self) -> None:
        found = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        self.parts = {part: found.get(part, []) for part in ("rows", "tuning", "targets")}
        self.settings = found.get("settings", {})

    def check(self, args: argparse.Namespace) -> None:
        """Rows of other sizes do not belong beside those that are there."""
        for name in ALIKE:
            before, now = self.settings.get(name, getattr(args, name)), getattr(args, name)
            if before != now:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(
                    f"`{option} {now}`: {self.path.name} was written with {before}, and its rows would not compare. "
                    f"Go on with {before}, or choose another `--output`."
                )

    def find(self, part: str, **wanted: Any) -> list[dict[str, Any]]:
        return [row for row in self.parts[part] if all(row[name] == value for name, value in wanted.items())]

    def add(self, part: str, row: dict[str, Any], settings: dict[str, Any]) -> None:
        self.read()
        self.parts[part].append(row)
        self.save(settings)

    def save(self, settings: dict[str, Any]) -> dict[str, Any]:
        result = {
            "kind": "experiment",
            "name": self.path.stem,
            "question": QUESTION,
            "settings": settings,
            **provenance(),
            "date": datetime.date.today().isoformat(),
            **self.parts,
        }
        result["figure"] = {
            "title": "How fast draft heads learn",
            "note": f"{result['machine']}; {result['command']}",
            "panels": panels(self),
        }
        write(result, self.path.with_suffix(".tmp")).replace(self.path)  # a run that is killed leaves it whole
        return result


# ---------------------------------------------------------------------- pictures and tables


def panels(ledger: Ledger) -> list[dict[str, Any]]:
    """For each target, by training tokens: chain length; and the tokens per forward of chains on questions, which take
    no copies from the text."""
    drawn = []
    for target in dict.fromkeys(row["target"] for row in ledger.parts["rows"]):
        rows = ledger.find("rows", target=target)
        along, log = "training tokens", "log10"
        chains = _lines(rows, itemgetter("chain"))
        drawn.append(panel("lines", f"{target}: chain", along, "drafts right in a row, of 8", chains, log))
        for way in rows[0]["tokens_per_forward"]:
            if way.startswith("chain"):
                worth = _lines(rows, lambda row, way=way: row["tokens_per_forward"][way])
                drawn.append(panel("lines", f"{target}: {way}", along, "tokens per forward", worth, log))
    return drawn


def _lines(rows: list[dict[str, Any]], figure: Callable[[dict[str, Any]], float]) -> list[dict[str, Any]]:
    """A line for each drafter of a row's `figure`: the mean over seeds, with the range."""
    drafters = [drafter for drafter in DRAFTERS if any(row["drafter"] == drafter for row in rows)]
    found = []
    for drafter in drafters:
        points = []
        for tokens in sorted({row["tokens"] for row in rows}):
            values = [figure(row) for row in rows if (row["drafter"], row["tokens"]) == (drafter, tokens)]
            if values:
                points.append((tokens, (statistics.fmean(values), min(values), max(values))))
        found.append(line(drafter, points))
    return found


def show(ledger: Ledger) -> None:
    table = Table("target", "tokens", "drafter", "seeds", "chain", "tokens / forward")
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in ledger.parts["rows"]:
        groups.setdefault((row["target"], row["tokens"], row["drafter"]), []).append(row)
    for (target, tokens, drafter), rows in sorted(groups.items()):
        per_forward = [
            statistics.fmean(row["tokens_per_forward"][n] for row in rows) for n in rows[0]["tokens_per_forward"]
        ]
        table.add_row(
            target,
            f"{tokens:,}",
            drafter,
            str(len(rows)),
            f"{statistics.fmean(row['chain'] for row in rows):.2f}",
            " / ".join(f"{value:.2f}" for value in per_forward),
        )
    Console().print(table)
