"""Exact attention for the layers that keep it, with a (B, Nk) mask and without an N x N tensor."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_ROWS = 256


def exact_layer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
) -> Tensor:
    """softmax(scale * query key^T) value by torch's own kernel, bit for bit what `sdpa` gives where nothing is masked.

    Args:
        query: (B, H, Nq, D); key: (B, Hkv, Nk, D); value: (B, Hkv, Nk, Dv).
        mask: bool (B, Nk), True = attend; what stands in the other keys, NaN included, has no influence.
        is_causal: the queries are the last Nq positions of the keys.

    Returns:
        (B, H, Nq, Dv); rows with nothing to attend to are 0.
    """
    length, columns = query.shape[2], key.shape[2]
    options = {"scale": scale, "dropout_p": dropout_p}
    if key.shape[1] != query.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    is_causal = is_causal and length > 1
    if mask is None and (not is_causal or length == columns):
        return scaled_dot_product_attention(query, key, value, is_causal=is_causal, **options)
    if mask is None:
        mask = torch.ones(1, columns, dtype=torch.bool, device=query.device)
    hidden = ~mask[:, None, :, None]
    key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)
    if not is_causal:
        return _with_empty_rows(query, key, value, mask[:, None, None], options)
    outs, before = [], columns - length
    for start in range(0, length, _ROWS):
        rows = torch.arange(before + start, before + min(start + _ROWS, length), device=query.device)
        end = before + min(start + _ROWS, length)
        seen = (torch.arange(end, device=query.device) <= rows[:, None]) & mask[:, None, None, :end]
        outs.append(
            _with_empty_rows(query[:, :, start : start + _ROWS], key[:, :, :end], value[:, :, :end], seen, options)
        )
    return torch.cat(outs, 2)


def _with_empty_rows(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, options: dict) -> Tensor:
    """torch's attention under a bool mask (B, 1, Nq or 1, Nk); empty rows give 0, not NaN, in the gradient too."""
    empty = ~seen.any(-1, keepdim=True)
    # A row that sees nothing is let see everything (zeros, where all is padding) and its output then dropped.
    out = scaled_dot_product_attention(query, key, value, attn_mask=seen | empty, **options)
    return out.masked_fill(empty, 0.0)
