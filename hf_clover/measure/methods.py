"""The ways to generate that are compared: plain, with heads, with packed weights, by prompt lookup."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from ..decoding.hook import are_heads
from ..network.modeling_heads import DraftHeads
from ..network.packing import pack_for_cpu
from ..network.variants import CHOICES
from ..origins.published import load_heads
from .figures import PACKED

PROMPT_LOOKUP_TOKENS = 10  # what transformers' documentation uses


@dataclass
class Method:
    """A way to generate: keywords for `generate`, under a name for tables and legends."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    nodes: int | None = None  # drafted nodes per step; None: automatic
    tree: str | None = None  # None: the heads' own
    is_exact: bool = True  # whether sampling promises the tokens of plain sampling from the same seed
    target: PreTrainedModel | None = None  # used in place of the measured target

    @property
    def heads(self) -> DraftHeads | None:
        assistant = self.options.get("assistant_model")
        return assistant if are_heads(assistant) else None

    @contextmanager
    def applied(self) -> Iterator[dict[str, Any]]:
        """The keywords, with the heads set to this method's tree."""
        options = dict(self.options) if self.nodes is None else {**self.options, "num_assistant_tokens": self.nodes}
        if self.heads is None or self.tree is None:
            yield options
            return
        before = self.heads.config.draft_tree
        self.heads.config.draft_tree = self.tree
        try:
            yield options
        finally:
            self.heads.config.draft_tree = before


def plain() -> Method:
    return Method("plain")


def with_heads(
    heads: DraftHeads, name: str | None = None, nodes: int | None = None, tree: str | None = None
) -> Method:
    return Method(name or heads.config.variant, {"assistant_model": heads}, nodes, tree)


def packed(target: PreTrainedModel, methods: Sequence[Method]) -> list[Method]:
    """The same methods with a packed copy of the target; copies of the heads are bound to it."""
    packed_target = copy.deepcopy(target)
    pack_for_cpu(packed_target)
    copies = {method.heads: copy.deepcopy(method.heads) for method in methods if method.heads is not None}
    found = []
    for method in methods:
        options = method.options
        if method.heads is not None:
            options = {**options, "assistant_model": copies[method.heads]}
        found.append(replace(method, name=method.name + PACKED, options=options, target=packed_target))
    return found


def parse_method(text: str, target: PreTrainedModel, loaded: dict[str, DraftHeads] | None = None) -> Method:
    """The method that `text` names: "prompt-lookup", "assistant:MODEL" (a smaller model), or "NAME:HEADS" (other
    heads).

    The name of heads may be followed by a size and a tree: "NAME@8:HEADS", "NAME@7-chain:HEADS",
    "NAME@auto-levels:HEADS".

    Args:
        loaded: heads by their folder or id, and heads that `text` may name without one ("heads@8"). Heads that are not
        in it are loaded and added.
    """
    name, _, path = text.partition(":")
    name, has_size, size = name.partition("@")
    if text == "prompt-lookup":
        return Method(text, {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}, is_exact=False)
    loaded = {} if loaded is None else loaded
    if not name or not (path or name in loaded):
        raise ValueError(
            f"`against={text!r}` is no method: it must be 'prompt-lookup', 'assistant:MODEL' or 'NAME:HEADS', such as "
            "'medusa:my-medusa-heads', or with a fixed size 'medusa@8:my-medusa-heads'."
        )
    count, _, tree = (size if has_size else "auto").partition("-")
    is_count = count == "auto" or (count.isdecimal() and int(count) > 0)
    if not is_count or tree not in ("", *CHOICES["draft_tree"]) or (has_size and name == "assistant"):
        raise ValueError(
            f"`against={text!r}`: after `@` heads take a number of nodes or auto, and optionally a tree "
            f"({', '.join(CHOICES['draft_tree'])}), as in 'medusa@8:HEADS' or 'medusa@7-chain:HEADS'."
        )
    if name == "assistant":
        assistant = AutoModelForCausalLM.from_pretrained(path, dtype=target.dtype)
        assistant.to(target.device)  # type: ignore[arg-type]  # transformers' wrapper counts `self` too
        return Method(text, {"assistant_model": assistant.eval()}, is_exact=False)
    if path and path not in loaded:
        loaded[path] = load_heads(path, target)
    return with_heads(
        loaded[path or name], name if path else None, None if count == "auto" else int(count), tree or None
    )


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place where two texts differ, or where the shorter one ends; None if they are the same."""
    shorter = min(len(one), len(other))
    end = shorter if len(one) != len(other) else None
    return next((place for place in range(shorter) if one[place] != other[place]), end)
