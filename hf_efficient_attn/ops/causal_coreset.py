"""Exact near keys and a weighted coreset of all earlier keys, in the strictly causal form.

The positions after the first `num_exact` are cut into epochs, whose lengths grow with the position. The prefix of an
epoch is all keys up to one block before its start. From the prefix alone come the center of the keys, m pivots S by
randomized pivoted Cholesky, and clusters of keys. All queries of the epoch use them, so no choice depends on later
tokens, and the output does not even depend on the length of the sequence. A query attends to

- its own block and the block before it, exactly;
- all other keys through the pivots. With the kernel exp(t^2 scale <k_i, k_j>) the weight exp(scale <q, k_j>) becomes
  sum_S exp(scale <q, k_S>) (K_SS + ridge I)^-1 K_Sj (Nystrom). Numerators and denominators are sums over j, so each
  block adds its own keys to running sums of K_Sj [v_j, 1]. This is causal linear attention (Katharopoulos et al. 2020)
  whose features are adapted to the data;
- the keys of one cluster of the prefix with what the pivots miss of them: the cluster whose centroid has the largest
  product with the query. Heads that copy a passage attend to a few keys far back, which no small coreset can
  represent. The Nystrom approximation projects a key of norm 1 (of the kernel) to one of norm rho_j <= 1, with
  rho_j = K_jS (K_SS + ridge I)^-1 K_Sj. So the key is added with the weight (1 - rho_j) exp(scale <q, k_j>).

The cost is O(m) per query and, because the epochs grow geometrically, O(m) per key. On the CPU queries and keys are
processed as many at a time as fit the cache.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout, normalize

from hf_efficient_attn.ops.blocks import can_reuse_buffers, ceil_div, chunked_over_heads, pad_to_blocks, take
from hf_efficient_attn.ops.causal import causal_block_partial, group_by_block
from hf_efficient_attn.ops.coreset import choose_pivots
from hf_efficient_attn.ops.exact import exact_attention
from hf_efficient_attn.ops.partial import LOG2_E, Partial, accumulation_dtype, merge, partial_attention

# Keys of the prefix, evenly spaced, from which pivots and centroids are computed.
_CANDIDATES = 1024
# Keys of a cluster on average, while there are fewer clusters than pivots.
_KEYS_PER_CLUSTER = 4
# Steps of k-means. In a head that copies, .49 / .83 / .87 of the queries find their key with 0 / 1 / 2 steps.
_KMEANS_STEPS = 2
# Tokens of some heads that are processed at a time on the CPU, and those whose products with all pivots are.
_TOKENS, _ROWS = 1 << 15, 1024
# The most and the fewest queries with the same cluster that are processed together.
_MOST_SLOTS, _FEWEST_SLOTS = 16, 4
# Bounds of exponents: sums of e^40 times values up to 1e4 stay finite in float32.
REFERENCE, LARGEST = 30.0, 40.0
# The least weight of a pivot, relative to the largest. The gradient divides by a denominator of about this size.
LEAST = 1e-12
# The least share of a key of a cluster that the pivots miss: rounding.
LEAST_MISSED = 1e-6
# A denominator below this share of a positive estimate of it is not trusted.
SAFE = 0.1


class CausalCoresetOptions(NamedTuple):
    """Options of `causal_coreset_attention`.

    Attributes:
        num_exact: the first positions, which are computed exactly in sequences of any length; more than `block_size`.
        block_size: tokens of a block. A query attends to its own block and the block before it exactly.
        num_samples: m, the number of pivots.
        cluster_size: the largest number of keys of a cluster, the most recent ones; 0 for no clusters.
        temperature: t. The pivots are chosen and weighted with the kernel exp(t^2 scale <k_i, k_j>).
        ridge: positive, relative to the unit diagonal of K_SS.
        seed: seed of the pivots.
        batch: B, the number of sequences. All use the same random numbers.
    """

    num_exact: int
    block_size: int
    num_samples: int
    cluster_size: int
    temperature: float = 0.75
    ridge: float = 1e-3
    seed: int | Tensor = 0
    batch: int = 1


class Epoch(NamedTuple):
    """The choices for the queries from `start` to `end` - 1. Positions are counted from the start of the sequence.

    Attributes:
        start: position of the first query; `start` - block_size is the end of the prefix.
        end: position after the last query.
        pivot: int64 (BH, m), positions of the pivots.
        clusters: the clusters, or None.
    """

    start: int
    end: int
    pivot: Tensor
    clusters: "Clusters | None"


class Clusters(NamedTuple):
    """The clusters of the keys of a prefix, and the cluster of each query of the epoch.

    Attributes:
        member: int64 (BH, C, cluster_size), positions of the keys of each cluster.
        is_member: bool (BH, C, cluster_size), False where a cluster has fewer keys.
        slot: int64 (BH, end - start), the place of each query among the queries that are sorted by cluster.
        slots: number of slots of a block. All queries of a block have the same cluster.
        cluster: int64 (BH, T), the cluster of each block of slots.
    """

    member: Tensor
    is_member: Tensor
    slot: Tensor
    slots: int
    cluster: Tensor


def split_columns(columns: int) -> dict[str, int]:
    """Distribute a budget of keys per query: the sizes in `CausalCoresetOptions`.

    Half goes to the near field, a sixteenth to a cluster and the rest to pivots. The first queries, which are
    exact, attend to fewer keys on average.
    """
    block_size, cluster_size = max(1, columns // 4), columns // 16
    return {
        "num_exact": max(3 * columns // 2, block_size + 1),
        "block_size": block_size,
        "num_samples": max(1, columns - 2 * block_size - cluster_size),
        "cluster_size": cluster_size,
    }


def epoch_bounds(length: int, options: CausalCoresetOptions) -> Iterator[tuple[int, int, int]]:
    """Start and end of the epochs of a sequence, and their end in a longer sequence.

    After `num_exact` positions the first three epochs are about 1/3, 2/3 and 2/3 times as long. The later ones double
    the position.
    """
    start, block_size = options.num_exact, options.block_size
    for step in itertools.chain((start // 3, 2 * start // 3, 2 * start // 3), itertools.repeat(0)):
        if start >= length:
            return
        end = start + max(1, (step or start) // block_size) * block_size
        yield start, min(end, length), end
        start = end


def choose_prefix_pivots(key: Tensor, number: int, prefix: int, options: CausalCoresetOptions, scale: float) -> Tensor:
    """The pivots of an epoch: positions (BH, m). No gradient.

    Args:
        key: (BH, N, D).
        number: the number of the epoch, which distinguishes its random numbers.
        prefix: number of keys of the prefix.
        options: see `CausalCoresetOptions`.
        scale: factor of the scores.
    """
    with torch.no_grad():
        candidates = _candidates(prefix, key.device)
        points = key[:, candidates].to(accumulation_dtype(key.dtype))
        points = (points - _center(key, prefix)) * (options.temperature * abs(scale) ** 0.5)
        seed = torch.as_tensor(options.seed, device=key.device) + number
        count = min(options.num_samples, len(candidates))
        return candidates[choose_pivots(points, None, count, seed=seed, batch=options.batch).candidate]


def toward_keys(query: Tensor, scale: float) -> Tensor:
    """Queries whose products with keys are largest where their scores are."""
    return query if scale > 0 else -query


def _candidates(prefix: int, device: torch.device) -> Tensor:
    count = min(prefix, _CANDIDATES)
    return torch.arange(count, device=device) * prefix // count


def _center(key: Tensor, prefix: int) -> Tensor:
    """Mean of the keys of the prefix, (BH, 1, D) in the accumulation dtype."""
    return key[:, :prefix].mean(1, keepdim=True, dtype=accumulation_dtype(key.dtype))


def plan_epoch(
    query: Tensor, key: Tensor, pivot: Tensor, bounds: tuple[int, int, int], options: CausalCoresetOptions
) -> Epoch:
    """All choices of an epoch, from tensors in the accumulation dtype. No gradient.

    Args:
        query: (BH, N, D), from `toward_keys`.
        key: (BH, N, D).
        pivot: int64 (BH, m), from `choose_prefix_pivots`.
        bounds: the epoch, from `epoch_bounds`.
        options: see `CausalCoresetOptions`.
    """
    (start, end, full_end), prefix = bounds, bounds[0] - options.block_size
    if not options.cluster_size:
        return Epoch(start, end, pivot, None)
    with torch.no_grad():
        center = _center(key, prefix)
        num_clusters = min(pivot.shape[1], max(1, prefix // _KEYS_PER_CLUSTER))
        candidates = take(key, _candidates(prefix, key.device).expand(len(key), -1)) - center
        centroids = _centroids(candidates, take(key, pivot[:, :num_clusters]) - center)
        members = _members(_nearest(key[:, :prefix], centroids, center), num_clusters, options.cluster_size)
        slots = 1 << ((full_end - start) // num_clusters).bit_length()
        slots = min(max(slots, _FEWEST_SLOTS), _MOST_SLOTS)
        slot, cluster = group_by_block(_nearest(query[:, start:end], centroids), num_clusters, slots)
        if len(slot) == 1 and slot.device.type == "cpu" and not torch.compiler.is_compiling():
            # Without the empty blocks at the end. With several heads this could move the matrices of the later ones in
            # memory, and thus change their rounding, depending on later tokens.
            cluster = cluster[:, : int(slot.max()) // slots + 1]
        return Epoch(start, end, pivot, Clusters(*members, slot, slots, cluster))


def _nearest(x: Tensor, centroids: Tensor, center: Tensor | None = None) -> Tensor:
    """For each x - center (BH, N, D) the index of the centroid (BH, C, D) with the largest product: int64 (BH, N)."""
    shift = None if center is None else -(center @ centroids.mT)
    parts = [_argmax(_product(part, centroids, shift)) for part in x.split(_rows_at_a_time(x), 1)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _rows_at_a_time(*tensors: Tensor) -> int:
    """How many queries or keys of all heads of the tensors (BH, N, D) are processed at a time."""
    batch_heads, length, _ = tensors[0].shape
    return ceil_div(_ROWS, batch_heads) if can_reuse_buffers(*tensors) else max(1, length)


def _product(x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product x @ y^T + bias: x (BH, M, D), y (BH, K, D), bias (BH, 1, K) or None -> (BH, M, K)."""
    return x @ y.mT if bias is None else torch.baddbmm(bias, x, y.mT)


