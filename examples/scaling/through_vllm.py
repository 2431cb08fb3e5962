"""How much faster is vLLM's OpenAI server with heads, for one client and for many at once?

Two servers run side by side, one plain and one with heads. They get the same prompts in turn: a given number of
requests at a time, greedy, with answers of the same length. One JSON gets the tokens per second, the time to the first
token, and the accepted drafts at each position. Run this in an environment with vLLM (docs/vllm.md):

    python examples/scaling/through_vllm.py --target examples/smollm2/target --heads examples/smollm2/heads \\
        --prompts questions.jsonl --dtype float32 --enforce-eager

On a GPU both servers share it: give each its part of the memory, --gpu-memory-utilization 0.4.
"""

import argparse
import asyncio
import datetime
import json
import re
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from openai import AsyncOpenAI
from transformers import AutoTokenizer

from hf_clover.measure.prompts import load_prompts
from hf_clover.measure.provenance import provenance

HERE = Path(__file__).resolve().parent
STAND_IN = HERE.parent / "stand_in"
NAME = "target"  # the target's name in both servers
ACCEPTED = re.compile(r'vllm:spec_decode_num_accepted_tokens_per_pos_total\{.*position="(\d+)".*\} (\S+)')
DRAFTS = re.compile(r"vllm:spec_decode_num_drafts_total\{.*\} (\S+)")


@contextmanager
def served(target: str | Path, heads: str | Path | None, drafted: int, *options: str) -> Iterator[str]:
    """Starts a server of vLLM, plain or with heads, and gives its address when it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    command += ["--host", "127.0.0.1", "--port", port, "--served-model-name", NAME, *options]
    if heads is not None:
        command += ["--speculative-config", json.dumps({"model": str(heads), "num_speculative_tokens": drafted})]
    with TemporaryFile("w+") as said, subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT) as server:
        try:
            address = f"http://127.0.0.1:{port}"
            while not answers(f"{address}/health"):
                if server.poll() is not None:
                    said.seek(0)
                    raise RuntimeError(f"vLLM's server ended with {server.returncode}:\n{said.read()[-3000:]}")
                time.sleep(0.5)
            yield address
        finally:
            server.terminate()


def answers(address: str) -> bool:
    try:
        return urllib.request.urlopen(address, timeout=2).status == 200
    except OSError:
        return False


def counted(address: str) -> tuple[float, dict[int, float]]:
    """The server's own counts: drafts, and accepted tokens by position."""
    page = urllib.request.urlopen(f"{address}/metrics").read().decode()
    drafts = sum(float(found) for found in DRAFTS.findall(page))
    return drafts, {int(position): float(found) for position, found in ACCEPTED.findall(page)}


async def ask(client: AsyncOpenAI, prompt: list[int], tokens: int) -> tuple[float, int, str]:
    """Seconds to the first token, the number of tokens, and the text."""
    began, first, count, text = time.perf_counter(), None, 0, []
    stream = await client.completions.create(
        model=NAME,
        prompt=prompt,
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        if chunk.choices:
            first = first or time.perf_counter() - began
            text.append(chunk.choices[0].text)
        if chunk.usage is not None:
            count = chunk.usage.completion_tokens
    return first or 0.0, count, "".join(text)


async def ask_all(address: str, prompts: Sequence[list[int]], at_once: int, tokens: int) -> dict[str, Any]:
    """Send all prompts, `at_once` of them at any time."""
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", timeout=3600, max_retries=0) as client:
        gate = asyncio.Semaphore(at_once)

        async def one(prompt: list[int]) -> tuple[float, int, str]:
            async with gate:
                return await ask(client, prompt, tokens)

        before, began = counted(address), time.perf_counter()
        found = await asyncio.gather(*map(one, prompts))
        seconds, after = time.perf_counter() - began, counted(address)
    firsts, counts, texts = zip(*found, strict=True)
    drafts = after[0] - before[0]
    accepted = [after[1][position] - before[1].get(position, 0.0) for position in sorted(after[1])]
    return {
        "tokens_per_second": sum(counts) / seconds,
        "seconds_to_first_token": statistics.median(firsts),
        "drafts": int(drafts),
        "accepted_by_position": [round(count / drafts, 3) for count in accepted] if drafts else [],
        "texts": list(texts),
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Other options are passed to both servers unchanged.",
    )
    parser.add_argument("--target", default=str(STAND_IN / "target"))
    parser.add_argument("--heads", default=str(STAND_IN / "heads"))
    parser.add_argument(
        "--prompts", default="stand-in", help="as for `hf-clover benchmark`; only the first turn of questions"
    )
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 4, 16, 64], help="requests at once")
    parser.add_argument("--requests", type=int, default=16, help="to each server, or --concurrency if that is more")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=1, help="of all measurements; medians are written")
    parser.add_argument("--output", type=Path, default=HERE / "through_vllm.json")
    args, options = parser.parse_known_args(argv)
    if min(args.concurrency) < 1:
        parser.error(f"--concurrency {min(args.concurrency)}: at least one request at once")
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    most = max(args.requests, *args.concurrency)
    prompts = load_prompts(args.prompts, tokenizer, most)
    prompts = [prompts[i % len(prompts)] for i in range(most)]

    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        servers = {}
        for name, heads in (("plain", None), ("heads", args.heads)):
            print(f"starting the server: {name}", flush=True)
            servers[name] = stack.enter_context(served(args.target, heads, args.num_speculative_tokens, *options))
        for address in servers.values():
            asyncio.run(ask_all(address, prompts[:2], 1, 8))  # the first forwards are slow
        for repeat in range(args.repeats):
            for at_once in args.concurrency:
                for name, address in servers.items():
                    some = prompts[: max(args.requests, at_once)]
                    run = asyncio.run(ask_all(address, some, at_once, args.max_new_tokens))
                    runs.setdefault((name, at_once), []).append(run)
                    speed = f"{run['tokens_per_second']:.1f} tokens/s"
                    print(f"{repeat + 1}/{args.repeats} {name}, {at_once} at once: {speed}", flush=True)
    rows = [summary(runs["plain", at_once], runs["heads", at_once], at_once) for at_once in args.concurrency]
    result = {
        "kind": "serving",
        "settings": {name: value for name, value in vars(args).items() if name != "output"} | {"options": options},
        **provenance(),
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }
    for name in ("target", "heads", "prompts"):
        result["settings"][name] = "/".join(Path(result["settings"][name]).parts[-2:])
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(json.dumps(row))
    return result


def summary(plain: list[dict[str, Any]], heads: list[dict[str, Any]], at_once: int) -> dict[str, Any]:
    def median(runs: list[dict[str, Any]], name: str) -> float:
        return statistics.median(run[name] for run in runs)

    row: dict[str, Any] = {"concurrency": at_once, "requests": len(plain[0]["texts"])}
    for name in ("tokens_per_second", "seconds_to_first_token"):
        row[name] = {"plain": round(median(plain, name), 3), "heads": round(median(heads, name), 3)}
    row["speedup"] = round(row["tokens_per_second"]["heads"] / row["tokens_per_second"]["plain"], 3)
    row["drafts"], row["accepted_by_position"] = heads[0]["drafts"], heads[0]["accepted_by_position"]
    row["identical"] = sum(a == b for a, b in zip(plain[0]["texts"], heads[0]["texts"], strict=True))
    return row


if __name__ == "__main__":
    main()
