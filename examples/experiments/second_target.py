"""Make the second target: a language model of another family and size than the stand-in, of the same text.

A GPT-NeoX of 12 layers and width 96: LayerNorms with biases, rotary embedding on a quarter of each head, attention and
MLP side by side, no gate. It has the stand-in's tokenizer. Everything is seeded; what it learns from is Python's
standard library and the installed packages, as `train_stand_in.py` collects them, so other versions of them make a
slightly different model. The folder `second_target/` holds the one that `learning.py` was run on.

    python examples/experiments/second_target.py
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoTokenizer, GPTNeoXConfig, GPTNeoXForCausalLM

from hf_clover.measure.prompts import held_out_sources
from hf_clover.measure.provenance import provenance

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from train_stand_in import MuonAndAdam, collect, encode, held_out_loss, next_token_loss, rate, sample_windows  # noqa: E402

STAND_IN = HERE.parent / "stand_in" / "target"
RATES = 0.02, 4e-3  # of Muon and of Adam, as the stand-in's


def make(args: argparse.Namespace, vocab_size: int) -> GPTNeoXForCausalLM:
    torch.manual_seed(args.seed)
    ids = dict(bos_token_id=0, eos_token_id=0, pad_token_id=1)
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=vocab_size, hidden_size=args.width, intermediate_size=4 * args.width,
            num_hidden_layers=args.layers, num_attention_heads=args.width // 32, max_position_embeddings=2048,
            hidden_act="gelu", **ids,
        )
    )  # fmt: skip


def train(args: argparse.Namespace, model: GPTNeoXForCausalLM, streams: list[torch.Tensor]) -> float:
    """The training loss of late."""
    # The optimizer looks for layers where a Llama has them.
    parts = SimpleNamespace(model=model.gpt_neox, parameters=model.parameters)
    optimizer = MuonAndAdam(parts, *RATES)
    generator = torch.Generator().manual_seed(args.seed)
    model.set_attn_implementation("eager")  # backward, sdpa is slower on a CPU
    recent = None
    bar = tqdm(range(args.steps), desc="second target")
    for step in bar:
        for group, lr in zip(optimizer.param_groups, RATES):
            group["lr"] = lr * rate(step / args.steps)
        windows = sample_windows(streams, args.batch_size, args.length, generator)
        loss = next_token_loss(model, windows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent = loss.item() if recent is None else 0.98 * recent + 0.02 * loss.item()
        bar.set_postfix(loss=f"{recent:.3f}", refresh=False)
    model.set_attn_implementation("sdpa")
    return recent


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "second_target", help="where the target goes")
    parser.add_argument("--tokenizer", default=str(STAND_IN), help="the stand-in's, unless you say otherwise")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=8, help="windows of text in a step")
    parser.add_argument("--length", type=int, default=256, help="tokens in a window")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    streams = [encode(tokenizer, texts) for texts in collect(np.random.default_rng(args.seed)).values()]
    held_out = encode(tokenizer, list(held_out_sources().values()))
    model = make(args, len(tokenizer))
    train_loss = train(args, model, streams)
    model.eval()
    tokens = args.steps * args.batch_size * args.length
    report = {
        "tokens": tokens, "steps": args.steps, "train_loss": train_loss,
        "held_out_loss": held_out_loss(model, held_out, 50),
        "parameters": sum(parameter.numel() for parameter in model.parameters()), **provenance(),
    }  # fmt: skip
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    print(report)


if __name__ == "__main__":
    main()
