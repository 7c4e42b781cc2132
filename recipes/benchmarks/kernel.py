"""Count the kernel evaluations of the approximate Gaussian kernel product for growing n.

    python -m recipes.benchmarks.kernel                    (512 .. 32768 points)
    python -m recipes.benchmarks.kernel --length 512,1024,2048 --runs 1

The data satisfies the sparsity assumption of the paper. It consists of clusters of 16 keys and 16 queries in `width`
dimensions. The centres spread as n grows, so that the kernel values of a query sum to about 1 over the keys of all
other clusters, and to somewhat less than 16 over those of its own. x has random signs (or is normal), so that the norm
of the product is several times |x| and y = 0 is not within the allowed error. For every n the table shows the error |Kx
- y| / |x| and the cost of one entry of y in kernel evaluations, including projections on random directions, which cost
about as much. The fitted exponent is the slope of log(total cost) against log n by least squares, over all lengths and
over those where the approximation is not the exact product. The exact product has exponent 2.

Duration: 3 to 5 minutes on one core. Expected: exact products up to 1024 points, and an exponent of 1.5 to 1.6 beyond
(near 2 in the last step); a third of the exact product's cost at 8192 points and a fifth at 32768; errors of a third of
eps, since the bounds are loose. These are counts, not times: an evaluation gathers two points here and takes much
longer than in a matrix product, so that `kernel_matvec` is faster at all these lengths.
"""

import math
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import typer
from torch import Tensor
from tqdm import tqdm

import hf_efficient_attn as hea
from hf_efficient_attn.cli import main_of, parse_lengths
from hf_efficient_attn.errors import UnsupportedAttentionError
from recipes.common.commands import Csv, Plot, Row, check_outputs, new_app, numbers_option, option, show, write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

app = new_app()

LENGTHS = [512, 1024, 2048, 4096, 8192, 16384, 32768]
CLUSTER = 16
# Number of entries of y that are compared with the exact product, spread over all of them.
CHECKED = 2048


