"""Beside other things that wrap models or `generate`: PEFT, compiled targets, threads, processes, other hooks."""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import tiny_text
from helpers.both_ways import NEW, both, same_tokens
from helpers.fitting import fit
from helpers.zoo import build, ragged_batch
from transformers import AutoModel, GenerationMixin, pipeline
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import hf_clover
from hf_clover import CloverHeads
from hf_clover.decoding.route import CloverWarning

VOCABULARY = 16


@pytest.fixture
def model():
    return build("llama", vocab_size=VOCABULARY)


@pytest.fixture
def inputs():
    return ragged_batch(VOCABULARY, (5, 9, 3))


def drafted_in_trees(model, heads, inputs):
    """Tokens that are plain generate's."""
    ours = same_tokens(model, heads, inputs)
    assert ours.speculation.method == "tree"
    return ours.sequences


def test_tokens_equal_plain_for_a_lora_wrapped_target(model, inputs):
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False))
    adapted = drafted_in_trees(wrapped, CloverHeads.from_target(wrapped), inputs)
    with wrapped.disable_adapter():
        unadapted = wrapped.generate(**inputs, max_new_tokens=NEW)
    assert not torch.equal(adapted, unadapted), "the adapter must matter"


def test_tokens_equal_plain_for_a_compiled_target(model, inputs):
    drafted_in_trees(torch.compile(model, backend="eager"), CloverHeads.from_target(model), inputs)


def test_a_target_that_checkpoints_gradients_falls_back_in_training_mode(model, inputs):
    """In training mode transformers keeps no cache for such a target; the tokens are plain generate's all the same."""
    heads = CloverHeads.from_target(model)
    model.gradient_checkpointing_enable()
    model.train()
    with pytest.warns(CloverWarning, match=r"keeps no cache in training mode; call `.eval\(\)` on the target"):
        plain, ours = both(model, heads, inputs)
    assert torch.equal(ours.sequences, plain.sequences)
    drafted_in_trees(model.eval(), heads, inputs)


def test_a_target_with_dropout_falls_back_in_training_mode_only(inputs):
    """A trial that fails in training mode does not count afterwards."""
    target = build("gpt2", vocab_size=VOCABULARY)
    for module in target.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    heads = CloverHeads.from_target(target)
    target.train()
    with pytest.warns(CloverWarning, match=r"in training mode, where dropout is random: call `.eval\(\)`"):
        target.generate(**inputs, max_new_tokens=NEW, assistant_model=heads)
    drafted_in_trees(target.eval(), heads, inputs)


@pytest.mark.parametrize("ids", [{}, {"pad_token_id": None}, {"eos_token_id": [1, 2]}], ids=str)
def test_a_pipeline_with_heads_gives_plain_text(tmp_path, ids):
    """A pipeline takes heads for a model with another tokenizer where their special tokens are not the target's."""
    target, tokenizer = tiny_text.make_target(), tiny_text.make_tokenizer()
    target.config.update(ids)
    prompt, settings = tiny_text.PROMPT, {"max_new_tokens": NEW, "do_sample": False}
    heads = CloverHeads.from_target(target, num_heads=3)
    fit(heads, target, prompt=tokenizer(prompt, return_tensors="pt").input_ids)
    heads.save_pretrained(tmp_path)
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)(prompt, **settings)
    with hf_clover.speculations() as seen:
        for assistant in (heads, AutoModel.from_pretrained(tmp_path)):
            ours = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=assistant)
            assert ours(prompt, **settings) == plain
    assert [stats.method for stats in seen] == ["tree", "tree"]
    assert all(stats.accepted_tokens > 0 for stats in seen)


def test_heads_loaded_as_remote_code_give_plain_tokens(model, inputs, tmp_path):
    CloverHeads.from_target(model).save_pretrained(tmp_path)
    heads = get_class_from_dynamic_module("modeling_clover.CloverHeads", str(tmp_path)).from_pretrained(tmp_path)
    assert not isinstance(heads, CloverHeads)
    drafted_in_trees(model, heads, inputs)
    assert type(AutoModel.from_pretrained(tmp_path)) is CloverHeads, "with the package imported its own class is used"


def test_threads_that_share_a_target_get_plain_tokens(model):
    heads = [CloverHeads.from_target(model), CloverHeads.from_target(model, variant="medusa")]
    prompts = [ragged_batch(VOCABULARY, (4 + k % 3, 7), seed=k) for k in range(6)]
    plain = [model.generate(**prompt, max_new_tokens=NEW) for prompt in prompts]

    def speak(k):
        options = {"assistant_model": heads[k % 2], "num_assistant_tokens": 30, "return_dict_in_generate": True}
        return model.generate(**prompts[k], max_new_tokens=NEW, **options)

    with ThreadPoolExecutor(6) as threads:
        said = [*threads.map(speak, range(6))]
    assert all(torch.equal(out.sequences, text) for out, text in zip(said, plain, strict=True))
    assert all(out.speculation.accepted_tokens > 0 for out in said)


def test_a_later_wrapper_of_another_library_keeps_working(model, inputs):
    """Its wrapper stays when ours is taken away, and ours passes everything through until it is installed again."""
    ours, calls = GenerationMixin.generate, []

    @functools.wraps(ours)
    def theirs(self, *args, **kwargs):
        calls.append(kwargs.get("assistant_model"))
        return ours(self, *args, **kwargs)

    GenerationMixin.generate, heads = theirs, CloverHeads.from_target(model)
    try:
        hf_clover.uninstall_hook()
        assert GenerationMixin.generate is theirs
        lookup = model.generate(inputs["input_ids"][1:2], prompt_lookup_num_tokens=2, max_new_tokens=5)
        assert lookup.shape[1] == inputs["input_ids"].shape[1] + 5
        hf_clover.install_hook()
        drafted_in_trees(model, heads, inputs)
        assert calls == [None, None, heads], "the lookup, plain generate, and ours"
    finally:
        GenerationMixin.generate = ours
        hf_clover.install_hook()
