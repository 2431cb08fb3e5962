"""The quick start's race as a moving picture, for light pages and for dark ones: one run, replayed at its own times.

    python examples/race_picture.py        # runs the quick start, writes examples/pictures/race.svg and race-dark.svg

The left side is the answer with heads, the right side that of plain generate. In the picture both begin at once; in
the run one came after the other. Programs that cannot animate SVG show the end.
"""

import argparse
import re
from pathlib import Path
from xml.sax.saxutils import escape

from quickstart import main as run
from quickstart import verdict

from hf_clover.apps.live import TokenText
from hf_clover.measure.prompts import QUESTIONS
from hf_clover.measure.step_record import StepRecord

WIDTH, MARGIN, SIZE, LINE = 960, 24, 13, 20  # pixels
LETTER = 0.602 * SIZE  # width of a letter in the fonts named below
COLUMN = (WIDTH - 3 * MARGIN) // 2
STAYS = 4.0  # seconds between the end and the next beginning
FONT = "ui-monospace, SFMono-Regular, Menlo, 'DejaVu Sans Mono', monospace"
THEMES = {
    "": {"back": "#ffffff", "edge": "#d1d9e0", "text": "#1f2328", "dim": "#59636e", "free": "#1a7f37"},
    "-dark": {"back": "#0d1117", "edge": "#3d444d", "text": "#f0f6fc", "dim": "#9198a1", "free": "#3fb950"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parent / "pictures" / "race.svg")
    output = parser.parse_args().output
    ours, plain = run([])
    for name, theme in THEMES.items():
        path = output.with_stem(output.stem + name)
        path.write_text(picture(ours, plain, ours.tokenizer, theme), encoding="utf-8")
        print(path)


def picture(ours: StepRecord, plain: StepRecord, tokenizer, theme: dict[str, str]) -> str:
    top = MARGIN + 3 * LINE
    sides = [side_of(record, tokenizer, x, top, theme) for record, x in zip((ours, plain), (MARGIN, WIDTH // 2 + 6))]
    bottom = max(y for _, y in sides) + 0.8 * LINE
    lasts = max(ours.seconds, plain.seconds) + STAYS
    parts = [
        text(MARGIN, MARGIN + SIZE, f"> {QUESTIONS[0]}", theme["text"], "bold"),
        text(MARGIN, MARGIN + SIZE + 1.6 * LINE, "with heads; tokens that came free in green", theme["dim"]),
        text(WIDTH // 2 + 6, MARGIN + SIZE + 1.6 * LINE, "plain generate", theme["dim"]),
    ]
    for (body, _), record, x in zip(sides, (ours, plain), (MARGIN, WIDTH // 2 + 6)):
        parts.append(body)
        for begin, end, moment in bar_of(record):
            colour = theme["free"] if record is ours else theme["dim"]
            place = f'x="{x + begin * COLUMN:.1f}" y="{bottom}" width="{(end - begin) * COLUMN + 0.5:.1f}" height="6"'
            parts.append(f'<rect {place} fill="{colour}">{hidden_until(moment)}</rect>')
        said = text(x, bottom + 1.4 * LINE, f"{len(record.tokens)} tokens in {record.seconds:.1f} s", theme["text"])
        parts.append(f"<g>{said}{hidden_until(record.seconds)}</g>")
    said = text(MARGIN, bottom + 2.8 * LINE, verdict(ours, plain), theme["free"], "bold")
    parts.append(f"<g>{said}{hidden_until(lasts - STAYS)}</g>")
    height = bottom + 3.7 * LINE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-family="{FONT}" '
        f'font-size="{SIZE}">\n'
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:.0f}" rx="8" fill="{theme["back"]}" '
        f'stroke="{theme["edge"]}"><animate id="race" attributeName="rx" values="8" begin="0s;race.end" '
        f'dur="{lasts:.2f}s"/></rect>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def side_of(record: StepRecord, tokenizer, left: float, top: float, theme: dict[str, str]) -> tuple[str, float]:
    """The SVG of one side, on which each step's text appears at the step's time, and the height at which it ends."""
    pieces = TokenText(tokenizer)
    marked = [
        [(pieces.push(token), place < len(step) - 1) for place, token in enumerate(step)]
        for step in record.steps
        if step
    ]
    whole = "".join(piece for step in marked for piece, _ in step)
    places, height = lines_of(whole, int(COLUMN / LETTER))
    times, at, groups = iter(record.times), 0, []
    for step in marked:
        moment, words = [next(times) for _ in step][-1], ""
        for piece, is_free in step:
            for begin, end in runs_of(places, at, at + len(piece)):
                line, column = places[begin]
                colour = theme["free"] if is_free else theme["text"]
                look = "bold" if is_free else "normal"
                words += text(left + column * LETTER, top + SIZE + line * LINE, whole[begin:end], colour, look)
            at += len(piece)
        groups.append(f"<g>{words}{hidden_until(moment)}</g>")
    return "\n".join(groups), top + height * LINE


def lines_of(whole: str, width: int) -> tuple[list[tuple[int, int] | None], int]:
    """Line and column of each character, with lines broken between words, and the number of lines. A line break has no
    place: None."""
    places: list[tuple[int, int] | None] = []
    line = column = 0
    for part in re.findall(r"\n|[^\S\n]+|\S+", whole):
        if part == "\n":
            places.append(None)
            line, column = line + 1, 0
            continue
        if not part.isspace() and column and column + len(part) > width:
            line, column = line + 1, 0
        places += [(line, column + place) for place in range(len(part))]
        column += len(part)
    return places, line + 1


def runs_of(places: list, begin: int, end: int) -> list[tuple[int, int]]:
    """The parts of a piece that are on one line each."""
    found: list[tuple[int, int]] = []
    for place in range(begin, end):
        if places[place] is None:
            continue
        if found and found[-1][1] == place and places[place][0] == places[found[-1][0]][0]:
            found[-1] = (found[-1][0], place + 1)
        else:
            found.append((place, place + 1))
    return found


def bar_of(record: StepRecord) -> list[tuple[float, float, float]]:
    """The parts of the bar: beginning, end, and the moment at which the part is filled."""
    filled = []
    for number, moment in enumerate(record.times):
        begin, end = number / len(record.times), (number + 1) / len(record.times)
        if filled and filled[-1][2] == moment:
            begin = filled.pop()[0]
        filled.append((begin, end, moment))
    return filled


def text(x: float, y: float, words: str, colour: str, weight: str = "normal") -> str:
    """An SVG text. It is as wide as in the first of the fonts, whichever font is used."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-weight="{weight}" xml:space="preserve" '
        f'textLength="{len(words) * LETTER:.1f}" lengthAdjust="spacingAndGlyphs">{escape(words)}</text>'
    )


def hidden_until(moment: float) -> str:
    return f'<set attributeName="visibility" to="hidden" begin="race.begin" dur="{moment:.2f}s"/>'


if __name__ == "__main__":
    main()
