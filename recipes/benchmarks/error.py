"""Measure the error of the methods on the queries, keys and values of real models.

    python -m recipes.benchmarks.error --data DATA                         (MiniLM, 512 tokens of books)
    python -m recipes.benchmarks.error --data DATA --tokens 4096 --causal  (concatenated windows of 512 tokens)
    python -m recipes.benchmarks.error --data DATA --model deit            (DeiT-tiny, 512 pixels: 1,025 tokens)
    python -m recipes.benchmarks.error --data DATA --tokens 8192 --defaults     (as recipes.benchmarks.attention)
    python -m recipes.benchmarks.error --data DATA --model T5_FOLDER       (its encoder, with its bias by distance)
    python -m recipes.benchmarks.error --data DATA --alibi                 (MiniLM with the bias of ALiBi)
    python -m recipes.benchmarks.error --half bfloat16

The error is |A - E|_op / |E|_op for every layer and head, averaged, where E is the output of exact attention (N x Dv)
and |.|_op the largest singular value. All methods have the same budget of exact columns (`with_budget`), or with
`--defaults` their default hyperparameters. Methods that draw at random run with several seeds, and the table shows mean
and standard deviation. `columns=all:draw=independent` is the sampling of the papers themselves.

With `--half bfloat16,float16` it measures what half precision adds, in the Frobenius norm, on standard normal numbers
unless `--model minilm` is given. The columns:

exact              exact attention in the dtype, against float64
within its budget  a method whose budget is the whole sequence, so that it is exact; not for those that never are
at its budget      the method in the dtype, against float64 with the same seed. Rounding can move a key to another block
                   of a hash, or choose another landmark: this changes the output as another seed does
approximation      the method at that budget in float64, against exact attention in float64
in all             the method at that budget in the dtype, against exact attention in float64

DATA holds `text/books/*.txt.gz` for MiniLM, or `models/deit-tiny-imagenet` and
`images/imagenet1k-sample-original-100.zip` for DeiT.

Duration: 2 minutes for the first command, one with `--half`. Expected: the tables of docs/results.md. With `--half`,
within its budget, no method has more than 3 times the error of exact attention in the same dtype.
"""

import itertools
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

import hf_efficient_attn as hea
from hf_efficient_attn.cli import main_of, parse_lengths, parse_methods, split_list
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.defaults import method_label
from hf_efficient_attn.evaluation.timing import use_threads
from hf_efficient_attn.methods import MethodConfig
from recipes.common import commands
from recipes.common.inputs import (
    Activation,
    alibi,
    deit_activations,
    exact_outputs,
    mean_error,
    minilm_activations,
    t5_activations,
)

app = commands.new_app()

METHODS = commands.METHODS
MODELS = ("minilm", "deit", "random")
# Of --half: without "auto", which is one of the others or exact.
HALF_METHODS = [name for name in hea.available_methods() if name != "auto"]
HALF_COLUMNS = {
    "dtype": "{dtype}", "budget": "{budget}", "attention": "{method}", "exact": "{exact:.2g}",
    "within its budget": "{within:.2g}", "at its budget": "{at:.2g}", "times exact": "{times:.2f}",
    "approximation": "{approximation:.2g}", "in all": "{in_all:.2g}",
}  # fmt: skip
COLUMNS = {"attention": "{method}", "budget": "{budget}", "error": "{error:.3f}{worse}", "deviation": "{deviation:.3f}"}


def read(model: str, data: pathlib.Path, count: int, length: int) -> list[Activation]:
    """The activations of a model on `count` inputs, or standard normal query, key and value (1, 8, length, 64)."""
    if model == "deit":
        return deit_activations(data, count)
    if model == "minilm":
        return minilm_activations(data, count, length=length)
    if model != "random":
        return t5_activations(pathlib.Path(model), data, count, length)
    draw = torch.Generator().manual_seed(0)
    return [Activation(0, *(torch.randn(1, 8, length, 64, generator=draw) for _ in "qkv"), None) for _ in range(count)]


