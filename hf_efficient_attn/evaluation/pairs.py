"""Which pairs of queries and keys exact attention uses, for the functions of `hea.analysis`."""

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError


def allowed_pairs(
    query: Tensor, key: Tensor, key_mask: Tensor | None, is_causal: bool, chunk: slice = slice(None)
) -> Tensor:
    """The pairs that exact attention uses, for the queries of a chunk: bool (B or 1, 1, chunk, Nk)."""
    q_len, kv_len = query.shape[2], key.shape[2]
    position = torch.arange(q_len, device=query.device)[chunk] + (kv_len - q_len)
    allowed = torch.ones(1, 1, position.shape[0], kv_len, dtype=torch.bool, device=query.device)
    if is_causal:
        allowed = allowed & (torch.arange(kv_len, device=query.device) <= position[:, None])
    return allowed if key_mask is None else allowed & key_mask[:, None, None]


def check_heads(query: Tensor, key: Tensor, key_mask: Tensor | None) -> None:
    """Check that query (B, H, Nq, D), key (B, H_kv, Nk, D) and key_mask (B, Nk) match."""
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}"
    if not query.ndim == key.ndim == 4 or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise UnsupportedAttentionError(f"give query and key as (batch, num_heads, length, head_dim); got {shapes}")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise UnsupportedAttentionError(f"the number of key heads must divide that of query heads; got {shapes}")
    if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape != key.shape[:3:2]):
        raise UnsupportedAttentionError(
            f"attention_mask must be bool {(key.shape[0], key.shape[2])}, True = attend; got {key_mask.dtype} "
            f"{tuple(key_mask.shape)}"
        )
