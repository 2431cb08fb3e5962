"""EAGLE (arXiv 2401.15077): one decoder layer that goes on with the target's features.

A feature is what the target feeds into its lm_head. A linear layer brings the pair of a feature and the embedding of
the token after it back to one width, and a decoder layer without its first norm, attending over all pairs so far,
gives the next feature. Beyond the text, drafted features stand in for the target's. Trained with SmoothL1 to the
target's next feature and a tenth of the soft cross-entropy, on features with a little uniform noise.
"""

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_clover import CloverConfig
from hf_clover.network.modeling_clover import AugmentingLayer, CloverOutput
from hf_clover.network.modeling_heads import PathHeads

from .base import RivalHeads

NOISE = 0.1  # uniform, to both sides


class Eagle1(PathHeads, RivalHeads):
    config: CloverConfig
    config_class = CloverConfig
    name = "eagle-1"
    fields = dict(
        num_heads=1,  # the later levels are the same layer again, which training does not unroll
        draft_depth=8,
        num_augmenting_layers=1,
        decoder="none",
        decoder_position="after",
        hidden_loss_weight=10.0,  # 1 to 0.1, which is the same to Adam
    )

    def build(self, config: CloverConfig) -> None:
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layer = AugmentingLayer(config, 0)
        self.layer.input_layernorm = nn.Identity()
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def features(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[B, T, d] -> [B, T, d], what the target feeds into its lm_head."""
        with torch.no_grad():
            features = self.borrowed.norm(hidden_states.to(self.dtype)).to(self.dtype)  # the norm is the target's own
        if self.training:
            features = features + torch.empty_like(features).uniform_(-NOISE, NOISE)
        return features

    def advance(
        self,
        features: torch.Tensor,
        input_ids: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        cache: Cache | None,
    ) -> torch.Tensor:
        """Features [B, T, d] and the tokens after them [B, T] -> the features drafted for the tokens' positions."""
        x = self.fc(torch.cat((self.embed(input_ids), features), dim=-1))  # [B, T, d]
        return self.layer(x, rope, mask, cache)[0]

    def forward(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> CloverOutput | tuple[torch.Tensor, ...]:
        """Teacher-forced, as our heads, of which there is one here."""
        states = self.encode(hidden_states, input_ids, attention_mask, position_ids)
        output = CloverOutput(head_outputs=self.output(states)[None], state=states)
        return output if return_dict else output.to_tuple()
