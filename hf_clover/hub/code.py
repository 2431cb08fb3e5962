"""The code in a folder of heads, which transformers loads with and without an installed hf_clover.

Contract: `save_pretrained` writes the network's modules, because the heads' class is registered for that. This module
adds the file that `model.generate(..., custom_generate="org/heads")` loads. So a folder that is uploaded as it is
works like one that was pushed.
"""

import json
import os
import shutil
from pathlib import Path

from .. import __version__

FOLDER = "custom_generate"  # the folder that transformers looks into


def generation_code() -> dict[str, str]:
    """The path of each file in a folder of heads, and its content."""
    code = Path(__file__).with_name("custom_generate.py").read_text(encoding="utf-8")
    return {f"{FOLDER}/generate.py": code, f"{FOLDER}/requirements.txt": f"hf-clover>={__version__}\n"}


def write_generation_code(folder: str | os.PathLike) -> None:
    for path, content in generation_code().items():
        (Path(folder) / path).parent.mkdir(exist_ok=True)
        (Path(folder) / path).write_text(content, encoding="utf-8")


def remove_code(folder: str | os.PathLike) -> None:
    """Remove the modules, and the config's field that names them. For heads in this repository, beside the sources."""
    shutil.rmtree(Path(folder) / FOLDER, ignore_errors=True)
    for module in Path(folder).glob("*.py"):
        module.unlink()
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("auto_map", None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


__all__ = ["generation_code", "remove_code", "write_generation_code"]
