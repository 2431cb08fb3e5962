"""Training of heads. Each name is imported when it is first used, because trl takes seconds to import."""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

_HOME = {
    "AcceptanceCallback": "callbacks",
    "CloverTrainer": "trainer",
    "CloverTrainingConfig": "config",
    "EndpointAnswers": "answers",
    "OnlineLearner": "online",
    "SpeculativeRollouts": "rollouts",
    "TargetAnswers": "answers",
    "precompute_targets": "precompute",
    "regenerate": "answers",
}
_WITHOUT_EXTRA = ("OnlineLearner", "SpeculativeRollouts")

__all__ = [
    "AcceptanceCallback",
    "CloverTrainer",
    "CloverTrainingConfig",
    "EndpointAnswers",
    "OnlineLearner",
    "SpeculativeRollouts",
    "TargetAnswers",
    "precompute_targets",
    "regenerate",
]

if TYPE_CHECKING:
    from .answers import EndpointAnswers, TargetAnswers, regenerate
    from .callbacks import AcceptanceCallback
    from .config import CloverTrainingConfig
    from .online import OnlineLearner
    from .precompute import precompute_targets
    from .rollouts import SpeculativeRollouts
    from .trainer import CloverTrainer


def require_extra() -> None:
    """Raise an error that says how to install what training needs, if a part of it is missing."""
    missing = [name for name in ("accelerate", "datasets", "trl") if find_spec(name) is None]
    if missing:
        raise ImportError(f"Training needs {' and '.join(missing)}: `pip install 'hf-clover[train]'`.")


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _WITHOUT_EXTRA:
        require_extra()
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
