"""Measuring: several ways to generate from the same prompts, side by side in one run.

Contract: `measure` runs every method on a prompt before it goes to the next prompt, so that whatever else the machine
does meets all methods alike, and repeats that. It reports medians and ranges, never a best case, and compares every
token with plain generate's. A method that cannot run at a setting has the reason in its row instead of figures. What
is drawn from the figures, and how they get onto a screen, is not known here.

Tokens per forward: tokens emitted for each target forward that a row took part in. Speedup: tokens per second over
those of plain generate in the same repeat; with packed weights, of heads over plain generate that has packed weights
too. Efficiency: the second over the first, 1 where drafting and checking cost nothing.
"""

import copy
import datetime
import gc
import json
import math
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from .decoding.record import Speculation, speculations
from .hub import provenance
from .modeling_clover import CloverHeads
from .packing import pack_for_cpu

PROMPT_LOOKUP_TOKENS = 10  # what transformers' documentation uses


@dataclass
class Method:
    """A way to generate: keywords for `generate`, under a name for tables and legends."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    nodes: int | None = None  # drafted per step; None: automatic
    tree: str | None = None  # None: the heads' own
    is_exact: bool = True  # whether sampling promises the tokens of plain sampling from the same seed
    target: PreTrainedModel | None = None  # in place of the one that is measured

    @property
    def heads(self) -> CloverHeads | None:
        assistant = self.options.get("assistant_model")
        return assistant if getattr(getattr(assistant, "config", None), "model_type", None) == "clover" else None

    @contextmanager
    def applied(self) -> Iterator[dict[str, Any]]:
        """The keywords, with the heads set to this method's tree."""
        options = dict(self.options) if self.nodes is None else {**self.options, "num_assistant_tokens": self.nodes}
        if self.heads is None or self.tree is None:
            yield options
            return
        before = self.heads.config.draft_tree
        self.heads.config.draft_tree = self.tree
        try:
            yield options
        finally:
            self.heads.config.draft_tree = before


def plain() -> Method:
    return Method("plain")


def with_heads(
    heads: CloverHeads, name: str | None = None, nodes: int | None = None, tree: str | None = None
) -> Method:
    return Method(name or heads.config.variant, {"assistant_model": heads}, nodes, tree)


def packed(target: PreTrainedModel, methods: Sequence[Method]) -> list[Method]:
    """The same with packed weights, of copies: plain generate and heads."""
    packed_target = copy.deepcopy(target)
    pack_for_cpu(packed_target)
    copies: dict[CloverHeads | None, CloverHeads] = {}
    found = []
    for method in methods:
        options = method.options
        if method.heads is not None:
            if method.heads not in copies:
                copies[method.heads] = copy.deepcopy(method.heads)
                pack_for_cpu(copies[method.heads])
            options = {**options, "assistant_model": copies[method.heads]}
        found.append(replace(method, name=f"{method.name}, packed", options=options, target=packed_target))
    return found


def parse_method(text: str, target: PreTrainedModel) -> Method:
    """What to compare with: "prompt-lookup", "assistant:MODEL" (a smaller model), or "NAME:HEADS" (other heads)."""
    name, _, path = text.partition(":")
    if text == "prompt-lookup":
        return Method(text, {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}, is_exact=False)
    if not path:
        raise ValueError(
            f"`against={text!r}` is no method: it must be 'prompt-lookup', 'assistant:MODEL' or 'NAME:HEADS', such as "
            "'medusa:my-medusa-heads'."
        )
    if name == "assistant":
        assistant = AutoModelForCausalLM.from_pretrained(path, dtype=target.dtype).to(target.device).eval()
        return Method(text, {"assistant_model": assistant}, is_exact=False)
    return with_heads(CloverHeads.from_pretrained(path, dtype=target.dtype).to(target.device), name)


# ---------------------------------------------------------------------- one run


@dataclass
class _Run:
    seconds: float
    new_tokens: int
    sequences: torch.Tensor  # [B, L]
    stats: Speculation  # of plain and of other methods the tokens and forwards only


@torch.no_grad()
def _generate(
    target: PreTrainedModel, method: Method, batch: dict[str, torch.Tensor], seed: int, options: dict[str, Any]
) -> _Run:
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    torch.manual_seed(seed)
    target = method.target or target
    # Plain generate and heads say themselves; a hook that counts would be compiled, anew for every count.
    tells = not method.options or method.heads is not None
    hook = None if tells else target.register_forward_pre_hook(count)
    try:
        with method.applied() as own, speculations() as records:
            _synchronize(target.device)
            start = time.perf_counter()
            sequences = target.generate(**batch, **options, **own)
            _synchronize(target.device)
            seconds = time.perf_counter() - start
    finally:
        if hook is not None:
            hook.remove()
    width = batch["input_ids"].shape[1]
    new_tokens = _count_new(sequences[:, width:], target.generation_config.eos_token_id)
    if not method.options:  # a row takes part in as many forwards as it emits tokens
        forwards, row_forwards = sequences.shape[1] - width, new_tokens
    else:  # other methods have one row
        row_forwards = forwards
    stats = records[0] if records else Speculation(forwards, row_forwards, new_tokens)
    return _Run(seconds, new_tokens, sequences, stats)


