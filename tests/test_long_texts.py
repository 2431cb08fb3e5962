"""Attention in two parts, by the kernels' exact twins: against attention by the mask, and in targets' forwards."""

import logging
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers.both_ways import same_tokens
from helpers.capturing import captures  # noqa: F401  (a fixture)
from helpers.parts import among_nodes, kernels, over_text  # noqa: F401  (one is a fixture)
from helpers.trees import random_tree, running, walk_of
from helpers.zoo import build, ragged_batch
from torch.nn import functional as F

from hf_clover import CloverHeads
from hf_clover.decoding.cache import static
from hf_clover.decoding.target import long_texts
from hf_clover.decoding.target.attention import packed_attention
from hf_clover.decoding.target.long_texts import Parts, hang_parts, has_gaps, parts_of, why_wrong
from hf_clover.decoding.target.masks import FULL, SLIDING, MaskRules, ancestors_of, visible_columns
from hf_clover.decoding.target.memory import memory_of

VOCABULARY, SIZE, COLUMNS = 24, 16, 48
CPU = torch.device("cpu")


@pytest.fixture
def short(monkeypatch, kernels):  # noqa: F811
    """Texts are long beyond 32 columns, and no trial attends in parts."""
    monkeypatch.setattr(long_texts, "_are_right_on", lambda *asked: True)
    monkeypatch.setattr(static, "LEAST_COLUMNS", 16)
    monkeypatch.setattr(static, "ROOM", 8)
    monkeypatch.setattr(long_texts, "LONG", 32)


@pytest.fixture
def attended(monkeypatch):
    """The numbers of columns of what was attended to in parts."""
    seen, attend = [], Parts.attend

    def noting(self, query, key, *more, **options):
        seen.append(key.shape[2])
        return attend(self, query, key, *more, **options)

    monkeypatch.setattr(Parts, "attend", noting)
    return seen


def states(dtype, rows=3, heads=2, groups=2, nodes=5, seed=0, kinds=(FULL,)):
    """Of a layer over part of a static cache with columns that nobody wrote: query, key, value, masks, starts."""
    random = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, heads * groups, nodes, SIZE, generator=random, dtype=dtype)
    cache = torch.randn(2, rows + 1, heads, 64, SIZE, generator=random, dtype=dtype)
    starts = torch.randint(4, COLUMNS - nodes, (rows, 1), generator=random)
    padding = torch.randint(0, 4, (rows, 1), generator=random) if seed % 2 else torch.zeros(rows, 1, dtype=torch.long)
    text = torch.arange(COLUMNS) >= padding
    slots = SimpleNamespace(starts=starts, visible_text=text, seen_columns=COLUMNS, has_gaps=False)
    tree = random_tree(rows, nodes, seed)
    ancestors = ancestors_of(tree.parents, nodes.bit_length())
    visible = visible_columns(ancestors, starts, COLUMNS, text)
    rules = MaskRules(kinds, len(kinds) > 1, 6, None, groups)
    masks = rules.masks(visible, starts, tree.depths, text, dtype)
    hang_parts(masks, rules, ancestors, slots, dtype)
    return query, *cache[:, :rows, :, :COLUMNS], masks, starts


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("nodes", [1, 5, 8])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_attention_in_two_parts_equals_attention_by_the_mask(dtype, heads, groups, nodes, scale, kernels):  # noqa: F811
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for rows, seed in ((1, 0), (1, 1), (3, 2), (3, 3)):
        query, key, value, mask, starts = states(dtype, rows, heads, groups, nodes, seed)
        packed = query.reshape(rows, heads, groups * nodes, SIZE)
        wanted = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scale)
        attend = parts_of(mask, packed, key, value).attend
        torch.testing.assert_close(attend(packed, key, value, scale), wanted, atol=tolerance, rtol=tolerance)
        for row, start in enumerate(starts.flatten().tolist()):  # what may stand where nobody wrote
            key[row, :, start + nodes :] = value[row, :, start + nodes :] = torch.nan
        torch.testing.assert_close(attend(packed, key, value, scale), wanted, atol=tolerance, rtol=tolerance)


