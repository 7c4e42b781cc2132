"""What KDEformer and HyperAttention have in common: an exact near field of blocks and a far field of sampled keys."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.kernel.densities import softmax_column_norms
from hf_efficient_attn.methods._shared.config import MethodConfig, option
from hf_efficient_attn.methods._shared.heads import flatten_heads, unflatten_heads
from hf_efficient_attn.methods._shared.registry import AttentionOptions
from hf_efficient_attn.ops import causal, near_far
from hf_efficient_attn.ops.blocks import inverse, take, valid_first
from hf_efficient_attn.ops.causal import IntervalPlan
from hf_efficient_attn.ops.exact import exact_attention, exact_decode
from hf_efficient_attn.ops.hashing import NearField
from hf_efficient_attn.ops.near_far import NearFieldOptions
from hf_efficient_attn.ops.sampling import FarField, SamplingOptions


@dataclass(frozen=True, kw_only=True)
class SampledKeysConfig(MethodConfig):
    """Hyperparameters of a near field of blocks and a far field of sampled keys.

    The output is exact for sequences of up to block_size + num_samples keys. In the causal form it is also exact at the
    first block_size + num_samples positions of every sequence. `hf_efficient_attn.ops.causal` describes that form.
    """

    causal = True
    rectangular = True
    decodes_exactly = True

    block_size: int = option(256, "Keys that each query attends to exactly: the near field.", minimum=1)
    num_samples: int = option(256, "Keys sampled from the rest: the far field. 0 omits the far field.", minimum=0)
    num_hashes: int = option(
        7, "Random hyperplanes of the hash. Its cells determine the order of the tokens.", minimum=1
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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_num_hashes(self.method, self.num_hashes)

    @property
    def exact_length(self) -> int:
        """The budget: the keys of both fields."""
        return self.block_size + self.num_samples

    def with_budget(self, columns: int) -> "SampledKeysConfig":
        """Spend a quarter of the budget on the near field and the rest on the far field.

        This was among the best of the splits that were tried on activations of pretrained models.
        """
        near = max(1, self.check_budget(columns) // 4)
        return dataclasses.replace(self, block_size=near, num_samples=columns - near)


def check_num_hashes(method: str, num_hashes: int) -> None:
    """Raise an error if a hash has too many bits for a 64-bit code."""
    if num_hashes > 62:
        raise UnsupportedAttentionError(
            f"{method}: num_hashes={num_hashes} must be at most 62, the bits of a hash code"
        )


def _sampling_options(config: SampledKeysConfig, query: Tensor, options: AttentionOptions) -> SamplingOptions:
    """How the keys are sampled for queries (B, H, Nq, D)."""
    return SamplingOptions(
        num_samples=config.num_samples,
        scores=softmax_column_norms if config.column_scores == "kde" else config.column_scores,
        num_probes=config.num_probes,
        independent=config.draw == "independent",
        scale=options.scale,
        seed=options.seed,
        batch=query.shape[0],
        groups=config.score_groups,
        shared=config.columns == "all",
    )


def _near_options(config: SampledKeysConfig) -> NearFieldOptions:
    """The near field of the bidirectional form: a window has a third more keys than queries.

    Small blocks gather more keys in all. On activations of BERT (512 tokens, budget 128) 16, 24 and 32 queries with 32
    near keys have errors of .144, .144 and .158. The blocks of "lsh" are the paper's, with as many queries as keys.
    """
    size = config.block_size
    block_q = None if config.near_field == "lsh" else max(1, 3 * size // 4)
    return NearFieldOptions(config.near_field, size, config.num_hashes, block_q)


def _plan_bidirectional(
    config: SampledKeysConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    sampling: SamplingOptions,
) -> tuple[NearField, FarField]:
    """The near and the far field of (BH, N, D) inputs."""
    near_options = _near_options(config)
    return near_far.make_plan(query, key, value, key_mask, near_options, sampling)


def _plan_causal(
    config: SampledKeysConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    size: int,
    sampling: SamplingOptions,
) -> list[IntervalPlan]:
    """The causal far field, and its blocks of hashed keys if the config asks for them, of (BH, N, D) inputs."""
    num_hashes = config.num_hashes if config.near_field == "lsh" else 0
    if not config.num_samples and not num_hashes:
        return []
    return causal.plan_intervals(query, key, value, size, sampling, num_hashes)


def move_valid_first(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Move the valid tokens of (BH, N, D) inputs to the front, so that blocks are counted from the first of them.

    Returns:
        The inputs, and the order (BH, N) in which their tokens are now; None if there is no mask.
    """
    if key_mask is None:
        return query, key, value, None
    order = valid_first(key_mask)
    return take(query, order), take(key, order), take(value, order), order


def restore_order(out: Tensor, order: Tensor | None, key_mask: Tensor | None) -> Tensor:
    """Undo `move_valid_first` for the output (BH, N, Dv). Outputs at masked tokens are 0."""
    if order is None or key_mask is None:
        return out
    return take(out, inverse(order)).masked_fill(~key_mask[:, :, None], 0.0)