@torch.inference_mode()
def measure(
    configs: Sequence[MethodConfig],
    activations: Sequence[Activation],
    budgets: Sequence[int | None],
    seeds: int,
    causal: bool = False,
) -> list[dict[str, Any]]:
    """Measure every method at every budget; the budget None leaves its hyperparameters as they are.

    The rows have the mean error, its standard deviation over seeds, and the error of each layer.
    """
    exact, rows = exact_outputs(activations, causal), list[dict[str, Any]]()
    for budget, config in tqdm([*itertools.product(budgets, configs)], disable=None, leave=False):
        sized, runs = config if budget is None else config.with_budget(budget), list[list[float]]()
        for seed in range(seeds):
            # More seeds of a method that draws nothing would only repeat the result.
            if seed < 2 or runs[0] != runs[1]:
                options: dict[str, Any] = {"seed": seed, "is_causal": causal}
                found = [
                    hea.analysis.attention_error(
                        sized, *one[1:4], scale=one.scale, exact=truth, distance_bias=one.bias, **options
                    )
                    for one, truth in zip(activations, exact, strict=True)
                ]
                runs.append([error.operator.mean().item() for error in found])
        by_layer: dict[str, list[float]] = {}
        for one, *values in zip(activations, *runs, strict=True):
            by_layer.setdefault(f"layer_{one.layer}", []).extend(values)
        means = [statistics.fmean(run) for run in runs]
        row = {"method": method_label(config), "budget": "default" if budget is None else budget}
        row |= {"error": statistics.fmean(means), "deviation": statistics.stdev(means) if len(means) > 1 else 0.0}
        rows.append(row | {"seeds": len(means)} | {name: statistics.fmean(own) for name, own in by_layer.items()})
    return rows


def half_errors(config: MethodConfig, one: Activation, budget: int, causal: bool) -> dict[str, float | None]:
    """The errors of a method on query, key and value (B, H, N, D) in half precision, by column of the table above.

    `within` is None if the method is never exact.
    """
    inputs, options = one[1:4], {"is_causal": causal, "scale": one.scale}
    exact_inputs = tuple(x.double() for x in inputs)
    truth = hea.analysis.exact_output(*exact_inputs, **options)

    def error(out: Tensor, truth: Tensor) -> float:
        return hea.analysis.relative_error(out.double(), truth).frobenius.mean().item()

    # A window needs the budget on both sides, and landmarks count twice.
    sized, whole = (config.with_budget(columns) for columns in (budget, 4 * one.key.shape[2]))
    ours, reference = (hea.attention(sized, *x, **options) for x in (inputs, exact_inputs))
    is_exact = whole.exact_length >= one.key.shape[2]
    return {
        "exact": error(scaled_dot_product_attention(*inputs, **options), truth),
        "within": error(hea.attention(whole, *inputs, **options), truth) if is_exact else None,
        "at": error(ours, reference),
        "approximation": error(reference, truth),
        "in_all": error(ours, truth),
    }


@torch.inference_mode()
def measure_half(
    configs: Mapping[str, MethodConfig],
    activations: Sequence[Activation],
    dtypes: Sequence[str],
    budgets: Sequence[int],
    causal: bool,
) -> list[dict[str, Any]]:
    """One row for each dtype, budget and method: the means of its errors over the activations."""
    rows, cases = [], [*itertools.product(dtypes, budgets, configs.items())]
    for dtype, budget, (label, config) in tqdm(cases, disable=None, leave=False):
        rounded = [Activation(a.layer, *(x.to(getattr(torch, dtype)) for x in a[1:4]), a.scale) for a in activations]
        found = [half_errors(config, one, budget, causal) for one in rounded]
        means = {k: None if found[0][k] is None else statistics.fmean(one[k] for one in found) for k in found[0]}
        rows.append({"method": label, "dtype": dtype, "budget": budget, **means, "times": means["at"] / means["exact"]})
    return rows


