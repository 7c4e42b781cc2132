"""Sampling of keys: their scores, the draw, and log-weights that make up for the keys that are not sampled."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.backends.devices import accumulation_dtype, in_float64, planning_dtype, wide_dtype, widened
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.exact import bias_between
from hf_efficient_attn.ops.index import clamp_index, integers, take
from hf_efficient_attn.ops.sampled_keys.hashing import NearField
from hf_efficient_attn.ops.strata import independent_sample, strata, systematic_sample

# The operator norm of V is estimated from at least this many values.
NORM_VALUES = 384
# The least score of a key, relative to the mean score. A key with a value of norm 0 still counts in the denominator.
LEAST_SCORE = 1e-6
# Replaces a sum of scores that is 0. No score is so small, and its inverse times `num_samples` is finite.
_TINY = 1e-290
# The stream of random numbers.
_INDEPENDENT = 3
# norms(queries (Nq, D), keys (Nk, D), seed) -> logs of the squared column norms of the softmax matrix of
# queries keys^T, (Nk,), and of its row sums, (Nq,), both float64.
ColumnNorms = Callable[[Tensor, Tensor, int | Tensor], tuple[Tensor, Tensor]]


class SamplingOptions(NamedTuple):
    """Options of the near field and of the sampling of the far field."""

    near_field: str  # "lsh", "window", or "auto", which chooses one of the two for each head
    block_size: int  # number of keys of a block of the near field
    num_hashes: int  # number of hyperplanes of the hash
    block_q: int | None  # number of queries of a block; by default `block_size` for "lsh", and half of it otherwise
    num_samples: int  # number of samples per block of queries
    # The unnormalized sampling probabilities of the keys. "uniform": 1. "value_norm": |v_j|^2. "probe": estimated
    # squared column norm of D^-1 A_res + gamma |v_j|^2 with gamma = 1 / |V|_op^2 (Algorithm 1, lines 2 and 5, and
    # Algorithm 3, line 3, of Zandieh et al. 2023). A function: the same with the function's norms.
    scores: str | ColumnNorms
    num_probes: int  # number of queries from which "probe" estimates the norms
    independent: bool  # sample with replacement, as in the paper's Algorithm 1, rather than systematically without
    scale: float  # factor of the attention scores
    draws: Draws  # the random numbers of the hash and of the samples
    batch: int  # B. Sequences of a batch use the same random numbers.
    # Number of groups of neighboring blocks of queries. Each group has its own estimated norms for "probe".
    groups: int = 1
    shared: bool = False  # whether all blocks of queries share one sample instead of having one each
    dropout_p: float = 0.0  # probability of dropping a weight
    # (BH, 2R + 1), the bias of the scores by distance (`hf_efficient_attn.ops.exact`), or None.
    table: Tensor | None = None
    with_lse: bool = False  # whether to return the lse as well (`hf_efficient_attn.ops.attend.output_of`)

    @property
    def causal_block(self) -> int:
        """The number of tokens of a block of the causal form."""
        return max(1, self.block_size // 2)


class FarField(NamedTuple):
    """The sampled keys of each of S samples; S is the number of blocks of queries, or 1 if all share one sample."""

    sorted_index: Tensor  # int64 (BH, S, M)
    log_weight: Tensor  # (BH, S, M), -inf for an unused entry


def row_weights(
    query: Tensor, key: Tensor, positions: Tensor, key_mask: Tensor | None, options: SamplingOptions
) -> Tensor:
    """Compute the softmax weights of the queries at `positions`, int64 (BH, R), without a gradient: (BH, R, Nk).

    Scores and weights have the `planning_dtype`. A row without a valid key is 0.
    """
    key = key.to(planning_dtype(key))
    query = query.to(key.dtype)
    scores = torch.bmm(take(query, positions) * options.scale, key.mT)  # (BH, R, D) @ (BH, D, Nk) -> (BH, R, Nk)
    if options.table is not None:
        key_position = integers(key.shape[1], key.device)[None, None]
        scores += bias_between(options.table, positions.unsqueeze(1), key_position)[:, 0]
    if key_mask is None:
        return scores.softmax(2)
    scores = scores.masked_fill_(~key_mask[:, None], -torch.inf)
    # NaN only without a single valid key.
    return scores.softmax(2).nan_to_num_(0.0)


def column_scores(value: Tensor, norms: Tensor | None, key_mask: Tensor | None, size: int = 2 * NORM_VALUES) -> Tensor:
    """Compute unnormalized sampling probabilities |v_j|^2, or column norm + gamma |v_j|^2; 0 for masked keys.

    `norms`, (BH, G, Nk), are the squared column norms. `size` is that of `sampled_norm_squared`. Returns (BH, G, Nk),
    where G is 1 without `norms`.
    """
    acc_dtype = accumulation_dtype(value.dtype)
    tiny = torch.finfo(acc_dtype).tiny
    scores: Tensor = torch.linalg.vector_norm(value, dim=2, dtype=acc_dtype).square_().unsqueeze(1)  # (BH, 1, Nk)
    if norms is not None:
        norm_squared = sampled_norm_squared(value, key_mask, size).clamp_(min=tiny)  # (BH, 1)
        scores = torch.addcdiv(norms, scores, norm_squared.unsqueeze(2))  # (BH, G, Nk)
    count = scores.new_full((1, 1, 1), value.shape[1])  # a quotient of numbers would be rounded differently
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask.unsqueeze(1), 0.0)
        count = key_mask.sum(1)[:, None, None].clamp(min=1).to(acc_dtype)  # (BH, 1, 1)
    scores = scores + (scores.sum(2, keepdim=True) * (LEAST_SCORE / count) + tiny)
    return scores if key_mask is None else scores.masked_fill_(~key_mask.unsqueeze(1), 0.0)


def sampled_norm_squared(value: Tensor, key_mask: Tensor | None, size: int = 2 * NORM_VALUES) -> Tensor:
    """Estimate |V|_op^2 by the Frobenius norm of V^T V, from up to 767 values: (BH, Nk, Dv) -> (BH, 1).

    The estimate is an upper bound, and close if one direction prevails. It only balances two terms of a sampling
    distribution. The values lie at a regular distance among the valid values. Zeros follow up to `size` values:
    products of other sizes are rounded differently, and then padding could change the sample.
    """
    kv_len = value.shape[1]
    acc_dtype = accumulation_dtype(value.dtype)
    if key_mask is None:
        step = max(1, kv_len // NORM_VALUES)
        sample = value[:, step // 2 :: step].to(acc_dtype)
        factor: Tensor | float = kv_len / sample.shape[1]
        sample = pad(sample, (0, 0, 0, size - sample.shape[1]))  # (BH, n, Dv)
    else:
        count = key_mask.sum(1, keepdim=True)
        distance = (count // NORM_VALUES).clamp(min=1)
        rank = distance // 2 + integers(size, value.device) * distance  # (BH, n)
        # The key of rank r is the first with r + 1 valid keys up to it.
        index = torch.searchsorted(key_mask.cumsum(1), rank + 1).clamp(max=kv_len - 1)
        valid = rank < count
        sample = take(value, index).to(acc_dtype).masked_fill(~valid.unsqueeze(2), 0.0)  # (BH, n, Dv)
        # The quotient of integers would have float32.
        factor = count.to(acc_dtype) / valid.sum(1, keepdim=True).clamp(min=1)
    norm: Tensor = torch.linalg.vector_norm(torch.bmm(sample.mT, sample), dim=(1, 2)).unsqueeze(1)  # (BH, 1)
    return norm * factor


def split_scale_evenly(query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Multiply float64 queries and keys (..., D) by the root of the scale, so that their products are the scores."""
    root = math.sqrt(abs(scale))
    return query.double() * math.copysign(root, scale), key.double() * root


