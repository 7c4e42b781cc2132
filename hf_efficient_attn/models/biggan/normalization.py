"""Batch normalization with statistics for every truncation, and accumulators for their measurement.

The distribution of a layer's input depends on the truncation of the noise. Statistics measured at one truncation are
therefore wrong at another (Brock et al. 2019, appendix D: "standing statistics").
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_efficient_attn.models.biggan.configuration_biggan import BigGANConfig
from hf_efficient_attn.models.biggan.sampling import check_truncation
from hf_efficient_attn.models.biggan.spectral_norm import linear
from hf_efficient_attn.ops.tracing import replaced_in_graphs

# A smaller share of a row is rounding: 0.58 / 0.02 is 28.999999999999996.
_ROUNDING = 1e-6


class Lookup(NamedTuple):
    """Two adjacent rows of a table, with weights `share` for `lower` and 1 - `share` for `upper`."""

    lower: int
    upper: int
    share: float

    def rows(self) -> list[int]:
        """Return the rows whose weight is not just rounding."""
        return [row for row, share in ((self.lower, self.share), (self.upper, 1 - self.share)) if share > _ROUNDING]

    def read(self, table: Tensor) -> Tensor:
        """Interpolate between rows of a table (n_stats, C) -> (C,)."""
        if self.share == 1.0:
            return table[self.lower]
        return table[self.lower] * self.share + table[self.upper] * (1 - self.share)


class TracedLookup(NamedTuple):
    """A `Lookup` of tensors, for tracing: one compiled graph then serves every truncation.

    Attributes:
        rows: (2,), int64, the lower and the upper row.
        share: scalar, float64, the weight of the lower row.
    """

    rows: Tensor
    share: Tensor

    def read(self, table: Tensor) -> Tensor:
        """Interpolate between rows of a table (n_stats, C) -> (C,)."""
        lower, upper = table.index_select(0, self.rows)
        share = self.share.to(table.dtype)
        return lower * share + upper * (1 - share)


AnyLookup: TypeAlias = Lookup | TracedLookup


def _look_up_in_graph(truncation: float, n_stats: int, device: torch.device | None = None) -> AnyLookup:
    # A Python float would become a constant of the graph. Worse, torch.compile was seen to keep the first value of a
    # rounded float for all later ones.
    position = torch.ones((), dtype=torch.float64, device=device) * truncation / (1.0 / (n_stats - 1))
    floor = position.floor()
    share = torch.where(position == floor, 1.0, position - floor)
    row = floor.long()
    return TracedLookup(torch.stack((row.clamp(max=n_stats - 1), (row + 1).clamp(max=n_stats - 1))), share)


@replaced_in_graphs(_look_up_in_graph)
def look_up(truncation: float, n_stats: int, device: torch.device | None = None) -> AnyLookup:
    """Find the statistics for a truncation in a table of `n_stats` rows, for truncations from 0 to 1 in equal steps.

    Between two rows the weights are the wrong way round: at three quarters of the way from the lower to the upper row,
    the lower row has weight 3/4. pytorch-pretrained-biggan does the same, and this model reproduces its images.
    """
    exact = float(truncation) / (1.0 / (n_stats - 1))
    lower = int(exact)
    # Rounding may lead past the last row.
    return Lookup(min(lower, n_stats - 1), min(lower + 1, n_stats - 1), (exact - lower) or 1.0)


class BigGANBatchNorm(nn.Module):
    """Batch normalization of (B, C, height, width), with statistics that depend on the truncation.

    In training mode it uses the statistics of the batch and leaves its tables unchanged; `BigGANModel.set_statistics`
    fills them.

    Args:
        config: configuration of the model.
        channels: C.
        conditional: whether scale and offset are linear functions of the condition (B, 2 z_dim). Otherwise they are
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
        self.moments: Moments | None = None

    def forward(self, x: Tensor, lookup: AnyLookup, condition: Tensor | None = None) -> Tensor:
        """Normalize x (B, C, height, width), with condition (B, 2 z_dim) if conditional."""
        if self.moments is not None:
            self.moments.update(x)
        if not self.conditional:
            mean, var = (None, None) if self.training else self._statistics(lookup)
            return functional.batch_norm(x, mean, var, self.weight, self.bias, training=self.training, eps=self.eps)
        if self.training:
            normal = functional.batch_norm(x, None, None, training=True, eps=self.eps)
        else:
            mean, var = self._statistics(lookup)
            normal = (x - mean[:, None, None]) / torch.sqrt(var[:, None, None] + self.eps)
        return normal * (1 + self.scale(condition))[..., None, None] + self.offset(condition)[..., None, None]

    def _statistics(self, lookup: AnyLookup) -> tuple[Tensor, Tensor]:
        """Mean and variance for a truncation, (C,) each."""
        return lookup.read(self.running_means), lookup.read(self.running_vars)


class Moments:
    """Running mean and sum of squared deviations of everything that enters a layer, (C,) each, in float64."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = self.squares = torch.zeros((), dtype=torch.float64)

    def update(self, x: Tensor) -> None:
        """Add x (B, C, height, width), by the pairwise update of Chan, Golub and LeVeque 1983, equation 2.1."""
        x = x.detach().double()
        count = x.numel() // x.shape[1]
        mean = x.mean((0, 2, 3))
        squares = ((x - mean[:, None, None]) ** 2).sum((0, 2, 3))
        total = self.count + count
        shift = mean - self.mean
        self.squares = self.squares + squares + shift**2 * (self.count * count / total)
        self.mean = self.mean + shift * (count / total)
        self.count = total


def rows_to_fill(truncations: Sequence[float] | None, n_stats: int) -> dict[float, list[int]]:
    """Map each truncation to the rows of a table that its statistics go into.

    Args:
        truncations: None stands for the truncations of all rows.
        n_stats: number of rows.

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
        assert isinstance(lookup, Lookup)
        found[truncation] = lookup.rows()
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
