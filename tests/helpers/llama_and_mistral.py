"""Two tiny random targets: one that sees all of its text, and one that sees a window of it."""

import torch
from helpers.tiny_llama import SIZES
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

VOCABULARY, WINDOW = 24, 4


def target_of(name):
    """A tiny random target whose greedy text wanders; weights large enough for attention to matter."""
    fields = dict(SIZES, vocab_size=VOCABULARY, intermediate_size=48, max_position_embeddings=128)
    fields.update(pad_token_id=0, bos_token_id=None, eos_token_id=None)
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
