"""The benchmark measures what it says: tokens, forwards, acceptance and differences; nothing here looks at a time."""

import json
from types import SimpleNamespace

import pytest
import torch
from helpers.fitting import fit
from transformers import LlamaConfig, LlamaForCausalLM

from hf_clover import CloverHeads, speculations
from hf_clover.measure.benchmark import Method, benchmark, measure, parse_method, plain, with_heads, write
from hf_clover.measure.prompts import Question

pytestmark = pytest.mark.long("hf_clover/decoding/record.py")

PROMPTS = [[1, 4, 2, 5, 3], [7, 3, 1], [2, 2, 9, 4]]
NEW = 12


TOKENIZER = SimpleNamespace(pad_token_id=0, eos_token_id=None)


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=24, pad_token_id=0, eos_token_id=None, bos_token_id=None, **shape))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.fixture(scope="module")
def heads(target):
    heads = CloverHeads.from_target(target)
    heads.bind(target)
    return fit(heads, target, temperature=0.5)  # near to the greedy text that it is measured on


def run(target, methods, **options):
    options = {"max_new_tokens": NEW, "repeats": 2, "progress": False, **options}
    return measure(target, TOKENIZER, methods, PROMPTS, **options)


def test_the_figures_of_a_row_are_those_of_its_generate_calls(target, heads):
    base, drafted = run(target, [plain(), with_heads(heads, nodes=8)])
    assert base["method"] == "plain"
    assert base["speedup"] == base["tokens_per_forward"] == base["efficiency"] == 1.0
    assert base["acceptance_by_depth"] == []
    tokens, forwards, by_depth = 0, 0, [0] * 10
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with speculations() as records:
            drafted_by = {"assistant_model": heads, "num_assistant_tokens": 8}
            target.generate(
                ids, attention_mask=torch.ones_like(ids), **drafted_by, max_new_tokens=NEW, do_sample=False
            )
        (record,) = records
        tokens, forwards = tokens + record.new_tokens, forwards + record.target_forwards
        for depth, count in enumerate(record.accepted_by_depth):
            by_depth[depth] += count
        assert sum(record.accepted_by_depth) == record.accepted_tokens > 0
    assert drafted["tokens_per_forward"] == pytest.approx(tokens / forwards)
    assert drafted["tokens_per_forward"] > 1.3, "drafts are accepted"
    trees = forwards - len(PROMPTS)
    wanted = [count / trees for count in by_depth if count]
    assert drafted["acceptance_by_depth"] == pytest.approx(wanted)
    assert drafted["efficiency"] == pytest.approx(drafted["speedup"] / drafted["tokens_per_forward"])
    assert drafted["identical"] is True
    assert min(drafted["seconds"].values()) > 0
    for row in (base, drafted):
        low, high = row["tokens_per_second_range"]
        assert 0 < low <= row["tokens_per_second"] <= high


def test_padded_batches_give_the_same_samples_with_heads_as_plain(target, heads):
    base, drafted = run(target, [plain(), with_heads(heads)], batch_size=2, temperature=0.8)
    assert (drafted["batch_size"], drafted["temperature"]) == (2, 0.8)
    assert drafted["identical"] is True
    assert drafted["tokens_per_forward"] > 1.1
    assert base["tokens_per_forward"] == 1.0


def test_a_trees_shape_is_set_for_its_method_only(target, heads):
    _, chain, tree = run(target, [plain(), with_heads(heads, nodes=4, tree="chain"), with_heads(heads, nodes=4)])
    assert heads.config.draft_tree == "global"
    assert (chain["tree"], tree["tree"]) == ("chain", None)
    assert chain["tokens_per_forward"] != tree["tokens_per_forward"]


def test_a_difference_is_reported_with_its_position_and_margin(target):
    """A method that picks otherwise: plain generate kept from its own third token."""
    ids = torch.tensor([PROMPTS[0]])
    third = target.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)[0, -1].item()
    base, other = run(target, [plain(), Method("other", {"suppress_tokens": [third]})])
    assert base["identical"] is True
    assert other["identical"] is False
    first = other["differences"][0]
    assert first["prompt"] == 0
    assert first["position"] <= 2
    assert first["margin"] > 0


def test_differences_between_samples_have_no_margin(target):
    half = Method("half", {"suppress_tokens": list(range(12))})
    _, other = run(target, [plain(), half], temperature=1.0)
    assert other["identical"] is False
    assert {difference["margin"] for difference in other["differences"]} == {None}


def test_a_method_that_cannot_run_is_skipped_with_the_reason(target, heads):
    lookup = parse_method("prompt-lookup", target)
    base, single = run(target, [plain(), lookup])
    assert single["skipped"] is None
    assert single["identical"] is True
    base, skipped = run(target, [plain(), lookup], batch_size=2)
    assert base["skipped"] is None
    assert "batch" in skipped["skipped"]
    assert "speedup" not in skipped
    _, sampled = run(target, [plain(), lookup], temperature=1.0)
    assert sampled["identical"] is None, "transformers promises the distribution, not the tokens"


