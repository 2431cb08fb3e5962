"""Facts for a problem report, and a test whether drafts are accepted on this machine: `env`."""

import json
from typing import Annotated

import typer

from ..measure.environment import as_text, environment


def env(as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False) -> None:
    """Print versions and devices, and test whether drafts are accepted. Paste the output into an issue.

    Trees, chains, a batch and a static cache are tested on made-up models, in about a second. The exit code is 1 if
    one of them fails. The output does not tell who or where you are.

    Example: hf-clover env
    """
    report = environment()
    typer.echo(json.dumps(report, indent=2) if as_json else as_text(report))
    if not all(said.startswith("yes") for said in report["drafts"].values()):
        raise typer.Exit(1)
