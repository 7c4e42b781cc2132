"""Sums over everything before: states of causal linear attention, chunk by chunk."""

import torch
from torch import Tensor


class _PrefixSum(torch.autograd.Function):
    """Exclusive sums along dimension 1, an addition a step: `cumsum` walks such a tensor against memory's grain."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        steps = out.unbind(1)
        steps[0].zero_()
        for before, now, term in zip(steps[:-1], steps[1:], x.unbind(1)[:-1], strict=True):
            torch.add(before, term, out=now)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        # The gradient of a sum over what is before is the sum over what is behind.
        return _PrefixSum.apply(grad.flip(1)).flip(1)


def exclusive_prefix_sum(x: Tensor) -> Tensor:
    """out[:, c] = x[:, 0] + ... + x[:, c-1], 0 at c = 0: (A, C, ...) -> the same shape.

    Sums run from the first to the last, so that out[:, c] is the same to the bit whatever stands at c and behind.
    """
    if torch.compiler.is_compiling():
        return torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1].cumsum(1)), 1)
    return _PrefixSum.apply(x)


def running_sum(parts: Tensor, kept: Tensor | None, start: Tensor) -> Tensor:
    """out[:, 0] = start, out[:, c+1] = kept[:, c] * out[:, c] + parts[:, c]: (A, C, ...), (A, ...) -> (A, C+1, ...).

    Without a gradient, a step at a time; kept, broadcastable to `parts`, may be None for 1.
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
