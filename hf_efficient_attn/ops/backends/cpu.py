"""PyTorch's fused kernel for the CPU. It takes a bias of single pairs, but only a bias per key has a gradient."""

import torch
from torch import Tensor

from hf_efficient_attn.ops.backends.backend import AttendCall, Backend, Gradients, Partial
from hf_efficient_attn.ops.backends.devices import accumulation_dtype, product_dtype
from hf_efficient_attn.ops.backends.fused import Arranged, fused_backward, share_blocks, widen

_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _applies(call: AttendCall) -> bool:
    query, key, _, bias, scale, dropout_p, is_exported = call
    if query.device.type != "cpu" or dropout_p > 0.0 or is_exported:
        return False
    if query.numel() == 0 or key.numel() == 0:
        return False
    has_bias_grad = bias is not None and bias.requires_grad and torch.is_grad_enabled()
    return not has_bias_grad or (bias is not None and bias.shape[2] == 1 and scale != 0.0)


def _forward(call: AttendCall) -> Partial:
    query, key, value, bias, scale, _, _ = call
    shape = query.shape[:3]
    value_dim = value.shape[3]
    dtype = product_dtype(query)
    tensors = query.to(dtype), key.to(dtype), value.to(dtype)
    if query.shape[3] != value_dim or any(x.stride(3) != 1 for x in tensors):
        tensors = widen(*tensors, None, 0, scale)
    bias = None if bias is None else bias.to(accumulation_dtype(query.dtype))
    query, key, value, mask = _arrange(*tensors, bias)
    out, lse = _KERNEL(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
    out = out if out.shape[3] == value_dim else out[..., :value_dim]
    out = out.reshape(*shape, value_dim).to(call.value.dtype)
    lse = lse.reshape(shape)  # (BH, T, Nq)
    if bias is not None:
        lse = lse.masked_fill(bias.amax(-1) == -torch.inf, -torch.inf)
    return Partial(out, lse)


def _backward(
    call: AttendCall, partial: Partial, grad_out: Tensor, grad_lse: Tensor | None, with_bias: bool
) -> Gradients:
    def kernel(grad: Tensor, inputs: tuple[Tensor, ...], out: Tensor, lse: Tensor, mask: Tensor | None) -> list[Tensor]:
        found = _KERNEL_BACKWARD(grad, *inputs, out, lse, 0.0, False, attn_mask=mask, scale=call.scale)
        return list(found)

    dtype = accumulation_dtype(call.query.dtype)
    # The kernel has no gradient of its mask. A bias with a gradient becomes a dimension of the keys.
    mask = None if with_bias or call.bias is None else call.bias.to(dtype)
    return fused_backward(call, partial, grad_out, grad_lse, with_bias, dtype, mask, _arrange, kernel)


def _arrange(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Arranged:
    """Arrange the tensors as `share_blocks` does.

    Blocks with different keys become the batch, since the memory of an output is (batch, length, heads, dim).
    """
    query, key, value, mask = share_blocks(query, key, value, mask)
    are_whole = query.shape[1] > 1 and key.is_contiguous() and value.is_contiguous()
    if are_whole and (mask is None or mask.shape[:2] in ((1, 1), query.shape[:2])):
        mask = None if mask is None else mask.flatten(0, 1).unsqueeze(1)  # (BH * T, 1, Nq or 1, Nk)
        query, key, value = (x.flatten(0, 1).unsqueeze(1) for x in (query, key, value))  # (BH * T, 1, ., .)
    return query, key, value, mask


BACKEND = Backend("cpu", _applies, _forward, _backward)
