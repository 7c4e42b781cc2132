"""The operator norm of matrices: the measure of all errors, and part of the stable rank."""

import math

import torch
from torch import Tensor

# Longest shorter side of a matrix whose operator norm is computed from all eigenvalues of M^T M.
_SMALL_SIDE = 512
# Largest number of steps of the Lanczos iteration. Attention matrices take 5 to 60.
_MAX_STEPS = 300


@torch.no_grad()
def operator_norm(matrix: Tensor) -> Tensor:
    """The largest singular value: (..., N, M) -> float64 (...), NaN for matrices that are not finite.

    If the shorter side has at most 512 entries, it is the root of the largest eigenvalue of M^T M, which is as accurate
    as a decomposition of M. Larger matrices take the Lanczos iteration, to a relative accuracy of 1e-5.
    """
    matrix = matrix.double()
    if matrix.shape[-2] < matrix.shape[-1]:
        matrix = matrix.transpose(-2, -1)
    if 0 in matrix.shape:
        return matrix.new_zeros(matrix.shape[:-2])
    # Scaled to entries of at most 1, so that squares neither overflow nor underflow.
    size = matrix.abs().amax((-2, -1))
    is_finite = size.isfinite() & (size > 0)
    scaled = torch.where(is_finite[..., None, None], matrix / size[..., None, None], 0.0)
    if matrix.shape[-1] <= _SMALL_SIDE:
        largest = torch.linalg.eigvalsh(scaled.transpose(-2, -1) @ scaled)[..., -1].clamp(min=0.0).sqrt()
    else:
        norms = [_lanczos_norm(one) for one in scaled.reshape(-1, *scaled.shape[-2:])]
        largest = torch.tensor(norms, dtype=size.dtype, device=size.device).view(size.shape)
    return torch.where(size.isfinite(), largest * torch.where(is_finite, size, 0.0), torch.nan)


def _lanczos_norm(matrix: Tensor) -> float:
    """Operator norm of one matrix (N, M) by the Lanczos iteration for M^T M, with full reorthogonalisation.

    The estimate is the largest eigenvalue of the tridiagonal projection. Its residual bounds its distance from an
    eigenvalue, so that the iteration stops when the residual is small enough.
    """
    size = matrix.shape[1]
    generator = torch.Generator().manual_seed(0)  # not the global one, whose state must not change
    vector = torch.randn(size, generator=generator, dtype=torch.float64).to(matrix.device)
    basis = (vector / vector.norm())[None]
    diagonal: list[float] = []
    beside: list[float] = []
    value = 0.0
    for _ in range(min(size, _MAX_STEPS)):
        vector = matrix.mv(basis[-1]) @ matrix
        diagonal.append(float(vector @ basis[-1]))
        for _ in range(2):  # once is not enough in floating-point numbers
            vector = vector - (basis @ vector) @ basis
        length = float(vector.norm())
        projected = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        for offset in (1, -1):
            projected += torch.diag(torch.tensor(beside, dtype=torch.float64), offset)
        values, vectors = torch.linalg.eigh(projected)
        value = max(0.0, float(values[-1]))
        if length * abs(float(vectors[-1, -1])) <= 1e-5 * value or length == 0.0:
            break
        beside.append(length)
        basis = torch.cat((basis, (vector / length)[None]))
    return math.sqrt(value)
