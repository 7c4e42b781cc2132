"""Dense attention matrices, their norms, exact outputs, and errors of methods, in float64; parts of `hea.analysis`."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_efficient_attn import methods
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.ops.backends.devices import in_float64

__all__ = [
    "AttentionError", "attention_error", "exact_output", "near_field_pairs", "relative_error", "softmax_matrix",
]  # fmt: skip

# Largest number of entries of a dense matrix, all heads together: 4 GiB of float64.
_MAX_ENTRIES = 1 << 29
# Longest shorter side of a matrix whose operator norm is computed from all eigenvalues of M^T M.
_SMALL_SIDE = 512
# Queries of `exact_output` that are computed at a time.
_CHUNK_QUERIES = 1024


class AttentionError(NamedTuple):
    """Relative error |A - E| / |E| of an output A with respect to the exact output E.

    Attributes:
        operator: (...), in the operator norm.
        frobenius: (...), in the Frobenius norm.
    """

    operator: Tensor
    frobenius: Tensor


@in_float64
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
    _check_heads(query, key, attention_mask)
    check_dense("softmax_matrix", *query.shape[:3], key.shape[2])
    allowed = _allowed_pairs(query, key, attention_mask, is_causal)
    if attention_mask is not None:
        key = key.masked_fill(~attention_mask[:, None, :, None], 0.0)
    key = key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = (query.double() @ key.mT).mul_(query.shape[3] ** -0.5 if scale is None else float(scale))
    return scores.masked_fill_(~allowed, -torch.inf).softmax(3).nan_to_num_(0.0)


@in_float64
@torch.no_grad()
def near_field_pairs(
    method_or_config: str | methods.MethodConfig,
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
    fast form. All scores are 0 there, so that no weight underflows. With `near_field="auto"` the scores decide which
    pairs are near; they are computed in float64, where weights underflow if scores differ by more than 700.

    The method must have a near field that is a set of pairs: `block_size` or `window_size`. `scale` has an effect with
    `near_field="auto"` only, and `seed` is added to the seed of the config. The other arguments are those of
    `softmax_matrix`.

    Returns:
        bool (B, H, Nq, Nk).

    Raises:
        UnsupportedAttentionError: a method without a near field, a near field that contains all pairs (the sequence is
            within the budget, or the far field cannot be separated from it), or too many tokens.
    """
    _check_heads(query, key, attention_mask)
    config = methods.make_config(method_or_config)
    check_dense("near_field_pairs", *query.shape[:3], key.shape[2])
    # The weights of features are never 0, so that such a method is no proposal for a near field.
    kinds = {name: methods.method_info(name).config_class.hyperparameters() for name in methods.available_methods()}
    proposed = ", ".join(
        name for name, of in kinds.items() if {"block_size", "window_size"} & set(of) and "num_features" not in of
    )
    names = config.hyperparameters()
    sizes = [getattr(config, name) for name in ("block_size", "window_size") if name in names]
    if not sizes or ("num_features" in names and not any(sizes)):
        methods.refuse(f"it has no near field of pairs. Methods that have one: {proposed}", config)
    if "num_samples" in names:
        config = methods.make_config(config, num_samples=0)
    if getattr(config, "near_field", None) == "auto" and not is_causal:
        query, key = query.double(), key.double()
    else:
        scale = 0.0
    # With one unit vector as each value, the output is the matrix of weights.
    units = torch.eye(key.shape[2], dtype=query.dtype, device=query.device).expand(*key.shape[:2], -1, -1)
    weights = methods.naive_attention(
        config, query, key, units, attention_mask=attention_mask, is_causal=is_causal, scale=scale, seed=seed
    )
    pairs = weights > 0
    if torch.equal(pairs, _allowed_pairs(query, key, attention_mask, is_causal).expand_as(pairs)):
        raise UnsupportedAttentionError(
            f"{config.method}: its near field contains all pairs or cannot be separated from its far field, so that "
            f"the residual is empty. Take a longer sequence, a smaller block_size or window_size, or one of {proposed}"
        )
    return pairs


