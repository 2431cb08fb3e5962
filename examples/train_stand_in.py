"""Make the stand-in: a small real language model of Python code, and Clover heads for it, from files that every
installation has.

The text is Python's standard library (without tests, idlelib and generated tables, and without the modules that are
held out for measuring) and the sources of the packages that this project installs. The program makes, in this order: a
tokenizer, the target (a Llama of 12 layers), the target's own continuations of that text, and heads of all variants,
distilled from the same continuations for the same number of tokens. Each stage is kept in `--work`; a stopped run
continues from there. Everything is seeded, but a stage ends when its share of `--minutes` is over, so a faster machine
makes a better stand-in.

    python examples/train_stand_in.py --minutes 180
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from huggingface_hub import ModelCard
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_clover import CloverHeads, CloverTrainer, CloverTrainingConfig
from hf_clover.hub.code import remove_code
from hf_clover.hub.push import write_card, write_results
from hf_clover.measure.benchmark import measure, plain, with_heads
from hf_clover.measure.prompts import HELD_OUT, STAND_IN, held_out_sources, load_prompts, standard_library
from hf_clover.measure.provenance import provenance

HERE = Path(__file__).resolve().parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
END, PAD = "<|endoftext|>", "<|pad|>"
PACKAGES = (
    "accelerate", "click", "datasets", "filelock", "fsspec", "huggingface_hub", "jinja2", "networkx", "numpy",
    "packaging", "pandas", "peft", "pydantic", "pygments", "rich", "setuptools", "sympy", "tokenizers", "torch",
    "transformers", "trl", "typer",
)  # fmt: skip
LEFT_OUT = {"test", "tests", "testing", "idlelib", "idle_test", "lib2to3", "encodings", "pydoc_data", "turtledemo",
            "site-packages", "__pycache__", "_vendor", "vendor", "generated", "lexers"}  # fmt: skip
CHARACTERS_PER_PACKAGE = 3_000_000  # most characters of a package, so that none dominates the text
SHORT, WINDOW = 256, 512  # tokens of a training sample; attention is slow on a CPU, so long samples are used last
LONG_FROM = 0.7  # share of the target's training after which samples are long
TARGET_SHARE, CONTINUATION_SHARE = 0.5, 0.1  # shares of the time; the rest is for the heads
TARGET_RATES = 0.02, 4e-3  # learning rates of Muon and of Adam
# For the papers' variants: ten times their rate and a hundredth of their weight for the hidden states. After 120 steps
# of 2,048 tokens for an early target, rates of 0.001, 0.003, 0.008 and 0.015 with weights of 10, 1, 0.3 and 0.1 gave
# heads that imply chains of 1.20, 1.34, 1.43 and 1.46 tokens. clover-x is trained with the library's defaults, which
# examples/experiments/ablation.py measures.
HEADS_RATE, HIDDEN_WEIGHT = 0.01, 0.1
PROMPT, CONTINUED_AT_ONCE, EVALUATED = 64, 64, 128  # tokens; windows; continuations kept for evaluation
HEADS = {"heads": "clover-x", "clover-2": "clover-2", "clover": "clover", "medusa": "medusa"}  # folder -> variant


TARGET_CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
language: code
---

# The stand-in

A language model of Python code, small enough for a repository: a Llama of {layers} layers of width {width},
{parameters:,} parameters. It replaces a model of your own if there is no network. Its text and its probabilities are
those of a real language model, but do not rely on what it says. `examples/train_stand_in.py` made it from Python's
standard library and the sources of installed packages. The folders beside it hold its draft heads.

| | |
|---|---|
| tokens seen in training | {tokens:,} |
| steps | {steps:,} |
| held-out loss, nats per token | {held_out_loss:.3f} |
| held-out bits per character | {held_out_bits_per_character:.3f} |
| machine | {machine} |

The held-out modules of the standard library, which the model never saw, are listed in
`hf_clover.measure.prompts.HELD_OUT`. Positions beyond 512 were never trained.
"""

# ---------------------------------------------------------------------- text


def source_files(root: Path, limit: int, rng: np.random.Generator) -> list[str]:
    """Texts of files below `root`, in a random order, without tests, tables and held-out modules. The file that passes
    `limit` characters is the last one."""
    paths = [path for path in sorted(root.rglob("*.py")) if not LEFT_OUT & set(path.relative_to(root).parts)]
    texts, total = [], 0
    for index in rng.permutation(len(paths)):
        path = paths[index]
        is_held_out = root == standard_library() and path.relative_to(root).parts[0].removesuffix(".py") in HELD_OUT
        if is_held_out or path.name.startswith(("test_", "_sysconfigdata")) or total > limit:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if 500 < len(text) < 200_000 and max(map(len, text.splitlines())) < 400:  # a longer line is a table
            texts.append(text)
            total += len(text)
    return texts


