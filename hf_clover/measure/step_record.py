"""Watching `generate`: which tokens came out of which forward of the target.

Contract: a `StepRecord` is a streamer that also hears of the target's forwards. Of the tokens of one forward the last
is the target's own and the others came free: drafted, and confirmed by that same forward. That is all it knows, so it
serves any way to generate: with heads, plainly, with transformers' own assistants. It changes no token, and keeps no
exception from its caller.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.streamers import BaseStreamer

from ..decoding.budget import plain_step_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StepRecord(BaseStreamer):
    """A streamer that also hears of the target's forwards: the tokens that came out of each, and the seconds."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.times: list[float] = []  # of each token, in seconds from the prompt's forward on
        self.seconds = 0.0
        self.plain_step: float | None = None  # seconds, where the automatic budget has seen any
        self._has_seen_prompt, self._start = False, 0.0

    def generate(self, target: "PreTrainedModel", inputs: Mapping[str, Any], heads: Any = None, **options: Any) -> Any:
        """`target.generate`, watched; returns its output, always as a dictionary."""
        with self.listening(target):
            options = {"assistant_model": heads, "return_dict_in_generate": True, **options}
            out = target.generate(**inputs, streamer=self, **options)  # type: ignore[operator]
        if options["assistant_model"] is not None:
            self.plain_step = plain_step_of(target, options["assistant_model"], out.sequences.shape[1])
        return out

    @contextmanager
    def listening(self, target: "PreTrainedModel") -> Iterator[None]:
        hook = target.register_forward_pre_hook(self.new_step)
        self._start = time.perf_counter()
        try:
            yield
        finally:
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
            self.times += [time.perf_counter() - self._start] * value.numel()
        self._has_seen_prompt = True

    def end(self) -> None:
        """The text is over. What heads learn after it is no part of its time. A second call finds nothing to do."""
        if self._start and not self.seconds:
            self.seconds = time.perf_counter() - self._start

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
        """The figures in one line, with the speed over plain generate where it can be told from plain steps."""
        said = self.figures()
        per_forward, speed = f"{said['tokens_per_forward']:.2f} tokens per forward", said["tokens_per_second"]
        over_plain = ""
        if self.plain_step is not None and self.times:
            plain_seconds = self.times[0] + self.plain_step * (len(self.times) - 1)
            over_plain = f", about {plain_seconds / self.seconds:.1f} times plain generate"
        counts = f"{said['new_tokens']} tokens, {said['target_forwards']} forwards, {said['seconds']:.1f} s"
        return f"{per_forward}, {speed:.1f} tokens/s{over_plain} ({counts})"


__all__ = ["StepRecord"]
