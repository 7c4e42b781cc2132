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
    "the mask is not plain causal or full attention (packed sequences, a local window, blocks or a prefix), which sub-quadratic "
    "attention cannot keep: pad the sequences instead of packing them, or use attn_implementation='sdpa'"
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
            "the keys do not end with the queries, as in a static key-value cache: use the ordinary dynamic cache (leave "
            "cache_implementation out), or attn_implementation='sdpa'"
        )
    if local_size is not None and local_size < kv_length:
        raise UnsupportedAttentionError(
            f"a layer of this model attends to a window of {local_size} keys and the sequence has {kv_length}; such a layer "
            "is sub-quadratic already and its window would be lost: use attn_implementation='sdpa' for this model"
        )
    if use_vmap:
        raise UnsupportedAttentionError(_PATTERN)
    if mask_function is not causal_mask_function and mask_function is not bidirectional_mask_function:
        _check_pattern(mask_function, causal, batch_size, q_length, kv_length, q_offset, kv_offset, device)
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2:
        raise UnsupportedAttentionError(
            f"attention_mask must be (batch, keys), not {tuple(attention_mask.shape)}; or use attn_implementation='sdpa'"
        )
    mask = attention_mask.to(torch.bool)[:, kv_offset : kv_offset + kv_length]
    if mask.shape[1] < kv_length:
        mask = pad(mask, (0, kv_length - mask.shape[1]), value=False)
    mask = mask.expand(batch_size, -1)
    return None if not is_tracing(mask) and bool(mask.all()) else mask


def _check_pattern(mask_function, causal: bool, batch: int, q_length: int, kv_length: int, q_offset: int, kv_offset: int, device):
    """Refuse a composed mask unless it comes to plain causal or full attention after all.

    When a graph is traced Transformers takes every sequence for packed, since it cannot look; and a window that holds all
    keys is no window. The patterns that it composes are intervals of keys around the query, so it is enough to see that
    every query reaches the first key and itself and (causal) not the next key, or (full) also the last one: O(N) pairs.
    """
    rows = torch.arange(batch, device=device)[:, None]
    head = torch.zeros((), dtype=torch.int64, device=device)
    queries = torch.arange(q_length, device=device) + q_offset
    first, last = (torch.tensor(at, device=device) for at in (kv_offset, kv_offset + kv_length - 1))
    plain = mask_function(rows, head, queries, first).all()
    if causal:
        plain = plain & mask_function(rows, head, queries, queries).all()
        plain = plain & ~mask_function(rows, head, queries[:-1], queries[1:]).any()
    else:
        plain = plain & mask_function(rows, head, queries, last).all()
    if is_tracing(plain):
        torch._assert_async(plain, _PATTERN)
    elif not bool(plain):
        raise UnsupportedAttentionError(_PATTERN)
