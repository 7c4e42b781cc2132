"""Attention to a few near keys exactly and to weighted landmarks that represent all other keys.

The softmax sum of a query q over the keys k_j is approximated through the features exp(scale <q, c_s>) of m landmarks:

    sum_j exp(scale <q, k_j>) [v_j, 1]  ~  sum_s exp(scale <q, c_s>) U_s,    U = (K_cc + ridge I)^-1 K_ck [V, 1]

K is the kernel exp(t^2 |scale| <x, y>) on centered keys. These are the Nystrom weights, which are those of WildCat
(Schroeder & Mackey 2026) if the landmarks are keys. What is different here:

- A landmark is the weighted mean of a cluster of keys. The clusters begin with keys that are drawn far from each other
  (`hf_efficient_attn.ops.coreset.draw_apart`), and some steps of Lloyd's algorithm follow. A key x is drawn with a
  probability that grows with K(x, x)^DRAW_POWER and has the weight K(x, x)^POWER in the mean, so that a key that can
  have a large score is approximated better. Without Lloyd's steps the pivots of a randomized Cholesky decomposition are
  better, but with them the error on activations of BERT and ViT is the same, and the pivots take longer than the steps.
- The weights are fitted to the exact rows of a few probe queries: ridge regression of the numerator and of the
  denominator towards the Nystrom weights, in the metric of K_cc.
- A head whose exact rows are closer to attention to the means of the clusters, with the numbers of their keys as
  positive weights, gets that. Nystrom weights extrapolate poorly where scores are very large.
- In heads whose attention is local, each block of queries attends to the keys around it exactly. What the landmarks
  count for these keys is subtracted (`hf_efficient_attn.ops.coreset_near_keys`).

All exponentials are relative to a maximum. Float32 is enough for the inverse of K_cc + ridge I: the rounding of a
backward stable decomposition is far below the ridge. On activations of BERT and ViT float64 changes no error by .0001.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.blocks import ceil_div, chunked_over_heads, inverse, pad_to_blocks, take
from hf_efficient_attn.ops.coreset import gumbel_numbers
from hf_efficient_attn.ops.coreset_blocks_graph import block_attention
from hf_efficient_attn.ops.coreset_landmarks import (
    CoresetOptions,
    Inputs,
    center,
    choose_landmarks,
    gather_candidates,
    order_tokens,
)
from hf_efficient_attn.ops.coreset_near_keys import (
    MAX_COUNTED,
    NearKeys,
    NearPlan,
    count_near_keys,
    gather_near_keys,
    heads_with_near_keys,
    near_block_q,
    plan_near_keys,
)
from hf_efficient_attn.ops.coreset_weights import Coreset, weigh
from hf_efficient_attn.ops.export import is_compiling
from hf_efficient_attn.ops.onednn import product_attention, products, use_product
from hf_efficient_attn.ops.partial import accumulation_dtype, partial_attention, safe_row_max
from hf_efficient_attn.ops.precision import LOG2_E

# A denominator must be this share of the sum of its terms' sizes, and a fitted one within these multiples of the
# unfitted one. Otherwise the weights of the next safer kind are used for the query.
LEAST_DENOMINATOR, FIT_RANGE = 0.01, (0.6, 1.6)
# The same relative to the sum of the exponentials. The gradient divides by the square.
LEAST_SUM = 1e-10
# Scores of a head that are computed at a time: 4 MiB of float32.
SCORES = 1 << 20
# Keys of several heads that are processed at a time, so that small operations use all cores.
TOKENS = 1 << 14
# Numbers of keys and landmarks at a time on an accelerator, 512 MiB of float32, of which there are about three.
ACCELERATOR_SCORES = 1 << 27


def weighted_coreset_attention(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, options: CoresetOptions, dropout_p: float = 0.0
) -> Tensor:
    """The bidirectional form.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D), with more keys than landmarks and near keys together.
        value: (BH, Nk, Dv).
        key_mask: bool (BH, Nk), True for valid keys, or None. It also masks the queries if there are as many.
        options: how landmarks are chosen.
        dropout_p: probability of dropping a weight from the numerator.

    Returns:
        (BH, Nq, Dv) in the dtype of `value`.
    """
    if backend(key) != "cpu" and dropout_p == 0.0:
        return block_attention(query, key, value, key_mask, options)
    inputs, order = order_tokens(query, key, value, key_mask)
    num_candidates = min(options.num_candidates, key.shape[1])
    like = key.new_empty(0, dtype=accumulation_dtype(key.dtype))
    numbers = gumbel_numbers(options.num_landmarks + options.block_size, num_candidates, options.seed, like)
    near = heads_with_near_keys(inputs, options)
    if near is None or is_fixed(key):
        out = _attend_alike(inputs, numbers, options, near, dropout_p)
    else:
        groups = [(near.logical_not().nonzero()[:, 0], None), (near.nonzero()[:, 0], near)]
        # Heads without near keys and the others, if there are both.
        outs = [
            _attend_alike(_of_heads(index, inputs), numbers, options, None if own is None else own[index], dropout_p)
            for index, own in groups
            if len(index)
        ]
        index = torch.cat([index for index, _ in groups])
        out = outs[0] if len(outs) == 1 else torch.cat(outs).index_select(0, index.argsort())
    if order is None or key_mask is None:
        return out
    return take(out, inverse(order)).masked_fill(~key_mask[:, :, None], 0.0)


def _of_heads(index: Tensor, inputs: Inputs) -> Inputs:
    """The inputs of some heads."""
    if len(index) == inputs.key.shape[0]:
        return inputs
    some: tuple[Any, ...] = tuple(x.index_select(0, index) if isinstance(x, Tensor) else x for x in inputs)
    return Inputs(*some)


def _attend_alike(
    inputs: Inputs, numbers: Tensor, options: CoresetOptions, near: Tensor | None, dropout_p: float
) -> Tensor:
    """Attend in heads that all have near keys or all have none: (BH, Nq, Dv) in the dtype of the values.

    Where there is no choice by data all heads have room for both, and `near` (BH,) says which have near keys.
    """
    both, kv_len = is_fixed(inputs.key), inputs.key.shape[1]
    if near is None or both:
        options = options._replace(num_landmarks=options.num_landmarks + options.block_size)
    # Integers are the same for all heads.
    counts = (x if isinstance(x, Tensor) else None for x in (inputs.num_keys, inputs.num_queries))

    def some_heads(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Tensor:
        bias, num_keys, num_queries, own_near = rest
        own = inputs._replace(query=query, key=key, value=value, bias=bias)
        own = own if num_keys is None else own._replace(num_keys=num_keys)
        own = center(own if num_queries is None else own._replace(num_queries=num_queries))
        candidates = gather_candidates(own, options.num_candidates)
        landmarks = choose_landmarks(candidates, numbers, options, own_near if both else None)
        plan = None if near is None else plan_near_keys(own, options.block_size, own_near if both else None)
        coreset, weights = weigh(own, landmarks, options, plan)
        if plan is None or weights is None:
            return attend_to_coreset(own, coreset, None, options, dropout_p).to(value.dtype)

        def with_near_keys(some: slice) -> Tensor:
            heads = _slice_heads(own, some)
            near_keys = gather_near_keys(heads, plan_of_heads(plan, some), weights.of_keys(heads.key, some))
            return attend_to_coreset(heads, coreset_of_heads(coreset, some), near_keys, options, dropout_p).to(
                value.dtype
            )

        at_a_time = len(own.key)
        if backend(own.key) != "cpu":
            at_a_time = max(1, ACCELERATOR_SCORES // (kv_len * options.num_landmarks))
        if at_a_time >= len(own.key):
            return with_near_keys(slice(None))
        return torch.cat([with_near_keys(slice(a, a + at_a_time)) for a in range(0, len(own.key), at_a_time)])

    step = TOKENS // kv_len if near is None else SCORES // (kv_len * options.num_landmarks)
    return chunked_over_heads(some_heads, *inputs[:4], *counts, near, step=max(1, step))


def _slice_heads(inputs: Inputs, some: slice) -> Inputs:
    own: tuple[Any, ...] = tuple(x[some] if isinstance(x, Tensor) else x for x in inputs)
    return Inputs(*own)


def coreset_of_heads(coreset: Coreset, some: slice | Tensor) -> Coreset:
    """The coreset of some heads."""
    own: tuple[Any, ...] = tuple(None if x is None else x[some] for x in coreset)
    return Coreset(*own)


def plan_of_heads(plan: NearPlan, some: slice) -> NearPlan:
    """The near keys of some heads."""
    index, bias = plan.key_index, plan.bias
    index = index if len(index) == 1 else index[some]
    return plan._replace(key_index=index, bias=bias if bias is None or len(bias) == 1 else bias[some])


def is_fixed(x: Tensor) -> bool:
    """Whether the form of a head must not depend on data: in a graph, and where reading it waits for a device."""
    return is_compiling() or backend(x) != "cpu"


def attend_to_coreset(
    inputs: Inputs, coreset: Coreset, near: NearKeys | None, options: CoresetOptions, dropout_p: float
) -> Tensor:
    """Attention of all queries to the coreset and to near keys: (BH, Nq, Dv) in the accumulation dtype."""
    if coreset.by_means is not None and not is_fixed(inputs.key):
        is_by_means = coreset.by_means.flatten()
        if bool(is_by_means.all()):
            return _by_means(inputs.query, coreset, options.scale, dropout_p)
        if bool(is_by_means.any()):
            fitted, means = (x.nonzero()[:, 0] for x in (~is_by_means, is_by_means))
            some: tuple[Any, ...] = () if near is None else tuple(None if x is None else x[fitted] for x in near)
            own = None if near is None else NearKeys(*some)
            outs = (
                attend_to_coreset(
                    _of_heads(fitted, inputs), coreset_of_heads(coreset, fitted), own, options, dropout_p
                ),
                _by_means(inputs.query[means], coreset_of_heads(coreset, means), options.scale, dropout_p),
            )
            return torch.cat(outs).index_select(0, torch.cat((fitted, means)).argsort())
        coreset = coreset._replace(by_means=None)
    query, scale = inputs.query, options.scale
    if near is None:
        sums, numerator_of = _far_sums(query, coreset, scale, dropout_p)
    else:
        sums, numerator_of = _near_and_far_sums(inputs, coreset, near, scale, dropout_p)
    numerator, (denominator, unfitted, size, total) = sums[..., :-4], sums[..., -4:].split(1, dim=2)
    positive = unfitted > torch.maximum(LEAST_DENOMINATOR * size, LEAST_SUM * total)
    positive = positive if coreset.by_means is None else positive & ~coreset.by_means
    low, high = FIT_RANGE
    safe = positive & (denominator > low * unfitted) & (denominator < high * unfitted)
    out = numerator / torch.where(safe, denominator, 1.0)

    def repaired(some: slice) -> Tensor:
        own, own_positive = coreset_of_heads(coreset, some), positive[some]
        second = numerator_of(some) / torch.where(own_positive, unfitted[some], 1.0)
        if is_fixed(query) or dropout_p > 0.0 or not bool((safe[some] | own_positive).all()):
            second = torch.where(own_positive, second, _by_means(query[some], own, scale, dropout_p))
        return torch.where(safe[some], out[some], second)

    if is_fixed(query):
        return repaired(slice(None))
    # One head at a time, because rounding in a product of several heads could depend on the other heads.
    is_safe = safe.flatten(1).all(1).tolist()
    if all(is_safe):
        return out
    heads = (slice(a, a + 1) for a in range(len(is_safe)))
    return torch.cat([out[a] if good else repaired(a) for a, good in zip(heads, is_safe, strict=True)])


def _block_q(q_len: int, coreset: Coreset) -> int:
    """Queries that are processed at a time, as many as their scores fit the cache of the CPU."""
    if coreset.key.device.type != "cpu":
        return q_len
    return ceil_div(q_len, ceil_div(q_len * coreset.key.shape[1], SCORES))


def _by_means(query: Tensor, coreset: Coreset, scale: float, dropout_p: float) -> Tensor:
    """Attention of queries (BH, Nq, D) to the means of the clusters: (BH, Nq, Dv) in the accumulation dtype."""
    blocks, dtype = pad_to_blocks(query, _block_q(query.shape[1], coreset)), query.dtype
    keys, means, bias = (
        coreset.key.to(dtype)[:, None],
        coreset.value.to(dtype)[:, None],
        coreset.log_count[:, None, None],
    )
    out = partial_attention(blocks, keys, means, bias, scale=scale, dropout_p=dropout_p).out
    return out.flatten(1, 2)[:, : query.shape[1]].to(coreset.key.dtype)


_NumeratorOf = Callable[[slice], Tensor]


def _far_sums(query: Tensor, coreset: Coreset, scale: float, dropout_p: float) -> tuple[Tensor, _NumeratorOf]:
    """The sums over the landmarks (BH, Nq, Dv + 4), up to a factor of each query, and how to get the unfitted one."""
    q_len, dtype, acc_dtype = query.shape[1], query.dtype, coreset.key.dtype
    # The factor of a query is another one than that of `partial_attention`, which dropout needs.
    by_product = dropout_p == 0.0 and use_product(query, coreset.key, coreset.weights, coreset.bias)

    def sums_of(weights: Tensor, some: slice = slice(None), dropout_p: float = 0.0) -> Tensor:
        queries, keys, bias, weights = query[some], coreset.key[some], coreset.bias[some], weights[some]
        if by_product:
            return product_attention(queries, keys, weights, bias, scale, False)[0]
        blocks = pad_to_blocks(queries, _block_q(q_len, coreset)), keys.to(dtype)[:, None], weights.to(dtype)[:, None]
        part = partial_attention(*blocks, bias[:, None, None], scale=scale, dropout_p=dropout_p)
        return part.out.flatten(1, 2)[:, :q_len].to(acc_dtype)

    sums = sums_of(coreset.weights)
    if dropout_p > 0.0:
        sums = torch.cat((sums_of(coreset.weights[..., :-4], dropout_p=dropout_p), sums[..., -4:]), 2)
    return sums, lambda some: sums_of(coreset.unfitted, some, dropout_p)


def _near_and_far_sums(
    inputs: Inputs, coreset: Coreset, near: NearKeys, scale: float, dropout_p: float
) -> tuple[Tensor, _NumeratorOf]:
    """`_far_sums` with the near keys, whose weights are exact."""
    query, q_len, block_q = inputs.query.to(coreset.key.dtype), inputs.query.shape[1], near_block_q(near.key.shape[2])
    # On the CPU a power of two takes an eighth of the time of one of e.
    factor = scale * LOG2_E
    logits = pad_to_blocks(products(query, coreset.key * factor, coreset.bias * LOG2_E), block_q)
    scores = pad_to_blocks(query * factor, block_q) @ near.key.to(query.dtype).mT
    if inputs.mean is not None:
        scores = scores - pad_to_blocks(query @ (inputs.mean * factor).mT, block_q)
    scores = scores if near.bias is None else scores + near.bias.unsqueeze(2)
    row_max = safe_row_max(torch.maximum(logits.detach().amax(3), scores.detach().amax(3)).unsqueeze(3))
    # In place: autograd needs the powers only.
    basis, exact = ((x - row_max if x.requires_grad else x.sub_(row_max)).exp2_() for x in (logits, scores))
    counted = count_near_keys(basis, near.weight, near.key_index).to(basis.dtype).clamp(-MAX_COUNTED, MAX_COUNTED)
    counted = counted if near.bias is None else counted.masked_fill(near.bias.unsqueeze(2) == -torch.inf, 0.0)
    pairs = exact - counted

    def sums_of(basis: Tensor, weights: Tensor) -> Tensor:
        return products(_unblocked(basis, q_len), weights.mT)

    drop = functools.partial(torch.nn.functional.dropout, p=dropout_p)
    kept_basis, kept_pairs = (drop(basis), drop(pairs)) if dropout_p > 0.0 else (basis, pairs)
    near_sums = _unblocked(kept_pairs @ near.value.to(query.dtype), q_len)
    total, size = (_unblocked(x.sum(3, keepdim=True), q_len) for x in (pairs, exact + counted.abs()))
    near_sums = torch.cat((near_sums, total, total, size, torch.zeros_like(size)), 2)
    sums = sums_of(basis, coreset.weights)
    if dropout_p > 0.0:
        sums = torch.cat((sums_of(kept_basis, coreset.weights[..., :-4]), sums[..., -4:]), 2)
    return sums + near_sums, lambda some: sums_of(kept_basis[some], coreset.unfitted[some]) + near_sums[some, :, :-4]


def _unblocked(x: Tensor, q_len: int) -> Tensor:
    """Undo `pad_to_blocks`: (BH, T, block_q, F) -> (BH, Nq, F). The backward of a slice would fill a whole tensor."""
    x = x.flatten(1, 2)
    return x if x.shape[1] == q_len else x[:, :q_len]
