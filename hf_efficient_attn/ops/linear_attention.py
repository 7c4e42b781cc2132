"""Linear attention with the features phi(x) = elu(x) + 1 (Katharopoulos et al. 2020): sums of features over the keys.

With S = sum_j phi(k_j) v_j^T and Z = sum_j phi(k_j), the output of a query is phi(q)^T S / phi(q)^T Z. In the causal
form the sums run over chunks of tokens: S and Z of the chunks before come from a prefix sum, and the pairs of a query
and a key of the same chunk form a triangular matrix.

The buffered forms compute the same without a gradient. They process a few heads and a block of tokens at a time, so
that the features stay in the CPU's cache and no new memory is touched except for the output.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import dropout, pad, threshold

from hf_efficient_attn.ops import flash_linear
from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.blocks import pad_to_blocks
from hf_efficient_attn.ops.partial import accumulation_dtype, exp_
from hf_efficient_attn.ops.precision import sum_dtype
from hf_efficient_attn.ops.scan import exclusive_prefix_sum, exclusive_suffix_sum, running_sum

CHUNK, _ACCELERATOR_CHUNK = 64, 128  # tokens
# Columns of ones that the causal form adds to the values: a multiple of 8, as the kernels for half precision want it.
_ONES = 8
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
    of 1 + x and exp(min(x, 0)) is faster than their sum with relu, but has another gradient at 0. In half precision
    the result is rounded once: no step before the last one changes its operands.
    """
    needs_grad = torch.is_grad_enabled() and x.requires_grad
    if backend(x) != "cpu" and not needs_grad:
        # The gradient of elu(x) is 1 or e^x, here times max(x, 0) + 1: fewer kernels.
        return _elu_backward(x.clamp(min=0.0).add_(1.0), x)
    if needs_grad or x.dtype.itemsize == 2:
        return torch.relu(x) + x.clamp(max=0.0).exp()
    return torch.maximum(x + 1.0, exp_(x.clamp(max=0.0)))


