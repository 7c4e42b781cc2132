"""Softmax attention over a subset of the keys, and the exact merge of such partial results.

A `Partial` is the result of attention over a subset of the keys: the normalized output and the log of the total weight.
The partials of two disjoint subsets merge into that of their union. This is the online softmax of Milakov & Gimelshein
(2018), which FlashAttention (Dao et al. 2022) applies to blocks. All attention in this package is built on the two
functions `partial_attention` and `merge`.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.export import exporting_to_onnx, is_compiling
from hf_efficient_attn.ops.fused_attention import fused_attention, fused_attention_backward, is_shared
from hf_efficient_attn.ops.half_attention import half_attention, half_attention_backward, use_half
from hf_efficient_attn.ops.onednn import pays, product_attention, product_attention_backward, use_product
from hf_efficient_attn.ops.precision import LOG2_E, has_matrix_units, product_dtype

# Scores that are computed at a time: 2**20 float32 numbers stay in the cache of one core, and the buffers are reused.
_SCORES_NUMEL = 1 << 20
_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FUSED_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# Queries of a head from which on the second is faster than products.
_LEAST_FUSED = 256


class Partial(NamedTuple):
    """Attention over a subset of the keys.

    Attributes:
        out: (..., Nq, Dv), the normalized output; 0 for an empty subset.
        lse: (..., Nq), the log of the sum of the weights, float32 (float64 for float64 input); -inf for an empty
            subset.
    """

    out: Tensor
    lse: Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over numbers of `dtype`: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def safe_row_max(row_max: Tensor) -> Tensor:
    """Maxima that can be subtracted from scores: -inf, the maximum of an empty set, becomes 0."""
    return row_max.masked_fill(row_max == -torch.inf, 0.0)


def exp_(x: Tensor) -> Tensor:
    """Compute e^x in place by a power of two, without a gradient.

    On the CPU `exp` calls MKL, which takes three times as long as `exp2`, and thirty times if it underflows.
    """
    return x.mul_(LOG2_E).exp2_()


def merge(*partials: Partial) -> Partial:
    """Merge the partials of disjoint subsets into that of their union. Subsets may be empty.

    The merge is associative and exact. The output is the convex combination of the outputs by the softmax over the
    `lse`. It is differentiable in every `out` and `lse`.
    """
    if len(partials) == 1:
        return partials[0]
    outs, lses = zip(*partials, strict=True)
    row_max = lses[0].detach()
    for lse in lses[1:]:
        row_max = torch.maximum(row_max, lse.detach())
    row_max = safe_row_max(row_max)
    weights = [torch.exp(lse - row_max) for lse in lses]
    total = weights[0]
    for weight in weights[1:]:
        total = total + weight
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    out = outs[0] * (weights[0] / total).unsqueeze(-1)
    for part, weight in zip(outs[1:], weights[1:], strict=True):
        out.addcmul_(part.to(out.dtype), (weight / total).unsqueeze(-1))
    return Partial(out.to(outs[0].dtype), (total.log() + row_max).masked_fill(empty, -torch.inf))


def partial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float,
    dropout_p: float = 0.0,
    finite_bias: bool = False,
) -> Partial:
    """Exact attention of blocks of queries to blocks of keys: softmax(scale * query key^T + bias) value, and its lse.

    Args:
        query: (BH, T, Nq, D), where T is the number of blocks and Nq the number of queries of a block.
        key: (BH, T, Nk, D), or (BH, 1, Nk, D) if all blocks share the keys.
        value: (BH, T, Nk, Dv), or (BH, 1, Nk, Dv) if all blocks share the keys.
        bias: broadcastable to (BH, T, Nq, Nk), in the accumulation dtype, or None. -inf excludes a pair.
            Differentiable.
        scale: factor of the scores.
        dropout_p: probability of dropping a normalized weight; the others are divided by 1 - dropout_p. Drawn from the
            global generator.
        finite_bias: whether the bias excludes pairs by a very negative number, and no query loses all its pairs. On an
            accelerator this saves a copy of the bias.

    Returns:
        Partial with out (BH, T, Nq, Dv) in the dtype of `value` and lse (BH, T, Nq). A query whose pairs are all
        excluded has out 0 and lse -inf.
    """
    if dropout_p > 0.0 or exporting_to_onnx():  # ONNX has no form of the custom operator below
        return _with_dropout(query, key, value, bias, scale, dropout_p)
    tensors = (query, key, value) if bias is None else (query, key, value, bias)
    if is_compiling() or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return Partial(*torch.ops.hf_efficient_attn.partial_attention(query, key, value, bias, float(scale)))
    return Partial(*_forward(query, key, value, bias, float(scale), finite_bias))


def partial_attention_naive(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *, scale: float
) -> Partial:
    """The readable form of `partial_attention`, with the same arguments and result."""
    scores = query @ key.transpose(-1, -2) * scale + (0.0 if bias is None else bias)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - safe_row_max(lse).unsqueeze(-1))
    return Partial(weights @ value, lse)


def _with_dropout(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, dropout_p: float
) -> Partial:
    """`partial_attention_naive` with dropout, in the accumulation dtype, by standard operators.

    Autograd keeps the weights of all blocks.
    """
    acc_dtype = accumulation_dtype(query.dtype)
    product = _product_of_blocks if exporting_to_onnx() else torch.matmul
    scores = product(query.to(acc_dtype), key.to(acc_dtype).transpose(-1, -2)) * scale
    if bias is not None:
        scores = scores + bias
    # Not by logsumexp, whose gradient is NaN if all scores of a query are -inf.
    row_max = safe_row_max(scores.detach().amax(-1, keepdim=True))
    weights = torch.exp(scores - row_max)
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    weights = weights / total if dropout_p == 0.0 else torch.nn.functional.dropout(weights / total, dropout_p)
    lse = (total.log() + row_max).masked_fill(empty, -torch.inf).squeeze(-1)
    return Partial(product(weights, value.to(acc_dtype)).to(value.dtype), lse)


def _product_of_blocks(left: Tensor, right: Tensor) -> Tensor:
    """Product of (BH, T, M, K) and (BH, T or 1, K, N), with T unknown.

    If the example of an export has one block, `matmul` takes the dimension for a broadcast one.
    """
    shape = left.shape[:2]
    right = right.expand(*shape, -1, -1).flatten(0, 1)
    product: Tensor = torch.bmm(left.flatten(0, 1), right).unflatten(0, shape)
    return product


def _chunks(query: Tensor, key: Tensor) -> list[tuple[int, slice]]:
    """Chunks whose scores have about `_SCORES_NUMEL` numbers: a head, and a slice of its blocks."""
    (batch_heads, num_blocks, block_q, _), block_k = query.shape, key.shape[2]
    step = max(1, _SCORES_NUMEL // max(1, block_q * block_k))
    starts = range(0, num_blocks, step)
    return [(head, slice(t, min(t + step, num_blocks))) for head in range(batch_heads) for t in starts]


def _chunk_of(tensor: Tensor, head: int, blocks: slice) -> Tensor:
    """The chunk of a tensor (BH or 1, T or 1, ., .): (t or 1, ., .)."""
    tensor = tensor[head if tensor.shape[0] > 1 else 0]
    return tensor[blocks] if tensor.shape[0] > 1 else tensor


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, scale: float, buffer: Tensor) -> Tensor:
    """Compute the scores with bias of a chunk in `buffer`: query (t, Nq, D), key (t or 1, Nk, D) -> (t, Nq, Nk)."""
    shape = (query.shape[0], query.shape[1], key.shape[1])
    scores = buffer[: shape[0] * shape[1] * shape[2]]
    if key.shape[0] == 1:
        torch.mm(query.reshape(-1, query.shape[-1]), key[0].t(), out=scores.view(-1, shape[2]))
    else:
        torch.bmm(query, key.transpose(1, 2), out=scores.view(shape))
    scores = scores.view(shape).mul_(scale)
    return scores if bias is None else scores.add_(bias)


@torch.library.custom_op("hf_efficient_attn::partial_attention", mutates_args=())
def _partial_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = _forward(query, key, value, bias, scale)
    return out.contiguous(), lse.contiguous()


def _forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, finite_bias: bool = False
) -> tuple[Tensor, Tensor]:
    """Output and lse of `partial_attention`, without a gradient."""
    if query.numel() == 0 or key.shape[2] == 0:
        acc_dtype = accumulation_dtype(query.dtype)
        lse = torch.full(query.shape[:3], -torch.inf, dtype=acc_dtype, device=query.device)
        return value.new_zeros(*query.shape[:3], value.shape[3]), lse
    if backend(query) != "cpu":
        return fused_attention(query, key, value, bias, scale, finite_bias)
    dtype = product_dtype(query)
    if dtype != query.dtype:
        return _forward_as(dtype, query, key, value, bias, scale)
    return _forward_on_cpu(query, key, value, bias, scale)


def _forward_as(
    dtype: torch.dtype, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`_forward_on_cpu` with products in another dtype, one head at a time, so that the copies are small."""
    out = value.new_empty(*query.shape[:3], value.shape[3])
    lse = query.new_empty(query.shape[:3], dtype=accumulation_dtype(query.dtype))
    for a in range(query.shape[0]):
        own_query, own_key, own_value = (x[a : a + 1].to(dtype) for x in (query, key, value))
        own_bias = bias if bias is None or bias.shape[0] == 1 else bias[a : a + 1]
        out[a : a + 1], lse[a : a + 1] = _forward_on_cpu(own_query, own_key, own_value, own_bias, scale)
    return out, lse


