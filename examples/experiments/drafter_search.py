"""Which recipe, and which shape of clover-x, learns most from little text? One run, one row of figures.

The target's states are computed once and kept in bfloat16, of more layers than the last where features are tried, so
that runs differ in nothing but what is asked for: the same documents in the same order, the same seed. A step takes
whole documents until it has `--step-tokens`; the block runs over all of them, and the heads guess at a `--share` of
the places, drawn anew. What is right is counted on the last 2 % of the documents, the text given: how often each
guess is the target's first choice, and how long a chain of five would be.

    python examples/experiments/drafter_search.py --target TARGET --data ANSWERS.jsonl --run base
    python examples/experiments/drafter_search.py --target TARGET --data ANSWERS.jsonl --run two --layers 2
    python examples/experiments/drafter_search.py --target TARGET --data ANSWERS.jsonl --run more \\
        --start HEADS --tokens 960000 --save BETTER_HEADS
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import HERE
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_clover import CloverHeads
from hf_clover.hub.code import remove_code
from hf_clover.measure.benchmark import write
from hf_clover.measure.provenance import provenance
from hf_clover.network.blocks import CloverRMSNorm, places_along
from hf_clover.network.target_parts import find_decoder
from hf_clover.training.data import set_draft_vocabulary
from hf_clover.training.losses import TOKEN_LOSSES, prediction_mask
from hf_clover.training.optimizers import MUON_DECAY, MuonAndAdamW, muon_rate

QUESTION = "Which recipe, and which shape of clover-x, learns most from little text?"
HELD_OUT, DECAY, RATE, WARM_UP, LARGEST_NORM = 0.02, 0.7, 1e-3, 0.02, 0.5
DEFAULTS = dict(tokens=100_000, step_tokens=1024, share=1.0, layers=1, features=(), draft_vocab_size=8192, length=1024)


# ---------------------------------------------------------------------- the target's states


class Documents:
    """Conversations as token ids, and what the target's layers said at every token: [N, layers + 1, d] on disk."""

    def __init__(self, args: argparse.Namespace, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        rows = [json.loads(line) for line in Path(args.data).read_text(encoding="utf-8").split("\n") if line.strip()]
        self.ids = [self._ids_of(row["messages"], tokenizer)[: args.length] for row in rows[: args.documents]]
        self.answers = [  # where the last answer begins
            len(self._ids_of(row["messages"][:-1], tokenizer, add_generation_prompt=True))
            if row["messages"][-1]["role"] == "assistant"
            else 0
            for row in rows[: args.documents]
        ]
        self.starts = np.cumsum([0, *map(len, self.ids)])
        self.held_out = args.held_out or max(int(HELD_OUT * len(self.ids)), 1)
        self.layers = args.features
        shape = (int(self.starts[-1]), len(self.layers) + 1, target.config.hidden_size)
        name = "-".join(map(str, ("states", *shape, *self.layers)))
        path = args.work / f"{name}.npy"
        if not path.exists():
            args.work.mkdir(parents=True, exist_ok=True)
            self._compute(target, path.with_suffix(".part"), shape)
            path.with_suffix(".part").rename(path)
        self.states = np.lib.format.open_memmap(path, mode="r")

    @staticmethod
    def _ids_of(messages: list, tokenizer: PreTrainedTokenizerBase, **options: Any) -> list[int]:
        return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"]

    @torch.inference_mode()
    def _compute(self, target: PreTrainedModel, path: Path, shape: tuple[int, ...]) -> None:
        states = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint16, shape=shape)
        decoder, layers, norm = find_decoder(target)
        seen: dict[int, torch.Tensor] = {}

        def keep(place: int) -> Any:
            return lambda _, __, out: seen.__setitem__(place, out[0] if isinstance(out, tuple) else out)

        handles = [layers[layer].register_forward_hook(keep(place)) for place, layer in enumerate(self.layers)]
        handles.append(norm.register_forward_pre_hook(lambda _, args: seen.__setitem__(len(self.layers), args[0])))
        for number, ids in enumerate(self.ids):
            with torch.autocast(target.device.type, torch.bfloat16):
                decoder(input_ids=torch.tensor([ids], device=target.device), use_cache=False)
            of_layers = torch.stack([seen[place][0] for place in sorted(seen)], dim=1).to(torch.bfloat16).cpu()
            states[self.starts[number] : self.starts[number + 1]] = of_layers.contiguous().view(torch.uint16).numpy()
            if number % 50 == 0:
                print(f"states: {number} of {len(self.ids)} documents", flush=True)
        for handle in handles:
            handle.remove()

    def batch(self, numbers: Sequence[int], answers_only: bool) -> dict[str, torch.Tensor]:
        """Documents behind one another, with positions that begin anew."""
        ids, labels, positions, states = [], [], [], []
        for number in numbers:
            tokens = torch.tensor(self.ids[number])
            counted = tokens.clone()
            if answers_only:
                counted[: self.answers[number]] = -100
            own = np.ascontiguousarray(self.states[self.starts[number] : self.starts[number + 1]])
            ids.append(tokens)
            labels.append(counted)
            positions.append(torch.arange(len(tokens)))
            states.append(torch.from_numpy(own).view(torch.bfloat16).float())
        parts = dict(ids=ids, labels=labels, positions=positions, states=states)
        return {name: torch.cat(values)[None] for name, values in parts.items()}  # [1, T, ...]

    def steps(self, tokens: int, step_tokens: int, seed: int) -> list[list[int]]:
        """Numbers of the documents of each step, over all documents in new orders."""
        order, steps, step = np.random.default_rng(seed), [], []
        seen = size = 0
        while True:
            for number in order.permutation(len(self.ids) - self.held_out):
                step.append(int(number))
                size += len(self.ids[number])
                if size >= step_tokens:
                    seen, steps, step, size = seen + size, [*steps, step], [], 0
                if seen >= tokens:
                    return steps


