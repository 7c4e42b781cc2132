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
from torch.nn.functional import dropout, pad

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.methods._shared.feature_maps import (
    LOG_WEIGHT,
    FeatureMapConfig,
    maps,
    masked_key_features,
    query_features_and_factor,
)
from hf_efficient_attn.methods._shared.heads import flatten_heads, unflatten_heads
from hf_efficient_attn.methods._shared.registry import AttentionOptions
from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.blocks import can_reuse_buffers, chunked_over_heads
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.export import exporting_to_onnx
from hf_efficient_attn.ops.far_features import (
    Features,
    Tokens,
    as_partial,
    buffered_merge_beyond,
    features_beyond,
)
from hf_efficient_attn.ops.feature_maps import log_weight_of_zeros
from hf_efficient_attn.ops.linear_attention import LinearState
from hf_efficient_attn.ops.partial import Partial, accumulation_dtype, merge, partial_attention
from hf_efficient_attn.ops.precision import sum_dtype
from hf_efficient_attn.ops.window import window_partial


class WindowConfig(FeatureMapConfig, Protocol):
    """What the functions below read of a config."""

    @property
    def window_size(self) -> int:
        """Keys of the window on each side, at least 1."""


class WindowState(NamedTuple):
    """The state of the recurrence, with W = window_size + 1.

    Attributes:
        products: (B, H, F, Dv), the sum of phi(k_j) v_j^T over all tokens but the last W.
        norm: (B, H, F), that of phi(k_j).
        key: (B, H, W, D), the last W keys. Zeros come before the first token.
        value: (B, H, W, Dv), their values.
        valid: (B, H, W), 1 for valid tokens and 0 for masked ones and for those before the first token.
    """

    products: Tensor
    norm: Tensor
    key: Tensor
    value: Tensor
    valid: Tensor


class _Learned(NamedTuple):
    """Learned parameters: the maps of queries and of keys (..., D, F) and c (...,); None without learned features."""

    query_map: Tensor | None
    key_map: Tensor | None
    log_weight: Tensor | None


def initial_log_weight(config: WindowConfig, num_kv_heads: int) -> dict[str, Tensor]:
    """`far_log_weight` (H_kv,) for learned features with a window."""
    start = log_weight_of_zeros(config.feature_map, config.num_features)
    return {LOG_WEIGHT: torch.full((num_kv_heads,), start, device="cpu")}


