"""A bias of the scores that depends on the distance between key and query, as in T5: exact attention and a window.

A table (H, 2R + 1) holds the bias of each head for the distances -R to R, the position of the key minus that of the
query. Beyond them the bias is that of -R or R. No (Nq, Nk) bias is ever made: only that of some blocks of queries.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.attend import attend
from hf_efficient_attn.ops.blocks import count_blocks, pad_to_blocks
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.partial import accumulation_dtype
from hf_efficient_attn.ops.slices import slice_size, sliced
from hf_efficient_attn.ops.window import block_distances, key_blocks, window_bias, window_block

# Queries of a block of exact attention.
_BLOCK_Q = 256


def bias_of(table: Tensor, distance: Tensor) -> Tensor:
    """The bias for some distances: table (H, 2R + 1), distance int64 (..., Nq, Nk) -> (H, ..., Nq, Nk)."""
    largest = (table.shape[1] - 1) // 2
    return table[:, distance.clamp(-largest, largest) + largest]


def biased_exact(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    key_mask: Tensor | None = None,
    *,
    is_causal: bool,
    scale: float,
    dropout_p: float = 0.0,
) -> Tensor:
    """Exact attention with a bias, some queries at a time: softmax(scale * query key^T + bias) value.

    Args:
        query: (B, H, Nq, D).
        key: (B, H, Nk, D).
        value: (B, H, Nk, Dv).
        table: (H, 2R + 1), the bias.
        key_mask: bool (B, Nk), True for valid keys, or None.
        is_causal: whether the queries are the last Nq positions and attend to the keys up to their own position.
            Otherwise query i is at position i.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        (B, H, Nq, Dv); 0 for queries without a key.
    """
    (batch, _, q_len, _), kv_len, device = query.shape, key.shape[2], query.device
    acc_dtype, offset = accumulation_dtype(query.dtype), kv_len - q_len if is_causal else 0
    table = table.to(acc_dtype)
    valid = None if key_mask is None else mask_bias(key_mask, query.dtype)[:, None, None]  # (B, 1, 1, Nk)
    outs = []
    for start in range(0, q_len, _BLOCK_Q):
        block = query[:, :, start : start + _BLOCK_Q]
        positions = torch.arange(start, start + block.shape[2], device=device)[:, None] + offset
        end = max(1, min(kv_len, offset + start + block.shape[2])) if is_causal else kv_len
        distance = torch.arange(end, device=device) - positions
        bias = bias_of(table, distance)
        if is_causal:
            bias = bias + mask_bias(distance <= 0, query.dtype)
        bias = bias[None] if valid is None else bias + valid[..., :end]  # (B or 1, H, block_q, Nk)
        # The heads of a sequence take the place of the blocks of `attend`.
        bias = bias.expand(batch, -1, -1, -1).flatten(0, 1)[:, None]
        rows, keys, values = (x.flatten(0, 1)[:, None] for x in (block, key[:, :, :end], value[:, :, :end]))
        out = attend(rows, keys, values, bias, scale=scale, dropout_p=dropout_p).out
        outs.append(out[:, 0].unflatten(0, query.shape[:2]))
    return torch.cat(outs, 2)


def biased_window(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    key_mask: Tensor | None = None,
    *,
    window: tuple[int, int],
    scale: float,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention of each query i to the keys i - left .. i + right with a bias; arguments as in `biased_exact`.

    Args:
        query: (B, H, N, D).
        key: (B, H, N, D).
        value: (B, H, N, Dv).
        table: (H, 2R + 1), the bias.
        key_mask: bool (B, N), True for valid keys, or None.
        window: (left, right), the keys before and after the query.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        (B, H, N, Dv); 0 for queries without a key.
    """
    (batch, num_heads, length, _), device = query.shape, query.device
    left, right = (min(side, length - 1) for side in window)
    block_q = min(2 * window_block(left, right), length)
    num_blocks, block_k = count_blocks(length, block_q), left + block_q + right
    # All blocks have the same distances: (H, block_q, block_k), for the heads of all sequences.
    of_distance = bias_of(table.to(accumulation_dtype(query.dtype)), block_distances(block_q, left, right, device))
    of_distance = (of_distance + window_bias(block_q, left, right, query.dtype, device)).repeat(batch, 1, 1)
    valid = torch.ones(1, length, dtype=torch.bool, device=device) if key_mask is None else key_mask
    valid = pad(valid, (left, right + num_blocks * block_q - length)).unfold(1, block_k, block_q)
    valid = mask_bias(valid.expand(batch, -1, -1), query.dtype).repeat_interleave(num_heads, 0)  # (BH, T, block_k)

    def some_heads(query: Tensor, key: Tensor, value: Tensor, of_distance: Tensor, of_key: Tensor) -> Tensor:
        blocks, bias = pad_to_blocks(query, block_q), of_distance[:, None] + of_key[:, :, None]
        keys, values = (key_blocks(x, block_q, left, right) for x in (key, value))
        part = attend(blocks, keys, values, bias, scale=scale, dropout_p=dropout_p)
        return part.out.flatten(1, 2)[:, :length]

    size = slice_size(num_blocks * block_q * block_k, device)
    flat = (x.flatten(0, 1) for x in (query, key, value))
    out = sliced(some_heads, *flat, of_distance, valid, size=size, draws=dropout_p > 0.0)
    result: Tensor = out.unflatten(0, (batch, num_heads))
    return result
