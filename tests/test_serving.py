"""`hf-clover serve` over loopback, with the official client: plain generate's tokens, and a server that lives on."""

import hmac
import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
import uvicorn
from helpers.loopback import running
from helpers.tiny_text import ASCII, CHAT_TEMPLATE, PROMPT, save_folders
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from pydantic import TypeAdapter
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_clover import CloverHeads, cli
from hf_clover.apps import answering, asked, preparing, serving, wire
from hf_clover.cli import serving as command
from hf_clover.targets import private_api
from hf_clover.training import online

pytestmark = pytest.mark.long

NAME = "tiny"
TEXTS = (PROMPT, "for x in", "if a", "while ", "import ", "x = [")


class Served:
    """The models, and where they are served."""

    def __init__(self, folder: Path, port: int, key: str = "none") -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)
        self.target = AutoModelForCausalLM.from_pretrained(folder / "target")
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "target")
        self.tokenizer.chat_template = CHAT_TEMPLATE

    def plain(self, text: str, new: int) -> str:
        inputs = self.tokenizer(text, return_tensors="pt")
        out = self.target.generate(**inputs, max_new_tokens=new, do_sample=False)
        return self.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    def asked(self, prompt: str = PROMPT, max_tokens: int = 24, **fields: Any) -> Any:
        return self.client.completions.create(model=NAME, prompt=prompt, max_tokens=max_tokens, **fields)

    def get(self, path: str, **headers: str) -> dict[str, Any]:
        request = urllib.request.Request(self.url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def speculation(self) -> dict[str, Any]:
        return self.get("/speculation")

    def post(self, path: str, body: Any, kind: str = "application/json") -> tuple[int, dict[str, Any]]:
        """Status and error of a request that no client would send."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, content, {"content-type": kind})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        answer = json.load(refused.value)
        assert answer.keys() == {"error"}
        assert answer["error"].keys() == {"message", "type", "param", "code"}
        assert len(answer["error"]["message"]) < 1200, "a body comes back"
        return refused.value.code, answer["error"]

    def sampled(self, seed: int | None, tokens: int = 32) -> str:
        settings = {"do_sample": True, "temperature": 0.9, "max_new_tokens": tokens}
        answer = self.asked(max_tokens=None, seed=seed, extra_body={"generation_config": json.dumps(settings)})
        return answer.choices[0].text

    def until_idle(self) -> dict[str, Any]:
        deadline = time.monotonic() + 60
        while (counts := self.speculation())["waiting"]:
            assert time.monotonic() < deadline, f"still busy: {counts}"
            time.sleep(0.02)
        return counts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folders(tmp_path_factory.mktemp("served"), says=ASCII)


def parts_of(folder: Path) -> tuple[Any, Any, CloverHeads]:
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    tokenizer.chat_template = CHAT_TEMPLATE
    heads = CloverHeads.from_pretrained(folder / "heads")
    heads.generation_config.num_assistant_tokens = 8
    return AutoModelForCausalLM.from_pretrained(folder / "target"), tokenizer, heads


@pytest.fixture(scope="module")
def start(folder: Path) -> Callable[..., Any]:
    def app(**options: Any) -> Any:
        return serving.make_app(*parts_of(folder), NAME, **options)

    return app


@pytest.fixture(scope="module")
def served(folder: Path, start: Callable[..., Any]) -> Iterator[Served]:
    with running(start()) as port:
        yield Served(folder, port)


@pytest.fixture(scope="module")
def open_served(folder: Path, start: Callable[..., Any]) -> Iterator[Served]:
    """Renders its clients' templates, with a key."""
    with running(start(api_key="sesame", allow_chat_templates=True)) as port:
        yield Served(folder, port, "sesame")


@pytest.fixture(autouse=True)
def _lives_on(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did to the server: the next request is answered, and rightly."""
    yield
    for name in {"served", "open_served"} & {*request.fixturenames}:
        served = request.getfixturevalue(name)
        assert served.asked(max_tokens=6).choices[0].text == served.plain(PROMPT, 6)


# ---------------------------------------------------------------------- what clients get


def test_a_completion_equals_plain_generates_and_drafts_are_accepted(served: Served) -> None:
    before = served.speculation()
    answer = served.asked(max_tokens=40)
    assert answer.choices[0].text == served.plain(PROMPT, 40)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 40
    after = served.speculation()
    assert after["requests"] == before["requests"] + 1
    assert after["new_tokens"] == before["new_tokens"] + 40
    assert after["accepted_tokens"] > before["accepted_tokens"] + 8
    assert after["tokens_per_forward"] > 1.2


def test_a_stream_is_the_same_text_in_pieces(served: Served) -> None:
    pieces = [chunk.choices[0].text for chunk in served.asked(max_tokens=40, stream=True)]
    assert "".join(pieces) == served.plain(PROMPT, 40)
    assert len([piece for piece in pieces if piece]) > 20


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_answer_equals_plain_generates_text_of_the_messages(served: Served, stream: bool) -> None:
    messages = [{"role": "user", "content": "def f"}, {"role": "assistant", "content": "x"}]
    messages.append({"role": "user", "content": "for x in"})
    answer = served.client.chat.completions.create(model=NAME, messages=messages, max_tokens=24, stream=stream)
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    else:
        text = answer.choices[0].message.content
    prompt = served.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == served.plain(prompt, 24)


def test_a_response_equals_plain_generates_text_of_its_input(served: Served) -> None:
    answer = served.client.responses.create(model=NAME, input="for x in", max_output_tokens=24, stream=False)
    messages = [{"role": "user", "content": "for x in"}]
    prompt = served.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert answer.output_text == served.plain(prompt, 24)


def test_several_clients_at_once_get_their_own_text(served: Served) -> None:
    def ask(place: int) -> str:
        text = TEXTS[place % len(TEXTS)]
        if place % 2:
            return "".join(chunk.choices[0].text for chunk in served.asked(text, 20, stream=True))
        return served.asked(text, 20).choices[0].text

    with ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(ask, range(12)))
    assert answers == [served.plain(TEXTS[place % len(TEXTS)], 20) for place in range(12)]


def test_samples_from_a_seed_are_plain_generates(served: Served) -> None:
    settings = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 24}
    answer = served.asked(extra_body={"generation_config": json.dumps(settings), "seed": 5}, max_tokens=None)
    inputs = served.tokenizer(PROMPT, return_tensors="pt")
    torch.manual_seed(5)
    out = served.target.generate(**inputs, **settings)
    expected = served.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer.choices[0].text == expected


def test_a_stop_string_ends_an_answer(served: Served) -> None:
    whole = served.plain(PROMPT, 40)
    stop = whole[12:14]
    assert served.asked(max_tokens=40, stop=stop).choices[0].text == whole[: whole.index(stop) + len(stop)]


def test_the_model_is_listed_by_its_name(served: Served) -> None:
    assert [model.id for model in served.client.models.list()] == [NAME]


# ---------------------------------------------------------------------- what goes wrong


def test_a_client_that_leaves_in_mid_stream_stops_its_generation(served: Served) -> None:
    before = served.speculation()["requests"]
    stream = served.asked(max_tokens=4000, stream=True)
    next(iter(stream))
    stream.close()
    started = served.asked(max_tokens=5)  # is answered after the first, which 4000 tokens would keep for long
    assert started.choices[0].text == served.plain(PROMPT, 5)
    assert served.speculation()["requests"] == before + 1  # the broken one was not finished


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_longer_than_the_positions_is_refused(served: Served, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match="the prompt has 5000 tokens, and the model is made for 4096"):
        served.asked("a" * 5000, stream=stream)


def test_an_answer_ends_at_the_targets_last_position(served: Served) -> None:
    answer = served.asked("a" * 4090, max_tokens=100)
    assert answer.usage.completion_tokens == 6


def test_a_body_that_is_too_large_is_refused(served: Served) -> None:
    """What fits follows the target's positions; what does not is not even read as JSON."""
    status, error = served.post("/v1/completions", {"model": NAME, "prompt": "a" * (8 * 16 * 4096 + (64 << 10))})
    assert status == 413
    assert "larger than 589824 bytes" in error["message"]
    assert asked.Rules("", positions=1 << 20, vocabulary=9).most_body == asked.MOST_BYTES
    assert asked.Rules("", positions=None, vocabulary=9).most_body == asked.MOST_BYTES


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[1]", "a JSON list, and must be an object"),
        (b'{"messages": "hello"}', "`messages` must be a list"),
        (b'{"messages": []}', "`messages` is empty"),
        (b'{"messages": ["hello"]}', "must be an object with a `role`"),
        (b'{"messages": [{"content": "hello"}]}', "must be an object with a `role`"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "content` must be a text"),
        (b'{"messages": [{"role": "user", "content": ["hello"]}]}', "content` must be a text"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}', "`temperature` must be a number"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1.5}', "`max_tokens` must be an integer"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', "must be at least 1"),
        (b'{"model": "tiny"}', "`messages` is missing"),
    ],
)
def test_a_malformed_request_is_refused_with_the_reason(served: Served, body: bytes, reason: str) -> None:
    status, error = served.post("/v1/chat/completions", body)
    assert status == 400
    assert reason in error["message"]


