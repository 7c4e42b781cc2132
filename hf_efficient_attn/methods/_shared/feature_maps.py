"""Linear attention with the features of an option `feature_map`, for the methods that have one.

The features are those of `hf_efficient_attn.ops.features`, and the sums over the keys those of
`hf_efficient_attn.ops.linear`. Dropout acts on the features of the queries.
"""

from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.methods._shared.heads import flatten_heads, unflatten_heads
from hf_efficient_attn.methods._shared.registry import AttentionOptions
from hf_efficient_attn.ops.export import exporting_to_onnx
from hf_efficient_attn.ops.features import LEARNED, NAMES, Features, elu_map, favor, learned, start_map
from hf_efficient_attn.ops.linear import (
    FeatureState,
    Tokens,
    bidirectional,
    causal,
    log_weights_naive,
    numel_of_head,
    query_state,
    update_state,
)
from hf_efficient_attn.ops.partial import accumulation_dtype
from hf_efficient_attn.ops.slices import slice_size, sliced

# The learned parameter of a window beside the features; see `hf_efficient_attn.methods._shared.windowed_features`.
LOG_WEIGHT = "far_log_weight"

# Features that are kept for the backward pass: up to so many of a token, which take little more memory than the keys,
# and up to so many numbers of a call. Others are computed again, which takes up to half as long again.
_FEW_FEATURES, _KEPT_NUMEL = 128, 1 << 22


class FeatureMapConfig(Protocol):
    """What the functions below read of a config."""

    method: ClassVar[str]

    @property
    def feature_map(self) -> str:
        """The features."""

    @property
    def num_features(self) -> int:
        """Random features, or columns of a map."""

    @property
    def seed(self) -> int:
        """Seed of the initial maps."""


def is_learned(config: FeatureMapConfig) -> bool:
    """Whether the features of a config are learned."""
    return config.feature_map in LEARNED


def initial_maps(config: FeatureMapConfig, num_kv_heads: int, head_dim: int) -> dict[str, Tensor]:
    """`query_map` and `key_map` (H_kv, D, F); empty if the features are not learned."""
    if not is_learned(config):
        return {}
    sizes = num_kv_heads, head_dim, config.num_features, config.seed
    return {name: start_map(config.feature_map, *sizes, is_query=name == NAMES[0]) for name in NAMES}


