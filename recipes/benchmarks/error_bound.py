"""Measure how often bounds of the error fail on texts and photographs: that of `hea.attention_error`, and auto's.

    python -m recipes.benchmarks.error_bound --data DATA --threads 2
    python -m recipes.benchmarks.error_bound --data DATA --source xquad --tokens 512,4096 --method kdeformer
    python -m recipes.benchmarks.error_bound --data DATA --auto

A model is converted to a method at a budget of exact columns (`with_budget`). `hea.attention_error` then estimates the
error of every layer and head from the exact output of some queries, with a bound, and computes it from that of all
queries. A layer is missed if the mean of the bounds of its heads is below the mean of their errors. The sources: six
novels in MiniLM (books), joined paragraphs of XQuAD in MiniLM, photographs in DeiT-tiny with about as many patches as
tokens are asked for, and the novels in GPT-2, which is causal and has 2,048 positions. Errors below 1e-4 are left out.

With --auto the model is converted to `auto`. An approximated head is missed if its error is above `max_error`. With
crossover=1, which is set here, every length is decided by the bound and every approximation is taken to pay.

Duration: about 25 minutes on one core for three methods with 64 and 128 rows, and 4 minutes with --auto.
Expected: at most 1 % of layers missed at each number of rows, and medians of bound / error of 1.4 with 64 rows, 1.3
with 96 and 1.25 with 128. With --auto at most 1 % of heads missed.
"""

import itertools
import pathlib
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import typer
from torch import nn
from tqdm import tqdm

import hf_efficient_attn as hea
from hf_efficient_attn.cli import main_of, parse_lengths, parse_methods, split_list
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.defaults import default_methods
from hf_efficient_attn.evaluation.timing import use_threads
from hf_efficient_attn.methods import MethodConfig
from recipes.common import commands
from recipes.common.inputs import SOURCES, open_source

app = commands.new_app()

TOKENS, ROWS, BUDGETS = [512, 1024, 2048, 8192], [64, 96, 128], [128]
_POSITIONS = {"gpt2": 2048}
# Smaller errors are those of rounding.
_SMALLEST = 1e-4
BOUND_COLUMNS = {
    "source": "{source}", "tokens": "{tokens}", "rows": "{rows}", "layers": "{layers}", "missed": "{missed:.2%}",
    "heads missed": "{heads:.2%}", "bound / error": "{ratio:.2f}",
}  # fmt: skip
HEAD_COLUMNS = {
    "source": "{source}", "tokens": "{tokens}", "heads": "{heads}", "approximated": "{approximated:.0%}",
    "missed": "{missed}", "share of the approximated": "{share:.2%}", "mean error": "{error:.3f}",
}  # fmt: skip


def compare(model: nn.Module, batch: Mapping[str, Any], rows: list[int], seeds: int) -> list[dict[str, Any]]:
    """One row for each number of queries, seed and layer: whether its bound and those of its heads fail."""
    exact, found = hea.attention_error(model, batch, num_rows=None).layers, []
    for count, seed in itertools.product(rows, range(seeds)):
        sampled = hea.attention_error(model, batch, num_rows=count, seed=seed).layers
        for some, every in zip(sampled, exact, strict=True):
            if every.mean >= _SMALLEST:
                row = {"rows": count, "layer": some.name, "missed": some.mean_bound < every.mean}
                row |= {"ratio": some.mean_bound / every.mean, "heads": every.estimate.numel()}
                found.append(row | {"heads_missed": int((some.bound < every.estimate).sum())})
    return found


def approximated_heads(model: nn.Module, batch: Mapping[str, Any], limit: float) -> list[dict[str, Any]]:
    """One row for each layer: number of heads, of approximated ones, and of those above the bound."""
    rows = []
    for layer in hea.attention_error(model, batch, num_rows=None).layers:
        row = {"layer": layer.name, "heads": layer.estimate.numel(), "error": layer.estimate.sum().item()}
        row["approximated"] = int((layer.estimate > _SMALLEST).sum())
        rows.append(row | {"missed": int((layer.estimate > limit).sum())})
    return rows


def lengths_of(source: str, tokens: list[int]) -> list[int]:
    """The lengths for which the model of a source has positions."""
    return [length for length in tokens if length <= _POSITIONS.get(source, length)]


