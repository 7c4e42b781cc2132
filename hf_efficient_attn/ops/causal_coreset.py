"""Exact near keys and weighted landmarks of all earlier keys, in the strictly causal form.

The positions after the first `num_exact` are cut into epochs, whose lengths grow with the position. The prefix of an
epoch is all keys up to one block before its start. From the prefix alone come the center of the keys and m landmarks,
the means of clusters of keys (`hf_efficient_attn.ops.weighted_coreset`). All queries of the epoch use them, so no
choice depends on later tokens, and the output does not even depend on the length of the sequence. A query attends to

- its own block and the block before it, exactly;
- all other keys through the landmarks c. With the kernel exp(t^2 scale <k_i, k_j>) the weight exp(scale <q, k_j>)
  becomes sum_c exp(scale <q, c>) (K_cc + ridge I)^-1 K_cj (Nystrom). Numerators and denominators are sums over j, so
  each block adds its own keys to running sums of K_cj [v_j, 1]. This is causal linear attention (Katharopoulos et al.
  2020) whose features are adapted to the data;
- the keys of the prefix that are nearest to one landmark, the one that counts most for the query, with what this
  landmark misses of them. Heads that copy a passage attend to a few keys far back, which no small coreset can
  represent. The approximation by one landmark projects a key of norm 1 (of the kernel) to one of norm rho_j <= 1, with
  rho_j = exp(-t^2 scale |k_j - c|^2). So the key is added with the weight (1 - rho_j) exp(scale <q, k_j>).

The cost is O(m) per query and, because the epochs grow geometrically, O(m) per key. On the CPU the choices are made for
all heads at once, and the rest a few heads and a few thousand tokens at a time, so that temporaries stay in a cache.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout

from hf_efficient_attn.ops.blocks import can_reuse_buffers, ceil_div, chunked_over_heads, pad_to_blocks, take
from hf_efficient_attn.ops.causal import causal_block_partial, group_by_block
from hf_efficient_attn.ops.coreset import draw_apart, gumbel_numbers
from hf_efficient_attn.ops.exact import exact_attention
from hf_efficient_attn.ops.onednn import product, use_product
from hf_efficient_attn.ops.partial import LOG2_E, Partial, accumulation_dtype, partial_attention

# Keys of the prefix, evenly spaced, from which landmarks are made.
_CANDIDATES = 1024
# Steps of Lloyd's algorithm.
_LLOYD_STEPS = 2
# A key x is drawn with a probability that grows with K(x, x)^DRAW_POWER, and has the weight K(x, x)^POWER in a mean.
DRAW_POWER, POWER, LEAST_LOG_WEIGHT = 0.85, 0.5, -60.0
# Tokens of some heads that are processed at a time on the CPU, and those whose products with all landmarks are.
_TOKENS, _ROWS = 1 << 13, 1 << 12
# The most and the fewest queries with the same cluster that are processed together.
_MOST_SLOTS, _FEWEST_SLOTS = 16, 4
# Bounds of exponents: sums of e^40 times values up to 1e4 stay finite in float32.
REFERENCE, LARGEST = 30.0, 40.0
# The least weight of a landmark, relative to the largest. The gradient divides by a denominator of about this size.
LEAST = 1e-12
# The least share of a key of a cluster that the landmark misses: rounding.
LEAST_MISSED = 1e-6
# A denominator below this share of a positive estimate of it is not trusted.
SAFE = 0.1


class CausalCoresetOptions(NamedTuple):
    """Options of `causal_coreset_attention`.

    Attributes:
        num_exact: the first positions, which are computed exactly in sequences of any length; more than `block_size`.
        block_size: tokens of a block. A query attends to its own block and the block before it exactly.
        num_samples: m, the number of landmarks.
        cluster_size: the largest number of keys of a cluster, the most recent ones; 0 for no clusters.
        temperature: t. The landmarks are chosen and weighted with the kernel exp(t^2 scale <k_i, k_j>).
        ridge: positive, relative to the unit diagonal of K_cc.
        seed: seed of the landmarks.
    """

    num_exact: int
    block_size: int
    num_samples: int
    cluster_size: int
    temperature: float = 0.75
    ridge: float = 1e-3
    seed: int | Tensor = 0


class Epoch(NamedTuple):
    """The choices for the queries from `start` to `end` - 1. Positions are counted from the start of the sequence.

    Attributes:
        start: position of the first query; `start` - block_size is the end of the prefix.
        end: position after the last query.
        candidate: int64 (C), the positions of the keys from which landmarks are made.
        draw: int64 (BH, m), the candidates with which the landmarks begin.
        cluster: int64 (BH, C), the landmark whose mean contains the candidate.
    """

    start: int
    end: int
    candidate: Tensor
    draw: Tensor
    cluster: Tensor


def split_columns(columns: int) -> dict[str, int]:
    """Distribute a budget of keys per query: the sizes in `CausalCoresetOptions`.

    Half goes to the near field, about a tenth to a cluster and the rest to landmarks. The first queries, which are
    exact, attend to fewer keys on average.
    """
    block_size, cluster_size = max(1, columns // 4), 3 * columns // 32
    return {
        "num_exact": max(3 * columns // 2, block_size + 1),
        "block_size": block_size,
        "num_samples": max(1, columns - 2 * block_size - cluster_size),
        "cluster_size": cluster_size,
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


def plan_epoch(key: Tensor, number: int, bounds: tuple[int, int], options: CausalCoresetOptions, scale: float) -> Epoch:
    """All choices of an epoch, from the keys of the prefix. No gradient.

    Args:
        key: (BH, N, D).
        number: the number of the epoch, which distinguishes its random numbers.
        bounds: the epoch, from `epoch_bounds`.
        options: see `CausalCoresetOptions`.
        scale: factor of the scores.
    """
    prefix = bounds[0] - options.block_size
    num_candidates = min(prefix, _CANDIDATES)
    candidate = torch.arange(num_candidates, device=key.device) * prefix // num_candidates
    with torch.no_grad():
        points = (key[:, candidate] - _center(key, prefix)) * (options.temperature * abs(scale) ** 0.5)
        count = min(options.num_samples, num_candidates)
        seed = torch.as_tensor(options.seed, device=key.device) + number
        numbers = gumbel_numbers(count, num_candidates, seed, points)
        draw = draw_apart(points, DRAW_POWER, numbers, None, count).candidate
        drawn = take(points, draw)
        cluster = _nearest(points, drawn)
        for _ in range(_LLOYD_STEPS - 1):
            cluster = _nearest(points, _means(points, points, cluster, drawn))
    return Epoch(*bounds, candidate, draw, cluster)


def _center(key: Tensor, prefix: int) -> Tensor:
    """Mean of the keys of the prefix, (BH, 1, D) in the accumulation dtype."""
    return key[:, :prefix].mean(1, keepdim=True, dtype=accumulation_dtype(key.dtype))


def _nearest(points: Tensor, landmarks: Tensor) -> Tensor:
    """The nearest landmark (BH, m, D) of each point (BH, C, D): int64 (BH, C)."""
    return _argmax(_product(points, landmarks, -0.5 * landmarks.square().sum(2).unsqueeze(1)))[1]


def _means(keys: Tensor, points: Tensor, cluster: Tensor, drawn: Tensor) -> Tensor:
    """The weighted means of clusters of keys (BH, C, D), or `drawn` (BH, m, D) where a cluster is empty.

    The kernel of `points` (BH, C, D) is exp(<x, y>). `cluster` is int64 (BH, C).
    """
    norm = points.square().sum(2, keepdim=True)
    weight = (POWER * (norm - norm.amax(1, keepdim=True))).clamp(min=LEAST_LOG_WEIGHT).exp()
    weighted, (batch_heads, count, _) = torch.cat((keys * weight, weight), 2), drawn.shape
    if keys.device.type == "cpu":
        sums = weighted.new_zeros(batch_heads * count, weighted.shape[2])
        first = (torch.arange(batch_heads) * count)[:, None]
        sums = sums.index_add(0, (cluster + first).flatten(), weighted.flatten(0, 1)).view(batch_heads, count, -1)
    else:
        # A product, because sums by index are not deterministic on an accelerator.
        one_hot = weighted.new_zeros(*cluster.shape, count).scatter_(2, cluster.unsqueeze(2), 1.0)
        sums = one_hot.mT @ weighted
    total = sums[..., -1:]
    return torch.where(total > 0, sums[..., :-1] / torch.where(total > 0, total, 1.0), drawn)


def _product(x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product x @ y^T + bias: x (BH, M, D), y (BH, K, D), bias (BH, 1, K) or None -> (BH, M, K)."""
    if use_product(x, y, bias):
        x, y = x.contiguous(), y.contiguous()
        outs = [product(x[a], y[a], None if bias is None else bias[a, 0]) for a in range(len(x))]
        return outs[0][None] if len(outs) == 1 else torch.stack(outs)
    return x @ y.mT if bias is None else torch.baddbmm(bias, x, y.mT)


