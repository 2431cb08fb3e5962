"""Attacks on `hf-clover serve`, for as long as one likes, on this machine alone.

    python tests/soak_server.py --minutes 5            # random attacks, several at once
    python tests/soak_server.py --count 300            # so many
    python tests/soak_server.py --case 1234            # this one alone, with everything that was drawn for it

Contract: `draw(seed)` is one attack, the same for the same seed: templates that never end or want gigabytes, prompts
of megabytes, many rows, wrong keys, clients that hang up, half bodies, random bodies, fields of random types; among
them seeded requests, streamed or not, whose texts must be those of plain `generate` alone. The server is a process of
its own at 127.0.0.1, with a key and a tiny target; it renders its clients' templates and gives each 2 seconds. A fault
is: an answer that is neither complete nor OpenAI's error object, a 500, an error that repeats the body, a seeded text
that is another, `/health` without an answer for 10 seconds, requests that are left in the line, or memory that stays.
Exits with 1 where there was one.
"""

import argparse
import http.client
import itertools
import json
import logging
import math
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from helpers.own_process import memory_in_mib
from helpers.tiny_text import ASCII, CHAT_TEMPLATE, PROMPT, save_folders
from transformers import AutoModelForCausalLM, AutoTokenizer

KEY, NAME = "sesame", "tiny"
CLIENTS = 6
SECONDS = 2.0  # that the server gives a request to be rendered and tokenised
HEALTH_SECONDS = 10.0
MOST_GROWTH = 300  # MiB that the server may keep
ROUTES = {"chat": "/v1/chat/completions", "text": "/v1/completions", "input": "/v1/responses"}
SETTINGS = {"do_sample": True, "temperature": 0.9, "max_new_tokens": 24}
PROMPTS = (PROMPT, "for x in", "if a", "while ", "import ", "x = [")
SEEDS = 24

TEMPLATES = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ ('a' * 3000000000) | length }}",
    "{{ 'a' * 50000000 }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages[0].x.y.z }}",
    "{% for m in messages %}",
    "{{ 9 ** 9 ** 9 }}",
    "",
]
CONFIGS: list[Any] = [
    *(5, [1], "null", "[1]", "{", "5", '"x"', {"num_return_sequences": 100_000}, {"num_beams": 50}),
    *({"max_length": 10**12}, {"min_new_tokens": 10**9, "max_new_tokens": 4}, {"cache_implementation": "static"}),
    *({"temperature": "hot"}, {"top_k": -5}, {"eos_token_id": [10**9]}, {"bad_words_ids": [[[]]]}),
    *({"use_cache": False}, {"suppress_tokens": [*range(40)]}, {"no_repeat_ngram_size": 1}),
    *({"watermarking_config": {}}, {"max_time": -1}),
]
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**64, 10**400, 1.5, 1e308),
    *("", "x", "\ud800", "x\udfff", "\x00", "a" * 3000),
    *([], {}, [1], [None], ["x"], [[]], [{}], {"a": 1}, {"type": "text"}, [{"type": "text"}], [{"role": "user"}]),
    *([{"role": 5}], [{"type": "function_call"}], {"function": None}, [[[[[[[[[1]]]]]]]]]),
]
FIELDS = {
    "chat": ("messages", "tools", "tool_choice", "chat_template_kwargs", "response_format", "logit_bias", "n"),
    "text": ("prompt", "suffix", "echo", "best_of", "logprobs", "logit_bias", "n"),
    "input": ("input", "instructions", "tools", "text", "truncation", "include", "previous_response_id"),
}
ALL = ("model", "stream", "temperature", "top_p", "seed", "stop", "generation_config", "max_tokens", "user", "colour")


@dataclass
class Attack:
    seed: int
    kind: str
    path: str = "/v1/completions"
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    leaves: float | None = None  # hangs up after so many seconds
    wanted: str | None = None  # the text of a seeded request
    statuses: tuple[int, ...] = (200, 400, 413)