def test_layers_with_windows_or_changed_masks_attend_by_their_masks(attended, kernels):  # noqa: F811
    """Those with windows, those that do more with their scores, and those whose mask was changed."""
    query, key, value, masks, _ = states(torch.float32, kinds=(FULL, SLIDING))
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)

    def attend(mask, key=key, value=value, query=query, **more):
        attended.clear()
        return packed_attention(module, query, key, value, mask, **more)[0], bool(attended)

    in_parts, was_in_parts = attend(masks[FULL])
    assert was_in_parts
    by_mask, was_in_parts = attend(masks[FULL] + 0.0)
    assert not was_in_parts
    torch.testing.assert_close(in_parts, by_mask, atol=1e-5, rtol=1e-5)
    assert not attend(masks[SLIDING])[1]
    assert not attend(masks[FULL], position_bias=torch.zeros(1))[1]
    with pytest.raises(ValueError, match="softcap"):
        attend(masks[FULL], softcap=20.0)
    assert not attend(masks[FULL][..., :40], key[:, :, :40], value[:, :, :40])[1]
    wide = torch.cat((value, value), dim=3)
    assert not attend(masks[FULL], value=wide)[1]
    assert not attend(masks[FULL], key.transpose(2, 3).contiguous().transpose(2, 3), value)[1]
    assert not attend(masks[FULL], key, value.clone())[1]


def test_padding_inside_or_behind_a_text_is_a_gap():
    assert not has_gaps(torch.tensor([[True, True], [False, True]]))
    assert has_gaps(torch.tensor([[True, True, True], [True, False, True]]))
    assert has_gaps(torch.tensor([[True, False]]))
    assert has_gaps(torch.tensor([[False, False]])), "no text at all"


def test_the_kernels_get_inputs_of_the_shapes_they_take(monkeypatch):
    """Torch's own description of the kernels needs no device. It says what they take, and what shapes they give."""
    drawn = {"device": "meta", "dtype": torch.bfloat16}
    query, key, value = (torch.empty(2, 4, count, 64, **drawn) for count in (40, 96, 96))
    bias, columns = torch.empty(2, 1, 40, 10, **drawn), torch.empty(2, 10, device="meta", dtype=torch.long)
    lengths, asked = torch.empty(2, 1, device="meta", dtype=torch.long), []

    def noting(kernel, *inputs):
        asked.append((inputs, kernel(*inputs)))
        return asked[-1][1]

    for name in ("flash_attention_of_sequences", "efficient_attention"):
        monkeypatch.setattr(long_texts, name, partial(noting, getattr(long_texts, name)))
    out = Parts(bias, columns, lengths, lengths).attend(query, key[:, :, :90], value[:, :, :90], None)
    assert (out.shape, out.dtype) == (query.shape, torch.bfloat16)
    (of_text, text), (of_tree, tree) = asked
    assert [tuple(part.shape) for part in of_text[:3]] == [
        (8, 40, 64),
        (2 * 4 * 96 - 6, 1, 64),
        (2 * 4 * 96 - 6, 1, 64),
    ]
    assert [(part.shape[0], part.dtype) for part in of_text[3]] == [(count, torch.int32) for count in (9, 9, 8)]
    assert of_text[4:] == (90, 64**-0.5)
    assert [tuple(part.shape) for part in of_tree[:3]] == [(2, 4, 40, 64), (2, 4, 10, 64), (2, 4, 10, 64)]
    for (found, sums), shape in ((text, (8, 40)), (tree, (2, 4, 40))):
        assert (tuple(found.shape), found.dtype) == ((*shape, 64), torch.bfloat16)
        assert (tuple(sums.shape), sums.dtype) == (shape, torch.float32)


# ---------------------------------------------------------------------- in targets


@pytest.mark.parametrize(("name", "layers"), [("llama", 3), ("qwen3", 3), ("gemma3", 2), ("mistral", 0)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)], ids=["64", "32"])
def test_logits_in_two_parts_equal_those_by_the_mask(name, layers, dtype, tolerance, short, attended, captures):  # noqa: F811
    """Rows of unequal lengths and with padding, over every edge of the columns that a graph sees, in trees of several
    sizes; three rows begin and two go on."""
    target, inputs = build(name, vocab_size=VOCABULARY, dtype=dtype), ragged_batch(VOCABULARY, (5, 19, 8))
    with running(target, inputs, disable_compile=True) as eager, running(target, inputs) as graphed:
        for seed in range(14):
            size, rows = (8, 5, 1)[seed % 3], 3 if seed < 9 else 2
            tree = random_tree(rows, size, seed)
            ours, its = graphed.verify(tree), eager.verify(tree)
            assert float((ours - its).abs().max() / its.std()) < tolerance
            for run in (graphed, eager):
                run.commit([walk_of(tree, row, size) for row in range(rows)])
            if seed == 8:
                for run in (graphed, eager):
                    run.keep_rows([2, 0])
    assert captures.replayed > captures.made > 2
    forwards, rest = divmod(len(attended), layers) if layers else (0, len(attended))
    assert rest == 0
    assert bool(forwards) == bool(layers)
    assert min(attended, default=64) == 64, "of 32 columns and fewer by the mask"


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_tokens_of_long_texts_equal_plain(name, short, attended, captures):  # noqa: F811
    target = build(name, vocab_size=VOCABULARY)
    options = {"more_than": 50, "max_new_tokens": 90, "num_assistant_tokens": 7}
    same_tokens(target, CloverHeads.from_target(target), ragged_batch(VOCABULARY, (5, 9, 3)), **options)
    assert {64, 128} <= set(attended)
    assert captures.replayed > 0