def _forward_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`_forward` with products in the dtype of the tensors."""
    (batch_heads, num_blocks, block_q, head_dim), block_k, value_dim = query.shape, key.shape[2], value.shape[3]
    acc_dtype = accumulation_dtype(query.dtype)
    if _by_products(query, key, value, bias):
        return _forward_products(query, key, value, bias, scale)
    fused = head_dim == value_dim
    if not (fused and has_matrix_units()) and use_half((query, key, value, bias), scale):
        return half_attention(query, key, value, bias, scale)
    if fused:
        return _forward_fused(query, key, value, bias, scale)
    width = max(head_dim, value_dim)
    if num_blocks * block_q >= _LEAST_FUSED and is_shared(key, value, bias) and 2 * min(head_dim, value_dim) > width:
        # The kernel takes as many numbers of a query as of a value.
        out, lse = _forward_fused(_widened(query, width), _widened(key, width), _widened(value, width), bias, scale)
        return out[..., :value_dim], lse
    out = query.new_empty(batch_heads, num_blocks, block_q, value_dim)
    lse = query.new_empty(batch_heads, num_blocks, block_q, dtype=acc_dtype)
    chunks = _chunks(query, key)
    buffer = query.new_empty(_longest(chunks) * block_q * block_k, dtype=acc_dtype)
    with torch.autocast(query.device.type, enabled=False):
        for a, t in chunks:
            values = _chunk_of(value, a, t).to(acc_dtype)
            own_bias = None if bias is None else _chunk_of(bias, a, t)
            scores = _scores(query[a, t].to(acc_dtype), _chunk_of(key, a, t).to(acc_dtype), own_bias, scale, buffer)
            row_max = safe_row_max(scores.amax(-1, keepdim=True))
            total = exp_(scores.sub_(row_max)).sum(-1, keepdim=True)
            lse[a, t] = (total.log() + row_max).squeeze(-1)
            out[a, t] = (scores @ values).div_(total.masked_fill_(total == 0, 1.0))
    return out, lse


def _by_products(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> bool:
    """Whether `_forward_products` is faster than the other forms, and there is no bias of single pairs."""
    num_blocks, block_q = query.shape[1:3]
    if not pays(block_q * num_blocks if is_shared(key, value, bias) else block_q, key.shape[2]):
        return False
    return (bias is None or bias.shape[2] == 1) and use_product(query, key, value, bias)


def _forward_products(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`_forward` by oneDNN, one block at a time. Blocks that share their keys are one block."""
    out, lse = product_attention(*_as_heads(query, key, value, bias), scale, True)
    return out.view(*query.shape[:3], value.shape[3]), lse.view(query.shape[:3])


