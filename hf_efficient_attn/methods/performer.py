"""Performer (Choromanski et al., ICLR 2021): positive orthogonal random features of the softmax kernel (FAVOR+).

Eq. 5 with the orthogonal features of section 3.2. The scale is split evenly between queries and keys. Dropout acts on
the weights of a query over the features, and in the causal form also over the keys of its own chunk.

Two departures from the paper affect rounding only:

- The sums are kept in the log domain with one maximum per feature and per query (`hf_efficient_attn.ops.features`). The
  authors subtract one maximum over all keys, which leaks the future in a causal model, and add 1e-6.
- The causal form works on chunks of tokens (`hf_efficient_attn.ops.feature_attention`).
"""

import functools
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import dropout

from hf_efficient_attn.methods._shared.config import MethodConfig, option
from hf_efficient_attn.methods._shared.feature_maps import (
    features_forward,
    features_naive,
    features_query,
    features_update,
    initial_maps,
    is_learned,
    uses_maps,
)
from hf_efficient_attn.methods._shared.heads import flatten_heads, unflatten_heads
from hf_efficient_attn.methods._shared.registry import AttentionOptions, Recurrence, register_method
from hf_efficient_attn.methods._shared.sharded_states import sharded_states
from hf_efficient_attn.ops.blocks import can_reuse_buffers, chunked_over_heads
from hf_efficient_attn.ops.feature_attention import (
    BUFFERED_HEADS,
    FeatureKernel,
    buffered_causal_feature_attention,
    feature_attention,
)
from hf_efficient_attn.ops.feature_maps import LEARNED, NAMES, count_features
from hf_efficient_attn.ops.feature_scan import causal_feature_attention
from hf_efficient_attn.ops.features import key_state, softmax_features
from hf_efficient_attn.ops.linear_attention import LinearState
from hf_efficient_attn.ops.partial import Partial, merge


