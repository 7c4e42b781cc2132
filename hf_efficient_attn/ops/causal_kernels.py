"""The causal form of `hf_efficient_attn.ops.causal` with few kernels, for accelerators; and its window.

The number of kernels does not grow with the levels. A Triton kernel reads the samples that a block of queries sees on
all levels by one list of indices. PyTorch's kernels take copies of the samples, so that each level would be expanded to
all blocks. Here the levels are divided into tiers: the blocks that see the same intervals on levels a and above are
2**a neighbors, which are one block of queries for a tier that begins at level a.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.blocks import ceil_div, pad_to_blocks
from hf_efficient_attn.ops.constants import constant
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.export import is_compiling
from hf_efficient_attn.ops.fused_attention import fused_attention_backward
from hf_efficient_attn.ops.gather_attend import GatheredKeys, gathered_partial
from hf_efficient_attn.ops.partial import Partial, accumulation_dtype, partial_attention

# Levels at which the tiers begin. The samples of each are copied to all blocks of queries: with two samples for four
# tokens of the lowest interval, the copies are at most half as large as the keys for each level of the lowest tier.
_TIERS = (0, 1, 3)


class IntervalPlan(NamedTuple):
    """The far field on one level: J intervals of L = block_size * 2**level tokens.

    Attributes:
        level: the level.
        sample_index: int64 (BH, J, M), the sampled keys of each interval, counted from its first token.
        log_weight: (BH, J, M), their log-weights.
        key_order: int64 (BH, J, L), the keys of each interval in the order of a hash; None if the near field is the
            window alone.
        query_block: int64 (BH, J, L), for each query that sees the interval the block of hashed keys that belongs to
            its near field; None likewise.
        block_k: keys of a block of hashed keys.
    """

    level: int
    sample_index: Tensor
    log_weight: Tensor
    key_order: Tensor | None = None
    query_block: Tensor | None = None
    block_k: int = 0


def causal_block_partial(
    query: Tensor, key: Tensor, value: Tensor, block_size: int, *, scale: float, dropout_p: float = 0.0
) -> Partial:
    """Attention of the queries from block 1 on to their own block, causally, and to the whole block before it.

    Args:
        query: (BH, N, D).
        key: (BH, N, D).
        value: (BH, N, Dv).
        block_size: tokens of a block.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        Partial of out (BH, N - block_size, Dv) and lse (BH, N - block_size).
    """
    q_len = query.shape[1] - block_size
    query = pad_to_blocks(query[:, block_size:], block_size)
    key, value = (pad_to_blocks(x, block_size) for x in (key, value))
    key, value = (torch.cat((x[:, :-1], x[:, 1:]), 2) for x in (key, value))
    block = torch.ones(block_size, block_size, dtype=torch.bool, device=query.device)
    bias = mask_bias(torch.cat((block, block.tril()), 1), query.dtype)[None, None]
    out, lse = partial_attention(query, key, value, bias, scale=scale, dropout_p=dropout_p)
    return Partial(out.flatten(1, 2)[:, :q_len], lse.flatten(1, 2)[:, :q_len])


def sampled_intervals_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plans: Sequence[IntervalPlan],
    block_size: int,
    *,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """The attention of the queries from block 1 on to their window and to the samples of all intervals they see.

    Args:
        query: (BH, N, D).
        key: (BH, N, D).
        value: (BH, N, Dv).
        plans: the levels of the far field, without blocks of hashed keys.
        block_size: tokens of a block.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        (BH, N - block_size, Dv).
    """
    options = {"scale": scale, "dropout_p": dropout_p}
    form, num_blocks = backend(query, key, value), ceil_div(query.shape[1], block_size) - 1
    samples = _all_samples(plans, block_size, query.dtype if form == "library" else plans[0].log_weight.dtype)
    if form == "triton":
        near = causal_block_partial(query, key, value, block_size, **options)
        seen = constant(_seen_intervals, samples.counts, num_blocks, 0, len(plans), device=query.device)
        index, bias = (x.index_select(1, seen).view(len(x), num_blocks, 1, -1) for x in samples[:2])
        gathered = GatheredKeys(index.squeeze(2), bias, block_size)
        far = gathered_partial(query[:, block_size:], key, value, gathered, **options)
        # The merge takes three operations, since every query attends to itself in the near field.
        weight = (far.lse - near.lse).sigmoid().unsqueeze(2)
        return torch.addcmul(near.out, far.out - near.out, weight).to(value.dtype)
    arguments = query, key, value, *samples[:2], list(samples.counts), block_size, scale
    with_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if not dropout_p and (with_grad or is_compiling()):
        out: Tensor = window_and_samples(*arguments)[0]
        return out
    return _forward(*arguments, dropout_p)[0]


@torch.library.custom_op("hf_efficient_attn::window_and_samples", mutates_args=())
def window_and_samples(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor,
    log_weight: Tensor,
    counts: list[int],
    block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention of the queries from block 1 on to their window and to samples, and its lse. Differentiable.

    Args:
        query: (BH, N, D).
        key: (BH, N, D).
        value: (BH, N, Dv).
        index: `key_index` of `_Samples`.
        log_weight: as in `_Samples`, finite.
        counts: as in `_Samples`.
        block_size: tokens of a block.
        scale: factor of the scores.

    Returns:
        out (BH, N - block_size, Dv) and lse (BH, N - block_size).
    """
    out, lse = _forward(query, key, value, index, log_weight, counts, block_size, scale)
    return out.contiguous(), lse.contiguous()


