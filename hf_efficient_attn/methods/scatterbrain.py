"""ScatterBrain (Chen, Dao, Winsor, Song, Rudra, Re 2021): an exact near field, and random features for the rest.

Let phi be the positive random features of the Performer. The paper's estimate of the attention matrix (section 4) is
phi(q_i) . phi(k_j) for all pairs plus a sparse correction exp(q_i . k_j) - phi(q_i) . phi(k_j) on a near field S:

    out_i = [sum_{j in S_i} (exp(q_i . k_j) - phi(q_i) . phi(k_j)) v_j + phi(q_i) . sum_j phi(k_j) v_j^T] / [v_j = 1]

On S the features cancel. The output consists of exp(q_i . k_j) on S and of phi(q_i) . phi(k_j) outside of S, and it is
computed in this form: the far field is phi(q_i) . sum_{j not in S_i} phi(k_j) v_j^T, whose sums over the keys outside
of S are merged from the blocks before and after the near field. Nothing is subtracted, so rounding cannot make the far
field negative, as it does in the paper's form if one near key has most of the weight. All sums are kept in the log
domain (`hf_efficient_attn.ops.features`; on accelerators `hf_efficient_attn.ops.near_and_features`). Each query has the
factor exp(-|q|^2/2) / F, so that both fields have the same normalisation.

- `near_field="window"`: queries and keys are split into blocks of block_size by position, and a query attends to its
  own block. Three blocks of a third of this size, centred on the query's own, have an error that is 0 to 4 % smaller on
  activations of BERT (MiniLM), but they take two to three times as long, because there are three times as many states.
- `near_field="lsh"`: queries and keys are sorted by an angular hash as in KDEformer (`near_field.plan_lsh`) and split
  into blocks of block_size. The hash of the middle query of a block determines its block of keys. The paper uses the
  buckets of several rounds of cross-polytope hashing. The complement of equal blocks is a contiguous set of blocks on
  each side.
- Causal form: blocks of block_size / 2 by position, for both near fields. A query attends to its own block up to itself
  and to the previous block. A scan over the blocks provides the features of all blocks before those.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.config import MethodConfig, option
from hf_efficient_attn.methods._shared.heads import flatten_heads, unflatten_heads
from hf_efficient_attn.methods._shared.registry import AttentionOptions, register_method
from hf_efficient_attn.methods._shared.sampled_keys import check_num_hashes
from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.blocks import ceil_div, chunked_over_heads, inverse, pad_to_blocks, take, valid_first
from hf_efficient_attn.ops.causal_kernels import causal_block_partial
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
from hf_efficient_attn.ops.near_and_features import Features, block_attention, causal_block_attention
from hf_efficient_attn.ops.near_field import plan_lsh
from hf_efficient_attn.ops.partial import Partial, merge, partial_attention
from hf_efficient_attn.ops.random import Seed


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
    paper_url = "https://arxiv.org/abs/2110.15343"
    near = "a block of positions or of a hash"
    far = "FAVOR+ random features"

    block_size: int = option(128, "Keys that each query attends to exactly: the near field.", minimum=1)
    num_features: int = option(
        128, "Random features for the rest. They cost as much as this number of keys.", minimum=1, carried=True
    )
    num_hashes: int = option(7, "Random hyperplanes of the hash of near_field='lsh'.", minimum=1)
    near_field: str = option(
        "window",
        "'window': the neighbours by position. 'lsh': blocks of an angular hash (the causal form uses the window).",
        choices=("window", "lsh"),
    )
    seed: int = option(0, "Seed of the features and of the hash.", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_num_hashes(self.method, self.num_hashes)

    @property
    def exact_length(self) -> int:
        """The keys of the near field."""
        return self.block_size

    def with_budget(self, columns: int) -> "ScatterbrainConfig":
        """Spend half of the budget on the near field and the rest on features."""
        near = self.check_budget(columns, 2) // 2
        return replace(self, block_size=near, num_features=columns - near)


class _Blocks(NamedTuple):
    """Sorted queries and keys, split into blocks. The near field of query block t is the key block `key_block[:, t]`.

    Attributes:
        query_order: (BH, N), the order of the queries; None for the order of their positions.
        key_order: (BH, N), the same for the keys.
        key_block: (BH, T), or None if the near field of query block t is key block t.
        num_valid: (BH, 1) or an integer, the number of valid keys. They come first in their order.
    """

    query_order: Tensor | None
    key_order: Tensor | None
    key_block: Tensor | None
    num_valid: Tensor | int


class _Far(NamedTuple):
    """What the far field needs beside queries and states: the features (F, D), the scale, and the dropout."""

    features: Tensor
    scale: float
    dropout_p: float

    def key_states(self, key: Tensor, value: Tensor, bias: Tensor | None) -> Partial:
        """Attention of the features to each block of keys: Partial (BH, T, F, .).

        Args:
            key: (BH, T, S, D), T blocks of S keys.
            value: (BH, T, S, Dv).
            bias: (BH or 1, T, 1, S), added to the scores, or None.
        """
        _, key, factor = split_scale(key, key, self.scale)
        factor = factor.unsqueeze(2)
        return key_state(key, value.to(key.dtype), self.features, factor if bias is None else factor + bias)

    def query_states(self, query: Tensor, states: Partial) -> Partial:
        """Attention of query blocks (BH, T, S, D) to their states, including the factor of each query."""
        query, _, _ = split_scale(query, query, self.scale)
        part = query_state(query, states, self.features, self.dropout_p)
        return Partial(part.out, part.lse + query_factor(query, self.features.shape[0]))


def _plan(config: ScatterbrainConfig, query: Tensor, key: Tensor, key_mask: Tensor | None, seed: Seed) -> _Blocks:
    """Choose the near field of (BH, N, D) queries and keys, without gradient."""
    if config.near_field == "window":
        order = None if key_mask is None else valid_first(key_mask)
        return _Blocks(order, order, None, key.shape[1] if key_mask is None else key_mask.sum(1, keepdim=True))
    with torch.no_grad():
        size = config.block_size
        near = plan_lsh(query, key, size, key_mask, config.num_hashes, seed)
        # `plan_lsh` gives `size` keys from any start. Take the block that has most of them.
        block, last = (near.start + size // 2) // size, (near.num_keys - 1) // size
        block = block.clamp(max=last) if isinstance(last, int) else torch.minimum(block, last.clamp(min=0))
        return _Blocks(near.query_order, near.key_order, block, near.num_keys)


def forward(config: ScatterbrainConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Compute the fast form; see `register_method` for the arguments."""
    shape, scale, dropout_p = query.shape, options.scale, options.dropout_p
    query, key, value, key_mask = flatten_heads(query, key, value, options.key_mask)
    few_launches = backend(query) != "cpu" and scale != 0.0
    if few_launches:
        far: _Far | Features = Features(config.num_features, options.seed, scale, dropout_p)
    else:
        features = softmax_features(config.num_features, query.shape[-1], options.seed, query.device)
        far = _Far(features, scale, dropout_p)
    if key.shape[1] <= config.exact_length:
        out = exact_attention(
            query, key, value, key_mask, is_causal=options.is_causal, scale=scale, dropout_p=dropout_p
        )
    elif options.is_causal:
        order = None if key_mask is None else valid_first(key_mask)
        if order is not None:
            query, key, value = (take(x, order) for x in (query, key, value))
        out = _causal(query, key, value, ceil_div(config.block_size, 2), far)
        out = out if order is None else take(out, inverse(order))
    else:
        plan = _plan(config, query, key, key_mask, options.seed)
        out = _bidirectional(query, key, value, plan, config.block_size, far)
    if key_mask is not None and key.shape[1] > config.block_size:
        out = out.masked_fill(~key_mask[:, :, None], 0.0)
    return unflatten_heads(out, shape)


