"""Count the operations of the attention layers in KDEformer's Tables 1 and 2 (Zandieh et al. 2023).

    python -m recipes.benchmarks.operations
    python -m recipes.benchmarks.operations --layer biggan --budget 32,64,128

The table covers BigGAN's attention layer at 512 pixels and the two layers of T2T-ViT's tokens-to-token module. A
multiply-add counts as one operation, and exponentials are not part of the products, as in the paper and in the authors'
`run_flop_counts.py`. A batch of one is counted and multiplied by the paper's batch size of 8 (BigGAN) or 128.

Each method is listed at a budget (`with_budget`: the cost per query of that many exact columns) and, marked as the
authors', with the hyperparameters of their script, which do not share one budget. The authors' Reformer is square: on
BigGAN it runs on four quarters of the queries. Ours takes all 4,096 queries at once, and its 8 rounds of 128 keys cover
all 1,024 keys, so that it computes exactly. BigGAN omits methods without a rectangular form. Times are ratios of exact
attention's time to the method's in the same run (`recipes.common.memory.paired`), for a batch of one.

Duration: about a minute on one core. Expected: the table of recipes/README.md.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import typer
from torch import Tensor
from tqdm import tqdm

from hf_efficient_attn.cli import main_of, parse_lengths, parse_methods
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.timing import use_threads
from hf_efficient_attn.methods import MethodConfig, method_info
from recipes.common import commands
from recipes.common.counting import Operations, compute, count
from recipes.common.memory import paired

app = commands.new_app()


class Layer(NamedTuple):
    """An attention layer of the paper, with one head."""

    title: str  # name in the table
    batch: int  # batch size of the paper
    queries: int  # number of queries
    keys: int  # number of keys
    value_dim: int  # dimension of the values. Queries and keys have 64
    paper: dict[str, float]  # the paper's GFLOP at `batch`, by method
    authors: dict[str, dict[str, int | str]]  # hyperparameters of the authors' script, by method

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Random query (1, 1, Nq, 64), key (1, 1, Nk, 64) and value (1, 1, Nk, Dv)."""
        draw = torch.Generator().manual_seed(0)
        sizes = ((self.queries, 64), (self.keys, 64), (self.keys, self.value_dim))
        query, key, value = (torch.randn(1, 1, *size, generator=draw) for size in sizes)
        return query, key, value

    def settings(self, configs: dict[str, MethodConfig], budgets: list[int]) -> Iterator[tuple[str, str, Any]]:
        """Name, setting and config of every possible method: at each budget, and as the authors have it."""
        for name, config in configs.items():
            info = method_info(config.method)
            if self.queries != self.keys and not info.rectangular:
                continue
            for budget in budgets:
                with contextlib.suppress(UnsupportedAttentionError):
                    yield name, f"budget {budget}", config.with_budget(budget)
            if name in self.authors:
                yield name, "authors'", info.config_class(**self.authors[name])


_T2T_AUTHORS = {
    "kdeformer": {"block_size": 32, "num_samples": 98, "num_hashes": 7},
    "performer": {"num_features": 49},
    "reformer": {"block_size": 49, "num_hashes": 2},
    "scatterbrain": {"block_size": 49, "num_features": 48},
}
LAYERS = {
    "biggan": Layer(
        "BigGAN, 512 pixels (Table 1)", 8, 4096, 1024, 256,
        {"sdpa": 10.738, "reformer": 10.872, "performer": 1.682, "scatterbrain": 2.891, "kdeformer": 2.596},
        {
            "kdeformer": {"block_size": 64, "num_samples": 128, "num_hashes": 7},
            "performer": {"num_features": 128},
            "reformer": {"block_size": 64, "num_hashes": 8},
        },
    ),
    "t2t.0": Layer(
        "T2T-ViT, first layer (Table 2)", 128, 3136, 3136, 64,
        {"sdpa": 161.10, "reformer": 11.71, "performer": 5.06, "scatterbrain": 7.18, "kdeformer": 8.80},
        _T2T_AUTHORS,
    ),
    "t2t.1": Layer("T2T-ViT, second layer", 128, 784, 784, 64, {}, _T2T_AUTHORS),
}  # fmt: skip
METHODS = (
    "nearfar", "kdeformer", "hyperattention", "reformer", "performer", "scatterbrain", "linear", "nystromformer",
    "wildcat", "thinformer",
)  # fmt: skip
COLUMNS = {
    "attention": "{method}", "setting": "{setting}", **{k: f"{{giga_{k}:.3f}}" for k in Operations._fields},
    "products, fewer": "{fewer_products:.2f}x", "all, fewer": "{fewer:.2f}x", "paper": "{paper_gflop:g}",
    "paper, fewer": "{paper_fewer:.2f}x", "times faster": "{times_faster:.1f}x",
}  # fmt: skip


