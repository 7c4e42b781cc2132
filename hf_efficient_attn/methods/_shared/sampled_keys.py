"""The near field of blocks and the far field of sampled keys that KDEformer and HyperAttention share."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.kernel.densities import softmax_column_norms
from hf_efficient_attn.methods._shared.config import AttentionOptions, MethodConfig, option
from hf_efficient_attn.methods._shared.heads import by_heads, decode_exactly
from hf_efficient_attn.methods._shared.registry import register_method
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.exact import bias_of, dense_softmax
from hf_efficient_attn.ops.sampled_keys import bidirectional, causal
from hf_efficient_attn.ops.sampled_keys.bidirectional import dense_log_weights
from hf_efficient_attn.ops.sampled_keys.causal import dense_causal_log_weights
from hf_efficient_attn.ops.sampled_keys.sampling import SamplingOptions

# Bits of a hash code.
MAX_HASHES = 62


@dataclass(frozen=True, kw_only=True)
class SampledKeysConfig(MethodConfig):
    """Hyperparameters of a near field of blocks and a far field of sampled keys.

    The output is exact for sequences of up to block_size + num_samples keys. In the causal form it is also exact at the
    first block_size + num_samples positions of every sequence. `hf_efficient_attn.ops.sampled_keys.causal` describes
    that form.
    """

    causal = True
    rectangular = True
    # This split was among the best on activations of pretrained models.
    budget = (("block_size", 1), ("num_samples", 3))
    exact_budget = ("block_size", "num_samples")
    decodes_exactly = True
    knows_lse = True
    adds_distance_bias = True

    block_size: int = option(256, "Keys that each query attends to exactly: the near field.", minimum=1)
    num_samples: int = option(256, "Keys sampled from the rest: the far field. 0 omits the far field.", minimum=0)
    num_hashes: int = option(
        7, "Random hyperplanes of the hash. Its cells determine the order of the tokens.", minimum=1, maximum=MAX_HASHES
    )
    near_field: str = option(
        "auto",
        "'lsh': blocks of an angular hash, as in the paper (causal: the window and blocks of earlier hashed keys). "
        "'window': the neighbours by position. 'auto': for each head whichever leaves less to the far field in the "
        "exact rows of 32 queries; 'window' in the causal form.",
        choices=("auto", "lsh", "window"),
    )
    draw: str = option(
        "systematic",
        "'systematic': sampling without replacement, weights 1/pi. 'independent': with replacement, weights 1/(m p).",
        choices=("systematic", "independent"),
    )
    columns: str = option(
        "tile",
        "Which queries share a sample. 'tile': each block of neighbouring queries draws its own. 'all': one draw for "
        "all queries of a head. The causal form has one draw for each segment of keys.",
        choices=("tile", "all"),
    )
    seed: int = option(0, "Seed of the hash and of the sampling.", minimum=0)

    # Hyperparameters of KDEformer that are constant for the other methods.
    column_scores = "uniform"
    num_probes = 1
    score_groups = 1

    @property
    def relative_cost(self) -> float:
        """A window takes no time to hash and sort tokens."""
        return super().relative_cost * (0.8 if self.near_field == "window" else 1.0)


def _sampling_options(config: SampledKeysConfig, query: Tensor, options: AttentionOptions) -> SamplingOptions:
    """Make the options of both fields for queries (B, H, Nq, D). A window has a third more keys than queries.

    Small blocks gather more keys in all. On activations of BERT (512 tokens, budget 128) 16, 24 and 32 queries with 32
    near keys have errors of .144, .144 and .158. The blocks of "lsh" are the paper's, with as many queries as keys.
    """
    return SamplingOptions(
        near_field=config.near_field,
        block_size=config.block_size,
        num_hashes=config.num_hashes,
        block_q=None if config.near_field == "lsh" else max(1, 3 * config.block_size // 4),
        num_samples=config.num_samples,
        scores=softmax_column_norms if config.column_scores == "kde" else config.column_scores,
        num_probes=config.num_probes,
        independent=config.draw == "independent",
        scale=options.scale,
        draws=Draws(options.seed, query.device),
        batch=query.shape[0],
        groups=config.score_groups,
        shared=config.columns == "all",
        dropout_p=options.dropout_p,
        table=None if options.distance_bias is None else options.distance_bias.repeat(query.shape[0], 1),
        with_lse=options.with_lse,
    )


def forward(config: SampledKeysConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Fast form; see `register_method`."""
    sampling = _sampling_options(config, query, options)

    def form(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> Tensor:  # (BH, N, .)
        if not options.is_causal:
            near, far = bidirectional.make_plan(query, key, value, key_mask, sampling)
            return bidirectional.near_far_attention(query, key, value, near, far, sampling)  # (BH, Nq, Dv)
        plans = causal.plan_intervals(query, key, value, sampling)
        return causal.causal_near_far_attention(query, key, value, plans, sampling)  # (BH, N, Dv)

    return by_heads(form, query, key, value, options, config.exact_length, moves_valid_first=options.is_causal)


def naive(config: SampledKeysConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form: the plan of `forward` as a dense matrix of log-weights that is added to the scores."""
    sampling = _sampling_options(config, query, options)
    q_len = query.shape[2]
    kv_len = key.shape[2]
    dense = functools.partial(dense_softmax, with_lse=options.with_lse)

    def form(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> Tensor:  # (BH, N, .)
        table = sampling.table
        position = torch.arange(max(q_len, kv_len), device=query.device)
        bias = 0.0 if table is None else bias_of(table.double(), position[:kv_len] - position[:q_len, None])
        scores = query.double() @ key.double().mT * options.scale  # (BH, Nq, Nk)
        if kv_len <= config.exact_length:
            return dense(scores + bias, value, key_mask, options.is_causal)
        if options.is_causal:
            plans = causal.plan_intervals(query, key, value, sampling)
            weights = dense_causal_log_weights(plans, q_len, sampling.causal_block, config.exact_length, query)
        else:
            plan = bidirectional.make_plan(query, key, value, key_mask, sampling)
            weights = dense_log_weights(*plan, q_len, kv_len) + bias  # (BH, Nq, Nk)
        return dense(scores + weights, value)  # (BH, Nq, Dv)

    moves = options.is_causal and kv_len > config.exact_length
    return by_heads(form, query, key, value, options, moves_valid_first=moves)  # (B, H, Nq, Dv)


def register_sampled_keys(config_class: type[SampledKeysConfig]) -> None:
    """Register the method with these hyperparameters."""
    register_method(config_class, forward=forward, naive=naive, decode=decode_exactly)
