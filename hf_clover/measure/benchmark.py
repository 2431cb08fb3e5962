"""Measuring: several ways to generate from the same prompts, side by side in one run.

Contract: `measure` runs every method on a prompt before the next prompt, so that other load on the machine affects all
methods alike. It repeats the whole set. A question of several turns is one conversation: a turn's prompt holds the
turns before it, with this method's own answers. `measure` reports medians and ranges, never a best case, and compares
every token with plain generate's. If a method cannot run at a setting, its row has the reason in place of figures.
This module neither draws nor prints.

Tokens per forward: tokens emitted per target forward that a row took part in, the prompt's included. Mean accepted
tokens, as in Spec-Bench's leaderboard: the same without the prompt's forward and its token. Both count the bonus,
which is the target's own token of each step. Speedup: tokens per second, divided by those of plain generate in the
same repeat with the same weights. So methods with packed weights are compared with plain generate with packed weights;
their `speedup_over_unpacked` is the speedup over plain generate without them. Efficiency: speedup divided by tokens
per forward; 1 if drafting and checking cost nothing.
"""

import json
import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .conditions import circumstances, template_of, that_fit
from .methods import Method, first_difference, packed, parse_method, plain, with_heads
from .prompts import Question, kind_of, pad_id_of, prompt_after
from .timing import Run, batch_of, peak_memory, run_once
from .whole_files import write_whole

# ---------------------------------------------------------------------- all runs of a setting


def measure(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: Sequence[Method],
    prompts: Sequence[Question | list[int]],
    *,
    batch_size: int = 1,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    cache_implementation: str = "dynamic",
    repeats: int = 3,
    seed: int = 0,
    progress: bool = True,
    report: Callable[[list[dict[str, Any]]], None] | None = None,
) -> list[dict[str, Any]]:
    """Measure one setting: one row per method, as in the JSON of [`benchmark`]. The first method must be [`plain`].

    Args:
        prompts: token ids, or conversations from [`~hf_clover.measure.prompts.load_questions`]. All prompts of a batch
            have one category.
        report: called with the rows so far, each time all methods have finished a batch. The rows cover the repeats
            that are complete; during the first repeat they cover the batches so far.
    """
    if not methods or methods[0].name != "plain":
        raise ValueError("`methods` must begin with `plain()`: it is what the others are compared with.")
    pad = pad_id_of(tokenizer) or 0
    groups = _groups(prompts, batch_size)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0, "pad_token_id": pad}
    if temperature > 0:
        options["temperature"] = temperature
    if cache_implementation != "dynamic":
        options["cache_implementation"] = cache_implementation
    setting = {"batch_size": batch_size, "temperature": temperature, "cache": cache_implementation}

    runs: list[list[list[Run]]] = [[[] for _ in methods] for _ in range(repeats)]  # [repeat][method][turn of a group]
    differences: list[list[dict[str, Any]]] = [[] for _ in methods]
    skipped: dict[int, str] = {}
    bar = tqdm(total=(repeats * len(groups) + 1) * len(methods), disable=not progress, unit="run", leave=False)
    bar.set_description(f"batch {batch_size}, temperature {temperature:g}, {cache_implementation}")
    peaks: list[dict[str, float]] = [{} for _ in methods]
    first = [prompt_after(prompts[number], (), tokenizer) for number in groups[0]]
    for place, method in enumerate(methods):  # a device's one-time work is neither timed nor counted
        try:
            run_once(target, method, first, seed, options)
            with peak_memory(target.device) as peaks[place]:
                run_once(target, method, first, seed, options)
        except (ValueError, NotImplementedError) as error:
            if place == 0:
                raise
            skipped[place] = str(error)
        bar.update()

    def baseline(place: int) -> int:
        """Plain generate with the same weights."""
        weights = methods[place].target
        mine = [at for at, other in enumerate(methods) if not other.options and other.target is weights]
        return mine[0] if mine and mine[0] not in skipped else 0

    def with_speedups(mine: list[list[Run]], place: int, category: str | None = None) -> dict[str, Any]:
        its, first = ([repeat[of] for repeat in runs[: len(mine)]] for of in (baseline(place), 0))
        is_compared = temperature == 0 or methods[place].is_exact
        figures = _figures(mine, its, differences[place], is_compared, category)
        if methods[place].target is not None:
            other = _figures(mine, first, [], False, category)
            figures |= {f"speedup_over_unpacked{what}": other[f"speedup{what}"] for what in ("", "_range")}
        return figures

    def rows(whole: int) -> list[dict[str, Any]]:
        """The rows of the first `whole` repeats; of the first repeat as far as it has come, if `whole` is 0."""
        found = []
        for place, method in enumerate(methods):
            row = {"method": method.name, "nodes": method.nodes, "tree": method.tree, **setting}
            if place in skipped:
                found.append({**row, "skipped": skipped[place]})
                continue
            mine = [repeat[place] for repeat in runs[: max(whole, 1)]]
            row |= with_speedups(mine, place)
            row |= {"peak_memory_mib": peaks[place].get("mib"), "differences": differences[place], "skipped": None}
            categories = {run.category: None for run in mine[0]}
            if categories.keys() - {None}:
                row["categories"] = {name: with_speedups(mine, place, name) for name in categories}
            found.append(row)
        return found

    for repeat in range(repeats):
        for number, group in enumerate(groups):
            questions = [prompts[member] for member in group]
            category, turns = kind_of(questions[0])
            bar.set_postfix_str(f"question {number * batch_size + 1}" + (f", {category}" if category else ""))
            said: list[list[list[str]]] = [[[] for _ in group] for _ in methods]  # each method's own answers
            parted = set()  # rows whose conversation differs already
            for turn in range(turns):
                of_turn: dict[int, Run] = {}
                for shift in range(len(methods)):
                    place = (shift + repeat + number) % len(methods)  # no method always runs first
                    if place in skipped:
                        continue
                    asked = [prompt_after(*it, tokenizer) for it in zip(questions, said[place])]
                    run = run_once(target, methods[place], asked, seed + number + turn * len(groups), options)
                    run.members, run.category = group, category
                    of_turn[place] = run
                    runs[repeat][place].append(run)
                    if turn + 1 < turns:
                        for answers, ids in zip(said[place], run.answers):
                            answers.append(tokenizer.decode(ids, skip_special_tokens=True))  # type: ignore[arg-type]
                for place, run in of_turn.items():
                    if repeat == 0 and place and (temperature == 0 or methods[place].is_exact):
                        for row, position, margin in _differences(
                            methods[place].target or target,
                            run,
                            of_turn[baseline(place) if methods[place].options else 0],
                        ):
                            if (place, row) not in parted:
                                lead = finite(margin) if temperature == 0 else None  # sampling shows no preference
                                where: dict[str, Any] = {"prompt": group[row], "position": position, "margin": lead}
                                if isinstance(question := questions[row], Question):
                                    where |= {"turn": turn + 1, "question": question.id, "category": category}
                                differences[place].append(where)
                                parted.add((place, row))
            bar.update(len(methods))
            if report is not None:
                report(rows(repeat + (number + 1 == len(groups))))
    bar.close()
    return rows(repeats)


