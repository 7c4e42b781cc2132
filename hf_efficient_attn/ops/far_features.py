"""The far field of linear attention beside a window: sums of features over all keys outside of it.

Query i attends to the keys up to i - d, and in the bidirectional form also to those from i + d on, where d is the
smallest distance of a far key. This is the causal form of linear attention with keys that are moved by d tokens, once
in each direction. Nothing is subtracted, so rounding cannot make a weight negative.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.export import exporting_to_onnx
from hf_efficient_attn.ops.linear_attention import (
    CHUNK,
    LinearState,
    causal_linear_sums,
    normalize,
    sums_of_chunks,
    tokens_at_a_time,
)
from hf_efficient_attn.ops.partial import Partial, accumulation_dtype, merge


class Features(NamedTuple):
    """How features are computed, in the dtype of products.

    Attributes:
        of_query: features (BH, N, F) of queries (BH, N, D), and the log of a factor of their weights, (BH, N) or a
            shape that is broadcastable to it.
        of_key: features (BH, N, F) of keys (BH, N, D), 0 where the mask (BH or 1, N) is False if there is one.
    """

    of_query: Callable[[Tensor], tuple[Tensor, Tensor]]
    of_key: Callable[[Tensor, Tensor | None], Tensor]


class Tokens(NamedTuple):
    """Query (BH, N, D), key (BH, N, D), value (BH, N, Dv) and their mask, bool (BH or 1, N) or None."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None


def features_beyond(
    tokens: Tokens,
    features: Features,
    distance: int,
    *,
    is_causal: bool,
    dropout_p: float = 0.0,
    initial_state: LinearState | None = None,
) -> Partial:
    """Attention by features to the keys at a distance of at least `distance`.

    Args:
        tokens: queries, keys and values.
        features: of queries and keys.
        distance: between a query and the next far key, at least 1.
        is_causal: whether later keys are excluded.
        dropout_p: probability of dropping a feature of a query.
        initial_state: the sums over earlier tokens, which are far for every query; None if there are none.

    Returns:
        Partial of out (BH, N, Dv) and lse (BH, N).
    """
    phi_q, log_factor = features.of_query(tokens.query)
    phi_k = features.of_key(tokens.key, tokens.key_mask)
    value = tokens.value.to(phi_k.dtype)
    moved = _later(phi_k, distance), _later(value, distance)
    sums, total = causal_linear_sums(phi_q, *moved, dropout_p, initial_state)
    if not is_causal:
        moved = _later(phi_k.flip(1), distance), _later(value.flip(1), distance)
        of_later = causal_linear_sums(phi_q.flip(1), *moved, dropout_p)
        sums, total = sums + of_later[0].flip(1), total + of_later[1].flip(1)
    far = as_partial(sums, total)
    return Partial(far.out, far.lse + log_factor)


def buffered_merge_beyond(
    near: Partial,
    tokens: Tokens,
    features: Features,
    distance: int,
    *,
    is_causal: bool,
    initial_state: LinearState | None = None,
) -> Tensor:
    """The merge of a partial with `features_beyond`, without a gradient: (BH, N, Dv), in the memory of the partial.

    A block of tokens at a time, so that features and sums stay in the CPU's cache. The initial state is seen by the
    queries that have a far key.
    """
    near = _merge_one_side(near, tokens, features, distance, initial_state)
    if not is_causal:
        near = _merge_one_side(near, tokens, features, distance, None, later=True)
    return near.out


def _merge_one_side(
    near: Partial,
    tokens: Tokens,
    features: Features,
    distance: int,
    initial_state: LinearState | None,
    *,
    later: bool = False,
) -> Partial:
    """Merge with the features of the keys before, or with those after, in reversed order."""
    (batch_heads, length), value_dim = near.lse.shape, tokens.value.shape[2]
    count = length - distance
    # Query i + distance and key i, counted from the end in the reversed order.
    query, key, value = tokens.query[:, distance:], tokens.key[:, :count], tokens.value[:, :count]
    mask = None if tokens.key_mask is None else tokens.key_mask[:, :count]
    out, lse = near.out[:, distance:], near.lse[:, distance:]
    if later:
        query, key, value = tokens.query[:, :count], tokens.key[:, distance:], tokens.value[:, distance:]
        mask = None if tokens.key_mask is None else tokens.key_mask[:, distance:]
        out, lse = near.out[:, :count], near.lse[:, :count]
    num_features = features.of_key(key[:, :1], None).shape[2]
    size, acc_dtype = min(CHUNK, count), accumulation_dtype(value.dtype)
    if initial_state is None:
        sums = near.lse.new_zeros(batch_heads, 1, num_features, value_dim, dtype=acc_dtype)
        before = sums, near.lse.new_zeros(batch_heads, 1, 1, num_features, dtype=acc_dtype)
    else:
        before = initial_state.products[:, None].to(acc_dtype), initial_state.norm[:, None, None].to(acc_dtype)
    block = tokens_at_a_time(batch_heads, size, num_features)
    for start in range(0, count, block):
        end = min(start + block, count)
        some = slice(count - end, count - start) if later else slice(start, end)
        rows, own_mask = [x[:, some] for x in (query, key, value)], None if mask is None else mask[:, some]
        if later:
            rows, own_mask = [x.flip(1) for x in rows], None if own_mask is None else own_mask.flip(1)
        phi_q, log_factor = features.of_query(rows[0])
        phi_k = features.of_key(rows[1], own_mask)
        sums, total, before = sums_of_chunks(phi_q, phi_k, rows[2].to(phi_k.dtype), size, before)
        far = as_partial(*(x.flatten(1, 2)[:, : end - start] for x in (sums, total)))
        far = Partial(far.out, far.lse + log_factor)
        if later:
            far = Partial(*(x.flip(1) for x in far))
        out[:, some], lse[:, some] = merge(Partial(out[:, some], lse[:, some]), far)
    return near


def as_partial(sums: Tensor, total: Tensor) -> Partial:
    """The partial of sums of values (..., Dv) and of weights (..., 1), which may be changed."""
    lse = log_total(total.squeeze(-1))
    return Partial(normalize(sums, total), lse)


def log_total(total: Tensor) -> Tensor:
    """The log of sums of weights (...), -inf for 0. As in `normalize`, no gradient passes through tiny sums."""
    total = total.to(accumulation_dtype(total.dtype))
    if total.requires_grad:
        total = torch.where(total < torch.finfo(total.dtype).tiny ** 0.8, total.detach(), total)
    empty = total == 0
    return total.masked_fill(empty, 1.0).log().masked_fill(empty, -torch.inf)


def _later(x: Tensor, distance: int) -> Tensor:
    """Tokens (BH, N, .) moved to positions that are `distance` later. Zeros come before them."""
    if exporting_to_onnx():  # N is unknown, and may be less than the distance
        return pad(x, (0, 0, distance, 0))[:, : x.shape[1]]
    return pad(x, (0, 0, distance, -distance))
