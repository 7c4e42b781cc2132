"""Indices at random offsets: in equal parts of a sequence, and in intervals of a line, whose lengths are probabilities.

Both add a number below 1 to a large one, so the sum is float64. On devices without float64 it is an integer, in units
of a power of 2.
"""

import torch
from torch import Tensor

from hf_efficient_attn.ops.backends.devices import widened
from hf_efficient_attn.ops.index import clamp_index, integers

# The bits of an offset, in an index and in a point on a line.
_BITS = 20
_LINE_BITS = 40


def strata(number: Tensor, offset: Tensor, available: Tensor | int, count: Tensor | int) -> Tensor:
    """Cut `available` indices into `count` strata, and find the index at an offset in (0, 1) of the stratum `number`.

    All arguments but the offset are integers. In float32 a large number plus an offset would be rounded to the next
    stratum, so without float64 this computes with integers.
    """
    if offset.dtype == torch.float64:
        return ((number + offset) * available / count).to(torch.int64)
    return ((number << _BITS) + (offset * 2.0**_BITS).to(torch.int64)) * available // (count << _BITS)


def stratified_ranks(count: int, available: Tensor | int, offset: Tensor) -> Tensor:
    """Evenly spread ranks below `available`, one from each of `count` equal strata: int64 (BH, count).

    `available` is an integer, or int64 that broadcasts to the result; if it is 0 the ranks are 0. The offset in (0, 1),
    float64 (BH, 1 or count), is where in its stratum each rank lies.
    """
    return clamp_index(strata(integers(count, offset.device), offset, available, count), available - 1)


def systematic_sample(
    probabilities: Tensor,
    num_samples: int,
    offset: Tensor,
    group: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Sample at most `num_samples` different indices, index j with probability `probabilities[j]` (Madow 1949).

    The probabilities are laid end to end on a line. Each of the points offset, offset + 1, ... selects the index in
    whose interval it lies. No interval is longer than 1, so no index is selected twice.

    Args:
        probabilities: float64 (BH, G, N) in [0, 1]. Each of the G groups sums to an integer up to rounding, and to
            `num_samples` at most.
        num_samples: number of points.
        offset: float64 (BH, S) in (0, 1), one for each of S samples.
        group: int64 (BH or 1, S), the group from which each sample is drawn; None if G is 1.
        dtype: dtype of the log-weights.

    Returns:
        index: int64 (BH, S, num_samples), ascending where an index is selected.
        log_weight: (BH, S, num_samples), -log(probability); -inf where no index is selected.
    """
    steps = integers(num_samples, offset.device)  # (num_samples,)
    points = _points(offset.unsqueeze(2), steps)  # (BH, S, num_samples)
    index, probability, total = _locate(probabilities, points, num_samples + 1, group)
    unused = steps >= total.round()  # (BH, S, num_samples)
    return index.masked_fill_(unused, 0), probability.to(dtype).log_().neg_().masked_fill_(unused, -torch.inf)


def independent_sample(
    scores: Tensor, num_samples: int, numbers: Tensor, group: Tensor | None = None, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Sample with replacement, with probabilities p_j proportional to the scores and weights 1 / (num_samples p_j).

    This is the sampling of Algorithm 1 of Zandieh et al. 2023 (lines 5-7). Groups, dtype and results are those of
    `systematic_sample`. The scores (BH, G, N) are not negative; nothing is selected if all are 0. The numbers, float64
    (BH, S, num_samples), are uniform in (0, 1).
    """
    scores = widened(scores)
    shares = scores / scores.sum(2, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)  # (BH, G, N)
    index, share, total = _locate(shares, _points(numbers.sort(2).values), 2, group)  # (BH, S, num_samples) each
    nothing = total < 0.5  # (BH, S, 1)
    log_weight = (share.to(dtype) * num_samples).log_().neg_()
    return index.masked_fill_(nothing, 0), log_weight.masked_fill_(nothing, -torch.inf)


def _points(part: Tensor, whole: Tensor | None = None) -> Tensor:
    """Make points of a line from parts in (0, 1) and integers, or None for 0.

    Without float64 they are integers, in units of 2^-40, so that a large number keeps its part.
    """
    if part.dtype == torch.float64:
        # Moved back a little, so that rounding moves no point beyond the end.
        shrink = 1.0 - 1e-9
        points = part * shrink
        return points if whole is None else points + whole.to(part.dtype) * shrink
    points = (part * 2.0**_LINE_BITS).to(torch.int64)
    return points if whole is None else points + (whole << _LINE_BITS)


def _locate(lengths: Tensor, points: Tensor, stretch: int, group: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Find the interval in which each point lies if the intervals of its group are laid end to end.

    Args:
        lengths: (BH, G, N), the lengths of the intervals. Each group sums to less than `stretch`.
        points: (BH, S, K), from `_points`.
        stretch: length of the line that each group gets.
        group: as in `systematic_sample`.

    Returns:
        The index of the interval and its length, (BH, S, K) each, and the sum of all lengths, (BH, S, 1). A point
        beyond the end has any index.
    """
    batch_heads, groups, size = lengths.shape
    as_integers = points.dtype == torch.int64  # whose sums are exact
    ends = ((lengths * 2.0**_LINE_BITS).to(torch.int64) if as_integers else lengths).cumsum(2)
    total = ends[..., -1:]
    if group is not None:
        total = total.gather(1, group.unsqueeze(2).expand(batch_heads, -1, -1))  # (BH, S, 1)
    if as_integers:
        stretch = stretch << _LINE_BITS
        points = torch.minimum(points, total).clamp_(min=1)
        total = total.to(lengths.dtype) * 2.0**-_LINE_BITS
    if group is not None:
        # The groups are laid end to end as well, so that one search serves all of them.
        ends = ends + stretch * integers(groups, ends.device).to(ends.dtype)[:, None]  # (BH, G, N)
        points = points + stretch * group.to(points.dtype).unsqueeze(2)  # (BH, S, K)
    found = torch.searchsorted(ends.view(batch_heads, -1), points.flatten(1))  # (BH, S * K)
    # Some are beyond the end if probabilities are NaN, as in intervals of masked tokens that nothing sees.
    found.clamp_(max=groups * size - 1)
    length = lengths.view(batch_heads, -1).gather(1, found)
    return found.remainder_(size).view_as(points), length.view_as(points), total
