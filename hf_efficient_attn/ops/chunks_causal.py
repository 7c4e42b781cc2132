"""The causal form of `hf_efficient_attn.ops.chunks`: two blocks exactly, and summaries of earlier intervals.

The module also has the readable form of both.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.attend import Partial, accumulation_dtype, attend, merge
from hf_efficient_attn.ops.chunks import ChunkOptions, chunk_means, summarize
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.tokens import ceil_div, integers, pad_to_blocks, slice_size, sliced


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
    completed, levels = max(0, ceil_div(length, block) - 2), []
    for i in range(completed.bit_length()):
        interval = block << i
        chunk = ceil_div(interval, min(interval, most))
        levels.append(Level(interval, ((completed >> i) + 1) >> 1, chunk, ceil_div(interval, chunk)))
    return levels


def interval_attention(query: Tensor, key: Tensor, value: Tensor, options: ChunkOptions) -> Tensor:
    """Compute the causal form: (BH, N, D), (BH, N, D), (BH, N, Dv) -> (BH, N, Dv).

    The intervals of a level share their drawn numbers, because a query sees one interval per level.
    """
    (batch_heads, length, _), device = key.shape, key.device
    block, most = max(1, options.window_size // 2), max(1, options.num_landmarks // 2)
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
    (length, count, chunk, num_chunks), acc_dtype = level, accumulation_dtype(tokens[0].dtype)
    parts = [x.unfold(1, length, 2 * length)[:, :count].mT for x in tokens]  # (BH, J, L, .)
    keys, values = parts[1:]
    if chunk > 1:
        padding, valid = num_chunks * chunk - length, None
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
    num_keys, (window_size, num_landmarks) = len(position), options[:2]
    window, num_windows = position // window_size, max(1, ceil_div(num_keys, window_size))
    chunks, level = [], 0
    while ceil_div(num_windows, 1 << level) > num_landmarks:
        size = window_size << level
        for index, start in enumerate(range(0, num_keys, size)):
            # Seen from the other half of the next larger group, if that lies in the window's own chunk.
            chunks.append(
                NaiveChunk(start, min(start + size, num_keys), window >> level == index ^ 1, level + 1, index)
            )
        level += 1
    size, parts = window_size << level, max(1, min(window_size, num_landmarks // num_windows))
    for index in range(ceil_div(num_keys, size) * parts):
        group, part = divmod(index, parts)
        start, stop = (min(num_keys, group * size + p * size // parts) for p in (part, part + 1))
        if start < stop:
            chunks.append(NaiveChunk(start, stop, window >> level != group, 0, index))
    return window[:, None] == window, chunks


def interval_chunks(position: Tensor, options: ChunkOptions) -> tuple[Tensor, list[NaiveChunk]]:
    """Return the near field and the chunks of the causal form, as `window_chunks` does."""
    block_size, num_keys, chunks = max(1, options.window_size // 2), len(position), []
    block = position // block_size
    for level in range(num_keys.bit_length()):
        interval, completed = block_size << level, (block - 1).clamp(min=0) >> level
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
    (batch_heads, num_queries, _), num_keys, root = query.shape, key.shape[1], abs(options.scale) ** 0.5
    query, key, value = (x.double() for x in (query, key, value))
    # The position of each query among the keys.
    position = torch.arange(num_queries, device=query.device) * num_keys // num_queries
    near, chunks = cut(torch.arange(num_keys, device=query.device), options)
    seen, keys, values, bias = [near[position]], [key], [value], [query.new_zeros(num_keys)]
    for start, stop, seen_from, stream, number in chunks:
        queries = query[:, start * num_queries // num_keys : ceil_div(stop * num_queries, num_keys)]
        means, some = (queries.mean(1), key[:, start:stop].mean(1)), root * key[:, start:stop]
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
