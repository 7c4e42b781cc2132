"""The gradient of `hf_efficient_attn.ops.coreset_blocks`, and its call."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from hf_efficient_attn.ops.blocks import inverse, take
from hf_efficient_attn.ops.constants import constant
from hf_efficient_attn.ops.coreset import gumbel_numbers
from hf_efficient_attn.ops.coreset_blocks import Landmarks, Saved, Sums, Weights, attend, candidate_stride
from hf_efficient_attn.ops.coreset_blocks_plan import (
    LEAST_LOGIT,
    MAX_LOGIT,
    Given,
    Plan,
    filled,
    make_plan,
    number,
)
from hf_efficient_attn.ops.coreset_landmarks import CoresetOptions, candidates_of, order_tokens, spread_queries
from hf_efficient_attn.ops.fused_attention import fused_attention_backward
from hf_efficient_attn.ops.partial import accumulation_dtype
from hf_efficient_attn.ops.random import Seed


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, options: CoresetOptions
) -> Tensor:
    """`weighted_coreset_attention` on an accelerator, with the same arguments."""
    inputs, order = order_tokens(query, key, value, key_mask)
    query, key, value = inputs[:3]
    if isinstance(inputs.num_keys, Tensor):
        padding = torch.arange(key.shape[1], device=key.device) >= inputs.num_keys
        key, value = (x.masked_fill(padding.unsqueeze(2), 0.0) for x in (key, value))
    plan = make_plan(inputs, options)
    position, valid = candidates_of(inputs, options.num_candidates)
    like = key.new_empty(0, dtype=accumulation_dtype(key.dtype))
    shape = len(key), plan.num_landmarks, position.shape[1]
    numbers = constant(_numbers_of_heads, shape, options.seed, like.dtype, device=key.device)
    probe = spread_queries(inputs, options.num_probes) if options.num_probes else None
    out: Tensor = _BlockAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, inputs.num_keys, probe, position, valid, numbers, plan
    )
    if key_mask is None or not isinstance(inputs.num_keys, Tensor):
        return out
    if order is None:
        return out.masked_fill((inputs.num_keys == 0).unsqueeze(2), 0.0)
    return take(out, inverse(order)).masked_fill(~key_mask[:, :, None], 0.0)


def _numbers_of_heads(shape: tuple[int, int, int], seed: Seed, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same Gumbel numbers for (BH, landmarks, candidates), (BH, C)."""
    like = torch.empty(0, dtype=dtype, device=device)
    return gumbel_numbers(*shape[1:], seed, like).repeat(shape[0], 1)


# The largest and the smallest number of a probe's row that were not clamped. Those that were are rounded.
_CLAMPED = math.exp(LEAST_LOGIT) * (1.0 + 1e-9), math.exp(MAX_LOGIT) * (1.0 - 1e-9)
# Gradients of exponents are at most this, so that their multiples are finite in float32. They are as large as this only
# where landmarks that cancel each other determine the weights.
_MAX_GRAD = 1e20
# In float16 gradients are multiples of a number, with which the largest by the attentions is this: gradients by
# denominators would be too large, and others too small.
_HALF_UNIT = 16.0


class _Grads(NamedTuple):
    """Gradients by the attentions.

    Attributes:
        query: (BH, T m or Nq, D').
        near: of key and value of the blocks, or None.
        landmark: (BH, m, D'), as a key with its bias.
        row: (BH, m, D'), as a row that is a key.
        means: (BH, m, Dv').
        spread: (BH, m, R), of the map.
        sums: (BH, R, T or 1, Dv'), of the sums of rows over each block, relative to those over all keys.
        unit: what all of them are multiples of, a number. None: 1.
    """

    query: Tensor
    near: tuple[Tensor, Tensor] | None
    landmark: Tensor
    row: Tensor
    means: Tensor
    spread: Tensor
    sums: Tensor
    unit: Tensor | None


