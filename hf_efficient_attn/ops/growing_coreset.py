"""A coreset of constant size for keys that arrive over time.

The sum of exp(scale <q, k>) [v, 1] over all keys gives the numerator and the denominator of attention. Here it is a sum
over m landmarks, whose weights are sums of [v, 1]. `add_keys` makes new landmarks of the old ones and the new keys
together, and projects their weights on the new landmarks: a coreset of a union of coresets ("merge and reduce",
Har-Peled & Mazumdar 2004, "On coresets for k-means and k-median clustering"; here one after the other and not in a
tree, so that a single coreset is kept).

- Landmarks are pivots of randomized pivoted Cholesky (`choose_pivots`), moved by steps of Lloyd's algorithm in which a
  landmark of before counts once for each key that it represents.
- Every landmark has the sums of values and the number of the keys in its cluster as weights. They are positive, and the
  sum over the landmarks is then attention to the means of clusters.
- It also has Nystrom weights: the correction of the former by (K + ridge I)^-1 on what they miss at the landmarks
  (K: the kernel of the landmarks). They are far more accurate, but a sum may lose its sign. A query whose denominator
  differs by more than a factor of two between the two kinds uses the positive weights.

Everything is finite for finite input: exponents are limited by a smaller temperature for heads with very long keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.coreset import candidate_positions, choose_pivots, regularized_solve
from hf_efficient_attn.ops.partial import Partial, accumulation_dtype, safe_row_max
from hf_efficient_attn.ops.random import Seed
from hf_efficient_attn.ops.slices import slice_size, sliced
from hf_efficient_attn.ops.tokens import take

# Keys are multiplied by `_TEMPERATURE` in the kernel between keys. Measured on GPT-2: .5 to .75 differ little.
_TEMPERATURE = 0.6
_RIDGE = 1e-2
_NUM_REFINEMENTS = 3
# Evenly spaced keys among which pivots are chosen.
_NUM_CANDIDATES = 1024
# The largest exponent of the kernel between keys. Its exponential squared must fit float32.
_LARGEST_EXPONENT = 30.0
# Nystrom weights of a head that are larger than this multiple of all its clusters together are rounding.
_LARGEST_WEIGHT = 1e3
# Denominators of Nystrom weights that are safe, as multiples of those of the clusters.
_SAFE = (0.5, 2.0)
_SMALLEST_SCALE = 1e-9


class GrowingCoreset(NamedTuple):
    """Landmarks that represent keys, in the accumulation dtype. A landmark without keys has weights 0.

    Attributes:
        key: (..., m, D).
        clusters: (..., m, Dv + 1), the sum of the values of a cluster, and its number of keys.
        weights: (..., m, Dv + 1), Nystrom weights.
    """

    key: Tensor
    clusters: Tensor
    weights: Tensor


def empty_coreset(key: Tensor, value: Tensor, num_landmarks: int) -> GrowingCoreset:
    """A coreset of no key, for keys (..., N, D) and values (..., N, Dv)."""
    dtype, shape = accumulation_dtype(key.dtype), (*key.shape[:-2], num_landmarks)
    sizes = (key.shape[-1], value.shape[-1] + 1, value.shape[-1] + 1)
    return GrowingCoreset(*(key.new_zeros(*shape, size, dtype=dtype) for size in sizes))


def add_keys(
    coreset: GrowingCoreset,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float,
    seed: Seed,
    batch: int,
) -> GrowingCoreset:
    """Make one coreset of a coreset and of further keys.

    Args:
        coreset: of BH heads, with m landmarks.
        key: (BH, N, D), finite.
        value: (BH, N, Dv), finite.
        mask: bool (BH, N), which keys to add, or None for all.
        scale: factor of the scores of attention.
        seed: the seed of the pivots.
        batch: B, the number of sequences.

    Returns:
        The coreset of all keys together, of the same size. It depends neither on the batch nor on masked keys.
    """
    dtype = coreset.key.dtype
    new = torch.cat((value.to(dtype), value.new_ones(*value.shape[:2], 1, dtype=dtype)), 2)
    if mask is not None:
        new = new.masked_fill(~mask.unsqueeze(2), 0.0)
    points = torch.cat((coreset.key, key.to(dtype)), 1)
    clusters, weights = (torch.cat((old, new), 1) for old in (coreset.clusters, coreset.weights))
    x, center, factor = _scaled(points, clusters[..., -1:], scale)
    num_landmarks, exists = coreset.key.shape[1], clusters[..., -1] > 0
    position, valid = candidate_positions(exists, x.shape[1], max(_NUM_CANDIDATES, 2 * num_landmarks), x.device)
    pivots = choose_pivots(take(x, position), valid, num_landmarks, seed=seed, batch=batch)
    start = take(x, position.gather(1, pivots.candidate))
    sizes = [points.shape[2], clusters.shape[2], clusters.shape[2]]
    size = slice_size(x.shape[1] * num_landmarks, x.device)
    with torch.autocast(x.device.type, enabled=False):
        merged = sliced(_merged, x, clusters, weights, start, pivots.selected, size=size)
    landmark, clusters, weights = merged.split(sizes, 2)
    return GrowingCoreset(torch.where(clusters[..., -1:] > 0, landmark / factor + center, 0.0), clusters, weights)


def coreset_partial(query: Tensor, coreset: GrowingCoreset, *, scale: float) -> Partial:
    """Attention to all keys that a coreset represents.

    Args:
        query: (BH, Nq, D).
        coreset: of BH heads.
        scale: factor of the scores.

    Returns:
        Partial with out (BH, Nq, Dv) and lse (BH, Nq), in the accumulation dtype.
    """
    key, clusters, weights = coreset
    with torch.autocast(query.device.type, enabled=False):
        scores = scale * (query.to(key.dtype) @ key.mT)
        scores = scores.masked_fill((clusters[..., -1] <= 0).unsqueeze(1), -torch.inf)
        row_max = safe_row_max(scores.detach().amax(2, keepdim=True))
        basis = (scores - row_max).exp()
        positive, signed = basis @ clusters, basis @ weights
    return _partial(positive, signed, row_max)


def _partial(positive: Tensor, signed: Tensor, row_max: Tensor) -> Partial:
    """The partial of sums (BH, Nq, Dv + 1) by both kinds of weights, divided by exp(row_max)."""
    ratio = signed[..., -1:] / positive[..., -1:]
    total = torch.where((ratio > _SAFE[0]) & (ratio < _SAFE[1]), signed, positive)
    empty = total[..., -1:] <= 0
    denominator = total[..., -1:].masked_fill(empty, 1.0)
    lse = (denominator.log() + row_max).masked_fill(empty, -torch.inf)
    return Partial(total[..., :-1] / denominator, lse.squeeze(2))


def _scaled(points: Tensor, count: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The points as the kernel exp(<x, y>) takes them: x = (points - center) * factor, and 0 where the count is 0.

    Args:
        points: (BH, N, D).
        count: (BH, N, 1).
        scale: factor of the scores.

    Returns:
        x (BH, N, D), center (BH, 1, D) and factor (BH, 1, 1).
    """
    center = (points * count).sum(1, keepdim=True) / count.sum(1, keepdim=True).clamp(min=1.0)
    x = (points - center).masked_fill(count <= 0, 0.0)
    factor = _TEMPERATURE * max(abs(scale), _SMALLEST_SCALE) ** 0.5
    longest = (x * x).sum(2).amax(1)[:, None, None].sqrt()
    factor = factor * ((2.0 * _LARGEST_EXPONENT) ** 0.5 / (factor * longest).clamp(min=1e-30)).clamp(max=1.0)
    return x * factor, center, factor


