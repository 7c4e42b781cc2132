"""Attention over blocks on an accelerator, by the fused kernels of PyTorch: a few launches for all heads and blocks.

The heads are the batch of a kernel and the blocks its heads, so that views of overlapping or shared keys stay views.

FlashAttention (Dao 2024) serves half precision. It takes no bias, and the other kernel, "memory-efficient attention",
takes one in the dtype of the query only, which rounds a log-weight of 5 by up to 2 %. So a bias per key goes into
two further dimensions of queries and keys, as a sum of two numbers of their dtype: q k + 1 high + 1 low. A bias per
pair goes to the memory-efficient kernel, and if its dtype is wider than that of the queries, all is computed in it.

The kernels give no gradient through the lse. With dP = grad_out v the gradient of the scores is P (dP - delta +
grad_lse), where delta = grad_out out is computed by the kernel. So one more dimension with grad_out = 1, out =
-grad_lse and v = 0 adds the last term.

Float64 and devices other than CUDA take plain products.
"""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

# The kernels have one row of their grid for each head and each batch entry, and a grid has at most so many rows.
_MAX_ENTRIES = (1 << 16) - 1
_MAX_FLASH_DIM = 256
# FlashAttention's backward fails if the padded queries have more numbers than 32 bits can count.
_MAX_NUMEL = 1 << 31
# With padded copies of the keys, a call is split into at most three of about so many numbers, to save memory.
_COPIED_NUMEL, _MAX_SPLITS = 1 << 27, 3
# Scores that the plain products compute at a time.
_PLAIN_NUMEL = 1 << 26
# In a backward pass so many queries at least share a copy of the gradient of their keys.
_GROUP_Q = 1024

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
_EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention
_EFFICIENT_BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward

_Slices = tuple[slice, slice]


class _Inputs(NamedTuple):
    """What a kernel gets, before padding. All of one dtype.

    Attributes:
        query: (BH, T, Nq, D).
        key: (BH, T, Nk, D), a view if blocks share keys.
        value: (BH, T, Nk, Dv).
        pair_bias: (BH or 1, T or 1, Nq, Nk), finite, or None.
        columns: (BH or 1, T or 1, Nk, 2), the bias of each key for two more dimensions, finite, or None.
        unit: the number in these dimensions of the queries.
        by_flash: whether FlashAttention takes them.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    pair_bias: Tensor | None
    columns: Tensor | None
    unit: float
    by_flash: bool


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, finite_bias: bool = False
) -> tuple[Tensor, Tensor]:
    """Output and lse of `partial_attention`, with the same arguments, without a gradient. No dimension is empty.

    The output may be a view that is not contiguous.
    """
    if not _has_kernel(query, scale):
        return _plain_forward(query, key, value, bias, scale)
    shape = query.shape[:3]
    if is_shared(key, value, bias):
        query = query.reshape(shape[0], 1, -1, query.shape[3])
    inputs = _inputs((query, key, value, bias), scale, 0, finite_bias)
    inputs, dims = _with_padded_columns(inputs, 0)
    whole: list[Tensor] = []
    for some in _slices(inputs, dims):
        whole = _stored(whole, _kernel_forward(inputs, dims, some, scale), some, inputs)
    out, lse = whole[0].to(value.dtype).reshape(*shape, -1), whole[1].reshape(shape)
    if bias is None or finite_bias:
        return out, lse
    empty = bias.amax(-1) == -torch.inf
    return out.masked_fill_(empty.unsqueeze(-1), 0.0), lse.masked_fill_(empty, -torch.inf)


def fused_attention_backward(
    grads: tuple[Tensor, Tensor | None],
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    results: tuple[Tensor, Tensor],
    scale: float,
    with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and bias of `fused_attention`.

    Args:
        grads: the gradients of out and lse. The second is None if only the output was used.
        tensors: query, key, value and bias.
        results: out and lse.
        scale: factor of the scores.
        with_bias: whether the gradient of the bias is wanted. Else it is None.
    """
    query, key, value, bias = tensors
    # A query without keys: exp(score - inf) is 0.
    lse = results[1] if bias is None else results[1].masked_fill(results[1] == -torch.inf, torch.inf)
    if not _has_kernel(query, scale):
        return _plain_backward(grads, tensors, (results[0], lse), scale, with_bias)
    queries, out, (grad_out, grad_lse) = query, results[0], grads
    if is_shared(key, value, bias):
        shape = query.shape[0], _num_groups(query, key), -1
        queries, out, grad_out = (x.reshape(*shape, x.shape[3]) for x in (queries, out, grad_out))
        lse, grad_lse = lse.reshape(shape), None if grad_lse is None else grad_lse.reshape(shape)
    more = 0 if grad_lse is None else 2
    inputs = _inputs((queries, key, value, bias), scale, more)
    inputs, dims = _with_padded_columns(inputs, more)
    out, grad_out = (x.to(inputs.query.dtype) for x in (out, grad_out))
    if out.shape[3] != dims[1]:
        missing = dims[1] - out.shape[3]
        out, grad_out = pad(out, (0, missing)), pad(grad_out, (0, missing), value=1.0)
    if grad_lse is not None:
        out[..., value.shape[3]] = high = -grad_lse.to(out.dtype)
        out[..., value.shape[3] + 1] = -grad_lse - high
    whole: list[Tensor] = []
    for some in _slices(inputs, dims):
        rows = grad_out[some], out[some], lse[some].contiguous()
        parts = _kernel_backward(rows, _padded(inputs, dims, some), inputs, some, scale, with_bias)
        whole = _stored(whole, parts, some, inputs)
        del parts
    grad_query, grad_key, grad_value, grad_pairs = whole
    grad_bias = None
    if with_bias and bias is not None and inputs.columns is not None:
        summed = grad_key[..., key.shape[3]].float().unsqueeze(2) / (scale * inputs.unit)
        grad_bias = _summed(summed, bias)
    elif with_bias and bias is not None:
        grad_bias = _summed(grad_pairs, bias)
    grad_key, grad_value = grad_key[..., : key.shape[3]], grad_value[..., : value.shape[3]]
    return (
        grad_query[..., : query.shape[3]].reshape(query.shape).to(query.dtype).contiguous(),
        _summed(grad_key, key).contiguous(),
        _summed(grad_value, value).contiguous(),
        grad_bias,
    )


