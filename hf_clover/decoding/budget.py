"""How many nodes a tree gets.

Contract: a budget is asked before each step how many nodes to draft (`ask`), cuts the tree that was drafted (`cut`),
and is told what the step took and gave (`learn`). What it says changes time, never tokens. A fixed budget always says
the same. The automatic one learns two things as steps go by, and keeps them from call to call: what a step costs
(`Costs`, for each device, dtype, number of rows and doubling of the text), and how much the draft's own probabilities
are worth (`Acceptance`). Of each tree it keeps the first nodes that promise the most tokens per second; the rows that
are furthest behind count as much as all rows do. Where drafting promises less than plain steps give, it rests, longer
each time, and the heads do nothing meanwhile.

Shapes: B rows, N draft nodes.
"""

import copy
import statistics
import threading
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from ..modeling_clover import CloverHeads
from ..target_parts import device_of
from .tree import Tree

MOST_NODES = 1 << 14  # a number from somebody's generation_config.json may not take the machine's memory
SIZES = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)  # nodes; with the root, forwards that matrix kernels like
START = 24  # nodes of the first trees, shared by the rows
LEARNING = 6  # trees that are looked at before drafting may rest
SHORTEST_REST, LONGEST_REST = 8, 128  # steps
SURE = 1.3  # drafting that is so much faster than plain steps needs no comparing
PLAIN_EVERY = 64  # steps, where it does
NEARLY = 0.98  # as good as the best, if it is smaller: it is cheaper to be wrong about
TRUST_IN_LINE = 8  # times seen, that the line through all sizes counts as beside what one size took itself
EXPLORE_EVERY = 16  # drafts, after which a size beside the best is taken, so that the costs stay known


def check_nodes(asked: Any, room: int | None = None) -> int | None:
    """`num_assistant_tokens`, refused if it is no tree size. `room`: nodes that a fixed cache still holds."""
    if asked is None:
        return None
    if isinstance(asked, bool) or not isinstance(asked, int) or not 1 <= asked <= MOST_NODES:
        raise ValueError(
            f"`num_assistant_tokens={asked!r}` is no tree size: it must be a positive integer, the number of drafted "
            f"nodes per step (at most {MOST_NODES}), or None to let hf_clover choose."
        )
    if room is not None and asked > room:
        raise ValueError(
            f"`num_assistant_tokens={asked}` is more than the cache can hold: beside the text there is room for "
            f"{max(room, 0)} nodes. Lower `num_assistant_tokens`, or raise `max_cache_len`."
        )
    return asked


# ---------------------------------------------------------------------- fixed


@dataclass
class FixedBudget:
    nodes: int
    has_fixed_reach = True

    @property
    def most_nodes(self) -> int:
        return self.nodes

    def ask(self, rows: int, context: int) -> int:
        return self.nodes

    def cut(self, tree: Tree, rows: Sequence[int], lengths: Sequence[int]) -> Tree:
        return tree

    def learn(self, tree: Tree, paths: Sequence[Sequence[int]], draft_seconds: float, forward_seconds: float) -> None:
        pass


# ---------------------------------------------------------------------- what is learned


class Recent:
    """The median of the last few values, which neither a first slow call nor a busy machine moves."""

    def __init__(self, count: int = 7) -> None:
        self.values: deque[float] = deque(maxlen=count)

    def add(self, value: float) -> None:
        self.values.append(value)

    @property
    def value(self) -> float | None:
        return statistics.median(self.values) if self.values else None


