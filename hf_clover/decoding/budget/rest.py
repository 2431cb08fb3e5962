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
    length: int = SETTINGS.shortest_rest  # steps that the next rest has at least
    in_vain: int = 0  # rests in a row, after which no draft paid

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

    def learn(self, advantage: float, lost: float) -> None:
        """`advantage`: tokens that a draft promised, over those of a step without it in the same time; `lost`: plain
        steps that it takes longer for as many tokens."""
        self.advantage += max(SETTINGS.newest_draft, 1 / (4 + self.drafts)) * (advantage - self.advantage)
        self.drafts += 1
        if self.advantage >= 1:
            self.length = SETTINGS.shortest_rest
        if advantage >= 1:
            self.state, self.in_vain = State.DRAFTING, 0
        elif self.advantage < 1:
            self.state, self.in_vain = State.RESTING, self.in_vain + 1
            longest = min(SETTINGS.shortest_rest << self.in_vain, SETTINGS.longest_rest)
            self.steps_left = min(max(self.length, int(lost / SETTINGS.lost)), longest)
            self.length = min(2 * self.steps_left, longest)

    def of_other_rows(self, alike: float) -> "Rest":
        """A guess for another number of rows; `alike`: the smaller of both numbers over the larger."""
        left = int(self.steps_left * alike)
        return Rest(State.RESTING if left else State.DRAFTING, self.advantage**alike, steps_left=left)
