"""Beside other things that wrap models or `generate`: PEFT, compiled targets, threads, processes, other hooks."""

import functools
import threading

import pytest
import torch
import torch.distributed as dist
from helpers import tiny_text
from helpers.fitting import fit
from helpers.oracle import planted
from helpers.zoo import build, ragged_batch
from transformers import AutoModel, GenerationMixin, pipeline

import hf_clover
from hf_clover import CloverHeads
from hf_clover.decoding.route import CloverWarning

VOCABULARY, NEW = 16, 30


@pytest.fixture
def model():
    return build("llama", vocab_size=VOCABULARY)


@pytest.fixture
def inputs():
    return ragged_batch(VOCABULARY, (5, 9, 3))


def speculated(model, heads, inputs, truth):
    with planted(heads, truth, inputs["input_ids"].shape[1]):
        out = model.generate(**inputs, max_new_tokens=NEW, assistant_model=heads, return_dict_in_generate=True)
    assert out.speculation.method == "tree"
    assert out.speculation.accepted_tokens > 0
    return out.sequences


def test_tokens_equal_plain_for_a_lora_wrapped_target(model, inputs):
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False))
    heads = CloverHeads.from_target(wrapped)
    plain = wrapped.generate(**inputs, max_new_tokens=NEW)
    assert torch.equal(speculated(wrapped, heads, inputs, plain), plain)
    with wrapped.disable_adapter():
        unadapted = wrapped.generate(**inputs, max_new_tokens=NEW)
    assert not torch.equal(plain, unadapted), "the adapter must matter"


def test_tokens_equal_plain_for_a_compiled_target(model, inputs):
    heads, plain = CloverHeads.from_target(model), model.generate(**inputs, max_new_tokens=NEW)
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(speculated(compiled, heads, inputs, plain), plain)


def test_a_target_that_checkpoints_gradients_falls_back_in_training_mode(model, inputs):
    """In training mode transformers keeps no cache for such a target; the tokens are plain generate's all the same."""
    heads, text = CloverHeads.from_target(model), model.generate(**inputs, max_new_tokens=NEW)
    model.gradient_checkpointing_enable()
    model.train()
    with pytest.warns(CloverWarning, match=r"keeps no cache in training mode; call `.eval\(\)` on the target"):
        ours = model.generate(**inputs, max_new_tokens=NEW, assistant_model=heads)
    assert torch.equal(ours, model.generate(**inputs, max_new_tokens=NEW))
    model.eval()
    assert torch.equal(speculated(model, heads, inputs, text), text)


def test_a_target_with_dropout_falls_back_in_training_mode_only(inputs):
    """A trial that fails in training mode does not count afterwards."""
    target = build("gpt2", vocab_size=VOCABULARY)
    for module in target.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    heads, text = CloverHeads.from_target(target), target.generate(**inputs, max_new_tokens=NEW)
    target.train()
    with pytest.warns(CloverWarning, match=r"in training mode, where dropout is random: call `.eval\(\)`"):
        target.generate(**inputs, max_new_tokens=NEW, assistant_model=heads)
    target.eval()
    assert torch.equal(speculated(target, heads, inputs, text), text)


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


def test_heads_loaded_as_remote_code_give_plain_tokens(model, inputs, tmp_path, monkeypatch):
    CloverHeads.from_target(model).save_pretrained(tmp_path)
    plain = model.generate(**inputs, max_new_tokens=NEW)
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    theirs = get_class_from_dynamic_module("modeling_clover.CloverHeads", str(tmp_path))
    heads = theirs.from_pretrained(tmp_path)
    assert not isinstance(heads, CloverHeads)
    assert torch.equal(speculated(model, heads, inputs, plain), plain)
    assert type(AutoModel.from_pretrained(tmp_path)) is CloverHeads, "with the package imported its own class is used"


def test_threads_that_share_a_target_get_plain_tokens(model):
    heads = [CloverHeads.from_target(model), CloverHeads.from_target(model, variant="medusa")]
    prompts = [ragged_batch(VOCABULARY, (4 + k % 3, 7), seed=k) for k in range(6)]
    plain = [model.generate(**prompt, max_new_tokens=NEW) for prompt in prompts]
    said = {}

    def speak(k):
        out = model.generate(
            **prompts[k],
            max_new_tokens=NEW,
            assistant_model=heads[k % 2],
            num_assistant_tokens=30,
            return_dict_in_generate=True,
        )
        said[k] = out.sequences, out.speculation.accepted_tokens

    threads = [threading.Thread(target=speak, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(said[k][0], plain[k]) for k in range(6))
    assert all(said[k][1] > 0 for k in range(6))


def _company(rank: int, store: str, results: dict) -> None:
    """Two processes with texts of different lengths: the first must keep the second company to the end."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = build("llama", vocab_size=VOCABULARY)
    heads, inputs = CloverHeads.from_target(model), ragged_batch(VOCABULARY, (5, 9, 3))
    forwards = [0]
    model.register_forward_pre_hook(lambda *_: forwards.__setitem__(0, forwards[0] + 1))
    model.generate(**inputs, max_new_tokens=2, assistant_model=heads)  # so that the target has been measured
    forwards[0] = 0
    out = model.generate(**inputs, max_new_tokens=(4, 24)[rank], assistant_model=heads, synced_gpus=True)
    results[rank] = out.tolist(), forwards[0]
    dist.destroy_process_group()


def test_synced_gpus_runs_as_many_forwards_in_every_process(model, inputs, tmp_path):
    plain = model.generate(**inputs, max_new_tokens=24)
    context = torch.multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(_company, args=(str(tmp_path / "store"), results), nprocs=2)
        (short, short_forwards), (long, long_forwards) = results[0], results[1]
    width = inputs["input_ids"].shape[1]
    assert torch.equal(torch.tensor(long), plain)
    assert torch.equal(torch.tensor(short), plain[:, : width + 4])
    assert short_forwards == long_forwards, "every process must run as many forwards as any other"


def test_a_later_wrapper_of_another_library_keeps_working(model, inputs):
    """Its wrapper stays when ours is taken away, and ours passes everything through until it is installed again."""
    heads, plain = CloverHeads.from_target(model), model.generate(**inputs, max_new_tokens=NEW)
    ours, calls = GenerationMixin.generate, []

    @functools.wraps(ours)
    def theirs(self, *args, **kwargs):
        calls.append(1)
        return ours(self, *args, **kwargs)

    GenerationMixin.generate = theirs
    try:
        hf_clover.uninstall_hook()
        assert GenerationMixin.generate is theirs
        lookup = model.generate(inputs["input_ids"][1:2], prompt_lookup_num_tokens=2, max_new_tokens=5)
        assert lookup.shape[1] == inputs["input_ids"].shape[1] + 5
        hf_clover.install_hook()
        assert torch.equal(speculated(model, heads, inputs, plain), plain)
        assert len(calls) == 2
    finally:
        GenerationMixin.generate = ours
        hf_clover.install_hook()
