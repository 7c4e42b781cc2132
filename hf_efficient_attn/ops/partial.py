"""Softmax attention over a subset of the keys, and the exact merge of such partial results.

A `Partial` is the result of attention over a subset of the keys: the normalized output and the log of the total weight.
The partials of two disjoint subsets merge into that of their union. This is the online softmax of Milakov & Gimelshein
(2018), which FlashAttention (Dao et al. 2022) applies to blocks. All attention in this package is built on the two
functions `attend` (`hf_efficient_attn.ops.attend`) and `merge`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

# exp(x) = 2^(x LOG2_E): on the CPU powers of two take a fraction of the time of those of e.
LOG2_E = 1.0 / math.log(2.0)


class Partial(NamedTuple):
    """Attention over a subset of the keys.

    Attributes:
        out: (..., Nq, Dv), the normalized output; 0 for an empty subset.
        lse: (..., Nq), the log of the sum of the weights, float32 (float64 for float64 input); -inf for an empty
            subset.
    """

    out: Tensor
    lse: Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over numbers of `dtype`: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def safe_row_max(row_max: Tensor) -> Tensor:
    """Maxima that can be subtracted from scores: -inf, the maximum of an empty set, becomes 0."""
    return row_max.masked_fill(row_max == -torch.inf, 0.0)


def exp_(x: Tensor) -> Tensor:
    """Compute e^x in place by a power of two, without a gradient.

    On the CPU `exp` calls MKL, which takes three times as long as `exp2`, and thirty times if it underflows.
    """
    return x.mul_(LOG2_E).exp2_()


def merge(*partials: Partial) -> Partial:
    """Merge the partials of disjoint subsets into that of their union. Subsets may be empty.

    The merge is associative and exact. The output is the convex combination of the outputs by the softmax over the
    `lse`. It is differentiable in every `out` and `lse`.
    """
    if len(partials) == 1:
        return partials[0]
    outs, lses = zip(*partials, strict=True)
    row_max = lses[0].detach()
    for lse in lses[1:]:
        row_max = torch.maximum(row_max, lse.detach())
    row_max = safe_row_max(row_max)
    weights = [torch.exp(lse - row_max) for lse in lses]
    total = weights[0]
    for weight in weights[1:]:
        total = total + weight
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    out = outs[0] * (weights[0] / total).unsqueeze(-1)
    for part, weight in zip(outs[1:], weights[1:], strict=True):
        out.addcmul_(part.to(out.dtype), (weight / total).unsqueeze(-1))
    return Partial(out.to(outs[0].dtype), (total.log() + row_max).masked_fill(empty, -torch.inf))


def attend_naive(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *, scale: float) -> Partial:
    """The readable form of `attend`, with the same arguments and result."""
    scores = query @ key.transpose(-1, -2) * scale + (0.0 if bias is None else bias)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - safe_row_max(lse).unsqueeze(-1))
    return Partial(weights @ value, lse)
