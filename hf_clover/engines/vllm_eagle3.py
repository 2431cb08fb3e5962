"""A draft model of vLLM for heads that read the target's states before its final norm (clover, clover-2).

Contract: vLLM passes such states with its method `eagle3`, as those of an auxiliary layer, the last one. The method
requires a subclass of one of vLLM's own models, and two results per pass: the input of lm_head and of the next pass.
"""

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

from .vllm_model import CloverDraft


class CloverEagle3(CloverDraft, Eagle3LlamaForCausalLM):
    """The class that vLLM loads for the architecture `Eagle3CloverHeads`."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.model.embed_tokens = nn.Identity()  # vLLM compares widths, then puts the target's here
        self.model.embed_tokens.weight = torch.empty(0, self.config.hidden_size, dtype=torch.float32)
        last = vllm_config.model_config.get_total_num_hidden_layers()
        vllm_config.speculative_config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids = (last,)

    def combine_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    def forward(  # type: ignore[override]  # vLLM calls the models of its two methods differently
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.both(input_ids, positions, hidden_states)

    def compute_logits(self, hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
        return self.scored(hidden_states)
