"""Attention through features: the weight of a pair is phi(q) . phi(k), so that sums over the keys stand for all keys.

With S = sum_j phi(k_j) v_j^T and Z = sum_j phi(k_j), the output of a query is phi(q)^T S / phi(q)^T Z (Katharopoulos et
al. 2020). S and Z are a `FeatureState`, which tokens are added to and which queries read. The causal form cuts the
sequence into chunks. One product with a triangular matrix gives the states before all chunks of a segment, and pairs of
a query and a key of the same chunk are a triangular matrix of products.

A key has a weight 2**w_j besides its features (`hf_efficient_attn.ops.features.maps`), and sums are relative to a power
of two. In the causal form this power is the largest weight so far, so nothing overflows and no later key has an
influence.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad

from hf_efficient_attn.ops.attend import LOG2_E, Partial
from hf_efficient_attn.ops.backends import FEATURE_BACKENDS
from hf_efficient_attn.ops.backends.backend import LinearCall
from hf_efficient_attn.ops.backends.devices import accumulation_dtype
from hf_efficient_attn.ops.features.maps import EMPTY, Features
from hf_efficient_attn.ops.index import ceil_div, constant, count_blocks, integers, pad_to_blocks
from hf_efficient_attn.ops.slices import scan_chunks, slice_size, sliced
from hf_efficient_attn.ops.tracing import exporting_to_onnx

# With up to `_FEW_FEATURES` features a chunk has `_SMALL_CHUNK` tokens, with more it has `_CHUNK`. A segment has
# `scan_chunks` chunks, and the triangular matrix has as many rows.
_FEW_FEATURES = 128
_SMALL_CHUNK = 64
_CHUNK = 128
# The bidirectional form processes this many tokens of several heads together.
_SEGMENT = 512
# One product adds up the sums of a group of this many blocks.
_GROUP = 16
# Columns that are appended to the values, with a mean of 1. The mean of their sums is the sum of the weights: sums of
# different numbers are rounded independently. The number is a multiple of 8, as the kernels for half precision need it.
_ONES = tuple(1.0 + (i - 3.5) / 16.0 for i in range(8))


class FeatureState(NamedTuple):
    """Sums over tokens, relative to 2**log."""

    sums: Tensor  # (..., F, Dv + 8), S and, in the last 8 columns, Z times different numbers
    log: Tensor  # (...)


class Tokens(NamedTuple):
    """Query (BH, Nq, D), key (BH, Nk, D), value (BH, Nk, Dv) and key mask, bool (BH or 1, Nk) or None."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None


def union(*states: FeatureState) -> FeatureState:
    """Merge states into the state of all their tokens."""
    log = torch.stack([x.log for x in states]).amax(0)
    sums = torch.stack([x.sums * torch.exp2(x.log - log)[..., None, None] for x in states]).sum(0)  # (..., F, Dv + 8)
    return FeatureState(sums, log)


def add_to_state(
    state: FeatureState | None, key: Tensor, value: Tensor, key_mask: Tensor | None, features: Features
) -> FeatureState:
    """Add tokens, key (..., N, D), value (..., N, Dv) and mask (..., N), to a state, or to no tokens for None."""
    acc_dtype = accumulation_dtype(value.dtype)
    phi, log_weight = features.of_key(key, key_mask)  # (..., N, F), (..., N)
    value = value.to(phi.dtype)
    if log_weight is None:
        norm = phi.sum(-2, dtype=acc_dtype).unsqueeze(-1)  # (..., F, 1)
        log = norm.new_zeros(norm.shape[:-2])
    else:
        log = log_weight.detach().amax(-1)
        weight = torch.exp2(log_weight - log.unsqueeze(-1)).to(phi.dtype).unsqueeze(-1)  # (..., N, 1)
        norm = (phi.mT @ weight).to(acc_dtype)  # (..., F, N) @ (..., N, 1) -> (..., F, 1)
        value = value * weight
    # (..., F, N) @ (..., N, Dv) -> (..., F, Dv), and 8 columns of norms
    sums = torch.cat(((phi.mT @ value).to(acc_dtype), norm * _ones(norm.dtype, norm.device)), -1)  # (..., F, Dv + 8)
    own = FeatureState(sums, log)
    return own if state is None else union(state, own)


