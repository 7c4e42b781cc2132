"""The error of an approximate attention output, estimated from the exact output of a few queries.

The error of a head is |A - E| / |E| in the operator norm, where A is the approximate and E the exact output. Both norms
are estimated from the same p rows, one from each of p equal strata of the queries, which costs p / Nq of exact
attention. In a sample of rows, the largest singular value of A - E is on average too large rather than too small,
because the largest eigenvalue is a convex function of the Gram matrix. A sample misses rare rows with a large error.

The bound adds a margin for what the sample misses. Let s_i be the share of row i in |A - E|^2: the square of the row's
component along the leading right singular vector, divided by the sum of these squares. Let t_i be the row's share in
|E|^2. To first order, leaving out row i changes the logarithm of the squared ratio by s_i - t_i (the infinitesimal
jackknife; Jaeckel 1972), so that the relative standard error of the ratio is |s - t| / 2. The margin is twice that,
plus 1 / (2 sqrt(p)) for directions that no sampled row shows, times sqrt(1 - p / Nq), since the number of rows is
finite.

On unseen texts and pictures (MiniLM, GPT-2 and DeiT with 512 to 8,192 tokens; four methods at two budgets) the mean
bound of a layer was below its mean error in 4 of 7,056 layers with 64 rows, and in as many with 128. The bound of a
head was below its error in 1.2 and 1.1 %. The median of bound / error of a layer was 1.41 and 1.26. The bound fails
more often for errors of rank 1 that differ much between rows, of which a sample shows the least.

`attend_within_bound` chooses which heads of a call to approximate, and with how many columns, so that the bound of each
stays below a limit.

Costs are relative to exact attention of the same head. An attempt costs the approximation and the exact rows that bound
its error. If the bound exceeds the limit, exact attention is added. So an attempt pays if the probability P that it
succeeds is above its cost. P assumes that the logarithm of the bound is normally distributed: at first around the error
of a small copy of the head (`screening_error`), and after an attempt around the bound of that attempt. Twice as many
columns are expected to leave .6 of the bound.

The heads of a sequence are attempted in the order of P - cost, as long as the expected loss, the sum of (1 - P) cost,
is within a budget: a small share of exact attention, plus what earlier attempts have saved. The first attempts are few.
So a sequence in which all heads need exact attention loses hardly any time. Nothing depends on other sequences or
earlier calls.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_efficient_attn.ops.attend import attend
from hf_efficient_attn.ops.backends.devices import accumulation_dtype, wide_dtype, widened
from hf_efficient_attn.ops.clusters import RIDGE, cluster_sums, even_positions, nearest, regularized_solve, with_ones
from hf_efficient_attn.ops.draws import uniform
from hf_efficient_attn.ops.index import take
from hf_efficient_attn.ops.nearfar.landmarks import LEAST_LOG_WEIGHT, TEMPERATURE
from hf_efficient_attn.ops.shards import Seed
from hf_efficient_attn.ops.strata import strata, stratified_ranks

_STREAM = 31
# Squarings of a Gram matrix: the leading eigenvector is found as by 2**6 steps of the power method.
_SQUARINGS = 6
# A denominator must be this share of the sum of the sizes of its terms.
_LEAST_DENOMINATOR = 0.01
# Sizes of the copy of a head, and steps of Lloyd's algorithm.
NUM_KEYS = 256
NUM_QUERIES = 64
NUM_LANDMARKS = 32
_NUM_STEPS = 2
# The number of rows that bound the error. A bound between the limit and `_CLOSE` times the limit is computed again from
# `_MORE_ROWS` times as many rows: with few rows it is up to five times the error if few rows have a large error.
NUM_ROWS = 64
_MORE_ROWS = 4
_CLOSE = 3.0
# The bound with c columns is about `_COPY_FACTOR` (error of the copy * landmarks of the copy / c)^_GROWTH. The spreads
# are standard deviations of its logarithm: before the first attempt in a sequence, after it, and for an attempted head.
# The first attempt tells most: relative to the copy, heads of MiniLM have a fourth of the error of random heads.
_COPY_FACTOR = 0.37
_GROWTH = 0.7
_COPY_SPREAD = 0.7
_NEXT_SPREAD = 0.55
_SPREAD = 0.4
# The share of the first attempts' news that also holds for the other heads of a sequence.
_SHARED = 0.8
# The cost of an approximation falls with the power `COST_POWER` of the length and grows with a power of the columns.
# Without near keys it is `_FAR_COST` of the cost with the mean number of near keys. Up to `_NEAR_COST` is added for
# near keys where more than a fifth of the largest error is expected.
COST_POWER = 1.2
_COLUMNS_POWER = 0.7
_FAR_COST = 0.65
_NEAR_COST = 1.2
# An approximation must cost at most this share of exact attention. Otherwise exact heads leave little to gain.
_LARGEST_COST = 0.85
# The share of exact attention that may be lost, and the cost of the first attempts in a sequence. The heads of
# a sequence are alike, so if one attempt fails, all of them may fail.
_LOSS = 0.02
_FIRST_COST = 0.65
# A head has at most this many columns, unless it begins with more.
_MAX_COLUMNS = 1024


class Rows(NamedTuple):
    """Sampled queries of every head.

    Attributes:
        queries: int64 (BH, p), the indices of the queries, ascending.
        valid: bool (BH, p), False beyond the number of queries that may be sampled.
        population: int64 (BH, 1), the number of queries that the sample stands for.
    """

    queries: Tensor
    valid: Tensor
    population: Tensor


class RowError(NamedTuple):
    """Relative error |A - E| / |E| of each head in the operator norm.

    Attributes:
        estimate: (BH,), from the sampled rows; 0 without a valid row.
        bound: (BH,), at least `estimate`; equal to it if the sample contains every query.
    """

    estimate: Tensor
    bound: Tensor


def sample_rows(
    batch_heads: int,
    q_len: int,
    num_rows: int,
    query_mask: Tensor | None = None,
    *,
    num_heads: int,
    seed: Seed,
    device: torch.device,
) -> Rows:
    """Sample evenly spread queries of each head, without repetition, or all if there are at most `num_rows`.

    Args:
        batch_heads: B * H.
        q_len: number of queries.
        num_rows: queries of each head.
        query_mask: bool (BH, Nq), True for the queries that may be sampled, or None. False for padding, and for rows
            to which the approximation was fitted, because their error is smaller.
        num_heads: H. All sequences of a batch sample the same queries, and heads sample different ones.
        seed: seed of the offsets.
        device: device of the result.
    """
    if query_mask is None:
        query_mask = torch.ones(batch_heads, q_len, dtype=torch.bool, device=device)
    count = min(num_rows, q_len)
    available = query_mask.sum(1, keepdim=True)
    # An offset for each row in its stratum. With a common offset, rows at a regular distance could all meet, or all
    # miss, what is periodic in the input.
    offset = uniform((num_heads, count), seed, _STREAM, device).repeat(batch_heads // num_heads, 1)  # (BH, p)
    # Of fewer queries than rows, each is a stratum of its own.
    sampled = available.clamp(max=count)
    rank = strata(torch.arange(count, device=device), offset, available, sampled.clamp(min=1))
    rank = torch.minimum(rank, (available - 1).clamp(min=0))
    # The query of rank r is the first with r + 1 valid queries up to it.
    index = torch.searchsorted(query_mask.cumsum(1), rank + 1).clamp(max=q_len - 1)
    return Rows(index, torch.arange(count, device=device) < sampled, available)


@torch.no_grad()
def row_error(
    approximate: Tensor, exact: Tensor, valid: Tensor | None = None, population: Tensor | int | None = None
) -> RowError:
    """Estimate the error of heads from rows of their outputs.

    Args:
        approximate: (BH, p, Dv), the approximate output of the sampled queries.
        exact: (BH, p, Dv), the exact output of the same queries.
        valid: bool (BH, p), as in `Rows`, or None.
        population: as in `Rows`; None for a number without a limit.

    Returns:
        RowError in the accumulation dtype. If only E is 0, both are inf.
    """
    dtype = accumulation_dtype(exact.dtype)
    exact = exact.to(dtype)
    difference = approximate.to(dtype) - exact  # (BH, p, Dv)
    count: Tensor | int = exact.shape[1]
    if valid is not None:
        difference, exact = (x.masked_fill(~valid.unsqueeze(2), 0.0) for x in (difference, exact))
        count = valid.sum(1)
    error, error_share = _leading(difference)
    size, share = _leading(exact)
    estimate = torch.where(error == 0, 0.0, error / size)
    spread = torch.linalg.vector_norm(error_share - share, dim=1)  # (BH,)
    rows, all_rows = (
        torch.as_tensor(x, dtype=dtype, device=exact.device).view(-1)
        for x in (count, torch.inf if population is None else population)
    )
    rows = rows.clamp(min=1.0)
    factor = (1.0 - rows / all_rows).clamp(min=0.0).sqrt()
    return RowError(estimate, estimate * (1.0 + factor * (0.5 * rows.rsqrt() + spread)))


def _leading(x: Tensor) -> tuple[Tensor, Tensor]:
    """Find the largest singular value of x (BH, p, D), and the share of each row in its square: (BH,) and (BH, p)."""
    tiny = torch.finfo(x.dtype).tiny
    # Scaled to entries of at most 1, so that squares neither overflow nor underflow.
    scale = x.abs().amax((1, 2), keepdim=True).clamp(min=tiny)
    x = x / scale
    gram = power = x.transpose(1, 2) @ x  # (BH, D, p) @ (BH, p, D) -> (BH, D, D)
    for _ in range(_SQUARINGS):
        power = power / power.diagonal(dim1=1, dim2=2).sum(1)[:, None, None].clamp(min=tiny)
        power = power @ power
    # The column with the largest diagonal entry has a component along the leading eigenvector.
    largest = power.diagonal(dim1=1, dim2=2).argmax(1)[:, None, None].expand(-1, gram.shape[1], 1)
    vector = power.gather(2, largest)  # (BH, D, 1)
    vector = vector / torch.linalg.vector_norm(vector, dim=1, keepdim=True).clamp(min=tiny)
    squares = (x @ vector).squeeze(2).square()  # (BH, p)
    total = squares.sum(1)
    return total.sqrt() * scale.view(-1), squares / total.clamp(min=tiny).unsqueeze(1)


@torch.no_grad()
def screening_error(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor:
    """Guess cheaply how well landmarks approximate the attention of a head, before computing any of it.

    The guess is the error of a copy of the head with a few evenly spaced keys and queries. A few landmarks represent
    its keys: means of clusters with Nystrom weights, without near keys and probes. The error of the copy is larger than
    the error of the head, but the order of heads is similar: on MiniLM with 4,096 to 16,384 tokens (216 heads) heads
    within a bound of .1 have copies with a smaller error than other heads in 87 % of all pairs. The logarithm of the
    bound differs by a standard deviation of .6 from the guess.

    It takes (BH, Nq, D), (BH, Nk, D) and (BH, Nk, Dv), and returns (BH,) in the accumulation dtype, not negative.
    """
    dtype = accumulation_dtype(query.dtype)
    queries, keys, values = (
        x.index_select(1, even_positions(x.shape[1], min(x.shape[1], count), x.device)).to(dtype)
        for x, count in ((query, NUM_QUERIES), (key, NUM_KEYS), (value, NUM_KEYS))
    )
    keys = keys - keys.mean(1, keepdim=True)
    rough = _landmark_attention(queries, keys, values, scale)
    exact = scaled_dot_product_attention(queries, keys, values, scale=scale)
    return row_error(rough, exact).estimate.nan_to_num(nan=torch.inf)


def _landmark_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Compute attention to the landmarks of centered keys: (BH, p, Dv)."""
    root = TEMPERATURE * abs(scale) ** 0.5
    points = key * root  # (BH, n, D)
    count = min(NUM_LANDMARKS, key.shape[1])
    log_weight = 0.5 * points.square().sum(2, keepdim=True)
    weight = (log_weight - log_weight.amax(1, keepdim=True)).clamp(min=LEAST_LOG_WEIGHT).exp()
    terms = torch.cat((points * weight, weight), 2)
    centers = points.index_select(1, even_positions(key.shape[1], count, key.device))
    for _ in range(_NUM_STEPS):
        sums = cluster_sums(nearest(points, centers), terms, count)
        used = sums[..., -1:] > 0
        centers = torch.where(used, sums[..., :-1] / torch.where(used, sums[..., -1:], 1.0), centers)
    own = 0.5 * centers.square().sum(2)
    kernel = (torch.baddbmm(-own.unsqueeze(1), centers, centers.mT) - own.unsqueeze(2)).clamp(max=0.0).exp()
    # exp(<c, x> - |c|^2 / 2) for a landmark c and a key x, relative to the largest one of the head: (BH, m, Nk).
    similarity = torch.baddbmm(-own.unsqueeze(2), centers, points.mT)
    similarity = (similarity - similarity.amax((1, 2), keepdim=True)).exp()
    sums = similarity @ with_ones(value)  # (BH, m, Dv + 1)
    weights = regularized_solve(widened(kernel), widened(sums), RIDGE)
    scores = scale / root * query @ centers.mT if root else torch.zeros_like(query @ centers.mT)
    logits = widened(scores) - own.unsqueeze(1)  # (BH, p, m)
    basis = (logits - logits.amax(2, keepdim=True)).exp()
    out = basis @ weights  # (BH, p, Dv + 1), (BH, p, 1)
    size = basis @ weights[..., -1:].abs()
    positive = out[..., -1:] > _LEAST_DENOMINATOR * size
    ratio = out[..., :-1] / torch.where(positive, out[..., -1:], 1.0)
    means = sums[..., :-1] / sums[..., -1:].clamp(min=torch.finfo(sums.dtype).tiny)
    return torch.where(positive, ratio, widened(scores.softmax(2) @ means)).to(query.dtype)


