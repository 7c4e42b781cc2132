"""The weights of landmarks: Nystrom weights, fitted to the exact rows of a few queries.

`hf_efficient_attn.ops.weighted_coreset` explains them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.coreset import regularized_solve
from hf_efficient_attn.ops.coreset_landmarks import (
    TEMPERATURE,
    CoresetOptions,
    Inputs,
    Landmarks,
    spread_queries,
    take_alike,
)
from hf_efficient_attn.ops.coreset_near_keys import (
    ExactRows,
    NearPlan,
    Similarity,
    near_sums_of_rows,
    plan_of_rows,
)
from hf_efficient_attn.ops.onednn import products
from hf_efficient_attn.ops.partial import Partial, partial_attention, safe_row_max
from hf_efficient_attn.ops.precision import LOG2_E

# Relative to the unit diagonal of K_cc.
RIDGE = 1e-3
# A head attends to the means of its clusters if their squared error is below this share of that of the fitted weights,
# whose denominators count as this at least.
BETTER, LEAST_LEFT = 0.5, 0.1
# Smallest size of the weights of a landmark, as a share of the largest.
LEAST_SIZE = 1e-25
# Probes for which the squares of what landmarks count are smaller fit nothing.
LEAST_GRAM = 1e-30
# Largest exponent of a landmark in the row of a probe, relative to the sum over all keys. Where a landmark counts far
# more than all keys, the probe says nothing about the other landmarks.
MAX_LOGIT = 20.0


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


class KeyWeights(NamedTuple):
    """What the landmarks count for a key: its similarity to the landmarks times `matrix`^T, (BH, m, m)."""

    similarity: Similarity
    matrix: Tensor

    def of_keys(self, key: Tensor, heads: slice) -> Tensor:
        """For all keys (BH, N, D) of some heads: (BH, N, m) in their dtype. Half precision is enough."""
        own = Similarity(*(None if x is None else x[heads] for x in self.similarity))  # type: ignore[arg-type]
        return products(own.of(key) if own.of_all is None else own.of_all, self.matrix[heads]).to(key.dtype)


class SumsOverKeys(NamedTuple):
    """Exact attention to all keys.

    Attributes:
        of_landmarks: of the landmarks (BH, m, .), by the kernel of the weights.
        of_probes: of the queries (BH, P, .) that fit the weights, or None without a fit.
        query: these queries (BH, P, D), or None.
    """

    of_landmarks: Partial
    of_probes: Partial | None
    query: Tensor | None


class NearSums(NamedTuple):
    """What the weights of heads with near keys need.

    Attributes:
        of_rows: of_rows(rows, similarity, solved) is `near_sums_of_rows` of the probes.
        mean: (BH, 1, D), of keys in half precision, as in `Inputs`.
        key: the centered keys (BH, Nk, D) whose similarities are kept, or None.
    """

    of_rows: Callable[[ExactRows, Similarity, Tensor], Tensor]
    mean: Tensor | None
    key: Tensor | None


def weigh(
    inputs: Inputs, landmarks: Landmarks, options: CoresetOptions, near: NearPlan | None
) -> tuple[Coreset, KeyWeights | None]:
    """Compute the Nystrom weights and fit them. The second result is for near keys."""
    probe = spread_queries(inputs, options.num_probes) if options.num_probes else None
    queries = None if probe is None else take_alike(inputs.query, probe)
    exact = sum_over_keys(landmarks.key, queries, inputs, options.scale)
    if near is None:
        return weigh_by_sums(landmarks, exact, options.scale, None)

    def of_rows(rows: ExactRows, similarity: Similarity, solved: Tensor) -> Tensor:
        assert probe is not None
        return near_sums_of_rows(inputs, rows, plan_of_rows(near, probe, len(inputs.key)), similarity, solved)

    kept = inputs.key if backend(inputs.key) == "cpu" else None
    return weigh_by_sums(landmarks, exact, options.scale, NearSums(of_rows, inputs.mean, kept))


def weigh_by_sums(
    landmarks: Landmarks, exact: SumsOverKeys, scale: float, near: NearSums | None
) -> tuple[Coreset, KeyWeights | None]:
    """`weigh` from what needs all keys; `near` is None in heads without near keys."""
    acc_dtype, own = landmarks.key.dtype, landmarks.own
    closed = None if landmarks.used is None else ~landmarks.used.unsqueeze(2)
    no_sums = closed if own is None or closed is None else closed | own
    points = landmarks.key.double() * (TEMPERATURE * abs(scale) ** 0.5)
    half_norm = 0.5 * points.square().sum(2, keepdim=True)
    # Sums over the keys of exp(<x, y> - |x|^2 / 2) for a landmark x, relative to exp(shift).
    lse = _fill(exact.of_landmarks.lse.unsqueeze(2).double() - half_norm, no_sums, -torch.inf)
    shift = safe_row_max(lse.amax(1, keepdim=True))
    sums = _with_ones(exact.of_landmarks.out.to(acc_dtype)) * (lse - shift).to(acc_dtype).exp()
    kernel = _kernel(points, half_norm, acc_dtype)
    if closed is not None:
        one = torch.eye(kernel.shape[1], dtype=kernel.dtype, device=kernel.device)
        kernel = torch.where(closed | closed.mT, one, kernel)
    exponent, similarity, rows, by_means = shift - half_norm, None, None, None
    if exact.query is not None and exact.of_probes is not None:
        rows = _exact_rows(exact.query.to(acc_dtype) * scale, exact.of_probes, landmarks, exponent.to(acc_dtype))
    # One solve for all right sides, each of which takes time. Weights of near keys need the whole inverse.
    if near is None:
        rights = sums if rows is None else torch.cat((sums, rows.basis.mT), 2)
        solved = regularized_solve(kernel, rights, RIDGE)
        weights = unfitted = solved[..., : sums.shape[2]]
        solved = solved[..., sums.shape[2] :]
    else:
        solved = regularized_solve(kernel, None, RIDGE)
        weights = unfitted = solved @ sums
        # Of key and landmark, relative to exp(shift). A power of two is faster than one of e.
        factors = points * (TEMPERATURE * abs(scale) ** 0.5 * LOG2_E)
        offset = _fill(-half_norm - shift, no_sums, -torch.inf) * LOG2_E
        similarity = _similarity(factors, offset, near, acc_dtype)
    if rows is not None:
        missing = rows.sums - rows.basis @ unfitted
        if near is not None and similarity is not None:
            missing = missing - near.of_rows(rows, similarity, solved)
        smooth = solved if near is None else solved @ rows.basis.mT
        fit, left = _fit(rows.basis, smooth, missing, landmarks)
        weights = unfitted + _fill(fit, no_sums, 0.0)
        by_means = _means_are_better(rows, left, landmarks)
    if own is not None:
        values = _with_ones(landmarks.value)
        weights, unfitted = (torch.where(own, values, x) for x in (weights, unfitted))
    coreset, size = _scaled(landmarks, weights, unfitted, _fill(exponent, own, 0.0))
    weights_of_keys = None if similarity is None else KeyWeights(similarity, solved.mT / size)
    return coreset._replace(by_means=by_means), weights_of_keys


def _similarity(factors: Tensor, offset: Tensor, near: NearSums, dtype: torch.dtype) -> Similarity:
    """The kernel between keys and landmarks from float64 factors (BH, m, D) and offsets (BH, m, 1)."""
    if near.mean is not None:
        offset = offset - factors @ near.mean.double().mT
    similarity = Similarity(factors.to(dtype), offset.squeeze(2).to(dtype))
    return similarity if near.key is None else similarity._replace(of_all=similarity.of(near.key))


def _scaled(landmarks: Landmarks, weights: Tensor, unfitted: Tensor, exponent: Tensor) -> tuple[Coreset, Tensor]:
    """The coreset from weights (BH, m, Dv + 1) relative to exp(exponent), and the size of those of each landmark.

    Large and small weights: their size goes into the exponent.
    """
    acc_dtype, closed = weights.dtype, None if landmarks.used is None else ~landmarks.used.unsqueeze(2)
    size = torch.maximum(weights.detach().abs().amax(2, keepdim=True), unfitted.detach().abs().amax(2, keepdim=True))
    size = size.clamp(min=torch.finfo(acc_dtype).tiny).maximum(LEAST_SIZE * size.amax(1, keepdim=True))
    size = _fill(size, closed, 1.0)
    log_size = size.double().log() + exponent
    unfitted, weights = unfitted / size, weights / size
    total = unfitted[..., -1:]
    coreset = Coreset(
        landmarks.key,
        _fill(log_size, closed, -torch.inf).squeeze(2).to(acc_dtype),
        torch.cat((weights, total, total.detach().abs(), torch.ones_like(total)), 2),
        unfitted[..., :-1],
        landmarks.value,
        landmarks.log_count,
        None,
    )
    return coreset, size


def _fill(x: Tensor, mask: Tensor | None, value: float) -> Tensor:
    return x if mask is None else x.masked_fill(mask, value)


def sum_over_keys(landmarks: Tensor, queries: Tensor | None, inputs: Inputs, scale: float) -> SumsOverKeys:
    """The sums over the centered keys for landmarks (BH, m, D), by the kernel of the weights, and for queries."""
    square = TEMPERATURE**2 * abs(scale)

    def rows(queries: Tensor, scale: float) -> Partial:
        query, key, value = (x[:, None] for x in (queries.to(inputs.key.dtype), inputs.key, inputs.value))
        out, lse = (x[:, 0] for x in partial_attention(query, key, value, inputs.bias, scale=scale))
        return Partial(out, lse if inputs.mean is None else lse - scale * (queries @ inputs.mean.mT).squeeze(2))

    if queries is None:
        return SumsOverKeys(rows(landmarks, square), None, None)
    if inputs.mean is not None:  # half precision holds landmarks, but no multiples of them
        return SumsOverKeys(rows(landmarks, square), rows(queries.to(landmarks.dtype), scale), queries)
    # One pass over the keys.
    both, count = rows(torch.cat((landmarks * square, queries * scale), 1), 1.0), landmarks.shape[1]
    parts = zip(*(x.split((count, queries.shape[1]), 1) for x in both), strict=True)
    of_landmarks, of_queries = (Partial(*part) for part in parts)
    return SumsOverKeys(of_landmarks, of_queries, queries)


def _kernel(points: Tensor, half_norm: Tensor, dtype: torch.dtype) -> Tensor:
    """The kernel exp(-|x - y|^2 / 2) between points (BH, m, D) in `dtype`, from their squared norms.

    The points are float64, because the norms of neighbors nearly cancel.
    """
    # Powers of two take less time than those of e.
    scaled, half_norm = points * LOG2_E, half_norm * LOG2_E
    return (torch.baddbmm(-half_norm, scaled, points.mT) - half_norm.mT).clamp(max=0.0).to(dtype).exp2()


def _with_ones(x: Tensor) -> Tensor:
    """One more column, for the denominators: (BH, N, Dv) -> (BH, N, Dv + 1)."""
    return torch.cat((x, torch.ones_like(x[..., :1])), 2)


def _exact_rows(query: Tensor, exact: Partial, landmarks: Landmarks, exponent: Tensor) -> ExactRows:
    """The rows of the queries (BH, P, D), times the scale, from their exact attention."""
    lse = safe_row_max(exact.lse).unsqueeze(2)
    logits = torch.baddbmm(exponent.mT - lse, query, landmarks.key.mT)
    if landmarks.used is not None:
        logits = logits.masked_fill(~landmarks.used.unsqueeze(1), -torch.inf)
    basis = (logits.clamp(max=MAX_LOGIT) * LOG2_E).exp2()
    return ExactRows(query, lse, _with_ones(exact.out.to(query.dtype)), basis)


def _fit(basis: Tensor, smooth: Tensor, missing: Tensor, landmarks: Landmarks) -> tuple[Tensor, Tensor]:
    """What to add to the weights (BH, m, Dv + 1), so that the probes miss less, and what each misses without itself.

    Ridge regression in the metric of A = K_cc + ridge I, (A + B^T B / size)^-1 B^T missing / size, where B is the basis
    (BH, P, m). By the identity of Woodbury this is A^-1 B^T (size I + B A^-1 B^T)^-1 missing, with the already known
    `smooth` = A^-1 B^T (BH, m, P). What a probe misses if the others are fitted, (BH, P, Dv + 1), has a closed form:
    (G^-1 missing)_i / (G^-1)_ii, where G is the matrix that is inverted (the leave-one-out residual of ridge
    regression).
    """
    used = basis.shape[2] if landmarks.used is None else landmarks.used.sum(1).clamp(min=1)
    # Basis and right side are divided by the root, because squares of small numbers would be lost in the gradient.
    root = (basis.square().sum((1, 2)) / used)[:, None, None].clamp(min=LEAST_GRAM).sqrt()
    smooth = smooth / root
    inverse = regularized_solve(basis / root @ smooth, None, 1.0)
    solved = inverse @ (missing / root)
    left = root.detach() * solved.detach() / inverse.detach().diagonal(dim1=1, dim2=2).unsqueeze(2)
    return smooth @ solved, left


@torch.no_grad()
def _means_are_better(rows: ExactRows, left: Tensor, landmarks: Landmarks) -> Tensor:
    """Of which heads attention to the means of the clusters is clearly closer to the exact rows: bool (BH, 1, 1).

    `left` (BH, P, Dv + 1) is what each row misses with weights that are fitted to the others.
    """
    exact = rows.sums[..., :-1]
    fitted = (exact - left[..., :-1]) / (1.0 - left[..., -1:]).clamp(min=LEAST_LEFT)
    scores = torch.baddbmm(landmarks.log_count.unsqueeze(1), rows.query, landmarks.key.mT)
    means = scores.softmax(2) @ landmarks.value
    of_means, of_fitted = ((x - exact).square().sum((1, 2)) for x in (means, fitted))
    better = (of_means < BETTER * of_fitted)[:, None, None]
    return better if landmarks.own is None else better & ~landmarks.own
