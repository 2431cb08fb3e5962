"""How many kernels a step launches, and how often it waits for the device, by part: counts that any machine can take.

Contract: a kernel is an operator that computes something and is no view; a wait is whatever reads a number back to the
host. On a CPU tensors are there already, so `.tolist()`, `.numpy()`, `.cpu()` and `.to("cpu")` launch nothing: these
are seen as calls. With an eager target on a GPU it is these counts that bound a step, and they are exact, so a test
asserts them. Counted per step, which goes from one forward of the target to the next, over the steps of `COUNTED`, and
as on a GPU: drafting, which looks at its own levels where looking costs nothing, does not. What the heads compute of
the text, when a draft is asked for, is part of the draft. What is a graph on a GPU counts as one kernel, so that what
is left is what surrounds it: the forward over a tree and the draft, and plain generate's forward where transformers
compiles it over a static cache. `eager` counts steps without.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_clover import CloverHeads
from hf_clover.decoding import graphs, loop, tree
from hf_clover.decoding import route as route_module
from hf_clover.decoding.budget.automatic import AutomaticBudget
from hf_clover.decoding.draft.drafter import CloverDrafter
from hf_clover.decoding.draft.session import DraftSession
from hf_clover.decoding.target.trees import TargetRun

COUNTED = range(12, 24)  # steps
LAYERS, VOCABULARY, NODES = 36, 2000, 24
PARTS = {  # what of a step is where; what a part calls that is one itself counts there
    "verify": [(TargetRun, "verify")],
    "masks": [(TargetRun, "_masks")],
    "walk": [(loop, "greedy_walk"), (loop, "read_walk"), (loop, "replay")],
    "commit": [(TargetRun, "commit")],
    "take-in": [(DraftSession, "extend")],
    "budget": [(AutomaticBudget, "ask")],  # what it reads are copies, which are on the host already
    "draft": [(CloverDrafter, "draft")],
}
NOTHING = {"_unsafe_view", "empty", "new_empty", "empty_like", "empty_strided"}  # are launched by no operator of these
READS = {"_local_scalar_dense", "nonzero", "equal"}
READING_CALLS = {torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy}


class Enough(Exception):
    """All steps that are counted have been."""


class Launches(TorchDispatchMode):
    """Counts of kernels and waits by part, while `step` is one of `COUNTED`."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.operators: Counter[tuple[str, str]] = Counter()  # of a part, for who wants to see which
        self.part, self.step, self.is_in_a_graph = "other", -1, False

    def __torch_dispatch__(self, function: Any, types: Any, args: Sequence = (), kwargs: dict | None = None) -> Any:
        if self.step in COUNTED and not (function.is_view or self.is_in_a_graph):
            name = function.overloadpacket.__name__
            if name in NOTHING:
                return function(*args, **(kwargs or {}))
            self.kernels[self.part] += 1
            self.operators[self.part, name] += 1
            self.waits[self.part] += name in READS
        return function(*args, **(kwargs or {}))

    def as_a_graph(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Its launches are one."""

        def called(*args: Any, **kwargs: Any) -> Any:
            self.is_in_a_graph = True
            try:
                return function(*args, **kwargs)
            finally:
                self.is_in_a_graph = False
                if self.step in COUNTED:
                    self.kernels[self.part] += 1
                    self.operators[self.part, "graph"] += 1

        return called

    def capture(self, function: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any]:
        """In the place of CUDA's; a replay, which would give what it gave before, is counted and left out."""
        return self.as_a_graph(lambda: None), self.as_a_graph(function)()

    def note_read(self) -> None:
        if self.step in COUNTED and not self.is_in_a_graph:
            self.waits[self.part] += 1
            self.operators[self.part, "read back"] += 1

    def within(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            before, self.part = self.part, part
            try:
                return function(*args, **kwargs)
            finally:
                self.part = before

        return called

    def begin_step(self, *_: Any) -> None:
        self.step += 1
        if self.step == COUNTED.stop:
            raise Enough


class _Reads(TorchFunctionMode):
    """Tells `launches` of the calls that an operator does not show where tensors are on the host anyway."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self.launches = launches

    def __torch_function__(self, function: Any, types: Any, args: Sequence = (), kwargs: dict | None = None) -> Any:
        goes_to_the_host = function is torch.Tensor.to and "cpu" in args  # by name: a device may be any
        if function in READING_CALLS or goes_to_the_host:
            self.launches.note_read()
        return function(*args, **(kwargs or {}))


@contextmanager
def counting(target: PreTrainedModel, has_heads: bool = False) -> Iterator[Launches]:
    launches = Launches()
    with ExitStack() as stack:
        if has_heads:
            verify = TargetRun.verify

            def verified(run: TargetRun, drafted: tree.Tree) -> torch.Tensor:
                launches.begin_step()
                return verify(run, drafted)

            stack.enter_context(mock.patch.object(TargetRun, "verify", verified))
        else:
            stack.callback(target.register_forward_pre_hook(launches.begin_step).remove)
        stack.enter_context(mock.patch.object(tree, "LOOKS_ON", ()))
        for part, places in PARTS.items():
            for owner, name in places:
                wrapped = launches.within(part, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, wrapped))
        stack.enter_context(_Reads(launches))
        stack.enter_context(launches)
        yield launches


@contextmanager
def as_graphs(launches: Launches, target: PreTrainedModel, eager: bool) -> Iterator[None]:
    """What transformers compiles, and what this library captures, without a trial of whether its replays are right."""
    compiled = mock.patch.object(target, "get_compiled_call", return_value=launches.as_a_graph(target.__call__))
    captured = mock.patch.dict(graphs.CAPTURES, {} if eager else {"cpu": launches.capture})
    with compiled, captured, mock.patch.object(route_module, "_why_no_tree", return_value=None):
        yield


def toy_target(layers: int = LAYERS) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
    config = LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=VOCABULARY, eos_token_id=None)
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def launches_of(
    target: PreTrainedModel,
    heads: CloverHeads | None = None,
    batch_size: int = 1,
    cache: str = "dynamic",
    do_sample: bool = False,
    eager: bool = False,
    nodes: int | None = NODES,
) -> dict[str, Any]:
    """Per step kernels and waits by part, and in all."""
    torch.manual_seed(1)
    prompt = torch.randint(3, target.config.vocab_size, (batch_size, 8))
    options: dict[str, Any] = {"max_new_tokens": 4 * COUNTED.stop, "do_sample": do_sample, "pad_token_id": 0}
    if cache != "dynamic":
        options |= {"cache_implementation": cache, "compile_config": CompileConfig()}
        options["compile_config"]._compile_all_devices = True  # as on a GPU
    if heads is not None:
        options |= {"assistant_model": heads, "num_assistant_tokens": nodes}
    with counting(target, heads is not None) as launches, as_graphs(launches, target, eager), suppress(Enough):
        target.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    if launches.step < COUNTED.stop:
        raise ValueError(f"there were {launches.step} steps, and {COUNTED.stop} are counted.")
    steps = len(COUNTED)
    return {
        "kernels": {part: count / steps for part, count in launches.kernels.items()},
        "waits": {part: count / steps for part, count in launches.waits.items() if count},
        "all_kernels": launches.kernels.total() / steps,
        "all_waits": launches.waits.total() / steps,
        "operators": {" ".join(key): count / steps for key, count in launches.operators.most_common()},
    }


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=["clover-x", "clover-2", "medusa"])
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the target (%(default)s)")
    parser.add_argument("--eager", action="store_true", help="steps without graphs")
    parser.add_argument("--automatic", action="store_true", help="trees of as many nodes as pay, and not of 24")
    parser.add_argument("--output", type=Path, help="a JSON file")
    words = parser.parse_args(argv)
    target, rows, nodes = toy_target(words.layers), [], None if words.automatic else NODES
    print("| cache | batch | picks | drafter | kernels | without the draft, over plain | waits | by part: both |")
    print("|---|---|---|---|---|---|---|---|")
    for cache in ("dynamic", "static"):
        for batch_size in (1, 4):
            for do_sample in (False, True):
                plain = None
                for variant in (None, *words.variants):
                    torch.manual_seed(0)
                    heads = None if variant is None else CloverHeads.from_target(target, variant).eval()
                    found = launches_of(target, heads, batch_size, cache, do_sample, words.eager, nodes)
                    plain = plain or found
                    beside = (found["all_kernels"] - found["kernels"].get("draft", 0)) / plain["all_kernels"]
                    setting = {"cache": cache, "batch_size": batch_size, "do_sample": do_sample, "variant": variant}
                    rows.append({**setting, "beside_draft_over_plain": beside, **found})
                    parts = (f"{p} {n:.0f}, {found['waits'].get(p, 0):.1f}" for p, n in found["kernels"].items())
                    picks = "sampled" if do_sample else "greedy"
                    start = f"| {cache} | {batch_size} | {picks} | {variant or 'plain'} | {found['all_kernels']:.0f}"
                    print(f"{start} | {beside:.2f} | {found['all_waits']:.1f} | {'; '.join(parts)} |", flush=True)
    if words.output is not None:
        words.output.write_text(json.dumps({"kind": "launches", "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return rows


if __name__ == "__main__":
    main()
