"""The plan of `hf_efficient_attn.ops.near_far` with few kernels, for accelerators.

It is the plan of `choose_near_field`, `sampling_scores` and `sample_keys` for as many queries as keys, without a mask,
where each head chooses its near field and each block of queries draws a systematic sample. They make the same choices
for the valid tokens of a masked sequence, so that padding does not change the output. Only weights of exact rows, which
have the dtype of bfloat16 inputs here, are rounded in another way.
"""

import math

import torch
from torch import Tensor

from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.blocks import ceil_div
from hf_efficient_attn.ops.constants import constant, integers
from hf_efficient_attn.ops.hashing import block_middles, hash_keys, negated_planes
from hf_efficient_attn.ops.near_far_sampling import (
    LEAST_SCORE,
    FarField,
    SamplingOptions,
    regular_step,
    sample_offsets,
    sample_outside,
)
from hf_efficient_attn.ops.near_field import CLEARLY, LEAST, NearField, NearFieldOptions, row_weights, window_starts
from hf_efficient_attn.ops.partial import accumulation_dtype
from hf_efficient_attn.ops.random import Seed
from hf_efficient_attn.ops.row_error import sample_rows
from hf_efficient_attn.ops.sampling import sample_with_few_kernels


def plan_with_few_kernels(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    near_options: NearFieldOptions,
    options: SamplingOptions,
    num_rows: int,
) -> tuple[NearField, FarField] | None:
    """The plan, without a gradient, or None if this form does not compute it.

    Args:
        query: (BH, N, D).
        key: (BH, Nk, D), with more keys than `near_options.block_size`.
        value: (BH, Nk, Dv).
        key_mask: bool (BH, Nk), True for valid keys, or None.
        near_options: the near field.
        options: the far field.
        num_rows: exact rows by which the near field is chosen, and which are the probes.
    """
    form, length = backend(query, key, value), key.shape[1]
    if form == "cpu" or key_mask is not None or query.shape[1] != length or near_options.near_field != "auto":
        return None
    own_samples = options.num_samples > 0 and not (options.shared or options.independent)
    if not own_samples or options.scores not in ("probe", "uniform"):
        return None
    near, near_rows, weights = _choose_near_field(query, key, near_options, options, num_rows)
    if options.scores == "uniform":
        offset = sample_offsets(options, len(query), near.start.shape[1], query.device)
        return near, sample_outside(near, options.num_samples, offset, accumulation_dtype(query.dtype))
    options = options._replace(groups=min(options.groups, options.num_probes))
    scores = _scores(value, near, near_rows, weights, options)
    by_library = form == "library"  # whose kernels take a bias in the dtype of the queries
    return near, _sample(scores, near, options, query.dtype if by_library else accumulation_dtype(query.dtype))


