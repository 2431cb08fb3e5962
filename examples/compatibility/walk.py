"""Every type of causal language model in transformers: how Clover decodes it, and whether the tokens are right.

    python examples/compatibility/walk.py            # all of them; rewrites README.md beside this file
    python examples/compatibility/walk.py --check    # all of them; exit code 1 if README.md differs
    python examples/compatibility/walk.py llama opt  # these, on the terminal

Contract: `examine(model_type)` builds a tiny random model of the type from its configuration (small_configs.py) and
lets it continue three batches, greedily and by sampling, without and with drafts. It returns one `Row`, which says how
the model was decoded. A drafter that knows the plain continuation puts it among wrong guesses (tests/oracle.py), so
drafts are accepted at every depth. The tokens must equal those of plain generate from the same seed, and their logits
must be equal up to rounding. Texts are longer than the models' windows, and longer than the lengths at which models
change their behaviour. A row depends only on the version of transformers: weights are seeded, and weights with which
rounding could decide between two tokens are not used.
"""

import argparse
import contextlib
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "tests")]

from helpers.oracle import planted  # noqa: E402
from helpers.zoo import ragged_batch  # noqa: E402
from small_configs import NOT_HERE, tiny_config  # noqa: E402

from hf_clover import CloverHeads  # noqa: E402

TABLE = HERE / "README.md"
TREE, CHAIN, REPLAYED, PLAIN = "tree", "chain", "replayed chain", "plain"
REFUSED, NOT_BUILT, WRONG = "refused", "not built", "WRONG"
MEANINGS = {
    TREE: "exact: whole trees of drafts are verified, at any batch size",
    CHAIN: "exact: chains of drafts are verified, at any batch size; all rows advance as slowly as the slowest",
    REPLAYED: "exact: as chain, and if a chain was not right to its end, its accepted tokens are run once more",
    PLAIN: "plain `generate`, with a warning that gives the reason",
    REFUSED: "no heads can be made for it: `CloverHeads.from_target` raises the error",
    NOT_BUILT: "no tiny model that generates text can be made from its configuration here",
    WRONG: "a mistake in hf_clover; please report it",
}
ALONE, SHORT, PADDED = (7,), (3,), (5, 19)  # lengths of the prompts in each batch
NEW_TOKENS, NODES, SEEDS = 24, 6, 12
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
MODES: tuple[dict[str, Any], ...] = ({}, SAMPLED)
RECORDS = {"output_logits": True, "output_scores": True}
ROUNDING = 1e-3  # share of the logits' spread; in float32, forwards of other shapes differ by a hundredth of this


@dataclass(frozen=True)
class Row:
    model_type: str
    result: str
    reason: str = ""

    def __str__(self) -> str:
        class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(self.model_type)
        return f"| {self.model_type} | {class_name} | {self.result} | {self.reason} |"


def examine(model_type: str) -> Row:
    """The row of a model type. Every error becomes a row too."""
    if model_type in NOT_HERE:
        return Row(model_type, NOT_BUILT, NOT_HERE[model_type])
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), _without_logs():
        warnings.simplefilter("ignore")
        try:
            model, plain = clear_model(model_type)
        except Exception as error:
            return Row(model_type, NOT_BUILT, _one_line(error))
        try:
            heads = CloverHeads.from_target(model)
        except ValueError as error:
            return Row(model_type, REFUSED, _one_line(error))
        except Exception as error:
            return Row(model_type, WRONG, _one_line(error))
        try:
            return Row(model_type, *compare(model, heads, plain))
        except Exception as error:
            return Row(model_type, WRONG, _one_line(error))


# ---------------------------------------------------------------------- a model, and its texts without drafts


def clear_model(model_type: str) -> tuple[PreTrainedModel, dict[tuple[int, ...], Any]]:
    """The first random weights with which no token depends on rounding, and their text for each batch."""
    for seed in range(SEEDS):
        model = build(model_type, seed)
        plain = {lengths: generate(model, lengths, **RECORDS) for lengths in (ALONE, SHORT)}
        with contextlib.suppress(Exception):  # a few types take no padding
            plain[PADDED] = generate(model, PADDED, **RECORDS)
        if all(_margin(out.scores) > ROUNDING for out in plain.values()) and _is_steady(model, plain[ALONE]):
            return model, plain
    raise RuntimeError(f"with each of {SEEDS} random models, rounding may decide between two tokens")


