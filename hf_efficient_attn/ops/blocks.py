"""Rearranging tokens: padding to whole blocks, gathering by index, valid tokens first, a few heads at a time."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.constants import constant, integers
from hf_efficient_attn.ops.export import exporting_to_onnx, is_compiling

# Numbers of queries or keys that are processed at a time on the CPU: one head of 8,192 x 64. Their temporaries fit the
# cache and reuse memory that earlier heads have touched. Code without this loses half its time to page faults.
_CHUNK_NUMEL = 1 << 19


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
        if x.device.type == "cpu" and not is_compiling():
            # Along the first dimension with an expanded index both directions process whole tokens.
            flat = _flat_index(index, x.shape[1]).unsqueeze(1).expand(-1, x.shape[2])
            return x.flatten(0, 1).gather(0, flat).view(*index.shape, x.shape[2])
        flat = index.reshape(index.shape[0], -1, 1).expand(-1, -1, x.shape[2])
        return x.gather(1, flat).reshape(*index.shape, x.shape[2])
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


def can_reuse_buffers(*tensors: Tensor | None) -> bool:
    """Whether blocks of tokens may be processed one after the other in reused buffers.

    This holds on the CPU, without a gradient and without `torch.compile`. On an accelerator each block would launch its
    kernels separately.
    """
    given = [x for x in tensors if x is not None]
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    return not (needs_grad or is_compiling()) and backend(given[0]) == "cpu"


def chunked_over_heads(
    function: Callable[..., Tensor],
    *tensors: Tensor | None,
    result: tuple[int, int, torch.dtype] | None = None,
    step: int | None = None,
) -> Tensor:
    """Call `function` for a few heads at a time and concatenate the results.

    There is a single call with all heads on an accelerator, with `torch.compile` and for small tensors.

    Args:
        function: takes the tensors and returns (BH, Nq, Dv).
        *tensors: (BH, ...) each, or None, which is passed on.
        result: (Nq, Dv, dtype) of the result, if `function` also accepts `out=`. It then gets None or the part of the
            result that it may write into and return, which saves a copy.
        step: heads at a time; by default as many as fit the cache.

    Returns:
        (BH, Nq, Dv).
    """
    given = [x for x in tensors if x is not None]
    batch_heads, numel = given[0].shape[0], max(x[0].numel() for x in given)
    step = max(1, _CHUNK_NUMEL // max(1, numel)) if step is None else step
    if step >= batch_heads or given[0].device.type != "cpu" or is_compiling():
        return function(*tensors)
    # `split` rather than slices: its backward is one concatenation, that of a slice a whole tensor of zeros.
    splits = [[None] * ceil_div(batch_heads, step) if x is None else x.split(step) for x in tensors]
    chunks = list(zip(*splits, strict=True))
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return torch.cat([function(*chunk) for chunk in chunks])
    if result is not None:
        q_len, value_dim, dtype = result
        whole = given[0].new_empty(batch_heads, q_len, value_dim, dtype=dtype)
        for chunk, out in zip(chunks, whole.split(step), strict=True):
            function(*chunk, out=out)
        return whole
    part = function(*chunks[0])
    whole = part.new_empty(batch_heads, *part.shape[1:])
    whole[:step] = part
    for i, chunk in enumerate(chunks[1:], 1):
        whole[i * step : (i + 1) * step] = function(*chunk)
    return whole
