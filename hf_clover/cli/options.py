"""Options that several commands share: their descriptions, lists, and checks of their values.

Contract: a shared option is described here once. The commands themselves use its value.
"""

from pathlib import Path
from typing import Annotated

import typer

from ..network.variants import CHOICES


class ManyValues(typer.core.TyperCommand):
    """A command whose list options take several values after one flag: `--batch-size 1 4 16`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        flags = {flag for param in self.params if getattr(param, "multiple", False) for flag in param.opts}
        words, flag = [], None
        for word in args:
            if word.startswith("-"):
                flag, has_value = (word, False) if word in flags else (None, False)
            elif flag is not None:
                words += [flag] * has_value
                has_value = True
            words.append(word)
        return super().parse_args(ctx, words)


# Options of all commands that load a model.
Target = Annotated[
    str | None,
    typer.Option(
        help="The target: an id or a folder. Default: SmolLM2 if the quick start has fetched it, else the stand-in.",
        show_default=False,
    ),
]
GgufFile = Annotated[
    str | None,
    typer.Option(help="Load the target from this GGUF file in its repository or folder.", show_default=False),
]
Heads = Annotated[
    str | None,
    typer.Option(
        help="The target's heads. Default: the default target's, or none if --target is given.", show_default=False
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="The dtype to load weights in. auto is the dtype that they were saved in, but on a CPU float32, because "
        "half precision is slower and less exact there."
    ),
]
Device = Annotated[str | None, typer.Option(help="Default: cuda if there is one, else cpu.", show_default=False)]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code from the target's repository.")]
Pack = Annotated[bool, typer.Option("--pack", help="Rearrange weights for fast forwards over a few tokens on a CPU.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 for greedy.")]
Seed = Annotated[int | None, typer.Option(help="Seed; the same seed gives the same samples.", show_default=False)]
NumAssistantTokens = Annotated[
    int | None,
    typer.Option("--num-assistant-tokens", min=1, help="Drafted nodes per step. Default: auto.", show_default=False),
]

Remember = Annotated[
    int, typer.Option("--remember", min=0, help="How many tokens of earlier texts, of all users, to copy drafts from.")
]

Learn = Annotated[
    Path | None,
    typer.Option(
        "--learn",
        help="A folder for heads that learn while they are used. Their weights learn from prompts and answers, and "
        "can memorise them. Without this option nothing is learned. The heads are those in the folder, else those of "
        "--heads, else new ones.",
        show_default=False,
    ),
]


def one_of(flag: str, words: list[str], known: tuple[str, ...]) -> list[str]:
    for word in words:
        if word not in known:
            raise ValueError(f"`{flag} {word}` is unknown: pass {', '.join(known[:-1])} or {known[-1]}.")
    return words


# Options of the commands that run prompts at several settings.
TREES, CACHES = CHOICES["draft_tree"], ("dynamic", "static")
Prompts = Annotated[
    str | None,
    typer.Option(
        help="everyday (questions that people ask), stand-in (starts of Python functions), a .jsonl file of "
        "questions, a .txt file, or a dataset. Default: everyday if the target has a chat template, else stand-in.",
        show_default=False,
    ),
]
NumPrompts = Annotated[int, typer.Option(min=1, help="Number of prompts.")]
BatchSizes = Annotated[list[int], typer.Option(min=1, help="Prompts per batch.")]
NodeCounts = Annotated[list[str], typer.Option(help="Drafted nodes per step: numbers, or auto.")]
Caches = Annotated[list[str], typer.Option(help="dynamic or static.")]


def checked(nodes: list[str], tree: list[str], cache: list[str]) -> list[int | None]:
    """The numbers of nodes, after checking all three lists."""
    one_of("--tree", tree, TREES)
    counts = [node_count(word) for word in nodes]
    one_of("--cache", cache, CACHES)
    return counts


def node_count(word: str) -> int | None:
    if word == "auto":
        return None
    if not word.isdecimal() or int(word) < 1:
        raise ValueError(f"`--nodes {word}` is no tree size: pass a positive number, or auto.")
    return int(word)
