"""A target from a GGUF file: in the commands, in training, and beside the one it was made from."""

import copy
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from datasets import load_dataset
from helpers.gguf_file import write_gguf
from helpers.tiny_text import ASCII, CHAT_TEMPLATE, PROMPT, make_target, make_tokenizer
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.utils import logging
from typer.testing import CliRunner

from hf_clover import CloverHeads, CloverTrainer, CloverTrainingConfig, cli
from hf_clover.targets.loading import load_target, load_tokenizer
from hf_clover.training import script

pytestmark = pytest.mark.long("hf_clover/origins")

NAME = "tiny.Q8_0.gguf"


@pytest.fixture(scope="module")
def original() -> LlamaForCausalLM:
    """Not rounded to 8 bits."""
    return make_target(ASCII)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, original: LlamaForCausalLM) -> Path:
    """A GGUF and nothing else, prompts to answer, and heads that the training program made for it."""
    folder, tokenizer = tmp_path_factory.mktemp("gguf"), make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    write_gguf(folder / NAME, original, tokenizer)
    texts = ["".join(ASCII[(start + step * i) % len(ASCII)] for i in range(40)) for start in (1, 5) for step in (1, 3)]
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text[:9]}) + "\n" for text in texts))
    words = ["--teacher_model_name_or_path", folder, "--gguf_file", NAME, "--dtype", "float32", "--max_steps", "2"]
    words += ["--dataset_name", folder / "data", "--output_dir", folder / "heads", "--use_cpu", "--bf16", "false"]
    words += ["--model_init_kwargs", '{"num_heads": 2}', "--report_to", "none", "--disable_tqdm", "true"]
    script.main([str(word) for word in words])
    return folder


@pytest.fixture
def log(caplog):
    logging.warning_once.cache_clear()
    return caplog


def call(*words: object, stdin: str = "") -> str:
    said = CliRunner().invoke(cli.app, [str(word) for word in words], input=stdin, catch_exceptions=False)
    assert said.exit_code == 0, said.output
    return said.stdout


def test_a_gguf_file_loads_as_target_and_tokenizer(folder, original):
    target, tokenizer = load_target(folder, NAME), load_tokenizer(folder, NAME)
    assert target.config.eos_token_id == tokenizer.eos_token_id == original.config.eos_token_id
    assert not target.is_quantized
    for name, weight in target.state_dict().items():
        wanted = original.state_dict()[name]
        assert (weight - wanted).abs().max() < 0.005 * wanted.abs().max(), name
    assert tokenizer(PROMPT).input_ids == make_tokenizer()(PROMPT).input_ids
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_heads_trained_on_a_gguf_target_name_its_folder(folder):
    heads = CloverHeads.from_pretrained(folder / "heads")
    assert heads.config.target_name_or_path == str(folder)
    assert "quantization_config" not in json.loads((folder / "heads" / "config.json").read_text())
    assert (folder / "heads" / "README.md").exists()


def test_every_command_takes_a_gguf_target(folder):
    """`train` made the heads; `serve` is below."""
    target = load_target(folder, NAME)
    tokenizer = load_tokenizer(folder, NAME)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    plain = tokenizer.decode(target.generate(**inputs, max_new_tokens=12, do_sample=False)[0])
    models = ["--target", folder, "--gguf-file", NAME]
    heads = ["--heads", folder / "heads", "--max-new-tokens", 12]
    assert json.loads(call("generate", PROMPT, *models, *heads, "--json"))["text"] == plain.removeprefix(PROMPT)
    assert "tokens per forward" in call("chat", *models, *heads, stdin="abc\n")
    (folder / "prompts.txt").write_text("abc\nfgh\n")
    prompts = ["--prompts", folder / "prompts.txt", "--num-prompts", 2, "--json"]
    rows = json.loads(call("benchmark", *models, *heads, *prompts, "--repeats", 1))["rows"]
    assert rows[1]["identical"] is True
    few = ["--nodes", 4, "--tree", "global", "--batch-size", 2]
    assert json.loads(call("verify", *models, *heads, *prompts, *few))["verdict"] == "identical"
    words = ["--model", folder, "--gguf-file", NAME, "--max-new-tokens", 3]
    assert "4 of 4 prompts answered" in call("regenerate", folder / "prompts.jsonl", folder / "answers", *words)


def test_serve_takes_a_gguf_target(folder, monkeypatch):
    served = []
    monkeypatch.setattr("hf_clover.apps.serving.serve", lambda *arguments, **options: served.extend(arguments))
    call("serve", "--target", folder, "--gguf-file", NAME, "--heads", folder / "heads")
    assert isinstance(served[0], LlamaForCausalLM)
    assert served[1].eos_token == "</s>"
    assert served[2].config.target_name_or_path == str(folder)