def _kernel_forward(inputs: _Inputs, dims: tuple[int, int], some: _Slices, scale: float) -> tuple[Tensor, Tensor]:
    """Output and lse of some heads and blocks."""
    query, key, value = _padded(inputs, dims, some)
    if inputs.by_flash:
        out, lse = _FLASH(query, key, value, 0.0, False, False, scale=scale)[:2]
    else:
        pairs = None if inputs.pair_bias is None else _expanded(_part(inputs.pair_bias, some), query, key)
        out, lse = _EFFICIENT(query, key, value, pairs, True, 0.0, False, scale=scale)[:2]
    return out[..., : inputs.value.shape[3]], lse[..., : query.shape[2]]


def _kernel_backward(
    rows: tuple[Tensor, Tensor, Tensor],
    padded: tuple[Tensor, Tensor, Tensor],
    inputs: _Inputs,
    some: _Slices,
    scale: float,
    with_bias: bool,
) -> tuple[Tensor, ...]:
    """Gradients of the padded query, key and value and of the pairs (empty if not wanted) by the kernel's own backward.

    `rows` are grad_out, out and lse.
    """
    (grad_out, out, lse), (query, key, _) = rows, padded
    given = grad_out, *padded
    # State of the random numbers of dropout. There is none, but the kernels take it.
    on_amd = torch.version.hip is not None
    state = query.new_empty(() if on_amd else 2, dtype=torch.int64 if on_amd else torch.uint64)
    if inputs.by_flash:
        lengths = query.shape[2], key.shape[2]
        arguments = (*given, out, lse, None, None, *lengths, 0.0, False, state, state.new_empty(()))
        return (*_FLASH_BACKWARD(*arguments, scale=scale), lse.new_empty(*lse.shape[:2], 0))
    pairs = None if inputs.pair_bias is None else _expanded(_part(inputs.pair_bias, some), query, key)
    if not on_amd:
        lse = pad(lse, (0, -lse.shape[2] % 32), value=torch.inf)
    state = state.new_empty((), dtype=torch.int64)
    wanted = [True, True, True, with_bias and pairs is not None]
    grads = _EFFICIENT_BACKWARD(*given, pairs, out, lse, state, state, 0.0, wanted, False, scale=scale)
    return (*grads[:3], grads[3] if wanted[3] else lse.new_empty(*lse.shape[:2], 0))


