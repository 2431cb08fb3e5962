"""A benchmark's result as tables on a screen.

Contract: `tables_of` turns rows of the benchmark's JSON into tables of rich. `category_tables_of` makes a table by
category for each setting whose questions have categories. `notes_of` returns the lines under the tables. All rows of a
table are compared with one baseline, which its title names. Only shares of the time are computed here.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.table import Table

from .figures import compared, is_plain, label_of, said_of, with_categories

_SETTINGS = {"nodes": "nodes", "tree": "tree", "batch_size": "batch", "temperature": "temperature", "cache": "cache"}
_PARTS = ("draft", "verify", "walk", "other")


def tables_of(result: Mapping[str, Any]) -> Iterator[Table]:
    """One table for each baseline."""
    for baseline, rows in compared(result["rows"]):
        yield _table_of(rows, f"{setting_of(result)}; speedup over {baseline}")


def _empty_table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def _table_of(rows: list[Mapping[str, Any]], title: str) -> Table:
    """One row per method; only settings that vary have a column."""
    varying = [name for name in _SETTINGS if len({row[name] for row in rows}) > 1]
    table = _empty_table(title)
    table.add_column("method", no_wrap=True)
    for name in varying:
        table.add_column(_SETTINGS[name], justify="right")
    for name in (
        "tokens/s",
        "tokens/\nforward",
        "speedup",
        "effi-\nciency",
        "% draft/\nverify/\nwalk/other",
        "same\ntokens",
    ):
        table.add_column(name, justify="right", overflow="fold")
    for previous, row in zip([None, *rows], rows):
        if previous is not None and row["method"] == rows[0]["method"]:
            table.add_section()
        settings = [_setting(name, row) for name in varying]
        figures = ["skipped", *[""] * 5] if row["skipped"] else _figures(row)
        style = "dim" if is_plain(row) or row["skipped"] else None
        table.add_row(row["method"], *settings, *figures, style=style)
    return table


def _setting(name: str, row: Mapping[str, Any]) -> str:
    if row[name] is None:
        return "auto" if name == "nodes" and row.get("acceptance_by_depth") else ""
    return f"{row[name]:g}" if isinstance(row[name], float) else str(row[name])


def _figures(row: Mapping[str, Any]) -> list[str]:
    low, high = row["tokens_per_second_range"]
    spread = f" ({low:.1f}–{high:.1f})" if low < high else ""
    seconds, shares = row["seconds"], ""
    if seconds["verify"]:  # only heads report it
        shares = "/".join(f"{100 * seconds[part] / sum(seconds.values()):.0f}" for part in _PARTS)
    identical = {True: "[green]yes[/]", False: "[red]no[/]", None: "–"}[row["identical"]]
    figures = [f"{row['tokens_per_second']:.1f}{spread}", f"{row['tokens_per_forward']:.2f}"]
    efficiency = "" if is_plain(row) or row["efficiency"] is None else f"{row['efficiency']:.2f}"
    figures += ["–" if row["speedup"] is None else f"[bold]{row['speedup']:.2f}x[/]", efficiency]
    return [*figures, shares, "" if row["method"] == "plain" else identical]


def category_tables_of(result: Mapping[str, Any]) -> Iterator[Table]:
    """One table for each setting and baseline: a row per category, a column per method."""
    for setting, baseline, rows in with_categories(result["rows"]):
        title = f"By category: speedup over {baseline} and tokens per forward, {said_of(setting)}"
        table = _empty_table(title)
        table.add_column("category", no_wrap=True)
        table.add_column("ques-\ntions", justify="right")
        for row in rows:
            table.add_column(label_of(row, rows), justify="right", overflow="fold")
        for name, first in rows[0]["categories"].items():
            table.add_row(name, str(first["questions"]), *(_pair(row["categories"][name]) for row in rows))
        table.add_section()
        table.add_row("all", str(rows[0]["questions"]), *(_pair(row) for row in rows))
        yield table


def _pair(figures: Mapping[str, Any]) -> str:
    mark = "[red]≠[/]" if figures["identical"] is False else ""
    speedup = "–" if figures["speedup"] is None else f"{figures['speedup']:.2f}x"
    return f"{mark}[bold]{speedup}[/] {figures['tokens_per_forward']:.2f}"


def notes_of(result: Mapping[str, Any]) -> Iterator[str]:
    """Notes on the prompts, on methods that were skipped, and on tokens that differ."""
    notes: dict[str, None] = {}
    if not result.get("is_whole", True):
        notes["Broken off: the figures cover only what was measured until then."] = None
    if result.get("left_out"):
        notes[f"{len(result['left_out'])} prompts are too long for the target and were left out."] = None
    lengths = next((row["prompt_tokens"] for row in result["rows"] if row.get("prompt_tokens")), None)
    if lengths is not None:
        thinks = {None: "", True: "; thinking is on", False: "; thinking is off"}[result["thinking"]]
        template = "none" if result["chat_template"] is None else repr(result["chat_template"])
        said = f"{lengths['min']} to {lengths['max']} tokens (median {lengths['median']:g})"
        notes[f"Prompts: {said}; chat template: {template}{thinks}."] = None
    for row in result["rows"]:
        if row["skipped"]:
            notes[f"{row['method']} was skipped: {row['skipped']}"] = None
            continue
        for difference in row["differences"][:1]:
            margin = difference["margin"]
            by = "" if margin is None else f", where the target prefers plain generate's by {margin:.1e}"
            more = len(row["differences"]) - 1
            others = f" (and {more} more)" if more else ""
            place = f"prompt {difference['prompt']}, token {difference['position']}"
            if difference.get("question") is not None:
                place = f"question {difference['question']}, turn {difference['turn']}, token {difference['position']}"
            notes[f"{row['method']}: the first other token is at {place}{by}{others}"] = None
    yield from notes


def setting_of(result: Mapping[str, Any]) -> str:
    """What all rows have in common, in one line."""
    said = [f"{result['target']}, {result['dtype']} on {result['device']}"]
    if result.get("packed"):
        said.append("packed weights")
    said.append(f"{result['num_prompts']} {result['prompts']} prompts, {result['max_new_tokens']} new tokens each")
    sizes, temperatures = ({row[name] for row in result["rows"]} for name in ("batch_size", "temperature"))
    if len(sizes) == 1:
        said.append(f"batch size {sizes.pop()}")
    if temperatures == {0}:
        said.append("greedy")
    return ", ".join(said)


__all__ = ["category_tables_of", "notes_of", "setting_of", "tables_of"]
