"""Functions of tensors as CUDA graphs: one launch where Python would make some hundred.

Contract: `Graphs` knows neither heads nor targets. `run(key, function, inputs)` gives what `function(*inputs)` gives.
It calls the function the first time that a key comes, which readies kernels; captures it the second time; and replays
it from then on, with the inputs copied to where the graph reads them. So whatever else the function reads must stay at
its address, and every number that it takes from Python must be part of the key or of `written_down`. There are `MOST`
graphs at most, of which the one that was used least lately makes room, and all share one pool of memory, which is as
large as the largest of them needs; what they take is logged (level INFO). A capture that finds no memory is tried
again without the others. Where it fails everything runs eagerly from there on, and one line says so.
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
    """A function that runs the kernels of `function` again, and where they leave what it returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads may go on
        outputs = function()
    return graph.replay, outputs


CAPTURES: dict[str, Callable[..., Any]] = {"cuda": captured_by_cuda}  # by the kind of device


def filled(value: torch.Tensor, rows: int, dim: int = 0) -> torch.Tensor:
    """With zeros up to `rows` in one dimension; itself, and no copy, where there are as many."""
    missing = rows - value.shape[dim]
    return F.pad(value, (0, 0) * (value.ndim - 1 - dim % value.ndim) + (0, missing)) if missing else value


class Graph:
    """One function, captured."""

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


class Graphs:
    """What was captured over the addresses of one cache."""

    def __init__(self, device: torch.device, what: str, written_down: Hashable = None) -> None:
        """`what` they are, for messages; `written_down`: what is in a graph beside the cache's addresses."""
        self.device, self.what, self.written_down = device, what, written_down
        self.capture = CAPTURES.get(device.type)
        self.is_short = False  # of memory, for the rest of the call
        self.has_replayed = True  # the last run was a replay, or no run is one: its time is what such a run takes
        self.forget()

    def forget(self) -> None:
        """Addresses are others from here on, and the memory of the graphs that there were is free."""
        self.made: dict[Hashable, Graph] = {}
        self._seen: set[Hashable] = set()
        # Once its last graph is gone, a pool cannot be captured into again.
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def stop(self, why: str, is_short: bool = False) -> None:
        """Capture nothing from here on. `is_short`: of memory, which the next call may have again."""
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
        if graph is None and self.capture is not None and key in self._seen:
            graph = self._captured(self.capture, function, inputs, key)
        self._seen.add(key)
        if graph is None:
            return function(*inputs)
        self.made[key] = graph  # as the one that was used last
        return graph(*inputs)

    def _captured(
        self,
        capture: Callable[..., Any],
        function: Callable[..., Outputs],
        inputs: Sequence[torch.Tensor],
        key: Hashable,
    ) -> Graph | None:
        on_cuda = self.device.type == "cuda"
        before = torch.cuda.memory_reserved(self.device) if on_cuda else 0
        while len(self.made) >= MOST:
            del self.made[next(iter(self.made))]
        try:
            with suppress(torch.OutOfMemoryError), torch.cuda.device(self.device) if on_cuda else nullcontext():
                graph = Graph(function, inputs, capture, self._pool)
                more = (torch.cuda.memory_reserved(self.device) - before) / 2**20 if on_cuda else 0
                logger.info(f"{self.what}: {key} is a graph from here on; it took {more:.0f} MiB.")
                return graph
        except Exception as error:
            reason = str(error).partition("\n")[0]
            self.stop(f"one could not be captured as a graph ({type(error).__name__}: {reason})")
            return None
        if self.made:
            self.forget()
            return self._captured(capture, function, inputs, key)
        self.stop("there is no memory for a graph", is_short=True)
        return None


__all__ = ["CAPTURES", "Graph", "Graphs", "filled"]
