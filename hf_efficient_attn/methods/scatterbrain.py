"""ScatterBrain (Chen, Dao, Winsor, Song, Rudra, Re 2021): an exact near field, and random features for the rest.

The paper's estimate of the attention matrix (section 4) is phi(q_i) . phi(k_j) for all pairs plus a sparse correction
exp(q_i . k_j) - phi(q_i) . phi(k_j) on a near support S, phi being the positive random features of the Performer:

    out_i = [sum_{j in S_i} (exp(q_i . k_j) - phi(q_i) . phi(k_j)) v_j + phi(q_i) . sum_j phi(k_j) v_j^T] / [as with 1]

On S the features cancel, so that out_i is made of exp(q_i . k_j) on S and of phi(q_i) . phi(k_j) off S. Here it is
computed as just that: the far sum is phi(q_i) . sum_{j not in S_i} phi(k_j) v_j^T, where the sums over the keys off S
are merged from the blocks before and behind the near field. Nothing is subtracted, so that no far mass can come out
negative by rounding, as the total less the near part does wherever one near key holds most of the mass. All sums are
kept in the log domain (`ops.features`), and the factor of a query, exp(-|q|^2/2) / F, is in its place.

- `near_field="window"`: queries and keys are cut into blocks of block_size by position, and a query sees its own block.
  Three blocks of a third of it, centred on the query's own, have an error smaller by 0 to 4 % on activations of BERT
  (MiniLM), and take two to three times as long, since there are three times as many states.
- `near_field="lsh"`: queries and keys are ordered by an angular hash, as in KDEformer (`near_far.plan_lsh`), and cut
  into blocks of block_size. A block of queries sees the block of keys in which the hash of its middle query stands.
  The paper takes the buckets of several rounds of cross-polytope hashing; equal blocks have a complement that is a run
  of blocks on either side.
- Causal: blocks of block_size / 2 by position, for both choices. A query sees its own block up to itself and the block
  before; the features of the completed blocks before those come from a scan over the blocks.
"""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.methods._shared.config import MethodConfig, option
from hf_efficient_attn.methods._shared.registry import AttentionOptions, register_method
from hf_efficient_attn.ops.blocks import ceil_div, chunked_over_heads, inverse, pad_to_blocks, take, valid_first
from hf_efficient_attn.ops.causal import causal_block_partial
from hf_efficient_attn.ops.exact import exact_attention, mask_bias
from hf_efficient_attn.ops.features import (
    key_state,
    query_factor,
    query_state,
    softmax_features,
    split_scale,
    states_before,
    states_elsewhere,
)
from hf_efficient_attn.ops.near_far import plan_lsh
from hf_efficient_attn.ops.partial import Partial, merge, partial_attention


