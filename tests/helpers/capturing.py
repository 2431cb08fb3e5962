"""A stand-in for CUDA's capture on any device: operators are recorded, and replayed into the same memory.

As on a GPU, a capture does not count as a run: the first replay returns what was computed while recording. What a
graph cannot do (waiting for the host, copying from it) raises an error. A replay reads the recorded addresses, so it
does not see a tensor that has moved, and its results differ. A capture that fails leaves memory unchanged.
"""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_clover.decoding import graphs, tree

REFUSED = {"_local_scalar_dense", "nonzero", "equal"}
# The first two make a tensor of the host's numbers; that copy waits for the host.
REFUSED_CALLS = {torch.tensor, torch.as_tensor, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy}


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []
        self.overwritten = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        indices = args[1] if name.startswith("index") and isinstance(args[1], list | tuple) else ()
        if name in REFUSED or any(i is not None and i.dtype == torch.bool for i in indices):
            raise RuntimeError(f"`{name}` waits for the host, which no graph does")
        if function._schema.is_mutable:
            self.overwritten += [(part, part.clone()) for part in args if isinstance(part, torch.Tensor)]
        found = function(*args, **kwargs)
        self.calls.append((function, args, kwargs, found))
        return found

    def undo(self):
        for part, before in reversed(self.overwritten):
            part.copy_(before)

    def replay(self):
        for function, args, kwargs, found in self.calls:
            if function.is_view:
                continue
            again = function(*args, **kwargs)
            pairs = [(found, again)] if isinstance(found, torch.Tensor) else list(zip(found, again, strict=True))
            for old, new in pairs:
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    assert old.shape == new.shape
                    old.copy_(new)


class Refusing(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in REFUSED_CALLS:
            raise RuntimeError(f"`{function.__name__}` waits for the host, which no graph does")
        return function(*args, **(kwargs or {}))


class Captures:
    """Takes the place of CUDA's capture (`graphs.CAPTURES`)."""

    def __init__(self):
        self.made = self.replayed = 0

    def __call__(self, function, pool):
        recorder = Recorder()
        try:
            # Not in inference mode: there the recorder gets composite operators, some of which may return a view or a
            # copy.
            with torch.inference_mode(False), torch.no_grad(), Refusing(), recorder:
                outputs = function()
        except Exception:
            recorder.undo()
            raise
        recorder.overwritten.clear()
        self.made += 1
        has_run = True

        def replay():
            nonlocal has_run
            self.replayed += 1
            if not has_run:
                recorder.replay()
            has_run = False

        return replay, outputs


@pytest.fixture
def captures(monkeypatch):
    """Captures on the CPU, and no reading of values while trees grow, as on a GPU."""
    stand_in = Captures()
    monkeypatch.setitem(graphs.CAPTURES, "cpu", stand_in)
    monkeypatch.setattr(tree, "LOOKS_ON", ())
    return stand_in
