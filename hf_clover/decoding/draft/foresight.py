"""Knowledge about the next tokens before they are drafted, so that drafts can match the tokens that will be picked.

There are two sources. One is the random numbers that plain generate is about to use. The other is used where the rows
of a batch advance at the pace of the slowest: the target's logits behind the node at which the last walk had to end.

Contract: a sampled token is a function of the target's logits and of the random numbers at its place in the text
(`call.Dice`), and of nothing else. Drafts decide which tokens are found early, never which tokens they are. So a draft
may look ahead. The target picks the id with the largest p / e, where p is its probability and e the random number of
the id. The drafter ranks its own p by the same e. Two similar distributions then agree far more often than with two
independent draws. The generator itself is not changed. Tokens known from nodes that were not walked are treated alike:
they are drafted, and verified once more.

Shapes: B batch, D levels of a tree, W beams, V vocabulary, U draft vocabulary, m nodes that were not walked.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..call import Dice, Text
from ..tree import Tree

LEAST = 0.001  # of the best token's probability: a less likely one is not drafted for its random number
KNOWN = -1e4  # log noise of a token that will be picked: it wins, whatever the heads' logits are


@dataclass
class Foresight:
    log_noise: torch.Tensor  # [B, D, V]
    temperature: float

    def weigh(
        self,
        level: int,
        logits: torch.Tensor,
        vocabulary: torch.Tensor | None,
        chosen: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [B, W, U] of tokens at a level -> logits by how likely plain generate will pick these tokens,
        whatever beams they are below. `chosen` and `tokens`: the arguments of `tree.Expand`."""
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
    """The random numbers of rows that may have different lengths. Numbers for a level are drawn when a tree reaches
    it, because most trees end before the last level. On a CPU, drawing 49,152 of them takes half as long as the heads
    take for a level."""

    def __init__(
        self, dice: Dice, rows: Sequence[int], lengths: Sequence[int], levels: int, temperature: float
    ) -> None:
        """`lengths`: the lengths of the texts of `rows`."""
        self.dice, self.places, self.levels, self.temperature = dice, list(zip(rows, lengths)), levels, temperature

    def whole(self) -> Foresight:
        """The same numbers, of all levels in one tensor, for graphs, which cannot draw."""
        levels = [self._of_level(level, None) for level in range(self.levels)]  # [B, 1, V] each
        return Foresight(torch.cat(levels, dim=1), self.temperature)

    def _of_level(self, level: int, ids: torch.Tensor | None) -> torch.Tensor:
        rows = [self.dice.at(length + level)[row] for row, length in self.places]  # [V] each
        noise = (rows[0][None] if len(rows) == 1 else torch.stack(rows))[:, None]  # [B, 1, V]
        return (noise if ids is None else noise.to(ids.device)[..., ids]).log()


@dataclass
class Unwalked:
    """The rest of a chain whose walk ended because one row of several had no matching draft. For rows that had one,
    the target's logits of the next tokens are known already."""

    tokens: torch.Tensor  # [B, m]
    logits: torch.Tensor  # [B, m, V]

    @classmethod
    def behind(cls, chain: Tree, logits: torch.Tensor, walked: int) -> "Unwalked":
        """What is left of `chain`, with logits [B, n, V], after `walked` nodes of each row."""
        return cls(chain.tokens[:, walked:], logits[:, walked:])

    def mark(self, log_noise: torch.Tensor, last_tokens: torch.Tensor, temperature: float) -> None:
        """Mark in `log_noise` [B, D, V] the tokens that will be picked after `last_tokens` [B], as far as the chain
        tells."""
        levels = min(log_noise.shape[1], self.tokens.shape[1])
        noise, tokens = log_noise[:, :levels], self.tokens[:, :levels].to(log_noise.device)
        logits = self.logits[:, :levels].to(log_noise.device).float()
        picks = (logits / temperature - noise).argmax(-1)  # [B, levels]
        nodes = torch.cat((last_tokens[:, None], picks[:, :-1]), dim=1)  # [B, levels] where they are picked
        is_known = (nodes == tokens).cumprod(1).bool()[..., None]  # [B, levels, 1]
        picks = picks[..., None]  # [B, levels, 1]
        noise.scatter_(2, picks, torch.where(is_known, KNOWN, noise.gather(2, picks)))


def foresee(text: Text, levels: int, vocab_size: int, unwalked: Unwalked | None = None) -> Foresight | None:
    """What is known about the next `levels` tokens of the running rows. None where nothing is: no random numbers are
    used, and nothing was left `unwalked`."""
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
