"""Training of heads. Each name is imported when it is first used, because trl takes seconds to import."""

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "AcceptanceCallback": "callbacks",
    "CloverTrainer": "trainer",
    "CloverTrainingConfig": "config",
    "EndpointAnswers": "answers",
    "TargetAnswers": "answers",
    "precompute_targets": "precompute",
    "regenerate": "answers",
}

__all__ = [
    "AcceptanceCallback",
    "CloverTrainer",
    "CloverTrainingConfig",
    "EndpointAnswers",
    "TargetAnswers",
    "precompute_targets",
    "regenerate",
]

if TYPE_CHECKING:
    from .answers import EndpointAnswers, TargetAnswers, regenerate
    from .callbacks import AcceptanceCallback
    from .config import CloverTrainingConfig
    from .precompute import precompute_targets
    from .trainer import CloverTrainer


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
