"""Draw the error of the methods against their speed at several budgets, on a long text of a real model.

    python -m recipes.benchmarks.tradeoff --data DATA --output docs/pictures/tradeoff.png

The inputs are those of MiniLM on a novel (DATA/text/books; windows of 512 tokens are concatenated, as in
`recipes.benchmarks.error`), and a head of every layer becomes a head of one call. The error is |A - E|_op / |E|_op, the
mean over these heads, where E is the output of exact attention in float64. The speed is the time of
`scaled_dot_product_attention` in float32 divided by that of the method, the median over rounds. MiniLM's heads have 32
dimensions. Most models have 64, so the inputs whose time is measured are padded with zeros to 64. The budget of a
method is what it costs in columns (`with_budget`). `auto` has a bound of the error instead. The first point is exact
attention with products in bfloat16. A row is on the frontier if no other is both faster and more accurate.

Duration: about 15 minutes on two idle cores. Expected: exact attention in bfloat16 about twice as fast at an error of
.001, and `nearfar` on the frontier at every budget.
"""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, scaled_dot_product_attention
from tqdm import tqdm

import hf_efficient_attn as hea
from hf_efficient_attn.cli import main_of, parse_lengths, parse_methods
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.timing import describe, paired, processor_name, use_threads
from hf_efficient_attn.methods import MethodConfig
from recipes.common import commands
from recipes.common.inputs import Activation, minilm_activations

if TYPE_CHECKING:
    from matplotlib.figure import Figure

app = commands.new_app()

# Without the papers' own sampling, whose errors are larger at the same cost.
METHODS = ("auto", *(name for name in commands.METHODS if "draw=" not in name))
BUDGETS = (64, 128, 256, 512, 1024)
# The bounds of `auto`, which chooses the budgets itself.
MAX_ERRORS = (0.05, 0.1, 0.2)
_BFLOAT16 = "exact, bfloat16"
# The head dimension of the inputs whose time is measured.
_WIDTH = 64
# Okabe and Ito's colors, which people with color blindness can tell apart; other methods are grey.
_COLORS = {
    _BFLOAT16: "#000000", "nearfar": "#d55e00", "auto": "#cc79a7", "kdeformer": "#0072b2", "nystromformer": "#009e73",
    "wildcat": "#e69f00",
}  # fmt: skip
# Queries of exact attention in bfloat16 that are computed at a time: their scores stay in the cache.
_CHUNK_QUERIES = 256


COLUMNS = {
    "attention": "{method}", "columns or bound": "{setting}", "times faster": "{ratio:.2g}",
    "min..max": "{ratio_min:.2g}..{ratio_max:.2g}", "error": "{off}", "on the frontier": "{best}",
}  # fmt: skip


class Point(NamedTuple):
    """A method with a setting: a budget in columns or a bound of the error. Without a config exact in bfloat16."""

    method: str
    setting: str
    config: MethodConfig | None


