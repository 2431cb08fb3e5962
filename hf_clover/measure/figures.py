"""A result as a figure, described by data.

Contract: `figure_of` turns the JSON of a benchmark, of an experiment, of a training run or of heads that learn into
one dictionary. It describes panels of lines, bars or dots, with their labels, values and ranges. `plots` documents
this dictionary and draws it. No file is read or written here.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

KINDS = (
    "a result of `hf-clover benchmark`",
    "a result of examples/experiments (with its own `figure`)",
    "the trainer_state.json of a CloverTrainer run",
    "the folder of heads that learn (`--learn`)",
)
_SWEPT = {"batch_size": "batch size", "nodes": "drafted nodes per step", "temperature": "temperature"}
_SETTING = ("batch_size", "temperature", "cache")
PACKED = ", packed"  # ends the name of a method with packed weights
_SPEED, _SPEEDUP = "tokens per second", "times plain generate"
_PER_FORWARD, _EFFICIENCY = "tokens per forward", "speedup / tokens per forward"
_AS_PLAIN = {"y": 1.0, "label": "plain generate"}
_FREE_DRAFTS = {"y": 1.0, "label": "drafts cost nothing"}


def figure_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """The figure of a benchmark, of an experiment, of a training run's trainer_state.json, or of heads that learn."""
    if isinstance(result, Mapping):
        if isinstance(result.get("figure"), Mapping):
            return dict(result["figure"])
        if result.get("kind") == "benchmark" and result.get("rows"):
            return _of_benchmark(result)
        if result.get("kind") == "online learning":
            return _of_learning(result["record"])
        if isinstance(result.get("log_history"), list):
            return _of_training(result["log_history"])
    raise ValueError(f"there is nothing here to draw: a plot is made of {', '.join(KINDS[:-1])}, or {KINDS[-1]}.")


# ---------------------------------------------------------------------- benchmark


def _of_benchmark(result: Mapping[str, Any]) -> dict[str, Any]:
    rows = [row for row in result["rows"] if not row.get("skipped")]
    if not rows:
        reason = result["rows"][0]["skipped"]
        raise ValueError(f"no method of this benchmark could be measured, so there is nothing to draw: {reason}")
    swept = _swept(rows)
    fixed = {name: rows[0].get(name) for name in _SETTING if name != swept}
    fixed = {name: value for name, value in fixed.items() if len(_values(rows, name)) == 1}
    setting = ", ".join(filter(None, [f"{result['prompts']} prompts", said_of(fixed)]))
    labels = [label_of(row, rows, swept) for row in rows]
    panels = _bars(rows, labels) if swept is None else _sweep(rows, labels, swept)
    panels = [*_by_category(rows), *panels]
    return {"title": f"{result['target']}: {setting}", "note": _note(result), "panels": panels}


def by_setting(rows: Iterable[Mapping[str, Any]]) -> list[tuple[dict[str, Any], list[Mapping[str, Any]]]]:
    """Group rows that were measured side by side, at one setting."""
    settings: dict[tuple, list[Mapping[str, Any]]] = {}
    for row in rows:
        settings.setdefault(tuple(row.get(name) for name in _SETTING), []).append(row)
    return [(dict(zip(_SETTING, values)), several) for values, several in settings.items()]


