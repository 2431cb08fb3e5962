"""`hf-clover serve` over loopback, with the official client: plain generate's tokens, and a server that lives on."""

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import uvicorn
from tiny_text import ASCII, CHAT_TEMPLATE, PROMPT, save_folders
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_clover import CloverHeads, cli
from hf_clover.apps import serving
from hf_clover.cli import serving as command

pytestmark = pytest.mark.long("hf_clover/apps")

NAME = "tiny"
TEXTS = (PROMPT, "for x in", "if a", "while ", "import ", "x = [")


class Served:
    """The models, and where they are served."""

    def __init__(self, folder: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)
        self.target = AutoModelForCausalLM.from_pretrained(folder / "target")
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "target")
        self.tokenizer.chat_template = CHAT_TEMPLATE

    def plain(self, text: str, new: int) -> str:
        inputs = self.tokenizer(text, return_tensors="pt")
        out = self.target.generate(**inputs, max_new_tokens=new, do_sample=False)
        return self.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    def asked(self, prompt: str = PROMPT, max_tokens: int = 24, **fields: Any) -> Any:
        return self.client.completions.create(model=NAME, prompt=prompt, max_tokens=max_tokens, **fields)

    def speculation(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/speculation", timeout=10) as answer:
            return json.load(answer)

    def post(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and error of a request that no client would send."""
        request = urllib.request.Request(self.url + path, body, {"content-type": "application/json"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        return refused.value.code, json.load(refused.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folders(tmp_path_factory.mktemp("served"), says=ASCII)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    models = Served(folder, port)
    heads = CloverHeads.from_pretrained(folder / "heads")
    heads.generation_config.num_assistant_tokens = 8
    app = serving.make_app(AutoModelForCausalLM.from_pretrained(folder / "target"), models.tokenizer, heads, NAME)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.02)
    yield models
    server.should_exit = True
    thread.join(timeout=20)
    assert not thread.is_alive()


@pytest.fixture(autouse=True)
def _lives_on(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did to the server: the next request is answered, and rightly."""
    yield
    if "served" in request.fixturenames:
        served = request.getfixturevalue("served")
        assert served.asked(max_tokens=6).choices[0].text == served.plain(PROMPT, 6)


# ---------------------------------------------------------------------- what clients get


def test_a_completion_is_plain_generates_and_drafts_were_accepted(served: Served) -> None:
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
def test_chat(served: Served, stream: bool) -> None:
    messages = [{"role": "user", "content": "def f"}, {"role": "assistant", "content": "x"}]
    messages.append({"role": "user", "content": "for x in"})
    answer = served.client.chat.completions.create(model=NAME, messages=messages, max_tokens=24, stream=stream)
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    else:
        text = answer.choices[0].message.content
    prompt = served.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == served.plain(prompt, 24)


def test_responses(served: Served) -> None:
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


def test_stop_strings(served: Served) -> None:
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


def test_an_answer_ends_where_the_positions_do(served: Served) -> None:
    answer = served.asked("a" * 4090, max_tokens=100)
    assert answer.usage.completion_tokens == 6


def test_a_body_that_is_too_large_is_refused(served: Served) -> None:
    body = json.dumps({"model": NAME, "prompt": "a" * serving.MOST_BYTES}).encode()
    status, answer = served.post("/v1/completions", body)
    assert status == 413
    assert "larger than 8 MiB" in answer["error"]["message"]


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
    status, answer = served.post("/v1/chat/completions", body)
    assert status == 400
    assert reason in answer["error"]["message"]


def test_what_heads_cannot_do_is_refused_before_a_stream_begins(served: Served) -> None:
    settings = {"generation_config": json.dumps({"num_beams": 4, "max_new_tokens": 4})}
    with pytest.raises(openai.BadRequestError, match="num_beams"):
        served.asked(stream=True, extra_body=settings)


def test_another_model_is_refused(served: Served) -> None:
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


def test_the_command_remembers_texts_where_it_is_asked_to(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    served: list[CloverHeads] = []
    monkeypatch.setattr(serving, "serve", lambda target, tokenizer, heads, *_: served.append(heads))
    models = ["--target", str(folder / "target"), "--heads", str(folder / "heads")]
    for words in ([], ["--remember", "100"]):
        assert not run(monkeypatch, *models, *words)
    assert served[0].text_memory is None
    assert served[1].text_memory.most_tokens == 100


def test_continuous_batching_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--continuous-batching") == 2
    assert "takes one token a row and step" in capsys.readouterr().err


def test_without_heads_there_is_another_command(
    monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--target", str(folder / "target")) == 2
    assert "`transformers serve` serves the target" in capsys.readouterr().err


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "is_serve_available", lambda: False)
    assert run(monkeypatch, "--target", str(folder / "target"), "--heads", str(folder / "heads")) == 2
    assert "pip install 'hf-clover[serve]'" in capsys.readouterr().err


def test_the_command_is_described(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--help") == 0
    assert "Example: hf-clover serve" in capsys.readouterr().out
    assert command.serve.__doc__
