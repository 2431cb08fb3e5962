"""Does the automatic budget draft where drafting pays, and rest where it does not?

A clock cannot tell: what a budget loses is a few percent, and a machine wanders as much. So the heads draft once at
every place of answers that the target has given, and the real budget then goes through these drafts on machines that
are simulated, where a forward and a draft take what they are said to take, many times over: the questions in another
order, and other noise, each time. Figures are speedups over plain steps through the same batches, prompts not counted;
a batch of one row has as many tokens in a plain step's time.

    python examples/experiments/resting.py --target examples/smollm2/target --heads examples/smollm2/heads \\
        --questions spec_bench_dev.jsonl
"""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from common import PLAIN, STAND_IN, finish, line, load_heads, load_target, panel, parse
from drafters import along, ask, read_questions
from transformers import PreTrainedModel, set_seed

from hf_clover import CloverHeads
from hf_clover.decoding.budget.automatic import AutomaticBudget, Experience
from hf_clover.decoding.budget.fixed import Budget
from hf_clover.decoding.budget.settings import SIZES
from hf_clover.decoding.call import Dice, random_state
from hf_clover.decoding.draft.copies import Copies, path_tensors
from hf_clover.decoding.draft.foresight import Foresight, FromDice
from hf_clover.decoding.draft.session import DROP_BELOW
from hf_clover.decoding.tree import Tree, root_only, with_path
from hf_clover.measure.prompts import load_prompts
from hf_clover.origins.from_target import COPIES

DEFAULTS = dict(
    heads=str(STAND_IN / "heads"),
    questions=None,
    per_category=1,
    num_prompts=12,
    max_new_tokens=32,
    temperature=0.0,
    rows=1,
    repeats=10,
)
TOY = dict(num_prompts=2, max_new_tokens=8, repeats=2)
DRAFTED, NOISE = 23, 0.04  # nodes, of a time in logarithms
FIXED = (1, 2, 3, 5, 7)
# Nodes -> plain steps that a forward over them takes, and a draft of them; between, it grows evenly.
MACHINES = {
    "packed, AVX-512": (
        {0: 1.0, 1: 1.14, 2: 1.0, 5: 0.99, 7: 1.15, 11: 1.25, 15: 1.4, 23: 1.65, 63: 2.9},
        {1: 0.09, 2: 0.12, 5: 0.15, 7: 0.17, 11: 0.18, 15: 0.22, 23: 0.23, 63: 0.4},
    ),
    "packed, AVX2": (
        {0: 1.0, 1: 1.2, 3: 1.2, 5: 1.3, 7: 1.4, 11: 1.65, 15: 1.85, 23: 2.3, 63: 4.0},
        {1: 0.12, 2: 0.16, 5: 0.2, 11: 0.24, 15: 0.28, 23: 0.3, 63: 0.5},
    ),
    "as it is, AVX-512": (
        {0: 1.0, 1: 1.35, 5: 1.45, 7: 1.5, 11: 1.7, 15: 1.9, 23: 2.3, 63: 4.0},
        {1: 0.07, 2: 0.09, 5: 0.12, 11: 0.14, 15: 0.17, 23: 0.18, 63: 0.3},
    ),
    "as it is, AVX2": (
        {0: 1.0, 1: 1.5, 2: 1.65, 5: 1.78, 7: 1.85, 11: 1.95, 15: 2.07, 23: 2.3, 31: 2.9, 63: 4.5},
        {1: 0.16, 2: 0.18, 5: 0.22, 7: 0.25, 11: 0.27, 15: 0.3, 23: 0.33, 63: 0.5},
    ),
}


@dataclass
class Recorded:
    """An answer, and what heads draft at each of its places."""

    ids: list[int]  # with the prompt
    start: int  # tokens of the prompt
    trees: list[Tree]  # below the answer's first token, its second, ...

    def draft(self, given: int) -> Tree:
        """Below the answer's token after the first `given`; an answer that is over goes on with its last draft."""
        return self.trees[min(given, len(self.trees) - 1)]


