"""Batch rows and heads as one dimension, which is how the primitives in `hf_efficient_attn.ops` take their inputs."""

from typing import NamedTuple

import torch
from torch import Tensor


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