def _argmax(x: Tensor) -> Tensor:
    """The index of the maximum of each row, up to rounding of the last bits: x (BH, N, C), overwritten, int64 (BH, N).

    The index replaces the last bits of the numbers, so that the maximum contains it. On the CPU this takes a third of
    the time of `argmax`.
    """
    number = torch.int64 if x.dtype == torch.float64 else torch.int32
    mask = (1 << (x.shape[2] - 1).bit_length()) - 1
    x.view(number).bitwise_and_(~mask).bitwise_or_(torch.arange(x.shape[2], dtype=number, device=x.device))
    return x.amax(2).view(number).bitwise_and(mask).long()


def _centroids(keys: Tensor, centroids: Tensor) -> Tensor:
    """Spherical k-means of keys (BH, N, D) from given centroids: unit vectors (BH, C, D)."""
    directions = normalize(keys, dim=2)
    for _ in range(_KMEANS_STEPS):
        nearest = _nearest(directions, centroids).unsqueeze(2)
        # A product, because sums by index are not deterministic on an accelerator.
        one_hot = directions.new_zeros(*nearest.shape[:2], centroids.shape[1]).scatter_(2, nearest, 1.0)
        sums = one_hot.mT @ directions
        centroids = normalize(torch.where((sums != 0).any(2, keepdim=True), sums, centroids), dim=2)
    return centroids


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
    """Causal attention to near keys exactly, and to all other keys through a coreset and what it misses of a cluster.

    Gradients flow through keys, values and weights, with pivots and clusters fixed.

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
    num_exact = options.num_exact
    first = query[:, :num_exact], key[:, :num_exact], value[:, :num_exact]
    exact = exact_attention(*first, is_causal=True, scale=scale, dropout_p=dropout_p)
    if query.shape[1] <= num_exact:
        return exact
    bounds, acc_dtype = list(epoch_bounds(query.shape[1], options)), accumulation_dtype(value.dtype)
    prefixes = [start - options.block_size for start, _, _ in bounds]

    def some_heads(*tensors: Tensor) -> Tensor:
        query, key, value = (x.to(acc_dtype) for x in tensors[:3])
        targets = torch.cat((value, value.new_ones(1, 1, 1).expand(*value.shape[:2], 1)), 2)
        outs = []
        for pivot, epoch in zip(tensors[3:], bounds, strict=True):
            plan = plan_epoch(toward_keys(query.detach(), scale), key.detach(), pivot, epoch, options)
            outs.append(_epoch_attention(query, key, targets, plan, options, scale, dropout_p))
        return torch.cat(outs, 1)

    step = max(1, _TOKENS // query.shape[1])
    with torch.autocast(query.device.type, enabled=False):
        pivots = [choose_prefix_pivots(key.detach(), i, prefix, options, scale) for i, prefix in enumerate(prefixes)]
        out = chunked_over_heads(some_heads, query, key, value, *pivots, step=step)
    return torch.cat((exact, out.to(exact.dtype)), 1)


class _Coreset(NamedTuple):
    """The coreset of an epoch.

    Attributes:
        center: (BH, 1, D), the mean of the keys of the prefix.
        pivot: (BH, m, D), the pivots minus the center.
        half: (BH, 1, m), half the squared norm of each pivot in the metric of the kernel.
        reference: (BH, 1, 1), what is subtracted from the exponents of K_Sj and added to those of queries.
        inverse: (BH, m, m), (K_SS + ridge I)^-1.
        factor: t^2 scale.
    """

    center: Tensor
    pivot: Tensor
    half: Tensor
    reference: Tensor
    inverse: Tensor
    factor: float


def _coreset(key: Tensor, plan: Epoch, options: CausalCoresetOptions, scale: float) -> _Coreset:
    """The coreset of an epoch from the keys (BH, N, D)."""
    factor, center = options.temperature**2 * abs(scale), _center(key, plan.start - options.block_size)
    pivot = take(key, plan.pivot) - center
    half = (0.5 * factor) * pivot.square().sum(2).unsqueeze(1)
    kernel = (factor * (pivot @ pivot.mT) - half - half.mT).clamp(max=0.0).exp()
    # The inverse is multiplied by large sums, so its rounding matters. In float64 it costs little.
    one = torch.eye(kernel.shape[1], dtype=torch.float64, device=key.device)
    lower, _ = torch.linalg.cholesky_ex(kernel.double() + options.ridge * one)
    inverse = torch.cholesky_inverse(lower).to(key.dtype)
    # exp(<x_S, x_j> - |x_S|^2 / 2) is at most exp(|x_j|^2 / 2). A common factor keeps it finite, and cancels. The
    # pivots are among the longest keys; for longer ones there is a bound.
    reference = (half.detach().amax(2, keepdim=True) - REFERENCE).clamp(min=0.0)
    return _Coreset(center, pivot, half, reference, inverse, factor)


def _exponents(key: Tensor, coreset: _Coreset) -> Tensor:
    """The logarithms to base 2 of K_jS of keys (BH, n, D), times a factor per head and key: (BH, n, m)."""
    pivot = coreset.pivot * (LOG2_E * coreset.factor)
    shift = -LOG2_E * (coreset.half + coreset.reference) - coreset.center @ pivot.mT
    return _product(key, pivot, shift)


def _rows(exponents: Tensor) -> Tensor:
    """K_jS from `_exponents`, times a factor per head, bounded."""
    return exponents.clamp(max=LOG2_E * LARGEST).exp2_()


def _missed(key: Tensor, exponents: Tensor, coreset: _Coreset) -> Tensor:
    """The log of the share of keys (BH, n, D) that the nearest pivot misses, (BH, n)."""
    half = (0.5 * coreset.factor) * (key - coreset.center).square().sum(2)
    kernel = exponents.amax(2) + LOG2_E * (coreset.reference.squeeze(2) - half)
    return (1.0 - (2.0 * kernel.clamp(max=0.0)).exp2()).clamp(min=LEAST_MISSED).log()


def _epoch_attention(
    query: Tensor,
    key: Tensor,
    targets: Tensor,
    plan: Epoch,
    options: CausalCoresetOptions,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """Output of the queries of an epoch.

    Args:
        query: (BH, N, D) in the accumulation dtype, all queries.
        key: (BH, N, D).
        targets: (BH, N, Dv + 1), the values and a column of ones.
        plan: the choices of the epoch.
        options: see `CausalCoresetOptions`.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        (BH, L, Dv).
    """
    start, end, block_size = plan.start, plan.end, options.block_size
    prefix, coreset, value = start - block_size, _coreset(key, plan, options, scale), targets[..., :-1]
    near = query[:, prefix:end], key[:, prefix:end], value[:, prefix:end]
    parts = [causal_block_partial(*near, block_size, scale=scale, dropout_p=dropout_p)]
    query = query[:, start:end]
    rows = ceil_div(_rows_at_a_time(query, key, targets), block_size) * block_size
    sums, missed = key.new_zeros(()), []
    for keys, own in zip(key[:, :prefix].split(rows, 1), targets[:, :prefix].split(rows, 1), strict=True):
        exponents = _exponents(keys, coreset)
        missed.append(_missed(keys, exponents, coreset))
        sums = sums + _rows(exponents).mT @ own
    if plan.clusters is not None:
        known = key[:, :prefix], value[:, :prefix], torch.cat(missed, 1)
        parts.append(_cluster_partial(query, *known, plan.clusters, scale, dropout_p))
    exact = merge(*parts)
    # Without running sums: the denominators of positive weights, which are at least those of the pivots themselves.
    least = torch.exp(coreset.half - coreset.reference).clamp(min=LEAST).mT
    safe = torch.maximum(coreset.inverse @ sums[..., -1:], least)
    mean, outs = value[:, :prefix].mean(1, keepdim=True), []
    for first in range(0, end - start, rows):
        some = slice(first, first + rows)
        queries = pad_to_blocks(query[:, some], block_size)
        num_blocks, length = queries.shape[1], min(rows, end - start - first)
        # The block before that of a query, to which it attends exactly, counts from the next block on.
        own = slice(prefix + first, prefix + first + num_blocks * block_size)
        blocks = _rows(_exponents(key[:, own], coreset)).unflatten(1, (num_blocks, block_size))
        added = blocks.mT @ targets[:, own].unflatten(1, (num_blocks, block_size))
        before = torch.cat((sums.unsqueeze(1), added[:, :-1]), 1).cumsum(1)
        sums = before[:, -1] + added[:, -1]
        far = _far_sums(queries, before, safe, coreset, scale, dropout_p)
        sums_of_query, positive, row_max = (x[:, :length] for x in far)
        out, lse = exact.out[:, some], exact.lse[:, some].unsqueeze(2)
        # One of the two terms of the positive denominator is 1.
        largest = torch.maximum(lse, row_max + positive.log()).detach()
        of_exact, of_far = torch.exp(lse - largest), torch.exp(row_max - largest)
        # Rounding and the approximation can make a denominator too small. Then the far field is the mean of the prefix.
        denominator, bound = of_exact + of_far * sums_of_query[..., -1:], of_exact + of_far * positive
        is_safe = denominator > SAFE * bound
        numerator = of_exact * out + of_far * torch.where(is_safe, sums_of_query[..., :-1], positive * mean)
        outs.append(numerator / torch.where(is_safe, denominator, bound))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def _far_sums(
    query: Tensor, sums: Tensor, safe: Tensor, coreset: _Coreset, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The far field of blocks of queries.

    Args:
        query: (BH, T, block_size, D).
        sums: (BH, T, m, Dv + 1), the sums of K_Sj [v_j, 1] over the far keys of each block.
        safe: (BH, m, 1), positive weights of the pivots.
        coreset: the coreset.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        Numerators and denominators (BH, T * block_size, Dv + 1), positive denominators (BH, T * block_size, 1), and the
        log of what all of them are relative to, likewise.
    """
    queries = query.flatten(1, 2)
    shift = LOG2_E * (coreset.reference - coreset.half)
    logits = _product(queries, coreset.pivot * (scale * LOG2_E), shift)
    row_max = logits.detach().amax(2, keepdim=True)
    basis = (logits - row_max).exp2_()
    weights = (basis @ coreset.inverse).unflatten(1, query.shape[1:3])
    if dropout_p > 0.0:
        # Dropout drops weights in the numerators only, as in softmax attention.
        numerators, denominators = sums.split((sums.shape[3] - 1, 1), 3)
        far = torch.cat((dropout(weights, dropout_p) @ numerators, weights @ denominators), 3)
    else:
        far = weights @ sums
    return far.flatten(1, 2), basis @ safe, row_max / LOG2_E + scale * (queries @ coreset.center.mT)


