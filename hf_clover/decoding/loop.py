"""The decode loop: draft, verify, walk, commit.

Contract: `speculate` is called where transformers would call `_sample` and returns what that returns, with the same
tokens: greedy to the token, sampled from the same distribution and, at batch 1, with the same random numbers.

Shapes: B batch, T prompt columns, n tree nodes, m walked nodes at most, d hidden size.
"""

import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from ..network.modeling_clover import CloverHeads
from .budget import Budget, make_budget
from .drafting import CloverCandidateGenerator
from .foresight import foresee
from .private_api import any_goes_on, is_the_users
from .ranks import shared_budget
from .record import Speculation, report
from .state import Text
from .static_drafting import compiled_drafter
from .support import warn
from .target_run import TargetRun
from .tree import Tree, chain_of, root_only, with_chain
from .walk import greedy_walk, replay

CATCH_UP_BLOCK = 128
DROP_BELOW = 0.75  # of a batch's rows going on


@dataclass
class CloverGenerateOutput(GenerateDecoderOnlyOutput):
    speculation: Speculation | None = None


@torch.no_grad()
def speculate(
    target: PreTrainedModel,
    heads: CloverHeads,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: Any = None,
    num_assistant_tokens: int | None = None,
    is_ceiling: bool = False,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """`num_assistant_tokens`: the nodes of every tree; None, or `is_ceiling`, for as many as pay."""
    their_cache = model_kwargs.pop("past_key_values", None)
    text = Text.start(input_ids, logits_processor, stopping_criteria, generation_config, streamer)
    room = getattr(generation_config, "max_cache_len", None)
    if room is not None:
        room -= text.max_length
    mode, picking = _habits(generation_config)
    budget = shared_budget(make_budget(num_assistant_tokens, is_ceiling, target, heads, mode, picking, room), target)
    stats = Speculation()
    run = TargetRun(target, generation_config, model_kwargs, widest=budget.most_nodes + 1)
    known = run.adopt(their_cache)  # columns of an earlier turn
    keeps_cache = generation_config.return_dict_in_generate or is_the_users(their_cache)
    may_drop_rows = not keeps_cache and not text.in_lockstep
    walk = greedy_walk if text.is_plain_greedy else replay

    with run.open():
        with _clock(stats, "verify_seconds"):
            logits = run.prefill(input_ids, limit=text.max_length)  # [B, 1, V]
        drafter = _drafter(heads, run, their_cache, known)
        budget.has_fixed_reach = run.is_compiled
        with _clock(stats, "walk_seconds"):
            walk(root_only(torch.zeros_like(logits[:, 0, 0], dtype=torch.long)), logits, text)
        stats.target_forwards, stats.row_forwards = 1, len(text.finished)
        if not text.done or keeps_cache:
            _take_in_prompt(drafter, run, text)

        while any_goes_on(target, text.done, synced_gpus, input_ids.device):
            if text.done:  # another process is not: keep it company
                run.verify(root_only(torch.stack([row[-1] for row in text.live_rows()])))
                continue
            unfinished = text.unfinished
            with _clock(stats, "draft_seconds") as drafting:
                tree = _draft(drafter, budget, text, run.cache.lengths, logits.shape[-1])
            with _clock(stats, "verify_seconds"):
                logits = run.verify(tree)  # [B, n, V]
            with _clock(stats, "walk_seconds"):
                before = text.emitted
                paths = walk(tree, logits, text)  # per live row the walked nodes
                start = run.next_position
                run.commit(paths)
            if text.found_no_drafts and not drafter.is_broken:  # which the walk sees at no cost
                drafter.is_broken = True
                warn("the heads gave NaN: drafting is off for the rest of this call; the tokens are the target's own")
            walked = [paths[row] for row in unfinished]
            stats.count(tree.size, walked, text.emitted - before)
            if not text.done or keeps_cache:
                _take_in_walk(drafter, run, text, paths, start)
            budget.learn(tree, walked, drafting.seconds, time.perf_counter() - drafting.ended)
            if may_drop_rows and not text.done:
                _drop_finished(drafter, run, text)

        stats.new_tokens = text.emitted
        sequences = text.sequences()
        if streamer is not None:
            streamer.end()
        cache = _finished_cache(run, sequences, their_cache, synced_gpus) if keeps_cache else None
        if cache is not None:
            drafter.remember(cache, int(cache.get_seq_length()))
    report(stats)
    if not generation_config.return_dict_in_generate:
        return sequences
    return CloverGenerateOutput(
        sequences=sequences, scores=text.scores, logits=text.logits, past_key_values=cache, speculation=stats
    )


# ---------------------------------------------------------------------- the heads' side


def _drafter(heads: CloverHeads, run: TargetRun, their_cache: Any, known: int) -> CloverCandidateGenerator:
    """The one that the conversation had, or a new one, compiled if the target is."""
    config, mask = run.generation_config, run.prompt_mask
    if mask is not None:
        mask = mask[:, -run.hidden.shape[1] :]
    if not run.is_compiled or is_the_users(their_cache):
        return CloverCandidateGenerator.for_conversation(heads, their_cache, known, mask, config.prefill_chunk_size)
    batch, capacity = len(run.hidden), run.cache.capacity
    settings = (config.compile_config, mask, config.prefill_chunk_size)
    return run.hold(compiled_drafter(heads, batch, capacity, *settings))


def _take_in_prompt(drafter: CloverCandidateGenerator, run: TargetRun, text: Text) -> None:
    """Every prompt position that the target has just computed, each with the token after it."""
    hidden, rows = run.hidden, text.rows()  # [B, T, d]
    known = min(hidden.shape[1], rows[0].shape[0])  # a prompt of embeddings has no tokens but the one just emitted
    if known < hidden.shape[1]:
        drafter.prompt_mask = None
    hidden = hidden[:, -known:]
    tokens = torch.stack([row[-known:] for row in rows])  # [B, T]
    positions = run.model_kwargs["position_ids"]
    positions = positions.reshape(-1, *positions.shape[-2:])[0][:, -known:].expand(len(rows), -1)  # [B, T]
    drafter.extend(hidden, tokens, positions, [known] * len(rows))


def _take_in_walk(
    drafter: CloverCandidateGenerator, run: TargetRun, text: Text, paths: list[list[int]], start: torch.Tensor
) -> None:
    """Every walked node, each with the token emitted at it. `start` [..., B, 1]: the root's position."""
    counts = [len(path) for path in paths]
    longest, device = max(counts), run.hidden.device
    hidden = run.hidden[:, :longest]
    if any(path != list(range(len(path))) for path in paths):
        index = torch.tensor([[*path, *[0] * (longest - len(path))] for path in paths], device=device)  # [B, m]
        hidden = run.hidden.gather(1, index[..., None].expand(-1, -1, run.hidden.shape[2]))  # [B, m, d]
    tokens = [
        torch.nn.functional.pad(row[len(row) - count :], (0, longest - count))
        for row, count in zip(text.live_rows(), counts, strict=True)
    ]
    start = start.reshape(-1, *start.shape[-2:])[0]  # [B, 1]
    positions = start + torch.arange(longest, device=start.device)  # [B, m]
    drafter.extend(hidden, torch.stack(tokens), positions, counts)


def _draft(
    drafter: CloverCandidateGenerator, budget: Budget, text: Text, lengths: Sequence[int], vocab_size: int
) -> Tree:
    """`lengths` of the live rows' texts."""
    unfinished = text.unfinished
    nodes = budget.ask(len(unfinished), max(lengths))
    foresight = foresee(text, min(nodes, drafter.config.draft_depth), vocab_size) if nodes else None
    tree = drafter.draft(nodes, foresight=foresight)
    tree = budget.cut(tree, unfinished, [lengths[place] for place in unfinished])
    if text.in_lockstep and text.pad is not None and len(unfinished) < len(text.finished):
        finished = torch.tensor(text.finished, device=tree.tokens.device)
        tree = with_chain(tree, finished, text.pad)
    return tree


def _drop_finished(drafter: CloverCandidateGenerator, run: TargetRun, text: Text) -> None:
    """Rows that have ended leave the batch, once they are so many that copying the others' cache pays."""
    going = text.unfinished
    if run.can_drop_rows and len(going) <= DROP_BELOW * len(text.live):
        run.keep_rows(going)
        drafter.keep_rows(going)
        text.live = [text.live[place] for place in going]


def _habits(config: GenerationConfig) -> tuple[Hashable, Hashable]:
    """What the cost of a step and the worth of a draft depend on in the caller's settings."""
    # To a digit: what is learned is kept, and a server may see any temperature there is.
    return config.cache_implementation, (config.do_sample, config.do_sample and round(config.temperature, 1))


# ---------------------------------------------------------------------- the cache that plain generate can continue


def _finished_cache(run: TargetRun, sequences: torch.Tensor, theirs: Any, synced_gpus: bool) -> Any:
    """Keys and values of everything but the last token, rows that ended early padded as plain generate pads them."""
    columns, device = max(run.cache.lengths), sequences.device
    while any_goes_on(run.target, min(run.cache.lengths) == columns, synced_gpus, device):
        if min(run.cache.lengths) == columns:  # another process's rows are still uneven: keep it company
            run.verify(root_only(sequences[:, -1]))
            continue
        missing = [columns - length for length in run.cache.lengths]
        block = min(max(missing), CATCH_UP_BLOCK)
        width = sequences.shape[1]
        starts = torch.tensor([width - 1 - gap for gap in missing], device=sequences.device)[:, None]  # [B, 1]
        order = torch.arange(block, device=sequences.device)  # [block]
        tokens = sequences.gather(1, (starts + order).clamp(max=width - 1))  # [B, block]
        run.verify(chain_of(tokens))
        run.commit([range(min(gap, block)) for gap in missing])
    return run.hand_back(theirs, columns)


@dataclass
class _Clock:
    seconds: float = 0.0
    ended: float = 0.0


@contextmanager
def _clock(stats: Speculation, name: str) -> Iterator[_Clock]:
    clock, started = _Clock(), time.perf_counter()
    yield clock
    clock.ended = time.perf_counter()
    clock.seconds = clock.ended - started
    setattr(stats, name, getattr(stats, name) + clock.seconds)
