"""Draft trees, as tensors.

Contract: pure functions. A tree has a root (node 0, the last emitted token) and nodes sorted so that a parent comes
before its children; siblings carry different tokens. Shapes are static: a node that could not be filled is there but
not `valid`, and has no descendants. This module does not know how scores are computed: `expand` returns them.

Shapes: B batch, N draft nodes, n = N + 1 nodes with the root, W beams, k children kept per beam, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import MinPLogitsWarper, TopPLogitsWarper

from .target.masks import ancestors_of

# (level, the parent of each new beam among the beams of the level before [B, W], its token [B, W]) -> logits [B, W, V]
Expand = Callable[[int, torch.Tensor | None, torch.Tensor], torch.Tensor]

LOOKS_ON = ("cpu",)  # devices on which reading a value does not wait


@dataclass
class Tree:
    tokens: torch.Tensor  # [B, n]
    parents: torch.Tensor  # [B, n], the root's parent is the root
    depths: torch.Tensor  # [B, n]
    log_probs: torch.Tensor  # [B, n], of the whole path
    valid: torch.Tensor  # [B, n], bool or 0 and 1
    max_depth: int

    @property
    def size(self) -> int:
        """Number of nodes, the root included."""
        return self.tokens.shape[1]

    def to(self, device: torch.device) -> "Tree":
        if self.tokens.device == device:
            return self
        return self._with(lambda values: values.to(device), self.max_depth)

    def first(self, nodes: int) -> "Tree":
        """The tree of the root and the first `nodes` nodes: they are sorted, so none of them loses its parent."""
        return self._with(lambda values: values[:, : nodes + 1], min(self.max_depth, nodes))

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor], max_depth: int) -> "Tree":
        values = (self.tokens, self.parents, self.depths, self.log_probs, self.valid)
        tokens, parents, depths, log_probs, valid = map(change, values)
        return Tree(tokens, parents, depths, log_probs, valid, max_depth)

    def packed(self) -> torch.Tensor:
        """[4, B, n]: everything except the probabilities in one tensor, which one copy takes into a graph."""
        return torch.stack((self.tokens, self.parents, self.depths, self.valid.long()))

    @classmethod
    def unpacked(cls, packed: torch.Tensor, log_probs: torch.Tensor, max_depth: int) -> "Tree":
        tokens, parents, depths, valid = packed
        return cls(tokens, parents, depths, log_probs, valid, max_depth)

    def ancestors(self) -> torch.Tensor:
        """[B, n, n]: whether the column's node is the row's node or an ancestor of it."""
        return ancestors_of(self.parents, self.max_depth.bit_length())


def chain_of(tokens: torch.Tensor) -> Tree:
    """The tree of one path, `tokens` [B, n], whose first token is the root."""
    order = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)  # [B, n]
    zeros, valid = torch.zeros_like(tokens, dtype=torch.float32), torch.ones_like(tokens, dtype=torch.bool)
    return Tree(tokens, (order - 1).clamp(min=0), order, zeros, valid, max_depth=tokens.shape[1] - 1)


def root_only(tokens: torch.Tensor) -> Tree:
    """The tree of a plain step: `tokens` [B] and no nodes below them. Cheaper than `chain_of`, since every step
    without drafts makes one."""
    tokens = tokens[:, None]  # [B, 1]
    zeros, valid = torch.zeros_like(tokens), torch.ones_like(tokens, dtype=torch.bool)
    return Tree(tokens, zeros, zeros, zeros.float(), valid, max_depth=0)


def with_chain(tree: Tree, rows: torch.Tensor, token: int) -> Tree:
    """Replace the trees of `rows` [B] (bool) by a chain of one repeated token: a finished row continues with
    padding."""
    batch, size = tree.tokens.shape
    order = torch.arange(size, device=tree.tokens.device).expand(batch, -1)  # [B, n]
    rows = rows[:, None]  # [B, 1]
    tokens = torch.where(rows & (order > 0), token, tree.tokens)
    parents = torch.where(rows, (order - 1).clamp(min=0), tree.parents)
    depths = torch.where(rows, order, tree.depths)
    return Tree(tokens, parents, depths, tree.log_probs, tree.valid | rows, max_depth=size - 1)


def with_path(tree: Tree, tokens: torch.Tensor, log_probs: torch.Tensor, nodes: int) -> Tree:
    """The best `nodes` among the nodes of `tree` and of one path, `tokens` [B, k], below its root. `log_probs` [B, k]:
    joint log-probabilities of the path, -inf behind its end. A node that both have counts once, with the better of its
    two probabilities."""
    tokens, log_probs = tokens[:, :nodes], log_probs[:, :nodes]  # no more of the path can be chosen
    size, count = tree.size, tokens.shape[1]
    below_root = tree.valid > 0
    below_root[:, 0] = False
    alike = (tree.tokens[:, None] == tokens[..., None]) & below_root[:, None]  # [B, k, n]
    same = torch.zeros_like(alike)  # for each place of the path, at most one node of `tree` that is the same
    parents = torch.arange(size - 1, size + count, device=tokens.device).repeat(len(tokens), 1)  # [B, k + 1]
    parents[:, 0] = 0
    for place in range(min(count, tree.max_depth)):  # `tree` has no deeper nodes
        same[:, place] = alike[:, place] & (tree.parents == parents[:, place, None])  # [B, n]
        node = same[:, place].byte().argmax(1)  # 0 for none
        parents[:, place + 1] = torch.where(node > 0, node, size + place)
    better = log_probs[..., None].masked_fill(~same, -torch.inf).amax(1)  # [B, n]
    joint = torch.maximum(tree.log_probs, better)
    joint[:, 0] = torch.inf  # the root stays first
    new = ~same.any(2) & (log_probs > -torch.inf)  # [B, k]
    order = torch.arange(1, count + 1, device=tokens.device).expand_as(tokens)  # [B, k]
    joint = torch.cat((joint, log_probs.masked_fill(~new, -torch.inf)), dim=1)  # [B, n + k]
    joint, chosen = joint.sort(dim=1, descending=True, stable=True)  # a parent stays before its child
    joint, chosen = joint[:, : nodes + 1], chosen[:, : nodes + 1]
    number = torch.zeros(len(tokens), size + count, dtype=torch.long, device=tokens.device)
    number.scatter_(1, chosen, torch.arange(chosen.shape[1], device=tokens.device).expand_as(chosen))

    def kept(mine: torch.Tensor, of_path: torch.Tensor) -> torch.Tensor:
        return torch.cat((mine, of_path), dim=1).gather(1, chosen)  # [B, n]

    valid = kept(tree.valid, new)
    joint[:, 0] = 0.0
    return Tree(
        tokens=kept(tree.tokens, tokens),
        parents=number.gather(1, kept(tree.parents, parents[:, :count])) * valid,
        depths=kept(tree.depths, order) * valid,
        log_probs=joint,
        valid=valid,
        max_depth=min(max(tree.max_depth, count), nodes),
    )


def grow_global(
    expand: Expand,
    root: torch.Tensor,
    nodes: int,
    depth: int,
    beam_width: int,
    top_k: int,
    vocabulary: torch.Tensor | None = None,
) -> Tree:
    """The `nodes` of a beam search with the highest joint probability.

    A parent's joint probability is never smaller than its child's, and ties break toward the parent, so the best nodes
    form a tree. A beam that is no better than the last of the best nodes has no descendants among them. On a CPU,
    where reading a value costs nothing, such beams are not grown. At most `nodes` of a level can be chosen, so the
    beam is never wider than that.
    """
    beam_width, top_k, depth = min(beam_width, nodes), min(top_k, nodes), min(depth, nodes)
    looks = root.device.type in LOOKS_ON
    levels: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # per level: joint, token, parent [B, C]
    joint, tokens, broken = _best_children(expand(0, None, root[:, None]), top_k, vocabulary)  # [B, 1, k]
    joint, tokens = joint.flatten(1), tokens.flatten(1)  # [B, k]
    levels.append((joint, tokens, torch.zeros_like(tokens)))
    best = joint  # [B, <= nodes] of all levels so far
    first, children = 1, tokens.shape[1]  # number of the level's first candidate (0 is the root), children per beam
    for level in range(1, depth):
        beam, chosen = joint.topk(min(beam_width, joint.shape[1]), dim=1)  # [B, W]
        if looks and best.shape[1] == nodes:
            width = int((beam > best[:, -1:]).sum(1).max())
            if width == 0:
                break
            beam, chosen = beam[:, :width], chosen[:, :width]
        logits = expand(level, chosen // children, tokens.gather(1, chosen))  # [B, W, V]
        log_probs, child_tokens, is_nan = _best_children(logits, top_k, vocabulary)  # [B, W, k]
        broken = broken | is_nan  # [B]
        parents = (first + chosen)[..., None].expand_as(child_tokens)  # [B, W, k]
        first += tokens.shape[1]
        joint, tokens = (beam[..., None] + log_probs).flatten(1), child_tokens.flatten(1)  # [B, W k]
        levels.append((joint, tokens, parents.flatten(1)))
        if looks:
            best = torch.cat((best, joint), dim=1)  # [B, .]
            best = best.topk(min(nodes, best.shape[1]), dim=1).values  # [B, <= nodes]
    return _select(root, levels, nodes, broken)


def grow_chain(
    expand: Expand, root: torch.Tensor, nodes: int, depth: int, vocabulary: torch.Tensor | None = None
) -> Tree:
    """The most probable child of the most probable child, and so on."""
    return grow_global(expand, root, nodes, depth, beam_width=1, top_k=1, vocabulary=vocabulary)


def grow_levels(
    expand: Expand,
    root: torch.Tensor,
    nodes: int,
    depth: int,
    top_p: float,
    min_p: float,
    vocabulary: torch.Tensor | None = None,
) -> Tree:
    """Clover's rule: level by level, with a budget that shrinks.

    Token level: keep the tokens inside top-p whose probability is at least `min_p` times the best one's. Tree level:
    keep the best by joint probability, as many as the budget still allows. Head level: subtract the number of kept
    nodes from the budget; at 0 the tree is complete.
    """
    batch = root.shape[0]
    warpers = (TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)) if top_p < 1.0 else (MinPLogitsWarper(min_p),)
    levels: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    beam = torch.zeros(batch, 1, dtype=torch.float32, device=root.device)  # [B, W] joint log-probability
    beam_tokens, chosen, numbers = root[:, None], None, torch.zeros_like(root[:, None])  # [B, W]
    left = torch.full((batch, 1), nodes, dtype=torch.long, device=root.device)  # [B, 1]
    broken = torch.zeros(batch, dtype=torch.bool, device=root.device)  # [B]
    first = 1
    for level in range(min(depth, nodes)):
        logits = expand(level, chosen, beam_tokens).float()  # [B, W, V]
        broken = broken | ~(logits.amax(-1) < torch.inf).all(1)  # amax returns NaN if there is one
        kept = logits.flatten(0, 1)  # [B W, V]
        for warper in warpers:
            kept = warper(None, kept)  # type: ignore[arg-type]  # these two look at no text
        log_probs = _log_probs(logits).masked_fill(kept.view_as(logits) == -torch.inf, -torch.inf)
        log_probs, tokens = log_probs.topk(min(nodes, log_probs.shape[-1]), dim=-1)  # [B, W, k]
        children = tokens.shape[2]
        tokens = tokens if vocabulary is None else vocabulary[tokens]
        parents = numbers[..., None].expand_as(tokens).flatten(1)  # [B, W k]
        joint, order = (beam[..., None] + log_probs).flatten(1).sort(dim=1, descending=True, stable=True)
        rank = torch.arange(joint.shape[1], device=root.device)[None]  # [1, W k]
        joint = joint.masked_fill(rank >= left, -torch.inf)
        left = left - (joint > -torch.inf).sum(1, keepdim=True)
        tokens, parents = tokens.flatten(1).gather(1, order), parents.gather(1, order)
        levels.append((joint, tokens, parents))
        width = min(nodes, joint.shape[1])
        beam, beam_tokens, chosen = joint[:, :width], tokens[:, :width], order[:, :width] // children
        numbers = (first + torch.arange(width, device=root.device))[None].expand(batch, -1)
        first += joint.shape[1]
    return _select(root, levels, nodes, broken)


def _log_probs(logits: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(torch.log_softmax(logits.float(), dim=-1), nan=-torch.inf, neginf=-torch.inf)


def _best_children(
    logits: torch.Tensor, top_k: int, vocabulary: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[B, W, V] -> log-probabilities and tokens [B, W, k], and whether there was a NaN [B], which `topk` puts
    first."""
    best, tokens = torch.log_softmax(logits, dim=-1, dtype=torch.float32).topk(min(top_k, logits.shape[-1]), dim=-1)
    log_probs = torch.nan_to_num(best, nan=-torch.inf, neginf=-torch.inf)
    is_nan = best[..., 0].isnan() & (logits.amax(-1) != -torch.inf)  # and not all of them -inf
    return log_probs, tokens if vocabulary is None else vocabulary[tokens], is_nan.any(1)


