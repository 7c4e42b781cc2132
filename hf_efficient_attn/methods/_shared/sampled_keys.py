"""What methods with an exact near field and sampled columns share: hyperparameters and the way to the plan."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.kernel import softmax_column_norms
from hf_efficient_attn.methods._shared.config import MethodConfig, option
from hf_efficient_attn.methods._shared.registry import AttentionOptions
from hf_efficient_attn.ops import causal, near_far
from hf_efficient_attn.ops.blocks import inverse, take, valid_first
from hf_efficient_attn.ops.exact import exact_attention, exact_decode


@dataclass(frozen=True, kw_only=True)
class NearFarConfig(MethodConfig):
    """Hyperparameters of a near field of blocks with sampled columns.

    Up to block_size + num_samples keys (and, when causal, at the first so many positions of any sequence) the output is
    exact. The causal form is that of `hf_efficient_attn.ops.causal`.
    """

    block_size: int = option(256, "Keys that each query attends to exactly: the near field.", minimum=1)
    num_samples: int = option(256, "Columns sampled from the rest: the far field. 0 leaves it out.", minimum=0)
    num_hashes: int = option(7, "Random hyperplanes of the hash, whose cells order the tokens.", minimum=1)
    near_field: str = option(
        "auto",
        "'lsh': blocks of an angular hash, as in the paper (when causal: the window and runs of hashed keys before). "
        "'window': the neighbours by position. 'auto': 'lsh', or 'window' when causal.",
        choices=("auto", "lsh", "window"),
    )
    draw: str = option(
        "systematic",
        "'systematic': columns without replacement, weights 1/pi. 'independent': with replacement, weights 1/(m p).",
        choices=("systematic", "independent"),
    )
    columns: str = option(
        "tile",
        "Who shares a sample. 'tile': each tile of neighbouring queries draws its own. 'all': one draw for all queries "
        "of a head. The causal form has a draw for each segment of keys.",
        choices=("tile", "all"),
    )
    seed: int = option(0, "Seed of the hash and of the sampling.", minimum=0)

    column_scores = "uniform"
    num_probes = 1
    score_groups = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_hashes > 62:
            raise UnsupportedAttentionError(
                f"{self.method}: num_hashes={self.num_hashes} is more than the 62 of a code"
            )

    def with_budget(self, columns: int) -> "NearFarConfig":
        """A quarter of the columns near, the rest far: of the splits tried on real activations, among the best."""
        near = max(1, self.check_budget(columns) // 4)
        return dataclasses.replace(self, block_size=near, num_samples=columns - near)


def _plan_options(config: NearFarConfig, query: Tensor, scale: float, seed) -> dict:
    return {
        "num_samples": config.num_samples,
        "scores": softmax_column_norms if config.column_scores == "kde" else config.column_scores,
        "num_probes": config.num_probes,
        "independent": config.draw == "independent",
        "scale": scale,
        "seed": seed,
        "batch": query.shape[0],
    }


def _make_plan(config: NearFarConfig, query, key, value, mask, options: dict) -> tuple[near_far.Near, near_far.Far]:
    """The bidirectional near and far field."""
    return near_far.make_plan(
        query,
        key,
        value,
        mask,
        near_field="lsh" if config.near_field == "auto" else config.near_field,
        block_size=config.block_size,
        num_hashes=config.num_hashes,
        groups=config.score_groups,
        shared=config.columns == "all",
        **options,
    )


def _plan_segments(config: NearFarConfig, query, key, value, size: int, options: dict) -> list[causal.Segments]:
    """The causal far field, and its runs of hashed keys where they are asked for."""
    num_hashes = config.num_hashes if config.near_field == "lsh" else 0
    if not config.num_samples and not num_hashes:
        return []
    return causal.plan_intervals(query, key, value, size=size, num_hashes=num_hashes, **options)


def _flat(query, key, value, mask):
    """(B, H, N, D) inputs and a (B, N) mask as (B*H, N, D) and (B*H, N)."""
    query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    return query, key, value, None if mask is None else mask.repeat_interleave(query.shape[0] // mask.shape[0], 0)


def _compact(query, key, value, mask):
    """Tokens that are there first, so that blocks are counted from the first of them; None where nothing moved."""
    if mask is None:
        return query, key, value, None
    order = valid_first(mask)
    return *(take(x, order) for x in (query, key, value)), order


def _restore(out: Tensor, order: Tensor | None, mask: Tensor | None) -> Tensor:
    """Undo `_compact`; outputs at tokens that are not there are 0."""
    if order is None:
        return out
    return take(out, inverse(order)).masked_fill(~mask[:, :, None], 0.0)


def forward(config: NearFarConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Fast form; arguments as in `hf_efficient_attn.methods._shared.registry.register_method`."""
    mask, is_causal, scale, dropout_p, seed = (
        options.key_mask,
        options.is_causal,
        options.scale,
        options.dropout_p,
        options.seed,
    )
    shape, budget = query.shape[:2], config.block_size + config.num_samples
    options = _plan_options(config, query, scale, seed)
    query, key, value, mask = _flat(query, key, value, mask)
    if key.shape[1] <= budget:
        out = exact_attention(query, key, value, mask, is_causal=is_causal, scale=scale, dropout_p=dropout_p)
    elif is_causal:
        query, key, value, order = _compact(query, key, value, mask)
        size = max(1, config.block_size // 2)
        plans = _plan_segments(config, query, key, value, size, options)
        out = causal.causal_near_far_attention(
            query, key, value, plans, size=size, exact=budget, scale=scale, dropout_p=dropout_p
        )
        out = _restore(out, order, mask)
    else:
        near, far = _make_plan(config, query, key, value, mask, options)
        out = near_far.near_far_attention(query, key, value, near, far, scale=scale, dropout_p=dropout_p)
    return out.unflatten(0, shape)


def naive(config: NearFarConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form: the same plan as a dense matrix of log-weights beside the dense scores."""
    mask, is_causal, scale, seed = options.key_mask, options.is_causal, options.scale, options.seed
    shape, budget = query.shape[:2], config.block_size + config.num_samples
    options = _plan_options(config, query, scale, seed)
    query, key, value, mask = _flat(query, key, value, mask)
    heads, length, columns = query.shape[0], query.shape[1], key.shape[1]
    order = None
    if columns <= budget:
        log_weights = torch.zeros(heads, length, columns, dtype=torch.float64)
        if is_causal:
            log_weights.masked_fill_(torch.ones(length, columns, dtype=torch.bool).triu(1), -torch.inf)
        if mask is not None:
            log_weights.masked_fill_(~mask[:, None].cpu(), -torch.inf)
    elif is_causal:
        query, key, value, order = _compact(query, key, value, mask)
        size = max(1, config.block_size // 2)
        plans = _plan_segments(config, query, key, value, size, options)
        log_weights = causal.dense_causal_log_weights(plans, length, size, budget, heads)
    else:
        plan = _make_plan(config, query, key, value, mask, options)
        log_weights = near_far.dense_log_weights(*plan, length, columns)
    out = near_far.dense_attention(query, key, value, log_weights, scale=scale)
    return _restore(out, order, mask).unflatten(0, shape)


def decode(config: NearFarConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """A few last queries attend to all cached keys exactly: a step then costs what reading the cache costs."""
    mask, scale, dropout_p = options.key_mask, options.scale, options.dropout_p
    return exact_decode(query, key, value, mask, scale=scale, dropout_p=dropout_p)
