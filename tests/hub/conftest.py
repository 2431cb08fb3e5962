"""A Hub on the loopback, the package as a wheel installs it, and fresh processes that know nothing else."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from hub_models import Folders, files_in, save_models
from hub_server import TOKEN, Hub

REPOSITORY = Path(__file__).parents[2]
Client = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, since building leaves its traces where it is done."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    for name in ("hf_clover", "hub_cards"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = f"from setuptools import build_meta; print(build_meta.build_wheel({str(out)!r}))"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=120)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="session")
def site(wheel, tmp_path_factory) -> Path:
    """A folder for `PYTHONPATH` with what the wheel installs."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> Folders:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def hub(folders) -> Iterator[Hub]:
    """With the target on it, and nothing else."""
    with Hub() as running:
        running.put("org/target", files_in(folders.target))
        yield running


@pytest.fixture(scope="module")
def environment(hub, site, tmp_path_factory) -> dict[str, str]:
    """Of a process of somebody who has installed the wheel and logged in; without xet, unless a test wants it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS_", "PYTHON"))}
    return kept | {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path_factory.mktemp("home")),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": TOKEN,
        "PYTHONPATH": str(site),
        "NO_PROXY": "127.0.0.1",
    }


@pytest.fixture(scope="module")
def client(environment, tmp_path_factory) -> Client:
    """Run lines of Python in a fresh process; a variable given as None is not set there."""
    folder = tmp_path_factory.mktemp("cwd")

    def run(code: str, fails: bool = False, **changes: str | None) -> subprocess.CompletedProcess:
        env = {name: value for name, value in {**environment, **changes}.items() if value is not None}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, cwd=folder, capture_output=True, text=True, timeout=180
        )
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done

    return run
