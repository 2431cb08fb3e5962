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
from unittest.mock import Mock

import openai
import pytest
import torch
import uvicorn
from helpers import command_line
from helpers.loopback import running
from helpers.tiny_text import CHAT_TEMPLATE, PROMPT
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from pydantic import TypeAdapter
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_clover import CloverHeads
from hf_clover.apps import answering, asked, preparing, serving, wire
from hf_clover.targets import private_api
from hf_clover.training import online

pytestmark = pytest.mark.long

NAME = "tiny"
TEXTS = (PROMPT, "for x in", "if a", "while ", "import ", "x = [")
SAMPLED = {"do_sample": True, "temperature": 0.9}

folder, models, run = command_line.folder, command_line.models, command_line.run  # fixtures


def wait_until(holds: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)


class Served:
    """The models, and where they are served."""

    def __init__(self, folder: Path, port: int, key: str = "none") -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)
        self.target, self.tokenizer, _ = parts_of(folder)

    def plain(self, prompt: str | list[dict[str, str]], new: int, **settings: Any) -> str:
        """Plain generate's text after a text or messages."""
        if isinstance(prompt, list):
            prompt = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        inputs = self.tokenizer(prompt, return_tensors="pt")
        out = self.target.generate(**inputs, max_new_tokens=new, **{"do_sample": False, **settings})
        return self.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    def asked(self, prompt: str = PROMPT, max_tokens: int = 24, **fields: Any) -> Any:
        return self.client.completions.create(model=NAME, prompt=prompt, max_tokens=max_tokens, **fields)

    def get(self, path: str, **headers: str) -> dict[str, Any]:
        request = urllib.request.Request(self.url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def speculation(self) -> dict[str, Any]:
        return self.get("/speculation")

    def chat(self, messages: list[dict[str, str]], max_tokens: int, **fields: Any) -> Any:
        return self.client.chat.completions.create(model=NAME, messages=messages, max_tokens=max_tokens, **fields)

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
        settings = {**SAMPLED, "max_new_tokens": tokens}
        answer = self.asked(max_tokens=None, seed=seed, extra_body={"generation_config": json.dumps(settings)})
        return answer.choices[0].text

    def until_idle(self) -> dict[str, Any]:
        wait_until(lambda: not self.speculation()["waiting"], "still busy")
        return self.speculation()


def parts_of(folder: Path) -> tuple[Any, Any, CloverHeads]:
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    tokenizer.chat_template = CHAT_TEMPLATE
    heads = CloverHeads.from_pretrained(folder / "heads")
    heads.generation_config.num_assistant_tokens = 8
    return AutoModelForCausalLM.from_pretrained(folder / "target"), tokenizer, heads


@pytest.fixture(scope="module")
def start(folder: Path) -> Callable[..., Any]:
    return lambda **options: serving.make_app(*parts_of(folder), NAME, **options)


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


def test_a_completion_streamed_or_not_equals_plain_generates_and_drafts_are_accepted(served):
    before, plain = served.speculation(), served.plain(PROMPT, 40)
    answer = served.asked(max_tokens=40).choices[0]
    assert (answer.text, answer.finish_reason) == (plain, "length")
    pieces = [chunk.choices[0].text for chunk in served.asked(max_tokens=40, stream=True)]
    assert "".join(pieces) == plain
    assert len([piece for piece in pieces if piece]) > 20
    after = served.speculation()
    assert after["requests"] == before["requests"] + 2
    assert after["new_tokens"] == before["new_tokens"] + 80
    assert after["accepted_tokens"] > before["accepted_tokens"] + 16
    assert after["tokens_per_forward"] > 1.2


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_answer_equals_plain_generates_text_of_the_messages(served, stream):
    said = (("user", "def f"), ("assistant", "x"), ("user", "for x in"))
    messages = [{"role": role, "content": content} for role, content in said]
    answer = served.chat(messages, 24, stream=stream)
    parts = [chunk.choices[0].delta for chunk in answer] if stream else [answer.choices[0].message]
    assert "".join(part.content or "" for part in parts) == served.plain(messages, 24)


def test_a_response_streamed_or_not_equals_plain_generates_text_of_its_input(served):
    events = list(served.client.responses.create(model=NAME, input="for x in", max_output_tokens=24, stream=True))
    whole = served.client.responses.create(model=NAME, input="for x in", max_output_tokens=24)
    assert whole.output_text == served.plain([{"role": "user", "content": "for x in"}], 24)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert events[-1].response.usage == whole.usage


def test_several_clients_at_once_get_their_own_text(served):
    def ask(place: int) -> str:
        text = TEXTS[place % len(TEXTS)]
        if place % 2:
            return "".join(chunk.choices[0].text for chunk in served.asked(text, 20, stream=True))
        return served.asked(text, 20).choices[0].text

    with ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(ask, range(12)))
    assert answers == [served.plain(TEXTS[place % len(TEXTS)], 20) for place in range(12)]


