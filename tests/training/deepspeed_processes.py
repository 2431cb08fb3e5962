"""Trains under DeepSpeed on CPUs and says what came out: for `test_sharded.py`, under `accelerate launch`."""

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, gather_object
from tiny import make_target, make_tokenizer
from two_processes import train

from hf_clover import CloverHeads

assert deepspeed.comm.is_available()
OPTIONS = {"use_cpu": False, "optim": "adamw_torch"}
DIVIDED = {  # small weights too
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def generate_divided(rank: int) -> dict[str, Any]:
    """Another prompt and another length in each process, of one target that they hold together."""
    heads, plain = CloverHeads.from_target(make_target(), num_heads=3), make_target()
    target = deepspeed.initialize(model=make_target(), config=DIVIDED)[0].module.eval()
    prompt = torch.tensor([[8, 9, 10 + rank]])
    options = {"max_new_tokens": 6 if rank else 24, "do_sample": False, "return_dict_in_generate": True}
    out = target.generate(prompt, assistant_model=heads, num_assistant_tokens=8, synced_gpus=True, **options)
    return {
        "method": out.speculation.method,
        "same": out.sequences.tolist() == plain.generate(prompt, **options).sequences.tolist(),
        "divided": bool(target.model.layers[0].mlp.up_proj.weight.numel() == 0),
        "steps": out.speculation.target_forwards,
    }


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
        rank = int(os.environ["RANK"])
        generated = gather_object([generate_divided(rank)])
    if rank == 0:
        (out / "result.json").write_text(json.dumps({**results, "generated": generated}))
