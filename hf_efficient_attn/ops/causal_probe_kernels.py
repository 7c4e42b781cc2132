"""The samples of all levels of `hf_efficient_attn.ops.causal` by exact rows of probes, with few kernels.

For accelerators: the number of kernels does not grow with the levels. All levels are planned together on a grid of
units, the tokens of an interval of the lowest sampled level. On each level a unit has the probes of its interval. Two
steps differ from the form for the CPU:

- The score of a key is the sum of the weights of the probes, not of their squares, and the values do not count. What a
  probe's weights sum to is estimated from as many evenly spread keys of the interval as a unit has.
- A key is drawn as often as its expected count says, rounded up or down, instead of at most once. Each time it has the
  weight 1 / (expected count). Scores are limited so that few keys are expected more than once.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.constants import constant
from hf_efficient_attn.ops.outputs import compute_into
from hf_efficient_attn.ops.partial import accumulation_dtype, partial_attention
from hf_efficient_attn.ops.random import Seed, head_slice, uniform

# Streams of random numbers.
_PROBES, _SAMPLES = 19, 20
# The least score of a key, relative to the mean.
_LEAST_SCORE = 1e-6
_GOLDEN_RATIO = 0.6180339887498949


class Grid(NamedTuple):
    """The sampled levels and their intervals, as far as they depend on shapes alone.

    Attributes:
        length: N.
        unit: tokens of an interval of the lowest sampled level.
        counts: the intervals of each sampled level.
        num_probes: queries of each interval.
        num_samples: samples of each interval.
    """

    length: int
    unit: int
    counts: tuple[int, ...]
    num_probes: int
    num_samples: int

    @property
    def num_units(self) -> int:
        """Whole units, which hold all intervals."""
        return self.length // self.unit


class _Random(NamedTuple):
    """The arguments of random numbers: heads, sequences of a batch, and the seed."""

    num_heads: int
    batch: int
    seed: Seed


def sample_all_levels(
    query: Tensor, key: Tensor, grid: Grid, scale: float, seed: Seed, batch: int
) -> tuple[Tensor, Tensor]:
    """Sample the keys of the intervals of all levels. No gradient.

    Args:
        query: (BH, N, D).
        key: (BH, N, D).
        grid: the intervals.
        scale: factor of the scores.
        seed: of the probes and samples.
        batch: B.

    Returns:
        index: int64 (BH, levels, J, M), counted from the first token of each interval. J is `grid.counts[0]`; a higher
            level has fewer intervals, and then entries without a meaning.
        log_weight: the same shape.
    """
    device, random = key.device, _Random(query.shape[0] // batch, batch, seed)
    scores = _scores(query, key, grid, scale, random)
    shape = *scores.shape[:2], grid.counts[0], grid.num_samples
    ends = scores.cumsum(2, dtype=torch.float64)
    tables = constant(_bounds, grid, device=device)
    bounds = ends.gather(2, tables[0].expand(len(key), -1, -1)) * tables[1]
    lower, upper = bounds.unflatten(2, (-1, 1)).chunk(2, 2)
    points = torch.lerp(lower, upper, _constant(_fractions, grid, random, device))
    first, last = constant(_first_and_last, grid, device=device)
    # Rounding moves no point out of its interval; nor do scores of masked tokens, which may be NaN.
    found = torch.searchsorted(ends, points.flatten(2)).view(shape).clamp(first, last)
    own = scores.gather(2, found.flatten(2)).view(shape)
    expected = torch.addcdiv(constant(_zero, device=device), own, upper - lower, value=grid.num_samples)
    dtype = key.dtype if backend(key) == "library" else accumulation_dtype(key.dtype)
    log_weight = torch.xlogy(-1.0, expected, out=torch.empty(shape, dtype=dtype, device=device))
    return found - first, log_weight


def _scores(query: Tensor, key: Tensor, grid: Grid, scale: float, random: _Random) -> Tensor:
    """The sum of the weights of the probes for each key of each level: (BH, levels, tokens of all units)."""
    (batch_heads, _, dim), device, acc_dtype = key.shape, key.device, accumulation_dtype(key.dtype)
    index = _constant(_probes, grid, random, device)
    probes = query.gather(1, index.unsqueeze(2).expand(-1, -1, dim)).to(key.dtype)
    spread = key.index_select(1, constant(_spread_keys, grid, device=device))
    blocks, spread = probes.unflatten(1, (-1, grid.num_probes)), spread.unflatten(1, (-1, grid.unit))
    lse = partial_attention(blocks, spread, spread, scale=scale).lse.to(key.dtype)
    del spread
    # The probes of each unit on all levels.
    interval, units = constant(_intervals, grid, device=device), batch_heads * grid.num_units
    own = blocks.flatten(2).index_select(1, interval).view(units, -1, dim)
    lse = lse.index_select(1, interval).view(units, -1, 1)
    keys = key[:, : grid.num_units * grid.unit].reshape(units, grid.unit, dim)
    weights = torch.baddbmm(lse, own, keys.mT, beta=-1, alpha=scale).exp_()
    weights = weights.view(batch_heads, grid.num_units, len(grid.counts), grid.num_probes, grid.unit)
    sums = weights.sum(3, dtype=acc_dtype).transpose(1, 2)
    del weights
    least, most = constant(_limits, grid, acc_dtype, device=device)
    scores = torch.empty(sums.shape, dtype=acc_dtype, device=device)
    compute_into(scores, torch.clamp, sums, least, most)
    return scores.flatten(2)


def _constant(make: Callable[..., Tensor], grid: Grid, random: _Random, device: torch.device) -> Tensor:
    return constant(make, grid, random, device=device)


def _offsets(grid: Grid, random: _Random, stream: int, device: torch.device) -> Tensor:
    """An offset in (0, 1) for each head and level: float64 (BH, levels)."""
    head = (
        torch.arange(random.num_heads, dtype=torch.float64, device=device)
        + head_slice(random.seed, random.num_heads).first
    )
    turn = head[:, None] * _GOLDEN_RATIO
    return (uniform((len(grid.counts),), random.seed, stream, device) + turn).frac().repeat(random.batch, 1)


def _levels(grid: Grid, device: torch.device) -> Tensor:
    """The level of each interval, counted from the lowest: int64 (I,)."""
    return torch.cat([torch.full((n,), i, device=device) for i, n in enumerate(grid.counts)])


def _starts(grid: Grid, device: torch.device) -> Tensor:
    """The first token of each interval: int64 (I,)."""
    return torch.cat([torch.arange(n, device=device) * (2 * grid.unit << i) for i, n in enumerate(grid.counts)])


def _probes(grid: Grid, random: _Random, device: torch.device) -> Tensor:
    """The positions of the probes, evenly spread in each interval: int64 (BH, I P)."""
    level, rank = _levels(grid, device), torch.arange(grid.num_probes, dtype=torch.float64, device=device)
    offset = _offsets(grid, random, _PROBES, device)[:, level].unsqueeze(2)
    distance = (grid.unit << level).unsqueeze(1) / grid.num_probes
    inside = ((rank + offset) * distance).floor().to(torch.int64)
    return (inside + _starts(grid, device)[:, None]).flatten(1)


def _spread_keys(grid: Grid, device: torch.device) -> Tensor:
    """The positions of as many evenly spread keys of each interval as a unit has: int64 (I unit,)."""
    inside = torch.arange(grid.unit, device=device) << _levels(grid, device)[:, None]
    return (inside + _starts(grid, device)[:, None]).flatten()


def _intervals(grid: Grid, device: torch.device) -> Tensor:
    """The interval of each unit on each level; any one if it lies in none: int64 (units levels,)."""
    unit, before, found = torch.arange(grid.num_units, device=device), 0, []
    for i, count in enumerate(grid.counts):
        found.append((unit >> (i + 1)).clamp(max=count - 1) + before)
        before += count
    return torch.stack(found, 1).flatten()


def _limits(grid: Grid, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The least score, and the one of a key that is expected once: (2, levels, 1, 1).

    The weights of a probe sum to about 2**i on the i-th level, because they are relative to some of the keys.
    """
    mean = grid.num_probes / grid.unit
    most = [grid.num_probes * 2.0**i / grid.num_samples for i in range(len(grid.counts))]
    least = torch.full((len(most),), mean * _LEAST_SCORE, dtype=dtype, device=device)
    return torch.stack((least, torch.tensor(most, dtype=dtype, device=device)))[:, :, None, None]


