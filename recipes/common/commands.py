"""Shared parts of the measuring commands: options, CSV files, pictures, and the comparison with goals."""

import csv
import os
import pathlib
import string
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from hf_efficient_attn.cli import table
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.io.writing import check_picture, check_writable, replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The methods of the benchmarks on real models, with both near fields and the sampling of the papers.
METHODS = (
    "nearfar", "kdeformer", "kdeformer:near_field=window", "kdeformer:columns=all:draw=independent", "hyperattention",
    "hyperattention:near_field=window", "hyperattention:columns=all:draw=independent", "longformer", "linear",
    "performer", "nystromformer", "wildcat", "thinformer", "linformer", "reformer", "scatterbrain", "eva",
    "flurka_linear", "flurka_performer", "flurka_eva",
)  # fmt: skip

_PARSER = string.Formatter()
Row = Mapping[str, Any]  # one line of a table or CSV file

Check = Annotated[bool, typer.Option("--check", help="Compare with the goals; exit with status 1 if one is missed.")]
Csv = Annotated[pathlib.Path | None, typer.Option(metavar="FILE", help="Write the results to this CSV file.")]
Plot = Annotated[pathlib.Path | None, typer.Option(metavar="FILE", help="Plot the results to this file.")]
Data = Annotated[
    pathlib.Path | None, typer.Option(metavar="FOLDER", help="Data folder. [default: $HEA_DATA or ../shared/data]")
]
Threads = Annotated[int, typer.Option(metavar="N", min=1, help="Number of PyTorch threads.")]
AnyThreads = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Number of PyTorch threads. [default: PyTorch's own]")
]
Rounds = Annotated[int, typer.Option(metavar="N", min=1, help="Number of paired measurements.")]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Random seed.")]
Memory = Annotated[bool, typer.Option("--memory/--no-memory", help="Measure peak memory.")]
Scale = Annotated[
    float | None, typer.Option(metavar="X", help="Factor of the attention scores. [default: 1 / sqrt(head dimension)]")
]
NumHeads = Annotated[int, typer.Option("--heads", metavar="N", min=1, help="Number of heads.")]
HeadDim = Annotated[int, typer.Option("--width", metavar="N", min=1, help="Dimension of a head.")]


_METAVARS = {int: "N", float: "X", list[str]: "NAME", int | None: "N", float | None: "X"}


def option(kind: Any, help: str, *names: str, **settings: Any) -> Any:
    """The type of an option. Numbers are shown as N and X, and the default of a list is part of its help text."""
    usual: dict[str, Any] = {"metavar": _METAVARS[kind]} if kind in _METAVARS else {}
    usual |= {"show_default": False} if kind == list[str] else {}
    return Annotated[kind, typer.Option(*names, help=help, **usual | settings)]


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


class Verdict(NamedTuple):
    """A measured value next to its goal, which is a lower bound if `at_least` and an upper bound otherwise."""

    what: str
    figure: float
    goal: float
    at_least: bool

    @property
    def reached(self) -> bool:
        """Whether the goal is reached."""
        return self.figure >= self.goal if self.at_least else self.figure <= self.goal


def measurements_of(picture: pathlib.Path) -> pathlib.Path:
    """The .json file beside a picture. Both are checked to be writable."""
    check_picture(picture)
    if picture.suffix == ".json":
        raise UnsupportedAttentionError("--output names the picture, such as picture.png")
    return picture.with_suffix(".json")


def compared(
    rows: Iterable[Row], what: str, figure: str, goal_of: Callable[[Row], float | None], at_least: bool = True
) -> list[Verdict]:
    """The figure of every row that has a goal next to it; `what` is a template for `str.format_map`."""
    goals = [(row, goal_of(row)) for row in rows]
    return [Verdict(what.format_map(row), row[figure], goal, at_least) for row, goal in goals if goal is not None]


