"""Which keys a block of queries attends to exactly: a window, blocks of a hash, or what exact rows say is better."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.blocks import ceil_div, inverse, take, valid_first
from hf_efficient_attn.ops.constants import constant, integers
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.hashing import block_starts, sort_by_same_hash
from hf_efficient_attn.ops.partial import accumulation_dtype
from hf_efficient_attn.ops.random import Seed
from hf_efficient_attn.ops.row_error import sample_rows

# Exact rows of a head by which its near field is chosen.
NUM_ROWS = 32
# How much less the blocks of a hash must leave than the window, as a factor and absolutely. Equal near fields, as for
# queries that are all 0, are thus never told apart by rounding, which differs between batches.
CLEARLY, LEAST = 0.99**0.5, 1e-3


class NearFieldOptions(NamedTuple):
    """What near field to plan.

    Attributes:
        near_field: "lsh", "window", or "auto": one of them for each head.
        block_size: keys of a block.
        num_hashes: hyperplanes of the hash.
        block_q: queries of a block; by default `block_size` for "lsh", and half of it otherwise.
    """

    near_field: str
    block_size: int
    num_hashes: int
    block_q: int | None = None


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
        query_rank: int64 (BH, Nq), the inverse of `query_order` if it is known.
        query_slot: int64 (BH, Nq), r T + t for the r-th query of block t, if it is known. The kernels of PyTorch give
            their output in this order.
    """

    query_order: Tensor | None
    key_order: Tensor | None
    start: Tensor
    block_q: int
    block_k: int
    num_keys: Tensor | int
    num_queries: Tensor | int
    query_rank: Tensor | None = None
    query_slot: Tensor | None = None


class ExactRows(NamedTuple):
    """Exact rows of the softmax matrix of each head.

    Attributes:
        sorted_index: int64 (BH, R), the queries of the rows.
        near_keys: int64 (BH, R, block_k), the positions of the keys in their near fields.
        weights: (BH, R, Nk), by position of the keys, in the accumulation dtype; 0 for rows without a valid query.
    """

    sorted_index: Tensor
    near_keys: Tensor
    weights: Tensor