def converted(
    configs: Mapping[str, MethodConfig], sources: list[str], tokens: list[int], data: pathlib.Path
) -> Iterator[tuple[dict[str, Any], nn.Module, Mapping[str, Any]]]:
    """Every input in a model that is converted to every method: what it is, the model and the batch."""
    for source in sources:
        lengths = lengths_of(source, tokens)
        model, load = open_source(source, data, max(lengths))
        for label, config in configs.items():
            if source == "gpt2" and not hea.method_info(config.method).causal:
                continue
            hea.convert(model, config)
            for length in lengths:
                for batch in tqdm(list(load(length)), desc=f"{source}, {length}, {label}", disable=None, leave=False):
                    yield {"source": source, "tokens": length, "method": label}, model, batch


def groups(rows: list[dict[str, Any]], *keys: str) -> dict[tuple, list[dict[str, Any]]]:
    """The rows by source, length and their values of these keys; last, those of all sources and lengths together."""
    found: dict[tuple, list[dict[str, Any]]] = {}
    for first in (lambda row: (row["source"], row["tokens"]), lambda row: ("all", "")):
        for row in rows:
            found.setdefault((*first(row), *(row[key] for key in keys)), []).append(row)
    return found


def show_bounds(rows: list[dict[str, Any]]) -> None:
    """Print the table of the bound of `hea.attention_error`."""
    cells = []
    for (source, tokens, count), part in groups(rows, "rows").items():
        missed = statistics.fmean(row["missed"] for row in part)
        heads = sum(row["heads_missed"] for row in part) / sum(row["heads"] for row in part)
        row = {"source": source, "tokens": tokens, "rows": count, "layers": len(part), "missed": missed}
        cells.append(row | {"heads": heads, "ratio": statistics.median(row["ratio"] for row in part)})
    typer.echo(commands.table_of(cells, BOUND_COLUMNS))


def show_auto(rows: list[dict[str, Any]]) -> None:
    """Print the table of auto's heads."""
    cells = []
    for (source, tokens), part in groups(rows).items():
        sums = {key: sum(row[key] for row in part) for key in ("heads", "approximated", "missed", "error")}
        row = {"source": source, "tokens": tokens, **sums, "share": sums["missed"] / max(1, sums["approximated"])}
        cells.append(row | {name: sums[name] / sums["heads"] for name in ("approximated", "error")})
    typer.echo(commands.table_of(cells, HEAD_COLUMNS))


@app.command(epilog="Example: python -m recipes.benchmarks.error_bound --data data --source books --tokens 1024")
def error_bound(
    data: commands.Data = None,
    source: commands.option(list[str], f"[default: {', '.join(SOURCES)}]") = [],  # noqa: B006 (typer copies it)
    tokens: commands.numbers_option("Tokens", "512,1024,2048,8192", "--tokens") = [],  # noqa: B006
    rows: commands.numbers_option("Queries of each head", "64,96,128", "--rows") = [],  # noqa: B006
    budgets: commands.numbers_option("Budgets in columns", "128", "--budget") = [],  # noqa: B006
    method: commands.methods_option("those that benchmark compares") = [],  # noqa: B006
    auto: commands.option(bool, "Heads of `auto` above its bound.", "--auto") = False,
    seeds: commands.option(int, "Samples of queries.", min=1) = 2,
    threads: commands.Threads = None,
    csv: commands.Csv = None,
) -> None:
    """Measure how often the bound of `hea.attention_error`, or that of `auto`, fails."""
    known = [name for name in SOURCES if not (auto and name == "gpt2")]
    lengths, counts = parse_lengths(tokens) or TOKENS, parse_lengths(rows) or ROWS
    sources = split_list(source) or [name for name in known if lengths_of(name, lengths)]
    commands.check_known("--source", sources, known)
    for name in sources:
        if not lengths_of(name, lengths):
            raise UnsupportedAttentionError(f"--source {name} has {_POSITIONS[name]} positions: give fewer --tokens")
    if auto:
        if rows or budgets or method:
            raise UnsupportedAttentionError("--auto decides by the data: leave out --rows, --budget and --method")
        configs = parse_methods(["auto"], ["crossover=1"])
        limit = configs[next(iter(configs))].to_dict()["max_error"]
    else:
        given = parse_methods(method or default_methods(purpose="compare"))
        columns = parse_lengths(budgets) or BUDGETS
        configs = {f"{label}, {n}": one.with_budget(n) for label, one in given.items() for n in columns}
    found: list[dict[str, Any]] = []
    with use_threads(threads), torch.no_grad():
        for about, model, batch in converted(configs, sources, lengths, commands.data_folder(data)):
            measured = approximated_heads(model, batch, limit) if auto else compare(model, batch, counts, seeds)
            found += [{**about, **row} for row in measured]
        if not found:
            raise UnsupportedAttentionError("every method is exact here: give more tokens or smaller budgets")
        commands.write(found, csv)
        (show_auto if auto else show_bounds)(found)


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.error_bound")
