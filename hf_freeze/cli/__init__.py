"""The command line, one file a command.

A command imports what it needs when it runs: `--help` and `--version` must not wait for torch.
"""

from typing import Annotated

import typer

from hf_freeze._version import __version__
from hf_freeze.cli import (
    architectures,
    card,
    compress,
    convert,
    describe,
    diff,
    export,
    inspect,
    laboratory,
    latency,
    merge,
    methods,
    push,
    trim,
)

app = typer.Typer(
    help="Freeze, randomise, factorise, prune, share or replace parts of a Hugging Face transformer.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf-freeze {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the program itself."""


for _command in (
    laboratory.init,
    laboratory.recipes,
    laboratory.run,
    laboratory.search,
    compress.compress,
    laboratory.report,
    inspect.inspect,
    describe.describe,
    diff.diff,
    card.card,
    push.push,
    export.export,
    latency.latency,
    laboratory.score,
    convert.convert,
    merge.merge,
    trim.trim,
    methods.methods,
    architectures.architectures,
):
    app.command()(_command)
