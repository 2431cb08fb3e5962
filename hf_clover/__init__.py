"""Clover and Clover-2 speculative heads for transformers' own `generate`.

`import hf_clover` registers the classes of heads with transformers' Auto classes and installs the generate hook.
Training is imported when one of its names is first used: that takes seconds, and most of it needs an extra.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ._versions import check_versions

__version__ = "0.1.0"

check_versions()

from transformers import AutoConfig, AutoModel

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

if TYPE_CHECKING:
    from .training import (
        AcceptanceCallback,
        CloverTrainer,
        CloverTrainingConfig,
        OnlineLearner,
        SpeculativeRollouts,
    )

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

for _config, _heads in ((CloverConfig, CloverHeads), (Eagle3Config, Eagle3Heads)):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _heads, exist_ok=True)
install_hook()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(".training", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
