"""Stable ranks, and the concentration of the entries of Gaussian kernel matrices; `hea.analysis` names the papers."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.analysis.matrices import check_dense, operator_norm
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.ops.backends.devices import in_float64

__all__ = ["OrderRatios", "head_to_tail", "order_statistics_ratio", "stable_rank"]

# Largest size of a kernel matrix, and largest shorter side of a matrix to decompose: some minutes on one core.
_MAX_TOKENS = 4096
# Entries of the kernel matrices that are computed at a time (chunked over heads): 256 MiB of float64.
_CHUNK_ENTRIES = 1 << 25


class OrderRatios(NamedTuple):
    """Ratios of the n-th largest entry of an n x n kernel matrix to smaller entries; inf where float64 overflows.

    Attributes:
        to_double: (...), ratio to the 2n-th largest entry.
        to_next: (...), ratio to the (n+1)-th largest entry.
    """

    to_double: Tensor
    to_next: Tensor


@in_float64
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
    new = log_kernel[:, :first, :first].flatten(1)
    total, largest, ratios = new.logsumexp(1), new[:, :0], []
    for i in range(first, num_tokens + 1):
        if i > first:
            new = torch.cat((log_kernel[:, i - 1, :i], log_kernel[:, : i - 1, i - 1]), 1)
            total = torch.logaddexp(total, new.logsumexp(1))
        largest = torch.cat((largest, new), 1)
        largest = largest.topk(min(num_tokens, largest.shape[1]), 1).values
        # In logarithms, so that the sums of a prefix with small entries do not underflow.
        ratios.append(torch.expm1(total - largest[:, :i].logsumexp(1)).clamp_(min=0.0))
    return torch.stack(ratios, 1)


@in_float64
@torch.no_grad()
def order_statistics_ratio(query: Tensor, key: Tensor, *, scale: float | None = None) -> OrderRatios:
    """Ratios of the n-th largest entry of the Gaussian kernel matrix to the 2n-th and to the (n+1)-th largest.

    This is experiment (ii) of the sparsity paper's section 4. Large ratios would mean that every entry of the tail is
    much smaller than every entry of the head. The paper finds medians of about 20 and of 1.

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
        yield (q @ k.mT - q.square().sum(2, keepdim=True) / 2).mul_(factor)


def _check_tokens(query: Tensor, key: Tensor) -> None:
    """Check that query and key have one shape (..., n, D), and that (n, n) matrices fit in memory."""
    if query.ndim < 2 or query.shape != key.shape or not query.is_floating_point():
        raise UnsupportedAttentionError(
            f"give query and key of one shape (..., tokens, head_dim), floating-point; got {query.dtype} "
            f"{tuple(query.shape)} and {tuple(key.shape)}"
        )
    if query.numel() == 0:
        raise UnsupportedAttentionError(f"a query of shape {tuple(query.shape)} contains no numbers")
    if query.shape[-2] > _MAX_TOKENS:
        raise UnsupportedAttentionError(
            f"the kernel matrix of {query.shape[-2]} tokens would be sorted for every prefix, which takes too long; "
            f"take {_MAX_TOKENS} tokens or fewer, such as query[..., :{_MAX_TOKENS}, :]"
        )


@in_float64
@torch.no_grad()
def stable_rank(matrix: Tensor) -> Tensor:
    """|M|_F^2 / |M|_op^2 (KDEformer, section 2): (..., N, M) -> float64 (...), from 1 to the rank; 0 for a zero matrix.

    Raises:
        UnsupportedAttentionError: not a floating-point matrix, or one that does not fit in memory.
    """
    if matrix.ndim < 2 or not matrix.is_floating_point():
        raise UnsupportedAttentionError(
            f"stable_rank: give a floating-point tensor (..., N, M); got {matrix.dtype} {tuple(matrix.shape)}"
        )
    check_dense("stable_rank", *matrix.shape)
    largest = operator_norm(matrix)
    return torch.where(largest > 0, (torch.linalg.matrix_norm(matrix.double()) / largest).square(), 0.0)
