"""Count the operations of the attention layers in KDEformer's Tables 1 and 2 (Zandieh et al. 2023).

    python -m recipes.benchmarks.operations
    python -m recipes.benchmarks.operations --layer biggan --budget 32,64,128 --no-time

The table covers BigGAN's attention layer at 512 pixels (4,096 queries and 1,024 keys of dimension 64, values of
dimension 256) and the two layers of T2T-ViT's tokens-to-token module (3,136 and 784 tokens of dimension 64). The
paper's 10.738 and 161.10 GFLOP for exact attention count a multiply-add as one operation and omit exponentials, at
batch sizes 8 (8 x 4096 x 1024 x (64 + 256) = 10.737 G) and 128 (128 x 3136^2 x (64 + 64) = 161.13 G, for the first
layer alone), as in the authors' `run_flop_counts.py`. Here a batch of one is counted and multiplied by the batch size.

Each method is listed at a budget (`with_budget`: the cost per query of that many exact columns) and, marked as the
authors', with the hyperparameters of their script. Those do not share one budget: KDEformer has 64 near and 128 sampled
keys on BigGAN, 32 and 98 on T2T-ViT, where Performer has 49 features. The authors' Reformer is square: on BigGAN it
runs on four quarters of the queries, with 8 rounds of 128 keys. Ours takes all 4,096 queries at once, and its 8 rounds
cover all 1,024 keys, so that it computes exactly. BigGAN omits scatterbrain and longformer, which have no rectangular
form. Times are ratios of exact attention's time to the method's in the same run
(`hf_efficient_attn.evaluation.timing`), for a batch of one and random inputs.

Duration: about a minute on one core. Expected: how many times fewer products than exact attention the authors'
hyperparameters need (the paper's figure in parentheses): BigGAN kdeformer 3.02 (4.14), performer 6.27 (6.38); T2T-ViT
kdeformer 18.8 (18.3), reformer 14.2 (13.8), performer 30.9 (31.8), scatterbrain 19.9 (22.4). On BigGAN PyTorch's kernel
takes keys of the dimension of the values, so that scores cost four times as much. Counting exponentials, sorts and
gathers changes little: kdeformer 2.97 and 18.0. The times differ: on one core kdeformer is 2 and 3.5 times faster than
exact attention, performer 6 and 13 times.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import typer
from torch import Tensor
from tqdm import tqdm

from hf_efficient_attn.cli import Settings, main_of, parse_lengths, parse_methods
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.timing import UNSTEADY, Timing, paired, use_threads
from hf_efficient_attn.methods import MethodConfig, method_info
from recipes.common import commands
from recipes.common.counting import Operations, compute, count

app = commands.new_app()


@dataclass(frozen=True)
class Layer:
    """An attention layer of the paper, with one head.

    Attributes:
        title: name in the table.
        batch: batch size of the paper.
        queries: number of queries.
        keys: number of keys.
        head_dim: dimension of queries and keys.
        value_dim: dimension of the values.
        paper: the paper's GFLOP at `batch`, by method.
        authors: hyperparameters of the authors' script, by method.
    """

    title: str
    batch: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    paper: dict[str, float]
    authors: dict[str, dict[str, int | str]]

    def inputs(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Random query (1, 1, Nq, D), key (1, 1, Nk, D) and value (1, 1, Nk, Dv)."""
        draw = torch.Generator().manual_seed(seed)
        sizes = ((self.queries, self.head_dim), (self.keys, self.head_dim), (self.keys, self.value_dim))
        query, key, value = (torch.randn(1, 1, *size, generator=draw) for size in sizes)
        return query, key, value


_T2T_AUTHORS = {
    "kdeformer": {"block_size": 32, "num_samples": 98, "num_hashes": 7},
    "performer": {"num_features": 49},
    "reformer": {"block_size": 49, "num_hashes": 2},
    "scatterbrain": {"block_size": 49, "num_features": 48},
}
LAYERS = {
    "biggan": Layer(
        "BigGAN, 512 pixels (Table 1)", 8, 4096, 1024, 64, 256,
        {"sdpa": 10.738, "reformer": 10.872, "performer": 1.682, "scatterbrain": 2.891, "kdeformer": 2.596},
        {
            "kdeformer": {"block_size": 64, "num_samples": 128, "num_hashes": 7},
            "performer": {"num_features": 128},
            "reformer": {"block_size": 64, "num_hashes": 8},
        },
    ),
    "t2t.0": Layer(
        "T2T-ViT, first layer (Table 2)", 128, 3136, 3136, 64, 64,
        {"sdpa": 161.10, "reformer": 11.71, "performer": 5.06, "scatterbrain": 7.18, "kdeformer": 8.80},
        _T2T_AUTHORS,
    ),
    "t2t.1": Layer("T2T-ViT, second layer", 128, 784, 784, 64, 64, {}, _T2T_AUTHORS),
}  # fmt: skip
METHODS = (
    "nearfar", "kdeformer", "hyperattention", "reformer", "performer", "scatterbrain", "linear", "nystromformer",
    "wildcat", "thinformer",
)  # fmt: skip


