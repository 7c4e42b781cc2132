"""Moving tokens about: padding to whole blocks, gathering by index, valid tokens first, a few heads at a time."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

# Numbers of a head's queries or keys that are worked on at a time on the CPU: one head of 8,192 x 64. What is allocated
# for them then fits the cache, and is memory that the heads before have touched already: naive code loses half its time
# to page faults on fresh memory.
_TILE = 1 << 19


def ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def pad_to_blocks(x: Tensor, size: int, value: float = 0.0) -> Tensor:
    """(A, N, D) -> (A, ceil(N / size), size, D), the last block filled up with `value`."""
    missing = -x.shape[1] % size
    if missing:
        x = pad(x, (0, 0, 0, missing), value=value)
    return x.reshape(x.shape[0], -1, size, x.shape[2])


def take(x: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Tokens of each row by index: x (A, N, D), index (A, ...) of integers below N -> (A, ..., D), or into `out`."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        # Whole rows of memory at a time: five times as fast as `gather`, whose gradient is the faster of the two.
        first = torch.arange(x.shape[0], device=x.device) * x.shape[1]
        flat = index + first.view(-1, *[1] * (index.ndim - 1))
        if out is not None:
            torch.index_select(x.reshape(-1, x.shape[2]), 0, flat.flatten(), out=out.view(-1, x.shape[2]))
            return out
        return x.reshape(-1, x.shape[2]).index_select(0, flat.flatten()).view(*index.shape, x.shape[2])
    flat = index.reshape(index.shape[0], -1, 1).expand(-1, -1, x.shape[2])
    return x.gather(1, flat).reshape(*index.shape, x.shape[2])


def inverse(order: Tensor) -> Tensor:
    """Inverse of each row's permutation: order (A, N) -> (A, N) with inverse[order[r]] = r."""
    ranks = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, ranks)


def valid_first(mask: Tensor) -> Tensor:
    """Order that puts the tokens that are there first, each kind in its old order: mask bool (A, N) -> (A, N)."""
    return (~mask).to(torch.int8).argsort(dim=1, stable=True)


def can_reuse_buffers(*tensors: Tensor | None) -> bool:
    """Whether tokens can be walked over tile by tile in buffers: no gradient, not compiling, and on the CPU.

    On an accelerator the steps of a walk would be launched one by one.
    """
    given = [x for x in tensors if x is not None]
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    return not (keep or torch.compiler.is_compiling()) and given[0].device.type == "cpu"


def chunked_over_heads(
    function: Callable[..., Tensor],
    *tensors: Tensor | None,
    result: tuple[int, int, torch.dtype] | None = None,
    step: int | None = None,
) -> Tensor:
    """function(*tensors) for a few heads at a time: (A, ...) tensors or None -> (A, N, Dv), the pieces joined.

    All heads at once when compiling, on an accelerator, and where they are small.

    Args:
        result: (N, Dv, dtype) of what the function returns. It is then also given out=, None or the piece of the result
            that it may write into and return, which saves a copy.
        step: heads at a time; by default as many as fit the cache.
    """
    given = [x for x in tensors if x is not None]
    heads, each = given[0].shape[0], max(x[0].numel() for x in given)
    step = max(1, _TILE // max(1, each)) if step is None else step
    if step >= heads or given[0].device.type != "cpu" or torch.compiler.is_compiling():
        return function(*tensors)
    # `split` rather than slices: its gradient is one concatenation, that of every slice a whole tensor of zeros.
    splits = [[None] * -(-heads // step) if x is None else x.split(step) for x in tensors]
    pieces = list(zip(*splits, strict=True))
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return torch.cat([function(*piece) for piece in pieces])
    if result is not None:
        length, width, dtype = result
        whole = given[0].new_empty(heads, length, width, dtype=dtype)
        for piece, out in zip(pieces, whole.split(step), strict=True):
            function(*piece, out=out)
        return whole
    whole = None
    for i, piece in enumerate(pieces):
        part = function(*piece)
        whole = part.new_empty(heads, *part.shape[1:]) if whole is None else whole
        whole[i * step : i * step + part.shape[0]] = part
    return whole
