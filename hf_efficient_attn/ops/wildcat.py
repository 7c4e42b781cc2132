"""WildCat: a coreset, a few weighted keys that represent all keys.

With Nystrom weights (`regularized_solve`), a coreset approximates the kernel exp(<x, y>) of all keys by its own keys.
`hf_efficient_attn.methods.wildcat` explains the quantities (Schroeder, Mackey, ICML 2026).
"""

import torch
from torch import Tensor
from torch.nn.functional import threshold

from hf_efficient_attn.ops.attend import attend
from hf_efficient_attn.ops.backends.devices import in_float64
from hf_efficient_attn.ops.clusters import RIDGE, gaussian_kernel, regularized_solve, with_ones
from hf_efficient_attn.ops.slices import slice_size, sliced

# WildCat's constant of the temperature, 1 / W_0(1 / sqrt(1 + exp(2 W_0(2 / e^2) + 2))) with Lambert's function W_0.
RHO = 3.94582
# The temperature is computed for logits of at least this size, so that it is finite for equal keys.
LEAST_LOGIT = 1e-3
# A denominator below this is rounding, because its largest term is about 1.
LEAST_DENOMINATOR = 1e-6


def kernel_scale_of(query: Tensor, points: Tensor, scale: float) -> Tensor:
    """Compute beta / tau^2 of every head, (BH, 1, 1), for queries (BH, Nq, D) and centered keys (BH, C, D)."""
    largest_query, largest_key = (torch.linalg.vector_norm(x, dim=2).amax(1)[:, None, None] for x in (query, points))
    # With x = beta R_Q / rho this is x^2 / (x R_K) = x / R_K.
    x = largest_query * (abs(scale) / RHO)
    kernel_scale = x.square() / (x * largest_key).clamp(min=LEAST_LOGIT / RHO)
    clamped: Tensor = kernel_scale.clamp(min=torch.finfo(points.dtype).tiny ** 0.5)
    return clamped


