"""An exact near field and a far field of sampled keys, in the bidirectional form.

The queries are cut into blocks, in the order of a hash or in the order of their positions. Each block attends exactly
to one block of `block_size` keys in the same kind of order, its near field (`hf_efficient_attn.ops.near_field`), and to
sampled keys outside of it, its far field. Both share one softmax. `NearField` and `FarField` are the plan. It is
computed without a gradient, and `dense_log_weights`, the readable form, is computed from the same plan.

A sorted index counts the keys (or queries) in the order of the plan; a position counts them in the sequence.
"""

import torch
from torch import Tensor

from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.blocks import chunked_over_heads, inverse, pad_to_blocks
from hf_efficient_attn.ops.constants import constant, integers
from hf_efficient_attn.ops.gather_attend import GatheredKeys, gathered_attention
from hf_efficient_attn.ops.near_far_kernels import plan_with_few_kernels
from hf_efficient_attn.ops.near_far_sampling import (
    FarField,
    SamplingOptions,
    make_short_sequences_exact,
    query_groups,
    sample_keys,
    sample_offsets,
    sample_outside,
    sampling_scores,
)
from hf_efficient_attn.ops.near_field import NUM_ROWS, NearField, NearFieldOptions, plan_near_field
from hf_efficient_attn.ops.partial import accumulation_dtype, partial_attention
from hf_efficient_attn.ops.random import offsets