def query_state(query: Tensor, state: FeatureState, features: Features, dropout_p: float = 0.0) -> Partial:
    """Compute attention of queries (..., N, D) to all tokens of a state.

    `dropout_p` is the probability of dropping a feature of a query, here and in all forms below.
    """
    phi, log_factor = features.of_query(query)  # (..., N, F), (..., N)
    sums = state.sums.to(phi.dtype)  # (..., F, Dv + 8)
    values, total = _apart(phi @ sums)  # (..., N, F) @ (..., F, Dv + 8) -> (..., N, Dv), (..., N, 1)
    if dropout_p:
        values, _ = _apart(dropout(phi, dropout_p) @ sums)
    return as_partial(values, total, state.log.unsqueeze(-1), log_factor)


def by_kernel(
    tokens: Tokens, features: Features, dropout_p: float, is_causal: bool, distance: int = 0, is_reversed: bool = False
) -> Partial | None:
    """Compute `bidirectional` or `causal` by a kernel, or return None if there is none."""
    if dropout_p > 0.0 or exporting_to_onnx():
        return None
    call = LinearCall(*tokens, features.fused, is_causal, distance, is_reversed)
    return next((backend.attend(call) for backend in FEATURE_BACKENDS if backend.applies(call)), None)


def bidirectional(tokens: Tokens, features: Features, dropout_p: float = 0.0) -> Tensor:
    """Compute attention of all queries to all keys: (BH, Nq, Dv)."""
    found = by_kernel(tokens, features, dropout_p, is_causal=False)
    if found is not None:
        return found.out
    # This passes twice over the tokens of all heads: the temporaries of a segment stay in the caches of a CPU.
    numel = tokens.key.shape[0] * max(count_of(features, tokens), tokens.key.shape[2])
    step = slice_size(2 * numel, tokens.key.device)
    state = None
    for key, value, key_mask in _segments(step, *tokens[1:]):
        state = add_to_state(state, key, value, key_mask, features)

    def some_queries(query: Tensor) -> Tensor:
        assert state is not None
        return query_state(query, state, features, dropout_p).out

    return sliced(some_queries, tokens.query, size=step, dim=1, recompute=False)


def causal(
    tokens: Tokens,
    features: Features,
    dropout_p: float = 0.0,
    state: FeatureState | None = None,
    *,
    distance: int = 0,
    is_reversed: bool = False,
) -> Partial:
    """Compute attention of each query to the keys up to it, and to all tokens of a state (BH, ...).

    With a distance, query i attends to the keys up to i - `distance`, or from i + `distance` on if `is_reversed`.
    Nothing is subtracted, so rounding cannot make a weight negative.

    Returns:
        Partial of out (BH, N, Dv) and lse (BH, N).
    """
    found = None if state is not None else by_kernel(tokens, features, dropout_p, True, distance, is_reversed)
    if found is not None:
        return found
    if is_reversed:
        in_reverse = Tokens._make(None if x is None else x.flip(1) for x in tokens)
        later = causal(in_reverse, features, dropout_p, distance=distance)
        return Partial(*(x.flip(1) for x in later))
    tokens = _moved(tokens, distance) if distance else tokens
    size = _SMALL_CHUNK if count_of(features, tokens) <= _FEW_FEATURES else _CHUNK
    size = size if exporting_to_onnx() else min(size, tokens.key.shape[1])
    parts = []
    for segment in _segments(size * scan_chunks(tokens.key.device), *tokens):
        part, state = _causal_segment(Tokens(*segment), features, size, dropout_p, state)
        parts.append(part)
    return parts[0] if len(parts) == 1 else Partial(*(torch.cat(x, 1) for x in zip(*parts, strict=True)))


def count_of(features: Features, tokens: Tokens) -> int:
    """Return the number of features of a token."""
    with torch.no_grad():
        return features.of_key(tokens.key[:, :1], None)[0].shape[2]


def numel_of_head(key: Tensor, num_features: int, *, is_causal: bool) -> int:
    """Count the numbers of a head's temporaries, for keys (..., N, D), as `slice_size` takes it."""
    segment = _CHUNK * scan_chunks(key.device) if is_causal else _SEGMENT
    return min(key.shape[-2], segment) * max(num_features, key.shape[-1])


