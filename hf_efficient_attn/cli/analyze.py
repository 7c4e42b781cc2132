"""`hf-efficient-attn analyze`."""

import functools
import json
import pathlib
import shlex
import statistics
import textwrap
from collections.abc import Callable
from typing import Annotated, Any

import typer

from hf_efficient_attn.cli.common import (
    DEFAULT_METHODS,
    AllowPickle,
    Device,
    Force,
    Json,
    LiveTable,
    Minutes,
    Settings,
    Source,
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


@command("analyze bert-base-uncased --data book.txt --calibrate 0.2 --output inside")
def analyze(
    source: Source,
    data: Annotated[
        pathlib.Path,
        typer.Option(
            metavar="FILE",
            help='Text (.txt, .jsonl with "text", or gzipped), or a folder or zip file of pictures.',
        ),
    ],
    length: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            show_default=False,
            help="Number of tokens; pictures are resized. Use the length of your inputs, because errors grow with it. "
            "[default: 2048, or the whole text if it is shorter]",
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
        list[str], typer.Option(metavar="N", show_default=False, help="Costs in columns. [default: 64,128,256,512]")
    ] = [],  # noqa: B006
    max_error: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            show_default=False,
            help="Recommend one method and budget for all layers whose error stays below this on unseen inputs. "
            "[default: 0.2]",
        ),
    ] = None,
    calibrate: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Instead of --max-error: recommend the cheapest method and budget for each layer whose error stays "
            "below this on unseen inputs.",
        ),
    ] = None,
    threads: Threads = None,
    device: Device = None,
    minutes: Minutes = None,
    output: Annotated[
        pathlib.Path | None, typer.Option(metavar="FOLDER", help="Write analysis.json and analysis.png there.")
    ] = None,
    force: Force = False,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
) -> None:
    """Describe the attention in each layer and head, measure errors there, and recommend layers to convert.

    Ctrl-C ends the measurement: the layers that are complete are printed and written, and the exit status is 130.
    """
    if setting and not methods:
        raise UnsupportedAttentionError("--set needs --methods: name the methods that the hyperparameter is for")
    if max_error is not None and calibrate is not None and max_error != calibrate:
        raise UnsupportedAttentionError(
            f"--max-error {max_error} and --calibrate {calibrate} are two limits, and there is one recommendation: "
            "give --calibrate for a method and budget per layer, or --max-error for one method and budget"
        )
    limit = next((given for given in (calibrate, max_error) if given is not None), 0.2)
    chosen = list(parse_methods(methods, setting).values())
    from hf_efficient_attn.evaluation.analyze import Source as Checkpoint
    from hf_efficient_attn.evaluation.analyze import analyze_checkpoint
    from hf_efficient_attn.evaluation.pictures import draw_analysis, title_of
    from hf_efficient_attn.evaluation.progress import Execution
    from hf_efficient_attn.evaluation.timing import describe, use_threads
    from hf_efficient_attn.io.writing import check_folder, write_results

    if output is not None:
        check_folder(output, ("analysis.json", "analysis.png"), force=force)
    execution = Execution(minutes)
    if not as_json:  # JSON is for programs: nothing else is printed then
        execution = Execution(
            minutes,
            on_begin=lambda about: typer.echo(f"{title_of(about)}\n{describe(about['machine'])}"),
            on_row=_row_printer(),
        )
    work = functools.partial(
        analyze_checkpoint,
        Checkpoint(source, allow_pickle, parse_device(device)),
        data,
        length=length,
        rows=rows,
        execution=execution,
        methods=chosen or None,
        budgets=parse_lengths(budgets) or None,
        max_error=limit,
        per_layer=calibrate is not None,
    )
    with use_threads(threads):
        result, status = until_interrupted(work)

    def with_command(config: pathlib.Path | None) -> dict[str, Any]:
        return {**result, "command": _apply_command(source, result, config)}

    written = [] if output is None else write_results(with_command, output, "analysis", draw_analysis, force=force)
    result = with_command(written[0] if written else None)
    if as_json:
        print_json(result)
    else:
        typer.echo("\n".join([*_report(result), *(f"Written: {path}" for path in written)]))
    raise typer.Exit(status)


