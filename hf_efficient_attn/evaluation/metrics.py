"""Measurements of attention matrices and of the methods' errors.

Two papers' questions can be put to any queries and keys:

- "Improved Algorithms for Kernel Matrix-Vector Multiplication under Sparsity Assumptions" (2024; below: the sparsity
  paper), section 4: is the sum of all but the n largest entries of the Gaussian kernel matrix at most a constant times
  the sum of the n largest (assumption A: `head_to_tail`)? Is there a gap in size between the two (experiment ii:
  `order_statistics_ratio`)?
- KDEformer (Zandieh, Han, Daliri, Karbasi, ICML 2023), section 3.4 and Fig. 2: how far does the stable rank of D^-1 A
  fall when a near field is taken out (`softmax_matrix`, `residual_matrix`, `singular_values`, `stable_rank`)?

`attention_error` compares a method with exact attention, by the relative operator norm of KDEformer's section 4.1.

Everything but the errors works on dense float64 matrices, which is the point of an analysis and no way to compute
attention; sizes that could not be held or would take hours are refused. No gradient flows through any of it.
"""

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.methods import (
    MethodConfig,
    attention,
    available_methods,
    make_config,
    method_info,
    naive_attention,
)

# Numbers of a dense matrix, all heads together: 4 GiB of float64.
_MOST_NUMBERS = 1 << 29
# The shorter side of a matrix whose singular values are wanted: some minutes on one core.
_MOST_SIDE = 4096
# Heads are walked so that their matrices of logarithms take up to 256 MiB.
_TILE = 1 << 25
_ROWS = 1024


class OrderRatios(NamedTuple):
    """Ratios of the n-th largest entry of a kernel matrix to smaller ones, (...) each.

    to_double: to the 2n-th largest. to_next: to the (n+1)-th largest. inf where the quotient exceeds float64.
    """

    to_double: Tensor
    to_next: Tensor


class AttentionError(NamedTuple):
    """Relative error of every head, (...) each: |A - E| / |E| in the operator norm and in the Frobenius norm."""

    operator: Tensor
    frobenius: Tensor


@torch.no_grad()
def head_to_tail(query: Tensor, key: Tensor, *, scale: float | None = None, first: int = 50) -> Tensor:
    """Sum of the tail over the sum of the head, for every prefix: assumption A, experiment (i) of the sparsity paper.

    K_ij = exp(-|q'_i - k'_j|^2 scale / 2) is the Gaussian kernel matrix that Lemma 4.1 makes of the queries and keys of
    the whole sequence. Of the prefix of length i, K[:i, :i], the head are the i largest entries and the tail the other
    i^2 - i. The paper calls assumption A that this is at most a constant, and finds less than 4.6 on BERT.

    Args:
        query, key: (..., n, D), as many queries as keys and none of them padding.
        scale: factor of the scores; 1/sqrt(D) by default, as in the paper.
        first: length of the first prefix.

    Returns:
        float64 (..., n - first + 1): the ratio of the prefixes of length first, first + 1, ..., n.

    Raises:
        UnsupportedAttentionError: shapes that do not fit, fewer than `first` tokens, or too many for n x n matrices.
    """
    _check_tokens(query, key)
    length = query.shape[-2]
    if isinstance(first, bool) or not isinstance(first, int) or not 1 <= first <= length:
        raise UnsupportedAttentionError(
            f"head_to_tail: prefixes from first={first!r} on do not exist in {length} tokens; give first between 1 and "
            f"{length}, or a longer sequence"
        )
    parts = [_prefix_ratios(logs, first) for logs in _log_kernels(query, key, scale)]
    return torch.cat(parts).unflatten(0, query.shape[:-2]) if query.ndim > 2 else parts[0][0]


def _prefix_ratios(logs: Tensor, first: int) -> Tensor:
    """The ratios of logarithms of kernel matrices, (A, n, n) -> (A, n - first + 1).

    From one prefix to the next the n largest entries so far are kept: no longer prefix has a larger head.
    """
    length = logs.shape[-1]
    start = logs[:, :first, :first].flatten(1)
    total = start.logsumexp(1)
    kept = start.topk(min(length, first * first), 1).values
    ratios = []
    for i in range(first, length + 1):
        if i > first:
            new = torch.cat((logs[:, i - 1, :i], logs[:, : i - 1, i - 1]), 1)
            total = torch.logaddexp(total, new.logsumexp(1))
            kept = torch.cat((kept, new), 1)
            kept = kept.topk(min(length, kept.shape[1]), 1).values
        # By logarithms, so that a prefix of small entries does not underflow.
        ratios.append(torch.expm1(total - kept[:, :i].logsumexp(1)).clamp_(min=0.0))
    return torch.stack(ratios, 1)


