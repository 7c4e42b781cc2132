"""Coresets of keys: pivots by randomized pivoted Cholesky, and the regularized solve for their Nystrom weights.

The kernel is exp(<x, y>) for keys x and y that the caller has scaled. m pivots S approximate the whole kernel matrix by
K_:S K_SS^-1 K_S: (Nystrom). Randomly pivoted Cholesky (Chen, Epperly, Tropp, Webber 2025) draws each pivot with a
probability proportional to the diagonal of what is left of the kernel matrix. Here several pivots are drawn at a time,
as in the block form of the algorithm.

Nothing overflows, because all matrices are those of exp(<x, y> - |x|^2 / 2 - |y|^2 / 2) = exp(-|x - y|^2 / 2), whose
diagonal is 1. The factors exp(|x|^2) between the two diagonals occur in the probabilities only, as logarithms.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.partial import LOG2_E
from hf_efficient_attn.ops.random import Seed, constant, uniform, uniform_of_heads
from hf_efficient_attn.ops.slices import slice_size, sliced
from hf_efficient_attn.ops.tokens import take, valid_first

# Streams of random numbers, one for each draw of a block of pivots.
_STREAM = 5000

# The first draws are of this size. A draw does not see how similar its own pivots are, so early ones must be small.
_FIRST_DRAW = 8

# Logarithms of weights below `_LEAST` times the largest one are raised to it, and pivots that add nothing come last.
_LEAST, _LAST = -1e4, -1e5

# A slice of distances may be this multiple of what `slices` is meant for, 12 MiB on a CPU: with twice as much they take
# 1.3 times as long.
_LARGER_SLICES = 3

# The least share that is left over of a point, for `draw_apart`.
_LEAST_LEFT = 1e-12


class Pivots(NamedTuple):
    """Chosen candidates of every head.

    Attributes:
        candidate: int64 (BH, m), the indices of different candidates; 0 where none is left.
        selected: bool (BH, m), False where none is left.
    """

    candidate: Tensor
    selected: Tensor


def _draw_sizes(num_pivots: int, block: int) -> list[int]:
    """How many pivots each draw selects: never more than have been selected before, except in the first draw."""
    sizes, total = [], 0
    while total < num_pivots:
        sizes.append(min(block, max(_FIRST_DRAW, total), num_pivots - total))
        total += sizes[-1]
    return sizes


def _growing_draws(count: int) -> list[int]:
    """How many points each draw of `draw_apart` selects: three times as many as all before it, and 64 at first."""
    sizes: list[int] = []
    while sum(sizes) < count:
        sizes.append(min(count - sum(sizes), max(64, 3 * sum(sizes))))
    return sizes


def gumbel_numbers(count: int, num_candidates: int, seed: Seed, like: Tensor) -> Tensor:
    """Standard Gumbel numbers (draws, C) for `draw_apart`, where those of a candidate do not depend on C.

    Those of an integer seed are kept, so they must not be modified.
    """
    return _kept_gumbel(len(_growing_draws(count)), num_candidates, None, seed, like)[:, 0]


@torch.no_grad()
def draw_apart(points: Tensor, power: float, numbers: Tensor, count: int, tilt: Tensor | None = None) -> Tensor:
    """Draw points that are far from each other, in a few draws, each from the ones that the earlier draws left over.

    The probability of a point x grows with K(x, x)^power (1 - K(x, p)^2 / (K(x, x) K(p, p))) for the kernel
    K = exp(<x, y>) and the nearest p of the earlier draws: the diagonal of what Nystrom's approximation of K by p alone
    leaves over. With one draw per point this would be like k-means++ (Arthur & Vassilvitskii 2007).

    Args:
        points: (BH, C, D).
        power: see above.
        numbers: (draws, C), from `gumbel_numbers`, the same for all heads.
        count: m, at most C.
        tilt: (BH, C), what is added to the squared norm of each point in K(x, x), or None.

    Returns:
        int64 (BH, m), indices of different points. The first ones are a choice of fewer.
    """
    norm = points.square().sum(2)
    log_weight = norm if tilt is None else norm + tilt
    log_weight = ((log_weight - log_weight.amax(1, keepdim=True)) * power).clamp(min=_LEAST)
    weight_left, closest, picked, sizes = log_weight, None, [], _growing_draws(count)
    for i, size in enumerate(sizes):
        index = (weight_left + numbers[i]).topk(size, dim=1)[1]
        picked.append(index)
        if i + 1 < len(sizes):
            log_weight = log_weight.scatter(1, index, -torch.inf)  # what is drawn is not drawn again
            offset = norm.gather(1, index).unsqueeze(2)
            found = torch.baddbmm(offset, take(points, index), points.mT, beta=-1.0, alpha=2.0).amax(1)
            closest = found if closest is None else torch.maximum(closest, found)
            left = torch.expm1((closest - norm).clamp(max=0.0))
            weight_left = log_weight + left.clamp(max=-_LEAST_LEFT).abs().log()
    return torch.cat(picked, 1)


def _kept_gumbel(num_draws: int, num_candidates: int, num_heads: int | None, seed: Seed, like: Tensor) -> Tensor:
    """`_gumbel`, kept for an integer seed."""
    shape = num_draws, num_candidates, num_heads, seed, like.dtype
    return constant(_gumbel, *shape, device=like.device)


def _gumbel(
    num_draws: int,
    num_candidates: int,
    num_heads: int | None,
    seed: Seed,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Standard Gumbel numbers (draws, H, C). The number of a candidate does not depend on how many there are.

    Without `num_heads` they are (draws, 1, C), the same for all heads.
    """
    streams = range(_STREAM, _STREAM + num_draws)
    if num_heads is None:
        draws = [uniform((num_candidates, 1), seed, stream, device) for stream in streams]
    else:
        draws = [uniform_of_heads(num_candidates, num_heads, seed, stream, device) for stream in streams]
    return -(-torch.stack(draws).mT.log()).log().to(dtype)