def test_a_stop_text_ends_an_answer_wherever_its_tokens_end(served):
    whole = served.plain(PROMPT, 60)
    for begin in range(0, 40, 7):
        stop = whole[begin : begin + 3]
        expected = whole[: whole.index(stop) + 3]
        of_generation = {"extra_body": {"generation_config": {"stop_strings": stop}}}
        for fields in ({"stop": stop}, {"stop": ["never said", stop]}, of_generation):
            assert served.asked(max_tokens=60, **fields).choices[0].text == expected


# ---------------------------------------------------------------------- what goes wrong


def test_an_answer_ends_at_the_targets_last_position_and_a_longer_prompt_is_refused(served):
    assert served.asked("a" * 4090, max_tokens=100).usage.completion_tokens == 6
    with pytest.raises(openai.BadRequestError, match="the prompt has 5000 tokens, and the model is made for 4096"):
        served.asked("a" * 5000, stream=True)


def test_a_body_that_is_too_large_is_refused(served):
    """What fits follows the target's positions; what does not is not even read as JSON."""
    status, error = served.post("/v1/completions", {"model": NAME, "prompt": "a" * (8 * 16 * 4096 + (64 << 10))})
    assert status == 413
    assert "larger than 589824 bytes" in error["message"]
    assert asked.Rules("", positions=1 << 20, vocabulary=9).most_body == asked.MOST_BYTES
    assert asked.Rules("", positions=None, vocabulary=9).most_body == asked.MOST_BYTES