def _segments(step: int, *tensors: Any) -> list[tuple[Any, ...]]:
    """Split tensors (BH, N, ...) into parts of up to `step` tokens."""
    given = next(x for x in tensors if x is not None)
    if exporting_to_onnx() or given.shape[1] <= step:
        return [tensors]
    count = ceil_div(given.shape[1], step)
    return list(zip(*([None] * count if x is None else x.split(step, 1) for x in tensors), strict=True))


class _Factors(NamedTuple):
    """Powers of two of differences of log weights for C chunks of S tokens."""

    of_key: Tensor  # (BH * C, S, 1), the weights of keys relative to the largest one at the end of their chunk
    of_query: Tensor  # (BH * C, S, 1), the factors of the sums before a chunk for each query
    of_pairs: Tensor  # (BH * C, S, S), the weights of keys for each query of their chunk, relative to its largest one
    of_chunks: Tensor  # (BH, C + 1, C), the factors of the sums of chunk c' in the sums before chunk c
    of_start: Tensor  # (BH, C + 1, 1), the factors of the state before the segment in the same sums
    largest: Tensor  # (BH, C * S), the largest log weight up to each token


def _largest_so_far(x: Tensor, size: int) -> Tensor:
    """Return the largest of x (BH, C * S) up to each position: (BH, C * S)."""
    if not exporting_to_onnx():
        return x.cummax(1).values
    chunks = x.unflatten(1, (-1, size))  # (BH, C, S); ONNX has no running maximum
    ones = torch.ones(size, size, dtype=torch.bool, device=x.device)
    inside = chunks.unsqueeze(2).masked_fill(~ones.tril(), -torch.inf).amax(3)  # (BH, C, S)
    chunk = torch.arange(chunks.shape[1], device=x.device)
    earlier = chunk < chunk.unsqueeze(1)  # (C, C)
    before = inside[:, None, :, -1].masked_fill(~earlier, -torch.inf).amax(2)  # (BH, C)
    return torch.maximum(inside, before.unsqueeze(2)).flatten(1)


def _factors(log_weight: Tensor, size: int, start: Tensor | None) -> _Factors:
    """Compute the factors for log weights (BH, N) and the log (BH,) of the state before them."""
    length = log_weight.shape[1]
    log_weight = pad(log_weight, (0, count_blocks(length, size) * size - length), value=EMPTY)
    start = log_weight.new_full((log_weight.shape[0], 1), EMPTY) if start is None else start.unsqueeze(1)  # (BH, 1)
    all_largest = torch.maximum(_largest_so_far(log_weight.detach(), size), start)  # (BH, C * S)
    log_weight, largest = (x.unflatten(1, (-1, size)) for x in (log_weight, all_largest))  # (BH, C, S)
    ends = largest[:, :, -1]  # (BH, C)
    before = torch.cat((start, ends), 1)  # (BH, C + 1)
    pairs = log_weight.unsqueeze(2) - largest.unsqueeze(3)  # (BH, C, S, S)
    # min(pairs, 0): later keys, which do not count, could overflow. The gradient at 0, where the key itself is the
    # largest one, is 1; with a clamp it depends on the version of PyTorch.
    pairs = pairs - pairs.relu()
    return _Factors(
        torch.exp2(log_weight - ends.unsqueeze(2)).flatten(0, 1).unsqueeze(2),
        torch.exp2(before[:, :-1, None] - largest).flatten(0, 1).unsqueeze(2),
        pairs.exp2_().flatten(0, 1),
        torch.exp2(ends.unsqueeze(1) - before.unsqueeze(2)).tril_(-1),
        torch.exp2(start - before).unsqueeze(2),
        all_largest,
    )


