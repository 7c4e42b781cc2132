"""Products with Gaussian kernel matrices: exact, and within a bound (ApproxKMV, Algorithms 1-3, Lemma 4.1)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.ops import kde
from hf_efficient_attn.ops.backends.devices import accumulation_dtype, in_float64
from hf_efficient_attn.ops.draws import Draws

_GROUPS = 3
# Variance of the median of three group means, relative to that of the mean of all draws. It is 1.35 for groups that are
# close to normal; the rest is for skewed groups.
_MEDIAN = 1.6
# Share of eps for the keys that the hash misses.
_MISSED = 0.1
_PLAN_PAIRS = 4096
_ALPHAS = (0.5, 0.4, 1.0 / 3.0, 0.25, 0.2, 0.15, 0.1, 0.05)
_PILOT, _LIGHT, _PAIRS = 20_001, 30_001, 20_000
# The largest ratio of tail to head that the paper finds in its models is 4.6 (section 4.1).
_MASS = 5.6
# Numbers of draws are powers of it.
_STEP = 1.02
# Numbers in the temporaries of pairs that are processed at a time.
_AT_A_TIME = 1 << 20


@dataclass(frozen=True)
class KernelReport:
    """What `approx_kernel_matvec` computed.

    Attributes:
        exact: whether all of K was computed, as it is if the approximation is expected to cost more.
        heavy_coordinates: |H|, the coordinates of x whose columns of K were computed.
        heavy_keys: int64 (n_queries,), |S_i|, the keys found with K_ij >= n^-alpha.
        exact_rows: queries whose light keys were all computed, because sampling would have cost more.
        light_samples: draws of all queries, including the first ones, which determine their number.
        evaluations: kernel evaluations; a pair that was evaluated twice counts twice.
        projections: projections of points onto random directions, each about as expensive as an evaluation.
    """

    exact: bool
    heavy_coordinates: int
    heavy_keys: Tensor
    exact_rows: int
    light_samples: int
    evaluations: int
    projections: int


class Plan(NamedTuple):
    """How a product is approximated: what is computed exactly, and how many of the other keys each query draws."""

    heavy: Tensor  # int64 (|H|,), coordinates of x whose columns are computed
    light: Tensor  # int64 (|T|,), all other coordinates that are not negligible
    tables: kde.Tables  # of the keys in `light`; a key that shares a bucket with a query is computed
    threshold: float  # n^-alpha
    draws: Tensor  # int64 (Nq,), light keys that each query draws, a multiple of the number of groups; 0 where `whole`
    whole: Tensor  # bool (Nq,), queries for which all keys are computed
    evaluations: int  # kernel evaluations that the plan has used, or that `heavy` and `whole` will use
    pilot: int  # draws of each query that the plan has used
    projections: int  # projections that the plan has used


@in_float64
def kernel_matvec(queries: Tensor, keys: Tensor, x: Tensor, *, bandwidth: float) -> Tensor:
    """K x exactly, in blocks of queries, so that memory is linear in the number of points. Sums are in float64.

    Args:
        queries: (n_queries, d).
        keys: (n, d).
        x: (n,) or (n, m).
        bandwidth: of the kernel, positive.

    Returns:
        (n_queries,) or (n_queries, m), in the dtype of x.

    Raises:
        UnsupportedAttentionError: the shapes do not match, or the bandwidth is not positive.
    """
    check_product(queries, keys, x, bandwidth)
    matrix = x.unsqueeze(1) if x.ndim == 1 else x
    out = kde.kernel_product(queries.double() / bandwidth, keys.double() / bandwidth, matrix.double())
    return out.reshape(queries.shape[0], *x.shape[1:]).to(x.dtype)


def attention_to_gaussian(
    query: Tensor, key: Tensor, *, scale: float | None = None
) -> tuple[Tensor, Tensor, float, Tensor]:
    """The exponentials of attention as a Gaussian kernel (Lemma 4.1 of the paper on kernel products).

    With w_j = sqrt(max_l |k_l|^2 - |k_j|^2), k'_j = (k_j, w_j) and q'_i = (q_i, 0), all keys have the same length and

        sum_j x_j exp(scale <q_i, k_j>) = exp(log_factor_i) sum_j x_j exp(-|q'_i - k'_j|^2 / (2 bandwidth^2))

    where bandwidth^2 = 1 / scale and log_factor_i = scale (|q_i|^2 + max_l |k_l|^2) / 2. In the factor in front, the
    lemma as printed lacks the 1 / (2 sqrt d) of the exponents, which its proof has.

    Args:
        query: (n_queries, d).
        key: (n, d).
        scale: factor of the scores, by default 1 / sqrt(d). If it is negative, the queries change their sign.

    Returns:
        queries' (n_queries, d + 1), keys' (n, d + 1), bandwidth, and log_factor (n_queries,).

    Raises:
        UnsupportedAttentionError: the scale is 0 or not finite.
    """
    scale = float(query.shape[1]) ** -0.5 if scale is None else float(scale)
    if scale == 0.0 or not math.isfinite(scale):
        raise UnsupportedAttentionError(f"scale={scale} makes no kernel; give a finite number other than 0")
    squares = key.square().sum(1)
    largest = squares.max() if len(key) else squares.sum()
    keys = torch.cat((key, (largest - squares).clamp(min=0.0).sqrt()[:, None]), 1)
    queries = torch.cat((math.copysign(1.0, scale) * query, query.new_zeros(len(query), 1)), 1)
    return queries, keys, float(abs(scale) ** -0.5), 0.5 * abs(scale) * (query.square().sum(1) + largest)


@in_float64
def approx_kernel_matvec(
    queries: Tensor, keys: Tensor, x: Tensor, *, bandwidth: float, eps: float, delta: float = 0.01, seed: int = 0
) -> tuple[Tensor, KernelReport]:
    """Compute y with |K x - y| <= eps |x| with probability 1 - delta, for x of any sign (Algorithm 3, ApproxKMV).

    Line 3 (Lemma 3.2): the columns of the heavy coordinates of x, x_j^2 >= n^gamma with |x|^2 = n, exactly.
    Line 4 (Algorithm 1, FindHeavy): for every query the keys with K_ij >= n^-alpha, found by hashing, exactly.
    Line 5 (Algorithm 2, ApproxLight): the rest by uniform sampling, as the median of means of independent draws.
    Line 6: the sum of these parts.

    Departures from the paper. Each of them leaves the estimate unbiased or only makes it cheaper:

    - alpha = 1/3 and gamma = .109 balance the paper's bounds. Here both are the values with the lowest expected cost:
      gamma given x, alpha given the distances of a sample of pairs.
    - FindHeavy, line 3: the paper takes 10 n^alpha ln n tables of a hash whose collision probabilities have bounds.
      Here they are known. As many tables are taken, with the cells that cost least, as let the missed pairs cost a
      tenth of eps with probability 1 - delta / 4 (Markov's inequality; the sums of the columns are taken to be at most
      5.6, the largest that the paper finds). A missed pair becomes a light key, so nothing but variance is lost.
    - FindHeavy, line 7: every key that shares a bucket counts exactly, which lowers the variance of the rest.
    - ApproxLight, lines 3-7: the paper estimates the variance s_i = sum_j x_j^2 K_ij^2 over light keys as a density of
      all keys minus that of the heavy ones, with a relative error of n^-.218 and a data structure for each level of x.
      Here the heavy keys are known, and a few first draws of light keys estimate s_i itself.
    - ApproxLight, line 9: the paper takes 10 n s_i / eps^2 draws in each of 10 ln n groups, so that every single row is
      within eps. But the promise is about the sum over rows, which are drawn independently. A max(s_i, mean of s) draws
      in total, in 3 groups, keep the expected sum of squared errors, and by Chebyshev's inequality the sum itself,
      within (.9 eps)^2 |x|^2. A is computed from upper confidence bounds (Chernoff) of the mean of s and of the fourth
      moments, and from a variance of the median of 3 means that is 1.6 times that of their mean. It is 1.35 times in
      the normal case and up to 10 times in the worst case, in which keys that are drawn about once per group would
      carry the light keys of most rows. This is the only step without a proof.
    - If a row needs as many draws as it has light keys, all of them are computed. All of K is computed if that is
      expected to take fewer evaluations (`report.exact`).

    Args:
        queries: (n_queries, d).
        keys: (n, d).
        x: (n,) or (n, m). The promise then holds for every column.
        bandwidth: of the kernel, positive.
        eps: allowed error, as a multiple of |x|.
        delta: probability of exceeding it.
        seed: the same seed gives the same y.

    Returns:
        y (n_queries,) or (n_queries, m) in the dtype of x, and a `KernelReport`.

    Raises:
        UnsupportedAttentionError: the shapes do not match, or bandwidth, eps or delta is out of range.
    """
    check_product(queries, keys, x, bandwidth)
    if not (0.0 < eps < math.inf and 0.0 < delta < 1.0):
        raise UnsupportedAttentionError(f"eps={eps} must be above 0 and finite, and delta={delta} above 0 and below 1")
    matrix = x.unsqueeze(1) if x.ndim == 1 else x
    num_queries, num_keys = queries.shape[0], keys.shape[0]
    scaled_queries, scaled_keys = (y.to(accumulation_dtype(y.dtype)) / bandwidth for y in (queries, keys))
    plan = plan_product(scaled_queries, scaled_keys, matrix, eps=eps, delta=delta, seed=seed)
    if isinstance(plan, int):
        heavy = torch.full((num_queries,), num_keys, dtype=torch.int64, device=keys.device)
        report = KernelReport(True, num_keys, heavy, num_queries, 0, plan + num_queries * num_keys, 0)
        return kernel_matvec(queries, keys, x, bandwidth=bandwidth), report
    x64, light = matrix.double(), scaled_keys[plan.light]
    weights, numbers, num_light = x64[plan.light], matrix.shape[1], len(light)
    out, near = x64.new_zeros(num_queries, numbers), torch.zeros_like(plan.draws)
    if len(plan.heavy):  # line 3
        out += kde.kernel_product(scaled_queries.double(), scaled_keys[plan.heavy].double(), x64[plan.heavy])
    evaluations, drawn = plan.evaluations, 0
    for block, found, _ in kde.shared_buckets(plan.tables):
        query_index, key_index = found // num_light, found % num_light  # line 4
        values = kde.pair_kernel(scaled_queries, light, query_index, key_index)
        near += torch.bincount(query_index[values >= plan.threshold], minlength=num_queries)
        for some in torch.arange(len(found), device=found.device).split(max(1, _AT_A_TIME // numbers)):
            out.index_add_(0, query_index[some], values[some].double()[:, None] * weights[key_index[some]])
        evaluations += len(found)
        for some, key_index, used in _light_draws(plan.draws, block, found, num_light, seed, _LIGHT, numbers):  # line 5
            values = kde.pair_kernel(scaled_queries, light, some[:, None].expand_as(key_index), key_index).double()
            values = values.masked_fill_(~used, 0.0)
            groups: Tensor = (values.unsqueeze(2) * weights[key_index]).unflatten(1, (-1, _GROUPS))
            share = plan.draws[some] // _GROUPS
            out[some] += groups.sum(1).median(1).values * (num_light / share)[:, None]
            evaluations, drawn = evaluations + int(used.sum()), drawn + int(plan.draws[some].sum())
    if plan.whole.any():
        some = plan.whole.nonzero().squeeze(1)
        out[some] = kde.kernel_product(scaled_queries[some].double(), scaled_keys.double(), x64)
    counts = int(plan.whole.sum()), num_queries * plan.pilot + drawn, evaluations, plan.projections
    report = KernelReport(False, len(plan.heavy), near, *counts)
    return out.reshape(num_queries, *x.shape[1:]).to(x.dtype), report


def plan_product(
    queries: Tensor, keys: Tensor, x: Tensor, *, eps: float, delta: float, seed: int | Tensor
) -> Plan | int:
    """What ApproxKMV computes and draws; if the exact product is cheaper, the evaluations that it took to find out.

    The arguments are those of `approx_kernel_matvec`, with queries (Nq, d) and keys (n, d) in units of the bandwidth,
    and x (n, m).
    """
    num_queries, num_keys = queries.shape[0], keys.shape[0]
    norms = torch.linalg.vector_norm(x.double(), dim=0)
    delta = delta / max(1, int((norms > 0).sum()))
    # |x|^2 = n in every column that is not 0.
    squares = (x.double() / norms.clamp(min=1e-300) * math.sqrt(num_keys)).square()
    largest_square = squares.amax(1)
    if num_queries == 0 or num_keys < 8 or not bool(norms.isfinite().all()):
        return 0
    level = math.log(4.0 / delta)
    allowed = ((1.0 - _MISSED) * eps) ** 2
    # As in `_light_sizes`, if the variance determines the number of draws.
    factor = _MEDIAN * (1.0 + math.sqrt(16.0 / (delta * num_queries))) / allowed
    # A small sample is sufficient: it influences the cost, but not the result.
    sample = min(_PLAN_PAIRS, num_queries * num_keys // 64)
    sizes = torch.tensor([[num_queries], [num_keys]], device=keys.device)
    pairs = (Draws(seed, keys.device).uniform((2, sample), _PAIRS) * sizes).to(torch.int64)
    query_index, key_index = torch.minimum(pairs, sizes - 1)
    distances: Tensor = torch.linalg.vector_norm(queries[query_index] - keys[key_index], dim=1)
    ordered = torch.cat((largest_square.sort(descending=True).values, largest_square.new_zeros(1)))
    columns = torch.arange(num_keys + 1, device=keys.device)
    best, lowest = None, float(num_keys)
    for exponent in _ALPHAS:
        threshold = float(num_keys) ** -exponent
        # H: without the k largest coordinates, the largest of the others determines the range of the first draws.
        first_draws = (2.0 * level * factor * threshold**2 * num_keys**2 / num_queries * ordered).sqrt()
        is_heavy = largest_square > ordered[int((columns + 2.0 * first_draws)[:num_keys].argmin())]
        is_light = (largest_square > float(num_keys) ** -4.0) & ~is_heavy
        num_light = int(is_light.sum())
        if not num_light:
            continue
        # The largest x_j^2 K_ij^2 |T| of a light key, and the first draws, whose bound of the mean of s costs about as
        # many draws as they are themselves.
        largest = largest_square[is_light].max().item() * threshold**2 * num_light
        pilot = max(16, math.ceil(math.sqrt(2.0 * level * factor * largest * num_keys / num_queries)))
        # Draws that the bound of the fourth moments requires in any case.
        least = 4.0 * level * (_MEDIAN * num_light * largest / (allowed * num_keys)) ** 2 / (pilot * delta)
        fixed = int(is_heavy.sum()) + pilot + math.ceil(max(pilot, least ** (1.0 / 3.0)))
        if fixed >= lowest:
            continue
        miss = 0.25 * delta * (_MISSED * eps) ** 2 / _MASS
        per_rest = factor * num_light**2 * num_keys / num_queries
        radius = math.sqrt(-2.0 * math.log(threshold))
        family, cost = kde.choose_hash(distances, radius, miss, num_light, per_rest, lowest - fixed)
        if cost + fixed < lowest:
            best, lowest = (threshold, is_heavy, is_light, largest, pilot, family), cost + fixed
    if best is None:
        return sample
    threshold, is_heavy, is_light, largest, pilot, family = best
    heavy, light = is_heavy.nonzero().squeeze(1), is_light.nonzero().squeeze(1)
    points = keys[light]
    tables = kde.hash_tables(queries, points, family, seed, 60)
    if int(kde.bucket_bounds(tables)[1].amax(0).sum()) >= num_queries * len(light) // 2:
        return sample
    draws = torch.full((num_queries,), pilot, device=keys.device)
    evaluations = sample + num_queries * len(heavy)
    projections = family.tables * family.depth * (num_queries + len(light))
    plan = Plan(heavy, light, tables, threshold, draws, draws < 0, evaluations, pilot, projections)
    return _light_sizes(plan, queries, points, squares[light], (allowed, delta, largest), seed)


def _light_draws(
    draws: Tensor, queries: slice, found: Tensor, num_light: int, seed: int | Tensor, stream: int, numbers: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Draw light keys uniformly with replacement for a slice of the queries, some queries at a time.

    A query has `draws` (Nq,) draws. `found` has the sorted int64 numbers i * num_light + j of the pairs that are
    computed, which count as 0 among the draws. `stream` distinguishes the uses of one seed. `numbers` per draw in the
    caller's temporaries limit how many draws are made at a time. Yields queries (R,), and what `kde.draw_columns` draws
    for them.
    """
    order = draws[queries].argsort(stable=True) + queries.start
    order = order[draws[order] > 0]
    while len(order):
        # As many queries as fit. The last of them has the most draws.
        total = draws[order] * torch.arange(1, len(order) + 1, device=order.device)
        some = order[: max(1, int((total <= _AT_A_TIME // numbers).sum()))]
        yield some, *kde.draw_columns(draws[some], some, found, num_light, seed, stream)
        order = order[len(some) :]


def _light_sizes(
    plan: Plan, queries: Tensor, points: Tensor, squares: Tensor, bounds: tuple[float, float, float], seed: int | Tensor
) -> Plan:
    """The draws of every query from a few first ones (ApproxLight, lines 7 and 9).

    `plan` has the first draws of queries (Nq, d) among the light keys `points` (|T|, d); `squares` (|T|, m) is x^2 for
    |x|^2 = n. `bounds` are those of the sum of squared errors for |x|^2 = 1, without missed pairs; of the probability
    of exceeding it; and of the terms x_j^2 K_ij^2 |T| of light keys, for |x|^2 = n.
    """
    num_queries, num_light, (allowed, delta, largest) = len(queries), len(points), bounds
    level = math.log(4.0 / delta)
    own = squares.new_zeros(num_queries, squares.shape[1])
    fourth = squares.new_zeros(squares.shape[1])
    rest, evaluations = torch.full_like(plan.draws, num_light), plan.evaluations
    for block, found, _ in kde.shared_buckets(plan.tables):
        rest -= torch.bincount(found // num_light, minlength=num_queries)
        for some, drawn, used in _light_draws(plan.draws, block, found, num_light, seed, _PILOT, squares.shape[1]):
            kernel = kde.pair_kernel(queries, points, some[:, None].expand_as(drawn), drawn).double()
            terms = kernel.masked_fill_(~used, 0.0).square_().unsqueeze(2) * squares[drawn] * num_light
            own[some] = terms.mean(1)
            fourth += terms.square().sum((0, 1))
            evaluations += int(used.sum())

    def upper(total: Tensor, most: float) -> float:
        """Bound of the mean of num_queries * plan.pilot terms in [0, most], with probability 1 - delta / 4."""
        number = total.max().item() / most
        return float((math.sqrt(level / 2) + math.sqrt(level / 2 + number)) ** 2 * most / (num_queries * plan.pilot))

    mean, spread = upper(own.sum(0) * plan.pilot, largest), upper(fourth, largest**2)
    allowed, size = allowed * (len(plan.heavy) + num_light), float(num_light)

    def error(draws: float) -> float:
        """Bound of the sum of squared errors for a number of draws per row, with probability 1 - delta / 2."""
        variance = size * mean / draws
        deviation = math.sqrt(num_queries * (8.0 * variance**2 + size**2 * spread / draws**3) * 2.0 / delta)
        return _MEDIAN * (num_queries * variance + deviation)

    enough = (_STEP**power for power in range(math.ceil(math.log(size, _STEP))) if error(_STEP**power) <= allowed)
    draws = next(enough, size) * (own.amax(1) / mean).clamp(min=1.0)
    draws = (draws / _GROUPS).ceil().clamp(min=1.0, max=size).to(torch.int64) * _GROUPS
    whole = draws >= rest
    evaluations += int(whole.sum()) * num_light
    return plan._replace(draws=torch.where(whole, 0, draws), whole=whole, evaluations=evaluations)


def check_product(queries: Tensor, keys: Tensor, x: Tensor, bandwidth: float) -> None:
    """Refuse arguments that are not a product."""
    fits = queries.ndim == keys.ndim == 2 and x.ndim in (1, 2) and queries.shape[1] == keys.shape[1]
    if not fits or x.shape[0] != keys.shape[0] or not all(t.is_floating_point() for t in (queries, keys, x)):
        raise UnsupportedAttentionError(
            "queries (n_queries, d), keys (n, d), x (n,) or (n, m), one row for each key, of a floating type, are "
            f"needed; got queries {tuple(queries.shape)}, keys {tuple(keys.shape)}, x {tuple(x.shape)} of {x.dtype}"
        )
    if not 0.0 < bandwidth < math.inf:
        raise UnsupportedAttentionError(f"bandwidth={bandwidth} must be a positive number")
