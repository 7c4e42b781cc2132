"""Count the kernel evaluations of the approximate Gaussian kernel product for growing n.

    python -m recipes.benchmarks.kernel                    (512 .. 32768 points)
    python -m recipes.benchmarks.kernel --length 512,1024,2048

The data satisfies the sparsity assumption of the paper: clusters of 16 keys and 16 queries in 16 dimensions, whose
centres spread as n grows, so that the kernel values of a query sum to about 1 over the keys of all other clusters. x
has random signs, so that the norm of the product is several times |x|. For every n the table shows the error |Kx - y| /
|x| and the cost of one entry of y in kernel evaluations, including projections on random directions, which cost about
as much. The exponent is the slope of log(total cost) against log n by least squares; the exact product has 2.

Duration: 3 to 5 minutes on one core. Expected: exact products up to 1024 points, and an exponent of 1.5 to 1.6 beyond;
a third of the exact product's cost at 8192 points and a fifth at 32768; errors of a third of eps, since the bounds are
loose. These are counts: an evaluation takes much longer than in a matrix product, so that `kernel_matvec` is faster at
all these lengths.
"""

import math
import statistics
import time
from typing import Any

import torch
import typer
from torch import Tensor
from tqdm import tqdm

import hf_efficient_attn as hea
from hf_efficient_attn.cli import main_of, parse_lengths
from hf_efficient_attn.errors import UnsupportedAttentionError
from recipes.common.commands import Csv, new_app, numbers_option, show, write

app = new_app()

LENGTHS = [512, 1024, 2048, 4096, 8192, 16384, 32768]
CLUSTER, WIDTH = 16, 16
# Allowed error as a multiple of |x|, and the probability of a larger one.
EPS, DELTA = 0.3, 0.1
# Number of entries of y that are compared with the exact product, spread over all of them.
CHECKED = 2048


def clustered(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys (length, WIDTH) and x (length,), as described above."""
    generator = torch.Generator().manual_seed(0)
    # The mean of exp(-|a - b|^2 / 2) of two centres is (1 + 2 spread^2)^(-WIDTH / 2) = 1 / length.
    spread = math.sqrt((length ** (2 / WIDTH) - 1) / 2)
    centres = spread * torch.randn(length // CLUSTER, WIDTH, generator=generator)
    centres = centres.repeat_interleave(CLUSTER, 0)
    queries, keys = (centres + 0.15 * torch.randn(centres.shape, generator=generator) for _ in range(2))
    x = torch.randn(len(centres), generator=generator)
    return queries, keys, x.sign()


def measure(length: int) -> dict[str, Any]:
    """Measure one product: its cost per entry, its error (estimated from `CHECKED` entries) and the norm of K x."""
    queries, keys, x = clustered(length)
    start = time.perf_counter()
    y, report = hea.kernel.approx_kernel_matvec(queries, keys, x, bandwidth=1.0, eps=EPS, delta=DELTA, seed=0)
    seconds, step = time.perf_counter() - start, max(1, length // CHECKED)
    exact = hea.kernel.kernel_matvec(queries[::step], keys, x, bandwidth=1.0)
    scale = math.sqrt(length / len(exact)) / x.norm().item()
    counts = {"evaluations": report.evaluations / length, "projections": report.projections / length}
    total = sum(counts.values())
    return {
        "length": length, "error": (y[::step] - exact).norm().item() * scale, "norm": exact.norm().item() * scale,
        "exact": report.exact, "heavy_coordinates": report.heavy_coordinates,
        "heavy_keys": report.heavy_keys.double().mean().item(), "light_samples": report.light_samples / length,
        **counts, "total": total, "of_n": total / length, "seconds": seconds,
    }  # fmt: skip


def exponent(lengths: list[int], costs: list[float]) -> float | None:
    """Slope of log(length * cost) against log(length) by least squares; None for fewer than two lengths."""
    if len(set(lengths)) < 2:
        return None
    logs = [(math.log(n), math.log(n * cost)) for n, cost in zip(lengths, costs, strict=True)]
    return statistics.linear_regression(*zip(*logs, strict=True)).slope


COLUMNS = {
    "n": "{length}", "error": "{off}", "norm of Kx": "{norm:.2f}", "H": "{heavy_coordinates:.0f}",
    "S_i": "{heavy_keys:.1f}", "draws": "{light_samples:.0f}", "evaluations": "{evaluations:.0f}",
    "projections": "{projections:.0f}", "of n": "{of_n:.2f}", "seconds": "{seconds:.1f}",
}  # fmt: skip


@app.command(epilog="Example: python -m recipes.benchmarks.kernel --length 1024,2048,4096")
def kernel(
    length: numbers_option("Points", "512..32768") = [],  # noqa: B006 (typer copies it)
    csv: Csv = None,
) -> None:
    """Count the evaluations of the approximate kernel product on clustered data, and fit their growth."""
    lengths = sorted(set(parse_lengths(length))) or LENGTHS
    if lengths[0] < CLUSTER:
        raise UnsupportedAttentionError(f"--length {lengths[0]}: give at least one cluster of {CLUSTER} points")
    rows = [measure(n // CLUSTER * CLUSTER) for n in tqdm(lengths, disable=None, leave=False)]
    write(rows, csv)
    exact = {"off": "exact", "heavy_coordinates": None, "heavy_keys": None}
    show([{**row, "off": f"{row['error']:.3f}"} | (exact if row["exact"] else {}) for row in rows], COLUMNS)
    typer.echo(
        f"\nerror and norm in units of |x|; S_i to projections per entry of y, `of n`: sum of the last two over n; "
        f"eps {EPS}, delta {DELTA}, width {WIDTH}, random signs"
    )
    for what, some in (("all lengths", rows), ("those not computed exactly", [r for r in rows if not r["exact"]])):
        for key, name in (("evaluations", "evaluations"), ("total", "evaluations and projections")):
            slope = exponent([row["length"] for row in some], [row[key] for row in some])
            typer.echo(f"exponent of {name}, {what}: {'too few lengths' if slope is None else f'{slope:.2f}'}")


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.kernel")
