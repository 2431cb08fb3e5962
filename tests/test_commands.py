"""generate, chat, benchmark and plot as a user types them; here what they pass on, say and return.

The other commands are in tests/training/test_cli.py and tests/hub.
"""

import copy
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import pytest
import torch
from helpers import command_line
from helpers.measured import benchmark_of, row_of
from helpers.tiny_text import CHAT_TEMPLATE, END, PROMPT, make_tokenizer
from huggingface_hub import HfApi
from rich.console import Console
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GenerationConfig
from typer.testing import CliRunner

from hf_clover import CloverHeads, __version__, cli
from hf_clover.apps.chat import Conversation, ConversationFull, chat
from hf_clover.apps.live import LiveStreamer
from hf_clover.cli import inputs
from hf_clover.measure.step_record import StepRecord
from hf_clover.measure.tables import notes_of, tables_of
from hf_clover.targets.loading import check_path
from hf_clover.training import online

pytestmark = pytest.mark.long

FIGURES = re.compile(
    r"(\d+\.\d\d) tokens per forward, [\d.]+ tokens/s(?:, about \d+\.\d times plain generate)? "
    r"\((\d+) tokens, (\d+) forwards, [\d.]+ s\)"
)

folder, models, run = command_line.folder, command_line.models, command_line.run  # fixtures


@pytest.fixture(scope="module")
def target(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "target")


@pytest.fixture(scope="module")
def heads(folder, target):
    heads = CloverHeads.from_pretrained(folder / "heads")
    target.generate(torch.tensor([[5]]), assistant_model=heads, max_new_tokens=3)  # what happens once per target
    return heads


@pytest.fixture
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of heads that learn."""
    monkeypatch.setattr(online, "TOKENS", 40)
    monkeypatch.setattr(online, "WINDOW", 16)


def continuation(target, text: str, new: int, ids: list[int] | None = None, **options) -> str:
    """Plain generate's, of a text or of ids."""
    tokenizer = make_tokenizer()
    ids = tokenizer(text).input_ids if ids is None else ids
    torch.manual_seed(3)
    out = target.generate(torch.tensor([ids]), max_new_tokens=new, **options)
    return tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)


def shown_by_chat(conversation: Conversation, lines) -> str:
    """What is on the screen after these lines, of which some may be exceptions."""
    console = Console(file=io.StringIO(), width=200)
    chat(conversation, console, Mock(side_effect=lines))
    return console.file.getvalue()