def _groups(prompts: Sequence[Question | list[int]], size: int) -> list[list[int]]:
    """The numbers of the prompts in each batch. All prompts of a batch are of one kind, and batches of different kinds
    take turns. The last batch of a kind is filled up with the kind's first prompts."""
    by_kind: dict[tuple[str | None, int], list[int]] = {}
    for number, prompt in enumerate(prompts):
        by_kind.setdefault(kind_of(prompt), []).append(number)
    batches = [
        [[alike[(first + i) % len(alike)] for i in range(size)] for first in range(0, len(alike), size)]
        for alike in by_kind.values()
    ]
    return [batch for round_ in zip_longest(*batches) for batch in round_ if batch is not None]


def _figures(
    repeats: list[list[Run]],
    baseline: list[list[Run]],
    differences: list[dict[str, Any]],
    is_compared: bool,
    category: str | None = None,
) -> dict[str, Any]:
    """The figures of the runs of one category, or of all runs."""

    def speed(runs: list[Run]) -> float:
        return sum(run.new_tokens for run in runs) / sum(run.seconds for run in runs)

    if category is not None:
        repeats, baseline = (
            [[r for r in runs if r.category == category] for runs in of] for of in (repeats, baseline)
        )
        differences = [difference for difference in differences if difference["category"] == category]
    speeds = [speed(runs) for runs in repeats]
    speedups = [mine / speed(theirs) for mine, theirs in zip(speeds, baseline)]
    speedup = statistics.median(speedups)
    records = [run.stats for runs in repeats for run in runs]
    forwards = sum(record.row_forwards for record in records)
    new_tokens = sum(record.new_tokens for record in records)
    per_forward = new_tokens / max(forwards, 1)
    seconds = {part: sum(getattr(r, f"{part}_seconds") for r in records) for part in ("draft", "verify", "walk")}
    total = sum(run.seconds for runs in repeats for run in runs)
    seconds["other"] = max(0.0, total - sum(seconds.values()))
    answers = sum(len(run.answers) for runs in repeats for run in runs)
    trees = max(forwards - answers, 1)  # a prompt's forward has no tree
    deepest = max(len(record.accepted_by_depth) for record in records)
    by_depth = [sum(sum(record.accepted_by_depth[d : d + 1]) for record in records) for d in range(deepest)]
    lengths = [len(prompt) for run in repeats[0] for prompt in run.prompts]
    return {
        "questions": len({member for run in repeats[0] for member in run.members}),
        "turns": len(lengths),
        "prompt_tokens": {"min": min(lengths), "median": statistics.median(lengths), "max": max(lengths)},
        "tokens_per_second": statistics.median(speeds),
        "tokens_per_second_range": [min(speeds), max(speeds)],
        "tokens_per_forward": per_forward,
        "mean_accepted_tokens": (new_tokens - answers) / trees if forwards > answers else 1.0,
        "speedup": speedup,
        "speedup_range": [min(speedups), max(speedups)],
        "efficiency": speedup / per_forward,
        "seconds": {part: value / len(repeats) for part, value in seconds.items()},
        "acceptance_by_depth": [count / trees for count in by_depth],
        "identical": not differences if is_compared else None,
    }


