"""Attention through features, alone or outside of a window that is computed exactly (LoLCATs: Zhang et al., ICLR 2025).

With a window, a query i attends to itself and to the `window_size` keys on each side of it (in the causal form on the
left only) with the weights of softmax, and to all other keys with the weights of features:

    out_i = sum_j w_ij v_j / sum_j w_ij
    w_ij = exp(scale q_i . k_j) in the window, and exp(c) phi(q_i) . phi(k_j) outside of it

The two parts are partials, so that the sums are computed in the log domain. c is `log_weight`, one for every head.
Masked tokens count in the distances between other tokens. The state of a recurrence keeps the last window_size + 1
tokens as they are, and represents all earlier tokens by the sums of a `FeatureState`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.attend import Partial, attend, merge
from hf_efficient_attn.ops.backends.devices import accumulation_dtype, product_dtype
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.features.maps import EMPTY, Features, log_weights_naive
from hf_efficient_attn.ops.features.sums import (
    FeatureState,
    Tokens,
    add_to_state,
    bidirectional,
    by_kernel,
    causal,
    numel_of_head,
    query_state,
    union,
)
from hf_efficient_attn.ops.shards import Shards, gather
from hf_efficient_attn.ops.slices import slice_size, sliced
from hf_efficient_attn.ops.tracing import exporting_to_onnx
from hf_efficient_attn.ops.windows import window_partial

# Features are kept for the backward pass if a token has at most `_FEW_FEATURES`, which take little more memory than the
# keys, or a call has at most `_KEPT_NUMEL` numbers. Otherwise they are computed again, in up to half as much more time.
_FEW_FEATURES = 128
_KEPT_NUMEL = 1 << 22
# A process has the features of this many tokens in memory at a time.
_BLOCK = 1 << 14
# Maps of queries and of keys to features, or two times None if the features are not learned.
Maps = tuple[Tensor | None, Tensor | None]


class FeatureCall(NamedTuple):
    """Options of the forms below."""

    # Returns the features of heads for their maps of queries and of keys.
    of_maps: Callable[[Tensor | None, Tensor | None], Features]
    # The maps (H, D, F) of queries and of keys, or None if the features are not learned. In a tensor of fewer heads
    # each map serves a group of heads.
    maps: Maps
    num_features: int  # the number of features that slices are made for
    scale: float  # factor of the scores
    dropout_p: float  # probability of dropping a weight of the window or a feature of a query
    is_causal: bool  # whether a query attends to the keys up to its own position only
    window_size: int = 0  # number of keys of the window on each side; 0 for no window
    # C, a tensor (H,) like `maps`, or one number; without effect if there is no window.
    log_weight: Tensor | float = 0.0

    def maps_for(self, num_heads: int, batch: int = 1) -> Maps:
        """Return the maps of `num_heads` heads of each of `batch` sequences, (BH, D, F) each."""
        query_map, key_map = (
            None if x is None else x.repeat_interleave(num_heads // x.shape[0], 0).repeat(batch, 1, 1)
            for x in self.maps
        )
        return query_map, key_map

    def features(self, x: Tensor) -> Features:
        """Return the features of tokens with the heads of x (B, H, N, D)."""
        return self.of_maps(*self.maps_for(x.shape[1]))

    def log_weight_for(self, x: Tensor) -> Tensor:
        """Return the constant c of the heads of x (B, H, N, D): (H, 1)."""
        num_heads = x.shape[1]
        dtype = accumulation_dtype(x.dtype)
        if not isinstance(self.log_weight, Tensor):
            return torch.full((num_heads, 1), self.log_weight, dtype=dtype, device=x.device)
        return self.log_weight.repeat_interleave(num_heads // self.log_weight.shape[0]).to(dtype).unsqueeze(1)


class WindowState(NamedTuple):
    """The state of the recurrence with a window, with W = window_size + 1."""

    sums: Tensor  # (B, H, F, Dv + 8), the sums over all tokens but the last W, as in `FeatureState`
    log: Tensor  # (B, H), as in `FeatureState`
    key: Tensor  # (B, H, W, D), the last W keys. Zeros come before the first token.
    value: Tensor  # (B, H, W, Dv), the last W values
    valid: Tensor  # (B, H, W), 1 for valid tokens, 0 for masked tokens and for entries before the first token


State: TypeAlias = FeatureState | WindowState


def feature_attention(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, call: FeatureCall, state: State | None = None
) -> Tensor:
    """Compute attention of queries (B, H, Nq, D) to keys (B, H, Nk, D), values (B, H, Nk, Dv), mask (B, Nk) or None.

    As part of a recurrence it is causal and also takes the state of earlier tokens.
    """
    if call.window_size:
        return _windowed(query, key, value, key_mask, call, state)

    mask = None if key_mask is None else key_mask.repeat_interleave(query.shape[1], 0)  # (BH, Nk)
    tokens = Tokens(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), mask)  # (BH, N, .)
    features = call.features(query)
    if not call.is_causal and features.fused.directions is not None:
        return _through_directions(tokens, features, call.dropout_p).to(value.dtype).view(*query.shape[:3], -1)

    def some_heads(tokens: Tokens, maps: Maps, before: FeatureState | None) -> Tensor:
        features = call.of_maps(*maps)
        if call.is_causal:
            return causal(tokens, features, call.dropout_p, before).out.to(value.dtype)
        return bidirectional(tokens, features, call.dropout_p).to(value.dtype)

    maps = call.maps_for(query.shape[1], query.shape[0])
    before = None if state is None else FeatureState(state.sums.flatten(0, 1), state.log.flatten(0, 1))
    out = _over_heads(some_heads, tokens, maps, before, call=call)
    return torch.unflatten(out, 0, query.shape[:2])


def _through_directions(tokens: Tokens, features: Features, dropout_p: float = 0.0) -> Tensor:
    """Compute `bidirectional` for features that are exponentials by two softmax attentions, without storing features.

    The directions attend to the keys, with the log factors of the keys as a bias. The queries attend to the
    directions, whose values are these outputs and whose bias is their lse.
    """
    found = by_kernel(tokens, features, dropout_p, is_causal=False)
    if found is not None:
        return found.out
    query, key, value, key_mask = tokens
    scale = features.fused.scale
    assert features.fused.directions is not None
    acc_dtype = accumulation_dtype(key.dtype)
    query, key, value = (x.to(product_dtype(x)).unsqueeze(1) for x in (query, key, value))  # (BH, 1, N, .)
    exact = features.fused.directions.to(acc_dtype)  # (F, D)
    directions = exact.to(key.dtype).expand(key.shape[0], 1, -1, -1)  # (BH, 1, F, D)
    bias = torch.linalg.vector_norm(key, dim=3, dtype=acc_dtype).square().unsqueeze(2) * (-0.5 * abs(scale))
    if key_mask is not None:  # (BH, 1, 1, Nk)
        bias = bias.masked_fill(~key_mask[:, None, None], -torch.inf)
    first = directions
    if key.dtype != acc_dtype:  # directions as sums of two numbers: rounded ones would choose other features
        rest = (exact - exact.to(key.dtype)).to(key.dtype).expand_as(directions)
        first, key = torch.cat((directions, rest), 3), torch.cat((key, key), 3)
    values, lse = attend(first, key, value, bias, scale=1.0)  # (BH, 1, F, Dv), (BH, 1, F)
    sign = 1.0 if scale >= 0 else -1.0
    return attend(query, directions, values, lse.unsqueeze(2), scale=sign, dropout_p=dropout_p).out.squeeze(1)


def _over_heads(form: Callable[..., Tensor], tokens: Tokens, *others: Any, call: FeatureCall) -> Tensor:
    """Call form(tokens, *others) with the tokens (BH, N, .) of some heads at a time."""
    if exporting_to_onnx():
        return form(tokens, *others)
    key = tokens.key
    has_window = call.window_size > 0
    num_features = 2 * call.num_features if has_window else call.num_features
    numel = numel_of_head(key, num_features, is_causal=call.is_causal or has_window)
    recompute = num_features > _FEW_FEATURES and key.shape[0] * key.shape[1] * num_features > _KEPT_NUMEL
    size = slice_size(numel, key.device)
    return sliced(form, tokens, *others, size=size, draws=call.dropout_p > 0.0, recompute=recompute)


def _windowed(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, call: FeatureCall, state: State | None
) -> Tensor:
    batch, num_heads = query.shape[:2]
    first = 0
    if isinstance(state, WindowState):  # prepend the tokens in the window of the first query; their outputs are dropped
        first = state.key.shape[2]
        key_mask = torch.ones_like(key[:, 0, :, 0], dtype=torch.bool) if key_mask is None else key_mask
        key_mask = torch.cat((state.valid[:, 0] > 0, key_mask), 1)  # (B, W + N)
        query = pad(query, (0, 0, first, 0))
        key, value = (torch.cat((x.to(y.dtype), y), 2) for x, y in ((state.key, key), (state.value, value)))
    before = None if state is None else FeatureState(state.sums, state.log)
    form = functools.partial(_window_and_features, call)
    log_weight = call.log_weight_for(query)
    if key_mask is None or exporting_to_onnx():
        mask = None if key_mask is None else key_mask.repeat_interleave(num_heads, 0)
        tokens = Tokens(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), mask)
        if before is not None:
            before = FeatureState(before.sums.flatten(0, 1), before.log.flatten(0, 1))
        maps = call.maps_for(num_heads, batch)
        out = _over_heads(form, tokens, maps, log_weight.repeat(batch, 1), before, call=call)
        return torch.unflatten(out, 0, (batch, num_heads))[:, :, first:]
    # As for the window alone, compute one sequence at a time, so that all heads share the bias of its mask.
    maps = call.maps_for(num_heads)
    outs = []
    for row, mask in enumerate(key_mask.unsqueeze(1)):  # (1, N)
        own = None if before is None else FeatureState(before.sums[row], before.log[row])
        tokens = Tokens(query[row], key[row], value[row], None)  # (H, N, .)
        outs.append(_over_heads(functools.partial(form, mask=mask), tokens, maps, log_weight, own, call=call))
    return torch.stack(outs)[:, :, first:]


def _window_and_features(
    call: FeatureCall,
    tokens: Tokens,
    maps: Maps,
    log_weight: Tensor,
    before: FeatureState | None,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute attention of some heads to a window exactly and to the features of the keys beyond it: (BH, N, Dv).

    Args:
        call: options.
        tokens: queries, keys and values (BH, N, .).
        maps: maps of queries and of keys, (BH, D, F).
        log_weight: (BH, 1), added to the log-weight of the features.
        before: the state of earlier tokens, or None.
        mask: bool (1, N), the mask of all heads, or None for the mask of `tokens`.
    """
    tokens = tokens if mask is None else tokens._replace(key_mask=mask)
    length = tokens.query.shape[1]
    left = call.window_size if exporting_to_onnx() else min(call.window_size, length - 1)
    right = 0 if call.is_causal else left
    scale = call.scale
    dropout_p = call.dropout_p
    near = window_partial(*tokens, left=left, right=right, scale=scale, dropout_p=dropout_p)
    if not exporting_to_onnx() and length <= call.window_size + 1:
        return near.out
    features = call.of_maps(*maps)
    distance = call.window_size + 1  # the tokens of the state are farther from every query
    far = [causal(tokens, features, dropout_p, before, distance=distance)]
    if not call.is_causal:
        far.append(causal(tokens, features, dropout_p, distance=distance, is_reversed=True))
    return merge(near, *(Partial(x.out, x.lse + log_weight) for x in far)).out.to(tokens.value.dtype)


