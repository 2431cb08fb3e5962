"""Clover and Clover-2 speculative heads for transformers' own `generate`.

`import hf_clover` registers the Auto classes and installs the generate hook, both without importing torch: they take
effect when the user's code imports the classes that they extend. Everything else is loaded when it is first used.
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ._lazy import when_imported
from ._versions import check_versions

__version__ = "0.1.0"

check_versions()

_HOME = {
    "AcceptanceCallback": "training.callbacks",
    "CloverCandidateGenerator": "decoding.candidates",
    "CloverConfig": "network.configuration_clover",
    "CloverHeads": "network.modeling_clover",
    "CloverTrainer": "training.trainer",
    "CloverTrainingConfig": "training.config",
    "DraftLogitsProcessor": "decoding.draft.obeying",
    "Eagle3Config": "network.configuration_eagle3",
    "Eagle3Heads": "network.modeling_eagle3",
    "OnlineLearner": "training.online",
    "Speculation": "decoding.record",
    "SpeculativeRollouts": "training.rollouts",
    "TextMemory": "decoding.draft.copies",
    "TreeCache": "decoding.cache.by_row",
    "install_hook": "decoding.hook",
    "load_heads": "origins.published",
    "pack_for_cpu": "network.packing",
    "speculations": "decoding.record",
    "uninstall_hook": "decoding.hook",
    "unpack": "network.packing",
}

__all__ = [
    "AcceptanceCallback",
    "CloverCandidateGenerator",
    "CloverConfig",
    "CloverHeads",
    "CloverTrainer",
    "CloverTrainingConfig",
    "DraftLogitsProcessor",
    "Eagle3Config",
    "Eagle3Heads",
    "OnlineLearner",
    "Speculation",
    "SpeculativeRollouts",
    "TextMemory",
    "TreeCache",
    "__version__",
    "install_hook",
    "load_heads",
    "pack_for_cpu",
    "speculations",
    "uninstall_hook",
    "unpack",
]

if TYPE_CHECKING:
    from .decoding.cache.by_row import TreeCache
    from .decoding.candidates import CloverCandidateGenerator
    from .decoding.draft.copies import TextMemory
    from .decoding.draft.obeying import DraftLogitsProcessor
    from .decoding.hook import install_hook, uninstall_hook
    from .decoding.record import Speculation, speculations
    from .network.configuration_clover import CloverConfig
    from .network.configuration_eagle3 import Eagle3Config
    from .network.modeling_clover import CloverHeads
    from .network.modeling_eagle3 import Eagle3Heads
    from .network.packing import pack_for_cpu, unpack
    from .origins.published import load_heads
    from .training.callbacks import AcceptanceCallback
    from .training.config import CloverTrainingConfig
    from .training.online import OnlineLearner
    from .training.rollouts import SpeculativeRollouts
    from .training.trainer import CloverTrainer


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register_configs() -> None:
    from transformers.models.auto.configuration_auto import AutoConfig

    from .network.configuration_clover import CloverConfig
    from .network.configuration_eagle3 import Eagle3Config

    for config in (CloverConfig, Eagle3Config):
        AutoConfig.register(config.model_type, config, exist_ok=True)


def _register_models() -> None:
    from transformers.models.auto.modeling_auto import AutoModel

    from .network.modeling_clover import CloverHeads
    from .network.modeling_eagle3 import Eagle3Heads

    for model in (CloverHeads, Eagle3Heads):
        AutoModel.register(model.config_class, model, exist_ok=True)


def _install_hook() -> None:
    from .decoding.hook import install_hook

    install_hook()


def _load(name: str) -> Callable[[], None]:
    return lambda: (importlib.import_module(f"{__name__}.{name}"), None)[1]


# Importing an Auto class loads our class, and our class registers itself when it is complete, whichever of the two
# comes first. The hook does the same. transformers imports the Auto classes while it imports its models, so our
# modules must not need any of those models.
when_imported("transformers.models.auto.configuration_auto", _load("network.configuration_eagle3"))
when_imported("transformers.models.auto.configuration_auto", _load("network.configuration_clover"))
when_imported("transformers.models.auto.modeling_auto", _load("network.modeling_eagle3"))
when_imported("transformers.models.auto.modeling_auto", _load("network.modeling_clover"))
when_imported(f"{__name__}.network.configuration_clover", _register_configs)
when_imported(f"{__name__}.network.modeling_clover", _register_models)
when_imported("transformers.generation.utils", _load("decoding.hook"))
when_imported(f"{__name__}.decoding.hook", _install_hook)
