"""Attention to a coreset of keys with Nystrom weights: the computations of WildCat (Schroeder, Mackey, ICML 2026).

`hf_efficient_attn.methods.wildcat` explains the quantities of the paper.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import threshold

from hf_efficient_attn.ops.attend import attend
from hf_efficient_attn.ops.coreset import regularized_solve
from hf_efficient_attn.ops.coreset_landmarks import with_ones
from hf_efficient_attn.ops.slices import slice_size, sliced

# The paper's constant of the temperature, 1 / W_0(1 / sqrt(1 + exp(2 W_0(2 / e^2) + 2))) with Lambert's function W_0.
RHO = 3.94582
# The temperature is that of logits of at least this size, so that it is finite for equal keys.
LEAST_LOGIT = 1e-3
# A denominator below this is rounding. The largest of its terms is about 1.
LEAST_DENOMINATOR = 1e-6
RIDGE = 1e-3


class _Coreset(NamedTuple):
    """A weighted coreset: exp(scale q . key + bias) @ [values, ones] are numerator and denominator of the output.

    Attributes:
        key: (BH, m, D).
        bias: (BH, m).
        weighted: (BH, m, Dv + 1), the weights applied to the values, as multiples of `half` around `middle`, and to 1.
        middle: (BH, 1, Dv), the middle of the range of each feature of the values.
        half: (BH, 1, Dv), half of the size of the range.
    """

    key: Tensor
    bias: Tensor
    weighted: Tensor
    middle: Tensor
    half: Tensor


def kernel_scale_of(query: Tensor, points: Tensor, scale: float) -> Tensor:
    """Beta / tau^2 of every head, (BH, 1, 1), for queries (BH, Nq, D) and centered keys (BH, C, D)."""
    largest_query, largest_key = (torch.linalg.vector_norm(x, dim=2).amax(1)[:, None, None] for x in (query, points))
    # With x = beta R_Q / rho this is x^2 / (x R_K) = x / R_K.
    x = largest_query * (abs(scale) / RHO)
    kernel_scale = x.square() / (x * largest_key).clamp(min=LEAST_LOGIT / RHO)
    clamped: Tensor = kernel_scale.clamp(min=torch.finfo(points.dtype).tiny ** 0.5)
    return clamped


def attend_to_coreset(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, kernel_scale: Tensor, *, scale: float, dropout_p: float
) -> Tensor:
    """Attention to a coreset with Nystrom weights.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D), centered.
        value: (BH, Nk, Dv).
        keys: (BH, m, D), those of the coreset.
        kernel_scale: (BH, 1, 1), by `kernel_scale_of`.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight from the numerator.

    Returns:
        (BH, Nq, Dv).
    """

    def some_heads(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, kernel_scale: Tensor) -> Tensor:
        return _attend(query, _weighted_coreset(key, value, keys, kernel_scale, dropout_p), scale, dropout_p)

    size = slice_size(query.shape[1] * keys.shape[1] // 4, query.device)
    return sliced(some_heads, query, key, value, keys, kernel_scale, size=size, draws=dropout_p > 0.0)


def _weighted_coreset(key: Tensor, value: Tensor, keys: Tensor, kernel_scale: Tensor, dropout_p: float) -> _Coreset:
    """The weights of coreset keys (BH, m, D) for centered keys (BH, Nk, D)."""
    # Sums over all keys, of one row of the kernel for each key of the coreset: exp(lse) [out, 1].
    rows = keys * kernel_scale
    out, lse = (x[:, 0] for x in attend(rows[:, None], key[:, None], value[:, None], scale=1.0))
    ends = torch.stack((value.amin(1, keepdim=True), value.amax(1, keepdim=True)))
    if dropout_p > 0.0:  # outputs are between 0 and multiples of the values
        middle, half = torch.zeros_like(ends[0]), ends.abs().amax(0)
    else:
        middle, half = 0.5 * (ends[1] + ends[0]), 0.5 * (ends[1] - ends[0])
    # The range of a feature that is constant is rounding.
    finfo = torch.finfo(value.dtype)
    unit = torch.add(half, middle.abs(), alpha=8 * finfo.eps).clamp(min=finfo.tiny)
    # In float64, because a kernel matrix is nearly singular, and sums of exponentials differ by orders of magnitude.
    points = keys * kernel_scale.double().sqrt()
    kernel = points @ points.mT
    log_size = -0.5 * kernel.diagonal(dim1=1, dim2=2).unsqueeze(2)
    kernel = (kernel + log_size + log_size.mT).clamp(max=0.0).exp()
    weights = (lse.unsqueeze(2) + log_size).softmax(1)  # up to a factor of all
    weighted = regularized_solve(kernel, with_ones((out - middle) / unit) * weights, RIDGE)
    # The size of the weights goes into the exponent of the query.
    size = torch.linalg.vector_norm(weighted.detach(), torch.inf, 2, keepdim=True).clamp(min=1e-300)
    bias = (size.log() + log_size).squeeze(2).to(key.dtype)
    return _Coreset(keys, bias, (weighted / size).to(key.dtype), middle, half)


def _attend(query: Tensor, coreset: _Coreset, scale: float, dropout_p: float) -> Tensor:
    """Attention of queries (BH, Nq, D) to the coreset: (BH, Nq, Dv)."""
    tensors, values, bias = (
        (query[:, None], coreset.key[:, None]),
        coreset.weighted[:, None],
        coreset.bias[:, None, None],
    )
    sums = attend(*tensors, values, bias, scale=scale).out[:, 0]
    numerator, denominator = sums[..., :-1], sums[..., -1:]
    if dropout_p > 0.0:
        numerator = attend(*tensors, values[..., :-1], bias, scale=scale, dropout_p=dropout_p).out[:, 0]
    # Where the denominator is not positive, this divides by infinity.
    ratio = numerator / threshold(denominator, LEAST_DENOMINATOR, torch.inf)
    limit = 1.0 / (1.0 - dropout_p)
    return torch.addcmul(coreset.middle, ratio.clamp(-limit, limit), coreset.half)


def coreset_naive(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, kernel_scale: Tensor, *, scale: float
) -> Tensor:
    """The readable form of `attend_to_coreset` for float64 inputs, with dense weights of all keys."""
    root = kernel_scale.sqrt()
    points, half_norm = root * keys, 0.5 * (root * keys).square().sum(2, keepdim=True)
    # exp(<x, y> - |x|^2 / 2), as multiples of the largest one. The missing factors are part of the logits below.
    exponents = points @ (root * key).mT - half_norm
    kernel_rows = (exponents - exponents.amax((1, 2), keepdim=True)).exp()
    kernel = (points @ points.mT - half_norm - half_norm.mT).exp()
    weights = torch.linalg.solve(
        kernel + RIDGE * torch.eye(keys.shape[1], dtype=kernel.dtype, device=kernel.device), kernel_rows
    )
    low, high = value.amin(1, keepdim=True), value.amax(1, keepdim=True)
    middle, half = (low + high) / 2, (high - low) / 2
    # Relative to the middle of the range, which is the output if the denominator is not positive.
    numerators, ones = weights @ (value - middle), weights.sum(2, keepdim=True)
    size = torch.maximum((numerators / half.clamp(min=1e-300)).abs().amax(2), ones[..., 0].abs())
    logits = scale * query @ keys.mT - half_norm.mT
    basis = (logits - (logits + size.log()[:, None]).amax(2, keepdim=True)).exp()
    denominator = basis @ ones
    positive = denominator > LEAST_DENOMINATOR * (basis @ size.unsqueeze(2))
    ratio = (basis @ numerators / torch.where(positive, denominator, 1.0)).masked_fill(~positive, 0.0)
    return middle + torch.maximum(torch.minimum(ratio, half), -half)