@dataclass(frozen=True, kw_only=True)
class ScatterbrainConfig(MethodConfig):
    """Hyperparameters of ScatterBrain. Up to block_size keys the output is exact."""

    method = "scatterbrain"
    title = "ScatterBrain"
    paper = "Chen, Dao, Winsor, Song, Rudra, Re, NeurIPS 2021"
    year = 2021
    causal = True
    rectangular = False
    summary = "a window or hashed blocks exactly, and positive random features for the rest"

    block_size: int = option(128, "Keys that each query attends to exactly: the near field.", minimum=1)
    num_features: int = option(
        128, "Random features for the rest; they cost what as many columns do.", minimum=1, carried=True
    )
    num_hashes: int = option(7, "Random hyperplanes of the hash of near_field='lsh'.", minimum=1)
    near_field: str = option(
        "window",
        "'window': the neighbours by position. 'lsh': blocks of an angular hash (when causal: the window as well).",
        choices=("window", "lsh"),
    )
    seed: int = option(0, "Seed of the features and of the hash.", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_hashes > 62:
            raise UnsupportedAttentionError(
                f"{self.method}: num_hashes={self.num_hashes} is more than the 62 of a code"
            )

    def with_budget(self, columns: int) -> "ScatterbrainConfig":
        """Half the columns near, the rest features."""
        near = self.check_budget(columns, 2) // 2
        return dataclasses.replace(self, block_size=near, num_features=columns - near)


class _Blocks(NamedTuple):
    """Queries and keys in orders of their own, cut into blocks: block t of queries is near block[:, t] of keys.

    query_order, key_order: (A, N), or None for the order of the positions. block: (A, T), or None for t itself.
    there: (A, 1) or an integer, the keys that are there: they stand first in their order.
    """

    query_order: Tensor | None
    key_order: Tensor | None
    block: Tensor | None
    there: Tensor | int


def _plan(config: ScatterbrainConfig, query: Tensor, key: Tensor, mask: Tensor | None, seed) -> _Blocks:
    """The near field of (A, N, D) queries and keys. No gradient."""
    if config.near_field == "window":
        order = None if mask is None else valid_first(mask)
        return _Blocks(order, order, None, key.shape[1] if mask is None else mask.sum(1, keepdim=True))
    with torch.no_grad():
        size = config.block_size
        near = plan_lsh(query, key, size, mask, config.num_hashes, seed)
        # Of the blocks, the one that shares most with the run of keys around the place of the middle query.
        block, last = (near.start + size // 2) // size, (near.count - 1) // size
        block = block.clamp(max=last) if isinstance(last, int) else torch.minimum(block, last.clamp(min=0))
        return _Blocks(near.query_order, near.key_order, block, near.count)


def forward(config: ScatterbrainConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Fast form; arguments as in `hf_efficient_attn.methods._shared.registry.register_method`."""
    mask, is_causal, scale, dropout_p, seed = (
        options.key_mask,
        options.is_causal,
        options.scale,
        options.dropout_p,
        options.seed,
    )
    shape, options = query.shape[:2], {"scale": scale, "dropout_p": dropout_p}
    flat_mask = None if mask is None else mask.repeat_interleave(shape[1], 0)
    query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    features = softmax_features(config.num_features, query.shape[-1], seed, query.device)
    if key.shape[1] <= config.block_size:
        out = exact_attention(query, key, value, flat_mask, is_causal=is_causal, **options)
    elif is_causal:
        order = None if flat_mask is None else valid_first(flat_mask)
        if order is not None:
            query, key, value = (take(x, order) for x in (query, key, value))
        out = _causal(query, key, value, features, ceil_div(config.block_size, 2), options)
        out = out if order is None else take(out, inverse(order)).masked_fill(~flat_mask[:, :, None], 0.0)
    else:
        plan = _plan(config, query, key, flat_mask, seed)
        out = _bidirectional(query, key, value, plan, config.block_size, features, options)
        out = out if flat_mask is None else out.masked_fill(~flat_mask[:, :, None], 0.0)
    return out.unflatten(0, shape)


def _states(key: Tensor, value: Tensor, bias: Tensor | None, features: Tensor, scale: float) -> Partial:
    """Sums over the blocks of keys (A, T, S, D) for each feature: Partial (A, T, F, .). bias: (A or 1, T, 1, S)."""
    _, key, factor = split_scale(key, key, scale)
    factor = factor.unsqueeze(2)
    return key_state(key, value.to(key.dtype), features, factor if bias is None else factor + bias)


def _read(rows: Tensor, state: Partial, features: Tensor, options) -> Partial:
    """Tiles of queries (A, T, R, D) to their states, with the factor of each query."""
    rows, _, _ = split_scale(rows, rows, options["scale"])
    part = query_state(rows, state, features, options["dropout_p"])
    return Partial(part.out, part.lse + query_factor(rows, features.shape[0]))


def _bidirectional(query, key, value, plan: _Blocks, size: int, features, options) -> Tensor:
    """(A, N, D), (A, N, D), (A, N, Dv) -> (A, N, Dv)."""
    length = query.shape[1]
    if plan.key_order is not None:
        key, value = take(key, plan.key_order), take(value, plan.key_order)
    key, value = pad_to_blocks(key, size), pad_to_blocks(value, size)
    bias = None
    if not isinstance(plan.there, int) or length % size:
        place = torch.arange(key.shape[1] * size, device=key.device)[None]
        bias = mask_bias(place < plan.there, key.dtype).unflatten(1, (key.shape[1], 1, size))
    far = states_elsewhere(_states(key, value, bias, features, options["scale"]))
    if plan.block is not None:
        key, value, *far = (take(x.flatten(2), plan.block).unflatten(2, x.shape[2:]) for x in (key, value, *far))
        bias = None if bias is None else take(bias[:, :, 0].expand(key.shape[0], -1, -1), plan.block)[:, :, None]
    bias = None if bias is None else bias.expand(key.shape[0], -1, -1, -1)
    place = None if plan.query_order is None else inverse(plan.query_order)

    def some_heads(query, key, value, bias, order, place, outs, lses):
        rows = pad_to_blocks(query if order is None else take(query, order), size)
        near = partial_attention(rows, key, value, bias, **options)
        out = merge(near, _read(rows, Partial(outs, lses), features, options)).out.flatten(1, 2)
        return out[:, :length] if place is None else take(out, place)

    return chunked_over_heads(some_heads, query, key, value, bias, plan.query_order, place, *far)


def _causal(query, key, value, features, size: int, options) -> Tensor:
    """Tokens that are all there up to the last one: (A, N, D), (A, N, D), (A, N, Dv) -> (A, N, Dv)."""
    length = query.shape[1]
    head = exact_attention(query[:, :size], key[:, :size], value[:, :size], is_causal=True, **options)
    # Block t sees block t-1 itself, and the features of 0 .. t-2.
    done = (ceil_div(length, size) - 1) * size
    blocks = (pad_to_blocks(x[:, :done], size) for x in (key, value))
    before = states_before(_states(*blocks, None, features, options["scale"]))

    def some_heads(query, key, value, outs, lses):
        near = causal_block_partial(query, key, value, size, **options)
        far = _read(pad_to_blocks(query[:, size:], size), Partial(outs, lses), features, options)
        return merge(near, Partial(*(x.flatten(1, 2)[:, : length - size] for x in far))).out

    return torch.cat((head, chunked_over_heads(some_heads, query, key, value, *before)), 1)


def naive(config: ScatterbrainConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form: dense scores of both kinds, and which pairs are near."""
    mask, is_causal, scale, seed = options.key_mask, options.is_causal, options.scale, options.seed
    shape, length = query.shape[:2], query.shape[2]
    features = softmax_features(config.num_features, query.shape[-1], seed, query.device)
    flat_mask = None if mask is None else mask.repeat_interleave(shape[1], 0)
    query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    there = torch.ones(key.shape[:2], dtype=torch.bool, device=key.device) if flat_mask is None else flat_mask
    if length <= config.block_size:
        near = torch.ones(1, length, length, dtype=torch.bool, device=key.device)
    elif is_causal:
        block = (there.cumsum(1) - 1) // ceil_div(config.block_size, 2)
        near = block[:, :, None] - block[:, None] <= 1
    else:
        plan = _plan(config, query, key, flat_mask, seed)
        position = torch.arange(length, device=key.device)[None]
        tile, block = (
            (position if x is None else inverse(x)) // config.block_size for x in (plan.query_order, plan.key_order)
        )
        tile = tile if plan.block is None else plan.block.gather(1, tile)
        near = tile[:, :, None] == block[:, None]
    q, k, key_factor = split_scale(query.double(), key.double(), scale)
    pairs = [x @ features.t() for x in (q, k)]
    tops = [x.amax(-1, keepdim=True) for x in pairs]
    products = torch.exp(pairs[0] - tops[0]) @ torch.exp(pairs[1] - tops[1]).transpose(1, 2)
    far = products.log() + tops[0] + tops[1].transpose(1, 2)
    far = far + query_factor(q, config.num_features).unsqueeze(2) + key_factor.unsqueeze(1)
    seen = there[:, None].expand(-1, length, -1)
    seen = seen.tril() if is_causal else seen
    scores = torch.where(near, q @ k.transpose(1, 2), far).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ value.double()).to(value.dtype).unflatten(0, shape)


register_method(ScatterbrainConfig, forward=forward, naive=naive)
