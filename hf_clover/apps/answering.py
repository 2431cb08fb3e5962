"""One thread that generates with heads, one request after the other, and reports to the server.

Contract: a `Job` is a prompt, settings and a seed; `Line.put` puts it into the queue. The server's event loop reads
the answer from `job.events`: pieces, then one `Ended` or `Failed`. The text is that of plain `generate` with the same
seed, whatever other clients send: the seed is set right before the job generates. A cancelled job stops at the next
token, or does not begin. Heads with a learner learn in the same thread while no job waits; a new request then waits
for at most one step.
"""

import asyncio
import copy
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.utils import logging

from ..decoding.record import speculations
from ..network.modeling_heads import DraftHeads
from ..targets.private_api import response_parser
from .asked import Asked, Refused, Rules
from .live import TokenText

logger = logging.get_logger(__name__)

LEAST_NEW_TOKENS = 1024  # `max_new_tokens` of a request without a number, if the target's own default is lower
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of reasoning in chat templates


@dataclass
class Served:
    """Counts of speculation over all requests that were answered completely, and the number of cancelled ones."""

    requests: int = 0
    new_tokens: int = 0
    target_forwards: int = 0
    accepted_tokens: int = 0
    cancelled: int = 0  # requests whose client disconnected

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
    is_full: bool  # whether the answer has the largest number of tokens that was asked for


@dataclass(frozen=True)
class Failed:
    """A job that ended without an answer."""

    error: Exception | None  # None: the job was cancelled


class Cancelled(Exception):
    pass


class Job:
    """One request in the queue. It has to be made within the server's event loop."""

    def __init__(self, asked: Asked, tokens: list[int], config: GenerationConfig) -> None:
        self.asked, self.tokens, self.config = asked, tokens, config
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self._cancelled, self._loop = threading.Event(), asyncio.get_running_loop()

    def say(self, *events: Any) -> None:
        """Send events to the server's loop, from the generating thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody reads events
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
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        heads: DraftHeads,
    ) -> None:
        self.target, self.tokenizer, self.heads = target, tokenizer, heads
        self.served = Served()
        self.jobs: set[Job] = set()  # jobs that wait, and the one that is being answered
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

    def config_for(self, asked: Asked, length: int, rules: Rules) -> GenerationConfig:
        """The target's own generation config with the request's settings. Raises `Refused`."""
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
        # A client's seed applies to its own text only: it must not determine the next client's random numbers.
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
    """Ends an answer when its text holds one of `stops`, like transformers' `StopStringCriteria`. That one first reads
    the whole vocabulary, which takes minutes for a large vocabulary and long stop texts."""

    _CONTEXT = 4  # tokens before the decoded ones, which decide whether these begin with a space

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: list[str], prompt_tokens: int) -> None:
        self.tokenizer, self.stops, self.prompt_tokens = tokenizer, stops, prompt_tokens
        self.most = max(len(stop.encode()) for stop in stops) + self._CONTEXT  # a token has at least one byte

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        begin = max(self.prompt_tokens, input_ids.shape[1] - self.most)
        rows = input_ids[:, max(0, begin - self._CONTEXT) :].tolist()
        ended = [self._holds_one(row, min(begin, self._CONTEXT)) for row in rows]
        return torch.tensor(ended, device=input_ids.device)

    def _holds_one(self, tokens: list[int], before: int) -> bool:
        text = self.tokenizer.decode(tokens)[len(self.tokenizer.decode(tokens[:before])) :]
        return any(stop in text for stop in self.stops)


class Writer:
    """A streamer that turns tokens into events for the client: at once if the request streams, else at the end."""

    def __init__(self, job: Job, parser: Any, tokenizer: PreTrainedTokenizerBase) -> None:
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
        """Called at the end of generation. It does nothing: `finish` sends the rest."""

    def finish(self) -> None:
        if self.job.asked.stream:
            self._say(self._text.flush())
        else:
            text = self.tokenizer.decode(self.tokens, skip_special_tokens=self.parser is None)
            self._say(text)  # type: ignore[arg-type]  # one row is a text
        if self.parser is not None:
            with suppress(ValueError, RuntimeError):  # the text ends in the middle of a tool call
                self.job.say(*_told(self.parser.finalize()[1]))

    def _say(self, text: str) -> None:
        if text and self.parser is None:
            self.job.say(Text(text))
        elif text:
            try:
                self.job.say(*_told(self.parser.feed(text)))
            except (ValueError, RuntimeError, KeyError, TypeError):  # it looks like a tool call, but is none
                self.parser = None
                self.job.say(Text(text))


def _told(events: list[dict[str, Any]]) -> Iterator[Any]:
    """The events for the client, made from a parser's events."""
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
