"""The expected probability of each node of a tree: its path is computed anew, without a cache.

Contract: works for heads that continue from drafted states (with `features`, `advance`, `recycled`, `output` and
`score`), and for every drafter that `heads.new_drafter` returns.

Shapes: T positions, f numbers of a state as the heads read it.
"""

import pytest
import torch

from hf_clover.decoding.draft.drafter import CloverDrafter
from hf_clover.decoding.tree import Tree
from hf_clover.network.modeling_heads import DraftHeads

LENGTHS = (9, 6)  # tokens of each row's text
PADDING = (0, 3)


def path_of(tree: Tree, row: int, node: int) -> list[int]:
    tokens = []
    while node:
        tokens.append(int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return tokens[::-1]


@torch.no_grad()
def one_by_one(
    heads: DraftHeads, hidden: torch.Tensor, tokens: list[int], path: list[int]
) -> tuple[float, list[torch.Tensor]]:
    """The joint log-probability of `path` below the last of `tokens`, and the inputs of lm_head. The whole text is
    computed anew for each draft. `hidden` [T, f] and `tokens`: the states, and the tokens after them."""
    features, tokens, outputs, total = heads.features(hidden[None]), list(tokens), [], 0.0
    for token in path:
        rope = heads.rotary_emb(features, torch.arange(len(tokens))[None])
        drafted = heads.advance(features, torch.tensor([tokens]), rope, None, None)[:, -1:]  # [1, 1, d]
        outputs.append(heads.output(drafted)[0, 0])
        total += float(heads.score(outputs[-1]).log_softmax(-1)[token])
        features, tokens = torch.cat((features, heads.recycled(drafted)), dim=1), [*tokens, token]
    return total, outputs


def nodes_as_if_alone(heads: DraftHeads, tree: Tree, hidden: list[torch.Tensor], tokens: list[list[int]]) -> int:
    """Assert that every valid node of both rows has the probability of its path alone. Returns the number of these
    nodes."""
    looked_at = 0
    for row in range(2):
        for node in range(1, tree.size):
            if tree.valid[row, node]:
                expected, _ = one_by_one(heads, hidden[row], tokens[row], path_of(tree, row, node))
                assert float(tree.log_probs[row, node]) == pytest.approx(expected, abs=2e-4)
                looked_at += 1
    return looked_at


def fed(
    heads: DraftHeads, widths: tuple[int, ...] = (5, 4)
) -> tuple[CloverDrafter, list[torch.Tensor], list[list[int]]]:
    """A drafter of two rows with texts of unequal lengths, the second one padded, which got them in pieces of these
    widths. Also returns the rows' hidden states and tokens."""
    torch.manual_seed(5)
    size = heads.config.target_width * max(len(heads.feature_layers), 1)
    hidden = [torch.randn(length, size) for length in LENGTHS]
    tokens = [torch.randint(1, 32, (length,)).tolist() for length in LENGTHS]
    mask = torch.tensor([[column >= padding for column in range(widths[0])] for padding in PADDING])
    drafter = heads.new_drafter(heads, None if mask.all() else mask)
    start = 0
    for piece in widths:
        rows = []
        for row, padding in enumerate(PADDING):
            columns = range(start - padding, start - padding + piece)
            there = [c for c in columns if c < LENGTHS[row]]
            index = [max(c, 0) if c < LENGTHS[row] else 0 for c in columns]
            counted = len(there) if start else piece  # padding counts as columns of the prompt
            rows.append((hidden[row][index], torch.tensor(tokens[row])[index], torch.tensor(index), counted))
        parts = [torch.stack([row[i] for row in rows]) for i in range(3)]
        drafter.extend(*parts, [row[3] for row in rows])
        start += piece
    assert start >= LENGTHS[0]
    return drafter, hidden, tokens
