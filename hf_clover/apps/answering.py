"""One thread that generates with heads, one request after the other, and what it tells the server meanwhile.

Contract: a `Job` is a prompt, settings and a seed; `Line.put` lets it wait its turn. What it writes comes out of
`job.events`, in the loop of the server: pieces, then one `Ended` or `Failed`. The text is plain `generate`'s from the
same seed, whoever else asks: random numbers are seeded where they are drawn. A job that is cancelled stops at the next
token, or does not begin. Heads that learn do so in the same thread while nobody waits: a request that comes meanwhile
waits for one step at most.
"""

import asyncio
import copy
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from ..decoding.record import speculations
from ..targets.private_api import response_parser
from .asked import Asked, Refused, Rules
from .live import TokenText

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ..network.modeling_heads import DraftHeads

logger = logging.get_logger(__name__)

LEAST_NEW_TOKENS = 1024  # for who asks for no number, where the target's own is lower
REASONING = ("reasoning_content", "thinking", "reasoning")  # what templates call it


@dataclass
class Served:
    """What speculation did in all requests that were answered to their end, and how many were not."""

    requests: int = 0
    new_tokens: int = 0
    target_forwards: int = 0
    accepted_tokens: int = 0
    cancelled: int = 0  # their clients had gone

    def as_dict(self) -> dict[str, float]:
        return {**asdict(self), "tokens_per_forward": self.new_tokens / max(self.target_forwards, 1)}


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # JSON


@dataclass(frozen=True)
class Ended:
    tokens: int
    is_full: bool  # so many as were asked for


@dataclass(frozen=True)
class Failed:
    """None: the client has gone."""

    error: Exception | None


class Cancelled(Exception):
    pass


class Job:
    """To be made in the server's loop."""

    def __init__(self, asked: Asked, tokens: list[int], config: "GenerationConfig") -> None:
        self.asked, self.tokens, self.config = asked, tokens, config
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self._cancelled, self._loop = threading.Event(), asyncio.get_running_loop()

    def say(self, *events: Any) -> None:
        """From the thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody listens
            for event in events:
                self._loop.call_soon_threadsafe(self.events.put_nowait, event)

    def cancel(self) -> None:
        self._cancelled.set()
        self.say(Failed(None))

    def check(self) -> None:
        if self._cancelled.is_set():
            raise Cancelled


class Line:
    def __init__(
        self,
        target: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        heads: "DraftHeads",
    ) -> None:
        self.target, self.tokenizer, self.heads = target, tokenizer, heads
        self.served = Served()
        self.jobs: set[Job] = set()  # that wait, and the one that is answered
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="answering")
        self._is_closed = False

    def put(self, job: Job) -> None:
        self.jobs.add(job)
        self._thread.submit(self._run, job)

    def close(self) -> None:
        self._is_closed = True
        for job in list(self.jobs):
            job.cancel()
        self._thread.shutdown()

    def config_for(self, asked: Asked, length: int, rules: Rules) -> "GenerationConfig":
        """The target's own, and what was asked of it. Raises `Refused`."""
        config = copy.deepcopy(self.target.generation_config)
        config.update(**{"max_new_tokens": max(config.max_new_tokens or 0, LEAST_NEW_TOKENS), **asked.settings})
        config.update(num_return_sequences=1, return_dict_in_generate=False)
        if rules.positions is not None:
            config.max_new_tokens = min(config.max_new_tokens, rules.positions - length)
        repeated = asked.settings.get("no_repeat_ngram_size")
        if repeated and repeated * rules.vocabulary <= length + config.max_new_tokens:
            raise Refused(
                f"`generation_config.no_repeat_ngram_size={repeated}` may leave no token in a text of "
                f"{length + config.max_new_tokens}: ask for fewer with `max_tokens`, or for longer repetitions.",
                "generation_config.no_repeat_ngram_size",
            )
        return config

    def _run(self, job: Job) -> None:
        try:
            job.check()
            ended: Ended | Failed = self._generate(job)
        except Cancelled:
            self.served.cancelled += 1
            ended = Failed(None)
        except Exception as error:
            logger.exception("a request failed")
            ended = Failed(error)
        self.jobs.discard(job)
        job.say(ended)
        self._learn()

    def _learn(self) -> None:
        learner = self.heads.learner
        try:
            while learner is not None and not self.jobs and not self._is_closed and learner.idle_step():
                pass
        except Exception:
            logger.exception("a step of learning failed")

    def _generate(self, job: Job) -> Ended:
        parts = (self.tokenizer, self.target, job.tokens, job.asked.tools)
        writer = Writer(job, response_parser(*parts) if job.asked.is_chat else None, self.tokenizer)
        prompt = torch.tensor([job.tokens], device=self.target.device)
        # A seed that a client chose is for its own text: the next one's random numbers must not follow from it.
        torch.seed() if job.asked.seed is None else torch.manual_seed(job.asked.seed)
        criteria = [StopTexts(self.tokenizer, job.asked.stops, len(job.tokens))] if job.asked.stops else []
        with speculations() as records:
            self.target.generate(  # type: ignore[operator]
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=job.config,
                tokenizer=self.tokenizer,
                assistant_model=self.heads,
                streamer=writer,
                stopping_criteria=StoppingCriteriaList(criteria),
            )
        for stats in records:
            self.served.requests += 1
            for name in ("new_tokens", "target_forwards", "accepted_tokens"):
                setattr(self.served, name, getattr(self.served, name) + getattr(stats, name))
        writer.finish()
        return Ended(len(writer.tokens), len(writer.tokens) >= job.config.max_new_tokens)