@torch.no_grad()
def nearest(points: Tensor, landmarks: Tensor, penalty: Tensor | None = None) -> Tensor:
    """The nearest landmark (BH, m, D) of every point (BH, C, D), by the Euclidean distance: int64 (BH, C).

    `penalty` (BH, m, 1) is added to half the squared distances to a landmark. Distances are equal up to rounding of
    the last bits: the index replaces the last bits of each number, so that the maximum contains it. On a CPU this takes
    a quarter of the time of `argmax`.
    """
    integer, count = (torch.int64 if points.dtype == torch.float64 else torch.int32), landmarks.shape[1]
    bits, index = (1 << (count - 1).bit_length()) - 1, constant(_integers_of, count, integer, device=points.device)
    offset = 0.5 * landmarks.square().sum(2, keepdim=True)
    offset = offset if penalty is None else offset + penalty

    def some_heads(points: Tensor, landmarks: Tensor, offset: Tensor) -> Tensor:
        # Not by `baddbmm`, which takes twice as long: on the CPU it first copies the offsets to all rows.
        scores = torch.bmm(points, landmarks).sub_(offset)
        scores.view(integer).bitwise_and_(~bits).bitwise_or_(index)
        return scores.amax(2)

    size = slice_size(points.shape[1] * count // _LARGER_SLICES, points.device)
    return sliced(some_heads, points, landmarks.mT, offset.mT, size=size).view(integer).bitwise_and(bits).long()


def _integers_of(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=dtype, device=device)


def cluster_sums(cluster: Tensor, x: Tensor, count: int) -> Tensor:
    """The sums of the members of each of `count` clusters: int64 (BH, C), (BH, C, F) -> (BH, count, F)."""
    first = constant(_first_of_heads, len(x), count, device=x.device)
    sums = x.new_zeros(len(x) * count, x.shape[2])
    return sums.index_add(0, (cluster + first).flatten(), x.flatten(0, 1)).view(len(x), count, -1)


def _first_of_heads(batch_heads: int, count: int, device: torch.device) -> Tensor:
    return (torch.arange(batch_heads, device=device) * count).unsqueeze(1)


def choose_pivots(
    points: Tensor, valid: Tensor | None, num_pivots: int, *, seed: Seed, batch: int, block: int = 64
) -> Pivots:
    """Choose pivots by randomized pivoted Cholesky on exp(<x_i, x_j>).

    A draw selects candidates without replacement, with probabilities proportional to the residual diagonal: the ones
    with the largest log(residual) + Gumbel number. The numbers are a function of seed, head and candidate, and equal
    for all sequences of the batch. So the pivots of a sequence depend neither on the batch nor on padding, provided
    that the valid candidates come first. Candidates without a residual, such as duplicates, are selected only if no
    others are left. No gradient flows through the choice.

    Args:
        points: (BH, C, D) in the accumulation dtype, finite, with finite squared norms.
        valid: bool (BH, C), which candidates exist, or None.
        num_pivots: m, at most C.
        seed: the seed of the draws.
        batch: B, the number of sequences.
        block: the largest number of pivots that are drawn at a time.

    Returns:
        `Pivots` (BH, m).
    """
    (batch_heads, num_candidates, _), sizes = points.shape, _draw_sizes(num_pivots, block)
    numbers = _kept_gumbel(len(sizes), num_candidates, batch_heads // batch, seed, points)  # (draws, H, C)
    with torch.no_grad():

        def some_heads(points: Tensor, valid: Tensor | None, head: Tensor) -> Tensor:
            return torch.stack(_pivots_of_heads(points, valid, numbers[:, head], sizes), 1)

        head = torch.arange(batch_heads, device=points.device) % (batch_heads // batch)
        size = slice_size(num_pivots * num_candidates // 2, points.device)
        index, selected = sliced(some_heads, points.detach(), valid, head, size=size).unbind(1)
    return Pivots(index, selected > 0)


def _pivots_of_heads(points: Tensor, valid: Tensor | None, gumbel: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """The pivots of a few heads and, as 0 or 1, whether they exist; gumbel (draws, BH, C).

    The rows of the factor of the Cholesky decomposition are those of new pivots after each draw: the kernel matrix is
    about factor^T factor.
    """
    tolerance, ridge = pivot_tolerance(points.dtype), 0.1 * pivot_tolerance(points.dtype)
    points = points * LOG2_E**0.5
    half_norm = 0.5 * points.square().sum(2, keepdim=True)
    closed = torch.zeros_like(half_norm[..., 0], dtype=torch.bool) if valid is None else ~valid
    norm = (2.0 / LOG2_E) * half_norm[..., 0]
    norm = (norm - norm.masked_fill(closed, 0.0).amax(1, keepdim=True)).clamp(min=_LEAST)
    residual, picked, was_open = torch.ones_like(norm), [], []
    factor = points.new_empty(len(points), 0, points.shape[1])
    for numbers, size in zip(gumbel, sizes, strict=True):
        scores = torch.where(residual > tolerance, residual.log() + norm, _LAST) + numbers
        scores, index = scores.masked_fill(closed, -torch.inf).topk(size, dim=1)
        selected = scores > -torch.inf
        index = torch.where(selected, index, 0)
        picked.append(index)
        was_open.append(selected)
        if len(picked) == len(sizes):
            break
        used = (selected & (residual.gather(1, index) > tolerance)).unsqueeze(2)
        closed = closed.scatter(1, index, True)
        rows = torch.baddbmm(-half_norm.mT, take(points, index), points.mT) - take(half_norm, index)
        columns = index.unsqueeze(1)
        earlier = factor.gather(2, columns.expand(-1, factor.shape[1], -1))
        rows = torch.baddbmm(rows.clamp_(max=0.0).exp2_(), earlier.mT, factor, alpha=-1.0) * used
        corner = rows.gather(2, columns.expand(-1, size, -1)) * used.mT
        corner.diagonal(dim1=1, dim2=2).add_(torch.where(used.squeeze(2), ridge, 1.0))
        lower, failed = torch.linalg.cholesky_ex(corner)
        # Only rounding can make it fail. The diagonal alone, times the size, is at least as large as the corner.
        diagonal = torch.diag_embed((size * corner.diagonal(dim1=1, dim2=2).clamp(min=ridge)).sqrt())
        lower = torch.where((failed > 0)[:, None, None], diagonal, lower)
        # A product with the inverse of this small matrix is faster than a solve.
        one = torch.eye(size, dtype=lower.dtype, device=lower.device).expand_as(lower)
        new = torch.linalg.solve_triangular(lower, one, upper=False) @ rows
        residual = (residual - new.square().sum(1)).clamp(min=0.0)
        factor = torch.cat((factor, new), 1)
    return torch.cat(picked, 1), torch.cat(was_open, 1).long()


def pivot_tolerance(dtype: torch.dtype) -> float:
    """A residual of the unit diagonal that is smaller is rounding: the pivot adds nothing."""
    return 1e-10 if dtype == torch.float64 else 1e-4


def choose_pivots_naive(
    points: Tensor, valid: Tensor | None, num_pivots: int, *, seed: int, batch: int, block: int = 64
) -> Pivots:
    """The readable form of `choose_pivots`: one head at a time, with the residual of the whole kernel in float64."""
    batch_heads, num_candidates, _ = points.shape
    sizes, num_heads = _draw_sizes(num_pivots, block), batch_heads // batch
    gumbel = _gumbel(len(sizes), num_candidates, num_heads, seed, torch.float64, points.device)
    index = torch.zeros(batch_heads, num_pivots, dtype=torch.int64)
    selected = torch.zeros(batch_heads, num_pivots, dtype=torch.bool)
    for a in range(batch_heads):
        own = points[a].double()
        exists = torch.ones(num_candidates, dtype=torch.bool) if valid is None else valid[a]
        residual = torch.exp(-0.5 * (own[:, None] - own).square().sum(2))
        norm = own.square().sum(1)
        norm = (norm - norm[exists].amax()).clamp(min=_LEAST) if exists.any() else norm
        chosen: list[int] = []
        for draw, size in enumerate(sizes):
            diagonal = residual.diagonal().clamp(min=0.0)
            scores = gumbel[draw, a % num_heads] + _LAST
            new = diagonal > pivot_tolerance(points.dtype)
            scores[new] = (diagonal.log() + norm + gumbel[draw, a % num_heads])[new]
            scores[~exists] = -torch.inf
            scores[chosen] = -torch.inf
            draws = [int(i) for i in scores.argsort(descending=True)[:size] if scores[i] > -torch.inf]
            chosen += draws
            used = [i for i in draws if new[i]]
            inverse = torch.linalg.pinv(residual[used][:, used], hermitian=True, rtol=1e-9)
            residual = residual - residual[:, used] @ inverse @ residual[used]
        index[a, : len(chosen)] = torch.tensor(chosen, dtype=torch.int64)
        selected[a, : len(chosen)] = True
    return Pivots(index, selected)


def regularized_solve(kernel: Tensor, right: Tensor | None, ridge: float) -> Tensor:
    """(K + ridge I)^-1 R by Cholesky, for symmetric positive semidefinite matrices up to rounding. Differentiable once.

    Where the decomposition fails nevertheless, K + ridge I is replaced by a multiple of I.

    Args:
        kernel: K, (BH, m, m), in the accumulation dtype.
        right: R, (BH, m, N), or None for I.
        ridge: positive; for matrices with a diagonal of 1 far above the rounding of a sum of m numbers.

    Returns:
        (BH, m, N).
    """
    one, safe = (
        constant(_identity, kernel.shape[-1], factor, kernel.dtype, device=kernel.device)
        for factor in (1.0, kernel.shape[-1] ** 0.5)
    )
    system = torch.add(kernel, one, alpha=ridge)
    with torch.no_grad():
        lower, failed = torch.linalg.cholesky_ex(system)
        # A product with the inverse takes less time than to solve triangular systems for many right sides.
        inverse = torch.cholesky_inverse(torch.where(failed.view(-1, 1, 1) > 0, safe, lower))
    if not (torch.is_grad_enabled() and (kernel.requires_grad or (right is not None and right.requires_grad))):
        return inverse if right is None else torch.bmm(inverse, right)
    right = one if right is None else right
    # A step of refinement has the value of the solution, and by R and K its gradient.
    solved = (inverse @ right).detach()
    return solved + inverse @ (right - system @ solved)


def _identity(size: int, factor: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.eye(size, dtype=dtype, device=device) * factor


def candidate_positions(
    key_mask: Tensor | None, kv_len: int, limit: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Positions of at most `limit` candidates for pivots, evenly spaced among the valid keys of each sequence.

    Args:
        key_mask: bool (B, Nk), True for valid keys, or None.
        kv_len: Nk.
        limit: the largest number of candidates.
        device: device of the result.

    Returns:
        position: int64 (B, C), or (1, C) without a mask. C is the smaller of `kv_len` and `limit`. The candidates that
            exist come first, in ascending order.
        valid: bool (B, C), which candidates exist, or None without a mask.
    """
    count = min(kv_len, limit)
    if key_mask is None:
        return constant(even_positions, kv_len, count, device=device)[None], None
    num_valid = key_mask.sum(1, keepdim=True)
    rank, exists = even_ranks(num_valid, count, device)
    return valid_first(key_mask).gather(1, rank), exists


def even_ranks(num_valid: Tensor, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`count` evenly spaced ranks below int64 (B, 1), or all of them first if there are fewer, and which exist."""
    rank = torch.arange(count, device=device)
    return torch.where(num_valid > count, rank * num_valid // count, rank), rank < num_valid


def even_positions(kv_len: int, count: int, device: torch.device) -> Tensor:
    """`count` evenly spaced positions, int64 (count,)."""
    return torch.arange(count, device=device) * kv_len // count
