"""PyTorch's "memory-efficient attention" on CUDA and ROCm: float32, and half precision without FlashAttention."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.backends.backend import AttendCall, Backend, Gradients, Partial
from hf_efficient_attn.ops.backends.fused import fused_backward, fused_forward, share_blocks, takes_fused

_KERNEL = torch.ops.aten._scaled_dot_product_efficient_attention
_KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward


def _applies(call: AttendCall) -> bool:
    return takes_fused(call, takes_pairs=True)


def _with_mask(call: AttendCall) -> tuple[AttendCall, Tensor | None]:
    """Return a call as the kernel takes it, and its bias of pairs as a mask (BH, T, Nq, Nk) in the query's dtype.

    A float32 bias is not rounded: then half precision is computed in float32. Rows of a mask are aligned to 16 bytes.
    """
    query, _, _, bias, *_ = call
    if bias is None or bias.shape[2] == 1:
        return call, None
    query = query.to(bias.dtype)
    least = -6e4 if bias.dtype == torch.float16 else -1e30  # the kernel would make NaN of a row of -inf
    mask = pad(bias.clamp(min=least), (0, -bias.shape[3] % 8)).contiguous()[..., : bias.shape[3]]
    return call._replace(query=query), mask.expand(*query.shape[:3], -1)


def _forward(call: AttendCall) -> Partial:
    call, mask = _with_mask(call)

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = _KERNEL(query, key, value, mask, True, 0.0, False, scale=call.scale)[:2]
        return out, lse[..., : query.shape[2]]  # its lse is padded

    return fused_forward(call, kernel, mask)


def backward(
    call: AttendCall, partial: Partial, grad_out: Tensor, grad_lse: Tensor | None, with_bias: bool
) -> Gradients:
    """Compute the gradients of a call; see `Backend`."""

    def kernel(grad: Tensor, inputs: tuple[Tensor, ...], out: Tensor, lse: Tensor, mask: Tensor | None) -> list[Tensor]:
        if torch.version.hip is None:
            lse = pad(lse, (0, -lse.shape[2] % 32), value=torch.inf)
        # The state of the random numbers of dropout. There is none, but the kernel takes it.
        state = grad.new_empty((), dtype=torch.int64)
        given = (grad, *inputs, mask, out, lse, state, state, 0.0)
        return list(_KERNEL_BACKWARD(*given, [True, True, True, False], False, scale=call.scale)[:3])

    taken, mask = _with_mask(call)
    dtype = taken.query.dtype
    return fused_backward(call, partial, grad_out, grad_lse, with_bias, dtype, mask, share_blocks, kernel)


BACKEND = Backend("efficient", _applies, _forward, backward)
