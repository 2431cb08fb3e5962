"""A target with its heads behind the application of transformers' own `transformers serve`.

Contract: `make_app` gives that application (OpenAI's interface, streaming) for one target that is loaded already, with
the heads as every request's assistant: clients get plain generate's tokens, sooner. What a request means, and that
requests are answered one after the other, is transformers' own. What is added here is what a server in the open needs:
a request that is malformed, too large, or longer than the target's positions is refused with a reason, and the routes
that would load, unload or replace models are not there. Needs the extra `serve`.
"""

import asyncio
import inspect
import json
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from transformers.utils.import_utils import is_serve_available

from ..decoding.entry import refuse_encoder_decoders, refuse_what_cannot_work
from ..decoding.private_api import serving_part
from ..decoding.record import speculations

if TYPE_CHECKING:
    from fastapi import FastAPI
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ..network.modeling_clover import CloverHeads

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/health", "/speculation")
NEEDED = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}
MOST_BYTES = 8 << 20  # of a request's body, far beyond any target's positions
NUMBER, INTEGER = (int, float), (int,)
FIELDS = {  # of a request -> what it may be
    **dict.fromkeys(("temperature", "top_p", "frequency_penalty"), (NUMBER, "a number")),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "seed"), (INTEGER, "an integer")),
    **dict.fromkeys(("model", "prompt"), ((str,), "a text")),
    "messages": ((list,), "a list"),
    "stop": ((str, list), "a text or a list of them"),
}


def serve(
    target: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    heads: "CloverHeads",
    name: str | None = None,
    host: str = "localhost",
    port: int = 8000,
) -> None:
    """`make_app`, served until Ctrl-C."""
    app = make_app(target, tokenizer, heads, name)
    import uvicorn

    uvicorn.run(app, host=host, port=port, timeout_graceful_shutdown=5)


def make_app(
    target: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", heads: "CloverHeads", name: str | None = None
) -> "FastAPI":
    """`name`: what clients ask for as `model`; without it, the target's own."""
    if not is_serve_available():
        raise ImportError(
            "Serving needs FastAPI, Uvicorn and openai, which are not all here: `pip install 'hf-clover[serve]'`."
        )
    from fastapi import HTTPException
    from fastapi.responses import JSONResponse

    build_server, served = serving_part("server", "build_server"), Served()
    manager, state = OneModel(name or target.name_or_path or "", target, tokenizer), WithHeads(heads, served)
    # Handlers differ between versions of transformers; of those that are not served there is none.
    handlers = {argument: None for argument in inspect.signature(build_server).parameters if "_handler" in argument}
    for argument, module, handler in (
        ("chat_handler", "chat_completion", "ChatCompletionHandler"),
        ("completion_handler", "completion", "CompletionHandler"),
        ("response_handler", "response", "ResponseHandler"),
    ):
        handlers[argument] = serving_part(module, handler)(manager, state)
    app = build_server(manager, generation_state=state, **handlers)

    @app.get("/speculation")
    def speculation() -> JSONResponse:
        return JSONResponse(served.as_dict())

    @app.exception_handler(ValueError)
    async def refused(_: Any, error: ValueError) -> JSONResponse:
        return JSONResponse(error_body(str(error)), status_code=400)

    @app.exception_handler(HTTPException)
    async def refused_by_transformers(_: Any, error: HTTPException) -> JSONResponse:
        return JSONResponse(error_body(str(error.detail)), status_code=error.status_code)

    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in ROUTES]
    app.add_middleware(RequestGuard)
    return app


@dataclass
class Served:
    """What speculation did in all requests that were answered to their end."""

    requests: int = 0
    new_tokens: int = 0
    target_forwards: int = 0
    accepted_tokens: int = 0

    def as_dict(self) -> dict[str, float]:
        return {**asdict(self), "tokens_per_forward": self.new_tokens / max(self.target_forwards, 1)}