def add_tokens(state: State | None, key: Tensor, value: Tensor, key_mask: Tensor | None, call: FeatureCall) -> State:
    """Return the state after more tokens, key (B, H, N, D), value (B, H, N, Dv) and mask (B, N) or None."""
    batch, num_heads, length, _ = key.shape
    dtype = accumulation_dtype(key.dtype)
    features = call.features(key)
    key = key.to(dtype)
    value = value.to(dtype)
    before = None if state is None else FeatureState(state.sums, state.log)
    if not call.window_size:
        return add_to_state(before, key, value, None if key_mask is None else key_mask[:, None], features)
    valid = torch.ones_like(key[..., 0]) if key_mask is None else key_mask[:, None].to(dtype)
    valid = valid.expand(batch, num_heads, length)  # (B, H, N)
    kept = call.window_size + 1
    if state is None:
        key = pad(key, (0, 0, kept, 0))
        value = pad(value, (0, 0, kept, 0))
        valid = pad(valid, (kept, 0))
    else:
        assert isinstance(state, WindowState)
        kept_tokens = state.key, state.value, state.valid
        key, value, valid = (torch.cat(x, 2) for x in zip(kept_tokens, (key, value, valid), strict=True))
    # For each token that came in, one leaves the window of the next query.
    sums = add_to_state(before, key[:, :, :length], value[:, :, :length], valid[:, :, :length] > 0, features)
    # A copy, so that the other tokens are not kept in memory.
    return WindowState(*sums, *(x[:, :, length:].clone() for x in (key, value, valid)))


