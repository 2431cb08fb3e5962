"""As many nodes for every tree as give the most tokens per second.

Contract: `AutomaticBudget` learns two things as steps go by, and keeps them from call to call: what a step costs
(`costs`, for each device, dtype, number of rows and doubling of the text), and how much the draft's own probabilities
are worth (`acceptance`). Of each drafted tree it keeps the size that gives the most tokens per plain step (`choice`).
Where drafts promise less than a step without them, the heads rest (`rest`). Where steps are graphs, reading a draft's
probabilities would be a second wait for the device: there the size is chosen before the draft, by what trees of each
size have given. `settings` has every constant.

Shapes: B rows, N draft nodes.
"""

import copy
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from ...network.modeling_heads import DraftHeads
from ...network.target_parts import device_of
from ..target.memory import memory_of
from ..tree import Tree
from .acceptance import Acceptance
from .choice import choose, gains_of
from .costs import ON_CPU, ON_DEVICE, Costs, Guess
from .fixed import Budget
from .rest import Rest
from .settings import SETTINGS, SIZES, SIZES_IN_GRAPHS

Key = tuple[Hashable, int, int]  # what costs depend on: the mode, the rows, and how often their text has doubled


@dataclass
class Learned:
    """What was learned of steps with one number of rows and about one length of text."""

    costs: Costs = field(default_factory=Costs)
    rest: Rest = field(default_factory=Rest)
    chosen: tuple[int, ...] = ()  # nodes that paid most in the last trees


@dataclass
class Experience:
    """What was learned of one target with one set of heads."""

    steps: dict[Key, Learned] = field(default_factory=dict)
    acceptance: dict[Hashable, Acceptance] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)  # threads share what they learn


