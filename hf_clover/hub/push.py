"""Pushes heads to a repository on the Hub: the folder and its model card, in one commit.

Contract: pushes a folder that `save_pretrained` wrote (for heads or an adapter of heads) or that `regenerate` wrote.
This module adds the generation code, the results and the card, and commits all files at once. A failed push changes
neither the repository nor the folder: the added files are written to the folder after a successful push. Everything is
read from the folder; this module does not know torch or models. Errors of the Hub are huggingface_hub's own; if the
Hub does not answer, a `ConnectionError` says so. Access tokens are removed from written text, and a file with one is
not pushed.
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
_AT_THE_ROOT = ("*.py", "custom_generate/*")  # transformers looks for code at the root, whatever the subfolder
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
LEARNER = "learner.safetensors"  # the state of a learner, never pushed: it holds counts of the users' tokens
_EVERYWHERE = (_CARD, RESULTS, "LICENSE*", "*.png", "*.svg")
_PUSHED = {
    "heads": ("config.json", "generation_config.json", *_WEIGHTS, *_AT_THE_ROOT, *_EVERYWHERE),
    "adapter": ("adapter_config.json", *_WEIGHTS, *_EVERYWHERE),
    "dataset": ("*.parquet", *_EVERYWHERE),
}
# The base of errors in huggingface_hub's HTTP client, which is httpx or httpx2, depending on the version.
_NO_ANSWER: Any = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
_KEPT = ("license", "license_name", "license_link", "language", "tags")  # fields that only the card itself holds


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
    """Complete the files of `folder` and commit them to `repo_id`, which is created if it does not exist.

    Args:
        folder: a folder of heads, of an adapter of heads, or of a dataset from `regenerate`. Other files in it
            (checkpoints of training, logs, pickles) are not pushed.
        repo_id, private, token, revision, create_pr, commit_message, commit_description: as for
            [`~huggingface_hub.HfApi.create_commit`].
        subfolder: the heads' folder in a repository that holds something else too, such as their target. Their code
            is pushed to the repository's root, because transformers looks for it there.
        heads: as for [`write_card`].
        results: measured figures for the card, as for [`write_results`].
        metadata: fields of the card: `license`, `language`, ... as for [`~huggingface_hub.ModelCardData`].
    """
    folder, subfolder = Path(folder), subfolder.strip("/")
    kind = _kind(folder)
    given = {"heads": heads, "results": results, "token": token, **metadata}
    # Before any request to the Hub, so that a fault of the folder is reported first.
    files = files_to_push(folder, repo_id, subfolder=subfolder, **given)
    api = HfApi(token=token, library_name="hf_clover", library_version=__version__)
    where: dict[str, Any] = {"repo_type": "dataset" if kind == "dataset" else "model"}
    with asking_the_hub(f"Nothing was pushed to {repo_id!r}, and nothing has changed in {str(folder)!r}."):
        where["repo_id"] = api.create_repo(repo_id, private=private, exist_ok=True, **where).repo_id
        if where["repo_id"] != repo_id:  # the Hub added the user's namespace
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
    with suppress(OSError):  # the folder may be read-only; the push was successful all the same
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
    """The files that [`push_folder`] commits: path in the repository, and local path (text) or content (bytes).

    Nothing is written, and no request is sent to the Hub.
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
    """A block with requests to the Hub. If the Hub does not answer, the error says so and adds the `consequence`."""
    try:
        yield
    except HfHubHTTPError:
        raise  # the Hub answered with an error
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
        plots: images that are pushed and shown on the card.
    """
    with tempfile.TemporaryDirectory() as folder:
        heads.save_pretrained(folder, max_shard_size=max_shard_size)
        if results is not None:
            write_results(folder, **results)
        for plot in plots:
            shutil.copy(plot, folder)
        return push_folder(folder, repo_id, **options)


def write_results(folder: str | os.PathLike, **sections: Any) -> None:
    """Write measured figures to the folder of the heads, for the card. Sections that are not given stay as they are.

    `hf_clover.hub.cards` describes the sections.
    """
    path = Path(folder) / RESULTS
    text = _as_text(_with_sections(path, sections))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)


def write_card(
    folder: str | os.PathLike, heads: Any = None, *, repo_id: str | None = None, subfolder: str = "", **metadata: Any
) -> ModelCard | DatasetCard:
    """Write the card for `folder` from its files. A card that was written by hand is kept.

    Args:
        heads: the heads, if their config is not in the folder: before they are saved, or for an adapter.
        repo_id, subfolder: the repository that the card's code loads from; the folder's own name by default.
        metadata: `license`, `language`, `tags`, ... Values of an earlier card are kept.
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
    """The repository that a folder is made into."""

    folder: Path
    kind: str
    repo_id: str
    subfolder: str
    heads: Any
    metadata: dict[str, Any]

    def added(self, results: Mapping[str, Any] | None) -> dict[str, str]:
        """The files to add or renew: path in the folder, and content."""
        added = generation_code() if self.kind == "heads" else {}  # an older version may have saved the folder
        figures = self.figures(results)
        if figures is not None:
            added[RESULTS] = _as_text(figures)
        card = self.card(figures)
        return added if card is None else {**added, _CARD: card}

    def figures(self, results: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """The figures in the folder, updated by `results`; None if there is nothing to update."""
        path, sections = self.folder / RESULTS, dict(results or {})
        if self.kind == "adapter" and self.heads is not None and "target" not in {**_read_json(path), **sections}:
            config = self.heads.config
            target = {"name": config.target_name_or_path, "revision": config.target_revision}
            sections["target"] = {**target, "fingerprint": config.target_fingerprint}
        return _with_sections(path, sections) if sections else None

    def card(self, figures: Mapping[str, Any] | None) -> str | None:
        """The text of the card; None if the folder has one that was written by hand."""
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
    """The file's path, or its content if that has to change: JSON files are pushed without paths of this machine.
    Raises if a text file holds an access token; weights and images are not read."""
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
    """Whether a card may be overwritten: it is ours, or PEFT's form that nobody has filled in."""
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
    """Whether a file holds weights. Old weights are deleted on a push: they would be loaded in place of the new ones,
    or downloaded beside them."""
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
