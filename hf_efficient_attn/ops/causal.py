"""A near field of blocks and a far field of sampled columns that never look ahead.

Queries are cut into blocks by position. Block t attends causally to itself and to block t-1, exactly. The completed blocks
before those, 0 .. t-2, are split into aligned segments of 1, 2, 4, ... blocks by the binary digits of t-1; each segment
has one weighted sample of its keys, drawn once from what stands in the segment alone, and shared by all blocks to which
it belongs. So nothing that a query meets was ever chosen by what follows it, and its output does not even depend on how
long the sequence is. These are the off-diagonal squares of HyperAttention's causal recursion (Han et al. 2023, Algorithm
4), without its sorting of a square's queries among themselves, which lets later queries move earlier ones.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.blocks import ceil_div, take
from hf_efficient_attn.ops.exact import exact_attention, key_bias
from hf_efficient_attn.ops.near_far import plan_far
from hf_efficient_attn.ops.partial import Partial, accumulator, attend, merge
from hf_efficient_attn.ops.random import offsets
from hf_efficient_attn.ops.sampling import operator_norm_squared, stratified_ranks


class Segments(NamedTuple):
    """Samples of the segments of 2**level blocks: segment j begins at 2 j 2**level blocks and serves the blocks whose
    completed part reaches over it; index (A, J, m) is relative to the segment's first key, log_weight (A, J, m)."""

    level: int
    index: Tensor
    log_weight: Tensor


def segment_scores(kind: str, query, key, value, scale: float, num_probes: int, offset: Tensor) -> Tensor:
    """Unnormalised sampling probabilities of a segment's keys from the segment's own queries: (S, L, D) -> (S, L)."""
    wide = accumulator(value.dtype)
    if kind == "uniform":
        return torch.ones(key.shape[:2], dtype=wide, device=key.device)
    squares = value.to(wide).square().sum(-1)
    if kind == "probe":
        length = key.shape[1]
        place = stratified_ranks(num_probes, length, offset.reshape(-1, 1))
        weights = (take(query, place).to(wide) @ key.to(wide).transpose(1, 2) * scale).softmax(-1)
        gamma = 1.0 / operator_norm_squared(value.to(wide)).clamp(min=torch.finfo(wide).tiny)
        squares = weights.square_().sum(1) * (length / num_probes) + gamma * squares
    return squares + 1e-6 * squares.mean(1, keepdim=True) + torch.finfo(wide).tiny