@dataclass
class Costs:
    """Seconds of a plain step, and of drafts and of forwards over trees as they were seen lately."""

    plain: Recent = field(default_factory=Recent)
    drafts: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=48))  # nodes, seconds
    forwards: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=48))  # likewise
    advantage: float = 1.25  # of drafting over plain steps, lately; heads get a few steps to show theirs
    rest: int = SHORTEST_REST  # how long drafting pauses the next time it does not pay
    resting: int = 0  # steps that are left of a pause

    def of_other_rows(self, rows: int, others: int) -> "Costs":
        """What was seen with `rows` as a guess for `others`, until more is known. A forward costs by its tokens, so
        as many in other rows are more or fewer nodes a row. A plain step is soon measured, and what drafting was
        worth says as much as the two numbers are alike."""
        share, alike = rows / others, min(rows, others) / max(rows, others)
        guess = Costs(
            advantage=self.advantage**alike,
            rest=max(int(self.rest * alike), SHORTEST_REST),
            resting=int(self.resting * alike),
        )
        guess.drafts.extend([(share * nodes, seconds) for nodes, seconds in self.drafts][-4:])
        guess.forwards.extend([(share * (nodes + 1) - 1, seconds) for nodes, seconds in self.forwards][-4:])
        return guess


def line_through(seen: Sequence[tuple[float, float]], at_none: float | None = None) -> tuple[float, float]:
    """The seconds where there are no nodes, and of every further node, by least squares. Outliers are left out, and
    `at_none`, what the first should be (the median if it is not known), counts a little, which decides where all
    trees were of one size."""
    seen = list(seen)  # another thread may add to it meanwhile
    middle = statistics.median(seconds for _, seconds in seen)
    points = [(nodes, seconds, 1.0) for nodes, seconds in seen if seconds <= 4 * middle]
    points.append((0, middle if at_none is None else at_none, 0.5))
    weight = sum(w for _, _, w in points)
    x = sum(n * w for n, _, w in points) / weight
    y = sum(s * w for _, s, w in points) / weight
    spread = sum(w * (n - x) ** 2 for n, _, w in points)
    slope = sum(w * (n - x) * (s - y) for n, s, w in points) / spread if spread else 0.0
    slope = max(slope, 0.0)
    return y - slope * x, slope


def seconds_by_size(
    seen: Sequence[tuple[float, float]], sizes: Sequence[int], at_none: float | None = None
) -> list[float]:
    """What each of `sizes` takes: what it took itself, as far as it was seen, and what the line says. Kernels have
    steps, and a line cuts their corners: on many CPUs two rows take longer than four."""
    start, slope = line_through(seen, at_none)
    own: dict[int, list[float]] = {}
    for nodes, seconds in list(seen):
        own.setdefault(nodes, []).append(seconds)
    found = []
    for size in sizes:
        times, by_line = own.get(size, []), start + slope * size
        known = statistics.median(times) * len(times) if times else 0.0
        found.append((known + TRUST_IN_LINE * by_line) / (len(times) + TRUST_IN_LINE))
    return found


class Acceptance:
    """What a joint probability is worth: by halves (1 to 1/2, 1/2 to 1/4, ...), how many nodes the target accepted
    against how many were promised, forgetting slowly."""

    BINS, MEMORY = 12, 0.98

    def __init__(self) -> None:
        self.promised, self.kept = torch.zeros(self.BINS), torch.zeros(self.BINS)
        self.trees = 0  # looked at

    def bins(self, log_probs: torch.Tensor) -> torch.Tensor:
        return (log_probs * -1.4427).clamp(0, self.BINS - 1).long()  # of base 2

    def expected(self, log_probs: torch.Tensor) -> torch.Tensor:
        """[B, N] -> the probability that each node is accepted."""
        factor = (self.kept + 1) / (self.promised + 1)  # [bins]
        return (log_probs.exp() * factor[self.bins(log_probs)]).clamp(max=1.0)

    def learn(self, log_probs: torch.Tensor, paths: Sequence[Sequence[int]]) -> None:
        """log_probs [B, N] of the rows that walked `paths`."""
        bins = self.bins(log_probs)
        rows = [row for row, path in enumerate(paths) for _ in path[1:]]
        nodes = [node - 1 for path in paths for node in path[1:]]
        self.promised = self.MEMORY * self.promised
        self.promised += torch.bincount(bins.flatten(), log_probs.exp().flatten(), self.BINS)
        self.kept = self.MEMORY * self.kept + torch.bincount(bins[rows, nodes], minlength=self.BINS)


