"""Exact near keys and a weighted coreset of all earlier keys, in the strictly causal form.

The positions after the first `num_exact` are cut into epochs, whose lengths grow with the position. The prefix of an
epoch is all keys up to one block before its start. From the prefix alone come the center of the keys, m pivots S by
randomized pivoted Cholesky, and clusters of keys. All queries of the epoch use them, so no choice depends on later
tokens, and the output does not even depend on the length of the sequence. A query attends to

- its own block and the block before it, exactly;
- the keys of one cluster of the prefix, exactly: the cluster whose centroid has the largest product with the query.
  Heads that copy a passage attend to a few keys far back, which no small coreset can represent;
- outliers among the keys between the prefix and the block before its own, exactly: those with the largest norms. A
  coreset of the prefix represents later keys well unless they are unlike all earlier ones;
- all other keys through the pivots. With the kernel exp(t^2 scale <k_i, k_j>) the weight exp(scale <q, k_j>) becomes
  sum_S exp(scale <q, k_S>) (K_SS + ridge I)^-1 K_Sj (Nystrom). Numerators and denominators are sums over j, so each
  block adds its own keys to running sums of K_Sj [v_j, 1]. This is causal linear attention (Katharopoulos et al. 2020)
  whose features are adapted to the data. Keys that are attended to exactly are subtracted.

The cost is O(m) per query and, because the epochs grow geometrically, O(m) per key.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad

from hf_efficient_attn.ops.blocks import ceil_div, chunked_over_heads, take
from hf_efficient_attn.ops.causal import causal_block_partial, group_by_block
from hf_efficient_attn.ops.coreset import choose_pivots
from hf_efficient_attn.ops.exact import exact_attention, mask_bias
from hf_efficient_attn.ops.partial import LOG2_E, Partial, accumulation_dtype, exp_, merge, partial_attention

# Keys of the prefix, evenly spaced, from which pivots and centroids are computed.
_CANDIDATES = 1024
# Epochs grow by a half up to this many times `num_exact`, where freshness matters more than cost, and then double.
_SHORT = 8
# Groups of blocks of an epoch. Each group has its own outliers.
_GROUPS = 8
# Keys of a cluster on average, while there are fewer clusters than pivots.
_KEYS_PER_CLUSTER = 4
# Steps of k-means. In a head that copies, .49 / .83 / .87 of the queries find their key with 0 / 1 / 2 steps.
_KMEANS_STEPS = 2
# Numbers of the temporaries of some heads that are processed at a time on the CPU.
_CHUNK_NUMEL = 1 << 20
# Keys or queries whose products with all centroids are computed at a time.
_ROWS = 1024
# The most and the fewest queries with the same cluster that are processed together.
_MOST_SLOTS, _FEWEST_SLOTS = 16, 4
# Bounds of exponents: sums of e^40 times values up to 1e4 stay finite in float32.
_REFERENCE, _LARGEST = 30.0, 40.0
# The least weight of a pivot, so that no denominator is 0.
_LEAST = 1e-30
# A denominator below this share of a positive estimate of it is not trusted.
_SAFE = 0.1


class CausalCoresetOptions(NamedTuple):
    """Options of `causal_coreset_attention`.

    Attributes:
        num_exact: the first positions, which are computed exactly in sequences of any length; more than `block_size`.
        block_size: tokens of a block. A query attends to its own block and the block before it exactly.
        num_samples: m, the number of pivots.
        cluster_size: the largest number of keys of a cluster, the most recent ones; 0 for no clusters.
        num_outliers: outliers that a query attends to; 0 for none.
        temperature: t. The pivots are chosen and weighted with the kernel exp(t^2 scale <k_i, k_j>).
        ridge: positive, relative to the unit diagonal of K_SS.
        seed: seed of the pivots.
        batch: B, the number of sequences. All use the same random numbers.
    """

    num_exact: int
    block_size: int
    num_samples: int
    cluster_size: int
    num_outliers: int
    temperature: float = 0.75
    ridge: float = 1e-3
    seed: int | Tensor = 0
    batch: int = 1


class Epoch(NamedTuple):
    """The choices for the queries from `start` to `end` - 1. Positions are counted from the start of the sequence.

    Attributes:
        start: position of the first query; `start` - block_size is the end of the prefix.
        end: position after the last query.
        group: queries that share their outliers.
        pivot: int64 (BH, m), positions of the pivots.
        member: int64 (BH, C, cluster_size), positions of the keys of each cluster.
        is_member: bool (BH, C, cluster_size), False where a cluster has fewer keys.
        slot: int64 (BH, end - start), the place of each query among the queries that are sorted by cluster.
        slots: number of slots of a block. All queries of a block have the same cluster.
        cluster: int64 (BH, T), the cluster of each block of slots.
        outlier: int64 (BH, G, num_outliers), positions of the outliers of each group.
        is_outlier: bool (BH, G, num_outliers), False where a group has fewer.
    """

    start: int
    end: int
    group: int
    pivot: Tensor
    member: Tensor
    is_member: Tensor
    slot: Tensor
    slots: int
    cluster: Tensor
    outlier: Tensor
    is_outlier: Tensor


def split_columns(columns: int) -> dict[str, int]:
    """Distribute a budget of keys per query: the sizes in `CausalCoresetOptions`.

    A quarter goes to the near field, an eighth to a cluster, a sixteenth to outliers and the rest to pivots.
    """
    block_size, cluster_size, num_outliers = max(1, columns // 8), columns // 8, columns // 16
    num_samples = max(1, columns - 2 * block_size - cluster_size - num_outliers)
    return {
        "num_exact": max(columns, block_size + 1),
        "block_size": block_size,
        "num_samples": num_samples,
        "cluster_size": cluster_size,
        "num_outliers": num_outliers,
    }


def epoch_bounds(length: int, options: CausalCoresetOptions) -> Iterator[tuple[int, int, int]]:
    """Start and end of the epochs of a sequence, and their end in a longer sequence."""
    start, block_size = options.num_exact, options.block_size
    while start < length:
        growth = start // 2 if start < _SHORT * options.num_exact else start
        step = max(options.num_exact // 2, growth)
        end = start + max(1, step // block_size) * block_size
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


def _toward_keys(query: Tensor, scale: float) -> Tensor:
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
        query: (BH, N, D), from `_toward_keys`.
        key: (BH, N, D).
        pivot: int64 (BH, m), from `choose_prefix_pivots`.
        bounds: the epoch, from `epoch_bounds`.
        options: see `CausalCoresetOptions`.
    """
    with torch.no_grad():
        (start, end, full_end), block_size = bounds, options.block_size
        prefix = start - block_size
        center = _center(key, prefix)
        group = ceil_div((full_end - start) // block_size, _GROUPS) * block_size
        outliers = _outliers(key[:, prefix:end] - center, ceil_div(end - start, group), group, options.num_outliers)
        outliers = torch.where(outliers[1], outliers[0] + prefix, 0), outliers[1]
        num_clusters = min(pivot.shape[1], max(1, prefix // _KEYS_PER_CLUSTER))
        candidates = key[:, _candidates(prefix, key.device)] - center
        centroids = _centroids(candidates, take(key, pivot[:, :num_clusters]) - center)
        members = _members(_nearest(key[:, :prefix], centroids, center), num_clusters, options.cluster_size)
        slots = 1 << ((full_end - start) // num_clusters).bit_length()
        slots = min(max(slots, _FEWEST_SLOTS), _MOST_SLOTS)
        slot, cluster = group_by_block(_nearest(query[:, start:end], centroids), num_clusters, slots)
        if len(slot) == 1 and slot.device.type == "cpu" and not torch.compiler.is_compiling():
            # Without the empty blocks at the end. With several heads this could move the matrices of the later ones in
            # memory, and thus change their rounding, depending on later tokens.
            cluster = cluster[:, : int(slot.max()) // slots + 1]
        return Epoch(start, end, group, pivot, *members, slot, slots, cluster, *outliers)


def _outliers(keys: Tensor, num_groups: int, group: int, count: int) -> tuple[Tensor, Tensor]:
    """The keys after the prefix with the largest norms before each group of queries, and which of them exist."""
    norms = keys[:, : max(1, (num_groups - 1) * group)].square().sum(-1)
    before = torch.arange(num_groups, device=keys.device)[:, None] * group
    known = torch.arange(norms.shape[1], device=keys.device) < before
    found = norms[:, None].masked_fill(~known, -torch.inf).topk(min(count, norms.shape[1]), dim=2)
    return found.indices, found.values > -torch.inf


def _nearest(x: Tensor, centroids: Tensor, center: Tensor | None = None) -> Tensor:
    """For each x - center (BH, N, D) the index of the centroid (BH, C, D) with the largest product: int64 (BH, N)."""
    shift = centroids.new_zeros(1, 1, 1) if center is None else -(center @ centroids.mT)
    # The products of some keys at a time stay in the cache.
    parts = [_argmax(torch.baddbmm(shift, part, centroids.mT)) for part in x.split(_ROWS, 1)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


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
    directions = torch.nn.functional.normalize(keys, dim=2)
    for _ in range(_KMEANS_STEPS):
        order, first, end = _sorted_by_cluster(_nearest(directions, centroids), centroids.shape[1])
        # Differences of running sums, because sums by index are not deterministic on an accelerator.
        sums = pad(take(directions, order).cumsum(1), (0, 0, 1, 0))
        sums = take(sums, end) - take(sums, first)
        centroids = torch.nn.functional.normalize(torch.where((end > first).unsqueeze(2), sums, centroids), dim=2)
    return centroids


def _sorted_by_cluster(assigned: Tensor, num_clusters: int) -> tuple[Tensor, Tensor, Tensor]:
    """The order (BH, N) of keys by cluster, and the ranks (BH, C) of the first key of a cluster and after its last."""
    order = assigned.argsort(dim=1, stable=True)
    clusters = torch.arange(num_clusters, device=assigned.device).expand(len(assigned), -1).contiguous()
    sorted_clusters = assigned.gather(1, order)
    first = torch.searchsorted(sorted_clusters, clusters)
    return order, first, torch.searchsorted(sorted_clusters, clusters, right=True)


def _members(assigned: Tensor, num_clusters: int, cluster_size: int) -> tuple[Tensor, Tensor]:
    """The last keys of each cluster and which of them exist, both (BH, C, cluster_size), for assigned (BH, N)."""
    order, first, end = _sorted_by_cluster(assigned, num_clusters)
    rank = end.unsqueeze(2) - 1 - torch.arange(cluster_size, device=assigned.device)
    is_member = rank >= first.unsqueeze(2)
    return order.gather(1, rank.clamp(min=0).flatten(1)).view_as(rank), is_member


def causal_coreset_attention(
    query: Tensor, key: Tensor, value: Tensor, options: CausalCoresetOptions, *, scale: float, dropout_p: float = 0.0
) -> Tensor:
    """Causal attention to near keys, one cluster and outliers exactly, and to all other keys through a coreset.

    Gradients flow through keys, values and weights, with pivots, clusters and outliers fixed.

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

    def near_field(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, lse = causal_block_partial(query, key, value, block_size, scale=scale, dropout_p=dropout_p)
        return torch.cat((out.to(lse.dtype), lse.unsqueeze(2)), 2)

    outs = [exact]
    with torch.autocast(query.device.type, enabled=False):
        shift = num_exact - block_size
        near = chunked_over_heads(near_field, query[:, shift:], key[:, shift:], value[:, shift:])
        ones = value.new_ones(1, 1, 1).expand(*value.shape[:2], 1)
        targets = torch.cat((value, ones), 2).to(accumulation_dtype(value.dtype))
        for number, bounds in enumerate(epoch_bounds(query.shape[1], options)):
            start, end, _ = bounds
            own_near = near[:, start - num_exact : end - num_exact]
            tensors = (query[:, :end], key[:, :end], targets[:, :end], own_near)
            pivot = choose_prefix_pivots(key.detach(), number, start - block_size, options, scale)

            def some_heads(*tensors: Tensor, bounds: tuple[int, int, int] = bounds) -> Tensor:
                query, key, targets, near = (x.to(accumulation_dtype(x.dtype)) for x in tensors[:-1])
                plan = plan_epoch(_toward_keys(query.detach(), scale), key.detach(), tensors[-1], bounds, options)
                part = Partial(near[..., :-1], near[..., -1])
                return _epoch_attention(query, key, targets, part, plan, options, scale, dropout_p)

            # The largest temporaries are those of the members of clusters.
            numel = options.num_samples * (end + options.cluster_size * (end - start) // _MOST_SLOTS)
            step = max(1, _CHUNK_NUMEL // numel)
            outs.append(chunked_over_heads(some_heads, *tensors, pivot, step=step).to(exact.dtype))
    return torch.cat(outs, 1)


class _Coreset(NamedTuple):
    """The coreset of an epoch.

    Attributes:
        center: (BH, 1, D), the mean of the keys of the prefix.
        pivot: (BH, m, D), the pivots minus the center.
        shift: (BH, 1, m), the log of the factor of each pivot in the weights of a query.
        inverse: (BH, m, m), (K_SS + ridge I)^-1.
        rows: (BH, N', m), K_jS of the keys before the last block of the epoch, times a factor per head.
    """

    center: Tensor
    pivot: Tensor
    shift: Tensor
    inverse: Tensor
    rows: Tensor


def _coreset(key: Tensor, plan: Epoch, options: CausalCoresetOptions, scale: float) -> _Coreset:
    """The coreset of an epoch from the keys (BH, N, D) before the last block of the epoch."""
    prefix, factor = plan.start - options.block_size, options.temperature**2 * abs(scale)
    center = _center(key, prefix)
    pivot = take(key, plan.pivot) - center
    half = (0.5 * factor) * pivot.square().sum(2, keepdim=True)
    kernel = exp_((factor * (pivot @ pivot.mT) - half - half.mT).clamp(max=0.0))
    # The inverse is multiplied by large sums, so its rounding matters. In float64 it costs little.
    one = torch.eye(kernel.shape[1], dtype=torch.float64, device=key.device)
    lower, _ = torch.linalg.cholesky_ex(kernel.double() + options.ridge * one)
    inverse = torch.cholesky_inverse(lower).to(key.dtype)
    # exp(<x_S, x_j> - |x_S|^2 / 2) is at most exp(|x_j|^2 / 2). A common factor keeps it finite, and cancels. The
    # pivots are among the longest keys; for longer ones there is a bound.
    reference = (half.detach().amax(1, keepdim=True) - _REFERENCE).clamp(min=0.0)
    shift = -LOG2_E * (half.mT + reference + factor * (center @ pivot.mT))
    rows = torch.baddbmm(shift, key, pivot.mT, alpha=LOG2_E * factor).clamp_(max=LOG2_E * _LARGEST).exp2_()
    return _Coreset(center, pivot, reference - half.mT, inverse, rows)


def _epoch_attention(
    query: Tensor,
    key: Tensor,
    targets: Tensor,
    near: Partial,
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
        near: the partial of the queries of the epoch and their near keys, (BH, L, .).
        plan: the choices of the epoch.
        options: see `CausalCoresetOptions`.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        (BH, L, Dv).
    """
    prefix, length, block_size = plan.start - options.block_size, plan.end - plan.start, options.block_size
    query, value = query[:, plan.start : plan.end], targets[..., :-1]
    known = prefix + (ceil_div(length, block_size) - 1) * block_size
    coreset = _coreset(key[:, :known], plan, options, scale)
    basis, weights, row_max = _query_weights(query, coreset, scale)
    base, sums = _running_sums(coreset.rows, targets[:, :known], prefix, block_size)
    far = _blocked_product(weights, sums, block_size)
    # Dropout drops weights in the numerators only, as in softmax attention.
    dropped = weights
    if dropout_p > 0.0:
        dropped = dropout(weights, dropout_p)
        far = torch.cat((_blocked_product(dropped, sums[..., :-1], block_size), far[..., -1:]), 2)

    # Attention to single keys replaces their share of the coreset.
    exact = [near]
    groups = [_outlier_groups(plan)] if options.num_outliers else []
    groups += [_cluster_groups(plan)] if options.cluster_size else []
    for query_of_slot, slot, index, exists in groups:
        own_query, own = (take(pad(x, (0, 0, 0, 1)), query_of_slot) for x in (query, weights))
        keys, values, rows = take(key, index), take(value, index), take(coreset.rows, index)
        bias = mask_bias(exists, query.dtype).unsqueeze(2)
        part = partial_attention(own_query, keys, values, bias, scale=scale, dropout_p=dropout_p)
        exact.append(Partial(take(part.out.flatten(1, 2), slot), part.lse.flatten(1, 2).gather(1, slot)))
        share = (own @ rows.mT).mul_(exists.unsqueeze(2))
        of_values = share
        if dropout_p > 0.0:
            own_dropped = take(pad(dropped, (0, 0, 0, 1)), query_of_slot)
            of_values = (own_dropped @ rows.mT).mul_(exists.unsqueeze(2))
        removed = torch.cat((of_values @ values, share.sum(3, keepdim=True)), 3)
        far = far - take(removed.flatten(1, 2), slot)

    out, lse = merge(*exact)
    # The log of the largest weight of a pivot, in terms of the keys before centering.
    row_max = row_max + scale * (query @ coreset.center.mT).squeeze(2)
    largest = torch.maximum(lse, row_max).detach()
    of_exact, of_far = torch.exp(lse - largest).unsqueeze(2), torch.exp(row_max - largest).unsqueeze(2)
    # Rounding and the approximation can make a denominator too small. Then the far field is the mean of the prefix,
    # with the denominator that follows from positive weights: at least that of the pivot itself.
    least = torch.exp(-coreset.shift.mT).clamp(min=_LEAST)
    positive = basis @ torch.maximum(coreset.inverse @ base[..., -1:], least)
    is_safe = of_exact + of_far * far[..., -1:] > _SAFE * (of_exact + of_far * positive)
    numerator = torch.where(is_safe, far[..., :-1], positive * value[:, :prefix].mean(1, keepdim=True))
    denominator = torch.where(is_safe, far[..., -1:], positive)
    return (of_exact * out + of_far * numerator) / (of_exact + of_far * denominator)


def _query_weights(query: Tensor, coreset: _Coreset, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """For queries (BH, L, D) exp(scale <q, k_S>) relative to the largest, times the inverse, and its log (BH, L)."""
    logits = torch.baddbmm(coreset.shift, query, coreset.pivot.mT, alpha=scale)
    row_max = logits.detach().amax(2)
    basis = exp_(logits - row_max.unsqueeze(2))
    return basis, basis @ coreset.inverse, row_max


def _running_sums(rows: Tensor, targets: Tensor, prefix: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Sums of K_Sj [v_j, 1] over the keys before each block of queries and the block before it.

    Args:
        rows: (BH, N', m), of the coreset.
        targets: (BH, N', Dv + 1), [v_j, 1].
        prefix: number of keys of the prefix.
        block_size: tokens of a block.

    Returns:
        The sum over the prefix (BH, m, Dv + 1), and the sums of each block of queries (BH, T, m, Dv + 1).
    """
    base = rows[:, :prefix].mT @ targets[:, :prefix]
    own, own_targets = (x[:, prefix:].unflatten(1, (-1, block_size)) for x in (rows, targets))
    return base, torch.cat((base.unsqueeze(1), own.mT @ own_targets), 1).cumsum_(1)


def _blocked_product(weights: Tensor, sums: Tensor, block_size: int) -> Tensor:
    """Multiply weights (BH, L, m) by the sums (BH, T, m, E) of their block: (BH, L, E)."""
    length, num_blocks = weights.shape[1], sums.shape[1]
    blocks = pad(weights, (0, 0, 0, num_blocks * block_size - length)).unflatten(1, (num_blocks, block_size))
    product: Tensor = blocks @ sums
    return product.flatten(1, 2)[:, :length]


def _outlier_groups(plan: Epoch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The queries of each group (BH, G, group), the slot of each query, and the outliers of each group, which exist."""
    length, (batch_heads, num_groups, _) = plan.slot.shape[1], plan.outlier.shape
    slots = torch.arange(num_groups * plan.group, device=plan.slot.device)
    queries = slots.clamp(max=length).view(num_groups, plan.group).expand(batch_heads, -1, -1)
    return queries, slots[:length].expand(batch_heads, -1), plan.outlier, plan.is_outlier


def _cluster_groups(plan: Epoch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The queries of each block of slots (BH, T, slots), the slot of each query, and the keys of its cluster."""
    length = plan.slot.shape[1]
    empty = torch.full_like(plan.cluster, length).repeat_interleave(plan.slots, 1)
    queries = empty.scatter(1, plan.slot, torch.arange(length, device=empty.device).expand_as(plan.slot))
    cluster = plan.cluster.unsqueeze(2).expand(-1, -1, plan.member.shape[2])
    index, exists = plan.member.gather(1, cluster), plan.is_member.gather(1, cluster)
    return queries.view(len(queries), -1, plan.slots), plan.slot, index, exists


def causal_coreset_naive(
    query: Tensor, key: Tensor, value: Tensor, options: CausalCoresetOptions, *, scale: float
) -> Tensor:
    """The readable form of `causal_coreset_attention`: a dense matrix of weights, with the same choices, in float64."""
    acc_dtype = accumulation_dtype(query.dtype)
    plans = []
    for number, bounds in enumerate(epoch_bounds(query.shape[1], options)):
        pivot = choose_prefix_pivots(key, number, bounds[0] - options.block_size, options, scale)
        plans.append(plan_epoch(_toward_keys(query.to(acc_dtype), scale), key.to(acc_dtype), pivot, bounds, options))
    query, key, value = query.double(), key.double(), value.double()
    targets = torch.cat((value, torch.ones_like(value[..., :1])), 2)
    position = torch.arange(query.shape[1], device=query.device)
    scores = scale * query @ key.mT
    scores = scores.masked_fill(position > position[:, None], -torch.inf)
    out = scores.softmax(-1) @ value
    for plan in plans:
        prefix, block_size = plan.start - options.block_size, options.block_size
        for a in range(len(query)):
            center = key[a, :prefix].mean(0)
            points = (key[a] - center) * (options.temperature * abs(scale) ** 0.5)
            pivot, half = points[plan.pivot[a]], points[plan.pivot[a]].square().sum(1) / 2
            kernel = torch.exp(-torch.cdist(pivot, pivot).square() / 2)
            reference = (half.max() - _REFERENCE).clamp(min=0.0)  # bounds exponents, and cancels
            rows = torch.exp((pivot @ points.mT - half[:, None] - reference).clamp(max=_LARGEST))  # K_Sj
            least = torch.exp(half - reference).clamp(min=_LEAST)
            log_factor = reference - half
            identity = torch.eye(len(kernel), dtype=kernel.dtype, device=kernel.device)
            inverse = torch.linalg.inv(kernel + options.ridge * identity)
            for i in range(plan.start, plan.end):
                block, group = (i - plan.start) // block_size, (i - plan.start) // plan.group
                is_exact = (position >= prefix + block * block_size) & (position <= i)
                is_exact[plan.outlier[a, group][plan.is_outlier[a, group]]] = True
                if options.cluster_size:
                    slot = int(plan.slot[a, i - plan.start])
                    cluster = int(plan.cluster[a, slot // plan.slots])
                    is_exact[plan.member[a, cluster][plan.is_member[a, cluster]]] = True
                is_far = (position <= i) & ~is_exact
                logits = scale * (key[a] - center) @ query[a, i]
                largest = torch.maximum(logits[is_exact].max(), (logits[plan.pivot[a]] + log_factor).max())
                basis = torch.exp(logits[plan.pivot[a]] + log_factor - largest)
                approximate = basis @ inverse @ rows
                exact = torch.where(is_exact, torch.exp(logits - largest), 0.0) @ targets[a]
                total = exact + torch.where(is_far, approximate, 0.0) @ targets[a]
                positive = basis @ torch.maximum(inverse @ rows[:, :prefix].sum(1), least)
                safe_total = exact + positive * targets[a, :prefix].mean(0)
                total = total if total[-1] > _SAFE * safe_total[-1] else safe_total
                out[a, i] = total[:-1] / total[-1]
    return out
