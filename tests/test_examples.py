"""The examples, as a newcomer runs them: the stand-in as it lies in the repository, and how it is made, in small."""

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers.tiny_text import ASCII, CHAT_TEMPLATE, save_folders
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from hf_clover.measure.benchmark import measure, plain, with_heads
from hf_clover.measure.prompts import HELD_OUT, load_prompts, standard_library

pytestmark = pytest.mark.long("examples", "hf_clover/apps")

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
STAND_IN = EXAMPLES / "stand_in"
HEADS = ("heads", "clover-2", "clover", "medusa")


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def stand_in():
    tokenizer = AutoTokenizer.from_pretrained(STAND_IN / "target")
    return AutoModelForCausalLM.from_pretrained(STAND_IN / "target", dtype=torch.float32), tokenizer


@pytest.fixture
def no_way_to_smollm2(monkeypatch):
    """Neither a Hub nor a registry."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", os.devnull)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


def test_the_quick_start_runs_with_the_stand_in_from_the_command_line(no_way_to_smollm2):
    command = [sys.executable, EXAMPLES / "quickstart.py", "--max-new-tokens", "40"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "100"})
    said, words = said.stdout, " ".join(said.stdout.split())
    assert "\x1b" not in said, "no colour where there is no terminal"
    assert "(HuggingFaceTB/SmolLM2-135M-Instruct: HF_HUB_OFFLINE is set) nor" in words
    assert "so the stand-in, a small model of Python code in this repository, is used" in words
    assert len(re.findall(r"^(?:with heads|plain generate) +━{36} +40 tokens +\d+\.\d s *$", said, re.MULTILINE)) == 2
    assert re.search(r"^\d+\.\d times as fast, the same 40 tokens\.$", said, re.MULTILINE)
    assert "hf-clover train" in said


def test_the_quick_start_asks_a_chat_model_a_question(tmp_path, capsys):
    """As SmolLM2 does, in small: with a chat template."""
    save_folders(tmp_path, says=ASCII)
    (tmp_path / "target" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    folders = ["--target", str(tmp_path / "target"), "--heads", str(tmp_path / "heads")]
    ours, plain = load("quickstart").main([*folders, "--max-new-tokens", "30"])
    said = capsys.readouterr().out
    assert "> Write a short letter to a friend who has moved away." in said
    assert "[user]" not in said, "the template is not shown"
    assert ours.tokens == plain.tokens
    assert max(map(len, ours.steps)) > 1 == max(map(len, plain.steps))
    free = sum(len(step) - 1 for step in ours.steps if step)
    assert f"In green: {free} of 30 tokens came free" in said
    assert "times as fast, the same 30 tokens." in said


def test_the_quick_start_says_where_two_texts_begin_to_differ():
    quickstart = load("quickstart")
    ours, plain = quickstart.StepRecord(), quickstart.StepRecord()
    ours.steps, ours.seconds, plain.steps, plain.seconds = [[5, 6], [7]], 1.0, [[5], [6], [8]], 2.0
    assert quickstart.verdict(ours, plain) == (
        "2.0 times as fast, and the first 2 tokens the same: then rounding chose between two (docs/generation.md)."
    )
    plain.steps = [[5], [6], [7]]
    assert quickstart.verdict(ours, plain) == "2.0 times as fast, the same 3 tokens."


def test_the_time_of_plain_generate_excludes_drawing(monkeypatch):
    quickstart = load("quickstart")
    now = iter([0.0, 1.0, 1.0, 31.0, 32.0, 32.0, 62.0])  # the start; each token: its time, then drawing for 30 s
    monkeypatch.setattr(quickstart.time, "perf_counter", lambda: next(now))
    plain = quickstart.Plain(quickstart.StepRecord(), quickstart.Console(file=io.StringIO()))
    plain._start = quickstart.time.perf_counter()
    for token in (3, 4, 5):  # the first is the prompt
        plain.put(torch.tensor([token]))
    assert plain.times == [1.0, 2.0]


def test_the_text_of_the_quick_start_does_not_repeat_itself(stand_in):
    target, tokenizer = stand_in
    quickstart = load("quickstart")
    (prompt,) = load_prompts("stand-in", tokenizer, limit=1)
    torch.manual_seed(quickstart.SEED)
    out = target.generate(torch.tensor([prompt]), max_new_tokens=200, **quickstart.PICKING["stand-in"])
    ids = out[0].tolist()
    runs = Counter(tuple(ids[place : place + 8]) for place in range(len(ids) - 7))
    assert max(runs.values()) <= 2, tokenizer.decode(ids)


@pytest.mark.parametrize("folder", HEADS)
def test_the_stand_ins_heads_reach_their_tokens_per_forward(stand_in, folder):
    target, tokenizer = stand_in
    heads = AutoModel.from_pretrained(STAND_IN / folder, dtype=torch.float32)
    prompts = load_prompts("stand-in", tokenizer, limit=24)[20:]  # not those of the quick start
    _, row = measure(target, tokenizer, [plain(), with_heads(heads)], prompts, max_new_tokens=64, repeats=1)
    assert row["identical"] is True
    assert row["tokens_per_forward"] > {"heads": 2.2, "clover-2": 2.0, "clover": 1.5, "medusa": 1.3}[folder]


def test_the_stand_in_is_small_and_says_how_it_was_made():
    sizes = {folder: sum(f.stat().st_size for f in (STAND_IN / folder).iterdir()) for folder in ("target", *HEADS)}
    assert sizes["target"] + sizes["heads"] < 25e6
    report = json.loads((STAND_IN / "target" / "training.json").read_text())
    card = (STAND_IN / "target" / "README.md").read_text()
    assert f"{report['held_out_loss']:.3f}" in card
    trained = []
    for folder in HEADS:
        results = json.loads((STAND_IN / folder / "clover_results.json").read_text())
        card = (STAND_IN / folder / "README.md").read_text()
        (row,) = results["benchmarks"][0]["rows"]
        assert f"| {row['tokens_per_forward']:.2f} |" in card
        assert f"{results['acceptance']['by_head'][0]['top1']:.1%}" in card
        trained.append((results["training"]["tokens"], results["training"]["datasets"]))
    assert trained[0] == trained[1] == trained[2], "the same data, the same number of tokens"


def test_the_script_that_makes_the_stand_in_goes_on_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    script = load("train_stand_in")
    whole = script.source_files
    monkeypatch.setattr(script, "PACKAGES", ("typer",))
    monkeypatch.setattr(script, "source_files", lambda root, limit, rng: whole(root, min(limit, 200_000), rng))
    monkeypatch.setattr(script, "CONTINUED_AT_ONCE", 8)
    monkeypatch.setattr(script, "EVALUATED", 8)
    monkeypatch.setattr(script, "load_prompts", lambda name, tokenizer, limit: load_prompts(name, tokenizer, 1))
    small = ["--minutes", "0.05", "--layers", "1", "--width", "128", "--vocabulary", "300", "--tokens-per-step", "512"]
    argv = ["train_stand_in.py", *small, "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    monkeypatch.setattr(sys, "argv", argv)
    real = script.train_heads

    def stopped(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "train_heads", stopped)
    with pytest.raises(KeyboardInterrupt):
        script.main()
    weights = (tmp_path / "out" / "target" / "model.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(script, "train_heads", real)
    script.main()
    assert (tmp_path / "out" / "target" / "model.safetensors").stat().st_mtime_ns == weights, "not trained anew"
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "target")
    assert target.dtype == torch.bfloat16
    for folder in HEADS:
        heads = AutoModel.from_pretrained(tmp_path / "out" / folder)
        assert heads.config.target_name_or_path == "target"
        assert "tokens per forward" in (tmp_path / "out" / folder / "README.md").read_text()


def test_held_out_modules_are_left_out_of_training(monkeypatch):
    import numpy as np

    script = load("train_stand_in")
    texts = set(script.source_files(standard_library(), 10**9, np.random.default_rng(0)))
    for name in HELD_OUT:
        path = standard_library() / f"{name}.py"
        assert not path.exists() or path.read_text() not in texts
    assert (standard_library() / "argparse.py").read_text() in texts
    assert not any("class TestCase" in text[:2000] and "import unittest" in text[:2000] for text in texts)


@pytest.mark.parametrize("folder", ["heads", "clover-2"])
def test_the_one_step_example_needs_as_many_forwards_as_the_library(stand_in, folder, capsys):
    target, tokenizer = stand_in
    said = load("one_step").main(["--heads", str(STAND_IN / folder), "--max-new-tokens", "32"])  # compares the tokens
    assert "The same tokens as plain generate's." in capsys.readouterr().out
    assert said["new_tokens"] == 32
    assert said["accepted"] > 16
    heads = AutoModel.from_pretrained(STAND_IN / folder, dtype=torch.float32, draft_tree="chain")
    inputs = tokenizer(load("one_step").PROMPT, return_tensors="pt", return_token_type_ids=False)
    options = {"max_new_tokens": 32, "num_assistant_tokens": heads.config.num_heads, "return_dict_in_generate": True}
    out = target.generate(**inputs, assistant_model=heads, **options)
    assert said["forwards"] == out.speculation.target_forwards


def test_the_hello_example_says_yes_twice():
    said = subprocess.run([sys.executable, EXAMPLES / "hello.py"], capture_output=True, text=True, check=True).stdout
    assert said.count("yes") == 2


def test_training_memory_prints_the_peaks_it_measured():
    command = [sys.executable, EXAMPLES / "benchmarks" / "training_memory.py", "--positions", "512"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    peaks = {int(size.replace(",", "")): int(mib) for size, mib in re.findall(r"^ *([\d,]+) +(\d+) +\d", said, re.M)}
    assert set(peaks) == {8_192, 32_768, 131_072}
    assert 0 < max(peaks.values()) < 700, "chunks have a largest size"
    assert "Qwen3-8B" in said


def test_the_train_example_trains_heads_and_writes_a_card(tmp_path):
    save_folders(tmp_path)
    rows = "\n".join(json.dumps({"text": f"def f(x):\n    return x[{'a' * i}:]\n" * 2}) for i in range(8))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(rows)
    options = {
        "teacher_model_name_or_path": tmp_path / "target", "dataset_name": tmp_path / "data", "use_cpu": "true",
        "output_dir": tmp_path / "out", "max_steps": 2, "bf16": "false", "report_to": "none", "save_strategy": "no",
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    subprocess.run([sys.executable, EXAMPLES / "train.py", *words], capture_output=True, text=True, check=True)
    assert AutoModel.from_pretrained(tmp_path / "out").config.variant == "clover-x"
    assert "How they were trained" in (tmp_path / "out" / "README.md").read_text()
