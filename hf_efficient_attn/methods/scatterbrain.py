"""ScatterBrain (Chen, Dao, Winsor, Song, Rudra, Re 2021): an exact near field, and random features for the rest.

Let phi be the positive random features of the Performer. The paper's estimate of the attention matrix (section 4) is
phi(q_i) . phi(k_j) for all pairs plus a sparse correction exp(q_i . k_j) - phi(q_i) . phi(k_j) on a near field S:

    out_i = [sum_{j in S_i} (exp(q_i . k_j) - phi(q_i) . phi(k_j)) v_j + phi(q_i) . sum_j phi(k_j) v_j^T] / [v_j = 1]

On S the features cancel. The output consists of exp(q_i . k_j) on S and of phi(q_i) . phi(k_j) outside of S, and it is
computed in this form: the far field is phi(q_i) . sum_{j not in S_i} phi(k_j) v_j^T, whose sums over the keys outside
of S are added up from the other blocks (`hf_efficient_attn.ops.linear`). Nothing is subtracted, so rounding cannot make
the far field negative, as it does in the paper's form if one near key has most of the weight. Each query has the factor
exp(-|q|^2/2) / F, so that both fields have the same normalisation.

- `near_field="window"`: queries and keys are split into blocks of block_size by position, and a query attends to its
  own block. Three blocks of a third of this size have a slightly smaller error, but take two to three times as long.
- `near_field="lsh"`: queries and keys are sorted by an angular hash as in KDEformer (`near_field.plan_lsh`) and split
  into blocks of block_size. The hash of the middle query of a block determines its block of keys. The paper uses the
  buckets of several rounds of cross-polytope hashing. The complement of equal blocks is a contiguous set of blocks on
  each side.
- Causal form: blocks of block_size / 2 by position, for both near fields. A query attends to its own block up to itself
  and to the previous block. A scan over the blocks provides the features of all blocks before those.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.config import MethodConfig, option
from hf_efficient_attn.methods._shared.heads import flatten_heads, unflatten_heads
from hf_efficient_attn.methods._shared.registration import register_method
from hf_efficient_attn.methods._shared.registry import AttentionOptions
from hf_efficient_attn.methods._shared.sampled_keys import check_num_hashes
from hf_efficient_attn.ops.attend import attend
from hf_efficient_attn.ops.blocks import ceil_div, inverse, pad_to_blocks, take, valid_first
from hf_efficient_attn.ops.exact import exact_attention, mask_bias
from hf_efficient_attn.ops.features import Features, favor
from hf_efficient_attn.ops.hashing import plan_lsh
from hf_efficient_attn.ops.linear import FeatureState, log_weights_naive, others, query_state, update_state
from hf_efficient_attn.ops.partial import merge
from hf_efficient_attn.ops.slices import slice_size, sliced


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
        num_valid: (BH, 1), the number of valid keys, which come first in their order; None if all are.
    """

    query_order: Tensor | None
    key_order: Tensor | None
    key_block: Tensor | None
    num_valid: Tensor | None