def build(model_type: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32).eval()
    redraw(model, torch.Generator().manual_seed(seed))
    model.generation_config = GenerationConfig(pad_token_id=0)  # greedy, and no token ends a text
    return model


@torch.no_grad()
def redraw(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Draw weights with which every layer matters (initial ones are near zero). Parameters of recurrences stay."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if outputs is not None and parameter is outputs.weight:
            parameter.copy_(1.5 * parameter.shape[-1] ** -0.5 * noise)
        elif parameter is inputs.weight:
            parameter.copy_(noise)
        elif parameter.ndim == 1 or "norm" in name:
            parameter.add_(0.2 * noise)
        elif name.endswith(("weight", "_proj")):  # linear, convolution, experts
            parameter.copy_(2.0 * parameter.shape[-1] ** -0.5 * noise)


def generate(model: PreTrainedModel, lengths: tuple[int, ...], **kwargs: Any) -> Any:
    inputs = ragged_batch(model.config.get_text_config(decoder=True).vocab_size, lengths)
    # Tiny models often repeat one token for ever, which could hide a mistake, so no token may occur twice. The short
    # prompt has no such rule, because drafts are walked in another way if no processor changes the logits.
    never_twice = {} if lengths == SHORT else {"no_repeat_ngram_size": 1}
    kwargs |= {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    return model.generate(**inputs, **never_twice, **kwargs)


def _margin(scores: tuple[torch.Tensor, ...]) -> float:
    """The smallest difference between the two best tokens, as a share of the spread of all logits."""
    steps = torch.stack(scores).float()  # [steps, B, V]
    best = steps.topk(2).values
    return float(((best[..., 0] - best[..., 1]) / _spread(steps)).min())


def _is_steady(model: PreTrainedModel, plain: Any) -> bool:
    """Whether the model does not amplify rounding. A forward over the whole text computes the same logits in another
    way, and shows it."""
    logits = model(input_ids=plain.sequences, use_cache=False).logits[0, max(ALONE) - 1 : -1]  # [steps, V]
    error = _difference(tuple(logits[:, None]), plain.logits)
    return not ROUNDING / 10 < error < 30 * ROUNDING  # more is not rounding: some types compute another thing there


def _difference(logits: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> float:
    got, want = torch.stack(logits).float(), torch.stack(expected).float()
    return float(((got - want).nan_to_num(0.0).abs().amax(-1) / _spread(want)).max())


def _spread(logits: torch.Tensor) -> torch.Tensor:
    """The spread of the logits [steps, B], without tokens that a processor or the model has ruled out."""
    rows = [row[row.isfinite()].std() for row in logits.flatten(0, -2)]
    return torch.stack(rows).view(logits.shape[:-1])


# ---------------------------------------------------------------------- with drafts


def compare(model: PreTrainedModel, heads: CloverHeads, plain: dict[tuple[int, ...], Any]) -> tuple[str, str]:
    """The result and its reason."""
    methods, reasons = [], []
    for lengths, greedy in plain.items():
        for settings in MODES:
            records = RECORDS if lengths == ALONE else {}
            expected = greedy
            if settings:
                torch.manual_seed(0)
                expected = generate(model, lengths, **settings, **records)
            random_after, start = torch.random.get_rng_state(), max(lengths)
            torch.manual_seed(0)
            with planted(heads, expected.sequences, start):
                drafts = {"assistant_model": heads, "num_assistant_tokens": NODES}
                out = generate(model, lengths, **drafts, **settings, **records)
            method, accepted = out.speculation.method, out.speculation.accepted_tokens
            how = "sampled" if settings else "greedy"
            case = f"{method}, {how}, prompts of {' and '.join(map(str, lengths))} tokens"
            if not torch.equal(out.sequences, expected.sequences):
                return WRONG, f"{case}: other tokens"
            if settings and not torch.equal(torch.random.get_rng_state(), random_after):
                return WRONG, f"{case}: as many random numbers must be used, no more and no less"
            if records and _difference(out.logits, expected.logits) > ROUNDING:
                return WRONG, f"{case}: the same tokens from other logits"
            if method != PLAIN and accepted < NEW_TOKENS // 4:
                return WRONG, f"{case}: right drafts were not accepted"
            methods.append(method)
            reasons.append(out.speculation.reason)
    if PLAIN in methods and PLAIN not in methods[: -len(MODES)]:
        reasons[0], methods[-len(MODES) :] = f"{reasons[0]}; batches go plain", methods[: len(MODES)]
    if len(set(methods)) > 1:
        return WRONG, f"decoded in turn by {', '.join(methods)}"
    return methods[0], _steady(reasons[0] or "")


# ---------------------------------------------------------------------- the table


def read_table() -> tuple[str, dict[str, Row]]:
    """The version of transformers with which the committed rows were made, and the rows."""
    text = TABLE.read_text(encoding="utf-8")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    rows = {cell[0]: Row(cell[0], cell[2], cell[3]) for cell in cells if len(cell) == 4 and cell[0] != "type"}
    return re.search(r"transformers (\S+):", text)[1], rows


WHAT_NO_LOOP_MENDS = """\
Moshi's window is 64 tokens here, more than its texts have. Beyond its window, its cache drops positions that its mask
still shows, and plain `generate` is used. The types that always run as plain `generate` cannot be drafted by any
decoding loop. CPM-Ant and XLM read the text in both directions, so a token changes the states before it. XLM and XLNet
predict at a placeholder after the text, one position per forward. ProphetNet's cache takes one token at a time.
RecurrentGemma keeps its states in its own modules, where a call cannot keep a state that it may need again."""


def write_table(rows: list[Row]) -> None:
    counts = Counter(row.result for row in rows)
    lines = [
        "# Compatibility",
        "",
        "Written by `python examples/compatibility/walk.py`; `tests/test_every_model.py` fails if a row changes.",
        "",
        f"For each of the {len(rows)} types of causal language models in transformers {transformers.__version__}: a"
        " tiny random model is",
        "made from its configuration (three layers, windows of six tokens, float32, CPU). It continues single prompts",
        "and a left-padded batch, greedily and by sampling, without drafts and with drafts, some right, some wrong.",
        f"The same seed must give the same tokens; otherwise the row says `{WRONG}`. Not covered: half precision, the",
        "sizes of real models, prompts with images or sound.",
        "",
        "| result | types | meaning |",
        "|---|---|---|",
        *(f"| {result} | {counts[result]} | {meaning} |" for result, meaning in MEANINGS.items()),
        "",
        WHAT_NO_LOOP_MENDS,
        "",
        "| type | class | result | reason |",
        "|---|---|---|---|",
        *map(str, rows),
    ]
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return _steady(f"{type(error).__name__}: {text if len(text) < 160 else text[:160] + ' ...'}")


def _steady(reason: str) -> str:
    """The reason without figures, which differ from machine to machine, and without the table's separator."""
    return re.sub(r" \(by [^)]*\)", "", reason).replace("|", "/").strip()


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    """transformers logs a lot about tiny configurations."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(None):
            yield
    finally:
        transformers.logging.set_verbosity(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model_types", nargs="*", help="types to examine; all by default")
    parser.add_argument("--check", action="store_true", help="compare with README.md instead of writing it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in arguments.model_types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        started = time.process_time()
        rows.append(examine(name))
        print(f"{time.process_time() - started:5.1f} s  {rows[-1]}", flush=True)
    if arguments.check:
        _, expected = read_table()
        changed = [row for row in rows if row != expected.get(row.model_type)]
        raise SystemExit(f"changed: {', '.join(row.model_type for row in changed)}" if changed else 0)
    if not arguments.model_types:
        write_table(rows)


if __name__ == "__main__":
    main()
