"""Sums of exponentials by kernel density estimates (WExpKDE, Zandieh et al. 2023, Algorithm 2), and column norms."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.ops import kde

# Tables that tell which densities are far below a bound.
_FIRST = 32


@dataclass(frozen=True)
class DensityReport:
    """What `weighted_exponential_kde` did.

    levels: lower bounds mu of the densities that were estimated at, with the number of queries still open then.
    exact_rows: queries whose sum was computed exactly in the end.
    evaluations: kernel evaluations. pairs: n_queries * n_points.
    """

    levels: tuple[tuple[float, int], ...]
    exact_rows: int
    evaluations: int
    pairs: int


def weighted_exponential_kde(
    points: Tensor, queries: Tensor, weights: Tensor, *, eps: float, seed: int = 0, tau: float = 0.5
) -> tuple[Tensor, DensityReport]:
    """alpha_j within a factor 1 +- eps of sum_i v_i exp(<x_i, y_j>), v >= 0 (Zandieh et al. 2023, Algorithm 2).

    Lines 3-5: N = max_j v_j exp(|x_j|^2 / 2), w_i = sqrt(2 log(N / (v_i exp(|x_i|^2 / 2)))), points (x_i, w_i) and
    queries (y_j, 0), for which alpha_j = n N exp(|y_j|^2 / 2) mu(y'_j) with mu the Gaussian density of bandwidth 1.
    Lines 6-10: estimates by `ops.kde.gaussian_kde` of densities down to mu, at first 1 / n, for the queries that are
    still open; mu is halved while an estimate at mu is cheaper than what is open. Line 11: what is then still open,
    exactly.

    Departures: N is the largest term rather than their sum, the smallest that leaves every w_i real: with the sum, all
    points are at least sqrt(2 log n) away from all queries, and no density is above 1 / n. tau = 1/2 is the exponent
    of the densities of Charikar & Siminelakis (2017), used here, where the paper would take the data structure of
    Charikar et al. (2020) with .173. The condition of line 6, mu^-tau <= eps^2 |S|, is that of 2 eps^-2 mu^-tau tables
    being fewer than |S|. A query is open not only where the estimate is below mu, but also where its own standard
    error is above eps / 3 of it, and a query whose estimate from 32 tables is below mu / 4 is not asked with all of
    them. Sums are in the log domain, so that no exponential overflows.

    Args:
        points: x (n, d). queries: y (n_queries, d). weights: v (n,), not negative.
        eps: relative error, in (0, 1).

    Returns:
        log alpha (n_queries,) float64, -inf where all weights are 0; and a `DensityReport`.
    """
    if (
        points.ndim != 2
        or queries.ndim != 2
        or points.shape[1] != queries.shape[1]
        or weights.shape != points.shape[:1]
    ):
        raise UnsupportedAttentionError(
            f"points (n, d), queries (n_queries, d) and weights (n,) are needed; got {tuple(points.shape)}, "
            f"{tuple(queries.shape)} and {tuple(weights.shape)}"
        )
    if not 0.0 < eps < 1.0 or not 0.0 < tau <= 1.0:
        raise UnsupportedAttentionError(f"eps={eps} must be above 0 and below 1, tau={tau} above 0 and at most 1")
    if bool((weights < 0).any()):
        raise UnsupportedAttentionError("weights below 0 make no density; split them by sign into two sums")
    return _log_densities(points.double(), queries.double(), weights.double().log(), eps, seed, tau)


def _log_densities(points: Tensor, queries: Tensor, logs: Tensor, eps: float, seed, tau: float = 0.5) -> tuple:
    """`weighted_exponential_kde` by the logarithms of the weights, all float64."""
    there = logs > -torch.inf
    points, logs = points[there], logs[there]
    rows, count = queries.shape[0], points.shape[0]
    out = torch.full((rows,), -torch.inf, dtype=torch.float64, device=queries.device)
    if rows == 0 or count == 0:
        return out, DensityReport((), 0, 0, rows * count)
    terms = logs + 0.5 * points.square().sum(1)
    whole = terms.max()  # log N
    augmented = torch.cat((points, (2.0 * (whole - terms)).clamp(min=0.0).sqrt()[:, None]), 1)
    asked = torch.cat((queries, queries.new_zeros(rows, 1)), 1)
    factor = math.log(count) + whole + 0.5 * queries.square().sum(1)
    mu, open_, levels, evaluations = 1.0 / count, torch.arange(rows, device=queries.device), [], 0
    # Sampling needs no more than float32; the sums that are exact are in float64.
    hashed, asked = augmented.float(), asked.float()
    while (tables := _tables(eps, mu, tau)) <= len(open_):
        levels.append((mu, len(open_)))
        stream = 1_000_000 * len(levels)
        first = kde.gaussian_kde(hashed, asked[open_], mu=mu, tables=_FIRST, seed=seed, stream=stream + 500_000)
        evaluations += first.evaluations
        some = (first.mean >= mu / 4.0).nonzero().squeeze(1)
        done = torch.zeros_like(open_, dtype=torch.bool)
        if len(some):
            estimate = kde.gaussian_kde(hashed, asked[open_[some]], mu=mu, tables=tables, seed=seed, stream=stream)
            evaluations += estimate.evaluations
            sure = (estimate.mean >= mu) & (estimate.error <= eps / 3.0 * estimate.mean)
            done[some] = sure
            out[open_[done]] = estimate.mean[sure].log() + factor[open_[done]]
        mu, open_ = mu / 2.0, open_[~done]
    for rest in kde.row_blocks(len(open_), count):
        scores = torch.addmm(logs, queries[open_[rest]], points.t())
        out[open_[rest]] = scores.logsumexp(1)
    evaluations += len(open_) * count
    return out, DensityReport(tuple(levels), len(open_), evaluations, rows * count)


def softmax_column_norms(
    queries: Tensor, keys: Tensor, seed: int = 0, *, eps: float = 1.0 / 3.0
) -> tuple[Tensor, Tensor]:
    """Logarithms of beta_j, the squared norms of the columns of D^-1 A, and of alpha_i, the row sums of A.

    A = exp(queries keys^T), D = diag(A 1): alpha_i = sum_j exp(<q_i, k_j>) and beta_j = sum_i alpha_i^-2
    exp(2 <q_i, k_j>), each by `weighted_exponential_kde` (Zandieh et al. 2023, Algorithm 1, lines 3-4). Queries and
    keys both hold the square root of the scale, as there: distances are then the smallest. The paper takes alpha to
    eps / 3 since it divides by it; here columns are drawn by beta, and nothing is divided by alpha.

    Returns:
        log beta (n,) and log alpha (n_queries,), float64.
    """
    queries, keys, root = queries.double(), keys.double(), math.sqrt(2.0)
    log_sums, _ = _log_densities(keys, queries, keys.new_zeros(len(keys)), eps, seed)
    return _log_densities(root * queries, root * keys, -2.0 * log_sums, eps, seed + 1)[0], log_sums


def _tables(eps: float, mu: float, tau: float) -> int:
    return max(16, math.ceil(2.0 * eps**-2 * mu**-tau))
