"""One cache for every case: per-row lengths, writes at per-row slots, accepted nodes compacted in place.

Contract: a `Cache` whose layers own buffers [B, kv_heads, capacity, head_dim] and share one `lengths`. It is written
in two ways. *Filling* (prefill): every row gets the same new columns, as in a `DynamicCache`. *Staged*
(`with cache.staged(n)`): n entries per row go after that row's own length and stay provisional until `commit` keeps
some of them. Left padding stays in the cache; masking it is the caller's. Sliding-window layers keep all columns and
the mask does the windowing. The capacity grows in blocks, or is fixed and refuses.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

BLOCK = 256


class _Slots:
    """Where the rows stand, shared by all layers."""

    def __init__(self, capacity: int | None) -> None:
        self.fixed_capacity = capacity
        self.lengths: list[int] = []  # per row, committed
        self.staged: int | None = None  # entries per row being written after `lengths`, or None when filling
        self.index: torch.Tensor | None = None  # [B, staged] slots, None where all rows stand at one length

    @property
    def is_even(self) -> bool:
        return min(self.lengths) == max(self.lengths)

    def columns(self) -> int:
        """Columns that a forward sees now."""
        return max(self.lengths, default=0) + (self.staged or 0)

    def check(self, needed: int) -> None:
        if self.fixed_capacity is not None and needed > self.fixed_capacity:
            raise ValueError(
                f"`num_assistant_tokens` asks for a tree that needs {needed} cache slots, but the cache holds "
                f"{self.fixed_capacity}: lower `num_assistant_tokens`, or raise the cache's capacity "
                "(`max_cache_len`, or `max_new_tokens`)."
            )


class TreeLayer(CacheLayerMixin):
    is_sliding = False
    is_compileable = False
    is_croppable = False

    def __init__(self, slots: _Slots) -> None:
        super().__init__()
        self.slots = slots
        self.filled = 0  # columns this layer has seen while filling

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def reserve(self, columns: int, like: tuple[torch.Tensor, torch.Tensor]) -> None:
        if not self.is_initialized:
            self.lazy_initialization(*like)
        held = self.keys.shape[2]
        if columns <= held:
            return
        self.slots.check(columns)
        fixed = self.slots.fixed_capacity
        capacity = fixed if fixed is not None else -(-(columns + 1) // BLOCK) * BLOCK
        self.keys, self.values = (self._grown(old, capacity) for old in (self.keys, self.values))

    @staticmethod
    def _grown(old: torch.Tensor, capacity: int) -> torch.Tensor:
        batch, heads, held, dim = old.shape
        new = old.new_zeros(batch, heads, capacity, dim)
        new[:, :, :held] = old
        return new

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slots, new = self.slots, key_states.shape[2]
        if slots.staged is None:
            start, end = self.filled, self.filled + new
            self.filled = end
        else:
            start, end = slots.lengths[0], slots.columns()
        self.reserve(end, (key_states, value_states))
        if slots.staged is None or slots.index is None:
            self.keys[:, :, start : start + new] = key_states
            self.values[:, :, start : start + new] = value_states
        else:
            index = slots.index.to(self.device)[:, None, :, None]  # [B, 1, staged, 1]
            self.keys.scatter_(2, index.expand_as(key_states), key_states)
            self.values.scatter_(2, index.expand_as(value_states), value_states)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.filled if self.slots.staged is None else max(self.slots.lengths, default=0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1 if self.slots.fixed_capacity is None else self.slots.fixed_capacity

    get_max_cache_shape = get_max_length  # its name before transformers 5.20


class TreeCache(Cache):
    def __init__(self, num_layers: int, capacity: int | None = None) -> None:
        self.slots = _Slots(capacity)
        super().__init__(layers=[TreeLayer(self.slots) for _ in range(num_layers)])

    @property
    def lengths(self) -> list[int]:
        """Committed entries per row."""
        return self.slots.lengths

    def load(self, states: Sequence[tuple[torch.Tensor, torch.Tensor] | None], length: int) -> None:
        """Start from another cache: per layer keys and values [B, kv_heads, <= length, head_dim], the last ones."""
        for layer, kept in zip(self.layers, states, strict=True):
            if kept is None:
                continue
            layer.reserve(length, kept)
            missing = length - kept[0].shape[2]  # a sliding layer kept its window only; the mask hides the rest
            layer.keys[:, :, missing:length], layer.values[:, :, missing:length] = kept
            layer.filled = length

    def finish_filling(self, batch_size: int) -> None:
        """After prefill: every row stands at the filled length."""
        filled = max((layer.filled for layer in self.layers), default=0)
        self.slots.lengths = [filled] * batch_size

    @contextmanager
    def staged(self, entries: int) -> Iterator[None]:
        """Within, a forward over `entries` tokens per row writes after each row's own length."""
        slots = self.slots
        slots.check(max(slots.lengths, default=0) + entries)
        slots.staged = entries
        slots.index = None
        if slots.lengths and not slots.is_even:
            slots.index = torch.tensor(slots.lengths)[:, None] + torch.arange(entries)  # [B, entries]
        try:
            yield
        finally:
            slots.staged = slots.index = None

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep, per row, the staged entries `path[0] < path[1] < ...`, moved to stand right after its length."""
        lengths = self.slots.lengths
        moves = [
            (row, lengths[row] + entry, lengths[row] + place)
            for row, path in enumerate(paths)
            for place, entry in enumerate(path)
            if entry != place
        ]
        if moves:
            row, source, target = torch.tensor(moves).unbind(1)
            for layer in self.layers:
                if layer.is_initialized:
                    row, source, target = row.to(layer.device), source.to(layer.device), target.to(layer.device)
                    for buffer in (layer.keys, layer.values):
                        buffer[row, :, target] = buffer[row, :, source]
        self.slots.lengths = [length + len(path) for length, path in zip(lengths, paths, strict=True)]

    def export(self, layer_idx: int, length: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values [B, kv_heads, length, head_dim] of one layer; None where it holds none (shared layers)."""
        layer = self.layers[layer_idx]
        if not layer.is_initialized:
            return None
        return layer.keys[:, :, :length], layer.values[:, :, :length]