@torch.no_grad()
def order_statistics_ratio(query: Tensor, key: Tensor, *, scale: float | None = None) -> OrderRatios:
    """The n-th largest entry of the Gaussian kernel matrix over the 2n-th and over the (n+1)-th.

    Experiment (ii) of the sparsity paper's section 4: were they large, every entry of the tail would be much smaller
    than every entry of the head. The paper finds medians of about 20 and of 1. It meets divisions by zero, which the
    logarithms used here do not.

    Args:
        query, key: (..., n, D), n at least 2; scale: as in `head_to_tail`.

    Returns:
        OrderRatios of float64 (...).

    Raises:
        UnsupportedAttentionError: shapes that do not fit, fewer than 2 tokens, or too many for n x n matrices.
    """
    _check_tokens(query, key)
    length = query.shape[-2]
    if length < 2:
        raise UnsupportedAttentionError("order_statistics_ratio: one token has no second entry; give at least 2 tokens")
    tops = [logs.flatten(1).topk(2 * length, 1).values for logs in _log_kernels(query, key, scale)]
    top = torch.cat(tops).view(*query.shape[:-2], 2 * length)
    last = top[..., length - 1]
    return OrderRatios((last - top[..., -1]).exp(), (last - top[..., length]).exp())


def _log_kernels(query: Tensor, key: Tensor, scale: float | None):
    """log K of some heads at a time, float64 (A, n, n).

    Lemma 4.1: with w_j^2 = max |k|^2 - |k_j|^2 as a further coordinate of k_j, and 0 of q_i, the squared distance is
    |q_i|^2 + max |k|^2 - 2 <q_i, k_j>. The term max |k|^2 scales the whole matrix, and is left out: only ratios are
    wanted. (The appendix writes w_j = sqrt(-|k_j|^2 + alpha) with alpha = -max |k|^2, which is not real: its sign is a
    misprint.)
    """
    length, width = query.shape[-2:]
    factor = width**-0.5 if scale is None else float(scale)
    step = max(1, _TILE // (length * length))
    for q, k in zip(
        query.reshape(-1, length, width).split(step), key.reshape(-1, length, width).split(step), strict=True
    ):
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
    """D^-1 A: the weights of exact attention (KDEformer, section 1.1).

    Args:
        query: (B, H, Nq, D). key: (B, Hkv, Nk, D), Hkv a divisor of H.
        attention_mask: bool (B, Nk), True = attend.
        is_causal: query i sees the keys up to its own position, the queries being the last ones.
        scale: factor of the scores; 1/sqrt(D) by default.

    Returns:
        float64 (B, H, Nq, Nk), rows summing to 1, or to 0 where there is nothing to attend to.

    Raises:
        UnsupportedAttentionError: shapes that do not fit, or a matrix of more than 4 GiB.
    """
    _check_heads(query, key, attention_mask)
    _check_dense("softmax_matrix", query.shape[0] * query.shape[1], query.shape[2], key.shape[2])
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    allowed = _allowed(query, key, attention_mask, is_causal)
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

    They are the support of the method's readable form without its samples, which is made from the plan that the fast
    form follows. Its scores are set to 0, so that no weight underflows.

    Args:
        method_or_config: a method whose near field is a set of pairs: `kdeformer`, `hyperattention`, `longformer`.
        query, key, attention_mask, is_causal: as in `softmax_matrix`.
        seed: as in `hea.attention`: it is added to the config's own.

    Returns:
        bool (B, H, Nq, Nk).

    Raises:
        UnsupportedAttentionError: a method without a near field, one that holds every pair so that nothing is left
            (a sequence within the budget, or a method whose far field cannot be told from it), or too many tokens.
    """
    config = make_config(method_or_config)
    _check_heads(query, key, attention_mask)
    _check_dense("near_field_pairs", query.shape[0] * query.shape[1], query.shape[2], key.shape[2])
    fields = {spec.name for spec in dataclasses.fields(config)}
    if not fields & {"block_size", "window_size"}:
        raise UnsupportedAttentionError(
            f"{config.method} has no near field of pairs. Methods that have one: {', '.join(_near_methods())}"
        )
    if "num_samples" in fields:
        config = dataclasses.replace(config, num_samples=0)
    units = torch.eye(key.shape[2], dtype=query.dtype, device=query.device).expand(*key.shape[:2], -1, -1)
    options = {"attention_mask": attention_mask, "is_causal": is_causal, "seed": seed}
    pairs = naive_attention(config, query, key, units, scale=0.0, **options) > 0
    grouped = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    if torch.equal(pairs, _allowed(query, grouped, attention_mask, is_causal).expand_as(pairs)):
        raise UnsupportedAttentionError(
            f"{config.method}: all pairs are in its near field or cannot be told from it, and nothing is left. Take a "
            f"longer sequence, a smaller block_size or window_size, or one of {', '.join(_near_methods())}"
        )
    return pairs


def _near_methods() -> list[str]:
    """Methods whose config says how long the runs of their near field are, and of no features beside it."""
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

    D is that of the whole matrix A, as in Eq. 11. Arguments as in `softmax_matrix` and `near_field_pairs`.

    Returns:
        float64 (B, H, Nq, Nk).

    Raises:
        UnsupportedAttentionError: as those two.
    """
    options = {"attention_mask": attention_mask, "is_causal": is_causal}
    pairs = near_field_pairs(method_or_config, query, key, seed=seed, **options)
    return softmax_matrix(query, key, scale=scale, **options).masked_fill_(pairs, 0.0)


@torch.no_grad()
def singular_values(matrix: Tensor) -> Tensor:
    """Singular values, largest first: (..., N, M) -> float64 (..., min(N, M)).

    Raises:
        UnsupportedAttentionError: no matrix, or one whose decomposition would take more than minutes.
    """
    if matrix.ndim < 2 or not matrix.is_floating_point():
        raise UnsupportedAttentionError(
            f"singular_values: give a floating (..., N, M); got {matrix.dtype} {tuple(matrix.shape)}"
        )
    _check_dense("singular_values", math.prod(matrix.shape[:-2]), *matrix.shape[-2:])
    if min(matrix.shape[-2:]) > _MOST_SIDE:
        raise UnsupportedAttentionError(
            f"singular_values: decomposing a matrix of {matrix.shape[-2]} x {matrix.shape[-1]} takes too long; take "
            f"{_MOST_SIDE} queries or keys, or fewer"
        )
    return torch.linalg.svdvals(matrix.double())


@torch.no_grad()
def stable_rank(matrix: Tensor) -> Tensor:
    """|M|_F^2 / |M|_op^2 (KDEformer, section 2): (..., N, M) -> float64 (...), from 1 to the rank; 0 for a zero matrix.

    Raises:
        UnsupportedAttentionError: as `singular_values`.
    """
    squares = singular_values(matrix).square()
    largest = squares.amax(-1)
    return torch.where(largest > 0, squares.sum(-1) / largest.clamp(min=torch.finfo(largest.dtype).tiny), 0.0)


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
    """Exact attention in float64, some queries at a time: what methods are compared with.

    Args:
        value: (B, Hkv, Nk, Dv); the others as in `softmax_matrix`.

    Returns:
        float64 (B, H, Nq, Dv); rows with nothing to attend to are 0.

    Raises:
        UnsupportedAttentionError: shapes that do not fit.
    """
    _check_heads(query, key, attention_mask)
    if value.ndim != 4 or value.shape[:3] != key.shape[:3]:
        raise UnsupportedAttentionError(f"value {tuple(value.shape)} does not fit key {tuple(key.shape)}")
    if attention_mask is not None:
        hidden = ~attention_mask[:, None, :, None]
        key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)
    groups = query.shape[1] // key.shape[1]
    query, key, value = query.double(), key.double(), value.double()
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    every = attention_mask is None and not is_causal
    outs = []
    for start in range(0, query.shape[2], _ROWS):
        rows = query[:, :, start : start + _ROWS]
        seen = None if every else _allowed(query, key, attention_mask, is_causal, slice(start, start + _ROWS))
        out = torch.nn.functional.scaled_dot_product_attention(rows, key, value, attn_mask=seen, scale=scale)
        outs.append(out if every else out.masked_fill_(~seen.any(3, keepdim=True), 0.0))
    return torch.cat(outs, 2)