def _count_new(emitted: torch.Tensor, eos: int | list[int] | None) -> int:
    """Tokens [B, m] up to the end of each row; what comes after it is padding."""
    if eos is None:
        return emitted.numel()
    ends = torch.isin(emitted, torch.tensor(eos, device=emitted.device)).int()
    return int((ends.cumsum(1) - ends == 0).sum())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---------------------------------------------------------------------- all runs of a setting


def measure(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: Sequence[Method],
    prompts: Sequence[list[int]],
    *,
    batch_size: int = 1,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    cache_implementation: str = "dynamic",
    repeats: int = 3,
    seed: int = 0,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """One row a method, as in the JSON of [`benchmark`]. The first method must be [`plain`]."""
    if not methods or methods[0].name != "plain":
        raise ValueError("`methods` must begin with `plain()`: it is what the others are compared with.")
    pad = next((p for p in (tokenizer.pad_token_id, tokenizer.eos_token_id) if p is not None), 0)
    batches = _batches(prompts, batch_size, pad, target.device)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0, "pad_token_id": pad}
    if temperature > 0:
        options["temperature"] = temperature
    if cache_implementation != "dynamic":
        options["cache_implementation"] = cache_implementation
    setting = {"batch_size": batch_size, "temperature": temperature, "cache": cache_implementation}

    runs: list[list[list[_Run]]] = [[[] for _ in methods] for _ in range(repeats)]  # [repeat][method][batch]
    skipped: dict[int, str] = {}
    bar = tqdm(total=(repeats * len(batches) + 1) * len(methods), disable=not progress, unit="run", leave=False)
    bar.set_description(f"batch {batch_size}, temperature {temperature:g}, {cache_implementation}")
    peaks: list[dict[str, float]] = [{} for _ in methods]
    for place, method in enumerate(methods):  # what a device does only once is neither timed nor counted
        try:
            _generate(target, method, batches[0], seed, options)
            with _peak_memory(target.device) as peaks[place]:
                _generate(target, method, batches[0], seed, options)
        except (ValueError, NotImplementedError) as error:
            if place == 0:
                raise
            skipped[place] = str(error)
        bar.update()
    for repeat in range(repeats):
        for number, batch in enumerate(batches):
            for turn in range(len(methods)):
                place = (turn + repeat + number) % len(methods)  # nobody always comes first
                if place not in skipped:
                    runs[repeat][place].append(_generate(target, methods[place], batch, seed + number, options))
                bar.update()
    bar.close()
    rows = []
    for place, method in enumerate(methods):
        row = {"method": method.name, "nodes": method.nodes, "tree": method.tree, **setting}
        if place in skipped:
            rows.append({**row, "skipped": skipped[place]})
            continue
        of_method = [runs[repeat][place] for repeat in range(repeats)]
        # That of the same weights; of plain generate with packed ones, the other.
        mine = [at for at, other in enumerate(methods) if not other.options and other.target is method.target]
        baseline = mine[0] if mine and mine[0] not in skipped and method.options else 0
        of_plain = [runs[repeat][baseline] for repeat in range(repeats)]
        row |= _speeds(of_method, of_plain) | {"peak_memory_mib": peaks[place].get("mib")}
        if temperature == 0 or method.is_exact:
            differences = _differences(method.target or target, of_method[0], of_plain[0], batches)
            row |= {"identical": not differences, "differences": differences}
        else:
            row |= {"identical": None, "differences": []}
        rows.append({**row, "skipped": None})
    return rows


