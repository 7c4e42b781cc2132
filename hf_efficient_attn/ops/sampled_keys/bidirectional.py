"""An exact near field and a far field of sampled keys, in the bidirectional form.

Queries and keys are sorted by a hash, or stay in the order of their positions. The queries are cut into blocks. A block
of queries attends to two sets of keys, which share one softmax:

- its near field, `block_size` keys that follow one another in their order, exactly;
- its far field, keys that are sampled outside of the near field.

A `NearField` and a `FarField` are the plan of a call, which is computed without a gradient. The readable form,
`dense_log_weights`, uses the same plan.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.attend import attend, block_attention, keeps_pairs, output_of, takes_blocks
from hf_efficient_attn.ops.backends.devices import accumulation_dtype
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.exact import bias_between
from hf_efficient_attn.ops.index import ceil_div, clamp_index, integers, inverse, pad_to_blocks, take, valid_first
from hf_efficient_attn.ops.sampled_keys.hashing import NearField, key_ranges, plan_lsh
from hf_efficient_attn.ops.sampled_keys.sampling import (
    FarField,
    SamplingOptions,
    column_scores,
    density_norms,
    query_groups,
    row_weights,
    sample_keys,
    sample_outside,
)
from hf_efficient_attn.ops.slices import slice_size, sliced
from hf_efficient_attn.ops.strata import strata, stratified_ranks

# The number of exact rows of a head by which its near field is chosen.
NUM_ROWS = 32
# The number of exact rows of a head if these also are the probes. They are not spread evenly over the groups, and with
# 32 of them the error of KDEformer on BERT with 4,096 tokens is 2 % larger.
_PROBED_ROWS = 48
# A head gets blocks of a hash only if they leave less to the far field than a window, by this factor and difference. If
# both leave the same, as for queries that are all 0, rounding would decide, which differs between batches.
_CLEARLY = 0.99**0.5
_LEAST = 1e-3
# The offsets of a head's blocks are multiples of the plastic ratio modulo 1. (Heads use multiples of the golden ratio.)
_TURN = 0.7548776662466927
# Streams of random numbers.
_PROBES = 11
_SAMPLES = 12
_ROWS = 31


class ExactRows(NamedTuple):
    """Exact rows of the softmax matrix of each head."""

    sorted_index: Tensor  # int64 (BH, R), the queries of the rows
    near_keys: Tensor  # int64 (BH, R, block_k), the positions of the keys in the queries' near fields
    weights: Tensor  # (BH, R, Nk), by position of the keys, in the accumulation dtype
    valid: Tensor | None = None  # bool (BH, R), False if there are fewer queries than rows; None if all are valid


def make_plan(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, options: SamplingOptions
) -> tuple[NearField, FarField]:
    """Plan the near and the far field, without a gradient.

    There are more keys than `options.block_size`. Each block of queries has its own sample, by the scores of its group.
    """
    with torch.no_grad():
        num_samples = options.num_samples
        kind = options.scores
        num_rows = max(_PROBED_ROWS, options.num_probes) if kind == "probe" else NUM_ROWS
        near, rows = plan_near_field(query, key, key_mask, options, num_rows)
        short = before = None
        if isinstance(near.num_keys, Tensor):
            # Sequences whose valid keys fit into the budget attend to all of them, as they would without padding.
            # Every block of queries gets the last block of keys. The keys before it are all sampled, with weight 1.
            short = near.num_keys <= near.block_k + num_samples  # (BH, 1)
            before = (near.num_keys - near.block_k).clamp(min=0)
            near = near._replace(start=torch.where(short, before, near.start))
        num_blocks = 1 if options.shared else near.start.shape[1]
        offset = options.draws.offsets(query.shape[0] // options.batch, _SAMPLES).unsqueeze(1)  # (H, 1)
        offset = (offset + _TURN * integers(num_blocks, query.device).to(offset.dtype)).frac().repeat(options.batch, 1)
        if not num_samples or (kind == "uniform" and not (options.shared or options.independent)):
            return near, sample_outside(near, num_samples, offset, accumulation_dtype(query.dtype))
        scores, group = sampling_scores(query, key, value, key_mask, near, rows, options)
        if short is not None and before is not None:
            only = (integers(key.shape[1], key.device) < before).to(scores.dtype).unsqueeze(1)  # (BH, 1, Nk)
            scores = torch.where(short.unsqueeze(2), only, scores)  # (BH, G, Nk)
        far = sample_keys(scores, offset, options, group)
        if short is not None and options.independent:
            # Sampling with replacement would not take every remaining key.
            every = sample_keys(scores, offset, options._replace(independent=False), group)
            far = FarField(*(torch.where(short.unsqueeze(2), *x) for x in zip(every, far, strict=True)))
        return near, far


def plan_window(
    query: Tensor, key: Tensor, block_k: int, key_mask: Tensor | None, block_q: int | None = None
) -> NearField:
    """Center blocks of `block_k` keys on blocks of `block_q` queries, and move them inwards at the ends.

    There are `block_k` / 2 queries by default. A mask removes the masked keys from the order, and the same queries if
    there are as many queries as keys.
    """
    batch_heads, q_len, _ = query.shape
    kv_len = key.shape[1]
    device = query.device
    block_q = max(1, block_k // 2) if block_q is None else block_q
    first = torch.arange(ceil_div(q_len, block_q), device=device) * block_q - (block_k - block_q) // 2
    start = first.clamp_(0, kv_len - block_k).expand(batch_heads, -1)  # (BH, T)
    if key_mask is None:
        return NearField(None, None, start, block_q, block_k, kv_len, q_len)
    order = valid_first(key_mask)
    num_keys = key_mask.sum(1, keepdim=True)
    start = clamp_index(start.clone(), num_keys - block_k)
    query_order, num_queries = (order, num_keys) if q_len == kv_len else (None, q_len)
    return NearField(query_order, order, start, block_q, block_k, num_keys, num_queries)


def plan_near_field(
    query: Tensor, key: Tensor, key_mask: Tensor | None, options: SamplingOptions, num_rows: int = NUM_ROWS
) -> tuple[NearField, ExactRows | None]:
    """Plan the near field. With "auto", also return the `num_rows` exact rows by which it was chosen.

    With "auto" a head gets a window or blocks of the hash: the one that leaves less of the exact rows to the far field.

    The error of a far field of m samples is about the sum of a row's weights outside of the near field, divided by
    sqrt(m). So the root mean square of the sums is compared, which does not depend on the values or on the draw.

    `hf_efficient_attn.methods.kdeformer` has the errors. Comparing sums of squared weights, or 64 rows, changes little;
    16 rows are too few for DeiT.
    """
    block_k = options.block_size
    num_hashes = options.num_hashes
    if options.near_field == "lsh":
        return plan_lsh(query, key, block_k, key_mask, num_hashes, options.draws, options.block_q), None
    window = plan_window(query, key, block_k, key_mask, options.block_q)
    if options.near_field == "window":
        return window, None
    lsh = plan_lsh(query, key, block_k, key_mask, num_hashes, options.draws, window.block_q)
    assert lsh.query_order is not None and lsh.key_order is not None
    ranks, valid = _spread_queries(window, query.shape, num_rows, options.draws)  # (BH, R) each
    positions = ranks if window.query_order is None else window.query_order.gather(1, ranks)  # (BH, R)
    weights = row_weights(query, key, positions, key_mask, options)  # (BH, R, Nk)
    of_lsh = inverse(lsh.query_order).gather(1, positions)  # (BH, R)
    near_of_window, near_of_lsh = near_keys(window, ranks), near_keys(lsh, of_lsh)  # (BH, R, block_k) each
    inside = weights.gather(2, torch.cat((near_of_window, near_of_lsh), 2)).unflatten(2, (2, -1))
    outside = 1.0 - inside.sum(3, dtype=accumulation_dtype(query.dtype))  # (BH, R, 2)
    outside[..., 1] += _LEAST / math.sqrt(num_rows)
    if valid is not None:
        outside = outside.masked_fill(~valid.unsqueeze(2), 0.0)
    left = torch.linalg.vector_norm(outside, dim=1)  # (BH, 2)
    take_lsh = left[:, 1:] < _CLEARLY * left[:, :1]  # (BH, 1)

    def choose(of_window: Tensor | None, of_lsh: Tensor) -> Tensor:
        of_window = integers(of_lsh.shape[1], of_lsh.device) if of_window is None else of_window
        return torch.where(take_lsh, of_lsh, of_window)

    near = window._replace(
        query_order=choose(window.query_order, lsh.query_order),
        key_order=choose(window.key_order, lsh.key_order),
        start=choose(window.start, lsh.start),
    )
    of_rows = torch.where(take_lsh.unsqueeze(2), near_of_lsh, near_of_window)  # (BH, R, block_k)
    return near, ExactRows(choose(ranks, of_lsh), of_rows, weights, valid)


def _spread_queries(window: NearField, shape: torch.Size, num_rows: int, draws: Draws) -> tuple[Tensor, Tensor | None]:
    """Choose evenly spread queries, the same in every head, by rank among the valid queries: int64 (BH, R).

    Also returns bool (BH, R), False for rows without a query, if there are fewer queries than rows; None if all exist.
    `shape` is (BH, Nq, D).
    """
    count = min(num_rows, shape[1])
    num_queries = window.num_queries
    offset = draws.uniform((1, count), _ROWS)  # (1, R)
    if isinstance(num_queries, int):
        return stratified_ranks(count, num_queries, offset).expand(shape[0], -1), None
    sampled = num_queries.clamp(1, count)
    step = integers(count, draws.device)
    ranks = strata(step, offset, num_queries, sampled)  # (BH, R)
    return clamp_index(ranks, num_queries - 1), step < num_queries


def near_keys(near: NearField, sorted_index: Tensor) -> Tensor:
    """Find the positions of the keys near the queries at sorted indices: int64 (BH, p) -> (BH, p, block_k)."""
    index = near.start.gather(1, sorted_index // near.block_q).unsqueeze(2) + integers(near.block_k, near.start.device)
    return index if near.key_order is None else near.key_order.gather(1, index.flatten(1)).view_as(index)


def probe_norms(
    query: Tensor,
    key: Tensor,
    key_mask: Tensor | None,
    near: NearField,
    rows: ExactRows | None,
    options: SamplingOptions,
) -> tuple[Tensor, Tensor]:
    """Estimate the squared column norms of the residual D^-1 A_res (Eq. 10 of Zandieh et al. 2023) from some queries.

    The estimate sums over exact rows, in which the keys of the query's near field count as 0. The norms of a group are
    the column norms of the matrix if all queries were like the queries of the group.

    The weights of `rows`, exact rows of evenly spread queries, are overwritten. Without them there are
    `options.num_probes` rows: the same number from each group, one from each of its equal strata.

    Returns:
        (BH, G, Nk), by position, and the group of each block, int64 (BH or 1, T).
    """
    groups = options.groups
    batch_heads = query.shape[0]
    group = query_groups(near, groups)  # (1 or BH, T)
    if rows is None:
        offset = options.draws.offsets(batch_heads // options.batch, _PROBES).repeat(options.batch)
        # The first block of each group, and the end of the last one.
        first = torch.searchsorted(group, integers(groups + 1, query.device).repeat(len(group), 1))  # (1 or BH, G + 1)
        bounds = (first * near.block_q).clamp_(max=near.num_queries).unsqueeze(2)  # (1 or BH, G + 1, 1)
        # (BH, G, R / G)
        index = stratified_ranks(ceil_div(options.num_probes, groups), bounds.diff(dim=1), offset[:, None, None])
        index = (index + bounds[:, :-1]).flatten(1).clamp_(max=near.num_queries - 1).clamp_(min=0)  # (BH, R)
        positions = index if near.query_order is None else near.query_order.gather(1, index)
        rows = ExactRows(index, near_keys(near, index), row_weights(query, key, positions, key_mask, options))
        group_of_row = integers(groups, query.device).repeat_interleave(index.shape[1] // groups).expand_as(index)
    else:
        group_of_row = group.expand(batch_heads, -1).gather(1, rows.sorted_index // near.block_q)  # (BH, R)
    member: Tensor = group_of_row.unsqueeze(1) == integers(groups, query.device)[:, None]  # (BH, G, R)
    num_rows: Tensor | int = rows.weights.shape[1]
    if rows.valid is not None:
        member = member & rows.valid.unsqueeze(1)
        num_rows = rows.valid.sum(1, keepdim=True)
    # A group has R / G rows on average, of R valid ones.
    squares = rows.weights.scatter_(2, rows.near_keys, 0.0).square_()  # (BH, R, Nk)
    factor = near.num_queries * groups
    if isinstance(factor, Tensor):  # a quotient of integers would have float32
        factor = factor.to(accumulation_dtype(squares.dtype))
    share = factor / num_rows
    # The factor is in the few weights of the rows: after the product, or as its `alpha`, it would be rounded otherwise
    # with a mask than without, and in the next layer other keys would be sampled.
    member = member.to(squares.dtype).mul_(share.unsqueeze(2) if isinstance(share, Tensor) else share)
    return torch.bmm(member, squares), group  # (BH, G, R) @ (BH, R, Nk) -> (BH, G, Nk)


def sampling_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    near: NearField,
    rows: ExactRows | None,
    options: SamplingOptions,
) -> tuple[Tensor, Tensor | None]:
    """Compute the unnormalized sampling probabilities of the keys by `options.scores`; 0 for masked keys.

    Returns:
        (BH, G, Nk), by sorted index, and the group of each block of queries, int64 (BH or 1, T), or None if G is 1.
    """
    group = None
    norms = None
    if options.scores == "probe":
        groups = 1 if options.shared else min(options.groups, options.num_probes)
        norms, group = probe_norms(query, key, key_mask, near, rows, options._replace(groups=groups))
        group = group if groups > 1 else None
    elif callable(options.scores):
        norms = density_norms(query, key, key_mask, near, options)
    if options.scores == "uniform":
        scores = torch.ones(key.shape[:2], dtype=accumulation_dtype(value.dtype), device=key.device).unsqueeze(1)
        scores = scores if key_mask is None else scores * key_mask.unsqueeze(1)
    else:
        scores = column_scores(value, norms, key_mask)  # (BH, G, Nk)
    if near.key_order is not None:
        scores = scores.gather(2, near.key_order.unsqueeze(1).expand_as(scores))
    return scores, group


def near_far_attention(
    query: Tensor, key: Tensor, value: Tensor, near: NearField, far: FarField, options: SamplingOptions
) -> Tensor:
    """Compute the attention of a plan: (BH, Nq, Dv or Dv + 1).

    The keys of both fields are concatenated, with the log-weights of the samples as bias. One softmax over both equals
    the merge of their partials, and one large product is faster than two small ones and a merge.
    """
    call = {"scale": options.scale, "dropout_p": options.dropout_p}
    first = near.start.unsqueeze(2)  # (BH, T, 1)
    far_index = far.sorted_index.expand(-1, first.shape[1], -1)  # (BH, T, M)
    is_near = torch.clamp(far_index, first, first + (near.block_k - 1)) == far_index  # it lies in the near field
    far_bias = far.log_weight.masked_fill(is_near, -torch.inf)  # (BH, T, M)
    keys = key_ranges(near, key)
    if far_index.shape[2]:
        keys = keys._replace(listed=far_index, log_weight=far_bias)
    if options.table is None and takes_blocks(query, key, value, keys, options.dropout_p):
        if near.key_order is not None and keys.listed is not None:
            keys = keys._replace(listed=near.key_order.gather(1, far_index.flatten(1)).view_as(far_index))
        found = block_attention(query, key, value, keys, **call)
        assert found is not None
        return output_of(found, options.with_lse)
    near_index = first + integers(near.block_k, query.device)  # (BH, T, block_k)
    near_bias = torch.zeros_like(near_index, dtype=far_bias.dtype)
    if isinstance(near.num_keys, Tensor):
        near_bias.masked_fill_(near_index >= near.num_keys.unsqueeze(2), -torch.inf)
    index = torch.cat((near_index, far_index), 2)  # (BH, T, block_k + M)
    bias = torch.cat((near_bias, far_bias), 2)[:, :, None]  # (BH, T, 1, block_k + M)
    if near.key_order is not None:
        index = near.key_order.gather(1, index.flatten(1)).view_as(index)  # (BH, T, block_k + M)
    return _gathered_attention(query, key, value, near, index, bias, options)


def _gathered_attention(
    query: Tensor, key: Tensor, value: Tensor, near: NearField, index: Tensor, bias: Tensor, options: SamplingOptions
) -> Tensor:
    """Compute attention of the blocks of queries to copies of their keys: (BH, Nq, Dv).

    `index` (BH, T, K) has the positions of the keys, and `bias` (BH, T, 1, K) is added to the scores.
    """
    table = options.table
    call = {"scale": options.scale, "dropout_p": options.dropout_p}
    draws = options.dropout_p > 0.0

    def some_heads(*given: Any) -> Tensor:
        query, key, value, index, bias, order, table = given
        if table is not None:
            position = integers(query.shape[1], query.device)[None] if order is None else order  # (1 or BH, Nq)
            position = pad_to_blocks(position.unsqueeze(2), near.block_q).squeeze(3)  # (1 or BH, T, block_q)
            bias = bias + bias_between(table, position, index)  # (BH, T, block_q, block_k + M)
        blocks = pad_to_blocks(query if order is None else take(query, order), near.block_q)  # (BH, T, block_q, D)
        pairs = near.block_q if keeps_pairs(blocks, key[:, None], bias, **call) else 0
        size = slice_size(index[0].numel() * max(key.shape[2], value.shape[2], pairs), query.device)
        # (BH, T * block_q, Dv)
        out = sliced(gathered, blocks, key, value, index, bias, size=size, draws=draws).flatten(1, 2)
        return out[:, : query.shape[1]] if order is None else take(out, inverse(order))  # (BH, Nq, Dv)

    def gathered(blocks: Tensor, key: Tensor, value: Tensor, index: Tensor, bias: Tensor) -> Tensor:
        found = attend(blocks, take(key, index), take(value, index), bias, **call)  # (BH, T, block_q, Dv)
        return output_of(found, options.with_lse)

    size = len(query) if table is None else slice_size(query.shape[1] * index.shape[2], query.device)
    given = query, key, value, index, bias, near.query_order, table
    return sliced(some_heads, *given, size=size, draws=draws, recompute=table is not None)


def dense_log_weights(near: NearField, far: FarField, q_len: int, kv_len: int) -> Tensor:
    """Compute the bias of the scores in the readable form: float64 (BH, Nq, Nk).

    It is 0 for a pair of the near field, -log(probability) for a sampled key outside of it, and -inf elsewhere.
    """
    device = near.start.device
    weights = torch.full((near.start.shape[0], q_len, kv_len), -torch.inf, dtype=torch.float64, device=device)
    for a in range(weights.shape[0]):
        keys = torch.arange(kv_len, device=device) if near.key_order is None else near.key_order[a]
        queries = torch.arange(q_len, device=device) if near.query_order is None else near.query_order[a]
        num_keys = near.num_keys if isinstance(near.num_keys, int) else int(near.num_keys[a])
        for t, start in enumerate(near.start[a].tolist()):
            block = queries[t * near.block_q : (t + 1) * near.block_q, None]
            sample = min(t, far.sorted_index.shape[1] - 1)
            samples = (x[a, sample].tolist() for x in (far.sorted_index, far.log_weight))
            for index, log_weight in zip(*samples, strict=True):
                # logaddexp, because independent sampling may select a key twice.
                old = weights[a, block, keys[index]]
                weights[a, block, keys[index]] = torch.logaddexp(old, torch.full_like(old, log_weight))
            weights[a, block, keys[start : min(start + near.block_k, num_keys)]] = 0.0
    return weights
