"""The readable form of `hf_efficient_attn.ops.weighted_coreset`: one head without padding, with dense matrices."""

import torch
from torch import Tensor

from hf_efficient_attn.ops.coreset import candidate_positions, refinement_steps
from hf_efficient_attn.ops.coreset_blocks_plan import (
    LEAST_LOGIT,
    LEAST_TOTAL,
    MAX_WEIGHT,
    SQUARE,
    SUM_RANGE,
    SUM_UNIT,
    has_near_keys,
)
from hf_efficient_attn.ops.coreset_landmarks import DRAW_POWER, LEAST_LOG_WEIGHT, POWER, TEMPERATURE, CoresetOptions
from hf_efficient_attn.ops.coreset_near_keys import NUM_KEYS, NUM_ROWS
from hf_efficient_attn.ops.coreset_weights import BETTER, LEAST_GRAM, LEAST_LEFT, LEAST_SIZE, MAX_LOGIT, RIDGE
from hf_efficient_attn.ops.weighted_coreset import FIT_RANGE, LEAST_DENOMINATOR, LEAST_SUM


def naive_landmarks(candidates: Tensor, pivots: Tensor, num_refinements: int, scale: float) -> tuple[Tensor, Tensor]:
    """Landmarks (m, D), and the landmark of each candidate (C,), for candidates (C, D) of one head and pivots (m,)."""
    root = TEMPERATURE * abs(scale) ** 0.5
    norm = (root * candidates).square().sum(1)
    weight = (POWER * (norm - norm.amax())).clamp(min=LEAST_LOG_WEIGHT).exp()

    def nearest(landmarks: Tensor) -> Tensor:
        scores: Tensor = root * candidates @ (root * landmarks).T - 0.5 * (root * landmarks).square().sum(1)
        return scores.argmax(1)

    landmarks = candidates[pivots]
    cluster = nearest(landmarks)
    num_refinements = refinement_steps(num_refinements, candidates)
    for step in range(1, num_refinements + 1):
        members = torch.nn.functional.one_hot(cluster, len(landmarks)).to(weight.dtype) * weight[:, None]
        used = members.sum(0) > 0
        means = members.T[used] @ candidates / members.sum(0)[used, None]
        landmarks = candidates[pivots].index_put((used.nonzero()[:, 0],), means)
        if step < num_refinements:
            cluster = nearest(landmarks)
    return landmarks, cluster


def naive_rows(query: Tensor, count: int) -> Tensor:
    """The positions (count,) of evenly spaced queries."""
    return ((torch.arange(count, device=query.device) + 0.5) * len(query) / count).long()


