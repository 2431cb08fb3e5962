"""Turns options of the command line into arguments of the library's functions."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import set_seed

from ..apps.lines import print_to_stderr
from ..decoding.draft.copies import TextMemory
from ..measure.prompts import pad_id_of
from ..network.packing import pack_for_cpu
from ..origins.published import load_heads
from ..targets.loading import check_path, hide_loading_bars, load_target, load_tokenizer
from ..targets.smollm2 import is_kept, kept

if TYPE_CHECKING:
    from ..training.online import OnlineLearner

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"  # in the clone that this is installed from


class AtHand(NamedTuple):
    name: str
    target: str
    heads: str


def at_hand() -> AtHand:
    """The default target and its heads: SmolLM2 if the quick start has fetched it, else the stand-in."""
    if is_kept() and (EXAMPLES / "smollm2" / "heads").is_dir():
        return AtHand(kept().name, str(kept()), str(EXAMPLES / "smollm2" / "heads"))
    stand_in = EXAMPLES / "stand_in"
    if not (stand_in / "target").is_dir():
        raise ValueError(f"there is no stand-in at {stand_in}: pass `--target`, a model's id or its folder.")
    return AtHand("stand-in", str(stand_in / "target"), str(stand_in / "heads"))


def load(
    target: str | None,
    heads: str | None,
    dtype: str = "auto",
    device: str | None = None,
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
    pack: bool = False,
    learn: Path | None = None,
) -> tuple[Any, Any, Any]:
    """Target, tokenizer, and heads or None. `learn`: a folder; its heads take the place of the default target's."""
    if target is None:
        if gguf_file is not None:
            raise ValueError(f"`--gguf-file {gguf_file}` needs its repository or folder: pass `--target` too.")
        name, target, its_heads = at_hand()
        if learn is None or not (learn / "config.json").exists():
            heads = heads or its_heads
        print_to_stderr(f"No `--target`: this is {name}, from {target}", "dim")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype == "auto" and place.type == "cpu":
        dtype = "float32"
    elif dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"`--dtype {dtype}` is no known dtype: pass auto, float32, bfloat16 or float16.")
    if heads is not None:
        check_path(heads, "heads")
    hide_loading_bars()
    code: dict[str, Any] = {"gguf_file": gguf_file, "trust_remote_code": trust_remote_code}
    model = load_target(target, dtype=dtype, **code)
    model.to(place)  # type: ignore[arg-type]  # transformers' wrapper counts `self` too
    assistant = None if heads is None else load_heads(heads, model)
    if pack:
        pack_for_cpu(model)
    return model, load_tokenizer(target, **code), assistant


@contextmanager
def learning(
    folder: Path | None, heads: Any, target: Any, only_when_idle: bool = False
) -> Iterator[tuple[Any, "OnlineLearner | None"]]:
    """`--learn`: the heads that learn within this block, and their learner. Without a folder: `heads`, and None.

    The learned weights are saved however the block ends: normally, by Ctrl-C, by an error, or by SIGTERM.
    """
    if folder is None:
        yield heads, None
        return
    from ..training.online import SHARE, OnlineLearner

    folder.mkdir(parents=True, exist_ok=True)  # now, so that a failure costs nothing yet

    def leave(*_: Any) -> None:
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        with OnlineLearner(heads, target, folder, 0.0 if only_when_idle else SHARE) as learner:
            yield learner.heads, learner
    finally:
        signal.signal(signal.SIGTERM, before)


def remember_texts(heads: Any, tokens: int) -> None:
    """`--remember`: give the heads a memory of this many tokens, to copy drafts from."""
    if tokens:
        if heads is None or not heads.config.draft_copies:
            copy_nothing = "with heads that copy nothing (`draft_copies` is 0 in config.json)"
            why = "without heads" if heads is None else copy_nothing
            raise ValueError(f"`--remember {tokens}` is of no use {why}: leave it out, or pass `--heads` that copy.")
        heads.text_memory = TextMemory(tokens)


def prompt_of(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise ValueError("PROMPT and `--file` exclude each other: pass one of them.")
    if file is not None:
        return file.read_text(encoding="utf-8")
    if prompt is None and sys.stdin.isatty():
        raise ValueError("there is no prompt: pass a text, `--file`, or something on standard input.")
    return sys.stdin.read() if prompt is None else prompt


def settings_of(
    tokenizer: Any, heads: Any, temperature: float | None, seed: int | None, nodes: int | None
) -> dict[str, Any]:
    """Keywords for `generate`. This also sets the seed. Without a temperature the target's own settings apply."""
    if seed is not None:
        set_seed(seed)
    settings: dict[str, Any] = {} if temperature is None else {"do_sample": temperature > 0}
    if temperature:
        settings["temperature"] = temperature
    if (pad := pad_id_of(tokenizer)) is not None:
        settings["pad_token_id"] = pad
    if nodes is not None:
        if heads is None:
            raise ValueError(f"`--num-assistant-tokens {nodes}` is of no use without heads: pass `--heads` too.")
        settings["num_assistant_tokens"] = nodes
    return settings
