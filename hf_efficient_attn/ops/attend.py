"""Softmax attention of blocks of queries to their keys, and its lse: the one function that knows the kernels.

A `Partial` is the result of attention over a subset of the keys: the normalized output and the log of the total weight.
The partials of two disjoint subsets merge into the partial of their union. This is the online softmax of Milakov &
Gimelshein (2018), which FlashAttention (Dao et al. 2022) applies to blocks. Attention in this package is built on the
two functions `attend` and `merge`, except exact attention where PyTorch's `scaled_dot_product_attention` takes it as it
is.

PyTorch's fused kernels compute forward and backward where they exist: a kernel for the CPU, and on CUDA FlashAttention
for half precision and "memory-efficient attention" for float32. Plain products compute everything else: other devices,
float64 on an accelerator, dropout, a bias of single pairs on an accelerator or with a gradient, and graphs for ONNX.

The kernels give no gradient of the lse and none of a bias. Additional dimensions stand for both. A bias per key becomes
a dimension of the keys in which all queries are 1; in half precision the sum of two dimensions holds it. With
dP = grad_out v^T the gradient of the scores is P (dP - delta), where delta = grad_out . out - grad_lse. So the kernel
takes one more dimension, in which grad_out is grad_lse, out is -1 and values are 0.

A product of bfloat16 tensors has a bfloat16 result on the CPU, although it is summed in float32. So other modules sum
over many tokens in parts, which they add in float32, and scores before an exponential stay in float32.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad

from hf_efficient_attn.ops.backends.devices import product_dtype, triton_applies
from hf_efficient_attn.ops.index import inverse, pad_to_blocks, take
from hf_efficient_attn.ops.slices import slice_size, sliced
from hf_efficient_attn.ops.tracing import exporting_to_onnx, kept_results

# exp(x) = 2^(x LOG2_E): on the CPU exp2 takes a fraction of the time of exp.
LOG2_E = 1.0 / math.log(2.0)
_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
_EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention
_EFFICIENT_BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward
# FlashAttention takes at most this many dimensions.
_MAX_FLASH_DIM = 256
_Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None]


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
    """Return the dtype of sums over numbers of `dtype`: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def safe_row_max(row_max: Tensor) -> Tensor:
    """Maxima that can be subtracted from scores: -inf, the maximum of an empty set, becomes 0."""
    return row_max.masked_fill(row_max == -torch.inf, 0.0)


