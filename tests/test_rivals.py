"""The rivals of `examples/experiments/rivals`: they draft what their networks say, and change no token."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers import zoo
from helpers.capturing import captures  # noqa: F401  (a fixture)
from helpers.paths import LENGTHS, fed, nodes_as_if_alone, one_by_one, path_of
from training.tiny import make_args, make_target, make_tokenizer, own_text

from hf_clover.targets.private_api import cache_name
from hf_clover.training.teacher import Teacher

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples" / "experiments"))
from rivals import RIVALS, DFlash, DSpark, Eagle1, Hydra, RivalHeads

pytestmark = pytest.mark.long("examples/experiments", "hf_clover/measure")

BLOCKS = (DFlash, DSpark)


def fresh(kind: type[RivalHeads], target_name: str = "llama", **fields) -> RivalHeads:
    torch.manual_seed(0)
    return kind.from_target(zoo.build(target_name), **fields).eval()


# ---------------------------------------------------------------------- trained, in the real generate


@pytest.fixture(scope="module", params=list(RIVALS))
def trained(request, tmp_path_factory) -> tuple[RivalHeads, torch.nn.Module]:
    """Heads that have learned a little of what their target says."""
    target, kind = make_target(), RIVALS[request.param]
    folder = tmp_path_factory.mktemp("rival")
    torch.manual_seed(0)
    args = {"max_steps": 80, "learning_rate": 1e-2, "per_device_train_batch_size": 8, "model_init_kwargs": None}
    trainer = kind.trainer(
        model=kind.from_target(target),
        teacher_model=target,
        args=make_args(folder, **args),
        train_dataset=Dataset.from_dict({"input_ids": own_text(target)}),
        processing_class=make_tokenizer(),
    )
    trainer.train()
    return trainer.heads.eval(), target


def starts_of(texts: list[list[int]]) -> torch.Tensor:
    """[3, 3]: the first tokens of three texts, one row with two columns of padding and one with one."""
    return torch.tensor([[0, 0, texts[0][0]], texts[1][:3], [0, *texts[2][:2]]])


def write(target, heads: RivalHeads, prompts: torch.Tensor, nodes: int, **options) -> Any:
    drafting = dict(assistant_model=heads, num_assistant_tokens=nodes, return_dict_in_generate=True)
    return target.generate(prompts, **drafting, **options)


@pytest.mark.parametrize("way", ["greedy", "sampling", "in graphs"])
def test_tokens_equal_plain_and_drafts_are_accepted(trained, way, request):
    """In graphs: the target's forwards are; drafting is as it always is."""
    heads, target = trained
    stand_in = request.getfixturevalue("captures") if way == "in graphs" else None
    sampling = {"do_sample": True, "temperature": 0.4} if way == "sampling" else {}
    prompts = starts_of(own_text(target))
    options = dict(attention_mask=(prompts != 0).long(), max_new_tokens=30, eos_token_id=None, **sampling)
    torch.manual_seed(1)
    plain = target.generate(prompts, **options)
    torch.manual_seed(1)
    out = write(target, heads, prompts, 12, **options)
    assert out.sequences.tolist() == plain.tolist()
    assert out.speculation.method == "tree"
    assert out.speculation.accepted_tokens >= (20 if way == "sampling" else 40)  # of 90 tokens
    assert len(out.speculation.accepted_by_depth) > 2
    assert stand_in is None or stand_in.replayed > 5


def test_a_second_turn_on_the_same_cache_equals_plain(trained):
    """Turn by turn, with a drafter that is remembered."""
    heads, target = trained

    def generate(prompt: torch.Tensor, **more) -> Any:
        options = dict(max_new_tokens=12, eos_token_id=None, return_dict_in_generate=True)
        return target.generate(prompt, attention_mask=torch.ones_like(prompt), **options, **more)

    prompt = torch.tensor([own_text(target)[3][:2]])
    first = generate(prompt)
    longer = torch.cat((first.sequences, torch.tensor([[9]])), dim=1)
    plain = generate(longer)
    drafting = dict(assistant_model=heads, num_assistant_tokens=6)
    mine = generate(prompt, **drafting)
    again = generate(longer, **{cache_name(): mine[cache_name()]}, **drafting)
    assert mine.sequences.tolist() == first.sequences.tolist()
    assert again.sequences.tolist() == plain.sequences.tolist()
    assert mine.speculation.accepted_tokens + again.speculation.accepted_tokens > 3


