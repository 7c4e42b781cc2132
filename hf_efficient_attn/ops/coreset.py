"""Coresets of keys: pivots by randomized pivoted Cholesky, and the regularized solve for their Nystrom weights.

The kernel is exp(<x, y>) for keys x and y that the caller has scaled. m pivots S approximate the whole kernel matrix by
K_:S K_SS^-1 K_S: (Nystrom). Randomly pivoted Cholesky (Chen, Epperly, Tropp, Webber 2025) draws each pivot with a
probability proportional to the diagonal of what is left of the kernel matrix. Here several pivots are drawn at a time,
as in the block form of the algorithm.

Nothing overflows, because all matrices are those of exp(<x, y> - |x|^2 / 2 - |y|^2 / 2) = exp(-|x - y|^2 / 2), whose
diagonal is 1. The factors exp(|x|^2) between the two diagonals occur in the probabilities only, as logarithms.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.blocks import ceil_div, take, valid_first
from hf_efficient_attn.ops.constants import constant
from hf_efficient_attn.ops.export import is_compiling
from hf_efficient_attn.ops.onednn import product, use_product
from hf_efficient_attn.ops.pivots import pivot_tolerance, pivots_in_two_draws
from hf_efficient_attn.ops.precision import LOG2_E
from hf_efficient_attn.ops.random import HeadSeed, HeadSlice, Seed, seed_for_operator, uniform, uniform_of_heads

# The factor of the pivots of some heads that are processed at a time: 2**20 numbers, 4 MiB in float32.
_FACTOR_NUMEL = 1 << 20

# Streams of random numbers, one for each draw of a block of pivots.
_STREAM = 5000

# The first draws are of this size. A draw does not see how similar its own pivots are, so early ones must be small.
_FIRST_DRAW = 8

# Logarithms of weights below `_LEAST` times the largest one are raised to it, and pivots that add nothing come last.
_LEAST, _LAST = -1e4, -1e5

# The least share that is left over of a point, for `draw_apart`.
_LEAST_LEFT = 1e-12

# The score of landmarks that do not exist. It is finite, so that its last bits may be replaced.
_NO_LANDMARK = -1e38


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


def gumbel_numbers(count: int, num_candidates: int, seed: Seed, like: Tensor) -> Tensor:
    """Standard Gumbel numbers (draws, C) for `draw_apart`, where those of a candidate do not depend on C.

    Those of an integer seed are kept, so they must not be modified.
    """
    return _kept_gumbel(len(_growing_draws(count, like)), num_candidates, None, seed, like)[:, 0]


def refinement_steps(steps: int, like: Tensor) -> int:
    """Steps of Lloyd's algorithm after `draw_apart`: one more after its single draw."""
    return steps + (backend(like) != "cpu" and steps > 0)


def _growing_draws(count: int, like: Tensor) -> list[int]:
    """How many points each draw of `draw_apart` selects: as many as all before it.

    On an accelerator there is one draw, because each would be twenty kernels. With one more step of Lloyd's algorithm
    the error on activations of BERT and ViT is 0 to 2.5 % larger.
    """
    if backend(like) != "cpu":
        return [count]
    sizes, total = [], 0
    while total < count:
        sizes.append(min(count - total, max(_FIRST_DRAW, total)))
        total += sizes[-1]
    return sizes


