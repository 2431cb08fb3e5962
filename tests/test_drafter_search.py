"""`drafter_search.py` at toy sizes: what it counts is what drafts are worth, and what it saves drafts."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from training.tiny import make_target, make_tokenizer
from transformers import AutoModel

pytestmark = pytest.mark.long("examples/experiments")

EXPERIMENTS = Path(__file__).resolve().parent.parent / "examples" / "experiments"
QUESTIONS = ("w7 w8 w9", "w10 w11 w12", "w7 w11 w9", "w10 w8 w12") * 24


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    return importlib.import_module("drafter_search")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("search")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "target")
    make_target(vocab_size=len(tokenizer)).save_pretrained(folder / "target")
    with open(folder / "answers.jsonl", "w", encoding="utf-8") as file:
        for question in QUESTIONS:
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": f"{question} on a mat"},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return folder


def run(search: ModuleType, folder: Path, name: str, *more: str) -> dict:
    words = ["--target", str(folder / "target"), "--data", str(folder / "answers.jsonl"), "--run", name]
    words += ["--step-tokens", "64", "--draft-vocab-size", "20", "--work", str(folder / "work")]
    search.main([*words, "--output", str(folder / "out"), *more])
    rows = json.loads((folder / "out" / "drafter_search.json").read_text(encoding="utf-8"))["rows"]
    return next(row for row in rows if row["run"] == name)


def test_a_row_a_run_and_what_is_learned_shows(search, folder):
    short = run(search, folder, "short", "--tokens", "64")
    long = run(search, folder, "long", "--tokens", "6000", "--share", "0.5", "--save", str(folder / "heads"))
    assert short["steps"] == 1
    assert 6000 <= long["tokens"] < 6200
    assert long["chain"] > short["chain"] + 0.5, "what the target says of the same few sentences is learned"
    assert len(long["first_choice"]) == 5
    heads = AutoModel.from_pretrained(folder / "heads")
    assert (heads.config.variant, heads.config.draft_vocab_size, heads.dtype) == ("clover-x", 20, torch.bfloat16)
    assert not list((folder / "heads").glob("*.py"))
    again = run(search, folder, "again", "--tokens", "64", "--start", str(folder / "heads"))
    assert again["chain"] > short["chain"] + 0.5, "it goes on from what was saved"


def test_features_layers_and_copies(search, folder):
    row = run(
        search, folder, "all", "--tokens", "200", "--features", "0", "--layers", "1", "--copy-last", "--no-recall"
    )
    plain = run(search, folder, "plain", "--tokens", "200")
    assert (row["features"], plain["features"]) == ([0], [])
    assert row["parameters"] != plain["parameters"]


def test_heads_with_features_are_not_saved(search, folder, capsys):
    with pytest.raises(SystemExit):
        run(search, folder, "saved", "--features", "0", "--save", str(folder / "nowhere"))
    assert "--save: heads that read --features are known to this experiment alone" in capsys.readouterr().err