def _select(
    root: torch.Tensor,
    levels: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    nodes: int,
    broken: torch.Tensor,
) -> Tree:
    """The best `nodes` candidates of all levels, renumbered. Candidate numbers count from 1; 0 is the root. A `broken`
    [B] row, for which the heads gave a NaN, has no valid node: its other values cannot be trusted."""
    joint, tokens, parents = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))  # [B, C]
    joint = joint.masked_fill(broken[:, None], -torch.inf)
    depths = torch.cat([torch.full_like(part[1], i + 1) for i, part in enumerate(levels)], dim=1)
    # A stable sort keeps the earlier level first among equals: a parent before its child.
    joint, order = joint.sort(dim=1, descending=True, stable=True)
    joint, order = joint[:, :nodes], order[:, :nodes]  # [B, N]
    number = torch.zeros(root.shape[0], tokens.shape[1] + 1, dtype=torch.long, device=root.device)
    number.scatter_(1, order + 1, torch.arange(1, order.shape[1] + 1, device=root.device).expand_as(order))
    valid = joint > -torch.inf
    parents = number.gather(1, parents.gather(1, order)) * valid
    depths = depths.gather(1, order) * valid

    def below(root_value: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.cat((root_value[:, None].to(values.dtype), values), dim=1)  # [B, n]

    zero = torch.zeros_like(root)
    return Tree(
        tokens=below(root, torch.where(valid, tokens.gather(1, order), root[:, None])),
        parents=below(zero, parents),
        depths=below(zero, depths),
        log_probs=below(zero, joint),
        valid=below(zero + 1, valid),
        max_depth=len(levels),
    )