def _has_kernel(query: Tensor, scale: float) -> bool:
    """Whether the fused kernels exist for this device, dtype and scale. Meta tensors count as CUDA tensors."""
    return query.device.type in ("cuda", "meta") and query.dtype != torch.float64 and scale != 0.0


def _has_flash(query: Tensor) -> bool:
    """Whether the device has FlashAttention, which needs the tensor cores of Ampere or later."""
    return query.device.type != "cuda" or torch.cuda.get_device_capability(query.device) >= (8, 0)


def is_shared(key: Tensor, value: Tensor, bias: Tensor | None) -> bool:
    """Whether all blocks have the same keys with the same bias, so that they are one long sequence of queries."""
    return key.shape[1] == value.shape[1] == 1 and (bias is None or bias.shape[1] == bias.shape[2] == 1)


def _num_groups(query: Tensor, key: Tensor) -> int:
    """Into how many sequences to divide queries that share their keys, for a backward pass.

    Its parallel work is one part for each block of keys, so that one sequence would occupy a few processors only. But
    each has its own copy of the gradient of the keys: together at most as many numbers as the queries.
    """
    num_blocks, length = query.shape[1], query.shape[1] * query.shape[2]
    most = max(1, length // max(_GROUP_Q, key.shape[2]))
    return max(x for x in range(1, min(most, num_blocks) + 1) if num_blocks % x == 0)


def _inputs(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None], scale: float, more: int, finite_bias: bool = False
) -> _Inputs:
    """Bring the tensors of `partial_attention` into the form that the kernels take.

    `more` is the number of further dimensions of the values.
    """
    query, key, value, bias = tensors
    dtype = torch.promote_types(query.dtype, torch.promote_types(key.dtype, value.dtype))
    pair_bias, columns, unit = None, None, 1.0
    if bias is not None:
        for dim in range(3):  # an expanded bias would be copied below
            bias = bias.narrow(dim, 0, 1) if bias.stride(dim) == 0 else bias
        bias = bias.expand(*bias.shape[:3], key.shape[2])
    # A kernel adds a bias in half precision itself.
    if bias is not None and bias.shape[2] == 1 and not (bias.dtype == dtype and dtype.itemsize == 2):
        columns, unit = bias_columns(bias[:, :, 0], dtype, scale)
    elif bias is not None:
        dtype = torch.promote_types(dtype, bias.dtype)
        least = max(torch.finfo(dtype).min / 2, -1e30)
        pair_bias, missing = bias.to(dtype), -bias.shape[3] % 8
        pair_bias = pair_bias if finite_bias else pair_bias.clamp(min=least)
        if missing:  # rows that begin at multiples of 16 bytes
            pair_bias = pad(pair_bias, (0, missing))[..., : bias.shape[3]]
        pair_bias = _aligned(pair_bias)
    query, key, value = (x.to(dtype) for x in (query, key, value))
    key, value = (x.expand(-1, query.shape[1], -1, -1) for x in (key, value))
    by_flash = (
        dtype in (torch.float16, torch.bfloat16)
        and pair_bias is None
        and max(query.shape[3] + (0 if columns is None else 2), value.shape[3] + more) <= _MAX_FLASH_DIM
        and _has_flash(query)
    )
    return _Inputs(query, key, value, pair_bias, columns, unit, by_flash)


def bias_columns(bias: Tensor, dtype: torch.dtype, scale: float) -> tuple[Tensor, float]:
    """The bias of each key (., ., Nk) as two numbers of `dtype`, and the factor of both in the queries.

    scale * factor * (sum of the two) is the bias. The factor is a power of two, so that it is exact. -inf becomes a
    large number, because 0 times it would be NaN.
    """
    unit, largest = column_unit(dtype, scale), 6e4 if dtype == torch.float16 else 1e30
    column = (bias.to(torch.promote_types(bias.dtype, torch.float32)) / (scale * unit)).clamp(min=-largest)
    high = column.to(dtype)
    return torch.stack((high, (column - high).to(dtype)), -1), unit