@pytest.mark.parametrize("kind", RIVALS.values(), ids=RIVALS)
def test_tokens_equal_plain_for_a_target_of_another_family(kind):
    target, heads = zoo.build("gpt_neox"), fresh(kind, "gpt_neox")
    prompts = torch.tensor([[3, 4, 5, 6]])
    out = write(target, heads, prompts, 24, max_new_tokens=40)
    assert out.sequences.tolist() == target.generate(prompts, max_new_tokens=40).tolist()
    assert out.speculation.accepted_tokens > 0


# ---------------------------------------------------------------------- a tree's scores, node by node


@pytest.mark.parametrize("shape", ["global", "chain", "levels"])
def test_every_node_is_scored_as_if_its_path_stood_alone(shape):
    heads = fresh(Eagle1, draft_depth=5)
    drafter, hidden, tokens = fed(heads)
    for _ in range(2):  # a tree leaves nothing behind
        tree = drafter.draft(24, shape)
        looked_at = nodes_as_if_alone(heads, tree, hidden, tokens)
        assert int(tree.depths.max()) > 2
        assert looked_at >= (10 if shape == "chain" else 30)


def test_rows_that_stay_are_scored_the_same_after_others_have_left():
    heads = fresh(Eagle1)
    drafter, hidden, tokens = fed(heads)
    drafter.draft(8)
    drafter.keep_rows([1])
    tree = drafter.draft(8)
    for node in range(1, tree.size):
        expected, _ = one_by_one(heads, hidden[1], tokens[1], path_of(tree, 0, node))
        assert float(tree.log_probs[0, node]) == pytest.approx(expected, abs=2e-4)


def lively(kind: type[RivalHeads], **fields) -> RivalHeads:
    """Past its start, at which what was drafted counts for nothing."""
    heads = fresh(kind, **fields)
    with torch.no_grad():
        for name, parameter in heads.named_parameters():
            parameter.add_(0.2 * torch.randn_like(parameter) if parameter.ndim == 2 and "say" in name else 0)
    return heads


@pytest.mark.parametrize("shape", ["global", "chain", "levels"])
@pytest.mark.parametrize("kind", BLOCKS)
@torch.no_grad()
def test_a_block_drafts_what_its_training_pass_computes(kind, shape):
    """Every node of trees over rows of unequal, padded text."""
    heads = lively(kind)
    drafter, hidden, tokens = fed(heads)
    for _ in range(2):  # a tree leaves nothing behind
        tree, looked_at = drafter.draft(24, shape), 0
        for row, length in enumerate(LENGTHS):
            for node in range(1, tree.size):
                if not tree.valid[row, node]:
                    continue
                path = path_of(tree, row, node)
                states = torch.cat((hidden[row], torch.randn(len(path), hidden[row].shape[1])))  # of no text yet
                outputs = heads(states[None], torch.tensor([tokens[row] + path])).head_outputs[:, 0, length - 1]
                log_probs = heads.score(outputs).log_softmax(-1)  # [G, V]
                expected = sum(float(log_probs[level, token]) for level, token in enumerate(path))
                assert float(tree.log_probs[row, node]) == pytest.approx(expected, abs=2e-4)
                looked_at += 1
        assert int(tree.depths.max()) > 2
        assert looked_at >= (30 if shape == "global" else 14)


