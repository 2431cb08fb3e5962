"""The panels of a figure: lines, bars and dots, as `plots` describes them.

Contract: `draw_panel` draws a panel's data on given axes, and returns the entries of its legend. It does not know
where panels are placed, or what is around them. Lengths are in inches.
"""

import re
import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAR, _DOT, _NAME, _GAP = 0.22, 0.09, 0.32, 0.14  # a bar, a dot, the least room for a category's name, a gap
_MARKED = 40  # most points of a line that get markers


@dataclass
class Drawn:
    """A panel on the page, with the entries of its legend."""

    axes: "Axes"
    title: str
    series: dict[str, Any] = field(default_factory=dict)  # label -> artist
    reference: dict[str, Any] = field(default_factory=dict)


def room_of(panel: Mapping[str, Any], count: int) -> float:
    """The height of a category with `count` bars or dots."""
    return max(count * (_BAR if panel["kind"] == "bars" else _DOT), _NAME) + _GAP


def places_of(panel: Mapping[str, Any]) -> dict[str, int]:
    """Category -> its number of bars or dots, in order from the top; empty for lines."""
    if panel["kind"] == "lines":
        return {}
    counts = Counter(x for series in panel["series"] for x in series["x"])
    return dict.fromkeys(counts, 1) if panel.get("stacked") else dict(counts)


def draw_panel(
    axes: "Axes", panel: Mapping[str, Any], places: dict[str, int], looks: Mapping[str, tuple[str, str]]
) -> Drawn:
    drawn = Drawn(axes, panel["title"])
    if panel["kind"] == "lines":
        _draw_lines(drawn, panel, looks)
    elif panel["kind"] == "bars":
        _draw_bars(drawn, panel, places, looks)
    elif panel["kind"] == "dots":
        _draw_dots(drawn, panel, places, looks)
    else:
        raise ValueError(
            f"`kind={panel['kind']!r}` of the panel {panel['title']!r}: it must be 'lines', 'bars' or 'dots'."
        )
    if "reference" in panel:
        line = axes.axhline if panel["kind"] == "lines" else axes.axvline
        drawn.reference[panel["reference"]["label"]] = line(
            panel["reference"]["y"],
            color=axes.spines["left"].get_edgecolor(),
            linewidth=1.1,
            linestyle=(0, (4, 3)),
            zorder=1.5,
        )
    return drawn


def _draw_lines(drawn: Drawn, panel: Mapping[str, Any], looks: Mapping[str, tuple[str, str]]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    axes, places = drawn.axes, set()
    for series in panel["series"]:
        colour, marker = looks[series["label"]]
        points = [i for i, y in enumerate(series["y"]) if y is not None]
        x, y = [series["x"][i] for i in points], [series["y"][i] for i in points]
        places.update(x)
        drawn.series[series["label"]] = axes.plot(
            x, y, color=colour, linewidth=1.7, linestyle="--" if series.get("dashed") else "-",
            marker=None if series.get("dashed") or len(x) > _MARKED else marker, markersize=4.5, zorder=3,
        )[0]  # fmt: skip
        if "low" in series:
            low, high = [series["low"][i] for i in points], [series["high"][i] for i in points]
            axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0, zorder=2)
    axes.grid(True, linewidth=0.8)
    axes.margins(x=0.03)
    levels = [axes.dataLim.y0, axes.dataLim.y1, *([panel["reference"]["y"]] if "reference" in panel else [])]
    bottom, top = min(levels), max(levels)
    if 0 <= bottom < top / 3 or bottom > 0.8 * top > 0:
        axes.set_ylim(0, 1.06 * top)  # from 0, so that no small difference looks large
    if axes.dataLim.y1 >= 10_000:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
    axes.set_xlabel(textwrap.fill(panel.get("xlabel", ""), 60))
    axes.set_ylabel(textwrap.fill(panel.get("ylabel", ""), 34))
    scale = panel.get("xscale", "linear")
    if scale != "linear":
        axes.set_xscale("log", base=int(scale.removeprefix("log")))
        axes.xaxis.set_minor_locator(NullLocator())
    if scale != "linear" or len(places) <= 4:
        axes.set_xticks(sorted(places))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
    elif all(float(x).is_integer() for x in places):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if scale == "linear" and axes.dataLim.x1 >= 10_000:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))


