"""When the heads rest, because their drafts cost more time than they save.

Contract: `Rest` is told how each draft compares with a step without it (`learn`), and says before each step whether
the heads may draft (`may_draft`). It has three states. DRAFTING: drafts pay. RESTING: there is none for a number of
steps. LOOKING: after a rest, drafts show whether they pay by now.
"""

from dataclasses import dataclass
from enum import Enum, auto

from .settings import SETTINGS


class State(Enum):
    DRAFTING = auto()
    RESTING = auto()
    LOOKING = auto()


@dataclass
class Rest:
    state: State = State.DRAFTING
    advantage: float = SETTINGS.first_advantage  # of drafts over steps without, a moving average
    drafts: int = 0  # so far
    steps_left: int = 0  # of a rest
    next_rest: int = SETTINGS.shortest_rest  # steps

    @property
    def is_over(self) -> bool:
        return self.state is not State.RESTING

    def begin_call(self) -> None:
        """What did not pay for one text may pay for another."""
        self.steps_left = min(self.steps_left, SETTINGS.shortest_rest)

    def may_draft(self) -> bool:
        """In the step that begins."""
        if self.state is State.RESTING and self.steps_left == 0:
            self.state = State.LOOKING
        self.steps_left = max(self.steps_left - 1, 0)
        return self.is_over

    def learn(self, advantage: float) -> None:
        """`advantage`: tokens that a draft promised, over those of a step without it in the same time."""
        self.advantage += max(SETTINGS.newest_draft, 1 / (4 + self.drafts)) * (advantage - self.advantage)
        self.drafts += 1
        if advantage >= 1:
            self.state, self.next_rest = State.DRAFTING, SETTINGS.shortest_rest
        elif self.advantage < 1:
            self.state, self.steps_left = State.RESTING, self.next_rest
            self.next_rest = min(2 * self.next_rest, SETTINGS.longest_rest)
