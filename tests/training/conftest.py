"""What the trainer's tests share beyond `tiny`."""

from collections.abc import Iterator

import pytest
from transformers.utils import logging


@pytest.fixture
def transformers_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """transformers' loggers, this package's among them, do not reach pytest by themselves."""
    loggers = [logging.get_logger(name) for name in ("transformers", "hf_clover")]
    for logger in loggers:
        logger.addHandler(caplog.handler)
    yield caplog
    for logger in loggers:
        logger.removeHandler(caplog.handler)
