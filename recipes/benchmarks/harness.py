"""What the benchmarks share: options, and reports as tables, CSV files and verdicts."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch
import typer

from hf_efficient_attn.evaluation.timing import UNSTEADY
from hf_efficient_attn.io.writing import check_writable
from recipes.common.commands import Row, Verdict, conclude, option, show, write_csv


def _writable(path: pathlib.Path | None) -> pathlib.Path | None:
    if path is not None:
        check_writable(path)
    return path


# Options. The file is checked before the measurement starts.
Csv = Annotated[
    pathlib.Path | None, typer.Option(metavar="FILE", help="Write the results to this CSV file.", callback=_writable)
]
Picture = option(pathlib.Path, "The picture; the measurements go to a .json file beside it.", metavar="FILE")
Redraw = option(bool, "Draw the measurements of an earlier run again.", "--redraw")


def report(
    rows: Sequence[dict[str, Any]],
    columns: Mapping[str, str],
    note: str = "",
    *,
    csv: pathlib.Path | None = None,
    verdicts: Callable[[Sequence[Row]], list[Verdict]] | None = None,
) -> None:
    """Write the rows as CSV, print their table and a note, and compare them with the goals.

    All rows have the same keys. "unsteady" tells that times differ too much between rounds. `columns` has headers and
    templates, as for `recipes.common.commands.show`; "ms" in place of "seconds" in a key stands for the time in
    milliseconds. `verdicts` returns the figures that have goals.
    """
    if csv is not None:
        write_csv(csv, rows)
    times = [{k.replace("seconds", "ms"): 1000 * v for k, v in row.items() if "seconds" in k and v} for row in rows]
    show([{**row, **time} for row, time in zip(rows, times, strict=True)], columns)
    if note:
        typer.echo(f"\n{note}")
    if any(row.get("unsteady") for row in rows):
        typer.echo(UNSTEADY)
    if verdicts is not None:
        conclude(verdicts(rows))


def rounds_note(sizes: object, rounds: int) -> str:
    """How times were measured."""
    return f"{sizes}; medians of {rounds} rounds; torch {torch.__version__}"
