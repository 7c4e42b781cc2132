"""Linear transformer (Katharopoulos, Vyas, Pappas, Fleuret, ICML 2020): weights phi(q) . phi(k), phi(x) = elu(x) + 1.

Other features, which are learned, are those of `hf_efficient_attn.methods._shared.feature_maps`.

- Bidirectional, Eq. 4-6: out_i = phi(q_i)^T S / phi(q_i)^T Z with S = sum_j phi(k_j) v_j^T and Z = sum_j phi(k_j).
- Causal, Eq. 9-12: the same with sums up to token i, computed chunk by chunk.
- Recurrent, Eq. 16-20: S and Z are the state.

The computation is in `hf_efficient_attn.ops.linear_attention`. The paper has no scale. Here, a scale other than
1/sqrt(D) multiplies the queries by scale * sqrt(D) before phi. Dropout acts on phi(q_i) / phi(q_i)^T Z.
"""

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import dropout

from hf_efficient_attn.methods._shared.config import MethodConfig, option
from hf_efficient_attn.methods._shared.feature_maps import (
    initial_maps,
    is_learned,
    learned_forward,
    learned_naive,
    learned_query,
    learned_update,
    uses_maps,
)
from hf_efficient_attn.methods._shared.heads import flatten_heads, unflatten_heads
from hf_efficient_attn.methods._shared.registry import AttentionOptions, Recurrence, register_method
from hf_efficient_attn.ops.blocks import can_reuse_buffers, chunked_over_heads
from hf_efficient_attn.ops.feature_maps import LEARNED, NAMES, count_features
from hf_efficient_attn.ops.linear_attention import (
    BUFFERED_HEADS,
    LinearState,
    buffered_causal_linear_attention,
    buffered_linear_attention,
    causal_linear_attention,
    key_features,
    linear_attention,
    normalize,
    query_features,
    trained_linear_attention,
)
from hf_efficient_attn.ops.partial import accumulation_dtype


@dataclass(frozen=True, kw_only=True)
class LinearConfig(MethodConfig):
    """Hyperparameters of the linear transformer: the features."""

    method = "linear"
    title = "Linear transformer"
    paper = "Katharopoulos, Vyas, Pappas, Fleuret, ICML 2020"
    year = 2020
    causal = True
    rectangular = True
    exportable = True
    mixes_queries = False
    learned_parameters = NAMES
    runs_in_chunks = ("causal",)
    summary = "elu(x) + 1 features in place of the exponential; an attention of its own, for training"
    paper_url = "https://arxiv.org/abs/2006.16236"
    near = "none"
    far = "elu(x) + 1 features"

    feature_map: str = option(
        "elu",
        "The features. 'elu': elu(x) + 1. Learned, with a linear map y = x W of each head: 'hedgehog', "
        "softmax([y, -y]); 't2r', relu(y + b); 'exp', exp([y, -y]).",
        choices=("elu", *LEARNED),
        carried=True,
    )
    num_features: int = option(64, "Columns of the map W of a learned feature map.", minimum=1, carried=True)
    seed: int = option(0, "Seed of the initial maps of learned features.", minimum=0)

    def with_budget(self, columns: int) -> "LinearConfig":
        """As many learned features as the budget has exact keys; without learned features the same config.

        With elu, a query always costs as much as about D / 2 exact keys.
        """
        self.check_budget(columns)
        if not is_learned(self):
            return self
        return replace(self, num_features=max(1, columns // count_features(self.feature_map, 1)))


def initial_parameters(
    config: LinearConfig, *, num_heads: int, head_dim: int, value_dim: int, max_length: int, num_kv_heads: int
) -> dict[str, Tensor]:
    """The maps of learned features."""
    return initial_maps(config, num_kv_heads, head_dim)


def forward(
    config: LinearConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    initial_state: LinearState | None = None,
) -> Tensor:
    """Fast form; see `register_method`. As part of the recurrence it also takes the state of earlier tokens."""
    if uses_maps(config, options):
        return learned_forward(config, query, key, value, options, initial_state)
    scale, dropout_p, dtype = options.scale, options.dropout_p, value.dtype
    tensors: list[Tensor | None]
    tensors = [*flatten_heads(query, key, value, options.key_mask), *(x.flatten(0, 1) for x in initial_state or ())]
    if not dropout_p and can_reuse_buffers(*tensors):
        buffered = buffered_causal_linear_attention if options.is_causal else buffered_linear_attention
        result = (query.shape[2], value.shape[3], dtype)
        out = chunked_over_heads(functools.partial(buffered, scale=scale), *tensors, result=result, step=BUFFERED_HEADS)
        return unflatten_heads(out, query.shape)

    if not dropout_p and torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        attend = functools.partial(trained_linear_attention, scale=scale, is_causal=options.is_causal)
        return unflatten_heads(chunked_over_heads(attend, *tensors).to(dtype), query.shape)

    def some_heads(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, *state: Tensor) -> Tensor:
        phi_q = query_features(query, scale)
        phi_k, value = key_features(key, key_mask).to(phi_q.dtype), value.to(phi_q.dtype)
        if options.is_causal:
            return causal_linear_attention(phi_q, phi_k, value, dropout_p, LinearState(*state) if state else None).to(
                dtype
            )
        return linear_attention(phi_q, phi_k, value, dropout_p).to(dtype)

    return unflatten_heads(chunked_over_heads(some_heads, *tensors), query.shape)


def recurrence_update(
    config: LinearConfig, state: LinearState | None, key: Tensor, value: Tensor, options: AttentionOptions
) -> LinearState:
    """Add tokens to the state; see `Recurrence`."""
    if uses_maps(config, options):
        return learned_update(config, state, key, value, options)
    phi = key_features(key, None if options.key_mask is None else options.key_mask[:, None])
    phi = phi.to(accumulation_dtype(key.dtype))
    products, norm = phi.transpose(2, 3) @ value.to(phi.dtype), phi.sum(2)
    return LinearState(products, norm) if state is None else LinearState(state.products + products, state.norm + norm)


def recurrence_query(config: LinearConfig, state: LinearState, query: Tensor, options: AttentionOptions) -> Tensor:
    """Attention to all tokens of a state, Eq. 20; see `Recurrence`."""
    if uses_maps(config, options):
        return learned_query(config, state, query, options)
    phi = query_features(query, options.scale).to(state.norm.dtype)
    total = phi @ state.norm.unsqueeze(-1)
    phi = dropout(phi, options.dropout_p) if options.dropout_p else phi
    return normalize(phi @ state.products, total)


def naive(config: LinearConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form: the dense matrix of phi(q_i) . phi(k_j)."""
    if uses_maps(config, options):
        return learned_naive(config, query, key, value, options)
    key_mask = None if options.key_mask is None else options.key_mask[:, None]
    weights = query_features(query.double(), options.scale) @ key_features(key.double(), key_mask).mT
    if options.is_causal:
        weights = weights.tril()
    return normalize(weights @ value.double(), weights.sum(-1, keepdim=True)).to(value.dtype)


register_method(
    LinearConfig,
    forward=forward,
    naive=naive,
    initial_parameters=initial_parameters,
    recurrence=Recurrence(recurrence_update, recurrence_query, forward),
)
