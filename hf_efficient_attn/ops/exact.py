"""Exact attention to all keys, to a sliding window and to global tokens, with memory linear in the sequence.

Queries are cut into blocks. In a window, each block attends to a view of the keys, and these views overlap.

A bias by distance, as in T5, is a table (H, 2R + 1): the bias of each head for the distances -R to R. A distance is the
position of the key minus the position of the query. Larger distances have the bias for -R or R. No (Nq, Nk) bias is
ever made, only the bias of some blocks of queries at a time.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from hf_efficient_attn.ops.attend import Partial, attend, keeps_pairs, merge
from hf_efficient_attn.ops.backends.devices import accumulation_dtype
from hf_efficient_attn.ops.index import ceil_div, count_blocks, pad_to_blocks, take
from hf_efficient_attn.ops.slices import slice_size, sliced
from hf_efficient_attn.ops.tracing import exporting_to_onnx

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
    """Compute softmax(scale * query key^T) value.

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
    batch_heads, q_len, head_dim = query.shape
    kv_len = key.shape[1]
    # PyTorch's causal kernel multiplies the -inf of later keys with the scale, which must therefore be positive.
    is_plain = key_mask is None and dropout_p == 0.0 and head_dim == value.shape[2] and scale > 0.0
    if is_causal and is_plain and query.dtype != torch.float64:
        # One kernel. There is none for float64 on an accelerator, where the plain form holds all pairs.
        query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale).squeeze(0)
    bias = None if key_mask is None else mask_bias(key_mask, query.dtype)[:, None, None]

    def attend_blocks(blocks: Tensor) -> Tensor:
        return attend(blocks, key[:, None], value[:, None], bias, scale=scale, dropout_p=dropout_p).out

    if not is_causal:
        blocks = pad_to_blocks(query, min(q_len, _BLOCK_Q))  # (BH, T, block_q, D)
        if not keeps_pairs(blocks, key[:, None], bias, scale, dropout_p):
            return attend_blocks(blocks).flatten(1, 2)[:, :q_len]  # (BH, Nq, Dv)
        size = slice_size(batch_heads * blocks.shape[2] * kv_len, query.device)
        return sliced(attend_blocks, blocks, size=size, dim=1, draws=dropout_p > 0.0).flatten(1, 2)[:, :q_len]
    query, key, value = (x.unsqueeze(1) for x in (query, key, value))
    return biased_exact(query, key, value, None, key_mask, is_causal=True, scale=scale, dropout_p=dropout_p).squeeze(1)


def bias_of(table: Tensor, distance: Tensor) -> Tensor:
    """Look up the bias of distances: table (H, 2R + 1), distance int64 (..., Nq, Nk) -> (H, ..., Nq, Nk)."""
    largest = (table.shape[1] - 1) // 2
    return table[:, distance.clamp(-largest, largest) + largest]


