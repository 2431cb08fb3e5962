"""Data from the target itself: resumable, complete, errors kept, from generate, from heads or from a server."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from datasets import Dataset, load_dataset
from tiny import make_target, make_tokenizer, make_trainer

from hf_clover import CloverHeads
from hf_clover.training import EndpointAnswers, TargetAnswers, regenerate

pytestmark = pytest.mark.long("hf_clover/network")

PROMPTS = Dataset.from_dict({"prompt": ["w1 w2 w3", "w4", "w5 w6", "w7 w8 w9 w10", "w11"]})
ANSWER = {"role": "assistant", "content": "w40"}
CHATS = Dataset.from_dict({"messages": [[{"role": "user", "content": f"w{i}"}, ANSWER] * 2 for i in range(3)]})


class Echo:
    """Answers that repeat the prompt, fail on some of them and may break off."""

    def __init__(self, fails_on: tuple[str, ...] = (), breaks_after: int | None = None) -> None:
        self.fails_on, self.breaks_after, self.asked = fails_on, breaks_after, list[Any]()
        self.settings = {"model": "echo"}

    def __call__(self, prompts: list[Any]) -> Iterator[tuple[int, str | Exception]]:
        for place, prompt in enumerate(prompts):
            if self.breaks_after is not None and len(self.asked) >= self.breaks_after:
                raise KeyboardInterrupt
            self.asked.append(prompt)
            yield place, ValueError("too hard") if prompt in self.fails_on else f"{prompt} again"


def test_an_interrupted_run_goes_on_after_its_last_sample(tmp_path: Path) -> None:
    whole = regenerate(PROMPTS, Echo(), tmp_path / "whole")
    assert whole["completion"][:] == [f"{prompt} again" for prompt in PROMPTS["prompt"]]
    with pytest.raises(KeyboardInterrupt):
        regenerate(PROMPTS, Echo(breaks_after=2), tmp_path / "parts")
    with open(next((tmp_path / "parts" / ".progress").glob("answers-*.jsonl")), "a") as file:
        file.write('\n{"index": 2, "prompt": "w5 w6", "comple')  # killed while writing
    second = Echo()
    parts = regenerate(PROMPTS, second, tmp_path / "parts")
    assert second.asked == PROMPTS["prompt"][2:]
    assert parts.to_list() == whole.to_list()
    third = Echo()
    regenerate(PROMPTS, third, tmp_path / "parts")
    assert third.asked == []


def test_errors_are_kept_reported_and_tried_again(tmp_path: Path, transformers_log: pytest.LogCaptureFixture) -> None:
    answers = regenerate(PROMPTS, Echo(fails_on=("w4", "w11")), tmp_path)
    assert answers["prompt"][:] == ["w1 w2 w3", "w5 w6", "w7 w8 w9 w10"]
    errors = [json.loads(line) for line in (tmp_path / "errors.jsonl").read_text().splitlines()]
    assert [(line["index"], line["prompt"], line["error"]) for line in errors] == [
        (1, "w4", "ValueError: too hard"),
        (4, "w11", "ValueError: too hard"),
    ]
    assert "2 of 5 samples failed, the first with 'ValueError: too hard'" in transformers_log.text
    again = Echo(fails_on=("w11",))
    answers = regenerate(PROMPTS, again, tmp_path)
    assert again.asked == ["w4", "w11"]
    assert answers["prompt"][:] == ["w1 w2 w3", "w4", "w5 w6", "w7 w8 w9 w10"]
    assert len((tmp_path / "errors.jsonl").read_text().splitlines()) == 1


def test_a_run_without_any_answer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="No sample was answered: ValueError: too hard"):
        regenerate(PROMPTS, Echo(fails_on=tuple(PROMPTS["prompt"])), tmp_path)


def test_a_folder_of_another_dataset_or_other_settings_is_refused(tmp_path: Path) -> None:
    regenerate(PROMPTS, Echo(), tmp_path)
    other = Echo()
    other.settings = {"model": "another"}
    with pytest.raises(ValueError, match=r"`output_dir` .* other settings: settings differ"):
        regenerate(PROMPTS, other, tmp_path)
    with pytest.raises(ValueError, match=r"another dataset .*: samples, first_samples_sha256 differ"):
        regenerate(PROMPTS.select(range(2)), Echo(), tmp_path)


def test_a_dataset_without_prompts_is_refused_and_an_empty_prompt_skipped(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"columns \['text'\] and no prompts"):
        regenerate(Dataset.from_dict({"text": ["w1"]}), Echo(), tmp_path)
    answers = regenerate(Dataset.from_dict({"prompt": ["w1", ""]}), Echo(), tmp_path)
    assert len(answers) == 1
    assert "empty prompt" in (tmp_path / "errors.jsonl").read_text()


def test_answers_are_the_targets_own_with_heads_and_without(tmp_path: Path) -> None:
    target, tokenizer = make_target(), make_tokenizer()
    heads = CloverHeads.from_target(target, num_heads=2)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    plain = regenerate(PROMPTS, TargetAnswers(target, tokenizer, batch_size=2, **options), tmp_path / "plain")
    drafted = regenerate(PROMPTS, TargetAnswers(target, tokenizer, heads, batch_size=2, **options), tmp_path / "heads")
    assert plain.to_list() == drafted.to_list()
    ids = tokenizer(PROMPTS[0]["prompt"], return_tensors="pt")
    alone = target.generate(**ids, **options)[0, ids["input_ids"].shape[1] :]
    assert plain[0]["completion"] == tokenizer.decode(alone, skip_special_tokens=True)


def test_one_bad_prompt_does_not_spoil_its_batch(tmp_path: Path) -> None:
    target, tokenizer = make_target(), make_tokenizer()
    generate = target.generate

    def picky(**inputs: Any) -> Any:
        if (inputs["input_ids"] == tokenizer.convert_tokens_to_ids("w4")).any():
            raise RuntimeError("no memory")
        return generate(**inputs)

    target.generate = picky
    answers = regenerate(PROMPTS, TargetAnswers(target, tokenizer, batch_size=5, max_new_tokens=3), tmp_path)
    assert len(answers) == 4
    assert "RuntimeError: no memory" in (tmp_path / "errors.jsonl").read_text()


def test_a_folder_of_answers_can_be_trained_on(tmp_path: Path) -> None:
    target, tokenizer = make_target(), make_tokenizer()
    regenerate(CHATS, TargetAnswers(target, tokenizer, max_new_tokens=8, min_new_tokens=8), tmp_path / "chats")
    dataset = load_dataset(str(tmp_path / "chats"), split="train")
    assert [len(prompt) for prompt in dataset["prompt"]] == [3, 3, 3]  # up to the last message of the user
    assert all(completion[0]["role"] == "assistant" for completion in dataset["completion"])
    make_trainer(tmp_path / "out", target, dataset).train()


class Server(BaseHTTPRequestHandler):
    seen: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append({**request, "path": self.path, "key": self.headers.get("Authorization")})
        text = request["messages"][-1]["content"]
        status = 500 if text == "w4" else 200
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": f"re {text}"}}
        body = json.dumps({"id": "1", "created": 0, "model": "m", "choices": [choice], "usage": {}}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    Server.seen.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_an_endpoint_is_asked_with_its_settings_and_answers_are_kept(tmp_path: Path, endpoint: str) -> None:
    answers = EndpointAnswers(endpoint, "target", api_key="secret", concurrency=2, max_tokens=7, temperature=0.0)
    dataset = regenerate(PROMPTS, answers, tmp_path / "texts")
    assert dataset["completion"][:] == ["re w1 w2 w3", "re w5 w6", "re w7 w8 w9 w10", "re w11"]
    assert "500" in (tmp_path / "texts" / "errors.jsonl").read_text()
    first = Server.seen[0]
    assert (first["path"], first["key"], first["model"]) == ("/v1/chat/completions", "Bearer secret", "target")
    assert (first["max_tokens"], first["temperature"]) == (7, 0.0)
    chats = regenerate(CHATS, answers, tmp_path / "chats")
    assert chats[0]["completion"] == [{"role": "assistant", "content": "re w0"}]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_and_exit_are_not_kept_as_answers_of_an_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    monkeypatch.setattr(EndpointAnswers, "_answer", Mock(side_effect=kind))
    with pytest.raises(kind):
        regenerate(PROMPTS, EndpointAnswers("http://127.0.0.1:9/v1", "target"), tmp_path)
    assert not (tmp_path / ".progress" / "answers-00000.jsonl").read_text()
