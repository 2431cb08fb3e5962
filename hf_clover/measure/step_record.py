"""Watching `generate`: which tokens came out of which forward of the target.

Contract: a `StepRecord` is a streamer that also notices the target's forwards. The last token of a forward is the
target's own. The tokens before it were drafted, and the same forward confirmed them. It knows nothing else, so it
works with every way to generate: with heads, plain, with transformers' own assistants. It changes no token and hides
no exception.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..decoding.budget.automatic import plain_step_of


class StepRecord(BaseStreamer):
    """A streamer that also notices the target's forwards, and records the tokens of each and the seconds."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.times: list[float] = []  # time of each token, in seconds from the prompt's forward on
        self.seconds = 0.0
        self.plain_step: float | None = None  # seconds; None if the automatic budget has measured none
        self._has_seen_prompt, self._start = False, 0.0

    def generate(self, target: PreTrainedModel, inputs: Mapping[str, Any], heads: Any = None, **options: Any) -> Any:
        """Run and watch `target.generate`. Returns its output, always as a dictionary."""
        with self.listening(target):
            options = {"assistant_model": heads, "return_dict_in_generate": True, **options}
            out = target.generate(**inputs, streamer=self, **options)  # type: ignore[operator]
        if options["assistant_model"] is not None:
            self.plain_step = plain_step_of(target, options["assistant_model"], out.sequences.shape[1])
        return out

    @contextmanager
    def listening(self, target: PreTrainedModel) -> Iterator[None]:
        hook = target.register_forward_pre_hook(self.new_step)
        self._start = time.perf_counter()
        try:
            yield
        finally:
            hook.remove()
            self.end()  # also if the text was broken off

    def new_step(self, *_: Any) -> None:
        if not any(self.steps):  # time starts with the prompt's forward, after one-time trials of the target
            self._start = time.perf_counter()
        self.steps.append([])

    def put(self, value: torch.Tensor) -> None:
        if self._has_seen_prompt:
            self.steps = self.steps or [[]]
            self.steps[-1] += value.flatten().tolist()
            self.times += [time.perf_counter() - self._start] * value.numel()
        self._has_seen_prompt = True

    def end(self) -> None:
        """The text is over: stop the time, so that what heads learn later is not counted. A second call does
        nothing."""
        if self._start and not self.seconds:
            self.seconds = time.perf_counter() - self._start

    @property
    def tokens(self) -> list[int]:
        return [token for step in self.steps for token in step]

    def figures(self) -> dict[str, float]:
        """The figures of one text. A forward without a token (a part of a prompt) is not counted."""
        forwards, tokens = sum(map(bool, self.steps)), len(self.tokens)
        return {
            "new_tokens": tokens,
            "target_forwards": forwards,
            "tokens_per_forward": tokens / max(forwards, 1),
            "seconds": self.seconds,
            "tokens_per_second": tokens / max(self.seconds, 1e-9),
        }

    def summary(self) -> str:
        """The figures in one line, with the speedup over plain generate if the time of plain steps is known."""
        said = self.figures()
        per_forward, speed = f"{said['tokens_per_forward']:.2f} tokens per forward", said["tokens_per_second"]
        over_plain = ""
        if self.plain_step is not None and self.times:
            plain_seconds = self.times[0] + self.plain_step * (len(self.times) - 1)
            over_plain = f", about {plain_seconds / self.seconds:.1f} times plain generate"
        counts = f"{said['new_tokens']} tokens, {said['target_forwards']} forwards, {said['seconds']:.1f} s"
        return f"{per_forward}, {speed:.1f} tokens/s{over_plain} ({counts})"


__all__ = ["StepRecord"]
