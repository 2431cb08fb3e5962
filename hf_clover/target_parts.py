"""What heads read of a target: where its parts are, whether they fit, and the loan itself.

Contract: functions of a transformers model and a `CloverConfig`; nothing is changed in the target. A sibling of
`modeling_clover.py` that travels to the Hub with it.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from .configuration_clover import CloverConfig

logger = logging.get_logger(__name__)

FINGERPRINT_ROWS, FINGERPRINT_COLUMNS = 16, 8
SOFT_CAP_NAMES = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
FINAL_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "final_norm", "layer_norm")


@dataclass
class BorrowedParts:
    """What the heads use of the target. Held outside the module tree, so that no checkpoint ever contains it."""

    lm_head: nn.Module
    embedding: torch.Tensor  # [V, d]
    norm: nn.Module
    logit_scale: float
    logit_softcap: float | None
    draft_rows: tuple[torch.Tensor, torch.Tensor | None] | None = None  # lm_head's rows of the draft vocabulary

    def scale(self, logits: torch.Tensor) -> torch.Tensor:
        """What the target does to lm_head's output: a factor, a soft cap."""
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
            return model


def find_decoder(target: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList | None, nn.Module | None]:
    """The target's text decoder, its list of layers and its final norm (None where there is none)."""
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else target
    if not list(decoder.children()):  # ModernBERT's `decoder` is its output layer
        decoder = target.base_model
    for name, module in decoder.named_modules():
        if "vision" in name or "audio" in name:  # a tower may be as deep as the text decoder
            continue
        children = dict(module.named_children())
        lists = [c for c in children.values() if isinstance(c, nn.ModuleList) and len(c) == depth]
        if lists:
            norms = [c for name, c in children.items() if name in FINAL_NORM_NAMES]
            return module, lists[0], norms[-1] if norms else None
    return decoder, None, None


def borrow(config: CloverConfig, target: PreTrainedModel) -> BorrowedParts:
    """The target's parts, after checking that the heads were made for it."""
    text_config, name = target.config.get_text_config(decoder=True), type(target).__name__
    for field in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(config, field), getattr(text_config, field)
        if ours != theirs:
            raise ValueError(
                f"These heads were made for another target: their {field} is {ours}, that of `{name}` is {theirs}. "
                f"They belong to {config.target_name_or_path or 'an unnamed target'}; make new ones with "
                "`CloverHeads.from_target(target)`."
            )
    lm_head = target.get_output_embeddings()
    if lm_head is None:
        raise ValueError(f"The target `{name}` has no output embeddings, so there is no lm_head to borrow.")
    rows = readable_rows(lm_head, config)
    actual = None if rows is None else fingerprint(rows)
    if actual and config.target_fingerprint is not None:
        _check_fingerprint(config, actual)
    else:
        _check_name(config, target)
    if rows is None:
        rows = readable_rows(target.get_input_embeddings(), config)
        if rows is None:
            raise ValueError(
                f"The target `{name}` lends no token embeddings: neither the rows of its lm_head "
                f"({type(lm_head).__name__}) nor those of its input embedding can be read as a floating point "
                f"[{config.vocab_size}, {config.hidden_size}] table. Load the target with one of them unquantised."
            )
        logger.warning_once(
            "The rows of the target's lm_head cannot be read (quantised?): its input embedding serves as the heads' "
            "token embedding, at little loss."
        )
    _, _, norm = find_decoder(target)
    return BorrowedParts(lm_head, rows, norm if norm is not None else nn.Identity(), *_logit_scaling(text_config))


def is_plain(weight: Any) -> bool:
    """Whether these are the weights themselves, not the 4 or 8 bits (float8 too) that stand for them elsewhere."""
    return isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.element_size() > 1


def readable_rows(module: nn.Module | None, config: PreTrainedConfig) -> torch.Tensor | None:
    """[>= V, d], V and d being those of `config`, the target's or the heads'."""
    weight = getattr(module, "weight", None)
    if not is_plain(weight) or weight.ndim != 2:
        return None
    return weight if weight.shape[0] >= config.vocab_size and weight.shape[1] == config.hidden_size else None


def fingerprint(rows: torch.Tensor) -> str:
    """A short hash of a fixed sample of rows: the signs, which neither dtype nor light fine-tuning changes much."""
    if rows.is_meta:
        return ""
    row = torch.linspace(0, rows.shape[0] - 1, FINGERPRINT_ROWS).long()
    column = torch.linspace(0, rows.shape[1] - 1, FINGERPRINT_COLUMNS).long()
    sample = rows.detach()[row.to(rows.device)][:, column.to(rows.device)]
    bits = "".join("1" if positive else "0" for positive in (sample > 0).flatten().tolist())
    return f"{int(bits, 2):0{len(bits) // 4}x}"


def _check_fingerprint(config: CloverConfig, actual: str) -> None:
    expected = config.target_fingerprint
    if actual == expected:
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


def _check_name(config: CloverConfig, target: PreTrainedModel) -> None:
    """Where there are no rows to compare. A folder may hold a copy of what has another name on the Hub."""
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
    weight, bias = getattr(lm_head, "weight", None), getattr(lm_head, "bias", None)
    if type(lm_head) is not nn.Linear or not is_plain(weight):
        return None
    ids = ids.to(weight.device)
    return weight.detach()[ids], None if bias is None else bias.detach()[ids]
