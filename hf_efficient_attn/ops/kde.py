"""Gaussian kernels by hashing: tables of a Euclidean hash, pairs that share a bucket, and density estimates from them.

The hash is that of Datar, Immorlica, Indyk and Mirrokni (2004): a point falls into cell floor((a . x + b) / width) of a
random direction a and shift b, and `depth` such cells make a bucket. The chance that two points share one depends on
their distance alone and is known in closed form (`collision_chance`), which is what importance sampling by buckets
needs. All lengths are in units of the kernel's bandwidth: k(x, y) = exp(-|x - y|^2 / 2).
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.random import normal, uniform

# Numbers of a temporary: 32 MiB in float64.
_NUMBERS = 1 << 22
# Pairs at a time, before those that come up in several tables are made one.
_PAIRS = 1 << 21
_DRAWS = 10_000


class Hash(NamedTuple):
    """A family of tables: cells of `width` along `depth` directions make a bucket, `tables` independent times."""

    width: float
    depth: int
    tables: int


class Tables(NamedTuple):
    """Keys sorted by bucket in every table: codes and order (T, n), and the codes of the queries (T, Nq)."""

    codes: Tensor
    order: Tensor
    query_codes: Tensor


def kernel_of(squares: Tensor) -> Tensor:
    """exp(-d^2 / 2) of squared distances."""
    return torch.exp(-0.5 * squares)


def pair_kernel(queries: Tensor, keys: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """k(q_row, k_column) for pairs of indices of one shape, some at a time so that memory stays small."""
    out = queries.new_empty(row.numel())
    flat_row, flat_column = row.reshape(-1), column.reshape(-1)
    step = max(1, _NUMBERS // max(1, queries.shape[1]))
    for at in range(0, out.numel(), step):
        here = slice(at, at + step)
        difference = queries.index_select(0, flat_row[here]).sub_(keys.index_select(0, flat_column[here]))
        torch.exp(difference.square_().sum(1).mul_(-0.5), out=out[here])
    return out.view(row.shape)


def row_blocks(rows: int, columns: int) -> Iterator[slice]:
    """Slices of the rows, so many that a block of `columns` numbers a row stays small."""
    step = max(1, _NUMBERS // max(1, columns))
    return (slice(at, min(at + step, rows)) for at in range(0, rows, step))


def kernel_product(queries: Tensor, keys: Tensor, x: Tensor) -> Tensor:
    """sum_j k(q_i, k_j) x_j, exactly, in blocks of rows: (Nq, d), (n, d), (n, m) -> (Nq, m), memory linear in n."""
    out = x.new_empty(queries.shape[0], x.shape[1])
    # Distances do not change with the origin, their rounding does.
    centre = keys.mean(0) if len(keys) else 0.0
    queries, keys = queries - centre, keys - centre
    squares = keys.square().sum(1)
    for rows in row_blocks(queries.shape[0], keys.shape[0]):
        block = torch.addmm(squares, queries[rows], keys.t(), alpha=-2.0)
        block.add_(queries[rows].square().sum(1, keepdim=True)).clamp_(min=0.0)
        torch.mm(block.mul_(-0.5).exp_(), x, out=out[rows])
    return out


def collision_chance(ratio: Tensor) -> Tensor:
    """Chance that two points share a cell of one direction, by ratio = distance / width (Datar et al. 2004, 3.2)."""
    safe = ratio.clamp(min=1e-12)
    tails = torch.special.erfc(1.0 / (safe * math.sqrt(2.0)))
    slope = safe * math.sqrt(2.0 / math.pi) * -torch.expm1(-0.5 / safe.square())
    return (1.0 - tails - slope).clamp(0.0, 1.0)


def bucket_chance(distance: Tensor, family: Hash) -> Tensor:
    """Chance that two points share a bucket of one table."""
    return collision_chance(distance / family.width) ** family.depth


def _codes(points: Tensor, directions: Tensor, shifts: Tensor, factors: Tensor, family: Hash) -> Tensor:
    """(T, n) int64 codes of buckets: a random linear hash modulo 2^64 of the cells, which tells any two apart."""
    tables = directions.shape[1] // family.depth
    out = torch.empty(tables, points.shape[0], dtype=torch.int64, device=points.device)
    step = max(1, _NUMBERS // max(1, directions.shape[1]))
    for at in range(0, points.shape[0], step):
        cells = torch.addmm(shifts, points[at : at + step].to(directions.dtype), directions, alpha=1.0 / family.width)
        cells = cells.floor_().to(torch.int64).mul_(factors).view(-1, tables, family.depth)
        out[:, at : at + step] = cells.sum(2).t()
    return out


def hash_tables(queries: Tensor, keys: Tensor, family: Hash, seed, stream: int, first: int = 0) -> Tables:
    """All tables of a family; `first` is the number of the first, so that tables can be made a few at a time."""
    device, count = keys.device, family.tables * family.depth
    width, at = keys.shape[1], stream + 3 * first
    directions = normal((width, count), seed, at, device)
    shifts = uniform((count,), seed, _DRAWS * 7 + at, device)
    factors = (uniform((2, count), seed, _DRAWS * 8 + at, device) * 2.0**32).to(torch.int64)
    factors = (factors[0] << 32) + factors[1] * 2 + 1
    centre = keys.double().mean(0)  # cells far from the origin would lose their fraction
    codes, order = _codes(keys.double() - centre, directions, shifts, factors, family).sort(1)
    return Tables(codes, order, _codes(queries.double() - centre, directions, shifts, factors, family))


def bucket_bounds(tables: Tables) -> tuple[Tensor, Tensor]:
    """First place of every query's bucket among the sorted keys, and the number of keys in it: (T, Nq) each."""
    low = torch.searchsorted(tables.codes, tables.query_codes)
    return low, torch.searchsorted(tables.codes, tables.query_codes, right=True) - low


