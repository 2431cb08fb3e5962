"""DFlash: a block drafter whose positions do not know each other.

Five layers, once a step. A tree is the product of the positions' own distributions, best first. Trained by soft
cross-entropy.
"""

import torch

from .block import SLOTS, BlockHeads


class DFlash(BlockHeads):
    name = "dflash"
    fields = dict(num_heads=SLOTS, num_augmenting_layers=5, decoder="none", decoder_position="after")
    variation = 0.0

    def with_drafted(
        self, slot: torch.Tensor, state: torch.Tensor | None, input_ids: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        return slot, None
