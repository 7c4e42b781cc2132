"""A sliding window and global tokens, exactly, with memory linear in the sequence.

Queries are cut into blocks. Each block attends to a view of the keys, and these views overlap.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.attend import (
    BlockKeys,
    Partial,
    attend,
    block_attention,
    keeps_pairs,
    merge,
    output_of,
    takes_blocks,
)
from hf_efficient_attn.ops.exact import bias_of, mask_bias
from hf_efficient_attn.ops.index import ceil_div, count_blocks, pad_to_blocks, take
from hf_efficient_attn.ops.slices import slice_size, sliced
from hf_efficient_attn.ops.tracing import exporting_to_onnx

# The fewest and the most queries of a block: few, so that few keys of a block are outside the window of its queries.
_MIN_BLOCK_Q = 32
_MAX_BLOCK_Q = 64
# This many queries attend to the global tokens at a time.
_GLOBAL_BLOCK_Q = 128


def _window_block(window_size: int, dropout_p: float, key: Tensor) -> int:
    """Choose the number of queries of a block in a window of `window_size` keys on both sides together."""
    block_q = _MAX_BLOCK_Q if window_size >= 2 * _MAX_BLOCK_Q else _MIN_BLOCK_Q
    # With a gradient blocks are larger, because the gradient of a key is summed over all blocks that contain it. With
    # dropout blocks are always larger: reentrant checkpointing first computes without a gradient, and must draw the
    # same.
    is_larger = dropout_p > 0.0 or (torch.is_grad_enabled() and key.requires_grad)
    return 2 * block_q if is_larger else block_q


class WindowCall(NamedTuple):
    """The keys that a query attends to, and the options of the attention."""

    window_size: int  # keys on each side, in the causal form on the left only
    num_global: int  # the first valid tokens that attend to all tokens and that all tokens attend to
    is_causal: bool  # whether a query attends to keys up to its own position only
    scale: float  # factor of the scores
    dropout_p: float  # probability of dropping a weight
    with_lse: bool = False  # whether to return the lse as well (`output_of`)


def window_partial(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None = None,
    table: Tensor | None = None,
    *,
    left: int,
    right: int,
    scale: float,
    dropout_p: float = 0.0,
) -> Partial:
    """Compute attention of each query i to the keys i - left .. i + right: out (BH, N, Dv) and lse (BH, N).

    The key mask may be (1, N) for all heads. That is cheaper, because each block has another bias if there is a mask.
    `table`, (BH, 2R + 1) or None, is the bias by distance (`hf_efficient_attn.ops.exact`).
    """
    length = query.shape[1]
    device = query.device
    exporting = exporting_to_onnx()
    if table is None and not exporting:
        block_keys = BlockKeys(length, window=(left, right), key_mask=key_mask)
        found = block_attention(query, key, value, block_keys, scale=scale, dropout_p=dropout_p)
        if found is not None:
            return found
    block_q = _window_block(left + right, dropout_p, key)
    block_q = block_q if exporting else min(block_q, length)  # a graph must not depend on the length
    num_blocks = count_blocks(length, block_q)
    block_k = left + block_q + right
    after = right + num_blocks * block_q - length
    # (block_q, block_k)
    distance = torch.arange(block_k, device=device) - left - torch.arange(block_q, device=device)[:, None]
    in_window = mask_bias((distance >= -left) & (distance <= right), query.dtype)[None, None]
    if table is None or (table.dtype == query.dtype and not table.requires_grad):
        in_window = in_window.to(query.dtype)  # exact
    if table is not None:
        in_window = in_window + bias_of(table.to(in_window.dtype), distance).unsqueeze(1)  # (BH, 1, block_q, block_k)
    valid = torch.ones(1, length, dtype=torch.bool, device=device) if key_mask is None else key_mask
    valid = pad(valid, (left, after)).unfold(1, block_k, block_q)  # (1 or BH, T, block_k)
    # Without a mask all blocks but those at both ends have the same bias.
    low = high = num_blocks
    if key_mask is None and not exporting:
        low = min(num_blocks, ceil_div(left, block_q))
        high = max(low, num_blocks - ceil_div(after, block_q))
    blocks = pad_to_blocks(query, block_q)  # (BH, T, block_q, D)
    # (BH, T, block_k, .)
    keys, values = (pad(x, (0, 0, left, after)).unfold(1, block_k, block_q).transpose(2, 3) for x in (key, value))
    parts = []
    for first, last in ((0, low), (low, high), (high, num_blocks)):
        if first < last:
            is_inner = low < high and first == low
            bias = in_window
            if not is_inner:
                bias = bias + mask_bias(valid[:, first:last, None], query.dtype).to(bias.dtype)
            own, own_keys, own_values = (
                x if last - first == num_blocks else x[:, first:last] for x in (blocks, keys, values)
            )
            parts.append(attend(own, own_keys, own_values, bias, scale=scale, dropout_p=dropout_p))
    # (BH, T, block_q, Dv), (BH, T, block_q)
    out, lse = (torch.cat(x, 1) if len(parts) > 1 else x[0] for x in zip(*parts, strict=True))
    return Partial(out.flatten(1, 2)[:, :length], lse.flatten(1, 2)[:, :length])


def window_attention(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, table: Tensor | None, call: WindowCall
) -> Tensor:
    """Compute attention to the window and to the global tokens.

    Takes query (B, H, N, D), key (B, H, N, D), value (B, H, N, Dv), a mask, bool (B, N) or None, and a bias by
    distance, (H, 2R + 1) or None, without global tokens only. Returns (B, H, N, Dv or Dv + 1).
    """
    batch, num_heads, length, head_dim = query.shape
    drops = call.dropout_p > 0.0
    whole = False
    if table is None and not exporting_to_onnx():
        keys = _block_keys(call, None if key_mask is None else key_mask[:1], num_heads, length, key.device)
        whole = takes_blocks(query[0], key[0], value[0], keys, call.dropout_p)
    # In the backward pass a slice holds the gradients of the keys of all its blocks. Plain products hold all pairs.
    bias_of_pairs = query.new_empty(1, 1, 2, 1, requires_grad=table is not None and table.requires_grad)
    pairs = keeps_pairs(query, key, bias_of_pairs, call.scale, call.dropout_p)
    numel = max(2 * (head_dim + value.shape[3]), 2 * (call.window_size + _MAX_BLOCK_Q) if pairs else 0)
    size = batch * num_heads if whole else slice_size(length * numel, query.device)
    recompute = not whole and (drops or pairs)

    def of_mask(mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor, table: Tensor | None) -> Tensor:
        form = functools.partial(_window_and_global, call, mask)
        return sliced(form, query, key, value, table, size=size, draws=drops, recompute=recompute)

    if key_mask is None or whole or exporting_to_onnx():
        mask = None if key_mask is None else key_mask.repeat_interleave(num_heads, 0)  # (BH, N)
        query, key, value = (x.flatten(0, 1) for x in (query, key, value))  # (BH, N, .)
        out = of_mask(mask, query, key, value, None if table is None else table.repeat(batch, 1))
        return torch.unflatten(out, 0, (batch, num_heads))  # (B, H, N, Dv)
    # With a mask each block has its own bias. This computes one sequence at a time, so that all heads share the bias.
    rows = zip(key_mask.split(1), query, key, value, strict=True)
    return torch.stack([of_mask(*row, table) for row in rows])


def _block_keys(
    call: WindowCall, mask: Tensor | None, batch_heads: int, length: int, device: torch.device
) -> BlockKeys:
    """Return the keys of all queries for a mask (1 or BH, N): the window, and the global tokens as a list."""
    left = min(call.window_size, length)
    right = 0 if call.is_causal else left
    keys = BlockKeys(length, window=(left, right), key_mask=mask, is_causal=call.is_causal)
    if not call.num_global:
        return keys
    tokens = _first_valid(mask, min(call.num_global, length), length, device)
    log_weight = mask_bias(tokens.valid, torch.float32)
    # (BH, 1, G) each: all queries are one block
    listed, log_weight = (x.expand(batch_heads, -1).unsqueeze(1) for x in (tokens.positions, log_weight))
    return keys._replace(listed=listed, log_weight=log_weight)


def _window_and_global(
    call: WindowCall, mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor, table: Tensor | None
) -> Tensor:
    """Compute the attention of (BH, N, D) inputs with a mask (1 or BH, N): (BH, N, Dv)."""
    left, num_global, is_causal, scale, dropout_p, with_lse = call
    length = query.shape[1]
    if not exporting_to_onnx():
        num_global = min(num_global, length)
        left = min(left, length - 1)
    right = 0 if is_causal else left
    window = functools.partial(window_partial, left=left, right=right, scale=scale, dropout_p=dropout_p)
    if not num_global:
        return output_of(window(query, key, value, mask, table), with_lse)
    tokens = _first_valid(mask, num_global, length, query.device)
    # The global tokens attend to all tokens. These outputs replace their outputs in the window.
    of_global = output_of(_attention_of_global(query, key, value, mask, tokens, call), with_lse)[:, 0]  # (BH, G, Dv)
    if mask is None and num_global == length:
        return of_global
    found = None
    if not exporting_to_onnx():
        keys = _block_keys(call, mask, len(query), length, query.device)
        found = block_attention(query, key, value, keys, scale=scale, dropout_p=dropout_p)
    first = num_global if mask is None else 0  # the first tokens are the global ones
    if found is None:
        own = query[:, first:], key[:, first:], value[:, first:]
        found = merge(window(*own, tokens.local_mask), _attention_to_global(own[0], key, value, tokens, mask, call))
    elif first:
        found = Partial(found.out[:, first:], found.lse[:, first:])
    out = output_of(found, with_lse)
    if mask is None:
        return torch.cat((of_global, out), 1)
    is_global = torch.zeros_like(mask).scatter(1, tokens.positions, tokens.valid)  # (1 or BH, N)
    spread = out.scatter(1, tokens.positions[:, :, None].expand_as(of_global), of_global)  # (BH, N, Dv)
    return torch.where(is_global[:, :, None], spread, out)


def _attention_to_global(
    query: Tensor, key: Tensor, value: Tensor, tokens: "_GlobalTokens", mask: Tensor | None, call: WindowCall
) -> Partial:
    """Compute attention of (BH, N, D) queries to the global tokens: out (BH, N, Dv) and lse (BH, N).

    Without a mask the queries come after all global tokens. In the causal form with a mask only later tokens attend to
    a global one, and because of padding between the tokens any token may come before it.
    """
    length = query.shape[1]
    blocks = pad_to_blocks(query, _GLOBAL_BLOCK_Q if exporting_to_onnx() else min(_GLOBAL_BLOCK_Q, length))
    bias = None
    if mask is not None and not call.is_causal:
        bias = mask_bias(tokens.valid, query.dtype)[:, None, None]  # (1 or BH, 1, 1, G)
    elif mask is not None:
        position = torch.arange(length, device=query.device)
        allowed = tokens.valid[:, None] & (tokens.positions[:, None] <= position[:, None])  # (1 or BH, N, G)
        bias = pad_to_blocks(mask_bias(allowed, query.dtype), blocks.shape[2])  # (1 or BH, T, block_q, G)
    index = tokens.positions.expand(query.shape[0], -1)  # (BH, G)
    keys, values = (take(x, index)[:, None] for x in (key, value))  # (BH, 1, G, .)
    # (BH, T, block_q, Dv), (BH, T, block_q)
    out, lse = attend(blocks, keys, values, bias, scale=call.scale, dropout_p=call.dropout_p)
    return Partial(out.flatten(1, 2)[:, :length], lse.flatten(1, 2)[:, :length])


def _attention_of_global(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, tokens: "_GlobalTokens", call: WindowCall
) -> Partial:
    """Compute attention of the global tokens to all tokens (BH, N, .): out (BH, 1, G, Dv) and lse (BH, 1, G)."""
    bias = None if mask is None else mask_bias(mask, query.dtype)[:, None, None]  # (1 or BH, 1, 1, N)
    if call.is_causal:
        position = torch.arange(query.shape[1], device=query.device)
        earlier = position <= tokens.positions[:, None, :, None]  # (1 or BH, 1, G, N)
        bias = mask_bias(earlier, query.dtype) if bias is None else bias.masked_fill(~earlier, -torch.inf)
    rows = take(query, tokens.positions.expand(query.shape[0], -1))[:, None]  # (BH, 1, G, D)
    return attend(rows, key[:, None], value[:, None], bias, scale=call.scale, dropout_p=call.dropout_p)


class _GlobalTokens(NamedTuple):
    """The first G valid tokens, and what is left for the window."""

    positions: Tensor  # int64 (1 or BH, G), the positions of the global tokens
    valid: Tensor  # bool (1 or BH, G), False if there are fewer valid tokens
    local_mask: Tensor | None  # bool (1 or BH, N), the other valid tokens, or None without padding


def _first_valid(mask: Tensor | None, count: int, length: int, device: torch.device) -> _GlobalTokens:
    """Find the first `count` valid tokens of a mask (1 or BH, N)."""
    position = torch.arange(length, device=device)  # (N,)
    if mask is None:
        index = position[None, :count]
        return _GlobalTokens(index, torch.ones_like(index, dtype=torch.bool), None)
    index = torch.where(mask, length - position, -position).topk(count, dim=1).indices  # (1 or BH, G)
    return _GlobalTokens(index, mask.gather(1, index), mask & (mask.cumsum(1) > count))


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
    bias = mask_bias(pairs & (distance <= 0) if call.is_causal else pairs, dtype)[:, None]  # (B, 1, Nq, Nk)
    return bias if table is None else bias + bias_of(table.to(bias.dtype), distance)  # (B, 1 or H, Nq, Nk)
