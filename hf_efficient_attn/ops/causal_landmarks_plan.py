"""Landmarks of the causal form of nearfar on accelerators: budget, units and epochs, and the landmarks of all epochs.

`hf_efficient_attn.ops.causal_landmarks` describes the form.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.blocks import ceil_div
from hf_efficient_attn.ops.constants import constant
from hf_efficient_attn.ops.coreset import gumbel_numbers
from hf_efficient_attn.ops.partial import accumulation_dtype
from hf_efficient_attn.ops.random import Seed

# Blocks of a unit, and by how many blocks the queries of a unit come later than its keys.
UNIT, DELAY = 16, 2
# Candidates for the landmarks of an epoch.
CANDIDATES = 1024
# The weight of a candidate in the draw of the first landmarks is K(x, x)^_DRAW_POWER.
_DRAW_POWER = 0.5
# Differences of squared distances, in the exponent of the kernel, are multiplied by this number. The softmax is then
# the nearest landmark, except for ties, and takes one kernel.
_SHARPNESS = 1e4
# What an empty cluster has of the candidate that it began with.
_LEAST_SHARE = 1e-20
# The exponents of sums are those of the kernel minus the largest one of a landmark and itself, minus MARGIN. A sigmoid
# takes the place of the exponential: it is one below -MARGIN, up to rounding, and bounds keys that are much longer than
# all landmarks. The weights of short landmarks have factors of up to exp(LARGEST). exp(MARGIN) is a power of two.
MARGIN, LARGEST = 36.0 * math.log(2.0), 30.0
# The ridge is at least this multiple of the precision of the dtype, in which the inverse is stored. In bfloat16 with a
# ridge of 1e-3 its rounding raises the error on activations of MiniLM from .140 to .195, and with .03 to .141.
_ROUNDINGS = 4.0


class LandmarkOptions(NamedTuple):
    """Options of `causal_landmark_attention`.

    Attributes:
        block_size: tokens of a block. A query attends to its own block and the block before it exactly.
        num_samples: m, the number of landmarks, at most 16 * block_size.
        temperature: t. The landmarks are chosen and weighted with the kernel exp(t^2 scale <k_i, k_j>).
        ridge: positive, relative to the unit diagonal of K_cc.
        seed: seed of the landmarks.
    """

    block_size: int
    num_samples: int
    temperature: float = 0.75
    ridge: float = 1e-3
    seed: Seed = 0

    @property
    def num_exact(self) -> int:
        """The first positions, which are computed exactly in sequences of any length."""
        return (UNIT + DELAY) * self.block_size

    @property
    def unit(self) -> int:
        """Tokens of a unit."""
        return UNIT * self.block_size

    def num_units(self, length: int) -> int:
        """Number of units of a sequence with more than `num_exact` tokens."""
        return ceil_div(length - DELAY * self.block_size, self.unit)

    def num_epochs(self, length: int) -> int:
        """Number of epochs of such a sequence."""
        return epoch_of(self.num_units(length) - 1) + 1


def epoch_of(unit: int) -> int:
    """The epoch of a unit. Unit 0, which has none, counts as one of epoch 0."""
    return max(1, unit).bit_length() - 1


class Landmarks(NamedTuple):
    """The landmarks of all epochs.

    Attributes:
        table: (BH, E, m, .), by columns: the landmarks relative to the center, in the dtype of the far field; the
            landmarks themselves and zeros; (K_cc + ridge I)^-1, with factors that make sums to weights.
        shift: (BH, E, m), to subtract from the lse of a landmark.
        sizes: the number of columns of the three parts.
    """

    table: Tensor
    shift: Tensor
    sizes: list[int]


def split_columns(columns: int) -> dict[str, int]:
    """Distribute a budget of keys per query: on average 1.5 blocks of near keys, and 2.5 as many landmarks."""
    block_size = max(1, columns // 4)
    return {"block_size": block_size, "num_samples": max(1, 5 * block_size // 2)}


def make_landmarks(key: Tensor, value_dim: int, options: LandmarkOptions, scale: float, num_epochs: int) -> Landmarks:
    """The landmarks of all epochs from keys (BH, N, D).

    They are the means of clusters of evenly spaced keys of the units before an epoch, by one step of Lloyd's algorithm
    after `draw_clusters`.
    """
    (batch_heads, _, head_dim), count = key.shape, min(CANDIDATES, options.unit)
    candidates = key.index_select(1, constant(_candidates, count, options.unit, num_epochs, device=key.device))
    candidates = candidates.view(batch_heads * num_epochs, count, head_dim)
    # Flash kernels have one size for queries and values.
    missing = max(0, value_dim - head_dim)
    table, shift = _table(candidates, missing, options, options.temperature**2 * abs(scale))
    by_epoch = batch_heads, num_epochs
    sizes = [head_dim, head_dim + missing, options.num_samples]
    return Landmarks(table.unflatten(0, by_epoch), shift.unflatten(0, by_epoch), sizes)


class _Table(torch.autograd.Function):
    """The table and the shift of `Landmarks`, one row for each head and epoch, from candidates (B, C, D)."""

    @staticmethod
    def forward(
        ctx: Any, candidates: Tensor, missing: int, options: LandmarkOptions, factor: float
    ) -> tuple[Tensor, Tensor]:
        dtype, device = candidates.dtype, candidates.device
        center = candidates.mean(1, keepdim=True, dtype=accumulation_dtype(dtype))
        points = pad(candidates - center, (0, 1), value=1.0)  # the sums of the last column are the sizes of clusters
        drawn, member = draw_clusters(points, options, factor)
        sums = torch.baddbmm(drawn, member.mT, points, beta=_LEAST_SHARE)
        landmark = sums[..., :-1] / sums[..., -1:]

        # exp(gram - half - half^T) is exp(-|x - y|^2 factor / 2).
        margin = constant(_full, 0.5 * MARGIN, landmark.dtype, device=device)  # cancels in the kernel
        gram = torch.baddbmm(margin, landmark, landmark.mT, alpha=0.5 * factor)
        half = gram.diagonal(dim1=1, dim2=2)
        gram = gram - half.unsqueeze(1)
        ridge = max(options.ridge, _ROUNDINGS * torch.finfo(dtype).eps)
        kernel = (gram + gram.mT).exp()
        inverse, _ = torch.linalg.inv_ex(kernel + constant(_ridge, kernel.shape[1], ridge, device=device))
        # A common factor keeps exponentials finite, and cancels.
        reference = half.amax(1, keepdim=True)
        shift = torch.baddbmm((half + reference).unsqueeze(2), landmark, center.mT, alpha=factor).squeeze(2)
        to_weights = (reference - half).clamp(max=LARGEST).exp().unsqueeze(2)
        zeros = constant(_zeros, missing, inverse.dtype, device=device).expand(*landmark.shape[:2], -1)
        table = torch.cat((landmark, landmark + center, zeros, inverse * to_weights), 2).to(dtype)
        ctx.save_for_backward(landmark, center, kernel, inverse, to_weights, member, sums)
        ctx.missing, ctx.factor, ctx.dtype = missing, factor, dtype
        ctx.mark_non_differentiable(shift)
        ctx.set_materialize_grads(False)
        return table, shift

    @staticmethod
    def backward(ctx: Any, grad_table: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        landmark, center, kernel, inverse, to_weights, member, sums = ctx.saved_tensors
        factor, (num_samples, head_dim) = ctx.factor, landmark.shape[1:]
        inverse = inverse.to(landmark.dtype)
        sizes = [head_dim, head_dim, ctx.missing, num_samples]
        grad, grad_absolute, _, grad_inverse = grad_table.to(landmark.dtype).split(sizes, 2)
        # All weights are linear in the sums of a landmark, which have the factor exp(-shift). So its gradient is that
        # of the column of the inverse that they are multiplied by.
        grad_inverse = grad_inverse * to_weights
        scaled = grad_inverse * inverse
        minus_grad_shift = scaled.sum(1).unsqueeze(2)
        # This sum has no gradient where the factor is the largest one.
        by_weight = torch.ops.aten.hardtanh_backward(scaled.sum(2, keepdim=True), to_weights, 0.0, math.exp(LARGEST))
        minus_grad_half = minus_grad_shift + by_weight
        # Of the exponents of the kernel, negative: (K + ridge I)^-1 G (K + ridge I)^-1 * K, and its transpose.
        pairs = torch.bmm(torch.bmm(inverse, grad_inverse), inverse) * kernel
        pairs = pairs + pairs.mT
        grad = torch.baddbmm(grad, pairs, landmark, alpha=-factor)
        grad = torch.baddbmm(grad, minus_grad_shift, center, alpha=-factor)
        grad = torch.addcmul(grad, pairs.sum(2, keepdim=True) - minus_grad_half, landmark, value=factor)
        # A landmark is the mean of its candidates minus the center, which is the mean of all candidates.
        grad_center = torch.baddbmm(grad.sum(1, keepdim=True), minus_grad_shift.mT, landmark, beta=-1.0, alpha=-factor)
        share, beta = member / sums[..., -1:].mT, 1.0 / member.shape[1]
        grad_candidates = torch.baddbmm(grad_center, share, grad + grad_absolute, beta=beta)
        return grad_candidates.to(ctx.dtype), None, None, None


_table: Callable[..., tuple[Tensor, Tensor]] = _Table.apply


def draw_clusters(points: Tensor, options: LandmarkOptions, factor: float) -> tuple[Tensor, Tensor]:
    """Draw candidates, more often those with long keys, and assign every candidate to the nearest of them.

    Args:
        points: (B, C, D + 1), keys relative to the center, and 1.
        options: see `LandmarkOptions`.
        factor: of the exponents of the kernel.

    Returns:
        drawn: (B, m, D + 1), the drawn points.
        member: (B, C, m), 1 where a candidate belongs to a cluster, or shares where it is as close to several. No
            gradient.
    """
    norm = points.detach().square().sum(2)
    numbers = gumbel_numbers(options.num_samples, points.shape[1], options.seed, points)[0]
    draw = torch.add(numbers, norm, alpha=_DRAW_POWER * factor).topk(options.num_samples, dim=1).indices
    drawn = points.gather(1, draw.unsqueeze(2).expand(-1, -1, points.shape[2]))
    offset, sharpness = norm.gather(1, draw).unsqueeze(1), _SHARPNESS * factor
    closeness = torch.baddbmm(offset, points.detach(), drawn.detach().mT, beta=-0.5 * sharpness, alpha=sharpness)
    return drawn, closeness.softmax(2)


def _candidates(count: int, unit: int, num_epochs: int, device: torch.device) -> Tensor:
    """The positions of the candidates of all epochs, (num_epochs * count,)."""
    rank = torch.arange(count, device=device)
    return torch.cat([rank * (unit << epoch) // count for epoch in range(num_epochs)])


def _ridge(size: int, ridge: float, device: torch.device) -> Tensor:
    # The inverse is multiplied by large sums, so its rounding matters. In float64 it costs little.
    return ridge * torch.eye(size, dtype=torch.float64, device=device)


def _full(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((1, 1, 1), number, dtype=dtype, device=device)


def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=dtype, device=device)
