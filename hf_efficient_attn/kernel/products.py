"""Products with Gaussian kernel matrices: exact, and within a bound (ApproxKMV, Algorithms 1-3, Lemma 4.1)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.ops import kde
from hf_efficient_attn.ops.random import uniform

_GROUPS = 3
# Variance of the median of three group means over that of the mean of all is 1.35 where the groups are near normal; the
# rest is for groups that are skewed.
_MEDIAN = 1.6
# Share of eps that keys left out by the hash may cost.
_MISSED = 0.1
_PLAN_PAIRS = 4096
_ALPHAS = (0.5, 0.4, 1.0 / 3.0, 0.25, 0.2, 0.15, 0.1, 0.05)
_PILOT, _LIGHT, _PAIRS = 20_001, 30_001, 20_000
# The greatest ratio of tail to head that the paper finds in its models is 4.6 (section 4.1).
_MASS = 5.6


@dataclass(frozen=True)
class KernelReport:
    """What `approx_kernel_matvec` did.

    exact: whether all of K was computed, as it is wherever the approximation is expected to take more.
    heavy_coordinates: |H|, the coordinates of x whose columns were computed.
    heavy_keys: |S_i| of every query, the keys found with K_ij >= n^-alpha, int64 (n_queries,).
    exact_rows: queries whose light keys were all computed, as sampling them would have taken more.
    light_samples: draws of all queries together, the first ones that set their number included.
    evaluations: kernel evaluations; a pair that was evaluated twice counts twice.
    projections: projections of points on random directions, each of about the cost of an evaluation.
    pairs: n_queries * n_keys.
    bound: error claimed, as a multiple of |x|; 0 where exact.
    delta: probability with which it may be exceeded.
    """

    exact: bool
    heavy_coordinates: int
    heavy_keys: Tensor
    exact_rows: int
    light_samples: int
    evaluations: int
    projections: int
    pairs: int
    bound: float
    delta: float


class Plan(NamedTuple):
    """How a product is to be approximated: what is computed exactly and how many keys each query draws from the rest.

    heavy: (|H|,), coordinates of x whose columns are computed. light: (|T|,), all others that are not negligible.
    tables: of the keys of `light`; what shares a bucket with a query is computed.
    computed: (Nq, m), the sum over `heavy` and over the keys that share a bucket.
    near: (Nq,), how many of these keys have K_ij >= n^-alpha.
    draws: (Nq,), light keys that each query draws, a multiple of the number of groups; 0 where `whole`.
    whole: (Nq,), queries for which all keys are computed.
    evaluations, projections: spent on the plan, or sure to be spent on what is computed exactly.
    pilot: draws that were spent on the plan.
    """

    heavy: Tensor
    light: Tensor
    tables: kde.Tables
    computed: Tensor
    near: Tensor
    draws: Tensor
    whole: Tensor
    evaluations: int
    pilot: int
    projections: int


def kernel_matvec(queries: Tensor, keys: Tensor, x: Tensor, *, bandwidth: float) -> Tensor:
    """K x exactly, in blocks of rows: memory is linear in the number of points. Sums are kept in float64.

    Args:
        queries: (n_queries, d). keys: (n, d).
        x: (n,) or (n, m).

    Returns:
        (n_queries,) or (n_queries, m), of the type of x.

    Raises:
        UnsupportedAttentionError: shapes or a bandwidth that make no product.
    """
    _check(queries, keys, x, bandwidth)
    columns = x.unsqueeze(1) if x.ndim == 1 else x
    out = kde.kernel_product(queries.double() / bandwidth, keys.double() / bandwidth, columns.double())
    return out.reshape(queries.shape[0], *x.shape[1:]).to(x.dtype)


def attention_to_gaussian(query: Tensor, key: Tensor, *, scale: float | None = None) -> tuple:
    """Attention's exponentials as a Gaussian kernel (Lemma 4.1 of the paper on kernel products).

    With w_j = sqrt(max_l |k_l|^2 - |k_j|^2), k'_j = (k_j, w_j) and q'_i = (q_i, 0), all keys are equally long and

        sum_j x_j exp(scale <q_i, k_j>) = exp(log_factor_i) sum_j x_j exp(-|q'_i - k'_j|^2 / (2 bandwidth^2))

    where bandwidth^2 = 1 / scale and log_factor_i = scale (|q_i|^2 + max_l |k_l|^2) / 2. As printed, the lemma leaves
    out the factor 1 / (2 sqrt d) of the exponents in front, which its proof has.

    Args:
        query: (n_queries, d). key: (n, d).
        scale: of the scores, 1 / sqrt(d) by default; a negative one turns the queries round.

    Returns:
        queries' (n_queries, d + 1), keys' (n, d + 1), bandwidth, log_factor (n_queries,).
    """
    scale = query.shape[1] ** -0.5 if scale is None else float(scale)
    if scale == 0.0 or not math.isfinite(scale):
        raise UnsupportedAttentionError(f"scale={scale} makes no kernel; give a finite number other than 0")
    squares = key.square().sum(1)
    most = squares.max() if len(key) else squares.sum()
    keys = torch.cat((key, (most - squares).clamp(min=0.0).sqrt()[:, None]), 1)
    queries = torch.cat((math.copysign(1.0, scale) * query, query.new_zeros(len(query), 1)), 1)
    return queries, keys, abs(scale) ** -0.5, 0.5 * abs(scale) * (query.square().sum(1) + most)


def approx_kernel_matvec(
    queries: Tensor,
    keys: Tensor,
    x: Tensor,
    *,
    bandwidth: float,
    eps: float,
    delta: float = 0.01,
    seed: int = 0,
    alpha: float | None = None,
    gamma: float | None = None,
) -> tuple[Tensor, KernelReport]:
    """y with |K x - y| <= eps |x| with probability 1 - delta, for x of any sign (Algorithm 3, ApproxKMV).

    Line 3 (Lemma 3.2): the columns of the heavy coordinates of x, x_j^2 >= n^gamma where |x|^2 = n, exactly.
    Line 4 (Algorithm 1, FindHeavy): for every query the keys with K_ij >= n^-alpha, by hashing, exactly.
    Line 5 (Algorithm 2, ApproxLight): the rest by uniform sampling, the median of means of independent draws.
    Line 6: their sum.

    Departures, each of which keeps the estimate unbiased or only makes it cheaper:

    - alpha = 1/3 and gamma = .109 balance the paper's bounds. By default both are here the ones that are expected to
      cost least: gamma given x, alpha given the distances of a sample of pairs.
    - FindHeavy, line 3: the paper takes 10 n^alpha ln n tables of a hash whose collision chances are bounds. Here they
      are known, and the tables are as many as leave out pairs at a rate that costs a tenth of eps with probability
      1 - delta / 4 (Markov's inequality; the columns' sums are taken to be at most 5.6, the largest that the paper
      finds), with the cells that cost least. A pair that is left out is a light key, with a chance that is the smaller
      the larger it is, so that nothing is lost but variance.
    - FindHeavy, line 7: every key that shares a bucket is computed, and counts exactly whether or not it is above
      n^-alpha: it lowers the variance of the rest.
    - ApproxLight, lines 3-7: the paper has the variance s_i = sum_j x_j^2 K_ij^2 over light keys as a kernel density
      of all keys less that of the heavy ones, for which it needs a relative error of n^-.218 and a data structure for
      each level of x. With the heavy keys known, some first draws of light keys estimate s_i itself.
    - ApproxLight, line 9: the paper takes 10 n s_i / eps^2 draws in each of 10 ln n groups, so that every single row is
      within eps. The promise is about the sum over rows, which are drawn independently: A max(s_i, mean of s) draws in
      all, in 3 groups, keep the expected sum of squared errors, and by Chebyshev's inequality the sum itself, within
      (.9 eps)^2 |x|^2. A is set from upper confidence bounds (Chernoff) on the mean of s and of the fourth moments, and
      from a variance of the median of 3 means that is 1.6 times that of their mean: 1.35 times in the normal case, up
      to 10 times in the worst, which would take keys that come up about once in a group to carry the light keys of most
      rows. This is the one step that is not proven.
    - A row whose draws would be as many as its light keys has all of them computed, and all of K is computed where that
      is expected to take fewer evaluations (`report.exact`).

    Args:
        queries: (n_queries, d). keys: (n, d).
        x: (n,) or (n, m); the promise then holds for every column.
        eps: error allowed, as a multiple of |x|.
        delta: probability of exceeding it.
        seed: the same seed gives the same y.
        alpha: exponent of the threshold of heavy keys, in (0, 1), or None for the cheapest.
        gamma: exponent of the threshold of heavy coordinates, or None for the cheapest.

    Returns:
        y (n_queries,) or (n_queries, m) of the type of x, and a `KernelReport`.

    Raises:
        UnsupportedAttentionError: shapes that do not fit, a bandwidth, eps, delta or alpha out of range.
    """
    _check(queries, keys, x, bandwidth)
    for name, value, top in (
        ("eps", eps, math.inf),
        ("delta", delta, 1.0),
        ("alpha", 0.5 if alpha is None else alpha, 1.0),
    ):
        if not 0.0 < value < top:
            raise UnsupportedAttentionError(f"{name}={value} must be above 0 and below {top:g}")
    columns = x.unsqueeze(1) if x.ndim == 1 else x
    rows, count = queries.shape[0], keys.shape[0]
    left, right = queries / bandwidth, keys / bandwidth
    plan = plan_product(left, right, columns, eps=eps, delta=delta, seed=seed, alpha=alpha, gamma=gamma)
    if isinstance(plan, int):
        heavy = torch.full((rows,), count, dtype=torch.int64, device=keys.device)
        report = KernelReport(True, count, heavy, rows, 0, plan + rows * count, 0, rows * count, 0.0, delta)
        return kernel_matvec(queries, keys, x, bandwidth=bandwidth), report
    out = plan.computed  # lines 3 and 4: y_H and the sets S_i
    points, weights, x_width = right[plan.light], columns[plan.light].double(), columns.shape[1]
    evaluations, drawn = plan.evaluations, 0
    for here, found, _ in kde.shared_buckets(plan.tables):
        for some, column, used in light_draws(plan.draws, here, found, len(points), seed, _LIGHT, x_width):  # line 5: z
            values = kde.pair_kernel(left, points, some[:, None].expand_as(column), column).double()
            values = values.masked_fill_(~used, 0.0)
            parts = (values.unsqueeze(2) * weights[column]).unflatten(1, (-1, _GROUPS)).sum(1)
            share = plan.draws[some] // _GROUPS
            out[some] += parts.median(1).values * (len(points) / share)[:, None]
            evaluations, drawn = evaluations + int(used.sum()), drawn + int(plan.draws[some].sum())
    if plan.whole.any():
        some = plan.whole.nonzero().squeeze(1)
        out[some] = kde.kernel_product(left[some].double(), right.double(), columns.double())
    report = KernelReport(
        False,
        len(plan.heavy),
        plan.near,
        int(plan.whole.sum()),
        plan.pilot + drawn,
        evaluations,
        plan.projections,
        rows * count,
        eps,
        delta,
    )
    return out.reshape(rows, *x.shape[1:]).to(x.dtype), report


def plan_product(queries, keys, x, *, eps, delta, seed, alpha=None, gamma=None, sums=True) -> "Plan | int":
    """What ApproxKMV computes and draws, for points in units of the bandwidth and x (n, m).

    Args:
        sums: whether `Plan.computed` is wanted; 0 otherwise.

    Returns:
        a Plan, or where all pairs are cheaper the number of evaluations spent until that was known.
    """
    rows, count = queries.shape[0], keys.shape[0]
    norms = x.double().norm(dim=0)
    delta = delta / max(1, int((norms > 0).sum()))
    # |x|^2 = n in every column that is not 0.
    squares = (x.double() / norms.clamp(min=1e-300) * math.sqrt(count)).square()
    largest = squares.amax(1)
    if rows == 0 or count < 8 or not bool(norms.isfinite().all()):
        return 0
    level = math.log(4.0 / delta)
    allowed = ((1.0 - _MISSED) * eps) ** 2
    # As in `_light_sizes`, where the variance is what sets the draws.
    factor = _MEDIAN * (1.0 + math.sqrt(16.0 / (delta * rows))) / allowed
    # So small a sample decides how the work is done, not what comes out.
    sample = min(_PLAN_PAIRS, rows * count // 64)
    pairs = uniform((2, sample), seed, _PAIRS, keys.device)
    row, column = ((u * n).to(torch.int64).clamp(max=n - 1) for u, n in zip(pairs, (rows, count), strict=True))
    distances = (queries[row] - keys[column]).norm(dim=1)
    best, lowest = None, float(count)
    for exponent in _ALPHAS if alpha is None else (alpha,):
        threshold = count**-exponent
        heavy = _heavy_coordinates(largest, threshold, factor, level, gamma, rows)
        light = (largest > count**-4.0) & ~heavy
        number = int(light.sum())
        if not number:
            continue
        # The greatest x_j^2 K_ij^2 |T| of a light key; first draws that bound the mean of s to about what they cost.
        top = largest[light].max().item() * threshold**2 * number
        pilot = max(16, math.ceil(math.sqrt(2.0 * level * factor * top * count / rows)))
        # Draws that the bound on fourth moments takes in any case.
        least = (4.0 * level * (_MEDIAN * number * top / (allowed * count)) ** 2 / (pilot * delta)) ** (1.0 / 3.0)
        fixed = int(heavy.sum()) + pilot + math.ceil(max(pilot, least))
        if fixed >= lowest:
            continue
        miss = 0.25 * delta * (_MISSED * eps) ** 2 / _MASS
        per_rest = factor * number**2 * count / rows
        choice = kde.choose_hash(
            distances, math.sqrt(-2.0 * math.log(threshold)), miss, number, per_rest, lowest - fixed
        )
        if choice.cost + fixed < lowest:
            best, lowest = (threshold, heavy, light, top, pilot, choice), choice.cost + fixed
    if best is None:
        return sample
    threshold, heavy, light, top, pilot, choice = best
    heavy, light = heavy.nonzero().squeeze(1), light.nonzero().squeeze(1)
    points, wide = keys[light], x.double()
    tables = kde.hash_tables(queries, points, choice.family, seed, 60)
    if int(kde.bucket_bounds(tables)[1].amax(0).sum()) >= rows * len(light) // 2:
        return sample
    computed = wide.new_zeros(rows, wide.shape[1])
    if len(heavy) and sums:  # Lemma 3.2
        computed += kde.kernel_product(queries.double(), keys[heavy].double(), wide[heavy])
    zeros = torch.zeros(rows, dtype=torch.int64, device=keys.device)
    projections = choice.family.tables * choice.family.depth * (rows + len(light))
    plan = Plan(heavy, light, tables, computed, zeros.clone(), zeros + pilot, zeros > 0, sample + rows * len(heavy),
                rows * pilot, projections)  # fmt: skip
    return _light_sizes(
        plan, queries, points, wide[light], squares[light], eps, delta, level, top, threshold, seed, sums
    )


def _heavy_coordinates(largest: Tensor, threshold: float, factor: float, level: float, gamma, rows: int) -> Tensor:
    """Mask of H: x_j^2 >= n^gamma, or above the threshold for which columns and first draws together cost least."""
    count = len(largest)
    if gamma is not None:
        return largest >= count**gamma
    ordered = torch.cat((largest.sort(descending=True).values, largest.new_zeros(1)))
    columns = torch.arange(count + 1, device=largest.device)
    # With the k largest coordinates out, the greatest of the rest sets the range of what is drawn.
    draws = (2.0 * level * factor * threshold**2 * count * count / rows * ordered).sqrt()
    best = int((columns + 2.0 * draws)[:count].argmin())
    return largest > ordered[best]


def light_draws(draws, rows: slice, found: Tensor, count: int, seed, stream: int, width: int = 1) -> Iterator[tuple]:
    """Uniform draws, with replacement, of light keys for the queries in `rows`, some of them at a time.

    Args:
        draws: (Nq,), draws of every query.
        found: sorted numbers i * count + j of the pairs that are computed.
        count: number of light keys.
        width: numbers that go with each draw, which say how many are drawn at a time.

    Yields:
        queries (R,); draws (R, M) of keys; and which of them count, (R, M): not those beyond a query's number of draws,
        nor the pairs that are computed, which count 0 among the draws.
    """
    order = draws[rows].argsort(stable=True) + rows.start
    order = order[draws[order] > 0]
    while len(order):
        # As many queries as fit, the one with the most draws last.
        most = draws[order] * torch.arange(1, len(order) + 1, device=order.device)
        some = order[: max(1, int((most <= (1 << 20) // width).sum()))]
        column, used = draw_columns(draws[some], some, found, count, seed, stream)
        yield some, column, used
        order = order[len(some) :]


def draw_columns(draws: Tensor, rows: Tensor, found: Tensor, count: int, seed, stream: int) -> tuple[Tensor, Tensor]:
    """The draws of the queries `rows`, `draws` each: (R, M) keys, and which of them count, as in `light_draws`."""
    width = int(draws.max())
    # The number of the first query makes the streams of all groups different.
    numbers = uniform((len(rows), width), seed, stream + 1000 * int(rows.min()), rows.device)
    column = (numbers * count).to(torch.int64).clamp(max=count - 1)
    used = torch.arange(width, device=rows.device) < draws[:, None]
    if len(found):
        pair = rows[:, None] * count + column
        used &= found[torch.searchsorted(found, pair).clamp(max=len(found) - 1)] != pair
    return column, used


def _light_sizes(plan, queries, points, x, squares, eps, delta, level, top, threshold, seed, sums) -> Plan:
    """FindHeavy, and the draws of every query by some first ones (ApproxLight, lines 7 and 9)."""
    rows, count, pilot = len(queries), len(plan.heavy) + len(points), plan.pilot // len(queries)
    own = squares.new_zeros(rows, squares.shape[1])
    fourth = squares.new_zeros(squares.shape[1])
    rest, spent = torch.full_like(plan.near, len(points)), 0
    for here, found, _ in kde.shared_buckets(plan.tables):
        row, column = found // len(points), found % len(points)
        # Added up at once, so that no pairs have to be kept.
        values = kde.pair_kernel(queries, points, row, column)
        step = max(1, (1 << 20) // x.shape[1])
        for at in range(0, len(row) if sums else 0, step):
            part = slice(at, at + step)
            plan.computed.index_add_(0, row[part], values[part].double()[:, None] * x[column[part]])
        plan.near.add_(torch.bincount(row[values >= threshold], minlength=rows))
        rest -= torch.bincount(row, minlength=rows)
        spent += len(found)
        for some, column, used in light_draws(plan.draws, here, found, len(points), seed, _PILOT, squares.shape[1]):
            kernel = kde.pair_kernel(queries, points, some[:, None].expand_as(column), column).double()
            terms = kernel.masked_fill_(~used, 0.0).square_().unsqueeze(2) * squares[column] * len(points)
            own[some] = terms.mean(1)
            fourth += terms.square().sum((0, 1))
            spent += int(used.sum())

    def upper(total: Tensor, most: float) -> float:
        """Bound on the mean, with probability 1 - delta / 4, of rows * pilot independent terms of [0, most]."""
        number = total.max().item() / most
        return (math.sqrt(level / 2) + math.sqrt(level / 2 + number)) ** 2 * most / (rows * pilot)

    mean = upper(own.sum(0) * pilot, top)
    spread = upper(fourth, top**2)
    allowed, size = ((1.0 - _MISSED) * eps) ** 2 * count, float(len(points))

    def error(each: float) -> float:
        """Bound on the sum of squared errors, with probability 1 - delta / 2, of so many draws a row."""
        variance = size * mean / each
        deviation = math.sqrt(rows * (8.0 * variance**2 + size**2 * spread / each**3) * 2.0 / delta)
        return _MEDIAN * (rows * variance + deviation)

    low, high = 1.0, 1.0
    while error(high) > allowed and high < size:
        low, high = high, 2.0 * high
    for _ in range(20):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if error(middle) > allowed else (low, middle)
    draws = high * (own.amax(1) / mean).clamp(min=1.0)
    draws = (draws / _GROUPS).ceil().clamp(min=1.0, max=size).to(torch.int64) * _GROUPS
    whole = draws >= rest
    evaluations = plan.evaluations + spent + int(whole.sum()) * len(points)
    return plan._replace(draws=torch.where(whole, 0, draws), whole=whole, evaluations=evaluations)


def _check(queries: Tensor, keys: Tensor, x: Tensor, bandwidth: float) -> None:
    shapes = f"queries {tuple(queries.shape)}, keys {tuple(keys.shape)}, x {tuple(x.shape)}"
    if queries.ndim != 2 or keys.ndim != 2 or x.ndim not in (1, 2) or queries.shape[1] != keys.shape[1]:
        raise UnsupportedAttentionError(
            f"queries (n_queries, d), keys (n, d), x (n,) or (n, m) are needed; got {shapes}"
        )
    if x.shape[0] != keys.shape[0]:
        raise UnsupportedAttentionError(f"x needs one row for each key; got {shapes}")
    if not all(t.is_floating_point() for t in (queries, keys, x)):
        raise UnsupportedAttentionError("queries, keys and x must be of a floating type")
    if not 0.0 < bandwidth < math.inf:
        raise UnsupportedAttentionError(f"bandwidth={bandwidth} must be a positive number")
