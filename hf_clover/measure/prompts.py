"""Prompts for measuring: prompt sets by name, and the Python sources that every installation has.

Contract: `load_questions(name, tokenizer)` returns conversations, and `load_prompts` the token ids that each begins
with. If the rows of a set have a `category`, both take one row of each category in turn. `HELD_OUT` names modules of
the standard library that the stand-in never sees in training; all its prompts for measuring come from them. Sources
are read as files, never imported. Nothing is downloaded unless the name is that of a dataset on the Hub.
"""

import ast
import json
import sysconfig
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..targets.loading import check_path

logger = logging.get_logger(__name__)

# Modules of ordinary code and prose, by many authors and on many subjects; every Python from 3.10 on has them.
HELD_OUT = (
    "bisect", "calendar", "cmd", "colorsys", "configparser", "csv", "filecmp", "fnmatch", "fractions", "getopt",
    "graphlib", "heapq", "mailbox", "netrc", "plistlib", "queue", "sched", "shlex", "statistics", "string",
    "textwrap", "timeit", "uuid", "wave", "zipapp",
)  # fmt: skip
STAND_IN = "stand-in"
# Questions of several kinds that people ask, for a target with a chat template.
EVERYDAY = "everyday"
QUESTIONS = (
    "Write a short letter to a friend who has moved away.",
    "What makes a good teacher?",
    "Give me three tips for falling asleep.",
    "Why do leaves change their colour in autumn?",
    "Write a Python function that counts the words in a text.",
    "A train leaves at 14:20 and needs two hours and 45 minutes. When does it arrive?",
    "Translate into French: The weather is lovely today, so we eat in the garden.",
    "Explain to a child what money is for.",
)
SPEC_BENCH = (
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities", "translation",
    "summarization", "qa", "math_reasoning", "rag",
)  # fmt: skip
NO_CATEGORY = "none"  # category of a question without one, among others that have one
_FIELDS = ("messages", "turns", "prompt", "question", "instruction", "text")  # the first that a row has is used


@dataclass(frozen=True)
class Question:
    """One conversation: the user's messages of each turn. Each turn is answered before the next one."""

    turns: Sequence[list[dict[str, str]]]  # messages, without the answers
    category: str | None = None
    id: Any = None

    def encode(self, tokenizer: Any, answers: Sequence[str] = ()) -> list[int]:
        """The prompt of the turn after these answers: all messages so far, through the chat template if there is one,
        else as a text with empty lines between them."""
        messages = list(self.turns[0])
        for answer, turn in zip(answers, self.turns[1:]):
            messages += [{"role": "assistant", "content": answer}, *turn]
        if tokenizer.chat_template is None:
            return prompt_ids(tokenizer, "\n\n".join(message["content"] for message in messages))
        return prompt_ids(tokenizer, messages)


def default_prompts(tokenizer: Any) -> str:
    """The set to use if the user names none: questions for a target with a chat template, else the stand-in's."""
    return STAND_IN if tokenizer.chat_template is None else EVERYDAY


def prompt_after(prompt: Question | list[int], answers: Sequence[str], tokenizer: Any) -> list[int]:
    return prompt.encode(tokenizer, answers) if isinstance(prompt, Question) else prompt


def kind_of(prompt: Question | list[int]) -> tuple[str | None, int]:
    """The prompt's category, and its number of turns."""
    return (prompt.category, len(prompt.turns)) if isinstance(prompt, Question) else (None, 1)


def prompt_ids(tokenizer: Any, prompt: str | Sequence[dict[str, Any]], **options: Any) -> list[int]:
    """Token ids of a text, unchanged, or of messages through the chat template with its `options`, up to the beginning
    of the answer."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True, **options)["input_ids"]


def pad_id_of(tokenizer: Any) -> int | None:
    """The token that fills rows of a batch: the padding token, else the one that ends a text."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def load_prompts(name: str, tokenizer: Any, limit: int | None = None, split: str = "train") -> list[list[int]]:
    """The first turns of the conversations of [`load_questions`], as token ids."""
    questions = load_questions(name, tokenizer, limit, split=split)
    return [question.encode(tokenizer) if isinstance(question, Question) else question for question in questions]