# ---------------------------------------------------------------------- a network with features


class Featured(CloverHeads):
    """clover-x that adds what several layers of the target say, each normalised by itself, to what its block reads."""

    def add_features(self, count: int) -> None:
        size = self.config.hidden_size
        self.feature_norms = nn.ModuleList(CloverRMSNorm(size, self.config.rms_norm_eps) for _ in range(count))
        self.feature_projector = nn.Linear(count * size, size, bias=False)
        nn.init.zeros_(self.feature_projector.weight)

    def _encode(self, hidden_states: torch.Tensor, *rest: Any) -> Any:
        self._fused = 0
        if hasattr(self, "feature_norms"):
            size = self.config.hidden_size
            parts = hidden_states.split(size, dim=-1)
            features = [norm(part) for norm, part in zip(self.feature_norms, parts[:-1], strict=True)]
            self._fused, hidden_states = self.feature_projector(torch.cat(features, dim=-1)), parts[-1]
        return super()._encode(hidden_states, *rest)

    def _target_norm(self, x: torch.Tensor) -> torch.Tensor:
        return super()._target_norm(x) + self._fused / self.config.hidden_state_scale


def make_heads(args: argparse.Namespace, target: PreTrainedModel, documents: Documents) -> CloverHeads:
    if args.start is not None:
        return CloverHeads.from_pretrained(args.start, dtype=torch.float32).to(target.device).bind(target)
    fields = dict(variant="clover-x", num_augmenting_layers=args.layers, recall=not args.no_recall)
    kind = Featured if args.features else CloverHeads
    heads = kind.from_target(target, draft_vocab_size=args.draft_vocab_size, **fields)
    if args.features:
        heads.add_features(len(args.features))
    counts = np.bincount(
        np.concatenate(documents.ids[: -documents.held_out]), minlength=target.get_output_embeddings().out_features
    )
    frequent = np.sort(np.argsort(-counts, kind="stable")[: args.draft_vocab_size])
    set_draft_vocabulary(heads, torch.from_numpy(frequent))
    if args.copy_last:
        start_from_last_layers(heads, target)
    return heads.to(target.device).bind(target)


