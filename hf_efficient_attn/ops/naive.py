"""Readable forms with dense matrices in float64, which tests compare the fast forms with.

Those of plans turn the plan of the fast form into log-weights of all pairs, which are added to the scores.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.blocks import ceil_div
from hf_efficient_attn.ops.causal import IntervalPlan
from hf_efficient_attn.ops.chunks import Draw, Heads, Masks
from hf_efficient_attn.ops.hashing import NearField
from hf_efficient_attn.ops.lsh_rounds import Rounds
from hf_efficient_attn.ops.sampling import FarField


def dense_attention(query: Tensor, key: Tensor, value: Tensor, log_weights: Tensor, *, scale: float) -> Tensor:
    """softmax(scale * query key^T + log_weights) value with dense float64 matrices; 0 for queries without a key.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        value: (BH, Nk, Dv).
        log_weights: float64 (BH, Nq, Nk).
        scale: factor of the scores.

    Returns:
        (BH, Nq, Dv) in the dtype of `value`.
    """
    return dense_softmax(query.double() @ key.double().mT * scale + log_weights, value)


def dense_softmax(scores: Tensor, value: Tensor, key_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """Attention with scores (..., Nq, Nk), values (..., Nk, Dv) and mask (..., Nk); 0 for a query without keys."""
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask.unsqueeze(-2), -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ value.double()).to(value.dtype)


def log_of(pairs: Tensor) -> Tensor:
    """The log-weights of pairs, bool (...): 0 for those that count and -inf for all others, float64."""
    return torch.zeros(pairs.shape, dtype=torch.float64, device=pairs.device).masked_fill(~pairs, -torch.inf)


def dense_log_weights(near: NearField, far: FarField, q_len: int, kv_len: int) -> Tensor:
    """The readable form: what is added to the scores before the softmax, float64 (BH, Nq, Nk).

    It is 0 for a pair of the near field, -log(probability) for a sampled key outside of it, and -inf elsewhere.
    """
    device = near.start.device
    weights = torch.full((near.start.shape[0], q_len, kv_len), -torch.inf, dtype=torch.float64, device=device)
    for a in range(weights.shape[0]):
        keys = torch.arange(kv_len, device=device) if near.key_order is None else near.key_order[a]
        queries = torch.arange(q_len, device=device) if near.query_order is None else near.query_order[a]
        num_keys = near.num_keys if isinstance(near.num_keys, int) else int(near.num_keys[a])
        for t, start in enumerate(near.start[a].tolist()):
            block = queries[t * near.block_q : (t + 1) * near.block_q, None]
            sample = min(t, far.sorted_index.shape[1] - 1)
            for index, log_weight in zip(*(x[a, sample].tolist() for x in far[:2]), strict=True):
                # logaddexp, because independent sampling may select a key twice.
                old = weights[a, block, keys[index]]
                weights[a, block, keys[index]] = torch.logaddexp(old, torch.full_like(old, log_weight))
            weights[a, block, keys[start : min(start + near.block_k, num_keys)]] = 0.0
    return weights


def dense_causal_log_weights(
    plans: Sequence[IntervalPlan], length: int, block_size: int, num_exact: int, like: Tensor
) -> Tensor:
    """The readable form: what is added to the scores before the softmax, float64 (BH, N, N).

    N is `length`; BH and the device are those of `like`.
    """
    weights = like.new_full((len(like), length, length), -torch.inf, dtype=torch.float64)
    for i in range(length):
        if i < num_exact:
            weights[:, i, : i + 1] = 0.0
            continue
        completed = i // block_size - 1
        weights[:, i, max(0, completed) * block_size : i + 1] = 0.0
        for plan in plans:
            if completed < 0 or not completed >> plan.level & 1:
                continue
            j, interval = (completed >> plan.level) // 2, block_size << plan.level
            first = 2 * j * interval
            for a in range(len(like)):
                samples = zip(plan.sample_index[a, j].tolist(), plan.log_weight[a, j].tolist(), strict=True)
                for index, log_weight in samples:
                    old = weights[a, i, first + index]
                    weights[a, i, first + index] = torch.logaddexp(old, torch.full_like(old, log_weight))
                if plan.query_block is not None and plan.key_order is not None:
                    block = int(plan.query_block[a, j, i - block_size - (2 * j + 1) * interval])
                    near = plan.key_order[a, j, block * plan.block_k : (block + 1) * plan.block_k]
                    weights[a, i, first + near] = 0.0
    return weights


def dense_pairs(plan: Rounds) -> Tensor:
    """The readable form: bool (BH, Nq, Nk), True for the pairs of any round."""
    (batch_heads, rounds, q_len), kv_len = plan.query_order.shape, plan.key_order.shape[2]
    pairs = torch.zeros(batch_heads, q_len, kv_len, dtype=torch.bool, device=plan.query_order.device)
    for a in range(batch_heads):
        num_keys = kv_len if plan.num_keys is None else int(plan.num_keys[a])
        for s in range(rounds):
            for t, start in enumerate(plan.start[a, s].tolist()):
                queries = plan.query_order[a, s, t * plan.block_q : (t + 1) * plan.block_q]
                keys = plan.key_order[a, s, start : min(start + plan.block_k, num_keys)]
                pairs[a, queries[:, None], keys] = True
    return pairs


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
