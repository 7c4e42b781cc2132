"""Exclusive sums along the sequence: the states of causal linear attention, chunk by chunk."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.functional import pad

from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.export import is_compiling


class _PrefixSum(torch.autograd.Function):
    """Exclusive sums along dimension 1, one addition per index. `cumsum` is slow along a dimension of large stride."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        steps = out.unbind(1)
        steps[0].zero_()
        for before, now, term in zip(steps[:-1], steps[1:], x.unbind(1)[:-1], strict=True):
            torch.add(before, term, out=now)
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        return exclusive_suffix_sum(grad)


_prefix_sum: Callable[[Tensor], Tensor] = _PrefixSum.apply


def exclusive_prefix_sum(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """out[:, c] = x[:, 0] + ... + x[:, c-1], and 0 at c = 0: (BH, C, ...) -> the same shape, summed in `dtype`.

    The terms are added from first to last, so that out[:, c] does not depend on x[:, c:], not even in its rounding. On
    an accelerator the sum is one kernel, whatever C is.
    """
    if is_compiling() or backend(x) != "cpu":
        # Not the inclusive sum minus x, whose rounding depends on x[:, c].
        return pad(x.cumsum(1, dtype=dtype), (0, 0) * (x.ndim - 2) + (1, -1))
    return _prefix_sum(x if dtype is None else x.to(dtype))


def exclusive_suffix_sum(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """out[:, c] = x[:, c+1] + ... + x[:, C-1], summed in `dtype`: the gradient of `exclusive_prefix_sum`."""
    if is_compiling() or backend(x) != "cpu":
        total = x.cumsum(1, dtype=dtype)
        return total[:, -1:] - total
    return _prefix_sum(x.to(x.dtype if dtype is None else dtype).flip(1)).flip(1)


def running_sum(parts: Tensor, kept: Tensor | None, start: Tensor) -> Tensor:
    """out[:, 0] = start, out[:, c+1] = kept[:, c] * out[:, c] + parts[:, c], without a gradient.

    Args:
        parts: (BH, C, ...).
        kept: broadcastable to `parts`, or None for 1.
        start: (BH, ...).

    Returns:
        (BH, C + 1, ...).
    """
    out = parts.new_empty(parts.shape[0], parts.shape[1] + 1, *parts.shape[2:])
    out[:, 0] = start
    steps = out.unbind(1)
    factors = [None] * parts.shape[1] if kept is None else kept.unbind(1)
    for before, now, part, factor in zip(steps[:-1], steps[1:], parts.unbind(1), factors, strict=True):
        if factor is None:
            torch.add(part, before, out=now)
        else:
            torch.addcmul(part, before, factor, out=now)
    return out
