"""Attention of blocks of queries to keys that are gathered by index.

There are three forms. On the CPU the keys of some blocks at a time are gathered, while they fit its caches. By
PyTorch's own kernels ("library") the keys of all blocks are gathered at once. By Triton one kernel reads the keys by
index, and writes its output by the position of the queries.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.blocks import pad_to_blocks, take
from hf_efficient_attn.ops.onednn import grouped_attention, use_grouped
from hf_efficient_attn.ops.partial import Partial, partial_attention

# Scores of a block from which `grouped_attention` is faster than `partial_attention`. With 64 queries and 176 keys it
# takes 10 to 60 % longer, and with 64 and 288 they are equal.
_LEAST_GROUPED = 1 << 14
# Numbers of a query, key or value that the Triton kernels hold at most.
_LARGEST_DIM = 256


class GatheredKeys(NamedTuple):
    """The keys of each of T blocks of queries, by index.

    Attributes:
        key_index: int64 (BH, T, K).
        bias: (BH, T, 1, K), added to the scores.
        block_q: queries of a block.
        query_order: int64 (BH, Nq), the order in which the queries are cut into blocks, or None.
        query_rank: int64 (BH, Nq), the inverse of `query_order`, or None.
    """

    key_index: Tensor
    bias: Tensor
    block_q: int
    query_order: Tensor | None = None
    query_rank: Tensor | None = None


def gathered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gathered: GatheredKeys,
    *,
    scale: float,
    dropout_p: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of blocks of queries to keys that are gathered by index.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        value: (BH, Nk, Dv).
        gathered: the keys of each block.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.
        out: (BH, Nq, Dv) to write into, or None.

    Returns:
        (BH, Nq, Dv), by position of the queries.
    """
    form = backend(query, key, value)
    if form == "triton" and not dropout_p and _has_kernel(query, key, value):
        index, bias, block_q, order, _ = gathered
        result = gather_attend(query, key, value, index, bias.squeeze(2).float(), order, block_q, float(scale))[0]
        return result if out is None else out.copy_(result)
    is_large = gathered.block_q * gathered.key_index.shape[2] >= _LEAST_GROUPED
    if form == "cpu" and not dropout_p and is_large and use_grouped(query, key, value):
        return _gathered_by_onednn(query, key, value, gathered, scale, out)
    order, rank, index = gathered.query_order, gathered.query_rank, gathered.key_index
    blocks = pad_to_blocks(query if order is None else take(query, order), gathered.block_q)
    keys, values = take(key, index), take(value, index)
    result = partial_attention(blocks, keys, values, gathered.bias, scale=scale, dropout_p=dropout_p).out.flatten(1, 2)
    if rank is not None:
        return take(result, rank, out)
    result = result[:, : query.shape[1]]
    return result if out is None else out.copy_(result)


def gathered_partial(
    query: Tensor, key: Tensor, value: Tensor, gathered: GatheredKeys, *, scale: float, dropout_p: float = 0.0
) -> Partial:
    """`gathered_attention` with its lse, for queries in the order of their positions.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        value: (BH, Nk, Dv).
        gathered: the keys of each block, without an order of the queries.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        Partial with out (BH, Nq, Dv) and lse (BH, Nq).
    """
    index, bias, block_q, _, _ = gathered
    if backend(query, key, value) == "triton" and not dropout_p and _has_kernel(query, key, value):
        return Partial(*gather_attend(query, key, value, index, bias.squeeze(2).float(), None, block_q, float(scale)))
    blocks = pad_to_blocks(query, block_q)
    out, lse = partial_attention(blocks, take(key, index), take(value, index), bias, scale=scale, dropout_p=dropout_p)
    return Partial(out.flatten(1, 2)[:, : query.shape[1]], lse.flatten(1, 2)[:, : query.shape[1]])


