"""Reads requests to the server: turns bytes into an `Asked`, or refuses them.

Contract: `understand` accepts the fields of OpenAI's three interfaces that `generate` can honour. It refuses every
other field by name, with a way out; no field that would change the answer is ignored silently. Every field has bounds,
so that the result can be generated. This module knows no model and no server, and needs only Python.
"""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TEXT_FIELD = {CHAT: "messages", COMPLETIONS: "prompt", RESPONSES: "input"}
MOST_BYTES = 8 << 20  # most bytes of a body, however many positions the target has
BYTES_PER_TOKEN = 16  # upper bound of the average over a prompt; every language is far below it
MOST_STOPS, MOST_STOP_LETTERS = 16, 128
MOST_BIASES = 1024
TEXT_PARTS = ("text", "input_text", "output_text")


class Refused(ValueError):
    """A request that is not answered, and the field that caused it. The length of its text is bounded."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param = _sayable(message, 1000), None if param is None else _sayable(param, 120)
        self.status, self.code = status, code


def _sayable(text: str, most: int) -> str:
    return text[:most].encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True)
class Rules:
    """Facts about the target, and what the server's operator allows."""

    name: str
    positions: int | None  # None: any number
    vocabulary: int
    allow_chat_templates: bool = False

    @property
    def most_text(self) -> int | None:
        """Most bytes of a prompt: a longer one cannot fit."""
        return None if self.positions is None else self.positions * BYTES_PER_TOKEN

    @property
    def most_body(self) -> int:
        """Most bytes of a request: the letters of the longest prompt, each one escaped, and some room."""
        return MOST_BYTES if self.most_text is None else min(MOST_BYTES, 8 * self.most_text + (64 << 10))


@dataclass
class Asked:
    text: str | None = None  # the prompt, if there are no messages
    messages: list[dict[str, Any]] | None = None
    template: dict[str, Any] = field(default_factory=dict)  # variables of the chat template, and maybe a template
    tools: list[dict[str, Any]] | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # for `GenerationConfig`
    stops: list[str] = field(default_factory=list)  # texts after which an answer ends
    seed: int | None = None
    stream: bool = False
    is_chat: bool = False  # True: answers may hold reasoning and tool calls
    suffix: str | None = None


def understand(body: bytes, route: str, rules: Rules) -> Asked:
    """The request in `body`. Raises `Refused`."""
    request = {name: value for name, value in _parse(body).items() if value is not None}
    if request.get("model", rules.name) != rules.name:
        raise Refused(
            f"`model={_shown(request['model'])}`: this server is pinned to '{rules.name}'. Ask for that, or leave "
            "`model` out.",
            "model",
            code="model_not_found",
        )
    needed = TEXT_FIELD[route]
    if needed not in request:
        raise Refused(f"`{needed}` is missing.", needed)
    for name, value in request.items():
        check = FIELDS[route].get(name)
        if check is None:
            raise Refused(f"`{name[:80]}` is not a field that {route} takes here: leave it out.", name)
        check(name, value)
    asked = Asked(seed=request.get("seed"), stream=request.get("stream", False), suffix=request.get("suffix"))
    asked.settings = _settings_of(request, rules)
    stops = request.get("stop", asked.settings.pop("stop_strings", None)) or []
    asked.stops = [stops] if isinstance(stops, str) else stops
    if route == COMPLETIONS:
        asked.text = request["prompt"]
        refuse_long(asked.text, "prompt", rules)
        return asked
    asked.is_chat = True
    asked.messages = _messages_of(request) if route == CHAT else _messages_of_input(request)
    if request.get("tool_choice") != "none":
        asked.tools = _tools_of(request.get("tools"))
    asked.template = _template_of(request.get("chat_template_kwargs", {}), rules)
    return asked


def refuse_long(text: str, name: str, rules: Rules) -> None:
    """Refuse a prompt that is too long, before it is tokenised: that takes time and memory."""
    size = len(text.encode())
    if rules.most_text is not None and size > rules.most_text:
        raise Refused(
            f"`{name}`: the prompt has {size} bytes, and the model is made for {rules.positions} tokens, which are "
            f"at most {rules.most_text} bytes, {BYTES_PER_TOKEN} a token: shorten it.",
            name,
            code="context_length_exceeded",
        )


