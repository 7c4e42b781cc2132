"""A sliding window over the positions, in tiles of queries over overlapping views of the keys."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.blocks import ceil_div, pad_to_blocks
from hf_efficient_attn.ops.exact import key_bias
from hf_efficient_attn.ops.partial import Partial, attend

# Queries a tile: few, so that little of a tile's run of keys lies outside the window of its queries; more where a
# gradient is wanted, which is added up over all tiles that see a key.
_ROWS, _ROWS_WITH_GRADIENT = 32, 128


def window_partial(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    left: int,
    right: int,
    hidden: int = 0,
    scale: float,
    dropout_p: float = 0.0,
) -> Partial:
    """Each query i to the keys i-left .. i+right, without the first `hidden` positions.

    Args:
        query, key: (A, N, D); value: (A, N, Dv).
        mask: bool (N,) or None, True = attend; the same for all A.

    Returns:
        Partial of out (A, N, Dv) and lse (A, N).
    """
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    length = query.shape[1]
    rows = min(_ROWS_WITH_GRADIENT if keep else _ROWS, length)
    tiles, span = ceil_div(length, rows), left + rows + right
    blocks = pad_to_blocks(query, rows)
    views = []
    for x in (key, value):
        padded = pad(x, (0, 0, left, right + tiles * rows - length))
        views.append(padded.unfold(1, span, rows).transpose(2, 3))
    there = torch.ones(length, dtype=torch.bool, device=query.device) if mask is None else mask
    there = there & (torch.arange(length, device=query.device) >= hidden)
    there = pad(there, (left, right + tiles * rows - length)).unfold(0, span, rows)
    distance = torch.arange(span, device=query.device) - left - torch.arange(rows, device=query.device)[:, None]
    band = (distance >= -left) & (distance <= right)
    # Without a mask all tiles but those at the two ends have the same bias, which then stays in the cache.
    low = tiles if mask is not None else min(tiles, ceil_div(left + hidden, rows))
    high = max(low, tiles - ceil_div(right + tiles * rows - length, rows))
    parts = []
    for first, last in ((0, low), (low, high), (high, tiles)):
        if first < last:
            allowed = band[None] if (first, last) == (low, high) else band & there[first:last, None]
            bias = key_bias(allowed, query.dtype)[None]
            pieces = (x[:, first:last] for x in (blocks, *views))
            parts.append(attend(*pieces, bias, scale=scale, dropout_p=dropout_p))
    out = torch.cat([p.out for p in parts], 1) if len(parts) > 1 else parts[0].out
    lse = torch.cat([p.lse for p in parts], 1) if len(parts) > 1 else parts[0].lse
    return Partial(out.flatten(1, 2)[:, :length], lse.flatten(1, 2)[:, :length])
