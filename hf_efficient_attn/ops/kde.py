"""Gaussian kernels by hashing: tables of a Euclidean hash, pairs that share a bucket, and density estimates from them.

The hash (Datar, Immorlica, Indyk and Mirrokni 2004) puts a point x into cell floor((a . x + b) / width) of a random
direction a with shift b. `depth` such cells make a bucket. The probability that two points share a bucket
depends on their distance alone and has a closed form (`collision_chance`), which importance sampling by buckets needs.
All lengths are in units of the kernel's bandwidth: k(x, y) = exp(-|x - y|^2 / 2).

Shapes: n keys and Nq queries are points of d numbers.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.attend import Partial, attend, output_of
from hf_efficient_attn.ops.backends.devices import accumulation_dtype
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.shards import Seed
from hf_efficient_attn.ops.slices import sliced

# A temporary tensor has at most this many numbers: 32 MiB of float64.
_NUMBERS = 1 << 22
# This many pairs are computed at a time, before pairs that several tables contain are merged.
_PAIRS = 1 << 21
_DRAWS = 10_000
# Attention with a budget of keys: the number of tables, the hashes of a bucket, the pairs at a time, and streams.
_BUDGET_TABLES = 8
_BUDGET_DEPTH = 4
_BUDGET_PAIRS = 1 << 17
_BUDGET_SAMPLE = 40_000
_BUDGET_HASH = 70
_PART_DRAWS = 50_001


class Hash(NamedTuple):
    """A family of `tables` independent tables. In each, cells of `width` along `depth` directions make a bucket."""

    width: float
    depth: int
    tables: int


class Tables(NamedTuple):
    """Keys sorted by bucket in each of T tables."""

    codes: Tensor  # int64 (T, n), sorted codes of the keys
    order: Tensor  # int64 (T, n), the key at each sorted index
    query_codes: Tensor  # int64 (T, Nq), codes of the queries


def pair_kernel(queries: Tensor, keys: Tensor, query_index: Tensor, key_index: Tensor) -> Tensor:
    """Compute the kernel of pairs of queries (Nq, d) and keys (n, d), some pairs at a time, so that memory stays small.

    `query_index` and `key_index`, int64 of one shape, have the query and the key of each pair. The result has this
    shape.
    """
    out = queries.new_empty(query_index.numel())
    flat_query = query_index.reshape(-1)
    flat_key = key_index.reshape(-1)
    for some in query_blocks(out.numel(), queries.shape[1]):
        difference = queries.index_select(0, flat_query[some]).sub_(keys.index_select(0, flat_key[some]))  # (some, d)
        torch.exp(difference.square_().sum(1).mul_(-0.5), out=out[some])
    return out.view(query_index.shape)


def query_blocks(num_queries: int, num_keys: int) -> Iterator[slice]:
    """Yield slices of the queries for which a matrix with `num_keys` columns stays small."""
    step = max(1, _NUMBERS // max(1, num_keys))
    return (slice(start, min(start + step, num_queries)) for start in range(0, num_queries, step))


def kernel_product(queries: Tensor, keys: Tensor, x: Tensor) -> Tensor:
    """Compute sum_j k(q_i, k_j) x_j exactly, with memory linear in n: (Nq, d), (n, d), (n, m) -> (Nq, m)."""
    out = x.new_empty(queries.shape[0], x.shape[1])
    # Distances do not depend on the origin, but their rounding does.
    center = keys.mean(0) if len(keys) else 0.0
    queries = queries - center
    keys = keys - center
    squares = keys.square().sum(1)  # (n,)
    for some in query_blocks(queries.shape[0], keys.shape[0]):
        block = torch.addmm(squares, queries[some], keys.t(), alpha=-2.0)  # (some, d) @ (d, n) -> (some, n)
        block.add_(queries[some].square().sum(1, keepdim=True)).clamp_(min=0.0)
        torch.mm(block.mul_(-0.5).exp_(), x, out=out[some])
    return out


def collision_chance(ratio: Tensor) -> Tensor:
    """Compute the probability that two points share a cell of one direction (Datar et al. 2004, 3.2).

    `ratio` (...) is the distance of the points divided by the width of a cell.
    """
    safe = ratio.clamp(min=1e-12)
    tails: Tensor = torch.special.erfc(1.0 / (safe * math.sqrt(2.0)))
    slope = safe * math.sqrt(2.0 / math.pi) * -torch.expm1(-0.5 / safe.square())
    return (1.0 - tails - slope).clamp(0.0, 1.0)


def _codes(points: Tensor, directions: Tensor, shifts: Tensor, factors: Tensor, family: Hash) -> Tensor:
    """Compute codes that tell buckets apart, int64 (T, n): a random linear hash of the cells modulo 2^64."""
    tables = directions.shape[1] // family.depth
    out = torch.empty(tables, points.shape[0], dtype=torch.int64, device=points.device)
    for some in query_blocks(len(points), directions.shape[1]):
        cells = torch.addmm(shifts, points[some].to(directions.dtype), directions, alpha=1.0 / family.width)
        cells = cells.floor_().to(torch.int64).mul_(factors).view(-1, tables, family.depth)  # (some, T, depth)
        out[:, some] = cells.sum(2).t()
    return out


def hash_tables(queries: Tensor, keys: Tensor, family: Hash, seed: Seed, stream: int, first: int = 0) -> Tables:
    """Hash queries (Nq, d) and keys (n, d) into all tables of a family.

    `first` is the number of the first table, so that tables can be made a few at a time.
    """
    draws = Draws(seed, keys.device)
    count = family.tables * family.depth
    stream = stream + 3 * first
    directions = draws.normal((keys.shape[1], count), stream)  # (d, T * depth)
    shifts = draws.uniform((count,), _DRAWS * 7 + stream)
    factors = (draws.uniform((2, count), _DRAWS * 8 + stream) * 2.0**32).to(torch.int64)
    factors = (factors[0] << 32) + factors[1] * 2 + 1  # (T * depth,)
    center = keys.double().mean(0)  # far from the origin, cells would lose their fractions to rounding
    codes, order = _codes(keys.double() - center, directions, shifts, factors, family).sort(1)  # (T, n) each
    return Tables(codes, order, _codes(queries.double() - center, directions, shifts, factors, family))


def bucket_bounds(tables: Tables) -> tuple[Tensor, Tensor]:
    """Find the first sorted index of each query's bucket, and the bucket's number of keys: int64 (T, Nq) each."""
    low = torch.searchsorted(tables.codes, tables.query_codes)  # (T, Nq)
    return low, torch.searchsorted(tables.codes, tables.query_codes, right=True) - low


def shared_buckets(tables: Tables, at_a_time: int = _PAIRS) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield all pairs of a query i and a key j that share a bucket of any table, for some queries at a time.

    Yields:
        A slice of the queries, in ascending order; the pairs as sorted int64 numbers i * n + j, each once; and the
        number of tables in which each pair shares a bucket.
    """
    low, size = bucket_bounds(tables)
    num_keys = tables.codes.shape[1]
    device = size.device
    total = size.sum(0).cumsum(0)  # (Nq,)
    start = 0
    while start < total.numel():
        before = total[start - 1] if start else total.new_zeros(())
        end = max(start + 1, int(torch.searchsorted(total, before + at_a_time, right=True)))
        sizes = size[:, start:end].reshape(-1)  # (T * block,)
        first = low[:, start:end].reshape(-1)
        bucket = torch.repeat_interleave(torch.arange(sizes.numel(), device=device), sizes)
        inside = torch.arange(bucket.numel(), device=device) - (sizes.cumsum(0) - sizes)[bucket]
        table = bucket // (end - start)
        query = bucket % (end - start) + start
        numbers = query * num_keys + tables.order[table, first[bucket] + inside]
        pairs, counts = torch.unique(numbers, return_counts=True)
        yield slice(start, end), pairs, counts
        start = end


