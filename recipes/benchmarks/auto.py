"""Measure how often the heads that `auto` approximates exceed its error bound, and what its decisions cost.

    python -m recipes.benchmarks.auto --data DATA --check
    python -m recipes.benchmarks.auto --data DATA --source xquad --tokens 512,4096

The first table: a model is converted to `auto`, and the error of every head on real inputs is computed from the exact
output of all queries. An approximated head is missed if its error is above `max_error`. The sources are those of
`recipes.benchmarks.error_bound` without GPT-2, because the causal form does not decide by the data. With crossover=1,
the default here, every length is decided by the bound and every approximation is taken to pay, so that more heads are
approximated than in use.

The second table: time of the copies that tell which heads to attempt, and of the exact rows that bound the error of all
heads, as shares of exact attention in float32 (CPU time, the smallest of some runs). They do not depend on the data.

Duration: about an hour on one core with all lengths, minutes with --tokens 512,1024. Expected: at most 1 % of heads
missed; at most 5 % of exact attention's time with 4,096 tokens, and 3 % with 8,192.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

import hf_efficient_attn as hea
from hf_efficient_attn.cli import Settings, main_of, parse_lengths, parse_methods, split_list, table
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.timing import use_threads
from hf_efficient_attn.methods import MethodConfig
from hf_efficient_attn.ops.row_error import held_back_bound, screening_error
from recipes.benchmarks.error_bound import SOURCES, TOKENS, open_source
from recipes.common import commands

app = commands.new_app()

# Heads with smaller errors are exact up to rounding.
_SMALLEST = 1e-4
# Largest share of approximated heads that may be missed.
GOAL = 0.01
# Tokens -> largest share of exact attention's time.
COSTS = {4096: 0.05, 8192: 0.03}
_RUNS, _HEADS = 5, 8


def heads_of(config: MethodConfig, source: str, tokens: list[int], data: Path) -> list[dict[str, Any]]:
    """One row for each input and layer: number of heads, of approximated ones, and of those above the bound."""
    model, load = open_source(source, data, max(tokens))
    limit = config.to_dict()["max_error"]
    hea.convert(model, config)
    found = []
    for length in tokens:
        for batch in tqdm(list(load(length)), desc=f"{source}, {length}", disable=None, leave=False):
            for layer in hea.attention_error(model, batch, num_rows=None).layers:
                errors = layer.estimate.flatten()
                approximated = errors > _SMALLEST
                found.append(
                    {
                        "source": source,
                        "tokens": length,
                        "layer": layer.name,
                        "heads": errors.numel(),
                        "approximated": int(approximated.sum()),
                        "missed": int((errors > limit).sum()),
                        "error": errors.sum().item(),
                    }
                )
    return found


def cost_of(tokens: int, head_dim: int) -> tuple[float, float]:
    """CPU time of the copies and of the exact rows of all heads, as shares of that of exact attention."""
    query, key, value = torch.randn(3, _HEADS, tokens, head_dim)
    scale = head_dim**-0.5

    def exact() -> None:
        scaled_dot_product_attention(query[None], key[None], value[None])

    def copies() -> None:
        screening_error(query, key, value, scale=scale)

    def rows() -> None:
        held_back_bound(query, key, value, value, num_probes=96, num_rows=64, scale=scale, seed=0)

    seconds = [_cpu_time(work) for work in (exact, copies, rows)]
    return seconds[1] / seconds[0], seconds[2] / seconds[0]


def _cpu_time(work: Callable[[], Any]) -> float:
    """The smallest CPU time of some runs in seconds, which other work of the machine changes least."""
    seconds = []
    for _ in range(_RUNS):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


@app.command(epilog="Example: python -m recipes.benchmarks.auto --data data --source books --tokens 1024")
def auto(
    data: commands.Data = None,
    source: Annotated[
        list[str], typer.Option(metavar="NAME", show_default=False, help=f"[default: {', '.join(SOURCES[:3])}]")
    ] = [],  # noqa: B006 (typer copies it)
    tokens: commands.numbers_option("Tokens", "512,1024,2048,8192", "--tokens") = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    threads: commands.AnyThreads = 1,
    check: commands.Check = False,
    csv: commands.Csv = None,
) -> None:
    """Measure how often auto's heads exceed its error bound, and what its decisions cost."""
    sources = split_list(source) or list(SOURCES[:3])
    unknown = [name for name in sources if name not in SOURCES[:3]]
    if unknown:
        raise UnsupportedAttentionError(f"--source {unknown[0]!r} is not one of {', '.join(SOURCES[:3])}")
    commands.check_outputs(csv, None)
    (config,) = parse_methods(["auto"], ["crossover=1", *setting]).values()
    lengths = parse_lengths(tokens) or TOKENS
    found: list[dict[str, Any]] = []
    with use_threads(threads), torch.no_grad():
        for name in sources:
            found += heads_of(config, name, lengths, commands.data_folder(data))
        costs = [(length, dim, *cost_of(length, dim)) for length in COSTS for dim in (32, 64)]
    commands.write(found, csv)
    cells = []
    for name, length in [*dict.fromkeys((row["source"], row["tokens"]) for row in found), ("all", "")]:
        part = [row for row in found if name == "all" or (row["source"], row["tokens"]) == (name, length)]
        heads, approximated, missed = (sum(row[key] for row in part) for key in ("heads", "approximated", "missed"))
        error = sum(row["error"] for row in part) / heads
        share = f"{100 * missed / max(1, approximated):.2f} %"
        cells.append((name, length, heads, f"{100 * approximated / heads:.0f} %", missed, share, f"{error:.3f}"))
    typer.echo(table(("source", "tokens", "heads", "approximated", "missed", "missed", "mean error"), cells))
    cells = [
        (n, dim, *(f"{100 * x:.1f} %" for x in (first, second, first + second))) for n, dim, first, second in costs
    ]
    typer.echo("\n" + table(("tokens", "head_dim", "copies", "exact rows", "together"), cells))
    if check:
        approximated, missed = (sum(row[key] for row in found) for key in ("approximated", "missed"))
        verdicts = [commands.Verdict("heads missed", missed / max(1, approximated), GOAL, at_least=False)]
        verdicts += [
            commands.Verdict(f"cost, {n} tokens, head_dim {dim}", first + second, COSTS[n], at_least=False)
            for n, dim, first, second in costs
        ]
        commands.conclude(verdicts)


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.auto")
