"""Lines that end between words.

Contract: the edge of a terminal breaks no word, whether a line is printed as a whole or in pieces. In a file or a
pipe, a line stays one line of any length.
"""

import re
from collections.abc import Iterator
from typing import Any

from rich.cells import cell_len
from rich.console import Console


def print_line(console: Console, line: str, style: str | None = None) -> None:
    """Print `line`, broken between words on a terminal, and as one line elsewhere."""
    console.print(line, style=style, markup=False, emoji=False, highlight=False, soft_wrap=not console.is_terminal)


def print_to_stderr(line: str, style: str) -> None:
    """`print_line` on standard error, for what is no result of a command."""
    print_line(Console(stderr=True), line, style)


def lines_of(learner: Any) -> list[str]:
    """The lines that an `OnlineLearner` adds under an answer; none without a learner."""
    return [] if learner is None else [f"heads that learn: {learner}"]


class WholeWords:
    """Takes pieces of a text as they arrive, and returns what to write to a terminal.

    That is the pieces themselves. If a word becomes too long for its line, its beginning is erased and written on the
    next line. The last column stays free, because cursors behave oddly there."""

    def __init__(self) -> None:
        self._column = 0
        self._word: list[tuple[str, str | None]] = []  # the written part of the current word, with its styles

    def push(self, text: str, style: str | None, width: int) -> Iterator[tuple[str, str | None]]:
        for part in re.findall(r"\n|[^\S\n]+|\S+", text):
            if part.isspace():
                self._word = []
                self._column = 0 if part == "\n" else len((" " * self._column + part).expandtabs())
                yield part, style
                continue
            is_wide = _columns(part) > len(part)  # scripts without spaces: a line may end anywhere
            for chunk in part if is_wide else (part,):
                known, new = sum(_columns(begun) for begun, _ in self._word), _columns(chunk)
                if self._column + new >= width and known + new < width and self._column > known:
                    yield (f"\x1b[{known}D\x1b[K" if known else "") + "\n", None
                    yield from self._word
                    self._column = known
                self._word = [] if is_wide else [*self._word, (chunk, style)]
                self._column = (self._column + new) % width  # the terminal breaks longer words
                yield chunk, style


def _columns(text: str) -> int:
    return cell_len(text)


__all__ = ["WholeWords", "lines_of", "print_line", "print_to_stderr"]
