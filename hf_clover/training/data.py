"""What training needs to know of a dataset: whether heads can learn from it, how often ids occur, prompts to try.

Contract: functions of `datasets` datasets, map-style or streaming, before or after trl has tokenised them. Tokenised
ones have the columns `input_ids`, `labels` (-100 at tokens that do not count) and, if documents are packed,
`seq_lengths`. This module knows no target, loss or trainer.
"""

from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from transformers.utils import logging
from trl import maybe_convert_to_chatml

from ..network.modeling_heads import DraftHeads
from ..targets.loading import check_path

logger = logging.get_logger(__name__)

SHORTEST = 3  # tokens of a sample, at least: one whose state is used, one that is fed, one to predict
STREAM_SAMPLE = 10_000  # samples of a streaming dataset that are counted for the draft vocabulary


def source_of(dataset: str) -> dict[str, str]:
    """The arguments of `load_dataset` for a dataset on the Hub, a folder of files, or one file."""
    check_path(dataset, "dataset")
    place = Path(dataset).absolute()  # `datasets` refuses ".", the parent of a file in the working folder
    if place.is_file():
        return {"path": str(place.parent), "data_files": place.name}
    return {"path": str(place) if place.is_dir() else dataset}


# ------------------------------------------------------------------------------------------------ checks


def check_columns(
    dataset: Dataset | IterableDataset, name: str, text_field: str, formatting_func: Callable[[dict], str] | None
) -> None:
    columns = set(dataset.column_names or next(iter(dataset)))  # a stream may not know its columns
    known = ({"input_ids"}, {"messages"}, {"conversations"}, {"prompt", "completion"}, {text_field})
    if formatting_func is None and not any(needed <= columns for needed in known):
        raise ValueError(
            f"The {name} dataset has the columns {sorted(columns)} and none to train on. It needs one of: `messages`; "
            f"`prompt` and `completion`; `input_ids`; or text in {text_field!r}, the column that `dataset_text_field` "
            "names."
        )


def check_lengths(dataset: Dataset | IterableDataset, name: str, num_heads: int) -> None:
    """Raise if no sample is long enough for the last head. Streams are not checked: their samples are not known."""
    if isinstance(dataset, IterableDataset):
        return
    needed, longest = num_heads + 2, 0
    packed = "seq_lengths" in dataset.column_names
    for value in dataset["seq_lengths" if packed else "input_ids"]:
        longest = max(longest, max(value, default=0) if packed else len(value))
        if longest >= needed:
            return
    raise ValueError(
        f"All samples of the {name} dataset are too short for {num_heads} heads: they need {needed} tokens, and the "
        f"longest has {longest}. Use longer samples, a larger `max_length`, or fewer heads (`num_heads`)."
    )


def drop_short_samples(dataset: Dataset | IterableDataset) -> Dataset | IterableDataset:
    """The dataset without samples that are too short even for the first head."""
    kept = dataset.filter(_is_long_enough, input_columns="input_ids")
    if isinstance(dataset, Dataset) and len(kept) < len(dataset):
        logger.warning(f"{len(dataset) - len(kept)} of {len(dataset)} samples are shorter than {SHORTEST} tokens.")
    return kept


def _is_long_enough(input_ids: list[int]) -> bool:
    return len(input_ids) >= SHORTEST


# ------------------------------------------------------------------------------------------------ draft vocabulary


def count_tokens(dataset: Dataset | IterableDataset, vocab_size: int) -> np.ndarray:
    """How often each id is a label [V], in all of a map-style dataset or the first samples of a stream."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    samples: Iterable[dict[str, Any]] = dataset.select_columns(["labels"])
    if isinstance(dataset, IterableDataset):
        samples = islice(samples, STREAM_SAMPLE)
        logger.warning(f"The draft vocabulary is counted over the first {STREAM_SAMPLE:,} samples of the stream.")
    for sample in samples:
        labels = np.asarray(sample["labels"])
        counts += np.bincount(labels[labels >= 0], minlength=vocab_size)
    return counts


def most_frequent(counts: np.ndarray, size: int) -> torch.Tensor:
    """The `size` most frequent ids in ascending order; lower ids first where counts are equal."""
    ids = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(ids))


def share_covered(counts: np.ndarray, ids: torch.Tensor) -> float:
    return float(counts[ids.numpy()].sum() / max(counts.sum(), 1))


def set_draft_vocabulary(heads: DraftHeads, ids: torch.Tensor) -> None:
    """Let `heads` score `ids` only. They are saved with the heads."""
    heads.config.draft_vocab_size = len(ids)
    heads.register_buffer("draft_ids", ids.to(heads.device))


# ------------------------------------------------------------------------------------------------ prompts


def prompt_of(sample: dict[str, Any]) -> str | list[dict[str, Any]] | None:
    """The part of an untokenised sample that a user would send: `prompt`, or the messages before the first answer."""
    sample = maybe_convert_to_chatml(sample)
    if sample.get("prompt"):
        return sample["prompt"]
    messages = sample.get("messages")
    if not messages or not isinstance(messages, list):
        return None
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        return None
    asked = roles.index("user")
    return messages[: roles.index("assistant", asked) if "assistant" in roles[asked:] else None]


def prompts_of(dataset: Dataset | IterableDataset, count: int) -> list[list[int]]:
    """Token ids to continue, from tokenised samples: the tokens before the first label, or else the first quarter."""
    prompts, are_cut = [], False
    for sample in islice(dataset, count):
        ids, labels = sample["input_ids"], sample["labels"]
        if "seq_lengths" in sample:
            ids, labels = ids[: sample["seq_lengths"][0]], labels[: sample["seq_lengths"][0]]
        unlabelled = next((place for place, label in enumerate(labels) if label != -100), len(labels))
        are_cut |= unlabelled <= 1
        prompts.append(list(ids[: unlabelled if unlabelled > 1 else max(len(ids) // 4, 1)]))
    if are_cut:
        logger.warning(
            "`eval_dataset` does not say what was asked and what was answered: AcceptanceCallback continues the first "
            "quarter of each sample; pass `prompts` for figures of what users send."
        )
    return prompts


__all__ = [
    "check_columns",
    "check_lengths",
    "count_tokens",
    "drop_short_samples",
    "most_frequent",
    "prompt_of",
    "prompts_of",
    "set_draft_vocabulary",
    "share_covered",
]