def _attend_backward(grad: Tensor, saved: Saved, plan: Plan) -> _Grads:
    """Through the attentions, from the gradient of the output (BH, T m or Nq, Dv)."""
    m, split, attention, (query, key, value, *_) = plan.num_landmarks, plan.dims[1], saved.attention, saved.attention
    total = saved.combined[..., split, None]
    if grad.dtype == torch.float16:
        grad, total = grad.float(), total.float()
    if isinstance(saved.given.num_keys, Tensor):  # queries without keys
        total = total.masked_fill(total == 0.0, torch.inf)
    scaled, out = grad / total, saved.combined[..., :split] / total
    of_total = torch.addcmul(number(0.0, scaled), scaled, out, value=-1.0).sum(2, keepdim=True)
    rest = constant(filled, 0.0, plan.padded[1] - split - 1, grad.dtype, device=grad.device)
    of_sums = torch.cat((scaled, of_total, rest.expand(*grad.shape[:2], -1)), 2)
    unit = None
    if saved.combined.dtype == torch.float16:
        unit = (of_sums.abs().amax() / _HALF_UNIT).clamp(min=torch.finfo(of_sums.dtype).tiny)
        of_sums = (of_sums / unit).half()
    of_far = of_sums * saved.is_safe
    tensors = query.flatten(1, 2).unsqueeze(1), saved.sums.row[:, None, :m], attention.means, None
    results = attention.to_means, attention.lse_of_means
    by_means = fused_attention_backward(
        ((of_sums - of_far).unsqueeze(1), None), tensors, results, plan.twice, with_bias=False
    )
    of_far = of_far.view(attention.sums.shape)
    results = attention.sums, attention.lse
    far = fused_attention_backward((of_far, None), (query, key, value, None), results, plan.scale, with_bias=False)
    of_query = far[0].flatten(1, 2) + by_means[0].squeeze(1)
    of_weights = far[2][:, :, -m:]
    if saved.sums.of_others is not None:
        flat = of_weights.transpose(1, 2).flatten(2)
        spread = flat @ saved.sums.of_others.flatten(2).mT
        of_others = (attention.weights.mT @ flat).unflatten(2, (plan.num_blocks, -1))
        of_block = of_others.sum(2, keepdim=True) - of_others
        near, landmark = (far[1][:, :, :m], far[2][:, :, :m]), far[1][:, :, m:].sum(1, dtype=torch.float64)
    else:
        flat = of_weights.squeeze(1).double()
        spread = flat @ saved.sums.of_all.double().mT
        of_block = (attention.weights.mT @ flat.to(attention.weights.dtype)).unsqueeze(2)
        near, landmark = None, far[1].squeeze(1).double()
    # Where the map is clamped it has no gradient. The clamped numbers were rounded.
    limit = 0.99 * plan.max_weight
    spread = torch.ops.aten.hardtanh_backward(spread, attention.weights.to(spread.dtype), -limit, limit)
    row, means = (x.squeeze(1) for x in by_means[1:3])
    return _Grads(of_query, near, landmark, row, means, spread, of_block, unit)


