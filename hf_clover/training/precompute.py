"""The target's hidden states on disk, so that epochs and runs after the first need no pass of the target.

Contract: `precompute_targets` gives a tokenised dataset the column `hidden_states`: per sample the bytes of the states
[T, d] before the target's final norm, in bfloat16. Training from them equals online training, except for that
rounding. The states are in `folder` as shards, each a `datasets` folder, written by all processes. An interrupted pass
continues after its last finished shard.
"""

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset, IterableDataset, concatenate_datasets, load_from_disk
from datasets.utils.logging import is_progress_bar_enabled
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers.utils import logging

from .storage import claim
from .teacher import Teacher, to_device

logger = logging.get_logger(__name__)

SHARD_BYTES = 256 << 20
COLUMN = "hidden_states"


def precompute_targets(
    target: Teacher,
    dataset: Dataset,
    collator: Any,
    folder: str | os.PathLike,
    batch_size: int,
    accelerator: Accelerator,
    shard_bytes: int = SHARD_BYTES,
) -> Dataset:
    """Add the target's hidden states to a dataset, and compute those that the folder does not hold yet. The trainer
    calls this if `precompute_targets` is on.

    Args:
        target (`Teacher`):
            Runs the target over a batch; the trainer's is `trainer.teacher`.
        dataset (`Dataset`):
            A tokenised dataset, packed or not.
        collator (`Callable`):
            Turns samples into a batch; the same that training uses.
        folder (`str` or `os.PathLike`):
            Folder for the states. It belongs to one dataset and one target.
        batch_size (`int`):
            Samples in one pass of the target.
        accelerator (`Accelerator`):
            Divides the work among processes.
        shard_bytes (`int`, *optional*, defaults to 256 MiB):
            Size of a shard in bytes. An interruption loses at most one shard per process.

    Returns:
        `Dataset`: the dataset with the column `hidden_states`

    Example:

    ```python
    >>> from hf_clover.training import precompute_targets

    >>> parts = trainer.teacher, trainer.train_dataset, trainer.data_collator  # doctest: +SKIP
    >>> states = precompute_targets(*parts, "states", 8, trainer.accelerator)  # doctest: +SKIP
    ```
    """
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            "`precompute_targets=True` needs a dataset of known length, and `train_dataset` is a stream: load it "
            "without streaming, or set `precompute_targets=False`."
        )
    folder, size = Path(folder), target.state_size
    lengths = [len(ids) for ids in dataset["input_ids"]]
    shards = _plan_shards(lengths, bytes_per_token=2 * size, shard_bytes=shard_bytes)
    if accelerator.is_main_process:
        held = "the hidden states of another dataset or target"
        claim(folder / "identity.json", _identity(dataset, target), "precompute_dir", folder, held)
        missing = sum(sum(lengths[a:b]) for a, b in shards if not _shard(folder, a, b).exists()) * 2 * size
        _check_room(folder, needed=missing, total=sum(lengths) * 2 * size)
    accelerator.wait_for_everyone()

    own = shards[accelerator.process_index :: accelerator.num_processes]
    todo = [(start, end) for start, end in own if not _shard(folder, start, end).exists()]
    finished = next((shard for shard in shards if _shard(folder, *shard).exists()), None)
    if finished is not None:
        _check_same_target(target, dataset, collator, load_from_disk(str(_shard(folder, *finished))), finished[0])
    bar = tqdm(
        total=sum(end - start for start, end in todo),
        desc="Running the target over the training set",
        unit="sample",
        disable=not (accelerator.is_local_main_process and is_progress_bar_enabled() and todo),
    )
    with bar:
        for start, end in todo:
            rows: dict[int, bytes] = {}
            # A batch is padded to its longest sample. Longest first, so that too large batches fail at once.
            places = sorted(range(start, end), key=lengths.__getitem__, reverse=True)
            for first in range(0, len(places), batch_size):
                together = places[first : first + batch_size]
                samples = [dataset[place] for place in together]
                rows |= zip(together, _states_of(target, samples, collator), strict=True)
                bar.update(len(samples))
            _write_shard([rows[place] for place in range(start, end)], _shard(folder, start, end))
    accelerator.wait_for_everyone()
    states = concatenate_datasets([load_from_disk(str(_shard(folder, *shard))) for shard in shards])
    return concatenate_datasets([dataset, states], axis=1)


