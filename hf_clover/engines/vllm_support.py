"""Which heads vLLM can draft with, read from their saved configuration: for the plug-in, and for model cards.

Contract: a table and functions of a config.json, without torch and without vLLM.
"""

from collections.abc import Mapping
from typing import Any

from ..network.variants import VARIANTS

FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # kinds that do not change as a text grows


def why_not(config: Mapping[str, Any]) -> str | None:
    """Why vLLM cannot draft with heads of this `config`, as a sentence; None if it can."""
    config = _whole(config)
    block, regressive = config.get("augmenting_block"), config.get("regressive", True)
    if block not in ("full", "attention") or not regressive:
        return (
            "vLLM drafts with heads that have attention in their block and see the tokens drafted before theirs, and "
            f"these are {config.get('variant')} with augmenting_block={block!r} and regressive={regressive}. Use them "
            "with transformers' `generate`, or train clover-x heads for this target."
        )
    if (kind := (config.get("rope_parameters") or {}).get("rope_type", "default")) not in FIXED_ROPE:
        return f"These heads' rope_type={kind!r} changes as a text grows; in vLLM it is one of {FIXED_ROPE}."
    return None


def method_of(config: Mapping[str, Any]) -> str:
    """The method of vLLM that passes the states these heads read: "mtp" after the target's final norm, "eagle3" before
    it."""
    return "mtp" if _whole(config)["normalize_hidden_states"] else "eagle3"


def most_drafts(config: Mapping[str, Any]) -> int:
    """Most tokens per draft: the largest possible `num_speculative_tokens`."""
    config = _whole(config)
    return config.get("draft_depth") or config["num_heads"]


def _whole(config: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in config.items() if value is not None}
    return {**VARIANTS.get(config.get("variant", ""), {}), **given}
