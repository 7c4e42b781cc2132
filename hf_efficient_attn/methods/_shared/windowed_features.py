"""A window computed exactly, merged with linear attention to all other keys (LoLCATs: Zhang et al., ICLR 2025).

A query i attends to the `window_size` keys on each side of it, in the causal form on the left only, and to itself with
the weights of softmax, and to all other keys with those of features:

    out_i = sum_j w_ij v_j / sum_j w_ij
    w_ij = exp(scale q_i . k_j) in the window, and exp(c) phi(q_i) . phi(k_j) outside of it

The two parts are partials, so that the sums are computed in the log domain. c is `far_log_weight`, which every key head
learns together with its maps. It starts at the value for which a query and a key of zeros have the weight 1, as in
softmax. Features that are not learned keep this value, for `elu` -log D.

Masked tokens count in the distances between others. As the state of the recurrence, the last window_size + 1 tokens are
kept as they are, and the sums of `LinearState` represent all earlier ones.
"""

import functools
import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.methods._shared.feature_maps import (
    LOG_WEIGHT,
    FeatureMapConfig,
    features_of,
    is_learned,
    log_weights,
    maps,
    over_heads,
    softmax_naive,
)
from hf_efficient_attn.methods._shared.heads import flatten_heads, unflatten_heads
from hf_efficient_attn.methods._shared.registry import AttentionOptions
from hf_efficient_attn.ops.attend import attend
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.export import exporting_to_onnx
from hf_efficient_attn.ops.features import log_weight_of_zeros
from hf_efficient_attn.ops.linear import FeatureState, Tokens, features_beyond, query_state, update_state
from hf_efficient_attn.ops.partial import Partial, accumulation_dtype, merge
from hf_efficient_attn.ops.window import window_partial


class WindowConfig(FeatureMapConfig, Protocol):
    """What the functions below read of a config."""

    @property
    def window_size(self) -> int:
        """Keys of the window on each side, at least 1."""


class WindowState(NamedTuple):
    """The state of the recurrence, with W = window_size + 1.

    Attributes:
        sums: (B, H, F, Dv + 8), those of all tokens but the last W, as in `FeatureState`.
        log: (B, H), likewise.
        key: (B, H, W, D), the last W keys. Zeros come before the first token.
        value: (B, H, W, Dv), their values.
        valid: (B, H, W), 1 for valid tokens and 0 for masked ones and for those before the first token.
    """

    sums: Tensor
    log: Tensor
    key: Tensor
    value: Tensor
    valid: Tensor


def initial_log_weight(config: WindowConfig, num_kv_heads: int) -> dict[str, Tensor]:
    """`far_log_weight` (H_kv,) for learned features with a window."""
    start = log_weight_of_zeros(config.feature_map, config.num_features)
    return {LOG_WEIGHT: torch.full((num_kv_heads,), start, device="cpu")}


