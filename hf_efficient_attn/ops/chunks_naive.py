"""The readable form of `hf_efficient_attn.ops.chunks`: one batch row at a time, chunk by chunk, with dense scores."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.blocks import ceil_div
from hf_efficient_attn.ops.chunks import Draw, Heads, Masks


class Chunk(NamedTuple):
    """Tokens start .. stop - 1, bool (N,) the positions that see the summary, and the stream and number of its draw."""

    start: int
    stop: int
    seen_from: Tensor
    stream: int
    number: int


def window_chunks(position: Tensor, window_size: int, num_landmarks: int) -> tuple[Tensor, list[Chunk]]:
    """The near field, bool (N, N), and the chunks for the positions (N,) of all keys, in the bidirectional form."""
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
    """The same for the causal form."""
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
    """Float64 (B, H, Nq, Dv), 0 for masked queries.

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