class Forms(NamedTuple):
    """The two forms of a call's heads, from query, key and value (BH, N, .), and the bound of their error.

    Attributes:
        approximate: approximate(query, key, value, columns) returns the output (BH, Nq, Dv) of some heads.
        exact: exact(query, key, value) returns the exact output of some heads.
        num_probes: number of evenly spaced queries by which the output is corrected. The bound does not use them.
        max_error: the largest bound of a head's relative error in the operator norm.
        columns: number of columns of a head's first attempt.
        length: the number of keys from which on an approximation with these columns is worthwhile.
    """

    approximate: Callable[..., Tensor]
    exact: Callable[..., Tensor]
    num_probes: int
    max_error: float
    columns: int
    length: int


def worthwhile_length(crossover: int) -> int:
    """Compute the length from which on approximation costs little enough, from the crossover with exact attention."""
    return math.ceil(crossover * math.pow(_FAR_COST / _LARGEST_COST, 1.0 / COST_POWER))


def attempt_length(length: int) -> int:
    """Compute the number of keys up to which no head is attempted, whatever the data, from `Forms.length`."""
    low = 1
    high = 2 * length + 4 * NUM_ROWS
    while low < high:
        middle = (low + high) // 2
        cost = _LARGEST_COST * (length / middle) ** COST_POWER + NUM_ROWS / middle
        low, high = (low, middle) if cost <= _FIRST_COST else (middle + 1, high)
    return low - 1