def bias_between(table: Tensor, query_position: Tensor, key_position: Tensor) -> Tensor:
    """Look up the bias of blocks, whose positions may differ between heads.

    Args:
        table: (BH, 2R + 1).
        query_position: int64 (BH or 1, T, Nq).
        key_position: int64 (BH or 1, T, Nk).

    Returns:
        (BH, T, Nq, Nk).
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
) -> Tensor:
    """Compute softmax(scale * query key^T + bias) value, some queries at a time.

    Args:
        query: (B, H, Nq, D).
        key: (B, H, Nk, D).
        value: (B, H, Nk, Dv).
        table: (H, 2R + 1), the bias, or None.
        key_mask: bool (B, Nk), True for valid keys, or None.
        is_causal: whether the queries are the last Nq positions and attend to the keys up to their own position.
            Otherwise query i is at position i.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        (B, H, Nq, Dv); 0 for queries without a key.
    """
    _, _, q_len, _ = query.shape
    kv_len = key.shape[2]
    device = query.device
    offset = kv_len - q_len if is_causal else 0
    table = None if table is None else table.to(accumulation_dtype(query.dtype))
    valid = None if key_mask is None else mask_bias(key_mask, query.dtype)[:, None, None]  # (B, 1, 1, Nk)
    outs = []
    for start in range(0, q_len, _BLOCK_Q):
        block = query[:, :, start : start + _BLOCK_Q]
        positions = torch.arange(start, start + block.shape[2], device=device)[:, None] + offset  # (block_q, 1)
        end = max(1, min(kv_len, offset + start + block.shape[2])) if is_causal else kv_len
        distance = torch.arange(end, device=device) - positions  # (block_q, Nk)
        bias = mask_bias(distance <= (0 if is_causal else kv_len), query.dtype)[None, None]
        bias = bias if table is None else bias + bias_of(table, distance)
        bias = bias if valid is None else bias + valid[..., :end]  # (B or 1, H or 1, block_q, Nk)
        if bias.shape[:2] != (1, 1):
            bias = bias.expand(*query.shape[:2], -1, -1).flatten(0, 1)[:, None]
        # The heads of a sequence take the place of the blocks of `attend`.
        rows, keys, values = (x.flatten(0, 1)[:, None] for x in (block, key[:, :, :end], value[:, :, :end]))
        out = attend(rows, keys, values, bias, scale=scale, dropout_p=dropout_p).out  # (BH, 1, block_q, Dv)
        outs.append(out[:, 0].unflatten(0, query.shape[:2]))  # (B, H, block_q, Dv)
    return torch.cat(outs, 2)


# The fewest and the most queries of a block: few, so that few keys of a block are outside the window of its queries.
_MIN_BLOCK_Q = 32
_MAX_BLOCK_Q = 64
# This many queries attend to the global tokens at a time.
_GLOBAL_BLOCK_Q = 128


class WindowCall(NamedTuple):
    """The keys that a query attends to, and the options of the attention.

    Attributes:
        window_size: keys on each side, in the causal form on the left only.
        num_global: the first valid tokens that attend to all tokens and that all tokens attend to.
        is_causal: whether a query attends to keys up to its own position only.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.
    """

    window_size: int
    num_global: int
    is_causal: bool
    scale: float
    dropout_p: float


def window_partial(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None = None,
    table: Tensor | None = None,
    *,
    left: int,
    right: int,
    skip: int = 0,
    scale: float,
    dropout_p: float = 0.0,
) -> Partial:
    """Compute attention of each query i to the keys i - left .. i + right.

    Args:
        query: (BH, N, D).
        key: (BH, N, D).
        value: (BH, N, Dv).
        key_mask: bool (1 or BH, N), True for valid keys, or None. (1, N) is cheaper, because each block has another
            bias if there is a mask.
        table: (BH, 2R + 1), the bias by distance (`hf_efficient_attn.ops.exact`), or None.
        left: keys before the query.
        right: keys after the query.
        skip: number of first keys that no query attends to.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        Partial of out (BH, N, Dv) and lse (BH, N).
    """
    length = query.shape[1]
    device = query.device
    exporting = exporting_to_onnx()
    # With a gradient blocks are larger, because the gradient of a key is summed over all blocks that contain it. With
    # dropout blocks are always larger: reentrant checkpointing first computes without a gradient, and must draw the
    # same.
    block_q = _MAX_BLOCK_Q if left + right >= 2 * _MAX_BLOCK_Q else _MIN_BLOCK_Q
    block_q *= 2 if dropout_p > 0.0 or (torch.is_grad_enabled() and key.requires_grad) else 1
    block_q = block_q if exporting else min(block_q, length)  # a graph must not depend on the length
    num_blocks = count_blocks(length, block_q)
    block_k = left + block_q + right
    after = right + num_blocks * block_q - length
    # (block_q, block_k)
    distance = torch.arange(block_k, device=device) - left - torch.arange(block_q, device=device)[:, None]
    in_window = mask_bias((distance >= -left) & (distance <= right), query.dtype)[None, None]
    if table is not None:
        in_window = in_window + bias_of(table.to(in_window.dtype), distance).unsqueeze(1)  # (BH, 1, block_q, block_k)
    valid = torch.ones(1, length, dtype=torch.bool, device=device) if key_mask is None else key_mask
    valid = valid & (torch.arange(length, device=device) >= skip)
    valid = pad(valid, (left, after)).unfold(1, block_k, block_q)  # (1 or BH, T, block_k)
    # Without a mask all blocks but those at both ends have the same bias.
    low = high = num_blocks
    if key_mask is None and not exporting:
        low = min(num_blocks, ceil_div(left + skip, block_q))
        high = max(low, num_blocks - ceil_div(after, block_q))
    blocks = pad_to_blocks(query, block_q)
    # (BH, T, block_k, .)
    keys, values = (pad(x, (0, 0, left, after)).unfold(1, block_k, block_q).transpose(2, 3) for x in (key, value))
    parts = []
    for first, last in ((0, low), (low, high), (high, num_blocks)):
        if first < last:
            is_inner = low < high and first == low
            bias = in_window if is_inner else in_window + mask_bias(valid[:, first:last, None], query.dtype)
            own, own_keys, own_values = (
                x if last - first == num_blocks else x[:, first:last] for x in (blocks, keys, values)
            )
            parts.append(attend(own, own_keys, own_values, bias, scale=scale, dropout_p=dropout_p))
    out, lse = (torch.cat(x, 1) if len(parts) > 1 else x[0] for x in zip(*parts, strict=True))
    return Partial(out.flatten(1, 2)[:, :length], lse.flatten(1, 2)[:, :length])


def window_attention(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, table: Tensor | None, call: WindowCall
) -> Tensor:
    """Compute attention to the window and to the global tokens.

    Args:
        query: (B, H, N, D).
        key: (B, H, N, D).
        value: (B, H, N, Dv).
        key_mask: bool (B, N), True for valid keys, or None.
        table: (H, 2R + 1), the bias by distance, or None; without global tokens only.
        call: which keys a query attends to.

    Returns:
        (B, H, N, Dv).
    """
    batch, num_heads, length, head_dim = query.shape
    drops = call.dropout_p > 0.0
    # In the backward pass a slice holds the gradients of the keys of all its blocks. Plain products hold all pairs.
    bias_of_pairs = query.new_empty(1, 1, 2, 1)
    pairs = table is not None or keeps_pairs(query, key, bias_of_pairs, call.scale, call.dropout_p)
    numel = max(2 * (head_dim + value.shape[3]), 2 * (call.window_size + _MAX_BLOCK_Q) if pairs else 0)
    size = slice_size(length * numel, query.device)
    recompute = drops or table is not None

    def of_mask(mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor, table: Tensor | None) -> Tensor:
        form = functools.partial(_window_and_global, call, mask)
        return sliced(form, query, key, value, table, size=size, draws=drops, recompute=recompute)

    if key_mask is None or exporting_to_onnx():
        mask = None if key_mask is None else key_mask.repeat_interleave(num_heads, 0)
        query, key, value = (x.flatten(0, 1) for x in (query, key, value))  # (BH, N, .)
        out = of_mask(mask, query, key, value, None if table is None else table.repeat(batch, 1))
        unflat: Tensor = out.unflatten(0, (batch, num_heads))  # (B, H, N, Dv)
        return unflat
    # With a mask each block has its own bias. This computes one sequence at a time, so that all heads share the bias.
    rows = zip(key_mask.split(1), query, key, value, strict=True)
    return torch.stack([of_mask(*row, table) for row in rows])


def _window_and_global(
    call: WindowCall, mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor, table: Tensor | None
) -> Tensor:
    """Compute the attention of (BH, N, D) inputs with a mask (1 or BH, N): (BH, N, Dv)."""
    left, num_global, is_causal, scale, dropout_p = call
    block_q = _GLOBAL_BLOCK_Q
    length = query.shape[1]
    device = query.device
    if not exporting_to_onnx():
        num_global = min(num_global, length)
        left = min(left, length - 1)
        block_q = min(block_q, length)
    right = 0 if is_causal else left
    if not num_global:
        return window_partial(
            query, key, value, mask, table, left=left, right=right, scale=scale, dropout_p=dropout_p
        ).out
    # `index` (1 or BH, G): positions of the first G valid tokens. If there are fewer, `valid` is False at the others.
    position = torch.arange(length, device=device)  # (N,)
    if mask is None:
        index = position[None, :num_global]
        skipped = num_global
        local_mask = None
        valid = torch.ones_like(index, dtype=torch.bool)
    else:
        index = torch.where(mask, length - position, -position).topk(num_global, dim=1).indices
        valid = mask.gather(1, index)
        skipped = 0
        local_mask = mask & (mask.cumsum(1) > num_global)
    near = window_partial(
        query, key, value, local_mask, left=left, right=right, skip=skipped, scale=scale, dropout_p=dropout_p
    )
    # All tokens attend to the global tokens. In the causal form only later tokens do; because of padding between the
    # tokens any token may come before a global one.
    allowed = valid[:, None].expand(-1, length, -1)
    if is_causal:
        allowed = allowed & (index[:, None] <= position[:, None])  # (1 or BH, N, G)
    index_per_head = index.expand(query.shape[0], -1)  # (BH, G)
    blocks = pad_to_blocks(query, block_q)
    bias = pad_to_blocks(mask_bias(allowed, query.dtype), blocks.shape[2])
    global_keys, global_values = (take(x, index_per_head)[:, None] for x in (key, value))  # (BH, 1, G, .)
    far = attend(blocks, global_keys, global_values, bias, scale=scale, dropout_p=dropout_p)
    far = Partial(far.out.flatten(1, 2)[:, :length], far.lse.flatten(1, 2)[:, :length])  # (BH, N, Dv), (BH, N)
    local_out = merge(near, far).out  # (BH, N, Dv)
    # The global tokens attend to all tokens. These outputs replace their outputs in the window.
    allowed = torch.ones(1, length, dtype=torch.bool, device=device) if mask is None else mask
    allowed = allowed[:, None].expand(-1, num_global, -1)
    if is_causal:
        allowed = allowed & (position <= index[:, :, None])  # (1 or BH, G, N)
    global_queries = take(query, index_per_head)[:, None]
    bias = mask_bias(allowed, query.dtype)[:, None]
    of_global = attend(global_queries, key[:, None], value[:, None], bias, scale=scale, dropout_p=dropout_p).out[:, 0]
    is_global = torch.zeros(index.shape[0], length, dtype=torch.bool, device=device)  # (1 or BH, N)
    is_global = is_global.scatter(1, index, valid)
    # (BH, N, Dv), with the outputs of global tokens at their positions
    spread = local_out.scatter(1, index_per_head[:, :, None].expand_as(of_global), of_global)
    return torch.where(is_global[:, :, None], spread, local_out)


def window_bias(q_len: int, key_mask: Tensor, table: Tensor | None, call: WindowCall, dtype: torch.dtype) -> Tensor:
    """Compute the bias of the scores of the last Nq positions for all keys (B, Nk): (B, H or 1, Nq, Nk).

    It is -inf for a pair that is not in the window and has no global token. All other pairs have the bias by distance.
    """
    kv_len = key_mask.shape[1]
    position = torch.arange(kv_len, device=key_mask.device)
    distance = position - position[kv_len - q_len :, None]  # (Nq, Nk)
    is_global = key_mask & (key_mask.cumsum(1) <= call.num_global)  # (B, Nk)
    pairs = (distance.abs() <= call.window_size) | is_global[:, None] | is_global[:, kv_len - q_len :, None]
    pairs = pairs & key_mask[:, None]  # (B, Nq, Nk)
    bias = mask_bias(pairs & (distance <= 0) if call.is_causal else pairs, dtype)[:, None]
    return bias if table is None else bias + bias_of(table.to(bias.dtype), distance)


def dense_softmax(scores: Tensor, value: Tensor, key_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """Compute attention from scores (..., Nq, Nk), values (..., Nk, Dv), mask (..., Nk); 0 for a query without keys."""
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)  # (Nq, Nk)
        scores = scores.masked_fill(future, -torch.inf)
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask.unsqueeze(-2), -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ value.double()).to(value.dtype)
