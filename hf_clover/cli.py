"""The command line: `hf-clover COMMAND`.

Contract: each command is a thin face over a function of the library and says so in its help. Whatever a user can
mend (a wrong argument, a missing file) is one line on stderr and exit code 2; Ctrl-C is 130; anything else is a bug
and shows its traceback. Nothing heavy is imported before a command runs.
"""

import json
import sys
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __version__
from .cli_options import (
    Device,
    Dtype,
    Heads,
    ManyValues,
    NumAssistantTokens,
    Seed,
    Target,
    Temperature,
    TrustRemoteCode,
    node_count,
    one_of,
)

STAND_IN = Path(__file__).resolve().parent.parent / "examples" / "stand_in"  # of the clone this is installed from

app = typer.Typer(
    name="hf-clover",
    help="Clover speculative heads for transformers' generate.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def _say_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"hf-clover {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="What to continue; without it, standard input.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="A file to continue, in place of PROMPT.")] = None,
    target: Target = None,
    heads: Heads = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest continuation.")] = 128,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    num_assistant_tokens: NumAssistantTokens = None,
    dtype: Dtype = "auto",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, when all is done.")] = False,
) -> None:
    """Continue a text, shown as it is written.

    In green: the tokens that came free, drafted by the heads and confirmed by the target in one forward with the
    next of its own. The figures go to stderr, in one line.

    Example: hf-clover generate "def fibonacci(n):" --max-new-tokens 64
    """
    text = _prompt(prompt, file)
    model, tokenizer, assistant = _load(target, heads, dtype, device, trust_remote_code)
    from .live import LiveStreamer, StepRecord, TokenText

    settings = _settings(tokenizer, assistant, temperature, seed, num_assistant_tokens)
    inputs = tokenizer(text, return_tensors="pt").to(model.device)
    if not inputs["input_ids"].shape[1]:
        raise ValueError("the prompt is empty: pass a text, `--file`, or something on standard input.")
    record = StepRecord() if as_json else LiveStreamer(tokenizer)
    record.generate(model, inputs, assistant, max_new_tokens=max_new_tokens, **settings)
    if as_json:
        written = TokenText(tokenizer, inputs["input_ids"][0].tolist())
        answer = "".join([*map(written.push, record.tokens), written.flush()])
        typer.echo(json.dumps({"prompt": text, "text": answer, **record.figures()}))
    else:
        typer.secho(record.summary(), err=True, dim=True)


@app.command()
def chat(
    target: Target = None,
    heads: Heads = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    num_assistant_tokens: NumAssistantTokens = None,
    dtype: Dtype = "auto",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Talk with a target: answers are shown as they are written.

    A target without a chat template continues your text. In green: the tokens that came free. Ctrl-C stops an
    answer; /exit or Ctrl-D leaves; /help says more.

    Example: hf-clover chat --target Qwen/Qwen3-0.6B --heads qwen3-0.6b-clover-2
    """
    model, tokenizer, assistant = _load(target, heads, dtype, device, trust_remote_code)
    from rich.console import Console

    from .chat import Conversation
    from .chat import chat as run

    if sys.stdin.isatty():
        with suppress(ImportError):  # not on Windows
            import readline  # noqa: F401  (arrow keys and a history in `input`)
    settings = _settings(tokenizer, assistant, temperature, seed, num_assistant_tokens)
    conversation = Conversation(model, tokenizer, assistant, max_new_tokens, **settings)
    run(conversation, Console(), read=lambda: input("> " if sys.stdin.isatty() else ""))


@app.command(cls=ManyValues)
def benchmark(
    target: Target = None,
    heads: Heads = None,
    against: Annotated[
        list[str] | None,
        typer.Option(help="prompt-lookup, assistant:MODEL (a smaller model) or NAME:HEADS.", show_default=False),
    ] = None,
    prompts: Annotated[
        str, typer.Option(help="stand-in, a .jsonl file of questions, a .txt file, or a dataset.")
    ] = "stand-in",
    num_prompts: Annotated[int, typer.Option(min=1, help="How many of them.")] = 8,
    batch_size: Annotated[list[int], typer.Option(min=1, help="Prompts at once.")] = [1],  # noqa: B006
    nodes: Annotated[list[str], typer.Option(help="Drafted nodes per step: numbers, or auto.")] = ["auto"],  # noqa: B006
    tree: Annotated[
        list[str] | None,
        typer.Option(help="global, levels or chain. Default: the heads' own.", show_default=False),
    ] = None,
    temperature: Annotated[list[float], typer.Option(min=0.0, help="0 for greedy.")] = [0.0],  # noqa: B006
    cache: Annotated[list[str], typer.Option(help="dynamic or static.")] = ["dynamic"],  # noqa: B006
    max_new_tokens: Annotated[int, typer.Option(min=1, help="New tokens per prompt.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 3,
    seed: Annotated[int, typer.Option(help="For samples.")] = 0,
    dtype: Dtype = "auto",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A JSON file, for `hf-clover plot`.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The JSON on stdout in place of the table.")] = False,
) -> None:
    """Measure heads, plain generate and other ways to be faster, side by side.

    All methods take turns in one run, prompt by prompt. Options that are lists take several values after one flag,
    and every combination is measured.

    Example: hf-clover benchmark --against prompt-lookup --batch-size 1 4 --nodes auto 8 -o result.json
    """
    trees = one_of("--tree", tree or [], ("global", "levels", "chain")) or [None]
    counts = [node_count(word) for word in nodes]
    one_of("--cache", cache, ("dynamic", "static"))
    model, tokenizer, assistant = _load(target, heads, dtype, device, trust_remote_code)
    from . import benchmark as bench
    from .prompts import load_prompts

    methods = [bench.plain()]
    if assistant is not None:
        methods += [bench.with_heads(assistant, nodes=count, tree=shape) for shape, count in product(trees, counts)]
    methods += [bench.parse_method(text, model) for text in against or []]
    if len(methods) == 1:
        raise ValueError("there is nothing to compare with plain generate: pass `--heads`, `--against`, or both.")
    result = bench.benchmark(
        model,
        tokenizer,
        methods,
        load_prompts(prompts, tokenizer, num_prompts),
        prompt_set=prompts,
        batch_sizes=batch_size,
        temperatures=temperature,
        cache_implementations=cache,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        seed=seed,
        progress=sys.stderr.isatty(),
    )
    if output is not None:
        bench.write(result, output)
        typer.echo(f"Written to {output}; `hf-clover plot {output}` draws it.", err=True)
    if as_json:
        typer.echo(json.dumps(result))
        return
    from rich.console import Console

    from .tables import notes_of, table_of

    console = Console()
    console.print(table_of(result))
    for note in notes_of(result):
        console.print(note, highlight=False, markup=False, soft_wrap=True)


@app.command()
def plot(
    results: Annotated[list[Path], typer.Argument(help="JSON of benchmark or an experiment, or trainer_state.json.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A folder. Default: beside each JSON.")] = None,
) -> None:
    """Draw results: NAME.png and NAME-dark.png of each NAME.json.

    The names of the pictures are printed, one a line.

    Example: hf-clover plot result.json --out pictures
    """
    from .plots import plot as run

    for path in results:
        for picture in run(path, out):
            typer.echo(str(picture))


@app.command(context_settings=PASS_THROUGH, add_help_option=False, options_metavar="[--config FILE] [trl's options]")
def train(context: typer.Context) -> None:
    """Distil heads from a target. The flags are trl's; see `hf-clover train --help`.

    Example: hf-clover train --config examples/configs/qwen3-0.6b.yaml
    """
    from .training.script import main as run

    trainer = run(context.args, prog="hf-clover train")
    if trainer.was_interrupted:
        raise typer.Exit(130)


@app.command()
def regenerate(
    dataset: Annotated[str, typer.Argument(help="Prompts: a dataset of the Hub, or a folder of files.")],
    output_dir: Annotated[Path, typer.Argument(help="Where the answers go; running again continues there.")],
    model: Annotated[str, typer.Option(help="The target: an id or a folder, or its name at the endpoint.")],
    heads: Annotated[str | None, typer.Option(help="Heads to answer sooner with (the answers are the same).")] = None,
    endpoint: Annotated[str | None, typer.Option(help="A server with OpenAI's interface, for all answers.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="For the endpoint.")] = None,
    config: Annotated[str | None, typer.Option(help="The dataset's configuration.")] = None,
    split: Annotated[str, typer.Option(help="The dataset's split; slices such as train[:1000] too.")] = "train",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 1024,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 for greedy answers.")] = 0.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts in one call of generate.")] = 8,
    dtype: Annotated[str, typer.Option(help="The dtype to load the target in.")] = "auto",
) -> None:
    """Let the target answer a dataset's prompts: the text that its heads learn best from.

    Example: hf-clover regenerate trl-lib/Capybara answers --model Qwen/Qwen3-8B --endpoint http://localhost:8000/v1
    """
    from datasets import load_dataset

    from .training import EndpointAnswers, TargetAnswers
    from .training import regenerate as run

    if endpoint is not None and heads is not None:
        raise ValueError("`--heads` and `--endpoint` exclude each other: an endpoint answers with its own engine.")
    prompts = load_dataset(dataset, name=config, split=split)
    if endpoint is not None:
        answers = EndpointAnswers(endpoint, model, api_key, max_tokens=max_new_tokens, temperature=temperature)
    else:
        target, tokenizer, assistant = _load(model, heads, dtype)
        sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        answers = TargetAnswers(target, tokenizer, assistant, batch_size, max_new_tokens=max_new_tokens, **sampling)
    answered = run(prompts, answers, output_dir)
    typer.echo(f"{len(answered)} of {len(prompts)} prompts answered in {output_dir}")


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(help="Heads, an adapter of heads, or a dataset from regenerate.")],
    repo_id: Annotated[str, typer.Argument(help="The repository on the Hub, such as org/name.")],
    private: Annotated[bool | None, typer.Option(help="Whether a new repository is private.")] = None,
    revision: Annotated[str | None, typer.Option(help="The branch to commit to.")] = None,
    create_pr: Annotated[bool, typer.Option(help="Open a pull request instead of committing.")] = False,
    subfolder: Annotated[str, typer.Option(help="Where in the repository, beside a target for one.")] = "",
    message: Annotated[str | None, typer.Option("--message", "-m", help="The commit's message.")] = None,
) -> None:
    """Push a folder to the Hub in one commit, with its card and what it needs to be loaded.

    Example: hf-clover push runs/my-heads org/my-model-clover --private
    """
    from .hub import push_folder

    commit = push_folder(
        folder,
        repo_id,
        private=private,
        revision=revision,
        create_pr=create_pr,
        subfolder=subfolder,
        commit_message=message,
    )
    typer.echo(commit.pr_url or commit.commit_url)


# ---------------------------------------------------------------------- from words to what functions take


def _load(
    target: str | None,
    heads: str | None,
    dtype: str = "auto",
    device: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, Any, Any]:
    """Target, tokenizer, and heads or None."""
    if target is None:
        if not (STAND_IN / "target").is_dir():
            raise ValueError(f"there is no stand-in at {STAND_IN}: pass `--target`, a model's id or its folder.")
        target, heads = str(STAND_IN / "target"), heads or str(STAND_IN / "heads")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .modeling_clover import CloverHeads

    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype == "auto" and device.type == "cpu":
        dtype = "float32"
    elif dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"`--dtype {dtype}` is none: pass auto, float32, bfloat16 or float16.")
    code = {"trust_remote_code": trust_remote_code}
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype, **code).to(device)
    assistant = None if heads is None else CloverHeads.from_pretrained(heads, dtype=model.dtype).to(device)
    return model, AutoTokenizer.from_pretrained(target, **code), assistant


def _prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise ValueError("PROMPT and `--file` exclude each other: pass one of them.")
    if file is not None:
        return file.read_text(encoding="utf-8")
    if prompt is None and sys.stdin.isatty():
        raise ValueError("there is no prompt: pass a text, `--file`, or something on standard input.")
    return sys.stdin.read() if prompt is None else prompt


def _settings(tokenizer: Any, heads: Any, temperature: float, seed: int | None, nodes: int | None) -> dict[str, Any]:
    """Keywords for `generate`; the seed is set."""
    from transformers import set_seed

    if seed is not None:
        set_seed(seed)
    settings: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        settings["temperature"] = temperature
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    if pad is not None:
        settings["pad_token_id"] = pad
    if nodes is not None:
        if heads is None:
            raise ValueError(f"`--num-assistant-tokens {nodes}` is of no use without heads: pass `--heads` too.")
        settings["num_assistant_tokens"] = nodes
    return settings


def main() -> None:
    try:
        app()
    except KeyboardInterrupt:
        typer.echo("Interrupted.", err=True)
        sys.exit(130)
    except (ValueError, OSError, ImportError) as error:
        typer.secho(f"hf-clover: {' '.join(str(error).split())}", err=True, fg="red")
        sys.exit(2)


if __name__ == "__main__":
    main()
