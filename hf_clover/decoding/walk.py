"""The walk: plain generate, replayed on logits that are already there.

Contract: at a node, the caller's processors see that node's logits and exactly the `input_ids` plain generate would
show them, a token is picked as plain generate picks it, the stopping criteria are asked, and the walk goes on to the
child that carries the token. With no such child it ends, having still emitted one token. `replay` is this to the
letter; `greedy_walk` is the same for greedy decoding without processors, as tensor operations with one device sync.

Shapes: B batch, n tree nodes, V vocabulary, L text columns.
"""

import copy
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
    is_pure: bool = False  # processors and criteria may be called for tokens that are then dropped
    dice: "Dice | None" = None  # where rows that do not stand at the same token are sampled
    finished: list[bool] = field(default_factory=list)
    emitted: int = 0

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
        )
        if any(hasattr(criterion, "eos_token_id") for criterion in criteria) and config._pad_token_tensor is not None:
            text.pad = int(config._pad_token_tensor)
        records = text.scores is not None or text.logits is not None
        kinds = {type(criterion) for criterion in criteria}
        rowwise = all(type(p) in _ROWWISE_PROCESSORS for p in processors) and kinds.issubset(_ROWWISE_CRITERIA)
        ends_alone = text.pad is not None or kinds == {MaxLengthCriteria}
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

    def rows(self) -> list[torch.Tensor]:
        """Per row [L]."""
        return [row for ids in self.input_ids for row in ids]

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

    def throw(self, row: int, length: int, probs: torch.Tensor) -> torch.Tensor:
        """One token [1] for `row`, from its probabilities [1, V]."""
        random = torch.get_device_module(probs.device) if probs.device.type != "cpu" else torch
        device = (probs.device,) if probs.device.type != "cpu" else ()
        weights = torch.ones_like(probs).repeat(self.batch_size, 1)  # [B, V]
        weights[row] = probs[0]
        now = random.get_rng_state(*device)
        is_first = length not in self.states
        if is_first:
            self.states[length] = now
        else:
            random.set_rng_state(self.states[length], *device)
        token = torch.multinomial(weights, num_samples=1)[row]
        if not is_first:
            random.set_rng_state(now, *device)
        return token


# ---------------------------------------------------------------------- the plain walk


def replay(tree: Tree, logits: torch.Tensor, text: Text) -> list[list[int]]:
    """Walk each row of logits [B, n, V]; returns the walked nodes per row, one per emitted token."""
    children = _children(tree)
    paths: list[list[int]] = [[] for _ in children]
    if text.in_lockstep:
        _replay_rows(0, list(range(len(children))), children, logits, text, paths)
    else:
        for row, is_finished in enumerate(text.finished):
            if not is_finished:
                _replay_rows(row, [row], children, logits, text, paths)
    return paths


def _replay_rows(
    part: int,
    rows: list[int],
    children: list[dict[tuple[int, int], int]],
    logits: torch.Tensor,
    text: Text,
    paths: list[list[int]],
) -> None:
    """Walk `rows` together: `text.input_ids[part]` holds them, and all of them stand at the same length."""
    nodes = [0] * len(rows)
    index = torch.tensor(rows, device=logits.device)
    while True:
        input_ids = text.input_ids[part]  # [k, L]
        here = logits[index, torch.tensor(nodes, device=logits.device)]  # [k, V]
        raw = here.to(copy=True, dtype=torch.float32, device=input_ids.device)
        scores = text.processors[part](input_ids, raw)  # [k, V]
        if bool(torch.isnan(scores).any()):
            raise_nan(rows, scores)
        if text.scores is not None:
            text.scores += (scores,)
        if text.logits is not None:
            text.logits += (raw,)
        if text.config.do_sample:
            probs = torch.nn.functional.softmax(scores, dim=-1)
            if text.dice is None:
                tokens = torch.multinomial(probs, num_samples=1).squeeze(1)  # [k]
            else:
                tokens = text.dice.throw(rows[0], input_ids.shape[1], probs)
        else:
            tokens = torch.argmax(scores, dim=-1)  # [k]
        if text.pad is not None:
            ended = torch.tensor([text.finished[row] for row in rows], device=tokens.device)
            tokens = tokens.masked_fill(ended, text.pad)
        text.input_ids[part] = input_ids = torch.cat((input_ids, tokens[:, None]), dim=-1)
        stops = text.criteria(input_ids, text.scores).tolist()
        picked = tokens.tolist()
        for place, row in enumerate(rows):
            paths[row].append(nodes[place])
            text.emitted += not text.finished[row]
            text.finished[row] = text.finished[row] or stops[place]
        if text.streamer is not None:
            text.streamer.put(tokens.cpu())
        next_nodes = [children[row].get((node, token)) for row, node, token in zip(rows, nodes, picked, strict=True)]
        if all(text.finished[row] for row in rows) or None in next_nodes:
            return
        nodes = next_nodes


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
    found = []
    for tokens, parents, valid in zip(tree.tokens.tolist(), tree.parents.tolist(), tree.valid.tolist(), strict=True):
        found.append({(parents[n], tokens[n]): n for n in range(len(tokens) - 1, 0, -1) if valid[n]})
    return found


