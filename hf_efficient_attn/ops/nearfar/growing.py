"""A coreset that grows as keys arrive: the landmarks of `NearFarCache`.

The sum of exp(scale <q, k>) [v, 1] over all keys gives the numerator and the denominator of attention. A
`GrowingCoreset` replaces it by a sum over m landmarks, whose weights are sums of [v, 1]. `add_keys` makes new landmarks
from the old landmarks and the new keys, and projects the weights of both on the new landmarks. This is a coreset of a
union of coresets ("merge and reduce", Har-Peled & Mazumdar 2004, "On coresets for k-means and k-median clustering").
They merge one after the other and not in a tree, so that a single coreset is kept.

- Landmarks are pivots of randomized pivoted Cholesky (`choose_pivots`), moved by steps of Lloyd's algorithm. In these
  an old landmark counts once for each key that it represents.
- Every landmark has positive weights: the sum of the values in its cluster, and its number of keys. The sum over the
  landmarks is then attention to the means of clusters.
- Every landmark also has Nystrom weights: the positive weights, corrected by (K + ridge I)^-1 for what they miss at the
  landmarks (K: the kernel of the landmarks). They are far more accurate, but a sum of them may lose its sign. A query
  whose two denominators differ by more than a factor of two uses the positive weights.

Everything is finite for finite input: exponents are limited by a smaller temperature for heads with very long keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.attend import Partial, safe_row_max
from hf_efficient_attn.ops.backends.devices import accumulation_dtype
from hf_efficient_attn.ops.clusters import (
    candidate_positions,
    cluster_sums,
    gaussian_kernel,
    lloyd_step,
    nearest,
    regularized_solve,
)
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.index import take
from hf_efficient_attn.ops.slices import slice_size, sliced
from hf_efficient_attn.ops.thinning import choose_pivots

# A growing coreset multiplies keys by `_TEMPERATURE` in the kernel between keys. On GPT-2 .5 to .75 differ little.
_TEMPERATURE = 0.6
_RIDGE = 1e-2
_NUM_REFINEMENTS = 3
# Pivots are chosen among this many evenly spaced keys.
_NUM_CANDIDATES = 1024
# The largest exponent of the kernel between keys. Its exponential squared must fit float32.
_LARGEST_EXPONENT = 30.0
# Nystrom weights are rounding if they exceed this multiple of the weights of all clusters of the head together.
_LARGEST_WEIGHT = 1e3
# A Nystrom denominator is safe between these multiples of the denominator of the clusters.
_SAFE = (0.5, 2.0)
_SMALLEST_SCALE = 1e-9


class GrowingCoreset(NamedTuple):
    """Landmarks that represent keys, in the accumulation dtype. A landmark without keys has weights 0."""

    key: Tensor  # (..., m, D)
    clusters: Tensor  # (..., m, Dv + 1), the sum of the values of a cluster, and its number of keys
    weights: Tensor  # (..., m, Dv + 1), Nystrom weights


def empty_coreset(key: Tensor, value: Tensor, num_landmarks: int) -> GrowingCoreset:
    """Make a coreset without keys, for keys (..., N, D) and values (..., N, Dv)."""
    dtype = accumulation_dtype(key.dtype)
    shape = (*key.shape[:-2], num_landmarks)
    sizes = (key.shape[-1], value.shape[-1] + 1, value.shape[-1] + 1)
    return GrowingCoreset(*(key.new_zeros(*shape, size, dtype=dtype) for size in sizes))


def add_keys(
    coreset: GrowingCoreset,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float,
    draws: Draws,
    batch: int,
) -> GrowingCoreset:
    """Add keys to a coreset.

    Args:
        coreset: the coreset of BH heads, with m landmarks.
        key: (BH, N, D), finite.
        value: (BH, N, Dv), finite.
        mask: bool (BH, N), True for the keys to add, or None for all.
        scale: factor of the scores of attention.
        draws: the random numbers of the pivots.
        batch: B, the number of sequences.

    Returns:
        The coreset of all keys together, of the same size. It depends neither on the batch nor on masked keys.
    """
    dtype = coreset.key.dtype
    new = torch.cat((value.to(dtype), value.new_ones(*value.shape[:2], 1, dtype=dtype)), 2)  # (BH, N, Dv + 1)
    if mask is not None:
        new = new.masked_fill(~mask.unsqueeze(2), 0.0)
    points = torch.cat((coreset.key, key.to(dtype)), 1)  # (BH, m + N, D)
    clusters, weights = (torch.cat((old, new), 1) for old in (coreset.clusters, coreset.weights))
    # The kernel exp(<x, y>) takes x = (points - center) * factor. A point without a key becomes 0.
    count = clusters[..., -1:]  # (BH, m + N, 1)
    center = (points * count).sum(1, keepdim=True) / count.sum(1, keepdim=True).clamp(min=1.0)  # (BH, 1, D)
    x = (points - center).masked_fill(count <= 0, 0.0)
    factor = _TEMPERATURE * max(abs(scale), _SMALLEST_SCALE) ** 0.5
    longest = (x * x).sum(2).amax(1)[:, None, None].sqrt()  # (BH, 1, 1)
    factors = factor * ((2.0 * _LARGEST_EXPONENT) ** 0.5 / (factor * longest).clamp(min=1e-30)).clamp(max=1.0)
    x = x * factors
    num_landmarks = coreset.key.shape[1]
    exists = count[..., 0] > 0
    position, valid = candidate_positions(exists, max(_NUM_CANDIDATES, 2 * num_landmarks))  # (BH, C) each
    pivot, selected = choose_pivots(take(x, position), valid, num_landmarks, draws=draws, batch=batch)
    start = take(x, position.gather(1, pivot))  # (BH, m, D)
    size = slice_size(x.shape[1] * num_landmarks, x.device)
    with torch.autocast(x.device.type, enabled=False):
        merged = sliced(_merged, x, clusters, weights, start, selected, size=size)  # (BH, m, D + 2 (Dv + 1))
    landmark, clusters, weights = merged.split((points.shape[2], clusters.shape[2], clusters.shape[2]), 2)
    return GrowingCoreset(torch.where(clusters[..., -1:] > 0, landmark / factors + center, 0.0), clusters, weights)


def coreset_partial(query: Tensor, coreset: GrowingCoreset, *, scale: float) -> Partial:
    """Compute attention to all keys that a coreset represents.

    Args:
        query: (BH, Nq, D).
        coreset: the coreset of BH heads.
        scale: factor of the scores.

    Returns:
        Partial with out (BH, Nq, Dv) and lse (BH, Nq), in the accumulation dtype.
    """
    key, clusters, weights = coreset
    with torch.autocast(query.device.type, enabled=False):
        scores = scale * (query.to(key.dtype) @ key.mT)  # (BH, Nq, m)
        scores = scores.masked_fill((clusters[..., -1] <= 0).unsqueeze(1), -torch.inf)
        row_max = safe_row_max(scores.detach().amax(2, keepdim=True))  # (BH, Nq, 1)
        basis = (scores - row_max).exp()
        positive = basis @ clusters  # (BH, Nq, m) @ (BH, m, Dv + 1)
        signed = basis @ weights
    ratio = signed[..., -1:] / positive[..., -1:]  # (BH, Nq, 1)
    total = torch.where((ratio > _SAFE[0]) & (ratio < _SAFE[1]), signed, positive)
    empty = total[..., -1:] <= 0
    denominator = total[..., -1:].masked_fill(empty, 1.0)
    lse = (denominator.log() + row_max).masked_fill(empty, -torch.inf)
    return Partial(total[..., :-1] / denominator, lse.squeeze(2))


def _merged(x: Tensor, clusters: Tensor, weights: Tensor, landmark: Tensor, selected: Tensor) -> Tensor:
    """Compute the new coreset of some heads, with its three tensors side by side: (BH, m, D + 2 (Dv + 1)).

    It is made from scaled points x (BH, N, D) with clusters and weights (BH, N, Dv + 1), and begins with pivots
    (BH, m, D), of which those that are `selected`, bool (BH, m), exist.
    """
    count = clusters[..., -1:]  # (BH, N, 1)
    terms = torch.cat((count * x, count), 2)  # (BH, N, D + 1)
    for _ in range(_NUM_REFINEMENTS):
        landmark = lloyd_step(x, terms, landmark, selected)
    cluster = cluster_sums(nearest(x, landmark, selected), clusters, landmark.shape[1])  # (BH, m, Dv + 1)
    number = cluster[..., -1:]
    alive = (number > 0).to(x.dtype)  # (BH, m, 1)
    landmark = landmark * alive
    half = 0.5 * (landmark * landmark).sum(2, keepdim=True)  # (BH, m, 1)
    kernel = gaussian_kernel(landmark) * alive * alive.mT  # (BH, m, m)
    kernel = kernel + torch.diag_embed(1.0 - alive.squeeze(2))
    missing = alive * ((landmark @ x.mT - half).exp() @ weights) - kernel @ (half.exp() * cluster)  # (BH, m, Dv + 1)
    nystrom = cluster + (-half).exp() * regularized_solve(kernel, missing, _RIDGE)
    bound = _LARGEST_WEIGHT * cluster.abs().sum(1, keepdim=True).amax(2, keepdim=True)  # (BH, 1, 1)
    safe = nystrom.abs().amax((1, 2), keepdim=True) <= bound
    return torch.cat((landmark, cluster, torch.where(safe, nystrom, cluster)), 2)
