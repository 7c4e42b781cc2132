"""Softmax attention over a part of the keys, and the exact merge of such parts.

A `Partial` is what attention over some set of keys leaves behind: the normalised output and the log of the total
weight. Two of them over disjoint sets merge to the one over the union (the online softmax of Milakov & Gimelshein
2018, used for blocks by FlashAttention, Dao et al. 2022). Everything in this package is made of the two functions
here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Scores computed at a time: 2**20 float32 numbers stay in the cache of one core, and the buffers are reused.
_TILE = 1 << 20
LOG2_E = 1.4426950408889634
_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Partial(NamedTuple):
    """Attention over a part of the keys.

    out: (..., Nq, Dv), the normalised output; 0 where the part holds no key.
    lse: (..., Nq), log of the sum of the weights, float32 (float64 for float64 input); -inf where the part holds no
    key.
    """

    out: Tensor
    lse: Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums over `dtype` are kept: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def safe_row_max(top: Tensor) -> Tensor:
    """Maxima of logs from which a log of 0 may be subtracted: 0 in place of -inf."""
    return top.masked_fill(top == -torch.inf, 0.0)


def exp_(x: Tensor) -> Tensor:
    """e^x in place, by a power of two, which has no gradient here.

    On the CPU `exp` is MKL's, which takes three times as long as `exp2`, and thirty times where it underflows.
    """
    return x.mul_(LOG2_E).exp2_()


def merge(*partials: Partial) -> Partial:
    """The partial over the union of disjoint parts; associative and exact, empty parts welcome.

    The weights of the parts are the softmax over their `lse`, so that the result is a convex combination of the parts'
    outputs. Differentiable in every `out` and every `lse`.
    """
    if len(partials) == 1:
        return partials[0]
    outs, lses = zip(*partials, strict=True)
    top = lses[0].detach()
    for lse in lses[1:]:
        top = torch.maximum(top, lse.detach())
    top = safe_row_max(top)
    weights = [torch.exp(lse - top) for lse in lses]
    total = weights[0]
    for weight in weights[1:]:
        total = total + weight
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    out = outs[0] * (weights[0] / total).unsqueeze(-1)
    for part, weight in zip(outs[1:], weights[1:], strict=True):
        out.addcmul_(part.to(out.dtype), (weight / total).unsqueeze(-1))
    return Partial(out.to(outs[0].dtype), (total.log() + top).masked_fill(empty, -torch.inf))


def partial_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *, scale: float, dropout_p: float = 0.0
) -> Partial:
    """Exact attention of tiles of queries to tiles of keys: softmax(scale * query key^T + bias) value, and its lse.

    Args:
        query: (A, T, Nq, D). A counts heads (of all batch rows), T tiles.
        key, value: (A, T, Nk, D) and (A, T, Nk, Dv); a T of 1 in both means that all tiles share the keys.
        bias: broadcastable to (A, T, Nq, Nk), of the accumulator's type; -inf shuts a pair out. Gradient flows to it.
        scale: factor of the scores.
        dropout_p: probability with which an entry of the normalised weights is dropped (others grow by 1/(1-p)); drawn
            from the global generator.

    Returns:
        Partial with out (A, T, Nq, Dv) in the type of `value` and lse (A, T, Nq); `bias` may leave rows empty.
    """
    if dropout_p > 0.0:
        return _partial_attention_with_dropout(query, key, value, bias, scale, dropout_p)
    tensors = (query, key, value) if bias is None else (query, key, value, bias)
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return Partial(*torch.ops.hf_efficient_attn.partial_attention(query, key, value, bias, float(scale)))
    return Partial(*_partial_attention_without_gradient(query, key, value, bias, float(scale)))


def partial_attention_naive(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *, scale: float
) -> Partial:
    """The same as `partial_attention` in four lines, for tests and readers."""
    scores = query @ key.transpose(-1, -2) * scale + (0.0 if bias is None else bias)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - safe_row_max(lse).unsqueeze(-1))
    return Partial(weights @ value, lse)


def _partial_attention_with_dropout(query, key, value, bias, scale, dropout_p) -> Partial:
    """`partial_attention_naive` in the accumulator's type with dropout on the weights; autograd keeps the weights of the tiles."""
    wide = accumulation_dtype(query.dtype)
    scores = query.to(wide) @ key.to(wide).transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias
    # Computed by hand since the gradient of logsumexp is NaN on a row of nothing but -inf.
    top = safe_row_max(scores.detach().amax(-1, keepdim=True))
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    weights = torch.nn.functional.dropout(weights / total, dropout_p)
    lse = (total.log() + top).masked_fill(empty, -torch.inf).squeeze(-1)
    return Partial((weights @ value.to(wide)).to(value.dtype), lse)