def _elu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of x for that of elu(x), or of `elu_features`."""
    grad_x: Tensor = torch.ops.aten.elu_backward(grad, 1.0, 1.0, 1.0, False, x)
    return grad_x


def _features(x: Tensor, factor: float | None) -> Tensor:
    """Features of x (..., D), times a factor, in the dtype of products."""
    dtype = sum_dtype(x)
    x = x.to(torch.promote_types(dtype, torch.float32 if factor is not None else x.dtype))
    return elu_features(x if factor is None else x * factor).to(dtype)


def query_factor(scale: float, head_dim: int) -> float | None:
    """Factor of the queries that stands for `scale`; None for the default scale, 1/sqrt(D)."""
    factor = scale * head_dim**0.5
    return None if abs(factor - 1.0) < 1e-12 else factor


def query_features(query: Tensor, scale: float) -> Tensor:
    """Features of queries (..., D) times scale * sqrt(D), in the dtype of products."""
    return _features(query, query_factor(scale, query.shape[-1]))


def key_features(key: Tensor, key_mask: Tensor | None) -> Tensor:
    """Features of keys (..., D) in the dtype of products, 0 where `key_mask`, bool (...), is False."""
    phi = _features(key, None)
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


def _sum(phi: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """The sum in the accumulation dtype."""
    return phi.sum(dim, keepdim=keepdim, dtype=accumulation_dtype(phi.dtype))


def linear_attention(phi_q: Tensor, phi_k: Tensor, value: Tensor, dropout_p: float) -> Tensor:
    """Bidirectional form: features (BH, Nq, D) and (BH, Nk, D), value (BH, Nk, Dv) -> (BH, Nq, Dv)."""
    total = phi_q @ _sum(phi_k, 1).to(phi_k.dtype).unsqueeze(-1)
    phi_q = dropout(phi_q, dropout_p) if dropout_p else phi_q
    return normalize(phi_q @ (phi_k.transpose(1, 2) @ value), total)


def causal_linear_attention(
    phi_q: Tensor, phi_k: Tensor, value: Tensor, dropout_p: float, initial_state: LinearState | None = None
) -> Tensor:
    """Causal form by prefix sums over chunks.

    Args:
        phi_q: (BH, N, D), features of the queries.
        phi_k: (BH, N, D), features of the keys.
        value: (BH, N, Dv), in the same dtype, which is that of the products.
        dropout_p: probability of dropping a feature of a query, the same feature for all keys.
        initial_state: S (BH, D, Dv) and Z (BH, D) of earlier tokens, or None.

    Returns:
        (BH, N, Dv).
    """
    out = normalize(*_causal_sums(phi_q, phi_k, value, dropout_p, initial_state))
    return out.reshape(phi_q.shape[0], -1, value.shape[2])[:, : phi_q.shape[1]]


def causal_linear_sums(
    phi_q: Tensor, phi_k: Tensor, value: Tensor, dropout_p: float, initial_state: LinearState | None = None
) -> tuple[Tensor, Tensor]:
    """`causal_linear_attention` before its division: sums of values (BH, N, Dv) and of weights (BH, N, 1)."""
    batch_heads, q_len = phi_q.shape[:2]
    sums, total = _causal_sums(phi_q, phi_k, value, dropout_p, initial_state)
    return sums.reshape(batch_heads, -1, value.shape[2])[:, :q_len], total.reshape(batch_heads, -1, 1)[:, :q_len]


def _causal_sums(
    phi_q: Tensor, phi_k: Tensor, value: Tensor, dropout_p: float, initial_state: LinearState | None
) -> tuple[Tensor, Tensor]:
    """Sums of values and of weights by chunk, (BH * C, size, Dv) and (BH * C, size, 1), or those of (BH, N, .)."""
    batch_heads, value_dim = phi_q.shape[0], value.shape[2]
    size = _chunk_size(value)
    # The last columns of the products are the sums of the weights.
    value = pad(value, (0, _ONES), value=1.0)
    if not dropout_p and flash_linear.serves(value, phi_k.shape[2]):
        initial = None if initial_state is None else _with_norms(initial_state)
        sums = flash_linear.causal_sums(phi_q, phi_k, value, initial)
        return sums[..., :-_ONES], sums[..., -_ONES, None]
    phi_q, phi_k, value = (pad_to_blocks(x, size).flatten(0, 1) for x in (phi_q, phi_k, value))  # (BH * C, size, .)
    state = _states_before(phi_k, value, None if initial_state is None else _with_norms(initial_state), batch_heads)
    weights = (phi_q @ phi_k.transpose(1, 2)).tril_()  # of the pairs of a chunk, (BH * C, size, size)
    out = torch.baddbmm(weights @ value, phi_q, state)
    total = out[..., value_dim : value_dim + 1]
    if dropout_p:
        phi_q = dropout(phi_q, dropout_p)
        weights = (phi_q @ phi_k.transpose(1, 2)).tril()
        out = torch.baddbmm(weights @ value, phi_q, state)
    return out[..., :value_dim], total


def _chunk_size(value: Tensor) -> int:
    return min(CHUNK if backend(value) == "cpu" else _ACCELERATOR_CHUNK, value.shape[1])


def _with_norms(state: LinearState) -> Tensor:
    """S and, in further columns, Z: (BH, D, Dv + 8)."""
    return torch.cat((state.products, state.norm.unsqueeze(2).expand(-1, -1, _ONES)), 2)


def _states_before(phi_k: Tensor, value: Tensor, initial: Tensor | None, batch_heads: int) -> Tensor:
    """The sums over all tokens before each chunk: (BH * C, size, D), (BH * C, size, Dv + 8) -> (BH * C, D, Dv + 8)."""
    sums = (phi_k.mT @ value).unflatten(0, (batch_heads, -1))
    state = exclusive_prefix_sum(sums, accumulation_dtype(value.dtype))
    state = state if initial is None else state + initial[:, None]
    return state.to(value.dtype).flatten(0, 1)


class _Training(torch.autograd.Function):
    """Both forms without dropout. Autograd would take twice as many kernels and keep twice as much."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        query, key, value, key_mask, initial, is_causal, dtype = arguments
        phi_q, phi_k = elu_features(query).to(dtype), elu_features(key).to(dtype)
        phi_k = phi_k if key_mask is None else phi_k.mul_(key_mask.unsqueeze(2))
        values, state = pad(value, (0, _ONES), value=1.0), None
        if is_causal:
            size = _chunk_size(value)
            phi_q, phi_k, values = (pad_to_blocks(x, size).flatten(0, 1) for x in (phi_q, phi_k, values))
            state = _states_before(phi_k, values, initial, value.shape[0])
            sums = torch.baddbmm(torch.bmm(phi_q, phi_k.mT).tril_() @ values, phi_q, state)
        else:
            state = torch.bmm(phi_k.mT, values)
            sums = torch.bmm(phi_q, state)
        total = threshold(sums[..., -_ONES, None], 0.0, 1.0)  # the output of a query without weights is 0
        out = sums[..., :-_ONES] / total
        out = out.view(value.shape[0], -1, value.shape[2])[:, : query.shape[1]]
        ctx.save_for_backward(query, key, value, key_mask, phi_q, phi_k, state, out, total)
        ctx.is_causal, ctx.has_initial = is_causal, initial is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, key_mask, phi_q, phi_k, state, out, total = ctx.saved_tensors
        values = pad(value, (0, _ONES), value=1.0)
        of_initial = None
        # No gradient passes where it could overflow; see `normalize`.
        total = threshold(total, torch.finfo(total.dtype).tiny ** 0.8, torch.inf)
        with torch.autocast(grad.device.type, enabled=False):
            if ctx.is_causal:
                grad, out, values = (pad_to_blocks(x, phi_q.shape[1]).flatten(0, 1) for x in (grad, out, values))
                grad = sum_gradients(grad / total, out)
                of_pairs, pairs = torch.bmm(grad, values.mT).tril_(), torch.bmm(phi_q, phi_k.mT).tril_()
                of_phi_q = torch.bmm(of_pairs, phi_k).baddbmm_(grad, state.mT)
                of_before = torch.bmm(phi_q.mT, grad).unflatten(0, (value.shape[0], -1))
                of_state = exclusive_suffix_sum(of_before, accumulation_dtype(grad.dtype))
                if ctx.has_initial:
                    of_initial = (of_state[:, 0] + of_before[:, 0]).to(grad.dtype)
                of_state = of_state.to(grad.dtype).flatten(0, 1)
                of_phi_k = torch.bmm(of_pairs.mT, phi_q).baddbmm_(values, of_state.mT)
                of_value = torch.bmm(pairs.mT, grad).baddbmm_(phi_k, of_state)
            else:
                grad = sum_gradients(grad / total, out)
                of_state = torch.bmm(phi_q.mT, grad)
                of_phi_q, of_phi_k = torch.bmm(grad, state.mT), torch.bmm(values, of_state.mT)
                of_value = torch.bmm(phi_k, of_state)
        of_phi_q, of_phi_k, of_value = (
            x.reshape(value.shape[0], -1, x.shape[2])[:, :length]
            for x, length in zip((of_phi_q, of_phi_k, of_value), (query.shape[1], *[key.shape[1]] * 2), strict=True)
        )
        of_phi_k = of_phi_k if key_mask is None else of_phi_k * key_mask.unsqueeze(2)
        of_query, of_key = _elu_backward(of_phi_q.to(query.dtype), query), _elu_backward(of_phi_k.to(key.dtype), key)
        return of_query, of_key, of_value[..., :-_ONES], None, of_initial, None, None