def chat(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", **message}]}


def text(**fields: Any) -> dict[str, Any]:
    return {"prompt": "if a", **fields}


def config(**settings: Any) -> dict[str, Any]:
    return text(generation_config=settings)


OF_GENERATION = "`generation_config` must be an object of settings"


@pytest.mark.parametrize(
    ("route", "body", "param", "reason"),
    [
        ("completions", text(stop=[1]), "stop", "`stop` must be a text or a list of them, not [1]"),
        ("completions", text(stop=[None]), "stop", "`stop` must be a text or a list of them, not [null]"),
        ("completions", text(stop=["x"] * 17), "stop", "at most 16 texts of 1 to 128 letters"),
        ("completions", text(stop=""), "stop", "at most 16 texts of 1 to 128 letters"),
        ("completions", text(prompt="a\ud800"), "prompt", "`prompt` holds half a character (\\ud800)"),
        ("chat/completions", chat(content="\udc00"), "messages[0].content", "holds half a character"),
        ("completions", text(stop=["\udc00"]), "stop[0]", "`stop[0]` holds half a character"),
        ("completions", text(**{"\udc00": 1}), "the request", "holds half a character"),
        ("completions", {**text(), "\udc00": "\udc00"}, "\\udc00", "`\\udc00` holds half a character"),
        ("completions", text(**{"x" * 9000: 1}), "x" * 120, "is not a field that /v1/completions takes here"),
        ("completions", text(prompt=[1, 2]), "prompt", "`prompt` must be a text, not [1, 2]"),
        ("completions", text(suffix=5), "suffix", "`suffix` must be a text, not 5"),
        ("completions", text(stream="yes"), "stream", "`stream` must be true or false"),
        ("completions", text(seed=2**64), "seed", "must be at most 9223372036854775807"),
        ("completions", text(temperature=-1), "temperature", "must be a number from 0.01 to 100, or 0, not -1"),
        ("completions", text(top_p=2), "top_p", "must be a number from 0 to 1, not 2"),
        ("completions", b'{"prompt": "a", "top_p": NaN}', None, "NaN is not a number in JSON"),
        ("completions", b'{"prompt": "a", "top_p": 1e999}', "top_p", "from 0 to 1"),
        ("completions", text(frequency_penalty=-1), "frequency_penalty", "from -0.9 to 2"),
        ("completions", text(logit_bias={"x": 1}), "logit_bias", '"x" is no token from 0 to'),
        ("completions", text(logit_bias={"3": "x"}), "logit_bias.3", "must be a number from -1000 to 1000"),
        ("completions", text(logit_bias={str(i): 1 for i in range(1025)}), "logit_bias", "at most 1024 tokens"),
        ("completions", text(colour="red"), "colour", "`colour` is not a field that /v1/completions takes here"),
        ("completions", text(n=2), "n", "`n=2` is not supported: a request gets one text (at most 1)"),
        ("completions", text(best_of=3), "best_of", "`best_of=3` is not supported"),
        ("completions", text(echo=True), "echo", "`echo=true` is not supported"),
        ("completions", text(logprobs=1), "logprobs", "`logprobs=1` is not supported"),
        ("completions", text(generation_config=5), "generation_config", OF_GENERATION),
        ("completions", text(generation_config="[1]"), "generation_config", OF_GENERATION),
        ("completions", text(generation_config="null"), "generation_config", OF_GENERATION),
        ("completions", text(generation_config="{"), "generation_config", OF_GENERATION),
        (
            "completions",
            config(num_return_sequences=100_000),
            None,
            "num_return_sequences=100000` is not",
        ),
        ("completions", config(num_return_sequences=2), None, "a request is one row (at most 1)"),
        ("completions", config(num_beams=2), None, "`num_beams` is at most 1"),
        ("completions", config(temperature="hot"), None, 'temperature` must be a number from 0.01 to 100, not "hot"'),
        ("completions", config(top_k=-1), None, "`generation_config.top_k=-1` is too small: it must be at least 0"),
        ("completions", config(do_sample=1), None, "`generation_config.do_sample` must be true or false, not 1"),
        ("completions", config(max_new_tokens=[1]), None, "max_new_tokens` must be an integer, not [1]"),
        ("completions", config(max_length=9), None, "`generation_config.max_length` is not taken from clients"),
        ("completions", config(cache_implementation="static"), None, "is not taken from clients: leave it out. These"),
        ("completions", config(use_cache=False), None, "drafts need the cache"),
        ("completions", config(bad_words_ids=[[]]), None, "must be a list of lists of tokens"),
        ("completions", config(suppress_tokens=[10**6]), None, "must be a list of tokens from 0 to"),
        ("completions", config(suppress_tokens=[*range(30)]), None, "name 30 tokens together, and at most"),
        ("completions", config(no_repeat_ngram_size=2), None, "may leave no token in a text of 1028"),
        (
            "chat/completions",
            chat(content=[{"type": "text"}]),
            "messages[0].content[0].text",
            "must be a text, not null",
        ),
        ("chat/completions", chat(content=[{"type": "image_url"}]), "messages[0].content[0].type", "takes only text"),
        ("chat/completions", chat(content=[5]), "messages[0].content[0]", "`messages[0].content[0]` is 5"),
        ("chat/completions", chat(tool_calls=5), "messages[0].tool_calls", "must be a list"),
        ("chat/completions", chat(tool_calls=[1]), "messages[0].tool_calls[0]", "an object with a `function`, not 1"),
        ("chat/completions", chat(tool_calls=[{}]), "messages[0].tool_calls[0]", "an object with a `name`"),
        (
            "chat/completions",
            chat(tool_calls=[{"function": {"name": "f", "arguments": "{"}}]),
            "messages[0].tool_calls[0].function.arguments",
            "an object, or such an object as JSON",
        ),
        ("chat/completions", chat(tool_call_id=5), "messages[0].tool_call_id", "must be a text"),
        ("chat/completions", {**chat(content="x"), "n": 2}, "n", "send it several times"),
        ("chat/completions", {**chat(content="x"), "tools": [1]}, "tools[0]", "`tools[0]` must be an object"),
        ("chat/completions", {**chat(content="x"), "tools": [{"function": 1}]}, "tools[0].function", "with a `name`"),
        ("chat/completions", {**chat(content="x"), "tool_choice": "required"}, "tool_choice", "`auto` and `none`"),
        ("chat/completions", {**chat(content="x"), "response_format": {"type": "json_object"}}, None, "as the model"),
        ("chat/completions", {**chat(content="x"), "chat_template_kwargs": 5}, None, "must be an object, not 5"),
        ("responses", {"input": [1, 2]}, "input[0]", "`input[0]` must be an object with a `role` or a `type`, not 1"),
        ("responses", {"input": 5}, "input", "`input` must be a text or a list, not 5"),
        ("responses", {"input": []}, "input", "`input` is empty"),
        ("responses", {"input": [{"type": "magic"}]}, "input[0].type", 'is "magic", which this server does not know'),
        ("responses", {"input": [{"type": "function_call"}]}, "input[0].call_id", "must be a text, not null"),
        ("responses", {"input": "x", "previous_response_id": "y"}, "previous_response_id", "is not a field"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(
    served: Served, route: str, body: Any, param: str | None, reason: str
) -> None:
    for stream in (False, True):
        sent = body if isinstance(body, bytes) else {"stream": stream, **body}
        status, error = served.post(f"/v1/{route}", sent)
        assert reason in error["message"]
        assert (status, error["type"]) == (400, "invalid_request_error")
        assert param is None or error["param"] == param


def test_a_request_whose_content_type_is_not_json_is_refused(served: Served) -> None:
    status, error = served.post("/v1/completions", text(), kind="text/plain")
    assert (status, error["param"]) == (400, "content-type")
    assert "must be 'application/json'" in error["message"]


def test_a_prompt_that_cannot_be_rendered_or_tokenised_is_refused(served: Served, start: Callable[..., Any]) -> None:
    """The model's own template cannot render the messages, or the tokenizer raises."""
    rules, body = asked.Rules(NAME, 4096, 40), json.dumps(chat(content="x")).encode()
    tokenizer = AutoTokenizer.from_pretrained(served.tokenizer.name_or_path)
    answer = json.loads(preparing.answer(tokenizer, rules, asked.CHAT, body))["refused"]
    assert "the model has no chat template: send a `prompt` to /v1/completions" in answer["message"]
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    answer = json.loads(preparing.answer(tokenizer, rules, asked.CHAT, body))["refused"]
    assert "the chat template cannot render them (TemplateError: roles must alternate)" in answer["message"]
    answer = json.loads(preparing.answer(None, rules, asked.COMPLETIONS, json.dumps(text()).encode()))["refused"]
    assert "`prompt` cannot be rendered and tokenised (TypeError" in answer["message"]


def test_a_failure_of_the_server_is_an_error_of_openais_form(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("a secret")

    with monkeypatch.context() as patched:
        patched.setattr(answering, "StopTexts", fails)
        patched.setattr(answering, "response_parser", fails)
        status, error = served.post("/v1/completions", text(stop="a"))
        assert (status, error["type"]) == (500, "server_error")
        assert "the server failed at this request (RuntimeError)" in error["message"]
        with pytest.raises(openai.APIError, match="the server failed at this request"):
            list(served.asked(stream=True, stop="a"))
        events = list(served.client.responses.create(model=NAME, input="x", stream=True))
        assert [event.type for event in events][-2:] == ["error", "response.failed"]
        assert "the server failed at this request" in events[-1].response.error.message


# ---------------------------------------------------------------------- what takes long, or much


@pytest.mark.parametrize("name", ["chat_template", "max_length", "padding", "tokenize", "conversation"])
def test_a_client_may_set_only_variables_of_the_chat_template(served: Served, name: str) -> None:
    body = {**chat(content="x"), "chat_template_kwargs": {name: "max_length"}}
    status, error = served.post("/v1/chat/completions", body)
    assert (status, error["param"]) == (400, f"chat_template_kwargs.{name}")
    assert ("`--allow-chat-templates`" if name == "chat_template" else "not for clients to set") in error["message"]


def rendered(served: Served, template: str) -> str:
    extra = {"chat_template_kwargs": {"chat_template": template, "word": "if a"}}
    messages = [{"role": "user", "content": "x"}]
    answer = served.client.chat.completions.create(model=NAME, messages=messages, max_tokens=8, extra_body=extra)
    return answer.choices[0].message.content


def test_a_clients_template_is_rendered_where_the_operator_allows_it(open_served: Served) -> None:
    assert rendered(open_served, "{{ word }}") == open_served.plain("if a", 8)


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_that_takes_long_is_ended_and_others_are_answered(
    open_served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "SECONDS", 1.0)
    answered = 0
    with ThreadPoolExecutor(1) as client:
        request = client.submit(rendered, open_served, LOOP)
        while not request.done():
            answered += open_served.get("/health")["status"] == "ok"
            time.sleep(0.02)
    with pytest.raises(openai.BadRequestError, match="takes more than 1 s, or more memory than there is"):
        request.result()
    assert answered > 5
    monkeypatch.undo()
    assert rendered(open_served, "{{ word }}") == open_served.plain("if a", 8), "in a new process"


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux")
def test_a_template_that_takes_too_much_memory_is_refused(open_served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match=r"cannot render them \(MemoryError"):
        rendered(open_served, "{{ ('a' * 3000000000) | length }}")


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(served: Served) -> None:
    def tokenizer(*_: Any, **__: Any) -> None:
        pytest.fail("tokenised")

    rules = asked.Rules(NAME, positions=10, vocabulary=40)
    body = json.dumps(text(prompt="é" * 81)).encode()
    refused = json.loads(preparing.answer(tokenizer, rules, asked.COMPLETIONS, body))["refused"]
    assert (refused["param"], refused["code"]) == ("prompt", "context_length_exceeded")
    status, error = served.post("/v1/completions", text(prompt="a" * 70_000))
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "the prompt has 70000 bytes, and the model is made for 4096 tokens" in error["message"]
    status, error = served.post("/v1/chat/completions", chat(content="a" * 70_000))
    assert "`messages`: the prompt has 700" in error["message"]


def test_a_request_beyond_the_longest_queue_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MOST_WAITING", 1)
    stream = served.asked(max_tokens=4000, stream=True)
    next(iter(stream))
    assert served.speculation()["waiting"] == 1
    with pytest.raises(openai.InternalServerError, match="at most 1 may wait: try again later") as refused:
        served.asked()
    assert refused.value.status_code == 503
    assert refused.value.response.headers["retry-after"]
    stream.close()
    served.until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_requests_whose_clients_have_gone_are_cancelled(served: Served, stream: bool) -> None:
    """The one that is answered, and those that wait."""
    before, clients = served.speculation(), []
    for _ in range(6):
        clients.append(http.client.HTTPConnection("127.0.0.1", served.port, timeout=30))
        body = json.dumps(text(max_tokens=4000, stream=stream))
        clients[-1].request("POST", "/v1/completions", body, {"content-type": "application/json"})
    deadline = time.monotonic() + 30
    while served.speculation()["waiting"] < 6:
        assert time.monotonic() < deadline, "they did not arrive"
        time.sleep(0.02)
    for client in clients:
        client.close()
    after = served.until_idle()
    assert after["cancelled"] == before["cancelled"] + 6
    assert after["requests"] == before["requests"]


def test_a_client_that_goes_before_its_body_is_sent_leaves_no_request(served: Served) -> None:
    client = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    client.putrequest("POST", "/v1/completions")
    client.putheader("content-type", "application/json")
    client.putheader("content-length", "1000")
    client.endheaders(b"{")
    client.close()
    served.until_idle()


# ---------------------------------------------------------------------- seeds


def test_a_seed_gives_the_same_text_with_several_clients_at_once(served: Served) -> None:
    alone = [served.sampled(seed) for seed in range(8)]
    assert len({*alone}) == 8
    with ThreadPoolExecutor(8) as clients:
        assert list(clients.map(served.sampled, range(8))) == alone


def test_a_seed_does_not_fix_the_text_after_it(served: Served) -> None:
    after = []
    for _ in range(2):
        served.sampled(5, 1)
        after.append(served.sampled(None))
    assert after[0] != after[1]


def test_a_temperature_above_zero_samples(served: Served) -> None:
    texts = {served.asked(temperature=1.5, seed=seed, max_tokens=24).choices[0].text for seed in range(4)}
    assert len(texts) == 4
    assert served.asked(temperature=0, seed=5, max_tokens=24).choices[0].text == served.plain(PROMPT, 24)


# ---------------------------------------------------------------------- the key


@pytest.mark.parametrize("path", ["/v1/models", "/speculation", "/v1/nothing", "/docs"])
@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer sesam"}, {"Authorization": "sesame"}])
def test_every_route_but_health_asks_for_the_key(open_served: Served, path: str, header: dict[str, str]) -> None:
    assert open_served.get("/health") == {"status": "ok"}
    with pytest.raises(urllib.error.HTTPError) as refused:
        open_served.get(path, **header)
    error = json.load(refused.value)["error"]
    assert (refused.value.code, error["code"]) == (401, "invalid_api_key")
    assert "`authorization` must be 'Bearer KEY'" in error["message"]


def test_the_right_key_is_accepted_and_a_wrong_one_refused(open_served: Served) -> None:
    assert open_served.get("/v1/models", Authorization="Bearer sesame")["data"][0]["id"] == NAME
    status, error = open_served.post("/v1/completions", text())
    assert (status, error["param"]) == (401, "authorization")
    with pytest.raises(openai.AuthenticationError):
        open_served.client.with_options(api_key="wrong").models.list()


def test_keys_are_compared_in_constant_time(open_served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    compared, compare = [], hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda *both: compared.append(both) or compare(*both))
    open_served.get("/v1/models", Authorization="Bearer sesame")
    assert compared == [(b"Bearer sesame", b"Bearer sesame")]


@pytest.mark.parametrize("key", ["", "two words", "clé"])
def test_a_key_that_no_header_can_hold_is_refused(start: Callable[..., Any], key: str) -> None:
    with pytest.raises(ValueError, match="`api_key` must be one or more printable ASCII characters"):
        start(api_key=key)


# ---------------------------------------------------------------------- the shapes of answers


def test_a_stream_of_responses_is_the_same_text(served: Served) -> None:
    events = list(served.client.responses.create(model=NAME, input="for x in", max_output_tokens=24, stream=True))
    whole = served.client.responses.create(model=NAME, input="for x in", max_output_tokens=24)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert events[-1].response.usage == whole.usage


def test_an_answer_has_its_usage_and_the_requests_id(served: Served) -> None:
    answer = served.asked(max_tokens=9, extra_headers={"x-request-id": "mine-1"})
    assert (answer.id, answer.usage.prompt_tokens, answer.usage.total_tokens) == (
        "mine-1",
        len(PROMPT),
        len(PROMPT) + 9,
    )
    chunks = list(served.asked(max_tokens=9, stream=True, extra_headers={"x-request-id": "not mine!"}))
    assert chunks[-1].usage == answer.usage
    assert chunks[0].id != "not mine!"


def test_a_suffix_is_appended_to_the_text(served: Served) -> None:
    assert served.asked(max_tokens=9, suffix=" end").choices[0].text == served.plain(PROMPT, 9) + " end"
    assert [chunk.choices[0].text for chunk in served.asked(max_tokens=9, suffix=" end", stream=True)][-2] == " end"


def test_text_parts_and_tool_calls_reach_the_chat_template(served: Served) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "if a"}, {"type": "text", "text": "x"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "z"},
    ]
    understood = asked.understand(json.dumps({"messages": messages}).encode(), asked.CHAT, asked.Rules("", 99, 40))
    read = {**call, "function": {"name": "f", "arguments": {"x": 1}}}
    assert understood.messages == [
        {"role": "user", "content": "if a x"},
        {"role": "assistant", "content": "", "tool_calls": [read]},
        {"role": "tool", "content": "z", "tool_call_id": "1"},
    ]
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "if a x"}]},
        {"type": "reasoning", "content": [], "summary": []},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "z"},
    ]
    body = json.dumps({"input": items, "instructions": "be brief"}).encode()
    messages = asked.understand(body, asked.RESPONSES, asked.Rules("", 99, 40)).messages
    assert messages[0] == {"role": "system", "content": "be brief"}
    del understood.messages[1]["tool_calls"][0]["type"]
    assert messages[1:] == understood.messages


