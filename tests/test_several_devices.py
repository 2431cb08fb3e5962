"""A target spread by `device_map`: the same tokens, with heads that are whole where the target ends.

There is one kind of device here, so what moves is the weights: parts that accelerate keeps on the disk or in memory
and brings to the device for every forward. Its hooks are the ones that a target on several GPUs has.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from helpers.tiny_text import ASCII, END, PAD, PROMPT, make_tokenizer, save_folders
from transformers import AutoModelForCausalLM

from hf_clover import CloverHeads

pytestmark = pytest.mark.long(
    "hf_clover/targets", "hf_clover/origins", "hf_clover/network", "hf_clover/decoding/draft/session.py"
)

PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folders(tmp_path_factory.mktemp("devices"), says=ASCII)


@pytest.fixture(scope="module")
def target(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "target")


def said(target: Any, heads: Any, texts: tuple[str, ...] = (PROMPT,), **options: Any) -> Any:
    torch.manual_seed(3)
    tokenizer = make_tokenizer()
    tokenizer.padding_side = "left"
    inputs = tokenizer(list(texts), return_tensors="pt", padding=True)
    options = {"max_new_tokens": 24, "pad_token_id": PAD, "eos_token_id": END, **options}
    return target.generate(**inputs, assistant_model=heads, return_dict_in_generate=True, **options)


def on_disk(folder: Path, *elsewhere: str) -> Any:
    device_map = {part: "disk" if part in elsewhere else "cpu" for part in PARTS}
    return AutoModelForCausalLM.from_pretrained(
        folder / "target", device_map=device_map, offload_folder=folder / "offloaded"
    )


@pytest.mark.parametrize("options", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "elsewhere",
    [("model.layers.1",), ("model.norm", "lm_head"), ("model.embed_tokens", "model.layers.0"), PARTS[:-1]],
    ids=["a layer", "the end", "the beginning", "all but the end"],
)
def test_parts_on_disk_give_plain_tokens(elsewhere: tuple[str, ...], options: dict, folder: Path, target: Any) -> None:
    spread = on_disk(folder, *elsewhere)
    assert any(parameter.is_meta for parameter in spread.parameters())
    heads = CloverHeads.from_pretrained(folder / "heads")
    plain, out = said(target, None, **options), said(spread, heads, **options)
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert out.speculation.method == "tree"
    assert out.speculation.accepted_tokens > 2


def test_a_padded_batch_equals_plain_with_parts_on_disk(folder: Path, target: Any) -> None:
    texts = (PROMPT, "a", "for x in")
    heads = CloverHeads.from_pretrained(folder / "heads")
    plain, out = said(target, None, texts), said(on_disk(folder, "model.layers.0", "lm_head"), heads, texts)
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert out.speculation.accepted_tokens > 2


def test_heads_borrow_offloaded_parts_as_whole_copies(folder: Path, target: Any) -> None:
    heads = CloverHeads.from_pretrained(folder / "heads")
    spread = on_disk(folder, "model.norm", "lm_head")
    heads.bind(spread)
    borrowed = heads.borrowed
    assert borrowed.lm_head is not spread.lm_head
    assert torch.equal(borrowed.lm_head.weight, target.lm_head.weight)
    assert torch.equal(borrowed.embedding, target.model.embed_tokens.weight)
    assert torch.equal(borrowed.norm.weight, target.model.norm.weight)
    assert spread.lm_head.weight.is_meta  # as it was
    x = torch.randn(2, 32)
    assert torch.equal(borrowed.lm_head(x), target.lm_head(x))
    lent = borrowed.lm_head
    heads.bind(spread)
    assert heads.borrowed.lm_head is lent  # not fetched again


def test_heads_borrow_parts_on_their_device_without_a_copy(folder: Path, target: Any) -> None:
    heads = CloverHeads.from_pretrained(folder / "heads")
    heads.bind(target)
    assert heads.borrowed.lm_head is target.lm_head
    assert heads.borrowed.norm is target.model.norm


def test_a_draft_vocabulary_works_over_an_offloaded_lm_head(folder: Path, target: Any) -> None:
    heads = CloverHeads.from_target(target, num_heads=3, draft_vocab_size=20)
    plain, out = said(target, None), said(on_disk(folder, "lm_head"), heads)
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert torch.equal(heads.borrowed.draft_rows[0], target.lm_head.weight[:20])


def test_tokens_equal_plain_with_weights_offloaded_to_memory(folder: Path, target: Any) -> None:
    spread = cpu_offload(AutoModelForCausalLM.from_pretrained(folder / "target"), execution_device=torch.device("cpu"))
    spread.hf_device_map = {"": "cpu"}
    heads = CloverHeads.from_pretrained(folder / "heads")
    plain, out = said(target, None), said(spread, heads)
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert out.speculation.accepted_tokens > 2


def test_tokens_equal_plain_for_a_target_dispatched_without_offloading(folder: Path, target: Any) -> None:
    spread = AutoModelForCausalLM.from_pretrained(folder / "target")
    spread = dispatch_model(spread, dict.fromkeys(PARTS, "cpu"), main_device="cpu", force_hooks=True)
    heads = CloverHeads.from_pretrained(folder / "heads")
    plain, out = said(target, None), said(spread, heads)
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert out.speculation.accepted_tokens > 2