def _merged(x: Tensor, clusters: Tensor, weights: Tensor, landmark: Tensor, selected: Tensor) -> Tensor:
    """The new coreset of some heads, its three tensors side by side: (BH, m, D + 2 (Dv + 1)).

    Args:
        x: (BH, N, D), points as the kernel takes them.
        clusters: (BH, N, Dv + 1).
        weights: (BH, N, Dv + 1).
        landmark: (BH, m, D), pivots among `x`.
        selected: bool (BH, m), which pivots exist.
    """
    count = clusters[..., -1:]
    for _ in range(_NUM_REFINEMENTS):
        members = _members(x, landmark, selected)
        number = members @ count
        landmark = torch.where(number > 0, members @ (count * x) / number.clamp(min=1.0), landmark)
    members = _members(x, landmark, selected)
    number, cluster = members @ count, members @ clusters
    alive = (number > 0).to(x.dtype)
    landmark = landmark * alive
    half = 0.5 * (landmark * landmark).sum(2, keepdim=True)
    kernel = (landmark @ landmark.mT - half - half.mT).clamp(max=0.0).exp() * alive * alive.mT
    kernel = kernel + torch.diag_embed(1.0 - alive.squeeze(2))
    missing = alive * ((landmark @ x.mT - half).exp() @ weights) - kernel @ (half.exp() * cluster)
    nystrom = cluster + (-half).exp() * regularized_solve(kernel, missing, _RIDGE)
    bound = _LARGEST_WEIGHT * cluster.abs().sum(1, keepdim=True).amax(2, keepdim=True)
    safe = nystrom.abs().amax((1, 2), keepdim=True) <= bound
    return torch.cat((landmark, cluster, torch.where(safe, nystrom, cluster)), 2)


