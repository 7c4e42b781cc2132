"""Measure error against budget, memory and time on word vectors: KDEformer's Fig. 4 (Zandieh et al. 2023, section 4.1).

    python -m recipes.analysis.budget --data DATA --plot budget.png
    python -m recipes.analysis.budget --source random --length 1024 --no-memory

There is one head: Q and V are random choices of GloVe vectors of dimension 100, and K = Q, as in the paper. The
following is measured for every method and budget (`with_budget`: the cost per query of that many exact columns; the
paper's "feature dimension"): the relative error in operator norm, averaged over seeds; floating-point operations of a
call; median time of a call, next to exact attention's; and extra memory as a multiple of the three inputs
(`recipes.common.memory`). Operations are those of the matrix products, two for every
multiply-add, without exponentials, sums, sorts, gathers and the draw of orthogonal projections
(`recipes.common.counting` counts more). The default methods are those of the paper and later ones. The error of the
mean of the values, which costs nothing, is printed as well. DATA holds `wordvectors`. The default is $HEA_DATA or
../shared/data.

Duration: about 2 minutes. Expected: with scores divided by sqrt(d), as in the paper's formulas, attention is so uniform
that the mean of the values has an error of .055; at a budget of 512, nearfar has .006, scatterbrain .03, wildcat .05,
performer .055, reformer and kdeformer .07 and thinformer .20. With `--scale 1` each word attends to itself, and the
mean has .78, performer .90, wildcat .79, thinformer .94, nearfar .43, reformer .29, scatterbrain .14 and kdeformer .11.
There nearfar's groups of 32 queries share too few keys: `--set nearfar.num_groups=2048` leaves .06, and costs as much
as exact attention. At that budget each method needs 1.8 to 5.4 GFLOP, a fifteenth to a fifth of exact attention.
"""

import functools
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import typer
from torch import Tensor

from hf_efficient_attn.cli import Settings, main_of, parse_lengths, parse_methods
from hf_efficient_attn.evaluation.timing import time_calls, use_threads
from hf_efficient_attn.methods import MethodConfig
from recipes.benchmarks import error
from recipes.common import commands
from recipes.common.counting import compute, operations
from recipes.common.inputs import Activation, exact_outputs, glove_vectors, mean_error
from recipes.common.memory import EXACT, Case, extra_memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

app = commands.new_app()

# The methods of the paper's figure, and later ones with the same purpose.
METHODS = ("kdeformer", "reformer", "performer", "scatterbrain", "wildcat", "thinformer", "nearfar")
BUDGETS = [64, 128, 256, 512, 1024]
_WIDTH = 100


def read(source: str, data: pathlib.Path, length: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, (1, 1, length, 100) each. The key is the query."""
    if source == "glove":
        query, value = (glove_vectors(data, length, 2 * seed + i)[None, None] for i in range(2))
    else:
        draw = torch.Generator().manual_seed(seed)
        query, value = (torch.randn(1, 1, length, _WIDTH, generator=draw) for _ in range(2))
    return query, query, value


def measure(
    configs: Mapping[str, MethodConfig],
    inputs: tuple[Tensor, Tensor, Tensor],
    budgets: Sequence[int],
    *,
    seeds: int,
    rounds: int,
    memory: bool,
    scale: float | None = None,
) -> list[dict[str, Any]]:
    """Measure exact attention, and every method at every budget; return one row for each."""
    length, head_dim = inputs[0].shape[2:]
    case = Case(length, num_heads=1, head_dim=head_dim, threads=torch.get_num_threads())
    found = error.measure(list(configs.values()), [Activation(0, *inputs, scale)], budgets, seeds)
    rows = [{"method": EXACT, "budget": None, "error": 0.0, "deviation": 0.0}]
    rows += [{key: row[key] for key in rows[0]} for row in found]
    sized = {(label, n): config.with_budget(n) for label, config in configs.items() for n in budgets}
    with torch.inference_mode():
        for row in rows:
            config = sized.get((row["method"], row["budget"]))
            # A first call warms up memory and caches.
            times = [time_calls(lambda config=config: compute(config, inputs)) for _ in range(rounds + 1)][1:]
            row |= {"operations": operations(config, inputs), "seconds": statistics.median(times)}
            row |= {"extra_memory": extra_memory(config, case) if memory else None}
    return rows


def draw(rows: Sequence[commands.Row], title: str) -> "Figure":
    """Plot the error against budget, operations, time and, if measured, memory."""
    from matplotlib.figure import Figure

    panels = {"budget": "budget (columns)", "operations": "operations per call", "seconds": "seconds per call"}
    if rows[0]["extra_memory"] is not None:
        panels["extra_memory"] = "extra memory / inputs"
    figure = Figure(figsize=(4.5 * len(panels), 4), layout="constrained")
    for axes, (key, name) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        commands.curves(axes, rows[1:], key, name)
        if key != "budget":
            axes.axvline(rows[0][key], color="k", linestyle=":", label="exact")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.axes[-1].legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    return figure


@app.command(epilog="Example: python -m recipes.analysis.budget --data data --budget 128,512 --method kdeformer")
def budget(
    source: commands.option(str, "glove or random.", metavar="NAME") = "glove",
    data: commands.Data = None,
    length: commands.option(int, "Tokens.", min=2) = 8192,
    budgets: commands.numbers_option("Budgets in columns", "64..1024", "--budget") = [],  # noqa: B006 (typer copies it)
    method: commands.methods_option("the paper's and later ones", "--method", "--methods") = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    scale: commands.Scale = None,
    seeds: commands.option(int, "Number of seeds for the error.", min=1) = 3,
    rounds: commands.option(int, "Number of timed calls.", min=1) = 3,
    seed: commands.Seed = 0,
    threads: commands.AnyThreads = None,
    memory: commands.Memory = True,
    csv: commands.Csv = None,
    plot: commands.Plot = None,
) -> None:
    """Measure error and cost of the methods on word vectors."""
    commands.check_known("--source", [source], ("glove", "random"))
    commands.check_outputs(csv, plot)
    configs, columns = parse_methods(method or METHODS, setting), parse_lengths(budgets) or BUDGETS
    with use_threads(threads):
        inputs = read(source, commands.data_folder(data), length, seed)
        rows = measure(configs, inputs, columns, seeds=seeds, rounds=rounds, memory=memory, scale=scale)
        one = [Activation(0, *inputs, scale)]
        mean = mean_error(one, exact_outputs(one))
        threads = torch.get_num_threads()
    title = f"{source}: {length} tokens, one head of {_WIDTH}, K = Q, {threads} threads"
    if scale is not None:
        title += f", scale {scale:g}"
    commands.write(rows, csv, plot, functools.partial(draw, title=title))
    for row in rows:
        row |= {"giga": row["operations"] / 1e9, "ms": 1000 * row["seconds"], "of": rows[0]["seconds"] / row["seconds"]}
        row["off"] = f"{row['error']:.3f}" + (f" ± {row['deviation']:.3f}" if row["deviation"] else "")
    columns = {
        "attention": "{method}", "budget": "{budget}", "error": "{off}", "GFLOP": "{giga:.2f}", "ms": "{ms:.1f}",
        "times faster": "{of:.1f}x",
    }  # fmt: skip
    commands.show(rows, columns | ({"extra memory / inputs": "{extra_memory:.2f}"} if memory else {}))
    typer.echo(f"\n{title}. Relative error in operator norm, {seeds} seeds; medians of {rounds} calls.")
    typer.echo(f"Answering every query with the mean of the values has an error of {mean:.3f}.")


if __name__ == "__main__":
    main_of(app, "python -m recipes.analysis.budget")
