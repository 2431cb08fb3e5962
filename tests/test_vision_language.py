"""Images in the prompt, text drafted after them: tiny random models of the kinds people use, made from configurations.

Processors are left out: pixels are random numbers, and the prompt's image tokens stand where a processor would put
them. Weights are redrawn as in zoo.py, so that what is said depends on the image, which a test asks for.
"""

import warnings

import pytest
import torch
import transformers
from helpers.fitting import fit
from helpers.oracle import planted
from helpers.zoo import LLAMA, SLIDING, Case, redraw
from transformers import AutoModelForImageTextToText, DynamicCache

from hf_clover import CloverHeads
from hf_clover.decoding.route import CloverWarning
from hf_clover.targets.private_api import cache_name

pytestmark = pytest.mark.long("hf_clover/origins", "hf_clover/decoding/entry.py")

VOCABULARY, NEW = 40, 24
IMAGE, START, END = 39, 38, 37  # tokens of an image, and around it
PATCHES = 4  # tokens that an image takes

IDS = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
TEXT = LLAMA | IDS | dict(vocab_size=VOCABULARY, head_dim=16)
MROPE = dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 3, 3])
TOWER = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
TOWER |= dict(image_size=16, patch_size=8)
QWEN = dict(depth=2, num_heads=4, patch_size=4, temporal_patch_size=2, spatial_merge_size=2, in_channels=3)
QWEN_IDS = dict(image_token_id=IMAGE, video_token_id=36, vision_start_token_id=START, vision_end_token_id=END)
UNTIED = dict(tie_word_embeddings=False)
LONGER = TEXT | SLIDING | dict(num_hidden_layers=4, query_pre_attn_scalar=16)

CONFIGS = {
    "llava": ("LlavaConfig", dict(vision_config=TOWER | dict(model_type="clip_vision_model"))
              | dict(text_config=TEXT | dict(model_type="llama"), image_token_index=IMAGE, image_token_id=IMAGE)),
    "qwen2_vl": ("Qwen2VLConfig", dict(text_config=TEXT | dict(rope_parameters=MROPE), **QWEN_IDS)
                 | dict(vision_config=QWEN | dict(embed_dim=32, hidden_size=64, mlp_ratio=2))),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", dict(text_config=TEXT | dict(rope_parameters=MROPE), **QWEN_IDS)
                   | dict(vision_config=QWEN | dict(hidden_size=32, intermediate_size=48, out_hidden_size=64,
                                                    window_size=16, fullatt_block_indexes=[1]))),
    "qwen3_vl": ("Qwen3VLConfig", dict(text_config=TEXT | dict(rope_parameters=MROPE), **QWEN_IDS)
                 | dict(vision_config=QWEN | dict(hidden_size=32, intermediate_size=48, out_hidden_size=64,
                                                  num_position_embeddings=16, deepstack_visual_indexes=[0, 1]))),
    "gemma3": ("Gemma3Config", dict(vision_config=TOWER, text_config=LONGER, mm_tokens_per_image=PATCHES)
               | dict(image_token_index=IMAGE, image_token_id=IMAGE, boi_token_index=START, eoi_token_index=END)),
}  # fmt: skip
GAINS = {"gemma3": dict(gain=1.5, logit_gain=0.5, norm_shift=3.0)}


def build(name):
    class_name, fields = CONFIGS[name]
    if not hasattr(transformers, class_name):
        pytest.skip(f"this transformers has no {class_name}")
    config = getattr(transformers, class_name)(**IDS, **UNTIED, **fields)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        redraw(model, Case(name, class_name, fields, **GAINS.get(name, {})), torch.Generator().manual_seed(0))
    model.generation_config.update(**IDS, do_sample=False)
    return model.eval()


