"""Is the gain the same for code, prose and repetitive edits?

Three kinds of prompts from modules of the standard library that the stand-in has not seen: a function to complete
from its signature, docstring and first line; a docstring to go on with from its middle; a function to write once more
under another name. Prompt lookup is measured beside the heads, since copying is what it is made for.

    python examples/experiments/tasks.py
    python examples/experiments/tasks.py --target org/target --heads org/heads
"""

import ast
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from common import GENERATION, PLAIN, TOY_GENERATION, finish, line, load_heads, load_target, panel, parse

from hf_clover.measure.benchmark import measure, parse_method, plain, with_heads
from hf_clover.measure.prompts import function_starts, functions, held_out_sources

DEFAULTS = {name: value for name, value in GENERATION.items() if name != "prompts"} | {"max_new_tokens": 96}
TOY = {**TOY_GENERATION, "num_prompts": 1}


def docstring_starts() -> Iterator[str]:
    """Docstrings of some length, up to the middle."""
    for source in held_out_sources().values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                lines = (ast.get_docstring(node) or "").splitlines(keepends=True)
                if 8 <= len(lines) <= 40:
                    yield '"""' + "".join(lines[: len(lines) // 2]).removesuffix("\n")


def rewrites() -> Iterator[str]:
    """A function, and the beginning of the same under another name."""
    for source in held_out_sources().values():
        for name, text, _ in functions(source):
            if 8 <= text.count("\n") <= 25 and text.startswith(f"def {name}("):
                yield f"{text}\n\n# The same function under another name.\ndef {name}_again("


def in_turn(texts: Iterator[str], step: int = 7) -> Iterator[str]:
    """From all over the modules and not from the first alone."""
    found = list(texts)
    for start in range(step):
        yield from found[start::step]


TASKS = {"code completion": function_starts, "docstring prose": docstring_starts, "repetitive edits": rewrites}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(__doc__, argv, DEFAULTS, TOY)
    target, tokenizer = load_target(args)
    methods = [plain(), with_heads(load_heads(args, target)), parse_method("prompt-lookup", target)]
    rows = []
    for task, texts in TASKS.items():
        prompts = [tokenizer(text).input_ids for text in islice(in_turn(texts()), args.num_prompts)]
        measured = measure(
            target,
            tokenizer,
            methods,
            prompts,
            max_new_tokens=args.max_new_tokens,
            repeats=args.repeats,
            seed=args.seed,
        )
        rows += [{"task": task, **row} for row in measured]

    def bars(name: str) -> list[dict[str, Any]]:
        labels = [method.name for method in methods[1:]]
        return [line(m, [(r["task"], r.get(name)) for r in rows if r["method"] == m]) for m in labels]

    depths = [
        line(row["task"], enumerate(row["acceptance_by_depth"], 1))
        for row in rows
        if row["method"] == methods[1].name and not row["skipped"]
    ]
    panels = [
        panel("bars", "Tokens per forward", "", "tokens per target forward", bars("tokens_per_forward")),
        panel("bars", "Speedup", "", "× plain generate", bars("speedup"), reference=PLAIN),
        panel("lines", "Acceptance by depth", "drafts accepted, at least", "share of steps", depths),
    ]
    columns = ("task", "method", "tokens_per_second", "tokens_per_forward", "speedup", "identical")
    table = [{name: row.get(name) for name in columns} for row in rows]
    return finish(args, target, __doc__, rows, "Speedup by task", panels, table, script=__file__)


if __name__ == "__main__":
    main()