def read_state(query: Tensor, state: State, call: FeatureCall) -> Tensor:
    """Compute attention of queries (B, H, N, D) to a state's tokens. With a window they belong to the newest token."""
    query = query.to(state.sums.dtype)
    far = query_state(query, FeatureState(state.sums, state.log), call.features(query), call.dropout_p)
    if not isinstance(state, WindowState):
        return far.out
    blocks, keys, values = (x.flatten(0, 1).unsqueeze(1) for x in (query, state.key, state.value))  # (BH, 1, N or W, .)
    bias = mask_bias(state.valid.flatten(0, 1)[:, None, None] > 0, query.dtype)  # (BH, 1, 1, W)
    near = attend(blocks, keys, values, bias, scale=call.scale, dropout_p=call.dropout_p)
    near = Partial(*(x.squeeze(1).unflatten(0, query.shape[:2]) for x in near))  # (B, H, N, Dv), (B, H, N)
    return merge(near, Partial(far.out, far.lse + call.log_weight_for(query))).out


def sharded_feature_attention(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, call: FeatureCall, shards: Shards
) -> Tensor:
    """Compute attention of a sequence that processes share, without a window. They exchange the states of their tokens.

    In the bidirectional form queries read the union of all states. In the causal form the union of the states of
    earlier processes is the initial state of the process's own tokens.
    """
    state = None
    groups = query.shape[1] // key.shape[1]
    for start in range(0, key.shape[2], _BLOCK):
        some = slice(start, start + _BLOCK)
        own_mask = None if key_mask is None else key_mask[:, some]
        state = add_tokens(state, key[:, :, some], value[:, :, some], own_mask, call)
    assert isinstance(state, FeatureState)
    state = FeatureState(*(x.repeat_interleave(groups, 1) for x in _of_all(state, shards, call.is_causal)))
    if call.is_causal:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        return feature_attention(query, key, value, key_mask, call, state)
    return torch.cat([read_state(some, state, call) for some in query.split(_BLOCK, 2)], 2).to(value.dtype)


