"""The machine and the versions on it, for reports of problems.

Contract: `environment()` returns a plain dictionary of texts, numbers and lists that JSON can hold; `as_text` makes a
text of it. Nothing in it identifies a person or a place: no names of users or hosts, no paths, no environment
variables. A value that is not available is None, and nothing that is missing or broken raises an error.
"""

import os
import platform
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import utils

from .. import __version__
from .._versions import installed_version
from ..decoding.hook import is_installed
from ..targets.private_api import why_unavailable
from .acceptance import tried

PACKAGES = ("transformers", "torch", "accelerate", "trl", "peft", "datasets", "huggingface_hub", "safetensors")
GIB = 2**30


def environment() -> dict[str, Any]:
    return {
        "hf_clover": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "torch_build": {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version() if torch.version.cuda else None,
            "hip": torch.version.hip,
            "mps": torch.backends.mps.is_available(),
            "threads": torch.get_num_threads(),
        },
        "cpu": {"model": cpu_model(), "cores": _cores(), "memory_gib": _memory_gib()},
        "devices": _devices(),
        "attention": _attention(),
        "generate": _generate(),
        "drafts": _drafts(),
    }


def as_text(report: dict[str, Any]) -> str:
    """A list in Markdown, to be pasted into an issue."""
    lines: dict[str, Any] = {}
    for name, value in report.items():
        if name == "packages":
            lines |= {package: version or "not installed" for package, version in value.items()}
        elif name == "drafts":
            lines |= {f"drafts in {where}": said for where, said in value.items()}
        else:
            lines[name.replace("_build", " build")] = value
    return "\n".join(f"- {name}: {_said(value)}" for name, value in lines.items())


def _said(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(map(_said, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {_said(part)}" for key, part in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def cpu_model() -> str | None:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        with suppress(OSError, subprocess.SubprocessError):
            return subprocess.check_output(["sysctl", "-n", "machdep.cpu.brand_string"], text=True, timeout=10).strip()
    return platform.processor() or platform.machine() or None


def _cores() -> int | None:
    """The cores that this process may use."""
    with suppress(AttributeError, OSError):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _memory_gib() -> float | None:
    with suppress(AttributeError, OSError, ValueError):  # not on Windows
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1)
    return None


def _devices() -> list[dict[str, Any]]:
    if torch.backends.mps.is_available():
        return [{"name": "mps", "memory_gib": round(torch.mps.recommended_max_memory() / GIB, 1)}]
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "memory_gib": round(properties.total_memory / GIB, 1),
                "capability": f"{properties.major}.{properties.minor}",
            }
        )
    return found


def _attention() -> list[str]:
    """The attention implementations that transformers accepts here; the first two can verify trees."""
    optional = {
        "flex_attention": "is_torch_flex_attn_available",
        "flash_attention_2": "is_flash_attn_2_available",
        "flash_attention_3": "is_flash_attn_3_available",
        "flash_attention_4": "is_flash_attn_4_available",
        "kernels from the Hub": "is_kernels_available",
    }
    return ["eager", "sdpa", *(name for name, ask in optional.items() if getattr(utils, ask, bool)())]


def _generate() -> dict[str, Any]:
    """Whether `generate` speculates, and if not, what transformers lacks."""
    return {"hook_installed": is_installed(), "lacking_in_transformers": why_unavailable()}


def _drafts() -> dict[str, str]:
    """Whether drafts are accepted here, tried on made-up targets."""
    return tried()
