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
    """A level's numbers are drawn when a tree comes to it, since on a CPU 49,152 of them take half as long as the
    heads take for a level. Most trees end sooner than they might, and what `before` drew for tokens that have not been
    picked yet is drawn already."""

    def __init__(
        self, size: tuple[int, int, int], device: torch.device, temperature: float, before: Foresight | None
    ) -> None:
        """`size`: D, B, V. `before`: what the last draft was told."""
        (self.levels, *self.size), self.device, self.temperature = size, device, temperature
        state = random_state(device)
        self.noise: list[torch.Tensor] = []  # [B, V] of each level so far
        self.states = [state]  # of the generator before each of them, and after the last
        if isinstance(before, LevelByLevel) and before.size == self.size:
            picked = next((i for i, known in enumerate(before.states) if torch.equal(known, state)), None)
            if picked is not None:
                self.noise, self.states = before.noise[picked:], before.states[picked:]

    def whole(self) -> Foresight:
        self._draw(self.levels)
        return Foresight(torch.stack(self.noise[: self.levels], dim=1).log_(), self.temperature)

    def _draw(self, levels: int) -> None:
        """One token after the other, as plain generate will draw them."""
        if len(self.noise) >= levels:
            return
        generator = torch.Generator(self.device)
        generator.set_state(self.states[-1])
        while len(self.noise) < levels:
            numbers = torch.empty(self.size, device=self.device)
            self.noise.append(numbers.exponential_(1, generator=generator))
            self.states.append(generator.get_state())

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


def foresee(
    text: Text,
    levels: int,
    vocab_size: int,
    unwalked: Unwalked | None = None,
    before: Foresight | None = None,
) -> Foresight | None:
    """What the next `levels` tokens will be picked with; None where nothing is known of it: nothing is drawn, or rows
    draw at different tokens, and nothing was left `unwalked`. `before`: what the last draft of this text was told."""
    draws = text.config.do_sample and text.in_lockstep
    if not draws and unwalked is None:
        return None
    input_ids = text.input_ids[0]  # [B, L]
    size = levels, len(input_ids), vocab_size
    if draws:
        drawn = LevelByLevel(size, input_ids.device, text.config.temperature or 1.0, before)
        if unwalked is None:
            return drawn
        foresight = drawn.whole()
    else:
        foresight = Foresight(torch.zeros(size, device=input_ids.device).transpose(0, 1), 1.0)
    unwalked.mark(foresight.log_noise, input_ids[:, -1], foresight.temperature)
    return foresight
