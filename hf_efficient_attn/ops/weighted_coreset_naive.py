"""The readable form of `hf_efficient_attn.ops.weighted_coreset`: one head at a time in float64, with dense matrices."""

import torch
from torch import Tensor

from hf_efficient_attn.ops.coreset import draw_apart, even_positions, gumbel_numbers
from hf_efficient_attn.ops.coreset_landmarks import (
    DRAW_POWER,
    LEAST_LOG_WEIGHT,
    NUM_QUERIES,
    POWER,
    ROWS_OF_SHARE,
    TEMPERATURE,
    TILT,
    CoresetOptions,
    middle_positions,
    near_block_q,
    near_index,
)
from hf_efficient_attn.ops.weighted_coreset import (
    BETTER,
    FIT_RANGE,
    LEAST_DENOMINATOR,
    LEAST_LEFT,
    LEAST_VARIANCE,
    LINEAR_RIDGE,
    MAX_FEATURE,
    MAX_LOGIT,
    RIDGE,
)


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
    unfitted = basis @ (of_key @ targets) + (exact - counted) @ targets
    size = basis @ (of_key @ targets)[:, -1:].abs() + (exact + counted).sum(1, keepdim=True)
    sums, by_means = unfitted, False
    if options.num_probes:
        lse, target = scores[probe].logsumexp(1, keepdim=True), scores[probe].softmax(1) @ targets
        rows = (logits[probe] - lse).clamp(max=MAX_LOGIT).exp()
        near_rows = ((scores[probe] - lse).exp() - rows @ of_key) * near[probe]
        missing = target - rows @ (of_key @ targets) - near_rows @ targets
        # Ridge regression, and what each probe misses if the others are fitted: its leave-one-out residual.
        strength = rows.square().sum() / (options.num_landmarks + options.block_size)
        solve = torch.linalg.inv(system + rows.T @ rows / strength) @ rows.T / strength
        fit = solve @ missing
        left = (missing - rows @ fit) / (1.0 - (rows @ solve).diagonal())[:, None]
        fitted = (target - left)[:, :-1] / (1.0 - left[:, -1:]).clamp(min=LEAST_LEFT)
        errors = [(x - target[:, :-1]).square().sum() for x in (means[probe], fitted)]
        by_means, sums = bool(errors[0] < BETTER * errors[1]), unfitted + basis @ fit
    positive = (unfitted[:, -1:] > LEAST_DENOMINATOR * size) & (not by_means)
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
