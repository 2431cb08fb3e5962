"""What happens to draft heads when their target is trained further?

The target gets a LoRA adapter, which is fitted to one kind of text for longer and longer: Python's language
reference, which the stand-in has never seen, or what is in `--fit`. Each time the old heads draft for it, in that kind
of text and in others. Then, for the target that was trained longest, an adapter on the old heads and heads made anew
learn from the same text of that target, half of it of the new kind and half code. What is measured on, nobody has
learned from.

    python examples/experiments/further_training.py
    python examples/experiments/further_training.py --target org/target --heads org/heads --fit code.jsonl \
        --questions questions.jsonl
"""

import argparse
import ast
import copy
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from common import GENERATION, TRAINING, finish, line, load_heads, load_target, panel, parse, training_config
from continuations import continuations, encode, library_sources
from datasets import Dataset, concatenate_datasets
from drafters import greedy
from peft import LoraConfig, PeftModel, get_peft_model
from tasks import docstring_starts, in_turn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProgressCallback, set_seed

from hf_clover import CloverHeads, CloverTrainer
from hf_clover.measure.prompts import function_starts, load_questions, standard_library

DEFAULTS = {
    **{name: GENERATION[name] for name in ("heads", "num_prompts", "max_new_tokens")},
    **{name: TRAINING[name] for name in ("length", "batch_size")},
    "samples": 640,
    "fit": None,
    "questions": None,
    "fit_tokens": (10_000, 40_000, 160_000),
    "tokens": (10_000, 40_000, 160_000),
    "nodes": 16,
}
TOY = dict(num_prompts=2, max_new_tokens=8, samples=6, length=32, fit_tokens=(64, 128), tokens=(64, 128), nodes=4)
FITTED = "the language reference"  # the kind of text that the target is fitted to, where the user gives none
RATE, RANK = 1e-3, 16  # of the target's adapter
HEADS_RATE = 1e-3  # of the heads' adapter; new heads have the trainer's defaults
HELD_OUT = 10  # one text in so many is measured on


# ---------------------------------------------------------------------- text


def reference() -> list[str]:
    """The pages of Python's language reference that `help` shows."""
    tree = ast.parse((standard_library() / "pydoc_data" / "topics.py").read_text(encoding="utf-8"))
    (pages,) = (node.value for node in tree.body if isinstance(node, ast.Assign))
    return [page for page in ast.literal_eval(pages).values() if len(page) > 1000]


