"""
Tiny targets, a tokenizer and data for the trainer's tests, made here: nothing is downloaded.

Contract: the words are single tokens; `<pad>`, `<s>` and `</s>` are 0, 1, 2. A target is deterministic in its seed and
its greedy continuations wander.
"""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_clover import CloverTrainer, CloverTrainingConfig

VOCAB = 48
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<s> ' + m.role + ' ' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + ' </s>' }}{% endgeneration %}{{ ' ' }}"
    "{% else %}{{ m.content + ' </s> ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s> assistant ' }}{% endif %}"
)

disable_progress_bars()


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<s>", "</s>", "<unk>", "user", "assistant", "system"]
    words += [f"w{i}" for i in range(VOCAB - len(words))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_target(seed: int = 0, hidden_size: int = 32, **fields: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": hidden_size,
            "intermediate_size": 2 * hidden_size,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **fields,
        }
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        target = LlamaForCausalLM(config)
        for name, parameter in target.named_parameters():  # livelier than the usual start, and as sure of itself
            if parameter.ndim == 2:
                scale = 1.0 if "embed" in name else (4.0 if "lm_head" in name else 1.5) * parameter.shape[1] ** -0.5
                parameter.data.normal_(0.0, scale)
            else:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
    return target.eval()


def own_text(target: LlamaForCausalLM, count: int = 8, length: int = 40) -> list[list[int]]:
    """The target's greedy continuations of one word each, as token ids."""
    prompts = torch.arange(7, 7 + count)[:, None]
    return target.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=length,
        min_new_tokens=length,
        do_sample=False,
    ).tolist()


def random_ids(lengths: list[int], seed: int = 0) -> Dataset:
    """A tokenised dataset."""
    generator = torch.Generator().manual_seed(seed)
    return Dataset.from_dict(
        {"input_ids": [torch.randint(7, VOCAB, (n,), generator=generator).tolist() for n in lengths]}
    )


def make_args(folder: str | Path, **fields: Any) -> CloverTrainingConfig:
    return CloverTrainingConfig(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "bf16": False,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4,
            "max_steps": 2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "model_init_kwargs": {"num_heads": 3},
            **fields,
        }
    )


def make_trainer(
    folder: str | Path, target: Any, dataset: Any = None, *, options: Any = None, **args: Any
) -> CloverTrainer:
    """A trainer over `dataset` (random ids by default); `options` are the trainer's own arguments."""
    dataset = random_ids([12, 9, 16, 7, 12, 10, 14, 8]) if dataset is None else dataset
    return CloverTrainer(
        teacher_model=target,
        args=make_args(folder, **args),
        **{"train_dataset": dataset, "processing_class": make_tokenizer(), **(options or {})},
    )


def losses(trainer: CloverTrainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]
