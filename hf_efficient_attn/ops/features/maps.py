"""Features phi of linear attention, whose weights are phi(q) . phi(k) in place of exp(scale q . k).

- elu(x) + 1 (Katharopoulos et al. 2020).
- Random features of the softmax kernel (Choromanski et al. 2021, FAVOR+): exp(w_f . x - |x|^2/2) for F random
  directions w_f. The mean over the directions of the products of features is exp(q . k).
- Learned features, a linear map of every head and a positive function. With y = x W for a token x (D) and the map W
  (D, F) of its head: "hedgehog" (Zhang, Bhatia, Kumbong, Re, ICLR 2024, section 4.2) is softmax([y, -y]), 2 F features;
  "exp" (the same before its normalisation, Eq. 6) is exp([y, -y]), 2 F features; "t2r" (Kasai et al., EMNLP 2021,
  Eq. 5) is relu(y + b), F features, with the bias b as a last row of W.

No feature overflows: a feature is given as a number and the log of a factor that all features of its token share. The
factor of a key is a weight of the key. The factor of a query cancels in the output, unless other weights are added.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.attend import LOG2_E
from hf_efficient_attn.ops.backends.backend import FusedFeatures
from hf_efficient_attn.ops.backends.devices import accumulation_dtype, from_float64, sum_dtype
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.index import ceil_div, constant

# The learned features, and the names of their maps as learned parameters.
LEARNED = ("hedgehog", "t2r", "exp")
NAMES = ("query_map", "key_map")
# The log of the weight of a masked key: finite, so that no difference of two is NaN.
EMPTY = -1e30
# The smallest learned feature: the product of two is far above the smallest number of float32. If all features that a
# query shares with the keys are smaller, the output is about the mean of the values and not 0 / 0.
_LEAST = 1e-12
# The smallest and the largest exponent of a feature "exp" of a key.
_LEAST_LOG = -27.0
_LARGEST_LOG = 60.0
# The initial bias of "t2r". With 0 the length of a query would have no effect.
_START_BIAS = 0.25
_STREAM = 61
# Factors of the initial maps of queries and keys. With 1, as in Hedgehog, pretrained models have nearly equal weights
# and larger errors. Keys of "exp" are not normalised.
_START = {"hedgehog": (1.5, 1.5), "exp": (2.0, 1.0), "t2r": (1.0, 1.0)}


class Features(NamedTuple):
    """Functions that compute features, in the dtype of products."""

    # Maps queries (..., N, D) to features (..., N, F), and the log to base 2 of their factor (..., N), or None for
    # factors of 1.
    of_query: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    # Maps keys (..., N, D) and their mask, bool (..., N) or None, to the same. The features of a masked key are 0, and
    # the log of its factor is `EMPTY`.
    of_key: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
    fused: FusedFeatures  # the same features for kernels


def elu_features(x: Tensor, log_factor: Tensor | float = 0.0) -> Tensor:
    """Compute phi(x) = elu(x) + 1 (Eq. 7 of Katharopoulos et al.), which is positive: (...) -> (...).

    The formula as written is 0 for x below -17 in float32, so this takes the exponential itself. If all numbers of a
    token are negative, its features may have a factor exp(-log_factor). `log_factor` is 0 for other tokens.
    """
    positive = x.relu()
    negative = x - positive  # min(x, 0), whose gradient at 0 is 1; that of a clamp depends on the version of PyTorch
    negative = negative.sub_(log_factor) if isinstance(log_factor, Tensor) else negative
    if x.dtype in (torch.bfloat16, torch.float16):  # a product with LOG2_E would be rounded
        return negative.exp_() + positive
    return negative.mul_(LOG2_E).exp2_() + positive


def elu_map(scale: float, head_dim: int) -> Features:
    """Return the features elu(x) + 1. A scale other than 1/sqrt(D) multiplies the queries by scale * sqrt(D)."""
    factor = query_factor(scale, head_dim)

    def of_query(query: Tensor) -> tuple[Tensor, Tensor]:
        # If all numbers of a query are negative, its features are relative to the largest: they could underflow, and
        # the inverse of their sum, which the gradient has as a factor, could overflow.
        query = _scaled(query, factor, sum_dtype(query))
        largest = query.detach().amax(-1, keepdim=True).clamp(max=0.0)  # (..., N, 1)
        return elu_features(query, largest), largest.squeeze(-1) * LOG2_E

    fused = FusedFeatures("elu", head_dim, factor or 1.0, lambda query: query, lambda key: key)
    return _without_weights(of_query, lambda key: elu_features(key.to(sum_dtype(key))), fused)


def learned(feature_map: str, query_map: Tensor, key_map: Tensor, scale: float, head_dim: int) -> Features:
    """Return learned features with maps (..., D, F), or (..., D + 1, F) for "t2r". The scale acts as in `elu_map`."""
    factor = query_factor(scale, head_dim)
    count = count_features(feature_map, query_map.shape[-1])
    fused = FusedFeatures(
        feature_map,
        count,
        1.0,
        lambda query: _mapped_both_ways(_scaled(query, factor), query_map, feature_map),
        lambda key: _mapped_both_ways(_scaled(key, None), key_map, feature_map),
    )
    return _without_weights(
        lambda query: _learned_features(_scaled(query, factor), query_map, feature_map, is_query=True),
        lambda key: _learned_features(_scaled(key, None), key_map, feature_map, is_query=False)[0],
        fused,
    )


def favor(num_features: int, scale: float, head_dim: int, draws: Draws) -> Features:
    """Return positive orthogonal random features of exp(scale q . k).

    With r, the largest w_f . x of a token, the features of a query are exp(w_f . x - r) <= 1, and exp(r - |x|^2/2) is
    their factor. That of a key is the next power of two, with which products are exact. So the product of two features
    underflows only if it is smaller than the largest product by the range of float32. The scale is split evenly between
    queries and keys; queries take its sign.
    """
    # Kept if the seed is a number, because QR takes longer than short attention: (F, D).
    weight = orthogonal_features(draws, num_features, head_dim) * abs(scale) ** 0.5  # (F, D)
    directions = weight.t() * LOG2_E  # (D, F)

    def logs_of(x: Tensor, directions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute w_f . x (..., N, F), their largest and |x|^2/2 (..., N, 1), all in units of log 2."""
        x = x.to(accumulation_dtype(x.dtype))
        logs = x @ directions.to(x.dtype)  # (..., N, D) @ (D, F) -> (..., N, F)
        half_norm = x.square().sum(-1, keepdim=True) * (0.5 * abs(scale) * LOG2_E)
        return logs, logs.detach().amax(-1, keepdim=True), half_norm

    def of_query(query: Tensor) -> tuple[Tensor, Tensor]:
        logs, size, half_norm = logs_of(query, directions if scale >= 0 else -directions)
        phi = logs.sub_(size).exp2_().to(sum_dtype(query))  # the size cancels, so no gradient passes
        return phi, (size - half_norm).squeeze(-1) - math.log2(num_features)

    def of_key(key: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        logs, size, half_norm = logs_of(key, directions)
        log = size - half_norm
        factor = log.detach().ceil()
        # Large numbers are subtracted from one another first, so that features of very long keys do not overflow.
        phi = logs.sub_(size - (log - factor)).exp2_().to(sum_dtype(key))
        if key_mask is None:
            return phi, factor.squeeze(-1)
        return phi * key_mask.unsqueeze(-1), factor.squeeze(-1).masked_fill(~key_mask, EMPTY)

    fused = FusedFeatures(
        "favor",
        num_features,
        1.0,
        lambda query: query @ weight.t().to(query.dtype) * math.copysign(1.0, scale),
        lambda key: key @ weight.t().to(key.dtype) - key.square().sum(-1, keepdim=True) * (0.5 * abs(scale)),
        weight,
        scale,
    )
    return Features(of_query, of_key, fused)


def features_of_maps(
    feature_map: str, num_features: int, scale: float, head_dim: int, draws: Draws
) -> Callable[[Tensor | None, Tensor | None], Features]:
    """Return a function from the maps of queries and of keys (None for "favor" and "elu") to the features."""
    fixed = favor(num_features, scale, head_dim, draws) if feature_map == "favor" else elu_map(scale, head_dim)

    def features(query_map: Tensor | None, key_map: Tensor | None) -> Features:
        if query_map is None or key_map is None:
            return fixed
        return learned(feature_map, query_map, key_map, scale, head_dim)

    return features


def query_factor(scale: float, head_dim: int) -> float | None:
    """Compute the factor by which queries are multiplied for a scale; None for the default scale, 1/sqrt(D)."""
    factor = scale * head_dim**0.5
    return None if abs(factor - 1.0) < 1e-12 else factor


def _scaled(x: Tensor, factor: float | None, dtype: torch.dtype | None = None) -> Tensor:
    """Multiply tokens by a factor in the accumulation dtype, so that features are rounded once.

    Without a factor the result has another dtype if one is given.
    """
    if factor is None and dtype is not None:
        return x.to(dtype)
    x = x.to(accumulation_dtype(x.dtype))
    return x if factor is None else x * factor


def _without_weights(
    of_query: Callable[[Tensor], tuple[Tensor, Tensor | None]], of_key: Callable[[Tensor], Tensor], fused: FusedFeatures
) -> Features:
    """Make `Features` whose keys have factors of 1 from functions without masks."""

    def query(query: Tensor) -> tuple[Tensor, Tensor | None]:
        phi, log = of_query(query)
        return phi.to(sum_dtype(query)), log

    def key(key: Tensor, key_mask: Tensor | None) -> tuple[Tensor, None]:
        phi = of_key(key).to(sum_dtype(key))
        return phi if key_mask is None else phi * key_mask.unsqueeze(-1), None

    return Features(query, key, fused=fused)


def _mapped_both_ways(x: Tensor, weight: Tensor, feature_map: str) -> Tensor:
    """Compute x W + b of tokens (..., N, D) for "t2r", and [x W, -x W] for other maps, as one product."""
    weight = weight.to(x.dtype)
    if feature_map == "t2r":
        return x @ weight[..., :-1, :] + weight[..., -1:, :]
    return x @ torch.cat((weight, -weight), -1)  # (..., N, D) @ (..., D, 2 F) -> (..., N, 2 F)


def _learned_features(x: Tensor, weight: Tensor, feature_map: str, *, is_query: bool) -> tuple[Tensor, Tensor | None]:
    """Compute learned features of tokens (..., N, D). The features "exp" of a query are divided by their sum."""
    if feature_map == "t2r":
        return _mapped_both_ways(x, weight, feature_map).clamp(min=_LEAST), None
    y = x @ weight.to(x.dtype)  # (..., N, D) @ (..., D, F) -> (..., N, F)
    y = torch.cat((y, -y), -1)  # (..., N, 2 F)
    if feature_map == "hedgehog":
        return y.softmax(-1).clamp(min=_LEAST), None
    if not is_query:
        return y.clamp(_LEAST_LOG, _LARGEST_LOG).mul(LOG2_E).exp2(), None
    size = y.detach().amax(-1, keepdim=True)  # (..., N, 1)
    phi = (y - size).mul(LOG2_E).exp2()
    total = phi.sum(-1, keepdim=True)  # (..., N, 1)
    return (phi / total).clamp(min=_LEAST), (total.log2() + size * LOG2_E).squeeze(-1)


def count_features(feature_map: str, num_features: int) -> int:
    """Return the number of features of a token for maps with `num_features` columns."""
    return num_features if feature_map == "t2r" else 2 * num_features


def start_map(
    feature_map: str, num_heads: int, head_dim: int, num_features: int, seed: int, *, is_query: bool
) -> Tensor:
    """Make the initial map of every head: float32 (H, D, F), or (H, D + 1, F) with the bias of "t2r".

    The first D columns are the identity, as in Hedgehog, and further ones are blocks of random orthogonal columns. With
    fewer features than D all columns are random and orthogonal, so that no dimension is left out, and longer by
    sqrt(D / F). All columns are multiplied by a factor of the feature map.
    """
    num_blocks = ceil_div(num_features, head_dim)
    numbers = Draws(seed, torch.device("cpu")).normal((num_blocks, head_dim, head_dim), _STREAM)  # (blocks, D, D)
    columns = torch.linalg.qr(numbers)[0]  # (blocks, D, D)
    if num_features >= head_dim:
        columns[0] = torch.eye(head_dim, dtype=columns.dtype, device=columns.device)
    start = columns.transpose(0, 1).flatten(1)[:, :num_features] * max(1.0, head_dim / num_features) ** 0.5  # (D, F)
    start = start * _START[feature_map][0 if is_query else 1]
    if feature_map == "t2r":
        start = torch.cat((start, start.new_full((1, num_features), _START_BIAS)))
    maps: Tensor = start.float().repeat(num_heads, 1, 1)  # (H, D or D + 1, F)
    return maps


def log_weight_of_zeros(feature_map: str, num_features: int) -> float:
    """Compute the negative log of phi(0) . phi(0), for the initial maps of learned features."""
    if feature_map == "t2r":
        return -math.log(num_features * _START_BIAS**2)
    return math.log(2 * num_features) if feature_map == "hedgehog" else -math.log(2 * num_features)


@constant
@from_float64
def orthogonal_features(draws: Draws, num_features: int, head_dim: int) -> Tensor:
    """Draw Gaussian directions that are orthogonal within blocks of D: float64 (F, D).

    A block is the Q of a Gaussian matrix, which is Haar distributed after its signs are fixed. Each direction gets the
    length of an independent Gaussian vector, so that it is standard normal by itself.
    """
    blocks = ceil_div(num_features, head_dim)
    q, r = torch.linalg.qr(draws.normal((blocks, head_dim, head_dim), 5))  # (blocks, D, D) each
    signs = r.diagonal(dim1=1, dim2=2).sign()  # (blocks, D)
    directions = (q * signs[:, None, :]).transpose(1, 2).reshape(-1, head_dim)[:num_features]  # (F, D)
    lengths = torch.linalg.vector_norm(draws.normal((num_features, head_dim), 7), dim=1, keepdim=True)  # (F, 1)
    features: Tensor = directions * lengths
    return features


def log_weights_naive(query: Tensor, key: Tensor, features: Features) -> Tensor:
    """Compute the logs of the weights of all pairs of queries (..., Nq, D) and keys (..., Nk, D): (..., Nq, Nk)."""
    phi_q, log_q = features.of_query(query)
    phi_k, log_k = features.of_key(key, None)
    logs = (phi_q @ phi_k.mT).log2()  # (..., Nq, F) @ (..., F, Nk)
    logs = logs if log_q is None else logs + log_q.unsqueeze(-1)
    logs = logs if log_k is None else logs + log_k.unsqueeze(-2)  # (..., Nq, Nk)
    return logs / LOG2_E
