"""What are heads worth that learn while they are used, from nothing?

The target answers prompts one after the other, sampled, twice in turn: plain, and with heads that learn in a share of
the time. Seconds of each, learning included, in windows of prompts. With `--read`, heads see answers that the target
gave before, each once, as if `generate` had just written it, and learn from all of them: tokens per forward on
questions that they never saw, over the tokens learned from.

    python examples/experiments/online.py --target TARGET --prompts PROMPTS.jsonl
    python examples/experiments/online.py --target TARGET --read ANSWERS.jsonl --questions QUESTIONS.jsonl
"""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from common import PLAIN, finish, line, load_target, panel, parse
from drafters import ask, read_questions
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_clover import OnlineLearner, TextMemory, pack_for_cpu, speculations
from hf_clover.measure.benchmark import write
from hf_clover.measure.prompts import load_prompts
from hf_clover.training.online import REMEMBERED

DEFAULTS = dict(
    prompts="stand-in",
    num_prompts=200,
    max_new_tokens=128,
    temperature=0.7,
    share=0.1,
    window=20,
    read=None,
    questions=None,
    per_category=1,
    nodes=(16,),
    tokens=(0, 10_000, 20_000, 30_000, 40_000, 50_000, 60_000),
)
TOY = dict(num_prompts=4, max_new_tokens=8, window=2, tokens=(0, 1400), per_category=1)


# ---------------------------------------------------------------------- a stream of prompts, by the clock


def stream(target: PreTrainedModel, prompts: Sequence[list[int]], args: Any) -> list[dict[str, Any]]:
    """A row for each prompt: seconds of the plain answer, and of the same answer with what was learned after it."""
    rows = []
    settings = dict(max_new_tokens=args.max_new_tokens, do_sample=args.temperature > 0, pad_token_id=0)
    if args.temperature:
        settings |= dict(temperature=args.temperature, top_k=0, top_p=1.0)
    learner = OnlineLearner(None, target, share=args.share)
    with learner:
        for number, prompt in enumerate(prompts):
            ids = torch.tensor([prompt], device=target.device)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            torch.manual_seed(args.seed + number)
            started = time.perf_counter()
            plain = target.generate(**inputs, **settings)
            between = time.perf_counter()
            torch.manual_seed(args.seed + number)
            with speculations() as records:
                ours = target.generate(**inputs, assistant_model=learner.heads, **settings)
            ended = time.perf_counter()
            rows.append(
                {
                    "prompt": number,
                    "plain_seconds": between - started,
                    "seconds": ended - between,
                    "new_tokens": records[0].new_tokens,
                    "forwards": records[0].row_forwards,
                    "learned_from": learner.tokens,
                    "identical": torch.equal(plain, ours),
                }
            )
            if (number + 1) % args.window == 0:
                print(json.dumps(windows(rows, args.window)[-1]), flush=True)
                write({"kind": "experiment", "name": "online", "prompts": rows}, args.output / "online.json")
    return rows


def windows(rows: Sequence[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """So many prompts together."""
    found = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        total = {
            name: sum(row[name] for row in part) for name in ("plain_seconds", "seconds", "new_tokens", "forwards")
        }
        found.append(
            {
                "prompts": start + len(part),
                "learned_from": part[-1]["learned_from"],
                "tokens_per_forward": total["new_tokens"] / total["forwards"],
                "speedup": total["plain_seconds"] / total["seconds"],
                "identical": all(row["identical"] for row in part),
            }
        )
    return found


# ---------------------------------------------------------------------- answers that are read, by tokens


def texts_of(path: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    with Path(path).open(encoding="utf-8") as file:
        for each in file:
            yield tokenizer.apply_chat_template(json.loads(each)["messages"], return_dict=False)


def memory_of(texts: Sequence[list[int]]) -> TextMemory:
    memory = TextMemory(REMEMBERED)
    for text in texts:
        memory.add(text)
    return memory


def read(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: Sequence[tuple[str, list[int]]], args: Any
) -> list[dict[str, Any]]:
    """A row for each number of tokens: what drafts are worth then, with copies from the text and without."""
    learner, rows, done = OnlineLearner(None, target, share=1.0), [], []
    texts, copies = texts_of(args.read, tokenizer), learner.heads.config.draft_copies
    started = time.perf_counter()
    measuring = 0.0
    with learner:
        for tokens in sorted(args.tokens):
            while learner.tokens < tokens and (text := next(texts, None)) is not None:
                ids = torch.tensor([text], device=target.device)
                target.generate(
                    ids, attention_mask=torch.ones_like(ids), assistant_model=learner.heads, max_new_tokens=1
                )
                done.append(text)
                while learner.step():
                    pass
            began = time.perf_counter()
            learner.exchange_ids()
            row: dict[str, Any] = {"learned_from": learner.tokens, "steps": learner.steps}
            learner.heads.learner = None  # what is asked is not learned from
            own = learner.heads.text_memory
            for name, most in (("heads", 0), ("with_copies", copies)):
                learner.heads.config.draft_copies = most
                learner.heads.text_memory = memory_of(done) if most else None  # of no answer to these questions
                options = dict(assistant_model=learner.heads, num_assistant_tokens=args.nodes[0])
                asked = ask(target, questions, args.max_new_tokens, **options)
                row[name] = asked.tokens_per_forward
            learner.heads.learner, learner.heads.text_memory = learner, own
            measuring += time.perf_counter() - began
            row["seconds"] = time.perf_counter() - started - measuring
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


# ---------------------------------------------------------------------- the result


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(__doc__, argv, DEFAULTS, TOY)
    target, tokenizer = load_target(args)
    if args.read:
        questions = read_questions(args.questions, tokenizer, args.per_category)
        rows = read(target, tokenizer, questions, args)
        series = [
            line(name.replace("_", " "), [(row["learned_from"], row[name]) for row in rows])
            for name in ("heads", "with_copies")
        ]
        panels = [panel("lines", "Questions never seen", "tokens learned from", "tokens per forward", series)]
        return finish(args, target, __doc__, rows, "Heads that learn from nothing", panels, rows, "online_read.py")
    if target.device.type == "cpu":
        pack_for_cpu(target)
    each = stream(target, load_prompts(args.prompts, tokenizer, args.num_prompts), args)
    rows = windows(each, args.window)
    whole = windows(each, len(each))[0]
    last = windows(each[len(each) * 3 // 4 :], len(each))[0]
    panels = [
        panel(
            "lines",
            title,
            "prompts answered",
            ylabel,
            [line("heads that learn", [(row["prompts"], row[name]) for row in rows])],
            **more,
        )
        for title, ylabel, name, more in (
            ("By the clock, learning included", "times plain generate", "speedup", {"reference": PLAIN}),
            ("Drafts", "tokens per forward", "tokens_per_forward", {}),
        )
    ]
    more = {"whole": whole, "last_quarter": last, "prompts": each}
    return finish(args, target, __doc__, rows, "Heads that learn in use", panels, rows, __file__, **more)


if __name__ == "__main__":
    main()
