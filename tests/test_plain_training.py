"""The plain loop of the experiments, against the trainer whose losses and recipe it has; and a script made of it."""

import gzip
import importlib
import importlib.util
import itertools
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers import tiny_text
from helpers.gguf_file import write_gguf
from training.tiny import make_target, make_trainer

from hf_clover import CloverHeads

pytestmark = pytest.mark.long("examples/experiments", "examples/smollm2", "hf_clover/training")
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def plain_training(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES / "experiments"))
    return importlib.import_module("plain_training")


@pytest.fixture
def rows(plain_training):
    texts = [torch.arange(3, 3 + length).tolist() for length in (9, 4, 16, 2, 7, 5, 20)]
    return plain_training.Rows.packed(texts, 16)


def made(plain_training, rows, steps=6, **more):
    target = make_target()
    torch.manual_seed(0)
    heads = plain_training.new_heads(target, rows, 12)
    return plain_training.Run(heads, target, rows, steps, batch_size=1, **more)


def test_rows_hold_whole_texts(rows):
    documents = []
    for ids, labels, positions in zip(rows.input_ids, rows.labels, rows.position_ids, strict=True):
        counted = labels != -100
        assert torch.equal(ids[counted], labels[counted])
        for start in (counted & (positions == 0)).nonzero()[:, 0].tolist():
            end = start + 1
            while end < 16 and counted[end] and positions[end] > 0:
                end += 1
            assert positions[start:end].tolist() == list(range(end - start))
            documents.append(ids[start:end].tolist())
        if not counted.all():  # what fills the row is no part of its last text
            assert positions[counted.sum()] == 0
    # 2 is too short to learn from, 20 is cut to 16
    assert sorted(map(len, documents)) == [4, 5, 7, 9, 16, 16]
    assert rows.tokens == sum(map(len, documents))
    assert len(rows) == 4  # 16; 16; 9 and 7; 5 and 4


def test_loss_and_recipe_equal_those_of_the_trainer(plain_training, rows, tmp_path):
    trainer = make_trainer(tmp_path, make_target(), packing=True, max_length=16, max_steps=50)
    batch = next(iter(trainer.get_train_dataloader()))
    expected = trainer.compute_loss(trainer.model, batch)
    run = plain_training.Run(trainer.heads, trainer.teacher.model, rows, steps=50, batch_size=1)
    loss, *_ = run.loss({name: batch[name] for name in ("input_ids", "labels", "position_ids")})
    torch.testing.assert_close(loss, expected)
    assert loss > 0

    def recipe(optimizer, rate):
        return {
            id(p): (group[rate], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]
        }

    trainer.create_optimizer_and_scheduler(num_training_steps=50)
    assert recipe(run.optimizer, "lr") == recipe(trainer.optimizer, "initial_lr")
    args = trainer.args
    theirs = args.learning_rate, args.warmup_steps, args.max_grad_norm, args.lr_scheduler_type
    assert theirs == (plain_training.RATE, plain_training.WARM_UP, plain_training.LARGEST_NORM, "linear")


def test_a_run_learns_and_goes_on_where_it_was(plain_training, rows, tmp_path, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(plain_training.time, "perf_counter", lambda: float(next(ticks)))  # a step is a second
    whole, broken, later = (made(plain_training, rows, steps=8) for _ in range(3))
    before = whole.evaluate(rows)["head_0/loss"]
    whole.train()
    assert whole.evaluate(rows)["head_0/loss"] < before
    assert (whole.step, whole.progress) == (8, 1)
    assert whole.tokens == 2 * rows.tokens  # four rows, twice

    broken.train(until=3)
    assert broken.step == 3
    broken.save(tmp_path / "run.pt")
    later.load(tmp_path / "run.pt")
    later.train()
    assert (later.step, later.tokens) == (8, whole.tokens)
    for mine, other in zip(later.heads.state_dict().values(), whole.heads.state_dict().values(), strict=True):
        assert torch.equal(mine, other)


def test_a_run_ends_after_its_seconds(plain_training, rows):
    run = made(plain_training, rows, steps=10**9, seconds=0.2)
    run.train()
    assert 0 < run.step < 10**9
    assert run.progress >= 1
    run._set_rates()
    assert all(group["lr"] <= 0 for group in run.optimizer.param_groups)


def test_the_gpu_script_of_smollm2_runs_and_goes_on_where_it_was(tmp_path, monkeypatch):
    """At toy size: a target in two parts, answers, heads, figures; and again from where it was."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "experiments"))
    spec = importlib.util.spec_from_file_location("on_a_gpu", EXAMPLES / "smollm2" / "on_a_gpu.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    tokenizer = tiny_text.make_tokenizer()
    tokenizer.chat_template = tiny_text.CHAT_TEMPLATE
    write_gguf(tmp_path / "whole.gguf", tiny_text.make_target(), tokenizer)
    data = (tmp_path / "whole.gguf").read_bytes()
    parts = [tmp_path / "part.aa", tmp_path / "part.ab"]
    for part, piece in zip(parts, (data[:1000], data[1000:]), strict=True):
        part.write_bytes(piece)
    asked = [
        {"source": "a", "prompt": [{"role": "user", "content": text}]} for text in ("ab", "abc", "d = e", "f", "gh")
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    turns = [
        {"question_id": 1, "category": "qa", "turns": ["what"]},
        {"question_id": 2, "category": "rag", "turns": ["a"]},
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in turns))

    def run(*more):
        sizes = ["--max-new-tokens", "12", "--max-length", "64", "--draft-vocab-size", "20", "--answer-tokens", "6"]
        sizes += ["--batch-size", "2", "--rows", "1", "--question-batch", "2", "--work", str(tmp_path / "work")]
        where = ["--questions", str(tmp_path / "questions.jsonl"), "--output", str(tmp_path / "out")]
        given = [str(tmp_path / "prompts.jsonl"), *where, "--target", *map(str, parts), *sizes, *more]
        result = script.main(given)
        assert json.loads((tmp_path / "out" / "on_a_gpu.json").read_text()) == result
        return result

    result = run("--epochs", "2")
    assert result["answers"]["answers"] == 5
    with gzip.open(tmp_path / "out" / "answers.jsonl.gz", "rt") as file:
        answers = [json.loads(line) for line in file]
    assert [row["messages"][0] for row in answers] == [row["prompt"][0] for row in asked]
    assert all(row["messages"][1]["role"] == "assistant" for row in answers)
    steps = result["training"]["steps"]
    assert result["training"]["log"][-1]["step"] == steps > 1
    assert 0 <= result["training"]["held_out"]["head_0/top1"] <= 1
    for stage, methods in (("batches", 2), ("one by one", 3)):
        assert len(result["measured"][stage]["rows"]) == methods
        assert all(row["identical"] and row["skipped"] is None for row in result["measured"][stage]["rows"])
    heads = CloverHeads.from_pretrained(tmp_path / "out" / "heads")
    assert heads.dtype == torch.bfloat16
    assert heads.config.draft_vocab_size == 20
    assert str(tmp_path) not in json.dumps(result)

    again = run("--epochs", "2")
    assert (again["answers"]["answers"], again["answers"]["this_time"]["tokens_per_second"]) == (5, 0)
    assert again["training"]["log"] == []  # it had been at its end

    (tmp_path / "prompts.jsonl").write_text(json.dumps(asked[0]) + "\n")
    with pytest.raises(SystemExit, match=r"left time for 1 answers, and two are needed.*run it again"):
        run("--work", str(tmp_path / "other work"))
