"""Attention to weighted landmarks that represent all keys, and exactly to near keys where attention is local.

The softmax sum of a query q over the keys k_j is approximated through the features exp(scale <q, c_i>) of m landmarks:

    sum_j exp(scale <q, k_j>) [v_j, 1]  ~  sum_i exp(scale <q, c_i> - g(c_i)) U_i,    U = sum_j w_j exp(g(k_j)) [v_j, 1]

- exp(scale <q, k> - g(k)) is interpolated between landmarks, w_j = (K_cc + ridge I)^-1 K_cj, with the kernel
  exp(-|x - y|^2 / 2) of x = t sqrt(scale) k. Keys are centered. g(k) = |x|^2 / 2 + `TILT` scale <q, k> for the mean
  query q, so that what is interpolated varies little. With the first term alone these are Nystrom weights (WildCat,
  Schroeder & Mackey 2026).
- A landmark is the weighted mean of a cluster of keys. Clusters begin with keys that are drawn far from each other
  (`draw_apart`), and some steps of Lloyd's algorithm follow. A key counts more where g is large, because it can have a
  large score.
- U is fitted to the exact rows of a few probe queries: ridge regression in the metric of K_cc.
- In heads whose attention is local, blocks of queries attend to near keys exactly, and what landmarks count for these
  keys is subtracted (`hf_efficient_attn.ops.coreset_landmarks`).
- Where the fit fails, queries attend to the means of the clusters, with the numbers of their keys as weights.
- What the outputs of the probes still miss is corrected by ridge regression, linear in the query. On activations of
  BERT this lowers the error by 2 to 10 %.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.attend import LOG2_E, Partial, accumulation_dtype, attend
from hf_efficient_attn.ops.coreset import regularized_solve, with_ones
from hf_efficient_attn.ops.coreset_landmarks import (
    DRAW_POWER,
    LEAST_LOG_WEIGHT,
    NUM_QUERIES,
    POWER,
    ROWS_OF_SHARE,
    TEMPERATURE,
    TILT,
    Candidates,
    CoresetOptions,
    Landmarks,
    NearField,
    Rows,
    choose_candidates,
    draw_apart,
    exact_rows,
    gumbel_numbers,
    local_heads,
    make_landmarks,
    middle_positions,
    near_block_q,
    near_field,
    near_index,
)
from hf_efficient_attn.ops.tokens import even_positions, slice_size, sliced, take

# Relative to the unit diagonal of K_cc.
RIDGE = 1e-3
# A denominator must be this share of the sum of its terms' sizes, and a fitted one within these multiples of the
# unfitted one. Otherwise the query gets weights of the next safer kind.
LEAST_DENOMINATOR, FIT_RANGE = 0.01, (0.6, 1.6)
# The same relative to the sum of the exponentials. The gradient divides by the square.
LEAST_SUM = 1e-10
# A head attends to the means of its clusters if their squared error on the probes is below this share of that of the
# fitted weights, whose denominators count as `LEAST_LEFT` at least.
BETTER, LEAST_LEFT = 0.5, 0.1
# Smallest size of the weights of a landmark, as a share of the largest; and of the squares of the probes' features.
LEAST_SIZE, LEAST_GRAM = 1e-15, 1e-20
# Largest exponent of a landmark in the row of a probe. A landmark that counts far more than all keys says nothing.
MAX_LOGIT = 20.0
# The ridge and the largest feature of the linear correction, and what is added to the variance of a feature.
LINEAR_RIDGE, MAX_FEATURE, LEAST_VARIANCE = 30.0, 4.0, 1e-12
# Queries and values of a slice may be this multiple of what `sliced` is meant for: 32 MiB on a CPU. Many small
# operations then take as long as few large ones.
_LARGER_SLICES = 8


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
    rows = exact_rows(query, key, value, options) if options.num_probes else None
    local = local_heads(key, query.shape[1], rows, options)
    candidates = choose_candidates(query, key, value, local, options)

    def some_heads(query: Tensor, key: Tensor, value: Tensor, local: Tensor | None, *rest: Tensor) -> Tensor:
        chosen = Candidates(*rest[: len(candidates)])
        own = None if rows is None else Rows(rows.position, *rest[len(candidates) :])
        weighted = _weigh(key, value, make_landmarks(chosen, options), own, local, options)
        out = _attend_safely(query, weighted, options)
        return out if own is None else out + _linear_correction(query, out, own)

    tensors = (query, key, value, local, *candidates, *(() if rows is None else rows[1:]))
    size = slice_size(query.shape[1] * (query.shape[2] + value.shape[2]) // _LARGER_SLICES, key.device)
    return sliced(some_heads, *tensors, size=size, draws=options.dropout_p > 0.0)


class Weighted(NamedTuple):
    """Weighted landmarks: sum_i exp(scale <q, c_i> + bias_i) weights_i are the sums of a query.

    Attributes:
        landmarks: without their final bias.
        bias: (BH, m).
        fitted: (BH, m, Dv + 1), for the numerator and the denominator.
        unfitted: the same without a fit.
        near: near keys of some heads, or None.
        heads: int64, the numbers of these heads, or None.
        by_means: bool (BH, 1, 1), heads whose queries attend to the means of the clusters instead; None: no head.
    """

    landmarks: Landmarks
    bias: Tensor
    fitted: Tensor
    unfitted: Tensor
    near: NearField | None
    heads: Tensor | None
    by_means: Tensor | None


def _weigh(
    key: Tensor, value: Tensor, landmarks: Landmarks, rows: Rows | None, local: Tensor | None, options: CoresetOptions
) -> Weighted:
    """The weights of the landmarks: those of the interpolation, or for near keys of the nearest landmark, and a fit."""
    near = heads = by_means = None
    if local is None:
        sums, shift = _rows_of_landmarks(key, value, landmarks, options.scale)
    else:
        others, heads = (~local).nonzero()[:, 0], local.nonzero()[:, 0]
        k, v, own = _of_heads((key, value, landmarks), others)
        sums, shift = _rows_of_landmarks(k, v, own, options.scale)
        near, *found = near_field(*_of_heads((key, value, landmarks), heads), options)
        order = torch.cat((others, heads)).argsort()
        sums, shift = (torch.cat(x).index_select(0, order) for x in zip((sums, shift), found, strict=True))
    rights, bias = [sums], landmarks.bias + shift
    if rows is not None:
        logits = torch.baddbmm(
            bias.unsqueeze(1) - rows.lse.unsqueeze(2), rows.query, landmarks.key.mT, alpha=options.scale
        )
        basis = (logits.clamp(max=MAX_LOGIT) * LOG2_E).exp2()
        rights.append(basis.mT)
    # One solve for all right sides.
    solved = regularized_solve(landmarks.kernel, torch.cat(rights, 2), RIDGE)
    fitted = unfitted = solved[..., : sums.shape[2]]
    if local is not None:
        fitted = unfitted = torch.where(local.view(-1, 1, 1), sums, unfitted)
    if rows is not None:
        exact = with_ones(rows.out)
        missing = torch.baddbmm(exact, basis, unfitted, alpha=-1.0)
        if near is not None and heads is not None:
            of_near = near.sums_of_rows(*(x.index_select(0, heads) for x in (rows.query, rows.lse)))
            missing = missing.index_add(0, heads, of_near, alpha=-1.0)
        fit, left = _fit(basis, solved[..., sums.shape[2] :], missing)
        fitted, by_means = unfitted + fit, _means_are_better(rows.query, exact, left, landmarks, options.scale)
    return _scaled(Weighted(landmarks, bias, fitted, unfitted, near, heads, by_means))


def _of_heads(tensors: tuple[Tensor, Tensor, Landmarks], heads: Tensor) -> tuple[Tensor, Tensor, Landmarks]:
    """Key, value and landmarks of some heads."""
    key, value, landmarks = tensors
    some = Landmarks(*(x.index_select(0, heads) for x in landmarks))
    return key.index_select(0, heads), value.index_select(0, heads), some


def _rows_of_landmarks(key: Tensor, value: Tensor, landmarks: Landmarks, scale: float) -> tuple[Tensor, Tensor]:
    """K_ck exp(g) [V, 1] relative to exp(shift), (BH, m, Dv + 1), and the shift (BH, 1): softmax rows of landmarks.

    The exponent of a landmark and a key is <x, y> - |x|^2 / 2 + <tilt, k>.
    """
    rows = landmarks.key * (TEMPERATURE**2 * abs(scale)) + landmarks.tilt
    out, lse = attend(rows[:, None], key[:, None], value[:, None], scale=1.0)
    lse = lse[:, 0, :, None] - landmarks.half_norm
    shift = lse.amax(1, keepdim=True)
    return with_ones(out[:, 0]) * (lse - shift).exp(), shift[..., 0]


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
    inverse = regularized_solve(torch.bmm(basis / root, smooth), None, 1.0)
    solved = torch.bmm(inverse, missing / root)
    with torch.no_grad():
        left = root * solved / inverse.diagonal(dim1=1, dim2=2).unsqueeze(2)
    return torch.bmm(smooth, solved), left


@torch.no_grad()
def _means_are_better(query: Tensor, exact: Tensor, left: Tensor, landmarks: Landmarks, scale: float) -> Tensor:
    """Of which heads attention to the means of the clusters is clearly closer to the exact rows: bool (BH, 1, 1).

    `left` (BH, P, Dv + 1) is what each row misses with weights that are fitted to the others.
    """
    fitted = (exact[..., :-1] - left[..., :-1]) / (1.0 - left[..., -1:]).clamp(min=LEAST_LEFT)
    means = _by_means(query, landmarks, scale, 0.0)
    exact = exact[..., :-1]
    of_means, of_fitted = (torch.linalg.vector_norm(x - exact, dim=(1, 2), keepdim=True) for x in (means, fitted))
    better: Tensor = of_means < BETTER**0.5 * of_fitted
    return better


def _by_means(query: Tensor, landmarks: Landmarks, scale: float, dropout_p: float) -> Tensor:
    """Attention of queries (BH, Nq, D) to the means of the clusters."""
    keys, values, bias = landmarks.key[:, None], landmarks.value[:, None], landmarks.log_count[:, None, None]
    return attend(query[:, None], keys, values, bias, scale=scale, dropout_p=dropout_p).out[:, 0]


def _scaled(weighted: Weighted) -> Weighted:
    """Move the size of the weights of each landmark, large or small, into its bias."""
    fitted, unfitted = weighted.fitted, weighted.unfitted
    size = torch.linalg.vector_norm(torch.cat((fitted, unfitted), 2).detach(), torch.inf, 2, keepdim=True)
    size = size.clamp(min=torch.finfo(size.dtype).tiny).maximum(LEAST_SIZE * size.amax(1, keepdim=True))
    bias = weighted.bias + size.squeeze(2).log()
    return weighted._replace(bias=bias, fitted=fitted / size, unfitted=unfitted / size)


def _far_sums(query: Tensor, weighted: Weighted, weights: Tensor, options: CoresetOptions) -> Partial:
    """The sums over the landmarks, (BH, Nq, Dv + 3), relative to the exponential of lse (BH, Nq).

    The last columns are the denominator, the unfitted denominator, and the sum of the sizes of its terms. Dropout does
    not act on them.
    """
    total = weighted.unfitted[..., -1:]
    values = torch.cat((weights, total, total.detach().abs()), 2)[:, None]
    tensors, bias = (query[:, None], weighted.landmarks.key[:, None]), weighted.bias[:, None, None]
    out, lse = (x[:, 0] for x in attend(*tensors, values, bias, scale=options.scale))
    if options.dropout_p:
        dropped = attend(*tensors, values[..., :-3], bias, scale=options.scale, dropout_p=options.dropout_p).out[:, 0]
        out = torch.cat((dropped, out[..., -3:]), 2)
    return Partial(out, lse)


def _attend_safely(query: Tensor, weighted: Weighted, options: CoresetOptions) -> Tensor:
    """The output (BH, Nq, Dv) by fitted weights and, for queries where these are not safe, by others."""
    sums, lse = _far_sums(query, weighted, weighted.fitted, options)
    near, factor, of_near = weighted.heads, None, None
    if weighted.near is not None and near is not None:
        of_near, ref = weighted.near.sums_of_all(query.index_select(0, near), lse.index_select(0, near))
        factor = (lse.index_select(0, near).unsqueeze(2) - ref).exp()
        sums = sums.index_copy(0, near, torch.addcmul(of_near, sums.index_select(0, near), factor))
    denominator, unfitted, size = sums[..., -3:].split(1, dim=2)
    positive = unfitted > (LEAST_DENOMINATOR * size).clamp(min=LEAST_SUM)
    positive = positive if weighted.by_means is None else positive & ~weighted.by_means
    safe = positive & (denominator > FIT_RANGE[0] * unfitted) & (denominator < FIT_RANGE[1] * unfitted)
    out = sums[..., :-3] / torch.where(safe, denominator, 1.0)
    unsafe = (~safe).sum((1, 2)).tolist()
    if not any(unsafe):
        return out
    # Some queries of some heads: those of a head with the most come first, and others fill up.
    heads = torch.tensor([i for i, number in enumerate(unsafe) if number], device=query.device)
    index = safe.squeeze(2).index_select(0, heads).to(torch.int8).argsort(dim=1, stable=True)[:, : max(unsafe)]
    some, kept, is_safe, is_positive = (take(x.index_select(0, heads), index) for x in (query, out, safe, positive))
    own = weighted._replace(
        landmarks=Landmarks(*(x.index_select(0, heads) for x in weighted.landmarks)),
        bias=weighted.bias.index_select(0, heads),
        unfitted=weighted.unfitted.index_select(0, heads),
    )
    second = _far_sums(some, own, own.unfitted, options).out
    if near is not None and factor is not None and of_near is not None:
        full = torch.ones_like(denominator).index_copy(0, near, factor)
        further = torch.zeros_like(sums).index_copy(0, near, of_near)
        full, further = (take(x.index_select(0, heads), index) for x in (full, further))
        second = torch.addcmul(further, second, full)
    second = second[..., :-3] / torch.where(is_positive, second[..., -3:-2], 1.0)
    third = _by_means(some, own.landmarks, options.scale, options.dropout_p)
    repaired = torch.where(is_safe, kept, torch.where(is_positive, second, third))
    return out.index_put((heads.unsqueeze(1), index), repaired)


def _linear_correction(query: Tensor, out: Tensor, rows: Rows) -> Tensor:
    """What the outputs of the probes miss, as a linear function of the query: (BH, Nq, Dv)."""
    variance, mean = torch.var_mean(rows.query, 1, keepdim=True, correction=0)
    size = (variance + LEAST_VARIANCE).rsqrt()
    middle = -mean * size
    # Limited, so that nothing is extrapolated to a query that is unlike all probes.
    features, basis = (torch.addcmul(middle, x, size).clamp(-MAX_FEATURE, MAX_FEATURE) for x in (query, rows.query))
    basis, missing = with_ones(basis), rows.out - out.index_select(1, rows.position)
    factor = regularized_solve(torch.bmm(basis.mT, basis), torch.bmm(basis.mT, missing), LINEAR_RIDGE)
    return torch.bmm(features, factor[:, :-1]) + factor[:, -1:]


def weighted_coreset_naive(query: Tensor, key: Tensor, value: Tensor, options: CoresetOptions) -> Tensor:
    """Attention (Nq, Dv) of one head, query (Nq, D), key (Nk, D) and value (Nk, Dv)."""
    query, key, value = query.double(), (key - key.mean(0)).double(), value.double()
    key, scale, m = key - key.mean(0), options.scale, options.num_landmarks
    probe = middle_positions(len(query), options.num_probes, query.device)
    scores = scale * query @ key.T
    near = torch.zeros_like(scores)
    if options.block_size and len(query) == len(key) and options.near_share < 1.0:
        block = torch.arange(len(query), device=query.device) // near_block_q(options.block_size)
        near = near.scatter(1, near_index(len(query), options.block_size, query.device)[block], 1.0)
        some = probe[::ROWS_OF_SHARE]
        if options.near_share and len(some) and (near * scores.softmax(1))[some].sum(1).mean() <= options.near_share:
            near = torch.zeros_like(scores)
    m = m if near.any() else m + options.block_size
    x, tilt = key * (TEMPERATURE * abs(scale) ** 0.5), query[_spread(query)].mean(0) * (TILT * scale)
    position = even_positions(len(key), min(len(key), options.num_candidates), key.device)
    c, cluster = _landmarks(key[position], x[position], tilt, m, options)
    members = torch.nn.functional.one_hot(cluster, m).double().T
    count, y = members.sum(1), c * (TEMPERATURE * abs(scale) ** 0.5)
    means = (scale * query @ c.T + count.log()).softmax(1) @ (members @ value[position] / count.clamp(min=1)[:, None])

    g, targets = 0.5 * x.square().sum(1) + key @ tilt, torch.cat((value, torch.ones_like(value[:, :1])), 1)
    system = _kernel(y, y) + RIDGE * torch.eye(m, dtype=y.dtype, device=y.device)
    shift = g.max().detach()
    of_key = _kernel(y, x) * (g - shift).exp()  # (m, Nk), weights of keys on landmarks
    if near.any():
        nearest = torch.nn.functional.one_hot(_distances(x, y).argmin(1), m).double().T
        of_key = of_key * nearest
    else:
        of_key = torch.linalg.inv(system) @ of_key
    logits = scale * query @ c.T - 0.5 * y.square().sum(1) - c @ tilt + shift
    ref = torch.maximum(scores.amax(1), logits.amax(1)).detach()[:, None]
    exact, basis = (scores - ref).exp() * near, (logits - ref).exp()
    counted = (basis @ of_key) * near
    weights = fitted_weights = of_key @ targets
    unfitted = basis @ weights + (exact - counted) @ targets
    size = basis @ weights[:, -1:].abs() + (exact + counted).sum(1, keepdim=True)
    sums, by_means = unfitted, False
    if options.num_probes:
        lse, target = scores[probe].logsumexp(1, keepdim=True), scores[probe].softmax(1) @ targets
        rows = (logits[probe] - lse).clamp(max=MAX_LOGIT).exp()
        near_rows = ((scores[probe] - lse).exp() - rows @ of_key) * near[probe]
        missing = target - rows @ weights - near_rows @ targets
        # Ridge regression, and what each probe misses if the others are fitted: its leave-one-out residual.
        strength = rows.square().sum() / (options.num_landmarks + options.block_size)
        solve = torch.linalg.inv(system + rows.T @ rows / strength) @ rows.T / strength
        fit = solve @ missing
        left = (missing - rows @ fit) / (1.0 - (rows @ solve).diagonal())[:, None]
        fitted = (target - left)[:, :-1] / (1.0 - left[:, -1:]).clamp(min=LEAST_LEFT)
        errors = [(x - target[:, :-1]).square().sum() for x in (means[probe], fitted)]
        by_means, sums, fitted_weights = bool(errors[0] < BETTER * errors[1]), unfitted + basis @ fit, weights + fit
    # What a denominator is compared with: the largest weight of each landmark, or the near key that counts most.
    largest = torch.cat((weights, fitted_weights), 1).detach().abs().amax(1, keepdim=True)
    largest = torch.maximum(basis @ largest.maximum(LEAST_SIZE * largest.max()), exact.amax(1, keepdim=True))
    positive = (unfitted[:, -1:] > torch.maximum(LEAST_DENOMINATOR * size, LEAST_SUM * largest)) & (not by_means)
    ratio = sums[:, -1:] / torch.where(positive, unfitted[:, -1:], 1.0)
    safe = positive & (ratio > FIT_RANGE[0]) & (ratio < FIT_RANGE[1])
    out = torch.where(positive, unfitted[:, :-1] / torch.where(positive, unfitted[:, -1:], 1.0), means)
    out = torch.where(safe, sums[:, :-1] / torch.where(safe, sums[:, -1:], 1.0), out)
    return out + _correction(query, out, probe, scores[probe].softmax(1) @ value) if options.num_probes else out


def _spread(query: Tensor) -> Tensor:
    return middle_positions(len(query), min(len(query), NUM_QUERIES), query.device)


def _distances(x: Tensor, y: Tensor) -> Tensor:
    return (x[:, None] - y).square().sum(2)


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    return (-0.5 * _distances(x, y)).exp()


def _landmarks(key: Tensor, x: Tensor, tilt: Tensor, count: int, options: CoresetOptions) -> tuple[Tensor, Tensor]:
    """Landmarks (m, D) from candidates (C, D), and the cluster of each candidate."""
    root, tilted = TEMPERATURE * abs(options.scale) ** 0.5, 2.0 * key @ tilt
    numbers = gumbel_numbers(count, len(key), options.seed, key)
    c = first = key[draw_apart(x[None], DRAW_POWER, numbers, count, tilted[None])[0]]
    weight = POWER * (x.square().sum(1) + tilted)
    weight = (weight - weight.max()).clamp(min=LEAST_LOG_WEIGHT).exp()
    cluster = _distances(x, c * root).argmin(1)
    for step in range(options.num_refinements):
        cluster = cluster if step == 0 else _distances(x, c * root).argmin(1)
        members = torch.nn.functional.one_hot(cluster, count).double().T * weight
        total = members.sum(1, keepdim=True)
        c = torch.where(total > 0, members @ key / torch.where(total > 0, total, 1.0), first)
    return c, cluster


def _correction(query: Tensor, out: Tensor, probe: Tensor, target: Tensor) -> Tensor:
    """What the outputs of the probes miss, linear in the query."""
    scaled = (query - query[probe].mean(0)) / (query[probe].var(0, correction=0) + LEAST_VARIANCE).sqrt()
    features = torch.cat((scaled.clamp(-MAX_FEATURE, MAX_FEATURE), torch.ones_like(query[:, :1])), 1)
    ridge = LINEAR_RIDGE * torch.eye(features.shape[1], dtype=query.dtype, device=query.device)
    system = features[probe].T @ features[probe] + ridge
    fitted: Tensor = torch.linalg.inv(system) @ features[probe].T @ (target - out[probe])
    return features @ fitted
