"""Groups of similar queries, and attention to their near keys.

Similar queries attend mostly to the same keys, so queries are put in groups. The near keys of a group are the keys with
the largest scores for the mean of its queries. The group attends to its near keys exactly, and to all keys through
landmarks. This counts a near key twice, so its weight on its landmark is subtracted. For this a key has a weight on one
landmark only, the nearest.

Groups are made by halving. Queries are sorted along the direction in which their scores vary most, and are cut in the
middle. Each half is cut in the same way, until there are as many groups as asked for.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.attend import Partial
from hf_efficient_attn.ops.backends.devices import halved, widened
from hf_efficient_attn.ops.clusters import even_positions, identity, matrix_power
from hf_efficient_attn.ops.index import ceil_div, integers, inverse
from hf_efficient_attn.ops.slices import slice_size, sliced

# Queries are compared along this many directions, along which this many evenly spaced keys vary most. The variance of
# keys along a direction is at least this share of their whole variance.
_GROUP_DIMS = 10
_DIRECTION_KEYS = 4096
_LEAST_VARIANCE = 0.001
# Fewer products than these are split.
_FEW = 256
# If near keys leave less than this share of the weight of a landmark, or of the weights of all landmarks for a query,
# what is left is rounding, and does not count.
LEAST_SHARE = 1e-3


class Groups(NamedTuple):
    """Queries in groups."""

    # int64 (BH, G, b), the queries of each group. Some are in two of them, so that groups are equally large.
    query: Tensor
    slot: Tensor  # int64 (BH, Nq), the place of each query among the G b queries of all groups


@torch.no_grad()
def directions(key: Tensor) -> Tensor:
    """Find the directions (BH, D, F) along which keys (BH, Nk, D) vary most.

    Along these directions, the distance of two queries is about the root mean square of the difference of their scores
    for all keys. With S = K^T K and a basis B after two steps of the power method the result is Nystrom's factor of S
    in B: S B L^-T with L L^T = B^T S B. Eigenvectors would be little better, and on an accelerator they would take as
    long as all other steps of `nearfar` together.
    """
    key = key.index_select(1, even_positions(key.shape[1], min(key.shape[1], _DIRECTION_KEYS), key.device))
    # Where this is not finite, any groups will do.
    square = widened(torch.bmm(key.mT, key))  # (BH, D, D)
    square = square / torch.linalg.vector_norm(square, dim=(1, 2), keepdim=True)
    square = square + identity(key.shape[2], _LEAST_VARIANCE, square.dtype, key.device)
    basis = square[..., :_GROUP_DIMS]  # (BH, D, F)
    if square.dtype == torch.float32:  # would lose small singular values; another basis changes signs only
        basis = torch.bmm(square, _factor(basis, basis))
        basis = _factor(basis, basis)
    else:
        basis = torch.bmm(square, basis)
    return _factor(basis, torch.bmm(square, basis)).to(key.dtype)


def _factor(basis: Tensor, image: Tensor) -> Tensor:
    """Compute I L^-T (BH, D, F) for L L^T = B^T I, with B and I (BH, D, F): orthonormal columns if B is I."""
    lower = torch.linalg.cholesky_ex(torch.bmm(basis.mT, image))[0]  # (BH, F, F)
    columns: Tensor = torch.linalg.solve_triangular(lower, image.mT, upper=False).mT
    return columns


@torch.no_grad()
def group_queries(points: Tensor, num_groups: int) -> Groups:
    """Put queries in groups by their points (BH, Nq, F), which are queries times `directions`."""
    length = points.shape[1]
    device = points.device
    levels = min(num_groups, length).bit_length() - 1
    count = ceil_div(length, 1 << levels) << levels
    copies = even_positions(length, count, device)  # with more places than tokens, tokens repeat
    points = points if count == length else points.index_select(1, copies)
    order = halve(points, levels)  # (BH, G b)
    slot = inverse(order)
    if count == length:
        return Groups(order.unflatten(1, (1 << levels, -1)), slot)
    slot = slot.index_select(1, torch.searchsorted(copies, integers(length, device)))  # the first place of each query
    return Groups(copies[order].unflatten(1, (1 << levels, -1)), slot)


@torch.no_grad()
def find_near_keys(query: Tensor, key: Tensor, count: int, scale: float) -> Tensor:
    """Find the `count` keys (BH, Nk, D) with the largest scores for each query (BH, G, D): int64 (BH, G, count)."""
    scores = torch.bmm(query if scale > 0.0 else -query, key.mT)  # (BH, G, Nk)
    length = scores.shape[2]
    step = 1
    while 2 * count * step**2 <= length:
        step *= 2
    if step == 1:
        return scores.topk(count, dim=2, sorted=False)[1]
    # The largest scores are among those with the largest maxima of `step` scores each. So most scores are read once.
    part = length // step
    maxima = scores[..., : step * part].unflatten(2, (step, part)).amax(2)  # (BH, G, part)
    best = maxima.topk(count, dim=2, sorted=False)[1].unsqueeze(2)
    index = (best + integers(step, key.device).unsqueeze(1) * part).flatten(2)  # (BH, G, step * count)
    if step * part < length:
        rest = integers(length, key.device)[step * part :]
        index = torch.cat((index, rest.expand(*index.shape[:2], -1)), 2)
    chosen = scores.gather(2, index).topk(count, dim=2, sorted=False)[1]  # (BH, G, count)
    found: Tensor = index.gather(2, chosen)
    return found


@torch.no_grad()
def halve(points: Tensor, levels: int) -> Tensor:
    """Halve points (BH, N, F) along their first principal direction, and each half again: int64 (BH, N)."""
    # Fourth powers of variances must not overflow.
    points = points / torch.linalg.vector_norm(points, dim=(1, 2), keepdim=True).clamp(
        min=torch.finfo(points.dtype).tiny
    )

    def some_heads(points: Tensor) -> Tensor:
        batch_heads, length, _ = points.shape
        points = points.flatten(0, 1)
        order = integers(len(points), points.device).view(batch_heads, -1)
        for _ in range(levels):
            order = halve_groups(points, order)
        return order.view(batch_heads, length) % length

    return sliced(some_heads, points, size=slice_size(points[0].numel(), points.device))


def halve_groups(points: Tensor, order: Tensor) -> Tensor:
    """Halve groups, int64 (G, n), of points (S, F) along their first principal direction.

    Fourth powers of the points must not overflow. The result has both halves of one group after another, (2 G, n / 2).
    """
    x = torch.embedding(points, order)  # (G, n, F)
    centered = x - x.mean(1, keepdim=True)
    # Few large products would leave most of a device idle.
    splits = 1
    while splits * len(x) < _FEW and x.shape[1] % (2 * splits) == 0:
        splits *= 2
    parts = centered.view(splits * len(x), -1, x.shape[2])
    square = torch.bmm(parts.mT, parts)
    if splits > 1:
        square = square.view(len(x), splits, *square.shape[1:]).sum(1)  # (G, F, F)
    # Five steps of the power method, from the direction in which all points vary most.
    power = matrix_power(square, 2, rescales=False)
    place = halved(torch.bmm(x, power[..., :1]).squeeze(2))  # (G, n)
    return order.gather(1, place).view(2 * len(order), -1)


def replace_counted(far: Partial, counted: Partial, exact: Partial) -> Partial:
    """Remove `counted`, a part of `far`, and add `exact`; each is out (..., Nq, Dv) and lse (..., Nq, 1).

    The lse of the result is (..., Nq).
    """
    with torch.no_grad():
        ref = torch.maximum(far.lse, exact.lse)
    of_far, of_counted, of_exact = ((x.lse - ref).exp() for x in (far, counted, exact))  # (..., Nq, 1) each
    total = of_far - of_counted + of_exact  # (..., Nq, 1)
    is_rounding = total <= LEAST_SHARE * of_far
    sums = torch.addcmul(torch.addcmul(far.out * of_far, counted.out, of_counted, value=-1.0), exact.out, of_exact)
    total = total.masked_fill(is_rounding, 1.0)
    lse = torch.where(is_rounding, exact.lse, total.log() + ref)
    return Partial(torch.where(is_rounding, exact.out, sums / total), lse.squeeze(-1))
