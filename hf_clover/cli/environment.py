"""What to put into a report of a problem: `env`."""

import json
from typing import Annotated

import typer


def env(as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False) -> None:
    """Print versions, devices and whether generate's hook is in place, to be pasted into an issue.

    Nothing in it tells who or where you are.

    Example: hf-clover env
    """
    from ..measure.environment import as_text, environment

    report = environment()
    typer.echo(json.dumps(report, indent=2) if as_json else as_text(report))
