"""Commands that make heads and publish them: `train`, `regenerate` and `push`."""

from pathlib import Path
from typing import Annotated

import typer

from ..hub import push as hub
from ..training import require_extra
from .inputs import learning, load
from .options import GgufFile, Learn, Pack


def train(context: typer.Context) -> None:
    """Distil heads from a target. The flags are trl's; see `hf-clover train --help`.

    Example: hf-clover train --config examples/configs/qwen3-0.6b.yaml
    """
    require_extra()
    from ..training.script import main as run

    trainer = run(context.args, prog="hf-clover train")
    if trainer.was_interrupted:
        raise typer.Exit(130)


def regenerate(
    dataset: Annotated[str, typer.Argument(help="Prompts: a dataset of the Hub, a folder of files, or a file.")],
    output_dir: Annotated[Path, typer.Argument(help="Folder for the answers; a second run continues there.")],
    model: Annotated[str, typer.Option(help="The target: an id or a folder, or its name at the endpoint.")],
    gguf_file: GgufFile = None,
    heads: Annotated[str | None, typer.Option(help="Heads that draft (greedy answers stay the same).")] = None,
    learn: Learn = None,
    endpoint: Annotated[str | None, typer.Option(help="A server with OpenAI's interface, for all answers.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="The endpoint's key.")] = None,
    config: Annotated[str | None, typer.Option(help="The dataset's configuration.")] = None,
    split: Annotated[str, typer.Option(help="The dataset's split, or a slice such as train[:1000].")] = "train",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 1024,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 for greedy answers.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed for samples; without heads, none depends on its batch.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per batch; fewer need less memory.")] = 32,
    dtype: Annotated[str, typer.Option(help="The dtype to load the target in.")] = "auto",
    pack: Pack = False,
) -> None:
    """Let the target answer a dataset's prompts. Heads learn best from such text.

    Example: hf-clover regenerate trl-lib/Capybara answers --model Qwen/Qwen3-8B --endpoint http://localhost:8000/v1
    """
    require_extra()
    from accelerate import PartialState
    from datasets import load_dataset

    from ..apps.lines import lines_of
    from ..training import EndpointAnswers, TargetAnswers
    from ..training import regenerate as run
    from ..training.data import source_of

    for flag, given in (("--heads", heads), ("--learn", learn), ("--gguf-file", gguf_file), ("--pack", pack or None)):
        if endpoint is not None and given is not None:
            raise ValueError(f"`{flag}` and `--endpoint` exclude each other: an endpoint answers with its own engine.")
    if learn is not None and (processes := PartialState().num_processes) > 1:
        raise ValueError(
            f"`--learn` is for one process, and these are {processes}: leave out `--learn` or `accelerate launch`."
        )
    prompts = load_dataset(**source_of(dataset), name=config, split=split)
    learner = None
    if endpoint is not None:
        from_endpoint = EndpointAnswers(endpoint, model, api_key, max_tokens=max_new_tokens, temperature=temperature)
        answered = run(prompts, from_endpoint, output_dir)
    else:
        target, tokenizer, assistant = load(model, heads, dtype, gguf_file=gguf_file, pack=pack, learn=learn)
        sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        with learning(learn, assistant, target) as (assistant, learner):
            answers = TargetAnswers(
                target, tokenizer, assistant, batch_size, seed, max_new_tokens=max_new_tokens, **sampling
            )
            answered = run(prompts, answers, output_dir)
    typer.echo(f"{len(answered)} of {len(prompts)} prompts answered in {output_dir}")
    for line in lines_of(learner):
        typer.echo(line)


def push(
    folder: Annotated[Path, typer.Argument(help="Heads, an adapter of heads, or a dataset from regenerate.")],
    repo_id: Annotated[str, typer.Argument(help="The repository on the Hub, such as org/name.")],
    private: Annotated[bool | None, typer.Option(help="Whether a new repository is private.")] = None,
    revision: Annotated[str | None, typer.Option(help="The branch to commit to.")] = None,
    create_pr: Annotated[bool, typer.Option(help="Open a pull request instead of committing.")] = False,
    subfolder: Annotated[str, typer.Option(help="Folder in the repository, for example beside a target.")] = "",
    message: Annotated[str | None, typer.Option("--message", "-m", help="The commit's message.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the files and the card, and push nothing.")] = False,
) -> None:
    """Push a folder to the Hub in one commit, with its model card and the code that loads it.

    A card on the Hub that was written by hand is kept. The folder changes only if the push succeeds.

    Example: hf-clover push runs/my-heads org/my-model-clover --private
    """
    if dry_run:
        files = hub.files_to_push(folder, repo_id, subfolder=subfolder)
        typer.echo(f"Would go to {repo_id}:")
        for path, content in files.items():
            size = len(content) if isinstance(content, bytes) else Path(content).stat().st_size
            typer.echo(f"  {path}  ({size:,} bytes)")
        name, card = next((path, content) for path, content in files.items() if Path(path).name == "README.md")
        text = card.decode() if isinstance(card, bytes) else Path(card).read_text(encoding="utf-8")
        typer.echo(f"\n{name}, the card:\n\n{text}", nl=False)
        return
    commit = hub.push_folder(
        folder,
        repo_id,
        private=private,
        revision=revision,
        create_pr=create_pr,
        subfolder=subfolder,
        commit_message=message,
    )
    typer.echo(commit.pr_url or commit.commit_url)
