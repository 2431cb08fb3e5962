"""
How it works, in one picture: a step of tree speculation, drawn for light pages and for dark ones.

The tree, and which of its tokens are accepted, are data (`TREE`). The attention mask and the cells of the cache in the
picture are computed from it, as in decoding.

    python examples/pictures.py            # writes examples/pictures/how_it_works.png and how_it_works-dark.png
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from hf_clover.measure.plots import THEMES, save, settings

WIDTH, HEIGHT = 960, 625  # hundredths of an inch; each is two pixels in the README's column
COLUMNS = (282, 432, 552, 672, 792, 899)  # the root, the heads' levels, the bonus
CHIP = (76, 27)


@dataclass(frozen=True)
class Node:
    token: str
    parent: int | None
    depth: int
    row: float  # row of the node, from the top of the tree
    agreed: bool = False


# The nodes of one forward, parents first: the root, then the tokens of head 0, of head 1, ...
TREE = (
    Node("return", None, 0, 2, True),
    Node("sum", 0, 1, 0.5, True),
    Node("len", 0, 1, 3, False),
    Node("values", 0, 1, 4, False),
    Node("(", 1, 2, 0.5, True),
    Node("(", 2, 2, 3, False),
    Node("[", 3, 2, 4, False),
    Node("values", 4, 3, 0, True),
    Node("x", 4, 3, 2, False),
    Node("values", 5, 3, 3, False),
    Node(")", 7, 4, 0, True),
    Node(",", 7, 4, 1, False),
    Node(")", 9, 4, 3, False),
)
BONUS = "/"
TEXT = ("def mean(values):", "    return")


def ancestors(node: int) -> set[int]:
    """A node and its ancestors: all nodes that it may see."""
    parent = TREE[node].parent
    return {node} if parent is None else {node} | ancestors(parent)


class Sheet:
    """A page with boxes, arrows and words; places are counted from the upper left."""

    def __init__(self, dark: bool) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.theme = THEMES["dark" if dark else "light"]
        self.blue, self.orange, self.green = self.theme["cycle"][:3]
        self.page = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=175)
        FigureCanvasAgg(self.page)
        self.axes = self.page.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(HEIGHT, 0))
        self.axes.set_axis_off()

    def tint(self, colour: str, share: float = 0.14) -> tuple[float, ...]:
        from matplotlib.colors import to_rgb

        return tuple(share * c + (1 - share) * b for c, b in zip(to_rgb(colour), to_rgb(self.theme["back"])))

    def say(self, x: float, y: float, words: str, size: float = 9, colour: str = "text", **look) -> None:
        """Write words at `y`. A single line has its baseline in one place for all letters; a block is centred."""
        look = {"ha": "left", "linespacing": 1.4, "zorder": 6, "va": "center" if "\n" in words else "baseline", **look}
        y += 0.36 * size * 100 / 72 if look["va"] == "baseline" else 0
        self.axes.text(x, y, words, fontsize=size, color=self.theme.get(colour, colour), **look)

    def box(self, x, y, width, height, fill, edge, radius: float = 6, dashed: bool = False, zorder: float = 3) -> None:
        from matplotlib.patches import FancyBboxPatch

        style = {"facecolor": fill, "edgecolor": edge, "linestyle": (0, (3, 2)) if dashed else "-", "zorder": zorder}
        shape = f"round,pad=0,rounding_size={radius}"
        self.axes.add_patch(FancyBboxPatch((x, y), width, height, shape, linewidth=1.2, **style))

    def arrow(self, start, end, colour: str, **look) -> None:
        from matplotlib.patches import FancyArrowPatch

        look = {"arrowstyle": "-|>", "mutation_scale": 9, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0, **look}
        self.axes.add_patch(FancyArrowPatch(start, end, color=colour, zorder=4, **look))

    def branch(self, start, end, colour: str, width: float, dashed: bool = False) -> None:
        """A curve from one column to the next, horizontal at both ends."""
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path as Curve

        (x0, y0), (x1, y1) = start, end
        middle = (x0 + x1) / 2
        curve = Curve([(x0, y0), (middle, y0), (middle, y1), (x1, y1)], [1, 4, 4, 4])
        style = {"edgecolor": colour, "linewidth": width, "linestyle": (0, (3, 2)) if dashed else "-"}
        self.axes.add_patch(PathPatch(curve, facecolor="none", zorder=3.5, **style))

    def chip(self, x: float, y: float, token: str, kind: str, size=CHIP) -> None:
        """A token in a box. `kind`: "there" (already in the text), "agreed", "refused" or "bonus"."""
        colour = {"there": self.blue, "agreed": self.green, "refused": self.theme["plain"], "bonus": self.orange}[kind]
        is_refused = kind == "refused"
        fill, edge = self.tint(colour, 0.06 if is_refused else 0.22), self.tint(colour, 0.45 if is_refused else 1)
        self.box(x - size[0] / 2, y - size[1] / 2, *size, fill, edge, zorder=5, dashed=kind == "bonus")
        words = {"family": "monospace", "ha": "center"}
        self.say(
            x, y, token, 10, "faint" if is_refused else "text", weight="normal" if is_refused else "bold", **words
        )

    def step(self, number: int, x: float, y: float, words: str, more: str = "") -> None:
        from matplotlib.patches import Circle

        self.axes.add_patch(Circle((x + 10, y), 10, facecolor=self.theme["text"], edgecolor="none", zorder=5))
        middle = {"ha": "center", "weight": "bold"}
        self.say(x + 10, y, str(number), 10, "back", **middle)
        self.say(x + 27, y, words, 12, weight="bold")
        if more:
            self.say(x + 40 + 9.6 * len(words), y, more, 9, "faint")


def draft(sheet: Sheet) -> None:
    theme, top, bottom = sheet.theme, 44, 352
    sheet.step(
        1,
        20,
        22,
        "Draft",
        "the heads grow a tree from the target's last hidden state; each also reads the token drafted before it",
    )
    sheet.box(20, top, 130, 56, sheet.tint(theme["plain"]), theme["plain"])
    sheet.say(85, top + 20, "Target", 11, weight="bold", ha="center")
    sheet.say(85, top + 39, "frozen", 8.5, "faint", ha="center")
    sheet.arrow((150, top + 28), (204, top + 28), theme["faint"])
    sheet.say(177, top + 64, "last hidden\nstate", 8.5, "faint", ha="center", va="top")
    sheet.box(204, top, 156, 56, sheet.tint(sheet.blue), sheet.blue)
    sheet.say(COLUMNS[0], top + 20, "Augmenting Block", 10, weight="bold", ha="center")
    sheet.say(COLUMNS[0], top + 39, "attends to all the text", 8.5, "faint", ha="center")
    before = 360
    for head, x in enumerate(COLUMNS[1:5]):
        sheet.box(x - 50, top, 100, bottom - top, sheet.tint(sheet.blue, 0.05), "none", zorder=1)
        sheet.box(x - 50, top, 100, 56, sheet.tint(sheet.blue), sheet.blue)
        sheet.say(x, top + 28, f"Head {head}", 10, weight="bold", ha="center")
        sheet.arrow((before, top + 28), (x - 50, top + 28), sheet.blue)
        before = x + 50

    sheet.box(20, 196, 178, 58, sheet.tint(theme["plain"], 0.07), sheet.tint(theme["plain"], 0.5))
    for line, words in enumerate(TEXT):
        sheet.say(32, 214 + 22 * line, words, 9.5, family="monospace")
    sheet.arrow((85, 196), (85, top + 56), theme["faint"])
    sheet.say(20, 268, "the text so far", 8.5, "faint")

    def place(node: Node) -> tuple[float, float]:
        return COLUMNS[node.depth], 137 + 48 * node.row

    half = CHIP[0] / 2
    for node in TREE:
        x, y = place(node)
        kind = "there" if node.parent is None else "agreed" if node.agreed else "refused"
        sheet.chip(x, y, node.token, kind)
        if node.parent is not None:
            from_x, from_y = place(TREE[node.parent])
            colour = sheet.green if node.agreed else sheet.tint(theme["plain"], 0.55)
            sheet.branch((from_x + half, from_y), (x - half, y), colour, 2.4 if node.agreed else 1.1)
    x, y = place(next(node for node in reversed(TREE) if node.agreed))
    sheet.branch((x + half, y), (COLUMNS[5] - half, y), sheet.orange, 2, dashed=True)
    sheet.chip(COLUMNS[5], y, BONUS, "bonus")
    sheet.say(COLUMNS[5], y + 24, "bonus:\nthe target's\nown choice", 8.5, "faint", ha="center", va="top")


def card(sheet: Sheet, number: int, x: float, title: str, words: str) -> float:
    """A numbered card with words at the bottom. Returns the middle of the free space above the words."""
    top, bottom = 372, 610
    sheet.box(x, top, 296, bottom - top, sheet.tint(sheet.theme["plain"], 0.05), sheet.theme["grid"], 9, zorder=1)
    sheet.step(number, x + 14, top + 22, title)
    sheet.say(x + 16, bottom - 14, words, 8.7, va="bottom")
    return top + 98


def verify(sheet: Sheet, x: float) -> None:
    drafted = len(TREE) - 1
    words = (
        f"The target reads all {drafted} drafted tokens\nin one forward. Each sees the text and its\n"
        "own ancestors, and nothing else."
    )
    middle = card(sheet, 2, x, "Verify", words)
    cell, left = 7.6, x + 16 + 92
    top = middle - cell * len(TREE) / 2 - 2
    sheet.box(x + 16, top, 86, cell * len(TREE) - 1, sheet.tint(sheet.theme["plain"], 0.45), "none", 2)
    sheet.say(x + 59, top + cell * len(TREE) / 2, "the text", 8.5, ha="center")
    for row in range(len(TREE)):
        for column in range(len(TREE)):
            seen = column in ancestors(row)
            colour = sheet.green if TREE[row].agreed else sheet.theme["plain"]
            fill = sheet.tint(colour, 0.85 if seen else 0.08)
            sheet.box(left + cell * column, top + cell * row, cell - 1, cell - 1, fill, "none", 1)
    sheet.say(left + cell * len(TREE) + 8, middle - 2, "who sees\nwhom:\nthe mask", 8.5, "faint")


def walk(sheet: Sheet, x: float) -> None:
    agreed = [node.token for node in TREE[1:] if node.agreed]
    words = (
        "The path on which target and heads agree,\nand one token more: here "
        f"{len(agreed) + 1} tokens from\none forward, those of plain generate."
    )
    middle = card(sheet, 3, x, "Walk", words)
    left, gap = x + 16, 5
    widths = [11.0 * len(token) + 16 for token in (*agreed, BONUS)]
    scale = 1.0
    left += (264 - sum(widths) * scale - gap * (len(widths) - 1)) / 2
    for token, width in zip((*agreed, BONUS), widths):
        kind = "agreed" if token is not BONUS else "bonus"
        sheet.chip(left + width / 2, middle - 6, token, kind, (width, CHIP[1]))
        if token is agreed[0]:
            start = left
        if token is agreed[-1]:
            end = left + width
        left += width + gap
    rule = {"color": sheet.green, "linewidth": 1.5, "solid_capstyle": "round"}
    sheet.axes.plot([start, end], [middle + 17] * 2, **rule)
    sheet.say((start + end) / 2, middle + 29, f"{len(agreed)} drafts agreed", 8.5, "faint", ha="center")
    sheet.axes.plot([end + gap, left - gap], [middle + 17] * 2, **{**rule, "color": sheet.orange})
    sheet.say((end + left) / 2, middle + 29, "bonus", 8.5, "faint", ha="center")


def commit(sheet: Sheet, x: float) -> None:
    words = (
        "The path's keys and values close up behind\nthe text; the others are overwritten. The\n"
        "bonus is the root of the next tree."
    )
    middle = card(sheet, 4, x, "Commit", words)
    text, cell, left = 6, 13.6, x + 17
    kept = [i for i, node in enumerate(TREE) if node.agreed]

    def cells(y: float, first: int, kinds: list[str]) -> None:
        for place, kind in enumerate(kinds, first):
            colour = {"text": sheet.theme["plain"], "kept": sheet.green, "left": sheet.theme["plain"]}[kind]
            fill = sheet.tint(colour, {"text": 0.45, "kept": 0.85, "left": 0.1}[kind])
            edge = sheet.tint(colour, 0.35) if kind == "left" else "none"
            sheet.box(left + cell * place, y, cell - 2.4, 17, fill, edge, 2)

    above, below = middle - 34, middle + 18
    for y in (above, below):
        cells(y, 0, ["text"] * text)
    cells(above, text, ["kept" if i in kept else "left" for i in range(len(TREE))])
    cells(below, text, ["kept"] * len(kept))
    for place, node in enumerate(kept):
        start, end = (left + cell * (text + i + 0.42) for i in (node, place))
        sheet.arrow((start, above + 19), (end, below - 2), sheet.green, linewidth=0.9, mutation_scale=6)
    sheet.say(left + cell * (text + len(kept)) + 8, below + 8.5, "after the commit", 8.5, "faint")


def how_it_works(dark: bool = False):
    sheet = Sheet(dark)
    draft(sheet)
    verify(sheet, 20)
    walk(sheet, 332)
    commit(sheet, 644)
    return sheet.page


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "pictures", help="the folder to write to")
    out = parser.parse_args(arguments).out
    for name, dark in (("how_it_works.png", False), ("how_it_works-dark.png", True)):
        with settings(THEMES["dark" if dark else "light"]):
            print(save(how_it_works(dark), out / name))


if __name__ == "__main__":
    main()
