"""The state of one call of `generate`: the text so far, and the caller's processors, criteria and streamer.

Contract: each call makes one `Text` from its arguments. The `Text` says what the caller's processors and criteria
allow: whether rows may have different lengths, and whether logits alone decide a token. The walk appends tokens to it.
`Dice` holds the random numbers that the tokens are sampled with.

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
    """The classes of transformers' processors with these names, as far as this version has them."""
    return tuple(getattr(logits_process, name) for name in names if hasattr(logits_process, name))


# Processors that do not look at the text at all.
SCORE_PROCESSORS = _those(
    *("TemperatureLogitsWarper", "TopPLogitsWarper", "TopKLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper"),
    *("TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper", "InfNanRemoveLogitsProcessor"),
    *("LogitNormalization", "SuppressTokensLogitsProcessor"),
)
# Processors that are a pure function of one row: they may be called for each row at its own length. Any other (a
# user's, a stateful one, one that reads a row's place in the batch) sees the whole batch, as in plain generate.
ROWWISE_PROCESSORS = SCORE_PROCESSORS + _those(
    *("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "RepetitionPenaltyLogitsProcessor"),
    *("NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor"),
    *("ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "ExponentialDecayLengthPenalty"),
    "SuppressTokensAtBeginLogitsProcessor",
)
MOST_BYTES = 1 << 28  # bytes of random numbers that are kept; others are drawn again from the generator's state
_ROWWISE_CRITERIA = (MaxLengthCriteria, MaxTimeCriteria, EosTokenCriteria, StopStringCriteria)


def pad_token_of(config: GenerationConfig) -> int | None:
    """The token that fills finished rows: the padding token, else the first token that ends a text."""
    token = config.eos_token_id if config.pad_token_id is None else config.pad_token_id
    return None if token is None else int(torch.as_tensor(token).flatten()[0])


def longest_text(criteria: StoppingCriteriaList, config: GenerationConfig) -> int:
    """Tokens that a text may have in the end, its prompt among them."""
    return criteria.max_length or config.max_length


def room_beside(config: GenerationConfig, longest: int) -> int | None:
    """How many tokens a cache of fixed length holds beside a text of `longest` tokens; None if the cache may grow."""
    columns = getattr(config, "max_cache_len", None)
    return None if columns is None else columns - longest


@dataclass
class Text:
    """The emitted text, and the caller's processors, criteria and streamer."""

    input_ids: list[torch.Tensor]  # per row [1, L], or one [B, L] when the rows go in lockstep
    processors: list[LogitsProcessorList]  # for each entry of `input_ids`
    criteria: StoppingCriteriaList
    config: GenerationConfig
    streamer: Any = None
    pad: int | None = None  # the token that fills finished rows; None where plain generate lets them continue
    max_length: int = 0
    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None
    in_lockstep: bool = True  # all rows have the same length, because something looks at the whole batch
    is_plain_greedy: bool = False  # a token is the argmax of its logits; nothing else decides
    scores_decide: bool = False  # no processor looks at the text
    dice: "Dice | None" = None  # None where tokens are picked without them
    finished: list[bool] = field(default_factory=list)
    running: list[int] = field(default_factory=list)  # the rows that the target still runs, in its order
    ends: frozenset[int] = frozenset()  # tokens that end a row
    emitted: int = 0
    tokens: list[list[int]] = field(default_factory=list)  # per row, the same text on the host
    found_no_drafts: bool = False  # this step's tree had nodes, but some row had no valid one

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
        """`all_as_one`: rows stay in lockstep even if nothing looks at the whole batch."""
        batch = input_ids.shape[0]
        recorded = config.return_dict_in_generate
        text = cls(
            input_ids=[input_ids],
            processors=[processors],
            criteria=criteria,
            config=config,
            streamer=streamer,
            max_length=longest_text(criteria, config),
            scores=() if recorded and config.output_scores else None,
            logits=() if recorded and config.output_logits else None,
            finished=[False] * batch,
            tokens=input_ids.tolist(),
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
        """Three things that the budget asks about the caller's settings: what the cost of a step depends on, what the
        value of a draft depends on, and how many tokens a cache of fixed length holds beyond the text."""
        # Rounded to one digit: figures are kept for each temperature, and a server may see very many.
        picking = self.config.do_sample and round(self.config.temperature, 1)
        room = room_beside(self.config, self.max_length)
        return self.config.cache_implementation, (self.config.do_sample, picking), room

    @property
    def unfinished(self) -> list[int]:
        """The places, among the running rows, of those that are not finished."""
        return [place for place, row in enumerate(self.running) if not self.finished[row]]

    def room_of(self, row: int) -> int:
        """How many more tokens `row` may get. `input_ids` must have an entry for each row."""
        return self.max_length - self.input_ids[row].shape[1]

    def limits(self) -> torch.Tensor:
        """[B, 1 + E]: how many more tokens each running row may get, and the E tokens that end it. On the host."""
        room = [0 if self.finished[row] else self.room_of(row) for row in self.running]
        return torch.tensor([[tokens, *self.ends] for tokens in room])

    def rows(self) -> list[torch.Tensor]:
        """The text of each row, [L] each."""
        return [row for ids in self.input_ids for row in ids]

    def running_rows(self) -> list[torch.Tensor]:
        rows = self.rows()
        return [rows[row] for row in self.running]

    def last_tokens(self) -> Tree:
        """The last tokens of the running rows, as trees of one node each. They are the input of a forward that runs
        only because other processes run one."""
        return root_only(torch.stack([row[-1] for row in self.running_rows()]))

    def end(self) -> None:
        if self.streamer is not None:
            self.streamer.end()

    def sequences(self) -> torch.Tensor:
        """[B, L]: rows that ended early are padded as plain generate pads them."""
        rows = self.rows()
        length = max(len(row) for row in rows)
        return torch.stack([torch.nn.functional.pad(row, (0, length - len(row)), value=self.pad or 0) for row in rows])


class Dice:
    """The random numbers that plain generate would use: for each length of the text, one for every row and token id.

    `torch.multinomial` picks the largest p / e, with e drawn from an exponential distribution. So the numbers drawn
    for a length decide which token is picked there, whoever asks first: a draft that looks ahead, or rows that reach
    that length one after the other. The generator itself is left in the state in which plain generate would leave it.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.next: int | None = None  # the shortest length at which no token has been picked
        self.states: dict[int, torch.Tensor] = {}  # length -> the generator's state before that length
        self.numbers: dict[int, torch.Tensor] = {}  # length -> its numbers [B, V], for lengths used lately

    def throw(self, rows: Sequence[int], lengths: Sequence[int], probs: torch.Tensor) -> torch.Tensor:
        """Pick one token for each of `rows`, whose texts have these `lengths`, by its probabilities [k, V]. Returns
        tokens [k], with -1 where a probability is NaN."""
        self.like = probs  # float32, as the numbers are
        tokens = torch.empty(len(rows), dtype=torch.long, device=probs.device)
        for length in sorted(set(lengths)):
            places = [place for place, other in enumerate(lengths) if other == length]
            if self.next is None or length >= self.next:
                self._advance_over(length)
            numbers = self.at(length)
            if len(places) == self.batch_size:  # no index has to be copied to the device
                return self._first(probs, numbers)
            tokens[places] = self._first(probs[places], numbers[[rows[place] for place in places]])
        return tokens

    @staticmethod
    def _first(probs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        best, tokens = (probs / numbers).max(-1)  # [k], NaN if any value is NaN
        return tokens.masked_fill_(best.isnan(), -1)

    def at(self, length: int) -> torch.Tensor:
        """The numbers [B, V] of a length. For a length that no row has reached: the numbers that will be drawn there
        if nothing else draws before."""
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
        """Delete the states and numbers of shorter lengths: every row is at least this long."""
        for known in (self.states, self.numbers):
            for shorter in [other for other in known if other < length]:
                del known[shorter]

    def _advance_over(self, length: int) -> None:
        """The first row reaches `length`: advance the generator as plain generate would. Numbers drawn ahead are
        deleted if something else has drawn since."""
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
    """Whether `torch.multinomial` picks tokens on this device as `Dice` does. If a version of torch picks in another
    way, sampled rows stay in lockstep and `torch.multinomial` itself picks each token."""
    one, other = (torch.Generator(device).manual_seed(0) for _ in range(2))
    probs = torch.linspace(0.1, 1, 4096, dtype=torch.float32, device=device).view(2, -1).softmax(-1)  # [2, 2048]
    for _ in range(8):
        drawn = torch.multinomial(probs, num_samples=1, generator=one)[:, 0]  # [2]
        numbers = torch.empty_like(probs).exponential_(1, generator=other)
        if not torch.equal((probs / numbers).argmax(-1), drawn):
            return False
    return torch.equal(one.get_state(), other.get_state())


def random_state(device: torch.device) -> torch.Tensor:
    """The state of the generator that plain generate draws from on this device."""
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def set_random_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def for_row(processors: LogitsProcessorList, row: int) -> LogitsProcessorList:
    """The processors for one row: a repetition penalty, which knows the padding of every row, gets this row's
    alone."""
    mine = LogitsProcessorList()
    for processor in processors:
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignored, torch.Tensor):
            processor = copy.copy(processor)
            processor.prompt_ignore_length = ignored[row : row + 1]
        mine.append(processor)
    return mine