def column_unit(dtype: torch.dtype, scale: float) -> float:
    """The factor of `bias_columns`."""
    size = 32.0 if dtype == torch.float16 else 1.0
    return math.copysign(2.0 ** min(15, round(math.log2(size / abs(scale)))), scale)


def _with_padded_columns(inputs: _Inputs, more: int) -> tuple[_Inputs, tuple[int, int]]:
    """The inputs with columns for all further dimensions, and head_dim and value_dim of a call.

    `more` is the number of further dimensions of the values. FlashAttention has one size for both.
    """
    head_dim, value_dim = inputs.query.shape[3] + (0 if inputs.columns is None else 2), inputs.value.shape[3] + more
    head_dim, value_dim = head_dim + -head_dim % 8, value_dim + -value_dim % 8
    if inputs.by_flash:
        head_dim = value_dim = max(head_dim, value_dim)
        if head_dim > 192:  # up to 224, some devices have no backward
            head_dim = value_dim = _MAX_FLASH_DIM
    if inputs.columns is not None:
        inputs = inputs._replace(columns=pad(inputs.columns, (0, head_dim - inputs.query.shape[3] - 2)))
    return inputs, (head_dim, value_dim)


def _slices(inputs: _Inputs, dims: tuple[int, int]) -> list[_Slices]:
    """The heads and blocks of each call: all at once, if the kernel can and the padded copies are not too large."""
    (batch_heads, num_blocks, block_q, head_dim), (block_k, value_dim) = inputs.query.shape, inputs.value.shape[2:]
    heads = min(batch_heads, _MAX_ENTRIES)
    padded_q = block_q + -block_q % 128
    blocks = min(num_blocks, _MAX_ENTRIES, max(1, _MAX_NUMEL // (heads * padded_q * max(32, *dims))))
    if dims != (head_dim, value_dim):
        splits = min(_MAX_SPLITS, -(-heads * num_blocks * block_k * dims[0] // _COPIED_NUMEL))
        blocks = min(blocks, -(-num_blocks // splits))
    return [
        (slice(a, min(a + heads, batch_heads)), slice(t, min(t + blocks, num_blocks)))
        for a in range(0, batch_heads, heads)
        for t in range(0, num_blocks, blocks)
    ]


def _part(x: Tensor, some: _Slices) -> Tensor:
    """Some heads and blocks of a tensor (BH or 1, T or 1, ., .)."""
    heads, blocks = (part if size > 1 else slice(None) for part, size in zip(some, x.shape[:2], strict=True))
    return x[heads, blocks]


def _padded(inputs: _Inputs, dims: tuple[int, int], some: _Slices) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of some heads and blocks, with the dimensions of the bias and those of the kernel."""
    query, key, value = inputs.query[some], inputs.key[some], inputs.value[some]
    missing = dims[0] - query.shape[3]
    if inputs.columns is not None:
        query = pad(query, (0, missing), value=inputs.unit)
        key = torch.cat((key, _part(inputs.columns, some).expand(*key.shape[:3], -1)), -1)
    elif missing:
        query, key = pad(query, (0, missing)), pad(key, (0, missing))
    if value.shape[3] < dims[1]:
        value = pad(value, (0, dims[1] - value.shape[3]))
    return _aligned(query), _aligned(key), _aligned(value)


def _aligned(x: Tensor) -> Tensor:
    """The tensor, copied if the kernels could not load 16 bytes of a row at a time."""
    strides = [x.stride(i) for i in range(3) if x.shape[i] > 1]
    fits = x.stride(3) == 1 and x.storage_offset() % 8 == 0 and all(stride % 8 == 0 for stride in strides)
    return x if fits else x.contiguous()


def _expanded(bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """View a bias as (heads, blocks, Nq, Nk), which are compared with the shapes of the others."""
    return bias.expand(*query.shape[:3], key.shape[2])


def _stored(whole: list[Tensor], parts: Iterable[Tensor], some: _Slices, inputs: _Inputs) -> list[Tensor]:
    """Put the results of a call into those of all calls, which the first one allocates."""
    parts, shape = list(parts), inputs.query.shape[:2]
    if parts[0].shape[:2] == shape:
        return parts
    whole = whole or [part.new_empty(*shape, *part.shape[2:]) for part in parts]
    for all_heads, part in zip(whole, parts, strict=True):
        all_heads[some] = part
    return whole


def _summed(grad: Tensor, x: Tensor) -> Tensor:
    """A gradient as one of `x`, which was expanded."""
    return (grad if grad.shape == x.shape else grad.sum_to_size(x.shape)).to(x.dtype)


def _plain_forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`fused_attention` by plain products, in the accumulation dtype."""
    acc_dtype = torch.promote_types(query.dtype, torch.float32)
    parts = []
    with _without_autocast(query):
        for some in _plain_slices(query, key):
            scores = _plain_scores(query, key, bias, scale, some)
            row_max = scores.amax(-1, keepdim=True)
            row_max = row_max.masked_fill(row_max == -torch.inf, 0.0)
            weights = (scores - row_max).exp()
            total = weights.sum(-1, keepdim=True)
            out = weights @ _part(value, some).to(acc_dtype) / total.masked_fill(total == 0.0, 1.0)
            parts.append((out.to(value.dtype), (total.log() + row_max).squeeze(-1)))
    out, lse = (torch.cat(x, 1) for x in zip(*parts, strict=True))
    return out, lse


def _plain_backward(
    grads: tuple[Tensor, Tensor | None],
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    results: tuple[Tensor, Tensor],
    scale: float,
    with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`fused_attention_backward` by plain products. The lse of a query without keys is infinite."""
    query, key, value, bias = tensors
    acc_dtype = torch.promote_types(query.dtype, torch.float32)
    delta = (grads[0].to(acc_dtype) * results[0].to(acc_dtype)).sum(-1)
    delta = delta if grads[1] is None else delta - grads[1]
    sums = [None if x is None else torch.zeros(x.shape, dtype=acc_dtype, device=x.device) for x in tensors]
    with _without_autocast(query):
        for some in _plain_slices(query, key):
            queries, keys, values, grad = (_part(x, some).to(acc_dtype) for x in (query, key, value, grads[0]))
            weights = (_plain_scores(query, key, bias, scale, some) - results[1][some].unsqueeze(-1)).exp()
            grad_scores = weights * (grad @ values.mT - delta[some].unsqueeze(-1))
            own = grad_scores @ keys * scale, grad_scores.mT @ queries * scale, weights.mT @ grad, grad_scores
            for whole, part in zip(sums, own, strict=True):
                if whole is not None:
                    whole_part = _part(whole, some)
                    whole_part += part.sum_to_size(whole_part.shape)
    results_of = [None if s is None or x is None else s.to(x.dtype) for s, x in zip(sums, tensors, strict=True)]
    grad_query, grad_key, grad_value, grad_bias = results_of
    assert grad_query is not None and grad_key is not None and grad_value is not None
    return grad_query, grad_key, grad_value, grad_bias if with_bias else None


def _plain_slices(query: Tensor, key: Tensor) -> list[_Slices]:
    """All heads and as many blocks as have about `_PLAIN_NUMEL` scores."""
    (batch_heads, num_blocks, block_q, _), block_k = query.shape, key.shape[2]
    step = max(1, _PLAIN_NUMEL // (batch_heads * block_q * block_k))
    return [(slice(0, batch_heads), slice(t, min(t + step, num_blocks))) for t in range(0, num_blocks, step)]


def _plain_scores(query: Tensor, key: Tensor, bias: Tensor | None, scale: float, some: _Slices) -> Tensor:
    acc_dtype = torch.promote_types(query.dtype, torch.float32)
    scores: Tensor = _part(query, some).to(acc_dtype) @ _part(key, some).to(acc_dtype).mT * scale
    return scores if bias is None else scores + _part(bias, some)


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """The products of these tensors in their own dtype. There is no autocast on the meta device."""
    return nullcontext() if x.device.type == "meta" else torch.autocast(x.device.type, enabled=False)
