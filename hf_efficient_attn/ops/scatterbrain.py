"""ScatterBrain: a block of keys exactly, and features for all other blocks.

`hf_efficient_attn.methods.scatterbrain` has the formulas. With a bias by distance, the features of a block of keys are
multiplied by the mean of exp(bias) over all pairs with the block of queries.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.attend import LOG2_E, Partial, attend, merge, output_of
from hf_efficient_attn.ops.backends.devices import accumulation_dtype
from hf_efficient_attn.ops.distance import Bias, pair_means
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.exact import bias_between, bias_of, mask_bias
from hf_efficient_attn.ops.features.maps import Features
from hf_efficient_attn.ops.features.sums import FeatureState, Tokens, add_to_state, count_of, others, query_state
from hf_efficient_attn.ops.index import ceil_div, integers, inverse, pad_to_blocks, take, valid_first
from hf_efficient_attn.ops.sampled_keys.hashing import plan_lsh
from hf_efficient_attn.ops.slices import slice_size, sliced


class BlockPlan(NamedTuple):
    """Sorted queries and keys in blocks. The near field of query block t is the key block `key_block[:, t]`."""

    query_order: Tensor | None  # (BH, N), the order of the queries; None for the order of their positions
    key_order: Tensor | None  # (BH, N), the same for the keys
    key_block: Tensor | None  # (BH, T), or None if the near field of query block t is key block t
    # (BH, 1), the number of valid keys, which come first in their order; None if all are valid.
    num_valid: Tensor | None


@torch.no_grad()
def plan_blocks(
    query: Tensor, key: Tensor, key_mask: Tensor | None, size: int, num_hashes: int, draws: Draws
) -> BlockPlan:
    """Plan the near field of (BH, N, D) tokens: blocks of positions, or of a hash with `num_hashes` hyperplanes."""
    num_valid = None if key_mask is None else key_mask.sum(1, keepdim=True)  # (BH, 1)
    if not num_hashes:
        order = None if key_mask is None else valid_first(key_mask)
        return BlockPlan(order, order, None, num_valid)
    near = plan_lsh(query, key, size, key_mask, num_hashes, draws)
    # `plan_lsh` gives `size` keys from any start. Take the block that contains most of these keys.
    last = (torch.as_tensor(near.num_keys, device=key.device) - 1) // size
    block = torch.minimum((near.start + size // 2) // size, last.clamp(min=0))  # (BH, T)
    return BlockPlan(near.query_order, near.key_order, block, num_valid)


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: BlockPlan,
    features: Features,
    size: int,
    *,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    with_lse: bool = False,
) -> Tensor:
    """Compute attention of (BH, N, .) tokens to near blocks of `size` keys and to the features of all other keys."""
    length = query.shape[1]
    call = {"scale": scale, "dropout_p": dropout_p}

    def some_heads(query: Tensor, key: Tensor, value: Tensor, own: BlockPlan) -> Tensor:
        query = query if own.query_order is None else take(query, own.query_order)
        if own.key_order is not None:
            key = take(key, own.key_order)
            value = take(value, own.key_order)
        tokens = [pad_to_blocks(x, size) for x in (query, key, value)]  # (BH, T, size, .)
        if is_causal:
            found = _causal_blocks(tokens, features, call)
        else:
            found = _bidirectional_blocks(tokens, length, own, features, call)
        out = output_of(found, with_lse).flatten(1, 2)[:, :length]
        return out if own.query_order is None else take(out, inverse(own.query_order))

    slices = slice_size(length * max(count_of(features, Tokens(query, key, value, None)), 2 * size), query.device)
    return sliced(some_heads, query, key, value, plan, size=slices, draws=dropout_p > 0.0)


def _bidirectional_blocks(
    tokens: list[Tensor], length: int, plan: BlockPlan, features: Features, call: dict[str, Any]
) -> Partial:
    """Compute attention of blocks (BH, T, S, .) of `length` tokens to a block of keys and to all others' features."""
    query, key, value = tokens
    num_blocks, size = key.shape[1:3]
    valid = None
    bias = None
    if plan.num_valid is not None or length % size:
        index = torch.arange(num_blocks * size, device=key.device).view(1, num_blocks, size)
        valid = index < (length if plan.num_valid is None else plan.num_valid.unsqueeze(2))  # (1 or BH, T, S)
        bias = mask_bias(valid, key.dtype).unsqueeze(2)  # (1 or BH, T, 1, S)
    state = others(add_to_state(None, key, value, valid, features), earlier_only=False)  # sums (BH, T, F, Dv + 8)
    if plan.key_block is not None:
        block = plan.key_block
        bias = None if bias is None else take(bias[:, :, 0].expand(key.shape[0], -1, -1), block).unsqueeze(2)
        # (BH, T, S, .), and sums (BH, T, F, Dv + 8)
        key, value, sums = (take(x.flatten(2), block).unflatten(2, x.shape[2:]) for x in (key, value, state.sums))
        state = FeatureState(sums, state.log.gather(1, block))
    near = attend(query, key, value, bias, **call)  # (BH, T, S, Dv)
    return merge(near, query_state(query, state, features, call["dropout_p"]))