class StopTexts(StoppingCriteria):
    """Ends where the answer's text holds one of `stops`, as transformers' `StopStringCriteria` does, which first goes
    through the whole vocabulary: minutes for a large one and long texts."""

    _CONTEXT = 4  # tokens before those that are looked at, by which these begin with a space or not

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", stops: list[str], prompt_tokens: int) -> None:
        self.tokenizer, self.stops, self.prompt_tokens = tokenizer, stops, prompt_tokens
        self.most = max(len(stop.encode()) for stop in stops) + self._CONTEXT  # a token is a byte or more

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        begin = max(self.prompt_tokens, input_ids.shape[1] - self.most)
        rows = input_ids[:, max(0, begin - self._CONTEXT) :].tolist()
        ended = [self._holds_one(row, min(begin, self._CONTEXT)) for row in rows]
        return torch.tensor(ended, device=input_ids.device)

    def _holds_one(self, tokens: list[int], before: int) -> bool:
        text = self.tokenizer.decode(tokens)[len(self.tokenizer.decode(tokens[:before])) :]
        return any(stop in text for stop in self.stops)


class Writer:
    """A streamer: tokens in, what a client is told out, at once where it streams, or else at the end."""

    def __init__(self, job: Job, parser: Any, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.job, self.parser, self.tokenizer = job, parser, tokenizer
        self.tokens: list[int] = []
        self._has_prompt = False
        self._text = TokenText(tokenizer, skip_special_tokens=parser is None)
        if parser is not None:
            job.say(*_told(parser.initial_events))

    def put(self, value: torch.Tensor) -> None:
        self.job.check()
        if not self._has_prompt:
            self._has_prompt = True
            return
        for token in value.flatten().tolist():
            self.tokens.append(token)
            if self.job.asked.stream:
                self._say(self._text.push(token))

    def end(self) -> None:
        """Of generation; what is left to say is said by `finish`."""

    def finish(self) -> None:
        if self.job.asked.stream:
            self._say(self._text.flush())
        else:
            text = self.tokenizer.decode(self.tokens, skip_special_tokens=self.parser is None)
            self._say(text)  # type: ignore[arg-type]  # of one row
        if self.parser is not None:
            with suppress(ValueError, RuntimeError):  # the text ends in the middle of a call
                self.job.say(*_told(self.parser.finalize()[1]))

    def _say(self, text: str) -> None:
        if text and self.parser is None:
            self.job.say(Text(text))
        elif text:
            try:
                self.job.say(*_told(self.parser.feed(text)))
            except (ValueError, RuntimeError, KeyError, TypeError):  # a call that is none
                self.parser = None
                self.job.say(Text(text))


def _told(events: list[dict[str, Any]]) -> Iterator[Any]:
    """What a client is told of a parser's events."""
    for event in events:
        kind, name, text = event["type"], event.get("field"), event.get("text")
        if kind == "region_chunk" and text and not event.get("dirty"):
            if name in REASONING:
                yield Reasoning(text)
            elif name == "content":
                yield Text(text)
        elif kind == "region_close" and name == "tool_calls":
            function = event["value"]["function"]
            arguments = function["arguments"]
            yield ToolCall(function["name"], arguments if isinstance(arguments, str) else json.dumps(arguments))


__all__ = ["Job", "Line", "Served"]