def choose_hash(
    distances: Tensor, radius: float, miss: float, num_keys: int, per_rest: float, max_cost: float
) -> tuple[Hash, float]:
    """Choose the cheapest tables that miss a pair at distance r <= radius with a probability of at most miss / k(r).

    The cost per query in kernel evaluations has three parts: 2 * tables * depth projections, of the query and of a key;
    the keys in the query's buckets; and `per_rest` times the mean of k^2 over the keys in none of its buckets. The last
    two parts are estimated from a sample of distances.

    Args:
        distances: the distances of a sample of pairs.
        radius: distance up to which pairs must be found.
        miss: bound of the probability to miss a pair, times the kernel of the pair.
        num_keys: number of keys.
        per_rest: cost per k^2 of a missed pair.
        max_cost: cost above which the exact product is cheaper.

    Returns:
        The family and its cost per query, which is above `max_cost` if no family is cheaper.
    """
    near = torch.linspace(0.0, radius, 24, dtype=torch.float64, device=distances.device)
    allowed = (miss * torch.exp(0.5 * near.square())).clamp(max=0.9).log()
    # Any family finds the pairs within the radius. They are so few that a sample says nothing about them.
    far = distances[distances > radius].double()
    squares = torch.exp(-far.square())
    best = Hash(radius, 1, 1)
    lowest = math.inf
    for factor in (1.0, 1.5, 2.0, 3.0, 4.0, 6.0):
        width = factor * radius
        log_near, log_far = (collision_chance(d / width).clamp(min=1e-300).log() for d in (near, far))
        for depth in range(1, 25):
            bound = (allowed / torch.log1p(-torch.exp(depth * log_near)).clamp(max=-1e-300)).max().item()
            tables = max(1, math.ceil(bound))
            hashing = 2.0 * tables * depth
            if hashing > min(max_cost, lowest):
                break
            missed = torch.exp(tables * torch.log1p(-torch.exp(depth * log_far).clamp(max=1.0 - 1e-12)))
            pairs = num_keys * (1.0 - missed).sum() + per_rest * (squares * missed).sum()
            cost = hashing + pairs.item() / max(1, distances.numel())
            if cost < lowest:
                best = Hash(width, depth, tables)
                lowest = cost
    return best, lowest


