"""The choice of landmarks, and what they represent.

A landmark is the weighted mean of a cluster of keys. `hf_efficient_attn.ops.nearfar.bidirectional` explains the choice.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.attend import LOG2_E
from hf_efficient_attn.ops.clusters import cluster_means, even_positions, middle_positions, nearest, weighted_sums
from hf_efficient_attn.ops.draws import Draws, draw_sizes
from hf_efficient_attn.ops.index import take
from hf_efficient_attn.ops.slices import slice_size, sliced
from hf_efficient_attn.ops.thinning import gumbel

# t: how much less the kernel distinguishes keys than the scores do. Of .5, .6, .7 and .85, .6 has the least error.
TEMPERATURE = 0.6
# The share of the mean query in g, and the powers of exp(2 g) in the draw of a key and in the mean of its cluster.
TILT = 0.3
DRAW_POWER = 0.7
POWER = 0.5
# The number of queries in the mean query, and the smallest log weight of a key. The largest one on a landmark is the
# opposite, so that sums of weights stay in the range of float32.
NUM_QUERIES = 512
LEAST_LOG_WEIGHT = -60.0
# In a draw: the least log weight relative to the largest one, and the least share of a point that is left over.
_LEAST = -1e4
_LEAST_LEFT = 1e-12
# `draw_apart` draws 64 points at first, then three times as many as all before.
_GROWING = 64, 3, 2**31


class NearFarOptions(NamedTuple):
    """Options for the choice of landmarks and near keys."""

    num_samples: int  # m, the number of landmarks
    num_candidates: int  # number of evenly spaced keys from which the landmarks are made, at least m
    num_refinements: int  # steps of Lloyd's algorithm; 0 for landmarks that are keys
    num_probes: int  # number of queries whose exact rows are known; 0 for none
    block_size: int  # w, the number of near keys of a group of queries; or 0
    num_groups: int  # number of groups of queries, rounded down to a power of two
    # A head has near keys if landmarks alone miss more than this share of its output, measured on the probes. With 0,
    # or without probes, all heads have them; with 1 none has.
    near_share: float
    scale: float  # factor of the attention scores
    draws: Draws  # the random numbers by which the keys are drawn that the clusters begin with
    dropout_p: float = 0.0  # probability of dropping a weight from the numerator
    with_lse: bool = False  # whether to return the lse as well (`hf_efficient_attn.ops.attend.output_of`)

    @property
    def root(self) -> float:
        """The factor from keys to the points of the kernel exp(-|x - y|^2 / 2)."""
        return float(TEMPERATURE * abs(self.scale) ** 0.5)


class Landmarks(NamedTuple):
    """m landmarks of each head, as keys of a softmax."""

    key: Tensor  # c, (BH, m, D)
    slope: Tensor  # scale times the query that is expected to attend to each landmark, (BH, m, D)
    # int64 (BH, m + C), the candidates with which clusters begin, and the cluster of each of C candidates.
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
    tilt = query.index_select(1, spread).to(key.dtype).mean(1, keepdim=True) * (TILT * options.scale)  # (BH, 1, D)
    count = options.num_samples
    if key.shape[1] > options.num_candidates:
        key = key.index_select(1, even_positions(key.shape[1], options.num_candidates, key.device))
    numbers = gumbel_numbers(count, key.shape[1], options.draws, key.dtype)
    points = key * options.root  # (BH, C, D)
    size = torch.baddbmm(points.square().sum(2, keepdim=True), key, tilt.mT, alpha=2.0)  # (BH, C, 1)
    size = size - size.amax(1, keepdim=True)
    weight = (size[..., 0] * POWER).clamp(min=LEAST_LOG_WEIGHT).exp()  # (BH, C)

    def some_heads(key: Tensor, points: Tensor, size: Tensor, weight: Tensor) -> Tensor:
        pivot = draw_apart(points, size[..., 0], numbers, count)  # (BH, m)
        cluster = nearest(points, take(points, pivot))  # (BH, C)
        for _ in range(1, options.num_refinements):
            means = cluster_means(*weighted_sums(cluster, key, weight, count), take(key, pivot))
            cluster = nearest(points, options.root * means)
        return torch.cat((pivot, cluster), 1)

    with torch.no_grad():
        choice = sliced(some_heads, key, points, size, weight, size=slice_size(count * key.shape[1] // 6, key.device))
    pivot, cluster = choice.split((count, key.shape[1]), 1)
    landmarks = take(key, pivot)  # (BH, m, D)
    if options.num_refinements:
        landmarks = cluster_means(*weighted_sums(cluster, key, weight, count), landmarks)
    return Landmarks(landmarks, torch.add(tilt, landmarks, alpha=options.root**2), choice)


class Represented(NamedTuple):
    """Sums over the keys that each landmark represents.

    The weight of a key is exp(g(k) - |x - y|^2 / 2 - g(c)) for points x and y of the key and the landmark.
    """

    sums: Tensor  # (BH, m, Dv), the sums of the weighted values of the keys of each landmark
    total: Tensor  # (BH, m), the sums of the weights
    landmark: Tensor  # int64 (BH, Nk), the landmark of each key
    key_bias: Tensor  # (BH, Nk), the logarithm of each key's weight


def represent(key: Tensor, value: Tensor, landmarks: Landmarks) -> Represented:
    """Represent centered keys (BH, Nk, D) with values (BH, Nk, Dv)."""
    own = nearest(key, landmarks.key)  # (BH, Nk)
    offset = (landmarks.key * landmarks.slope).sum(2)  # (BH, m)
    bias = (key * take(landmarks.slope, own)).sum(2) - offset.gather(1, own)  # (BH, Nk)
    bias = bias.clamp(LEAST_LOG_WEIGHT, -LEAST_LOG_WEIGHT)
    return Represented(*weighted_sums(own, value, key_weights(bias), landmarks.key.shape[1]), own, bias)


def key_weights(key_bias: Tensor) -> Tensor:
    """Compute the weights of keys from their logarithms."""
    return (key_bias * LOG2_E).exp2()


def means_and_logs(sums: Tensor, total: Tensor, least: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """Turn sums of weighted values (..., m, Dv) and of weights (..., m) into means and logarithms of the same shapes.

    A logarithm is -inf, and a mean 0, where the weights are not above `least`.
    """
    empty = total <= least
    total = total.masked_fill(empty, torch.inf)  # what is left of the sums is rounding, which float16 may not hold
    return sums / total.unsqueeze(-1), total.log().masked_fill(empty, -torch.inf)


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
    of_landmarks = of_landmarks.clamp(LEAST_LOG_WEIGHT, -LEAST_LOG_WEIGHT)
    return options.scale * query @ key.T, options.scale * query @ own.T + of_landmarks  # (Nq, Nk) each
