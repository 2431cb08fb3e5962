"""What the trainer learns from: every dataset format, every wrapper, and what must be equal to what."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset
from helpers.quantised import FourBit, quantise
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from tiny import VOCAB, losses, make_args, make_target, make_tokenizer, make_trainer, own_text, random_ids
from torch import nn

from hf_clover import CloverHeads, CloverTrainer
from hf_clover.network.configuration_clover import VARIANTS
from hf_clover.training.losses import TOKEN_LOSSES, count_hits
from hf_clover.training.metrics import HeadMetrics

# CI runs one test of these for every change, with the oldest versions.
pytestmark = pytest.mark.long("hf_clover/targets", "hf_clover/origins")
SAID = ("w1 w2 w3 w4", "w5 w6 w7 w8", "w9 w10", "w11 w12 w13 w14 w15")
LONGER = {"max_steps": 12, "learning_rate": 3e-3, "per_device_train_batch_size": 8}  # until the loss has fallen
TURNS = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, SAID, strict=True)]


def trained(*args: Any, **fields: Any) -> CloverTrainer:
    trainer = make_trainer(*args, **fields)
    trainer.train()
    return trainer


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Bit by bit."""
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def gradients(trainer: CloverTrainer) -> dict[str, torch.Tensor]:
    """What the first update would add, for the accumulated batch as the trainer makes it."""
    captured: dict[str, torch.Tensor] = {}
    clip = trainer._clip_grad_norm

    def capture(model: nn.Module) -> Any:
        captured.update({name: p.grad.clone() for name, p in trainer.heads.named_parameters() if p.grad is not None})
        return clip(model)

    trainer._clip_grad_norm = capture
    trainer.train()
    assert captured
    return captured


# ------------------------------------------------------------------------------------------------ what is trained


def test_special_tokens_stay_the_targets(tmp_path: Path) -> None:
    """transformers makes them the tokenizer's as training begins: pad 0, bos 1, eos 2."""
    ids = {"pad_token_id": None, "bos_token_id": 3, "eos_token_id": [2, 5]}
    target = make_target(**ids)
    trainer = trained(tmp_path, target, save_strategy="steps", save_steps=1)
    trainer.save_model()
    for folder in (tmp_path, tmp_path / "checkpoint-1"):
        saved = json.loads((folder / "config.json").read_text())
        assert {name: saved[name] for name in ids} == ids
    assert {name: getattr(target.config, name) for name in ids} == ids


@pytest.mark.parametrize(
    ("variant", "loss_type"), [*((name, None) for name in VARIANTS), *(("clover-x", name) for name in TOKEN_LOSSES)]
)
def test_every_variant_and_every_loss_trains_heads(tmp_path, variant, loss_type) -> None:
    """A variant without a loss has its own. The teacher stays bit-identical."""
    target = make_target()
    before = copy.deepcopy(target.state_dict())
    grads = [parameter.requires_grad for parameter in target.parameters()]
    init = {"variant": variant, "num_heads": 2}
    trainer = trained(tmp_path, target, loss_type=loss_type, model_init_kwargs=init, **LONGER)
    assert losses(trainer)[-1] < 0.97 * losses(trainer)[0]
    assert_equal(target.state_dict(), before)
    assert [parameter.requires_grad for parameter in target.parameters()] == grads
    assert all(parameter.grad is None for parameter in target.parameters())
    assert "forward" not in vars(trainer.heads)


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    runs = [trained(tmp_path, make_target(), seed=seed).heads.state_dict() for seed in (7, 7, 8)]
    assert_equal(runs[0], runs[1])
    assert not all(torch.equal(runs[0][name], runs[2][name]) for name in runs[0])


def test_loss_weights_reach_the_loss_and_the_config(tmp_path: Path) -> None:
    weights = {"loss_decay": 0.5, "hidden_loss_weight": 0.0, "token_loss_weight": 2.0}
    trainer = trained(tmp_path, make_target(), **weights, model_init_kwargs={"num_heads": 2})
    first = trainer.state.log_history[0]
    assert first["loss"] == pytest.approx(first["head_0/loss"] + 0.5 * first["head_1/loss"], rel=1e-4)
    assert {name: getattr(trainer.heads.config, name) for name in weights} == weights


