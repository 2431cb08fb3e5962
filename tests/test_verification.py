"""The judge is judged: what is the same, what is rounding, and mistakes planted in the decoding, which it must see."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from helpers import command_line
from helpers.fitting import fit
from helpers.wrong_mask import every_earlier_node
from helpers.zoo import build, ragged_batch

from hf_clover import CloverHeads, Eagle3Heads
from hf_clover.decoding import route as route_module
from hf_clover.decoding.cache.by_row import TreeCache
from hf_clover.decoding.tree import Tree
from hf_clover.measure import losslessness as verification
from hf_clover.measure.losslessness import BUG, IDENTICAL, NUMERICS, explain, rounding_after, verify
from hf_clover.targets.hidden_states import capture_states

folder, models, run = command_line.folder, command_line.models, command_line.run  # fixtures
VOCABULARY = 24
TOKENIZER = SimpleNamespace(pad_token_id=0, eos_token_id=None)
PROMPTS = [ragged_batch(VOCABULARY, (length,), seed=length)["input_ids"][0].tolist() for length in (5, 9, 3, 7)]


def check(target, heads, **settings):
    settings = {"batch_sizes": (3,), "nodes": (24,), "max_new_tokens": 30, **settings}
    return verify(target, TOKENIZER, heads, PROMPTS, progress=False, **settings)


@pytest.fixture(scope="module")
def target():
    return build("llama", vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def heads(target):
    return CloverHeads.from_target(target)


def test_every_setting_has_a_row(target, heads):
    settings = {"batch_sizes": (1, 3), "nodes": (None, 6), "trees": ("global", "chain"), "max_new_tokens": 12}
    result = check(target, heads, cache_implementations=("dynamic", "static"), **settings)
    rows = result["rows"]
    assert len({(row["batch_size"], row["nodes"], row["tree"], row["cache"]) for row in rows}) == len(rows) == 16
    assert result["verdict"] == IDENTICAL
    for row in rows:
        assert (row[IDENTICAL], row[NUMERICS], row[BUG], row["differences"]) == (4, 0, 0, [])
        assert (row["method"], row["new_tokens"]) == ("tree", 48)
    assert sum(row["accepted_tokens"] for row in rows) > 20, "a check that accepts nothing proves nothing"
    said = list(verification.report_of(json.loads(json.dumps(result))))
    assert len(said) == 18
    assert re.fullmatch(
        r"right drafts at places 1, 2, \.\.\., where all before them are right: (\d+%, )*\d+%", said[-2]
    )
    assert said[-1].endswith("float32 on cpu, 4 stand-in prompts: identical")


@pytest.mark.parametrize("kind", [CloverHeads, Eagle3Heads])
def test_drafts_by_place_equal_those_of_chains_drafted_one_by_one(target, kind):
    """Counted in the texts, and by drafting a chain behind each of their tokens."""
    options = dict(max_new_tokens=10, do_sample=False, pad_token_id=0)
    texts = [target.generate(torch.tensor([prompt]), **options)[0] for prompt in PROMPTS]
    heads = kind.from_target(target, num_heads=4, draft_depth=4)
    heads = fit(heads, target, texts=torch.stack([text[-12:] for text in texts])).eval()
    result = check(target, heads, batch_sizes=(3,), nodes=(4,), trees=("chain",), max_new_tokens=10)
    asked, right = [0] * 4, [0] * 4
    for prompt, text in zip(PROMPTS, texts):
        captured: list[torch.Tensor] = []
        with torch.no_grad(), capture_states(target, captured, heads.feature_layers):
            target(text[None])
        for length in range(len(prompt) + 1, len(text)):
            drafter = heads.new_drafter(heads)
            positions = torch.arange(length - 1)[None]
            drafter.extend(captured[0][:, : length - 1], text[None, 1:length], positions, [length - 1])
            chain, truth = drafter.draft(4, "chain").tokens[0, 1:].tolist(), text[length:].tolist()
            for place, (draft, token) in enumerate(zip(chain, truth)):
                asked[place], right[place] = asked[place] + 1, right[place] + (draft == token)
                if draft != token:
                    break
    assert right[1] > 5
    assert asked[1] > right[1]
    assert result["drafts_by_place"] == [{"asked": a, "right": r} for a, r in zip(asked, right)]


def test_drafts_behind_the_end_of_an_answer_are_not_counted(target, heads, monkeypatch):
    plain = target.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=8, do_sample=False, pad_token_id=0)[0]
    end = plain[len(PROMPTS[0]) + 2].item()
    monkeypatch.setattr(target.generation_config, "eos_token_id", [end])
    settings = {"batch_sizes": (1,), "nodes": (4,), "max_new_tokens": 8}
    result = verify(target, TOKENIZER, heads, PROMPTS[:1], progress=False, **settings)
    assert result["drafts_by_place"][0]["asked"] <= 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_half_precision_gives_identical_tokens_or_rounding(name, dtype):
    target = build(name, vocab_size=VOCABULARY, dtype=dtype)
    result = check(target, CloverHeads.from_target(target), trees=("global", "levels"))
    assert result["verdict"] in (IDENTICAL, NUMERICS), list(verification.report_of(result))
    assert sum(row["accepted_tokens"] for row in result["rows"]) > 10


# ---------------------------------------------------------------------- planted mistakes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_commit_that_keeps_other_nodes_is_found(dtype, monkeypatch):
    monkeypatch.setattr(TreeCache, "_move", lambda self, moves: None)
    target = build("llama", vocab_size=VOCABULARY, dtype=dtype)
    monkeypatch.setattr(route_module, "_why_no_tree", lambda *args: None)  # a trial tree would notice, and fall back
    result = check(target, CloverHeads.from_target(target))
    assert result["verdict"] == BUG
    bug = next(found for found in result["rows"][0]["differences"] if found["verdict"] == BUG)
    assert bug["margin"] >= bug["top_two"] > bug["rounding"] > 0
    assert any(line.endswith(BUG) and f"token {bug['position']}" in line for line in verification.report_of(result))


def test_a_mask_that_shows_other_branches_is_found(target, heads, monkeypatch):
    monkeypatch.setattr(Tree, "ancestors", every_earlier_node)
    monkeypatch.setattr(route_module, "_why_no_tree", lambda *args: None)
    assert check(target, heads)["verdict"] == BUG


def test_a_run_without_accepted_drafts_says_so(target, monkeypatch):
    heads = CloverHeads.from_target(target)
    with torch.no_grad():
        heads.head_norm.weight.fill_(float("nan"))
    with pytest.warns(UserWarning, match="drafting is off"):
        result = check(target, heads, max_new_tokens=4)
    assert result["verdict"] == IDENTICAL
    assert list(verification.report_of(result))[-1].startswith("No draft was accepted")


# ---------------------------------------------------------------------- the verdict


def plain_of(target, new=12, **options):
    batch = ragged_batch(VOCABULARY, (5, 9))
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, **options}
    return batch, options, target.generate(**batch, **options)


def with_runner_up(target, batch, options, plain, row, step):
    """`plain` with the second best token in one place, and how much worse it was there."""
    scores = target.generate(**batch, **options, output_scores=True, return_dict_in_generate=True).scores[step][row]
    best = scores.topk(2)
    other = plain.clone()
    other[row, batch["input_ids"].shape[1] + step] = best.indices[1]
    return other, float(best.values[0] - best.values[1])


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}])
def test_the_margin_of_a_difference_is_that_of_plain_generates_scores(target, options):
    batch, options, plain = plain_of(target, **options)
    for row, step in ((0, 0), (1, 3), (0, 11)):
        other, margin = with_runner_up(target, batch, options, plain, row, step)
        (found,) = explain(target, batch, plain, other, options, first_prompt=10)
        assert (found.prompt, found.position, found.verdict) == (10 + row, step, BUG)
        assert found.margin == found.top_two == pytest.approx(margin, rel=1e-4)
        assert found.margin > found.rounding
    assert explain(target, batch, plain, plain, options) == []


def test_a_choice_between_two_equally_good_tokens_counts_as_rounding():
    target = build("llama", vocab_size=VOCABULARY)
    batch, options, plain = plain_of(target)
    token = int(plain[0, -1])
    twin = next(t for t in range(1, VOCABULARY) if t not in plain)
    with torch.no_grad():
        target.lm_head.weight[twin] = target.lm_head.weight[token]
    batch, options, plain = plain_of(target)
    place = (plain[0] == min(token, twin)).nonzero()[-1]
    other = plain.clone()
    other[0, place] = max(token, twin)
    (found,) = explain(target, batch, plain, other, options)
    assert (found.verdict, found.margin) == (NUMERICS, pytest.approx(0.0, abs=1e-5))


def test_a_text_that_ends_elsewhere_is_a_bug(target):
    batch, options, plain = plain_of(target)
    end = int(plain[0, -4])
    batch, options, plain = plain_of(target, eos_token_id=end)
    ended = (plain[0, 9:] == end).nonzero()[0] + 10
    longer = torch.nn.functional.pad(plain, (0, 1))
    longer[0, ended] = 5
    for its, mine in ((plain, longer), (longer, plain)):
        found = explain(target, batch, its, mine, options)
        assert [difference.prompt for difference in found] == [0]
    assert explain(target, batch, plain, longer, options)[0].verdict == BUG


@pytest.mark.parametrize("has_nan_scores", [False, True])
def test_a_target_that_does_not_repeat_itself_is_no_evidence_of_a_bug(has_nan_scores):
    target = build("llama", vocab_size=VOCABULARY)
    if has_nan_scores:
        torch.nn.init.constant_(target.lm_head.weight, torch.nan)
    batch, options, plain = plain_of(target)
    another = plain.clone()
    another[0, 12] = (another[0, 12] + 1) % VOCABULARY
    its, mine = (plain, another) if has_nan_scores else (another, plain)
    (found,) = explain(target, batch, its, mine, options)
    assert (found.verdict, found.margin) == (NUMERICS, None)


def test_measured_rounding_grows_as_the_targets_precision_falls():
    text = ragged_batch(VOCABULARY, (20,))["input_ids"][0]
    rounding = {
        dtype: rounding_after(build("llama", vocab_size=VOCABULARY, dtype=dtype), text)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    }
    found = list(rounding.values())
    assert found == sorted(found)
    assert 0 < found[0] < 1e-12 < found[1] < 1e-2 < found[3] < 4
    assert 0 < rounding_after(build("llama", vocab_size=VOCABULARY), text[:1]) < 1e-4, "one token has only its dtype"


def test_large_errors_of_multi_token_forwards_do_not_count_as_rounding():
    """What is not small against the spread of the logits is no rounding, however often it happens."""
    target = build("llama", vocab_size=VOCABULARY)
    text = ragged_batch(VOCABULARY, (20,))["input_ids"][0]
    honest = rounding_after(target, text)

    def shout(module, args, output):
        return output * 2 if 1 < output.shape[1] < 17 else output

    handle = target.model.layers[1].mlp.register_forward_hook(shout)
    try:
        assert rounding_after(target, text) <= 2 * honest
    finally:
        handle.remove()


# ---------------------------------------------------------------------- the command

SHORT = ["--num-prompts", "2", "--max-new-tokens", "12", "--nodes", "8", "--batch-size", "1", "2", "--tree", "global"]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("def f(x):\nfor a in b:\n", encoding="utf-8")
    return ["--prompts", str(path)]


def test_verify_prints_a_row_for_each_setting_and_its_verdict(run, models, prompts):
    said = run("verify", *models, *prompts, *SHORT)
    assert (said.code, len(said.out.splitlines())) == (0, 4)
    assert said.out.startswith("batch 1, 8 nodes, global tree: 2 identical, ")
    assert re.search(r"llama-\d+K, float32 on cpu, 2 prompts.txt prompts: identical\n$", said.out)
    result = json.loads(run("verify", *models, *prompts, *SHORT, "--json").out)
    assert (result["kind"], result["verdict"], len(result["rows"])) == ("verification", IDENTICAL, 2)
    assert result["rows"][0]["accepted_tokens"] > 0


def test_verify_exits_with_1_after_a_bug(run, models, prompts, monkeypatch):
    monkeypatch.setattr(Tree, "ancestors", every_earlier_node)
    monkeypatch.setattr(route_module, "_why_no_tree", lambda *args: None)
    said = run("verify", *models, *prompts, *SHORT, "--max-new-tokens", "40", "--json")
    assert said.code == 1
    assert json.loads(said.out)["verdict"] == BUG


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tree", "oak"], "`--tree oak` is unknown: pass global, levels or chain"),
        (["--cache", "offloaded"], "`--cache offloaded` is unknown: pass dynamic or static"),
        (["--nodes", "few"], "`--nodes few` is no tree size"),
        ([], "there are no heads to verify: pass `--heads`"),
    ],
)
def test_wrong_arguments_of_verify_are_refused(run, models, words, message):
    said = run("verify", *models[:2], *words)
    assert (said.code, said.out) == (2, "")
    assert message in said.err