def load_questions(
    name: str, tokenizer: Any, limit: int | None = None, per_category: int | None = None, split: str = "train"
) -> list[Question | list[int]]:
    """Load the first conversations of a set, always the same.

    Args:
        name: "everyday" (questions that people ask); "stand-in" (starts of functions that the stand-in has not seen,
            as token ids); a file of questions such as Spec-Bench's or MT-bench's (JSON lines with `turns` and
            `category`, or with another of the fields that datasets use); a .txt file with one prompt per line; or a
            dataset: a folder, or an id on the Hub.
        limit: the most conversations to load, one of each category in turn.
        per_category: the most conversations of each category.
    """
    check_path(name, "dataset")
    if name == STAND_IN:
        prompts = [tokenizer(text).input_ids for text in islice(function_starts(), limit)]
    elif name == EVERYDAY:
        prompts = [Question([_said(question)]) for question in islice(QUESTIONS, limit)]
    elif Path(name).suffix == ".txt":
        lines = Path(name).read_text(encoding="utf-8").splitlines()
        prompts = [Question([_said(line)]) for line in islice(filter(str.strip, lines), limit)]
    else:
        prompts = list(islice(_questions(name, list(_rows(name, split)), per_category), limit))
    if not prompts:
        raise ValueError(f"`prompts={name!r}` holds no prompt.")
    if per_category is not None and not any(isinstance(p, Question) and p.category is not None for p in prompts):
        raise ValueError(f"`per_category={per_category}`: no prompt of {name!r} has a `category`; pass `num_prompts`.")
    return prompts


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _rows(name: str, split: str) -> Iterator[dict[str, Any]]:
    if Path(name).suffix in (".jsonl", ".json"):
        for number, line in enumerate(Path(name).read_text(encoding="utf-8").split("\n"), start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"`prompts={name!r}`: line {number} is not JSON ({error}).") from error
                if not isinstance(row, dict):
                    raise ValueError(
                        f'`prompts={name!r}`: line {number} is no JSON object, such as {{"turns": [...]}}.'
                    )
                yield row
        return
    from datasets import load_dataset

    yield from load_dataset(name, split=split)


def _categories_of(name: str, rows: list[dict[str, Any]]) -> list[str | None]:
    """A category for each row. Categories that Spec-Bench does not have are used, with a warning: they may be typing
    errors."""
    given = [str(row["category"]) if row.get("category") else None for row in rows]
    if not any(given):
        return given
    if None in given:
        logger.warning(
            f"`prompts={name!r}`: {given.count(None)} of {len(rows)} questions have no `category`; their results are "
            f"listed under {NO_CATEGORY!r}."
        )
    unknown = [repr(category) for category in dict.fromkeys(given) if category not in (None, *SPEC_BENCH)]
    if unknown:
        named = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        logger.warning(f"`prompts={name!r}`: Spec-Bench has no category {named}; taken as named.")
    return [category or NO_CATEGORY for category in given]


def _questions(name: str, rows: list[dict[str, Any]], per_category: int | None) -> Iterator[Question]:
    """One question of each category, then the next of each, so that a measurement that is broken off covers all
    categories."""
    by_category: dict[str | None, list[int]] = {}
    for place, category in enumerate(_categories_of(name, rows)):
        by_category.setdefault(category, []).append(place)
    for places in zip_longest(*(several[:per_category] for several in by_category.values())):
        for place, category in zip(places, by_category):
            if place is not None:
                row = rows[place]
                yield Question(
                    _turns_in(f"`prompts={name!r}`, question {place + 1}", row), category, row.get("question_id")
                )


def _turns_in(where: str, row: dict[str, Any]) -> list[list[dict[str, str]]]:
    """The turns in a row: a text is one turn, each text of a list is one turn, and messages are one turn, without
    answers at the end."""
    field = next((field for field in _FIELDS if row.get(field)), None)
    if field is None:
        raise ValueError(f"{where}: no field of {sorted(row)} is a prompt; known are {list(_FIELDS)}.")
    value = list(row[field]) if isinstance(row[field], list) else [row[field]]
    if all(isinstance(turn, str) and turn.strip() for turn in value):
        return [_said(turn) for turn in value]
    if not all(isinstance(message, dict) and "role" in message and "content" in message for message in value):
        raise ValueError(f"{where}: `{field}` must hold texts, or messages with `role` and `content`; got {value!r}.")
    while len(value) > 1 and value[-1]["role"] == "assistant":
        value.pop()
    return [value]


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
    """Every function and method with a docstring and code: its name, its text without the outer indentation, and how
    many of its lines are before the code."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
            text = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
            yield node.name, text, node.body[1].lineno - node.lineno


def function_starts() -> Iterator[str]:
    """The beginnings of held-out functions, up to their first line of code; one of each module in turn.

    The last line break is left out, since a tokenizer joins it with the indentation that follows.
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


__all__ = [
    "EVERYDAY",
    "HELD_OUT",
    "QUESTIONS",
    "SPEC_BENCH",
    "STAND_IN",
    "Question",
    "default_prompts",
    "function_starts",
    "functions",
    "held_out_sources",
    "kind_of",
    "load_prompts",
    "load_questions",
    "prompt_after",
]