def attend_to_coreset(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, kernel_scale: Tensor, *, scale: float, dropout_p: float
) -> Tensor:
    """Compute attention to a coreset with Nystrom weights.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D), centered.
        value: (BH, Nk, Dv).
        keys: (BH, m, D), the keys of the coreset.
        kernel_scale: (BH, 1, 1), from `kernel_scale_of`.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight from the numerator.

    Returns:
        (BH, Nq, Dv).
    """
    limit = 1.0 / (1.0 - dropout_p)

    def some_heads(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, kernel_scale: Tensor) -> Tensor:
        weighted, bias, middle, half = _weighted(key, value, keys, kernel_scale, drops=dropout_p > 0.0)
        tensors = query[:, None], keys[:, None]
        sums = attend(*tensors, weighted[:, None], bias, scale=scale).out[:, 0]  # (BH, Nq, Dv + 1)
        numerator = sums[..., :-1]  # (BH, Nq, Dv)
        denominator = sums[..., -1:]  # (BH, Nq, 1)
        if dropout_p > 0.0:
            numerator = attend(*tensors, weighted[:, None, :, :-1], bias, scale=scale, dropout_p=dropout_p).out[:, 0]
        # Where the denominator is not positive, this divides by infinity.
        ratio = numerator / threshold(denominator, LEAST_DENOMINATOR, torch.inf)
        return torch.addcmul(middle, ratio.clamp(-limit, limit), half)

    size = slice_size(query.shape[1] * keys.shape[1] // 4, query.device)
    return sliced(some_heads, query, key, value, keys, kernel_scale, size=size, draws=dropout_p > 0.0)


def _weighted(key: Tensor, value: Tensor, keys: Tensor, kernel_scale: Tensor, *, drops: bool) -> tuple[Tensor, ...]:
    """Weigh the values by coreset keys (BH, m, D), for centered keys (BH, Nk, D).

    Numerator and denominator of the output are exp(scale q . k + bias) @ [values, ones].

    Returns:
        (BH, m, Dv + 1), the weights applied to the values, as multiples of `half` around `middle`, and to 1; the bias
        (BH, 1, 1, m); and `middle` and `half` (BH, 1, Dv), of the range of each feature of the values.
    """
    # Sum the kernel's row of each coreset key over all keys: exp(lse) [out, 1].
    rows = keys * kernel_scale  # (BH, m, D)
    out, lse = (x[:, 0] for x in attend(rows[:, None], key[:, None], value[:, None], scale=1.0))  # (BH, m, Dv), (BH, m)
    ends = torch.stack((value.amin(1, keepdim=True), value.amax(1, keepdim=True)))  # (2, BH, 1, Dv)
    middle = 0.5 * (ends[1] + ends[0])
    half = 0.5 * (ends[1] - ends[0])
    if drops:  # outputs are between 0 and multiples of the values
        middle = torch.zeros_like(middle)
        half = ends.abs().amax(0)
    # If a feature is constant, its range is rounding.
    finfo = torch.finfo(value.dtype)
    unit = torch.add(half, middle.abs(), alpha=8 * finfo.eps).clamp(min=finfo.tiny)
    weighted, bias = _solved(keys, kernel_scale, lse, (out - middle) / unit)
    return weighted.to(key.dtype), bias.view(len(key), 1, 1, -1).to(key.dtype), middle, half


@in_float64
def _solved(keys: Tensor, kernel_scale: Tensor, lse: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Weigh the means (BH, m, Dv) and 1 by the inverse of the kernel matrix of the coreset: (BH, m, Dv + 1) and a bias.

    In float64, because a kernel matrix is nearly singular, and sums of exponentials differ by orders of magnitude.
    """
    points = keys * kernel_scale.double().sqrt()  # (BH, m, D)
    log_size = -0.5 * points.square().sum(2, keepdim=True)  # (BH, m, 1)
    weights = (lse.unsqueeze(2) + log_size).softmax(1)  # (BH, m, 1), up to a factor of all
    weighted = regularized_solve(gaussian_kernel(points), with_ones(values) * weights, RIDGE)
    # The size of the weights goes into the exponent of the query.
    size = torch.linalg.vector_norm(weighted.detach(), torch.inf, 2, keepdim=True).clamp(min=1e-300)  # (BH, m, 1)
    return weighted / size, size.log() + log_size


def coreset_naive(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, kernel_scale: Tensor, *, scale: float
) -> Tensor:
    """Compute `attend_to_coreset` in the readable form for float64 inputs, with dense weights of all keys."""
    root = kernel_scale.sqrt()
    points = root * keys
    half_norm = 0.5 * (root * keys).square().sum(2, keepdim=True)  # (BH, m, 1)
    # exp(<x, y> - |x|^2 / 2) relative to its maximum. The logits below contain the missing factors.
    exponents = points @ (root * key).mT - half_norm  # (BH, m, Nk)
    kernel_rows = (exponents - exponents.amax((1, 2), keepdim=True)).exp()
    kernel = (points @ points.mT - half_norm - half_norm.mT).exp()
    identity = torch.eye(keys.shape[1], dtype=kernel.dtype, device=kernel.device)
    weights = torch.linalg.solve(kernel + RIDGE * identity, kernel_rows)  # (BH, m, Nk)
    low = value.amin(1, keepdim=True)
    high = value.amax(1, keepdim=True)
    middle = (low + high) / 2
    half = (high - low) / 2
    # Relative to the middle of the range, which is the output if the denominator is not positive.
    numerators = weights @ (value - middle)  # (BH, m, Dv)
    ones = weights.sum(2, keepdim=True)
    size = torch.maximum((numerators / half.clamp(min=1e-300)).abs().amax(2), ones[..., 0].abs())
    logits = scale * query @ keys.mT - half_norm.mT  # (BH, Nq, m)
    basis = (logits - (logits + size.log()[:, None]).amax(2, keepdim=True)).exp()
    denominator = basis @ ones  # (BH, Nq, 1)
    positive = denominator > LEAST_DENOMINATOR * (basis @ size.unsqueeze(2))
    ratio = (basis @ numerators / torch.where(positive, denominator, 1.0)).masked_fill(~positive, 0.0)
    return middle + torch.maximum(torch.minimum(ratio, half), -half)
