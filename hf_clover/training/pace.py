"""How fast heads learn while they are used: at full rate, slower as gains flatten, or not at all.

Contract: `Pace.note` is told what the text of each step cost before the step, and `Pace.rate` says by how much the
rates of a step are multiplied. Where learning brings nothing any more it rests, looks at a part of what comes
(`Pace.looks`), and begins again at full rate where the text costs more than it did. This module knows numbers alone.
"""

from dataclasses import dataclass, field

WARM_UP = 10  # steps until the full rate
PERIOD = 80  # steps that are compared with the steps before them
FLAT = 0.01  # share by which the cost has to fall from one period to the next, or the rate is halved
LOWEST = 1 / 16  # a rate below which learning rests
LOOK_EVERY = 10  # steps, while it rests: to see whether the text has changed its kind
LOOKS = 4  # that are taken together
CHANGED = 1.1  # times what the text cost when the rest began


@dataclass
class Pace:
    rate_then: float = 1.0  # after the warm-up
    steps: int = 0  # since it began, or began again
    is_resting: bool = False
    passed: int = 0  # steps of this rest, looked at or not
    before: float | None = None  # mean cost of the last period
    costs: list[float] = field(default_factory=list)  # of this period

    @property
    def rate(self) -> float:
        return self.rate_then * min((self.steps + 1) / WARM_UP, 1.0)

    def looks(self) -> bool:
        """While it rests: whether this step's text is looked at."""
        self.passed += 1
        return self.passed % LOOK_EVERY == 0

    def note(self, cost: float) -> bool:
        """After a step, or a look. Whether learning begins again."""
        self.steps += not self.is_resting
        self.costs.append(cost)
        if len(self.costs) < (LOOKS if self.is_resting else PERIOD):
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
        self.rate_then, self.steps, self.is_resting, self.passed = 1.0, 0, False, 0
        self.before, self.costs = None, []


__all__ = ["Pace"]
