"""A tiny target with a tokenizer, heads that guess some of its text, and an adapter of them, as folders."""

from dataclasses import dataclass
from pathlib import Path

import torch
from helpers.fitting import fit
from helpers.zoo import build
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from hf_clover import CloverHeads

PROMPT = "The quick brown fox"
WORDS = ["<pad>", "<unk>", *PROMPT.split(), *(f"w{i}" for i in range(26))]

RESULTS = {
    "training": {
        "datasets": ["org/data"],
        "tokens": 65536,
        "steps": 60,
        "settings": {"learning_rate": 0.005},
        "command": "hf-clover train --config heads.yaml",
        "versions": {"transformers": "5.23.0"},
    },
    "acceptance": {"prompts": "org/prompts", "by_head": [{"top1": 0.5, "top5": 0.875}, {"top1": 0.25}]},
    "benchmarks": [
        {
            "prompts": "org/prompts",
            "machine": "a machine | with 2 cores",
            "precision": "float32",
            "baseline": "plain generate, dynamic cache",
            "command": "hf-clover benchmark --target org/target --heads org/clover-heads",
            "rows": [
                {"batch_size": 1, "tokens_per_forward": 2.25, "speedup": 1.5, "efficiency": 0.67},
                {"batch_size": 4, "tokens_per_forward": 2.5},
            ],
        }
    ],
}


@dataclass
class Folders:
    target: Path
    heads: Path
    adapter: Path
    tokens: list[list[int]]  # the prompt and what plain generate continues it with
    forwards: int  # of the target, with these heads


def save_models(folder: Path) -> Folders:
    folders = Folders(folder / "target", folder / "heads", folder / "adapter", [], 0)
    torch.set_num_threads(1)
    target = build("llama", vocab_size=len(WORDS))
    target.config._name_or_path = "org/target"
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")
    target.save_pretrained(folders.target)
    tokenizer.save_pretrained(folders.target)

    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    heads = CloverHeads.from_target(target, num_heads=3, target_revision="a" * 40)
    fit(heads, target, steps=15, prompt=prompt)
    heads.generation_config.num_assistant_tokens = 6
    heads.save_pretrained(folders.heads)
    out = target.generate(prompt, max_new_tokens=64, assistant_model=heads, return_dict_in_generate=True)
    folders.forwards = out.speculation.target_forwards
    folders.tokens = target.generate(prompt, max_new_tokens=64).tolist()
    assert folders.forwards < 60, folders.forwards  # so that heads with other weights would show

    heads.name_or_path = heads.config._name_or_path = "org/clover-heads"
    adapted = get_peft_model(heads, LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False))
    adapted.save_pretrained(folders.adapter, save_embedding_layers=False)
    return folders


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
