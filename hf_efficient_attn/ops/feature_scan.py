"""Causal attention with random features of the softmax kernel in a constant number of operations, and its gradient.

The log of feature f of key j is w_f . k_j. With r_j, the size of all logs of a token, a key is

    exp(w_f . k_j - |k_j|^2/2) = phi_jf exp(s_j),   phi_jf = exp(w_f . k_j - r_j) <= 1,   s_j = r_j - |k_j|^2/2,

and the size of the features of a query cancels in its output. So this is linear attention with one log weight s_j per
key. A query sums relative to the largest log weight up to it, so that nothing overflows and no later key has an
influence. Within chunks of tokens the sums are products of all pairs; the earlier chunks enter through their sums of
phi_jf exp(s_j) (v_j, 1), which one product with a triangular matrix per head adds up for all chunks.

A product phi_if phi_jf is lost only if it is smaller than the range of float32. The backward pass computes the features
again. All logs are to base 2.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import dropout, pad
from torch.utils.checkpoint import checkpoint

from hf_efficient_attn.ops import flash_linear
from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.blocks import ceil_div
from hf_efficient_attn.ops.export import is_compiling
from hf_efficient_attn.ops.feature_attention import FeatureKernel
from hf_efficient_attn.ops.fused_attention import fused_attention
from hf_efficient_attn.ops.linear_attention import normalize
from hf_efficient_attn.ops.partial import Partial, accumulation_dtype
from hf_efficient_attn.ops.precision import LOG2_E, sum_dtype

_CHUNK = 128  # tokens
# Chunks of a segment on accelerators, because the triangular matrix has as many rows. On the CPU: numbers of features.
_MAX_CHUNKS, _SEGMENT_NUMEL = 1024, 1 << 20
# On accelerators the features of a segment are computed in up to four groups of about so many numbers, to save memory.
_GROUP_NUMEL, _MAX_GROUPS = 1 << 28, 4
# Features of the heads that the recurrence computes at a time.
_RECURRENCE_NUMEL = 1 << 27
# Columns of ones that are added to the values: a multiple of 8, as the kernels for half precision want it.
_ONES = 8
# The largest log weight of no keys: a finite number, so that no difference of two is NaN.
_EMPTY = -1e30
_LN_2 = 1.0 / LOG2_E


class _Setting(NamedTuple):
    """What is the same for all segments.

    Attributes:
        scale: factor of the scores.
        size: tokens of a chunk.
        segment: tokens of a segment, whole chunks.
        group: features that are computed at a time.
    """

    scale: float
    size: int
    segment: int
    group: int

    @property
    def sign(self) -> float:
        """Queries are multiplied with the sign of the scale."""
        return 1.0 if self.scale >= 0 else -1.0


class _Segment(NamedTuple):
    """A run of tokens in chunks, with BC = BH * C, in the dtype of products.

    Attributes:
        query: (BC, S, D).
        key: (BC, S, D).
        value: (BC, S, Dv).
    """

    query: Tensor
    key: Tensor
    value: Tensor

    def value_and_ones(self) -> Tensor:
        """The values with columns of ones, (BC, S, Dv + 8), whose products are the total weights."""
        return pad(self.value, (0, _ONES), value=1.0)


class _Factors(NamedTuple):
    """Powers of two of differences of log weights, and these logs.

    Attributes:
        query_size: (BC * S, 1), the size of the logs of a query.
        key_size: (BC * S, 1), r_j.
        log_weight: (BH, C, S), s_j.
        largest: (BH, C, S), the largest log weight up to each token.
        of_key: (BC, S, 1), the weights of keys relative to the largest one at the end of their chunk.
        of_query: (BC, S, 1), what the sums before a chunk are multiplied with for a query.
        of_chunks: (BH, C + 1, C), what the sums of chunk c' are multiplied with in those before chunk c.
        of_start: (BH, C + 1, 1), likewise for the state before the segment.
    """

    query_size: Tensor
    key_size: Tensor
    log_weight: Tensor
    largest: Tensor
    of_key: Tensor
    of_query: Tensor
    of_chunks: Tensor
    of_start: Tensor


def causal_feature_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    *,
    kernel: FeatureKernel,
    dropout_p: float,
    initial_state: Partial | None = None,
) -> Tensor:
    """Causal form in which gradients and dropout are possible.

    Args:
        query: (BH, N, D).
        key: (BH, N, D).
        value: (BH, N, Dv).
        key_mask: bool (BH, N) or None.
        kernel: the features and the scale.
        dropout_p: probability of dropping a weight of a query, over the features or over the keys of its chunk.
        initial_state: the state of earlier tokens, out (BH, F, Dv) and lse (BH, F), or None.

    Returns:
        (BH, N, Dv), in the dtype of products.
    """
    on_cpu = backend(query) == "cpu"
    dtype = accumulation_dtype(query.dtype) if on_cpu else sum_dtype(query)
    count, root = kernel.features.shape[0], abs(kernel.scale) ** 0.5
    directions = (kernel.features * (root * LOG2_E)).to(dtype)
    state = start = None
    if initial_state is not None:
        state, start = _state(initial_state, dtype)
    setting = _setting(query, count, kernel.scale, on_cpu)
    query, key, value = (x.to(dtype) for x in (query, key, value))
    if not dropout_p and flash_linear.serves(value, count):
        return _attend_by_recurrence((query, key, value), key_mask, (state, start), directions, setting)
    if not dropout_p:
        return _attention(query, key, value, state, key_mask, start, directions, setting)
    outs = []
    for i in range(0, query.shape[1], setting.segment):
        tokens = slice(i, i + setting.segment)
        own_mask = None if key_mask is None else key_mask[:, tokens]
        own = query[:, tokens], key[:, tokens], value[:, tokens]
        if is_compiling():
            out, state, start = _attend_with_dropout(own, own_mask, (state, start), directions, setting, dropout_p)
        else:  # computed again in the backward pass, with the same random numbers
            arguments = own, own_mask, (state, start), directions, setting, dropout_p
            out, state, start = checkpoint(_attend_with_dropout, *arguments, use_reentrant=False)
        outs.append(out)
    return torch.cat(outs, 1)


def _setting(query: Tensor, count: int, scale: float, on_cpu: bool) -> _Setting:
    batch_heads, q_len = query.shape[:2]
    size = min(_CHUNK, q_len)
    chunks = ceil_div(q_len, size)
    if on_cpu and is_compiling():  # no loop over segments, whose number depends on the length
        return _Setting(scale, size, chunks * size, count)
    if on_cpu:
        return _Setting(scale, size, size * max(1, min(chunks, _SEGMENT_NUMEL // (batch_heads * size * count))), count)
    chunks = min(chunks, _MAX_CHUNKS)
    groups = min(_MAX_GROUPS, ceil_div(batch_heads * chunks * size * count, _GROUP_NUMEL))
    return _Setting(scale, size, chunks * size, min(count, 8 * ceil_div(count, 8 * groups)))


def _attend_by_recurrence(
    tokens: tuple[Tensor, Tensor, Tensor],
    key_mask: Tensor | None,
    initial: tuple[Tensor | None, Tensor | None],
    directions: Tensor,
    setting: _Setting,
) -> Tensor:
    """The same with sums that decay as the largest log weight grows, which a library computes: (BH, N, Dv).

    A few heads at a time, since all features of their tokens are kept in memory.
    """
    outs, numel = [], tokens[0].shape[1] * directions.shape[0]
    step = max(1, _RECURRENCE_NUMEL // numel)
    for i in range(0, tokens[0].shape[0], step):
        heads = slice(i, i + step)
        query, key, value = (x[heads] for x in tokens)
        own_mask, state, start = (x if x is None else x[heads] for x in (key_mask, *initial))
        phi_q, _ = _features(query, None, directions, setting.sign)
        phi_k, key_size = _features(key, None, directions, 1.0)
        log_weight, largest = _log_weights(key_size, key, own_mask, start, setting)
        phi_k = phi_k * (log_weight - largest).exp2().to(phi_k.dtype).unsqueeze(2)
        decay = largest.diff(dim=1, prepend=largest[:, :1] if start is None else start) * _LN_2
        sums = flash_linear.causal_sums(phi_q, phi_k, pad(value, (0, _ONES), value=1.0), state, decay)
        outs.append(normalize(sums[..., :-_ONES], sums[..., -_ONES, None]))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _state(state: Partial, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A state of features as sums (BH, F, Dv + 8) relative to its largest log weight, and this log (BH, 1)."""
    lse = state.lse * LOG2_E
    start = lse.detach().amax(1, keepdim=True).clamp(min=_EMPTY)
    weight = (lse - start).exp2().unsqueeze(2)
    return torch.cat((state.out * weight, weight.expand(-1, -1, _ONES)), 2).to(dtype), start


