"""`transformers_own.py` on a checkout of a few lines: what it pairs, and that it can fail."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long("hf_clover/decoding/entry.py", "hf_clover/decoding/hook.py", "tests/transformers_own.py")

SCRIPT = Path(__file__).with_name("transformers_own.py")
TESTS = """
import random

import pytest
import torch
from transformers import DynamicCache, NeverThere
from transformers.never_there import Nobody
from helpers.zoo import build

from ...generation.test_utils import GenerationTesterMixin

from hf_clover.decoding import entry
from hf_clover.decoding import route as route_module
from hf_clover.decoding.cache.by_row import TreeCache

global_rng = random.Random()
NEW = dict(max_new_tokens=12, eos_token_id=None, pad_token_id=0)


@pytest.fixture(scope="module")
def model():
    return build("llama", vocab_size=16)


@pytest.fixture
def ids():
    return torch.tensor([[global_rng.randrange(1, 16) for _ in range(6)]])


def test_greedy(model, ids):
    out = model.generate(ids, **NEW, return_dict_in_generate=True, output_scores=True, output_hidden_states=True)
    assert len(out.scores) == 12 and out.hidden_states and not hasattr(out, "speculation")


def test_sample_generate(model, ids):
    state = torch.get_rng_state()
    first = model.generate(ids, **NEW, do_sample=True)
    torch.set_rng_state(state)
    assert torch.equal(first, model.generate(ids, **NEW, do_sample=True))


def test_generate_goes_on(model, ids):
    cache = DynamicCache(config=model.config)
    out = model.generate(ids, **NEW, past_key_values=cache)
    assert cache.get_seq_length() == 17
    model.generate(torch.cat((out, ids), dim=1), **NEW, past_key_values=cache)


def test_beam_generate(model, ids):
    model.generate(ids, **NEW, num_beams=2)


def test_forward(model, ids):
    model(ids)


def test_generate_as_it_was():
    assert not callable(NeverThere)


def test_generate_with_keys_in_wrong_places(model, ids, monkeypatch):
    monkeypatch.setattr(TreeCache, "_move", lambda self, moves: None)
    monkeypatch.setattr(route_module, "_why_no_tree", lambda *args: None)
    model.generate(torch.tensor([[3, 1, 4, 1, 5, 9]]), **{**NEW, "max_new_tokens": 40}, do_sample=True)


def test_generate_with_other_random_numbers(model, ids, monkeypatch):
    start = entry.generate_with
    monkeypatch.setattr(entry, "generate_with", lambda *args, **kwargs: (torch.rand(1), start(*args, **kwargs))[1])
    model.generate(ids, **NEW)
"""


MIXIN = """
class GenerationTesterMixin:
    def test_greedy(self):
        pass
"""


def play(checkout, *options, **environment):
    words = [sys.executable, str(SCRIPT), str(checkout), "--models", "llama", *options]
    ran = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **environment})
    return ran.returncode, ran.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    from hf_clover.targets.private_api import cache_name

    folder = tmp_path_factory.mktemp("transformers")
    for package in ("tests", "tests/generation", "tests/models", "tests/models/llama"):
        (folder / package).mkdir()
        (folder / package / "__init__.py").touch()
    (folder / "tests/generation/test_utils.py").write_text(MIXIN)
    text = TESTS.replace("past_key_values", cache_name())
    (folder / "tests/models/llama/test_modeling_llama.py").write_text(text)
    return folder


def test_each_call_that_could_have_heads_is_paired(checkout):
    code, said = play(checkout, "-k", "not wrong and not other")
    assert "1 failed, 4 passed, 3 deselected" in said, "a name that is gone fails; what does not generate is left out"
    assert "alone 1 times: `num_beams=2`" in said
    assert "1 families, 5 pairs ({'tree': 5})" in said
    assert int(re.search(r"llama: 5 pairs, (\d+) drafts accepted", said)[1]) > 5
    assert said.endswith("0 faults\n")
    assert code == 0


def test_faults_are_found_and_repeat_by_name(checkout):
    code, said = play(checkout, "-k", "wrong or other")
    assert code == 1
    assert re.search(r"FAULT: call 1 of \S+::test_generate_with_keys_in_wrong_places: tokens .* instead of", said)
    assert re.search(r"FAULT: call 1 of \S+::test_generate_with_other_random_numbers: another random state", said)
    assert said.endswith("2 faults\n")
    test, fault = re.search(r"FAULT: call 1 of (\S+wrong_places): (tokens .*)\n", said).groups()
    assert f"transformers_own.py {checkout} --test '{test}'` repeats it" in said
    assert fault in play(checkout, "--test", test)[1], "from its name alone"


def test_a_run_without_accepted_drafts_fails(checkout):
    code, said = play(checkout, "-k", "beam", PYTEST_ADDOPTS="--since=never")  # .ci/run's, which no checkout knows
    assert "alone 1 times: `num_beams=2`" in said
    assert (code, said.splitlines()[-1]) == (1, "No draft was accepted: a test that accepts nothing proves nothing.")
