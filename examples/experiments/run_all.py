"""Run the six experiments one after another, leaving out those whose result is there already.

What is given here goes to every experiment that knows it; sizes are given to the experiments themselves.

    python examples/experiments/run_all.py
    python examples/experiments/run_all.py --target org/target --heads org/heads --data org/dataset --output my-results
"""

import importlib
import subprocess
import sys
from collections.abc import Sequence

from common import GENERATION, HERE, parse

NAMES = ("accuracy", "batch", "tree_size", "sensitivity", "break_even", "tasks")
SHARED = {"heads": GENERATION["heads"], "prompts": GENERATION["prompts"], "data": None}


def main(argv: Sequence[str] | None = None) -> list[str]:
    """The names of those that ran."""
    args, usual = parse(__doc__, argv, SHARED, {}), parse(__doc__, [], SHARED, {})
    given = {name: value for name, value in vars(args).items() if value != getattr(usual, name) and name != "toy"}
    todo = [name for name in NAMES if not (args.output / f"{name}.json").exists()]
    for name in todo:
        known = importlib.import_module(name).DEFAULTS
        options = {key: value for key, value in given.items() if key in known or key not in SHARED}
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        print(f"{name} {' '.join(words)}", flush=True)
        words = [sys.executable, str(HERE / f"{name}.py"), *words, *["--toy"] * args.toy]
        if code := subprocess.run(words).returncode:  # it has said why
            sys.exit(code)
    return todo


if __name__ == "__main__":
    main()
