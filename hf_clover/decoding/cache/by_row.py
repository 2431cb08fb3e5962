"""One cache for every case: per-row lengths, writes at per-row slots, accepted nodes compacted in place.

Contract: a `Cache` whose layers own buffers [B, kv_heads, capacity, head_dim] and share one `lengths`. It is written
in two ways. *Filling* (prefill): every row gets the same new columns, as in a `DynamicCache`. *Staged*
(`with cache.staged(n)`): each row gets n entries right after its own length; they stay provisional until `commit`
keeps some of them. Left padding stays in the cache; the caller masks it. Sliding-window layers keep all columns, and
the mask applies the window. The capacity grows in blocks. `static.py` has the cache for CUDA graphs, whose addresses
do not change.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

BLOCK = 256


class Slots:
    """The rows' lengths, shared by all layers."""

    def __init__(self) -> None:
        self.lengths: list[int] = []  # per row, committed
        self.staged: int | None = None  # entries per row being written after `lengths`, or None when filling
        self.index: torch.Tensor | None = None  # [B, staged] slots, None where all rows have one length
        self._starts: tuple[list[int], torch.Tensor] | None = None

    @property
    def is_even(self) -> bool:
        return min(self.lengths) == max(self.lengths)

    def starts_on(self, device: torch.device) -> torch.Tensor:
        """`lengths` as [B, 1], copied to the device once a step."""
        if self._starts is None or self._starts[0] != self.lengths or self._starts[1].device != device:
            self._starts = (list(self.lengths), torch.tensor(self.lengths, device=device)[:, None])
        return self._starts[1]

    def columns(self) -> int:
        """The number of columns that a forward sees now."""
        return max(self.lengths, default=0) + (self.staged or 0)

    def capacity_for(self, columns: int) -> int:
        """`columns` rounded up to whole blocks. A block is about an eighth of the text, and at least `BLOCK`, so that
        the cache rarely grows."""
        block = BLOCK * max(columns // 8 // BLOCK, 1)
        return -(-(columns + 1) // block) * block


class TreeLayer(CacheLayerMixin):
    keys: torch.Tensor  # [B, kv_heads, capacity, head_dim]; these four exist once `is_initialized`
    values: torch.Tensor
    dtype: torch.dtype
    device: torch.device
    is_sliding = False
    is_compileable = False
    is_croppable = False

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self.slots = slots
        self.filled = 0  # columns this layer has seen while filling
        self.buffers: list[torch.Tensor] = []  # keys and values, one buffer [2, B, ...] if they have one shape

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        empty = [states.new_empty((*states.shape[:2], 0, states.shape[3])) for states in (key_states, value_states)]
        are_alike = len({(each.shape, each.dtype) for each in empty}) == 1
        self._use([torch.stack(empty)] if are_alike else empty)
        self.is_initialized = True

    def _use(self, buffers: list[torch.Tensor]) -> None:
        self.buffers = buffers
        self.keys, self.values = buffers[0] if len(buffers) == 1 else buffers

    def reserve(self, columns: int, like: tuple[torch.Tensor, torch.Tensor]) -> None:
        if not self.is_initialized:
            self.lazy_initialization(*like)
        if columns > self.keys.shape[2]:
            capacity = self.slots.capacity_for(columns)
            self._use([self._resized(buffer, capacity) for buffer in self.buffers])
        if (self.keys.dtype, self.values.dtype) != (like[0].dtype, like[1].dtype):
            self._promote(like)

    def _promote(self, like: tuple[torch.Tensor, torch.Tensor]) -> None:
        """The buffers take the wider dtype, as in a `DynamicCache`: under `torch.autocast` keys and values may differ
        in dtype, also from those of the turn before."""
        kept = (self.keys, self.values)
        wide = [torch.promote_types(old.dtype, new.dtype) for old, new in zip(kept, like, strict=True)]
        if wide != [old.dtype for old in kept]:
            self._use([old.to(dtype) for old, dtype in zip(kept, wide, strict=True)])
            self.dtype = wide[0]

    @staticmethod
    def _resized(old: torch.Tensor, capacity: int) -> torch.Tensor:
        *outer, held, dim = old.shape
        new = old.new_zeros(*outer, capacity, dim)  # masked entries must still be finite
        new[..., :held, :] = old[..., :capacity, :]
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
            index = slots.index.to(self.device)  # [B, staged]
            rows = torch.arange(len(index), device=self.device)[:, None]  # [B, 1]
            self.keys[rows, :, index] = key_states.transpose(1, 2).to(self.keys.dtype)
            self.values[rows, :, index] = value_states.transpose(1, 2).to(self.values.dtype)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def move(self, moves: "Moves") -> None:
        for buffer in self.buffers:
            sources, targets = moves.within(buffer)
            entries = buffer.view(-1, buffer.shape[-1])
            entries.index_copy_(0, targets, entries.index_select(0, sources))

    def keep_rows(self, rows: torch.Tensor) -> None:
        self._use([buffer.index_select(-4, rows) for buffer in self.buffers])

    def get_seq_length(self) -> int:
        return self.filled if self.slots.staged is None else max(self.slots.lengths, default=0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # the name before transformers 5.20


class Moves:
    """The entries that a commit moves, found once for all layers."""

    def __init__(self, lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        self.lengths, self.paths = lengths, paths
        self.entries = [
            (row, lengths[row] + entry, lengths[row] + place)
            for row, path in enumerate(paths)
            for place, entry in enumerate(path)
            if entry != place
        ]
        self._places: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}

    def within(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Source and target indices in `buffer.view(-1, head_dim)`: copies of whole rows are the fastest."""
        key = (buffer.shape, buffer.device)
        if key not in self._places:
            *outer, batch, heads, capacity, _ = buffer.shape
            row = heads * capacity
            parts = range(math.prod(outer))  # keys and values, if in one buffer
            # The short lists are made on the host, so that the device does one addition.
            begin = [[[part * batch * row + head * capacity for head in range(heads)]] for part in parts]
            entries = [[[[move[0] * row + move[end]] for move in self.entries]] for end in (1, 2)]
            first, within = (torch.tensor(places, device=buffer.device) for places in (begin, entries))
            sources, targets = (first + within).flatten(1)  # [2, 1 or 2, moves, kv_heads], in one piece
            self._places[key] = sources, targets
        return self._places[key]


class TreeCache(Cache):
    """
    Keys and values of rows that have lengths of their own. A forward over drafts is staged after each row's text, and
    `commit` keeps the entries of the accepted drafts.

    Args:
        num_layers (`int`):
            Layers of the model.

    Example:

    ```python
    >>> import torch
    >>> from hf_clover import TreeCache

    >>> cache = TreeCache(num_layers=1)
    >>> keys = values = torch.randn(1, 2, 4, 8)  # [B, kv_heads, T, head_dim] of a prompt
    >>> _ = cache.update(keys, values, 0)
    >>> cache.finish_filling(batch_size=1)
    >>> with cache.staged(3):  # a chain of three drafts
    ...     _ = cache.update(keys[:, :, :3], values[:, :, :3], 0)
    >>> cache.commit([[0, 1]])  # two of them were right
    >>> cache.lengths
    [6]
    ```
    """

    layer_class: type[TreeLayer] = TreeLayer
    slots_class: type[Slots] = Slots
    layers: list[TreeLayer]  # type: ignore[assignment]  # all of this class

    def __init__(self, num_layers: int) -> None:
        self.slots = self.slots_class()
        super().__init__(layers=[self.layer_class(self.slots) for _ in range(num_layers)])

    @property
    def lengths(self) -> list[int]:
        """Committed entries per row."""
        return self.slots.lengths

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the keys; None while nothing has been written."""
        return next((layer.dtype for layer in self.layers if layer.is_initialized), None)

    def load(self, states: Sequence[tuple[torch.Tensor, torch.Tensor] | None], length: int) -> None:
        """Start from another cache.

        Args:
            states (`Sequence` of pairs of `torch.Tensor`, or of `None`):
                Per layer, the last keys and values, `[B, kv_heads, <= length, head_dim]` each.
            length (`int`):
                Columns of the text so far.
        """
        for layer, kept in zip(self.layers, states, strict=True):
            if kept is None:
                continue
            layer.reserve(length, kept)
            missing = length - kept[0].shape[2]  # a sliding layer kept its window only; the mask hides the rest
            layer.keys[:, :, missing:length], layer.values[:, :, missing:length] = kept
            layer.filled = length

    def finish_filling(self, batch_size: int) -> None:
        """After prefill: set every row's length to the filled length.

        Args:
            batch_size (`int`):
                Number of rows.
        """
        filled = max((layer.filled for layer in self.layers), default=0)
        self.slots.lengths = [filled] * batch_size

    @contextmanager
    def staged(self, entries: int) -> Iterator[None]:
        """Inside the block, a forward writes after each row's own length.

        Args:
            entries (`int`):
                Tokens per row.
        """
        slots = self.slots
        slots.staged = entries
        slots.index = None
        if slots.lengths and not slots.is_even:
            device = next((layer.device for layer in self.layers if layer.is_initialized), torch.device("cpu"))
            slots.index = slots.starts_on(device) + torch.arange(entries, device=device)  # [B, entries]
        try:
            yield
        finally:
            slots.staged = slots.index = None

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep some of the staged entries, and move them to right after each row's length.

        Args:
            paths (`Sequence[Sequence[int]]`):
                For each row, the places of the entries to keep, ascending.
        """
        lengths = self.slots.lengths
        self._move(Moves(lengths, paths))
        self.slots.lengths = [length + len(path) for length, path in zip(lengths, paths, strict=True)]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep some rows only.

        Args:
            rows (`Sequence[int]`):
                The rows to keep, in their new order.
        """
        for layer in self.layers:
            if layer.is_initialized:
                layer.keep_rows(torch.tensor(rows, device=layer.device))
        self.slots.lengths = [self.slots.lengths[row] for row in rows]

    def _move(self, moves: Moves) -> None:
        if moves.entries:
            for layer in self.layers:
                if layer.is_initialized:
                    layer.move(moves)

    def export(self, layer_idx: int, length: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The keys and values of one layer.

        Args:
            layer_idx (`int`):
                Number of the layer.
            length (`int`):
                How many columns to return.

        Returns:
            keys and values `[B, kv_heads, length, head_dim]`; None if the layer holds none (shared layers)
        """
        layer = self.layers[layer_idx]
        if not layer.is_initialized:
            return None
        return layer.keys[:, :, :length], layer.values[:, :, :length]
