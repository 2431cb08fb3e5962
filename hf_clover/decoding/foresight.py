"""What is known of the next tokens before they are drafted, so that drafts can be what will be picked.

Two things are: the random numbers that plain generate is about to use, and, where the rows of a batch go at the pace
of the slowest, what the target said behind the node at which the last walk had to end.

Contract: a sampled token is a function of the target's logits and of the random numbers drawn at its place in the
text, and of nothing else: what is drafted decides which tokens are found early, never which tokens they are. So a
draft may look ahead. `torch.multinomial` picks the largest p / e, with e drawn from an exponential distribution; the
drafter ranks its own p by the same e, and two distributions that are alike then agree far more often than two rolls
of two dice would. The generator itself is not touched. Were a version of torch to draw in another way, drafts would
be worse and the text the same. The same holds for what was not walked: it is drafted, and verified once more.

Shapes: B batch, D levels of a tree, W beams, V vocabulary, U draft vocabulary, m nodes that were not walked.
"""

import math
from dataclasses import dataclass

import torch

from .state import Text, random_state
from .tree import Tree

LEAST = 0.001  # of the best token's probability: what is under it in the draft is no guess, however lucky
KNOWN = -1e4  # log noise of a token that will be picked: whatever the heads say of it, no other comes near


@dataclass
class Foresight:
    log_noise: torch.Tensor  # [B, D, V]
    temperature: float

    def weigh(self, level: int, logits: torch.Tensor, vocabulary: torch.Tensor | None) -> torch.Tensor:
        """Logits [B, W, U] of tokens at a level -> the same, by how likely plain generate will pick them."""
        noise = self._of_level(level, vocabulary)[..., : logits.shape[-1]]  # [B, 1, U]
        log_probs = torch.log_softmax(logits.float() / self.temperature, dim=-1)
        hopeless = (log_probs < log_probs.amax(-1, keepdim=True) + math.log(LEAST)) & (noise > KNOWN)
        return (log_probs - noise).masked_fill(hopeless, -torch.inf)

    def whole(self) -> "Foresight":
        """The same with all levels as one tensor, for graphs, which read no generator."""
        return self

    def _of_level(self, level: int, ids: torch.Tensor | None) -> torch.Tensor:
        noise = self.log_noise[:, level, None]  # [B, 1, V]
        return noise if ids is None else noise[..., ids]


class LevelByLevel(Foresight):
    """A level's numbers are drawn when a tree comes to it: most trees end sooner than they might, and on a CPU a level
    of 49,152 numbers takes about as long to draw as the heads take for theirs."""

    def __init__(
        self, generator: torch.Generator, levels: int, rows: int, vocab_size: int, temperature: float
    ) -> None:
        self.generator, self.levels, self.size, self.temperature = generator, levels, (rows, vocab_size), temperature
        self.noise: list[torch.Tensor] = []  # [B, V] each

    def whole(self) -> Foresight:
        self._draw(self.levels)
        return Foresight(torch.stack(self.noise, dim=1).log_(), self.temperature)

    def _draw(self, levels: int) -> None:
        """One token after the other, as plain generate will draw them."""
        while len(self.noise) < levels:
            numbers = torch.empty(self.size, device=self.generator.device)
            self.noise.append(numbers.exponential_(1, generator=self.generator))

    def _of_level(self, level: int, ids: torch.Tensor | None) -> torch.Tensor:
        self._draw(level + 1)
        noise = self.noise[level][:, None]  # [B, 1, V]
        return (noise if ids is None else noise[..., ids]).log()


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
    """What the next `levels` tokens will be picked with; None where nothing is known of it: nothing is drawn, or rows
    draw at different tokens, and nothing was left `unwalked`."""
    draws = text.config.do_sample and text.in_lockstep
    if not draws and unwalked is None:
        return None
    input_ids = text.input_ids[0]  # [B, L]
    device, rows = input_ids.device, len(input_ids)
    if draws:
        generator = torch.Generator(device)
        generator.set_state(random_state(device))
        drawn = LevelByLevel(generator, levels, rows, vocab_size, text.config.temperature or 1.0)
        if unwalked is None:
            return drawn
        foresight = drawn.whole()
    else:
        foresight = Foresight(torch.zeros(rows, levels, vocab_size, device=device), 1.0)
    unwalked.mark(foresight.log_noise, input_ids[:, -1], foresight.temperature)
    return foresight