def compared(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Each baseline, and the rows that are compared with it. All rows are compared with plain generate without packed
    weights; rows with packed weights also with plain generate with packed weights."""
    rows = list(rows)
    packed = [row for row in rows if _is_packed(row)]
    found = [("plain generate", [_over_unpacked(row, rows) for row in rows])]
    if packed:
        found.append(("plain generate with packed weights", [_over_own(row) for row in packed]))
    return found


def with_categories(
    rows: Iterable[Mapping[str, Any]],
) -> Iterator[tuple[dict[str, Any], str, list[Mapping[str, Any]]]]:
    """Each setting and baseline for which questions have categories, and the rows that are compared there."""
    for setting, several in by_setting(rows):
        for baseline, alike in compared(several):
            drafted = [row for row in alike if row.get("categories") and not is_plain(row)]
            if drafted:
                yield setting, baseline, drafted


def is_plain(row: Mapping[str, Any]) -> bool:
    return row["method"] in ("plain", f"plain{PACKED}")


def _is_packed(row: Mapping[str, Any]) -> bool:
    return row["method"].endswith(PACKED)


def _over_own(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The speedup of plain generate with packed weights is 1 here; older results give it over plain generate
    without."""
    return {**row, "speedup": 1.0, "speedup_range": [1.0, 1.0], "efficiency": 1.0} if is_plain(row) else row


def _over_unpacked(row: Mapping[str, Any], rows: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    """For a method with packed weights: its speedup over plain generate without them, and no efficiency."""
    if not _is_packed(row) or row.get("skipped"):
        return row
    alike = [r for r in rows if r["method"] == "plain" and all(r.get(name) == row.get(name) for name in _SETTING)]
    over = {**row, **_speedup_over(row, alike[0] if alike else None)}
    if row.get("categories"):
        plain = (alike[0].get("categories") or {}) if alike else {}
        parts = row["categories"].items()
        over["categories"] = {name: {**part, **_speedup_over(part, plain.get(name))} for name, part in parts}
    return over


def _speedup_over(figures: Mapping[str, Any], plain: Mapping[str, Any] | None) -> dict[str, Any]:
    if "speedup_over_unpacked" in figures:
        speedup, spread = figures["speedup_over_unpacked"], figures["speedup_over_unpacked_range"]
    else:  # older results
        speedup = figures["tokens_per_second"] / plain["tokens_per_second"] if plain else None
        spread = None
    return {"speedup": speedup, "speedup_range": spread, "efficiency": None}


def said_of(setting: Mapping[str, Any]) -> str:
    said = {
        "batch_size": lambda size: f"batch size {size}",
        "temperature": lambda t: f"temperature {t:g}" if t else "greedy",
        "cache": lambda cache: f"{cache} cache",
    }
    return ", ".join(said[name](value) for name, value in setting.items())


def _by_category(rows: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Speedup and tokens per forward at each setting, if questions have categories: of all questions, then of each
    category."""
    panels: list[dict[str, Any]] = []
    has_several_settings = len(by_setting(rows)) > 1
    for setting, baseline, several in with_categories(rows):
        names = {name: f"{name} ({one['questions']})" for name, one in several[0]["categories"].items()}
        where = f", {said_of(setting)}" if has_several_settings else ""
        speedup = {"title": f"Speedup by category{where}", "ylabel": f"times {baseline}"}
        length = {"title": f"Tokens per forward by category{where}", "ylabel": _PER_FORWARD}
        of_speedup = {**speedup, "reference": {"y": 1.0, "label": baseline}}
        for name, panel in (("speedup", of_speedup), ("tokens_per_forward", length)):
            series = [
                _series(
                    [row, *(row["categories"][category] for category in names)],
                    label_of(row, several),
                    [f"all ({row['questions']})", *names.values()],
                    name,
                )
                for row in several
            ]
            panels.append({"kind": "dots", **panel, "series": series})
    return panels


def _values(rows: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    return list(dict.fromkeys(row.get(name) for row in rows if row.get(name) is not None))


def _swept(rows: list[Mapping[str, Any]]) -> str | None:
    """The setting that takes the most values within a method: the figure's x axis. None if none varies."""
    counts = {}
    for name in _SWEPT:
        of_methods = [_values([r for r in rows if r["method"] == method], name) for method in _values(rows, "method")]
        counts[name] = max(len(values) for values in of_methods)
    name = max(counts, key=counts.__getitem__)
    return name if counts[name] > 1 else None


def label_of(row: Mapping[str, Any], rows: list[Mapping[str, Any]], swept: str | None = None) -> str:
    """The method, and the settings that distinguish this row from others of the same method."""
    alike = [r for r in rows if r["method"] == row["method"]]
    said = {
        "tree": lambda tree: tree if tree == "chain" else f"{tree} tree",
        "nodes": lambda nodes: f"{nodes} nodes",
        "batch_size": lambda size: f"batch size {size}",
        "temperature": lambda t: f"temperature {t:g}",
        "cache": lambda cache: f"{cache} cache",
    }
    differs = [name for name in said if name != swept and len({r.get(name) for r in alike}) > 1]
    return ", ".join([row["method"], *(said[name](row[name]) for name in differs if row.get(name) is not None)])


def _series(rows: list[Mapping[str, Any]], label: str, xs: list[Any], name: str) -> dict[str, Any]:
    """One quantity of these rows, with its range where the rows have one."""
    series = {"label": label, "x": xs, "y": [row.get(name) for row in rows]}
    ranges: list[Any] = [row.get(f"{name}_range") for row in rows]
    if all(ranges):
        series |= {"low": [low for low, _ in ranges], "high": [high for _, high in ranges]}
    return series


def _bars(rows: list[Mapping[str, Any]], labels: list[str]) -> list[dict[str, Any]]:
    """The panels of one setting: the methods side by side, the parts of their time, and acceptance by depth."""

    def panel(title: str, unit: str, name: str, of: Any = rows, **more: Any) -> dict[str, Any]:
        shown = [(row, label) for row, label in zip(of, labels) if name != "efficiency" or not is_plain(row)]
        series = [_series([row], label, [label], name) for row, label in shown or zip(of, labels)]
        return {"kind": "bars", "title": title, "ylabel": unit, "series": series, **more}

    over_plain = compared(rows)[0][1]
    panels = [
        panel("Speedup", _SPEEDUP, "speedup", over_plain, reference=_AS_PLAIN),
        panel("Tokens per forward of the target", _PER_FORWARD, "tokens_per_forward"),
        panel("Efficiency", _EFFICIENCY, "efficiency", reference=_FREE_DRAFTS),
    ]
    parts = [part for part in ("verify", "draft", "walk", "other") if any(row.get("seconds") for row in rows)]
    if parts:
        series = [{"label": part, "x": labels, "y": [_milliseconds(row, part) for row in rows]} for part in parts]
        title = "Where the time of a token goes"
        panels.append({"kind": "bars", "stacked": True, "title": title, "ylabel": "ms per token", "series": series})
    lines = []
    for row, label in zip(rows, labels):
        shares = row.get("acceptance_by_depth")
        if shares:
            lines.append({"label": label, "x": list(range(1, len(shares) + 1)), "y": shares})
    if lines:
        title, unit = "Acceptance by depth", "share of steps"
        depth = "drafted tokens accepted in a step, at least"
        panels.append({"kind": "lines", "title": title, "xlabel": depth, "ylabel": unit, "series": lines})
    return panels


def _milliseconds(row: Mapping[str, Any], part: str) -> float | None:
    """Milliseconds per token of one part. The speed is a median over the repeats, and the parts are sums, so the parts
    are used as shares."""
    seconds = row.get("seconds") or {}
    total = sum(seconds.values())
    return 1000 / row["tokens_per_second"] * seconds.get(part, 0.0) / total if total else None


def _sweep(rows: list[Mapping[str, Any]], labels: list[str], swept: str) -> list[dict[str, Any]]:
    """The panels of several batch sizes, tree sizes or temperatures: each quantity along them, one line per method."""
    everywhere, over_plain = _values(rows, swept), compared(rows)[0][1]

    def series(label: str, name: str) -> dict[str, Any]:
        mine = [row for row, its in zip(over_plain if name == "speedup" else rows, labels) if its == label]
        if all(row.get(swept) is None for row in mine):  # a method without this setting is equally fast everywhere
            return {**_series(mine[:1] * 2, label, [min(everywhere), max(everywhere)], name), "dashed": True}
        mine = sorted((row for row in mine if row.get(swept) is not None), key=lambda row: row[swept])
        return _series(mine, label, [row[swept] for row in mine], name)

    def panel(title: str, unit: str, name: str, of: Iterable[str], **more: Any) -> dict[str, Any]:
        scale = "linear" if swept == "temperature" else "log2"
        lines = [series(label, name) for label in of]
        return dict(kind="lines", title=title, xlabel=_SWEPT[swept], ylabel=unit, xscale=scale, series=lines, **more)

    every = list(dict.fromkeys(labels))
    others = list(dict.fromkeys(label for row, label in zip(rows, labels) if row["method"] != "plain")) or every
    drafted = list(dict.fromkeys(label for row, label in zip(rows, labels) if not is_plain(row))) or every
    return [
        panel("Speed", _SPEED, "tokens_per_second", every),
        panel("Speedup", _SPEEDUP, "speedup", others, reference=_AS_PLAIN),
        panel("Tokens per forward of the target", _PER_FORWARD, "tokens_per_forward", others),
        panel("Efficiency", _EFFICIENCY, "efficiency", drafted, reference=_FREE_DRAFTS),
    ]


def _note(result: Mapping[str, Any]) -> str:
    ranges = f"median of {result['repeats']} runs, with the lowest and the highest" if result["repeats"] > 1 else ""
    broken_off = None if result.get("is_whole", True) else "broken off before all was measured"
    what = [f"{result['num_prompts']} prompts, {result['max_new_tokens']} new tokens each", ranges, broken_off]
    weights = "packed weights" if result.get("packed") else None
    where = [result.get("machine"), result.get("device"), result.get("dtype"), weights, result.get("date")]
    lines = [what, where, [result.get("command")]]
    unlike = _values((row for row in result["rows"] if row.get("identical") is False), "method")
    lines.append([f"other tokens than plain generate: {', '.join(unlike)}" if unlike else None])
    skipped = {row["method"]: row["skipped"] for row in result["rows"] if row.get("skipped")}
    lines.append([f"not measured everywhere: {method} ({reason})" for method, reason in skipped.items()])
    return "\n".join("; ".join(str(part) for part in line if part) for line in lines if any(line))


# ---------------------------------------------------------------------- training


def _of_training(log: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The panels of what `HeadMetrics` and `AcceptanceCallback` logged: held-out figures if there are any, else
    training figures."""
    if not any("head_0/top1" in key for entry in log for key in entry):
        raise ValueError(
            "this trainer_state.json was not written by CloverTrainer: its log has no `head_0/top1`, the accuracy of "
            "the first head, so there is nothing to draw."
        )
    mode, where = ("eval_", "held-out text") if len(_logged(log, "eval_head_0/top1")) > 1 else ("", "training text")
    heads: list[dict[str, Any]] = []
    while _logged(log, f"{mode}head_{len(heads)}/top1"):
        name = f"{mode}head_{len(heads)}/top1"
        heads.append(_curve(log, name, f"head {len(heads)}"))

    def curves(*named: tuple[str, str, bool]) -> list[dict[str, Any]]:
        return [{**_curve(log, name, label), "dashed": dash} for name, label, dash in named if _logged(log, name)]

    losses = curves(("loss", "training", False), ("eval_loss", "held-out", True))
    lengths = curves(
        (f"{mode}acceptance_length/top1", "implied, chain", True),
        (f"{mode}acceptance_length/top5", "implied, five children each", True),
        ("eval_tokens_per_forward", "measured", False),
    )
    step = "training step"
    panels: list[dict[str, Any]] = [
        {"title": "Loss", "ylabel": "loss", "series": losses},
        {"title": f"Top-1 accuracy, {where}", "ylabel": "share of positions", "series": heads},
        {"title": f"Tokens per forward, {where}", "ylabel": _PER_FORWARD, "series": lengths},
    ]
    if _logged(log, "eval_speedup"):
        series = [_curve(log, "eval_speedup", "measured")]
        panels.append({"title": "Speedup", "ylabel": _SPEEDUP, "series": series, "reference": _AS_PLAIN})
    panels = [{"kind": "lines", "xlabel": step, **panel} for panel in panels if panel["series"]]
    return {"title": "Training of Clover heads", "note": "from trainer_state.json", "panels": panels}


def _logged(log: list[Mapping[str, Any]], name: str) -> dict[int, float]:
    """Step -> value; the last one where a step was logged twice."""
    values = {entry["step"]: entry[name] for entry in log if entry.get(name) is not None}
    return {step: value for step, value in sorted(values.items()) if math.isfinite(value)}


def _curve(log: list[Mapping[str, Any]], name: str, label: str) -> dict[str, Any]:
    values = _logged(log, name)
    return {"label": label, "x": list(values), "y": list(values.values())}


# ---------------------------------------------------------------------- heads that learn while they are used


_BESIDE, _MANY = 10, 40  # entries averaged in one point, and the least number of entries for averaging
_UNITS = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


def _of_learning(record: list[Mapping[str, float]]) -> dict[str, Any]:
    """The panels of an `OnlineLearner`'s record. It covers whatever was generated; it is no benchmark."""
    if not record:
        raise ValueError("nothing has been generated with these heads since they began to learn.")
    beside = _BESIDE if len(record) >= _MANY else 1
    parts = [record[max(end - beside, 0) : end] for end in range(1, len(record) + 1)]
    lengths = [[entry["tokens_per_forward"] for entry in part] for part in parts]
    series: dict[str, Any] = {"label": "heads that learn", "y": [sum(part) / len(part) for part in lengths]}
    note = "tokens per forward of the target, one point per measurement"
    if beside > 1:
        series |= {"low": [min(part) for part in lengths], "high": [max(part) for part in lengths]}
        note = f"the mean of {beside} measurements, with the lowest and the highest of them"
    seconds = [entry["seconds"] for entry in record]
    unit, size = next((name, size) for name, size in _UNITS if seconds[-1] >= 2 * size or size == 1.0)
    along = (
        ("By tokens learned from", "tokens", [entry["tokens"] for entry in record]),
        ("By time in use", unit, [second / size for second in seconds]),
    )
    same = {"kind": "lines", "ylabel": _PER_FORWARD, "reference": _AS_PLAIN}
    panels = [{**same, "title": title, "xlabel": name, "series": [{**series, "x": x}]} for title, name, x in along]
    return {"title": "Heads that learn while they are used", "note": f"{note}; from learning.json", "panels": panels}


__all__ = ["KINDS", "PACKED", "compared", "figure_of", "is_plain", "label_of", "said_of", "with_categories"]
