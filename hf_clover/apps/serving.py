"""A target with its heads behind OpenAI's interface: a small FastAPI application over `generate`.

Contract: `make_app` makes the application for one loaded target. Every request is answered with the heads, one request
after the other, with the tokens of plain `generate`. The application is made for untrusted clients. A request is
rendered and tokenised in another process, so it cannot block others (`preparing`). Its fields have bounds, and a
refusal names them (`asked`). It is cancelled when its client disconnects. The queue has a limited length. If the
server has a key, clients must send it. This module needs the extra `serve`.
"""

import asyncio
import contextlib
import hmac
import importlib.util
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..decoding.entry import refuse_what_cannot_work
from ..network.modeling_heads import DraftHeads
from .answering import Ended, Failed, Job, Line
from .asked import MOST_BYTES, Refused, Rules
from .preparing import Preparer
from .wire import SHAPES, error_body

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

MOST_WAITING = 64  # most requests that wait, including the one that is being answered
SECONDS_TO_SEND = 60.0  # most seconds in which a request's body has to arrive
REQUEST_ID = re.compile(rb"[\w.-]{1,128}")


def serve(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    heads: DraftHeads,
    name: str | None = None,
    host: str = "localhost",
    port: int = 8000,
    api_key: str | None = None,
    allow_chat_templates: bool = False,
) -> None:
    """Serve the application of `make_app` until Ctrl-C."""
    app = make_app(target, tokenizer, heads, name, api_key, allow_chat_templates)
    import uvicorn

    uvicorn.run(app, host=host, port=port, timeout_graceful_shutdown=5)


