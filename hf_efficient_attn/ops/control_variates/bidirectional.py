"""EVA, bidirectional: a query sees its own window exactly, and one summary of each chunk of the other keys.

With more windows than landmarks a chunk is a group of 2**level windows. A query sees its own chunk in parts: its own
window, and for each i < level the sibling of its group of 2**i windows, which is the other half of its group of
2**(i + 1) windows. So it sees each key once.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.attend import attend, keeps_pairs
from hf_efficient_attn.ops.backends.devices import accumulation_dtype
from hf_efficient_attn.ops.control_variates.chunks import (
    ChunkOptions,
    Chunks,
    Maps,
    chunk_means,
    chunks_between,
    summarize,
)
from hf_efficient_attn.ops.index import ceil_div, integers, pad_to_blocks
from hf_efficient_attn.ops.slices import slice_size, sliced


class _QueryBlocks(NamedTuple):
    """The queries of each of S windows."""

    block_q: int  # the number of queries of a block
    order: Tensor | None  # int64 (S * block_q,), the queries of all blocks, or None if they are in order
    slot: Tensor | None  # int64 (Nq,), the place of each query in `order`, or None


class _Plan(NamedTuple):
    """What each of S windows sees."""

    window: int  # the number of keys of a window
    key_chunks: list[Chunks]  # the chunks, and then the groups of each level
    query_chunks: list[Chunks]  # the queries of each of them
    siblings: list[Tensor]  # int64 (S,) for each level, the group that a window sees
    # (1, S, 1, window + C + levels), 0 for a key, the log of the number of keys for a summary, -inf for what a window
    # does not see.
    bias: Tensor


def chunked_attention(query: Tensor, key: Tensor, value: Tensor, options: ChunkOptions) -> Tensor:
    """Compute the bidirectional form: (BH, Nq, D), (BH, Nk, D), (BH, Nk, Dv) -> (BH, Nq, Dv)."""
    query = query.to(key.dtype)  # FLuRKA contracts keys to another dtype
    batch_heads, q_len, dim = query.shape
    device = key.device
    plan = _plan(q_len, key.shape[1], options, accumulation_dtype(key.dtype), device)
    blocks = _query_blocks(q_len, key.shape[1], plan.window, device)

    def some_heads(query: Tensor, key: Tensor, value: Tensor, maps: Maps, noises: tuple[Tensor | None, ...]) -> Tensor:
        summaries = []
        for query_part, key_part, noise in zip(plan.query_chunks, plan.key_chunks, noises, strict=True):
            means = chunk_means(query_part.take(query), query_part.valid)  # (BH, C, D)
            tokens = key_part.take(key), key_part.take(value)  # (BH, C, P, D), (BH, C, P, Dv)
            summaries.append(summarize(means, tokens, key_part.valid, maps, noise, options.scale))
        mean_keys, betas = zip(*summaries, strict=True)
        queries = query if blocks.order is None else query.index_select(1, blocks.order)
        queries = pad_to_blocks(queries, blocks.block_q)  # (BH, S, block_q, D)
        keys = _seen(key, mean_keys, plan)  # (BH, S, window + C + levels, D)
        values = _seen(value, betas, plan)  # (BH, S, window + C + levels, Dv)
        bias = plan.bias.expand(len(queries), -1, -1, -1)
        # (BH, S * block_q, Dv)
        out = attend(queries, keys, values, bias, scale=options.scale, dropout_p=options.dropout_p).out.flatten(1, 2)
        return out[:, :q_len] if blocks.slot is None else out.index_select(1, blocks.slot)

    noises = tuple(options.noise(batch_heads, i, len(chunks.token)) for i, chunks in enumerate(plan.key_chunks))
    maps = options.maps_of(batch_heads)
    are_kept = keeps_pairs(query[:, None], key[:, None], plan.bias, options.scale, options.dropout_p)
    size = slice_size(plan.bias.numel() * max(dim, value.shape[2], blocks.block_q if are_kept else 0), device)
    return sliced(some_heads, query, key, value, maps, noises, size=size, draws=options.dropout_p > 0.0)


def _plan(q_len: int, kv_len: int, options: ChunkOptions, dtype: torch.dtype, device: torch.device) -> _Plan:
    """Cut keys and queries into chunks, and find the chunks that each window sees."""
    window = min(options.window_size, kv_len)
    num_windows = ceil_div(kv_len, window)
    level = 0
    while ceil_div(num_windows, 1 << level) > options.num_landmarks:
        level += 1
    parts = min(window, max(1, options.num_landmarks // num_windows))
    window_index = integers(num_windows, device)
    key_chunks = []
    query_chunks = []
    siblings = []
    seen = [window_index[:, None] * window + integers(window, device) < kv_len]  # (S, window)
    for size, in_parts in ((window << level, parts), *((window << i, 1) for i in range(level))):
        index = integers(ceil_div(kv_len, size) * in_parts, device)
        start, stop = (
            (index // in_parts * size + (index % in_parts + i) * size // in_parts).clamp(max=kv_len) for i in (0, 1)
        )
        most = ceil_div(size, in_parts)
        are_full = size % in_parts == kv_len % size == 0
        key_chunks.append(chunks_between(start, stop, most, kv_len, are_full))
        # Query i of m covers the positions from i n / m to (i + 1) n / m among n keys.
        first = start * q_len // kv_len
        last = (stop * q_len + kv_len - 1) // kv_len
        query_part = chunks_between(first, last, ceil_div(most * q_len, kv_len) + 1, q_len, are_full=False)
        query_chunks.append(key_chunks[-1] if q_len == kv_len else query_part)
        if len(key_chunks) == 1:
            seen.append((index // in_parts != window_index[:, None] >> level) * (stop - start))  # (S, C)
        else:
            sibling = (window_index * window // size) ^ 1
            siblings.append(sibling.clamp(max=len(index) - 1))
            seen.append((kv_len - sibling * size).clamp(0, size)[:, None])  # (S, 1)
    bias = torch.cat(seen, 1).to(dtype).log()[None, :, None]  # (1, S, 1, window + C + levels)
    return _Plan(window, key_chunks, query_chunks, siblings, bias)


def _query_blocks(q_len: int, kv_len: int, window: int, device: torch.device) -> _QueryBlocks:
    """Put queries in blocks, one for each window. Query i of m has position floor(i n / m) among n keys."""
    if q_len == kv_len:
        return _QueryBlocks(window, None, None)
    index = integers(q_len, device)
    block_q = window * q_len // kv_len + 1
    num_windows = ceil_div(kv_len, window)
    query_window = index * kv_len // q_len // window  # (Nq,)
    first = (integers(num_windows, device) * window * q_len + kv_len - 1) // kv_len  # (S,)
    slot = index - first[query_window] + query_window * block_q  # (Nq,)
    order = index.new_zeros(num_windows * block_q).scatter(0, slot, index)  # (S * block_q,)
    return _QueryBlocks(block_q, order, slot)


def _seen(x: Tensor, summaries: Sequence[Tensor], plan: _Plan) -> Tensor:
    """Put keys or values (BH, Nk, .) together that a window sees: its own, all chunks, and a group of each level.

    `summaries` (BH, C, .) are those of the chunks, and of the groups of each level. Returns (BH, S, window + C +
    levels, .) for S windows.
    """
    chunks, *levels = summaries
    near = pad_to_blocks(x, plan.window)  # (BH, S, window, .)
    far = chunks.unsqueeze(1).expand(-1, near.shape[1], -1, -1)  # (BH, S, C, .)
    groups = [x.index_select(1, i).unsqueeze(2) for x, i in zip(levels, plan.siblings, strict=True)]  # (BH, S, 1, .)
    return torch.cat((near, far, *groups), 2)
