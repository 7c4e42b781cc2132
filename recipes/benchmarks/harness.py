"""What the benchmarks share: reports as tables, CSV files and verdicts, and pictures with measurements beside them."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from hf_efficient_attn.evaluation.timing import UNSTEADY
from hf_efficient_attn.io.json import read_json_object, write_json
from hf_efficient_attn.io.writing import check_writable, replacing
from recipes.common.commands import Row, Verdict, conclude, measurements_of, option, show, write_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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

    Args:
        rows: the results, all with the same keys. "unsteady" tells that times differ too much between rounds.
        columns: headers and templates, as for `recipes.common.commands.show`. "ms" in
            place of "seconds" in a key stands for the time in milliseconds.
        note: printed below the table.
        csv: the CSV file.
        verdicts: with --check, returns the figures that have goals.
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


def panels(rows: Sequence[Row], x: str, ys: Mapping[str, str], line: str, xlabel: str, title: str) -> "Figure":
    """Panels side by side that plot row[y] against row[x] with a line for each row[line]; both axes are logarithmic.

    Args:
        rows: the measurements; those without a value of a panel, or with the value 0, are left out there.
        x: key of the horizontal axis.
        ys: the title of each panel by its key.
        line: key of the names of the lines.
        xlabel: label of the horizontal axis.
        title: text below the panels.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 + 4 * len(ys), 4), layout="constrained", facecolor="white")
    for axes, (y, what) in zip(figure.subplots(1, len(ys), squeeze=False)[0], ys.items(), strict=True):
        # Okabe and Ito's colors, which people with color blindness can tell apart; markers tell the lines apart too.
        colors = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "0.6")
        styles = zip(cycle(colors), cycle("osD^vP*X<>d"), strict=False)
        for name, (color, marker) in zip(dict.fromkeys(row[line] for row in rows), styles, strict=False):
            points = [(row[x], row[y]) for row in rows if row[line] == name and row[y]]
            axes.plot([a for a, _ in points], [b for _, b in points], color=color, marker=marker, label=name)
        axes.set(xscale="log", yscale="log", xlabel=xlabel, title=what)
        axes.grid(alpha=0.25, which="both")
        axes.spines[["top", "right"]].set_visible(False)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:,g}")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=7.5, frameon=False)
    figure.supxlabel(title, fontsize=7.5, color="0.35")
    return figure


def save(
    output: pathlib.Path, draw: Callable[[Any], "Figure"], result: Any = None, dpi: int = 200
) -> tuple[Any, pathlib.Path]:
    """Draw a result, which is also written to a .json file beside the picture; without one, that file is read.

    Returns:
        The result and the path of its file.
    """
    path = measurements_of(output)
    if result is None:
        result = read_json_object(path)
    else:
        with replacing(path) as draft:
            write_json(draft, result)
    with replacing(output) as draft:
        draw(result).savefig(draft, dpi=dpi)
    return result, path
