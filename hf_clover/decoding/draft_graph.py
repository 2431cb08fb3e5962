"""The draft as one CUDA graph where the target runs eagerly, so that a draft is one launch and not some hundred.

Contract: what drafting reads and writes has one shape and one place (the heads' cache, up to `width` new positions a
row, the levels), whatever cache the target has. So `draft_step` is captured, at the second time that a size is asked
for, and replayed from then on; nothing is compiled, and a capture takes about as long as a few drafts. Graphs go with
the cache whose addresses they have, there are `MOST` of them at most, and all share one pool of memory, which is that
of the largest; what it takes is logged (level INFO). Where a capture fails, drafting goes on eagerly and one line says
so. `disable_compile=True`, transformers' word for no graphs, turns this off.

Shapes: B batch, D levels of a tree, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.utils import logging

from ..network.modeling_clover import CloverHeads
from ..network.modeling_heads import DraftHeads
from .drafting import CloverDrafter, given
from .foresight import Foresight
from .static_drafting import CompiledDrafter, draft_step
from .static_target import SPARE_SLOTS, StaticTreeCache, lent_cache

logger = logging.get_logger(__name__)

MOST = 8  # graphs of one cache; what is asked for beside them runs eagerly
MOST_ENTRIES = 1 << 16  # of the heads' cache, which is there at once; longer texts are drafted for eagerly

Outputs = tuple[torch.Tensor, ...]


def captured_by_cuda(function: Callable[[], Outputs], pool: Any) -> tuple[Callable[[], None], Outputs]:
    """A function that runs the kernels of `function` again, and where they leave what it returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads may go on
        outputs = function()
    return graph.replay, outputs


CAPTURES: dict[str, Callable[..., Any]] = {"cuda": captured_by_cuda}  # by the kind of device


class DraftGraph:
    """One function of tensors, captured: arguments are copied to where it reads them, results from where it leaves
    them."""

    def __init__(
        self, function: Callable[..., Outputs], inputs: Sequence[torch.Tensor], capture: Callable[..., Any], pool: Any
    ) -> None:
        with torch.inference_mode(False):  # what is made here is written to in later calls, whatever their mode
            self.inputs = [value.clone(memory_format=torch.contiguous_format) for value in inputs]
        self._replay, self._outputs = capture(partial(function, *self.inputs), pool)

    def __call__(self, *inputs: torch.Tensor) -> Outputs:
        for mine, new in zip(self.inputs, inputs, strict=True):
            mine.copy_(new, non_blocking=True)
        self._replay()
        return tuple(output.clone() for output in self._outputs)  # the next replay writes over these


class DraftGraphs:
    """The graphs of one cache, by what makes them differ."""

    def __init__(self, device: torch.device, made_for: tuple) -> None:
        self.device, self.made_for = device, made_for
        self.capture = CAPTURES.get(device.type)
        self.made: dict[tuple, DraftGraph] = {}
        self._seen: set[tuple] = set()
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def run(self, key: tuple, function: Callable[..., Outputs], inputs: Sequence[torch.Tensor]) -> Outputs:
        graph = self.made.get(key)
        if graph is None:
            is_new, capture = key not in self._seen, self.capture
            self._seen.add(key)
            if not is_new and capture is not None and len(self.made) < MOST:
                graph = self._make(key, function, inputs, capture)
        return function(*inputs) if graph is None else graph(*inputs)

    def _make(
        self, key: tuple, function: Callable[..., Outputs], inputs: Sequence[torch.Tensor], capture: Callable[..., Any]
    ) -> DraftGraph | None:
        on_cuda = self.device.type == "cuda"
        before = torch.cuda.memory_reserved(self.device) if on_cuda else 0
        try:
            with torch.cuda.device(self.device) if on_cuda else nullcontext():
                self.made[key] = DraftGraph(function, inputs, capture, self._pool)
        except Exception as error:
            self.capture = None
            reason = str(error).partition("\n")[0]
            logger.warning(
                f"Drafting goes on without a graph: it could not be captured ({type(error).__name__}: {reason}). "
                "`disable_compile=True` leaves graphs out from the beginning."
            )
            return None
        more = (torch.cuda.memory_reserved(self.device) - before) / 2**20 if on_cuda else 0
        logger.info(f"A draft of {key[0]} nodes is a graph from here on; it took {more:.0f} MiB.")
        return self.made[key]


# ---------------------------------------------------------------------- the drafter


