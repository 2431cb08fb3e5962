"""Ten minutes of one GPU for SmolLM2: its answers to many questions, heads trained on them, and their speed.

There are three stages. Each writes its results while it runs, and continues where it was stopped. First, the target
answers the questions in large batches, as with `hf-clover regenerate`. Then clover-x heads learn from the answers by
the default recipe, in a plain loop (`examples/experiments/plain_training.py`), which needs neither trl nor datasets.
Last, the benchmark measures the heads on questions that they have not seen, first by category in batches, then one by
one for the time. `--minutes` are divided among the stages; a stage may also use the time that earlier ones left.
`--output` gets `on_a_gpu.json`, the answers, and the heads in bfloat16.

    python examples/smollm2/on_a_gpu.py train_prompts.jsonl --questions spec_bench.jsonl --output out
    python examples/smollm2/on_a_gpu.py train_prompts.jsonl --questions spec_bench.jsonl --output out \\
        --target part.aa part.ab   # a GGUF file in pieces
"""

import argparse
import datetime
import gzip
import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_clover import CloverHeads
from hf_clover.measure.benchmark import benchmark, plain, with_heads, write
from hf_clover.measure.prompts import Question, load_questions
from hf_clover.measure.provenance import provenance
from hf_clover.targets.loading import load_target, load_tokenizer
from hf_clover.training.row_by_row import decode, own_random_numbers

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "experiments"))
from plain_training import Rows, Run, new_heads  # noqa: E402

TEMPERATURE = 0.7
HELD_OUT = 0.02  # share of the questions, the last ones
AT_ONCE = 4  # batches that are sorted by length together; the order of such groups is the file's
SHARES = {"answers": 0.45, "training": 0.35, "batches": 0.1, "one by one": 0.1}  # shares of the minutes


class OutOfTimeError(Exception):
    """A stage has used up its share of the time; its results so far are kept."""


class Clock:
    """`--minutes`, divided among the stages: a stage may use its share, and the time that earlier stages left."""

    def __init__(self, minutes: float) -> None:
        self.started, self.seconds = time.monotonic(), 60 * minutes

    def left(self, stage: str) -> float:
        names = list(SHARES)
        share = sum(SHARES[name] for name in names[: names.index(stage) + 1])
        return self.started + share * self.seconds - time.monotonic()


# ---------------------------------------------------------------------- the target's answers


def questions_of(file: Path, tokenizer: PreTrainedTokenizerBase, most: int) -> dict[int, list[int]]:
    """The place in the file and the token ids of every question of at most `most` tokens."""
    found = {}
    for place, line in enumerate(filter(str.strip, file.read_text(encoding="utf-8").split("\n"))):
        ids = Question([json.loads(line)["prompt"]]).encode(tokenizer)
        if len(ids) <= most:
            found[place] = ids
    return found


def batches(ids: dict[int, list[int]], size: int, most_tokens: int, new_tokens: int) -> Iterator[list[int]]:
    """Batches of questions of about the same length, each with at most `size` rows and `most_tokens` tokens."""
    places = list(ids)
    for start in range(0, len(places), AT_ONCE * size):
        batch: list[int] = []
        for place in sorted(places[start : start + AT_ONCE * size], key=lambda place: -len(ids[place])):
            row = len(ids[batch[0]] if batch else ids[place]) + new_tokens
            if len(batch) == size or (batch and (len(batch) + 1) * row > most_tokens):
                yield batch
                batch = []
            batch.append(place)
        yield batch