def _bidirectional(query: Tensor, key: Tensor, value: Tensor, plan: _Blocks, size: int, far: _Far | Features) -> Tensor:
    """The bidirectional form of (BH, N, D) inputs with blocks of `size` tokens: (BH, N, Dv)."""
    length = query.shape[1]
    if plan.key_order is not None:
        key, value = take(key, plan.key_order), take(value, plan.key_order)
    key, value = pad_to_blocks(key, size), pad_to_blocks(value, size)
    query_rank, valid, bias = None if plan.query_order is None else inverse(plan.query_order), None, None
    if not isinstance(plan.num_valid, int) or length % size:
        sorted_index = torch.arange(key.shape[1] * size, device=key.device)[None]
        valid = (sorted_index < plan.num_valid).unflatten(1, (key.shape[1], size))
    if isinstance(far, Features):
        blocks = pad_to_blocks(query if plan.query_order is None else take(query, plan.query_order), size)
        out = block_attention(blocks, key, value, None if valid is None else ~valid, plan.key_block, far)
        return out[:, :length] if query_rank is None else take(out, query_rank)
    if valid is not None:
        bias = mask_bias(valid, key.dtype).unsqueeze(2)
    states = states_elsewhere(far.key_states(key, value, bias))
    if plan.key_block is not None:
        block = plan.key_block
        key, value, out, lse = (take(x.flatten(2), block).unflatten(2, x.shape[2:]) for x in (key, value, *states))
        states = Partial(out, lse)
        bias = None if bias is None else take(bias[:, :, 0].expand(key.shape[0], -1, -1), block)[:, :, None]
    bias = None if bias is None else bias.expand(key.shape[0], -1, -1, -1)

    def some_heads(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        order: Tensor | None,
        rank: Tensor | None,
        *states: Tensor,
    ) -> Tensor:
        blocks = pad_to_blocks(query if order is None else take(query, order), size)
        near = partial_attention(blocks, key, value, bias, scale=far.scale, dropout_p=far.dropout_p)
        out = merge(near, far.query_states(blocks, Partial(*states))).out.flatten(1, 2)
        return out[:, :length] if rank is None else take(out, rank)

    return chunked_over_heads(some_heads, query, key, value, bias, plan.query_order, query_rank, *states)


