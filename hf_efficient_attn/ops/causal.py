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

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.blocks import ceil_div, chunked_over_heads, inverse, take
from hf_efficient_attn.ops.causal_kernels import IntervalPlan, causal_block_partial, sampled_intervals_attention
from hf_efficient_attn.ops.causal_probe_kernels import Grid, sample_all_levels
from hf_efficient_attn.ops.constants import constant, integers
from hf_efficient_attn.ops.exact import exact_attention, mask_bias
from hf_efficient_attn.ops.hashing import angular_hash, hyperplanes, sort_by_hash
from hf_efficient_attn.ops.near_far_sampling import SamplingOptions, sample_keys, split_scale_evenly
from hf_efficient_attn.ops.partial import Partial, accumulation_dtype, partial_attention
from hf_efficient_attn.ops.random import Seed, offsets, seed_value
from hf_efficient_attn.ops.sampling import stratified_ranks

# Streams of random numbers on level 0.
_PROBES, _SAMPLES = 21, 22

# Queries (a slice of all queries from block 1 on), and their attention to some keys.
QueryPart = tuple[slice, Partial]


def left_intervals(x: Tensor, num_intervals: int, length: int) -> Tensor:
    """View the left intervals of the first pairs of intervals: (BH, N, ...) -> (BH, num_intervals, length, ...)."""
    return x.unfold(1, length, 2 * length)[:, :num_intervals].movedim(-1, 2)


def interval_scores(
    query: Tensor, key: Tensor, squares: Tensor, gram: Tensor, level: int, options: SamplingOptions
) -> Tensor:
    """The unnormalized sampling probabilities of the keys of intervals, from each interval's own queries.

    Args:
        query: (BH, J, L, D), the queries of J intervals of L tokens.
        key: (BH, J, L, D).
        squares: (BH, J, L), |v_j|^2, or 1 for uniform probabilities.
        gram: (BH, J, Dv, Dv), V^T V.
        level: the level of the intervals, which determines the probes.
        options: `scores` as in `SamplingOptions`, with the softmax of each interval in place of D^-1 A_res.

    Returns:
        (BH, J, L).
    """
    batch_heads, num_intervals, length, head_dim = key.shape
    dtype, kind = squares.dtype, options.scores
    if not isinstance(kind, str):
        pairs, seed = zip(query.flatten(0, 1), key.flatten(0, 1), strict=True), seed_value(options.seed)
        log_norms = [kind(*split_scale_evenly(q, k, options.scale), seed)[0] for q, k in pairs]
        norms = torch.stack(log_norms).view(batch_heads, num_intervals, length).exp().to(dtype)
    elif kind == "probe":
        rank = _ranks_of(options, batch_heads, options.num_probes, length, _PROBES + 2 * level, key.device)
        probes = query.gather(2, rank[:, None, :, None].expand(-1, num_intervals, -1, head_dim))
        if key.dtype == torch.float16 and key.device.type == "cpu":  # has no fast product there
            probes, key = probes.float(), key.float()
        weights = (probes * options.scale @ key.transpose(2, 3)).softmax(-1, dtype=dtype)
        norms = weights.square_().sum(2)
        squares = squares * (options.num_probes / length)
    if kind == "probe" or not isinstance(kind, str):
        # An upper bound of |V|_op^2, as in `near_far_sampling.sampled_norm_squared`.
        norm_squared = torch.linalg.vector_norm(gram, dim=(2, 3)).clamp(min=torch.finfo(dtype).tiny)
        squares = torch.addcdiv(norms, squares, norm_squared.unsqueeze(2))
    return torch.add(squares, squares.mean(2, keepdim=True), alpha=1e-6) + torch.finfo(dtype).tiny


