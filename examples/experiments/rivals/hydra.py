"""Hydra++ (arXiv 2402.05109): an MLP for each draft token that sees the tokens drafted before it.

A decoder layer over the target's hidden states (prefix attention, the first plus) runs once a step. Head i is an MLP
on its output beside the embeddings of the target's token and of the i tokens drafted since, four layers deep (the
second plus): the first reduces that row to one width, the others are residual. Trained on the target's distribution
(the third). The lm_head is the target's.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_clover import CloverConfig
from hf_clover.network.modeling_clover import AugmentingLayer, CloverRMSNorm, ResidualBlock

from .base import RivalHeads, linear

DEPTH = 4  # layers of each MLP


class HydraHead(nn.Module):
    def __init__(self, size: int, tokens: int) -> None:
        """`tokens`: those it sees beside the state."""
        super().__init__()
        self.skip = linear((1 + tokens) * size, size, True, "gaussian identity")
        self.first = linear((1 + tokens) * size, size, True, "zero")
        self.others = nn.ModuleList(ResidualBlock(size) for _ in range(DEPTH - 1))

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        x = self.skip(row) + F.silu(self.first(row))
        for block in self.others:
            x = block(x)
        return x


class Hydra(RivalHeads):
    name = "hydra++"
    fields = dict(
        num_heads=5,
        num_augmenting_layers=1,
        decoder="none",
        decoder_position="after",
        output_projector="residual",
        hidden_loss_weight=0.0,
    )

    def build(self, config: CloverConfig) -> None:
        size = config.hidden_size
        self.layers = nn.ModuleList([AugmentingLayer(config, 0)])
        self.norm = CloverRMSNorm(size, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.mlps = nn.ModuleList(HydraHead(size, 1 + i) for i in range(config.num_heads))

    def step(self, level: int, state: torch.Tensor, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The state is the row that the next head sees: wider by one embedding at each level."""
        row = torch.cat((state, self.embed(input_ids)), dim=-1)  # [..., (2 + level) d]
        return self.mlps[level](row), row
