"""The walk: plain generate, replayed on logits that are already there.

Contract: at each node, the caller's processors get that node's logits and exactly the `input_ids` that plain generate
would pass them. A token is picked as plain generate picks it, the stopping criteria are called, and the walk moves to
the child that carries the token. If no child does, the walk ends; the token is emitted all the same. `replay` does
exactly this. `greedy_walk` gives the same result for greedy decoding without processors, with one device sync. Where
the forward over the tree is a graph, `walk_in_tensors` is part of it, and `read_walk` adds its result to the text.

Shapes: B batch, n tree nodes, V vocabulary, L text columns.
"""

from collections.abc import Sequence

import torch
from transformers import LogitsProcessorList

from .call import Text
from .tree import Tree

# ---------------------------------------------------------------------- the plain walk


def replay(tree: Tree, logits: torch.Tensor, text: Text) -> list[list[int]]:
    """Walk each running row of logits [B, n, V]; returns the walked nodes per row, one per emitted token."""
    paths: list[list[int]] = [[] for _ in text.running]
    children = _children(tree)
    text.found_no_drafts |= tree.size > 1 and not all(children[place] for place in text.unfinished)
    if text.dice is not None:
        lengths = [len(row) for row in text.running_rows()]
        text.dice.forget_before(min((lengths[place] for place in text.unfinished), default=0))
    walk = _replay_in_lockstep if text.in_lockstep else _replay_abreast
    walk(children, logits, text, paths)
    return paths


def _replay_in_lockstep(
    children: list[dict[tuple[int, int], int]], logits: torch.Tensor, text: Text, paths: list[list[int]]
) -> None:
    """Walk all rows together, as plain generate does, until a row has no child: its next logits are not known yet."""
    nodes = [0] * len(children)
    while True:
        input_ids = text.input_ids[0]  # [B, L]
        raw = _logits_at(logits, range(len(nodes)), nodes).to(input_ids.device)  # [B, V]
        scores = _process(text.processors[0], input_ids, raw, text.config.do_sample)  # [B, V]
        if text.scores is not None:
            text.scores += (scores,)
        if text.logits is not None:
            text.logits += (raw,)
        tokens = _pick(scores, text, range(len(nodes)), [input_ids.shape[1]] * len(nodes))  # [B]
        if text.pad is not None:
            tokens = tokens.masked_fill(torch.tensor(text.finished, device=tokens.device), text.pad)
        text.input_ids[0] = input_ids = torch.cat((input_ids, tokens[:, None]), dim=-1)
        stops, picked = text.criteria(input_ids, text.scores).tolist(), tokens.tolist()
        for row, stop in enumerate(stops):
            paths[row].append(nodes[row])
            text.tokens[row].append(picked[row])
            text.emitted += not text.finished[row]
            text.finished[row] = text.finished[row] or stop
        if text.streamer is not None:
            text.streamer.put(tokens.cpu())
        steps = zip(nodes, picked, strict=True)
        found = [below.get(step) for below, step in zip(children, steps, strict=True)]
        nodes = [node for node in found if node is not None]
        if text.done or len(nodes) < len(found):
            return


def _replay_abreast(
    children: list[dict[tuple[int, int], int]], logits: torch.Tensor, text: Text, paths: list[list[int]]
) -> None:
    """Walk each row as far as it gets. Processors and criteria are called for each row as if it were alone."""
    at = dict.fromkeys(text.unfinished, 0)  # place -> node
    while at:
        places, nodes = list(at), list(at.values())
        rows = [text.running[place] for place in places]
        raw = _logits_at(logits, places, nodes)  # [k, V]
        if text.scores_decide:
            scores = _process(text.processors[0], None, raw, text.config.do_sample)  # [k, V]
        else:
            asked = [(text.processors[row], text.input_ids[row]) for row in rows]
            each = zip(asked, raw.split(1), strict=True)
            scores = torch.cat([_process(*one, here, text.config.do_sample) for one, here in each])
        picked = _pick(scores, text, rows, [text.input_ids[row].shape[1] for row in rows]).tolist()
        at = {}
        for place, row, node, token in zip(places, rows, nodes, picked, strict=True):
            new = torch.tensor([[token]], device=text.input_ids[row].device)
            text.input_ids[row] = torch.cat((text.input_ids[row], new), dim=-1)
            paths[place].append(node)
            text.tokens[row].append(token)
            text.emitted += 1
            text.finished[row] = bool(text.criteria(text.input_ids[row], None))
            child = children[place].get((node, token))
            if child is not None and not text.finished[row]:
                at[place] = child


def _logits_at(logits: torch.Tensor, rows: Sequence[int], nodes: Sequence[int]) -> torch.Tensor:
    """A copy of the logits at these nodes, [k, V] in float32, as plain generate makes it."""
    of_row, of_node = (torch.tensor(index, device=logits.device) for index in (list(rows), list(nodes)))
    return logits[of_row, of_node].to(copy=True, dtype=torch.float32)


def _process(
    processors: LogitsProcessorList, input_ids: torch.Tensor | None, raw: torch.Tensor, do_sample: bool
) -> torch.Tensor:
    is_broken = torch.isnan(raw).any()  # before the processors, which may replace NaN in place
    scores = processors(input_ids, raw)  # type: ignore[arg-type]  # no text for those that look at none
    # Plain generate's argmax takes a NaN that a processor has made for the largest value; it cannot be sampled from.
    if bool(torch.isnan(scores).any() & (is_broken | do_sample)):
        raise_nan(scores)
    return scores