# ---------------------------------------------------------------------- the fast walk


def greedy_path(tree: Tree, picks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the target's own choices [B, n] lead: the walked nodes [B, depth + 1] from the root, and their number."""
    carried = tree.valid & (tree.tokens == picks.gather(1, tree.parents))  # [B, n] what its parent's pick asks for
    root = torch.zeros_like(carried)
    root[:, 0] = True
    walked = carried | root
    for _ in range(tree.max_depth):
        walked = root | (carried & walked.gather(1, tree.parents))
    path = torch.zeros(picks.shape[0], tree.max_depth + 2, dtype=torch.long, device=picks.device)
    order = torch.arange(tree.size, device=picks.device).expand_as(picks)
    path.scatter_(1, torch.where(walked, tree.depths, tree.max_depth + 1), order)
    return path[:, :-1], walked.sum(1)


def greedy_walk(tree: Tree, logits: torch.Tensor, text: Text) -> list[list[int]]:
    """`replay` for greedy decoding without processors: the same events, found with one device sync."""
    tree, picks = tree.to(logits.device), logits.argmax(dim=-1)  # picks [B, n]
    path, counts = greedy_path(tree, picks)
    tokens = picks.gather(1, path)  # [B, depth + 1]
    ends = torch.zeros_like(tokens, dtype=torch.bool)
    for criterion in text.criteria:
        if isinstance(criterion, EosTokenCriteria):
            ends |= torch.isin(tokens, criterion.eos_token_id.to(tokens.device))
    broken = (
        logits.gather(2, picks[..., None]).squeeze(2).gather(1, path).isnan()
    )  # argmax finds a NaN if there is one
    packed = torch.cat((counts[:, None], tokens, ends, broken, path), dim=1).tolist()  # the one sync
    width, paths = tokens.shape[1], []
    for row, (count, *rest) in enumerate(packed):
        if text.finished[row]:
            paths.append([])
            continue
        tokens_, ends_, broken_, path_ = (rest[i * width : (i + 1) * width] for i in range(4))
        input_ids = text.input_ids[row]  # [1, L]
        count = min(count, text.max_length - input_ids.shape[1])
        count = next((place + 1 for place in range(count) if ends_[place]), count)
        if any(broken_[:count]):
            raise_nan([row], logits[row : row + 1].flatten(0, 1))
        new = torch.tensor([tokens_[:count]], dtype=input_ids.dtype, device=input_ids.device)
        text.input_ids[row] = torch.cat((input_ids, new), dim=-1)
        text.emitted += count
        text.finished[row] = bool(ends_[count - 1]) or text.input_ids[row].shape[1] >= text.max_length
        if text.streamer is not None:
            for token in new[0].cpu().split(1):
                text.streamer.put(token)
        paths.append(path_[:count])
    return paths


def raise_nan(rows: list[int], scores: torch.Tensor) -> None:
    raise ValueError(
        f"`logits` of the target contain NaN (batch row {rows[0] if len(rows) == 1 else rows}, "
        f"{int(torch.isnan(scores).sum())} values): the target, or a logits processor, is numerically broken. Load it "
        'in another dtype (`dtype="bfloat16"` or "float32"), or pass `remove_invalid_values=True` to `generate`.'
    )
