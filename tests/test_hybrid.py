"""Heads on a target of Qwen3.5's shape: trained on its own text, they draft chains, which it replays."""

import importlib
import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.long("examples/experiments", "hf_clover/decoding/target/chains.py")

EXPERIMENTS = Path(__file__).resolve().parent.parent / "examples" / "experiments"


def test_heads_that_know_the_text_draft_it(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    hybrid = importlib.import_module("hybrid")
    sizes = ["--width", "64", "--layers", "4", "--vocab-size", "64", "--tokens", "24", "--prompts", "2"]
    hybrid.main([*sizes, "--steps", "80", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "hybrid.json").read_text())["rows"]
    assert [row["nodes"] for row in rows] == [None, 2, 4, 8]
    assert {row["method"] for row in rows} == {"replayed chain"}
    assert rows[2]["tokens_per_forward"] > 2.5, "what was learned by heart is drafted, and the same tokens come out"
