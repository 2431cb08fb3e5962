"""The text as it is generated: the right tokens in colour, the right characters, and nothing kept from the caller."""

import io
import re
from itertools import chain, repeat
from unittest.mock import Mock

import pytest
import torch
from helpers.tiny_text import LETTERS, PROMPT, make_target, make_tokenizer, save_folders
from rich.console import Console
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hf_clover import CloverHeads
from hf_clover.apps.lines import print_line
from hf_clover.apps.live import LiveStreamer, TokenText, generate_live
from hf_clover.measure.step_record import StepRecord

pytestmark = pytest.mark.long

NEW = 60
GREEN = re.compile(r"\x1b\[1;32m(.*?)\x1b\[0m", re.DOTALL)
ANY_COLOUR = re.compile(r"\x1b\[[\d;]*m")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_folders(tmp_path_factory.mktemp("live"))


@pytest.fixture(scope="module")
def heads(folder):
    return CloverHeads.from_pretrained(folder / "heads")


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def inputs(tokenizer):
    return tokenizer(PROMPT, return_tensors="pt")


def terminal(**options) -> Console:
    options = {"force_terminal": True, "color_system": "standard", "_environ": {}, **options}
    return Console(file=io.StringIO(), **options)


def written(console: Console) -> str:
    return console.file.getvalue()


# ---------------------------------------------------------------------- characters


def test_characters_come_whole_and_together_are_the_text(tokenizer):
    text = LETTERS * 3 + "é👋 è"
    ids = tokenizer(text).input_ids
    assert len(ids) > len(text), "some characters take several tokens"
    live = TokenText(tokenizer)
    pieces = [live.push(token) for token in ids]
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "👋" in pieces
    assert live.flush() == ""


@pytest.mark.parametrize("seed", range(5))
def test_invalid_bytes_are_shown_as_the_tokenizer_decodes_them(tokenizer, seed):
    ids = torch.randint(len(tokenizer), (200,), generator=torch.Generator().manual_seed(seed)).tolist()
    live = TokenText(tokenizer)
    assert "".join([*map(live.push, ids), live.flush()]) == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_text_that_ends_within_a_character_is_flushed(tokenizer):
    live = TokenText(tokenizer)
    ids = tokenizer("ab👋").input_ids[:-1]
    assert [live.push(token) for token in ids] == ["a", "b", "", "", ""]
    assert live.flush() == "\N{REPLACEMENT CHARACTER}"
    assert live.flush() == ""


def test_no_more_than_12_tokens_are_decoded_at_a_time(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "decode", decode := Mock(side_effect=tokenizer.decode))
    live = TokenText(tokenizer, tokenizer(PROMPT).input_ids)
    for token in tokenizer("abc é👋 " * 30).input_ids:
        live.push(token)
    assert 0 < max(len(call.args[0]) for call in decode.call_args_list) <= 12


def test_a_word_after_the_prompt_keeps_its_space():
    """Tokenizers such as Llama 2's drop the space of the first word they decode."""
    words = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "<unk>": 2}, unk_token="<unk>"))
    words.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    assert tokenizer.decode([1]) == "b"
    live = TokenText(tokenizer, context=[0])
    assert [live.push(1), live.push(0)] == [" b", " a"]


# ---------------------------------------------------------------------- which tokens came free


def test_the_step_record_agrees_with_the_record_of_generate(target, heads, inputs):
    record = StepRecord()
    out = record.generate(target, inputs, heads, max_new_tokens=NEW)
    said = record.figures()
    assert said["tokens_per_forward"] == pytest.approx(out.speculation.tokens_per_forward)
    assert said["target_forwards"] == out.speculation.target_forwards < said["new_tokens"] == NEW
    assert record.tokens == out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    assert sum(len(step) - 1 for step in record.steps if step) == out.speculation.accepted_tokens
    assert record.summary().startswith(f"{out.speculation.tokens_per_forward:.2f} tokens per forward, ")
    assert not target._forward_pre_hooks


def test_accepted_drafts_are_green_and_other_tokens_are_not(target, heads, tokenizer, inputs):
    console = terminal()
    live = LiveStreamer(tokenizer, console)
    live.generate(target, inputs, heads, max_new_tokens=NEW)

    text = TokenText(tokenizer, inputs["input_ids"][0].tolist())
    pieces = [[text.push(token) for token in step] for step in live.steps]
    free = "".join(piece for step in pieces for piece in step[:-1])
    assert len(free) > 5, "drafts were accepted"
    assert "".join(GREEN.findall(written(console))) == free
    whole = tokenizer.decode(inputs["input_ids"][0].tolist() + live.tokens)
    assert ANY_COLOUR.sub("", written(console)) == whole + "\n"
    assert written(console).startswith(f"\x1b[2m{PROMPT}\x1b[0m")


def test_plain_generate_shows_nothing_in_green(target, tokenizer, inputs):
    console = terminal()
    out = generate_live(target, tokenizer, inputs, console=console, max_new_tokens=20)
    assert not GREEN.search(written(console))
    assert ANY_COLOUR.sub("", written(console)) == tokenizer.decode(out.sequences[0]) + "\n"


