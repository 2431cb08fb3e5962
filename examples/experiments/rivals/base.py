"""What all rivals share: how they are made, and what they borrow of the target.

Contract: `RivalHeads` is `CloverHeads` with another network and, where that drafts in another way, another drafter.
"""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_clover import CloverHeads, CloverTrainer
from hf_clover.decoding.draft.drafter import CloverDrafter
from hf_clover.network.modeling_heads import DraftHeads


class NetworkDrafter(CloverDrafter):
    """Drafts by the rival's own `encode` and `step`. Graphs of drafts are the library's heads' own."""


class RivalHeads(CloverHeads):
    name: ClassVar[str]
    fields: ClassVar[dict[str, Any]]  # of `CloverConfig`: what the library reads of it, sizes, and the paper's loss
    drafter: ClassVar[type[CloverDrafter]] = NetworkDrafter
    trainer: ClassVar[type[CloverTrainer]] = CloverTrainer
    _auto_class = None  # a rival is no remote code

    @classmethod
    def from_target(cls, target: PreTrainedModel, **fields: Any) -> "RivalHeads":
        """Tokens are rows of the target's input embedding, as all these papers take them. Parts that heads of the
        library have too, under the same names, start as theirs do."""
        fields = {"variant": "clover-2", "token_embedding": "input", **cls.fields, **fields}
        ours = CloverHeads.from_target(target, **fields)
        config = ours.config
        config.initializer_range = (3 * config.hidden_size) ** -0.5  # torch's own for a linear layer
        config.layer_ids = cls.layers_of(target)
        heads = cls(config)
        heads.load_state_dict(ours.state_dict(), strict=False)
        return heads.to(device=ours.device, dtype=ours.dtype).bind(target)

    @classmethod
    def layers_of(cls, target: PreTrainedModel) -> list[int]:
        """Whose states they read; none for what enters the final norm."""
        return []

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return tuple(self.config.layer_ids)

    def new_drafter(
        self, network: DraftHeads, prompt_mask: torch.Tensor | None = None, block: int | None = None
    ) -> CloverDrafter:
        return self.drafter(network, prompt_mask, block)


def linear(inputs: int, outputs: int, bias: bool, start: str) -> nn.Linear:
    """A linear layer that starts as `CloverHeads._init_weights` reads it: "zero" or "gaussian identity"."""
    made = nn.Linear(inputs, outputs, bias=bias)
    made.start = start
    return made
