"""README and docs/: their code runs or says why it does not, their commands are ones that are there, their links lead
somewhere.

A block of code runs here, in a folder where `org/target` and the like are tiny models. One that cannot run is marked
in the line before it, `<!-- not run: why -->`; blocks between `<!-- ci:... -->` lines are run by `.ci/run`. Commands
are read by their own parsers, whether they run or not.
"""

import configparser
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from helpers.pages import BLOCK, DOCS, ROOT, blocks, elsewhere, is_run, models  # noqa: F401  (two of them are fixtures)

from hf_clover import cli

PAGES = sorted({*ROOT.glob("*.md"), *DOCS, *ROOT.glob(".github/*.md"), *(ROOT / "examples").rglob("*.md")})
RUNS_THEM = pytest.mark.long("README.md", "docs", "hf_clover/cli", "hf_clover/training", "hf_clover/apps")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def commands(code: str) -> list[list[str]]:
    """The commands of a shell's block, as words."""
    lines = code.replace("\\\n", " ").replace("&&", "\n").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@RUNS_THEM
@pytest.mark.parametrize("page", [page for page in DOCS if blocks(page, "python")], ids=name_of)
def test_python_blocks_of_every_page_run(page, elsewhere):  # noqa: F811
    """All blocks of a page, one after the other, as somebody does who reads it."""
    names: dict = {}
    for mark, code in blocks(page, "python"):
        compile(code, name_of(page), "exec")
        if is_run(mark):
            exec(code, names)


@RUNS_THEM
@pytest.mark.parametrize("page", [page for page in DOCS if blocks(page, "bash")], ids=name_of)
def test_commands_of_every_page_run(page, elsewhere, monkeypatch):  # noqa: F811
    for mark, code in blocks(page, "bash"):
        for words in commands(code) if is_run(mark) else ():
            if words[0] == "pip":  # installed, or we would not be here
                continue
            assert words[0] == "hf-clover", f"{shlex.join(words)}: run it here, or say why not"
            monkeypatch.setattr(sys, "argv", words)
            monkeypatch.setattr(sys, "stdin", io.StringIO("def f(x):\n"))
            with pytest.raises(SystemExit) as exit_:
                sys.exit(cli.main())
            assert not exit_.value.code, shlex.join(words)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "bash")], ids=name_of)
def test_commands_name_existing_options_extras_and_files(page):
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for _, code in blocks(page, "bash"):
        for words in commands(code):
            for i, word in enumerate(words[1:], 1):
                if words[0] == "pip" and word.startswith(".["):
                    assert {*word[2:-1].split(",")} <= {*setup["options.extras_require"]}, word
                if word.endswith(".py") or words[i - 1] in ("-c", "--config", "--config_file"):
                    assert (ROOT / word).exists() or not word.endswith((".py", ".txt", ".yaml")), word
            if words[0] == "hf-clover":
                check_options(words[1], words[2:])


def check_options(name: str, words: list[str]) -> None:
    """The command's own parser takes these words."""
    if name == "train":
        script = pytest.importorskip("hf_clover.training.script")
        known = {option for action in script.make_parser()._actions for option in action.option_strings}
        assert {word for word in words if word.startswith("--")} <= known
        return
    typer.main.get_command(cli.app).commands[name].make_context(name, words)


def test_the_readme_has_at_most_seven_kib():
    assert (ROOT / "README.md").stat().st_size <= 7 * 1024


def test_the_readmes_promise_of_the_same_tokens_names_float32():
    """Repositories hold weights in bfloat16, and `from_pretrained` leaves them so."""
    promise = re.search(r"^- \*\*The same tokens\.\*\* .*$", (ROOT / "README.md").read_text(), re.MULTILINE)[0]
    assert "in float32" in promise
    assert "[half precision](#limits)" in promise


# ---------------------------------------------------------------------- links


def anchors(page: Path) -> set[str]:
    """The headings of a page, as GitHub names them."""
    text = BLOCK.sub("", page.read_text())
    titles = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_existing_pages_and_anchors(page):
    text = BLOCK.sub("", page.read_text())
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    for link in links:
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name_of(page)} links {link}"
        assert not anchor or anchor in anchors(there), f"{name_of(page)} links {link}"


def test_every_experiment_is_in_the_index():
    folder = ROOT / "examples/experiments"
    index = (folder / "README.md").read_text()
    for report in (folder / "results").glob("*.md"):
        assert f"](results/{report.name}) |" in index, report.name
    for figures in (folder / "results").glob("*.json"):
        assert any(figures.name in page.read_text() for page in (folder / "results").glob("*.md")), figures.name


def test_the_repository_holds_no_symbolic_links():
    """A link to a folder of one machine leads nowhere on the next, and stands in the way of what belongs there."""
    listed = subprocess.run(["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout of git")
    entries = [line.split(maxsplit=3) for line in listed.stdout.splitlines()]  # mode, hash, stage, path
    assert len(entries) > 300
    assert [path for mode, _, _, path in entries if mode == "120000"] == []
