"""Two tiny random targets: one that sees all of its text, and one that sees a window of it."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

VOCABULARY, WINDOW = 24, 4


def target_of(name):
    """A tiny random target whose greedy text wanders; weights large enough for attention to matter."""
    fields = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        if name == "llama":
            model = LlamaForCausalLM(LlamaConfig(**fields))
        else:
            model = MistralForCausalLM(MistralConfig(**fields, sliding_window=WINDOW))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.35)
    return model.eval()
