"""What processes must agree on: when all texts are over and, for a tensor-parallel target, trees and random numbers.

Contract: each process of a tensor-parallel target holds a part of every weight and takes part in every forward. So all
processes must verify the same tree and pick the same tokens. The first process decides: it alone drafts and chooses
sizes (by its own clock). It sends its trees to the others before each forward, and its random state before the first.
Drafting needs no other process, since the heads and what they borrow are whole everywhere. Processes that hold other
texts (FSDP, ZeRO) draft for themselves; they only run as many forwards as the process with the longest text
(`goes_in_step`, `any_goes_on`).

Shapes: B rows, n tree nodes, W the most nodes that a tree may have, with its root.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as dist
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_managed_module

from ..network.target_parts import device_of
from .budget.fixed import Budget
from .call import random_state, set_random_state
from .tree import Tree


def goes_in_step(target: PreTrainedModel) -> bool:
    """Whether every forward of `target` needs all processes, so that each must run as many as the others."""
    is_one_of_several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return is_one_of_several and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(target))


def any_goes_on(is_done: bool, synced_gpus: bool, device: torch.device) -> bool:
    """Whether this process or, where processes go in step, any process has something left to do."""
    if not synced_gpus:
        return not is_done
    going_on = torch.tensor(float(not is_done), dtype=torch.float32, device=device)
    dist.all_reduce(going_on)
    return bool(going_on)


def tensor_parallel_group(target: PreTrainedModel) -> Any:
    """The process group among whose members each weight is divided, or None."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    for parameter in target.parameters():
        mesh = getattr(parameter, "device_mesh", None)  # only a DTensor has one
        if mesh is None:
            continue
        if "tp" in (mesh.mesh_dim_names or ()):
            return mesh.get_group("tp")
        if mesh.ndim == 1 and (target.tp_size or 1) > 1:
            return mesh.get_group()
    return None


def share_random_state(target: PreTrainedModel, group: Any) -> None:
    """Give every process of `group` the first one's random state, which plain generate would need, too."""
    if group is None:
        return
    device = device_of(target)
    state = random_state(device).to(device)
    dist.broadcast(state, group=group, group_src=0)
    set_random_state(state.cpu(), device)


class SharedBudget(Budget):
    """The first process's `own` chooses, and all processes verify its trees. Such targets have no graphs."""

    def __init__(self, own: Budget, group: Any) -> None:
        self.own, self.group = own, group
        self.decides = dist.get_rank(group) == 0

    @property
    def most_nodes(self) -> int:
        return self.own.most_nodes

    def ask(self, lengths: Sequence[int], replayed: int = 0, copies: torch.Tensor | None = None) -> tuple[int, int]:
        return self.own.ask(lengths, replayed, copies) if self.decides else (0, 0)

    def cut(self, tree: Tree, rows: Sequence[int], lengths: Sequence[int]) -> Tree:
        if self.decides:
            tree = self.own.cut(tree, rows, lengths)
        return shared_tree(tree, self.most_nodes + 1, self.group)

    def learn(self, tree: Tree, paths: Sequence[Sequence[int]], draft_seconds: float, forward_seconds: float) -> None:
        if self.decides:
            self.own.learn(tree, paths, draft_seconds, forward_seconds)


def shared_budget(own: Budget, group: Any) -> Budget:
    """`own`, or a `SharedBudget` of it where the target is divided among a `group`."""
    return own if group is None else SharedBudget(own, group)


def shared_tree(tree: Tree, width: int, group: Any) -> Tree:
    """The first process's tree, for all processes. The message has a fixed size: 4 x rows x (`width` + 1) numbers."""
    message = torch.zeros(4, len(tree.tokens), width + 1, dtype=torch.long, device=tree.tokens.device)  # [4, B, 1 + W]
    message[0, :, 0], message[1, :, 0] = tree.size, tree.max_depth
    message[:, :, 1 : tree.size + 1] = tree.packed()
    dist.broadcast(message, group=group, group_src=0)
    size, max_depth = message[:2, 0, 0].tolist()
    packed = message[:, :, 1 : size + 1]
    log_probs = tree.log_probs if tree.size == size else torch.zeros_like(packed[0], dtype=torch.float32)
    return Tree.unpacked(packed, log_probs, max_depth)
