"""The text and the figures of a model card.

Contract: `render` makes a card from plain dictionaries, with the templates in `hub_cards/`. It reads no other folder
and no network. Figures come from one dictionary, the results, whose sections are all optional:

- `training`: `datasets` (ids), any figures by name (`tokens`, `steps`, `seconds`, `machine`, ...), `settings`,
  `command`, `versions`;
- `acceptance`: `by_head`, for each head the measured shares among `top1` to `top5` and `top1_given_earlier` to
  `top5_given_earlier`; also `prompts` and `command`;
- `benchmarks`: a list, each with `prompts`, `machine`, `precision`, `baseline`, `command` and `rows`. A row has a
  `batch_size`, the measured figures among `tokens_per_forward`, `speedup` and `efficiency`, and a `category` if it is
  about a part of the prompts;
- `target`: `name`, `revision` and `fingerprint`, if an adapter was fitted to another target than its heads;
- `regeneration`, for a dataset: `model`, `source` (id), `samples`, `failed`, `settings`, `command`, `versions`.

A figure that is not in the results is not on the card. A benchmark that does not say how it was measured is refused.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, overload

from huggingface_hub import DatasetCard, DatasetCardData, EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..engines.vllm_support import method_of, most_drafts, why_not

MARKER = "Written by hf_clover from the files beside it, and again with the next push. Without this line it is yours."
TAGS = ["clover", "speculative-decoding"]
_TEMPLATES = {
    "heads": ("heads.md", "measured.md"),
    "adapter": ("adapter.md", "measured.md"),
    "dataset": ("dataset.md",),
}
VLLM_DRAFTS = 4  # most drafted tokens in the vLLM command of a card
_PROVENANCE = ("prompts", "machine", "precision", "baseline", "command")
_SPEEDS = ("tokens_per_forward", "speedup", "efficiency")
_SHARES = tuple(f"top{k}{given}" for given in ("", "_given_earlier") for k in range(1, 6))


def render(
    kind: str,
    repo_id: str,
    *,
    subfolder: str = "",
    config: Mapping[str, Any] | None = None,
    adapter: Mapping[str, Any] | None = None,
    results: Mapping[str, Any] | None = None,
    parameters: int | None = None,
    plots: list[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> ModelCard | DatasetCard:
    """The card of "heads", an "adapter" or a "dataset".

    `config` is the heads' configuration, `adapter` the adapter's. `metadata` (`license`, `language`, ...) is written
    into the card's YAML; it replaces values that are derived here.
    """
    results, metadata = dict(results or {}), dict(metadata or {})
    check_results(results)
    folder = Path(__file__).parents[1] / "hub_cards"  # in an installation
    if not folder.is_dir():
        folder = Path(__file__).parents[2] / "hub_cards"  # in a clone
    template = "".join((folder / name).read_text(encoding="utf-8") for name in _TEMPLATES[kind])
    words: dict[str, Any] = {"marker": MARKER, "name": repo_id.split("/")[-1], "repo_id": repo_id}
    words |= {"subfolder": subfolder, **results, "plots": plots or []}
    if kind == "dataset":
        made = results.get("regeneration", {})
        words |= _named("target", made.get("model")) | _named("source", made.get("source"))
        settings = {name: value for name, value in made.get("settings", {}).items() if name != "model"}
        words |= {"regeneration": made, "settings": settings}
        return DatasetCard.from_template(_dataset_data(words, metadata), template_str=template, **words)

    training, acceptance = results.get("training", {}), results.get("acceptance", {})
    config = {**(config or {}), **{f"target_{k}": v for k, v in results.get("target", {}).items() if k != "name"}}
    is_clover = config.get("model_type", "clover") == "clover"
    if not is_clover:
        config["variant"] = "eagle-3"
    words |= _named("source", config.get("source_name_or_path"))
    target = results.get("target", {}).get("name") or config.get("target_name_or_path")
    words |= _named("target", target) | {"config": config, "adapter": adapter, "parameters": parameters}
    if adapter is not None:
        words |= _named("base", adapter.get("base_model_name_or_path") or "heads")
    elif target is None:
        words["target"] = "target"
    if is_clover and kind == "heads" and not subfolder and config.get("variant") and why_not(config) is None:
        method = {} if (name := method_of(config)) == "mtp" else {"method": name}  # the plug-in sets mtp itself
        drafts = min(VLLM_DRAFTS, most_drafts(config))
        words["in_vllm"] = json.dumps({**method, "model": repo_id, "num_speculative_tokens": drafts})
    measured = {share for head in acceptance.get("by_head", []) for share in head}
    words["acceptance_columns"] = [share for share in _SHARES if share in measured]
    words["training_rows"] = _training_rows(training)
    return ModelCard.from_template(_model_data(words, metadata), template_str=template, **words)


def check_results(results: Mapping[str, Any]) -> None:
    """Refuse values that are not figures, and figures without a statement of how they were measured."""
    for place, benchmark in enumerate(results.get("benchmarks", [])):
        where = f"`results`: benchmarks[{place}]"
        for field in _PROVENANCE:
            if not benchmark.get(field):
                raise ValueError(
                    f"{where} has no `{field}`. A speed is published with {', '.join(_PROVENANCE)}; add it, or leave "
                    "the benchmark out."
                )
        for row in benchmark.get("rows", []):
            if "batch_size" not in row:
                raise ValueError(f"{where} has a row without `batch_size`: {dict(row)}.")
            _check_numbers(where, row, _SPEEDS)
    for place, head in enumerate(results.get("acceptance", {}).get("by_head", [])):
        _check_numbers(f"`results`: acceptance.by_head[{place}]", head, _SHARES, most=1.0)


def _check_numbers(where: str, row: Mapping[str, Any], names: tuple[str, ...], most: float = math.inf) -> None:
    for name in names:
        value = row.get(name, 0.0)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not 0.0 <= value <= most:
            raise ValueError(f"{where} has `{name}={value!r}`: no measurement. Leave out what was not measured.")


def is_hub_id(name: str | None) -> bool:
    """Whether `name` may be the id of a repository, and is not the path of a file or folder here."""
    if not name:
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


@overload
def public_name(name: str) -> str: ...
@overload
def public_name(name: None) -> None: ...
def public_name(name: str | None) -> str | None:
    """A repository's id unchanged; only the last part of a path, because the rest is private."""
    if name is None or is_hub_id(name):
        return name
    return re.sub(r"[^\w.-]+", "-", Path(name).resolve().name) or "unnamed"