def maps(config: FeatureMapConfig, x: Tensor, options: AttentionOptions) -> list[Tensor | None]:
    """The maps of queries and keys for the heads of x (B, H, N, D): (H, D, F), or None if they are not learned.

    Raises:
        UnsupportedAttentionError: a map is missing, has another shape, or is given although none is learned.
    """
    num_heads, head_dim = x.shape[1], x.shape[3]
    if not is_learned(config):
        for name in (*NAMES, LOG_WEIGHT):
            if name in options.parameters:
                raise UnsupportedAttentionError(
                    f"{config.method}: {name} has no effect with feature_map={config.feature_map!r}: choose a learned "
                    f"feature map, {', '.join(map(repr, LEARNED))}, or give no {name}"
                )
        return [None, None]
    rows = head_dim + (config.feature_map == "t2r")
    found: list[Tensor | None] = []
    for name in NAMES:
        own = options.parameters.get(name)
        wanted = (rows, config.num_features)
        if own is None or own.ndim != 3 or num_heads % max(1, own.shape[0]) or own.shape[1:] != wanted:
            raise UnsupportedAttentionError(
                f"{config.method}: {name} {None if own is None else tuple(own.shape)} does not match feature_map="
                f"{config.feature_map!r}, num_features={config.num_features} and {num_heads} heads with "
                f"head_dim={head_dim}: give a tensor (num_heads, {rows}, {config.num_features}), with the number of "
                "key heads in grouped-query attention"
            )
        found.append(own.repeat_interleave(num_heads // own.shape[0], 0))
    return found


def features_of(
    config: FeatureMapConfig, x: Tensor, options: AttentionOptions
) -> Callable[[Tensor | None, Tensor | None], Features]:
    """The function that gives the features for the maps of queries and of keys, of some heads of x (B, H, N, D)."""
    scale, head_dim = options.scale, x.shape[3]
    if config.feature_map == "favor":
        fixed = favor(config.num_features, scale, head_dim, options.seed, x.device)
    else:
        fixed = elu_map(scale, head_dim)

    def features(query_map: Tensor | None, key_map: Tensor | None) -> Features:
        if query_map is None or key_map is None:
            return fixed
        return learned(config.feature_map, query_map, key_map, scale, head_dim)

    return features


def over_heads(
    function: Callable[..., Tensor], *tensors: Tensor | None, num_features: int, options: AttentionOptions
) -> Tensor:
    """Call a function for the query, key, value and further tensors (BH, ...) of some heads at a time."""
    if exporting_to_onnx():
        return function(*tensors)
    key = tensors[1]
    assert key is not None
    size = slice_size(numel_of_head(key, num_features), key.device)
    recompute = num_features > _FEW_FEATURES and key.shape[0] * key.shape[1] * num_features > _KEPT_NUMEL
    return sliced(function, *tensors, size=size, draws=options.dropout_p > 0.0, recompute=recompute)


def features_forward(
    config: FeatureMapConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    initial_state: FeatureState | None = None,
) -> Tensor:
    """Fast form; see `register_method`. As part of the recurrence it also takes the state of earlier tokens."""
    of_heads, (query_map, key_map) = features_of(config, query, options), maps(config, query, options)
    tensors: list[Tensor | None] = [*flatten_heads(query, key, value, options.key_mask)]
    tensors += [None if x is None else x.repeat(query.shape[0], 1, 1) for x in (query_map, key_map)]
    tensors += [x.flatten(0, 1) for x in initial_state or ()]

    def some_heads(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, *rest: Tensor | None) -> Tensor:
        tokens, features = Tokens(query, key, value, key_mask), of_heads(*rest[:2])
        if options.is_causal:
            state = FeatureState(*rest[2:]) if rest[2:] else None  # type: ignore[arg-type]
            return causal(tokens, features, options.dropout_p, state).out.to(value.dtype)
        return bidirectional(tokens, features, options.dropout_p).to(value.dtype)

    out = over_heads(some_heads, *tensors, num_features=config.num_features, options=options)
    return unflatten_heads(out, query.shape)


def features_update(
    config: FeatureMapConfig, state: FeatureState | None, key: Tensor, value: Tensor, options: AttentionOptions
) -> FeatureState:
    """Add tokens to the state; see `Recurrence`."""
    key, value = (x.to(accumulation_dtype(x.dtype)) for x in (key, value))
    key_mask = None if options.key_mask is None else options.key_mask[:, None]
    features = features_of(config, key, options)(*maps(config, key, options))
    return update_state(state, key, value, key_mask, features)


def features_query(config: FeatureMapConfig, state: FeatureState, query: Tensor, options: AttentionOptions) -> Tensor:
    """Attention to all tokens of a state; see `Recurrence`."""
    query = query.to(state.sums.dtype)
    features = features_of(config, query, options)(*maps(config, query, options))
    return query_state(query, state, features, options.dropout_p).out


def features_naive(
    config: FeatureMapConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """Readable form: the dense matrix of the logs of phi(q_i) . phi(k_j)."""
    return softmax_naive(log_weights(config, query, key, options), value, options)


def log_weights(config: FeatureMapConfig, query: Tensor, key: Tensor, options: AttentionOptions) -> Tensor:
    """The logs of phi(q_i) . phi(k_j), without sums over tokens: float64 (B, H, Nq, Nk)."""
    query, key = query.double(), key.double()
    return log_weights_naive(query, key, features_of(config, query, options)(*maps(config, query, options)))


def softmax_naive(scores: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Attention with scores (B, H, Nq, Nk); 0 for a query without keys."""
    if options.is_causal:
        future = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    if options.key_mask is not None:
        scores = scores.masked_fill(~options.key_mask[:, None, None], -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ value.double()).to(value.dtype)
