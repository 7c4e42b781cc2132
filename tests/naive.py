"""The readable form of the one function that knows the kernels."""

import torch
from torch import Tensor

from hf_efficient_attn.ops.attend import Partial, safe_row_max


def attend_naive(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *, scale: float) -> Partial:
    """The readable form of `attend`, with the same arguments and result."""
    scores = query @ key.transpose(-1, -2) * scale + (0.0 if bias is None else bias)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - safe_row_max(lse).unsqueeze(-1))
    return Partial(weights @ value, lse)
