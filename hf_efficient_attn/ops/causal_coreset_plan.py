"""The choices of the causal coreset: budget, epochs, and clusters of keys for the landmarks of each epoch."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.blocks import take
from hf_efficient_attn.ops.coreset import cluster_sums, draw_apart, gumbel_numbers, nearest, refinement_steps
from hf_efficient_attn.ops.partial import accumulation_dtype
from hf_efficient_attn.ops.random import Seed

# Keys of the prefix, evenly spaced, from which landmarks are made.
_CANDIDATES = 1024
# Steps of Lloyd's algorithm.
_LLOYD_STEPS = 2
# A key x is drawn with a probability that grows with K(x, x)^DRAW_POWER, and has the weight K(x, x)^POWER in a mean.
DRAW_POWER, POWER, LEAST_LOG_WEIGHT = 0.5, 0.25, -60.0


class CausalCoresetOptions(NamedTuple):
    """Options of `causal_coreset_attention`.

    Attributes:
        num_exact: the first positions, which are computed exactly in sequences of any length; more than `block_size`.
        block_size: tokens of a block. A query attends to its own block and the block before it exactly.
        num_samples: m, the number of landmarks.
        cluster_size: the largest number of keys of a cluster, the most recent ones; 0 for no clusters.
        temperature: t. The landmarks are chosen and weighted with the kernel exp(t^2 scale <k_i, k_j>).
        ridge: positive, relative to the unit diagonal of K_cc.
        seed: seed of the landmarks.
    """

    num_exact: int
    block_size: int
    num_samples: int
    cluster_size: int
    temperature: float = 0.75
    ridge: float = 1e-3
    seed: Seed = 0


class Epoch(NamedTuple):
    """The choices for the queries from `start` to `end` - 1. Positions are counted from the start of the sequence.

    Attributes:
        start: position of the first query; `start` - block_size is the end of the prefix.
        end: position after the last query.
        candidate: int64 (C), the positions of the keys from which landmarks are made.
        draw: int64 (BH, m), the candidates with which the landmarks begin.
        cluster: int64 (BH, C), the landmark whose mean contains the candidate.
    """

    start: int
    end: int
    candidate: Tensor
    draw: Tensor
    cluster: Tensor


def split_columns(columns: int) -> dict[str, int]:
    """Distribute a budget of keys per query: the sizes in `CausalCoresetOptions`.

    Half goes to the near field, about a tenth to a cluster and the rest to landmarks. The first queries, which are
    exact, attend to fewer keys on average.
    """
    block_size, cluster_size = max(1, columns // 4), 3 * columns // 32
    return {
        "num_exact": max(3 * columns // 2, block_size + 1),
        "block_size": block_size,
        "num_samples": max(1, columns - 2 * block_size - cluster_size),
        "cluster_size": cluster_size,
    }


def epoch_bounds(length: int, options: CausalCoresetOptions) -> Iterator[tuple[int, int]]:
    """Start and end of the epochs of a sequence.

    After `num_exact` positions the first three epochs are about 1/3, 2/3 and 2/3 times as long. The later ones double
    the position.
    """
    start, block_size = options.num_exact, options.block_size
    for step in itertools.chain((start // 3, 2 * start // 3, 2 * start // 3), itertools.repeat(0)):
        if start >= length:
            return
        end = start + max(1, (step or start) // block_size) * block_size
        yield start, min(end, length)
        start = end


def draw_numbers(key: Tensor, options: CausalCoresetOptions) -> Tensor:
    """The random numbers of all epochs and heads of keys, for `plan_epoch`: (draws, C) in the accumulation dtype."""
    like = key.new_empty(0, dtype=accumulation_dtype(key.dtype))
    return gumbel_numbers(min(options.num_samples, _CANDIDATES), _CANDIDATES, options.seed, like)


def plan_epoch(
    key: Tensor, numbers: Tensor, bounds: tuple[int, int], options: CausalCoresetOptions, scale: float
) -> Epoch:
    """All choices of an epoch, from the keys of the prefix. No gradient.

    Args:
        key: (BH, N, D).
        numbers: from `draw_numbers`.
        bounds: the epoch, from `epoch_bounds`.
        options: see `CausalCoresetOptions`.
        scale: factor of the scores.
    """
    prefix = bounds[0] - options.block_size
    num_candidates = min(prefix, _CANDIDATES)
    candidate = torch.arange(num_candidates, device=key.device) * prefix // num_candidates
    with torch.no_grad():
        points = (key.index_select(1, candidate) - prefix_center(key, prefix)) * (
            options.temperature * abs(scale) ** 0.5
        )
        count = min(options.num_samples, num_candidates)
        draw = draw_apart(points, DRAW_POWER, numbers[:, :num_candidates], None, count).candidate
        drawn = take(points, draw)
        cluster = nearest(points, drawn)
        for _ in range(refinement_steps(_LLOYD_STEPS, points) - 1):
            cluster = nearest(points, cluster_means(points, points, cluster, drawn))
    return Epoch(*bounds, candidate, draw, cluster)


def prefix_center(key: Tensor, prefix: int) -> Tensor:
    """Mean of the keys of the prefix, (BH, 1, D) in the accumulation dtype."""
    return key[:, :prefix].mean(1, keepdim=True, dtype=accumulation_dtype(key.dtype))


def cluster_means(keys: Tensor, points: Tensor, cluster: Tensor, drawn: Tensor) -> Tensor:
    """The weighted means of clusters of keys (BH, C, D), or `drawn` (BH, m, D) where a cluster is empty.

    The kernel of `points` (BH, C, D) is exp(<x, y>). `cluster` is int64 (BH, C).
    """
    norm = points.square().sum(2, keepdim=True)
    weight = (POWER * (norm - norm.amax(1, keepdim=True))).clamp(min=LEAST_LOG_WEIGHT).exp()
    weighted, count = torch.cat((keys * weight, weight), 2), drawn.shape[1]
    sums = cluster_sums(cluster, weighted, count)
    total = sums[..., -1:]
    return torch.where(total > 0, sums[..., :-1] / torch.where(total > 0, total, 1.0), drawn)
