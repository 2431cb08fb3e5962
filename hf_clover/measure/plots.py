"""Pictures of results: a figure given as data becomes a PNG, for light and for dark pages.

Contract: `draw` knows no benchmark, experiment or training. Everything that it draws is in this dictionary:

    {"title": ..., "note": small print under the figure, "panels": [
      {"kind": "lines" | "bars" | "dots", "title": ..., "xlabel": ..., "ylabel": ...,
       "xscale": "linear" | "log2" | "log10",             # of lines; linear if absent
       "reference": {"y": 1.0, "label": ...},             # optional: a line to compare with
       "stacked": true,                                   # of bars: the series add up
       "series": [{"label": ..., "x": [...], "y": [...],  # a y of None leaves that place empty
                   "low": [...], "high": [...],           # optional: the range around each y
                   "dashed": true}]}]}                    # of lines, optional

The x of bars and dots are names of categories. A category has room only for the series that contain it. Bars are
horizontal, so that long names can be read. Dots are for many categories of many series, where there is no room for
written values. A label has the same colour in all panels. matplotlib's global state is neither used nor changed.
"""

import json
import math
import os
import re
import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .figures import figure_of
from .panels import Drawn, draw_panel, places_of, room_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 175  # 1680 pixels at full width: two for each pixel of a column of text on the Hub
_WIDE, _NARROW, _MARGIN = 9.6, 7.0, 0.15  # inches, as are all lengths here
_LINES_HEIGHT, _AROUND_BARS = 3.0, 1.05
LEARNING = "learning.json"  # in the folder of an `OnlineLearner`
_MARKERS = "osD^vPX*"
THEMES = {
    "light": {
        "back": "#ffffff", "text": "#1f2328", "faint": "#59636e", "grid": "#e3e7eb", "plain": "#79828c",
        "cycle": ["#0072b2", "#d55e00", "#009e73", "#b8578f", "#d39b00", "#4aa8dd", "#5b50a5", "#8a5a2b"],
        "parts": ["#1d5b66", "#4f9da6", "#9fcfcf", "#d0d5db"],
    },
    "dark": {
        "back": "#0d1117", "text": "#e6edf3", "faint": "#9aa4af", "grid": "#262c34", "plain": "#8d96a0",
        "cycle": ["#4fa8e8", "#f5884a", "#2ec79b", "#e592c3", "#f0bc42", "#93d0f5", "#a59bee", "#c99f78"],
        "parts": ["#8fd0d3", "#4b9aa3", "#2a6570", "#4a525c"],
    },
}  # fmt: skip
# A method has the same colour in every figure. A method that is not listed takes the first free colour.
_METHODS = {"clover-2": 0, "medusa": 1, "clover": 2, "prompt-lookup": 3, "assistant": 4, "clover-x": 5}
_PARTS = ("verify", "draft", "walk", "other")


def draw(figure: Mapping[str, Any], path: str | os.PathLike, dark: bool = False) -> Path:
    """Write `figure` to `path` as a PNG."""
    _matplotlib()
    theme = THEMES["dark" if dark else "light"]
    with settings(theme):
        return save(build(figure, theme), path)


def plot(json_path: str | os.PathLike, out: str | os.PathLike | None = None) -> list[Path]:
    """Draw NAME.png and NAME-dark.png from NAME.json, or from a folder's learning.json; beside it, or in the folder
    `out`."""
    json_path = Path(json_path)
    if json_path.is_dir():
        json_path /= LEARNING
        if not json_path.exists():
            raise ValueError(
                f"{json_path.parent} holds no {LEARNING}, which heads that learn write: pass a JSON file."
            )
    try:
        figure = figure_of(json.loads(json_path.read_text(encoding="utf-8")))
    except json.JSONDecodeError as error:
        raise ValueError(f"{json_path} is not JSON: {error}") from error
    except ValueError as error:
        raise ValueError(f"{json_path}: {error}") from error
    folder = json_path.parent if out is None else Path(out)
    names = {f"{json_path.stem}.png": False, f"{json_path.stem}-dark.png": True}
    return [draw(figure, folder / name, dark) for name, dark in names.items()]


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'hf-clover[plot]'") from error
    return matplotlib


