"""Which keys the far field of near_far samples: scores, groups of queries, and the draw, without a gradient.

`hf_efficient_attn.ops.near_far` describes the terms.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.blocks import ceil_div, take
from hf_efficient_attn.ops.constants import constant, integers
from hf_efficient_attn.ops.near_field import ExactRows, NearField, near_keys, row_weights
from hf_efficient_attn.ops.partial import accumulation_dtype
from hf_efficient_attn.ops.random import Seed, offsets, seed_value, uniform
from hf_efficient_attn.ops.sampling import (
    complete_systematic_sample,
    inclusion_probabilities,
    independent_sample,
    sample_with_few_kernels,
    stratified_ranks,
    systematic_sample,
)

# Values from which the operator norm of V is estimated, at least.
NORM_VALUES = 384
# The least score of a key, relative to the mean. A key with a value of norm 0 still counts in the denominator.
LEAST_SCORE = 1e-6
# The offsets of a head's blocks are multiples of this plastic ratio modulo 1; those of the heads are of the golden one.
_TURN = 0.7548776662466927
# Stream of random numbers.
_SAMPLES = 12
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
    seed: Seed
    batch: int
    groups: int = 1
    shared: bool = False


class FarField(NamedTuple):
    """The sampled keys of each of S samples; S is the number of blocks of queries, or 1 if all share one sample.

    Attributes:
        sorted_index: int64 (BH, S, M).
        log_weight: (BH, S, M), -inf for an unused entry.
        has_one_weight: whether all samples have the same log-weight, and none lies in a near field.
        may_be_unused: whether an entry may be unused.
    """

    sorted_index: Tensor
    log_weight: Tensor
    has_one_weight: bool = False
    may_be_unused: bool = True


def query_groups(near: NearField, groups: int, same_size: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Divide the blocks of queries into groups of neighbors whose sizes differ by at most one.

    Args:
        near: the near field.
        groups: number of groups.
        same_size: all groups have the same size, except for the last ones, as `near_far_kernels` needs it.

    Returns:
        start: int64 (BH, G), the sorted index of the first query of each group.
        count: int64 (BH, G), the number of its queries; 0 for some groups if there are fewer blocks than groups.
        group: int64 (BH, T), the group of each block.
    """
    (batch_heads, num_blocks), device = near.start.shape, near.start.device
    if isinstance(near.num_queries, int):
        sizes = (near.num_queries, near.block_q, num_blocks, groups, same_size)
        first, count, group = (constant(_groups, i, *sizes, device=device) for i in range(3))
        return first.expand(batch_heads, -1), count.expand(batch_heads, -1), group.expand(batch_heads, -1)
    return _divide(near.num_queries, near.block_q, num_blocks, groups, same_size)


def _groups(
    i: int, num_queries: int, block_q: int, num_blocks: int, groups: int, same_size: bool, device: torch.device
) -> Tensor:
    num = torch.full((1, 1), num_queries, dtype=torch.int64, device=device)
    return _divide(num, block_q, num_blocks, groups, same_size)[i]