def pays(heads: DraftHeads, config: GenerationConfig, rows: int, columns: int) -> bool:
    """Whether drafts for `rows` texts of up to `columns` tokens may be graphs."""
    moves = hasattr(heads.borrowed.lm_head, "_hf_hook")  # its weights come and go
    return (
        heads.device.type in CAPTURES
        and not config.disable_compile
        and not moves
        and rows * (columns + SPARE_SLOTS) <= MOST_ENTRIES
    )


@contextmanager
def graphed_drafter(eager: CloverDrafter, rows: int, columns: int) -> Iterator["GraphedDrafter"]:
    """One that goes on from `eager` with texts of up to `columns` tokens; its cache and graphs are nobody else's
    inside the block."""
    heads = eager.heads
    layers = heads.config.num_cache_layers if heads.config.has_augmenting_block else 1  # which stays empty
    with lent_cache(heads, layers, rows, columns + SPARE_SLOTS) as cache:
        if eager.prompt_mask is not None:
            cache.slots.text[:, : eager.prompt_mask.shape[1]] = eager.prompt_mask
        yield GraphedDrafter(eager, cache)


class GraphedDrafter(CompiledDrafter):
    def __init__(self, eager: CloverDrafter, cache: StaticTreeCache) -> None:
        heads = eager.heads
        has_block = heads.config.has_augmenting_block
        super().__init__(heads, cache if has_block else None, None, eager.prompt_mask, eager.block)
        hand_over(eager, self)
        known = cache.graphs
        if known is None or known.made_for != what_is_written_down(heads):
            known = cache.graphs = DraftGraphs(heads.device, what_is_written_down(heads))
        self.graphs = known

    def keep_rows(self, rows: Sequence[int]) -> None:
        super().keep_rows(rows)
        if self.cache is not None:  # its keys and values have another place now
            self.cache.graphs = self.graphs = DraftGraphs(self.heads.device, self.graphs.made_for)

    def remember(self, cache: Cache, columns: int) -> None:
        """As an eager one: this one's cache is lent for one call."""
        eager = CloverDrafter(self.heads, self.prompt_mask, self.block)
        hand_over(self, eager)
        eager.remember(cache, columns)

    def _step(self, nodes: int, shape: str, values: Sequence[torch.Tensor], foresight: Foresight | None) -> Outputs:
        sizes = (nodes, shape, None if foresight is None else foresight.temperature)
        function = partial(drafted, self.heads, self.cache, *sizes)
        inputs = [*values, *([] if foresight is None else [foresight.log_noise])]
        return self.graphs.run((*sizes, len(given(self.roots))), function, inputs)


def drafted(
    heads: CloverHeads,
    cache: StaticTreeCache | None,
    nodes: int,
    shape: str,
    temperature: float | None,
    *values: torch.Tensor,
) -> Outputs:
    """`draft_step` of tensors alone: the last is the noise [B, D, V] where there is a temperature."""
    hidden, next_tokens, positions, counts, state, roots, *noise = values
    foresight = None if temperature is None else Foresight(noise[0], temperature)
    new = (hidden, next_tokens, positions, counts)
    try:
        return draft_step(heads, cache, nodes, shape, *new, state, roots, foresight)
    finally:
        if cache is not None:
            cache.slots.index = None  # also where a capture broke off


def hand_over(one: CloverDrafter, other: CloverDrafter) -> None:
    """What `one` knows of the text, to `other`, which is new."""
    for name in ("state", "roots", "is_broken", "_waiting"):
        setattr(other, name, getattr(one, name))
    if one.cache is not None and other.cache is not None and one.cache.lengths:
        lengths, length = list(one.cache.lengths), max(one.cache.lengths)
        states = [one.cache.export(layer_idx, length) for layer_idx in range(len(one.cache.layers))]
        other.cache.load(states, length)
        other.cache.stand_at(lengths)


def what_is_written_down(heads: DraftHeads) -> tuple:
    """In a graph, of what does not belong to the cache: where everything is that a draft reads, and sizes."""
    borrowed = heads.borrowed
    tensors = [*heads.parameters(), *heads.buffers(), borrowed.embedding, *borrowed.lm_head.parameters()]
    tensors += borrowed.norm.parameters()
    tensors += (part for part in borrowed.draft_rows or () if isinstance(part, torch.Tensor))
    names = ("draft_depth", "draft_beam_width", "draft_top_k", "draft_top_p", "draft_min_p")
    return tuple(getattr(heads.config, name) for name in names), tuple(tensor.data_ptr() for tensor in tensors)


__all__ = ["CAPTURES", "DraftGraph", "DraftGraphs", "GraphedDrafter", "graphed_drafter", "pays"]
