"""`hf-efficient-attn analyze`."""

import json
import pathlib
import statistics
from typing import Annotated, Any

import typer

from hf_efficient_attn.cli.common import (
    DEFAULT_METHODS,
    AllowPickle,
    Force,
    Json,
    Settings,
    Source,
    Threads,
    command,
    complete_methods,
    parse_lengths,
    parse_methods,
    print_json,
    table,
)
from hf_efficient_attn.errors import UnsupportedAttentionError


@command("analyze bert-base-uncased --data book.txt --budgets 64,128,256 --max-error 0.15 --calibrate 0.2")
def analyze(
    source: Source,
    data: Annotated[
        pathlib.Path,
        typer.Option(
            metavar="FILE", help='Text (.txt, .jsonl with "text", or gzipped), or a folder or zip file of pictures.'
        ),
    ],
    length: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            show_default=False,
            help="Number of tokens. [default: 512, or the model's maximum if it is smaller; pictures have the size "
            "that the model was trained with]",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(metavar="N", min=1, help="Number of texts or pictures.")] = 4,
    methods: Annotated[
        list[str],
        typer.Option(
            metavar="NAME",
            show_default=False,
            help=f"NAME or NAME:key=value; repeated or separated by commas. [default: variants of {DEFAULT_METHODS}]",
            autocompletion=complete_methods,
        ),
    ] = [],  # noqa: B006 (typer copies it)
    setting: Settings = [],  # noqa: B006
    budgets: Annotated[
        list[str], typer.Option(metavar="N", show_default=False, help="Costs in columns. [default: 64,128,256]")
    ] = [],  # noqa: B006
    max_error: Annotated[
        float, typer.Option(metavar="X", help="Layers with a larger error at the largest budget should stay exact.")
    ] = 0.1,
    calibrate: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Also choose a method and budget for each layer that keeps this error on unseen inputs."
        ),
    ] = None,
    threads: Threads = None,
    output: Annotated[
        pathlib.Path | None, typer.Option(metavar="FOLDER", help="Write analysis.json and analysis.png there.")
    ] = None,
    force: Force = False,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
) -> None:
    """Describe the attention in each layer and head, measure errors there, and recommend layers to convert."""
    from hf_efficient_attn.evaluation.analyze import analyze_checkpoint, draw_maps
    from hf_efficient_attn.evaluation.timing import use_threads
    from hf_efficient_attn.io.writing import check_folder, write_results

    if setting and not methods:
        raise UnsupportedAttentionError("--set needs --methods: name the methods that the hyperparameter is for")
    chosen = parse_methods(methods, setting)
    if output is not None:
        check_folder(output, ("analysis.json", "analysis.png"), force=force)
    with use_threads(threads):
        result = analyze_checkpoint(
            source,
            data,
            length=length,
            rows=rows,
            methods=chosen or None,
            budgets=parse_lengths(budgets) or None,
            max_error=max_error,
            calibrate_to=calibrate,
            allow_pickle=allow_pickle,
        )
    written = [] if output is None else write_results(result, output, "analysis", draw_maps)
    if as_json:
        return print_json(result)
    _show(result)
    for path in written:
        typer.echo(f"Written: {path}")


def _show(result: dict[str, Any]) -> None:
    labels, budgets = list(result["layers"][0]["errors"]), [str(budget) for budget in result["budgets"]]
    rows = []
    for entry in result["layers"]:
        properties = [entry["stable_rank"], entry["head_to_tail"]]
        cells = ["" if heads is None else f"{statistics.fmean(heads):.1f} ({max(heads):.1f})" for heads in properties]
        for label in labels:
            errors = [statistics.fmean(entry["errors"][label][budget]) for budget in budgets]
            cells.append("  ".join(f"{error:.3f}" for error in errors))
        rows.append((entry["name"] if entry["layer"] is None else entry["layer"], *cells))
    typer.echo(table(["layer", "stable rank", "tail over head", *labels], rows))
    typer.echo(
        "\n"
        f"{result['data']['rows']} inputs of {result['tokens']} tokens of {result['data']['name']}. Means over inputs "
        "and heads, in parentheses the\nlargest value of a head; --json and --output give the values of every head.\n"
        "stable rank: of the attention matrix. tail over head: the sum of all but the n largest entries of the n x n\n"
        "kernel matrix, divided by the sum of the n largest. Methods: relative operator norm of the output's error at\n"
        f"budgets of {', '.join(budgets)} columns.\n"
    )
    for note in result["notes"]:
        typer.echo(note)
    largest, limit = budgets[-1], result["max_error"]
    for label, exact in result["exact_layers"].items():
        layers = ", ".join(map(str, exact)) or "none"
        typer.echo(f"Layers that should stay exact with {label} (error above {limit} at {largest} columns): {layers}")
    if result["recommended"] is None:
        typer.echo("No method keeps this error in any layer: keep the model exact, or allow a larger budget or error.")
    else:
        typer.echo(f"\n{result['recommended']['attention']} can be used in the most layers:\n    {result['command']}")
    if result["calibrated"] is not None:
        typer.echo("\nThe cheapest choice for each layer, for efficient_attention= or convert --config:")
        typer.echo(json.dumps(result["calibrated"], indent=2))
