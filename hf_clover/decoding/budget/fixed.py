"""As many nodes for every tree: what a caller asked for.

Contract: a budget is asked before each step how many nodes the heads shall draft or, where they are not needed, how
many copied tokens are worth a step without them (`ask`). It cuts the tree that was drafted (`cut`), and is told what
the step took and gave (`learn`). What it says changes time, never tokens. This one always says the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..tree import Tree

MOST_NODES = 1 << 14  # a number from somebody's generation_config.json may not take the machine's memory


def check_nodes(asked: Any, room: int | None = None) -> None:
    """Refuse `num_assistant_tokens` that are no tree size. `room`: nodes that a fixed cache still holds."""
    if asked is None:
        return
    if isinstance(asked, bool) or not isinstance(asked, int) or not 1 <= asked <= MOST_NODES:
        raise ValueError(
            f"`num_assistant_tokens={asked!r}` is no tree size: it must be a positive integer, the number of drafted "
            f"nodes per step (at most {MOST_NODES}), or None to let hf_clover choose."
        )
    if room is not None and asked > room:
        raise ValueError(
            f"`num_assistant_tokens={asked}` is more than the cache can hold: beside the text there is room for "
            f"{max(room, 0)} nodes. Lower `num_assistant_tokens`, or raise `max_cache_len`."
        )


@dataclass
class Budget:
    nodes: int

    @property
    def most_nodes(self) -> int:
        """That any tree will have, without its root."""
        return self.nodes

    def ask(self, lengths: Sequence[int], replayed: int = 0, copies: torch.Tensor | None = None) -> tuple[int, int]:
        """Before a draft: how many nodes the heads shall draft, and how many copied tokens are to be verified in a
        step without them. `lengths`: of the texts of the unfinished rows; `replayed`: settled tokens that this step's
        forward takes again; `copies` [rows, k]: joint log-probabilities of what is copied."""
        return self.nodes, 0

    def cut(self, tree: Tree, rows: Sequence[int], lengths: Sequence[int]) -> Tree:
        """After it: the part of `tree` that is worth verifying. `rows`: the unfinished ones among those of the tree;
        `lengths`: of their texts."""
        return tree

    def learn(self, tree: Tree, paths: Sequence[Sequence[int]], draft_seconds: float, forward_seconds: float) -> None:
        """After the walk: which nodes each unfinished row walked, and what the step took."""