def attend_within_bound(
    heads: tuple[Tensor, Tensor, Tensor], forms: Forms, batch: int, scale: float, seed: Seed
) -> tuple[Tensor, Tensor]:
    """Compute attention of each head with as many columns as it needs, or exactly.

    Args:
        heads: query (BH, Nq, D), key (BH, Nk, D) and value (BH, Nk, Dv) of B sequences without padding.
        forms: the forms of the heads, and the bound of their error.
        batch: B.
        scale: factor of the scores.
        seed: seed of the rows that bound the error.

    Returns:
        The output (BH, Nq, Dv), and the columns of every head, int64 (BH,); 0 for an exact head.
    """
    batch_heads, q_len, _ = heads[0].shape
    num_keys = heads[1].shape[1]
    device = heads[0].device
    shape = (batch, batch_heads // batch)
    levels = [forms.columns]
    while 2 * levels[-1] <= min(_MAX_COLUMNS, num_keys // 2):
        levels.append(2 * levels[-1])
    columns = torch.tensor(levels, device=device)
    growth = widened(columns).view(-1, 1, 1) / forms.columns  # (levels, 1, 1); costs are (levels, B, H)
    cost = _LARGEST_COST * (forms.length / num_keys) ** COST_POWER * growth**_COLUMNS_POWER + NUM_ROWS / num_keys
    log_bound = torch.full(shape, -torch.inf, dtype=growth.dtype, device=device)  # (B, H)
    if num_keys > 2 * NUM_KEYS:  # in a sequence that is hardly longer than its copy, an attempt costs less than it
        error = widened(screening_error(*heads, scale=scale)).view(shape)
        log_bound = torch.log(_COPY_FACTOR * (error * NUM_LANDMARKS / forms.columns) ** _GROWTH)
    cost = cost * (1.0 + _NEAR_COST * (5.0 * log_bound.exp() / forms.max_error - 1.0).clamp(0.0, 1.0))
    possible = torch.ones_like(cost, dtype=torch.bool)
    spread = torch.full_like(cost[0], _COPY_SPREAD)
    budget = torch.full((batch, 1), _LOSS * shape[1], dtype=growth.dtype, device=device)
    out = heads[2].new_empty(batch_heads, q_len, heads[2].shape[2])
    columns_of = torch.zeros(batch_heads, dtype=torch.int64, device=device)
    while True:
        probability = torch.special.ndtr((math.log(forms.max_error) - log_bound + _GROWTH * growth.log()) / spread)
        gain, level = (probability - cost).masked_fill(~possible, -torch.inf).max(0)  # (B, H) each
        chance, price = (x.gather(0, level.unsqueeze(0))[0] for x in (probability, cost))  # (B, H) each
        price = price.masked_fill(gain <= 0, 0.0)
        is_first = spread == _COPY_SPREAD
        order = gain.argsort(dim=1, descending=True, stable=True)  # (B, H)
        risk, first = (x.gather(1, order).cumsum(1) for x in ((1.0 - chance) * price, price * is_first))
        chosen = (gain > 0) & ((risk <= budget) & (first <= _FIRST_COST)).gather(1, order.argsort(1))
        if not bool(chosen.any()):
            break
        guessed = log_bound.clone()
        tried = chosen & is_first
        for number, count in enumerate(levels):
            some = (chosen & (level == number)).flatten().nonzero()[:, 0]
            if not len(some):
                continue
            q, k, v = (x.index_select(0, some) for x in heads)
            part = forms.approximate(q, k, v, count)
            bound = _bound((q, k, v, part), forms, scale, seed)
            good = bound <= forms.max_error
            out[some[good]] = part[good]
            columns_of[some[good]] = count
            log_bound.view(-1)[some] = widened(bound).log() + _GROWTH * math.log(count / forms.columns)
            spread.view(-1)[some] = _SPREAD
        if bool(tried.any()):
            news = ((log_bound - guessed) * tried).sum(1, keepdim=True) / tried.sum(1, keepdim=True).clamp(min=1)
            others = (spread == _COPY_SPREAD) & tried.any(1, keepdim=True)
            log_bound = torch.where(others, log_bound + _SHARED * news, log_bound)
            spread = spread.masked_fill(others, _NEXT_SPREAD)
        done = (columns_of > 0).view(shape)
        budget += torch.where(chosen, done.to(price.dtype) - price, 0.0).sum(1, keepdim=True)
        possible = possible & ~done & ~(chosen & (columns.view(-1, 1, 1) <= columns[level]))
    rest = (columns_of == 0).nonzero()[:, 0]
    if len(rest):
        out[rest] = forms.exact(*(x.index_select(0, rest) for x in heads))
    return out, columns_of


def _bound(heads: tuple[Tensor, ...], forms: Forms, scale: float, seed: Seed, num_rows: int | None = None) -> Tensor:
    """Bound the error of heads, query, key, value and output (BH, N, .), by rows to which the output was not fitted.

    Uses more than `NUM_ROWS` rows where the bound is just too large.
    """
    query, key, value, approximate = heads
    q_len = heads[0].shape[1]
    device = heads[0].device
    # The output was fitted to the queries in the middle of equal strata.
    middle = torch.full((1, 1), 0.5, dtype=wide_dtype(device), device=device)
    probe = stratified_ranks(forms.num_probes, q_len, middle)
    available = torch.ones(1, q_len, dtype=torch.bool, device=device).scatter(1, probe, False)
    rows = sample_rows(1, q_len, num_rows or NUM_ROWS, available, num_heads=1, seed=seed, device=device)
    index, valid, population = (x.expand(len(query), -1) for x in rows)
    exact = attend(take(query, index)[:, None], key[:, None], value[:, None], scale=scale).out[:, 0]
    bound = row_error(take(approximate, index), exact, valid, population).bound
    close = ((bound > forms.max_error) & (bound < _CLOSE * forms.max_error)).nonzero()[:, 0]
    if num_rows is None and len(close):
        some = tuple(x.index_select(0, close) for x in heads)
        bound = bound.index_copy(0, close, _bound(some, forms, scale, seed, _MORE_ROWS * NUM_ROWS))
    return bound
