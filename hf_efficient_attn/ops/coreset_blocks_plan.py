"""A number as a tensor, for `hf_efficient_attn.ops.causal_landmarks` alone."""

import torch
from torch import Tensor

from hf_efficient_attn.ops.constants import constant


def _filled(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((1, 1, 1), value, dtype=dtype, device=device)


def number(value: float, like: Tensor) -> Tensor:
    """A number, (1, 1, 1)."""
    return constant(_filled, value, like.dtype, device=like.device)
