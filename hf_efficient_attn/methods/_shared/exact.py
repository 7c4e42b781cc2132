"""Exact attention in place of a method."""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_efficient_attn.methods._shared.heads import flatten_heads, unflatten_heads
from hf_efficient_attn.methods._shared.registry import AttentionOptions
from hf_efficient_attn.ops.exact import exact_attention


def exact_form(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Exact attention: PyTorch's own where it takes the mask and needs no memory for all pairs.

    Args:
        query: (B, H, Nq, D).
        key: (B, H, Nk, D).
        value: (B, H, Nk, Dv).
        options: of the call.

    Returns:
        (B, H, Nq, Dv).
    """
    mask, scale, dropout_p = options.key_mask, options.scale, options.dropout_p
    if dropout_p > 0.0 or (mask is not None and options.is_causal) or query.shape[3] != value.shape[3]:
        flat = flatten_heads(query, key, value, mask)
        out = exact_attention(*flat, is_causal=options.is_causal, scale=scale, dropout_p=dropout_p)
        return unflatten_heads(out, query.shape)
    if mask is None:
        return scaled_dot_product_attention(query, key, value, is_causal=options.is_causal, scale=scale)
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None], scale=scale)
    some = mask.any(1)
    return out if bool(some.all()) else out.masked_fill(~some[:, None, None, None], 0.0)