def _batches(prompts: Sequence[list[int]], size: int, pad: int, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """The prompts in batches, padded on the left, beginning again with the first to fill the last one."""
    batches = []
    for first in range(0, len(prompts), size):
        batches.append(batch_of([prompts[(first + i) % len(prompts)] for i in range(size)], pad, device))
    return batches


def batch_of(prompts: Sequence[list[int]], pad: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Prompts in one batch, padded on the left."""
    width = max(map(len, prompts))
    ids = [[pad] * (width - len(row)) + row for row in prompts]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in prompts]
    return {"input_ids": torch.tensor(ids).to(device), "attention_mask": torch.tensor(mask).to(device)}


def _speeds(repeats: list[list[_Run]], baseline: list[list[_Run]]) -> dict[str, Any]:
    def speed(runs: list[_Run]) -> float:
        return sum(run.new_tokens for run in runs) / sum(run.seconds for run in runs)

    speeds = [speed(runs) for runs in repeats]
    speedups = [mine / speed(theirs) for mine, theirs in zip(speeds, baseline)]
    speedup = statistics.median(speedups)
    records = [run.stats for runs in repeats for run in runs]
    forwards = sum(record.row_forwards for record in records)
    per_forward = sum(record.new_tokens for record in records) / max(forwards, 1)
    seconds = {part: sum(getattr(r, f"{part}_seconds") for r in records) for part in ("draft", "verify", "walk")}
    total = sum(run.seconds for runs in repeats for run in runs)
    seconds["other"] = max(0.0, total - sum(seconds.values()))
    trees = max(forwards - sum(len(run.sequences) for runs in repeats for run in runs), 1)  # the prompt has none
    deepest = max(len(record.accepted_by_depth) for record in records)
    by_depth = [sum(sum(record.accepted_by_depth[d : d + 1]) for record in records) for d in range(deepest)]
    return {
        "tokens_per_second": statistics.median(speeds),
        "tokens_per_second_range": [min(speeds), max(speeds)],
        "tokens_per_forward": per_forward,
        "speedup": speedup,
        "speedup_range": [min(speedups), max(speedups)],
        "efficiency": speedup / per_forward,
        "seconds": {part: value / len(repeats) for part, value in seconds.items()},
        "acceptance_by_depth": [count / trees for count in by_depth],
    }


@torch.no_grad()
def _differences(
    target: PreTrainedModel, runs: list[_Run], baseline: list[_Run], batches: list[dict[str, torch.Tensor]]
) -> list[dict[str, Any]]:
    """Where a row first leaves plain generate's text, and by how much the target prefers plain's token there."""
    found = []
    for number, (run, plain_run, batch) in enumerate(zip(runs, baseline, batches)):
        for row, (mine, its) in enumerate(zip(run.sequences.tolist(), plain_run.sequences.tolist())):
            if mine == its:
                continue
            place = next((i for i, (a, b) in enumerate(zip(mine, its)) if a != b), min(len(mine), len(its)))
            margin = math.nan
            if place < min(len(mine), len(its)):
                start = int((batch["attention_mask"][row] == 0).sum())
                ids = torch.tensor([its[start:place]], device=target.device)
                logits = target(ids).logits[0, -1].float()
                margin = float(logits[its[place]] - logits[mine[place]])
            size = len(run.sequences)
            position = place - batch["input_ids"].shape[1]
            found.append({"prompt": number * size + row, "position": position, "margin": _number(margin)})
    return found


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


@contextmanager
def _peak_memory(device: torch.device) -> Iterator[dict[str, float]]:
    """MiB over what was held before. On a CPU by looking at the process every few milliseconds, where Linux tells."""
    result: dict[str, float] = {}
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield result
        result["mib"] = (torch.cuda.max_memory_allocated(device) - before) / 2**20
        return
    statm = Path("/proc/self/statm")
    if not statm.exists():
        yield result
        return
    page, done = os.sysconf("SC_PAGE_SIZE"), threading.Event()
    before = highest = int(statm.read_text().split()[1])

    def look() -> None:
        nonlocal highest
        while not done.wait(0.005):
            highest = max(highest, int(statm.read_text().split()[1]))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield result
    finally:
        done.set()
        watcher.join()
    result["mib"] = (highest - before) * page / 2**20


# ---------------------------------------------------------------------- all settings


def benchmark(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: Sequence[Method],
    prompts: Sequence[list[int]],
    *,
    prompt_set: str = "stand-in",
    batch_sizes: Sequence[int] = (1,),
    temperatures: Sequence[float] = (0.0,),
    cache_implementations: Sequence[str] = ("dynamic",),
    max_new_tokens: int = 128,
    repeats: int = 3,
    seed: int = 0,
    progress: bool = True,
) -> dict[str, Any]:
    """Every method at every setting, with what a reader must know to believe the figures."""
    rows = []
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
        )
    return {
        "kind": "benchmark",
        **circumstances(target, prompt_set, prompts, max_new_tokens),
        "repeats": repeats,
        "seed": seed,
        "rows": rows,
    }


def circumstances(
    target: PreTrainedModel, prompt_set: str, prompts: Sequence[list[int]], max_new_tokens: int
) -> dict[str, Any]:
    """What was asked of whom, where and when."""
    return {
        "target": Path(target.config.name_or_path).name,
        "prompts": Path(prompt_set).name,
        "num_prompts": len(prompts),
        "max_new_tokens": max_new_tokens,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": target.device.type,
        **provenance(),
        "date": datetime.date.today().isoformat(),
    }


def write(result: dict[str, Any], path: str | os.PathLike) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path


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
