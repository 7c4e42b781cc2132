"""Linear attention with the features of an option `feature_map`, for the methods that have one.

The computation is in `hf_efficient_attn.ops.features.with_window`. Dropout acts on the features of the queries. With a
window, c is the learned parameter `far_log_weight`, which every key head has together with its maps. It starts at the
value for which a query and a key of zeros have the weight 1, as in softmax. Features that are not learned keep this
value, for `elu` -log D.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.config import AttentionOptions, MethodConfig, Recurrence, ShardedForm, option
from hf_efficient_attn.methods._shared.registry import check_parameters, register_method
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.exact import dense_softmax
from hf_efficient_attn.ops.features.maps import LEARNED, NAMES, features_of_maps, log_weight_of_zeros, start_map
from hf_efficient_attn.ops.features.with_window import (
    FeatureCall,
    State,
    add_tokens,
    feature_attention,
    feature_scores_naive,
    read_state,
    sharded_feature_attention,
)
from hf_efficient_attn.ops.shards import Shards

# The learned parameter of a window beside the features.
LOG_WEIGHT = "far_log_weight"


@dataclass(frozen=True, kw_only=True)
class FeatureConfig(MethodConfig):
    """The fields of a config that the functions below read. The methods declare them as hyperparameters."""

    mixes_queries = False
    feature_map = ""
    num_features = 0
    window_size = 0
    seed = 0

    @property
    def is_learned(self) -> bool:
        """Whether the features are learned."""
        return self.feature_map in LEARNED


@dataclass(frozen=True, kw_only=True)
class EluFeatures(FeatureConfig):
    """Hyperparameters of the features elu(x) + 1, or of learned features."""

    feature_map: str = option(
        "elu",
        "The features. 'elu': elu(x) + 1. Learned, with a linear map y = x W of each head: 'hedgehog', "
        "softmax([y, -y]); 't2r', relu(y + b); 'exp', exp([y, -y]).",
        choices=("elu", *LEARNED),
        carried=True,
    )
    num_features: int = option(64, "Columns of the map W of a learned feature map.", minimum=1, carried=True)


@dataclass(frozen=True, kw_only=True)
class FavorFeatures(FeatureConfig):
    """Hyperparameters of random features of the softmax kernel, or of learned features."""

    num_features: int = option(
        256,
        "Random features, or columns of the map of learned ones. A query costs as much as attention to this many keys, "
        "and to twice as many with 'hedgehog' and 'exp'.",
        minimum=1,
        carried=True,
    )
    feature_map: str = option(
        "favor",
        "The features. 'favor': FAVOR+. Learned, as for linear: 'hedgehog', 't2r' or 'exp'.",
        choices=("favor", *LEARNED),
        carried=True,
    )


def initial_parameters(config: FeatureConfig, *, num_kv_heads: int, head_dim: int, **_: int) -> dict[str, Tensor]:
    """Make `query_map` and `key_map` (H_kv, D, F) of learned features, and `far_log_weight` (H_kv,) of a window."""
    if not config.is_learned:
        return {}
    sizes = num_kv_heads, head_dim, config.num_features, config.seed
    found = {name: start_map(config.feature_map, *sizes, is_query=name == NAMES[0]) for name in NAMES}
    if config.window_size:
        start = log_weight_of_zeros(config.feature_map, config.num_features)
        found[LOG_WEIGHT] = torch.full((num_kv_heads,), start, dtype=torch.float32, device="cpu")
    return found


def _call(config: FeatureConfig, x: Tensor, options: AttentionOptions) -> FeatureCall:
    """Make the features for the heads of x (B, H, N, D)."""
    check_parameters(config, x, options, grouped=True)
    head_dim = x.shape[3]
    given = options.parameters
    feature_map = config.feature_map
    return FeatureCall(
        features_of_maps(feature_map, config.num_features, options.scale, head_dim, Draws(options.seed, x.device)),
        (given.get(NAMES[0]), given.get(NAMES[1])),  # (H_kv, D or D + 1, F) each, or None
        config.num_features,
        options.scale,
        options.dropout_p,
        options.is_causal,
        config.window_size,
        given.get(LOG_WEIGHT, -math.log(head_dim)),  # (H_kv,), or a number
    )


def _forward(
    config: FeatureConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    initial_state: State | None = None,
) -> Tensor:
    """Fast form; see `register_method`. As part of the recurrence it also takes the state of earlier tokens."""
    return feature_attention(query, key, value, options.key_mask, _call(config, query, options), initial_state)


def _naive(config: FeatureConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form: the dense matrix of the logs of all weights."""
    scores = feature_scores_naive(query, key, _call(config, query, options))  # (B, H, Nq, Nk)
    mask = options.key_mask
    return dense_softmax(scores, value, None if mask is None else mask[:, None], options.is_causal)


def _update(config: FeatureConfig, state: State | None, key: Tensor, value: Tensor, options: AttentionOptions) -> State:
    """Add tokens to the state; see `Recurrence`."""
    return add_tokens(state, key, value, options.key_mask, _call(config, key, options))


def _query(config: FeatureConfig, state: State, query: Tensor, options: AttentionOptions) -> Tensor:
    """Attention to all tokens of a state; see `Recurrence`."""
    return read_state(query, state, _call(config, query, options))  # (B, H, N, Dv)


def _forward_shard(
    config: FeatureConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, shards: Shards
) -> Tensor:
    """Return the form for a sequence that processes share; see `ShardedForm`."""
    return sharded_feature_attention(query, key, value, options.key_mask, _call(config, query, options), shards)


def register_features(config_class: type[FeatureConfig]) -> None:
    """Register the method with these hyperparameters."""
    register_method(
        config_class,
        forward=_forward,
        naive=_naive,
        initial_parameters=initial_parameters,
        recurrence=Recurrence(_update, _query, _forward),
        # The state of a window contains tokens and is no sum.
        sharded=ShardedForm(_forward_shard, lambda config, length, is_causal: not config.window_size),
    )