def _choose_near_field(
    query: Tensor, key: Tensor, near_options: NearFieldOptions, options: SamplingOptions, num_rows: int
) -> tuple[NearField, Tensor, Tensor]:
    """The choice of `choose_near_field`.

    Returns:
        The near field; int64 (BH, R + 1, block_k + 1), the keys near to each row and, last, the block of its query; and
        the rows (BH, R + 1, N), of which `_scores` overwrites the last.
    """
    (batch_heads, length, _), device, seed = query.shape, query.device, options.seed
    block_q, block_k = near_options.block_q, near_options.block_size
    assert block_q is not None
    sizes = (length, block_q, block_k)
    orders, starts = _hash_order(query, key, block_q, block_k, near_options.num_hashes, seed)
    key_order, slot = orders[batch_heads : 2 * batch_heads], orders[2 * batch_heads :]
    arguments = (*sizes, num_rows, seed)
    rows, of_window = (constant(_rows, i, *arguments, device=device) for i in range(2))
    # A softmax of bfloat16 numbers that is one of float32 numbers takes a kernel more.
    dtype = query.dtype if query.dtype == torch.bfloat16 else accumulation_dtype(query.dtype)
    weights = row_weights(query, key, rows, None, options.scale, dtype)
    block = slot.index_select(1, rows) % starts.shape[1]
    near = starts.gather(1, block).unsqueeze(2) + integers(block_k, device)
    near = key_order.gather(1, near.flatten(1)).view_as(near)
    near = torch.cat((of_window.expand(batch_heads, -1, -1), near, block.unsqueeze(2)), 2)
    # What the window and the blocks of the hash leave of each row, with a margin for the window.
    affine = (num_rows, block_k, dtype)
    first, factors = (constant(make, *affine, device=device) for make in (_margins, _minus_sums))
    outside = torch.baddbmm(first, weights.gather(2, near), factors.expand(batch_heads, -1, -1))
    left = torch.linalg.vector_norm(outside[:, :-1], dim=1, dtype=accumulation_dtype(dtype))
    take_lsh = left[:, 1:] < left[:, :1]
    by_position = constant(_positions, length, block_q, device=device)
    orders = torch.where(take_lsh, orders.view(3, batch_heads, length), by_position)
    of_blocks = constant(window_starts, starts.shape[1], *sizes[1:], length, device=device)
    start = torch.where(take_lsh, starts, of_blocks)
    near = torch.where(take_lsh.unsqueeze(2), near[..., block_k + 1 :], near[..., : block_k + 1])
    field = NearField(orders[0], orders[1], start, block_q, block_k, length, length, query_slot=orders[2])
    return field, near, weights


