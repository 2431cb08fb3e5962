"""`learning.py` at toy sizes: what it writes down, that it goes on where it was, and the figures it takes itself."""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.byte_tokens import byte_tokenizer
from helpers.oracle import drafting_by
from training.tiny import make_target

from hf_clover import CloverHeads, CloverTrainer
from hf_clover.decoding.tree import chain_of

pytestmark = pytest.mark.long("examples/experiments", "hf_clover/measure")

pytest.importorskip("matplotlib")
EXPERIMENTS = Path(__file__).resolve().parent.parent / "examples" / "experiments"
# One way to train each, so that nothing is tuned.
SIZES = ["--toy", "--rates", "1e-2", "--muon-rates", "--seeds", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("learning")
    tokenizer = byte_tokenizer(pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(folder / "tiny")
    make_target(vocab_size=len(tokenizer), max_position_embeddings=2048).save_pretrained(folder / "tiny")
    return folder


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    return importlib.import_module("learning")


@pytest.fixture
def drafters(learning: ModuleType) -> ModuleType:
    return importlib.import_module("drafters")


def words(folder: Path, *more: str) -> list[str]:
    return [*SIZES, "--targets", str(folder / "tiny"), "--work", str(folder / "work"), *more]


def course_of(learning: ModuleType, folder: Path, *more: str) -> Any:
    args = learning.parse(words(folder, *more))
    return learning.Course(args, args.targets[0], learning.Ledger(folder / "unused.json"))


def run(learning: ModuleType, folder: Path, out: Path, *more: str) -> dict[str, Any]:
    learning.main(words(folder, "--output", str(out), *more))
    return json.loads((out / "learning.json").read_text(encoding="utf-8"))


def test_the_experiment_trains_measures_and_goes_on_where_it_was(learning, folder, tmp_path, monkeypatch):
    trained, train, plot = [], learning.Classroom.train, learning.plot
    note = lambda *args: trained.append((args[1].name, args[2])) or train(*args)  # noqa: E731
    monkeypatch.setattr(learning.Classroom, "train", note)
    monkeypatch.setattr(learning, "plot", lambda path: [])  # until the end
    pair = ("--drafters", "clover-2", "eagle-3")
    first = run(learning, folder, tmp_path, *pair, "--budgets", "64")
    assert trained == [("clover-2", 64), ("eagle-3", 64)]
    assert [row["held_out_loss"] for row in first["targets"]] == [None]

    result = run(learning, folder, tmp_path, *pair, "--budgets", "64", "128")
    assert trained[2:] == [("clover-2", 128), ("eagle-3", 128)]
    assert result["rows"][:2] == first["rows"]
    assert [(row["drafter"], row["tokens"]) for row in result["rows"]] == trained
    for row in result["rows"]:
        assert row["identical"] is True
        assert row["chain"] == pytest.approx(sum(row["chain_by_depth"]))
        assert row["chain_by_depth"] == sorted(row["chain_by_depth"], reverse=True)
        assert row["tokens_per_forward"]["4"] >= 1
        assert row["training_seconds"] > 0
        # Weights, gradients and AdamW's two moments, four bytes each, and something for the backward pass.
        assert row["training_memory_mib"] > 16 * row["parameters"] / 2**20
        assert row["optimizer"] == ("as in its paper" if row["drafter"] == "clover-2" else "AdamW 0.01")
        assert row["steps"] * 32 >= row["tokens"]
    assert str(folder) not in json.dumps(result)

    with pytest.raises(ValueError, match=r"`--length 16`: learning.json was written with 32.*another `--output`"):
        run(learning, folder, tmp_path, *pair, "--length", "16")

    monkeypatch.setattr(learning, "plot", plot)
    again = run(learning, folder, tmp_path, *pair, "--budgets", "64", "128")
    assert len(trained) == 4
    assert again["rows"] == result["rows"]
    (chain,) = again["figure"]["panels"]
    assert [series["x"] for series in chain["series"]] == [[64, 128], [64, 128]]
    chains = {(row["drafter"], row["tokens"]): row["chain"] for row in result["rows"]}
    drawn = [[chains[name, tokens] for tokens in (64, 128)] for name in pair[1:]]
    assert [series["y"] for series in chain["series"]] == drawn
    assert (tmp_path / "learning-dark.png").read_bytes().startswith(b"\x89PNG")


def test_all_drafters_see_the_same_batches(learning, drafters, folder, monkeypatch):
    seen: list[list[int]] = []
    get_batches = CloverTrainer.get_batch_samples

    def recording(self, *args):
        batches, counts = get_batches(self, *args)
        seen.extend(batch["input_ids"].flatten().tolist() for batch in batches)
        return batches, counts

    monkeypatch.setattr(CloverTrainer, "get_batch_samples", recording)
    course = course_of(learning, folder)
    course.prepare()
    of_each = {}
    for name in ("clover-2", "clover", "medusa", "eagle-1", "eagle-3", "dflash", "dspark", "hydra++"):
        trained = course.classroom.train(learning.DRAFTERS[name], 128, 3, {"learning_rate": 1e-3})
        assert not trained.heads.training  # EAGLE-1 puts noise on features in training, and only there
        of_each[name] = seen[:]
        seen.clear()
    assert len({json.dumps(batches) for batches in of_each.values()}) == 1
    course.classroom.train(learning.DRAFTERS["medusa"], 128, 4, {"learning_rate": 1e-3})
    assert seen[:4] != of_each["medusa"]  # another seed, another order
    assert sorted(seen[:4]) == sorted(of_each["medusa"])


@pytest.mark.usefixtures("muon_in_float32")
@pytest.mark.parametrize("name", ["clover-x", "eagle-3", "dspark"])
def test_stored_states_train_the_same_heads_as_the_target_in_the_loop(name, learning, folder):
    """The heads become the same; a GPU does the second."""
    course = course_of(learning, folder)
    course.prepare()
    weights = []
    for course.classroom.keeps_states in (True, False):
        trained = course.classroom.train(learning.DRAFTERS[name], 128, 3, {"learning_rate": 1e-3})
        weights.append({key: value.clone() for key, value in trained.heads.state_dict().items()})
    fresh = learning.DRAFTERS[name].make(course.target).state_dict()
    floats = {key: value for key, value in weights[0].items() if value.dtype.is_floating_point}
    assert any((fresh[key] - value).abs().max() > 1e-3 for key, value in floats.items())
    torch.testing.assert_close(weights[1], weights[0], atol=2e-3, rtol=2e-2)


def test_a_run_on_the_users_data_goes_on_after_a_failure(learning, drafters, folder, tmp_path, monkeypatch):
    """One pass of the target for drafters that read one layer and four; a run that broke off goes on."""
    answers = [{"text": f"answer {i} of many, some longer " * 3} for i in range(60)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    questions = [{"category": c, "turns": [f"{c} {i}?", "And then?"]} for i in range(3) for c in ("math", "qa")]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    given = [f"--data={tmp_path / 'answers.jsonl'}", f"--questions={tmp_path / 'questions.jsonl'}"]
    sizes = ("--per-category", "2", "--draft-vocab-size", "40", "--save-steps", "1", "--budgets", "128")
    widths: list[int] = []
    loss = CloverTrainer.compute_loss

    def breaking(self, model, inputs, *args, **kwargs):
        widths.append(inputs["hidden_states"].shape[-1])
        if len(widths) == 3:
            raise RuntimeError("the power is gone")
        return loss(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(CloverTrainer, "compute_loss", breaking)
    work = tmp_path / "out"
    options = (*given, *sizes, "--work", str(tmp_path / "work"), "--drafters", "clover-2", "eagle-3")
    with pytest.raises(RuntimeError, match="power"):
        run(learning, folder, work, *options)
    result = run(learning, folder, work, *options)
    size = 32
    assert widths[:3] == [size] * 3
    steps = result["rows"][0]["steps"]
    assert steps > 3
    assert widths[3:].count(size) == steps - 2 + 1  # two were done; and once to count memory
    assert set(widths[3 + steps - 1 :]) == {4 * size}  # EAGLE-3's
    (data,) = (tmp_path / "work").glob("data-answers-32")
    assert len(list(data.iterdir())) == 1
    assert not list((tmp_path / "work").glob("learning/*/trainer/*"))
    for row in result["rows"]:
        assert row["identical"] is True
        assert set(row["tokens_per_forward"]) == set(learning.WAYS)
        assert set(row["by_category"]) == {"math", "qa"}
        assert all(set(figures) == set(learning.WAYS) for figures in row["by_category"].values())
        assert all(0 <= share <= 1 for shares in row["accepted_by_position"].values() for share in shares)
    chain, greedy, sampled = result["figure"]["panels"]
    assert [p["title"] for p in (greedy, sampled)] == ["tiny: chain of 7", "tiny: chain of 7, sampled"]
    worth = {row["drafter"]: [row["tokens_per_forward"]["chain of 7"]] for row in result["rows"]}
    assert {one["label"]: one["y"] for one in greedy["series"]} == worth
    assert [one["label"] for one in chain["series"]] == list(worth)
    assert result["settings"]["questions"] == "questions.jsonl"
    assert str(tmp_path) not in json.dumps(result["settings"])
    written = (work / "learning.json").read_bytes()
    run(learning, folder, work, *options, "--measure", "--batch-sizes", "1", "--max-new-tokens", "6")
    assert (work / "learning.json").read_bytes() == written  # times stand in a file of their own, at their own sizes
    measured = json.loads((work / "learning-by-category-128-0.json").read_text())
    assert measured["is_whole"]
    methods = ["plain", "clover-2", "eagle-3", "prompt-lookup"]
    assert [row["method"] for row in measured["rows"]] == methods * 2
    assert [row["temperature"] for row in measured["rows"]] == [0] * 4 + [1] * 4
    assert all(set(row["categories"]) == {"math", "qa"} and row["turns"] == 8 for row in measured["rows"])
    assert all(row["identical"] for row in measured["rows"] if (row["method"], row["temperature"]) != (methods[3], 1))

    course = course_of(learning, folder, *options)
    assert [category for category, _ in course.questions] == ["math", "qa", "math", "qa"]
    course.read_data()
    text = "".join(map(course.tokenizer.decode, course.data.test["input_ids"]))
    assert [f"answer {i} " in text for i in (57, 58, 59)] == [False, True, True]
    heads = learning.DRAFTERS["eagle-3"].load(course.folder_of("eagle-3", 128, 0), course.target)
    assert len(heads.draft_ids) == 40
    assert heads.draft_ids.tolist() != list(range(40))  # the data's most frequent, and not the first


def test_the_users_prompts_and_completions_are_data_to_learn_from(learning, folder, tmp_path):
    rows = [{"prompt": f"def f{i}(x):\n", "completion": "    return x + 1\n" * 3} for i in range(40)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    course = course_of(learning, folder, "--data", str(tmp_path / "own.jsonl"))
    course.read_data()
    text = "".join(map(course.tokenizer.decode, course.data.test["input_ids"]))
    assert "def f39(x):\n    return x + 1\n" in text
    assert sum(label != -100 for labels in course.data.test["labels"] for label in labels) > 0
    assert learning.settings_of(course.args)["data"] == "own.jsonl"


def test_data_without_a_column_to_learn_from_is_refused(learning, folder, tmp_path):
    (tmp_path / "odd.jsonl").write_text('{"story": "once"}\n')
    with pytest.raises(ValueError, match=r"`--data` has the columns .*story.*it needs `input_ids`"):
        run(learning, folder, tmp_path, "--data", str(tmp_path / "odd.jsonl"))


def test_figures_of_answers_equal_those_counted_by_hand(drafters):
    target = make_target()
    target.generation_config.eos_token_id = None
    heads = CloverHeads.from_target(target, variant="clover-2").eval()
    questions = [("a", [7, 8]), ("b", [9, 10, 11]), ("a", [12])]
    asked = drafters.ask(target, questions, 20, assistant_model=heads, num_assistant_tokens=4)
    forwards, depths = {"a": 0, "b": 0}, [0] * 9
    for category, prompt in questions:
        out = target.generate(
            torch.tensor([prompt]), max_new_tokens=20, assistant_model=heads, num_assistant_tokens=4,
            return_dict_in_generate=True,
        )  # fmt: skip
        forwards[category] += out.speculation.target_forwards
        for depth, count in enumerate(out.speculation.accepted_by_depth):
            depths[depth + 1] += count
        depths[0] += out.speculation.target_forwards - 1  # all but the prompt's come with a tree
    assert asked.by_category == {"a": 40 / forwards["a"], "b": 20 / forwards["b"]}
    assert asked.tokens_per_forward == 60 / sum(forwards.values())
    assert depths[1] > 0
    assert asked.accepted == pytest.approx([depths[i + 1] / depths[i] for i in range(len(asked.accepted))])
    assert asked.texts == [drafters.greedy(target, [prompt], 20)[0][0] for _, prompt in questions]

    at_once = drafters.ask(target, questions, 20, at_once=True, assistant_model=heads, num_assistant_tokens=4)
    batches = [drafters.greedy(target, prompts, 20)[0] for prompts in ([[7, 8], [12]], [[9, 10, 11]])]
    assert at_once.texts == [text for batch in batches for text in batch]
    assert set(at_once.by_category) == {"a", "b"}
    assert at_once.tokens_per_forward > 1
    assert at_once.accepted[0] == pytest.approx(asked.accepted[0], abs=0.1)
    assert max(at_once.accepted) <= 1


def test_the_optimizer_with_the_longest_chain_is_chosen_for_a_drafter(learning, folder, tmp_path, monkeypatch):
    args = learning.parse(["--rates", "1e-3", "1e-2", "--muon-rates", "0.02", "--targets", str(folder / "tiny")])
    ledger = learning.Ledger(tmp_path / "learning.json")
    course = learning.Course(args, args.targets[0], ledger)
    course.to_tune_on = torch.zeros(1, 1)

    def train(drafter, tokens, seed, optimizer):
        if optimizer.get("learning_rate") == 1e-3:
            raise FloatingPointError
        return SimpleNamespace(heads=optimizer)

    course.classroom = SimpleNamespace(train=Mock(side_effect=train))
    tried = course.classroom.train.call_args_list
    monkeypatch.setattr(course, "chain", lambda heads, rows: [0.5, 0.3 if "muon_learning_rate" in heads else 0.2])
    assert course.tuned(learning.DRAFTERS["clover-x"]) == ("defaults", {})
    for paper in ("clover-2", "clover"):
        assert course.tuned(learning.DRAFTERS[paper]) == ("as in its paper", {"learning_rate": 1e-3})
    assert tried == []
    assert course.tuned(learning.DRAFTERS["eagle-1"]) == ("Muon 0.02", {"muon_learning_rate": 0.02})
    assert len(tried) == 3
    assert {attempt.args[2] for attempt in tried} == {learning.TUNING_SEED}
    course.tuned(learning.DRAFTERS["eagle-1"])  # known
    assert len(tried) == 3
    assert [row["chain"] for row in ledger.find("tuning", drafter="eagle-1")] == [0, 0.7, 0.8]


def test_training_speed_is_measured_on_texts_shorter_than_a_sample(learning, folder):
    course = course_of(learning, folder)
    course.prepare()
    course.classroom.data.train = course.data.train.map(lambda row: {"input_ids": row["input_ids"][:3]})
    assert course.classroom.seconds_per_token() > 0


def test_measuring_without_questions_or_trained_heads_is_refused(learning, folder, tmp_path):
    said = r"`--measure` takes the times of whole conversations: it needs `--questions`"
    with pytest.raises(ValueError, match=said):
        run(learning, folder, tmp_path, "--measure")
    (tmp_path / "questions.jsonl").write_text('{"category": "math", "turns": ["1 + 1?"]}\n')
    with pytest.raises(ValueError, match=r"`--measure`: there are no heads .* without it first"):
        run(learning, folder, tmp_path, f"--questions={tmp_path / 'questions.jsonl'}", "--measure", "--budgets", "17")


def test_runs_with_few_tokens_come_first(learning):
    args = learning.parse(["--targets", "a", "b", "--seeds", "0", "1", "--drafters", "medusa"])
    order = [(target, tokens, seed) for target, _, tokens, seed in learning.plan(args)]
    small = [(target, tokens, seed) for target in "ab" for seed in (0, 1) for tokens in (10_000, 100_000)]
    assert order == [*small, *[(target, 1_000_000, seed) for target in "ab" for seed in (0, 1)]]


class Knowing:
    """A drafter that knows the text, and is wrong from its (place % 4)th draft on."""

    def __init__(self, heads: Any) -> None:
        self.place = 0

    def extend(self, hidden: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, counts: Sequence[int]):
        assert hidden.shape[:2] == tokens.shape == positions.shape
        assert tokens.tolist() == TEXT[:, self.place + 1 : self.place + 1 + tokens.shape[1]].tolist()
        assert positions[0].tolist() == list(range(self.place, self.place + tokens.shape[1]))
        self.place += tokens.shape[1]

    def draft(self, nodes: int, shape: str) -> Any:
        assert shape == "chain"
        tokens = TEXT[:, self.place : self.place + 1 + nodes].clone()
        tokens[:, 1 + self.place % 4 :] += 1
        return chain_of(tokens)


TEXT = torch.arange(2 * 23).view(2, 23) % 40


def test_accepted_chains_by_depth_equal_those_counted_by_hand(drafters):
    target = make_target()
    heads = CloverHeads.from_target(target, variant="medusa")
    with drafting_by(heads, Knowing):
        # Twelve places, 6 to 17, of which three each have 0, 1, 2 and 3 right drafts.
        assert drafters.chain_by_depth(heads, target, TEXT, 6, 5) == pytest.approx([0.75, 0.5, 0.25, 0, 0])
        assert drafters.chain_by_depth(heads, target, TEXT, 6, 5, every=2) == pytest.approx([0.5, 0.5, 0, 0, 0])


def test_greedy_texts_are_the_same_with_heads_in_fewer_forwards(drafters):
    target = make_target()
    heads = CloverHeads.from_target(target, variant="clover-2").eval()
    prompts = [[7, 8], [9, 10, 11]]
    texts, alone = drafters.greedy(target, prompts, 20)
    drafted, per_forward = drafters.greedy(target, prompts, 20, assistant_model=heads, num_assistant_tokens=24)
    assert [text[:3] for text in texts] == [[0, 7, 8], [9, 10, 11]]
    assert texts[0][1:] == drafters.greedy(target, prompts[:1], 20)[0][0]
    assert alone == 1.0
    assert drafted == texts
    assert 1 < per_forward < 6