def draw_apart(
    points: Tensor, power: float, numbers: Tensor, valid: Tensor | None, count: int, tilt: Tensor | None = None
) -> Pivots:
    """Draw points that are far from each other, in a few draws, each from the ones that the earlier draws left over.

    The probability of a point x grows with K(x, x)^power (1 - K(x, p)^2 / (K(x, x) K(p, p))) for the kernel
    K = exp(<x, y>) and the nearest p of the earlier draws: the diagonal of what Nystrom's approximation of K by p alone
    leaves over. With one draw per point this would be like k-means++ (Arthur & Vassilvitskii 2007). No gradient.

    Args:
        points: (BH, C, D).
        power: see above.
        numbers: (draws, C), from `gumbel_numbers`, the same for all heads.
        valid: bool (BH, C), which points exist, or None.
        count: m, at most C.

    Returns:
        `Pivots` (BH, m). The first ones are a choice of fewer.
    """
    points = points.detach()
    norm = points.square().sum(2)
    closed = torch.zeros_like(norm, dtype=torch.bool) if valid is None else ~valid
    log_weight = norm if tilt is None else norm + tilt
    log_weight = log_weight if valid is None else log_weight.masked_fill(closed, 0.0)
    log_weight = (power * (log_weight - log_weight.amax(1, keepdim=True))).clamp(min=_LEAST)
    log_left = None
    closest = torch.full_like(norm, -torch.inf)
    picked, was_open = [], []
    for i, size in enumerate(_growing_draws(count, points)):
        scores = log_weight + numbers[i]
        scores = scores if log_left is None else scores + log_left
        scores, index = scores.masked_fill(closed, -torch.inf).topk(size, dim=1)
        selected = scores > -torch.inf
        index = torch.where(selected, index, 0)
        picked.append(index)
        was_open.append(selected)
        if i + 1 < len(numbers):
            closed = closed.scatter(1, index, True)
            drawn = take(points, index)
            offset = -0.5 * drawn.square().sum(2, keepdim=True)
            closest = torch.maximum(closest, torch.baddbmm(offset, drawn, points.mT).amax(1))
            left = -torch.expm1((2.0 * closest - norm).clamp(max=0.0))
            log_left = left.clamp(min=_LEAST_LEFT).log()
    return Pivots(torch.cat(picked, 1), torch.cat(was_open, 1))


def nearest(points: Tensor, landmarks: Tensor, used: Tensor | None = None) -> Tensor:
    """The nearest landmark of every point, by the Euclidean distance, without a gradient.

    Args:
        points: (BH, C, D).
        landmarks: (BH, m, D).
        used: bool (BH, m), which landmarks exist; None: all.

    Returns:
        int64 (BH, C).
    """
    offset = -0.5 * landmarks.square().sum(2)
    if used is not None:
        offset = offset.masked_fill(~used, _NO_LANDMARK)
    if use_product(points, landmarks):
        heads = zip(points, landmarks, offset, strict=True)
        return torch.stack([largest_of_rows(product(x, landmark, bias))[1] for x, landmark, bias in heads])
    closeness = torch.baddbmm(offset.unsqueeze(1), points, landmarks.mT)
    return largest_of_rows(closeness)[1] if closeness.device.type == "cpu" else closeness.argmax(2)


def largest_of_rows(x: Tensor, in_place: bool = True) -> tuple[Tensor, Tensor]:
    """The maximum over the last dimension and its index, int64, up to rounding of the last bits. No gradient.

    The index replaces the last bits of each finite number, so that the maximum contains it. On the CPU this takes a
    quarter of the time of `max`. Numbers that differ by less than these bits count as equal. In place, x is lost.
    """
    integer = torch.int64 if x.dtype == torch.float64 else torch.int32
    bits = (1 << (x.shape[-1] - 1).bit_length()) - 1
    numbers = x.view(integer)
    marked = numbers.bitwise_and_(~bits) if in_place else numbers.bitwise_and(~bits)
    marked.bitwise_or_(torch.arange(x.shape[-1], dtype=integer, device=x.device))
    largest = marked.view(x.dtype).amax(-1)
    return largest, largest.view(integer).bitwise_and(bits).long()


def cluster_sums(cluster: Tensor, x: Tensor, count: int) -> Tensor:
    """The sums of the members of each of `count` clusters: int64 (BH, C), (BH, C, F) -> (BH, count, F)."""
    if x.device.type == "cpu":
        sums = x.new_zeros(len(x) * count, x.shape[2])
        first = (torch.arange(len(x), device=x.device) * count)[:, None]
        return sums.index_add(0, (cluster + first).flatten(), x.flatten(0, 1)).view(len(x), count, -1)
    # A product, because sums by index are not deterministic on an accelerator.
    one_hot = x.new_zeros(*cluster.shape, count).scatter_(2, cluster.unsqueeze(2), 1.0)
    return one_hot.mT @ x


