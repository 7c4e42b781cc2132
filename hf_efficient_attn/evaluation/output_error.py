"""Exact attention as a reference, and the errors of outputs and methods. Parts of `hea.analysis`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.norms import operator_norm
from hf_efficient_attn.evaluation.pairs import allowed_pairs, check_heads
from hf_efficient_attn.methods import MethodConfig, attention

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
    check_heads(query, key, attention_mask)
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
            allowed = allowed_pairs(query, key, attention_mask, is_causal, chunk)
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