def test_a_text_with_padding_inside_attends_by_masks(short, attended, captures):  # noqa: F811
    """Masks keep the padding out, in graphs of their own; graphs of other calls stay right."""
    target, ids = build("llama", vocab_size=VOCABULARY), ragged_batch(VOCABULARY, (40,))["input_ids"]
    heads, used = CloverHeads.from_target(target), []
    for gap in (0, 3, 0):
        mask = torch.ones_like(ids)
        mask[:, 20 : 20 + gap] = 0
        attended.clear()
        inputs = {"input_ids": ids, "attention_mask": mask}
        same_tokens(target, heads, inputs, -1, plant=False, max_new_tokens=12, num_assistant_tokens=7)
        used.append(bool(attended))
        assert memory_of(target).idle_cache.slots.has_gaps == bool(gap), "which each call says anew"
    assert captures.replayed > 0
    assert used[:2] == [True, False]


# ---------------------------------------------------------------------- the trial


def other_layout(*inputs):
    """Log-sum-exps as some kernels leave them."""
    out, sums = over_text(*inputs)
    return out, sums.T.reshape(sums.shape)


def without_lengths(query, key, value, where, longest, scale):
    order, starts, lengths = where
    return over_text(query, key, value, (order, starts, torch.full_like(lengths, longest - 9)), longest, scale)


def in_base_two(*inputs):
    out, sums = over_text(*inputs)
    return out, sums / math.log(2)


def without_a_scale(query, key, value, bias, scale):
    return among_nodes(query, key, value, bias, 1.0)


def broken(*inputs):
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 32])
def test_the_trial_accepts_right_kernels(dtype, rows, kernels):  # noqa: F811
    assert why_wrong(CPU, dtype, rows, 64) is None


@pytest.mark.parametrize(
    ("text", "nodes", "match"),
    [
        (other_layout, among_nodes, "outputs are off by"),
        (in_base_two, among_nodes, "outputs are off by"),
        (without_lengths, among_nodes, "outputs are off by"),
        (lambda *inputs: tuple(found * torch.nan for found in over_text(*inputs)), among_nodes, "off by nan"),
        (over_text, without_a_scale, "outputs are off by"),
        (broken, among_nodes, "RuntimeError: FlashAttention only supports Ampere"),
    ],
)
def test_the_trial_names_what_is_wrong_with_kernels(text, nodes, match, kernels):  # noqa: F811
    kernels(text, nodes)
    assert match in why_wrong(CPU, torch.bfloat16, 8, 32)


@pytest.mark.parametrize(("text", "is_right"), [(over_text, True), (broken, False)])
def test_masks_are_used_and_the_reason_is_logged_where_the_trial_fails(text, is_right, kernels, monkeypatch, caplog):  # noqa: F811
    kernels(text)
    monkeypatch.setattr(logging.getLogger("hf_clover"), "propagate", True)
    random_state = torch.get_rng_state()
    with caplog.at_level("DEBUG", logger=long_texts.logger.name):
        for _ in range(2):
            query, key, value, mask, _ = states(torch.bfloat16)
            packed = query.reshape(3, 2, 10, SIZE)
            assert (parts_of(mask, packed, key, value) is not None) == is_right
    assert torch.equal(torch.get_rng_state(), random_state)
    told = [record.message for record in caplog.records]
    assert len(told) == (0 if is_right else 1)
    assert is_right or "by their masks on cpu, in torch.bfloat16: RuntimeError: FlashAttention" in told[0]


def test_a_device_without_the_kernels_attends_by_masks():
    query, key, value, mask, _ = states(torch.bfloat16)
    assert parts_of(mask, query.reshape(3, 2, 10, SIZE), key, value) is None
    assert "Error" in why_wrong(CPU, torch.bfloat16, 8, 32)
