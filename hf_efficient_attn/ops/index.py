"""Tokens in blocks and by index, and the order that puts valid tokens first."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.constants import constant
from hf_efficient_attn.ops.tracing import exporting_to_onnx


@constant
def integers(count: int, device: torch.device) -> Tensor:
    """Return 0, 1, ..., count - 1 as int64 (count,)."""
    return torch.arange(count, device=device)


def ceil_div(number: int, divisor: int) -> int:
    """Compute the quotient of a number >= 0 and a divisor > 0, rounded up."""
    return (number + divisor - 1) // divisor  # ONNX rounds quotients of negative numbers towards 0


def count_blocks(length: int, size: int) -> int:
    """Return the number of blocks of `size` tokens that hold `length` tokens.

    In a graph for ONNX there is one more, which is empty: PyTorch's exporter takes a dimension that is 1 in the example
    for one that is always 1.
    """
    return ceil_div(length, size) + (1 if exporting_to_onnx() else 0)


def pad_to_blocks(x: Tensor, size: int) -> Tensor:
    """Split (BH, N, D) into T = `count_blocks` blocks (BH, T, size, D), the last of which ends with zeros."""
    missing = count_blocks(x.shape[1], size) * size - x.shape[1]
    if missing:
        x = pad(x, (0, 0, 0, missing))
    return x.reshape(x.shape[0], -1, size, x.shape[2])


def take(x: Tensor, index: Tensor) -> Tensor:
    """Gather the tokens of each head by index.

    Args:
        x: (BH, N, D).
        index: int64 (BH, ...), each below N.

    Returns:
        (BH, ..., D).
    """
    if x.requires_grad and torch.is_grad_enabled():
        # Gathering along the first dimension with an expanded index processes whole tokens, forward and backward.
        flat = flat_index(index, x.shape[1]).view(-1, 1).expand(-1, x.shape[2])  # (BH * ..., D)
        return x.flatten(0, 1).gather(0, flat).view(*index.shape, x.shape[2])
    # `embedding` copies a whole token at a time and is five times as fast as `gather`. With a gradient `gather` is
    # faster, because of its backward.
    return torch.embedding(x.reshape(-1, x.shape[2]), flat_index(index, x.shape[1]))


def flat_index(index: Tensor, length: int) -> Tensor:
    """Turn an index (BH, ...) into the tokens of each head into one into the tokens of all heads in turn: (BH, ...)."""
    flat: Tensor = index + _first_tokens(index.shape[0], length, index.ndim, index.device)
    return flat


@constant
def _first_tokens(batch_heads: int, length: int, ndim: int, device: torch.device) -> Tensor:
    """Return the index of each head's first token if the tokens of all heads follow one another: (BH, 1, ...)."""
    return (torch.arange(batch_heads, device=device) * length).view(-1, *[1] * (ndim - 1))


def inverse(order: Tensor) -> Tensor:
    """Invert the permutation of each head: order (BH, N) -> (BH, N) with inverse[order[i]] = i."""
    ranks = integers(order.shape[1], order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, ranks)


def valid_first(key_mask: Tensor) -> Tensor:
    """Return the stable order (BH, N) that puts valid tokens before masked ones, for a bool mask (BH, N)."""
    return (~key_mask).to(torch.int8).argsort(dim=1, stable=True)
