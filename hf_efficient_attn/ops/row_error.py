"""The error of an approximate attention output, estimated from the exact output of a few queries.

The error of a head is |A - E| / |E| in the operator norm, where A is the approximate and E the exact output. Both norms
are estimated from the same p rows, one from each of p equal strata of the queries, which costs p / Nq of exact
attention. In a sample of rows, the largest singular value of A - E is on average too large rather than too small,
because the largest eigenvalue is a convex function of the Gram matrix. A sample misses rare rows with a large error.

The bound adds a margin for what the sample misses. The margin comes from the infinitesimal jackknife (Jaeckel 1972):

    s_i     the share of row i in |A - E|^2: the square of the row's component along the leading right singular vector,
            divided by the sum of these squares
    t_i     the share of row i in |E|^2, in the same way
    bound = estimate (1 + sqrt(1 - p / Nq) (|s - t| + 1 / (2 sqrt(p))))

To first order, without row i the logarithm of the squared ratio changes by s_i - t_i. So the relative standard error of
the ratio is |s - t| / 2, and the margin is twice that. The term 1 / (2 sqrt(p)) is for directions that no sampled row
shows. The factor sqrt(1 - p / Nq) is there because the number of rows is finite.

`recipes.benchmarks.error_bound` measures how often the bound fails: most often for errors of rank 1 that differ much
between rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.backends.devices import accumulation_dtype
from hf_efficient_attn.ops.clusters import matrix_power
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.strata import strata

_STREAM = 31
# Squarings of a Gram matrix: the leading eigenvector is found as by 2**6 steps of the power method.
_SQUARINGS = 6


class Rows(NamedTuple):
    """Sampled queries of every head."""

    queries: Tensor  # int64 (BH, p), the indices of the queries, ascending
    valid: Tensor  # bool (BH, p), False beyond the number of queries that may be sampled
    population: Tensor  # int64 (BH, 1), the number of queries that the sample stands for


class RowError(NamedTuple):
    """Relative error |A - E| / |E| of each head in the operator norm."""

    estimate: Tensor  # (BH,), from the sampled rows; 0 without a valid row
    bound: Tensor  # (BH,), at least `estimate`; equal to it if the sample contains every query


def sample_rows(
    batch_heads: int, q_len: int, num_rows: int, query_mask: Tensor | None = None, *, num_heads: int, draws: Draws
) -> Rows:
    """Sample evenly spread queries of each head, without repetition, or all if there are at most `num_rows`.

    Args:
        batch_heads: B * H.
        q_len: number of queries.
        num_rows: queries of each head.
        query_mask: bool (BH, Nq), True for the queries that may be sampled, or None. False for padding, and for rows
            to which the approximation was fitted, because their error is smaller.
        num_heads: H. All sequences of a batch sample the same queries, and heads sample different ones.
        draws: the random numbers of the offsets.
    """
    device = draws.device
    if query_mask is None:
        query_mask = torch.ones(batch_heads, q_len, dtype=torch.bool, device=device)
    count = min(num_rows, q_len)
    available = query_mask.sum(1, keepdim=True)  # (BH, 1)
    # An offset for each row in its stratum. With a common offset, rows at a regular distance could all meet, or all
    # miss, what is periodic in the input.
    offset = draws.uniform((num_heads, count), _STREAM).repeat(batch_heads // num_heads, 1)  # (BH, p)
    # Of fewer queries than rows, each is a stratum of its own.
    sampled = available.clamp(max=count)
    rank = strata(torch.arange(count, device=device), offset, available, sampled.clamp(min=1))
    rank = torch.minimum(rank, (available - 1).clamp(min=0))
    # The query of rank r is the first with r + 1 valid queries up to it.
    index = torch.searchsorted(query_mask.cumsum(1), rank + 1).clamp(max=q_len - 1)  # (BH, p)
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
    error, error_share = _leading(difference)  # (BH,), (BH, p)
    size, share = _leading(exact)
    estimate = torch.where(error == 0, 0.0, error / size)
    spread = torch.linalg.vector_norm(error_share - share, dim=1)  # (BH,)
    rows, all_rows = (
        torch.as_tensor(x, dtype=dtype, device=exact.device).view(-1)
        for x in (count, torch.inf if population is None else population)
    )
    rows = rows.clamp(min=1.0)
    factor = (1.0 - rows / all_rows).clamp(min=0.0).sqrt()  # (BH,)
    return RowError(estimate, estimate * (1.0 + factor * (0.5 * rows.rsqrt() + spread)))


def _leading(x: Tensor) -> tuple[Tensor, Tensor]:
    """Find the largest singular value of x (BH, p, D), and the share of each row in its square: (BH,) and (BH, p)."""
    tiny = torch.finfo(x.dtype).tiny
    # Scaled to entries of at most 1, so that squares neither overflow nor underflow.
    scale = x.abs().amax((1, 2), keepdim=True).clamp(min=tiny)  # (BH, 1, 1)
    x = x / scale
    gram = x.transpose(1, 2) @ x  # (BH, D, p) @ (BH, p, D) -> (BH, D, D)
    power = matrix_power(gram, _SQUARINGS)
    # The column with the largest diagonal entry has a component along the leading eigenvector.
    largest = power.diagonal(dim1=1, dim2=2).argmax(1)[:, None, None].expand(-1, gram.shape[1], 1)  # (BH, D, 1)
    vector = power.gather(2, largest)  # (BH, D, 1)
    vector = vector / torch.linalg.vector_norm(vector, dim=1, keepdim=True).clamp(min=tiny)
    squares = (x @ vector).squeeze(2).square()  # (BH, p)
    total = squares.sum(1)
    return total.sqrt() * scale.view(-1), squares / total.clamp(min=tiny).unsqueeze(1)
