"""Attention to a few keys exactly and to one summary of each chunk of the other keys, in one softmax (EVA).

`hf_efficient_attn.methods.eva` describes the method and its departures from the paper. A window is a set of consecutive
keys that a query sees exactly. A group is 2**level consecutive windows. A chunk is a part of a window, or a group, and
has one summary. The causal form has two blocks exactly, and summaries of earlier intervals. Sequences come without
padding.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.attend import Partial, accumulation_dtype, attend, keeps_pairs, merge
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.index import ceil_div, integers, pad_to_blocks
from hf_efficient_attn.ops.sampled_keys.causal import sampled_intervals
from hf_efficient_attn.ops.slices import slice_size, sliced


class ChunkOptions(NamedTuple):
    """Options of both forms.

    Attributes:
        window_size: number of keys of a window; in the causal form, of the two blocks of the near field.
        num_landmarks: largest number of chunks; in the causal form, twice the largest number of chunks of an interval.
        maps: W_q and W_k (H, D, D) of a learned proposal, or two times None.
        draw: draw(stream, count) returns standard normal numbers (H, count, D) of chunks, or None if omega is not
            drawn. Stream 0 is for the chunks, and 1, 2, ... for the groups or the intervals of each level.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.
    """

    window_size: int
    num_landmarks: int
    maps: tuple[Tensor | None, Tensor | None]
    draw: Callable[[int, int], Tensor | None]
    scale: float
    dropout_p: float

    def repeated(self, batch_heads: int, *drawn: Tensor | None) -> list[Tensor | None]:
        """Repeat the maps, and drawn numbers (H, count, D), for every batch row: (BH, ., D)."""
        given = (*self.maps, *drawn)
        return [None if x is None else x.repeat(batch_heads // len(x), 1, 1) for x in given]


class Chunks(NamedTuple):
    """C chunks of at most P tokens each.

    Attributes:
        token: int64 (C, P), the tokens of each chunk.
        valid: bool (C, P), False for entries that are padding; None if there is none.
    """

    token: Tensor
    valid: Tensor | None

    def take(self, x: Tensor) -> Tensor:
        """Take the tokens of x (BH, N, D): (BH, C, P, D)."""
        taken: Tensor = x.index_select(1, self.token.flatten()).unflatten(1, self.token.shape)
        return taken


def chunks_between(start: Tensor, stop: Tensor, size: int, length: int, are_full: bool) -> Chunks:
    """Make the chunks of the tokens from `start` to `stop` - 1, int64 (C,), at most `size`, of a sequence.

    `are_full` tells that all have `size` tokens.
    """
    token = start[:, None] + integers(size, start.device)
    return Chunks(token.clamp(max=length - 1), None if are_full else token < stop[:, None])


def chunk_means(x: Tensor, valid: Tensor | None) -> Tensor:
    """Average the tokens of chunks: (BH, C, P, D) -> (BH, C, D) in the accumulation dtype."""
    x = x.to(accumulation_dtype(x.dtype))
    if valid is None:
        return x.mean(2)
    return x.masked_fill(~valid.unsqueeze(-1), 0.0).sum(2) / valid.sum(1).clamp(min=1).unsqueeze(-1)


def summarize(
    mean_query: Tensor,
    tokens: Sequence[Tensor],
    valid: Tensor | None,
    maps: Sequence[Tensor | None],
    noise: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute the mean key and the estimated value beta_c(omega_c) of each chunk.

    Args:
        mean_query: (BH, C, D), in the accumulation dtype.
        tokens: the keys (BH, C, P, D) and the values (BH, C, P, Dv) of C chunks.
        valid: bool (C, P), False for padding; None if there is no padding.
        maps: W_q and W_k (BH, D, D), or two times None.
        noise: (BH, C, D), standard normal, or None for omega = mu.
        scale: factor of the scores.

    Returns:
        (BH, C, D) and (BH, C, Dv) in the dtypes of keys and values; 0 for an empty chunk.
    """
    key, value = (x.to(mean_query.dtype) for x in tokens)
    mean_key = chunk_means(key, valid)  # (BH, C, D)
    root = abs(scale) ** 0.5
    mu_query, mu_key = (x if w is None else x @ w.mT for x, w in zip((mean_query, mean_key), maps, strict=True))
    omega = ((-mu_query if scale < 0 else mu_query) + mu_key) * root  # (BH, C, D)
    omega = omega if noise is None else omega + noise
    # log xi(sqrt(scale) k, omega), with both terms in one product: (BH, C, P).
    logits = (key * (omega.unsqueeze(2) * root - key * (0.5 * root * root))).sum(-1)
    if valid is not None:
        # The bias of an empty chunk is -inf. Equal logits keep its softmax and the gradient finite.
        logits = logits.masked_fill(~valid, torch.finfo(logits.dtype).min)
        value = value.masked_fill(~valid.unsqueeze(-1), 0.0)
    beta = (logits.softmax(-1).unsqueeze(2) @ value).squeeze(2)  # (BH, C, 1, P) @ (BH, C, P, Dv) -> (BH, C, Dv)
    return mean_key.to(tokens[0].dtype), beta.to(tokens[1].dtype)


