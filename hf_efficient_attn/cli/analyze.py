"""`hf-efficient-attn analyze`."""

import functools
import json
import pathlib
import shlex
import statistics
import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_efficient_attn.cli import common
from hf_efficient_attn.cli.benchmark import Data
from hf_efficient_attn.errors import UnsupportedAttentionError

if TYPE_CHECKING:
    from hf_efficient_attn.evaluation.progress import Execution

_length = (
    "Number of tokens; pictures are resized. Use the length of your inputs, because errors grow with it. [default: "
    "2048, or the whole text if it is shorter]"
)
_methods = f"NAME or NAME:key=value; repeated or separated by commas. [default: variants of {common.DEFAULT_METHODS}]"
_budgets = "Costs in columns. [default: 64,128,256,512]"
_max_error = (
    "Recommend one method and budget for all layers whose error stays below this on unseen inputs. [default: 0.2]"
)
_output = "Write analysis.json and analysis.png there."
_calibrate = (
    "Instead of --max-error: recommend the fastest method and budget for each layer whose error stays below this on "
    "unseen inputs."
)


@common.command("analyze bert-base-uncased --data book.txt --calibrate 0.2 --output inside")
def analyze(
    context: typer.Context,
    source: common.Source,
    data: Data,
    length: Annotated[int | None, typer.Option(metavar="N", min=2, show_default=False, help=_length)] = None,
    rows: Annotated[int, typer.Option(metavar="N", min=1, help="Number of texts or pictures.")] = 4,
    methods: Annotated[list[str], common.names_option(_methods)] = [],  # noqa: B006 (typer copies it)
    setting: common.Settings = [],  # noqa: B006
    budgets: Annotated[list[str], typer.Option(metavar="N", show_default=False, help=_budgets)] = [],  # noqa: B006
    max_error: Annotated[float | None, typer.Option(metavar="X", show_default=False, help=_max_error)] = None,
    calibrate: Annotated[float | None, typer.Option(metavar="X", help=_calibrate)] = None,
    threads: common.Threads = None,
    device: common.Device = None,
    minutes: common.Minutes = None,
    output: Annotated[pathlib.Path | None, typer.Option(metavar="FOLDER", help=_output)] = None,
    force: common.Force = False,
    allow_pickle: common.AllowPickle = False,
    as_json: common.Json = False,
) -> None:
    """Describe the attention in each layer and head, measure errors there, and recommend layers to convert.

    Ctrl-C ends the measurement: the layers that are complete are printed and written, and the exit status is 130.
    """
    if max_error is not None and calibrate is not None and max_error != calibrate:
        raise UnsupportedAttentionError(
            f"--max-error {max_error} and --calibrate {calibrate} are two limits, and there is one recommendation: "
            "give --calibrate for a method and budget per layer, or --max-error for one method and budget"
        )
    chosen = list(common.parse_methods(methods, setting).values())
    from hf_efficient_attn.evaluation.analyze import analyze_checkpoint
    from hf_efficient_attn.evaluation.pictures import draw_analysis
    from hf_efficient_attn.io.writing import check_folder, write_results

    if output is not None:
        check_folder(output, ("analysis.json", "analysis.png"), force=force)
    limit = next((limit for limit in (calibrate, max_error) if limit is not None), 0.2)
    execution = _execution(minutes, is_silent=as_json)  # JSON is for programs: nothing else is printed then
    work = functools.partial(
        analyze_checkpoint, source, data, length=length, rows=rows, device=common.parse_device(device),
        allow_pickle=allow_pickle, methods=chosen or None, budgets=common.parse_lengths(budgets) or None,
        max_error=limit, per_layer=calibrate is not None, execution=execution,
    )  # fmt: skip
    result, status = common.until_interrupted(work, threads)
    options = [*["--allow-pickle"] * allow_pickle, *(f"--import={path}" for path in context.params["own_files"])]

    def with_command(config: pathlib.Path | None) -> dict[str, Any]:
        return {**result, "command": _apply_command(source, result, config, options)}

    written = [] if output is None else write_results(with_command, output, "analysis", draw_analysis, force=force)
    result = with_command(written[0] if written else None)
    if as_json:
        common.print_json(result)
    else:
        typer.echo("\n".join([*_report(result), *(f"Written: {path}" for path in written)]))
    raise typer.Exit(status)