def _plan(
    config: ScatterbrainConfig, query: Tensor, key: Tensor, key_mask: Tensor | None, options: AttentionOptions
) -> _Blocks:
    """Choose the near field of (BH, N, D) queries and keys, without gradient."""
    if config.near_field == "window" or options.is_causal:
        order = None if key_mask is None else valid_first(key_mask)
        return _Blocks(order, order, None, None if key_mask is None else key_mask.sum(1, keepdim=True))
    with torch.no_grad():
        size = config.block_size
        near = plan_lsh(query, key, size, key_mask, config.num_hashes, options.seed)
        # `plan_lsh` gives `size` keys from any start. Take the block that has most of them.
        last = (torch.as_tensor(near.num_keys, device=key.device) - 1) // size
        block = torch.minimum((near.start + size // 2) // size, last.clamp(min=0))
        num_valid = None if key_mask is None else key_mask.sum(1, keepdim=True)
        return _Blocks(near.query_order, near.key_order, block, num_valid)


def forward(config: ScatterbrainConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Compute the fast form; see `register_method` for the arguments."""
    shape, scale, dropout_p, is_causal = query.shape, options.scale, options.dropout_p, options.is_causal
    query, key, value, key_mask = flatten_heads(query, key, value, options.key_mask)
    if shape[2] <= config.exact_length:
        out = exact_attention(query, key, value, key_mask, is_causal=is_causal, scale=scale, dropout_p=dropout_p)
        return unflatten_heads(out, shape)
    features = favor(config.num_features, scale, shape[3], options.seed, query.device)
    size = ceil_div(config.block_size, 2) if is_causal else config.block_size
    call = {"scale": scale, "dropout_p": dropout_p}

    def some_heads(query: Tensor, key: Tensor, value: Tensor, *plan: Tensor | None) -> Tensor:
        blocks = _Blocks(*plan)
        query = query if blocks.query_order is None else take(query, blocks.query_order)
        if blocks.key_order is not None:
            key, value = take(key, blocks.key_order), take(value, blocks.key_order)
        tokens = tuple(pad_to_blocks(x, size) for x in (query, key, value))
        out = _causal(tokens, features, call) if is_causal else _bidirectional(tokens, shape[2], blocks, features, call)
        out = out.flatten(1, 2)[:, : shape[2]]
        return out if blocks.query_order is None else take(out, inverse(blocks.query_order))

    plan = _plan(config, query, key, key_mask, options)
    numel = shape[2] * max(config.num_features, 2 * size)
    out = sliced(some_heads, query, key, value, *plan, size=slice_size(numel, query.device), draws=dropout_p > 0.0)
    out = out if key_mask is None else out.masked_fill(~key_mask[:, :, None], 0.0)
    return unflatten_heads(out, shape)


def _bidirectional(tokens: tuple[Tensor, ...], length: int, plan: _Blocks, features: Features, call: Any) -> Tensor:
    """Attention of blocks (BH, T, S, .) of `length` tokens to a block of keys and to the features of all others."""
    query, key, value = tokens
    (num_blocks, size), valid, bias = key.shape[1:3], None, None
    if plan.num_valid is not None or length % size:
        index = torch.arange(num_blocks * size, device=key.device).view(1, num_blocks, size)
        valid = index < (length if plan.num_valid is None else plan.num_valid.unsqueeze(2))
        bias = mask_bias(valid, key.dtype).unsqueeze(2)
    state = others(update_state(None, key, value, valid, features), earlier_only=False)
    if plan.key_block is not None:
        block = plan.key_block
        bias = None if bias is None else take(bias[:, :, 0].expand(key.shape[0], -1, -1), block).unsqueeze(2)
        key, value, sums = (take(x.flatten(2), block).unflatten(2, x.shape[2:]) for x in (key, value, state.sums))
        state = FeatureState(sums, state.log.gather(1, block))
    near = attend(query, key, value, bias, **call)
    return merge(near, query_state(query, state, features, call["dropout_p"])).out


def _causal(tokens: tuple[Tensor, ...], features: Features, call: Any) -> Tensor:
    """Attention of blocks (BH, T, S, .) to the own block up to the query, the one before and the features of the rest.

    Masked tokens come last.
    """
    query, key, value = tokens
    size = key.shape[2]
    bias = mask_bias(torch.ones(size, 2 * size, dtype=torch.bool, device=key.device).tril(size), key.dtype)
    first = attend(query[:, :1], key[:, :1], value[:, :1], bias[None, None, :, size:], **call)
    keys, values = (x.flatten(1, 2).unfold(1, 2 * size, size).transpose(2, 3) for x in (key, value))
    near = attend(query[:, 1:], keys, values, bias[None, None], **call)
    state = others(update_state(None, key[:, :-1], value[:, :-1], None, features), earlier_only=True)
    far = query_state(query[:, 1:], state, features, call["dropout_p"])
    return torch.cat((first.out, merge(near, far).out), 1)


def naive(config: ScatterbrainConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Compute the readable form: the dense scores of both fields, and a dense mask of the pairs that are near."""
    shape, length = query.shape, query.shape[2]
    features = favor(config.num_features, options.scale, query.shape[-1], options.seed, query.device)
    query, key, value, key_mask = flatten_heads(query, key, value, options.key_mask)
    valid = torch.ones(key.shape[:2], dtype=torch.bool, device=key.device) if key_mask is None else key_mask
    if length <= config.block_size:
        near = torch.ones(1, length, length, dtype=torch.bool, device=key.device)
    elif options.is_causal:
        block = (valid.cumsum(1) - 1) // ceil_div(config.block_size, 2)
        near = block[:, :, None] - block[:, None] <= 1
    else:
        plan = _plan(config, query, key, key_mask, options)
        position = torch.arange(length, device=key.device)[None]
        query_block, key_block = (
            (position if x is None else inverse(x)) // config.block_size for x in (plan.query_order, plan.key_order)
        )
        near_block = query_block if plan.key_block is None else plan.key_block.gather(1, query_block)
        near = near_block[:, :, None] == key_block[:, None]
    query, key = query.double(), key.double()
    far = log_weights_naive(query, key, features)
    allowed = valid[:, None].expand(-1, length, -1)
    allowed = allowed.tril() if options.is_causal else allowed
    scores = torch.where(near, query @ key.mT * options.scale, far).masked_fill(~allowed, -torch.inf)
    out = scores.softmax(-1).nan_to_num(0.0) @ value.double()
    return unflatten_heads(out.to(value.dtype), shape)


register_method(ScatterbrainConfig, forward=forward, naive=naive)
