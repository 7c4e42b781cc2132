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
- Each block of queries attends to the keys around it exactly. What the landmarks count for these keys is subtracted.

All exponentials are relative to a maximum. The matrices of the size of K_cc are float64, because the Nystrom weights of
neighboring landmarks are large numbers that nearly cancel.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.blocks import ceil_div, chunked_over_heads, inverse, pad_to_blocks, take, valid_first
from hf_efficient_attn.ops.coreset import candidate_positions, draw_apart, gumbel_numbers, nearest, regularized_solve
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.onednn import product_attention, use_product
from hf_efficient_attn.ops.partial import LOG2_E, accumulation_dtype, partial_attention, safe_row_max
from hf_efficient_attn.ops.sampling import stratified_ranks

# t: how much less the kernel of the weights distinguishes keys than the scores do. Of .5, .6, .7, .85 and 1, .7 has the
# least error on activations of BERT and ViT.
TEMPERATURE = 0.7
# Relative to the unit diagonal of K_cc.
RIDGE = 1e-3
# Of the weight of a key in the draw, of that in the mean of its cluster, and the smallest logarithm of the latter.
DRAW_POWER, POWER, LEAST_LOG_WEIGHT = 0.85, 0.5, -60.0
# A denominator must be this share of the sum of its terms' sizes, and a fitted one within these multiples of the
# unfitted one. Otherwise the weights of the next safer kind are used for the query.
LEAST_DENOMINATOR, FIT_RANGE = 0.01, (0.6, 1.6)
# The same relative to the sum of the exponentials. The gradient divides by the square.
LEAST_SUM = 1e-10
# Smallest size of the weights of a landmark, as a share of the largest.
LEAST_SIZE = 1e-25
# A probe for which no landmark counts more fits nothing. The gradient divides by the square of this.
LEAST_GRAM = 1e-60
# Largest exponent of a landmark in the row of a probe, relative to the sum over all keys. Where a landmark counts far
# more than all keys, the probe says nothing about the other landmarks.
MAX_LOGIT = 20.0
# What landmarks count for a near key is at most about 1 relative to the largest term of its query's sum. More would be
# due to logits that float32 cannot represent, and is cut off so that the output stays finite.
_MAX_COUNTED = 4.0
# Scores of a head that are computed at a time: 4 MiB of float32.
_SCORES = 1 << 20
# Without near keys: keys of several heads that are processed at a time, so that small operations use all cores.
_TOKENS = 1 << 14


class CoresetOptions(NamedTuple):
    """How landmarks are chosen and fitted.

    Attributes:
        num_landmarks: m.
        num_candidates: evenly spaced keys from which the landmarks are made, at least m + block_size.
        num_refinements: steps of Lloyd's algorithm; 0 for landmarks that are keys.
        num_probes: queries whose exact rows fit the weights; 0 for Nystrom weights.
        block_size: keys that each query attends to exactly, or 0.
        near_limit: longest sequence with such keys. In longer ones all of them are landmarks instead.
        scale: factor of the attention scores.
        seed: of the draw of the keys that the clusters begin with.
    """

    num_landmarks: int
    num_candidates: int
    num_refinements: int
    num_probes: int
    block_size: int
    near_limit: int
    scale: float
    seed: int | Tensor