def _states_of(target: Teacher, samples: list[dict[str, Any]], collator: Any) -> list[bytes]:
    batch = to_device(collator(samples), target.heads.device)
    states = target.hidden_states(batch).to(torch.bfloat16).cpu()  # [B, T, d], or [1, sum of T, d] without padding
    lengths = [len(sample["input_ids"]) for sample in samples]
    parts = states[0].split(lengths) if "attention_mask" not in batch else [s[:n] for s, n in zip(states, lengths)]
    return [part.contiguous().view(torch.uint16).numpy().tobytes() for part in parts]


@dataclass
class TargetStatesCollator:
    """trl's collator, which also adds `hidden_states` [B, T, d] to a batch if the samples have them."""

    collator: Any
    hidden_size: int

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collator(examples)
        if COLUMN in examples[0]:
            states = [self._read(example[COLUMN]) for example in examples]  # [T, d] each
            if "attention_mask" not in batch:
                states = [torch.cat(states)]
            padded = pad_sequence(states, batch_first=True)  # [B, T, d]
            missing = batch["input_ids"].shape[1] - padded.shape[1]  # from `pad_to_multiple_of`
            batch[COLUMN] = torch.nn.functional.pad(padded, (0, 0, 0, missing))
        return batch

    def _read(self, stored: bytes) -> torch.Tensor:
        return _numbers(stored).view(-1, self.hidden_size)  # [T, d]


def _numbers(stored: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(stored, dtype=np.uint16).copy()).view(torch.bfloat16)


# ------------------------------------------------------------------------------------------------ the folder


def _plan_shards(lengths: list[int], bytes_per_token: int, shard_bytes: int) -> list[tuple[int, int]]:
    """(first sample, end) of each shard, which holds as many samples as fit, at least one."""
    shards, start, filled = [], 0, 0
    for place, length in enumerate(lengths):
        if place > start and filled + length * bytes_per_token > shard_bytes:
            shards.append((start, place))
            start, filled = place, 0
        filled += length * bytes_per_token
    return [*shards, (start, len(lengths))]


def _shard(folder: Path, start: int, end: int) -> Path:
    return folder / f"samples-{start:09d}-{end:09d}"


def _write_shard(rows: list[bytes], path: Path) -> None:
    unfinished = path.with_name(f".{path.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    Dataset.from_dict({COLUMN: rows}).save_to_disk(str(unfinished))
    unfinished.rename(path)  # so a shard that exists is complete


def _identity(dataset: Dataset, target: Teacher) -> dict[str, Any]:
    digest = hashlib.sha256()
    for ids in dataset["input_ids"]:
        digest.update(np.asarray(ids, dtype=np.int64).tobytes() + b"|")
    config = target.heads.config
    return {
        "samples": len(dataset),
        "input_ids_sha256": digest.hexdigest(),
        "hidden_size": config.target_width,
        "target_fingerprint": config.target_fingerprint,
        **({"feature_layers": list(target.heads.feature_layers)} if target.heads.feature_layers else {}),
    }


def _check_room(folder: Path, needed: int, total: int) -> None:
    free = shutil.disk_usage(folder).free
    logger.warning(
        f"The target's hidden states take {_in_gib(total)} in {str(folder)!r}; {_in_gib(needed)} are still to be "
        f"written, {_in_gib(free)} are free."
    )
    if needed > 0.95 * free:
        raise OSError(
            f"`precompute_targets=True` needs {_in_gib(needed)} in {str(folder)!r}, where {_in_gib(free)} are free. "
            "Point `precompute_dir` to a larger disk, use fewer or shorter samples, or set `precompute_targets=False`."
        )


def _in_gib(size: int) -> str:
    return f"{size / (1 << 30):.3g} GiB"


def _check_same_target(target: Teacher, dataset: Dataset, collator: Any, shard: Dataset, first: int) -> None:
    """Raise if a stored shard is from another target. The fingerprint of lm_head does not tell a fine-tuned target
    from its base, so the states of one sample are compared."""
    (fresh,) = _states_of(target, [dataset[first]], collator)
    old, new = (_numbers(stored).float() for stored in (shard[0][COLUMN], fresh))
    difference = ((old - new).norm() / new.norm().clamp(min=1e-12)).item()
    if difference > 0.1:
        raise ValueError(
            "`precompute_dir` holds the hidden states of another target: on its first sample they differ by "
            f"{difference:.0%}. Choose another `precompute_dir`, or delete that folder."
        )


__all__ = ["TargetStatesCollator", "precompute_targets"]
