"""The keys around each query that it attends to exactly, next to weighted landmarks for all other keys.

`hf_efficient_attn.ops.weighted_coreset` explains what they are for. They help where attention is local, which some
queries tell for each head. Where it is not, more landmarks help as much and take half the time: on
activations of BERT and ViT the error with near keys in the heads where they hold 7 % of the attention or more is that
with near keys in all heads, or less.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.blocks import ceil_div, take
from hf_efficient_attn.ops.coreset_landmarks import CoresetOptions, Inputs, candidates_of
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.partial import exp_, safe_row_max
from hf_efficient_attn.ops.sampling import stratified_ranks

# Queries of a head that tell whether its attention is local, and keys for which the sum of their weights is estimated.
NUM_ROWS, NUM_KEYS = 32, 1024
# What landmarks count for a near key is at most about 1 relative to the largest term of its query's sum. More would be
# due to logits that float32 cannot represent, and is cut off so that the output stays finite.
MAX_COUNTED = 4.0


class NearPlan(NamedTuple):
    """The near keys of each block of `block_q` queries.

    Attributes:
        key_index: int64 (BH or 1, T, w), the near keys.
        bias: (BH or 1, T, w), -inf for what is not a near key; None if all are.
        block_q: queries of a block.
    """

    key_index: Tensor
    bias: Tensor | None
    block_q: int


class NearKeys(NamedTuple):
    """The near keys of each block: key (BH, T, w, D), value (BH, T, w, Dv) and the scores' bias (BH, T, w) or None.

    What the landmarks count for a near key is exp(scale <q, c> + bias of the landmark) @ weight, weight (BH, T, w, m).
    """

    key: Tensor
    value: Tensor
    bias: Tensor | None
    weight: Tensor


def near_block_q(width: int) -> int:
    """Queries of a block that shares `width` near keys."""
    return max(1, width // 2)


def _near_index(block: Tensor, width: int, num_keys: Tensor | int) -> Tensor:
    """The `width` keys around blocks of queries: int64 (BH or 1, T) -> (BH or 1, T, width).

    The blocks of keys at both ends of the sequence are moved inwards.
    """
    block_q = near_block_q(width)
    first = (block * block_q - (width - block_q) // 2).clamp(min=0)
    last = torch.as_tensor(num_keys, device=block.device) - width
    return torch.minimum(first, last.clamp(min=0)).unsqueeze(2) + torch.arange(width, device=block.device)


def plan_near_keys(inputs: Inputs, width: int, heads: Tensor | None = None) -> NearPlan:
    """The near keys of all queries.

    Args:
        inputs: as many queries as keys.
        width: near keys of a query.
        heads: bool (BH,), heads that have near keys, or None if all have them and at least `width` keys.
    """
    block_q, kv_len = near_block_q(width), inputs.key.shape[1]
    block = torch.arange(ceil_div(inputs.query.shape[1], block_q), device=inputs.key.device)[None]
    index = _near_index(block, width, inputs.num_keys)
    if heads is None:
        return NearPlan(index, None, block_q)
    exists = index < torch.as_tensor(inputs.num_keys, device=index.device).view(-1, 1, 1)
    bias = mask_bias(exists & heads[:, None, None], inputs.key.dtype)
    return NearPlan(index.clamp(max=kv_len - 1), bias, block_q)


@torch.no_grad()
def heads_with_near_keys(inputs: Inputs, options: CoresetOptions) -> Tensor | None:
    """Which heads have near keys: bool (BH,), or None if no head has.

    In long sequences the sum of a query's weights, of which near keys hold a share, is estimated from evenly spaced
    keys.

    Args:
        inputs: the keys need not be centered.
        options: the number of near keys, and the share of the attention that they must hold.
    """
    width, num_keys, batch_heads = options.block_size, inputs.num_keys, inputs.key.shape[0]
    if not width or inputs.query.shape[1] != inputs.key.shape[1] or options.near_share >= 1.0:
        return None
    heads = torch.ones(batch_heads, dtype=torch.bool, device=inputs.key.device)
    if isinstance(num_keys, Tensor):
        heads = (num_keys > options.num_landmarks + width).squeeze(1)
    if options.near_share == 0.0:
        return heads
    half = torch.full((batch_heads, 1), 0.5, dtype=torch.float64, device=inputs.key.device)
    token = stratified_ranks(NUM_ROWS, inputs.num_queries, half).expand(batch_heads, -1)
    query = take(inputs.query, token) * options.scale
    index = _near_index(token // near_block_q(width), width, num_keys).clamp(max=inputs.key.shape[1] - 1)
    near = (take(inputs.key, index) * query.unsqueeze(2)).sum(3)
    position, valid = candidates_of(inputs, NUM_KEYS)
    scores, number = query @ take(inputs.key, position).mT, torch.as_tensor(position.shape[1], device=near.device)
    if valid is not None:
        scores = scores.masked_fill(~valid.unsqueeze(1), -torch.inf)
        number = valid.sum(1).clamp(min=1)
    row_max = safe_row_max(torch.maximum(near.amax(2, keepdim=True), scores.amax(2, keepdim=True)))
    keys_per_candidate = (torch.as_tensor(num_keys, device=near.device).view(-1) / number).unsqueeze(1)
    total = exp_(scores.sub_(row_max)).sum(2) * keys_per_candidate
    share = exp_(near.sub_(row_max)).sum(2) / total.clamp(min=torch.finfo(total.dtype).tiny)
    return heads & (share.clamp(max=1.0).mean(1) > options.near_share)


class ExactRows(NamedTuple):
    """Exact attention of P queries of each head, float64.

    Attributes:
        token: int64 (BH, P), which queries.
        query: (BH, P, D), times the scale of the scores.
        lse: (BH, P, 1); 0 for a sequence without keys.
        sums: (BH, P, Dv + 1), the numerators and denominators, relative to exp(lse).
        basis: (BH, P, m), what the landmarks count for each query, relative to exp(lse).
    """

    token: Tensor
    query: Tensor
    lse: Tensor
    sums: Tensor
    basis: Tensor


def near_sums_of_rows(inputs: Inputs, rows: ExactRows, plan: NearPlan, similarity: Tensor, solved: Tensor) -> Tensor:
    """What near keys add to the sums of exact rows, without what the landmarks count for them: float64 (BH, P, Dv + 1).

    Args:
        inputs: with centered keys.
        rows: P rows.
        plan: the near keys.
        similarity: (BH, Nk, m), the kernel between keys and landmarks, in the dtype of the keys.
        solved: (BH, m, m), the inverse of the kernel between landmarks, so that similarity times solved is what they
            count for each key.
    """
    index = plan.key_index.expand(inputs.key.shape[0], -1, -1)
    block = (rows.token // plan.block_q).unsqueeze(2).expand(-1, -1, index.shape[2])
    index = index.gather(1, block)
    keys, values = take(inputs.key, index).double(), take(inputs.value, index).double()
    scores = (keys @ rows.query.unsqueeze(3)).squeeze(3)
    counts = take(similarity, index)
    if plan.bias is not None:
        bias = plan.bias.expand(inputs.key.shape[0], -1, -1).gather(1, block)
        scores, counts = scores + bias, counts.masked_fill((bias == -torch.inf).unsqueeze(3), 0.0)
    counted = (counts @ (rows.basis @ solved).unsqueeze(3).to(counts.dtype)).squeeze(3)
    pairs = (scores - rows.lse).exp() - counted.clamp(-MAX_COUNTED, MAX_COUNTED)
    return torch.cat((pairs.unsqueeze(2) @ values, pairs.sum(2)[:, :, None, None]), 3).squeeze(2)


def gather_near_keys(inputs: Inputs, plan: NearPlan, weights: Tensor) -> NearKeys:
    """The near keys of all blocks. The landmarks count `weights` (BH, Nk, m) for each key."""
    index = plan.key_index.expand(inputs.key.shape[0], -1, -1)
    weights, bias = take(weights, index), plan.bias
    if bias is not None:
        bias = bias.expand(inputs.key.shape[0], -1, -1)
        weights = weights.masked_fill((bias == -torch.inf).unsqueeze(3), 0.0)
    return NearKeys(take(inputs.key, index), take(inputs.value, index), bias, weights)
