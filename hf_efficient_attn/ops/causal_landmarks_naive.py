"""The readable form of `hf_efficient_attn.ops.causal_landmarks`: one query at a time, in float64."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.causal_landmarks import SAFE
from hf_efficient_attn.ops.causal_landmarks_plan import (
    CANDIDATES,
    LARGEST,
    MARGIN,
    UNIT,
    LandmarkOptions,
    draw_clusters,
    epoch_of,
)


class _Epoch(NamedTuple):
    """The landmarks of a head in an epoch: `landmark` (m, D), `center` (D,) and `inverse` (m, m)."""

    landmark: Tensor
    center: Tensor
    inverse: Tensor
    factor: float

    def sums(self, key: Tensor, targets: Tensor) -> Tensor:
        """sum_j K_cj [v_j, 1] over some keys (N, D), divided by exp(reference), and bounded: (m, Dv + 1)."""
        half = 0.5 * self.factor * self.landmark.square().sum(1)
        exponents = self.factor * self.landmark @ (key - self.center).T - (half + half.max() + MARGIN)[:, None]
        kernel = exponents.exp()
        return kernel @ targets / (1.0 + kernel.sum(1, keepdim=True))

    def values(self, sums: Tensor) -> Tensor:
        """The weighted values of the landmarks and their weights: (m, Dv + 1)."""
        half = 0.5 * self.factor * self.landmark.square().sum(1)
        to_weights = math.exp(MARGIN) * (half.max() - half).clamp(max=LARGEST).exp()
        return to_weights[:, None] * (self.inverse @ sums)


def causal_landmark_naive(
    query: Tensor, key: Tensor, value: Tensor, options: LandmarkOptions, *, scale: float
) -> Tensor:
    """`causal_landmark_attention` with the same clusters: (BH, N, D), (BH, N, D), (BH, N, Dv) -> (BH, N, Dv)."""
    heads = zip(query.double(), key.double(), value.double(), strict=True)
    return torch.stack([_head(*head, options, scale) for head in heads])


def _epoch(key: Tensor, number: int, options: LandmarkOptions, scale: float) -> _Epoch:
    """The landmarks of epoch `number`, from the keys (N, D) of the units before it."""
    count, prefix = min(CANDIDATES, options.unit), options.unit << number
    candidates = key[torch.arange(count, device=key.device) * prefix // count]
    center, factor = candidates.mean(0), options.temperature**2 * abs(scale)
    points = candidates - center
    _, member = draw_clusters(torch.nn.functional.pad(points, (0, 1), value=1.0)[None], options, factor)
    landmark = member[0].T @ points / member[0].sum(0)[:, None]
    kernel = torch.exp(-0.5 * factor * torch.cdist(landmark, landmark).square())
    inverse = torch.linalg.inv(kernel + options.ridge * torch.eye(len(kernel), dtype=key.dtype, device=key.device))
    return _Epoch(landmark, center, inverse, factor)


def _head(query: Tensor, key: Tensor, value: Tensor, options: LandmarkOptions, scale: float) -> Tensor:
    """Output (N, Dv) of one head."""
    scores = scale * query @ key.T
    targets = torch.cat((value, torch.ones_like(value[:, :1])), 1)
    size, unit, outs, epochs = options.block_size, options.unit, [], {}
    for i in range(len(query)):
        if i < options.num_exact:
            outs.append(scores[i, : i + 1].softmax(0) @ value[: i + 1])
            continue
        block = i // size  # its far keys are the blocks up to block - 2
        number = (block - 2) // UNIT
        if epoch_of(number) not in epochs:
            epochs[epoch_of(number)] = _epoch(key, epoch_of(number), options, scale)
        epoch = epochs[epoch_of(number)]
        pieces = [slice(x * unit, (x + 1) * unit) for x in range(number)]
        pieces += [slice(t * size, (t + 1) * size) for t in range(number * UNIT, block - 1)]
        far_values = epoch.values(torch.stack([epoch.sums(key[piece], targets[piece]) for piece in pieces]).sum(0))
        logits = scale * (epoch.landmark + epoch.center) @ query[i]
        near = slice((block - 1) * size, i + 1)
        largest = max(logits.max(), scores[i, near].max())
        exact, basis = torch.exp(scores[i, near] - largest), torch.exp(logits - largest)
        total = exact @ targets[near] + basis @ far_values
        # At least the weight of the landmark itself.
        bound = exact.sum() + basis @ far_values[:, -1].clamp(min=1.0)
        outs.append(total[:-1] / torch.maximum(total[-1], SAFE * bound))
    return torch.stack(outs)