def gaussian_kde(
    points: Tensor, queries: Tensor, *, mu: float, tables: int, seed: Seed = 0, stream: int = 90
) -> tuple[Tensor, Tensor]:
    """Estimate densities (1/n) sum_i k(q, x_i) by hashing-based importance sampling (Charikar & Siminelakis 2017).

    In each of M tables a query selects one of the keys in its bucket at random. The kernel value of this key, times the
    size of the bucket, divided by n and by the probability of sharing a bucket, is an unbiased estimate of the density
    (Section 3 of the paper, the estimator Z). The cells are chosen so that this probability falls about like the fourth
    root of the kernel, up to the distance at which the kernel is mu. So near keys are selected more often than far
    ones, which keeps the variance small relative to the density. The paper takes medians of means of as many tables as
    a bound on the variance requires. This function returns the mean over all tables, with its standard error.

    Args:
        points: (n, d), in units of the bandwidth.
        queries: (Nq, d), in the same units.
        mu: density for which the cells are chosen.
        tables: M. Densities of mu and more have a relative error of about (M mu^(1/2))^(-1/2).
        seed: seed of the hash and of the sampling.
        stream: distinguishes the uses of one seed.

    Returns:
        The estimates and their standard errors, float64 (Nq,) each.
    """
    num_keys = points.shape[0]
    num_queries = queries.shape[0]
    radius = math.sqrt(2.0 * math.log(max(2.0, 1.0 / mu)))
    # -depth log p1(d / width) is about depth sqrt(2 / pi) d / width, and should be radius^2 / 8 at d = radius. Twice as
    # much is the square root of the kernel, which gave larger errors on clusters and on normal points alike.
    depth = max(1, round(0.125 * radius * radius * math.sqrt(math.pi / 2.0)))  # cells are as wide as the radius
    step = max(1, min(tables, _NUMBERS // max(1, max(num_keys, num_queries) * depth)))
    total, squares = torch.zeros(2, num_queries, dtype=torch.float64, device=queries.device)
    draws = Draws(seed, queries.device)
    query_index = torch.arange(num_queries, device=queries.device)
    for first in range(0, tables, step):
        family = Hash(radius, depth, min(step, tables - first))
        hashed = hash_tables(queries, points, family, seed, stream, first)
        low, size = bucket_bounds(hashed)
        draw = draws.uniform((family.tables, num_queries), _DRAWS * 9 + stream + 3 * first)
        sorted_index = low + (draw * size).to(torch.int64).clamp(max=size - 1).clamp(min=0)
        key_index = hashed.order.gather(1, sorted_index.clamp(max=num_keys - 1))  # (T, Nq)
        values = pair_kernel(queries, points, query_index.expand_as(key_index), key_index).double()  # (T, Nq)
        distance = (-2.0 * values.clamp(min=1e-300).log()).sqrt()
        chance = (collision_chance(distance / family.width) ** family.depth).clamp(min=1e-300)
        estimates = torch.where((size > 0) & (values > 0), values * size / (num_keys * chance), 0.0)  # (T, Nq)
        total += estimates.sum(0)
        squares += estimates.square().sum(0)
    mean = total / tables
    return mean, ((squares / tables - mean.square()).clamp(min=0.0) / max(1, tables - 1)).sqrt()


class Part(NamedTuple):
    """Some queries of one head with the keys that are computed for them."""

    queries: Tensor  # int64 (R,), the queries, ascending
    keys: Tensor  # int64 (R, M), the keys of each query
    bias: Tensor  # float64 (R, M), the log-weights of the keys, which are added to the scores; -inf for an unused entry


def attend_part(query: Tensor, key: Tensor, value: Tensor, part: Part, *, scale: float, dropout_p: float) -> Partial:
    """Compute the attention of a part of one head (Nq, D), (Nk, D), (Nk, Dv): out (R, Dv) and lse (R,)."""

    def forward(query: Tensor, keys: Tensor, bias: Tensor) -> Tensor:
        # (1, R, 1, D), (1, R, M, D), (1, R, M, Dv), (1, R, 1, M)
        own = query[None, :, None], key[keys][None], value[keys][None], bias[None, :, None]
        out, lse = (x[0, :, 0] for x in attend(*own, scale=scale, dropout_p=dropout_p))  # (R, Dv), (R,)
        return output_of(Partial(out, lse), True)  # (R, Dv + 1)

    # `sliced` computes this again in the backward pass, because autograd would keep a copy of the keys of every query.
    rows = query[part.queries], part.keys, part.bias.to(accumulation_dtype(query.dtype))
    both = sliced(forward, *rows, size=len(part.queries), draws=dropout_p > 0.0)
    return Partial(both[:, :-1].to(value.dtype), both[:, -1])


def parts_by_budget(budget: int, queries: Tensor, keys: Tensor, seed: int | Tensor) -> Iterator[Part]:
    """Yield all queries with `budget` keys each: up to half of the keys share buckets, the others are drawn.

    Queries (Nq, d) and keys (n, d) are in units of the bandwidth. The seed is that of the hash and of the draws.
    """
    num_queries = len(queries)
    num_keys = len(keys)
    device = keys.device
    numbers = Draws(seed, device).uniform((2, 4096), _BUDGET_SAMPLE)
    query, key = (
        (u * n).to(torch.int64).clamp(max=n - 1) for u, n in zip(numbers, (num_queries, num_keys), strict=True)
    )
    distances = (queries[query] - keys[key]).norm(dim=1).double()
    steps = 2.0 ** (0.25 * torch.arange(-16, 9, dtype=torch.float32, device=device))
    widths = distances.median().clamp(min=1e-9) * steps
    # The largest width of a bucket at which a query is expected to meet at most half of its budget.
    met = collision_chance(distances[None] / widths[:, None]).pow(_BUDGET_DEPTH).mean(1) * _BUDGET_TABLES * num_keys
    width = widths[int((met <= budget // 2).sum().clamp(min=1)) - 1].item()
    tables = hash_tables(queries, keys, Hash(width, _BUDGET_DEPTH, _BUDGET_TABLES), seed, _BUDGET_HASH)
    light = torch.arange(num_keys, device=device)
    heavy = torch.arange(0, device=device)
    for block, found, times in shared_buckets(tables, _BUDGET_PAIRS):
        # Keep the keys that each query meets in most tables.
        order = (found // num_keys * (_BUDGET_TABLES + 1) + _BUDGET_TABLES - times).argsort(stable=True)
        row = found[order] // num_keys - block.start
        kept = found[order[_rank_in_group(row, block.stop - block.start) < budget // 2]].sort().values
        for some in torch.arange(block.start, block.stop, device=device).split(max(1, _BUDGET_PAIRS // budget)):
            yield part_of(some, kept, budget, light, heavy, seed)


def part_of(
    queries: Tensor, found: Tensor, draws: Tensor | int, light: Tensor, heavy: Tensor, seed: int | Tensor
) -> Part:
    """Make the part of some queries: the heavy keys, the light keys that share a bucket, and drawn light keys.

    Args:
        queries: int64 (R,), ascending.
        found: the pairs of queries and keys that share a bucket, as sorted numbers query * L + index of the light key.
        draws: the number of draws of each query (R,), or the number of its light keys of both kinds together.
        light: int64 (L,), the light keys.
        heavy: int64 (n,), the heavy keys.
        seed: seed of the draws.
    """
    num_light = len(light)
    row = torch.searchsorted(queries, found // num_light).clamp(max=len(queries) - 1)
    is_own = queries[row] == found // num_light
    row = row[is_own]
    own = found[is_own]
    # The pairs as keys (R, m), with -inf as bias where a query has less than m.
    rank = _rank_in_group(row, len(queries))
    width = int(torch.bincount(row).max()) if len(row) else 0
    near = row.new_zeros(len(queries), width)  # (R, m)
    bias = torch.full(near.shape, -torch.inf, dtype=torch.float64, device=row.device)
    near[row, rank] = own % num_light
    bias[row, rank] = 0.0
    draws = draws if isinstance(draws, Tensor) else draws - (bias == 0).sum(1)
    drawn, used = draw_columns(draws, queries, own, num_light, seed, _PART_DRAWS)  # (R, M) each
    log_weight = (num_light / draws.double()).log()[:, None].expand(drawn.shape).masked_fill(~used, -torch.inf)
    keys = torch.cat((heavy.expand(len(queries), -1), light[near], light[drawn]), 1)  # (R, n + m + M)
    return Part(queries, keys, torch.cat((bias.new_zeros(len(queries), len(heavy)), bias, log_weight), 1))


def draw_columns(
    draws: Tensor, queries: Tensor, found: Tensor, num_light: int, seed: int | Tensor, stream: int
) -> tuple[Tensor, Tensor]:
    """Draw `draws` (R,) keys for each query (R,): int64 (R, M), and bool (R, M), False for unused and found keys."""
    most = int(draws.max())
    # The first query's number gives each call a stream of its own.
    numbers = Draws(seed, queries.device).uniform((len(queries), most), stream + 1000 * int(queries.min()))  # (R, M)
    key_index = (numbers * num_light).to(torch.int64).clamp(max=num_light - 1)
    used = torch.arange(most, device=queries.device) < draws[:, None]  # (R, M)
    if len(found):
        pair = queries[:, None] * num_light + key_index
        used &= found[torch.searchsorted(found, pair).clamp(max=len(found) - 1)] != pair
    return key_index, used


def _rank_in_group(group: Tensor, num_groups: int) -> Tensor:
    """Rank each element among the elements of its group, for a sorted `group` (P,): (P,)."""
    sizes = torch.bincount(group, minlength=num_groups)
    return torch.arange(len(group), device=group.device) - (sizes.cumsum(0) - sizes)[group]