def _named(word: str, name: str | None) -> dict[str, Any]:
    """`name` for the templates, and its id if it may be on the Hub: then they link to it."""
    return {word: public_name(name), f"{word}_id": name if is_hub_id(name) else None}


def _training_rows(training: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = {}
    if datasets := listed(training.get("datasets")):
        rows["data"] = ", ".join(public_name(name) for name in datasets)
    for name, value in training.items():
        if name not in ("datasets", "settings", "command", "versions"):
            rows[name.replace("_", " ")] = f"{value:,}" if isinstance(value, int | float) else str(value)
    if settings := training.get("settings"):
        rows["settings"] = ", ".join(f"{name} {value}" for name, value in settings.items())
    return list(rows.items())


def _model_data(words: Mapping[str, Any], metadata: dict[str, Any]) -> ModelCardData:
    datasets = [name for name in listed(words.get("training", {}).get("datasets")) if is_hub_id(name)]
    is_adapter = words["adapter"] is not None
    derived = {
        "base_model": words["base_id"] if is_adapter else words["target_id"],
        "library_name": "peft" if is_adapter else "transformers",
        "datasets": datasets or None,
    }
    if derived["base_model"] is not None:
        derived["base_model_relation"] = "adapter"
    tags = [*TAGS, *([] if is_adapter else ["custom_generate"]), *listed(metadata.pop("tags", None))]
    results = _eval_results(words)
    return ModelCardData(
        **{**derived, **metadata},
        tags=tags,
        model_name=words["name"] if results else None,
        eval_results=results or None,
    )


def _eval_results(words: Mapping[str, Any]) -> list[EvalResult]:
    """The Hub's `model-index`: one entry for each figure in the card's table that is about all prompts together."""
    found = []
    for benchmark in words.get("benchmarks", []):
        conditions = {name: benchmark[name] for name in ("machine", "precision", "baseline")}
        for row in (row for row in benchmark.get("rows", []) if "category" not in row):
            for name in (name for name in _SPEEDS if name in row):
                found.append(
                    EvalResult(
                        task_type="text-generation",
                        dataset_type=benchmark["prompts"],
                        dataset_name=benchmark["prompts"],
                        metric_type=name,
                        metric_name=f"{name.replace('_', ' ')}, batch size {row['batch_size']}",
                        metric_value=round(row[name], 2),
                        metric_args={"batch_size": row["batch_size"], **conditions},
                    )
                )
    return found


def _dataset_data(words: Mapping[str, Any], metadata: dict[str, Any]) -> DatasetCardData:
    derived = {
        "task_categories": ["text-generation"],
        "source_datasets": [words["source_id"]] if words["source_id"] else None,
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "train.parquet"}]}],
    }
    tags = [*TAGS, "synthetic", *listed(metadata.pop("tags", None))]
    return DatasetCardData(**{**derived, **metadata}, tags=list(dict.fromkeys(tags)))


def listed(value: Any) -> list[Any]:
    """A field of a card as a list: it may be None, one text or several."""
    return [] if value is None else [value] if isinstance(value, str) else list(value)


__all__ = ["MARKER", "check_results", "is_hub_id", "listed", "public_name", "render"]