def _of_all(state: FeatureState, shards: Shards, is_causal: bool) -> FeatureState:
    """Return the state of the tokens of all processes, or of the processes before this one."""
    # (processes, B, H, F * (Dv + 8) + 1)
    packed = gather(torch.cat((state.sums.flatten(2), state.log.unsqueeze(2)), 2), shards.group)
    sums = packed[..., :-1].unflatten(3, state.sums.shape[2:])  # (processes, B, H, F, Dv + 8)
    log = packed[..., -1].detach()  # (processes, B, H)
    if is_causal:
        # States are replaced and not left out, so that every process has a gradient to send.
        before = (torch.arange(shards.size, device=log.device) < shards.rank).view(-1, 1, 1)
        sums = torch.where(before[..., None, None], sums, 0.0)
        log = torch.where(before, log, EMPTY)
    return union(*(FeatureState(*x) for x in zip(sums, log, strict=True)))


def feature_scores_naive(query: Tensor, key: Tensor, call: FeatureCall) -> Tensor:
    """Compute the logs of all weights, the readable form: float64 (B, H, Nq, Nk)."""
    query = query.double()
    key = key.double()
    logs = log_weights_naive(query, key, call.features(query))
    if not call.window_size:
        return logs
    position = torch.arange(query.shape[2], device=query.device)
    in_window = (position - position[:, None]).abs() <= call.window_size  # (Nq, Nk)
    return torch.where(in_window, query @ key.mT * call.scale, logs + call.log_weight_for(query).unsqueeze(-1))
