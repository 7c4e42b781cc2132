"""Biases as further dimensions of queries and keys, added once by a method that makes copies of its keys anyway.

On an accelerator `fused_attention` turns a bias of each key into two dimensions of all queries and keys, which copies
them in every call. A method that gathers or concatenates its keys has them with these dimensions from the start, and
all of its calls are without a bias. Queries, keys and values are padded to the same multiple of 8, as FlashAttention
takes them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.constants import constant
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
    """`bias_columns` with a gradient in few operations: (...) -> (..., 2). -inf becomes a very negative number."""
    columns: Tensor = _LseColumns.apply(lse, dtype, scale * column_unit(dtype, scale))  # type: ignore[no-untyped-call]
    return columns


class _LseColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lse: Tensor, dtype: torch.dtype, factor: float) -> Tensor:
        ctx.factor, ctx.dtype = factor, lse.dtype
        column = (lse / factor).clamp(min=most_negative(dtype))
        high = column.to(dtype)
        return torch.stack((high, (column - high).to(dtype)), -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0][..., 0].to(ctx.dtype) / ctx.factor, None, None


def _number(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


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
    result: Tensor = _WithSquare.apply(x, factor, offset, before, after)  # type: ignore[no-untyped-call]
    return result


class _WithSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, offset: float, before: Tensor, after: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor, ctx.column = factor, x.shape[-1] + before.shape[-1]
        acc_dtype = accumulation_dtype(x.dtype)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=acc_dtype)
        column = torch.addcmul(constant(_number, offset, acc_dtype, device=x.device), norm, norm, value=factor)
        if x.dtype == torch.float16:
            column = column.clamp(min=most_negative(x.dtype))
        high = column.to(x.dtype)
        before, after = (more.expand(*x.shape[:-1], -1) for more in (before, after))
        return torch.cat((x, before, high, (column - high).to(x.dtype), after), -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        of_square = grads[0][..., ctx.column, None]
        return torch.addcmul(grads[0][..., : x.shape[-1]], x, of_square, value=2.0 * ctx.factor), None, None, None, None