def chat(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", **message}]}


def text(**fields: Any) -> dict[str, Any]:
    return {"prompt": "if a", **fields}


def config(**settings: Any) -> dict[str, Any]:
    return text(generation_config=settings)


def templated(**variables: Any) -> dict[str, Any]:
    return {**chat(content="x"), "chat_template_kwargs": variables}


OF_GENERATION = "`generation_config` must be an object of settings"


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        (b"{", None, "no JSON"),
        (b"\xff\xfe", None, "no JSON"),
        (b"[" * 100_000, None, "no JSON"),
        (b"[1]", None, "a JSON list, and must be an object"),
        ({"model": NAME}, None, "`messages` is missing"),
        ({"messages": "hello"}, None, "`messages` must be a list"),
        ({"messages": []}, None, "`messages` is empty"),
        ({"messages": ["hello"]}, None, "must be an object with a `role`"),
        ({"messages": [{"content": "hello"}]}, None, "must be an object with a `role`"),
        (chat(content=3), None, "content` must be a text"),
        ({**chat(content="x"), "max_tokens": 1.5}, None, "`max_tokens` must be an integer"),
        ({**chat(content="x"), "max_tokens": 0}, None, "must be at least 1"),
        (text(model="org/another"), None, "pinned to 'tiny'"),
        (text(stop=[1]), "stop", "`stop` must be a text or a list of them, not [1]"),
        (text(stop=["x"] * 17), "stop", "at most 16 texts of 1 to 128 letters"),
        (text(stop=""), "stop", "at most 16 texts of 1 to 128 letters"),
        (text(prompt="a\ud800"), "prompt", "`prompt` holds half a character (\\ud800)"),
        (chat(content="\udc00"), "messages[0].content", "holds half a character"),
        (text(**{"\udc00": 1}), "the request", "holds half a character"),
        ({**text(), "\udc00": "\udc00"}, "\\udc00", "`\\udc00` holds half a character"),
        (text(**{"x" * 9000: 1}), "x" * 120, "is not a field that /v1/completions takes here"),
        (text(prompt=[1, 2]), "prompt", "`prompt` must be a text, not [1, 2]"),
        (text(suffix=5), "suffix", "`suffix` must be a text, not 5"),
        (text(stream="yes"), "stream", "`stream` must be true or false"),
        (text(seed=2**64), "seed", "must be at most 9223372036854775807"),
        (text(temperature=-1), "temperature", "must be a number from 0.01 to 100, or 0, not -1"),
        (b'{"prompt": "a", "top_p": NaN}', None, "NaN is not a number in JSON"),
        (b'{"prompt": "a", "top_p": 1e999}', "top_p", "from 0 to 1"),
        (text(frequency_penalty=-1), "frequency_penalty", "from -0.9 to 2"),
        (text(logit_bias={"x": 1}), "logit_bias", '"x" is no token from 0 to'),
        (text(logit_bias={"3": "x"}), "logit_bias.3", "must be a number from -1000 to 1000"),
        (text(logit_bias={str(i): 1 for i in range(1025)}), "logit_bias", "at most 1024 tokens"),
        (text(colour="red"), "colour", "`colour` is not a field that /v1/completions takes here"),
        (text(n=2), "n", "`n=2` is not supported: a request gets one text (at most 1); send it several times"),
        (text(best_of=3), "best_of", "`best_of=3` is not supported"),
        (text(echo=True), "echo", "`echo=true` is not supported"),
        (text(logprobs=1), "logprobs", "`logprobs=1` is not supported"),
        (text(generation_config=5), "generation_config", OF_GENERATION),
        (text(generation_config="null"), "generation_config", OF_GENERATION),
        (text(generation_config="{"), "generation_config", OF_GENERATION),
        (config(num_return_sequences=2), None, "s=2` is not supported: a request is one row (at most 1)"),
        (config(num_beams=2), None, "`num_beams` is at most 1"),
        (config(temperature="hot"), None, 'temperature` must be a number from 0.01 to 100, not "hot"'),
        (config(top_k=-1), None, "`generation_config.top_k=-1` is too small: it must be at least 0"),
        (config(do_sample=1), None, "`generation_config.do_sample` must be true or false, not 1"),
        (config(max_length=9), None, "`generation_config.max_length` is not taken from clients: leave it out. These"),
        (config(use_cache=False), None, "drafts need the cache"),
        (config(bad_words_ids=[[]]), None, "must be a list of lists of tokens"),
        (config(suppress_tokens=[10**6]), None, "must be a list of tokens from 0 to"),
        (config(suppress_tokens=[-1]), None, "must be a list of tokens from 0 to"),
        (config(suppress_tokens=[*range(30)]), None, "name 30 tokens together, and at most"),
        (config(no_repeat_ngram_size=2), None, "may leave no token in a text of 1028"),
        (chat(content=[{"type": "text"}]), "messages[0].content[0].text", "must be a text, not null"),
        (chat(content=[{"type": "image_url"}]), "messages[0].content[0].type", "takes only text"),
        (chat(content=[5]), "messages[0].content[0]", "`messages[0].content[0]` is 5"),
        (chat(tool_calls=5), "messages[0].tool_calls", "must be a list"),
        (chat(tool_calls=[1]), "messages[0].tool_calls[0]", "an object with a `function`, not 1"),
        (chat(tool_calls=[{}]), "messages[0].tool_calls[0]", "an object with a `name`"),
        (
            chat(tool_calls=[{"function": {"name": "f", "arguments": "{"}}]),
            "messages[0].tool_calls[0].function.arguments",
            "an object, or such an object as JSON",
        ),
        (chat(tool_call_id=5), "messages[0].tool_call_id", "must be a text"),
        ({**chat(content="x"), "tools": [1]}, "tools[0]", "`tools[0]` must be an object"),
        ({**chat(content="x"), "tools": [{"function": 1}]}, "tools[0].function", "with a `name`"),
        ({**chat(content="x"), "tool_choice": "required"}, "tool_choice", "`auto` and `none`"),
        ({**chat(content="x"), "response_format": {"type": "json_object"}}, None, "as the model"),
        ({**chat(content="x"), "chat_template_kwargs": 5}, None, "must be an object, not 5"),
        (templated(chat_template="x"), "chat_template_kwargs.chat_template", "`--allow-chat-templates`"),
        (templated(max_length=9), "chat_template_kwargs.max_length", "not for clients to set"),
        ({"input": [1, 2]}, "input[0]", "`input[0]` must be an object with a `role` or a `type`, not 1"),
        ({"input": 5}, "input", "`input` must be a text or a list, not 5"),
        ({"input": []}, "input", "`input` is empty"),
        ({"input": [{"type": "magic"}]}, "input[0].type", 'is "magic", which this server does not know'),
        ({"input": [{"type": "function_call"}]}, "input[0].call_id", "must be a text, not null"),
        ({"input": "x", "previous_response_id": "y"}, "previous_response_id", "is not a field"),
    ],
)
def test_a_wrong_request_is_refused_with_the_reason(served, body, param, reason):
    by_field = {"prompt": "completions", "input": "responses", "": "chat/completions"}
    route = next(route for field, route in by_field.items() if field in str(body))
    status, error = served.post(f"/v1/{route}", body)
    assert reason in error["message"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert param is None or error["param"] == param


def test_a_request_whose_content_type_is_not_json_is_refused(served):
    status, error = served.post("/v1/completions", text(), kind="text/plain")
    assert (status, error["param"]) == (400, "content-type")
    assert "must be 'application/json'" in error["message"]


def refusal(tokenizer: Any, route: str, body: dict[str, Any], positions: int = 4096) -> dict[str, Any]:
    rules = asked.Rules(NAME, positions, vocabulary=40)
    return json.loads(preparing.answer(tokenizer, rules, route, json.dumps(body).encode()))["refused"]


def test_a_prompt_that_cannot_be_rendered_or_tokenised_is_refused(served):
    """The model's own template cannot render the messages, or the tokenizer raises."""
    tokenizer, body = AutoTokenizer.from_pretrained(served.tokenizer.name_or_path), chat(content="x")
    without = refusal(tokenizer, asked.CHAT, body)
    assert "the model has no chat template: send a `prompt` to /v1/completions" in without["message"]
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    raised = "the chat template cannot render them (TemplateError: roles must alternate)"
    assert raised in refusal(tokenizer, asked.CHAT, body)["message"]
    raised = "`prompt` cannot be rendered and tokenised (TypeError"
    assert raised in refusal(None, asked.COMPLETIONS, text())["message"]


def test_a_failure_of_the_server_is_an_error_of_openais_form(served, monkeypatch):
    fails = Mock(side_effect=RuntimeError("a secret"))
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


def rendered(served: Served, template: str) -> str:
    extra = {"chat_template_kwargs": {"chat_template": template, "word": "if a"}}
    return served.chat([{"role": "user", "content": "x"}], 8, extra_body=extra).choices[0].message.content


def test_a_clients_template_is_rendered_where_the_operator_allows_it(open_served):
    assert rendered(open_served, "{{ word }}") == open_served.plain("if a", 8)


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_that_takes_long_is_ended_and_others_are_answered(open_served, monkeypatch):
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
def test_a_template_that_takes_too_much_memory_is_refused(open_served):
    with pytest.raises(openai.BadRequestError, match=r"cannot render them \(MemoryError"):
        rendered(open_served, "{{ ('a' * 3000000000) | length }}")


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(served):
    tokenizer = Mock(side_effect=AssertionError("tokenised"))
    refused = refusal(tokenizer, asked.COMPLETIONS, text(prompt="é" * 81), positions=10)
    assert (refused["param"], refused["code"]) == ("prompt", "context_length_exceeded")
    status, error = served.post("/v1/completions", text(prompt="a" * 70_000))
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "the prompt has 70000 bytes, and the model is made for 4096 tokens" in error["message"]
    status, error = served.post("/v1/chat/completions", chat(content="a" * 70_000))
    assert "`messages`: the prompt has 700" in error["message"]


def test_a_request_beyond_the_longest_queue_is_refused(served, monkeypatch):
    monkeypatch.setattr(serving, "MOST_WAITING", 1)
    next(iter(stream := served.asked(max_tokens=4000, stream=True)))
    assert served.speculation()["waiting"] == 1
    with pytest.raises(openai.InternalServerError, match="at most 1 may wait: try again later") as refused:
        served.asked()
    assert refused.value.status_code == 503
    assert refused.value.response.headers["retry-after"]
    stream.close()
    served.until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_requests_whose_clients_have_gone_are_cancelled(served, stream):
    """The one that is answered, and those that wait."""
    before, clients = served.speculation(), []
    for _ in range(6):
        clients.append(http.client.HTTPConnection("127.0.0.1", served.port, timeout=30))
        body = json.dumps(text(max_tokens=4000, stream=stream))
        clients[-1].request("POST", "/v1/completions", body, {"content-type": "application/json"})
    wait_until(lambda: served.speculation()["waiting"] == 6, "they did not arrive")
    for client in clients:
        client.close()
    after = served.until_idle()
    assert after["cancelled"] == before["cancelled"] + 6
    assert after["requests"] == before["requests"]


def test_a_client_that_goes_before_its_body_is_sent_leaves_no_request(served):
    client = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    client.putrequest("POST", "/v1/completions")
    client.putheader("content-type", "application/json")
    client.putheader("content-length", "1000")
    client.endheaders(b"{")
    client.close()
    served.until_idle()


# ---------------------------------------------------------------------- seeds


def test_a_seed_gives_plain_generates_sample_with_several_clients_at_once(served):
    alone = [served.sampled(seed) for seed in range(8)]
    assert len({*alone}) == 8
    torch.manual_seed(5)
    assert alone[5] == served.plain(PROMPT, 32, **SAMPLED)
    with ThreadPoolExecutor(8) as clients:
        assert list(clients.map(served.sampled, range(8))) == alone


def test_a_seed_does_not_fix_the_text_after_it(served):
    after = []
    for _ in range(2):
        served.sampled(5, 1)
        after.append(served.sampled(None))
    assert after[0] != after[1]


def test_a_temperature_above_zero_samples(served):
    assert len({served.asked(temperature=1.5, seed=seed).choices[0].text for seed in range(4)}) == 4
    assert served.asked(temperature=0, seed=5).choices[0].text == served.plain(PROMPT, 24)


# ---------------------------------------------------------------------- the key


@pytest.mark.parametrize("path", ["/v1/models", "/speculation", "/v1/nothing", "/docs"])
@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer sesam"}, {"Authorization": "sesame"}])
def test_every_route_but_health_asks_for_the_key(open_served, path, header):
    assert open_served.get("/health") == {"status": "ok"}
    with pytest.raises(urllib.error.HTTPError) as refused:
        open_served.get(path, **header)
    error = json.load(refused.value)["error"]
    assert (refused.value.code, error["code"]) == (401, "invalid_api_key")
    assert "`authorization` must be 'Bearer KEY'" in error["message"]


def test_a_request_without_the_key_is_refused_and_the_right_key_lists_the_model(open_served, monkeypatch):
    """Keys are compared in constant time."""
    status, error = open_served.post("/v1/completions", text())
    assert (status, error["param"]) == (401, "authorization")
    monkeypatch.setattr(hmac, "compare_digest", compare := Mock(wraps=hmac.compare_digest))
    assert [model.id for model in open_served.client.models.list()] == [NAME]
    compare.assert_called_once_with(b"Bearer sesame", b"Bearer sesame")


@pytest.mark.parametrize("key", ["", "two words", "clé"])
def test_a_key_that_no_header_can_hold_is_refused(start, key):
    with pytest.raises(ValueError, match="`api_key` must be one or more printable ASCII characters"):
        start(api_key=key)


# ---------------------------------------------------------------------- the shapes of answers


def test_an_answer_has_its_usage_and_the_requests_id(served):
    answer = served.asked(max_tokens=9, extra_headers={"x-request-id": "mine-1"})
    usage = answer.usage
    assert (answer.id, usage.completion_tokens) == ("mine-1", 9)
    assert (usage.prompt_tokens, usage.total_tokens) == (len(PROMPT), len(PROMPT) + 9)
    chunks = list(served.asked(max_tokens=9, stream=True, extra_headers={"x-request-id": "not mine!"}))
    assert chunks[-1].usage == usage
    assert chunks[0].id != "not mine!"


def test_a_suffix_is_appended_to_the_text(served):
    assert served.asked(max_tokens=9, suffix=" end").choices[0].text == served.plain(PROMPT, 9) + " end"
    assert [chunk.choices[0].text for chunk in served.asked(max_tokens=9, suffix=" end", stream=True)][-2] == " end"


def test_text_parts_and_tool_calls_reach_the_chat_template(served):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    read = {**call, "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "if a"}, {"type": "text", "text": "x"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "z"},
    ]
    expected = [
        {"role": "user", "content": "if a x"},
        {"role": "assistant", "content": "", "tool_calls": [read]},
        {"role": "tool", "content": "z", "tool_call_id": "1"},
    ]
    rules = asked.Rules("", 99, 40)
    assert asked.understand(json.dumps({"messages": messages}).encode(), asked.CHAT, rules).messages == expected
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "if a x"}]},
        {"type": "reasoning", "content": [], "summary": []},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "z"},
    ]
    body = json.dumps({"input": items, "instructions": "be brief"}).encode()
    del expected[1]["tool_calls"][0]["type"]
    said_before = {"role": "system", "content": "be brief"}
    assert asked.understand(body, asked.RESPONSES, rules).messages == [said_before, *expected]