class _Attention(torch.autograd.Function):
    """Attention segment by segment. The backward pass computes the features again, those of the last segment first."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        query, key, value, state, key_mask, start, directions, setting = arguments
        outs: list[Tensor] = []
        kept: list[Tensor | None] = []
        with torch.autocast(query.device.type, enabled=False):
            for i in range(0, query.shape[1], setting.segment):
                tokens = slice(i, i + setting.segment)
                segment = _segment(query[:, tokens], key[:, tokens], value[:, tokens], setting)
                own_mask = None if key_mask is None else key_mask[:, tokens]
                is_last = tokens.stop >= query.shape[1]
                out, total, factors, after = _attend(
                    segment, key[:, tokens], own_mask, (state, start), directions, setting, is_last
                )
                outs.append(out)
                kept += [total, state, *factors]
                state, start = after
        ctx.setting, ctx.num_kept = setting, len(kept)
        out = outs[0] if len(outs) == 1 else torch.cat(outs, 1)
        ctx.save_for_backward(query, key, value, directions, out, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        setting = ctx.setting
        query, key, value, directions, out, *kept = ctx.saved_tensors
        step, grads, of_state = 2 + len(_Factors._fields), [], None
        with torch.autocast(grad.device.type, enabled=False):
            for i in reversed(range(0, query.shape[1], setting.segment)):
                tokens = slice(i, i + setting.segment)
                total, state, *factors = kept[-step:]
                kept = kept[:-step]
                segment = _segment(query[:, tokens], key[:, tokens], value[:, tokens], setting)
                *own, of_state = _attend_backward(
                    (grad[:, tokens], out[:, tokens], total),
                    segment,
                    _Factors(*factors),
                    (state, of_state),
                    directions,
                    setting,
                )
                grads.append(own)
        parts = zip(*reversed(grads), strict=True)
        whole = [x[0] if len(x) == 1 else torch.cat(x, 1) for x in parts]
        return (*whole, of_state, None, None, None, None)


_attention: Callable[..., Tensor] = _Attention.apply


def _segment(query: Tensor, key: Tensor, value: Tensor, setting: _Setting) -> _Segment:
    """Tokens (BH, N, .) in chunks; zeros fill the last one."""
    missing = -query.shape[1] % setting.size
    if missing:
        query, key, value = (pad(x, (0, 0, 0, missing)) for x in (query, key, value))
    return _Segment(*(x.reshape(-1, setting.size, x.shape[2]) for x in (query, key, value)))


def _log_size(x: Tensor, directions: Tensor, sign: float) -> Tensor:
    """The log of the sum of the features of tokens (BC, S, D), rounded to their dtype: (BC * S, 1)."""
    shared = directions[None, None]
    lse = fused_attention(x[:, None], shared, shared, None, sign * _LN_2)[1]
    return (lse * LOG2_E).to(x.dtype).view(-1, 1)


def _features(x: Tensor, size: Tensor | None, directions: Tensor, sign: float) -> tuple[Tensor, Tensor]:
    """Features of tokens (BC, S, D) relative to their size, (BC, S, F), and this size; by default the largest log."""
    flat, directions = x.reshape(-1, x.shape[2]), directions.t()
    if size is None:
        logs = flat @ (directions if sign > 0 else -directions)
        size = logs.detach().amax(1, keepdim=True)
        return logs.sub_(size).exp2_().view(*x.shape[:2], -1), size
    logs = torch.addmm(size.expand(-1, directions.shape[1]), flat, directions, beta=-1.0, alpha=sign)
    return logs.exp2_().view(*x.shape[:2], -1), size


def _log_weights(
    key_size: Tensor, key: Tensor, key_mask: Tensor | None, start: Tensor | None, setting: _Setting
) -> tuple[Tensor, Tensor]:
    """The log weights of keys, s_j, and the largest one up to each: (BH, M), M tokens with those that fill a chunk.

    Args:
        key_size: r_j, (BH * M, 1) or any shape with as many rows in their order.
        key: (BH, N, D).
        key_mask: bool (BH, N) or None.
        start: (BH, 1), the largest log weight of earlier tokens, or None.
        setting: the scale.
    """
    batch_heads, dtype = key.shape[0], accumulation_dtype(key.dtype)
    key_size = key_size.view(batch_heads, -1).to(dtype)
    norm = torch.linalg.vector_norm(key, dim=-1, dtype=dtype)
    norm = norm if key_mask is None else norm.masked_fill(~key_mask, torch.inf)
    norm = pad(norm, (0, key_size.shape[1] - norm.shape[1]), value=torch.inf)
    log_weight = torch.addcmul(key_size, norm, norm, value=-0.5 * LOG2_E * abs(setting.scale))
    largest = log_weight.detach().cummax(1).values
    return log_weight, largest.clamp_(min=_EMPTY) if start is None else torch.maximum(largest, start)


def _factors(
    sizes: tuple[Tensor, Tensor], key: Tensor, key_mask: Tensor | None, start: Tensor | None, setting: _Setting
) -> _Factors:
    """All factors, from the sizes of queries and keys (BC * S, 1), the keys (BH, N, D) and their mask (BH, N)."""
    (query_size, key_size), batch_heads, dtype = sizes, key.shape[0], key.dtype
    log_weights = _log_weights(key_size, key, key_mask, start, setting)
    log_weight, largest = (x.view(batch_heads, -1, setting.size) for x in log_weights)
    ends = largest[:, :, -1]
    before = pad(ends, (1, 0), value=_EMPTY) if start is None else torch.cat((start, ends), 1)
    of_key = (log_weight - ends.unsqueeze(2)).exp2_().to(dtype).view(-1, setting.size, 1)
    of_query = (before[:, :-1, None] - largest).exp2_().to(dtype).view(-1, setting.size, 1)
    of_chunks = (ends.unsqueeze(1) - before.unsqueeze(2)).exp2_().tril_(-1).to(dtype)
    of_start = of_chunks if start is None else (start - before).exp2_().to(dtype).unsqueeze(2)
    return _Factors(query_size, key_size, log_weight, largest, of_key, of_query, of_chunks, of_start)


def _pair_factors(factors: _Factors) -> Tensor:
    """The weights of keys for each query of their chunk, relative to its largest one, 0 for later keys: (BC, S, S)."""
    difference = factors.log_weight.unsqueeze(2) - factors.largest.unsqueeze(3)
    return difference.exp2_().tril_().flatten(0, 1)


def _sums_before(
    phi: Tensor, segment: _Segment, factors: _Factors, state: Tensor | None, num_rows: int
) -> tuple[Tensor, Tensor]:
    """The sums before the first `num_rows` chunks (BH, rows, F * (Dv + 8)), and weighted values (BC, S, Dv + 8).

    `phi` are features of keys (BC, S, F) and `state` is their part (BH, F, Dv + 8) of the one before the segment.
    """
    value, of_chunks = segment.value_and_ones() * factors.of_key, factors.of_chunks
    sums = torch.bmm(phi.mT, value).view(*of_chunks.shape[::2], -1)
    before = torch.bmm(of_chunks[:, :num_rows], sums)
    del sums
    if state is not None:
        before.addcmul_(factors.of_start[:, :num_rows], state.flatten(1).unsqueeze(1))
    return before, value


def _attend(
    segment: _Segment,
    key: Tensor,
    key_mask: Tensor | None,
    initial: tuple[Tensor | None, Tensor | None],
    directions: Tensor,
    setting: _Setting,
    is_last: bool,
) -> tuple[Tensor, Tensor, _Factors, tuple[Tensor | None, Tensor | None]]:
    """Attention of a segment.

    Returns:
        The output (BH, N, Dv), the total weights (BC, S, 1), the factors, and the state after the segment, sums
        (BH, F, Dv + 8) and their log (BH, 1), unless it is the last one.
    """
    (state, start), batch_heads = initial, key.shape[0]
    phi_q = phi_k = query_size = key_size = None
    if backend(key) == "cpu":
        phi_q, query_size = _features(segment.query, None, directions, setting.sign)
        phi_k, key_size = _features(segment.key, None, directions, 1.0)
    else:
        query_size = _log_size(segment.query, directions, setting.sign)
        key_size = _log_size(segment.key, directions, 1.0)
    factors = _factors((query_size, key_size), key, key_mask, start, setting)
    num_chunks = factors.of_chunks.shape[2]
    num_rows, shape = num_chunks + (not is_last), (segment.value.shape[0], -1, segment.value.shape[2] + _ONES)
    pairs = cross = None
    after: list[Tensor] = []
    for i in range(0, directions.shape[0], setting.group):
        some = slice(i, i + setting.group)
        if phi_k is None:
            phi_k, _ = _features(segment.key, key_size, directions[some], 1.0)
        own_state = None if state is None else state[:, some]
        before = _sums_before(phi_k, segment, factors, own_state, num_rows)[0]
        if not is_last:
            after.append(before[:, -1].view(batch_heads, -1, shape[2]))
        if phi_q is None:
            phi_q, _ = _features(segment.query, query_size, directions[some], setting.sign)
        sums = before[:, :num_chunks].reshape(shape)
        cross = torch.bmm(phi_q, sums) if cross is None else cross.baddbmm_(phi_q, sums)
        del before, sums
        pairs = torch.bmm(phi_q, phi_k.mT) if pairs is None else pairs.baddbmm_(phi_q, phi_k.mT)
        phi_q = phi_k = None
    assert pairs is not None and cross is not None
    pairs.mul_(_pair_factors(factors))
    out = torch.addcmul(torch.bmm(pairs, segment.value_and_ones()), cross, factors.of_query)
    del pairs, cross
    # Without keys the output is 0, and no gradient passes.
    total = out[..., -_ONES, None]
    total = total.masked_fill(total == 0, torch.inf)
    out = (out[..., :-_ONES] / total).view(batch_heads, -1, shape[2] - _ONES)[:, : key.shape[1]]
    state = None if is_last else after[0] if len(after) == 1 else torch.cat(after, 1)
    return out, total, factors, (state, factors.largest[:, -1, -1:])


def _attend_with_dropout(
    tokens: tuple[Tensor, Tensor, Tensor],
    key_mask: Tensor | None,
    initial: tuple[Tensor | None, Tensor | None],
    directions: Tensor,
    setting: _Setting,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of a segment by operators that autograd knows: the output (BH, N, Dv) and the state after it."""
    (query, key, value), (state, start) = tokens, initial
    segment = _segment(query, key, value, setting)
    phi_q, query_size = _features(segment.query, None, directions, setting.sign)
    phi_k, key_size = _features(segment.key, None, directions, 1.0)
    factors = _factors((query_size, key_size), key, key_mask, start, setting)
    before = _sums_before(phi_k, segment, factors, state, factors.of_chunks.shape[1])[0]
    sums = before[:, :-1].reshape(phi_k.shape[0], phi_k.shape[2], -1)
    pairs, phi_q = torch.bmm(phi_q, phi_k.mT) * _pair_factors(factors).to(query.dtype), phi_q * factors.of_query
    total = pairs.sum(2, keepdim=True) + torch.bmm(phi_q, sums[..., -1:])
    out = torch.bmm(dropout(pairs, dropout_p), segment.value_and_ones()) + torch.bmm(dropout(phi_q, dropout_p), sums)
    out = normalize(out[..., :-_ONES], total).reshape(key.shape[0], -1, value.shape[2])[:, : key.shape[1]]
    return out, before[:, -1].view(key.shape[0], directions.shape[0], -1), factors.largest[:, -1, -1:]


