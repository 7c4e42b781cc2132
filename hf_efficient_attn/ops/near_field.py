"""Which keys a block of queries attends to exactly: a window, blocks of a hash, or what exact rows say is better."""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.blocks import ceil_div, inverse, take, valid_first
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.hashing import angular_hash, hyperplanes, matching_block_starts, sort_by_hash
from hf_efficient_attn.ops.partial import accumulation_dtype, exp_, safe_row_max
from hf_efficient_attn.ops.row_error import sample_rows

# Exact rows of a head by which its near field is chosen.
NUM_ROWS = 32
# How much less the blocks of a hash must leave than the window, as a factor and absolutely. Equal near fields, as for
# queries that are all 0, are thus never told apart by rounding, which differs between batches.
_CLEARLY, _LEAST = 0.99, 1e-6


class NearFieldOptions(NamedTuple):
    """Which near field ("lsh", "window", or "auto": one of them for each head), keys of a block, and hyperplanes."""

    near_field: str
    block_size: int
    num_hashes: int


class NearField(NamedTuple):
    """The block of keys of each of T blocks of queries.

    Attributes:
        query_order: int64 (BH, Nq), the query at each sorted index, or None if queries are in the order of positions.
        key_order: int64 (BH, Nk), the key at each sorted index, valid keys first, or None likewise.
        start: int64 (BH, T), the sorted index at which the block of keys starts.
        block_q: queries of a block.
        block_k: keys of a block.
        num_keys: number of valid keys, int64 (BH, 1) or an integer.
        num_queries: number of valid queries, likewise. Masked queries are known only if queries and keys are the same
            tokens.
    """

    query_order: Tensor | None
    key_order: Tensor | None
    start: Tensor
    block_q: int
    block_k: int
    num_keys: Tensor | int
    num_queries: Tensor | int


