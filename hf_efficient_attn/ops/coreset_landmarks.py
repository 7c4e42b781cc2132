"""Landmarks: weighted means of clusters of keys that begin with keys far from each other.

`hf_efficient_attn.ops.weighted_coreset` explains the choice.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.coreset import cluster_sums, draw_apart, even_positions, nearest
from hf_efficient_attn.ops.partial import LOG2_E
from hf_efficient_attn.ops.random import Seed, constant
from hf_efficient_attn.ops.tokens import take

# t: how much less the kernel distinguishes keys than the scores do. Of .5, .6, .7, .85 and 1, .7 has the least error.
TEMPERATURE = 0.7
# The share of the mean query in g, and the powers of exp(2 g) in the draw of a key and in the mean of its cluster.
TILT, DRAW_POWER, POWER = 0.3, 0.7, 0.5
# Queries of the mean, and the smallest logarithm of a key's weight in the mean of its cluster.
NUM_QUERIES, LEAST_LOG_WEIGHT = 512, -60.0


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


def with_ones(x: Tensor) -> Tensor:
    """One more column, for the denominators: (..., Dv) -> (..., Dv + 1)."""
    return torch.cat((x, torch.ones_like(x[..., :1])), -1)


def middle_positions(length: int, count: int, device: torch.device) -> Tensor:
    """The middle of each of `count` equal parts of the sequence."""
    return ((torch.arange(count, dtype=torch.float64, device=device) + 0.5) * length / count).long()


def choose_landmarks(query: Tensor, key: Tensor, value: Tensor, numbers: Tensor, options: CoresetOptions) -> Landmarks:
    """Draw keys among evenly spaced candidates, and move them to the means of their clusters."""
    count, scale, root = options.num_landmarks, options.scale, TEMPERATURE * abs(options.scale) ** 0.5
    spread = constant(middle_positions, query.shape[1], min(query.shape[1], NUM_QUERIES), device=key.device)
    tilt = query.index_select(1, spread).mean(1, keepdim=True) * (TILT * scale)
    position = constant(even_positions, key.shape[1], numbers.shape[1], device=key.device)
    keys, values = (x if len(position) == x.shape[1] else x.index_select(1, position) for x in (key, value))
    # 2 g = |x|^2 + 2 <tilt, k> of the candidates.
    points, tilted = (keys * root).detach(), 2.0 * torch.bmm(keys, tilt.mT).squeeze(2)
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
    kernel = (
        ((torch.baddbmm(-half_norm, points, points.mT) - half_norm.mT).to(key.dtype) * LOG2_E).clamp(max=0.0).exp2()
    )
    bias = -(half_norm + torch.bmm(landmarks.double(), tilt.double().mT)).squeeze(2)
    value, log_count = sums[..., :-1] / sums[..., -1:].clamp(min=1.0), sums[..., -1].detach().log()
    return Landmarks(landmarks, points, bias.to(key.dtype), tilt, kernel, value, log_count)
