"""The plug-in that vLLM calls in each of its processes, more than once (entry point `vllm.general_plugins`).

Contract: after `register()`, `speculative_config` accepts a folder of heads as a model. In vLLM only one check of
requests is changed, and only where vLLM samples wrongly. The network is in `vllm_model`, which vLLM imports when it
needs it. The checks in this file read configurations and need no vLLM.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ..network.configuration_clover import CloverConfig
from .vllm_support import method_of, why_not

HOOKS = ("set_skip_topk(False)", "set_skip_topk(True)", "compact_topk_indices(token_indices_to_sample)")


class DraftConfig(CloverConfig):
    """A `CloverConfig` in the form that vLLM expects of a model that drafts one token per pass from the target's
    states."""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if method_of(self.to_dict()) == "mtp":
            # With these fields vLLM chooses the method mtp by itself; eagle3 has to be asked for.
            self.model_type = "mtp"  # type: ignore[misc]
            self.num_nextn_predict_layers = self.n_predict = 1
        self.index_share_for_mtp_iteration = True  # makes the proposer say which pass of a draft it runs

    def to_dict(self) -> dict[str, Any]:
        """Without `decoder`: vLLM copies this dictionary into another configuration, where transformers would take the
        field for a nested config."""
        return {name: value for name, value in super().to_dict().items() if name != "decoder"}


def register() -> None:
    from vllm import ModelRegistry
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    _CONFIG_REGISTRY[CloverConfig.model_type] = DraftConfig
    ModelRegistry.register_model("CloverHeads", "hf_clover.engines.vllm_model:CloverDraft")
    ModelRegistry.register_model("Eagle3CloverHeads", "hf_clover.engines.vllm_eagle3:CloverEagle3")  # vLLM's prefix
    _refuse_sampling_where_it_is_wrong()


def _refuse_sampling_where_it_is_wrong() -> None:
    """Refuse requests with a temperature where this vLLM samples wrongly, after vLLM's own check of requests.

    On a CPU, vLLM 0.32.0 writes the temperatures of drafted tokens to a copy that it drops, and then divides logits by
    arbitrary memory. This affects any kind of drafts (docs/vllm.md)."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError  # vLLM's server answers it with status 400
    from vllm.platforms import current_platform

    checked = SamplingParams._validate_spec_decode
    if not current_platform.is_cpu() or hasattr(checked, "__wrapped__"):
        return
    from vllm.utils import cpu_triton_utils

    if "copy_(" in inspect.getsource(cpu_triton_utils._expand_kernel_impl):
        return

    @functools.wraps(checked)
    def check(self: SamplingParams, speculative_config: Any) -> None:
        checked(self, speculative_config)
        draft = getattr(speculative_config, "draft_model_config", None)
        config = getattr(draft, "hf_config", None)
        if self.temperature > 0 and isinstance(getattr(config, "model", config), DraftConfig):
            raise VLLMValidationError(
                f"temperature={self.temperature}: on a CPU this vLLM samples wrongly wherever tokens are drafted "
                "(its kernel that spreads temperatures returns nothing). Ask for temperature=0, or leave "
                "`speculative_config` out."
            )

    SamplingParams._validate_spec_decode = check


def check_hooks(propose: Callable) -> None:
    """Raise unless vLLM's proposer says which pass of a draft it runs."""
    source = inspect.getsource(propose)
    for hook in HOOKS:
        if hook not in source:
            raise ImportError(
                f"This vLLM lacks what Clover heads need of its proposer: `{propose.__qualname__}` does not call "
                f"`{hook}`. vLLM 0.32.0 does."
            )


def check_heads(config: CloverConfig) -> None:
    if reason := why_not(config.to_dict()):
        raise ValueError(reason)


def check_run(config: CloverConfig, vllm_config: Any) -> None:
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    if speculative.method != (method := method_of(config.to_dict())):
        raise ValueError(
            f'method="{speculative.method}": {config.variant} heads read the target\'s states '
            f"{'behind' if method == 'mtp' else 'before'} its final norm, which vLLM hands over by another method. "
            f'Put "method": "{method}" into `speculative_config`.'
        )
    if (asked := speculative.num_speculative_tokens) > config.draft_depth:
        raise ValueError(f"num_speculative_tokens={asked} is more than these heads draft: {config.draft_depth}.")
    for name in ("pipeline_parallel_size", "decode_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            raise ValueError(f"{name}={size}: Clover heads in vLLM have not been divided in this way. Leave it 1.")
    if speculative.disable_eagle_block_drop and vllm_config.cache_config.enable_prefix_caching:
        raise ValueError(
            "disable_eagle_block_drop=True: the last slot of a shared block depends on the token behind it. Leave it "
            "False, or pass enable_prefix_caching=False."
        )
