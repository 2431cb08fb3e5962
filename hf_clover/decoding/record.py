"""What speculation did in a call of `generate`, and how to receive it.

Contract: the loop fills one `Speculation` per call and passes it to `with_record` at its end. The caller gets it as
`out.speculation`, or from `speculations()`. A `Listener` receives the walked text as it is settled. Decoding itself
reads nothing of this.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import Cache


@dataclass
class Clock:
    seconds: float = 0.0
    ended: float = 0.0  # by `time.perf_counter`


@dataclass
class Speculation:
    """
    What speculation did in one call of `generate`, in `out.speculation`.

    Args:
        target_forwards (`int`):
            Forward passes of the target, the prompt's among them.
        row_forwards (`int`):
            Target forwards times the rows that were unfinished in each.
        new_tokens (`int`):
            Tokens that were emitted, in all rows.
        accepted_tokens (`int`):
            Drafted tokens that the target confirmed.
        draft_seconds (`float`):
            Seconds that the heads took, by the host's clock. On a GPU, work that was only queued counts where the host
            next waits for it.
        verify_seconds (`float`):
            Seconds that the target took.
        walk_seconds (`float`):
            Seconds that picking tokens took.
        tree_sizes (`list[int]`):
            Drafted nodes per row, one entry per step.
        accepted_by_depth (`list[int]`):
            How many trees, counted in each row, gave at least 1, 2, ... accepted drafts.
        method (`str`):
            `"tree"`, `"chain"`, `"replayed chain"` or `"plain"`.
        reason (`str`, *optional*):
            Why `method` is not `"tree"`.

    Example:

    ```python
    >>> import hf_clover
    >>> from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

    >>> model = AutoModelForCausalLM.from_pretrained("org/target")
    >>> heads = AutoModel.from_pretrained("org/clover-heads")
    >>> inputs = AutoTokenizer.from_pretrained("org/target")("def f(x):", return_tensors="pt")
    >>> out = model.generate(**inputs, assistant_model=heads, max_new_tokens=16, return_dict_in_generate=True)
    >>> out.speculation.method, out.speculation.new_tokens
    ('tree', 16)
    >>> out.speculation.tokens_per_forward > 1
    True
    ```
    """

    target_forwards: int = 0
    row_forwards: int = 0
    new_tokens: int = 0
    accepted_tokens: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    walk_seconds: float = 0.0
    tree_sizes: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    method: str = "tree"
    reason: str | None = None

    @contextmanager
    def clock(self, part: str) -> Iterator["Clock"]:
        """Adds the time of the block to `draft_seconds`, `verify_seconds` or `walk_seconds`."""
        clock, started = Clock(), time.perf_counter()
        yield clock
        clock.ended = time.perf_counter()
        clock.seconds = clock.ended - started
        setattr(self, f"{part}_seconds", getattr(self, f"{part}_seconds") + clock.seconds)

    @property
    def tokens_per_forward(self) -> float:
        """Tokens emitted per target forward (and row), the prompt's forward and the bonus token included."""
        return self.new_tokens / max(self.row_forwards, 1)

    def count_prompt(self, rows: int) -> None:
        """Count the prompt's forward, which gives each row its first token."""
        self.target_forwards, self.row_forwards = 1, rows

    def count(self, size: int, paths: Sequence[Sequence[int]], emitted: int) -> None:
        """Count one forward over trees of `size` nodes, the root included, in which the unfinished rows walked
        `paths`."""
        self.target_forwards += 1
        self.row_forwards += len(paths)
        self.accepted_tokens += emitted - len(paths)
        self.tree_sizes.append(size - 1)
        for accepted in (len(path) - 1 for path in paths):
            self.accepted_by_depth += [0] * (accepted - len(self.accepted_by_depth))
            for depth in range(accepted):
                self.accepted_by_depth[depth] += 1


_listener: ContextVar[list[Speculation] | None] = ContextVar("speculations", default=None)


@contextmanager
def speculations() -> Iterator[list[Speculation]]:
    """The records of all calls of `generate` inside the block, also of those that return no dictionary.

    Returns:
        a context manager with a `list[Speculation]`, which grows with each call

    Example:

    ```python
    >>> from hf_clover import speculations
    >>> from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

    >>> model = AutoModelForCausalLM.from_pretrained("org/target")
    >>> heads = AutoModel.from_pretrained("org/clover-heads")
    >>> inputs = AutoTokenizer.from_pretrained("org/target")("def f(x):", return_tensors="pt")
    >>> with speculations() as records:
    ...     tokens = model.generate(**inputs, assistant_model=heads, max_new_tokens=16)
    >>> [record.new_tokens for record in records]
    [16]
    ```
    """
    records: list[Speculation] = []
    token = _listener.set(records)
    try:
        yield records
    finally:
        _listener.reset(token)


def with_record(result: Any, stats: Speculation) -> Any:
    """Attach the record to what `generate` returns; every way to generate with heads ends here. In a dictionary the
    record is an attribute and no item: CSM and Moshi make their own outputs from the items, and those accept no other
    name."""
    records = _listener.get()
    if records is not None:
        records.append(stats)
    if not isinstance(result, torch.Tensor):
        result.speculation = stats
    return result


class Listener(Protocol):
    """Receives what is settled in one call: for each position of the text the target's states and the token after
    it."""

    def hear(
        self, hidden: torch.Tensor, next_tokens: torch.Tensor, counts: Sequence[int], rows: Sequence[int]
    ) -> None:
        """Receive the first `counts` positions of each running row. `hidden` [B, m, f]: states as the heads read them;
        for heads that name layers, the input of the final norm follows them. `next_tokens` [B, m]: the tokens after
        these positions. `rows`: which rows of the call these are."""

    def remember(self, cache: Cache, columns: int) -> None:
        """The next turn may continue from here, if it passes this cache with `columns` columns."""

    def end(self, stats: Speculation) -> None:
        """The call is over."""