@app.command(epilog="Example: python -m recipes.benchmarks.error --data data --budget 64,128,256 --csv error.csv")
def error(
    model: commands.option(
        str | None,
        "minilm, deit (1,025 tokens), random, or the folder of a T5. [default: minilm; with --half random]",
        metavar="MODEL",
    ) = None,
    data: commands.Data = None,
    budget: commands.numbers_option("Budgets in columns", "128; deit: 256") = [],  # noqa: B006 (typer copies it)
    method: commands.methods_option("all, both near fields, the papers' sampling") = [],  # noqa: B006
    inputs: commands.option(int | None, "Number of books or photographs. [default: 3; with --half 1]", min=1) = None,
    seeds: commands.option(int, "Seeds of each method that draws at random.", min=1) = 5,
    threads: commands.Threads = None,
    tokens: commands.option(
        int | None,
        "Tokens of all but deit; minilm concatenates windows of 512. [default: 512; with --half 1024]",
        min=2,
    ) = None,
    defaults: commands.option(
        bool, "The hyperparameters of each method as they are, without a budget.", "--defaults"
    ) = False,
    half: commands.option(list[str], "What these dtypes add: bfloat16, float16. [default: none]", metavar="TYPE") = [],  # noqa: B006
    with_alibi: commands.option(bool, "Add the bias by distance of ALiBi to the scores.", "--alibi") = False,
    causal: commands.option(bool, "Causal attention, for methods that have it.", "--causal") = False,
    csv: commands.Csv = None,
) -> None:
    """Measure the relative operator-norm error of the methods on real activations, at budgets of exact columns."""
    if defaults and (budget or half):
        raise UnsupportedAttentionError("--defaults measures without a budget: leave out --budget and --half")
    dtypes, model = split_list(half), model or ("random" if half else "minilm")
    length = tokens or (1024 if half else 512)
    commands.check_known("--half", dtypes, ("bfloat16", "float16"))
    commands.check_known("--model", [] if pathlib.Path(model).is_dir() else [model], (*MODELS, "a folder"))
    biased = with_alibi or model not in MODELS
    if biased and half:
        raise UnsupportedAttentionError("--half measures without a bias: leave out --alibi and a T5")
    # Causal forms always have a window as near field, whatever `near_field` is.
    usual = HALF_METHODS if half else [name for name in METHODS if not (causal and "near_field" in name)]
    named = parse_methods(method or usual)
    configs = {
        name: config
        for name, config in named.items()
        if hea.method_info(config.method).causal >= causal
        and config.adds_distance_bias >= biased
        and config.adds_causal_bias >= (biased and causal)
    }
    if not configs:
        form = f"{'causal ' if causal else ''}form{' with a bias by distance' if biased else ''}"
        raise UnsupportedAttentionError(f"{', '.join(named)} have no {form}; choose other methods")
    budgets: list[int | None] = [None] if defaults else [*(parse_lengths(budget) or [256 if model == "deit" else 128])]
    # Refuses budgets that a method cannot have before the work.
    for columns, config in itertools.product(filter(None, budgets), configs.values()):
        config.with_budget(columns)
    with use_threads(threads):
        activations = read(model, commands.data_folder(data), inputs or (1 if half else 3), length)
        if with_alibi:
            table = alibi(*activations[0].query.shape[1:3])
            activations = [one._replace(bias=table) for one in activations]
        if half:
            rows = measure_half(configs, activations, dtypes, budgets, causal)
        else:
            rows = measure(list(configs.values()), activations, budgets, seeds, causal)
            mean = mean_error(activations, exact_outputs(activations, causal), causal)
    (_, num_heads, length, head_dim), layers = activations[0].query.shape, len({one.layer for one in activations})
    title = (
        f"{model}{' with ALiBi' if with_alibi else ''}: {length} tokens{', causal' if causal else ''}, "
        f"{layers} layers, {num_heads} heads of {head_dim}, {len(activations) // layers} inputs"
    )
    if half:
        commands.report(rows, HALF_COLUMNS, f"{title}. Relative Frobenius norm.", csv=csv)
        return
    note = f"{title}. Relative operator norm, mean over heads, layers and inputs; {seeds} seeds for random methods.\n"
    rows = [{**row, "worse": " *" * (row["error"] > mean)} for row in rows]
    if any(row["worse"] for row in rows):
        values = "values so far" if causal else "values"
        note += f"* worse than answering every query with the mean of the {values}, {mean:.3f}."
    commands.report(rows, COLUMNS, note, csv=csv)


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.error")