def prompt_of(name, lengths=(6,), seed=0):
    """Rows of text, an image in each, padded on the left; `lengths`: tokens after the image."""
    random = torch.Generator().manual_seed(seed)
    image = [START, *[IMAGE] * PATCHES, END]
    rows = [[3, *image, *torch.randint(1, 30, (length,), generator=random).tolist()] for length in lengths]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    inputs = {"input_ids": ids, "attention_mask": mask}
    if name.startswith("qwen"):
        inputs["pixel_values"] = torch.randn(16 * len(rows), 3 * 2 * 4 * 4, generator=random)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * len(rows))
        inputs["mm_token_type_ids"] = (ids == IMAGE).long()
    else:
        inputs["pixel_values"] = torch.randn(len(rows), 3, 16, 16, generator=random)
    if name == "gemma3":
        inputs["token_type_ids"] = (ids == IMAGE).long()
    return inputs


def exactly(model, heads, inputs, seed=0, **options):
    """Plain generate's text, and what ours did for the same."""
    options = {"max_new_tokens": NEW, "return_dict_in_generate": True, **options}
    torch.manual_seed(seed)
    plain = model.generate(**inputs, **options)
    torch.manual_seed(seed)
    with planted(heads, plain.sequences, inputs["input_ids"].shape[1], seed), warnings.catch_warnings():
        warnings.simplefilter("error", CloverWarning)  # no fallback
        ours = model.generate(**inputs, **options, assistant_model=heads, num_assistant_tokens=6)
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.speculation.method == "tree"
    assert ours.speculation.accepted_tokens > NEW // 4, "a test that accepts nothing proves nothing"
    return plain, ours


@pytest.mark.parametrize("name", CONFIGS)
def test_text_after_an_image_equals_plain_with_planted_drafts(name):
    """One row and a padded batch, greedy and sampled."""
    model = build(name)
    heads = CloverHeads.from_target(model)
    for lengths in ((6,), (5, 9, 3)):
        inputs = prompt_of(name, lengths)
        plain, _ = exactly(model, heads, inputs)
        exactly(model, heads, inputs, seed=1, do_sample=True, temperature=0.8)
    other = {**inputs, "pixel_values": -inputs["pixel_values"]}
    assert not torch.equal(model.generate(**other, max_new_tokens=NEW), plain.sequences), "the image is looked at"


@pytest.mark.parametrize("name", CONFIGS)
def test_drafts_of_fitted_heads_after_an_image_are_accepted(name):
    model = build(name)
    heads = fit(CloverHeads.from_target(model), model, steps=30)
    inputs, options = prompt_of(name, (5, 9)), {"max_new_tokens": NEW, "do_sample": True, "top_k": 5}
    torch.manual_seed(2)
    plain = model.generate(**inputs, **options)
    torch.manual_seed(2)
    out = model.generate(
        **inputs, **options, assistant_model=heads, num_assistant_tokens=40, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, plain)
    assert out.speculation.accepted_tokens > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_a_second_turn_after_an_image_equals_plain(name):
    """The image is in the first turn; the second goes on from its cache."""
    model = build(name)
    heads, inputs = CloverHeads.from_target(model), prompt_of(name)
    images = {k: v for k, v in inputs.items() if k not in ("input_ids", "attention_mask")}

    accepted = 0

    def talk(truth=None):
        nonlocal accepted
        cache, ids, said = DynamicCache(config=model.config.get_text_config()), inputs["input_ids"], []
        kinds = [k for k in images if k.endswith("token_type_ids")]
        for turn in range(2):
            given = images if turn == 0 else {}
            given = {k: v for k, v in given.items() if k not in kinds}
            types = {k: torch.nn.functional.pad(images[k], (0, ids.shape[1] - images[k].shape[1])) for k in kinds}
            options = {"max_new_tokens": 10, cache_name(): cache, "attention_mask": torch.ones_like(ids)}
            if truth is None:
                ids = model.generate(input_ids=ids, **options, **given, **types)
            else:
                with planted(heads, truth[turn], ids.shape[1], turn):
                    out = model.generate(
                        input_ids=ids,
                        **options,
                        **given,
                        **types,
                        assistant_model=heads,
                        num_assistant_tokens=6,
                        return_dict_in_generate=True,
                    )
                accepted += out.speculation.accepted_tokens
                ids = out.sequences
            said.append(ids)
            ids = torch.cat((ids, torch.tensor([[7, 8, 9]])), dim=1)
        return said

    plain = talk()
    assert all(torch.equal(a, b) for a, b in zip(plain, talk(plain), strict=True))
    assert accepted > 0
