"""`hf-efficient-attn analyze`."""

import json
import pathlib
import statistics
from typing import Annotated, Any

import typer

from hf_efficient_attn.cli.common import Json, Settings, app, parse_lengths, parse_methods, print_json, table
from hf_efficient_attn.errors import UnsupportedAttentionError


@app.command(
    epilog="Example: hf-efficient-attn analyze bert-base-uncased --data book.txt --budgets 64,128,256 --max-error 0.15 "
    "--calibrate 0.2"
)
def analyze(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Folder or hub id of a checkpoint.")],
    data: Annotated[
        pathlib.Path,
        typer.Option(
            metavar="FILE", help='Text (.txt, .jsonl with "text", gzipped too), or a folder or zip file of pictures.'
        ),
    ],
    length: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=2, show_default=False,
            help="Tokens of a sequence. [default: 512, or what the model takes; pictures of their usual size]",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(metavar="N", min=1, help="Sequences to look at.")] = 4,
    methods: Annotated[
        list[str],
        typer.Option(
            metavar="NAME", show_default=False,
            help="NAME or NAME:key=value; repeated or with commas. [default: kdeformer with a window, longformer and, "
            "unless causal, nystromformer]",
        ),
    ] = [],  # noqa: B006 (typer copies it)
    setting: Settings = [],  # noqa: B006
    budgets: Annotated[
        list[str], typer.Option(metavar="N", show_default=False, help="Columns. [default: 64,128,256]")
    ] = [],  # noqa: B006
    max_error: Annotated[
        float, typer.Option(metavar="X", help="Layers whose error at the largest budget is above it stay exact.")
    ] = 0.1,
    calibrate: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Also choose a method and budget for each layer that keep this error on unseen texts."
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", min=1, help="Threads of PyTorch.")] = None,
    output: Annotated[
        pathlib.Path | None, typer.Option(metavar="FOLDER", help="Write analysis.json and analysis.png there.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over earlier ones.")] = False,
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="Read weights of a .bin file too.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """What attention is like in each layer and head, what methods lose there, and which layers should stay exact."""
    from hf_efficient_attn.evaluation.analyze import BUDGETS, analyze_checkpoint, draw_maps
    from hf_efficient_attn.io.writing import check_folder, write_results

    if setting and not methods:
        raise UnsupportedAttentionError("--set: name the methods that it is for by --methods")
    chosen = parse_methods(methods, setting)
    if output is not None:
        check_folder(output, ("analysis.json", "analysis.png"), force=force)
    result = analyze_checkpoint(
        source, data, methods=chosen or None, budgets=parse_lengths(budgets) or BUDGETS, length=length, rows=rows,
        max_error=max_error, calibrate_to=calibrate, threads=threads, allow_pickle=allow_pickle,
    )  # fmt: skip
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
        figures = [entry["stable_rank"], entry["head_to_tail"]]
        cells = ["" if heads is None else f"{statistics.fmean(heads):.1f} ({max(heads):.1f})" for heads in figures]
        errors = [[statistics.fmean(entry["errors"][label][budget]) for budget in budgets] for label in labels]
        cells += ["  ".join(f"{error:.3f}" for error in row) for row in errors]
        rows.append((entry["name"] if entry["layer"] is None else entry["layer"], *cells))
    headers = ["layer", "stable rank", "tail over head", *labels]
    typer.echo(table(headers, rows))
    typer.echo(
        "\n"
        f"{result['data']['rows']} rows of {result['tokens']} tokens of {result['data']['name']}. Means over rows and "
        "heads, in brackets the\ngreatest of a head; --json and --output tell every head.\n"
        "stable rank: of the attention matrix. tail over head: of the n x n kernel matrix, the sum of all but the n\n"
        "largest entries over the sum of these. Then for each method the error (relative operator norm of the output)\n"
        f"at budgets of {', '.join(budgets)} columns.\n"
    )
    for note in result["notes"]:
        typer.echo(note)
    largest, limit = budgets[-1], result["max_error"]
    for label, exact in result["exact_layers"].items():
        which = ", ".join(map(str, exact)) or "none"
        typer.echo(f"Layers that should stay exact with {label} (error above {limit} at {largest} columns): {which}")
    if result["recommended"] is None:
        typer.echo("No method keeps that error in any layer: stay exact, or allow a larger budget or error.")
    else:
        typer.echo(f"\nThe most layers are left to {result['recommended']['attention']}:\n    {result['command']}")
    if result["calibrated"] is not None:
        typer.echo("\nFor each layer the cheapest that keeps it, for efficient_attention= or convert --config:")
        typer.echo(json.dumps(result["calibrated"], indent=2))
