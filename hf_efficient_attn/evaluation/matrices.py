"""Dense attention matrices in float64, with and without the near field of a method, and their ranks.

Parts of `hea.analysis`. Matrices that do not fit in memory, or take hours to decompose, are refused.
"""

import dataclasses
import math

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.norms import operator_norm
from hf_efficient_attn.evaluation.pairs import allowed_pairs, check_heads
from hf_efficient_attn.methods import MethodConfig, available_methods, make_config, method_info, naive_attention

# Largest number of entries of a dense matrix, all heads together: 4 GiB of float64.
_MAX_ENTRIES = 1 << 29
# Largest shorter side of a matrix to decompose: some minutes on one core.
_MAX_SIDE = 4096


@torch.no_grad()
def softmax_matrix(
    query: Tensor,
    key: Tensor,
    *,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """The matrix D^-1 A of the weights of exact attention (KDEformer, section 1.1).

    Args:
        query: (B, H, Nq, D).
        key: (B, H_kv, Nk, D); H_kv divides H.
        attention_mask: bool (B, Nk), True = attend.
        is_causal: a query attends to the keys up to its own position; the queries are the last Nq positions.
        scale: factor of the scores; 1/sqrt(D) by default.

    Returns:
        float64 (B, H, Nq, Nk). The weights of a query sum to 1, or to 0 if it has nothing to attend to.

    Raises:
        UnsupportedAttentionError: shapes that do not match, or a matrix of more than 4 GiB.
    """
    check_heads(query, key, attention_mask)
    _check_dense("softmax_matrix", query.shape[0] * query.shape[1], query.shape[2], key.shape[2])
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    allowed = allowed_pairs(query, key, attention_mask, is_causal)
    if attention_mask is not None:
        key = key.masked_fill(~attention_mask[:, None, :, None], 0.0)
    factor = query.shape[3] ** -0.5 if scale is None else float(scale)
    scores = (query.double() @ key.double().transpose(2, 3)).mul_(factor)
    return scores.masked_fill_(~allowed, -torch.inf).softmax(3).nan_to_num_(0.0)


@torch.no_grad()
def near_field_pairs(
    method_or_config: str | MethodConfig,
    query: Tensor,
    key: Tensor,
    *,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    seed: int = 0,
) -> Tensor:
    """The pairs that a method computes exactly: 1{H(q_i) = H(k_j)} of KDEformer's Eq. 10, or a window.

    They are the non-zero weights of the method's naive form without its samples, which follows the same plan as the
    fast form. All scores are 0 there, so that no weight underflows, unless the scores decide which pairs are near.

    Args:
        method_or_config: a method whose near field is a set of pairs: one with `block_size` or `window_size`.
        query: (B, H, Nq, D).
        key: (B, H_kv, Nk, D); H_kv divides H.
        attention_mask: bool (B, Nk), True = attend.
        is_causal: as in `softmax_matrix`.
        scale: factor of the scores; 1/sqrt(D) by default. It has an effect with `near_field="auto"` only.
        seed: as in `hea.attention`: it is added to the seed of the config.

    Returns:
        bool (B, H, Nq, Nk).

    Raises:
        UnsupportedAttentionError: a method without a near field, a near field that contains all pairs (the sequence is
            within the budget, or the far field cannot be separated from it), or too many tokens.
    """
    config = make_config(method_or_config)
    check_heads(query, key, attention_mask)
    _check_dense("near_field_pairs", query.shape[0] * query.shape[1], query.shape[2], key.shape[2])
    fields = {spec.name for spec in dataclasses.fields(config)}
    sizes = [getattr(config, name) for name in ("block_size", "window_size") if name in fields]
    if not sizes or ("num_features" in fields and not any(sizes)):
        raise UnsupportedAttentionError(
            f"{config.method} has no near field of pairs. Methods that have one: {', '.join(_near_field_methods())}"
        )
    if "num_samples" in fields:
        config = make_config(config, num_samples=0)
    grouped = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    used_scale = 0.0
    if getattr(config, "near_field", None) == "auto" and not is_causal:
        query, key, used_scale = _without_underflow(query, key, attention_mask, scale)
    # With one unit vector as each value, the output is the matrix of weights.
    units = torch.eye(key.shape[2], dtype=query.dtype, device=query.device).expand(*key.shape[:2], -1, -1)
    weights = naive_attention(
        config, query, key, units, attention_mask=attention_mask, is_causal=is_causal, scale=used_scale, seed=seed
    )
    pairs = weights > 0
    if torch.equal(pairs, allowed_pairs(query, grouped, attention_mask, is_causal).expand_as(pairs)):
        raise UnsupportedAttentionError(
            f"{config.method}: its near field contains all pairs or cannot be separated from its far field, so that "
            "the residual is empty. Take a longer sequence, a smaller block_size or window_size, or one of "
            f"{', '.join(_near_field_methods())}"
        )
    return pairs


def _without_underflow(
    query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor, float]:
    """Queries, keys and a scale that is so small, if necessary, that no softmax weight underflows."""
    if query.dtype == torch.float32:
        # The hash of a token is the same in float64, but not in float32 if the token is float16.
        query, key = query.double(), key.double()
    sizes = torch.linalg.vector_norm(key.double(), dim=3)
    if mask is not None:
        sizes = sizes.masked_fill(~mask[:, None], 0.0)
    spread = 2.0 * (sizes.amax() * torch.linalg.vector_norm(query.double(), dim=3).amax()).item()
    most = max(1.0, -math.log(torch.finfo(query.dtype).tiny) - math.log(key.shape[2]))
    scale = query.shape[3] ** -0.5 if scale is None else scale
    return query, key, scale if abs(scale) * spread <= most else math.copysign(most / spread, scale)


def _near_field_methods() -> list[str]:
    """The methods whose config gives a size of the near field, and no features, whose weights are never 0."""
    found = []
    for name in available_methods():
        fields = {spec.name for spec in dataclasses.fields(method_info(name).config_class)}
        if fields & {"block_size", "window_size"} and "num_features" not in fields:
            found.append(name)
    return found


@torch.no_grad()
def residual_matrix(
    method_or_config: str | MethodConfig,
    query: Tensor,
    key: Tensor,
    *,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    seed: int = 0,
) -> Tensor:
    """D^-1 A_res of KDEformer's Eq. 10: the softmax matrix with 0 at the pairs of a method's near field.

    D is that of the whole matrix A, as in Eq. 11.

    Args:
        method_or_config: as in `near_field_pairs`.
        query: (B, H, Nq, D).
        key: (B, H_kv, Nk, D); H_kv divides H.
        attention_mask: bool (B, Nk), True = attend.
        is_causal: as in `softmax_matrix`.
        scale: factor of the scores; 1/sqrt(D) by default.
        seed: as in `near_field_pairs`.

    Returns:
        float64 (B, H, Nq, Nk).

    Raises:
        UnsupportedAttentionError: as `softmax_matrix` and `near_field_pairs`.
    """
    pairs = near_field_pairs(
        method_or_config, query, key, attention_mask=attention_mask, is_causal=is_causal, scale=scale, seed=seed
    )
    weights = softmax_matrix(query, key, attention_mask=attention_mask, is_causal=is_causal, scale=scale)
    return weights.masked_fill_(pairs, 0.0)


@torch.no_grad()
def singular_values(matrix: Tensor) -> Tensor:
    """Singular values in descending order: (..., N, M) -> float64 (..., min(N, M)).

    Raises:
        UnsupportedAttentionError: not a floating-point matrix, or one whose decomposition takes more than minutes.
    """
    _check_matrix("singular_values", matrix)
    if min(matrix.shape[-2:]) > _MAX_SIDE:
        raise UnsupportedAttentionError(
            f"singular_values: decomposing a matrix of {matrix.shape[-2]} x {matrix.shape[-1]} takes too long; give "
            f"{_MAX_SIDE} queries or keys, or fewer"
        )
    values: Tensor = torch.linalg.svdvals(matrix.double())
    return values


@torch.no_grad()
def stable_rank(matrix: Tensor) -> Tensor:
    """|M|_F^2 / |M|_op^2 (KDEformer, section 2): (..., N, M) -> float64 (...), from 1 to the rank; 0 for a zero matrix.

    The operator norm of large matrices is computed iteratively, to a relative accuracy of 1e-5.

    Raises:
        UnsupportedAttentionError: not a floating-point matrix, or one that does not fit in memory.
    """
    _check_matrix("stable_rank", matrix)
    matrix = matrix.double()
    largest = operator_norm(matrix)
    ratio = torch.linalg.matrix_norm(matrix) / largest.clamp(min=torch.finfo(largest.dtype).tiny)
    return torch.where(largest > 0, ratio.square(), 0.0)


def _check_matrix(function: str, matrix: Tensor) -> None:
    """Check that `matrix` is a floating-point tensor (..., N, M) that fits in memory as float64."""
    if matrix.ndim < 2 or not matrix.is_floating_point():
        raise UnsupportedAttentionError(
            f"{function}: give a floating-point tensor (..., N, M); got {matrix.dtype} {tuple(matrix.shape)}"
        )
    _check_dense(function, math.prod(matrix.shape[:-2]), *matrix.shape[-2:])


def _check_dense(function: str, num_matrices: int, q_len: int, kv_len: int) -> None:
    """Check that dense float64 matrices of all heads fit in memory."""
    if num_matrices * q_len * kv_len > _MAX_ENTRIES:
        raise UnsupportedAttentionError(
            f"{function}: {num_matrices} float64 matrices of {q_len} x {kv_len} take "
            f"{num_matrices * q_len * kv_len / (1 << 27):.0f} GiB, and the limit is {_MAX_ENTRIES >> 27} GiB. Take "
            "fewer heads or sequences at a time, or fewer tokens"
        )
