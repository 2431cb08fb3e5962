"""What is remembered of a target for as long as it lives, whoever calls `generate`.

Contract: `memory_of(model)` is always the same object for the same model, and goes with it. Calls in several threads
share it: what one of them changes in more than one step, it changes under `lock`; who measures the target holds
`measuring`, so that the others wait for what is found out. No module of `decoding` keeps such things of its own, but
what belongs to a cache of the user's (`drafting`) or to a thread.
"""

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

if TYPE_CHECKING:
    from ...network.modeling_heads import DraftHeads
    from ..budget import Experience
    from ..cache.static import StaticTreeCache


@dataclass(eq=False)
class TargetMemory:
    lock: threading.RLock = field(default_factory=threading.RLock)
    measuring: threading.Lock = field(default_factory=threading.Lock)
    # support: why trees or chains are not exact in it, by all that this depends on; None where they are
    why_not: dict[tuple, str | None] = field(default_factory=dict)
    # attention: whether it does more with its mask than attend by it, so that query heads are not packed
    is_never_packed: bool = False
    # attention: how many calls have switched its attention, and what each of its configs named before
    switched: tuple[int, list[tuple[Any, str | None]]] = (0, [])
    # one_by_one: how many calls want its recurrent layers to go token by token
    one_by_one: int = 0
    # static_cache: the static cache that was used last, while nobody uses it; for what no graph could be captured
    idle_cache: "StaticTreeCache | None" = None
    uncaptured: set[Hashable] = field(default_factory=set)
    # support: why its forwards cannot be graphs, where a trial has shown it
    why_no_graphs: str | None = None
    # drafting_copy: what drafts in place of each set of heads, and what it was made from
    drafting_copies: "WeakKeyDictionary[DraftHeads, tuple[tuple, DraftHeads]]" = field(
        default_factory=WeakKeyDictionary
    )
    # heads_run: of the first draft of each step, with each set of heads, how many places and how many right ones
    first_drafts: "WeakKeyDictionary[DraftHeads, tuple[int, int]]" = field(default_factory=WeakKeyDictionary)
    # budget: what was learned of it with each set of heads
    experience: "WeakKeyDictionary[DraftHeads, Experience]" = field(default_factory=WeakKeyDictionary)


_memories: WeakKeyDictionary[PreTrainedModel, TargetMemory] = WeakKeyDictionary()
_making = threading.Lock()


def memory_of(model: PreTrainedModel) -> TargetMemory:
    with _making:
        return _memories.setdefault(model, TargetMemory())