def _causal_segment(
    tokens: Tokens, features: Features, size: int, dropout_p: float, state: FeatureState | None
) -> tuple[Partial, FeatureState]:
    """Compute `causal` for tokens in chunks of `size`, and the state after them."""
    batch_heads, length, _ = tokens.value.shape
    acc_dtype = accumulation_dtype(tokens.value.dtype)
    phi_q, log_factor = features.of_query(tokens.query)
    phi_k, log_weight = features.of_key(tokens.key, tokens.key_mask)
    dtype = phi_k.dtype
    value = tokens.value.to(dtype)
    value = torch.cat((value, _ones(dtype, value.device).expand(*value.shape[:2], -1)), 2)  # (BH, N, Dv + 8)
    phi_q, phi_k, value = (pad_to_blocks(x, size).flatten(0, 1) for x in (phi_q, phi_k, value))  # (BH * C, S, .)
    factors = None if log_weight is None else _factors(log_weight, size, None if state is None else state.log)
    weighted = value if factors is None else value * factors.of_key.to(dtype)  # (BH * C, S, Dv + 8)
    sums = torch.bmm(phi_k.mT, weighted).to(acc_dtype)  # (BH * C, F, Dv + 8)
    before, after = _states(sums.view(batch_heads, -1, sums[0].numel()), factors, state)
    states = before.to(dtype).view(sums.shape)  # (BH * C, F, Dv + 8)

    def all_sums(phi_q: Tensor) -> Tensor:
        """Sum values and, in the last columns, weights for each query: (BH, N, Dv + 8)."""
        pairs = torch.bmm(phi_q, phi_k.mT).tril_()  # (BH * C, S, S)
        earlier = torch.bmm(phi_q, states)  # (BH * C, S, F) @ (BH * C, F, Dv + 8) -> (BH * C, S, Dv + 8)
        if factors is not None:
            pairs = pairs * factors.of_pairs.to(dtype)
            earlier = earlier * factors.of_query.to(dtype)
        if dtype == acc_dtype:
            result = torch.baddbmm(earlier, pairs, value)  # (BH * C, S, S) @ (BH * C, S, Dv + 8)
        else:  # without rounding of the sum
            result = earlier.to(acc_dtype) + torch.bmm(pairs, value)
        return result.view(batch_heads, -1, result.shape[2])[:, :length]

    values, total = _apart(all_sums(phi_q))
    if dropout_p:
        values, _ = _apart(all_sums(dropout(phi_q, dropout_p)))
    log = None if factors is None else factors.largest[:, :length]
    part = as_partial(values, total, log, log_factor)
    end = after.new_zeros(batch_heads) if factors is None else factors.largest[:, -1]
    return part, FeatureState(after.view(batch_heads, *sums.shape[1:]), end)


def _states(sums: Tensor, factors: _Factors | None, state: FeatureState | None) -> tuple[Tensor, Tensor]:
    """Add up sums of chunks, before each chunk (BH, C, F * (Dv + 8)) and after the last chunk (BH, 1, .)."""
    batch_heads, num_chunks, _ = sums.shape
    start = None if state is None else state.sums.flatten(1).unsqueeze(1)  # (BH, 1, F * (Dv + 8))
    if factors is None:
        of_chunks = sums.new_ones(num_chunks + 1, num_chunks).tril_(-1).expand(batch_heads, -1, -1)  # (BH, C + 1, C)
    else:
        of_chunks = factors.of_chunks
        start = None if start is None else start * factors.of_start
    # The last row is computed by itself, so that the other rows need no copy.
    both = torch.bmm(of_chunks[:, :-1], sums), torch.bmm(of_chunks[:, -1:], sums)  # (BH, C, .), (BH, 1, .)
    if start is None:
        return both
    return both[0] + (start if factors is None else start[:, :-1]), both[1] + start[:, -1:]


