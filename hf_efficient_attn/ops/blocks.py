"""Moving tokens about: padding to whole blocks, gathering by index, valid tokens first."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def pad_to_blocks(x: Tensor, size: int, value: float = 0.0) -> Tensor:
    """(A, N, D) -> (A, ceil(N / size), size, D), the last block filled up with `value`."""
    missing = -x.shape[1] % size
    if missing:
        x = pad(x, (0, 0, 0, missing), value=value)
    return x.reshape(x.shape[0], -1, size, x.shape[2])


def take(x: Tensor, index: Tensor) -> Tensor:
    """Tokens of each row by index: x (A, N, D), index (A, ...) of integers below N -> (A, ..., D)."""
    flat = index.reshape(index.shape[0], -1, 1).expand(-1, -1, x.shape[2])
    return x.gather(1, flat).reshape(*index.shape, x.shape[2])


def inverse(order: Tensor) -> Tensor:
    """Inverse of each row's permutation: order (A, N) -> (A, N) with inverse[order[r]] = r."""
    ranks = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, ranks)


def valid_first(mask: Tensor) -> Tensor:
    """Order that puts the tokens that are there first, each kind in its old order: mask bool (A, N) -> (A, N)."""
    return (~mask).to(torch.int8).argsort(dim=1, stable=True)
