"""Pseudo-inverses of many small matrices: a third-order iteration, and regularized least squares."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

# `damped_solve` damps squared singular values below this part of |A|_1 |A|_inf. They are more noise than signal, and
# six steps of the iteration damp those below 1e-3 of it as well.
DAMPING = 1e-4


def _norm_bound(matrix: Tensor) -> Tensor:
    """|A|_1 |A|_inf, a bound of |A|_2^2: the largest column sum times the largest row sum, (..., 1, 1); 1 for A = 0."""
    size = matrix.abs()
    bound = size.sum(-2).amax(-1) * size.sum(-1).amax(-1)
    return bound.masked_fill(bound == 0, 1.0)[..., None, None]


def iterative_pinv(matrix: Tensor, iterations: int, bound: Tensor | None = None) -> Tensor:
    """Approximate the pseudo-inverse of every matrix by the third-order iteration of Razavi et al. (2014).

    It starts from Z = A^T / (|A|_1 |A|_inf), and a step is Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4. With
    e = 1 - s z, for singular values s of A and z of Z, a step takes e to e^3 (3 + e) / 4. A small s z grows by a factor
    of 13/4 per step, so that few steps leave small singular values damped. Each matrix starts from its own norms and
    does not depend on the others.

    Args:
        matrix: (..., L, M). Rows and columns of zeros remain zeros.
        iterations: number of steps.
        bound: (..., 1, 1), what to use for |A|_1 |A|_inf, positive, or None to compute it.

    Returns:
        (..., M, L).
    """
    bound = _norm_bound(matrix) if bound is None else bound
    start, batch = matrix.transpose(-1, -2) / bound, matrix.shape[:-2]
    flat_matrix, flat_start = (x.reshape(-1, *x.shape[-2:]) for x in (matrix, start))
    z = _iterate(flat_matrix, flat_start, iterations)
    return z.view(*batch, *z.shape[1:])


def _step(matrix: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A step of the iteration: P = A Z, 7 P - P P, 15 P - P (7 P - P P) and the next Z, without the identity."""
    product = torch.bmm(matrix, z)
    first = torch.baddbmm(product, product, product, beta=7.0, alpha=-1.0)
    second = torch.baddbmm(product, product, first, beta=15.0, alpha=-1.0)
    return product, first, second, torch.baddbmm(z, z, second, beta=3.25, alpha=-0.25)


class _Iteration(torch.autograd.Function):
    """The steps for A (BH, L, M) and Z (BH, M, L). The backward pass has half as many kernels as that of autograd."""

    @staticmethod
    def forward(ctx: FunctionCtx, matrix: Tensor, z: Tensor, iterations: int) -> Tensor:
        saved = [matrix]
        with torch.autocast(matrix.device.type, enabled=False):
            for _ in range(iterations):
                saved.append(z)
                *inner, z = _step(matrix, z)
                saved += inner
        ctx.save_for_backward(*saved)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        matrix, *steps = ctx.saved_tensors  # type: ignore[attr-defined]
        grad_matrix = torch.zeros_like(matrix)
        with torch.autocast(grad.device.type, enabled=False):
            for i in range(len(steps) - 4, -1, -4):
                z, product, first, second = steps[i : i + 4]
                product_t = product.mT
                # The gradients of the second, the first and P, times -4, 4 and 4.
                of_second = torch.bmm(z.mT, grad)
                of_first = torch.bmm(product_t, of_second)
                of_product = torch.baddbmm(of_second, of_second, first.mT, beta=-15.0).add_(of_first, alpha=7.0)
                of_product.baddbmm_(of_first, product_t, alpha=-1.0).baddbmm_(product_t, of_first, alpha=-1.0)
                grad = torch.baddbmm(grad, grad, second.mT, beta=3.25, alpha=-0.25)
                grad = grad.baddbmm_(matrix.mT, of_product, alpha=0.25)
                grad_matrix.baddbmm_(of_product, z.mT, alpha=0.25)
        return grad_matrix, grad, None


_iterate: Callable[[Tensor, Tensor, int], Tensor] = _Iteration.apply


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