def plan_window(
    query: Tensor, key: Tensor, block_k: int, key_mask: Tensor | None, block_q: int | None = None
) -> NearField:
    """Blocks of `block_k` keys centered on blocks of queries and moved inwards at the ends.

    A mask removes the masked keys from the order, and the same queries if there are as many queries as keys.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        block_k: keys of a block.
        key_mask: bool (BH, Nk), True for valid keys, or None.
        block_q: queries of a block; block_k / 2 by default.
    """
    (batch_heads, q_len, _), kv_len = query.shape, key.shape[1]
    block_q = max(1, block_k // 2) if block_q is None else block_q
    first = constant(window_starts, ceil_div(q_len, block_q), block_q, block_k, kv_len, device=query.device)
    if key_mask is None:
        return NearField(None, None, first.expand(batch_heads, -1), block_q, block_k, kv_len, q_len)
    num_keys = key_mask.sum(1, keepdim=True)
    order = valid_first(key_mask)
    start = torch.minimum(first, (num_keys - block_k).clamp(min=0))
    if q_len == kv_len:
        return NearField(order, order, start, block_q, block_k, num_keys, num_keys)
    return NearField(None, order, start, block_q, block_k, num_keys, q_len)


def window_starts(num_blocks: int, block_q: int, block_k: int, kv_len: int, device: torch.device) -> Tensor:
    """The first key of the window of each block of queries, without a mask: int64 (T,)."""
    first = torch.arange(num_blocks, device=device) * block_q - (block_k - block_q) // 2
    return first.clamp(0, kv_len - block_k)


def plan_lsh(
    query: Tensor,
    key: Tensor,
    block_size: int,
    key_mask: Tensor | None,
    num_hashes: int,
    seed: Seed,
    block_q: int | None = None,
) -> NearField:
    """Blocks of queries and blocks of keys in hash order (Zandieh et al. 2023, Appendix A).

    Queries and keys are sorted by the same hash (Definition A.3), and the queries are cut into equal blocks. The paper
    pairs the b-th block of queries with the b-th block of keys; see `block_starts` for the departure.

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
    query_mask = key_mask if q_len == kv_len else None
    (query_keys, query_order), (keys, key_order) = sort_by_same_hash(query, key, query_mask, key_mask, num_hashes, seed)
    num_keys = kv_len if key_mask is None else key_mask.sum(1, keepdim=True)
    num_queries = q_len if query_mask is None else num_keys
    start = block_starts(query_keys, keys, num_queries, num_keys, block_q, block_size)
    return NearField(query_order, key_order, start, block_q, block_size, num_keys, num_queries)


def plan_near_field(
    query: Tensor,
    key: Tensor,
    key_mask: Tensor | None,
    options: NearFieldOptions,
    *,
    scale: float,
    seed: Seed,
    num_rows: int = NUM_ROWS,
) -> tuple[NearField, ExactRows | None]:
    """The near field that `options` ask for, and the exact rows by which it was chosen, if it was.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D), with more keys than `options.block_size`.
        key_mask: bool (BH, Nk), True for valid keys, or None.
        options: the kind and the sizes.
        scale: factor of the attention scores.
        seed: of the hash and of the exact rows.
        num_rows: exact rows of "auto".
    """
    block_k, num_hashes = options.block_size, options.num_hashes
    if options.near_field == "lsh":
        return plan_lsh(query, key, block_k, key_mask, num_hashes, seed, options.block_q), None
    window = plan_window(query, key, block_k, key_mask, options.block_q)
    if options.near_field == "window":
        return window, None
    lsh = plan_lsh(query, key, block_k, key_mask, num_hashes, seed, window.block_q)
    return choose_near_field(query, key, (window, lsh), key_mask, scale=scale, seed=seed, num_rows=num_rows)


def choose_near_field(
    query: Tensor,
    key: Tensor,
    plans: tuple[NearField, NearField],
    key_mask: Tensor | None,
    *,
    scale: float,
    seed: Seed,
    num_rows: int = NUM_ROWS,
) -> tuple[NearField, ExactRows]:
    """For each head a window or blocks of a hash: which leaves less of the exact rows of some queries to the far field.

    What is left of a row is the sum of its softmax weights outside the near field. The error of a far field of m
    samples is about this sum divided by sqrt(m), so that the roots of the sums of its squares are compared. They do
    not depend on the values or on the draw. The blocks of the hash are taken where they leave clearly less.

    On activations of BERT (512 tokens, budget 128) the mean error of KDEformer is .271 with hash blocks, .153 with a
    window and .144 with this choice; on those of DeiT (1,025 tokens, budget 128) .177, .157 and .143. Comparing sums of
    squared weights, or 64 rows, changes little; 16 rows are too few for DeiT.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        plans: of `plan_window` and `plan_lsh`, with blocks of the same sizes.
        key_mask: bool (BH, Nk), True for valid keys, or None.
        scale: factor of the scores.
        seed: of the sampled rows.
        num_rows: number of rows.

    Returns:
        The near field, and the rows.
    """
    (batch_heads, q_len, _), kv_len, device = query.shape, key.shape[1], query.device
    window, lsh = plans
    assert lsh.query_order is not None and lsh.key_order is not None
    query_mask = key_mask if q_len == kv_len else None
    # The same rows in every head: without a mask their keys in the window depend on sizes only.
    count = 1 if query_mask is None else batch_heads
    rows = sample_rows(count, q_len, num_rows, query_mask, num_heads=1, seed=seed, device=device)
    positions = rows.queries.expand(batch_heads, -1)
    weights = row_weights(query, key, positions, key_mask, scale)
    if rows.valid is not None:
        weights = weights.masked_fill(~rows.valid.unsqueeze(2), 0.0)
    rank, in_order = inverse(lsh.query_order), integers(q_len, device)
    if window.query_order is not None:
        in_order = inverse(window.query_order)
    of_window = positions if window.query_order is None else in_order.gather(1, positions)
    of_lsh = rank.gather(1, positions)
    near_of_window, near_of_lsh = near_keys(window, of_window), near_keys(lsh, of_lsh)
    held = weights.gather(2, torch.cat((near_of_window, near_of_lsh), 2)).unflatten(2, (2, -1)).sum(3)
    # The margin is added to each row, as in `near_far_kernels`, so that sequences with and without a mask agree.
    outside = 1.0 - held
    outside[..., 1] += LEAST / math.sqrt(num_rows)
    if rows.valid is not None:
        outside = outside.masked_fill(~rows.valid.unsqueeze(2), 0.0)
    left = torch.linalg.vector_norm(outside, dim=1)
    take_lsh = left[:, 1:] < CLEARLY * left[:, :1]

    def order(of_window: Tensor | None, of_lsh: Tensor) -> Tensor:
        return torch.where(take_lsh, of_lsh, integers(of_lsh.shape[1], device) if of_window is None else of_window)

    near = window._replace(
        query_order=order(window.query_order, lsh.query_order),
        key_order=order(window.key_order, lsh.key_order),
        start=order(window.start, lsh.start),
        query_rank=order(in_order, rank),
    )
    of_rows = torch.where(take_lsh.unsqueeze(2), near_of_lsh, near_of_window)
    return near, ExactRows(order(of_window, of_lsh), of_rows, weights)


def row_weights(
    query: Tensor,
    key: Tensor,
    positions: Tensor,
    key_mask: Tensor | None,
    scale: float,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Rows of the softmax matrix, without a gradient.

    The scores of half precision inputs are computed in their dtype, since the rows only plan.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        positions: int64 (BH, R), the queries of the rows, or (R,) if they are the same in all heads.
        key_mask: bool (BH, Nk), True for valid keys, or None.
        scale: factor of the scores.
        dtype: of the result; by default the accumulation dtype.

    Returns:
        (BH, R, Nk); 0 for a row without a valid key.
    """
    acc_dtype = accumulation_dtype(query.dtype) if dtype is None else dtype
    if query.device.type == "cpu" and query.dtype == torch.float16:  # has no fast product there
        query, key = query.float(), key.float()
    queries = query.index_select(1, positions) if positions.ndim == 1 else take(query, positions)
    zero = constant(_zero, query.dtype, device=query.device)
    scores = torch.baddbmm(zero, queries, key.mT, beta=0, alpha=scale)
    if key_mask is None:
        return scores.softmax(2, dtype=acc_dtype)
    weights: Tensor = (scores.to(acc_dtype) + mask_bias(key_mask, acc_dtype)[:, None]).softmax(2)
    # NaN only without a single valid key.
    return weights.nan_to_num_(0.0)


def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(1, 1, 1, dtype=dtype, device=device)


def near_keys(near: NearField, sorted_index: Tensor) -> Tensor:
    """The positions of the keys near the queries at sorted indices: int64 (BH, p) -> (BH, p, block_k)."""
    index = near.start.gather(1, sorted_index // near.block_q).unsqueeze(2) + integers(near.block_k, near.start.device)
    return index if near.key_order is None else near.key_order.gather(1, index.flatten(1)).view_as(index)
