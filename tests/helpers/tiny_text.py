"""A tiny target of bytes with fitted heads, saved in folders like a user's: readable text, and drafts that are
accepted.

Contract: the tokenizer is byte-level, with a token for each byte of `LETTERS`, so that é is two tokens; `</s>` ends a
text. The target is deterministic. A short fit to its greedy text is enough for some drafts to be accepted.
"""

from pathlib import Path

import torch
from helpers.fitting import fit
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_clover import CloverHeads

PROMPT = "def f(x):"
LETTERS = "abcdefghijklmnopqrstuvwxyz \n():=[]éè👋"
ASCII = LETTERS.encode("ascii", "ignore").decode()
PAD, END = 0, 1
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def make_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """`template`: of chats."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens = ["<pad>", "</s>", *sorted(set(split.pre_tokenize_str(LETTERS)[0][0]))]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    ends = {"pad_token": "<pad>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends, chat_template=template)


def make_target(says: str = LETTERS) -> LlamaForCausalLM:
    """`says`: the letters that the target uses. With all letters, its bytes do not always form characters."""
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,  # longer than any test's text
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=END,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = LlamaForCausalLM(config).eval()
        for name, parameter in target.named_parameters():
            if parameter.ndim == 2:
                scale = 1.0 if "embed" in name else (4.0 if "lm_head" in name else 1.5) * parameter.shape[1] ** -0.5
                parameter.data.normal_(0.0, scale)
        unsaid = sorted(set(range(len(tokenizer))) - set(tokenizer(says).input_ids))
        target.lm_head.weight.data[unsaid] = 0.0  # never the most likely
    return target


def save_folders(folder: Path, says: str = LETTERS) -> Path:
    """Save `folder`/target and `folder`/heads."""
    target, tokenizer = make_target(says), make_tokenizer()
    heads = CloverHeads.from_target(target, num_heads=3)
    fit(heads, target, steps=80, temperature=0.3, prompt=tokenizer(PROMPT, return_tensors="pt").input_ids)
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    heads.save_pretrained(folder / "heads")
    return folder
