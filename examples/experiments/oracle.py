"""Does the automatic budget find the best tree, whatever the drafts are worth?

So that the loop is measured and not the heads, the drafts here come from an oracle of set acceptance. The target is a
Llama with random weights and the heads are untrained: they run and cost what they cost, but what they score is
replaced. At every node that the target's text leads to, the target's next token stands first with probability p,
second with p (1 - p) / 2, third with p ((1 - p) / 2)^2 and so on, drawn once for each place of the text; these are
also the probabilities that the drafter states, so its confidence is honest. A fixed number of nodes, one after
another, plain generate (0 nodes) and the automatic number take turns on the same text. CPU, batch 1, greedy.

    python examples/experiments/oracle.py
"""

import argparse
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from common import HERE, PLAIN, finish, line, panel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from hf_clover import CloverHeads
from hf_clover.decoding.draft.drafter import CloverDrafter
from hf_clover.measure.benchmark import measure, plain, with_heads

SIZES = {  # about so many parameters
    "30M": dict(hidden_size=512, num_hidden_layers=8, num_attention_heads=8, intermediate_size=1408, vocab_size=4096),
    "200M": dict(
        hidden_size=1024, num_hidden_layers=14, num_attention_heads=16, intermediate_size=2816, vocab_size=8192
    ),
    "toy": dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=512),
}
DEFAULTS = dict(
    sizes=["30M", "200M"],
    acceptance=[0.3, 0.6, 0.9],
    nodes=[2, 4, 8, 12, 16, 24, 32],
    prompt_tokens=32,
    max_new_tokens=96,
    repeats=3,
)
TOY = dict(sizes=["toy"], acceptance=[0.3, 0.9], nodes=[2, 8], prompt_tokens=4, max_new_tokens=24, repeats=1)
CANDIDATES = 10  # that have a stated probability, at every node


def random_llama(size: str, seed: int) -> PreTrainedModel:
    """Random weights; no token ends a text."""
    torch.manual_seed(seed)
    ids = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
    target = AutoModelForCausalLM.from_config(LlamaConfig(max_position_embeddings=4096, **ids, **SIZES[size]))
    target.config.name_or_path = f"random Llama, {size}"
    return target.eval()


class Oracle:
    """Knows the text, and at which place among the drafter's candidates each of its tokens stands."""

    def __init__(self, text: Sequence[int], vocab_size: int, acceptance: float, seed: int) -> None:
        self.text = list(text)
        stated = [acceptance * ((1 - acceptance) / 2) ** place for place in range(CANDIDATES)]
        others = sorted(set(range(vocab_size)) - set(text))
        self.wrong = others[:CANDIDATES]
        rest = math.log((1 - sum(stated)) / (vocab_size - CANDIDATES))
        self.log_probs = [math.log(probability) for probability in stated] + [rest]
        self.off_the_text = torch.full((vocab_size,), rest)  # [V] what is stated at a node that is no longer right
        self.off_the_text[self.wrong] = torch.tensor(self.log_probs[:-1])
        draws = torch.rand(len(self.text), generator=torch.Generator().manual_seed(seed))
        bounds = torch.tensor(stated).cumsum(0)
        self.places = torch.bucketize(draws, bounds, right=True).tolist()  # CANDIDATES: not among them

    def score(self, logits: torch.Tensor, tokens: torch.Tensor, index: int) -> torch.Tensor:
        """Logits [1, W, V] of what follows `tokens` [1, W], each drafted for place `index` of the text."""
        logits[:] = self.off_the_text
        if index + 1 < len(self.text):
            place, right = self.places[index + 1], self.text[index + 1]
            for beam in (tokens[0] == self.text[index]).nonzero().flatten().tolist():
                if place < CANDIDATES:
                    logits[0, beam, self.wrong[place]] = self.log_probs[-1]
                    logits[0, beam, right] = self.log_probs[place]
        return logits


class KnowingHeads:
    """Heads that run as they are, but what they say is the oracle's."""

    def __init__(self, heads: CloverHeads, oracle: Oracle) -> None:
        self.heads, self.oracle = heads, oracle
        self.root = 0  # its place in the text

    def __getattr__(self, name: str) -> Any:
        return getattr(self.heads, name)

    def step(self, level: int, state: torch.Tensor, input_ids: torch.Tensor, *recalled: torch.Tensor) -> Any:
        self.asked = input_ids, self.root + level
        return self.heads.step(level, state, input_ids, *recalled)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.oracle.score(self.heads.score(x), *self.asked)


