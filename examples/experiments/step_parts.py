"""What a step of generation is made of: its parts by the clock, its kernels, and how it grows with the text.

Contract: functions of a target, inputs and keywords for `generate` (with heads or without), batch size 1, that return
plain numbers. A part is timed with the device awaited before and after it, so parts do not overlap as they otherwise
may; the time of the same step without clocks is given beside them. Nothing outlives a call. `attention_of` needs no
target, but a shape alone.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel
from widen import Shape

from hf_clover import speculations
from hf_clover.decoding import loop
from hf_clover.decoding.cache.static import columns_for
from hf_clover.decoding.draft.drafter import CloverDrafter
from hf_clover.decoding.graphs import Graphs
from hf_clover.decoding.target.attention import packed_attention
from hf_clover.decoding.target.long_texts import hang_parts, why_wrong
from hf_clover.decoding.target.masks import FULL, MaskRules, ancestors_of, visible_columns
from hf_clover.decoding.target.trees import TargetRun
from hf_clover.measure.prompts import held_out_sources

PARTS = {  # of a step with heads: where each is
    "verify": [(TargetRun, "verify")],
    "draft": [(CloverDrafter, "draft"), (CloverDrafter, "extend")],
    "walk": [(loop, "greedy_walk"), (loop, "read_walk"), (loop, "replay")],
    "commit": [(TargetRun, "commit")],
}
KERNELS = 12  # of the longest, in all


class Clock:
    """Seconds by part; what a part calls that is a part itself does not count twice."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.calls: dict[str, list[float]] = {}
        self._inner: list[float] = []  # for each part that is open, seconds of the parts within it

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            started = self.now()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = self.now() - started
                self.calls.setdefault(name, []).append(seconds - self._inner.pop())
                if self._inner:
                    self._inner[-1] += seconds

        return timed

    @contextmanager
    def on(self, target: PreTrainedModel, parts: dict[str, list[tuple[Any, str]]]) -> Iterator["Clock"]:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(target, "_prefill", self.around("prefill", target._prefill)))
            for part, places in parts.items():
                for owner, name in places:
                    stack.enter_context(mock.patch.object(owner, name, self.around(part, getattr(owner, name))))
            yield self


@torch.no_grad()
def parts_of(target: PreTrainedModel, inputs: dict[str, torch.Tensor], options: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of a step, as it is (`step_ms`) and with clocks around its parts (`parts_ms`)."""
    for _ in range(2):  # what a device does only once
        _decode(target, inputs, options, {})
    whole, steps, tokens, _ = _decode(target, inputs, options, {})
    clocked, _, _, calls = _decode(target, inputs, options, PARTS)
    parts = {name: 1000 * sum(calls[name]) / steps for name in PARTS if name in calls}
    parts = parts or {"plain step": 1000 * clocked / steps}
    parts["other"] = max(0.0, 1000 * clocked / steps - sum(parts.values()))
    found = {"step_ms": 1000 * whole / steps, "tokens_per_forward": tokens / steps, "parts_ms": parts}
    if "verify" in parts:
        found["beside_verify"] = sum(parts.get(name, 0.0) for name in ("draft", "walk", "commit")) / parts["verify"]
    return found


def _decode(
    target: PreTrainedModel, inputs: dict[str, torch.Tensor], options: dict[str, Any], parts: dict[str, Any]
) -> tuple[float, int, int, dict[str, list[float]]]:
    """Seconds after the prompt was read, steps, tokens, and the seconds of each call of each part."""
    clock = Clock(target.device)
    with clock.on(target, parts) as clock, speculations() as records:
        started = clock.now()
        sequences = target.generate(**inputs, **options)
        seconds = clock.now() - started
    tokens = sequences.shape[1] - inputs["input_ids"].shape[1] - 1  # the prompt's forward gave the first
    seconds -= sum(clock.calls["prefill"])
    if records:
        return seconds, max(records[0].target_forwards - 1, 1), tokens, clock.calls
    return seconds, max(tokens, 1), tokens, clock.calls


@torch.no_grad()
def kernels_of(
    target: PreTrainedModel, inputs: dict[str, torch.Tensor], options: dict[str, Any]
) -> list[dict[str, Any]]:
    """The longest kernels of a generation (operators, on a CPU), per step, the prompt's in them; all of them first."""
    on_cuda = target.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_cuda]) as profiler:
        _, steps, _, _ = _decode(target, inputs, options, {})
    kind = DeviceType.CUDA if on_cuda else DeviceType.CPU
    events = [event for event in profiler.key_averages() if event.device_type == kind]
    spent = [(event.self_device_time_total if on_cuda else event.self_cpu_time_total) / 1000 for event in events]
    longest = sorted(zip(spent, events), key=lambda pair: -pair[0])[:KERNELS]
    found = [{"kernel": "all", "calls": sum(event.count for event in events) / steps, "ms": sum(spent) / steps}]
    return found + [{"kernel": e.key[:100], "calls": e.count / steps, "ms": ms / steps} for ms, e in longest]


