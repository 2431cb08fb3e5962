"""EAGLE-3 heads: they draft what their network says, which is what they are trained on, and change no token."""

import pytest
import torch
from helpers import zoo
from helpers.capturing import captures  # noqa: F401  (a fixture)
from helpers.fitting import fit
from helpers.paths import fed, nodes_as_if_alone, one_by_one, path_of
from torch.nn import functional as F
from training.tiny import make_target, own_text

from hf_clover import Eagle3Heads
from hf_clover.decoding.target.memory import memory_of
from hf_clover.decoding.target.trees import TargetRun
from hf_clover.targets.private_api import cache_name
from hf_clover.training.teacher import Teacher

# What is a field because one format or another has it.
FIELDS = {
    "the paper's": {},
    "two layers, all norms": dict(
        num_hidden_layers=2, norm_before_fc=True, fc_norm=True, norm_output=True, norm_before_residual=True
    ),
    "all its own": dict(own_lm_head=True, own_embedding=True, qk_norm=True, layer_ids=[0, 1]),
}
NEW = 20


def fresh(**fields) -> Eagle3Heads:
    """Its norms are no longer all alike."""
    torch.manual_seed(0)
    heads = Eagle3Heads.from_target(zoo.build("llama"), **fields).eval()
    with torch.no_grad():
        for parameter in heads.parameters():
            if parameter.ndim == 1:
                parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
    return heads


@pytest.fixture(scope="module")
def fitted() -> tuple[torch.nn.Module, Eagle3Heads, torch.Tensor]:
    """A target, heads that have learned what it says, and prompts of which two are padded."""
    torch.manual_seed(0)
    target = make_target(eos_token_id=None)
    texts = torch.tensor(own_text(target))
    heads = Eagle3Heads.from_target(target, draft_copies=0, num_heads=4)
    prompts = torch.stack([F.pad(texts[row, :width], (4 - width, 0)) for row, width in enumerate((2, 4, 3))])
    return target, fit(heads, target, steps=60, texts=texts).eval(), prompts


def both(target: torch.nn.Module, heads: Eagle3Heads, prompts: torch.Tensor, **options):
    """(plain's sequences, ours) for the same random numbers."""
    options = dict(attention_mask=(prompts != 0).long(), max_new_tokens=NEW) | options
    of_ours = ("cache_implementation", "compile_config")
    torch.manual_seed(1)
    plain = target.generate(prompts, **{name: value for name, value in options.items() if name not in of_ours})
    torch.manual_seed(1)
    drafting = dict(assistant_model=heads, num_assistant_tokens=12, return_dict_in_generate=True)
    return plain, target.generate(prompts, **options, **drafting)


# ---------------------------------------------------------------------- a tree's scores, node by node


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("shape", ["global", "chain", "levels"])
def test_every_node_is_scored_as_if_its_path_stood_alone(shape, fields):
    heads = fresh(draft_depth=5, **fields)
    drafter, hidden, tokens = fed(heads)
    for _ in range(2):  # a tree leaves nothing behind
        tree = drafter.draft(24, shape)
        looked_at = nodes_as_if_alone(heads, tree, hidden, tokens)
        assert int(tree.depths.max()) > 2
        assert looked_at >= {"global": 30, "levels": 25, "chain": 10}[shape]


def test_rows_that_stay_are_scored_the_same_after_others_have_left():
    heads = fresh()
    drafter, hidden, tokens = fed(heads)
    drafter.draft(8)
    drafter.keep_rows([1])
    tree = drafter.draft(8)
    for node in range(1, tree.size):
        expected, _ = one_by_one(heads, hidden[1], tokens[1], path_of(tree, 0, node))
        assert float(tree.log_probs[0, node]) == pytest.approx(expected, abs=2e-4)


# ---------------------------------------------------------------------- training


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_training_outputs_equal_those_of_drafting(fields):
    """The output of step k at position t is what a chain drafted from t gives when it drafts the text."""
    heads = fresh(**fields)
    torch.manual_seed(2)
    length, size = 11, heads.config.target_width * len(heads.feature_layers)
    hidden, tokens = torch.randn(length, size), torch.randint(1, 32, (length,)).tolist()
    with torch.no_grad():
        outputs = heads(hidden[None], torch.tensor([tokens])).head_outputs  # [K, 1, T, d]
    for place in (0, 3, 6):
        text = tokens[place + 1 :]
        _, alone = one_by_one(heads, hidden[: place + 1], tokens[: place + 1], [*text, 0][: len(outputs)])
        for step, expected in enumerate(alone):
            torch.testing.assert_close(outputs[step, 0, place], expected, atol=2e-5, rtol=1e-4)