def check_outputs(csv_path: pathlib.Path | None, plot: pathlib.Path | None) -> None:
    """Refuse output files that cannot be written, before the measurement starts."""
    if plot is not None:
        check_picture(plot)
    if csv_path is not None:
        check_writable(csv_path)


def write(
    rows: Sequence[Row],
    csv_path: pathlib.Path | None,
    plot: pathlib.Path | None = None,
    draw: Callable[[Sequence[Row]], "Figure"] | None = None,
) -> None:
    """Write the requested files: the rows as CSV, and the figure that `draw` makes of them."""
    if csv_path is not None:
        write_csv(csv_path, rows)
    if plot is not None and draw is not None:
        with replacing(plot) as draft:
            draw(rows).savefig(draft, dpi=150)


def show(rows: Iterable[Row], columns: Mapping[str, str]) -> None:
    """Print a table of rows.

    `columns` has for each header a template, such as "{seconds:.3g} s", that `str.format_map` fills from a row. The
    cell is empty if a value of the template is None.
    """
    needed = {header: [name for _, name, _, _ in _PARSER.parse(text) if name] for header, text in columns.items()}
    cells = [
        ["" if any(row[name] is None for name in needed[h]) else text.format_map(row) for h, text in columns.items()]
        for row in rows
    ]
    typer.echo(table(list(columns), cells))


def write_csv(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Write rows with the same keys as CSV."""
    with replacing(path) as draft, draft.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def bars(axes: "Axes", names: Sequence[str], pairs: Mapping[str, Sequence[float | None]], title: str) -> None:
    """Draw two horizontal bars for every name. `pairs` maps a label to the bar lengths; None draws no bar."""
    for (label, lengths), color, shift in zip(pairs.items(), ("0.6", "C0"), (-0.2, 0.2), strict=True):
        positions = [i + shift for i in range(len(names))]
        axes.barh(positions, [length or 0.0 for length in lengths], 0.4, color=color, label=label)
    axes.set_yticks(range(len(names)), names, fontsize="x-small")
    axes.invert_yaxis()
    axes.axvline(1.0, color="0.3", linewidth=1)
    axes.set_title(title)
    axes.grid(alpha=0.3, axis="x")
    axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def curves(axes: "Axes", rows: Sequence[Row], key: str, name: str) -> None:
    """Plot the error, with its deviation over seeds, against row[key], one line for each method.

    The axis of budgets is logarithmic.
    """
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        points = ([row[column] for row in own] for column in (key, "error", "deviation"))
        axes.errorbar(*points, marker="o", label=method)
    if key == "budget":
        ticks = sorted({row["budget"] for row in rows})
        axes.set_xscale("log")
        label_ticks(axes, ticks)
    axes.set(xlabel=name, ylabel="relative error (operator norm)")


def lines(axes: "Axes", rows: Sequence[Row], x: str, y: str, label: str) -> None:
    """Plot row[y] against row[x], one line for each row[label]; rows whose value is None are left out."""
    for name in dict.fromkeys(row[label] for row in rows):
        own = [row for row in rows if row[label] == name and row[y] is not None]
        axes.plot([row[x] for row in own], [row[y] for row in own], marker="o", label=name)


def label_ticks(axes: "Axes", ticks: Sequence[int]) -> None:
    """Label a logarithmic x axis at these values only."""
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)


def conclude(verdicts: Sequence[Verdict]) -> None:
    """Print every goal with its measured value; exit with status 1 if one is missed."""
    if not verdicts:
        raise UnsupportedAttentionError("--check: nothing that was measured has a goal; leave out some of the options")
    rows = [
        (v.what, f"{v.figure:.3g}", f"at {'least' if v.at_least else 'most'} {v.goal:g}", "yes" if v.reached else "NO")
        for v in verdicts
    ]
    typer.echo("\n" + table(("goal", "measured", "wanted", "reached"), rows))
    if not all(v.reached for v in verdicts):
        raise typer.Exit(1)