@torch.inference_mode()
def measure(layer: Layer, configs: dict[str, MethodConfig], budgets: list[int], *, rounds: int) -> list[dict[str, Any]]:
    """Count and time exact attention and every setting, at the batch size of the layer."""
    inputs = layer.inputs()
    wanted = [("sdpa", "", None), *layer.settings(configs, budgets)]
    calls = {(name, how): lambda c=config: compute(c, inputs) for name, how, config in wanted[1:]}
    timed = paired(lambda: compute(None, inputs), calls, rounds)[1]
    rows: list[dict[str, Any]] = []
    for name, how, config in wanted:
        counts = count(lambda c=config: compute(c, inputs), multiply_adds_as_one=True)
        found = {part: layer.batch * number for part, number in counts._asdict().items()}
        found |= {"total": sum(found.values()), **{f"giga_{part}": number / 1e9 for part, number in found.items()}}
        exact, paper, time = (rows or [found])[0], layer.paper.get(name), timed.get((name, how))
        rows.append({
            "layer": layer.title, "method": name, "setting": how, **found,
            "fewer_products": exact["products"] / max(found["products"], 1),
            "fewer": exact["total"] / max(found["total"], 1), "paper_gflop": paper,
            "paper_fewer": paper and layer.paper["sdpa"] / paper, "times_faster": time and time.ratio,
            "unsteady": bool(time and time.unsteady),
        })  # fmt: skip
    return rows


@app.command(epilog="Example: python -m recipes.benchmarks.operations --layer t2t.0 --method kdeformer --budget 98,130")
def operations_table(
    layer: commands.option(list[str], f"{', '.join(LAYERS)}. [default: all]") = [],  # noqa: B006 (typer copies it)
    method: commands.methods_option("the paper's and more") = [],  # noqa: B006
    budget: commands.numbers_option("Budgets in columns", "128") = [],  # noqa: B006
    rounds: commands.Rounds = 5,
    threads: commands.Threads = 1,
    csv: commands.Csv = None,
) -> None:
    """Count and time the attention layers of the paper's two models, by method."""
    commands.check_known("--layer", layer, LAYERS)
    configs, budgets = parse_methods(method or METHODS), parse_lengths(budget) or [128]
    rows: list[dict[str, Any]] = []
    for one in tqdm([LAYERS[name] for name in layer or LAYERS], disable=None, leave=False):
        with use_threads(threads):
            rows += (found := measure(one, configs, budgets, rounds=rounds))
        typer.echo(f"\n{one.title}: {one.queries} x 64 queries, {one.keys} keys, values of {one.value_dim}\n")
        names = [k for k, c in configs.items() if one.queries != one.keys and not method_info(c.method).rectangular]
        note = f"Omitted, since they have no rectangular form: {', '.join(names)}.\n" if names else ""
        note += f"In 10^9, at the paper's batch size of {one.batch}; a multiply-add counts as one operation."
        commands.report(found, COLUMNS, note)
    commands.write(rows, csv)


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.operations")