def valid(route: str, rng: random.Random) -> dict[str, Any]:
    words, tokens = rng.choice(PROMPTS), rng.choice([1, 8, 40])
    if route == "chat":
        return {"messages": [{"role": "user", "content": words}], "max_tokens": tokens}
    if route == "text":
        return {"prompt": words, "max_tokens": tokens}
    return {"input": words, "max_output_tokens": tokens}


def draw(seed: int) -> Attack:
    rng = random.Random(seed)
    route = rng.choice([*ROUTES])
    attack = Attack(seed, "", ROUTES[route], headers={"authorization": f"Bearer {KEY}"})
    attack.headers["content-type"] = "application/json"
    body: Any = valid(route, rng)
    attack.kind = rng.choices([*WEIGHTS], [*WEIGHTS.values()])[0]
    if attack.kind == "seeded":
        attack.path, body = ROUTES["text"], {"prompt": rng.choice(PROMPTS), "seed": rng.randrange(SEEDS)}
        attack.wanted = f"{body['prompt']}/{body['seed']}"
        body |= {"generation_config": rng.choice([SETTINGS, json.dumps(SETTINGS)]), "stream": rng.random() < 0.5}
        attack.statuses = (200,)
    elif attack.kind == "template":
        attack.path, body = ROUTES["chat"], valid("chat", rng)
        body["chat_template_kwargs"] = {"chat_template": rng.choice(TEMPLATES)}
    elif attack.kind == "long":
        attack.path = ROUTES["text"]
        body = {"prompt": rng.choice(["a", "é", "ab ", "\n"]) * rng.choice([4095, 5000, 60_000, 200_000, 4 << 20])}
        body["max_tokens"] = 2
    elif attack.kind == "settings":
        body["generation_config"] = rng.choice(CONFIGS)
    elif attack.kind == "field":
        body[rng.choice([*FIELDS[route], *ALL])] = rng.choice(ODD)
    elif attack.kind == "inside":
        _spoil(body, rng)
    elif attack.kind == "key":
        keys = ["", "Bearer", "Bearer sesam", f"Basic {KEY}", f"Bearer {KEY}x"]
        attack.headers["authorization"] = rng.choice(keys)
        attack.statuses = (401,)
    elif attack.kind == "leaves":
        body["max_tokens" if route != "input" else "max_output_tokens"] = 3000
        body["stream"], attack.leaves = rng.random() < 0.5, rng.choice([0.0, 0.02, 0.3])
    elif attack.kind == "header":
        attack.headers |= {rng.choice(["content-type", "x-request-id"]): rng.choice(["text/plain", "a b", "x" * 500])}
    content = json.dumps(body).encode()
    if attack.kind == "bytes":
        contents = [rng.randbytes(rng.randrange(200)), content[: rng.randrange(len(content))]]
        contents += [b"[" * 50_000, b'{"a":' * 50_000, b"9" * 5000, b'{"prompt": "\xff\xfe"}']
        contents += [b'{"prompt": 1e999, "top_p": NaN}', content.replace(b'"', b"'"), b""]
        content = rng.choice(contents)
        attack.statuses = (400, 413)
    elif attack.leaves is not None and rng.random() < 0.3:
        attack.headers["content-length"] = str(len(content) + 1000)  # of which the rest never comes
    attack.body = content
    return attack


WEIGHTS = dict(
    seeded=8, field=8, inside=8, leaves=5, settings=4, bytes=3, key=2, long=2, valid=2, template=1, header=1
)


def _spoil(value: Any, rng: random.Random) -> None:
    """Something somewhere inside becomes something else."""
    places = [*value] if isinstance(value, dict) else [*range(len(value))]
    if not places:
        return
    place = rng.choice(places)
    if isinstance(value[place], dict | list) and rng.random() < 0.8:
        return _spoil(value[place], rng)
    if isinstance(value, dict) and rng.random() < 0.4:
        place = rng.choice(["content", "role", "tool_calls", "tool_call_id", "type", "text", "name", place])
    value[place] = rng.choice(ODD)