# Exact rows of a head if they choose the near field and also are the probes. They are not spread evenly over the
# groups, and with 32 of them the error of KDEformer on BERT with 4,096 tokens is 2 % larger.
_PROBED_ROWS = 48
# Stream of random numbers.
_PROBES = 11


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
        num_samples, seed, batch_heads = options.num_samples, options.seed, query.shape[0]
        num_rows = max(_PROBED_ROWS, options.num_probes) if options.scores == "probe" else NUM_ROWS
        planned = plan_with_few_kernels(query, key, value, key_mask, near_options, options, num_rows)
        if planned is not None:
            return planned
        near, rows = plan_near_field(
            query, key, key_mask, near_options, scale=options.scale, seed=seed, num_rows=num_rows
        )
        offset = sample_offsets(options, batch_heads, near.start.shape[1], query.device)
        short = None
        if key_mask is not None:
            short = torch.as_tensor(near.num_keys, device=near.start.device) <= near.block_k + num_samples
        if num_samples and options.scores == "uniform" and not (options.shared or options.independent):
            if short is not None:
                near, _ = make_short_sequences_exact(near, query.new_empty(batch_heads, 1, 0), short)
            return near, sample_outside(near, num_samples, offset, accumulation_dtype(query.dtype))
        one_group = options.shared or options.scores != "probe"
        options = options._replace(groups=1 if one_group else min(options.groups, options.num_probes))
        probe_offset = offsets(batch_heads // options.batch, seed, _PROBES, query.device)
        probe_offset = probe_offset if options.batch == 1 else probe_offset.repeat(options.batch)
        scores = sampling_scores(query, key, value, near, key_mask, probe_offset, options, rows)
        if short is not None:
            near, scores = make_short_sequences_exact(near, scores, short)
        group = None
        if not options.shared and options.groups > 1:
            # Groups from which no probes are drawn have the same size, as in `near_far_kernels`.
            group = query_groups(near, options.groups, same_size=rows is not None)[2]
        # Without a mask every score is positive, and there are more keys than samples.
        far = sample_keys(scores, num_samples, offset, seed, options.independent, group, complete=key_mask is None)
        if short is not None and options.independent:
            # Sampling with replacement would not take every remaining key.
            every = sample_keys(scores, num_samples, offset, seed, group=group)
            index, log_weight = (torch.where(short.unsqueeze(2), *x) for x in zip(every[:2], far[:2], strict=True))
            far = FarField(index, log_weight)
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
    acc_dtype, device = accumulation_dtype(query.dtype), query.device
    near_index = near.start[:, :, None] + integers(near.block_k, device)
    far_index = far.sorted_index.expand(-1, near_index.shape[1], -1)
    by_library = backend(query, key, value) == "library" and not dropout_p
    if by_library and far.has_one_weight:
        return _merged_attention(query, key, value, near, (near_index, far_index), far.log_weight, scale)
    # The nearest index of the near field is the index itself if it lies there.
    nearest = torch.clamp(far_index, near_index[..., :1], near_index[..., -1:])
    # PyTorch's kernels take a bias in the dtype of the queries, and then a finite one needs no copy.
    is_finite = by_library and isinstance(near.num_keys, int) and not far.may_be_unused
    dtype = query.dtype if by_library else acc_dtype
    excluded = max(torch.finfo(dtype).min / 2, -1e30) if is_finite else -torch.inf
    far_bias = far.log_weight.to(dtype).masked_fill(nearest == far_index, excluded)
    near_bias = constant(_zeros, near.block_k, dtype, device=device).expand(near_index.shape)
    if not isinstance(near.num_keys, int):
        near_bias = near_bias.masked_fill(near_index >= near.num_keys[:, :, None], -torch.inf)
    index = torch.cat((near_index, far_index), 2)
    if near.key_order is not None:
        index = near.key_order.gather(1, index.flatten(1)).view_as(index)
    bias = torch.cat((near_bias, far_bias), 2)[:, :, None]
    if by_library:
        # The gathered tensors have no names, so that they are freed before the output is copied.
        part = partial_attention(
            _ordered(query, near),
            _gathered(key, index),
            _gathered(value, index),
            bias,
            scale=scale,
            finite_bias=is_finite,
        )
        return _restored(part.out, query.shape[1], near)
    rank = near.query_rank
    if rank is None and near.query_order is not None:
        rank = inverse(near.query_order)

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


def _merged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    near: NearField,
    index: tuple[Tensor, Tensor],
    log_weight: Tensor,
    scale: float,
) -> Tensor:
    """The attention of a plan whose samples have one weight and lie outside of the near fields, on an accelerator.

    Neither field needs a bias, so that FlashAttention computes both. The log-weight is added to the lse.
    """
    blocks, parts = _ordered(query, near), []
    # One after the other, so that the gathered keys of the first are freed before those of the second exist.
    for x in index:
        x = x if near.key_order is None else near.key_order.gather(1, x.flatten(1)).view_as(x)
        parts.append(partial_attention(blocks, _gathered(key, x), _gathered(value, x), scale=scale))
    (out, lse), (far_out, far_lse) = parts
    # All samples have the same.
    weight = (far_lse - lse + log_weight[:, :, :1]).sigmoid().to(value.dtype)
    return _restored(torch.lerp(out, far_out, weight.unsqueeze(-1)), query.shape[1], near)


def _ordered(query: Tensor, near: NearField) -> Tensor:
    """The blocks of queries: (BH, Nq, D) -> (BH, T, block_q, D)."""
    return pad_to_blocks(query if near.query_order is None else _gathered(query, near.query_order), near.block_q)


def _restored(blocks: Tensor, q_len: int, near: NearField) -> Tensor:
    """Undo `_ordered` for the output (BH, T, block_q, Dv)."""
    if near.query_order is None:
        return blocks.flatten(1, 2)[:, :q_len]
    slot = near.query_slot
    if slot is None:
        rank = inverse(near.query_order) if near.query_rank is None else near.query_rank
        slot = rank % near.block_q * blocks.shape[1] + rank // near.block_q
    # The kernels give their output in this layout.
    return _gathered(blocks.transpose(1, 2).flatten(1, 2), slot)


def _gathered(x: Tensor, index: Tensor) -> Tensor:
    """`take` by one kernel, without numbers of the tokens of all heads."""
    found: Tensor = x.gather(1, index.flatten(1).unsqueeze(2).expand(-1, -1, x.shape[2]))
    return found.view(*index.shape, x.shape[2])


def _zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(1, 1, count, dtype=dtype, device=device)


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
            for index, log_weight in zip(*(x[a, sample].tolist() for x in far[:2]), strict=True):
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
