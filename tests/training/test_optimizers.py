"""Muon and AdamW as one optimizer, and the recipe that decides where it is used."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny import losses, make_target, make_trainer
from torch import nn

from hf_clover import CloverHeads, CloverTrainer
from hf_clover.training import CloverTrainingConfig, config, optimizers
from hf_clover.training.optimizers import MuonAndAdamW, muon_rate

pytestmark = pytest.mark.long


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def take_steps(model: nn.Module, steppers: list[torch.optim.Optimizer], count: int, start: int = 0) -> None:
    for step in range(start, start + count):
        torch.manual_seed(step)
        loss = model(torch.randn(5, 6)).square().sum()
        loss.backward()
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_steps_equal_muon_for_matrices_and_adamw_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "multiplies_bfloat16_fast", lambda device: True)
    ours, theirs = network(), network()
    others, matrices = ([each for each in theirs.parameters() if each.ndim == ndim] for ndim in (1, 2))
    pair = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0, momentum=0.95),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    take_steps(theirs, pair, 4)
    take_steps(ours, [MuonAndAdamW(ours.parameters(), lr=3e-3, muon_lr=0.02)], 4)
    assert same(ours, theirs)
    assert not same(ours, network())


def test_steps_in_float32_equal_those_in_bfloat16_except_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    start = {shape: torch.randn(shape) for shape in ((64, 32), (32, 64), (48, 48))}
    taken = {}
    for fast in (True, False):
        monkeypatch.setattr(optimizers, "multiplies_bfloat16_fast", lambda device, fast=fast: fast)
        matrices = [nn.Parameter(matrix.clone()) for matrix in start.values()]
        optimizer = MuonAndAdamW(matrices, muon_lr=0.02, weight_decay=0.1)
        for step in range(3):
            torch.manual_seed(step)
            for matrix in matrices:
                matrix.grad = torch.randn_like(matrix)
            optimizer.step()
        taken[fast] = [matrix.detach() - first for matrix, first in zip(matrices, start.values(), strict=True)]
        assert all(list(state) == ["momentum_buffer"] for state in optimizer.parts[0].state.values())
    for slow_twin, ours in zip(taken[True], taken[False], strict=True):
        assert 0 < (ours - slow_twin).norm() / slow_twin.norm() < 0.02  # bfloat16's rounding, and no more


def test_the_iteration_in_float32_makes_singular_values_about_one() -> None:
    torch.manual_seed(0)
    for shape in ((40, 24), (24, 40)):
        matrix = torch.randn(shape)
        made = optimizers.orthogonalized(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
        values = torch.linalg.svdvals(made)
        assert made.shape == matrix.shape
        assert values.min() > 0.6
        assert values.max() < 1.3
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        assert torch.nn.functional.cosine_similarity(made.flatten(), (left @ right).flatten(), dim=0) > 0.97


def test_fast_bfloat16_is_read_from_the_cpus_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    for known, fast in (({"avx512_bf16": True}, True), ({"avx2": True, "avx512_bf16": False}, False), ({}, False)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda known=known: known, raising=False)
        assert optimizers.multiplies_bfloat16_fast(torch.device("cpu")) == fast
    assert optimizers.multiplies_bfloat16_fast(torch.device("cuda"))


def test_groups_keep_their_weight_decay() -> None:
    model = network()
    kept, decayed = [model[0].weight, model[1].weight], [model[2].weight]
    optimizer = MuonAndAdamW([{"params": decayed, "weight_decay": 0.5}, {"params": kept, "weight_decay": 0.0}])
    found = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert found == {id(model[0].weight): 0.0, id(model[1].weight): 0.0, id(model[2].weight): 0.5}


def test_a_schedule_moves_both_rates() -> None:
    model = network()
    optimizer = MuonAndAdamW(model.parameters(), lr=1e-3, muon_lr=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    take_steps(model, [optimizer], 1)
    schedule.step()
    assert [part.param_groups[0]["lr"] for part in optimizer.parts] == pytest.approx([0.01, 5e-4])


def test_the_optimizer_goes_on_from_its_saved_state(tmp_path: Path) -> None:
    whole, halves = network(), network()
    take_steps(whole, [MuonAndAdamW(whole.parameters())], 6)
    first = MuonAndAdamW(halves.parameters())
    take_steps(halves, [first], 3)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = MuonAndAdamW(halves.parameters(), lr=1.0, muon_lr=1.0)  # the rates come from the state
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    take_steps(halves, [second], 3, start=3)
    assert same(whole, halves)


def test_the_optimizer_works_with_only_matrices_or_none() -> None:
    for parameter in (nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))):
        optimizer = MuonAndAdamW([parameter])
        parameter.grad = torch.randn_like(parameter)
        assert optimizer.step(lambda: torch.tensor(7.0)).item() == 7
        assert not torch.equal(parameter, torch.ones_like(parameter))


# ------------------------------------------------------------------------------------------------ the recipe

CLOVER_X = {"variant": "clover-x", "num_heads": 2}
OWN = {
    "clover-x": ("kl", 0.0, 0.08),  # of a run of two steps
    "clover-2": ("clover-2", 10.0, 0.0),
    "clover": ("clover", 0.0, 0.0),
    "medusa": ("clover", 0.0, 0.0),
}


def loss_of(trainer: CloverTrainer) -> tuple[str, float]:
    return trainer.teacher.loss_terms.token_loss, trainer.teacher.loss_terms.hidden_weight


@pytest.mark.parametrize("variant", OWN)
def test_a_variant_is_trained_by_its_own_recipe(tmp_path: Path, variant: str) -> None:
    options = {"variant": variant, "num_heads": 2}
    trainer = make_trainer(tmp_path, make_target(), model_init_kwargs=options, max_steps=2)
    trainer.train()
    args = trainer.args
    assert (*loss_of(trainer), args.muon_learning_rate) == OWN[variant]
    assert OWN[variant][0] == args.loss_type == trainer.heads.config.loss_type
    is_muon = isinstance(trainer.optimizer.optimizer, MuonAndAdamW)
    assert is_muon == (variant == "clover-x")
    assert args.weight_decay == (0.1 if is_muon else 0.0)
    assert losses(trainer)


def test_a_short_run_takes_larger_steps(tmp_path: Path) -> None:
    rates = {steps: muon_rate(steps) for steps in (1, 25, 100, 400, 401, 100_000)}
    assert rates == pytest.approx({1: 0.08, 25: 0.08, 100: 0.04, 400: 0.02, 401: 0.02, 100_000: 0.02})
    for given, rate in ((None, 0.05), (0.005, 0.005)):
        args = {"max_steps": 64, "muon_learning_rate": given, "warmup_steps": 0}
        trainer = make_trainer(tmp_path, make_target(), model_init_kwargs=CLOVER_X, **args)
        trainer.create_optimizer_and_scheduler(num_training_steps=64)
        muon, adamw = ({group["lr"] for group in part.param_groups} for part in trainer.optimizer.parts)
        assert trainer.args.muon_learning_rate == rate
        assert (muon, adamw) == ({rate}, {trainer.args.learning_rate})


def test_going_on_with_trained_heads_logs_that_small_rates_suit_them(
    tmp_path: Path, transformers_log: pytest.LogCaptureFixture
) -> None:
    target, path = make_target(), str(tmp_path / "heads")
    CloverHeads.from_target(target, num_heads=2).save_pretrained(path)
    said = f"heads from `{path}` learn at the rates for new heads"
    make_trainer(tmp_path, target)
    make_trainer(tmp_path, target, options={"model": path}, model_init_kwargs=None, muon_learning_rate=0.003)
    assert said not in transformers_log.text
    for model in (path, CloverHeads.from_pretrained(path)):
        transformers_log.clear()
        make_trainer(tmp_path, target, options={"model": model}, model_init_kwargs=None)
        assert said in transformers_log.text
        assert "pass small rates: `muon_learning_rate=0.003` and `learning_rate=2e-4`" in transformers_log.text


@pytest.mark.parametrize("given", [0.0, 0.3])
def test_the_users_weight_decay_applies_to_muon_only(tmp_path: Path, given: float) -> None:
    trainer = make_trainer(tmp_path, make_target(), model_init_kwargs=CLOVER_X, weight_decay=given)
    trainer.create_optimizer_and_scheduler(num_training_steps=2)
    decays = [{group["weight_decay"] for group in part.param_groups} for part in trainer.optimizer.parts]
    assert decays == [{given}, {0.0}]


def test_arguments_of_the_user_override_the_recipe(tmp_path: Path) -> None:
    given = dict(loss_type="acceptance", hidden_loss_weight=0.5, muon_learning_rate=0.0)
    trainer = make_trainer(tmp_path, make_target(), model_init_kwargs=CLOVER_X, **given)
    assert {name: getattr(trainer.args, name) for name in given} == given
    assert loss_of(trainer) == ("acceptance", 0.5)
    kept = make_trainer(tmp_path, make_target(), hidden_loss_weight=2.0, model_init_kwargs={"variant": "clover-2"})
    assert loss_of(kept) == ("clover-2", 2.0)


def test_heads_go_on_with_the_loss_that_they_were_trained_with(tmp_path: Path) -> None:
    """Where that loss has no hidden term, the weight of the variant's hidden term does not apply."""
    first = make_trainer(tmp_path, make_target(), loss_type="kl", model_init_kwargs={"variant": "clover-2"})
    assert loss_of(first) == ("kl", 0.0)
    first.heads.save_pretrained(tmp_path / "heads")
    options = {"model": str(tmp_path / "heads")}
    second = make_trainer(tmp_path, make_target(), options=options, model_init_kwargs=None)
    assert loss_of(second) == ("kl", 0.0)


