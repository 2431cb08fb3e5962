"""The experiments at toy sizes, on a tiny target: the same code as at full size, and what must hold of a result."""

import importlib
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from training.tiny import make_target
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from hf_clover import CloverHeads
from hf_clover.decoding.tree import chain_of

pytestmark = pytest.mark.long("examples/experiments", "hf_clover/measure")

pytest.importorskip("matplotlib")
EXPERIMENTS = Path(__file__).resolve().parent.parent / "examples" / "experiments"
SPECIAL = ["<pad>", "<s>", "</s>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose tokens are bytes, heads for it, and what the experiments leave."""
    folder = tmp_path_factory.mktemp("experiments")
    symbols = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder / "target")
    target = make_target(vocab_size=len(symbols), max_position_embeddings=2048)
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
    words = [
        "--toy",
        "--target",
        str(folder / "target"),
        "--output",
        str(folder / "out"),
        "--work",
        str(folder / "work"),
    ]
    if "heads" in module.DEFAULTS:
        words += ["--heads", str(folder / "heads")]
    returned = module.main([*words, *more])
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


def check_measured(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["skipped"] is None
        assert row["identical"] is True
        assert row["tokens_per_forward"] >= 1
        assert row["tokens_per_second"] > 0


def check_accuracies(row: dict[str, Any], num_heads: int) -> None:
    assert len(row["top"]) == num_heads
    for of_head in row["top"]:
        assert of_head == sorted(of_head)  # a head's k best are among its k + 1 best
        assert len(of_head) == 5
        assert all(0 <= share <= 1 for share in of_head)
    assert 1 <= row["acceptance_length"]["top1"] <= 1 + num_heads


def test_accuracy(experiment, folder):
    module = experiment("accuracy")
    result = run(module, folder)
    assert [row["variant"] for row in result["rows"]] == list(module.VARIANTS)
    for row in result["rows"]:
        check_accuracies(row, num_heads=3)
        assert row["tokens"] == module.TOY["tokens"]
    sizes = {row["variant"]: row["parameters"] for row in result["rows"]}
    assert sizes["Clover"] > sizes["Clover: no block"] > sizes["Medusa"]
    assert sizes["Clover-2"] > sizes["Clover-2: one layer"]
    tops = {json.dumps(row["top"]) for row in result["rows"]}
    assert len(tops) > 6  # the variants are not one and the same network
    by_part = {part["part"]: part for part in result["parts"]}
    steps = [by_part[name]["points"] for name in ("Attention Decoder", "Regressive Connection", "block (Medusa's)")]
    assert [sum(points) for points in zip(*steps)] == pytest.approx(by_part["all"]["points"])
    assert len(list((folder / "work").glob("data-*/states-*"))) == 1  # the target ran over the data once


def test_every_part_of_the_paper_adds_up(experiment):
    steps = experiment("accuracy").STEPS
    one_by_one = [steps[name][2] for name in ("Attention Decoder", "Regressive Connection", "block (Medusa's)")]
    assert [sum(points) for points in zip(*one_by_one)] == pytest.approx(steps["all"][2], abs=0.11)


def test_batch(experiment, folder):
    result = run(experiment("batch"), folder)
    check_measured(result["rows"])
    found = {(row["batch_size"], row["method"]) for row in result["rows"]}
    assert found == {(size, name) for size in (1, 2) for name in ("plain", "4 nodes", "auto nodes")}


def test_tree_size(experiment, folder):
    result = run(experiment("tree_size"), folder)
    check_measured(result["rows"])
    found = [(row["tree"], row["nodes"]) for row in result["rows"][1:]]
    grown = [(tree, nodes) for tree in ("global", "levels") for nodes in (2, 4, 8)]
    assert found == [*grown, ("chain", 2), ("chain", 4), ("chain", 8)]


def test_copies(experiment, folder, tmp_path):
    """A text of one letter is all copies, and only the end comes as a surprise."""
    data, template = tmp_path / "answers.jsonl", "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    messages = [{"role": role, "content": "a" * 40} for role in ("user", "assistant")]
    data.write_text(json.dumps({"messages": messages}), encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    words = ["--tokenizer", str(tmp_path / "tokenizer"), "--data", str(data), "--runs", "2", "3", "--most", "4"]
    experiment("copies").main([*words, "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "copies.json").read_text(encoding="utf-8"))["rows"]
    assert [row["run"] for row in rows] == [2, 3]
    for row in rows:
        assert (row["steps"], row["with_a_copy"]) == (9, 1.0), "eight times four copies and one token, and the end"
        assert row["first_right"] == pytest.approx(8 / 9)
        assert row["right_in_a_row"] == pytest.approx(32 / 9)
        assert row["tokens_per_step"] == pytest.approx(41 / 9)


@pytest.mark.parametrize(("temperature", "count"), [("0", "1"), ("1", "1"), ("0", "2")])
def test_resting(experiment, folder, temperature, count):
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


def test_resting_goes_through_an_answer_as_generate_does(experiment, folder, monkeypatch):
    """Drafts that are the text itself: five tokens a step of four nodes, counted once, in the time of that step."""
    module = experiment("resting")
    monkeypatch.setattr(module, "NOISE", 0.0)
    monkeypatch.setattr(module, "COPIES", 0)
    machine = module.run("as it is, AVX2", [recorded_answer(module)], 0, 4)
    assert (machine.tokens, machine.steps, machine.drafted) == (19, 4, 4)
    step = sum(module.between(costs, 4) for costs in module.MACHINES["as it is, AVX2"])
    assert machine.seconds == pytest.approx(4 * step)


def test_resting_takes_a_batch_as_long_as_its_slowest_row(experiment, folder, monkeypatch):
    """Drafts that are the text itself beside drafts that are wrong: as many steps as tokens, in the time of both rows
    as long as the first goes on, and then of one."""
    module = experiment("resting")
    monkeypatch.setattr(module, "NOISE", 0.0)
    monkeypatch.setattr(module, "COPIES", 0)
    rows = [recorded_answer(module), recorded_answer(module, wrong=1000)]
    machine = module.run("as it is, AVX2", rows, 0, 4, rows=2)
    assert (machine.tokens, machine.steps) == (2 * 19, 19)
    forward, draft = module.MACHINES["as it is, AVX2"]
    both = module.between(forward, 9) + module.between(draft, 8)
    alone = module.between(forward, 4) + module.between(draft, 4)
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


def test_prompt_length(experiment, folder, tmp_path):
    result = run(experiment("prompt_length"), folder)
    check_measured(result["rows"])
    assert [(row["context"], row["nodes"]) for row in result["rows"] if row["nodes"]] == [(32, 4), (64, 4)]
    questions = tmp_path / "questions.jsonl"
    questions.write_text(
        "\n".join(json.dumps({"turns": [f"Where is {name}?" * 3]}) for name in "abc"), encoding="utf-8"
    )
    check_measured(run(experiment("prompt_length"), folder, "--prompts", str(questions))["rows"])
    with pytest.raises(SystemExit, match=r"--contexts 400: .* is \d+ tokens; give it more questions"):
        run(experiment("prompt_length"), folder, "--prompts", str(questions), "--contexts", "400")


def test_prompts_of_any_length_end_with_their_question(experiment, folder):
    module = experiment("prompt_length")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "target")
    tokenizer.chat_template = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
    questions = [module.Question([[{"role": "user", "content": text}]]) for text in ("one?", "two?", "three?")]
    for length in (8, 16, 20):
        ids = module.ending_with(1, questions, length, tokenizer)
        assert len(ids) == length
        assert tokenizer.decode(ids) == "<s>" + "three?\n\none?\n\ntwo?"[2 - length :] + "</s>"
    assert module.ending_with(0, [[1, 2], [3, 4], [5, 6]], 5, tokenizer) == [4, 5, 6, 1, 2]


def test_obeying(experiment, folder):
    pytest.importorskip("xgrammar")
    result = run(experiment("obeying"), folder)
    found = [(row["case"], row["method"]) for row in result["rows"]]
    methods = ("deaf drafts", "drafts that obey")
    assert found == [(case, method) for case in ("JSON schema", "banned words") for method in methods]
    assert all(row["identical"] for row in result["rows"])
    deaf, obeying, *_ = (row["tokens_per_forward"] for row in result["rows"])
    assert obeying > 1.5 * deaf


def test_online(experiment, folder, tmp_path):
    """A stream of prompts; and answers that are read."""
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
    answers.write_text(f"{json.dumps({'messages': said})}\n" * 3)
    questions.write_text(json.dumps({"category": "writing", "turns": ["abc?"]}) + "\n")
    of_target = ["--toy", "--target", str(folder / "target"), "--output", str(tmp_path)]
    read = module.main([*of_target, "--read", str(answers), "--questions", str(questions)])
    assert (tmp_path / "online_read.json").exists()
    assert read["rows"][0]["learned_from"] == 0 < read["rows"][1]["learned_from"]
    assert read["rows"][1]["steps"] >= 1


def test_rollouts(experiment, folder):
    result = run(experiment("rollouts"), folder)
    assert [row["run"] for row in result["summary"]] == ["plain", "heads that learn", "heads that stay"]
    assert len({row["weights_at_the_end"] for row in result["rows"]}) == 1
    assert all(row["same_weights"] for row in result["summary"])


def test_step(experiment, folder, monkeypatch):
    module, asked = experiment("step"), set()
    parts_of = module.parts_of

    def looked_at(target: Any, inputs: Any, options: dict[str, Any]) -> Any:
        asked.add(options.get("num_assistant_tokens", "automatic" if "assistant_model" in options else "plain"))
        return parts_of(target, inputs, options)

    monkeypatch.setattr(module, "parts_of", looked_at)
    result = run(module, folder)
    assert asked == {"plain", 2, 4, "automatic"}
    methods = ("plain", "2 nodes", "4 nodes", "automatic")
    found = [(row["batch_size"], row["method"]) for row in result["rows"]]
    assert found == [(size, method) for size in (1, 2) for method in methods]
    for first in (0, 4):
        plain, *others = result["rows"][first : first + 4]
        assert set(plain["parts_ms"]) == {"plain step", "other"}
        assert plain["efficiency"] == 1
        for row in others:
            assert set(row["parts_ms"]) == {"verify", "draft", "walk", "commit", "other"}
            assert row["efficiency"] == plain["step_ms"] / row["step_ms"]
    assert {row["method"] for row in result["kernels"]} == {"plain", "automatic"}
    lengths = [(row["context"], row["method"]) for row in result["contexts"]]
    assert lengths == [(length, method) for length in (16, 32) for method in ("plain", "automatic")]


def test_sensitivity(experiment, folder):
    result = run(experiment("sensitivity"), folder)
    assert [(row["learning_rate"], row["tokens"]) for row in result["rows"]] == [
        (rate, tokens) for rate in (1e-3, 1e-2) for tokens in (60, 240)
    ]
    for row in result["rows"]:
        check_accuracies(row, num_heads=5)
        assert row["failed"] is None


def test_a_run_that_blows_up_is_a_row(experiment, folder, monkeypatch):
    module = experiment("sensitivity")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise FloatingPointError("Training stopped at step 3")

    whole = module.train
    monkeypatch.setattr(module, "train", lambda *args, **kw: fail() if args[5] > 5e-3 else whole(*args, **kw))
    rows = run(module, folder)["rows"]
    assert [row["failed"] for row in rows] == [None, None, *["Training stopped at step 3"] * 2]


def test_break_even(experiment, folder):
    result = run(experiment("break_even"), folder)
    check_measured([result["plain"], *result["rows"]])
    assert [row["tokens"] for row in result["rows"]] == [60, 120]
    for row in result["rows"]:
        assert row["training_seconds"] > 0
        assert row["data_seconds"] > 0
        assert (row["break_even_tokens"] is None) == (row["seconds_saved_per_token"] <= 0)


def test_break_even_by_hand(experiment):
    module = experiment("break_even")
    # 100 tokens/s plainly, twice as fast with heads: 5 ms saved a token, so 10 s are repaid by 2000 tokens.
    assert module.break_even(10.0, plain_speed=100.0, speedup=2.0) == pytest.approx(2000)
    assert module.break_even(10.0, plain_speed=100.0, speedup=0.9) is None


def test_tasks(experiment, folder):
    module = experiment("tasks")
    result = run(module, folder)
    check_measured(result["rows"])
    assert [row["task"] for row in result["rows"][::3]] == list(module.TASKS)
    assert {row["method"] for row in result["rows"]} == {"plain", "clover-x", "prompt-lookup"}


def test_prompts_of_the_tasks(experiment):
    module = experiment("tasks")
    prompts = {task: list(module.in_turn(texts())) for task, texts in module.TASKS.items()}
    for texts in prompts.values():
        assert len(set(texts)) >= 16
    for text in prompts["repetitive edits"]:
        first = text.split("(")[0]
        assert text.endswith(f"{first}_again(")
    assert all(text.startswith('"""') and text.count('"""') == 1 for text in prompts["docstring prose"])


def test_data_of_the_user(experiment, folder):
    rows = [{"prompt": f"def f{i}(x):\n", "completion": "    return x + 1\n" * 3} for i in range(40)]
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run(experiment("sensitivity"), folder, "--data", str(folder / "own.jsonl"), "--tokens", "60")
    assert result["settings"]["data"].endswith("own.jsonl")
    assert result["data"]["seconds_to_make"] is None
    assert result["data"]["test_tokens"] > 0


def test_data_without_a_column_to_learn_from(experiment, folder):
    (folder / "odd.jsonl").write_text('{"story": "once"}\n')
    with pytest.raises(ValueError, match=r"`--data` has the columns .*story.*it needs `input_ids`"):
        run(experiment("sensitivity"), folder, "--data", str(folder / "odd.jsonl"))


def test_run_all_leaves_out_what_is_there(experiment, tmp_path, monkeypatch):
    module = experiment("run_all")
    ran: list[list[str]] = []
    monkeypatch.setattr(module.subprocess, "run", lambda words: ran.append(words[1:]) or SimpleNamespace(returncode=0))
    for name in ("accuracy", "batch", "sensitivity", "tasks"):
        (tmp_path / f"{name}.json").write_text("{}")
    argv = ["--output", str(tmp_path), "--target", "org/target", "--heads", "org/heads", "--data", "org/data", "--toy"]
    assert module.main(argv) == ["tree_size", "break_even"]
    (tree_size, *first), (_, *second) = ran
    assert tree_size == str(EXPERIMENTS / "tree_size.py")
    assert "org/heads" in first
    assert "org/data" not in first
    assert "org/data" in second
    assert "org/heads" not in second
    assert first[-1] == second[-1] == "--toy"


def test_run_all_ends_where_one_fails(experiment, tmp_path, monkeypatch):
    module = experiment("run_all")
    monkeypatch.setattr(module.subprocess, "run", lambda words: SimpleNamespace(returncode=3))
    with pytest.raises(SystemExit, match="3"):
        module.main(["--output", str(tmp_path)])


def test_step_costs(experiment, folder):
    result = run(experiment("step_costs"), folder)
    assert [(row["weights"], row["tokens"]) for row in result["rows"]] == [
        (kind, size) for kind in ("plain weights", "packed weights") for size in (1, 2, 4)
    ]
    for row in result["rows"]:
        assert row["verify_ms"] > 0
        assert (row["draft_ms"] > 0) is (row["tokens"] > 1)
        assert row["were_the_draft_free"] >= row["efficiency"] > 0
