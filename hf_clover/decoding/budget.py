"""How many nodes a tree gets.

Contract: one function from the settings to a number. The number changes time, never tokens.
"""

from typing import Any

DEFAULT_NODES = 24  # at batch 1; shared by the rows of a batch, whose forward is nearer to the limit of arithmetic
FEWEST_NODES = 4  # the first paper's budget for large batches
MOST_NODES = 1 << 14  # a number from somebody's generation_config.json may not take the machine's memory


def resolve_budget(asked: Any, batch_size: int, room: int | None = None) -> int:
    """`num_assistant_tokens`, checked; None lets the machine choose. `room`: nodes that a fixed cache still holds."""
    if asked is None:
        chosen = max(FEWEST_NODES, DEFAULT_NODES // batch_size)
        return chosen if room is None else max(0, min(chosen, room))
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
    return asked