def _divide(
    num_queries: Tensor, block_q: int, num_blocks: int, groups: int, same_size: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`query_groups` of the numbers of queries (BH, 1)."""
    device = num_queries.device
    valid_blocks = (num_queries + block_q - 1) // block_q
    if same_size:  # as if there were as many blocks as fill all groups
        valid_blocks = (valid_blocks + groups - 1) // groups * groups
    first = (torch.arange(groups + 1, device=device) * valid_blocks + groups - 1) // groups
    first = torch.minimum(first * block_q, num_queries)
    # The clamp is for blocks without a valid query, whose output is not used.
    group = (torch.arange(num_blocks, device=device) * groups // valid_blocks.clamp(min=1)).clamp(max=groups - 1)
    return first[:, :-1], first[:, 1:] - first[:, :-1], group


def probe_rows(
    query: Tensor,
    key: Tensor,
    near: NearField,
    key_mask: Tensor | None,
    offset: Tensor,
    options: SamplingOptions,
) -> ExactRows:
    """The exact rows of `options.num_probes` queries, the same number from each of `options.groups` groups.

    There is one from each of equal strata of a group. The arguments are those of `probe_scores`.
    """
    first, count, _ = query_groups(near, options.groups)
    per_group = ceil_div(options.num_probes, options.groups)
    index = stratified_ranks(per_group, count.unsqueeze(2), offset.reshape(-1, 1, 1)) + first.unsqueeze(2)
    index = index.flatten(1)
    if isinstance(near.num_queries, int):
        index = index.clamp(max=near.num_queries - 1)
    else:
        index = torch.minimum(index, (near.num_queries - 1).clamp(min=0))
    positions = index if near.query_order is None else near.query_order.gather(1, index)
    return ExactRows(index, near_keys(near, index), row_weights(query, key, positions, key_mask, options.scale))


def probe_scores(
    query: Tensor,
    key: Tensor,
    near: NearField,
    key_mask: Tensor | None,
    offset: Tensor,
    options: SamplingOptions,
    rows: ExactRows | None = None,
) -> Tensor:
    """Estimate the squared column norms of the residual D^-1 A_res (Eq. 10 of Zandieh et al. 2023) from some queries.

    The estimate sums over exact rows, and the keys in a query's near field count as 0. The norms of a group of queries
    are those that the matrix would have if all queries were like those of the group.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        near: the near field.
        key_mask: bool (BH, Nk), True for valid keys, or None.
        offset: float64 (BH,) in (0, 1), where in its stratum each probe lies.
        options: sampling options.
        rows: exact rows of evenly spread queries, whose weights are overwritten; None for those of `probe_rows`.

    Returns:
        (BH, G, Nk), by position.
    """
    groups, own_probes = options.groups, rows is None
    if rows is None:
        rows = probe_rows(query, key, near, key_mask, offset, options)
        group = constant(_group_of_probes, groups, ceil_div(options.num_probes, groups), device=key.device)
    elif groups == 1:
        group = torch.zeros_like(rows.sorted_index)
    else:
        first = query_groups(near, groups, same_size=True)[0][:, 1:]
        first = first[0].contiguous() if isinstance(near.num_queries, int) else first.contiguous()
        group = torch.searchsorted(first, rows.sorted_index, right=True)
    num_rows = rows.weights.shape[1]
    member = (group.unsqueeze(1) == integers(groups, key.device)[:, None]).to(rows.weights.dtype)
    squares = rows.weights.scatter_(2, rows.near_keys, 0.0).square_()
    # A group has R / G rows on average, of R valid ones.
    if not isinstance(near.num_queries, int):
        num_queries = near.num_queries.unsqueeze(2).to(member.dtype)
        valid = num_rows if own_probes else num_queries.clamp(min=1, max=num_rows)
        return (member * (num_queries * groups / valid)) @ squares
    member = member.expand(len(squares), -1, -1)
    return torch.baddbmm(squares[:, :1, :1], member, squares, beta=0, alpha=near.num_queries * groups / num_rows)


def _group_of_probes(groups: int, per_group: int, device: torch.device) -> Tensor:
    return torch.arange(groups, device=device).repeat_interleave(per_group)[None]


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
    seed: Seed,
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
        log_norms, log_sums = norms(queries[valid_query], keys[valid], seed_value(seed))
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


def sampled_norm_squared(value: Tensor, key_mask: Tensor | None) -> Tensor:
    """|V|_op^2 by the Frobenius norm of V^T V, from up to 767 values: (BH, Nk, Dv) -> (BH, 1).

    It is an upper bound, and close if one direction prevails. It only balances two terms of a sampling distribution,
    and on activations of BERT and DeiT the errors with it and with the power method are equal. The values lie at a
    regular distance among the valid ones (`regular_step`), so that padding does not change the estimate.
    """
    kv_len, acc_dtype = value.shape[1], accumulation_dtype(value.dtype)
    if key_mask is None:
        first, step = regular_step(kv_len)
        sample = value[:, first::step]
        factor: Tensor | float = kv_len / sample.shape[1]
    else:
        count = key_mask.sum(1, keepdim=True)
        distance = (count // NORM_VALUES).clamp(min=1)
        rank = distance // 2 + integers(min(kv_len, 2 * NORM_VALUES), value.device) * distance
        # The key of rank r is the first with r + 1 valid keys up to it.
        index = torch.searchsorted(key_mask.cumsum(1), rank + 1).clamp(max=kv_len - 1)
        valid = rank < count
        sample = take(value, index).masked_fill(~valid.unsqueeze(2), 0.0)
        # The quotient of integers would have float32.
        factor = count.to(acc_dtype) / valid.sum(1, keepdim=True).clamp(min=1)
    if value.device.type == "cpu":
        sample = sample.to(acc_dtype)
    gram = sample.mT @ sample
    norm: Tensor = torch.linalg.vector_norm(gram, dim=(1, 2), dtype=acc_dtype).unsqueeze(1)
    return norm * factor


def regular_step(length: int) -> tuple[int, int]:
    """The first of the values from which `sampled_norm_squared` estimates, and their distance: a view without a mask.

    All values are used up to 2 * NORM_VALUES - 1 of them, and of more at least NORM_VALUES.
    """
    step = max(1, length // NORM_VALUES)
    return step // 2, step


def sampling_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    near: NearField,
    key_mask: Tensor | None,
    offset: Tensor,
    options: SamplingOptions,
    rows: ExactRows | None = None,
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
        rows: as in `probe_scores`.

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
            norm_squared = sampled_norm_squared(value, key_mask).clamp(min=torch.finfo(acc_dtype).tiny)
            if isinstance(kind, str):
                norms = probe_scores(query, key, near, key_mask, offset, options, rows)
            else:
                norms = density_scores(kind, query, key, near, key_mask, options.scale, options.seed).unsqueeze(1)
            scores = torch.addcdiv(norms, squares, norm_squared.unsqueeze(2))
        tiny = torch.finfo(acc_dtype).tiny
        count: Tensor | int = key.shape[1]
        if key_mask is not None:
            scores = scores.masked_fill(~key_mask.unsqueeze(1), 0.0)
            count = key_mask.sum(1)[:, None, None].clamp(min=1)
        if kind == "probe":
            # Relative to the sum of the terms gamma |v_j|^2, which is between 1 and the root of Dv.
            scores = scores + LEAST_SCORE / count
        else:
            scores = scores + (scores.sum(2, keepdim=True) * (LEAST_SCORE / count) + tiny)
        scores = scores.to(acc_dtype)
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
    seed: Seed,
    independent: bool = False,
    group: Tensor | None = None,
    complete: bool = False,
) -> FarField:
    """Sample keys: systematically without replacement, or independently as in the paper's Algorithm 1.

    Args:
        scores: (BH, G, Nk), by sorted index.
        num_samples: keys of each sample.
        offset: float64 (BH, S) in (0, 1), the offset of each sample.
        seed: seed of the independent sampling.
        independent: sample with replacement.
        group: int64 (BH, S), the scores from which each sample is drawn; None if G is 1.
        complete: whether at least `num_samples` scores of each group are known to be positive.
    """
    if complete and not independent and scores.shape[1] == 1 and num_samples and backend(scores) != "cpu":
        acc_dtype = accumulation_dtype(scores.dtype)
        index, log_weight = sample_with_few_kernels(scores, num_samples, offset.unsqueeze(1), acc_dtype)
        return FarField(index.squeeze(1), log_weight.squeeze(1), may_be_unused=False)
    if independent:
        numbers = uniform((num_samples,), seed, 3, scores.device) + offset.unsqueeze(2)
        index, log_weight, _ = independent_sample(scores, num_samples, numbers.frac(), group)
    else:
        probabilities = inclusion_probabilities(scores.flatten(0, 1), num_samples).view(scores.shape)
        if complete:
            index, log_weight = complete_systematic_sample(probabilities, num_samples, offset, group)
        else:
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


def sample_outside(near: NearField, num_samples: int, offset: Tensor, dtype: torch.dtype) -> FarField:
    """Sample the keys outside of each near field with equal probabilities, systematically without replacement.

    All samples of a block of queries have the same weight. Sequences whose valid keys fit into the budget attend to
    all of them, see `make_short_sequences_exact`.

    Args:
        near: the near field.
        num_samples: keys of each sample.
        offset: float64 (BH, T) in (0, 1), the offset of each sample.
        dtype: of the log-weights.
    """
    device, block_k, start = near.start.device, near.block_k, near.start.unsqueeze(2)
    step = integers(num_samples, device)
    if isinstance(near.num_keys, int):
        outside = near.num_keys - block_k
        index = _even_indices(offset, outside, num_samples)
        log_weight = constant(_log, outside / num_samples, dtype, device=device).expand_as(index)
    else:
        rest = (
            (near.num_keys - block_k).clamp(min=0).unsqueeze(2).to(torch.float64)
        )  # a quotient of integers has float32
        index = torch.where(rest > num_samples, _even_indices(offset, rest, num_samples), step)
        log_weight = (rest / num_samples).clamp(min=1.0).log().to(dtype).expand_as(index)
        log_weight = log_weight.masked_fill(index >= rest, -torch.inf)
    # Counted from the end of the near field on, the keys behind it follow those before it.
    index = torch.add(index, index >= start, alpha=block_k)
    if not isinstance(near.num_keys, int):
        index = index.clamp(max=near.num_keys.unsqueeze(2) - 1).clamp(min=0)
    return FarField(index, log_weight, isinstance(near.num_keys, int), not isinstance(near.num_keys, int))


def _even_indices(offset: Tensor, available: Tensor | int, count: int) -> Tensor:
    """Evenly spread indices below `available`, int64 (BH, T, count), for offsets (BH, T)."""
    step = available / count
    return ((offset.unsqueeze(2) + integers(count, offset.device)) * step).to(torch.int64)


def _log(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((1, 1, 1), math.log(number), dtype=dtype, device=device)


def _offsets_of_blocks(num_heads: int, num_blocks: int, seed: Seed, device: torch.device) -> Tensor:
    """Offsets in (0, 1) of the samples of a head's blocks: float64 (H, T)."""
    turn = _TURN * torch.arange(num_blocks, device=device, dtype=torch.float64)
    return (offsets(num_heads, seed, _SAMPLES, device).unsqueeze(1) + turn).frac()


def sample_offsets(options: SamplingOptions, batch_heads: int, num_blocks: int, device: torch.device) -> Tensor:
    """The offset of each sample: float64 (BH, T), or (BH, 1) if all blocks share one sample."""
    num_heads = batch_heads // options.batch
    arguments = (num_heads, 1 if options.shared else num_blocks, options.seed)
    offset = constant(_offsets_of_blocks, *arguments, device=device)
    return offset if options.batch == 1 else offset.repeat(options.batch, 1)