def shared_buckets(tables: Tables, at_a_time: int = _PAIRS) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """All pairs of a query i and a key j that share a bucket of any table, for some queries at a time, in their order.

    Yields:
        the slice of the queries, the sorted numbers i * n + j of their pairs, each once, and in how many tables it is.
    """
    low, size = bucket_bounds(tables)
    count, device = tables.codes.shape[1], size.device
    total = size.sum(0).cumsum(0)
    start = 0
    while start < total.numel():
        before = total[start - 1] if start else total.new_zeros(())
        end = max(start + 1, int(torch.searchsorted(total, before + at_a_time, right=True)))
        sizes, places = size[:, start:end].reshape(-1), low[:, start:end].reshape(-1)
        which = torch.repeat_interleave(torch.arange(sizes.numel(), device=device), sizes)
        inside = torch.arange(which.numel(), device=device) - (sizes.cumsum(0) - sizes)[which]
        table, row = which // (end - start), which % (end - start) + start
        numbers = row * count + tables.order[table, places[which] + inside]
        yield slice(start, end), *torch.unique(numbers, return_counts=True)
        start = end


class Choice(NamedTuple):
    """A family, its cost of a query in kernel evaluations, and the mean over pairs of k^2 that it leaves out."""

    family: Hash
    cost: float
    rest: float