TOLD = [
    answering.Reasoning("so "),
    answering.Reasoning("be it"),
    answering.Text("yes"),
    answering.ToolCall("f", '{"x": 1}'),
    answering.ToolCall("g", "{}"),
]


def test_reasoning_and_tool_calls_have_the_shapes_of_openai() -> None:
    """Whole and in pieces, read with the official client's own types."""
    ended = answering.Ended(7, is_full=False)
    whole = ChatCompletion.model_validate(wire.Chat("m", "r", 3, None).whole(TOLD, ended))
    message, calls = whole.choices[0].message, whole.choices[0].message.tool_calls
    assert (message.content, message.reasoning_content) == ("yes", "so be it")
    assert [(call.id, call.function.name) for call in calls] == [("r_tool_call_0", "f"), ("r_tool_call_1", "g")]
    assert whole.choices[0].finish_reason == "tool_calls"

    def lines(shape: Any) -> list[dict[str, Any]]:
        said = [*shape.opening(), *(line for piece in TOLD for line in shape.piece(piece)), *shape.closing(ended)]
        data = [line.partition("data: ")[2] for line in said]
        return [json.loads(line) for line in data if line.strip() != "[DONE]"]

    chunks = [ChatCompletionChunk.model_validate(line) for line in lines(wire.Chat("m", "r", 3, None))]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "so be it"
    assert [call.index for delta in deltas for call in delta.tool_calls or ()] == [0, 1]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"

    response = Response.model_validate(wire.Response("m", "r", 3, None).whole(TOLD, ended))
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert response.output_text == "yes"
    adapter = TypeAdapter(openai.types.responses.ResponseStreamEvent)
    events = [adapter.validate_python(line) for line in lines(wire.Response("m", "r", 3, None))]
    assert events[-1].response.output == response.output
    assert events[-1].response.usage.output_tokens == 7


