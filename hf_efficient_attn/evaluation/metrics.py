"""Measurements of attention matrices, and errors of methods: the public module `hea.analysis`.

The functions answer questions that two papers ask, for any queries and keys:

- "Improved Algorithms for Kernel Matrix-Vector Multiplication under Sparsity Assumptions" (2024; called the sparsity
  paper below), section 4. Assumption A: the sum of all but the n largest entries of the Gaussian kernel matrix is at
  most a constant times the sum of the n largest (`head_to_tail`). Experiment (ii): is there a gap in size between the
  two groups of entries (`order_statistics_ratio`)?
- KDEformer (Zandieh, Han, Daliri, Karbasi, ICML 2023), section 3.4 and Fig. 2: how much does the stable rank of D^-1 A
  decrease when the near field is removed (`softmax_matrix`, `residual_matrix`, `singular_values`, `stable_rank`)?

`attention_error` compares a method with exact attention by the relative operator norm of KDEformer's section 4.1.

All functions except those for errors build dense float64 matrices. They are for analysis, not for computing attention:
sizes that do not fit in memory or take hours are refused. No gradient flows through any function of this module.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.norms import operator_norm
from hf_efficient_attn.methods import (
    MethodConfig,
    attention,
    available_methods,
    make_config,
    method_info,
    naive_attention,
)

# Largest number of entries of a dense matrix, all heads together: 4 GiB of float64.
_MAX_ENTRIES = 1 << 29
# Largest size of a kernel matrix, and of the shorter side of a matrix to decompose: some minutes on one core.
_MAX_SIDE = 4096
# Entries of the kernel matrices that are computed at a time (chunked over heads): 256 MiB of float64.
_CHUNK_ENTRIES = 1 << 25
# Queries of `exact_output` that are computed at a time.
_CHUNK_QUERIES = 1024


class OrderRatios(NamedTuple):
    """Ratios of the n-th largest entry of an n x n kernel matrix to smaller entries; inf where float64 overflows.

    Attributes:
        to_double: (...), ratio to the 2n-th largest entry.
        to_next: (...), ratio to the (n+1)-th largest entry.
    """

    to_double: Tensor
    to_next: Tensor


class AttentionError(NamedTuple):
    """Relative error |A - E| / |E| of an output A with respect to the exact output E.

    Attributes:
        operator: (...), in the operator norm.
        frobenius: (...), in the Frobenius norm.
    """

    operator: Tensor
    frobenius: Tensor


@torch.no_grad()
def head_to_tail(query: Tensor, key: Tensor, *, scale: float | None = None, first: int = 50) -> Tensor:
    """Ratio of the tail's sum to the head's sum for every prefix: experiment (i) of the sparsity paper, assumption A.

    K_ij = exp(-|q'_i - k'_j|^2 scale / 2) is the Gaussian kernel matrix that Lemma 4.1 derives from the queries and
    keys of the whole sequence. For the prefix of length i, the head is the i largest entries of K[:i, :i], and the tail
    is the other i^2 - i entries. Assumption A says that this ratio is at most a constant; the paper finds less than
    4.6 on BERT.

    Args:
        query: (..., n, D), without padding.
        key: (..., n, D), of the same shape.
        scale: factor of the scores; 1/sqrt(D) by default, as in the paper.
        first: length of the first prefix.

    Returns:
        float64 (..., n - first + 1): the ratios for the prefixes of length first, first + 1, ..., n.

    Raises:
        UnsupportedAttentionError: shapes that do not match, fewer than `first` tokens, or too many tokens for dense
            (n, n) matrices.
    """
    _check_tokens(query, key)
    num_tokens = query.shape[-2]
    if isinstance(first, bool) or not isinstance(first, int) or not 1 <= first <= num_tokens:
        raise UnsupportedAttentionError(
            f"head_to_tail: first={first!r} is not the length of a prefix of {num_tokens} tokens; give first between 1 "
            f"and {num_tokens}, or a longer sequence"
        )
    ratios = torch.cat([_prefix_ratios(log_kernel, first) for log_kernel in _log_kernels(query, key, scale)])
    return ratios.reshape(*query.shape[:-2], num_tokens - first + 1)


def _prefix_ratios(log_kernel: Tensor, first: int) -> Tensor:
    """The ratios from logarithms of kernel matrices, (chunk, n, n) -> (chunk, n - first + 1).

    Only the n largest entries of the current prefix are kept from one prefix to the next: the head of a longer prefix
    never has more than n entries.
    """
    num_tokens = log_kernel.shape[-1]
    entries = log_kernel[:, :first, :first].flatten(1)
    total = entries.logsumexp(1)
    largest = entries.topk(min(num_tokens, first * first), 1).values
    ratios = []
    for i in range(first, num_tokens + 1):
        if i > first:
            new = torch.cat((log_kernel[:, i - 1, :i], log_kernel[:, : i - 1, i - 1]), 1)
            total = torch.logaddexp(total, new.logsumexp(1))
            largest = torch.cat((largest, new), 1)
            largest = largest.topk(min(num_tokens, largest.shape[1]), 1).values
        # In logarithms, so that the sums of a prefix with small entries do not underflow.
        ratios.append(torch.expm1(total - largest[:, :i].logsumexp(1)).clamp_(min=0.0))
    return torch.stack(ratios, 1)


@torch.no_grad()
def order_statistics_ratio(query: Tensor, key: Tensor, *, scale: float | None = None) -> OrderRatios:
    """Ratios of the n-th largest entry of the Gaussian kernel matrix to the 2n-th and to the (n+1)-th largest.

    This is experiment (ii) of the sparsity paper's section 4. Large ratios would mean that every entry of the tail is
    much smaller than every entry of the head. The paper finds medians of about 20 and of 1. Its computation meets
    divisions by zero; the logarithms used here do not.

    Args:
        query: (..., n, D), without padding, n at least 2.
        key: (..., n, D), of the same shape.
        scale: factor of the scores; 1/sqrt(D) by default.

    Returns:
        OrderRatios of float64 (...).

    Raises:
        UnsupportedAttentionError: shapes that do not match, fewer than 2 tokens, or too many tokens for dense (n, n)
            matrices.
    """
    _check_tokens(query, key)
    num_tokens = query.shape[-2]
    if num_tokens < 2:
        raise UnsupportedAttentionError("order_statistics_ratio: one token has no second entry; give at least 2 tokens")
    parts = [kernel.flatten(1).topk(2 * num_tokens, 1).values for kernel in _log_kernels(query, key, scale)]
    largest = torch.cat(parts).view(*query.shape[:-2], 2 * num_tokens)
    last = largest[..., num_tokens - 1]
    return OrderRatios((last - largest[..., -1]).exp(), (last - largest[..., num_tokens]).exp())


def _log_kernels(query: Tensor, key: Tensor, scale: float | None) -> Iterator[Tensor]:
    """Logarithms of the kernel matrices K, chunked over heads: float64 (chunk, n, n) each.

    Lemma 4.1: with a further coordinate w_j^2 = max |k|^2 - |k_j|^2 of k_j, and 0 of q_i, the squared distance is
    |q_i|^2 + max |k|^2 - 2 <q_i, k_j>. The term max |k|^2 scales the whole matrix and is left out, since only ratios
    are used. (The appendix writes w_j = sqrt(-|k_j|^2 + alpha) with alpha = -max |k|^2, which is not real: the sign of
    alpha is a misprint.)
    """
    num_tokens, head_dim = query.shape[-2:]
    factor = head_dim**-0.5 if scale is None else float(scale)
    chunk = max(1, _CHUNK_ENTRIES // (num_tokens * num_tokens))
    queries, keys = (torch.split(x.reshape(-1, num_tokens, head_dim), chunk) for x in (query, key))
    for q, k in zip(queries, keys, strict=True):
        q, k = q.double(), k.double()
        yield (q @ k.transpose(1, 2) - q.square().sum(2, keepdim=True) / 2).mul_(factor)


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
    _check_dense("softmax_matrix", query.shape[0] * query.shape[1], query.shape[2], key.shape[2])
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    allowed = _allowed_pairs(query, key, attention_mask, is_causal)
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
    seed: int = 0,
) -> Tensor:
    """The pairs that a method computes exactly: 1{H(q_i) = H(k_j)} of KDEformer's Eq. 10, or a window.

    They are the non-zero weights of the method's naive form without its samples, which follows the same plan as the
    fast form. All scores are 0 there, so that no weight underflows.

    Args:
        method_or_config: a method whose near field is a set of pairs: one with `block_size` or `window_size`.
        query: (B, H, Nq, D).
        key: (B, H_kv, Nk, D); H_kv divides H.
        attention_mask: bool (B, Nk), True = attend.
        is_causal: as in `softmax_matrix`.
        seed: as in `hea.attention`: it is added to the seed of the config.

    Returns:
        bool (B, H, Nq, Nk).

    Raises:
        UnsupportedAttentionError: a method without a near field, a near field that contains all pairs (the sequence is
            within the budget, or the far field cannot be separated from it), or too many tokens.
    """
    config = make_config(method_or_config)
    _check_heads(query, key, attention_mask)
    _check_dense("near_field_pairs", query.shape[0] * query.shape[1], query.shape[2], key.shape[2])
    fields = {spec.name for spec in dataclasses.fields(config)}
    if not fields & {"block_size", "window_size"}:
        raise UnsupportedAttentionError(
            f"{config.method} has no near field of pairs. Methods that have one: {', '.join(_near_field_methods())}"
        )
    if "num_samples" in fields:
        config = make_config(config, num_samples=0)
    # With one unit vector as each value, the output is the matrix of weights.
    units = torch.eye(key.shape[2], dtype=query.dtype, device=query.device).expand(*key.shape[:2], -1, -1)
    weights = naive_attention(
        config, query, key, units, attention_mask=attention_mask, is_causal=is_causal, scale=0.0, seed=seed
    )
    pairs = weights > 0
    grouped = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    if torch.equal(pairs, _allowed_pairs(query, grouped, attention_mask, is_causal).expand_as(pairs)):
        raise UnsupportedAttentionError(
            f"{config.method}: its near field contains all pairs or cannot be separated from its far field, so that "
            "the residual is empty. Take a longer sequence, a smaller block_size or window_size, or one of "
            f"{', '.join(_near_field_methods())}"
        )
    return pairs


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
        method_or_config, query, key, attention_mask=attention_mask, is_causal=is_causal, seed=seed
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

    Args:
        query: (B, H, Nq, D).
        key: (B, H_kv, Nk, D); H_kv divides H.
        value: (B, H_kv, Nk, Dv).
        attention_mask: bool (B, Nk), True = attend.
        is_causal: as in `softmax_matrix`.
        scale: factor of the scores; 1/sqrt(D) by default.

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
    query, key, value = query.double(), key.double(), value.double()
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    outs = []
    for start in range(0, query.shape[2], _CHUNK_QUERIES):
        chunk = slice(start, start + _CHUNK_QUERIES)
        allowed = None
        if attention_mask is not None or is_causal:
            allowed = _allowed_pairs(query, key, attention_mask, is_causal, chunk)
        out = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, chunk], key, value, attn_mask=allowed, scale=scale
        )
        outs.append(out if allowed is None else out.masked_fill_(~allowed.any(3, keepdim=True), 0.0))
    return torch.cat(outs, 2)


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

    def ratio(norm: Callable[[Tensor], Tensor]) -> Tensor:
        error = norm(difference)
        return torch.where(error == 0, 0.0, error / norm(exact))

    return AttentionError(ratio(operator_norm), ratio(torch.linalg.matrix_norm))


@torch.no_grad()
def attention_error(
    method_or_config: str | MethodConfig,
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

    Args:
        method_or_config: a name from `hea.available_methods()` or a method's config.
        query: (B, H, Nq, D).
        key: (B, H_kv, Nk, D); H_kv divides H.
        value: (B, H_kv, Nk, Dv).
        attention_mask: bool (B, Nk), True = attend.
        is_causal: as in `hea.attention`.
        scale: factor of the scores; 1/sqrt(D) by default.
        seed: as in `hea.attention`.
        exact: (B, H, Nq, Dv), the result of `exact_output` for these inputs, if it is known already.
        **hyperparameters: further arguments of `hea.attention`.

    Returns:
        AttentionError of float64 (B, H).

    Raises:
        UnsupportedAttentionError: as `hea.attention`.
    """
    out = attention(
        method_or_config, query, key, value, attention_mask=attention_mask, is_causal=is_causal, scale=scale, seed=seed,
        **hyperparameters,
    )  # fmt: skip
    if exact is None:
        exact = exact_output(query, key, value, attention_mask=attention_mask, is_causal=is_causal, scale=scale)
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


def _check_tokens(query: Tensor, key: Tensor) -> None:
    """Check that query and key have one shape (..., n, D), and that (n, n) matrices fit in memory."""
    if query.ndim < 2 or query.shape != key.shape or not query.is_floating_point():
        raise UnsupportedAttentionError(
            f"give query and key of one shape (..., tokens, head_dim), floating-point; got {query.dtype} "
            f"{tuple(query.shape)} and {tuple(key.shape)}"
        )
    if query.numel() == 0:
        raise UnsupportedAttentionError(f"a query of shape {tuple(query.shape)} contains no numbers")
    if query.shape[-2] > _MAX_SIDE:
        raise UnsupportedAttentionError(
            f"the kernel matrix of {query.shape[-2]} tokens would be sorted for every prefix, which takes too long; "
            f"take {_MAX_SIDE} tokens or fewer, such as query[..., :{_MAX_SIDE}, :]"
        )


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
