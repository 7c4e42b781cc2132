"""WildCat: a coreset, a few weighted keys that represent all keys.

With Nystrom weights (`regularized_solve`), a coreset approximates the kernel exp(<x, y>) of all other keys by its own
keys, which are exact. If they took part in the sums, large queries would multiply the error of the ridge and of
rounding, and the output would not converge.
`hf_efficient_attn.methods.wildcat` explains the quantities (Schroeder, Mackey, ICML 2026).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot, threshold

from hf_efficient_attn.ops.attend import Partial, attend, output_of
from hf_efficient_attn.ops.backends.devices import in_float64, precise_dtype
from hf_efficient_attn.ops.clusters import RIDGE, gaussian_kernel, regularized_solve, with_ones
from hf_efficient_attn.ops.index import take
from hf_efficient_attn.ops.slices import slice_size, sliced

# WildCat's constant of the temperature, 1 / W_0(1 / sqrt(1 + exp(2 W_0(2 / e^2) + 2))) with Lambert's function W_0.
RHO = 3.94582
# The temperature is computed for logits of at least this size, so that it is finite for equal keys.
LEAST_LOGIT = 1e-3
# A denominator below this is rounding, because its largest term is about 1.
LEAST_DENOMINATOR = 1e-6
# The range of float16.
_LARGEST_HALF = 6e4


class Coreset(NamedTuple):
    """A coreset of m keys."""

    place: Tensor  # int64 (BH, m), the keys' positions in the sequence
    keys: Tensor  # (BH, m, D), centered, in the accumulation dtype
    kernel_scale: Tensor  # (BH, 1, 1), from `kernel_scale_of`
    mean: Tensor  # (BH, 1, D), the mean of all keys


def kernel_scale_of(query: Tensor, points: Tensor, scale: float) -> Tensor:
    """Compute beta / tau^2 of every head, (BH, 1, 1), for queries (BH, Nq, D) and centered keys (BH, C, D)."""
    norms = (torch.linalg.vector_norm(x, dim=2, dtype=points.dtype) for x in (query, points))
    largest_query, largest_key = (x.amax(1)[:, None, None] for x in norms)
    # With x = beta R_Q / rho this is x^2 / (x R_K) = x / R_K.
    x = largest_query * (abs(scale) / RHO)
    kernel_scale = x.square() / (x * largest_key).clamp(min=LEAST_LOGIT / RHO)
    return torch.clamp(kernel_scale, min=torch.finfo(points.dtype).tiny ** 0.5)


def attend_to_coreset(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    coreset: Coreset,
    *,
    scale: float,
    dropout_p: float,
    with_lse: bool = False,
) -> Tensor:
    """Compute attention to a coreset with Nystrom weights: (BH, Nq, Dv or Dv + 1).

    Dropout drops weights from the numerator.
    """
    limit = 1.0 / (1.0 - dropout_p)

    def some_heads(query: Tensor, key: Tensor, value: Tensor, coreset: Coreset) -> Tensor:
        weighted, bias, middle, half, factor = _weighted(key, value, coreset, drops=dropout_p > 0.0, with_lse=with_lse)
        tensors = query[:, None].to(weighted.dtype), coreset.keys[:, None]
        sums, lse = (x[:, 0] for x in attend(*tensors, weighted[:, None], bias, scale=scale))  # (BH, Nq, Dv + 1)
        numerator = sums[..., :-1]  # (BH, Nq, Dv)
        denominator = sums[..., -1:]  # (BH, Nq, 1)
        if dropout_p > 0.0:
            numerator = attend(*tensors, weighted[:, None, :, :-1], bias, scale=scale, dropout_p=dropout_p).out[:, 0]
        # Where the denominator is not positive, this divides by infinity.
        ratio = numerator / threshold(denominator, LEAST_DENOMINATOR, torch.inf)
        out = torch.addcmul(middle, ratio.clamp(-limit, limit), half)
        if not with_lse:
            return out
        total = denominator.clamp(min=RIDGE).log() + factor  # (BH, Nq, 1); less is rounding of the ridge
        total = total + scale * torch.bmm(query.to(total.dtype), coreset.mean.mT)
        return output_of(Partial(out, lse + total.squeeze(2)), True)

    size = slice_size(query.shape[1] * coreset.keys.shape[1] // 4, query.device)
    return sliced(some_heads, query, key, value, coreset, size=size, draws=dropout_p > 0.0)


def _weighted(key: Tensor, value: Tensor, coreset: Coreset, *, drops: bool, with_lse: bool) -> tuple[Tensor, ...]:
    """Weigh the values by a coreset, for keys (BH, Nk, D).

    Numerator and denominator of the output are exp(scale q . k + bias) @ [values, ones].

    Returns:
        (BH, m, Dv + 1), the weights applied to the values, as multiples of `half` around `middle`, and to 1; the bias
        (BH, 1, 1, m); `middle` and `half` (BH, 1, Dv), of the range of each feature of the values; and the log of the
        factor (BH, 1, 1) that numerator and denominator lack.
    """
    place, keys, kernel_scale, mean = coreset
    # Sum the kernel's row of each coreset key over all other keys: exp(lse) [out, 1].
    dtype = precise_dtype(key)
    others = torch.zeros(key.shape[:2], dtype=dtype, device=key.device).scatter_(1, place, -torch.inf)[:, None, None]
    if dtype == keys.dtype:
        rows = (keys * kernel_scale)[:, None]  # (BH, 1, m, D)
        points, values = (key - mean)[:, None], value[:, None].to(dtype)
        out, lse = (x[:, 0] for x in attend(rows, points, values, others, scale=1.0))
    else:
        out, lse = _sums_in_float16(key, value, coreset, others)
    ends = torch.stack((value.amin(1, keepdim=True), value.amax(1, keepdim=True))).to(keys.dtype)  # (2, BH, 1, Dv)
    middle = 0.5 * (ends[1] + ends[0])
    half = 0.5 * (ends[1] - ends[0])
    if drops:  # outputs are between 0 and multiples of the values
        middle = torch.zeros_like(middle)
        half = ends.abs().amax(0)
    # If a feature is constant, its range is rounding.
    finfo = torch.finfo(keys.dtype)
    unit = torch.add(half, middle.abs(), alpha=8 * finfo.eps).clamp(min=finfo.tiny)
    means, own = ((x - middle) / unit for x in (out, take(value, place)))  # (BH, m, Dv) each
    weighted, bias, factor = _solved(keys, kernel_scale, lse, means, own, with_lse)
    return weighted.to(keys.dtype), bias.view(len(key), 1, 1, -1).to(keys.dtype), middle, half, factor.to(keys.dtype)


def _sums_in_float16(key: Tensor, value: Tensor, coreset: Coreset, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compute out (BH, m, Dv) and lse (BH, m) by products in float16, which holds the keys and values exactly.

    The bias (BH, 1, 1, Nk) is -inf for keys that are left out. The rows are the sums of two numbers, for which there
    are two copies of each key.
    """
    _, keys, kernel_scale, mean = coreset
    (key, key_unit), (value, unit) = _as_float16(key), _as_float16(value)
    rows = keys * kernel_scale  # (BH, m, D)
    exact = (rows * key_unit).clamp(-_LARGEST_HALF, _LARGEST_HALF)
    high = exact.to(key.dtype)
    pairs = torch.cat((high, (exact - high).to(key.dtype)), 2)  # (BH, m, 2 D)
    out, lse = (x[:, 0] for x in attend(pairs[:, None], key.repeat(1, 1, 2)[:, None], value[:, None], bias, scale=1.0))
    # Without the mean, scores of a row are larger by one number. The weights are the same, and the lse is larger by it.
    return out * unit, lse - (rows * mean).sum(2)