class Listens:
    """A job whose client is the test."""

    def __init__(self, stream: bool) -> None:
        self.asked, self.told = asked.Asked(stream=stream), list[Any]()

    def say(self, *events: Any) -> None:
        self.told += events

    def check(self) -> None:
        pass


@pytest.mark.parametrize("stream", [False, True])
def test_the_parser_of_transformers_separates_reasoning_from_text(served: Served, stream: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(served.tokenizer.name_or_path)
    thinking = {"open": "(", "close": ")", "content": "text"}
    tokenizer.response_template = {
        "start_anchor": "if a",
        "fields": {"reasoning_content": thinking, "content": {"content": "text"}},
    }
    parser = private_api.response_parser(tokenizer, served.target, tokenizer("if a").input_ids, None)
    if parser is None:
        pytest.skip("this version of transformers has none")
    job = Listens(stream)
    writer = answering.Writer(job, parser, tokenizer)
    writer.put(torch.tensor([[5, 6]]))
    for token in tokenizer("(so be it)x = [").input_ids:
        writer.put(torch.tensor([token]))
    writer.finish()
    assert "".join(told.text for told in job.told if isinstance(told, answering.Reasoning)) == "so be it"
    assert "".join(told.text for told in job.told if isinstance(told, answering.Text)) == "x = ["
    assert (len(job.told) > 2) == stream


class Parser:
    """As transformers' `ResponseParser`, which raises at a call that is none."""

    initial_events: tuple = ()

    def feed(self, text: str) -> list[dict[str, Any]]:
        if "x" in text:
            raise ValueError("no JSON")
        return [{"type": "region_chunk", "field": "content", "text": text}]

    def finalize(self) -> tuple[dict, list[dict[str, Any]]]:
        raise ValueError("in the middle of a call")


def test_an_invalid_tool_call_is_answered_as_text(served: Served) -> None:
    job = Listens(stream=True)
    writer = answering.Writer(job, Parser(), served.tokenizer)
    writer.put(torch.tensor([[5]]))
    for token in served.tokenizer("a = x[").input_ids:
        writer.put(torch.tensor([token]))
    writer.finish()
    assert "".join(told.text for told in job.told) == "a = x["


def test_answers_without_a_parser_are_plain_text(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.cli.serving.utils", None)
    assert private_api.response_parser(served.tokenizer, served.target, [5], None) is None
    assert served.asked(max_tokens=9).choices[0].text == served.plain(PROMPT, 9)


def test_completions_are_not_parsed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "response_parser", lambda *_: pytest.fail("parsed"))
    assert served.asked(max_tokens=9).choices[0].text == served.plain(PROMPT, 9)


def test_a_tool_call_is_sent_only_when_it_is_whole() -> None:
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    events = [
        {"type": "region_open", "field": "tool_calls"},
        {"type": "region_chunk", "field": "tool_calls", "text": "{", "dirty": True},
        {"type": "region_close", "field": "tool_calls", "value": call},
    ]
    assert [*answering._told(events)] == [answering.ToolCall("f", '{"x": 1}')]


def test_a_stop_text_ends_an_answer_wherever_its_tokens_end(served: Served) -> None:
    whole = served.plain(PROMPT, 60)
    for begin in range(0, 40, 7):
        stop = whole[begin : begin + 3]
        expected = whole[: whole.index(stop) + 3]
        assert served.asked(max_tokens=60, stop=["never said", stop]).choices[0].text == expected
        settings = {"extra_body": {"generation_config": {"stop_strings": stop}}}
        assert served.asked(max_tokens=60, **settings).choices[0].text == expected


def test_beam_search_is_refused_before_a_stream_begins(served: Served) -> None:
    settings = {"generation_config": json.dumps({"num_beams": 4, "max_new_tokens": 4})}
    with pytest.raises(openai.BadRequestError, match="num_beams"):
        served.asked(stream=True, extra_body=settings)


def test_a_request_for_another_model_is_refused(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="pinned to 'tiny'"):
        served.client.completions.create(model="org/another", prompt=PROMPT)


@pytest.mark.parametrize("path", ["/reset", "/load_model", "/v1/audio/transcriptions"])
def test_models_cannot_be_loaded_or_unloaded_by_clients(served: Served, path: str) -> None:
    assert served.post(path, b'{"model": "org/another"}')[0] == 404


# ---------------------------------------------------------------------- the command


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["hf-clover", "serve", *words])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return exit_.value.code