def record(
    target: PreTrainedModel, heads: CloverHeads, texts: Sequence[tuple[list[int], int]], temperature: float
) -> list[Recorded]:
    """`texts` as `ask` was given them: token ids each, and how many of them are the prompt."""
    found = []
    for number, (ids, start) in enumerate(texts):
        row = torch.tensor([ids], device=target.device)  # [1, L]
        dice = dice_of(target, number, start) if temperature else None
        trees = []
        for place, drafter in along(heads, target, row, range(start, len(ids) - 1)):
            trees.append(drafter.draft(DRAFTED, foresight=foreseen(dice, place + 1, heads, temperature)))
        found.append(Recorded(ids, start, trees))
    return found


def dice_of(target: PreTrainedModel, number: int, start: int) -> Dice:
    """What `ask` drew for its question of this number, which has `start` tokens."""
    set_seed(number)
    dice = Dice(batch_size=1)
    dice.like = torch.empty(1, target.config.get_text_config().vocab_size, device=target.device)
    dice.states[start] = random_state(target.device)
    return dice


def foreseen(dice: Dice | None, length: int, heads: CloverHeads, temperature: float) -> Foresight | None:
    """What is known of the tokens behind a text of `length` tokens."""
    if dice is None:
        return None
    dice.at(length)
    dice.forget_before(length)
    return FromDice(dice, [0], [length], heads.config.draft_depth, temperature)


def between(costs: dict[int, float], nodes: int) -> float:
    """What `nodes` cost; beyond the last that is known, time goes on as between the last two."""
    known = list(costs.items())
    at = next((place for place, (most, _) in enumerate(known[1:], 1) if nodes <= most), len(known) - 1)
    (low, its), (high, theirs) = known[at - 1], known[at]
    return its + (theirs - its) * (nodes - low) / (high - low)


class Machine:
    def __init__(self, name: str, seed: int) -> None:
        self.forwards, self.drafts = MACHINES[name]
        self.rng = random.Random(seed)
        self.seconds, self.tokens, self.steps, self.drafted = 0.0, 0, 0, 0

    def took(self, costs: dict[int, float], nodes: int) -> float:
        return between(costs, nodes) * math.exp(self.rng.gauss(0, NOISE))

    def answer(self, answers: Sequence[Recorded], budget: Budget) -> None:
        """The loop of `hf_clover/decoding/loop.py`, with drafts that are there and a target that has answered. A batch
        takes as long as as many tokens of one row."""
        given = [0] * len(answers)  # tokens of each row behind its answer's first
        widest = max(answer.start for answer in answers)  # prompts are padded to one width
        written, running = [answer.ids[: answer.start + 1] for answer in answers], list(range(len(answers)))
        copies = Copies(written, COPIES)
        while running:
            copies.extend()
            tokens, joint = path_tensors(copies.paths(running))  # [rows, k]
            texts = [answers[row].ids[answers[row].start + given[row] :] for row in running]  # from the last token on
            rows = [place for place, text in enumerate(texts) if len(text) > 1]  # of those running, the unfinished
            lengths = [widest + given[running[place]] + 1 for place in rows]
            nodes, copied = budget.ask(lengths, copies=joint[rows] if joint.shape[1] else None)
            tree = root_only(torch.tensor([text[0] for text in texts]))
            if nodes:
                tree = in_rows([answers[row].draft(given[row]).first(min(nodes, DRAFTED)) for row in running])
            if copied or (joint.shape[1] and nodes):
                tree = with_path(tree, tokens, joint, copied or tree.size - 1)
            tree = budget.cut(tree, rows, lengths)
            walks = [walked(tree, place, texts[place][1:]) for place in rows]
            draft = self.took(self.drafts, nodes * len(running)) if nodes else 0.0
            forward = self.took(self.forwards, tree.size * len(running) - 1)
            budget.learn(tree, walks, draft, forward)
            going = []
            for place, path in zip(rows, walks, strict=True):
                row, text = running[place], texts[place]
                written[row] += text[1 : 1 + len(path)]
                given[row] += len(path)
                going += [row] if len(text) > 1 + len(path) else []
            self.seconds, self.tokens = self.seconds + draft + forward, self.tokens + sum(map(len, walks))
            self.steps, self.drafted = self.steps + 1, self.drafted + (nodes > 0)
            if len(going) <= DROP_BELOW * len(running):
                running = going


