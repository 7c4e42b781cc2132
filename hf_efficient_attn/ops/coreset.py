"""Coresets, a few weighted keys that stand for all keys: one for WildCat, and one that grows as keys arrive.

With Nystrom weights (`regularized_solve`), a coreset approximates the kernel exp(<x, y>) of all keys by its own keys.
`hf_efficient_attn.methods.wildcat` explains the quantities of WildCat (Schroeder, Mackey, ICML 2026).

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
from torch.nn.functional import pad, threshold

from hf_efficient_attn.ops.attend import Partial, accumulation_dtype, attend, safe_row_max
from hf_efficient_attn.ops.sampling import candidate_positions
from hf_efficient_attn.ops.shards import Seed
from hf_efficient_attn.ops.thinning import choose_pivots
from hf_efficient_attn.ops.tokens import constant, flat_index, slice_size, sliced, take
from hf_efficient_attn.ops.wide import in_float64

# Slices of distances may be larger by this factor than other slices: 20 MiB on a CPU.
_LARGER_SLICES = 5
# WildCat's constant of the temperature, 1 / W_0(1 / sqrt(1 + exp(2 W_0(2 / e^2) + 2))) with Lambert's function W_0.
RHO = 3.94582
# The temperature is computed for logits of at least this size, so that it is finite for equal keys.
LEAST_LOGIT = 1e-3
# A denominator below this is rounding, because its largest term is about 1.
LEAST_DENOMINATOR = 1e-6
RIDGE = 1e-3
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


@torch.no_grad()
def nearest(points: Tensor, landmarks: Tensor) -> Tensor:
    """Find the nearest landmark (BH, m, D) of every point (BH, C, D), by the Euclidean distance: int64 (BH, C).

    The index of a landmark replaces the last bits of its closeness, so that the maximum contains the index. On a CPU
    this takes a quarter of the time of `argmax`. Distances that differ in these bits only count as equal.
    """
    integer, count = (torch.int64 if points.dtype == torch.float64 else torch.int32), landmarks.shape[1]
    bits, index = (1 << (count - 1).bit_length()) - 1, _integers(count, integer, points.device)
    landmarks = landmarks.mT
    offset = landmarks.square().sum(1, keepdim=True)

    def some_heads(points: Tensor, landmarks: Tensor, offset: Tensor) -> Tensor:
        # `baddbmm` takes twice as long: on the CPU it first copies the offsets to all rows.
        scores = torch.bmm(points, landmarks).sub_(offset, alpha=0.5)  # (BH, C, D) @ (BH, D, m) -> (BH, C, m)
        scores.view(integer).bitwise_and_(~bits).bitwise_or_(index)
        return scores.amax(2)

    size = slice_size(points.shape[1] * count // _LARGER_SLICES, points.device)
    return sliced(some_heads, points, landmarks, offset, size=size).view(integer).bitwise_and(bits).long()


@constant
def _integers(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=dtype, device=device)


def cluster_sums(cluster: Tensor, x: Tensor, count: int) -> Tensor:
    """Sum the members of each of `count` clusters: int64 (BH, C), (BH, C, F) -> (BH, count, F)."""
    sums = x.new_zeros(len(x) * count, x.shape[2])
    return sums.index_add(0, flat_index(cluster, count).flatten(), x.flatten(0, 1)).view(len(x), count, -1)


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
        lower, failed = torch.linalg.cholesky_ex(system)
        # A product with the inverse takes less time than triangular solves for many right-hand sides.
        inverse = torch.cholesky_inverse(torch.where(failed.view(-1, 1, 1) > 0, safe, lower))
    solved = torch.bmm(inverse, right)
    if not (torch.is_grad_enabled() and (kernel.requires_grad or right.requires_grad)):
        return solved
    # A step of refinement has the value of the solution, and its gradient by R and K.
    solved = solved.detach()
    return solved + inverse @ (right - system @ solved)


@constant
def identity(size: int, factor: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a multiple of the identity matrix."""
    return torch.eye(size, dtype=dtype, device=device) * factor


def with_ones(x: Tensor) -> Tensor:
    """Append a column of ones, for the denominators: (..., Dv) -> (..., Dv + 1)."""
    return pad(x, (0, 1), value=1.0)


def kernel_scale_of(query: Tensor, points: Tensor, scale: float) -> Tensor:
    """Compute beta / tau^2 of every head, (BH, 1, 1), for queries (BH, Nq, D) and centered keys (BH, C, D)."""
    largest_query, largest_key = (torch.linalg.vector_norm(x, dim=2).amax(1)[:, None, None] for x in (query, points))
    # With x = beta R_Q / rho this is x^2 / (x R_K) = x / R_K.
    x = largest_query * (abs(scale) / RHO)
    kernel_scale = x.square() / (x * largest_key).clamp(min=LEAST_LOGIT / RHO)
    clamped: Tensor = kernel_scale.clamp(min=torch.finfo(points.dtype).tiny ** 0.5)
    return clamped


