"""Load a target and its tokenizer by name: from the Hub, from a folder, or from a GGUF file in either.

Contract: models and tokenizers are those of transformers' `from_pretrained`. A GGUF file is dequantised while it is
loaded: heads borrow rows of the target's weights, and packed weights have no readable rows. A file that cannot be read
raises a `ValueError` that says what is wrong.
"""

import importlib.util
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

FILES = (".jsonl", ".json", ".txt", ".csv", ".parquet", ".gz", ".gguf", ".safetensors")
READERS = ("gguf", "accelerate")  # packages that transformers needs to read a GGUF file; the extra `gguf`


def load_target(name: str, gguf_file: str | None = None, **options: Any) -> PreTrainedModel:
    """The model. `options` are those of `from_pretrained`."""
    if gguf_file is not None:
        options = {"gguf_file": gguf_file, "quantization_config": GgufConfig(dequantize=True), **options}
    with _reading(name, gguf_file):
        model = AutoModelForCausalLM.from_pretrained(name, **options)
    model.gguf_file = gguf_file  # type: ignore[assignment]  # read by `gguf_file_of`
    return model


def load_tokenizer(name: str, gguf_file: str | None = None, **options: Any) -> PreTrainedTokenizerBase:
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
    with _reading(name, gguf_file):
        return AutoTokenizer.from_pretrained(name, **options)


def hide_loading_bars() -> None:
    """Hide transformers' progress bars for reading and writing weights. The Hub's bars for downloads stay."""
    were_off = are_progress_bars_disabled()
    logging.disable_progress_bar()  # the Hub's too
    if not were_off:
        enable_progress_bars()


@contextmanager
def hiding_bars() -> Iterator[None]:
    """As `hide_loading_bars`, until the end of the block."""
    were_on = logging.is_progress_bar_enabled()
    hide_loading_bars()
    try:
        yield
    finally:
        if were_on:
            were_off = are_progress_bars_disabled()
            logging.enable_progress_bar()  # the Hub's too
            if were_off:
                disable_progress_bars()


def gguf_file_of(model: PreTrainedModel) -> str | None:
    """The GGUF file that a target was loaded from, by `load_target` or by `from_pretrained`; None if there is none."""
    packed = getattr(getattr(model, "config", None), "quantization_config", None)
    return getattr(model, "gguf_file", None) or getattr(packed, "gguf_file", None)


def check_path(name: "str | os.PathLike[str]", what: str) -> None:
    """Refuse a path that does not exist, before the Hub is asked for it several times. `what`: "target", "heads" or
    "dataset"."""
    name = os.fspath(name)
    path = Path(name).expanduser()
    if path.exists() or "://" in name:
        return
    is_path = name.startswith((".", "/", "~", "\\")) or name.rstrip("/").count("/") > 1 or path.suffix in FILES
    may_be_either = "/" in name and path.parent.is_dir()  # org/name, while a folder called org is here
    if is_path or (may_be_either and not is_on_the_hub(name, "dataset" if what == "dataset" else "model")):
        raise ValueError(
            f"the {what} {name!r} is not here: there is no such file or folder. Check the spelling, or pass an id of "
            "the Hub, such as org/name."
        )


def is_on_the_hub(name: str, repo_type: str) -> bool:
    """Whether the repository `name` is in the Hub's cache on this machine or on the Hub; makes at most one request."""
    cached = Path(constants.HF_HUB_CACHE, f"{repo_type}s--{name.replace('/', '--')}")
    if cached.is_dir():
        return True
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        HfApi().repo_info(name, repo_type=repo_type, timeout=5)
    except Exception:  # the Hub does not answer, or has no such name
        return False
    return True


@contextmanager
def _reading(name: str, gguf_file: str | None) -> Iterator[None]:
    check_path(name, "target")
    folder = Path(name)
    if gguf_file is None and folder.is_file():
        raise ValueError(
            f"{str(name)!r} is a file: pass its folder {str(folder.parent)!r}, and `gguf_file={folder.name!r}` if it "
            "is a GGUF."
        )
    if gguf_file is not None and folder.is_dir() and not (folder / gguf_file).is_file():
        found = ", ".join(sorted(path.name for path in folder.glob("*.gguf")))
        raise ValueError(f"`gguf_file={gguf_file!r}` is not in {str(name)!r}, which has {found or 'no GGUF file'}.")
    missing = [name for name in READERS if gguf_file is not None and importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"`gguf_file={gguf_file!r}` needs {' and '.join(missing)}: `pip install 'hf-clover[gguf]'`, or in a clone "
            '`pip install -c constraints.txt -e ".[gguf]"`.'
        )
    try:
        yield
    except (ValueError, OSError, LookupError, TypeError, struct.error) as error:
        if gguf_file is None:
            raise
        reason = str(error).rstrip(".") if isinstance(error, (ValueError, OSError)) else "it is damaged or cut short"
        raise ValueError(
            f"`gguf_file={gguf_file!r}` of {str(name)!r} cannot be loaded: {reason}. Pass a whole GGUF file of an "
            "architecture that transformers reads, or the model in safetensors and no `gguf_file`."
        ) from error


__all__ = [
    "READERS",
    "check_path",
    "gguf_file_of",
    "hide_loading_bars",
    "is_on_the_hub",
    "load_target",
    "load_tokenizer",
]
