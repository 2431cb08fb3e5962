"""Random trees, and runs of a target that verify them."""

from contextlib import contextmanager

import torch
from transformers import GenerationConfig

from hf_clover.decoding.target.graph_rules import why_no_graphs
from hf_clover.decoding.target.trees import TargetRun
from hf_clover.decoding.tree import Tree

LONGEST = 400


def random_tree(batch, size, seed):
    random = torch.Generator().manual_seed(seed)
    parents = torch.zeros(batch, size, dtype=torch.long)
    for node in range(1, size):
        parents[:, node] = torch.randint(max(0, node - 4), node, (batch,), generator=random)
    depths = torch.zeros_like(parents)
    for node in range(1, size):
        depths[:, node] = depths.gather(1, parents[:, node : node + 1])[:, 0] + 1
    tokens = torch.randint(1, 24, (batch, size), generator=random)
    ones = torch.ones_like(tokens)
    return Tree(tokens, parents, depths, -ones.float(), ones.bool(), max_depth=int(depths.max()))


def nodes_of(tree: Tree, row: int) -> dict[tuple[int, ...], float]:
    """The valid nodes below the root of one row: path -> joint log-probability."""
    paths, found = [()], {}
    for node in range(1, tree.size):
        parent = int(tree.parents[row, node])
        assert parent < node, "a parent comes first"
        path = (*paths[parent], int(tree.tokens[row, node]))
        paths.append(path)
        if tree.valid[row, node]:
            assert int(tree.depths[row, node]) == len(path)
            assert path not in found, "two siblings carry the same token"
            found[path] = float(tree.log_probs[row, node])
    return found


def path_to(parents, node):
    return [0] if node == 0 else [*path_to(parents, parents[node]), node]


def walk_of(tree, row, size):
    return path_to(tree.parents[row].tolist(), (row * 7) % size)


@contextmanager
def running(target, inputs, longest=LONGEST, **settings):
    """A run that has read the prompt. `settings`: for its `GenerationConfig`."""
    mask = inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    kwargs = {"attention_mask": mask, "position_ids": positions, "use_cache": True, "logits_to_keep": 1}
    config = GenerationConfig(max_length=longest, **settings)
    run = TargetRun(target, config, kwargs, in_graphs=why_no_graphs(target, config) is None)
    with run.open(), torch.no_grad():
        run.prefill(inputs["input_ids"], limit=longest)
        yield run