def _first_and_last(grid: Grid, device: torch.device) -> Tensor:
    """The first and the last token of each interval: int64 (2, levels, J, 1)."""
    j, tokens, found = torch.arange(grid.counts[0], device=device), grid.num_units * grid.unit, []
    for i in range(len(grid.counts)):
        start = j * (2 * grid.unit << i)
        found.append(torch.stack((start, start + (grid.unit << i) - 1)).clamp(max=tokens - 1))
    return torch.stack(found, 1).unsqueeze(3)


def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=device)


def _bounds(grid: Grid, device: torch.device) -> Tensor:
    """Where the sums of scores before and with each interval are, and factors of them: int64 (2, levels, 2 J).

    The factor is 0 before the first token.
    """
    first, last = _first_and_last(grid, device).squeeze(3)
    index = torch.cat((first - 1, last), 1)
    return torch.stack((index.clamp(min=0), (index >= 0).to(torch.int64)))


def _fractions(grid: Grid, random: _Random, device: torch.device) -> Tensor:
    """Where in its interval each sample lies, as a share of the sum of the scores: float64 (BH, levels, 1, M)."""
    step = torch.arange(grid.num_samples, dtype=torch.float64, device=device)
    offset = _offsets(grid, random, _SAMPLES, device)
    return ((step + offset.unsqueeze(2)) / grid.num_samples).unsqueeze(2)