def _parse(body: bytes) -> dict[str, Any]:
    try:
        request = json.loads(body.decode(), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:  # ValueError also for too many digits
        raise Refused(f"the request is no JSON: {error}") from error
    if not isinstance(request, dict):
        raise Refused(f"the request is a JSON {type(request).__name__}, and must be an object.")
    if b"\\ud" in body.lower():  # the only way to write half a character
        _refuse_surrogates(request)
    return request


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is not a number in JSON")


def _refuse_surrogates(request: dict[str, Any]) -> None:
    left: list[tuple[str, Any]] = [("", request)]
    while left:
        path, value = left.pop()
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                half = value[error.start].encode("ascii", "backslashreplace").decode()
                raise Refused(f"`{path}` holds half a character ({half}): send both halves, or none.", path) from error
        elif isinstance(value, dict):
            left += [(path or "the request", name) for name in value]
            left += [(f"{path}.{name}" if path else name, inner) for name, inner in value.items()]
        elif isinstance(value, list):
            left += [(f"{path}[{place}]", inner) for place, inner in enumerate(value)]


def _shown(value: Any) -> str:
    """The value as the client wrote it, shortened."""
    if isinstance(value, list | dict) and len(value) > 20:
        return f"a {'list' if isinstance(value, list) else 'object'} of {len(value)}"
    text = json.dumps(value if not isinstance(value, str) else value[:81])
    return text if len(text) <= 80 else f"{text[:80]}..."


# ---------------------------------------------------------------------- one field

Check = Callable[[str, Any], None]


def _wrong(name: str, described: str, value: Any) -> Refused:
    return Refused(f"`{name}` must be {described}, not {_shown(value)}.", name)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is(kind: type | tuple[type, ...], described: str) -> Check:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise _wrong(name, described, value)

    return check


def _number(low: float, high: float, or_zero: bool = False) -> Check:
    described = f"a number from {low:g} to {high:g}" + (", or 0" if or_zero else "")

    def check(name: str, value: Any) -> None:
        if not (_is_integer(value) or isinstance(value, float)):
            raise _wrong(name, described, value)
        if not (low <= value <= high or (or_zero and value == 0)):
            raise _wrong(name, described, value if math.isfinite(value) else str(value))

    return check


def _integer(low: int, high: int) -> Check:
    def check(name: str, value: Any) -> None:
        if not _is_integer(value):
            raise _wrong(name, "an integer", value)
        if value < low:
            raise Refused(f"`{name}={_shown(value)}` is too small: it must be at least {low}.", name)
        if value > high:
            raise Refused(f"`{name}={_shown(value)}` is too large: it must be at most {high}.", name)

    return check


def _only(accepted: tuple[Any, ...], reason: str) -> Check:
    """A field for something that this server does not have. Values that ask for none of it are accepted."""

    def check(name: str, value: Any) -> None:
        if not any(value == one and type(value) is type(one) for one in accepted):
            raise Refused(f"`{name}={_shown(value)}` is not supported: {reason}.", name)

    return check


def _anything(name: str, value: Any) -> None:
    """A field that describes the request and does not change the answer."""


def _stop(name: str, value: Any) -> None:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _wrong(name, "a text or a list of them", value)
    if len(stops) > MOST_STOPS or not all(0 < len(stop) <= MOST_STOP_LETTERS for stop in stops):
        described = f"at most {MOST_STOPS} texts of 1 to {MOST_STOP_LETTERS} letters"
        raise _wrong(name, described, value)


def _text_format(name: str, value: Any) -> None:
    """`response_format`, or `text` of the Responses interface."""
    inner = value.get("format", value) if isinstance(value, dict) else None
    if not isinstance(inner, dict) or inner.get("type", "text") != "text":
        raise Refused(f"`{name}={_shown(value)}` is not supported: answers are text as the model writes it.", name)


_TEXT, _BOOLEAN, _OBJECT, _LIST = (
    _is(str, "a text"),
    _is(bool, "true or false"),
    _is(dict, "an object"),
    _is(list, "a list"),
)
_MORE_TOKENS = _integer(1, 2**31 - 1)
_COMMON: dict[str, Check] = {
    "model": _TEXT,
    "stream": _BOOLEAN,
    "stream_options": _OBJECT,  # usage comes with every stream
    "temperature": _number(0.01, 100, or_zero=True),
    "top_p": _number(0, 1),
    "seed": _integer(-(2**63), 2**63 - 1),
    "generation_config": _anything,  # checked where it is read
    **dict.fromkeys(("user", "metadata", "service_tier", "store", "safety_identifier", "prompt_cache_key"), _anything),
}
_ONE = _only((1, 1.0), "a request gets one text (at most 1); send it several times, each with its own `seed`")
_NO_LOGPROBS = _only((False,), "answers are text without probabilities")
_OF_CHATS: dict[str, Check] = {
    "tools": _LIST,
    "tool_choice": _only(("auto", "none"), "the model chooses its tools; `auto` and `none` are taken"),
    "parallel_tool_calls": _BOOLEAN,
    "chat_template_kwargs": _OBJECT,
    "top_logprobs": _only((0,), "answers are text without probabilities"),
}
_OLDER: dict[str, Check] = {
    "max_tokens": _MORE_TOKENS,
    "stop": _stop,
    "frequency_penalty": _number(-0.9, 2),
    "presence_penalty": _only((0, 0.0), "`frequency_penalty` is supported"),
    "logit_bias": _OBJECT,
    "n": _ONE,
    "logprobs": _NO_LOGPROBS,
}
FIELDS: dict[str, dict[str, Check]] = {
    CHAT: {
        **_COMMON,
        **_OLDER,
        **_OF_CHATS,
        "messages": _LIST,
        "max_completion_tokens": _MORE_TOKENS,
        "response_format": _text_format,
        "modalities": _only((["text"],), "answers are text"),
        **dict.fromkeys(("reasoning_effort", "verbosity", "prediction"), _anything),
    },
    COMPLETIONS: {
        **_COMMON,
        **_OLDER,
        "prompt": _TEXT,
        "suffix": _TEXT,
        "best_of": _ONE,
        "echo": _only((False,), "answers come without their prompt"),
    },
    RESPONSES: {
        **_COMMON,
        **_OF_CHATS,
        "input": _is((str, list), "a text or a list"),
        "instructions": _TEXT,
        "max_output_tokens": _MORE_TOKENS,
        "text": _text_format,
        "background": _only((False,), "answers are given at once"),
        "include": _only(([],), "there is nothing to include"),
        "truncation": _only(("disabled",), "a prompt that is too long is refused"),
        **dict.fromkeys(("reasoning", "max_tool_calls"), _anything),
    },
}


# ---------------------------------------------------------------------- settings of generate


def _settings_of(request: dict[str, Any], rules: Rules) -> dict[str, Any]:
    settings = _generation_config(request.get("generation_config"), rules)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):  # the later name wins
        if name in request:
            settings["max_new_tokens"] = request[name]
    for name in ("temperature", "top_p"):
        if name in request:
            settings |= {name: float(request[name]), "do_sample": True}
    if request.get("temperature") == 0:
        settings |= {"do_sample": False}
    if settings.get("temperature") == 0:
        del settings["temperature"]
    if "frequency_penalty" in request:
        settings["repetition_penalty"] = 1.0 + request["frequency_penalty"]
    if request.get("logit_bias"):
        settings["sequence_bias"] = _biases(request["logit_bias"], rules)
    return settings


