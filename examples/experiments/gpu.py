"""What does drafting cost on a GPU, for a model of 8B parameters, and where does every millisecond of a step go?

One command, some minutes, one GPU. The target is the stand-in, widened to the shape of Llama 3 8B (`widen.py`): it
moves the bytes and computes the products of 8B parameters, and says what the stand-in says, so that the tokens and the
share of accepted drafts are those of a trained model, though of a small one with an easy text. No text ends before its
length. In this order: the first calls of a process, one by one; greedy tokens in float32 at a small widened shape,
over texts that outgrow their graphs; then, in bfloat16, eager steps with and without cuDNN's attention; the speed of
one row against plain generate with a dynamic cache, and with a static one, which transformers compiles for plain
generate and heads take as any other; the parts of a step, with the GPU awaited before and after each, and the kernels;
more rows, with a static cache first, for which plain generate is compiled anew; attention over a long text, by a mask
and in two parts; the time of a step by the length of the text; the speed and memory of training by the default recipe;
other heads and other ways; fixed budgets and the automatic one. It needs torch and transformers, and neither trl nor
datasets. The JSON is written after every stage. A stage for which too little time is left is not begun, and one that
outlasts `--minutes` is stopped; the JSON says so.

    python examples/experiments/gpu.py --minutes 9
    python examples/experiments/gpu.py --only exact budgets --output more-results
    python examples/experiments/gpu.py --toy --output /tmp/toy   # the same stages on a CPU, in seconds
"""

import argparse
import datetime
import functools
import itertools
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from plain_training import Rows, Run, new_heads
from rich.console import Console
from rich.table import Table
from step_parts import attention_of, contexts_of, kernels_of, long_prompt, parts_of
from transformers import AutoModelForCausalLM, AutoTokenizer, CompileConfig, PreTrainedModel
from widen import Shape, widen_heads, widen_target

from hf_clover import CloverHeads, OnlineLearner
from hf_clover.decoding.cache import static
from hf_clover.measure.benchmark import Method, measure, parse_method, plain, with_heads, write
from hf_clover.measure.plots import plot
from hf_clover.measure.prompts import load_prompts
from hf_clover.measure.provenance import provenance

HERE = Path(__file__).resolve().parent
STAND_IN = HERE.parent / "stand_in"
VARIANTS = {"clover-x": "heads", "clover-2": "clover-2", "clover": "clover", "medusa": "medusa"}  # and their folders
SMALL = dict(hidden_size=512, num_hidden_layers=14, intermediate_size=1280, vocab_size=4096)

FULL = SimpleNamespace(
    exact_batch_sizes=(1, 3),
    exact_tokens=64,
    exact=Shape(**SMALL, num_attention_heads=8, num_key_value_heads=2, head_dim=128, max_position_embeddings=2048),
    shape=Shape(max_position_embeddings=65536),
    draft_vocab_size=32000,
    batch_sizes=(1, 4, 16, 48),
    prompts=3,  # at least
    new_tokens=64,
    repeats=2,
    first_calls=5,
    contexts=(256, 2048, 8192, 32768),
    context_tokens=(8, 40),
    long_text_nodes=(8, 32),
    long_text_runs=20,
    budgets=(4, 8, 16, 24, 32, 48, 64),
    budget_batch_sizes=(1, 16),
    training=(2, 2048, 20),  # rows of a step, tokens of a row, steps
    learning_rows=8,
)
TOY_SHAPE = Shape(
    hidden_size=320,
    num_hidden_layers=13,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=700,
    vocab_size=1200,
    max_position_embeddings=512,
)
TOY = SimpleNamespace(
    exact_batch_sizes=(1,),
    exact_tokens=8,
    exact=TOY_SHAPE,
    shape=TOY_SHAPE,
    draft_vocab_size=1100,
    batch_sizes=(1, 2),
    prompts=1,
    new_tokens=4,
    repeats=1,
    first_calls=2,
    contexts=(16, 64),
    context_tokens=(2, 5),
    long_text_nodes=(3,),
    long_text_runs=1,
    budgets=(4, 8),
    budget_batch_sizes=(1,),
    training=(1, 32, 2),
    learning_rows=2,
)


