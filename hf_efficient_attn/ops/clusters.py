"""Clusters of keys: evenly spaced positions, the nearest centre, sums of clusters, and Nystrom weights."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.backends.devices import adds_by_index, index_of_max, sum_dtype
from hf_efficient_attn.ops.index import constant, flat_index, integers, pad_to_blocks, valid_first
from hf_efficient_attn.ops.slices import slice_size, sliced


@constant
def even_positions(kv_len: int, count: int, device: torch.device) -> Tensor:
    """Return `count` evenly spaced positions, int64 (count,)."""
    return torch.arange(count, device=device) * kv_len // count


def candidate_positions(key_mask: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Choose at most `limit` candidates for pivots, evenly spaced among the valid keys of each sequence, bool (B, Nk).

    Returns:
        position: int64 (B, C). C is the smaller of Nk and `limit`. The candidates that exist come first, in ascending
            order.
        valid: bool (B, C), which candidates exist.
    """
    count = min(key_mask.shape[1], limit)
    num_valid = key_mask.sum(1, keepdim=True)  # (B, 1)
    rank = integers(count, key_mask.device)
    spread = torch.where(num_valid > count, rank * num_valid // count, rank)  # all valid keys if there are not more
    return valid_first(key_mask).gather(1, spread), rank < num_valid


@constant
def middle_positions(length: int, count: int, device: torch.device) -> Tensor:
    """Return the middle of each of `count` equal parts of the sequence."""
    return (2 * torch.arange(count, device=device) + 1) * length // (2 * count)


# Slices of distances may be larger by this factor than other slices: 20 MiB on a CPU.
_LARGER_SLICES = 5
RIDGE = 1e-3
# `weighted_sums` multiplies parts of this many tokens: few large products would leave most of a device idle. With more
# clusters than `_MOST_PRODUCTS` additions by index take less time.
_PART = 4096
_MOST_PRODUCTS = 512
# With more right-hand sides per row of a matrix than this, a product with the inverse takes less time than solves.
_MANY_RIGHT = 2
# The smallest weight of a cluster by which sums are divided.
_LEAST_WEIGHT = 1e-35


@torch.no_grad()
def nearest(points: Tensor, landmarks: Tensor, exists: Tensor | None = None) -> Tensor:
    """Find the nearest landmark (BH, m, D) of every point (BH, C, D), by the Euclidean distance: int64 (BH, C).

    Landmarks for which `exists`, bool (BH, m), is False are the nearest of no point.
    """
    count = landmarks.shape[1]
    landmarks = landmarks.mT  # (BH, D, m)
    offset = landmarks.square().sum(1, keepdim=True)  # (BH, 1, m)
    if exists is not None:  # not infinity, whose bits are no number with an index in them
        offset = offset.masked_fill(~exists.unsqueeze(1), torch.finfo(offset.dtype).max)

    def some_heads(points: Tensor, landmarks: Tensor, offset: Tensor) -> Tensor:
        # `baddbmm` takes twice as long: on the CPU it first copies the offsets to all rows.
        scores = torch.bmm(points, landmarks).sub_(offset, alpha=0.5)  # (BH, C, D) @ (BH, D, m) -> (BH, C, m)
        return index_of_max(scores)  # (BH, C)

    size = slice_size(points.shape[1] * count // _LARGER_SLICES, points.device)
    return sliced(some_heads, points, landmarks, offset, size=size)


def cluster_sums(cluster: Tensor, x: Tensor, count: int) -> Tensor:
    """Sum the members of each of `count` clusters: int64 (BH, C), (BH, C, F) -> (BH, count, F)."""
    sums = x.new_zeros(len(x) * count, x.shape[2])  # (BH * m, F)
    return sums.index_add(0, flat_index(cluster, count).flatten(), x.flatten(0, 1)).view(len(x), count, -1)


def weighted_sums(cluster: Tensor, x: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Sum the weighted members of each of `count` clusters, and their weights.

    int64 (BH, C), (BH, C, F) and weights (BH, C) -> (BH, m, F) and (BH, m). Weights and results have the accumulation
    dtype.
    """
    acc_dtype = weight.dtype
    by_products = count <= _MOST_PRODUCTS and not adds_by_index(x.device)
    dtype = sum_dtype(x) if by_products else weight.dtype
    weight = weight.to(dtype)
    total = weight.new_zeros(len(x), count, dtype=acc_dtype).scatter_add(1, cluster, weight.to(acc_dtype))
    if not by_products:
        return cluster_sums(cluster, x * weight.unsqueeze(2), count), total

    def some_parts(cluster: Tensor, x: Tensor, weight: Tensor) -> Tensor:  # (P, size, .)
        weights = torch.where(cluster == integers(count, cluster.device), weight, 0.0)  # (P, size, m)
        return torch.bmm(weights.mT, x.to(dtype))  # (P, m, F)

    size = min(_PART, x.shape[1])
    # Padding has no weight.
    parts = (pad_to_blocks(y, size).flatten(0, 1) for y in (cluster.unsqueeze(2), x, weight.unsqueeze(2)))
    sums = sliced(some_parts, *parts, size=slice_size(size * count, x.device))  # (BH * T, m, F)
    return sums.unflatten(0, (len(x), -1)).sum(1, dtype=acc_dtype), total


def cluster_means(sums: Tensor, weight: Tensor, first: Tensor) -> Tensor:
    """Divide the sums of the weighted points of each cluster, (BH, m, D), by the sums of the weights, (BH, m).

    A cluster without weight gets its point in `first`, (BH, m, D).
    """
    weight = weight.unsqueeze(2)  # (BH, m, 1)
    return torch.where(weight > 0, sums / weight.clamp(min=_LEAST_WEIGHT), first)


def lloyd_step(points: Tensor, terms: Tensor, centers: Tensor, exists: Tensor | None = None) -> Tensor:
    """Move each center to the weighted mean of the points to which it is the nearest (Lloyd 1982).

    Takes points (BH, C, D), their `terms` (BH, C, D + 1), which are the points times their weights, and the weights,
    and centers (BH, m, D). `exists` is that of `nearest`. A center without a point stays.
    """
    sums = cluster_sums(nearest(points, centers, exists), terms, centers.shape[1])  # (BH, m, D + 1)
    return cluster_means(sums[..., :-1], sums[..., -1], centers)


def gaussian_kernel(points: Tensor) -> Tensor:
    """Compute exp(-|x - y|^2 / 2) for all pairs of points: (BH, m, D) -> (BH, m, m)."""
    half = 0.5 * points.square().sum(2)  # (BH, m)
    return (torch.bmm(points, points.mT) - half.unsqueeze(1) - half.unsqueeze(2)).clamp(max=0.0).exp()


def matrix_power(square: Tensor, num_squarings: int, rescales: bool = True) -> Tensor:
    """Raise symmetric matrices (BH, D, D) to the power 2**num_squarings, up to a factor: the power method.

    All columns become multiples of the leading eigenvector. `rescales` keeps the trace at 1, so that nothing overflows.
    """
    for _ in range(num_squarings):
        if rescales:
            trace = square.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]  # (BH, 1, 1)
            square = square / trace.clamp(min=torch.finfo(square.dtype).tiny)
        square = torch.bmm(square, square)
    return square


def regularized_solve(kernel: Tensor, right: Tensor, ridge: float) -> Tensor:
    """Compute (K + ridge I)^-1 R by Cholesky, for matrices that are symmetric positive semidefinite up to rounding.

    The result is differentiable once. Where the decomposition fails, a multiple of I replaces K + ridge I.

    Args:
        kernel: K, (BH, m, m), in the accumulation dtype.
        right: R, (BH, m, N).
        ridge: positive; for matrices with a diagonal of 1 far above the rounding of a sum of m numbers.

    Returns:
        (BH, m, N).
    """
    one, safe = (
        identity(kernel.shape[-1], factor, kernel.dtype, kernel.device) for factor in (1.0, kernel.shape[-1] ** 0.5)
    )
    system = torch.add(kernel, one, alpha=ridge)  # (BH, m, m)
    with torch.no_grad():
        lower, failed = torch.linalg.cholesky_ex(system)  # (BH, m, m), (BH,)
        lower = torch.where(failed.view(-1, 1, 1) > 0, safe, lower)
        # `cholesky_inverse` takes longer than solves, and on a CUDA device it inverts one matrix after another.
        inverse = None
        if right.shape[2] > _MANY_RIGHT * kernel.shape[1]:
            factor = torch.linalg.solve_triangular(lower, one.expand_as(lower), upper=False)
            inverse = torch.bmm(factor.mT, factor)  # (BH, m, m)

    def solve(right: Tensor) -> Tensor:
        if inverse is not None:
            return torch.bmm(inverse, right)
        half = torch.linalg.solve_triangular(lower, right, upper=False)
        solved: Tensor = torch.linalg.solve_triangular(lower.mT, half, upper=True)
        return solved

    solved = solve(right)  # (BH, m, N)
    if not (torch.is_grad_enabled() and (kernel.requires_grad or right.requires_grad)):
        return solved
    # A step of refinement has the value of the solution, and its gradient by R and K.
    solved = solved.detach()
    return solved + solve(right - system @ solved)


@constant
def identity(size: int, factor: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a multiple of the identity matrix."""
    return torch.eye(size, dtype=dtype, device=device) * factor


def with_ones(x: Tensor) -> Tensor:
    """Append a column of ones, for the denominators: (..., Dv) -> (..., Dv + 1)."""
    return pad(x, (0, 1), value=1.0)
