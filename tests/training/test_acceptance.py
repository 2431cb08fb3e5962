"""What training is for: on its own data a run lifts the measured tokens per forward, and the callback says so."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tiny import make_target, make_trainer, own_text

from hf_clover import AcceptanceCallback, CloverHeads

pytestmark = pytest.mark.long("hf_clover/training", "hf_clover/network")

SETTINGS = {  # learning rate, steps
    "clover-x": (3e-3, 80),
    "clover-2": (3e-3, 160),
    "clover": (5e-3, 160),
    "medusa": (1e-2, 260),
}


@pytest.mark.parametrize("variant", SETTINGS)
def test_overfitting_lifts_tokens_per_forward(tmp_path: Path, variant: str) -> None:
    target = make_target(hidden_size=64, vocab_size=256, eos_token_id=None)
    target.generation_config.eos_token_id = None
    texts = own_text(target, 6, 36)
    learning_rate, steps = SETTINGS[variant]
    trainer = make_trainer(
        tmp_path,
        target,
        Dataset.from_dict({"input_ids": texts}),
        max_steps=steps,
        learning_rate=learning_rate,
        lr_scheduler_type="constant_with_warmup",
        per_device_train_batch_size=6,
        logging_steps=steps,
        model_init_kwargs={"variant": variant},
    )
    callback = AcceptanceCallback(trainer, [text[:4] for text in texts], max_new_tokens=32)
    before, _ = callback.measure()
    trainer.train()
    after, sample = callback.measure()
    assert before["tokens_per_forward"] < 1.3
    assert after["tokens_per_forward"] > 3
    assert after["efficiency"] == pytest.approx(after["speedup"] / after["tokens_per_forward"])
    assert "⟦" in sample

    saved = tmp_path / "saved"
    trainer.save_model(saved)
    prompt = torch.tensor([texts[0][:4]])
    heads = CloverHeads.from_pretrained(saved)
    out = target.generate(
        prompt, assistant_model=heads, max_new_tokens=32, do_sample=False, return_dict_in_generate=True
    )
    assert out.sequences[0].tolist() == texts[0][:36]
    assert out.speculation.tokens_per_forward > 2.5


def test_the_callbacks_figures_choose_the_best_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = make_target()
    data = Dataset.from_dict({"input_ids": own_text(target, 4, 24)})
    trainer = make_trainer(
        tmp_path,
        target,
        data,
        options={"eval_dataset": {"own": data, "same": data}},
        max_steps=20,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=10,
        save_strategy="steps",
        save_steps=10,
        load_best_model_at_end=True,
        metric_for_best_model="tokens_per_forward",
        greater_is_better=True,
    )
    trainer.add_callback(AcceptanceCallback(trainer, num_prompts=2, max_new_tokens=16))
    trainer.train()
    lines = [line for line in trainer.state.log_history if "eval_tokens_per_forward" in line]
    assert [line["step"] for line in lines] == [10, 20]
    assert all({"eval_speedup", "eval_efficiency"} <= line.keys() for line in lines)
    assert trainer.state.best_metric == max(line["eval_tokens_per_forward"] for line in lines)
    assert Path(trainer.state.best_model_checkpoint).name.startswith("checkpoint-")
    assert "tokens per forward by generate. A sample:" in capsys.readouterr().out


def test_the_callback_measures_every_freq_steps_with_given_prompts(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, make_target(), max_steps=4)
    messages = [{"role": "user", "content": "w1 w2"}]
    for prompts in (["w1 w2 w3"], [messages]):
        trainer.add_callback(AcceptanceCallback(trainer, prompts, max_new_tokens=8, freq=2))
    trainer.train()
    lines = [line for line in trainer.state.log_history if "eval_tokens_per_forward" in line]
    assert [line["step"] for line in lines] == [2, 2, 4, 4]
    assert [line["step"] for line in trainer.state.log_history if "head_0/loss" in line] == [1, 2, 3, 4]


def test_the_callback_works_with_two_adapters_and_a_bfloat16_target(tmp_path: Path) -> None:
    target = get_peft_model(make_target().bfloat16(), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    options = {"peft_config": LoraConfig(r=2)}
    trainer = make_trainer(tmp_path, target, options=options, bf16=True)
    trainer.add_callback(AcceptanceCallback(trainer, ["w1 w2 w3"], max_new_tokens=8, freq=1))
    trainer.train()
    lines = [line for line in trainer.state.log_history if "eval_tokens_per_forward" in line]
    assert [line["step"] for line in lines] == [1, 2]


def test_the_marked_tokens_are_the_drafted_ones(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, make_target())
    callback = AcceptanceCallback(trainer, [[8, 9]])
    marked = callback._marked([8, 9], [[10], [11, 12, 13], [14]])
    assert marked == "w1 w2 w3⟦ w4 w5⟧ w6 w7"


SENT = [{"role": "user", "content": "w1 w2 w3 w4 w5 w6 w7 w8"}]
ANSWERED = [{"role": "assistant", "content": "w9 w10"}, {"role": "user", "content": "w11"}]
AS_SENT = "<s> user w1 w2 w3 w4 w5 w6 w7 w8 </s> <s> assistant"
FORMS = {
    "messages": ({"messages": [*SENT, *ANSWERED]}, AS_SENT),
    "an instruction first": (
        {"messages": [{"role": "system", "content": "w12"}, *SENT, *ANSWERED]},
        f"<s> system w12 </s> {AS_SENT}",
    ),
    "a greeting first": (
        {"messages": [ANSWERED[0], *SENT, *ANSWERED]},
        f"<s> assistant w9 w10 </s> {AS_SENT}",
    ),
    "conversations": (
        {"conversations": [{"from": "user", "value": SENT[0]["content"]}, {"from": "assistant", "value": "w9"}]},
        AS_SENT,
    ),
    "messages and a completion": ({"prompt": SENT, "completion": ANSWERED[:1]}, AS_SENT),
    "text and a completion": ({"prompt": "w1 w2 w3 w4", "completion": " w5"}, "w1 w2 w3 w4"),
}


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_prompts_are_what_a_user_would_send(
    form: str, packing: bool, tmp_path: Path, transformers_log: pytest.LogCaptureFixture
) -> None:
    sample, text = FORMS[form]
    data = Dataset.from_list([sample] * 3)
    trainer = make_trainer(tmp_path, make_target(), data, options={"eval_dataset": data}, packing=packing)
    callback = AcceptanceCallback(trainer, num_prompts=2)
    assert [trainer.processing_class.decode(prompt) for prompt in callback.prompts] == [text] * 2
    assert "AcceptanceCallback" not in transformers_log.text


def test_samples_without_a_prompt_are_continued_from_their_first_quarter(
    tmp_path: Path, transformers_log: pytest.LogCaptureFixture
) -> None:
    texts = Dataset.from_dict({"text": ["w1 w2 w3 w4 w5 w6 w7"] * 3})
    trainer = make_trainer(tmp_path, make_target(), texts, options={"eval_dataset": texts})
    callback = AcceptanceCallback(trainer)
    assert [trainer.processing_class.decode(prompt) for prompt in callback.prompts] == ["w1 w2"] * 3
    assert "`eval_dataset` does not say what was asked and what was answered" in transformers_log.text
    assert "AcceptanceCallback continues the first quarter of each sample; pass `prompts`" in transformers_log.text


def test_prompts_that_are_longer_than_training_are_left_out(tmp_path: Path) -> None:
    short = [{"role": "user", "content": "w1"}, *ANSWERED]
    data = Dataset.from_dict({"messages": [[*SENT, *ANSWERED], short, [*SENT, *ANSWERED], short]})
    trainer = make_trainer(tmp_path, make_target(), data, options={"eval_dataset": {"own": data}}, max_length=10)
    prompts = AcceptanceCallback(trainer).prompts
    assert [trainer.processing_class.decode(prompt) for prompt in prompts] == ["<s> user w1 </s> <s> assistant"] * 2


def test_the_callback_without_prompts_or_eval_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass `prompts`, or an `eval_dataset`"):
        AcceptanceCallback(make_trainer(tmp_path, make_target()))
