"""Attention of blocks of queries to keys that are gathered by index."""

from typing import NamedTuple

from torch import Tensor

from hf_efficient_attn.ops.attend import attend, keeps_pairs, triton_applies
from hf_efficient_attn.ops.index import inverse, pad_to_blocks, take
from hf_efficient_attn.ops.slices import slice_size, sliced


class GatheredKeys(NamedTuple):
    """The indices of the keys of each of T blocks of queries.

    Attributes:
        key_index: int64 (BH, T, K).
        bias: (BH, T, 1 or block_q, K), added to the scores.
        block_q: the number of queries of a block.
        query_order: int64 (BH, Nq), the order in which the queries are cut into blocks, or None.
    """

    key_index: Tensor
    bias: Tensor
    block_q: int
    query_order: Tensor | None = None


def gathered_attention(
    query: Tensor, key: Tensor, value: Tensor, gathered: GatheredKeys, *, scale: float, dropout_p: float = 0.0
) -> Tensor:
    """Compute attention of blocks of queries to keys that are gathered by index.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        value: (BH, Nk, Dv).
        gathered: the keys of each block.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        (BH, Nq, Dv), in the order of the query positions.
    """
    index, bias, block_q, order = gathered
    if bias.shape[2] == 1 and not dropout_p and triton_applies(query, key, value):
        from hf_efficient_attn.ops.backends.triton_gather import gather_attend  # Triton is no dependency

        return gather_attend(query, key, value, index, bias.squeeze(2).float(), order, block_q, scale)[0]

    def some_heads(blocks: Tensor, key: Tensor, value: Tensor, index: Tensor, bias: Tensor) -> Tensor:
        # (BH, T, block_q, Dv)
        return attend(blocks, take(key, index), take(value, index), bias, scale=scale, dropout_p=dropout_p).out

    blocks = pad_to_blocks(query if order is None else take(query, order), block_q)  # (BH, T, block_q, D)
    pairs = block_q if keeps_pairs(blocks, key[:, None], bias, scale, dropout_p) else 0
    size = slice_size(index[0].numel() * max(key.shape[2], value.shape[2], pairs), query.device)
    # (BH, T * block_q, Dv)
    out = sliced(some_heads, blocks, key, value, index, bias, size=size, draws=dropout_p > 0.0).flatten(1, 2)
    return out[:, : query.shape[1]] if order is None else take(out, inverse(order))
