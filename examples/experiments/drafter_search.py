"""Which recipe, and which shape of clover-x, learns most from little text? One run, one row of figures.

The target runs once over all documents. Kept are its states in bfloat16, of more layers than the last where features
are tried, and of its distribution the 64 likeliest ids of the draft vocabulary: heads learn as much from these as from
all (chains of 1.936 and 1.939), in two thirds of the time. So runs differ in nothing but what is asked for: the same
documents in the same order, the same seed. A step takes whole documents until it has `--step-tokens`; the block runs
over all of them, and the heads guess at a `--share` of the places, drawn anew. What is right is counted on the last
2 % of the documents, the text given: how often each guess is the target's first choice, and how long a chain of five
would be.

    python examples/experiments/drafter_search.py --target TARGET --data ANSWERS.jsonl --run base
    python examples/experiments/drafter_search.py --target TARGET --data ANSWERS.jsonl --run two --layers 2
    python examples/experiments/drafter_search.py --target TARGET --data ANSWERS.jsonl --run more \\
        --start HEADS --tokens 960000 --save BETTER_HEADS
"""

import argparse
import json
import time
import zlib
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
from hf_clover.network.packing import multiplies_bfloat16_fast
from hf_clover.network.target_parts import find_decoder
from hf_clover.training.data import set_draft_vocabulary
from hf_clover.training.losses import TOKEN_LOSSES, kl_divergence, prediction_mask
from hf_clover.training.optimizers import MUON_DECAY, MuonAndAdamW, muon_rate

QUESTION = "Which recipe, and which shape of clover-x, learns most from little text?"
HELD_OUT, DECAY, RATE, WARM_UP, LARGEST_NORM = 0.02, 0.7, 1e-3, 0.02, 0.5
LIKELIEST = 64  # ids of the target's distribution that are kept
DEFAULTS = dict(tokens=100_000, step_tokens=1024, share=1.0, layers=1, features=(), slots=0, draft_vocab_size=8192)
DEFAULTS |= dict(length=1024, width=None)
DTYPE = torch.bfloat16 if multiplies_bfloat16_fast(torch.device("cpu")) else torch.float32  # of products


def products() -> torch.autocast:
    """In bfloat16 where that is fast, in float32 elsewhere."""
    return torch.autocast("cpu", torch.bfloat16, enabled=DTYPE is torch.bfloat16)


# ---------------------------------------------------------------------- what the target says


class Documents:
    """Conversations as token ids, and what the target said at every token: its layers' states [N, layers + 1, d], its
    first choice [N], and of the draft vocabulary [D] the likeliest places and their probabilities [N, 64]."""

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
        self.layers, vocab_size = args.features, target.get_output_embeddings().out_features
        counts = np.bincount(np.concatenate(self.ids[: -self.held_out]), minlength=vocab_size)
        frequent = np.sort(np.argsort(-counts, kind="stable")[: args.draft_vocab_size])
        self.draft_ids = torch.from_numpy(frequent)  # [D]
        if args.start is not None:
            self.draft_ids = CloverHeads.from_pretrained(args.start).draft_ids.clone()
        total, kept = int(self.starts[-1]), min(LIKELIEST, len(self.draft_ids))
        shapes = {
            "states": (np.uint16, (total, len(self.layers) + 1, target.config.hidden_size)),
            "choices": (np.int32, (total,)),
            "places": (np.int32, (total, kept)),
            "probabilities": (np.float16, (total, kept)),
        }
        scored = zlib.crc32(self.draft_ids.numpy().tobytes())
        folder = args.work / "-".join(map(str, ("said", *shapes["states"][1], *self.layers, scored)))
        if not folder.exists():
            part = folder.with_suffix(".part")
            part.mkdir(parents=True, exist_ok=True)
            files = {
                name: np.lib.format.open_memmap(part / f"{name}.npy", mode="w+", dtype=dtype, shape=shape)
                for name, (dtype, shape) in shapes.items()
            }
            self._compute(target, files)
            part.rename(folder)
        self.said = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in shapes}

    @staticmethod
    def _ids_of(messages: list, tokenizer: PreTrainedTokenizerBase, **options: Any) -> list[int]:
        return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"]

    @torch.inference_mode()
    def _compute(self, target: PreTrainedModel, files: dict[str, np.ndarray]) -> None:
        decoder, layers, norm = find_decoder(target)
        weight = target.get_output_embeddings().weight.to(DTYPE)  # [V, d]
        seen: dict[int, torch.Tensor] = {}

        def keep(place: int) -> Any:
            return lambda _, __, out: seen.__setitem__(place, out[0] if isinstance(out, tuple) else out)

        handles = [layers[layer].register_forward_hook(keep(place)) for place, layer in enumerate(self.layers)]
        handles.append(norm.register_forward_pre_hook(lambda _, args: seen.__setitem__(len(self.layers), args[0])))
        for number, ids in enumerate(self.ids):
            with products():
                final = decoder(input_ids=torch.tensor([ids], device=target.device), use_cache=False)[0][0]  # [T, d]
                log_probs = F.linear(final, weight).float().log_softmax(-1).cpu()  # [T, V]
            likeliest, places = log_probs[:, self.draft_ids].topk(files["places"].shape[1], dim=-1)
            of_layers = torch.stack([seen[place][0] for place in sorted(seen)], dim=1).to(torch.bfloat16).cpu()
            here = slice(self.starts[number], self.starts[number + 1])
            files["states"][here] = of_layers.contiguous().view(torch.uint16).numpy()
            files["choices"][here] = log_probs.argmax(-1).numpy()
            files["places"][here], files["probabilities"][here] = places.numpy(), likeliest.exp().numpy()
            if number % 50 == 0:
                print(f"the target: {number} of {len(self.ids)} documents", flush=True)
        for handle in handles:
            handle.remove()

    def batch(self, numbers: Sequence[int], answers_only: bool) -> dict[str, torch.Tensor]:
        """Documents behind one another, with positions that begin anew; without a dimension for the batch."""
        parts: dict[str, list[torch.Tensor]] = {}
        for number in numbers:
            tokens = torch.tensor(self.ids[number])
            labels, here = tokens.clone(), slice(self.starts[number], self.starts[number + 1])
            if answers_only:
                labels[: self.answers[number]] = -100
            own = {name: torch.from_numpy(np.array(values[here])) for name, values in self.said.items()}
            own["states"] = own["states"].view(torch.bfloat16).float()
            own |= dict(ids=tokens, labels=labels, positions=torch.arange(len(tokens)))
            for name, value in own.items():
                parts.setdefault(name, []).append(value)
        return {name: torch.cat(values) for name, values in parts.items()}  # [T, ...]

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