def _tiles(query: Tensor, key: Tensor):
    """Slices of (A, T) whose scores fill about `_TILE` numbers: ((a, slice of T), ...)."""
    heads, tiles, rows, columns = query.shape[0], query.shape[1], query.shape[2], key.shape[2]
    step = max(1, _TILE // max(1, rows * columns))
    return [(a, slice(t, min(t + step, tiles))) for a in range(heads) for t in range(0, tiles, step)]


def _part(tensor: Tensor | None, a: int, t: slice) -> Tensor | None:
    """The piece of a possibly broadcast (A, T, ., .) tensor that belongs to head `a` and the tiles `t`."""
    if tensor is None:
        return None
    tensor = tensor[a if tensor.shape[0] > 1 else 0]
    return tensor[t] if tensor.shape[0] > 1 else tensor


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, scale: float, buffer: Tensor) -> Tensor:
    """scale * query key^T + bias of one piece, in `buffer`: query (t, Nq, D), key (t or 1, Nk, D) -> (t, Nq, Nk)."""
    shape = (query.shape[0], query.shape[1], key.shape[1])
    scores = buffer[: shape[0] * shape[1] * shape[2]]
    if key.shape[0] == 1:
        torch.mm(query.reshape(-1, query.shape[-1]), key[0].t(), out=scores.view(-1, shape[2]))
    else:
        torch.bmm(query, key.transpose(1, 2), out=scores.view(shape))
    scores = scores.view(shape).mul_(scale)
    return scores if bias is None else scores.add_(bias)


@torch.library.custom_op("hf_efficient_attn::partial_attention", mutates_args=())
def _partial_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    return _partial_attention_without_gradient(query, key, value, bias, scale)


def _partial_attention_without_gradient(query, key, value, bias, scale) -> tuple[Tensor, Tensor]:
    heads, tiles, rows, width = query.shape
    wide = accumulation_dtype(query.dtype)
    if query.numel() == 0 or key.shape[2] == 0:
        lse = torch.full((heads, tiles, rows), -torch.inf, dtype=wide, device=query.device)
        return value.new_zeros(heads, tiles, rows, value.shape[-1]), lse
    if query.device.type == "cpu" and width == value.shape[-1]:
        return _partial_attention_fused(query, key, value, bias, scale)
    out = query.new_empty(heads, tiles, rows, value.shape[-1])
    lse = query.new_empty(heads, tiles, rows, dtype=wide)
    pieces = _tiles(query, key)
    buffer = query.new_empty(_longest(pieces) * rows * key.shape[2], dtype=wide)
    with torch.autocast(query.device.type, enabled=False):
        for a, t in pieces:
            values = _part(value, a, t).to(wide)
            scores = _scores(query[a, t].to(wide), _part(key, a, t).to(wide), _part(bias, a, t), scale, buffer)
            top = safe_row_max(scores.amax(-1, keepdim=True))
            total = exp_(scores.sub_(top)).sum(-1, keepdim=True)
            lse[a, t] = (total.log() + top).squeeze(-1)
            out[a, t] = (scores @ values).div_(total.masked_fill_(total == 0, 1.0))
    return out, lse


def _partial_attention_fused(query, key, value, bias, scale) -> tuple[Tensor, Tensor]:
    """The CPU's own kernel, with the tiles as its batch: its output is then laid out as ours is.

    One call where the tiles of all heads have keys of their own, else one a head.
    """
    heads, tiles, rows, width = query.shape
    # The kernel reads the numbers of a token as neighbours in memory, whatever their stride says.
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    # Overlapping views of the keys cannot be one batch without a copy.
    own_keys = key.shape[1] == value.shape[1] == tiles and (heads == 1 or key.is_contiguous())
    if own_keys and (bias is None or bias.shape[:2] in ((1, 1), (heads, tiles))):
        one = None if bias is None else bias.flatten(0, 1)[:, None]
        query, key, value = (x.reshape(heads * tiles, 1, -1, width) for x in (query, key, value))
        outs = [_FUSED(query, key, value, attn_mask=one, scale=scale)]
    else:
        outs = []
        for a in range(heads):
            keys, values = (x[a].expand(tiles, -1, -1)[:, None] for x in (key, value))
            here = None if bias is None else bias[min(a, bias.shape[0] - 1)][:, None]
            outs.append(_FUSED(query[a][:, None], keys, values, attn_mask=here, scale=scale))
    out, lse = outs[0] if len(outs) == 1 else (torch.stack(x) for x in zip(*outs, strict=True))
    out, lse = out.view(heads, tiles, rows, width), lse.view(heads, tiles, rows)
    # The kernel gives rows with no key an output of 0, and a lse of 0 too.
    return out, lse if bias is None else torch.where(bias.amax(-1) == -torch.inf, -torch.inf, lse)


