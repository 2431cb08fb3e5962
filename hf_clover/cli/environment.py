"""What to put into a report of a problem, and whether drafts are accepted here: `env`."""

import json
from typing import Annotated

import typer


def env(as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False) -> None:
    """Print versions and devices, and try whether drafts are accepted, to be pasted into an issue.

    Trees, chains, a batch and a static cache are tried on made-up models, in about a second. The exit code is 1 where
    one of them fails. Nothing that is printed tells who or where you are.

    Example: hf-clover env
    """
    from ..measure.environment import as_text, environment

    report = environment()
    typer.echo(json.dumps(report, indent=2) if as_json else as_text(report))
    if not all(said.startswith("yes") for said in report["drafts"].values()):
        raise typer.Exit(1)
