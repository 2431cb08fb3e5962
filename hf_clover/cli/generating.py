"""Commands that write text with heads: `generate` and `chat`."""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..apps.chat import Conversation
from ..apps.chat import chat as talk
from ..apps.lines import lines_of, print_to_stderr
from ..apps.live import LiveStreamer, TokenText
from ..measure.step_record import StepRecord
from .inputs import learning, load, prompt_of, remember_texts, settings_of
from .options import (
    Device,
    Dtype,
    GgufFile,
    Heads,
    Learn,
    NumAssistantTokens,
    Pack,
    Remember,
    Seed,
    Target,
    Temperature,
    TrustRemoteCode,
)


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue; standard input by default.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="A file to continue, in place of PROMPT.")] = None,
    target: Target = None,
    gguf_file: GgufFile = None,
    heads: Heads = None,
    learn: Learn = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 128,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    num_assistant_tokens: NumAssistantTokens = None,
    dtype: Dtype = "auto",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    pack: Pack = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout at the end.")] = False,
) -> None:
    """Continue a text, and show it while it is generated.

    Free tokens are green: the heads drafted them, and the target confirmed them without a forward of their own. The
    figures are printed to stderr.

    Example: hf-clover generate "def fibonacci(n):" --max-new-tokens 64
    """
    text = prompt_of(prompt, file)
    model, tokenizer, assistant = load(target, heads, dtype, device, trust_remote_code, gguf_file, pack, learn)
    inputs = tokenizer(text, return_tensors="pt").to(model.device)
    if not inputs["input_ids"].shape[1]:
        raise ValueError("the prompt is empty: pass a text, `--file`, or something on standard input.")
    record = StepRecord() if as_json else LiveStreamer(tokenizer)
    with learning(learn, assistant, model) as (assistant, learner):
        settings = settings_of(tokenizer, assistant, temperature, seed, num_assistant_tokens)
        record.generate(model, inputs, assistant, max_new_tokens=max_new_tokens, **settings)
    if as_json:
        written = TokenText(tokenizer, inputs["input_ids"][0].tolist())
        answer = "".join([*map(written.push, record.tokens), written.flush()])
        learned = {} if learner is None else {"tokens_learned_from": learner.tokens}
        typer.echo(json.dumps({"prompt": text, "text": answer, **record.figures(), **learned}))
        return
    for line in (record.summary(), *lines_of(learner)):
        print_to_stderr(line, "dim")


def chat(
    target: Target = None,
    gguf_file: GgufFile = None,
    heads: Heads = None,
    learn: Learn = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 512,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="0 for greedy. Default: the target's own settings. If those are greedy, 0.7, because small models "
            "repeat themselves in greedy text.",
            show_default=False,
        ),
    ] = None,
    seed: Seed = None,
    num_assistant_tokens: NumAssistantTokens = None,
    remember: Remember = 0,
    dtype: Dtype = "auto",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    pack: Pack = False,
) -> None:
    """Talk with a target; answers are shown while they are generated.

    A target without a chat template continues your text. Free tokens are green. Ctrl-C stops an answer; /exit or
    Ctrl-D leaves; /help says more.

    The line after an answer compares its speed with that of plain generate. The plain speed is measured in plain
    steps. They are made now and then, to choose the size of the tree. With --num-assistant-tokens there are no such
    steps and no comparison.

    Example: hf-clover chat --target Qwen/Qwen3-0.6B --heads qwen3-0.6b-clover-x
    """
    model, tokenizer, assistant = load(target, heads, dtype, device, trust_remote_code, gguf_file, pack, learn)
    if sys.stdin.isatty():
        with suppress(ImportError):  # not on Windows
            import readline  # noqa: F401  (arrow keys and a history in `input`)
    if temperature is None and not model.generation_config.do_sample:
        temperature = 0.7
    with learning(learn, assistant, model, only_when_idle=True) as (assistant, _):
        remember_texts(assistant, remember)
        settings = settings_of(tokenizer, assistant, temperature, seed, num_assistant_tokens)
        conversation = Conversation(model, tokenizer, assistant, max_new_tokens, **settings)
        talk(conversation, Console(), read=lambda: input("> " if sys.stdin.isatty() else ""))
