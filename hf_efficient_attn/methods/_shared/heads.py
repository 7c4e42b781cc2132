"""Batch rows and heads flattened into one dimension, as the primitives in `hf_efficient_attn.ops` take them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.config import AttentionOptions
from hf_efficient_attn.ops.attend import attend
from hf_efficient_attn.ops.backends.devices import accumulation_dtype, joined, may_hold, rounded
from hf_efficient_attn.ops.distance import Bias
from hf_efficient_attn.ops.draws import seed_value
from hf_efficient_attn.ops.exact import biased_exact, exact_attention, scaled_dot_product_attention
from hf_efficient_attn.ops.index import integers, inverse, take, valid_first
from hf_efficient_attn.ops.slices import with_zero_gradients


def by_heads(
    form: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    exact_length: int = 0,
    *,
    moves_valid_first: bool = False,
) -> Tensor:
    """Compute attention (B, H, Nq, Dv) by a form of flat heads, or exactly for up to `exact_length` keys.

    For query (B, H, Nq, D), key (B, H, Nk, D) and value (B, H, Nk, Dv), form(query, key, value, key_mask) returns
    (BH, Nq, Dv) for (BH, Nq, D), (BH, Nk, D), (BH, Nk, Dv) and the mask, bool (BH, Nk) or None. With
    `moves_valid_first`, for self-attention only, it gets valid tokens before masked tokens, so that blocks begin at the
    first valid token, and no mask.
    """
    if key.shape[2] <= exact_length:
        return exactly(query, key, value, options)
    shape = query.shape
    query, key, value, mask = _flatten(query, key, value, options.key_mask)  # (BH, N, .), (BH, Nk)
    if not moves_valid_first:
        return torch.unflatten(form(query, key, value, mask), 0, shape[:2])
    if mask is None:
        return torch.unflatten(rounded(form(query, key, value), _dtype(value, options)), 0, shape[:2])
    order = valid_first(mask)  # (BH, N)
    masked = ~mask[:, :, None]  # (BH, N, 1)
    # A masked query may be NaN, unlike a masked key or value, and shares a block with other queries.
    query, key, value = (take(x, order) for x in (query.masked_fill(masked, 0.0), key, value))  # (BH, N, .) each
    out = take(rounded(form(query, key, value), _dtype(value, options)), inverse(order))  # (BH, N, Dv)
    return torch.unflatten(out.masked_fill(masked, 0.0), 0, shape[:2])


def without_padding(
    form: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    exact_length: int = 0,
    query_mask: Tensor | None = None,
) -> Tensor:
    """Call a form, as `by_heads` does, once for all sequences with the same number of valid tokens; 0 for padding.

    So masked tokens take no part, and a sequence has the same output in every batch. Without `query_mask`, bool
    (B, Nq), the mask of the keys is also the mask of the queries if there are as many. The form need not compute
    sequences of up to `exact_length` keys. With a bias by distance it gets a `Bias` as well.
    """
    table = options.distance_bias
    call: dict[str, Any] = {"scale": options.scale, "dropout_p": options.dropout_p}

    def form_of_length(query: Tensor, key: Tensor, value: Tensor, *bias: Bias) -> Tensor:
        if key.shape[1] > exact_length:
            return rounded(form(query, key, value, *bias), _dtype(value, options))
        if not bias:
            return exact_attention(query, key, value, is_causal=False, with_lse=options.with_lse, **call)
        return attend(query[:, None], key[:, None], value[:, None], bias[0].of_pairs()[:, None], **call).out[:, 0]

    def of_all_lengths(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:  # (BH, N, .)
        bias = []
        if table is not None:
            positions = (integers(x.shape[1], x.device)[None] for x in (query, key))  # (1, N) each
            tables = table.to(accumulation_dtype(key.dtype)).repeat(len(query) // len(table), 1)  # (BH, 2R + 1)
            bias.append(Bias(tables, *positions))
        if mask is None and query_mask is None:
            return form_of_length(query, key, value, *bias)
        valid = torch.ones_like(key[..., 0], dtype=torch.bool) if mask is None else mask  # (BH, Nk)
        valid_query = valid if query.shape[1] == key.shape[1] else torch.ones_like(query[..., 0], dtype=torch.bool)
        if query_mask is not None:
            valid_query = query_mask.repeat_interleave(len(query) // len(query_mask), 0)  # (BH, Nq)
        counts = torch.stack((valid_query.sum(1), valid.sum(1)), 1)  # (BH, 2)
        found = counts.unique(dim=0).tolist()
        if found == [[query.shape[1], key.shape[1]]]:
            return form_of_length(query, key, value, *bias)
        # (BH, Nq, Dv)
        out = value.new_zeros(*query.shape[:2], value.shape[2] + options.with_lse, dtype=_dtype(value, options))
        if all(0 in count for count in found):
            return with_zero_gradients(out, query, key, value, table)
        for count in found:
            if 0 not in count:
                some = (counts == counts.new_tensor(count)).all(1).nonzero()[:, 0]  # (heads,)
                # (heads, n) each, with n valid tokens
                orders = [valid_first(x[some])[:, :n] for x, n in zip((valid_query, valid), count, strict=True)]
                own: list[Any] = [take(x[some], orders[i]) for i, x in ((0, query), (1, key), (1, value))]
                own += [Bias(one.table[some], *orders) for one in bias]
                out = out.index_put((some[:, None], orders[0]), form_of_length(*own))  # (BH, Nq, Dv)
        return out

    return by_heads(of_all_lengths, query, key, value, options, exact_length)


def exactly(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Compute exact attention (B, H, Nq, Dv), by PyTorch's function if that takes the mask and stores no pairs."""
    mask, is_causal, scale, dropout_p = options[:4]
    with_lse = options.with_lse
    call: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "dropout_p": dropout_p, "with_lse": with_lse}
    if options.distance_bias is not None:
        return biased_exact(query, key, value, options.distance_bias, mask, **call)
    # PyTorch's causal kernel gives NaN unless the scale is positive.
    if with_lse or dropout_p or (is_causal and (mask is not None or scale <= 0.0)) or query.shape[3] != value.shape[3]:
        flat = _flatten(query, key, value, mask)
        return torch.unflatten(exact_attention(*flat, **call), 0, query.shape[:2])  # (B, H, Nq, Dv)
    if mask is None:
        return scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale)
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None], scale=scale)  # (B, H, Nq, Dv)
    empty = ~mask.any(1)  # (B,)
    return out.masked_fill(empty[:, None, None, None], 0.0) if may_hold(empty) else out


