"""Exact attention to all keys, with memory linear in the sequence.

A bias by distance, as in T5, is a table (H, 2R + 1): the bias of each head for the distances -R to R. A distance is the
position of the key minus the position of the query. Larger distances have the bias for -R or R. No (Nq, Nk) bias is
ever made, only the bias of some blocks of queries at a time.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.ops.attend import Partial, attend, keeps_pairs, output_of
from hf_efficient_attn.ops.backends.devices import accumulation_dtype
from hf_efficient_attn.ops.index import pad_to_blocks
from hf_efficient_attn.ops.slices import slice_size, sliced

# PyTorch's function below `torch.overrides`, so that `replace_sdpa` does not take the calls of a method in a model.
scaled_dot_product_attention: Callable[..., Tensor] = torch.ops.aten.scaled_dot_product_attention.default
_BLOCK_Q = 256


def mask_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where the bool mask is True and -inf elsewhere, in the accumulation dtype of `dtype`."""
    return torch.zeros(mask.shape, dtype=accumulation_dtype(dtype), device=mask.device).masked_fill_(~mask, -torch.inf)


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None = None,
    *,
    is_causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    with_lse: bool = False,
) -> Tensor:
    """Compute softmax(scale * query key^T) value, in the causal form for Nq = Nk.

    Returns:
        (BH, Nq, Dv or Dv + 1); 0 for queries without a key.
    """
    batch_heads, q_len, head_dim = query.shape
    kv_len = key.shape[1]
    # PyTorch's causal kernel multiplies the -inf of later keys with the scale, which must therefore be positive.
    is_plain = key_mask is None and dropout_p == 0.0 and head_dim == value.shape[2] and scale > 0.0
    if is_causal and is_plain and not with_lse and query.dtype != torch.float64:
        # One kernel. There is none for float64 on an accelerator, where the plain form holds all pairs.
        query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale).squeeze(0)
    bias = None if key_mask is None else mask_bias(key_mask, query.dtype)[:, None, None]  # (BH, 1, 1, Nk)

    def attend_blocks(blocks: Tensor) -> Tensor:
        found = attend(blocks, key[:, None], value[:, None], bias, scale=scale, dropout_p=dropout_p)
        return output_of(found, with_lse)

    if not is_causal:
        blocks = pad_to_blocks(query, min(q_len, _BLOCK_Q))  # (BH, T, block_q, D)
        if not keeps_pairs(blocks, key[:, None], bias, scale, dropout_p):
            return attend_blocks(blocks).flatten(1, 2)[:, :q_len]  # (BH, Nq, Dv)
        size = slice_size(batch_heads * blocks.shape[2] * kv_len, query.device)
        return sliced(attend_blocks, blocks, size=size, dim=1, draws=dropout_p > 0.0).flatten(1, 2)[:, :q_len]
    query, key, value = (x.unsqueeze(1) for x in (query, key, value))  # (BH, 1, N, .)
    call: dict[str, Any] = {"scale": scale, "dropout_p": dropout_p, "with_lse": with_lse}
    return biased_exact(query, key, value, None, key_mask, is_causal=True, **call).squeeze(1)


def bias_of(table: Tensor, distance: Tensor) -> Tensor:
    """Look up the bias of distances: table (H, 2R + 1), distance int64 (..., Nq, Nk) -> (H, ..., Nq, Nk)."""
    largest = (table.shape[1] - 1) // 2
    return table[:, distance.clamp(-largest, largest) + largest]


def bias_between(table: Tensor, query_position: Tensor, key_position: Tensor) -> Tensor:
    """Look up the bias of blocks, whose positions may differ between heads.

    Takes a table (BH, 2R + 1), and the positions of queries and keys, int64 (BH or 1, T, Nq) and (BH or 1, T, Nk).
    Returns (BH, T, Nq, Nk).
    """
    distance = key_position.unsqueeze(2) - query_position.unsqueeze(3)  # (BH or 1, T, Nq, Nk)
    if len(distance) == 1:
        return bias_of(table, distance[0])
    largest = (table.shape[1] - 1) // 2
    return table.gather(1, (distance.clamp(-largest, largest) + largest).flatten(1)).view_as(distance)


def biased_exact(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor | None,
    key_mask: Tensor | None = None,
    *,
    is_causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    window: int | None = None,
    with_lse: bool = False,
) -> Tensor:
    """Compute softmax(scale * query key^T + bias) value, some queries at a time.

    Args:
        query: (B, H, Nq, D).
        key: (B, H, Nk, D).
        value: (B, H, Nk, Dv).
        table: (H, 2R + 1), the bias, or None.
        key_mask: bool (B, Nk), True for valid keys, or None.
        is_causal: whether the queries attend to the keys up to their own position. Then, and with a window, they are
            the last Nq positions. Otherwise query i is at position i.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.
        window: the number of keys on one side, its own included, that a query attends to; None for all.
        with_lse: whether to return the lse as well (`output_of`).

    Returns:
        (B, H, Nq, Dv or Dv + 1); 0 for queries without a key.
    """
    _, _, q_len, _ = query.shape
    kv_len = key.shape[2]
    device = query.device
    offset = kv_len - q_len if is_causal or window is not None else 0
    table = None if table is None else table.to(accumulation_dtype(query.dtype))
    valid = None if key_mask is None else mask_bias(key_mask, query.dtype)[:, None, None]  # (B, 1, 1, Nk)
    left = q_len + kv_len if window is None else window - 1
    right = 0 if is_causal else left
    outs = []
    for start in range(0, q_len, _BLOCK_Q):
        block = query[:, :, start : start + _BLOCK_Q]  # (B, H, block_q, D)
        positions = torch.arange(start, start + block.shape[2], device=device)[:, None] + offset  # (block_q, 1)
        end = max(1, min(kv_len, offset + start + block.shape[2] + right))
        first = max(0, min(end - 1, offset + start - left))
        distance = torch.arange(first, end, device=device) - positions  # (block_q, Nk)
        in_window = distance <= right if window is None else (distance <= right) & (distance >= -left)
        bias = mask_bias(in_window, query.dtype)[None, None]  # (1, 1, block_q, Nk)
        bias = bias if table is None else bias + bias_of(table, distance)
        bias = bias if valid is None else bias + valid[..., first:end]  # (B or 1, H or 1, block_q, Nk)
        # Batch rows take the place of heads in `attend`, and heads take the place of blocks, which share a bias.
        own = block, key[:, :, first:end], value[:, :, first:end]
        outs.append(output_of(attend(*own, bias, scale=scale, dropout_p=dropout_p), with_lse))  # (B, H, block_q, Dv)
    return torch.cat(outs, 2)  # (B, H, Nq, Dv)


def dense_softmax(
    scores: Tensor, value: Tensor, key_mask: Tensor | None = None, is_causal: bool = False, *, with_lse: bool = False
) -> Tensor:
    """Compute attention from scores (..., Nq, Nk), values (..., Nk, Dv), mask (..., Nk); 0 for a query without keys.

    The result (..., Nq, Dv) has the dtype of the values, and float64 `with_lse`, which is then one more column.
    """
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)  # (Nq, Nk)
        scores = scores.masked_fill(future, -torch.inf)
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask.unsqueeze(-2), -torch.inf)
    out = scores.softmax(-1).nan_to_num(0.0) @ value.double()  # (..., Nq, Dv)
    return output_of(Partial(out, scores.logsumexp(-1)), True) if with_lse else out.to(value.dtype)