_training: Callable[..., Tensor] = _Training.apply


def trained_linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    *initial_state: Tensor,
    scale: float,
    is_causal: bool,
) -> Tensor:
    """Both forms with a gradient and without dropout, in few kernels.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        value: (BH, Nk, Dv).
        key_mask: bool (BH, Nk) or None.
        initial_state: S (BH, D, Dv) and Z (BH, D) of earlier tokens in the causal form, or nothing.
        scale: factor of the scores.
        is_causal: whether attention is causal.

    Returns:
        (BH, Nq, Dv), in the dtype of products.
    """
    dtype, factor = sum_dtype(query), query_factor(scale, query.shape[2])
    query, key = (x.to(torch.promote_types(dtype, x.dtype)) for x in (query, key))
    query = query if factor is None else query.to(torch.promote_types(dtype, torch.float32)) * factor
    if is_causal and flash_linear.serves(value.to(dtype), query.shape[2]):
        phi_q, phi_k = elu_features(query).to(dtype), key_features(key, key_mask).to(dtype)
        state = LinearState(*initial_state) if initial_state else None
        return causal_linear_attention(phi_q, phi_k, value.to(dtype), 0.0, state)
    initial = _with_norms(LinearState(*initial_state)) if initial_state else None
    return _training(query, key, value.to(dtype), key_mask, initial, is_causal, dtype)