class Eager:
    """A teacher who never comes to an end by himself."""

    steps = tokens = 0

    def idle_step(self) -> bool:
        self.steps += 1
        time.sleep(0.001)
        return True

    def listen(self, _: Any) -> Any:
        return SimpleNamespace(hear=lambda *_: None, remember=lambda *_: None, end=lambda *_: None)


def test_learning_pauses_for_requests_and_stops_with_the_server(folder: Path) -> None:
    target, tokenizer, heads = parts_of(folder)
    heads.learner = eager = Eager()
    with running(serving.make_app(target, tokenizer, heads, NAME)) as port:
        served, steps = Served(folder, port), [0]
        for text in TEXTS[:3]:
            assert served.asked(text, max_tokens=12).choices[0].text == served.plain(text, 12)
            deadline = time.monotonic() + 60
            while eager.steps == steps[-1] and time.monotonic() < deadline:
                time.sleep(0.01)
            steps.append(eager.steps)
    assert steps == sorted(set(steps)), "it learned after each request"


def test_heads_learn_between_requests(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online, "LEAST", 40)
    target, tokenizer, heads = parts_of(folder)
    with online.OnlineLearner(heads, target, tmp_path, share=0.0) as learner:
        with running(serving.make_app(target, tokenizer, heads, NAME)) as port:
            served = Served(folder, port)
            for count in (1, 2, 3):
                assert served.asked(max_tokens=60).choices[0].text == served.plain(PROMPT, 60)
                deadline = time.monotonic() + 60
                while learner.steps < count and time.monotonic() < deadline:
                    time.sleep(0.02)
            assert served.speculation()["tokens_learned_from"] == learner.tokens
        assert learner.steps >= 3
    assert CloverHeads.from_pretrained(tmp_path).config.num_heads == 3


