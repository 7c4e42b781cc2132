"""Measure the error of the methods on the queries, keys and values of real models.

    python -m recipes.benchmarks.error --data DATA                         (MiniLM, 512 tokens of books)
    python -m recipes.benchmarks.error --data DATA --tokens 4096 --causal  (concatenated windows of 512 tokens)
    python -m recipes.benchmarks.error --data DATA --model deit            (DeiT-tiny, 512 pixels: 1,025 tokens)
    python -m recipes.benchmarks.error --data DATA --tokens 8192 --defaults     (as recipes.benchmarks.attention)

The error is |A - E|_op / |E|_op for every layer and head, where E is the output of exact attention (N x Dv), A is that
of the method on the same inputs, and |.|_op is the largest singular value. It is averaged over heads, layers and
inputs. All methods have the same budget of exact columns (`with_budget`), or with `--defaults` the hyperparameters
whose speed `recipes.benchmarks.attention` measures. Methods that draw at random run with several seeds, and the table
shows mean and standard deviation over the seeds. With `--causal` only methods with a causal form are measured.
`columns=all:draw=independent` is the sampling of the papers themselves.

DATA holds `text/books/*.txt.gz` for MiniLM, which comes from PyPI, or `models/deit-tiny-imagenet` and
`images/imagenet1k-sample-original-100.zip` for DeiT. The default is $HEA_DATA or ../shared/data.

Duration: 2 minutes for the first command. Expected with `--check`: kdeformer at most .40 at a budget of 128, and .28
with a window as near field; at 4,096 tokens and a budget of 256 .38 and .35; on DeiT with 256 .13 and .11. nearfar at
most .036, .046 and .03.
"""

import functools
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from torch import Tensor
from tqdm import tqdm

import hf_efficient_attn as hea
from hf_efficient_attn.cli import Settings, main_of, parse_lengths, parse_methods, table
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.defaults import method_label
from hf_efficient_attn.evaluation.timing import use_threads
from hf_efficient_attn.methods import MethodConfig
from recipes.common import commands
from recipes.common.inputs import Activation, deit_activations, exact_outputs, mean_error, minilm_activations

if TYPE_CHECKING:
    from matplotlib.figure import Figure

app = commands.new_app()

METHODS = commands.METHODS
# Largest errors: (model, tokens) -> (budget, {label: goal}).
_WINDOW = "kdeformer (near_field=window)"
GOALS: dict[tuple[str, int], tuple[int, dict[str, float]]] = {
    ("minilm", 512): (128, {"nearfar": 0.036, "kdeformer": 0.40, _WINDOW: 0.28}),
    ("minilm", 4096): (256, {"nearfar": 0.046, "kdeformer": 0.38, _WINDOW: 0.35}),
    ("deit", 1025): (256, {"nearfar": 0.03, "kdeformer": 0.13, _WINDOW: 0.11}),
}
# The patches of 16 x 16 in 512 x 512 pixels, and the class token.
_DEIT_TOKENS = 1025


def errors(
    config: MethodConfig, activations: Sequence[Activation], exact: Sequence[Tensor], seed: int, causal: bool = False
) -> list[float]:
    """Mean error over the heads, for each activation."""
    found = []
    for one, truth in zip(activations, exact, strict=True):
        error = hea.analysis.attention_error(
            config, one.query, one.key, one.value, scale=one.scale, seed=seed, is_causal=causal, exact=truth
        )
        found.append(error.operator.mean().item())
    return found


def measure(
    configs: Sequence[MethodConfig],
    activations: Sequence[Activation],
    budgets: Sequence[int | None],
    seeds: int,
    causal: bool = False,
) -> list[dict[str, Any]]:
    """Measure every method at every budget; the budget None leaves its hyperparameters as they are.

    Returns:
        Rows with the mean error, its standard deviation over seeds, and the error of each layer.
    """
    exact, layers = exact_outputs(activations, causal), sorted({one.layer for one in activations})
    rows: list[dict[str, Any]] = []
    with torch.inference_mode(), tqdm(total=len(configs) * len(budgets) * seeds, disable=None, leave=False) as bar:
        for budget in budgets:
            for config in configs:
                sized, runs = config if budget is None else config.with_budget(budget), list[list[float]]()
                for seed in range(seeds):
                    bar.update()
                    # More seeds of a method that draws nothing would only repeat the result.
                    if not runs or seed == 1 or runs[0] != runs[-1]:
                        runs.append(errors(sized, activations, exact, seed, causal))
                means = [statistics.fmean(run) for run in runs]
                by_layer = {
                    layer: statistics.fmean(
                        run[i] for run in runs for i, one in enumerate(activations) if one.layer == layer
                    )
                    for layer in layers
                }
                rows.append(
                    {
                        "method": method_label(config),
                        "budget": "default" if budget is None else budget,
                        "error": statistics.fmean(means),
                        "deviation": statistics.stdev(means) if len(means) > 1 else 0.0,
                        "seeds": len(means),
                        **{f"layer_{layer}": value for layer, value in by_layer.items()},
                    }
                )
    return rows