# ---------------------------------------------------------------------- one attack


def run(attack: Attack, port: int, texts: dict[str, str]) -> str | None:
    """What is wrong with the answer."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        client.request("POST", attack.path, attack.body, attack.headers)
        if attack.leaves is not None:
            time.sleep(attack.leaves)
            return None
        answer = client.getresponse()
        return judge(attack, answer.status, answer.getheader("content-type", ""), answer.read(), texts)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        client.close()


def judge(attack: Attack, status: int, kind: str, content: bytes, texts: dict[str, str]) -> str | None:
    said = f"{status} {content[:300]!r}"
    if status not in attack.statuses:
        return f"status {said}, and {attack.statuses} may be"
    if kind.startswith("text/event-stream"):
        events = [json.loads(line[6:]) for line in content.decode().splitlines() if line.startswith("data: {")]
        if any("error" in event or event.get("type") == "error" for event in events):
            return f"an error in a stream: {said}"
        if not content.endswith(b"data: [DONE]\n\n") and events[-1].get("type") != "response.completed":
            return f"a stream that does not end: {said}"
        text = "".join(event["choices"][0].get("text", "") for event in events if "choices" in event)
    else:
        try:
            answer = json.loads(content)
        except ValueError:
            return f"no JSON: {said}"
        if status != 200:
            return _judge_error(answer, content, said)
        if not answer.get("choices") and not answer.get("output"):
            return f"no answer: {said}"
        text = answer["choices"][0].get("text", "") if "choices" in answer else ""
    if attack.wanted is not None and text != texts[attack.wanted]:
        return f"the seeded text {text!r} instead of {texts[attack.wanted]!r}"
    return None


def _judge_error(answer: Any, content: bytes, said: str) -> str | None:
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict) or error.keys() != {"message", "type", "param", "code"}:
        return f"no error object of OpenAI's form: {said}"
    if len(content) > 2000:
        return f"an error of {len(content)} bytes: {said}"
    return None


# ---------------------------------------------------------------------- the server


def serve(folder: Path) -> None:
    """In a process of its own, until standard input is closed. Prints its port."""
    from helpers.loopback import running

    from hf_clover import CloverHeads
    from hf_clover.apps import preparing, serving

    preparing.SECONDS = SECONDS
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    tokenizer.chat_template = CHAT_TEMPLATE
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    heads = CloverHeads.from_pretrained(folder / "heads")
    heads.generation_config.num_assistant_tokens = 8
    app = serving.make_app(target, tokenizer, heads, NAME, api_key=KEY, allow_chat_templates=True)
    with running(app) as port:
        print(port, flush=True)
        sys.stdin.read()


@contextmanager
def served(folder: Path) -> Iterator[tuple[int, int]]:
    """Port and process."""
    words = [sys.executable, __file__, "--serve", str(folder)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield int(process.stdout.readline()), process.pid
    finally:
        process.stdin.close()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()


def get(port: int, path: str, timeout: float = 60.0) -> dict[str, Any]:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        client.request("GET", path, headers={"authorization": f"Bearer {KEY}"})
        return json.loads(client.getresponse().read())
    finally:
        client.close()


class Health(threading.Thread):
    """Asks all the time."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port, self.is_over, self.answers, self.worst, self.fault = port, threading.Event(), 0, 0.0, None

    def run(self) -> None:
        while not self.is_over.wait(0.05):
            begun = time.monotonic()
            try:
                get(self.port, "/health", HEALTH_SECONDS)
                self.answers += 1
            except OSError as error:
                self.fault = f"/health: {type(error).__name__}: {error}"
            self.worst = max(self.worst, time.monotonic() - begun)


# ---------------------------------------------------------------------- many


@dataclass
class Found:
    tried: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    said: dict[str, Any] = field(default_factory=dict)


def alone(folder: Path) -> dict[str, str]:
    """Plain `generate`'s texts by prompt and seed."""
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    texts = {}
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            out = target.generate(**inputs, **SETTINGS)[0, inputs["input_ids"].shape[1] :]
            texts[f"{prompt}/{seed}"] = tokenizer.decode(out, skip_special_tokens=True)
    return texts