def numbers_of_two_draws(num_candidates: int, num_heads: int, seed: Seed, like: Tensor) -> Tensor:
    """Standard Gumbel numbers (2, H, C) for `pivots.pivots_in_two_draws`. Those of an integer seed are kept."""
    return _kept_gumbel(2, num_candidates, num_heads, seed, like)


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
    points = points.detach()
    if is_compiling():
        value, heads = seed_for_operator(seed, len(points) // batch, points.device)
        return Pivots(*torch.ops.hf_efficient_attn.choose_pivots(points, valid, num_pivots, value, batch, block, heads))
    return Pivots(*_choose_pivots(points, valid, num_pivots, seed, batch, block))


def _choose_pivots(
    points: Tensor, valid: Tensor | None, num_pivots: int, seed: Seed, batch: int, block: int
) -> tuple[Tensor, Tensor]:
    batch_heads, num_candidates, _ = points.shape
    num_heads, sizes = batch_heads // batch, _draw_sizes(num_pivots, block)
    if backend(points) != "cpu":
        numbers = numbers_of_two_draws(num_candidates, num_heads, seed, points)
        with torch.no_grad(), torch.autocast(points.device.type, enabled=False):
            norm = torch.linalg.vector_norm(points, dim=2)
            drawn, exists = pivots_in_two_draws(points, norm, None, valid, numbers, num_pivots)
            return drawn, torch.ones_like(drawn, dtype=torch.bool) if exists is None else exists
    gumbel = _kept_gumbel(len(sizes), num_candidates, num_heads, seed, points)
    step = batch_heads
    if points.device.type == "cpu":
        step = min(step, ceil_div(_FACTOR_NUMEL, num_pivots * num_candidates))
    # Memory that is used again for other heads and draws. New memory costs more time than the arithmetic on it.
    factor = points.new_empty(step, num_pivots, num_candidates)
    buffer = points.new_empty(step * max(sizes) * num_candidates)
    parts = []
    with torch.no_grad(), torch.autocast(points.device.type, enabled=False):
        for start in range(0, batch_heads, step):
            some = slice(start, start + step)
            heads = torch.arange(batch_heads, device=points.device)[some] % num_heads
            own_valid = None if valid is None else valid[some]
            parts.append(
                _pivots_of_heads(points[some], own_valid, gumbel[:, heads], sizes, factor[: len(heads)], buffer)
            )
    index, selected = zip(*parts, strict=True)
    return torch.cat(index), torch.cat(selected)


@torch.library.custom_op("hf_efficient_attn::choose_pivots", mutates_args=())
def _choose_pivots_op(
    points: Tensor,
    valid: Tensor | None,
    num_pivots: int,
    seed: Tensor,
    batch: int,
    block: int,
    heads: list[int],
) -> tuple[Tensor, Tensor]:
    return _choose_pivots(points, valid, num_pivots, HeadSeed(seed, HeadSlice(*heads)), batch, block)


@_choose_pivots_op.register_fake
def _(points: Tensor, valid: Tensor | None, num_pivots: int, *_options: object) -> tuple[Tensor, Tensor]:
    index = points.new_empty(points.shape[0], num_pivots, dtype=torch.int64)
    return index, torch.empty_like(index, dtype=torch.bool)


def _pivots_of_heads(
    points: Tensor, valid: Tensor | None, gumbel: Tensor, sizes: list[int], factor: Tensor, buffer: Tensor
) -> tuple[Tensor, Tensor]:
    """The pivots of a few heads; gumbel (draws, BH, C), memory for factor (BH, m, C) and for rows of the largest draw.

    The factor is that of the Cholesky decomposition: the kernel matrix is about factor^T factor.
    """
    tolerance, ridge = pivot_tolerance(points.dtype), 0.1 * pivot_tolerance(points.dtype)
    # <left_i, right_j> = log2(kernel) in one product: the last two columns hold the norms.
    points = points * LOG2_E**0.5
    half_norm = 0.5 * (points * points).sum(2, keepdim=True)
    ones = torch.ones_like(half_norm)
    left, right = torch.cat((points, -half_norm, ones), 2), torch.cat((points, ones, -half_norm), 2).mT
    closed = torch.zeros_like(half_norm[..., 0], dtype=torch.bool) if valid is None else ~valid
    norm = (2.0 / LOG2_E) * half_norm[..., 0]
    norm = (norm - norm.masked_fill(closed, 0.0).amax(1, keepdim=True)).clamp_(min=_LEAST)
    residual = torch.ones_like(norm)
    picked, was_open, count = [], [], 0
    for numbers, size in zip(gumbel, sizes, strict=True):
        scores = torch.where(residual > tolerance, residual.log() + norm, _LAST).add_(numbers)
        scores, index = scores.masked_fill_(closed, -torch.inf).topk(size, dim=1)
        selected = scores > -torch.inf
        index = torch.where(selected, index, 0)
        picked.append(index)
        was_open.append(selected)
        used = (selected & (residual.gather(1, index) > tolerance)).unsqueeze(2)
        if len(picked) == len(sizes):
            break
        closed.scatter_(1, index, True)
        rows = buffer[: left.shape[0] * size * left.shape[1]].view(-1, size, left.shape[1])
        torch.bmm(take(left, index), right, out=rows).clamp_(max=0.0).exp2_()
        columns = index.unsqueeze(1)
        if count:
            earlier = factor[:, :count]
            rows.baddbmm_(earlier.gather(2, columns.expand(-1, count, -1)).mT, earlier, alpha=-1.0)
        rows.mul_(used)
        corner = rows.gather(2, columns.expand(-1, size, -1)).mul_(used.mT)
        corner.diagonal(dim1=1, dim2=2).add_(torch.where(used.squeeze(2), ridge, 1.0))
        lower, failed = torch.linalg.cholesky_ex(corner)
        # Only rounding can make it fail. The diagonal alone, times the size, is at least as large as the corner.
        diagonal = torch.diag_embed((size * corner.diagonal(dim1=1, dim2=2).clamp(min=ridge)).sqrt())
        lower = torch.where((failed > 0)[:, None, None], diagonal, lower)
        # A product with the inverse of this small matrix is faster than a solve, which copies the rows twice.
        one = torch.eye(size, dtype=lower.dtype, device=lower.device).expand_as(lower)
        new = factor[:, count : count + size]
        torch.bmm(torch.linalg.solve_triangular(lower, one, upper=False), rows, out=new)
        residual.sub_(torch.mul(new, new, out=rows).sum(1)).clamp_(min=0.0)
        count += size
    return torch.cat(picked, 1), torch.cat(was_open, 1)


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
    """(K + ridge I)^-1 R by Cholesky, for kernel matrices with a unit diagonal. Differentiable.

    K is positive semidefinite up to rounding. Where the decomposition fails nevertheless, the ridge is a hundredth of
    the largest sum of a row, a bound of the eigenvalues. Where values must not be read, K + ridge I is then replaced
    by a multiple of I.

    Args:
        kernel: K, (BH, m, m), in the accumulation dtype.
        right: R, (BH, m, N), or None for I.
        ridge: positive.

    Returns:
        (BH, m, N).
    """
    if torch.is_grad_enabled() and (kernel.requires_grad or (right is not None and right.requires_grad)):
        solved: Tensor = _Solve.apply(kernel, right, ridge)  # type: ignore[no-untyped-call]
        return solved
    inverse = _regularized_inverse(kernel, ridge)
    return inverse if right is None else inverse @ right


class _Solve(torch.autograd.Function):
    """`regularized_solve` with a gradient of two products, as the inverse is known."""

    @staticmethod
    def forward(ctx: Any, kernel: Tensor, right: Tensor | None, ridge: float) -> Tensor:
        inverse = _regularized_inverse(kernel, ridge)
        solved = inverse if right is None else inverse @ right
        ctx.save_for_backward(inverse, solved)
        return solved

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        inverse, solved = ctx.saved_tensors
        grad_right = inverse @ grad
        return -grad_right @ solved.mT, grad_right if ctx.needs_input_grad[1] else None, None


def _regularized_inverse(kernel: Tensor, ridge: float) -> Tensor:
    """(K + ridge I)^-1, as `regularized_solve` describes.

    A product with it takes less time than to solve triangular systems for many right sides.
    """
    size = kernel.shape[-1]
    one = constant(_identity, size, kernel.dtype, device=kernel.device)
    lower, failed = torch.linalg.cholesky_ex(torch.add(kernel, one, alpha=ridge))
    if is_compiling() or kernel.device.type != "cpu":
        lower = torch.where((failed > 0)[:, None, None], size**0.5 * one, lower)
    elif bool(failed.any()):
        ridges = torch.where(failed > 0, (0.01 * kernel.abs().sum(-1).amax(-1)).clamp(min=ridge), ridge)
        lower, _ = torch.linalg.cholesky_ex(kernel + ridges[:, None, None] * one)
    return torch.cholesky_inverse(lower)


def _identity(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.eye(size, dtype=dtype, device=device)


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
    return torch.arange(count, device=device) * kv_len // count
