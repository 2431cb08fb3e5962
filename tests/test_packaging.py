"""What is in the wheel and in the source distribution, built here from a copy; and what a wheel alone can do."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from helpers.pages import ROOT, blocks, elsewhere, is_run, models  # noqa: F401  (two of them are fixtures)

import hf_clover

pytestmark = pytest.mark.long("hub_cards", "hf_clover/hub", "README.md", "CHANGELOG.md", "hf_clover/__init__.py")

PARTS = ("hf_clover", "hub_cards", "tests", "setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
BUILD = """
import setuptools.build_meta as backend
print(backend.build_sdist("built"))
print(backend.build_wheel("built"))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    copy = tmp_path_factory.mktemp("packaging") / "source"
    for part in (*PARTS, "CHANGELOG.md"):
        make = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        (copy / part).parent.mkdir(parents=True, exist_ok=True)
        make(ROOT / part, copy / part)
    (copy / "built").mkdir()
    process = subprocess.run([sys.executable, "-c", BUILD], cwd=copy, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return copy / "built"


def sources() -> set[str]:
    """Every file of the package as it should be in the wheel."""
    files = {path.relative_to(ROOT) for path in (ROOT / "hf_clover").rglob("*.py")}
    cards = {Path("hf_clover") / path.relative_to(ROOT) for path in (ROOT / "hub_cards").glob("*.md")}
    return {path.as_posix() for path in files | cards | {Path("hf_clover/py.typed")}}


def test_the_wheel_holds_the_package_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == sources()
    info = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith("licenses/LICENSE") for name in info)


def test_the_source_distribution_holds_what_the_build_needs(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"setup.cfg", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "hf_clover/py.typed"} <= names
    assert {path.name for path in (ROOT / "hub_cards").glob("*.md")} == {
        name.partition("/")[2] for name in names if name.startswith("hub_cards/")
    }
    assert not [name for name in names if name.startswith(("tests", "examples", "hf_clover/hub_cards"))]


def test_the_version_stands_in_one_place(built):
    """In `hf_clover/__init__.py`: the metadata takes it from there, and the changelog begins with it."""
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"hf_clover-{hf_clover.__version__}-py3-none-any.whl"
    newest = re.search(r"^## (\S+), (?:not yet released|\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest[1] == hf_clover.__version__


@pytest.fixture(scope="module")
def unpacked(built, tmp_path_factory) -> Path:
    """The wheel's files, far from the repository."""
    (wheel,) = built.glob("*.whl")
    folder = tmp_path_factory.mktemp("unpacked")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run_there(unpacked: Path, script: str, *arguments: str, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    process = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={name: value for name, value in environment.items() if not name.startswith("COV")},
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_the_wheel_alone_has_cards_command_line_and_hook(unpacked, tmp_path):
    """Cards, command line and hook are there."""
    script = """
import sys
from pathlib import Path
import hf_clover, hf_clover.cli
from hf_clover import CloverHeads
from hf_clover.hub import cards
from importlib.resources import files
assert Path(hf_clover.__file__).is_relative_to(sys.argv[1]), hf_clover.__file__
assert "heads.md" in {path.name for path in files("hf_clover.hub_cards").iterdir()}
from hf_clover.decoding import hook
import transformers.generation.utils
assert hook.is_installed()
print(CloverHeads.__name__)
"""
    assert run_there(unpacked, script, str(unpacked), cwd=tmp_path).split() == ["CloverHeads"]


@pytest.mark.usefixtures("elsewhere")
def test_the_wheel_runs_the_readmes_python(unpacked, tmp_path):
    code = "\n".join(code for mark, code in blocks(ROOT / "README.md", "python") if is_run(mark))
    where = "import hf_clover, sys\nassert hf_clover.__file__.startswith(sys.argv[1]), hf_clover.__file__\n"
    assert run_there(unpacked, where + code, str(unpacked), cwd=tmp_path)
