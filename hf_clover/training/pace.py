"""How fast heads learn while they are used: at full rate, slower as gains flatten, or not at all.

Contract: `Pace.note` is told what text cost that was not learned from yet, and `Pace.rate` says by how much the rates
of a step are multiplied. Where learning brings nothing any more it rests, looks at a part of what comes, and begins
again at full rate where the text costs more than it did. This module knows numbers alone.
"""

from dataclasses import dataclass, field

WARM_UP = 10  # steps until the full rate
PERIOD = 40  # steps that are compared with the steps before them
FLAT = 0.01  # share by which the cost has to fall from one period to the next, or the rate is halved
LOWEST = 1 / 16  # a rate below which learning rests
LOOKS_AT = 0.1  # of the steps, while it rests: to see whether the text has changed its kind
CHANGED = 1.1  # times what the text cost when the rest began


@dataclass
class Pace:
    rate_then: float = 1.0  # after the warm-up
    steps: int = 0  # since it began, or began again
    is_resting: bool = False
    before: float | None = None  # mean cost of the last period
    costs: list[float] = field(default_factory=list)  # of this period

    @property
    def rate(self) -> float:
        return self.rate_then * min((self.steps + 1) / WARM_UP, 1.0)

    @property
    def period(self) -> int:
        """Steps of a period; while it rests, there are fewer."""
        return max(round(PERIOD * LOOKS_AT), 1) if self.is_resting else PERIOD

    def note(self, cost: float) -> bool:
        """After a step over new text, or a look at it. Whether learning begins again."""
        self.steps += not self.is_resting
        self.costs.append(cost)
        if len(self.costs) < self.period:
            return False
        mean, self.costs = sum(self.costs) / len(self.costs), []
        if self.is_resting:
            if self.before is not None and mean > CHANGED * self.before:
                self.begin_again()
                return True
            return False
        if self.before is not None and mean > (1 - FLAT) * self.before:
            self.rate_then /= 2
            self.is_resting = self.rate_then < LOWEST
        self.before = mean
        return False

    def begin_again(self) -> None:
        self.rate_then, self.steps, self.is_resting, self.before, self.costs = 1.0, 0, False, None, []


__all__ = ["Pace"]