def _longest(pieces) -> int:
    return max((t.stop - t.start for _, t in pieces), default=0)


@_partial_attention.register_fake
def _(query, key, value, bias, scale):
    heads, tiles, rows, _ = query.shape
    lse = query.new_empty(heads, tiles, rows, dtype=accumulation_dtype(query.dtype))
    return value.new_empty(heads, tiles, rows, value.shape[-1]), lse


@torch.library.custom_op("hf_efficient_attn::partial_attention_backward", mutates_args=())
def _partial_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = accumulation_dtype(query.dtype)
    grad_bias = torch.zeros_like(bias) if with_bias else lse.new_empty(0)
    grads = tuple(torch.zeros(x.shape, dtype=wide, device=x.device) for x in (query, key, value))
    grad_query, grad_key, grad_value = grads
    # d scores = P * (grad_out . v_j - grad_out . out + grad_lse), with P = exp(scores - lse); P = 0 in empty rows.
    delta = ((grad_out.to(wide) * out.to(wide)).sum(-1) - grad_lse).unsqueeze(-1)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf).unsqueeze(-1)
    pieces = _tiles(query, key)
    size = _longest(pieces) * query.shape[2] * key.shape[2]
    first, second = query.new_empty(size, dtype=wide), query.new_empty(size, dtype=wide)
    with torch.autocast(query.device.type, enabled=False):
        for a, t in pieces:
            shared = key.shape[1] == 1 == value.shape[1]
            rows, keys, values = query[a, t].to(wide), _part(key, a, t).to(wide), _part(value, a, t).to(wide)
            grad = grad_out[a, t].to(wide)
            weights = exp_(_scores(rows, keys, _part(bias, a, t), scale, first).sub_(lse[a, t]))
            inner = _scores(grad, values, None, 1.0, second).sub_(delta[a, t]).mul_(weights)
            if with_bias:
                piece = _part(grad_bias, a, t)
                piece += inner.sum_to_size(piece.shape)
            inner.mul_(scale)
            if shared:
                weights, inner, grad, rows = (x.reshape(1, -1, x.shape[-1]) for x in (weights, inner, grad, rows))
            at = slice(0, 1) if shared else t
            grad_value[a, at] += weights.transpose(1, 2) @ grad
            grad_key[a, at] += inner.transpose(1, 2) @ rows
            grad_query[a, t] = (inner @ keys).view(query[a, t].shape)
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), grad_bias


@_partial_attention_backward.register_fake
def _(grad_out, grad_lse, query, key, value, bias, out, lse, scale, with_bias):
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value)]
    return *grads, torch.empty_like(bias) if with_bias else lse.new_empty(0)


def _save(ctx, inputs, output) -> None:
    query, key, value, bias, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, bias, *output)


def _backward(ctx, grad_out, grad_lse):
    query, key, value, bias, out, lse = ctx.saved_tensors
    with_bias = ctx.needs_input_grad[3]
    *grads, grad_bias = torch.ops.hf_efficient_attn.partial_attention_backward(
        grad_out, grad_lse, query, key, value, bias, out, lse, ctx.scale, with_bias
    )
    return *grads, grad_bias if with_bias else None, None


torch.library.register_autograd("hf_efficient_attn::partial_attention", _backward, setup_context=_save)


def prefix_merge(partial: Partial, dim: int) -> Partial:
    """For each index c along `dim` of the partials, the merge of those at 0 .. c-1 (an exclusive scan; empty at 0).

    By doubling (Hillis & Steele 1986): log2 of the length steps, and what stands at c is made of nothing but what
    stands before it, also in its rounding, which a running sum with one common maximum is not.

    Args:
        partial: out (..., C, ..., Dv) and lse (..., C, ...), `dim` the non-negative position of C in both.
    """
    length = partial.lse.shape[dim]
    scan = _shift(partial, dim, 1)
    step = 1
    while step < length:
        scan = merge(scan, _shift(scan, dim, step))
        step *= 2
    return scan


def _shift(partial: Partial, dim: int, step: int) -> Partial:
    """Every partial moved `step` places up along `dim`, empty ones filling in."""
    length = partial.lse.shape[dim]
    step = min(step, length)
    moved = []
    for tensor, empty in zip(partial, (0.0, -torch.inf), strict=True):
        fill = torch.full_like(tensor.narrow(dim, 0, step), empty)
        moved.append(torch.cat((fill, tensor.narrow(dim, 0, length - step)), dim))
    return Partial(*moved)
