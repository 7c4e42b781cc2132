"""Learned features for linear attention: a linear map of every head, followed by a positive function.

With y = x W, for a query or a key x (D) and the map W (D, F) of its head, the features are

- "hedgehog" (Zhang, Bhatia, Kumbong, Re, ICLR 2024, section 4.2): softmax([y, -y]), 2 F features;
- "exp" (the same before its normalisation, Eq. 6): exp([y, -y]), 2 F features;
- "t2r" (Kasai et al., EMNLP 2021, Eq. 5): relu(y + b), F features, with the bias b as a last row of W.

Queries and keys have maps of their own. A common factor of all features of a query cancels in its output, so those of
"exp" are divided by their sum. Features have the bounds below, which do not matter unless all features that a
query shares with the keys are smaller: then the output is about the mean of the values and not 0 / 0.
"""

import math

import torch
from torch import Tensor

from hf_efficient_attn.ops.partial import accumulation_dtype, exp_
from hf_efficient_attn.ops.random import normal

# Features that are learned, and the names of the maps as learned parameters.
LEARNED = ("hedgehog", "t2r", "exp")
NAMES = ("query_map", "key_map")
# The smallest feature: the product of two is far above the smallest number of float32.
_LEAST = 1e-12
# The smallest and the largest exponent of a feature "exp" of a key.
_LEAST_LOG, _LARGEST_LOG = -27.0, 60.0
# The initial bias of "t2r". With 0 the length of a query would have no effect.
_START_BIAS = 0.25
_STREAM = 61
# Factors of the initial maps of queries and keys. With 1, as in Hedgehog, pretrained models have nearly equal weights:
# the mean error of the layers of MiniLM, DeiT-tiny and gpt2-books falls from .65, .91 and .68 to .60, .80 and .62 for
# "hedgehog", and from .68, .92 and .73 to .63, .83 and .67 for "exp", whose keys are not normalised.
_START = {"hedgehog": (1.5, 1.5), "exp": (2.0, 1.0), "t2r": (1.0, 1.0)}


def count_features(feature_map: str, num_features: int) -> int:
    """The number of features of a token for maps with `num_features` columns."""
    return num_features if feature_map == "t2r" else 2 * num_features


def start_map(
    feature_map: str, num_heads: int, head_dim: int, num_features: int, seed: int, *, is_query: bool
) -> Tensor:
    """The initial map of every head: float32 (H, D, F), or (H, D + 1, F) with the bias of "t2r".

    The first D columns are the identity, as in Hedgehog, and further ones are blocks of random orthogonal columns. With
    fewer features than D there are only random orthogonal columns, so that no dimension is left out; they are longer by
    sqrt(D / F). All columns are multiplied by a factor of the feature map.
    """
    num_blocks = -(-num_features // head_dim)
    numbers = normal((num_blocks, head_dim, head_dim), seed, _STREAM, torch.device("cpu"))
    columns = torch.linalg.qr(numbers)[0]
    if num_features >= head_dim:
        columns[0] = torch.eye(head_dim, dtype=columns.dtype, device=columns.device)
    start = columns.transpose(0, 1).flatten(1)[:, :num_features] * max(1.0, head_dim / num_features) ** 0.5
    start = start * _START[feature_map][0 if is_query else 1]
    if feature_map == "t2r":
        start = torch.cat((start, start.new_full((1, num_features), _START_BIAS)))
    maps: Tensor = start.float().repeat(num_heads, 1, 1)
    return maps


def learned_features(x: Tensor, weight: Tensor, feature_map: str, *, is_query: bool) -> Tensor:
    """The features of tokens; those of queries without the factor of `learned_query_features`.

    Args:
        x: (..., N, D).
        weight: (..., D, F), or (..., D + 1, F) for "t2r".
        feature_map: one of `LEARNED`.
        is_query: whether the tokens are queries.

    Returns:
        (..., N, `count_features`), positive, in the accumulation dtype.
    """
    y = _outputs(x, weight, feature_map)
    needs_grad = y.requires_grad  # without a gradient no new memory is touched
    if feature_map == "exp" and not is_query:
        return y.clamp(_LEAST_LOG, _LARGEST_LOG).exp() if needs_grad else exp_(y.clamp_(_LEAST_LOG, _LARGEST_LOG))
    y = y if feature_map == "t2r" else y.softmax(-1)
    return y.clamp(min=_LEAST) if needs_grad else y.clamp_(min=_LEAST)


def learned_query_features(x: Tensor, weight: Tensor, feature_map: str) -> tuple[Tensor, Tensor | None]:
    """`learned_features` of queries, and the log of the factor (..., N) that they lack; None for a factor of 1.

    The factor cancels in the output unless other weights are added to those of the features.
    """
    if feature_map != "exp":
        return learned_features(x, weight, feature_map, is_query=True), None
    y = _outputs(x, weight, feature_map)
    log_factor = y.logsumexp(-1)
    total = log_factor.unsqueeze(-1)
    if y.requires_grad:
        return (y - total).exp().clamp(min=_LEAST), log_factor
    return exp_(y.sub_(total)).clamp_(min=_LEAST), log_factor


def log_weight_of_zeros(feature_map: str, num_features: int) -> float:
    """The negative log of phi(0) . phi(0), for the initial maps of learned features."""
    if feature_map == "t2r":
        return -math.log(num_features * _START_BIAS**2)
    return math.log(2 * num_features) if feature_map == "hedgehog" else -math.log(2 * num_features)


def _outputs(x: Tensor, weight: Tensor, feature_map: str) -> Tensor:
    """The numbers that become features: y + b for "t2r", and [y, -y] for the others."""
    dtype, head_dim = accumulation_dtype(x.dtype), x.shape[-1]
    y, weight = x.to(dtype), weight.to(dtype)
    if feature_map == "t2r":
        return y @ weight[..., :head_dim, :] + weight[..., head_dim:, :]
    y = y @ weight
    return torch.cat((y, -y), -1)