def long_prompt(tokenizer: Any, length: int) -> list[int]:
    """So many tokens of source code, from its beginning again where there is not enough."""
    ids = tokenizer("".join(held_out_sources().values()))["input_ids"]
    return (ids * (length // len(ids) + 1))[:length]


@torch.no_grad()
def contexts_of(
    target: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    new_tokens: Sequence[int],
    options: dict[str, Any],
    repeats: int = 2,
) -> dict[str, float]:
    """Time of a step and of a token after this prompt: what a longer continuation takes over a shorter one, so that
    reading the prompt is no part of it."""
    few, many = new_tokens
    clock = Clock(target.device)

    def run(count: int) -> tuple[float, int]:
        with speculations() as records:
            started = clock.now()
            target.generate(**inputs, **options, max_new_tokens=count, do_sample=False)
            seconds = clock.now() - started
        return seconds, records[0].target_forwards if records else count

    for count in new_tokens:
        run(count)
    pairs = [(run(few), run(many)) for _ in range(repeats)]
    seconds = statistics.median(longer[0] - shorter[0] for shorter, longer in pairs)
    steps = max(pairs[0][1][1] - pairs[0][0][1], 1)
    return {
        "step_ms": 1000 * seconds / steps,
        "token_ms": 1000 * seconds / (many - few),
        "tokens_per_forward": (many - few) / steps,
    }


@torch.no_grad()
def attention_of(
    shape: Shape, length: int, nodes: int, dtype: torch.dtype, device: torch.device, runs: int
) -> list[dict[str, Any]]:
    """Milliseconds of one row's attention in all layers, for a tree of so many nodes after a text of `length`, as one
    graph: by a mask, and in parts, with how far that is from the other. `wrong` is what the trial has against the
    kernels of the parts; then the mask is used there too."""
    groups = shape.num_attention_heads // shape.num_key_value_heads
    columns, order = columns_for(length + nodes), torch.arange(nodes, device=device)
    starts, parents = torch.full((1, 1), length, device=device), ((order - 1) // 2).clamp(min=0)[None]
    text, ancestors = (
        torch.ones(1, columns, dtype=torch.bool, device=device),
        ancestors_of(parents, nodes.bit_length()),
    )
    rules, slots = MaskRules((FULL,), False, None, None, groups), SimpleNamespace(starts=starts, visible_text=text)
    draw = partial(torch.randn, dtype=dtype, device=device)
    of_layers = (shape.num_hidden_layers, 2, 1, shape.num_key_value_heads, columns, shape.head_dim)
    cache, query = draw(of_layers), draw(1, shape.num_attention_heads, nodes, shape.head_dim)
    layer = SimpleNamespace(num_key_value_groups=groups, is_causal=True)

    def attend(query: torch.Tensor, in_parts: bool) -> tuple[torch.Tensor, ...]:
        mask = rules.masks(visible_columns(ancestors, starts, columns, text), starts, parents, text, dtype)
        if in_parts:
            hang_parts(mask, rules, ancestors, slots, dtype)
        return ([packed_attention(layer, query, keys, values, mask)[0] for keys, values in cache][-1],)

    wrong = why_wrong(device, dtype, groups * nodes, shape.head_dim)
    graphs, clock, exact, rows = Graphs(device, "Attention over texts"), Clock(device), None, []
    for method, in_parts in (("by the mask", False), ("in parts", True)):
        run = partial(graphs.run, method, partial(attend, in_parts=in_parts), [query])
        out = [run() for _ in range(3)][-1][0].float()  # eager, captured, replayed
        exact = out if exact is None else exact
        started = clock.now()
        for _ in range(runs):
            run()
        row = {"context": length, "columns": columns, "nodes": nodes, "method": method}
        row["ms"] = 1000 * (clock.now() - started) / runs
        row["off_by"] = float((out - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt())
        rows.append(row | {"wrong": wrong})
    return rows
