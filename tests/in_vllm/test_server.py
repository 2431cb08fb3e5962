"""Heads behind vLLM's own OpenAI server, by the official client."""

import importlib.util
import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from engines import LENGTH, ROOT, STAND_IN, vllm

openai = pytest.importorskip("openai")

CLIENTS = 16


@pytest.fixture(scope="module")
def prompts():
    return STAND_IN.prompts()


@pytest.fixture(scope="module")
def plain(prompts):
    """The texts of an engine without heads."""
    asked = vllm.SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    answers = STAND_IN.engine(drafts=False).generate([{"prompt_token_ids": p} for p in prompts], asked, use_tqdm=False)
    return [answer.outputs[0].text for answer in answers]


@pytest.fixture(scope="module")
def script():
    """What measures such servers, and starts them."""
    spec = importlib.util.spec_from_file_location("through_vllm", ROOT / "examples/scaling/through_vllm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OPTIONS = ["--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(1 << 28)]
OPTIONS += ["--max-model-len", str(STAND_IN.max_model_len)]


@pytest.fixture(scope="module")
def address(script):
    """Of a server with heads. It is another process, and so is its engine."""
    with script.served(STAND_IN.target, STAND_IN.heads, STAND_IN.drafted, *OPTIONS) as address:
        yield address


@pytest.fixture(scope="module")
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=120, max_retries=0)


def metric(address, name):
    with urllib.request.urlopen(f"{address}/metrics") as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"vllm:{name}{{", f"vllm:{name} ")))


def asked(prompt, **more):
    settings = {"model": "target", "prompt": prompt, "temperature": 0, "max_tokens": LENGTH}
    return {**settings, "extra_body": {"ignore_eos": True}, **more}


def test_a_stream_is_the_plain_text_in_pieces(client, prompts, plain):
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**asked(prompts[0]), stream=True)]
    assert "".join(pieces) == plain[0]
    assert 3 < len([piece for piece in pieces if piece]) < LENGTH, "accepted drafts come together"


def test_sixteen_clients_at_once_get_plain_texts(client, address, prompts, plain):
    before = metric(address, "spec_decode_num_accepted_tokens_total")
    with ThreadPoolExecutor(CLIENTS) as pool:
        found = list(pool.map(lambda i: client.completions.create(**asked(prompts[i % 8])), range(CLIENTS)))
    assert [answer.choices[0].text for answer in found] == plain * 2
    assert [answer.usage.completion_tokens for answer in found] == [LENGTH] * CLIENTS
    assert metric(address, "spec_decode_num_accepted_tokens_total") - before > CLIENTS


def test_a_request_whose_client_hangs_up_is_ended(client, address, prompts, plain):
    stream = client.completions.create(**asked(prompts[1], max_tokens=STAND_IN.max_model_len - 60), stream=True)
    next(iter(stream))
    stream.close()
    began = time.monotonic()
    while metric(address, "num_requests_running") > 0:
        assert time.monotonic() - began < 30
        time.sleep(0.2)
    assert client.completions.create(**asked(prompts[1])).choices[0].text == plain[1]


def test_a_stop_string_ends_the_text_where_it_stands(client, prompts, plain):
    stop = plain[2][len(plain[2]) // 2 :][:6]
    choice = client.completions.create(**asked(prompts[2], stop=[stop])).choices[0]
    assert (choice.text, choice.finish_reason) == (plain[2][: plain[2].index(stop)], "stop")


def test_sampling_is_refused_with_the_reason(client, prompts):
    with pytest.raises(openai.BadRequestError, match="on a CPU this vLLM samples wrongly"):
        client.completions.create(**asked(prompts[0], temperature=1.0))


def test_the_measuring_script_has_a_row_for_each_number_of_clients(script, tmp_path, capsys):
    """At toy size: two servers in turn, one row for each number of clients, texts that are the same."""
    sizes = ["--concurrency", "1", "4", "--requests", "4", "--max-new-tokens", "16"]
    result = script.main([*sizes, "--output", str(tmp_path / "found.json"), *OPTIONS])
    assert json.loads((tmp_path / "found.json").read_text())["rows"] == result["rows"]
    assert [(row["concurrency"], row["requests"], row["identical"]) for row in result["rows"]] == [
        (1, 4, 4),
        (4, 4, 4),
    ]
    for row in result["rows"]:
        assert row["drafts"] > 0
        assert len(row["accepted_by_position"]) == STAND_IN.drafted
        assert 0 < row["seconds_to_first_token"]["heads"] < 60
        assert row["speedup"] == pytest.approx(
            row["tokens_per_second"]["heads"] / row["tokens_per_second"]["plain"], abs=1e-3
        )
    assert "heads, 4 at once" in capsys.readouterr().out
