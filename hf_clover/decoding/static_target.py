"""The verify forward as transformers compiles plain generate's: static shapes, static addresses, no host sync.

Contract: where plain generate would compile (`wants_compiling`), the target runs over a `StaticTreeCache` and
`verify_step` is what is compiled: masks, slots, positions, the moves of the last commit and the target's forward, in
one graph. The host writes one small tensor per step, `StaticSlots.state`. Trees come padded to one of `NODE_COUNTS`,
and the number of nodes is the graph's only free size, so a shape (rows and capacity) is compiled twice: for the root
alone and for a tree. Caches and compiled functions are kept per target and go with it; a cache is lent to one call at
a time. Nothing is kept in the target itself.

Shapes: B batch, n tree nodes, C capacity, M moved entries at most, d hidden size, V vocabulary.
"""

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import CompileConfig, PreTrainedModel

from .cache import Moves, Slots, TreeCache, TreeLayer
from .masks import CHUNKED, MaskRules, additive, ancestors_of, narrowed, visible_columns
from .private_api import cache_name, may_vary, stays_in_place
from .target_memory import memory_of

if TYPE_CHECKING:
    from .draft_graph import DraftGraphs

NODE_COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)  # with the root
CAPACITY_STEP = 128  # calls of nearby lengths share a shape
SPARE_SLOTS = 128  # beyond the text, at least: a block of tokens that brings rows to one length
_CACHE = cache_name()  # looked up once: a traced forward would see through its memory
MOVES = 8  # entries per row that a step's graph moves; a longer path is moved by the commit itself


# ---------------------------------------------------------------------- the cache


class StaticSlots(Slots):
    """`lengths` on the device as well, with what the last commit left to be moved."""

    def __init__(self, capacity: int | None) -> None:
        super().__init__(capacity)
        self.state: torch.Tensor  # [B, 2 + M] length, where the moved entries go, where they come from
        self.text: torch.Tensor  # [B, C] bool, False where the prompt is padding

    @property
    def starts(self) -> torch.Tensor:
        return self.state[:, :1]  # [B, 1]


class StaticTreeLayer(TreeLayer):
    """Staged, it returns the whole buffers, which stay where they are."""

    slots: StaticSlots

    def _use(self, buffers: list[torch.Tensor]) -> None:
        # One tensor each: a compiled graph that writes into two views of one has to keep them apart.
        super()._use([part.contiguous() for buffer in buffers for part in (buffer if buffer.ndim == 5 else [buffer])])
        for buffer in self.buffers:
            stays_in_place(buffer)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        index = self.slots.index
        if index is None:
            return super().update(key_states, value_states)
        state = self.slots.state.to(self.device)
        sources = state[:, 2:]  # [B, M]
        targets = state[:, 1:2] + torch.arange(sources.shape[1], device=self.device)  # [B, M]
        index = index.to(self.device)  # [B, n]
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            shape = (*buffer.shape[:2], -1, buffer.shape[3])
            moved = buffer.gather(2, sources[:, None, :, None].expand(shape))  # [B, kv_heads, M, head_dim]
            buffer.scatter_(2, targets[:, None, :, None].expand(shape), moved)
            buffer.scatter_(2, index[:, None, :, None].expand(shape), new.to(buffer.dtype))
        return self.keys, self.values

    def get_seq_length(self) -> Any:
        if self.slots.index is None:
            return super().get_seq_length()
        return self.slots.starts.max()  # no number of the host's, which would make a graph for every length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.slots.index is None:
            return super().get_mask_sizes(query_length)
        return self.keys.shape[2], 0


