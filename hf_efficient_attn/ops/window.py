"""A sliding window over the positions, in tiles of queries over overlapping views of the keys."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.blocks import can_reuse_buffers, ceil_div, pad_to_blocks
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.partial import LOG2_E, Partial, accumulation_dtype, partial_attention, safe_row_max

# Queries a tile: few, so that little of a tile's run of keys lies outside the window of its queries; more where a
# gradient is wanted, which is added up over all tiles that see a key.
_ROWS, _ROWS_WITH_GRADIENT = 64, 128
# Scores at a time where tiles are walked over: 4 MiB float32.
_SCORES = 1 << 20


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
    out: Tensor | None = None,
) -> Partial:
    """Each query i to the keys i-left .. i+right, without the first `hidden` positions.

    Args:
        query, key: (A, N, D); value: (A, N, Dv).
        mask: bool (N,) or None, True = attend; the same for all A.
        out: (A, N, Dv), contiguous, memory that the result may take, or None.

    Returns:
        Partial of out (A, N, Dv) and lse (A, N).
    """
    length, walk = query.shape[1], not dropout_p and can_reuse_buffers(query, key, value)
    rows = min(_ROWS if walk else _ROWS_WITH_GRADIENT, length)
    tiles, span = ceil_div(length, rows), left + rows + right
    there = torch.ones(length, dtype=torch.bool, device=query.device) if mask is None else mask
    there = there & (torch.arange(length, device=query.device) >= hidden)
    there = pad(there, (left, right + tiles * rows - length)).unfold(0, span, rows)
    distance = torch.arange(span, device=query.device) - left - torch.arange(rows, device=query.device)[:, None]
    band = (distance >= -left) & (distance <= right)
    # Without a mask all tiles but those at the two ends have the same bias, which then stays in the cache.
    low = tiles if mask is not None else min(tiles, ceil_div(left + hidden, rows))
    high = max(low, tiles - ceil_div(right + tiles * rows - length, rows))
    if walk:
        return _walk(query, key, value, band, there, (low, high), left, right, scale, out)
    blocks = pad_to_blocks(query, rows)
    views = [_runs(x, tiles, rows, left, right) for x in (key, value)]
    parts = []
    for first, last in ((0, low), (low, high), (high, tiles)):
        if first < last:
            allowed = band[None] if (first, last) == (low, high) else band & there[first:last, None]
            bias = mask_bias(allowed, query.dtype)[None]
            pieces = (x[:, first:last] for x in (blocks, *views))
            parts.append(partial_attention(*pieces, bias, scale=scale, dropout_p=dropout_p))
    out = torch.cat([p.out for p in parts], 1) if len(parts) > 1 else parts[0].out
    lse = torch.cat([p.lse for p in parts], 1) if len(parts) > 1 else parts[0].lse
    return Partial(out.flatten(1, 2)[:, :length], lse.flatten(1, 2)[:, :length])


def _runs(x: Tensor, tiles: int, rows: int, left: int, right: int) -> Tensor:
    """Overlapping views of the keys of each tile: (A, N, D) -> (A, T, left + rows + right, D), 0 beyond the ends."""
    padded = pad(x, (0, 0, left, right + tiles * rows - x.shape[1]))
    return padded.unfold(1, left + rows + right, rows).transpose(2, 3)


def _walk(query, key, value, band, there, inner: tuple[int, int], left, right, scale: float, out) -> Partial:
    """`window_partial` without gradient or dropout: tile by tile in one buffer of scores.

    Whole products of 64 rows are faster than the fused kernel's on so few.

    Args:
        band: bool (rows, span), the pairs of a tile within the window. there: bool (T, span), the keys that are there.
        inner: the tiles from and up to which all keys of a run are.
    """
    (heads, length, _), (rows, span), wide = query.shape, band.shape, accumulation_dtype(query.dtype)
    tiles = there.shape[0]
    # In powers of two: see `exp_`.
    queries = pad_to_blocks(query.to(wide) * (scale * LOG2_E), rows)
    keys, values = (_runs(x.to(wide), tiles, rows, left, right) for x in (key, value))
    if out is None or out.dtype != wide or length != tiles * rows:
        got = queries.new_empty(heads, tiles, rows, value.shape[2])
    else:
        got = out.view(heads, tiles, rows, value.shape[2])
    lse = queries.new_empty(heads, tiles, rows)
    outside, absent = mask_bias(band, wide), mask_bias(there, wide).unsqueeze(1)
    step = max(1, _SCORES // (rows * span))
    buffer = queries.new_empty(min(step, tiles), rows, span)
    for a in range(heads):
        for at in range(0, tiles, step):
            here = slice(at, min(at + step, tiles))
            scores = torch.bmm(queries[a, here], keys[a, here].transpose(1, 2), out=buffer[: here.stop - at])
            scores += outside
            if at < inner[0] or here.stop > inner[1]:
                scores += absent[here]
            top = safe_row_max(scores.amax(2, keepdim=True))
            total = scores.sub_(top).exp2_().sum(2, keepdim=True)
            lse[a, here] = (total.log2() + top).squeeze(2)
            torch.bmm(scores, values[a, here], out=got[a, here]).div_(total.masked_fill_(total == 0, 1.0))
    return Partial(got.flatten(1, 2)[:, :length].to(value.dtype), lse.mul_(1.0 / LOG2_E).flatten(1)[:, :length])
