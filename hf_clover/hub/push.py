"""Heads as a repository on the Hub: the folder, its card, and the push in one commit.

Contract: a folder that `save_pretrained` wrote (of heads, or of an adapter of heads), or that `regenerate` wrote,
becomes a whole repository: this module adds the generation code, the results and the card, and commits all of it at
once, so that a push that fails leaves the repository as it was, and the folder too: what is added is written there
when the push went through. Everything is read from the folder; torch and models are not known here. Errors of the Hub
are huggingface_hub's own; where none answers, it is a `ConnectionError` that says so. Access tokens are taken out of
what is written, and a file that holds one is not pushed.
"""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    DatasetCard,
    HfApi,
    ModelCard,
    constants,
    get_token,
)
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from safetensors import safe_open

from .. import __version__
from ..measure.provenance import TOKEN, without_folders, without_tokens
from ..measure.whole_files import write_whole
from ..network.variants import MODEL_TYPES
from .cards import MARKER, check_results, listed, public_name, render
from .code import generation_code

RESULTS = "clover_results.json"
_CARD = "README.md"
_AT_THE_ROOT = ("*.py", "custom_generate/*")  # where transformers looks for code, whatever the subfolder
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
LEARNER = "learner.safetensors"  # what learning goes on from: it counts what users wrote, and nobody else needs it
_EVERYWHERE = (_CARD, RESULTS, "LICENSE*", "*.png", "*.svg")
_PUSHED = {
    "heads": ("config.json", "generation_config.json", *_WEIGHTS, *_AT_THE_ROOT, *_EVERYWHERE),
    "adapter": ("adapter_config.json", *_WEIGHTS, *_EVERYWHERE),
    "dataset": ("*.parquet", *_EVERYWHERE),
}
# Of huggingface_hub's HTTP client, which is httpx or httpx2 by its version.
_NO_ANSWER: Any = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
_KEPT = ("license", "license_name", "license_link", "language", "tags")  # what a card says that no file does


def push_folder(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    subfolder: str = "",
    commit_message: str | None = None,
    commit_description: str | None = None,
    heads: Any = None,
    results: Mapping[str, Any] | None = None,
    **metadata: Any,
) -> CommitInfo:
    """Make `folder` a whole repository and commit it to `repo_id`, which is created where it does not exist.

    Args:
        folder: of heads, of an adapter of heads, or of a dataset from `regenerate`. What belongs to none of them
            (checkpoints of the training, its logs, pickles) stays here.
        repo_id, private, token, revision, create_pr, commit_message, commit_description: as for
            [`~huggingface_hub.HfApi.create_commit`].
        subfolder: where the heads go in a repository that holds something else too, such as their target. Their code
            goes to its root all the same, where transformers looks for it.
        heads: as for [`write_card`].
        results: measured figures for the card, as for [`write_results`].
        metadata: for the card: `license`, `language`, ... as for [`~huggingface_hub.ModelCardData`].
    """
    folder, subfolder = Path(folder), subfolder.strip("/")
    kind = _kind(folder)
    given = {"heads": heads, "results": results, "token": token, **metadata}
    # Before the Hub is asked for anything: whatever is wrong with the folder is said first.
    files = files_to_push(folder, repo_id, subfolder=subfolder, **given)
    api = HfApi(token=token, library_name="hf_clover", library_version=__version__)
    where: dict[str, Any] = {"repo_type": "dataset" if kind == "dataset" else "model"}
    with asking_the_hub(f"Nothing was pushed to {repo_id!r}, and nothing has changed in {str(folder)!r}."):
        where["repo_id"] = api.create_repo(repo_id, private=private, exist_ok=True, **where).repo_id
        if where["repo_id"] != repo_id:  # the user's own namespace
            files = files_to_push(folder, where["repo_id"], subfolder=subfolder, **given)
        if revision is not None and not create_pr and not revision.startswith("refs/"):
            api.create_branch(branch=revision, exist_ok=True, **where)
        prefix = f"{subfolder}/" if subfolder else ""
        pushed, card = dict(files), prefix + _CARD
        if isinstance(files[card], bytes) and _remote_card_is_somebodys(api, card, revision, where):
            del pushed[card]
        others = set(api.list_repo_files(revision=revision, **where)) - pushed.keys()
        stale = [path for path in others if path.startswith(prefix) and _is_weights(path.removeprefix(prefix))]
        operations = [CommitOperationAdd(path, content) for path, content in pushed.items()]
        commit = api.create_commit(
            operations=[*operations, *(CommitOperationDelete(path) for path in stale)],
            commit_message=commit_message or f"Upload {kind} with hf_clover {__version__}",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
            **where,
        )
    with suppress(OSError):  # of a folder that nobody may write to: the push went through all the same
        made = _Repository(folder, kind, where["repo_id"], subfolder, heads, metadata)
        for path, text in made.added(results).items():
            (folder / path).parent.mkdir(exist_ok=True)
            write_whole(folder / path, text)
    return commit