def collect(rng: np.random.Generator) -> dict[str, list[str]]:
    site_packages = Path(np.__file__).parents[1]
    packages: list[str] = []
    for name in PACKAGES:
        packages += source_files(site_packages / name, CHARACTERS_PER_PACKAGE, rng)
    return {"standard library": source_files(standard_library(), 10**9, rng), "packages": packages}


def make_tokenizer(texts: list[str], size: int, folder: Path) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END, PAD], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, bos_token=END, pad_token=PAD, model_max_length=2048,
        clean_up_tokenization_spaces=False, padding_side="left",
    )  # fmt: skip
    fast.save_pretrained(folder)
    return fast


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """One stream of ids, with the end token before every text."""
    stream: list[int] = []
    for row in tokenizer(texts).input_ids:
        stream += [tokenizer.eos_token_id, *row]
    return torch.tensor(stream, dtype=torch.int16)


# ---------------------------------------------------------------------- the target


def target_config(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=args.width, intermediate_size=args.width * 5 // 2,
        num_hidden_layers=args.layers, num_attention_heads=args.width // 64, num_key_value_heads=args.width // 128,
        max_position_embeddings=2048, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip


def sample_windows(streams: list[torch.Tensor], count: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """[count, width]: every second window from the standard library, the others from the packages."""
    rows = []
    for i in range(count):
        stream = streams[i % len(streams)]
        start = int(torch.randint(len(stream) - width, (), generator=generator))
        rows.append(stream[start : start + width])
    return torch.stack(rows).long()


def next_token_loss(model: LlamaForCausalLM, windows: torch.Tensor) -> torch.Tensor:
    windows = windows.to(model.device)
    with torch.autocast(model.device.type, torch.bfloat16):
        logits = model(windows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, stream: torch.Tensor, windows: int) -> float:
    windows = min(windows, len(stream) // WINDOW)
    starts = torch.linspace(0, len(stream) - WINDOW, windows).long().tolist()
    losses = [next_token_loss(model, stream[start : start + WINDOW].long()[None]).item() for start in starts]
    return sum(losses) / len(losses)


class MuonAndAdam(torch.optim.Optimizer):
    """One optimizer: Muon for the matrices inside the layers, Adam for everything else."""

    def __init__(self, model: LlamaForCausalLM, muon_lr: float, adam_lr: float) -> None:
        matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
        taken = {id(p) for p in matrices}
        rest = [p for p in model.parameters() if id(p) not in taken]
        self.parts = [
            torch.optim.Muon(matrices, lr=muon_lr, momentum=0.95, weight_decay=0.01),
            torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        super().__init__([*matrices, *rest], {})
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure=None):
        for part in self.parts:
            part.step()

    def state_dict(self):
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state):
        for part, saved in zip(self.parts, state["parts"]):
            part.load_state_dict(saved)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def rate(progress: float) -> float:
    """The factor of the learning rates: a short warm-up, then 1, then a decrease to 0 over the last half."""
    return min(1.0, progress / 0.02, max(0.0, 1 - progress) / 0.5)


def train_target(args: argparse.Namespace, tokenizer, streams: dict[str, torch.Tensor]) -> None:
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(target_config(args, tokenizer)).to(DEVICE)
    if DEVICE == "cpu":
        model.set_attn_implementation("eager")  # in the backward pass, sdpa is slower on a CPU
    optimizer = MuonAndAdam(model, *TARGET_RATES)
    elapsed, step, tokens, history = 0.0, 0, 0, []
    budget, kept = args.minutes * 60 * TARGET_SHARE, args.work / "target.pt"
    if kept.exists():
        state = torch.load(kept, weights_only=True, map_location=DEVICE)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        elapsed, step, tokens, history = state["elapsed"], state["step"], state["tokens"], state["history"]
    generator = torch.Generator().manual_seed(args.seed + step)
    started, saved_at, recent = time.monotonic() - elapsed, elapsed, math.nan
    bar = tqdm(total=round(budget), initial=round(elapsed), unit="s", desc="target")
    while (elapsed := time.monotonic() - started) < budget:
        for group, lr in zip(optimizer.param_groups, TARGET_RATES):
            group["lr"] = lr * rate(elapsed / budget)
        width = SHORT if elapsed < LONG_FROM * budget else WINDOW
        windows = sample_windows(list(streams.values())[:2], args.tokens_per_step // width, width, generator)
        loss = next_token_loss(model, windows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step, tokens = step + 1, tokens + windows.numel()
        recent = loss.item() if math.isnan(recent) else 0.98 * recent + 0.02 * loss.item()
        bar.n = round(min(elapsed, budget))
        bar.set_postfix(step=step, tokens=f"{tokens / 1e6:.1f}M", loss=f"{recent:.3f}", refresh=step % 10 == 0)
        if elapsed - saved_at > 180:
            saved_at = elapsed
            history.append({"seconds": round(elapsed), "tokens": tokens, "train_loss": recent,
                            "held_out_loss": held_out_loss(model, streams["held out"], 12)})  # fmt: skip
            tqdm.write(json.dumps(history[-1]))
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "elapsed": elapsed,
                     "step": step, "tokens": tokens, "history": history}  # fmt: skip
            torch.save(state, kept.with_suffix(".tmp"))
            kept.with_suffix(".tmp").replace(kept)
    bar.close()
    model.eval()
    final = held_out_loss(model, streams["held out"], 100)
    characters = sum(map(len, held_out_sources().values())) / len(streams["held out"])
    report = {
        "tokens": tokens, "seconds": round(elapsed), "steps": step, "held_out_loss": final,
        "held_out_bits_per_character": final / math.log(2) / characters, "history": history,
        "parameters": sum(p.numel() for p in model.parameters()), "layers": args.layers, "width": args.width,
        **provenance(),
    }  # fmt: skip
    model.set_attn_implementation("sdpa")
    model.to(torch.bfloat16).save_pretrained(args.out / "target")
    tokenizer.save_pretrained(args.out / "target")
    (args.out / "target" / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    ModelCard(TARGET_CARD.format(**report)).save(args.out / "target" / "README.md")


# ---------------------------------------------------------------------- the heads


@torch.no_grad()
def write_continuations(args: argparse.Namespace, target: LlamaForCausalLM, streams: dict[str, torch.Tensor]) -> Path:
    """Let the target continue windows of its training text, in turn greedily and by sampling, while time is left."""
    path, budget = args.work / "continuations.parquet", args.minutes * 60 * CONTINUATION_SHARE
    if path.exists():
        return path
    torch.manual_seed(args.seed)
    generator, rows, started = torch.Generator().manual_seed(args.seed + 1), [], time.monotonic()
    bar = tqdm(total=round(budget), unit="s", desc="continuations")
    while (elapsed := time.monotonic() - started) < budget or len(rows) <= EVALUATED:
        prompts = sample_windows(list(streams.values())[:2], CONTINUED_AT_ONCE, PROMPT, generator).to(DEVICE)
        sampling = {"do_sample": True, "top_k": 0, "temperature": 0.8} if len(rows) // CONTINUED_AT_ONCE % 2 else {}
        options = {"max_new_tokens": SHORT - PROMPT, "eos_token_id": None, **sampling}
        rows += target.generate(prompts, attention_mask=torch.ones_like(prompts), **options).tolist()
        bar.n = round(min(elapsed, budget))
        bar.set_postfix(tokens=f"{len(rows) * (SHORT - PROMPT) / 1e6:.2f}M")
    bar.close()
    Dataset.from_dict({"input_ids": rows}).to_parquet(path)
    return path


def heads_trainer(
    args: argparse.Namespace, variant: str, target: LlamaForCausalLM, tokenizer, data: Dataset, steps: int, save: str
) -> CloverTrainer:
    recipe = {} if variant == "clover-x" else {"learning_rate": HEADS_RATE}  # clover-x: the defaults
    if variant == "clover-2":
        recipe["hidden_loss_weight"] = HIDDEN_WEIGHT
    return CloverTrainer(
        teacher_model=target,
        processing_class=tokenizer,
        args=CloverTrainingConfig(
            str(args.work / variant),
            model_init_kwargs={"variant": variant},
            max_steps=steps,
            per_device_train_batch_size=args.tokens_per_step // SHORT,
            per_device_eval_batch_size=args.tokens_per_step // SHORT,
            lr_scheduler_type="linear",
            save_strategy=save,
            save_steps=100,
            save_total_limit=1,
            logging_steps=20,
            precompute_targets=True,
            precompute_dir=str(args.work / "target_states"),
            bf16=True,
            report_to="none",
            seed=args.seed,
            use_cpu=DEVICE == "cpu",
            dataloader_pin_memory=DEVICE != "cpu",
            **recipe,
        ),
        train_dataset=data.select(range(EVALUATED, len(data))),
        eval_dataset=data.select(range(EVALUATED)),
    )


def seconds_per_step(args: argparse.Namespace, variant: str, *rest) -> float:
    heads_trainer(args, variant, *rest, steps=1, save="no").train()  # the run below would resume from a checkpoint
    trainer = heads_trainer(args, variant, *rest, steps=3, save="no")
    started = time.monotonic()
    trainer.train()
    return (time.monotonic() - started) / 3


def train_heads(args: argparse.Namespace, target: LlamaForCausalLM, tokenizer, continuations: Path) -> None:
    """Train all variants for the same number of steps: as many as the rest of the time allows."""
    data = Dataset.from_parquet(str(continuations))
    plan = args.work / "heads.json"
    if not plan.exists():
        costs = {variant: seconds_per_step(args, variant, target, tokenizer, data) for variant in HEADS.values()}
        budget = args.minutes * 60 * (1 - TARGET_SHARE - CONTINUATION_SHARE)
        plan.write_text(json.dumps({"seconds_per_step": costs, "steps": max(2, int(budget / sum(costs.values())))}))
    steps = json.loads(plan.read_text())["steps"]
    for folder, variant in HEADS.items():
        if (args.out / folder / "model.safetensors").exists():
            continue
        trainer = heads_trainer(args, variant, target, tokenizer, data, steps, save="steps")
        has_checkpoint = any(Path(trainer.args.output_dir).glob("checkpoint-*"))
        trainer.train(resume_from_checkpoint=has_checkpoint)
        if trainer.was_interrupted:
            raise KeyboardInterrupt
        trainer.evaluate()
        trainer.heads.config.target_name_or_path = "target"
        trainer.create_model_card(dataset_name="the target's own continuations of Python sources")
        results = json.loads((Path(trainer.args.output_dir) / "clover_results.json").read_text())
        save_heads(args.out / folder, trainer.heads, results, target, tokenizer)


def save_heads(folder: Path, heads: CloverHeads, results: dict, target: LlamaForCausalLM, tokenizer) -> None:
    """Save heads in bfloat16, with a card of figures that are measured with the saved weights."""
    heads.to(torch.bfloat16).save_pretrained(folder)
    remove_code(folder)
    heads = CloverHeads.from_pretrained(folder, dtype=torch.float32).to(DEVICE)
    prompts = load_prompts(STAND_IN, tokenizer, limit=16)
    _, row = measure(target.float(), tokenizer, [plain(), with_heads(heads)], prompts, repeats=1)
    if not row["identical"]:
        raise RuntimeError(f"The heads in {folder} changed tokens: {row['differences']}")
    source = provenance()
    benchmark = {
        "prompts": "starts of 16 functions of modules that neither target nor heads have seen, 128 new tokens, greedy",
        "precision": "float32", "baseline": "plain generate", "machine": source["machine"],
        "command": source["command"], "versions": source["versions"],
        "rows": [{name: row[name] for name in ("batch_size", "tokens_per_forward", "speedup", "efficiency")}],
    }  # fmt: skip
    write_results(folder, **results, benchmarks=[benchmark])
    write_card(folder, heads, repo_id=folder.name, license="apache-2.0", language="code")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "stand_in", help="folder for target and heads")
    parser.add_argument("--work", type=Path, default=Path("runs/stand_in"), help="state of a run, to resume it")
    parser.add_argument("--minutes", type=float, default=180.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens-per-step", type=int, default=4096)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    sources = collect(np.random.default_rng(args.seed))
    print({name: f"{len(texts)} files, {sum(map(len, texts)) / 1e6:.1f} MB" for name, texts in sources.items()})
    library, packages = sources.values()
    tokenizer = make_tokenizer(library + packages[:: max(1, len(packages) // 500)], args.vocabulary, args.work)
    streams = {name: encode(tokenizer, texts) for name, texts in sources.items()}
    streams["held out"] = encode(tokenizer, list(held_out_sources().values()))
    print({name: f"{len(stream) / 1e6:.2f}M tokens" for name, stream in streams.items()})
    if not (args.out / "target" / "model.safetensors").exists():
        train_target(args, tokenizer, streams)
    target = LlamaForCausalLM.from_pretrained(args.out / "target", dtype=torch.float32).to(DEVICE).eval()
    train_heads(args, target, tokenizer, write_continuations(args, target, streams))


if __name__ == "__main__":
    main()