def forward(config: SampledKeysConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Compute the fast form; see `register_method` for the arguments."""
    shape, budget = query.shape, config.exact_length
    sampling = _sampling_options(config, query, options)
    is_causal, scale, dropout_p = options.is_causal, options.scale, options.dropout_p
    query, key, value, key_mask = flatten_heads(query, key, value, options.key_mask)
    if key.shape[1] <= budget:
        out = exact_attention(query, key, value, key_mask, is_causal=is_causal, scale=scale, dropout_p=dropout_p)
    elif is_causal:
        query, key, value, order = move_valid_first(query, key, value, key_mask)
        size = max(1, config.block_size // 2)
        plans = _plan_causal(config, query, key, value, size, sampling)
        out = causal.causal_near_far_attention(
            query, key, value, plans, block_size=size, num_exact=budget, scale=scale, dropout_p=dropout_p
        )
        out = restore_order(out, order, key_mask)
    else:
        near, far = _plan_bidirectional(config, query, key, value, key_mask, sampling)
        out = near_far.near_far_attention(query, key, value, near, far, scale=scale, dropout_p=dropout_p)
    return unflatten_heads(out, shape)


def naive(config: SampledKeysConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Compute the readable form: the plan of `forward` as a dense matrix of log-weights that is added to the scores."""
    shape, budget = query.shape, config.exact_length
    sampling = _sampling_options(config, query, options)
    query, key, value, key_mask = flatten_heads(query, key, value, options.key_mask)
    (batch_heads, q_len, _), kv_len, device = query.shape, key.shape[1], query.device
    order = None
    if kv_len <= budget:
        log_weights = torch.zeros(batch_heads, q_len, kv_len, dtype=torch.float64, device=device)
        if options.is_causal:
            future = torch.ones(q_len, kv_len, dtype=torch.bool, device=device).triu(1)
            log_weights.masked_fill_(future, -torch.inf)
        if key_mask is not None:
            log_weights.masked_fill_(~key_mask[:, None], -torch.inf)
    elif options.is_causal:
        query, key, value, order = move_valid_first(query, key, value, key_mask)
        size = max(1, config.block_size // 2)
        plans = _plan_causal(config, query, key, value, size, sampling)
        log_weights = dense_causal_log_weights(plans, q_len, size, budget, batch_heads, device)
    else:
        near, far = _plan_bidirectional(config, query, key, value, key_mask, sampling)
        log_weights = dense_log_weights(near, far, q_len, kv_len)
    out = near_far.dense_attention(query, key, value, log_weights, scale=options.scale)
    return unflatten_heads(restore_order(out, order, key_mask), shape)


def dense_log_weights(near: NearField, far: FarField, q_len: int, kv_len: int) -> Tensor:
    """The readable form: what is added to the scores before the softmax, float64 (BH, Nq, Nk).

    It is 0 for a pair of the near field, -log(probability) for a sampled key outside of it, and -inf elsewhere.
    """
    device = near.start.device
    weights = torch.full((near.start.shape[0], q_len, kv_len), -torch.inf, dtype=torch.float64, device=device)
    for a in range(weights.shape[0]):
        keys = torch.arange(kv_len, device=device) if near.key_order is None else near.key_order[a]
        queries = torch.arange(q_len, device=device) if near.query_order is None else near.query_order[a]
        num_keys = near.num_keys if isinstance(near.num_keys, int) else int(near.num_keys[a])
        for t, start in enumerate(near.start[a].tolist()):
            block = queries[t * near.block_q : (t + 1) * near.block_q, None]
            sample = min(t, far.sorted_index.shape[1] - 1)
            for index, log_weight in zip(*(x[a, sample].tolist() for x in far[:2]), strict=True):
                # logaddexp, because independent sampling may select a key twice.
                old = weights[a, block, keys[index]]
                weights[a, block, keys[index]] = torch.logaddexp(old, torch.full_like(old, log_weight))
            weights[a, block, keys[start : min(start + near.block_k, num_keys)]] = 0.0
    return weights


def dense_causal_log_weights(
    plans: Sequence[IntervalPlan],
    length: int,
    block_size: int,
    num_exact: int,
    batch_heads: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The readable form: what is added to the scores before the softmax, float64 (BH, N, N) for N = `length`."""
    weights = torch.full((batch_heads, length, length), -torch.inf, dtype=torch.float64, device=device)
    for i in range(length):
        if i < num_exact:
            weights[:, i, : i + 1] = 0.0
            continue
        completed = i // block_size - 1
        weights[:, i, max(0, completed) * block_size : i + 1] = 0.0
        for plan in plans:
            if completed < 0 or not completed >> plan.level & 1:
                continue
            j, interval = (completed >> plan.level) // 2, block_size << plan.level
            first = 2 * j * interval
            for a in range(batch_heads):
                samples = zip(plan.sample_index[a, j].tolist(), plan.log_weight[a, j].tolist(), strict=True)
                for index, log_weight in samples:
                    old = weights[a, i, first + index]
                    weights[a, i, first + index] = torch.logaddexp(old, torch.full_like(old, log_weight))
                if plan.query_block is not None and plan.key_order is not None:
                    block = int(plan.query_block[a, j, i - block_size - (2 * j + 1) * interval])
                    near = plan.key_order[a, j, block * plan.block_k : (block + 1) * plan.block_k]
                    weights[a, i, first + near] = 0.0
    return weights


def decode(config: SampledKeysConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Decode a few tokens with exact attention to all cached keys, which costs as much as reading the cache."""
    return exact_decode(query, key, value, options.key_mask, scale=options.scale, dropout_p=options.dropout_p)