@torch.no_grad()
def relative_error(approximate: Tensor, exact: Tensor) -> AttentionError:
    """|A - E| / |E| of every matrix, in the operator norm and in the Frobenius norm, in float64.

    Args:
        approximate, exact: (..., N, Dv).

    Returns:
        AttentionError of float64 (...); 0 where both are 0, inf where only the exact one is.

    Raises:
        UnsupportedAttentionError: shapes that differ.
    """
    if approximate.shape != exact.shape or exact.ndim < 2:
        raise UnsupportedAttentionError(
            f"relative_error: two outputs of one shape (..., N, Dv) are compared; got {tuple(approximate.shape)} and "
            f"{tuple(exact.shape)}"
        )
    exact = exact.double()
    difference = approximate.double() - exact

    def ratio(order: int | str) -> Tensor:
        error, size = (torch.linalg.matrix_norm(x, ord=order) for x in (difference, exact))
        return torch.where(error == 0, 0.0, error / size)

    return AttentionError(ratio(2), ratio("fro"))


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
    **hyperparameters,
) -> AttentionError:
    """Error of a method against exact attention on the same inputs, for every head.

    The relative operator norm is the measure of KDEformer's section 4.1. Where there are as many queries as keys, the
    queries that the mask shuts out are padding and do not count. Memory is linear in the sequence.

    Args:
        method_or_config, query, key, value, attention_mask, is_causal, scale, seed, **hyperparameters: as in
            `hea.attention`.
        exact: (B, H, Nq, Dv), what `exact_output` gives for these inputs, when it is known already.

    Returns:
        AttentionError of float64 (B, H).

    Raises:
        UnsupportedAttentionError: as `hea.attention`.
    """
    options = {"attention_mask": attention_mask, "is_causal": is_causal, "scale": scale}
    out = attention(method_or_config, query, key, value, seed=seed, **options, **hyperparameters)
    exact = exact_output(query, key, value, **options) if exact is None else exact
    if attention_mask is not None and query.shape[2] == key.shape[2]:
        padding = ~attention_mask[:, None, :, None]
        out, exact = out.masked_fill(padding, 0.0), exact.masked_fill(padding, 0.0)
    return relative_error(out, exact)


