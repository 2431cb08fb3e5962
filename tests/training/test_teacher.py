"""The frozen target over all architectures: what the heads learn from is what the target itself computes."""

import pytest
import torch
from helpers.zoo import ZOO, build

from hf_clover import CloverHeads
from hf_clover.training.teacher import Teacher

pytestmark = pytest.mark.long("hf_clover/network")


@pytest.mark.parametrize("name", ZOO)
def test_states_and_logits_are_the_targets_own(name: str) -> None:
    target = build(name)
    teacher = Teacher(target.train(), CloverHeads.from_target(target, num_heads=2))
    ids = torch.randint(1, 32, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    hidden = teacher.hidden_states(batch)
    with torch.no_grad():
        expected = target.eval()(input_ids=ids, attention_mask=batch["attention_mask"], use_cache=False).logits
    assert hidden.shape == (2, 9, target.config.get_text_config(decoder=True).hidden_size)
    torch.testing.assert_close(teacher.score(teacher.final_states(hidden)), expected, rtol=1e-4, atol=1e-4)
