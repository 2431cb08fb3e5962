"""The decode loop: draft, verify, walk, commit, learn.

Contract: `speculate` takes the place of transformers' `_sample` and returns what `_sample` returns. Greedy tokens are
identical. Sampled tokens have the same distribution and, at batch 1, come from the same random numbers.

Shapes: B batch, n tree nodes, V vocabulary.
"""

import time
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from ..network.modeling_heads import DraftHeads
from ..targets.private_api import cache_name
from .budget.automatic import make_budget
from .call import Text
from .draft.session import DraftSession, layers_read
from .processes import any_goes_on, shared_budget
from .record import Speculation, with_record
from .route import AS_TREES, REPLAYED, TREE, Route
from .target.base import Run
from .target.chains import ChainRun
from .target.trees import TargetRun
from .tree import root_only
from .walk import greedy_walk, read_walk, replay


@torch.no_grad()
def speculate(
    target: PreTrainedModel,
    heads: DraftHeads,
    input_ids: torch.Tensor,
    text: Text,
    model_kwargs: dict,
    num_assistant_tokens: int | None = None,
    is_ceiling: bool = False,
    synced_gpus: bool = False,
    group: Any = None,
    route: Route = AS_TREES,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """`num_assistant_tokens`: nodes of every tree. With None the budget chooses the number, with `is_ceiling` up to
    `num_assistant_tokens`. `group`: the processes among which the target is divided. `route`: what `choose_route`
    returned."""
    asked = (num_assistant_tokens, is_ceiling, target, heads, *text.budget_keys, route.in_graphs)
    budget = shared_budget(make_budget(*asked), group)
    layers = layers_read(heads)
    run: Run
    if route.method == TREE:
        run = TargetRun(target, text.config, model_kwargs, layers, route.in_graphs, text)
    else:
        run = ChainRun(target, text.config, model_kwargs, route.method == REPLAYED, route.steps, layers)
    walk = greedy_walk if text.is_plain_greedy else replay
    stats = Speculation(method=route.method, reason=route.reason)

    with run.open():
        with stats.clock("verify"):
            logits = run.prefill(input_ids, limit=text.max_length)  # [B, 1, V]
        with stats.clock("walk"):
            walk(root_only(torch.zeros_like(logits[:, 0, 0], dtype=torch.long)), logits, text)
            stats.count_prompt(len(text.finished))
        ours = DraftSession(heads, budget, run, text)
        ours.extend_by_prompt()

        while any_goes_on(text.done, synced_gpus, input_ids.device):
            if text.done:  # another process is not, and waits for this one's forward
                run.verify(text.last_tokens())
                continue
            with stats.clock("draft") as drafting:
                tree, rows = ours.draft(logits.shape[-1]), text.unfinished
            with stats.clock("verify"):
                logits = run.verify(tree)  # [B, n, V]
            with stats.clock("walk"):
                emitted = text.emitted
                found = run.walked  # the walk of the forward's graph, or None
                paths = walk(tree, logits, text) if found is None else read_walk(found, tree, logits, text)
                run.commit(paths)
            ours.extend(paths, tree, logits)
            walked = [paths[row] for row in rows]
            stats.count(tree.size, walked, text.emitted - emitted)
            if run.is_warm and ours.drafter.is_warm:
                budget.learn(tree, walked, drafting.seconds, time.perf_counter() - drafting.ended)
            ours.drop_finished_rows()

        sequences, stats.new_tokens = text.sequences(), text.emitted
        text.end()
        cache = ours.hand_back(sequences, synced_gpus)
    if ours.listener is not None:
        ours.listener.end(stats)
    if not text.config.return_dict_in_generate:
        return with_record(sequences, stats)
    items: dict[str, Any] = {"sequences": sequences, "scores": text.scores, "logits": text.logits, cache_name(): cache}
    return with_record(GenerateDecoderOnlyOutput(**items), stats)
