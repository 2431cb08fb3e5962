"""
The memory that training needs, in two tables.

The first table is measured. It shows the most bytes that the loss and its gradient hold at a time, in addition to
their inputs (the lm_head, the hidden states), for three sizes of the vocabulary. The three should not differ.

The second table is computed. It shows the heads' parameters; the bytes of their float32 weights with gradients, of the
optimizer's state (one moment per weight with Muon, two with AdamW), and of a bfloat16 copy of the weights under
autocast; and the activations per token that a forward keeps for the backward, counted in a forward on the meta device.
The target's own weights take `parameters x bytes per weight`, and it keeps no activations.

    python examples/benchmarks/training_memory.py
"""

import argparse

import torch
from transformers.utils import logging

from hf_clover import CloverConfig, CloverHeads
from hf_clover.network.target_parts import BorrowedParts
from hf_clover.training.losses import LossTerms, head_losses

SHAPES = {  # hidden size, MLP size, attention heads, key and value heads, head dimension, vocabulary
    "Qwen3-0.6B": (1024, 3072, 16, 8, 128, 151_936),
    "Qwen3-8B": (4096, 12_288, 32, 8, 128, 151_936),
    "Llama-3.1-8B": (4096, 14_336, 32, 8, 128, 128_256),
    "Qwen3-32B": (5120, 25_600, 64, 8, 128, 151_936),
}
MUON_BYTES = 4 + 4 + 4 + 2  # per parameter: weight, gradient, moment, bfloat16 copy
ADAMW_BYTES = 4 + 4 + 8 + 2  # two moments
VARIANTS = ("clover-x", "clover-2")


def peak_of_the_loss(vocab_size: int, positions: int, size: int, num_heads: int) -> int:
    weight = torch.randn(vocab_size, size)
    outputs = torch.randn(num_heads, 1, positions, size, requires_grad=True)
    states = torch.randn(1, positions + 1, size)
    mask = torch.ones(num_heads, 1, positions, dtype=torch.bool)
    terms = LossTerms(lambda x: x @ weight.T, vocab_size)
    with torch.profiler.profile(profile_memory=True) as profile:
        sums, _ = head_losses(outputs, states, mask, terms)
        sums.sum().backward()
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def activations_per_token(config: CloverConfig, tokens: int = 512) -> float:
    with torch.device("meta"):
        heads = CloverHeads(config).bfloat16()
        lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=torch.bfloat16)
        hidden = torch.zeros(1, tokens, config.hidden_size, dtype=torch.bfloat16)
        ids = torch.zeros(1, tokens, dtype=torch.long)
        mask = torch.zeros(1, 1, tokens, tokens, dtype=torch.bool)
    object.__setattr__(heads, "_borrowed", BorrowedParts(lm_head, lm_head.weight, torch.nn.Identity(), 1.0, None))
    kept: dict[int, torch.Tensor] = {parameter.untyped_storage()._cdata: parameter for parameter in heads.parameters()}
    parameters = set(kept)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor  # count a storage once, even if several operations keep it
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = heads(hidden, ids, mask).head_outputs
    total = sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in parameters)
    return (total + 2 * outputs.numel() * 2) / tokens  # the heads' outputs and their gradient are held as well


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=4096, help="Positions of the batch whose loss is measured.")
    arguments = parser.parse_args()
    logging.set_verbosity_error()

    print(f"The loss over {arguments.positions} positions, 2 heads, hidden size 64")
    print("vocabulary   peak MiB   of the smallest   one float32 [positions, vocabulary]")
    first = None
    for vocab_size in (8_192, 32_768, 131_072):
        peak = peak_of_the_loss(vocab_size, arguments.positions, size=64, num_heads=2)
        first = first or peak
        whole = 4 * arguments.positions * vocab_size
        print(f"{vocab_size:>10,}   {peak / 2**20:>8.0f}   {peak / first:>14.2f}x   {whole / 2**20:>20.0f} MiB")

    print("\nHeads as `from_target` makes them")
    print("target         variant    parameters   with Muon   with AdamW   activations per token   of 2048 tokens")
    for name, (size, mlp, heads, kv_heads, head_dim, vocab_size) in SHAPES.items():
        for variant in VARIANTS:
            config = CloverConfig(
                variant=variant,
                hidden_size=size,
                intermediate_size=mlp,
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
                head_dim=head_dim,
                vocab_size=vocab_size,
            )
            with torch.device("meta"):
                count = sum(parameter.numel() for parameter in CloverHeads(config).parameters())
            per_token = activations_per_token(config)
            print(
                f"{name:<14} {variant:<9} {count / 1e6:>9.0f} M   {count * MUON_BYTES / 2**30:>5.1f} GiB   "
                f"{count * ADAMW_BYTES / 2**30:>6.1f} GiB   {per_token / 2**20:>17.2f} MiB   "
                f"{2048 * per_token / 2**30:>10.1f} GiB"
            )


if __name__ == "__main__":
    main()
