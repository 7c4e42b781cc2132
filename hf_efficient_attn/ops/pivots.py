"""Pivots of a kernel matrix in two draws, for accelerators, where each draw is twenty kernels."""

import math

import torch
from torch import Tensor
from torch.nn.functional import threshold

from hf_efficient_attn.ops.constants import constant

# The first draw selects one of so many pivots.
_FIRST_SHARE = 4
# What the score of a candidate without a residual loses. Norms are smaller.
_NOTHING_LEFT = -1e6


def pivot_tolerance(dtype: torch.dtype) -> float:
    """A residual of the unit diagonal that is smaller is rounding: the pivot adds nothing."""
    return 1e-10 if dtype == torch.float64 else 1e-4


def pivots_in_two_draws(
    points: Tensor, norm: Tensor, factor: Tensor | None, valid: Tensor | None, numbers: Tensor, count: int
) -> tuple[Tensor, Tensor | None]:
    """Pivots of exp(factor <x_i, x_j>) in two draws of randomly pivoted Cholesky; see `coreset.choose_pivots`.

    A quarter of the pivots is drawn by the diagonal of the kernel matrix, and the others by what Nystrom's
    approximation by these leaves of it. On activations of BERT and ViT the error of a coreset is that of growing draws.

    Args:
        points: x, (BH, C, D) in the accumulation dtype.
        norm: their Euclidean norms, (BH, C).
        factor: (BH, 1, 1), not negative, or None for 1.
        valid: bool (BH, C), which candidates exist, or None.
        numbers: Gumbel numbers (2, H, C).
        count: m, at most C.

    Returns:
        The candidates, int64 (BH, m), those of the first draw first, and bool (BH, m): False where none is left, with
        index 0. It is None without `valid`.
    """
    first, tolerance = max(1, count // _FIRST_SHARE), pivot_tolerance(points.dtype)
    zero = constant(_number, 0.0, norm.dtype, device=norm.device)
    half = torch.addcmul(zero, norm if factor is None else norm * factor[..., 0], norm, value=-0.5)
    # The log of the diagonal of the kernel matrix, factor |x|^2, plus the numbers of both draws.
    scores = torch.add(numbers.unsqueeze(1), half.unflatten(0, (-1, numbers.shape[1])), alpha=-2.0).flatten(1, 2)
    if valid is not None:
        scores = scores.masked_fill_(~valid, -torch.inf)
    best, index = scores[0].topk(first, dim=1)
    if count > 1:
        # Rows of exp(-factor |x - y|^2 / 2), whose diagonal is 1.
        drawn = points.gather(1, index.unsqueeze(2).expand(-1, -1, points.shape[2]))
        rows = torch.baddbmm(half.unsqueeze(1), drawn if factor is None else drawn * factor, points.mT)
        rows.add_(half.gather(1, index).unsqueeze(2)).exp_()
        exists = None
        if valid is not None:  # a pivot that does not exist has a row of zeros, and the ridge on the diagonal
            exists = best > -torch.inf
            rows.mul_(exists.unsqueeze(2))
        corner = rows.gather(2, index.unsqueeze(1).expand(-1, first, -1))
        corner.diagonal(dim1=1, dim2=2).add_(0.1 * tolerance)
        lower, _ = torch.linalg.cholesky_ex(corner)
        share = torch.linalg.vector_norm(torch.linalg.solve_triangular(lower, rows, upper=False), dim=1)
        left = torch.addcmul(constant(_number, 1.0, norm.dtype, device=norm.device), share, share, value=-1.0)
        # Where rounding makes the decomposition fail, what is left may be NaN: the second draw is then like the first.
        left = torch.fmax(left, zero).log_()
        second = threshold(left, math.log(tolerance), _NOTHING_LEFT, inplace=True).add_(scores[1])
        if exists is None:
            second.scatter_(1, index, torch.inf)
        else:
            second.scatter_(1, index, torch.where(exists, torch.inf, -torch.inf).to(second.dtype))
        best, index = second.topk(count, dim=1)
    if valid is None:
        return index, None
    selected = best > -torch.inf
    return index.masked_fill(~selected, 0), selected


def _number(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)