@dataclass
class Experience:
    """What was learned of one target with one set of heads."""

    costs: dict[Hashable, Costs] = field(default_factory=dict)
    acceptance: dict[Hashable, Acceptance] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)  # threads share what they learn


_experience: WeakKeyDictionary[PreTrainedModel, WeakKeyDictionary[CloverHeads, Experience]] = WeakKeyDictionary()


# ---------------------------------------------------------------------- automatic


class AutomaticBudget:
    def __init__(self, experience: Experience, ceiling: int, mode: Hashable, picking: Hashable) -> None:
        """`mode`: what costs depend on beside rows and context; `picking`: what acceptance depends on."""
        self.experience, self.mode = experience, mode
        self.sizes = [size for size in SIZES if size <= ceiling]
        self.acceptance = experience.acceptance.setdefault(picking, Acceptance())
        self.costs: Costs | None = None
        self.key: Hashable = None
        self.drafts = self.since_plain = 0
        self.reach = self.sizes[-1]  # nodes drafted, of which the best are taken
        self.has_fixed_reach = False  # drafts of one size share one graph where drafting is compiled
        self.chosen: deque[int] = deque(maxlen=8)
        self.drafted = 0  # nodes, in this step
        self.log_probs: torch.Tensor | None = None  # [B, N] of the tree of this step, of the rows that count

    @property
    def most_nodes(self) -> int:
        return self.sizes[-1]

    def ask(self, rows: int, context: int) -> int:
        costs = self._look_up(rows, context)
        if costs.resting or costs.plain.value is None or self._must_compare(costs):
            costs.resting = max(costs.resting - 1, 0)
            return 0
        if self.has_fixed_reach:
            return self.sizes[-1]
        if not self.chosen:
            self.reach = self._snapped(max(START // rows, 1))
        return self.reach

    def cut(self, tree: Tree, rows: Sequence[int], lengths: Sequence[int]) -> Tree:
        """`rows`: those that are unfinished; `lengths`: of their texts."""
        self.drafted, self.log_probs = tree.size - 1, None
        if tree.size == 1:
            return tree
        log_probs = tree.log_probs[:, 1:].cpu()[list(rows)]  # [rows, N]; the one wait for the draft
        if not bool((log_probs[:, 0] > -torch.inf).any()):
            self.log_probs = log_probs
            return tree  # nothing to choose from; the walk will say so
        shortest = min(lengths)
        best = self._best(log_probs, [place for place, length in enumerate(lengths) if length == shortest])
        self.chosen.append(best)
        larger = (size for size in self.sizes if size > best)
        self.reach = next(larger, best) if best >= self.reach else max(1, *self.chosen)
        self.log_probs = log_probs[:, :best]
        return tree.first(best)

    def learn(self, tree: Tree, paths: Sequence[Sequence[int]], draft_seconds: float, forward_seconds: float) -> None:
        """`paths` of the rows that were unfinished."""
        nodes = tree.size - 1
        self.since_plain += 1
        with self.experience.lock:
            if nodes == 0:
                self.costs.plain.add(forward_seconds)
                self.since_plain = 0
            else:
                self.costs.forwards.append((nodes, forward_seconds))
                self.acceptance.learn(self.log_probs, paths)
            if self.drafted:
                self.costs.drafts.append((self.drafted, draft_seconds))

    def _look_up(self, rows: int, context: int) -> Costs:
        key = (self.mode, rows, context.bit_length())
        if key != self.key:
            known = self.experience.costs
            with self.experience.lock:
                if key not in known:
                    known[key] = self._begin_with_the_nearest(key)
            self.key, self.costs = key, known[key]
        return self.costs

    def _begin_with_the_nearest(self, key: tuple) -> Costs:
        """What is known of another length of text, or of another number of rows, until more is known."""
        others = [other for other in self.experience.costs if other[0] == key[0]]

        def distance(other: tuple) -> tuple[int, int]:
            return abs(other[1] - key[1]), abs(other[2] - key[2])

        nearest = min(others, key=distance, default=None)
        if nearest is None:
            return Costs()
        costs = self.experience.costs[nearest]
        return copy.deepcopy(costs) if nearest[1] == key[1] else costs.of_other_rows(nearest[1], key[1])

    def _must_compare(self, costs: Costs) -> bool:
        return self.since_plain >= PLAIN_EVERY and costs.advantage < SURE

    def _snapped(self, nodes: int) -> int:
        return max((size for size in self.sizes if size <= nodes), default=0)

    def _best(self, log_probs: torch.Tensor, last: Sequence[int]) -> int:
        """How many nodes of a tree are worth their time. `last`: the places of the rows that are furthest behind."""
        costs, rows = self.costs, len(log_probs)
        drafted = int((log_probs > -torch.inf).sum(1).max())  # the rest are places that could not be filled
        sizes = [size for size in self.sizes if size <= drafted]
        self.drafts += 1
        self.acceptance.trees += 1
        if len(costs.forwards) < 2:  # two sizes make a line
            return min(self._snapped(max(START // rows >> len(costs.forwards), 1)), sizes[-1])
        gains = self._gains(log_probs, last).tolist()  # [N] tokens of a row beyond its own
        forwards = seconds_by_size(costs.forwards, sizes, costs.plain.value)  # the first is of no nodes: sizes[0] = 0
        plain = forwards[0] = min(costs.plain.value, forwards[0])
        drafts = seconds_by_size(costs.drafts, sizes)
        seconds = [draft + forward for draft, forward in zip(drafts, forwards, strict=True)]
        tokens = [1 + (gains[size - 1] if size else 0.0) for size in sizes]
        rates = [t / s for t, s in zip(tokens, seconds, strict=True)]
        place = next(i for i, rate in enumerate(rates) if rate >= NEARLY * max(rates))
        self._rest_or_go_on(costs, rates[place] * plain)
        if self.drafts % EXPLORE_EVERY == 0:
            up = place == 0 or self.drafts // EXPLORE_EVERY % 2
            place = min(place + 1, len(sizes) - 1) if up else place - 1
        if self.acceptance.trees <= LEARNING:  # what is not verified teaches nothing
            return max(sizes[place], min(self._snapped(max(START // rows // 4, 1)), sizes[-1]))
        return sizes[place]

    def _gains(self, log_probs: torch.Tensor, last: Sequence[int]) -> torch.Tensor:
        """[N]: what a row gains from as many nodes. The call is over with its last row, while every row that ends
        makes the steps of the others cheaper; so those furthest behind count as much as all rows do."""
        expected = self.acceptance.expected(log_probs)  # [rows, N]
        return ((expected.mean(0) + expected[last].mean(0)) / 2).cumsum(0)

    def _rest_or_go_on(self, costs: Costs, advantage: float) -> None:
        if self.acceptance.trees <= LEARNING:
            weight = 0.2
        else:  # one hard place is no reason to rest; after a rest, though, a single draft has to tell
            weight = 0.05 if costs.rest == SHORTEST_REST else 0.3
        costs.advantage = (1 - weight) * costs.advantage + weight * advantage
        if costs.advantage >= 1:
            costs.rest = SHORTEST_REST
        elif self.acceptance.trees > LEARNING and advantage < 1:  # a draft that pays is followed by another
            costs.resting = costs.rest
            costs.rest = min(2 * costs.rest, LONGEST_REST)


Budget = FixedBudget | AutomaticBudget


def make_budget(
    asked: int | None,
    is_ceiling: bool,
    target: PreTrainedModel,
    heads: CloverHeads,
    mode: Hashable = None,
    picking: Hashable = None,
    room: int | None = None,
) -> Budget:
    """`asked` nodes at every step, or, where it is None or a ceiling, as many as pay."""
    asked = check_nodes(asked, room)
    if asked is not None and not is_ceiling:
        return FixedBudget(asked)
    ceiling = min(limit for limit in (asked, room, SIZES[-1]) if limit is not None)
    experience = _experience.setdefault(target, WeakKeyDictionary()).setdefault(heads, Experience())
    return AutomaticBudget(experience, max(ceiling, 0), (device_of(target), target.dtype, mode), picking)