def files_to_push(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    subfolder: str = "",
    heads: Any = None,
    results: Mapping[str, Any] | None = None,
    token: str | bool | None = None,
    **metadata: Any,
) -> dict[str, str | bytes]:
    """What [`push_folder`] commits: each file's path in the repository, and where it lies or what is in it.

    Nothing is written, and the Hub is not asked.
    """
    folder, subfolder = Path(folder), subfolder.strip("/")
    kind = _kind(folder)
    found = sorted({path for pattern in _PUSHED[kind] for path in folder.glob(pattern) if path.is_file()})
    found = [path for path in found if path.name != LEARNER]
    if kind != "dataset" and not any(_is_weights(path.name) for path in found):
        raise ValueError(
            f"`folder` {str(folder)!r} holds no weights in safetensors, and no others are pushed: save the {kind} "
            "there with `save_pretrained`."
        )
    secrets = [secret for secret in (token, get_token()) if isinstance(secret, str)]
    files = {path.relative_to(folder).as_posix(): _content(path, secrets) for path in found}
    made = _Repository(folder, kind, repo_id, subfolder, heads, metadata)
    files |= {path: text.encode() for path, text in made.added(results).items()}
    prefix = f"{subfolder}/" if subfolder else ""
    return {path if _is_code(path) else prefix + path: files[path] for path in sorted(files)}


@contextmanager
def asking_the_hub(consequence: str) -> Iterator[None]:
    """Around requests to the Hub: where it does not answer, one sentence says so, and the `consequence` another."""
    try:
        yield
    except HfHubHTTPError:
        raise  # an answer, if no good one
    except _NO_ANSWER as error:
        raise ConnectionError(
            f"the Hub at {constants.ENDPOINT} does not answer ({type(error).__name__}: {error}). {consequence} Try "
            "again when it does, or set HF_ENDPOINT."
        ) from error


def push_heads(
    heads: Any,
    repo_id: str,
    *,
    results: Mapping[str, Any] | None = None,
    plots: Iterable[str | os.PathLike] = (),
    max_shard_size: int | str = "50GB",
    **options: Any,
) -> CommitInfo:
    """`heads.push_to_hub`: save, then [`push_folder`] with its `options`.

    Args:
        results: the measured figures, as `hf_clover.hub.cards` describes them.
        plots: images that go beside the card and into it.
    """
    with tempfile.TemporaryDirectory() as folder:
        heads.save_pretrained(folder, max_shard_size=max_shard_size)
        if results is not None:
            write_results(folder, **results)
        for plot in plots:
            shutil.copy(plot, folder)
        return push_folder(folder, repo_id, **options)


def write_results(folder: str | os.PathLike, **sections: Any) -> None:
    """Put measured figures beside the heads, for the card; sections that are there and not given stay as they are.

    What the sections hold is described in `hf_clover.hub.cards`.
    """
    path = Path(folder) / RESULTS
    text = _as_text(_with_sections(path, sections))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)


def write_card(
    folder: str | os.PathLike, heads: Any = None, *, repo_id: str | None = None, subfolder: str = "", **metadata: Any
) -> ModelCard | DatasetCard:
    """Write the card of what is in `folder`, from its files; one that somebody wrote by hand is left alone.

    Args:
        heads: where their config is not in the folder: before they are saved, or of an adapter.
        repo_id, subfolder: where the lines of code on the card load from; the folder's own name by default.
        metadata: `license`, `language`, `tags`, ... What an earlier card had of them stays.
    """
    folder = Path(folder)
    made = _Repository(folder, _kind(folder, heads), repo_id or folder.resolve().name, subfolder, heads, metadata)
    figures = made.figures(None)
    if figures is not None:
        write_results(folder, **figures)
    text = made.card(figures)
    if text is not None:
        write_whole(folder / _CARD, text)
    return _card_class(made.kind).load(folder / _CARD)


# ---------------------------------------------------------------------- the folder


def _kind(folder: Path, heads: Any = None) -> str:
    if (folder / "adapter_config.json").is_file():
        return "adapter"
    if heads is not None or _read_json(folder / "config.json").get("model_type") in MODEL_TYPES:
        return "heads"
    if any(folder.glob("*.parquet")):
        return "dataset"
    raise ValueError(
        f"`folder` {str(folder)!r} holds neither heads nor an adapter of heads nor a dataset: there is no config.json "
        f"of a model_type among {', '.join(MODEL_TYPES)}, no adapter_config.json and no *.parquet in it. Write it "
        "with `save_pretrained`."
    )