def attend_to_coreset(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, kernel_scale: Tensor, *, scale: float, dropout_p: float
) -> Tensor:
    """Compute attention to a coreset with Nystrom weights.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D), centered.
        value: (BH, Nk, Dv).
        keys: (BH, m, D), the keys of the coreset.
        kernel_scale: (BH, 1, 1), from `kernel_scale_of`.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight from the numerator.

    Returns:
        (BH, Nq, Dv).
    """
    limit = 1.0 / (1.0 - dropout_p)

    def some_heads(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, kernel_scale: Tensor) -> Tensor:
        weighted, bias, middle, half = _weighted(key, value, keys, kernel_scale, drops=dropout_p > 0.0)
        tensors = query[:, None], keys[:, None]
        sums = attend(*tensors, weighted[:, None], bias, scale=scale).out[:, 0]  # (BH, Nq, Dv + 1)
        numerator, denominator = sums[..., :-1], sums[..., -1:]  # (BH, Nq, Dv), (BH, Nq, 1)
        if dropout_p > 0.0:
            numerator = attend(*tensors, weighted[:, None, :, :-1], bias, scale=scale, dropout_p=dropout_p).out[:, 0]
        # Where the denominator is not positive, this divides by infinity.
        ratio = numerator / threshold(denominator, LEAST_DENOMINATOR, torch.inf)
        return torch.addcmul(middle, ratio.clamp(-limit, limit), half)

    size = slice_size(query.shape[1] * keys.shape[1] // 4, query.device)
    return sliced(some_heads, query, key, value, keys, kernel_scale, size=size, draws=dropout_p > 0.0)


def _weighted(key: Tensor, value: Tensor, keys: Tensor, kernel_scale: Tensor, *, drops: bool) -> tuple[Tensor, ...]:
    """Weigh the values by coreset keys (BH, m, D), for centered keys (BH, Nk, D).

    Numerator and denominator of the output are exp(scale q . k + bias) @ [values, ones].

    Returns:
        (BH, m, Dv + 1), the weights applied to the values, as multiples of `half` around `middle`, and to 1; the bias
        (BH, 1, 1, m); and `middle` and `half` (BH, 1, Dv), of the range of each feature of the values.
    """
    # Sum the kernel's row of each coreset key over all keys: exp(lse) [out, 1].
    rows = keys * kernel_scale  # (BH, m, D)
    out, lse = (x[:, 0] for x in attend(rows[:, None], key[:, None], value[:, None], scale=1.0))
    ends = torch.stack((value.amin(1, keepdim=True), value.amax(1, keepdim=True)))
    middle, half = 0.5 * (ends[1] + ends[0]), 0.5 * (ends[1] - ends[0])
    if drops:  # outputs are between 0 and multiples of the values
        middle, half = torch.zeros_like(middle), ends.abs().amax(0)
    # If a feature is constant, its range is rounding.
    finfo = torch.finfo(value.dtype)
    unit = torch.add(half, middle.abs(), alpha=8 * finfo.eps).clamp(min=finfo.tiny)
    weighted, bias = _solved(keys, kernel_scale, lse, (out - middle) / unit)
    return weighted.to(key.dtype), bias.view(len(key), 1, 1, -1).to(key.dtype), middle, half


@in_float64
def _solved(keys: Tensor, kernel_scale: Tensor, lse: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Weigh the means (BH, m, Dv) and 1 by the inverse of the kernel matrix of the coreset: (BH, m, Dv + 1) and a bias.

    In float64, because a kernel matrix is nearly singular, and sums of exponentials differ by orders of magnitude.
    """
    points = keys * kernel_scale.double().sqrt()  # (BH, m, D)
    kernel = points @ points.mT
    log_size = -0.5 * kernel.diagonal(dim1=1, dim2=2).unsqueeze(2)  # (BH, m, 1)
    kernel = (kernel + log_size + log_size.mT).clamp(max=0.0).exp()
    weights = (lse.unsqueeze(2) + log_size).softmax(1)  # up to a factor of all
    weighted = regularized_solve(kernel, with_ones(values) * weights, RIDGE)
    # The size of the weights goes into the exponent of the query.
    size = torch.linalg.vector_norm(weighted.detach(), torch.inf, 2, keepdim=True).clamp(min=1e-300)
    return weighted / size, size.log() + log_size


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
    """Make a coreset without keys, for keys (..., N, D) and values (..., N, Dv)."""
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
    """Add keys to a coreset.

    Args:
        coreset: the coreset of BH heads, with m landmarks.
        key: (BH, N, D), finite.
        value: (BH, N, Dv), finite.
        mask: bool (BH, N), True for the keys to add, or None for all.
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
    points = torch.cat((coreset.key, key.to(dtype)), 1)  # (BH, m + N, D)
    clusters, weights = (torch.cat((old, new), 1) for old in (coreset.clusters, coreset.weights))
    # The kernel exp(<x, y>) takes x = (points - center) * factor. A point that stands for no key becomes 0.
    count = clusters[..., -1:]
    center = (points * count).sum(1, keepdim=True) / count.sum(1, keepdim=True).clamp(min=1.0)
    x, factor = (points - center).masked_fill(count <= 0, 0.0), _TEMPERATURE * max(abs(scale), _SMALLEST_SCALE) ** 0.5
    longest = (x * x).sum(2).amax(1)[:, None, None].sqrt()
    factors = factor * ((2.0 * _LARGEST_EXPONENT) ** 0.5 / (factor * longest).clamp(min=1e-30)).clamp(max=1.0)
    x, num_landmarks, exists = x * factors, coreset.key.shape[1], count[..., 0] > 0
    position, valid = candidate_positions(exists, max(_NUM_CANDIDATES, 2 * num_landmarks))
    pivot, selected = choose_pivots(take(x, position), valid, num_landmarks, seed=seed, batch=batch)
    start = take(x, position.gather(1, pivot))  # (BH, m, D)
    size = slice_size(x.shape[1] * num_landmarks, x.device)
    with torch.autocast(x.device.type, enabled=False):
        merged = sliced(_merged, x, clusters, weights, start, selected, size=size)
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
        row_max = safe_row_max(scores.detach().amax(2, keepdim=True))
        basis = (scores - row_max).exp()
        positive, signed = basis @ clusters, basis @ weights  # (BH, Nq, m) @ (BH, m, Dv + 1)
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
    count = clusters[..., -1:]
    for _ in range(_NUM_REFINEMENTS):
        members = _members(x, landmark, selected)
        number = members @ count
        landmark = torch.where(number > 0, members @ (count * x) / number.clamp(min=1.0), landmark)
    members = _members(x, landmark, selected)
    number, cluster = members @ count, members @ clusters  # (BH, m, 1), (BH, m, Dv + 1)
    alive = (number > 0).to(x.dtype)  # (BH, m, 1)
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
    """Mark the points (BH, N, D) whose nearest landmark is landmark i by 1 in row i, and others by 0: (BH, m, N)."""
    closeness = landmark @ x.mT - 0.5 * (landmark * landmark).sum(2, keepdim=True)
    nearest = closeness.masked_fill(~selected.unsqueeze(2), -torch.inf).argmax(1, keepdim=True)
    return torch.zeros_like(closeness).scatter_(1, nearest, 1.0)


def coreset_naive(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, kernel_scale: Tensor, *, scale: float
) -> Tensor:
    """Compute `attend_to_coreset` in the readable form for float64 inputs, with dense weights of all keys."""
    root = kernel_scale.sqrt()
    points, half_norm = root * keys, 0.5 * (root * keys).square().sum(2, keepdim=True)
    # exp(<x, y> - |x|^2 / 2) relative to its maximum. The logits below contain the missing factors.
    exponents = points @ (root * key).mT - half_norm  # (BH, m, Nk)
    kernel_rows = (exponents - exponents.amax((1, 2), keepdim=True)).exp()
    kernel = (points @ points.mT - half_norm - half_norm.mT).exp()
    identity = torch.eye(keys.shape[1], dtype=kernel.dtype, device=kernel.device)
    weights = torch.linalg.solve(kernel + RIDGE * identity, kernel_rows)
    low, high = value.amin(1, keepdim=True), value.amax(1, keepdim=True)
    middle, half = (low + high) / 2, (high - low) / 2
    # Relative to the middle of the range, which is the output if the denominator is not positive.
    numerators, ones = weights @ (value - middle), weights.sum(2, keepdim=True)
    size = torch.maximum((numerators / half.clamp(min=1e-300)).abs().amax(2), ones[..., 0].abs())
    logits = scale * query @ keys.mT - half_norm.mT  # (BH, Nq, m)
    basis = (logits - (logits + size.log()[:, None]).amax(2, keepdim=True)).exp()
    denominator = basis @ ones
    positive = denominator > LEAST_DENOMINATOR * (basis @ size.unsqueeze(2))
    ratio = (basis @ numerators / torch.where(positive, denominator, 1.0)).masked_fill(~positive, 0.0)
    return middle + torch.maximum(torch.minimum(ratio, half), -half)
