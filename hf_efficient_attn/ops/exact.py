"""Exact attention in tiles of queries: linear memory, any mask of keys, causal or not. For what is within a budget."""

import torch
from torch import Tensor

from hf_efficient_attn.ops.blocks import pad_to_blocks
from hf_efficient_attn.ops.partial import accumulation_dtype, partial_attention

_ROWS = 256


def mask_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where the mask is True, else -inf, of the accumulator's type of `dtype`; the mask's shape."""
    zeros = torch.zeros(mask.shape, dtype=accumulation_dtype(dtype), device=mask.device)
    return zeros.masked_fill_(~mask, -torch.inf)


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool,
    scale: float,
    dropout_p: float = 0.0,
) -> Tensor:
    """softmax(scale * query key^T) value.

    Args:
        query: (A, Nq, D); key: (A, Nk, D); value: (A, Nk, Dv); Nq = Nk where causal.
        mask: bool (A, Nk) or None, True = attend.

    Returns:
        (A, Nq, Dv); rows with nothing to attend to are 0.
    """
    length = query.shape[1]
    options = {"scale": scale, "dropout_p": dropout_p}
    bias = None if mask is None else mask_bias(mask, query.dtype)[:, None, None]
    if not is_causal:
        out = partial_attention(
            pad_to_blocks(query, min(length, _ROWS)), key[:, None], value[:, None], bias, **options
        ).out
        return out.flatten(1, 2)[:, :length]
    outs = []
    for start in range(0, length, _ROWS):
        end = min(start + _ROWS, length)
        rows = torch.arange(start, end, device=query.device)
        seen = torch.arange(end, device=query.device) <= rows[:, None]
        here = mask_bias(seen, query.dtype)[None, None]
        if bias is not None:
            here = here + bias[..., :end]
        piece = partial_attention(
            query[:, None, start:end], key[:, None, :end], value[:, None, :end], here, **options
        ).out
        outs.append(piece[:, 0])
    return torch.cat(outs, 1)


def exact_decode(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, scale: float, dropout_p: float = 0.0
) -> Tensor:
    """Causal attention of a few last queries to all keys: a step of decoding.

    Args:
        query: (B, H, Nq, D), the last Nq positions of key (B, H, Nk, D) and value (B, H, Nk, Dv).
        mask: bool (B, Nk) or None, True = attend.
    """
    length, columns = query.shape[2], key.shape[2]
    position = torch.arange(columns, device=query.device)
    pairs = (position <= position[columns - length :, None])[None]
    if mask is not None:
        pairs = (pairs & mask[:, None]).repeat_interleave(query.shape[1], 0)
    flat = [x.flatten(0, 1)[:, None] for x in (query, key, value)]
    out = partial_attention(*flat, mask_bias(pairs, query.dtype)[:, None], scale=scale, dropout_p=dropout_p).out
    return out[:, 0].unflatten(0, query.shape[:2])