def decode_exactly(config: object, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Decode a few tokens with exact attention to all cached keys, which costs as much as reading the cache."""
    if query.shape[2] == 1 and options.key_mask is None and options.distance_bias is None:  # it attends to every key
        return exactly(query, key, value, options._replace(is_causal=False))
    call: dict[str, Any] = {"scale": options.scale, "dropout_p": options.dropout_p, "with_lse": options.with_lse}
    return biased_exact(query, key, value, None, options.key_mask, is_causal=True, **call)


def is_training(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> bool:
    """Whether a call is a step of training, in which no form may depend on the data.

    Reentrant checkpointing first computes without a gradient. A drawn seed, or dropout, still shows training.
    """
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    return needs_grad or options.dropout_p > 0.0 or isinstance(seed_value(options.seed), Tensor)


def _dtype(value: Tensor, options: AttentionOptions) -> torch.dtype:
    """The dtype of the output of a form."""
    return accumulation_dtype(value.dtype) if options.with_lse else value.dtype


def _flatten(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Flatten (B, H, N, .) tensors to (B * H, N, .) and repeat the key mask (B, Nk) for every head."""
    flat_mask = None if key_mask is None else key_mask.repeat_interleave(key.shape[1], 0)  # (BH, Nk)
    return joined(query.flatten(0, 1)), joined(key.flatten(0, 1)), joined(value.flatten(0, 1)), flat_mask