class OracleDrafter(CloverDrafter):
    def __init__(self, oracle: Oracle, heads: CloverHeads, *how: Any) -> None:
        super().__init__(KnowingHeads(heads, oracle), *how)

    def extend(self, hidden: torch.Tensor, next_tokens: torch.Tensor, positions: torch.Tensor, counts: Any) -> None:
        self.heads.root += int(counts[0])
        super().extend(hidden, next_tokens, positions, counts)


def compared(size: str, acceptance: float, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The automatic budget against the best fixed one: by speed, plain generate (0 nodes) being one of them, and by
    efficiency, which says nothing of plain generate."""
    automatic = next(row for row in rows if row["method"] == "automatic")
    fixed = sorted((row for row in rows if row is not automatic), key=lambda row: -row["speedup"])
    best, best_tree = fixed[0], next(row for row in fixed if row["nodes"])
    return {
        "size": size,
        "acceptance": acceptance,
        "best_nodes": best["nodes"] or 0,
        "best_speedup": best["speedup"],
        "automatic_speedup": automatic["speedup"],
        "automatic_over_best_speedup": automatic["speedup"] / best["speedup"],
        "best_tree_nodes": best_tree["nodes"],
        "automatic_over_best_tree_efficiency": automatic["efficiency"] / best_tree["efficiency"],
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = _parse(argv)
    rows, comparisons = [], []
    for size in args.sizes:
        target = random_llama(size, args.seed)
        vocabulary = target.config.vocab_size
        prompt = torch.randint(vocabulary, (1, args.prompt_tokens))
        text = target.generate(prompt, max_new_tokens=args.max_new_tokens, do_sample=False)[0].tolist()
        for acceptance in args.acceptance:
            heads = CloverHeads.from_target(target).eval()  # others, of which nothing has been learned yet
            heads.new_drafter = partial(OracleDrafter, Oracle(text, vocabulary, acceptance, args.seed))
            fixed = [with_heads(heads, f"{n} nodes", n) for n in args.nodes]
            methods = [plain(), *fixed, with_heads(heads, "automatic")]
            measured = measure(
                target,
                SimpleNamespace(pad_token_id=0, eos_token_id=None),
                methods,
                prompt.tolist(),
                max_new_tokens=args.max_new_tokens,
                repeats=args.repeats,
                seed=args.seed,
            )
            comparisons.append(compared(size, acceptance, measured))
            rows += [{"size": size, "acceptance": acceptance, **row} for row in measured]
    panels = [panel for size in args.sizes for panel in _panels(size, args, rows)]
    title = "Fixed budgets and the automatic one"
    return finish(args, target, __doc__, rows, title, panels, comparisons, script=__file__, compared=comparisons)


def _panels(size: str, args: argparse.Namespace, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Speedup and efficiency along the nodes; what the automatic budget reaches, as a level."""

    def lines(name: str) -> list[dict[str, Any]]:
        found = []
        for acceptance in args.acceptance:
            mine = [row for row in rows if (row["size"], row["acceptance"]) == (size, acceptance)]
            value = next(row[name] for row in mine if row["method"] == "automatic")
            fixed = [(row["nodes"], row[name]) for row in mine if row["nodes"] is not None]
            found.append(line(f"acceptance {acceptance:g}", fixed))
            found.append(line(f"automatic, {acceptance:g}", [(n, value) for n in args.nodes], dashed=True))
        return found

    along = ("drafted nodes per step", "log2")
    return [
        panel("lines", f"Speedup, {size}", along[0], "× plain generate", lines("speedup"), along[1], reference=PLAIN),
        panel("lines", f"Efficiency, {size}", along[0], "speedup / tokens per forward", lines("efficiency"), along[1]),
    ]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), help="of the target")
    parser.add_argument("--acceptance", nargs="+", type=float, help="p: how often the first candidate is right")
    parser.add_argument("--nodes", nargs="+", type=int, help="fixed budgets to try")
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=HERE / "results", help="where JSON and plots go")
    parser.add_argument("--toy", action="store_true", help="sizes that take seconds, to see that everything runs")
    parser.set_defaults(**(TOY if parser.parse_known_args(argv)[0].toy else DEFAULTS))
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
