"""Offline, on the CPU, deterministic: every test sees the same machine.

Fixtures import torch and the package, because the process that hands out the tests needs neither.
"""

import ast
import functools
import os
import re
import signal
import subprocess
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["HF_ASSETS_CACHE"] = os.devnull  # what the quick start has kept here is nobody's default
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"  # of programs that tests start, too: two beside each other take ages with two

import pytest

pytest.register_assert_rewrite("helpers", "resumed_runs")  # a comparison that fails there is shown as in a test

# A shell starts what runs in its background with Ctrl-C ignored, and programs started here would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


# ---------------------------------------------------------------------- two sets of tests

ROOT = Path(__file__).resolve().parents[1]
CONCERNS_ALL = (
    *("tests/conftest.py", "tests/helpers/pinned_budget.py"),
    *("pyproject.toml", "setup.cfg", "constraints.txt"),
)
FIGURES = "examples/experiments/results/"  # what the scripts beside it have left: no code


def pytest_addoption(parser):
    group = parser.getgroup("two sets", "the short one, which every change must pass, and the long one")
    group.addoption("--all", action="store_true", help="both sets")
    group.addoption("--since", metavar="COMMIT", help="the short set, and of the long one what has changed since")


def pytest_collection_modifyitems(config, items):
    if config.option.all:
        return
    changed = _changed_since(config.option.since)
    named = {Path(argument.partition("::")[0]).resolve() for argument in config.args}
    left_out = [item for item in items if item.path not in named and not _is_for(item, changed)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _changed_since(commit):
    """Files by their paths in the repository."""
    if not commit:
        return []
    words = ["git", "-C", str(ROOT), "diff", "--name-only", "--no-renames", commit, "--"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()


def _is_for(item, changed):
    """Whether a test is in the short set, is about a file or folder in which something has changed, or imports it."""
    marks = list(item.iter_markers_with_node("long"))
    about = {path for _, mark in marks for path in mark.args} | {item.path.relative_to(ROOT).as_posix(), *CONCERNS_ALL}
    if any(node is not item for node, _ in marks):  # all of its file is long
        about |= _rooms_imported(item.path)
    if not marks or any(_is_in(file, path) for file in changed for path in about):
        return True
    return _imports_any(item.path, _changed_helpers(tuple(changed)))


def _is_in(file, path):
    """A file of figures counts where it is named itself: to measure once more changes no script."""
    return file == path or (file.startswith(f"{path}/") and not file.startswith(FIGURES))


_text = functools.cache(Path.read_text)


@functools.cache
def _changed_helpers(changed):
    """Modules of tests/ that have changed, and those that import one of them."""
    found = {Path(file).stem for file in changed if file.startswith("tests/") and file.endswith(".py")}
    helpers = [file for file in (ROOT / "tests").rglob("*.py") if not file.name.startswith("test_")]
    while more := {file.stem for file in helpers if _imports_any(file, found)} - found:
        found |= more
    return found


def _imports_any(path, names):
    return bool(names) and bool(re.search(rf"^(from|import) .*\b({'|'.join(names)})\b", _text(path), re.MULTILINE))


@functools.cache
def _rooms_imported(path):
    """What a file imports from hf_clover, in functions too."""
    names = {
        f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(ast.parse(_text(path)))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    return {room for name in names if name.startswith("hf_clover.") and (room := _room_of(name))}


def _room_of(name):
    """A room's folder; in decoding/, which most tests run through, the module. The package's own names have none."""
    parts = name.split(".")
    lengths = range(len(parts) if parts[1] == "decoding" else 2, 1, -1)
    paths = ["/".join(parts[:length]) for length in lengths]
    return next((place for path in paths for place in (f"{path}.py", path) if (ROOT / place).exists()), None)


@pytest.fixture(autouse=True)
def _deterministic():
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def muon_in_float32(monkeypatch):
    """On every machine: in bfloat16 Muon rounds by more than what states on disk differ from the target's own."""
    monkeypatch.setattr("hf_clover.training.optimizers.multiplies_bfloat16_fast", lambda device: False)


@pytest.fixture(autouse=True, scope="module")
def _seeded_module():
    """What a module shares begins with random weights, too: the same ones whatever ran before."""
    import torch

    import hf_clover  # noqa: F401  (installs the hook)

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _pinned_budget(request, monkeypatch):
    """Every test sees the same trees, unless it is marked `automatic`."""
    if request.node.get_closest_marker("automatic"):
        return
    from helpers.pinned_budget import pin

    pin(monkeypatch)