def test_the_label_mask_keeps_the_targets_own_text_and_drops_other_text(tmp_path: Path) -> None:
    """Of the target's own greedy text nothing is masked, of tokens it finds unlikely nearly everything."""
    target = make_target()
    own = Dataset.from_dict({"input_ids": own_text(target, 4, 12)})

    def share_kept(dataset: Dataset) -> float:
        runs = [trained(tmp_path, target, dataset, label_mask=masked, max_steps=1) for masked in (True, False)]
        return losses(runs[0])[0] / losses(runs[1])[0]

    assert share_kept(own) == pytest.approx(1)
    assert share_kept(random_ids([12, 12, 12, 12])) < 0.1


def test_heads_are_trained_in_float32_and_saved_whole(tmp_path: Path) -> None:
    target = make_target().bfloat16()
    heads = CloverHeads.from_target(target, num_heads=2)
    assert heads.dtype == torch.bfloat16
    trainer = trained(tmp_path, target, options={"model": heads}, bf16=True, max_steps=2, model_init_kwargs=None)
    trainer.save_model()
    assert all(torch.isfinite(torch.tensor(losses(trainer))))
    with safe_open(tmp_path / "model.safetensors", "pt") as saved:
        assert set(saved.keys()) == set(trainer.heads.state_dict())
        assert saved.get_tensor("head_norm.weight").dtype == torch.float32
    again = make_trainer(tmp_path, target, options={"model": str(tmp_path)}, model_init_kwargs=None)
    assert_equal(again.heads.state_dict(), trainer.heads.state_dict())


def test_bfloat16_training_keeps_weights_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 only: on the CPU, where this runs, transformers does not autocast to float16. What is scored with the
    lm_head, most of a step's products, is computed in it too."""
    score, scored = CloverHeads.score, []
    monkeypatch.setattr(CloverHeads, "score", lambda heads, x: scored.append(score(heads, x)) or scored[-1])
    plain = trained(tmp_path, make_target(), max_steps=3)
    assert {scores.dtype for scores in scored} == {torch.float32}
    scored.clear()
    mixed = trained(tmp_path, make_target(), max_steps=3, bf16=True)
    assert {scores.dtype for scores in scored} == {torch.bfloat16}
    assert mixed.heads.dtype == torch.float32
    assert losses(mixed) == pytest.approx(losses(plain), rel=0.03)
    assert losses(mixed) != losses(plain)


# ------------------------------------------------------------------------------------------------ what it learns from


def labelled(trainer: CloverTrainer) -> list[str]:
    decode = trainer.processing_class.decode
    return [decode([label for label in sample["labels"] if label != -100]) for sample in trainer.train_dataset]


TWO_PARTS = {"prompt": "w1 w2 w3", "completion": " w4 w5 w6 w7"}
SHARE_GPT = [{"from": "user", "value": "w1 w2"}, {"from": "assistant", "value": "w3 w4"}]
IDS, LABELS = [10, 11, 12, 13, 14, 15], [-100, -100, 12, 13, 14, 15]
FORMATS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "text": ({"text": "w1 w2 w3 w4"}, {}, "w1 w2 w3 w4 </s>"),
    "other column": ({"body": "w1 w2 w3 w4"}, {"dataset_text_field": "body"}, "w1 w2 w3 w4 </s>"),
    "prompt and completion": (TWO_PARTS, {}, "w4 w5 w6 w7 </s>"),
    "all of prompt and completion": (TWO_PARTS, {"completion_only_loss": False}, "w1 w2 w3 w4 w5 w6 w7 </s>"),
    "messages": ({"messages": TURNS[:2]}, {}, "<s> user w1 w2 w3 w4 </s> <s> assistant w5 w6 w7 w8 </s>"),
    "assistant only": ({"messages": TURNS}, {"assistant_only_loss": True}, f"{SAID[1]} </s> {SAID[3]} </s>"),
    "conversational completion": ({"prompt": TURNS[:3], "completion": TURNS[3:]}, {}, "w11 w12 w13 w14 w15 </s>"),
    "ShareGPT": ({"conversations": SHARE_GPT}, {}, "<s> user w1 w2 </s> <s> assistant w3 w4 </s>"),
    "token ids": ({"input_ids": IDS}, {}, "w3 w4 w5 w6 w7 w8"),
    "token ids and labels": ({"input_ids": IDS, "labels": LABELS}, {}, "w5 w6 w7 w8"),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])