@torch.no_grad()
def _differences(target: PreTrainedModel, run: Run, plain_run: Run) -> Iterator[tuple[int, int, float]]:
    """Row, place and margin of each first difference from plain generate's answer. The margin says by how much the
    target prefers plain generate's token there."""
    for row, (mine, its) in enumerate(zip(run.answers, plain_run.answers)):
        place = first_difference(mine, its)
        if place is None:
            continue
        margin = math.nan
        if place < min(len(mine), len(its)):
            ids = torch.tensor([plain_run.prompts[row] + its[:place]], device=target.device)
            logits = target(ids).logits[0, -1].float()
            margin = float(logits[its[place]] - logits[mine[place]])
        yield row, place, margin


def finite(value: float | None) -> float | None:
    """`value` if it is finite, else None: JSON cannot hold NaN, nor the infinite margin of a token that a processor
    forbids."""
    return value if value is not None and math.isfinite(value) else None


# ---------------------------------------------------------------------- all settings


def benchmark(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: Sequence[Method],
    prompts: Sequence[Question | list[int]],
    *,
    prompt_set: str = "stand-in",
    batch_sizes: Sequence[int] = (1,),
    temperatures: Sequence[float] = (0.0,),
    cache_implementations: Sequence[str] = ("dynamic",),
    max_new_tokens: int = 128,
    repeats: int = 3,
    seed: int = 0,
    progress: bool = True,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Measure every method at every setting, and record the circumstances that a reader needs to judge the figures.

    Args:
        report: called with the result so far after every batch of prompts, so that it can be saved.
    """
    prompts, left_out = that_fit(target, tokenizer, prompts, max_new_tokens)
    result = {
        "kind": "benchmark",
        **circumstances(target, prompt_set, prompts, max_new_tokens),
        **template_of(tokenizer, prompts),
        "left_out": left_out,
        "repeats": repeats,
        "seed": seed,
        "is_whole": False,
    }
    rows: list[dict[str, Any]] = []

    def report_with(new: list[dict[str, Any]]) -> None:
        if report is not None:
            report({**result, "rows": rows + new})

    for cache, temperature, size in product(cache_implementations, temperatures, batch_sizes):
        rows += measure(
            target,
            tokenizer,
            methods,
            prompts,
            batch_size=size,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            cache_implementation=cache,
            repeats=repeats,
            seed=seed,
            progress=progress,
            report=None if report is None else report_with,
        )
    return {**result, "is_whole": True, "rows": rows}


def write(result: dict[str, Any], path: str | os.PathLike) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_whole(path, json.dumps(result, indent=1, allow_nan=False) + "\n")


__all__ = [
    "Method",
    "batch_of",
    "benchmark",
    "circumstances",
    "measure",
    "packed",
    "parse_method",
    "plain",
    "with_heads",
    "write",
]
