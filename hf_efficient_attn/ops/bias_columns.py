"""Biases as further dimensions of queries and keys, added once by a method that makes copies of its keys anyway.

On an accelerator `fused_attention` turns a bias of each key into two dimensions of all queries and keys, which copies
them in every call. A method that gathers or concatenates its keys has them with these dimensions from the start, and
all of its calls are without a bias. Queries, keys and values are padded to the same multiple of 8, as FlashAttention
takes them.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.fused_attention import column_unit
from hf_efficient_attn.ops.partial import accumulation_dtype


def padded_dim(head_dim: int, value_dim: int, num_columns: int) -> int:
    """The common dimension of queries and keys with `num_columns` further dimensions, and of values."""
    dim = max(head_dim + num_columns, value_dim)
    return dim + -dim % 8


def with_last(x: Tensor, more: Tensor, dim: int) -> Tensor:
    """Put further tokens with columns after tokens whose columns are 0: (BH, N, D), (BH, M, `dim`) -> (BH, N + M, dim).

    Args:
        x: (BH, N, D).
        more: (BH or 1, M, `dim`).
        dim: from `padded_dim`.
    """
    return torch.cat((pad(x, (0, dim - x.shape[2])), more.to(x.dtype).expand(x.shape[0], -1, -1)), 1)


def most_negative(dtype: torch.dtype) -> float:
    """The number in a column that excludes a key."""
    return -6e4 if dtype == torch.float16 else -1e30


def lse_columns(lse: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """`bias_columns` with a gradient: (...) -> (..., 2). -inf becomes a very negative number."""
    return _two_numbers((lse / (scale * column_unit(dtype, scale))).clamp(min=most_negative(dtype)), dtype)


def _two_numbers(column: Tensor, dtype: torch.dtype) -> Tensor:
    """Two numbers of `dtype` with the sum (...): (..., 2). Their factors are equal, so one of them has the gradient."""
    high = column.detach().to(dtype)
    return torch.stack((high, (column - high).to(dtype)), -1)


def with_square(x: Tensor, factor: float, offset: float, before: Tensor, after: Tensor) -> Tensor:
    """Put further dimensions after x: `before`, two for the number factor |x|^2 + offset, and `after`.

    Args:
        x: (..., D).
        factor: of the squared norm.
        offset: added to it.
        before: (m,) or (..., m), constant numbers in the dtype of x.
        after: (p,) or (..., p), likewise.

    Returns:
        (..., D + m + 2 + p).
    """
    column = x.to(accumulation_dtype(x.dtype)).square().sum(-1) * factor + offset
    column = column.clamp(min=most_negative(x.dtype)) if x.dtype == torch.float16 else column
    before, after = (more.expand(*x.shape[:-1], -1) for more in (before, after))
    return torch.cat((x, before, _two_numbers(column, x.dtype), after), -1)