def in_rows(trees: Sequence[Tree]) -> Tree:
    """Trees of one row each, of the same size, as one."""
    values = {f.name: [getattr(tree, f.name) for tree in trees] for f in fields(Tree)}
    return Tree(**{name: max(of) if name == "max_depth" else torch.cat(of) for name, of in values.items()})


def walked(tree: Tree, row: int, following: Sequence[int]) -> list[int]:
    """The nodes of the tree of `row` that the text goes through, no further than its last token."""
    path, tokens = [0], tree.tokens[row].tolist()
    below = {(parent, tokens[node]): node for node, parent in enumerate(tree.parents[row].tolist()) if node}
    for token in following[:-1]:
        node = below.get((path[-1], token))
        if node is None or not bool(tree.valid[row, node]):
            break
        path.append(node)
    return path


def run(name: str, answers: Sequence[Recorded], seed: int, nodes: int | None = None, rows: int = 1) -> Machine:
    """All answers in batches of `rows`, the last of which begins again with the first."""
    machine, experience, order = Machine(name, seed), Experience(), list(answers)
    machine.rng.shuffle(order)
    for first in range(0, len(order), rows):
        budget = AutomaticBudget(experience, SIZES[-1], None, None) if nodes is None else Budget(nodes)
        machine.answer([order[place % len(order)] for place in range(first, first + rows)], budget)
    return machine


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(__doc__, argv, DEFAULTS, TOY)
    target, tokenizer = load_target(args)
    asked = read_questions(args.questions, tokenizer, args.per_category)
    asked = asked or [("", prompt) for prompt in load_prompts("stand-in", tokenizer, args.num_prompts)]
    answered = ask(target, asked, args.max_new_tokens, args.temperature).texts
    texts = [(ids, len(prompt)) for ids, (_, prompt) in zip(answered, asked, strict=True)]
    torch.manual_seed(args.seed)
    kinds = {"trained": load_heads(args, target), "untrained": CloverHeads.from_target(target)}
    rows = []
    for kind, heads in kinds.items():
        answers = record(target, heads, texts, args.temperature)
        for name in MACHINES:
            plain, runs = (
                [run(name, answers, args.seed + repeat, nodes, args.rows) for repeat in range(args.repeats)]
                for nodes in (0, None)
            )
            rates = [its.seconds / one.seconds for one, its in zip(runs, plain, strict=True)]
            fixed = {nodes: run(name, answers, args.seed, nodes, args.rows) for nodes in FIXED}
            rows.append(
                {
                    "heads": kind,
                    "machine": name,
                    "automatic": statistics.mean(rates),
                    "automatic_range": [min(rates), max(rates)],
                    "drafts": statistics.mean(one.drafted / one.steps for one in runs),
                    **{f"{nodes} nodes": plain[0].seconds / one.seconds for nodes, one in fixed.items()},
                }
            )
    series = [
        line(kind, [(r["machine"], (r["automatic"], *r["automatic_range"])) for r in rows if r["heads"] == kind])
        for kind in kinds
    ]
    panels = [panel("bars", "automatic size", "", "times plain steps", series, reference=PLAIN)]
    table = [{name: value for name, value in row.items() if name != "automatic_range"} for row in rows]
    return finish(args, target, __doc__, rows, "Where the budget rests", panels, table, __file__)


if __name__ == "__main__":
    main()