def test_gradients_flow_from_a_late_training_step_to_the_first_layer():
    heads = fresh().train()
    outputs = heads(torch.randn(1, 12, 3 * heads.config.hidden_size), torch.randint(1, 32, (1, 12))).head_outputs
    (grad,) = torch.autograd.grad(outputs[6].sum(), heads.fc.weight)  # back to where the path began
    assert float(grad.abs().max()) > 0
    assert (outputs[6, :, -6:] == 0).all()


@torch.no_grad()
def test_features_are_the_targets_hidden_states_of_three_layers():
    """What the trainer hands over and what `generate` does are the target's own `hidden_states`."""
    target = zoo.build("cohere2")  # four layers
    ids = torch.randint(1, 32, (2, 7))
    heads = Eagle3Heads.from_target(target)
    assert heads.feature_layers == (2, 2, 1)  # the third, the middle, the third from the end
    states = target(ids, output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer] for layer in heads.feature_layers], dim=-1)
    teacher = Teacher(target, heads)
    found = teacher.hidden_states({"input_ids": ids})
    torch.testing.assert_close(teacher.features(found), expected)
    torch.testing.assert_close(teacher.final_states(found), states[-1])
    positions = {"position_ids": torch.arange(7).expand(2, -1)}
    run = TargetRun(target, target.generation_config, positions, feature_layers=heads.feature_layers)
    with run.open():
        run.prefill(ids)
        torch.testing.assert_close(run.hidden, expected)


# ---------------------------------------------------------------------- in the real generate


@pytest.mark.parametrize(
    ("sampling", "accepted"),
    [({}, 30), ({"do_sample": True, "temperature": 0.4}, 10)],
    ids=["greedy", "sampling"],
)
def test_tokens_equal_plain_and_drafts_are_accepted(fitted, sampling, accepted):
    plain, ours = both(*fitted, **sampling)
    assert ours.sequences.tolist() == plain.tolist()
    assert ours.speculation.method == "tree"
    assert ours.speculation.accepted_tokens >= accepted  # of 60
    assert len(ours.speculation.accepted_by_depth) > 2


def test_a_second_turn_on_the_same_cache_equals_plain(fitted):
    """Turn by turn, with a drafter that is remembered."""
    target, heads, prompts = fitted
    first, mine = both(target, heads, prompts[1:2])
    longer = torch.cat((first, torch.tensor([[9]])), dim=1)
    plain, _ = both(target, heads, longer)
    drafting = dict(assistant_model=heads, num_assistant_tokens=12, return_dict_in_generate=True)
    again = target.generate(longer, max_new_tokens=NEW, **{cache_name(): mine[cache_name()]}, **drafting)
    assert again.sequences.tolist() == plain.tolist()
    assert again.speculation.accepted_tokens > 3


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}])
def test_tokens_equal_plain_where_the_targets_forwards_are_graphs(options, fitted, captures):  # noqa: F811
    """The target's forwards are graphs, which hand over three layers' states; the drafts are not."""
    memory_of(fitted[0]).idle_cache = None  # which has the graphs of the other test
    plain, ours = both(*fitted, **options)
    assert ours.sequences.tolist() == plain.tolist()
    assert ours.speculation.accepted_tokens >= 30
    assert captures.replayed >= 4


def test_bfloat16_heads_give_plain_tokens_for_a_float32_target():
    """As in the packed copy that drafts on a CPU: every layer is given inputs of its own dtype."""
    target, heads = zoo.build("llama"), fresh().to(torch.bfloat16)
    given = set()
    for layer in heads.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(lambda _, inputs: given.add(inputs[0].dtype))
    plain, ours = both(target, heads, torch.tensor([[1, 4, 2, 5, 3, 1, 4]]))
    assert ours.sequences.tolist() == plain.tolist()
    assert sum(ours.speculation.tree_sizes) > 0
    assert given == {torch.bfloat16}
