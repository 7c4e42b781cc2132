"""Error against budget, memory and time on word vectors: KDEformer's Fig. 4 (Zandieh et al. 2023, section 4.1).

    python -m recipes.analysis.budget --data DATA --plot budget.png                      (about 2 minutes)
    python -m recipes.analysis.budget --source random --length 1024 --no-memory

One head: Q and V are random choices of GloVe vectors of width 100, K = Q, as in the paper. For every method and
budget (`with_budget`: the cost per query of so many exact columns; the paper's "feature dimension"): relative error in
operator norm, mean over seeds; floating-point operations of a call; median time of a call, beside exact attention's;
extra memory, as a multiple of the three inputs, by the peaks of child processes (`recipes.benchmarks.memory`).
Operations are those of the matrix products, two for every multiplication (`recipes.benchmarks.counting`, which counts
more): exponentials, sums, sorts, gathers and the draw of orthogonal projections are not among them. Methods are those
of the paper that are registered here, unless --method names others. The error of the mean of the values, which costs
nothing, is printed beside them.
DATA holds `wordvectors`; by default it is $HEA_DATA or ../shared/data.

To expect: with scores divided by sqrt(d), as in the paper's formulas, the attention is so flat that the mean of the
values has an error of .055 already; at a budget of 512, performer comes to that, scatterbrain to .03, reformer and
kdeformer, whose samples estimate the mean, to .07. With `--scale 1` the mean has .78, performer .90, reformer .29,
scatterbrain .14 and kdeformer .11; in the paper's figure, too, performer is far above the others. At that budget each
takes 1.8 to 3.4 GFLOP, a fifteenth to an eighth of the 26.8 of exact attention.
"""

import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.utils.benchmark import timer
from tqdm import tqdm

import hf_efficient_attn as hea
from hf_efficient_attn.cli import Settings, main_of, parse_lengths, parse_methods, table
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.metrics import attention_error, exact_output
from hf_efficient_attn.io.writing import replacing
from hf_efficient_attn.methods import MethodConfig
from recipes.analysis.inputs import glove_vectors
from recipes.benchmarks.counting import attend, operations
from recipes.benchmarks.error import Activation, Data, curves, data_folder, exact_outputs, mean_error
from recipes.benchmarks.memory import EXACT, extra_memory
from recipes.benchmarks.report import Csv, Plot, check_outputs, write_csv

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

# The methods of the paper's figure.
METHODS = ("kdeformer", "reformer", "performer", "scatterbrain")
BUDGETS = [64, 128, 256, 512, 1024]
_WIDTH = 100


def read(source: str, data: pathlib.Path, length: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, (1, 1, length, 100); the key is the query."""
    if source == "glove":
        query, value = (glove_vectors(data, length, 2 * seed + i)[None, None] for i in range(2))
    else:
        draw = torch.Generator().manual_seed(seed)
        query, value = (torch.randn(1, 1, length, _WIDTH, generator=draw) for _ in range(2))
    return query, query, value


def _seconds(config: MethodConfig | None, inputs: tuple[Tensor, ...], rounds: int) -> float:
    """Median time of a call, after one that pays for memory and caches."""
    times = []
    for _ in range(rounds + 1):
        start = timer()
        attend(config, inputs)
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
    """A row for exact attention, and one for every method and budget that the method can have."""
    length, width = inputs[0].shape[2:]
    case = {"batch": 1, "heads": 1, "length": length, "width": width, "dtype": "float32", "causal": False}
    case |= {"backward": False, "seed": 0, "threads": torch.get_num_threads()}
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
                        bar.write(f"left out: {error}")
                        bar.update(seeds)
                        continue
                    found = []
                    for seed in range(seeds):
                        one = attention_error(sized, *inputs, seed=seed, exact=exact, scale=scale)
                        found.append(one.operator.mean().item())
                        bar.update()
                    rows.append(row(name, budget, sized, found))
    return rows


def draw(rows: Sequence[Mapping[str, Any]], path: pathlib.Path, title: str) -> None:
    """Error against budget, operations, time and, where it was measured, memory."""
    from matplotlib.figure import Figure

    panels = {"budget": "budget (columns)", "operations": "operations a call", "seconds": "seconds a call"}
    if rows[0]["extra_memory"] is not None:
        panels["extra_memory"] = "extra memory / inputs"
    figure = Figure(figsize=(4.5 * len(panels), 4), layout="constrained")
    for axes, (key, name) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        curves(axes, rows[1:], key, name)
        if key != "budget":
            axes.axvline(rows[0][key], color="k", linestyle=":", label="exact")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.axes[-1].legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    with replacing(path) as draft:
        figure.savefig(draft, dpi=150)


@app.command(epilog="Example: python -m recipes.analysis.budget --data data --budget 128,512 --method kdeformer")
def budget(
    source: Annotated[str, typer.Option(metavar="NAME", help="glove or random.")] = "glove",
    data: Data = None,
    length: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens.")] = 8192,
    budgets: Annotated[
        list[str],
        typer.Option(
            "--budget", metavar="N", show_default=False, help="Columns, repeated or with commas. [default: 64..1024]"
        ),
    ] = [],  # noqa: B006 (typer copies it)
    method: Annotated[
        list[str],
        typer.Option(
            "--method",
            "--methods",
            metavar="NAME",
            show_default=False,
            help="NAME or NAME:key=value, repeated or with commas. [default: the paper's, where registered]",
        ),
    ] = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    scale: Annotated[
        float | None, typer.Option(metavar="X", help="Factor of the scores. [default: 1 / sqrt of the width]")
    ] = None,
    seeds: Annotated[int, typer.Option(metavar="N", min=1, help="Runs of each method for the error.")] = 3,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Timed calls.")] = 3,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the inputs.")] = 0,
    threads: Annotated[int | None, typer.Option(metavar="N", min=1)] = None,
    memory: Annotated[
        bool, typer.Option("--memory/--no-memory", help="Measure peak memory in child processes.")
    ] = True,
    csv: Csv = None,
    plot: Plot = None,
) -> None:
    """Error of the methods on word vectors, against what they cost."""
    if source not in ("glove", "random"):
        raise UnsupportedAttentionError(f"--source {source!r} is not one of glove, random")
    check_outputs(csv, plot)
    if not method:
        known = hea.available_methods()
        missing = [name for name in METHODS if name not in known]
        if missing:
            typer.echo(f"Left out, since no such method is registered: {', '.join(missing)}\n")
        method = [name for name in METHODS if name in known]
    configs, columns = parse_methods(method, setting), parse_lengths(budgets) or BUDGETS
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        inputs = read(source, data_folder(data), length, seed)
        rows = measure(configs, inputs, columns, seeds=seeds, rounds=rounds, memory=memory, scale=scale)
        one = [Activation(0, *inputs, scale)]
        mean = mean_error(one, exact_outputs(one))
        threads = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    title = f"{source}: {length} tokens, one head of {_WIDTH}, K = Q, {threads} threads"
    if scale is not None:
        title += f", scale {scale:g}"
    if csv is not None:
        write_csv(csv, rows)
    if plot is not None:
        draw(rows, plot, title)
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
    typer.echo(f"The mean of the values, given to every query, has an error of {mean:.3f}.")


if __name__ == "__main__":
    main_of(app, "python -m recipes.analysis.budget")
