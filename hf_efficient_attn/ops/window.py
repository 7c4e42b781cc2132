"""Attention to a sliding window over the positions, in blocks of queries over overlapping views of the keys."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.blocks import can_reuse_buffers, ceil_div, count_blocks, pad_to_blocks
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.export import exporting_to_onnx
from hf_efficient_attn.ops.partial import LOG2_E, Partial, accumulation_dtype, partial_attention, safe_row_max

# Queries of a block: few, so that few keys of a block are outside the window of its queries. With a gradient there are
# more, because the gradient of a key is summed over all blocks that contain it.
_BLOCK_Q, _BLOCK_Q_WITH_GRADIENT = 64, 128
# Scores that are computed at a time in reused buffers: 4 MiB of float32.
_SCORES_NUMEL = 1 << 20


class _Blocks(NamedTuple):
    """The blocks of a window.

    Attributes:
        in_window: bool (block_q, block_k), the pairs of a block that are within the window.
        valid: bool (1, T, block_k), the valid keys of each block.
        inner: the blocks whose keys are all valid, as first and last + 1. Their bias is `in_window` alone.
        left: keys of a block before its first query.
        right: keys of a block after its last query.
    """

    in_window: Tensor
    valid: Tensor
    inner: tuple[int, int]
    left: int
    right: int


def window_partial(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None = None,
    *,
    left: int,
    right: int,
    skip: int = 0,
    scale: float,
    dropout_p: float = 0.0,
    out: Tensor | None = None,
) -> Partial:
    """Attention of each query i to the keys i - left .. i + right.

    Args:
        query: (BH, N, D).
        key: (BH, N, D).
        value: (BH, N, Dv).
        key_mask: bool (1, N), True for valid keys, or None. With a gradient, dropout or `torch.compile` also (BH, N).
        left: keys before the query.
        right: keys after the query.
        skip: number of first keys that no query attends to.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.
        out: contiguous (BH, N, Dv) whose memory the result may use, or None.

    Returns:
        Partial of out (BH, N, Dv) and lse (BH, N).
    """
    length, device = query.shape[1], query.device
    reuse_buffers = not dropout_p and can_reuse_buffers(query, key, value)
    exporting = exporting_to_onnx()
    block_q = _BLOCK_Q if reuse_buffers else _BLOCK_Q_WITH_GRADIENT
    block_q = block_q if exporting else min(block_q, length)
    num_blocks, block_k = count_blocks(length, block_q), left + block_q + right
    after = right + num_blocks * block_q - length
    valid = torch.ones(1, length, dtype=torch.bool, device=device) if key_mask is None else key_mask
    valid = valid & (torch.arange(length, device=device) >= skip)
    valid = pad(valid, (left, after)).unfold(1, block_k, block_q)
    distance = torch.arange(block_k, device=device) - left - torch.arange(block_q, device=device)[:, None]
    in_window = (distance >= -left) & (distance <= right)
    # Without a mask all blocks but those at both ends have the same bias, which then stays in the cache.
    same_bias = key_mask is None and not exporting
    low = min(num_blocks, ceil_div(left + skip, block_q)) if same_bias else num_blocks
    high = max(low, num_blocks - ceil_div(after, block_q))
    if reuse_buffers:
        return _in_buffers(query, key, value, _Blocks(in_window, valid, (low, high), left, right), scale, out)
    blocks = pad_to_blocks(query, block_q)
    views = [_key_blocks(x, num_blocks, block_q, left, right) for x in (key, value)]
    parts = []
    for first, last in ((0, low), (low, high), (high, num_blocks)):
        if first < last:
            pairs = in_window[None, None] if (first, last) == (low, high) else in_window & valid[:, first:last, None]
            keys, values = (x[:, first:last] for x in views)
            bias = mask_bias(pairs, query.dtype)
            part = partial_attention(blocks[:, first:last], keys, values, bias, scale=scale, dropout_p=dropout_p)
            parts.append(part)
    result, lse = (torch.cat(x, 1) if len(parts) > 1 else x[0] for x in zip(*parts, strict=True))
    return Partial(result.flatten(1, 2)[:, :length], lse.flatten(1, 2)[:, :length])


def _key_blocks(x: Tensor, num_blocks: int, block_q: int, left: int, right: int) -> Tensor:
    """Overlapping views of the keys of each block, padded with zeros: (BH, N, D) -> (BH, T, block_k, D)."""
    padded = pad(x, (0, 0, left, right + num_blocks * block_q - x.shape[1]))
    return padded.unfold(1, left + block_q + right, block_q).transpose(2, 3)


def _in_buffers(
    query: Tensor, key: Tensor, value: Tensor, blocks: _Blocks, scale: float, out: Tensor | None
) -> Partial:
    """`window_partial` without gradient and dropout, a few blocks at a time in one buffer of scores.

    Plain products of 64 queries are faster than the fused kernel for so few.
    """
    (batch_heads, length, _), (block_q, block_k) = query.shape, blocks.in_window.shape
    num_blocks, acc_dtype = blocks.valid.shape[1], accumulation_dtype(query.dtype)
    # Scores to base 2: see `exp_`.
    queries = pad_to_blocks(query.to(acc_dtype) * (scale * LOG2_E), block_q)
    keys, values = (_key_blocks(x.to(acc_dtype), num_blocks, block_q, blocks.left, blocks.right) for x in (key, value))
    if out is None or out.dtype != acc_dtype or length != num_blocks * block_q:
        result = queries.new_empty(batch_heads, num_blocks, block_q, value.shape[2])
    else:
        result = out.view(batch_heads, num_blocks, block_q, value.shape[2])
    lse = queries.new_empty(batch_heads, num_blocks, block_q)
    window_bias, key_bias = mask_bias(blocks.in_window, acc_dtype), mask_bias(blocks.valid[0], acc_dtype).unsqueeze(1)
    step = max(1, _SCORES_NUMEL // (block_q * block_k))
    buffer = queries.new_empty(min(step, num_blocks), block_q, block_k)
    for a in range(batch_heads):
        for start in range(0, num_blocks, step):
            some = slice(start, min(start + step, num_blocks))
            scores = torch.bmm(queries[a, some], keys[a, some].transpose(1, 2), out=buffer[: some.stop - start])
            scores += window_bias
            if start < blocks.inner[0] or some.stop > blocks.inner[1]:
                scores += key_bias[some]
            row_max = safe_row_max(scores.amax(2, keepdim=True))
            total = scores.sub_(row_max).exp2_().sum(2, keepdim=True)
            lse[a, some] = (total.log2() + row_max).squeeze(2)
            torch.bmm(scores, values[a, some], out=result[a, some]).div_(total.masked_fill_(total == 0, 1.0))
    return Partial(result.flatten(1, 2)[:, :length].to(value.dtype), lse.mul_(1.0 / LOG2_E).flatten(1)[:, :length])