class AutomaticBudget(Budget):
    def __init__(
        self,
        experience: Experience,
        ceiling: int,
        mode: Hashable,
        picking: Hashable,
        guess: Guess = ON_CPU,
        in_graphs: bool = False,
    ) -> None:
        """`mode`: what costs depend on beside rows and context; `picking`: what acceptance depends on; `guess`: of
        what trees cost, until they are seen; `in_graphs`: steps are graphs."""
        self.experience, self.mode, self.guess, self.in_graphs = experience, mode, guess, in_graphs
        sizes = [size for size in SIZES if size <= ceiling]
        self.sizes = [size for size in sizes if size in (*SIZES_IN_GRAPHS, sizes[-1])] if in_graphs else sizes
        self.acceptance = experience.acceptance.setdefault(picking, Acceptance())
        self.learned: Learned  # of such steps as `ask` was asked about last
        self.key: Key | None = None  # of these
        self.drafts = self.since_plain = 0
        # Of this step:
        self.forwards: dict[int, float] = {}  # nodes -> plain steps that a forward over them takes
        self.drafting: dict[int, float] = {}  # nodes -> plain steps that a draft of them takes
        self.drafted = self.copied = 0  # nodes
        self.replayed = 0  # tokens
        self.rest_gives = 1.0  # tokens in a plain step's time, that this step promises without a draft
        self.log_probs: torch.Tensor | None = None  # [B, N] of its tree, of the rows that count

    @property
    def most_nodes(self) -> int:
        return self.sizes[-1]

    def ask(self, lengths: Sequence[int], replayed: int = 0, copies: torch.Tensor | None = None) -> tuple[int, int]:
        """A step goes without the heads where they rest, or where copies promise much more than drafts gave."""
        self.copied, self.replayed, self.rest_gives = 0, replayed, 1.0
        learned = self._look_up(len(lengths), max(lengths))
        may_draft = learned.rest.may_draft()
        if self._must_be_plain(learned):
            return 0, 0
        guess = self.guess.of(len(lengths))
        self.forwards, self.drafting = learned.costs.of_sizes(self.sizes, guess, replayed)
        if copies is not None:
            copied, self.rest_gives = self._without_heads(copies, lengths)
            may_draft &= copied == 0 or self.rest_gives <= SETTINGS.alone * learned.rest.advantage
            self.copied = 0 if may_draft else copied
        if not may_draft:
            return 0, self.copied
        if self.in_graphs:
            return self._size_before_the_draft(learned, len(lengths)), 0
        return self._most_worth_drafting(learned, len(lengths)), 0

    def cut(self, tree: Tree, rows: Sequence[int], lengths: Sequence[int]) -> Tree:
        self.drafted, self.log_probs = 0 if self.copied else tree.size - 1, None
        if not self.drafted or self.in_graphs:
            return tree
        log_probs = tree.log_probs[:, 1:].cpu()[list(rows)]  # [rows, N]; the one wait for the draft
        if bool((log_probs[:, 0] > -torch.inf).any()):  # else there is nothing to choose from; the walk will say so
            best = self._size_after_the_draft(log_probs, lengths)
            tree, log_probs = tree.first(best), log_probs[:, :best]
        self.log_probs = log_probs
        return tree

    def learn(self, tree: Tree, paths: Sequence[Sequence[int]], draft_seconds: float, forward_seconds: float) -> None:
        nodes, costs = tree.size - 1, self.learned.costs
        self.since_plain += 1
        with self.experience.lock:
            if self.log_probs is not None and nodes:
                self.acceptance.learn(self.log_probs, paths)
            if self.in_graphs and self.drafted:
                self.acceptance.learn_sizes([size for size in self.sizes if 0 < size <= nodes], paths)
            if nodes + self.replayed or self.drafted:
                costs.learn_tree(self.drafted, draft_seconds, nodes + self.replayed, forward_seconds)
            else:
                self.since_plain = 0
                costs.learn_plain(forward_seconds)

    # ------------------------------------------------------------------ what is known

    def _look_up(self, rows: int, context: int) -> Learned:
        key = ((self.mode, self.in_graphs), rows, context.bit_length())
        if key != self.key:
            known = self.experience.steps
            with self.experience.lock:
                if key not in known:
                    known[key] = self._begin_with_the_nearest(key)
                if self.key is None:
                    known[key].rest.begin_call()
            self.key, self.learned = key, known[key]
        return self.learned

    def _begin_with_the_nearest(self, key: Key) -> Learned:
        """What is known of the nearest length of text, until more is known."""
        known = self.experience.steps
        others = [other for other in known if other[:2] == key[:2]]
        nearest = min(others, key=lambda other: abs(other[2] - key[2]), default=None)
        return Learned() if nearest is None else copy.deepcopy(known[nearest])

    def _must_be_plain(self, learned: Learned) -> bool:
        """Whether this step shall show what a plain one costs."""
        known = len(learned.costs.plain)
        if known == 0:
            return True
        return self.since_plain >= min(2 << known, SETTINGS.plain_every) and learned.rest.advantage < SETTINGS.sure

    # ------------------------------------------------------------------ sizes

    def _most_worth_drafting(self, learned: Learned, rows: int) -> int:
        """As many nodes as the largest of the last trees kept; now and then one size more, to see whether it pays."""
        sizes, chosen = self.sizes, learned.chosen
        most = max(1, *chosen) if chosen else _first_nodes(rows)
        paid = chosen[-1:] == (most,)  # the last tree was worth as much as had been drafted lately
        looks = paid and (len(chosen) < SETTINGS.lately or self.drafts % SETTINGS.look_every == 0)
        return sizes[min(sum(size <= most for size in sizes) - 1 + looks, len(sizes) - 1)]

    def _size_before_the_draft(self, learned: Learned, rows: int) -> int:
        """By the trees before this one; now and then one size more."""
        sizes, s = self.sizes, SETTINGS
        if not sizes[-1]:
            return 0
        self.drafts += 1
        if not any(size in self.acceptance.tokens for size in sizes):
            return max([size for size in sizes if size <= _first_nodes(rows)], default=0) or sizes[1]
        tokens = self.acceptance.given_by(sizes)
        steps = [self.forwards[size] + self.drafting[size] for size in sizes]
        place = 1 + choose(tokens[1:], steps[1:])
        learned.chosen = (*learned.chosen, sizes[place])[-s.lately :]
        if self.drafts % s.explore_every == 0 or (len(learned.chosen) < s.lately and self.drafts % s.look_every == 0):
            return sizes[min(place + 1, len(sizes) - 1)]
        self._compare(learned, tokens[place], steps[place], rows)
        return sizes[place] if learned.rest.is_over else 0

    def _size_after_the_draft(self, log_probs: torch.Tensor, lengths: Sequence[int]) -> int:
        """How many nodes of a tree are worth their time."""
        learned, s = self.learned, SETTINGS
        drafted = int((log_probs > -torch.inf).sum(1).max())  # the rest are places that could not be filled
        sizes = [size for size in self.sizes if size <= drafted]
        self.drafts += 1
        gained = gains_of(self.acceptance.expected(log_probs)[:, :drafted], lengths)
        verified = {0, *(seen.nodes - self.replayed for seen in learned.costs.forwards)}
        tokens = [gained[size] * (1.0 if size in verified else s.hope) for size in sizes]
        forwards = [self.forwards[size] for size in sizes]
        steps = [self.forwards[size] + self.drafting[size] for size in sizes]
        place = choose(tokens, steps)  # of so many nodes, had no more been drafted
        learned.chosen = (*learned.chosen, sizes[place])[-s.lately :]
        self._compare(learned, tokens[place], steps[place], len(lengths))
        if self.drafts % s.explore_every == 0:
            up = place == 0 or self.drafts // s.explore_every % 2
            return sizes[min(place + 1, len(sizes) - 1) if up else place - 1]
        paid = self.drafting[sizes[-1]]  # for all that was drafted, whatever is verified of it
        return sizes[choose(tokens, [forward + paid for forward in forwards])]

    def _without_heads(self, copies: torch.Tensor, lengths: Sequence[int]) -> tuple[int, float]:
        """How many copied tokens a step without a draft verifies, and the tokens that it promises in a plain step's
        time."""
        gained = gains_of(copies.exp(), lengths)
        sizes = [size for size in self.sizes if size < len(gained)]
        tokens, forwards = [gained[size] for size in sizes], [self.forwards[size] for size in sizes]
        place = choose(tokens, forwards)
        return sizes[place], tokens[place] / forwards[place]

    def _compare(self, learned: Learned, tokens: float, steps: float, rows: int) -> None:
        """A draft with a step without it, at the same place."""
        learned.rest.learn(tokens / steps / self.rest_gives)
        if not learned.rest.is_over:
            self.acceptance.forget()
            learned.chosen = (min(SETTINGS.small_look, _first_nodes(rows)),)


