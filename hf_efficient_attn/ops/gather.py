"""Attention of blocks of queries to keys that are selected by index, with log-weights."""

import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.attend import attend
from hf_efficient_attn.ops.blocks import inverse, pad_to_blocks, take, take_both
from hf_efficient_attn.ops.slices import slice_size, sliced

# Numbers of a query, key or value that the Triton kernels hold at most.
_LARGEST_DIM = 256
_HAS_TRITON = importlib.util.find_spec("triton") is not None


class GatheredKeys(NamedTuple):
    """The keys of each of T blocks of queries, by index.

    Attributes:
        key_index: int64 (BH, T, K).
        bias: (BH, T, 1, K), added to the scores.
        block_q: queries of a block.
        query_order: int64 (BH, Nq), the order in which the queries are cut into blocks, or None.
    """

    key_index: Tensor
    bias: Tensor
    block_q: int
    query_order: Tensor | None = None


def gathered_attention(
    query: Tensor, key: Tensor, value: Tensor, gathered: GatheredKeys, *, scale: float, dropout_p: float = 0.0
) -> Tensor:
    """Attention of blocks of queries to keys that are gathered by index.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        value: (BH, Nk, Dv).
        gathered: the keys of each block.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        (BH, Nq, Dv), by position of the queries.
    """
    index, bias, block_q, order = gathered
    if not dropout_p and kernel_applies(query, key, value):
        from hf_efficient_attn.ops.triton_gather import gather_attend  # Triton is no dependency

        return gather_attend(query, key, value, index, bias.squeeze(2).float(), order, block_q, scale)[0]

    def some_heads(blocks: Tensor, key: Tensor, value: Tensor, index: Tensor, bias: Tensor) -> Tensor:
        return attend(blocks, *take_both(key, value, index), bias, scale=scale, dropout_p=dropout_p).out

    blocks = pad_to_blocks(query if order is None else take(query, order), block_q)
    size = slice_size(index[0].numel() * max(key.shape[2], value.shape[2]), query.device)
    out = sliced(some_heads, blocks, key, value, index, bias, size=size, draws=dropout_p > 0.0).flatten(1, 2)
    return out[:, : query.shape[1]] if order is None else take(out, inverse(order))


def kernel_applies(*tensors: Tensor) -> bool:
    """Whether the Triton kernels compute attention of these tensors: on probation until they are measured.

    They take up to 256 dimensions on CUDA devices of compute capability 8.0 and later, but no float64 and no transform
    of `torch.func`. They add gradients in any order.
    """
    if not (_HAS_TRITON and all(x.is_cuda and x.dtype != torch.float64 for x in tensors)):
        return False
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if needs_grad and torch.are_deterministic_algorithms_enabled():
        return False
    is_small = max(x.shape[2] for x in tensors) <= _LARGEST_DIM
    return is_small and torch.cuda.get_device_capability(tensors[0].device) >= (8, 0)