def draw(rows: Sequence[commands.Row], title: str) -> "Figure":
    """Plot the error against the budget, or bars for a single budget."""
    from matplotlib.figure import Figure

    labels, budgets = list(dict.fromkeys(row["method"] for row in rows)), sorted({row["budget"] for row in rows})
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    if len(budgets) == 1:
        axes.barh(labels, [row["error"] for row in rows], xerr=[row["deviation"] for row in rows])
        axes.invert_yaxis()
        title = f"{title}; budget {budgets[0]}"
        axes.set(xlabel="relative error (operator norm)")
    else:
        commands.curves(axes, rows, "budget", "budget (columns)")
        axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize="medium")
    return figure


def by_method(rows: Sequence[commands.Row], mean: float) -> tuple[list[str], list[list[str]]]:
    """Headers and cells, with a line for each method and a column for each budget; * marks errors above `mean`."""
    budgets = list(dict.fromkeys(row["budget"] for row in rows))
    cells: dict[str, list[str]] = {}
    for row in rows:
        spread = f" ± {row['deviation']:.3f}" if row["deviation"] else ""
        cells.setdefault(row["method"], [row["method"]]).append(
            f"{row['error']:.3f}{spread}" + " *" * (row["error"] > mean)
        )
    return ["attention", *(str(budget) for budget in budgets)], list(cells.values())


@app.command(epilog="Example: python -m recipes.benchmarks.error --data data --budget 64,128,256 --plot error.png")
def error(
    model: Annotated[str, typer.Option(metavar="MODEL", help="minilm (512 tokens) or deit (1025 tokens).")] = "minilm",
    data: commands.Data = None,
    budget: commands.numbers_option("Budgets in columns", "128; deit: 256") = [],  # noqa: B006 (typer copies it)
    method: commands.methods_option("all, both near fields, the papers' sampling") = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    inputs: Annotated[int, typer.Option(metavar="N", min=1, help="Number of books or photographs.")] = 3,
    seeds: Annotated[int, typer.Option(metavar="N", min=1, help="Seeds of each method that draws at random.")] = 5,
    threads: commands.AnyThreads = None,
    tokens: Annotated[
        int, typer.Option(metavar="N", min=2, help="Tokens for MiniLM; more than 512 are concatenated windows of 512.")
    ] = 512,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="The hyperparameters of each method as they are, without a budget.")
    ] = False,
    causal: Annotated[bool, typer.Option("--causal", help="Causal attention, for methods that have it.")] = False,
    by_layer: Annotated[bool, typer.Option("--by-layer", help="Print the error of every layer too.")] = False,
    check: commands.Check = False,
    csv: commands.Csv = None,
    plot: commands.Plot = None,
) -> None:
    """Measure the relative operator-norm error of the methods on real activations, at budgets of exact columns."""
    if defaults and (budget or check):
        raise UnsupportedAttentionError("--defaults measures without a budget: leave out --budget and --check")
    readers = {"minilm": (functools.partial(minilm_activations, length=tokens), 128), "deit": (deit_activations, 256)}
    if model not in readers:
        raise UnsupportedAttentionError(f"--model {model!r} is not one of {', '.join(readers)}")
    size = (model, tokens if model == "minilm" else _DEIT_TOKENS)
    if check and (size not in GOALS or causal):
        sizes = ", ".join(f"{name} at {length} tokens" for name, length in GOALS)
        raise UnsupportedAttentionError(f"--check: the goals hold for {sizes} without --causal")
    commands.check_outputs(csv, plot)
    configs = list(parse_methods(method or METHODS, setting).values())
    if causal and not method:
        # Causal forms always have a window as near field, whatever `near_field` is.
        usual = parse_methods([name for name in METHODS if "near_field" not in name], setting).values()
        configs = [config for config in usual if hea.method_info(config.method).causal]
    read, default = readers[model]
    budgets: list[int | None] = [None] if defaults else [*(parse_lengths(budget) or [default])]
    for config in configs:
        for columns in budgets:
            if columns is not None:
                config.with_budget(columns)
    with use_threads(threads):
        activations = read(commands.data_folder(data), inputs)
        rows = measure(configs, activations, budgets, seeds, causal)
        mean = mean_error(activations, exact_outputs(activations, causal), causal)
    num_heads, length, head_dim = activations[0].query.shape[1:]
    layers = [key for key in rows[0] if key.startswith("layer_")]
    form = ", causal" if causal else ""
    title = (
        f"{model}: {length} tokens{form}, {len(layers)} layers, {num_heads} heads of {head_dim}, "
        f"{len(activations) // len(layers)} inputs"
    )
    commands.write(rows, csv, plot, functools.partial(draw, title=title))
    typer.echo(table(*by_method(rows, mean)))
    if by_layer:
        headers = ("attention", "budget", *(key.replace("_", " ") for key in layers))
        cells = [(row["method"], row["budget"], *(f"{row[key]:.3f}" for key in layers)) for row in rows]
        typer.echo("\n" + table(headers, cells))
    typer.echo(
        f"\n{title}. Relative operator norm, mean over heads, layers and inputs; "
        f"{'default hyperparameters' if defaults else 'budgets in columns'}; "
        f"{seeds} seeds (± deviation over seeds, for methods that draw at random)."
    )
    mean_of = "values so far" if causal else "values"
    typer.echo(f"* worse than answering every query with the mean of the {mean_of}, {mean:.3f}.")
    if check:
        columns, goals = GOALS[size]
        commands.conclude(
            [
                commands.Verdict(f"{r['method']}, budget {r['budget']}: error", r["error"], goals[r["method"]], False)
                for r in rows
                if r["method"] in goals and r["budget"] == columns
            ]
        )


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.error")
