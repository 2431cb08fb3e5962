"""clover-x: what it computes, and how it starts in balance whatever the target's sizes."""

import itertools
from unittest.mock import Mock

import pytest
import torch
from helpers.tiny_llama import SIZES, stir
from helpers.zoo import build
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from hf_clover import CloverHeads
from hf_clover.decoding.draft.drafter import CloverDrafter
from hf_clover.hub.cards import render
from hf_clover.network import blocks
from hf_clover.network.blocks import followed, last_place, places_along, searched_text, stretches, values_at
from hf_clover.network.configuration_clover import VARIANTS
from hf_clover.network.target_parts import find_decoder
from hf_clover.origins.scales import embedding_scale, hidden_state_scale
from hf_clover.targets.hidden_states import capture_states

SIZE, VOCABULARY = 32, 24


@torch.no_grad()
def make_target(
    embedding_rms: float = 0.5, state_rms: float = 1.0, norm_rms: float = 1.0, **fields
) -> LlamaForCausalLM:
    """A target whose embeddings have rows of one size, whose residual stream is of another, and its final norm."""
    config = LlamaConfig(**{**SIZES, "vocab_size": VOCABULARY, **fields})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = LlamaForCausalLM(config).eval()
        for layer in target.model.layers:
            stir(layer)
            layer.self_attn.o_proj.weight.mul_(state_rms)
            layer.mlp.down_proj.weight.mul_(state_rms)
        target.model.embed_tokens.weight.normal_(0.0, embedding_rms)
        target.model.norm.weight.uniform_(0.5 * norm_rms, 1.5 * norm_rms)
        target.lm_head.weight.normal_(0.0, 0.5)
    return target


def rms(x: torch.Tensor) -> float:
    return x.float().pow(2).mean().sqrt().item()