def test_serve_with_learn_serves_heads_that_learn(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    seen: list[tuple] = []

    def serve(target: Any, tokenizer: Any, heads: CloverHeads, *_: Any, **__: Any) -> None:
        seen.append((heads.learner, target.generation_config.num_assistant_tokens))

    monkeypatch.setattr(serving, "serve", serve)
    words = ["--target", str(folder / "target"), "--learn", str(tmp_path / "mine"), "--num-assistant-tokens", "5"]
    assert not run(monkeypatch, *words)
    assert seen[0][0].folder == tmp_path / "mine"
    assert seen[0][1] == 5
    assert CloverHeads.from_pretrained(tmp_path / "mine").generation_config.num_assistant_tokens is None


def test_the_command_serves_the_target_with_its_heads(
    monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple] = []
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: calls.append((app, options)))
    models = ["--target", str(folder / "target"), "--heads", str(folder / "heads")]
    monkeypatch.setattr("sys.argv", ["hf-clover", "serve", *models, "--port", "8123", "--num-assistant-tokens", "5"])
    with pytest.raises(SystemExit) as exit_:
        cli.app()
    assert not exit_.value.code
    app, options = calls[0]
    assert (options["host"], options["port"]) == ("localhost", 8123)
    assert "/v1/chat/completions" in {route.path for route in app.routes}


