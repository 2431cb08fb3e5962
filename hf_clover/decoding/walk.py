"""The walk: plain generate, replayed on logits that are already there.

Contract: at a node, the caller's processors see that node's logits and exactly the `input_ids` plain generate would
show them, a token is picked as plain generate picks it, the stopping criteria are asked, and the walk goes on to the
child that carries the token. With no such child it ends, having still emitted one token. `replay` is this to the
letter; `greedy_walk` is the same for greedy decoding without processors, as tensor operations with one device sync.

Shapes: B batch, n tree nodes, V vocabulary, L text columns.
"""

import copy
from collections.abc import Sequence
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
from .tree import Tree

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
    is_pure: bool = False  # processors and criteria may be called for tokens that are then dropped
    dice: "Dice | None" = None  # where rows that do not stand at the same token are sampled
    finished: list[bool] = field(default_factory=list)
    live: list[int] = field(default_factory=list)  # the rows that the target still runs, in its order
    ends: frozenset[int] = frozenset()  # tokens that end a row
    emitted: int = 0
    found_no_drafts: bool = False  # a tree had nodes, and none of them was valid

    @classmethod
    def start(
        cls,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: Any,
    ) -> "Text":
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
            live=list(range(batch)),
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
        text.is_pure = rowwise and kinds <= {MaxLengthCriteria, EosTokenCriteria}
        text.in_lockstep = batch == 1 or not rowwise or not ends_alone or records or streamer is not None
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
    def unfinished(self) -> list[int]:
        """Places among the live rows."""
        return [place for place, row in enumerate(self.live) if not self.finished[row]]

    def rows(self) -> list[torch.Tensor]:
        """Per row [L]."""
        return [row for ids in self.input_ids for row in ids]

    def live_rows(self) -> list[torch.Tensor]:
        rows = self.rows()
        return [rows[row] for row in self.live]

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


# ---------------------------------------------------------------------- the plain walk


def replay(tree: Tree, logits: torch.Tensor, text: Text) -> list[list[int]]:
    """Walk each live row of logits [B, n, V]; returns the walked nodes per row, one per emitted token."""
    paths: list[list[int]] = [[] for _ in text.live]
    children = _children(tree)
    text.found_no_drafts |= tree.size > 1 and not all(children[place] for place in text.unfinished)
    walk = _replay_in_lockstep if text.in_lockstep else _replay_abreast
    walk(children, logits, text, paths)
    return paths


def _replay_in_lockstep(
    children: list[dict[tuple[int, int], int]], logits: torch.Tensor, text: Text, paths: list[list[int]]
) -> None:
    """All rows at one token, as in plain generate, until a row finds no child: its next token is not known yet."""
    nodes = [0] * len(children)
    while True:
        input_ids = text.input_ids[0]  # [B, L]
        raw = _logits_at(logits, range(len(nodes)), nodes).to(input_ids.device)  # [B, V]
        scores = _process(text.processors[0], input_ids, raw)  # [B, V]
        if text.scores is not None:
            text.scores += (scores,)
        if text.logits is not None:
            text.logits += (raw,)
        if text.config.do_sample:
            probs = torch.nn.functional.softmax(scores, dim=-1)
            tokens = torch.multinomial(probs, num_samples=1).squeeze(1)  # [B]
        else:
            tokens = torch.argmax(scores, dim=-1)  # [B]
        if text.pad is not None:
            tokens = tokens.masked_fill(torch.tensor(text.finished, device=tokens.device), text.pad)
        text.input_ids[0] = input_ids = torch.cat((input_ids, tokens[:, None]), dim=-1)
        stops = text.criteria(input_ids, text.scores).tolist()
        for row, stop in enumerate(stops):
            paths[row].append(nodes[row])
            text.emitted += not text.finished[row]
            text.finished[row] = text.finished[row] or stop
        if text.streamer is not None:
            text.streamer.put(tokens.cpu())
        nodes = [
            below.get(step) for below, step in zip(children, zip(nodes, tokens.tolist(), strict=True), strict=True)
        ]
        if text.done or None in nodes:
            return


