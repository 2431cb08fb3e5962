"""Watching `generate`: which tokens came out of which forward of the target, and the text as it appears.

Contract: a `StepRecord` is a streamer that also hears of the target's forwards. Of the tokens of one forward the last
is the target's own and the others came free: drafted, and confirmed by that same forward. That is all it knows, so it
serves any way to generate: with heads, plainly, with transformers' own assistants. `LiveStreamer` is one that writes
the text to a console, the free tokens in colour where there is colour. Neither changes a token, and neither keeps an
exception from its caller.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.streamers import BaseStreamer

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FREE, PROMPT = "bold green", "dim"  # rich's names of styles
_CONTEXT = 8  # tokens before a text that decide how it begins: whether with a space, for one
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what half a character decodes to


class StepRecord(BaseStreamer):
    """A streamer that also hears of the target's forwards: the tokens that came out of each, and the seconds."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.seconds = 0.0
        self._has_seen_prompt = False

    def generate(self, target: "PreTrainedModel", inputs: Mapping[str, Any], heads: Any = None, **options: Any) -> Any:
        """`target.generate`, watched; returns its output, always as a dictionary."""
        with self.listening(target):
            options = {"assistant_model": heads, "return_dict_in_generate": True, **options}
            return target.generate(**inputs, streamer=self, **options)

    @contextmanager
    def listening(self, target: "PreTrainedModel") -> Iterator[None]:
        hook = target.register_forward_pre_hook(self.new_step)
        self._start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds = time.perf_counter() - self._start
            hook.remove()
            self.end()  # also of a text that was broken off

    def new_step(self, *_: Any) -> None:
        if not any(self.steps):  # with the forward of the prompt, not with what is looked into once per target
            self._start = time.perf_counter()
        self.steps.append([])

    def put(self, value: torch.Tensor) -> None:
        if self._has_seen_prompt:
            self.steps = self.steps or [[]]
            self.steps[-1] += value.flatten().tolist()
        self._has_seen_prompt = True

    def end(self) -> None:
        pass

    @property
    def tokens(self) -> list[int]:
        return [token for step in self.steps for token in step]

    def figures(self) -> dict[str, float]:
        """Tokens per forward are those of one text; a forward that gave no token (half a prompt) is no step."""
        forwards, tokens = sum(map(bool, self.steps)), len(self.tokens)
        return {
            "new_tokens": tokens,
            "target_forwards": forwards,
            "tokens_per_forward": tokens / max(forwards, 1),
            "seconds": self.seconds,
            "tokens_per_second": tokens / max(self.seconds, 1e-9),
        }

    def summary(self) -> str:
        """The figures in one line."""
        said = self.figures()
        per_forward, speed = f"{said['tokens_per_forward']:.2f} tokens per forward", said["tokens_per_second"]
        counts = f"{said['new_tokens']} tokens, {said['target_forwards']} forwards, {said['seconds']:.1f} s"
        return f"{per_forward}, {speed:.1f} tokens/s ({counts})"


class TokenText:
    """Ids in, text out: a character as soon as all of it is there, decoding no more than the last few tokens.

    What comes out, put together, is what the whole decodes to.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", context: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
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
        """What no token will complete any more."""
        new = self._decode(self._before + self._pending)[len(self._known) :]
        self._before, self._pending, self._known = [], [], ""
        return new

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


class LiveStreamer(StepRecord):
    """Writes one text while it is generated. A token is written when it is known whether it came free, which is when
    the next token of its forward, or the next forward, arrives.

    Args:
        tokenizer: The target's.
        console (`rich.console.Console`, *optional*): Where to; by default standard output.
        skip_prompt (`bool`, *optional*, defaults to `False`): Whether to leave the prompt out, as in transformers'
            `TextStreamer`.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", console: "Console | None" = None, skip_prompt: bool = False
    ) -> None:
        from rich.console import Console

        super().__init__()
        self.tokenizer, self.skip_prompt = tokenizer, skip_prompt
        self.console = Console() if console is None else console
        self._text: TokenText | None = None  # once there is a prompt
        self._held: int | None = None  # the last token, which may be free or the target's own
        self._at_line_start = True

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
                self._write(self.tokenizer.decode(prompt, skip_special_tokens=True), PROMPT)
            return
        for token in value.flatten().tolist():
            self._settle(is_free=True)
            self._held = token

    def end(self) -> None:
        """The text is over: what was held back, and the end of the line. A second call finds nothing to do."""
        if self._text is None:
            return
        self._settle(is_free=False)
        self._write(self._text.flush(), None)
        if not self._at_line_start:
            self._write("\n", None)

    def _settle(self, is_free: bool) -> None:
        if self._held is not None:
            token, self._held = self._held, None
            self._write(self._text.push(token), FREE if is_free else None)

    def _write(self, text: str, style: str | None) -> None:
        from rich.segment import Segment, Segments
        from rich.style import Style

        if not text:
            return
        has_colour = self.console.color_system is not None and not self.console.no_color
        if self.console.is_terminal:
            text = text.replace("\x1b", "␛")  # the model does not command the terminal
        # As it is: rich would drop control characters, widen tabs and break lines.
        segment = Segment(text, Style.parse(style) if style and has_colour else None)
        self.console.print(Segments([segment]), end="", soft_wrap=True)
        self._at_line_start = text.endswith("\n")


def generate_live(
    target: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    inputs: Mapping[str, Any],
    heads: Any = None,
    console: "Console | None" = None,
    **options: Any,
) -> Any:
    """`target.generate(**inputs, assistant_model=heads, **options)`, shown as it goes, the free tokens in colour.

    Returns generate's output, as a dictionary.
    """
    return LiveStreamer(tokenizer, console).generate(target, inputs, heads, **options)


__all__ = ["LiveStreamer", "StepRecord", "TokenText", "generate_live"]