TOLD = [
    answering.Reasoning("so "),
    answering.Reasoning("be it"),
    answering.Text("yes"),
    answering.ToolCall("f", '{"x": 1}'),
    answering.ToolCall("g", "{}"),
]


def test_reasoning_and_tool_calls_have_the_shapes_of_openai():
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


def told_of(parser: Any, tokenizer: Any, text: str, stream: bool = True) -> list[Any]:
    """What a client gets of a text that is written token by token, after a prompt."""
    told: list[Any] = []
    job = Mock(asked=asked.Asked(stream=stream), say=lambda *events: told.extend(events))
    writer = answering.Writer(job, parser, tokenizer)
    writer.put(torch.tensor([[5, 6]]))
    for token in tokenizer(text).input_ids:
        writer.put(torch.tensor([token]))
    writer.finish()
    return told


@pytest.mark.parametrize("stream", [False, True])
def test_the_parser_of_transformers_separates_reasoning_from_text(served, stream):
    tokenizer = AutoTokenizer.from_pretrained(served.tokenizer.name_or_path)
    thinking = {"open": "(", "close": ")", "content": "text"}
    fields = {"reasoning_content": thinking, "content": {"content": "text"}}
    tokenizer.response_template = {"start_anchor": "if a", "fields": fields}
    parser = private_api.response_parser(tokenizer, served.target, tokenizer("if a").input_ids, None)
    if parser is None:
        pytest.skip("this version of transformers has none")
    told = told_of(parser, tokenizer, "(so be it)x = [", stream)
    assert "".join(piece.text for piece in told if isinstance(piece, answering.Reasoning)) == "so be it"
    assert "".join(piece.text for piece in told if isinstance(piece, answering.Text)) == "x = ["
    assert (len(told) > 2) == stream


