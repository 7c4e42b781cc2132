"""Sums of exponentials by kernel density estimates (WExpKDE, Zandieh et al. 2023, Algorithm 2), and column norms."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.kernel.products import check_product
from hf_efficient_attn.ops import kde
from hf_efficient_attn.ops.backends.devices import in_float64

# Exponent of the cost of an estimate.
_TAU = 0.5


@dataclass(frozen=True)
class DensityReport:
    """What `weighted_exponential_kde` computed.

    Attributes:
        levels: for each round of estimates the lower bound mu of the densities, and the number of remaining queries.
        exact_rows: queries whose sum was computed exactly in the end.
        evaluations: kernel evaluations.
    """

    levels: tuple[tuple[float, int], ...]
    exact_rows: int
    evaluations: int


@in_float64
def weighted_exponential_kde(
    points: Tensor, queries: Tensor, weights: Tensor, *, eps: float, seed: int = 0
) -> tuple[Tensor, DensityReport]:
    """alpha_j within a factor 1 +- eps of sum_i v_i exp(<x_i, y_j>), v >= 0 (Zandieh et al. 2023, Algorithm 2).

    Lines 3-5: with N = max_j v_j exp(|x_j|^2 / 2) and w_i = sqrt(2 log(N / (v_i exp(|x_i|^2 / 2)))), points (x_i, w_i)
    and queries (y_j, 0), alpha_j = n N exp(|y_j|^2 / 2) mu(y'_j), where mu is the Gaussian density of bandwidth 1.
    Lines 6-10: `ops.kde.gaussian_kde` estimates densities down to mu, which starts at 1 / n, for the remaining queries.
    mu is halved as long as an estimate at mu is cheaper than the exact sums of the remaining queries. Line 11: the sums
    of the queries that remain are computed exactly.

    Departures from the paper:

    - N is the largest term, the smallest N for which every w_i is real, rather than the sum of the terms. With the sum
      all points would be at least sqrt(2 log n) away from all queries, and no density above 1 / n.
    - tau = 1/2 is the exponent of the densities of Charikar & Siminelakis (2017), which are used here. The paper would
      use .173 and the data structure of Charikar et al. (2020). The condition of line 6, mu^-tau <= eps^2 |S|, is here
      that 2 eps^-2 mu^-tau tables are at most |S|.
    - A query remains not only if its estimate is below mu, but also if its own standard error is above eps / 3 of the
      estimate.
    - Sums are computed in the log domain, so that no exponential overflows.

    Args:
        points: x, (n, d).
        queries: y, (n_queries, d).
        weights: v, (n,), not negative.
        eps: relative error, in (0, 1).
        seed: seed of the hash and of the sampling.

    Returns:
        log alpha, float64 (n_queries,), -inf if all weights are 0; and a `DensityReport`.

    Raises:
        UnsupportedAttentionError: the shapes do not match, eps is out of range, or a weight is negative.
    """
    check_product(queries, points, weights.unsqueeze(-1), 1.0)
    if not 0.0 < eps < 1.0:
        raise UnsupportedAttentionError(f"eps={eps} must be above 0 and below 1")
    if bool((weights < 0).any()):
        raise UnsupportedAttentionError("weights below 0 are not a density; split the sum by sign into two sums")
    return _log_densities(points.double(), queries.double(), weights.double().log(), eps, seed)


def _log_densities(
    points: Tensor, queries: Tensor, logs: Tensor, eps: float, seed: int | Tensor
) -> tuple[Tensor, DensityReport]:
    """`weighted_exponential_kde` by the logarithms (n,) of the weights, all float64."""
    positive = logs > -torch.inf
    points, logs = points[positive], logs[positive]
    num_queries, num_points = queries.shape[0], points.shape[0]
    out = torch.full((num_queries,), -torch.inf, dtype=torch.float64, device=queries.device)
    if num_queries == 0 or num_points == 0:
        return out, DensityReport((), 0, 0)
    terms = logs + 0.5 * points.square().sum(1)
    largest = terms.max()  # log N
    augmented = torch.cat((points, (2.0 * (largest - terms)).clamp(min=0.0).sqrt()[:, None]), 1)
    factor = math.log(num_points) + largest + 0.5 * queries.square().sum(1)
    mu, levels, evaluations = 1.0 / num_points, [], 0
    remaining = torch.arange(num_queries, device=queries.device)
    # float32 is sufficient for sampling. The exact sums are in float64.
    hashed, asked = augmented.float(), torch.cat((queries, queries.new_zeros(num_queries, 1)), 1).float()
    # Tables with which densities of mu and more have about the relative error eps.
    while (tables := max(16, math.ceil(2.0 * eps**-2 * mu**-_TAU))) <= len(remaining):
        levels.append((mu, len(remaining)))
        stream = 1_000_000 * len(levels)
        mean, error = kde.gaussian_kde(hashed, asked[remaining], mu=mu, tables=tables, seed=seed, stream=stream)
        evaluations += tables * len(remaining)
        sure = (mean >= mu) & (error <= eps / 3.0 * mean)
        out[remaining[sure]] = mean[sure].log() + factor[remaining[sure]]
        mu, remaining = mu / 2.0, remaining[~sure]
    for some_queries in kde.query_blocks(len(remaining), num_points):
        out[remaining[some_queries]] = torch.addmm(logs, queries[remaining[some_queries]], points.t()).logsumexp(1)
    evaluations += len(remaining) * num_points
    return out, DensityReport(tuple(levels), len(remaining), evaluations)


@in_float64
def softmax_column_norms(
    queries: Tensor, keys: Tensor, seed: int | Tensor = 0, *, eps: float = 1.0 / 3.0
) -> tuple[Tensor, Tensor]:
    """Logarithms of beta_j, the squared norms of the columns of D^-1 A, and of alpha_i, the row sums of A.

    A = exp(queries keys^T) and D = diag(A 1): alpha_i = sum_j exp(<q_i, k_j>) and beta_j = sum_i alpha_i^-2
    exp(2 <q_i, k_j>), each by `weighted_exponential_kde` (Zandieh et al. 2023, Algorithm 1, lines 3-4). Queries
    (n_queries, d) and keys (n, d) each contain the square root of the scale, as in the paper, which makes the distances
    smallest. The paper computes alpha to eps / 3, because it divides by alpha. Here keys are sampled by beta, nothing
    is divided by alpha, and both have the relative error eps, in (0, 1).

    Returns:
        log beta (n,) and log alpha (n_queries,), float64.
    """
    queries, keys, root = queries.double(), keys.double(), math.sqrt(2.0)
    log_sums, _ = _log_densities(keys, queries, keys.new_zeros(len(keys)), eps, seed)
    return _log_densities(root * queries, root * keys, -2.0 * log_sums, eps, seed + 1)[0], log_sums
