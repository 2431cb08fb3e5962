"""Which heads vLLM can draft with, said of a configuration as it is saved: for the plug-in, and for cards.

Contract: tables and one question, without torch and without vLLM.
"""

from collections.abc import Mapping
from typing import Any

from ..network.variants import VARIANTS

WANTED = {"output_projector": "none", "decoder": "gated", "normalize_hidden_states": True, "regressive": True}
FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # the others change as a text grows


def why_not(config: Mapping[str, Any]) -> str | None:
    """What keeps heads of this `config` out of vLLM, as a sentence; None where nothing does."""
    variant = config.get("variant")
    config = {**VARIANTS.get(variant, {}), **config}
    for field, value in WANTED.items():
        if config.get(field, value) != value:
            return (
                f"vLLM drafts with clover-x heads, and these are {variant} with {field}={config[field]!r}, not "
                f"{value!r}. Use them with transformers' `generate`, or train clover-x heads for this target."
            )
    position, block = config.get("decoder_position"), config.get("augmenting_block")
    if position == "before" or block not in ("full", "attention"):
        return (
            "vLLM drafts with heads that have attention in their block and a cell at every token, not with "
            f"decoder_position={position!r} and augmenting_block={block!r}."
        )
    if (kind := (config.get("rope_parameters") or {}).get("rope_type", "default")) not in FIXED_ROPE:
        return f"These heads' rope_type={kind!r} changes as a text grows; in vLLM it is one of {FIXED_ROPE}."
    return None
