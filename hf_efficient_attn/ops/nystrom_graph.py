"""The gradient of `hf_efficient_attn.ops.nystrom`, and its call.

Several terms need not be computed, because the output does not depend on what they would change:

- The middle of the range of the values is only their center: it is the output where the denominator is not positive.
- An output does not change if all sums of a query are multiplied by a number, so its gradient of the lse is 0.
- The bias of a key multiplies all its weights, so its gradient is the sum of weights times their gradients.

The largest norms of queries and candidates, and the ends of the range of a feature, have a gradient at one token each.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from hf_efficient_attn.ops.constants import constant
from hf_efficient_attn.ops.coreset import candidate_positions, numbers_of_two_draws
from hf_efficient_attn.ops.fused_attention import fused_attention_backward
from hf_efficient_attn.ops.nystrom import (
    LEAST_LOGIT,
    RHO,
    UNIT,
    Coreset,
    Given,
    Options,
    Saved,
    Temperature,
    Tokens,
    Weights,
    attend,
    augmented_query,
    centered_values,
    ends_of,
    few_keys,
    moments,
    padding,
    ratio,
    rows_of,
    zeros,
)
from hf_efficient_attn.ops.partial import accumulation_dtype
from hf_efficient_attn.ops.random import Seed


class Request(NamedTuple):
    """A call.

    Attributes:
        num_samples: m, the keys of a coreset, fewer than Nk.
        num_candidates: the largest number of keys that they are chosen from, at least m.
        seed: of the choice.
        batch: B.
        scale: factor of the scores, not 0.
        ridge: of the kernel matrix.
    """

    num_samples: int
    num_candidates: int
    seed: Seed
    batch: int
    scale: float
    ridge: float


def nystrom_attention(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, request: Request) -> Tensor:
    """Attention of all queries to a coreset with Nystrom weights; see `hf_efficient_attn.methods.wildcat`.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D), 0 where it is masked.
        value: (BH, Nk, Dv), 0 where it is masked.
        key_mask: bool (B, Nk), True for valid keys, or None. It also masks the queries if there are as many.
        request: see there.

    Returns:
        (BH, Nq, Dv) in the dtype of the values.
    """
    heads, kv_len = len(key) // request.batch, key.shape[1]
    every, valid = candidate_positions(key_mask, kv_len, request.num_candidates, key.device)
    like = key.new_empty(0, dtype=accumulation_dtype(key.dtype))
    numbers = numbers_of_two_draws(every.shape[1], heads, request.seed, like)
    position = mask = None
    if key_mask is not None and valid is not None:
        position, valid, mask = (x.repeat_interleave(heads, 0) for x in (every, valid, key_mask))
    elif kv_len % every.shape[1]:
        position = every.expand(len(key), -1)
    given = Given(position, valid, mask, numbers)
    options = Options(request.num_samples, request.ridge, request.scale, query.shape[1] == kv_len)
    out: Tensor = _NystromAttention.apply(query, key, value, *given, options)  # type: ignore[no-untyped-call]
    return out


class _NystromAttention(torch.autograd.Function):
    """Forward and backward in a few launches each."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        *given, options = rest
        out, saved = attend(query, key, value, Given(*given), options)
        if any(ctx.needs_input_grad):
            ctx.options = options
            parts = *saved.tokens, *saved.temperature, *saved.weights, *saved.coreset, saved.sums, saved.lse
            ctx.save_for_backward(query, key, value, *given, *parts)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = list(ctx.saved_tensors)  # once: with checkpoints they can be unpacked once

        def take(kind: Any) -> Any:
            return kind(*(tensors.pop(0) for _ in kind._fields))

        inputs, given = take(_Inputs), take(Given)
        saved = Saved(take(Tokens), take(Temperature), take(Weights), take(Coreset), *tensors)
        with torch.autocast(grad.device.type, enabled=False):
            return *_backward(grad, inputs, given, saved, ctx.options), *(None for _ in given), None


class _Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor


class _ByRatio(NamedTuple):
    """Gradients by the attention to the coreset.

    Attributes:
        query: (BH, Nq, D).
        key: (BH, m, D), of the keys of the coreset.
        weighted: (BH, m, F), of the weights applied to values and to `UNIT`.
        ends: (BH, 2, Dv), of the smallest and the largest value of each feature.
    """

    query: Tensor
    key: Tensor
    weighted: Tensor
    ends: Tensor


