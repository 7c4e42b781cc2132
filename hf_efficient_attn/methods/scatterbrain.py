"""ScatterBrain (Chen, Dao, Winsor, Song, Rudra, Re 2021): an exact near field, and random features for the rest.

Let phi be the positive random features of the Performer. The paper's estimate of the attention matrix (section 4) is
phi(q_i) . phi(k_j) for all pairs plus a sparse correction exp(q_i . k_j) - phi(q_i) . phi(k_j) on a near field S:

    out_i = [sum_{j in S_i} (exp(q_i . k_j) - phi(q_i) . phi(k_j)) v_j + phi(q_i) . sum_j phi(k_j) v_j^T] / [v_j = 1]

On S the features cancel. The output consists of exp(q_i . k_j) on S and of phi(q_i) . phi(k_j) outside of S, and it is
computed in this form: the far field is phi(q_i) . sum_{j not in S_i} phi(k_j) v_j^T, a sum over all other blocks
(`hf_efficient_attn.ops.features.with_window`). Nothing is subtracted, so rounding cannot make the far field negative,
as it does in the paper's form if one near key has most of the weight. Each query has the factor exp(-|q|^2/2) / F, so
that both fields have the same normalisation.

- `near_field="window"`: queries and keys are split into blocks of block_size by position, and a query attends to its
  own block. Three blocks of a third of this size have a slightly smaller error, but take two to three times as long.
- `near_field="lsh"`: queries and keys are sorted by an angular hash as in KDEformer (`hashing.plan_lsh`) and split
  into blocks of block_size. The hash of the middle query of a block determines its block of keys. The paper uses the
  buckets of several rounds of cross-polytope hashing. With equal blocks, the far field is all blocks on either side.
- Causal form: blocks of block_size / 2 by position, for both near fields. A query attends to its own block up to itself
  and to the previous block. A scan over the blocks provides the features of all earlier blocks.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.config import AttentionOptions, MethodConfig, option
from hf_efficient_attn.methods._shared.heads import by_heads, without_padding
from hf_efficient_attn.methods._shared.registry import register_method
from hf_efficient_attn.methods._shared.sampled_keys import MAX_HASHES
from hf_efficient_attn.ops.distance import Bias
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.exact import dense_softmax
from hf_efficient_attn.ops.features.maps import favor, log_weights_naive
from hf_efficient_attn.ops.index import ceil_div, inverse
from hf_efficient_attn.ops.scatterbrain import (
    BlockPlan,
    biased_block_attention,
    block_attention,
    block_bias,
    plan_blocks,
)


@dataclass(frozen=True, kw_only=True)
class ScatterbrainConfig(MethodConfig):
    """Hyperparameters of ScatterBrain. Up to block_size keys the output is exact."""

    method = "scatterbrain"
    title = "ScatterBrain"
    paper = "Chen, Dao, Winsor, Song, Rudra, Re, NeurIPS 2021"
    year = 2021
    causal = True
    rectangular = False
    budget = (("block_size", 1), ("num_features", 1))
    exact_budget = ("block_size",)
    knows_lse = True
    summary = "a window or hashed blocks exactly, and positive random features for the rest"
    paper_url = "https://arxiv.org/abs/2110.15343"
    near = "a block of positions or of a hash"
    far = "FAVOR+ random features"
    cost = 0.4

    block_size: int = option(128, "Keys that each query attends to exactly: the near field.", minimum=1)
    num_features: int = option(
        128, "Random features for the rest. They cost as much as this number of keys.", minimum=1, carried=True
    )
    num_hashes: int = option(7, "Random hyperplanes of the hash of near_field='lsh'.", minimum=1, maximum=MAX_HASHES)
    near_field: str = option(
        "window",
        "'window': the neighbours by position. 'lsh': blocks of an angular hash (the causal form uses the window).",
        choices=("window", "lsh"),
    )
    seed: int = option(0, "Seed of the features and of the hash.", minimum=0)

    @property
    def adds_distance_bias(self) -> bool:
        """True with blocks of positions: the keys of a block of a hash have no common distance."""
        return self.near_field == "window"


def _plan(
    config: ScatterbrainConfig, query: Tensor, key: Tensor, key_mask: Tensor | None, options: AttentionOptions
) -> tuple[BlockPlan, int]:
    """Plan the near field of (BH, N, D) tokens, and return it with the number of tokens of a block."""
    num_hashes = config.num_hashes if config.near_field == "lsh" and not options.is_causal else 0
    plan = plan_blocks(query, key, key_mask, config.block_size, num_hashes, Draws(options.seed, query.device))
    return plan, ceil_div(config.block_size, 2) if options.is_causal else config.block_size


def forward(config: ScatterbrainConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Fast form; see `register_method`."""
    is_causal = options.is_causal
    call: dict[str, Any] = {"scale": options.scale, "dropout_p": options.dropout_p}
    features = favor(config.num_features, options.scale, query.shape[3], Draws(options.seed, query.device))
    if options.distance_bias is not None:
        biased = functools.partial(biased_block_attention, features=features, size=config.block_size, **call)
        return without_padding(biased, query, key, value, options, config.exact_length)

    def form(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:
        plan, size = _plan(config, query, key, key_mask, options)
        # (BH, N, Dv)
        out = block_attention(
            query, key, value, plan, features, size, is_causal=is_causal, with_lse=options.with_lse, **call
        )
        return out if key_mask is None else out.masked_fill(~key_mask[:, :, None], 0.0)

    return by_heads(form, query, key, value, options, config.exact_length)  # (B, H, N, Dv)


def naive(config: ScatterbrainConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form: the dense scores of both fields, and a dense mask of the pairs that are near."""
    features = favor(config.num_features, options.scale, query.shape[3], Draws(options.seed, query.device))

    def biased(query: Tensor, key: Tensor, value: Tensor, bias: Bias) -> Tensor:
        block = torch.arange(key.shape[1], device=key.device) // config.block_size  # (N,)
        query = query.double()
        key = key.double()
        bias = bias._replace(table=bias.table.double())
        exact = query @ key.mT * options.scale + bias.of_pairs()  # (BH, N, N)
        far = log_weights_naive(query, key, features)  # (BH, N, N)
        far = far + block_bias(bias, config.block_size)[:, block][:, :, block]  # (BH, N, N)
        return dense_softmax(torch.where(block == block[:, None], exact, far), value)  # (BH, N, Dv)

    if options.distance_bias is not None:
        return without_padding(biased, query, key, value, options)

    def form(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:
        plan, size = _plan(config, query, key, key_mask, options)
        index = torch.arange(key.shape[1], device=key.device)[None]  # (1, N)
        orders = (plan.query_order, plan.key_order)
        # (1 or BH, N) each
        of_query, of_key = ((index if order is None else inverse(order)) // size for order in orders)
        of_query = of_query if plan.key_block is None else plan.key_block.gather(1, of_query)  # (BH, N)
        blocks_before = of_query[:, :, None] - of_key[:, None]  # (BH, N, N)
        near = blocks_before <= 1 if options.is_causal else blocks_before == 0  # (BH, N, N)
        query = query.double()
        key = key.double()
        scores = torch.where(near, query @ key.mT * options.scale, log_weights_naive(query, key, features))
        # (BH, N, Dv)
        return dense_softmax(scores, value, key_mask, options.is_causal, with_lse=options.with_lse)

    return by_heads(form, query, key, value, options)  # (B, H, N, Dv)


register_method(ScatterbrainConfig, forward=forward, naive=naive)
