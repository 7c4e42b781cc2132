"""An exact near field and a far field of sampled keys, in the causal form.

The sequence is cut into blocks by position. Block t attends causally to itself and to block t-1, exactly. The completed
blocks 0 .. t-2 are split into aligned intervals of 1, 2, 4, ... blocks according to the binary digits of t-1. Each
interval has one weighted sample of its keys, which is drawn once, from the tokens of the interval alone, and which all
blocks that see the interval share. So the choice of keys that a query attends to never depends on later tokens, and the
output does not even depend on the length of the sequence.

The intervals are the off-diagonal squares of HyperAttention's causal recursion (Han et al. 2023, Algorithm 4). The
recursion also sorts the queries of a square among each other, which lets later queries influence earlier ones; here
this step is left out.

On level l an interval has L = block_size * 2**l tokens. The tokens are divided into pairs of intervals. Only the left
interval of a pair, interval j at 2 j L, is sampled. Counted from block 1 on, the queries that see it are those from
(2 j + 1) L to (2 j + 2) L - 1.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.blocks import ceil_div, inverse, pad_to_blocks, take
from hf_efficient_attn.ops.constants import integers
from hf_efficient_attn.ops.exact import exact_attention, mask_bias
from hf_efficient_attn.ops.hashing import hash_keys
from hf_efficient_attn.ops.partial import Partial, accumulation_dtype, partial_attention
from hf_efficient_attn.ops.random import Seed, offsets, seed_value
from hf_efficient_attn.ops.sampling import (
    FarField,
    SamplingOptions,
    column_scores,
    sample_keys,
    split_scale_evenly,
    stratified_ranks,
)
from hf_efficient_attn.ops.slices import slice_size, sliced

# Streams of random numbers on level 0.
_PROBES, _SAMPLES = 21, 22

# Queries (a slice of all queries from block 1 on), and their attention to some keys.
QueryPart = tuple[slice, Partial]


class IntervalPlan(NamedTuple):
    """The far field on one level: J intervals of L = block_size * 2**level tokens.

    Attributes:
        level: the level.
        sample_index: int64 (BH, J, M), the sampled keys of each interval, counted from its first token.
        log_weight: (BH, J, M), their log-weights.
        key_order: int64 (BH, J, L), the keys of each interval in the order of a hash; None if the near field is the
            window alone.
        query_block: int64 (BH, J, L), for each query that sees the interval the block of hashed keys that belongs to
            its near field; None likewise.
        block_k: keys of a block of hashed keys.
    """

    level: int
    sample_index: Tensor
    log_weight: Tensor
    key_order: Tensor | None = None
    query_block: Tensor | None = None
    block_k: int = 0


def left_intervals(x: Tensor, num_intervals: int, length: int) -> Tensor:
    """View the left intervals of the first pairs of intervals: (BH, N, ...) -> (BH, num_intervals, length, ...)."""
    return x.unfold(1, length, 2 * length)[:, :num_intervals].movedim(-1, 2)


def _interval_scores(
    query: Tensor, key: Tensor, value: Tensor, level: int, length: int, options: SamplingOptions
) -> Tensor:
    """The unnormalized sampling probabilities of the keys of J intervals of L tokens, from each interval's own queries.

    They are those of `column_scores`, with the softmax of each interval in place of D^-1 A_res.

    Args:
        query: (BH, J, L, D).
        key: (BH, J, L, D).
        value: (BH, J, L, Dv).
        level: the level of the intervals, which determines the probes.
        length: L.
        options: `scores` as in `SamplingOptions`.

    Returns:
        (BH J, 1, L).
    """
    norms, acc_dtype = None, accumulation_dtype(value.dtype)
    if callable(options.scores):
        pairs, seed = zip(query.flatten(0, 1), key.flatten(0, 1), strict=True), seed_value(options.seed)
        logs = [options.scores(*split_scale_evenly(q, k, options.scale), seed)[0] for q, k in pairs]
        norms = torch.stack(logs).unsqueeze(1).exp_().to(acc_dtype)
    elif options.scores == "probe":
        rank = _ranks(options, len(query), options.num_probes, length, _PROBES + 2 * level, key.device)
        probes = query.gather(2, rank[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3]))
        if key.dtype == torch.float16:  # has no fast product on CPUs
            probes, key = probes.float(), key.float()
        weights = (probes * options.scale @ key.mT).softmax(-1, dtype=acc_dtype).flatten(0, 1)
        norms = weights.square_().sum(1, keepdim=True).mul_(length / options.num_probes)
    elif options.scores == "uniform":
        return torch.ones(key.shape[:3], dtype=acc_dtype, device=key.device).flatten(0, 1).unsqueeze(1)
    return column_scores(value.flatten(0, 1), norms, None)


def _ranks(
    options: SamplingOptions, batch_heads: int, count: int, length: int, stream: int, device: torch.device
) -> Tensor:
    """One index in each of `count` equal strata of `length` tokens, by an offset of each head: int64 (BH, count)."""
    offset = offsets(batch_heads // options.batch, options.seed, stream, device).unsqueeze(1)
    return stratified_ranks(count, length, offset).repeat(options.batch, 1)


def plan_intervals(
    query: Tensor, key: Tensor, value: Tensor, block_size: int, options: SamplingOptions, num_hashes: int = 0
) -> list[IntervalPlan]:
    """Sample the keys of all intervals, num_samples / 2 each, or all keys of shorter intervals. No gradient.

    With `num_hashes` the keys of the sampled intervals are also sorted by an angular hash and cut into blocks of
    block_size / 2. A query gets the block in which its own code lies, which does not depend on other queries.

    Args:
        query: (BH, N, D).
        key: (BH, N, D).
        value: (BH, N, Dv).
        block_size: tokens of a block.
        options: how the keys are sampled.
        num_hashes: hyperplanes of the hash, or 0.
    """
    with torch.no_grad():
        batch_heads, acc_dtype, device = query.shape[0], accumulation_dtype(value.dtype), key.device
        # The queries of block t have t-1 completed blocks before block t-1.
        completed = max(0, ceil_div(query.shape[1], block_size) - 2)
        num_samples, plans = min(options.num_samples, max(1, options.num_samples // 2)), []
        is_even = options.scores == "uniform" and not options.independent
        for level in range(completed.bit_length()):
            length, count, stream = block_size << level, ((completed >> level) + 1) >> 1, _SAMPLES + 2 * level
            queries, keys, values = (left_intervals(x, count, length) for x in (query, key, value))
            if is_even or not 0 < num_samples < length:
                # One key of each of equal strata; every key if there are as many samples.
                index = _ranks(options, batch_heads, min(num_samples, length), length, stream, device)
                index = index.unsqueeze(1).expand(-1, count, -1)
                log_weight = math.log(length / max(1, index.shape[2]))
                far = FarField(
                    index, torch.full((1, 1, 1), log_weight, dtype=acc_dtype, device=device).expand_as(index)
                )
            else:
                scores = _interval_scores(queries, keys, values, level, length, options)
                offset = offsets(batch_heads // options.batch, options.seed, stream, device).repeat(options.batch)
                offset = offset.repeat_interleave(count).unsqueeze(1)
                far = sample_keys(scores, offset, options._replace(num_samples=num_samples), complete=True)
                far = FarField(*(x.unflatten(0, (batch_heads, count)).squeeze(2) for x in far))
            plan = IntervalPlan(level, *far)
            if num_hashes and num_samples < length:
                seen_by = _queries_of(query[:, block_size:], count, length)
                plan = _plan_hashed_blocks(plan, seen_by, keys, max(1, block_size // 2), num_hashes, options.seed)
            plans.append(plan)
        return plans


def _queries_of(queries: Tensor, num_intervals: int, length: int) -> Tensor:
    """The queries that see each interval: (BH, Nq, D) from block 1 on -> (BH, J, L, D), padded with zeros."""
    missing = 2 * num_intervals * length - queries.shape[1]
    queries = pad(queries, (0, 0, 0, missing)) if missing > 0 else queries[:, : 2 * num_intervals * length]
    pairs: Tensor = queries.unflatten(1, (num_intervals, 2, length))
    return pairs[:, :, 1]


def _plan_hashed_blocks(
    plan: IntervalPlan, queries: Tensor, keys: Tensor, block_k: int, num_hashes: int, seed: Seed
) -> IntervalPlan:
    """Add the order of the keys (BH, J, L, D) by a hash, and the blocks of the queries (BH, J, L, D) that see them."""
    sorted_keys, order = hash_keys(keys.flatten(0, 1), num_hashes, seed).sort(stable=True)
    # Without the share of the position: the rank of the cell.
    cell = hash_keys(queries.flatten(0, 1), num_hashes, seed).floor_()
    # A query takes the middle of its cell's keys. Its rank among the queries of the cell would depend on later ones.
    low, high = (torch.searchsorted(sorted_keys, x) for x in (cell, cell + 1))
    query_block = ((low + high) // 2).clamp_(max=keys.shape[2] - 1) // block_k
    shape = keys.shape[:3]
    return plan._replace(key_order=order.view(shape), query_block=query_block.view(shape), block_k=block_k)


def causal_block_partial(
    query: Tensor, key: Tensor, value: Tensor, block_size: int, *, scale: float, dropout_p: float = 0.0
) -> Partial:
    """Attention of the queries from block 1 on to their own block, causally, and to the whole block before it.

    Args:
        query: (BH, N, D).
        key: (BH, N, D).
        value: (BH, N, Dv).
        block_size: tokens of a block.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        Partial of out (BH, N - block_size, Dv) and lse (BH, N - block_size).
    """
    q_len = query.shape[1] - block_size
    query = pad_to_blocks(query[:, block_size:], block_size)
    key, value = (pad_to_blocks(x, block_size) for x in (key, value))
    key, value = (torch.cat((x[:, :-1], x[:, 1:]), 2) for x in (key, value))
    block = torch.ones(block_size, block_size, dtype=torch.bool, device=query.device)
    bias = mask_bias(torch.cat((block, block.tril()), 1), query.dtype)[None, None]
    out, lse = partial_attention(query, key, value, bias, scale=scale, dropout_p=dropout_p)
    return Partial(out.flatten(1, 2)[:, :q_len], lse.flatten(1, 2)[:, :q_len])


def causal_near_far_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plans: Sequence[IntervalPlan],
    *,
    block_size: int,
    num_exact: int,
    scale: float,
    dropout_p: float = 0.0,
) -> Tensor:
    """The attention of a plan.

    Args:
        query: (BH, N, D).
        key: (BH, N, D).
        value: (BH, N, Dv).
        plans: the levels of the far field.
        block_size: tokens of a block.
        num_exact: the first positions, at least `block_size`, which are computed exactly in sequences of any length.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        (BH, N, Dv).
    """
    options = {"scale": scale, "dropout_p": dropout_p}
    first = query[:, :num_exact], key[:, :num_exact], value[:, :num_exact]
    exact = exact_attention(*first, is_causal=True, **options)
    if query.shape[1] <= num_exact:
        return exact

    def some_heads(query: Tensor, key: Tensor, value: Tensor, *tensors: Tensor) -> Tensor:
        parts = [(slice(None), causal_block_partial(query, key, value, block_size, **options))]
        for i, plan in enumerate(plans):
            index, log_weight, key_order, query_block = tensors[4 * i : 4 * i + 4]
            own = IntervalPlan(plan.level, index, log_weight, key_order, query_block, plan.block_k)
            far = _sampled_parts if query_block is None else _hashed_and_sampled_parts
            parts += far(query[:, block_size:], key, value, own, block_size, **options)
        return merge_query_subsets(parts)[:, num_exact - block_size :]

    tensors = [x for plan in plans for x in (plan.sample_index, plan.log_weight, plan.key_order, plan.query_block)]
    size = slice_size(query.shape[1] * 2 * max(query.shape[2], value.shape[2]), query.device)
    return torch.cat((exact, sliced(some_heads, query, key, value, *tensors, size=size, draws=dropout_p > 0.0)), 1)


def _sampled_parts(
    queries: Tensor, key: Tensor, value: Tensor, plan: IntervalPlan, block_size: int, *, scale: float, dropout_p: float
) -> list[QueryPart]:
    """Attention of the queries (BH, Nq, D) from block 1 on to the samples of one level."""
    length = block_size << plan.level
    index = plan.sample_index + (integers(plan.sample_index.shape[1], key.device) * 2 * length)[:, None]
    keys, values, bias = take(key, index), take(value, index), plan.log_weight[:, :, None]
    return interval_attention(queries, keys, values, bias, length, scale=scale, dropout_p=dropout_p)


def interval_attention(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, length: int, *, scale: float, dropout_p: float
) -> list[QueryPart]:
    """Attention of queries to keys that stand for the intervals they see on one level.

    Args:
        queries: (BH, Nq, D), the queries from block 1 on.
        keys: (BH, J, M, D), the M keys of each of J intervals.
        values: (BH, J, M, Dv).
        bias: broadcastable to (BH, J, 1, M), added to the scores.
        length: tokens of an interval.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        Slices of the queries and their partials. The queries of all complete intervals are in one partial
        (BH, J', L, .) with a slice that also holds the queries between them. The last interval may have fewer queries.
    """
    bias = bias.expand(-1, keys.shape[1], -1, -1)
    q_len, complete, parts = queries.shape[1], queries.shape[1] // (2 * length), []
    if complete:
        every = slice(0, complete * 2 * length)
        blocks = queries[:, every].unflatten(1, (complete, 2, length))[:, :, 1]
        tensors = blocks, keys[:, :complete], values[:, :complete], bias[:, :complete]
        parts.append((every, partial_attention(*tensors, scale=scale, dropout_p=dropout_p)))
    if complete < keys.shape[1]:
        last = slice((2 * complete + 1) * length, q_len)
        tensors = queries[:, None, last], keys[:, complete:], values[:, complete:], bias[:, complete:]
        parts.append((last, partial_attention(*tensors, scale=scale, dropout_p=dropout_p)))
    return parts


def _hashed_and_sampled_parts(
    queries: Tensor, key: Tensor, value: Tensor, plan: IntervalPlan, block_size: int, *, scale: float, dropout_p: float
) -> list[QueryPart]:
    """`_sampled_parts` with a near field: each query also attends to its block of hashed keys.

    The queries of one block of keys are gathered into blocks of their own, which then share these keys and the samples.
    """
    assert plan.key_order is not None and plan.query_block is not None
    (batch_heads, num_intervals, _), length, block_k = plan.sample_index.shape, block_size << plan.level, plan.block_k
    own_queries = _queries_of(queries, num_intervals, length).flatten(0, 1)
    keys, values = (left_intervals(x, num_intervals, length).flatten(0, 1) for x in (key, value))
    key_order, query_block, index, log_weight = (
        x.flatten(0, 1) for x in (plan.key_order, plan.query_block, plan.sample_index, plan.log_weight)
    )
    slot, block_of_slots = group_by_block(query_block, ceil_div(length, block_k), block_k)
    num_blocks = block_of_slots.shape[1]
    # An unused slot gets the query at index `length`, which is padding.
    query_of_slot = torch.full((len(own_queries), num_blocks * block_k), length, device=key.device).scatter_(
        1, slot, torch.arange(length, device=key.device).expand_as(slot)
    )
    grouped = take(pad(own_queries, (0, 0, 0, 1)), query_of_slot).unflatten(1, (num_blocks, block_k))
    sorted_index = block_of_slots[:, :, None] * block_k + torch.arange(block_k, device=key.device)
    near = key_order.gather(1, sorted_index.clamp(max=length - 1).flatten(1)).view_as(sorted_index)
    block_of_sample = inverse(key_order).gather(1, index) // block_k
    in_near_field = block_of_sample[:, None] == block_of_slots[:, :, None]
    far_bias = log_weight[:, None].expand(-1, num_blocks, -1).masked_fill(in_near_field, -torch.inf)
    bias = torch.cat((mask_bias(sorted_index < length, far_bias.dtype), far_bias), 2)[:, :, None]
    key_index = torch.cat((near, index[:, None].expand(-1, num_blocks, -1)), 2)
    keys, values = take(keys, key_index), take(values, key_index)
    part = partial_attention(grouped, keys, values, bias, scale=scale, dropout_p=dropout_p)
    out: Tensor = take(part.out.flatten(1, 2), slot).unflatten(0, (batch_heads, num_intervals))
    lse: Tensor = part.lse.flatten(1, 2).gather(1, slot).unflatten(0, (batch_heads, num_intervals))
    complete, parts = queries.shape[1] // (2 * length), []
    if complete:
        parts.append((slice(0, complete * 2 * length), Partial(out[:, :complete], lse[:, :complete])))
    if complete < num_intervals:
        last = slice((2 * complete + 1) * length, queries.shape[1])
        left = queries.shape[1] - last.start
        parts.append((last, Partial(out[:, complete:, :left], lse[:, complete:, :left])))
    return parts


def group_by_block(query_block: Tensor, num_key_blocks: int, size: int) -> tuple[Tensor, Tensor]:
    """Distribute queries over blocks of `size` slots so that all queries of a block have the same block of keys.

    The shape is fixed, and there are no more blocks than it needs. A block of slots is begun by the first query that
    needs it, so the slot of a query depends on earlier queries only. If later ones could move it to another block, its
    output could change in the last bit, because rounding in a product may depend on where a matrix lies in memory.

    Args:
        query_block: int64 (S, L), the block of keys of each query.
        num_key_blocks: number of blocks of keys.
        size: slots of a block.

    Returns:
        slot: int64 (S, L), the slot of each query among those of all blocks.
        block: int64 (S, T), the block of keys of each block of slots, T = ceil(L / size) + num_key_blocks - 1.
    """
    num_blocks = ceil_div(query_block.shape[1], size) + num_key_blocks - 1
    # The rank of each query among those with the same block of keys, in the order of the blocks of keys.
    order = query_block.argsort(dim=1, stable=True)
    sorted_block = query_block.gather(1, order)
    sorted_index = torch.arange(query_block.shape[1], device=query_block.device)
    rank = sorted_index - torch.searchsorted(sorted_block, sorted_block)
    # Blocks of slots are numbered in the order of the queries that begin them.
    begins = torch.empty_like(order).scatter_(1, order, (rank % size == 0).to(order.dtype))
    number = (begins.cumsum(1) - 1).gather(1, order).gather(1, sorted_index - rank % size)
    slot = torch.empty_like(order).scatter_(1, order, number * size + rank % size)
    # All queries of a block of slots write the same value.
    return slot, order.new_zeros(order.shape[0], num_blocks).scatter_(1, number, sorted_block)


def _view_of(x: Tensor, queries: slice, part: Tensor) -> Tensor:
    """The view of x (BH, Nq, ...) that corresponds to a part (BH, Nq', ...) or, of every second L, (BH, J, L, ...)."""
    x = x[:, queries]
    if part.ndim == x.ndim:
        return x
    if part.shape[1] == 1 and part.shape[2] == x.shape[1]:
        return x[:, None]
    view: Tensor = x.unflatten(1, (part.shape[1], 2, part.shape[2]))
    return view[:, :, 1]


def merge_query_subsets(parts: Sequence[QueryPart]) -> Tensor:
    """The output of `merge` for partials that each have a subset of the queries; the first has all of them.

    Most parts have at most half of the queries, so they are added to slices of one output in place.

    Args:
        parts: slices of the queries and their partials, as `interval_attention` returns them.

    Returns:
        (BH, Nq, Dv).
    """
    first = parts[0][1]
    lses = torch.full((len(parts), *first.lse.shape), -torch.inf, dtype=first.lse.dtype, device=first.lse.device)
    for i, (queries, part) in enumerate(parts):
        _view_of(lses[i], queries, part.lse).copy_(part.lse)
    # Every query attends to itself, so that the softmax is defined.
    weights = lses.softmax(0)
    out = first.out * weights[0].unsqueeze(-1)
    for i, (queries, part) in enumerate(parts[1:], 1):
        weight = _view_of(weights[i], queries, part.lse).unsqueeze(-1)
        _view_of(out, queries, part.out).addcmul_(part.out.to(out.dtype), weight)
    return out.to(first.out.dtype)