def _biases(biases: dict[str, Any], rules: Rules) -> list[Any]:
    if len(biases) > MOST_BIASES:
        raise _wrong("logit_bias", f"an object of at most {MOST_BIASES} tokens", biases)
    for token, bias in biases.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10 and int(token) < rules.vocabulary):
            raise Refused(f"`logit_bias`: {_shown(token)} is no token from 0 to {rules.vocabulary - 1}.", "logit_bias")
        _number(-1000, 1000)(f"logit_bias.{token}", bias)
    return [[[int(token)], float(bias)] for token, bias in biases.items()]


_FORBIDDING = ("eos_token_id", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids")
SETTINGS: dict[str, Check] = {  # the fields of `generation_config` that clients may set
    **dict.fromkeys(("do_sample", "renormalize_logits", "remove_invalid_values"), _BOOLEAN),
    "temperature": _number(0.01, 100),
    "top_k": _integer(0, 2**31 - 1),
    **dict.fromkeys(("top_p", "min_p"), _number(0, 1)),
    "typical_p": _number(0.001, 1),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), _number(0, 0.999)),
    "repetition_penalty": _number(0.1, 10),
    "no_repeat_ngram_size": _integer(0, 2**31 - 1),
    "max_new_tokens": _MORE_TOKENS,
    "min_new_tokens": _integer(0, 2**31 - 1),
    "max_time": _number(0.001, 1e6),
    "stop_strings": _stop,
    **dict.fromkeys(_FORBIDDING, _anything),
    "num_return_sequences": _only((1,), "a request is one row (at most 1); send it several times"),
    "num_beams": _only((1,), "drafts go with greedy decoding and sampling; `num_beams` is at most 1"),
    "use_cache": _only((True,), "drafts need the cache"),
}