@window_and_samples.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *plan: Any) -> tuple[Tensor, Tensor]:
    shape = query.shape[0], query.shape[1] - plan[3]
    return value.new_empty(*shape, value.shape[2]), query.new_empty(shape, dtype=accumulation_dtype(query.dtype))


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor,
    log_weight: Tensor,
    counts: list[int],
    block_size: int,
    scale: float,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`window_and_samples`, with dropout."""
    q_len = query.shape[1] - block_size
    blocks, keys, values = _windows(query, key, value, block_size)
    bias = constant(_window_bias, block_size, query.dtype, device=query.device)
    attend = functools.partial(partial_attention, scale=scale, dropout_p=dropout_p, finite_bias=True)
    out, lse = attend(blocks, keys, values, bias)
    del keys, values
    samples = _take(key, index), _take(value, index), log_weight
    for seen, num_groups in _tiers(counts, blocks):
        keys, values, own_bias = _of_tier(samples, seen, num_groups)
        groups = blocks.flatten(1, 2).unflatten(1, (num_groups, -1))
        far = attend(groups, keys, values, own_bias)
        del keys, values
        out, lse = _merge_into(out, lse, far)
    return out.flatten(1, 2)[:, :q_len], lse.flatten(1, 2)[:, :q_len]


@torch.library.custom_op("hf_efficient_attn::window_and_samples_backward", mutates_args=())
def _window_and_samples_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor,
    log_weight: Tensor,
    out: Tensor,
    lse: Tensor,
    counts: list[int],
    block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value: each part's own backward pass with the merged output and lse."""
    blocks, keys, values = _windows(query, key, value, block_size)
    (num_blocks, _), acc_dtype = blocks.shape[1:3], accumulation_dtype(query.dtype)
    missing = num_blocks * block_size - out.shape[1]
    # A padded query is 0 and has no gradient.
    rows = [pad(x, (0, 0, 0, missing)) if missing else x for x in (grad_out, out)]
    lse = pad(lse, (0, missing)) if missing else lse
    bias = constant(_window_bias, block_size, query.dtype, device=query.device)
    of_window = [x.unflatten(1, (num_blocks, block_size)) for x in (*rows, lse)]
    first, last = (of_window[0], None), (of_window[1], of_window[2])
    grad_blocks, *grads, _ = fused_attention_backward(first, (blocks, keys, values, bias), last, scale, False)
    grad_query = grad_blocks.flatten(1, 2)
    # A key is in the windows of two blocks.
    whole = [pad(x[:, :, block_size:].to(acc_dtype), (0, 0, 0, 0, 1, 0)) for x in grads]
    for x, grad in zip(whole, grads, strict=True):
        x[:, :-1] += grad[:, :, :block_size]
    samples, queries = (_take(key, index), _take(value, index), log_weight), blocks.flatten(1, 2)
    of_samples = [torch.zeros(x.shape, dtype=acc_dtype, device=x.device) for x in samples[:2]]
    for seen, num_groups in _tiers(counts, blocks):
        own = queries.unflatten(1, (num_groups, -1)), *_of_tier(samples, seen, num_groups)
        of_tier = [x.unflatten(1, (num_groups, -1)) for x in (*rows, lse)]
        first, last = (of_tier[0], None), (of_tier[1], of_tier[2])
        grad_groups, *grads, _ = fused_attention_backward(first, own, last, scale, False)
        grad_query = grad_query + grad_groups.flatten(1, 2)
        for x, grad in zip(of_samples, grads, strict=True):
            x.index_add_(1, seen, grad.to(acc_dtype).view(len(x), len(seen), *x.shape[2:]))
    found = []
    for x, grad, grad_samples in zip((key, value), whole, of_samples, strict=True):
        flat = index.flatten(1).unsqueeze(2).expand(-1, -1, x.shape[2])
        grad = grad.flatten(1, 2).scatter_add_(1, flat, grad_samples.flatten(1, 2))
        found.append(grad[:, : x.shape[1]].to(x.dtype, memory_format=torch.contiguous_format))
    grad_query = pad(grad_query[:, : out.shape[1]], (0, 0, block_size, 0))
    return grad_query, found[0].contiguous(), found[1].contiguous()


