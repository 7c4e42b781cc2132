"""The causal form of `hf_efficient_attn.ops.chunks`: two blocks exactly, and summaries of earlier intervals."""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.attend import Partial, accumulation_dtype, attend, merge
from hf_efficient_attn.ops.chunks import Draw, Heads, Masks, repeat_for_heads, summarize
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.tokens import (
    ceil_div,
    integers,
    inverse,
    pad_to_blocks,
    slice_size,
    sliced,
    take,
    valid_first,
)


class Level(NamedTuple):
    """`num_intervals` intervals of `length` tokens that queries see, cut into chunks of at most `chunk` tokens."""

    length: int
    num_intervals: int
    chunk: int

    @property
    def num_chunks(self) -> int:
        """The number of chunks of an interval."""
        return ceil_div(self.length, self.chunk)


class IntervalSizes(NamedTuple):
    """The blocks and intervals of a sequence.

    A query sees two blocks exactly. The completed blocks before them are split into intervals of 1, 2, 4, ... blocks by
    the binary digits of their number. So on each level the tokens are pairs of intervals, and queries see the left one.

    Attributes:
        block: number of tokens of a block.
        levels: the levels of intervals.
    """

    block: int
    levels: tuple[Level, ...]


def interval_sizes(length: int, window_size: int, num_landmarks: int) -> IntervalSizes:
    """Cut blocks of window_size / 2 tokens into intervals, and each interval into at most num_landmarks / 2 chunks."""
    block, most = max(1, window_size // 2), max(1, num_landmarks // 2)
    completed, levels = max(0, ceil_div(length, block) - 2), []
    for i in range(completed.bit_length()):
        interval = block << i
        levels.append(Level(interval, ((completed >> i) + 1) >> 1, ceil_div(interval, min(interval, most))))
    return IntervalSizes(block, tuple(levels))


def interval_attention(
    heads: Heads, masks: Masks, draw: Draw, window_size: int, num_landmarks: int, *, scale: float, dropout_p: float
) -> Tensor:
    """Compute the causal form: (BH, N, Dv).

    Args:
        heads: the tensors of all heads, with Nq = Nk = N. Masked queries, keys and values are 0.
        masks: which tokens count.
        draw: gives the standard normal numbers of an interval of each level, as streams 1, 2, ... The intervals of a
            level share them, because a query sees one interval per level.
        window_size: number of tokens of the two blocks of the near field.
        num_landmarks: twice the largest number of chunks of an interval.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.
    """
    sizes = interval_sizes(heads.key.shape[2], window_size, num_landmarks)
    noises = [draw(i, level.num_chunks) for i, level in enumerate(sizes.levels, 1)]
    length, block, device = heads.key.shape[2], sizes.block, heads.key.device
    attend_to = functools.partial(attend, scale=scale, dropout_p=dropout_p)
    # The keys of the block before and of its own block that a query sees: (block, 2 block).
    pairs = torch.ones(block, 2 * block, dtype=torch.bool, device=device).tril(block)
    near_bias = mask_bias(pairs, heads.key.dtype)[None, None]

    def some_heads(*tensors: Tensor | None) -> Tensor:
        heads, noises, order = Heads._make(tensors[:5]), tensors[5:-1], tensors[-1]
        if order is not None:
            query, key, value = (take(x, order) for x in heads[:3])
            heads = heads._replace(query=query, key=key, value=value)
        queries, keys, values = (pad_to_blocks(x, block) for x in heads[:3])  # (BH, T, block, .)
        first, queries = queries.split((1, queries.shape[1] - 1), 1)
        out = attend_to(first, keys[:, :1], values[:, :1], near_bias[..., block:]).out  # (BH, 1, block, Dv)
        if length > block:
            keys, values = (torch.cat((x[:, :-1], x[:, 1:]), 2) for x in (keys, values))  # (BH, T - 1, 2 block, .)
            near = attend_to(queries, keys, values, near_bias)  # (BH, T - 1, block, Dv)
            if sizes.levels:
                table = [_interval_summaries(*x, heads, sizes, scale) for x in zip(sizes.levels, noises, strict=True)]
                keys, values, bias = (torch.cat(x, 1) for x in zip(*table, strict=True))
                near = merge(near, _far_partial(queries, keys, values, bias, sizes, attend_to))
            out = torch.cat((out, near.out), 1)
        out = out.flatten(1, 2)[:, :length]  # (BH, N, Dv)
        return out if order is None else take(out, inverse(order))

    order = None if masks.keys is None else repeat_for_heads(valid_first(masks.keys), *heads.key.shape[:2])
    size = slice_size(2 * heads.value[0, 0].numel(), device)
    return sliced(some_heads, *heads.flattened(noises), order, size=size, draws=dropout_p > 0.0)


def _far_partial(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    sizes: IntervalSizes,
    attend_to: Callable[..., Partial],
) -> Partial:
    """Compute attention of the blocks from block 1 on, (BH, T, S, D), to the summaries of the intervals that each sees.

    Blocks that see equally many intervals are computed by one call.

    Args:
        queries: (BH, T, S, D).
        keys: (BH, J, M, D), the M summaries of each interval, level by level.
        values: (BH, J, M, Dv).
        bias: (1, J, M), added to the scores of the summaries.
        sizes: the sizes of blocks and intervals.
        attend_to: `attend` with the scale and the dropout of the call.
    """
    first = [0, *itertools.accumulate(level.num_intervals for level in sizes.levels)]
    groups: dict[int, dict[int, list[int]]] = {}  # number of intervals -> block -> its intervals
    for block in range(queries.shape[1]):
        seen = [first[i] + (block >> (i + 1)) for i in range(len(sizes.levels)) if block >> i & 1]
        groups.setdefault(len(seen), {})[block] = seen
    order = torch.tensor([block for group in groups.values() for block in group], device=queries.device)
    parts = []
    for (number, group), own in zip(groups.items(), order.split([len(x) for x in groups.values()]), strict=True):
        if not number:  # block 1
            out = queries.new_zeros(*queries.shape[:1], 1, sizes.block, values.shape[3])
            parts.append(Partial(out, bias.new_full(out.shape[:3], -torch.inf)))
            continue
        index = torch.tensor(list(group.values()), device=queries.device).flatten()
        tensors = [x.index_select(1, index).unflatten(1, (-1, number)).flatten(2, 3) for x in (keys, values, bias)]
        parts.append(attend_to(queries.index_select(1, own), *tensors[:2], tensors[2].unsqueeze(2)))
    rank = order.argsort()
    return Partial(*(torch.cat(x, 1).index_select(1, rank) for x in zip(*parts, strict=True)))


def _interval_summaries(
    level: Level, noise: Tensor | None, heads: Heads, sizes: IntervalSizes, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Summarize the left intervals of a level by keys, values and bias.

    Returns:
        (BH, J, M, D), (BH, J, M, Dv) and (1, J, M), where M is the same on all levels.
    """
    (length, count, chunk), num_chunks = level, level.num_chunks
    tokens = [x.unfold(1, length, 2 * length)[:, :count].mT for x in heads[:3]]  # (BH, J, L, .)
    if chunk == 1:
        keys, values = tokens[1:]
    else:
        padding, valid = num_chunks * chunk - length, None
        if padding:
            tokens = [pad(x, (0, 0, 0, padding)) for x in tokens]
            position = integers(num_chunks * chunk, heads.key.device).view(1, num_chunks, chunk)
            valid = (position < length).repeat(1, count, 1)
        parts = [x.reshape(len(x), count * num_chunks, chunk, -1) for x in tokens]  # (BH, J M, chunk, .)
        noise = None if noise is None else noise.repeat(1, count, 1)
        keys, values = (x.unflatten(1, (count, -1)) for x in summarize(parts, valid, heads, noise, scale))
    most = max(level.num_chunks for level in sizes.levels)
    keys, values = (pad(x, (0, 0, 0, most - num_chunks)) if most > num_chunks else x for x in (keys, values))
    counts = (length - integers(most, keys.device) * chunk).clamp(0, chunk)  # (M,)
    return keys, values, counts.to(accumulation_dtype(keys.dtype)).log().expand(1, count, -1)


class Chunk(NamedTuple):
    """Tokens start .. stop - 1; the positions that see the summary, bool (N,); the stream and number of its draw."""

    start: int
    stop: int
    seen_from: Tensor
    stream: int
    number: int


def window_chunks(position: Tensor, window_size: int, num_landmarks: int) -> tuple[Tensor, list[Chunk]]:
    """Return the near field, bool (N, N), and the chunks of the bidirectional form, for the positions (N,) of keys."""
    num_keys = len(position)
    window, num_windows = position // window_size, max(1, ceil_div(num_keys, window_size))
    chunks, level = [], 0
    while ceil_div(num_windows, 1 << level) > num_landmarks:
        size = window_size << level
        for index, start in enumerate(range(0, num_keys, size)):
            # Seen from the other half of the next larger group, if that lies in the window's own chunk.
            chunks.append(Chunk(start, min(start + size, num_keys), window >> level == index ^ 1, level + 1, index))
        level += 1
    size, parts = window_size << level, max(1, min(window_size, num_landmarks // num_windows))
    for index in range(ceil_div(num_keys, size) * parts):
        group, part = divmod(index, parts)
        start, stop = (min(num_keys, group * size + p * size // parts) for p in (part, part + 1))
        if start < stop:
            chunks.append(Chunk(start, stop, window >> level != group, 0, index))
    return window[:, None] == window, chunks


def interval_chunks(position: Tensor, window_size: int, num_landmarks: int) -> tuple[Tensor, list[Chunk]]:
    """Return the near field and the chunks of the causal form, as `window_chunks` does."""
    block_size, num_keys, chunks = max(1, window_size // 2), len(position), []
    block = position // block_size
    for level in range(num_keys.bit_length()):
        interval, completed = block_size << level, (block - 1).clamp(min=0) >> level
        size = ceil_div(interval, min(interval, max(1, num_landmarks // 2)))
        for number in range(0, num_keys // interval, 2):
            seen_from = (completed & 1 == 1) & (completed - 1 == number)
            for index in range(ceil_div(interval, size)):
                start = number * interval + index * size
                chunks.append(Chunk(start, min(start + size, (number + 1) * interval), seen_from, level + 1, index))
    near = (position <= position[:, None]) & (block >= block[:, None] - 1)
    return near, [chunk for chunk in chunks if chunk.seen_from.any()]


def summary_attention_naive(
    heads: Heads,
    masks: Masks,
    draw: Draw,
    cut: Callable[[Tensor], tuple[Tensor, list[Chunk]]],
    scale: float,
) -> Tensor:
    """Compute the readable form of both: float64 (B, H, Nq, Dv), 0 for masked queries.

    Args:
        heads: the tensors of all heads.
        masks: which keys and queries count.
        draw: gives the standard normal numbers of chunks.
        cut: gives the near field and the chunks for the positions of all keys.
        scale: factor of the scores.
    """
    (query, key, value), root = heads[:3], abs(scale) ** 0.5
    out = query.new_zeros(*query.shape[:3], value.shape[3], dtype=torch.float64)
    maps = [None if x is None else x.double() for x in heads[3:]]
    for b in range(len(out)):
        valid_q, valid_k = (
            x.new_ones(x.shape[2], dtype=torch.bool) if mask is None else mask[b]
            for x, mask in ((query, masks.queries), (key, masks.keys))
        )
        q, k, v = query[b][:, valid_q].double(), key[b][:, valid_k].double(), value[b][:, valid_k].double()
        num_queries, num_keys = q.shape[1], k.shape[1]
        if not num_queries or not num_keys:
            continue
        # The position of each query among the keys.
        position = torch.arange(num_queries, device=q.device) * num_keys // num_queries
        near, chunks = cut(torch.arange(num_keys, device=q.device))
        seen, keys, values, bias = [near[position]], [k], [v], [q.new_zeros(num_keys)]
        for start, stop, seen_from, stream, number in chunks:
            queries = q[:, start * num_queries // num_keys : ceil_div(stop * num_queries, num_keys)]
            means = queries.mean(1), k[:, start:stop].mean(1)
            mu = [x if w is None else torch.einsum("hde,he->hd", w, x) for x, w in zip(means, maps, strict=True)]
            noise = draw(stream, number + 1)
            omega = root * (mu[0] * (1 if scale >= 0 else -1) + mu[1]) + (0.0 if noise is None else noise[:, number])
            scaled = root * k[:, start:stop]
            xi = (torch.einsum("hd,hmd->hm", omega, scaled) - scaled.square().sum(-1) / 2).softmax(-1)
            keys.append(means[1][:, None])
            values.append(torch.einsum("hm,hmd->hd", xi, v[:, start:stop])[:, None])
            bias.append(q.new_tensor([stop - start]).log())
            seen.append(seen_from[position, None])
        scores = q @ torch.cat(keys, 1).transpose(1, 2) * scale + torch.cat(bias)
        weights = scores.masked_fill(~torch.cat(seen, 1), -torch.inf).softmax(-1)
        out[b, :, valid_q] = weights @ torch.cat(values, 1)
    return out