def query_groups(near: NearField, groups: int) -> Tensor:
    """Divide the blocks of queries into groups of neighbors whose sizes differ by at most one.

    Some groups are empty if there are fewer blocks than groups.

    Returns:
        int64 (BH or 1, T), the group of each block.
    """
    valid_blocks = (near.num_queries + near.block_q - 1) // near.block_q  # (BH, 1)
    valid_blocks = valid_blocks if isinstance(valid_blocks, int) else valid_blocks.clamp_(min=1)
    # The last clamp is for blocks without a valid query, whose output is not used.
    group = integers(near.start.shape[1], near.start.device)[None] * groups // valid_blocks  # (1 or BH, T)
    return group.clamp_(max=groups - 1)


@in_float64
def density_norms(
    query: Tensor, key: Tensor, key_mask: Tensor | None, near: NearField, options: SamplingOptions
) -> Tensor:
    """Estimate squared column norms of the residual from column norms of D^-1 A (Zandieh et al. 2023, Eq. 10-11).

    The part in the near field is subtracted from each norm (Algorithm 3, line 3), and negative results become 0. Each
    head is computed separately, on its valid tokens. The arguments are the same as in `make_plan`.

    Returns:
        (BH, 1, Nk), by position.
    """
    norms = options.scores
    block_q = near.block_q
    is_same = query.shape[1] == key.shape[1]
    assert callable(norms)
    out = torch.zeros(key.shape[:2], dtype=torch.float64, device=key.device)
    block_keys = near.start[:, :, None] + integers(near.block_k, key.device)  # (BH, T, block_k)
    for a in range(key.shape[0]):
        valid = torch.ones_like(out[a], dtype=torch.bool) if key_mask is None else key_mask[a]
        if not valid.any():
            continue
        valid_query = valid if is_same else torch.ones_like(query[a, :, 0], dtype=torch.bool)
        queries, keys = split_scale_evenly(query[a].masked_fill(~valid_query[:, None], 0.0), key[a], options.scale)
        found = norms(queries[valid_query], keys[valid], options.draws.value)
        log_norms, log_sums = (x.double() for x in found)
        logs = torch.full_like(queries[:, 0], -torch.inf).masked_scatter(valid_query, -2.0 * log_sums)  # (Nq,)
        order = integers(len(logs), key.device) if near.query_order is None else near.query_order[a]
        index = block_keys[a] if near.key_order is None else near.key_order[a][block_keys[a]]  # (T, block_k)
        blocks = pad(order, (0, len(index) * block_q - len(order)), value=-1).view(-1, block_q)  # (T, block_q)
        weight = logs[blocks].masked_fill(blocks < 0, -torch.inf)
        pairs = 2.0 * queries[blocks] @ keys[index].mT + weight[:, :, None]  # (T, block_q, block_k)
        near_norms = torch.zeros_like(out[a]).index_add_(0, index.flatten(), pairs.exp_().sum(1).flatten())  # (Nk,)
        out[a, valid] = (log_norms.exp() - near_norms[valid]).clamp(min=0.0)
    return out.to(accumulation_dtype(query.dtype)).unsqueeze(1)