def _ranks_of(
    options: SamplingOptions, batch_heads: int, count: int, length: int, stream: int, device: torch.device
) -> Tensor:
    """One index in each of `count` equal strata of `length` tokens: int64 (BH, count)."""
    arguments = (batch_heads // options.batch, options.batch, count, length, options.seed, stream)
    return constant(_ranks, *arguments, device=device)


def _ranks(
    num_heads: int, batch: int, count: int, length: int, seed: Seed, stream: int, device: torch.device
) -> Tensor:
    """`count` evenly spread indices below `length` for each head, by an offset of its own: int64 (B H, count)."""
    ranks = stratified_ranks(count, length, offsets(num_heads, seed, stream, device).unsqueeze(1))
    return ranks.repeat(batch, 1)


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
        completed = ceil_div(query.shape[1], block_size) - 2
        num_samples = min(options.num_samples, max(1, options.num_samples // 2))
        by_probes = options.scores == "probe" and num_samples and not (options.independent or num_hashes)
        if by_probes and backend(key) != "cpu":
            return _plan_levels_together(query, key, max(completed, 0), block_size, num_samples, options)
        gram = squares = value.new_empty(batch_heads, max(completed, 0), 0, 0, dtype=acc_dtype)
        if options.scores == "uniform":
            squares = torch.ones(value.shape[:2], dtype=acc_dtype, device=device) if options.independent else squares
        else:
            squares = torch.linalg.vector_norm(value, dim=-1, dtype=acc_dtype).square()
        if (options.scores == "probe" or callable(options.scores)) and completed > 0:
            blocks = value[:, : completed * block_size].to(acc_dtype).unflatten(1, (completed, block_size))
            gram = blocks.transpose(2, 3) @ blocks
        plans = []
        for level in range(max(completed, 0).bit_length()):
            length, count = block_size << level, ((completed >> level) + 1) >> 1
            if num_samples >= length:
                index = integers(length, device).expand(batch_heads, count, -1)
                log_weight = constant(_log_weights, length, length, acc_dtype, device=device).expand_as(index)
                plans.append(IntervalPlan(level, index, log_weight))
                continue
            keys = left_intervals(key, count, length)
            if not num_samples:
                index = torch.empty(batch_heads, count, 0, dtype=torch.int64, device=device)
                log_weight = torch.empty(batch_heads, count, 0, dtype=acc_dtype, device=device)
            elif options.scores == "uniform" and not options.independent:
                index = _ranks_of(options, batch_heads, num_samples, length, _SAMPLES + 2 * level, device).unsqueeze(1)
                index = index.expand(-1, count, -1)
                log_weight = constant(_log_weights, num_samples, length, acc_dtype, device=device).expand_as(index)
            else:
                queries, own_squares = (left_intervals(x, count, length) for x in (query, squares))
                own_gram = left_intervals(gram, count, 1 << level).sum(2)
                scores = interval_scores(queries, keys, own_squares, own_gram, level, options)
                arguments = (batch_heads // options.batch, options.batch, count, options.seed, _SAMPLES + 2 * level)
                offset = constant(_offsets, *arguments, device=device)
                scores = scores.flatten(0, 1).unsqueeze(1)
                far = sample_keys(scores, num_samples, offset, options.seed, options.independent, complete=True)
                index, log_weight = (x.view(batch_heads, count, num_samples) for x in far[:2])
            plan = IntervalPlan(level, index, log_weight)
            if num_hashes:
                planes = hyperplanes(key.shape[2], num_hashes, options.seed, device)
                plan = _plan_hashed_blocks(plan, query[:, block_size:], keys, max(1, block_size // 2), planes)
            plans.append(plan)
        return plans


def _plan_levels_together(
    query: Tensor, key: Tensor, completed: int, block_size: int, num_samples: int, options: SamplingOptions
) -> list[IntervalPlan]:
    """`plan_intervals` with probes, without a hash, for accelerators."""
    counts = [((completed >> level) + 1) >> 1 for level in range(completed.bit_length())]
    exact = sum(block_size << level <= num_samples for level in range(len(counts)))
    unit, plans = block_size << exact, []
    dtype = key.dtype if backend(key) == "library" else accumulation_dtype(key.dtype)
    for level, count in enumerate(counts[:exact]):
        index = integers(block_size << level, key.device).expand(len(key), count, -1)
        log_weight = constant(_log_weights, index.shape[2], index.shape[2], dtype, device=key.device)
        plans.append(IntervalPlan(level, index, log_weight.expand_as(index)))
    if counts[exact:]:
        grid = Grid(key.shape[1], unit, tuple(counts[exact:]), min(options.num_probes, unit), num_samples)
        samples = sample_all_levels(query, key, grid, options.scale, options.seed, options.batch)
        for i, count in enumerate(grid.counts):
            sample_index, log_weight = (x[:, i, :count] for x in samples)
            plans.append(IntervalPlan(exact + i, sample_index, log_weight))
    return plans


def _offsets(num_heads: int, batch: int, count: int, seed: Seed, stream: int, device: torch.device) -> Tensor:
    """The offsets of the samples of `count` intervals: float64 (B H J, 1)."""
    return offsets(num_heads, seed, stream, device).repeat(batch).repeat_interleave(count).unsqueeze(1)


def _log_weights(num_samples: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((1, 1, num_samples), math.log(length / num_samples), dtype=dtype, device=device)


def _queries_of(queries: Tensor, num_intervals: int, length: int) -> Tensor:
    """The queries that see each interval: (BH, Nq, D) from block 1 on -> (BH, J, L, D), padded with zeros."""
    missing = 2 * num_intervals * length - queries.shape[1]
    queries = pad(queries, (0, 0, 0, missing)) if missing > 0 else queries[:, : 2 * num_intervals * length]
    pairs: Tensor = queries.unflatten(1, (num_intervals, 2, length))
    return pairs[:, :, 1]


def _plan_hashed_blocks(
    plan: IntervalPlan, queries: Tensor, keys: Tensor, block_k: int, planes: Tensor
) -> IntervalPlan:
    """Add the order of the keys (BH, J, L, D) by a hash, and the blocks of the queries (BH, Nq, D) from block 1 on."""
    batch_heads, num_intervals, length, _ = keys.shape
    order, codes = sort_by_hash(angular_hash(keys, planes).flatten(0, 1))
    query_codes = angular_hash(_queries_of(queries, num_intervals, length), planes).flatten(0, 1)
    # A query takes the middle of its cell's keys. Its rank among the queries of the cell would depend on later ones.
    low, high = torch.searchsorted(codes, query_codes), torch.searchsorted(codes, query_codes, right=True)
    query_block = ((low + high) // 2).clamp(max=length - 1) // block_k
    shape = (batch_heads, num_intervals, length)
    return plan._replace(key_order=order.view(shape), query_block=query_block.view(shape), block_k=block_k)


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
    is_hashed = any(plan.key_order is not None for plan in plans)
    first = query[:, :num_exact], key[:, :num_exact], value[:, :num_exact]
    exact = exact_attention(*first, is_causal=True, scale=scale, dropout_p=dropout_p)
    if query.shape[1] <= num_exact:
        return exact

    def some_heads(query: Tensor, key: Tensor, value: Tensor, *tensors: Tensor) -> Tensor:
        near = causal_block_partial(query, key, value, block_size, **options)
        parts = [(slice(None), near)]
        queries = query[:, block_size:]
        for i, plan in enumerate(plans):
            index, log_weight, key_order, query_block = tensors[4 * i : 4 * i + 4]
            own = plan._replace(sample_index=index, log_weight=log_weight, key_order=key_order, query_block=query_block)
            far = _sampled_parts if query_block is None else _hashed_and_sampled_parts
            parts += far(queries, key, value, own, block_size, **options)
        return merge_query_subsets(parts)[:, num_exact - block_size :]

    if plans and not is_hashed and backend(query) != "cpu":
        out = sampled_intervals_attention(query, key, value, plans, block_size, **options)
        return torch.cat((exact, out[:, num_exact - block_size :]), 1)
    tensors = [x for plan in plans for x in (plan.sample_index, plan.log_weight, plan.key_order, plan.query_block)]
    return torch.cat((exact, chunked_over_heads(some_heads, query, key, value, *tensors)), 1)


def _sampled_parts(
    queries: Tensor,
    key: Tensor,
    value: Tensor,
    plan: IntervalPlan,
    block_size: int,
    *,
    scale: float,
    dropout_p: float,
) -> list[QueryPart]:
    """Attention of the queries (BH, Nq, D) from block 1 on to the samples of one level."""
    length = block_size << plan.level
    first = (torch.arange(plan.sample_index.shape[1], device=key.device) * 2 * length)[:, None]
    index, bias = plan.sample_index + first, plan.log_weight[:, :, None]
    keys, values = take(key, index), take(value, index)
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
    queries: Tensor,
    key: Tensor,
    value: Tensor,
    plan: IntervalPlan,
    block_size: int,
    *,
    scale: float,
    dropout_p: float,
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


def dense_causal_log_weights(
    plans: Sequence[IntervalPlan],
    length: int,
    block_size: int,
    num_exact: int,
    batch_heads: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The readable form: what is added to the scores before the softmax, float64 (BH, N, N) for N = `length`."""
    weights = torch.full((batch_heads, length, length), -torch.inf, dtype=torch.float64, device=device)
    for i in range(length):
        if i < num_exact:
            weights[:, i, : i + 1] = 0.0
            continue
        completed = i // block_size - 1
        weights[:, i, max(0, completed) * block_size : i + 1] = 0.0
        for plan in plans:
            if completed < 0 or not completed >> plan.level & 1:
                continue
            j, interval = (completed >> plan.level) // 2, block_size << plan.level
            first = 2 * j * interval
            for a in range(batch_heads):
                samples = zip(plan.sample_index[a, j].tolist(), plan.log_weight[a, j].tolist(), strict=True)
                for index, log_weight in samples:
                    old = weights[a, i, first + index]
                    weights[a, i, first + index] = torch.logaddexp(old, torch.full_like(old, log_weight))
                if plan.query_block is not None and plan.key_order is not None:
                    block = int(plan.query_block[a, j, i - block_size - (2 * j + 1) * interval])
                    near = plan.key_order[a, j, block * plan.block_k : (block + 1) * plan.block_k]
                    weights[a, i, first + near] = 0.0
    return weights
