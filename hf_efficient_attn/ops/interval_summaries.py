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
from hf_efficient_attn.ops.causal import (
    causal_block_partial,
    interval_attention,
    left_intervals,
    merge_query_subsets,
)
from hf_efficient_attn.ops.chunk_summaries import Chunks, Heads, summarize
from hf_efficient_attn.ops.exact import exact_attention
from hf_efficient_attn.ops.partial import accumulation_dtype


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