def exact_bfloat16(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Exact attention with products in bfloat16, as (1, heads, N, Dv): some queries of a head at a time."""
    out = torch.empty_like(value)
    scaled, keys, values = (query * scale).bfloat16()[0], key.bfloat16()[0], value.bfloat16()[0]
    for head, columns in enumerate(values.transpose(1, 2).contiguous()):
        for start in range(0, query.shape[2], _CHUNK_QUERIES):
            chunk = slice(start, start + _CHUNK_QUERIES)
            # The softmax of bfloat16 computes its maximum and sum in float32.
            weights = linear(scaled[head, chunk], keys[head]).softmax(1)
            out[0, head, chunk] = linear(weights, columns)
    return out


def read_inputs(data: pathlib.Path, tokens: int) -> Activation:
    """The first head of every layer of MiniLM, as the heads of one call."""
    found = minilm_activations(data, 1, tokens)
    _, _, length, dim = found[0].query.shape
    if length < tokens:
        raise UnsupportedAttentionError(f"the first book in {data} has {length} tokens: give a shorter length")
    return Activation(0, *(torch.cat([one[i][:, :1] for one in found], 1) for i in (1, 2, 3)), dim**-0.5)


def padded(inputs: Activation, width: int) -> Activation:
    """The same with head dimensions of `width`: further ones are zero."""
    return Activation(0, *(pad(x, (0, width - x.shape[3])) for x in inputs[1:4]), inputs.scale)


def points(configs: Mapping[str, MethodConfig], budgets: Sequence[int]) -> list[Point]:
    """Every method at every budget; one point for a method that has no budget, and bounds of the error for `auto`."""
    found = [Point(_BFLOAT16, "", None)]
    for label, config in configs.items():
        if config.method == "auto":
            sized = {f"bound {bound:g}": dataclasses.replace(config, max_error=bound) for bound in MAX_ERRORS}
        else:
            sized = {str(budget): config.with_budget(budget) for budget in budgets}
        # The last setting of those with the same config.
        settings = {one: setting if len(set(sized.values())) > 1 else "" for setting, one in sized.items()}
        found += [Point(label, setting, one) for one, setting in settings.items()]
    return found


def call(point: Point, inputs: Activation) -> Tensor:
    """The output of a method, or of exact attention in bfloat16."""
    if point.config is None:
        return exact_bfloat16(*inputs[1:])
    return hea.attention(point.config, *inputs[1:4], scale=inputs.scale)


@torch.inference_mode()
def measure(wanted: Sequence[Point], inputs: Activation, rounds: int) -> list[dict[str, Any]]:
    """One row for each point."""
    wide, rows = padded(inputs, _WIDTH), []
    exact = functools.partial(scaled_dot_product_attention, *wide[1:4], scale=wide.scale)
    truth = hea.analysis.exact_output(*inputs[1:4], scale=inputs.scale)
    for point in tqdm(wanted, disable=None, leave=False):
        error = hea.analysis.relative_error(call(point, inputs), truth).operator.mean().item()
        timing = paired(exact, {"": functools.partial(call, point, wide)}, rounds)[1][""]
        row = {"method": point.method, "setting": point.setting, "error": error}
        rows.append(row | timing._asdict() | {"unsteady": timing.unsteady})
    return rows


def frontier(rows: Sequence[commands.Row]) -> list[commands.Row]:
    """The rows to which no other is superior in both speed and error, fastest first."""
    found: list[commands.Row] = []
    for row in sorted(rows, key=lambda row: (-row["ratio"], row["error"])):
        if not found or row["error"] < found[-1]["error"]:
            found.append(row)
    return found


def draw(rows: Sequence[commands.Row], about: str, tokens: int) -> "Figure":
    """Error against speed, both logarithmic, with a line for each method and a thick grey line for the frontier."""
    from matplotlib.figure import Figure

    lines: dict[str, list[commands.Row]] = {"frontier": frontier(rows)}
    for row in rows:
        lines.setdefault(row["method"], []).append(row)
    figure = Figure(figsize=(8.5, 5), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for (label, points), marker in zip(lines.items(), itertools.cycle("osD^vP*X<>d"), strict=False):
        style = {"color": _COLORS.get(label, "0.55"), "marker": marker, "markersize": 5}
        if label == "frontier":
            style = {"color": "0.85", "linewidth": 9, "solid_capstyle": "round"}
        axes.plot([row["ratio"] for row in points], [row["error"] for row in points], label=label, **style)
    axes.set(xscale="log", yscale="log", xlabel="times faster than exact attention", ylabel="relative error")
    axes.set_title(f"Attention on {tokens:,} tokens: to the right and down is better", fontsize=11, loc="left")
    axes.grid(alpha=0.25, which="both")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    figure.legend(loc="outside right upper", fontsize=7.5, frameon=False)
    figure.supxlabel(f"MiniLM (BERT) on a novel, no training. {about}.", fontsize=7.5, color="0.35")
    return figure


@app.command(
    epilog="Example: python -m recipes.benchmarks.tradeoff --tokens 4096 --method nearfar --output tradeoff.png"
)
def tradeoff(
    output: commands.Picture,
    data: commands.Data = None,
    tokens: commands.option(int, "Tokens of the text.", min=512) = 16384,
    budget: commands.numbers_option("Budgets in columns", "64,128,256,512,1024") = [],  # noqa: B006 (typer copies it)
    method: commands.methods_option("all, both near fields of kdeformer and hyperattention") = [],  # noqa: B006
    threads: commands.Threads = 2,
    rounds: commands.Rounds = 3,
    csv: commands.Csv = None,
) -> None:
    """Measure and draw the error of the methods against their speed on a long text, at several budgets."""
    wanted = points(parse_methods(method or METHODS), parse_lengths(budget) or BUDGETS)
    with use_threads(threads):
        rows = measure(wanted, read_inputs(commands.data_folder(data), tokens), rounds)
    machine = {"cpu": processor_name(), "threads": threads, "device": "cpu", "dtype": "float32"}
    about, best = f"{describe(machine)}, torch {torch.__version__}", frontier(rows)
    shown = [{**row, "best": "yes" if row in best else "", "off": f"{row['error']:.3g}"} for row in rows]
    note = (
        f"{tokens:,} tokens, a head of each layer, times with a head dimension of {_WIDTH}, median of rounds: {rounds}"
    )
    commands.report(shown, COLUMNS, f"{note}. {about}.", csv=csv)
    commands.save(draw(rows, about, tokens), output)


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.tradeoff")
