"""Inputs, results and gradients as PyTorch's fused kernels take and give them.

The kernels give no gradient of the lse and none of a bias. Additional dimensions stand for both. A bias per key becomes
a dimension of the keys in which all queries are 1; in half precision the sum of two dimensions holds it. With
dP = grad_out v^T the gradient of the scores is P (dP - delta), where delta = grad_out . out - grad_lse. So the kernel
takes one more dimension, in which grad_out is grad_lse, out is -1 and values are 0.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.backends.backend import AttendCall, Gradients, Partial

# Widened and arranged queries, keys and values, and a mask.
Arranged = tuple[Tensor, Tensor, Tensor, Tensor | None]
# kernel(query, key, value) -> out, lse
Kernel = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
# kernel(grad_out, (query, key, value), out, lse, mask) -> gradients of query, key and value
BackwardKernel = Callable[[Tensor, tuple[Tensor, ...], Tensor, Tensor, Tensor | None], list[Tensor]]


def takes_fused(call: AttendCall, takes_pairs: bool = False) -> bool:
    """Whether a call suits the kernels for accelerators, which take no float64, and a bias per key.

    With `takes_pairs` a kernel takes a bias of pairs, too, but has no gradient of it.
    """
    query, key, _, bias, scale, dropout_p, is_exported = call
    if query.device.type not in ("cuda", "meta") or dropout_p > 0.0 or is_exported:  # meta: as on CUDA
        return False
    if query.numel() == 0 or key.numel() == 0 or query.dtype == torch.float64:
        return False
    has_grad = torch.is_grad_enabled() and bias is not None and bias.requires_grad
    if bias is not None and bias.shape[2] > 1 and (has_grad or not takes_pairs):
        return False
    return scale != 0.0 and max(query.shape[:2]) < 1 << 16


def fused_forward(call: AttendCall, kernel: Kernel, mask: Tensor | None = None) -> Partial:
    """Compute `Backend.forward` by a kernel for accelerators, which may take the bias as a mask."""
    query, key, value, bias, scale, _, _ = call
    shape = query.shape[:3]
    key_bias = None if bias is None or mask is not None else bias[:, :, 0]  # (BH, T, Nk)
    empty = None if bias is None else bias.amax(-1) == -torch.inf  # (BH, T, Nq or 1)
    # Without a key the output is 0. Few values are masked in place of many outputs.
    masks_values = key_bias is not None and value.shape[1] >= key_bias.shape[1] and value.numel() < query.numel()
    if empty is not None and masks_values:
        value = value.masked_fill(empty.unsqueeze(-1), 0.0)
    wide = widen(query, key.to(query.dtype), value.to(query.dtype), key_bias, 0, scale)
    query, key, value, _ = share_blocks(*wide, mask)
    out, lse = kernel(query, key, value)
    out = out[..., : call.value.shape[3]].reshape(*shape, -1).to(call.value.dtype)
    lse = lse.reshape(shape)
    if empty is None:
        return Partial(out, lse)
    out = out if masks_values else out.masked_fill(empty.unsqueeze(-1), 0.0)
    return Partial(out, lse.masked_fill(empty, -torch.inf))


def fused_backward(
    call: AttendCall,
    partial: Partial,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    with_bias: bool,
    dtype: torch.dtype,
    mask: Tensor | None,
    arrange: Callable[[Tensor, Tensor, Tensor, Tensor | None], Arranged],
    kernel: BackwardKernel,
) -> Gradients:
    """Compute `Backend.backward` by the backward of a kernel.

    The kernel takes tensors of `dtype` as `arrange` returns them, for example `share_blocks`. It takes the bias as
    `mask`; without a mask the bias, one per key, becomes a dimension of the keys.
    """
    query, key, value, bias, scale, _, _ = call
    dim = query.shape[3]
    value_dim = value.shape[3]
    key_bias = None if bias is None or mask is not None else bias[:, :, 0]  # (BH, T, Nk)
    further = 0 if grad_lse is None else 2
    wide = widen(query.to(dtype), key.to(dtype), value.to(dtype), key_bias, further, scale)
    # Copies, also without padding: a gradient may be an expanded tensor.
    grad_out, out = (
        _contiguous_rows(pad(x.to(dtype), (0, wide[0].shape[3] - value_dim))) for x in (grad_out, partial.out)
    )
    if grad_lse is not None:  # as a sum of two numbers of the dtype
        out[..., value_dim : value_dim + 2] = -1.0
        grad_out[..., value_dim] = high = grad_lse.to(dtype)
        grad_out[..., value_dim + 1] = grad_lse - high
    lse = partial.lse.masked_fill(partial.lse == -torch.inf, torch.inf)  # no weights
    *inputs, mask = arrange(*wide, mask)
    shape = inputs[0].shape[:3]
    grad_out, out, lse = (x.reshape(*shape, *x.shape[3:]) for x in (grad_out, out, lse))
    found = kernel(grad_out, tuple(inputs), out, lse, mask)
    # Back to (BH, T or 1, ., .). The gradients of keys that blocks share are sums over the blocks.
    of_keys = max(1, inputs[1].shape[0] * inputs[1].shape[1] // key.shape[0])
    num_blocks = query.shape[1] if shape[2] == query.shape[2] else 1, of_keys, of_keys
    grad_query, grad_key, grad_value = (
        x.reshape(x.shape[0] * x.shape[1] // n, n, -1, x.shape[3]) for x, n in zip(found, num_blocks, strict=True)
    )
    grad_bias = None  # (BH or 1, T or 1, 1, Nk), as `bias`
    if with_bias and bias is not None:
        grad_column = grad_key[..., dim].unsqueeze(2).to(bias.dtype)  # (BH, T, 1, Nk)
        grad_bias = grad_column.sum_to_size(bias.shape) / (scale * _unit(dtype, scale))
    return Gradients(  # `narrow`, because autograd's batched gradients know no alias, which a full slice is
        grad_query.narrow(3, 0, dim).reshape(query.shape).to(query.dtype),
        grad_key.narrow(3, 0, dim).sum_to_size(key.shape).to(key.dtype),
        grad_value.narrow(3, 0, value_dim).sum_to_size(value.shape).to(value.dtype),
        grad_bias,
    )


def widen(
    query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None, further: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Pad the tensors to the dimensions that a kernel takes. Two more dimensions of the keys hold the bias (., ., Nk).

    `further` is the number of dimensions that the values need besides their own.
    """
    dim = query.shape[3]
    width = max(dim + (0 if key_bias is None else 2), value.shape[3] + further)
    if width > dim or width > value.shape[3] or query.device.type != "cpu":
        width += -width % 8
    if key_bias is not None:
        key = key.expand(-1, max(key.shape[1], key_bias.shape[1]), -1, -1)
    query, key, value = (
        _contiguous_rows(pad(x, (0, width - x.shape[3])) if width > x.shape[3] else x) for x in (query, key, value)
    )
    if key_bias is not None:
        unit = _unit(query.dtype, scale)
        # 0 times -inf would be NaN.
        least = -6e4 if query.dtype == torch.float16 else -1e30
        column = (key_bias / (scale * unit)).clamp(min=least, max=-least)  # (BH or 1, T or 1, Nk)
        query[..., dim : dim + 2] = unit
        key[..., dim] = high = column.to(key.dtype)
        key[..., dim + 1] = column - high
    return query, key, value


