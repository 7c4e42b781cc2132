"""The keys around each query that it attends to exactly, next to weighted landmarks for all other keys.

`hf_efficient_attn.ops.weighted_coreset` explains what they are for. They help where attention is local, which some
queries tell for each head. Where it is not, more landmarks help as much and take half the time: on
activations of BERT and ViT the error with near keys in the heads where they hold 7 % of the attention or more is that
with near keys in all heads, or less.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_efficient_attn.ops.blocks import ceil_div, take
from hf_efficient_attn.ops.constants import constant
from hf_efficient_attn.ops.coreset_landmarks import (
    CoresetOptions,
    Inputs,
    candidates_of,
    spread_queries,
    take_alike,
    take_candidates,
)
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.export import is_compiling
from hf_efficient_attn.ops.onednn import products
from hf_efficient_attn.ops.partial import accumulation_dtype, exp_, safe_row_max
from hf_efficient_attn.ops.precision import LOG2_E

# Queries of a head that tell whether its attention is local, and keys for which the sum of their weights is estimated.
NUM_ROWS, NUM_KEYS = 32, 1024
# What landmarks count for a near key is at most about 1 relative to the largest term of its query's sum. More would be
# due to logits that float32 cannot represent, and is cut off so that the output stays finite.
MAX_COUNTED = 4.0
# Numbers of gathered weights that are processed at a time in a backward pass.
_GATHERED_NUMEL = 1 << 18


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

    What the landmarks count for a near key is exp(scale <q, c> + bias of the landmark) @ weight of the key, weight
    (BH, Nk, m), which is arbitrary where `bias` is -inf. `key_index` (BH, T, w) are the positions of the near keys.
    """

    key: Tensor
    value: Tensor
    bias: Tensor | None
    weight: Tensor
    key_index: Tensor


