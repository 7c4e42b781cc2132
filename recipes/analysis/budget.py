"""Measure error against budget, memory and time on word vectors: KDEformer's Fig. 4 (Zandieh et al. 2023, section 4.1).

    python -m recipes.analysis.budget --data DATA --plot budget.png
    python -m recipes.analysis.budget --source random --length 1024 --no-memory

There is one head: Q and V are random choices of GloVe vectors of dimension 100, and K = Q, as in the paper. The
following is measured for every method and budget (`with_budget`: the cost per query of that many exact columns; the
paper's "feature dimension"): the relative error in operator norm, averaged over seeds; floating-point operations of a
call; median time of a call, next to exact attention's; and extra memory as a multiple of the three inputs, from the
peaks of child processes (`recipes.common.memory`). Operations are those of the matrix products, two for every
multiply-add, without exponentials, sums, sorts, gathers and the draw of orthogonal projections
(`recipes.common.counting` counts more). The default methods are those of the paper and later ones. The error of the
mean of the values, which costs nothing, is printed as well. DATA holds `wordvectors`. The default is $HEA_DATA or
../shared/data.

Duration: about 2 minutes. Expected: with scores divided by sqrt(d), as in the paper's formulas, attention is so uniform
that the mean of the values has an error of .055; at a budget of 512, performer has about the same, scatterbrain .03,
reformer and kdeformer, whose samples estimate the mean, .07, wildcat and nearfar .05 and thinformer .20. With
`--scale 1` the mean has .78, performer .90, reformer .29, scatterbrain .14, kdeformer .11, nearfar .12, wildcat .79
and thinformer .94: fitted or Nystrom weights of landmarks cannot represent attention to one of 8,192 unrelated keys, so
nearfar attends to the means of its clusters. Performer is far above the others in the paper's figure, too. At that
budget each needs 1.8 to 5.4 GFLOP, a fifteenth to a fifth of the 26.8 of exact attention.
"""

import functools
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from torch import Tensor
from torch.utils.benchmark import timer
from tqdm import tqdm

import hf_efficient_attn as hea
from hf_efficient_attn.analysis import attention_error, exact_output
from hf_efficient_attn.cli import Settings, main_of, parse_lengths, parse_methods, table
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.timing import use_threads
from hf_efficient_attn.methods import MethodConfig
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


def _seconds(config: MethodConfig | None, inputs: tuple[Tensor, ...], rounds: int) -> float:
    """Median time of a call, after a first call that warms up memory and caches."""
    times = []
    for _ in range(rounds + 1):
        start = timer()
        compute(config, inputs)
        times.append(timer() - start)
    return statistics.median(times[1:])


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
    """Measure exact attention, and every method at every budget that it supports; return one row for each."""
    length, head_dim = inputs[0].shape[2:]
    case = Case(length, num_heads=1, head_dim=head_dim, threads=torch.get_num_threads())
    exact = exact_output(*inputs, scale=scale)

    def row(name: str, budget: int | None, config: MethodConfig | None, found: list[float]) -> dict[str, Any]:
        return {
            "method": name,
            "budget": budget,
            "error": statistics.fmean(found),
            "deviation": statistics.stdev(found) if len(found) > 1 else 0.0,
            "operations": operations(config, inputs),
            "seconds": _seconds(config, inputs, rounds),
            "extra_memory": extra_memory(config, case) if memory else None,
        }

    with torch.inference_mode():
        rows = [row(EXACT, None, None, [0.0])]
        with tqdm(total=len(configs) * len(budgets) * seeds, disable=None, leave=False) as bar:
            for name, config in configs.items():
                for budget in budgets:
                    try:
                        sized = config.with_budget(budget)
                    except UnsupportedAttentionError as error:
                        bar.write(f"omitted: {error}")
                        bar.update(seeds)
                        continue
                    found = []
                    for seed in range(seeds):
                        one = attention_error(sized, *inputs, seed=seed, exact=exact, scale=scale)
                        found.append(one.operator.mean().item())
                        bar.update()
                    rows.append(row(name, budget, sized, found))
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
    source: Annotated[str, typer.Option(metavar="NAME", help="glove or random.")] = "glove",
    data: commands.Data = None,
    length: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens.")] = 8192,
    budgets: commands.numbers_option("Budgets in columns", "64..1024", "--budget") = [],  # noqa: B006 (typer copies it)
    method: commands.methods_option("the paper's and later ones, if registered", "--method", "--methods") = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    scale: commands.Scale = None,
    seeds: Annotated[int, typer.Option(metavar="N", min=1, help="Number of seeds for the error.")] = 3,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Number of timed calls.")] = 3,
    seed: commands.Seed = 0,
    threads: commands.AnyThreads = None,
    memory: commands.Memory = True,
    csv: commands.Csv = None,
    plot: commands.Plot = None,
) -> None:
    """Measure error and cost of the methods on word vectors."""
    if source not in ("glove", "random"):
        raise UnsupportedAttentionError(f"--source {source!r} is not one of glove, random")
    commands.check_outputs(csv, plot)
    if not method:
        known = hea.available_methods()
        missing = [name for name in METHODS if name not in known]
        if missing:
            typer.echo(f"Omitted, since no such method is registered: {', '.join(missing)}\n")
        method = [name for name in METHODS if name in known]
    configs, columns = parse_methods(method, setting), parse_lengths(budgets) or BUDGETS
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
    headers = ("attention", "budget", "error", "GFLOP", "ms", "times faster", "extra memory / inputs")
    exact = rows[0]["seconds"]
    cells = [
        (
            row["method"],
            row["budget"] or "",
            f"{row['error']:.3f}" + (f" ± {row['deviation']:.3f}" if row["deviation"] else ""),
            f"{row['operations'] / 1e9:.2f}",
            f"{1000 * row['seconds']:.1f}",
            f"{exact / row['seconds']:.1f}x",
            *(() if row["extra_memory"] is None else (f"{row['extra_memory']:.2f}",)),
        )
        for row in rows
    ]
    typer.echo(table(headers[: 7 if memory else 6], cells))
    typer.echo(f"\n{title}. Relative error in operator norm, {seeds} seeds; medians of {rounds} calls.")
    typer.echo(f"Answering every query with the mean of the values has an error of {mean:.3f}.")


if __name__ == "__main__":
    main_of(app, "python -m recipes.analysis.budget")
