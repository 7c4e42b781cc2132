"""Linear attention with the features of an option `feature_map`.

The learned features are those of `hf_efficient_attn.ops.feature_maps`. All others have no maps and are elu(x) + 1. Sums
over the keys are those of the linear transformer (`hf_efficient_attn.ops.linear_attention`): out_i = phi(q_i)^T S /
phi(q_i)^T Z. A scale other than 1/sqrt(D) multiplies the queries by scale * sqrt(D) before phi. Dropout acts on
phi(q_i).
"""

from typing import ClassVar, Protocol

from torch import Tensor
from torch.nn.functional import dropout

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.methods._shared.heads import flatten_heads, unflatten_heads
from hf_efficient_attn.methods._shared.registry import AttentionOptions
from hf_efficient_attn.ops.blocks import chunked_over_heads
from hf_efficient_attn.ops.feature_maps import LEARNED, NAMES, learned_features, learned_query_features, start_map
from hf_efficient_attn.ops.linear_attention import (
    LinearState,
    causal_linear_attention,
    key_features,
    linear_attention,
    normalize,
    query_factor,
    query_features,
)
from hf_efficient_attn.ops.partial import accumulation_dtype
from hf_efficient_attn.ops.precision import sum_dtype

# The learned parameter of a window beside the features; see `hf_efficient_attn.methods._shared.windowed_features`.
LOG_WEIGHT = "far_log_weight"


class FeatureMapConfig(Protocol):
    """What the functions below read of a config."""

    method: ClassVar[str]

    @property
    def feature_map(self) -> str:
        """The features."""

    @property
    def num_features(self) -> int:
        """Columns of a map."""

    @property
    def seed(self) -> int:
        """Seed of the initial maps."""


def is_learned(config: FeatureMapConfig) -> bool:
    """Whether the features of a config are learned."""
    return config.feature_map in LEARNED


def uses_maps(config: FeatureMapConfig, options: AttentionOptions) -> bool:
    """`is_learned`, after a check that there are no maps otherwise.

    Raises:
        UnsupportedAttentionError: there are maps, and the features of the config are not learned.
    """
    if is_learned(config):
        return True
    for name in (*NAMES, LOG_WEIGHT):
        if name in options.parameters:
            raise UnsupportedAttentionError(
                f"{config.method}: {name} has no effect with feature_map={config.feature_map!r}: choose a learned "
                f"feature map, {', '.join(map(repr, LEARNED))}, or give no {name}"
            )
    return False


def initial_maps(config: FeatureMapConfig, num_kv_heads: int, head_dim: int) -> dict[str, Tensor]:
    """`query_map` and `key_map` (H_kv, D, F); empty if the features are not learned."""
    if not is_learned(config):
        return {}
    sizes = num_kv_heads, head_dim, config.num_features, config.seed
    return {name: start_map(config.feature_map, *sizes, is_query=name == NAMES[0]) for name in NAMES}


