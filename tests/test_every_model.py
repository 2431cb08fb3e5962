"""Every type of causal language model in transformers is decoded as `examples/compatibility/README.md` says."""

import contextlib
import sys
from pathlib import Path

import pytest
import transformers
from helpers.wrong_mask import every_earlier_node
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "compatibility"))

import small_configs
import walk

from hf_clover.decoding import route as route_module
from hf_clover.decoding.tree import Tree

VERSION, ROWS = walk.read_table()
HOW_TO = "if that is right, `python examples/compatibility/walk.py` writes the table anew"


@pytest.mark.long("hf_clover/decoding/route.py", "hf_clover/targets/private_api.py", "examples/compatibility")
@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_model_type_is_decoded_as_the_table_says(model_type):
    row = walk.examine(model_type)
    assert row.result != walk.WRONG, row.reason
    if transformers.__version__ == VERSION:  # another may have other types, and decode them in other ways
        assert row == ROWS[model_type], HOW_TO


@pytest.mark.skipif(transformers.__version__ != VERSION, reason=f"the table is of transformers {VERSION}")
def test_the_table_has_every_model_type():
    assert set(ROWS) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), HOW_TO


def test_at_least_60_model_types_are_exact_with_a_tree():
    results = [row.result for row in ROWS.values()]
    assert results.count(walk.TREE) >= 60
    assert walk.WRONG not in results
    assert all(row.reason for row in ROWS.values() if row.result != walk.TREE)


LONG = dict(short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[2.0, 3.0, 4.0, 5.0], factor=6.4)
LONGROPE = dict(rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=20, **LONG)
DYNAMIC = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)


@pytest.mark.parametrize(
    ("model_type", "fields", "result", "longer"),
    [
        ("llama", dict(rope_parameters=DYNAMIC, max_position_embeddings=20), walk.PLAIN, 0),
        ("llama", dict(rope_parameters=DYNAMIC, max_position_embeddings=100), walk.TREE, 0),
        ("llama", dict(rope_parameters=LONGROPE), walk.PLAIN, 0),
        ("llama", dict(rope_parameters=LONGROPE), walk.TREE, 20),
        ("phi3", dict(rope_parameters=LONGROPE, original_max_position_embeddings=20), walk.PLAIN, 0),
        ("phi3", dict(rope_parameters=LONGROPE, original_max_position_embeddings=20), walk.TREE, 20),
        ("phi3", dict(original_max_position_embeddings=20), walk.PLAIN, 0),
        ("moshi", dict(sliding_window=20), walk.PLAIN, 0),
        ("moshi", dict(sliding_window=40), walk.TREE, 0),
    ],
)
def test_drafting_stops_only_across_a_change_of_positions(model_type, fields, result, longer, monkeypatch):
    """A text that grows past such a length is continued one token at a time; beyond it, and below, trees are exact."""
    monkeypatch.setitem(small_configs.OVERRIDES, model_type, fields)
    for name in ("ALONE", "SHORT", "PADDED"):
        monkeypatch.setattr(walk, name, tuple(length + longer for length in getattr(walk, name)))
    row = walk.examine(model_type)
    assert row.result == result, row.reason


@pytest.fixture
def no_trial(monkeypatch):
    """A trial tree would notice, and fall back."""
    monkeypatch.setattr(route_module, "_why_no_tree", lambda *args: None)


@pytest.mark.parametrize("model_type", ["llama", "gemma3n_text"])
def test_the_compatibility_check_notices_a_wrong_mask(model_type, no_trial, monkeypatch):
    monkeypatch.setattr(Tree, "ancestors", every_earlier_node)
    assert walk.examine(model_type).result == walk.WRONG


@pytest.mark.parametrize("model_type", ["gpt_neo", "bloom"])
def test_the_compatibility_check_notices_a_target_that_cannot_verify_a_tree(model_type, no_trial):
    assert ROWS[model_type].result == walk.CHAIN
    assert walk.examine(model_type).result == walk.WRONG


@pytest.mark.parametrize(("model_type", "result"), [("llama", walk.TREE), ("lfm2", walk.CHAIN)])
def test_the_compatibility_check_notices_drafts_that_are_not_accepted(model_type, result, monkeypatch):
    assert ROWS[model_type].result == result
    monkeypatch.setattr(walk, "planted", lambda *_: contextlib.nullcontext())
    row = walk.examine(model_type)
    assert row.result == walk.WRONG
    assert row.reason.endswith("right drafts were not accepted")
