"""Tiny random Llamas."""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = dict(hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


def tiny_llama(**fields) -> LlamaForCausalLM:
    return stir(LlamaForCausalLM(LlamaConfig(**{**SIZES, **fields}))).eval()


@torch.no_grad()
def stir(model: nn.Module, noise: float = 0.2) -> nn.Module:
    """Noise on every parameter, so that nothing is hidden behind a zero, a one or an identity."""
    for parameter in model.parameters():
        parameter.add_(noise * torch.randn_like(parameter))
    return model
