"""A separate process turns requests into tokens, and is killed if it takes too long.

Contract: the future of `Preparer.prepare` returns a request's settings and its prompt's tokens, or raises `Refused`.
All work that a client can make large or slow runs in that process: parsing JSON, rendering the chat template,
tokenising. So a request costs at most `SECONDS` of one core and `MOST_MEMORY` bytes, one request at a time, and the
server answers other requests meanwhile.
"""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import IO, BinaryIO, cast

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .asked import TEXT_FIELD, Asked, Refused, Rules, refuse_long, understand

SECONDS = 10.0  # most seconds for one request
SECONDS_TO_START = 120.0  # most seconds until the process is ready
MOST_MEMORY = 1 << 30  # most bytes beyond those that the process uses after its start
_START = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from hf_clover.apps.preparing import work
work()
"""


class Preparer:
    """The server's side of the process, which gets a copy of `tokenizer` and `rules` as they are now."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rules: Rules) -> None:
        self._kit = pickle.dumps(sys.path) + pickle.dumps((tokenizer, rules))
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="preparing")

    def start(self) -> Future:
        return self._thread.submit(self._started)

    def prepare(self, route: str, body: bytes) -> Future:
        """The future of an `Asked` and its tokens. Requests are prepared one after the other."""
        return self._thread.submit(self._prepare, route, body)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            words = [sys.executable, "-c", _START]
            environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=-1
            )
            if self._exchange(self._process, self._kit, SECONDS_TO_START) != b"ready\n":
                self._process = None
                raise RuntimeError("the process that tokenises does not start: its error is printed above.")
        return self._process

    def _prepare(self, route: str, body: bytes) -> tuple[Asked, list[int]]:
        process = self._started()
        head = json.dumps({"route": route, "bytes": len(body)}).encode() + b"\n"
        answer = self._exchange(process, head + body, SECONDS)
        if not answer.endswith(b"\n"):
            self._process = None
            raise Refused(
                f"`{TEXT_FIELD[route]}`: rendering and tokenising the request takes more than {SECONDS:g} s, or more "
                "memory than there is: shorten it.",
                TEXT_FIELD[route],
            )
        said = json.loads(answer)
        if "refused" in said:
            raise Refused(**said["refused"])
        return Asked(**said["asked"]), said["tokens"]

    def _exchange(self, process: "subprocess.Popen[bytes]", sent: bytes, seconds: float) -> bytes:
        """The line that the process answers. A text without a line break means that it has ended or was killed."""
        asks, answers = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)  # both are pipes
        timer = threading.Timer(seconds, process.kill)
        timer.daemon = True
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                asks.write(sent)
                asks.flush()
            answer = answers.readline()
        finally:
            timer.cancel()
        if not answer.endswith(b"\n"):
            process.kill()
            process.wait()
            answers.close()
            with contextlib.suppress(BrokenPipeError):
                asks.close()
        return answer


# ---------------------------------------------------------------------- in the process


def work() -> None:
    """The main loop of the process, until the server closes its end of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C
    asks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # other prints go to stderr
    logging.set_verbosity_error()
    tokenizer, rules = pickle.load(asks)
    limit_memory()
    _say(answers, b"ready")
    while head := asks.readline():
        request = json.loads(head)
        _say(answers, answer(tokenizer, rules, request["route"], asks.read(request["bytes"])))


def _say(answers: BinaryIO, line: bytes) -> None:
    answers.write(line + b"\n")
    answers.flush()


def answer(tokenizer: PreTrainedTokenizerBase, rules: Rules, route: str, body: bytes) -> bytes:
    try:
        asked = understand(body, route, rules)
        tokens = tokens_of(tokenizer, rules, asked, TEXT_FIELD[route])
        asked.text = asked.messages = None
        asked.template = {}
        return json.dumps({"asked": asdict(asked), "tokens": tokens}).encode()
    except Refused as error:
        refusal = vars(error)
    except Exception as error:  # the checks did not foresee such data
        reason = f"`{TEXT_FIELD[route]}` cannot be rendered and tokenised ({type(error).__name__}: {str(error)[:200]})"
        refusal = {"message": f"{reason}: change it.", "param": TEXT_FIELD[route]}
    return json.dumps({"refused": refusal}).encode()


def tokens_of(tokenizer: PreTrainedTokenizerBase, rules: Rules, asked: Asked, name: str) -> list[int]:
    text = _rendered(tokenizer, asked, name) if asked.is_chat else asked.text or ""
    refuse_long(text, name, rules)
    tokens = tokenizer(text, add_special_tokens=not asked.is_chat)["input_ids"]
    if not tokens:
        raise Refused(f"`{name}`: the prompt is empty: it needs at least one token.", name)
    if rules.positions is not None and len(tokens) >= rules.positions:
        raise Refused(
            f"`{name}`: the prompt has {len(tokens)} tokens, and the model is made for {rules.positions}: shorten it.",
            name,
            code="context_length_exceeded",
        )
    return tokens


def _rendered(tokenizer: PreTrainedTokenizerBase, asked: Asked, name: str) -> str:
    if tokenizer.chat_template is None and "chat_template" not in asked.template:
        raise Refused(f"`{name}`: the model has no chat template: send a `prompt` to /v1/completions.", name)
    try:
        return tokenizer.apply_chat_template(  # type: ignore[return-value]  # without `tokenize` a text
            asked.messages or [],
            tools=asked.tools,  # type: ignore[arg-type]
            add_generation_prompt=True,
            tokenize=False,
            **asked.template,
        )
    except Exception as error:
        raise Refused(
            f"`{name}`: the chat template cannot render them ({type(error).__name__}: {str(error)[:200]}): change "
            "roles, contents, `tools` or `chat_template_kwargs`.",
            name,
        ) from error


def limit_memory() -> None:
    """Limit the memory of this process, on Linux; other systems limit only the time."""
    try:
        import resource

        with open("/proc/self/statm") as sizes:
            used = int(sizes.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MOST_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    except (ImportError, OSError, ValueError):
        pass


__all__ = ["Preparer"]
