"""Pivots of a kernel matrix in two draws, for accelerators, where each draw is twenty kernels."""

import math

import torch
from torch import Tensor
from torch.nn.functional import threshold

from hf_efficient_attn.ops.blocks import take
from hf_efficient_attn.ops.constants import constant

# The first draw selects one of so many pivots.
_FIRST_SHARE = 4
# What the score of a candidate without a residual loses. Norms are smaller.
_NOTHING_LEFT = -1e6


def pivots_in_two_draws(
    points: Tensor, valid: Tensor | None, numbers: Tensor, count: int, tolerance: float
) -> tuple[Tensor, Tensor]:
    """Pivots of exp(<x_i, x_j>) in two draws of randomly pivoted Cholesky; see `coreset.choose_pivots`.

    A quarter of the pivots is drawn by the diagonal of the kernel matrix, and the others by what Nystrom's
    approximation by these leaves of it. On activations of BERT and ViT the error of a coreset is that of growing draws.

    Args:
        points: (BH, C, D) in the accumulation dtype.
        valid: bool (BH, C), which candidates exist, or None.
        numbers: Gumbel numbers (2, H, C).
        count: m, at most C.
        tolerance: what is left of a unit diagonal and smaller is rounding.

    Returns:
        The candidates, int64 (BH, m), and bool (BH, m): False where none is left.
    """
    first = max(1, count // _FIRST_SHARE)
    norm = torch.linalg.vector_norm(points, dim=2)
    half = torch.addcmul(constant(_zero, norm.dtype, device=norm.device), norm, norm, value=-0.5)
    # The log of the diagonal of the kernel matrix, |x|^2, plus the numbers of both draws.
    scores = torch.add(numbers.unsqueeze(1), half.unflatten(0, (-1, numbers.shape[1])), alpha=-2.0).flatten(1, 2)
    if valid is not None:
        scores = scores.masked_fill_(~valid, -torch.inf)
    best, index = scores[0].topk(first, dim=1)
    if count == 1:
        return _existing(best, index, valid)

    # Rows of exp(-|x - y|^2 / 2), whose diagonal is 1.
    rows = torch.baddbmm(half.unsqueeze(1), take(points, index), points.mT)
    rows.add_(half.gather(1, index).unsqueeze(2)).clamp_(max=0.0).exp_()
    if valid is not None:  # a pivot that does not exist has a row of zeros, and the ridge on the diagonal
        rows.mul_((best > -torch.inf).unsqueeze(2))
    corner = rows.gather(2, index.unsqueeze(1).expand(-1, first, -1))
    corner.diagonal(dim1=1, dim2=2).add_(0.1 * tolerance)
    lower, _ = torch.linalg.cholesky_ex(corner)
    norm = torch.linalg.vector_norm(torch.linalg.solve_triangular(lower, rows, upper=False), dim=1)
    one = constant(_one, norm.dtype, device=norm.device)
    left = torch.addcmul(one, norm, norm, value=-1.0)
    # Where only rounding makes the decomposition fail, what is left may be NaN: the second draw is then like the first.
    left = torch.fmax(left, constant(_zero, norm.dtype, device=norm.device)).log_()
    second = threshold(left, math.log(tolerance), _NOTHING_LEFT, inplace=True).add_(scores[1])
    second.scatter_(1, index, -torch.inf)
    more_best, more = second.topk(count - first, dim=1)
    return _existing(torch.cat((best, more_best), 1), torch.cat((index, more), 1), valid)


def _existing(scores: Tensor, index: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """The drawn candidates, with index 0 for those that do not exist, and which ones exist."""
    if valid is None:
        return index, torch.ones_like(index, dtype=torch.bool)
    selected = scores > -torch.inf
    return index.masked_fill(~selected, 0), selected


def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)


def _one(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones((), dtype=dtype, device=device)
