"""The parts of a target that heads read: find them, check that they fit, and borrow them.

Contract: functions of a transformers model and a `HeadsConfig`; they change nothing in the target. This file is pushed
to the Hub beside `modeling_clover.py`.
"""

import contextlib
import importlib
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from .configuration_heads import SPECIAL_TOKENS, HeadsConfig
from .packing import HalvedLinear, is_packed, packed, plain_weight

logger = logging.get_logger(__name__)

FINGERPRINT_ROWS, FINGERPRINT_COLUMNS = 16, 8
SOFT_CAP_NAMES = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
FINAL_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "final_norm", "layer_norm")


@dataclass
class BorrowedParts:
    """The parts of the target that heads use. They are outside the module tree, so no checkpoint contains them."""

    lm_head: nn.Module
    embedding: torch.Tensor  # [V, d]
    norm: nn.Module
    logit_scale: float
    logit_softcap: float | None
    draft_rows: tuple[torch.Tensor | HalvedLinear, torch.Tensor | None] | None = None  # lm_head's rows of `draft_ids`
    packed_ids: torch.Tensor | None = None  # ids of `draft_rows`, if these are packed
    is_packed: bool = False  # whether lm_head was packed when it was borrowed
    source: nn.Module | None = None  # the target's own lm_head; `lm_head` is a whole copy of it if it is in parts

    def scale(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits` with the factor and the soft cap that the target applies to lm_head's output."""
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_softcap is not None:
            logits = self.logit_softcap * torch.tanh(logits / self.logit_softcap)
        return logits


def unwrap(model: Any) -> PreTrainedModel:
    """The transformers model inside a PEFT, compiled or data-parallel wrapper."""
    while True:
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif isinstance(model, PreTrainedModel) or not isinstance(model, nn.Module):
            return model
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "module"):
            model = model.module
        else:
            return cast(PreTrainedModel, model)  # or another module that is used like one


def special_tokens_of(target: PreTrainedModel) -> dict[str, Any]:
    """The special tokens of the target's config. transformers compares them to see that models share a tokenizer."""
    config = target.config.get_text_config()
    return {name: getattr(config, name, None) for name in SPECIAL_TOKENS}


def find_decoder(target: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList | None, nn.Module | None]:
    """The target's text decoder, its list of layers and its final norm (None where there is none)."""
    config = target.config.get_text_config(decoder=True)
    depths = (config.num_hidden_layers, getattr(config, "num_layers", None))  # LongCat-Flash counts a layer twice
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else target
    if not list(decoder.children()):  # ModernBERT's `decoder` is its output layer
        decoder = target.base_model
    for name, module in decoder.named_modules():
        if "vision" in name or "audio" in name:  # a tower may be as deep as the text decoder
            continue
        children = dict(module.named_children())
        lists = [c for c in children.values() if isinstance(c, nn.ModuleList) and len(c) in depths]
        if lists:
            norms = [c for name, c in children.items() if name in FINAL_NORM_NAMES]
            return module, lists[0], norms[-1] if norms else None
    return decoder, None, None


def borrow(config: HeadsConfig, target: PreTrainedModel) -> BorrowedParts:
    """The target's parts, after checking that the heads were made for it."""
    text_config, name = target.config.get_text_config(decoder=True), type(target).__name__
    sizes = {"hidden_size": config.target_width, "vocab_size": config.vocab_size}
    for field, ours in sizes.items():
        theirs = getattr(text_config, field)
        if ours != theirs:
            raise ValueError(
                f"These heads were made for another target: their {field} is {ours}, that of `{name}` is {theirs}. "
                f"They belong to {config.target_name_or_path or 'an unnamed target'}; make new ones with "
                "`CloverHeads.from_target(target)`."
            )
    source = target.get_output_embeddings()
    if source is None:
        raise ValueError(f"The target `{name}` has no output embeddings, so there is no lm_head to borrow.")
    for module in (target, source):
        reshard = getattr(module, "reshard", None)
        if reshard is not None:  # FSDP leaves some weights in one piece after a forward, but not for good
            reshard()
    lm_head = whole(source)
    _check_width(lm_head, config.target_width, name, config.vocab_size)
    rows = readable_rows(lm_head, config.vocab_size, config.target_width)
    actual = None if rows is None else fingerprint(rows)
    if actual and config.target_fingerprint is not None:
        check_fingerprint(config, actual)
    else:
        _check_name(config, target)
    table = token_table(config, target, lm_head)
    if table is None:
        raise ValueError(
            f"The target `{name}` lends no token embeddings: neither the rows of its lm_head "
            f"({type(lm_head).__name__}) nor those of its input embedding can be read as a floating point "
            f"[{config.vocab_size}, {config.target_width}] table. Load the target with one of them unquantised."
        )
    _, _, norm = find_decoder(target)
    norm = nn.Identity() if norm is None else whole(norm)
    scaling = _logit_scaling(text_config)
    return BorrowedParts(lm_head, table, norm, *scaling, source=source, is_packed=is_packed(lm_head))


def token_table(config: HeadsConfig, target: PreTrainedModel, lm_head: nn.Module) -> torch.Tensor | None:
    """The rows [>= V, d] that are the heads' token embeddings: those of `config.token_table`, or of the other table
    if these cannot be read. None if neither can."""
    names = {"lm_head": "lm_head", "input": "input embedding"}
    wanted = config.token_table
    for name in sorted(names, key=lambda name: name != wanted):
        module = lm_head if name == "lm_head" else whole(target.get_input_embeddings())
        rows = readable_rows(module, config.vocab_size, config.target_width)
        if rows is not None and name != wanted:
            logger.warning_once(
                f"The rows of the target's {names[wanted]} cannot be read (quantised?): those of its {names[name]} "
                "serve as the heads' token embedding, at little loss."
            )
        if rows is not None:
            return rows
    return None


def device_of(target: PreTrainedModel, part: nn.Module | None = None) -> torch.device:
    """The device on which `part` computes; without `part`, the device on which the target's forward begins. Weights
    that are fetched for every forward are on the meta device in between; then their hooks name the device."""
    part = target if part is None else part
    first = next(part.parameters(), None)  # only the first, because every step calls this
    device = target.device if first is None else first.device
    if device.type == "meta":
        hooks = (getattr(module, "_hf_hook", None) for module in part.modules())
        devices = (getattr(hook, "execution_device", None) for hook in hooks)
        device = torch.device(next((known for known in devices if known is not None), device))
    return device


def come_and_go(modules: Iterable[nn.Module]) -> bool:
    """Whether weights of any of the modules are fetched for every forward."""
    return any(hasattr(module, "_hf_hook") for module in modules)


def are_divided(weights: Iterable[torch.Tensor]) -> bool:
    """Whether any of the weights is divided among processes (tensor parallel, FSDP, ZeRO)."""
    return any(hasattr(weight, "full_tensor") or hasattr(weight, "ds_id") for weight in weights)


@torch.no_grad()
def whole(module: nn.Module) -> nn.Module:
    """The module, or a copy with all its weights in one piece on the device that computes with them.

    It is a copy if the weights are divided among processes (tensor parallel, FSDP, ZeRO) or are kept on another
    device. Every process of the group has to call this at the same time."""
    modules = list(module.modules())
    weights = [weight for each in modules for weight in each.parameters(recurse=False)]
    are_elsewhere = any(weight.is_meta for weight in weights)
    if not (are_elsewhere or are_divided(weights)):
        return module
    if are_elsewhere and not come_and_go(modules):
        return module  # a target without weights, for callers that only compare shapes
    # FSDP puts two classes before the module's own.
    kind: type[nn.Module] = type(module).__mro__[2] if hasattr(module, "reshard") else type(module)
    copied = kind.__new__(kind)
    vars(copied).update(vars(module))
    # The copy gets none of the hooks, nor what divides or fetches weights.
    for name in ("forward", "_old_forward", "_hf_hook"):
        vars(copied).pop(name, None)
    copied._forward_hooks, copied._forward_pre_hooks = OrderedDict(), OrderedDict()
    with _in_one_piece(module):
        copied._parameters = {
            name: None if weight is None else nn.Parameter(_full(weight), requires_grad=False)
            for name, weight in module._parameters.items()
        }
        copied._buffers = {n: None if b is None else b.clone() for n, b in module._buffers.items()}
    copied._modules = {name: None if child is None else whole(child) for name, child in module._modules.items()}
    return copied


def _full(weight: torch.Tensor) -> torch.Tensor:
    full = weight.full_tensor() if hasattr(weight, "full_tensor") else weight  # a DTensor has this method
    return full.detach().clone()


@contextlib.contextmanager
def _in_one_piece(module: nn.Module) -> Iterator[None]:
    """Within this context, weights of the module that DeepSpeed divides or accelerate fetches are in one piece."""
    # Not by `import`: transformers requires every package that a file of remote code imports.
    weights = list(module.parameters(recurse=False))
    with contextlib.ExitStack() as stack:
        if any(hasattr(weight, "ds_id") for weight in weights):
            stack.enter_context(importlib.import_module("deepspeed").zero.GatheredParameters(weights))
        if hasattr(module, "_hf_hook"):
            align = importlib.import_module("accelerate.utils").align_module_device
            stack.enter_context(align(module, getattr(module._hf_hook, "execution_device", None)))
        yield


def is_plain(weight: Any) -> TypeGuard[torch.Tensor]:
    """Whether `weight` holds the numbers themselves, not a code of 4 or 8 bits (float8 too) for them."""
    return isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.element_size() > 1


def readable_rows(module: nn.Module | None, vocab_size: int, width: int) -> torch.Tensor | None:
    """The weight [>= V, d] of a layer, or None if it cannot be read or has another shape."""
    weight = plain_weight(module)
    if not is_plain(weight) or weight.ndim != 2:
        return None
    return weight if weight.shape[0] >= vocab_size and weight.shape[1] == width else None


def fingerprint(rows: torch.Tensor) -> str:
    """A short hash of `rows`: the signs of a fixed sample. Neither dtype nor light fine-tuning changes many signs."""
    if rows.is_meta:
        return ""
    row = torch.linspace(0, rows.shape[0] - 1, FINGERPRINT_ROWS, dtype=torch.float32).long()
    column = torch.linspace(0, rows.shape[1] - 1, FINGERPRINT_COLUMNS, dtype=torch.float32).long()
    sample = rows.detach()[row.to(rows.device)][:, column.to(rows.device)]
    bits = "".join("1" if positive else "0" for positive in (sample > 0).flatten().tolist())
    return f"{int(bits, 2):0{len(bits) // 4}x}"


def _check_width(lm_head: nn.Module, hidden_size: int, name: str, vocab_size: int) -> None:
    weight = getattr(lm_head, "weight", None)
    if is_plain(weight) and weight.ndim == 2 and weight.shape[0] >= vocab_size and weight.shape[1] != hidden_size:
        raise ValueError(
            f"The lm_head of `{name}` reads {weight.shape[1]} numbers, not its {hidden_size} hidden ones, so no heads "
            "can be made for it. Speed it up with `prompt_lookup_num_tokens` or a smaller assistant model."
        )


def check_fingerprint(config: HeadsConfig, actual: str) -> None:
    expected = config.target_fingerprint
    if expected is None or actual == expected:
        return
    differing = (int(expected, 16) ^ int(actual, 16)).bit_count() / (FINGERPRINT_ROWS * FINGERPRINT_COLUMNS)
    made_for = config.target_name_or_path or "an unnamed target"
    if differing > 0.2:
        raise ValueError(
            f"These heads were made for another target ({made_for}): the fingerprint of its lm_head is {expected}, "
            f"this target's is {actual} ({differing:.0%} of its bits differ). Make heads for this target with "
            "`CloverHeads.from_target(target)`, or set `heads.config.target_fingerprint = None` to use them anyway."
        )
    logger.warning_once(
        f"These heads were made for {made_for}, and this target's lm_head differs a little from it (a fine-tune?): "
        "the tokens stay exact, fewer drafts may be accepted."
    )


def _check_name(config: HeadsConfig, target: PreTrainedModel) -> None:
    """Compare the targets' names, if there are no rows to compare. Only the last part of a path counts, and a
    difference is only a warning: a folder may hold a copy of a model that has another name on the Hub."""
    made_for, actual = config.target_name_or_path or "", getattr(target, "name_or_path", None) or ""
    names = {os.path.basename(os.path.normpath(name)).lower() for name in (made_for, actual)}
    if made_for and actual and len(names) > 1:
        logger.warning_once(
            f"These heads were made for {made_for}, and this target is called {actual}, with nothing else to tell "
            "whether they are the same: the tokens stay exact, fewer drafts may be accepted."
        )


def _logit_scaling(text_config: Any) -> tuple[float, float | None]:
    """(factor, soft cap) that the target applies to lm_head's output."""
    scale = getattr(text_config, "logit_scale", None)
    if scale is None and (scaling := getattr(text_config, "logits_scaling", None)) is not None:
        scale = scaling if text_config.model_type == "hyperclovax" else 1.0 / scaling  # Granite divides
    if scale is None:
        scale = getattr(text_config, "lm_head_multiplier", None)
    caps = (getattr(text_config, name, None) for name in SOFT_CAP_NAMES)
    return (1.0 if scale is None else float(scale)), next((cap for cap in caps if cap), None)


def gather_rows(lm_head: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """lm_head's rows `ids` and their biases, packed if lm_head is. None if the rows cannot be read."""
    weight, bias = plain_weight(lm_head), getattr(lm_head, "bias", None)
    if not (type(lm_head) is nn.Linear or is_packed(lm_head)) or not is_plain(weight):
        return None
    ids = ids.to(weight.device)
    rows = weight.detach()[ids]
    return packed(rows) if is_packed(lm_head) else rows, None if bias is None else bias.detach()[ids]