def test_every_dataset_format_gives_its_labels_and_trains(tmp_path: Path, name: str, streaming: bool) -> None:
    row, args, expected = FORMATS[name]
    dataset = Dataset.from_list([row] * 4)
    trainer = make_trainer(tmp_path, make_target(), dataset.to_iterable_dataset() if streaming else dataset, **args)
    assert labelled(trainer) == [expected] * 4
    trainer.train()
    assert len(losses(trainer)) == 2


def test_streaming_equals_map_style(tmp_path: Path) -> None:
    dataset = random_ids([12, 9, 16, 7])
    both = (dataset, dataset.to_iterable_dataset())
    runs = [losses(trained(tmp_path, make_target(), samples, max_steps=1)) for samples in both]
    assert runs[0] == pytest.approx(runs[1], rel=1e-5)


def test_a_formatting_function_makes_the_text_to_train_on(tmp_path: Path) -> None:
    dataset = Dataset.from_dict({"question": ["w1 w2 w3"] * 4, "answer": ["w4 w5"] * 4})
    options = {"formatting_func": lambda sample: f"{sample['question']} {sample['answer']}"}
    trainer = make_trainer(tmp_path, make_target(), dataset, options=options)
    assert labelled(trainer) == ["w1 w2 w3 w4 w5 </s>"] * 4


# ------------------------------------------------------------------------------------------------ equalities


PACKED = {"packing": True, "max_length": 32, "per_device_train_batch_size": 2}
SAME_BATCH: dict[str, tuple[int, dict[str, Any]]] = {  # how many samples there are then, and how they are asked for
    "bfd": (2, PACKED),
    "bfd_split": (2, {**PACKED, "packing_strategy": "bfd_split"}),
    "padding free": (6, {"padding_free": True, "max_length": None}),
    "more padding": (6, {"pad_to_multiple_of": 32}),
    "accumulated": (6, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}),
}


@pytest.mark.parametrize("name", SAME_BATCH)
def test_packing_padding_and_accumulation_give_the_same_gradients_and_losses(tmp_path: Path, name: str) -> None:
    samples, args = SAME_BATCH[name]
    dataset, one = random_ids([12, 9, 16, 7, 4, 3]), {"per_device_train_batch_size": 6, "max_steps": 1}
    plain, ours = (make_trainer(tmp_path, make_target(), dataset, **{**one, **more}) for more in ({}, args))
    assert len(ours.train_dataset) == samples
    torch.testing.assert_close(gradients(ours), gradients(plain), rtol=1e-4, atol=1e-6)
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-5)
    counted = [run.state.log_history[0]["head_2/top5"] for run in (ours, plain)]
    assert counted[0] == pytest.approx(counted[1])


# ------------------------------------------------------------------------------------------------ adapters


