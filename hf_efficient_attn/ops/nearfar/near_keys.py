"""Near keys by content: groups of similar queries, and the keys with the largest scores for each group.

Groups are made by halving: a group is sorted along the direction in which the scores of its queries vary most, and cut
in the middle, until there are as many groups as asked for.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.clusters import even_positions, identity
from hf_efficient_attn.ops.index import ceil_div, integers, inverse
from hf_efficient_attn.ops.slices import slice_size, sliced
from hf_efficient_attn.ops.wide import widened

# Queries are compared along this many directions, along which keys vary most. The variance of keys along a direction is
# at least this share of their whole variance.
_GROUP_DIMS, _LEAST_VARIANCE = 10, 0.001


class Groups(NamedTuple):
    """Queries in groups.

    Attributes:
        query: int64 (BH, G, b), the queries of each group. Some are in two of them, so that groups are equally large.
        slot: int64 (BH, Nq), the place of each query among the G b queries of all groups.
    """

    query: Tensor
    slot: Tensor


@torch.no_grad()
def directions(key: Tensor) -> Tensor:
    """Find the directions (BH, D, F) along which keys (BH, Nk, D) vary most.

    Along these directions, the distance of two queries is about the root mean square of the difference of their scores
    for all keys. With S = K^T K and a basis B after two steps of the power method the result is Nystrom's factor of S
    in B: S B L^-T with L L^T = B^T S B. Eigenvectors would be little better, and on an accelerator they would take as
    long as all other steps of `nearfar` together.
    """
    # Where this is not finite, any groups will do.
    square = widened(torch.bmm(key.mT, key))  # (BH, D, D)
    square = square / torch.linalg.vector_norm(square, dim=(1, 2), keepdim=True)
    square = square + identity(key.shape[2], _LEAST_VARIANCE, square.dtype, key.device)
    basis = square[..., :_GROUP_DIMS]  # (BH, D, F)
    if square.dtype == torch.float32:  # would lose small singular values; another basis changes signs only
        basis = _orthonormal(torch.bmm(square, _orthonormal(basis)))
    else:
        basis = torch.bmm(square, basis)
    image = torch.bmm(square, basis)  # (BH, D, F)
    lower = torch.linalg.cholesky_ex(torch.bmm(basis.mT, image))[0]
    factor: Tensor = torch.linalg.solve_triangular(lower, image.mT, upper=False).mT.to(key.dtype)
    return factor


def _orthonormal(basis: Tensor) -> Tensor:
    """Make the columns of (BH, D, F) orthonormal, in their order."""
    lower = torch.linalg.cholesky_ex(torch.bmm(basis.mT, basis))[0]
    columns: Tensor = torch.linalg.solve_triangular(lower, basis.mT, upper=False).mT
    return columns


@torch.no_grad()
def group_queries(points: Tensor, num_groups: int) -> Groups:
    """Put queries in groups by their points (BH, Nq, F), which are queries times `directions`."""
    length, device = points.shape[1], points.device
    levels = min(num_groups, length).bit_length() - 1
    count = ceil_div(length, 1 << levels) << levels
    copies = even_positions(length, count, device)  # with more places than tokens, tokens repeat
    points = points if count == length else points.index_select(1, copies)
    # Fourth powers of variances must not overflow.
    points = points / torch.linalg.vector_norm(points, dim=(1, 2), keepdim=True).clamp(
        min=torch.finfo(points.dtype).tiny
    )
    order = sliced(lambda x: _halves(x, levels), points, size=slice_size(points[0].numel(), device))
    slot = inverse(order)
    if count == length:
        return Groups(order.unflatten(1, (1 << levels, -1)), slot)
    slot = slot.index_select(1, torch.searchsorted(copies, integers(length, device)))  # the first place of each query
    return Groups(copies[order].unflatten(1, (1 << levels, -1)), slot)


@torch.no_grad()
def find_near_keys(query: Tensor, key: Tensor, count: int, scale: float) -> Tensor:
    """Find the `count` keys (BH, Nk, D) with the largest scores for each query (BH, G, D): int64 (BH, G, count)."""
    return torch.bmm(query if scale > 0.0 else -query, key.mT).topk(count, dim=2, sorted=False)[1]


def _halves(points: Tensor, levels: int) -> Tensor:
    """Halve points (BH, N, D) along their first principal direction, and each half again: int64 (BH, N)."""
    (batch_heads, length, _), points = points.shape, points.flatten(0, 1)
    order = integers(len(points), points.device).view(batch_heads, -1)
    for _ in range(levels):
        x = torch.embedding(points, order)  # (groups, members, F)
        x = x - x.mean(1, keepdim=True)
        power = torch.bmm(x.mT, x)  # (groups, F, F)
        for _ in range(2):  # five steps of the power method, from the direction in which all points vary most
            power = torch.bmm(power, power)
        place = torch.bmm(x, power[..., :1]).sort(dim=1, stable=True)[1]
        order = order.gather(1, place.squeeze(2)).view(2 * len(order), -1)
    return order.view(batch_heads, length) % length
