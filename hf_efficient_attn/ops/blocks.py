"""Rearranging tokens: padding to whole blocks, gathering by index, valid tokens first."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.constants import constant, integers
from hf_efficient_attn.ops.export import exporting_to_onnx


def ceil_div(number: int, divisor: int) -> int:
    """The quotient of a number >= 0 and a divisor > 0, rounded up."""
    return (number + divisor - 1) // divisor  # ONNX rounds quotients of negative numbers towards 0


def count_blocks(length: int, size: int) -> int:
    """The number of blocks of `size` tokens that hold `length` tokens.

    In a graph for ONNX there is one more, which is empty: PyTorch's exporter takes a dimension that is 1 in the example
    for one that is always 1.
    """
    return ceil_div(length, size) + (1 if exporting_to_onnx() else 0)


def pad_to_blocks(x: Tensor, size: int, value: float = 0.0) -> Tensor:
    """Split (BH, N, D) into (BH, T, size, D) with T of `count_blocks`. `value` fills the rest of the blocks."""
    missing = count_blocks(x.shape[1], size) * size - x.shape[1]
    if missing:
        x = pad(x, (0, 0, 0, missing), value=value)
    return x.reshape(x.shape[0], -1, size, x.shape[2])


def take(x: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Gather the tokens of each head by index.

    Args:
        x: (BH, N, D).
        index: int64 (BH, ...), each below N.
        out: contiguous tensor of the result's shape to write into, or None. Ignored if a gradient is wanted.

    Returns:
        (BH, ..., D).
    """
    if x.requires_grad and torch.is_grad_enabled():
        # Along the first dimension with an expanded index both directions process whole tokens.
        flat = _flat_index(index, x.shape[1]).unsqueeze(1).expand(-1, x.shape[2])
        return x.flatten(0, 1).gather(0, flat).view(*index.shape, x.shape[2])
    # `index_select` copies a whole token at a time and is five times as fast as `gather`. With a gradient `gather` is
    # faster, because of its backward.
    return _select(x, _flat_index(index, x.shape[1]), index.shape, out)


def take_both(key: Tensor, value: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """`take` for two tensors (BH, N, D) and (BH, N, Dv) by the same index, with fewer operations."""
    if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
        return take(key, index), take(value, index)
    flat = _flat_index(index, key.shape[1])
    return _select(key, flat, index.shape), _select(value, flat, index.shape)


def _flat_index(index: Tensor, length: int) -> Tensor:
    """The index (BH, ...) in the tokens of all heads, one head after the other: (BH * ...,)."""
    first = constant(_first_tokens, index.shape[0], length, device=index.device)
    flat: Tensor = (index + first.view(-1, *[1] * (index.ndim - 1))).flatten()
    return flat


def _select(x: Tensor, flat: Tensor, shape: torch.Size, out: Tensor | None = None) -> Tensor:
    x = x.reshape(-1, x.shape[2])
    if out is None:
        return x.index_select(0, flat).view(*shape, x.shape[1])
    torch.index_select(x, 0, flat, out=out.view(-1, x.shape[1]))
    return out


def _first_tokens(batch_heads: int, length: int, device: torch.device) -> Tensor:
    """The index of the first token of each head, if the tokens of all heads follow one another."""
    return torch.arange(batch_heads, device=device) * length


def inverse(order: Tensor) -> Tensor:
    """Invert the permutation of each head: order (BH, N) -> (BH, N) with inverse[order[i]] = i."""
    ranks = integers(order.shape[1], order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, ranks)


def valid_first(key_mask: Tensor) -> Tensor:
    """Stable order (BH, N) that puts the valid tokens before the masked ones, for a bool mask (BH, N)."""
    return (~key_mask).to(torch.int8).argsort(dim=1, stable=True)


def move_valid_first(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Move the valid tokens of (BH, N, D) inputs to the front, so that blocks are counted from the first of them.

    Returns:
        The inputs, and the order (BH, N) in which their tokens are now; None if there is no mask.
    """
    if key_mask is None:
        return query, key, value, None
    order = valid_first(key_mask)
    return take(query, order), take(key, order), take(value, order), order


def restore_order(out: Tensor, order: Tensor | None, key_mask: Tensor | None) -> Tensor:
    """Undo `move_valid_first` for the output (BH, N, Dv). Outputs at masked tokens are 0."""
    if order is None or key_mask is None:
        return out
    return take(out, inverse(order)).masked_fill(~key_mask[:, :, None], 0.0)