def _weigh_backward(grads: _Grads, sums: Sums, weights: Weights, plan: Plan) -> tuple[Tensor, Tensor]:
    """Gradients of the rows, float64 (BH, R, D), and of the lse of all keys of the probes, (BH, P)."""
    m, (row, basis, targets, lower, solved, size, strength) = plan.num_landmarks, weights
    row = row[..., : plan.dims[0]]
    of_spread = torch.ops.aten.hardtanh_backward(
        grads.spread.double(), solved / size.unsqueeze(2), -plan.largest, plan.largest
    )
    of_targets = torch.cholesky_solve(of_spread / size.unsqueeze(2), lower)
    of_system = -(of_targets @ solved.mT)
    of_exponent = of_system * basis[:, :m]
    if strength is not None:
        # system = ... + B^T (B / strength) and targets = B / strength: B has both gradients, and the strength.
        probes, direct = basis[:, m:], of_targets[:, :, m:].mT
        both = probes @ (of_system + of_system.mT)
        inner = (probes * torch.add(direct, both, alpha=0.5)).sum((1, 2), keepdim=True)
        of_probes = torch.addcmul(direct + both, probes, inner / strength, value=-2.0 / m)
        of_probes = torch.ops.aten.hardtanh_backward(of_probes * targets[:, m:], probes, *_CLAMPED)
        of_exponent = torch.cat((of_exponent, of_probes), 1)
    of_exponent.clamp_(-_MAX_GRAD, _MAX_GRAD)
    by_row = of_exponent.sum(2)
    # Half the squared norm of a landmark is in both exponents of the kernel, in the size of its sums and in its bias.
    of_half_norm = torch.addcmul(of_exponent.sum(1), size, of_targets.diagonal(dim1=1, dim2=2)).add_(by_row[:, :m])
    of_half_norm.add_(grads.landmark[..., plan.dims[0]], alpha=1.0 / (plan.scale * plan.unit))
    of_exponent.diagonal(dim1=1, dim2=2).sub_(of_half_norm, alpha=0.5)
    of_row = torch.baddbmm(row.new_empty(1, 1, 1), of_exponent, row[:, :m], beta=0.0, alpha=plan.twice)
    of_row[:, :m].baddbmm_(of_exponent.mT, row, alpha=plan.twice)
    return of_row, by_row[:, m:]


