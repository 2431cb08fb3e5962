"""Answers in the formats of OpenAI's three interfaces, whole or as a stream of events.

Contract: a shape turns the events of a `Job` (`Text`, `Reasoning`, `ToolCall`, `Ended`) into JSON. `whole` returns a
complete answer; `opening`, `piece` and `closing` return the lines of a stream. This module knows no server.
"""

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

from .answering import Ended, Reasoning, Text, ToolCall
from .asked import CHAT, COMPLETIONS, RESPONSES

DONE = "data: [DONE]\n\n"


def error_body(message: str, param: str | None = None, code: str | None = None, status: int = 400) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _line(event: dict[str, Any]) -> str:
    return f"data: {json.dumps(event)}\n\n"


class _Shape:
    def __init__(self, name: str, request: str, prompt_tokens: int, suffix: str | None) -> None:
        self.name, self.request, self.prompt_tokens, self.suffix = name, request, prompt_tokens, suffix
        self.created, self.calls = int(time.time()), 0

    def opening(self) -> Iterator[str]:
        yield from ()

    def failure(self, error: dict[str, Any]) -> Iterator[str]:
        yield _line(error)

    def _usage(self, tokens: int) -> dict[str, int]:
        total = self.prompt_tokens + tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": tokens, "total_tokens": total}

    def _next_call(self) -> str:
        self.calls += 1
        return f"{self.request}_tool_call_{self.calls - 1}"

    def _finish_reason(self, ended: Ended) -> str:
        return "tool_calls" if self.calls else "length" if ended.is_full else "stop"


def _joined(pieces: Iterable[Any], kind: type[Text] | type[Reasoning]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, kind))


class Chat(_Shape):
    def whole(self, pieces: list[Any], ended: Ended) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": _joined(pieces, Text)}
        if reasoning := _joined(pieces, Reasoning):
            message["reasoning_content"] = reasoning
        if calls := [self._call(piece) for piece in pieces if isinstance(piece, ToolCall)]:
            message["tool_calls"] = calls
        choice = {"index": 0, "message": message, "finish_reason": self._finish_reason(ended)}
        head = {"id": self.request, "object": "chat.completion", "created": self.created, "model": self.name}
        return {**head, "choices": [choice], "usage": self._usage(ended.tokens)}

    def opening(self) -> Iterator[str]:
        yield self._chunk({"role": "assistant", "content": ""})

    def piece(self, piece: Any) -> Iterator[str]:
        if isinstance(piece, ToolCall):
            place = self.calls
            yield self._chunk({"tool_calls": [{"index": place, **self._call(piece)}]})
        else:
            yield self._chunk({"content" if isinstance(piece, Text) else "reasoning_content": piece.text})

    def closing(self, ended: Ended) -> Iterator[str]:
        yield self._chunk({}, self._finish_reason(ended), usage=self._usage(ended.tokens))
        yield DONE

    def _call(self, piece: ToolCall) -> dict[str, Any]:
        function = {"name": piece.name, "arguments": piece.arguments}
        return {"id": self._next_call(), "type": "function", "function": function}

    def _chunk(self, delta: dict[str, Any], reason: str | None = None, **more: Any) -> str:
        head = {"id": self.request, "object": "chat.completion.chunk", "created": self.created, "model": self.name}
        return _line({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}], **more})