def settings(layer: Layer, configs: dict[str, MethodConfig], budgets: list[int]) -> Iterator[tuple[str, str, Any]]:
    """Name, setting and config of every possible method: at each budget, and with the authors' hyperparameters."""
    square = layer.queries == layer.keys
    for name, config in configs.items():
        info = method_info(config.method)
        if not (square or info.rectangular):
            continue
        for budget in budgets:
            with contextlib.suppress(UnsupportedAttentionError):
                yield name, f"budget {budget}", config.with_budget(budget)
        if name in layer.authors:
            yield name, "authors'", info.config_class(**layer.authors[name])


def measure(
    layer: Layer,
    configs: dict[str, MethodConfig],
    budgets: list[int],
    *,
    rounds: int,
    as_one: bool = True,
    bar: tqdm | None = None,
) -> list[dict[str, Any]]:
    """Count and time exact attention and every setting, at the batch size of the layer.

    Args:
        layer: the layer.
        configs: the methods, by label.
        budgets: budgets in columns.
        rounds: number of paired timings of each setting; 0 for none.
        as_one: count a multiply-add as one operation.
        bar: progress bar of the timings.
    """
    inputs = layer.inputs()
    wanted = [("sdpa", "", None), *settings(layer, configs, budgets)]
    with torch.inference_mode():
        timed: dict[tuple[str, str], Timing] = {}
        if rounds:
            calls = {(name, how): lambda c=config: compute(c, inputs) for name, how, config in wanted[1:]}
            timed = paired(lambda: compute(None, inputs), calls, rounds, bar)[1]
        rows: list[dict[str, Any]] = []
        for name, how, config in wanted:
            found = count(lambda c=config: compute(c, inputs), multiply_adds_as_one=as_one)
            ours = {part: layer.batch * number for part, number in found._asdict().items()}
            exact = rows[0] if rows else {**ours, "total": layer.batch * found.total}
            paper = layer.paper.get(name)
            time = timed.get((name, how))
            rows.append(
                {"layer": layer.title, "method": name, "setting": how, **ours, "total": layer.batch * found.total}
                | {"fewer_products": exact["products"] / max(ours["products"], 1)}
                | {"fewer": exact["total"] / max(layer.batch * found.total, 1)}
                | {"paper_gflop": paper, "paper_fewer": paper and layer.paper["sdpa"] / paper}
                | {"times_faster": time and time.ratio, "unsteady": bool(time and time.unsteady)}
            )
    return rows


@app.command(epilog="Example: python -m recipes.benchmarks.operations --layer t2t.0 --method kdeformer --budget 98,130")
def operations_table(
    layer: commands.option(list[str], f"{', '.join(LAYERS)}. [default: all]") = [],  # noqa: B006 (typer copies it)
    method: commands.methods_option("the paper's and more") = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    budget: commands.numbers_option("Budgets in columns", "128") = [],  # noqa: B006
    as_one: commands.option(
        bool, "Count as in the paper, or as torch.", "--multiply-adds-as-one/--multiply-adds-as-two"
    ) = True,
    time: commands.option(bool, "Time the methods too.", "--time/--no-time") = True,
    rounds: commands.Rounds = 5,
    threads: commands.Threads = 1,
    csv: commands.Csv = None,
) -> None:
    """Count and time the attention layers of the paper's two models, by method."""
    commands.check_known("--layer", layer, LAYERS)
    commands.check_outputs(csv, None)
    configs, budgets = parse_methods(method or METHODS, setting), parse_lengths(budget) or [128]
    chosen = {name: LAYERS[name] for name in layer or LAYERS}
    rows: list[dict[str, Any]] = []
    steps = sum(len(list(settings(one, configs, budgets))) for one in chosen.values()) * rounds if time else 0
    with use_threads(threads), tqdm(total=steps, unit="pair", disable=None if time else True, leave=False) as bar:
        for one in chosen.values():
            rows += measure(one, configs, budgets, rounds=rounds if time else 0, as_one=as_one, bar=bar)
    commands.write(rows, csv)
    columns = {"attention": "{method}", "setting": "{setting}", **{k: f"{{giga_{k}:.3f}}" for k in Operations._fields}}
    columns |= {"products, fewer": "{fewer_products:.2f}x", "all, fewer": "{fewer:.2f}x", "paper": "{paper_gflop:g}"}
    columns |= {"paper, fewer": "{paper_fewer:.2f}x"} | ({"times faster": "{times_faster:.1f}x"} if time else {})
    for row in rows:
        row |= {f"giga_{key}": row[key] / 1e9 for key in Operations._fields}
    for one in chosen.values():
        typer.echo(
            f"\n{one.title}: {one.queries} x {one.head_dim} queries, {one.keys} keys, values of {one.value_dim}\n"
        )
        commands.show([row for row in rows if row["layer"] == one.title], columns)
        omitted = [
            name for name, c in configs.items() if one.queries != one.keys and not method_info(c.method).rectangular
        ]
        if omitted:
            typer.echo(f"\nOmitted, since they have no rectangular form: {', '.join(omitted)}.")
    how = "one operation" if as_one else "two operations"
    typer.echo(f"\nIn 10^9, at the paper's batch sizes of 8 (BigGAN) and 128; a multiply-add counts as {how}.")
    if any(row["unsteady"] for row in rows):
        typer.echo(UNSTEADY)


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.operations")
