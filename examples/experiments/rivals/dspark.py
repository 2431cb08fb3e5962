"""DSpark (arXiv 2607.05147): a block drafter with a light recurrence over the tokens that are drafted.

Two layers, which the paper has ahead of five of DFlash's. `logits_k = U_k + B(state, token_{k-1}, h_k)`: h_k is what
slot k gave, U_k its logits, and B what a gated cell of a quarter of the width makes of the tokens so far, through the
same lm_head. Trained by a tenth of cross-entropy and nine tenths of total variation.
"""

import torch
from torch import nn

from hf_clover import CloverConfig
from hf_clover.network.modeling_clover import CloverRMSNorm

from .base import linear
from .block import SLOTS, BlockHeads


class DSpark(BlockHeads):
    name = "dspark"
    fields = dict(num_heads=SLOTS, num_augmenting_layers=2, decoder="none", decoder_position="after")
    variation = 0.9

    def build(self, config: CloverConfig) -> None:
        super().build(config)
        size, self.width = config.hidden_size, config.hidden_size // 4
        self.token_norm = CloverRMSNorm(size, config.rms_norm_eps)
        self.read = nn.Linear(2 * size, 2 * self.width)
        self.again = nn.Linear(self.width, 2 * self.width, bias=False)
        self.say = linear(self.width, size, False, "zero")

    def with_drafted(
        self, slot: torch.Tensor, state: torch.Tensor | None, input_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slot = slot.expand(*input_ids.shape, -1)
        if state is None:
            state = slot.new_zeros(*slot.shape[:-1], self.width)  # [..., r]
        seen = self.read(torch.cat((self.token_norm(self.embed(input_ids)), slot), dim=-1)) + self.again(state)
        gate, new = seen.chunk(2, dim=-1)  # [..., r] each
        state = state + gate.sigmoid() * (new.tanh() - state)
        return slot + self.say(state), state
