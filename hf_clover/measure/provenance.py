"""Where figures come from: the command, the machine and the versions, without the user's access tokens and folders."""

import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import get_token

from .. import __version__
from .._versions import installed_version
from .environment import cpu_model

TOKEN = re.compile(r"\b(hf_|api_org_)[A-Za-z0-9]{30,}\b")
_TOKEN_OPTION = re.compile(r"-*((hub|hf|access|auth)[_-])?(token|api[_-]key)", re.IGNORECASE)
_HIDDEN = "HIDDEN-TOKEN"
_VERSIONS_OF = ("hf-clover", "transformers", "torch", "trl", "peft", "datasets", "huggingface-hub")


def provenance() -> dict[str, Any]:
    """The origin of figures: `command`, `machine` and `versions`, for the results."""
    words = [_public(before, word) for before, word in zip(["", *sys.argv], sys.argv)]
    torch, machine = sys.modules.get("torch"), f"{cpu_model() or ''}, {os.cpu_count()} cores"
    if torch is not None and torch.cuda.is_available():
        machine = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    found = {package: installed_version(package) for package in _VERSIONS_OF}
    versions = {package: version for package, version in found.items() if version is not None}
    versions["hf-clover"] = __version__
    return {"command": without_tokens(shlex.join(words)), "machine": machine, "versions": versions}


def _public(before: str, word: str) -> str:
    """A word of the command line, without a token's value and without a path's folders."""
    if _TOKEN_OPTION.fullmatch(before):
        return _HIDDEN
    name, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    if equals and _TOKEN_OPTION.fullmatch(name):
        return f"{name}={_HIDDEN}"
    return f"{name}{equals}{without_folders(value)}"


def without_tokens(text: str) -> str:
    """`text` without the user's access token and anything that looks like one."""
    token = get_token()
    return TOKEN.sub(_HIDDEN, text.replace(token, _HIDDEN) if token else text)


def without_folders(value: Any) -> Any:
    """`value` with only the last part of each absolute path."""
    if isinstance(value, Mapping):
        return {name: without_folders(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(each) for each in value]
    return Path(value).name if isinstance(value, str) and os.path.isabs(value) else value


__all__ = ["TOKEN", "provenance", "without_folders", "without_tokens"]