def _first_nodes(rows: int) -> int:
    """Of the first tree of each row."""
    return max(SETTINGS.first_nodes // rows, 1)


def make_budget(
    asked: int | None,
    is_ceiling: bool,
    target: PreTrainedModel,
    heads: DraftHeads,
    mode: Hashable = None,
    picking: Hashable = None,
    room: int | None = None,
    in_graphs: bool = False,
) -> Budget:
    """`asked` nodes at every step, or, where it is None or a ceiling, as many as pay."""
    if asked is not None and not is_ceiling:
        return Budget(asked)
    ceiling = min(limit for limit in (asked, room, SIZES[-1]) if limit is not None)
    experience = memory_of(target).experience.setdefault(heads, Experience())
    device = device_of(target)
    guess = ON_CPU if device.type == "cpu" else ON_DEVICE
    return AutomaticBudget(experience, max(ceiling, 0), (device, target.dtype, mode), picking, guess, in_graphs)


def plain_step_of(target: PreTrainedModel, heads: DraftHeads, length: int) -> float | None:
    """Seconds that a step of one row takes without drafts, as seen lately where a text had about that length; None
    where the automatic budget has seen none."""
    experience = memory_of(target).experience.get(heads)
    if experience is None:
        return None
    with experience.lock:
        seen = {key: learned.costs.plain_step for key, learned in experience.steps.items() if key[1] == 1}
    known = {key: seconds for key, seconds in seen.items() if seconds is not None}
    return known[min(known, key=lambda key: abs(key[2] - length.bit_length()))] if known else None
