"""Attention over trees with shared key heads, against transformers' own sdpa attention."""

import threading
from types import SimpleNamespace

import pytest
import torch
from helpers.zoo import build, ragged_batch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_clover import CloverHeads
from hf_clover.decoding.target.attention import PACKED, attention_for_trees, packed_attention, shared_heads
from hf_clover.decoding.target.masks import MaskRules, additive

HEADS, SIZE, COLUMNS = 6, 8, 11


def states(keys, nodes, batch=2):
    generator = torch.Generator().manual_seed(nodes)
    query = torch.randn(batch, HEADS, nodes, SIZE, generator=generator)
    key, value = (torch.randn(batch, keys, COLUMNS, SIZE, generator=generator) for _ in range(2))
    visible = torch.rand(batch, nodes, COLUMNS, generator=generator) < 0.6
    visible[..., 0] = True
    return query, key, value, additive(visible, torch.float32)


@pytest.mark.parametrize("keys", [1, 2, 3, 6])
@pytest.mark.parametrize("nodes", [1, 2, 5])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_packed_attention_equals_sdpa_attention(keys, nodes, scaling):
    groups = HEADS // keys
    module = SimpleNamespace(num_key_value_groups=groups, is_causal=True)
    query, key, value, mask = states(keys, nodes)
    slow, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling)
    packed = MaskRules(("full_attention",), False, None, None, groups).arrange({"full_attention": mask})
    assert packed.shape == (2, 1, groups * nodes, COLUMNS)
    fast, _ = packed_attention(module, query, key, value, packed, scaling=scaling)
    torch.testing.assert_close(fast, slow, atol=1e-6, rtol=1e-5)
    # Whoever gives it a mask as transformers makes one, or none, gets sdpa attention.
    torch.testing.assert_close(packed_attention(module, query, key, value, mask, scaling=scaling)[0], slow)
    plain, _ = sdpa_attention_forward(module, query, key, value, None, scaling=scaling)
    torch.testing.assert_close(packed_attention(module, query, key, value, None, scaling=scaling)[0], plain)


def test_the_attention_implementation_is_restored_after_a_call():
    """Also after an error, and with several threads: the last call that ends puts it back."""
    target = build("llama", vocab_size=16)
    assert shared_heads(target) == 2
    with attention_for_trees(target) as masks:
        assert masks == "sdpa"
        assert target.config._attn_implementation == PACKED
    assert target.config._attn_implementation == "sdpa"
    with pytest.raises(RuntimeError), attention_for_trees(target):
        raise RuntimeError
    assert target.config._attn_implementation == "sdpa"

    inside, leave = threading.Event(), threading.Event()

    def other():
        with attention_for_trees(target):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    with attention_for_trees(target):
        pass
    assert target.config._attn_implementation == PACKED
    leave.set()
    thread.join()
    assert target.config._attn_implementation == "sdpa"


def test_an_eager_target_keeps_eager_attention():
    target = build("llama", "eager", vocab_size=16)
    assert shared_heads(target) == 1
    with attention_for_trees(target) as masks:
        assert masks == "eager"
        assert target.config._attn_implementation == "eager"


def test_generate_uses_packed_attention_with_heads_and_sdpa_without():
    """Verifying goes through packed attention; plain generate does not."""
    target = build("llama", vocab_size=16)
    heads, seen = CloverHeads.from_target(target), set()
    inputs = ragged_batch(16, (5, 9, 3))
    handle = target.model.layers[0].register_forward_pre_hook(lambda *_: seen.add(target.config._attn_implementation))
    out = target.generate(**inputs, max_new_tokens=12, do_sample=False, assistant_model=heads)
    assert seen == {"sdpa", PACKED}
    seen.clear()
    assert torch.equal(target.generate(**inputs, max_new_tokens=12, do_sample=False), out)
    assert seen == {"sdpa"}
    handle.remove()