def sample_keys(scores: Tensor, offset: Tensor, options: SamplingOptions, group: Tensor | None = None) -> FarField:
    """Sample keys: systematically without replacement, or independently as in the paper's Algorithm 1.

    Args:
        scores: (BH, G, Nk), by sorted index.
        offset: float64 (BH, S) in (0, 1), the offset of each sample.
        options: sampling options.
        group: int64 (BH or 1, S), the scores from which each sample is drawn; None if G is 1.
    """
    num_samples = options.num_samples
    dtype = accumulation_dtype(scores.dtype)
    if options.independent:
        numbers = options.draws.uniform((num_samples,), _INDEPENDENT) + offset.unsqueeze(2)
        return FarField(*independent_sample(scores, num_samples, numbers.frac(), group, dtype))
    probabilities = inclusion_probabilities(scores, num_samples)
    return FarField(*systematic_sample(probabilities, num_samples, offset, group, dtype))


def sample_outside(near: NearField, num_samples: int, offset: Tensor, dtype: torch.dtype) -> FarField:
    """Sample the keys outside of each near field with equal probabilities, systematically without replacement.

    All samples of a block of queries have the same weight. The offset of each sample in (0, 1) is float64 (BH, T), or
    (BH, 1) without samples. The log-weights have the given dtype.
    """
    device = offset.device
    num_keys = near.num_keys
    start = near.start.unsqueeze(2)
    if not num_samples:
        return FarField(offset[..., :0].unsqueeze(1).to(torch.int64), offset[..., :0].unsqueeze(1).to(dtype))
    rest = torch.as_tensor(num_keys, device=device).view(-1, 1, 1) - near.block_k  # (1 or BH, 1, 1)
    strata_sum = rest.clamp(min=num_samples)  # each stratum has at least one key
    index = strata(integers(num_samples, device), offset.unsqueeze(2), strata_sum, num_samples)  # (BH, T, num_samples)
    log_weight = (widened(strata_sum) / num_samples).log().to(dtype).masked_fill(index >= rest, -torch.inf)
    # Skip the near field: indices from its start on move behind it.
    index = torch.add(index, index >= start, alpha=near.block_k)
    limit = num_keys - 1 if isinstance(num_keys, int) else num_keys.unsqueeze(2) - 1
    return FarField(clamp_index(index, limit), log_weight)


def inclusion_probabilities(scores: Tensor, num_samples: int) -> Tensor:
    """Compute min(1, c * score) with the factor c for which the probabilities sum to `num_samples`.

    If at most `num_samples` scores are positive, each of their probabilities is 1. Only the `num_samples` highest
    scores can reach the limit of 1. If the r highest do, then c is (num_samples - r) divided by the sum of the others.
    This quotient grows with r as long as the next score reaches the limit, and falls from then on. So c is the largest
    of these quotients.

    The scores (..., N) are not negative. The result is float64, since sums of many probabilities select the samples.
    """
    acc_dtype = wide_dtype(scores.device)
    tiny = _TINY
    if acc_dtype == torch.float32:
        scores = scores / scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
        tiny = 1e-30
    highest, index = scores.topk(min(num_samples, scores.shape[-1]), dim=-1)  # (..., num_samples)
    rest = scores.scatter(-1, index, 0.0).sum(-1, keepdim=True, dtype=acc_dtype)  # (..., 1)
    # Sum the scores from rank r on, for r from the last to 0, adding from the smallest to the largest.
    others = highest.flip(-1).cumsum(-1, dtype=acc_dtype) + rest  # (..., num_samples)
    left = integers(highest.shape[-1], scores.device) + (num_samples - highest.shape[-1] + 1)
    return (scores * (left / others.clamp_(min=tiny)).amax(-1, keepdim=True)).clamp_(max=1.0)
