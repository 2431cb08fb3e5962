"""What somebody sees who watches a training run: a line for each log, and a hint where steps are slow."""

from pathlib import Path

import pytest
from tiny import make_target, make_trainer, random_ids

from hf_clover.training import callbacks

pytestmark = pytest.mark.long


def test_each_log_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"eval_dataset": random_ids([12, 9])}
    trainer = make_trainer(tmp_path, make_target(), options=options, max_steps=2, eval_strategy="epoch")
    capsys.readouterr()
    trainer.train()
    first, second, evaluated = capsys.readouterr().out.splitlines()
    one, two = (line for line in trainer.state.log_history if "loss" in line)
    (line,) = (line for line in trainer.state.log_history if "eval_loss" in line)
    length = one["acceptance_length/top1"]
    said = f"Step 1 of 2: loss {one['loss']:.3f}, {length:.2f} tokens per forward, "
    assert first.startswith(said)
    assert first.endswith(" to go")
    assert max(map(len, (first, second))) < 80, "on one line of a terminal, too"
    assert second.startswith(f"Step 2 of 2: loss {two['loss']:.3f}, ")
    assert second.endswith(" tokens/s, 0 s to go")
    length = line["eval_acceptance_length/top1"]
    assert evaluated == f"Step 2 of 2, evaluated: loss {line['eval_loss']:.3f}, {length:.2f} tokens per forward"


def test_logs_beside_a_bar_are_lines_and_no_dictionaries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(tmp_path, make_target(), max_steps=1, disable_tqdm=False).train()
    out, err = capsys.readouterr()
    assert out.startswith("Step 1 of 1: loss ")
    assert "{" not in out + err
    assert "1/1" in err, "the bar"


def test_a_slow_first_step_on_a_cpu_says_what_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(callbacks, "SLOW", 0.0)
    hint = (
        "On a CPU smaller ones are quicker: --per_device_train_batch_size 2 --max_length 256 --draft_vocab_size 4096\n"
    )
    make_trainer(tmp_path, make_target()).train()
    said = capsys.readouterr().out
    assert said.count(hint) == 1
    small = {"per_device_train_batch_size": 2, "max_length": 32}
    make_trainer(tmp_path, make_target(), **small).train()
    assert "On a CPU smaller ones are quicker: --draft_vocab_size 4096\n" in capsys.readouterr().out
    make_trainer(tmp_path, make_target(), **small, draft_vocab_size=30).train()
    assert "On a CPU" not in capsys.readouterr().out


def test_times_are_shown_in_seconds_minutes_or_hours() -> None:
    said = [callbacks._in_words(seconds) for seconds in (0.2, 99, 100, 5000, 6000, 9000)]
    assert said == ["0 s", "99 s", "2 min", "83 min", "1 h 40 min", "2 h 30 min"]