def _contiguous_rows(x: Tensor) -> Tensor:
    """Make the numbers of each token contiguous, as the kernels assume. `pad` keeps the memory format of its input."""
    return x if x.stride(3) == 1 else x.contiguous()


def _unit(dtype: torch.dtype, scale: float) -> float:
    """The number that queries have in the dimensions of a bias: a power of two, so that products with it are exact."""
    size = 32.0 if dtype == torch.float16 else 1.0
    return math.copysign(2.0 ** min(15, round(math.log2(size / abs(scale)))), scale)


def width_of(call: AttendCall, with_grad_lse: bool = False) -> int:
    """The number of dimensions that a kernel for accelerators gets for a call."""
    dim = call.query.shape[3] + (0 if call.bias is None else 2)
    width = max(dim, call.value.shape[3] + (2 if with_grad_lse else 0))
    return width + -width % 8


def share_blocks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Arranged:
    """Arrange the tensors as (batch, heads, ., .) for a kernel, so that nothing large is copied.

    Blocks that share their keys become one block, unless there is a mask of blocks or pairs.
    """
    batch_heads, num_blocks = query.shape[:2]
    if key.shape[1] == value.shape[1] == 1 and (mask is None or mask.shape[1] == mask.shape[2] == 1):
        return query.reshape(batch_heads, 1, -1, query.shape[3]), key, value, mask  # (BH, 1, T * Nq, D)
    key, value = (x if x.shape[1] == num_blocks else x.expand(-1, num_blocks, -1, -1) for x in (key, value))
    return query, key, value, mask
