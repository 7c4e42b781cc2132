"""PyTorch's "memory-efficient attention" on CUDA and ROCm: float32, and half precision without FlashAttention."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.backends.backend import AttendCall, Backend, Gradients, Partial
from hf_efficient_attn.ops.backends.fused import fused_backward, fused_forward, share_blocks, takes_fused

_KERNEL = torch.ops.aten._scaled_dot_product_efficient_attention
_KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward


def _forward(call: AttendCall) -> Partial:
    def kernel(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = _KERNEL(query, key, value, None, True, 0.0, False, scale=call.scale)[:2]
        return out, lse[..., : query.shape[2]]  # its lse is padded

    return fused_forward(call, kernel)


def backward(
    call: AttendCall, partial: Partial, grad_out: Tensor, grad_lse: Tensor | None, with_bias: bool
) -> Gradients:
    """Compute the gradients of a call; see `Backend`."""

    def kernel(grad: Tensor, inputs: tuple[Tensor, ...], out: Tensor, lse: Tensor, _: Tensor | None) -> list[Tensor]:
        if torch.version.hip is None:
            lse = pad(lse, (0, -lse.shape[2] % 32), value=torch.inf)
        # The state of the random numbers of dropout. There is none, but the kernel takes it.
        state = grad.new_empty((), dtype=torch.int64)
        given = (grad, *inputs, None, out, lse, state, state, 0.0)
        return list(_KERNEL_BACKWARD(*given, [True, True, True, False], False, scale=call.scale)[:3])

    dtype = call.query.dtype
    return fused_backward(call, partial, grad_out, grad_lse, with_bias, dtype, None, share_blocks, kernel)


BACKEND = Backend("efficient", takes_fused, _forward, backward)
