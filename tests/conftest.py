"""Offline, on the CPU, deterministic: every test sees the same machine."""

import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch

import hf_clover  # noqa: F401  (installs the hook)

# A shell starts what runs in its background with Ctrl-C ignored, and programs started here would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _deterministic():
    torch.set_num_threads(1)
    torch.manual_seed(0)