@in_float64
@torch.no_grad()
def operator_norm(matrix: Tensor) -> Tensor:
    """The largest singular value: (..., N, M) -> float64 (...), NaN for matrices that are not finite.

    If the shorter side has at most 512 entries, it is the root of the largest eigenvalue of M^T M, which is as accurate
    as a decomposition of M. Larger matrices are projected on a growing Krylov space of M^T M until the norm of the
    projection changes by less than 1e-6 of it.
    """
    matrix = matrix.double()
    if matrix.shape[-2] < matrix.shape[-1]:
        matrix = matrix.mT
    if 0 in matrix.shape:
        return matrix.new_zeros(matrix.shape[:-2])
    # Scaled to entries of at most 1, so that squares neither overflow nor underflow.
    size = matrix.abs().amax((-2, -1))
    is_finite = size.isfinite() & (size > 0)
    scaled = torch.where(is_finite[..., None, None], matrix / size[..., None, None], 0.0)
    if matrix.shape[-1] <= _SMALL_SIDE:
        norm = torch.linalg.eigvalsh(scaled.mT @ scaled)[..., -1].clamp(min=0.0).sqrt()
    else:
        generator = torch.Generator().manual_seed(0)  # not the global one, whose state must not change
        basis = torch.randn(matrix.shape[-1], 1, generator=generator, dtype=torch.float64).to(matrix.device)
        basis, norm, before = basis.expand(*matrix.shape[:-2], -1, 1), torch.zeros_like(size), -torch.ones_like(size)
        while bool((norm - before > 1e-6 * norm).any()) and basis.shape[-1] < matrix.shape[-1]:
            for _ in range(min(8, matrix.shape[-1] - basis.shape[-1])):
                image = scaled.mT @ (scaled @ basis[..., -1:])
                basis = torch.linalg.qr(torch.cat((basis, image), -1))[0]
            before, norm = norm, torch.linalg.matrix_norm(scaled @ basis, 2)
    return torch.where(size.isfinite(), norm * torch.where(is_finite, size, 0.0), torch.nan)


