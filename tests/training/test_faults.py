"""Full disks, kills and broken files: what was whole stays whole, and nothing broken is gone on from.

A disk is full for a process where the size of its files is limited: writing past the limit is the same kind of error.
"""

import errno
import functools
import json
import os
import random
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset
from resumed_runs import SignalAt, assert_equal_runs, make_run
from safetensors import SafetensorError, safe_open
from tiny import make_target, make_trainer
from transformers import Trainer, TrainerCallback

from hf_clover import CloverHeads
from hf_clover.measure.whole_files import write_whole
from hf_clover.training import regenerate
from hf_clover.training.storage import checkpoints_in, what_is_broken

pytestmark = pytest.mark.long("hf_clover/network")

FULL = 4096  # bytes that a file may have on the full disk; a checkpoint's configuration fits, its weights do not


def fill_the_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL, FULL))


def in_child(work: Any, folder: Path) -> int:
    """The exit code of a fork that does `work`; what it raised is in `folder`."""
    child = os.fork()
    if child == 0:
        try:
            # Where output goes to a file, as pytest lets it, that is not what the disk is to be full for.
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            work()
            os._exit(0)
        except BaseException as error:
            (folder / "error.txt").write_text(f"{type(error).__name__}: {error}")
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def error_of(work: Any, folder: Path) -> str:
    """What a fork that does `work` fails with."""
    assert in_child(work, folder) == 1
    return (folder / "error.txt").read_text()


