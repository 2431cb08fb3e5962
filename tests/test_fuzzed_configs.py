"""Five thousand configurations with fields of any type and value: refused by name, or good for heads.

A configuration may come from a stranger's repository. Whatever is in it, there are two ends: an error that names a
field, or a configuration of which heads are built and that survives being saved.
"""

import dataclasses
import json
import math
import random
from collections import Counter

import pytest
import torch

from hf_clover import CloverConfig, CloverHeads
from hf_clover.network.variants import CHOICES, VARIANTS

pytestmark = pytest.mark.long

TINY = dict(vocab_size=24, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24)
FIELDS = [field.name for field in dataclasses.fields(CloverConfig) if field.init]
COUNT, PARTS = 5000, 5

# What a field is meant to hold, for texts that get past the first check.
LIKELY = {
    bool: (True, False),
    int: (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48),
    float: (0.0, 1e-6, 0.01, 0.25, 0.5, 1.0, 2),
}
ROPES = (
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": "x"},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "yarn"},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "llama3", "rope_theta": 1e4, "factor": -1},
    {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0], "long_factor": None},
    {"rope_type": "default", "rope_theta": math.nan},
    {"rope_type": "default", "rope_theta": 1 << 70},
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    {"rope_type": []},
    {1: 2},
)
HOSTILE = (
    *(None, True, False, 0, 1, -1, 2, 3, 5, 7, 1 << 20, 1 << 40, 1 << 70, -(1 << 70)),
    *(0.0, 0.5, 1.0, -0.5, 1e-300, 1e300, math.inf, -math.inf, math.nan, 1j),
    *("", "4", "x", "\x00", "é", "../../etc/passwd", "a" * 3000, "__class__", "float16", "none", b"4"),
    *([], [1], [None], ["x"], (), (2, 3), {}, {"a": 1}, {1: "a"}, {"1": "a"}, set(), range(3)),
    *(len, int, object(), torch.tensor(4), torch.tensor([1.0, 2.0]), torch.float16, torch.int8),
    *ROPES,
)


def fuzzed(number: int) -> tuple[random.Random, dict]:
    """A tiny configuration with one to three fields changed, the same for the same number."""
    rng = random.Random(number)
    fields = {**TINY, "variant": rng.choice(list(VARIANTS))}
    preset = CloverConfig(**fields)
    for name in rng.sample(FIELDS, rng.choice((1, 1, 2, 3))):
        likely = CHOICES.get(name) or LIKELY.get(type(getattr(preset, name)), ())
        likely = ROPES if name == "rope_parameters" else likely
        fields[name] = rng.choice(likely if likely and rng.random() < 0.6 else HOSTILE)
    return rng, fields


def build(config: CloverConfig) -> str:
    """Where the heads are: on the CPU, or with sizes that are possible and large, on the meta device."""
    largest = max(config.hidden_size, config.intermediate_size, config.vocab_size, config.decoder_width or 1)
    layers = config.num_heads + config.num_augmenting_layers + config.num_attention_heads * config.head_dim // 256
    device = "cpu" if largest < 1024 and layers < 64 else "meta"
    with torch.device(device):
        heads = CloverHeads(config)
    assert sum(parameter.numel() for parameter in heads.parameters()) > 0
    return device


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.filterwarnings("ignore")
def test_every_config_is_refused_by_name_or_builds_heads(part):
    ends, fields_refused, fields_built = Counter(), set(), set()
    for number in range(part, COUNT, PARTS):
        rng, fields = fuzzed(number)
        changed = {name for name in fields if name not in TINY} | {
            name for name in TINY if fields[name] is not TINY[name]
        }
        config, message = None, ""
        try:
            config = CloverConfig(**fields) if rng.random() < 0.5 else CloverConfig.from_dict(dict(fields))
        except (TypeError, ValueError) as error:
            message = str(error)
        if config is None:
            ends["refused"] += 1
            named = {name for name in FIELDS if name in message}
            assert named, f"case {number}: no field is named in {message:.300}"
            fields_refused |= named
            continue
        ends[build(config)] += 1
        fields_built |= changed
        again = CloverConfig.from_dict(json.loads(config.to_json_string()))
        assert again.to_dict() == config.to_dict() or any(value != value for value in fields.values()), number
    assert sum(ends.values()) == COUNT // PARTS
    assert ends["refused"] > 300, ends
    assert ends["cpu"] > 200, ends
    assert len(fields_refused) > 40, sorted(set(FIELDS) - fields_refused)
    assert len(fields_built) > 40, sorted(set(FIELDS) - fields_built)