def make_app(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    heads: DraftHeads,
    name: str | None = None,
    api_key: str | None = None,
    allow_chat_templates: bool = False,
) -> "FastAPI":
    """
    Args:
        name: The name that clients send as `model`; the target's own name by default.
        api_key: The key that every route except `/health` requires, as `Authorization: Bearer KEY`.
        allow_chat_templates: Whether a client may send its own chat template, which is a program that runs here.
    """
    for package in ("fastapi", "uvicorn"):
        if not has_package(package):
            raise ImportError(f"Serving needs {package}, which is not installed: `pip install 'hf-clover[serve]'`.")
    if api_key is not None and not re.fullmatch(r"[!-~]+", api_key):
        raise ValueError(
            "`api_key` must be one or more printable ASCII characters without spaces: `--api-key` or "
            "HF_CLOVER_API_KEY has others, or is empty."
        )
    refuse_what_cannot_work(target, target.generation_config)
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

    config = target.config.get_text_config(decoder=True)
    rules = Rules(
        name=name or target.name_or_path or "",
        positions=getattr(config, "max_position_embeddings", None),
        vocabulary=config.vocab_size,
        allow_chat_templates=allow_chat_templates,
    )
    office = Office(Line(target, tokenizer, heads), Preparer(tokenizer, rules), rules)

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        await asyncio.wrap_future(office.preparer.start())
        yield
        office.preparer.close()
        await asyncio.to_thread(office.line.close)

    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    started = int(time.time())
    for route in SHAPES:
        app.add_route(route, partial(office.answer, route=route), methods=["POST"])

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        model = {"id": rules.name, "object": "model", "created": started, "owned_by": ""}
        return JSONResponse({"object": "list", "data": [model]})

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    @app.get("/speculation")
    async def speculation() -> JSONResponse:
        return JSONResponse(office.counts())

    @app.exception_handler(Refused)
    async def refused(_: Any, error: Refused) -> JSONResponse:
        body = error_body(error.message, error.param, error.code, error.status)
        headers = {"retry-after": "5"} if error.status == 503 else None
        return JSONResponse(body, status_code=error.status, headers=headers)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path[:200]}: {error.detail}."
        return JSONResponse(error_body(message), status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def failed(_: Any, error: Exception) -> JSONResponse:
        return JSONResponse(_failure(error), status_code=500)

    app.add_middleware(Door, api_key=api_key)
    return app


def has_package(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _failure(error: Exception) -> dict[str, Any]:
    """The body of an answer with status 500. It leaves out the error's text, which only the log has."""
    message = f"the server failed at this request ({type(error).__name__}); its log says more."
    return error_body(message, status=500)


class Office:
    """Handles a request: reads it, has it prepared, queues it and answers it."""

    def __init__(self, line: Line, preparer: Preparer, rules: Rules) -> None:
        self.line, self.preparer, self.rules = line, preparer, rules
        self.being_prepared = self.left_early = 0

    @property
    def waiting(self) -> int:
        return self.being_prepared + len(self.line.jobs)

    def counts(self) -> dict[str, float]:
        counts = self.line.served.as_dict()
        if self.line.heads.learner is not None:
            counts["tokens_learned_from"] = self.line.heads.learner.tokens
        return {**counts, "cancelled": counts["cancelled"] + self.left_early, "waiting": self.waiting}

    async def answer(self, request: "Request", route: str) -> "Response":
        from fastapi.responses import JSONResponse, Response, StreamingResponse

        body = await read_body(request, self.rules.most_body)
        if self.waiting >= MOST_WAITING:
            raise Refused(
                f"{self.waiting} requests wait, and at most {MOST_WAITING} may wait: try again later.",
                status=503,
            )
        visit = Visit(request)
        job = await self._prepared(visit, route, body)
        if job is None:
            self.left_early += 1
            return Response(status_code=499)  # nobody reads it
        self.line.put(job)
        shape = SHAPES[route](self.rules.name, request.state.request_id, len(job.tokens), job.asked.suffix)
        if job.asked.stream:
            return StreamingResponse(lines_of(job, shape), media_type="text/event-stream")
        try:
            pieces = []
            while not isinstance(event := await job.events.get(), Ended | Failed):
                pieces.append(event)
        finally:
            job.cancel()  # for a server that is stopped; without effect on a job that has ended
        if isinstance(event, Ended):
            return JSONResponse(shape.whole(pieces, event))
        return Response(status_code=499) if event.error is None else JSONResponse(_failure(event.error), 500)

    async def _prepared(self, visit: "Visit", route: str, body: bytes) -> Job | None:
        """The job of a request; None if the client has disconnected meanwhile."""
        self.being_prepared += 1
        try:
            future = self.preparer.prepare(route, body)
            visit.on_leaving(future.cancel)
            asked, tokens = await asyncio.wrap_future(future)
            job = Job(asked, tokens, self.line.config_for(asked, len(tokens), self.rules))
        except asyncio.CancelledError:
            if visit.is_over:
                return None
            raise
        finally:
            self.being_prepared -= 1
        visit.on_leaving(job.cancel)
        return None if visit.is_over else job


class Visit:
    """Watches for a client's disconnection, after its body has been read."""

    _watched = set["asyncio.Task[None]"]()  # keeps the tasks alive: an event loop does not

    def __init__(self, request: "Request") -> None:
        self.is_over, self._then = False, lambda: None
        task = asyncio.create_task(self._watch(request))
        self._watched.add(task)
        task.add_done_callback(self._watched.discard)

    def on_leaving(self, then: Callable[[], Any]) -> None:
        self._then = then
        if self.is_over:
            then()

    async def _watch(self, request: "Request") -> None:
        """Wait for the disconnection, which also follows a complete answer."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.is_over = True
        self._then()


async def lines_of(job: Job, shape: Any) -> AsyncIterator[str]:
    try:
        for line in shape.opening():
            yield line
        while not isinstance(event := await job.events.get(), Ended | Failed):
            for line in shape.piece(event):
                yield line
        if isinstance(event, Ended):
            for line in shape.closing(event):
                yield line
        elif event.error is not None:
            for line in shape.failure(_failure(event.error)):
                yield line
    finally:
        job.cancel()


async def read_body(request: "Request", most: int) -> bytes:
    """The body of a request. Raises `Refused` if it is too large, too slow, or not JSON by its content type. A browser
    lets a web page send that type to another server only if the server agrees."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(f"the header `content-type` is {kind[:80]!r}, and must be 'application/json'.", "content-type")
    try:
        body = await asyncio.wait_for(_read(request, most), SECONDS_TO_SEND)
    except TimeoutError:
        raise Refused(f"the request did not arrive in {SECONDS_TO_SEND:g} s: send it faster.", status=408) from None
    if body is None:
        raise Refused(f"the request is larger than {most} bytes, which is the limit here: shorten it.", status=413)
    return body


async def _read(request: "Request", most: int) -> bytes | None:
    """The body; None if it is too large. The rest of a large body is read and dropped, because most clients read the
    answer only after they have sent everything."""
    body, size, is_more = bytearray(), 0, True
    while is_more and size <= 8 * MOST_BYTES:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise Refused("the client has gone.", status=499)
        size += len(message.get("body", b""))
        is_more = message.get("more_body", False)
        if size <= most:
            body += message.get("body", b"")
        else:
            body.clear()
    return bytes(body) if size <= most else None


class Door:
    """ASGI middleware: refuses requests without the key, and adds the request's id to every answer."""

    def __init__(self, app: Callable[..., Awaitable[None]], api_key: str | None) -> None:
        self.app, self.key = app, None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if REQUEST_ID.fullmatch(given) else str(uuid.uuid4()).encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        async def named(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        if self.key is None or scope["path"] == "/health":
            return await self.app(scope, receive, named)
        # A comparison in constant time, so that the time does not tell where the two differ.
        if hmac.compare_digest(headers.get(b"authorization", b""), self.key):
            return await self.app(scope, receive, named)
        from fastapi.responses import JSONResponse

        message = "the header `authorization` must be 'Bearer KEY' with this server's key: ask its operator."
        body = error_body(message, "authorization", "invalid_api_key")
        answer = JSONResponse(body, 401, headers={"www-authenticate": "Bearer"})
        return await answer(scope, receive, named)


__all__ = ["make_app", "serve"]