def _cluster_partial(
    query: Tensor, key: Tensor, value: Tensor, missed: Tensor, clusters: Clusters, scale: float, dropout_p: float
) -> Partial:
    """Attention of queries (BH, L, D) to the keys (BH, P, D) of their clusters, with log-weights `missed` (BH, P)."""
    keys, values = take(key, clusters.member), take(value, clusters.member)
    bias = missed.gather(1, clusters.member.flatten(1)).view(clusters.member.shape)
    bias = bias.masked_fill(~clusters.is_member, -torch.inf)
    # The queries of each block of slots, and the keys of its cluster. An empty slot has the first query.
    length, slots = query.shape[1], clusters.slots
    index = torch.zeros_like(clusters.cluster).repeat_interleave(slots, 1)
    index = index.scatter(1, clusters.slot, torch.arange(length, device=query.device).expand_as(clusters.slot))
    queries = take(query, index).unflatten(1, (-1, slots))
    keys, values = (take(x.flatten(2), clusters.cluster).unflatten(2, x.shape[2:]) for x in (keys, values))
    part = partial_attention(
        queries, keys, values, take(bias, clusters.cluster).unsqueeze(2), scale=scale, dropout_p=dropout_p
    )
    return Partial(take(part.out.flatten(1, 2), clusters.slot), part.lse.flatten(1, 2).gather(1, clusters.slot))
