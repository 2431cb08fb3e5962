"""The old place of `hf_clover.measure.benchmark`."""

from .measure.benchmark import *  # noqa: F403
from .measure.benchmark import __all__  # noqa: F401
