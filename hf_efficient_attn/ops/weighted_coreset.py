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

All exponentials are relative to a maximum. The matrices of the size of K_cc are float64, because the Nystrom weights of
neighboring landmarks are large numbers that nearly cancel.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.blocks import ceil_div, chunked_over_heads, inverse, pad_to_blocks, take
from hf_efficient_attn.ops.coreset import gumbel_numbers, regularized_solve
from hf_efficient_attn.ops.coreset_landmarks import (
    TEMPERATURE,
    CoresetOptions,
    Inputs,
    Landmarks,
    center,
    choose_landmarks,
    order_tokens,
)
from hf_efficient_attn.ops.coreset_near_keys import (
    MAX_COUNTED,
    ExactRows,
    NearKeys,
    NearPlan,
    gather_near_keys,
    heads_with_near_keys,
    near_block_q,
    near_sums_of_rows,
    plan_near_keys,
)
from hf_efficient_attn.ops.onednn import product_attention, products, use_product
from hf_efficient_attn.ops.partial import LOG2_E, Partial, partial_attention, safe_row_max
from hf_efficient_attn.ops.sampling import stratified_ranks

# Relative to the unit diagonal of K_cc.
RIDGE = 1e-3
# A denominator must be this share of the sum of its terms' sizes, and a fitted one within these multiples of the
# unfitted one. Otherwise the weights of the next safer kind are used for the query.
LEAST_DENOMINATOR, FIT_RANGE = 0.01, (0.6, 1.6)
# The same relative to the sum of the exponentials. The gradient divides by the square.
LEAST_SUM = 1e-10
# A head attends to the means of its clusters if their squared error is below this share of that of the fitted weights,
# whose denominators count as this at least.
BETTER, LEAST_LEFT = 0.5, 0.1
# Smallest size of the weights of a landmark, as a share of the largest.
LEAST_SIZE = 1e-25
# A probe for which no landmark counts more fits nothing. The gradient divides by the square of this.
LEAST_GRAM = 1e-60
# Largest exponent of a landmark in the row of a probe, relative to the sum over all keys. Where a landmark counts far
# more than all keys, the probe says nothing about the other landmarks.
MAX_LOGIT = 20.0
# Scores of a head that are computed at a time: 4 MiB of float32.
_SCORES = 1 << 20
# Keys of several heads that are processed at a time, so that small operations use all cores.
_TOKENS = 1 << 14


class Coreset(NamedTuple):
    """Weighted landmarks: exp(scale <q, key> + bias) @ weights are the sums of a query.

    Attributes:
        key: (BH, m, D), centered.
        bias: (BH, m), -inf for an unused landmark.
        weights: (BH, m, Dv + 4), for the numerator, the denominator, the unfitted denominator, the sum of the sizes of
            its terms, and the sum of exp(scale <q, key> + bias).
        unfitted: (BH, m, Dv), for the unfitted numerator.
        value: (BH, m, Dv), as in `Landmarks`.
        log_count: (BH, m), as in `Landmarks`.
        by_means: bool (BH, 1, 1), heads whose queries attend to the means `value` instead; None: no head.
    """

    key: Tensor
    bias: Tensor
    weights: Tensor
    unfitted: Tensor
    value: Tensor
    log_count: Tensor
    by_means: Tensor | None


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
    inputs, order = order_tokens(query, key, value, key_mask)
    num_candidates = min(options.num_candidates, key.shape[1])
    numbers = gumbel_numbers(options.num_landmarks + options.block_size, num_candidates, options.seed, inputs.key)
    near = heads_with_near_keys(inputs, options)
    if near is None or torch.compiler.is_compiling():
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
        return out.to(value.dtype)
    return take(out.to(value.dtype), inverse(order)).masked_fill(~key_mask[:, :, None], 0.0)


