"""How often does the text before say what comes next, and for how many tokens?

Nothing is generated: answers that the target has given are read again, as `generate` would come through them if every
copied token were verified and no heads drafted beside. What varies is how many tokens must stand in the same order
before what followed them is copied.

    python examples/experiments/copies.py --tokenizer examples/smollm2/target --data smollm2_answers.jsonl
"""

import argparse
import datetime
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from common import HERE
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_clover.decoding.draft import copies as copies_module
from hf_clover.measure.benchmark import write
from hf_clover.measure.provenance import provenance

Answered = tuple[list[int], list[int]]  # a prompt and its answer


def read(path: Path, tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> list[Answered]:
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line)["messages"] for line in file]
    random.Random(seed).shuffle(rows)
    found = []
    for *before, answer in rows[:count]:
        prompt = tokenizer.apply_chat_template(before, add_generation_prompt=True, return_dict=False)
        ids = tokenizer(answer["content"], add_special_tokens=False)["input_ids"]
        found.append((prompt, [*ids, tokenizer.eos_token_id]))
    return found


def copied(texts: Sequence[Answered], run: int, most: int) -> dict[str, Any]:
    """What the last `run` tokens tell of the next `most`."""
    steps = tokens = guesses = first_right = right = 0
    with mock.patch.object(copies_module, "RUNS", {run: 0.6}):
        for prompt, answer in texts:
            copies, place = copies_module.Copies([prompt], most), 0
            while place < len(answer):
                guess, rest = copies.guesses[0], answer[place:]
                same = copies_module.agreeing(guess, rest)
                guesses, first_right, right = guesses + bool(guess), first_right + (same > 0), right + same
                copies.extend([rest[: same + 1]])
                place += same + 1
                steps += 1
            tokens += len(answer)
    return {
        "run": run,
        "steps": steps,
        "with_a_copy": guesses / steps,
        "first_right": first_right / max(guesses, 1),
        "right_in_a_row": right / max(guesses, 1),
        "tokens_per_step": tokens / steps,
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="the target's folder or id")
    parser.add_argument("--data", type=Path, required=True, help="a .jsonl file of `messages`, the last an answer")
    parser.add_argument("--answers", type=int, default=400, help="of them, drawn by --seed")
    parser.add_argument("--runs", nargs="+", type=int, default=[1, 2, 3, 4], help="tokens that must be the same")
    parser.add_argument("--most", type=int, default=10, help="tokens that are copied")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=HERE / "results")
    args = parser.parse_args(argv)
    texts = read(args.data, AutoTokenizer.from_pretrained(args.tokenizer), args.answers, args.seed)
    rows = [copied(texts, run, args.most) for run in args.runs]
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
    settings = {"data": args.data.name, "answers": len(texts), "most": args.most, "seed": args.seed}
    result = {
        "kind": "experiment",
        "name": "copies",
        "question": " ".join(__doc__.split("\n\n")[0].split()),
        "settings": settings,
        **provenance(),
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }
    write(result, args.output / "copies.json")
    return result


if __name__ == "__main__":
    main()