@constant
def _ones(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `_ONES` as a tensor (8,)."""
    return torch.tensor(_ONES, dtype=dtype, device=device)


def _apart(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Split sums of values (..., Dv) from sums of weights (..., 1). The gradient of `split` is a single copy."""
    values, totals = sums.split((sums.shape[-1] - len(_ONES), len(_ONES)), -1)
    return values, totals.mean(-1, keepdim=True, dtype=accumulation_dtype(totals.dtype))


def as_partial(sums: Tensor, total: Tensor, *logs: Tensor | None) -> Partial:
    """Make a partial from sums of values (..., Dv) and of weights (..., 1), relative to powers of two.

    The output is 0 and no gradient passes where the weights sum to less than 5e-31 (2e-246 in float64): there is no
    key, or the inverse of the sum, and so the gradient, could overflow.
    """
    total = total.to(accumulation_dtype(total.dtype))
    empty = total < torch.finfo(total.dtype).tiny ** 0.8
    total = total.masked_fill(empty, torch.inf)
    lse = total.squeeze(-1).log2()
    for log in logs:
        lse = lse if log is None else lse + log
    return Partial(sums / total, (lse / LOG2_E).masked_fill(empty.squeeze(-1), -torch.inf))


def others(state: FeatureState, *, earlier_only: bool) -> FeatureState:
    """Merge, for each block of a state (BH, T, ...), all other blocks, or only the blocks before it.

    Blocks form groups. One product adds up the other blocks of a block's group, and another one the sums of the other
    groups. Weights are relative to the largest one that is added up, so a block that is left out cannot hide others.
    """
    sums = state.sums.flatten(2)  # (BH, T, M)
    log = state.log  # (BH, T)
    num_blocks = sums.shape[1]
    largest = _largest_of_others(log, earlier_only)  # (BH, T)
    if num_blocks <= _GROUP:
        own = torch.bmm(_of_others(log, largest, earlier_only), sums)
        return FeatureState(own.view(state.sums.shape), largest)
    missing = -num_blocks % _GROUP
    groups = pad(sums, (0, 0, 0, missing)).unflatten(1, (-1, _GROUP)).flatten(0, 1)  # (BH * G, S, M)
    group_log, group_largest = (
        pad(x, (0, missing), value=EMPTY).unflatten(1, (-1, _GROUP)) for x in (log, largest)
    )  # (BH, G, S)
    ends = group_log.amax(2)  # (BH, G)
    whole = torch.bmm(torch.exp2(group_log - ends.unsqueeze(2)).to(sums.dtype).flatten(0, 1).unsqueeze(1), groups)
    # (BH, G, M), (BH, G)
    rest = others(FeatureState(whole.view(len(sums), -1, sums.shape[2]), ends), earlier_only=earlier_only)
    own = torch.bmm(_of_others(group_log.flatten(0, 1), group_largest.flatten(0, 1), earlier_only), groups)
    factor = torch.exp2(rest.log.unsqueeze(2) - group_largest).clamp(max=1.0)  # (BH, G, S)
    both = torch.addcmul(own.view(*factor.shape, -1), rest.sums.unsqueeze(2), factor.unsqueeze(3))  # (BH, G, S, M)
    return FeatureState(both.flatten(1, 2)[:, :num_blocks].view(state.sums.shape), largest)


def _largest_of_others(log: Tensor, earlier_only: bool) -> Tensor:
    """Find the largest log (BH, T) of the blocks before each block, or of all other blocks."""
    if earlier_only:
        return pad(log, (1, -1), value=EMPTY).cummax(1).values
    if log.shape[1] == 1:
        return torch.full_like(log, EMPTY)
    top = log.topk(2, 1)
    return torch.where(integers(log.shape[1], log.device) == top.indices[:, :1], top.values[:, 1:], top.values[:, :1])


def _of_others(log: Tensor, largest: Tensor, earlier_only: bool) -> Tensor:
    """Compute the factor of the sums of block t' in the sums over all others of block t: (BH, T, T)."""
    factors = torch.exp2((log.unsqueeze(1) - largest.unsqueeze(2)).clamp_(max=0.0))  # (BH, T, T)
    if earlier_only:
        return factors.tril_(-1)
    return factors.masked_fill_(torch.eye(log.shape[1], dtype=torch.bool, device=log.device), 0.0)


def _moved(tokens: Tokens, distance: int) -> Tokens:
    """Shift the keys by `distance` positions. Masked keys come before them."""
    query, key, value, key_mask = tokens
    length = key.shape[1]
    key_mask = torch.ones_like(key[:1, :, 0], dtype=torch.bool) if key_mask is None else key_mask
    key, value = (pad(x, (0, 0, distance, 0))[:, :length] for x in (key, value))
    return Tokens(query, key, value, pad(key_mask, (distance, 0))[:, :length])