def save(page: "Figure", path: str | os.PathLike) -> Path:
    """Save as a PNG of at most 256 colours, which is a third of the size."""
    from PIL import Image  # matplotlib needs it, too

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas: Any = page.canvas  # Agg's
    canvas.draw()
    image = Image.frombytes("RGBA", canvas.get_width_height(), canvas.buffer_rgba()).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(path, format="png", optimize=True)
    return path


def settings(theme: Mapping[str, Any]) -> Any:
    """matplotlib's own defaults in the colours of `theme`, whatever the user's settings are."""
    matplotlib = _matplotlib()
    default = {name: value for name, value in matplotlib.rcParamsDefault.items() if name != "backend"}  # the user's
    colours = {
        **dict.fromkeys(("figure.facecolor", "axes.facecolor"), theme["back"]),
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), theme["text"]),
        **dict.fromkeys(("xtick.color", "ytick.color"), theme["faint"]),
        "axes.edgecolor": theme["faint"],
        "grid.color": theme["grid"],
    }
    sizes = {"font.size": 9, "axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.labelsize": 9}
    look = {"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
    return matplotlib.rc_context({**default, **colours, **sizes, **look})


# ---------------------------------------------------------------------- the page


def build(figure: Mapping[str, Any], theme: Mapping[str, Any]) -> "Figure":
    """The page: title, legend, panels in at most two columns, small print."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = figure["panels"]
    columns = min(2, len(panels))
    rows = [panels[first : first + columns] for first in range(0, len(panels), columns)]
    heights = [max(map(_height, row)) for row in rows]
    width = _WIDE if columns == 2 else _NARROW
    page = Figure(figsize=(width, sum(heights)), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(page)
    grid, looks = page.add_gridspec(len(rows), columns, height_ratios=heights), _looks(panels, theme)
    drawn: list[list[Drawn]] = []
    for number, row in enumerate(rows):
        spans = range(columns) if len(row) == columns else [slice(None)]  # a single last panel takes the whole row
        places = [places_of(panel) for panel in row]
        is_named = len(row) == 2 and list(places[0]) == list(places[1]) != []
        if is_named:  # the left panel names the categories of both, which have the same heights
            places = [{category: max(count, places[1][category]) for category, count in places[0].items()}] * 2
        axes = [page.add_subplot(grid[number, span]) for span in spans]
        drawn.append([draw_panel(*it, looks) for it in zip(axes, row, places)])
        axes[-1].tick_params(labelleft=not is_named)

    inside = width - 2 * _MARGIN
    above = [_fitted(figure.get("title", ""), inside, lambda s: page.text(0, 0, s, fontsize=13, weight="bold"))]
    above.append(_shared_legend(page, [panel for row in drawn for panel in row], inside))
    small = {"fontsize": 7.5, "color": theme["faint"]}
    note = _fitted(figure.get("note", ""), inside, lambda s: page.text(0, 0, s, **small))
    head = _MARGIN + sum(_inches(artist)[1] + _MARGIN for artist in above if artist)
    foot = _MARGIN + (_inches(note)[1] + _MARGIN if note else 0)
    total = head + sum(heights) + foot
    page.set_size_inches(width, total)
    top = total - _MARGIN
    for artist in filter(None, above):
        _put(artist, _MARGIN / width, top / total)
        top -= _inches(artist)[1] + _MARGIN
    if note:
        _put(note, _MARGIN / width, (foot - _MARGIN) / total)
    room = (_MARGIN / width, foot / total, inside / width, sum(heights) / total)
    layout: Any = page.get_layout_engine()  # the constrained one
    layout.set(rect=room, w_pad=0.06, h_pad=0.08, wspace=0.05, hspace=0.02)

    page.draw_without_rendering()  # fixes the panels' widths
    for row in drawn:
        legends = [_own_legend(panel) for panel in row]
        pad = 7 + max((72 * _inches(legend)[1] + 4 for legend in legends if legend), default=0)
        for panel in row:
            _fitted(panel.title, _width(panel.axes), partial(panel.axes.set_title, loc="left", pad=pad))
    page.draw_without_rendering()
    for panel in (panel for row in drawn for panel in row):
        _thin_out(panel.axes)
    return page


def _height(panel: Mapping[str, Any]) -> float:
    if panel["kind"] == "lines":
        return _LINES_HEIGHT
    return _AROUND_BARS + sum(room_of(panel, count) for count in places_of(panel).values())


def _inches(artist: Any) -> tuple[float, float]:
    box = artist.get_window_extent(artist.get_figure(root=True).canvas.get_renderer())
    return box.width / _DPI, box.height / _DPI


def _width(axes: "Axes") -> float:
    return axes.get_window_extent().width / _DPI


def _put(artist: Any, x: float, y: float) -> None:
    """Move the artist's upper left corner to (x, y), in fractions of the page."""
    if hasattr(artist, "set_bbox_to_anchor"):
        artist.set_bbox_to_anchor((x, y))
    else:
        artist.set(x=x, y=y, va="top", ha="left")


def _fitted(text: str, width: float, make: Callable[[str], Any]) -> Any:
    """The text in as few lines as possible, none wider than `width` inches; its own line breaks stay."""
    if not text:
        return None
    ways = [[textwrap.fill(line, n, break_on_hyphens=False) for line in text.splitlines()] for n in range(200, 8, -4)]
    for words in dict.fromkeys("\n".join(lines) for lines in ways):
        artist = make(words)
        artist.set_linespacing(1.35)
        if _inches(artist)[0] <= width:
            break
        if artist.axes is None:  # a panel's title replaces the one before it
            artist.remove()
    return artist


def _looks(panels: list[Mapping[str, Any]], theme: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Label -> colour and marker: those of its method, else the first that no other label in the same panels has."""
    labels = dict.fromkeys(series["label"] for panel in panels for series in panel["series"])
    known = dict(zip(_PARTS, theme["parts"])) | {"plain": theme["plain"]}
    looks = {label: (known[label], ".") for label in labels if label in known}
    colours, count = list(enumerate(theme["cycle"])), len(_MARKERS)
    every = [(colour, _MARKERS[(i + turn) % count]) for turn in range(count) for i, colour in colours]
    free = dict(enumerate(every[: len(colours)]))
    for label in labels:
        place = _METHODS.get(re.split("[:, ]", label)[0])
        if place in free and label not in looks:
            looks[label] = free.pop(place)
    for label in labels:
        if label not in looks:
            beside = [names for names in ({s["label"] for s in panel["series"]} for panel in panels) if label in names]
            seen = [looks[name] for name in set().union(*beside) if name in looks]
            looks[label] = min(every, key=seen.count)
    return looks


# ---------------------------------------------------------------------- legends and labels


def _shared_legend(page: "Figure", panels: list[Drawn], width: float) -> Any:
    """One legend for all panels, if one of them shows all series."""
    fullest = max(panels, key=lambda panel: len(panel.series)).series
    if sum(len(panel.series) > 0 for panel in panels) < 2 or len(fullest) < 2:
        return None
    if any(panel.series.keys() - fullest.keys() for panel in panels):
        return None
    for panel in panels:
        panel.series = {}
    return _legend(page, fullest, width, loc="upper left", borderaxespad=0)


def _own_legend(panel: Drawn) -> Any:
    """The panel's own legend, between title and panel, so that it covers nothing."""
    entries = {**panel.series, **panel.reference}
    return _legend(panel.axes, entries, _width(panel.axes), loc="lower left", borderaxespad=0.3) if entries else None


def _legend(parent: Any, entries: Mapping[str, Any], width: float, **where: Any) -> Any:
    """A legend in as few rows as fit into `width`."""
    for rows in range(1, len(entries) + 1):
        legend = parent.legend(
            list(entries.values()), list(entries), ncols=math.ceil(len(entries) / rows), bbox_to_anchor=(0, 1),
            frameon=False, fontsize=8.5, borderpad=0, handlelength=1.6, columnspacing=1.2, labelspacing=0.3, **where,
        )  # fmt: skip
        if _inches(legend)[0] <= width or rows == len(entries):
            return legend
        legend.remove()


def _thin_out(axes: "Axes") -> None:
    """Where ticks are set at the values, remove those whose labels would touch."""
    from matplotlib.ticker import FixedLocator

    if not isinstance(axes.xaxis.get_major_locator(), FixedLocator):
        return
    kept, end = [], -math.inf
    for place, label in zip(axes.get_xticks(), axes.get_xticklabels()):
        box = label.get_window_extent()
        if box.x0 > end + 0.03 * _DPI:
            kept.append(place)
            end = box.x1
    axes.set_xticks(kept)


__all__ = ["draw", "figure_of", "plot"]