@torch.no_grad()
def answer(
    args: argparse.Namespace, clock: Clock, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Answer the questions; each batch is written to a file of token ids. After the first batch, none is begun if the
    last one took longer than the time that is left."""
    folder = args.work / "answers"
    folder.mkdir(parents=True, exist_ok=True)
    ids = questions_of(args.questions_to_learn_from, tokenizer, args.max_length - args.max_new_tokens)
    known = {place for place, _, _ in answers_in(folder)}
    ids = {place: question for place, question in ids.items() if place not in known}
    last = tokens = 0.0
    started = time.monotonic()
    for batch in batches(ids, args.batch_size, args.most_tokens, args.max_new_tokens):
        if last and last > clock.left("answers"):
            break
        begun = time.monotonic()
        numbers = torch.stack([own_random_numbers(ids[place], 0, args.max_new_tokens) for place in batch])
        inputs = tokenizer.pad({"input_ids": [ids[p] for p in batch]}, padding_side="left", return_tensors="pt")
        sequences = target.generate(
            **inputs.to(target.device),
            do_sample=True,
            temperature=TEMPERATURE,
            max_new_tokens=args.max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            custom_generate=partial(decode, numbers=numbers.to(target.device)),
        )
        rows = sequences[:, inputs["input_ids"].shape[1] :].tolist()
        lines = []
        for place, row in zip(batch, rows, strict=True):
            ends = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
            lines.append(json.dumps([place, ids[place], row[:ends]]))
            tokens += ends
        new = folder / f"{min(batch):06d}-{len(batch)}.new"
        new.write_bytes(gzip.compress("\n".join(lines).encode()))
        new.replace(new.with_suffix(".gz"))
        last = time.monotonic() - begun
        print(f"answers: {len(batch)} in {last:.1f} s", flush=True)
    seconds = time.monotonic() - started
    found = list(answers_in(folder))
    return {
        "answers": len(found),
        "tokens": sum(len(tokens) for _, _, tokens in found),
        "this_time": {"seconds": seconds, "tokens_per_second": tokens / max(seconds, 1e-9)},
    }


def answers_in(folder: Path) -> list[tuple[int, list[int], list[int]]]:
    """Place, question and answer of every answered question, in the file's order."""
    lines = [line for file in folder.glob("*.gz") for line in gzip.decompress(file.read_bytes()).splitlines()]
    return sorted(tuple(json.loads(line)) for line in lines)


def keep_answers(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the answers as rows of `messages`, which the trainer takes."""
    with args.questions_to_learn_from.open(encoding="utf-8") as file:
        asked = [json.loads(line) for line in file if line.strip()]
    with gzip.open(args.output / "answers.jsonl.gz", "wt", encoding="utf-8") as file:
        for place, _, tokens in answers_in(args.work / "answers"):
            said = {"role": "assistant", "content": tokenizer.decode(tokens, skip_special_tokens=True)}
            finished = tokens[-1:] == [tokenizer.eos_token_id]
            row = {"source": asked[place].get("source"), "messages": [*asked[place]["prompt"], said]}
            file.write(json.dumps(row | {"finished": finished}) + "\n")


# ---------------------------------------------------------------------- the heads


def learn(args: argparse.Namespace, clock: Clock, target: PreTrainedModel, note: Any) -> CloverHeads:
    texts = [[*question, *tokens] for _, question, tokens in answers_in(args.work / "answers")]
    if len(texts) < 2:
        raise SystemExit(
            f"`--minutes {args.minutes:g}` left time for {len(texts)} answers, and two are needed: one for training "
            "and one for the evaluation. Give it more minutes, or run it again: it continues where it stopped."
        )
    held_out = max(int(HELD_OUT * len(texts)), 1)
    rows, test = (Rows.packed(part, args.max_length) for part in (texts[:-held_out], texts[-held_out:]))
    torch.manual_seed(0)
    heads = new_heads(target, rows, args.draft_vocab_size).to(target.device)
    steps = max(round(args.epochs * len(rows) / args.rows), 1)
    saved = args.work / f"training-{len(texts)}.pt"  # by their number: with more answers it is another run
    run = Run(heads, target, rows, steps, args.rows)
    if saved.exists():
        run.load(saved)
    begun_with = run.tokens
    started, run.seconds = run.spent, run.spent + max(clock.left("training"), 1)
    while run.progress < 1:
        means = run.train(until=run.spent + args.save_seconds)
        run.save(saved)
        speed = (run.tokens - begun_with) / max(run.spent - started, 1e-9)
        line = {"step": run.step, "tokens": run.tokens, "seconds": run.spent, **means}
        note(line, {"rows": len(rows), "steps": steps, "tokens_per_second": speed})
        print(f"training: step {run.step} of {steps}, chain {means['acceptance_length/top1']:.3f}", flush=True)
    note(None, {"held_out": run.evaluate(test)})
    heads = heads.to(torch.bfloat16)
    heads.save_pretrained(args.output / "heads")
    return heads


# ---------------------------------------------------------------------- what they are worth


def measure(
    args: argparse.Namespace,
    clock: Clock,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    heads: CloverHeads,
    stage: str,
    note: Any,
) -> None:
    """Measure the questions in batches, or one by one, until the time is over; `note` gets all results so far."""
    heads = heads.to(device=target.device, dtype=target.dtype)
    in_batches = stage == "batches"
    methods = [plain(), with_heads(heads, "clover-x, 16 nodes", 16)]
    if not in_batches:
        methods.append(with_heads(heads, "clover-x"))

    def report(result: dict[str, Any]) -> None:
        note(result)
        if clock.left(stage) < 0:
            raise OutOfTimeError

    with suppress(OutOfTimeError):
        result = benchmark(
            target,
            tokenizer,
            methods,
            load_questions(str(args.questions), tokenizer, per_category=args.per_category),
            prompt_set=str(args.questions),
            batch_sizes=(args.question_batch if in_batches else 1,),
            max_new_tokens=args.answer_tokens,
            repeats=1,
            progress=False,
            report=report,
        )
        note(result)


# ---------------------------------------------------------------------- all of it


def load(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target and its tokenizer, from a folder or from the parts of a GGUF file."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    source: dict[str, Any] = {"name": str(args.target[0])}
    if args.target[0].is_file():
        joined = args.work / "target.gguf"
        joined.write_bytes(b"".join(part.read_bytes() for part in args.target))
        source = {"name": str(args.work), "gguf_file": joined.name}
    target, tokenizer = load_target(**source, dtype=dtype).to(device).eval(), load_tokenizer(**source)
    target.generation_config.eos_token_id = tokenizer.eos_token_id
    return target, tokenizer


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    clock = Clock(args.minutes)
    args.output.mkdir(parents=True, exist_ok=True)
    args.work.mkdir(parents=True, exist_ok=True)
    path = args.output / "on_a_gpu.json"
    target, tokenizer = load(args)
    settings = {name: value for name, value in vars(args).items() if not isinstance(value, Path | list)}
    result: dict[str, Any] = {
        "kind": "training run",
        "settings": settings | {"dtype": str(target.dtype).removeprefix("torch."), "device": target.device.type},
        **provenance(),
        "date": datetime.date.today().isoformat(),
        "training": {"log": []},
        "measured": {},
    }

    def note(line: dict[str, Any] | None, more: dict[str, Any]) -> None:
        result["training"] |= more
        result["training"]["log"] += [] if line is None else [line]
        write(result, path)

    def measured(stage: str, found: dict[str, Any]) -> None:
        result["measured"][stage] = found
        write(result, path)

    result["answers"] = answer(args, clock, target, tokenizer)
    write(result, path)
    keep_answers(args, tokenizer)
    heads = learn(args, clock, target, note)
    for stage in ("batches", "one by one"):
        measure(args, clock, target, tokenizer, heads, stage, partial(measured, stage))
    if target.device.type == "cuda":
        result["peak_memory_mib"] = torch.cuda.max_memory_allocated() / 2**20
    write(result, path)
    return result


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions_to_learn_from", type=Path, help="a JSON lines file of `prompt` (messages)")
    parser.add_argument(
        "--questions", type=Path, required=True, help="questions of the benchmark, in the format of Spec-Bench"
    )
    parser.add_argument(
        "--target", type=Path, nargs="+", default=[HERE / "target"], help="a folder, or a GGUF's parts"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for figures, answers and heads")
    parser.add_argument("--work", type=Path, default=Path("runs/on_a_gpu"), help="state of a run, to resume it")
    parser.add_argument("--minutes", type=float, default=9, help="for all stages together (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=2048, help="questions answered at once")
    parser.add_argument("--most-tokens", type=int, default=1_500_000, help="most tokens in the cache (23 KB each)")
    parser.add_argument("--max-new-tokens", type=int, default=320, help="most tokens of an answer to learn from")
    parser.add_argument("--max-length", type=int, default=1024, help="tokens of a training row")
    parser.add_argument("--rows", type=int, default=2, help="rows of a training step")
    parser.add_argument("--epochs", type=float, default=1.0, help="if the time is enough")
    parser.add_argument("--draft-vocab-size", type=int, default=8192)
    parser.add_argument("--save-seconds", type=float, default=30, help="seconds between two saved states")
    parser.add_argument("--question-batch", type=int, default=24, help="questions per batch, in the stage of batches")
    parser.add_argument("--per-category", type=int, help="questions of each category; all by default")
    parser.add_argument("--answer-tokens", type=int, default=128, help="tokens of a measured answer")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