@dataclass(frozen=True, kw_only=True)
class PerformerConfig(MethodConfig):
    """Hyperparameters of the Performer."""

    method = "performer"
    title = "Performer"
    paper = "Choromanski et al., ICLR 2021"
    year = 2020
    causal = True
    rectangular = True
    mixes_queries = False
    learned_parameters = NAMES
    summary = "positive orthogonal random features of the softmax kernel (FAVOR+)"
    paper_url = "https://arxiv.org/abs/2009.14794"
    near = "none"
    far = "FAVOR+ random features"

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
    seed: int = option(
        0, "Seed of the features, or of the initial maps. In training FAVOR+ is redrawn in every call.", minimum=0
    )

    def with_budget(self, columns: int) -> "PerformerConfig":
        """As many features as the budget has exact keys."""
        columns = self.check_budget(columns)
        columns = max(1, columns // count_features(self.feature_map, 1)) if is_learned(self) else columns
        return replace(self, num_features=columns)


def initial_parameters(
    config: PerformerConfig, *, num_heads: int, head_dim: int, value_dim: int, max_length: int, num_kv_heads: int
) -> dict[str, Tensor]:
    """The maps of learned features."""
    return initial_maps(config, num_kv_heads, head_dim)


def _kernel(config: PerformerConfig, x: Tensor, options: AttentionOptions) -> FeatureKernel:
    """The random features for queries or keys (..., D)."""
    return FeatureKernel(softmax_features(config.num_features, x.shape[-1], options.seed, x.device), options.scale)


def forward(
    config: PerformerConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    initial_state: Partial | LinearState | None = None,
) -> Tensor:
    """Fast form; see `register_method`. As part of the recurrence it also takes the state of earlier tokens."""
    if uses_maps(config, options):
        return features_forward(config, query, key, value, options, cast(LinearState | None, initial_state))
    kernel, dropout_p, dtype = _kernel(config, query, options), options.dropout_p, value.dtype
    tensors: list[Tensor | None]
    tensors = [*flatten_heads(query, key, value, options.key_mask), *(x.flatten(0, 1) for x in initial_state or ())]
    if options.is_causal and not dropout_p and can_reuse_buffers(*tensors):
        buffered = functools.partial(buffered_causal_feature_attention, kernel=kernel)
        result = (query.shape[2], value.shape[3], dtype)
        out = chunked_over_heads(buffered, *tensors, result=result, step=BUFFERED_HEADS)
        return unflatten_heads(out, query.shape)

    def some_heads(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, *state: Tensor) -> Tensor:
        if not options.is_causal:
            return feature_attention(query, key, value, key_mask, kernel=kernel, dropout_p=dropout_p).to(dtype)
        before = Partial(*state) if state else None
        attend = functools.partial(causal_feature_attention, kernel=kernel, dropout_p=dropout_p, initial_state=before)
        return attend(query, key, value, key_mask).to(dtype)

    return unflatten_heads(chunked_over_heads(some_heads, *tensors), query.shape)


def recurrence_update(
    config: PerformerConfig, state: Partial | LinearState | None, key: Tensor, value: Tensor, options: AttentionOptions
) -> Partial | LinearState:
    """Add tokens to the state, the partial of the features (B, H_kv, F, .); see `Recurrence`."""
    if uses_maps(config, options):
        return features_update(config, cast(LinearState | None, state), key, value, options)
    state = cast(Partial | None, state)
    kernel, shape = _kernel(config, key, options), key.shape[:2]
    heads = flatten_heads(key, key, value, options.key_mask)
    keys, values, bias = kernel.scale_key(heads.key, heads.value, heads.key_mask)
    if state is not None and options.key_mask is None and key.shape[2] == 1:
        # `merge` with the partial of a single key, whose output is the key's value for every feature.
        score = (keys @ kernel.features.to(keys.dtype).t() + bias.unsqueeze(-1)).view(state.lse.shape)
        weight = torch.sigmoid(score - state.lse)
        out = torch.lerp(state.out, values.view(*key.shape[:3], -1), weight.unsqueeze(-1))
        return Partial(out, torch.logaddexp(state.lse, score))
    part = key_state(keys[:, None], values[:, None], kernel.features, bias[:, None, None])
    part = Partial(*(x[:, 0].unflatten(0, shape) for x in part))
    return part if state is None else merge(state, part)


def recurrence_query(
    config: PerformerConfig, state: Partial | LinearState, query: Tensor, options: AttentionOptions
) -> Tensor:
    """Attention to all tokens of a state; see `Recurrence`. Faster than `query_state` for a few queries."""
    if uses_maps(config, options):
        return features_query(config, cast(LinearState, state), query, options)
    state = cast(Partial, state)
    kernel = _kernel(config, query, options)
    query = kernel.scale_query(query)
    # A state without tokens has an output of 0, whatever the weights are.
    lse = state.lse.masked_fill(state.lse.amax(-1, keepdim=True) == -torch.inf, 0.0)
    weights = (query @ kernel.features.to(query.dtype).t() + lse.unsqueeze(2)).softmax(-1)
    return (dropout(weights, options.dropout_p) if options.dropout_p else weights) @ state.out


def naive(config: PerformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form: the dense matrix of feature products, in the log domain."""
    if uses_maps(config, options):
        return features_naive(config, query, key, value, options)
    kernel = _kernel(config, query, options)
    heads = flatten_heads(query.double(), key.double(), value.double(), options.key_mask)
    flat_query, (keys, values, bias) = kernel.scale_query(heads.query), kernel.scale_key(*heads[1:])
    # Logs of the features, (BH, Nq, 1, F) and (BH, 1, Nk, F).
    log_q, log_k = (flat_query @ kernel.features.t())[:, :, None], (keys @ kernel.features.t())[:, None]
    scores = (log_q + log_k).logsumexp(-1) + bias[:, None]
    if options.is_causal:
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return unflatten_heads((scores.softmax(-1).nan_to_num(0.0) @ values).to(value.dtype), query.shape)


_RECURRENCE: Recurrence[PerformerConfig] = Recurrence(recurrence_update, recurrence_query, forward)

register_method(
    PerformerConfig,
    forward=forward,
    naive=naive,
    initial_parameters=initial_parameters,
    recurrence=_RECURRENCE,
    sharded=sharded_states(_RECURRENCE, lambda config, length, is_causal: True),
)
