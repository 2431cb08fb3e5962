"""Bad input: each is a clear error, at the start where it can be known at the start."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import LoraConfig
from tiny import VOCAB, make_args, make_target, make_tokenizer, make_trainer, random_ids
from transformers import BloomConfig, BloomForCausalLM, PreTrainedTokenizerFast

from hf_clover import CloverHeads, CloverTrainer
from hf_clover.training.arguments import check_parallelism

pytestmark = pytest.mark.long("hf_clover/network")

ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "wrapped packing": ({"packing": True, "packing_strategy": "wrapped"}, "packing_strategy='wrapped'.*'bfd'"),
    "gradient checkpointing": ({"gradient_checkpointing": True}, "gradient_checkpointing=True.*leave it off"),
    "label smoothing": ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1.*target's distribution already"),
    "neftune": ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0.*no input embedding"),
    "liger": ({"use_liger_kernel": True}, "use_liger_kernel=True.*chunks already"),
    "router": ({"router_aux_loss_coef": 0.1}, "router_aux_loss_coef=0.1.*frozen"),
    "cloned template": ({"chat_template_path": "some/model"}, "chat_template_path='some/model'.*.jinja"),
    "loss of SFT": ({"loss_type": "nll"}, r"loss_type='nll'.*\['clover-2', 'clover', 'kl', 'acceptance'\]"),
    "decay": ({"loss_decay": 1.5}, "loss_decay=1.5.*from 0 to 1"),
    "weight": ({"hidden_loss_weight": -1.0}, "hidden_loss_weight=-1.0.*negative"),
    "draft vocabulary": ({"draft_vocab_size": 0}, "draft_vocab_size=0.*positive"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_impossible_training_arguments_are_refused_by_name(tmp_path: Path, name: str) -> None:
    fields, message = ARGUMENTS[name]
    with pytest.raises(ValueError, match=message):
        make_args(tmp_path, **fields)


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "compute_loss_func": ({"compute_loss_func": lambda *_: 0}, "`compute_loss_func` is SFTTrainer's.*loss_type"),
    "compute_metrics": ({"compute_metrics": lambda _: {}}, "`compute_metrics` is SFTTrainer's.*no logits"),
    "preprocess": ({"preprocess_logits_for_metrics": lambda x, _: x}, "`preprocess_logits_for_metrics`.*no logits"),
    "quantization": ({"quantization_config": object()}, "`quantization_config`.*teacher_model_init_kwargs"),
    "unknown": ({"no_such_thing": 1}, "unexpected keyword argument 'no_such_thing'"),
    "no teacher": ({"teacher_model": None}, "`teacher_model` is required"),
    "the target as the heads": (
        {"teacher_model": None, "model": make_target()},
        "the target was passed as `model`, a `LlamaForCausalLM`: pass it as `teacher_model`",
    ),
    "a name of who knows what": (
        {"teacher_model": None, "model": "org/model"},
        "`model='org/model'` names heads to go on with: if it is the target, pass it as `teacher_model`",
    ),
    "target as model": ({"model": make_target()}, "`model` must be Clover heads.*LlamaForCausalLM.*`teacher_model`"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_impossible_options_of_the_trainer_are_refused_by_name(tmp_path: Path, name: str) -> None:
    options, message = OPTIONS[name]
    given = {"teacher_model": make_target(), "args": make_args(tmp_path), "train_dataset": random_ids([9] * 4)}
    with pytest.raises((TypeError, ValueError), match=message):
        CloverTrainer(**{**given, "processing_class": make_tokenizer(), **options})


def test_a_dataset_without_a_known_column_is_refused(tmp_path: Path) -> None:
    dataset = Dataset.from_dict({"question": ["w1 w2"], "answer": ["w3 w4"]})
    with pytest.raises(ValueError, match=r"columns \['answer', 'question'\] and none.*`dataset_text_field`"):
        make_trainer(tmp_path, make_target(), dataset)
    with pytest.raises(ValueError, match="eval dataset has the columns"):
        make_trainer(tmp_path, make_target(), options={"eval_dataset": dataset})


@pytest.mark.parametrize("packing", [False, True])
def test_a_dataset_of_samples_too_short_is_refused(tmp_path: Path, packing: bool) -> None:
    with pytest.raises(ValueError, match=r"too short for 3 heads: they need 5 tokens, and the longest has 4.*`num"):
        make_trainer(tmp_path, make_target(), random_ids([4, 3, 4, 2]), packing=packing)


def test_a_stream_of_samples_too_short_is_an_error_in_training(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, make_target(), random_ids([2, 1, 2, 2]).to_iterable_dataset())
    with pytest.raises(ValueError, match="`train_dataset` gave no sample that is long enough"):
        trainer.train()


def test_short_samples_among_long_ones_are_left_out(
    tmp_path: Path, transformers_log: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(tmp_path, make_target(), random_ids([12, 2, 1, 9]))
    assert [len(ids) for ids in trainer.train_dataset["input_ids"]] == [12, 9]
    assert "2 of 4 samples are shorter than 3 tokens" in transformers_log.text


def test_a_tokenizer_with_more_tokens_than_the_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not the target's tokenizer: it gives 'w40' the id 47.*40 token embeddings"):
        make_trainer(tmp_path, make_target(vocab_size=40), random_ids([9] * 4))


def test_a_tokenizer_that_is_not_the_targets_is_refused(tmp_path: Path) -> None:
    target, tokenizer = make_target(), make_tokenizer()
    target.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    target = type(target).from_pretrained(tmp_path)
    words = tokenizer.get_vocab()
    words["w1"], words["w2"] = words["w2"], words["w1"]
    backend = type(tokenizer.backend_tokenizer)(type(tokenizer.backend_tokenizer.model)(words, unk_token="<unk>"))
    other = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")
    with pytest.raises(ValueError, match=r"not the target's tokenizer: 48 of the 48.*'w1' is 9 in it and 8 in"):
        make_trainer(tmp_path / "out", target, options={"processing_class": other})


def test_heads_of_another_target_are_refused(tmp_path: Path) -> None:
    heads = CloverHeads.from_target(make_target(seed=1))
    with pytest.raises(ValueError, match="made for another target"):
        make_trainer(tmp_path, make_target(), options={"model": heads})
    with pytest.raises(ValueError, match="made for another target: their hidden_size is 32"):
        make_trainer(tmp_path, make_target(hidden_size=64), options={"model": heads})


def test_an_optimizer_that_would_train_the_target_is_refused(tmp_path: Path) -> None:
    target = make_target()
    optimizer = torch.optim.AdamW(target.parameters())
    with pytest.raises(ValueError, match=r"would train 21 parameters of the target.*heads.parameters\(\)"):
        make_trainer(tmp_path, target, options={"optimizers": (optimizer, None)})


def test_a_draft_vocabulary_larger_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"draft_vocab_size=100.*at most {VOCAB}"):
        make_trainer(tmp_path, make_target(), draft_vocab_size=100)


def test_a_draft_vocabulary_with_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"draft_vocab_size=20.*an adapter does not carry the ids"):
        make_trainer(tmp_path, make_target(), draft_vocab_size=20, options={"peft_config": LoraConfig()})


def test_a_loss_that_is_not_finite_stops_training(tmp_path: Path) -> None:
    heads = CloverHeads.from_target(make_target(), "clover-2", num_heads=2)
    heads.first_fc.weight.data.fill_(float("nan"))
    trainer = make_trainer(tmp_path, make_target(), options={"model": heads})
    with pytest.raises(FloatingPointError, match=r"at step 0: the loss of heads \[0\] is not finite.*learning_rate"):
        trainer.train()


def test_target_states_that_are_not_finite_stop_training(tmp_path: Path) -> None:
    target = make_target()
    trainer = make_trainer(tmp_path, target)
    target.model.layers[0].mlp.down_proj.weight.data.fill_(float("inf"))
    with pytest.raises(FloatingPointError, match="stopped at step 0: the target's own hidden states are not finite"):
        trainer.train()


def test_packing_with_a_target_that_mixes_documents_is_refused(tmp_path: Path) -> None:
    """Bloom knows no position_ids, so packed documents see each other."""
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.5)
    target = BloomForCausalLM(config).eval()
    make_trainer(tmp_path, target).train()
    with pytest.raises(ValueError, match="`packing=True` does not work with the target `BloomForCausalLM`"):
        make_trainer(tmp_path, target, packing=True)


PARALLELISM: dict[str, tuple[dict[str, Any], str]] = {
    "FSDP version 1": ({"fsdp_version": 1}, "`fsdp_version: 1` flattens .* set `fsdp_version: 2`"),
    "empty targets": ({"cpu_ram_efficient_loading": True}, "`fsdp_cpu_ram_efficient_loading: true`.*set it to false"),
    "context parallelism": ({"cp_enabled": True}, "`cp_size` or `sp_size` above 1.*leave both at 1"),
}


@pytest.mark.parametrize("name", PARALLELISM)
def test_kinds_of_parallelism_that_do_not_work_are_refused(name: str) -> None:
    settings, message = PARALLELISM[name]
    settings = {"fsdp_version": 2, "cpu_ram_efficient_loading": False, "cp_enabled": False, **settings}
    accelerator = SimpleNamespace(
        distributed_type=DistributedType.FSDP,
        state=SimpleNamespace(fsdp_plugin=SimpleNamespace(**settings)),
        parallelism_config=SimpleNamespace(cp_enabled=settings["cp_enabled"], sp_enabled=False),
    )
    with pytest.raises(ValueError, match=message):
        check_parallelism(accelerator)


def test_training_without_trl_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "hf_clover.training.config")
    with pytest.raises(ImportError, match=r"pip install 'hf-clover\[train\]'"):
        importlib.import_module("hf_clover.training.config")
