"""What a step costs, as its times show it.

Contract: `Costs` is told the seconds of plain steps, of drafts and of forwards over trees, all of one number of rows.
It says what a draft and a forward of each size cost in plain steps. Times wander on every machine, so each size is
drawn to a line through all sizes, and that line to a guess (`cost_by_size`).
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .settings import SETTINGS


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


class Seen(NamedTuple):
    nodes: int
    seconds: float
    near: list[float]  # seconds of the plain steps before it and, as they come, after it


@dataclass
class Costs:
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=SETTINGS.plain_times))  # seconds
    drafts: tuple[Seen, ...] = ()  # replaced and never changed: another thread may be reading them
    forwards: tuple[Seen, ...] = ()
    near: list[float] = field(default_factory=list)  # the plain steps beside the trees of now
    follows_plain: bool = False  # the last step was one

    @property
    def plain_step(self) -> float | None:
        """Seconds: a median, which neither a first slow call nor a busy machine moves."""
        return statistics.median(self.plain) if self.plain else None

    def learn_plain(self, seconds: float) -> None:
        self.plain.append(seconds)
        self.near.append(seconds)
        del self.near[2 * SETTINGS.near : -SETTINGS.near]
        self.follows_plain = True

    def learn_tree(self, drafted: int, draft_seconds: float, nodes: int, forward_seconds: float) -> None:
        if self.follows_plain:
            self.near, self.follows_plain = self.near[-SETTINGS.near :], False
        if nodes:
            self.forwards = _with(self.forwards, Seen(nodes, forward_seconds, self.near))
        if drafted:
            self.drafts = _with(self.drafts, Seen(drafted, draft_seconds, self.near))

    def in_plain_steps(self, seen: Sequence[Seen]) -> list[tuple[float, float]]:
        """Nodes and plain steps: what slows a machine down for a while slows the plain steps beside it, too."""
        lists = {id(near): near[: 2 * SETTINGS.near] or self.plain for _, _, near in seen}
        paces = {key: statistics.median(seconds) for key, seconds in lists.items()}
        return [(nodes, seconds / paces[id(near)]) for nodes, seconds, near in seen]

    def of_sizes(
        self, sizes: Sequence[int], guess: tuple[float, float], replayed: int = 0
    ) -> tuple[dict[int, float], dict[int, float]]:
        """Plain steps of a forward over each of `sizes` nodes, 0 first, and of a draft of them. `guess`: as `Guess.of`
        makes it; `replayed`: settled tokens that the forward takes again."""
        level, growth = guess
        beside_root = [size + replayed for size in sizes]
        forwards = cost_by_size(self.in_plain_steps(self.forwards), beside_root, level, growth)
        drafts = cost_by_size(self.in_plain_steps(self.drafts), sizes, SETTINGS.draft, growth)
        # No forward takes less than one over a single token: where it seems so, that one was slow.
        slower = min([1.0, *forwards[1:]])
        forwards[0] = forwards[0] if replayed else slower
        scaled = ([cost / slower for cost in costs] for costs in (forwards, drafts))
        by_size, drafts_by_size = (dict(zip(sizes, costs, strict=True)) for costs in scaled)
        return by_size, drafts_by_size


def _with(times: tuple[Seen, ...], seen: Seen) -> tuple[Seen, ...]:
    """The newest times with `seen`. The first time of a size may be that of making its kernels: where it is much
    slower than the second, it is dropped."""
    alike = [place for place, other in enumerate(times) if other.nodes == seen.nodes]
    if len(alike) == 1 and times[alike[0]].seconds > SETTINGS.first_slower * seen.seconds:
        times = times[: alike[0]] + times[alike[0] + 1 :]
    return (*times, seen)[-SETTINGS.newest_times :]


def cost_by_size(
    seen: Sequence[tuple[float, float]], sizes: Sequence[int], level: float, growth: float
) -> list[float]:
    """What each of `sizes` costs: medians by size, drawn to a line (in logarithms of tokens and of time), and the line
    to a guess, the more the noisier the times are. Kernels have steps, and a line cuts their corners: on many CPUs two
    rows take longer than four. `level`: of 8 tokens; `growth`: as they double."""
    s = SETTINGS
    own: dict[float, list[float]] = {}
    for nodes, cost in seen:
        own.setdefault(nodes, []).append(math.log(max(cost, 1e-9)))
    middle = {nodes: statistics.median(logs) for nodes, logs in own.items()}
    off = [abs(log - middle[nodes]) for nodes, logs in own.items() if len(logs) > 2 for log in logs]
    noise = statistics.median([*off, *[s.noise] * 3])
    points = [(math.log2(nodes + 1), middle[nodes], float(len(logs))) for nodes, logs in own.items()]
    points.append((3.0, math.log(level), (noise / s.level_off) ** 2))
    weight = sum(w for _, _, w in points) or 1.0
    x = sum(p * w for p, _, w in points) / weight
    y = sum(c * w for _, c, w in points) / weight
    spread = sum(w * (p - x) ** 2 for p, _, w in points)
    stiff = (noise / s.growth_off) ** 2 or 1e-9
    slope = max((sum(w * (p - x) * (c - y) for p, c, w in points) + stiff * growth) / (spread + stiff), 0.0)
    found = []
    for size in sizes:
        count, line, trust = len(own.get(size, ())), y + slope * (math.log2(size + 1) - x), (noise / s.corner) ** 2
        seen_as = min(middle[size], line + s.corner) if count == 1 else middle.get(size, 0.0)  # see `_with`
        found.append(math.exp((seen_as * count + line * trust) / (count + trust) if count else line))
    return found
