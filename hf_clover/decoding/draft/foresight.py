"""What is known of the next tokens before they are drafted, so that drafts can be what will be picked.

Two things are: the random numbers that plain generate is about to use, and, where the rows of a batch go at the pace
of the slowest, what the target said behind the node at which the last walk had to end.

Contract: a sampled token is a function of the target's logits and of the random numbers drawn at its place in the
text (`state.Dice`), and of nothing else: what is drafted decides which tokens are found early, never which tokens they
are. So a draft may look ahead. The target's p and the number e at each id give the pick, the largest p / e; the
drafter ranks its own p by the same e, and two distributions that are alike then agree far more often than two rolls
of two dice would. The generator itself is not touched. The same holds for what was not walked: it is drafted, and
verified once more.

Shapes: B batch, D levels of a tree, W beams, V vocabulary, U draft vocabulary, m nodes that were not walked.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..call import Dice, Text
from ..tree import Tree

LEAST = 0.001  # of the best token's probability: what is under it in the draft is no guess, however lucky
KNOWN = -1e4  # log noise of a token that will be picked: whatever the heads say of it, no other comes near


@dataclass
class Foresight:
    log_noise: torch.Tensor  # [B, D, V]
    temperature: float

    def weigh(
        self,
        level: int,
        logits: torch.Tensor,
        vocabulary: torch.Tensor | None,
        chosen: "torch.Tensor | None" = None,
        tokens: "torch.Tensor | None" = None,
    ) -> torch.Tensor:
        """Logits [B, W, U] of tokens at a level -> the same, by how likely plain generate will pick them, whatever the
        beams are that they stand below: `chosen` and `tokens` as `tree.Expand` is given them."""
        noise = self._of_level(level, vocabulary)[..., : logits.shape[-1]].to(logits.device)  # [B, 1, U]
        log_probs = torch.log_softmax(logits.float() / self.temperature, dim=-1)
        hopeless = (log_probs < log_probs.amax(-1, keepdim=True) + math.log(LEAST)) & (noise > KNOWN)
        return (log_probs - noise).masked_fill(hopeless, -torch.inf)

    def whole(self) -> "Foresight":
        return self

    def _of_level(self, level: int, ids: torch.Tensor | None) -> torch.Tensor:
        noise = self.log_noise[:, level, None]  # [B, 1, V]
        return noise if ids is None else noise[..., ids]


class FromDice(Foresight):
    """The numbers of rows that may stand at different tokens. A level's are drawn when a tree comes to it, since most
    trees end sooner than they might, and on a CPU 49,152 of them take half as long as the heads take for a level."""

    def __init__(
        self, dice: Dice, rows: Sequence[int], lengths: Sequence[int], levels: int, temperature: float
    ) -> None:
        """`lengths`: of the texts of `rows`."""
        self.dice, self.places, self.levels, self.temperature = dice, list(zip(rows, lengths)), levels, temperature

    def whole(self) -> Foresight:
        """The same with all levels as one tensor, for graphs, which draw nothing."""
        levels = [self._of_level(level, None) for level in range(self.levels)]  # [B, 1, V] each
        return Foresight(torch.cat(levels, dim=1), self.temperature)

    def _of_level(self, level: int, ids: torch.Tensor | None) -> torch.Tensor:
        rows = [self.dice.at(length + level)[row] for row, length in self.places]  # [V] each
        noise = (rows[0][None] if len(rows) == 1 else torch.stack(rows))[:, None]  # [B, 1, V]
        return (noise if ids is None else noise.to(ids.device)[..., ids]).log()


@dataclass
class Unwalked:
    """The rest of a chain whose walk ended because one row of several had no draft there. Where another row had one,
    the target has said already what comes after it."""

    tokens: torch.Tensor  # [B, m]
    logits: torch.Tensor  # [B, m, V]

    @classmethod
    def behind(cls, chain: Tree, logits: torch.Tensor, walked: int) -> "Unwalked":
        """`walked` nodes of `chain`, of each row, with logits [B, n, V]."""
        return cls(chain.tokens[:, walked:], logits[:, walked:])

    def mark(self, log_noise: torch.Tensor, last_tokens: torch.Tensor, temperature: float) -> None:
        """Write into `log_noise` [B, D, V] which tokens come after `last_tokens` [B], as far as the chain goes."""
        levels = min(log_noise.shape[1], self.tokens.shape[1])
        noise, tokens = log_noise[:, :levels], self.tokens[:, :levels].to(log_noise.device)
        logits = self.logits[:, :levels].to(log_noise.device).float()
        picks = (logits / temperature - noise).argmax(-1)  # [B, levels]
        nodes = torch.cat((last_tokens[:, None], picks[:, :-1]), dim=1)  # [B, levels] that they are picked at
        is_known = (nodes == tokens).cumprod(1).bool()[..., None]  # [B, levels, 1]
        picks = picks[..., None]  # [B, levels, 1]
        noise.scatter_(2, picks, torch.where(is_known, KNOWN, noise.gather(2, picks)))


def foresee(text: Text, levels: int, vocab_size: int, unwalked: Unwalked | None = None) -> Foresight | None:
    """What the next `levels` tokens of the running rows will be picked with; None where nothing is known of it:
    nothing is drawn, and nothing was left `unwalked`."""
    foresight: Foresight | None = None
    rows = text.running_rows()  # [L] each
    if text.dice is not None and text.dice.next is not None:
        lengths = [len(row) for row in rows]
        longest = max([lengths[place] for place in text.unfinished], default=max(lengths))
        lengths = [longest if text.finished[row] else length for row, length in zip(text.running, lengths)]
        foresight = FromDice(text.dice, text.running, lengths, levels, text.config.temperature or 1.0)
    if unwalked is None:
        return foresight
    if foresight is None:
        foresight = Foresight(
            torch.zeros(len(rows), levels, vocab_size, dtype=torch.float32, device=rows[0].device), 1.0
        )
    foresight = foresight.whole()
    unwalked.mark(foresight.log_noise, torch.stack([row[-1] for row in rows]), foresight.temperature)
    return foresight
