"""The causal form of `hf_efficient_attn.ops.chunk_summaries`: two blocks exactly, and summaries of earlier intervals.

The completed blocks before the two are split into intervals of 1, 2, 4, ... blocks, as in
`hf_efficient_attn.ops.causal`. Each interval has summaries of its own tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.blocks import ceil_div
from hf_efficient_attn.ops.causal import causal_block_partial, left_intervals
from hf_efficient_attn.ops.chunk_summaries import Chunks, Heads, summarize
from hf_efficient_attn.ops.exact import exact_attention
from hf_efficient_attn.ops.partial import Partial, accumulation_dtype, partial_attention

# Queries (a slice of all queries from block 1 on), and their attention to some keys.
QueryPart = tuple[slice, Partial]


class IntervalChunks(NamedTuple):
    """The chunks of the causal form on one level of intervals; see `hf_efficient_attn.ops.causal`.

    Attributes:
        num_intervals: intervals of this level.
        interval: tokens of an interval.
        chunk: tokens of a chunk; the last one of an interval may have fewer.
    """

    num_intervals: int
    interval: int
    chunk: int

    @property
    def num_chunks(self) -> int:
        """Chunks of an interval."""
        return ceil_div(self.interval, self.chunk)


def plan_interval_chunks(length: int, block: int, max_chunks: int) -> list[IntervalChunks]:
    """The intervals of 1, 2, 4, ... blocks of `block` tokens, each cut into at most `max_chunks` equal chunks."""
    completed = max(0, ceil_div(length, block) - 2)
    plan = []
    for level in range(completed.bit_length()):
        interval = block << level
        chunk = ceil_div(interval, min(interval, max_chunks))
        plan.append(IntervalChunks(((completed >> level) + 1) >> 1, interval, chunk))
    return plan


def causal_summary_attention(
    heads: Heads,
    noises: Sequence[Tensor | None],
    *,
    plan: Sequence[IntervalChunks],
    block: int,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """The causal form for sequences of valid tokens: (BH, N, Dv).

    Args:
        heads: BH heads with Nq = Nk = N.
        noises: for each level the standard normal numbers (BH, C, D), or None. A query sees one interval per level, so
            the intervals of a level share their numbers.
        plan: the levels of intervals.
        block: tokens of a block.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.
    """
    query, key, value = heads[:3]
    first_block = exact_attention(
        query[:, :block], key[:, :block], value[:, :block], is_causal=True, scale=scale, dropout_p=dropout_p
    )
    if query.shape[1] <= block:
        return first_block
    parts = [(slice(None), causal_block_partial(query, key, value, block, scale=scale, dropout_p=dropout_p))]
    for level, noise in zip(plan, noises, strict=True):
        (count, interval, chunk), num_chunks = level, level.num_chunks
        position = torch.arange(num_chunks * chunk, device=query.device).view(num_chunks, chunk)
        padding = num_chunks * chunk - interval
        valid = (position < interval).expand(1, count, -1, -1).flatten(1, 2) if padding else None
        queries, keys, values = (
            pad(left_intervals(x, count, interval), (0, 0, 0, padding)).reshape(
                x.shape[0], count * num_chunks, chunk, -1
            )
            for x in (query, key, value)
        )
        if chunk == 1:
            keys, values = keys[:, :, 0], values[:, :, 0]
        else:
            noise = None if noise is None else noise[:, None].expand(-1, count, -1, -1).flatten(1, 2)
            keys, values = summarize(Chunks(queries, keys, values, valid), heads, noise, scale)
        keys, values = (x.to(y.dtype).unflatten(1, (count, num_chunks)) for x, y in ((keys, key), (values, value)))
        bias = (position < interval).sum(1).to(accumulation_dtype(key.dtype)).log()[None, None, None]
        parts += interval_attention(query[:, block:], keys, values, bias, interval, scale=scale, dropout_p=dropout_p)
    return torch.cat((first_block, merge_query_subsets(parts)), 1)


def interval_attention(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, length: int, *, scale: float, dropout_p: float
) -> list[QueryPart]:
    """Attention of queries to keys that stand for the intervals they see on one level.

    Args:
        queries: (BH, Nq, D), the queries from block 1 on.
        keys: (BH, J, M, D), the M keys of each of J intervals.
        values: (BH, J, M, Dv).
        bias: broadcastable to (BH, J, 1, M), added to the scores.
        length: tokens of an interval.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        Slices of the queries and their partials. The queries of all complete intervals are in one partial
        (BH, J', L, .) with a slice that also holds the queries between them. The last interval may have fewer queries.
    """
    bias = bias.expand(-1, keys.shape[1], -1, -1)
    q_len, complete, parts = queries.shape[1], queries.shape[1] // (2 * length), []
    if complete:
        every = slice(0, complete * 2 * length)
        blocks = queries[:, every].unflatten(1, (complete, 2, length))[:, :, 1]
        tensors = blocks, keys[:, :complete], values[:, :complete], bias[:, :complete]
        parts.append((every, partial_attention(*tensors, scale=scale, dropout_p=dropout_p)))
    if complete < keys.shape[1]:
        last = slice((2 * complete + 1) * length, q_len)
        tensors = queries[:, None, last], keys[:, complete:], values[:, complete:], bias[:, complete:]
        parts.append((last, partial_attention(*tensors, scale=scale, dropout_p=dropout_p)))
    return parts


def _view_of(x: Tensor, queries: slice, part: Tensor) -> Tensor:
    """The view of x (BH, Nq, ...) that corresponds to a part (BH, Nq', ...) or, of every second L, (BH, J, L, ...)."""
    x = x[:, queries]
    if part.ndim == x.ndim:
        return x
    if part.shape[1] == 1 and part.shape[2] == x.shape[1]:
        return x[:, None]
    view: Tensor = x.unflatten(1, (part.shape[1], 2, part.shape[2]))
    return view[:, :, 1]


def merge_query_subsets(parts: Sequence[QueryPart]) -> Tensor:
    """The output of `merge` for partials that each have a subset of the queries; the first has all of them.

    Most parts have at most half of the queries, so they are added to slices of one output in place.

    Args:
        parts: slices of the queries and their partials, as `interval_attention` returns them.

    Returns:
        (BH, Nq, Dv).
    """
    first = parts[0][1]
    lses = torch.full((len(parts), *first.lse.shape), -torch.inf, dtype=first.lse.dtype, device=first.lse.device)
    for i, (queries, part) in enumerate(parts):
        _view_of(lses[i], queries, part.lse).copy_(part.lse)
    # Every query attends to itself, so that the softmax is defined.
    weights = lses.softmax(0)
    out = first.out * weights[0].unsqueeze(-1)
    for i, (queries, part) in enumerate(parts[1:], 1):
        weight = _view_of(weights[i], queries, part.lse).unsqueeze(-1)
        _view_of(out, queries, part.out).addcmul_(part.out.to(out.dtype), weight)
    return out.to(first.out.dtype)
