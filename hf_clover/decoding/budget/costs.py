"""What a step costs, as the automatic budget learns it.

Contract: `Costs` is told what plain steps, drafts and forwards over trees took, and knows where drafting stands with
as many rows of a text of that length. `cost_by_size` makes of the times, which wander on every machine, what each size
of a tree costs in plain steps.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

SIZES = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)  # nodes; with the root, forwards that matrix kernels like
SIZES_IN_GRAPHS = (0, 7, 15, 31, 63)  # there a few nodes more cost less than a graph more
START = 24  # nodes of the first trees, shared by the rows
SHORTEST_REST = 8  # steps
NEAR = 4  # plain steps before a tree, and as many after it, that it is compared with
NEWEST = 128  # times that are kept
MUCH = 1.5  # times the second time of a size, beyond which its first is not believed
DRAFT = 0.25  # plain steps that a draft costs
# How far what is believed before any cost is seen may be off, in logarithms.
NOISE, LEVEL_OFF, GROWTH_OFF, CORNER = 0.3, 0.3, 0.06, 0.1  # of a time, of a `Guess`'s two, of one size from the line


class Guess(NamedTuple):
    """What is believed of forwards over trees before any is seen. The more rows a step has, the less of it is reading
    the weights, and the more does every node cost."""

    least: float  # plain steps
    growth: float  # as the tokens of a row double, in logarithms
    more_growth: float  # as the rows double

    def of(self, rows: int) -> tuple[float, float]:
        """The plain steps that a tree of 7 nodes a row costs, and the growth."""
        growth = self.growth + self.more_growth * math.log2(rows)
        return self.least * math.exp(3 * growth), growth


ON_CPU, ON_DEVICE = Guess(1.07, 0.09, 0.06), Guess(1.1, 0.0, 0.0)


class Recent:
    """The median of the last few values, which neither a first slow call nor a busy machine moves."""

    def __init__(self, count: int = 7) -> None:
        self.values: deque[float] = deque(maxlen=count)

    def add(self, value: float) -> None:
        self.values.append(value)

    @property
    def value(self) -> float | None:
        return statistics.median(self.values) if self.values else None


Seen = tuple[float, float, list[float]]  # nodes, seconds, and the seconds of plain steps before and after


@dataclass
class Costs:
    """Seconds of plain steps, and of drafts and of forwards over trees as they were seen lately."""

    plain: Recent = field(default_factory=Recent)
    drafts: tuple[Seen, ...] = ()  # replaced and never changed: another thread may be reading them
    forwards: tuple[Seen, ...] = ()
    near: list[float] = field(default_factory=list)  # the plain steps beside the trees of now
    follows_plain: bool = False  # the last step was one
    noise: float = NOISE  # of a step's time, in logarithms
    advantage: float = 1.1  # of drafting over a rest, lately; heads get a few steps to show theirs
    rest: int = SHORTEST_REST  # how long drafting pauses the next time it does not pay
    resting: int = 0  # steps that are left of a pause
    rests: int = 0  # since a draft last paid
    chosen: tuple[int, ...] = ()  # nodes of the last trees
    reach: int = START  # nodes that are drafted for all rows, of which the best are taken

    def learn_plain(self, seconds: float) -> None:
        self.plain.add(seconds)
        self.near.append(seconds)
        del self.near[2 * NEAR : -NEAR]
        self.follows_plain = True

    def learn_tree(self, drafted: int, draft_seconds: float, nodes: int, forward_seconds: float) -> None:
        if self.follows_plain:
            self.near, self.follows_plain = self.near[-NEAR:], False
        if nodes:
            self.forwards = _with(self.forwards, (nodes, forward_seconds, self.near))
        if drafted:
            self.drafts = _with(self.drafts, (drafted, draft_seconds, self.near))

    def in_plain_steps(self, seen: Sequence[Seen]) -> list[tuple[float, float]]:
        """Times as multiples of the plain steps beside them: what slows a machine down for a while slows both."""
        paces: dict[int, float] = {}
        for _, _, near in seen:
            if id(near) not in paces:
                paces[id(near)] = statistics.median(near[: 2 * NEAR] or self.plain.values)
        return [(nodes, seconds / paces[id(near)]) for nodes, seconds, near in seen]

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
        guess.drafts = tuple((share * nodes, seconds, []) for nodes, seconds, _ in self.drafts[-4:])
        forwards: list[Seen] = [(share * (nodes + 1) - 1, seconds, []) for nodes, seconds, _ in self.forwards]
        forwards = [each for each in forwards if each[0] <= SIZES[-1]]  # what is far off tells little
        guess.forwards = tuple(forwards[-4:])
        return guess


def _with(times: tuple[Seen, ...], seen: Seen) -> tuple[Seen, ...]:
    """The newest times with `seen`. The first time of a size may be that of making its kernels: where it is much
    slower than the second, it is dropped."""
    alike = [place for place, (size, _, _) in enumerate(times) if size == seen[0]]
    if len(alike) == 1 and times[alike[0]][1] > MUCH * seen[1]:
        times = times[: alike[0]] + times[alike[0] + 1 :]
    return (*times, seen)[-NEWEST:]


def cost_by_size(
    seen: Sequence[tuple[float, float]], sizes: Sequence[int], level: float, growth: float
) -> tuple[list[float], float]:
    """What each of `sizes` costs, and how much single times are off: medians by size, drawn to a line (in logarithms
    of tokens and of time), and the line to a guess, the more the noisier the times are. Kernels have steps, and a line
    cuts their corners: on many CPUs two rows take longer than four. `level`: of 8 tokens; `growth`: as they double."""
    own: dict[float, list[float]] = {}
    for nodes, cost in seen:
        own.setdefault(nodes, []).append(math.log(max(cost, 1e-9)))
    middle = {nodes: statistics.median(logs) for nodes, logs in own.items()}
    off = [abs(log - middle[nodes]) for nodes, logs in own.items() if len(logs) > 2 for log in logs]
    noise = statistics.median([*off, *[NOISE] * 3])
    points = [(math.log2(nodes + 1), middle[nodes], float(len(logs))) for nodes, logs in own.items()]
    points.append((3.0, math.log(level), (noise / LEVEL_OFF) ** 2))
    weight = sum(w for _, _, w in points) or 1.0
    x = sum(p * w for p, _, w in points) / weight
    y = sum(c * w for _, c, w in points) / weight
    spread = sum(w * (p - x) ** 2 for p, _, w in points)
    stiff = (noise / GROWTH_OFF) ** 2 or 1e-9
    slope = max((sum(w * (p - x) * (c - y) for p, c, w in points) + stiff * growth) / (spread + stiff), 0.0)
    found = []
    for size in sizes:
        count, line, trust = len(own.get(size, ())), y + slope * (math.log2(size + 1) - x), (noise / CORNER) ** 2
        seen_as = min(middle[size], line + CORNER) if count == 1 else middle.get(size, 0.0)  # see `_with`
        found.append(math.exp((seen_as * count + line * trust) / (count + trust) if count else line))
    return found, noise
