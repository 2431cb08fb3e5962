"""What to generate from: prompt sets by name, and the Python sources that every installation has.

Contract: `load_prompts(name, tokenizer)` gives lists of token ids. `HELD_OUT` names modules of the standard library
that the stand-in never sees in training; its prompts for measuring are taken from them and from nowhere else. Sources
are read as files, never imported, and nothing is downloaded unless the name is a dataset's on the Hub.
"""

import ast
import json
import sysconfig
import textwrap
from collections.abc import Iterator
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

# Ordinary code and prose, of many authors and subjects; every Python from 3.10 on has them.
HELD_OUT = (
    "bisect", "calendar", "cmd", "colorsys", "configparser", "csv", "filecmp", "fnmatch", "fractions", "getopt",
    "graphlib", "heapq", "mailbox", "netrc", "plistlib", "queue", "sched", "shlex", "statistics", "string",
    "textwrap", "timeit", "uuid", "wave", "zipapp",
)  # fmt: skip
STAND_IN = "stand-in"
_FIELDS = ("messages", "turns", "prompt", "question", "instruction", "text")  # of a question, the first that is there


def load_prompts(name: str, tokenizer: Any, limit: int | None = None, split: str = "train") -> list[list[int]]:
    """The first `limit` prompts of a set, as token ids.

    Args:
        name: "stand-in" (starts of functions that the stand-in has not seen); a file of questions such as Spec-Bench's
            or MT-bench's (JSON lines with `turns`, of which the first is asked, or with another of the fields that
            datasets use); a .txt file with a prompt a line; or a dataset: a folder, or an id on the Hub.
        tokenizer: its chat template is applied, where it has one, to everything but the stand-in's prompts.
    """
    if name == STAND_IN:
        prompts = [tokenizer(text).input_ids for text in islice(function_starts(), limit)]
    elif Path(name).suffix == ".txt":
        lines = Path(name).read_text(encoding="utf-8").splitlines()
        prompts = [encode_question(line, tokenizer) for line in islice(filter(str.strip, lines), limit)]
    else:
        prompts = [encode_question(question_in(row), tokenizer) for row in islice(_rows(name, split), limit)]
    if not prompts:
        raise ValueError(f"`prompts={name!r}` holds no prompt.")
    return prompts


def _rows(name: str, split: str) -> Iterator[dict[str, Any]]:
    if Path(name).suffix in (".jsonl", ".json"):
        for line in Path(name).read_text(encoding="utf-8").splitlines():
            if line.strip():
                yield json.loads(line)
        return
    from datasets import load_dataset

    yield from load_dataset(name, split=split)


def question_in(row: dict[str, Any]) -> str | list[dict[str, str]]:
    """A text, or messages up to the last that is not an answer."""
    field = next((field for field in _FIELDS if row.get(field)), None)
    if field is None:
        raise ValueError(f"`prompts`: no field of {sorted(row)} is a prompt; known are {list(_FIELDS)}.")
    value = row[field]
    if field == "turns":
        return value[0]
    if isinstance(value, str):
        return value
    messages = list(value)
    while len(messages) > 1 and messages[-1]["role"] == "assistant":
        messages.pop()
    return messages


def encode_question(question: str | list[dict[str, str]], tokenizer: Any) -> list[int]:
    if tokenizer.chat_template is None:
        if not isinstance(question, str):
            question = "\n\n".join(message["content"] for message in question)
        return tokenizer(question).input_ids
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


# ---------------------------------------------------------------------- the standard library


def standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def held_out_sources() -> dict[str, str]:
    """Module name -> source."""
    sources = {}
    for name in HELD_OUT:
        path = standard_library() / f"{name}.py"
        path = path if path.exists() else standard_library() / name / "__init__.py"
        if path.exists():
            sources[name] = path.read_text(encoding="utf-8")
    return sources


def functions(source: str) -> Iterator[tuple[str, str, int]]:
    """Every function and method with a docstring and something to do: its name, its text without the indentation it
    stands at, and how many of its lines come before the code."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
            text = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
            yield node.name, text, node.body[1].lineno - node.lineno


def function_starts() -> Iterator[str]:
    """Functions that nobody has learned, up to their first line of code; one of each module in turn.

    Without the line break, which a tokenizer joins with the indentation that comes after it.
    """
    by_module = []
    for source in held_out_sources().values():
        chosen = []
        for _, text, before in functions(source):
            lines = text.splitlines(keepends=True)
            if len(lines) > before + 5 and before < 20:
                chosen.append("".join(lines[: before + 1]).removesuffix("\n"))
        by_module.append(chosen)
    for round_of_modules in zip_longest(*by_module):
        yield from (start for start in round_of_modules if start is not None)


__all__ = ["HELD_OUT", "STAND_IN", "function_starts", "functions", "held_out_sources", "load_prompts"]