def merge(*partials: Partial) -> Partial:
    """Merge the partials of disjoint subsets into the partial of their union. Subsets may be empty.

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
    weights = [torch.exp(lse - row_max) for lse in lses]  # (..., Nq) each
    total = weights[0]
    for weight in weights[1:]:
        total = total + weight
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    out = outs[0] * (weights[0] / total).unsqueeze(-1)  # (..., Nq, Dv)
    for part, weight in zip(outs[1:], weights[1:], strict=True):
        out.addcmul_(part.to(out.dtype), (weight / total).unsqueeze(-1))
    return Partial(out.to(outs[0].dtype), (total.log() + row_max).masked_fill(empty, -torch.inf))


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *, scale: float, dropout_p: float = 0.0
) -> Partial:
    """Compute softmax(scale * query key^T + bias) value and its lse for blocks of queries and their blocks of keys.

    Args:
        query: (BH, T, Nq, D), where T is the number of blocks and Nq the number of queries of a block.
        key: (BH, T, Nk, D), or (BH, 1, Nk, D) if all blocks share the keys. Overlapping views are not copied.
        value: (BH, T, Nk, Dv), or (BH, 1, Nk, Dv) if all blocks share the keys.
        bias: broadcastable to (BH, T, Nq, Nk), in the accumulation dtype, or None. -inf excludes a pair.
            Differentiable.
        scale: factor of the scores.
        dropout_p: probability of dropping a normalized weight; the others are divided by 1 - dropout_p. Drawn from the
            global generator.

    Returns:
        Partial with out (BH, T, Nq, Dv) in the dtype of `value` and lse (BH, T, Nq). A query whose pairs are all
        excluded has out 0 and lse -inf.
    """
    tensors = (query, key, value) if bias is None else (query, key, value, bias)
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if exporting_to_onnx() or keeps_pairs(query, key, bias, scale, dropout_p):
        return _by_products(query, key, value, bias, scale, dropout_p)
    if needs_grad:
        return Partial(*_Attend.apply(query, key, value, bias, float(scale)))  # type: ignore[no-untyped-call]
    return Partial(*_forward((query, key, value, bias), float(scale)))


def keeps_pairs(query: Tensor, key: Tensor, bias: Tensor | None, scale: float, dropout_p: float) -> bool:
    """Whether `attend` holds the weights of all pairs, because no kernel computes them."""
    return dropout_p > 0.0 or not _has_kernel(query, key, bias, scale)


def _has_kernel(query: Tensor, key: Tensor, bias: Tensor | None, scale: float) -> bool:
    kind = query.device.type
    if query.numel() == 0 or key.numel() == 0 or kind not in ("cpu", "cuda", "meta"):  # meta: as on CUDA
        return False
    per_key = bias is None or bias.shape[2] == 1
    if kind != "cpu":
        return per_key and query.dtype != torch.float64 and scale != 0.0 and query.shape[0] < 1 << 16
    with_bias = bias is not None and bias.requires_grad and torch.is_grad_enabled()
    return not with_bias or (per_key and scale != 0.0)


def _by_products(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, dropout_p: float
) -> Partial:
    """`attend` by standard operators, in the accumulation dtype. Autograd keeps the weights of all pairs."""
    acc_dtype = accumulation_dtype(query.dtype)
    product = _product_of_blocks if exporting_to_onnx() else torch.matmul
    # (BH, T, Nq, D) @ (BH, T, D, Nk) -> (BH, T, Nq, Nk)
    scores = product(query.to(acc_dtype), key.to(acc_dtype).mT) * scale
    if bias is not None:
        scores = scores + bias
    # Not by logsumexp, whose gradient is NaN if all scores of a query are -inf.
    row_max = safe_row_max(scores.detach().amax(-1, keepdim=True)) if key.shape[2] else scores.new_zeros(())
    weights = torch.exp(scores - row_max)  # (BH, T, Nq, Nk)
    total = weights.sum(-1, keepdim=True)  # (BH, T, Nq, 1)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (total.log() + row_max).masked_fill(empty, -torch.inf).squeeze(-1)  # (BH, T, Nq)
    weights = weights / total if dropout_p == 0.0 else dropout(weights / total, dropout_p)
    return Partial(product(weights, value.to(acc_dtype)).to(value.dtype), lse)


def _product_of_blocks(left: Tensor, right: Tensor) -> Tensor:
    """Product of (BH, T, M, K) and (BH, T or 1, K, N), with T unknown.

    If the example of an export has one block, `matmul` takes the dimension for a broadcast one.
    """
    shape = left.shape[:2]
    right = right.expand(*shape, -1, -1).flatten(0, 1)  # (BH * T, K, N)
    product: Tensor = torch.bmm(left.flatten(0, 1), right).unflatten(0, shape)
    return product


class _Attend(torch.autograd.Function):
    """Output and lse of `attend` by a fused kernel."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = kept_results(lambda: _forward((query, key, value, bias), scale))
        ctx.save_for_backward(query, key, value, bias, out, lse)
        ctx.scale = scale
        ctx.set_materialize_grads(False)  # the backward computes less without a gradient of the lse
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, bias, out, lse = ctx.saved_tensors
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        grads = (grad_out, grad_lse)
        inputs = (query, key, value, bias)
        return *_backward(grads, inputs, (out, lse), ctx.scale, ctx.needs_input_grad[3]), None


