"""Tiny targets with random weights, to try on the spot what a version of transformers does."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.bloom import BloomConfig, BloomForCausalLM


def made_up_llama() -> PreTrainedModel:
    """A tiny Llama. It verifies trees with every version of transformers that this package supports."""
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=None,
    )
    return _made_up(LlamaForCausalLM, config)


def made_up_bloom() -> PreTrainedModel:
    """A tiny Bloom. Its positions are cache slots, so it verifies only chains. Its final norm makes one token likely
    everywhere, so heads that use that norm guess right without training."""
    config = BloomConfig(vocab_size=32, hidden_size=16, n_layer=2, n_head=2, eos_token_id=None)
    target: Any = _made_up(BloomForCausalLM, config)
    likely = target.get_input_embeddings().weight[7]  # [d]
    target.transformer.ln_f.bias.data = 8 * likely.detach() / likely.detach().norm()
    return target


def _made_up(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """A model in float32 on the CPU. A generator of its own draws the weights, so the caller's random numbers stay the
    same."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        target = kind(config).float().eval()
    for weight in target.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3, generator=generator)
    return target
