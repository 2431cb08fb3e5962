"""What did each ingredient of clover-x bring? Chain length, accuracy and drafting time, one change after another.

The first row is clover-2 as in its paper, with the paper's loss and learning rate; every row below changes one thing
more, and the last is clover-x as `CloverHeads.from_target` makes it and `CloverTrainer` trains it. Then comes clover-x
with one thing changed at a time. All learn from the same continuations of the target in the same order and are
measured on the target's greedy continuations of text that neither has seen: at every position the heads draft a chain
by their own best guesses, and the chain length is how many of them come true. Tokens per forward are without copies
from the text, which any heads may be given. A run that was stopped goes on where it was.

    python examples/experiments/ablation.py

A target that answers questions is measured on its held-out answers, and in `generate` on questions:

    python examples/experiments/ablation.py --target TARGET --data ANSWERS.jsonl --questions QUESTIONS.jsonl \\
        --draft-vocab-size 8192 --length 512 --batch-size 2 --output RESULTS
"""

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import TOY_TRAINING, TRAINING, finish, line, load_target, panel, parse, training_config
from continuations import Data, load_data
from drafters import DEPTH, EVERY, ROW, ask, chain_by_depth, full_rows, read_questions
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProgressCallback, set_seed

from hf_clover import CloverHeads, CloverTrainer
from hf_clover.decoding.draft.drafter import CloverDrafter
from hf_clover.origins.last_layer import LastLayer
from hf_clover.origins.scales import embedding_scale

PROMPT, CONTINUED, PROMPTS = 64, 64, 48  # tokens, tokens, texts to measure on
GENERATED = 4  # of them, with a tree at every step

MEASURED, TWICE = "measured", "2 d"  # of the target: the scale of its embeddings, and twice its hidden size
COPIED = {"layers": "the target's last"}  # as clover-2's start
BALANCED = {"normalize_hidden_states": True}
TWO, FORGETFUL = {"num_augmenting_layers": 2}, {"recall": False}
PAPER = {"learning_rate": 1e-3, "muon_learning_rate": 0.0}

# label: variant, what differs from it, what differs from its recipe. Each row has what the rows before it have.
STEPS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "clover-2, paper": ("clover-2", {}, PAPER),
    "+ embeddings of size 1": ("clover-2", {"embedding_scale": MEASURED}, PAPER),
    "+ states after the final norm": ("clover-2", {**BALANCED, **COPIED}, PAPER),
    "+ layers that start fresh": ("clover-2", BALANCED, PAPER),
    "+ tokens by the input embedding": ("clover-2", {**BALANCED, "token_embedding": "input"}, PAPER),
    "+ state and token meet in one layer": (
        "clover-2", {**BALANCED, "token_embedding": "input", "entry": "fc"}, PAPER
    ),
    "+ gated cell, for every head": (
        "clover-x", {**TWO, **FORGETFUL, "loss_type": "clover-2", "hidden_loss_weight": 10.0}, PAPER
    ),
    "+ loss without hidden states": ("clover-x", {**TWO, **FORGETFUL}, PAPER),
    "+ one layer instead of two": ("clover-x", FORGETFUL, PAPER),
    "+ a higher learning rate": ("clover-x", FORGETFUL, {"learning_rate": 3e-3, "muon_learning_rate": 0.0}),
    "Muon for the matrices": ("clover-x", FORGETFUL, {"muon_learning_rate": 0.02, "weight_decay": 0.0}),
    "+ its decay, larger steps in a short run": ("clover-x", FORGETFUL, {}),
    "+ recall = clover-x": ("clover-x", {}, {}),
}  # fmt: skip
ALONE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "clover-x: layers copied": ("clover-x", COPIED, {}),
    "clover-x: tokens by the lm_head": ("clover-x", {"token_embedding": "lm_head"}, {}),
    "clover-x: two layers": ("clover-x", TWO, {}),
    "clover-x: Attention Decoder": ("clover-x", {"decoder": "attention"}, {}),
    "clover-x: no token for head 0": ("clover-x", {"decoder_position": "before", "output_projector": "fc"}, {}),
    "clover-x: cell of width 2 d": ("clover-x", {"decoder_width": TWICE}, {}),
    "clover-x: acceptance loss": ("clover-x", {"loss_type": "acceptance"}, {}),
    "clover-x: hidden states, weight 10": ("clover-x", {"loss_type": "clover-2", "hidden_loss_weight": 10.0}, {}),
    "clover-x: eight heads trained": ("clover-x", {"num_heads": 8}, {}),
    "clover-x: each head counts half the last": ("clover-x", {}, {"loss_decay": 0.5}),
    "clover-x: each head counts in full": ("clover-x", {}, {"loss_decay": 1.0}),
    "clover-x: Muon at 0.02": ("clover-x", {}, {"muon_learning_rate": 0.02}),
    "clover-x: Muon at 0.08": ("clover-x", {}, {"muon_learning_rate": 0.08}),
    "clover-x: no decay": ("clover-x", {}, {"weight_decay": 0.0}),
}
ROWS = {**STEPS, **ALONE}
DEFAULTS = {
    **TRAINING, "tokens": 100_000, "batch_size": 4, "nodes": (16,), "draft_vocab_size": 0, "questions": None,
    "per_category": 1, "rows": tuple(ROWS),
}  # fmt: skip
TOY = {**TOY_TRAINING, "tokens": 120, "nodes": (4,)}