def maps(config: FeatureMapConfig, num_heads: int, head_dim: int, options: AttentionOptions) -> list[Tensor | None]:
    """The maps of queries and keys for each of H heads, (H, D, F); None for features that are not learned.

    Raises:
        UnsupportedAttentionError: a map is missing or has another shape.
    """
    if not uses_maps(config, options):
        return [None, None]
    rows = head_dim + (config.feature_map == "t2r")
    found: list[Tensor | None] = []
    for name in NAMES:
        x = options.parameters.get(name)
        if x is None or x.ndim != 3 or num_heads % max(1, x.shape[0]) or x.shape[1:] != (rows, config.num_features):
            raise UnsupportedAttentionError(
                f"{config.method}: {name} {None if x is None else tuple(x.shape)} does not match feature_map="
                f"{config.feature_map!r}, num_features={config.num_features} and {num_heads} heads with "
                f"head_dim={head_dim}: give a tensor (num_heads, {rows}, {config.num_features}), with the number of "
                "key heads in grouped-query attention"
            )
        found.append(x.repeat_interleave(num_heads // x.shape[0], 0))
    return found


def scaled_query_features(config: FeatureMapConfig, query: Tensor, weight: Tensor | None, scale: float) -> Tensor:
    """Features of queries (..., N, D), without the factor of `query_features_and_factor`."""
    if weight is None:
        return query_features(query, scale)
    return learned_features(_scaled(query, scale), weight, config.feature_map, is_query=True)


def query_features_and_factor(
    config: FeatureMapConfig, query: Tensor, weight: Tensor | None, scale: float
) -> tuple[Tensor, Tensor | None]:
    """Features of queries (..., N, D), and the log of the factor that they lack; see `learned_query_features`."""
    if weight is None:
        return query_features(query, scale), None
    return learned_query_features(_scaled(query, scale), weight, config.feature_map)


def _scaled(query: Tensor, scale: float) -> Tensor:
    """Queries whose scale is 1/sqrt(D)."""
    factor = query_factor(scale, query.shape[-1])
    return query if factor is None else query.to(accumulation_dtype(query.dtype)) * factor


def masked_key_features(
    config: FeatureMapConfig, key: Tensor, weight: Tensor | None, key_mask: Tensor | None
) -> Tensor:
    """Features of keys (..., N, D), 0 where `key_mask`, bool (..., N), is False."""
    if weight is None:
        return key_features(key, key_mask)
    phi = learned_features(key, weight, config.feature_map, is_query=False)
    return phi if key_mask is None else phi * key_mask.unsqueeze(-1)


def features_forward(
    config: FeatureMapConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    initial_state: LinearState | None = None,
) -> Tensor:
    """Fast form; see `register_method`. As part of the recurrence it also takes the state of earlier tokens."""
    batch, num_heads, _, head_dim = query.shape
    tensors: list[Tensor | None] = [*flatten_heads(query, key, value, options.key_mask)]
    tensors += [None if x is None else x.repeat(batch, 1, 1) for x in maps(config, num_heads, head_dim, options)]
    tensors += [x.flatten(0, 1) for x in initial_state or ()]

    def some_heads(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_map: Tensor | None,
        key_map: Tensor | None,
        *state: Tensor,
    ) -> Tensor:
        dtype = sum_dtype(value)
        phi_q = scaled_query_features(config, query, query_map, options.scale).to(dtype)
        phi_k = masked_key_features(config, key, key_map, key_mask).to(dtype)
        if options.is_causal:
            before = LinearState(*state) if state else None
            out = causal_linear_attention(phi_q, phi_k, value.to(dtype), options.dropout_p, before)
        else:
            out = linear_attention(phi_q, phi_k, value.to(dtype), options.dropout_p)
        return out.to(value.dtype)

    return unflatten_heads(chunked_over_heads(some_heads, *tensors), query.shape)


def features_update(
    config: FeatureMapConfig, state: LinearState | None, key: Tensor, value: Tensor, options: AttentionOptions
) -> LinearState:
    """Add tokens to the state; see `Recurrence`."""
    weight = maps(config, key.shape[1], key.shape[3], options)[1]
    phi = masked_key_features(config, key, weight, None if options.key_mask is None else options.key_mask[:, None])
    phi = phi.to(accumulation_dtype(key.dtype))
    products, norm = phi.transpose(2, 3) @ value.to(phi.dtype), phi.sum(2)
    return LinearState(products, norm) if state is None else LinearState(state.products + products, state.norm + norm)


def features_query(config: FeatureMapConfig, state: LinearState, query: Tensor, options: AttentionOptions) -> Tensor:
    """Attention to all tokens of a state; see `Recurrence`."""
    weight = maps(config, query.shape[1], query.shape[3], options)[0]
    phi = scaled_query_features(config, query, weight, options.scale).to(state.norm.dtype)
    total = phi @ state.norm.unsqueeze(-1)
    phi = dropout(phi, options.dropout_p) if options.dropout_p else phi
    return normalize(phi @ state.products, total)


def features_naive(
    config: FeatureMapConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """Readable form: the dense matrix of phi(q_i) . phi(k_j)."""
    of_query, of_key = maps(config, query.shape[1], query.shape[3], options)
    key_mask = None if options.key_mask is None else options.key_mask[:, None]
    phi_q = scaled_query_features(config, query.double(), of_query, options.scale)
    weights = phi_q @ masked_key_features(config, key.double(), of_key, key_mask).mT
    if options.is_causal:
        weights = weights.tril()
    return normalize(weights @ value.double(), weights.sum(-1, keepdim=True)).to(value.dtype)