def sum_gradients(grad: Tensor, out: Tensor) -> Tensor:
    """Gradients of the sums of values and of weights, (..., Dv + 8), of which `out` (..., Dv) is the quotient.

    `grad` (..., Dv) is the gradient of `out` divided by the sums of weights.
    """
    whole = pad(grad, (0, _ONES))
    whole[..., -_ONES].sub_((grad * out).sum(-1))
    return whole


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
    dtype = sum_dtype(query)
    out = value.new_empty(batch_heads, q_len, value.shape[2]) if out is None else out
    block = max(1, min(_BLOCK // (batch_heads * head_dim), max(q_len, kv_len)))
    first, second = (query.new_empty(batch_heads, block, head_dim, dtype=acc_dtype) for _ in range(2))
    factor = query_factor(scale, head_dim)

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
        if dtype == acc_dtype:
            state.baddbmm_(phi.transpose(1, 2), value[:, tokens].to(acc_dtype))
        else:  # the result of this product is rounded to its dtype, so the blocks are added in float32
            phi = phi.to(dtype)
            state += torch.bmm(phi.transpose(1, 2), value[:, tokens].to(dtype))
        norm += _sum(phi, 1, keepdim=True)
    products = state.to(dtype)
    for start in range(0, q_len, block):
        tokens = slice(start, start + block)
        queries = query[:, tokens].to(acc_dtype)
        phi = features(queries if factor is None else queries * factor)
        # A matrix product with a single column takes half the time of one with 64, so the total is a sum.
        total = torch.mul(phi, norm, out=second[:, : queries.shape[1]]).sum(2, keepdim=True)
        if dtype != acc_dtype:  # divided before the product, so that its result is rounded once
            out[:, tokens] = normalize(phi, total).to(dtype) @ products
        elif out.dtype == acc_dtype:
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
    dtype, size = sum_dtype(query), min(CHUNK, q_len)
    block = tokens_at_a_time(batch_heads, size, head_dim)
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
        sums, total, (state, norm) = sums_of_chunks(phi_q, phi_k, value[:, tokens].to(dtype), size, (state, norm))
        out[:, tokens] = normalize(sums, total).flatten(1, 2)[:, : tokens.stop - start]
    return out


def tokens_at_a_time(batch_heads: int, size: int, num_features: int) -> int:
    """Tokens, in whole chunks, whose temporaries stay in the cache."""
    return max(1, _BLOCK // (4 * batch_heads * size * max(size, num_features))) * size


def sums_of_chunks(
    phi_q: Tensor, phi_k: Tensor, value: Tensor, size: int, before: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """The causal sums of some tokens in chunks, without a gradient.

    Args:
        phi_q: (BH, N, D), features of the queries.
        phi_k: (BH, N, D), features of the keys.
        value: (BH, N, Dv), in the same dtype.
        size: tokens of a chunk.
        before: S and Z of earlier tokens, (BH, ., D, Dv) and (BH, ., 1, D), at the last index of the second dimension.

    Returns:
        Sums of values (BH, C, size, Dv) and of weights (BH, C, size, 1) for C chunks, and `before` of the next tokens.
    """
    dtype, acc_dtype = value.dtype, before[0].dtype
    phi_q, phi_k, values = (pad_to_blocks(x, size) for x in (phi_q, phi_k, value))
    phi_k_t = phi_k.transpose(2, 3)
    state = running_sum((phi_k_t @ values).to(acc_dtype), None, before[0][:, -1])
    norm = running_sum(_sum(phi_k, 2, keepdim=True), None, before[1][:, -1])
    weights = (phi_q @ phi_k_t).tril_()
    total = _sum(weights, 3, keepdim=True).add_((phi_q * norm[:, :-1]).sum(3, keepdim=True))
    own, earlier = weights @ values, phi_q @ state[:, :-1].to(dtype)
    return own.to(acc_dtype).add_(earlier), total, (state, norm)
