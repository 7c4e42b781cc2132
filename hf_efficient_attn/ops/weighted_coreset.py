"""Attention to weighted landmarks that represent all keys, and exactly to near keys where attention is local.

The softmax sum of a query q over the keys k_j is approximated through the features exp(scale <q, c_i>) of m landmarks:

    sum_j exp(scale <q, k_j>) [v_j, 1]  ~  sum_i exp(scale <q, c_i> - g(c_i)) U_i,    U = sum_j w_j exp(g(k_j)) [v_j, 1]

- exp(scale <q, k> - g(k)) is interpolated between landmarks, with the kernel exp(-|x - y|^2 / 2) of x = t sqrt(scale) k:
  w_j = (K_cc + ridge I)^-1 K_cj. Keys are centered. g(k) = |x|^2 / 2 + `TILT` scale <q, k> for the mean query q, so that
  what is interpolated varies little. With the first term alone these are Nystrom weights (WildCat, Schroeder & Mackey
  2026).
- A landmark is the weighted mean of a cluster of keys. Clusters begin with keys that are drawn far from each other
  (`hf_efficient_attn.ops.coreset.draw_apart`), and some steps of Lloyd's algorithm follow. A key counts more where g is
  large, because it can have a large score.
- U is fitted to the exact rows of a few probe queries: ridge regression in the metric of K_cc.
- In heads whose attention is local, blocks of queries attend to near keys exactly, and what landmarks count for these
  keys is subtracted (`hf_efficient_attn.ops.near_keys`).
- Where the fit fails, queries attend to the means of the clusters, with the numbers of their keys as weights.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.blocks import pad_to_blocks, take
from hf_efficient_attn.ops.constants import constant
from hf_efficient_attn.ops.coreset import cluster_sums, draw_apart, even_positions, gumbel_numbers, nearest, regularized_solve
from hf_efficient_attn.ops.near_keys import NearField, near_block_q, near_index_of, near_share_of_rows, weigh_keys
from hf_efficient_attn.ops.partial import Partial, accumulation_dtype, exp_, partial_attention
from hf_efficient_attn.ops.precision import LOG2_E
from hf_efficient_attn.ops.random import Seed
from hf_efficient_attn.ops.slices import slice_size, sliced

# t: how much less the kernel distinguishes keys than the scores do. Of .5, .6, .7, .85 and 1, .7 has the least error.
TEMPERATURE = 0.7
# The share of the mean query in g, and the powers of exp(2 g) in the draw of a key and in the mean of its cluster.
TILT, DRAW_POWER, POWER = 0.3, 0.7, 0.5
# Queries of the mean, and the smallest logarithm of a key's weight in the mean of its cluster.
NUM_QUERIES, LEAST_LOG_WEIGHT = 512, -60.0
# Relative to the unit diagonal of K_cc.
RIDGE = 1e-3
# A denominator must be this share of the sum of its terms' sizes, and a fitted one within these multiples of the
# unfitted one. Otherwise the query gets weights of the next safer kind.
LEAST_DENOMINATOR, FIT_RANGE = 0.01, (0.6, 1.6)
# A head attends to the means of its clusters if their squared error on the probes is below this share of that of the
# fitted weights, whose denominators count as `LEAST_LEFT` at least.
BETTER, LEAST_LEFT = 0.5, 0.1
# Smallest size of the weights of a landmark, as a share of the largest; and of the squares of the probes' features.
LEAST_SIZE, LEAST_GRAM = 1e-25, 1e-30
# Largest exponent of a landmark in the row of a probe. A landmark that counts far more than all keys says nothing.
MAX_LOGIT = 20.0


class CoresetOptions(NamedTuple):
    """How landmarks are chosen and fitted.

    Attributes:
        num_landmarks: m.
        num_candidates: evenly spaced keys from which the landmarks are made, at least m + block_size.
        num_refinements: steps of Lloyd's algorithm; 0 for landmarks that are keys.
        num_probes: queries whose exact rows fit the weights; 0 for no fit.
        block_size: keys that each query attends to exactly, or 0.
        near_share: a head has such keys if they hold more than this share of its attention, measured on the probes.
            Other heads have as many more landmarks. With 0, or without probes, all heads have them; with 1 none has.
        scale: factor of the attention scores.
        seed: of the draw of the keys that the clusters begin with.
        dropout_p: probability of dropping a weight from the numerator.
    """

    num_landmarks: int
    num_candidates: int
    num_refinements: int
    num_probes: int
    block_size: int
    near_share: float
    scale: float
    seed: Seed
    dropout_p: float = 0.0


class Rows(NamedTuple):
    """Exact rows of P probe queries.

    Attributes:
        index: int64 (P,), the positions of the probes.
        out: (BH, P, Dv), their exact output.
        lse: (BH, P), the log of their exact sums.
    """

    index: Tensor
    out: Tensor
    lse: Tensor


class Landmarks(NamedTuple):
    """m landmarks of each head, as keys of a softmax, with their clusters.

    Attributes:
        key: c, (BH, m, D).
        points: x of the landmarks, float64 (BH, m, D).
        bias: -g(c), (BH, m).
        tilt: `TILT` scale times the mean query, (BH, 1, D).
        kernel: K_cc, (BH, m, m).
        value: (BH, m, Dv), the mean value of the candidates of each cluster.
        log_count: (BH, m), the log of the number of these candidates; -inf without any.
    """

    key: Tensor
    points: Tensor
    bias: Tensor
    tilt: Tensor
    kernel: Tensor
    value: Tensor
    log_count: Tensor


def weighted_coreset_attention(query: Tensor, key: Tensor, value: Tensor, options: CoresetOptions) -> Tensor:
    """The bidirectional form.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D), with more keys than landmarks and near keys together. None is padding.
        value: (BH, Nk, Dv).
        options: how landmarks are chosen.

    Returns:
        (BH, Nq, Dv) in the accumulation dtype.
    """
    query, key, value = (x.to(accumulation_dtype(key.dtype)) for x in (query, key, value))
    key = key - key.mean(1, keepdim=True)
    rows = _exact_rows(query, key, value, options) if options.num_probes else None
    local = _local_heads(query, key, rows, options)
    if local is None:
        return _attend_alike(query, key, value, rows, _without_near_keys(options))
    outs, some = [], [x.nonzero()[:, 0] for x in (~local, local)]
    for index, own in zip(some, (_without_near_keys(options), options), strict=True):
        if len(index) == len(key):
            return _attend_alike(query, key, value, rows, own)
        if len(index):
            tensors = (x.index_select(0, index) for x in (query, key, value))
            of_rows = None if rows is None else Rows(rows.index, *(x.index_select(0, index) for x in rows[1:]))
            outs.append(_attend_alike(*tensors, of_rows, own))
    return torch.cat(outs).index_select(0, torch.cat(some).argsort())


def _without_near_keys(options: CoresetOptions) -> CoresetOptions:
    return options._replace(num_landmarks=options.num_landmarks + options.block_size, block_size=0)


def _exact_rows(query: Tensor, key: Tensor, value: Tensor, options: CoresetOptions) -> Rows:
    index = constant(_middle_positions, query.shape[1], options.num_probes, device=key.device)
    part = partial_attention(query.index_select(1, index)[:, None], key[:, None], value[:, None], scale=options.scale)
    return Rows(index, part.out[:, 0], part.lse[:, 0])


def _middle_positions(length: int, count: int, device: torch.device) -> Tensor:
    """The middle of each of `count` equal parts of the sequence."""
    return ((torch.arange(count, dtype=torch.float64, device=device) + 0.5) * length / count).long()


@torch.no_grad()
def _local_heads(query: Tensor, key: Tensor, rows: Rows | None, options: CoresetOptions) -> Tensor | None:
    """Which heads have near keys: bool (BH,), or None if no head has."""
    if not options.block_size or query.shape[1] != key.shape[1] or options.near_share >= 1.0:
        return None
    if options.near_share == 0.0 or rows is None:
        return key.new_ones(len(key), dtype=torch.bool)
    index, lse = rows.index[::3], rows.lse[:, ::3]
    share = near_share_of_rows(query.index_select(1, index) * options.scale, lse, key, index, options.block_size)
    return share > options.near_share


def _attend_alike(
    query: Tensor, key: Tensor, value: Tensor, rows: Rows | None, options: CoresetOptions
) -> Tensor:
    """Attend in heads that all have near keys, or have none if `options.block_size` is 0."""
    count = min(options.num_candidates, key.shape[1])
    numbers = gumbel_numbers(options.num_landmarks, count, options.seed, key)

    def some_heads(query: Tensor, key: Tensor, value: Tensor, out: Tensor | None, lse: Tensor | None) -> Tensor:
        own = None if rows is None or out is None or lse is None else Rows(rows.index, out, lse)
        landmarks = choose_landmarks(query, key, value, numbers, options)
        return _attend(query, key, value, landmarks, own, options)

    numel = options.num_landmarks * count // _HEADS_PER_SLICE
    return sliced(
        some_heads, query, key, value, *((None, None) if rows is None else rows[1:]),
        size=slice_size(numel, key.device), draws=options.dropout_p > 0,
    )


_HEADS_PER_SLICE = 4


def choose_landmarks(
    query: Tensor, key: Tensor, value: Tensor, numbers: Tensor, options: CoresetOptions
) -> Landmarks:
    """Draw keys among evenly spaced candidates, and move them to the means of their clusters."""
    count, scale, root = options.num_landmarks, options.scale, TEMPERATURE * abs(options.scale) ** 0.5
    spread = constant(_middle_positions, query.shape[1], min(query.shape[1], NUM_QUERIES), device=key.device)
    tilt = query.index_select(1, spread).mean(1, keepdim=True) * (TILT * scale)
    position = constant(even_positions, key.shape[1], numbers.shape[1], device=key.device)
    keys, values = (x if len(position) == x.shape[1] else x.index_select(1, position) for x in (key, value))
    # 2 g = |x|^2 + 2 <tilt, k> of the candidates.
    points, tilted = (keys * root).detach(), 2.0 * (keys @ tilt.mT).squeeze(2)
    pivot = draw_apart(points, DRAW_POWER, numbers, None, count, tilted.detach()).candidate
    pivots = landmarks = take(keys, pivot)
    weight = POWER * ((keys * root).square().sum(2) + tilted)
    weight = (weight - weight.amax(1, keepdim=True)).clamp(min=LEAST_LOG_WEIGHT).exp().unsqueeze(2)
    weighted = torch.cat((keys * weight, weight), 2)
    cluster = nearest(points, landmarks.detach() * root)
    for step in range(1, options.num_refinements + 1):
        # Only the last means need a gradient: the clusters have none.
        with torch.set_grad_enabled(torch.is_grad_enabled() and step == options.num_refinements):
            total = cluster_sums(cluster, weighted, count)
            landmarks = torch.where(total[..., -1:] > 0, total[..., :-1] / total[..., -1:].clamp(min=1e-35), pivots)
        if step < options.num_refinements:
            cluster = nearest(points, landmarks.detach() * root)
    sums = cluster_sums(cluster, with_ones(values), count)
    # In float64, because the norms of neighbors nearly cancel.
    points = landmarks.double() * root
    half_norm = 0.5 * points.square().sum(2, keepdim=True)
    kernel = ((torch.baddbmm(-half_norm, points, points.mT) - half_norm.mT).to(key.dtype) * LOG2_E).clamp(max=0.0).exp2()
    bias = -(half_norm + landmarks.double() @ tilt.double().mT).squeeze(2)
    value, log_count = sums[..., :-1] / sums[..., -1:].clamp(min=1.0), sums[..., -1].log()
    return Landmarks(landmarks, points, bias.to(key.dtype), tilt, kernel, value, log_count)


def with_ones(x: Tensor) -> Tensor:
    """One more column, for the denominators: (..., Dv) -> (..., Dv + 1)."""
    return torch.cat((x, torch.ones_like(x[..., :1])), -1)


def _rows_of_landmarks(key: Tensor, value: Tensor, landmarks: Landmarks, scale: float) -> tuple[Tensor, Tensor]:
    """K_ck exp(g) [V, 1] relative to exp(shift), (BH, m, Dv + 1), and the shift (BH, 1, 1): softmax rows of landmarks.

    The exponent of a landmark and a key is <x, y> - |x|^2 / 2 + <tilt, k>.
    """
    rows = landmarks.key * (TEMPERATURE**2 * abs(scale)) + landmarks.tilt
    out, lse = partial_attention(rows[:, None], key[:, None], value[:, None], scale=1.0)
    lse = lse[:, 0, :, None] - 0.5 * landmarks.points.square().sum(2, keepdim=True)
    shift = lse.amax(1, keepdim=True)
    return with_ones(out[:, 0]) * (lse - shift).exp().to(out.dtype), shift.to(out.dtype)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, landmarks: Landmarks, rows: Rows | None, options: CoresetOptions
) -> Tensor:
    """Attention to landmarks, (BH, Nq, Dv): weights, fit, and the safest of three kinds of weights for each query."""
    scale, near = options.scale, None
    if options.block_size:
        root = TEMPERATURE * abs(scale) ** 0.5
        of_keys = weigh_keys(key, root, landmarks)
        shift, own, log_weight = of_keys.shift.unsqueeze(2), of_keys.landmark, of_keys.log_weight
        bias = (landmarks.bias + of_keys.shift).gather(1, own) + log_weight
        near = NearField(key, value, take(landmarks.key, own), bias, scale, options.dropout_p)
        terms = with_ones(value) * (log_weight * LOG2_E).exp2().unsqueeze(2)
        unfitted = cluster_sums(own, terms, options.num_landmarks)
        rights = []
    else:
        sums, shift = _rows_of_landmarks(key, value, landmarks, scale)
        unfitted, rights = None, [sums]
    landmarks = landmarks._replace(bias=landmarks.bias + shift[..., 0])
    basis = None
    if rows is not None:
        probes = query.index_select(1, rows.index)
        logits = torch.baddbmm((landmarks.bias[:, None] - rows.lse.unsqueeze(2)), probes, landmarks.key.mT, alpha=scale)
        basis = (logits.clamp(max=MAX_LOGIT) * LOG2_E).exp2()
        rights.append(basis.mT)
    # One solve for all right sides, each of which takes time.
    solved = regularized_solve(landmarks.kernel, torch.cat(rights, 2), RIDGE) if rights else None
    if unfitted is None:
        assert solved is not None
        unfitted, solved = solved[..., : value.shape[2] + 1], solved[..., value.shape[2] + 1 :]
    weights, by_means = unfitted, None
    if rows is not None and basis is not None and solved is not None:
        exact = with_ones(rows.out)
        missing = exact - basis @ unfitted
        if near is not None:
            index = near_index_of(key.shape[1], options.block_size, key.device)[rows.index // near_block_q(options.block_size)]
            of_near = near.sums(probes.unsqueeze(2), rows.lse[..., None, None], index)
            missing = missing - of_near[:, :, 0, :-2]
        fit, left = _fit(basis, solved, missing)
        weights, by_means = unfitted + fit, _means_are_better(probes, exact, left, landmarks, scale)
    return _attend_safely(query, landmarks, (weights, unfitted), near, by_means, options)


def _fit(basis: Tensor, smooth: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
    """What to add to the weights (BH, m, Dv + 1), so that the probes miss less, and what each misses without itself.

    Ridge regression in the metric of A = K_cc + ridge I, (A + B^T B / size)^-1 B^T missing / size, where B is the basis
    (BH, P, m). By the identity of Woodbury this is A^-1 B^T (size I + B A^-1 B^T)^-1 missing, with the already known
    `smooth` = A^-1 B^T (BH, m, P). What a probe misses if the others are fitted, (BH, P, Dv + 1), has a closed form:
    (G^-1 missing)_i / (G^-1)_ii, where G is the matrix that is inverted (the leave-one-out residual of ridge
    regression).
    """
    # Basis and right side are divided by the root, because squares of small numbers would be lost in the gradient.
    root = (basis.square().sum((1, 2), keepdim=True) / basis.shape[2]).clamp(min=LEAST_GRAM).sqrt()
    smooth = smooth / root
    inverse = regularized_solve(basis / root @ smooth, None, 1.0)
    solved = inverse @ (missing / root)
    left = root.detach() * solved.detach() / inverse.detach().diagonal(dim1=1, dim2=2).unsqueeze(2)
    return smooth @ solved, left


@torch.no_grad()
def _means_are_better(query: Tensor, exact: Tensor, left: Tensor, landmarks: Landmarks, scale: float) -> Tensor:
    """Of which heads attention to the means of the clusters is clearly closer to the exact rows: bool (BH, 1, 1).

    `left` (BH, P, Dv + 1) is what each row misses with weights that are fitted to the others.
    """
    fitted = (exact[..., :-1] - left[..., :-1]) / (1.0 - left[..., -1:]).clamp(min=LEAST_LEFT)
    errors = [(x - exact[..., :-1]).square().sum((1, 2), keepdim=True) for x in (_by_means(query, landmarks, scale), fitted)]
    return errors[0] < BETTER * errors[1]


def _by_means(query: Tensor, landmarks: Landmarks, scale: float, dropout_p: float = 0.0) -> Tensor:
    """Attention of queries (BH, Nq, D) to the means of the clusters."""
    keys, values, bias = landmarks.key[:, None], landmarks.value[:, None], landmarks.log_count[:, None, None]
    return partial_attention(query[:, None], keys, values, bias, scale=scale, dropout_p=dropout_p).out[:, 0]


def _attend_safely(
    query: Tensor,
    landmarks: Landmarks,
    weights: tuple[Tensor, Tensor],
    near: NearField | None,
    by_means: Tensor | None,
    options: CoresetOptions,
) -> Tensor:
    """The output of all queries by fitted and, where those are not safe, unfitted weights (BH, m, Dv + 1) or means."""
    fitted, unfitted = weights
    # Large and small weights: their size goes into the exponent.
    size = torch.maximum(fitted.detach().abs().amax(2, keepdim=True), unfitted.detach().abs().amax(2, keepdim=True))
    size = size.clamp(min=1e-35).maximum(LEAST_SIZE * size.amax(1, keepdim=True))
    bias = (size.log() + landmarks.bias.unsqueeze(2)).mT.unsqueeze(1)
    fitted, unfitted = fitted / size, unfitted / size
    total = unfitted[..., -1:]
    sizes = torch.cat((total, total.detach().abs()), 2)

    def far(query: Tensor, values: Tensor, bias: Tensor = bias, key: Tensor = landmarks.key) -> Partial:
        return attend_in_numerator(query[:, None], key[:, None], values[:, None], bias, options)

    sums, lse = (x[:, 0] for x in far(query, torch.cat((fitted, sizes), 2)))
    if near is not None:
        of_near, log_factor = _sums_of_near_keys(query, near, lse, options)
        sums = sums * log_factor.exp() + of_near
    numerator, (denominator, least, terms) = sums[..., :-3], sums[..., -3:].split(1, dim=2)
    positive = least > LEAST_DENOMINATOR * terms
    positive = positive if by_means is None else positive & ~by_means
    safe = positive & (denominator > FIT_RANGE[0] * least) & (denominator < FIT_RANGE[1] * least)
    out = numerator / torch.where(safe, denominator, 1.0)
    counts = torch.stack([(~safe).sum((1, 2)), (~positive).sum((1, 2))]).tolist()
    most = max(counts[0])
    if not most:
        return out
    # Only the queries, and heads, that need it.
    heads = torch.tensor([i for i, x in enumerate(counts[0]) if x], device=query.device)
    some = safe[heads, :, 0].to(torch.int8).argsort(dim=1, stable=True)[:, :most]
    own_safe, own_positive, own_query = (take(x[heads], some) for x in (safe, positive, query))
    second = _by_means(own_query, Landmarks(*(x[heads] for x in landmarks)), options.scale, options.dropout_p)
    if any(x > y for x, y in zip(*counts, strict=True)):
        sums = far(own_query, torch.cat((unfitted, sizes), 2)[heads], bias[heads], landmarks.key[heads]).out[:, 0]
        if near is not None:
            sums = sums * take(log_factor[heads], some).exp() + take(of_near[heads], some)
        second = torch.where(own_positive, sums[..., :-3] / torch.where(own_positive, sums[..., -3:-2], 1.0), second)
    second = torch.where(own_safe, take(out[heads], some), second)
    return out.index_put((heads[:, None], some), second)


def _sums_of_near_keys(
    query: Tensor, near: NearField, lse: Tensor, options: CoresetOptions
) -> tuple[Tensor, Tensor]:
    """`NearField.sums` of all queries, (BH, Nq, Dv + 3), and the log of the factor of sums relative to exp(lse)."""
    q_len, block_q = query.shape[1], near_block_q(options.block_size)
    index, ref = near_index_of(q_len, options.block_size, query.device), lse.detach().unsqueeze(2)
    blocks, refs = (pad_to_blocks(x, block_q) for x in (query, ref))
    return near.sums(blocks, refs, index).flatten(1, 2)[:, :q_len], lse.unsqueeze(2) - ref


def attend_in_numerator(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, options: CoresetOptions) -> Partial:
    """Attention (BH, T, Nq, Dv + 3) where dropout acts on all columns but the last three, the denominators."""
    part = partial_attention(query, key, value, bias, scale=options.scale)
    if not options.dropout_p:
        return part
    values = value[..., :-3]
    dropped = partial_attention(query, key, values, bias, scale=options.scale, dropout_p=options.dropout_p).out
    return Partial(torch.cat((dropped, part.out[..., -3:]), 3), part.lse)