def _hash_order(
    query: Tensor, key: Tensor, block_q: int, block_k: int, num_hashes: int, seed: Seed
) -> tuple[Tensor, Tensor]:
    """Queries and keys in the order of a hash.

    Returns:
        int64 (3 BH, N): the order of the queries, that of the keys, and `NearField.query_slot`. And int64 (BH, T), the
        sorted index at which the block of keys of each block of queries starts, as `block_starts` has it.
    """
    (batch_heads, length, _), device = query.shape, query.device
    planes = negated_planes(query, num_hashes, seed).expand(batch_heads, -1, -1)
    sides = query.new_empty(2 * batch_heads, num_hashes, length)
    for x, part in zip((query, key), sides.split(batch_heads), strict=True):
        torch.bmm(planes, x.detach().mT, out=part)
    orders = torch.empty(3 * batch_heads, length, dtype=torch.int64, device=device)
    hashes = hash_keys(sides)
    both = torch.empty_like(hashes), orders[: 2 * batch_heads]
    torch.sort(hashes, dim=1, stable=True, out=both)
    slots = constant(_positions, length, block_q, device=device)[2].expand(batch_heads, -1)
    orders[2 * batch_heads :].scatter_(1, orders[:batch_heads], slots)
    of_queries, of_keys = both[0].split(batch_heads)
    of_middle = of_queries.index_select(1, constant(block_middles, length, block_q, device=device))
    # A block of keys starts block_k / 2 before the middle, but not before the first key or after the last start. The
    # search is among as many keys as there are starts, so that its result is within these limits.
    candidates = of_keys.narrow(1, block_k // 2, length - block_k).contiguous()
    return orders, torch.searchsorted(candidates, of_middle)


def _positions(length: int, block_q: int, device: torch.device) -> Tensor:
    """The orders of `_hash_order` for the order of the positions: int64 (3, 1, N)."""
    position = torch.arange(length, device=device)
    slot = position % block_q * ceil_div(length, block_q) + position // block_q
    return torch.stack((position, position, slot)).unsqueeze(1)


def _rows(i: int, length: int, block_q: int, block_k: int, num_rows: int, seed: Seed, device: torch.device) -> Tensor:
    """The queries of the rows, int64 (R + 1,), and what `_choose_near_field` returns of them for windows, (1, ...).

    The last row is the first one once more. `_scores` overwrites it.
    """
    rows = sample_rows(1, length, num_rows, num_heads=1, seed=seed, device=device).queries[0]
    rows = torch.cat((rows, rows[:1]))
    if i == 0:
        return rows
    block = rows // block_q
    start = window_starts(ceil_div(length, block_q), block_q, block_k, length, device)[block]
    return torch.cat((start[:, None] + torch.arange(block_k, device=device), block[:, None]), 1)[None]


def _margins(num_rows: int, block_k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a row has before its near field is subtracted: (1, 1, 2), for the window and for the blocks of the hash."""
    of_lsh = torch.full((1, 1, 1), 1.0 + LEAST / math.sqrt(num_rows), dtype=dtype, device=device)
    return torch.cat((torch.full_like(of_lsh, CLEARLY), of_lsh), 2)


def _minus_sums(num_rows: int, block_k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(1, 2 block_k + 2, 2), by which the weights in both near fields are summed and subtracted. Blocks count 0."""
    factors = torch.zeros(1, 2, block_k + 1, 2, dtype=dtype, device=device)
    factors[:, 0, :block_k, 0].fill_(-CLEARLY)
    factors[:, 1, :block_k, 1].fill_(-1.0)
    return factors.flatten(1, 2)


def _scores(value: Tensor, near: NearField, near_rows: Tensor, weights: Tensor, options: SamplingOptions) -> Tensor:
    """The unnormalized sampling probabilities of each group, as `sampling_scores` has them: (BH, G, N), sorted.

    `near_rows` and `weights` are of `_choose_near_field`. The weights are overwritten.
    """
    (_, length, _), groups, dtype, device = value.shape, options.groups, weights.dtype, value.device
    first, step = regular_step(length)
    sample = value[:, first::step]
    tiny = constant(_full, torch.finfo(value.dtype).tiny, value.dtype, device=device)
    gram = torch.baddbmm(tiny, sample.mT, sample, alpha=1 / sample.shape[1])
    norm_squared = torch.linalg.vector_norm(gram, dim=(1, 2), dtype=dtype).unsqueeze(1)
    # The norms of the values are one more row, so that one product adds up the squares of all. A group has R / G rows
    # on average, and all scores are multiplied with N.
    sizes = (near.start.shape[1], groups, length**2 * groups / (weights.shape[1] - 1))
    factors = constant(_factors, *sizes, dtype, device=device)[near_rows[..., -1]]
    torch.reciprocal(norm_squared.expand(-1, groups), out=factors[:, -1])
    weights[:, :-1].scatter_(2, near_rows[:, :-1, :-1], 0.0)
    torch.linalg.vector_norm(value, dim=-1, dtype=dtype, out=weights[:, -1])
    least = constant(_full, LEAST_SCORE, dtype, device=device)
    scores = torch.baddbmm(least, factors.mT, weights.square_())
    assert near.key_order is not None
    return scores.gather(2, near.key_order.unsqueeze(1).expand_as(scores))


def _full(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((1, 1, 1), number, dtype=dtype, device=device)


def _factors(num_blocks: int, groups: int, factor: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The factor for the group of each block, and 0 for the others: (T, G)."""
    group = torch.arange(num_blocks, device=device) // ceil_div(num_blocks, groups)
    return (group[:, None] == torch.arange(groups, device=device)).to(dtype) * factor


def _sample(scores: Tensor, near: NearField, options: SamplingOptions, dtype: torch.dtype) -> FarField:
    """A systematic sample for each block of queries, by the scores (BH, G, N) of its group.

    The inclusion probabilities are min(1, score / limit), see `inclusion_probabilities`.
    """
    (batch_heads, groups, _), (num_samples, num_blocks) = scores.shape, (options.num_samples, near.start.shape[1])
    own = ceil_div(num_blocks, groups)
    offset = sample_offsets(options, batch_heads, own * groups, scores.device).view(batch_heads, groups, own)
    index, log_weight = sample_with_few_kernels(scores, num_samples, offset, dtype)
    index, log_weight = (x.view(batch_heads, -1, num_samples)[:, :num_blocks] for x in (index, log_weight))
    return FarField(index, log_weight, may_be_unused=False)
