"""FlashAttention (Dao et al. 2022) in PyTorch: half precision on Ampere's tensor cores or later, and on ROCm."""

import torch
from torch import Tensor

from hf_efficient_attn.ops.backends import efficient
from hf_efficient_attn.ops.backends.backend import AttendCall, Backend, Gradients, Partial
from hf_efficient_attn.ops.backends.fused import fused_backward, fused_forward, share_blocks, takes_fused, width_of

_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention
_KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
# It takes at most this many dimensions.
MAX_DIM = 256


def applies(call: AttendCall) -> bool:
    """Whether the kernels take a call; see `Backend`."""
    if not takes_fused(call) or call.query.dtype == torch.float32 or width_of(call) > MAX_DIM:
        return False
    device = call.query.device
    return device.type == "meta" or torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def _forward(call: AttendCall) -> Partial:
    def kernel(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = _KERNEL(query, key, value, 0.0, False, False, scale=call.scale)[:2]
        return out, lse

    return fused_forward(call, kernel)


def _backward(
    call: AttendCall, partial: Partial, grad_out: Tensor, grad_lse: Tensor | None, with_bias: bool
) -> Gradients:
    if width_of(call, grad_lse is not None) > MAX_DIM:  # both kernels compute the weights from the lse
        return efficient.backward(call, partial, grad_out, grad_lse, with_bias)

    def kernel(grad: Tensor, inputs: tuple[Tensor, ...], out: Tensor, lse: Tensor, _: Tensor | None) -> list[Tensor]:
        query, key, value = inputs
        lengths = query.shape[2], key.shape[2]
        given = (grad, query, key, value, out, lse, None, None, *lengths, 0.0, False, *no_dropout(query))
        return list(_KERNEL_BACKWARD(*given, scale=call.scale)[:3])

    dtype = call.query.dtype
    return fused_backward(call, partial, grad_out, grad_lse, with_bias, dtype, None, share_blocks, kernel)


def no_dropout(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state of the random numbers of dropout. There is none, but the kernels take it."""
    on_amd = torch.version.hip is not None
    state = x.new_empty(() if on_amd else 2, dtype=torch.int64 if on_amd else torch.uint64)
    return state, state.new_empty(())


BACKEND = Backend("flash", applies, _forward, _backward)
