"""Pseudo-inverses of many small matrices: a third-order iteration, and regularized least squares."""

import torch
from torch import Tensor

# `damped_solve` damps squared singular values below this part of |A|_1 |A|_inf. They are more noise than signal, and
# six steps of the iteration damp those below 1e-3 of it as well.
DAMPING = 1e-4


def _norm_bound(matrix: Tensor) -> Tensor:
    """|A|_1 |A|_inf, a bound of |A|_2^2: the largest column sum times the largest row sum, (..., 1, 1); 1 for A = 0."""
    size = matrix.abs()
    bound = size.sum(-2).amax(-1) * size.sum(-1).amax(-1)
    return bound.masked_fill(bound == 0, 1.0)[..., None, None]


def iterative_pinv(matrix: Tensor, iterations: int) -> Tensor:
    """Approximate the pseudo-inverse of every matrix by the third-order iteration of Razavi et al. (2014).

    It starts from Z = A^T / (|A|_1 |A|_inf), and a step is Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4. With
    e = 1 - s z, for singular values s of A and z of Z, a step takes e to e^3 (3 + e) / 4. A small s z grows by a factor
    of 13/4 per step, so that few steps leave small singular values damped. Each matrix starts from its own norms and
    does not depend on the others.

    Args:
        matrix: (..., L, M). Rows and columns of zeros remain zeros.
        iterations: number of steps.

    Returns:
        (..., M, L).
    """
    start, batch = matrix.transpose(-1, -2) / _norm_bound(matrix), matrix.shape[:-2]
    matrix, z = (x.reshape(-1, *x.shape[-2:]) for x in (matrix, start))
    for _ in range(iterations):
        # The identity is never formed: P (7 I - P) = 7 P - P P, and so on.
        product = torch.bmm(matrix, z)
        inner = torch.baddbmm(product, product, product, beta=7.0, alpha=-1.0)
        inner = torch.baddbmm(product, product, inner, beta=15.0, alpha=-1.0)
        z = torch.baddbmm(z, z, inner, beta=3.25, alpha=-0.25)
    return z.view(*batch, *z.shape[1:])


def damped_solve(matrix: Tensor, right: Tensor) -> Tensor:
    """The X that minimizes |A X - Y|^2 + c |X|^2 with c = 1e-4 |A|_1 |A|_inf.

    It is computed by the Cholesky decomposition of A^T A + c I, in float64 for every dtype, because A^T A loses half of
    the digits. The result and its gradient are also finite for singular matrices, unlike those of a truncated
    pseudo-inverse.

    Args:
        matrix: A, (..., L, M).
        right: Y, (..., L, N).

    Returns:
        X, (..., M, N), in the dtype of `matrix`.
    """
    a, right = matrix.double(), right.double()
    gram = a.transpose(-1, -2) @ a
    gram = gram + DAMPING * _norm_bound(a) * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    factor, _ = torch.linalg.cholesky_ex(gram)
    return torch.cholesky_solve(a.transpose(-1, -2) @ right, factor).to(matrix.dtype)