def _allowed(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, rows: slice = slice(None)) -> Tensor:
    """The pairs of these queries that exact attention sees: bool (B or 1, 1, rows, Nk)."""
    length, columns = query.shape[2], key.shape[2]
    position = torch.arange(length, device=query.device)[rows] + (columns - length)
    seen = torch.ones(1, 1, position.shape[0], columns, dtype=torch.bool, device=query.device)
    if is_causal:
        seen = seen & (torch.arange(columns, device=query.device) <= position[:, None])
    return seen if mask is None else seen & mask[:, None, None]


def _check_heads(query: Tensor, key: Tensor, mask: Tensor | None) -> None:
    """That query (B, H, Nq, D), key (B, Hkv, Nk, D) and mask (B, Nk) fit together."""
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}"
    if not query.ndim == key.ndim == 4 or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise UnsupportedAttentionError(f"give query and key (batch, heads, length, width); got {shapes}")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise UnsupportedAttentionError(f"the number of key heads must divide that of query heads; got {shapes}")
    if mask is not None and (mask.dtype != torch.bool or tuple(mask.shape) != (key.shape[0], key.shape[2])):
        raise UnsupportedAttentionError(
            f"attention_mask must be bool {(key.shape[0], key.shape[2])}, True = attend; got {mask.dtype} "
            f"{tuple(mask.shape)}"
        )


def _check_tokens(query: Tensor, key: Tensor) -> None:
    """That query and key are (..., n, D) alike, and n x n matrices of one head can be held."""
    if query.ndim < 2 or query.shape != key.shape or not query.is_floating_point():
        raise UnsupportedAttentionError(
            f"give query and key of one shape (..., tokens, width), floating; got {query.dtype} {tuple(query.shape)} "
            f"and {tuple(key.shape)}"
        )
    if query.numel() == 0:
        raise UnsupportedAttentionError(f"there are no numbers in a query of shape {tuple(query.shape)}")
    length = query.shape[-2]
    if length > _MOST_SIDE:
        raise UnsupportedAttentionError(
            f"the kernel matrix of {length} tokens is sorted whole, for every prefix; take {_MOST_SIDE} tokens or "
            f"fewer, such as query[..., :{_MOST_SIDE}, :]"
        )


def _check_dense(what: str, heads: int, length: int, columns: int) -> None:
    """That dense float64 matrices of all heads can be held."""
    if heads * length * columns > _MOST_NUMBERS:
        raise UnsupportedAttentionError(
            f"{what}: {heads} matrices of {length} x {columns} float64 numbers take "
            f"{heads * length * columns / (1 << 27):.0f} GiB, and more than {_MOST_NUMBERS >> 27} are refused. Take "
            "fewer heads or batch rows at a time, or fewer tokens"
        )
