"""The causal form of a method with a weighted coreset, for inputs with heads and a key mask."""

from torch import Tensor

from hf_efficient_attn.methods._shared.config import MethodConfig
from hf_efficient_attn.methods._shared.heads import flatten_heads, unflatten_heads
from hf_efficient_attn.methods._shared.registry import AttentionOptions
from hf_efficient_attn.ops.coreset_causal import (
    CausalCoresetOptions,
    causal_coreset_attention,
    causal_coreset_naive,
    split_columns,
)
from hf_efficient_attn.ops.exact import exact_attention, exact_decode
from hf_efficient_attn.ops.tokens import move_valid_first, restore_order


def forward_causal(columns: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Causal attention with about `columns` keys per query; see `register_method` for the other arguments."""
    shape, scale, dropout_p = query.shape, options.scale, options.dropout_p
    flat = flatten_heads(query, key, value, options.key_mask)
    if shape[2] <= columns:
        return unflatten_heads(exact_attention(*flat, is_causal=True, scale=scale, dropout_p=dropout_p), shape)
    query, key, value, order = move_valid_first(*flat)
    chosen = CausalCoresetOptions(**split_columns(columns), seed=options.seed)
    out = causal_coreset_attention(query, key, value, chosen, scale=scale, dropout_p=dropout_p)
    return unflatten_heads(restore_order(out, order, flat.key_mask), shape)


def naive_causal(columns: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """The readable form of `forward_causal`."""
    shape = query.shape
    flat = flatten_heads(query, key, value, options.key_mask)
    query, key, value, order = move_valid_first(*flat)
    chosen = CausalCoresetOptions(**split_columns(columns), seed=options.seed)
    out = causal_coreset_naive(query, key, value, chosen, scale=options.scale)
    return unflatten_heads(restore_order(out.to(value.dtype), order, flat.key_mask), shape)


def decode_exactly(
    config: MethodConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """Decode a few tokens with exact attention to all cached keys."""
    return exact_decode(query, key, value, options.key_mask, scale=options.scale, dropout_p=options.dropout_p)
