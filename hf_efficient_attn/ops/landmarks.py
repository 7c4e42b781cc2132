"""Landmarks, which are means of segments of the valid tokens, and attention of many queries to a few keys."""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.blocks import ceil_div, chunked_over_heads, pad_to_blocks, take, valid_first
from hf_efficient_attn.ops.partial import accumulation_dtype, partial_attention

# Scores of a head that `attention_to_few_keys` computes at a time if there is no fused kernel: 16 MiB of float32.
_SCORES = 1 << 22


class Segments(NamedTuple):
    """Segments of the valid tokens, L of them for every mask.

    Of n tokens the first n mod L segments have one token more than the others. If n < L the last segments are empty.

    Attributes:
        token: int64 (B, L, S), the tokens of each segment; S is the size of the largest possible one.
        weight: (B, L, S), 1 / size for the tokens of the segment, and 0 for padding.
    """

    token: Tensor
    weight: Tensor

    @property
    def empty(self) -> Tensor:
        """Bool (B, L): which segments have no token."""
        return self.weight[..., 0] == 0

    def repeat_interleave(self, repeats: int) -> "Segments":
        """The segments of every sequence for `repeats` heads: (B * repeats, L, S)."""
        return Segments(*(x.repeat_interleave(repeats, 0) for x in self))


def segment_sizes(num_tokens: Tensor, num_segments: int) -> Tensor:
    """The sizes of the segments for numbers of tokens: int64 (...) -> (..., L)."""
    segment = torch.arange(num_segments, device=num_tokens.device)
    return (num_tokens // num_segments).unsqueeze(-1) + (segment < (num_tokens % num_segments).unsqueeze(-1))


def masked_segments(key_mask: Tensor, num_segments: int, dtype: torch.dtype) -> Segments:
    """The segments of the valid tokens of a bool mask (B, N), with weights of `dtype`."""
    length = key_mask.shape[1]
    sizes = segment_sizes(key_mask.sum(1), num_segments)
    starts = sizes.cumsum(1) - sizes
    rank = torch.arange(ceil_div(length, num_segments), device=key_mask.device)
    inside = rank < sizes.unsqueeze(2)
    index = (starts.unsqueeze(2) + rank).clamp(max=length - 1).flatten(1)
    index = valid_first(key_mask).gather(1, index).view(inside.shape)
    return Segments(index, inside.to(dtype) / sizes.clamp(min=1).unsqueeze(2).to(dtype))


def segment_means(x: Tensor, num_segments: int, segments: Segments | None = None) -> Tensor:
    """The means of the segments, in the accumulation dtype; 0 for empty segments.

    Args:
        x: (BH, N, D).
        num_segments: L.
        segments: the segments of the valid tokens (BH, L, S), or None if all tokens are valid.

    Returns:
        (BH, L, D).
    """
    acc_dtype = accumulation_dtype(x.dtype)
    if segments is not None:

        def some_heads(x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
            # A masked token may be NaN, which a weight of 0 would not remove.
            tokens = take(x, index).masked_fill((weight == 0).unsqueeze(3), 0.0)
            return (weight.unsqueeze(2) @ tokens.to(acc_dtype)).squeeze(2)

        return chunked_over_heads(some_heads, x, *segments)
    (batch_heads, length, head_dim), (size, longer) = x.shape, divmod(x.shape[1], num_segments)
    head, tail = x[:, : longer * (size + 1)], x[:, longer * (size + 1) :]
    parts = []
    if longer:
        parts.append(head.reshape(batch_heads, longer, size + 1, head_dim).mean(2, dtype=acc_dtype))
    if size:
        parts.append(tail.reshape(batch_heads, num_segments - longer, size, head_dim).mean(2, dtype=acc_dtype))
    else:
        parts.append(x.new_zeros(batch_heads, num_segments - length, head_dim, dtype=acc_dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def attention_to_few_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    *,
    scale: float,
    dropout_p: float,
    dtype: torch.dtype,
) -> Tensor:
    """softmax(scale * query key^T + bias) value for many queries and a few keys.

    Args:
        query: (BH, N, D).
        key: (BH, L, D), in the accumulation dtype.
        value: (BH, L, Dv), in the accumulation dtype.
        bias: (BH, L) in the accumulation dtype, or None; -inf excludes a key.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight of a query.
        dtype: dtype of the result.

    Returns:
        (BH, N, Dv); 0 if the bias excludes all keys.
    """
    # The fused kernel for the CPU needs the numbers of a token to be contiguous, which those of a solve are not.
    key, value = key.contiguous(), value.contiguous()
    if bias is not None:
        excluded = (bias == -torch.inf).all(1, keepdim=True)
        bias, value = bias.masked_fill(excluded, 0.0), value.masked_fill(excluded.unsqueeze(2), 0.0)
    block_q = ceil_div(query.shape[1], ceil_div(query.shape[1] * key.shape[1], _SCORES))

    def some_heads(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        blocks = pad_to_blocks(query.to(key.dtype), block_q)
        block_bias = None if bias is None else bias[:, None, None]
        tensors = blocks, key[:, None], value[:, None], block_bias
        result = partial_attention(*tensors, scale=scale, dropout_p=dropout_p).out
        result = result.flatten(1, 2)[:, : query.shape[1]].to(dtype)
        return result if out is None else out.copy_(result)

    # A few heads at a time only if the queries are converted to the accumulation dtype.
    step = query.shape[0] if query.dtype == key.dtype else None
    shape = (query.shape[1], value.shape[2], dtype)
    return chunked_over_heads(some_heads, query, key, value, bias, result=shape, step=step)