def states_of(target: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    captured: list[torch.Tensor] = []
    with torch.no_grad(), capture_states(target, captured):
        target(input_ids=ids, use_cache=False)
    return captured[0]


# ---------------------------------------------------------------------- what it computes


def recall_one_by_one(
    ids: list[int], values: torch.Tensor, start: int, t: int, level: int, drafted: list[int]
) -> torch.Tensor:
    """The slow twin of `keep`, `followed` and `last_place` for one state: values [kv_heads, C, head_dim] of a row that
    begins at `start`; the state stands at `t`, and was followed by `drafted` tokens of which `level` are taken."""
    text = ids[start : t + 1]
    path = [*text, *drafted[:level]]
    for run in range(min(4, len(path)), 0, -1):
        for place in range(len(text) - 1, run - 1, -1):
            if text[place - run : place] == path[-run:]:
                return values[:, start + place].flatten()
    return torch.zeros_like(values[:, 0]).flatten()


def text_of(batch: int = 3, length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B, T] of which pairs come again and again, and values [B, kv_heads, T, head_dim]."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, (batch, length), generator=generator)
    return ids, torch.randn(batch, 2, length, 8, generator=generator)


@pytest.mark.parametrize("at_once", [1 << 25, 100, 1], ids=lambda n: f"{n} at once")
@pytest.mark.parametrize("starts", [(0, 0, 0), (0, 4, 11)], ids=["even", "padded or packed"])
def test_recall_finds_the_last_place_of_the_longest_run(starts, at_once, monkeypatch):
    """Left padding, and documents packed behind each other: what stands before a row's start is never found."""
    monkeypatch.setattr(blocks, "MOST_COMPARED", at_once)
    ids, values = text_of()
    columns = torch.arange(12)
    mask = (columns <= columns[:, None]) & (columns >= torch.tensor(starts)[:, None, None])  # [B, T, C]
    places = places_along(ids, mask[:, None] if any(starts) else None, ids, 5)
    added = torch.zeros(mask.shape).masked_fill(~mask, -1e9)[:, None]  # the other form of a mask
    assert all(map(torch.equal, places, places_along(ids, added, ids, 5)))
    found = 0
    for level in range(5):
        told = values_at(values, places[level])
        for row, start in enumerate(starts):
            for t in range(start, 12 - level):
                row_ids = ids[row].tolist()
                expected = recall_one_by_one(row_ids, values[row], start, t, level, row_ids[t + 1 :])
                assert torch.equal(told[row, t], expected)
                found += bool(expected.any())
    assert found > 15


def test_recall_for_a_draft_from_the_last_state_equals_its_slow_twin():
    """What a draft asks for: one state, several tokens at once, and columns beyond a row's own."""
    ids, values = text_of()
    lengths = torch.tensor([12, 9, 1])
    searched, runs = searched_text(ids, *stretches((torch.arange(12) < lengths[:, None])[:, None, None], ids, 1))
    runs = followed(searched, runs, ids.gather(1, lengths[:, None] - 1))
    assert runs.shape == (3, 1, 12)
    assert runs.max() > 1
    for drafted in itertools.product(range(3), repeat=2):
        beams = runs.expand(-1, 2, -1)
        for token in drafted:
            beams = followed(searched, beams, torch.tensor([[token, 2 - token]] * 3))
        told = values_at(values, last_place(beams))
        for row, length in enumerate(lengths.tolist()):
            path = ids[row, :length].tolist()
            for beam, taken in enumerate((list(drafted), [2 - token for token in drafted])):
                expected = recall_one_by_one(path, values[row], 0, length - 1, 2, taken)
                assert torch.equal(told[row, beam], expected)


def test_gradients_of_recall_are_finite_where_nothing_is_found():
    ids, values = torch.arange(24).view(2, 12), text_of(2)[1].requires_grad_()
    ids[0] %= 4
    told = values_at(values, places_along(ids, None, ids, 2)[1])
    assert not told[1].any()
    told.square().sum().backward()
    assert values.grad.isfinite().all()
    assert values.grad[0].any()
    assert not values.grad[1].any()


@pytest.mark.parametrize("padding", [(0, 0, 0), (4, 0, 2)], ids=["even", "padded"])
@torch.no_grad()
def test_a_drafted_chain_equals_that_of_one_pass_over_each_row(padding):
    """Rows of different lengths, in steps of different counts, drafted together as each is alone."""
    target = make_target()
    heads = stir(CloverHeads.from_target(target, "clover-x", num_heads=5), 0.5).eval()
    ids = torch.randint(3, (3, 15))  # so that pairs come again
    hidden = torch.randn(3, 14, SIZE)
    mask = torch.arange(8) >= torch.tensor(padding)[:, None]  # of a prompt of 8
    drafter = CloverDrafter(heads, mask if any(padding) else None)
    positions = (torch.arange(14) - torch.tensor(padding)[:, None]).clamp(min=0)
    lengths, found = [8, 8, 8], 0
    drafter.extend(hidden[:, :8], ids[:, 1:9], positions[:, :8], [8, 8, 8])
    for counts in ((0, 0, 0), (3, 1, 2), (2, 0, 4), (1, 1, 0)):
        if any(counts):
            index = torch.tensor(lengths)[:, None] + torch.arange(max(counts))  # [B, m]
            index = index.clamp(max=13)
            pick = index[..., None].expand(-1, -1, SIZE)
            new = hidden.gather(1, pick), ids.gather(1, index + 1), positions.gather(1, index)
            drafter.extend(*new, counts)
            lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        tree = drafter.draft(5, shape="chain")
        for row, length in enumerate(lengths):
            own = slice(padding[row], length)
            text, states = ids[row, padding[row] + 1 : length + 1][None], hidden[row, own][None]
            state, values, _ = heads._encode(states, text, None, None, None)
            state, token, chain = state[:, -1], text[:, -1], []
            for level in range(5):
                place = text.shape[1] - 1
                read = recall_one_by_one(text[0].tolist(), values[0], 0, place, level, chain)
                out, state = heads.step(level, state, token, heads.recalled(read)[None])
                token = heads.score(out).argmax(-1)
                chain.append(token.item())
                found += bool(read.any())
            assert tree.tokens[row, 1:].tolist() == chain
    assert found > 8


@pytest.mark.parametrize("make", [make_target, lambda: build("gpt2", vocab_size=VOCABULARY)], ids=["llama", "gpt2"])
@torch.no_grad()
def test_the_network_computes_what_plain_tensor_operations_compute(make):
    """Norm, which is a LayerNorm in gpt2, projector, block, and for every head one gated layer of state and token, all
    heads with one set of weights."""
    target = make()
    (_, _, norm), rows = find_decoder(target), target.get_input_embeddings().weight
    heads = stir(CloverHeads.from_target(target, "clover-x", num_heads=4), 0.1).eval()
    hidden, ids = torch.randn(2, 9, target.config.hidden_size), torch.randint(3, (2, 9))
    out = heads(hidden, ids)

    embedded = F.embedding(ids, rows * heads.config.embedding_scale)  # [B, T, d]
    fc, cell = heads.entry_decoder.fc, heads.decoder
    entering = torch.cat((heads.config.hidden_state_scale * norm(hidden), embedded), -1)  # [B, T, 2 d]
    x = entering @ fc.weight.T + fc.bias  # [B, T, d]
    rope = heads.rotary_emb(x, torch.arange(9)[None])
    for layer in heads.layers:
        x, values = layer(x, rope, None, None)
    state = x  # [B, T, d]
    torch.testing.assert_close(out.state, state, atol=1e-5, rtol=1e-5)
    places = places_along(ids, None, ids, 4)
    width = heads.config.decoder_width
    gate, up = cell.gate_up.weight[:width], cell.gate_up.weight[width:]
    for level in range(4):
        seen = torch.cat((cell.norm(state), embedded[:, level:]), -1)  # [B, T - level, 2 d]
        told = values_at(values, places[level][:, : 9 - level]) @ heads.recalled.weight.T  # [B, T - level, 2 w]
        gated = F.silu(seen @ gate.T + told[..., :width]) * (seen @ up.T + told[..., width:])
        state = state + gated @ cell.down.weight.T
        expected = heads.head_norm(state)
        torch.testing.assert_close(out.head_outputs[level, :, : 9 - level], expected, atol=1e-5, rtol=1e-5)
        state = state[:, :-1]


def test_a_new_cell_returns_its_state_unchanged():
    """So that the heads start from what the block says, and a badly scaled start cannot drown it."""
    heads = CloverHeads.from_target(make_target(), "clover-x")
    state = torch.randn(3, SIZE)
    out, following = heads.step(0, state, torch.tensor([1, 2, 3]))
    assert torch.equal(following, state)
    assert torch.equal(out, heads.head_norm(state))
    # What goes into the cell is of size 1, and so is what its first product gives.
    seen = torch.cat((heads.decoder.norm(state), heads.embed(torch.tensor([1, 2, 3]))), -1)
    assert rms(heads.decoder.gate_up(seen)) == pytest.approx(1.0, rel=0.3)


# ---------------------------------------------------------------------- in balance


@pytest.mark.parametrize("norm_rms", [0.2, 1.0, 6.0])
@pytest.mark.parametrize("state_rms", [0.05, 30.0])
@pytest.mark.parametrize("embedding_rms", [0.002, 5.0])
@torch.no_grad()
def test_states_and_embeddings_enter_at_size_1_for_every_target(embedding_rms, state_rms, norm_rms):
    """States and embeddings come in at size 1, and nothing is added to them yet: what goes into lm_head has the size
    of what the target feeds into it."""
    target = make_target(embedding_rms, state_rms, norm_rms)
    heads = CloverHeads.from_target(target, "clover-x")
    ids = torch.randint(VOCABULARY, (4, 12))
    assert rms(heads.embed(ids)) == pytest.approx(1.0, rel=0.2)
    hidden, scale = states_of(target, ids), heads.config.hidden_state_scale
    final = target.model.norm(hidden)
    assert rms(scale * final) == pytest.approx(1.0, rel=0.3)
    entered = heads.entry_decoder(scale * final, torch.zeros(4, 12, SIZE))
    torch.testing.assert_close(entered, scale * final)
    states, embedded = heads.encode(hidden, ids), heads.embed(ids)
    token = states - scale * final  # turned at random: as large as it was, and nowhere near the token's own row
    torch.testing.assert_close(token, embedded @ heads.entry_decoder.fc.weight[:, SIZE:].T)
    assert rms(token) == pytest.approx(1.0, rel=0.3)
    assert F.cosine_similarity(token, embedded, dim=-1).abs().mean() < 0.5
    out = heads(hidden, ids).head_outputs[0]
    assert rms(out) == pytest.approx(rms(final), rel=0.3)


@torch.no_grad()
def test_new_heads_do_not_repeat_the_token_where_the_target_ties_its_embeddings():
    """A row of the embedding is then the row of lm_head that scores this very token above all others."""
    target = make_target(tie_word_embeddings=True)
    heads = CloverHeads.from_target(target, "clover-x")
    ids = torch.randint(VOCABULARY, (8, 12))
    guesses = heads.score(heads(states_of(target, ids), ids).head_outputs[0]).argmax(-1)
    assert (guesses == ids).float().mean() < 0.5


def test_layers_are_initialised_by_their_width_and_not_copied():
    """Layers that read the stream give outputs of the size of their inputs; layers that add to it add nothing. A copy
    of the target's last layer, which belongs to a stream of another size, learned more slowly."""
    for size in (32, 128):
        target = make_target(hidden_size=size, intermediate_size=3 * size)
        heads = CloverHeads.from_target(target, "clover-x")
        assert len(heads.layers) == 1
        attention, mlp = heads.layers[0].self_attn, heads.layers[0].mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            assert rms(linear.weight) == pytest.approx(size**-0.5, rel=0.1)
        for linear in (attention.o_proj, mlp.down_proj, heads.decoder.down):
            assert not linear.weight.any()
        assert heads.head_norm.weight.eq(1 / heads.config.hidden_state_scale).all()
        assert not hasattr(heads, "norm")


@torch.no_grad()
def test_clover_x_reads_tokens_from_the_input_embedding():
    target = make_target()
    ids = torch.arange(VOCABULARY)
    for variant, rows in (("clover-x", target.model.embed_tokens.weight), ("clover-2", target.lm_head.weight)):
        heads = CloverHeads.from_target(target, variant)
        assert torch.equal(heads.embed(ids), heads.config.embedding_scale * rows)
        other = "lm_head" if variant == "clover-x" else "input"
        swapped = CloverHeads.from_target(target, variant, token_embedding=other)
        assert not torch.equal(swapped.embed(ids), heads.embed(ids))


def test_scales_are_saved_in_the_config_and_loaded_again(tmp_path):
    target = make_target(embedding_rms=0.02)
    heads = CloverHeads.from_target(target, "clover-x")
    assert heads.config.embedding_scale == pytest.approx(50, rel=0.2)
    assert heads.config.hidden_state_scale != 1.0
    heads.save_pretrained(tmp_path)
    again = CloverHeads.from_pretrained(tmp_path).bind(target)
    ids = torch.arange(VOCABULARY)
    assert torch.equal(again.embed(ids), heads.embed(ids))
    hidden = torch.randn(1, 5, SIZE)
    assert torch.equal(again.encode(hidden, ids[None, :5]), heads.encode(hidden, ids[None, :5]))
    assert CloverHeads.from_target(target, "clover-x", embedding_scale=2.0).config.embedding_scale == 2.0
    assert CloverHeads.from_target(target, hidden_state_scale=2.0).config.hidden_state_scale == 2.0


@pytest.mark.parametrize("variant", ["clover-2", "clover", "medusa"])
def test_variants_of_papers_scale_nothing_and_copy_the_last_layer(variant):
    target = make_target(embedding_rms=0.02, state_rms=30.0)
    heads = CloverHeads.from_target(target, variant)
    config = heads.config
    assert (config.embedding_scale, config.hidden_state_scale, config.normalize_hidden_states) == (1.0, 1.0, False)
    last = target.model.layers[-1].state_dict()
    for layer in getattr(heads, "layers", ()):
        assert layer.state_dict().keys() == last.keys()
        assert all(torch.equal(tensor, last[name]) for name, tensor in layer.state_dict().items())


def test_zero_rows_do_not_count_in_the_embedding_scale():
    rows = torch.randn(100, SIZE) * 0.02
    rows[60:] = 0
    assert embedding_scale(rows) == pytest.approx(50, rel=0.1)
    assert embedding_scale(torch.zeros(4, SIZE)) == 1.0


@torch.no_grad()
def test_a_huge_first_state_does_not_change_the_hidden_state_scale():
    """As in many large targets, whose first position holds values of hundreds."""
    target = make_target()
    expected = hidden_state_scale(target)
    target.model.norm.register_forward_hook(lambda _, __, output: torch.cat((1000 * output[:, :1], output[:, 1:]), 1))
    assert hidden_state_scale(target) == pytest.approx(expected, rel=0.2)


def test_a_target_that_cannot_be_measured_gets_scale_1(monkeypatch):
    target = make_target()
    monkeypatch.setattr(LlamaForCausalLM, "forward", Mock(side_effect=RuntimeError("wants pictures")))
    target.train().lm_head.eval()
    assert hidden_state_scale(target) == 1.0
    assert (target.training, target.lm_head.training) == (True, False)
    assert not target.model.norm._forward_hooks
    monkeypatch.undo()
    monkeypatch.setattr("hf_clover.origins.scales.find_decoder", lambda target: (target, None, None))
    assert hidden_state_scale(target) == 1.0


# ---------------------------------------------------------------------- what is said of it


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_card_names_the_variant_and_links_its_paper(variant):
    text = str(render("heads", "org/name", config={"variant": variant, "num_heads": 3}))
    kind = text.split("These heads are of the kind ")[1].split(" The Python package")[0]
    assert variant in kind
    assert "https://huggingface.co/papers/2" in kind
    assert ("belongs to the family of" in kind) == (variant == "clover-x")
