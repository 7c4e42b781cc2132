"""An exact near field and a far field of sampled keys, in the causal form.

The sequence is cut into blocks by position. Block t attends causally to itself and to block t-1, exactly. The completed
blocks 0 .. t-2 are split into aligned intervals of 1, 2, 4, ... blocks according to the binary digits of t-1. Each
interval has one weighted sample of its keys. The sample is drawn once, from the tokens of the interval alone, and all
blocks that see the interval share it. So the choice of keys that a query attends to never depends on later tokens, and
the output does not even depend on the length of the sequence.

The intervals are the off-diagonal squares of HyperAttention's causal recursion (Han et al. 2023, Algorithm 4). The
recursion also sorts the queries of a square among each other, which lets later queries influence earlier ones; here
this step is left out.

On level l an interval has L = block_size * 2**l tokens. The tokens are divided into pairs of intervals. Only the left
interval of a pair, interval j at 2 j L, is sampled. Counted from block 1 on, queries (2 j + 1) L to (2 j + 2) L - 1 see
it.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.attend import Partial, attend, output_of
from hf_efficient_attn.ops.backends.devices import accumulation_dtype, in_float64, planning_dtype
from hf_efficient_attn.ops.exact import exact_attention, mask_bias
from hf_efficient_attn.ops.index import integers, pad_to_blocks, take
from hf_efficient_attn.ops.sampled_keys.hashing import hash_keys
from hf_efficient_attn.ops.sampled_keys.intervals import (
    IntervalPlan,
    hashed_and_sampled,
    near_and_samples,
    sampled_intervals,
)
from hf_efficient_attn.ops.sampled_keys.sampling import (
    NORM_VALUES,
    FarField,
    SamplingOptions,
    column_scores,
    sample_keys,
    split_scale_evenly,
)
from hf_efficient_attn.ops.slices import slice_size, sliced
from hf_efficient_attn.ops.strata import stratified_ranks

# Streams of random numbers on level 0.
_PROBES = 21
_SAMPLES = 22


def left_intervals(x: Tensor, num_intervals: int, length: int) -> Tensor:
    """View the left intervals of the first pairs of intervals: (BH, N, ...) -> (BH, num_intervals, length, ...)."""
    return x.unfold(1, length, 2 * length)[:, :num_intervals].movedim(-1, 2)


def _later_queries(query: Tensor, block_size: int) -> Tensor:
    """Take the queries from block 1 on, padded for `_seen_by`: (BH, N, D) -> (BH, P, D)."""
    ends = [2 * count * length for count, length in sampled_intervals(query.shape[1], block_size) if count > 1]
    missing = max([query.shape[1] - block_size, *ends]) + block_size - query.shape[1]
    query = query[:, block_size:]
    return pad(query, (0, 0, 0, missing)) if missing else query


def _seen_by(x: Tensor, num_intervals: int, length: int) -> Tensor:
    """View the queries that see each interval: (BH, P, ...) -> (BH, num_intervals, length, ...).

    A single interval may have fewer queries: they are not padded, since they may be half of the sequence.
    """
    if num_intervals == 1:
        return x[:, None, length : 2 * length]
    return torch.unflatten(x[:, : 2 * num_intervals * length], 1, (num_intervals, 2, length))[:, :, 1]


def _interval_scores(query: Tensor, key: Tensor, value: Tensor, level: int, options: SamplingOptions) -> Tensor:
    """Compute unnormalized sampling probabilities of the keys of J intervals of L tokens, from the interval's queries.

    `column_scores` computes them, with the softmax of each interval in place of D^-1 A_res: query and key (BH, J, L,
    D), value (BH, J, L, Dv) -> (BH J, 1, L). The level of the intervals determines the probes.
    """
    norms = None
    acc_dtype = accumulation_dtype(value.dtype)
    length = key.shape[2]
    if callable(options.scores):
        norms = _interval_norms(query.flatten(0, 1), key.flatten(0, 1), options).to(acc_dtype)
    elif options.scores == "probe":
        rank = _ranks(options, len(query), options.num_probes, length, _PROBES + 2 * level)
        probes = query.gather(2, rank[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3]))  # (BH, J, p, D)
        key = key.to(planning_dtype(key))
        probes = probes.to(key.dtype) * options.scale
        weights = (probes @ key.mT).softmax(-1, dtype=acc_dtype).flatten(0, 1)  # (BH J, p, L)
        norms = weights.square_().sum(1, keepdim=True).mul_(length / options.num_probes)  # (BH J, 1, L)
    elif options.scores == "uniform":
        return torch.ones(key.shape[:3], dtype=acc_dtype, device=key.device).flatten(0, 1).unsqueeze(1)
    return column_scores(value.flatten(0, 1), norms, None, size=min(length, 2 * NORM_VALUES))


@in_float64
def _interval_norms(query: Tensor, key: Tensor, options: SamplingOptions) -> Tensor:
    """Compute squared column norms of intervals (BH J, L, D) by the function `options.scores`: (BH J, 1, L)."""
    norms = options.scores
    pairs = zip(query, key, strict=True)
    assert callable(norms)
    logs = [norms(*split_scale_evenly(q, k, options.scale), options.draws.value)[0] for q, k in pairs]
    return torch.stack(logs).unsqueeze(1).exp_()


def _ranks(options: SamplingOptions, batch_heads: int, count: int, length: int, stream: int) -> Tensor:
    """Draw one index in each of `count` equal strata of `length` tokens, by an offset per head: int64 (BH, count)."""
    offset = options.draws.offsets(batch_heads // options.batch, stream).unsqueeze(1)  # (H, 1)
    return stratified_ranks(count, length, offset).repeat(options.batch, 1)


def plan_intervals(query: Tensor, key: Tensor, value: Tensor, options: SamplingOptions) -> list[IntervalPlan]:
    """Sample num_samples / 2 keys of each interval, or all keys of shorter intervals, without a gradient.

    With the near field "lsh" the keys of the sampled intervals are also sorted by an angular hash and cut into blocks
    of a quarter of `options.block_size`. A query gets the block in which its code lies, which does not depend on other
    queries.
    """
    block_size = options.causal_block
    num_hashes = options.num_hashes if options.near_field == "lsh" else 0
    if not options.num_samples and not num_hashes:
        return []
    with torch.no_grad():
        batch_heads = query.shape[0]
        acc_dtype = accumulation_dtype(value.dtype)
        device = key.device
        num_samples = min(options.num_samples, max(1, options.num_samples // 2))
        plans = []
        is_even = options.scores == "uniform" and not options.independent
        later = _later_queries(query, block_size) if num_hashes else query
        for level, (count, length) in enumerate(sampled_intervals(query.shape[1], block_size)):
            queries, keys, values = (left_intervals(x, count, length) for x in (query, key, value))  # (BH, J, L, .)
            stream = _SAMPLES + 2 * level
            if is_even or not 0 < num_samples < length:
                # Take one key of each of equal strata, or every key if there are as many samples.
                taken = min(num_samples, length)
                index = _ranks(options, batch_heads, taken, length, stream).unsqueeze(1).expand(-1, count, -1)
                log_weight = torch.full((), math.log(length / max(1, taken)), dtype=acc_dtype, device=device)
                far = FarField(index, log_weight.expand_as(index))
            else:
                scores = _interval_scores(queries, keys, values, level, options)
                offset = options.draws.offsets(batch_heads // options.batch, stream).repeat(options.batch)
                offset = offset.repeat_interleave(count).unsqueeze(1)  # (BH J, 1)
                far = sample_keys(scores, offset, options._replace(num_samples=num_samples))
                far = FarField(*(x.unflatten(0, (batch_heads, count)).squeeze(2) for x in far))  # (BH, J, M) each
            plan = IntervalPlan(level, *far)
            if num_hashes and num_samples < length:
                block_k = max(1, block_size // 2)
                hashed = (num_hashes, options.draws)
                sorted_keys, order = hash_keys(keys.flatten(0, 1), *hashed).sort(stable=True)  # (BH J, L) each
                # The rank of the query's cell is its sorting key without the share of its position.
                seeing = _seen_by(later, count, length)
                cell = hash_keys(seeing.flatten(0, 1), *hashed).floor_().to(sorted_keys.dtype)
                # Take the middle of the cell's keys: the query's rank in the cell would depend on later queries.
                low, high = (torch.searchsorted(sorted_keys, x) for x in (cell, cell + 1))
                block = ((low + high) // 2).clamp_(max=length - 1) // block_k  # (BH J, L)
                plan = IntervalPlan(level, *far, order.view(keys.shape[:3]), block.view(seeing.shape[:3]), block_k)
            plans.append(plan)
        return plans


def causal_near_far_attention(
    query: Tensor, key: Tensor, value: Tensor, plans: Sequence[IntervalPlan], options: SamplingOptions
) -> Tensor:
    """Compute the attention of a plan, whose levels are `plans`: (BH, N, Dv or Dv + 1).

    The first block_size + num_samples positions are exact at any length.
    """
    block_size = options.causal_block
    num_exact = options.block_size + options.num_samples
    call: dict[str, Any] = {"scale": options.scale, "dropout_p": options.dropout_p}
    exact = exact_attention(
        *(x[:, :num_exact] for x in (query, key, value)), is_causal=True, with_lse=options.with_lse, **call
    )

    def some_heads(query: Tensor, key: Tensor, value: Tensor, plans: tuple[IntervalPlan, ...]) -> Tensor:
        near = near_and_samples(query, key, value, [x for x in plans if x.query_block is None], block_size, call)
        if near is None:
            near = _near_partial(query, key, value, block_size, call)
        else:
            near = Partial(near.out[:, block_size:], near.lse[:, block_size:])
            plans = tuple(x for x in plans if x.query_block is not None)
        queries = _later_queries(query, block_size) if plans else query
        parts = []
        for plan in plans:
            count = plan.sample_index.shape[1]
            length = block_size << plan.level
            seeing = _seen_by(queries, count, length)  # (BH, J, L or less, D)
            if plan.query_block is None:
                index = plan.sample_index + (integers(count, key.device) * 2 * length)[:, None]  # (BH, J, M)
                keys = take(key, index)  # (BH, J, M, .)
                values = take(value, index)
                part = attend(seeing, keys, values, plan.log_weight.unsqueeze(2), **call)
            else:
                keys, values = (left_intervals(x, count, length) for x in (key, value))
                part = hashed_and_sampled(seeing, keys, values, plan, call)
            parts.append(part)
        merged = output_of(_merge(near, parts, plans, block_size), options.with_lse)
        return merged[:, num_exact - block_size : query.shape[1] - block_size]

    size = slice_size(query.shape[1] * max(query.shape[2], value.shape[2]), query.device)
    far = sliced(some_heads, query, key, value, tuple(plans), size=size, draws=options.dropout_p > 0.0)
    return torch.cat((exact, far), 1)


def _near_partial(query: Tensor, key: Tensor, value: Tensor, block_size: int, call: dict[str, Any]) -> Partial:
    """Compute attention of the queries from block 1 on to their own block, causally, and to the block before it.

    (BH, N, D), (BH, N, D), (BH, N, Dv) -> Partial of out (BH, N - block_size, Dv) and lse (BH, N - block_size).
    """
    q_len = query.shape[1] - block_size
    query = pad_to_blocks(query[:, block_size:], block_size)  # (BH, T, block_size, D)
    key, value = (pad_to_blocks(x, block_size) for x in (key, value))
    key, value = (torch.cat((x[:, :-1], x[:, 1:]), 2) for x in (key, value))  # (BH, T, 2 block_size, .)
    block = torch.ones(block_size, block_size, dtype=torch.bool, device=query.device)  # (block_size, block_size)
    bias = mask_bias(torch.cat((block, block.tril()), 1), query.dtype)[None, None]  # (1, 1, block_size, 2 block_size)
    out, lse = attend(query, key, value, bias, **call)
    return Partial(out.flatten(1, 2)[:, :q_len], lse.flatten(1, 2)[:, :q_len])


def _merge(near: Partial, parts: Sequence[Partial], plans: Sequence[IntervalPlan], block_size: int) -> Partial:
    """Merge the partial of the window, which has all queries, with the partials of the levels: out (BH, P, Dv).

    A level has at most half of all queries. So its partial is added to a view of the output.
    """
    if not parts:
        return near
    views = [(plan.sample_index.shape[1], block_size << plan.level) for plan in plans]
    padded = max([near.lse.shape[1], *(2 * count * length for count, length in views if count > 1)])
    missing = padded - near.lse.shape[1]
    lses = near.lse.new_full((1 + len(parts), near.lse.shape[0], padded), -torch.inf)  # (1 + levels, BH, P)
    lses[0, :, : padded - missing] = near.lse
    for i, (part, view) in enumerate(zip(parts, views, strict=True), 1):
        _seen_by(lses[i], *view).copy_(part.lse)
    # Every query attends to itself, so the softmax is defined, except for padding, where it is NaN.
    weights = lses.softmax(0)  # (1 + levels, BH, P)
    out = pad(near.out, (0, 0, 0, missing)) * weights[0].unsqueeze(-1)  # (BH, P, Dv)
    for i, (part, view) in enumerate(zip(parts, views, strict=True), 1):
        _seen_by(out, *view).addcmul_(part.out.to(out.dtype), _seen_by(weights[i], *view).unsqueeze(-1))
    return Partial(out.to(near.out.dtype), lses.logsumexp(0))


def dense_causal_log_weights(
    plans: Sequence[IntervalPlan], length: int, block_size: int, num_exact: int, like: Tensor
) -> Tensor:
    """Compute the bias of the scores in the readable form: float64 (BH, N, N).

    N is `length`. BH and the device are taken from `like` (BH, ...).
    """
    weights = like.new_full((len(like), length, length), -torch.inf, dtype=torch.float64)
    for i in range(length):
        if i < num_exact:
            weights[:, i, : i + 1] = 0.0
            continue
        completed = i // block_size - 1
        weights[:, i, max(0, completed) * block_size : i + 1] = 0.0
        for plan in plans:
            if completed < 0 or not completed >> plan.level & 1:
                continue
            j = (completed >> plan.level) // 2
            interval = block_size << plan.level
            first = 2 * j * interval
            for a in range(len(like)):
                samples = zip(plan.sample_index[a, j].tolist(), plan.log_weight[a, j].tolist(), strict=True)
                for index, log_weight in samples:
                    old = weights[a, i, first + index]
                    weights[a, i, first + index] = torch.logaddexp(old, torch.full_like(old, log_weight))
                if plan.query_block is not None and plan.key_order is not None:
                    block = int(plan.query_block[a, j, i - block_size - (2 * j + 1) * interval])
                    near = plan.key_order[a, j, block * plan.block_k : (block + 1) * plan.block_k]
                    weights[a, i, first + near] = 0.0
    return weights