@in_float64
@torch.no_grad()
def exact_output(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Exact attention in float64, chunked over queries: the reference for the methods.

    `value` is (B, H_kv, Nk, Dv); the other arguments are those of `softmax_matrix`.

    Returns:
        float64 (B, H, Nq, Dv); 0 for queries with nothing to attend to.

    Raises:
        UnsupportedAttentionError: shapes that do not match.
    """
    _check_heads(query, key, attention_mask)
    if value.ndim != 4 or value.shape[:3] != key.shape[:3]:
        raise UnsupportedAttentionError(f"value {tuple(value.shape)} does not match key {tuple(key.shape)}")
    if attention_mask is not None:
        masked = ~attention_mask[:, None, :, None]
        key, value = key.masked_fill(masked, 0.0), value.masked_fill(masked, 0.0)
    groups = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(groups, 1) for x in (key, value))
    outs = []
    for start in range(0, query.shape[2], _CHUNK_QUERIES):
        chunk = slice(start, start + _CHUNK_QUERIES)
        allowed = _allowed_pairs(query, key, attention_mask, is_causal, chunk)
        out = scaled_dot_product_attention(query[:, :, chunk].double(), key, value, attn_mask=allowed, scale=scale)
        outs.append(out.masked_fill_(~allowed.any(3, keepdim=True), 0.0))
    return torch.cat(outs, 2)


@in_float64
@torch.no_grad()
def relative_error(approximate: Tensor, exact: Tensor) -> AttentionError:
    """Relative error |A - E| / |E| of every matrix, in the operator norm and in the Frobenius norm.

    Args:
        approximate: A, (..., N, Dv).
        exact: E, (..., N, Dv).

    Returns:
        AttentionError of float64 (...); 0 where A = E = 0, inf where only E = 0.

    Raises:
        UnsupportedAttentionError: shapes that differ.
    """
    if approximate.shape != exact.shape or exact.ndim < 2:
        raise UnsupportedAttentionError(
            f"relative_error: give two outputs of one shape (..., N, Dv); got {tuple(approximate.shape)} and "
            f"{tuple(exact.shape)}"
        )
    exact = exact.double()
    difference = approximate.double() - exact
    norms = ((norm(difference), norm(exact)) for norm in (operator_norm, torch.linalg.matrix_norm))
    return AttentionError(*(torch.where(error == 0, 0.0, error / size) for error, size in norms))


@torch.no_grad()
def attention_error(
    method_or_config: str | methods.MethodConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    seed: int = 0,
    exact: Tensor | None = None,
    **hyperparameters: Any,
) -> AttentionError:
    """Error of a method against exact attention on the same inputs, for every head.

    The relative operator norm is the measure of KDEformer's section 4.1. With as many queries as keys, the queries at
    masked positions are padding and do not count. Memory is linear in the length of the sequence.

    The arguments are those of `hea.attention`. `exact` (B, H, Nq, Dv) is the result of `exact_output` for these inputs,
    if it is known already.

    Returns:
        AttentionError of float64 (B, H).

    Raises:
        UnsupportedAttentionError: as `hea.attention`.
    """
    options: dict[str, Any] = {"attention_mask": attention_mask, "is_causal": is_causal, "scale": scale}
    out = methods.attention(method_or_config, query, key, value, seed=seed, **options, **hyperparameters)
    if exact is None:
        exact = exact_output(query, key, value, **options)
    if attention_mask is not None and query.shape[2] == key.shape[2]:
        padding = ~attention_mask[:, None, :, None]
        out, exact = out.masked_fill(padding, 0.0), exact.masked_fill(padding, 0.0)
    return relative_error(out, exact)


def _allowed_pairs(
    query: Tensor, key: Tensor, key_mask: Tensor | None, is_causal: bool, chunk: slice = slice(None)
) -> Tensor:
    """The pairs that exact attention uses, for the queries of a chunk: bool (B or 1, 1, chunk, Nk)."""
    q_len, kv_len = query.shape[2], key.shape[2]
    position = torch.arange(q_len, device=query.device)[chunk] + (kv_len - q_len)
    allowed = torch.ones(1, 1, position.shape[0], kv_len, dtype=torch.bool, device=query.device)
    if is_causal:
        allowed = allowed & (torch.arange(kv_len, device=query.device) <= position[:, None])
    return allowed if key_mask is None else allowed & key_mask[:, None, None]


def _check_heads(query: Tensor, key: Tensor, key_mask: Tensor | None) -> None:
    """Check that query (B, H, Nq, D), key (B, H_kv, Nk, D) and key_mask (B, Nk) match."""
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}"
    if not query.ndim == key.ndim == 4 or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise UnsupportedAttentionError(f"give query and key as (batch, num_heads, length, head_dim); got {shapes}")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise UnsupportedAttentionError(f"the number of key heads must divide that of query heads; got {shapes}")
    if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape != key.shape[:3:2]):
        raise UnsupportedAttentionError(
            f"attention_mask must be bool {(key.shape[0], key.shape[2])}, True = attend; got {key_mask.dtype} "
            f"{tuple(key_mask.shape)}"
        )


def check_dense(function: str, *shape: int) -> None:
    """Check that dense float64 matrices (..., N, M) of all heads fit in memory."""
    (*heads, q_len, kv_len), entries = shape, math.prod(shape)
    if entries > _MAX_ENTRIES:
        raise UnsupportedAttentionError(
            f"{function}: {math.prod(heads)} float64 matrices of {q_len} x {kv_len} take {entries / (1 << 27):.0f} "
            f"GiB, and the limit is {_MAX_ENTRIES >> 27} GiB. Take fewer heads or sequences at a time, or fewer tokens"
        )