def _as_heads(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The blocks as heads (BH * T, ., .), or those of each head as one (BH, ., .) if they share their keys."""
    batch_heads, num_blocks = query.shape[:2]
    if is_shared(key, value, bias):
        query, num_blocks = query.reshape(batch_heads, 1, -1, query.shape[3]), 1
    keys, values = (x.expand(-1, num_blocks, -1, -1).flatten(0, 1) for x in (key, value))
    own = None if bias is None else bias.expand(batch_heads, num_blocks, -1, -1).flatten(0, 2)
    return query.flatten(0, 1), keys, values, own


def _forward_fused(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`_forward` by PyTorch's fused kernel for the CPU, with the blocks as its batch, so that no output is transposed.

    One call if each block has its own keys, else one call per head.
    """
    batch_heads, num_blocks, block_q, head_dim = query.shape
    # The kernel assumes that the numbers of a token are contiguous, whatever the strides.
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    # Overlapping views of the keys cannot be flattened into one batch without a copy.
    own_keys = key.shape[1] == value.shape[1] == num_blocks and (batch_heads == 1 or key.is_contiguous())
    if own_keys and (bias is None or bias.shape[:2] in ((1, 1), (batch_heads, num_blocks))):
        flat_bias = None if bias is None else bias.flatten(0, 1)[:, None]
        query, key, value = (x.reshape(batch_heads * num_blocks, 1, -1, head_dim) for x in (query, key, value))
        out, lse = _FUSED(query, key, value, attn_mask=flat_bias, scale=scale)
    else:
        outs = []
        for a in range(batch_heads):
            keys, values = (x[a].expand(num_blocks, -1, -1)[:, None] for x in (key, value))
            own_bias = None if bias is None else bias[min(a, bias.shape[0] - 1)][:, None]
            outs.append(_FUSED(query[a][:, None], keys, values, attn_mask=own_bias, scale=scale))
        out, lse = outs[0] if len(outs) == 1 else (torch.stack(x) for x in zip(*outs, strict=True))
    out, lse = out.view(batch_heads, num_blocks, block_q, head_dim), lse.view(batch_heads, num_blocks, block_q)
    # For a query without keys the kernel gives an output of 0, but also an lse of 0.
    return out, lse if bias is None else torch.where(bias.amax(-1) == -torch.inf, -torch.inf, lse)


def _longest(chunks: list[tuple[int, slice]]) -> int:
    """The largest number of blocks of a chunk."""
    return max((t.stop - t.start for _, t in chunks), default=0)


@_partial_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    batch_heads, num_blocks, block_q, _ = query.shape
    lse = query.new_empty(batch_heads, num_blocks, block_q, dtype=accumulation_dtype(query.dtype))
    return value.new_empty(batch_heads, num_blocks, block_q, value.shape[-1]), lse


@torch.library.custom_op("hf_efficient_attn::partial_attention_backward", mutates_args=())
def _partial_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and bias (empty unless `with_bias`). A custom op takes its tensors one by one."""
    if backend(query) != "cpu" and query.numel() and key.numel():
        tensors = query, key, value, bias
        found = fused_attention_backward((grad_out, grad_lse), tensors, (out, lse), scale, with_bias)
        return *found[:3], lse.new_empty(0) if found[3] is None else found[3]
    dtype = product_dtype(query)
    operands = query.to(dtype), key.to(dtype), value.to(dtype), bias
    if use_half(operands, scale, with_bias):
        found = half_attention_backward((grad_out, grad_lse), operands, (out, lse), scale, with_bias)
        grad_query, grad_key, grad_value = (x.to(y.dtype) for x, y in zip(found[:3], (query, key, value), strict=True))
        return grad_query, grad_key, grad_value, lse.new_empty(0) if found[3] is None else found[3]
    with torch.no_grad():
        if _by_products(query, key, value, bias) and grad_out.dtype == query.dtype:
            return _backward_products((grad_out, grad_lse), (query, key, value, bias), (out, lse), scale, with_bias)
    with torch.autocast(query.device.type, enabled=False):
        if _by_fused(query, key, value, bias, scale):
            return _backward_fused((grad_out, grad_lse), (query, key, value, bias), (out, lse), scale, with_bias)
        return _backward_in_chunks((grad_out, grad_lse), (query, key, value, bias), (out, lse), scale, with_bias)


def _backward_in_chunks(
    grads: tuple[Tensor, Tensor | None],
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    results: tuple[Tensor, Tensor],
    scale: float,
    with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`_partial_attention_backward` by plain products, a few blocks at a time in reused buffers."""
    (grad_out, grad_lse), (query, key, value, bias), (out, lse) = grads, tensors, results
    acc_dtype, block_k = accumulation_dtype(query.dtype), key.shape[2]
    grad_bias = torch.zeros_like(bias) if with_bias and bias is not None else lse.new_empty(0)
    sums = tuple(torch.zeros(x.shape, dtype=acc_dtype, device=x.device) for x in (query, key, value))
    grad_query, grad_key, grad_value = sums
    # d scores = P * (grad_out . v_j - grad_out . out + grad_lse) with P = exp(scores - lse). P = 0 without any key.
    delta = (grad_out.to(acc_dtype) * out.to(acc_dtype)).sum(-1)
    delta = (delta if grad_lse is None else delta - grad_lse).neg_().unsqueeze(-1)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf).unsqueeze(-1)
    shared_keys = key.shape[1] == 1 == value.shape[1]
    chunks = _chunks(query, key)
    size = _longest(chunks) * query.shape[2] * block_k
    first, second = query.new_empty(size, dtype=acc_dtype), query.new_empty(size, dtype=acc_dtype)
    for a, t in chunks:
        shape = (t.stop - t.start, query.shape[2], block_k)
        # Blocks that share their keys are one block.
        rows = (1, -1) if shared_keys else shape[:2]
        queries, grad = (x[a, t].to(acc_dtype).reshape(*rows, x.shape[3]) for x in (query, grad_out))
        keys, values = _chunk_of(key, a, t).to(acc_dtype), _chunk_of(value, a, t).to(acc_dtype)
        weights, grad_scores = (x[: shape[0] * shape[1] * shape[2]].view(shape) for x in (first, second))
        # What is added to a product goes where its result will be, and factors go into it.
        if bias is None:
            torch.neg(lse[a, t].expand(shape), out=weights)
        else:
            torch.sub(_chunk_of(bias, a, t), lse[a, t], out=weights)
        grad_scores.copy_(delta[a, t].expand(shape))
        weights, grad_scores = (x.view(*rows, block_k) for x in (weights, grad_scores))
        weights.baddbmm_(queries, keys.mT, beta=LOG2_E, alpha=scale * LOG2_E).exp2_()
        grad_scores.baddbmm_(grad, values.mT).mul_(weights)
        if with_bias:
            own_grad = _chunk_of(grad_bias, a, t)
            own_grad += grad_scores.view(shape).sum_to_size(own_grad.shape)
        key_blocks = slice(0, 1) if shared_keys else t
        grad_value[a, key_blocks].baddbmm_(weights.mT, grad)
        grad_key[a, key_blocks].baddbmm_(grad_scores.mT, queries, alpha=scale)
        grad_query[a, t].view(queries.shape).baddbmm_(grad_scores, keys, alpha=scale)
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), grad_bias