def _generation_config(given: Any, rules: Rules) -> dict[str, Any]:
    """Settings of a `GenerationConfig`, given as an object or as JSON in a text."""
    described = "an object of settings, or such an object as JSON in a text"
    if isinstance(given, str):
        try:
            given = json.loads(given, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise Refused(f"`generation_config` must be {described}: {error}.", "generation_config") from error
        if given is None:
            raise _wrong("generation_config", described, given)
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise _wrong("generation_config", described, given)
    settings = {name: value for name, value in given.items() if value is not None}
    for name, value in settings.items():
        if name not in SETTINGS:
            known = ", ".join(sorted(SETTINGS))
            raise Refused(
                f"`generation_config.{name[:80]}` is not taken from clients: leave it out. These are taken: {known}.",
                f"generation_config.{name[:80]}",
            )
        SETTINGS[name](f"generation_config.{name}", value)
    forbidden = sum(_count_tokens(name, settings[name], rules) for name in _FORBIDDING if name in settings)
    most = min(MOST_BIASES, rules.vocabulary // 2)
    if forbidden > most:
        named = next(name for name in _FORBIDDING if name in settings)
        raise Refused(
            f"`generation_config.{named}`: {', '.join(_FORBIDDING)} name {forbidden} tokens together, and at most "
            f"{most} can be forbidden: name fewer.",
            f"generation_config.{named}",
        )
    return settings


def _count_tokens(name: str, value: Any, rules: Rules) -> int:
    """Number of ids in a list of ids, or in a list of such lists for `bad_words_ids`."""
    path = f"generation_config.{name}"
    rows = value if name == "bad_words_ids" else [value if isinstance(value, list) else [value]]
    described = "a list of lists of tokens" if name == "bad_words_ids" else "a list of tokens"
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) and row for row in rows):
        raise _wrong(path, described, value)
    for row in rows:
        for token in row:
            if not _is_integer(token) or not 0 <= token < rules.vocabulary:
                raise _wrong(path, f"{described} from 0 to {rules.vocabulary - 1}", token)
    return sum(map(len, rows))


# ---------------------------------------------------------------------- conversations


def _messages_of(request: dict[str, Any]) -> list[dict[str, Any]]:
    if not request["messages"]:
        raise Refused("`messages` is empty: there is nothing to answer.", "messages")
    return [_message(f"messages[{place}]", message) for place, message in enumerate(request["messages"])]