def _members(x: Tensor, landmark: Tensor, selected: Tensor) -> Tensor:
    """1 for the points (BH, N, D) to which a landmark is the nearest one, else 0: (BH, m, N)."""
    closeness = landmark @ x.mT - 0.5 * (landmark * landmark).sum(2, keepdim=True)
    nearest = closeness.masked_fill(~selected.unsqueeze(2), -torch.inf).argmax(1, keepdim=True)
    return torch.zeros_like(closeness).scatter_(1, nearest, 1.0)


def add_keys_naive(
    coreset: GrowingCoreset, key: Tensor, value: Tensor, landmark: Tensor, *, scale: float
) -> GrowingCoreset:
    """The readable form of `add_keys` after the choice of landmarks: the weights of one head, in float64.

    Args:
        coreset: of one head, tensors (m, .), with one or more keys or none.
        key: (N, D).
        value: (N, Dv).
        landmark: (m', D), keys that `add_keys` has returned, those of no key left out.
        scale: factor of the scores.

    Returns:
        The coreset at these landmarks.
    """
    new = torch.cat((value, value.new_ones(len(value), 1)), 1).double()
    old = coreset.clusters[:, -1] > 0
    points = torch.cat((coreset.key[old], key)).double()
    clusters = torch.cat((coreset.clusters[old].double(), new))
    weights = torch.cat((coreset.weights[old].double(), new))
    center = (points * clusters[:, -1:]).sum(0) / clusters[:, -1].sum()
    factor = _TEMPERATURE * max(abs(scale), _SMALLEST_SCALE) ** 0.5
    x, y = (points - center) * factor, (landmark.double() - center) * factor
    shrink = max(1.0, float(x.norm(dim=1).max()) / (2.0 * _LARGEST_EXPONENT) ** 0.5)
    x, y = x / shrink, y / shrink
    nearest = torch.cdist(x, y).argmin(1)
    cluster = torch.stack([clusters[nearest == i].sum(0) for i in range(len(y))])
    # exp(<y, .>) at every landmark, with and without the kernel's unit diagonal.
    half = y.square().sum(1, keepdim=True) / 2
    kernel = (y @ y.T - half - half.T).exp()
    missing = (y @ x.T - half).exp() @ weights - kernel @ (half.exp() * cluster)
    correction = torch.linalg.solve(kernel + _RIDGE * torch.eye(len(y), dtype=y.dtype), missing)
    nystrom = cluster + (-half).exp() * correction
    is_safe = nystrom.abs().max() <= _LARGEST_WEIGHT * cluster.abs().sum(0).max()
    return GrowingCoreset(landmark.double(), cluster, nystrom if is_safe else cluster)