def _of_heads(index: Tensor, inputs: Inputs) -> Inputs:
    """The inputs of some heads."""
    if len(index) == inputs.key.shape[0]:
        return inputs
    some: tuple[Any, ...] = tuple(x.index_select(0, index) if isinstance(x, Tensor) else x for x in inputs)
    return Inputs(*some)


def _attend_alike(
    inputs: Inputs, numbers: Tensor, options: CoresetOptions, near: Tensor | None, dropout_p: float
) -> Tensor:
    """Attend in heads that all have near keys or all have none: (BH, Nq, Dv) in the accumulation dtype.

    With `torch.compile` there is no choice by data. All heads then have room for both, and `near` (BH,) says which have
    near keys.
    """
    both, kv_len = torch.compiler.is_compiling(), inputs.key.shape[1]
    if near is None or both:
        options = options._replace(num_landmarks=options.num_landmarks + options.block_size)
    # Integers are the same for all heads.
    counts = (x if isinstance(x, Tensor) else None for x in (inputs.num_keys, inputs.num_queries))

    def some_heads(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Tensor:
        bias, num_keys, num_queries, own_near = rest
        own = inputs._replace(query=query, key=key, value=value, bias=bias)
        own = own if num_keys is None else own._replace(num_keys=num_keys)
        own = center(own if num_queries is None else own._replace(num_queries=num_queries))
        landmarks = choose_landmarks(own, numbers, options, own_near if both else None)
        plan = None if near is None else plan_near_keys(own, options.block_size, own_near if both else None)
        coreset, weights = _weigh(own, landmarks, options, plan)
        gathered = None if plan is None or weights is None else gather_near_keys(own, plan, weights)
        return _attend(own.query, coreset, gathered, options, dropout_p)

    step = _TOKENS // kv_len if near is None else _SCORES // (kv_len * options.num_landmarks)
    return chunked_over_heads(some_heads, *inputs[:4], *counts, near, step=max(1, step))


def _weigh(
    inputs: Inputs, landmarks: Landmarks, options: CoresetOptions, near: NearPlan | None
) -> tuple[Coreset, Tensor | None]:
    """Compute the Nystrom weights and fit them. The second result is what the landmarks count for a key, (BH, N, m)."""
    key, value = inputs.key, inputs.value
    acc_dtype, square, count = key.dtype, TEMPERATURE**2 * abs(options.scale), options.num_landmarks
    closed = ~landmarks.used.unsqueeze(2)
    queries, probe = landmarks.key * square, None
    if options.num_probes:
        half = torch.full((key.shape[0], 1), 0.5, dtype=torch.float64, device=key.device)
        probe = stratified_ranks(options.num_probes, inputs.num_queries, half).expand(key.shape[0], -1)
        queries = torch.cat((queries, take(inputs.query, probe) * options.scale), 1)
    # One pass over the keys for the rows of the kernel and those of the probes.
    sums = partial_attention(queries[:, None], key[:, None], value[:, None], inputs.bias, scale=1.0)
    all_out, all_lse = (x[:, 0] for x in sums)
    out, lse = all_out[:, :count], all_lse[:, :count]
    points = landmarks.key.double() * square**0.5
    half_norm = 0.5 * points.square().sum(2, keepdim=True)
    # Sums over the keys of exp(<x, y> - |x|^2 / 2) for a landmark x, relative to exp(shift).
    lse = (lse.unsqueeze(2).double() - half_norm).masked_fill(closed | landmarks.own, -torch.inf)
    shift = lse.amax(1, keepdim=True)
    shift = shift.masked_fill(shift == -torch.inf, 0.0)
    sums = torch.cat((out.double(), torch.ones_like(lse)), 2) * (lse - shift).exp()
    # Powers of two take less time than those of e.
    scaled = points * LOG2_E
    kernel = (torch.baddbmm(-half_norm * LOG2_E, scaled, points.mT) - half_norm.mT * LOG2_E).clamp(max=0.0).exp2()
    one = torch.eye(kernel.shape[1], dtype=kernel.dtype, device=kernel.device)
    if inputs.bias is not None:  # without padding all landmarks are used
        kernel = torch.where(closed | closed.mT, one, kernel)
    exponent, similarity, rows, by_means = shift - half_norm, None, None, None
    if probe is not None:
        exact = Partial(all_out[:, count:], all_lse[:, count:])
        rows = _exact_rows(probe, queries[:, count:], exact, landmarks, exponent)
    # One solve for all right sides, each of which takes time. Weights of near keys need the whole inverse.
    rights = [] if rows is None else [rows.basis.mT]
    rights = rights if near is None else [one.expand_as(kernel)]
    solved = regularized_solve(kernel, torch.cat((sums, *rights), 2), RIDGE)
    weights = unfitted = solved[..., : sums.shape[2]]
    solved = solved[..., sums.shape[2] :]
    if near is not None:
        # Of key and landmark, relative to exp(shift). A power of two is faster than one of e.
        offset = (-half_norm - shift).masked_fill(closed | landmarks.own, -torch.inf).squeeze(2) * LOG2_E
        exponents = products(key, (points * (square**0.5 * LOG2_E)).to(acc_dtype), offset.to(acc_dtype))
        similarity = exponents.clamp_(max=0.0).exp2_()
    if rows is not None:
        missing = rows.sums - rows.basis @ unfitted
        if near is not None and similarity is not None:
            missing = missing - near_sums_of_rows(inputs, rows, near, similarity, solved)
        smooth = solved if near is None else solved @ rows.basis.mT
        fit, left = _fit(rows.basis, smooth, missing, landmarks)
        weights = unfitted + fit.masked_fill(closed | landmarks.own, 0.0)
        by_means = _means_are_better(rows, left, landmarks)
    ones = torch.ones_like(landmarks.value[..., :1])
    own = torch.cat((landmarks.value, ones), 2).double()
    weights, unfitted = (torch.where(landmarks.own, own, x) for x in (weights, unfitted))
    # Large and small weights: their size goes into the exponent.
    size = torch.maximum(weights.detach().abs().amax(2, keepdim=True), unfitted.detach().abs().amax(2, keepdim=True))
    size = size.clamp(min=torch.finfo(torch.float64).tiny).maximum(LEAST_SIZE * size.amax(1, keepdim=True))
    size = size.masked_fill(closed, 1.0)
    log_size = size.log() + exponent.masked_fill(landmarks.own, 0.0)
    unfitted, weights = unfitted / size, weights / size
    total = unfitted[..., -1:]
    coreset = Coreset(
        landmarks.key,
        log_size.masked_fill(closed, -torch.inf).squeeze(2).to(acc_dtype),
        torch.cat((weights, total, total.detach().abs(), torch.ones_like(total)), 2).to(acc_dtype),
        unfitted[..., :-1].to(acc_dtype),
        landmarks.value,
        landmarks.log_count,
        by_means,
    )
    return coreset, None if similarity is None else products(similarity, (solved.mT / size).to(acc_dtype))


def _exact_rows(token: Tensor, query: Tensor, exact: Partial, landmarks: Landmarks, exponent: Tensor) -> ExactRows:
    """The rows of the queries (BH, P, D) at `token` (BH, P), times the scale, from their exact attention."""
    query, lse = query.double(), safe_row_max(exact.lse.double()).unsqueeze(2)
    logits = query @ landmarks.key.double().mT + exponent.mT - lse
    basis = logits.masked_fill(~landmarks.used.unsqueeze(1), -torch.inf).clamp(max=MAX_LOGIT).exp()
    return ExactRows(token, query, lse, torch.cat((exact.out.double(), torch.ones_like(lse)), 2), basis)


def _fit(basis: Tensor, smooth: Tensor, missing: Tensor, landmarks: Landmarks) -> tuple[Tensor, Tensor]:
    """What to add to the weights (BH, m, Dv + 1), so that the probes miss less, and what each misses without itself.

    Ridge regression in the metric of A = K_cc + ridge I, (A + B^T B / size)^-1 B^T missing / size, where B is the basis
    (BH, P, m). By the identity of Woodbury this is A^-1 B^T (size I + B A^-1 B^T)^-1 missing, with the already known
    `smooth` = A^-1 B^T (BH, m, P). What a probe misses if the others are fitted, (BH, P, Dv + 1), has a closed form:
    (G^-1 missing)_i / (G^-1)_ii, where G is the matrix that is inverted (the leave-one-out residual of ridge
    regression).
    """
    used = landmarks.used.sum(1).clamp(min=1)
    size = (basis.square().sum((1, 2)) / used)[:, None, None].clamp(min=LEAST_GRAM)
    one = torch.eye(basis.shape[1], dtype=basis.dtype, device=basis.device).expand(basis.shape[0], -1, -1)
    solved = regularized_solve(basis @ smooth / size, torch.cat((missing / size, one), 2), 1.0)
    solved, inverse = solved.split((missing.shape[2], basis.shape[1]), 2)
    left = size * solved.detach() / inverse.detach().diagonal(dim1=1, dim2=2).unsqueeze(2)
    return smooth @ solved, left


@torch.no_grad()
def _means_are_better(rows: ExactRows, left: Tensor, landmarks: Landmarks) -> Tensor:
    """Of which heads attention to the means of the clusters is clearly closer to the exact rows: bool (BH, 1, 1).

    `left` (BH, P, Dv + 1) is what each row misses with weights that are fitted to the others.
    """
    exact, dtype = rows.sums[..., :-1], landmarks.key.dtype
    fitted = (exact - left[..., :-1]) / (1.0 - left[..., -1:]).clamp(min=LEAST_LEFT)
    scores = rows.query.to(dtype) @ landmarks.key.mT + landmarks.log_count.unsqueeze(1)
    means = scores.softmax(2) @ landmarks.value
    of_means, of_fitted = ((x - exact).square().sum((1, 2)) for x in (means, fitted))
    return (of_means < BETTER * of_fitted)[:, None, None] & ~landmarks.own


def _attend(
    query: Tensor, coreset: Coreset, near: NearKeys | None, options: CoresetOptions, dropout_p: float
) -> Tensor:
    """Attention of queries (BH, Nq, D) to the coreset and to near keys: (BH, Nq, Dv) in the accumulation dtype."""
    q_len, scale = query.shape[1], options.scale
    if near is None:
        sums, numerator_of = _far_sums(query, coreset, scale, dropout_p)
    else:
        sums, numerator_of = _near_and_far_sums(query, coreset, near, scale, dropout_p)
    numerator, (denominator, unfitted, size, total) = sums[..., :-4], sums[..., -4:].split(1, dim=2)
    positive = unfitted > torch.maximum(LEAST_DENOMINATOR * size, LEAST_SUM * total)
    positive = positive if coreset.by_means is None else positive & ~coreset.by_means
    low, high = FIT_RANGE
    safe = positive & (denominator > low * unfitted) & (denominator < high * unfitted)
    out = numerator / torch.where(safe, denominator, 1.0)
    if not torch.compiler.is_compiling() and bool(safe.all()):
        return out
    second = numerator_of() / torch.where(positive, unfitted, 1.0)
    blocks = pad_to_blocks(query, _block_q(q_len, coreset))
    means, bias = coreset.value[:, None], coreset.log_count[:, None, None]
    third = partial_attention(blocks, coreset.key[:, None], means, bias, scale=scale, dropout_p=dropout_p).out
    return torch.where(safe, out, torch.where(positive, second, third.flatten(1, 2)[:, :q_len]))


def _block_q(q_len: int, coreset: Coreset) -> int:
    """Queries that are processed at a time, as many as their scores fit the cache."""
    return ceil_div(q_len, ceil_div(q_len * coreset.key.shape[1], _SCORES))


def _far_sums(query: Tensor, coreset: Coreset, scale: float, dropout_p: float) -> tuple[Tensor, Callable[[], Tensor]]:
    """The sums over the landmarks (BH, Nq, Dv + 4), up to a factor of each query, and how to get the unfitted one."""
    q_len, keys, bias = query.shape[1], coreset.key, coreset.bias
    # The factor of a query is another one than that of `partial_attention`, which dropout needs.
    by_product = dropout_p == 0.0 and use_product(query, keys, coreset.weights, bias)

    def sums_of(weights: Tensor, dropout_p: float = 0.0) -> Tensor:
        if by_product:
            sums = weights.new_empty(*query.shape[:2], weights.shape[2])
            for a in range(query.shape[0]):
                product_attention(query[a], keys[a], weights[a], bias[a], scale, sums[a], None)
            return sums
        # The fused kernel of the CPU needs as many numbers of a query as of a value.
        missing = max(0, weights.shape[2] - query.shape[2])
        blocks = pad_to_blocks(pad(query, (0, missing)), _block_q(q_len, coreset))
        padded, own_bias = pad(keys, (0, missing))[:, None], bias[:, None, None]
        part = partial_attention(blocks, padded, weights[:, None], own_bias, scale=scale, dropout_p=dropout_p)
        return part.out.flatten(1, 2)[:, :q_len]

    sums = sums_of(coreset.weights)
    if dropout_p > 0.0:
        sums = torch.cat((sums_of(coreset.weights[..., :-4], dropout_p), sums[..., -4:]), 2)
    return sums, lambda: sums_of(coreset.unfitted, dropout_p)


def _near_and_far_sums(
    query: Tensor, coreset: Coreset, near: NearKeys, scale: float, dropout_p: float
) -> tuple[Tensor, Callable[[], Tensor]]:
    """`_far_sums` with the near keys, whose weights are exact."""
    q_len, block_q = query.shape[1], near_block_q(near.key.shape[2])
    # On the CPU a power of two takes an eighth of the time of one of e.
    factor = scale * LOG2_E
    logits = pad_to_blocks(products(query, coreset.key * factor, coreset.bias * LOG2_E), block_q)
    scores = pad_to_blocks(query * factor, block_q) @ near.key.mT
    scores = scores if near.bias is None else scores + near.bias.unsqueeze(2)
    row_max = safe_row_max(torch.maximum(logits.detach().amax(3), scores.detach().amax(3)).unsqueeze(3))
    # In place: autograd needs the powers only.
    basis, exact = ((x - row_max if x.requires_grad else x.sub_(row_max)).exp2_() for x in (logits, scores))
    counted = basis @ near.weight.mT
    pairs = exact - counted.clamp(-MAX_COUNTED, MAX_COUNTED)

    def sums_of(basis: Tensor, weights: Tensor) -> Tensor:
        return products(basis.flatten(1, 2)[:, :q_len], weights.mT)

    drop = functools.partial(torch.nn.functional.dropout, p=dropout_p)
    kept_basis, kept_pairs = (drop(basis), drop(pairs)) if dropout_p > 0.0 else (basis, pairs)
    near_sums = (kept_pairs @ near.value).flatten(1, 2)[:, :q_len]
    total, size = (x.sum(3).flatten(1)[:, :q_len].unsqueeze(2) for x in (pairs, exact + (exact - pairs).abs()))
    near_sums = torch.cat((near_sums, total, total, size, torch.zeros_like(size)), 2)
    sums = sums_of(basis, coreset.weights)
    if dropout_p > 0.0:
        sums = torch.cat((sums_of(kept_basis, coreset.weights[..., :-4]), sums[..., -4:]), 2)
    return sums + near_sums, lambda: sums_of(kept_basis, coreset.unfitted) + near_sums[..., :-4]
