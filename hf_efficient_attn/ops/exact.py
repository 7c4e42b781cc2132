"""Exact attention in blocks of queries, with memory linear in the sequence, also with a bias by distance, as in T5.

A table (H, 2R + 1) holds the bias of each head for the distances -R to R, the position of the key minus that of the
query. Beyond them the bias is that of -R or R. No (Nq, Nk) bias is ever made: only that of some blocks of queries.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_efficient_attn.ops.attend import attend
from hf_efficient_attn.ops.blocks import pad_to_blocks
from hf_efficient_attn.ops.partial import accumulation_dtype
from hf_efficient_attn.ops.slices import slice_size, sliced

_BLOCK_Q = 256


def mask_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where the bool mask is True and -inf elsewhere, in the accumulation dtype of `dtype`."""
    zeros = torch.zeros(mask.shape, dtype=accumulation_dtype(dtype), device=mask.device)
    return zeros.masked_fill_(~mask, -torch.inf)


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None = None,
    *,
    is_causal: bool,
    scale: float,
    dropout_p: float = 0.0,
) -> Tensor:
    """softmax(scale * query key^T) value.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        value: (BH, Nk, Dv).
        key_mask: bool (BH, Nk), True for valid keys, or None.
        is_causal: whether query i attends to the keys up to i only. Then Nq = Nk.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        (BH, Nq, Dv); 0 for queries without a key.
    """
    (batch_heads, q_len, head_dim), kv_len = query.shape, key.shape[1]
    is_plain = key_mask is None and dropout_p == 0.0 and head_dim == value.shape[2]
    if is_causal and is_plain and query.dtype != torch.float64:
        # One kernel. There is none for float64 on an accelerator, where the plain form holds all pairs.
        query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale).squeeze(0)
    bias = None if key_mask is None else mask_bias(key_mask, query.dtype)[:, None, None]

    def attend_blocks(blocks: Tensor) -> Tensor:
        return attend(blocks, key[:, None], value[:, None], bias, scale=scale, dropout_p=dropout_p).out

    if not is_causal:
        blocks = pad_to_blocks(query, min(q_len, _BLOCK_Q))
        if dropout_p == 0.0:
            return attend_blocks(blocks).flatten(1, 2)[:, :q_len]
        size = slice_size(batch_heads * blocks.shape[2] * kv_len, query.device)
        return sliced(attend_blocks, blocks, size=size, dim=1, draws=True).flatten(1, 2)[:, :q_len]
    outs = []
    for start in range(0, q_len, _BLOCK_Q):
        end = min(start + _BLOCK_Q, q_len)
        position = torch.arange(end, device=query.device)
        block_bias = mask_bias(position <= position[start:, None], query.dtype)[None, None]
        if bias is not None:
            block_bias = block_bias + bias[..., :end]
        block = query[:, None, start:end], key[:, None, :end], value[:, None, :end]
        outs.append(attend(*block, block_bias, scale=scale, dropout_p=dropout_p).out[:, 0])
    return torch.cat(outs, 1)


def exact_decode(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None = None, *, scale: float, dropout_p: float = 0.0
) -> Tensor:
    """Causal attention of the last queries to all keys, as in a decoding step.

    Args:
        query: (B, H, Nq, D), the queries of the last Nq positions.
        key: (B, H, Nk, D).
        value: (B, H, Nk, Dv).
        key_mask: bool (B, Nk), True for valid keys, or None.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        (B, H, Nq, Dv).
    """
    q_len, kv_len = query.shape[2], key.shape[2]
    position = torch.arange(kv_len, device=query.device)
    pairs = (position <= position[kv_len - q_len :, None])[None]
    if key_mask is not None:
        pairs = (pairs & key_mask[:, None]).repeat_interleave(query.shape[1], 0)
    query_block, key, value = (x.flatten(0, 1)[:, None] for x in (query, key, value))
    bias = mask_bias(pairs, query.dtype)[:, None]
    out = attend(query_block, key, value, bias, scale=scale, dropout_p=dropout_p).out[:, 0]
    result: Tensor = out.unflatten(0, query.shape[:2])
    return result


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
