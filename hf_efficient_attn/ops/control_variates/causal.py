"""EVA, causal: a query sees two blocks exactly, and summaries of intervals of the blocks before them."""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.attend import Partial, attend, merge
from hf_efficient_attn.ops.backends.devices import accumulation_dtype
from hf_efficient_attn.ops.control_variates.chunks import ChunkOptions, Maps, chunk_means, summarize
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.index import ceil_div, integers, pad_to_blocks
from hf_efficient_attn.ops.sampled_keys.intervals import sampled_intervals
from hf_efficient_attn.ops.slices import slice_size, sliced


class Level(NamedTuple):
    """`num_intervals` intervals of `length` tokens that queries see, cut into `num_chunks` chunks of `chunk` tokens."""

    length: int
    num_intervals: int
    chunk: int
    num_chunks: int


def chunked_causal_attention(query: Tensor, key: Tensor, value: Tensor, options: ChunkOptions) -> Tensor:
    """Compute the causal form: (BH, N, D), (BH, N, D), (BH, N, Dv) -> (BH, N, Dv).

    The intervals of a level share their drawn numbers, because a query sees one interval per level.
    """
    batch_heads, length, _ = key.shape
    device = key.device
    block = min(max(1, options.window_size // 2), length)
    levels = []
    for count, interval in sampled_intervals(length, block):
        chunk = ceil_div(interval, min(interval, max(1, options.num_landmarks // 2)))
        levels.append(Level(interval, count, chunk, ceil_div(interval, chunk)))
    attend_to = functools.partial(attend, scale=options.scale, dropout_p=options.dropout_p)
    # The keys of the block before and of its own block that a query sees: (block, 2 block).
    pairs = torch.ones(block, 2 * block, dtype=torch.bool, device=device).tril(block)
    near_bias = mask_bias(pairs, key.dtype)[None, None]  # (1, 1, block, 2 block)

    def some_heads(query: Tensor, key: Tensor, value: Tensor, maps: Maps, noises: tuple[Tensor | None, ...]) -> Tensor:
        queries, keys, values = (pad_to_blocks(x, block) for x in (query, key, value))  # (BH, T, block, .)
        first, queries = queries.split((1, queries.shape[1] - 1), 1)
        out = attend_to(first, keys[:, :1], values[:, :1], near_bias[..., block:]).out  # (BH, 1, block, Dv)
        if length > block:
            keys, values = (torch.cat((x[:, :-1], x[:, 1:]), 2) for x in (keys, values))  # (BH, T - 1, 2 block, .)
            near = attend_to(queries, keys, values, near_bias)  # (BH, T - 1, block, Dv)
            if levels:
                summaries = [
                    _interval_summaries((query, key, value), level, levels[-1].num_chunks, maps, noise, options.scale)
                    for level, noise in zip(levels, noises, strict=True)
                ]
                keys, values, bias = (torch.cat(x, 1) for x in zip(*summaries, strict=True))
                near = merge(near, _far_partial(queries, keys, values, bias, levels, attend_to))
            out = torch.cat((out, near.out), 1)  # (BH, T, block, Dv)
        return out.flatten(1, 2)[:, :length]  # (BH, N, Dv)

    noises = tuple(options.noise(batch_heads, i, level.num_chunks) for i, level in enumerate(levels, 1))
    maps = options.maps_of(batch_heads)
    size = slice_size(2 * value[0].numel(), device)
    return sliced(some_heads, query, key, value, maps, noises, size=size, draws=options.dropout_p > 0.0)


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
    tokens: tuple[Tensor, ...], level: Level, most: int, maps: Maps, noise: Tensor | None, scale: float
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
            valid = (position < length).repeat(count, 1)  # (J num_chunks, chunk)
        query, *both = (x.reshape(len(x), count * num_chunks, chunk, -1) for x in parts)  # (BH, J num_chunks, chunk, .)
        noise = None if noise is None else noise.repeat(1, count, 1)  # (BH, J num_chunks, D)
        found = summarize(chunk_means(query, valid), both, valid, maps, noise, scale)
        keys, values = (x.unflatten(1, (count, -1)) for x in found)  # (BH, J, num_chunks, .) each
    keys, values = (pad(x, (0, 0, 0, most - num_chunks)) if most > num_chunks else x for x in (keys, values))
    counts = (length - integers(most, keys.device) * chunk).clamp(0, chunk)  # (M,)
    return keys, values, counts.to(acc_dtype).log().expand(1, count, -1)  # (BH, J, M, D), (BH, J, M, Dv), (1, J, M)