def test_tokens_accepted_from_prompt_lookup_are_green(target, tokenizer):
    """Any way to generate: the record hears of forwards, not of heads."""
    inputs = tokenizer("opzopzopzop", return_tensors="pt")
    live = LiveStreamer(tokenizer, terminal())
    live.generate(target, inputs, prompt_lookup_num_tokens=3, max_new_tokens=NEW, do_sample=False)
    expected = sum(len(step) - 1 for step in live.steps if step)
    assert len("".join(GREEN.findall(written(live.console)))) == pytest.approx(expected, abs=6)
    assert expected > 0


@pytest.mark.parametrize(
    "options",
    [{"force_terminal": False, "color_system": "auto"}, {"_environ": {"NO_COLOR": "1"}}, {"color_system": None}],
)
def test_output_without_colour_is_the_plain_text(target, heads, tokenizer, inputs, options):
    console = terminal(**options)
    out = generate_live(target, tokenizer, inputs, heads, console, max_new_tokens=NEW)
    assert out.speculation.accepted_tokens > 0
    assert written(console) == tokenizer.decode(out.sequences[0]) + "\n"


def test_samples_are_those_of_plain_generate(target, heads, tokenizer, inputs):
    def sample(heads):
        torch.manual_seed(5)
        console = terminal(color_system=None)
        generate_live(target, tokenizer, inputs, heads, console, max_new_tokens=NEW, do_sample=True)
        return written(console)

    assert sample(heads) == sample(None)


def test_text_appears_while_it_is_generated(target, heads, tokenizer, inputs):
    seen, console = set(), terminal(color_system=None)
    with target.register_forward_pre_hook(lambda *_: seen.add(len(written(console)))):
        generate_live(target, tokenizer, inputs, heads, console, max_new_tokens=NEW)
    assert len(seen) > 10


def test_escape_codes_in_a_text_do_not_reach_the_terminal(tokenizer):
    for console, expected in ((terminal(), "␛[2J"), (terminal(force_terminal=False), "\x1b[2J")):
        LiveStreamer(tokenizer, console)._write("\x1b[2J\ta\x0cb\r", None)
        assert written(console) == expected + "\ta\x0cb\r", "nothing else is touched"


def screen(text: str) -> list[str]:
    """The lines that a terminal shows: it goes back and clears where it is told to."""
    lines = [""]
    for back, char in re.findall(r"\x1b\[(\d+)D\x1b\[K|(.)", ANY_COLOUR.sub("", text), re.DOTALL):
        if back:
            lines[-1] = lines[-1][: -int(back)]
        elif char == "\n":
            lines.append("")
        else:
            lines[-1] += char
    return lines


@pytest.mark.parametrize("size", [1, 3, 7])
def test_streamed_lines_break_between_words(tokenizer, size):
    """In whatever pieces a text comes."""
    text = "a bicycle stays upright\n    when it    goes fast enough, whichever way it has been made  ab"
    live = LiveStreamer(tokenizer, terminal(width=16))
    for begin in range(0, len(text), size):
        live._write(text[begin : begin + size], "bold green" if begin % 2 else None)
    lines, said = screen(written(live.console)), ["a bicycle stays", "upright", "    when it", "goes fast", "enough,"]
    assert [line.rstrip() for line in lines] == [*said, "whichever way", "it has been", "made  ab"]
    assert all(len(line) < 16 for line in lines if not line.endswith(" "))


def test_a_word_longer_than_a_line_is_left_to_the_terminal(tokenizer):
    live = LiveStreamer(tokenizer, terminal(width=10, color_system=None))
    for piece in ("an ", "abcde", "fghijklmnop", " end"):
        live._write(piece, None)
    assert screen(written(live.console)) == ["an abcdefghijklmnop ", "end"]
    live = LiveStreamer(tokenizer, terminal(width=10, color_system=None))
    live._write("漢字漢字漢字", None)
    assert screen(written(live.console)) == ["漢字漢字", "漢字"], "a line may end after any of them"


def test_a_printed_line_breaks_between_words_on_a_terminal_only():
    said = "2.00 tokens per forward, :smile: [bold] " + "about 1.1 times plain generate " * 3

    def shown(is_terminal: bool) -> str:
        console = terminal(force_terminal=is_terminal, width=40)
        print_line(console, said, "dim")
        return ANY_COLOUR.sub("", written(console))

    assert shown(False) == said + "\n", "for whoever reads a file"
    lines = shown(True).splitlines()
    assert 20 < max(map(len, lines)) <= 40
    assert " ".join(line.strip() for line in lines) == said.strip()


# ---------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
@pytest.mark.parametrize("with_heads", [True, False])
def test_an_exception_reaches_the_caller_and_leaves_no_hook(target, heads, tokenizer, inputs, error, with_heads):
    console = Console(file=io.StringIO())
    console.file.write = Mock(side_effect=chain([0] * 7, [error], repeat(0)))
    with pytest.raises(type(error)):
        generate_live(target, tokenizer, inputs, heads if with_heads else None, console, max_new_tokens=NEW)
    assert not any(module._forward_pre_hooks for module in target.modules())
    again = generate_live(target, tokenizer, inputs, heads, terminal(), max_new_tokens=NEW)
    plain = target.generate(**inputs, max_new_tokens=NEW)
    assert torch.equal(again.sequences, plain)


def test_a_batch_is_refused(target, heads, tokenizer):
    inputs = tokenizer([PROMPT, PROMPT], return_tensors="pt")
    with pytest.raises(ValueError, match=r"LiveStreamer shows one text, and `input_ids` has 2 rows"):
        generate_live(target, tokenizer, inputs, heads, terminal(), max_new_tokens=3)
