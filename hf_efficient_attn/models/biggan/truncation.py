"""What depends on BigGAN's truncation: the noise, and the statistics of batch normalization.

The distribution of a layer's input depends on the truncation of the noise. Statistics measured at one truncation are
therefore wrong at another (Brock et al. 2019, appendix D: "standing statistics").
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_efficient_attn.models.biggan.configuration_biggan import BigGANConfig
from hf_efficient_attn.models.biggan.spectral_norm import linear

# The normal distribution is truncated at this many standard deviations before it is scaled (Brock et al. 2019,
# section 3.1).
_CUTOFF = 2.0
# A smaller weight of a row is rounding: 0.58 / 0.02 is 28.999999999999996.
_ROUNDING = 1e-6


def truncated_noise(batch_size: int, dim: int = 128, truncation: float = 1.0, seed: int | None = None) -> Tensor:
    """Sample noise for `BigGANModel`: a normal distribution truncated at 2 standard deviations, times `truncation`.

    With a seed, the values equal those of `truncated_noise_sample` in pytorch-pretrained-biggan up to 1e-6.

    Args:
        batch_size: number of samples, B.
        dim: size of a sample, the model's `z_dim`.
        truncation: in (0, 1]. Small values give images that are more typical of their class and vary less.
        seed: None draws from PyTorch's global generator. A seed leaves all global generators untouched.

    Returns:
        (B, dim), float32, on the CPU.

    Raises:
        ValueError: `truncation` is outside (0, 1], or a size is below 1.
    """
    check_truncation(truncation)
    if batch_size < 1 or dim < 1:
        raise ValueError(f"batch_size={batch_size} and dim={dim} must be at least 1")
    size = (batch_size, dim)
    if seed is None:
        uniform = torch.rand(size, dtype=torch.float64, device="cpu")
    else:
        uniform = torch.from_numpy(np.random.RandomState(seed).uniform(size=size))
    # The inverse of the truncated distribution's cumulative distribution function.
    low = torch.special.ndtr(torch.tensor(-_CUTOFF, dtype=torch.float64))
    return truncation * torch.special.ndtri(low + uniform * (1 - 2 * low)).float()


def check_truncation(truncation: float) -> None:
    """Raise ValueError unless `truncation` is in (0, 1]."""
    if not 0 < truncation <= 1:
        raise ValueError(f"truncation must be above 0 and at most 1, not {truncation!r}")


class Lookup(NamedTuple):
    """Two adjacent rows of a table and their weights: (2,), int64, and (2,), which sum to 1."""

    rows: Tensor
    weights: Tensor

    def read(self, table: Tensor) -> Tensor:
        """Interpolate between rows of a table (n_stats, C) -> (C,)."""
        return (table.index_select(0, self.rows) * self.weights.to(table.dtype)[:, None]).sum(0)


def look_up(truncation: float, n_stats: int, like: Tensor | None = None) -> Lookup:
    """Find the statistics for a truncation in a table of `n_stats` rows, for truncations from 0 to 1 in equal steps.

    Between two rows the weights are the wrong way round: at three quarters of the way from the lower to the upper row,
    the lower row has weight 3/4. pytorch-pretrained-biggan does the same, and this model reproduces its images.

    `like`, a tensor of the model, gives the result its device, and the weights its dtype, at least float32. None gives
    float64 on the CPU.
    """
    # Tensors, because a Python float would become a constant of a compiled graph. Worse, torch.compile was seen to keep
    # the first value of a rounded float for all later ones.
    position = torch.ones((), dtype=torch.float64, device="cpu") * truncation / (1.0 / (n_stats - 1))
    floor = position.floor()
    share = torch.where(position == floor, 1.0, position - floor)
    # Rounding may lead past the last row.
    rows = torch.stack((floor, floor + 1)).clamp(max=n_stats - 1).long()
    weights = torch.stack((share, 1 - share))
    if like is None:
        return Lookup(rows, weights)
    return Lookup(rows.to(like.device), weights.to(like.device, torch.promote_types(like.dtype, torch.float32)))


class BigGANBatchNorm(nn.Module):
    """Batch normalization of (B, C, height, width), with statistics that depend on the truncation.

    In training mode it uses the statistics of the batch and leaves its tables unchanged; `BigGANModel.set_statistics`
    fills them. If `conditional`, scale and offset are linear functions of the condition (B, 2 z_dim), otherwise
    parameters.
    """

    running_means: Tensor
    running_vars: Tensor

    def __init__(self, config: BigGANConfig, channels: int, conditional: bool = True) -> None:
        super().__init__()
        self.eps, self.conditional = config.eps, conditional
        self.register_buffer("running_means", torch.zeros(config.n_stats, channels))
        self.register_buffer("running_vars", torch.ones(config.n_stats, channels))
        if conditional:
            self.scale = linear(config, 2 * config.z_dim, channels, bias=False)
            self.offset = linear(config, 2 * config.z_dim, channels, bias=False)
        else:
            self.weight = nn.Parameter(torch.ones(channels))
            self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, lookup: Lookup, condition: Tensor | None = None) -> Tensor:
        """Normalize x (B, C, height, width), with condition (B, 2 z_dim) if conditional."""
        weight, bias = (None, None) if self.conditional else (self.weight, self.bias)
        mean, var = (None, None) if self.training else map(lookup.read, (self.running_means, self.running_vars))
        normal = functional.batch_norm(x, mean, var, weight, bias, training=self.training, eps=self.eps)
        if not self.conditional:
            return normal
        return normal * (1 + self.scale(condition))[..., None, None] + self.offset(condition)[..., None, None]


def rows_to_fill(truncations: Sequence[float] | None, n_stats: int) -> dict[float, list[int]]:
    """Map each truncation to the rows of a table of `n_stats` rows that its statistics go into; None: all rows.

    Raises:
        ValueError: a truncation is outside (0, 1], two truncations use the same row, or there is none.
    """
    if truncations is None:
        return {row / (n_stats - 1): [row] for row in range(n_stats)}
    found: dict[float, list[int]] = {}
    owners: dict[int, float] = {}
    for truncation in truncations:
        check_truncation(truncation)
        lookup = look_up(truncation, n_stats)
        found[truncation] = lookup.rows[lookup.weights > _ROUNDING].tolist()
        for row in found[truncation]:
            other = owners.setdefault(row, truncation)
            if other != truncation:
                raise ValueError(
                    f"truncations {other} and {truncation} use the same row of a table of {n_stats}: fill it for one "
                    "of them, fill all rows (truncations=None), or create the model with a larger n_stats"
                )
    if not found:
        raise ValueError("truncations is empty: give at least one, or None for all rows")
    return found