def _forward(inputs: _Inputs, scale: float) -> tuple[Tensor, Tensor]:
    query, key, value, bias = inputs
    on_cpu = query.device.type == "cpu"
    shape = query.shape[:3]
    value_dim = value.shape[3]
    dtype = product_dtype(query)
    columns = None if on_cpu or bias is None else bias[:, :, 0]  # (BH, T, Nk); only the CPU's kernel takes a bias
    query, key, value = _widened(query.to(dtype), key.to(dtype), value.to(dtype), columns, 0, scale)
    query, key, value, mask = _arranged(query, key, value, bias if on_cpu else None)
    if on_cpu:
        out, lse = _CPU(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
    elif _takes_flash(query):
        out, lse = _FLASH(query, key, value, 0.0, False, False, scale=scale)[:2]
    else:
        out, lse = _EFFICIENT(query, key, value, None, True, 0.0, False, scale=scale)[:2]
        lse = lse[..., : query.shape[2]]  # its lse is padded
    out = out if out.shape[3] == value_dim else out[..., :value_dim]
    out = out.reshape(*shape, value_dim).to(inputs[2].dtype)
    lse = lse.reshape(shape)
    if bias is None:
        return out, lse
    empty = bias.amax(-1) == -torch.inf  # (BH, T, 1 or Nq)
    if not on_cpu:
        out = out.masked_fill(empty.unsqueeze(-1), 0.0)
    return out, lse.masked_fill(empty, -torch.inf)


def _backward(
    grads: tuple[Tensor, Tensor | None], inputs: _Inputs, results: tuple[Tensor, Tensor], scale: float, with_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute the gradients of query, key, value and bias (None unless `with_bias`)."""
    query, key, value, bias = inputs
    grad_out, grad_lse = grads
    dim, value_dim = (query.shape[3], value.shape[3])
    on_cpu = query.device.type == "cpu"
    dtype = accumulation_dtype(query.dtype) if on_cpu else query.dtype
    columns = None if bias is None or (on_cpu and not with_bias) else bias[:, :, 0]
    further = 0 if grad_lse is None else 2
    wide = _widened(query.to(dtype), key.to(dtype), value.to(dtype), columns, further, scale)
    grad_out, out = (pad(x.to(dtype), (0, wide[0].shape[3] - value_dim)) for x in (grad_out, results[0]))
    if grad_lse is not None:  # as a sum of two numbers of the dtype
        out[..., value_dim : value_dim + 2] = -1.0
        grad_out[..., value_dim] = high = grad_lse.to(dtype)
        grad_out[..., value_dim + 1] = grad_lse - high
    lse = results[1].masked_fill(results[1] == -torch.inf, torch.inf)  # no weights
    *arranged, mask = _arranged(*wide, bias if columns is None else None)
    rows = arranged[0].shape[:3]
    grad_out, out, lse = (x.reshape(*rows, *x.shape[3:]) for x in (grad_out, out, lse))
    if on_cpu:
        found = _CPU_BACKWARD(grad_out, *arranged, out, lse, 0.0, False, attn_mask=mask, scale=scale)
    else:
        found = _cuda_backward(grad_out, arranged, out, lse, scale)
    blocks = max(1, arranged[1].shape[0] * arranged[1].shape[1] // key.shape[0])
    grad_query, grad_key, grad_value = (
        x.reshape(x.shape[0] * x.shape[1] // n, n, -1, x.shape[3])
        for x, n in zip(found, (query.shape[1] if rows[2] == query.shape[2] else 1, blocks, blocks), strict=True)
    )
    grad_bias = None  # (BH or 1, T or 1, 1, Nk), as `bias`
    if with_bias and bias is not None:
        grad_bias = grad_key[..., dim].unsqueeze(2).to(bias.dtype).sum_to_size(bias.shape) / (
            scale * _unit(dtype, scale)
        )
    return (
        grad_query[..., :dim].reshape(query.shape).to(query.dtype),
        grad_key[..., :dim].sum_to_size(key.shape).to(key.dtype),
        grad_value[..., :value_dim].sum_to_size(value.shape).to(value.dtype),
        grad_bias,
    )


def _cuda_backward(grad_out: Tensor, inputs: list[Tensor], out: Tensor, lse: Tensor, scale: float) -> Any:
    """Compute the gradients of query, key and value by the backward of the kernel that `_forward` has called."""
    query, key, _ = inputs
    # The state of the random numbers of dropout. There is none, but the kernels take it.
    on_amd = torch.version.hip is not None
    state = query.new_empty(() if on_amd else 2, dtype=torch.int64 if on_amd else torch.uint64)
    if _takes_flash(query):
        lengths = query.shape[2], key.shape[2]
        given = (grad_out, *inputs, out, lse, None, None, *lengths, 0.0, False, state, state.new_empty(()))
        return _FLASH_BACKWARD(*given, scale=scale)[:3]
    if not on_amd:
        lse = pad(lse, (0, -lse.shape[2] % 32), value=torch.inf)
    state = state.new_empty((), dtype=torch.int64)
    given = (grad_out, *inputs, None, out, lse, state, state, 0.0)
    return _EFFICIENT_BACKWARD(*given, [True, True, True, False], False, scale=scale)[:3]


def _takes_flash(query: Tensor) -> bool:
    """Whether FlashAttention takes padded queries: half precision on Ampere's tensor cores or later."""
    if query.dtype == torch.float32 or query.shape[3] > _MAX_FLASH_DIM:
        return False
    if query.device.type == "meta" or torch.version.hip is not None:
        return True
    return torch.cuda.get_device_capability(query.device) >= (8, 0)


def _widened(
    query: Tensor, key: Tensor, value: Tensor, columns: Tensor | None, further: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Pad the tensors to the dimensions that a kernel takes. Two more dimensions of the keys hold the bias (., ., Nk).

    `further` is the number of dimensions that the values need besides their own.
    """
    dim = query.shape[3]
    width = max(dim + (0 if columns is None else 2), value.shape[3] + further)
    if width > dim or width > value.shape[3] or query.device.type != "cpu":
        width += -width % 8
    if columns is not None:
        key = key.expand(-1, max(key.shape[1], columns.shape[1]), -1, -1)
    # The kernels assume that the numbers of a token are contiguous.
    query, key, value = (
        pad(x, (0, width - x.shape[3])) if width > x.shape[3] else (x if x.stride(3) == 1 else x.contiguous())
        for x in (query, key, value)
    )
    if columns is not None:
        unit = _unit(query.dtype, scale)
        # 0 times -inf would be NaN.
        least = -6e4 if query.dtype == torch.float16 else -1e30
        column = (columns / (scale * unit)).clamp(min=least, max=-least)  # (BH or 1, T or 1, Nk)
        query[..., dim : dim + 2] = unit
        key[..., dim] = high = column.to(key.dtype)
        key[..., dim + 1] = column - high
    return query, key, value


def _unit(dtype: torch.dtype, scale: float) -> float:
    """The number that queries have in the dimensions of a bias: a power of two, so that products with it are exact."""
    size = 32.0 if dtype == torch.float16 else 1.0
    return math.copysign(2.0 ** min(15, round(math.log2(size / abs(scale)))), scale)


def _arranged(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Arrange the tensors as (batch, heads, ., .) for the kernels, so that nothing large is copied.

    Blocks that share their keys become one block. On the CPU, blocks with different keys become the batch, since the
    memory of an output is (batch, length, heads, dim).
    """
    batch_heads, num_blocks = query.shape[:2]
    if key.shape[1] == value.shape[1] == 1 and (bias is None or bias.shape[1] == bias.shape[2] == 1):
        return query.reshape(batch_heads, 1, -1, query.shape[3]), key, value, bias  # (BH, 1, T * Nq, D)
    key, value = (x if x.shape[1] == num_blocks else x.expand(-1, num_blocks, -1, -1) for x in (key, value))
    as_batch = query.device.type == "cpu" and key.is_contiguous() and value.is_contiguous()
    if as_batch and (bias is None or bias.shape[:2] in ((1, 1), (batch_heads, num_blocks))):
        bias = None if bias is None else bias.flatten(0, 1).unsqueeze(1)
        query, key, value = (x.flatten(0, 1).unsqueeze(1) for x in (query, key, value))
    return query, key, value, bias


class GatheredKeys(NamedTuple):
    """The indices of the keys of each of T blocks of queries.

    Attributes:
        key_index: int64 (BH, T, K).
        bias: (BH, T, 1 or block_q, K), added to the scores.
        block_q: the number of queries of a block.
        query_order: int64 (BH, Nq), the order in which the queries are cut into blocks, or None.
    """

    key_index: Tensor
    bias: Tensor
    block_q: int
    query_order: Tensor | None = None


def gathered_attention(
    query: Tensor, key: Tensor, value: Tensor, gathered: GatheredKeys, *, scale: float, dropout_p: float = 0.0
) -> Tensor:
    """Compute attention of blocks of queries to keys that are gathered by index.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        value: (BH, Nk, Dv).
        gathered: the keys of each block.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        (BH, Nq, Dv), in the order of the query positions.
    """
    index, bias, block_q, order = gathered
    if bias.shape[2] == 1 and not dropout_p and triton_applies(query, key, value):
        from hf_efficient_attn.ops.backends.triton_gather import gather_attend  # Triton is no dependency

        return gather_attend(query, key, value, index, bias.squeeze(2).float(), order, block_q, scale)[0]

    def some_heads(blocks: Tensor, key: Tensor, value: Tensor, index: Tensor, bias: Tensor) -> Tensor:
        # (BH, T, block_q, Dv)
        return attend(blocks, take(key, index), take(value, index), bias, scale=scale, dropout_p=dropout_p).out

    blocks = pad_to_blocks(query if order is None else take(query, order), block_q)  # (BH, T, block_q, D)
    pairs = block_q if keeps_pairs(blocks, key[:, None], bias, scale, dropout_p) else 0
    size = slice_size(index[0].numel() * max(key.shape[2], value.shape[2], pairs), query.device)
    # (BH, T * block_q, Dv)
    out = sliced(some_heads, blocks, key, value, index, bias, size=size, draws=dropout_p > 0.0).flatten(1, 2)
    return out[:, : query.shape[1]] if order is None else take(out, inverse(order))
