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
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout

from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.blocks import can_reuse_buffers, ceil_div, chunked_over_heads, pad_to_blocks, take
from hf_efficient_attn.ops.causal import group_by_block
from hf_efficient_attn.ops.causal_coreset_plan import (
    CausalCoresetOptions,
    Epoch,
    cluster_means,
    draw_numbers,
    epoch_bounds,
    plan_epoch,
    prefix_center,
)
from hf_efficient_attn.ops.coreset import largest_of_rows
from hf_efficient_attn.ops.exact import exact_attention, mask_bias
from hf_efficient_attn.ops.export import is_compiling
from hf_efficient_attn.ops.onednn import products
from hf_efficient_attn.ops.partial import Partial, accumulation_dtype, partial_attention, safe_row_max
from hf_efficient_attn.ops.precision import LOG2_E

# While the prefix has fewer keys than this for each landmark, there are no clusters.
LEAST_KEYS = 5
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

    # Written to directly, where no gradient is wanted: each copy of a long output takes a few percent of the time.
    out = None
    if can_reuse_buffers(query, key, value):
        out = exact.new_empty(*query.shape[:2], exact.shape[2])
        out[:, :num_exact] = exact
    outs = [exact]
    with torch.autocast(query.device.type, enabled=False):
        numbers = draw_numbers(key, options)
        for start, end in epoch_bounds(query.shape[1], options):
            plan = plan_epoch(key.detach(), numbers, (start, end), options, scale)
            coreset = _coreset(key, plan, options, scale)
            tensors = query[:, start - block_size : end], key[:, :end], value[:, :end], *coreset
            step = max(1, _TOKENS // end)
            if out is None:
                outs.append(chunked_over_heads(some_heads, *tensors, step=step))
                continue
            for chunk in zip(*(x.split(step) for x in (out[:, start:end], *tensors)), strict=True):
                chunk[0].copy_(some_heads(*chunk[1:]))
    return torch.cat(outs, 1) if out is None else out


class _Coreset(NamedTuple):
    """The coreset of an epoch.

    The exponents are logarithms to base 2: of K_cj of the keys, and of exp(scale <q, c>) of the queries, both times
    factors that cancel.

    Attributes:
        center: (BH, 1, D), the mean of the keys of the prefix.
        landmark: (BH, m, D).
        inverse: (BH, m, m), (K_cc + ridge I)^-1.
        least: (BH, m, 1), the least positive weights: those of the landmarks themselves.
        key_factor: (BH, m, D), whose product with keys, plus key_shift (BH, m), is their exponents.
        key_shift: see `key_factor`.
        query_factor: (BH, m, D), the same for queries.
        query_shift: (BH, m).
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
    factor, center = options.temperature**2 * abs(scale), prefix_center(key, plan.start - options.block_size)
    keys = key.index_select(1, plan.candidate) - center
    landmark = cluster_means(keys, keys * factor**0.5, plan.cluster, take(keys, plan.draw))
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
        (-LOG2_E * (half + reference) - center @ key_factor.mT).squeeze(1),
        landmark * (LOG2_E * scale),
        LOG2_E * (reference - half).squeeze(1),
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
    at_a_time = ceil_div(_ROWS, len(query)) if can_reuse_buffers(query, key, value, *coreset) else key.shape[1]
    rows = ceil_div(at_a_time, block_size) * block_size
    has_clusters = options.cluster_size > 0 and prefix >= LEAST_KEYS * coreset.landmark.shape[1]
    sums = total = key.new_zeros(())
    nearest, last = [], prefix - block_size
    for first in (*range(0, last, rows), last):
        own = slice(first, min(first + rows, last) if first < last else prefix)
        exponents = products(key[:, own], coreset.key_factor, coreset.key_shift)
        if has_clusters:
            nearest.append(largest_of_rows(exponents.detach(), in_place=False)[1])
        # The last block of the prefix is added again to the running sums.
        sums, total = total, total + _exp2(exponents).mT @ _with_ones(value[:, own])
    clusters = None
    if has_clusters:
        clusters = _clusters(key, value, torch.cat(nearest, 1), coreset, options, scale)
    # Without running sums: the denominators of positive weights.
    safe, outs = torch.maximum(coreset.inverse @ total[..., -1:], coreset.least), []
    for first in range(0, length, rows):
        queries = query[:, block_size + first : block_size + first + rows]
        blocks = pad_to_blocks(queries, block_size)
        shape = blocks.shape[1:3]
        # Their keys, from the block before, to which they attend exactly.
        own = slice(prefix + first, prefix + first + (shape[0] + 1) * shape[1])
        keys, values = (pad_to_blocks(x[:, own], block_size).flatten(1, 2) for x in (key, value))
        parts = [_near_partial(blocks, keys, values, scale, dropout_p)]
        # The block before that counts from here on.
        own = slice(last + first, last + first + shape[0] * shape[1])
        features = _exp2(products(key[:, own], coreset.key_factor, coreset.key_shift)).unflatten(1, shape)
        added = features.mT @ _with_ones(value[:, own]).unflatten(1, shape)
        before = _running_sums(added, sums)
        sums = before[:, -1]
        far = _far_field(blocks, before, safe, coreset, scale, dropout_p)
        if clusters is not None:
            parts.append(_cluster_partial(blocks.flatten(1, 2), far.nearest, clusters, scale, dropout_p))
        outs.append(_add_far(parts, far, value[:, :prefix])[:, : queries.shape[1]])
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def _running_sums(added: Tensor, sums: Tensor) -> Tensor:
    """`sums` (BH, m, Dv + 1) or 0 plus the sums of `added` (BH, T, m, Dv + 1) up to each block, inclusive."""
    if not can_reuse_buffers(added, sums):
        return (sums.unsqueeze(1) if sums.ndim else sums) + added.cumsum(1)
    blocks = added.unbind(1)
    blocks[0].add_(sums)
    for before, block in itertools.pairwise(blocks):
        block.add_(before)
    return added


def _with_ones(value: Tensor) -> Tensor:
    """The values (BH, N, Dv) and a column of ones, whose sums are the denominators."""
    return torch.cat((value, value.new_ones(1, 1, 1).expand(*value.shape[:2], 1)), 2)


def _exp2(exponents: Tensor) -> Tensor:
    """K_cj from the exponents of keys, times a factor per head, bounded."""
    return exponents.clamp(max=LOG2_E * LARGEST).exp2_()


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


def _clusters(
    key: Tensor, value: Tensor, nearest: Tensor, coreset: _Coreset, options: CausalCoresetOptions, scale: float
) -> _Clusters:
    """The clusters of the keys of a prefix, from the landmark of each, int64 (BH, P)."""
    member, is_member = _members(nearest, coreset.landmark.shape[1], options.cluster_size)
    keys, values = take(key, member), take(value, member)
    distance = (keys - coreset.landmark.unsqueeze(2)).square().sum(3)
    missed = -torch.expm1(-(options.temperature**2) * abs(scale) * distance)
    return _Clusters(keys, values, missed.clamp(min=LEAST_MISSED).log().masked_fill(~is_member, -torch.inf))


def _near_partial(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout_p: float) -> Partial:
    """Attention of blocks of queries (BH, T, b, D) to their own block, causally, and to the block before it.

    The keys (BH, (T + 1) * b, D) and values begin with the block before the first one.
    """
    size = query.shape[2]
    if can_reuse_buffers(query, key, value):
        keys, values = (x.unfold(1, 2 * size, size).mT for x in (key, value))  # views that overlap
    else:
        blocks = (x.unflatten(1, (-1, size)) for x in (key, value))
        keys, values = (torch.cat((x[:, :-1], x[:, 1:]), 2) for x in blocks)
    block = torch.ones(size, size, dtype=torch.bool, device=query.device)
    bias = mask_bias(torch.cat((block, block.tril()), 1), query.dtype)[None, None]
    out, lse = _small_blocks(query, keys, values, bias, scale, dropout_p)
    return Partial(out.flatten(1, 2), lse.flatten(1, 2))


def _small_blocks(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float, dropout_p: float) -> Partial:
    """`partial_attention`, for many small blocks on the CPU by products of all of them.

    With two threads this takes half the time of the fused kernel, which multiplies one block at a time.
    """
    if dropout_p > 0.0 or not can_reuse_buffers(query, key, value, bias):
        return partial_attention(query, key, value, bias, scale=scale, dropout_p=dropout_p)
    shape, bias = query.shape[:3], bias * LOG2_E
    # One bias for all blocks is not copied.
    bias = bias[0] if bias.shape[:2] == (1, 1) else bias.expand(*query.shape[:2], -1, -1).flatten(0, 1)
    queries, keys, values = (x.reshape(-1, *x.shape[2:]) for x in (query, key, value))
    scores = torch.baddbmm(bias, queries, keys.mT, alpha=scale * LOG2_E)
    row_max = safe_row_max(scores.amax(2, keepdim=True))
    weights = scores.sub_(row_max).exp2_()
    total = weights.sum(2, keepdim=True)
    lse = total.log2().add_(row_max).div_(LOG2_E)
    out = torch.bmm(weights, values).div_(total.masked_fill_(total == 0.0, 1.0))
    return Partial(out.view(*shape, -1), lse.view(shape))


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
    exponents = products(queries, coreset.query_factor, coreset.query_shift)
    # The largest exponent up to rounding: what is subtracted cancels.
    row_max, nearest = largest_of_rows(exponents.detach(), in_place=False)
    basis = (exponents - row_max.unsqueeze(2)).exp2_()
    weights = products(basis, coreset.inverse).unflatten(1, query.shape[1:3])
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
    (batch_heads, length), num_clusters, device = nearest.shape, clusters.bias.shape[1], query.device
    slots = 1 << (length // num_clusters).bit_length()
    slots = min(max(slots, _FEWEST_SLOTS), _MOST_SLOTS)
    # All queries of a block of slots have the same cluster. The queries of all heads are distributed together, in the
    # order of their positions, so that no later token moves the matrices of another head in memory, and thus changes
    # their rounding.
    row = torch.arange(batch_heads * length, device=device).view(batch_heads, length)
    own = nearest + torch.arange(batch_heads, device=device)[:, None] * num_clusters
    slot, cluster = group_by_block(own.mT.reshape(1, -1), batch_heads * num_clusters, slots)
    if can_reuse_buffers(query, *clusters):
        cluster = cluster[:, : int(slot.max()) // slots + 1]  # without the empty blocks at the end
    # An empty slot has the first query.
    index = torch.zeros_like(cluster).repeat_interleave(slots, 1).scatter(1, slot, row.mT.reshape(1, -1))
    queries = take(query.flatten(0, 1)[None], index).unflatten(1, (-1, slots))
    keys, values, bias = (take(x.flatten(0, 1).flatten(1)[None], cluster) for x in clusters)
    keys, values = (x.unflatten(2, (clusters.bias.shape[2], -1)) for x in (keys, values))
    part = _small_blocks(queries, keys, values, bias.unsqueeze(2), scale, dropout_p)
    slot = slot.view(length, batch_heads).mT.reshape(1, -1)
    out, lse = take(part.out.flatten(1, 2), slot), part.lse.flatten(1, 2).gather(1, slot)
    return Partial(out.view(batch_heads, length, -1), lse.view(batch_heads, length))


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
    # Where to ask would make the host wait for the device, the other form is computed in any case.
    if is_compiling() or backend(value) != "cpu" or not bool(is_safe.all()):
        mean = far.positive.unsqueeze(2) * value.mean(1, keepdim=True)
        numerator = torch.where(is_safe.unsqueeze(2), numerator, mean)
        denominator = torch.where(is_safe, denominator, bound)
    out = numerator * (of_far / denominator).unsqueeze(2)
    for part, weight in zip(parts, exact, strict=True):
        out = torch.addcmul(out, part.out, (weight / denominator).unsqueeze(2))
    return out
