"""How fast heads learn while they are used: at full rate, slower as the loss stops falling, or not at all.

Contract: the caller passes the loss of each step, computed before the weights change, to `Pace.note`. `Pace.rate` is
the factor of the learning rates. When the loss stops falling, learning rests: it only measures the loss of some new
texts (`Pace.looks`). It begins again at full rate when that loss rises. This module knows only numbers.
"""

from dataclasses import dataclass, field

WARM_UP = 10  # steps until the full rate
PERIOD = 80  # steps per period; the mean loss of each is compared with that of the period before
FLAT = 0.01  # least share by which the loss has to fall from period to period; otherwise the rate is halved
LOWEST = 1 / 16  # lowest rate; below it learning rests
LOOK_EVERY = 10  # steps per look, while learning rests: a look measures the loss of a text
LOOKS = 4  # looks per average
CHANGED = 1.1  # learning begins again when the loss is this many times what it was when the rest began


@dataclass
class Pace:
    rate_then: float = 1.0  # rate after the warm-up
    steps: int = 0  # steps since learning began, or began again
    is_resting: bool = False
    passed: int = 0  # steps of this rest, with a look or without
    before: float | None = None  # mean loss of the last period
    costs: list[float] = field(default_factory=list)  # losses of this period

    @property
    def rate(self) -> float:
        return self.rate_then * min((self.steps + 1) / WARM_UP, 1.0)

    def looks(self) -> bool:
        """While learning rests: whether to measure the loss of this step's text."""
        self.passed += 1
        return self.passed % LOOK_EVERY == 0

    def note(self, cost: float) -> bool:
        """Note the loss of a step or of a look. True if learning begins again."""
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