def _as_float16(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return float16 numbers (BH, N, D) and the power of two (BH, 1, 1) by which they are smaller than bfloat16 x."""
    largest = torch.linalg.vector_norm(x.detach(), torch.inf, (1, 2), keepdim=True, dtype=torch.float32)
    unit = largest.clamp(min=2.0**-100).log2().ceil().exp2()
    return (x * unit.reciprocal().to(x.dtype)).to(torch.float16), unit


@in_float64
def _solved(
    keys: Tensor, kernel_scale: Tensor, lse: Tensor, means: Tensor, values: Tensor, with_lse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Weigh the means (BH, m, Dv) of the other keys, and 1, by the inverse of the kernel matrix of the coreset.

    The values (BH, m, Dv) of the coreset's own keys are added as they are.

    Returns (BH, m, Dv + 1), a bias (BH, m, 1), and the log of the common factor (BH, 1, 1).

    In float64, because a kernel matrix is nearly singular, and sums of exponentials differ by orders of magnitude.
    """
    points = keys * kernel_scale.double().sqrt()  # (BH, m, D)
    log_size = -0.5 * points.square().sum(2, keepdim=True)  # (BH, m, 1)
    logs = lse.unsqueeze(2) + log_size  # (BH, m, 1)
    total = torch.maximum(logs, -log_size).logsumexp(1, keepdim=True)  # (BH, 1, 1)
    solved = regularized_solve(gaussian_kernel(points), with_ones(means) * (logs - total).exp(), RIDGE)
    # The size of the weights goes into the exponent of the query. Of outputs it has no gradient, but of the least lse.
    size = torch.linalg.vector_norm(solved if with_lse else solved.detach(), torch.inf, 2, keepdim=True)  # (BH, m, 1)
    least = size.clamp(min=1e-300)
    log_solved = torch.where(size > 0.0, least.log(), -torch.inf)
    log_own = -log_size - total
    largest = torch.maximum(log_solved, log_own if with_lse else log_own.detach())
    weighted = solved / least * (log_solved - largest).exp() + with_ones(values) * (log_own - largest).exp()
    return weighted, largest + log_size, total


def coreset_naive(
    query: Tensor, key: Tensor, value: Tensor, coreset: Coreset, *, scale: float, with_lse: bool = False
) -> Tensor:
    """Compute `attend_to_coreset` in the readable form for float64 inputs, with dense weights of all keys."""
    place, keys, kernel_scale, mean = coreset
    key = key - mean
    root = kernel_scale.sqrt()
    points = root * keys
    half_norm = 0.5 * (root * keys).square().sum(2, keepdim=True)  # (BH, m, 1)
    # exp(<x, y> - |x|^2 / 2) relative to its maximum. The logits below contain the missing factors.
    exponents = points @ (root * key).mT - half_norm  # (BH, m, Nk)
    largest = exponents.amax((1, 2), keepdim=True)
    kernel_rows = (exponents - largest).exp()
    kernel = (points @ points.mT - half_norm - half_norm.mT).exp()
    identity = torch.eye(keys.shape[1], dtype=kernel.dtype, device=kernel.device)
    own = one_hot(place, key.shape[1]).to(kernel.dtype)  # (BH, m, Nk), 1 for the coreset's keys
    others = kernel_rows * (1.0 - own.sum(1, keepdim=True))
    weights = torch.linalg.solve(kernel + RIDGE * identity, others)  # (BH, m, Nk)
    weights = weights + (half_norm - largest).exp() * own
    low = value.amin(1, keepdim=True)
    high = value.amax(1, keepdim=True)
    middle = (low + high) / 2
    half = (high - low) / 2
    # Relative to the middle of the range, which is the output if the denominator is not positive.
    numerators = weights @ (value - middle)  # (BH, m, Dv)
    ones = weights.sum(2, keepdim=True)
    size = torch.maximum((numerators / half.clamp(min=1e-300)).abs().amax(2), ones[..., 0].abs())
    logits = scale * query @ keys.mT - half_norm.mT  # (BH, Nq, m)
    row_max = (logits + size.log()[:, None]).amax(2, keepdim=True)
    basis = (logits - row_max).exp()
    denominator = basis @ ones  # (BH, Nq, 1)
    largest_sum = basis @ size.unsqueeze(2)  # (BH, Nq, 1)
    positive = denominator > LEAST_DENOMINATOR * largest_sum
    ratio = (basis @ numerators / torch.where(positive, denominator, 1.0)).masked_fill(~positive, 0.0)
    out = middle + torch.maximum(torch.minimum(ratio, half), -half)
    lse = (
        torch.maximum(denominator, RIDGE * largest_sum).log() + row_max + largest + scale * query @ mean.mT
    )  # (BH, Nq, 1)
    return output_of(Partial(out, lse.squeeze(2)), with_lse)