def test_heads_of_a_gguf_target_fit_the_original_with_one_warning(folder, original, log):
    """There is one warning, the one for a fine-tune, and the heads draft."""
    heads = CloverHeads.from_pretrained(folder / "heads")
    original = copy.deepcopy(original)
    original.lm_head.weight.data[:, 0] *= -1  # 16 of the fingerprint's 128 signs at most
    ids = make_tokenizer()(PROMPT, return_tensors="pt").input_ids
    plain = original.generate(ids, max_new_tokens=20, do_sample=False)
    for _ in range(2):
        drafted = original.generate(ids, assistant_model=heads, max_new_tokens=20, return_dict_in_generate=True)
        assert torch.equal(drafted.sequences, plain)
        assert drafted.speculation.tree_sizes[0] > 0
    said = [record.getMessage() for record in log.records if record.levelname == "WARNING"]
    assert len(said) == 1
    assert "this target's lm_head differs a little from it (a fine-tune?)" in said[0]


def test_a_gguf_target_loaded_by_transformers_trains_and_generates(folder, tmp_path):
    """Its config says that it is quantised. Training and `generate` take it, and the tokenizer is found."""
    target = AutoModelForCausalLM.from_pretrained(folder, gguf_file=NAME)
    assert target.is_quantized
    dataset = load_dataset(str(folder / "data"), split="train")
    heads = CloverHeads.from_target(target, num_heads=2)
    for peft_config in (None, LoraConfig(r=2)):
        args = CloverTrainingConfig(
            str(tmp_path), max_steps=1, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True
        )
        trainer = CloverTrainer(heads, target, args, train_dataset=dataset, peft_config=peft_config)
        trainer.train()
        trainer.save_model()
    assert (tmp_path / "adapter_model.safetensors").exists()
    ids = make_tokenizer()(PROMPT, return_tensors="pt").input_ids
    drafted = target.generate(ids, assistant_model=heads, max_new_tokens=8, do_sample=False)
    assert torch.equal(drafted, target.generate(ids, max_new_tokens=8, do_sample=False))


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize("load", [load_target, load_tokenizer])
def test_a_gguf_file_that_cannot_be_read_is_refused_with_the_reason(folder, tmp_path, load, original):
    content = (folder / NAME).read_bytes()
    (tmp_path / "text.gguf").write_text("This is no GGUF.")
    (tmp_path / "cut.gguf").write_bytes(content[:600])
    write_gguf(tmp_path / "other.gguf", original, make_tokenizer(), architecture="no-such-architecture")
    with pytest.raises(ValueError, match=r"`gguf_file='text.gguf'` of .* does not start with the GGUF magic bytes"):
        load(tmp_path, "text.gguf")
    with pytest.raises(ValueError, match=r"`gguf_file='cut.gguf'` of .* is damaged or cut short\. Pass a whole GGUF"):
        load(tmp_path, "cut.gguf")
    with pytest.raises(ValueError, match=r"architecture no-such-architecture is not supported.*or the model in safe"):
        load(tmp_path, "other.gguf")
    with pytest.raises(ValueError, match=r"`gguf_file='a.gguf'` is not in .*, which has cut.gguf, other.gguf, text"):
        load(tmp_path, "a.gguf")
    with pytest.raises(ValueError, match=rf"is a file: pass its folder .*`gguf_file='{NAME}'`"):
        load(folder / NAME)


@pytest.mark.parametrize("missing", [["gguf"], ["accelerate"], ["gguf", "accelerate"]], ids=" and ".join)
def test_packages_that_gguf_files_need_are_named_where_they_are_missing(missing, folder, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in missing else find(name, *a))
    monkeypatch.setattr(sys, "argv", ["hf-clover", "generate", "a", "--target", str(folder), "--gguf-file", NAME])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.match(rf"hf-clover: `gguf_file='{NAME}'` needs {' and '.join(missing)}: `pip install 'hf-clo", said)


def test_gguf_file_is_refused_without_a_target_and_with_an_endpoint(folder):
    with pytest.raises(ValueError, match=rf"`--gguf-file {NAME}` needs its repository or folder: pass `--target` too"):
        call("generate", "a", "--gguf-file", NAME)
    with pytest.raises(ValueError, match="`--gguf-file` and `--endpoint` exclude each other"):
        call("regenerate", folder, folder, "--model", "m", "--gguf-file", NAME, "--endpoint", "http://localhost:1/v1")