def choose_hash(distances: Tensor, radius: float, miss: float, count: int, per_rest: float, most: float) -> Choice:
    """The cheapest tables that leave out a pair at distance r <= radius with a chance of at most miss / k(r).

    Cost of a query in kernel evaluations: 2 * tables * depth projections (its own and a key's), the keys in its
    buckets, and what the keys in none of them cost, `per_rest` times their mean of k^2. Both come from a sample of
    distances.

    Args:
        distances: of a sample of pairs.
        count: number of keys.
        most: cost beyond which nothing is saved.

    Returns:
        a Choice, with a cost above `most` where no family is as cheap.
    """
    near = torch.linspace(0.0, radius, 24, dtype=torch.float64, device=distances.device)
    allowed = (miss / kernel_of(near.square())).clamp(max=0.9).log()
    # Pairs within the radius are found by any of the families, and so few that a sample says nothing of them.
    far = distances[distances > radius].double()
    squares = torch.exp(-far.square())
    best = Choice(Hash(radius, 1, 1), math.inf, 0.0)
    for factor in (1.0, 1.5, 2.0, 3.0, 4.0, 6.0):
        width = factor * radius
        log_near, log_far = (collision_chance(d / width).clamp(min=1e-300).log() for d in (near, far))
        for depth in range(1, 25):
            tables = (allowed / torch.log1p(-torch.exp(depth * log_near)).clamp(max=-1e-300)).max().item()
            tables = max(1, math.ceil(tables))
            hashing = 2.0 * tables * depth
            if hashing > min(most, best.cost):
                break
            left = torch.exp(tables * torch.log1p(-torch.exp(depth * log_far).clamp(max=1.0 - 1e-12)))
            rest = (squares * left).sum().item() / max(1, distances.numel())
            found = count * (1.0 - left).sum().item() / max(1, distances.numel())
            if hashing + found + per_rest * rest < best.cost:
                best = Choice(Hash(width, depth, tables), hashing + found + per_rest * rest, rest)
    return best


class Density(NamedTuple):
    """Estimates of a density, their standard errors, and the number of kernel evaluations they took."""

    mean: Tensor
    error: Tensor
    evaluations: int


def gaussian_kde(points: Tensor, queries: Tensor, *, mu: float, tables: int, seed=0, stream: int = 90) -> Density:
    """Densities (1/n) sum_i k(q, x_i) by hashing-based importance sampling (Charikar & Siminelakis, FOCS 2017).

    In each of M tables a query picks one of the keys in its bucket at random, and that key's kernel value, times the
    bucket's size over n and over the chance of sharing a bucket, is an unbiased estimate of the density (their Section
    3, the estimator Z). The cells are such that the chance falls about like the fourth root of the kernel up to the
    distance where the kernel is mu, so that near keys are seen more often than far ones, which is what keeps the
    variance of the estimate small relative to the density. Their data structure takes medians of means of as many
    tables as a bound on the variance demands; here the mean over all tables is given back with its standard error.

    Args:
        points: (n, d); queries: (Nq, d); in units of the bandwidth.
        mu: density for which the cells are made.
        tables: M; densities of mu and more have a relative error of about (M mu^(1/2))^(-1/2).

    Returns:
        Density of (Nq,) float64 tensors.
    """
    count, rows = points.shape[0], queries.shape[0]
    radius = math.sqrt(2.0 * math.log(max(2.0, 1.0 / mu)))
    # -depth log p1(d / width) is about depth sqrt(2 / pi) d / width; at d = radius it is to be radius^2 / 8. Twice as
    # much is the square root of the kernel, and gave larger errors on clusters and on normal points alike.
    width = radius
    depth = max(1, round(0.125 * radius * width * math.sqrt(math.pi / 2.0)))
    step = max(1, min(tables, _NUMBERS // max(1, max(count, rows) * depth)))
    total = torch.zeros(rows, dtype=torch.float64, device=queries.device)
    squares = torch.zeros_like(total)
    number = torch.arange(rows, device=queries.device)
    for first in range(0, tables, step):
        family = Hash(width, depth, min(step, tables - first))
        made = hash_tables(queries, points, family, seed, stream, first)
        low, size = bucket_bounds(made)
        draw = uniform((family.tables, rows), seed, _DRAWS * 9 + stream + 3 * first, queries.device)
        place = low + (draw * size).to(torch.int64).clamp(max=size - 1).clamp(min=0)
        column = made.order.gather(1, place.clamp(max=count - 1))
        values = pair_kernel(queries, points, number.expand_as(column), column).double()
        distance = (-2.0 * values.clamp(min=1e-300).log()).sqrt()
        chance = bucket_chance(distance, family).clamp(min=1e-300)
        estimates = torch.where((size > 0) & (values > 0), values * size / (count * chance), 0.0)
        total += estimates.sum(0)
        squares += estimates.square().sum(0)
    mean = total / tables
    error = ((squares / tables - mean.square()).clamp(min=0.0) / max(1, tables - 1)).sqrt()
    return Density(mean, error, tables * rows)
