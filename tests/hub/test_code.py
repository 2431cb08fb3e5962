"""The code in a folder of heads: a folder that was saved works on the Hub like one that was pushed."""

import json
import os
import subprocess
import sys

import pytest
from helpers.zoo import build

from hf_clover import CloverHeads
from hf_clover.hub.code import remove_code

pytestmark = pytest.mark.long("hf_clover/network")

GENERATE = """
import torch
from transformers import AutoModelForCausalLM
target = AutoModelForCausalLM.from_pretrained({target!r})
ids = torch.tensor([[1, 5, 3, 2]])
plain = target.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
out = target.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0, custom_generate={heads!r},
                      trust_remote_code=True, return_dict_in_generate=True, num_assistant_tokens=8)
assert torch.equal(out.sequences, plain)
print(out.speculation.method, len(out.speculation.tree_sizes), max(out.speculation.tree_sizes))
"""


def test_custom_generate_works_with_a_saved_folder(tmp_path):
    """No push, and no import of hf_clover: `custom_generate` names the folder."""
    target = build("llama", vocab_size=16)
    target.save_pretrained(tmp_path / "target")
    CloverHeads.from_target(target).save_pretrained(tmp_path / "heads")
    code = {path.name for path in (tmp_path / "heads" / "custom_generate").iterdir()}
    assert code == {"generate.py", "requirements.txt"}
    words = GENERATE.format(target=str(tmp_path / "target"), heads=str(tmp_path / "heads"))
    home = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, env=home, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    method, steps, largest = done.stdout.split()
    assert (method, largest) == ("tree", "8")
    assert int(steps) <= 12


def test_heads_load_after_their_code_was_removed(tmp_path):
    heads = CloverHeads.from_target(build("llama", vocab_size=16))
    heads.save_pretrained(tmp_path)
    assert "auto_map" in json.loads((tmp_path / "config.json").read_text())
    remove_code(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())
    assert CloverHeads.from_pretrained(tmp_path).config.variant == heads.config.variant