def test_the_result_file_holds_command_machine_versions_and_a_row_per_run(target, heads, tmp_path):
    methods = [plain(), with_heads(heads, nodes=2), with_heads(heads, nodes=4)]
    options = {"batch_sizes": (1, 2), "max_new_tokens": 4, "repeats": 1, "progress": False}
    result = benchmark(target, TOKENIZER, methods, PROMPTS[:2], **options)
    read = json.loads(write(result, tmp_path / "deep" / "result.json").read_text())
    assert read == result
    assert {"command", "machine", "versions", "date", "dtype", "device", "repeats"} <= set(read)
    assert [(row["method"], row["nodes"], row["batch_size"]) for row in read["rows"]] == [
        (name, nodes, size) for size in (1, 2) for name, nodes in (("plain", None), ("clover-x", 2), ("clover-x", 4))
    ]


def test_saved_heads_and_a_saved_assistant_model_can_be_measured(target, heads, tmp_path):
    heads.save_pretrained(tmp_path / "heads")
    target.save_pretrained(tmp_path / "small")
    method = parse_method(f"mine:{tmp_path / 'heads'}", target)
    assert (method.name, method.heads.config.variant) == ("mine", "clover-x")
    assistant = parse_method(f"assistant:{tmp_path / 'small'}", target)
    assert assistant.heads is None
    _, mine, its = run(target, [plain(), method, assistant])
    assert mine["identical"]
    assert its["identical"]
    assert its["tokens_per_forward"] > 1.5, "the target agrees with itself"


def test_an_unknown_method_and_a_missing_baseline_are_refused(target, heads):
    message = r"`against='lookup'` is no method: it must be 'prompt-lookup', 'assistant:MODEL'"
    with pytest.raises(ValueError, match=message):
        parse_method("lookup", target)
    with pytest.raises(ValueError, match=r"`methods` must begin with `plain\(\)`"):
        run(target, [with_heads(heads)])


class Letters:
    """A token is a letter from `a` on; messages stand behind each other."""

    pad_token_id, eos_token_id, chat_template = 0, None, "any"

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(97 + i) for i in ids)

    def apply_chat_template(self, messages, enable_thinking=True, tokenize=True, **_):
        text = "".join(message["content"] for message in messages)
        if not tokenize:
            return text + ("<think>" if enable_thinking else "")
        return {"input_ids": [ord(letter) - 97 for letter in text]}


def question(number, category, *turns):
    return Question([[{"role": "user", "content": turn}] for turn in turns], category, number)


QUESTIONS = [question(7, "math", "bec", "hd"), question(8, "qa", "hdb"), question(9, "math", "cc", "je")]


def test_turns_are_one_conversation_and_categories_have_their_figures(target, heads):
    kept = []
    result = benchmark(
        target, Letters(), [plain(), with_heads(heads, nodes=8)], QUESTIONS, batch_sizes=(1, 2), max_new_tokens=NEW,
        repeats=1, progress=False, report=kept.append,
    )  # fmt: skip
    for row in result["rows"]:
        assert (row["questions"], list(row["categories"])) == (3, ["math", "qa"])
        assert row["turns"] == {1: 5, 2: 6}[row["batch_size"]]
        assert row["identical"]
        assert row["categories"]["math"]["identical"]
        assert row["prompt_tokens"]["max"] == 3 + NEW + 2, "the first turn and its answer are in the second's prompt"
        assert row["categories"]["qa"]["prompt_tokens"] == {"min": 3, "median": 3, "max": 3}
    forwards = 5 * NEW / result["rows"][1]["tokens_per_forward"]
    wanted = (5 * NEW - 5) / (forwards - 5)  # without the prompts' forwards and their tokens
    assert result["rows"][1]["mean_accepted_tokens"] == pytest.approx(wanted)
    assert result["rows"][0]["mean_accepted_tokens"] == 1
    assert result["rows"][1]["mean_accepted_tokens"] > 1.1, "drafts are accepted"
    assert (result["thinking"], result["chat_template"]) == (True, "QUESTION<think>")
    assert (result["is_whole"], [one["is_whole"] for one in kept]) == (True, [False] * 5)
    assert [kept[i]["rows"][0]["questions"] for i in range(3)] == [1, 2, 3], "a run that is broken off leaves these"


def test_prompts_that_do_not_fit_are_left_out(target, heads, caplog):
    long = question(10, "qa", "b" * 2030, "c")
    options = {"max_new_tokens": 10, "repeats": 1, "progress": False}
    result = benchmark(target, Letters(), [plain()], [*QUESTIONS, long], **options)
    assert result["left_out"] == [{"prompt": 3, "question": 10, "tokens": 2051}]
    assert "1 of 4 prompts are too long for the target's 2048 positions (up to 2051 tokens" in caplog.text
    message = r"1 of 1 prompts are too long .*: pass shorter ones, or fewer `max_new_tokens`"
    with pytest.raises(ValueError, match=message):
        benchmark(target, Letters(), [plain()], [long], **options)


def test_a_method_may_name_a_tree_size_and_a_tree_shape(target, heads):
    loaded = {"heads": heads, "folder": heads}
    chain = parse_method("heads@7-chain", target, loaded)
    assert (chain.name, chain.nodes, chain.tree, chain.heads) == ("clover-x", 7, "chain", heads)
    fixed = parse_method("mine@8:folder", target, loaded)
    assert (fixed.name, fixed.nodes, fixed.tree) == ("mine", 8, None)
    for bad in ("mine@few:folder", "mine@8-oak:folder", "mine@0:folder"):
        with pytest.raises(ValueError, match=f"`against='{bad}'`: after `@` heads take a number of nodes"):
            parse_method(bad, target, loaded)