def _replay_abreast(
    children: list[dict[tuple[int, int], int]], logits: torch.Tensor, text: Text, paths: list[list[int]]
) -> None:
    """Each row at its own token, as far as it gets; what is asked of a row is asked as if it were alone."""
    at = dict.fromkeys(text.unfinished, 0)  # place -> node
    while at:
        places, nodes = list(at), list(at.values())
        rows = [text.live[place] for place in places]
        raw = _logits_at(logits, places, nodes)  # [k, V]
        if text.scores_decide:
            scores = _process(text.processors[0], None, raw)  # [k, V]
        else:
            each = zip(rows, raw.split(1), strict=True)
            scores = torch.cat([_process(text.processors[row], text.input_ids[row], here) for row, here in each])
        if text.dice is not None:
            lengths = [text.input_ids[row].shape[1] for row in rows]
            tokens = text.dice.throw(rows, lengths, torch.nn.functional.softmax(scores, dim=-1))  # [k]
        else:
            tokens = torch.argmax(scores, dim=-1)  # [k]
        at = {}
        for place, row, node, token in zip(places, rows, nodes, tokens.tolist(), strict=True):
            new = torch.tensor([[token]], device=text.input_ids[row].device)
            text.input_ids[row] = torch.cat((text.input_ids[row], new), dim=-1)
            paths[place].append(node)
            text.emitted += 1
            text.finished[row] = bool(text.criteria(text.input_ids[row], None))
            child = children[place].get((node, token))
            if child is not None and not text.finished[row]:
                at[place] = child


def _logits_at(logits: torch.Tensor, rows: Sequence[int], nodes: Sequence[int]) -> torch.Tensor:
    """A copy [k, V] in float32, as plain generate takes it."""
    rows, nodes = (torch.tensor(index, device=logits.device) for index in (list(rows), list(nodes)))
    return logits[rows, nodes].to(copy=True, dtype=torch.float32)


def _process(processors: LogitsProcessorList, input_ids: torch.Tensor | None, raw: torch.Tensor) -> torch.Tensor:
    scores = processors(input_ids, raw)
    if bool(torch.isnan(scores).any()):
        raise_nan(scores)
    return scores


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


def _children(tree: Tree) -> list[dict[tuple[int, int], int]]:
    """Per row: (node, token) -> the child of that node that carries that token."""
    packed = torch.stack((tree.tokens, tree.parents, tree.valid.long()), dim=1)  # [B, 3, n]
    return [_children_of_row(*row) for row in packed.tolist()]


def _children_of_row(tokens: list[int], parents: list[int], valid: list[int]) -> dict[tuple[int, int], int]:
    return {(parents[n], tokens[n]): n for n in range(len(tokens) - 1, 0, -1) if valid[n]}


# ---------------------------------------------------------------------- the fast walk


def greedy_walk(tree: Tree, logits: torch.Tensor, text: Text) -> list[list[int]]:
    """`replay` for greedy decoding without processors: the same events, found with one device sync."""
    best, picks = logits.max(dim=-1)  # [B, n], a NaN if there is one
    broken, tree = best.isnan(), tree.to(logits.device)
    packed = torch.stack((tree.tokens, tree.parents, tree.valid.long(), picks, broken.long()), dim=1)  # [B, 5, n]
    paths: list[list[int]] = []
    for place, (row, packed_row) in enumerate(zip(text.live, packed.tolist(), strict=True)):  # the one sync
        tokens, parents, valid, chosen, is_broken = packed_row
        path: list[int] = []
        paths.append(path)
        if text.finished[row]:
            continue
        children = _children_of_row(tokens, parents, valid)
        text.found_no_drafts |= tree.size > 1 and not children
        input_ids = text.input_ids[row]  # [1, L]
        room = text.max_length - input_ids.shape[1]
        node: int | None = 0
        while node is not None:
            if is_broken[node]:
                raise_nan(logits[place])
            path.append(node)
            text.finished[row] = chosen[node] in text.ends or len(path) >= room
            node = None if text.finished[row] else children.get((node, chosen[node]))
        new = torch.tensor([[chosen[node] for node in path]], dtype=input_ids.dtype, device=input_ids.device)
        text.input_ids[row] = torch.cat((input_ids, new), dim=-1)
        text.emitted += len(path)
        if text.streamer is not None:
            for token in new[0].cpu().split(1):
                text.streamer.put(token)
    return paths


def raise_nan(scores: torch.Tensor) -> None:
    raise ValueError(
        f"`logits` of the target contain NaN ({int(torch.isnan(scores).sum())} of {scores.numel()} values): the "
        "target, or a logits processor, is numerically broken. Load the target in another dtype (say, bfloat16), "
        "or pass `remove_invalid_values=True` to `generate`."
    )
