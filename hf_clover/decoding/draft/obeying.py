"""Drafts that obey the caller: nothing is drafted that a logits processor will not let through.

Contract: a processor that is a pure function of scores or of one row's text is asked along the paths of a tree, with
the draft's logits in place of the target's: what it forbids is not drafted, and what it favours is drafted first. A
grammar is asked, too: `prefix_allowed_tokens_fn`, and a processor that keeps matchers which can be forked, as
xgrammar's does; where it allows one token alone, or one text, that is a draft that costs no guess. Any other processor
with a state of its own is never asked here. What is drafted decides which tokens are found early, never which tokens
they are: the walk calls the caller's own processors as ever, once a token.

Shapes: B rows, W beams of a level, L columns of the text with the path, V vocabulary, U draft vocabulary, k tokens of
a run.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, SuppressTokensLogitsProcessor

from ...targets.private_api import allowed_by
from ..call import ROWWISE_PROCESSORS, SCORE_PROCESSORS, Text, for_row
from .foresight import Foresight

# Pure functions of scores or of one row's text that forbid tokens or favour some. What only narrows or flattens a
# distribution (top-k, temperature) forbids in the target's, which the draft's is not.
OBEYED = (*(one for one in ROWWISE_PROCESSORS if one not in SCORE_PROCESSORS), SuppressTokensLogitsProcessor)
MOST_FORCED = 24  # tokens of a run that a grammar leaves no choice in


class DraftLogitsProcessor(LogitsProcessor):
    """
    What the logits processors of a call of `generate` leave of drafts' logits, for the paths below one text.

    Args:
        processors (`LogitsProcessorList`):
            The caller's. Those that cannot be asked for drafts are left out.
        settled (`int`):
            Tokens of the text; those behind them are a path's.
        row (`int`, *optional*, defaults to 0):
            Of the batch, for processors that ask which it is.

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
        self.grammars: list[Any] = []  # which say what may come
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
        """Logits of what follows some paths.

        Args:
            input_ids (`torch.Tensor` of shape `[W, L]`):
                The text, with another path behind it in each row.
            scores (`torch.Tensor` of shape `[W, V]`):
                The draft's logits.

        Returns:
            `torch.Tensor` of shape `[W, V]`: -inf for what cannot come
        """
        for ask in self.asked:
            scores = ask(input_ids, scores)
        return scores

    def forced(self, input_ids: torch.Tensor) -> list[int]:
        """The run of tokens that a grammar leaves no choice in, or that a text without a choice is written with.

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
    """What a processor of one row says of all its paths: a repetition penalty knows the row's padding by a tensor."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, torch.Tensor):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = ignored.expand(len(input_ids))
    return processor(input_ids, scores)


class ByPrefix:
    """`prefix_allowed_tokens_fn`, which says of a text which tokens may follow it."""

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
    """A matcher of a grammar that stands before the text's last token: the caller's processor tells it a token when it
    is asked for the next one. It is forked along the paths and stays where it is."""

    def __init__(self, matcher: Any, settled: int, vocab_size: int) -> None:
        self.matcher, self.settled, self.vocab_size = matcher, settled, vocab_size
        # Tokens from the text's last one on -> a matcher that has read them and what may follow [V]; None where the
        # grammar is at its end, or never comes so far.
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
        # One text may be cut into tokens in several ways; a target nearly always writes it with the longest.
        return known[0].find_jump_forward_tokens() if hasattr(known[0], "find_jump_forward_tokens") else []


def has_matchers(processor: Any) -> bool:
    matchers = getattr(processor, "matchers", None)
    if not matchers or not hasattr(processor, "full_vocab_size"):
        return False
    return all(hasattr(matchers[0], name) for name in ("fork", "accept_token", "fill_next_token_bitmask"))


# ---------------------------------------------------------------------- along a tree


class Obedience(Foresight):
    """What is asked of the caller's processors while one tree grows."""

    def __init__(self, text: Text, vocab_size: int) -> None:
        self.foresight: Foresight | None = None  # what else is known of the next tokens
        self.vocab_size = vocab_size
        self.rows = text.running_rows()  # [L] each
        self.processors = [
            DraftLogitsProcessor(processors_of(text, row), len(ids), row)
            for row, ids in zip(text.running, self.rows, strict=True)
        ]
        self.paths: list[torch.Tensor] = []  # [W, L] of each row
        self.left_nothing = False  # of a row's first level

    def weigh(
        self,
        level: int,
        logits: torch.Tensor,
        vocabulary: torch.Tensor | None,
        chosen: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `Foresight.weigh`: logits [B, W, U], -inf for what cannot come below these beams."""
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
        nothing = (left == -torch.inf).all(-1, keepdim=True)  # that may come can be drafted
        self.left_nothing |= level == 0 and bool(nothing.any())
        if self.foresight is not None:
            left = self.foresight.weigh(level, left.masked_fill(nothing, 0.0), vocabulary, chosen, tokens)
        return left.masked_fill(nothing, -torch.inf)

    def cut(self, tokens: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
        """`log_probs` [B, k] of paths `tokens` [B, k], -inf from the first token on that cannot come."""
        log_probs = log_probs.clone()
        for ask, ids, path, sure in zip(self.processors, self.rows, tokens, log_probs, strict=True):
            for place in range(len(path)):
                if sure[place] == -torch.inf:
                    break
                scores = ids.new_zeros(1, self.vocab_size, dtype=torch.float32)
                so_far = torch.cat((ids, path[:place].to(ids)))[None]  # [1, L]
                if ask(so_far, scores)[0, path[place]] == -torch.inf:
                    sure[place:] = -torch.inf
        return log_probs

    def forced(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Of each row the run that it is forced to go on with: tokens [B, k], and joint log-probabilities [B, k], zero
        as far as the run goes and -inf behind it. None where no row is."""
        runs = [ask.forced(ids) for ask, ids in zip(self.processors, self.rows, strict=True)]
        longest = max(map(len, runs))
        if longest == 0:
            return None
        tokens = torch.tensor([run + [0] * (longest - len(run)) for run in runs])
        sure = torch.tensor([[0.0] * len(run) + [-torch.inf] * (longest - len(run)) for run in runs])
        several = any(len(ask.asked) > 1 for ask in self.processors)
        return tokens, self.cut(tokens, sure) if several else sure


def processors_of(text: Text, row: int) -> LogitsProcessorList:
    """As they treat this row of the batch."""
    return text.processors[row] if len(text.processors) > 1 else for_row(text.processors[0], row)


def must_obey(processors: Sequence[Any]) -> bool:
    """Whether any of them is asked for drafts."""
    return any(type(one) in OBEYED or allowed_by(one) is not None or has_matchers(one) for one in processors)


__all__ = ["DraftLogitsProcessor", "Obedience", "must_obey"]
