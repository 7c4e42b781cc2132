"""Measure whether `auto` is ever slower than exact attention or `nearfar`, at any length.

    python -m recipes.benchmarks.never_slower --tokens 128,512,1024,2048,4096 --check
    python -m recipes.benchmarks.never_slower --case minilm --data DATA --tokens 8192 --rounds 1

The times of `nearfar` and `auto`, both with their defaults, and of `auto` without a bound of the error (max_error=0)
are divided by that of exact attention, PyTorch's `scaled_dot_product_attention`. `auto` may not be slower than exact
attention, and without a bound not slower than the faster of exact attention and `nearfar`. With a bound it is slower
than `nearfar` wherever `nearfar` alone would exceed it in some heads. Each call follows one of exact attention, and the
median of the ratios is taken. The cases are one sequence with 12 heads:

- bert: head_dim 64, normal numbers. Every head needs exact attention up to long sequences.
- gpt2: the same, causal.
- minilm: head_dim 32, the inputs of every second attention layer of MiniLM for a novel, one after the other. `auto`
  has to find the heads that it can approximate.

Run it on an otherwise idle machine, after `hf-efficient-attn crossover` has measured the machine.

Duration: a minute for up to 2,048 tokens and some minutes for 16,384. Expected: at most 1.05 in the last
column.
"""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import hf_efficient_attn as hea
from hf_efficient_attn.cli import main_of, parse_lengths, split_list, table
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.capture import Call, capture_attention, forward
from hf_efficient_attn.evaluation.timing import Timing, Work, summary, time_calls, use_threads
from hf_efficient_attn.methods import MethodConfig, make_config
from recipes.benchmarks.error_bound import open_source
from recipes.common import commands

app = commands.new_app()

CASES = ("bert", "gpt2", "minilm")
TOKENS = [128, 256, 512, 1024, 2048, 4096, 8192, 16384]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Largest time of auto, divided by that of exact attention, and without a bound by that of the faster one.
GOAL = 1.05
UNBOUNDED = "auto, no bound"
_HEADS, _HEAD_DIM, _EVERY = 12, 64, 2
_SECONDS, _MOST_ROUNDS = 1.0, 300

# Query, key and value (1, H, N, D) of each layer.
Layers = list[tuple[Tensor, Tensor, Tensor]]


def layers_of(case: str, tokens: int, data: Path | None) -> Layers:
    """The inputs of a case, in float32."""
    if case != "minilm":
        generator = torch.Generator().manual_seed(0)
        query, key, value = torch.randn(3, 1, _HEADS, tokens, _HEAD_DIM, generator=generator)
        return [(query, key, value)]
    model, load = open_source("books", commands.data_folder(data), tokens)
    found: Layers = []

    def visit(call: Call) -> None:
        found.append((call.query, call.key, call.value))

    with capture_attention(model, visit):
        forward(model, next(load(tokens)))
    return found[::_EVERY]


def works_of(layers: Layers, is_causal: bool) -> dict[str, Work]:
    """Functions that compute all layers: exactly, and by the methods."""

    def exact() -> None:
        for query, key, value in layers:
            scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    def by(config: MethodConfig) -> Work:
        def compute() -> None:
            for query, key, value in layers:
                hea.attention(config, query, key, value, is_causal=is_causal)

        return compute

    configs = {
        "nearfar": make_config("nearfar"),
        "auto": make_config("auto"),
        UNBOUNDED: make_config("auto", max_error=0.0),
    }
    return {"exact": exact, **{name: by(config) for name, config in configs.items()}}


def compare(exact: Work, work: Work, rounds: int) -> Timing:
    """Time both in turn, call by call, at least `rounds` times and short calls until they take `_SECONDS` together."""
    time_calls(exact), time_calls(work)
    pairs: list[tuple[float, float]] = []
    while len(pairs) < rounds or (sum(map(sum, pairs)) < _SECONDS and len(pairs) < _MOST_ROUNDS):
        reference = time_calls(exact)
        pairs.append((time_calls(work), reference))
    return summary(pairs)


def measure(case: str, layers: Layers, dtype: str, rounds: int) -> dict[str, Any]:
    """Times relative to exact attention, and the larger of the two that have a goal."""
    typed = [(q.to(DTYPES[dtype]), k.to(DTYPES[dtype]), v.to(DTYPES[dtype])) for q, k, v in layers]
    works = works_of(typed, case == "gpt2")
    exact = works.pop("exact")
    timings = {name: compare(exact, work, rounds) for name, work in works.items()}
    times = {name: 1.0 / timing.ratio for name, timing in timings.items()}
    return {
        "case": case,
        "dtype": dtype,
        "tokens": layers[0][0].shape[2],
        "exact, ms": 1e3 * timings["auto"].reference_seconds,
        **times,
        "largest": max(times["auto"], times[UNBOUNDED] / min(1.0, times["nearfar"])),
    }


@app.command(epilog="Example: python -m recipes.benchmarks.never_slower --case bert,gpt2 --tokens 128,512 --check")
def never_slower(
    data: commands.Data = None,
    case: Annotated[
        list[str], typer.Option(metavar="NAME", show_default=False, help=f"[default: {', '.join(CASES)}]")
    ] = [],  # noqa: B006 (typer copies it)
    dtype: Annotated[
        list[str], typer.Option(metavar="NAME", show_default=False, help=f"[default: {', '.join(DTYPES)}]")
    ] = [],  # noqa: B006
    tokens: commands.numbers_option("Tokens", "128,256,512,...,16384", "--tokens") = [],  # noqa: B006
    rounds: commands.Rounds = 5,
    threads: commands.AnyThreads = None,
    check: commands.Check = False,
    csv: commands.Csv = None,
) -> None:
    """Compare the time of auto with those of exact attention and nearfar."""
    cases, dtypes = split_list(case) or list(CASES), split_list(dtype) or list(DTYPES)
    for option, given, known in (("--case", cases, CASES), ("--dtype", dtypes, tuple(DTYPES))):
        for name in given:
            if name not in known:
                raise UnsupportedAttentionError(f"{option} {name!r} is not one of {', '.join(known)}")
    commands.check_outputs(csv, None)
    found: list[dict[str, Any]] = []
    with use_threads(threads), torch.no_grad():
        for name in cases:
            for length in parse_lengths(tokens) or TOKENS:
                layers = layers_of(name, length, data)
                found += [measure(name, layers, kind, rounds) for kind in dtypes]
    commands.write(found, csv)
    titles = ("case", "dtype", "tokens", "exact, ms", "nearfar", "auto", UNBOUNDED, "largest")
    formats = ("", "", "", ".3g", ".2f", ".2f", ".2f", ".2f")
    cells = [[format(row[name], spec) for name, spec in zip(titles, formats, strict=True)] for row in found]
    typer.echo(table(titles, cells))
    if check:
        commands.conclude(
            [
                commands.Verdict(f"{r['case']}, {r['dtype']}, {r['tokens']}", r["largest"], GOAL, at_least=False)
                for r in found
            ]
        )


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.never_slower")