def _pick(scores: torch.Tensor, text: Text, rows: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """One token [k] for each row of `scores` [k, V]. `rows` and `lengths`: which rows these are, and the lengths of
    their texts."""
    if not text.config.do_sample:
        return torch.argmax(scores, dim=-1)
    probs = torch.nn.functional.softmax(scores, dim=-1)
    if text.dice is not None and probs.dtype == torch.float32:  # a processor may return another dtype
        tokens = text.dice.throw(rows, lengths, probs)
        if int(tokens.min()) >= 0:
            return tokens
    return torch.multinomial(probs, num_samples=1).squeeze(1)  # raises where a probability is NaN


def _children(tree: Tree) -> list[dict[tuple[int, int], int]]:
    """Per row: (node, token) -> the child of that node that carries that token."""
    tokens, parents, _, valid = tree.packed().tolist()
    return list(map(_children_of_row, tokens, parents, valid))


def _children_of_row(tokens: list[int], parents: list[int], valid: list[int]) -> dict[tuple[int, int], int]:
    return {(parents[n], tokens[n]): n for n in range(len(tokens) - 1, 0, -1) if valid[n]}


# ---------------------------------------------------------------------- the fast walk


def greedy_walk(tree: Tree, logits: torch.Tensor, text: Text) -> list[list[int]]:
    """`replay` for greedy decoding without processors: the same result, with one device sync."""
    best, picks = logits.max(dim=-1)  # [B, n], NaN if any logit is NaN
    broken, tree = best.isnan(), tree.to(logits.device)
    packed = torch.stack((tree.tokens, tree.parents, tree.valid.long(), picks, broken.long()), dim=1)  # [B, 5, n]
    paths: list[list[int]] = []
    for place, (row, packed_row) in enumerate(zip(text.running, packed.tolist(), strict=True)):  # the one sync
        tokens, parents, valid, chosen, is_broken = packed_row
        path: list[int] = []
        paths.append(path)
        if text.finished[row]:
            continue
        children, room = _children_of_row(tokens, parents, valid), text.room_of(row)
        node: int | None = 0
        while node is not None:
            path.append(node)
            ends = chosen[node] in text.ends or len(path) >= room
            node = None if ends else children.get((node, chosen[node]))
        emitted = [chosen[node] for node in path]
        new = torch.tensor([emitted], dtype=text.input_ids[row].dtype, device=text.input_ids[row].device)
        is_nan = any(is_broken[node] for node in path)
        _emit(text, row, emitted, new, logits[place], is_nan, tree.size > 1 and not children)
    return paths


def _emit(
    text: Text, row: int, tokens: list[int], new: torch.Tensor, logits: torch.Tensor, is_nan: bool, no_drafts: bool
) -> None:
    """Append `tokens` to the text; `new` [1, k] are the same tokens on the text's device. Raises if `is_nan`: one of
    the `logits` [n, V] that they were picked from is NaN."""
    text.found_no_drafts |= no_drafts
    if is_nan:
        raise_nan(logits)
    text.finished[row] = tokens[-1] in text.ends or len(tokens) >= text.room_of(row)
    text.tokens[row] += tokens
    text.input_ids[row] = torch.cat((text.input_ids[row], new), dim=-1)
    text.emitted += len(tokens)
    if text.streamer is not None:
        for token in tokens:
            text.streamer.put(torch.tensor([token]))


# ---------------------------------------------------------------------- the fast walk in a graph


def walk_in_tensors(
    tree: torch.Tensor, ancestors: torch.Tensor, logits: torch.Tensor, limits: torch.Tensor
) -> torch.Tensor:
    """`greedy_walk` without the host. `tree` [4, B, n]: `Tree.packed`; `limits`: `Text.limits`. Returns [B, 3, n],
    three numbers for each place of a walk: the walked node, or -1 after the walk's end; the token picked there; and a
    mark, 1 if the node's logits hold a NaN, plus 2 if the row has drafts."""
    tokens, parents, depths, valid = tree
    best, picks = logits.max(dim=-1)  # [B, n], NaN if any logit is NaN
    above = picks.gather(1, parents)  # the token picked at each node's parent
    follows = (tokens == above) & valid.bool() & (above[..., None] != limits[:, None, 1:]).all(-1)  # [B, n]
    follows[:, 0] = True
    walked = ~(ancestors & ~follows[:, None]).any(-1) & (depths < limits[:, :1])  # [B, n]
    order = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    places = torch.where(walked, depths, order.shape[1])  # one node per depth, since siblings carry different tokens
    nodes = order.new_full((len(order), order.shape[1] + 1), -1).scatter_(1, places, order)[:, :-1]
    at = nodes.clamp(min=0)
    marks = best.isnan().gather(1, at) + 2 * valid[:, 1:].any(1, keepdim=True)
    return torch.stack((nodes, picks.gather(1, at), marks), dim=1)


def read_walk(walked: torch.Tensor, tree: Tree, logits: torch.Tensor, text: Text) -> list[list[int]]:
    """The rest of `greedy_walk`, after `walk_in_tensors` has found `walked` [B, 3, n]."""
    paths: list[list[int]] = []
    for place, (row, (nodes, tokens, marks)) in enumerate(zip(text.running, walked.tolist(), strict=True)):  # one sync
        path = [node for node in nodes if node >= 0]
        paths.append(path)
        if path:  # else the row has ended
            is_nan, new = any(mark % 2 for mark in marks[: len(path)]), walked[place, 1:2, : len(path)]
            _emit(text, row, tokens[: len(path)], new, logits[place], is_nan, tree.size > 1 and marks[0] < 2)
    return paths


def raise_nan(scores: torch.Tensor) -> None:
    raise ValueError(
        f"`logits` of the target contain NaN ({int(torch.isnan(scores).sum())} of {scores.numel()} values): the "
        "target, or a logits processor, is numerically broken. Load the target in another dtype (say, bfloat16), "
        "or pass `remove_invalid_values=True` to `generate`."
    )
