"""The mask function of every method: it hands the padding over as (B, Nk) and refuses what is not padding.

Transformers describes a mask by a function of four indices and builds (B, 1, Nq, Nk) from it. Here causality is the
attention function's affair (`module.is_causal`), padding is a row of keys, and any other pattern cannot be kept.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.errors import UnsupportedAttentionError

_PATTERN = (
    "the mask is not plain causal or full attention (packed sequences, a local window, blocks or a prefix), which "
    "sub-quadratic attention cannot keep: pad the sequences instead of packing them, or use attn_implementation='sdpa'"
)


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function=causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: "torch.device | str" = "cpu",
    **kwargs,
) -> Tensor | None:
    """As Transformers calls it -> bool (B, kv_length), True = attend, or None where there is no padding.

    Raises:
        UnsupportedAttentionError: packed sequences, a local window shorter than the keys, any other pattern, a static
            cache, a mask of keys that is not 2-D.
    """
    # Only the makers of bidirectional masks say whether theirs may be skipped.
    causal = "allow_is_bidirectional_skip" not in kwargs
    if causal and (isinstance(q_offset, Tensor) or kv_offset + kv_length != q_offset + q_length):
        raise UnsupportedAttentionError(
            "the keys do not end with the queries, as in a static key-value cache: use the ordinary dynamic cache "
            "(leave cache_implementation out), or attn_implementation='sdpa'"
        )
    if local_size is not None and local_size < kv_length:
        raise UnsupportedAttentionError(
            f"a layer of this model attends to a window of {local_size} keys and the sequence has {kv_length}; such a "
            "layer is sub-quadratic already and its window would be lost: use attn_implementation='sdpa' for this model"
        )
    if use_vmap:
        raise UnsupportedAttentionError(_PATTERN)
    mask = None if attention_mask is None else _padding(attention_mask, batch_size, kv_length, kv_offset)
    if mask_function is not causal_mask_function and mask_function is not bidirectional_mask_function:
        there = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device) if mask is None else mask
        _check_pattern(mask_function, causal, there, q_length, q_offset, kv_offset)
    if mask is None or is_tracing(mask):
        return mask
    return None if bool(mask.all()) else mask


def _padding(attention_mask: Tensor, batch: int, kv_length: int, kv_offset: int) -> Tensor:
    """The columns of a 2-D mask that belong to the keys: bool (B, kv_length)."""
    if attention_mask.ndim != 2:
        raise UnsupportedAttentionError(
            f"attention_mask must be (batch, keys), not {tuple(attention_mask.shape)}; or use "
            "attn_implementation='sdpa'"
        )
    mask = attention_mask.to(torch.bool)[:, kv_offset : kv_offset + kv_length]
    if mask.shape[1] < kv_length:
        mask = pad(mask, (0, kv_length - mask.shape[1]), value=False)
    return mask.expand(batch, -1)


def _check_pattern(mask_function, causal: bool, there: Tensor, q_length: int, q_offset: int, kv_offset: int) -> None:
    """Refuse a composed mask unless it comes to plain causal or full attention after all.

    When a graph is traced Transformers takes every sequence for packed, since it cannot look; and a window that holds
    all keys is no window. The patterns that it composes are intervals of keys around the query, so it is enough to see
    that every query reaches the first key and (causal) itself but not the next key, (full) the last one: O(N) pairs.
    What is padding, in `there` bool (B, Nk), does not matter.
    """
    device, columns = there.device, there.shape[1]
    rows = torch.arange(there.shape[0], device=device)[:, None]
    head = torch.zeros((), dtype=torch.int64, device=device)
    queries = torch.arange(q_length, device=device) + q_offset
    first = kv_offset + there.to(torch.int64).argmax(1, keepdim=True)
    reaches = mask_function(rows, head, queries, first)
    if causal:
        present = there[:, columns - q_length :]
        plain = ((reaches & mask_function(rows, head, queries, queries)) | ~present).all()
        ahead = mask_function(rows, head, queries[:-1], queries[1:])
        plain = plain & ~(ahead & present[:, :-1] & present[:, 1:]).any()
    else:
        last = kv_offset + columns - 1 - there.flip(1).to(torch.int64).argmax(1, keepdim=True)
        plain = (reaches & mask_function(rows, head, queries, last)).all()
    if is_tracing(plain):
        torch._assert_async(plain, _PATTERN)
    elif not bool(plain):
        raise UnsupportedAttentionError(_PATTERN)