def _execution(minutes: float | None, *, is_silent: bool) -> "Execution":
    """How the analysis is carried out: it prints a heading, and a table whose rows appear as they are complete."""
    from hf_efficient_attn.evaluation.pictures import title_of
    from hf_efficient_attn.evaluation.progress import Execution
    from hf_efficient_attn.evaluation.timing import describe

    if is_silent:
        return Execution(minutes)
    tables: list[common.LiveTable] = []  # one, made with its first row

    def begin(about: dict[str, Any]) -> None:
        typer.echo(f"{title_of(about)}\n{describe(about['machine'])}\n")

    def add(entry: dict[str, Any]) -> None:
        cells = [_mean(entry["stable_rank"], 1), _mean(entry["head_to_tail"], 1)]
        cells += [" ".join(_mean(heads, 2) or "-" for heads in sizes.values()) for sizes in entry["errors"].values()]
        if not tables:
            titles = ["layer", "stable rank", "tail/head", *entry["errors"]]
            widths = [5 * len(sizes) - 1 for sizes in entry["errors"].values()]
            tables.append(common.LiveTable(titles, [5, 11, 9, *widths], left=["layer"]))
        tables[0].add([entry["name"] if entry["layer"] is None else entry["layer"], *cells])

    return Execution(minutes, add, begin)


def _apply_command(source: str, result: dict[str, Any], config: pathlib.Path | None, options: list[str]) -> str | None:
    """The command line, with `options`, that applies a recommendation, quoted for a shell; None if there is none.

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
    return before + shlex.join(["hf-efficient-attn", "convert", source, *words, *options, "-o", name])


def _mean(heads: list[float] | None, digits: int) -> str:
    return "" if heads is None else f"{statistics.fmean(heads):.{digits}f}"


def _short(error: float) -> str:
    """An error with two decimal places, or two digits if it is small, and without a zero before the point."""
    return (f"{error:.2f}" if error >= 0.1 else f"{error:.2g}").removeprefix("0") or "0"


def _report(result: dict[str, Any]) -> list[str]:
    """What follows the table: what it contains, the recommendation, what to expect of it, and the command for it."""
    from hf_efficient_attn.evaluation.calibration import HOW_TO_SAVE
    from hf_efficient_attn.integration.layers import ranges

    about = (
        f"{result['data']['rows']} inputs of {result['tokens']} tokens of {result['data']['name']}; means over inputs "
        "and heads (--json and --output give every head). Methods: relative operator norm of the output's error at "
        f"budgets of {', '.join(map(str, result['budgets']))} columns. Stable rank: of the attention matrix. "
        "Tail/head: the sum of all but the n largest entries of the n x n kernel matrix, divided by the sum of the n "
        "largest. Both are those of the first input, up to 4,096 tokens."
    )
    notes = [*result["notes"]]
    if not result["complete"]:
        parts = [("not measured and stay exact", "left_out"), ("measured in part", "partial")]
        told = [f"Layers that were {what}: {ranges(result[key])}." for what, key in parts if result[key]]
        notes.append(f"Not complete. {' '.join(told)} Give more time, or fewer --rows, --methods or --budgets.")
    wrapped = [line for note in notes for line in textwrap.wrap(note, 100, subsequent_indent="    ")]
    lines = ["", *textwrap.wrap(about, 100), *wrapped, ""]
    limit, found = _short(result["max_error"]), result["recommended"]
    if found is None:
        exact = f"Recommendation: keep the model exact. No method keeps an error of {limit} in any layer."
        return [*lines, f"{exact} Allow a larger error, or give larger --budgets."]
    lines.append(f"Recommendation for errors below {limit} on unseen inputs of up to {found['tokens']} tokens:")
    for one in found["layers"]:
        budget = "as it is" if one["columns"] is None else f"{one['columns']} columns"
        errors = f"error {_short(one['error'])} (unseen: at most {_short(one['bound'])})"
        lines.append(f"    {one['layer']}: {one['attention']}, {budget}, {errors}")
    if found["exact_layers"]:
        lines.append(f"    {ranges(found['exact_layers'])}: exact")
    lines.append(f"Expected: mean error {_short(found['error'])} in the converted layers.")
    if found["output_error"] is not None:
        lines.append(f"The output of the whole model is off by {found['output_error']:.3f} on these inputs.")
    saves = found["saves"] is not False
    if found["speed_up"] is not None:
        speed = f"Measured here: attention is {found['speed_up']:.1f} times as fast as exact attention"
        lines.append(speed + ("." if saves else f": this saves nothing, or too little. {HOW_TO_SAVE}."))
    return [*lines, "To apply it:" if saves else "To apply it all the same:", f"    {result['command']}"]
