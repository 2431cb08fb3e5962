"""A cache whose entries never change their place, so that forwards over it can be graphs (`graphs.py`).

Contract: a `TreeCache` with one allocation of `capacity` columns per layer. The text grows and rows leave without a
new allocation: a forward sees the first rows and columns, in one of few sizes, so there are few graphs. A text that
outgrows the cache doubles it, and its graphs are deleted. If there is no memory for that, the cache grows as
`TreeCache` does for the rest of the call, without graphs. Each step the host writes one small tensor,
`StaticSlots.state`: the rows' lengths, and the entries of the last commit that are still to be moved. The next forward
moves them, or whatever else reads the cache before it. A forward may run only once for each written state: a second
run would move other entries. The cache that a model used last is kept for its next call, if it is no larger than
`KEPT` of the device's memory. One call at a time uses a cache.

Shapes: B rows, n tree nodes, C columns, M moved entries at most.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..budget.settings import SIZES_IN_GRAPHS
from ..graphs import Graphs
from ..target.memory import memory_of
from .by_row import Moves, Slots, TreeCache, TreeLayer

NODE_COUNTS = tuple(size + 1 for size in SIZES_IN_GRAPHS)  # of trees in graphs, with the root; others are filled up
ROW_COUNTS = (1, 2, 4, 8, 16, 32, 48)  # rows of graphs, beside all rows that a call began with
LEAST_COLUMNS = 512
ROOM = 1024  # new tokens that the first allocation has room for, or as many as the prompt has
MOVES = 8  # entries per row that the next forward moves; the commit itself moves a longer path
KEPT = 1 / 16  # of the device's memory


def columns_for(columns: int) -> int:
    """How many columns a graph sees: powers of two, so that a growing text needs few graphs."""
    return max(LEAST_COLUMNS, 1 << (columns - 1).bit_length())


def first_capacity(prompt: int, longest: int) -> int:
    return columns_for(min(longest, max(2 * prompt, prompt + ROOM)) + NODE_COUNTS[-1])


class StaticSlots(Slots):
    """Keeps `lengths` on the device as well, with the entries that the last commit left to be moved."""

    state: torch.Tensor  # [B, 2 + M] length, first target of the moved entries, their sources
    text: torch.Tensor  # [B, C] bool, False where the prompt is padding
    tokens: torch.Tensor  # [B, C] the token after each column, where heads draft with this cache
    has_gaps = False  # some row has padding elsewhere than before its text
    capacity: int
    doubles = True  # when a text outgrows the cache
    seen_rows: int  # rows that the next forward sees
    seen_columns: int  # columns that the next forward sees

    @property
    def starts(self) -> torch.Tensor:
        return self.state[: self.seen_rows, :1]  # [B, 1]

    @property
    def visible_text(self) -> torch.Tensor:
        return self.text[: self.seen_rows, : self.seen_columns]  # [B, C]

    def capacity_for(self, columns: int) -> int:
        return max(self.capacity, columns_for(columns) if self.doubles else super().capacity_for(columns))

    def make_room(self, reserve: Callable[..., None], *arguments: Any) -> None:
        """Call `reserve`; if there is no memory for it, call it again for no more columns than the text needs."""
        with suppress(torch.OutOfMemoryError):
            return reserve(*arguments)
        self.doubles, self.capacity = False, 0
        reserve(*arguments)


class StaticTreeLayer(TreeLayer):
    slots: StaticSlots

    def reserve(self, columns: int, like: tuple[torch.Tensor, torch.Tensor]) -> None:
        with torch.inference_mode(False):  # later calls write here, in inference mode or not
            self.slots.make_room(super().reserve, columns, like)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slots = self.slots
        if slots.index is None:
            return super().update(key_states, value_states)
        sources = slots.state[: slots.seen_rows, 2:, None]  # [B, M, 1]
        targets = (
            slots.state[: slots.seen_rows, 1:2, None] + torch.arange(MOVES, device=self.device)[:, None]
        )  # [B, M, 1]
        index = slots.index[:, None, :, None]  # [B, 1, n, 1]
        for buffer in self.buffers:  # [..., B, kv_heads, C, head_dim]
            buffer = buffer.narrow(-4, 0, slots.seen_rows)
            shape = (*buffer.shape[:-2], MOVES, buffer.shape[-1])
            moved = buffer.gather(-2, sources[:, None].expand(shape))
            buffer.scatter_(-2, targets[:, None].expand(shape), moved)
        seen = []
        for buffer, new in ((self.keys, key_states), (self.values, value_states)):
            buffer = buffer[: slots.seen_rows]
            buffer.scatter_(2, index.expand(new.shape), new.to(buffer.dtype))
            seen.append(buffer[:, :, : slots.seen_columns])
        return seen[0], seen[1]

    def get_seq_length(self) -> Any:
        """A tensor during a forward in place: its graph would keep a number as a constant."""
        return super().get_seq_length() if self.slots.index is None else self.slots.starts.max()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return super().get_mask_sizes(query_length) if self.slots.index is None else (self.slots.seen_columns, 0)


class StaticTreeCache(TreeCache):
    """A `TreeCache` for forwards in graphs. `look_at` chooses the rows and columns that the next forward sees."""

    layer_class, slots_class = StaticTreeLayer, StaticSlots
    slots: StaticSlots

    def __init__(self, num_layers: int, rows: int, capacity: int, graphs: Graphs) -> None:
        super().__init__(num_layers)
        self.rows, self.graphs, device = rows, graphs, graphs.device
        self.slots.capacity = capacity
        self.slots.seen_rows, self.slots.seen_columns = rows, capacity
        self._pending: Moves | None = None  # entries that the next forward, or an export, has to move
        self._has_moved = False  # a forward has moved them since
        with torch.inference_mode(False):
            self.slots.state = torch.zeros(rows, 2 + MOVES, dtype=torch.long, device=device)
            self.slots.text = torch.ones(rows, capacity, dtype=torch.bool, device=device)
            self.slots.tokens = torch.zeros(rows, capacity, dtype=torch.long, device=device)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for layer in self.layers for buffer in layer.buffers)

    def clear(self) -> None:
        """Make the cache as new, at the same addresses."""
        self.slots.lengths, self.slots.index, self._pending, self._has_moved = [], None, None, False
        self.slots.seen_rows = self.rows
        self.slots.text.fill_(True)
        for layer in self.layers:
            layer.filled = 0
            for buffer in layer.buffers:
                buffer.zero_()  # an aborted call may have left NaN, which not even a mask keeps out

    def finish_filling(self, batch_size: int) -> None:
        super().finish_filling(batch_size)
        self.reserve(max(self.lengths))
        self._hold()

    def reserve(self, columns: int) -> None:
        """Make room for `columns` columns; the addresses change if there was no room."""
        self.slots.make_room(self._resize, columns)

    def _resize(self, columns: int) -> None:
        capacity = self.slots.capacity_for(columns)
        if all(held == capacity for held in (self.slots.capacity, self.slots.text.shape[1], *self._held())):
            return
        if self.lengths:
            self._move_now()
        self.graphs.forget()
        if not self.slots.doubles:
            self.graphs.stop("there is no memory for twice as many keys and values", is_short=True)
        with torch.inference_mode(False):  # later calls write here, in inference mode or not
            for layer in self.layers:
                if layer.is_initialized:
                    layer._use([layer._resized(buffer, capacity) for buffer in layer.buffers])
            more = (0, capacity - self.slots.text.shape[1])
            self.slots.text = F.pad(self.slots.text, more, value=True)
            self.slots.tokens = F.pad(self.slots.tokens, more)
        self.slots.capacity = capacity

    def _held(self) -> set[int]:
        return {layer.keys.shape[2] for layer in self.layers if layer.is_initialized}

    def look_at(self, nodes: int) -> tuple[int, int]:
        """Choose how many rows and columns the next forward sees, which is over `nodes` nodes per row."""
        going, longest = len(self.lengths), max(self.lengths) + max(nodes, MOVES)
        self.reserve(longest)
        self.slots.seen_rows = min(count for count in (*ROW_COUNTS, self.rows) if going <= count <= self.rows)
        self.slots.seen_columns = min(columns_for(longest), self.slots.capacity)
        return self.slots.seen_rows, self.slots.seen_columns

    @contextmanager
    def staged(self, entries: int) -> Iterator[None]:
        if self._has_moved:  # the forward before was never committed
            self._hold()
        self._pending, self._has_moved = None, True
        try:
            yield
        finally:
            self.slots.index = None

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self._move_now()
        moves = Moves(self.lengths, paths)
        self.slots.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]
        is_long = max(map(len, paths)) > MOVES
        if is_long:
            self._move(moves)
        self._hold(None if is_long else moves)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Move these rows to the first places, at the same addresses."""
        self._move_now()
        kept = torch.tensor(rows, device=self.slots.state.device)
        held = [buffer for layer in self.layers for buffer in layer.buffers]
        per_row = ((buffer, 0) for buffer in (self.slots.text, self.slots.tokens))
        for buffer, dim in (*((buffer, buffer.ndim - 4) for buffer in held), *per_row):
            buffer.narrow(dim, 0, len(rows)).copy_(buffer.index_select(dim, kept))
        self.slots.lengths = [self.slots.lengths[row] for row in rows]
        self._hold()

    def export(self, layer_idx: int, length: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        self._move_now()
        states = super().export(layer_idx, length)
        return None if states is None else (states[0][: len(self.lengths)], states[1][: len(self.lengths)])

    def _hold(self, moves: Moves | None = None) -> None:
        """Leave `moves` to the next forward. An entry that has no move is copied onto itself."""
        self._pending, self._has_moved = moves, False
        starts, paths = (moves.lengths, moves.paths) if moves is not None else (self.lengths, [()] * len(self.lengths))
        rows = []
        for length, start, path in zip(self.lengths, starts, paths, strict=True):
            entries = [*path, *range(len(path), MOVES)]
            rows.append([length, start, *(start + entry for entry in entries)])
        rows += [[0, 0, *range(MOVES)]] * (self.rows - len(rows))  # for rows that have left
        # No wait is needed: a small tensor that is not pinned has been read before `copy_` returns.
        self.slots.state.copy_(torch.tensor(rows), non_blocking=True)

    def _move_now(self) -> None:
        if self._pending is not None:
            self._move(self._pending)
            self._hold()


# ---------------------------------------------------------------------- the cache that is kept for a model


def take_cache(model: PreTrainedModel, num_layers: int, rows: int, capacity: int, graphs: Graphs) -> StaticTreeCache:
    """The cache that `model` used last, if it fits; else a new one. Graphs that read other addresses or settings are
    replaced."""
    memory = memory_of(model)
    if graphs.written_down in memory.uncaptured:
        graphs.capture = None
    with memory.lock:
        cache, memory.idle_cache = memory.idle_cache, None
    if (
        cache is None
        or cache.rows != rows
        or cache.slots.capacity < capacity
        or cache.dtype not in (model.dtype, None)
        or cache.graphs.device != graphs.device
    ):
        del cache  # frees its memory before the next one is allocated
        return StaticTreeCache(num_layers, rows, capacity, graphs)
    if cache.graphs.written_down != graphs.written_down:
        cache.graphs = graphs
    cache.clear()
    return cache


def give_back_cache(model: PreTrainedModel, cache: StaticTreeCache) -> None:
    if cache.graphs.is_short:
        return
    if cache.graphs.capture is None:
        memory_of(model).uncaptured.add(cache.graphs.written_down)
    device = cache.graphs.device
    if device.type != "cuda" or cache.nbytes <= KEPT * torch.cuda.get_device_properties(device).total_memory:
        memory_of(model).idle_cache = cache
