"""The text that heads learn from and are measured on: the target's own continuations, or the user's data.

Contract: `load_data` gives samples of token ids, those to measure on apart from those to train on. What the target
wrote is kept in a folder named after the target and the sizes, with the seconds it took, and used again. This module
knows the target's `generate` and no heads.
"""

import argparse
import json
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_clover.measure.prompts import HELD_OUT, held_out_sources, standard_library
from hf_clover.network.target_parts import fingerprint
from hf_clover.training.data import source_of

SHARE_HELD_OUT = 0.02  # of the user's data, its last rows, where it has no test split
TEMPERATURE = 0.7  # of the continuations to learn from: greedy ones of a small model run in circles


@dataclass
class Data:
    """Samples to train on and, apart, to measure on: `input_ids`, and `labels` that are -100 where nothing counts."""

    train: Dataset
    test: Dataset
    folder: Path  # for what is computed from it

    @property
    def mean_length(self) -> float:
        return sum(map(len, self.train["input_ids"])) / len(self.train)


def load_data(args: argparse.Namespace, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Data:
    name = f"{fingerprint(target.get_output_embeddings().weight)[:8]}-{args.samples}x{args.length}-{args.seed}"
    folder = (
        args.work / f"data-{name}" if args.data is None else args.work / f"data-{Path(args.data).stem}-{args.length}"
    )
    if args.data is not None:
        train, test = _given(args, tokenizer)
        return Data(train, test, folder)
    if not (folder / "about.json").exists():
        started = time.perf_counter()
        width = args.length // 4
        streams = tokenizer(library_sources(), verbose=False).input_ids
        train = continuations(args, target, tokenizer, streams, args.samples, width, args.seed)
        seconds = time.perf_counter() - started
        held_out = tokenizer(list(held_out_sources().values()), verbose=False).input_ids
        test = continuations(args, target, tokenizer, held_out, args.test_samples, width, args.seed + 1)
        train.to_parquet(folder / "train.parquet")
        test.to_parquet(folder / "test.parquet")
        (folder / "about.json").write_text(json.dumps({"seconds": seconds}) + "\n")
    train, test = (Dataset.from_parquet(str(folder / f"{part}.parquet")) for part in ("train", "test"))
    return Data(train, test, folder)


def library_sources() -> list[str]:
    paths = sorted(standard_library().glob("*.py"))
    return [path.read_text(encoding="utf-8", errors="ignore") for path in paths if path.stem not in HELD_OUT]


@torch.no_grad()
def continuations(
    args: argparse.Namespace,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    streams: list[list[int]],
    count: int,
    width: int,
    seed: int,
) -> Dataset:
    """`count` pieces of `width` tokens from random places in `streams`, each continued by the target."""
    rng = random.Random(seed)
    streams = [ids for ids in streams if len(ids) > width]
    chosen = rng.choices(streams, weights=list(map(len, streams)), k=count)
    starts = [rng.randrange(len(ids) - width) for ids in chosen]
    prompts = torch.tensor([ids[start : start + width] for ids, start in zip(chosen, starts)])  # [count, width]
    ends = target.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    samples: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    torch.manual_seed(seed)
    for batch in tqdm(prompts.split(64), desc="The target writes what is learned from", unit="batch"):
        batch = batch.to(target.device)
        rows = target.generate(
            input_ids=batch, attention_mask=torch.ones_like(batch), max_new_tokens=args.length - width,
            do_sample=True, temperature=TEMPERATURE, top_k=0, pad_token_id=tokenizer.pad_token_id or 0,
        ).tolist()  # fmt: skip
        for row in rows:
            end = next((i + 1 for i, token in enumerate(row) if i >= width and token in ends), len(row))
            samples["input_ids"].append(row[:end])
            samples["labels"].append([-100] * width + row[width:end])
    return Dataset.from_dict(samples)


def _given(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, Dataset]:
    """The user's data, cut into samples, and its test split, or else a share taken off."""
    loaded = load_dataset(**source_of(args.data))
    train, test = loaded["train"], next((loaded[name] for name in ("test", "validation") if name in loaded), None)
    if test is None:  # whole rows, so that no question is on both sides
        kept = len(train) - math.ceil(SHARE_HELD_OUT * len(train))
        train, test = train.select(range(kept)), train.select(range(kept, len(train)))
    train, test = (_samples(part, tokenizer, args.length) for part in (train, test))
    return train.shuffle(seed=args.seed), test.select(range(min(args.test_samples, len(test))))


def _samples(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, length: int) -> Dataset:
    samples: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for row in dataset:
        ids = row.get("input_ids") or encode(row, tokenizer)
        labels = row.get("labels") or ids
        for start in range(0, len(ids), length):
            if len(ids) - start > length // 4:  # a short rest is hardly worth a sample
                samples["input_ids"].append(list(ids[start : start + length]))
                samples["labels"].append(list(labels[start : start + length]))
    return Dataset.from_dict(samples)


def encode(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if "text" in row:
        return tokenizer(row["text"]).input_ids
    if "messages" in row:
        return tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"]
    if {"prompt", "completion"} <= row.keys():
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str):
            return tokenizer(prompt + completion).input_ids
        return tokenizer.apply_chat_template([*prompt, *completion], return_dict=True)["input_ids"]
    raise ValueError(
        f"`--data` has the columns {sorted(row)}: it needs `input_ids`, `text`, `messages`, or `prompt` and "
        "`completion`."
    )