def _causal(query: Tensor, key: Tensor, value: Tensor, size: int, far: _Far | Features) -> Tensor:
    """The causal form of (BH, N, D) inputs with blocks of `size` tokens: (BH, N, Dv). Valid tokens come first."""
    if isinstance(far, Features):
        return causal_block_attention(query, key, value, size, far)
    length, scale, dropout_p = query.shape[1], far.scale, far.dropout_p
    first_out = exact_attention(
        query[:, :size], key[:, :size], value[:, :size], is_causal=True, scale=scale, dropout_p=dropout_p
    )
    # Block t attends to block t-1 exactly, and to the features of blocks 0 to t-2.
    completed = (ceil_div(length, size) - 1) * size
    key_blocks, value_blocks = (pad_to_blocks(x[:, :completed], size) for x in (key, value))
    states = states_before(far.key_states(key_blocks, value_blocks, None))

    def some_heads(query: Tensor, key: Tensor, value: Tensor, *states: Tensor) -> Tensor:
        near = causal_block_partial(query, key, value, size, scale=scale, dropout_p=dropout_p)
        out, lse = far.query_states(pad_to_blocks(query[:, size:], size), Partial(*states))
        out, lse = (x.flatten(1, 2)[:, : length - size] for x in (out, lse))
        return merge(near, Partial(out, lse)).out

    return torch.cat((first_out, chunked_over_heads(some_heads, query, key, value, *states)), 1)


def naive(config: ScatterbrainConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Compute the readable form: the dense scores of both fields, and a dense mask of the pairs that are near."""
    shape, length = query.shape, query.shape[2]
    features = softmax_features(config.num_features, query.shape[-1], options.seed, query.device)
    query, key, value, key_mask = flatten_heads(query, key, value, options.key_mask)
    valid = torch.ones(key.shape[:2], dtype=torch.bool, device=key.device) if key_mask is None else key_mask
    if length <= config.block_size:
        near = torch.ones(1, length, length, dtype=torch.bool, device=key.device)
    elif options.is_causal:
        block = (valid.cumsum(1) - 1) // ceil_div(config.block_size, 2)
        near = block[:, :, None] - block[:, None] <= 1
    else:
        plan = _plan(config, query, key, key_mask, options.seed)
        position = torch.arange(length, device=key.device)[None]
        query_block, key_block = (
            (position if x is None else inverse(x)) // config.block_size for x in (plan.query_order, plan.key_order)
        )
        near_block = query_block if plan.key_block is None else plan.key_block.gather(1, query_block)
        near = near_block[:, :, None] == key_block[:, None]
    q, k, key_factor = split_scale(query.double(), key.double(), options.scale)
    q_products, k_products = q @ features.t(), k @ features.t()
    q_max, k_max = q_products.amax(-1, keepdim=True), k_products.amax(-1, keepdim=True)
    products = torch.exp(q_products - q_max) @ torch.exp(k_products - k_max).transpose(1, 2)
    far = products.log() + q_max + k_max.transpose(1, 2)
    far = far + query_factor(q, config.num_features).unsqueeze(2) + key_factor.unsqueeze(1)
    allowed = valid[:, None].expand(-1, length, -1)
    allowed = allowed.tril() if options.is_causal else allowed
    scores = torch.where(near, q @ k.transpose(1, 2), far).masked_fill(~allowed, -torch.inf)
    out = scores.softmax(-1).nan_to_num(0.0) @ value.double()
    return unflatten_heads(out.to(value.dtype), shape)


register_method(ScatterbrainConfig, forward=forward, naive=naive)