def clustered(length: int, width: int, seed: int, normal: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys (length, width) and x (length,), as described above."""
    generator = torch.Generator().manual_seed(seed)
    # The mean of exp(-|a - b|^2 / 2) of two centres is (1 + 2 spread^2)^(-width / 2) = 1 / length.
    spread = math.sqrt((length ** (2 / width) - 1) / 2)
    centres = spread * torch.randn(length // CLUSTER, width, generator=generator)
    centres = centres.repeat_interleave(CLUSTER, 0)
    queries, keys = (centres + 0.15 * torch.randn(centres.shape, generator=generator) for _ in range(2))
    x = torch.randn(len(centres), generator=generator)
    return queries, keys, x if normal else x.sign()


def measure(length: int, width: int, eps: float, delta: float, seed: int, normal: bool = False) -> dict[str, Any]:
    """Measure one product: its cost per entry, its error (estimated from `CHECKED` entries) and the norm of K x."""
    queries, keys, x = clustered(length, width, seed, normal)
    start = time.perf_counter()
    y, report = hea.kernel.approx_kernel_matvec(queries, keys, x, bandwidth=1.0, eps=eps, delta=delta, seed=seed)
    seconds = time.perf_counter() - start
    step = max(1, length // CHECKED)
    exact = hea.kernel.kernel_matvec(queries[::step], keys, x, bandwidth=1.0)
    scale = math.sqrt(length / len(exact)) / x.norm().item()
    return {
        "length": length,
        "error": (y[::step] - exact).norm().item() * scale,
        "norm": exact.norm().item() * scale,
        "exact": report.exact,
        "heavy_coordinates": report.heavy_coordinates,
        "heavy_keys": report.heavy_keys.double().mean().item(),
        "light_samples": report.light_samples / length,
        "evaluations": report.evaluations / length,
        "projections": report.projections / length,
        "seconds": seconds,
    }


def exponent(lengths: list[int], costs: list[float]) -> float | None:
    """Slope of log(length * cost) against log(length) by least squares; None for fewer than two lengths."""
    if len(set(lengths)) < 2:
        return None
    logs = [math.log(n) for n in lengths]
    return statistics.linear_regression(logs, [math.log(n * c) for n, c in zip(lengths, costs, strict=True)]).slope


def draw(rows: Sequence[Row]) -> "Figure":
    """Plot the total cost against n, next to n^2."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    lengths = [row["length"] for row in rows]
    axes.plot(lengths, [n * n for n in lengths], color="0.6", label="exact")
    for key, label in (("total", "with projections"), ("evaluations", "kernel evaluations")):
        axes.plot(lengths, [n * r[key] for n, r in zip(lengths, rows, strict=True)], marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="points", ylabel="evaluations")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


@app.command(epilog="Example: python -m recipes.benchmarks.kernel --length 1024,2048,4096 --eps 0.5 --runs 3")
def kernel(
    length: numbers_option("Points", "512..32768") = [],  # noqa: B006 (typer copies it)
    width: option(int, "Dimension of the points.", min=1) = 16,
    eps: option(float, "Allowed error, as a multiple of |x|.") = 0.3,
    delta: option(float, "Probability of a larger error.") = 0.1,
    normal: option(bool, "Values of x.", "--normal/--signs") = False,
    runs: option(int, "Data sets for each length.", min=1) = 1,
    seed: option(int, "Seed of the first data set.", min=0) = 0,
    csv: Csv = None,
    plot: Plot = None,
) -> None:
    """Count the evaluations of the approximate kernel product on clustered data, and fit their growth."""
    lengths = sorted(set(parse_lengths(length))) or LENGTHS
    if lengths[0] < CLUSTER:
        raise UnsupportedAttentionError(f"--length {lengths[0]}: give at least one cluster of {CLUSTER} points")
    lengths = [n // CLUSTER * CLUSTER for n in lengths]
    check_outputs(csv, plot)
    rows = []
    with tqdm(total=sum(lengths) * runs, unit="point", disable=None, leave=False) as bar:
        for n in lengths:
            bar.set_description(str(n))
            found = []
            for run in range(runs):
                found.append(measure(n, width, eps, delta, seed + run, normal))
                bar.update(n)
            row = {key: statistics.mean(f[key] for f in found) for key in found[0]} | {"length": n}
            row |= {"error": max(f["error"] for f in found), "total": row["evaluations"] + row["projections"]}
            rows.append(row)
    write(rows, csv, plot, draw)
    approximated = ("heavy_coordinates", "heavy_keys")
    shown = [{**row, "of_n": row["total"] / row["length"], "off": f"{row['error']:.3f}"} for row in rows]
    exact = {"off": "exact", **dict.fromkeys(approximated)}
    columns = {
        "n": "{length}", "error": "{off}", "norm of Kx": "{norm:.2f}", "H": "{heavy_coordinates:.0f}",
        "S_i": "{heavy_keys:.1f}", "draws": "{light_samples:.0f}", "evaluations": "{evaluations:.0f}",
        "projections": "{projections:.0f}", "of n": "{of_n:.2f}", "seconds": "{seconds:.1f}",
    }  # fmt: skip
    show([row | exact if row["exact"] > 0 else row for row in shown], columns)
    typer.echo(
        f"\nerror and norm in units of |x|; S_i to projections per entry of y, `of n`: sum of the last two over n; "
        f"eps {eps}, delta {delta}, width {width}, {'normal x' if normal else 'random signs'}"
    )
    own = [row for row in rows if row["exact"] == 0]
    for what, some in (("all lengths", rows), ("those not computed exactly", own)):
        for key, name in (("evaluations", "evaluations"), ("total", "evaluations and projections")):
            slope = exponent([row["length"] for row in some], [row[key] for row in some])
            typer.echo(f"exponent of {name}, {what}: {'too few lengths' if slope is None else f'{slope:.2f}'}")


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.kernel")
