"""The commands: thin faces over functions that are tested elsewhere; here what they pass on, say and return."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from datasets import load_dataset
from tiny import make_target, make_tokenizer
from typer.testing import CliRunner

import hf_clover
from hf_clover import CloverHeads, cli, speculations, training
from hf_clover.hub import push as hub
from hf_clover.training import first_fit, online

pytestmark = pytest.mark.long("hf_clover/network")

runner = CliRunner()
COMMANDS = ("train", "regenerate", "push")


def run(*argv: str) -> subprocess.CompletedProcess:
    """As a user does, exit code and all."""
    code = "from hf_clover.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True)


def test_help_names_every_command_with_an_example():
    said = runner.invoke(cli.app, ["--help"])
    assert said.exit_code == 0
    for command in COMMANDS:
        assert command in said.output
    for command in ("regenerate", "push"):
        assert f"Example: hf-clover {command}" in " ".join(runner.invoke(cli.app, [command, "--help"]).output.split())


def test_the_command_line_imports_nothing_that_needs_an_extra():
    extras = {"trl", "datasets", "matplotlib", "fastapi", "vllm", "gguf"}  # transformers may import peft
    code = f"import sys, hf_clover.cli; assert not {extras} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("words", [["train", "--help"], ["regenerate", "prompts", "answers", "--model", "org/target"]])
def test_without_the_extra_the_error_says_how_to_install_it(words, monkeypatch, capsys):
    monkeypatch.setattr(training, "find_spec", lambda name: None if name in ("datasets", "trl") else name)
    wrong = r"Training needs datasets and trl: `pip install 'hf-clover\[train\]'`"
    with pytest.raises(ImportError, match=wrong):
        hf_clover.CloverTrainer  # noqa: B018
    assert hf_clover.OnlineLearner.__name__ == "OnlineLearner", "needs no extra"
    monkeypatch.setattr(sys, "argv", ["hf-clover", *words])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert re.search(wrong, capsys.readouterr().err)


def test_train_has_the_flags_of_trl():
    said = run("train", "--help")
    assert said.returncode == 0
    flags = ("--dataset_name", "--teacher_model_name_or_path", "--loss_type", "--lora_r")
    for flag in (*flags, "usage: hf-clover train", "Example: hf-clover train --config"):
        assert flag in said.stdout


def test_a_users_mistake_gives_one_line_and_exit_code_2(tmp_path: Path):
    said = run("train", "--output_dir", str(tmp_path), "--use_cpu", "true")
    assert said.returncode == 2
    assert said.stderr.strip().splitlines()[-1].startswith("hf-clover: `teacher_model_name_or_path` is required")
    assert "Traceback" not in said.stderr


def test_push_passes_its_options_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    push_folder = Mock(return_value=SimpleNamespace(pr_url=None, commit_url="https://hub/commit/1"))
    monkeypatch.setattr(hub, "push_folder", push_folder)
    said = runner.invoke(cli.app, ["push", str(tmp_path), "org/heads", "--private", "--subfolder", "heads", "-m", "x"])
    assert said.exit_code == 0, said.output
    assert said.output.strip() == "https://hub/commit/1"
    args, options = push_folder.call_args
    assert args == (tmp_path, "org/heads")
    assert {"private": True, "subfolder": "heads", "commit_message": "x"}.items() <= options.items()


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    CloverHeads.from_target(target).save_pretrained(tmp_path / "heads")
    (tmp_path / "prompts").mkdir()
    lines = [json.dumps({"prompt": text}) for text in ("w1 w2", "w3", "w4 w5")]
    (tmp_path / "prompts" / "train.jsonl").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.parametrize("options", [[], ["--heads", "heads"], ["--pack"]], ids=" ".join)
def test_regenerate_answers_the_prompts_of_a_split(workdir: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]):
    monkeypatch.chdir(workdir)
    argv = [str(workdir / "prompts"), str(workdir / "answers"), "--model", str(workdir / "target")]
    said = runner.invoke(cli.app, ["regenerate", *argv, "--max-new-tokens", "5", "--split", "train[:2]", *options])
    assert said.exit_code == 0, said.output
    assert f"2 of 2 prompts answered in {workdir / 'answers'}" in said.output
    assert load_dataset(str(workdir / "answers"), split="train").column_names == ["prompt", "completion"]


def test_regenerate_learns_from_its_answers_and_drafts_the_next_ones(workdir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(online, "TOKENS", 40)
    monkeypatch.setattr(online, "REMEMBERED", 1)  # so that what is drafted was learned, and not copied
    monkeypatch.setattr(first_fit, "FIRST", 40)
    monkeypatch.setattr(first_fit, "LAST", 80)
    monkeypatch.setattr(online.OnlineLearner, "_may_step", lambda self: True)
    (workdir / "prompts" / "train.jsonl").write_text('{"prompt": "w1 w2"}\n' * 48)
    argv = ["regenerate", str(workdir / "prompts"), str(workdir / "answers"), "--model", str(workdir / "target")]
    learn = ["--learn", str(workdir / "mine"), "--batch-size", "1", "--max-new-tokens", "30"]
    with speculations() as records:
        said = runner.invoke(cli.app, [*argv, *learn])
    assert said.exit_code == 0, said.output
    assert re.search(r"^heads that learn: .* tokens learned from$", said.output, re.MULTILINE)
    assert len(records) == 48
    accepted = [record.accepted_tokens for record in records]
    assert sum(accepted[24:]) > sum(accepted[:24]) + 48
    plain = runner.invoke(cli.app, [*argv[:2], str(workdir / "plain"), *argv[3:], "--max-new-tokens", "30"])
    assert plain.exit_code == 0, plain.output
    texts = [load_dataset(str(workdir / name), split="train")["completion"] for name in ("answers", "plain")]
    assert list(texts[0]) == list(texts[1])


def test_several_processes_cannot_learn_into_one_folder(workdir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("accelerate.PartialState", lambda: SimpleNamespace(num_processes=4))
    argv = ["regenerate", str(workdir / "prompts"), str(workdir / "answers"), "--model", str(workdir / "target")]
    said = runner.invoke(cli.app, [*argv, "--learn", str(workdir / "mine")])
    assert isinstance(said.exception, ValueError)
    assert "`--learn` is for one process, and these are 4: leave out `--learn`" in str(said.exception)


@pytest.mark.parametrize("dataset", ["train.jsonl", "."], ids=["a file", "this folder"])
def test_prompts_may_lie_in_the_working_directory(workdir: Path, monkeypatch: pytest.MonkeyPatch, dataset: str):
    monkeypatch.chdir(workdir / "prompts")
    argv = ["regenerate", dataset, "../answers", "--model", "../target", "--max-new-tokens", "2"]
    said = runner.invoke(cli.app, argv)
    assert said.exit_code == 0, said.exception
    assert "3 of 3 prompts answered in ../answers" in said.output


@pytest.mark.parametrize("option", [["--heads", "h"], ["--learn", "h"], ["--pack"]], ids=lambda words: words[0])
def test_heads_learning_and_packing_are_refused_with_an_endpoint(workdir: Path, option: list[str]):
    argv = ["regenerate", str(workdir / "prompts"), str(workdir / "out"), "--model", "m"]
    said = runner.invoke(cli.app, [*argv, *option, "--endpoint", "http://localhost:1/v1"])
    assert isinstance(said.exception, ValueError)
    assert f"`{option[0]}` and `--endpoint` exclude each other" in str(said.exception)
