"""Landmarks: means of segments of the tokens that are there, and attention of many queries to a few such columns."""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.blocks import ceil_div, chunked_over_heads, pad_to_blocks, take, valid_first
from hf_efficient_attn.ops.partial import accumulation_dtype, partial_attention

# Scores of a head at a time in `attend_columns`, where the product is not one kernel: 16 MiB of float32.
_SCORES = 1 << 22


class Segments(NamedTuple):
    """Segments of the tokens that are there, the same number of them whatever the mask.

    Of n tokens in L segments the first n mod L have one token more than the others; with n < L the last ones are empty.

    index: int64 (A, L, S), the tokens of each segment, S as many as the longest may have.
    weight: (A, L, S), 1 / size at the tokens of a segment and 0 at the places behind them.
    """

    index: Tensor
    weight: Tensor

    @property
    def empty(self) -> Tensor:
        """Bool (A, L): the segments without a token."""
        return self.weight[..., 0] == 0

    def repeat_interleave(self, repeats: int) -> "Segments":
        """Those of every row for `repeats` heads."""
        return Segments(*(x.repeat_interleave(repeats, 0) for x in self))


def segment_sizes(tokens: Tensor, count: int) -> Tensor:
    """Sizes of `count` segments of so many tokens: int64 (...) -> (..., count)."""
    number = torch.arange(count, device=tokens.device)
    return (tokens // count).unsqueeze(-1) + (number < (tokens % count).unsqueeze(-1))


def masked_segments(mask: Tensor, count: int, dtype: torch.dtype) -> Segments:
    """The segments of the tokens that are there: mask bool (A, N); `dtype` is that of the weights."""
    columns = mask.shape[1]
    sizes = segment_sizes(mask.sum(1), count)
    starts = sizes.cumsum(1) - sizes
    place = torch.arange(ceil_div(columns, count), device=mask.device)
    inside = place < sizes.unsqueeze(2)
    index = (starts.unsqueeze(2) + place).clamp(max=columns - 1).flatten(1)
    index = valid_first(mask).gather(1, index).view(inside.shape)
    return Segments(index, inside.to(dtype) / sizes.clamp(min=1).unsqueeze(2).to(dtype))


def segment_means(x: Tensor, count: int, segments: Segments | None = None) -> Tensor:
    """Means of `count` segments of tokens: x (A, N, D) -> (A, count, D) in the accumulator's type; 0 for empty ones.

    Args:
        segments: those of the tokens that are there, or None where all are.
    """
    wide = accumulation_dtype(x.dtype)
    if segments is not None:

        def some_heads(x, index, weight):
            # What stands at tokens that are not there may be anything, NaN included, which a weight of 0 would keep.
            tokens = take(x, index).masked_fill((weight == 0).unsqueeze(3), 0.0)
            return (weight.unsqueeze(2) @ tokens.to(wide)).squeeze(2)

        return chunked_over_heads(some_heads, x, *segments)
    (heads, length, width), size, longer = x.shape, x.shape[1] // count, x.shape[1] % count
    head, tail = x[:, : longer * (size + 1)], x[:, longer * (size + 1) :]
    parts = []
    if longer:
        parts.append(head.reshape(heads, longer, size + 1, width).mean(2, dtype=wide))
    if size:
        parts.append(tail.reshape(heads, count - longer, size, width).mean(2, dtype=wide))
    else:
        parts.append(x.new_zeros(heads, count - length, width, dtype=wide))
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
    """softmax(scale * query key^T + bias) value for many queries and a few columns.

    Args:
        query: (A, N, D). key, value: (A, L, D) and (A, L, Dv), in the accumulator's type.
        bias: (A, L) in the same type, or None; -inf shuts a column out.
        dropout_p: probability of dropping a weight of a query.
        dtype: type of the result.

    Returns:
        (A, N, Dv); 0 where the bias shuts all columns out.
    """
    # The CPU's fused kernel takes the numbers of a token for neighbours in memory, which those of a solve are not.
    key, value = key.contiguous(), value.contiguous()
    if bias is not None:
        nothing = (bias == -torch.inf).all(1, keepdim=True)
        bias, value = bias.masked_fill(nothing, 0.0), value.masked_fill(nothing.unsqueeze(2), 0.0)

    rows = ceil_div(query.shape[1], ceil_div(query.shape[1] * key.shape[1], _SCORES))

    def some_heads(query, key, value, bias, out=None):
        tiles = pad_to_blocks(query.to(key.dtype), rows)
        one = None if bias is None else bias[:, None, None]
        got = partial_attention(tiles, key[:, None], value[:, None], one, scale=scale, dropout_p=dropout_p).out
        got = got.flatten(1, 2)[:, : query.shape[1]].to(dtype)
        return got if out is None else out.copy_(got)

    # A few heads at a time only where queries are copied for a wider type.
    step = query.shape[0] if query.dtype == key.dtype else None
    result = (query.shape[1], value.shape[2], dtype)
    return chunked_over_heads(some_heads, query, key, value, bias, result=result, step=step)