def test_an_invalid_tool_call_is_answered_as_text(served):
    """The parser raises at it, as transformers' `ResponseParser` does."""

    def feed(text: str) -> list[dict[str, Any]]:
        if "x" in text:
            raise ValueError("no JSON")
        return [{"type": "region_chunk", "field": "content", "text": text}]

    finalize = Mock(side_effect=ValueError("in the middle of a call"))
    parser = SimpleNamespace(initial_events=(), feed=feed, finalize=finalize)
    assert "".join(told.text for told in told_of(parser, served.tokenizer, "a = x[")) == "a = x["


def test_answers_without_a_parser_are_plain_text(served, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.cli.serving.utils", None)
    assert private_api.response_parser(served.tokenizer, served.target, [5], None) is None
    messages = chat(content="x")["messages"]
    assert served.chat(messages, 9).choices[0].message.content == served.plain(messages, 9)


def test_completions_are_not_parsed(served, monkeypatch):
    monkeypatch.setattr(answering, "response_parser", lambda *_: pytest.fail("parsed"))
    assert served.asked(max_tokens=9).choices[0].text == served.plain(PROMPT, 9)


def test_a_tool_call_is_sent_only_when_it_is_whole():
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    events = [
        {"type": "region_open", "field": "tool_calls"},
        {"type": "region_chunk", "field": "tool_calls", "text": "{", "dirty": True},
        {"type": "region_close", "field": "tool_calls", "value": call},
    ]
    assert [*answering._told(events)] == [answering.ToolCall("f", '{"x": 1}')]


@pytest.mark.parametrize("path", ["/reset", "/load_model", "/v1/audio/transcriptions"])
def test_models_cannot_be_loaded_or_unloaded_by_clients(served, path):
    assert served.post(path, b'{"model": "org/another"}')[0] == 404


# ---------------------------------------------------------------------- the command


def test_learning_pauses_for_requests_and_stops_with_the_server(folder):
    """The teacher never comes to an end by himself."""
    target, tokenizer, heads = parts_of(folder)
    idle_step = Mock(side_effect=lambda: time.sleep(0.001) or True)
    heads.learner = Mock(tokens=0, idle_step=idle_step)
    with running(serving.make_app(target, tokenizer, heads, NAME)) as port:
        served = Served(folder, port)
        for text in TEXTS[:3]:
            assert served.asked(text, max_tokens=12).choices[0].text == served.plain(text, 12)
            idle_step.reset_mock()
            wait_until(lambda: idle_step.called, "it did not learn after the request")


def test_heads_learn_between_requests(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(online, "LEAST", 40)
    target, tokenizer, heads = parts_of(folder)
    app = serving.make_app(target, tokenizer, heads, NAME)
    with online.OnlineLearner(heads, target, tmp_path, share=0.0) as learner, running(app) as port:
        served = Served(folder, port)
        for count in (1, 2, 3):
            assert served.asked(max_tokens=60).choices[0].text == served.plain(PROMPT, 60)
            wait_until(lambda count=count: learner.steps >= count, "it did not learn")
        assert served.speculation()["tokens_learned_from"] == learner.tokens
    assert CloverHeads.from_pretrained(tmp_path).config.num_heads == 3


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> Callable[..., Any]:
    """The command -> what would be served, and how; and what it says on the way."""

    served = SimpleNamespace()

    def keep(target: Any, tokenizer: Any, heads: CloverHeads, *_: Any, **options: Any) -> None:
        vars(served).update(target=target, heads=heads, learner=heads.learner, options=options)

    def call(*words: str) -> SimpleNamespace:
        said = run("serve", *words)
        assert said.code == 0, said.err
        served.err = said.err
        return served

    monkeypatch.setattr(serving, "serve", keep)

    return call


def test_serve_with_learn_serves_heads_that_learn(serve, models, tmp_path):
    served = serve(*models[:2], "--learn", str(tmp_path / "mine"), "--num-assistant-tokens", "5")
    assert served.learner.folder == tmp_path / "mine"
    assert served.target.generation_config.num_assistant_tokens == 5
    assert CloverHeads.from_pretrained(tmp_path / "mine").generation_config.num_assistant_tokens is None


def test_the_command_serves_the_target_with_its_heads(monkeypatch, run, models):
    monkeypatch.setattr(uvicorn, "run", ran := Mock())
    assert run("serve", *models, "--port", "8123", "--num-assistant-tokens", "5").code == 0
    assert (ran.call_args.kwargs["host"], ran.call_args.kwargs["port"]) == ("localhost", 8123)
    assert "/v1/chat/completions" in {route.path for route in ran.call_args.args[0].routes}


def test_serve_with_remember_gives_the_heads_a_text_memory(serve, models):
    assert serve(*models).heads.text_memory is None
    assert serve(*models, "--remember", "100").heads.text_memory.most_tokens == 100


@pytest.mark.parametrize(
    ("words", "in_environment", "key", "is_warned_of"),
    [
        ([], None, None, False),
        (["--host", "0.0.0.0"], None, None, True),
        (["--api-key", "sesame", "--allow-chat-templates", "--host", "0.0.0.0"], None, "sesame", False),
        ([], "open", "open", False),
    ],
)
def test_serve_takes_the_key_from_its_options_or_the_environment(
    serve, models, monkeypatch, words, in_environment, key, is_warned_of
):
    monkeypatch.delenv("HF_CLOVER_API_KEY", raising=False)
    if in_environment:
        monkeypatch.setenv("HF_CLOVER_API_KEY", in_environment)
    served = serve(*models, *words)
    assert served.options["api_key"] == key
    assert served.options["allow_chat_templates"] == ("--allow-chat-templates" in words)
    assert ("0.0.0.0 without a key" in served.err) == ("without a key" in served.err) == is_warned_of


def test_serve_refuses_what_it_cannot_do_with_the_way_out(run, models, monkeypatch):
    def refusal(*words: str) -> str:
        said = run("serve", *words)
        assert said.code == 2
        return said.err

    assert "takes one token a row and step" in refusal("--continuous-batching")
    assert "`transformers serve` serves the target" in refusal(*models[:2])
    monkeypatch.setattr(serving, "has_package", lambda name: name != "fastapi")
    assert "pip install 'hf-clover[serve]'" in refusal(*models)