class OneModel(serving_part("model_manager", "ModelManager")):  # type: ignore[misc]
    """The model that is there, for every request. No other is loaded, and this one stays."""

    def __init__(self, name: str, target: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> None:
        super().__init__()
        self.force_model = name  # requests for another are refused
        self._loaded, self._since = (target, tokenizer), int(time.time())

    def load_model_and_processor(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self._loaded

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        return [{"id": self.force_model, "object": "model", "owned_by": "", "created": self._since}]

    def shutdown(self) -> None:
        pass


class WithHeads(serving_part("utils", "GenerationState")):  # type: ignore[misc]
    def __init__(self, heads: "CloverHeads", served: Served) -> None:
        super().__init__()
        self._manager = HeadsManager(heads, served)

    def use_continuous_batching(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def get_manager(self, model_id: str, use_cb: bool = False) -> "HeadsManager":
        return self._manager


class HeadsManager(serving_part("utils", "GenerateManager")):  # type: ignore[misc]
    """transformers' own: one request after the other, in one thread; here with heads."""

    def __init__(self, heads: "CloverHeads", served: Served) -> None:
        super().__init__()
        self.heads, self.served = heads, served

    def generate_streaming(
        self, model: "PreTrainedModel", processor: Any, inputs: Any, gen_config: "GenerationConfig", **kwargs: Any
    ) -> tuple[asyncio.Queue, Any]:
        inputs = self._with_heads(model, inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, **kwargs)

    async def generate_non_streaming(
        self, model: "PreTrainedModel", processor: Any, inputs: Any, gen_config: "GenerationConfig", **kwargs: Any
    ) -> tuple[str, int, Any]:
        inputs = self._with_heads(model, inputs, gen_config)
        return await super().generate_non_streaming(model, processor, inputs, gen_config, **kwargs)

    def submit(self, fn: Callable, *args: Any, **kwargs: Any) -> Future:
        return super().submit(self._counted, fn, *args, **kwargs)

    def async_submit(self, fn: Callable, *args: Any, **kwargs: Any) -> asyncio.Future:
        return super().async_submit(self._counted, fn, *args, **kwargs)

    def _counted(self, fn: Callable, *args: Any, **kwargs: Any) -> Any:
        with speculations() as records:
            result = fn(*args, **kwargs)
        for stats in records:
            self.served.requests += 1
            for name in ("new_tokens", "target_forwards", "accepted_tokens"):
                setattr(self.served, name, getattr(self.served, name) + getattr(stats, name))
        return result

    def _with_heads(self, model: "PreTrainedModel", inputs: Any, config: "GenerationConfig") -> dict[str, Any]:
        """What `generate` gets, after everything that can be known now has been checked: a stream that has begun
        can no longer be refused."""
        refuse_encoder_decoders(model)
        refuse_what_cannot_work(config)
        most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        length = inputs["input_ids"].shape[-1]
        if length == 0:
            raise ValueError("the prompt is empty: it needs at least one token.")
        if config.max_new_tokens is not None and config.max_new_tokens < 1:
            raise ValueError(f"`max_tokens={config.max_new_tokens}` leaves nothing to say: it must be at least 1.")
        if most is not None:
            if length >= most:
                raise ValueError(f"the prompt has {length} tokens, and the model is made for {most}: shorten it.")
            config.max_new_tokens = min(config.max_new_tokens or most, most - length)
        return {**inputs, "assistant_model": self.heads}


# ---------------------------------------------------------------------- requests


class RequestGuard:
    """ASGI middleware: what comes through is a JSON object of bounded size whose fields are what they should be."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        body = b""
        while True:
            message = await receive()
            if message["type"] != "http.request":  # the client has gone
                return None
            body += message.get("body", b"")
            if len(body) > MOST_BYTES:
                return await _answer(send, 413, f"the request is larger than {MOST_BYTES >> 20} MiB.")
            if not message.get("more_body", False):
                break
        try:
            refuse_malformed(body, needed=NEEDED.get(scope["path"]))
        except ValueError as error:
            return await _answer(send, 400, str(error))
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> dict:
            return messages.pop() if messages else await receive()

        return await self.app(scope, replay, send)


def refuse_malformed(body: bytes, needed: str | None) -> None:
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the request is no JSON: {error}") from error
    if not isinstance(request, dict):
        raise ValueError(f"the request is a JSON {type(request).__name__}, and must be an object.")
    if needed is not None and request.get(needed) is None:
        raise ValueError(f"`{needed}` is missing.")
    for name, (kinds, described) in FIELDS.items():
        value = request.get(name)
        if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
            raise ValueError(f"`{name}` must be {described}, not {json.dumps(value)[:80]}.")
    messages = request.get("messages")
    for place, message in enumerate(messages or ()):
        parts = message.get("content") if isinstance(message, dict) else None
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"`messages[{place}]` must be an object with a `role`, not {json.dumps(message)[:80]}.")
        if isinstance(parts, list) and not all(isinstance(part, dict) and "type" in part for part in parts):
            raise ValueError(f"`messages[{place}].content` must be a text, or a list of objects with a `type`.")
        if parts is not None and not isinstance(parts, str | list):
            raise ValueError(f"`messages[{place}].content` must be a text, not {json.dumps(parts)[:80]}.")
    if messages is not None and not messages:
        raise ValueError("`messages` is empty: there is nothing to answer.")


def error_body(message: str) -> dict[str, Any]:
    """As OpenAI's interface has it."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


async def _answer(send: Callable, status: int, message: str) -> None:
    content = json.dumps(error_body(message)).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


__all__ = ["make_app", "serve"]
