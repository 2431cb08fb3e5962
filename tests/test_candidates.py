"""Heads in decoding loops that are not ours, and EAGLE-3 heads in the one that is."""

import pytest
import torch
from helpers.fitting import fit
from helpers.zoo import build, ragged_batch
from transformers import GenerationConfig
from transformers.generation import CandidateGenerator

from hf_clover import CloverCandidateGenerator, CloverHeads, Eagle3Heads
from hf_clover.targets.private_api import cache_name

VOCABULARY, NEW = 24, 16
KINDS = {"clover-x": CloverHeads, "eagle-3": Eagle3Heads}


@pytest.fixture(scope="module", params=KINDS)
def fitted(request):
    target = build("llama", vocab_size=VOCABULARY)
    return target, fit(KINDS[request.param].from_target(target), target, temperature=0.05, count=16).eval()


def test_assisted_decoding_of_transformers_runs_our_candidate_generator(fitted, monkeypatch):
    """Without the hook. Any argument that asks for assisted decoding will do, if the loop then takes our generator."""
    target, heads = fitted
    ids = torch.tensor([[1, 4, 2, 5, 3]])
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    plain, proposed = target.generate(ids, **options), []
    candidates = CloverCandidateGenerator(heads, target, num_assistant_tokens=4)
    assert isinstance(candidates, CandidateGenerator)
    monkeypatch.setattr(target, "_get_candidate_generator", lambda **_: candidates, raising=False)
    get = candidates.get_candidates
    monkeypatch.setattr(
        candidates, "get_candidates", lambda ids, **more: proposed.append(get(ids, **more)[0].shape[1]) or get(ids)
    )
    out = target.generate(ids, **options, prompt_lookup_num_tokens=4)
    candidates.close()
    assert torch.equal(out, plain)
    assert len(proposed) < NEW - 4, "drafts were accepted"


def test_a_custom_loop_gives_plain_tokens_with_our_candidate_generator(fitted):
    """Two rows of one length, and a cache that is cropped."""
    target, heads = fitted
    text = torch.tensor([[1, 4, 2, 5, 3]] * 2)
    plain = target.generate(text, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    candidates = CloverCandidateGenerator(heads, target, num_assistant_tokens=3)
    same, _ = candidates.get_candidates(text)
    assert torch.equal(same, text), "nothing is known yet"
    accepted = 0
    with torch.no_grad():
        out = target(text, use_cache=True)
        text = torch.cat((text, out.logits[:, -1:].argmax(-1)), dim=1)
        while text.shape[1] < plain.shape[1]:
            cache, length = out[cache_name()], text.shape[1]
            proposed, _ = candidates.get_candidates(text)
            assert torch.equal(proposed[:, :length], text)
            assert proposed.shape[1] == length + 3
            out = target(proposed[:, length - 1 :], **{cache_name(): cache})
            said = out.logits.argmax(-1)  # [2, 4]
            right = int((said[:, :-1] == proposed[:, length:]).all(0).int().cumprod(0).sum())
            accepted += right
            text = torch.cat((text, said[:, : right + 1]), dim=1)
            if right < 3:
                out[cache_name()].crop(right - 3)
    assert torch.equal(text[:, : plain.shape[1]], plain)
    assert accepted > 3
    before = len(target.model._forward_hooks)
    candidates.close()
    assert len(target.model._forward_hooks) == before - 1, "no hook stays"


# ---------------------------------------------------------------------- EAGLE-3


SAMPLED = {"do_sample": True, "temperature": 0.7}


@pytest.mark.parametrize(
    ("name", "lengths", "sampling"),
    [("llama", (7,), {}), ("llama", (5, 9, 3), SAMPLED), ("qwen3", (5, 9, 3), {}), ("mixtral", (7,), SAMPLED)],
    ids=["one-greedy", "ragged-sampled", "ragged-greedy", "one-sampled"],
)
def test_trees_of_eagle3_heads_change_no_token(name, lengths, sampling):
    target, inputs = build(name, vocab_size=VOCABULARY), ragged_batch(VOCABULARY, lengths)
    longest = inputs["input_ids"][lengths.index(max(lengths)), None]  # and what follows on it
    settings = {"temperature": sampling.get("temperature", 0.05), "prompt": longest, "count": 16}
    heads = fit(Eagle3Heads.from_target(target), target, **settings)
    options = {**inputs, "max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False, **sampling}
    torch.manual_seed(1)
    plain = target.generate(**options)
    torch.manual_seed(1)
    drafting = {"assistant_model": heads.eval(), "num_assistant_tokens": 24, "return_dict_in_generate": True}
    out = target.generate(**options, **drafting)
    assert torch.equal(out.sequences, plain)
    assert out.speculation.method == "tree"
    assert 24 in out.speculation.tree_sizes
    assert out.speculation.accepted_tokens >= (2 if sampling else 5)


def test_eagle3_heads_give_plain_tokens_in_a_second_turn_and_a_static_cache():
    target = build("llama", vocab_size=VOCABULARY)
    heads = fit(Eagle3Heads.from_target(target), target, temperature=0.05, count=16).eval()
    settings = GenerationConfig(max_new_tokens=10, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    ids = torch.tensor([[1, 4, 2, 5, 3]])
    drafting = {"assistant_model": heads, "num_assistant_tokens": 12}
    first = target.generate(ids, generation_config=settings)
    mine = target.generate(ids, generation_config=settings, **drafting)
    longer = torch.cat((first.sequences, torch.tensor([[9, 2]])), dim=1)
    again = target.generate(longer, generation_config=settings, **{cache_name(): mine[cache_name()]}, **drafting)
    assert torch.equal(mine.sequences, first.sequences)
    assert torch.equal(again.sequences, target.generate(longer, generation_config=settings).sequences)
    static = target.generate(ids, generation_config=settings, cache_implementation="static", **drafting)
    assert torch.equal(static.sequences, first.sequences)
    assert min(out.speculation.accepted_tokens for out in (mine, static)) > 1
    assert again.speculation.accepted_tokens > 0
