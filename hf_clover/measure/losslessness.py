"""Whether heads change a token: every prompt runs without and with heads, and each difference gets a verdict.

Contract: `verify` runs greedy decoding at every setting and compares each prompt's tokens with those of plain generate
in the same batch. Where they differ, `explain` finds two numbers. `margin`: by how much plain generate's own scores
prefer its token there. `rounding`: how much the target's scores differ by rounding, measured without heads or trees.
The verdict is "numerics" if the margin is within the rounding, if plain generate gives two different texts when run
twice, or if its scores there are NaN. Any other difference is "BUG". Nothing is printed here.

Why two numbers decide: a forward over several tokens adds the same numbers as a forward over one, in another order, so
each of its logits has a small error. Such errors cannot change the choice between two tokens unless their scores are
closer than both errors together. The size of the errors depends on dtype, depth and kernels. So it is measured on this
target, this text and this device, between cached steps of one token and forwards over several. A measured difference
counts as rounding only if it is small compared with the spread of the logits: a larger one means that the target
computes something else over several tokens. The rounding is at least the precision of the logits' dtype.
"""

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import (
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from ..decoding.record import Speculation, speculations
from ..decoding.target.trees import takes_positions
from ..decoding.target.trial import precision_of, rounding_tolerance
from ..network.modeling_heads import DraftHeads
from ..targets.private_api import cache_name
from .acceptance import right_by_place
from .benchmark import batch_of, circumstances, finite
from .methods import first_difference, with_heads
from .prompts import pad_id_of

IDENTICAL, NUMERICS, BUG = "identical", "numerics", "BUG"
LOOKED_BACK = 16  # tokens whose logits are used to measure the rounding


@dataclass(frozen=True)
class Difference:
    """The first place where a prompt's text with heads differs from plain generate's, with a verdict."""

    prompt: int
    position: int  # of the first different token, counted from the first new one
    plain_token: int  # padding if the text had ended
    heads_token: int
    margin: float | None  # plain generate's score of its token minus that of the other, if it chose
    top_two: float | None  # the same, minus the second-best score: never more than `margin`
    rounding: float  # a margin up to this value is no preference
    verdict: str  # "numerics" or "BUG"


def verify(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    heads: DraftHeads,
    prompts: Sequence[list[int]],
    *,
    prompt_set: str = "stand-in",
    batch_sizes: Sequence[int] = (1, 3),
    nodes: Sequence[int | None] = (None, 4, 24),
    trees: Sequence[str | None] = (None,),
    cache_implementations: Sequence[str] = ("dynamic",),
    max_new_tokens: int = 64,
    progress: bool = True,
) -> dict[str, Any]:
    """Check whether heads change a token: compare every prompt in every setting with plain `generate`, greedily.

    Args:
        target (`PreTrainedModel`):
            The model that the heads draft for.
        tokenizer (`PreTrainedTokenizerBase`):
            The target's tokenizer, for its padding token.
        heads ([`CloverHeads`]):
            The heads to check.
        prompts (`Sequence[list[int]]`):
            The prompts, as token ids.
        prompt_set (`str`, *optional*, defaults to `"stand-in"`):
            The name of the prompts in the report.
        batch_sizes (`Sequence[int]`, *optional*, defaults to `(1, 3)`):
            Prompts per batch.
        nodes (`Sequence[int | None]`, *optional*, defaults to `(None, 4, 24)`):
            Drafted nodes per step; None for the automatic choice.
        trees (`Sequence[str | None]`, *optional*, defaults to `(None,)`):
            How trees are grown (`"global"`, `"levels"`, `"chain"`); None for the heads' own.
        cache_implementations (`Sequence[str]`, *optional*, defaults to `("dynamic",)`):
            Caches to use, by the names that `generate` takes.
        max_new_tokens (`int`, *optional*, defaults to 64):
            Tokens to generate after each prompt.
        progress (`bool`, *optional*, defaults to `True`):
            Show bars.

    Returns:
        `dict[str, Any]`: `verdict`, the worst of all; `rows`, one per setting, whose `differences` are empty if all
        texts are identical; and `drafts_by_place`, how many first, second, ... drafts were `asked` for and `right`,
        where all drafts before were right

    Example:

    ```python
    >>> from hf_clover.measure.losslessness import verify
    >>> from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

    >>> tokenizer = AutoTokenizer.from_pretrained("org/target")
    >>> model = AutoModelForCausalLM.from_pretrained("org/target")
    >>> heads = AutoModel.from_pretrained("org/clover-heads")
    >>> prompts = [tokenizer("def f(x):")["input_ids"]]
    >>> verify(model, tokenizer, heads, prompts, max_new_tokens=16, progress=False)["verdict"]
    'identical'
    ```
    """
    pad = pad_id_of(tokenizer) or 0
    methods = [with_heads(heads, nodes=count, tree=tree) for count, tree in product(nodes, trees)]
    rows: list[dict[str, Any]] = []
    places: list[dict[str, int]] = []
    for cache, size in product(cache_implementations, batch_sizes):
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": pad}
        if cache != "dynamic":
            options["cache_implementation"] = cache
        batches = [
            batch_of(prompts[first : first + size], pad, target.device) for first in range(0, len(prompts), size)
        ]
        label = f"batch {size}, {cache}"
        plain = [
            target.generate(**batch, **options)  # type: ignore[operator]
            for batch in tqdm(batches, f"plain, {label}", disable=not progress)
        ]
        if not places:
            texts = [text for batch, both in zip(batches, plain) for text in _answered(target, batch, both)]
            places = right_by_place(target, heads, texts)
        for method in tqdm(methods, f"heads, {label}", disable=not progress):
            found, records = [], []
            for first, batch, expected in zip(range(0, len(prompts), size), batches, plain):
                with method.applied() as own, speculations() as made:
                    sequences = target.generate(**batch, **options, **own)  # type: ignore[operator]
                records.append(made[0])
                found += explain(target, batch, expected, sequences, options, first)
            setting = {"batch_size": size, "nodes": method.nodes, "tree": method.tree, "cache": cache}
            rows.append({**setting, **_summary(found, records, len(prompts))})
    return {
        "kind": "verification",
        **circumstances(target, prompt_set, prompts, max_new_tokens),
        "verdict": worst(row["verdict"] for row in rows),
        "drafts_by_place": places,
        "rows": rows,
    }


def worst(verdicts: Iterable[str]) -> str:
    return max(verdicts, key=(IDENTICAL, NUMERICS, BUG).index, default=IDENTICAL)


def _answered(
    target: PreTrainedModel, batch: dict[str, torch.Tensor], plain: torch.Tensor
) -> Iterator[tuple[torch.Tensor, int]]:
    """Each row of `plain` [B, L] without padding, and the place where its answer begins."""
    ends: Any = target.generation_config.eos_token_id
    ends = torch.tensor([] if ends is None else ends).reshape(-1).to(plain)
    columns = batch["input_ids"].shape[1]
    for row, mask in zip(plain, batch["attention_mask"]):
        ended = torch.isin(row[columns:], ends).nonzero().flatten().tolist()
        length = int(mask.sum())
        yield row[columns - length : columns + ended[0] + 1 if ended else None], length


def _summary(found: Sequence[Difference], records: Sequence[Speculation], prompts: int) -> dict[str, Any]:
    verdicts = Counter(difference.verdict for difference in found)
    methods = Counter(record.method for record in records)
    return {
        "verdict": worst(verdicts),
        IDENTICAL: prompts - len(found),
        NUMERICS: verdicts[NUMERICS],
        BUG: verdicts[BUG],
        "method": methods.most_common(1)[0][0],
        "reason": next((record.reason for record in records if record.reason), None),
        "accepted_tokens": sum(record.accepted_tokens for record in records),
        "new_tokens": sum(record.new_tokens for record in records),
        "differences": [asdict(difference) for difference in found],
    }


def report_of(result: Mapping[str, Any]) -> Iterator[str]:
    """The report's lines: one per setting, one per difference, and the verdict."""
    for row in result["rows"]:
        counts = ", ".join(f"{row[verdict]} {verdict}" for verdict in (IDENTICAL, NUMERICS, BUG) if row[verdict])
        nodes = "auto" if row["nodes"] is None else row["nodes"]
        cache = "" if row["cache"] == "dynamic" else f", {row['cache']} cache"
        setting = f"batch {row['batch_size']}, {nodes} nodes, {row['tree'] or 'own'} tree{cache}"
        how = "" if row["reason"] is None else f" (decoded by {row['method']}: {row['reason']})"
        yield f"{setting}: {counts}, {row['accepted_tokens']} of {row['new_tokens']} tokens drafted{how}"
        for found in row["differences"]:
            lead = "has no lead to compare" if found["margin"] is None else f"leads by {found['margin']:.2e}"
            yield (
                f"    prompt {found['prompt']}, token {found['position']}: {found['heads_token']} with heads, "
                f"{found['plain_token']} plainly, which {lead} (rounding: {found['rounding']:.2e}): {found['verdict']}"
            )
    shares = [f"{place['right'] / place['asked']:.0%}" for place in result["drafts_by_place"] if place["asked"]]
    yield f"right drafts at places 1, 2, ..., where all before them are right: {', '.join(shares)}"
    setting = f"{result['target']}, {result['dtype']} on {result['device']}"
    yield f"{setting}, {result['num_prompts']} {result['prompts']} prompts: {result['verdict']}"
    if not any(row["accepted_tokens"] for row in result["rows"]):
        undrafted = next((row["reason"] for row in result["rows"] if row["method"] == "plain"), None)
        way_out = "train the heads, or let them write more tokens" if undrafted is None else undrafted
        yield f"No draft was accepted, so nothing was put to the test: {way_out}."


# ---------------------------------------------------------------------- one difference


@torch.no_grad()
def explain(
    target: PreTrainedModel,
    batch: dict[str, torch.Tensor],
    plain: torch.Tensor,
    heads: torch.Tensor,
    options: dict[str, Any],
    first_prompt: int = 0,
) -> list[Difference]:
    """Explain every row in which `heads` [B, L] differs from `plain` [B, L']; both are greedy texts of one batch of
    prompts.

    `options`: of plain `generate`, which is run again to get its scores.
    """
    pad = options.get("pad_token_id") or 0
    plain, heads = _of_one_length((plain, heads), pad)
    found = map(first_difference, plain.tolist(), heads.tolist())
    places = {row: place for row, place in enumerate(found) if place is not None}
    if not places:
        return []
    end = max(places.values()) + 1
    recording = {"output_scores": True, "return_dict_in_generate": True}
    until = StoppingCriteriaList([_Until(end)])
    again = target.generate(**batch, **options, **recording, stopping_criteria=until)  # type: ignore[operator]
    repeated, _ = _of_one_length((again.sequences, plain), pad)
    differences, start = [], batch["input_ids"].shape[1]
    for row, place in places.items():
        its, mine = int(plain[row, place]), int(heads[row, place])
        text = plain[row, start - int(batch["attention_mask"][row].sum()) : place]
        rounding, margin, top_two = rounding_after(target, text), None, None
        verdict = BUG
        if not torch.equal(repeated[row, : place + 1], plain[row, : place + 1]):
            verdict = NUMERICS
        elif place - start < len(again.scores):
            scores = again.scores[place - start][row].float()  # [V]
            best, second = scores.topk(2).values.tolist()
            if scores.isnan().any():  # plain generate could not choose
                verdict = NUMERICS
            elif scores[its] == best:  # otherwise its text had ended, and this is padding
                margin, top_two = best - float(scores[mine]), best - second
                verdict = NUMERICS if margin <= rounding else BUG
        figures: dict[str, Any] = {"margin": finite(margin), "top_two": finite(top_two), "rounding": rounding}
        differences.append(Difference(first_prompt + row, place - start, its, mine, **figures, verdict=verdict))
    return differences


class _Until(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        ended = input_ids.shape[1] >= self.length
        return torch.full((len(input_ids),), ended, dtype=torch.bool, device=input_ids.device)


def _of_one_length(texts: Sequence[torch.Tensor], pad: int) -> list[torch.Tensor]:
    """The texts [B, L] each, with L the longest; shorter ones are padded as plain generate pads the rows of a
    batch."""
    length = max(text.shape[1] for text in texts)
    return [torch.nn.functional.pad(text, (0, length - text.shape[1]), value=pad) for text in texts]


@torch.no_grad()
def rounding_after(target: PreTrainedModel, text: torch.Tensor) -> float:
    """By how much rounding may change the difference of the target's scores of two tokens after `text` [L].

    It is four times the largest error of a logit. That error comes from storing the logit in the target's dtype, or
    from computing it, which is measured between forwards over one token and over several. One factor of two is for the
    comparison of two logits. The other is for errors larger than those of a few forwards, often over a short text.
    """
    count = min(LOOKED_BACK, len(text) - 1)
    whole = _last_logits(target, text, (len(text),), count + 1)
    error = torch.finfo(precision_of(target)).eps * float(whole[-1].abs().max())
    if count:
        one_by_one = _last_logits(target, text, (len(text) - count, *[1] * count), count)
        for several in (whole[-count:], _last_logits(target, text, (len(text) - count, count), count)):
            difference = several - one_by_one  # [count, V]
            if difference.pow(2).mean().sqrt() <= rounding_tolerance(target) * one_by_one.std():
                error = max(error, float(difference.abs().max()))
    return 4 * error


def _last_logits(target: PreTrainedModel, text: torch.Tensor, widths: Sequence[int], keep: int) -> torch.Tensor:
    """The last logits [keep, V] in float32, from one forward for each of `widths`, its number of tokens of `text` [L],
    on one cache."""
    cache = DynamicCache(config=target.config.get_text_config(decoder=True))
    keeps_few = "logits_to_keep" in inspect.signature(target.forward).parameters
    parts, done = [], 0
    for width in widths:
        inputs: dict[str, Any] = {"input_ids": text[None, done : done + width]}
        inputs["attention_mask"] = torch.ones_like(text)[None, : done + width]
        if takes_positions(target):
            inputs["position_ids"] = torch.arange(done, done + width, device=text.device)[None]
        if keeps_few:
            inputs["logits_to_keep"] = min(width, keep)
        parts.append(target(**inputs, **{cache_name(): cache}, use_cache=True).logits[0].float())
        done += width
    return torch.cat(parts)[-keep:]


__all__ = ["BUG", "IDENTICAL", "NUMERICS", "Difference", "explain", "report_of", "rounding_after", "verify"]