@_window_and_samples_backward.register_fake
def _(grad_out: Tensor, *tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors[:3])
    return query, key, value


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.counts, ctx.block_size, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 8
    options = ctx.counts, ctx.block_size, ctx.scale
    return *_window_and_samples_backward(grad_out, *ctx.saved_tensors, *options), None, None, None, None, None


window_and_samples.register_autograd(_backward, setup_context=_save)


def _windows(query: Tensor, key: Tensor, value: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The blocks of queries from block 1 on, and views of the keys and values in their windows.

    Returns:
        (BH, T, s, D), (BH, T, 2 s, D) and (BH, T, 2 s, Dv), with T a multiple of the largest group of blocks.
    """
    num_blocks = ceil_div(query.shape[1], block_size) - 1
    most = 1 << max(level for level in _TIERS if level == 0 or 1 << level <= num_blocks)
    num_blocks = ceil_div(num_blocks, most) * most
    missing = (num_blocks + 1) * block_size - query.shape[1]
    query, key, value = (pad(x, (0, 0, 0, missing)) if missing else x for x in (query, key, value))
    key, value = (x.unfold(1, 2 * block_size, block_size).mT for x in (key, value))
    return query[:, block_size:].unflatten(1, (num_blocks, block_size)), key, value


def _tiers(counts: Sequence[int], blocks: Tensor) -> list[tuple[Tensor, int]]:
    """Of each tier: the intervals that each group of blocks sees on each level, and the number of groups."""
    first = [level for level in _TIERS if level < len(counts)]
    found = []
    for a, b in zip(first, [*first[1:], len(counts)], strict=True):
        num_groups = blocks.shape[1] >> a
        found.append((constant(_seen_intervals, tuple(counts), num_groups, a, b, device=blocks.device), num_groups))
    return found


def _of_tier(samples: tuple[Tensor, Tensor, Tensor], seen: Tensor, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """What each group of blocks sees of the samples: (BH, G, K, D), (BH, G, K, Dv) and (BH, G, 1, K)."""
    keys, values, bias = (x.index_select(1, seen).unflatten(1, (num_groups, -1)).flatten(2, 3) for x in samples)
    return keys, values, bias.unsqueeze(2)


def _merge_into(out: Tensor, lse: Tensor, far: Partial) -> tuple[Tensor, Tensor]:
    """Merge the partial of a tier into `out` (BH, T, block_size, Dv), in place without a gradient, and into `lse`.

    Every query attends to itself in the window, so that few operations are enough.
    """
    sizes = far.lse.shape[1], out.shape[1] // far.lse.shape[1]
    far_lse = far.lse.reshape(lse.shape)
    weight = (far_lse - lse).sigmoid().to(out.dtype).unflatten(1, sizes).unsqueeze(-1)
    view, far_out = out.unflatten(1, sizes), far.out.unflatten(2, (sizes[1], -1))
    if torch.is_grad_enabled() and (out.requires_grad or far_out.requires_grad):
        out = torch.lerp(view, far_out, weight).flatten(1, 2)
    else:
        view.lerp_(far_out, weight)
    return out, torch.logaddexp(lse, far_lse)


class _Samples(NamedTuple):
    """The samples of the intervals of all levels, and one interval without samples behind them.

    Attributes:
        key_index: int64 (BH, J + 1, M), by position.
        log_weight: (BH, J + 1, M).
        counts: the intervals of each level.
    """

    key_index: Tensor
    log_weight: Tensor
    counts: tuple[int, ...]


def _all_samples(plans: Sequence[IntervalPlan], block_size: int, dtype: torch.dtype) -> _Samples:
    device, batch_heads = plans[0].sample_index.device, plans[0].sample_index.shape[0]
    num_samples = max(plan.sample_index.shape[2] for plan in plans)
    counts = tuple(plan.sample_index.shape[1] for plan in plans)
    excluded = _excluded(dtype)
    index, log_weight = [], []
    for plan in plans:
        missing = num_samples - plan.sample_index.shape[2]
        index.append(pad(plan.sample_index, (0, missing)) if missing else plan.sample_index)
        log_weight.append(pad(plan.log_weight, (0, missing), value=excluded) if missing else plan.log_weight)
    nothing = constant(_nothing, num_samples, excluded, dtype, device=device).expand(batch_heads, -1, -1)
    index.append(constant(_nothing, num_samples, 0, torch.int64, device=device).expand(batch_heads, -1, -1))
    first = constant(_first_of_intervals, counts, block_size, device=device)
    whole = torch.cat((*log_weight, nothing), 1)
    return _Samples(torch.cat(index, 1) + first, whole.to(dtype), counts)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """`take` by one kernel."""
    found: Tensor = x.gather(1, index.flatten(1).unsqueeze(2).expand(-1, -1, x.shape[2]))
    return found.view(*index.shape, x.shape[2])


def _excluded(dtype: torch.dtype) -> float:
    """A finite bias that excludes a pair."""
    return max(torch.finfo(dtype).min / 2, -1e30)


def _window_bias(block_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The bias of the window: a query sees the block before its own, and its own up to itself. (1, 1, s, 2 s)."""
    future = torch.ones(block_size, 2 * block_size, dtype=torch.bool, device=device).triu(block_size + 1)
    return torch.zeros(future.shape, dtype=dtype, device=device).masked_fill_(future, _excluded(dtype))[None, None]


def _nothing(num_samples: int, number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((1, 1, num_samples), number, dtype=dtype, device=device)


def _first_of_intervals(counts: tuple[int, ...], block_size: int, device: torch.device) -> Tensor:
    """The first token of the intervals of all levels, and 0 for the one without samples: int64 (J + 1, 1)."""
    levels = [torch.arange(n, device=device) * (2 * block_size << level) for level, n in enumerate(counts)]
    return torch.cat((*levels, torch.zeros(1, dtype=torch.int64, device=device)))[:, None]


def _seen_intervals(counts: tuple[int, ...], num_groups: int, first: int, end: int, device: torch.device) -> Tensor:
    """Which of the intervals of `_first_of_intervals` each group of 2**first blocks from block 1 on sees.

    Returns:
        int64 (num_groups (end - first),), for the levels from `first` to `end`.
    """
    completed = torch.arange(num_groups, device=device) << first
    seen = []
    for level in range(first, end):
        interval = sum(counts[:level]) + (completed >> level) // 2
        seen.append(torch.where((completed >> level) % 2 == 1, interval.clamp(max=sum(counts)), sum(counts)))
    return torch.stack(seen, 1).flatten()