class Completion(_Shape):
    def whole(self, pieces: list[Any], ended: Ended) -> dict[str, Any]:
        text = _joined(pieces, Text) + (self.suffix or "")
        return self._body(text, self._finish_reason(ended), usage=self._usage(ended.tokens))

    def piece(self, piece: Any) -> Iterator[str]:
        yield _line(self._body(piece.text, None))

    def closing(self, ended: Ended) -> Iterator[str]:
        if self.suffix:
            yield _line(self._body(self.suffix, None))
        yield _line(self._body("", self._finish_reason(ended), usage=self._usage(ended.tokens)))
        yield DONE

    def _body(self, text: str, reason: str | None, **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        head = {"id": self.request, "object": "text_completion", "created": self.created, "model": self.name}
        return {**head, "choices": [choice], **more}


class Response(_Shape):
    """The format of the Responses interface. Its items are opened, filled and closed one after the other: reasoning,
    the message, tool calls."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.id, self.items, self.written = f"resp_{self.request}", list[dict[str, Any]](), 0
        self.open: type | None = None  # the kind of pieces that the last item is filled with

    def whole(self, pieces: list[Any], ended: Ended) -> dict[str, Any]:
        for piece in pieces:
            for _ in self.piece(piece):
                pass
        for _ in self._close():
            pass
        return self._body("completed", self.items or [self._item(Text, "", "completed")], ended)

    def opening(self) -> Iterator[str]:
        yield self._event("response.created", response=self._body("queued", []))
        yield self._event("response.in_progress", response=self._body("in_progress", []))

    def piece(self, piece: Any) -> Iterator[str]:
        if isinstance(piece, ToolCall):
            yield from self._close()
            yield from self._tool_call(piece)
            return
        if self.open is not type(piece):
            yield from self._close()
            yield from self._opened(type(piece))
        self._part()["text"] += piece.text
        kind = "output_text" if self.open is Text else "reasoning_text"
        more: dict[str, Any] = {"logprobs": []} if self.open is Text else {}
        yield self._event(f"response.{kind}.delta", **self._place(), delta=piece.text, **more)

    def closing(self, ended: Ended) -> Iterator[str]:
        if not self.items:
            yield from self._opened(Text)
        yield from self._close()
        yield self._event("response.completed", response=self._body("completed", self.items, ended))

    def failure(self, error: dict[str, Any]) -> Iterator[str]:
        message = error["error"]["message"]
        yield self._event("error", message=message, code="server_error", param=None)
        failed = {**self._body("failed", []), "error": {"code": "server_error", "message": message}}
        yield self._event("response.failed", response=failed)

    def _opened(self, kind: type) -> Iterator[str]:
        self.open = kind
        self.items.append(self._item(kind, "", "in_progress"))
        item, place = self.items[-1], len(self.items) - 1
        added = {**item, "content": []}
        yield self._event("response.output_item.added", output_index=place, item=added)
        if kind is Text:
            yield self._event("response.content_part.added", **self._place(), part=self._part())

    def _close(self) -> Iterator[str]:
        if self.open is None:
            return
        kind = "output_text" if self.open is Text else "reasoning_text"
        more: dict[str, Any] = {"logprobs": []} if self.open is Text else {}
        yield self._event(f"response.{kind}.done", **self._place(), text=self._part()["text"], **more)
        if self.open is Text:
            yield self._event("response.content_part.done", **self._place(), part=self._part())
        self.items[-1]["status"], self.open = "completed", None
        yield self._event("response.output_item.done", output_index=len(self.items) - 1, item=self.items[-1])

    def _tool_call(self, piece: ToolCall) -> Iterator[str]:
        name = self._next_call()
        item = {"id": name, "call_id": name, "type": "function_call", "status": "completed"}
        self.items.append({**item, "name": piece.name, "arguments": piece.arguments})
        place = {"output_index": len(self.items) - 1}
        yield self._event("response.output_item.added", **place, item=self.items[-1])
        done = {"item_id": name, "name": piece.name, "arguments": piece.arguments}
        yield self._event("response.function_call_arguments.done", **place, **done)
        yield self._event("response.output_item.done", **place, item=self.items[-1])

    def _item(self, kind: type, text: str, status: str) -> dict[str, Any]:
        place = len(self.items)
        if kind is Text:
            part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
            head: dict[str, Any] = {"id": f"msg_{self.request}_{place}", "type": "message", "role": "assistant"}
        else:
            part = {"type": "reasoning_text", "text": text}
            head = {"id": f"rs_{self.request}_{place}", "type": "reasoning", "summary": []}
        return {**head, "status": status, "content": [part]}

    def _part(self) -> dict[str, Any]:
        return self.items[-1]["content"][0]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, "content_index": 0}

    def _event(self, kind: str, **more: Any) -> str:
        line = _line({"type": kind, "sequence_number": self.written, **more})
        self.written += 1
        return f"event: {kind}\n{line}"

    def _body(self, status: str, items: list[dict[str, Any]], ended: Ended | None = None) -> dict[str, Any]:
        head = {"id": self.id, "object": "response", "created_at": self.created, "status": status, "model": self.name}
        body = {**head, "output": items, "tools": [], "tool_choice": "auto", "parallel_tool_calls": False}
        if ended is not None:
            body["usage"] = {
                "input_tokens": self.prompt_tokens,
                "output_tokens": ended.tokens,
                "total_tokens": self.prompt_tokens + ended.tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": 0},
            }
        return body


SHAPES = {CHAT: Chat, COMPLETIONS: Completion, RESPONSES: Response}
