"""README and docs/ as tests read them: their blocks of code, and a folder in which that code runs.

How a block that cannot run is marked stands in `tests/test_docs.py`.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
from helpers.tiny_text import ASCII, CHAT_TEMPLATE, save_folders
from transformers import AutoModelForCausalLM

from hf_clover import Eagle3Heads

ROOT = Path(__file__).resolve().parents[2]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^(?:<!-- ([^\n]+) -->\n)?```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """What stands in the comment before each block of this language, and its code."""
    return [(mark, code) for mark, kind, code in BLOCK.findall(page.read_text()) if kind == language]


def is_run(mark: str) -> bool:
    return not mark.startswith(("not run: ", "ci:"))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    return save_folders(tmp_path_factory.mktemp("models"), says=ASCII)


@pytest.fixture
def elsewhere(models, tmp_path, monkeypatch) -> Path:
    """A working directory with what the pages name: their repositories are folders here."""
    for name in ("org/target", "Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M-Instruct"):
        shutil.copytree(models / "target", tmp_path / name)
        (tmp_path / name / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    for name in ("org/clover-heads", "examples/smollm2/heads"):
        shutil.copytree(models / "heads", tmp_path / name)
    target = AutoModelForCausalLM.from_pretrained(models / "target")
    Eagle3Heads.from_target(target).save_pretrained(tmp_path / "org/eagle3-heads")
    said = [{"role": "user", "content": "def f(x):"}, {"role": "assistant", "content": "return x[a:b]\n" * 8}]
    (tmp_path / "trl-lib/Capybara").mkdir(parents=True)
    for split in ("train", "test"):
        (tmp_path / f"trl-lib/Capybara/{split}.jsonl").write_text(json.dumps({"messages": said}))
    monkeypatch.chdir(tmp_path)
    return tmp_path