def _draw_bars(
    drawn: Drawn, panel: Mapping[str, Any], places: dict[str, int], looks: Mapping[str, tuple[str, str]]
) -> None:
    axes, counts, stacked = drawn.axes, places_of(panel), bool(panel.get("stacked"))
    tops, middles, top = {}, {}, 0.0
    for category, count in places.items():  # downwards, in inches
        room = room_of(panel, count)
        middles[category] = top + room / 2
        tops[category] = middles[category] - counts[category] * _BAR / 2
        top += room
    taken: Counter[str] = Counter()
    ends = dict.fromkeys(counts, 0.0)
    values = [y for series in panel["series"] for y in series.get("high", series["y"]) if y is not None]
    sums = {c: sum(y or 0 for s in panel["series"] for x, y in zip(s["x"], s["y"]) if x == c) for c in counts}
    if stacked:
        values = list(sums.values())
    most = max([*values, panel.get("reference", {}).get("y", 0.0)], default=1.0) or 1.0
    for series in panel["series"]:
        colour = looks[series["label"]][0]
        for i, (category, value) in enumerate(zip(series["x"], series["y"])):
            place = tops[category] + (0.5 + (0 if stacked else taken[category])) * _BAR
            taken[category] += 1
            if value is None:
                if not stacked:
                    _write(axes, "–", 0, place)
                continue
            start = ends[category] if stacked else 0.0
            bar = axes.barh(place, value, _BAR * 0.82, left=start, color=colour, zorder=2)
            drawn.series.setdefault(series["label"], bar)
            ends[category] = start + value
            if stacked:
                if value > 0.09 * most and value < sums[category]:
                    axes.text(
                        start + value / 2, place, _number(value), ha="center", va="center_baseline", fontsize=7.5,
                        color="#ffffff" if _is_deep(colour) else "#1f2328", zorder=4,
                    )  # fmt: skip
                continue
            end = value
            if "low" in series:
                low, end = series["low"][i], max(series["high"][i], value)
                axes.plot([low, end], [place, place], color=axes.yaxis.label.get_color(), linewidth=1.1, zorder=3)
            _write(axes, _number(value), max(end, 0.0), place)  # for a negative bar at its start
    if stacked:
        for category, end in ends.items():
            _write(axes, _number(end) if end else "–", end, middles[category])
    if len(panel["series"]) == 1 or all(set(series["x"]) == {series["label"]} for series in panel["series"]):
        drawn.series = {}  # each bar has its name beside it
    axes.set_xlim(min([0.0, *values]), most * 1.16)
    _name_categories(axes, panel, middles, top)


def _name_categories(axes: "Axes", panel: Mapping[str, Any], middles: Mapping[str, float], bottom: float) -> None:
    axes.set_ylim(bottom, 0)
    axes.set_yticks(list(middles.values()), [_wrapped(category) for category in middles])
    axes.tick_params(axis="y", length=0, labelcolor=axes.yaxis.label.get_color())
    axes.grid(True, axis="x", linewidth=0.8)
    axes.set_xlabel(textwrap.fill(panel.get("ylabel", ""), 60))
    axes.set_ylabel(textwrap.fill(panel.get("xlabel", ""), 40))


def _draw_dots(
    drawn: Drawn, panel: Mapping[str, Any], places: dict[str, int], looks: Mapping[str, tuple[str, str]]
) -> None:
    """Draw a stripe for each category, and in it one dot per series, below each other, each with its range."""
    axes, middles, bottom = drawn.axes, {}, 0.0
    for number, (category, count) in enumerate(places.items()):
        room = room_of(panel, count)
        middles[category] = bottom + room / 2
        if number % 2 == 0:
            axes.axhspan(bottom, bottom + room, color=axes.xaxis.get_gridlines()[0].get_color(), alpha=0.4, zorder=0)
        bottom += room
    counts = places_of(panel)
    taken: Counter[str] = Counter()
    for series in panel["series"]:
        colour, marker = looks[series["label"]]
        points = []
        for i, (category, value) in enumerate(zip(series["x"], series["y"])):
            place = middles[category] + (taken[category] - (counts[category] - 1) / 2) * _DOT
            taken[category] += 1
            if value is None:
                continue
            points.append((value, place))
            if "low" in series:
                axes.plot([series["low"][i], series["high"][i]], [place] * 2, color=colour, linewidth=1.1, zorder=2)
        drawn.series[series["label"]] = axes.plot(
            *zip(*points), color=colour, marker=marker, markersize=4.5, linewidth=0, zorder=3
        )[0]
    axes.margins(x=0.04)
    _name_categories(axes, panel, middles, bottom)


def _write(axes: "Axes", text: str, x: float, y: float) -> None:
    """Write `text` after the end of a bar. Its background hides lines that pass there."""
    paper = {"boxstyle": "square,pad=0.1", "facecolor": axes.get_facecolor(), "edgecolor": "none"}
    look: dict[str, Any] = {"va": "center_baseline", "fontsize": 8, "zorder": 4, "bbox": paper}
    axes.annotate(text, (x, y), (3, 0), textcoords="offset points", **look)


def _is_deep(colour: str) -> bool:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


def _wrapped(name: str, columns: int = 24) -> str:
    """A long name in as few lines as possible, of similar lengths, broken after spaces, colons, slashes and commas."""

    def broken(columns: int) -> list[str]:
        lines = [""]
        for part in re.findall(r"[^\s:/,]*[\s:/,]*", name):
            if lines[-1] and len((lines[-1] + part).rstrip()) > columns:
                lines.append("")
            lines[-1] += part
        return [line.rstrip() for line in lines]

    every = [broken(width) for width in range(8, columns + 1)]
    return "\n".join(next(lines for lines in every if len(lines) == len(every[-1])))


def _number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return (
        f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.01 or not value else f"{value:.2g}"
    )