def _causal_blocks(tokens: list[Tensor], features: Features, call: dict[str, Any]) -> Partial:
    """Compute attention of blocks (BH, T, S, .) to the block before, to their own block causally, and to features.

    The features represent all earlier blocks. Masked tokens come last.
    """
    query, key, value = tokens
    size = key.shape[2]
    bias = mask_bias(torch.ones(size, 2 * size, dtype=torch.bool, device=key.device).tril(size), key.dtype)  # (S, 2 S)
    first = attend(query[:, :1], key[:, :1], value[:, :1], bias[None, None, :, size:], **call)
    # (BH, T - 1, 2 S, .)
    keys, values = (x.flatten(1, 2).unfold(1, 2 * size, size).transpose(2, 3) for x in (key, value))
    near = attend(query[:, 1:], keys, values, bias[None, None], **call)  # (BH, T - 1, S, Dv)
    state = others(add_to_state(None, key[:, :-1], value[:, :-1], None, features), earlier_only=True)
    far = query_state(query[:, 1:], state, features, call["dropout_p"])  # (BH, T - 1, S, Dv)
    return Partial(*(torch.cat(x, 1) for x in zip(first, merge(near, far), strict=True)))


def biased_block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Bias,
    features: Features,
    size: int,
    *,
    scale: float,
    dropout_p: float = 0.0,
) -> Tensor:
    """Compute attention of queries (BH, N, D) to their block of `size` keys exactly, and to the features of all others.

    The sums of other blocks are weighted by `block_bias`. With N / size blocks this takes (N / size)^2 products of
    (F, Dv) sums: less than a hundredth of the work of exact attention.

    Returns:
        (BH, N, Dv).
    """
    length = query.shape[1]

    def some_heads(query: Tensor, key: Tensor, value: Tensor, own: Bias) -> Tensor:
        query, key, value, position = (pad_to_blocks(x, size) for x in (query, key, value, own.key_position[..., None]))
        valid = (integers(key.shape[1] * size, key.device) < length).view(1, -1, size)  # (1, T, S)
        of_pairs = bias_between(own.table, position[..., 0], position[..., 0])  # (BH, T, S, S)
        of_pairs = of_pairs + mask_bias(valid, key.dtype).unsqueeze(2)
        near = attend(query, key, value, of_pairs, scale=scale, dropout_p=dropout_p)
        sums, log = add_to_state(None, key, value, valid, features)  # (BH, T, F, Dv + 8), (BH, T)
        weight = block_bias(own, size) * LOG2_E + log.unsqueeze(1)  # (BH, T, T)
        log = weight.detach().amax(2).clamp(min=-1e30)  # (BH, T)
        far = torch.bmm((weight - log.unsqueeze(2)).exp2(), sums.flatten(2)).view_as(sums)  # (BH, T, F, Dv + 8)
        out = merge(near, query_state(query, FeatureState(far, log), features, dropout_p)).out
        return out.flatten(1, 2)[:, :length]

    rows = slice_size(length * max(4 * size, 2 * key.shape[2]), key.device)
    bias = bias.expanded(len(query), accumulation_dtype(key.dtype))
    return sliced(some_heads, query, key, value, bias, size=rows, draws=dropout_p > 0.0)


def block_bias(bias: Bias, size: int) -> Tensor:
    """Compute the log of the mean of exp(bias) over the pairs of two blocks: (BH, T, T); -inf for a block itself."""
    table = bias.table  # (BH, 2R + 1)
    distance = bias.distances(size, ceil_div(bias.key_position.shape[1], size))  # (1 or BH, T, T)
    end = int(distance.abs().amax()) + size
    largest = table.detach().amax(1, keepdim=True)  # (BH, 1)
    span = torch.arange(-end, end + 1, device=table.device)
    means = pair_means(bias_of((table - largest).exp(), span), distance, size)  # (BH, T, T)
    means = means.clamp(min=torch.finfo(means.dtype).tiny).log() + largest.unsqueeze(2)
    return means.masked_fill(torch.eye(means.shape[1], dtype=torch.bool, device=means.device), -torch.inf)