def test_lora_saves_an_adapter_alone_and_leaves_the_heads_as_they_were(tmp_path: Path) -> None:
    target = make_target()
    heads = CloverHeads.from_target(target, num_heads=2)
    heads.save_pretrained(tmp_path / "heads")
    before = copy.deepcopy(heads.state_dict())
    options = {"model": heads, "peft_config": LoraConfig(r=4, task_type="CAUSAL_LM")}
    trainer = trained(tmp_path / "adapter", target, options=options, model_init_kwargs=None, **LONGER)
    trainer.save_model()
    assert losses(trainer)[-1] < losses(trainer)[0]
    saved = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert "adapter_model.safetensors" in saved
    assert "model.safetensors" not in saved
    fresh = CloverHeads.from_pretrained(tmp_path / "heads")
    assert_equal(fresh.state_dict(), before)
    adapted = PeftModel.from_pretrained(fresh, tmp_path / "adapter").get_base_model().bind(target)
    hidden, tokens = torch.randn(1, 6, 32), torch.randint(7, VOCAB, (1, 6))
    expected = trainer.heads.eval()(hidden, tokens).head_outputs
    torch.testing.assert_close(adapted.eval()(hidden, tokens).head_outputs, expected)


def test_training_goes_on_with_a_given_adapter(tmp_path: Path) -> None:
    target = make_target()
    model = get_peft_model(CloverHeads.from_target(target, num_heads=2), LoraConfig(target_modules="all-linear"))
    trained(tmp_path, target, options={"model": model}, model_init_kwargs=None)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert names
    assert all("lora" in name for name in names)


def test_heads_learn_from_a_target_with_its_adapter(tmp_path: Path) -> None:
    config = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    wrapped = get_peft_model(make_target(), config).eval()
    before = copy.deepcopy(wrapped.state_dict())
    merged = copy.deepcopy(wrapped).merge_and_unload()
    runs = [losses(trained(tmp_path, target, max_steps=2)) for target in (wrapped, merged, make_target())]
    assert runs[0] == pytest.approx(runs[1], rel=1e-4)
    assert runs[0] != pytest.approx(runs[2], rel=1e-4)
    assert_equal(wrapped.state_dict(), before)


def test_heads_learn_from_a_quantised_target(tmp_path: Path) -> None:
    target = quantise(make_target().requires_grad_(False), FourBit)
    trainer = trained(tmp_path, target, draft_vocab_size=20, **LONGER)
    assert losses(trainer)[-1] < 0.97 * losses(trainer)[0]


# ------------------------------------------------------------------------------------------- where things come from


def test_the_trainer_loads_target_heads_and_tokenizer_from_paths(tmp_path: Path) -> None:
    target, tokenizer = make_target(), make_tokenizer()
    target.bfloat16().save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    CloverHeads.from_target(target, num_heads=2).save_pretrained(tmp_path / "heads")
    trainer = CloverTrainer(
        model=str(tmp_path / "heads"),
        teacher_model=str(tmp_path / "target"),
        args=make_args(tmp_path / "out", model_init_kwargs=None),
        train_dataset=Dataset.from_dict({"text": ["w1 w2 w3 w4 w5"] * 4}),
    )
    assert trainer.teacher.model.dtype == torch.bfloat16  # its own
    assert trainer.processing_class.get_vocab() == tokenizer.get_vocab()
    trainer.train()


def test_evaluation_logs_losses_and_acceptance_of_every_head(tmp_path: Path) -> None:
    options = {"eval_dataset": random_ids([12, 9, 7, 14], seed=1)}
    trainer = trained(tmp_path, make_target(), options=options, eval_strategy="steps", eval_steps=1)
    lines = [line for line in trainer.state.log_history if "eval_loss" in line]
    assert len(lines) == 2
    assert {"eval_head_0/loss", "eval_head_2/top5_given_earlier", "eval_acceptance_length/top1"} <= lines[0].keys()
    expected = sum(0.7**i * lines[0][f"eval_head_{i}/loss"] for i in range(3))
    assert lines[0]["eval_loss"] == pytest.approx(expected, rel=1e-5)
    metrics = trainer.evaluate(random_ids([12, 9, 7, 14], seed=1))
    assert metrics["eval_loss"] == pytest.approx(lines[-1]["eval_loss"])
    assert metrics["eval_acceptance_length/top1"] >= 1  # so that a best checkpoint can be kept by it


