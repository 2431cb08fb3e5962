"""As many nodes for every tree as give the most tokens per second.

Contract: `AutomaticBudget` learns two things as steps go by, and keeps them from call to call: what a step costs
(`Costs`, for each device, dtype, number of rows and doubling of the text), and how much the draft's own probabilities
are worth (`Acceptance`). Of each tree it keeps the first nodes that promise the most tokens per second; the rows that
are furthest behind count as much as all rows do. Where steps are graphs, reading a draft's probabilities would be a
second wait for the device: the size is chosen before the draft, by what trees of each size have given. Where drafts
promise less than a step without them would, the heads rest, longer each time. A new call cuts a long rest short.

Shapes: B rows, N draft nodes.
"""

import copy
import math
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from transformers import PreTrainedModel

from ...network.modeling_heads import DraftHeads
from ...network.target_parts import device_of
from ..target.memory import memory_of
from ..tree import Tree
from .acceptance import Acceptance
from .costs import DRAFT, ON_CPU, ON_DEVICE, SHORTEST_REST, SIZES, SIZES_IN_GRAPHS, START, Costs, Guess, cost_by_size
from .fixed import Budget, check_nodes

LATELY = 12  # trees: as many nodes are drafted as the largest of them had, and more where more may pay
LONGEST_REST = 128  # steps; the first of several in a row are shorter, since a text has easy stretches too
AFTER_RESTS = 5  # nodes drafted after more than two rests in a row, only to see whether it pays by now
HASTE = 0.1  # of what drafting was worth lately, the last draft's part: a few hard places are no reason to rest
HOPE = 1.03  # for a size that was never verified: it may be cheaper than it looks, and would never be tried
ALONE = 1.3  # times what drafting gave lately, from which on copies are verified without a draft
SHARE = 0.04  # of a rest's time, that the draft before it may have lost
SURE = 1.3  # drafting that is so much faster than plain steps needs no comparing, where times do not wander
PLAIN_EVERY = 64  # steps, where it does; sooner, as long as few plain steps are known
NEARLY = 0.98  # as good as the best, if it is smaller: it is cheaper to be wrong about
UNEVEN = 0.2  # of what drafts gain in a large batch, lost since some rows gain more than others and all wait
LOOK_EVERY = 4  # drafts, after which two sizes more are drafted where all that was drafted paid; at first, always
EXPLORE_EVERY = 16  # drafts, after which a size beside the best is taken, so that the costs stay known


Key = tuple[Hashable, int, int]  # what costs depend on: the mode, the rows, and how often their text has doubled


@dataclass
class Experience:
    """What was learned of one target with one set of heads."""

    costs: dict[Key, Costs] = field(default_factory=dict)
    acceptance: dict[Hashable, Acceptance] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)  # threads share what they learn


# ---------------------------------------------------------------------- automatic