def plan_window(query: Tensor, key: Tensor, block_k: int, key_mask: Tensor | None) -> NearField:
    """Blocks of `block_k` keys centered on blocks of block_k / 2 queries and moved inwards at the ends.

    A mask removes the masked keys from the order, and the same queries if there are as many queries as keys.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        block_k: keys of a block.
        key_mask: bool (BH, Nk), True for valid keys, or None.
    """
    q_len, kv_len, block_q = query.shape[1], key.shape[1], max(1, block_k // 2)
    num_blocks = ceil_div(q_len, block_q)
    first = torch.arange(num_blocks, device=query.device) * block_q - (block_k - block_q) // 2
    if key_mask is None:
        start = first.clamp(0, kv_len - block_k).expand(query.shape[0], -1)
        return NearField(None, None, start, block_q, block_k, kv_len, q_len)
    num_keys = key_mask.sum(1, keepdim=True)
    order = valid_first(key_mask)
    start = torch.minimum(first.clamp(min=0), (num_keys - block_k).clamp(min=0))
    if q_len == kv_len:
        return NearField(order, order, start, block_q, block_k, num_keys, num_keys)
    return NearField(None, order, start, block_q, block_k, num_keys, q_len)


def plan_lsh(
    query: Tensor,
    key: Tensor,
    block_size: int,
    key_mask: Tensor | None,
    num_hashes: int,
    seed: int | Tensor,
    block_q: int | None = None,
) -> NearField:
    """Blocks of queries and blocks of keys in hash order (Zandieh et al. 2023, Appendix A).

    Queries and keys are sorted by the same hash (Definition A.3), and the queries are cut into equal blocks. The paper
    pairs the b-th block of queries with the b-th block of keys; see `matching_block_starts` for the departure.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        block_size: keys of a block.
        key_mask: bool (BH, Nk), True for valid keys, or None. It also masks the queries if there are as many.
        num_hashes: hyperplanes of the hash.
        seed: seed of the hyperplanes.
        block_q: queries of a block; `block_size` by default.
    """
    q_len, kv_len, block_q = query.shape[1], key.shape[1], block_size if block_q is None else block_q
    planes = hyperplanes(query.shape[2], num_hashes, seed, query.device)
    query_mask = key_mask if q_len == kv_len else None
    query_order, query_codes = sort_by_hash(angular_hash(query, planes), query_mask)
    key_order, key_codes = sort_by_hash(angular_hash(key, planes), key_mask)
    num_keys = kv_len if key_mask is None else key_mask.sum(1, keepdim=True)
    num_queries = q_len if query_mask is None else num_keys
    start = matching_block_starts(query_codes, key_codes, num_queries, num_keys, block_q, block_size)
    return NearField(query_order, key_order, start, block_q, block_size, num_keys, num_queries)


def plan_near_field(
    query: Tensor,
    key: Tensor,
    key_mask: Tensor | None,
    options: NearFieldOptions,
    *,
    scale: float,
    seed: int | Tensor,
    batch: int,
) -> NearField:
    """The near field that `options` ask for.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D), with more keys than `options.block_size`.
        key_mask: bool (BH, Nk), True for valid keys, or None.
        options: the kind and the sizes.
        scale: factor of the attention scores.
        seed: of the hash and of the exact rows.
        batch: B. Sequences of a batch use the same random numbers.
    """
    block_k, num_hashes = options.block_size, options.num_hashes
    if options.near_field == "lsh":
        return plan_lsh(query, key, block_k, key_mask, num_hashes, seed)
    window = plan_window(query, key, block_k, key_mask)
    if options.near_field == "window":
        return window
    lsh = plan_lsh(query, key, block_k, key_mask, num_hashes, seed, window.block_q)
    return choose_near_field(query, key, (window, lsh), key_mask, scale=scale, seed=seed, batch=batch)


def choose_near_field(
    query: Tensor,
    key: Tensor,
    plans: tuple[NearField, NearField],
    key_mask: Tensor | None,
    *,
    scale: float,
    seed: int | Tensor,
    batch: int,
) -> NearField:
    """For each head the one of two near fields that leaves less of the exact rows of some queries to the far field.

    What is left of a row is the sum of its softmax weights outside the near field. The error of a far field of m
    samples is about this sum divided by sqrt(m), so that the sums of its squares over the rows are compared. They do
    not depend on the values or on the draw. The second plan is taken where it leaves clearly less.

    On activations of BERT (512 tokens, budget 128) the mean error of KDEformer is .277 with hash blocks, .153 with a
    window, .150 with this choice and .145 with the better one of each head; on those of DeiT (1,025 tokens, budget 128)
    .203, .188, .176 and .172. Comparing sums of squared weights, or 64 rows, changes little; 16 rows are too few for
    DeiT.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        plans: with blocks of the same sizes.
        key_mask: bool (BH, Nk), True for valid keys, or None.
        scale: factor of the scores.
        seed: of the sampled rows.
        batch: B.
    """
    (batch_heads, q_len, _), kv_len, acc_dtype = query.shape, key.shape[1], accumulation_dtype(query.dtype)
    query_mask = key_mask if q_len == kv_len else None
    rows = sample_rows(
        batch_heads, q_len, NUM_ROWS, query_mask, num_heads=batch_heads // batch, seed=seed, device=query.device
    )
    weights = (take(query, rows.queries).to(acc_dtype) * scale) @ key.to(acc_dtype).mT
    if key_mask is not None:
        weights = weights + mask_bias(key_mask, acc_dtype)[:, None]
    # In place, because new memory takes longer than the exponentials.
    weights = exp_(weights.sub_(safe_row_max(weights.amax(2, keepdim=True))))
    total = weights.sum(2).clamp(min=torch.finfo(acc_dtype).tiny)

    def left(plan: NearField) -> Tensor:
        index = rows.queries
        if plan.query_order is not None:
            index = inverse(plan.query_order).gather(1, index)
        outside = (1.0 - weights.gather(2, near_keys(plan, index)).sum(2) / total).square()
        return (outside if rows.valid is None else outside.masked_fill(~rows.valid, 0.0)).sum(1, keepdim=True)

    first, second = plans
    take_second = left(second) + _LEAST < _CLEARLY * left(first)

    def order(of_first: Tensor | None, of_second: Tensor | None, length: int) -> Tensor:
        positions = torch.arange(length, device=query.device).expand(batch_heads, -1)
        of_first, of_second = (positions if x is None else x for x in (of_first, of_second))
        return torch.where(take_second, of_second, of_first)

    return first._replace(
        query_order=order(first.query_order, second.query_order, q_len),
        key_order=order(first.key_order, second.key_order, kv_len),
        start=torch.where(take_second, second.start, first.start),
    )


def near_keys(near: NearField, sorted_index: Tensor) -> Tensor:
    """The positions of the keys near the queries at sorted indices: int64 (BH, p) -> (BH, p, block_k)."""
    index = near.start.gather(1, sorted_index // near.block_q).unsqueeze(2)
    index = index + torch.arange(near.block_k, device=index.device)
    return index if near.key_order is None else near.key_order.gather(1, index.flatten(1)).view_as(index)