# ---------------------------------------------------------------------- networks that are tried


class Tried(CloverHeads):
    """clover-x with what is tried: features and slots."""

    def add_features(self, count: int) -> None:
        """What several layers of the target say, each normalised by itself, is added to what the block reads."""
        size = self.config.hidden_size
        self.feature_norms = nn.ModuleList(CloverRMSNorm(size, self.config.rms_norm_eps) for _ in range(count))
        self.feature_projector = nn.Linear(count * size, size, bias=False)
        nn.init.zeros_(self.feature_projector.weight)

    def add_slots(self, count: int) -> None:
        """Places behind the text's end that the block reads too; what it says of each goes into one level's cell."""
        size = self.config.hidden_size
        self.slots = nn.Parameter(torch.randn(count, size) * self.config.initializer_range)
        self.slot_projector = nn.Linear(size, 2 * self.config.decoder_width, bias=False)
        nn.init.normal_(self.slot_projector.weight, 0.0, size**-0.5)

    def read(
        self, states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Of documents behind one another, states [T, layers + 1, d] and the tokens after them [T]: what the block
        says of each place [T, d], of the slots behind `places` [n, slots, d], its values, and who sees whom [T, T]."""
        count, entry = len(tokens), self._target_norm(states[:, -1]) * self.config.hidden_state_scale
        if hasattr(self, "feature_norms"):
            features = [norm(states[:, place]) for place, norm in enumerate(self.feature_norms)]
            entry = entry + self.feature_projector(torch.cat(features, dim=-1))
        x = self.entry_decoder(entry, self.embed(tokens))  # [T, d]
        document = (positions == 0).cumsum(0)  # [T]
        order = torch.arange(count)
        mask = (document[:, None] == document) & (order[:, None] >= order)  # [T, T]
        seen = mask
        if hasattr(self, "slots"):  # each sees the text up to its place, and the slots of that place
            ahead = torch.arange(len(self.slots))
            x = torch.cat((x, self.slots.to(x.dtype).repeat(len(places), 1)))  # [T + n slots, d]
            positions = torch.cat((positions, (positions[places, None] + 1 + ahead).flatten()))
            owner = torch.arange(len(places)).repeat_interleave(len(self.slots))  # [n slots]
            seen = torch.zeros(len(x), len(x), dtype=torch.bool)
            seen[:count, :count], seen[count:, :count] = mask, mask[places][owner]
            seen[count:, count:] = owner[:, None] == owner
        rope, _ = self.rope_and_mask(x[None], seen[None, None], positions[None], None)
        x = x[None]
        for layer in self.layers:
            x, values = layer(x, rope, seen[None, None], None)
        slots = x[0, count:].view(len(places), -1, x.shape[-1]) if hasattr(self, "slots") else None
        return x[0, :count], slots, values[:, :, :count], mask


def make_heads(args: argparse.Namespace, target: PreTrainedModel, documents: Documents) -> CloverHeads:
    if args.start is not None:
        return Tried.from_pretrained(args.start, dtype=torch.float32).to(target.device).bind(target)
    fields = dict(variant="clover-x", num_augmenting_layers=args.layers, recall=not args.no_recall)
    fields |= {} if args.width is None else {"decoder_width": args.width}
    heads = Tried.from_target(target, draft_vocab_size=args.draft_vocab_size, **fields)
    if args.features:
        heads.add_features(len(args.features))
    if args.slots:
        heads.add_slots(args.slots)
    set_draft_vocabulary(heads, documents.draft_ids)
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


def total_variation(log_q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """A tenth of cross-entropy, and nine of what keeps a sampled draft from being accepted."""
    return 0.1 * kl_divergence(log_q, p) + 0.9 * (p.sum(-1) - torch.minimum(log_q.exp(), p).sum(-1))


LOSSES = {**TOKEN_LOSSES, "total variation": total_variation}


class Learner:
    def __init__(self, heads: Tried, target: PreTrainedModel, documents: Documents, loss: str) -> None:
        self.heads, self.documents, self.loss = heads, documents, LOSSES[loss]
        rows = target.get_output_embeddings().weight.detach()  # [V, d]
        self.draft_rows = rows[heads.draft_ids].to(DTYPE)  # [D, d]

    def guesses(self, numbers: Sequence[int], share: float, answers_only: bool = False) -> Iterator[tuple]:
        """Of each head: where it guesses [n], its log-probabilities [n, D], and of what the target says there the
        likeliest places and probabilities [n, 64] and the choice [n]."""
        heads, batch = self.heads, self.documents.batch(numbers, answers_only)
        count, tokens = heads.config.num_heads, batch["ids"][1:]
        mask = prediction_mask(batch["labels"][None], batch["positions"][None], count)[:, 0]  # [K, T]
        places = mask[0].nonzero()[:, 0]  # [n]
        if share < 1:
            kept = torch.randperm(len(places))[: max(int(share * len(places)), 1)]
            places = places[kept.sort().values]
        with products():
            said = heads.read(batch["states"][:-1], tokens, batch["positions"][:-1], places)
            states, slots, values, seen = said
            if heads.config.recall:
                found = places_along(tokens[None], seen[None, None], tokens[None], count)  # of each level [1, T]
        state, row = states[places], torch.arange(len(places))  # [n, d], [n]
        for level in range(count):
            goes_on = mask[level, places]
            places, state, row = places[goes_on], state[goes_on], row[goes_on]
            with products():
                told = heads.recall(values, found[level][:, places])[0] if heads.config.recall else None  # [n, 2 w]
                if slots is not None:
                    own = heads.slot_projector(heads.head_norm(slots[row, level]))
                    told = own if told is None else told + own
                out, state = heads.step(level, state, tokens[places + level], *(() if told is None else (told,)))
                logits = F.linear(out, self.draft_rows)  # [n, D]
            theirs = (batch[name][places + level + 1] for name in ("places", "probabilities", "choices"))
            yield places, logits.float().log_softmax(-1), *theirs

    def learn(self, numbers: Sequence[int], share: float) -> torch.Tensor:
        """The mean loss of each head [K], after its gradient has been taken."""
        weights = DECAY ** torch.arange(self.heads.config.num_heads)
        losses = []
        for _, log_probs, likeliest, p, _ in self.guesses(numbers, share):
            losses.append(self.loss(log_probs.gather(-1, likeliest.long()), p.float()).sum() / max(len(p), 1))
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
            for level, (places, log_probs, _, _, choices) in enumerate(self.guesses([number], 1.0, answers_only=True)):
                hit = self.heads.draft_ids[log_probs.argmax(-1)] == choices  # [n]
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
    parser.add_argument("--slots", type=int, help="behind the text, one a level; as many as heads guess, or none")
    parser.add_argument("--width", type=int, help="of the cell, in place of the target's")
    parser.add_argument("--draft-vocab-size", type=int, help="ids that are scored, the most frequent of the documents")
    parser.add_argument("--length", type=int, help="tokens of a document, at most")
    parser.add_argument("--loss", choices=list(LOSSES), default="kl")
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
    if args.save is not None and (args.features or args.slots):
        tried = "--features" if args.features else "--slots"
        parser.error(f"--save: heads that read {tried} are known to this experiment alone; leave one of the two out.")
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
        heads = CloverHeads(learner.heads.config)
        heads.load_state_dict(learner.heads.state_dict())
        heads.to(torch.bfloat16).save_pretrained(args.save)
        remove_code(args.save)


if __name__ == "__main__":
    main()
