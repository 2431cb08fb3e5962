"""Functions of tensors as CUDA graphs: one launch in place of some hundred from Python.

Contract: `Graphs` knows neither heads nor targets. `run(key, function, inputs)` returns what `function(*inputs)`
returns. With a new key it calls the function, which prepares its kernels. The second time it captures the function,
and from then on it replays the graph, with the inputs copied to the addresses that the graph reads. So every other
tensor that the function reads must stay at its address. Every number that it takes from Python must be part of the key
or of `written_down`. At most `MOST` graphs are kept; a new one replaces the least recently used. All share one pool of
memory, as large as the largest of them needs; the memory that each takes is logged (level INFO). If there is no memory
for a capture, the other graphs are deleted and it is tried again. After a failed capture everything runs eagerly, and
one warning says so.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from transformers.utils import logging

logger = logging.get_logger(__name__)

MOST = 24  # graphs of one cache

Outputs = tuple[torch.Tensor, ...]


def captured_by_cuda(function: Callable[[], Outputs], pool: Any) -> tuple[Callable[[], None], Outputs]:
    """A function that runs the kernels of `function` again, and the tensors that they write its outputs to."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads may run
        outputs = function()
    return graph.replay, outputs


CAPTURES: dict[str, Callable[..., Any]] = {"cuda": captured_by_cuda}  # by the kind of device


def filled(value: torch.Tensor, rows: int, dim: int = 0) -> torch.Tensor:
    """`value` padded with zeros to `rows` entries in one dimension; `value` itself, not a copy, if it has as many."""
    missing = rows - value.shape[dim]
    return F.pad(value, (0, 0) * (value.ndim - 1 - dim % value.ndim) + (0, missing)) if missing else value


def as_graph(
    function: Callable[..., Outputs], inputs: Sequence[torch.Tensor], capture: Callable[..., Any], pool: Any
) -> Callable[..., Outputs]:
    """`function`, captured with inputs of these shapes."""
    with torch.inference_mode(False):  # later calls write to these tensors, in inference mode or not
        held = [value.clone(memory_format=torch.contiguous_format) for value in inputs]
    replay, outputs = capture(partial(function, *held), pool)

    def graph(*inputs: torch.Tensor) -> Outputs:
        for mine, new in zip(held, inputs, strict=True):
            mine.copy_(new, non_blocking=True)
        replay()
        return tuple(output.clone() for output in outputs)  # the next replay writes over these

    return graph


class Graphs:
    """The graphs that were captured over the addresses of one cache."""

    def __init__(self, device: torch.device, what: str, written_down: Hashable = None) -> None:
        """`what`: their name in messages. `written_down`: everything that a graph holds beside the cache's
        addresses."""
        self.device, self.what, self.written_down = device, what, written_down
        self.capture = CAPTURES.get(device.type)
        self.is_short = False  # there is no memory for graphs in the rest of the call
        self.has_replayed = True  # the last run was a replay, or none is: so it took the usual time
        self.forget()

    def forget(self) -> None:
        """Delete all graphs and free their memory, because the addresses change."""
        self.made: dict[Hashable, Callable[..., Outputs]] = {}
        self._seen: set[Hashable] = set()
        # Once its last graph is gone, a pool cannot be captured into again.
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def stop(self, why: str, is_short: bool = False) -> None:
        """Capture nothing from here on. `is_short`: for lack of memory, which the next call may have again."""
        if self.capture is not None:
            logger.warning(
                f"{self.what} run eagerly from here on: {why}. `disable_compile=True` leaves graphs out from the "
                "beginning."
            )
        self.capture, self.is_short = None, self.is_short or is_short
        self.forget()

    def run(self, key: Hashable, function: Callable[..., Outputs], inputs: Sequence[torch.Tensor]) -> Outputs:
        graph = self.made.pop(key, None)
        self.has_replayed = graph is not None or (self.capture is None and not self.is_short)
        if graph is None and key in self._seen:
            graph = self._captured(key, function, inputs)
        self._seen.add(key)
        if graph is None:
            return function(*inputs)
        self.made[key] = graph  # the most recently used graph is the last
        return graph(*inputs)

    def _captured(
        self, key: Hashable, function: Callable[..., Outputs], inputs: Sequence[torch.Tensor]
    ) -> Callable[..., Outputs] | None:
        if self.capture is None:
            return None
        on_cuda = self.device.type == "cuda"
        before = torch.cuda.memory_reserved(self.device) if on_cuda else 0
        while len(self.made) >= MOST:
            del self.made[next(iter(self.made))]
        try:
            with suppress(torch.OutOfMemoryError), torch.cuda.device(self.device) if on_cuda else nullcontext():
                graph = as_graph(function, inputs, self.capture, self._pool)
                more = (torch.cuda.memory_reserved(self.device) - before) / 2**20 if on_cuda else 0
                logger.info(f"{self.what}: {key} is a graph from here on; it took {more:.0f} MiB.")
                return graph
        except Exception as error:
            reason = str(error).partition("\n")[0]
            self.stop(f"one could not be captured as a graph ({type(error).__name__}: {reason})")
            return None
        if self.made:
            self.forget()
            return self._captured(key, function, inputs)
        self.stop("there is no memory for a graph", is_short=True)
        return None
