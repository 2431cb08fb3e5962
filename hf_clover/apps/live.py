"""The text of a generation on a console, shown while it is generated, with free tokens in colour if there is colour.

A token is free if it was drafted and accepted, so it needed no forward of its own.

Contract: a `LiveStreamer` is a `StepRecord`, so it knows whether a token was free. It changes no token and catches no
exception. On a terminal, lines end between words (`lines`).
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..measure.step_record import StepRecord
from .lines import WholeWords

FREE, PROMPT = "bold green", "dim"  # rich's names of styles
_CONTEXT = 8  # tokens before a text, which decide for example whether it begins with a space
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # half a character decodes to this


class TokenText:
    """Turns ids into text one by one: returns each character as soon as it is complete, and decodes only the last few
    tokens.

    The returned texts, joined, equal the decoded whole.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, context: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self._before, self._pending = list(context[-_CONTEXT:]), list[int]()
        self._known = self._decode(self._before)

    def push(self, token: int) -> str:
        self._pending.append(token)
        text = self._decode(self._before + self._pending)
        if text.endswith(_UNFINISHED) or len(text) <= len(self._known):
            return ""
        new = text[len(self._known) :]
        self._before, self._pending = self._pending, []
        self._known = self._decode(self._before)
        return new

    def flush(self) -> str:
        """The rest of the text, including a character that is not complete."""
        new = self._decode(self._before + self._pending)[len(self._known) :]
        self._before, self._pending, self._known = [], [], ""
        return new

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens)  # type: ignore[return-value]


class LiveStreamer(StepRecord):
    """Writes one text while it is generated. A token is written when it is known whether it was free: when the next
    token of the same forward arrives, or the next forward begins.

    Args:
        tokenizer: The target's tokenizer.
        console (`rich.console.Console`, *optional*): The console to write to; standard output by default.
        skip_prompt (`bool`, *optional*, defaults to `False`): Whether to leave the prompt out, as in transformers'
            `TextStreamer`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, console: Console | None = None, skip_prompt: bool = False
    ) -> None:
        super().__init__()
        self.tokenizer, self.skip_prompt = tokenizer, skip_prompt
        self.console = Console() if console is None else console
        self._text: TokenText | None = None  # None until the prompt has arrived
        self._held: int | None = None  # the last token, of which it is not yet known whether it was free
        self._words, self._at_line_start = WholeWords(), True

    def new_step(self, *_: Any) -> None:
        self._settle(is_free=False)
        super().new_step()

    def put(self, value: torch.Tensor) -> None:
        if value.ndim > 1 and value.shape[0] > 1:
            raise ValueError(f"LiveStreamer shows one text, and `input_ids` has {value.shape[0]} rows: give it one.")
        super().put(value)
        if self._text is None:
            prompt = value.flatten().tolist()
            self._text = TokenText(self.tokenizer, prompt)
            if not self.skip_prompt:
                text = self.tokenizer.decode(prompt, skip_special_tokens=True)
                self._write(text, PROMPT)  # type: ignore[arg-type]
            return
        for token in value.flatten().tolist():
            self._settle(is_free=True)
            self._held = token

    def end(self) -> None:
        """Write the token that was held back and end the line. A second call does nothing."""
        super().end()
        if self._text is None:
            return
        self._settle(is_free=False)
        self._write(self._text.flush(), None)
        if not self._at_line_start:
            self._show("\n", None)

    def _settle(self, is_free: bool) -> None:
        if self._held is not None and self._text is not None:
            token, self._held = self._held, None
            self._write(self._text.push(token), FREE if is_free else None)

    def _write(self, text: str, style: str | None) -> None:
        if not text:
            return
        if not self.console.is_terminal:
            self._show(text, style)
            return
        text = text.replace("\x1b", "␛")  # so that no generated text controls the terminal
        pieces = self._words.push(text, style, self.console.width)
        for style, alike in groupby(pieces, key=itemgetter(1)):
            self._show("".join(text for text, _ in alike), style)

    def _show(self, text: str, style: str | None) -> None:
        has_colour = self.console.color_system is not None and not self.console.no_color
        # As a segment, because rich would drop control characters and widen tabs in text.
        segment = Segment(text, Style.parse(style) if style and has_colour else None)
        self.console.print(Segments([segment]), end="", soft_wrap=True)
        self._at_line_start = text.endswith("\n")


def generate_live(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Mapping[str, Any],
    heads: Any = None,
    console: Console | None = None,
    **options: Any,
) -> Any:
    """`target.generate(**inputs, assistant_model=heads, **options)`, shown while it runs, with free tokens in colour.

    Returns the output of `generate` as a dictionary.
    """
    return LiveStreamer(tokenizer, console).generate(target, inputs, heads, **options)


__all__ = ["LiveStreamer", "TokenText", "generate_live"]
