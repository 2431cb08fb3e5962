"""The random numbers that plain generate is about to use, so that drafts can be what they will pick.

Contract: a sampled token is a function of the target's logits and of the random numbers drawn at its place in the
text, and of nothing else: what is drafted decides which tokens are found early, never which tokens they are. So a
draft may look ahead. `torch.multinomial` picks the largest p / e, with e drawn from an exponential distribution; the
drafter ranks its own p by the same e, and two distributions that are alike then agree far more often than two rolls
of two dice would. The generator itself is not touched. Were a version of torch to draw in another way, drafts would
be worse and the text the same.

Shapes: B batch, D levels of a tree, W beams, V vocabulary, U draft vocabulary.
"""

import math
from dataclasses import dataclass

import torch

from .state import Text, random_state

LEAST = 0.001  # of the best token's probability: what is under it in the draft is no guess, however lucky


@dataclass
class Foresight:
    log_noise: torch.Tensor  # [B, D, V]
    temperature: float

    def weigh(self, level: int, logits: torch.Tensor, vocabulary: torch.Tensor | None) -> torch.Tensor:
        """Logits [B, W, U] of tokens at a level -> the same, by how likely plain generate will pick them."""
        noise = self.log_noise[:, level, None]  # [B, 1, V]
        noise = noise if vocabulary is None else noise[..., vocabulary]  # [B, 1, U]
        log_probs = torch.log_softmax(logits.float() / self.temperature, dim=-1)
        hopeless = log_probs < log_probs.amax(-1, keepdim=True) + math.log(LEAST)
        return (log_probs - noise[..., : logits.shape[-1]]).masked_fill(hopeless, -torch.inf)


def foresee(text: Text, levels: int, vocab_size: int) -> Foresight | None:
    """What the next `levels` tokens will be drawn with; None where nothing is, or rows draw at different tokens."""
    if not text.config.do_sample or not text.in_lockstep:
        return None
    input_ids = text.input_ids[0]  # [B, L]
    device = input_ids.device
    generator = torch.Generator(device)
    generator.set_state(random_state(device))
    noise = torch.empty(levels, len(input_ids), vocab_size, device=device)
    for level in noise:  # one token after the other, as they will be drawn
        level.exponential_(1, generator=generator)
    return Foresight(noise.log_().transpose(0, 1), text.config.temperature or 1.0)