@dataclass(frozen=True)
class _Repository:
    """What a folder is to become."""

    folder: Path
    kind: str
    repo_id: str
    subfolder: str
    heads: Any
    metadata: dict[str, Any]

    def added(self, results: Mapping[str, Any] | None) -> dict[str, str]:
        """What the folder lacks, or has of an earlier time: each file's path there, and what is in it."""
        added = generation_code() if self.kind == "heads" else {}  # also into a folder that an older version saved
        figures = self.figures(results)
        if figures is not None:
            added[RESULTS] = _as_text(figures)
        card = self.card(figures)
        return added if card is None else {**added, _CARD: card}

    def figures(self, results: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """The folder's with those that are given; None where nothing is new in them."""
        path, sections = self.folder / RESULTS, dict(results or {})
        if self.kind == "adapter" and self.heads is not None and "target" not in {**_read_json(path), **sections}:
            config = self.heads.config
            target = {"name": config.target_name_or_path, "revision": config.target_revision}
            sections["target"] = {**target, "fingerprint": config.target_fingerprint}
        return _with_sections(path, sections) if sections else None

    def card(self, figures: Mapping[str, Any] | None) -> str | None:
        """None where somebody has written one by hand."""
        folder, path, metadata = self.folder, self.folder / _CARD, dict(self.metadata)
        if path.exists() and not _is_generated(path):
            return None
        is_ours = path.exists() and MARKER in path.read_text("utf-8")
        earlier = _card_class(self.kind).load(path).data.to_dict() if is_ours else {}
        kept = {name: earlier[name] for name in _KEPT if name in earlier}
        kept["tags"] = [*listed(kept.get("tags")), *listed(metadata.pop("tags", None))]
        card = render(
            self.kind,
            self.repo_id,
            subfolder=self.subfolder,
            config=self.heads.config.to_dict() if self.heads is not None else _read_json(folder / "config.json"),
            adapter=_read_json(folder / "adapter_config.json") if self.kind == "adapter" else None,
            results=_read_json(folder / RESULTS) if figures is None else figures,
            parameters=_count_parameters(folder),
            plots=sorted(file.name for pattern in ("*.png", "*.svg") for file in folder.glob(pattern)),
            metadata={**kept, **metadata},
        )
        return without_tokens(str(card))


def _with_sections(path: Path, sections: Mapping[str, Any]) -> dict[str, Any]:
    results = without_folders({**_read_json(path), **sections})
    check_results(results)
    return results


def _as_text(results: Mapping[str, Any]) -> str:
    return without_tokens(json.dumps(results, indent=2, allow_nan=False)) + "\n"


def _card_class(kind: str) -> type[ModelCard] | type[DatasetCard]:
    return DatasetCard if kind == "dataset" else ModelCard


def _content(path: Path, secrets: list[str]) -> str | bytes:
    """Weights and images are not looked into; where things lie on this machine stays out of the JSON files."""
    if path.suffix in (".safetensors", ".parquet", ".png"):
        return str(path)
    text = path.read_text(encoding="utf-8", errors="replace")
    if TOKEN.search(text) or any(secret in text for secret in secrets):
        raise ValueError(f"`folder` has an access token in {path.name!r}: take it out before you push.")
    if path.name not in ("config.json", "adapter_config.json", RESULTS):
        return str(path)
    values = without_folders(json.loads(text))
    for field in ("target_name_or_path", "base_model_name_or_path"):
        if field in values:
            values[field] = public_name(values[field])
    return (json.dumps(values, indent=2) + "\n").encode()


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _count_parameters(folder: Path) -> int | None:
    count = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="np") as tensors:
            names = [name for name in tensors.keys() if name != "draft_ids"]  # noqa: SIM118  (not a dictionary)
            count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
    return count or None


# ---------------------------------------------------------------------- cards and weights that are there already


def _is_generated(card: Path) -> bool:
    """Whether a card may be written anew: ours, or the form that PEFT leaves for somebody to fill in."""
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    return MARKER in text or "# Model Card for Model ID" in text


def _remote_card_is_somebodys(api: HfApi, path: str, revision: str | None, where: dict[str, Any]) -> bool:
    try:
        return not _is_generated(Path(api.hf_hub_download(filename=path, revision=revision, **where)))
    except EntryNotFoundError:
        return False


def _is_code(path: str) -> bool:
    return any(Path(path).match(pattern) for pattern in _AT_THE_ROOT)


def _is_weights(path: str) -> bool:
    """Of a former push, they would be loaded in place of the new ones, or fetched beside them."""
    return any(Path(path).match(pattern) for pattern in _WEIGHTS) and "/" not in path


__all__ = [
    "LEARNER",
    "RESULTS",
    "asking_the_hub",
    "files_to_push",
    "push_folder",
    "push_heads",
    "write_card",
    "write_results",
]
