"""Measure what half precision adds to the error of each method, next to what it adds to exact attention.

    python -m recipes.benchmarks.half
    python -m recipes.benchmarks.half --dtype float16 --causal --length 512
    python -m recipes.benchmarks.half --check
    python -m recipes.benchmarks.half --data DATA             (queries, keys and values of MiniLM)

Duration: a minute on one core. Expected with `--check`: within its budget, no method has more than 3 times the error
of exact attention in the same dtype.

Query, key and value are standard normal numbers, or with `--data` those of MiniLM's layers on a book
(`DATA/text/books/*.txt.gz`), rounded to the dtype. The error is |A - E| / |E| in the Frobenius norm, averaged over
heads and inputs. The columns:

exact              error of `torch.nn.functional.scaled_dot_product_attention` in the dtype, against float64
within its budget  the same error of a method whose budget is the whole sequence, which makes it exact; without a figure
                   for methods that define their own attention
at its budget      difference between the method's output in the dtype and in float64, with the same seed and a budget
                   of `--budget` columns. Where rounding moves a key to another block of a hash, or chooses another
                   landmark, the output changes as much as with another seed, which is no error of half precision
approximation      error of the method at that budget in float64, against exact attention in float64
in all             error of the method at that budget in the dtype, against exact attention in float64
"""

import pathlib
import statistics
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from tqdm import tqdm

import hf_efficient_attn as hea
from hf_efficient_attn.cli import Settings, main_of, parse_methods, table
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.methods import MethodConfig, available_methods, method_info
from recipes.common import commands
from recipes.common.inputs import Activation, minilm_activations

app = commands.new_app()

# "auto" is one of the others or exact.
METHODS = tuple(name for name in available_methods() if name != "auto")
# Largest error within the budget, as a multiple of that of exact attention in the same dtype.
GOAL = 3.0


def error(out: Tensor, truth: Tensor) -> float:
    """|A - E| / |E| of each head in the Frobenius norm, averaged: (B, H, N, Dv) each."""
    return hea.analysis.relative_error(out.double(), truth).frobenius.mean().item()


def measure(config: MethodConfig, one: Activation, budget: int, causal: bool) -> dict[str, float | None]:
    """The errors of a method on query, key and value (B, H, N, D) in half precision.

    Returns:
        the errors by column, as the module describes them; None for `within` if the method is never exact.
    """
    inputs, options = (one.query, one.key, one.value), {"is_causal": causal, "scale": one.scale}
    exact_inputs = tuple(x.double() for x in inputs)
    truth = hea.analysis.exact_output(*exact_inputs, **options)
    sized, whole = config.with_budget(budget), _whole(config, one.key.shape[2])
    ours, reference = (hea.attention(sized, *x, **options) for x in (inputs, exact_inputs))
    return {
        "exact": error(torch.nn.functional.scaled_dot_product_attention(*inputs, **options), truth),
        "within": None if whole is None else error(hea.attention(whole, *inputs, **options), truth),
        "at": error(ours, reference),
        "approximation": error(reference, truth),
        "in_all": error(ours, truth),
    }


def _whole(config: MethodConfig, length: int) -> MethodConfig | None:
    """The config with a budget for which sequences of this length are exact; None if there is none."""
    # A window needs the budget on both sides, and landmarks count twice.
    whole = config.with_budget(4 * length)
    return whole if whole.exact_length >= length else None


def _random_inputs(shape: tuple[int, ...], count: int) -> list[Activation]:
    generator = torch.Generator().manual_seed(0)
    return [Activation(0, *(torch.randn(shape, generator=generator) for _ in range(3)), None) for _ in range(count)]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


@app.command(epilog="Example: python -m recipes.benchmarks.half --method kdeformer,linear --dtype bfloat16,float16")
def half(
    method: commands.methods_option("all") = [],  # noqa: B006 (typer copies it)
    setting: Settings = [],  # noqa: B006
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="bfloat16, float16, or both as a list.")] = "bfloat16",
    length: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens.")] = 1024,
    budget: Annotated[int, typer.Option(metavar="N", min=1, help="Budget in columns.")] = 128,
    causal: Annotated[bool, typer.Option("--causal/--bidirectional", help="Causal attention.")] = False,
    heads: commands.NumHeads = 8,
    width: commands.HeadDim = 64,
    data: Annotated[
        pathlib.Path | None, typer.Option(metavar="FOLDER", help="Data folder; MiniLM instead of random inputs.")
    ] = None,
    count: Annotated[
        int, typer.Option("--inputs", metavar="N", min=1, help="Random inputs or books, whose errors are averaged.")
    ] = 1,
    check: commands.Check = False,
    csv: commands.Csv = None,
) -> None:
    """Measure the error of half precision, of the methods and of exact attention."""
    dtypes = [part.strip() for part in dtype.split(",")]
    for name in dtypes:
        if name not in ("bfloat16", "float16"):
            raise UnsupportedAttentionError(f"--dtype {name!r} is not one of bfloat16, float16")
    commands.check_outputs(csv, None)
    configs = parse_methods(method or METHODS, setting)
    usable = {k: v for k, v in configs.items() if not causal or method_info(v.method).causal}
    if not usable:
        raise UnsupportedAttentionError(f"--causal: {', '.join(configs)} have no causal form; choose other methods")
    if data is None:
        given, of = _random_inputs((1, heads, length, width), count), "random inputs"
    else:
        given, of = minilm_activations(data, count, length), "layers of MiniLM"
    rows: list[dict[str, Any]] = []
    for name in dtypes:
        rounded = [_rounded(one, getattr(torch, name)) for one in given]
        for label, config in tqdm(usable.items(), disable=None, leave=False):
            with torch.inference_mode():
                found = [measure(config, one, budget, causal) for one in rounded]
            rows.append({"method": label, "dtype": name, **{key: _mean([x[key] for x in found]) for key in found[0]}})
    commands.write(rows, csv)
    headers = ("dtype", "attention", "exact", "within its budget", "at its budget", "approximation", "in all")
    keys = ("exact", "within", "at", "approximation", "in_all")
    typer.echo(table(headers, [(r["dtype"], r["method"], *(_number(r[key]) for key in keys)) for r in rows]))
    kind, (_, size, tokens, dim) = "causal" if causal else "bidirectional", given[0].query.shape
    typer.echo(f"\n{len(given)} {of}, {kind}, {tokens:,} tokens, {size} heads of dimension {dim}, budget {budget}")
    if check:
        commands.conclude(verdicts(rows))


def _rounded(one: Activation, dtype: torch.dtype) -> Activation:
    return one._replace(query=one.query.to(dtype), key=one.key.to(dtype), value=one.value.to(dtype))


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def verdicts(rows: list[dict[str, Any]]) -> list[commands.Verdict]:
    """The error of every method within its budget, as a multiple of that of exact attention."""
    return [
        commands.Verdict(f"{row['method']}, {row['dtype']}: error / exact", row["within"] / row["exact"], GOAL, False)
        for row in rows
        if row["within"] is not None
    ]


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.half")
