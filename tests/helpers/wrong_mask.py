"""A mistake to plant in the decoding: nodes of a tree that see other branches."""

import torch

from hf_clover.decoding.tree import Tree


def every_earlier_node(self: Tree) -> torch.Tensor:
    return torch.ones(self.size, self.size, dtype=torch.bool).tril().expand(len(self.tokens), -1, -1)