def _apply_command(source: str, result: dict[str, Any], config: pathlib.Path | None) -> str | None:
    """The command line that applies a recommendation, quoted for a shell; None if nothing is recommended.

    Without `config`, the file that the result is written to, the command writes the recommendation into a file first.
    """
    if result["calibrated"] is None:
        return None
    before, words = "", ["--config", "calibrated.json" if config is None else str(config)]
    if config is None:
        before = shlex.join(["printf", "%s", json.dumps(result["calibrated"])]) + " > calibrated.json && "
    if result["max_length"] is not None:
        words += ["--max-length", str(result["max_length"])]
    name = str(result["source"]).rpartition("/")[2].lstrip("-") + "-efficient"
    return before + shlex.join(["hf-efficient-attn", "convert", source, *words, "-o", name])


def _row_printer() -> Callable[[dict[str, Any]], None]:
    """Return a function that prints the row of a layer; the first one comes with the header of the table."""
    tables: list[LiveTable] = []

    def add(entry: dict[str, Any]) -> None:
        cells = [_mean(entry["stable_rank"], 1), _mean(entry["head_to_tail"], 1)]
        cells += [" ".join(_mean(heads, 2) for heads in sizes.values()) for sizes in entry["errors"].values()]
        if not tables:
            typer.echo()
            titles = ["layer", "stable rank", "tail/head", *entry["errors"]]
            tables.append(LiveTable(titles, [5, 11, 9, *map(len, cells[2:])], left=["layer"]))
        tables[0].add([entry["name"] if entry["layer"] is None else entry["layer"], *cells])

    return add


def _mean(heads: list[float] | None, digits: int) -> str:
    return "" if heads is None else f"{statistics.fmean(heads):.{digits}f}"


def _short(error: float) -> str:
    """An error with two digits and without a zero before the point."""
    return f"{error:.2f}".removeprefix("0")


def _report(result: dict[str, Any]) -> list[str]:
    """What follows the table: what it contains, and the recommendation."""
    from hf_efficient_attn.integration.layers import ranges

    rows, budgets = result["data"]["rows"], ", ".join(map(str, result["budgets"]))
    properties = (
        "Stable rank: of the attention matrix. Tail/head: the sum of all but the n largest entries of the n x n kernel "
        "matrix, divided by the sum of the n largest. Both are those of the first input, up to 4,096 tokens."
    )
    about = (
        f"{rows} inputs of {result['tokens']} tokens of {result['data']['name']}; means over inputs and heads (--json "
        f"and --output give every head). Methods: relative operator norm of the output's error at budgets of {budgets} "
        f"columns. {properties}"
    )
    notes = [*result["notes"]]
    if not result["complete"]:
        layers = ranges(result["left_out"])
        notes.append(
            f"Not complete. Layers that were not measured and stay exact: {layers}. Give more time, or fewer --rows, "
            "--methods or --budgets."
        )
    lines = [line for note in notes for line in textwrap.wrap(note, 100, subsequent_indent="    ")]
    return ["", *textwrap.wrap(about, 100), *lines, "", *_recommendation(result)]


def _recommendation(result: dict[str, Any]) -> list[str]:
    """The recommendation, its expected error and saving, and the command for it."""
    from hf_efficient_attn.evaluation.calibration import HOW_TO_SAVE
    from hf_efficient_attn.integration.layers import ranges

    limit, found = _short(result["max_error"]), result["recommended"]
    if found is None:
        return [
            f"Recommendation: keep the model exact. No method keeps an error of {limit} in any layer. Allow a larger "
            "error, or give larger --budgets."
        ]
    lines = [f"Recommendation for errors below {limit} on unseen inputs of up to {found['tokens']} tokens:"]
    lines += [
        f"    {one['layer']}: {one['attention']}, {one['columns']} columns, error {_short(one['error'])} (unseen: at "
        f"most {_short(one['bound'])})"
        for one in found["layers"]
    ]
    if found["exact_layers"]:
        lines.append(f"    {ranges(found['exact_layers'])}: exact")
    lines.append(
        f"Expected: mean error {_short(found['error'])} in the converted layers. Over all layers, attention costs as "
        f"much as {found['columns']:.0f} keys per query instead of {found['keys']:.0f}."
    )
    if found["output_error"] is not None:
        lines.append(f"The output of the whole model is off by {found['output_error']:.3f} on these inputs.")
    saves = found["saves"] is not False
    if found["speed_up"] is not None:
        speed = f"Measured here: attention is {found['speed_up']:.1f} times as fast as exact attention"
        lines.append(speed + ("." if saves else f": this saves nothing, or too little. {HOW_TO_SAVE}."))
    return [*lines, "To apply it:" if saves else "To apply it all the same:", f"    {result['command']}"]
