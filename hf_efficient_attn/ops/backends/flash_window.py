"""FlashAttention's own window (Dao 2023) in PyTorch: half precision on CUDA devices of capability 8.0 and later.

Kernels for ROCm are left out, because some of them ignore the window.
"""

from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.ops.backends import flash
from hf_efficient_attn.ops.backends.backend import AttendCall, BlockBackend, BlockCall, Gradients, Partial
from hf_efficient_attn.ops.backends.fused import fused_backward, fused_forward, share_blocks, width_of

_KERNEL = torch.ops.aten._flash_attention_forward  # of (B, N, H, D)
_KERNEL_BACKWARD = torch.ops.aten._flash_attention_backward


def _applies(call: BlockCall) -> bool:
    keys = call.keys
    if torch.version.hip is not None or keys.window is None or call.query.shape[1] != call.key.shape[1]:
        return False
    if any(x is not None for x in (keys.query_order, keys.start, keys.key_order, keys.key_mask, keys.listed)):
        return False
    inner = _one_block(call)
    return flash.applies(inner) and width_of(inner, with_grad_lse=True) <= flash.MAX_DIM


def _one_block(call: BlockCall) -> AttendCall:
    query, key, value = (x[:, None] for x in call[:3])  # (BH, 1, N, .)
    return AttendCall(query, key, value, None, call.scale, call.dropout_p, False)


def _window(call: BlockCall) -> dict[str, Any]:
    assert call.keys.window is not None
    left, right = (min(side, call.key.shape[1]) for side in call.keys.window)  # both ends are in the window
    return {"window_size_left": left, "window_size_right": right, "scale": call.scale}


def _forward(call: BlockCall) -> Partial:
    def kernel(*tensors: Tensor) -> tuple[Tensor, Tensor]:  # (BH, 1, N, .) each
        lengths = tensors[0].shape[2], tensors[1].shape[2]
        given = (*(x.transpose(1, 2) for x in tensors), None, None, *lengths, 0.0, False, False)
        out, lse = _KERNEL(*given, **_window(call))[:2]
        return out.transpose(1, 2), lse

    return Partial(*(x[:, 0] for x in fused_forward(_one_block(call), kernel)))


def _backward(
    call: BlockCall, partial: Partial, grad_out: Tensor, grad_lse: Tensor | None, with_log_weight: bool
) -> Gradients:
    def kernel(grad: Tensor, inputs: tuple[Tensor, ...], out: Tensor, lse: Tensor, _: Tensor | None) -> list[Tensor]:
        lengths = inputs[0].shape[2], inputs[1].shape[2]
        tensors = [x.transpose(1, 2) for x in (grad, *inputs, out)]
        given = (*tensors, lse, None, None, *lengths, 0.0, False, *flash.no_dropout(grad))
        return [x.transpose(1, 2) for x in _KERNEL_BACKWARD(*given, **_window(call))[:3]]

    of_lse = None if grad_lse is None else grad_lse[:, None]
    whole = Partial(*(x[:, None] for x in partial))
    given = _one_block(call), whole, grad_out[:, None], of_lse, False, call.query.dtype, None
    found = fused_backward(*given, share_blocks, kernel)
    return Gradients(found.query[:, 0], found.key[:, 0], found.value[:, 0], None)


BACKEND = BlockBackend("flash window", _applies, _forward, _backward)