def _gathered_by_onednn(
    query: Tensor, key: Tensor, value: Tensor, gathered: GatheredKeys, scale: float, out: Tensor | None
) -> Tensor:
    """`gathered_attention` by `grouped_attention`, with the queries gathered in the layout of the latter."""
    (index, bias, block_q, order, rank), (batch_heads, q_len, _) = gathered, query.shape
    num_blocks = index.shape[1]
    missing = num_blocks * block_q - q_len
    if order is None:
        order = torch.arange(q_len, device=query.device).expand(batch_heads, -1)
    # The last block is padded with query 0; the result for the padding is not used.
    order = pad(order, (0, missing)) if missing else order
    head = torch.arange(batch_heads, device=query.device)[:, None]
    order = (order + head * q_len).view(batch_heads * num_blocks, block_q).t()
    index = (index.flatten(1) + head * key.shape[1]).view(batch_heads * num_blocks, -1)
    query, key, flat_value = (x.reshape(-1, x.shape[2]) for x in (query, key, value))
    result = grouped_attention(query, key, flat_value, order, index, bias.flatten(0, 1).squeeze(1), scale=scale)
    # Query r of block t of a head is at index r * (number of all blocks) + (number of its block) of the result.
    rank = torch.arange(q_len, device=query.device).expand(batch_heads, -1) if rank is None else rank
    rank = rank % block_q * (batch_heads * num_blocks) + rank // block_q + head * num_blocks
    out = value.new_empty(batch_heads, q_len, value.shape[2]) if out is None else out
    torch.index_select(result.flatten(0, 1), 0, rank.flatten(), out=out.view(-1, value.shape[2]))
    return out


def _has_kernel(*tensors: Tensor) -> bool:
    """Whether the Triton kernels compute these tensors: up to 256 dimensions, not float64, and any order of sums."""
    if any(x.shape[2] > _LARGEST_DIM or x.dtype == torch.float64 for x in tensors):
        return False
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return not (needs_grad and torch.are_deterministic_algorithms_enabled())


@torch.library.custom_op("hf_efficient_attn::gather_attend", mutates_args=())
def gather_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor,
    log_weight: Tensor,
    order: Tensor | None,
    block_q: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention of blocks of queries to keys by index, and its lse, by one Triton kernel. Differentiable.

    Args:
        query: (BH, Nq, D), not float64.
        key: (BH, Nk, D).
        value: (BH, Nk, Dv).
        index: (BH, T, K), int32 or int64, the keys of each block.
        log_weight: float32 (BH, T, K), added to the scores; -inf for an unused entry, whose key is not read.
        order: (BH, Nq), int32 or int64, the order in which the queries are cut into blocks, or None.
        block_q: queries of a block, at least Nq / T.
        scale: factor of the scores.

    Returns:
        out (BH, Nq, Dv) in the dtype of `value` and lse float32 (BH, Nq), by position of the queries; 0 and -inf for
        queries without a key.
    """
    from hf_efficient_attn.ops import triton_gather_attend

    return triton_gather_attend.forward(query, key, value, index, log_weight, order, block_q, scale)


@gather_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *plan: Tensor | int | float | None) -> tuple[Tensor, Tensor]:
    shape = query.shape[:2]
    return value.new_empty(*shape, value.shape[2]), query.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("hf_efficient_attn::gather_attend_backward", mutates_args=())
def _gather_attend_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor,
    log_weight: Tensor,
    order: Tensor | None,
    out: Tensor,
    lse: Tensor,
    block_q: int,
    scale: float,
    with_log_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and log-weights (empty unless `with_log_weight`)."""
    from hf_efficient_attn.ops import triton_gather_attend

    tensors = (grad_out, grad_lse, query, key, value, index, log_weight, order, out, lse)
    return triton_gather_attend.backward(*tensors, block_q, scale, with_log_weight)


@_gather_attend_backward.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, value, index = args[2:6]
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value)]
    grad_log_weight = query.new_empty(index.shape if args[-1] else 0, dtype=torch.float32)
    return grads[0], grads[1], grads[2], grad_log_weight


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.block_q, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    with_log_weight = ctx.needs_input_grad[4]
    query, key, value, grad_log_weight = _gather_attend_backward(
        grad_out, grad_lse, *ctx.saved_tensors, ctx.block_q, ctx.scale, with_log_weight
    )
    return query, key, value, None, grad_log_weight if with_log_weight else None, None, None, None


gather_attend.register_autograd(_backward, setup_context=_save)
