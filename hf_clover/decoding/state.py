"""The state of one call of `generate`: the text so far, and everything of the caller's that is asked or told about it.

Contract: a `Text` is made once a call, from what the caller gave, and lives as long as the call. It says what the
caller's processors and criteria allow: whether rows may stand at different tokens, whether a token can be picked from
its logits alone. The walk appends to it. `Dice` are the random numbers of rows that stand at different tokens.

Shapes: B batch, V vocabulary, L text columns.
"""

import copy
from collections.abc import Hashable
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

from .private_api import pad_token_of
from .tree import Tree, root_only

# Processors that are a pure function of one row: these may be called on each row when that row is there. Any other
# (a user's, a stateful one, one that reads a row's place in the batch) sees the whole batch, as in plain generate.
_ROWWISE_PROCESSORS = tuple(
    getattr(logits_process, name)
    for name in (
        *("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "TemperatureLogitsWarper"),
        *("RepetitionPenaltyLogitsProcessor", "TopPLogitsWarper", "TopKLogitsWarper", "TopHLogitsWarper"),
        *("MinPLogitsWarper", "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper"),
        *("NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor"),
        *("ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor"),
        *("ExponentialDecayLengthPenalty", "LogitNormalization", "SuppressTokensLogitsProcessor"),
        "SuppressTokensAtBeginLogitsProcessor",
    )
    if hasattr(logits_process, name)
)
# Of these, the ones that do not look at the text at all.
_SCORE_PROCESSORS = tuple(
    getattr(logits_process, name)
    for name in (
        *("TemperatureLogitsWarper", "TopPLogitsWarper", "TopKLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper"),
        *("TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper", "InfNanRemoveLogitsProcessor"),
        *("LogitNormalization", "SuppressTokensLogitsProcessor"),
    )
    if hasattr(logits_process, name)
)
_ROWWISE_CRITERIA = (MaxLengthCriteria, MaxTimeCriteria, EosTokenCriteria, StopStringCriteria)


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
    dice: "Dice | None" = None  # where rows that do not stand at the same token are sampled
    finished: list[bool] = field(default_factory=list)
    running: list[int] = field(default_factory=list)  # the rows that the target still runs, in its order
    ends: frozenset[int] = frozenset()  # tokens that end a row
    emitted: int = 0
    fresh: list[list[int]] = field(default_factory=list)  # per row, what was emitted and nobody has asked for yet
    found_no_drafts: bool = False  # a tree had nodes, and none of them was valid

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
        rowwise = all(type(p) in _ROWWISE_PROCESSORS for p in processors) and kinds.issubset(_ROWWISE_CRITERIA)
        ends_alone = text.pad is not None or kinds == {MaxLengthCriteria}
        text.scores_decide = all(type(p) in _SCORE_PROCESSORS for p in processors)
        text.in_lockstep = all_as_one or batch == 1 or not rowwise or not ends_alone or records or streamer is not None
        text.is_plain_greedy = (
            not (config.do_sample or processors or records or (batch > 1 and text.in_lockstep))
            and kinds <= {MaxLengthCriteria, EosTokenCriteria}
        )  # fmt: skip
        if not text.in_lockstep:
            text.input_ids = list(input_ids.split(1))
            text.processors = [_for_row(processors, row) for row in range(batch)]
            text.dice = Dice(batch) if config.do_sample else None
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
    """The random numbers plain generate would use for one row of a batch, when the rows stand at different tokens.

    Plain generate draws for the whole batch at every token. So the first row to reach a token draws for the whole
    batch there and the generator's state before it is kept; a row that comes later draws again from that state.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.states: dict[int, torch.Tensor] = {}  # by text length

    def throw(self, rows: list[int], lengths: list[int], probs: torch.Tensor) -> torch.Tensor:
        """One token [k] for each of `rows`, standing at `lengths`, from its probabilities [k, V]."""
        tokens = torch.empty(len(rows), dtype=torch.long, device=probs.device)
        for length in sorted(set(lengths)):
            places = [place for place, other in enumerate(lengths) if other == length]
            weights = torch.ones(self.batch_size, probs.shape[1], dtype=probs.dtype, device=probs.device)  # [B, V]
            weights[[rows[place] for place in places]] = probs[places]
            now = random_state(probs.device)
            set_random_state(self.states.setdefault(length, now), probs.device)
            drawn = torch.multinomial(weights, num_samples=1).squeeze(1)  # [B]
            if self.states[length] is not now:
                set_random_state(now, probs.device)
            tokens[places] = drawn[[rows[place] for place in places]]
        return tokens


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


def _for_row(processors: LogitsProcessorList, row: int) -> LogitsProcessorList:
    """The processors as they treat one row: a repetition penalty knows how much padding each row begins with."""
    mine = LogitsProcessorList()
    for processor in processors:
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignored, torch.Tensor):
            processor = copy.copy(processor)
            processor.prompt_ignore_length = ignored[row : row + 1]
        mine.append(processor)
    return mine
