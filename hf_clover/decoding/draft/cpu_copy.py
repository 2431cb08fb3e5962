"""The heads as a CPU drafts with them fastest.

Contract: a draft may be off by a rounding, because what is emitted is the target's choice. So on a CPU a copy of the
heads drafts: its linear layers, and the rows of lm_head that it scores with, are packed, with weights in bfloat16
where the processor multiplies that, in float16 where it can widen them as it reads them, and in float32 elsewhere.
The user's heads and target stay as they are. The target's memory keeps the copy, and a new one is made after a weight
has changed. Where a copy would not be faster, or could not be told from its original, the heads draft themselves.

Shapes: D draft vocabulary (V where there is none), d hidden size.
"""

import copy
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from ...network.modeling_heads import DraftHeads
from ...network.packing import (
    HalvedLinear,
    can_halve,
    can_pack,
    halve_weights,
    is_packed,
    multiplies_bfloat16_fast,
    pack_for_cpu,
    packed,
    plain_weight,
)
from ...network.target_parts import BorrowedParts, are_divided, come_and_go, is_plain
from ..target.memory import memory_of

LEAST_WEIGHTS = 2**19  # of the largest layer, from which on reading weights takes longer than calling operators


@torch.no_grad()
def drafting_copy(heads: DraftHeads, target: PreTrainedModel) -> DraftHeads:
    """`heads`, which are bound to `target`, or what drafts in their place."""
    if not _gains_by_it(heads):
        return heads
    copies, written = memory_of(target).drafting_copies, _what_is_copied(heads)
    made_from, made = copies.get(heads, (None, None))
    if made is None or made_from != written:
        made = _copied(heads)
        copies[heads] = written, made
    return made


def _gains_by_it(heads: DraftHeads) -> bool:
    modules, lm_head = list(heads.modules()), heads.borrowed.lm_head
    layers = [module for module in modules if isinstance(module, nn.Linear)]
    is_large = any(layer.weight.numel() >= LEAST_WEIGHTS for layer in layers)
    has_adapter = any(type(module).__module__.startswith("peft.") for module in modules)  # it can be switched off
    weights = [*heads.parameters(), *lm_head.parameters()]
    are_here = all(weight.device.type == "cpu" and is_plain(weight) for weight in weights)
    can_change = has_adapter or come_and_go(modules) or are_divided(weights)
    return is_large and are_here and not can_change and can_pack(_dtype())


def _dtype() -> torch.dtype:
    """Of what the copy computes; its weights may be shorter still."""
    return torch.bfloat16 if multiplies_bfloat16_fast(torch.device("cpu")) else torch.float32


def _halves() -> bool:
    return _dtype() == torch.float32 and can_halve()


def _what_is_copied(heads: DraftHeads) -> tuple:
    """What tells whether the heads, or what they borrow, are still those of the copy."""
    tensors = [*heads.parameters(), *heads.buffers(), *heads.borrowed.lm_head.parameters()]
    versions = ((id(tensor), 0 if tensor.is_inference() else tensor._version) for tensor in tensors)
    places = (0 if tensor.is_mkldnn else tensor.data_ptr() for tensor in tensors)
    return tuple(versions), tuple(places)


def _copied(heads: DraftHeads) -> DraftHeads:
    made = copy.deepcopy(heads).eval()  # with plain weights, also where the original's are packed
    made.config = heads.config  # which the user may change
    for weight in made.parameters():
        weight.data = weight.data.to(_dtype())
    if _halves():
        halve_weights(made)
    else:
        pack_for_cpu(made)
    object.__setattr__(made, "_borrowed", _borrowed(heads))
    return made


def _borrowed(heads: DraftHeads) -> BorrowedParts:
    """What the heads borrow, with the rows that score packed; other kinds of lm_head score themselves."""
    borrowed, lm_head = heads.borrowed, heads.borrowed.lm_head
    if not (type(lm_head) is nn.Linear or is_packed(lm_head)):
        return borrowed
    rows: torch.Tensor = plain_weight(lm_head).detach()  # [V, d]
    bias: torch.Tensor | None = lm_head.bias
    if heads.config.draft_vocab_size is not None:
        rows, bias = rows[heads.draft_ids], None if bias is None else bias[heads.draft_ids]  # [D, d]
    if _halves():
        return replace(borrowed, draft_rows=(HalvedLinear(rows, bias), None))
    own_bias = None if bias is None else bias.detach().to(_dtype())
    return replace(borrowed, draft_rows=(packed(rows.to(_dtype())), own_bias))