def _sums_backward(
    grads: _Grads, by_row: Tensor, sums: Sums, blocks: tuple[Tensor, Tensor], plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the rows (BH, T, R, D'), and of the keys and values of the blocks.

    What a landmark's row adds is not relative to its own lse, so that its gradient has no term of the lse. The row of
    a probe is, and its lse is in its exponents, too.
    """
    m, of_block = plan.num_landmarks, grads.sums
    of_out = (of_block.transpose(1, 2) * sums.share.unsqueeze(3)).to(of_block.dtype)
    out = torch.zeros_like(of_out)
    if by_row.shape[1]:
        of_probes, all_rows = of_block[:, m:], sums.of_all[:, m:].to(of_block.dtype).unsqueeze(2)
        own = all_rows if sums.of_others is None else all_rows - sums.of_others[:, m:]
        of_lse = (of_probes * own).sum((2, 3), dtype=torch.float64) + by_row
        # The fourth further number of a value is 0. The gradient 1 of its sum adds -sum to the gradient of the lse.
        column = plan.dims[1] + 3
        of_out[:, :, m:, column] = 1.0
        out[:, :, m:, column] = of_lse.unsqueeze(1) * sums.share[:, :, m:]
    rows = sums.row.unsqueeze(1).expand(-1, plan.num_blocks, -1, -1)
    found = fused_attention_backward(
        (of_out, None), (rows, *blocks, None), (out, sums.lse), plan.scale, with_bias=False
    )
    return found[:3]


def _choose_backward(grads: _Grads, of_row: Tensor, landmarks: Landmarks, plan: Plan) -> Tensor:
    """The gradient of the candidates (BH, C, D' + Dv')."""
    means = grads.means.to(of_row.dtype) / landmarks.member.shape[1]
    if plan.has_steps:
        of_row = torch.addcdiv(number(0.0, of_row), of_row, landmarks.total, value=plan.half)
    member, of_picked = landmarks.member, None
    missing = plan.padded[0] - plan.dims[0]
    of_sums = torch.cat((pad(of_row, (0, missing)), means), 2)
    if not plan.has_steps:
        of_picked = pad(of_row * plan.half, (0, missing + plan.padded[1]))
        of_sums = pad(means, (plan.padded[0], 0))
    if landmarks.own is not None and landmarks.selected is not None:
        own = torch.where(landmarks.own & landmarks.selected, of_sums, 0.0)
        of_picked = own if of_picked is None else of_picked.mul_(landmarks.selected).add_(own)
        of_sums = of_sums.masked_fill(landmarks.own, 0.0)
    found = member @ of_sums.to(member.dtype)
    if of_picked is not None:
        index = landmarks.pivot.unsqueeze(2).expand(-1, -1, found.shape[2])
        found.scatter_add_(1, index, of_picked.to(found.dtype))
    return found


class _BlockAttention(torch.autograd.Function):
    """Forward and backward in a few launches each."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        *given, plan = rest
        out, saved = attend(query, key, value, Given(*given), plan, any(ctx.needs_input_grad))
        if saved is not None:
            tensors: list[Tensor] = []
            ctx.shape, ctx.plan = _flat(saved, tensors), plan
            ctx.lengths = query.shape[1], key.shape[1]
            ctx.save_for_backward(*tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = _unflat(ctx.shape, list(ctx.saved_tensors))
        grads = _backward(grad, saved, ctx.lengths, ctx.plan)
        return *grads, None, None, None, None, None, None


def _flat(x: Any, tensors: list[Tensor]) -> Any:
    """Move the tensors of nested tuples into a list."""
    if isinstance(x, tuple):
        return type(x), [_flat(y, tensors) for y in x]
    if isinstance(x, Tensor):
        tensors.append(x)
        return Tensor
    return x


def _unflat(shape: Any, tensors: list[Tensor]) -> Any:
    """Undo `_flat`."""
    if isinstance(shape, tuple):
        kind, parts = shape
        found = [_unflat(part, tensors) for part in parts]
        return tuple(found) if kind is tuple else kind(*found)
    return tensors.pop(0) if shape is Tensor else shape


def _backward(grad: Tensor, saved: Saved, lengths: tuple[int, int], plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    (q_len, kv_len), (head_dim, value_dim), m, given = lengths, plan.dims, plan.num_landmarks, saved.given
    more = saved.combined.shape[1] - q_len
    grads = _attend_backward(pad(grad, (0, 0, 0, more)) if more else grad, saved, plan)
    of_row, by_row = _weigh_backward(grads, saved.sums, saved.weights, plan)
    of_rows, of_key, of_value = _sums_backward(grads, by_row, saved.sums, saved.blocks, plan)
    of_row.add_(of_rows[..., :head_dim].sum(1))
    of_row[:, :m].add_(grads.row[..., :head_dim]).add_(grads.landmark[..., :head_dim], alpha=1.0 / plan.half)
    of_query = grads.query[:, :q_len, :head_dim]
    if given.probe is not None:
        _add_at(of_query, given.probe, of_row[:, m:])
    if grads.near is not None:
        of_key, of_value = of_key + grads.near[0], of_value + grads.near[1]
    of_key, of_value = of_key.flatten(1, 2)[:, :kv_len, :head_dim], of_value.flatten(1, 2)[:, :kv_len, :value_dim]
    found = _choose_backward(grads, of_row[:, :m], saved.landmarks, plan)
    parts = found[..., :head_dim], found[..., plan.padded[0] : plan.padded[0] + value_dim]
    step = candidate_stride(given, kv_len)
    for whole, part in zip((of_key, of_value), parts, strict=True):
        if step is None:
            _add_at(whole, given.position, part)
        else:
            whole[:, ::step].add_(part)
    if isinstance(given.num_keys, int):
        of_key = of_key - of_key.mean(1, keepdim=True)
    else:
        valid = torch.arange(kv_len, device=grad.device)[:, None] < given.num_keys.unsqueeze(2)
        of_key = of_key * valid
        mean = of_key.sum(1, keepdim=True, dtype=torch.float64) / given.num_keys.clamp(min=1).unsqueeze(2)
        of_key = (of_key - mean.to(of_key.dtype)) * valid
    if grads.unit is None:
        return of_query, of_key, of_value
    return of_query * grads.unit, of_key * grads.unit, of_value * grads.unit


def _add_at(x: Tensor, index: Tensor, part: Tensor) -> None:
    """Add rows (BH, n, F) to those of x (BH, N, F) at an index, (1, n) for all heads or (BH, n)."""
    if len(index) == 1:
        x.index_add_(1, index[0], part.to(x.dtype))
    else:
        x.scatter_add_(1, index.unsqueeze(2).expand_as(part), part.to(x.dtype))
