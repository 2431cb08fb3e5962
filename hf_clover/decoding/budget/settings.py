"""What the automatic budget was tuned to: every constant with its unit and its reason.

Contract: `examples/experiments/resting.py` and `tests/test_budget.py` judge these values without a clock. Times are
counted in plain steps: a plain step is a forward of the target over one token a row.
"""

from dataclasses import dataclass

SIZES = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)  # nodes; with the root, forwards that matrix kernels like
SIZES_IN_GRAPHS = (0, 7, 15, 31, 63)  # nodes; in graphs a few nodes more cost less than a graph more


@dataclass(frozen=True)
class Settings:
    # Sizes
    first_nodes: int = 24  # nodes of the first tree, shared by the rows
    lately: int = 12  # trees; the heads draft as many nodes as the largest of so many last trees kept
    about_as_good: float = 0.98  # share of the best rate; the smallest size that has it is taken, since it risks less
    hope: float = 1.03  # factor on the tokens of a size that was never verified; else it would never be tried
    uneven: float = 0.2  # share of a large batch's gain that is lost, because rows wait for the slowest one
    look_every: int = 4  # drafts; one of so many is a size larger, to see whether it pays
    explore_every: int = 16  # drafts; one of so many keeps a size beside the best one, so that its cost stays known

    # Acceptance
    forgetting: float = 0.98  # weight of all earlier trees, when a tree is counted
    newest_tree: float = 1 / 32  # weight of the newest tree in the average tokens of a size, in graphs
    first_odds: float = 3.0  # logarithm of the odds that heads know anything, believed at first
    most_odds: float = 9.0  # logarithm of these odds; beyond, too many trees would be needed to change them
    luck: float = 0.05  # probability that heads that know nothing are right

    # Rests
    first_advantage: float = 1.1  # of drafts over steps without; new heads get a few steps to show theirs
    newest_draft: float = 0.1  # weight of the newest draft in the average advantage; a few hard tokens start no rest
    shortest_rest: int = 4  # steps; a text has easy stretches of some ten tokens
    longest_rest: int = 128  # steps; a rest is twice as long as the one before, if no draft paid between
    small_look: int = 5  # nodes of the draft after a rest, or one size more; it only shows whether drafts pay by now
    alone: float = 1.3  # factor on what drafts gave lately; copies that promise more go without a draft
    plain_every: int = 64  # steps; one of so many is plain where it is close, so that a plain step's cost stays known
    sure: float = 1.3  # advantage from which on it is not close

    # Costs
    draft: float = 0.25  # plain steps of a draft, believed until one is seen
    noise: float = 0.3  # logarithm; how far a single time is off, believed until many are seen
    level_off: float = 0.3  # logarithm; how far the guessed cost of forwards may be off
    growth_off: float = 0.06  # logarithm for each doubling of tokens; how far the guessed growth may be off
    corner: float = 0.1  # logarithm; how far one size may be off the line through all sizes
    near: int = 4  # plain steps before a tree, and as many after it, that it is compared with
    plain_times: int = 7  # times of plain steps that are kept
    newest_times: int = 128  # times of trees that are kept; older ones are of another state of the machine
    first_slower: float = 1.5  # factor on the second time of a size; a first time above it made kernels, and goes


SETTINGS = Settings()