@torch.no_grad()
def test_a_slot_depends_on_the_first_token_and_in_dspark_on_drafts():
    tokens = torch.randint(1, 32, (1, 12))
    for kind in BLOCKS:
        heads = lively(kind)
        hidden = torch.randn(1, 12, 3 * heads.config.hidden_size)
        before = heads(hidden, tokens).head_outputs
        at_two = heads(hidden, tokens, anchors=torch.tensor([[4, 9]])).head_outputs
        torch.testing.assert_close(at_two, before[:, :, [4, 9]])
        changed = tokens.clone()
        changed[0, 6] = 31 - changed[0, 6]
        differs = (before != heads(hidden, changed).head_outputs).any(-1)[:, 0]  # [G, T]
        # The block's own first token counts for all its slots; a drafted one for DSpark's later ones.
        assert differs[:6, 6].all()
        assert differs[:, 5].tolist() == [False, *[kind is DSpark] * 6]
        assert not differs[:, 7:].any()
        assert (before[3, 0, -3:] == 0).all()
        assert (before[3, 0, :-3] != 0).any(-1).all()


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_loss_of_a_block_equals_a_plain_sum_over_its_slots(kind):
    target, heads = zoo.build("llama"), lively(kind)
    heads.bind(target)
    ids = torch.randint(1, 32, (2, 13))
    labels = ids.clone()
    labels[1, 9:] = -100
    teacher = Teacher(target, heads)
    trainer = object.__new__(kind.trainer)
    vars(trainer).update(teacher=teacher, args=SimpleNamespace(bf16=False))
    torch.manual_seed(3)
    loss, outputs = trainer.compute_loss(heads, {"input_ids": ids, "labels": labels}, return_outputs=True)
    torch.manual_seed(3)
    anchors = trainer._anchors(torch.nn.functional.pad(labels[:, 2:] != -100, (0, 1)))
    logits = target(ids).logits
    costs, weights = [], []
    for row in range(2):
        for place, anchor in enumerate(anchors[row].tolist()):
            for slot in range(7):
                at = anchor + 2 + slot
                if at < 13 and labels[row, at] != -100:
                    p = logits[row, at - 1].softmax(-1)
                    log_q = heads.score(outputs.head_outputs[slot, row, place]).log_softmax(-1)
                    tv = (p - log_q.exp()).abs().sum() / 2
                    costs.append(-(1 - kind.variation) * (p * log_q).sum() + kind.variation * tv)
                    weights.append(2.718281828 ** (-slot / 7))
    assert len(costs) > 12
    expected = sum(w * c for w, c in zip(weights, costs)) / sum(weights)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)


def test_eagle_1_adds_noise_to_features_in_training_only():
    heads = fresh(Eagle1)
    hidden = torch.randn(1, 6, heads.config.hidden_size)
    with torch.no_grad():
        still, noisy = heads.features(hidden), heads.train().features(hidden)
    assert 0 < float((noisy - still).abs().max()) <= 0.1


# ---------------------------------------------------------------------- what they read


def test_hydra_heads_see_every_token_since_their_state():
    heads = fresh(Hydra)
    hidden, tokens = torch.randn(1, 8, heads.config.hidden_size), torch.randint(1, 32, (1, 8))
    for mlp in heads.mlps:  # past their start, at which the token half is almost zero
        torch.nn.init.normal_(mlp.first.weight, std=0.1)
    with torch.no_grad():
        before = heads(hidden, tokens).head_outputs
        tokens[0, 3] = 31 - tokens[0, 3]
        after = heads(hidden, tokens).head_outputs
    changed = (before != after).any(-1)[:, 0]  # [K, T]
    for head in range(5):
        # The token after position 3 is seen by head i from positions 3 - i to 3, and by none before or after.
        assert changed[head].nonzero().flatten().tolist() == list(range(max(0, 3 - head), 4))


@pytest.mark.parametrize("kind", RIVALS.values(), ids=RIVALS)
def test_bfloat16_heads_give_plain_tokens_for_a_float32_target(kind):
    """As in the packed copy that drafts on a CPU: every layer is given inputs of its own dtype."""
    target, heads = zoo.build("llama"), fresh(kind).to(torch.bfloat16)
    ids = torch.tensor([[1, 4, 2, 5, 3, 1, 4]])
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(ids, **options)
    given = set()
    for layer in heads.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(lambda _, inputs: given.add(inputs[0].dtype))
    out = write(target, heads, ids, 6, **options)
    assert torch.equal(out.sequences, plain)
    assert sum(out.speculation.tree_sizes) > 0
    assert given == {torch.bfloat16}


@pytest.mark.parametrize("kind", RIVALS.values(), ids=RIVALS)
def test_heads_draft_the_same_after_saving_and_loading(kind, tmp_path):
    target, heads = zoo.build("llama"), fresh(kind)
    heads.save_pretrained(tmp_path)
    loaded = kind.from_pretrained(tmp_path).eval().bind(target)
    prompts = torch.tensor([[3, 4, 5]])
    before, after = (write(target, each, prompts, 8, max_new_tokens=20) for each in (heads, loaded))
    assert before.speculation.accepted_by_depth == after.speculation.accepted_by_depth
    assert not any("embed" in name or "lm_head" in name for name in loaded.state_dict())
