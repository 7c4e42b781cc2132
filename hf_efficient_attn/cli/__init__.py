"""The command hf-efficient-attn: `methods`, `info NAME`, `demo`, `convert SOURCE`, `push FOLDER ID`.

Exit status: 0 done, 1 failed while working (a file that could not be written), 2 asked for something that does not
exist, 130 interrupted. Errors are one line on stderr.
"""

from collections.abc import Sequence
from typing import Annotated

import typer

import hf_efficient_attn as hea
from hf_efficient_attn.cli import analyze, benchmark, convert, demo, methods, push
from hf_efficient_attn.cli.common import (
    Json,
    Settings,
    app,
    label,
    main_of,
    parse_lengths,
    parse_methods,
    run,
    split_list,
    table,
)
from hf_efficient_attn.integration.layers import parse_layers


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command; ends the process with its exit status."""
    main_of(app, "hf-efficient-attn", arguments)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(hea.__version__)
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