def window_attention(query: Tensor, key: Tensor, value: Tensor, options: ChunkOptions) -> Tensor:
    """Compute the bidirectional form: (BH, Nq, D), (BH, Nk, D), (BH, Nk, Dv) -> (BH, Nq, Dv)."""
    query = query.to(key.dtype)  # FLuRKA contracts keys to another dtype
    batch_heads, q_len, dim = query.shape
    kv_len = key.shape[1]
    device = key.device
    window = min(options.window_size, kv_len)
    level = 0
    num_windows = ceil_div(kv_len, window)
    # With more windows than landmarks a chunk is a group of 2**level windows, else one of `parts` parts of a window.
    while ceil_div(num_windows, 1 << level) > options.num_landmarks:
        level += 1
    parts = min(window, max(1, options.num_landmarks // num_windows))
    window_index = integers(num_windows, device)  # a block of queries sees its own window
    block_q = window
    slot = None
    order = None
    if q_len != kv_len:
        # Query i of m has position i n / m among n keys, and is in the block of that position's window.
        index = integers(q_len, device)
        block_q = window * q_len // kv_len + 1
        query_window = index * kv_len // q_len // window
        first = (window_index * window * q_len + kv_len - 1) // kv_len
        slot = index - first[query_window] + query_window * block_q  # (Nq,)
        order = index.new_zeros(num_windows * block_q).scatter(0, slot, index)
    seen = [window_index[:, None] * window + integers(window, device) < kv_len]
    # It sees the chunks outside of its own group, and in its group at each level the other half of its group of
    # 2**(i + 1) windows.
    key_chunks = []
    query_chunks = []
    siblings = []
    for size, in_parts in ((window << level, parts), *((window << i, 1) for i in range(level))):
        index = integers(ceil_div(kv_len, size) * in_parts, device)
        most = ceil_div(size, in_parts)
        start, stop = (
            (index // in_parts * size + (index % in_parts + i) * size // in_parts).clamp(max=kv_len) for i in (0, 1)
        )
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
            seen.append((kv_len - sibling * size).clamp(0, size)[:, None])
    # 0 for a key, the log of the number of keys for a summary, -inf for what a block does not see.
    bias = torch.cat(seen, 1).to(accumulation_dtype(key.dtype)).log()[None, :, None]  # (1, S, 1, window + C + level)

    def some_heads(query: Tensor, key: Tensor, value: Tensor, *drawn: Tensor | None) -> Tensor:
        summaries = []
        for query_part, key_part, noise in zip(query_chunks, key_chunks, drawn[2:], strict=True):
            means = chunk_means(query_part.take(query), query_part.valid)
            tokens = key_part.take(key), key_part.take(value)
            summaries.append(summarize(means, tokens, key_part.valid, drawn[:2], noise, options.scale))

        def together(x: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
            """Concatenate the keys of each block's window, all chunks, and the other half of each level's group."""
            near = pad_to_blocks(x, window)  # (BH, S, window, .) for S windows
            far = parts[0].unsqueeze(1).expand(-1, num_windows, -1, -1)  # (BH, S, C, .)
            groups = [x.index_select(1, i).unsqueeze(2) for x, i in zip(parts[1:], siblings, strict=True)]
            return torch.cat((near, far, *groups), 2)  # (BH, S, window + C + level, .)

        blocks = pad_to_blocks(query if order is None else query.index_select(1, order), block_q)
        mean_keys, betas = zip(*summaries, strict=True)
        tensors = blocks, together(key, mean_keys), together(value, betas), bias.expand(len(blocks), -1, -1, -1)
        out = attend(*tensors, scale=options.scale, dropout_p=options.dropout_p).out.flatten(1, 2)
        return out[:, :q_len] if slot is None else out.index_select(1, slot)

    drawn = options.repeated(batch_heads, *(options.draw(i, len(chunks.token)) for i, chunks in enumerate(key_chunks)))
    pairs = block_q if keeps_pairs(query, key, bias, options.scale, options.dropout_p) else 0
    size = slice_size(bias.numel() * max(dim, value.shape[2], pairs), device)
    return sliced(some_heads, query, key, value, *drawn, size=size, draws=options.dropout_p > 0.0)


class Level(NamedTuple):
    """`num_intervals` intervals of `length` tokens that queries see, cut into `num_chunks` chunks of `chunk` tokens."""

    length: int
    num_intervals: int
    chunk: int
    num_chunks: int


def interval_levels(length: int, block: int, most: int) -> list[Level]:
    """Split a sequence of blocks into intervals of 1, 2, 4, ... blocks, and each interval into at most `most` chunks.

    A query sees two blocks exactly. The completed blocks before them are split into intervals by the binary digits of
    their number. So on each level the tokens are pairs of intervals, and queries see the left one.
    """
    levels = []
    for count, interval in sampled_intervals(length, block):
        chunk = ceil_div(interval, min(interval, most))
        levels.append(Level(interval, count, chunk, ceil_div(interval, chunk)))
    return levels


def interval_attention(query: Tensor, key: Tensor, value: Tensor, options: ChunkOptions) -> Tensor:
    """Compute the causal form: (BH, N, D), (BH, N, D), (BH, N, Dv) -> (BH, N, Dv).

    The intervals of a level share their drawn numbers, because a query sees one interval per level.
    """
    batch_heads, length, _ = key.shape
    device = key.device
    block = max(1, options.window_size // 2)
    most = max(1, options.num_landmarks // 2)
    levels = interval_levels(length, block, most)
    attend_to = functools.partial(attend, scale=options.scale, dropout_p=options.dropout_p)
    # The keys of the block before and of its own block that a query sees: (block, 2 block).
    pairs = torch.ones(block, 2 * block, dtype=torch.bool, device=device).tril(block)
    near_bias = mask_bias(pairs, key.dtype)[None, None]

    def some_heads(query: Tensor, key: Tensor, value: Tensor, *drawn: Tensor | None) -> Tensor:
        queries, keys, values = (pad_to_blocks(x, block) for x in (query, key, value))  # (BH, T, block, .)
        first, queries = queries.split((1, queries.shape[1] - 1), 1)
        out = attend_to(first, keys[:, :1], values[:, :1], near_bias[..., block:]).out  # (BH, 1, block, Dv)
        if length > block:
            keys, values = (torch.cat((x[:, :-1], x[:, 1:]), 2) for x in (keys, values))  # (BH, T - 1, 2 block, .)
            near = attend_to(queries, keys, values, near_bias)  # (BH, T - 1, block, Dv)
            if levels:
                summaries = [
                    _interval_summaries(
                        (query, key, value), level, levels[-1].num_chunks, drawn[:2], noise, options.scale
                    )
                    for level, noise in zip(levels, drawn[2:], strict=True)
                ]
                keys, values, bias = (torch.cat(x, 1) for x in zip(*summaries, strict=True))
                near = merge(near, _far_partial(queries, keys, values, bias, levels, attend_to))
            out = torch.cat((out, near.out), 1)
        return out.flatten(1, 2)[:, :length]  # (BH, N, Dv)

    drawn = options.repeated(batch_heads, *(options.draw(i, level.num_chunks) for i, level in enumerate(levels, 1)))
    size = slice_size(2 * value[0].numel(), device)
    return sliced(some_heads, query, key, value, *drawn, size=size, draws=options.dropout_p > 0.0)


def _far_partial(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, levels: list[Level], attend_to: Callable[..., Partial]
) -> Partial:
    """Compute attention of the blocks from block 1 on, (BH, T, S, D), to the summaries of the intervals that each sees.

    Blocks that see equally many intervals are computed by one call of `attend_to`. The M summaries of each interval are
    keys (BH, J, M, D), values (BH, J, M, Dv) and a bias (1, J, M), level by level.
    """
    first = [0, *itertools.accumulate(level.num_intervals for level in levels)]
    groups: dict[int, dict[int, list[int]]] = {}  # number of intervals -> block -> its intervals
    for block in range(queries.shape[1]):
        seen = [first[i] + (block >> (i + 1)) for i in range(len(levels)) if block >> i & 1]
        groups.setdefault(len(seen), {})[block] = seen
    parts = []
    for number, group in groups.items():
        own = queries.index_select(1, torch.tensor(list(group), device=queries.device))
        if not number:  # block 1
            out = own.new_zeros(*own.shape[:3], values.shape[3])
            parts.append(Partial(out, bias.new_full(out.shape[:3], -torch.inf)))
            continue
        index = torch.tensor(list(group.values()), device=queries.device).flatten()
        tensors = [x.index_select(1, index).unflatten(1, (-1, number)).flatten(2, 3) for x in (keys, values, bias)]
        parts.append(attend_to(own, *tensors[:2], tensors[2].unsqueeze(2)))
    rank = torch.tensor([block for group in groups.values() for block in group], device=queries.device).argsort()
    return Partial(*(torch.cat(x, 1).index_select(1, rank) for x in zip(*parts, strict=True)))


def _interval_summaries(
    tokens: tuple[Tensor, ...],
    level: Level,
    most: int,
    maps: tuple[Tensor | None, ...],
    noise: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Summarize the left intervals of a level by keys, values and bias.

    Returns:
        (BH, J, M, D), (BH, J, M, Dv) and (1, J, M), where M is `most` on all levels.
    """
    length, count, chunk, num_chunks = level
    acc_dtype = accumulation_dtype(tokens[0].dtype)
    parts = [x.unfold(1, length, 2 * length)[:, :count].mT for x in tokens]  # (BH, J, L, .)
    keys, values = parts[1:]
    if chunk > 1:
        padding = num_chunks * chunk - length
        valid = None
        if padding:
            parts = [pad(x, (0, 0, 0, padding)) for x in parts]
            position = integers(num_chunks * chunk, keys.device).view(num_chunks, chunk)
            valid = (position < length).repeat(count, 1)
        query, *both = (x.reshape(len(x), count * num_chunks, chunk, -1) for x in parts)  # (BH, J M, chunk, .)
        noise = None if noise is None else noise.repeat(1, count, 1)
        found = summarize(chunk_means(query, valid), both, valid, maps, noise, scale)
        keys, values = (x.unflatten(1, (count, -1)) for x in found)
    keys, values = (pad(x, (0, 0, 0, most - num_chunks)) if most > num_chunks else x for x in (keys, values))
    counts = (length - integers(most, keys.device) * chunk).clamp(0, chunk)  # (M,)
    return keys, values, counts.to(acc_dtype).log().expand(1, count, -1)


class NaiveChunk(NamedTuple):
    """Tokens start .. stop - 1; the positions that see the summary, bool (N,); the stream and number of its draw."""

    start: int
    stop: int
    seen_from: Tensor
    stream: int
    number: int


def window_chunks(position: Tensor, options: ChunkOptions) -> tuple[Tensor, list[NaiveChunk]]:
    """Return the near field, bool (N, N), and the chunks of the bidirectional form, for the positions (N,) of keys."""
    num_keys = len(position)
    window_size, num_landmarks = options[:2]
    window = position // window_size
    num_windows = max(1, ceil_div(num_keys, window_size))
    chunks = []
    level = 0
    while ceil_div(num_windows, 1 << level) > num_landmarks:
        size = window_size << level
        for index, start in enumerate(range(0, num_keys, size)):
            # Seen from the other half of the next larger group, if that lies in the window's own chunk.
            chunks.append(
                NaiveChunk(start, min(start + size, num_keys), window >> level == index ^ 1, level + 1, index)
            )
        level += 1
    size = window_size << level
    parts = max(1, min(window_size, num_landmarks // num_windows))
    for index in range(ceil_div(num_keys, size) * parts):
        group, part = divmod(index, parts)
        start, stop = (min(num_keys, group * size + p * size // parts) for p in (part, part + 1))
        if start < stop:
            chunks.append(NaiveChunk(start, stop, window >> level != group, 0, index))
    return window[:, None] == window, chunks


def interval_chunks(position: Tensor, options: ChunkOptions) -> tuple[Tensor, list[NaiveChunk]]:
    """Return the near field and the chunks of the causal form, as `window_chunks` does."""
    block_size = max(1, options.window_size // 2)
    num_keys = len(position)
    chunks = []
    block = position // block_size
    for level in range(num_keys.bit_length()):
        interval = block_size << level
        completed = (block - 1).clamp(min=0) >> level
        size = ceil_div(interval, min(interval, max(1, options.num_landmarks // 2)))
        for number in range(0, num_keys // interval, 2):
            seen = (completed & 1 == 1) & (completed - 1 == number)
            for index in range(ceil_div(interval, size)):
                start = number * interval + index * size
                chunks.append(NaiveChunk(start, min(start + size, (number + 1) * interval), seen, level + 1, index))
    near = (position <= position[:, None]) & (block >= block[:, None] - 1)
    return near, [chunk for chunk in chunks if chunk.seen_from.any()]


def summary_attention_naive(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: ChunkOptions,
    cut: Callable[[Tensor, ChunkOptions], tuple[Tensor, list[NaiveChunk]]],
) -> Tensor:
    """Compute the readable form of both, in float64: (BH, Nq, D), (BH, Nk, D), (BH, Nk, Dv) -> (BH, Nq, Dv).

    `cut` gives the near field and the chunks for the positions of all keys.
    """
    batch_heads, num_queries, _ = query.shape
    num_keys = key.shape[1]
    root = abs(options.scale) ** 0.5
    query, key, value = (x.double() for x in (query, key, value))
    # The position of each query among the keys.
    position = torch.arange(num_queries, device=query.device) * num_keys // num_queries
    near, chunks = cut(torch.arange(num_keys, device=query.device), options)
    seen = [near[position]]
    keys = [key]
    values = [value]
    bias = [query.new_zeros(num_keys)]
    for start, stop, seen_from, stream, number in chunks:
        queries = query[:, start * num_queries // num_keys : ceil_div(stop * num_queries, num_keys)]
        means = (queries.mean(1), key[:, start:stop].mean(1))
        some = root * key[:, start:stop]
        *maps, noise = options.repeated(batch_heads, options.draw(stream, number + 1))
        mu = [x if w is None else torch.einsum("hde,he->hd", w.double(), x) for x, w in zip(means, maps, strict=True)]
        omega = root * (mu[0] * (1 if options.scale >= 0 else -1) + mu[1])
        omega = omega if noise is None else omega + noise[:, number]
        xi = (torch.einsum("hd,hmd->hm", omega, some) - some.square().sum(-1) / 2).softmax(-1)
        keys.append(means[1][:, None])
        values.append(torch.einsum("hm,hmd->hd", xi, value[:, start:stop])[:, None])
        bias.append(query.new_tensor([stop - start]).log())
        seen.append(seen_from[position, None])
    scores = query @ torch.cat(keys, 1).mT * options.scale + torch.cat(bias)
    return scores.masked_fill(~torch.cat(seen, 1), -torch.inf).softmax(-1) @ torch.cat(values, 1)
