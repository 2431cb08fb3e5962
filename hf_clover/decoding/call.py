"""The state of one call of `generate`: the text so far, and everything of the caller's that is asked or told about it.

Contract: a `Text` is made once a call, from what the caller gave, and lives as long as the call. It says what the
caller's processors and criteria allow: whether rows may stand at different tokens, whether a token can be picked from
its logits alone. The walk appends to it. `Dice` are the random numbers that it is sampled with.

Shapes: B batch, V vocabulary, L text columns.
"""

import copy
import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import logits_process

from .tree import Tree, root_only


def _those(*names: str) -> tuple[type, ...]:
    """Of transformers' processors, as far as this version has them."""
    return tuple(getattr(logits_process, name) for name in names if hasattr(logits_process, name))


# Processors that do not look at the text at all.
SCORE_PROCESSORS = _those(
    *("TemperatureLogitsWarper", "TopPLogitsWarper", "TopKLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper"),
    *("TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper", "InfNanRemoveLogitsProcessor"),
    *("LogitNormalization", "SuppressTokensLogitsProcessor"),
)
# Those that are a pure function of one row: these may be called on each row when that row is there. Any other (a
# user's, a stateful one, one that reads a row's place in the batch) sees the whole batch, as in plain generate.
ROWWISE_PROCESSORS = SCORE_PROCESSORS + _those(
    *("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "RepetitionPenaltyLogitsProcessor"),
    *("NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor"),
    *("ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "ExponentialDecayLengthPenalty"),
    "SuppressTokensAtBeginLogitsProcessor",
)
MOST_BYTES = 1 << 28  # of random numbers that are kept; others are drawn again from the generator's state
_ROWWISE_CRITERIA = (MaxLengthCriteria, MaxTimeCriteria, EosTokenCriteria, StopStringCriteria)


def pad_token_of(config: GenerationConfig) -> int | None:
    """What finished rows go on with: the padding token, else the first of those that end a text."""
    token = config.eos_token_id if config.pad_token_id is None else config.pad_token_id
    return None if token is None else int(torch.as_tensor(token).flatten()[0])


@dataclass
class Text:
    """What has been emitted, and everything of the caller's that is asked or told about it."""

    input_ids: list[torch.Tensor]  # per row [1, L], or one [B, L] when the rows go in lockstep
    processors: list[LogitsProcessorList]  # for each entry of `input_ids`
    criteria: StoppingCriteriaList
    config: GenerationConfig
    streamer: Any = None
    pad: int | None = None  # what finished rows go on with; None where plain generate lets them go on
    max_length: int = 0
    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None
    in_lockstep: bool = True  # all rows stand at the same token, because something looks at the whole batch
    is_plain_greedy: bool = False  # picking a token takes its logits and nothing else
    scores_decide: bool = False  # no processor looks at the text
    dice: "Dice | None" = None  # where the text is sampled
    finished: list[bool] = field(default_factory=list)
    running: list[int] = field(default_factory=list)  # the rows that the target still runs, in its order
    ends: frozenset[int] = frozenset()  # tokens that end a row
    emitted: int = 0
    fresh: list[list[int]] = field(default_factory=list)  # per row, what was emitted and nobody has asked for yet
    found_no_drafts: bool = False  # this step's tree had nodes, and a row none that is valid

    @classmethod
    def start(
        cls,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: Any,
        all_as_one: bool = False,
    ) -> "Text":
        """`all_as_one`: rows go in lockstep whether or not anything looks at the whole batch."""
        batch = input_ids.shape[0]
        recorded = config.return_dict_in_generate
        text = cls(
            input_ids=[input_ids],
            processors=[processors],
            criteria=criteria,
            config=config,
            streamer=streamer,
            max_length=criteria.max_length or config.max_length,
            scores=() if recorded and config.output_scores else None,
            logits=() if recorded and config.output_logits else None,
            finished=[False] * batch,
            fresh=[[] for _ in range(batch)],
            running=list(range(batch)),
        )
        if any(hasattr(criterion, "eos_token_id") for criterion in criteria):
            text.pad = pad_token_of(config)
        endings = [c.eos_token_id for c in criteria if isinstance(c, EosTokenCriteria)]
        text.ends = frozenset(token for ending in endings for token in ending.flatten().tolist())
        records = text.scores is not None or text.logits is not None
        kinds = {type(criterion) for criterion in criteria}
        rowwise = all(type(p) in ROWWISE_PROCESSORS for p in processors) and kinds.issubset(_ROWWISE_CRITERIA)
        ends_alone = text.pad is not None or kinds == {MaxLengthCriteria}
        text.scores_decide = all(type(p) in SCORE_PROCESSORS for p in processors)
        if config.do_sample and picks_by_a_race(input_ids.device):
            text.dice = Dice(batch)
        can_part = rowwise and ends_alone and not (config.do_sample and text.dice is None)
        text.in_lockstep = all_as_one or batch == 1 or not can_part or records or streamer is not None
        text.is_plain_greedy = (
            not (config.do_sample or processors or records or (batch > 1 and text.in_lockstep))
            and kinds <= {MaxLengthCriteria, EosTokenCriteria}
        )  # fmt: skip
        if not text.in_lockstep:
            text.input_ids = list(input_ids.split(1))
            text.processors = [for_row(processors, row) for row in range(batch)]
        return text

    @property
    def done(self) -> bool:
        return all(self.finished)

    @property
    def budget_keys(self) -> tuple[Hashable, Hashable, int | None]:
        """What the cost of a step and the worth of a draft depend on in the caller's settings, and how many tokens a
        cache of fixed length holds beyond the text."""
        # To a digit: what is learned is kept, and a server may see any temperature there is.
        picking = self.config.do_sample and round(self.config.temperature, 1)
        longest = getattr(self.config, "max_cache_len", None)
        room = None if longest is None else longest - self.max_length
        return self.config.cache_implementation, (self.config.do_sample, picking), room

    @property
    def unfinished(self) -> list[int]:
        """Places among the running rows."""
        return [place for place, row in enumerate(self.running) if not self.finished[row]]

    def room_of(self, row: int) -> int:
        """How many tokens may come, where rows stand at lengths of their own."""
        return self.max_length - self.input_ids[row].shape[1]

    def limits(self) -> torch.Tensor:
        """Of each running row [B, 1 + E] how many tokens may come, and those that end it. On the host."""
        room = [0 if self.finished[row] else self.room_of(row) for row in self.running]
        return torch.tensor([[tokens, *self.ends] for tokens in room])

    def rows(self) -> list[torch.Tensor]:
        """Per row [L]."""
        return [row for ids in self.input_ids for row in ids]

    def running_rows(self) -> list[torch.Tensor]:
        rows = self.rows()
        return [rows[row] for row in self.running]

    def take_fresh(self) -> list[list[int]]:
        """Per row, the tokens since this was called last, which are on the host already."""
        fresh, self.fresh = self.fresh, [[] for _ in self.fresh]
        return fresh

    def last_tokens(self) -> Tree:
        """Of the running rows, as trees of one node each: what a forward takes that keeps other processes company."""
        return root_only(torch.stack([row[-1] for row in self.running_rows()]))

    def end(self) -> None:
        if self.streamer is not None:
            self.streamer.end()

    def sequences(self) -> torch.Tensor:
        """[B, L]: rows that ended early padded as plain generate pads them."""
        rows = self.rows()
        length = max(len(row) for row in rows)
        return torch.stack([torch.nn.functional.pad(row, (0, length - len(row)), value=self.pad or 0) for row in rows])


class Dice:
    """The random numbers that plain generate would use: for each length of the text, one for every row and id.

    `torch.multinomial` picks the largest p / e, with e drawn from an exponential distribution. So what is drawn at a
    length decides what is picked there, whoever asks first: drafts that look ahead, or rows that come to it one after
    the other. The generator itself stands where plain generate would have left it.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.next: int | None = None  # the length at which nobody has picked a token yet
        self.states: dict[int, torch.Tensor] = {}  # of the generator before each length
        self.numbers: dict[int, torch.Tensor] = {}  # [B, V] of lengths that were asked for lately

    def throw(self, rows: Sequence[int], lengths: Sequence[int], probs: torch.Tensor) -> torch.Tensor:
        """One token [k] for each of `rows`, standing at `lengths`, from its probabilities [k, V]; -1 for NaN."""
        self.like = probs  # float32, as the numbers are
        tokens = torch.empty(len(rows), dtype=torch.long, device=probs.device)
        for length in sorted(set(lengths)):
            places = [place for place, other in enumerate(lengths) if other == length]
            if self.next is None or length >= self.next:
                self._advance_over(length)
            numbers = self.at(length)
            if len(places) == self.batch_size:  # no index has to reach the device
                return self._first(probs, numbers)
            tokens[places] = self._first(probs[places], numbers[[rows[place] for place in places]])
        return tokens

    @staticmethod
    def _first(probs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        best, tokens = (probs / numbers).max(-1)  # [k], a NaN if there is one
        return tokens.masked_fill_(best.isnan(), -1)

    def at(self, length: int) -> torch.Tensor:
        """[B, V]; of a length that nobody has reached, what is drawn there if nothing else draws before."""
        if length not in self.numbers:
            if length not in self.states:
                self.at(length - 1)
            generator = torch.Generator(self.like.device)
            generator.set_state(self.states[length])
            numbers = self.like.new_empty(self.batch_size, self.like.shape[1])
            self.numbers[length] = numbers.exponential_(1, generator=generator)
            self.states.setdefault(length + 1, generator.get_state())
            if len(self.numbers) * numbers.nbytes > MOST_BYTES:
                del self.numbers[min(self.numbers.keys() - {length}, default=length)]
            return numbers
        return self.numbers[length]

    def forget_before(self, length: int) -> None:
        """No row stands at a shorter text any more."""
        for known in (self.states, self.numbers):
            for shorter in [other for other in known if other < length]:
                del known[shorter]

    def _advance_over(self, length: int) -> None:
        """The first row comes to `length`, and the generator goes on as plain generate's would. What was foreseen is
        forgotten where something else has drawn since."""
        now = random_state(self.like.device)
        if length not in self.states or not torch.equal(self.states[length], now):
            for known in (self.states, self.numbers):
                for later in [other for other in known if other >= length]:
                    del known[later]
            self.states[length] = now
        self.at(length)
        set_random_state(self.states[length + 1], self.like.device)
        self.next = length + 1


@functools.cache
def picks_by_a_race(device: torch.device) -> bool:
    """Whether `torch.multinomial` picks on this device as `Dice` do. Were a version of torch to do it in another way,
    sampled rows would go in lockstep, each token by `torch.multinomial` itself."""
    one, other = (torch.Generator(device).manual_seed(0) for _ in range(2))
    probs = torch.linspace(0.1, 1, 4096, dtype=torch.float32, device=device).view(2, -1).softmax(-1)  # [2, 2048]
    for _ in range(8):
        drawn = torch.multinomial(probs, num_samples=1, generator=one)[:, 0]  # [2]
        numbers = torch.empty_like(probs).exponential_(1, generator=other)
        if not torch.equal((probs / numbers).argmax(-1), drawn):
            return False
    return torch.equal(one.get_state(), other.get_state())


def random_state(device: torch.device) -> torch.Tensor:
    """Of the generator that plain generate draws from on this device."""
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def set_random_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def for_row(processors: LogitsProcessorList, row: int) -> LogitsProcessorList:
    """The processors as they treat one row: a repetition penalty knows how much padding each row begins with."""
    mine = LogitsProcessorList()
    for processor in processors:
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignored, torch.Tensor):
            processor = copy.copy(processor)
            processor.prompt_ignore_length = ignored[row : row + 1]
        mine.append(processor)
    return mine