def _learned(config: WindowConfig, x: Tensor, options: AttentionOptions) -> _Learned:
    """The learned parameters of each of the heads of x (B, H, N, D): (H, D, F), (H, D, F) and (H,).

    Raises:
        UnsupportedAttentionError: a parameter is missing or has another shape.
    """
    query_map, key_map = maps(config, x.shape[1], x.shape[3], options)
    if query_map is None:
        return _Learned(None, None, None)
    num_heads, log_weight = x.shape[1], options.parameters.get(LOG_WEIGHT)
    if log_weight is None or log_weight.ndim != 1 or num_heads % max(1, log_weight.shape[0]):
        raise UnsupportedAttentionError(
            f"{config.method}: {LOG_WEIGHT} {None if log_weight is None else tuple(log_weight.shape)} does not match "
            f"window_size={config.window_size} and {num_heads} heads: give a tensor (num_heads,), with the number of "
            "key heads in grouped-query attention, or set window_size=0"
        )
    log_weight = log_weight.repeat_interleave(num_heads // log_weight.shape[0])
    return _Learned(query_map, key_map, log_weight.to(accumulation_dtype(x.dtype)))


def _query_features(config: WindowConfig, query: Tensor, learned: _Learned, scale: float) -> tuple[Tensor, Tensor]:
    """Features of queries (..., H, N, D), and the log of their factor and exp(c), broadcastable to (..., H, N)."""
    phi, factor = query_features_and_factor(config, query, learned.query_map, scale)
    if learned.log_weight is None:
        dtype = accumulation_dtype(query.dtype)
        return phi, torch.full((1, 1), -math.log(query.shape[-1]), dtype=dtype, device=query.device)
    log_weight = learned.log_weight.unsqueeze(-1)
    return phi, log_weight if factor is None else factor + log_weight


def windowed_forward(
    config: WindowConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    state: WindowState | None = None,
) -> Tensor:
    """Fast form; see `register_method`. As part of the recurrence it also takes the state of earlier tokens."""
    key_mask, learned, first = options.key_mask, _learned(config, query, options), 0
    if state is not None:  # the tokens in the window of the first query come first, with queries that are dropped
        first = state.key.shape[2]
        key_mask = torch.ones_like(key[:, 0, :, 0], dtype=torch.bool) if key_mask is None else key_mask
        key_mask = torch.cat((state.valid[:, 0] > 0, key_mask), 1)
        query = pad(query, (0, 0, first, 0))
        key, value = (torch.cat((x.to(y.dtype), y), 2) for x, y in ((state.key, key), (state.value, value)))
    attend = functools.partial(_attend, config, options=options)
    sums: tuple[Tensor, ...] = () if state is None else state[:2]
    if key_mask is None or backend(query) != "cpu" or exporting_to_onnx():
        flat = flatten_heads(query, key, value, key_mask)
        whole = (None if x is None else x.repeat(query.shape[0], *[1] * (x.ndim - 1)) for x in learned)
        out = chunked_over_heads(attend, *flat, *whole, *(x.flatten(0, 1) for x in sums))
        return unflatten_heads(out, query.shape)[:, :, first:]
    # As for the window alone, one sequence of the batch at a time, so that all heads share the bias of its mask.
    outs = []
    for row in range(query.shape[0]):
        own = functools.partial(_with_mask, attend, key_mask[row : row + 1])
        outs.append(chunked_over_heads(own, query[row], key[row], value[row], *learned, *(x[row] for x in sums)))
    return torch.stack(outs)[:, :, first:]


def _with_mask(attend: functools.partial[Tensor], mask: Tensor, *tensors: Tensor | None) -> Tensor:
    return attend(*tensors[:3], mask, *tensors[3:])


def _attend(
    config: WindowConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    *rest: Tensor | None,
    options: AttentionOptions,
) -> Tensor:
    """Attention of (BH, N, D) inputs with a mask (1 or BH, N), learned parameters and the sums of earlier tokens."""
    length, is_causal, dtype = query.shape[1], options.is_causal, sum_dtype(value)
    scale, dropout_p = options.scale, options.dropout_p
    left = config.window_size if exporting_to_onnx() else min(config.window_size, length - 1)
    right = 0 if is_causal else left
    near = window_partial(query, key, value, key_mask, left=left, right=right, scale=scale, dropout_p=dropout_p)
    if not exporting_to_onnx() and length <= config.window_size + 1:
        return near.out
    learned, state, distance = _Learned(*rest[:3]), None, config.window_size + 1
    if rest[3:]:
        state = LinearState(*(x.to(dtype) for x in rest[3:] if x is not None))

    def of_query(query: Tensor) -> tuple[Tensor, Tensor]:
        phi, log_weight = _query_features(config, query, learned, scale)
        return phi.to(dtype), log_weight

    def of_key(key: Tensor, key_mask: Tensor | None) -> Tensor:
        return masked_key_features(config, key, learned.key_map, key_mask).to(dtype)

    tokens, features = Tokens(query, key, value, key_mask), Features(of_query, of_key)
    if not dropout_p and can_reuse_buffers(query, key, value, *rest):
        return buffered_merge_beyond(near, tokens, features, distance, is_causal=is_causal, initial_state=state)
    far = features_beyond(tokens, features, distance, is_causal=is_causal, dropout_p=dropout_p, initial_state=state)
    return merge(near, far).out.to(value.dtype)


def windowed_update(
    config: WindowConfig, state: WindowState | None, key: Tensor, value: Tensor, options: AttentionOptions
) -> WindowState:
    """Add tokens to the state; see `Recurrence`."""
    (batch, num_heads, length, _), dtype = key.shape, accumulation_dtype(key.dtype)
    kept, learned = config.window_size + 1, _learned(config, key, options)
    key, value = key.to(dtype), value.to(dtype)
    valid = torch.ones_like(key[..., 0]) if options.key_mask is None else options.key_mask[:, None].to(dtype)
    valid = valid.expand(batch, num_heads, length)
    if state is None:
        key, value, valid = pad(key, (0, 0, kept, 0)), pad(value, (0, 0, kept, 0)), pad(valid, (kept, 0))
    else:
        last = zip(state[2:], (key, value, valid), strict=True)
        key, value, valid = (torch.cat(pair, 2) for pair in last)
    # As many tokens as came in are no longer within the window of the next query.
    phi = masked_key_features(config, key[:, :, :length], learned.key_map, valid[:, :, :length] > 0).to(dtype)
    products, norm = phi.transpose(2, 3) @ value[:, :, :length], phi.sum(2)
    if state is not None:
        products, norm = state.products + products, state.norm + norm
    # A copy, so that the other tokens are not kept in memory.
    return WindowState(products, norm, *(x[:, :, length:].clone() for x in (key, value, valid)))


def windowed_query(config: WindowConfig, state: WindowState, query: Tensor, options: AttentionOptions) -> Tensor:
    """Attention of the newest token to all tokens of a state; see `Recurrence`."""
    query, dropout_p, shape = query.to(state.key.dtype), options.dropout_p, query.shape
    blocks, keys, values = (x.flatten(0, 1).unsqueeze(1) for x in (query, state.key, state.value))
    bias = mask_bias(state.valid.flatten(0, 1)[:, None, None] > 0, query.dtype)
    near = partial_attention(blocks, keys, values, bias, scale=options.scale, dropout_p=dropout_p)
    phi, log_weight = _query_features(config, query, _learned(config, query, options), options.scale)
    phi = phi.to(state.norm.dtype)
    total = phi @ state.norm.unsqueeze(-1)
    phi = dropout(phi, dropout_p) if dropout_p else phi
    far = as_partial(phi @ state.products, total)
    near = Partial(*(x.squeeze(1).unflatten(0, shape[:2]) for x in near))
    return merge(near, Partial(far.out, far.lse + log_weight)).out


def windowed_naive(
    config: WindowConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """Readable form: the dense matrix of the logs of all weights."""
    learned, dtype = _learned(config, query.double(), options), value.dtype
    query, key, value = query.double(), key.double(), value.double()
    phi_q, log_weight = _query_features(config, query, learned, options.scale)
    phi_k = masked_key_features(config, key, learned.key_map, None)
    far = (phi_q @ phi_k.mT).log() + log_weight.unsqueeze(-1)
    position = torch.arange(query.shape[2], device=query.device)
    distance = position - position[:, None]
    scores = torch.where(distance.abs() <= config.window_size, query @ key.mT * options.scale, far)
    excluded = distance > 0 if options.is_causal else torch.zeros_like(distance, dtype=torch.bool)
    if options.key_mask is not None:
        excluded = excluded | ~options.key_mask[:, None, None]
    weights = scores.masked_fill(excluded, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ value).to(dtype)
