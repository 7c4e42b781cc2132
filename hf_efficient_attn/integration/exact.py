"""Exact attention for the layers that keep it, with a (B, Nk) mask and without an (Nq, Nk) tensor."""

from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.ops.attend import with_sinks
from hf_efficient_attn.ops.exact import biased_exact, scaled_dot_product_attention

# Queries for which one mask is built at a time.
_BLOCK_Q = 256


def exact_layer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    *,
    distance_bias: Tensor | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """softmax(scale * query key^T) value by PyTorch's kernel. Without a mask it is bit-identical to `sdpa`.

    The arguments are those of `hf_efficient_attn.methods.attention`, `key_mask` being its mask of the keys, and
    `options` is_causal, scale and dropout_p. `window` is the number of keys to which a query attends, its own included:
    the last ones, or, if not causal, so many on each side. None is for all keys. `sinks` are those of `attention`.
    The output (B, H, Nq, Dv) is 0 for queries that have no key to attend to.
    """
    q_len, kv_len = query.shape[2], key.shape[2]
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if key_mask is not None:
        masked = ~key_mask[:, None, :, None]
        key, value = key.masked_fill(masked, 0.0), value.masked_fill(masked, 0.0)
    if distance_bias is not None or sinks is not None:
        options["scale"] = query.shape[3] ** -0.5 if options["scale"] is None else options["scale"]
        options |= {"window": window, "with_lse": sinks is not None}
        out = biased_exact(query, key, value, distance_bias, key_mask, **options)
        return out if sinks is None else with_sinks(out, sinks).to(value.dtype)
    is_causal = options.pop("is_causal") and q_len > 1
    window = None if window is None or window >= kv_len else window
    if key_mask is None and window is None and (not is_causal or q_len == kv_len):
        return scaled_dot_product_attention(query, key, value, is_causal=is_causal, **options)
    if key_mask is None:
        key_mask = torch.ones(1, kv_len, dtype=torch.bool, device=query.device)
    if not is_causal and window is None:
        return _masked_attention(query, key, value, key_mask[:, None, None], options)
    outs, offset = [], kv_len - q_len
    left = kv_len if window is None else window - 1  # keys before a query
    right = 0 if is_causal else left
    for start in range(0, q_len, _BLOCK_Q):
        position = torch.arange(start, min(start + _BLOCK_Q, q_len), device=query.device)[:, None] + offset
        keys = slice(max(0, offset + start - left), min(kv_len, offset + start + len(position) + right))
        distance = torch.arange(keys.start, keys.stop, device=query.device) - position  # (block_q, Nk)
        pairs = key_mask[:, None, None, keys] & (distance >= -left) & (distance <= right)
        block = query[:, :, start : start + _BLOCK_Q]
        outs.append(_masked_attention(block, key[:, :, keys], value[:, :, keys], pairs, options))
    return torch.cat(outs, 2)


def _masked_attention(query: Tensor, key: Tensor, value: Tensor, pairs: Tensor, options: dict[str, Any]) -> Tensor:
    """Torch's attention over the pairs in a bool mask (B, 1, Nq or 1, Nk); 0 for queries without a key."""
    empty = ~pairs.any(-1, keepdim=True)
    # The softmax over no keys is NaN. Such queries attend to all keys instead, and their output is set to 0.
    return scaled_dot_product_attention(query, key, value, attn_mask=pairs | empty, **options).masked_fill(empty, 0.0)
