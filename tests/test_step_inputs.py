"""What a forward takes beside its tokens: in a tree what plain generate would pass on at each step."""

import pytest
import torch
from oracle import planted
from transformers import (
    BertConfig,
    BertLMHeadModel,
    RobertaConfig,
    RobertaForCausalLM,
)
from zoo import CASES, build, ragged_batch, redraw

from hf_clover import CloverHeads

VOCABULARY, NEW = 24, 24
SHAPES = {"one": (7,), "ragged": (5, 9, 3)}


def both(target, inputs, **options):
    """(plain's sequences, ours), with drafts that are right for a while."""
    heads = CloverHeads.from_target(target)
    options = {"max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False, **options}
    plain = target.generate(**inputs, **options)
    with planted(plain, inputs["input_ids"].shape[1]):
        drafts = {"assistant_model": heads, "num_assistant_tokens": 6, "return_dict_in_generate": True}
        return plain, target.generate(**inputs, **options, **drafts)


def encoder_as_decoder(model_class, config_class):
    sizes = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96)
    ids = dict(pad_token_id=0, bos_token_id=None, eos_token_id=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(
            config_class(
                vocab_size=VOCABULARY, is_decoder=True, type_vocab_size=3, max_position_embeddings=64, **sizes, **ids
            )
        )
        redraw(model, CASES[0], torch.Generator().manual_seed(0))
    return model.eval()


TYPED = {
    "gpt2": lambda: build("gpt2", vocab_size=VOCABULARY),  # whose types are tokens
    "bert": lambda: encoder_as_decoder(BertLMHeadModel, BertConfig),
    "roberta": lambda: encoder_as_decoder(RobertaForCausalLM, RobertaConfig),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", TYPED)
def test_new_tokens_have_the_type_of_the_prompts_last(name, shape):
    target, inputs = TYPED[name](), ragged_batch(VOCABULARY, SHAPES[shape])
    types = torch.zeros_like(inputs["input_ids"])
    types[:, -2:] = torch.arange(1, len(types) + 1)[:, None].clamp(max=2)
    plain, ours = both(target, {**inputs, "token_type_ids": types})
    without, _ = both(target, inputs)
    assert not torch.equal(plain, without), "or the types do not matter"
    assert torch.equal(ours.sequences, plain)
    assert ours.speculation.method == "tree"
    assert ours.speculation.accepted_tokens > NEW // 3


def test_rows_leave_the_batch_with_their_types():
    target, inputs = TYPED["gpt2"](), ragged_batch(VOCABULARY, (5, 9, 3, 7, 6, 2))
    types = torch.arange(1, 7)[:, None].expand(-1, 9).contiguous()
    heads = CloverHeads.from_target(target)
    common = {**inputs, "token_type_ids": types, "max_new_tokens": 60, "eos_token_id": [5, 9], "pad_token_id": 0}
    rows = []
    handle = target.transformer.h[0].register_forward_hook(lambda *seen: rows.append(len(seen[1][0])))
    sequences = target.generate(**common, assistant_model=heads, num_assistant_tokens=4)
    handle.remove()
    assert torch.equal(sequences, target.generate(**common))
    assert rows[-1] < 6, "rows have left"
