"""How large the target's states and embeddings are. Heads scale both to size 1, so that they start in balance.

Contract: functions of a target that change nothing in it. States are measured on random tokens, because no text is
available when heads are made. The size of states after a norm is nearly the same for any tokens, if there are enough
of them. Embeddings need no forward: their table can be read.

Shapes: B rows of random tokens, T tokens in each, V vocabulary, d hidden size.
"""

import math

import torch
from torch import nn
from transformers import PreTrainedModel

from ..network.target_parts import find_decoder
from .last_layer import evaluating

ROWS, TOKENS = 4, 32  # rows of random ids, and tokens in each
FIRST = 4  # first tokens of a row, which are left out: the states of some targets are far larger there


@torch.no_grad()
def embedding_scale(rows: torch.Tensor) -> float:
    """The factor that gives the median row of a table [V, d] a root mean square of 1. The mean would count rows of ids
    that are never used."""
    sizes = rows.detach().float().pow(2).mean(-1).sqrt()  # [V]
    used = sizes[sizes > 0]
    return 1.0 / used.median().item() if len(used) else 1.0


@torch.no_grad()
def hidden_state_scale(target: PreTrainedModel) -> float:
    """The factor that gives the states after the target's final norm a root mean square of 1; 1 if the target cannot
    be run on random tokens."""
    _, _, norm = find_decoder(target)
    if norm is None:
        return 1.0
    sizes: list[float] = []

    def after(_: nn.Module, __: tuple, output: torch.Tensor) -> None:
        sizes.append(output[:, FIRST:].float().pow(2).mean(-1).sqrt().median().item())  # the median token's

    config = target.config.get_text_config(decoder=True)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(config.vocab_size, (ROWS, TOKENS), generator=generator).to(target.device)  # [B, T]
    hook = norm.register_forward_hook(after)
    try:
        with evaluating(target):
            target(input_ids=text, use_cache=False)
    except Exception:  # for example, the target needs more than tokens
        return 1.0
    finally:
        hook.remove()
    size = sizes[-1] if sizes else 1.0
    return 1.0 / size if math.isfinite(size) and size > 0 else 1.0


__all__ = ["embedding_scale", "hidden_state_scale"]
