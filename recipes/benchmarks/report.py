"""What the benchmarks share: options, and what they write: CSV, pictures, and the verdict on goals."""

import csv
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import typer

from hf_efficient_attn.cli import table
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.io.writing import check_picture, check_writable, replacing

Check = Annotated[bool, typer.Option("--check", help="Compare with the goals; exit status 1 when one is missed.")]
Csv = Annotated[pathlib.Path | None, typer.Option(metavar="FILE", help="Write the figures.")]
Plot = Annotated[pathlib.Path | None, typer.Option(metavar="FILE", help="Draw the figures.")]
Threads = Annotated[int, typer.Option(metavar="N", min=1, help="Threads of PyTorch.")]
Rounds = Annotated[int, typer.Option(metavar="N", min=1, help="Paired measurements of each.")]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Of the inputs.")]


class Verdict(NamedTuple):
    """A measured figure beside its goal."""

    what: str
    figure: float
    goal: float
    at_least: bool

    @property
    def reached(self) -> bool:
        return self.figure >= self.goal if self.at_least else self.figure <= self.goal


def check_outputs(csv_path: pathlib.Path | None, plot: pathlib.Path | None) -> None:
    """That the files asked for can be written, before the work rather than after it."""
    if plot is not None:
        check_picture(plot)
    if csv_path is not None:
        check_writable(csv_path)


def write(
    rows: Sequence[Mapping[str, Any]],
    csv_path: pathlib.Path | None,
    plot: pathlib.Path | None = None,
    draw: Callable[[Sequence[Mapping[str, Any]]], Any] | None = None,
) -> None:
    """The files that were asked for: the rows as CSV, and the figure that `draw` makes of them."""
    if csv_path is not None:
        write_csv(csv_path, rows)
    if plot is not None:
        with replacing(plot) as draft:
            draw(rows).savefig(draft, dpi=150)


def bars(axes, names: Sequence[str], pairs: Mapping[str, Sequence[float | None]], title: str) -> None:
    """Two bars for every name, from top to bottom; `pairs`: what the bars are -> their lengths, None for no bar."""
    for (label, lengths), color, shift in zip(pairs.items(), ("0.6", "C0"), (-0.2, 0.2), strict=True):
        place = [i + shift for i in range(len(names))]
        axes.barh(place, [length or 0.0 for length in lengths], 0.4, color=color, label=label)
    axes.set_yticks(range(len(names)), names, fontsize="x-small")
    axes.invert_yaxis()
    axes.axvline(1.0, color="0.3", linewidth=1)
    axes.set_title(title)
    axes.grid(alpha=0.3, axis="x")
    axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def write_csv(path: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows of one set of columns, as CSV."""
    with replacing(path) as draft, draft.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def conclude(verdicts: Sequence[Verdict]) -> None:
    """Print every goal with its figure; exit status 1 when one is missed."""
    if not verdicts:
        raise UnsupportedAttentionError("--check: nothing that was measured has a goal; leave out some of the options")
    rows = [
        (v.what, f"{v.figure:.3g}", f"at {'least' if v.at_least else 'most'} {v.goal:g}", "yes" if v.reached else "NO")
        for v in verdicts
    ]
    typer.echo("\n" + table(("goal", "measured", "wanted", "reached"), rows))
    if not all(v.reached for v in verdicts):
        raise typer.Exit(1)
