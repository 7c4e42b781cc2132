"""EVA in the readable form, in float64."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.control_variates.chunks import ChunkOptions
from hf_efficient_attn.ops.index import ceil_div


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
    window_size = options.window_size
    num_landmarks = options.num_landmarks
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
    seen = [near[position]]  # (Nq, Nk)
    keys = [key]
    values = [value]
    bias = [query.new_zeros(num_keys)]
    for start, stop, seen_from, stream, number in chunks:
        queries = query[:, start * num_queries // num_keys : ceil_div(stop * num_queries, num_keys)]
        means = (queries.mean(1), key[:, start:stop].mean(1))  # (BH, D) each
        some = root * key[:, start:stop]
        maps = options.maps_of(batch_heads)
        noise = options.noise(batch_heads, stream, number + 1)
        mu = [x if w is None else torch.einsum("hde,he->hd", w.double(), x) for x, w in zip(means, maps, strict=True)]
        omega = root * (mu[0] * (1 if options.scale >= 0 else -1) + mu[1])
        omega = omega if noise is None else omega + noise[:, number]
        xi = (torch.einsum("hd,hmd->hm", omega, some) - some.square().sum(-1) / 2).softmax(-1)  # (BH, P)
        keys.append(means[1][:, None])
        values.append(torch.einsum("hm,hmd->hd", xi, value[:, start:stop])[:, None])
        bias.append(query.new_tensor([stop - start]).log())
        seen.append(seen_from[position, None])
    scores = query @ torch.cat(keys, 1).mT * options.scale + torch.cat(bias)  # (BH, Nq, Nk + C)
    return scores.masked_fill(~torch.cat(seen, 1), -torch.inf).softmax(-1) @ torch.cat(values, 1)
