"""Exact attention for the layers that keep it, with a (B, Nk) mask and without an (Nq, Nk) tensor."""

from typing import Any

from torch import Tensor

from hf_efficient_attn.ops.attend import with_sinks
from hf_efficient_attn.ops.exact import biased_exact, scaled_dot_product_attention


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
    window = None if window is None or window >= kv_len else window
    is_causal = options["is_causal"] and q_len > 1
    is_plain = distance_bias is None and sinks is None and window is None
    if is_plain and key_mask is None and (not is_causal or q_len == kv_len):
        return scaled_dot_product_attention(query, key, value, **{**options, "is_causal": is_causal})
    if is_plain and key_mask is not None and not is_causal:
        pairs, empty = key_mask[:, None, None], ~key_mask.any(1)[:, None, None, None]  # (B, 1, 1, Nk or 1)
        options["is_causal"] = False
        # The softmax over no keys is NaN. Such queries attend to all keys instead, and their output is set to 0.
        out = scaled_dot_product_attention(query, key, value, attn_mask=pairs | empty, **options)
        return out.masked_fill(empty, 0.0)
    options["scale"] = query.shape[3] ** -0.5 if options["scale"] is None else options["scale"]
    options |= {"window": window, "with_lse": sinks is not None}
    out = biased_exact(query, key, value, distance_bias, key_mask, **options)
    return out if sinks is None else with_sinks(out, sinks).to(value.dtype)