# ---------------------------------------------------------------------- what is measured on


@dataclass
class Exam:
    """What all rows are measured on."""

    target: PreTrainedModel
    texts: torch.Tensor  # [N, T], for chains
    start: int  # of each of them, a prompt
    every: int  # how many places of them are one place that is looked at
    questions: list[tuple[str, list[int]]]  # category and prompt, for tokens per forward
    options: dict[str, Any]  # of `generate`

    def chain(self, heads: CloverHeads) -> list[float]:
        """How often the first, the first two, ... of a chain of the heads' best guesses all come true."""
        depth = min(DEPTH, heads.config.draft_depth)
        return chain_by_depth(heads, self.target, self.texts, self.start, depth, self.every)

    def tokens_per_forward(self, heads: CloverHeads, nodes: int) -> float:
        """With a tree of `nodes` at every step, and no copies from the text."""
        heads.config.draft_copies = 0
        options = dict(assistant_model=heads, num_assistant_tokens=nodes, **self.options)
        return ask(self.target, self.questions, CONTINUED, **options).tokens_per_forward


def prepare(args: argparse.Namespace, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: Data) -> Exam:
    if args.questions:
        length = min(args.length, ROW)
        questions = read_questions(args.questions, tokenizer, args.per_category)
        return Exam(target, full_rows(data.test, length), length // 4, EVERY, questions, {})
    texts = greedy_texts(target, data, PROMPTS if not args.toy else 2)
    start = texts.shape[1] - CONTINUED
    prompts = [("", ids[:start]) for ids in texts[:GENERATED].tolist()]
    return Exam(target, texts, start, 1, prompts, {"eos_token_id": None})


@torch.no_grad()
def greedy_texts(target: PreTrainedModel, data: Data, count: int) -> torch.Tensor:
    """Texts [N, T] of which the target wrote the last `CONTINUED` tokens."""
    starts = [ids[:PROMPT] for ids in data.test["input_ids"]]
    width = min(map(len, starts))
    prompts = torch.tensor([ids[:width] for ids in starts[:count]], device=target.device)  # [N, prompt]
    return target.generate(
        input_ids=prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=CONTINUED, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip


@torch.no_grad()
def draft_milliseconds(
    target: PreTrainedModel, labels: Sequence[str], ids: int | None, nodes: int, repeats: int
) -> dict[str, float]:
    """Of a step that takes in three tokens and drafts a tree among so many `ids`, for heads of every row, all rows in
    turn: how long it takes depends on what the heads are, not on what they have learned."""
    size = target.config.get_text_config(decoder=True).hidden_size
    drafters, seconds = {}, {label: [] for label in labels}

    def take_in(drafter: CloverDrafter, start: int, count: int) -> None:
        hidden = torch.randn(1, count, size, dtype=target.dtype, device=target.device)
        tokens = torch.ones(1, count, dtype=torch.long, device=target.device)
        drafter.extend(hidden, tokens, start + torch.arange(count, device=target.device)[None], [count])

    for label in labels:
        variant, fields, _ = ROWS[label]
        heads = make_heads(target, variant, fields | {"draft_vocab_size": ids}).eval()
        drafters[label] = heads.new_drafter(heads)
        take_in(drafters[label], 0, PROMPT)
        drafters[label].draft(nodes)
    for repeat in range(repeats):
        for label, drafter in drafters.items():
            started = time.perf_counter()
            take_in(drafter, PROMPT + 3 * repeat, 3)
            drafter.draft(nodes).valid.any().item()  # waits for the device
            seconds[label].append(time.perf_counter() - started)
    return {label: 1000 * statistics.median(times) for label, times in seconds.items()}


# ---------------------------------------------------------------------- a row


def fields_of(target: PreTrainedModel, fields: dict[str, Any]) -> dict[str, Any]:
    size = target.config.get_text_config(decoder=True).hidden_size
    known = {MEASURED: lambda: embedding_scale(target.get_output_embeddings().weight), TWICE: lambda: 2 * size}
    return {name: known[value]() if value in known else value for name, value in fields.items() if name not in COPIED}


def make_heads(target: PreTrainedModel, variant: str, fields: dict[str, Any]) -> CloverHeads:
    heads = CloverHeads.from_target(target, variant, **fields_of(target, fields))
    if fields.keys() & COPIED.keys():
        LastLayer(target).copy_into(heads)
    return heads


def train_row(
    args: argparse.Namespace, exam: Exam, tokenizer: PreTrainedTokenizerBase, data: Data, label: str
) -> dict[str, Any]:
    target = exam.target
    variant, fields, recipe = ROWS[label]
    steps = math.ceil(args.tokens / (args.batch_size * data.mean_length))
    needed = data.train.select(range(min(len(data.train), steps * args.batch_size)))
    set_seed(args.seed)
    trainer = CloverTrainer(
        model=make_heads(target, variant, fields),
        teacher_model=target,
        args=training_config(
            args.work / "trainer",
            target,
            max_steps=steps,
            per_device_train_batch_size=args.batch_size,
            max_length=args.length,
            draft_vocab_size=args.draft_vocab_size or None,
            precompute_targets=True,
            precompute_dir=str(data.folder / f"states-{len(needed)}"),
            seed=args.seed,
            **recipe,
        ),
        train_dataset=needed,
        processing_class=tokenizer,
    )
    trainer.remove_callback(ProgressCallback)
    started = time.process_time()
    trainer.train()
    seconds = time.process_time() - started
    heads = copy.deepcopy(trainer.heads).to(target.dtype).bind(target).eval()
    shares = exam.chain(heads)
    return {
        "heads": label,
        "variant": variant,
        "changed": fields,
        "recipe": {name: getattr(trainer.args, name) for name in ("learning_rate", "muon_learning_rate", "loss_type")},
        "steps": steps,
        "parameters": sum(parameter.numel() for parameter in heads.parameters()),
        "training_cpu_seconds": seconds,
        "chain": shares,
        "chain_of_5": sum(shares[:5]),
        "chain_of_8": sum(shares) if len(shares) == DEPTH else None,
        "tokens_per_forward": exam.tokens_per_forward(heads, args.nodes[0]),
    }


def measured_row(args: argparse.Namespace, label: str, key: str, *rest: Any) -> dict[str, Any]:
    """From the folder of what was measured before, where it is there."""
    name = "".join(c if c.isalnum() else "-" for c in label)
    path = args.work / "ablation" / key / f"{name}.json"
    if not path.exists():
        row = train_row(args, *rest, label)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(__doc__, argv, DEFAULTS, TOY)
    target, tokenizer = load_target(args)
    data = load_data(args, target, tokenizer)
    exam = prepare(args, target, tokenizer, data)
    key = f"{data.folder.name}-{args.tokens}-{args.batch_size}-{args.draft_vocab_size}-{args.seed}-{args.nodes[0]}"
    key += f"-{Path(args.questions).stem}-{args.per_category}" if args.questions else ""
    rows = []
    for number, label in enumerate(args.rows, 1):
        print(f"{number}/{len(args.rows)} {label}", flush=True)
        rows.append(measured_row(args, label, key, exam, tokenizer, data))
    ids = args.draft_vocab_size or None
    times = draft_milliseconds(target, args.rows, ids, args.nodes[0], repeats=3 if args.toy else 100)
    rows = [{**row, "draft_ms": times[row["heads"]]} for row in rows]
    panels = [
        panel(
            "bars",
            title,
            "",
            "right tokens in a chain of five",
            [line("chain length", [(row["heads"], row["chain_of_5"]) for row in rows if row["heads"] in labels])],
        )
        for title, about, labels in (
            ("From clover-2 to clover-x, one thing after another", STEPS, STEPS),
            ("clover-x with one thing changed", ALONE, [list(STEPS)[-1], *ALONE]),
        )
        if any(row["heads"] in about for row in rows)
    ]
    table = [
        {
            "heads": row["heads"],
            "head 0": row["chain"][0],
            "chain of 5": row["chain_of_5"],
            "chain of 8": row["chain_of_8"],
            "tokens per forward": row["tokens_per_forward"],
            "draft ms": row["draft_ms"],
            "parameters": row["parameters"],
        }
        for row in rows
    ]
    title = "What each ingredient of clover-x brings"
    return finish(args, target, __doc__, rows, title, panels, table, script=__file__, data=data.about)


if __name__ == "__main__":
    main()
