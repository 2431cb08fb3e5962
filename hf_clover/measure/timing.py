"""One batch of prompts through one way to generate: its tokens, seconds, forwards and memory.

Contract: `run_once` times only `generate`, and waits for the device before and after. Answers are returned without
padding. The caller decides what is run, in which order and how often.
"""

import gc
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..decoding.record import Speculation, speculations
from .methods import Method


@dataclass
class Run:
    seconds: float
    prompts: list[list[int]]
    answers: list[list[int]]  # one for each prompt, without padding
    stats: Speculation  # for methods without heads only tokens and forwards
    members: list[int] = field(default_factory=list)  # the numbers of the prompts
    category: str | None = None

    @property
    def new_tokens(self) -> int:
        return sum(map(len, self.answers))


@torch.no_grad()
def run_once(
    target: PreTrainedModel, method: Method, prompts: list[list[int]], seed: int, options: dict[str, Any]
) -> Run:
    batch, forwards = batch_of(prompts, options["pad_token_id"], target.device), 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    torch.manual_seed(seed)
    target = method.target or target
    # Forwards of plain generate and of heads are known without a hook, which a compiled target would compile again for
    # every count.
    tells = not method.options or method.heads is not None
    hook = None if tells else target.register_forward_pre_hook(count)
    try:
        with method.applied() as own, speculations() as records:
            _synchronize(target.device)
            start = time.perf_counter()
            sequences = target.generate(**batch, **options, **own)  # type: ignore[operator]
            _synchronize(target.device)
            seconds = time.perf_counter() - start
    finally:
        if hook is not None:
            hook.remove()
    width = batch["input_ids"].shape[1]
    answers = _until_end(sequences[:, width:], target.generation_config.eos_token_id)
    new_tokens = sum(map(len, answers))
    if not method.options:  # a row takes part in as many forwards as it emits tokens
        forwards, row_forwards = sequences.shape[1] - width, new_tokens
    else:  # other methods have one row
        row_forwards = forwards
    stats = records[0] if records else Speculation(forwards, row_forwards, new_tokens)
    return Run(seconds, prompts, answers, stats)


def _until_end(emitted: torch.Tensor, eos: int | list[int] | None) -> list[list[int]]:
    """Tokens [B, m] up to the end of each row; what comes after it is padding."""
    if eos is None:
        return emitted.tolist()
    ends = torch.isin(emitted, torch.tensor(eos, device=emitted.device)).int()
    lengths = (ends.cumsum(1) - ends == 0).sum(1).tolist()
    return [row[:length] for row, length in zip(emitted.tolist(), lengths)]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def batch_of(prompts: Sequence[list[int]], pad: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Prompts in one batch, padded on the left."""
    width = max(map(len, prompts))
    ids = [[pad] * (width - len(row)) + row for row in prompts]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in prompts]
    return {"input_ids": torch.tensor(ids).to(device), "attention_mask": torch.tensor(mask).to(device)}


@contextmanager
def peak_memory(device: torch.device) -> Iterator[dict[str, float]]:
    """The peak in MiB above the memory held before. On a CPU the process's memory is read every few milliseconds
    (Linux only)."""
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
