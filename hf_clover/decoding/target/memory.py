"""What is remembered about a target as long as it exists, whoever calls `generate`.

Contract: `memory_of(model)` returns the same object for the same model, and the object is deleted with the model.
Calls in several threads share it. A change in more than one step is made under `lock`. A call that measures the target
holds `measuring`, so that other calls wait for the result. No module of `decoding` keeps such facts of its own, except
what belongs to a user's cache (`draft/drafter`) or to a thread.
"""

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

if TYPE_CHECKING:
    from ...network.modeling_heads import DraftHeads
    from ..budget.automatic import Experience
    from ..cache.static import StaticTreeCache


@dataclass(eq=False)
class TargetMemory:
    lock: threading.RLock = field(default_factory=threading.RLock)
    measuring: threading.Lock = field(default_factory=threading.Lock)
    # route: why trees or chains are not exact in it, for each set of conditions; None where they are exact
    why_not: dict[tuple, str | None] = field(default_factory=dict)
    # attention: whether its query heads must not be packed, because it uses its mask for more than attention
    is_never_packed: bool = False
    # attention: how many calls have switched its attention, and the implementation that each config named before
    switched: tuple[int, list[tuple[Any, str | None]]] = (0, [])
    # one_by_one: how many calls need its recurrent layers to take tokens one by one
    one_by_one: int = 0
    # cache/static: the static cache used last, while no call uses it; the settings for which no graph could be
    # captured
    idle_cache: "StaticTreeCache | None" = None
    uncaptured: set[Hashable] = field(default_factory=set)
    # route: why its forwards cannot be graphs, if a trial has shown it
    why_no_graphs: str | None = None
    # draft/cpu_copy: for each set of heads, what its copy was made from, and the copy
    drafting_copies: "WeakKeyDictionary[DraftHeads, tuple[tuple, DraftHeads]]" = field(
        default_factory=WeakKeyDictionary
    )
    # draft/session: for each set of heads, how many first drafts were compared with the text, and how many were right
    first_drafts: "WeakKeyDictionary[DraftHeads, tuple[int, int]]" = field(default_factory=WeakKeyDictionary)
    # budget: what was learned about it with each set of heads
    experience: "WeakKeyDictionary[DraftHeads, Experience]" = field(default_factory=WeakKeyDictionary)


_memories: WeakKeyDictionary[PreTrainedModel, TargetMemory] = WeakKeyDictionary()
_making = threading.Lock()


def memory_of(model: PreTrainedModel) -> TargetMemory:
    with _making:
        return _memories.setdefault(model, TargetMemory())