def _log_weight(config: WindowConfig, x: Tensor, options: AttentionOptions) -> Tensor:
    """The constant c of each of the heads of x (B, H, N, D): (H, 1).

    Raises:
        UnsupportedAttentionError: the parameter is missing or has another shape.
    """
    num_heads, dtype = x.shape[1], accumulation_dtype(x.dtype)
    if not is_learned(config):
        return torch.full((num_heads, 1), -math.log(x.shape[3]), dtype=dtype, device=x.device)
    log_weight = options.parameters.get(LOG_WEIGHT)
    if log_weight is None or log_weight.ndim != 1 or num_heads % max(1, log_weight.shape[0]):
        raise UnsupportedAttentionError(
            f"{config.method}: {LOG_WEIGHT} {None if log_weight is None else tuple(log_weight.shape)} does not match "
            f"window_size={config.window_size} and {num_heads} heads: give a tensor (num_heads,), with the number of "
            "key heads in grouped-query attention, or set window_size=0"
        )
    return log_weight.repeat_interleave(num_heads // log_weight.shape[0]).to(dtype).unsqueeze(1)


def windowed_forward(
    config: WindowConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    state: WindowState | None = None,
) -> Tensor:
    """Fast form; see `register_method`. As part of the recurrence it also takes the state of earlier tokens."""
    key_mask, first, of_heads = options.key_mask, 0, features_of(config, query, options)
    learned = [*maps(config, query, options), _log_weight(config, query, options)]
    if state is not None:  # the tokens in the window of the first query come first, with queries that are dropped
        first = state.key.shape[2]
        key_mask = torch.ones_like(key[:, 0, :, 0], dtype=torch.bool) if key_mask is None else key_mask
        key_mask = torch.cat((state.valid[:, 0] > 0, key_mask), 1)
        query = pad(query, (0, 0, first, 0))
        key, value = (torch.cat((x.to(y.dtype), y), 2) for x, y in ((state.key, key), (state.value, value)))
    sums: tuple[Tensor, ...] = () if state is None else state[:2]

    def some_heads(
        mask: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_map: Tensor | None,
        key_map: Tensor | None,
        log_weight: Tensor,
        *state: Tensor,
    ) -> Tensor:
        length, scale, dropout_p = query.shape[1], options.scale, options.dropout_p
        left = config.window_size if exporting_to_onnx() else min(config.window_size, length - 1)
        right = 0 if options.is_causal else left
        near = window_partial(query, key, value, mask, left=left, right=right, scale=scale, dropout_p=dropout_p)
        if not exporting_to_onnx() and length <= config.window_size + 1:
            return near.out
        tokens, features = Tokens(query, key, value, mask), of_heads(query_map, key_map)
        before, distance = FeatureState(*state) if state else None, config.window_size + 1
        far = features_beyond(
            tokens, features, distance, is_causal=options.is_causal, dropout_p=dropout_p, state=before
        )
        return merge(near, *(Partial(x.out, x.lse + log_weight) for x in far)).out.to(value.dtype)

    def of_batch(mask: Tensor | None, *tensors: Tensor | None) -> Tensor:
        function = functools.partial(some_heads, mask)
        return over_heads(function, *tensors, num_features=2 * config.num_features, options=options)

    if key_mask is None or exporting_to_onnx():
        flat = flatten_heads(query, key, value, key_mask)
        whole = (None if x is None else x.repeat(query.shape[0], *[1] * (x.ndim - 1)) for x in learned)
        out = of_batch(flat.key_mask, *flat[:3], *whole, *(x.flatten(0, 1) for x in sums))
        return unflatten_heads(out, query.shape)[:, :, first:]
    # As for the window alone, one sequence of the batch at a time, so that all heads share the bias of its mask.
    rows = zip(key_mask.unsqueeze(1), query, key, value, *sums, strict=True)
    outs = [of_batch(mask, *tokens[:3], *learned, *tokens[3:]) for mask, *tokens in rows]
    return torch.stack(outs)[:, :, first:]


def windowed_update(
    config: WindowConfig, state: WindowState | None, key: Tensor, value: Tensor, options: AttentionOptions
) -> WindowState:
    """Add tokens to the state; see `Recurrence`."""
    (batch, num_heads, length, _), dtype, kept = key.shape, accumulation_dtype(key.dtype), config.window_size + 1
    features = features_of(config, key, options)(*maps(config, key, options))
    key, value = key.to(dtype), value.to(dtype)
    valid = torch.ones_like(key[..., 0]) if options.key_mask is None else options.key_mask[:, None].to(dtype)
    valid = valid.expand(batch, num_heads, length)
    if state is None:
        key, value, valid = pad(key, (0, 0, kept, 0)), pad(value, (0, 0, kept, 0)), pad(valid, (kept, 0))
    else:
        last = zip(state[2:], (key, value, valid), strict=True)
        key, value, valid = (torch.cat(pair, 2) for pair in last)
    # As many tokens as came in are no longer within the window of the next query.
    before = None if state is None else FeatureState(*state[:2])
    sums = update_state(before, key[:, :, :length], value[:, :, :length], valid[:, :, :length] > 0, features)
    # A copy, so that the other tokens are not kept in memory.
    return WindowState(*sums, *(x[:, :, length:].clone() for x in (key, value, valid)))


def windowed_query(config: WindowConfig, state: WindowState, query: Tensor, options: AttentionOptions) -> Tensor:
    """Attention of the newest token to all tokens of a state; see `Recurrence`."""
    query, dropout_p, shape = query.to(state.key.dtype), options.dropout_p, query.shape
    blocks, keys, values = (x.flatten(0, 1).unsqueeze(1) for x in (query, state.key, state.value))
    bias = mask_bias(state.valid.flatten(0, 1)[:, None, None] > 0, query.dtype)
    near = attend(blocks, keys, values, bias, scale=options.scale, dropout_p=dropout_p)
    features = features_of(config, query, options)(*maps(config, query, options))
    far = query_state(query, FeatureState(*state[:2]), features, dropout_p)
    near = Partial(*(x.squeeze(1).unflatten(0, shape[:2]) for x in near))
    return merge(near, Partial(far.out, far.lse + _log_weight(config, query, options))).out


def windowed_naive(
    config: WindowConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """Readable form: the dense matrix of the logs of all weights."""
    far = log_weights(config, query, key, options) + _log_weight(config, query.double(), options).unsqueeze(-1)
    position = torch.arange(query.shape[2], device=query.device)
    in_window = (position - position[:, None]).abs() <= config.window_size
    exact = query.double() @ key.double().mT * options.scale
    return softmax_naive(torch.where(in_window, exact, far), value, options)
