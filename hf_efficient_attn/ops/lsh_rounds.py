"""Rounds of locality-sensitive hashing (Kitaev, Kaiser, Levskaya, ICLR 2020, section 2): plan, attention, dense form.

In every round the queries and the keys are sorted by the bucket of a new random hash. A block of queries that are
neighbors in this order attends to a block of keys that are neighbors in the same order, and the rounds are merged.
`Rounds` is the plan. It is computed without a gradient, and the dense form is computed from the same plan.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.blocks import ceil_div, chunked_over_heads, inverse, take, valid_first
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.hashing import matching_block_starts, sort_by_hash
from hf_efficient_attn.ops.partial import Partial, accumulation_dtype, merge, partial_attention
from hf_efficient_attn.ops.random import normal

_STREAM = 45
# So far below any score that its exponential is 0, but finite, because the product of infinity and 0 is NaN.
_EXCLUDED = 1e30


class Rounds(NamedTuple):
    """The block of keys of each of T blocks of queries, in each of S rounds.

    Attributes:
        query_order: int64 (BH, S, Nq), the query at each sorted index. Block t starts at sorted index t * block_q.
        key_order: int64 (BH, S, Nk), the key at each sorted index, valid keys first.
        start: int64 (BH, S, T), the sorted index at which the block of keys starts.
        block_q: queries of a block.
        block_k: keys of a block.
        num_keys: int64 (BH, 1), the number of valid keys, or None if all are valid.
    """

    query_order: Tensor
    key_order: Tensor
    start: Tensor
    block_q: int
    block_k: int
    num_keys: Tensor | None


def rotations(
    kv_len: int, block_size: int, rounds: int, head_dim: int, seed: int | Tensor, device: torch.device
) -> Tensor:
    """Random directions of every round for up to `kv_len` keys: (h, rounds, 2, D), float64, standard normal.

    Fewer keys use the first of the h directions: see `bucket_halves`.
    """
    most = math.isqrt(ceil_div(kv_len, 2 * block_size) - 1) + 1
    return normal((most, rounds, 2, head_dim), seed, _STREAM, device)


def bucket_halves(num_keys: Tensor, block_size: int, most: int) -> tuple[Tensor, Tensor]:
    """Half of each of the two factors of the number of buckets, from 1 to `most`: int64 of the shape of `num_keys`.

    There are about 2 * num_keys / block_size buckets, so that a bucket has half a block on average (the paper's
    m = 2 l / n_buckets). The first half is the smallest h for which 2h * 2h buckets suffice. The second half is the
    smallest that suffices together with the first.
    """
    smaller = torch.arange(1, most, device=num_keys.device)
    first = 1 + (2 * block_size * smaller * smaller < num_keys.unsqueeze(-1)).sum(-1)
    second = (num_keys + (2 * block_size * first - 1)) // (2 * block_size * first)
    return first, second.clamp(min=1)


def bucket_codes(x: Tensor, directions: Tensor, halves: tuple[Tensor, Tensor], center: Tensor | None = None) -> Tensor:
    """The bucket of every token in every round.

    A bucket is a pair of hashes argmax([xR; -xR]), where R are the first directions of each factor. A single hash with
    as many buckets would cost their number times N, which is quadratic for blocks of constant size.

    Args:
        x: (BH, N, D).
        directions: (h, S, 2, D), from `rotations`.
        halves: int64 (BH or 1, 1) each, from `bucket_halves`.
        center: (BH, D), which is subtracted from x, or None.

    Returns:
        int64 (BH, S, N).
    """
    most, rounds, factors, head_dim = directions.shape
    acc_dtype = accumulation_dtype(x.dtype)
    half = torch.stack([h.flatten() for h in halves], 1)
    used = torch.arange(most, device=x.device)[:, None] < half[:, None]
    # An unused direction gives 0, which never has the largest absolute value.
    directions = (directions * used[:, :, None, :, None]).permute(0, 2, 3, 1, 4).reshape(len(half), -1, head_dim)
    directions = directions.to(acc_dtype)
    projected = directions @ x.detach().to(acc_dtype).transpose(1, 2)
    if center is not None:  # subtracted from the products, because they are fewer numbers
        projected -= directions @ center.unsqueeze(2)
    projected = projected.view(x.shape[0], rounds, factors, most, x.shape[1])
    # The largest absolute value, one direction at a time: several times as fast as a maximum with its index.
    largest, *others = projected.abs().unbind(3)
    index = torch.zeros_like(largest, dtype=torch.int16)
    for h, other in enumerate(others, 1):
        index = torch.maximum(index, (other > largest).to(torch.int16).mul_(h))
        largest = torch.maximum(largest, other)
    index = index.long()
    bucket = index + (projected.gather(3, index.unsqueeze(3)).squeeze(3) < 0) * half[:, None, :, None]
    return bucket[:, :, 0] * (2 * half[:, 1, None, None]) + bucket[:, :, 1]


def plan_rounds(
    query: Tensor, key: Tensor, key_mask: Tensor | None, *, block_size: int, rounds: int, seed: int | Tensor
) -> Rounds:
    """Blocks of `block_size` queries, each with 2 * block_size keys: its own block and half of each neighboring block.

    If the keys are not the queries, their mean is subtracted before hashing. Softmax attention does not change if the
    same vector is added to all keys, but a large vector would put all keys into one bucket.

    A sequence with at most rounds * 2 * block_size keys is computed exactly: its blocks of keys are disjoint parts of
    one order.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D), or the same tensor as `query`. Otherwise it is 0 for masked keys.
        key_mask: bool (BH, Nk), True for valid keys, or None. It also masks the queries if there are as many.
        block_size: queries of a block.
        rounds: number of hashes.
        seed: seed of the hashes.
    """
    with torch.no_grad():
        (batch_heads, q_len, head_dim), kv_len, block_k = query.shape, key.shape[1], 2 * block_size
        if key_mask is None and kv_len <= rounds * block_k:
            key_mask = torch.ones(batch_heads, kv_len, dtype=torch.bool, device=key.device)
        round_mask = None if key_mask is None else key_mask[:, None]
        query_mask = round_mask if q_len == kv_len else None
        num_keys = torch.full((1, 1), kv_len, device=key.device) if key_mask is None else key_mask.sum(1, keepdim=True)
        directions = rotations(kv_len, block_size, rounds, head_dim, seed, key.device)
        halves = bucket_halves(num_keys, block_size, len(directions))
        if query is key:
            key_order, key_codes = query_order, query_codes = sort_by_hash(
                bucket_codes(key, directions, halves), round_mask
            )
        else:
            center = key.sum(1, dtype=accumulation_dtype(key.dtype)) / num_keys.clamp(min=1)
            key_order, key_codes = sort_by_hash(bucket_codes(key, directions, halves, center), round_mask)
            query_order, query_codes = sort_by_hash(bucket_codes(query, directions, halves), query_mask)
        num_queries = q_len if query_mask is None else num_keys[:, :, None]
        start = matching_block_starts(query_codes, key_codes, num_queries, num_keys[:, :, None], block_size, block_k)
        if key_mask is None:
            return Rounds(query_order, key_order, start, block_size, block_k, None)
        short = (num_keys <= rounds * block_k)[:, :, None]
        disjoint = torch.arange(rounds, device=key.device)[:, None] * block_k
        key_order = torch.where(short, valid_first(key_mask)[:, None], key_order)
        return Rounds(query_order, key_order, torch.where(short, disjoint, start), block_size, block_k, num_keys)


def rounds_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: Rounds, *, others: bool, scale: float, dropout_p: float = 0.0
) -> Tensor:
    """The attention of a plan.

    A pair that several rounds contain counts in the first of them only. The paper gives it the weight 1 / N_ij in each
    of its N_ij rounds (Eq. 6-7), which has the same sum. With the first round only, that round needs no bias, and
    dropout is applied once to each pair.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        value: (BH, Nk, Dv).
        plan: the rounds.
        others: whether a token attends to itself only if it has no other key. Then Nq = Nk.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        (BH, Nq, Dv).
    """
    query_rank, key_rank = (inverse(x.flatten(0, 1)).view_as(x) for x in (plan.query_order, plan.key_order))
    # The start of the block of keys of each query in each round.
    query_start = plan.start.gather(2, query_rank // plan.block_q)

    def some_heads(query: Tensor, key: Tensor, value: Tensor, num_keys: Tensor | None, *orders: Tensor) -> Tensor:
        query_order, query_rank, key_order, key_rank, start, query_start = orders
        num_blocks = start.shape[2]
        missing = num_blocks * plan.block_q - query.shape[1]
        partials = []
        for s in range(start.shape[1]):
            # The last block is padded with query 0; the result for the padding is not used.
            queries = pad(query_order[:, s], (0, missing)).unflatten(1, (num_blocks, plan.block_q))
            index = start[:, s, :, None] + torch.arange(plan.block_k, device=query.device)
            keys = key_order[:, s].gather(1, index.clamp(max=key.shape[1] - 1).flatten(1)).view_as(index)
            masked = None if num_keys is None else index >= num_keys[:, :, None]
            earlier = []
            for t in range(s):
                # Round t contains a pair if |2 * (rank of the key) - center of the query's block of keys| < block_k.
                rank = key_rank[:, t].gather(1, keys.flatten(1)).view_as(keys)
                first = query_start[:, t].gather(1, queries.flatten(1)).view_as(queries)
                earlier.append((2 * rank, 2 * first + (plan.block_k - 1)))
            bias = _round_bias(query.dtype, queries, keys, masked, earlier, others)
            block = take(query, queries)
            part = partial_attention(block, take(key, keys), take(value, keys), bias, scale=scale, dropout_p=dropout_p)
            rank = query_rank[:, s]
            partials.append(Partial(take(part.out.flatten(1, 2), rank), part.lse.flatten(1).gather(1, rank)))
        out, lse = merge(*partials)
        return torch.where((lse == -torch.inf).unsqueeze(-1), value, out) if others else out

    orders = (plan.query_order, query_rank, plan.key_order, key_rank, plan.start, query_start)
    return chunked_over_heads(some_heads, query, key, value, plan.num_keys, *orders)


def _round_bias(
    dtype: torch.dtype,
    queries: Tensor,
    keys: Tensor,
    masked: Tensor | None,
    earlier: list[tuple[Tensor, Tensor]],
    others: bool,
) -> Tensor | None:
    """The bias of the pairs of a round, (BH, T, block_q or 1, block_k), or None if all pairs count.

    It is -inf for masked keys and -`_EXCLUDED` for pairs of an earlier round, whose weight is then nothing beside what
    their query has in that round.

    Args:
        dtype: dtype of the queries.
        queries: int64 (BH, T, block_q).
        keys: int64 (BH, T, block_k).
        masked: bool (BH, T, block_k), or None.
        earlier: for each earlier round twice the ranks of these keys, (BH, T, block_k), and twice the centers of the
            blocks of keys of these queries, (BH, T, block_q).
        others: exclude the pairs of a token with itself.
    """
    acc_dtype, bias, block_k = accumulation_dtype(dtype), None, keys.shape[2]
    for rank, center in earlier:
        # Twice a rank is even and a center is odd, because block_k is even. So the distance is at most block_k - 1
        # within the block of keys, and at least block_k + 1 outside.
        gap = (rank.to(acc_dtype)[:, :, None] - center.to(acc_dtype)[:, :, :, None]).abs_()
        # Several operations on one buffer are several times as fast as a masked fill.
        excluded = gap.clamp_(block_k - 1, block_k).sub_(block_k).mul_(_EXCLUDED)
        bias = excluded if bias is None else bias.add_(excluded)
    if others:
        itself = mask_bias(keys[:, :, None] != queries[:, :, :, None], dtype)
        bias = itself if bias is None else bias.add_(itself)
    if masked is not None:
        key_bias = mask_bias(~masked[:, :, None], dtype)
        bias = key_bias if bias is None else bias.add_(key_bias)
    return bias


def dense_pairs(plan: Rounds) -> Tensor:
    """The readable form: bool (BH, Nq, Nk), True for the pairs of any round."""
    (batch_heads, rounds, q_len), kv_len = plan.query_order.shape, plan.key_order.shape[2]
    pairs = torch.zeros(batch_heads, q_len, kv_len, dtype=torch.bool, device=plan.query_order.device)
    for a in range(batch_heads):
        num_keys = kv_len if plan.num_keys is None else int(plan.num_keys[a])
        for s in range(rounds):
            for t, start in enumerate(plan.start[a, s].tolist()):
                queries = plan.query_order[a, s, t * plan.block_q : (t + 1) * plan.block_q]
                keys = plan.key_order[a, s, start : min(start + plan.block_k, num_keys)]
                pairs[a, queries[:, None], keys] = True
    return pairs
