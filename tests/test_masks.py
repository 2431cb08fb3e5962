"""Masks of trees, and where none is needed."""

import pytest
import torch
from helpers.llama_and_mistral import target_of
from helpers.trees import path_to, random_tree, running
from helpers.zoo import ragged_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_clover import CloverHeads
from hf_clover.decoding.target.masks import additive, ancestors_of, plain_mask, visible_columns
from hf_clover.decoding.tree import root_only


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(1, 3), st.integers(1, 20), st.integers(0, 9), st.integers(0, 99))
def test_ancestors_and_plain_masks_equal_those_made_the_slow_way(batch, size, length, seed):
    tree = random_tree(batch, size, seed)
    ancestors = ancestors_of(tree.parents, max(size - 1, 1).bit_length())
    for row in range(batch):
        for node in range(size):
            assert ancestors[row, node].nonzero().flatten().tolist() == path_to(tree.parents[row].tolist(), node)
    assert torch.equal(ancestors, tree.ancestors())
    starts = torch.full((batch, 1), length)
    long_way = additive(visible_columns(ancestors, starts, length + size, None), torch.float32)
    assert torch.equal(plain_mask(ancestors, length, torch.float32), long_way)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_plain_step_needs_no_mask_until_a_window_slides(name):
    """A plain step is a tree of its root alone."""
    target, inputs, seen = target_of(name), ragged_batch(24, (2,)), []
    with running(target, inputs) as run, torch.no_grad():
        for _ in range(4):
            run.verify(root_only(torch.tensor([5])))
            with run.cache.staged(1):
                seen.append(run._masks(root_only(torch.tensor([5]))) is None)
            run.commit([[0]])
    assert seen == ([True] * 4 if name == "llama" else [True, True, False, False])


# ---------------------------------------------------------------------- prefill


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("is_static", [False, True])
def test_a_long_prompt_needs_no_mask_and_logits_of_one_token_only(name, chunk, is_static):
    target, inputs, seen = target_of(name), ragged_batch(24, (60,)), []
    target.config.sliding_window = 100
    if chunk is not None:
        inputs["prefill_chunk_size"] = chunk
    heads = CloverHeads.from_target(target)
    target.generate(**ragged_batch(24, (3,)), max_new_tokens=2, assistant_model=heads)  # the trial of a new target
    layer, lm_head = target.model.layers[0], target.lm_head
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, a, k: seen.append((a[0].shape[1], k["attention_mask"])), with_kwargs=True
        ),
        lm_head.register_forward_pre_hook(lambda _, a: seen.append(a[0].shape[1])),
    ]
    options = {"cache_implementation": "static"} if is_static else {}
    try:
        target.generate(**inputs, max_new_tokens=1, assistant_model=heads, **options)
    finally:
        for hook in hooks:
            hook.remove()
    widths, logits = [entry for entry in seen if isinstance(entry, tuple)], [e for e in seen if isinstance(e, int)]
    assert [width for width, _ in widths] == ([60] if chunk is None else [16, 16, 16, 12])
    assert widths[0][1] is None
    assert set(logits) == {1}
