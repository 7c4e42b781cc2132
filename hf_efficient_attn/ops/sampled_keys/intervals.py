"""Intervals of the causal form of sampled keys: what a block of queries sees of them, as a list of keys, or hashed."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.attend import BlockKeys, Partial, attend, block_attention, takes_blocks
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.index import ceil_div, constant, integers, inverse, take


class IntervalPlan(NamedTuple):
    """The far field on one level: J intervals of L = block_size * 2**level tokens."""

    level: int  # the level of the intervals
    sample_index: Tensor  # int64 (BH, J, M), the sampled keys of each interval, counted from its first token
    log_weight: Tensor  # (BH, J, M), the log-weights of the sampled keys
    # int64 (BH, J, L), the keys of each interval in the order of a hash; None if the near field is the window alone.
    key_order: Tensor | None = None
    # int64 (BH, J, L or less), the block of hashed keys in the near field of each query that sees the interval; None if
    # the near field is the window alone.
    query_block: Tensor | None = None
    block_k: int = 0  # the number of keys of a block of hashed keys


def sampled_intervals(length: int, block_size: int) -> list[tuple[int, int]]:
    """Return J sampled intervals and L tokens per interval for each level of a sequence of N = `length` tokens."""
    # The queries of block t have t-1 completed blocks before block t-1.
    completed = max(0, ceil_div(length, block_size) - 2)
    return [(((completed >> i) + 1) >> 1, block_size << i) for i in range(completed.bit_length())]


def near_and_samples(
    query: Tensor, key: Tensor, value: Tensor, plans: Sequence[IntervalPlan], block_size: int, call: dict[str, Any]
) -> Partial | None:
    """Compute attention to the own block, to the one before it, and to all samples that a block sees, by one kernel.

    `plans` are the first levels of the far field, and `call` has scale and dropout_p. Returns out (BH, N, Dv) and lse
    (BH, N), or None without a kernel.
    """
    levels = len(plans)
    batch_heads, length, _ = query.shape
    keys = BlockKeys(block_size, window=(2 * block_size, 0), start=query, range_len=2 * block_size)
    # Whether a kernel takes the call depends on what is given, and not on its numbers.
    given = keys._replace(listed=query, log_weight=query, num_listed=query) if levels else keys
    if not takes_blocks(query, key, value, given, call["dropout_p"]):
        return None
    start = (integers(ceil_div(length, block_size), query.device) * block_size - block_size).clamp_(min=0)
    keys = keys._replace(start=start.expand(batch_heads, -1))  # (BH, T)
    if levels:
        table = _intervals_of_blocks(length, block_size, levels, query.device)  # (T, 1 + R)
        first = _first_tokens(length, block_size, levels, query.device)
        sizes = [plan.sample_index.shape[2] for plan in plans]
        most = max(sizes)
        samples = [
            (x.sample_index, x.log_weight)
            if size == most
            else (pad(x.sample_index, (0, most - size)), pad(x.log_weight, (0, most - size), value=-torch.inf))
            for x, size in zip(plans, sizes, strict=True)
        ]
        index, log_weight = (torch.cat(x, 1) for x in zip(*samples, strict=True))  # of all levels: (BH, J, most)
        listed, log_weight = (
            x.index_select(1, table[:, 1:].flatten()).view(batch_heads, len(table), -1)  # (BH, T, R * most)
            for x in (index + first, log_weight)
        )
        num_listed = (table[:, 0] * most).expand(batch_heads, -1)
        keys = keys._replace(listed=listed, log_weight=log_weight, num_listed=num_listed)
    return block_attention(query, key, value, keys, **call)


@constant
def _intervals_of_blocks(length: int, block_size: int, levels: int, device: torch.device) -> Tensor:
    """Return the number of intervals that each block sees, and which of those of all levels: int64 (T, 1 + R)."""
    counts = [count for count, _ in sampled_intervals(length, block_size)[:levels]]
    first = [0, *itertools.accumulate(counts)]
    rows = []
    for block in range(ceil_div(length, block_size)):
        completed = max(0, block - 1)
        rows.append([first[i] + (completed >> (i + 1)) for i in range(levels) if completed >> i & 1])
    most = max(map(len, rows))
    return torch.tensor([[len(x), *x, *[0] * (most - len(x))] for x in rows], device=device)


@constant
def _first_tokens(length: int, block_size: int, levels: int, device: torch.device) -> Tensor:
    """Return the first token of each interval of all levels: int64 (J, 1)."""
    intervals = sampled_intervals(length, block_size)[:levels]
    return torch.tensor([[2 * j * size] for count, size in intervals for j in range(count)], device=device)


def hashed_and_sampled(
    queries: Tensor, key: Tensor, value: Tensor, plan: IntervalPlan, call: dict[str, Any]
) -> Partial:
    """Compute attention of the queries that see a level's intervals to their blocks of hashed keys and to the samples.

    Queries with the same block of keys are gathered into blocks, which then share these keys and the samples. Takes
    queries (BH, J, L or less, D), keys (BH, J, L, D), values (BH, J, L, Dv), and a plan with blocks of hashed keys.
    Returns a partial with out (BH, J, L or less, Dv).
    """
    assert plan.key_order is not None and plan.query_block is not None
    shape = queries.shape[:3]
    length = key.shape[2]
    block_k = plan.block_k
    device = key.device
    queries, key, value, index, log_weight, key_order, query_block = (
        x.flatten(0, 1)
        for x in (queries, key, value, plan.sample_index, plan.log_weight, plan.key_order, plan.query_block)
    )
    slot, block_of_slots = group_by_block(query_block, ceil_div(length, block_k), block_k)  # (S, L), (S, T)
    num_blocks = block_of_slots.shape[1]
    q_len = queries.shape[1]
    # An unused slot gets the query at index `q_len`, which is padding.
    query_of_slot = torch.full((len(queries), num_blocks * block_k), q_len, device=device)  # (S, T * block_k)
    query_of_slot.scatter_(1, slot, integers(q_len, device).expand_as(slot))
    grouped = take(pad(queries, (0, 0, 0, 1)), query_of_slot)  # (S, T * block_k, D)
    block_of_sample = inverse(key_order).gather(1, index) // block_k  # (S, M)
    in_near_field = block_of_sample[:, None] == block_of_slots[:, :, None]  # (S, T, M)
    far_bias = log_weight[:, None].expand(-1, num_blocks, -1).masked_fill(in_near_field, -torch.inf)  # (S, T, M)
    start = block_of_slots * block_k
    listed = index[:, None].expand(-1, num_blocks, -1)  # (S, T, M)
    keys = BlockKeys(block_k, start=start, range_len=block_k, key_order=key_order)
    keys = keys._replace(listed=listed, log_weight=far_bias) if index.shape[1] else keys
    found = block_attention(grouped, key, value, keys, **call)
    if found is None:
        sorted_index = start[:, :, None] + integers(block_k, device)  # (S, T, block_k)
        near = key_order.gather(1, sorted_index.clamp(max=length - 1).flatten(1)).view_as(sorted_index)
        bias = torch.cat((mask_bias(sorted_index < length, far_bias.dtype), far_bias), 2)[:, :, None]
        key_index = torch.cat((near, listed), 2)  # (S, T, block_k + M)
        blocks = grouped.unflatten(1, (num_blocks, block_k))  # (S, T, block_k, D)
        found = attend(blocks, take(key, key_index), take(value, key_index), bias, **call)
        found = Partial(found.out.flatten(1, 2), found.lse.flatten(1, 2))
    out = take(found.out, slot)  # (S, L, Dv)
    return Partial(out.unflatten(0, shape[:2]), found.lse.gather(1, slot).view(shape))


def group_by_block(query_block: Tensor, num_key_blocks: int, size: int) -> tuple[Tensor, Tensor]:
    """Distribute queries over blocks of `size` slots so that all queries of a block have the same block of keys.

    The number of blocks is fixed, and no larger than any distribution of the queries needs. The first query that needs
    a block begins it, so the slot of a query depends on earlier queries only. If later queries could move it to another
    block, its output could change in the last bit: rounding in a product may depend on where a matrix lies in memory.

    `query_block`, int64 (S, L), is the block of keys of each query.

    Returns:
        slot: int64 (S, L), the slot of each query among the slots of all blocks.
        block: int64 (S, T), the block of keys of each block of slots, T = ceil(L / size) + num_key_blocks - 1.
    """
    num_blocks = ceil_div(query_block.shape[1], size) + num_key_blocks - 1
    # The rank of each query among the queries with the same block of keys, in the order of the blocks of keys.
    order = query_block.argsort(dim=1, stable=True)
    sorted_block = query_block.gather(1, order)
    sorted_index = torch.arange(query_block.shape[1], device=query_block.device)
    rank = sorted_index - torch.searchsorted(sorted_block, sorted_block)  # (S, L)
    # Blocks of slots are numbered in the order of the queries that begin them.
    begins = torch.empty_like(order).scatter_(1, order, (rank % size == 0).to(order.dtype))
    number = (begins.cumsum(1) - 1).gather(1, order).gather(1, sorted_index - rank % size)  # (S, L)
    slot = torch.empty_like(order).scatter_(1, order, number * size + rank % size)
    # All queries of a block of slots write the same value.
    return slot, order.new_zeros(order.shape[0], num_blocks).scatter_(1, number, sorted_block)
