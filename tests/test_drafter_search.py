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
    gently = ("--tokens", "64", "--muon-rate", "0.001")
    again = run(search, folder, "again", *gently, "--start", str(folder / "heads"))
    assert again["chain"] > short["chain"] + 0.5, "it goes on from what was saved"


def test_features_layers_and_copies(search, folder):
    row = run(
        search, folder, "all", "--tokens", "200", "--features", "0", "--layers", "1", "--copy-last", "--no-recall"
    )
    plain = run(search, folder, "plain", "--tokens", "200")
    assert (row["features"], plain["features"]) == ([0], [])
    assert row["parameters"] != plain["parameters"]


@pytest.mark.parametrize("tried", ["features", "slots"])
def test_heads_with_what_is_tried_are_not_saved(search, folder, capsys, tried):
    with pytest.raises(SystemExit):
        run(search, folder, "saved", f"--{tried}", "2", "--save", str(folder / "nowhere"))
    assert f"--save: heads that read --{tried} are known to this experiment alone" in capsys.readouterr().err


def test_slots_widths_and_losses(search, folder):
    rows = {
        name: run(search, folder, name, "--tokens", "3000", *words)
        for name, words in {
            "slots": ("--slots", "5"),
            "slots without recall": ("--slots", "5", "--no-recall"),
            "wide": ("--width", "64"),
            "variation": ("--loss", "total variation"),
        }.items()
    }
    short = run(search, folder, "short", "--tokens", "64")
    assert min(row["chain"] for row in rows.values()) > short["chain"] + 0.5
    assert len({row["parameters"] for row in rows.values()}) == 4


def test_a_slot_sees_its_own_text_alone(search, folder):
    """What is said of a place, and of its slots, is the same with other documents and other places beside it."""
    target = search.AutoModelForCausalLM.from_pretrained(folder / "target").eval()
    heads = search.Tried.from_target(target, draft_vocab_size=20).bind(target).eval()
    heads.add_slots(5)
    for layer in heads.layers:  # which start without a word
        torch.nn.init.normal_(layer.self_attn.o_proj.weight)
    size, tokens = target.config.hidden_size, torch.randint(1, 20, (13,))
    states, positions = torch.randn(13, 1, size), torch.cat((torch.arange(6), torch.arange(7)))
    both, of_both, _, _ = heads.read(states, tokens, positions, torch.tensor([2, 8, 10]))
    second, of_second, _, _ = heads.read(states[6:], tokens[6:], positions[6:], torch.tensor([4]))
    torch.testing.assert_close(both[6:], second, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(of_both[2], of_second[0], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(of_both[1], of_both[2], atol=1e-2)
