"""EVA on an accelerator in few operations, where rows have different numbers of keys, or queries are other tokens.

The computation is that of `hf_efficient_attn.ops.chunk_summaries`, for no more windows than landmarks, so that every
chunk is a part of a window. Three things save operations:

- Keys stay where they are. An index says which key is the r-th valid one, and every gather is composed with it. What
  is not in a chunk or is not seen is the index of one more key, "nothing", with value 0 and no weight.
- What depends only on the number of windows that a row has, or on the number of keys of a chunk, is in tables that are
  made once.
- Mean queries of chunks are one product with the matrix of which query is in which chunk.

Shapes: n of Nk keys and m of Nq queries are valid, S blocks have block_q queries each, and R is B, or 1 without a mask.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.bias_columns import padded_dim
from hf_efficient_attn.ops.blocks import ceil_div
from hf_efficient_attn.ops.chunk_summaries import Heads
from hf_efficient_attn.ops.chunk_windows import WindowSizes
from hf_efficient_attn.ops.constants import constant, integers
from hf_efficient_attn.ops.fused_attention import bias_columns, column_unit
from hf_efficient_attn.ops.gather import GatheredKeys, gathered_attention
from hf_efficient_attn.ops.partial import accumulation_dtype, partial_attention

# i n for a masked query i: behind all keys, for up to 2**30 of them.
_BEHIND = 1 << 61
# The logarithm of a weight of 0 in any dtype.
_NO_WEIGHT = -1e4


class Masks(NamedTuple):
    """Which keys and queries count: bool (B, Nk) and (B, Nq), or None if all do.

    `same_tokens` tells whether the queries are the keys' own tokens. Then both masks are the same.
    """

    keys: Tensor | None
    queries: Tensor | None
    same_tokens: bool


class _Chunks(NamedTuple):
    """The valid keys by rank, and the chunks.

    Attributes:
        order: int64 (R, T * W or more), the position of the key of each rank, and Nk after the last one.
        rank: int64 (R, Nk), the number of valid keys up to each position.
        num_keys: int64 (R, 1), n.
        edges: int64 (R, C + 1), the rank of the first key of each chunk, and that after the last key of the last one.
        window: int64 (R, C), the window of each chunk.
        token: int64 (R, C * P), the positions of its keys, and Nk where it has fewer than P.
        unused: bool (R, C, P), where it has fewer.
    """

    order: Tensor
    rank: Tensor
    num_keys: Tensor
    edges: Tensor
    window: Tensor
    token: Tensor
    unused: Tensor


class _Blocks(NamedTuple):
    """Blocks of queries of one window each.

    Attributes:
        query: int64 (R, S * block_q), the query in each slot; some other query in slots that are not used.
        window: int64 (R, S), the window of each block.
        slot: int64 (R, Nq), the slot of each valid query.
        not_in_chunk: bool (R, C, Nq), which queries the mean of a chunk does not contain.
        block_q: queries of a block.
    """

    query: Tensor
    window: Tensor
    slot: Tensor
    not_in_chunk: Tensor
    block_q: int


def ragged_window_attention(
    heads: Heads, masks: Masks, noise: Tensor | None, *, sizes: WindowSizes, scale: float, dropout_p: float
) -> Tensor:
    """The bidirectional form: (B, H, Nq, Dv), 0 for masked queries.

    Args:
        heads: query (B, H, Nq, D), key (B, H, Nk, D), value (B, H, Nk, Dv), and the maps (H, D, D) or None.
        masks: which keys and queries count.
        noise: (H, C, D), standard normal, or None.
        sizes: the sizes of windows and chunks, with level 0.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.
    """
    query, key, value = heads[:3]
    (batch, num_heads, q_len, head_dim), value_dim = query.shape, value.shape[3]
    by_columns = backend(query) == "library" and scale != 0.0
    dim = padded_dim(head_dim, value_dim, 2) if by_columns else None
    query = query.to(key.dtype)
    masked_query = None if masks.queries is None else ~masks.queries[:, None, :, None]
    query = query if masked_query is None else query.masked_fill(masked_query, 0.0)
    chunks = _chunks(masks.keys, sizes, key.device)

    # One row for each key, and one for nothing: [key, columns, value], each padded to `dim` by columns.
    rows = _beside(key, value, dim)
    nothing = constant(_nothing, head_dim, value_dim, dim, key.dtype, scale, device=key.device)
    rows = torch.cat((rows, nothing.expand(batch, num_heads, 1, -1)), 2)
    tokens = _take(rows, chunks.token).to(accumulation_dtype(key.dtype)).unflatten(2, chunks.unused.shape[1:])
    tokens = tokens[..., :head_dim], tokens[..., -value_dim if dim is None else dim :][..., :value_dim]
    numbers = constant(_numbers, tokens[0].shape[3], head_dim, dim, key.dtype, scale, device=key.device)
    numbers = torch.embedding(numbers, chunks.edges.diff(dim=1))[:, None]  # (R, 1, C, .)
    share, log_count = numbers[..., :1], numbers[:, 0, :, 1]
    mean_key = tokens[0].sum(3) * share
    if masks.same_tokens:
        query = pad(query, (0, 0, 0, 1))
        mean_query = _take(query, chunks.token).unflatten(2, chunks.unused.shape[1:])
        mean_query = mean_query.sum(3, dtype=mean_key.dtype) * share
        blocks, slot, block_q = chunks.order[:, : sizes.num_windows * sizes.window], chunks.rank - 1, sizes.window
        slot = slot.clamp(min=0)
        near = blocks.unflatten(1, (-1, sizes.window))
        window = integers(sizes.num_windows, key.device)[None]
    else:
        blocks, window, slot, not_in_chunk, block_q = _blocks(chunks, masks.queries, sizes, q_len)
        # The mean of the queries: equal weights by a softmax, which is defined for a chunk without queries, too.
        weights = constant(_zero, query.dtype, device=key.device).expand(not_in_chunk.shape)
        mean_query = weights.masked_fill(not_in_chunk, _NO_WEIGHT).softmax(2)[:, None] @ query
        near = chunks.order[:, : sizes.num_windows * sizes.window].unflatten(1, (-1, sizes.window))
        near = near.gather(1, window[:, :, None].expand(-1, -1, sizes.window))
    beta = _beta(tokens, (mean_query, mean_key), chunks.unused, heads, noise, scale)

    # A block sees the keys of its window, and the chunks of other windows.
    own = chunks.window[:, None] == window[:, :, None]
    far = integers(sizes.kv_len + 1 + sizes.num_chunks, key.device)[-sizes.num_chunks :].expand_as(own)
    far = far.masked_fill(own, sizes.kv_len)
    visible = torch.cat((near, far), 2)
    summaries = _beside(mean_key, beta, dim, numbers[..., 2:].expand(batch, num_heads, -1, -1)).to(key.dtype)
    rows = torch.cat((rows, summaries), 2)
    queries = _take(query, blocks)
    if dim is not None:
        keys, values = _take(rows, visible.flatten(1)).unflatten(2, visible.shape[1:]).flatten(0, 1).chunk(2, 3)
        queries = pad(queries, (0, dim - head_dim), value=column_unit(key.dtype, scale))
        queries = queries.unflatten(2, (-1, block_q)).flatten(0, 1)
        out = partial_attention(queries, keys, values, scale=scale, dropout_p=dropout_p).out
        out = out[..., :value_dim].unflatten(0, (batch, num_heads)).flatten(2, 3)
    else:
        bias = constant(_bias_of_keys, sizes.kv_len, log_count.dtype, device=key.device)
        bias = torch.cat((bias.expand(len(log_count), -1), log_count), 1)
        bias = bias.gather(1, visible.flatten(1)).view(visible.shape)
        bias, visible = (x[:, None].expand(batch, num_heads, -1, -1).flatten(0, 1) for x in (bias, visible))
        keys, values = rows.flatten(0, 1).split((head_dim, value_dim), 2)
        gathered = GatheredKeys(visible, bias[:, :, None], block_q)
        out = gathered_attention(queries.flatten(0, 1), keys, values, gathered, scale=scale, dropout_p=dropout_p)
        out = out.unflatten(0, (batch, num_heads))
    out = _take(out, slot)
    return out if masked_query is None else out.masked_fill(masked_query, 0.0)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """The tokens of all heads of a row by one index: (B, H, N, D), int64 (R, K) -> (B, H, K, D)."""
    return x.gather(2, index[:, None, :, None].expand(*x.shape[:2], -1, x.shape[3]))


def _beside(key: Tensor, value: Tensor, dim: int | None, columns: Tensor | None = None) -> Tensor:
    """[key, columns, value] with key and columns, and value, padded to `dim` by zeros, or [key, value]."""
    if dim is None:
        return torch.cat((key, value), 3)
    zero = constant(_zero, key.dtype, device=key.device)
    columns = zero.expand(*key.shape[:3], dim - key.shape[3]) if columns is None else columns
    return torch.cat((key, columns, value, zero.expand(*key.shape[:3], dim - value.shape[3])), 3)


def _chunks(key_mask: Tensor | None, sizes: WindowSizes, device: torch.device) -> _Chunks:
    kv_len, num_chunks = sizes.kv_len, sizes.num_chunks
    longest = ceil_div(sizes.window, sizes.per_window)
    # One entry more at the front, which takes the masked keys.
    order = constant(_full, 1 + max(sizes.num_windows * sizes.window, kv_len + longest), kv_len, device=device)
    if key_mask is None:
        rank = (integers(kv_len + 1, device)[1:])[None]
        index = rank
    else:
        rank = key_mask.cumsum(1)
        index = rank * key_mask
    order = order.expand(len(rank), -1).scatter(1, index, integers(kv_len, device).expand_as(index))[:, 1:]
    num_keys = rank[:, -1:]
    # A row with fewer keys is cut by its own number of windows.
    own_windows = (num_keys + (sizes.window - 1)) // sizes.window
    table = torch.embedding(constant(_cuts, sizes, device=device), own_windows[:, 0])
    edges = torch.minimum(table[:, : num_chunks + 1], num_keys)
    token = edges[:, :-1, None] + integers(longest, device)
    unused = token >= edges[:, 1:, None]
    token = order.gather(1, token.flatten(1)).masked_fill(unused.flatten(1), kv_len)
    return _Chunks(order, rank, num_keys, edges, table[:, num_chunks + 1 :], token, unused)


def _blocks(chunks: _Chunks, query_mask: Tensor | None, sizes: WindowSizes, q_len: int) -> _Blocks:
    """The blocks of queries that are not the keys' own tokens.

    Query i of m has position i n / m among the keys. With w as the window of that position, it has slot i + w block_q:
    a block starts at a multiple of block_q queries, and once more where a window starts. At most an eighth of the slots
    are unused if there are many queries, and a half if smaller blocks would have fewer queries than keys.
    """
    device, num_windows, num_keys = chunks.order.device, sizes.num_windows, chunks.num_keys
    seen = sizes.window + sizes.num_chunks
    block_q = max(ceil_div(q_len, 8 * num_windows), min(seen, ceil_div(q_len, num_windows)))
    num_blocks = ceil_div(q_len, block_q) + num_windows - 1
    if query_mask is None:
        rank = integers(q_len, device)[None]
        begin = rank * num_keys
        window, edges = begin // (q_len * sizes.window), chunks.edges * q_len
    else:
        rank = query_mask.cumsum(1)
        num_queries = rank[:, -1:]
        rank = rank - 1
        begin = (rank * num_keys).masked_fill(~query_mask, _BEHIND)
        window, edges = begin // (num_queries * sizes.window).clamp(min=1), chunks.edges * num_queries
    slot = torch.add(rank, window, alpha=block_q)
    slot = slot if query_mask is None else slot.masked_fill(~query_mask, num_blocks * block_q)
    # One entry more at the end, which takes the masked queries.
    query, own = (
        constant(_full, n + 1, 0, device=device).expand(len(slot), -1).scatter(1, index, x.expand_as(slot))[:, :-1]
        for n, index, x in (
            (num_blocks * block_q, slot, integers(q_len, device)),
            (num_blocks, slot // block_q, window),
        )
    )
    # Query i covers the positions from i n / m to (i + 1) n / m. A chunk has those that it shares a position with.
    begin, edges = begin[:, None], edges[:, :, None]
    not_in_chunk = (begin >= edges[:, 1:]) | (begin + num_keys[:, :, None] <= edges[:, :-1])
    return _Blocks(query, own, slot, not_in_chunk, block_q)


def _beta(
    tokens: tuple[Tensor, Tensor],
    means: tuple[Tensor, Tensor],
    unused: Tensor,
    heads: Heads,
    noise: Tensor | None,
    scale: float,
) -> Tensor:
    """`summarize` for keys and values (B, H, C, P, .), whose mean queries and keys (B, H, C, D) are known."""
    root, (key, value) = abs(scale) ** 0.5, tokens
    maps = heads.query_map, heads.key_map
    mu_query, mu_key = (x if w is None else x.to(w.dtype) @ w.mT for x, w in zip(means, maps, strict=True))
    mu = mu_key - mu_query if scale < 0 else mu_key + mu_query
    omega = mu * root if noise is None else torch.add(noise, mu, alpha=root)
    squares = torch.linalg.vector_norm(key, dim=4).square().unsqueeze(3)
    logits = torch.baddbmm(
        *(x.flatten(0, 2) for x in (squares, omega.unsqueeze(3), key.mT)), beta=-0.5 * abs(scale), alpha=root
    )
    logits = logits.view(squares.shape).masked_fill(unused[:, None, :, None], torch.finfo(logits.dtype).min)
    beta: Tensor = (logits.softmax(4) @ value).squeeze(3)
    return beta


def _cuts(sizes: WindowSizes, device: torch.device) -> Tensor:
    """For 0, 1, ..., T windows the edges of the chunks, for full windows, and the window of each: (T + 1, 2 C + 1)."""
    num_windows = torch.arange(sizes.num_windows + 1, device=device)[:, None]
    per_window = (sizes.num_landmarks // num_windows.clamp(min=1)).clamp(1, sizes.window)
    edge = torch.arange(sizes.num_chunks + 1, device=device)
    return torch.cat((edge * sizes.window // per_window, edge[:-1] // per_window), 1)


def _numbers(
    longest: int, head_dim: int, dim: int | None, dtype: torch.dtype, scale: float, device: torch.device
) -> Tensor:
    """For 0, 1, ... keys of a chunk: 1 / number, its log, and the columns of the bias, which is the log."""
    count = torch.arange(longest + 1, device=device).to(accumulation_dtype(dtype))
    numbers, log = 1.0 / count.clamp(min=1.0), count.log()
    numbers = torch.stack((numbers, log), 1)
    if dim is None:
        return numbers
    columns = bias_columns(log[None, None], dtype, scale)[0][0, 0].to(log.dtype)
    return torch.cat((numbers, pad(columns, (0, dim - head_dim - 2))), 1)


def _nothing(
    head_dim: int, value_dim: int, dim: int | None, dtype: torch.dtype, scale: float, device: torch.device
) -> Tensor:
    """The row of a key without weight."""
    if dim is None:
        return torch.zeros(head_dim + value_dim, dtype=dtype, device=device)
    columns = _numbers(0, head_dim, dim, dtype, scale, device)[0, 2:]
    return pad(columns, (head_dim, dim)).to(dtype)


def _bias_of_keys(kv_len: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 for the keys and -inf for nothing."""
    return pad(torch.zeros(kv_len, dtype=dtype, device=device), (0, 1), value=-torch.inf)


def _full(length: int, value: int, device: torch.device) -> Tensor:
    return torch.full((length,), value, device=device)


def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)
