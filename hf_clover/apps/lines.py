"""Lines that end between words.

Contract: on a terminal no word is broken by the edge, whether a line is there as a whole or comes in pieces. Elsewhere
a line stays one, however long. Nothing heavy is imported here.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def print_line(console: "Console", line: str, style: str | None = None) -> None:
    """In whole words where a terminal is narrower, and as one line elsewhere."""
    console.print(line, style=style, markup=False, emoji=False, highlight=False, soft_wrap=not console.is_terminal)


def lines_of(learner: Any) -> list[str]:
    """What an `OnlineLearner` has to say under an answer; where there is none, nothing."""
    return [] if learner is None else [f"heads that learn: {learner}"]


class WholeWords:
    """Pieces of a text in, as they come, and what to write to a terminal out: the pieces, and where a word outgrows
    its line, its beginning taken back and written on the next. The last column stays free: cursors behave oddly
    there."""

    def __init__(self) -> None:
        self._column = 0
        self._word: list[tuple[str, str | None]] = []  # as much of it as is written, with its styles

    def push(self, text: str, style: str | None, width: int) -> Iterator[tuple[str, str | None]]:
        for part in re.findall(r"\n|[^\S\n]+|\S+", text):
            if part.isspace():
                self._word = []
                self._column = 0 if part == "\n" else len((" " * self._column + part).expandtabs())
                yield part, style
                continue
            is_wide = _columns(part) > len(part)  # such scripts have no spaces, and a line may end anywhere
            for chunk in part if is_wide else (part,):
                known, new = sum(_columns(begun) for begun, _ in self._word), _columns(chunk)
                if self._column + new >= width and known + new < width and self._column > known:
                    yield (f"\x1b[{known}D\x1b[K" if known else "") + "\n", None
                    yield from self._word
                    self._column = known
                self._word = [] if is_wide else [*self._word, (chunk, style)]
                self._column = (self._column + new) % width  # what is longer than a line, the terminal breaks
                yield chunk, style


def _columns(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


__all__ = ["WholeWords", "lines_of", "print_line"]
