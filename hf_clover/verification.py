"""The old place of `hf_clover.measure.losslessness`."""

from .measure.losslessness import *  # noqa: F403
from .measure.losslessness import __all__  # noqa: F401