class Bench:
    """The models and what is measured on them; `result` grows."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.sizes, self.device = (TOY, "cpu") if args.toy else (FULL, "cuda")
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.tokenizer = AutoTokenizer.from_pretrained(STAND_IN / "target")
        self.lists: dict[str, list[dict[str, Any]]] = {
            name: []
            for name in (
                *("first_calls", "checks", "attention", "rows", "steps", "kernels", "contexts", "budgets"),
                *("training", "long_texts", "learning"),
            )
        }

    # ------------------------------------------------------------------ models

    @functools.cached_property
    def small(self) -> PreTrainedModel:
        """The stand-in as it is."""
        target = AutoModelForCausalLM.from_pretrained(STAND_IN / "target", dtype=torch.float32).to(self.device).eval()
        target.generation_config.eos_token_id = None
        return target

    @functools.cached_property
    def in_float32(self) -> PreTrainedModel:
        torch.manual_seed(0)
        return widen_target(self.small, self.sizes.exact)

    @functools.cached_property
    def target(self) -> PreTrainedModel:
        if (self.sizes.shape, self.dtype) == (self.sizes.exact, torch.float32):
            return self.in_float32  # at toy size they are the same, and compiled once
        torch.manual_seed(0)
        return widen_target(self.small, self.sizes.shape, self.dtype)

    def heads_for(self, target: PreTrainedModel, variant: str, **fields: int) -> CloverHeads:
        heads = CloverHeads.from_pretrained(STAND_IN / VARIANTS[variant], dtype=torch.float32)
        return widen_heads(heads, target, **fields)

    @functools.cached_property
    def ours(self) -> list[Method]:
        """The default, with the target's vocabulary and with a draft vocabulary."""
        some = self.sizes.draft_vocab_size
        heads = [self.heads_for(self.target, "clover-x", draft_vocab_size=size) for size in (None, some)]
        return [with_heads(heads[0]), with_heads(heads[1], f"clover-x, {some} ids")]

    @functools.cached_property
    def other_heads(self) -> list[Method]:
        return [with_heads(self.heads_for(self.target, variant)) for variant in VARIANTS if variant != "clover-x"]

    @functools.cached_property
    def other_ways(self) -> list[Method]:
        """Of transformers; the assistant is the stand-in itself, with as many ids as the target."""
        ids = Shape.of(self.small.config, vocab_size=self.sizes.shape.vocab_size)
        assistant = widen_target(self.small, ids, self.dtype)
        lookup = parse_method("prompt-lookup", self.target)
        return [lookup, Method("assistant", {"assistant_model": assistant}, is_exact=False)]

    # ------------------------------------------------------------------ prompts

    def prompts(self, batch_size: int = 1) -> list[list[int]]:
        """Short ones: decoding is the question."""
        needed = max(self.sizes.prompts, batch_size)
        return sorted(load_prompts("stand-in", self.tokenizer, 4 * needed), key=len)[:needed]

    def batch(self, prompts: list[list[int]]) -> dict[str, torch.Tensor]:
        padded = self.tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
        return {name: padded[name].to(self.device) for name in ("input_ids", "attention_mask")}

    # ------------------------------------------------------------------ stages

    def first_calls(self) -> None:
        """In them kernels are loaded, the target is tried, and graphs are captured."""
        inputs, heads = self.batch(self.prompts()[:1]), self.ours[1].heads
        for call in range(self.sizes.first_calls):
            started = time.perf_counter()
            tokens = self.target.generate(**inputs, assistant_model=heads, max_new_tokens=self.sizes.new_tokens)
            tokens.tolist()  # waits for the device
            self.lists["first_calls"].append({"call": call + 1, "seconds": time.perf_counter() - started})

    def exact(self, cache: str) -> None:
        """Greedy tokens in float32: those of plain generate with the same cache, and those of the stand-in. Graphs see
        few columns at first, so that texts outgrow them."""
        greedy = dict(max_new_tokens=self.sizes.exact_tokens, do_sample=False, return_dict_in_generate=True)
        options = greedy if cache == "dynamic" else greedy | {"cache_implementation": cache}
        if cache != "dynamic" and self.device == "cpu":  # where transformers compiles nothing unless it is told to
            options["compile_config"] = CompileConfig(backend="eager", mode=None)
            options["compile_config"]._compile_all_devices = True
        wide = self.in_float32
        for variant in VARIANTS:
            heads = self.heads_for(wide, variant)
            for size in self.sizes.exact_batch_sizes:
                inputs = self.batch(self.prompts(size)[:size])
                stand_in = self.small.generate(**inputs, **greedy).sequences.tolist()
                its = wide.generate(**inputs, **options).sequences.tolist()
                with mock.patch.object(static, "LEAST_COLUMNS", 64):
                    out = wide.generate(**inputs, **options, assistant_model=heads, num_assistant_tokens=15)
                check = {"cache": cache, "batch_size": size, "method": variant}
                check["as_plain"], check["as_the_stand_in"] = out.sequences.tolist() == its, its == stand_in
                check["tokens_per_forward"] = out.speculation.tokens_per_forward
                check["passed"] = (
                    check["as_plain"] and check["as_the_stand_in"] and out.speculation.accepted_tokens > 0
                )
                self.lists["checks"].append(check)

    def attention(self) -> None:
        """Eager steps where torch may choose cuDNN's attention, and where it may not."""
        heads = [replace(method, options=method.options | {"disable_compile": True}) for method in self.ours[1:]]
        for has_cudnn in (True, False):
            torch.backends.cuda.enable_cudnn_sdp(has_cudnn)
            rows = self._measure([plain(), *heads], "dynamic", 1)
            self.lists["attention"] += [row | {"has_cudnn": has_cudnn} for row in rows]
        torch.backends.cuda.enable_cudnn_sdp(True)

    def speed(self, cache: str, batch_size: int, methods: str) -> None:
        chosen = {"ours": self.ours, "other heads": self.other_heads}.get(methods)
        if methods == "others":
            chosen = self.other_heads + (self.other_ways if batch_size == 1 else [])
        self.lists["rows"] += self._measure([plain(), *chosen], cache, batch_size)

    def budgets(self, cache: str, batch_size: int) -> None:
        heads = self.ours[1].heads
        fixed = [with_heads(heads, f"{nodes} nodes", nodes) for nodes in self.sizes.budgets]
        self.lists["budgets"] += self._measure([plain(), *fixed, with_heads(heads, "automatic")], cache, batch_size)

    def _measure(self, methods: list[Method], cache: str, batch_size: int) -> list[dict[str, Any]]:
        return measure(
            self.target,
            self.tokenizer,
            methods,
            self.prompts(batch_size),
            batch_size=batch_size,
            max_new_tokens=self.sizes.new_tokens,
            cache_implementation=cache,
            repeats=self.sizes.repeats,
            progress=False,
        )

    def steps(self, cache: str) -> None:
        """The parts of a step, and the kernels of it."""
        inputs = self.batch(self.prompts()[:1])
        options = dict(max_new_tokens=self.sizes.new_tokens, do_sample=False)
        if cache != "dynamic":
            options["cache_implementation"] = cache
        for method in (plain(), *self.ours):
            what, mine = {"cache": cache, "method": method.name}, {**options, **method.options}
            self.lists["steps"].append(what | parts_of(self.target, inputs, mine))
            if method is not self.ours[0]:
                self.lists["kernels"] += [what | kernel for kernel in kernels_of(self.target, inputs, mine)]

    def long_texts(self) -> None:
        """The attention of one row's step in all layers, as it is over short texts and as it is over long ones."""
        sizes, where = self.sizes, (self.dtype, torch.device(self.device))
        for length, nodes in itertools.product(sizes.contexts, sizes.long_text_nodes):
            self.lists["long_texts"] += attention_of(sizes.shape, length, nodes, *where, sizes.long_text_runs)

    def contexts(self, cache: str, lengths: Sequence[int]) -> None:
        options = {} if cache == "dynamic" else {"cache_implementation": cache}
        for length in lengths:
            inputs = self.batch([long_prompt(self.tokenizer, length)])
            for method in (plain(), self.ours[1]):
                found = contexts_of(self.target, inputs, self.sizes.context_tokens, {**options, **method.options})
                self.lists["contexts"].append({"cache": cache, "method": method.name, "context": length, **found})

    def training(self) -> None:
        """Of new heads by the default recipe, after a few steps that are not counted; the target's pass is in it."""
        batch_size, length, steps = self.sizes.training
        ids = torch.tensor(long_prompt(self.tokenizer, 8 * length)).split(length)
        rows = Rows.packed([row.tolist() for row in ids], length)
        torch.manual_seed(0)
        on_cuda = self.device == "cuda"
        for size in (None, self.sizes.draft_vocab_size):
            heads = new_heads(self.target, rows, size).to(self.device)
            run = Run(heads, self.target, rows, steps + max(steps // 4, 1), batch_size)
            run.steps, whole = max(steps // 4, 1), run.steps
            run.train()
            if on_cuda:
                torch.cuda.reset_peak_memory_stats()
            run.steps, seconds, tokens = whole, run.spent, run.tokens
            means = run.train()
            found = {"draft_vocab_size": size, "parameters": sum(p.numel() for p in heads.parameters())}
            found |= {"tokens_per_step": batch_size * length, "seconds_per_step": (run.spent - seconds) / steps}
            found["tokens_per_second"] = (run.tokens - tokens) / (run.spent - seconds)
            found["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30 if on_cuda else None
            found["of_the_target_gib"] = sum(p.nbytes for p in self.target.parameters()) / 2**30
            self.lists["training"].append(found | {"loss": means["head_0/loss"]})
            del heads, run

    def learning(self) -> None:
        """Heads that learn in use: seconds of calls that are heard and of calls that are not, and of a step."""
        heads = CloverHeads.from_target(self.target, draft_vocab_size=self.sizes.draft_vocab_size)
        inputs = self.batch(self.prompts(self.sizes.learning_rows))
        learner = OnlineLearner(heads, self.target, share=0.0)

        def seconds_of(do: Callable[[], Any]) -> float:
            started = time.perf_counter()
            do()
            if self.device == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - started

        def call() -> None:
            self.target.generate(
                **inputs, assistant_model=heads, max_new_tokens=self.sizes.new_tokens, num_assistant_tokens=8
            )

        call()
        with learner:
            for _ in range(self.sizes.repeats):
                found = {"heard_seconds": seconds_of(call)}
                heads.learner = None
                found["unheard_seconds"] = seconds_of(call)
                heads.learner, before = learner, learner.tokens
                found["step_seconds"] = seconds_of(lambda: learner.step(least=1))
                self.lists["learning"].append(found | {"tokens": learner.tokens - before})

    def stages(self) -> Iterator[tuple[str, int, int, Callable[[], None]]]:
        """Name, the seconds it needs at least and may take at most, what to do; what matters most comes first."""
        sizes = self.sizes

        def speed(cache: str, size: int, methods: str = "ours") -> tuple[str, int, int, Callable[[], None]]:
            least, most = (20, 90) if cache == "dynamic" else (30, 300)  # where it compiles, 32 layers for each graph
            name = f"speed {cache} {size}" + ("" if methods == "ours" else f", {methods}")
            return name, least, most, functools.partial(self.speed, cache, size, methods)

        first, *more = sizes.batch_sizes
        yield "first calls", 20, 90, self.first_calls
        yield "exact dynamic", 10, 60, functools.partial(self.exact, "dynamic")
        yield "attention", 20, 60, self.attention
        yield speed("dynamic", first)
        yield speed("static", first)
        for cache in ("dynamic", "static"):
            yield f"steps {cache}", 15, 120, functools.partial(self.steps, cache)
        for size in more:
            yield speed("static", size)
        yield "long texts", 10, 60, self.long_texts
        yield "contexts dynamic", 20, 90, functools.partial(self.contexts, "dynamic", sizes.contexts)
        yield "training", 15, 60, self.training
        yield "learning in use", 10, 60, self.learning
        for size in more:
            yield speed("dynamic", size)
        yield speed("dynamic", first, "others")
        yield "exact static", 10, 300, functools.partial(self.exact, "static")
        for size in sizes.budget_batch_sizes:
            yield f"budgets static {size}", 40, 180, functools.partial(self.budgets, "static", size)
        ends = (min(sizes.contexts), max(sizes.contexts))
        yield "contexts static", 40, 120, functools.partial(self.contexts, "static", ends)
        for size in sizes.batch_sizes:
            if size != first:
                yield speed("dynamic", size, "others")
            yield speed("static", size, "other heads")


# ---------------------------------------------------------------------- the time that there is


class OutOfTimeError(BaseException):
    """No `Exception`, which somebody on the way might take for a failure of his own."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = _parse(argv)
    end = time.monotonic() + 60 * args.minutes
    bench = Bench(args)
    seconds: dict[str, float] = {}
    left_out: dict[str, str] = {}
    failed: dict[str, str] = {}
    result = {
        "kind": "experiment",
        "name": "gpu",
        "question": " ".join(__doc__.split("\n\n")[0].split()),
        "settings": {name: value for name, value in vars(args).items() if name != "output"}
        | {
            "sizes": {
                name: asdict(value) if isinstance(value, Shape) else value for name, value in vars(bench.sizes).items()
            }
        }
        | {"dtype": str(bench.dtype).removeprefix("torch."), "device": bench.device},
        **provenance(),
        "date": datetime.date.today().isoformat(),
        "stages": seconds,
        "left_out": left_out,
        "failed": failed,
        **bench.lists,
    }
    path = args.output / "gpu.json"
    for name, least, most, run in bench.stages():
        if args.only and not name.startswith(tuple(args.only)):
            continue
        started = time.monotonic()
        left = end - started
        if left < least:
            left_out[name] = f"{max(left, 0):.0f} seconds were left, and it needs at least {least}"
        else:
            try:
                with at_most(min(left, most)):
                    run()
            except OutOfTimeError:
                left_out[name] = f"stopped after {time.monotonic() - started:.0f} seconds, which was all it was given"
            except Exception as error:  # the others may still be measured
                traceback.print_exc()
                failed[name] = f"{type(error).__name__}: {error}"[:2000]
            seconds[name] = time.monotonic() - started
            print(f"{name}: {seconds[name]:.1f} s", flush=True)
        result["figure"] = figure_of(result)
        write(result, path)
    _show(result)
    if result["figure"]["panels"]:
        print(*plot(path), sep="\n")
    unlike = [check for check in bench.lists["checks"] if not check["passed"]]
    if unlike or failed:
        raise SystemExit(f"gpu.py: not everything went well: failed {failed}, other tokens {unlike}")
    return result


# ---------------------------------------------------------------------- what is seen


def figure_of(result: dict[str, Any]) -> dict[str, Any]:
    per_plain, free = {"y": 1.0, "label": "plain generate"}, {"y": 1.0, "label": "drafts cost nothing"}
    rows = [row for row in result["rows"] if row["method"] != "plain" and not row["skipped"]]
    budgets = [row for row in result["budgets"] if not row["skipped"]]
    panels = []
    for cache in ("dynamic", "static"):
        mine = [row for row in rows if row["cache"] == cache]
        several = [row for row in mine if sum(row["method"] == other["method"] for other in mine) > 1]
        for name, unit, reference in (
            ("speedup", "× plain generate", per_plain),
            ("efficiency", "speedup / tokens per forward", free),
        ):
            series = _along(several, "batch_size", name)
            panels.append(_lines(f"{name.title()}, {cache} cache", "batch size", unit, series, reference=reference))
    panels.append(_where_a_step_goes(result["steps"]))
    for cache in ("dynamic", "static"):
        series = _along([row for row in result["contexts"] if row["cache"] == cache], "context", "step_ms")
        panels.append(_lines(f"A step by context, {cache} cache", "tokens before", "ms per step", series))
    rows = [row | {"method": f"{row['method']}, {row['nodes']} nodes"} for row in result["long_texts"]]
    series = _along(rows, "context", "ms")
    panels.append(_lines("Attention of a step by the text", "tokens before", "ms, all layers", series))
    for size in dict.fromkeys(row["batch_size"] for row in budgets):
        mine = [row for row in budgets if row["batch_size"] == size]
        fixed = [row | {"method": "fixed"} for row in mine if row["nodes"] is not None]
        level = [r | {"nodes": f["nodes"]} for r in mine if r["method"] == "automatic" for f in fixed]
        series = [
            *_along(fixed, "nodes", "speedup"),
            *(one | {"dashed": True} for one in _along(level, "nodes", "speedup")),
        ]
        title = f"Budgets, batch size {size}, static cache"
        panels.append(_lines(title, "drafted nodes per step", "× plain generate", series, reference=per_plain))
    shape = result["settings"]["sizes"]["shape"]
    title = f"The stand-in, widened to {shape['num_hidden_layers']} layers of {shape['hidden_size']}"
    note = f"{result['machine']}, {result['settings']['dtype']}; {result['command']}"
    return {"title": title, "note": note, "panels": [panel for panel in panels if panel["series"]]}


def _lines(title: str, xlabel: str, ylabel: str, series: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return dict(kind="lines", title=title, xlabel=xlabel, ylabel=ylabel, xscale="log2", series=series, **more)


def _along(rows: list[dict[str, Any]], x: str, y: str) -> list[dict[str, Any]]:
    """A line for each method."""
    found: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row[x]):
        series = found.setdefault(row["method"], {"label": row["method"], "x": [], "y": []})
        series["x"].append(row[x])
        series["y"].append(row[y])
    return list(found.values())


def _where_a_step_goes(steps: list[dict[str, Any]]) -> dict[str, Any]:
    parts = list(dict.fromkeys(part for step in steps for part in step["parts_ms"]))
    series = []
    for part in parts:
        having = [step for step in steps if part in step["parts_ms"]]
        x = [f"{step['method']}, {step['cache']}" for step in having]
        series.append({"label": part, "x": x, "y": [step["parts_ms"][part] for step in having]})
    title = "Where a step goes, each part by itself"
    return {"kind": "bars", "stacked": True, "title": title, "xlabel": "", "ylabel": "ms per step", "series": series}


COLUMNS = ("cache", "batch_size", "method", "tokens_per_second", "tokens_per_forward", "speedup", "efficiency")


def _show(result: dict[str, Any]) -> None:
    console = Console()
    shown = {name: result[name] for name in ("first_calls", "checks", "long_texts", "contexts") if result[name]}
    for name, columns in (("attention", ("has_cudnn", *COLUMNS)), ("rows", COLUMNS), ("budgets", COLUMNS)):
        shown[name] = [{column: row.get(column) for column in columns} for row in result[name]]
    shown["steps"] = [
        {**{k: v for k, v in step.items() if k != "parts_ms"}, **step["parts_ms"]} for step in result["steps"]
    ]
    shown |= {name: result[name] for name in ("training", "learning", "kernels")}
    for name, rows in shown.items():
        columns = list(dict.fromkeys(column for row in rows for column in row))
        table = Table(*(column.replace("_", " ") for column in columns), title=name)
        for row in rows:
            values = (row.get(column) for column in columns)
            table.add_row(*(f"{v:.3g}" if isinstance(v, float) else "–" if v is None else str(v) for v in values))
        if rows:
            console.print(table)
    for name in ("left_out", "failed"):
        for stage, reason in result[name].items():
            console.print(f"{name.replace('_', ' ')}: {stage}: {reason}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9, help="of all of it (%(default)s)")
    parser.add_argument("--only", nargs="+", default=[], help="stages whose names begin so, such as 'speed static'")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="where JSON and plots go")
    parser.add_argument("--toy", action="store_true", help="on the CPU, at sizes that take seconds")
    args = parser.parse_args(argv)
    if not args.toy and not torch.cuda.is_available():
        parser.error("there is no CUDA device to measure: `--toy` runs the same stages on the CPU")
    return args


if __name__ == "__main__":
    main()
