"""`hf-efficient-attn demo`."""

import pathlib
from typing import Annotated, Any

import typer

from hf_efficient_attn.cli.benchmark import Report
from hf_efficient_attn.cli.common import (
    Device,
    Json,
    LiveTable,
    Minutes,
    Settings,
    Threads,
    command,
    complete_methods,
    parse_device,
    parse_lengths,
    parse_methods,
    print_json,
    until_interrupted,
)
from hf_efficient_attn.errors import UnsupportedAttentionError

_LENGTHS, _FULL_LENGTHS = "512,2048,4096", "512,2048,8192"


@command("demo --method nearfar --method kdeformer:near_field=window --length 1024,8192 --plot demo.png")
def demo(
    method: Annotated[
        list[str],
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="NAME or NAME:key=value; repeated or separated by commas. [default: auto, nearfar]",
            autocompletion=complete_methods,
        ),
    ] = [],  # noqa: B006 (typer copies it)
    length: Annotated[
        list[str],
        typer.Option(
            metavar="N",
            show_default=False,
            help=f"Numbers of tokens, 512 to 16384; repeated or separated by commas. [default: {_LENGTHS}; with "
            f"--full {_FULL_LENGTHS}]",
        ),
    ] = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    full: Annotated[
        bool, typer.Option("--full", help="Longer texts, and a search in all topics with 2,048 tokens of each.")
    ] = False,
    plot: Annotated[
        pathlib.Path | None, typer.Option(metavar="FILE", help="Draw speed-up and error against length.")
    ] = None,
    minutes: Minutes = None,
    threads: Threads = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Compare methods with exact attention on a pretrained MiniLM and Python's documentation, without network access.

    It is the `benchmark` command for this model, with a search in addition.
    """
    from hf_efficient_attn.evaluation import demo
    from hf_efficient_attn.evaluation.charts import draw
    from hf_efficient_attn.evaluation.defaults import default_methods
    from hf_efficient_attn.evaluation.timing import use_threads
    from hf_efficient_attn.io.writing import check_picture

    methods, lengths = parse_methods(method or default_methods(purpose="demo"), setting), parse_lengths(length)
    if not methods or (length and not lengths):
        raise UnsupportedAttentionError("the demo needs at least one --method and one --length")
    if plot is not None:
        check_picture(plot)
    size = demo.FULL if full else demo.SMALL
    if lengths:
        size = size._replace(lengths=tuple(lengths))
    report = _Report(is_silent=as_json, with_memory=False)
    place, execution = parse_device(device), report.execution(minutes)
    with use_threads(threads):
        result, status = until_interrupted(lambda: demo.run_demo(methods, size, place, execution))
    if plot is not None:
        draw(result, plot)
    if as_json:
        print_json(result)
        raise typer.Exit(status)
    report.conclude(result)
    if not full:
        lengths_too = "" if lengths else f" texts of up to {demo.FULL.lengths[-1]:,} tokens, and"
        typer.echo(
            f"Left out to save time:{lengths_too} a search in all topics with {demo.FULL.searched:,} tokens of each. "
            "Add --full to measure more."
        )
    if plot is not None:
        typer.echo(f"Written: {plot}")
    raise typer.Exit(status)


class _Report(Report):
    """Prints the rows of the search as well."""

    _search: LiveTable | None = None

    def add(self, row: dict[str, Any]) -> None:
        """Print a row of "measurements" or of "search"."""
        if "same_first" not in row:
            return super().add(row)
        if self._search is None:
            self.explain()
            typer.echo(
                f"\nSearch: {row['questions']} questions in {row['topics']} topics of the documentation, in comparison "
                "with exact attention"
            )
            headers = ("attention", "tokens up to", "same best topic", "common topics among the best five")
            width = max(len("sdpa, first 512 tokens"), self.label_width)
            self._search = LiveTable(headers, [width, 0, 0, 0], left=["attention"])
        same = f"{row['same_first']} of {row['questions']}"
        self._search.add((row["attention"], row["tokens"], same, f"{row['shared_five']:.2f} of 5"))

    def conclude(self, result: dict[str, Any]) -> None:
        """Say what follows from the tables."""
        super().conclude(result)
        typer.echo(
            "MiniLM was trained with 512 positions. The figures say how well a method replaces exact attention at the "
            "same length, not how good the embedding of a long text is."
        )
