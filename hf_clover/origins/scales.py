"""How large the target's states and embeddings are, so that what heads are fed starts in balance at every size.

Contract: functions of a target that change nothing in it. States are measured on random tokens: heads are made from a
target alone, with no text at hand, and what is asked for is the size of states behind a norm, which comes out nearly
the same for any tokens as long as there are enough of them. Embeddings need no pass: their table is at hand.

Shapes: B rows of random tokens, T tokens in each, V vocabulary, d hidden size.
"""

import math

import torch
from torch import nn
from transformers import PreTrainedModel

from ..network.target_parts import find_decoder
from .last_layer import evaluating

ROWS, TOKENS = 4, 32  # of random ids
FIRST = 4  # tokens of a row that are left out: some targets keep in them what is larger than all else


@torch.no_grad()
def embedding_scale(rows: torch.Tensor) -> float:
    """What brings a table [V, d] to root mean square 1: of the median row, since some ids are never used."""
    sizes = rows.detach().float().pow(2).mean(-1).sqrt()  # [V]
    used = sizes[sizes > 0]
    return 1.0 / used.median().item() if len(used) else 1.0


@torch.no_grad()
def hidden_state_scale(target: PreTrainedModel) -> float:
    """What brings the states behind the target's final norm to size 1; 1 where that cannot be tried."""
    _, _, norm = find_decoder(target)
    if norm is None:
        return 1.0
    sizes: list[float] = []

    def after(_: nn.Module, __: tuple, output: torch.Tensor) -> None:
        sizes.append(output[:, FIRST:].float().pow(2).mean(-1).sqrt().median().item())  # of the median token

    config = target.config.get_text_config(decoder=True)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(config.vocab_size, (ROWS, TOKENS), generator=generator).to(target.device)  # [B, T]
    hook = norm.register_forward_hook(after)
    try:
        with evaluating(target):
            target(input_ids=text, use_cache=False)
    except Exception:  # it wants more than tokens, say
        return 1.0
    finally:
        hook.remove()
    size = sizes[-1] if sizes else 1.0
    return 1.0 / size if math.isfinite(size) and size > 0 else 1.0


__all__ = ["embedding_scale", "hidden_state_scale"]
