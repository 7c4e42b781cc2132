"""A near field and random features of the other keys on an accelerator, in a few calls of fused kernels.

The form of `hf_efficient_attn.methods.scatterbrain` there. All biases are further dimensions of queries and keys (see
`hf_efficient_attn.ops.bias_columns`), so that no call copies its keys. After the D dimensions of a token there are

    of a key k_j             n   n'  m   0   0   0      n + n' = -|k_j|^2 / 2 for the features; m excludes a masked key
    of a query q_i           0   0   1   1   c   c'     c + c' = the log of the factor exp(-|q_i|^2 / 2) / F
    of a feature as a query  1   1   1   0   0   0
    of a feature as a key    0   0   b   b'  1   1      b + b' = its lse over the keys that it represents

up to the scale. A number is the sum of two of the dtype of the keys.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.bias_columns import lse_columns, most_negative, padded_dim, with_square
from hf_efficient_attn.ops.block_states import merge_other_blocks
from hf_efficient_attn.ops.blocks import pad_to_blocks, take
from hf_efficient_attn.ops.constants import constant
from hf_efficient_attn.ops.features import softmax_features
from hf_efficient_attn.ops.fused_attention import column_unit
from hf_efficient_attn.ops.merged_attention import (
    Part,
    attention_with_lse,
    empty_score,
    merged_attention,
    needs_gradient,
)
from hf_efficient_attn.ops.partial import Partial
from hf_efficient_attn.ops.random import Seed

_COLUMNS = 6


class Features(NamedTuple):
    """The features of a far field, and how queries attend to them.

    Attributes:
        number: F.
        seed: seed of the features.
        scale: factor of the scores, not 0.
        dropout_p: probability of dropping a weight.
    """

    number: int
    seed: Seed
    scale: float
    dropout_p: float


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masked: Tensor | None,
    key_block: Tensor | None,
    features: Features,
) -> Tensor:
    """Each block of queries attends to a block of keys exactly, and to the features of all other blocks.

    Args:
        query: (BH, T, S, D).
        key: (BH, T, S, D).
        value: (BH, T, S, Dv).
        masked: bool (BH or 1, T, S), the masked keys, or None.
        key_block: int64 (BH, T), the block of keys of each block of queries, or None if it is the same.
        features: the far field.

    Returns:
        (BH, T * S, Dv). The output of a query whose keys are all masked is finite.
    """
    (head_dim, value_dim), dim = (key.shape[3], value.shape[3]), _dim(key, value)
    exclusion = None
    if masked is not None:
        exclusion = torch.zeros(masked.shape, dtype=key.dtype, device=key.device)
        exclusion = exclusion.masked_fill_(masked, most_negative(key.dtype)).unsqueeze(3)
    keys, values = _keys(key, dim, exclusion, features.scale), pad(value, (0, dim - value_dim))
    rows = _feature_rows(key, dim, features)
    state = attention_with_lse(_of_blocks(rows[0], keys), keys, values, value_dim, abs(features.scale))
    state = merge_other_blocks(state, earlier_only=False, mark_empty=False)
    if key_block is not None:
        keys, values, out = (take(x.flatten(2), key_block).unflatten(2, x.shape[2:]) for x in (keys, values, state.out))
        state = Partial(out, take(state.lse, key_block))

    def parts(state: Partial, queries: Tensor) -> Iterator[Part]:
        yield _feature_part(queries, rows[1], state, head_dim, features.scale)
        del state
        yield Part(queries, keys, values)

    both = parts(state, _queries(query, dim, features))
    del state
    return _attend(both, features, needs_gradient(query, key, value))[..., :value_dim]


def causal_block_attention(query: Tensor, key: Tensor, value: Tensor, size: int, features: Features) -> Tensor:
    """Attention to the own block up to the query, the block before it, and the features of the blocks before those.

    Args:
        query: (BH, N, D).
        key: (BH, N, D).
        value: (BH, N, Dv).
        size: tokens of a block.
        features: the far field.

    Returns:
        (BH, N, Dv).
    """
    (_, length, value_dim), head_dim, dim = value.shape, key.shape[2], _dim(key, value)
    blocks = pad_to_blocks(query, size)
    num_blocks = blocks.shape[1]
    # A masked block before the first one. With it, block t has the features of the blocks before t.
    missing = num_blocks * size - length
    exclusion = constant(_excluded_first, num_blocks + 1, key.dtype, device=key.device)
    keys = _keys(pad(key, (0, 0, size, missing)).unflatten(1, (-1, size)), dim, exclusion, features.scale)
    padding = 0, dim - value_dim, size, missing
    rows = _feature_rows(key, dim, features)
    bias = constant(_causal_bias, size, query.dtype, device=query.device)

    def state() -> Partial:
        earlier = keys[:, :-1], pad(value, padding).unflatten(1, (-1, size))[:, :-1]
        return attention_with_lse(_of_blocks(rows[0], earlier[0]), *earlier, value_dim, abs(features.scale))

    def parts(queries: Tensor) -> Iterator[Part]:
        states = merge_other_blocks(state(), earlier_only=True, mark_empty=False)
        yield _feature_part(queries, rows[1], states, head_dim, features.scale)
        del states
        near = [x.unfold(1, 2 * size, size).transpose(2, 3) for x in (keys.flatten(1, 2), pad(value, padding))]
        yield Part(queries, near[0], near[1], bias)

    queries = _queries(blocks, dim, features)
    return _attend(parts(queries), features, needs_gradient(query, key, value))[:, :length, :value_dim]


def _attend(parts: Iterator[Part], features: Features, needs_grad: bool) -> Tensor:
    return merged_attention(parts, scale=features.scale, needs_grad=needs_grad, dropout_p=features.dropout_p)


def _dim(key: Tensor, value: Tensor) -> int:
    """The dimension of queries, keys and values with the further ones."""
    return padded_dim(key.shape[-1], value.shape[-1] + 2, _COLUMNS)


def _of_blocks(x: Tensor, like: Tensor) -> Tensor:
    """(F, D) for every block of (BH, T, ., .), as a view."""
    return x.expand(*like.shape[:2], -1, -1)


def _keys(key: Tensor, dim: int, exclusion: Tensor | None, scale: float) -> Tensor:
    """Keys (BH, T, S, D) with further dimensions. `exclusion` (., ., ., 1) is very negative for masked keys."""
    dtype, rest = key.dtype, dim - key.shape[3] - 2
    zeros = constant(_zeros, rest, dtype, device=key.device)
    after = zeros if exclusion is None else pad(exclusion, (0, rest - 1)).expand(*key.shape[:3], -1)
    return with_square(key, -0.5 / abs(column_unit(dtype, scale)), 0.0, zeros[:0], after)


def _queries(query: Tensor, dim: int, features: Features) -> Tensor:
    """Queries (BH, T, S, D) with further dimensions."""
    scale, dtype = features.scale, query.dtype
    factor = scale * column_unit(dtype, scale)
    before = constant(_query_columns, dtype, scale, device=query.device)
    after = constant(_zeros, dim - query.shape[3] - _COLUMNS, dtype, device=query.device)
    return with_square(query, -0.5 * abs(scale) / factor, -math.log(features.number) / factor, before, after)


def _feature_part(queries: Tensor, rows: Tensor, state: Partial, head_dim: int, scale: float) -> Part:
    """The queries with the features as keys, whose rows are without their lse."""
    rows, columns = _of_blocks(rows, queries), lse_columns(state.lse, queries.dtype, scale)
    keys = torch.cat((rows[..., : head_dim + 2], columns, rows[..., head_dim + 4 :]), 3)
    return Part(queries, keys, state.out)


def _feature_rows(key: Tensor, dim: int, features: Features) -> Tensor:
    """The features as queries and as keys: (2, F, `dim`)."""
    sizes = features.number, key.shape[-1], dim, features.seed, key.dtype, features.scale
    return constant(_rows, *sizes, device=key.device)


def _rows(
    number: int, head_dim: int, dim: int, seed: Seed, dtype: torch.dtype, scale: float, device: torch.device
) -> Tensor:
    directions = softmax_features(number, head_dim, seed, device) / abs(scale) ** 0.5
    rows, unit = pad(directions, (0, dim - head_dim)).repeat(2, 1, 1), column_unit(dtype, scale)
    rows[0, :, head_dim : head_dim + 3] = abs(unit)
    rows[1, :, head_dim + 4 : head_dim + 6] = unit
    return rows.to(dtype)


def _query_columns(dtype: torch.dtype, scale: float, device: torch.device) -> Tensor:
    return torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=dtype, device=device) * column_unit(dtype, scale)


def _zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=dtype, device=device)


def _excluded_first(num_blocks: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The exclusion of all keys of the first block: (1, T, 1, 1)."""
    first = torch.arange(num_blocks, device=device).view(1, -1, 1, 1) == 0
    return torch.zeros(first.shape, dtype=dtype, device=device).masked_fill_(first, most_negative(dtype))


def _causal_bias(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The bias of the queries of a block for the keys of the block before and of their own: (1, 1, S, 2 S)."""
    excluded = torch.ones(size, 2 * size, dtype=torch.bool, device=device).triu(size + 1)
    return torch.zeros(1, 1, size, 2 * size, dtype=dtype, device=device).masked_fill_(excluded, empty_score(dtype))
