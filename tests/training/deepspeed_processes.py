"""Trains under DeepSpeed on CPUs and says what came out: for `test_sharded.py`, under `accelerate launch`."""

import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from tiny import make_target, make_tokenizer
from two_processes import train

assert deepspeed.comm.is_available()
OPTIONS = {"use_cpu": False, "optim": "adamw_torch"}

if __name__ == "__main__":
    torch.set_num_threads(1)
    out, size = Path(sys.argv[1]), int(sys.argv[2])
    # accelerate has DeepSpeed for accelerators only: tell it that these processes are some. And DeepSpeed would
    # compile an operation of its own for messages between processes of one machine.
    device = torch.device("cpu")
    with (
        patch.object(PartialState, "_prepare_backend", lambda *_: ("gloo", DistributedType.MULTI_GPU)),
        patch.object(PartialState, "set_device", lambda state: setattr(state, "device", device)),
        patch.object(sys.modules["deepspeed.comm.torch"], "build_shm_op", lambda: None),
    ):
        results = {"trained": train(out / "run", size, **OPTIONS)}
        results["resumed"] = train(out / "run", size, steps=4, **OPTIONS)
        if int(os.environ["RANK"]) == 0:
            make_target().save_pretrained(out / "target")
            make_tokenizer().save_pretrained(out / "target")
        PartialState().wait_for_everyone()
        results["loaded"] = train(out / "loaded", size, target=str(out / "target"), **OPTIONS)
    if int(os.environ["RANK"]) == 0:
        (out / "result.json").write_text(json.dumps(results))