def near_block_q(width: int) -> int:
    """Queries of a block that shares `width` near keys."""
    return max(1, width // 2)


def near_index(block: Tensor, width: int, num_keys: Tensor | int) -> Tensor:
    """The `width` keys around blocks of queries: int64 (BH or 1, T) -> (BH or 1, T, width).

    The blocks of keys at both ends of the sequence are moved inwards.
    """
    block_q = near_block_q(width)
    first = (block * block_q - (width - block_q) // 2).clamp(min=0)
    if isinstance(num_keys, int):
        first = first.clamp(max=max(0, num_keys - width))
    else:
        first = torch.minimum(first, (num_keys - width).clamp(min=0))
    return first.unsqueeze(2) + torch.arange(width, device=block.device)


def _near_index_of_all(q_len: int, width: int, num_keys: int, device: torch.device) -> Tensor:
    blocks = torch.arange(ceil_div(q_len, near_block_q(width)), device=device)[None]
    return near_index(blocks, width, num_keys).clamp(max=num_keys - 1)


def plan_near_keys(inputs: Inputs, width: int, heads: Tensor | None = None) -> NearPlan:
    """The near keys of all queries.

    Args:
        inputs: as many queries as keys.
        width: near keys of a query.
        heads: bool (BH,), heads that have near keys, or None if all have them and at least `width` keys.
    """
    block_q, kv_len, q_len, device = near_block_q(width), inputs.key.shape[1], inputs.query.shape[1], inputs.key.device
    if isinstance(inputs.num_keys, int):
        index = constant(_near_index_of_all, q_len, width, inputs.num_keys, device=device)
        bias = None if heads is None else mask_bias(heads[:, None, None], inputs.key.dtype)
        return NearPlan(index, None if bias is None else bias.expand(-1, *index.shape[1:]), block_q)
    block = torch.arange(ceil_div(q_len, block_q), device=device)[None]
    index = near_index(block, width, inputs.num_keys)
    if heads is None:
        return NearPlan(index, None, block_q)
    exists = index < inputs.num_keys.view(-1, 1, 1)
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
    width, num_keys = options.block_size, inputs.num_keys
    if not width or inputs.query.shape[1] != inputs.key.shape[1] or options.near_share >= 1.0:
        return None
    heads = heads_with_enough_keys(num_keys, options)
    if options.near_share == 0.0:
        return inputs.key.new_ones(len(inputs.key), dtype=torch.bool) if heads is None else heads
    acc_dtype = accumulation_dtype(inputs.key.dtype)
    token = spread_queries(inputs, NUM_ROWS)
    query = take_alike(inputs.query, token).to(acc_dtype) * options.scale
    index = near_index(token // near_block_q(width), width, num_keys).clamp(max=inputs.key.shape[1] - 1)
    near = near_scores(query, take_alike(inputs.key, index))
    position, valid = candidates_of(inputs, NUM_KEYS)
    scores = query @ take_candidates(inputs.key, position).to(acc_dtype).mT
    number: Tensor | int = position.shape[1]
    if valid is not None:
        scores, number = scores.masked_fill(~valid.unsqueeze(1), -torch.inf), valid.sum(1, keepdim=True).clamp(min=1)
    is_local = is_attention_local(sum_scores_(near, scores), num_keys / number, options.near_share)
    return is_local if heads is None else heads & is_local


def heads_with_enough_keys(num_keys: Tensor | int, options: CoresetOptions) -> Tensor | None:
    """Of a padded batch the heads with more keys than landmarks and near keys together: bool (BH,). None: all heads."""
    if isinstance(num_keys, int):
        return None
    return (num_keys > options.num_landmarks + options.block_size).squeeze(1)


def near_scores(query: Tensor, keys: Tensor) -> Tensor:
    """The scores of queries (BH, R, D) and the near keys of each (BH, R, w, D): (BH, R, w)."""
    # Many small products take longer than one of single numbers.
    return (keys.to(query.dtype) * query.unsqueeze(2)).sum(3)


class ScoreSums(NamedTuple):
    """The sums of the exponentials of scores of R queries.

    Attributes:
        row_max: (BH, R, 1), relative to whose exponential the sums are.
        near: (BH, R), over near keys.
        spread: (BH, R), over evenly spaced keys.
    """

    row_max: Tensor
    near: Tensor
    spread: Tensor


def sum_scores_(near: Tensor, spread: Tensor) -> ScoreSums:
    """The sums for the scores of near keys (BH, R, w) and of evenly spaced ones (BH, R, C), which are overwritten."""
    row_max = safe_row_max(torch.maximum(near.amax(2, keepdim=True), spread.amax(2, keepdim=True)))
    of_spread = exp_(spread.sub_(row_max)).sum(2)
    return ScoreSums(row_max, exp_(near.sub_(row_max)).sum(2), of_spread)


def is_attention_local(sums: ScoreSums, factor: Tensor | float, near_share: float) -> Tensor:
    """Whether near keys hold more than a share of the attention: bool (BH,).

    Args:
        sums: of some queries.
        factor: how many keys, (BH, 1) or a number, each evenly spaced key represents.
        near_share: the share.
    """
    total = sums.spread * factor
    share = sums.near / total.clamp(min=torch.finfo(total.dtype).tiny)
    return share.clamp(max=1.0).mean(1) > near_share


class Similarity(NamedTuple):
    """The kernel between keys and landmarks, relative to a factor of each landmark.

    Attributes:
        factors: (BH, m, D), whose product with a key, plus `offset`, is an exponent of two.
        offset: (BH, m), -inf for an unused landmark.
        of_all: (BH, Nk, m), the similarities of all keys, or None where memory is too small.
    """

    factors: Tensor
    offset: Tensor
    of_all: Tensor | None = None

    def of(self, key: Tensor) -> Tensor:
        """For keys (BH, N, D): (BH, N, m)."""
        # A power of two is faster than one of e.
        return products(key.to(self.factors.dtype), self.factors, self.offset).clamp_(max=0.0).exp2_()


class ExactRows(NamedTuple):
    """Exact attention of P queries of each head, in the accumulation dtype.

    Attributes:
        query: (BH, P, D), times the scale of the scores.
        lse: (BH, P, 1); 0 for a sequence without keys.
        sums: (BH, P, Dv + 1), the numerators and denominators, relative to exp(lse).
        basis: (BH, P, m), what the landmarks count for each query, relative to exp(lse).
    """

    query: Tensor
    lse: Tensor
    sums: Tensor
    basis: Tensor


def plan_of_rows(plan: NearPlan, token: Tensor, heads: int) -> NearPlan:
    """The near keys of some queries, int64 (BH or 1, P), as of blocks of one query, for each of so many heads."""
    block = (token // plan.block_q).expand(heads, -1).unsqueeze(2).expand(-1, -1, plan.key_index.shape[2])
    index = plan.key_index.expand(heads, -1, -1).gather(1, block)
    return NearPlan(index, None if plan.bias is None else plan.bias.expand(heads, -1, -1).gather(1, block), 1)


def near_sums_of_rows(
    inputs: Inputs, rows: ExactRows, plan: NearPlan, similarity: Similarity, solved: Tensor
) -> Tensor:
    """What near keys add to the sums of exact rows, without what the landmarks count for them: (BH, P, Dv + 1).

    Args:
        inputs: with centered keys.
        rows: P rows.
        plan: the near keys of each row, (BH, P, w).
        similarity: the kernel between keys and landmarks.
        solved: (BH, m, m), the inverse of the kernel between landmarks, so that similarity times solved is what they
            count for each key.
    """
    index, dtype = plan.key_index, rows.query.dtype
    keys, values = (take(x, index).to(dtype) for x in (inputs.key, inputs.value))
    scores = (keys * rows.query.unsqueeze(2)).sum(3)
    if inputs.mean is not None:
        scores = scores - rows.query @ inputs.mean.mT
    counting = rows.basis @ solved
    if similarity.of_all is None:
        near = similarity.of(keys.flatten(1, 2)).view(*index.shape, -1)
        counted = (near * counting.unsqueeze(2)).sum(3)
    else:
        counted = count_near_keys(counting.unsqueeze(2), similarity.of_all, index).squeeze(2)
    # Powers of e that underflow take thirty times as long.
    pairs = ((scores - rows.lse) * LOG2_E).exp2() - counted.clamp(-MAX_COUNTED, MAX_COUNTED)
    if plan.bias is not None:
        pairs = pairs.masked_fill(plan.bias == -torch.inf, 0.0)
    return torch.cat((pairs.unsqueeze(2) @ values, pairs.sum(2)[:, :, None, None]), 3).squeeze(2)


def gather_near_keys(inputs: Inputs, plan: NearPlan, weights: Tensor) -> NearKeys:
    """The near keys of all blocks. The landmarks count `weights` (BH, Nk, m) for each key."""
    key, value = (take_alike(x, plan.key_index) for x in (inputs.key, inputs.value))
    bias = None if plan.bias is None else plan.bias.expand(len(key), -1, -1)
    return NearKeys(key, value, bias, weights, plan.key_index.expand(len(key), -1, -1))


def count_near_keys(basis: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    """What landmarks count for some keys, by the basis of queries.

    Args:
        basis: (BH, T, M, m), of M queries of each block.
        weight: (BH, Nk, m), of all keys.
        index: int64 (BH, T, w), the keys of each block.

    Returns:
        (BH, T, M, w) in the dtype of the weights.
    """
    basis = basis.to(weight.dtype)
    needs_grad = torch.is_grad_enabled() and (basis.requires_grad or weight.requires_grad)
    if needs_grad and weight.device.type == "cpu" and not is_compiling():
        counted: Tensor = _Counted.apply(basis, weight, index)  # type: ignore[no-untyped-call]
        return counted
    return basis @ take(weight, index).mT


class _Counted(torch.autograd.Function):
    """`count_near_keys`, which does not keep the gathered weights."""

    @staticmethod
    def forward(ctx: Any, basis: Tensor, weight: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(basis, weight, index)
        return basis @ take(weight, index).mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        basis, weight, index = ctx.saved_tensors
        (num_blocks, width), count = index.shape[1:], weight.shape[2]
        grad_basis, grad_weight = torch.empty_like(basis), weight.new_zeros(weight.shape)
        # A few blocks at a time, in memory that is used again. New memory costs more time than the arithmetic on it.
        step = max(1, _GATHERED_NUMEL // (width * count))
        buffer = weight.new_empty(min(step, num_blocks), width, count)
        for a in range(len(basis)):
            for t in range(0, num_blocks, step):
                some = slice(t, t + step)
                own_index, own_grad = index[a, some].flatten(), grad[a, some]
                rows = buffer[: len(own_grad)]
                torch.index_select(weight[a], 0, own_index, out=rows.view(-1, count))
                torch.bmm(own_grad, rows, out=grad_basis[a, some])
                torch.bmm(own_grad.mT, basis[a, some], out=rows)
                grad_weight[a].index_add_(0, own_index, rows.view(-1, count))
        return grad_basis, grad_weight, None