# ---------------------------------------------------------------------- what all commands have


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "benchmark", "verify", "plot", "regenerate", "push"])
def test_every_help_has_an_example_and_that_of_learn_says_that_weights_can_memorise_texts(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    said = " ".join(CliRunner().invoke(cli.app, [command, "--help"]).output.replace("│", " ").split())
    assert f"Example: hf-clover {command}" in said
    promise = "weights learn from prompts and answers, and can memorise them. Without this option nothing is learned."
    assert (promise in said) == (command in ("generate", "chat", "serve", "regenerate"))


def test_the_version_flag_prints_the_package_version(run):
    assert run("--version").out == f"hf-clover {__version__}\n"


@pytest.mark.parametrize("command", ["generate", "chat", "benchmark"])
def test_without_the_stand_in_a_target_is_asked_for(run, monkeypatch, tmp_path, command):
    monkeypatch.setattr(inputs, "EXAMPLES", tmp_path)
    said = run(command, stdin=PROMPT)
    way_out = "pass `--target`, a model's id or its folder."
    message = f"hf-clover: there is no stand-in at {tmp_path / 'stand_in'}: {way_out}\n"
    assert (said.code, said.out, said.err) == (2, "", message)


@pytest.mark.parametrize("name", ["./nowhere", "../nowhere", "/nowhere", "~/nowhere", "runs/a/heads", "haeds.jsonl"])
@pytest.mark.parametrize(("flag", "what"), [("--target", "target"), ("--heads", "heads"), ("--prompts", "dataset")])
def test_a_mistyped_path_is_an_error_before_the_hub_is_asked(run, folder, monkeypatch, tmp_path, flag, what, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the Hub was asked"))
    models = {"--target": str(folder / "target"), "--heads": str(folder / "heads"), flag: name}
    said = run("benchmark", *(word for pair in models.items() for word in pair))
    assert said.code == 2
    assert said.err.splitlines()[-1].startswith(f"hf-clover: the {what} {name!r} is not here: there is no such file")


@pytest.mark.parametrize("is_there", [False, True])
def test_a_name_that_may_be_a_path_or_an_id_costs_one_request_to_the_hub(tmp_path, monkeypatch, is_there):
    """`runs/haeds` beside a folder `runs` may be mistyped, or an id. The Hub says which, in one request."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(HfApi, "repo_info", asked := Mock(side_effect=None if is_there else ConnectionError))
    for what, repo_type in (("heads", "model"), ("dataset", "dataset")):
        asked.reset_mock()
        with nullcontext() if is_there else pytest.raises(ValueError, match=rf"the {what} 'runs/haeds' is not here"):
            check_path("runs/haeds", what)
        asked.assert_called_once()
        assert (asked.call_args.args, asked.call_args.kwargs["repo_type"]) == (("runs/haeds",), repo_type)
    (tmp_path / "cache" / "models--runs--haeds").mkdir(parents=True)
    check_path("runs/haeds", "target")
    asked.assert_called_once()  # what was downloaded before is not asked for


def test_ids_of_the_hub_pass_the_check_for_mistyped_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("org/model", "model", "Qwen/Qwen3-0.6B", "org/v1.5"):
        check_path(name, "target")
    (tmp_path / "org/model").mkdir(parents=True)
    for name in ("org/model", "./org/model", "org/"):
        check_path(name, "target")


def test_the_stand_in_is_the_default_target(run, monkeypatch, folder, target, tmp_path):
    (tmp_path / "stand_in").symlink_to(folder)
    monkeypatch.setattr(inputs, "EXAMPLES", tmp_path)
    said = run("generate", PROMPT, "--max-new-tokens", "30")
    assert said.out == PROMPT + continuation(target, PROMPT, 30) + "\n"
    assert float(FIGURES.search(said.err)[1]) > 1, "with its heads"
    assert said.err.startswith(f"No `--target`: this is stand-in, from {tmp_path / 'stand_in' / 'target'}\n")
    assert "Loading weights" not in said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "a", "--file", "b"], "PROMPT and `--file` exclude each other"),
        (["generate", "--file", "nowhere.txt"], "No such file or directory: 'nowhere.txt'"),
        (["generate", ""], "the prompt is empty"),
        (["generate"], "the prompt is empty"),
        (["generate", "a", "--dtype", "int8"], "`--dtype int8` is no known dtype: pass auto, float32"),
        (["generate", "a", "--num-assistant-tokens", "4"], "`--num-assistant-tokens 4` is of no use without heads"),
        (["benchmark"], "there is nothing to compare with plain generate: pass `--heads`, `--against`"),
        (["benchmark", "--nodes", "auto", "few"], "`--nodes few` is no tree size: pass a positive number, or auto"),
        (["benchmark", "--tree", "global", "oak"], "`--tree oak` is unknown: pass global, levels or chain"),
        (["benchmark", "--cache", "paged"], "`--cache paged` is unknown: pass dynamic or static"),
        (["benchmark", "--against", "luck"], "`against='luck'` is no method"),
        (["plot", "nowhere.json"], "No such file or directory: 'nowhere.json'"),
    ],
)
def test_a_users_mistake_gives_one_line_and_exit_code_2(run, folder, words, message):
    where = [] if words[0] == "plot" else ["--target", str(folder / "target")]
    said = run(*words, *where)
    assert (said.code, said.out) == (2, "")
    line = said.err.strip().splitlines()[-1]
    assert line.startswith("hf-clover: ")
    assert message in line
    assert "Traceback" not in said.err


def test_a_half_precision_target_loads_in_float32_on_a_cpu_unless_asked(folder, target, tmp_path):
    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.bfloat16).save_pretrained(half)
    make_tokenizer().save_pretrained(half)
    for dtype, expected in (("auto", torch.float32), ("bfloat16", torch.bfloat16)):
        model, _, heads = inputs.load(str(half), str(folder / "heads"), dtype)
        assert model.dtype == heads.dtype == expected


# ---------------------------------------------------------------------- generate


def test_generate_writes_the_text_and_nothing_else_to_stdout(run, models, target, tmp_path):
    """The prompt may be a word, a file or standard input."""
    options = [*models, "--max-new-tokens", "40"]
    said = run("generate", PROMPT, *options)
    assert said.code == 0
    assert said.out == PROMPT + continuation(target, PROMPT, 40) + "\n"
    per_forward, tokens, forwards = FIGURES.fullmatch(said.err.strip().splitlines()[-1]).groups()
    assert int(tokens) == 40 > int(forwards)
    assert float(per_forward) == pytest.approx(40 / int(forwards), abs=0.01)
    (tmp_path / "prompt.py").write_text(PROMPT)
    assert run("generate", "-f", str(tmp_path / "prompt.py"), *options).out == said.out
    assert run("generate", *options, stdin=PROMPT).out == said.out


def test_ctrl_c_ends_generate_with_code_130(run, models, monkeypatch):
    writes = iter(range(9))
    monkeypatch.setattr(LiveStreamer, "_write", lambda *_: next(writes) == 5 and signal.raise_signal(signal.SIGINT))
    said = run("generate", PROMPT, *models)
    assert said.code == 130
    assert "Traceback" not in said.err


def test_generate_json_holds_the_text_and_its_figures(run, models, target):
    said = run("generate", PROMPT, *models, "--max-new-tokens", "40", "--json")
    result = json.loads(said.out)
    assert (result["prompt"], result["text"]) == (PROMPT, continuation(target, PROMPT, 40))
    assert result["new_tokens"] == 40
    assert result["tokens_per_forward"] == 40 / result["target_forwards"] > 1
    assert result["tokens_per_second"] == pytest.approx(40 / result["seconds"])


def test_generate_samples_the_same_text_for_a_seed_with_and_without_heads(run, models, folder, target):
    options = ["--max-new-tokens", "30", "--temperature", "1.5", "--seed", "3"]
    with_heads = run("generate", PROMPT, *models, *options, "--num-assistant-tokens", "6")
    assert with_heads.out == run("generate", PROMPT, "--target", str(folder / "target"), *options).out
    assert with_heads.out == PROMPT + continuation(target, PROMPT, 30, do_sample=True, temperature=1.5) + "\n"


# ---------------------------------------------------------------------- chat


def test_chat_answers_lines_of_standard_input_and_obeys_its_commands(run, models, target):
    greedy = ["--max-new-tokens", "25", "--temperature", "0"]
    said = run("chat", *models, *greedy, stdin="def f(x):\n\n/help\nabc\n/clear\ndef f(x):\n/exit\nno")
    assert said.code == 0
    assert "no chat template: your text is continued" in said.out
    assert "/clear   forget what was said" in said.out
    first = continuation(target, PROMPT, 25)
    whole = PROMPT + first + "\nabc"
    second = continuation(target, whole, 25)
    assert said.out.count(first) == 2, "the same again after /clear"
    assert said.out.count(second) == 1
    assert said.out.index(first) < said.out.index(second) < said.out.rindex(first)
    figures = FIGURES.findall(said.out)
    assert len(figures) == 3
    assert figures[0][1:] == figures[2][1:]
    assert max(float(per_forward) for per_forward, *_ in figures) > 1


def test_chat_with_remember_copies_from_texts_before_clear(run, models):
    asked = ["chat", *models, "--max-new-tokens", "25", "--temperature", "0", "--num-assistant-tokens", "6"]
    plain, remembering = (
        FIGURES.findall(run(*asked, *words, stdin="def f(x):\n/clear\ndef f(x):\n").out)
        for words in ([], ["--remember", "500"])
    )
    assert plain[0][1:] == plain[1][1:] == remembering[0][1:]  # tokens and forwards: at first there is nothing to know
    assert int(remembering[1][2]) < int(remembering[0][2])


def test_remember_is_refused_without_heads_that_copy(run, models, folder, tmp_path):
    said = run("chat", *models[:2], "--remember", "500")
    assert said.code == 2
    assert "`--remember 500` is of no use without heads: leave it out" in said.err
    heads = CloverHeads.from_pretrained(folder / "heads")
    heads.config.draft_copies = 0
    heads.save_pretrained(tmp_path)
    for command in ("chat", "serve"):
        said = run(command, *models[:2], "--heads", str(tmp_path), "--remember", "500")
        assert said.code == 2
        assert "heads that copy nothing (`draft_copies` is 0 in config.json)" in said.err


@pytest.mark.parametrize(
    ("own", "words", "expected"),
    [
        ({}, [], {"do_sample": True, "temperature": 0.7}),
        ({"do_sample": True, "temperature": 0.4}, [], {"do_sample": True, "temperature": 0.4}),
        ({"do_sample": True, "temperature": 0.4}, ["--temperature", "0"], {"do_sample": False}),
        ({"do_sample": True, "temperature": 0.4}, ["--temperature", "1.5"], {"do_sample": True, "temperature": 1.5}),
    ],
)
def test_chat_samples_by_the_targets_or_a_given_temperature(run, folder, target, tmp_path, own, words, expected):
    """Greedily, a model as small as SmolLM2 repeats itself, which also flatters the heads."""
    shutil.copytree(folder / "target", tmp_path / "target")
    GenerationConfig(**own, eos_token_id=END, pad_token_id=0).save_pretrained(tmp_path / "target")
    models = ["--target", str(tmp_path / "target"), "--heads", str(folder / "heads")]
    said = run("chat", *models, *words, "--max-new-tokens", "30", "--seed", "3", stdin=PROMPT)
    assert (said.code, "Traceback" in said.err) == (0, False), "it ends at the end of its input"
    assert continuation(target, PROMPT, 30, **expected) in said.out


@pytest.mark.automatic
def test_the_line_after_an_answer_has_the_speed_over_plain_steps(target, heads):
    record = StepRecord()
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    record.generate(target, inputs, heads, max_new_tokens=40)
    assert record.plain_step > 0
    assert len(record.times) == 40
    assert record.times == sorted(record.times)
    record.times, record.seconds, record.plain_step = [1.0, *[2.0] * 39], 10.0, 0.5
    assert ", about 2.0 times plain generate (40 tokens, " in record.summary(), "1 + 39 * 0.5 s in place of 10"
    record = StepRecord()
    record.generate(target, inputs, max_new_tokens=3)
    assert "times plain" not in record.summary(), "it is plain generate"


@pytest.fixture
def widths(target):
    """The number of positions in each forward of the target."""
    widths: list[int] = []
    note = lambda _, args, inputs: widths.append(inputs["input_ids"].shape[1])  # noqa: E731
    hook = target.register_forward_pre_hook(note, with_kwargs=True)
    yield widths
    hook.remove()


@pytest.mark.parametrize("with_heads", [True, False])
@pytest.mark.parametrize("template", [None, CHAT_TEMPLATE])
def test_a_turn_runs_the_target_over_new_tokens_only(target, heads, widths, with_heads, template):
    tokenizer = make_tokenizer(template)
    conversation = Conversation(target, tokenizer, heads if with_heads else None, max_new_tokens=30, do_sample=False)
    known, accepted = 0, 0
    for text in ("def f(x):", "abc", "x = é"):
        widths.clear()
        record = StepRecord()
        before = len(conversation.ids)
        out = conversation.answer(text, record)
        prompt = out.sequences[0, : -len(record.tokens)].tolist()
        assert widths[0] == len(prompt) - known, "all but what the cache holds"
        assert known == max(before - 1, 0)
        answer = tokenizer.decode(record.tokens, skip_special_tokens=True)
        assert answer == continuation(target, "", 30, ids=prompt)
        accepted += sum(len(step) - 1 for step in record.steps if step)
        known = conversation.cache.get_seq_length()
    assert (accepted > 0) == with_heads


def test_heads_draft_a_second_turn_as_if_the_conversation_were_one_prompt(target, heads):
    conversation = Conversation(target, make_tokenizer(), heads, max_new_tokens=30)
    for text in ("def f(x):", "abc"):
        out = conversation.answer(text, StepRecord())
    prompt = out.sequences[:, :-30]
    as_one = target.generate(prompt, assistant_model=heads, max_new_tokens=30, return_dict_in_generate=True)
    assert out.speculation.tree_sizes == as_one.speculation.tree_sizes
    assert out.speculation.accepted_tokens == as_one.speculation.accepted_tokens > 0


def test_an_end_of_text_token_is_dropped_where_the_text_goes_on(target, heads, monkeypatch):
    """Without a template. One that writes the token keeps it."""
    ids = make_tokenizer()(PROMPT).input_ids
    ends_after = target.generate(torch.tensor([ids]), max_new_tokens=20)[0, -1].item()
    conversation = Conversation(target, make_tokenizer(), heads, max_new_tokens=30)
    monkeypatch.setattr(target.generation_config, "eos_token_id", [ends_after, END])
    out = conversation.answer(PROMPT, StepRecord())
    assert out.sequences[0, -1] == ends_after
    assert conversation.ids == out.sequences[0, :-1].tolist()
    again = conversation.answer("abc", StepRecord())
    assert again.sequences[0, : len(ids)].tolist() == ids
    assert conversation.cache is not None


def test_a_template_that_rewrites_answers_keeps_the_cache_of_what_is_the_same(target, heads, widths):
    tokenizer = make_tokenizer(  # earlier answers are shortened, as Qwen3's are without their thoughts
        "{% for m in messages %}[{{ m.content[:9] if m.role == 'assistant' else m.content }}]{% endfor %}"
    )
    conversation = Conversation(target, tokenizer, heads, max_new_tokens=30)
    first = conversation.answer("def f(x):", StepRecord()).sequences[0].tolist()
    widths.clear()
    record = StepRecord()
    out = conversation.answer("abc", record)
    prompt = out.sequences[0, : -len(record.tokens)].tolist()
    same = next(i for i, (a, b) in enumerate(zip(first, prompt)) if a != b)
    assert 0 < same < len(prompt)
    assert widths[0] == len(prompt) - same
    assert tokenizer.decode(record.tokens, skip_special_tokens=True) == continuation(target, "", 30, ids=prompt)


def test_a_full_conversation_is_refused_and_goes_on_after_clear(target, heads):
    conversation = Conversation(target, make_tokenizer(), heads, max_new_tokens=30)
    room = target.config.max_position_embeddings
    with pytest.raises(ConversationFull, match=f"has {room} tokens and the target is made for {room}: /clear"):
        conversation.answer("a" * room, StepRecord())
    out = conversation.answer("a" * (room - 5), StepRecord())
    assert out.sequences.shape[1] == room
    shown = shown_by_chat(conversation, ["more", "/clear", "abc", EOFError])
    assert "/clear begins a new one" in shown
    assert len(FIGURES.findall(shown)) == 1


@pytest.mark.parametrize("with_heads", [True, False])
@pytest.mark.parametrize("template", [None, CHAT_TEMPLATE])
@pytest.mark.parametrize("at", [0, 1, 12])
def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(target, heads, monkeypatch, with_heads, template, at):
    """At the forward of that number, in the middle of it: the next turn is plain generate's on what was said."""
    tokenizer = make_tokenizer(template)
    conversation = Conversation(target, tokenizer, heads if with_heads else None, max_new_tokens=30)
    conversation.answer("def f(x):", StepRecord())
    said_before = list(conversation.ids)
    interrupt = Mock(side_effect=[*[None] * at, KeyboardInterrupt])

    def read():
        """Only the first line's answer is interrupted."""
        hook = target.model.layers[1].register_forward_pre_hook(interrupt)
        yield "abc"
        hook.remove()
        yield "xyz"
        raise EOFError

    prompts, asked = [], Conversation._asked
    monkeypatch.setattr(Conversation, "_asked", lambda self, text: prompts.append(asked(self, text)) or prompts[-1])
    shown = shown_by_chat(conversation, read())
    assert shown.count("stopped; ") == 1
    stopped, complete = FIGURES.findall(shown)
    assert int(stopped[2]) == at
    assert int(stopped[1]) > at if with_heads and at > 1 else int(stopped[1]) == at
    assert len(prompts[1]) >= len(said_before) + int(stopped[1]), "what was said stays said"
    assert int(complete[1]) == 30
    assert conversation.ids[: len(prompts[1])] == prompts[1]
    answer = tokenizer.decode(conversation.ids[len(prompts[1]) :], skip_special_tokens=True)
    assert answer == continuation(target, "", 30, ids=prompts[1])
    assert not target._forward_pre_hooks


def test_ctrl_c_at_the_prompt_says_how_to_leave(target):
    shown = shown_by_chat(Conversation(target, make_tokenizer()), [KeyboardInterrupt, EOFError])
    assert "/exit or Ctrl-D leaves" in shown


# ---------------------------------------------------------------------- heads that learn

LEARNED = re.compile(
    r"^heads that learn: (?:(\d+\.\d) tokens per forward \((\d+\.\d) when we began\), )?([\d,]+) tokens learned from$",
    re.MULTILINE,
)


def state_of(learning: Path) -> dict:
    with safe_open(learning / "learner.safetensors", framework="pt") as file:
        return json.loads(file.metadata()["learner"])


def files_with(text: str, folder: Path) -> list[Path]:
    """The files under `folder` that hold a part of `text`, as letters or as ids."""
    ids = make_tokenizer()(text).input_ids
    needles = [text[start : start + 12].encode() for start in range(len(text) - 11)]
    for start in range(len(ids) - 7):
        part = torch.tensor(ids[start : start + 8])
        needles += [part.to(dtype).numpy().tobytes() for dtype in (torch.int16, torch.int32, torch.int64)]
        needles.append(",".join(map(str, part.tolist())).encode())

    def holds(data: bytes) -> bool:
        squeezed = b"".join(data.split())
        return any(needle in data or needle in squeezed for needle in needles)

    return [path for path in folder.rglob("*") if path.is_file() and holds(path.read_bytes())]


def test_chat_goes_on_learning_where_it_stopped_and_stores_no_text(run, folder, target, tmp_path, short_steps):
    """Answers stay those of plain generate, and the folder holds nothing of what was said."""
    words = ["chat", "--target", str(folder / "target"), "--learn", str(tmp_path / "mine")]
    greedy, planted = ["--max-new-tokens", "30", "--temperature", "0"], "my secret is xylophone"
    first = run(*words, *greedy, stdin=f"def f(x):\n/clear\n{planted}\n")
    assert first.code == 0, first.err
    assert continuation(target, PROMPT, 30) in first.out
    assert continuation(target, planted, 30) in first.out
    assert len(FIGURES.findall(first.out)) == len(LEARNED.findall(first.out)) == 2
    before = state_of(tmp_path / "mine")
    assert before["tokens"] > len(planted) + 40
    assert len([path for path in (tmp_path / "mine").rglob("*") if path.is_file()]) > 5
    text = planted + continuation(target, planted, 30)
    ids = make_tokenizer()(text).input_ids
    for trace in (planted.encode(), json.dumps(ids, indent=1).encode(), torch.tensor(ids).numpy().tobytes()):
        (tmp_path / "trace").write_bytes(trace)
        assert files_with(text, tmp_path) == [tmp_path / "trace"], "that one, and none in `mine`"
    second = run(*words, *greedy, stdin="def f(x):\n")
    assert second.code == 0, second.err
    assert continuation(target, PROMPT, 30) in second.out
    *_, tokens = LEARNED.search(second.out).groups()
    assert int(tokens.replace(",", "")) >= before["tokens"]
    after = state_of(tmp_path / "mine")
    assert after["tokens"] > before["tokens"]
    assert after["seconds"] > before["seconds"]
    assert not files_with(text, tmp_path / "mine")


def test_chat_learns_while_it_waits_and_stops_when_a_line_comes(target, heads, monkeypatch):
    conversation = Conversation(target, make_tokenizer(), heads, max_new_tokens=3)
    learner = MagicMock()
    monkeypatch.setattr(heads, "learner", SimpleNamespace(idle=learner.idle))
    conversation.answer = learner.answer
    shown_by_chat(conversation, ["abc", KeyboardInterrupt, EOFError])
    waits = ["idle", "idle().__enter__", "idle().__exit__"]
    assert [name for name, *_ in learner.mock_calls] == [*waits, "answer", *waits * 2]


def test_generate_with_learn_keeps_the_text_and_counts_tokens(run, folder, models, target, tmp_path, short_steps):
    asked = ["generate", PROMPT, "--max-new-tokens", "40", "--learn", str(tmp_path / "mine")]
    for count, words in ((48, models), (96, models[:2])):  # from --heads, then from the folder
        said = run(*asked, *words)
        assert said.code == 0, said.err
        assert said.out == PROMPT + continuation(target, PROMPT, 40) + "\n"
        figures, learned = said.err.strip().splitlines()[-2:]
        assert FIGURES.fullmatch(figures)
        now, began, tokens = LEARNED.fullmatch(learned).groups()
        assert float(now) > 1
        assert float(began) > 1
        assert int(tokens) == count == state_of(tmp_path / "mine")["tokens"]
    said = run(*asked, *models[:2], "--json", "--pack")
    assert json.loads(said.out)["text"] == continuation(target, PROMPT, 40)
    assert json.loads(said.out)["tokens_learned_from"] == 144
    said = run("plot", str(tmp_path / "mine"))
    assert said.code == 0, said.err
    assert said.out.splitlines() == [str(tmp_path / "mine" / name) for name in ("learning.png", "learning-dark.png")]


def test_learned_heads_of_a_folder_are_used_before_the_default_heads(run, folder, monkeypatch, tmp_path, short_steps):
    (tmp_path / "stand_in").symlink_to(folder)
    monkeypatch.setattr(inputs, "EXAMPLES", tmp_path)
    for name, words in (("made", ["--target", str(folder / "target")]), ("default", [])):
        for more in (words, []):
            said = run("generate", PROMPT, "--max-new-tokens", "40", "--learn", str(tmp_path / name), *more)
            assert said.code == 0, said.err
        assert CloverHeads.from_pretrained(tmp_path / name).config.num_heads == {"made": 5, "default": 3}[name]


def test_a_folder_that_heads_cannot_learn_in_is_refused(run, models, tmp_path, target):
    """It holds heads of another shape, or is a file."""
    CloverHeads.from_target(target, num_heads=2, variant="clover-2").save_pretrained(tmp_path / "other")
    (tmp_path / "file").write_text("mine")
    for name, message in (("other", "holds heads of other sizes than `heads`"), ("file", "File exists")):
        said = run("generate", PROMPT, *models, "--learn", str(tmp_path / name))
        assert (said.code, said.out) == (2, ""), "before anything is learned"
        assert message in said.err
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_a_kill_save_what_was_learned(folder, target, tmp_path, short_steps, ending):
    handler = signal.getsignal(signal.SIGTERM)
    tokens = torch.tensor([make_tokenizer()(PROMPT).input_ids])

    def write(heads: CloverHeads) -> None:
        target.generate(tokens, assistant_model=heads, max_new_tokens=60)
        signal.raise_signal(ending)

    left_by = KeyboardInterrupt if ending is signal.SIGINT else SystemExit
    with pytest.raises(left_by) as left, inputs.learning(tmp_path / "mine", None, target) as (heads, learner):
        write(heads)
    assert ending is signal.SIGINT or left.value.code == 143
    assert state_of(tmp_path / "mine")["tokens"] == learner.tokens > 0
    assert signal.getsignal(signal.SIGTERM) is handler
    assert learner.heads.learner is None


def test_without_learn_nothing_is_learned(target, heads):
    before = copy.deepcopy(heads.state_dict())
    with inputs.learning(None, heads, target) as (same, learner):
        assert same is heads
        assert learner is heads.learner is None
        target.generate(torch.tensor([[5, 6]]), assistant_model=same, max_new_tokens=60)
    assert all(torch.equal(value, before[name]) for name, value in heads.state_dict().items())


def test_time_after_an_answer_does_not_count_as_its_time(target, heads):
    record = StepRecord()
    with record.listening(target):
        target.generate(torch.tensor([[5, 6, 7]]), assistant_model=heads, max_new_tokens=5, streamer=record)
        seconds = record.seconds
        time.sleep(0.01)
    assert record.seconds == seconds >= record.times[-1]


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
def test_a_ctrl_c_signal_stops_one_answer_of_a_chat_process(models):
    code = "from hf_clover.cli import main; main()"
    words = ["chat", *models, "--temperature", "0", "--max-new-tokens", "500"]
    env = {**os.environ, "PYTHONFAULTHANDLER": "1"}  # a process that hangs can say where
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-u", "-c", code, *words], env=env, **pipes)
    process.stdin.write(b"def f(x):\n")
    process.stdin.flush()
    seen = b""
    while not seen.endswith(b"continued; /help lists the commands\n"):
        byte = process.stdout.read(1)
        assert byte, (seen, process.stderr.read())
        seen += byte
    process.stdout.read(4)  # the answer has begun
    process.send_signal(signal.SIGINT)
    try:
        out, err = process.communicate(b"abc\n/exit\n", timeout=120)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        out, err = process.communicate(timeout=120)
        pytest.fail(f"did not end; stdout {out[-500:]}, stderr:\n{err.decode(errors='replace')[-8000:]}")
    assert process.returncode == 0, err
    assert b"Traceback" not in err
    assert len(FIGURES.findall(out.decode())) == 2, "the second answer is written to its end"
    assert out.count(b"stopped; ") == 1


# ---------------------------------------------------------------------- benchmark and plot


def test_benchmark_writes_a_result_that_plot_draws(run, models, folder, tmp_path):
    (tmp_path / "prompts.txt").write_text("def f(x):\nabc(x)\n")
    result = tmp_path / "result.json"
    small = ["--prompts", str(tmp_path / "prompts.txt"), "--num-prompts", "2", "--repeats", "1"]
    lists = ["--batch-size", "1", "2", "--nodes", "auto", "6"]
    lists += ["--against", "prompt-lookup", f"mine:{folder / 'heads'}"]
    said = run("benchmark", *models, *small, "--max-new-tokens", "12", *lists, "--json", "-o", str(result))
    assert said.code == 0, said.err
    measured = json.loads(said.out)
    assert measured == json.loads(result.read_text())
    of_each = [("plain", None), ("clover-x", None), ("clover-x", 6), ("prompt-lookup", None), ("mine", None)]
    assert [(row["method"], row["nodes"]) for row in measured["rows"][:5]] == of_each
    assert [row["batch_size"] for row in measured["rows"]] == [1] * 5 + [2] * 5
    of_heads = [row for row in measured["rows"] if row["method"] in ("clover-x", "mine")]
    assert all(row["identical"] for row in of_heads)
    assert max(row["tokens_per_forward"] for row in of_heads) > 1
    assert f"hf-clover plot {result}" in said.err

    said = run("plot", str(result), "--out", str(tmp_path / "pictures"))
    assert said.code == 0, said.err
    pictures = [Path(line) for line in said.out.splitlines()]
    assert [picture.name for picture in pictures] == ["result.png", "result-dark.png"]
    assert all(picture.stat().st_size > 1000 for picture in pictures)


def test_the_benchmark_table_shows_settings_that_vary_and_skipped_methods(run, models, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "prompts.txt").write_text("def f(x):\n")
    small = ["--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", "8", "--repeats", "1"]
    lists = ["--tree", "global", "--tree", "chain", "--temperature", "0", "1", "--against", "prompt-lookup"]
    said = run("benchmark", *models, *small, *lists, "--batch-size", "2")
    assert said.code == 0, said.err
    lines = [line.split() for line in said.out.splitlines()]
    assert "batch size 2" in said.out
    assert ["method", "tree", "temperature", "tokens/s"] in [line[:4] for line in lines]
    of_heads = [line for line in lines if line[:1] == ["clover-x"]]
    assert [line[1:3] for line in of_heads] == [["global", "0"], ["chain", "0"], ["global", "1"], ["chain", "1"]]
    assert all(line[-1] == "yes" for line in of_heads)
    assert "prompt-lookup was skipped: " in said.out


def test_notes_and_table_report_differences_with_their_margin():
    differences = [{"prompt": 3, "position": 17, "margin": 1e-6}, {"prompt": 4, "position": 1, "margin": None}]
    seconds = {"draft": 1.0, "verify": 2.0, "walk": 0.5, "other": 0.5}
    result = benchmark_of([row_of("m", 50, 2, 1.5, identical=False, differences=differences, seconds=seconds)])
    assert list(notes_of(result)) == [
        "m: the first other token is at prompt 3, token 17, where the target prefers plain generate's by 1.0e-06 "
        "(and 1 more)"
    ]
    console = Console(file=io.StringIO(), width=100)
    (table,) = tables_of(result)
    assert table.title.endswith("; speedup over plain generate")
    console.print(table)
    figures = ["m", "50.0", "(45.0–60.0)", "2.00", "1.50x", "0.75", "25/50/12/12", "no"]
    assert figures in [line.split() for line in console.file.getvalue().splitlines()]


def test_text_is_coloured_on_a_terminal_only(target, heads, monkeypatch):
    """rich's console decides. The streamer writes to whatever standard output is."""
    inputs = make_tokenizer()(PROMPT, return_tensors="pt")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for has_colour in (True, False):
        monkeypatch.setenv("FORCE_COLOR", "1") if has_colour else monkeypatch.delenv("FORCE_COLOR")
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        LiveStreamer(make_tokenizer()).generate(target, inputs, heads, max_new_tokens=20)
        assert ("\x1b[1;32m" in sys.stdout.getvalue()) == has_colour