@torch.no_grad()
def start_from_last_layers(heads: CloverHeads, target: PreTrainedModel) -> None:
    """The block's layers as the target's last, rescaled from the target's stream to the normalised one."""
    _, layers, norm = find_decoder(target)
    weight = norm.weight
    spread = heads.config.hidden_state_scale * weight / weight.pow(2).mean().sqrt()
    for mine, theirs in zip(heads.layers, layers[-len(heads.layers) :], strict=True):
        mine.load_state_dict(theirs.state_dict(), strict=False)
        mine.self_attn.o_proj.weight.mul_(spread[:, None])
        mine.mlp.down_proj.weight.mul_(spread[:, None])
        for read in (mine.input_layernorm, mine.post_attention_layernorm):
            read.weight.mul_(weight.pow(2).mean().sqrt() / weight)


# ---------------------------------------------------------------------- a run


class Learner:
    def __init__(self, heads: CloverHeads, target: PreTrainedModel, documents: Documents, loss: str) -> None:
        self.heads, self.documents, self.loss = heads, documents, TOKEN_LOSSES[loss]
        _, _, self.final_norm = find_decoder(target)
        self.rows = target.get_output_embeddings().weight.detach().to(torch.bfloat16)  # [V, d]
        self.draft_rows = self.rows[heads.draft_ids].contiguous()  # [D, d]

    def guesses(self, numbers: Sequence[int], share: float, answers_only: bool = False) -> Iterator[tuple]:
        """Of each head: where it guesses [n], its logits, the target's probabilities of the same ids [n, D]."""
        heads, batch = self.heads, self.documents.batch(numbers, answers_only)
        count, tokens = heads.config.num_heads, batch["ids"][:, 1:]
        mask = prediction_mask(batch["labels"], batch["positions"], count)[:, 0]  # [K, T]
        places = mask[0].nonzero()[:, 0]  # [n]
        if share < 1:
            kept = torch.randperm(len(places))[: max(int(share * len(places)), 1)]
            places = places[kept.sort().values]
        with torch.no_grad():
            final = self.final_norm(batch["states"][0, :, -1])  # [T + 1, d]
        with torch.autocast("cpu", torch.bfloat16):
            states = batch["states"].flatten(-2)[:, :-1]
            first, to_recall = heads._encode(states, tokens, None, batch["positions"][:, :-1], None)
            if to_recall is not None:
                text, values, seen = to_recall
                found = places_along(text, seen, tokens, count)  # of each level [1, T]
        state = first[:, places]  # [1, n, d]
        for level in range(count):
            goes_on = mask[level, places]
            places, state = places[goes_on], state[:, goes_on]
            with torch.autocast("cpu", torch.bfloat16):
                recalled = () if to_recall is None else (heads.recall(values, found[level][:, places]),)
                out, state = heads.step(level, state, tokens[:, places + level], *recalled)
                logits = F.linear(out[0], self.draft_rows)  # [n, D]
            with torch.no_grad():
                theirs = F.linear(final[places + level + 1].bfloat16(), self.rows).float()  # [n, V]
            yield places, logits.float(), theirs

    def learn(self, numbers: Sequence[int], share: float) -> torch.Tensor:
        """The mean loss of each head [K], after its gradient has been taken."""
        weights = DECAY ** torch.arange(self.heads.config.num_heads)
        losses = []
        for _, logits, theirs in self.guesses(numbers, share):
            p = theirs.softmax(-1)[:, self.heads.draft_ids]  # [n, D]
            losses.append(self.loss(logits.log_softmax(-1), p).sum() / max(len(p), 1))
        means = torch.stack(losses)
        ((weights * means).sum() / weights.sum()).backward()
        return means.detach()

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """On the answers of the documents that were held out."""
        self.heads.eval()
        count = self.heads.config.num_heads
        right, guessed, given, alive = (np.zeros(count) for _ in range(4))
        for number in range(len(self.documents.ids))[-self.documents.held_out :]:
            going = None
            for level, (places, logits, theirs) in enumerate(self.guesses([number], 1.0, answers_only=True)):
                hit = self.heads.draft_ids[logits.argmax(-1)] == theirs.argmax(-1)  # [n]
                going = set(places.tolist()) if going is None else going
                still = torch.tensor([place in going for place in places.tolist()], dtype=torch.bool)
                right[level] += int(hit.sum())
                guessed[level] += len(hit)
                given[level] += int((hit & still).sum())
                alive[level] += int(still.sum())
                going &= set(places[hit].tolist())
        self.heads.train()
        chances = given / np.maximum(alive, 1)
        return {
            "first_choice": (right / np.maximum(guessed, 1)).round(4).tolist(),
            "given_the_earlier": chances.round(4).tolist(),
            "chain": round(1 + float(np.cumprod(chances).sum()), 4),
        }