def _attend_backward(
    results: tuple[Tensor, Tensor, Tensor],
    segment: _Segment,
    factors: _Factors,
    states: tuple[Tensor | None, Tensor | None],
    directions: Tensor,
    setting: _Setting,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key and value (BH, N, .) of a segment and of the state before it.

    Args:
        results: the gradient of the output (BH, N, Dv), the output and the total weights (BC, S, 1).
        segment: the tokens.
        factors: those of the forward pass.
        states: the state before the segment, and the gradient of the one after it, (BH, F, Dv + 8) each, or None.
        directions: (F, D).
        setting: that of the forward pass.
    """
    (state, of_after), batch_heads, length = states, factors.log_weight.shape[0], results[0].shape[1]
    of_sums = _sum_gradients(*results, setting)
    of_cross = of_sums * factors.of_query
    pair_factors = _pair_factors(factors)
    values = segment.value_and_ones()
    of_pairs = torch.bmm(of_sums, values.mT).mul_(pair_factors)
    num_chunks = factors.of_chunks.shape[2]
    of_chunks = factors.of_chunks[:, :num_chunks]
    pairs = of_query = of_key = of_value = None
    of_state: list[Tensor] = []
    for i in range(0, directions.shape[0], setting.group):
        some = slice(i, i + setting.group)
        own, own_state = directions[some], None if state is None else state[:, some]
        phi_k, _ = _features(segment.key, factors.key_size, own, 1.0)
        phi_q, _ = _features(segment.query, factors.query_size, own, setting.sign)
        before, value = _sums_before(phi_k, segment, factors, own_state, num_chunks)
        pairs = torch.bmm(phi_q, phi_k.mT) if pairs is None else pairs.baddbmm_(phi_q, phi_k.mT)
        of_phi = torch.bmm(of_pairs, phi_k).baddbmm_(of_cross, before.view(*phi_q.shape[::2], -1).mT).mul_(phi_q)
        of_query = _projected(of_query, of_phi, own, setting.sign)
        of_before = torch.bmm(phi_q.mT, of_cross).view_as(before)
        of_own_sums = torch.bmm(of_chunks.mT, of_before)
        if own_state is not None:
            of_state.append(torch.bmm(factors.of_start[:, :num_chunks].mT, of_before).view_as(own_state))
        if of_after is not None:
            flat = of_after[:, some].reshape(batch_heads, 1, -1)
            of_own_sums.baddbmm_(factors.of_chunks[:, num_chunks, :, None], flat)
            if own_state is not None:
                of_state[-1] += (factors.of_start[:, num_chunks:] * flat).view_as(own_state)
        of_own_sums = of_own_sums.view(*phi_k.shape[::2], -1)
        of_phi = torch.bmm(of_pairs.mT, phi_q).baddbmm_(value, of_own_sums.mT).mul_(phi_k)
        of_key = _projected(of_key, of_phi, own, 1.0)
        of_value = torch.bmm(phi_k, of_own_sums) if of_value is None else of_value.baddbmm_(phi_k, of_own_sums)
    assert pairs is not None and of_query is not None and of_key is not None and of_value is not None
    pairs.mul_(pair_factors)
    of_value = torch.bmm(pairs.mT, of_sums).addcmul_(of_value, factors.of_key)
    # The gradient of the log weight of a key, which contains -|k|^2/2.
    of_log = (of_value * values).sum(2, keepdim=True)
    of_key = of_key.view_as(segment.key).addcmul_(segment.key, of_log, value=-abs(setting.scale))
    grads = of_query.view_as(of_key), of_key, of_value[..., :-_ONES]
    of_query, of_key, of_value = (x.reshape(batch_heads, -1, x.shape[2])[:, :length] for x in grads)
    return of_query, of_key, of_value, torch.cat(of_state, 1) if of_state else None


def _sum_gradients(grad: Tensor, out: Tensor, total: Tensor, setting: _Setting) -> Tensor:
    """Gradients of the sums of a query, those of its values and of its weights: (BC, S, Dv + 8)."""
    missing = -grad.shape[1] % setting.size
    if missing:
        grad, out = (pad(x, (0, 0, 0, missing)) for x in (grad, out))
    grad, out = (x.reshape(-1, setting.size, x.shape[2]) for x in (grad, out))
    # As in `normalize`, no gradient passes where the inverse could overflow.
    inverse = total.reciprocal().masked_fill_(total < torch.finfo(total.dtype).tiny ** 0.8, 0.0)
    grad = pad(grad * inverse, (0, _ONES))
    grad[..., -_ONES].sub_((grad[..., :-_ONES] * out).sum(2))
    return grad


def _projected(whole: Tensor | None, of_phi: Tensor, directions: Tensor, sign: float) -> Tensor:
    """Add the gradient of tokens (BC * S, D), for that of the logs of their features (BC, S, F)."""
    flat, alpha = of_phi.view(-1, of_phi.shape[2]), sign * _LN_2
    if whole is None:
        return torch.addmm(flat.new_empty(directions.shape[1]), flat, directions, beta=0.0, alpha=alpha)
    return whole.addmm_(flat, directions, alpha=alpha)
