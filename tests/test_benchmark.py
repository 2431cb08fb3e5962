"""The benchmark measures what it says: tokens, forwards, acceptance and differences; nothing here looks at a time."""

import json

import pytest
import torch
from fitting import fit
from transformers import LlamaConfig, LlamaForCausalLM

from hf_clover import CloverHeads, speculations
from hf_clover.benchmark import Method, benchmark, measure, parse_method, plain, with_heads, write

PROMPTS = [[1, 4, 2, 5, 3], [7, 3, 1], [2, 2, 9, 4]]
NEW = 12


class Tokenizer:
    pad_token_id, eos_token_id = 0, None


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
    return measure(target, Tokenizer(), methods, PROMPTS, **options)


def test_every_figure_is_that_of_the_generation(target, heads):
    base, drafted = run(target, [plain(), with_heads(heads, nodes=8)])
    assert base["method"] == "plain"
    assert base["speedup"] == base["tokens_per_forward"] == base["efficiency"] == 1.0
    assert base["acceptance_by_depth"] == []
    tokens, forwards, by_depth = 0, 0, [0] * 10
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with speculations() as records:
            target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=heads,
                num_assistant_tokens=8,
                max_new_tokens=NEW,
                do_sample=False,
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


def test_batches_are_padded_and_filled(target, heads):
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


def test_other_tokens_are_found_with_their_margin(target):
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


def test_what_cannot_run_says_why(target, heads):
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


def test_the_result_says_where_it_comes_from(target, heads, tmp_path):
    methods = [plain(), with_heads(heads, nodes=2), with_heads(heads, nodes=4)]
    result = benchmark(
        target, Tokenizer(), methods, PROMPTS[:2], batch_sizes=(1, 2), max_new_tokens=4, repeats=1, progress=False
    )
    read = json.loads(write(result, tmp_path / "deep" / "result.json").read_text())
    assert read == result
    assert {"command", "machine", "versions", "date", "dtype", "device", "repeats"} <= set(read)
    assert [(row["method"], row["nodes"], row["batch_size"]) for row in read["rows"]] == [
        (name, nodes, size) for size in (1, 2) for name, nodes in (("plain", None), ("clover-x", 2), ("clover-x", 4))
    ]


def test_saved_heads_and_models_are_methods(target, heads, tmp_path):
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


def test_bad_methods_are_refused(target, heads):
    with pytest.raises(
        ValueError, match=r"`against='lookup'` is no method: it must be 'prompt-lookup', 'assistant:MODEL'"
    ):
        parse_method("lookup", target)
    with pytest.raises(ValueError, match=r"`methods` must begin with `plain\(\)`"):
        run(target, [with_heads(heads)])