def train(args: argparse.Namespace, learner: Learner) -> dict[str, Any]:
    heads, steps = learner.heads, learner.documents.steps(args.tokens, args.step_tokens, args.seed)
    trained = [weight for weight in heads.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in trained if (weight.ndim == 2) is decays], "weight_decay": decay}
        for decays, decay in ((True, MUON_DECAY), (False, 0.0))
    ]
    optimizer = MuonAndAdamW(groups, lr=RATE, muon_lr=args.muon_rate or muon_rate(len(steps)))
    warm = max(int(WARM_UP * len(steps)), 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, max(0.0, (len(steps) - step) / max(len(steps) - warm, 1)))
    )
    started, seen = time.process_time(), 0
    heads.train()
    for number, documents in enumerate(steps):
        losses = learner.learn(documents, args.share)
        nn.utils.clip_grad_norm_(trained, LARGEST_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seen += sum(len(learner.documents.ids[each]) for each in documents)
        if number % 20 == 0:
            print(
                f"step {number} of {len(steps)}, {seen:,} tokens, losses {losses.round(decimals=2).tolist()}",
                flush=True,
            )
    return {"steps": len(steps), "tokens": seen, "seconds": round(time.process_time() - started)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="a folder or an id")
    parser.add_argument("--data", required=True, help="a .jsonl file of `messages`, answered by the target")
    parser.add_argument("--run", required=True, help="the name of the row")
    parser.add_argument("--documents", type=int, help="how many of them; all of them without it")
    parser.add_argument("--held-out", type=int, help="of the last documents; 2 %% of all without it")
    parser.add_argument("--tokens", type=int, help="to learn from")
    parser.add_argument("--step-tokens", type=int, help="in a step, at least")
    parser.add_argument("--share", type=float, help="of the places that the heads guess at")
    parser.add_argument("--layers", type=int, help="of the block")
    parser.add_argument("--features", type=int, nargs="*", help="layers of the target that the block reads besides")
    parser.add_argument("--draft-vocab-size", type=int, help="ids that are scored, the most frequent of the documents")
    parser.add_argument("--length", type=int, help="tokens of a document, at most")
    parser.add_argument("--loss", choices=list(TOKEN_LOSSES), default="kl")
    parser.add_argument("--muon-rate", type=float, help="of a run of this length, in place of the trainer's")
    parser.add_argument("--copy-last", action="store_true", help="start the block as the target's last layers")
    parser.add_argument("--no-recall", action="store_true")
    parser.add_argument("--start", type=Path, help="heads to go on with, in place of new ones")
    parser.add_argument("--save", type=Path, help="where to leave the heads, in bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs/experiments/search"), help="where states are kept")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="where the JSON goes")
    parser.set_defaults(**DEFAULTS)
    args = parser.parse_args(argv)
    if args.save is not None and args.features:
        parser.error(
            "--save: heads that read --features are known to this experiment alone; leave one of the two out."
        )
    torch.manual_seed(args.seed)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    documents = Documents(args, target, AutoTokenizer.from_pretrained(args.target))
    learner = Learner(make_heads(args, target, documents), target, documents, args.loss)
    row = {"run": args.run, **train(args, learner), **learner.evaluate()}
    row |= {name: value for name, value in vars(args).items() if name in DEFAULTS or name in ("loss", "seed")}
    row["parameters"] = sum(weight.numel() for weight in learner.heads.parameters())
    path = args.output / "drafter_search.json"
    known = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    rows = [other for other in known if (other["run"], other["seed"]) != (args.run, args.seed)] + [row]
    write({"kind": "experiment", "name": "drafter_search", "question": QUESTION, **provenance(), "rows": rows}, path)
    print(json.dumps(row))
    if args.save is not None:
        learner.heads.to(torch.bfloat16).save_pretrained(args.save)
        remove_code(args.save)


if __name__ == "__main__":
    main()