class Landmarks(NamedTuple):
    """m landmarks of each head.

    Attributes:
        key: (BH, m, D), centered.
        value: (BH, m, Dv), the mean value of the candidates of each cluster.
        log_count: (BH, m), the log of the number of these candidates.
        used: bool (BH, m), False beyond the number of landmarks of a sequence.
        own: bool (BH, 1, 1), the sequences with at most m keys. Each of their keys is its own landmark.
    """

    key: Tensor
    value: Tensor
    log_count: Tensor
    used: Tensor
    own: Tensor


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
    """

    key: Tensor
    bias: Tensor
    weights: Tensor
    unfitted: Tensor
    value: Tensor
    log_count: Tensor


class _Inputs(NamedTuple):
    """Query (BH, Nq, D), centered key (BH, Nk, D) and value (BH, Nk, Dv) in the accumulation dtype, valid tokens first.

    `num_keys` and `num_queries` are integers, or int64 (BH, 1) for a batch with padding, in which case `bias`
    (BH, 1, 1, Nk) excludes the padding.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    num_keys: Tensor | int
    num_queries: Tensor | int


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
    inputs, order = _order(query, key, value, key_mask)
    options, near = _plan_near(inputs, options)
    num_candidates = min(options.num_candidates, key.shape[1])
    numbers = gumbel_numbers(options.num_landmarks, num_candidates, options.seed, inputs.key)
    # Integers are the same for all heads.
    num_keys, num_queries = (x if isinstance(x, Tensor) else None for x in (inputs.num_keys, inputs.num_queries))
    plan = () if near is None else (x.expand(key.shape[0], -1, -1) for x in (near.key_index, near.bias))

    def some_heads(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Tensor:
        bias, num_keys, num_queries, *tensors = rest
        own = inputs._replace(query=query, key=key, value=value, bias=bias)
        if num_keys is not None:
            own = own._replace(num_keys=num_keys)
        if num_queries is not None:
            own = own._replace(num_queries=num_queries)
        own_near = None if near is None else _NearPlan(tensors[-2], tensors[-1], near.block_q)
        return _attend_some_heads(own, numbers, own_near, options, dropout_p)

    tensors = (*inputs[:4], num_keys, num_queries, *plan)
    step = _TOKENS // key.shape[1] if near is None else _SCORES // (key.shape[1] * options.num_landmarks)
    out = chunked_over_heads(some_heads, *tensors, step=max(1, step)).to(value.dtype)
    if order is None or key_mask is None:
        return out
    return take(out, inverse(order)).masked_fill(~key_mask[:, :, None], 0.0)


def _order(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> tuple[_Inputs, Tensor | None]:
    """The inputs, with the keys not yet centered, and the order that puts the valid tokens first, or None."""
    acc_dtype, q_len, kv_len = accumulation_dtype(key.dtype), query.shape[1], key.shape[1]
    query, key, value = (x.to(acc_dtype) for x in (query, key, value))
    if key_mask is None:
        return _Inputs(query, key, value, None, kv_len, q_len), None
    order, num_keys = valid_first(key_mask), key_mask.sum(1, keepdim=True)
    key, value = take(key, order), take(value, order)
    valid = torch.arange(kv_len, device=key.device) < num_keys
    bias = mask_bias(valid, acc_dtype)[:, None, None]
    if q_len != kv_len:
        return _Inputs(query, key, value, bias, num_keys, q_len), None
    return _Inputs(take(query, order), key, value, bias, num_keys, num_keys), order


def _center(inputs: _Inputs) -> _Inputs:
    """Subtract the mean of the valid keys, which changes all scores of a query alike."""
    key, num_keys = inputs.key, inputs.num_keys
    if isinstance(num_keys, int):
        return inputs._replace(key=key - key.mean(1, keepdim=True))
    valid = torch.arange(key.shape[1], device=key.device) < num_keys
    key = key.masked_fill(~valid.unsqueeze(2), 0.0)
    mean = key.sum(1, keepdim=True) / num_keys.clamp(min=1).unsqueeze(2)
    return inputs._replace(key=(key - mean).masked_fill(~valid.unsqueeze(2), 0.0))


class _NearPlan(NamedTuple):
    """The near keys of each block of `block_q` queries.

    Attributes:
        key_index: int64 (BH or 1, T, w), the near keys.
        bias: (BH or 1, T, w), -inf for what is not a near key.
        block_q: queries of a block.
    """

    key_index: Tensor
    bias: Tensor
    block_q: int


class _NearKeys(NamedTuple):
    """The near keys of each block: key (BH, T, w, D), value (BH, T, w, Dv) and the scores' bias (BH, T, w).

    What the landmarks count for a near key is exp(scale <q, c> + bias of the landmark) @ weight, weight (BH, T, w, m).
    """

    key: Tensor
    value: Tensor
    bias: Tensor
    weight: Tensor


def _near_block_q(width: int) -> int:
    """Queries of a block that shares `width` near keys."""
    return max(1, width // 2)


def _plan_near(inputs: _Inputs, options: CoresetOptions) -> tuple[CoresetOptions, _NearPlan | None]:
    """The near keys, and the options with the largest number of landmarks of a sequence.

    Without padding a sequence has either near keys or more landmarks instead. In a padded batch this depends on the
    sequence, so that there is room for both.
    """
    width, num_keys, device = options.block_size, inputs.num_keys, inputs.key.device
    q_len, all_landmarks = inputs.query.shape[1], options.num_landmarks + options.block_size
    without = not width or q_len != inputs.key.shape[1]
    if without or (isinstance(num_keys, int) and num_keys > options.near_limit):
        return options._replace(num_landmarks=all_landmarks), None
    block_q = _near_block_q(width)
    first = torch.arange(ceil_div(q_len, block_q), device=device) * block_q - (width - block_q) // 2
    if isinstance(num_keys, int):
        index = first.clamp(0, num_keys - width)[None, :, None] + torch.arange(width, device=device)
        return options, _NearPlan(index, torch.zeros(index.shape, dtype=inputs.key.dtype, device=device), block_q)
    with_near = (num_keys > all_landmarks) & (num_keys <= options.near_limit)
    if not torch.compiler.is_compiling() and not bool(with_near.any()):
        return options._replace(num_landmarks=all_landmarks), None
    start = torch.minimum(first.clamp(min=0), (num_keys - width).clamp(min=0))
    index = start.unsqueeze(2) + torch.arange(width, device=device)
    used = (index < num_keys.unsqueeze(2)) & with_near.unsqueeze(2)
    plan = _NearPlan(index.clamp(max=inputs.key.shape[1] - 1), mask_bias(used, inputs.key.dtype), block_q)
    return options._replace(num_landmarks=all_landmarks), plan


def _attend_some_heads(
    inputs: _Inputs, numbers: Tensor, near: _NearPlan | None, options: CoresetOptions, dropout_p: float
) -> Tensor:
    """Make the landmarks, weigh them and attend: (BH, Nq, Dv) in the accumulation dtype."""
    inputs = _center(inputs)
    landmarks = _choose_landmarks(inputs, numbers, options, near)
    coreset, near_weights = _weigh(inputs, landmarks, options, near)
    gathered = None if near is None or near_weights is None else _near_keys(inputs, near, near_weights)
    return _attend(inputs.query, coreset, gathered, options, dropout_p)


def _choose_landmarks(inputs: _Inputs, numbers: Tensor, options: CoresetOptions, near: _NearPlan | None) -> Landmarks:
    """Draw keys among the candidates, and move them to the means of their clusters."""
    (batch_heads, kv_len), device = inputs.key.shape[:2], inputs.key.device
    count, num_keys = options.num_landmarks, inputs.num_keys
    # The valid tokens are the first.
    mask = None if isinstance(num_keys, int) else torch.arange(kv_len, device=device) < num_keys
    position, valid = candidate_positions(mask, kv_len, options.num_candidates, device)
    position = position.expand(batch_heads, -1)
    keys, values = take(inputs.key, position), take(inputs.value, position)
    root = TEMPERATURE * abs(options.scale) ** 0.5
    points = keys.detach() * root
    pivot, selected = draw_apart(points, DRAW_POWER, numbers, valid, count)
    own = torch.zeros(batch_heads, 1, 1, dtype=torch.bool, device=device)
    if isinstance(num_keys, Tensor):
        own = (num_keys <= count).unsqueeze(2)
        if near is not None:
            # A sequence with near keys has fewer landmarks. The first keys of a draw are a draw of fewer.
            few = torch.where((num_keys > count) & (num_keys <= options.near_limit), count - options.block_size, count)
            selected = selected & (torch.arange(count, device=device) < few)
    norm = (keys * root).square().sum(2)
    norm = norm if valid is None else norm.masked_fill(~valid, 0.0)
    weight = (POWER * (norm - norm.amax(1, keepdim=True))).clamp(min=LEAST_LOG_WEIGHT).exp().unsqueeze(2)
    exists = torch.ones_like(weight) if valid is None else valid.unsqueeze(2).to(weight.dtype)
    pivots, weight = take(keys, pivot), weight * exists
    first = (torch.arange(batch_heads, device=device) * count)[:, None]

    def cluster_sums(cluster: Tensor, x: Tensor) -> Tensor:
        sums = x.new_zeros(batch_heads * count, x.shape[2])
        return sums.index_add(0, (cluster + first).flatten(), x.flatten(0, 1)).view(batch_heads, count, -1)

    weighted = torch.cat((keys * weight, weight), 2)
    landmarks = pivots
    cluster = nearest(points, landmarks.detach() * root, selected)
    for step in range(1, options.num_refinements + 1):
        # Only the last means need a gradient: the clusters have none.
        with torch.set_grad_enabled(torch.is_grad_enabled() and step == options.num_refinements):
            sums = cluster_sums(cluster, weighted)
            total = sums[..., -1:]
            means = torch.where(total > 0, sums[..., :-1] / torch.where(total > 0, total, 1.0), pivots)
            landmarks = torch.where(own, pivots, means)
        if step < options.num_refinements:
            cluster = nearest(points, landmarks.detach() * root, selected)
    sums = cluster_sums(cluster, torch.cat((values * exists, exists), 2))
    value, number = sums[..., :-1], sums[..., -1].masked_fill(~selected, 0.0)
    value = torch.where(own, take(values, pivot), value / number.clamp(min=1.0).unsqueeze(2))
    log_count = torch.where(own.squeeze(2), torch.zeros_like(number).masked_fill(~selected, -torch.inf), number.log())
    return Landmarks(landmarks, value, log_count, selected, own)


def _weigh(
    inputs: _Inputs, landmarks: Landmarks, options: CoresetOptions, near: _NearPlan | None
) -> tuple[Coreset, Tensor | None]:
    """Compute the Nystrom weights and fit them. The second result is what the landmarks count for a key, (BH, N, m)."""
    key, value = inputs.key, inputs.value
    acc_dtype, square, count = key.dtype, TEMPERATURE**2 * abs(options.scale), options.num_landmarks
    closed = ~landmarks.used.unsqueeze(2)
    rows, probe = landmarks.key * square, None
    if options.num_probes:
        half = torch.full((key.shape[0], 1), 0.5, dtype=torch.float64, device=key.device)
        probe = stratified_ranks(options.num_probes, inputs.num_queries, half).expand(key.shape[0], -1)
        rows = torch.cat((rows, take(inputs.query, probe) * options.scale), 1)
    # One pass over the keys for the rows of the kernel and those of the probes.
    out, lse = (x[:, 0] for x in partial_attention(rows[:, None], key[:, None], value[:, None], inputs.bias, scale=1.0))
    exact_out, exact_lse = out[:, count:], lse[:, count:].unsqueeze(2)
    out, lse = out[:, :count], lse[:, :count]
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
    exponent, similarity = shift - half_norm, None
    probes = None
    if probe is not None:
        probes = _make_probes(probe, rows[:, count:], exact_out, exact_lse, landmarks, exponent)
    # One solve for all right sides, each of which takes time. Weights of near keys need the whole inverse.
    rights = [] if probes is None else [probes.basis.mT]
    rights = rights if near is None else [one.expand_as(kernel)]
    solved = regularized_solve(kernel, torch.cat((sums, *rights), 2), RIDGE)
    weights = unfitted = solved[..., : sums.shape[2]]
    solved = solved[..., sums.shape[2] :]
    if near is not None:
        # Of key and landmark, relative to exp(shift). A power of two is faster than one of e.
        offset = (-half_norm - shift).masked_fill(closed | landmarks.own, -torch.inf).mT * LOG2_E
        exponents = torch.baddbmm(offset, key.double() * (square**0.5 * LOG2_E), points.mT)
        similarity = exponents.clamp_(max=0.0).exp2_()
    if probes is not None:
        missing = probes.sums - probes.basis @ unfitted
        if near is not None and similarity is not None:
            missing = missing - _near_sums_of_probes(inputs, probes, near, similarity, solved)
        smooth = solved if near is None else solved @ probes.basis.mT
        weights = unfitted + _fit(probes.basis, smooth, missing, landmarks).masked_fill(closed | landmarks.own, 0.0)
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
    )
    return coreset, None if similarity is None else (similarity @ (solved / size.mT)).to(acc_dtype)


class _Probes(NamedTuple):
    """Queries with exact rows.

    Attributes:
        token: int64 (BH, P), which queries.
        query: float64 (BH, P, D), times the scale of the scores.
        exact_lse: float64 (BH, P, 1). All of the following is relative to its exponential.
        sums: float64 (BH, P, Dv + 1), the exact numerators and denominators.
        basis: float64 (BH, P, m), exp(scale <q, c> + exponent) for the landmarks.
    """

    token: Tensor
    query: Tensor
    exact_lse: Tensor
    sums: Tensor
    basis: Tensor


def _make_probes(
    token: Tensor, query: Tensor, out: Tensor, lse: Tensor, landmarks: Landmarks, exponent: Tensor
) -> _Probes:
    """The probes `token` from their queries (BH, P, D), times the scale, and their exact out and lse (BH, P, 1)."""
    query, lse = query.double(), lse.double().masked_fill(lse == -torch.inf, 0.0)
    logits = query @ landmarks.key.double().mT + exponent.mT - lse
    basis = logits.masked_fill(~landmarks.used.unsqueeze(1), -torch.inf).clamp(max=MAX_LOGIT).exp()
    return _Probes(token, query, lse, torch.cat((out.double(), torch.ones_like(lse)), 2), basis)


def _near_sums_of_probes(
    inputs: _Inputs, probes: _Probes, plan: _NearPlan, similarity: Tensor, inverse: Tensor
) -> Tensor:
    """What near keys add to the sums of the probes, without what the landmarks count for them: (BH, P, Dv + 1).

    `similarity` (BH, Nk, m) of key and landmark times `inverse` (BH, m, m) is what the landmarks count for each key.
    """
    index = plan.key_index.expand(inputs.key.shape[0], -1, -1)
    block = (probes.token // plan.block_q).unsqueeze(2).expand(-1, -1, index.shape[2])
    index, bias = index.gather(1, block), plan.bias.expand(inputs.key.shape[0], -1, -1).gather(1, block)
    keys, values = take(inputs.key, index).double(), take(inputs.value, index).double()
    scores = (keys @ probes.query.unsqueeze(3)).squeeze(3) + bias.double()
    excluded, solved = (bias == -torch.inf).unsqueeze(3), (probes.basis @ inverse).unsqueeze(3)
    counted = (take(similarity, index).masked_fill(excluded, 0.0) @ solved).squeeze(3)
    pairs = (scores - probes.exact_lse).exp() - counted.clamp(-_MAX_COUNTED, _MAX_COUNTED)
    return torch.cat((pairs.unsqueeze(2) @ values, pairs.sum(2)[:, :, None, None]), 3).squeeze(2)


def _fit(basis: Tensor, smooth: Tensor, missing: Tensor, landmarks: Landmarks) -> Tensor:
    """What to add to the weights (BH, m, Dv + 1), so that the probes miss less.

    Ridge regression in the metric of A = K_cc + ridge I, (A + B^T B / size)^-1 B^T missing / size, where B is the basis
    (BH, P, m). By the identity of Woodbury this is A^-1 B^T (size I + B A^-1 B^T)^-1 missing, with the already known
    `smooth` = A^-1 B^T (BH, m, P).
    """
    used = landmarks.used.sum(1).clamp(min=1)
    size = (basis.square().sum((1, 2)) / used)[:, None, None].clamp(min=LEAST_GRAM)
    return smooth @ regularized_solve(basis @ smooth / size, missing / size, 1.0)


def _near_keys(inputs: _Inputs, plan: _NearPlan, weights: Tensor) -> _NearKeys:
    """Gather the near keys of all blocks."""
    index, bias = (x.expand(inputs.key.shape[0], -1, -1) for x in (plan.key_index, plan.bias))
    weights = take(weights, index).masked_fill((bias == -torch.inf).unsqueeze(3), 0.0)
    return _NearKeys(take(inputs.key, index), take(inputs.value, index), bias, weights)


def _attend(
    query: Tensor, coreset: Coreset, near: _NearKeys | None, options: CoresetOptions, dropout_p: float
) -> Tensor:
    """Attention of queries (BH, Nq, D) to the coreset and to near keys: (BH, Nq, Dv) in the accumulation dtype."""
    q_len, scale = query.shape[1], options.scale
    if near is None:
        sums, numerator_of = _far_sums(query, coreset, scale, dropout_p)
    else:
        sums, numerator_of = _near_and_far_sums(query, coreset, near, scale, dropout_p)
    numerator, (denominator, unfitted, size, total) = sums[..., :-4], sums[..., -4:].split(1, dim=2)
    positive = unfitted > torch.maximum(LEAST_DENOMINATOR * size, LEAST_SUM * total)
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
    query: Tensor, coreset: Coreset, near: _NearKeys, scale: float, dropout_p: float
) -> tuple[Tensor, Callable[[], Tensor]]:
    """`_far_sums` with the near keys, whose weights are exact."""
    q_len, block_q = query.shape[1], _near_block_q(near.key.shape[2])
    logits = torch.baddbmm(coreset.bias.unsqueeze(1), query, coreset.key.mT, alpha=scale)
    logits = pad_to_blocks(logits, block_q)
    scores = pad_to_blocks(query, block_q) @ near.key.mT * scale + near.bias.unsqueeze(2)
    row_max = safe_row_max(torch.maximum(logits.detach().amax(3), scores.detach().amax(3)).unsqueeze(3))
    # On the CPU a power of two takes an eighth of the time of one of e.
    basis, exact = (((x - row_max) * LOG2_E).exp2() for x in (logits, scores))
    counted = basis @ near.weight.mT
    pairs = exact - counted.clamp(-_MAX_COUNTED, _MAX_COUNTED)
    drop = functools.partial(torch.nn.functional.dropout, p=dropout_p)
    kept_basis, kept_pairs = (drop(basis), drop(pairs)) if dropout_p > 0.0 else (basis, pairs)

    def sums_of(basis: Tensor, weights: Tensor) -> Tensor:
        return basis.flatten(1, 2)[:, :q_len] @ weights

    near_sums = (kept_pairs @ near.value).flatten(1, 2)[:, :q_len]
    total, size = (x.sum(3).flatten(1)[:, :q_len].unsqueeze(2) for x in (pairs, exact + (exact - pairs).abs()))
    numerator = sums_of(kept_basis, coreset.weights[..., :-4]) + near_sums
    sums = sums_of(basis, coreset.weights[..., -4:]) + torch.cat((total, total, size, torch.zeros_like(size)), 2)
    return torch.cat((numerator, sums), 2), lambda: sums_of(kept_basis, coreset.unfitted) + near_sums
