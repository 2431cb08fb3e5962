"""Drafts that obey the caller's logits processors: forbidden tokens are not drafted.

Contract: a processor that is a pure function of scores or of one row's text is called along the paths of a tree, with
the draft's logits in place of the target's. Tokens that it forbids are not drafted, and tokens that it favours are
drafted first. Grammars are called, too: `prefix_allowed_tokens_fn`, and processors whose matchers can be forked, as
xgrammar's can. Where a grammar allows only one token, or one text, it is drafted without the heads. Any other
processor with a state of its own is never called here. Drafts decide which tokens are found early, never which tokens
they are: the walk calls the caller's own processors as always, once per token.

Shapes: B rows, W beams of a level, L columns of the text with the path, V vocabulary, U draft vocabulary.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, SuppressTokensLogitsProcessor

from ...targets.private_api import allowed_by
from ..call import ROWWISE_PROCESSORS, SCORE_PROCESSORS, Text, for_row
from .copies import Path
from .foresight import Foresight

# Pure functions of scores or of one row's text that forbid or favour tokens. Processors that only narrow or flatten a
# distribution (top-k, temperature) are left out: they apply to the target's distribution, not to the draft's.
OBEYED = (*(one for one in ROWWISE_PROCESSORS if one not in SCORE_PROCESSORS), SuppressTokensLogitsProcessor)
MOST_FORCED = 24  # longest run of tokens without a choice


class DraftLogitsProcessor(LogitsProcessor):
    """
    Applies the logits processors of a call of `generate` to drafts' logits, for the paths below one text.

    Args:
        processors (`LogitsProcessorList`):
            The caller's processors. Those that cannot be called for drafts are left out.
        settled (`int`):
            Number of tokens of the text; the tokens after them belong to a path.
        row (`int`, *optional*, defaults to 0):
            Number of the row in the batch, for processors that need it.

    Example:

    ```python
    >>> import torch
    >>> from hf_clover import DraftLogitsProcessor
    >>> from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor

    >>> obeys = DraftLogitsProcessor(LogitsProcessorList([SuppressTokensLogitsProcessor([2])]), settled=3)
    >>> obeys(torch.tensor([[5, 6, 7]]), torch.zeros(1, 4)).tolist()
    [[0.0, 0.0, -inf, 0.0]]
    ```
    """

    def __init__(self, processors: LogitsProcessorList, settled: int, row: int = 0) -> None:
        self.grammars: list[Any] = []  # those that allow tokens, in the caller's order
        self.asked: list[Callable[[Any, Any], torch.Tensor]] = []  # all, in the caller's order
        for processor in processors:
            grammar: Any = None
            if type(processor) in OBEYED:
                self.asked.append(partial(_of_paths, processor))
            elif (allowed := allowed_by(processor)) is not None:
                grammar = ByPrefix(allowed, row)
            elif has_matchers(processor):
                grammar = ByMatcher(processor.matchers[row], settled, processor.full_vocab_size)
            if grammar is not None:
                self.grammars.append(grammar)
                self.asked.append(grammar)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Apply the processors to the logits of the tokens after some paths.

        Args:
            input_ids (`torch.Tensor` of shape `[W, L]`):
                The text followed by a path, a different one in each row.
            scores (`torch.Tensor` of shape `[W, V]`):
                The draft's logits.

        Returns:
            `torch.Tensor` of shape `[W, V]`: -inf for forbidden tokens
        """
        for ask in self.asked:
            scores = ask(input_ids, scores)
        return scores

    def forced(self, input_ids: torch.Tensor) -> list[int]:
        """The tokens that must follow because a grammar leaves no choice of tokens, or of the text that they spell.

        Args:
            input_ids (`torch.Tensor` of shape `[L]`):
                The text.

        Returns:
            `list[int]`: the run, often empty
        """
        run: list[int] = []
        while self.grammars and len(run) < MOST_FORCED and (more := self.grammars[0].forced(input_ids)):
            input_ids = torch.cat((input_ids, input_ids.new_tensor(more)))
            run += more
        return run[:MOST_FORCED]


