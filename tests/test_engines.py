"""What the vLLM plug-in refuses, without vLLM; `tests/in_vllm` runs it."""

from types import SimpleNamespace

import pytest

from hf_clover.engines.vllm_plugin import DraftConfig, check_heads, check_hooks, check_run
from hf_clover.engines.vllm_support import why_not
from hf_clover.hub.cards import render

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}


def run_of(tokens=4, drop=True, caching=True, method="mtp", **parallel):
    speculative = {"num_speculative_tokens": tokens, "disable_eagle_block_drop": not drop, "method": method}
    return SimpleNamespace(
        speculative_config=SimpleNamespace(**speculative),
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
    )


@pytest.mark.parametrize(("variant", "method"), [("clover-x", "mtp"), ("clover-2", "eagle3"), ("clover", "eagle3")])
def test_each_variant_runs_with_its_own_vllm_method_only(variant, method):
    config = DraftConfig(variant=variant, **SIZES)
    check_heads(config)
    check_run(config, run_of(tokens=config.draft_depth, method=method, tensor_parallel_size=2))
    check_run(config, run_of(tokens=2, drop=False, caching=False, method=method))
    assert config.model_type == ("mtp" if method == "mtp" else "clover")  # by "mtp" vLLM chooses that method itself
    other = {"mtp": "eagle3", "eagle3": "mtp"}[method]
    with pytest.raises(ValueError, match=f'method="{other}": {variant} heads read .* Put "method": "{method}" into'):
        check_run(config, run_of(method=other))


def test_cards_show_the_vllm_command_where_vllm_can_run_the_heads():
    """A saved config holds only what differs from a default. Cards of heads that vLLM refuses do not name vLLM."""
    saved = {"variant": "clover-x", "num_heads": 5, "target_name_or_path": "org/target"}
    card = str(render("heads", "org/heads", config=saved))
    command = 'vllm serve org/target --speculative-config \'{"model": "org/heads", "num_speculative_tokens": 4}\''
    assert command in card
    of_clover = str(render("heads", "org/heads", config=saved | {"variant": "clover", "num_heads": 3}))
    assert '{"method": "eagle3", "model": "org/heads", "num_speculative_tokens": 3}' in of_clover
    for other in (saved | {"variant": "medusa"}, saved | {"rope_parameters": {"rope_type": "longrope"}}):
        assert why_not(other) is not None
        assert "vllm" not in str(render("heads", "org/heads", config=other))
    assert "vllm" not in str(render("heads", "org/heads", subfolder="small", config=saved)), "it takes no subfolder"


def test_heads_that_vllm_cannot_run_are_refused():
    with pytest.raises(ValueError, match="these are medusa with augmenting_block='none' and regressive=True"):
        check_heads(DraftConfig(variant="medusa", **SIZES))
    with pytest.raises(ValueError, match="these are clover-x with augmenting_block='mlp' and regressive=True"):
        check_heads(DraftConfig(variant="clover-x", augmenting_block="mlp", recall=False, **SIZES))
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="rope_type='dynamic' changes as a text grows"):
        check_heads(DraftConfig(variant="clover-x", rope_parameters=rope, **SIZES))


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (run_of(tokens=9), "num_speculative_tokens=9 is more than these heads draft: 8"),
        (run_of(pipeline_parallel_size=2), "pipeline_parallel_size=2: "),
        (run_of(decode_context_parallel_size=2), "decode_context_parallel_size=2: "),
        (run_of(drop=False), "disable_eagle_block_drop=True: the last slot of a shared block"),
    ],
)
def test_vllm_settings_that_the_heads_cannot_serve_are_refused(run, problem):
    with pytest.raises(ValueError, match=problem):
        check_run(DraftConfig(variant="clover-x", **SIZES), run)


def test_a_vllm_without_the_hooks_is_refused():
    def propose():
        pass

    with pytest.raises(ImportError, match=r"does not call `set_skip_topk\(False\)`"):
        check_hooks(propose)