def test_muon_can_train_any_variant(tmp_path: Path) -> None:
    options = {"variant": "clover-2", "num_heads": 2}
    runs = []
    for rate in (0.0, 0.02):
        trainer = make_trainer(tmp_path, make_target(), model_init_kwargs=options, muon_learning_rate=rate)
        trainer.train()
        runs.append(trainer.heads.decoder.q.weight.detach().clone())
    assert not torch.equal(*runs)


ELSEWHERE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another optim": ({"optim": "sgd"}, {}),
    "an adapter": ({}, {"peft_config": LoraConfig(r=2)}),
    "a class of optimizer": ({}, {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})}),
}


@pytest.mark.parametrize("what", ELSEWHERE)
def test_muon_is_off_where_something_else_was_asked_for(tmp_path: Path, what: str) -> None:
    args, options = ELSEWHERE[what]
    target = make_target()
    heads = CloverHeads.from_target(target, "clover-x", num_heads=2)
    trainer = make_trainer(tmp_path, target, options={"model": heads, **options}, model_init_kwargs=None, **args)
    trainer.train()
    assert trainer.args.muon_learning_rate == 0.0
    assert not isinstance(trainer.optimizer.optimizer, MuonAndAdamW)


def test_muon_with_another_optimizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"muon_learning_rate=0.1` cannot go with another optimizer: leave it out"):
        make_trainer(tmp_path, make_target(), muon_learning_rate=0.1, optim="sgd")
    with pytest.raises(ValueError, match=r"muon_learning_rate=-1.0.*must not be negative"):
        make_trainer(tmp_path, make_target(), muon_learning_rate=-1.0)


def test_muon_is_off_or_refused_where_torch_lacks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_clover.training.arguments.HAS_MUON", False)
    trainer = make_trainer(tmp_path, make_target(), model_init_kwargs={"variant": "clover-x"})
    assert trainer.args.muon_learning_rate == 0.0
    with pytest.raises(ValueError, match=r"needs torch 2\.9 or later"):
        make_trainer(tmp_path, make_target(), muon_learning_rate=0.1)
    assert hasattr(torch.optim, "Muon") == optimizers.HAS_MUON


@pytest.mark.parametrize("fast", [True, False])
def test_without_an_accelerator_training_uses_the_cpu_by_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fast: bool
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(config, "multiplies_bfloat16_fast", lambda device: fast)
    args = CloverTrainingConfig(str(tmp_path))
    assert (args.use_cpu, args.bf16) == (True, fast)
    assert CloverTrainingConfig(str(tmp_path), bf16=not fast).bf16 is not fast
