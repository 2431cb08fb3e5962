"""Rollouts that are drafted: the run is the same run."""

import pytest
import torch
from datasets import Dataset
from training.tiny import make_target, make_tokenizer
from trl import GRPOConfig, GRPOTrainer

from hf_clover import CloverHeads, OnlineLearner, SpeculativeRollouts
from hf_clover.training import first_fit, online

PROMPTS = [f"w{i} w{i + 1} w{i + 2} w{2 * i}" for i in range(8)]


def reward(completions: list[str], **_) -> list[float]:
    return [float(completion.count("w1")) for completion in completions]


def trainer_of(tmp_path, policy) -> GRPOTrainer:
    args = GRPOConfig(
        str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=24,
        learning_rate=1e-2,
        report_to="none",
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
    )
    data = Dataset.from_dict({"prompt": PROMPTS})
    return GRPOTrainer(
        model=policy, reward_funcs=reward, args=args, train_dataset=data, processing_class=make_tokenizer()
    )


def weights_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


@pytest.mark.parametrize("learns", [True, False])
def test_the_policy_has_the_weights_of_plain_rollouts_bit_for_bit(tmp_path, monkeypatch, learns):
    monkeypatch.setattr(online, "TOKENS", 40)
    monkeypatch.setattr(first_fit, "FIRST", 20)
    monkeypatch.setattr(first_fit, "LAST", 40)
    plain = make_target()
    trainer_of(tmp_path / "plain", plain).train()
    policy = make_target()
    heads = CloverHeads.from_target(policy, num_heads=2)  # before the trainer, which sets the seed
    trainer = trainer_of(tmp_path / "drafted", policy)
    heads.generation_config.num_assistant_tokens = 6
    with SpeculativeRollouts(trainer, OnlineLearner(heads, policy, share=1.0) if learns else heads) as rollouts:
        trainer.train()
    assert torch.equal(weights_of(policy), weights_of(plain))
    assert not torch.equal(weights_of(policy), weights_of(make_target()))
    assert sum(record.accepted_tokens for record in rollouts.records) > 20
    assert len(rollouts.records) == 4
    assert "generate" not in vars(policy)
    assert heads.learner is None
    assert (rollouts.learner.steps >= 4) if learns else rollouts.learner is None


def test_an_error_in_training_leaves_the_policy_as_it_was(tmp_path):
    policy = make_target()
    trainer = trainer_of(tmp_path, policy)
    with pytest.raises(KeyError), SpeculativeRollouts(trainer, CloverHeads.from_target(policy, num_heads=2)):
        raise KeyError
    assert "generate" not in vars(policy)


def test_vllm_is_refused(tmp_path):
    policy = make_target()
    trainer = trainer_of(tmp_path, policy)
    trainer.args.use_vllm = True
    with pytest.raises(ValueError, match="`use_vllm=True` generates without the policy's `generate`"):
        SpeculativeRollouts(trainer, CloverHeads.from_target(policy, num_heads=2))


def test_a_value_that_is_no_heads_is_refused(tmp_path):
    with pytest.raises(TypeError, match="`heads` must be an `OnlineLearner` or draft heads, not a `str`"):
        SpeculativeRollouts(trainer_of(tmp_path, make_target()), "my-heads")
