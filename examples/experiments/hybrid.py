"""What are heads worth on a target with recurrent layers, which can verify chains only, and replays them?

A target of Qwen3.5's shape (three gated delta rules to one attention) is made from a configuration, with random
weights and about 30 million parameters; clover-x heads learn its own greedy answers by heart, so that the loop is
measured and not the heads. Plain `generate` and chains are timed in turn, prompt by prompt.

    python examples/experiments/hybrid.py
"""

import argparse
import datetime
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from common import HERE
from torch.nn import functional as F
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from hf_clover import CloverHeads
from hf_clover.measure.benchmark import write
from hf_clover.measure.provenance import provenance
from hf_clover.targets.hidden_states import capture_states
from hf_clover.training.optimizers import MUON_RATE, MuonAndAdamW

QUESTION = "What are heads worth on a target with recurrent layers?"


def make_target(width: int, layers: int, vocab_size: int) -> PreTrainedModel:
    """Weights large enough that its greedy text wanders."""
    heads = max(width // 64, 1)
    config = Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 3, 1),
        head_dim=64,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        **dict(bos_token_id=1, eos_token_id=None, pad_token_id=0),
    )
    target = Qwen3_5ForCausalLM(config).eval()
    for name, weight in target.named_parameters():
        if "embed" in name:
            weight.data.normal_()
        elif weight.ndim == 2 and "conv" not in name:
            weight.data.normal_(0, (3.0 if "lm_head" in name else 1.2) * weight.shape[1] ** -0.5)
    return target


def learn_by_heart(heads: CloverHeads, target: PreTrainedModel, texts: torch.Tensor, steps: int) -> None:
    """Cross-entropy of every head on `texts` [N, L], six of them a step."""
    captured: list[torch.Tensor] = []
    with torch.no_grad(), capture_states(target, captured):
        target(texts)
    weights = list(heads.parameters())
    groups = [
        {"params": [w for w in weights if (w.ndim == 2) is decays], "weight_decay": 0.0} for decays in (True, False)
    ]
    optimizer = MuonAndAdamW(groups, lr=2e-3, muon_lr=MUON_RATE)
    for step in range(steps):
        some = torch.randint(0, len(texts), (6,))
        states, tokens = captured[0][some], texts[some]  # [6, L, d], [6, L]
        outputs = heads(states[:, :-1], tokens[:, 1:]).head_outputs  # [K, 6, L - 1, d]
        loss = 0.0
        for level, out in enumerate(outputs):
            logits = heads.score(out[:, : tokens.shape[1] - 2 - level])
            loss = loss + F.cross_entropy(logits.flatten(0, 1), tokens[:, 2 + level :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} of {steps}: loss {float(loss.detach()) / len(outputs):.2f}", flush=True)
    heads.eval()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=120, help="of learning by heart")
    parser.add_argument("--tokens", type=int, default=100, help="of an answer")
    parser.add_argument("--prompts", type=int, default=8, help="that are timed, of 24 that are learned")
    parser.add_argument("--batch-size", type=int, default=1, help="prompts at once; `--prompts` counts batches")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="where the JSON goes")
    args = parser.parse_args(argv)
    if (args.prompts + 1) * args.batch_size > 24:
        parser.error(f"--prompts {args.prompts} and one to warm up, --batch-size {args.batch_size}: 24 are learned")
    torch.manual_seed(0)
    target = make_target(args.width, args.layers, args.vocab_size)
    prompts = torch.randint(2, args.vocab_size, (24, 4))
    options = dict(max_new_tokens=args.tokens, do_sample=False)
    texts = target.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
    heads = CloverHeads.from_target(target)
    learn_by_heart(heads, target, texts, args.steps)

    rows = []
    for nodes in (None, 2, 4, 8):
        plain, ours, new, forwards = 0.0, 0.0, 0, 0
        for number in range(args.prompts + 1):  # the first warms up, and is tried
            some = prompts[number * args.batch_size :][: args.batch_size]
            inputs = dict(input_ids=some, attention_mask=torch.ones_like(some))
            started = time.perf_counter()
            wanted = target.generate(**inputs, **options)
            between = time.perf_counter()
            how = dict(assistant_model=heads, num_assistant_tokens=nodes, return_dict_in_generate=True)
            out = target.generate(**inputs, **options, **how)
            ended = time.perf_counter()
            assert torch.equal(out.sequences, wanted)
            if number:
                plain, ours = plain + between - started, ours + ended - between
                new, forwards = new + out.speculation.new_tokens, forwards + out.speculation.row_forwards
        row = {"method": out.speculation.method, "nodes": nodes, "tokens_per_forward": new / forwards}
        row |= {"speedup": plain / ours, "efficiency": plain / ours / (new / forwards)}
        rows.append({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()})
        print(rows[-1], flush=True)
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    settings["parameters"] = sum(weight.numel() for weight in target.parameters())
    name = "hybrid" if args.batch_size == 1 else f"hybrid-{args.batch_size}-rows"
    result = {"kind": "experiment", "name": "hybrid", "question": QUESTION, "settings": settings, **provenance()}
    write({**result, "date": datetime.date.today().isoformat(), "rows": rows}, args.output / f"{name}.json")


if __name__ == "__main__":
    main()
