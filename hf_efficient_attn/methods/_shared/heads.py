"""Batch rows and heads as one dimension, which is how the primitives in `hf_efficient_attn.ops` take their inputs."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.registry import AttentionOptions
from hf_efficient_attn.ops.exact import exact_attention, exact_decode


class FlatHeads(NamedTuple):
    """Query (BH, Nq, D), key (BH, Nk, D), value (BH, Nk, Dv) and key mask, bool (BH, Nk) or None; BH = B * H."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None


def flatten_heads(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> FlatHeads:
    """Flatten (B, H, N, .) tensors to (B * H, N, .) and repeat the key mask (B, Nk) for every head."""
    flat_mask = None if key_mask is None else key_mask.repeat_interleave(key.shape[1], 0)
    return FlatHeads(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), flat_mask)


def unflatten_heads(x: Tensor, shape: torch.Size) -> Tensor:
    """Inverse of `flatten_heads` for an output: (B * H, N, .) -> (B, H, N, .), for a shape that starts with B, H."""
    out: Tensor = x.unflatten(0, shape[:2])
    return out


def by_heads(
    form: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    exact_length: int = 0,
) -> Tensor:
    """A form of `FlatHeads`, or exact attention to up to `exact_length` keys, as (B, H, Nq, Dv)."""
    if key.shape[2] <= exact_length:
        return exactly(query, key, value, options)
    return unflatten_heads(form(*flatten_heads(query, key, value, options.key_mask)), query.shape)


def exactly(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Exact attention, by the same computation as the methods' own."""
    flat, (scale, dropout_p) = flatten_heads(query, key, value, options.key_mask), (options.scale, options.dropout_p)
    out = exact_attention(*flat, is_causal=options.is_causal, scale=scale, dropout_p=dropout_p)
    return unflatten_heads(out, query.shape)


def decode_exactly(config: object, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Decode a few tokens with exact attention to all cached keys, which costs as much as reading the cache."""
    return exact_decode(query, key, value, options.key_mask, scale=options.scale, dropout_p=options.dropout_p)