def test_the_card_says_what_was_measured(tmp_path: Path) -> None:
    def written() -> tuple[str, dict[str, Any]]:
        trainer.create_model_card(dataset_name="some/dataset")
        return (tmp_path / "README.md").read_text(), json.loads((tmp_path / "clover_results.json").read_text())

    trainer = trained(tmp_path, make_target(), options={"eval_dataset": random_ids([12, 9], seed=1)})
    trainer.save_model()
    card, results = written()
    assert "some/dataset" in card
    assert "assistant_model=heads" in card
    assert "Acceptance by head" not in card
    assert (results["training"]["steps"], results["training"]["tokens"]) == (2, 88)
    trainer.evaluate()
    card, results = written()
    assert "Acceptance by head" in card
    assert len(results["acceptance"]["by_head"]) == 3


def test_push_to_hub_pushes_the_folder_with_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    push = Mock(**{"return_value.repo_url.repo_id": "org/heads"})
    monkeypatch.setattr("hf_clover.training.trainer.push_folder", push)
    trainer = make_trainer(tmp_path, make_target(), hub_model_id="org/heads", hub_token="t")
    trainer.hub_model_id = "org/heads"
    trainer.push_to_hub(dataset_name="some/dataset")
    push.assert_called_once()
    args, options = push.call_args
    assert args == (str(tmp_path), "org/heads")
    assert (options["token"], options["commit_message"]) == ("t", "End of training")
    assert options["results"]["training"]["datasets"] == ["some/dataset"]
    files = {file.name for file in tmp_path.iterdir()}
    assert {"config.json", "model.safetensors"} <= files
    assert "README.md" not in files, "the card comes when the push went through"


def test_metrics_equal_those_counted_by_hand() -> None:
    """Two heads: the first right 3 times in 4, the second once where the first was right, in 2 cases that count."""
    ranks = torch.tensor([[[0, 0, 0, 5]], [[0, 3, 0, 0]]])
    mask = torch.tensor([[[1, 1, 1, 1]], [[1, 1, 0, 0]]]).bool()
    metrics = HeadMetrics(2)
    for _ in range(2):
        metrics.update(torch.tensor([8.0, 3.0]), mask.sum((1, 2)), count_hits(ranks, mask), torch.tensor(5))
    one_process = SimpleNamespace(reduce=lambda tensor, reduction: tensor)
    values, tokens = metrics.compute(one_process)
    assert tokens == 10
    expected = {"head_0/loss": 2.0, "head_1/loss": 1.5, "head_0/top1": 0.75, "head_1/top1_given_earlier": 0.5}
    expected |= {"head_1/top4_given_earlier": 1.0, "acceptance_length/top1": 1 + 0.75 + 0.75 * 0.5}
    assert {name: values[name] for name in expected} == pytest.approx(expected)


# ------------------------------------------------------------------------------------------------ draft vocabulary


def test_a_draft_vocabulary_is_the_most_common_ids(tmp_path: Path, transformers_log: pytest.LogCaptureFixture) -> None:
    ids = [[10, 11, 12, 10, 11, 10]] * 3 + [[20, 21, 22, 23, 24, 10]]
    trainer = make_trainer(tmp_path, make_target(), Dataset.from_dict({"input_ids": ids}), draft_vocab_size=3)
    assert trainer.heads.draft_ids.tolist() == [10, 11, 12]
    assert "covers 79.17% of the 24 tokens" in transformers_log.text
    trainer.train()
    trainer.save_model()
    heads = CloverHeads.from_pretrained(tmp_path).bind(make_target())
    assert heads.draft_ids.tolist() == [10, 11, 12]
    assert heads.score(torch.randn(2, 32)).shape == (2, 3)


def test_the_draft_vocabulary_of_a_stream_is_filled_with_the_lowest_ids(tmp_path: Path) -> None:
    dataset = Dataset.from_dict({"input_ids": [[10, 11, 12, 10, 11, 10]] * 4}).to_iterable_dataset()
    trainer = make_trainer(tmp_path, make_target(), dataset, draft_vocab_size=5)
    assert trainer.heads.draft_ids.tolist() == [0, 1, 10, 11, 12]  # the lowest ids fill what the data leaves