class _ByWeights(NamedTuple):
    """Gradients by the weights.

    Attributes:
        key: (BH, m, D), of the keys of the coreset, float64.
        factor: (BH, 1, 1), of the factor of the kernel's exponents, float64.
        keys: (BH, Nk, D), of all centered keys.
        values: (BH, Nk, Dv).
        own: (BH, m, Dv), of the values of the coreset, or None without a mask.
    """

    key: Tensor
    factor: Tensor
    keys: Tensor
    values: Tensor
    own: Tensor | None


def _backward(
    grad: Tensor, inputs: _Inputs, given: Given, saved: Saved, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    query, key, value = inputs
    tokens = saved.tokens._replace(key=key - saved.tokens.mean)
    by_ratio = _ratio_backward(grad, query, saved, options)
    by_weights = _weigh_backward(by_ratio.weighted, value, tokens, saved, options)
    of_query, of_keys, of_values = by_ratio.query, by_weights.keys, by_weights.values
    pivot = _positions(saved.weights.pivot, given, key.shape[1])
    _add_rows(of_keys, pivot, by_ratio.key + by_weights.key)
    if by_weights.own is not None:
        _add_rows(of_values, pivot, by_weights.own)
    ends = zip(ends_of(value, given.mask), (torch.argmin, torch.argmax), strict=True)
    of_values.scatter_add_(1, torch.cat([find(x, 1, keepdim=True) for x, find in ends], 1), by_ratio.ends)

    of_longest = _temperature_backward(by_weights.factor, saved.temperature, options.scale)
    key_index = _positions(saved.temperature.key_index, given, key.shape[1])
    _add_rows(of_query, saved.temperature.query_index, of_longest[0] * rows_of(query, saved.temperature.query_index))
    _add_rows(of_keys, key_index, of_longest[1] * rows_of(tokens.key, key_index))
    return of_query.to(query.dtype), _key_backward(of_keys, key, tokens), of_values.to(value.dtype)


def _ratio_backward(grad: Tensor, query: Tensor, saved: Saved, options: Options) -> _ByRatio:
    """Through the attention to the coreset, from the gradient of the output (BH, Nq, Dv)."""
    tokens, sums, coreset = saved.tokens, saved.sums, saved.coreset
    dtype, value_dim = sums.dtype, grad.shape[2]
    out, numerator, total = ratio(sums, tokens.middle)
    below, above = grad * (out < tokens.low), grad * (out > tokens.high)
    inner = (grad - below).sub_(above)
    # Half of the middle is each end.
    of_middle = (inner * (total == torch.inf)).sum(1, keepdim=True, dtype=dtype)
    ends = torch.cat([x.sum(1, keepdim=True, dtype=dtype) for x in (below, above)], 1).add_(of_middle, alpha=0.5)

    scaled = inner / (total * (1.0 / UNIT))
    product = (scaled * numerator).sum(2, keepdim=True)
    zero = constant(zeros, sums.shape[3] - value_dim - 1, dtype, device=grad.device)
    of_total = torch.addcdiv(constant(zeros, 1, dtype, device=grad.device), product, total, value=-1.0)
    of_sums = torch.cat((scaled, of_total, zero.expand(*grad.shape[:2], -1)), 2).view(sums.shape)
    tensors = augmented_query(query, coreset, options.scale), coreset.key[:, None], coreset.weighted[:, None], None
    found = fused_attention_backward((of_sums, None), tensors, (sums, saved.lse), options.scale, with_bias=False)
    of_query, of_key, of_weighted = (x.flatten(1, 2) for x in found[:3])
    return _ByRatio(of_query[..., : query.shape[2]], of_key[..., : query.shape[2]], of_weighted, ends)


def _weigh_backward(of_weighted: Tensor, value: Tensor, tokens: Tokens, saved: Saved, options: Options) -> _ByWeights:
    """Through the weights, from the gradient of what they are applied to."""
    weights, factor, few = saved.weights, saved.temperature.factor, few_keys(tokens, options)
    keys, value_dim = saved.coreset.key[..., : tokens.key.shape[2]], value.shape[2]
    of_solved, own = of_weighted / weights.size, None
    if few is not None:  # there the weights are the values themselves
        own = of_solved[..., :value_dim].masked_fill(~few, 0.0)
        of_solved = of_solved.masked_fill_(few, 0.0)
    of_right = torch.cholesky_solve(of_solved, weights.lower)
    of_share = (of_right * moments(weights.out)).sum(2, keepdim=True)
    of_level = torch.ops.aten._softmax_backward_data(of_share, weights.share, 1, torch.float64)
    # Of the exponents of the kernel. Those of its diagonal are constant, and the terms for them below add up to 0.
    of_exponent = torch.baddbmm(weights.kernel, of_right, weights.solved.mT, beta=0.0, alpha=-1.0).mul_(weights.kernel)
    matrix = of_exponent + of_exponent.mT
    of_half = (of_solved * weights.solved).sum(2).add_(matrix.sum(2)).add_(of_level.squeeze(2))
    matrix.diagonal(dim1=1, dim2=2).sub_(of_half)

    # A kernel gives no gradient through the lse. From each gradient of a score it subtracts the sum of out * gradient
    # of out. A further output, whose values are 0, adds the gradient of the lse: out is that, and its gradient -1.
    further = padding(value_dim, 1)
    shape = *keys.shape[:2], value_dim + further
    minus = constant(_minus_one, further, keys.dtype, device=keys.device)
    of_out = torch.cat(
        (of_right[..., :value_dim] * weights.share, minus.expand(*shape[:2], -1)), 2, out=keys.new_empty(shape)
    )
    rest = constant(zeros, further - 1, keys.dtype, device=keys.device).expand(*shape[:2], -1)
    out = torch.cat((weights.out.squeeze(1), of_level, rest), 2, out=keys.new_empty(shape))
    values = pad(centered_values(value, tokens.middle), (0, further))
    tensors = (keys * factor)[:, None], tokens.key[:, None], values[:, None], tokens.bias
    results = out[:, None], weights.lse
    found = fused_attention_backward((of_out[:, None], None), tensors, results, 1.0, with_bias=False)
    of_rows, of_keys, of_values = (x.squeeze(1) for x in found[:3])

    # Of the exponents factor (<k, k'> - |k|^2 / 2 - |k'|^2 / 2).
    double = keys.double()
    product = matrix @ double
    of_factor = (double * torch.add(of_rows, product, alpha=0.5)).sum((1, 2), keepdim=True)
    return _ByWeights(product.add_(of_rows).mul_(factor), of_factor, of_keys, of_values[..., :value_dim], own)


def _temperature_backward(of_factor: Tensor, temperature: Temperature, scale: float) -> tuple[Tensor, Tensor]:
    """Gradients of the longest query and candidate, as multiples of them, (BH, 1, 1)."""
    query_norm, key_norm = temperature.query_norm.unsqueeze(2), temperature.key_norm.unsqueeze(2)
    logit, least = query_norm * key_norm, LEAST_LOGIT / abs(scale)
    zero = constant(zeros, 1, torch.float64, device=logit.device)
    # The factor is share R_Q^2 / max(R_Q R_K, least).
    of_query = torch.addcdiv(zero, of_factor, logit.clamp(min=least), value=abs(scale) / RHO)
    of_key = torch.addcmul(zero, of_query, (query_norm / key_norm).square_(), value=-1.0)
    is_least = logit < least
    return torch.where(is_least, 2.0 * of_query, of_query), of_key.masked_fill_(is_least, 0.0)


def _key_backward(of_keys: Tensor, key: Tensor, tokens: Tokens) -> Tensor:
    """The gradient of keys by that of centered keys."""
    if tokens.num_keys is None:
        mean = of_keys.mean(1, keepdim=True)
    else:
        mean = of_keys.sum(1, keepdim=True) / tokens.num_keys.clamp(min=1)
    return torch.sub(of_keys, mean, out=key.new_empty(key.shape))


def _positions(candidate: Tensor, given: Given, kv_len: int) -> Tensor:
    """Where candidates (BH, n) are among all keys."""
    if given.position is None:
        return candidate * (kv_len // given.numbers.shape[2])
    return given.position.gather(1, candidate)


def _add_rows(x: Tensor, index: Tensor, rows: Tensor) -> None:
    """Add tokens (BH, n, F) to those of x (BH, N, F) at an index (BH, n)."""
    x.scatter_add_(1, index.unsqueeze(2).expand_as(rows), rows.to(x.dtype))


def _minus_one(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The gradients of further sums: -1 for the first one, and zeros."""
    return pad(torch.full((1,), -1.0, dtype=dtype, device=device), (0, size - 1))