def _argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum of each row of x (BH, N, m) and its index int64 (BH, N), up to rounding of the last bits.

    The index replaces the last bits of the numbers, so that the maximum contains it. On the CPU this takes half the
    time of `max`.
    """
    number = torch.int64 if x.dtype == torch.float64 else torch.int32
    mask = (1 << (x.shape[2] - 1).bit_length()) - 1
    marked = x.view(number).bitwise_and(~mask)
    marked.bitwise_or_(torch.arange(x.shape[2], dtype=number, device=x.device))
    largest = marked.view(x.dtype).amax(2)
    return largest, largest.view(number).bitwise_and(mask).long()


def _members(assigned: Tensor, num_clusters: int, cluster_size: int) -> tuple[Tensor, Tensor]:
    """The last keys of each cluster and which of them exist, both (BH, C, cluster_size), for assigned (BH, N)."""
    order = assigned.argsort(dim=1, stable=True)
    clusters = torch.arange(num_clusters, device=assigned.device).expand(len(assigned), -1).contiguous()
    sorted_clusters = assigned.gather(1, order)
    first = torch.searchsorted(sorted_clusters, clusters)
    end = torch.searchsorted(sorted_clusters, clusters, right=True)
    rank = end.unsqueeze(2) - 1 - torch.arange(cluster_size, device=assigned.device)
    is_member = rank >= first.unsqueeze(2)
    return order.gather(1, rank.clamp(min=0).flatten(1)).view_as(rank), is_member


def causal_coreset_attention(
    query: Tensor, key: Tensor, value: Tensor, options: CausalCoresetOptions, *, scale: float, dropout_p: float = 0.0
) -> Tensor:
    """Causal attention to near keys exactly, and to all other keys through landmarks and what one of them misses.

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
    num_exact, block_size = options.num_exact, options.block_size
    first = query[:, :num_exact], key[:, :num_exact], value[:, :num_exact]
    exact = exact_attention(*first, is_causal=True, scale=scale, dropout_p=dropout_p)
    if query.shape[1] <= num_exact:
        return exact

    def some_heads(query: Tensor, key: Tensor, value: Tensor, *coreset: Tensor) -> Tensor:
        acc_dtype = accumulation_dtype(value.dtype)
        queries, keys, values = (x.to(acc_dtype).contiguous() for x in (query, key, value))
        return _epoch_attention(queries, keys, values, _Coreset(*coreset), options, scale, dropout_p).to(value.dtype)

    outs = [exact]
    with torch.autocast(query.device.type, enabled=False):
        for number, (start, end) in enumerate(epoch_bounds(query.shape[1], options)):
            plan = plan_epoch(key.detach(), number, (start, end), options, scale)
            tensors = query[:, start - block_size : end], key[:, :end], value[:, :end]
            coreset = _coreset(key, plan, options, scale)
            outs.append(chunked_over_heads(some_heads, *tensors, *coreset, step=max(1, _TOKENS // end)))
    return torch.cat(outs, 1)


class _Coreset(NamedTuple):
    """The coreset of an epoch.

    The exponents are logarithms to base 2: of K_cj of the keys, and of exp(scale <q, c>) of the queries, both times
    factors that cancel.

    Attributes:
        center: (BH, 1, D), the mean of the keys of the prefix.
        landmark: (BH, m, D).
        inverse: (BH, m, m), (K_cc + ridge I)^-1.
        least: (BH, m, 1), the least positive weights: those of the landmarks themselves.
        key_factor: (BH, m, D), whose product with keys, plus key_shift (BH, 1, m), is their exponents.
        key_shift: see `key_factor`.
        query_factor: (BH, m, D), the same for queries.
        query_shift: (BH, 1, m).
    """

    center: Tensor
    landmark: Tensor
    inverse: Tensor
    least: Tensor
    key_factor: Tensor
    key_shift: Tensor
    query_factor: Tensor
    query_shift: Tensor


def _coreset(key: Tensor, plan: Epoch, options: CausalCoresetOptions, scale: float) -> _Coreset:
    """The coreset of an epoch from the keys (BH, N, D)."""
    factor, center = options.temperature**2 * abs(scale), _center(key, plan.start - options.block_size)
    keys = key[:, plan.candidate] - center
    landmark = _means(keys, keys * factor**0.5, plan.cluster, take(keys, plan.draw))
    half = (0.5 * factor) * landmark.square().sum(2).unsqueeze(1)
    kernel = (factor * (landmark @ landmark.mT) - half - half.mT).clamp(max=0.0).exp()
    # The inverse is multiplied by large sums, so its rounding matters. In float64 it costs little.
    one = torch.eye(kernel.shape[1], dtype=torch.float64, device=key.device)
    lower, _ = torch.linalg.cholesky_ex(kernel.double() + options.ridge * one)
    inverse = torch.cholesky_inverse(lower).to(half.dtype).contiguous()
    # exp(<x_c, x_j> - |x_c|^2 / 2) is at most exp(|x_j|^2 / 2). A common factor keeps it finite, and cancels. For keys
    # that are longer than the landmarks there is a bound.
    reference = (half.detach().amax(2, keepdim=True) - REFERENCE).clamp(min=0.0)
    key_factor = landmark * (LOG2_E * factor)
    return _Coreset(
        center,
        landmark + center,
        inverse,
        torch.exp(half - reference).clamp(min=LEAST).mT,
        key_factor,
        -LOG2_E * (half + reference) - center @ key_factor.mT,
        landmark * (LOG2_E * scale),
        LOG2_E * (reference - half),
    )


class _Clusters(NamedTuple):
    """The keys of clusters, by landmark.

    Attributes:
        key: (BH, m, cluster_size, D).
        value: (BH, m, cluster_size, Dv).
        bias: (BH, m, cluster_size), the log of the share of each key that the landmark misses; -inf for no key.
    """

    key: Tensor
    value: Tensor
    bias: Tensor


class _Far(NamedTuple):
    """The far field of queries.

    Attributes:
        sums: (BH, n, Dv + 1), numerators and denominators relative to exp(exponent).
        positive: (BH, n), positive denominators of the prefix, likewise.
        exponent: (BH, n), no gradient.
        nearest: int64 (BH, n), the landmark that counts most.
    """

    sums: Tensor
    positive: Tensor
    exponent: Tensor
    nearest: Tensor


def _epoch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    coreset: _Coreset,
    options: CausalCoresetOptions,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """Output of the queries of an epoch, from tensors in the accumulation dtype.

    Args:
        query: (BH, block_size + L, D), all queries after the prefix; the first block is not an output.
        key: (BH, N, D), all keys up to the last query.
        value: (BH, N, Dv).
        coreset: the coreset of the epoch.
        options: see `CausalCoresetOptions`.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        (BH, L, Dv).
    """
    block_size, prefix, length = options.block_size, key.shape[1] - query.shape[1], query.shape[1] - options.block_size
    near = causal_block_partial(query, key[:, prefix:], value[:, prefix:], block_size, scale=scale, dropout_p=dropout_p)
    at_a_time = ceil_div(_ROWS, len(query)) if can_reuse_buffers(query, key, value, *coreset) else key.shape[1]
    rows = ceil_div(at_a_time, block_size) * block_size
    sums, nearest = key.new_zeros(()), []
    for keys, values in zip(key[:, :prefix].split(rows, 1), value[:, :prefix].split(rows, 1), strict=True):
        exponents = _product(keys, coreset.key_factor, coreset.key_shift)
        if options.cluster_size:
            nearest.append(_argmax(exponents.detach())[1])
        sums = sums + _exp2(exponents).mT @ _with_ones(values)
    clusters = None
    if options.cluster_size:
        clusters = _clusters(key, value, torch.cat(nearest, 1), coreset, options, scale)
    # Without running sums: the denominators of positive weights.
    safe, outs = torch.maximum(coreset.inverse @ sums[..., -1:], coreset.least), []
    for first in range(0, length, rows):
        some = slice(first, min(first + rows, length))
        queries = query[:, block_size:][:, some]
        blocks = pad_to_blocks(queries, block_size)
        shape = blocks.shape[1:3]
        # The block before that of a query, to which it attends exactly, counts from the next block on.
        own = slice(prefix + first, prefix + first + shape[0] * shape[1])
        features = _exp2(_product(key[:, own], coreset.key_factor, coreset.key_shift)).unflatten(1, shape)
        added = features.mT @ _with_ones(value[:, own]).unflatten(1, shape)
        before = torch.cat((sums.unsqueeze(1), added[:, :-1]), 1).cumsum(1)
        sums = before[:, -1] + added[:, -1]
        far = _far_field(blocks, before, safe, coreset, scale, dropout_p)
        far = _Far(*(x[:, : queries.shape[1]] for x in far))
        parts = [Partial(near.out[:, some], near.lse[:, some])]
        if clusters is not None:
            parts.append(_cluster_partial(queries, far.nearest, clusters, scale, dropout_p))
        outs.append(_add_far(parts, far, value[:, :prefix]))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def _with_ones(value: Tensor) -> Tensor:
    """The values (BH, N, Dv) and a column of ones, whose sums are the denominators."""
    return torch.cat((value, value.new_ones(1, 1, 1).expand(*value.shape[:2], 1)), 2)


def _exp2(exponents: Tensor) -> Tensor:
    """K_cj from the exponents of keys, times a factor per head, bounded."""
    return exponents.clamp(max=LOG2_E * LARGEST).exp2_()


def _clusters(
    key: Tensor, value: Tensor, nearest: Tensor, coreset: _Coreset, options: CausalCoresetOptions, scale: float
) -> _Clusters:
    """The clusters of the keys of a prefix, from the landmark of each, int64 (BH, P)."""
    member, is_member = _members(nearest, coreset.landmark.shape[1], options.cluster_size)
    keys, values = take(key, member), take(value, member)
    distance = (keys - coreset.landmark.unsqueeze(2)).square().sum(3)
    missed = -torch.expm1(-(options.temperature**2) * abs(scale) * distance)
    return _Clusters(keys, values, missed.clamp(min=LEAST_MISSED).log().masked_fill(~is_member, -torch.inf))


def _far_field(query: Tensor, sums: Tensor, safe: Tensor, coreset: _Coreset, scale: float, dropout_p: float) -> _Far:
    """The far field of blocks of queries.

    Args:
        query: (BH, T, block_size, D).
        sums: (BH, T, m, Dv + 1), the sums of K_cj [v_j, 1] over the far keys of each block.
        safe: (BH, m, 1), positive weights of the landmarks.
        coreset: the coreset.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        `_Far` of n = T * block_size queries.
    """
    queries = query.flatten(1, 2)
    exponents = _product(queries, coreset.query_factor, coreset.query_shift)
    # The largest exponent up to rounding: what is subtracted cancels.
    row_max, nearest = _argmax(exponents.detach())
    basis = (exponents - row_max.unsqueeze(2)).exp2_()
    weights = _product(basis, coreset.inverse).unflatten(1, query.shape[1:3])
    if dropout_p > 0.0:
        # Dropout drops weights in the numerators only, as in softmax attention.
        numerators, denominators = sums.split((sums.shape[3] - 1, 1), 3)
        far = torch.cat((dropout(weights, dropout_p) @ numerators, weights @ denominators), 3)
    else:
        far = weights @ sums
    exponent = row_max / LOG2_E + scale * (queries @ coreset.center.mT).squeeze(2)
    return _Far(far.flatten(1, 2), (basis @ safe).squeeze(2), exponent, nearest)


def _cluster_partial(query: Tensor, nearest: Tensor, clusters: _Clusters, scale: float, dropout_p: float) -> Partial:
    """Attention of queries (BH, n, D) to the clusters of their landmarks, int64 (BH, n)."""
    (length, num_clusters), device = (query.shape[1], clusters.bias.shape[1]), query.device
    slots = 1 << (length // num_clusters).bit_length()
    slots = min(max(slots, _FEWEST_SLOTS), _MOST_SLOTS)
    # All queries of a block of slots have the same cluster.
    slot, cluster = group_by_block(nearest, num_clusters, slots)
    if len(slot) == 1 and can_reuse_buffers(query, *clusters):
        # Without the empty blocks at the end. With several heads this could move the matrices of the later ones in
        # memory, and thus change their rounding, depending on later tokens.
        cluster = cluster[:, : int(slot.max()) // slots + 1]
    # An empty slot has the first query.
    index = torch.zeros_like(cluster).repeat_interleave(slots, 1)
    index = index.scatter(1, slot, torch.arange(length, device=device).expand_as(slot))
    queries = take(query, index).unflatten(1, (-1, slots))
    keys, values = (take(x.flatten(2), cluster).unflatten(2, x.shape[2:]) for x in clusters[:2])
    bias = take(clusters.bias, cluster).unsqueeze(2)
    part = partial_attention(queries, keys, values, bias, scale=scale, dropout_p=dropout_p)
    return Partial(take(part.out.flatten(1, 2), slot), part.lse.flatten(1, 2).gather(1, slot))


def _add_far(parts: list[Partial], far: _Far, value: Tensor) -> Tensor:
    """The output of queries from exact partials and the far field: (BH, n, Dv). `value` is that of the prefix."""
    # One of the two terms of the positive denominator is about 1.
    largest = far.exponent + far.positive.log()
    for part in parts:
        largest = torch.maximum(largest, part.lse)
    largest = largest.detach()
    exact = [torch.exp(part.lse - largest) for part in parts]
    of_far = torch.exp(far.exponent - largest)
    of_exact = exact[0] if len(exact) == 1 else exact[0] + exact[1]
    denominator, bound = of_exact + of_far * far.sums[..., -1], of_exact + of_far * far.positive
    # Rounding and the approximation can make a denominator too small. Then the far field is the mean of the prefix.
    is_safe = denominator > SAFE * bound
    numerator = far.sums[..., :-1]
    if torch.compiler.is_compiling() or not bool(is_safe.all()):
        mean = far.positive.unsqueeze(2) * value.mean(1, keepdim=True)
        numerator = torch.where(is_safe.unsqueeze(2), numerator, mean)
        denominator = torch.where(is_safe, denominator, bound)
    out = numerator * (of_far / denominator).unsqueeze(2)
    for part, weight in zip(parts, exact, strict=True):
        out = torch.addcmul(out, part.out, (weight / denominator).unsqueeze(2))
    return out
