"""Linear attention with the features phi(x) = elu(x) + 1 (Katharopoulos et al. 2020): sums of features over the keys.

With S = sum_j phi(k_j) v_j^T and Z = sum_j phi(k_j), the output of a query is phi(q)^T S / phi(q)^T Z. In the causal
form the sums run over chunks of tokens: S and Z of the chunks before come from a prefix sum, and the pairs of a query
and a key of the same chunk form a triangular matrix.

The buffered forms compute the same without a gradient. They process a few heads and a block of tokens at a time, so
that the features stay in the CPU's cache and no new memory is touched except for the output.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout

from hf_efficient_attn.ops.blocks import pad_to_blocks
from hf_efficient_attn.ops.partial import accumulation_dtype, exp_
from hf_efficient_attn.ops.scan import exclusive_prefix_sum, running_sum

_CHUNK = 64  # tokens
# The buffered forms process this many heads at a time, and blocks of this many features.
BUFFERED_HEADS = 8
_BLOCK = 1 << 20


class LinearState(NamedTuple):
    """Eq. 16-19: `products` (..., D, Dv) is S and `norm` (..., D) is Z of some tokens."""

    products: Tensor
    norm: Tensor


def elu_features(x: Tensor) -> Tensor:
    """phi(x) = elu(x) + 1 (Eq. 7), which is positive: (...) -> (...).

    Computed as written it is 0 for x below -17 in float32, so both forms here take the exponential itself. The maximum
    of 1 + x and exp(min(x, 0)) is faster than their sum with relu, but has another gradient at 0.
    """
    if x.requires_grad:
        return torch.relu(x) + x.clamp(max=0.0).exp()
    return torch.maximum(x + 1.0, exp_(x.clamp(max=0.0)))


def _query_factor(scale: float, head_dim: int) -> float | None:
    """Factor of the queries that stands for `scale`; None for the default scale, 1/sqrt(D)."""
    factor = scale * head_dim**0.5
    return None if abs(factor - 1.0) < 1e-12 else factor


def query_features(query: Tensor, scale: float) -> Tensor:
    """Features of queries (..., D) times scale * sqrt(D), in the accumulation dtype."""
    query, factor = query.to(accumulation_dtype(query.dtype)), _query_factor(scale, query.shape[-1])
    return elu_features(query if factor is None else query * factor)


def key_features(key: Tensor, key_mask: Tensor | None) -> Tensor:
    """Features of keys (..., D) in the accumulation dtype, 0 where `key_mask`, bool (...), is False."""
    phi = elu_features(key.to(accumulation_dtype(key.dtype)))
    return phi if key_mask is None else phi * key_mask.unsqueeze(-1)


def normalize(out: Tensor, total: Tensor) -> Tensor:
    """Divide sums of values (..., Dv) by sums of weights (..., 1), in place without a gradient.

    The output is 0 where the weights sum to 0: there is no key, or all features underflow. Where they sum to less than
    5e-31 (2e-246 in float64), 1 / total and so the gradient could overflow, and no gradient passes.
    """
    total = total.masked_fill(total == 0, 1.0)
    if not out.requires_grad:
        return out.div_(total)
    is_tiny = total < torch.finfo(total.dtype).tiny ** 0.8
    out, total = (torch.where(is_tiny, x.detach(), x) for x in (out, total))
    return out / total


def linear_attention(phi_q: Tensor, phi_k: Tensor, value: Tensor, dropout_p: float) -> Tensor:
    """Bidirectional form: features (BH, Nq, D) and (BH, Nk, D), value (BH, Nk, Dv) -> (BH, Nq, Dv)."""
    total = phi_q @ phi_k.sum(1).unsqueeze(-1)
    phi_q = dropout(phi_q, dropout_p) if dropout_p else phi_q
    return normalize(phi_q @ (phi_k.transpose(1, 2) @ value), total)


def causal_linear_attention(
    phi_q: Tensor, phi_k: Tensor, value: Tensor, dropout_p: float, initial_state: LinearState | None = None
) -> Tensor:
    """Causal form by prefix sums over chunks.

    Args:
        phi_q: (BH, N, D), features of the queries.
        phi_k: (BH, N, D), features of the keys.
        value: (BH, N, Dv), in the same dtype.
        dropout_p: probability of dropping a feature of a query, the same feature for all keys.
        initial_state: S (BH, D, Dv) and Z (BH, D) of earlier tokens, or None.

    Returns:
        (BH, N, Dv).
    """
    batch_heads, q_len = phi_q.shape[:2]
    size = min(_CHUNK, q_len)
    phi_q, phi_k, value = (pad_to_blocks(x, size) for x in (phi_q, phi_k, value))  # (BH, C, size, .)
    state, norm = exclusive_prefix_sum(phi_k.transpose(2, 3) @ value), exclusive_prefix_sum(phi_k.sum(2))
    if initial_state is not None:
        state, norm = state + initial_state.products[:, None], norm + initial_state.norm[:, None]
    state, norm = state.flatten(0, 1), norm.flatten(0, 1).unsqueeze(-1)
    phi_q, phi_k, value = (x.flatten(0, 1) for x in (phi_q, phi_k, value))
    weights = (phi_q @ phi_k.transpose(1, 2)).tril()  # of the pairs of a chunk, (BH * C, size, size)
    total = torch.baddbmm(weights.sum(-1, keepdim=True), phi_q, norm)
    if dropout_p:
        phi_q = dropout(phi_q, dropout_p)
        weights = (phi_q @ phi_k.transpose(1, 2)).tril()
    out = normalize(torch.baddbmm(weights @ value, phi_q, state), total)
    return out.view(batch_heads, -1, out.shape[-1])[:, :q_len]


def buffered_linear_attention(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, out: Tensor | None = None, *, scale: float
) -> Tensor:
    """Bidirectional form in two passes over blocks of tokens, one over the keys and one over the queries.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        value: (BH, Nk, Dv).
        key_mask: bool (BH, Nk) or None.
        out: (BH, Nq, Dv) to write into, or None.
        scale: factor of the scores.
    """
    (batch_heads, q_len, head_dim), kv_len, acc_dtype = query.shape, key.shape[1], accumulation_dtype(query.dtype)
    out = value.new_empty(batch_heads, q_len, value.shape[2]) if out is None else out
    block = max(1, min(_BLOCK // (batch_heads * head_dim), max(q_len, kv_len)))
    first, second = (query.new_empty(batch_heads, block, head_dim, dtype=acc_dtype) for _ in range(2))
    factor = _query_factor(scale, head_dim)

    def features(x: Tensor) -> Tensor:
        """`elu_features` in the first buffer; the second one is overwritten."""
        phi, linear = first[:, : x.shape[1]], second[:, : x.shape[1]]
        exp_(torch.clamp(x, max=0.0, out=phi))
        return torch.maximum(phi, torch.add(x, 1.0, out=linear), out=phi)

    state, norm = first.new_zeros(batch_heads, head_dim, value.shape[2]), first.new_zeros(batch_heads, 1, head_dim)
    for start in range(0, kv_len, block):
        tokens = slice(start, start + block)
        phi = features(key[:, tokens].to(acc_dtype))
        phi = phi if key_mask is None else phi.mul_(key_mask[:, tokens, None])
        state.baddbmm_(phi.transpose(1, 2), value[:, tokens].to(acc_dtype))
        norm += phi.sum(1, keepdim=True)
    for start in range(0, q_len, block):
        tokens = slice(start, start + block)
        queries = query[:, tokens].to(acc_dtype)
        phi = features(queries if factor is None else queries * factor)
        # A matrix product with a single column takes half the time of one with 64, so the total is a sum.
        total = torch.mul(phi, norm, out=second[:, : queries.shape[1]]).sum(2, keepdim=True)
        if out.dtype == acc_dtype:
            normalize(torch.bmm(phi, state, out=out[:, tokens]), total)
        else:
            out[:, tokens] = normalize(phi @ state, total)
    return out


def buffered_causal_linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    *initial_state: Tensor,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Causal form in one pass over blocks of chunks.

    Args:
        query: (BH, N, D).
        key: (BH, N, D).
        value: (BH, N, Dv).
        key_mask: bool (BH, N) or None.
        initial_state: S (BH, D, Dv) and Z (BH, D) of earlier tokens, or nothing.
        scale: factor of the scores.
        out: (BH, N, Dv) to write into, or None.
    """
    (batch_heads, q_len, head_dim), acc_dtype = query.shape, accumulation_dtype(query.dtype)
    size = min(_CHUNK, q_len)
    block = max(1, _BLOCK // (4 * batch_heads * size * max(size, head_dim))) * size
    out = value.new_empty(batch_heads, q_len, value.shape[2]) if out is None else out
    if initial_state:
        state, norm = initial_state[0][:, None], initial_state[1][:, None, None]
    else:
        state = query.new_zeros(batch_heads, 1, head_dim, value.shape[2], dtype=acc_dtype)
        norm = query.new_zeros(batch_heads, 1, 1, head_dim, dtype=acc_dtype)
    for start in range(0, q_len, block):
        tokens = slice(start, min(start + block, q_len))
        phi_q = query_features(query[:, tokens], scale)
        phi_k = key_features(key[:, tokens], None if key_mask is None else key_mask[:, tokens])
        phi_q, phi_k, values = (pad_to_blocks(x, size) for x in (phi_q, phi_k, value[:, tokens].to(acc_dtype)))
        phi_k_t = phi_k.transpose(2, 3)
        state = running_sum(phi_k_t @ values, None, state[:, -1])
        norm = running_sum(phi_k.sum(2, keepdim=True), None, norm[:, -1])
        weights = (phi_q @ phi_k_t).tril_()
        total = weights.sum(3, keepdim=True).add_((phi_q * norm[:, :-1]).sum(3, keepdim=True))
        result = normalize((weights @ values).add_(phi_q @ state[:, :-1]), total)
        out[:, tokens] = result.flatten(1, 2)[:, : tokens.stop - start]
    return out
