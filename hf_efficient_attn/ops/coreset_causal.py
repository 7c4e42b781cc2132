"""Exact near keys and weighted landmarks of all earlier keys: the strictly causal form of `nearfar`.

The positions after the first `num_exact` are cut into epochs, whose lengths grow with the position. The prefix of an
epoch is all keys up to one block before its start. From the prefix alone come the center of the keys and m landmarks,
the means of clusters of keys. All queries of the epoch use them, so no choice depends on later tokens, and the output
does not even depend on the length of the sequence. A query attends to

- its own block and the block before it, exactly;
- all other keys through the landmarks c. With the kernel exp(t^2 scale <k_i, k_j>) the weight exp(scale <q, k_j>)
  becomes sum_c exp(scale <q, c>) (K_cc + ridge I)^-1 K_cj (Nystrom). Each block adds its own keys to running sums of
  K_cj [v_j, 1]. This is causal linear attention (Katharopoulos et al. 2020) whose features are adapted to the data. The
  matrix (K_cc + ridge I)^-1 makes weighted values of these sums, and the far field of the queries is attention to the
  landmarks with these values. Their last columns are the weights themselves: the output has numerators and
  denominators.

The cost is O(m) per query and, because the epochs grow geometrically, O(m) per key.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.attend import LOG2_E, Partial, accumulation_dtype, attend
from hf_efficient_attn.ops.coreset import cluster_sums, nearest, regularized_solve
from hf_efficient_attn.ops.coreset_landmarks import draw_apart, gumbel_numbers
from hf_efficient_attn.ops.exact import exact_attention, mask_bias
from hf_efficient_attn.ops.shards import Seed
from hf_efficient_attn.ops.tokens import ceil_div, even_positions, pad_to_blocks, slice_size, sliced, take

# Keys of the prefix, evenly spaced, from which landmarks are made.
_CANDIDATES = 1024
# A key x is drawn with a probability that grows with K(x, x)^_DRAW_POWER, and has the weight K(x, x)^_POWER in a mean.
_DRAW_POWER, _POWER, _LEAST_LOG_WEIGHT = 0.5, 0.25, -60.0
# Bounds of exponents: sums of e^40 times values up to 1e4 stay finite in float32.
_REFERENCE, _LARGEST = 30.0, 40.0
# The least weight of a landmark, relative to the largest. The gradient divides by a denominator of about this size.
_LEAST = 1e-12
# A denominator below this share of a positive estimate of it is not trusted.
SAFE = 0.1


class CausalCoresetOptions(NamedTuple):
    """Options of `causal_coreset_attention`.

    Attributes:
        num_exact: the first positions, which are computed exactly in sequences of any length; more than `block_size`.
        block_size: tokens of a block. A query attends to its own block and the block before it exactly.
        num_samples: m, the number of landmarks.
        temperature: t. The landmarks are chosen and weighted with the kernel exp(t^2 scale <k_i, k_j>).
        ridge: positive, relative to the unit diagonal of K_cc.
        seed: seed of the landmarks.
    """

    num_exact: int
    block_size: int
    num_samples: int
    temperature: float = 0.75
    ridge: float = 1e-3
    seed: Seed = 0


class _Coreset(NamedTuple):
    """The landmarks of an epoch.

    Attributes:
        landmark: (BH, m, D).
        bias: (BH, m), added to the scores of the landmarks: log of the factor of K_cj that cancels.
        least: (BH, m, 1), the least weights: those of the landmarks themselves.
        inverse: (BH, m, m), (K_cc + ridge I)^-1.
        factor: (BH, m, D + 1), whose product with keys and 1 is the logarithm to base 2 of K_cj.
    """

    landmark: Tensor
    bias: Tensor
    least: Tensor
    inverse: Tensor
    factor: Tensor


def split_columns(columns: int) -> dict[str, int]:
    """Distribute a budget of keys per query: on average 1.5 blocks of near keys, and 2.5 as many landmarks."""
    block_size = max(1, columns // 4)
    return {
        "num_exact": max(3 * columns // 2, block_size + 1),
        "block_size": block_size,
        "num_samples": max(1, 5 * columns // 8),
    }


def epoch_bounds(length: int, options: CausalCoresetOptions) -> Iterator[tuple[int, int]]:
    """Start and end of the epochs of a sequence.

    After `num_exact` positions the first three epochs are about 1/3, 2/3 and 2/3 times as long. The later ones double
    the position.
    """
    start, block_size = options.num_exact, options.block_size
    for step in itertools.chain((start // 3, 2 * start // 3, 2 * start // 3), itertools.repeat(0)):
        if start >= length:
            return
        end = start + max(1, (step or start) // block_size) * block_size
        yield start, min(end, length)
        start = end


def causal_coreset_attention(
    query: Tensor, key: Tensor, value: Tensor, options: CausalCoresetOptions, *, scale: float, dropout_p: float = 0.0
) -> Tensor:
    """Causal attention to near keys exactly, and to all other keys through landmarks.

    Gradients flow through keys, values and weights, with clusters fixed.

    Args:
        query: (BH, N, D), valid tokens first.
        key: (BH, N, D).
        value: (BH, N, Dv).
        options: see `CausalCoresetOptions`.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        (BH, N, Dv).
    """
    bounds = list(epoch_bounds(query.shape[1], options))

    def some_heads(query: Tensor, key: Tensor, value: Tensor, *coresets: Tensor) -> Tensor:
        first = (x[:, : options.num_exact] for x in (query, key, value))
        outs = [exact_attention(*first, is_causal=True, scale=scale, dropout_p=dropout_p)]
        acc_dtype = accumulation_dtype(value.dtype)
        queries, keys, values = (x.to(acc_dtype) for x in (query, key, value))
        for i, (start, end) in enumerate(bounds):
            coreset = _Coreset(*coresets[i * len(_Coreset._fields) : (i + 1) * len(_Coreset._fields)])
            tensors = queries[:, start:end], keys[:, :end], values[:, :end]
            outs.append(_epoch(*tensors, coreset, options.block_size, scale, dropout_p).to(value.dtype))
        return torch.cat(outs, 1)

    with torch.autocast(query.device.type, enabled=False):
        coresets = [tensor for coreset in _coresets(key, bounds, options, scale) for tensor in coreset]
        size = slice_size(query.shape[1] * max(options.num_samples, query.shape[2]), query.device)
        return sliced(some_heads, query, key, value, *coresets, size=size, draws=dropout_p > 0.0)


def candidate_positions(start: int, options: CausalCoresetOptions, device: torch.device) -> Tensor:
    """The positions of evenly spaced keys of the prefix of the epoch that starts at `start`, int64 (C,)."""
    prefix = start - options.block_size
    return even_positions(prefix, min(prefix, _CANDIDATES), device)


def candidate_clusters(points: Tensor, options: CausalCoresetOptions) -> tuple[Tensor, Tensor]:
    """The clusters of candidates (BH, C, D), whose kernel is exp(<x, y>), after two steps of Lloyd's algorithm.

    Returns:
        draw: int64 (BH, m), the candidates with which the clusters begin. An empty cluster keeps its own.
        cluster: int64 (BH, C), the cluster of each candidate.
    """
    with torch.no_grad():
        count = min(options.num_samples, points.shape[1])
        numbers = gumbel_numbers(min(options.num_samples, _CANDIDATES), _CANDIDATES, options.seed, points)
        draw = draw_apart(points, _DRAW_POWER, numbers[:, : points.shape[1]], count)
        drawn = take(points, draw)
        cluster = nearest(points, drawn)
        return draw, nearest(points, _means(points, points, cluster, drawn))


def _means(keys: Tensor, points: Tensor, cluster: Tensor, drawn: Tensor) -> Tensor:
    """The weighted means of clusters of keys (BH, C, D), or `drawn` (BH, m, D) where a cluster is empty.

    The kernel of `points` (BH, C, D) is exp(<x, y>). `cluster` is int64 (BH, C).
    """
    norm = points.square().sum(2, keepdim=True)
    weight = (_POWER * (norm - norm.amax(1, keepdim=True))).clamp(min=_LEAST_LOG_WEIGHT).exp()
    sums, total = cluster_sums(cluster, torch.cat((keys * weight, weight), 2), drawn.shape[1]).split(
        (keys.shape[2], 1), 2
    )
    return torch.where(total > 0, sums / torch.where(total > 0, total, 1.0), drawn)


def _coresets(
    key: Tensor, bounds: list[tuple[int, int]], options: CausalCoresetOptions, scale: float
) -> list[_Coreset]:
    """The landmarks of all epochs from keys (BH, N, D)."""
    if not bounds:
        return []
    positions = [candidate_positions(start, options, key.device) for start, _ in bounds]
    candidates = key.index_select(1, torch.cat(positions)).to(accumulation_dtype(key.dtype))
    sizes = [len(position) for position in positions]
    return [_coreset(own, options, scale) for own in candidates.split(sizes, 1)]


def _coreset(candidates: Tensor, options: CausalCoresetOptions, scale: float) -> _Coreset:
    """The landmarks of an epoch from candidates (BH, C, D)."""
    factor, center = options.temperature**2 * abs(scale), candidates.mean(1, keepdim=True)
    keys = candidates - center
    draw, cluster = candidate_clusters(keys.detach() * factor**0.5, options)
    landmark = _means(keys, keys * factor**0.5, cluster, take(keys, draw))
    half = (0.5 * factor) * landmark.square().sum(2, keepdim=True)
    kernel = (factor * (landmark @ landmark.mT) - half - half.mT).clamp(max=0.0).exp()
    # The inverse is multiplied by large sums, so its rounding matters. In float64 it costs little.
    inverse = regularized_solve(kernel.double(), None, options.ridge).to(half.dtype)
    # exp(<x_c, x_j> - |x_c|^2 / 2) is at most exp(|x_j|^2 / 2). A common factor keeps it finite, and cancels. For keys
    # that are longer than the landmarks there is a bound.
    reference = (half.detach().amax(1, keepdim=True) - _REFERENCE).clamp(min=0.0)
    shift = -half - reference - factor * (landmark @ center.mT)
    return _Coreset(
        landmark + center,
        (reference - half).squeeze(2),
        torch.exp(half - reference).clamp(min=_LEAST),
        inverse,
        LOG2_E * torch.cat((factor * landmark, shift), 2),
    )


def _epoch(
    query: Tensor, key: Tensor, value: Tensor, coreset: _Coreset, block_size: int, scale: float, dropout_p: float
) -> Tensor:
    """Output of the queries of an epoch, from tensors in the accumulation dtype.

    Args:
        query: (BH, L, D).
        key: (BH, N, D), all keys up to the last query.
        value: (BH, N, Dv).
        coreset: the coreset of the epoch.
        block_size: tokens of a block.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        (BH, L, Dv).
    """
    length, end, value_dim = query.shape[1], key.shape[1], value.shape[2]
    num_blocks, prefix = ceil_div(length, block_size), end - length - block_size
    blocks = pad_to_blocks(query, block_size)

    # The far keys of block t are those of the prefix and of t blocks after it. The last block of the prefix is added
    # with the others. The sums of the last two columns are the weights.
    first, last = prefix - block_size, prefix + (num_blocks - 1) * block_size
    ones = key.new_ones(1, 1, 2).expand(len(key), last, -1)
    keys, targets = torch.cat((key[:, :last], ones[..., :1]), 2), torch.cat((value[:, :last], ones), 2)
    features = (coreset.factor @ keys.mT).clamp_(max=LOG2_E * _LARGEST).exp2_()
    before = features[..., :first] @ targets[:, :first]
    own = features[..., first:].unflatten(2, (num_blocks, block_size)).transpose(1, 2)
    own = own @ targets[:, first:].unflatten(1, (num_blocks, block_size))
    sums = own.cumsum(1).add_(before.unsqueeze(1))
    weighted = coreset.inverse.unsqueeze(1) @ sums
    weighted[..., -1:].clamp_(min=coreset.least.unsqueeze(1))  # positive weights, for a bound of the denominator
    far = _far_field(blocks, coreset, weighted, scale, dropout_p)

    keys, values = (pad_to_blocks(x[:, prefix:], block_size).flatten(1, 2) for x in (key, value))
    keys, values = (x.unfold(1, 2 * block_size, block_size).mT for x in (keys, values))
    block = torch.ones(block_size, block_size, dtype=torch.bool, device=query.device)
    bias = mask_bias(torch.cat((block, block.tril()), 1), query.dtype)[None, None]
    near = attend(blocks, keys, values, bias, scale=scale, dropout_p=dropout_p)

    # Not 1 - share: the weights of the far field may be far below 1, and the rounding of 1 is not.
    difference = (near.lse - far.lse).unsqueeze(3)
    near_share, share = torch.sigmoid(difference), torch.sigmoid(-difference)
    numerator, weight, bound = (far.out * share).split((value_dim, 1, 1), 3)
    is_safe = near_share + weight > SAFE * (near_share + bound)
    if not bool(is_safe.all()):
        # Weights of both signs may cancel. Then the far field is that of positive weights, and of the means of the
        # values around the landmarks.
        means = sums[..., :-2] / sums[..., -1:].clamp(min=_LEAST)
        positive = torch.cat((means * weighted[..., -1:], weighted[..., -2:]), 3)
        other = _far_field(blocks, coreset, positive, scale, dropout_p).out[..., :value_dim] * share
        numerator, weight = torch.where(is_safe, numerator, other), torch.where(is_safe, weight, bound)
    out = torch.addcmul(numerator, near.out, near_share) / (near_share + weight)
    return out.flatten(1, 2)[:, :length]


def _far_field(query: Tensor, coreset: _Coreset, weighted: Tensor, scale: float, dropout_p: float) -> Partial:
    """Attention of blocks (BH, T, b, D) to landmarks with values (BH, T, m, Dv + 2), whose last columns are weights."""
    key, bias = coreset.landmark.unsqueeze(1).expand(-1, query.shape[1], -1, -1), coreset.bias[:, None, None]
    far = attend(query, key, weighted, bias, scale=scale)
    if dropout_p == 0.0:
        return far
    # Weights are dropped in the numerators only, as in softmax attention.
    dropped = attend(query, key, weighted[..., :-2], bias, scale=scale, dropout_p=dropout_p)
    return Partial(torch.cat((dropped.out, far.out[..., -2:]), 3), far.lse)


def causal_coreset_naive(
    query: Tensor, key: Tensor, value: Tensor, options: CausalCoresetOptions, *, scale: float
) -> Tensor:
    """The readable form of `causal_coreset_attention`, one query at a time with a dense row of weights, in float64.

    With the same draws and clusters: (BH, N, D), (BH, N, D), (BH, N, Dv) -> float64 (BH, N, Dv).
    """
    query, key, value = query.double(), key.double(), value.double()
    future = torch.ones(query.shape[1], query.shape[1], dtype=torch.bool, device=query.device).triu(1)
    out = (scale * query @ key.mT).masked_fill(future, -torch.inf).softmax(-1) @ value
    for start, end in epoch_bounds(query.shape[1], options):
        position = candidate_positions(start, options, key.device)
        candidates = key[:, position] - key[:, position].mean(1, keepdim=True)
        clusters = candidate_clusters(candidates * options.temperature * abs(scale) ** 0.5, options)
        for a in range(len(query)):
            center, draw, cluster = key[a, position].mean(0), clusters[0][a], clusters[1][a]
            landmark = _naive_landmarks(candidates[a], draw, cluster, options.temperature**2 * abs(scale))
            for i in range(start, end):
                block = start + (i - start) // options.block_size * options.block_size
                near = slice(block - options.block_size, i + 1)
                head = query[a, i], key[a, : i + 1] - center, value[a, : i + 1]
                out[a, i] = _naive_row(*head, landmark, near.start, options, scale)
    return out


def _naive_landmarks(points: Tensor, draw: Tensor, cluster: Tensor, factor: float) -> Tensor:
    """The landmarks (m, D), weighted means of clusters of candidates (C, D), or `draw` where a cluster is empty."""
    landmark, norm = points[draw], factor * points.square().sum(1)
    weight = (_POWER * (norm - norm.max())).clamp(min=_LEAST_LOG_WEIGHT).exp()
    for i in range(len(landmark)):
        members = cluster == i
        if members.any():
            landmark[i] = (weight[members, None] * points[members]).sum(0) / weight[members].sum()
    return landmark


def _naive_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    landmark: Tensor,
    first_near: int,
    options: CausalCoresetOptions,
    scale: float,
) -> Tensor:
    """The output (Dv,) of a query (D,) from all keys (n, D) up to its own, exactly from key `first_near` on."""
    factor, scores = options.temperature**2 * abs(scale), scale * key @ query
    half = 0.5 * factor * landmark.square().sum(1)
    reference = (half.max() - _REFERENCE).clamp(min=0.0)  # bounds exponents, and cancels
    rows = factor * landmark @ key[:first_near].T - (half + reference)[:, None]
    kernel = rows.clamp(max=_LARGEST).exp()  # K_cj
    unit = torch.exp(-0.5 * factor * torch.cdist(landmark, landmark).square())
    one = torch.eye(len(unit), dtype=unit.dtype, device=unit.device)
    weights = torch.linalg.solve(unit + options.ridge * one, kernel)  # (m, n), of keys for landmarks
    logits = scale * landmark @ query + reference - half
    largest = max(logits.max(), scores[first_near:].max())
    exact, basis = torch.exp(scores[first_near:] - largest), torch.exp(logits - largest)
    numerator, denominator = basis @ weights @ value[:first_near], basis @ weights.sum(1)
    positive = torch.maximum(weights.sum(1), torch.exp(half - reference).clamp(min=_LEAST))
    if exact.sum() + denominator <= SAFE * (exact.sum() + basis @ positive):
        means = kernel @ value[:first_near] / kernel.sum(1, keepdim=True).clamp(min=_LEAST)
        numerator, denominator = (basis * positive) @ means, basis @ positive
    out: Tensor = (exact @ value[first_near:] + numerator) / (exact.sum() + denominator)
    return out
