"""What the vLLM plug-in refuses, without vLLM; `tests/vllm` runs it."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from hf_clover.engines.vllm_plugin import DraftConfig, check_heads, check_hooks, check_run
from hf_clover.engines.vllm_takes import why_not
from hf_clover.hub.cards import render

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}


def run_of(tokens=4, drop=True, caching=True, **parallel):
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=tokens, disable_eagle_block_drop=not drop),
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
    )


def test_what_can_be_drafted_with():
    config = DraftConfig(variant="clover-x", **SIZES)
    check_heads(config)
    check_run(config, run_of(tokens=config.draft_depth))
    check_run(config, run_of(drop=False, caching=False))
    assert (config.model_type, config.n_predict) == ("mtp", 1)


def test_cards_say_how_where_they_can():
    """Of what is saved, which holds what differs from a default, and of heads that vLLM refuses nothing."""
    saved = {"variant": "clover-x", "num_heads": 5, "target_name_or_path": "org/target"}
    card = str(render("heads", "org/heads", config=saved))
    command = 'vllm serve org/target --speculative-config \'{"model": "org/heads", "num_speculative_tokens": 4}\''
    assert command in card
    for other in (saved | {"variant": "clover-2"}, saved | {"rope_parameters": {"rope_type": "longrope"}}):
        assert why_not(other) is not None
        assert "vllm" not in str(render("heads", "org/heads", config=other))
    assert "vllm" not in str(render("heads", "org/heads", subfolder="small", config=saved)), "it takes no subfolder"


@pytest.mark.parametrize("variant", ["clover", "clover-2", "medusa"])
def test_other_variants_are_refused(variant):
    with pytest.raises(ValueError, match=f"vLLM drafts with clover-x heads, and these are {variant} with"):
        check_heads(DraftConfig(variant=variant, **SIZES))


def test_heads_that_differ_are_refused():
    with pytest.raises(ValueError, match="not with decoder_position='both' and augmenting_block='mlp'"):
        check_heads(DraftConfig(variant="clover-x", augmenting_block="mlp", recall=False, **SIZES))
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="rope_type='dynamic' changes as a text grows"):
        check_heads(DraftConfig(variant="clover-x", rope_parameters=rope, **SIZES))


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (run_of(tokens=9), "num_speculative_tokens=9 is more than these heads draft: 8"),
        (run_of(tensor_parallel_size=2), "tensor_parallel_size=2: "),
        (run_of(pipeline_parallel_size=2), "pipeline_parallel_size=2: "),
        (run_of(drop=False), "disable_eagle_block_drop=True: the last slot of a shared block"),
    ],
)
def test_runs_that_would_be_wrong_are_refused(run, problem):
    with pytest.raises(ValueError, match=problem):
        check_run(DraftConfig(variant="clover-x", **SIZES), run)


def test_a_vllm_without_the_hooks_is_refused():
    def propose():
        pass

    with pytest.raises(ImportError, match=r"does not call `set_skip_topk\(False\)`"):
        check_hooks(propose)


def test_importing_the_package_imports_no_engine():
    asks = "import sys, hf_clover; sys.exit(any(name.startswith('hf_clover.engines') for name in sys.modules))"
    subprocess.run([sys.executable, "-c", asks], check=True)
