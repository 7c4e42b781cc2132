"""The choice of landmarks, and groups of similar queries with their near keys.

A landmark is the weighted mean of a cluster of keys. `hf_efficient_attn.ops.nearfar.bidirectional` explains the choice.

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

from hf_efficient_attn.ops.attend import LOG2_E
from hf_efficient_attn.ops.backends.devices import widened
from hf_efficient_attn.ops.clusters import (
    cluster_means,
    cluster_sums,
    even_positions,
    identity,
    matrix_power,
    middle_positions,
    nearest,
)
from hf_efficient_attn.ops.draws import Draws, draw_sizes
from hf_efficient_attn.ops.index import ceil_div, integers, inverse, take
from hf_efficient_attn.ops.slices import slice_size, sliced
from hf_efficient_attn.ops.thinning import gumbel

# t: how much less the kernel distinguishes keys than the scores do. Of .5, .6, .7 and .85, .6 has the least error.
TEMPERATURE = 0.6
# The share of the mean query in g, and the powers of exp(2 g) in the draw of a key and in the mean of its cluster.
TILT = 0.3
DRAW_POWER = 0.7
POWER = 0.5
# The number of queries in the mean query, and the smallest log weight of a key in the mean of its cluster.
NUM_QUERIES = 512
LEAST_LOG_WEIGHT = -60.0
# In a draw: the least log weight relative to the largest one, and the least share of a point that is left over.
_LEAST = -1e4
_LEAST_LEFT = 1e-12
# `draw_apart` draws 64 points at first, then three times as many as all before.
_GROWING = 64, 3, 2**31


class NearFarOptions(NamedTuple):
    """Options for the choice of landmarks and near keys.

    Attributes:
        num_samples: m, the number of landmarks.
        num_candidates: number of evenly spaced keys from which the landmarks are made, at least m.
        num_refinements: steps of Lloyd's algorithm; 0 for landmarks that are keys.
        num_probes: number of queries whose exact rows are known; 0 for none.
        block_size: w, the number of near keys of a group of queries; or 0.
        num_groups: number of groups of queries, rounded down to a power of two.
        near_share: a head has near keys if landmarks alone miss more than this share of its output, measured on the
            probes. With 0, or without probes, all heads have them; with 1 none has.
        scale: factor of the attention scores.
        draws: the random numbers by which the keys are drawn that the clusters begin with.
        dropout_p: probability of dropping a weight from the numerator.
    """

    num_samples: int
    num_candidates: int
    num_refinements: int
    num_probes: int
    block_size: int
    num_groups: int
    near_share: float
    scale: float
    draws: Draws
    dropout_p: float = 0.0

    @property
    def root(self) -> float:
        """The factor from keys to the points of the kernel exp(-|x - y|^2 / 2)."""
        return float(TEMPERATURE * abs(self.scale) ** 0.5)


class Landmarks(NamedTuple):
    """m landmarks of each head, as keys of a softmax.

    Attributes:
        key: c, (BH, m, D).
        slope: scale times the query that is expected to attend to each landmark, (BH, m, D).
        choice: int64 (BH, m + C), the candidates with which clusters begin, and the cluster of each of C candidates.
    """

    key: Tensor
    slope: Tensor
    choice: Tensor


def gumbel_numbers(count: int, num_candidates: int, draws: Draws, dtype: torch.dtype) -> Tensor:
    """Draw standard Gumbel numbers (draws, 1, C) for `draw_apart`. The numbers of a candidate do not depend on C.

    The numbers of an integer seed are kept, so they must not be modified.
    """
    return gumbel(draws._replace(seed=draws.value), len(draw_sizes(count, *_GROWING)), num_candidates, 1, dtype)


@torch.no_grad()
def draw_apart(points: Tensor, size: Tensor, numbers: Tensor, count: int) -> Tensor:
    """Draw points that are far from each other, in a few draws.

    The probability of a point x grows with s^`DRAW_POWER` (1 - K(x, p)^2 / (K(x, x) K(p, p))) for the kernel
    K = exp(<x, y>) and the nearest point p of the earlier draws. For s = K(x, x) and power 1 this is the diagonal of K
    minus its Nystrom approximation by p alone. With one draw per point this would be like k-means++ (Arthur &
    Vassilvitskii 2007).

    Args:
        points: (BH, C, D).
        size: (BH, C), log s, relative to the largest one.
        numbers: (draws, 1, C), from `gumbel_numbers`, the same for all heads.
        count: m, at most C.

    Returns:
        int64 (BH, m), indices of different points. The first ones are a choice of fewer.
    """
    norm = points.square().sum(2)  # (BH, C)
    log_weight = (size * DRAW_POWER).clamp(min=_LEAST)
    weight_left = log_weight
    closest = None
    picked = []
    sizes = draw_sizes(count, *_GROWING)
    for i, number in enumerate(sizes):
        index = (weight_left + numbers[i]).topk(number, dim=1)[1]  # (BH, number)
        picked.append(index)
        if i + 1 < len(sizes):
            log_weight = log_weight.scatter(1, index, -torch.inf)  # no point is drawn twice
            offset = norm.gather(1, index).unsqueeze(2)  # (BH, number, 1)
            found = torch.baddbmm(offset, take(points, index), points.mT, beta=-1.0, alpha=2.0).amax(1)  # (BH, C)
            closest = found if closest is None else torch.maximum(closest, found)
            left = torch.expm1((closest - norm).clamp(max=0.0))
            weight_left = log_weight + left.clamp(max=-_LEAST_LEFT).abs().log()
    return torch.cat(picked, 1)


def choose_landmarks(query: Tensor, key: Tensor, options: NearFarOptions) -> Landmarks:
    """Choose landmarks for queries (BH, Nq, D) and centered keys (BH, Nk, D): weighted means of clusters of candidates.

    The clusters have no gradient. The means have one.
    """
    spread = middle_positions(query.shape[1], min(query.shape[1], NUM_QUERIES), key.device)
    tilt = query.index_select(1, spread).mean(1, keepdim=True) * (TILT * options.scale)  # (BH, 1, D)
    count = options.num_samples
    if key.shape[1] > options.num_candidates:
        key = key.index_select(1, even_positions(key.shape[1], options.num_candidates, key.device))
    numbers = gumbel_numbers(count, key.shape[1], options.draws, key.dtype)
    points = key * options.root  # (BH, C, D)
    size = torch.baddbmm(points.square().sum(2, keepdim=True), key, tilt.mT, alpha=2.0)  # (BH, C, 1)
    size = size - size.amax(1, keepdim=True)
    weight = (size * POWER).clamp(min=LEAST_LOG_WEIGHT).exp()  # (BH, C, 1)
    terms = torch.cat((key * weight, weight), 2)  # (BH, C, D + 1)

    def some_heads(key: Tensor, points: Tensor, size: Tensor, terms: Tensor) -> Tensor:
        pivot = draw_apart(points, size[..., 0], numbers, count)  # (BH, m)
        cluster = nearest(points, take(points, pivot))  # (BH, C)
        for _ in range(1, options.num_refinements):
            means = cluster_means(cluster_sums(cluster, terms, count), take(key, pivot))
            cluster = nearest(points, options.root * means)
        return torch.cat((pivot, cluster), 1)

    with torch.no_grad():
        choice = sliced(some_heads, key, points, size, terms, size=slice_size(count * key.shape[1] // 6, key.device))
    pivot, cluster = choice.split((count, key.shape[1]), 1)
    landmarks = take(key, pivot)  # (BH, m, D)
    if options.num_refinements:
        landmarks = cluster_means(cluster_sums(cluster, terms, count), landmarks)
    return Landmarks(landmarks, torch.add(tilt, landmarks, alpha=options.root**2), choice)


class Represented(NamedTuple):
    """Sums over the keys that each landmark represents, in each of S segments of the keys.

    The weight of a key is exp(-|x - y|^2 / 2 + g) for points x and y of the key and the landmark.

    Attributes:
        value: (BH, S m, Dv), the weighted means of the values that each landmark stands for.
        bias: (BH, S m), the bias of the landmark plus the logarithm of the sum of these weights; -inf without a key.
        landmark: int64 (BH, Nk), the landmark of each key.
        key_bias: (BH, Nk), the bias of each key's landmark plus the logarithm of the key's weight.
    """

    value: Tensor
    bias: Tensor
    landmark: Tensor
    key_bias: Tensor


def represent(
    key: Tensor, value: Tensor, landmarks: Landmarks, segment: Tensor | None = None, num_segments: int = 1
) -> Represented:
    """Represent centered keys (BH, Nk, D) with values (BH, Nk, Dv) in the segments int64 (Nk,) of the keys."""
    count = landmarks.key.shape[1] * num_segments
    own = nearest(key, landmarks.key)  # (BH, Nk)
    offset = (landmarks.key * landmarks.slope).sum(2)  # (BH, m)
    bias = (key * take(landmarks.slope, own)).sum(2) - offset.gather(1, own)  # (BH, Nk)
    place = own if segment is None else own + segment * landmarks.key.shape[1]
    # Weights are relative to the largest one of each landmark, so that none is lost.
    largest = offset.new_full((len(key), count), -torch.inf).scatter_reduce(1, place, bias.detach(), "amax")
    weight = ((bias - largest.gather(1, place)) * LOG2_E).exp2().unsqueeze(2)  # (BH, Nk, 1)
    sums = cluster_sums(place, torch.cat((value * weight, weight), 2), count)  # (BH, S m, Dv + 1)
    total = sums[..., -1:].clamp(min=0.5)  # at least 1 with a key
    return Represented(sums[..., :-1] / total, total.squeeze(2).log() + largest, own, bias)


def landmarks_naive(query: Tensor, key: Tensor, choice: Tensor, options: NearFarOptions) -> tuple[Tensor, Tensor]:
    """Compute the landmarks (m, D) and the tilt (D,) of a head in the readable form, with its choice of clusters."""
    root = options.root
    m = options.num_samples
    spread = middle_positions(len(query), min(len(query), NUM_QUERIES), query.device)
    tilt = query[spread].mean(0) * (TILT * options.scale)  # (D,)
    candidates = key[even_positions(len(key), min(len(key), options.num_candidates), key.device)]  # (C, D)
    c = candidates[choice[:m]]
    if options.num_refinements:
        weight = POWER * ((candidates * root).square().sum(1) + 2.0 * candidates @ tilt)
        weight = (weight - weight.max()).clamp(min=LEAST_LOG_WEIGHT).exp()
        members = torch.nn.functional.one_hot(choice[m:], m).double().T * weight  # (m, C)
        total = members.sum(1, keepdim=True)
        c = torch.where(total > 0, members @ candidates / torch.where(total > 0, total, 1.0), c)
    return c, tilt


def scores_naive(
    query: Tensor, key: Tensor, own: Tensor, tilt: Tensor, options: NearFarOptions
) -> tuple[Tensor, Tensor]:
    """Compute scores of queries (Nq, D) for keys (Nk, D), exactly and by the landmark of each key, `own` (Nk, D)."""
    of_landmarks = ((key - own) * (tilt + options.root**2 * own)).sum(1)  # (Nk,)
    return options.scale * query @ key.T, options.scale * query @ own.T + of_landmarks  # (Nq, Nk) each


# Queries are compared along this many directions, along which keys vary most. The variance of keys along a direction is
# at least this share of their whole variance.
_GROUP_DIMS = 10
_LEAST_VARIANCE = 0.001


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
    lower = torch.linalg.cholesky_ex(torch.bmm(basis.mT, image))[0]  # (BH, F, F)
    factor: Tensor = torch.linalg.solve_triangular(lower, image.mT, upper=False).mT.to(key.dtype)  # (BH, D, F)
    return factor


def _orthonormal(basis: Tensor) -> Tensor:
    """Make the columns of (BH, D, F) orthonormal, in their order."""
    lower = torch.linalg.cholesky_ex(torch.bmm(basis.mT, basis))[0]
    columns: Tensor = torch.linalg.solve_triangular(lower, basis.mT, upper=False).mT
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
    # Fourth powers of variances must not overflow.
    points = points / torch.linalg.vector_norm(points, dim=(1, 2), keepdim=True).clamp(
        min=torch.finfo(points.dtype).tiny
    )
    order = sliced(lambda x: _halves(x, levels), points, size=slice_size(points[0].numel(), device))  # (BH, G b)
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
    batch_heads, length, _ = points.shape
    points = points.flatten(0, 1)
    order = integers(len(points), points.device).view(batch_heads, -1)
    for _ in range(levels):
        x = torch.embedding(points, order)  # (groups, members, F)
        x = x - x.mean(1, keepdim=True)
        # Five steps of the power method, from the direction in which all points vary most.
        power = matrix_power(torch.bmm(x.mT, x), 2, rescales=False)  # (groups, F, F)
        place = torch.bmm(x, power[..., :1]).sort(dim=1, stable=True)[1]  # (groups, members, 1)
        order = order.gather(1, place.squeeze(2)).view(2 * len(order), -1)  # (2 groups, members / 2)
    return order.view(batch_heads, length) % length
