"""Which keys to sample, and the log-weights that make up for the keys that are not sampled."""

import torch
from torch import Tensor

from hf_efficient_attn.ops.constants import constant, integers

# Samples up to which the matrix of `_limit` is kept: 8 MB.
_KEPT_SAMPLES = 1024
# A sum of scores that is 0. No score is so small, and its inverse times `num_samples` is finite.
_TINY = 1e-290


def inclusion_probabilities(scores: Tensor, num_samples: int) -> Tensor:
    """min(1, c * score) with the factor c for which the probabilities sum to `num_samples`.

    If at most `num_samples` scores are positive, each of their probabilities is 1. Only the `num_samples` highest
    scores can reach the limit of 1. If the r highest do, then c is (num_samples - r) divided by the sum of the others.
    This quotient grows with r as long as the next score reaches the limit, and falls from then on. So the right c is
    the largest of them.

    Args:
        scores: (BH, N), not negative.
        num_samples: expected number of samples.

    Returns:
        float64 (BH, N), since sums of many probabilities select the samples.
    """
    if not num_samples:
        return torch.zeros_like(scores, dtype=torch.float64)
    highest, index = scores.topk(min(num_samples, scores.shape[1]), dim=1)
    rest = scores.scatter(1, index, 0.0).sum(1, keepdim=True, dtype=torch.float64)
    # Sums of the scores from rank r on, r from the last to 0, added from the smallest to the largest.
    others = highest.flip(1).cumsum(1, dtype=torch.float64) + rest
    left = constant(_left, highest.shape[1], num_samples, device=scores.device)
    return (scores * (left / others.clamp(min=_TINY)).amax(1, keepdim=True)).clamp(max=1.0)


def _left(count: int, num_samples: int, device: torch.device) -> Tensor:
    """num_samples - r, for r from count - 1 to 0."""
    return torch.arange(1, count + 1, dtype=torch.float64, device=device) + (num_samples - count)


