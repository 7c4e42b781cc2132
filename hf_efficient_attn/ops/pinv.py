"""Pseudo-inverses of many small matrices: a third-order iteration, and regularised least squares."""

import torch
from torch import Tensor

# Squared singular values below this part of |A|_1 |A|_inf are damped by `damped_solve`: they are noise more than
# signal, and six steps of the iteration leave those below 1e-3 of it damped.
DAMPING = 1e-4


def _scale(matrix: Tensor) -> Tensor:
    """|A|_1 |A|_inf (..., 1, 1), a bound of |A|_2^2: the largest sum of a column times that of a row; 1 for A = 0."""
    size = matrix.abs()
    scale = size.sum(-2).amax(-1) * size.sum(-1).amax(-1)
    return scale.masked_fill(scale == 0, 1.0)[..., None, None]


def iterative_pinv(matrix: Tensor, iterations: int) -> Tensor:
    """Approximate pseudo-inverse of every matrix by the third-order iteration of Razavi et al. (2014).

    From Z = A^T / (|A|_1 |A|_inf), Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4. With e = 1 - s z for a singular
    value s of A and that z of Z, a step takes e to e^3 (3 + e) / 4. Where s z is small it grows by 13/4 a step, so that
    few steps leave small singular values damped. Each matrix starts from its own norms: no other one's show.

    Args:
        matrix: (..., L, M); rows and columns of zeros stay zeros.

    Returns:
        (..., M, L).
    """
    z = matrix.transpose(-1, -2) / _scale(matrix)
    one = torch.eye(matrix.shape[-2], dtype=matrix.dtype, device=matrix.device)
    for _ in range(iterations):
        product = matrix @ z
        inner = 7.0 * one - product
        inner = 15.0 * one - product @ inner
        z = 0.25 * z @ (13.0 * one - product @ inner)
    return z


def damped_solve(matrix: Tensor, right: Tensor) -> Tensor:
    """X of least |A X - Y|^2 + c |X|^2 with c = 1e-4 |A|_1 |A|_inf: (..., L, M), (..., L, N) -> (..., M, N).

    By Cholesky's decomposition of A^T A + c I in float64, whatever the type, since squaring A loses half the digits. It
    is finite and has finite gradients for singular matrices too, which a truncated pseudo-inverse has not.
    """
    wide, right = matrix.double(), right.double()
    gram = wide.transpose(-1, -2) @ wide
    gram = gram + DAMPING * _scale(wide) * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    factor, _ = torch.linalg.cholesky_ex(gram)
    return torch.cholesky_solve(wide.transpose(-1, -2) @ right, factor).to(matrix.dtype)
