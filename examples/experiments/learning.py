"""How fast do draft heads learn, and what are they worth in tokens per second, ours beside those of other papers?

Three training budgets (1 : 10 : 100) and three seeds, on the stand-in. Every drafter learns from the same samples of
the target's own text in the same order, and drafts through the same tree, budget, verification and walk. Each budget
is a run of its own with its own schedule, not a look at a longer run on its way, since the rate has come down when a
run ends. Ours takes the trainer's defaults, and clover-2 and clover their papers'; each of the others, these two once
more among them, the optimizer and rate that were best for it in short runs, measured on other samples.

Every finished run is written down at once, and a run that was stopped goes on where it was.

    python examples/experiments/learning.py

On a target of your own, with its own answers to learn from and questions to be measured on, by category:

    python examples/experiments/learning.py --targets TARGET --data ANSWERS.jsonl --questions QUESTIONS.jsonl \\
        --draft-vocab-size 8192 --length 512 --batch-size 2 --budgets 100000 1000000 3000000 --output RESULTS

These figures need no clock. Then, on a machine that does nothing else, the same command with `--measure` takes the
times of whole conversations, with all saved heads and prompt lookup side by side.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from common import HERE, STAND_IN, load_target
from continuations import Data, load_data
from drafters import (
    DEPTH,
    DRAFTERS,
    EVERY,
    OURS,
    ROW,
    Asked,
    Classroom,
    Drafter,
    ask,
    chain_by_depth,
    describe,
    full_rows,
    greedy,
    places,
    read_questions,
)
from ledger import Ledger, show

from hf_clover.measure.benchmark import benchmark, parse_method, plain, with_heads, write
from hf_clover.measure.plots import plot
from hf_clover.measure.prompts import load_prompts, load_questions
from hf_clover.network.modeling_heads import DraftHeads
from hf_clover.network.packing import pack_for_cpu
from hf_clover.network.target_parts import fingerprint

WAYS = {  # in which questions are answered: the tree's shape, its nodes, and the temperature
    "chain of 7": ("chain", 7, 0.0),
    "tree of 16": (None, 16, 0.0),
    "chain of 7, sampled": ("chain", 7, 1.0),
    "tree of 16, sampled": (None, 16, 1.0),
}
TUNING_SEED = 100
DEFAULTS = dict(
    targets=[str(STAND_IN / "target")],
    drafters=list(DRAFTERS),
    budgets=[10_000, 100_000, 1_000_000],
    seeds=[0, 1, 2],
    rates=[3e-3, 1e-2],
    muon_rates=[0.02],
    tuning_tokens=20_000,
    samples=1500,
    test_samples=96,
    length=256,
    batch_size=1,
    nodes=[4, 16, 60],
    batch_sizes=[1, 4, 16],
    temperatures=[0.0, 1.0],
    num_prompts=16,
    max_new_tokens=64,
    repeats=3,
    data=None,
    questions=None,
    per_category=1,
    draft_vocab_size=None,
    save_steps=500,
)
TOY = dict(
    budgets=[64, 128], seeds=[0], rates=[1e-3, 1e-2], tuning_tokens=64, samples=8, test_samples=6, length=32,
    nodes=[4], batch_sizes=[1, 2], num_prompts=2, max_new_tokens=8, repeats=1,
)  # fmt: skip
KEY = ("target", "drafter", "tokens", "seed")


# ---------------------------------------------------------------------- one target


class Course:
    """Everything that is done with one target."""

    def __init__(self, args: argparse.Namespace, folder: str, ledger: Ledger) -> None:
        self.args, self.ledger = args, ledger
        self.target, self.tokenizer = load_target(argparse.Namespace(target=folder))
        self.name = Path(folder).parent.name if Path(folder).name == "target" else Path(folder).name
        self.work = args.work / "learning" / fingerprint(self.target.get_output_embeddings().weight)[:8]
        self.questions = read_questions(args.questions, self.tokenizer, args.per_category)
        self.prompts = [] if self.questions else load_prompts("stand-in", self.tokenizer, args.num_prompts)
        self.length = min(args.length, ROW)  # of held-out rows
        self.about = describe(Path(folder))

    def read_data(self) -> None:
        """The text to learn from and to measure on."""
        self.data: Data = load_data(self.args, self.target, self.tokenizer)
        rows = full_rows(self.data.test, self.length)
        third = max(1, len(rows) // 3)
        self.to_tune_on, self.to_measure_on = rows[:third], rows[third:]

    def prepare(self) -> None:
        """What training and measuring need: the text, and what plain generate says."""
        args = self.args
        self.read_data()
        most = max(*args.budgets, 0 if self.needs_no_tuning else args.tuning_tokens)
        sizes = self.data, args.length, args.batch_size, self.work, most
        how = args.draft_vocab_size, args.save_steps, args.bf16
        self.classroom = Classroom(self.target, self.tokenizer, *sizes, *how)
        if self.questions:
            temperatures = dict.fromkeys(temperature for _, _, temperature in WAYS.values())
            self.texts = {t: self.ask(t).texts for t in temperatures}
        else:
            self.texts, _ = greedy(self.target, self.prompts, args.max_new_tokens)
        if not self.ledger.find("targets", target=self.name):
            row = {
                "target": self.name,
                "model_type": self.target.config.model_type,
                "layers": self.target.config.num_hidden_layers,
                "hidden_size": self.target.config.hidden_size,
                "parameters": sum(parameter.numel() for parameter in self.target.parameters()),
                "held_out_loss": self.about.get("held_out_loss"),
                "seconds_per_token": self.classroom.seconds_per_token(),
                "test_places": len(self.to_measure_on) * len(self.places),
            }
            self.ledger.add("targets", row, settings_of(args))

    @property
    def start(self) -> int:
        return self.length // 4  # of each sample, a prompt

    @property
    def places(self) -> range:
        return places(self.length, self.start, DEPTH, EVERY)

    @property
    def needs_no_tuning(self) -> bool:
        rates = self.args.rates, self.args.muon_rates
        return all(len(DRAFTERS[name].optimizers(*rates)) == 1 for name in self.args.drafters)

    def folder_of(self, drafter: str, tokens: int, seed: int) -> Path:
        return self.work / f"{drafter.replace(', ', '-')}-{tokens}-{seed}"

    def chain(self, heads: Any, rows: torch.Tensor) -> list[float]:
        return chain_by_depth(heads, self.target, rows, self.start, DEPTH, EVERY)

    # ------------------------------------------------------------------ training

    def tuned(self, drafter: Drafter) -> tuple[str, dict[str, Any]]:
        """The optimizer that gave the longest chain in short runs of another seed, measured on other samples."""
        args = self.args
        options = drafter.optimizers(args.rates, args.muon_rates)
        if len(options) == 1:
            return next(iter(options.items()))
        chains = {}
        for name, arguments in options.items():
            key = dict(target=self.name, drafter=drafter.name, optimizer=name)
            if not self.ledger.find("tuning", **key):
                try:
                    trained = self.classroom.train(drafter, args.tuning_tokens, TUNING_SEED, arguments)
                    chain = sum(self.chain(trained.heads, self.to_tune_on))
                except FloatingPointError:  # it blew up
                    chain = 0.0
                row = {**key, "tokens": args.tuning_tokens, "chain": chain}
                self.ledger.add("tuning", row, settings_of(args))
            chains[name] = self.ledger.find("tuning", **key)[0]["chain"]
        best = max(chains, key=chains.__getitem__)
        return best, options[best]

    def run(self, drafter: Drafter, tokens: int, seed: int) -> None:
        optimizer, arguments = self.tuned(drafter)
        trained = self.classroom.train(drafter, tokens, seed, arguments)
        heads = trained.heads.to(self.target.dtype)
        heads.save_pretrained(self.folder_of(drafter.name, tokens, seed))
        by_depth = self.chain(heads, self.to_measure_on)
        row = {
            **dict(zip(KEY, (self.name, drafter.name, tokens, seed))),
            "optimizer": optimizer,
            "steps": trained.steps,
            "parameters": sum(parameter.numel() for parameter in heads.parameters()),
            "training_seconds": trained.seconds,
            "training_memory_mib": trained.memory_mib,
            "chain": sum(by_depth),
            "chain_by_depth": by_depth,
            **self.generated(heads),
        }
        self.ledger.add("rows", row, settings_of(self.args))

    def generated(self, heads: DraftHeads) -> dict[str, Any]:
        """Tokens per forward in the real `generate`, on the questions where there are any."""
        per_forward, identical = {}, True
        if not self.questions:
            for nodes in self.args.nodes:
                options = dict(assistant_model=heads, num_assistant_tokens=nodes)
                texts, per_forward[str(nodes)] = greedy(self.target, self.prompts, self.args.max_new_tokens, **options)
                identical = identical and texts == self.texts
            return {"tokens_per_forward": per_forward, "identical": identical}
        by_category: dict[str, dict[str, float]] = {category: {} for category, _ in self.questions}
        accepted = {}
        for way, (shape, nodes, temperature) in WAYS.items():
            options = dict(assistant_model=heads, num_assistant_tokens=nodes)
            with mock.patch.object(heads.config, "draft_tree", shape or heads.config.draft_tree):
                asked = self.ask(temperature, **options)
            per_forward[way], accepted[way] = asked.tokens_per_forward, asked.accepted
            for category, worth in asked.by_category.items():
                by_category[category][way] = worth
            identical = identical and asked.texts == self.texts[temperature]
        return {
            "tokens_per_forward": per_forward,
            "by_category": by_category,
            "accepted_by_position": {way: of for way, of in accepted.items() if way.startswith("chain")},
            "identical": identical,
        }

    def ask(self, temperature: float, **options: Any) -> Asked:
        """A GPU answers the questions of a category at once."""
        at_once = self.target.device.type == "cuda"
        return ask(self.target, self.questions, self.args.max_new_tokens, temperature, at_once, **options)

    # ------------------------------------------------------------------ times

    def measure(self, tokens: int, seed: int) -> bool:
        """`hf-clover benchmark`'s figures of whole conversations, by category, in a file of their own: all drafters
        that have saved heads for this, at their automatic budget, and prompt lookup beside them. On a CPU the weights
        are packed, for all alike. Whether there were any heads."""
        args, path = self.args, self.args.output / f"learning-by-category-{tokens}-{seed}.json"
        folders = {name: self.folder_of(name, tokens, seed) for name in args.drafters}
        known = {name: folder for name, folder in folders.items() if (folder / "model.safetensors").exists()}
        if not known:
            return False
        heads = {name: DRAFTERS[name].load(folder, self.target) for name, folder in known.items()}
        if self.target.device.type == "cpu":
            pack_for_cpu(self.target)
        methods = [plain(), *(with_heads(of, name) for name, of in heads.items())]
        result = benchmark(
            self.target,
            self.tokenizer,
            [*methods, parse_method("prompt-lookup", self.target)],
            load_questions(args.questions, self.tokenizer, per_category=args.per_category),
            prompt_set=Path(args.questions).name,
            batch_sizes=args.batch_sizes,
            temperatures=args.temperatures,
            max_new_tokens=args.max_new_tokens,
            repeats=args.repeats,
            report=lambda so_far: write(so_far, path),
        )
        for picture in plot(write(result, path)):
            print(picture)
        return True


# ---------------------------------------------------------------------- the order


def plan(args: argparse.Namespace) -> Iterator[tuple[str, Drafter, int, int]]:
    """What costs little first: all but the largest budget, target by target and seed by seed; then the largest."""
    largest = max(args.budgets)
    for budgets in ([tokens for tokens in args.budgets if tokens != largest], [largest]):
        for target in args.targets:
            for seed in args.seeds:
                for tokens in budgets:
                    for name in args.drafters:
                        yield target, DRAFTERS[name], tokens, seed


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    left_out = ("output", "work", "measure")
    settings = {name: value for name, value in vars(args).items() if name not in left_out}
    for name in ("data", "questions"):
        settings[name] = settings[name] and Path(settings[name]).name
    return settings | {"targets": ["/".join(Path(target).parts[-2:]) for target in args.targets]}


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    ledger = Ledger(args.output / "learning.json")
    if args.measure:
        measure(args, ledger)
        return
    ledger.check(args)
    courses: dict[str, Course] = {}
    work = list(plan(args))
    for number, (target, drafter, tokens, seed) in enumerate(work, 1):
        if target not in courses:
            courses[target] = Course(args, target, ledger)
            courses[target].prepare()
        course = courses[target]
        key = dict(zip(KEY, (course.name, drafter.name, tokens, seed)))
        if not ledger.find("rows", **key):
            print(f"{number}/{len(work)} {course.name}: {drafter.name}, {tokens:,} tokens, seed {seed}")
            course.run(drafter, tokens, seed)
    ledger.read()
    ledger.save(settings_of(args))
    show(ledger)
    if ledger.parts["rows"]:
        for picture in plot(ledger.path):
            print(picture)


def measure(args: argparse.Namespace, ledger: Ledger) -> None:
    if args.questions is None:
        raise ValueError("`--measure` takes the times of whole conversations: it needs `--questions`.")
    found = False
    for target in args.targets:
        course = Course(args, target, ledger)
        for seed in args.seeds:
            for tokens in args.budgets:
                found = course.measure(tokens, seed) or found
    if not found:
        raise ValueError(
            "`--measure`: there are no heads of these targets, drafters, budgets and seeds in `--work`. Run the same "
            "command without it first."
        )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", help="folders or ids; their text is Python's standard library")
    parser.add_argument("--drafters", nargs="+", choices=list(DRAFTERS), metavar="DRAFTER", help=" ".join(DRAFTERS))
    parser.add_argument("--budgets", nargs="+", type=int, help="tokens to train on")
    parser.add_argument("--seeds", nargs="+", type=int, help="of the heads and of the order of samples")
    parser.add_argument(
        "--rates", nargs="*", type=float, help=f"AdamW's, to choose from, for all but {OURS}, clover-2 and clover"
    )
    parser.add_argument("--muon-rates", nargs="*", type=float, help="Muon's likewise, of a run of 400 steps or more")
    parser.add_argument("--tuning-tokens", type=int, help="in each of the runs that choose")
    parser.add_argument(
        "--data", help="to learn from, in place of continuations: a .jsonl or .parquet file, or a dataset"
    )
    parser.add_argument("--questions", help="to be measured on: a .jsonl file of `turns` with a `category`")
    parser.add_argument("--per-category", type=int, help="questions of each category")
    parser.add_argument("--draft-vocab-size", type=int, help="ids that all drafters score, the data's most frequent")
    parser.add_argument("--save-steps", type=int, help="a run that was stopped goes on after a multiple of these")
    parser.add_argument("--bf16", action="store_true", help="let the target's pass and training compute in bfloat16")
    parser.add_argument("--samples", type=int, help="continuations to learn from; a larger budget repeats them")
    parser.add_argument("--test-samples", type=int, help="held-out continuations to measure chains on")
    parser.add_argument("--length", type=int, help="tokens in a sample")
    parser.add_argument("--batch-size", type=int, help="samples in a training step")
    parser.add_argument("--nodes", nargs="+", type=int, help="of the trees, without questions")
    parser.add_argument("--batch-sizes", nargs="+", type=int, help="rows generated at once, for --measure")
    parser.add_argument("--temperatures", nargs="+", type=float, help="for --measure")
    parser.add_argument("--num-prompts", type=int, help="to be measured on, without questions")
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument("--repeats", type=int, help="for --measure, of every generation")
    parser.add_argument("--measure", action="store_true", help="take the times of the heads that are there")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="where JSON and plots go")
    parser.add_argument("--work", type=Path, default=Path("runs/experiments"), help="data, states and heads")
    parser.add_argument("--toy", action="store_true", help="sizes that take seconds, to see that everything runs")
    parser.set_defaults(**DEFAULTS, seed=0)
    if parser.parse_known_args(argv)[0].toy:
        parser.set_defaults(**TOY)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
