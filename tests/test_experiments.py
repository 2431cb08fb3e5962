"""The experiments at toy sizes, on a tiny target: the same code as at full size, and what must hold of a result."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.byte_tokens import byte_tokenizer
from training.tiny import make_target
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hf_clover import CloverHeads
from hf_clover.decoding.tree import chain_of

pytestmark = pytest.mark.long("examples/experiments", "hf_clover/measure")

pytest.importorskip("matplotlib")
EXPERIMENTS = Path(__file__).resolve().parent.parent / "examples" / "experiments"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose tokens are bytes, heads for it, and what the experiments leave."""
    folder = tmp_path_factory.mktemp("experiments")
    tokenizer = byte_tokenizer(pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(folder / "target")
    target = make_target(vocab_size=len(tokenizer), max_position_embeddings=2048)
    target.save_pretrained(folder / "target")
    torch.manual_seed(0)
    CloverHeads.from_target(target).save_pretrained(folder / "heads")
    return folder


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    return importlib.import_module


def run(module: ModuleType, folder: Path, *more: str) -> dict[str, Any]:
    """The JSON it leaves."""
    places = {"target": "target", "output": "out", "work": "work"}
    places |= {"heads": "heads"} if "heads" in module.DEFAULTS else {}
    words = [word for name, place in places.items() for word in (f"--{name}", str(folder / place))]
    returned = module.main(["--toy", *words, *more])
    name = module.__name__
    result = json.loads((folder / "out" / f"{name}.json").read_text(encoding="utf-8"))
    assert result["rows"] == json.loads(json.dumps(returned["rows"]))
    assert (result["kind"], result["name"]) == ("experiment", name)
    assert result["question"].count("?") == 1
    assert result["settings"]["toy"] is True
    assert all(result[field] for field in ("command", "machine", "versions", "date"))
    assert str(folder) not in json.dumps(result)
    assert result["figure"]["panels"]
    for panel in result["figure"]["panels"]:
        assert panel["series"]
        assert panel["ylabel"]
        assert all(len(series["x"]) == len(series["y"]) > 0 for series in panel["series"])
    for picture in (f"{name}.png", f"{name}-dark.png"):
        assert (folder / "out" / picture).read_bytes().startswith(b"\x89PNG")
    return result


@pytest.mark.parametrize(("temperature", "count"), [("0", "1"), ("1", "1"), ("0", "2")])
def test_resting_has_a_row_for_every_machine_and_kind_of_heads(experiment, folder, temperature, count):
    module = experiment("resting")
    result = run(module, folder, "--temperature", temperature, "--rows", count)
    found = [(row["heads"], row["machine"]) for row in result["rows"]]
    assert found == [(kind, name) for kind in ("trained", "untrained") for name in module.MACHINES]
    for row in result["rows"]:
        low, high = row["automatic_range"]
        assert low <= row["automatic"] <= high
        assert 0 <= row["drafts"] <= 1


def recorded_answer(module, wrong=0):
    """20 tokens after a prompt of two, and drafts that are the text itself, each token off by `wrong`."""
    ids, start, trees = list(range(3, 25)), 2, []
    for place in range(start, len(ids) - 1):
        root, *following = (ids[place:] + [0] * module.DRAFTED)[: module.DRAFTED + 1]
        trees.append(chain_of(torch.tensor([[root, *(token + wrong for token in following)]])))
    return module.Recorded(ids, start, trees)


@pytest.fixture
def resting(experiment, monkeypatch):
    """With nothing left to chance."""
    module = experiment("resting")
    monkeypatch.setattr(module, "NOISE", 0.0)
    monkeypatch.setattr(module, "COPIES", 0)
    return module


def test_resting_goes_through_an_answer_as_generate_does(resting):
    """The drafts are the text itself: a step of four nodes gives five tokens, and takes the time of one such step."""
    machine = resting.run("as it is, AVX2", [recorded_answer(resting)], 0, 4)
    assert (machine.tokens, machine.steps, machine.drafted) == (19, 4, 4)
    step = sum(resting.between(costs, 4) for costs in resting.MACHINES["as it is, AVX2"])
    assert machine.seconds == pytest.approx(4 * step)


def test_resting_takes_a_batch_as_long_as_its_slowest_row(resting):
    """The drafts of one row are the text itself, those of the other are wrong: the second has as many steps as tokens.
    A step takes the time of two rows until the first row has ended, and then that of one."""
    rows = [recorded_answer(resting), recorded_answer(resting, wrong=1000)]
    machine = resting.run("as it is, AVX2", rows, 0, 4, rows=2)
    assert (machine.tokens, machine.steps) == (2 * 19, 19)
    forward, draft = resting.MACHINES["as it is, AVX2"]
    both = resting.between(forward, 9) + resting.between(draft, 8)
    alone = resting.between(forward, 4) + resting.between(draft, 4)
    assert machine.seconds == pytest.approx(4 * both + 15 * alone)


def test_resting_drafts_by_the_numbers_that_sampled_the_answer(experiment, folder):
    module = experiment("resting")
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    questions = [("", [3, 4, 5]), ("", [6, 7])]
    answered = module.ask(target, questions, 6, 1.0).texts
    for number, (ids, (_, prompt)) in enumerate(zip(answered, questions, strict=True)):
        dice = module.dice_of(target, number, len(prompt))
        with torch.no_grad():
            probs = target(torch.tensor([ids])).logits[0].softmax(-1)  # [L, V]
        picked = [int((probs[length - 1] / dice.at(length)[0]).argmax()) for length in range(len(prompt), len(ids))]
        assert picked == ids[len(prompt) :]


def test_online_measures_a_stream_of_prompts_and_answers_that_are_read(experiment, folder, tmp_path):
    module = experiment("online")
    result = run(module, folder)
    assert [row["prompts"] for row in result["rows"]] == [2, 4]
    assert all(row["identical"] for row in result["rows"])
    assert len(result["prompts"]) == 4
    assert result["whole"]["prompts"] == 4
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "target")
    tokenizer.chat_template = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
    tokenizer.save_pretrained(folder / "target")
    answers, questions = tmp_path / "answers.jsonl", tmp_path / "questions.jsonl"
    said = [{"role": "user", "content": "abc " * 40}, {"role": "assistant", "content": "abd " * 90}]
    answers.write_text(f"{json.dumps({'messages': said})}\n" * 12)
    questions.write_text(json.dumps({"category": "writing", "turns": ["abc?"]}) + "\n")
    of_target = ["--toy", "--target", str(folder / "target"), "--output", str(tmp_path)]
    read = module.main([*of_target, "--read", str(answers), "--questions", str(questions)])
    assert (tmp_path / "online_read.json").exists()
    assert read["rows"][0]["learned_from"] == 0 < read["rows"][1]["learned_from"]
    assert read["rows"][1]["steps"] >= 1


def test_rollouts_end_with_the_same_weights_in_every_run(experiment, folder):
    result = run(experiment("rollouts"), folder)
    assert [row["run"] for row in result["summary"]] == list(experiment("rollouts").RUNS)
    assert len({row["weights_at_the_end"] for row in result["rows"]}) == 1
    assert all(row["same_weights"] for row in result["summary"])


def test_step_costs_has_a_row_for_every_size_and_kind_of_weights(experiment, folder):
    result = run(experiment("step_costs"), folder)
    assert [(row["weights"], row["tokens"]) for row in result["rows"]] == [
        (kind, size) for kind in ("plain weights", "packed weights") for size in (1, 2, 4)
    ]
    for row in result["rows"]:
        assert row["verify_ms"] > 0
        assert (row["draft_ms"] > 0) is (row["tokens"] > 1)
        assert row["were_the_draft_free"] >= row["efficiency"] > 0
