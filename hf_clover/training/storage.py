"""Checks that checkpoints and folders on disk are complete.

Contract: training never resumes from a checkpoint that a full disk, a kill or a broken copy cut short. Asked for the
newest, it takes the newest complete one and names those that it skipped. Asked for a broken one by name, it refuses
and says what is wrong. If a checkpoint cannot be written, the error says so, and earlier ones stay. Nothing is
deleted, and only headers are read, never weights. This module knows transformers' file names, but neither heads nor
losses.
"""

import json
import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from transformers import TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..measure.whole_files import write_whole

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

logger = logging.get_logger(__name__)

WEIGHTS = ("model.safetensors", "adapter_model.safetensors", "model.safetensors.index.json")
SHARDED = ("pytorch_model_fsdp*", "global_step*")  # files of FSDP and DeepSpeed, with the optimizer's state in them
OPTIMIZER = ("optimizer.pt", "optimizer.bin")
STATE, SCHEDULER = "trainer_state.json", "scheduler.pt"
RANDOM = "rng_state*.pth"


class WholeCheckpoints(_Trainer):
    """Base of a `Trainer`: checks a checkpoint before it is read, and says clearly when one cannot be written."""

    is_over = False  # whether the last `train` resumed from a checkpoint that already has all steps
    _checkpoint: Path | None = None

    def train(self, resume_from_checkpoint: str | os.PathLike | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        checkpoint = checkpoint_to_resume(resume_from_checkpoint, self.args)
        self.is_over = False
        self._checkpoint = None if checkpoint is None or isinstance(checkpoint, bool) else Path(checkpoint)
        return super().train(checkpoint, *args, **kwargs)  # type: ignore[arg-type]  # any path will do

    def set_initial_training_values(self, *args: Any) -> tuple[Any, ...]:
        """As [`~transformers.Trainer.set_initial_training_values`], with 0 epochs if no step is left. transformers
        compares the steps with the maximum only after a step, and would make one too many."""
        num_train_epochs, *others, max_steps = super().set_initial_training_values(*args)
        steps = 0 if self._checkpoint is None else json.loads((self._checkpoint / STATE).read_text())["global_step"]
        self.is_over = 0 < max_steps <= steps
        if self.is_over and self._checkpoint is not None:
            logger.warning(
                f"The run is over: {self._checkpoint.name} has all {max_steps} steps. Nothing is trained; for more, "
                "raise `max_steps` or `num_train_epochs`."
            )
        return (0 if self.is_over else num_train_epochs, *others, max_steps)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._save_checkpoint(*args, **kwargs)
        except (OSError, RuntimeError, SafetensorError) as error:
            if not _is_of_the_disk(error):
                raise
            step, folder = self.state.global_step, self.args.output_dir
            raise OSError(
                f"The checkpoint of step {step} could not be written to {folder!r} ({error}). Earlier checkpoints are "
                "as they were: make room there, or set `save_total_limit`, and run again with "
                "`resume_from_checkpoint=True`."
            ) from error


def _is_of_the_disk(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno is not None  # the error of a failed push has none
    return isinstance(error, SafetensorError) or "PytorchStreamWriter" in str(error) or "inline_contain" in str(error)


def checkpoint_to_resume(
    asked: str | os.PathLike | bool | None, args: TrainingArguments
) -> str | os.PathLike | bool | None:
    """The value that transformers gets in place of `resume_from_checkpoint`."""
    if asked is None or asked is False or (asked is not True and not Path(asked).is_dir()):
        return asked  # transformers raises if there is no such folder
    if asked is not True:
        problem = what_is_broken(asked, args.save_only_model)
        if problem is not None:
            raise ValueError(
                f"`resume_from_checkpoint={str(asked)!r}` is not whole: {problem}. Copy it again, name another "
                "checkpoint, or pass `True`, which takes the newest that is whole."
            )
        return asked
    broken: dict[Path, str] = {}
    for folder in checkpoints_in(args.output_dir or ""):
        problem = what_is_broken(folder, args.save_only_model)
        if problem is None:
            for path, reason in broken.items():
                logger.warning(f"{str(path)!r} is not whole ({reason}): training goes on from {str(folder)!r}.")
            return str(folder)
        broken[folder] = problem
    if broken:
        newest, problem = next(iter(broken.items()))
        raise ValueError(
            f"`resume_from_checkpoint=True`: none of the {len(broken)} checkpoints in {args.output_dir!r} is whole; "
            f"in {newest.name!r} {problem}. Copy one again, or begin anew without `resume_from_checkpoint`."
        )
    return True


def checkpoints_in(folder: str | os.PathLike) -> list[Path]:
    """The checkpoints in `folder`, newest first."""
    found = {}
    for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if step.isdecimal() and path.is_dir():
            found[int(step)] = path
    return [found[step] for step in sorted(found, reverse=True)]


def what_is_broken(folder: str | os.PathLike, is_model_only: bool = False) -> str | None:
    """What is missing or damaged in a checkpoint; None if training can resume from it as if it had never stopped."""
    folder = Path(folder)
    is_sharded = any(list(folder.glob(pattern)) for pattern in SHARDED)
    weights = [folder / name for name in WEIGHTS if (folder / name).exists()]
    optimizer = [folder / name for name in OPTIMIZER if (folder / name).exists()]
    if not weights and not is_sharded:
        return f"`{WEIGHTS[0]}` is missing"
    needed = [folder / STATE]  # transformers writes it last
    if not is_model_only and not is_sharded:
        if not optimizer:
            return (
                f"`{OPTIMIZER[0]}` is missing (if it was left out on purpose, pass `save_only_model=True`: the "
                "optimizer then starts afresh)"
            )
        needed.append(folder / SCHEDULER)
    missing = next((file for file in needed if not file.exists()), None)
    if missing is not None:
        return f"`{missing.name}` is missing"
    for file in [*weights, *optimizer, *needed, *sorted(folder.glob(RANDOM))]:
        problem = _damage(file)
        if problem is not None:
            return f"`{file.name}` is damaged or cut short ({problem})"
    return None


def _damage(file: Path) -> str | None:
    try:
        if file.suffix == ".json":
            content = json.loads(file.read_text())
            if not content:
                return "it is empty"
            for shard in sorted(set(content.get("weight_map", {}).values())):  # an index has a map
                if Path(shard).name != shard:
                    raise ValueError(f"it names {shard!r}, which is no file of its folder")
                with safe_open(file.parent / shard, framework="pt"):
                    pass
        elif file.suffix == ".safetensors":
            with safe_open(file, framework="pt"):
                pass
        else:
            zipfile.ZipFile(file).close()  # torch's format; its table of contents is at the end of the file
    except (AttributeError, OSError, SafetensorError, ValueError, zipfile.BadZipFile) as error:
        return str(error) or type(error).__name__
    return None


def claim(note: Path, identity: dict[str, Any], argument: str, folder: Path, held: str) -> None:
    """Write `identity` to the file `note`, or raise if it holds another one: a folder belongs to its first writer.

    `argument` names the folder's argument in the error; `held` says what the folder holds instead."""
    note.parent.mkdir(parents=True, exist_ok=True)
    if not note.exists():
        write_whole(note, json.dumps(identity, indent=2) + "\n")
        return  # an existing note is never rewritten: another run may be reading it
    written = json.loads(note.read_text())
    differing = [name for name, value in identity.items() if written.get(name) != value]
    if differing:
        raise ValueError(
            f"`{argument}` {str(folder)!r} holds {held}: {', '.join(differing)} differ. Choose another `{argument}`, "
            "or delete that folder."
        )


__all__ = ["WholeCheckpoints", "checkpoint_to_resume", "checkpoints_in", "claim", "what_is_broken"]
