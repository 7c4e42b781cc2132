"""One softmax over several sets of keys on an accelerator, each attended to by a fused kernel with blocks of its own.

The result is that of `merge` for the partials of these sets, but their lse need no gradient. With P the weights of the
whole softmax, the gradient of the scores is P (grad_out v - grad_out out), where `out` is the merged output. So the
backward of each part takes the merged output and lse in place of its own.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.fused_attention import fused_attention, fused_attention_backward
from hf_efficient_attn.ops.partial import Partial, merge, partial_attention


class Part(NamedTuple):
    """Blocks of queries with one of their sets of keys, as in `partial_attention`.

    Attributes:
        query: (BH, T, Nq, D).
        key: (BH, T, Nk, D).
        value: (BH, T, Nk, Dv).
        bias: finite, (1, 1, Nq, Nk), without a gradient, or None. A very negative number excludes a pair.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None


def merged_attention(parts: Iterable[Part], *, scale: float, needs_grad: bool, dropout_p: float = 0.0) -> Tensor:
    """The output of queries that attend to the keys of all parts.

    Args:
        parts: of the same queries, cut into blocks in the same order. Every query has a pair in one of them. Without a
            gradient each part is dropped before the next one is asked for, so that a generator saves memory.
        scale: factor of the scores.
        needs_grad: whether a gradient is wanted.
        dropout_p: probability of dropping a weight.

    Returns:
        (BH, T * Nq, Dv).
    """
    if dropout_p:
        partials = (partial_attention(*part, scale=scale, dropout_p=dropout_p) for part in parts)
        return merge(*(Partial(out.flatten(1, 2), lse.flatten(1, 2)) for out, lse in partials)).out
    if not needs_grad:
        return _merged(parts, scale)[0]
    found = list(parts)
    # The queries once: torch.compile takes no tensor twice.
    sizes, query = [part.query.shape[2] for part in found], found[0].query.flatten(1, 2)
    others = (x for part in found for x in part[1:])
    out: Tensor = _Merged.apply(float(scale), sizes, query, *others)  # type: ignore[no-untyped-call]
    return out


def _merged(parts: Iterable[Part], scale: float) -> tuple[Tensor, Tensor]:
    """The merged output, and the lse of each part."""
    outs, lses, left = [], [], iter(parts)
    while (part := next(left, None)) is not None:
        out, lse = fused_attention(*part, scale, part.bias is not None)
        del part
        outs.append(out.flatten(1, 2))
        lses.append(lse.flatten(1, 2))
        del out, lse
    del left, parts
    all_lses = torch.stack(lses)
    weights = all_lses.softmax(0).to(outs[0].dtype).unsqueeze(3)
    if len(outs) == 2:
        return torch.lerp(outs[0], outs[1], weights[1]), all_lses
    merged = outs[0] * weights[0]
    for out, weight in zip(outs[1:], weights[1:], strict=True):
        merged.addcmul_(out, weight)
    return merged, all_lses


class _Merged(torch.autograd.Function):
    """Attention of `query` (BH, T * Nq, D), in blocks of `sizes[i]` for the i-th part, whose rest is in `others`."""

    @staticmethod
    def forward(ctx: Any, scale: float, sizes: list[int], query: Tensor, *others: Tensor | None) -> Tensor:
        merged, lses = _merged(_parts(sizes, query, others), scale)
        ctx.scale, ctx.sizes = scale, sizes
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(merged, lses.logsumexp(0), query, *others)
        return merged

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        merged, lse, query, *others = ctx.saved_tensors
        of_others: list[Tensor | None] = []
        of_query: Tensor | None = None
        for part in _parts(ctx.sizes, query, others):
            shape = part.query.shape[1:3]
            grad, out, own_lse = (x.unflatten(1, shape) for x in (grads[0], merged, lse))
            found = fused_attention_backward((grad, None), part, (out, own_lse), ctx.scale, False)
            own = found[0].flatten(1, 2)
            of_query = own if of_query is None else of_query.add_(own)
            of_others += found[1:]
        return None, None, of_query, *of_others


def _parts(sizes: Sequence[int], query: Tensor, others: Sequence[Any]) -> list[Part]:
    return [Part(query.unflatten(1, (-1, n)), *others[3 * i : 3 * i + 3]) for i, n in enumerate(sizes)]


def attention_with_lse(query: Tensor, key: Tensor, value: Tensor, value_dim: int, scale: float) -> Partial:
    """`partial_attention` without a bias, for values that have at least two more dimensions, which are 0.

    Args:
        query: (BH, T, Nq, D), without a gradient.
        key: (BH, T, Nk, D).
        value: (BH, T, Nk, Dv), 0 from the dimension `value_dim` on.
        value_dim: at most Dv - 2.
        scale: factor of the scores.

    Returns:
        Partial with out (BH, T, Nq, Dv) and lse (BH, T, Nq). The gradient of `value` is meaningless in its dimensions
        from `value_dim` on.
    """
    found = _WithLse.apply(query, key, value, value_dim, float(scale))  # type: ignore[no-untyped-call]
    return Partial(*found)


class _WithLse(torch.autograd.Function):
    """The gradient of the lse enters through two dimensions of the output, as in `fused_attention_backward`."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, value_dim: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = fused_attention(query, key, value, None, scale)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.value_dim, ctx.scale = value_dim, scale
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        used, dim = ctx.value_dim, value.shape[3]
        delta = -grad_lse.unsqueeze(3)
        high = delta.to(out.dtype)
        out = torch.cat((out[..., :used], high, (delta - high).to(out.dtype), out[..., used + 2 :]), 3)
        ones = grad_out.new_ones(()).expand(*grad_out.shape[:3], dim - used)
        grad_out = torch.cat((grad_out[..., :used], ones), 3)
        tensors = query, key, value, None
        grads = fused_attention_backward((grad_out, None), tensors, (out, lse), ctx.scale, False)
        return None, *grads[1:3], None, None


def empty_score(dtype: torch.dtype) -> float:
    """A finite bias that excludes a pair."""
    return max(-1e30, torch.finfo(dtype).min / 2)


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether a gradient of any of these tensors is recorded."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
