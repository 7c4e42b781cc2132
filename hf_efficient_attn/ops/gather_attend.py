"""Attention of blocks of queries to keys that are gathered by index."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.blocks import pad_to_blocks, take
from hf_efficient_attn.ops.onednn import grouped_attention, use_grouped
from hf_efficient_attn.ops.partial import partial_attention


class GatheredKeys(NamedTuple):
    """The keys of each of T blocks of queries, by index.

    Attributes:
        key_index: int64 (BH, T, K).
        bias: (BH, T, 1, K), added to the scores.
        block_q: queries of a block.
        query_order: int64 (BH, Nq), the order in which the queries are cut into blocks, or None.
        query_rank: int64 (BH, Nq), the inverse of `query_order`, or None.
    """

    key_index: Tensor
    bias: Tensor
    block_q: int
    query_order: Tensor | None = None
    query_rank: Tensor | None = None


def gathered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gathered: GatheredKeys,
    *,
    scale: float,
    dropout_p: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of blocks of queries to keys that are gathered by index.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        value: (BH, Nk, Dv).
        gathered: the keys of each block.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.
        out: (BH, Nq, Dv) to write into, or None.

    Returns:
        (BH, Nq, Dv), by position of the queries.
    """
    if not dropout_p and use_grouped(query, key, value):
        return _gathered_by_onednn(query, key, value, gathered, scale, out)
    order, rank, index = gathered.query_order, gathered.query_rank, gathered.key_index
    blocks = pad_to_blocks(query if order is None else take(query, order), gathered.block_q)
    keys, values = take(key, index), take(value, index)
    result = partial_attention(blocks, keys, values, gathered.bias, scale=scale, dropout_p=dropout_p).out.flatten(1, 2)
    if rank is not None:
        return take(result, rank, out)
    result = result[:, : query.shape[1]]
    return result if out is None else out.copy_(result)


def _gathered_by_onednn(
    query: Tensor, key: Tensor, value: Tensor, gathered: GatheredKeys, scale: float, out: Tensor | None
) -> Tensor:
    """`gathered_attention` by `grouped_attention`, with the queries gathered in the layout of the latter."""
    (index, bias, block_q, order, rank), (batch_heads, q_len, _) = gathered, query.shape
    num_blocks = index.shape[1]
    missing = num_blocks * block_q - q_len
    if order is None:
        order = torch.arange(q_len, device=query.device).expand(batch_heads, -1)
    # The last block is padded with query 0; the result for the padding is not used.
    order = pad(order, (0, missing)) if missing else order
    head = torch.arange(batch_heads, device=query.device)[:, None]
    order = (order + head * q_len).view(batch_heads * num_blocks, block_q).t()
    index = (index.flatten(1) + head * key.shape[1]).view(batch_heads * num_blocks, -1)
    query, key, flat_value = (x.reshape(-1, x.shape[2]) for x in (query, key, value))
    result = grouped_attention(query, key, flat_value, order, index, bias.flatten(0, 1).squeeze(1), scale=scale)
    # Query r of block t of a head is at index r * (number of all blocks) + (number of its block) of the result.
    rank = torch.arange(q_len, device=query.device).expand(batch_heads, -1) if rank is None else rank
    rank = rank % block_q * (batch_heads * num_blocks) + rank // block_q + head * num_blocks
    out = value.new_empty(batch_heads, q_len, value.shape[2]) if out is None else out
    torch.index_select(result.flatten(0, 1), 0, rank.flatten(), out=out.view(-1, value.shape[2]))
    return out