def plan_segments(query, key, value, *, size, num_samples, scores, num_probes, independent, scale, seed, first_head,
                  batch) -> list[Segments]:  # fmt: skip
    """Samples of all segments of blocks of `size` keys, num_samples / 2 columns each (or all keys, where fewer)."""
    heads, plans, level = query.shape[0] // batch, [], 0
    # The queries of block t have t-1 completed blocks behind block t-1.
    completed = ceil_div(query.shape[1], size) - 2
    with torch.no_grad():
        while completed >= 1 << level:
            span = size << level
            pairs = ((completed >> level) + 1) >> 1

            def segments(x, pairs=pairs, span=span):
                x = x[:, : (2 * pairs - 1) * span]
                x = pad(x, (0, 0, 0, span)).reshape(x.shape[0], pairs, 2, span, x.shape[2])
                return x[:, :, 0].flatten(0, 1)

            count = max(1, num_samples // 2)
            if count >= span:
                index = torch.arange(span, device=key.device).expand(key.shape[0], pairs, -1)
                plans.append(Segments(level, index, torch.zeros_like(index, dtype=accumulator(key.dtype))))
            else:
                turn = (
                    offsets(heads, first_head, seed, stream + 2 * level, key.device).repeat(batch)
                    for stream in (21, 22)
                )
                probe_offset, draw_offset = (x.repeat_interleave(pairs) for x in turn)
                weights = segment_scores(
                    scores, segments(query), segments(key), segments(value), scale, num_probes, probe_offset
                )
                far = plan_far(weights, count, draw_offset, seed, independent)
                shape = (key.shape[0], pairs, count)
                plans.append(Segments(level, far.place.view(shape), far.log_weight.view(shape)))
            level += 1
    return plans


def causal_near_far_attention(
    query, key, value, plans: list[Segments], *, size: int, exact: int, scale: float, dropout_p: float = 0.0
) -> Tensor:
    """Attention of a plan: (A, N, D), (A, N, D), (A, N, Dv) -> (A, N, Dv).

    The first `exact` positions, at most, are computed exactly, whatever the length.
    """
    length = query.shape[1]
    options = {"scale": scale, "dropout_p": dropout_p}
    head = exact_attention(query[:, :exact], key[:, :exact], value[:, :exact], is_causal=True, **options)
    if length <= exact:
        return head
    tiles = ceil_div(length, size)
    missing = tiles * size - length
    query, key, value = (pad(x, (0, 0, 0, missing)) for x in (query, key, value))
    near = attend_block_and_previous(query, key, value, size, **options)
    total = merge(near, *(_far_level(query, key, value, plan, size, options) for plan in plans))
    return torch.cat((head, total.out[:, exact:length]), 1)


def attend_block_and_previous(query, key, value, size: int, *, scale: float, dropout_p: float = 0.0) -> Partial:
    """Each block of `size` queries to its own keys up to each query, and to all of the block before: (A, T*size, .)."""
    blocks = [x.view(x.shape[0], -1, size, x.shape[2]) for x in (query, key, value)]
    device, wide = query.device, accumulator(query.dtype)
    seen = torch.ones(size, size, dtype=torch.bool, device=device)
    causal = key_bias(seen.tril(), wide)[None, None]
    first = attend(*(x[:, :1] for x in blocks), causal, scale=scale, dropout_p=dropout_p)
    if blocks[0].shape[1] == 1:
        return Partial(first.out.flatten(1, 2), first.lse.flatten(1, 2))
    both = key_bias(torch.cat((seen, seen.tril()), 1), wide)[None, None]
    keys, values = (torch.cat((x[:, :-1], x[:, 1:]), 2) for x in blocks[1:])
    rest = attend(blocks[0][:, 1:], keys, values, both, scale=scale, dropout_p=dropout_p)
    return Partial(*(torch.cat(pair, 1).flatten(1, 2) for pair in zip(first, rest, strict=True)))


def _far_level(query, key, value, plan: Segments, size: int, options) -> Partial:
    """The columns of one level's segments, for the queries that they serve; empty for all others: (A, N, .)."""
    heads, pairs, count = plan.index.shape
    span, length = size << plan.level, query.shape[1]
    first = (torch.arange(pairs, device=query.device) * 2 * span)[:, None]
    index = (plan.index + first).flatten(1)
    keys, values = (take(x, index).view(heads, pairs, count, -1) for x in (key, value))
    # Block t reaches over segment j at this level where t-1 lies in [(2j+1) 2**level, (2j+2) 2**level).
    ends = size + 2 * pairs * span
    rows = pad(query[:, size:ends], (0, 0, 0, max(0, ends - length))).reshape(heads, pairs, 2, span, -1)[:, :, 1]
    part = attend(rows, keys, values, plan.log_weight[:, :, None], **options)
    out, lse = part.out, part.lse.unsqueeze(-1)
    laid = []
    for tensor, empty in ((out, 0.0), (lse, -torch.inf)):
        pair = torch.stack((torch.full_like(tensor, empty), tensor), 2).flatten(1, 3)
        laid.append(pad(pair, (0, 0, size, max(0, length - ends)), value=empty)[:, :length])
    return Partial(laid[0], laid[1].squeeze(-1))


def dense_causal_log_weights(plans: list[Segments], length: int, size: int, exact: int, heads: int) -> Tensor:
    """The readable form: for every head the (N, N) matrix of what is added to the scores before the softmax."""
    weights = torch.full((heads, length, length), -torch.inf, dtype=torch.float64)
    for i in range(length):
        block = i // size
        if i < exact:
            weights[:, i, : i + 1] = 0.0
            continue
        weights[:, i, max(0, block - 1) * size : i + 1] = 0.0
        done = block - 1
        for plan in plans:
            if done >= 0 and done >> plan.level & 1:
                pair = (done >> plan.level) // 2
                first = 2 * pair * (size << plan.level)
                for a in range(heads):
                    for at, weight in zip(plan.index[a, pair].tolist(), plan.log_weight[a, pair].tolist(), strict=True):
                        old = weights[a, i, first + at]
                        weights[a, i, first + at] = torch.logaddexp(old, torch.full_like(old, weight))
    return weights