def _message(path: str, message: Any) -> dict[str, Any]:
    """The message in the form that a chat template expects."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _wrong(path, "an object with a `role`", message)
    parsed = {"role": message["role"], "content": _content(f"{path}.content", message.get("content"))}
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise _wrong(f"{path}.tool_calls", "a list", calls)
    if calls:  # the text beside them is empty, or repeats the calls
        parsed["content"] = ""
        parsed["tool_calls"] = [_tool_call(f"{path}.tool_calls[{at}]", call) for at, call in enumerate(calls)]
    if message.get("tool_call_id") is not None:
        _TEXT(f"{path}.tool_call_id", message["tool_call_id"])
        parsed["tool_call_id"] = message["tool_call_id"]
    return parsed


def _content(path: str, content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _wrong(path, "a text, or a list of parts of text", content)
    texts = []
    for place, part in enumerate(content):
        at = f"{path}[{place}]"
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise Refused(
                f"`{path}` must be a text, or a list of objects with a `type`: `{at}` is {_shown(part)}.", at
            )
        if part["type"] not in TEXT_PARTS:
            raise Refused(f"`{at}.type` is {_shown(part['type'])}: this server takes only text.", f"{at}.type")
        _TEXT(f"{at}.text", part.get("text"))
        texts.append(part["text"])
    return " ".join(texts)


def _tool_call(path: str, call: Any) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise _wrong(path, "an object with a `function`", call)
    nested = call.get("function") is not None
    function, at = (call["function"], f"{path}.function") if nested else (call, path)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _wrong(at, "an object with a `name`", function)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # what stays a text is refused below
            arguments = json.loads(arguments or "{}", parse_constant=_no_number)
    if not isinstance(arguments, dict):
        raise _wrong(f"{at}.arguments", "an object, or such an object as JSON in a text", arguments)
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if nested else function


def _tools_of(tools: list[Any] | None) -> list[dict[str, Any]] | None:
    """Tools in the nested form of chat completions and templates; the Responses interface sends them flat."""
    nested = []
    for place, tool in enumerate(tools or ()):
        path = f"tools[{place}]"
        if not isinstance(tool, dict) or tool.get("type", "function") != "function":
            raise _wrong(path, 'an object of type "function"', tool)
        if "function" not in tool:
            tool = {"type": "function", "function": {name: part for name, part in tool.items() if name != "type"}}
        if not isinstance(tool["function"], dict) or not isinstance(tool["function"].get("name"), str):
            raise _wrong(f"{path}.function", "an object with a `name`", tool["function"])
        nested.append(tool)
    return nested or None


def _template_of(variables: dict[str, Any], rules: Rules) -> dict[str, Any]:
    for name in variables:
        path = f"chat_template_kwargs.{name[:80]}"
        if name == "chat_template" and not rules.allow_chat_templates:
            raise Refused(
                "`chat_template_kwargs.chat_template`: this server renders only the model's own template. Leave it "
                "out, or ask the operator for `--allow-chat-templates`.",
                path,
            )
        if name == "chat_template":
            _TEXT(path, variables[name])
        elif name in OF_THE_TOKENIZER:
            raise Refused(f"`{path}` is not for clients to set: leave it out.", path)
    return variables


# Parameters of `apply_chat_template`, in any version of transformers, that are not variables of a template.
OF_THE_TOKENIZER = (
    *("self", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    *("tokenizer_kwargs", "processor_kwargs", "sanitize_control_tokens", "messages"),
)


def _messages_of_input(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Messages and tool calls of the Responses interface, in the form of a chat."""
    given, messages = request["input"], []
    if isinstance(given, str):
        messages = [{"role": "user", "content": given}]
    elif not given:
        raise Refused("`input` is empty: there is nothing to answer.", "input")
    elif all(isinstance(item, dict) and "role" not in item and item.get("type") in TEXT_PARTS for item in given):
        messages = [{"role": "user", "content": _content("input", given)}]
    else:
        for place, item in enumerate(given):
            _add_item(messages, f"input[{place}]", item)
    if request.get("instructions"):
        if messages and messages[0]["role"] == "system":
            messages[0]["content"] = request["instructions"]
        else:
            messages.insert(0, {"role": "system", "content": request["instructions"]})
    if not messages:
        raise Refused("`input` holds no message: there is nothing to answer.", "input")
    return messages


def _add_item(messages: list[dict[str, Any]], path: str, item: Any) -> None:
    if not isinstance(item, dict):
        raise _wrong(path, "an object with a `role` or a `type`", item)
    kind = item.get("type")
    if "role" in item:
        messages.append(_message(path, item))
    elif kind == "function_call":
        for name in ("call_id", "name"):
            _TEXT(f"{path}.{name}", item.get(name))
        call = {"id": item["call_id"], "function": {"name": item["name"], "arguments": item.get("arguments", {})}}
        call = _tool_call(path, call)
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
            messages[-1]["content"] = ""
        else:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif kind == "function_call_output":
        _TEXT(f"{path}.call_id", item.get("call_id"))
        output = _content(f"{path}.output", item.get("output"))
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
    elif kind != "reasoning":  # reasoning is not given back to the template
        raise Refused(f"`{path}.type` is {_shown(kind)}, which this server does not know.", f"{path}.type")
