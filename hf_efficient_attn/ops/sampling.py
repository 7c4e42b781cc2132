"""Which columns of the attention matrix to keep, and what they then weigh."""

import torch
from torch import Tensor


def inclusion_probabilities(scores: Tensor, budget: Tensor | int, rounds: int = 8) -> Tensor:
    """pi_j = min(1, c * score_j) with c such that they sum to `budget` (or all 1 where fewer have a positive score).

    Each round sets c by the scores that are not cut off yet; a score that was cut off stays so, since c only grows, and
    what is left over after the last round is so little that the sum falls short by a fraction of one column.

    Args:
        scores: (A, N), non-negative.
        budget: number of columns, an integer or (A, 1).

    Returns:
        float64 (A, N).
    """
    scores = scores.to(torch.float64)
    full = torch.zeros_like(scores, dtype=torch.bool)
    for _ in range(rounds):
        rest = (budget - full.sum(1, keepdim=True)).clamp(min=0)
        total = scores.masked_fill(full, 0.0).sum(1, keepdim=True)
        chances = torch.where(total > 0, rest / total, 0.0) * scores
        full = full | (chances >= 1.0)
    return torch.where(full, 1.0, chances).clamp(max=1.0)


def systematic_sample(chances: Tensor, count: int, offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """At most `count` different indices of each row, j with probability chances_j (Madow 1949).

    The chances are laid end to end, and every whole number plus `offset` picks the index on which it falls: no index is
    longer than 1, so none is picked twice.

    Args:
        chances: float64 (A, N) in [0, 1], each row's sum at most `count` up to rounding.
        offset: (A,) or (A, 1) in (0, 1), float64.

    Returns:
        index (A, count) ascending, log_weight (A, count) = -log(chance), float64, and picked, bool (A, count): False
        where the row's sum leaves a slot empty; its index is then 0 and its log_weight -inf.
    """
    ends = chances.cumsum(1)
    points = torch.arange(count, device=chances.device, dtype=torch.float64) + offset.reshape(-1, 1)
    index = torch.searchsorted(ends, points.expand(chances.shape[0], -1).contiguous())
    picked = index < chances.shape[1]
    index = torch.where(picked, index, 0)
    chance = chances.gather(1, index)
    picked = picked & (chance > 0)
    return torch.where(picked, index, 0), torch.where(picked, -chance.log(), -torch.inf), picked


def independent_sample(scores: Tensor, count: int, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`count` indices of each row drawn independently with p_j proportional to the scores, weights 1/(count p_j).

    The draw of Algorithm 1 of Zandieh et al. 2023 (lines 5-7); an index can come up again and again.

    Args:
        scores: (A, N), non-negative.
        numbers: (A, count), uniform in (0, 1), float64.

    Returns:
        as `systematic_sample`; nothing is picked in a row whose scores are all 0.
    """
    scores = scores.to(torch.float64)
    ends = scores.cumsum(1)
    total = ends[:, -1:]
    index = torch.searchsorted(ends, (numbers.sort(1).values * total).contiguous()).clamp(max=scores.shape[1] - 1)
    chance = scores.gather(1, index) / total.clamp(min=torch.finfo(torch.float64).tiny)
    picked = chance > 0
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
