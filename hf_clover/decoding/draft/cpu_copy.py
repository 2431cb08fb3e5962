"""A copy of the heads that drafts faster on a CPU.

Contract: on a CPU a copy of the heads drafts. Its drafts may be off by a rounding error, which changes no text: the
target chooses every token that is emitted. The copy's linear layers, and the rows of lm_head that it scores with, are
packed. Their weights are in bfloat16 where the processor multiplies it, in float16 where the processor can widen it
while reading, and in float32 elsewhere. The user's heads and target stay as they are. The target's memory keeps the
copy; a new one is made after a weight has changed. Where a copy would not be faster, or a change of its original could
not be noticed, the heads draft themselves.

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

LEAST_WEIGHTS = 2**19  # in the largest layer; from here on reading weights takes longer than calling operators


@torch.no_grad()
def drafting_copy(heads: DraftHeads, target: PreTrainedModel) -> DraftHeads:
    """`heads`, which are bound to `target`, or the copy that drafts in their place."""
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
    """The dtype in which the copy computes; its weights may be of a shorter one."""
    return torch.bfloat16 if multiplies_bfloat16_fast(torch.device("cpu")) else torch.float32


def _halves() -> bool:
    return _dtype() == torch.float32 and can_halve()


def _what_is_copied(heads: DraftHeads) -> tuple:
    """The versions and addresses of all tensors that a copy is made from. They change when the heads, or what they
    borrow, change."""
    tensors = [*heads.parameters(), *heads.buffers(), *heads.borrowed.lm_head.parameters()]
    versions = ((id(tensor), 0 if tensor.is_inference() else tensor._version) for tensor in tensors)
    places = (0 if tensor.is_mkldnn else tensor.data_ptr() for tensor in tensors)
    return tuple(versions), tuple(places)


def _copied(heads: DraftHeads) -> DraftHeads:
    its_config = {id(heads.config): heads.config}  # not copied: the user may change it
    made = copy.deepcopy(heads, its_config).eval()  # with plain weights, also where the original's are packed
    for weight in made.parameters():
        weight.data = weight.data.to(_dtype())
    if _halves():
        halve_weights(made)
    else:
        pack_for_cpu(made)
    object.__setattr__(made, "_borrowed", _borrowed(heads))
    return made


def _borrowed(heads: DraftHeads) -> BorrowedParts:
    """What the heads borrow, with packed rows of lm_head. An lm_head of another kind is used as it is."""
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
