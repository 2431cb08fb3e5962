"""The script that trains SmolLM2's heads, on a tiny target: what it leaves is what the Hub would hold."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from helpers.tiny_text import CHAT_TEMPLATE, make_target, make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_clover import CloverHeads
from hf_clover.measure.benchmark import benchmark, plain, with_heads, write

pytestmark = pytest.mark.long("examples/smollm2", "hf_clover/training")

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "smollm2" / "train_heads.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_heads", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def trained(script, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    make_target().save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    with (folder / "answers.jsonl").open("w") as file:
        for number in range(50):
            said = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "def " * (5 + number % 3)}]
            file.write(json.dumps({"messages": said, "source": "made up"}) + "\n")
    arguments = [str(folder / "answers.jsonl"), "--target", str(folder / "target"), "--work", str(folder / "work")]
    sizes = ["--output", str(folder / "heads"), "--max-length", "256", "--draft-vocab-size", "8"]
    script.main([*arguments, *sizes])
    script.main([*arguments, *sizes])  # goes on from the end
    return folder


def test_the_script_saves_bfloat16_heads_that_give_plain_tokens(trained):
    heads = CloverHeads.from_pretrained(trained / "heads")
    assert heads.config.target_name_or_path == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert {tensor.dtype for tensor in heads.parameters()} == {torch.bfloat16}
    assert heads.config.draft_vocab_size == len(heads.draft_ids) == 8
    target = AutoModelForCausalLM.from_pretrained(trained / "target")
    heads = CloverHeads.from_pretrained(trained / "heads", dtype=torch.float32)
    said = target.generate(
        torch.tensor([[3, 4, 5]]), assistant_model=heads, max_new_tokens=16, num_assistant_tokens=4,
        return_dict_in_generate=True, do_sample=False,
    )  # fmt: skip
    assert torch.equal(said.sequences, target.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=16, do_sample=False))
    assert not list((trained / "heads").glob("*.py"))


def test_results_hold_training_and_acceptance_and_no_local_path(trained):
    results = json.loads((trained / "heads" / "clover_results.json").read_text())
    assert results["training"]["datasets"] == ["answers.jsonl"]
    assert results["training"]["settings"]["muon_learning_rate"] > 0
    assert len(results["acceptance"]["by_head"]) == 5
    assert str(trained) not in json.dumps(results) + (trained / "heads" / "README.md").read_text()


def test_a_benchmark_is_added_to_the_card(script, trained):
    target = AutoModelForCausalLM.from_pretrained(trained / "target")
    tokenizer = AutoTokenizer.from_pretrained(trained / "target")
    heads = CloverHeads.from_pretrained(trained / "heads", dtype=torch.float32)
    result = benchmark(
        target, tokenizer, [plain(), with_heads(heads)], [[3, 4, 5]], prompt_set="questions.jsonl",
        max_new_tokens=8, repeats=1, progress=False,
    )  # fmt: skip
    write(result, trained / "measured.json")
    script.main(["answers.jsonl", "--output", str(trained / "heads"), "--benchmark", str(trained / "measured.json")])
    card = (trained / "heads" / "README.md").read_text()
    assert "questions.jsonl, 8 new tokens, greedy, automatic trees" in card
    assert f"{result['rows'][1]['tokens_per_forward']:.2f}" in card
    assert "packed weights" not in card
    write({**result, "packed": True}, trained / "packed.json")
    script.main(["answers.jsonl", "--output", str(trained / "heads"), "--benchmark", str(trained / "packed.json")])
    card = (trained / "heads" / "README.md").read_text()
    assert "greedy, automatic trees, packed weights; " in card
    assert "baseline: plain generate with packed weights." in card
