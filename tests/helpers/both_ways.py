"""The same call of `generate` with heads and without them."""

from contextlib import nullcontext

import torch
from helpers.oracle import planted

NEW = 24


def both(target, heads, inputs, seed=0, plant=True, of_each=({}, {}), **options):
    """The outputs of plain generate and of ours, from the same seed. The plain text is planted in the drafts unless
    `plant` is False. `of_each`: options that keep a state, for each of the two calls its own."""
    options = {**inputs, "max_new_tokens": NEW, "pad_token_id": 0, "return_dict_in_generate": True, **options}
    of_plain, of_ours = of_each
    torch.manual_seed(seed)
    plain = target.generate(**options, **of_plain)
    width = inputs["input_ids"].shape[1] if "input_ids" in inputs else 0
    with planted(heads, plain.sequences, width, seed) if plant else nullcontext():
        torch.manual_seed(seed)
        return plain, target.generate(**{"num_assistant_tokens": 10, **options}, **of_ours, assistant_model=heads)


def same_tokens(target, heads, inputs, more_than=0, **how):
    """Our output. It has plain generate's tokens, and more than `more_than` drafts were accepted (-1: maybe none)."""
    plain, ours = both(target, heads, inputs, **how)
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.speculation.accepted_tokens > more_than
    return ours
