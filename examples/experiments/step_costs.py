"""What does a step over some nodes cost against one over a token, packed and not, and what bounds efficiency?

On a text of some hundred tokens: plain generate's forward of one token; the verifying forward of trees that the heads
drafted, with their mask and the cache, of 1 to 16 tokens (the root is one); the draft of each; then walk and commit by
the clock inside `generate`. Everything is taken in turn, repeat by repeat, with plain weights and with packed ones,
and medians are told, so that a machine that slows down slows all of it. Efficiency is the plain forward over the sum:
the speedup is that times the tokens that a step brings.

    python examples/experiments/step_costs.py --target examples/smollm2/target --heads examples/smollm2/heads
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from common import STAND_IN, finish, line, load_heads, load_target, panel, parse
from step_parts import long_prompt, parts_of
from tqdm.auto import tqdm
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from hf_clover import CloverHeads, pack_for_cpu
from hf_clover.decoding.draft.cpu_copy import drafting_copy
from hf_clover.decoding.target.graph_rules import why_no_graphs
from hf_clover.decoding.target.trees import TargetRun
from hf_clover.decoding.tree import root_only
from hf_clover.targets.private_api import cache_name

DEFAULTS = {
    "heads": str(STAND_IN / "heads"),
    "nodes": (1, 2, 4, 8, 16),
    "contexts": (256,),
    "max_new_tokens": 64,
    "repeats": 30,
}
TOY = {"nodes": (1, 2, 4), "contexts": (16,), "max_new_tokens": 8, "repeats": 2}
Timed = dict[tuple[str, int], Callable[[], Any]]


def calls_of(
    stack: ExitStack, target: PreTrainedModel, heads: CloverHeads, prompt: torch.Tensor, sizes: Sequence[int]
) -> Timed:
    """What is timed, by part and tokens; each leaves everything as it was."""
    mask = torch.ones_like(prompt)
    positions = torch.arange(prompt.shape[1], device=prompt.device)[None]
    config, inputs = GenerationConfig(), {"attention_mask": mask, "position_ids": positions, "use_cache": True}
    run = TargetRun(target, config, inputs, in_graphs=why_no_graphs(target, config) is None)
    stack.enter_context(run.open())
    token = run.prefill(prompt)[:, -1].argmax(-1)  # [1]
    drafter = heads.new_drafter(drafting_copy(heads.bind(target), target))
    drafter.extend(run.hidden, torch.cat((prompt[:, 1:], token[:, None]), dim=1), positions, [prompt.shape[1]])
    run.commit([()])

    cache = DynamicCache(config=target.config)
    target(input_ids=prompt, attention_mask=mask, **{cache_name(): cache})
    plain = {"attention_mask": torch.nn.functional.pad(mask, (0, 1), value=1), "position_ids": positions[:, -1:] + 1}

    def plain_forward() -> None:
        target(input_ids=token[:, None], use_cache=True, **{cache_name(): cache}, **plain)
        cache.crop(-1)

    calls: Timed = {("plain", 1): plain_forward}
    for size in sizes:
        tree = drafter.draft(size - 1) if size > 1 else root_only(token)
        calls["verify", size] = lambda tree=tree: run.verify(tree)
        if size > 1:
            calls["draft", size] = lambda size=size: drafter.draft(size - 1)
    return calls


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(__doc__, argv, DEFAULTS, TOY)
    rows: list[dict[str, Any]] = []
    on_cuda = torch.cuda.is_available()
    kinds = ("plain weights",) if on_cuda else ("plain weights", "packed weights")
    models = {}
    for kind in kinds:  # two of each, so that they can take turns
        target, tokenizer = load_target(args)
        heads = load_heads(args, target)
        if kind == "packed weights":
            pack_for_cpu(target)
        models[kind] = target, heads
    for length in args.contexts:
        prompt = torch.tensor([long_prompt(tokenizer, length)], device=target.device)
        with ExitStack() as stack:
            calls = {kind: calls_of(stack, *models[kind], prompt, args.nodes) for kind in kinds}
            taken: dict[tuple[str, str, int], list[float]] = {}
            for repeat in tqdm(range(args.repeats + 2), f"after {length} tokens"):
                for name in calls[kinds[0]]:
                    for kind in kinds:
                        started = time.perf_counter()
                        calls[kind][name]()
                        if on_cuda:
                            torch.cuda.synchronize()
                        if repeat > 1:  # what a machine does only once
                            taken.setdefault((kind, *name), []).append(1000 * (time.perf_counter() - started))
        ms = {key: statistics.median(values) for key, values in taken.items()}
        for kind in kinds:
            target, heads = models[kind]
            for size in args.nodes:
                row = {"weights": kind, "context": length, "tokens": size, "plain_ms": ms[kind, "plain", 1]}
                row |= {"verify_ms": ms[kind, "verify", size], "draft_ms": ms.get((kind, "draft", size), 0.0)}
                row["verify_over_plain"] = row["verify_ms"] / row["plain_ms"]
                quartiles = statistics.quantiles(taken[kind, "verify", size], n=4)
                row["verify_ms_quartiles"] = [quartiles[0], quartiles[2]]
                if size > 1:
                    options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
                    drafting = {"assistant_model": heads, "num_assistant_tokens": size - 1}
                    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
                    parts = parts_of(target, inputs, {**options, **drafting})["parts_ms"]
                    row |= {f"{name}_ms": parts[name] for name in ("walk", "commit", "other")}
                whole = sum(row.get(f"{name}_ms", 0.0) for name in ("verify", "draft", "walk", "commit", "other"))
                row["efficiency"] = row["plain_ms"] / whole
                row["were_the_draft_free"] = row["plain_ms"] / (whole - row["draft_ms"])
                row["were_verify_a_plain_step"] = row["plain_ms"] / (whole - row["verify_ms"] + row["plain_ms"])
                rows.append(row)

    panels = []
    for length in args.contexts:
        mine = [row for row in rows if row["context"] == length]
        of_kind = {kind: [row for row in mine if row["weights"] == kind] for kind in kinds}
        for name, title in (("verify_over_plain", "A forward over a tree"), ("efficiency", "Efficiency of a step")):
            series = [line(kind, [(row["tokens"], row[name]) for row in its]) for kind, its in of_kind.items()]
            title = f"{title}, after {length} tokens"
            panels.append(panel("lines", title, "tokens in the forward", "× a plain forward", series, "log2"))
    return finish(args, target, __doc__, rows, "What a step over some nodes costs", panels, rows, script=__file__)


if __name__ == "__main__":
    main()