def error_on_a_full_disk(work: Any, folder: Path) -> str:
    return error_of(lambda: (fill_the_disk(), work()), folder)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of eight steps with a checkpoint after 3, 6 and 8, made as every test here is: in one thread."""
    torch.set_num_threads(1)
    trainer = make_run(tmp_path_factory.mktemp("unbroken"))
    trainer.train()
    return trainer


def assert_resumes_as(unbroken: Any, run: Path) -> None:
    resumed = make_run(run)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 8
    assert_equal_runs(resumed, unbroken)


@pytest.fixture
def copied(unbroken: Any, tmp_path: Path) -> Path:
    """Its folder as it was before the end, to be spoiled."""
    run = Path(shutil.copytree(unbroken.args.output_dir, tmp_path / "run"))
    shutil.rmtree(run / "checkpoint-8")
    return run


# ---------------------------------------------------------------------- a full disk


def test_a_full_disk_at_a_checkpoint_keeps_the_earlier_one(unbroken: Any, tmp_path: Path) -> None:
    run, at_step_5 = tmp_path / "run", TrainerCallback()
    at_step_5.on_step_end = lambda args, state, control, **_: fill_the_disk() if state.global_step == 5 else None
    said = error_of(lambda: make_run(run, at_step_5, save_total_limit=1).train(), tmp_path)
    assert said.startswith("OSError: The checkpoint of step 6 could not be written to")
    assert "Earlier checkpoints are as they were: make room there" in said
    assert "resume_from_checkpoint=True" in said
    assert what_is_broken(run / "checkpoint-3") is None, "the one before is whole, though only one is kept"
    assert not (run / "checkpoint-6").exists() or what_is_broken(run / "checkpoint-6") is not None
    assert_resumes_as(unbroken, run)


@pytest.mark.parametrize(
    ("break_off", "code"),
    [(fill_the_disk, 1), (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL)],
    ids=["full disk", "kill"],
)
def test_a_checkpoint_that_is_broken_off_keeps_the_one_before(
    unbroken: Any, tmp_path: Path, monkeypatch: Any, break_off: Any, code: int
) -> None:
    """The newest checkpoint has its weights, and no state of the optimizer."""
    run = tmp_path / "run"
    save = Trainer._save_optimizer_and_scheduler

    def broken_off_at_step_6(self: Any, folder: str) -> None:
        if self.state.global_step == 6:
            break_off()
        save(self, folder)

    monkeypatch.setattr(Trainer, "_save_optimizer_and_scheduler", broken_off_at_step_6)
    assert in_child(lambda: make_run(run).train(), tmp_path) == code
    monkeypatch.undo()
    if code == 1:
        assert "The checkpoint of step 6 could not be written" in (tmp_path / "error.txt").read_text()
    assert (run / "checkpoint-6" / "model.safetensors").exists()
    assert what_is_broken(run / "checkpoint-6") is not None
    assert_resumes_as(unbroken, run)


@pytest.mark.parametrize(
    ("error", "is_ours"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (SafetensorError("I/O error: No space left on device (os error 28)"), True),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"), True),
        (RuntimeError("CUDA error"), False),
        (OSError("503 Server Error: a push failed"), False),
    ],
)
def test_only_errors_of_the_disk_are_explained(error: Exception, is_ours: bool, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(Trainer, "_save_checkpoint", Mock(side_effect=error))
    trainer = make_run(tmp_path, save_steps=1)
    with pytest.raises(type(error) if not is_ours else OSError) as caught:
        trainer.train()
    assert ("could not be written" in str(caught.value)) is is_ours
    assert caught.value is error or caught.value.__cause__ is error


def test_a_full_disk_while_heads_are_saved_leaves_those_before(tmp_path: Path) -> None:
    torch.manual_seed(0)
    before, after = (CloverHeads.from_target(make_target(seed), num_heads=2) for seed in (0, 1))
    folder = tmp_path / "heads"
    before.save_pretrained(folder)
    weights = files_of(folder)["model.safetensors"]
    assert "File too large" in error_on_a_full_disk(lambda: after.save_pretrained(folder), tmp_path)
    assert files_of(folder)["model.safetensors"] == weights
    again = CloverHeads.from_pretrained(folder)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), before.parameters(), strict=True))


def test_a_file_written_whole_is_new_or_as_it_was(tmp_path: Path) -> None:
    note = tmp_path / "note.json"
    write_whole(note, "{}")
    assert error_on_a_full_disk(lambda: write_whole(note, "x" * 2 * FULL), tmp_path)
    assert note.read_text() == "{}"
    write_whole(note, "new")
    assert note.read_text() == "new"


@dataclass
class Random:
    """Answers that do not pack well; the disk is full after the last."""

    fails_on: int | None = None
    full_after: int | None = None
    settings = {"model": "random"}

    def __call__(self, prompts: list[str]) -> Iterator[tuple[int, str | Exception]]:
        for place, prompt in enumerate(prompts):
            text = random.Random(prompt).randbytes(2048).hex()
            yield place, ValueError("too hard") if int(prompt[1:]) == self.fails_on else text
            if place == self.full_after:
                fill_the_disk()


PROMPTS = Dataset.from_dict({"prompt": [f"w{i}" for i in range(4)]})


def test_a_full_disk_while_answers_are_collected_names_the_file_and_keeps_earlier_answers(tmp_path: Path) -> None:
    folder = tmp_path / "answers"

    def assert_names(file: Path) -> None:
        said = error_of(lambda: regenerate(PROMPTS, Random(full_after=0), folder), tmp_path)
        assert f"'{file}' could not be written (File too large)" in said
        assert "make room there and run again" in said

    assert_names(folder / ".progress" / "answers-00000.jsonl")
    regenerate(PROMPTS, Random(fails_on=3), folder)
    before = (folder / "train.parquet").read_bytes()
    assert_names(folder / "train.parquet")
    assert (folder / "train.parquet").read_bytes() == before
    files = {".progress", "clover_results.json", "errors.jsonl", "train.parquet"}
    assert {path.name for path in folder.iterdir()} == files
    assert len(regenerate(PROMPTS, Random(), folder)) == 4


# ---------------------------------------------------------------------- a kill


def test_a_run_killed_twice_loses_nothing_before_its_last_checkpoint(unbroken: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step, is_resumed in ((4, False), (7, True)):
        train = functools.partial(make_run(run, SignalAt(step, signal.SIGKILL)).train, is_resumed)
        assert in_child(train, tmp_path) == -signal.SIGKILL
    assert [path.name for path in checkpoints_in(run)] == ["checkpoint-6", "checkpoint-3"]
    assert_resumes_as(unbroken, run)


# ---------------------------------------------------------------------- broken checkpoints


def cut(file: Path, share: float = 0.5) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])


BROKEN = {  # a file, what becomes of it, and the message
    "weights without a byte": ("model.safetensors", lambda file: cut(file, 1 - 1e-6), "model.safetensors.*cut short"),
    "empty weights": ("model.safetensors", lambda file: cut(file, 0), "model.safetensors.*cut short"),
    "no weights": ("model.safetensors", Path.unlink, "`model.safetensors` is missing"),
    "optimizer cut": ("optimizer.pt", cut, "optimizer.pt.*cut short"),
    "no optimizer": ("optimizer.pt", Path.unlink, "`optimizer.pt` is missing.*save_only_model"),
    "no scheduler": ("scheduler.pt", Path.unlink, "`scheduler.pt` is missing"),
    "random numbers cut": ("rng_state.pth", cut, "rng_state.pth.*cut short"),
    "no trainer state": ("trainer_state.json", Path.unlink, "`trainer_state.json` is missing"),
    "trainer state cut": ("trainer_state.json", cut, "trainer_state.json.*cut short"),
    "an empty object": ("trainer_state.json", lambda file: file.write_text("{}"), "trainer_state.json.*empty"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_checkpoint_is_refused_by_name_and_nothing_is_written(kind: str, copied: Path) -> None:
    name, spoil, message = BROKEN[kind]
    spoil(copied / "checkpoint-6" / name)
    before = files_of(copied)
    with pytest.raises(ValueError, match=rf"checkpoint-6'` is not whole: .*{message}.*pass `True`"):
        make_run(copied).train(resume_from_checkpoint=str(copied / "checkpoint-6"))
    assert files_of(copied) == before, "nothing was written"
    assert what_is_broken(copied / "checkpoint-3") is None


def test_a_run_resumes_before_a_broken_checkpoint_and_logs_it(
    unbroken: Any, copied: Path, transformers_log: pytest.LogCaptureFixture
) -> None:
    cut(copied / "checkpoint-6" / "optimizer.pt")
    assert_resumes_as(unbroken, copied)
    assert "checkpoint-6' is not whole (`optimizer.pt` is damaged or cut short" in transformers_log.text
    assert "training goes on from" in transformers_log.text
    assert what_is_broken(copied / "checkpoint-6") is None, "and written again"


def test_resuming_with_broken_checkpoints_only_is_an_error(copied: Path) -> None:
    for name in ("checkpoint-3", "checkpoint-6"):
        cut(copied / name / "model.safetensors")
    with pytest.raises(ValueError, match=r"none of the \d checkpoints in .* is whole; in 'checkpoint-\d' `model.safe"):
        make_run(copied).train(resume_from_checkpoint=True)


def test_without_checkpoints_the_error_is_that_of_transformers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        make_trainer(tmp_path, make_target()).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="an't find a valid checkpoint"):
        make_trainer(tmp_path, make_target()).train(resume_from_checkpoint=str(tmp_path / "nowhere"))


def test_weights_alone_are_a_whole_checkpoint_with_save_only_model(tmp_path: Path) -> None:
    make_run(tmp_path, save_only_model=True).train()
    assert "`optimizer.pt` is missing" in what_is_broken(tmp_path / "checkpoint-6")
    assert what_is_broken(tmp_path / "checkpoint-6", is_model_only=True) is None
    resumed = make_run(tmp_path, save_only_model=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert resumed.state.global_step == 8


@pytest.mark.parametrize("sharded", ["pytorch_model_fsdp_0", "global_step6"])
def test_sharded_checkpoints_of_fsdp_and_deepspeed_pass_the_check(sharded: str, copied: Path) -> None:
    folder = copied / "checkpoint-6"
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt"):
        (folder / name).unlink()
    assert what_is_broken(folder) == "`model.safetensors` is missing"
    (folder / sharded).mkdir()
    assert what_is_broken(folder) is None


def shard(folder: Path, place: Path, name: str) -> None:
    """The weights are moved to `place`, which an index calls by `name`."""
    shutil.move(folder / "model.safetensors", place)
    with safe_open(place, framework="pt") as opened:
        names = dict.fromkeys(opened.keys(), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def test_a_damaged_or_missing_shard_of_the_weights_is_noticed(copied: Path) -> None:
    folder = copied / "checkpoint-6"
    part = folder / "model-00001-of-00001.safetensors"
    shard(folder, part, part.name)
    assert what_is_broken(folder) is None
    cut(part)
    assert "`model.safetensors.index.json` is damaged or cut short" in what_is_broken(folder)
    part.unlink()
    assert part.name in what_is_broken(folder)


def test_weights_outside_the_checkpoint_are_refused(copied: Path) -> None:
    folder = copied / "checkpoint-6"
    shard(folder, copied / "outside.safetensors", "../outside.safetensors")
    with pytest.raises(ValueError, match=r"index.json` .*it names '../outside.safetensors', which is no file of its"):
        make_run(copied).train(resume_from_checkpoint=str(folder))


def test_folders_with_other_names_are_no_checkpoints(copied: Path) -> None:
    for name in ("checkpoint-best", "checkpoint-", "tmp-checkpoint-9"):
        (copied / name).mkdir()
    (copied / "checkpoint-99").write_text("a file")
    (copied / "checkpoint-10").mkdir()
    names = [path.name for path in checkpoints_in(copied)]
    assert names[0] == "checkpoint-10", "by number, not by letters"
    assert not {"checkpoint-best", "checkpoint-", "tmp-checkpoint-9", "checkpoint-99"} & set(names)