def _of_paths(processor: Any, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Call the processor of one row for all paths of that row. A repetition penalty holds the row's padding in a
    tensor, which is repeated for each path."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, torch.Tensor):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = ignored.expand(len(input_ids))
    return processor(input_ids, scores)


class ByPrefix:
    """`prefix_allowed_tokens_fn`, which returns the tokens that may follow a text."""

    def __init__(self, allowed: Callable[[int, torch.Tensor], list[int]], row: int) -> None:
        self.allowed, self.row = allowed, row

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forbidden = torch.ones_like(scores, dtype=torch.bool)
        for beam, ids in enumerate(input_ids):
            forbidden[beam, self.allowed(self.row, ids)] = False
        return scores.masked_fill(forbidden, -torch.inf)

    def forced(self, input_ids: torch.Tensor) -> list[int]:
        allowed = self.allowed(self.row, input_ids)
        return [int(allowed[0])] if len(allowed) == 1 else []


class ByMatcher:
    """A grammar's matcher, which has read all of the text but its last token: the caller's processor passes it a token
    when it is called for the next one. The matcher is forked along the paths and is not changed."""

    def __init__(self, matcher: Any, settled: int, vocab_size: int) -> None:
        self.matcher, self.settled, self.vocab_size = matcher, settled, vocab_size
        # Tokens from the text's last one on -> a matcher that has read them, and the tokens that may follow [V]. None
        # where the grammar has ended, or does not allow these tokens.
        self.known: dict[tuple[int, ...], tuple[Any, torch.Tensor] | None] = {}

    def _behind(self, tokens: tuple[int, ...]) -> tuple[Any, torch.Tensor] | None:
        if tokens not in self.known:
            before = self.matcher
            if len(tokens) > 1:
                known = self._behind(tokens[:-1])
                before = None if known is None or not known[1][tokens[-1] : tokens[-1] + 1].any() else known[0]
            self.known[tokens] = None if before is None or before.is_terminated() else self._read(before, tokens[-1])
        return self.known[tokens]

    def _read(self, matcher: Any, token: int) -> tuple[Any, torch.Tensor] | None:
        fork = matcher.fork()
        if not fork.accept_token(token) or fork.is_terminated():
            return None
        words = torch.full((1, -(-self.vocab_size // 32)), -1, dtype=torch.int32)
        fork.fill_next_token_bitmask(words, 0)
        bits = (words[0, :, None] >> torch.arange(32, dtype=torch.int32)) & 1  # [words, 32]
        return fork, bits.flatten()[: self.vocab_size].bool()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for beam, tokens in enumerate(input_ids[:, self.settled - 1 :].tolist()):
            known = self._behind(tuple(tokens))
            if known is not None:
                allowed = known[1]
                count = min(len(allowed), scores.shape[1])
                scores[beam, :count].masked_fill_(~allowed[:count].to(scores.device), -torch.inf)
        return scores

    def forced(self, input_ids: torch.Tensor) -> list[int]:
        known = self._behind(tuple(input_ids[self.settled - 1 :].tolist()))
        if known is None:
            return []
        if int(known[1].sum()) == 1:
            return [int(known[1].nonzero()[0])]
        # A text can be split into tokens in several ways; a target nearly always writes the longest tokens.
        return known[0].find_jump_forward_tokens() if hasattr(known[0], "find_jump_forward_tokens") else []


def has_matchers(processor: Any) -> bool:
    matchers = getattr(processor, "matchers", None)
    if not matchers or not hasattr(processor, "full_vocab_size"):
        return False
    return all(hasattr(matchers[0], name) for name in ("fork", "accept_token", "fill_next_token_bitmask"))


# ---------------------------------------------------------------------- along a tree


class Obedience(Foresight):
    """Calls the caller's processors while one tree grows."""

    def __init__(self, text: Text, vocab_size: int) -> None:
        self.foresight: Foresight | None = None  # what else is known about the next tokens
        self.vocab_size = vocab_size
        self.rows = text.running_rows()  # [L] each
        self.processors = [
            DraftLogitsProcessor(processors_of(text, row), len(ids), row)
            for row, ids in zip(text.running, self.rows, strict=True)
        ]
        self.paths: list[torch.Tensor] = []  # [W, L] of each row
        self.left_nothing = False  # the processors forbade all drafts of some row's first level

    def weigh(
        self,
        level: int,
        logits: torch.Tensor,
        vocabulary: torch.Tensor | None,
        chosen: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `Foresight.weigh`: logits [B, W, U], -inf for tokens that are forbidden below these beams."""
        if chosen is None or tokens is None:
            self.paths = [ids[None].to(logits.device) for ids in self.rows]  # [1, L]
        else:
            self.paths = [
                torch.cat((path[beams], token[:, None]), dim=1)
                for path, beams, token in zip(self.paths, chosen, tokens, strict=True)
            ]
        whole = logits.float()  # [B, W, V]
        if vocabulary is not None:
            whole = whole.new_full((*logits.shape[:2], self.vocab_size), -torch.inf)
            whole[..., vocabulary] = logits.float()
        left = torch.stack(
            [ask(path, here) for ask, path, here in zip(self.processors, self.paths, whole, strict=True)]
        )
        left = left if vocabulary is None else left[..., vocabulary]  # [B, W, U]
        nothing = (left == -torch.inf).all(-1, keepdim=True)  # no allowed token can be drafted
        self.left_nothing |= level == 0 and bool(nothing.any())
        if self.foresight is not None:
            left = self.foresight.weigh(level, left.masked_fill(nothing, 0.0), vocabulary, chosen, tokens)
        return left.masked_fill(nothing, -torch.inf)

    def cut(self, paths: Sequence[Path]) -> list[Path]:
        """The path of each row up to its first forbidden token."""
        found = []
        for ask, ids, (tokens, joint) in zip(self.processors, self.rows, paths, strict=True):
            for place, token in enumerate(tokens):
                scores = ids.new_zeros(1, self.vocab_size, dtype=torch.float32)
                so_far = torch.cat((ids, ids.new_tensor(tokens[:place])))[None]  # [1, L]
                if ask(so_far, scores)[0, token] == -torch.inf:
                    tokens, joint = tokens[:place], joint[:place]
                    break
            found.append((tokens, joint))
        return found

    def forced(self) -> list[Path]:
        """The tokens that must follow in each row."""
        runs = [ask.forced(ids) for ask, ids in zip(self.processors, self.rows, strict=True)]
        paths = [(run, [0.0] * len(run)) for run in runs]
        return self.cut(paths) if any(len(ask.asked) > 1 for ask in self.processors) else paths


def processors_of(text: Text, row: int) -> LogitsProcessorList:
    """The processors for this row of the batch."""
    return text.processors[row] if len(text.processors) > 1 else for_row(text.processors[0], row)


def must_obey(processors: Sequence[Any]) -> bool:
    """Whether any of them must be called for drafts."""
    return any(type(one) in OBEYED or allowed_by(one) is not None or has_matchers(one) for one in processors)