def _by_fused(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> bool:
    """Whether `_backward_fused` is faster than products of chunks, and there is no bias of single pairs.

    The kernel takes few queries of a block at a time if it has few, and a thread computes whole heads.
    """
    (batch_heads, num_blocks, rows, _), shared = query.shape, is_shared(key, value, bias)
    heads, rows = (batch_heads, num_blocks * rows) if shared else (batch_heads * num_blocks, rows)
    if rows < _LEAST_FUSED or heads < torch.get_num_threads() or not key.numel():
        return False
    return bias is None or (bias.shape[2] == 1 and scale != 0.0)


def _backward_fused(
    grads: tuple[Tensor, Tensor | None],
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    results: tuple[Tensor, Tensor],
    scale: float,
    with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`_partial_attention_backward` by PyTorch's fused kernel for the CPU.

    It knows neither a gradient of the lse nor one of a bias. A further dimension stands for them: the bias is that of
    the keys, where all queries are 1; -grad_lse . 1 is added to the product of grad_out and out, where values are 0.
    """
    (grad_out, grad_lse), (out, lse), acc_dtype = grads, results, accumulation_dtype(tensors[0].dtype)
    query, key, value, bias = _as_heads(*tensors)
    (heads, rows, dim), value_dim = query.shape, value.shape[2]
    width = max(dim + (bias is not None), value_dim + (grad_lse is not None))
    width += -width % 4  # the kernel takes longer for other numbers

    query, key, value, grad_out, out = (
        _widened(x.reshape(heads, -1, x.shape[-1]).to(acc_dtype), width) for x in (query, key, value, grad_out, out)
    )
    if bias is not None:
        query[..., -1], key[..., -1] = 1.0, bias.view(heads, -1) / scale
    if grad_lse is not None:
        grad_out[..., -1], out[..., -1] = grad_lse.reshape(heads, rows), -1.0
    # For queries without a key the kernel has an lse of 0.
    lse = lse.reshape(heads, rows).masked_fill(lse.reshape(heads, rows) == -torch.inf, 0.0)
    operands = (x.unsqueeze(0) for x in (grad_out, query, key, value, out, lse))
    grad_query, grad_key, grad_value = (x[0] for x in _FUSED_BACKWARD(*operands, 0.0, False, scale=scale))
    grad_bias = grad_key[..., -1] / scale if with_bias else None
    found = grad_key[..., :dim], grad_value[..., :value_dim], grad_bias
    return grad_query[..., :dim].reshape(tensors[0].shape).to(tensors[0].dtype), *_of_blocks(found, tensors, lse)


def _widened(x: Tensor, width: int) -> Tensor:
    """Add dimensions of zeros at the end, up to `width`."""
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))


def _of_blocks(
    found: tuple[Tensor, Tensor, Tensor | None], tensors: tuple[Tensor, Tensor, Tensor, Tensor | None], like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of keys, values and biases of `_as_heads` as those of `tensors`: a sum if blocks or heads share them.

    `like` gives the dtype of the one that stands for no gradient of the bias.
    """
    blocks = 1 if is_shared(*tensors[1:]) else tensors[0].shape[1]
    grad_key, grad_value, grad_bias = (
        like.new_empty(0) if x is None or y is None else x.reshape(-1, blocks, *y.shape[2:]).sum_to_size(y.shape)
        for x, y in zip(found, tensors[1:], strict=True)
    )
    return grad_key.to(tensors[1].dtype), grad_value.to(tensors[2].dtype), grad_bias


def _backward_products(
    grads: tuple[Tensor, Tensor | None],
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    results: tuple[Tensor, Tensor],
    scale: float,
    with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`_partial_attention_backward` by oneDNN. Blocks that share their keys are one block."""
    (grad_out, grad_lse), (out, lse) = grads, results
    delta = (grad_out * out).sum(-1)
    delta = delta if grad_lse is None else delta - grad_lse
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    operands = _as_heads(*tensors)
    heads = operands[0].shape[:2]
    rows = grad_out.reshape(*heads, -1), delta.reshape(heads), lse.reshape(heads)
    of_query, of_key, of_value, of_bias = product_attention_backward(operands, rows, scale, with_bias)
    return of_query.view(tensors[0].shape), *_of_blocks((of_key, of_value, of_bias), tensors, lse)


@_partial_attention_backward.register_fake
def _(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_query, grad_key, grad_value = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value)
    )
    grad_bias = torch.empty_like(bias) if with_bias and bias is not None else lse.new_empty(0)
    return grad_query, grad_key, grad_value, grad_bias


class _Context(Protocol):
    """What autograd passes from the forward to the backward."""

    scale: float
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


def _save(
    ctx: _Context, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, float], output: tuple[Tensor, Tensor]
) -> None:
    query, key, value, bias, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, bias, *output)
    ctx.set_materialize_grads(False)  # without a gradient of the lse less is to compute


def _backward(ctx: _Context, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    with_bias, saved = ctx.needs_input_grad[3], ctx.saved_tensors  # once: with checkpoints they can be unpacked once
    if grad_out is None:
        grad_out = torch.zeros_like(saved[4])
    *grads, grad_bias = torch.ops.hf_efficient_attn.partial_attention_backward(
        grad_out, grad_lse, *saved, ctx.scale, with_bias
    )
    return *grads, grad_bias if with_bias else None, None


torch.library.register_autograd("hf_efficient_attn::partial_attention", _backward, setup_context=_save)


def prefix_merge(partial: Partial, dim: int) -> Partial:
    """For each index c along `dim`, the merge of the partials 0 .. c-1. The result at index 0 is empty.

    This exclusive scan works by doubling (Hillis & Steele 1986), in log2(C) steps. The result at c depends on the
    partials 0 .. c-1 alone, down to the last bit. A running sum relative to one common maximum would not have this
    property, because later partials would change its rounding.

    Args:
        partial: out (..., C, ..., Dv) and lse (..., C, ...).
        dim: the dimension of C in both, not negative.
    """
    scan = _shift(partial, dim, 1)
    step = 1
    while step < partial.lse.shape[dim]:
        scan = merge(scan, _shift(scan, dim, step))
        step *= 2
    return scan


def _shift(partial: Partial, dim: int, step: int) -> Partial:
    """Move every partial up by `step` indices along `dim`; the first ones become empty."""
    length = partial.lse.shape[dim]
    step = min(step, length)
    moved = []
    for tensor, empty in zip(partial, (0.0, -torch.inf), strict=True):
        fill = torch.full_like(tensor.narrow(dim, 0, step), empty)
        moved.append(torch.cat((fill, tensor.narrow(dim, 0, length - step)), dim))
    return Partial(*moved)