def soak(seeds: Iterator[int], minutes: float = math.inf, count: int | None = None) -> Found:
    found = Found()
    with tempfile.TemporaryDirectory() as kept:
        folder = save_folders(Path(kept), says=ASCII)
        texts = alone(folder)
        with served(folder) as (port, pid), ThreadPoolExecutor(CLIENTS) as clients:

            def start(attack: Attack) -> Future:
                return clients.submit(run, attack, port, texts)

            wait([start(draw(seed)) for seed in range(40)])  # what it loads once does not count
            before, health = memory_in_mib(pid), Health(port)
            health.start()
            _attack(found, seeds, start, time.monotonic() + 60 * minutes, count)
            _look_back(found, port, health, before, pid)
    return found


def _attack(
    found: Found,
    seeds: Iterator[int],
    start: Callable[[Attack], Future],
    deadline: float,
    count: int | None,
) -> None:
    left: dict[Future, Attack] = {}
    shown = time.monotonic()
    for seed in itertools.islice(seeds, count):
        if time.monotonic() > deadline:
            break
        attack = draw(seed)
        left[start(attack)] = attack
        while len(left) >= CLIENTS:
            _count(found, left)
        if time.monotonic() - shown > 30:
            print(f"{found.tried.total()} attacks, {len(found.faults)} faults", flush=True)
            shown = time.monotonic()
    while left:
        _count(found, left)


def _count(found: Found, left: dict[Future, Attack]) -> None:
    """Those that are over, of which there is at least one."""
    for future in wait(left, return_when=FIRST_COMPLETED).done:
        attack = left.pop(future)
        found.tried[attack.kind] += 1
        if fault := future.result():
            repeat = f"`python tests/soak_server.py --case {attack.seed}` repeats it"
            found.faults.append(f"{attack.kind}: {fault}\n    {repeat}")
            print(found.faults[-1], flush=True)


def _look_back(found: Found, port: int, health: Health, before: int, pid: int) -> None:
    """What is left when all have been answered."""
    deadline = time.monotonic() + 60
    while (counts := get(port, "/speculation"))["waiting"] and time.monotonic() < deadline:
        time.sleep(0.1)
    if counts["waiting"]:
        found.faults.append(f"{counts['waiting']} requests are left in the line after a minute")
    health.is_over.set()
    health.join(HEALTH_SECONDS + 5)
    if health.fault:
        found.faults.append(health.fault)
    after = memory_in_mib(pid)
    if after > before + MOST_GROWTH:
        found.faults.append(f"the server kept {after - before} MiB")
    if found.tried["seeded"] > 20 and not counts["accepted_tokens"]:
        found.faults.append("no draft was accepted: a test that accepts nothing proves nothing")
    found.said = {**counts, "MiB before": before, "MiB after": after}
    found.said |= {"/health answers": health.answers, "/health worst seconds": round(health.worst, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, help="stop after so many")
    parser.add_argument("--count", type=int, help="stop after so many attacks")
    parser.add_argument("--seed", type=int, default=0, help="of the first attack")
    parser.add_argument("--case", type=int, help="run the attack of this seed alone")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in ("transformers", "hf_clover"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if arguments.serve is not None:
        return serve(arguments.serve)
    if arguments.case is not None:
        print(str(draw(arguments.case))[:2000])
        found = soak(iter([arguments.case]))
    else:
        minutes = 5.0 if arguments.count is None else math.inf
        minutes = minutes if arguments.minutes is None else arguments.minutes
        found = soak(itertools.count(arguments.seed), minutes, arguments.count)
    print(f"{found.tried.total()} attacks: {dict(found.tried.most_common())}")
    print(f"left behind: {found.said}")
    print(f"{len(found.faults)} faults", *found.faults, sep="\n")
    raise SystemExit(bool(found.faults))


if __name__ == "__main__":
    main()
