"""The command line: `hf-clover COMMAND`.

Contract: each command reads its options and calls a function of the library. For an error that a user can mend (a
wrong argument, a missing file), it prints one line on stderr and ends with exit code 2. After Ctrl-C the exit code is
130. Any other error is a bug and shows its traceback. What needs an extra is imported by the command that needs it.
"""

import sys
from typing import Annotated

import typer

from .. import __version__
from ..apps.lines import print_to_stderr
from .environment import env
from .generating import chat, generate
from .measuring import benchmark, plot
from .options import ManyValues
from .serving import serve
from .training import push, regenerate, train
from .verifying import verify

app = typer.Typer(
    name="hf-clover",
    help="Draft heads for the generate of transformers: the same text, sooner.",
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


app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command(cls=ManyValues)(benchmark)
app.command(cls=ManyValues)(verify)
app.command()(plot)
app.command(context_settings=PASS_THROUGH, add_help_option=False, options_metavar="[--config FILE] [trl's options]")(
    train
)
app.command()(regenerate)
app.command()(push)
app.command()(env)


def main() -> None:
    try:
        app()
    except KeyboardInterrupt:
        typer.echo("Interrupted.", err=True)
        sys.exit(130)
    except (ValueError, OSError, ImportError) as error:
        print_to_stderr(f"hf-clover: {' '.join(str(error).split())}", "red")
        sys.exit(2)