def test_serve_with_remember_gives_the_heads_a_text_memory(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    served: list[CloverHeads] = []
    monkeypatch.setattr(serving, "serve", lambda target, tokenizer, heads, *_, **__: served.append(heads))
    models = ["--target", str(folder / "target"), "--heads", str(folder / "heads")]
    for words in ([], ["--remember", "100"]):
        assert not run(monkeypatch, *models, *words)
    assert served[0].text_memory is None
    assert served[1].text_memory.most_tokens == 100


def test_serve_takes_the_key_from_its_options_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: list[dict[str, Any]] = []
    monkeypatch.setattr(serving, "serve", lambda *_, **named: options.append(named))
    models = ["--target", str(folder / "target"), "--heads", str(folder / "heads")]
    monkeypatch.delenv("HF_CLOVER_API_KEY", raising=False)
    assert not run(monkeypatch, *models)
    assert "without a key" not in capsys.readouterr().err
    assert not run(monkeypatch, *models, "--host", "0.0.0.0")
    assert "0.0.0.0 without a key" in capsys.readouterr().err
    assert not run(monkeypatch, *models, "--api-key", "sesame", "--allow-chat-templates", "--host", "0.0.0.0")
    assert "without a key" not in capsys.readouterr().err
    monkeypatch.setenv("HF_CLOVER_API_KEY", "open")
    assert not run(monkeypatch, *models)
    assert [(named["api_key"], named["allow_chat_templates"]) for named in options] == [
        (None, False),
        (None, False),
        ("sesame", True),
        ("open", False),
    ]


def test_continuous_batching_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--continuous-batching") == 2
    assert "takes one token a row and step" in capsys.readouterr().err


def test_serve_without_heads_names_transformers_serve(
    monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--target", str(folder / "target")) == 2
    assert "`transformers serve` serves the target" in capsys.readouterr().err


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "has_package", lambda name: name != "fastapi")
    assert run(monkeypatch, "--target", str(folder / "target"), "--heads", str(folder / "heads")) == 2
    assert "pip install 'hf-clover[serve]'" in capsys.readouterr().err


def test_the_help_of_serve_has_an_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--help") == 0
    assert "Example: hf-clover serve" in capsys.readouterr().out
    assert command.serve.__doc__
