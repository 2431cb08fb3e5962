"""What the commands have in common: options of the same name and meaning, lists, and checks of their values.

Contract: an option is described here once, whichever commands take it. What comes of it is the commands' affair.
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


# Of all commands that load a model.
Target = Annotated[
    str | None,
    typer.Option(
        help="The target: an id or a folder. Default: SmolLM2 once the quick start has got it, else the stand-in.",
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
        help="Its heads. Default: the default target's, or none where --target is given.", show_default=False
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="The dtype to load weights in. auto: as they were saved, but float32 on a CPU, where arithmetic in "
        "half precision is slower and less exact."
    ),
]
Device = Annotated[str | None, typer.Option(help="Default: cuda, where there is one.", show_default=False)]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code from the target's repository.")]
Pack = Annotated[bool, typer.Option("--pack", help="Rearrange the weights for products of a few rows on a CPU.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 for greedy.")]
Seed = Annotated[int | None, typer.Option(help="For the same samples again.", show_default=False)]
NumAssistantTokens = Annotated[
    int | None,
    typer.Option("--num-assistant-tokens", min=1, help="Drafted nodes per step. Default: auto.", show_default=False),
]

Remember = Annotated[
    int, typer.Option("--remember", min=0, help="Tokens of earlier texts, whoever wrote them, to copy drafts from.")
]

Learn = Annotated[
    Path | None,
    typer.Option(
        "--learn",
        help="A folder for heads that learn while they are used. Their weights learn from what is written, and can "
        "remember it; without this option nothing is learned. Heads are the folder's, those of --heads, or made.",
        show_default=False,
    ),
]


def one_of(flag: str, words: list[str], known: tuple[str, ...]) -> list[str]:
    for word in words:
        if word not in known:
            raise ValueError(f"`{flag} {word}` is unknown: pass {', '.join(known[:-1])} or {known[-1]}.")
    return words


# Of the commands that go through prompts at several settings.
TREES, CACHES = CHOICES["draft_tree"], ("dynamic", "static")
Prompts = Annotated[
    str | None,
    typer.Option(
        help="everyday (questions that people ask), stand-in (starts of Python functions), a .jsonl file of "
        "questions, a .txt file, or a dataset. Default: everyday where the target has a chat template, else stand-in.",
        show_default=False,
    ),
]
NumPrompts = Annotated[int, typer.Option(min=1, help="How many of them.")]
BatchSizes = Annotated[list[int], typer.Option(min=1, help="Prompts at once.")]
NodeCounts = Annotated[list[str], typer.Option(help="Drafted nodes per step: numbers, or auto.")]
Caches = Annotated[list[str], typer.Option(help="dynamic or static.")]


def checked(nodes: list[str], tree: list[str], cache: list[str]) -> list[int | None]:
    """The numbers of nodes, once all three lists are known to name what there is."""
    one_of("--tree", tree, TREES)
    counts = [node_count(word) for word in nodes]
    one_of("--cache", cache, CACHES)
    return counts


def node_count(word: str) -> int | None:
    if word == "auto":
        return None
    if not word.isdecimal() or int(word) < 1:
        raise ValueError(f"`--nodes {word}` is no tree size: pass a number from 1 on, or auto.")
    return int(word)
