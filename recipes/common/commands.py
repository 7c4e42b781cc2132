"""Shared parts of the measuring commands: options, tables and CSV files."""

import csv
import os
import pathlib
import string
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from hf_efficient_attn.cli import table
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.timing import UNSTEADY
from hf_efficient_attn.io.writing import check_picture, check_writable, replacing

# The methods of the benchmarks on real models, with both near fields and the sampling of the papers.
METHODS = (
    "nearfar", "kdeformer", "kdeformer:near_field=window", "kdeformer:columns=all:draw=independent", "hyperattention",
    "hyperattention:near_field=window", "hyperattention:columns=all:draw=independent", "longformer", "linear",
    "performer", "nystromformer", "wildcat", "thinformer", "linformer", "reformer", "scatterbrain", "eva",
    "flurka_linear", "flurka_performer", "flurka_eva",
)  # fmt: skip

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PARSER = string.Formatter()
Row = Mapping[str, Any]  # one line of a table or CSV file


def checked(check: Callable[[pathlib.Path], Any]) -> Callable[[pathlib.Path | None], pathlib.Path | None]:
    """The callback of an option with a path that `check` may refuse, before anything is measured."""

    def callback(path: pathlib.Path | None) -> pathlib.Path | None:
        if path is not None:
            check(path)
        return path

    return callback


_METAVARS = {int: "N", float: "X", list[str]: "NAME", int | None: "N", float | None: "X"}


def option(kind: Any, help: str, *names: str, **settings: Any) -> Any:
    """The type of an option. Numbers are shown as N and X, and the default of a list is part of its help text."""
    usual: dict[str, Any] = {"metavar": _METAVARS[kind]} if kind in _METAVARS else {}
    usual |= {"show_default": False} if kind == list[str] else {}
    return Annotated[kind, typer.Option(*names, help=help, **usual | settings)]


Csv = option(pathlib.Path | None, "Write the results to a CSV file.", metavar="FILE", callback=checked(check_writable))
Data = option(pathlib.Path | None, "Data folder. [default: $HEA_DATA or ../shared/data]", metavar="FOLDER")
Threads = option(int | None, "Number of PyTorch threads.", min=1)
Rounds = option(int, "Number of paired measurements.", min=1)
Seed = option(int, "Random seed.", min=0)
Memory = option(bool, "Measure peak memory.", "--memory/--no-memory")
NumHeads = option(int, "Number of heads.", "--heads", min=1)
HeadDim = option(int, "Dimension of a head.", "--width", min=1)
Picture = option(pathlib.Path, "Picture; the ending is its format.", metavar="FILE", callback=checked(check_picture))


def methods_option(default: str, *names: str) -> Any:
    """The type of an option that lists methods; `default` describes the default in the help text."""
    return option(list[str], f"NAME or NAME:key=value, repeated or separated by commas. [default: {default}]", *names)


def numbers_option(what: str, default: str, *names: str) -> Any:
    """The type of an option that lists numbers; `what` and `default` describe them in the help text."""
    return option(list[str], f"{what}, repeated or separated by commas. [default: {default}]", *names, metavar="N")


def new_app(**options: Any) -> typer.Typer:
    """A typer application with the settings that all recipes use."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, **options)


def data_folder(given: pathlib.Path | None) -> pathlib.Path:
    """The given folder, or $HEA_DATA, or ../shared/data. Whether a file exists is checked when it is read."""
    return given or pathlib.Path(os.environ.get("HEA_DATA", "../shared/data"))


def existing(path: pathlib.Path, what: str) -> pathlib.Path:
    """Return the path if it exists; otherwise say how to give the data folder."""
    if not path.exists():
        raise UnsupportedAttentionError(f"no {what} at {path}: give the data folder with --data or HEA_DATA")
    return path


def check_known(option: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise UnsupportedAttentionError if a name that is given with an option is not one of the known ones."""
    for name in given:
        if name not in known:
            raise UnsupportedAttentionError(f"{option} {name!r} is not one of {', '.join(known)}")


def write(rows: Sequence[Row], path: pathlib.Path | None) -> None:
    """Write rows with the same keys as CSV if a file is requested."""
    if path is not None:
        with replacing(path) as draft, draft.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


def save(figure: "Figure", path: pathlib.Path) -> None:
    """Write a picture."""
    with replacing(path) as draft:
        figure.savefig(draft, dpi=200)
    typer.echo(f"Written: {path}")


def table_of(rows: Iterable[Row], columns: Mapping[str, str]) -> str:
    """A table of rows.

    `columns` has for each header a template, such as "{seconds:.3g} s", that `str.format_map` fills from a row. The
    cell is empty if a value of the template is missing or None.
    """
    needed = {header: [name for _, name, _, _ in _PARSER.parse(text) if name] for header, text in columns.items()}
    cells = [
        ["" if any(row.get(n) is None for n in needed[h]) else text.format_map(row) for h, text in columns.items()]
        for row in rows
    ]
    return table(list(columns), cells)


def report(
    rows: Sequence[dict[str, Any]],
    columns: Mapping[str, str],
    note: str = "",
    *,
    csv: pathlib.Path | None = None,
) -> None:
    """Write the rows as CSV, and print their table and a note.

    All rows have the same keys. "unsteady" tells that times differ too much between rounds. `columns` has headers and
    templates, as for `table_of`; "ms" in place of "seconds" in a key stands for the time in milliseconds.
    """
    write(rows, csv)
    times = [{k.replace("seconds", "ms"): 1000 * v for k, v in row.items() if "seconds" in k and v} for row in rows]
    typer.echo(table_of([{**row, **time} for row, time in zip(rows, times, strict=True)], columns))
    if note:
        typer.echo(f"\n{note}")
    if any(row.get("unsteady") for row in rows):
        typer.echo(UNSTEADY)


def rounds_note(sizes: object, rounds: int) -> str:
    """How times were measured."""
    return f"{sizes}; medians of {rounds} rounds; torch {torch.__version__}"
