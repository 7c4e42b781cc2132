"""An exact near field and a far field of sampled keys, in the bidirectional form.

The queries are cut into blocks, in the order of a hash or in the order of their positions. Each block attends exactly
to one block of `block_size` keys in the same kind of order, its near field (`hf_efficient_attn.ops.near_field`), and to
sampled keys outside of it, its far field. Both share one softmax. `NearField` and `FarField` are the plan. It is
computed without a gradient, and `dense_log_weights`, the readable form, is computed from the same plan.

A sorted index counts the keys (or queries) in the order of the plan; a position counts them in the sequence.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.blocks import ceil_div, chunked_over_heads, inverse, take
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.gather_attend import GatheredKeys, gathered_attention
from hf_efficient_attn.ops.near_field import NearField, NearFieldOptions, near_keys, plan_near_field
from hf_efficient_attn.ops.partial import accumulation_dtype
from hf_efficient_attn.ops.random import offsets, uniform
from hf_efficient_attn.ops.sampling import (
    inclusion_probabilities,
    independent_sample,
    operator_norm_squared,
    stratified_ranks,
    systematic_sample,
)

# Values from which the operator norm of V is estimated.
_NORM_VALUES = 1024
# The offsets of a head's blocks are multiples of this plastic ratio modulo 1; those of the heads are of the golden one.
_TURN = 0.7548776662466927
# Blocks of queries that `density_scores` processes at a time.
_BLOCKS = 16

# norms(queries (Nq, D), keys (Nk, D), seed) -> logs of the squared column norms of the softmax matrix of
# queries keys^T, (Nk,), and of its row sums, (Nq,), both float64.
ColumnNorms = Callable[[Tensor, Tensor, int | Tensor], tuple[Tensor, Tensor]]


class SamplingOptions(NamedTuple):
    """How the keys of a far field are sampled.

    Attributes:
        num_samples: samples per block of queries.
        scores: the unnormalized sampling probabilities of the keys. "uniform": 1. "value_norm": |v_j|^2. "probe":
            estimated squared column norm of D^-1 A_res + gamma |v_j|^2 with gamma = 1 / |V|_op^2 (Algorithm 1, lines 2
            and 5, and Algorithm 3, line 3, of Zandieh et al. 2023). A function: the same with its own norms.
        num_probes: queries from which "probe" estimates the norms.
        independent: sample with replacement, as in the paper's Algorithm 1, rather than systematically without.
        scale: factor of the attention scores.
        seed: of the hash and of the samples.
        batch: B. Sequences of a batch use the same random numbers.
        groups: groups of neighboring blocks of queries. Each has its own estimated norms for "probe".
        shared: one sample for all blocks of queries instead of one for each.
    """

    num_samples: int
    scores: str | ColumnNorms
    num_probes: int
    independent: bool
    scale: float
    seed: int | Tensor
    batch: int
    groups: int = 1
    shared: bool = False


class FarField(NamedTuple):
    """The sampled keys of each of S samples; S is the number of blocks of queries, or 1 if all share one sample.

    Attributes:
        sorted_index: int64 (BH, S, M).
        log_weight: (BH, S, M), -inf for an unused entry.
    """

    sorted_index: Tensor
    log_weight: Tensor


def query_groups(near: NearField, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Divide the blocks of queries into groups of neighbors whose sizes differ by at most one.

    Returns:
        start: int64 (BH, G), the sorted index of the first query of each group.
        count: int64 (BH, G), the number of its queries; 0 for some groups if there are fewer blocks than groups.
        group: int64 (BH, T), the group of each block.
    """
    batch_heads, num_blocks = near.start.shape
    device = near.start.device
    num_queries = torch.as_tensor(near.num_queries, device=device).expand(batch_heads, 1)
    valid_blocks = (num_queries + near.block_q - 1) // near.block_q
    first = (torch.arange(groups + 1, device=device) * valid_blocks + groups - 1) // groups
    first = torch.minimum(first * near.block_q, num_queries)
    # The clamp is for blocks without a valid query, whose output is not used.
    group = (torch.arange(num_blocks, device=device) * groups // valid_blocks.clamp(min=1)).clamp(max=groups - 1)
    return first[:, :-1], first[:, 1:] - first[:, :-1], group


def probe_scores(
    query: Tensor,
    key: Tensor,
    near: NearField,
    key_mask: Tensor | None,
    offset: Tensor,
    options: SamplingOptions,
) -> Tensor:
    """Estimate the squared column norms of the residual D^-1 A_res (Eq. 10 of Zandieh et al. 2023) from some queries.

    The estimate sums over `options.num_probes` queries, the same number from each of `options.groups` groups, one from
    each of equal strata of a group. The keys in a query's near field count as 0. The norms of a group are those that
    the matrix would have if all queries were like those of the group.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        near: the near field.
        key_mask: bool (BH, Nk), True for valid keys, or None.
        offset: float64 (BH,) in (0, 1), where in its stratum each probe lies.
        options: sampling options.

    Returns:
        (BH, G, Nk), by position.
    """
    acc_dtype, per_group = accumulation_dtype(query.dtype), ceil_div(options.num_probes, options.groups)
    first, count, _ = query_groups(near, options.groups)
    index = stratified_ranks(per_group, count.unsqueeze(2), offset.reshape(-1, 1, 1)) + first.unsqueeze(2)
    last = torch.as_tensor(near.num_queries - 1, device=index.device).clamp(min=0)
    index = torch.minimum(index.flatten(1), last)
    excluded = near_keys(near, index)
    if near.query_order is not None:
        index = near.query_order.gather(1, index)
    scores = (take(query, index).to(acc_dtype) * options.scale) @ key.to(acc_dtype).transpose(1, 2)
    if key_mask is not None:
        scores = scores + mask_bias(key_mask, acc_dtype)[:, None]
    # The softmax is NaN only without a single valid key. Then no key has a score.
    weights = scores.softmax(-1)
    weights = weights if key_mask is None else weights.nan_to_num(0.0)
    weights = weights.scatter_(2, excluded, 0.0)
    norms: Tensor = weights.square_().unflatten(1, (options.groups, per_group)).sum(2)
    if isinstance(near.num_queries, int):
        return norms * (near.num_queries / per_group)
    return norms * (near.num_queries.unsqueeze(2).double() / per_group).to(acc_dtype)


def split_scale_evenly(query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Float64 queries and keys (..., D) whose products are the scores, each multiplied with the root of the scale."""
    root = math.sqrt(abs(scale))
    return query.double() * math.copysign(root, scale), key.double() * root


def density_scores(
    norms: ColumnNorms,
    query: Tensor,
    key: Tensor,
    near: NearField,
    key_mask: Tensor | None,
    scale: float,
    seed: int | Tensor,
) -> Tensor:
    """Squared column norms of the residual from estimates of those of D^-1 A (Zandieh et al. 2023, Eq. 10-11).

    The part in the near field is subtracted from each estimate (Algorithm 3, line 3), and negative results become 0.
    Each head is computed separately, on its valid tokens.

    Args:
        norms: see `ColumnNorms`.
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        near: the near field.
        key_mask: bool (BH, Nk), True for valid keys, or None.
        scale: factor of the scores.
        seed: seed of the estimates.

    Returns:
        (BH, Nk), by position.
    """
    out = torch.zeros(key.shape[:2], dtype=torch.float64, device=key.device)
    block_keys = near.start[:, :, None] + torch.arange(near.block_k, device=key.device)
    position = torch.arange(query.shape[1], device=key.device)
    for a in range(key.shape[0]):
        valid = torch.ones_like(out[a], dtype=torch.bool) if key_mask is None else key_mask[a]
        valid_query = valid if query.shape[1] == key.shape[1] else torch.ones_like(position, dtype=torch.bool)
        if not valid.any():
            continue
        queries, keys = split_scale_evenly(query[a].masked_fill(~valid_query[:, None], 0.0), key[a], scale)
        log_norms, log_sums = norms(queries[valid_query], keys[valid], seed)
        logs = torch.full_like(queries[:, 0], -torch.inf).masked_scatter(valid_query, -2.0 * log_sums)
        order = position if near.query_order is None else near.query_order[a]
        index = block_keys[a] if near.key_order is None else near.key_order[a][block_keys[a]]
        blocks = pad(order, (0, index.shape[0] * near.block_q - len(order)), value=-1).view(-1, near.block_q)
        near_norms = torch.zeros_like(out[a])
        for some in range(0, len(blocks), _BLOCKS):
            of_queries, of_keys = blocks[some : some + _BLOCKS], index[some : some + _BLOCKS]
            weight = logs[of_queries].masked_fill(of_queries < 0, -torch.inf)
            pairs = 2.0 * queries[of_queries] @ keys[of_keys].transpose(1, 2) + weight[:, :, None]
            near_norms.index_add_(0, of_keys.flatten(), pairs.exp().sum(1).flatten())
        out[a, valid] = (log_norms.exp() - near_norms[valid]).clamp(min=0.0)
    return out.to(accumulation_dtype(query.dtype))


def sampled_norm_squared(value: Tensor, near: NearField) -> Tensor:
    """|V|_op^2 by the power method on 1,024 values at evenly spread sorted indices: (BH, Nk, Dv) -> (BH, 1).

    It only balances two terms of a sampling distribution, and all values would take as long as all probes together. If
    there are fewer keys, values are repeated, so that padding does not change the estimate.
    """
    half = torch.full((value.shape[0], 1), 0.5, dtype=torch.float64, device=value.device)
    index = stratified_ranks(_NORM_VALUES, near.num_keys, half)
    index = index if near.key_order is None else near.key_order.gather(1, index)
    return operator_norm_squared(take(value, index).to(accumulation_dtype(value.dtype))) * (
        near.num_keys / _NORM_VALUES
    )


def sampling_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    near: NearField,
    key_mask: Tensor | None,
    offset: Tensor,
    options: SamplingOptions,
) -> Tensor:
    """The unnormalized sampling probabilities of the keys by `options.scores`; 0 for masked keys.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        value: (BH, Nk, Dv).
        near: the near field.
        key_mask: bool (BH, Nk), True for valid keys, or None.
        offset: as in `probe_scores`.
        options: sampling options.

    Returns:
        (BH, G, Nk), by sorted index. G is `options.groups` for "probe" and otherwise 1.
    """
    acc_dtype, kind = accumulation_dtype(value.dtype), options.scores
    if kind == "uniform":
        scores = torch.ones(key.shape[0], 1, key.shape[1], dtype=acc_dtype, device=key.device)
    else:
        squares = torch.linalg.vector_norm(value, dim=-1, dtype=acc_dtype).square().unsqueeze(1)
        if kind == "value_norm":
            scores = squares
        else:
            gamma = 1.0 / sampled_norm_squared(value, near).clamp(min=torch.finfo(acc_dtype).tiny)
            if isinstance(kind, str):
                norms = probe_scores(query, key, near, key_mask, offset, options)
            else:
                norms = density_scores(kind, query, key, near, key_mask, options.scale, options.seed).unsqueeze(1)
            scores = torch.addcmul(norms, squares, gamma.unsqueeze(2))
        # A key with a value of norm 0 still counts in the denominator, so every key gets a small probability.
        count = near.num_keys if isinstance(near.num_keys, int) else near.num_keys.clamp(min=1).unsqueeze(2)
        scores = scores + (scores.sum(2, keepdim=True) * (1e-6 / count) + torch.finfo(acc_dtype).tiny)
    if near.key_order is not None:
        scores = scores.gather(2, near.key_order.unsqueeze(1).expand(-1, scores.shape[1], -1))
    if key_mask is not None:
        masked = torch.arange(key.shape[1], device=key.device) >= near.num_keys
        scores = scores.masked_fill(masked.unsqueeze(1), 0.0)
    return scores


def sample_keys(
    scores: Tensor,
    num_samples: int,
    offset: Tensor,
    seed: int | Tensor,
    independent: bool = False,
    group: Tensor | None = None,
) -> FarField:
    """Sample keys: systematically without replacement, or independently as in the paper's Algorithm 1.

    Args:
        scores: (BH, G, Nk), by sorted index.
        num_samples: keys of each sample.
        offset: float64 (BH, S) in (0, 1), the offset of each sample.
        seed: seed of the independent sampling.
        independent: sample with replacement.
        group: int64 (BH, S), the scores from which each sample is drawn; None if G is 1.
    """
    if independent:
        numbers = uniform((num_samples,), seed, 3, scores.device) + offset.unsqueeze(2)
        index, log_weight, _ = independent_sample(scores, num_samples, numbers.frac(), group)
    else:
        probabilities = inclusion_probabilities(scores.flatten(0, 1), num_samples).view(scores.shape)
        index, log_weight, _ = systematic_sample(probabilities, num_samples, offset, group)
    return FarField(index, log_weight.to(accumulation_dtype(scores.dtype)))


def make_short_sequences_exact(near: NearField, scores: Tensor, short: Tensor) -> tuple[NearField, Tensor]:
    """Let the sequences whose valid keys fit into the budget attend to all of them, as they would without padding.

    Every block of queries of such a sequence gets the last block of keys. The keys before it are the only ones with a
    score, so that all of them are sampled with weight 1.

    Args:
        near: the near field.
        scores: (BH, G, Nk).
        short: bool (BH, 1), the sequences.
    """
    rest = (torch.as_tensor(near.num_keys, device=near.start.device) - near.block_k).clamp(min=0)
    start = torch.where(short, rest, near.start)
    before = (torch.arange(scores.shape[2], device=scores.device) < rest).to(scores.dtype).unsqueeze(1)
    return near._replace(start=start), torch.where(short.unsqueeze(2), before, scores)


def make_plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    near_options: NearFieldOptions,
    options: SamplingOptions,
) -> tuple[NearField, FarField]:
    """The near and the far field, without a gradient.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D), with more keys than `near_options.block_size`.
        value: (BH, Nk, Dv).
        key_mask: bool (BH, Nk), True for valid keys, or None.
        near_options: the near field.
        options: the far field. Each block of queries has its own sample, by the scores of its group.
    """
    with torch.no_grad():
        num_samples, seed, device = options.num_samples, options.seed, query.device
        num_heads = query.shape[0] // options.batch
        near = plan_near_field(query, key, key_mask, near_options, scale=options.scale, seed=seed, batch=options.batch)
        probe_offset, offset = (offsets(num_heads, seed, s, device).repeat(options.batch) for s in (11, 12))
        one_group = options.shared or options.scores != "probe"
        options = options._replace(groups=1 if one_group else min(options.groups, options.num_probes))
        scores = sampling_scores(query, key, value, near, key_mask, probe_offset, options)
        short = None
        if key_mask is not None:
            short = torch.as_tensor(near.num_keys, device=near.start.device) <= near.block_k + num_samples
            near, scores = make_short_sequences_exact(near, scores, short)
        group, offset = None, offset.unsqueeze(1)
        if not options.shared:
            offset = (offset + _TURN * torch.arange(near.start.shape[1], device=device)).frac()
            group = None if options.groups == 1 else query_groups(near, options.groups)[2]
        far = sample_keys(scores, num_samples, offset, seed, options.independent, group)
        if short is not None and options.independent:
            # Sampling with replacement would not take every remaining key.
            every = sample_keys(scores, num_samples, offset, seed, group=group)
            far = FarField(*(torch.where(short.unsqueeze(2), *pair) for pair in zip(every, far, strict=True)))
        return near, far


def near_far_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    near: NearField,
    far: FarField,
    *,
    scale: float,
    dropout_p: float = 0.0,
) -> Tensor:
    """The attention of a plan.

    The keys of both fields are concatenated into one block, with the log-weights of the samples as bias. One softmax
    over both equals the merge of their partials, and one large product is faster than two small ones and a merge.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        value: (BH, Nk, Dv).
        near: the near field.
        far: the far field.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        (BH, Nq, Dv).
    """
    acc_dtype = accumulation_dtype(query.dtype)
    near_index = near.start[:, :, None] + torch.arange(near.block_k, device=query.device)
    far_index = far.sorted_index.expand(-1, near_index.shape[1], -1)
    distance = far_index - near.start[:, :, None]
    in_near_field = (distance >= 0) & (distance < near.block_k)
    far_bias = far.log_weight.to(acc_dtype).masked_fill(in_near_field, -torch.inf)
    near_bias = torch.zeros(near_index.shape, dtype=acc_dtype, device=query.device)
    if not isinstance(near.num_keys, int):
        near_bias = near_bias.masked_fill_(near_index >= near.num_keys[:, :, None], -torch.inf)
    index = torch.cat((near_index, far_index), 2)
    if near.key_order is not None:
        index = near.key_order.gather(1, index.flatten(1)).view_as(index)
    bias = torch.cat((near_bias, far_bias), 2)[:, :, None]
    rank = None if near.query_order is None else inverse(near.query_order)

    def some_heads(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        index: Tensor,
        bias: Tensor,
        *order: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        gathered = GatheredKeys(index, bias, near.block_q, *order)
        return gathered_attention(query, key, value, gathered, scale=scale, dropout_p=dropout_p, out=out)

    result = (query.shape[1], value.shape[2], value.dtype)
    return chunked_over_heads(some_heads, query, key, value, index, bias, near.query_order, rank, result=result)


def dense_log_weights(near: NearField, far: FarField, q_len: int, kv_len: int) -> Tensor:
    """The readable form: what is added to the scores before the softmax, float64 (BH, Nq, Nk).

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
            for index, log_weight in zip(*(x[a, sample].tolist() for x in far), strict=True):
                # logaddexp, because independent sampling may select a key twice.
                old = weights[a, block, keys[index]]
                weights[a, block, keys[index]] = torch.logaddexp(old, torch.full_like(old, log_weight))
            weights[a, block, keys[start : min(start + near.block_k, num_keys)]] = 0.0
    return weights


def dense_attention(query: Tensor, key: Tensor, value: Tensor, log_weights: Tensor, *, scale: float) -> Tensor:
    """softmax(scale * query key^T + log_weights) value with dense float64 matrices; 0 for queries without a key.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        value: (BH, Nk, Dv).
        log_weights: float64 (BH, Nq, Nk).
        scale: factor of the scores.

    Returns:
        (BH, Nq, Dv) in the dtype of `value`.
    """
    scores = query.double() @ key.double().transpose(1, 2) * scale + log_weights
    return (scores.softmax(-1).nan_to_num(0.0) @ value.double()).to(value.dtype)
