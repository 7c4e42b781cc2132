"""Which columns of the attention matrix to keep, and what they then weigh."""

import torch
from torch import Tensor


def inclusion_probabilities(scores: Tensor, budget: int) -> Tensor:
    """pi_j = min(1, c * score_j) with c such that they sum to `budget` (or all 1 where fewer have a positive score).

    Only the `budget` highest scores can be cut off. With the r highest cut off c is (budget - r) / (sum of the others),
    which cuts off one fewer for every r that is too large: the r wanted is the first that cuts off no more.

    Args:
        scores: (A, N), non-negative.
        budget: number of columns.

    Returns:
        float64 (A, N).
    """
    scores = scores.to(torch.float64)
    highest, index = scores.topk(min(budget, scores.shape[1]), dim=1)
    rest = scores.scatter(1, index, 0.0).sum(1, keepdim=True)
    # Sums from the smallest on, of the scores from rank r to the last.
    others = (highest.flip(1).cumsum(1) + rest).flip(1)
    left = budget - torch.arange(highest.shape[1], device=scores.device)
    cut = (highest * left >= others).sum(1, keepdim=True)
    above = torch.nn.functional.pad(highest, (1, 0), value=torch.inf).gather(1, cut)
    total = torch.cat((others, rest), 1).gather(1, cut)
    chances = scores * torch.where(total > 0, (budget - cut) / total, 0.0)
    return chances.masked_fill((scores >= above) & (scores > 0), 1.0).clamp(max=1.0)


def systematic_sample(
    chances: Tensor, count: int, offset: Tensor, group: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """At most `count` different indices of each sample, j with probability chances_j (Madow 1949).

    The chances are laid end to end, and every whole number plus `offset` picks the index on which it falls: no index is
    longer than 1, so none is picked twice.

    Args:
        chances: float64 (A, G, N) in [0, 1], the sum of each at most `count` up to rounding.
        offset: (A, S) in (0, 1), float64, one for each sample.
        group: int64 (A, S), that sample s of row a is drawn from chances[a, group[a, s]]; None where G is 1.

    Returns:
        index (A, S, count) ascending, log_weight (A, S, count) = -log(chance), float64, and picked, bool
        (A, S, count): False where the sum leaves a slot empty; its index is then 0 and its log_weight -inf.
    """
    points = torch.arange(count, device=chances.device, dtype=torch.float64) + offset.unsqueeze(2)
    index, chance, picked = _fall(chances, points, count + 1.0, group)
    picked = picked & (chance > 0)
    return torch.where(picked, index, 0), torch.where(picked, -chance.log(), -torch.inf), picked


def _fall(lengths: Tensor, points: Tensor, stretch: float, group: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """On which of the lengths of its group, laid end to end, each point falls, that length, and whether it is one.

    Args:
        lengths: (A, G, N), the sum of each group less than `stretch`.
        points: (A, S, K), from 0 on.
        group: as in `systematic_sample`.
    """
    (heads, groups, size), ends = lengths.shape, lengths.cumsum(2)
    if group is None:
        group = torch.zeros(points.shape[:2], dtype=torch.int64, device=points.device)
    else:
        # The groups one behind the other, each in a stretch of its own, are one search.
        ends = ends + stretch * torch.arange(groups, device=ends.device)[:, None]
        points = points + stretch * group.unsqueeze(2)
    found = torch.searchsorted(ends.view(heads, -1), points.flatten(1)).view_as(points)
    first = group.unsqueeze(2) * size
    on = found < first + size
    found = torch.where(on, found, first)
    return found - first, lengths.flatten(1).gather(1, found.flatten(1)).view_as(points), on


def independent_sample(
    scores: Tensor, count: int, numbers: Tensor, group: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`count` indices of each sample drawn independently with p_j proportional to the scores, weights 1/(count p_j).

    The draw of Algorithm 1 of Zandieh et al. 2023 (lines 5-7); an index can come up again and again.

    Args:
        scores: (A, G, N), non-negative.
        numbers: (A, S, count), uniform in (0, 1), float64.
        group: as in `systematic_sample`.

    Returns:
        as `systematic_sample`; nothing is picked where the scores are all 0.
    """
    scores = scores.to(torch.float64)
    shares = scores / scores.sum(2, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    # The shares add up to 1 but for rounding.
    index, chance, picked = _fall(shares, numbers.sort(2).values * (1 - 1e-12), 2.0, group)
    picked = picked & (chance > 0)
    return torch.where(picked, index, 0), torch.where(picked, -(count * chance).log(), -torch.inf), picked


def stratified_ranks(count: int, available: Tensor | int, offset: Tensor) -> Tensor:
    """`count` ranks spread evenly over 0 .. available-1, one in each of `count` equal strata: int64 (A, count).

    Args:
        available: (A, 1) int64, or an integer; at least 1, else rank 0 is given.
        offset: (A, 1), where in its stratum each rank lies, in (0, 1), float64.
    """
    steps = torch.arange(count, device=offset.device, dtype=torch.float64) + offset
    ranks = (steps * available / count).floor().to(torch.int64)
    last = available - 1
    return ranks.clamp(max=last) if isinstance(last, int) else torch.minimum(ranks, last.clamp(min=0))


def operator_norm_squared(x: Tensor) -> Tensor:
    """Largest eigenvalue of x^T x by the power method: x (A, N, D) -> (A, 1)."""
    return largest_eigenvalue(x.transpose(1, 2) @ x)


def largest_eigenvalue(gram: Tensor, steps: int = 12) -> Tensor:
    """Largest eigenvalue of positive semi-definite matrices by the power method: (A, D, D) -> (A, 1)."""
    # Start at the column of the largest diagonal entry, which is orthogonal to the first eigenvector in no random
    # matrix.
    largest = gram.diagonal(dim1=1, dim2=2).argmax(1)
    vector = gram.gather(2, largest[:, None, None].expand(-1, gram.shape[1], 1))
    tiny = torch.finfo(gram.dtype).tiny
    for _ in range(steps):
        vector = vector / vector.norm(dim=1, keepdim=True).clamp(min=tiny)
        vector = gram @ vector
    return vector.norm(dim=1)