class StaticTreeCache(TreeCache):
    """`TreeCache` for a compiled forward. What a commit moves is moved by the next forward, or before an export."""

    layer_class = StaticTreeLayer
    slots: StaticSlots

    def __init__(self, num_layers: int, batch_size: int, capacity: int, device: torch.device) -> None:
        super().__init__(num_layers, capacity)
        self.rows, self.capacity = batch_size, capacity
        self._pending: Moves | None = None  # what the next forward, or an export, has to move
        self._has_moved = False  # a forward has done so since
        self.graphs: DraftGraphs | None = None  # which have this cache's addresses
        self.slots.state = torch.zeros(batch_size, 2 + MOVES, dtype=torch.long, device=device)
        self.slots.text = torch.ones(batch_size, capacity, dtype=torch.bool, device=device)
        for tensor in (self.slots.state, self.slots.text):
            stays_in_place(tensor)

    def _make_slots(self, capacity: int | None) -> Slots:
        return StaticSlots(capacity)

    def clear(self) -> None:
        """As new, at the same addresses."""
        self.slots.lengths, self.slots.index, self._pending = [], None, None
        self.slots.text.fill_(True)
        for layer in self.layers:
            layer.filled = 0
            for buffer in layer.buffers:
                buffer.zero_()  # an aborted call may have left NaN, which not even a mask keeps out

    def finish_filling(self, batch_size: int) -> None:
        super().finish_filling(batch_size)
        self._hold(None, self.lengths, [()] * batch_size)

    def stand_at(self, lengths: Sequence[int]) -> None:
        super().stand_at(lengths)
        self._hold(None, self.lengths, [()] * self.rows)

    @contextmanager
    def staged(self, entries: int) -> Iterator[None]:
        self.slots.check(max(self.lengths) + entries)
        if self._has_moved:  # what came before was never committed
            self._hold(None, self.lengths, [()] * self.rows)
        self._pending, self._has_moved = None, True
        yield

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self._move_now()
        before, moves = self.lengths, Moves(self.lengths, paths)
        self.slots.lengths = [length + len(path) for length, path in zip(before, paths, strict=True)]
        if max(map(len, paths)) > MOVES:
            self._move(moves)
            self._hold(None, before, [()] * len(paths))
        else:
            self._hold(moves, before, paths)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """At other addresses from here on."""
        self._move_now()
        super().keep_rows(rows)
        index = torch.tensor(rows, device=self.slots.state.device)
        self.slots.state, self.slots.text = self.slots.state[index], self.slots.text[index]
        self.rows = len(rows)

    def export(self, layer_idx: int, length: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        self._move_now()
        return super().export(layer_idx, length)

    def _hold(self, moves: Moves | None, before: list[int], paths: Sequence[Sequence[int]]) -> None:
        """Leave the moves of `paths` to the next forward; an entry without one moves to where it stands."""
        self._pending, self._has_moved = moves, False
        rows = []
        for length, start, path in zip(self.lengths, before, paths, strict=True):
            entries = [*path, *range(len(path), MOVES)]
            rows.append([length, start, *(start + entry for entry in entries)])
        # Not awaited: the copy of a small tensor that is not pinned is taken before the call returns.
        self.slots.state.copy_(torch.tensor(rows), non_blocking=True)

    def _move_now(self) -> None:
        if self._pending is not None:
            self._move(self._pending)
            self._hold(None, self.lengths, [()] * self.rows)


# ---------------------------------------------------------------------- what is kept for a target


@contextmanager
def lent_cache(target: PreTrainedModel, num_layers: int, batch_size: int, slots: int) -> Iterator[StaticTreeCache]:
    """A cache of at least `slots` slots, nobody else's inside the block."""
    memory = memory_of(target)
    with memory.lock:
        cache, memory.idle_cache = memory.idle_cache, None
    if cache is None or not _fits(cache, target, batch_size, slots):
        del cache  # its memory is free before the next one's is taken
        cache = StaticTreeCache(num_layers, batch_size, -(-slots // CAPACITY_STEP) * CAPACITY_STEP, target.device)
    cache.clear()
    try:
        yield cache
    finally:
        memory.idle_cache = cache


def _fits(cache: StaticTreeCache, target: PreTrainedModel, batch_size: int, slots: int) -> bool:
    is_of_target = cache.dtype in (target.dtype, None) and cache.slots.state.device == target.device
    return is_of_target and cache.rows == batch_size and slots <= cache.capacity <= 2 * slots


def compiled_step(target: PreTrainedModel, config: CompileConfig | None, cache: StaticTreeCache) -> Callable:
    """`verify_step` compiled for this target and shape, as `get_compiled_call` would compile the target."""
    if config is None:
        default = getattr(target, "_default_compile_config", CompileConfig)
        config = default()
    step = compiled_function(verify_step, config, target, (cache.rows, cache.capacity))
    return _with_any_width(step, config)


def compiled_function(
    function: Callable, config: CompileConfig | None, owner: PreTrainedModel, shape: tuple
) -> Callable:
    """`function` compiled for `shape`, kept as long as its owner is."""
    config = config or CompileConfig()
    memory = memory_of(owner)
    with memory.lock:
        functions = memory.compiled
        if shape not in functions or functions[shape][0] != config:
            # A code object of its own: torch.compile counts compilations by it, and takes a size for a free one once
            # it has seen two, so that other owners and shapes would make this one slower.
            own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
            functions[shape] = (config, torch.compile(own, **config.to_dict()))
        return functions[shape][1]


def _with_any_width(step: Callable, config: CompileConfig) -> Callable:
    """One graph for trees of all sizes, unless the user's config wants one for each, or says so for all sizes."""
    if config.dynamic is not None:
        return step

    def marked(*args: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        for values in args[TREE_ARGUMENTS]:
            if values.shape[1] > 1:
                may_vary(values, 1)
        return step(*args)

    return marked


# ---------------------------------------------------------------------- the step


TREE_ARGUMENTS = slice(5, 8)  # of `verify_step`
_sink: list[torch.Tensor] | None = None  # of the step being traced; None at any other time


def note_hidden(hidden: torch.Tensor) -> None:
    """For the hook before the target's final norm, while it is traced: the step returns what it saw."""
    if _sink is not None:
        _sink.append(hidden)


def verify_step(
    target: nn.Module,
    cache: StaticTreeCache,
    rules: MaskRules,
    dtype: torch.dtype,
    rounds: int,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    shift: torch.Tensor,
    last: torch.Tensor,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits [B, n, V] and hidden states [B, n, d] before the final norm (None where a hook has to bring them).

    A row's root is at position `starts + shift` ([..., B, 1]) and no node beyond `last`.
    """
    global _sink
    slots = cache.slots
    starts = slots.starts  # [B, 1]
    slots.index = starts + torch.arange(tokens.shape[1], device=tokens.device)  # [B, n]
    visible = visible_columns(ancestors_of(parents, rounds), starts, slots.text.shape[1], slots.text)
    padding = (~slots.text).sum(1, keepdim=True) if CHUNKED in rules.kinds else 0
    masks = {kind: additive(narrowed(visible, starts, depths, kind, rules, padding), dtype) for kind in rules.kinds}
    if torch.compiler.is_dynamo_compiling():
        _sink = []
    outputs = target(
        input_ids=tokens,
        position_ids=torch.minimum(starts + shift + depths, last),
        attention_mask=rules.arrange(masks),
        use_cache=True,
        return_dict=True,
        **{_CACHE: cache, **kwargs},
    )
    hidden = _sink[-1] if _sink else None
    _sink = slots.index = None
    return outputs.logits, hidden