class AutomaticBudget(Budget):
    def __init__(
        self, experience: Experience, ceiling: int, mode: Hashable, picking: Hashable, guess: Guess = ON_CPU
    ) -> None:
        """`mode`: what costs depend on beside rows and context; `picking`: what acceptance depends on;
        `guess`: of what trees cost, until they are seen."""
        self.experience, self.mode, self.guess = experience, mode, guess
        self.sizes_outside = [size for size in SIZES if size <= ceiling]
        self.acceptance = experience.acceptance.setdefault(picking, Acceptance())
        self.costs: Costs  # of such steps as `ask` was asked about last
        self.key: Key | None = None  # of these
        self.drafts = self.since_plain = 0
        self.in_graphs = False
        self.copied = 0  # nodes, in this step, and no others
        self.drafted = 0  # nodes, likewise
        self.replayed = 0  # tokens, likewise
        self.rest_gives = 1.0  # tokens in a plain step's time, that this step promises without a draft
        self.log_probs: torch.Tensor | None = None  # [B, N] of the tree of this step, of the rows that count

    @property
    def most_nodes(self) -> int:
        return self.sizes_outside[-1]

    @property
    def sizes(self) -> list[int]:
        every = self.sizes_outside
        return [size for size in every if size in SIZES_IN_GRAPHS or size == every[-1]] if self.in_graphs else every

    def ask(self, lengths: Sequence[int], replayed: int = 0, copies: torch.Tensor | None = None) -> tuple[int, int]:
        """A step goes without the heads where they rest, or where copies promise much more than drafting gave
        lately."""
        self.copied, self.replayed, self.rest_gives = 0, replayed, 1.0
        costs = self._look_up(len(lengths), max(lengths))
        rests, shows_costs = costs.resting > 0, self._must_be_plain(costs)
        costs.resting -= rests
        if shows_costs:
            return 0, 0
        if copies is not None:
            copied, self.rest_gives = self._without_heads(copies, lengths)
            rests = rests or (copied > 0 and self.rest_gives > ALONE * costs.advantage)
            self.copied = copied if rests else 0
        if rests:
            return 0, self.copied
        if self.in_graphs:
            return self._size_before_the_draft(costs, len(lengths)), 0
        reach = costs.reach if costs.chosen else max(START // len(lengths), 1)
        return max(size for size in self.sizes if size <= reach), 0

    def cut(self, tree: Tree, rows: Sequence[int], lengths: Sequence[int]) -> Tree:
        self.drafted, self.log_probs = 0 if self.copied else tree.size - 1, None
        if not self.drafted or self.in_graphs:
            return tree
        log_probs = tree.log_probs[:, 1:].cpu()[list(rows)]  # [rows, N]; the one wait for the draft
        if not bool((log_probs[:, 0] > -torch.inf).any()):
            self.log_probs = log_probs
            return tree  # nothing to choose from; the walk will say so
        best = self._best(log_probs, lengths)
        self.log_probs = log_probs[:, :best]
        return tree.first(best)

    def learn(self, tree: Tree, paths: Sequence[Sequence[int]], draft_seconds: float, forward_seconds: float) -> None:
        nodes = tree.size - 1
        self.since_plain += 1
        with self.experience.lock:
            if nodes and not self.copied and self.log_probs is not None:
                self.acceptance.learn(self.log_probs, paths)
            if self.in_graphs and self.drafted:
                self.acceptance.learn_sizes([size for size in self.sizes if 0 < size <= nodes], paths)
            beside_root = nodes + self.replayed
            if beside_root or self.drafted:
                self.costs.learn_tree(self.drafted, draft_seconds, beside_root, forward_seconds)
            if beside_root == 0:
                self.since_plain = 0
                self.costs.learn_plain(forward_seconds)

    def _look_up(self, rows: int, context: int) -> Costs:
        key = ((self.mode, self.in_graphs), rows, context.bit_length())
        if key != self.key:
            known = self.experience.costs
            with self.experience.lock:
                if key not in known:
                    known[key] = self._begin_with_the_nearest(key)
                if self.key is None:  # a new call: what did not pay for one text may pay for another
                    known[key].resting = min(known[key].resting, SHORTEST_REST)
            self.key, self.costs = key, known[key]
        return self.costs

    def _begin_with_the_nearest(self, key: Key) -> Costs:
        """What is known of another length of text, or of another number of rows, until more is known."""
        others = [other for other in self.experience.costs if other[0] == key[0]]

        def distance(other: Key) -> tuple[int, int]:
            return abs(other[1] - key[1]), abs(other[2] - key[2])

        nearest = min(others, key=distance, default=None)
        if nearest is None:
            return Costs()
        costs = self.experience.costs[nearest]
        return copy.deepcopy(costs) if nearest[1] == key[1] else costs.of_other_rows(nearest[1], key[1])

    def _must_be_plain(self, costs: Costs) -> bool:
        """Whether this step shall show what a plain one costs."""
        known = len(costs.plain.values)
        if known == 0:
            return True
        sure = SURE * math.exp(4 * costs.noise / known**0.5)
        return self.since_plain >= min(2 << known, PLAIN_EVERY) and costs.advantage < sure

    def _size_before_the_draft(self, costs: Costs, rows: int) -> int:
        """How many nodes give the most tokens per second, by the trees before this one; now and then one size more."""
        sizes = self.sizes
        if not sizes[-1]:
            return 0
        self.drafts += 1
        known = [size for size in sizes if size in self.acceptance.tokens]
        if not known:
            return max([size for size in sizes if size <= START // rows], default=0) or sizes[1]
        forwards, drafts = self._steps(sizes, rows)
        steps = [forward + draft for forward, draft in zip(forwards, drafts, strict=True)]
        tokens = self.acceptance.given_by(sizes)
        place = 1 + _smallest_good([t / s for t, s in zip(tokens[1:], steps[1:], strict=True)])
        costs.chosen = (*costs.chosen, sizes[place])[-LATELY:]
        if self.drafts % EXPLORE_EVERY == 0 or (len(costs.chosen) < LATELY and self.drafts % LOOK_EVERY == 0):
            return sizes[min(place + 1, len(sizes) - 1)]
        advantage = tokens[place] / steps[place] / self.rest_gives
        self._rest_or_go_on(costs, advantage, steps[place] - tokens[place] / self.rest_gives)
        return 0 if costs.resting else sizes[place]

    def _best(self, log_probs: torch.Tensor, lengths: Sequence[int]) -> int:
        """How many nodes of a tree are worth their time."""
        costs = self.costs
        drafted = int((log_probs > -torch.inf).sum(1).max())  # the rest are places that could not be filled
        sizes = [size for size in self.sizes if size <= drafted]
        within = len(sizes)
        if drafted == log_probs.shape[1]:  # two more: a size may be dearer than the one above it
            sizes += [size for size in self.sizes if size > drafted][:2]
        self.drafts += 1
        gained = self._gained(self.acceptance.expected(log_probs)[:, :drafted], lengths, sizes[-1])
        forwards, drafts = self._steps(sizes, len(lengths))
        steps = [forward + draft for forward, draft in zip(forwards, drafts, strict=True)]
        verified = {0, *(nodes - self.replayed for nodes, _, _ in list(costs.forwards))}
        hopes = [HOPE if size <= drafted and size not in verified else 1.0 for size in sizes]
        tokens = [hope * gained[size] for hope, size in zip(hopes, sizes, strict=True)]
        rates = [t / s for t, s in zip(tokens, steps, strict=True)]
        place = _smallest_good(rates[:within])  # of so many nodes, had no more been drafted
        costs.chosen = (*costs.chosen, sizes[place])[-LATELY:]
        looks = len(costs.chosen) < LATELY or self.drafts % LOOK_EVERY == 0
        may_pay = place == within - 1 and (looks or max(rates[within:], default=0.0) > max(rates[:within]))
        costs.reach = sizes[-1] if may_pay else max(1, *costs.chosen)
        self._rest_or_go_on(costs, rates[place] / self.rest_gives, steps[place] - tokens[place] / self.rest_gives)
        if self.drafts % EXPLORE_EVERY == 0:
            up = place == 0 or self.drafts // EXPLORE_EVERY % 2
            return sizes[min(place + 1, within - 1) if up else place - 1]
        paid = drafts[within - 1]  # for all that was drafted, whatever is verified of it
        return sizes[_smallest_good([t / (forward + paid) for t, forward in zip(tokens[:within], forwards)])]

    def _without_heads(self, copies: torch.Tensor, lengths: Sequence[int]) -> tuple[int, float]:
        """How many copied tokens a step without a draft verifies, and the tokens that it promises in a plain step's
        time."""
        sizes = [size for size in self.sizes if size <= copies.shape[1]]
        gained = self._gained(copies.exp(), lengths)
        forwards, _ = self._steps(sizes, len(lengths), by_heads=False)
        rates = [gained[size] / forward for size, forward in zip(sizes, forwards, strict=True)]
        place = _smallest_good(rates)
        return sizes[place], rates[place]

    def _gained(self, chances: torch.Tensor, lengths: Sequence[int], most: int = 0) -> list[float]:
        """Tokens of a step over the first 0, 1, ... nodes, which are accepted with these `chances` [rows, N]; up to
        `most` as they would go on. The call is over with its last row, while every row that ends makes the steps of
        the others cheaper; so those furthest behind count as much as all rows do."""
        shortest = min(lengths)
        last = [place for place, length in enumerate(lengths) if length == shortest]
        gains = (chances.mean(0) + chances[last].mean(0)) / 2  # [N]
        gains *= 1 - UNEVEN * (1 - 1 / len(lengths))
        return list(accumulate(_with_more(gains.tolist(), most), initial=1.0))

    def _steps(self, sizes: Sequence[int], rows: int, by_heads: bool = True) -> tuple[list[float], list[float]]:
        """Plain steps that a forward over each of `sizes` nodes takes, and its draft where it is the heads'."""
        costs, beside_root = self.costs, [size + self.replayed for size in sizes]
        level, growth = self.guess.of(rows)
        forwards, costs.noise = cost_by_size(costs.in_plain_steps(costs.forwards), beside_root, level, growth)
        drafts = [0.0] * len(sizes)
        if by_heads:
            drafts, _ = cost_by_size(costs.in_plain_steps(costs.drafts), sizes, DRAFT, growth)
        # No forward takes less than one over a single token: where it seems so, the machine was slower for that one.
        slower = min([1.0, *forwards[1:]])
        if not self.replayed:
            forwards[0] = slower
        return [forward / slower for forward in forwards], [draft / slower for draft in drafts]

    def _rest_or_go_on(self, costs: Costs, advantage: float, lost: float) -> None:
        """`advantage` of this draft over a rest; `lost`: plain steps that it takes longer than a rest for as many
        tokens."""
        haste = max(HASTE, 1 / (4 + len(costs.drafts)))
        costs.advantage += haste * (advantage - costs.advantage)
        if costs.advantage >= 1:
            costs.rest = SHORTEST_REST
        if advantage >= 1:
            costs.rests = 0
        elif costs.advantage < 1:  # a draft that pays is followed by another
            costs.rests += 1
            longest = min(SHORTEST_REST << costs.rests, LONGEST_REST)
            costs.resting = min(max(costs.rest, int(lost / SHARE)), longest)
            costs.rest = min(2 * costs.resting, longest)
            if costs.rests > 2:
                costs.reach, costs.chosen = AFTER_RESTS, (AFTER_RESTS,)
            self.acceptance.forget()


def _smallest_good(rates: Sequence[float]) -> int:
    """The place of the first that is about as good as the best."""
    return next(place for place, rate in enumerate(rates) if rate >= NEARLY * max(rates))


def _with_more(gains: list[float], size: int) -> list[float]:
    """`gains` of the nodes of a tree, and of as many more as make it `size`: they fall on as they fell so far."""
    if size <= len(gains):
        return gains
    fall = (gains[-1] / gains[0]) ** (1 / (len(gains) - 1)) if len(gains) > 1 else gains[0]
    more = range(1, size - len(gains) + 1)
    return gains + [gains[-1] * min(fall, 1.0) ** place for place in more]


def make_budget(
    asked: int | None,
    is_ceiling: bool,
    target: PreTrainedModel,
    heads: DraftHeads,
    mode: Hashable = None,
    picking: Hashable = None,
    room: int | None = None,
) -> Budget:
    """`asked` nodes at every step, or, where it is None or a ceiling, as many as pay."""
    asked = check_nodes(asked, room)
    if asked is not None and not is_ceiling:
        return Budget(asked)
    ceiling = min(limit for limit in (asked, room, SIZES[-1]) if limit is not None)
    experience = memory_of(target).experience.setdefault(heads, Experience())
    device = device_of(target)
    guess = ON_CPU if device.type == "cpu" else ON_DEVICE
    return AutomaticBudget(experience, max(ceiling, 0), (device, target.dtype, mode), picking, guess)


def plain_step_of(target: PreTrainedModel, heads: DraftHeads, length: int) -> float | None:
    """Seconds that a step of one row takes without drafts, as seen lately where a text had about that length; None
    where the automatic budget has seen none."""
    experience = memory_of(target).experience.get(heads)
    if experience is None:
        return None
    with experience.lock:
        seen = {key: costs.plain.value for key, costs in experience.costs.items() if key[1] == 1}
    known = {key: seconds for key, seconds in seen.items() if seconds is not None}
    return known[min(known, key=lambda key: abs(key[2] - length.bit_length()))] if known else None
