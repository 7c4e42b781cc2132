"""The command hf-efficient-attn, whose --help lists its commands.

Exit status: 0 done, 1 an error while working (such as a file that could not be written), 2 a request that is refused,
130 interrupted. Errors are one line on stderr.
"""

from collections.abc import Sequence
from typing import Annotated

import typer

from hf_efficient_attn.cli import analyze, benchmark, convert, crossover, demo, distill, methods, push
from hf_efficient_attn.cli.common import *  # noqa: F403 (what recipes share with the commands)
from hf_efficient_attn.cli.common import app, main_of
from hf_efficient_attn.version import __version__


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and end the process with its exit status."""
    main_of(app, "hf-efficient-attn", arguments)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
