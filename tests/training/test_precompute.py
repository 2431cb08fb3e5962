"""The target's hidden states on disk: equal to online training, resumable, sized in advance, refused where wrong."""

import shutil
from collections import namedtuple
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tiny import VOCAB, losses, make_target, make_tokenizer, make_trainer, random_ids
from transformers import GPT2Config, GPT2LMHeadModel
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from hf_clover import CloverHeads
from hf_clover.training.precompute import TargetStatesCollator, precompute_targets
from hf_clover.training.teacher import Teacher

pytestmark = pytest.mark.long("hf_clover/network")

DATA = [12, 9, 16, 7, 12, 10, 14, 8]


@pytest.mark.usefixtures("muon_in_float32")
@pytest.mark.parametrize(
    "fields",
    [{}, {"packing": True, "max_length": 32, "per_device_train_batch_size": 2}, {"pad_to_multiple_of": 8}],
    ids=["padded", "packed", "multiple of 8"],
)
def test_precomputed_states_give_the_losses_of_online_training(tmp_path: Path, fields: dict[str, Any]) -> None:
    runs = []
    for precompute in (False, True):
        options = {"eval_dataset": random_ids([9, 12], seed=2)}
        trainer = make_trainer(
            tmp_path / str(precompute),
            make_target(),
            random_ids(DATA),
            options=options,
            precompute_targets=precompute,
            max_steps=4,
            eval_strategy="steps",
            eval_steps=4,
            **fields,
        )
        if precompute:  # from here on the training set needs no target
            trainer.teacher.hidden_states = partial(_only_in_evaluation, trainer, trainer.teacher.hidden_states)
        trainer.train()
        evaluated = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
        runs.append(losses(trainer) + evaluated)
    # bfloat16 keeps 8 bits of each hidden state.
    assert runs[0] == pytest.approx(runs[1], rel=5e-3)
    assert runs[0] != runs[1]


def test_precomputed_states_work_for_a_target_with_layer_norms(tmp_path: Path) -> None:
    """LayerNorms take no bfloat16 where their weights are float32."""
    runs = []
    for precompute in (False, True):
        torch.manual_seed(0)
        target = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4)).eval()
        trainer = make_trainer(
            tmp_path / str(precompute), target, random_ids(DATA), precompute_targets=precompute, max_steps=1
        )
        trainer.train()
        runs.append(losses(trainer))
    assert runs[0] == pytest.approx(runs[1], rel=5e-3)


def _only_in_evaluation(trainer: Any, hidden_states: Any, batch: Any) -> torch.Tensor:
    assert not trainer.model.training
    return hidden_states(batch)


class CountingTeacher:
    """A target that counts its samples and may fail after some."""

    def __init__(self, fails_after: int | None = None, seed: int = 0) -> None:
        target = make_target()
        self.teacher = Teacher(target, CloverHeads.from_target(target))
        if seed:  # a fine-tune: the same lm_head, other layers
            target.model.layers.load_state_dict(make_target(seed=seed).model.layers.state_dict())
        self.heads, self.state_size = self.teacher.heads, self.teacher.state_size
        self.fails_after, self.samples, self.positions = fails_after, 0, 0

    def hidden_states(self, batch: dict[str, Any]) -> torch.Tensor:
        self.samples += len(batch["input_ids"])
        self.positions += batch["input_ids"].numel()
        if self.fails_after is not None and self.samples > self.fails_after:
            raise RuntimeError("out of power")
        return self.teacher.hidden_states(batch)


def precompute(folder: Path, teacher: CountingTeacher, lengths: list[int] = DATA, **fields: Any) -> Any:
    collator = DataCollatorForLanguageModeling(pad_token_id=make_tokenizer().pad_token_id)
    return precompute_targets(
        teacher,
        random_ids(lengths),
        collator,
        folder,
        batch_size=2,
        accelerator=Accelerator(cpu=True),
        **{"shard_bytes": 2000, **fields},
    )


def test_an_interrupted_pass_goes_on_after_its_last_shard(tmp_path: Path) -> None:
    whole = precompute(tmp_path / "whole", CountingTeacher())
    assert len(list((tmp_path / "whole").glob("samples-*"))) == 4
    with pytest.raises(RuntimeError, match="out of power"):
        precompute(tmp_path / "parts", CountingTeacher(fails_after=5))
    assert len(list((tmp_path / "parts").glob("samples-*"))) == 2
    second = CountingTeacher()
    parts = precompute(tmp_path / "parts", second)
    assert second.samples == 1 + 4  # one to see that it is the same target
    assert parts["hidden_states"][:] == whole["hidden_states"][:]
    third = CountingTeacher()
    precompute(tmp_path / "parts", third)
    assert third.samples == 1


def test_samples_of_one_length_go_together(tmp_path: Path) -> None:
    lengths = [16, 3, 15, 4, 16, 3, 15, 4]
    teacher = CountingTeacher()
    dataset = precompute(tmp_path, teacher, lengths, shard_bytes=1 << 20)
    assert teacher.positions == sum(lengths)  # nothing was padded; in their own order it would have been 124
    for sample in dataset:
        (alone,) = teacher.hidden_states({"input_ids": torch.tensor([sample["input_ids"]])})
        stored = torch.frombuffer(bytearray(sample["hidden_states"]), dtype=torch.bfloat16).view(alone.shape)
        torch.testing.assert_close(stored, alone.bfloat16())


def test_states_are_stored_in_bfloat16(tmp_path: Path) -> None:
    teacher = CountingTeacher()
    dataset = precompute(tmp_path, teacher)
    collator = TargetStatesCollator(DataCollatorForLanguageModeling(pad_token_id=0), hidden_size=32)
    batch = collator([dataset[0], dataset[1]])
    expected = teacher.hidden_states({name: batch[name] for name in ("input_ids", "attention_mask")})
    assert batch["hidden_states"].dtype == torch.bfloat16
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(batch["hidden_states"][real], expected[real].bfloat16())
    assert batch["hidden_states"][~real].abs().sum() == 0


def test_the_size_on_disk_is_logged_and_checked_before_any_forward(
    tmp_path: Path, transformers_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 4000))
    teacher = CountingTeacher()
    with pytest.raises(OSError, match=r"needs 5.25e-06 GiB .*3.73e-06 GiB are free.*`precompute_dir`"):
        precompute(tmp_path, teacher)
    assert teacher.samples == 0
    assert "hidden states take 5.25e-06 GiB" in transformers_log.text  # 88 tokens of 32 numbers of 2 bytes


def test_a_folder_of_other_data_or_another_target_is_refused(tmp_path: Path) -> None:
    precompute(tmp_path, CountingTeacher())
    with pytest.raises(ValueError, match="another dataset or target: samples, input_ids_sha256 differ"):
        precompute(tmp_path, CountingTeacher(), lengths=[12, 9])
    with pytest.raises(ValueError, match="another target: on its first sample they differ by"):
        precompute(tmp_path, CountingTeacher(seed=3))


def test_a_whole_folder_is_only_read(tmp_path: Path) -> None:
    """So that several runs may share it at the same time."""
    precompute(tmp_path, CountingTeacher())
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    precompute(tmp_path, CountingTeacher())
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`precompute_targets=True` needs a dataset of known length"):
        make_trainer(tmp_path, make_target(), random_ids(DATA).to_iterable_dataset(), precompute_targets=True)