def naive_near_keys(query: Tensor, key: Tensor, options: CoresetOptions) -> Tensor:
    """The near keys of all queries of a head, which has them if they hold enough of its attention: bool (Nq, Nk)."""
    width, length = options.block_size, len(key)
    near = torch.zeros(len(query), length, dtype=torch.bool, device=key.device)
    if not width or len(query) != length or options.near_share >= 1.0:
        return near
    block_q = max(1, width // 2)
    for i in range(length):
        first = i // block_q * block_q - (width - block_q) // 2
        first = min(max(first, 0), length - width)
        near[i, first : first + width] = True
    if options.near_share > 0.0:
        row = naive_rows(query, NUM_ROWS)
        few = key[candidate_positions(None, length, NUM_KEYS, key.device)[0][0]]
        total = (options.scale * query[row] @ few.T).logsumexp(1, keepdim=True)
        weights = (options.scale * query[row] @ key.T - total).exp() * len(few) / length
        near &= (weights * near[row]).sum(1).clamp(max=1.0).mean() > options.near_share
    return near


def naive_head(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    landmarks: Tensor,
    means: tuple[Tensor, Tensor],
    near: Tensor,
    options: CoresetOptions,
) -> Tensor:
    """The readable form of one head without padding, with the dense weights of all keys.

    Args:
        query: (Nq, D), float64 like all of them.
        key: (Nk, D), centered.
        value: (Nk, Dv).
        landmarks: (m, D).
        means: the mean value (m, Dv) and the number (m,) of the candidates of each landmark.
        near: bool (Nq, Nk), the near keys.
        options: how the weights are fitted.

    Returns:
        (Nq, Dv).
    """
    scale, square = options.scale, TEMPERATURE**2 * abs(options.scale)
    one = torch.eye(len(landmarks), dtype=key.dtype, device=key.device)
    half_norm = 0.5 * square * landmarks.square().sum(1)

    unit = (square * landmarks @ landmarks.T - half_norm[:, None] - half_norm).exp()
    # The weights of every key as multiples of exp(shift), which is part of the basis below.
    exponents = square * landmarks @ key.T - half_norm[:, None]
    shift = exponents.logsumexp(1).max()
    of_key = torch.linalg.inv(unit + RIDGE * one) @ (exponents - shift).exp()
    targets = torch.cat((value, torch.ones_like(value[:, :1])), 1)
    weights = of_key @ targets
    scores, logits = scale * query @ key.T, scale * query @ landmarks.T - half_norm + shift
    row_max = torch.maximum(scores.amax(1), logits.amax(1)).detach()[:, None]
    exact, basis = (scores - row_max).exp() * near, (logits - row_max).exp()
    counted = (basis @ of_key) * near
    unfitted = basis @ weights + (exact - counted) @ targets
    size = basis @ weights[:, -1:].abs() + (exact + counted.abs()).sum(1, keepdim=True)
    third = (scale * query @ landmarks.T + means[1].log()).softmax(1) @ means[0]
    sums, most, by_means = unfitted, weights.abs().amax(1), False
    if options.num_probes:
        probe = naive_rows(query, options.num_probes)
        lse = scores[probe].logsumexp(1, keepdim=True)
        rows, exact = (logits[probe] - lse).clamp(max=MAX_LOGIT).exp(), (scores[probe] - lse).exp()
        missing = exact @ targets - rows @ weights - ((exact - rows @ of_key) * near[probe]) @ targets
        gram = rows.T @ rows
        strength = gram.diagonal().mean().clamp(min=LEAST_GRAM)
        solve = torch.linalg.inv(gram / strength + unit + RIDGE * one) @ rows.T / strength
        fit = solve @ missing
        # What each probe misses if the others are fitted: the leave-one-out residual of ridge regression.
        left = (missing - rows @ fit) / (1.0 - (rows @ solve).diagonal())[:, None]
        target = (exact @ targets)[:, :-1]
        fitted = (target - left[:, :-1]) / (1.0 - left[:, -1:]).clamp(min=LEAST_LEFT)
        by_means = bool((third[probe] - target).square().sum() < BETTER * (fitted - target).square().sum())
        sums = unfitted + basis @ fit
        most = torch.maximum(most, (weights + fit).abs().amax(1))
    least = LEAST_SUM * basis @ most.maximum(LEAST_SIZE * most.max())[:, None]
    positive = torch.full_like(unfitted[:, -1:], not by_means, dtype=torch.bool)
    positive &= unfitted[:, -1:] > torch.maximum(LEAST_DENOMINATOR * size, least)
    divisor = torch.where(positive, unfitted[:, -1:], 1.0)
    ratio = sums[:, -1:] / divisor
    safe = positive & (ratio > FIT_RANGE[0]) & (ratio < FIT_RANGE[1])
    second = torch.where(positive, unfitted[:, :-1] / divisor, third)
    return torch.where(safe, sums[:, :-1] / torch.where(safe, sums[:, -1:], 1.0), second)


def naive_block_head(
    query: Tensor, key: Tensor, value: Tensor, candidates: Tensor, numbers: Tensor, options: CoresetOptions
) -> Tensor:
    """The readable form of `hf_efficient_attn.ops.coreset_blocks`: one head without padding, with dense matrices.

    Args:
        query: (Nq, D), float64 like all of them.
        key: (Nk, D), centered.
        value: (Nk, Dv).
        candidates: int64 (C,), which keys are candidates for landmarks.
        numbers: (C,), Gumbel numbers.
        options: how the landmarks are chosen and fitted.

    Returns:
        (Nq, Dv).
    """
    scale, square, count = options.scale, SQUARE * abs(options.scale), options.num_landmarks + options.block_size
    points, targets = key[candidates], torch.cat((value, torch.ones_like(value[:, :1])), 1)
    landmarks = points[(numbers + DRAW_POWER * square * points.square().sum(1)).topk(count).indices]
    closeness = points @ landmarks.T - 0.5 * landmarks.square().sum(1)
    member = (closeness >= closeness.amax(1, keepdim=True)).to(key.dtype)
    if options.num_refinements:
        size = member.sum(0)[:, None]  # 0 only by rounding
        landmarks = torch.where(size > 0, member.T @ points / size.clamp(min=1.0), landmarks)
    half_norm = 0.5 * square * landmarks.square().sum(1)
    kernel = (square * landmarks @ landmarks.T - half_norm[:, None] - half_norm).exp()
    system = kernel + RIDGE * torch.eye(count, dtype=key.dtype, device=key.device)
    # The weights of every key as multiples of exp(shift), which is part of the basis below.
    exponents = square * landmarks @ key.T - half_norm[:, None]
    shift = exponents.detach().logsumexp(1).max()
    of_key, scores = (exponents - shift).exp(), scale * query @ key.T
    size = of_key.sum(1, keepdim=True)
    # Of the mean of the keys in the sum of each landmark, and in that of each probe.
    rights = torch.diag_embed(size[:, 0])
    logits = scale * query @ landmarks.T
    if options.num_probes:
        probe = naive_rows(query, options.num_probes)
        lse = scores[probe].logsumexp(1, keepdim=True)
        rows = (logits[probe] - half_norm + shift - lse).clamp(LEAST_LOGIT, MAX_LOGIT).exp()
        strength = count / rows.square().sum()
        system = system + strength * rows.T @ rows
        of_key = of_key + strength * rows.T @ (scores[probe] - lse).exp()
        rights = torch.cat((rights, strength * rows.T), 1)
    lower = torch.linalg.cholesky(system)
    of_key = torch.cholesky_solve(of_key, lower)
    largest = torch.cholesky_solve(rights, lower).abs().amax(1, keepdim=True).minimum(MAX_WEIGHT * size)
    index, block = torch.arange(len(query)), torch.arange(len(key)) // count
    has_near = has_near_keys(options, len(query), len(key))
    near = (index[:, None] // count == block).to(key) if has_near else torch.zeros_like(scores)
    row_max = torch.maximum(scores.amax(1), (logits - half_norm + shift).amax(1)).detach()[:, None]
    exact, basis = (scores - row_max).exp() * near, (logits - half_norm + shift - row_max).exp()
    sums = (basis @ of_key * (1.0 - near) + exact) @ targets
    of_clusters = member.T @ targets[candidates] * (len(key) / len(points))
    means, third = (logits - row_max).exp() @ of_clusters, logits.softmax(1) @ of_clusters
    low, high = SUM_RANGE
    means = means + LEAST_TOTAL * (exact.sum(1, keepdim=True) + basis @ size)
    most = high * (means + exact.sum(1, keepdim=True) - basis @ largest / SUM_UNIT)
    safe = (sums > low * means) & (sums < most)
    sums = torch.where(safe[:, -1:], sums, third)
    return sums[:, :-1] / sums[:, -1:]