def texts_to_fit(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> tuple[list[list[int]], str]:
    """Texts of one kind as token ids, and what to call it."""
    if args.fit is None:
        return [tokenizer(page).input_ids for page in reference()], FITTED
    rows = [json.loads(row) for row in Path(args.fit).read_text(encoding="utf-8").split("\n") if row.strip()]
    return [encode(row, tokenizer) for row in rows], Path(args.fit).stem


def prompts_by_kind(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, held_out: list[list[int]], kind: str
) -> dict[str, list[list[int]]]:
    found = {kind: [ids[: args.length // 4] for ids in held_out]}
    if args.questions is None:
        for name, texts in (("code", function_starts), ("docstrings", docstring_starts)):
            found[name] = [tokenizer(text).input_ids for text in islice(in_turn(texts()), args.num_prompts)]
    else:
        for question in load_questions(args.questions, tokenizer, per_category=args.num_prompts):
            found.setdefault(question.category, []).append(question.encode(tokenizer))
    return {name: prompts[: args.num_prompts] for name, prompts in found.items()}


# ---------------------------------------------------------------------- training


def fit(adapted: PeftModel, optimizer: torch.optim.Optimizer, batches: Iterable[list[int]], tokens: int) -> int:
    """Next-token cross-entropy, one sample a step, until so many tokens were seen; returns how many."""
    adapted.train()
    seen = 0
    for ids in batches:
        if seen >= tokens:
            break
        row = torch.tensor([ids], device=adapted.device)  # [1, T]
        optimizer.zero_grad()
        adapted(input_ids=row, labels=row).loss.backward()
        torch.nn.utils.clip_grad_norm_(adapted.parameters(), 1.0)
        optimizer.step()
        seen += len(ids)
    adapted.eval()
    return seen


def merged(adapted: PeftModel) -> PreTrainedModel:
    """The target as it is now; its adapter may be trained further."""
    return copy.deepcopy(adapted).merge_and_unload().eval().requires_grad_(False)


def own_text(
    args: argparse.Namespace, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, streams: list[list[int]]
) -> Dataset:
    """What the target writes: half of it goes on with the new kind of text, half with the library's code."""
    width, half = args.length // 4, args.samples // 2
    library = tokenizer(library_sources(), verbose=False).input_ids
    parts = [
        continuations(args, target, tokenizer, kind, half, width, args.seed + i)
        for i, kind in enumerate((streams, library))
    ]
    return concatenate_datasets(parts).shuffle(seed=args.seed)


def learn(
    args: argparse.Namespace,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Dataset,
    tokens: int,
    old: CloverHeads | None,
) -> tuple[CloverHeads, float]:
    """An adapter on a copy of the `old` heads, or else new ones; and the seconds it took."""
    mean = statistics.fmean(map(len, data["input_ids"]))
    recipe = {} if old is None else {"learning_rate": HEADS_RATE}
    set_seed(args.seed)
    config = training_config(
        args.work / "trainer",
        target,
        max_steps=math.ceil(tokens / (args.batch_size * mean)),
        per_device_train_batch_size=args.batch_size,
        max_length=args.length,
        bf16=target.device.type == "cuda",
        seed=args.seed,
        **recipe,
    )
    trainer = CloverTrainer(
        model=copy.deepcopy(old),
        teacher_model=target,
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=None if old is None else LoraConfig(r=RANK, lora_alpha=2 * RANK),
    )
    trainer.remove_callback(ProgressCallback)
    started = time.perf_counter()
    trainer.train()
    return trainer.heads.eval(), time.perf_counter() - started


# ---------------------------------------------------------------------- the experiment


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(__doc__, argv, DEFAULTS, TOY)
    target, tokenizer = load_target(args)
    old = load_heads(args, target)
    texts, kind = texts_to_fit(args, tokenizer)
    kept = [ids for i, ids in enumerate(texts) if i % HELD_OUT]
    prompts = prompts_by_kind(args, tokenizer, texts[::HELD_OUT], kind)
    samples = [ids[i : i + args.length] for ids in kept for i in range(0, len(ids), args.length)]
    samples = [ids for ids in samples if len(ids) > args.length // 4]
    rows: list[dict[str, Any]] = []

    def measure(what: str, heads: CloverHeads, tuned: PreTrainedModel, **about: Any) -> None:
        for name, starts in prompts.items():
            plain, _ = greedy(tuned, starts, args.max_new_tokens)
            options = dict(assistant_model=heads, num_assistant_tokens=args.nodes)
            drafted, per_forward = greedy(tuned, starts, args.max_new_tokens, **options)
            row = {"heads": what, "kind": name, **about, "tokens_per_forward": per_forward}
            rows.append({**row, "identical": plain == drafted})

    set_seed(args.seed)
    adapted = get_peft_model(
        copy.deepcopy(target), LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    )
    optimizer = torch.optim.AdamW((p for p in adapted.parameters() if p.requires_grad), lr=RATE)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(args.seed)).tolist()
    stream, seen, tuned = itertools.cycle(samples[i] for i in order), 0, target
    measure("old", old, target, fit_tokens=0, tokens=0)
    for tokens in sorted(args.fit_tokens):
        seen += fit(adapted, optimizer, stream, tokens - seen)
        tuned = merged(adapted)
        measure("old", old, tuned, fit_tokens=tokens, tokens=0)
    data = own_text(args, tuned, tokenizer, kept)
    for tokens in args.tokens:
        for what, start in (("adapter", old), ("new", None)):
            heads, seconds = learn(args, tuned, tokenizer, data, tokens, start)
            measure(what, heads, tuned, fit_tokens=max(args.fit_tokens), tokens=tokens, seconds=seconds)

    def of(heads: str, name: str, along: str) -> list[tuple[int, float]]:
        return [(r[along], r["tokens_per_forward"]) for r in rows if (r["heads"], r["kind"]) == (heads, name)]

    shown = {name: f"{name}{' (fitted to)' if name == kind else ''}" for name in prompts}
    further = [line(shown[name], of("old", name, "fit_tokens")) for name in prompts]
    panels = [panel("lines", "Old heads", "tokens the target was trained further on", "tokens per forward", further)]
    for name in prompts:
        known = of("old", name, "fit_tokens")
        series = [
            line({"adapter": "old with an adapter", "new": "new"}[h], of(h, name, "tokens"))
            for h in ("adapter", "new")
        ]
        reference_line = {"y": known[-1][1], "label": "old heads as they are"}
        panels.append(
            panel(
                "lines",
                shown[name],
                "tokens the heads learned from",
                "tokens per forward",
                series,
                "log10",
                reference=reference_line,
            )
        )
    columns = ("heads", "kind", "fit_tokens", "tokens", "seconds", "tokens_per_forward", "identical")
    table = [{name: row.get(name) for name in columns} for row in rows]
    return finish(args, target, __doc__, rows, "Heads of a target that is trained further", panels, table, __file__)


if __name__ == "__main__":
    main()