def systematic_sample(
    probabilities: Tensor, num_samples: int, offset: Tensor, group: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample at most `num_samples` different indices, index j with probability `probabilities[j]` (Madow 1949).

    The probabilities are laid end to end on a line. Each of the points offset, offset + 1, ... selects the index in
    whose interval it lies. No interval is longer than 1, so no index is selected twice.

    Args:
        probabilities: float64 (BH, G, N) in [0, 1]. Each of the G groups sums to at most `num_samples` up to rounding.
        num_samples: number of points.
        offset: float64 (BH, S) in (0, 1), one for each of S samples.
        group: int64 (BH, S), the group from which each sample is drawn; None if G is 1.

    Returns:
        index: int64 (BH, S, num_samples), ascending; 0 where no index is selected.
        log_weight: float64 (BH, S, num_samples), -log(probability); -inf where no index is selected.
        selected: bool (BH, S, num_samples), False for the points beyond the sum of the probabilities.
    """
    points = torch.arange(num_samples, device=probabilities.device, dtype=torch.float64) + offset.unsqueeze(2)
    index, probability, selected = _locate(probabilities, points, num_samples + 1.0, group)
    selected = selected & (probability > 0)
    return torch.where(selected, index, 0), torch.where(selected, -probability.log(), -torch.inf), selected


def complete_systematic_sample(
    probabilities: Tensor, num_samples: int, offset: Tensor, group: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`systematic_sample` if every group sums to `num_samples`, up to rounding, so that every point selects an index.

    It takes half of the operations, each of which is a kernel on an accelerator. The arguments are the same.

    Returns:
        index: int64 (BH, S, num_samples), ascending.
        log_weight: float64 (BH, S, num_samples).
    """
    (batch_heads, groups, size), ends = probabilities.shape, probabilities.cumsum(2)
    if group is not None and groups > 1:
        stretch = num_samples + 1.0
        ends = ends + constant(_ends_of_groups, groups, stretch, device=ends.device)
        offset = torch.add(offset, group, alpha=stretch)
    # Moved back a little, so that rounding moves no point beyond the end.
    points = offset.unsqueeze(2) + constant(_steps, num_samples, device=offset.device)
    found = torch.searchsorted(ends.view(batch_heads, -1), points.flatten(1))
    # Points are never beyond the end, unless probabilities are NaN, as in intervals of masked tokens that nothing sees.
    found = found.clamp_(max=groups * size - 1)
    probability = probabilities.view(batch_heads, -1).gather(1, found).view_as(points)
    return found.remainder_(size).view_as(points), probability.log().neg_()


def sample_with_few_kernels(
    scores: Tensor, num_samples: int, offset: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`complete_systematic_sample` by the probabilities of `inclusion_probabilities`, for accelerators.

    Args:
        scores: (BH, G, N), positive.
        num_samples: number of points, less than N.
        offset: float64 (BH, G, S) in (0, 1), one for each of the S samples of a group.
        dtype: of the log-weights.

    Returns:
        index: int64 (BH, G, S, num_samples), ascending.
        log_weight: (BH, G, S, num_samples).
    """
    probabilities = (scores / _limit(scores, num_samples)).clamp(max=1.0)
    points = offset.unsqueeze(3) + integers(num_samples, scores.device)
    # Without the last end, rounding moves no point beyond the keys.
    index = torch.searchsorted(probabilities[..., :-1].cumsum(2), points.flatten(2))
    log_weight = index.new_empty(index.shape, dtype=dtype)
    torch.xlogy(-1.0, probabilities.gather(2, index), out=log_weight)
    return index.view_as(points), log_weight.view_as(points)


def _limit(scores: Tensor, num_samples: int) -> Tensor:
    """The score from which a key is always included: float64 (BH, G, 1).

    If the r highest scores reach it, it is the sum of the others divided by (num_samples - r). This quotient is the
    least for the right r.
    """
    total, highest = scores.sum(2, keepdim=True, dtype=torch.float64), scores.topk(num_samples, dim=2).values
    is_kept = num_samples <= _KEPT_SAMPLES
    of_ranks = (
        constant(_of_ranks, num_samples, device=scores.device) if is_kept else _of_ranks(num_samples, scores.device)
    )
    return (torch.cat((total, highest), 2) @ of_ranks).amin(2, keepdim=True)


def _of_ranks(num_samples: int, device: torch.device) -> Tensor:
    """By which the total and the highest scores become the quotients of all r: float64 (M + 1, M)."""
    sums = torch.ones(num_samples, num_samples, dtype=torch.float64, device=device).triu(1).neg()
    sums = torch.cat((torch.ones_like(sums[:1]), sums))
    return sums / torch.arange(num_samples, 0, -1, dtype=torch.float64, device=device)


def _ends_of_groups(groups: int, stretch: float, device: torch.device) -> Tensor:
    return (torch.arange(groups, dtype=torch.float64, device=device) * stretch)[:, None]


def _steps(num_samples: int, device: torch.device) -> Tensor:
    return torch.arange(num_samples, dtype=torch.float64, device=device) * (1.0 - 1e-9) - 1e-9


def _locate(lengths: Tensor, points: Tensor, stretch: float, group: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Find the interval in which each point lies if the intervals of its group are laid end to end.

    Args:
        lengths: (BH, G, N), the lengths of the intervals. Each group sums to less than `stretch`.
        points: (BH, S, K), not negative.
        stretch: length of the line that each group gets.
        group: as in `systematic_sample`.

    Returns:
        The index of the interval, its length, and whether there is one; (BH, S, K) each.
    """
    (batch_heads, groups, size), ends = lengths.shape, lengths.cumsum(2)
    if group is None:
        group = torch.zeros(points.shape[:2], dtype=torch.int64, device=points.device)
    else:
        # The groups are laid end to end as well, so that one search serves all of them.
        ends = ends + stretch * torch.arange(groups, device=ends.device)[:, None]
        points = points + stretch * group.unsqueeze(2)
    found = torch.searchsorted(ends.view(batch_heads, -1), points.flatten(1)).view_as(points)
    first = group.unsqueeze(2) * size
    inside = found < first + size
    found = torch.where(inside, found, first)
    return found - first, lengths.flatten(1).gather(1, found.flatten(1)).view_as(points), inside


def independent_sample(
    scores: Tensor, num_samples: int, numbers: Tensor, group: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample with replacement, with probabilities p_j proportional to the scores and weights 1 / (num_samples p_j).

    This is the sampling of Algorithm 1 of Zandieh et al. 2023 (lines 5-7).

    Args:
        scores: (BH, G, N), not negative.
        num_samples: indices of each sample.
        numbers: float64 (BH, S, num_samples), uniform in (0, 1).
        group: as in `systematic_sample`.

    Returns:
        As `systematic_sample`. Nothing is selected if all scores are 0.
    """
    scores = scores.to(torch.float64)
    shares = scores / scores.sum(2, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    # Rounding may leave the sum of the shares just below 1.
    index, probability, selected = _locate(shares, numbers.sort(2).values * (1 - 1e-12), 2.0, group)
    selected = selected & (probability > 0)
    log_weight = torch.where(selected, -(num_samples * probability).log(), -torch.inf)
    return torch.where(selected, index, 0), log_weight, selected


def stratified_ranks(count: int, available: Tensor | int, offset: Tensor) -> Tensor:
    """Evenly spread ranks below `available`, one from each of `count` equal strata.

    Args:
        count: number of ranks.
        available: an integer, or int64 broadcastable to the result. If it is 0 the ranks are 0.
        offset: float64 in (0, 1), where in its stratum each rank lies; the last dimension is 1.

    Returns:
        int64 (BH, count), for `offset` (BH, 1).
    """
    steps = torch.arange(count, device=offset.device, dtype=torch.float64) + offset
    ranks = (steps * available / count).floor().to(torch.int64)
    if isinstance(available, int):
        return ranks.clamp(max=available - 1)
    return torch.minimum(ranks, (available - 1).clamp(min=0))


def operator_norm_squared(x: Tensor) -> Tensor:
    """Largest eigenvalue of x^T x by the power method: (BH, N, D) -> (BH, 1)."""
    return largest_eigenvalue(x.transpose(1, 2) @ x)


def largest_eigenvalue(gram: Tensor, steps: int = 12) -> Tensor:
    """Largest eigenvalue of positive semidefinite matrices by the power method: (BH, D, D) -> (BH, 1)."""
    # Start from the column with the largest diagonal entry. For random matrices it is never orthogonal to the first
    # eigenvector.
    largest = gram.diagonal(dim1=1, dim2=2).argmax(1)
    vector = gram.gather(2, largest[:, None, None].expand(-1, gram.shape[1], 1))
    tiny = torch.finfo(gram.dtype).tiny
    for _ in range(steps):
        vector = vector / torch.linalg.vector_norm(vector, dim=1, keepdim=True).clamp(min=tiny)
        vector = gram @ vector
    eigenvalue: Tensor = torch.linalg.vector_norm(vector, dim=1)
    return eigenvalue
